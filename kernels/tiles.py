"""The Triton kernel behind `gather` and `scatter`, and its launch: theory of the tiling.

The packed form of a chunk is one line of words (`tables` says what a word is), and a tile is a run of them. So lane i of
tile n of the chunk has packed word n * tile_words + i, and consecutive lanes always have consecutive packed words: that
side is coalesced whatever the geometry, and the paged side as far as rows reach. No lane idles but in a chunk's last tile.

Where a lane's word lies in the paged form is read off an odometer whose wheels are word in row, head, token, plane. Its
stand at the tile's first word takes three divisions of scalars. From there each lane counts on by i, and the turns of a
wheel are what the next one counts on by. As i is less than the tile, this is 32-bit arithmetic by one divisor for all
lanes, whatever the sizes; offsets and addresses have 64 bits throughout.

Copying is between addresses that the tables name, so the kernel takes no argument but the tables, and one compilation
serves each direction and tiling. Words are copied, never interpreted: NaN patterns and any dtype pass unchanged. A word
of 16 bytes is two int64 that Triton is told to be adjacent and aligned, and becomes one access.

With `TRITON_INTERPRET=1` in the environment when this module is imported, Triton runs the same kernel on the host, in
NumPy, on addresses of this process: slow, for tests, and one launch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from rdma_kv.errors import ConfigError
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.tables import HEADER, Field, Tables

# Programs of one launch unless told otherwise. They take at most as many multiprocessors, and leave the rest to the
# engine's compute. Source: transport-facts.md, GPU: 16 programs of 16 warps gather 324 GB/s of payload on an H200.
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
        words: of a tile, a power of two. At 16 bytes a word, 2048 words are 32 KiB in flight per program.
        warps: of a program.
    """

    words: int = 2048
    warps: int = 16


TILING = Tiling()


@_jit
def _count(start: tl.tensor, by: tl.tensor, size: tl.tensor, tile_words: tl.constexpr) -> tl.tensor:
    """Turn a wheel of `size` on from `start`, both int64, by each int32 of `by`, all below tile_words.

    Returns the full turns, int32, and where the wheel then stands, int64. `size` and the way to its end are cut to a
    tile, which `by` does not reach, so that all lanes divide in 32 bits.
    """
    past = by - tl.minimum(size - start, tile_words).to(tl.int32)
    divisor = tl.minimum(size, tile_words).to(tl.uint32)
    turns = (past.to(tl.uint32) // divisor).to(tl.int32)
    rest = past - turns * divisor.to(tl.int32)
    return tl.where(past < 0, 0, turns + 1), tl.where(past < 0, start + by, rest.to(tl.int64))


@_jit
def _copy(source: tl.tensor, target: tl.tensor, mask: tl.tensor, word_bytes: tl.constexpr) -> None:
    """Copy words between int64 addresses `[tile_words]`, multiples of word_bytes."""
    if word_bytes == 16:
        half = tl.arange(0, 2)[None, :]
        pair = tl.pointer_type(tl.int64)
        read = tl.multiple_of(source.to(pair)[:, None], [1, 16]) + half
        write = tl.multiple_of(target.to(pair)[:, None], [1, 16]) + half
        tl.store(write, tl.load(read, mask=mask[:, None]), mask=mask[:, None])
    else:
        if word_bytes == 8:
            word = tl.pointer_type(tl.int64)
        elif word_bytes == 4:
            word = tl.pointer_type(tl.int32)
        elif word_bytes == 2:
            word = tl.pointer_type(tl.int16)
        else:
            word = tl.pointer_type(tl.int8)
        tl.store(target.to(word), tl.load(source.to(word), mask=mask), mask=mask)


@_jit
def _move_tile(
    table: tl.tensor,
    line: tl.tensor,
    tile: tl.tensor,
    scatter: tl.constexpr,
    tile_words: tl.constexpr,
    word_bytes: tl.constexpr,
) -> None:
    """Copy one tile of the chunk whose fields `line` points at."""
    row_words = tl.load(line + _ROW_WORDS)
    heads = tl.load(line + _HEADS)
    tokens = tl.load(line + _TOKENS)
    first = (tile - tl.load(line + _FIRST_TILE)) * tile_words
    row = first // row_words
    row_token = row // heads
    plane = row_token // tokens

    lane = tl.arange(0, tile_words)
    rows, word = _count(first - row * row_words, lane, row_words, tile_words)
    row_tokens, head = _count(row - row_token * heads, rows, heads, tile_words)
    planes, token = _count(row_token - plane * tokens, row_tokens, tokens, tile_words)

    packed_word = first + lane
    mask = packed_word < tl.load(line + _WORDS)
    pools = table.to(tl.pointer_type(tl.int32)) + tl.load(line + _POOL_AT)
    pool = tl.load(pools + token, mask=mask, other=0).to(tl.int64)
    offset = tl.load(table + tl.load(line + _OFFSET_AT) + token, mask=mask, other=0)
    pointer = table + tl.load(line + _POINTERS_AT) + pool * tl.load(line + _PLANES) + plane + planes
    base = tl.load(pointer, mask=mask, other=0)

    paged = base + offset + head * tl.load(line + _HEAD_STRIDE) + word * word_bytes
    packed = tl.load(line + _PACKED_ADDRESS) + packed_word * word_bytes
    if scatter:
        _copy(packed, paged, mask, word_bytes)
    else:
        _copy(paged, packed, mask, word_bytes)


@_jit
def _move(table: tl.tensor, scatter: tl.constexpr, tile_words: tl.constexpr) -> None:
    """Copy every tile of the launch: program p of n takes tiles p, p + n, ..."""
    chunk_of = table.to(tl.pointer_type(tl.int32)) + tl.load(table + 1)
    for tile in range(tl.program_id(0), tl.load(table), tl.num_programs(0)):
        line = table + _HEADER + tl.load(chunk_of + tile).to(tl.int64) * _FIELDS
        word_bytes = tl.load(line + _WORD_BYTES)
        if word_bytes == 16:
            _move_tile(table, line, tile, scatter, tile_words, 16)
        elif word_bytes == 8:
            _move_tile(table, line, tile, scatter, tile_words, 8)
        elif word_bytes == 4:
            _move_tile(table, line, tile, scatter, tile_words, 4)
        elif word_bytes == 2:
            _move_tile(table, line, tile, scatter, tile_words, 2)
        else:
            _move_tile(table, line, tile, scatter, tile_words, 1)
