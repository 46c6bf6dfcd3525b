"""Gather and scatter on a GPU, from any thread: what is asked for is queued on streams, what is done is called back.

One thread does both, queueing and looking at events; `schedule` has what it decides. Why one: a launch never waits for the
device (tables go up from pinned memory that is kept, the driver's queues are never filled, kernels were compiled by
`warm`), so it takes the thread some 100 us. Were events looked at by another thread, it would have to be woken after each
launch, which costs about as much as the launch of a small kernel, and both would fight for the interpreter's lock. The
caller's thread does not launch: a kernel that must be compiled after all, or a driver that another thread of the engine
keeps busy (cudaMalloc, a module that is loaded), would block its event loop. So a work costs two hops: to the thread and
back.

The thread sleeps without a timeout while nothing is under way, so idle costs nothing. Otherwise it looks at events: for the
first 50 us without a pause, which is what small launches take, then at intervals of an eighth of the time since something
happened last, from 20 us to 1 ms. In between others have the interpreter. All that was found done at one look is called
back together.

Torch and Triton are imported when the first `KernelStreams` is made.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from rdma_kv.errors import ClosedError, LocalProtocolError
from rdma_kv.kernels.device import Device
from rdma_kv.kernels.schedule import DeviceFailed, Done, Job, Schedule, Settled
from rdma_kv.kernels.work import Work

Keyed = tuple[Any, Work]
"""A work, and what its caller wants back when it is settled."""

SPIN_S: Final = 50e-6
"""So long after something happened events are looked at without a pause."""

PAUSES_S: Final = (20e-6, 1e-3)
"""Shortest and longest pause between two looks; between them a pause is an eighth of the time since something happened."""

_PR_SET_TIMERSLACK: Final = 29
_TIMER_SLACK_NS: Final = 1000
"""By which the kernel may prolong a sleep of this thread. The usual 50,000 would more than double the short ones."""

_LOST: Final[list[KernelStreams]] = []
"""Kept until the process exits: their kernels may still read tables of theirs, or the GPU has failed, and then giving pinned
memory back would end the process, as torch asks the GPU about it."""

_FAILED: Final = "the GPU has failed, and every call of CUDA in this process fails from now on: {}; restart the process"


class KernelStreams:
    """The streams of one GPU, and the thread that uses them. Its methods may be called from any thread.

    Args:
        ordinal: CUDA ordinal of the GPU.
        programs: of a launch, so at most as many multiprocessors; see `programs.fewest_programs`.
        priority: of all streams; the smallest runs first, 0 is that of other streams.
        copy: what queues copies; None is `Cuda.copy_async`.
        device: what to use instead of that GPU.

    Raises:
        ImportError: torch, triton or cffi are not installed.
        ConfigError: torch finds no such GPU, or it has no such priority; fields `gpu`, `gpu.device`, `gpu.stream_priority`.
        RegistrationError: libcuda cannot be used.
    """

    def __init__(
        self,
        ordinal: int,
        *,
        programs: int,
        priority: int,
        copy: Callable[[int, int, int, int, int], None] | None = None,
        device: Device | None = None,
    ) -> None:
        if device is None:
            from rdma_kv.kernels.device_torch import TorchDevice

            device = TorchDevice(ordinal, priority=priority, copy=copy)
        self._device: Device = device
        self._schedule = Schedule(device, programs)
        self._wake = threading.Condition()  # its lock is of the three below
        self._arrived: list[Job] = []
        self._refusal: tuple[type[LocalProtocolError], str] | None = None
        self._deadline: float | None = None  # once it is closing
        self._stuck = self._failed = False
        self._looks = 0
        self._thread = threading.Thread(target=self._run, name="rdma-kv-gpu", daemon=True)
        self._thread.start()

    @property
    def programs(self) -> int:
        """Of launches from now on; may be set at any time."""
        return self._schedule.programs

    @programs.setter
    def programs(self, programs: int) -> None:
        self._schedule.programs = programs

    @property
    def launches(self) -> tuple[int, int]:
        """(gather, scatter) launches so far."""
        return self._schedule.gathers, self._schedule.scatters

    @property
    def looks(self) -> int:
        """How often the thread has woken or looked at events: it stands still while nothing is under way."""
        return self._looks

    def warm(self) -> None:
        """Compile the usual kernels, in the calling thread: seconds, where they were never compiled on this machine.

        Raises:
            ConfigError: the device cannot run them.
        """
        self._device.warm(self.programs)

    def gather(self, works: Iterable[Keyed], done: Done) -> None:
        """Pages to slots. Returns at once.

        A work is done when its bytes are where the transport takes them: in the packed form, or in its bounce.

        Args:
            works: each with a key. What its arrays and addresses name stays as it is until the work is done.
            done: gets the keys of works that are done, with the checksum, None if there is none, or an RdmaKvError. Called
                on the thread of the streams, once for all that are done at a time; must be quick and not raise.

        Raises:
            ClosedError: after `close`; nothing was taken.
            LocalProtocolError: the GPU has failed; nothing was taken.
        """
        self._submit([Job(work, key, done, scatter=False) for key, work in works])

    def scatter(self, works: Iterable[Keyed], done: Done) -> None:
        """Slots to pages, as `gather`. The result is None, or the wrong checksum, and then no page was touched."""
        self._submit([Job(work, key, done, scatter=True) for key, work in works])

    def close(self, timeout_s: float = 10.0) -> bool:
        """Take no more works, and wait for what is queued on the device. What was not yet is ended by ClosedError.

        Args:
            timeout_s: how long to wait at most; a producer's event may never fire.

        Returns:
            Whether no kernel or copy can touch memory any more. If not, all memory of works must be kept for good.
        """
        with self._wake:
            if self._deadline is None:
                self._deadline = time.monotonic() + timeout_s
                self._refusal = self._refusal or (ClosedError, "the kernels are closed")
            self._wake.notify()
        self._thread.join()
        return not self._stuck

    def _submit(self, jobs: list[Job]) -> None:
        with self._wake:
            if self._refusal is not None:
                kind, why = self._refusal
                raise kind(why)
            self._arrived += jobs
            self._wake.notify()

    # --- on the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        _shorten_sleeps()
        try:
            self._device.enter()
        except Exception as failure:  # noqa: BLE001 - told to every caller
            self._fail(_FAILED.format(failure))
        schedule, since = self._schedule, time.monotonic()
        while self._wait(since):
            self._looks += 1
            with self._wake:
                arrived, self._arrived = self._arrived, []
            schedule.add(arrived)
            if self._deadline is not None:
                _tell(schedule.abandon(ClosedError, "the kernels are closed", flights=False))
            before = schedule.gathers, schedule.scatters
            try:
                settled = schedule.turn()
            except DeviceFailed as failure:
                self._fail(_FAILED.format(failure))
                continue
            except Exception as failure:  # noqa: BLE001 - without this thread all callers would wait for ever
                self._stuck = schedule.flying
                self._fail(f"the thread of the kernels failed: {failure!r}")
                continue
            _tell(settled)
            if settled or arrived or before != (schedule.gathers, schedule.scatters):
                since = time.monotonic()
        schedule.add(self._arrived)
        self._stuck = self._stuck or schedule.flying
        _tell(
            schedule.abandon(LocalProtocolError, "closed before the GPU was done; the memory is in use", flights=True)
        )
        if self._stuck or self._failed:
            _LOST.append(self)
        else:
            self._device.close()

    def _wait(self, since: float) -> bool:
        """Sleep until there is something to look at. Whether there ever will be.

        Args:
            since: when something happened last.
        """
        schedule = self._schedule
        with self._wake:
            while not (self._arrived or schedule.busy):
                if self._deadline is not None:
                    return False
                self._wake.wait()
                self._looks += 1
            now = time.monotonic()
            if self._deadline is not None and now >= self._deadline:
                return False
            idle_s = now - since
            if self._arrived or schedule.can_launch or idle_s < SPIN_S:
                pause_s = 0.0
            else:
                pause_s = min(max(idle_s / 8, PAUSES_S[0]), PAUSES_S[1])
                self._wake.wait(pause_s)
        if not pause_s:
            time.sleep(0)  # gives the interpreter to whoever waits for it
        return True

    def _fail(self, text: str) -> None:
        """End all works, now and from now on."""
        self._failed = True
        with self._wake:
            self._refusal = self._refusal or (LocalProtocolError, text)
            arrived, self._arrived = self._arrived, []
        self._schedule.add(arrived)
        _tell(self._schedule.abandon(LocalProtocolError, text, flights=True))


def _tell(settled: Iterable[Settled]) -> None:
    """Call back, once for each receiver."""
    by_receiver: dict[Done, list[tuple[Any, Any]]] = {}
    for job, result in settled:
        by_receiver.setdefault(job.done, []).append((job.key, result))
    for done, results in by_receiver.items():
        done(results)


def _shorten_sleeps() -> None:
    """Of this thread. Elsewhere than on Linux they are as long as they are."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(_TIMER_SLACK_NS), 0, 0, 0)
