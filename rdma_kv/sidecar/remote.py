"""The engine as its sidecar's agent sees it: kernels that run in another process, and memory that both map."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from rdma_kv.deaths import DeathWatch
from rdma_kv.errors import ClosedError, ConfigError, RdmaKvError, RemoteProtocolError
from rdma_kv.kernels import work as kernels
from rdma_kv.memory import HostMemory, SharedMemory
from rdma_kv.protocol.link import Process
from rdma_kv.sidecar.channel import Channel
from rdma_kv.sidecar.facts import error_of, work_of
from rdma_kv.sidecar.wire import Await, Lane, Mapped, Place, Segment, Work, Worked, encode
from rdma_kv.staging import Segment as StagingSegment

logger = logging.getLogger(__name__)

_MAP_S: Final = 30.0
"""How long an engine may take to map a segment; it takes microseconds, or until its loop has a turn."""

_DEATH_S: Final = 10.0
"""How long the last kernels of an engine are waited for, before memory of a GPU is kept for good."""

_DYING_S: Final = 2.0
"""After the end of its stream, a process that dies is dead within that time, or can be seen to be dying."""

_FLAGS: Final = 6  # of /proc/PID/stat, behind the process's name
_PF_EXITING: Final = 0x4  # Linux, since ever


class RemoteEvent:
    """Stands for a CUDA event of the engine's process, where works carry its number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def query(self) -> bool:
        """Nobody knows here whether it has fired."""
        return False

    def record(self, stream: object = None) -> None:
        """It was recorded before the engine told of it."""

    def wait(self, stream: object = None) -> None:
        """The stream that waits is in the engine's process."""


class _Range(NamedTuple):
    start: int
    end: int
    segment: int


class Places:
    """Where addresses of ours lie in the segments that the engine has mapped."""

    def __init__(self) -> None:
        self._ranges: list[_Range] = []

    def add(self, address: int, length_bytes: int, segment: int) -> None:
        self._ranges.append(_Range(address, address + length_bytes, segment))
        self._ranges.sort()

    def __getitem__(self, address: int) -> Place:
        found = self._ranges[bisect_right(self._ranges, (address, 1 << 63, 0)) - 1]
        assert found.start <= address < found.end, "a slot lies in a segment"
        return found.segment, address - found.start


