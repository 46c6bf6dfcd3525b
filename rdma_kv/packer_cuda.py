"""Gather and scatter of pools on a GPU, from the event loop: what is asked for is queued on streams, what is done settled.

The loop's thread does both, queueing and looking at events, in *pumps*: callbacks of the loop, one a turn of the loop at
most. `kernels.schedule` has what they decide. A pump takes up all works of the turn before, launches what is ready, at most
one launch a stream, and looks at all events that something waits for. So a work costs no thread that has to be woken (50 to
200 us each on a machine whose processors sleep) and none that fights with the loop for the interpreter.

**What a pump may cost the loop.** A launch only queues: 60 to 90 us, tables included, and below 1 ms with as many works as
one launch takes. It waits for no GPU: tables go up from pinned memory that is kept, the driver's queues are never filled,
and kernels and what streams allocate were made by `start`. A kernel that is not compiled all the same is compiled in a
thread, and its works wait. What is left: the driver has locks, and a thread of the engine that frees or allocates memory of
the GPU (cudaFree, cudaHostAlloc, torch's caches where they grow), or loads a module, may hold one for milliseconds. Engines
allocate when they start. `slow_launches` counts what did take long.

**How an end is noticed.** After a launch or an end the loop looks again in its next turn, other callbacks run in between, as
long as `kernels.spin` finds that it pays. What takes longer a thread watches (`kernels.poller`), and wakes the loop.

The thread of the loop may be the engine's: its current device, its current stream and its part in captures of CUDA graphs
are left as they were. Torch is imported by `start`, in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from rdma_kv.config import GpuConfig
from rdma_kv.errors import ClosedError, ConfigError, LocalProtocolError, RegistrationError
from rdma_kv.kernels.device import Device
from rdma_kv.kernels.poller import Poller
from rdma_kv.kernels.programs import programs_for
from rdma_kv.kernels.schedule import LAUNCH_BYTES, DeviceFailed, Job, Schedule, Settled, Uncompiled, Watch
from rdma_kv.kernels.spin import Spin
from rdma_kv.kernels.work import Work

SLOW_S: Final = 2e-3
"""A launch that takes the loop longer is counted."""

CLOSE_S: Final = 10.0
"""So long `close` waits for the GPU; a producer's event may never fire."""

_EXTRA: Final = "kernels on a GPU take torch with CUDA, triton and cffi: pip install 'rdma-kv[gpu]'"
_CLOSED: Final = "the kernels are closed"
_FAILED: Final = "the GPU has failed, and every call of CUDA in this process fails from now on: {}; restart the process"

_LOST: Final[list[tuple[Schedule, Device]]] = []
"""Kept until the process exits: their kernels may still read tables of theirs, or the GPU has failed, and then giving pinned
memory back would end the process, as torch asks the GPU about it."""

Future = asyncio.Future[int | None]
Open = Callable[[GpuConfig], Device]
"""Makes the device, in a thread."""


def open_cuda(gpu: GpuConfig) -> Device:
    """A real GPU.

    Raises:
        ConfigError: as for `CudaKernels.start`.
    """
    try:
        from rdma_kv.kernels.device_torch import TorchDevice

        return TorchDevice(gpu.device, priority=gpu.stream_priority)
    except (ImportError, RegistrationError) as exc:
        raise ConfigError("gpu", f"{exc}; {_EXTRA}") from exc


