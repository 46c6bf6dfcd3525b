"""Gather and scatter of pools in host memory, on one worker thread, never on the event loop.

Boxes that are ready when a launch begins share it, up to 2 MiB, whatever transfer or replica they belong to. Checksums of
slots are computed there too: behind the gather, while the slot is in the cache, and before the scatter.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rdma_kv.kernels.checksum import Piece, checksums
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.work import Work

_LAUNCH_BYTES = 2 << 20
"""A launch on the host takes no more once it has so many bytes: its boxes are all done only when the last one is, and
their WRITEs, or slots, wait so long."""

Kernel = Callable[[Sequence[Chunk]], None]
_Launch = Callable[[Kernel, Sequence[Work]], Sequence[int | None]]
_Waiting = tuple[Work, asyncio.Future[int | None]]


class HostKernels:
    """Gather and scatter of pools in host memory.

    Args:
        gather, scatter: the kernels; `Batcher.kernel` of `gathers` and `scatters` from here on.
    """

    def __init__(self, gather: Kernel, scatter: Kernel) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="rdma-kv-packer")
        self.gathers = Batcher(gather, _gather_launch, self._executor)
        self.scatters = Batcher(scatter, _scatter_launch, self._executor)

    @property
    def launches(self) -> tuple[int, int]:
        """(gather, scatter) launches so far."""
        return self.gathers.launches, self.scatters.launches

    async def start(self) -> None:
        """There is nothing to do."""

    async def close(self) -> bool:
        """End the thread after what it does now. Whether no kernel runs any more; otherwise one may, for a moment."""
        self._executor.shutdown(wait=False)
        return not (self.gathers.running or self.scatters.running)

    async def gather(self, work: Work) -> int | None:
        """Pages to slot. Returns when the slot is filled: its checksum, if that is asked for."""
        return await self.gathers.run(work)

    async def scatter(self, work: Work) -> int | None:
        """Slot to pages. Returns when the pages are filled, or with a wrong checksum, and then no page was touched."""
        return await self.scatters.run(work)

    async def fired(self, events: Sequence[Any]) -> None:
        """Pools in host memory have no events."""

    def use_lane(self, lane: str) -> None:
        """On the host a launch takes one thread, whatever the lane."""


def _sums(works: Sequence[Work]) -> list[int | None]:
    """The checksums that are needed, each in its work's place."""
    pieces = [Piece(work.chunk.packed_address, work.chunk.packed_bytes) for work in works if work.checksum]
    found = iter(checksums(pieces) if pieces else ())
    return [next(found) if work.checksum else None for work in works]


def _gather_launch(kernel: Kernel, works: Sequence[Work]) -> Sequence[int | None]:
    """Gather all, then sum them up. Per work: its checksum, if one is needed."""
    kernel([work.chunk for work in works])
    return _sums(works)


def _scatter_launch(kernel: Kernel, works: Sequence[Work]) -> Sequence[int | None]:
    """Scatter those whose checksum is as expected. Per work: None, or the other checksum that its chunk has."""
    found = _sums([work._replace(checksum=work.expected is not None) for work in works])
    wrong = [None if each == work.expected else each for work, each in zip(works, found, strict=True)]
    good = [work.chunk for work, each in zip(works, wrong, strict=True) if each is None]
    if good:
        kernel(good)
    return wrong


class Batcher:
    """Runs a kernel on the worker thread over everything that waits at that moment; each work has a result of its own.

    The thread takes the next launch by itself: while the loop is busy, with the copying of a transport for instance, the
    work goes on.
    """

    def __init__(self, kernel: Kernel, launch: _Launch, executor: ThreadPoolExecutor) -> None:
        self.kernel = kernel
        self.launches = 0
        self._launch = launch
        self._executor = executor
        self._lock = threading.Lock()  # of the two below
        self._waiting: list[_Waiting] = []
        self._running = False

    @property
    def running(self) -> bool:
        """Whether a launch is under way, or about to begin."""
        return self._running

    async def run(self, work: Work) -> int | None:
        """Returns when the kernel is done with the work: its result. A launch goes on if the caller is cancelled."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[int | None] = loop.create_future()
        with self._lock:
            self._waiting.append((work, done))
            begin, self._running = not self._running, True
        if begin:
            loop.call_soon(self._begin, loop)  # with what else gets ready in this turn of the loop
        return await done

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._executor.submit(self._work, loop)
        except RuntimeError as exc:  # the executor was shut down
            with self._lock:
                waiting, self._waiting, self._running = self._waiting, [], False
            _settle(waiting, (), exc)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """On the worker thread."""
        while batch := self._next():
            self.launches += 1
            results: Sequence[int | None] = ()
            error = None
            try:
                results = self._launch(self.kernel, [work for work, _ in batch])
            except Exception as exc:  # noqa: BLE001 - reported to every caller of this launch
                error = exc
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(_settle, batch, results, error)

    def _next(self) -> list[_Waiting]:
        """Take what goes into one launch: everything, or as much as is not worth waiting for the rest."""
        with self._lock:
            count = num_bytes = 0
            for work, _ in self._waiting:
                count += 1
                num_bytes += work.chunk.packed_bytes
                if num_bytes >= _LAUNCH_BYTES:
                    break
            batch, self._waiting = self._waiting[:count], self._waiting[count:]
            self._running = bool(batch)
        return batch


def _settle(batch: Sequence[_Waiting], results: Sequence[int | None], error: Exception | None) -> None:
    for place, (_, done) in enumerate(batch):
        if done.done():
            continue
        if error is None:
            done.set_result(results[place])
        else:
            done.set_exception(error)
