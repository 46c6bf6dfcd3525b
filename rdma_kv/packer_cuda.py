"""Gather and scatter of pools on a GPU: the event loop's side of `kernels.streams`.

Works of one turn of the loop are handed to the thread of the streams together, and what is done at a time comes back in one
call to the loop. The loop queues nothing itself: see `kernels.streams` for why. Torch is imported by `start`, in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final

from rdma_kv.config import GpuConfig
from rdma_kv.errors import ClosedError, ConfigError, LocalProtocolError, RegistrationError
from rdma_kv.kernels.programs import programs_for
from rdma_kv.kernels.schedule import Result
from rdma_kv.kernels.streams import KernelStreams
from rdma_kv.kernels.work import Work

_EXTRA: Final = "kernels on a GPU take torch with CUDA, triton and cffi: pip install 'rdma-kv[gpu]'"
_CLOSED: Final = "the kernels are closed"

Future = asyncio.Future[int | None]
Open = Callable[[GpuConfig, int], KernelStreams]
"""Makes the streams for a number of programs, ready to launch; may take seconds."""


def open_cuda(gpu: GpuConfig, programs: int) -> KernelStreams:
    """The streams of a real GPU, with the usual kernels compiled.

    Raises:
        ConfigError: as for `CudaKernels.start`.
    """
    try:
        streams = KernelStreams(gpu.device, programs=programs, priority=gpu.stream_priority)
    except (ImportError, RegistrationError) as exc:
        raise ConfigError("gpu", f"{exc}; {_EXTRA}") from exc
    try:
        streams.warm()
    except Exception as exc:
        streams.close()
        if isinstance(exc, ConfigError):
            raise
        text = f"its kernels cannot be compiled or run: {exc}; Triton takes a C compiler and a directory to write to"
        raise ConfigError("gpu", text) from exc
    return streams


class CudaKernels:
    """Gather and scatter of pools on one GPU. For one event loop; `start` comes first.

    Args:
        gpu: which GPU, and how much of it.
        open_streams: what makes the streams, in a thread.
    """

    def __init__(self, gpu: GpuConfig, open_streams: Open | None = None) -> None:
        self._gpu = gpu
        self._open = open_streams or open_cuda
        self._lanes: set[str] = set()
        self._streams: KernelStreams | None = None
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[bool, list[tuple[Future, Work]]] = {False: [], True: []}  # by whether they scatter

    @property
    def programs(self) -> int:
        """Of a launch: as configured, or the fewest that outrun all lanes so far."""
        if self._gpu.programs is not None:
            return self._gpu.programs
        return programs_for(self._lanes)

    @property
    def launches(self) -> tuple[int, int]:
        """(gather, scatter) launches so far."""
        return (0, 0) if self._streams is None else self._streams.launches

    def use_lane(self, lane: str) -> None:
        """A link's WRITEs go over `lane` from now on, as `Agent.stats` names it: launches must outrun it."""
        self._lanes.add(lane)
        if self._streams is not None:
            self._streams.programs = self.programs

    async def start(self) -> None:
        """Import torch, make the streams and compile the usual kernels: seconds the first time, all in a thread.

        What cannot be kept off the loop: an import of torch holds the interpreter for some 100 ms. An engine whose pools
        are on a GPU has it imported.

        Raises:
            ConfigError: no such GPU, something is not installed (field `gpu`), or a priority it does not have.
            ClosedError: it was closed meanwhile.
            LocalProtocolError: it has started, or is closed.
        """
        if self._loop is not None or self._closed:
            raise LocalProtocolError("the kernels can be started once")
        self._loop = asyncio.get_running_loop()
        opening = asyncio.ensure_future(asyncio.to_thread(self._open, self._gpu, self.programs))
        try:
            streams = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_discard)
            raise
        await self._adopt(streams)

    async def _adopt(self, streams: KernelStreams) -> None:
        if self._closed:
            await asyncio.to_thread(streams.close)
            raise ClosedError(_CLOSED)
        streams.programs = self.programs  # a lane may have come into use
        self._streams = streams

    async def gather(self, work: Work) -> int | None:
        """Pages to slot. Returns when the slot is filled (its bounce, if it has one): its checksum, if that is wanted.

        A launch goes on if the caller is cancelled. Its memory is in use until it is done all the same: whoever needs it
        back shields this call and waits for its end.

        Raises:
            ConfigError: the chunk cannot be one.
            LocalProtocolError: not started, or the GPU has failed.
            ClosedError: it was closed before the launch.
        """
        return await self._ask(work, scatter=False)

    async def scatter(self, work: Work) -> int | None:
        """Slot to pages. Returns when the pages are filled, or with a wrong checksum, and then no page was touched.

        See `gather` for all else.
        """
        return await self._ask(work, scatter=True)

    async def close(self) -> bool:
        """Take no more works, and wait up to ten seconds for what is queued on the GPU. Idempotent.

        Returns:
            Whether no kernel or copy can touch memory any more. If not, pools and staging must be kept for good.
        """
        self._closed = True
        self._hand_over()
        if self._streams is None:
            return True
        return await asyncio.shield(asyncio.ensure_future(asyncio.to_thread(self._streams.close)))

    # --- works ---------------------------------------------------------------------------------------------------------

    async def _ask(self, work: Work, *, scatter: bool) -> int | None:
        if self._closed:
            raise ClosedError(_CLOSED)
        loop = asyncio.get_running_loop()
        future: Future = loop.create_future()
        if not any(self._waiting.values()):
            loop.call_soon(self._hand_over)  # with what else gets ready in this turn of the loop
        self._waiting[scatter].append((future, work))
        return await future

    def _hand_over(self) -> None:
        for scatter, waiting in self._waiting.items():
            if not waiting:
                continue
            self._waiting[scatter] = []
            try:
                if self._closed:
                    raise ClosedError(_CLOSED)
                if self._streams is None:
                    raise LocalProtocolError("the kernels have not started")
                (self._streams.scatter if scatter else self._streams.gather)(waiting, self._done)
            except LocalProtocolError as error:
                _settle([(future, error) for future, _ in waiting])

    def _done(self, results: Sequence[tuple[Future, Result]]) -> None:
        """On the thread of the streams."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
            self._loop.call_soon_threadsafe(_settle, results)


def _settle(results: Sequence[tuple[Future, Result]]) -> None:
    for future, result in results:
        if future.done():
            continue
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)


def _discard(opening: asyncio.Future[KernelStreams]) -> None:
    """Nobody waits for the streams any more. They have no works, so that closing does not wait."""
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