class CudaKernels:
    """Gather and scatter of pools on one GPU. For one event loop; `start` comes first.

    Args:
        gpu: which GPU, and how much of it.
        open_device: what makes the device.
        clock: seconds.
    """

    def __init__(
        self, gpu: GpuConfig, open_device: Open = open_cuda, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._gpu = gpu
        self._open = open_device
        self._clock = clock
        self._lanes: set[str] = set()
        self._started = False
        self._pumps: _Pumps | None = None
        self._closing: asyncio.Task[bool] | None = None

    @property
    def programs(self) -> int:
        """Of a launch: as configured, or the fewest that outrun all lanes so far."""
        if self._gpu.programs is not None:
            return self._gpu.programs
        return programs_for(self._lanes)

    @property
    def launches(self) -> tuple[int, int]:
        """(gather, scatter) launches so far."""
        return (0, 0) if self._pumps is None else self._pumps.launches

    @property
    def slow_launches(self) -> int:
        """How often launches of one pump held up the loop for over 2 ms, that is, waited for something: see the module."""
        return 0 if self._pumps is None else self._pumps.slow_launches

    def use_lane(self, lane: str) -> None:
        """A link's WRITEs go over `lane` from now on, as `Agent.stats` names it: launches must outrun it."""
        self._lanes.add(lane)
        if self._pumps is not None:
            self._pumps.set_programs(self.programs)

    async def start(self) -> None:
        """Import torch, make the streams and compile the usual kernels: seconds the first time, all in a thread.

        What cannot be kept off the loop: an import of torch holds the interpreter for some 100 ms. An engine whose pools
        are on a GPU has it imported.

        Raises:
            ConfigError: no such GPU, something is not installed (field `gpu`), or a priority it does not have.
            ClosedError: it was closed meanwhile.
            LocalProtocolError: it has started, or is closed.
        """
        if self._started or self._is_closed():
            raise LocalProtocolError("the kernels can be started once")
        self._started = True
        opening = asyncio.ensure_future(asyncio.to_thread(self._make))
        try:
            device, schedule = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_discard)
            raise
        if self._is_closed():
            await asyncio.to_thread(device.close)
            raise ClosedError(_CLOSED)
        self._pumps = _Pumps(device, schedule, self._clock)
        self._pumps.set_programs(self.programs)  # a lane may have come into use

    def _make(self) -> tuple[Device, Schedule]:
        """In a thread."""
        device = self._open(self._gpu)
        try:
            schedule = Schedule(device, self.programs, self._clock)
            device.warm(self.programs)
        except Exception as exc:
            device.close()
            if isinstance(exc, ConfigError):
                raise
            text = (
                f"its kernels cannot be compiled or run: {exc}; Triton takes a C compiler and a directory to write to"
            )
            raise ConfigError("gpu", text) from exc
        return device, schedule

    async def gather(self, work: Work) -> int | None:
        """Pages to slot. Returns when the slot is filled (its bounce, if it has one): its checksum, if that is wanted.

        A launch goes on if the caller is cancelled. Its memory is in use until it is done all the same: whoever needs it
        back shields this call and waits for its end. What the work's arrays and addresses name stays as it is until then.

        Raises:
            ConfigError: the chunk cannot be one.
            LocalProtocolError: not started, or the GPU has failed.
            ClosedError: it was closed before the launch.
        """
        return await self._taking().ask(work, scatter=False)

    async def scatter(self, work: Work) -> int | None:
        """Slot to pages. Returns when the pages are filled, or with a wrong checksum, and then no page was touched.

        See `gather` for all else.
        """
        return await self._taking().ask(work, scatter=True)

    async def fired(self, events: Sequence[Any]) -> None:
        """Returns when all CUDA events have fired. May be cancelled.

        Raises:
            LocalProtocolError: what was given is no event, not started, or the GPU has failed.
            ClosedError: it was closed before they fired.
        """
        await self._taking().fired(events)

    def _is_closed(self) -> bool:
        return self._closing is not None

    def _taking(self) -> _Pumps:
        if self._is_closed():
            raise ClosedError(_CLOSED)
        if self._pumps is None:
            raise LocalProtocolError("the kernels have not started")
        return self._pumps

    async def close(self) -> bool:
        """Take no more works, and wait up to ten seconds for what is queued on the GPU. Idempotent.

        Returns:
            Whether no kernel or copy can touch memory any more. If not, pools and staging must be kept for good.
        """
        if self._closing is None:
            if self._pumps is not None:
                self._pumps.refuse()
            self._closing = asyncio.ensure_future(self._close())
        return await asyncio.shield(self._closing)

    async def _close(self) -> bool:
        return True if self._pumps is None else await self._pumps.close()


