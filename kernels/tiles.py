"""The Triton kernel behind `gather` and `scatter`, and its launch: theory of the tiling.

The packed form of a chunk is one line of words (`tables` says what a word is), and a tile is a run of them. So lane i of
tile n of the chunk has packed word n * tile_words + i, and consecutive lanes always have consecutive packed words: that
side is coalesced whatever the geometry, and the paged side as far as rows reach. No lane idles but in a chunk's last tile.

Where a lane's word lies in the paged form is read off an odometer whose wheels are word in row, head, token, plane. Its
stand at the tile's first word takes three divisions of scalars. From there each lane goes on by i words, and the turns of
a wheel are what the next one goes on by. As none goes on by more than a tile, this is 32-bit arithmetic with one divisor
for all lanes, whatever the sizes; offsets and addresses have 64 bits throughout.

Copying is between addresses that the tables name, so the kernel takes no argument but the tables, and one compilation
serves each direction and tiling. Words are copied, never interpreted: NaN patterns and any dtype pass unchanged. A word
of 16 bytes is two int64 that Triton is told to be adjacent and aligned, and becomes one access.

With `TRITON_INTERPRET=1` in the environment when this module is imported, Triton runs the same kernel on the host, in
NumPy, on addresses of this process: slow, for tests, and one launch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from rdma_kv.errors import ConfigError
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.tables import HEADER, Field, Tables

# Programs of one launch unless told otherwise. They take at most as many multiprocessors, and leave the rest to the
# engine's compute. Measured with a prototype on an H200: 16 programs of 16 warps gather 324 GB/s of payload.
PROGRAMS = 16

_HEADER = tl.constexpr(HEADER)
_FIELDS = tl.constexpr(len(Field))
_FIRST_TILE = tl.constexpr(int(Field.FIRST_TILE))
_WORD_BYTES = tl.constexpr(int(Field.WORD_BYTES))
_WORDS = tl.constexpr(int(Field.WORDS))
_ROW_WORDS = tl.constexpr(int(Field.ROW_WORDS))
_HEADS = tl.constexpr(int(Field.HEADS))
_TOKENS = tl.constexpr(int(Field.TOKENS))
_PLANES = tl.constexpr(int(Field.PLANES))
_HEAD_STRIDE = tl.constexpr(int(Field.HEAD_STRIDE))
_PACKED_ADDRESS = tl.constexpr(int(Field.PACKED_ADDRESS))
_POINTERS_AT = tl.constexpr(int(Field.POINTERS_AT))
_OFFSET_AT = tl.constexpr(int(Field.OFFSET_AT))
_POOL_AT = tl.constexpr(int(Field.POOL_AT))

_jit: Callable[[Callable[..., Any]], Any] = triton.jit


@dataclass(frozen=True, slots=True)
class Tiling:
    """What a program works on at a time; to be tuned per GPU, without effect on the result.

    Attributes:
        words: of a tile, a power of two up to 32,768. At 16 bytes a word, 2048 words are 32 KiB in flight per program.
        warps: of a program, a power of two.
    """

    words: int = 2048
    warps: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.words <= 1 << 15 or self.words & (self.words - 1):
            raise ConfigError("words", f"{self.words} is no power of two up to 32,768")


TILING = Tiling()


@dataclass(frozen=True, slots=True)
class Upload:
    """Tables on the device, as a launch on `stream` reads them; dropping it there and then is safe.

    Attributes:
        table: int64 `[Tables.size]`.
        stream: None is the device's current stream.
    """

    table: torch.Tensor
    tiles: int
    tiling: Tiling
    stream: torch.cuda.Stream | None

    def start(self, *, scatter: bool, programs: int) -> None:
        """Launch the kernel once: scatter, or gather. May be called again while the chunks' memory lasts."""
        with _on(self.table.device, self.stream):
            _move[(min(programs, self.tiles),)](
                self.table, scatter=scatter, tile_words=self.tiling.words, num_warps=self.tiling.warps
            )


def upload(
    chunks: Sequence[Chunk],
    *,
    device: torch.device | str,
    stream: torch.cuda.Stream | None = None,
    tiling: Tiling = TILING,
) -> Upload | None:
    """Send the tables of a launch to the device, in one copy on `stream`; does not wait for it.

    Both their pinned and their device memory come from torch's caching allocators, which take each back once the stream
    has passed it. So from the second launch of a size on, nothing is allocated from the driver.

    Returns:
        None if the chunks have no bytes.

    Raises:
        ConfigError: a chunk's field has a wrong shape, dtype or range, or the device cannot run the kernel.
    """
    device = torch.device(device)
    if device.type != ("cpu" if INTERPRETED else "cuda"):
        why = "TRITON_INTERPRET was set" if INTERPRETED else "TRITON_INTERPRET was not set"
        raise ConfigError("device", f"{device}, but {why} when the kernel was imported")
    if stream is not None and device.index not in {None, stream.device.index}:
        raise ConfigError("stream", f"is of {stream.device}, not {device}")
    tables = Tables(chunks, tiling.words)
    if not tables.tiles:
        return None
    host = torch.empty(tables.size, dtype=torch.int64, pin_memory=not INTERPRETED)
    tables.write(host.numpy())
    with _on(device, stream):
        return Upload(host.to(device, non_blocking=True), tables.tiles, tiling, stream)


