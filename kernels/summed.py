"""Gather and checksum in one pass: each program sums the words that it moves, as `checksum` defines it.

Tiles are cut from the whole of a chunk's packed form and not plane by plane, so that every one begins where a tile of the
checksum does, and a program sees whole tiles of the checksum only. What they add goes to the chunk's result by one atomic
addition for each piece. So there is nothing to collect, no second launch, and no second look at the bytes.

The odometer of `tiles` has one more wheel for that, the token in its plane, whose turns are planes; and the base of a plane
is looked up lane by lane.

**What it costs is instructions.** A word of 16 bytes is four words of the checksum: eight multiplications of 32 bits, which
add up as they multiply. A thread's words are therefore all of one tile of the checksum, so that it has one sum to exchange
with others, and not one for each word. Triton gives words to threads in turn: thread t of n has those at t, t + n, ... of a
piece. So that these are of one tile, the `deep` rounds are dealt to the tiles' parts: see `in_piece`. (Axes of its own for
this would be clearer, but Triton 3.6 and 3.7 deal threads to them in opposite orders.) Multipliers are then different in each
of its words, more than registers hold: they are read, from 16 KiB that stay in the L1.

**Odd chunks** are not summed as they are moved: their words straddle those of the checksum. A launch with one among its
chunks is an ordinary gather, and behind it the kernel of `checksum_triton`, on the same stream. The results are the same.

There is no scatter of this kind, on purpose: a checksum is to be verified *before* a page is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from rdma_kv.errors import ConfigError
from rdma_kv.kernels import tiles
from rdma_kv.kernels.checksum import GAMMA, MULTIPLIERS, TILE_WORDS, Piece
from rdma_kv.kernels.checksum_triton import _mix, _plus, checksums, values
from rdma_kv.kernels.dispatch import Queue, check_device, check_programs, on, queue_of, start
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.tables import WORD_BYTES, Line, Tables, Tile
from rdma_kv.kernels.tiles import Shape, _quotient, _turns

SUM_WORDS = TILE_WORDS * 4 // WORD_BYTES
"""Of 16 bytes, in a tile of the checksum. A program's piece has at least as many."""

# Measured on an H200. Few programs want much in flight. Many small ones hide best what one of them waits for.
WIDE = Shape(4096, 32)
NARROW = Shape(512, 4)
_WIDE_PROGRAMS = 800
_DEEPEST = 16  # words of a thread in one tile of the checksum, at most: all of it in one warp

_LINE_AT = tl.constexpr(int(Tile.LINE_AT))
_BASE = tl.constexpr(int(Tile.BASE))
_PACKED = tl.constexpr(int(Tile.PACKED))
_OFFSET_AT = tl.constexpr(int(Tile.OFFSET_AT))
_POOL_AT = tl.constexpr(int(Tile.POOL_AT))
_WORD = tl.constexpr(int(Tile.WORD))
_WORDS = tl.constexpr(int(Tile.WORDS))
_TILE_FIELDS = tl.constexpr(len(Tile))
_HEAD_STRIDE = tl.constexpr(int(Line.HEAD_STRIDE))
_PLANES = tl.constexpr(int(Line.PLANES))
_TOKENS = tl.constexpr(int(Line.TOKENS))
_TOKEN_CUT = tl.constexpr(int(Line.TOKEN_CUT))
_TOKEN_FACTOR = tl.constexpr(int(Line.TOKEN_FACTOR))
_FIRST_OFFSET_AT = tl.constexpr(int(Line.OFFSET_AT))
_FIRST_PACKED = tl.constexpr(int(Line.PACKED))
_RESULT_AT = tl.constexpr(int(Line.RESULT_AT))
_sum_words = tl.constexpr(SUM_WORDS)
_gamma = tl.constexpr(GAMMA)

_jit: Callable[[Callable[..., Any]], Any] = triton.jit


