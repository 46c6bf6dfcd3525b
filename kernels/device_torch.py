"""A CUDA device as `schedule` uses it: the kernels by Triton, events by torch, streams and copies by libcuda.

The thread that launches is the engine's own. So its current device and stream, and its part in captures of CUDA graphs, are
left as they were found. That takes four calls of libcuda around a pump (`current`) and three of torch around a launch
(`_Using`), some 5 us; torch's own context managers take several times that.

The streams are made by libcuda: torch's come from a pool and are given out again after 32, so an engine could find its own
kernels behind ours, and ours behind a producer's event that never fires.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

import numpy as np
import torch

from rdma_kv.cuda import Cuda
from rdma_kv.errors import ConfigError, RegistrationError
from rdma_kv.kernels import summed, tiles
from rdma_kv.kernels.checksum import Piece
from rdma_kv.kernels.checksum_triton import checksums, values
from rdma_kv.kernels.device import Sums
from rdma_kv.kernels.dispatch import forbid_compiling, forget, on
from rdma_kv.kernels.gather import gather
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.scatter import scatter
from rdma_kv.kernels.work import Work

_SUMS: Final = 64
"""Checksums that a piece of pinned memory has room for. A launch seldom has more."""

_WARM_SHAPES = (tiles.WIDE, tiles.MIDDLE, tiles.NARROW)


class _Using:
    """Inside, and inside `TorchDevice.current`, the stream is torch's on this thread, and nothing is compiled.

    As torch.cuda.current_stream and set_stream do, without the objects that these make: 2 us instead of 10.
    """

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        torch._C._cuda_setStream(
            stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type
        )
        forbid_compiling(True)

    def __exit__(self, *_: object) -> None:
        forbid_compiling(False)
        stream_id, device_index, device_type = self._before
        torch._C._cuda_setStream(stream_id=stream_id, device_index=device_index, device_type=device_type)


class TorchDevice:
    """A `Device`.

    Args:
        ordinal: CUDA ordinal.
        priority: of the streams.

    Raises:
        ConfigError: torch has no such device, or it has no such priority.
        RegistrationError: libcuda cannot be used.
    """

    def __init__(self, ordinal: int, *, priority: int) -> None:
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
        self._device = torch.device("cuda", ordinal)
        self._streams: list[torch.cuda.Stream] = []
        self._pinned: list[torch.Tensor] = []  # int64 [_SUMS] each, that nothing uses

    def enter(self) -> None:
        """The engine's captures of CUDA graphs and this thread are not each other's business."""
        self._cuda.leave_captures()
        torch.cuda.set_device(self._device)

    def current(self) -> AbstractContextManager[None]:
        """As `enter`, until it ends."""
        return self._cuda.current(self._ordinal)

    def stream(self) -> torch.cuda.Stream:
        made = self._cuda.make_stream(self._ordinal, self._priority)
        stream = torch.cuda.ExternalStream(made, device=self._device)
        self._streams.append(stream)
        return stream

    def gather(
        self, works: Sequence[Work], stream: torch.cuda.Stream, programs: int, after: Sequence[torch.cuda.Event]
    ) -> Sums:
        wanted = [work.checksum for work in works]
        chunks = [work.chunk for work in works]
        if after:
            self._start_after(chunks, stream, programs, after, to_pages=False)
            return lambda: [None] * len(works)
        checksum = wanted if any(wanted) else False
        with _Using(stream):
            sums = gather(chunks, device=self._device, stream=stream, programs=programs, checksum=checksum)
            if sums is None:
                return lambda: [None] * len(works)
            read = self._send_back(sums.results)
        return lambda: [found if each else None for found, each in zip(read(), wanted, strict=True)]

    def scatter(
        self, chunks: Sequence[Chunk], stream: torch.cuda.Stream, programs: int, after: Sequence[torch.cuda.Event]
    ) -> None:
        if after:
            self._start_after(chunks, stream, programs, after, to_pages=True)
            return
        with _Using(stream):
            scatter(chunks, device=self._device, stream=stream, programs=programs)

    def _start_after(
        self,
        chunks: Sequence[Chunk],
        stream: torch.cuda.Stream,
        programs: int,
        after: Sequence[torch.cuda.Event],
        *,
        to_pages: bool,
    ) -> None:
        """Tables go up first: what they are copied from is no place to wait in."""
        with _Using(stream):
            uploaded = tiles.upload(chunks, device=self._device, stream=stream)
            for event in after:
                stream.wait_event(event)
            if uploaded is not None:
                uploaded.start(scatter=to_pages, programs=programs)

    def sums(self, works: Sequence[Work], stream: torch.cuda.Stream, programs: int) -> Sums:
        pieces = [Piece(work.chunk.packed_address, work.chunk.packed_bytes) for work in works]
        with _Using(stream):
            read = self._send_back(checksums(pieces, device=self._device, stream=stream, programs=programs))
        return lambda: list(read())

    def _send_back(self, sums: torch.Tensor) -> Callable[[], list[int]]:
        """Queue the copy of checksums, int64 `[works]`, to the host. What reads them there, once."""
        count = sums.shape[0]
        if count > _SUMS:
            memory = _landing(count)
        elif self._pinned:
            memory = self._pinned.pop()
        else:
            memory = _landing(_SUMS)
        memory[:count].copy_(sums, non_blocking=True)

        def read() -> list[int]:
            found = values(memory[:count])
            if count <= _SUMS:
                self._pinned.append(memory)
            return found

        return read

    def copy(self, dst: int, src: int, length_bytes: int, stream: torch.cuda.Stream) -> None:
        self._cuda.copy_async(self._ordinal, dst, src, length_bytes, stream.cuda_stream)

    def warm(self, programs: int) -> None:
        """All kernels and shapes for chunks of one pool, on 256 bytes of our own, and what a stream allocates once."""
        with self._cuda.current(self._ordinal):
            for number, stream in enumerate(self._streams or [self.stream()]):
                with on(self._device, stream):
                    paged, packed = (torch.zeros(256, dtype=torch.uint8, device=self._device) for _ in range(2))
                    whole, odd = (_chunk(paged.data_ptr(), packed.data_ptr(), row_bytes) for row_bytes in (128, 4))
                    if number == 0:
                        self._run_each_once(whole, odd, stream, programs)
                    scatter([whole], device=self._device, stream=stream, programs=programs)
                    gather([whole], device=self._device, stream=stream, programs=programs, checksum=True)
                    here = torch.empty(256, dtype=torch.uint8, pin_memory=True)
                    for dst, src in ((here, packed), (packed, here)):
                        self.copy(dst.data_ptr(), src.data_ptr(), 256, stream)
                    stream.synchronize()

    def _run_each_once(self, whole: Chunk, odd: Chunk, stream: torch.cuda.Stream, programs: int) -> None:
        for chunk, shapes in ((whole, _WARM_SHAPES), (odd, (None,))):
            if (uploaded := tiles.upload([chunk], device=self._device, stream=stream)) is not None:
                for shape, to_pages in itertools.product(shapes, (False, True)):
                    uploaded.start(scatter=to_pages, programs=programs, shape=shape)
        for shape in (summed.WIDE, summed.NARROW):
            summed.launch([whole], [True], device=self._device, stream=stream, programs=programs, shape=shape)
        checksums(
            [Piece(whole.packed_address, whole.packed_bytes)], device=self._device, stream=stream, programs=programs
        )

    def close(self) -> None:
        self._pinned.clear()  # with streams that it was used on: torch records events there when it takes memory back
        while self._streams:
            stream = self._streams.pop()
            with contextlib.suppress(RegistrationError, RuntimeError), self._cuda.current(self._ordinal):
                stream.synchronize()  # `warm` may have failed behind launches, whose tables must stay
            forget(stream)
            with contextlib.suppress(RegistrationError):  # the device has failed, and its streams with it
                self._cuda.drop_stream(self._ordinal, stream.cuda_stream)
        self._cuda.close()


def _landing(count: int) -> torch.Tensor:
    """Pinned memory of the host, int64 `[count]`, whatever modes the engine has set in this thread."""
    with torch.inference_mode(mode=False):
        return torch.empty(count, dtype=torch.int64, device="cpu", pin_memory=True)


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