def launch(
    chunks: Sequence[Chunk],
    *,
    scatter: bool,
    device: torch.device | str,
    stream: torch.cuda.Stream | None,
    programs: int | None,
) -> None:
    """One upload and one launch for all chunks, or neither if they have no bytes. See `gather` and `scatter`."""
    if programs is not None and programs < 1:
        raise ConfigError("programs", f"{programs} is not positive")
    uploaded = upload(chunks, device=device, stream=stream, tiling=TILING)
    if uploaded is not None:
        uploaded.start(scatter=scatter, programs=PROGRAMS if programs is None else programs)


@contextmanager
def _on(device: torch.device, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Make device and stream those that torch and Triton use in this thread."""
    if device.type == "cuda":
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield
    else:
        yield


@_jit
def _turns(start: tl.tensor, by: tl.tensor, size: tl.tensor, tile_words: tl.constexpr) -> tl.tensor:
    """How often a wheel of `size` passes its end as it goes on from `start` by each int32 of `by`, all below tile_words.

    A wheel longer than a tile passes once at most, so its front may be cut off; hence all lanes divide in 32 bits. They
    divide by one divisor, so they multiply by 2**31 / divisor, rounded up, and keep the high half of twice the product:
    exact, because dividend times divisor stays below 2**31.
    """
    cut = tl.maximum(size - tile_words, 0)
    near = (tl.maximum(start - cut, 0).to(tl.int32) + by).to(tl.uint32)
    divisor = (size - cut).to(tl.uint32)
    return tl.umulhi(near * 2, (0x80000000 + divisor - 1) // divisor).to(tl.int32)


@_jit
def _copy(source: tl.tensor, target: tl.tensor, mask: tl.tensor, word: tl.constexpr) -> None:
    """Copy words of type `word` between aligned int64 addresses `[tile_words]`."""
    pointer = tl.pointer_type(word)
    tl.store(target.to(pointer), tl.load(source.to(pointer), mask=mask), mask=mask)


@_jit
def _copy_pairs(source: tl.tensor, target: tl.tensor, mask: tl.tensor) -> None:
    """Copy words of 16 bytes between aligned int64 addresses `[tile_words]`."""
    pointer = tl.pointer_type(tl.int64)
    half = tl.arange(0, 2)[None, :]
    read = tl.multiple_of(source.to(pointer)[:, None], [1, 16]) + half
    write = tl.multiple_of(target.to(pointer)[:, None], [1, 16]) + half
    tl.store(write, tl.load(read, mask=mask[:, None]), mask=mask[:, None])


@_jit
def _move(table: tl.tensor, scatter: tl.constexpr, tile_words: tl.constexpr) -> None:
    """Copy every tile of the launch: program p of n takes tiles p, p + n, ..."""
    table32 = table.to(tl.pointer_type(tl.int32))
    chunk_of = table32 + tl.load(table + 1)
    lane = tl.arange(0, tile_words)
    tiles = tl.load(table)
    tile = tl.program_id(0)
    while tile < tiles:  # range() over scalars of the interpreter fails with Triton 3.6 and NumPy 2.4
        line = table + _HEADER + tl.load(chunk_of + tile).to(tl.int64) * _FIELDS
        word_bytes = tl.load(line + _WORD_BYTES)
        row_words = tl.load(line + _ROW_WORDS)
        heads = tl.load(line + _HEADS).to(tl.int32)
        tokens = tl.load(line + _TOKENS).to(tl.int32)

        first = (tile - tl.load(line + _FIRST_TILE)) * tile_words
        row = first // row_words
        word = first - row * row_words
        token = row // heads
        head = (row - token * heads).to(tl.int32)
        plane = token // tokens
        token = (token - plane * tokens).to(tl.int32)

        rows = _turns(word, lane, row_words, tile_words)
        row_tokens = _turns(head, rows, heads, tile_words)
        planes = _turns(token, row_tokens, tokens, tile_words)
        at = token + row_tokens - planes * tokens

        mask = lane < tl.minimum(tl.load(line + _WORDS) - first, tile_words).to(tl.int32)
        pool = tl.load(table32 + tl.load(line + _POOL_AT) + at, mask=mask, other=0)
        offset = tl.load(table + tl.load(line + _OFFSET_AT) + at, mask=mask, other=0)
        pointer = pool * tl.load(line + _PLANES).to(tl.int32) + planes
        base = tl.load(table + tl.load(line + _POINTERS_AT) + plane + pointer, mask=mask, other=0)

        lane_bytes = lane * word_bytes.to(tl.int32)
        paged = base + offset + (head + rows - row_tokens * heads) * tl.load(line + _HEAD_STRIDE)
        paged += word * word_bytes + lane_bytes - rows * (row_words * word_bytes)
        packed = tl.load(line + _PACKED_ADDRESS) + first * word_bytes + lane_bytes
        source, target = (packed, paged) if scatter else (paged, packed)
        if word_bytes == 16:
            _copy_pairs(source, target, mask)
        elif word_bytes == 8:
            _copy(source, target, mask, tl.int64)
        elif word_bytes == 4:
            _copy(source, target, mask, tl.int32)
        elif word_bytes == 2:
            _copy(source, target, mask, tl.int16)
        else:
            _copy(source, target, mask, tl.int8)
        tile += tl.num_programs(0)


INTERPRETED = not isinstance(_move, triton.JITFunction)  # as decided by TRITON_INTERPRET at import