@dataclass(frozen=True, slots=True)
class Checksums:
    """Checksums of a launch's chunks on the device, there when its stream has passed the launch.

    Attributes:
        results: int64 `[chunks]`, memory of its own: the bits of `checksum.checksum`, as numbers with a sign. That of a chunk
            whose checksum was not asked for means nothing.
        stream: of the launch; None is the one that was current then.
    """

    results: torch.Tensor
    stream: torch.cuda.Stream | None

    def copy_to(self, host: torch.Tensor) -> None:
        """Queue their copy on the launch's stream; returns when that is queued.

        Args:
            host: int64 `[chunks]`, pinned, else this waits for the copy. Read it, with `numpy().view(np.uint64)`, once an
                event that was recorded behind this has fired.
        """
        with on(self.results.device, self.stream):
            host.copy_(self.results, non_blocking=True)

    def values(self) -> list[int]:
        """From 0 to 2**64 - 1, of each chunk. Waits for the stream: for tests and tools."""
        with on(self.results.device, self.stream):
            return values(self.results)


def wanted_of(checksum: bool | Sequence[bool], chunks: int) -> list[bool] | None:
    """For each chunk whether its checksum is wanted; None if none is.

    Raises:
        ConfigError: there are not as many answers as chunks.
    """
    if isinstance(checksum, bool):
        return [True] * chunks if checksum else None
    if len(checksum) != chunks:
        raise ConfigError("checksum", f"{len(checksum)} answers for {chunks} chunks")
    return list(checksum) if any(checksum) else None