class RemoteKernels:
    """`Kernels` that run in the engine's process. For one event loop.

    Args:
        process: the engine's, as it said; its proven death says that no kernel of it runs any more.
        on_gpu: whether the pools are on a GPU.
        on_dead: told when that death is proven. The end of the stream may come later, or never: a child that the engine has
            forked keeps it open.

    Attributes:
        lost: why no work is taken any more; None as long as they are.
    """

    def __init__(
        self, channel: Channel, places: Places, process: Process, *, on_gpu: bool, on_dead: Callable[[], None]
    ) -> None:
        self._channel = channel
        self._places = places
        self._on_gpu = on_gpu
        self._numbers = 0
        self._pending: dict[int, asyncio.Future[int | None]] = {}
        self._launches = (0, 0)
        self.lost: RdmaKvError | None = None
        self._unanswered = False  # we have given up works that may still run
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._dead = asyncio.Event()
        self._on_dead = on_dead
        self._deaths = DeathWatch(lambda _: self._died())
        self._deaths.watch("engine", process)
        self._pid = process.pid

    @property
    def launches(self) -> tuple[int, int]:
        """(gather, scatter) launches so far, as the engine last said."""
        return self._launches

    @property
    def busy(self) -> bool:
        """Whether works are not answered yet."""
        return bool(self._pending)

    async def start(self) -> None:
        """The engine has started its kernels before it attached."""

    async def close(self) -> bool:
        """Take no more works. Whether none can touch memory of this process any more."""
        try:
            if self.lost is None:
                self.lost = ClosedError("the kernels are closed")
                if await _within(_DEATH_S, self._quiet) and not self._unanswered:
                    return True
            if not self._on_gpu:
                return True  # a memfd outlives our mapping: what an engine without us still writes there is its own
            return await self._has_let_go()
        finally:
            self.unwatch()

    def unwatch(self) -> None:
        """Watch over the engine's process no more. Idempotent."""
        self._deaths.close()

    async def _has_let_go(self) -> bool:
        """Whether an engine that we have lost has no kernel on memory of our GPU: it is dead, or it lives and has closed its
        end, which a client does when its last kernel has ended. Where its death could not be seen there is no telling; and
        where it was us who ended the stream, over what came there, its end says nothing of the engine."""
        if "engine" not in self._deaths:
            return self._dead.is_set()
        if not await _within(_DEATH_S, self._channel.ended):
            return self._dead.is_set()
        if not self._channel.ended_there:
            return await _within(_DEATH_S, self._dead)
        if await _within(_DYING_S, self._dead) or not is_exiting(self._pid):
            return True
        return await _within(_DEATH_S, self._dead)  # large memory of a GPU takes its time to go

    async def gather(self, work: kernels.Work) -> int | None:
        """Pages to slot. Returns when the slot is filled: its checksum, if that is asked for.

        Raises:
            RdmaKvError: what the engine's kernels raised, or the engine is gone.
        """
        return await self._ask(work, scatter=False)

    async def scatter(self, work: kernels.Work) -> int | None:
        """Slot to pages. Returns when the pages are filled, or with a wrong checksum, and then no page was touched.

        Raises:
            RdmaKvError: as `gather`.
        """
        return await self._ask(work, scatter=True)

    async def fired(self, events: Sequence[Any]) -> None:
        """Returns when all CUDA events have fired. May be cancelled.

        Raises:
            RdmaKvError: as `gather`.
        """
        await self._say(lambda number: Await(number, [event.number for event in events]))

    def use_lane(self, lane: str) -> None:
        """A link's WRITEs go over `lane` from now on: launches must outrun it."""
        self._channel.send(encode(Lane(lane)))

    def _died(self) -> None:
        self._dead.set()
        self._on_dead()

    async def _ask(self, work: kernels.Work, *, scatter: bool) -> int | None:
        places = self._places

        def make(number: int) -> Work:
            return work_of(
                number,
                work.chunk,
                places[work.chunk.packed_address],
                places[work.bounce] if work.bounce else None,
                scatter=scatter,
                checksum=work.checksum,
                expected=work.expected,
                after=[event.number for event in work.after],
            )

        try:
            return await self._say(make)
        except ValueError as exc:
            text = f"{work.chunk.tokens} tokens in one chunk are too many for a sidecar; use smaller slots ({exc})"
            raise ConfigError("staging.slot_bytes", text) from exc

    async def _say(self, make: Callable[[int], Work | Await]) -> int | None:
        """Have something done, under the next number; its result."""
        if self.lost is not None:
            raise self.lost
        self._numbers += 1
        message = make(self._numbers)
        frame = encode(message)
        future: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._pending[message.work] = future
        self._quiet.clear()
        self._channel.send(frame)
        return await future

    def worked(self, who: str, message: Worked) -> None:
        """The outcome of a work.

        Raises:
            RemoteProtocolError: nobody has asked for it.
        """
        future = self._pending.pop(message.work, None)
        if future is None:
            raise RemoteProtocolError(who, f"work {message.work} was not asked for")
        self._launches = message.launches
        if not self._pending:
            self._quiet.set()
        if future.done():  # its caller was cancelled
            return
        if message.fault is None:
            future.set_result(message.result)
        else:
            future.set_exception(error_of(message.fault))

    def lose(self, error: RdmaKvError) -> None:
        """The engine is gone: what it was to do fails, now and from now on."""
        self.lost = error
        pending, self._pending = self._pending, {}
        self._unanswered = self._unanswered or bool(pending)
        for future in pending.values():
            if not future.done():
                future.set_exception(error)
        self._quiet.set()


