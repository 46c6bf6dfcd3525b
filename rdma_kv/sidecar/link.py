"""One connection of an engine's process to its sidecar, from ATTACH to its end, and the calls over it.

When the connection ends, whatever the reason, its calls fail only after the last kernel of this process has ended: until then
their pages are in use. Then the staging is unmapped, and a new connection may begin.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from rdma_kv.config import GpuConfig
from rdma_kv.cuda import Cuda
from rdma_kv.engine_side import Kernels
from rdma_kv.errors import LocalProtocolError, RdmaKvError, RemoteProtocolError, SidecarLostError
from rdma_kv.kernels import work as kernels_work
from rdma_kv.sidecar.channel import Channel
from rdma_kv.sidecar.facts import chunk_of, error_of, fault_of, replica_id
from rdma_kv.sidecar.memory import Mappings, Pools
from rdma_kv.sidecar.status import connect
from rdma_kv.sidecar.wire import (
    Answer,
    Ask,
    Attach,
    Attached,
    Await,
    Bye,
    Cancel,
    Detach,
    Ended,
    Failed,
    FromEngine,
    Lane,
    Mapped,
    Push,
    Receive,
    Segment,
    Send,
    Stats,
    Work,
    Worked,
    decode_of_sidecar,
    encode,
    frame_of_call,
)
from rdma_kv.tasks import Tasks
from rdma_kv.types import ReplicaId

logger = logging.getLogger(__name__)

ANSWER_S: Final = 20.0
"""How long after a call's own deadline, or its cancellation, the sidecar may take to say that it has ended. Its agent waits
`timeouts.quiesce` (10 s by default) for what was posted; a sidecar that takes longer is taken for lost."""

ATTACH_S: Final = 60.0
"""How long an attach may take: the sidecar starts an agent, and waits for the end of a former one with the same ranks."""

DETACH_S: Final = 30.0  # for the sidecar's agent to close
KERNELS_S: Final = 10.0  # for our own kernels, when the client closes

_LOOK_S: Final = 60.0  # between two warnings of kernels that do not end

_KEPT: Final[list[EngineLink]] = []
"""Connections whose staging a kernel of this process may still touch, for good."""


class RunningCall:
    """A call that the sidecar runs.

    Attributes:
        to: its counterpart, once known.
        error: why it has failed, as soon as that is known.
        deadline: of the call, in the loop's time.
    """

    def __init__(self, link: EngineLink, number: int, deadline: float, instead: RdmaKvError | None = None) -> None:
        self.number = number
        self.deadline = deadline
        self.to: ReplicaId | None = None
        self.error: RdmaKvError | None = None
        self.instead = instead  # raised in place of the outcome
        self._link = link
        self._answers: deque[asyncio.Future[Answer]] = deque()
        self._events: list[int] = []
        self.ended: asyncio.Future[Ended] = asyncio.get_running_loop().create_future()

    def say(self, message: FromEngine) -> None:
        self._link.say(message)

    def add_event(self, event: Any) -> int:  # noqa: ANN401 - a CUDA event
        """A number under which the sidecar can have kernels wait for a CUDA event of ours, until the call ends."""
        number = self._link.add_event(event)
        self._events.append(number)
        return number

    def expect_answer(self) -> None:
        """What was just said is answered: see `answer`."""
        self._answers.append(asyncio.get_running_loop().create_future())

    async def push(self, message: Push) -> None:
        """Say it, and wait for the answer.

        Raises:
            RdmaKvError: what the sidecar's agent raises; or the call has ended, for its reason.
        """
        self._link.send(frame_of_call(message))
        self.expect_answer()
        await self.answer(self._answers[-1])

    async def begun(self) -> None:
        """Wait for the answer to SEND.

        Raises:
            RdmaKvError: as `push`.
        """
        await self.answer(self._answers[-1])

    async def answer(self, future: asyncio.Future[Answer]) -> None:
        """Wait for one answer; raise its fault."""
        try:
            async with asyncio.timeout_at(self.deadline + ANSWER_S):
                either: list[asyncio.Future[Any]] = [future, self.ended]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            self._link.lose(f"has not answered within {ANSWER_S} s after the end of a call's time")
            await asyncio.wait([self.ended])
        if not future.done():
            self._raise_failure()
            raise LocalProtocolError("the call has ended")
        fault = future.result().fault
        if fault is not None:
            raise error_of(fault)

    async def outcome(self, *, soon: bool = False) -> Ended:
        """Wait for the end; raise why it failed. No page of the call is touched any more then.

        A cancelled caller waits all the same; `CancelledError` is raised afterwards.

        Args:
            soon: the sidecar was told to end the call; it is not given the call's whole time.
        """
        cancelled = False
        until = self.deadline + ANSWER_S
        if soon:
            until = min(until, asyncio.get_running_loop().time() + ANSWER_S)
        while not self.ended.done():
            try:
                async with asyncio.timeout_at(until):
                    await asyncio.wait([self.ended])
            except TimeoutError:
                self._link.lose(f"has not ended a call within {ANSWER_S} s after its time, or its cancellation")
                until += 3600.0  # now it is our own kernels that are waited for
            except asyncio.CancelledError:
                if not cancelled:
                    cancelled = True
                    self.say(Cancel(self.number))
                    until = min(until, asyncio.get_running_loop().time() + ANSWER_S)
        if cancelled:
            self.ended.exception()  # seen
            raise asyncio.CancelledError
        self._raise_failure()
        return self.ended.result()

    def _raise_failure(self) -> None:
        if not self.ended.done():
            return
        if self.instead is not None:
            self.ended.exception()
            raise self.instead
        fault = self.ended.result().fault
        if fault is not None:
            raise error_of(fault)

    # --- what the link hears -------------------------------------------------------------------------------------------

    def on_answer(self, message: Answer) -> bool:
        """The next answer, in order. False: none is due."""
        while self._answers:
            future = self._answers.popleft()
            self.to = replica_id(message.to) or self.to
            if not future.done():
                future.set_result(message)
            return True
        return False

    def end(self, outcome: Ended | RdmaKvError) -> None:
        """It is over, or lost."""
        for number in self._events:
            self._link.drop_event(number)
        if self.ended.done():
            return
        if isinstance(outcome, Ended):
            self.to = replica_id(outcome.to) or self.to
            if outcome.fault is not None:
                self.error = self.error or error_of(outcome.fault)
            self.ended.set_result(outcome)
        else:
            self.error = self.error or outcome
            self.ended.set_exception(outcome)
            self.ended.exception()  # nobody may wait for it


class EngineLink:
    """One connection. `open` comes first; `ended` is set when it is over and its calls have failed.

    Args:
        path: the sidecar's socket.
        pools: what its kernels may touch beside staging.
        cuda, gpu: where the pools are on a GPU.

    Attributes:
        error: why it has ended; None while it has not.
        ended: see above.
    """

    def __init__(self, path: Path, kernels: Kernels, pools: Pools, cuda: Cuda | None, gpu: GpuConfig | None) -> None:
        self.error: RdmaKvError | None = None
        self.ended = asyncio.Event()
        self.where = f"sidecar {path}"
        self._path = path
        self._kernels = kernels
        self._pools = pools
        self._mappings = Mappings(cuda, None if gpu is None else gpu.device)
        self._works = Tasks()
        self._waits = Tasks()  # for events; these can be given up
        self._calls: dict[int, RunningCall] = {}
        self._stats: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._events: dict[int, Any] = {}
        self._numbers = self._event_numbers = self._questions = 0
        self._channel: Channel | None = None
        self._attached: asyncio.Future[Attached] = asyncio.get_running_loop().create_future()
        self._ending: asyncio.Task[None] | None = None
        self._kept = False

    @property
    def up(self) -> bool:
        """Whether calls can begin."""
        return self.error is None and self._attached.done()

    @property
    def kept(self) -> bool:
        """Whether kernels that do not end have been given up: nothing that they use may go."""
        return self._kept

    @property
    def calls(self) -> tuple[RunningCall, ...]:
        return tuple(self._calls.values())

    async def open(self, message: Attach) -> Attached:
        """Connect and attach.

        Raises:
            SidecarLostError: nobody serves the socket, or it does not answer; another try may work.
            RdmaKvError: the sidecar refuses: its reason.
        """
        sock = await connect(self._path)
        self._channel = Channel(
            sock, name=self.where, on_frame=self._on_frame, on_lost=self._on_lost, take_fds=True, hold=True
        )
        self.say(message)
        try:
            async with asyncio.timeout(ATTACH_S):
                return await asyncio.shield(self._attached)
        except TimeoutError as exc:
            self.lose(f"has not attached us within {ATTACH_S} s")
            raise SidecarLostError(self.where, f"has not attached us within {ATTACH_S} s") from exc

    def say(self, message: FromEngine) -> None:
        """Send a message. On a connection that has ended it is dropped."""
        self.send(encode(message))

    def send(self, frame: bytes) -> None:
        """As `say`, of a message that is encoded already."""
        if self._channel is not None:
            self._channel.send(frame)

    def begin(self, deadline: float, make: Callable[[int], Send | Receive]) -> RunningCall:
        """Begin a call under the next number.

        Raises:
            ConfigError: an argument that no message can carry; nothing has begun.
        """
        message = make(self._numbers + 1)
        frame = frame_of_call(message)
        self._numbers += 1
        run = self._calls[self._numbers] = RunningCall(self, self._numbers, deadline)
        self.send(frame)
        if isinstance(message, Send):
            run.expect_answer()
        return run

    async def stats(self, timeout_s: float) -> dict[str, Any]:
        """`Agent.stats()` of the sidecar's agent.

        Raises:
            SidecarLostError: it is lost, or does not answer in time.
        """
        self._questions += 1
        number = self._questions
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._stats[number] = future
        self.say(Ask(number))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as exc:
            raise SidecarLostError(self.where, f"does not answer within {timeout_s} s") from exc
        finally:
            self._stats.pop(number, None)

    def add_event(self, event: Any) -> int:  # noqa: ANN401
        self._event_numbers += 1
        self._events[self._event_numbers] = event
        return self._event_numbers

    def drop_event(self, number: int) -> None:
        self._events.pop(number, None)

    def lose(self, why: str) -> None:
        """Give it up."""
        if self._channel is not None:
            self._channel.lose(SidecarLostError(self.where, why))
        else:
            self._on_lost(SidecarLostError(self.where, why))

    async def end_calls(self, why: RdmaKvError) -> None:
        """Have all calls end, and raise `why` to their callers. A sidecar that does not say so in `ANSWER_S` is lost."""
        calls = self.calls
        for run in calls:
            run.instead = why
            run.say(Cancel(run.number))
        if calls:
            _, left = await asyncio.wait([run.ended for run in calls], timeout=ANSWER_S)
            if left:
                self.lose(f"has not ended {len(left)} calls within {ANSWER_S} s")

    async def end_kernels(self) -> None:
        """Wait until the last kernel has ended, and that is said; `KERNELS_S` at most.

        One that waits for a CUDA event which never fires is not told to have ended when it is given up: staging stays
        mapped, and the stream open, until the process exits. So the sidecar keeps that memory too.
        """
        await self._works.drain(KERNELS_S)
        if len(self._works) and not self._kept:
            logger.error(
                "%d gathers or scatters do not end: staging stays mapped until this process exits", len(self._works)
            )
            self._kept = True
            _KEPT.append(self)

    async def detach(self) -> None:
        """End it in order, when no call runs and no kernel: the sidecar's agent closes first. Bounded."""
        if self._channel is None or not self._channel.open:
            return
        self.say(Detach())
        try:
            async with asyncio.timeout(DETACH_S):
                await self.ended.wait()
        except TimeoutError:
            logger.warning("%s has not closed our agent within %s s", self.where, DETACH_S)

    async def close(self) -> None:
        """End it at once, and wait until it is over. Idempotent."""
        self.lose("the client has closed the connection")
        await self.ended.wait()

    # --- what the sidecar says -----------------------------------------------------------------------------------------

    def _on_frame(self, body: bytes) -> None:
        match decode_of_sidecar(self.where, body):
            case Work() as message:
                self._works.spawn(self._work(message), f"work {message.work}")
            case Await() as message:
                self._waits.spawn(self._await(message), f"events of work {message.work}")
            case Answer() as message:
                run = self._calls.get(message.call)
                if run is None or not run.on_answer(message):
                    raise RemoteProtocolError(self.where, f"an answer to call {message.call}, which waits for none")
            case Failed() as message:
                run = self._calls.get(message.call)
                if run is not None:
                    run.error = run.error or error_of(message.fault)
            case Ended() as message:
                run = self._calls.pop(message.call, None)
                if run is None:
                    raise RemoteProtocolError(self.where, f"call {message.call} does not run")
                run.end(message)
            case Lane(lane):
                self._kernels.use_lane(lane)
            case Segment() as message:
                self._map(message)
            case Attached() as message:
                if not self._attached.done():
                    self._attached.set_result(message)
            case Stats(number, stats):
                future = self._stats.get(number)
                if future is not None and not future.done():
                    future.set_result(stats)
            case Bye(fault):
                raise error_of(fault)
            case message:
                raise RemoteProtocolError(self.where, f"{type(message).__name__} to a client")

    def _map(self, message: Segment) -> None:
        assert self._channel is not None
        if not self._channel.fds:
            raise RemoteProtocolError(self.where, f"segment {message.segment} came without its memory")
        self._works.spawn(self._map_segment(message, self._channel.fds.popleft()), f"map segment {message.segment}")

    async def _map_segment(self, message: Segment, fd: int) -> None:
        fault = None
        try:
            await self._mappings.add(self.where, message, fd)
        except RdmaKvError as exc:
            fault = fault_of(exc)
        except (OSError, ValueError) as exc:
            fault = fault_of(SidecarLostError(self.where, f"{message.length_bytes} bytes cannot be mapped: {exc}"))
        self.say(Mapped(message.segment, fault))

    async def _work(self, message: Work) -> None:
        """Run a kernel, if it touches nothing but our pools and the staging that was shared."""
        result, fault = None, None
        try:
            work = await self._check(message)
            result = await (self._kernels.scatter(work) if message.scatter else self._kernels.gather(work))
        except RdmaKvError as exc:
            if isinstance(exc, RemoteProtocolError):
                logger.error("refused: %s", exc)  # noqa: TRY400 - it is the sidecar's bug, and named
            fault = fault_of(exc)
        except Exception as exc:  # noqa: BLE001 - a kernel's own failure
            fault = fault_of(LocalProtocolError(f"gather or scatter failed: {exc!r}"))
        if not self._kept:
            self.say(Worked(message.work, result, self._kernels.launches, fault))

    async def _check(self, message: Work) -> kernels_work.Work:
        length_bytes = message.planes * (len(message.token_offset) // 8) * message.heads * message.row_bytes
        chunk = chunk_of(self.where, message, self._mappings.packed(self.where, message.packed, length_bytes))
        self._pools.check(self.where, chunk)
        bounce = 0
        if message.bounce is not None:
            bounce = await self._mappings.bounce(self.where, message.bounce, length_bytes)
        after = tuple(self._find_events(message.after))
        return kernels_work.Work(chunk, bounce, message.checksum, message.expected, after)

    async def _await(self, message: Await) -> None:
        fault = None
        try:
            await self._kernels.fired(self._find_events(message.events))
        except RdmaKvError as exc:
            fault = fault_of(exc)
        self.say(Worked(message.work, None, self._kernels.launches, fault))

    def _find_events(self, numbers: list[int]) -> list[Any]:
        if unknown := [number for number in numbers if number not in self._events]:
            raise RemoteProtocolError(self.where, f"event {unknown[0]} is not one of ours")
        return [self._events[number] for number in numbers]

    # --- the end -------------------------------------------------------------------------------------------------------

    def _on_lost(self, error: RdmaKvError) -> None:
        if self.error is not None:
            return
        if not self._attached.done():
            self._attached.set_exception(error)
            self._attached.exception()  # nobody may wait for it
        elif not isinstance(error, SidecarLostError):
            error = SidecarLostError(self.where, str(error))
        self.error = error
        for run in self._calls.values():
            run.error = run.error or error
        for future in self._stats.values():
            if not future.done():
                future.set_exception(error)
        self._ending = asyncio.create_task(self._end(error), name=f"end of {self.where}")

    async def _end(self, error: RdmaKvError) -> None:
        await self._waits.close()
        while len(self._works):
            await self._works.drain(_LOOK_S)
            if len(self._works):
                text = "%d gathers or scatters for %s, which is lost, still run; its calls and the next connection wait"
                logger.warning(text, len(self._works), self.where)
        if not self._kept:
            await self._mappings.close()
            if self._channel is not None:
                self._channel.release()
        calls, self._calls = self._calls, {}
        for run in calls.values():
            run.end(error)
        self.ended.set()
