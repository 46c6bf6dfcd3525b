"""What the engine's process lets its sidecar reach: the pools that were registered, and the staging that was mapped.

The sidecar computes every address that a kernel touches. It is trusted to be honest, not to be free of bugs, or to speak of
the life that the engine is in: so nothing outside of these ranges is ever read or written for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os

import numpy as np

from rdma_kv.cuda import Cuda
from rdma_kv.errors import RdmaKvError, RemoteProtocolError
from rdma_kv.kernels.launch import Chunk
from rdma_kv.layout import Int64Array
from rdma_kv.sidecar.wire import Place, Segment


class Pools:
    """The registered memory of an engine's process, as sorted ranges."""

    def __init__(self) -> None:
        self._starts = np.empty(0, np.int64)
        self._ends = np.empty(0, np.int64)

    def add(self, addresses: Int64Array, sizes: Int64Array) -> None:
        """Take buffers, int64 `[buffers]`. They overlap no others: the packer has seen to that."""
        starts = np.concatenate([self._starts, addresses])
        ends = np.concatenate([self._ends, addresses + sizes])
        order = np.argsort(starts, kind="stable")
        self._starts, self._ends = starts[order], ends[order]

    def check(self, who: str, chunk: Chunk) -> None:
        """See that all rows of a chunk lie in buffers, each plane's in one.

        Raises:
            RemoteProtocolError: they do not.
        """
        if not chunk.packed_bytes:
            return
        extent = (chunk.heads - 1) * chunk.head_stride + chunk.row_bytes
        for line, pointers in enumerate(chunk.pointers):
            offsets = chunk.token_offset[chunk.token_pool == line] if len(chunk.pointers) > 1 else chunk.token_offset
            if not offsets.size:
                continue
            low, high = int(offsets.min()), int(offsets.max()) + extent
            if low < 0 or high > 1 << 62 or int(pointers.max()) > 1 << 62:
                raise RemoteProtocolError(who, f"a chunk reaches from {low} to {high} behind its planes")
            first = pointers + low
            place = np.searchsorted(self._starts, first, side="right") - 1
            inside = place >= 0
            inside[inside] = pointers[inside] + high <= self._ends[place[inside]]
            if not inside.all():
                outside = int(first[~inside][0])
                text = f"a chunk at {outside:#x}, {high - low} bytes, lies outside of the registered pools"
                raise RemoteProtocolError(who, text)


class _Mapped:
    """One segment of staging, mapped here."""

    def __init__(self, mapping: mmap.mmap, length_bytes: int) -> None:
        self.mapping = mapping
        self.view = np.frombuffer(mapping, dtype=np.uint8)
        self.host = int(self.view.ctypes.data)
        self.length_bytes = length_bytes
        self.device = 0  # address on the GPU; 0 where the pools are in host memory
        self.pinned = False


class Mappings:
    """The segments of staging that the sidecar has shared, by their numbers.

    A segment stays mapped as long as the connection: the sidecar does not say when its slots are retired, and zeros that
    nobody reads cost nothing.

    Args:
        ordinal: of the GPU with the pools; None is host memory.
    """

    def __init__(self, cuda: Cuda | None, ordinal: int | None) -> None:
        self._cuda = cuda
        self._ordinal = ordinal
        self._mapped: dict[int, _Mapped] = {}
        self._pinning = asyncio.Lock()

    def __len__(self) -> int:
        return len(self._mapped)

    async def add(self, who: str, message: Segment, fd: int) -> None:
        """Map a segment, and close `fd`.

        Raises:
            RemoteProtocolError: the memory is not as large as it is said to be, or is there already.
            RegistrationError: the GPU refused.
            OSError: the system refused.
        """
        try:
            if message.segment in self._mapped:
                raise RemoteProtocolError(who, f"segment {message.segment} is mapped already")
            if os.fstat(fd).st_size < message.length_bytes:
                raise RemoteProtocolError(
                    who, f"segment {message.segment} is shorter than {message.length_bytes} bytes"
                )
            mapped = _Mapped(mmap.mmap(fd, message.length_bytes, flags=mmap.MAP_SHARED), message.length_bytes)
        finally:
            os.close(fd)
        if (self._cuda is None) != (not message.device_handle):
            raise RemoteProtocolError(who, "staging on a GPU goes with pools on one, and only with those")
        if self._cuda is not None and self._ordinal is not None:
            opened = asyncio.to_thread(self._cuda.open_handle, self._ordinal, message.device_handle)
            mapped.device = await opened
        self._mapped[message.segment] = mapped

    def packed(self, who: str, place: Place, length_bytes: int) -> int:
        """The address where kernels find so many bytes of a segment: on the GPU where the pools are there.

        Raises:
            RemoteProtocolError: they do not lie in a mapped segment.
        """
        mapped = self._find(who, place, length_bytes)
        return (mapped.device or mapped.host) + place[1]

    async def bounce(self, who: str, place: Place, length_bytes: int) -> int:
        """The host address of so many bytes of a segment, pinned for copies of the GPU.

        Raises:
            RemoteProtocolError: they do not lie in a mapped segment.
            RegistrationError: CUDA refused to pin it.
        """
        mapped = self._find(who, place, length_bytes)
        if self._cuda is None or self._ordinal is None:
            raise RemoteProtocolError(who, "a bounce without a GPU")
        async with self._pinning:
            if not mapped.pinned:
                await asyncio.to_thread(self._cuda.pin, mapped.host, mapped.length_bytes, self._ordinal)
                mapped.pinned = True
        return mapped.host + place[1]

    async def close(self) -> None:
        """Unmap everything. No kernel may run any more."""
        mapped, self._mapped = self._mapped, {}
        if self._cuda is not None:
            await asyncio.to_thread(self._give_back, list(mapped.values()))

    def _give_back(self, mapped: list[_Mapped]) -> None:
        assert self._cuda is not None
        for each in mapped:
            with contextlib.suppress(RdmaKvError):  # the device has failed: the process is about to end
                if each.pinned:
                    self._cuda.unpin(each.host)
                self._cuda.close_handle(each.device)

    def _find(self, who: str, place: Place, length_bytes: int) -> _Mapped:
        number, offset = place
        mapped = self._mapped.get(number)
        if mapped is None or offset + length_bytes > mapped.length_bytes:
            raise RemoteProtocolError(who, f"{length_bytes} bytes at {offset} of segment {number} are not mapped here")
        return mapped