class _Waits:
    """Callers that wait for events and nothing else."""

    def __init__(self) -> None:
        self._waits: list[tuple[asyncio.Future[None], Sequence[Any], float]] = []

    def add(self, future: asyncio.Future[None], events: Sequence[Any], now: float) -> None:
        self._waits.append((future, events, now))

    def look(self) -> None:
        """Settle those whose events have fired."""
        waits, self._waits = self._waits, []
        for future, events, since in waits:
            if future.done():
                continue
            try:
                pending = [event for event in events if not event.query()]
            except Exception as exc:  # noqa: BLE001 - not an event, or the device has failed
                error = LocalProtocolError(f"an event cannot be waited for: {exc}")
                error.__cause__ = exc
                future.set_exception(error)
                continue
            if pending:
                self._waits.append((future, pending, since))
            else:
                future.set_result(None)

    def watched(self) -> list[Watch]:
        return [Watch(event, since) for _, events, since in self._waits for event in events]

    def end(self, kind: type[LocalProtocolError], why: str) -> None:
        waits, self._waits = self._waits, []
        for future, _, _ in waits:
            if not future.done():
                future.set_exception(kind(why))

    def __bool__(self) -> bool:
        return bool(self._waits)


class _Pumps:
    """A started GPU: the works that are under way, and the pumps that move them. On the thread of the running loop."""

    def __init__(self, device: Device, schedule: Schedule, clock: Callable[[], float]) -> None:
        self._loop = asyncio.get_running_loop()
        self._device, self._schedule, self._clock = device, schedule, clock
        self._arrived: list[Job] = []
        self._waits = _Waits()
        self._soon = False  # a pump is a callback of the loop's next turn
        self._spin = Spin()
        self._poller = Poller(device.enter, self._wake, clock)
        self._compiling: set[asyncio.Future[None]] = set()
        self._refusal: tuple[type[LocalProtocolError], str] | None = None
        self._stuck = self._failed = self._ended = False
        self._drained: Future | None = None  # is set once nothing is on the GPU, when it closes
        self.slow_launches = 0

    @property
    def launches(self) -> tuple[int, int]:
        return self._schedule.gathers, self._schedule.scatters

    def set_programs(self, programs: int) -> None:
        self._schedule.programs = programs

    async def fired(self, events: Sequence[Any]) -> None:
        self._check()
        future: asyncio.Future[None] = self._loop.create_future()
        self._waits.add(future, tuple(events), self._clock())
        self._pump_soon()
        try:
            await future
        finally:
            if future.cancelled():
                self._pump_soon()  # so that its events are not watched any more

    def _check(self) -> None:
        """Raises why nothing is taken any more."""
        if self._refusal is not None:
            kind, why = self._refusal
            raise kind(why)

    async def ask(self, work: Work, *, scatter: bool) -> int | None:
        self._check()
        try:
            fills_a_launch = work.chunk.packed_bytes >= LAUNCH_BYTES
        except (AttributeError, IndexError, TypeError):  # arrays that are none, or of another shape
            work.chunk.validate()
            raise
        future: Future = self._loop.create_future()
        self._arrived.append(Job(work, future, scatter))  # with what else gets ready in this turn of the loop
        if fills_a_launch and not (self._soon or self._schedule.busy):
            self._pump()  # it would share a launch with nothing, and the GPU idles
        else:
            self._pump_soon()
        return await future

    def refuse(self) -> None:
        """Take no more works, and end those that are not queued on the GPU."""
        self._refusal = self._refusal or (ClosedError, _CLOSED)
        self._schedule.add(self._arrived)
        self._arrived.clear()
        self._end_the_rest(*self._refusal)

    def _end_the_rest(self, kind: type[LocalProtocolError], why: str) -> None:
        """End what is not queued on the GPU."""
        _settle(self._schedule.abandon(kind, why, flights=False))
        self._waits.end(kind, why)

    async def close(self) -> bool:
        """After `refuse`."""
        if self._schedule.flying:
            self._drained = self._loop.create_future()
            self._pump_soon()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._drained, CLOSE_S)
        self._stuck = self._stuck or self._schedule.flying
        _settle(
            self._schedule.abandon(
                LocalProtocolError, "closed before the GPU was done; the memory is in use", flights=True
            )
        )
        if self._compiling:
            await asyncio.wait(self._compiling)
        self._ended = True
        await asyncio.to_thread(self._end)
        return not self._stuck

    def _end(self) -> None:
        """In a thread."""
        self._poller.close()
        if self._stuck or self._failed:
            _LOST.append((self._schedule, self._device))
        else:
            self._device.close()

    # --- pumps ---------------------------------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        if not self._soon:
            self._soon = True
            self._loop.call_soon(self._pump)

    def _wake(self) -> None:
        """On the poller's thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
            self._loop.call_soon_threadsafe(self._woken)

    def _woken(self) -> None:
        if not self._soon:  # else it looks in this turn or the next all the same
            self._pump()

    def _pump(self) -> None:
        self._soon = False
        if self._ended:
            return
        schedule = self._schedule
        launched = schedule.gathers + schedule.scatters
        settled: list[Settled] = []
        began = self._clock()
        if self._arrived:
            schedule.add(self._arrived)
            self._arrived = []
        try:
            with self._device.current():
                settled = schedule.turn()
                if self._waits:
                    self._waits.look()
        except (DeviceFailed, RegistrationError) as failure:
            self._fail(_FAILED.format(failure))
        except Exception as failure:  # noqa: BLE001 - without pumps all callers would wait for ever
            self._stuck = schedule.flying
            self._fail(f"a pump of the kernels failed: {failure!r}")
        now = self._clock()
        if schedule.gathers + schedule.scatters != launched:
            self._spin.begun()
            if now - began > SLOW_S:
                self.slow_launches += 1
        if settled:
            self._spin.found()
            _settle(settled)
        if self._refusal is not None:
            self._end_the_rest(*self._refusal)  # what has landed may have another step to go
        if schedule.uncompiled:
            self._compile()
        self._go_on(now)

    def _go_on(self, now: float) -> None:
        """See to it that there is another pump once something can come of it."""
        schedule = self._schedule
        if schedule.can_launch or (schedule.busy and self._spin.goes_on(now, schedule.due)):
            self._poller.watch(())
            self._pump_soon()
        else:
            self._poller.watch([*schedule.watched(), *self._waits.watched()])
        if self._drained is not None and not (self._drained.done() or schedule.flying):
            self._drained.set_result(None)

    def _fail(self, text: str) -> None:
        """End all works, now and from now on."""
        self._failed = True
        self._refusal = self._refusal or (LocalProtocolError, text)
        _settle(self._schedule.abandon(LocalProtocolError, text, flights=True))
        self._waits.end(LocalProtocolError, text)

    # --- kernels that are not compiled ---------------------------------------------------------------------------------

    def _compile(self) -> None:
        waiting = tuple(self._schedule.uncompiled)
        self._schedule.uncompiled.clear()
        for uncompiled in waiting:
            try:
                compiling = self._loop.run_in_executor(None, self._prepare, uncompiled)
            except RuntimeError as exc:  # no thread can be had: the works fail, and the pump goes on for all others
                self._schedule.resume(uncompiled, exc)
                self._pump_soon()
                continue
            self._compiling.add(compiling)
            compiling.add_done_callback(partial(self._compiled, uncompiled))

    def _prepare(self, uncompiled: Uncompiled) -> None:
        """In a thread."""
        with self._device.current():
            uncompiled.prepare()

    def _compiled(self, uncompiled: Uncompiled, done: asyncio.Future[None]) -> None:
        self._compiling.discard(done)
        if self._refusal is not None:
            kind, why = self._refusal
            _settle((job, kind(why)) for job in uncompiled.jobs)
            return
        failure = done.exception()
        self._schedule.resume(uncompiled, failure if isinstance(failure, Exception) else None)
        self._pump_soon()


def _settle(settled: Iterable[Settled]) -> None:
    for job, result in settled:
        future: Future = job.key
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def _discard(opening: asyncio.Future[tuple[Device, Schedule]]) -> None:
    """Nobody waits for the device any more, and nothing is queued on it."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result()[0].close()