def is_exiting(pid: int) -> bool:
    """Whether a process is on its way out, as the kernel says: its descriptors may be closed before its GPU has let go."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
        return bool(int(stat[stat.rindex(")") + 1 :].split()[_FLAGS]) & _PF_EXITING)
    except (OSError, ValueError, IndexError):
        return True  # it is gone, or cannot be seen


async def _within(seconds: float, event: asyncio.Event) -> bool:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()
    return event.is_set()


class RemoteEngine:
    """`EngineSide` over a channel: staging that the engine maps, and its kernels. For one event loop.

    Args:
        process, on_gpu, on_dead: as for `RemoteKernels`.
    """

    def __init__(self, channel: Channel, process: Process, *, on_gpu: bool, on_dead: Callable[[], None]) -> None:
        self._channel = channel
        self._places = Places()
        self._memories: list[SharedMemory] = []
        self._mapping: dict[int, asyncio.Future[None]] = {}
        self._kernels = RemoteKernels(channel, self._places, process, on_gpu=on_gpu, on_dead=on_dead)

    @property
    def kernels(self) -> RemoteKernels:
        return self._kernels

    @property
    def busy(self) -> bool:
        """Whether the engine has not answered yet for something that it was asked to do."""
        return self._kernels.busy or any(not mapping.done() for mapping in self._mapping.values())

    @property
    def staging_bytes(self) -> int:
        """Host memory that was made so far."""
        return sum(memory.length_bytes for memory in self._memories)

    def make_host(self, length_bytes: int) -> HostMemory:
        """Host memory for staging that the engine can map."""
        memory = SharedMemory(length_bytes)
        self._memories.append(memory)
        return memory

    async def share(self, segment: StagingSegment) -> None:
        """Have the engine map a segment; its slots are used when this has returned.

        Raises:
            RdmaKvError: the engine is gone, or cannot map it.
        """
        memory, device = segment.memory, segment.device
        assert isinstance(memory, SharedMemory)
        number = len(self._mapping)
        mapped = self._mapping[number] = asyncio.get_running_loop().create_future()
        handle = b"" if device is None else await asyncio.to_thread(device.export_handle)
        self._places.add(memory.address, memory.length_bytes, number)
        if device is not None:
            self._places.add(device.address, device.length_bytes, number)
        if self._kernels.lost is not None:
            raise self._kernels.lost
        self._channel.send(encode(Segment(number, memory.length_bytes, handle)), [memory.fd])
        try:
            async with asyncio.timeout(_MAP_S):
                await mapped
        except TimeoutError as exc:
            raise RemoteProtocolError(self._channel.name, f"did not map segment {number} within {_MAP_S} s") from exc
        finally:
            memory.close_fd()

    def mapped(self, who: str, message: Mapped) -> None:
        """The engine has mapped a segment, or could not.

        Raises:
            RemoteProtocolError: nobody waits for that.
        """
        waiting = self._mapping.get(message.segment)
        if waiting is None or waiting.done():
            raise RemoteProtocolError(who, f"segment {message.segment} waits for no mapping")
        if message.fault is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(error_of(message.fault))

    def lose(self, error: RdmaKvError) -> None:
        """The engine is gone."""
        self._kernels.lose(error)
        for waiting in self._mapping.values():
            if not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # nobody may wait for it any more

    def give_back(self) -> None:
        """After the agent has closed its data planes: the host memory goes back to the system.

        Where a peer's process might still write to it (over cma) its addresses stay reserved and inaccessible, as those of
        retired slots: the sidecar goes on, and must not find other memory of its own there.
        """
        for memory in self._memories:
            memory.close_fd()
            try:
                memory.retire(0, memory.length_bytes)
            except OSError as exc:
                logger.warning("%d bytes of staging stay allocated: %s", memory.length_bytes, exc)
        self._memories.clear()
