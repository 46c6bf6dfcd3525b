"""A CUDA device as `streams` uses it: the kernels by Triton, events by torch, streams and copies by libcuda.

The streams are made by libcuda: torch's come from a pool and are given out again after 32, so an engine could find its own
kernels behind ours, and ours behind a producer's event that never fires.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from rdma_kv.cuda import Cuda
from rdma_kv.errors import ConfigError, RegistrationError
from rdma_kv.kernels import summed, tiles
from rdma_kv.kernels.checksum import Piece
from rdma_kv.kernels.checksum_triton import checksums, values
from rdma_kv.kernels.device import Sums
from rdma_kv.kernels.dispatch import forget, on
from rdma_kv.kernels.gather import gather
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.scatter import scatter
from rdma_kv.kernels.work import Work

Copy = Callable[[int, int, int, int, int], None]
"""Ordinal, where to, where from, bytes, CUstream: `Cuda.copy_async`."""

_WARM_SHAPES = (tiles.WIDE, tiles.MIDDLE, tiles.NARROW)


class TorchDevice:
    """A `Device`.

    Args:
        ordinal: CUDA ordinal.
        priority: of the streams.
        copy: what queues copies; None is `Cuda.copy_async`.

    Raises:
        ConfigError: torch has no such device, or it has no such priority.
        RegistrationError: libcuda cannot be used.
    """

    def __init__(self, ordinal: int, *, priority: int, copy: Copy | None = None) -> None:
        self._cuda = Cuda()
        if not torch.cuda.is_available():
            raise ConfigError("gpu", f"torch {torch.__version__} finds no usable GPU; see torch.cuda.is_available()")
        if ordinal >= torch.cuda.device_count():
            raise ConfigError("gpu.device", f"{ordinal}, and this process sees {torch.cuda.device_count()} GPUs")
        priorities = self._cuda.priorities(ordinal)
        if priority not in priorities:
            text = f"{priority}; this device has {priorities.start} (runs first) to {priorities[-1]} (as other streams)"
            raise ConfigError("gpu.stream_priority", text)
        self._ordinal = ordinal
        self._priority = priority
        self._copy = copy or self._cuda.copy_async
        self._device = torch.device("cuda", ordinal)
        self._streams: list[torch.cuda.Stream] = []

    def enter(self) -> None:
        """The engine's captures of CUDA graphs and this thread are not each other's business."""
        self._cuda.leave_captures()
        torch.cuda.set_device(self._device)

    def stream(self) -> torch.cuda.Stream:
        made = self._cuda.make_stream(self._ordinal, self._priority)
        stream = torch.cuda.ExternalStream(made, device=self._device)
        self._streams.append(stream)
        return stream

    def gather(self, works: Sequence[Work], stream: torch.cuda.Stream, programs: int) -> Sums:
        wanted = [work.checksum for work in works]
        chunks = [work.chunk for work in works]
        sums = gather(chunks, device=self._device, stream=stream, programs=programs, checksum=wanted)
        if sums is None:
            return lambda: [None] * len(works)
        here = torch.empty(len(works), dtype=torch.int64, pin_memory=True)
        sums.copy_to(here)
        return lambda: [found if each else None for found, each in zip(values(here), wanted, strict=True)]

    def scatter(self, chunks: Sequence[Chunk], stream: torch.cuda.Stream, programs: int) -> None:
        scatter(chunks, device=self._device, stream=stream, programs=programs)

    def sums(self, works: Sequence[Work], stream: torch.cuda.Stream, programs: int) -> Sums:
        pieces = [Piece(work.chunk.packed_address, work.chunk.packed_bytes) for work in works]
        there = checksums(pieces, device=self._device, stream=stream, programs=programs)
        here = torch.empty(len(pieces), dtype=torch.int64, pin_memory=True)
        with on(self._device, stream):
            here.copy_(there, non_blocking=True)
        return lambda: list(values(here))

    def copy(self, dst: int, src: int, length_bytes: int, stream: torch.cuda.Stream) -> None:
        self._copy(self._ordinal, dst, src, length_bytes, stream.cuda_stream)

    def warm(self, programs: int) -> None:
        """All kernels and shapes for chunks of one pool, on 256 bytes of our own."""
        before = self._cuda.leave_captures()
        try:
            self._run_each_once(self.stream(), programs)
        finally:
            self._cuda.leave_captures(before)

    def _run_each_once(self, stream: torch.cuda.Stream, programs: int) -> None:
        with on(self._device, stream):
            paged, packed = (torch.zeros(256, dtype=torch.uint8, device=self._device) for _ in range(2))
        whole, odd = (_chunk(paged.data_ptr(), packed.data_ptr(), row_bytes) for row_bytes in (128, 4))
        for chunk, shapes in ((whole, _WARM_SHAPES), (odd, (None,))):
            if (uploaded := tiles.upload([chunk], device=self._device, stream=stream)) is not None:
                for shape, to_pages in itertools.product(shapes, (False, True)):
                    uploaded.start(scatter=to_pages, programs=programs, shape=shape)
        for shape in (summed.WIDE, summed.NARROW):
            summed.launch([whole], [True], device=self._device, stream=stream, programs=programs, shape=shape)
        self.sums([Work(whole)], stream, programs)
        stream.synchronize()

    def close(self) -> None:
        while self._streams:
            stream = self._streams.pop()
            forget(stream)
            with contextlib.suppress(RegistrationError):  # the device has failed, and its streams with it
                self._cuda.drop_stream(self._ordinal, stream.cuda_stream)
        self._cuda.close()


def _chunk(paged: int, packed: int, row_bytes: int) -> Chunk:
    """Two tokens of one plane."""
    return Chunk(
        packed_address=packed,
        pointers=np.array([[paged]], dtype=np.int64),
        token_pool=np.zeros(2, dtype=np.int32),
        token_offset=np.array([0, row_bytes], dtype=np.int64),
        heads=1,
        head_stride=row_bytes,
        row_bytes=row_bytes,
    )
