"""A link whose calls of UCX have a CUDA context, for transports that may move memory of GPUs. See `rdma_kv.cuda`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from rdma_kv.transport.regions import RegionTable
from rdma_kv.transport.ucx_binding import Handle, Ucx
from rdma_kv.transport.ucx_link import Hooks, UcxLink
from rdma_kv.transport.ucx_writes import Memory

Current = Callable[[], contextlib.AbstractContextManager[None]]


class CudaLink(UcxLink):
    """A `UcxLink`. `current` is entered around all that calls UCX."""

    def __init__(
        self, ucx: Ucx, context: Handle, memory: Memory, names: tuple[str, str], hooks: Hooks, *, current: Current
    ) -> None:
        self._current = current
        with current():
            super().__init__(ucx, context, memory, names, hooks)

    def connect(self, address: bytes, regions: RegionTable, rkeys: Sequence[bytes], hello: bytes) -> None:
        """Also looks whether the peer's GPU memory is in reach: that of the context's device, by mapping it."""
        with self._current():
            super().connect(address, regions, rkeys, hello)

    def set_listening(self, listening: bool) -> None:
        with self._current():
            super().set_listening(listening)

    def turn(self, until: float) -> bool:
        with self._current():
            return super().turn(until)

    def begin_end(self, status: str) -> None:
        with self._current():
            super().begin_end(status)

    def destroy(self) -> None:
        with self._current():
            super().destroy()