def best_shape(programs: int, words: int) -> Shape:
    """Of so many programs that share so many words."""
    return WIDE if programs <= min(_WIDE_PROGRAMS, words // WIDE.words) else NARROW


def deep_of(shape: Shape, words: int) -> int:
    """Words of a thread in one tile of the checksum, where a piece has so many."""
    return min(_DEEPEST, max(1, words // (32 * shape.warps)))


def launch(
    chunks: Sequence[Chunk],
    wanted: Sequence[bool],
    *,
    device: torch.device | str,
    stream: torch.cuda.Stream | None,
    programs: int | None,
    shape: Shape | None = None,
) -> Checksums:
    """Gather all chunks, and sum those that are wanted. See `gather`; `shape` is of a program, instead of the best."""
    programs = check_programs(programs)
    device = check_device(device, stream)
    tables = Tables(chunks, tiles.TILE_WORDS, wanted)
    if tables.odd:
        tiles.launch(chunks, scatter=False, device=device, stream=stream, programs=programs)
        pieces = [
            Piece(chunk.packed_address, chunk.packed_bytes if each else 0)
            for chunk, each in zip(chunks, wanted, strict=True)
        ]
        return Checksums(checksums(pieces, device=device, stream=stream, programs=programs), stream)
    shape = shape or best_shape(programs, tables.tiles * tables.tile_words)
    words = min(shape.words, tables.tile_words)
    deep = deep_of(shape, words)
    queue = queue_of(device, stream)
    with queue.feed.lock, queue.current(stream):
        table = queue.feed.send(tables.size, tables.write, keep=True)
        if tables.tiles:
            start(
                _gather_summed,
                min(programs, tables.tiles * (tables.tile_words // words)),
                (table, multipliers_on(queue)),
                (tables.pooled, tables.tile_words, words, deep),
                warps=shape.warps,
                registers=shape.registers,
                queue=queue,
            )
        results = table[tables.results_at : tables.results_at + tables.results]
    return Checksums(results, stream)


@_jit
def _row_across(
    table: tl.tensor,
    record: tl.tensor,
    line: tl.tensor,
    head: tl.tensor,
    tokens: tl.tensor,
    mask: tl.tensor,
    pooled: tl.constexpr,
) -> tl.tensor:
    """As `tiles._row`, across planes."""
    offset_at = tl.load(record + _OFFSET_AT)
    token = (offset_at - tl.load(line + _FIRST_OFFSET_AT)).to(tl.int32)
    near = tl.maximum(token - tl.load(line + _TOKEN_CUT).to(tl.int32), 0) + tokens
    planes = _quotient(near, tl.load(line + _TOKEN_FACTOR).to(tl.uint32))
    further = tokens - planes * tl.load(line + _TOKENS).to(tl.int32)  # below 0 where a plane has ended
    row = tl.load(table + offset_at + further, mask=mask, other=0)
    row += head.to(tl.int64) * tl.load(line + _HEAD_STRIDE)
    base = planes
    if pooled:
        pools = table.to(tl.pointer_type(tl.int32)) + tl.load(record + _POOL_AT)
        base += tl.load(pools + further, mask=mask, other=0) * tl.load(line + _PLANES).to(tl.int32)
    return row + tl.load(table + tl.load(record + _BASE) + base, mask=mask, other=0)


@_jit
def _gather_summed(
    table: tl.tensor,
    multipliers: tl.tensor,
    pooled: tl.constexpr,
    tile_words: tl.constexpr,
    words: tl.constexpr,
    deep: tl.constexpr,
) -> None:
    """Gather every piece of a launch: program p of n takes pieces p, p + n, ... `words` are whole tiles of the checksum."""
    sums: tl.constexpr = words // _sum_words
    pieces: tl.constexpr = tile_words // words
    threads: tl.constexpr = words // deep
    wide: tl.constexpr = _sum_words // deep
    index = tl.arange(0, words)
    place = index // threads * wide + index % wide
    in_piece = index % threads // wide * _sum_words + place
    first = multipliers + place[:, None] * 2 + tl.arange(0, 2)[None, :]
    tiles_at = tl.load(table + 1)
    end = tl.load(table) * pieces
    piece = tl.program_id(0)
    while piece < end:
        lane = piece % pieces * words + in_piece
        record = table + tiles_at + (piece // pieces).to(tl.int64) * _TILE_FIELDS
        line = table + tl.load(record + _LINE_AT)
        head, tokens, _, word, mask = _turns(record, line, lane)
        paged = _row_across(table, record, line, head, tokens, mask, pooled) + word.to(tl.int64) * 16
        begin = tl.load(record + _PACKED) + tl.load(record + _WORD) * 16
        halves = tl.load(_pair(paged), mask=mask[:, None], other=0)
        tl.store(_pair(begin + lane.to(tl.int64) * 16), halves, mask=mask[:, None])

        halves = halves.to(tl.uint64, bitcast=True)
        weighted = (halves & 0xFFFFFFFF) * tl.load(first) + (halves >> 32) * tl.load(first + 2 * _sum_words)
        weighted = tl.reduce(weighted, 1, _plus).reshape(deep, sums, wide)
        totals = tl.reduce(tl.reduce(weighted, 0, _plus), 1, _plus)
        own = piece % pieces * sums + tl.arange(0, sums)
        number = (begin - tl.load(line + _FIRST_PACKED)) // (_sum_words * 16) + own
        terms = _mix(totals + (number + 1).to(tl.uint64) * _gamma)
        terms = tl.where(own * _sum_words < tl.load(record + _WORDS), terms, 0)
        result_at = tl.load(line + _RESULT_AT)
        if result_at != 0:
            tl.atomic_add((table + result_at).to(tl.pointer_type(tl.uint64)), tl.reduce(terms, 0, _plus), sem="relaxed")
        piece += tl.num_programs(0)


@_jit
def _pair(address: tl.tensor) -> tl.tensor:
    """Pointers to both int64 of 16 aligned bytes, `[words, 2]`."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int64))[:, None], [1, 16]) + tl.arange(0, 2)[None, :]


_multipliers: dict[int, torch.Tensor] = {}


def multipliers_on(queue: Queue) -> torch.Tensor:
    """The multipliers as the kernel reads them, uint64 as int64 `[2, SUM_WORDS, 2]`: in each word of 16 bytes those of the
    first and the third word of the checksum, then those of the second and the fourth. Made once a device."""
    there = _multipliers.get(queue.index)
    if there is None:
        order = MULTIPLIERS.view(np.int64).reshape(SUM_WORDS, 2, 2).transpose(2, 0, 1)
        there = torch.from_numpy(order.copy()).to(queue.device)  # waits, so other streams find it as well
        _multipliers[queue.index] = there
    return there
