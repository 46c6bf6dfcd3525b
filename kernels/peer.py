"""From pages to pages, in one launch: paged rows of one pool to paged rows of another, without a packed form in between.

What for: pages of another GPU that are mapped in this process (peer access, or memory imported from another process). One
kernel then reads here and writes there, over NVLink, where a gather, a copy and a scatter would pass the bytes three times.
Both sides may as well lie on one GPU, or in pinned host memory.

Each side has its own tables, cut alike: the odometer of `tiles` is read once a lane, and its stand looked up on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from rdma_kv.kernels import tiles
from rdma_kv.kernels.dispatch import check_device, check_programs, queue_of, start
from rdma_kv.kernels.launch import Chunk, Int64Array
from rdma_kv.kernels.tables import Line, Tables, Tile, pair
from rdma_kv.kernels.tiles import Shape, _copy, _read, _row, _turns, _write

_LINE_AT = tl.constexpr(int(Tile.LINE_AT))
_TILE_FIELDS = tl.constexpr(len(Tile))
_GRAIN_BYTES = tl.constexpr(int(Line.GRAIN_BYTES))
_ROW_BYTES = tl.constexpr(int(Line.ROW_BYTES))

WIDE = Shape(8192, 32)
MIDDLE = Shape(4096, 32)
"""Measured on two H200, with the kernel on the GPU that it writes: WIDE for up to `_FEW` programs, MIDDLE for more."""
_FEW = 24

_jit: Callable[[Callable[..., Any]], Any] = triton.jit


def move(
    sources: Sequence[Chunk],
    targets: Sequence[Chunk],
    *,
    device: torch.device | str,
    stream: torch.cuda.Stream | None = None,
    programs: int | None = None,
    shape: Shape | None = None,
) -> None:
    """Copy the paged rows of each source to those of its target, on `stream`; returns when that is queued.

    A gather of the sources and a scatter of the targets from the same packed bytes would do the same. Whoever reads the
    targets' pages on another device waits for an event behind this launch, or for the stream.

    Args:
        sources: of any number of transfers, ranks and replicas; `packed_address` is not read. Their arrays are free on
            return, the memory behind their addresses once the stream has passed the launch.
        targets: as many, each with its source's planes, tokens, heads and row length; page size, strides and pools may
            differ. Targets overlap neither one another nor sources.
        device: as for `gather`: all addresses must be valid there.
        stream: as for `gather`.
        programs: as for `gather`.
        shape: of a program, instead of the best: to tune.

    Raises:
        ConfigError: a chunk's field has a wrong shape, dtype or range, a target does not fit its source, or an argument
            does not fit. Nothing was queued.
    """
    programs = check_programs(programs)
    device = check_device(device, stream)
    here, there = pair(sources, targets, tiles.TILE_WORDS)
    if not here.tiles:
        return
    second_at = here.size + here.size % 2  # at a multiple of 16 bytes
    shape = shape or best_shape(programs, here)

    def write(out: Int64Array) -> None:
        here.write(out[: here.size])
        there.write(out[second_at:])

    queue = queue_of(device, stream)
    with queue.feed.lock, queue.current(stream):
        table = queue.feed.send(second_at + there.size, write)
        start(
            _move_between_odd if here.odd else _move_between,
            tiles.bounded(programs, shape, tiles=here.tiles, tile_words=here.tile_words, odd=here.odd),
            (table, table[second_at:]),
            (here.pooled, here.tile_words, min(shape.words, here.tile_words)),
            warps=shape.warps,
            registers=shape.registers,
            queue=queue,
        )


def best_shape(programs: int, here: Tables) -> Shape:
    """Of so many programs; where `tiles` takes its widest, one of ours."""
    own = tiles.best_shape(programs, tiles=here.tiles, planes=here.planes, tile_words=here.tile_words, odd=here.odd)
    if own != tiles.WIDE:
        return own
    return WIDE if programs <= _FEW else MIDDLE


@_jit
def _both(
    table: tl.tensor, other: tl.tensor, tile: tl.tensor, lane: tl.tensor, pooled: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """As `tiles._place`: the address of each lane's row at the source, then at the target, its word in the row, and whether
    it has work. Then the place of the line of the target's chunk. The tables differ in addresses and strides only."""
    record = table + tl.load(table + 1) + tile.to(tl.int64) * _TILE_FIELDS
    line = table + tl.load(record + _LINE_AT)
    other_record = other + tl.load(other + 1) + tile.to(tl.int64) * _TILE_FIELDS
    other_line = other + tl.load(other_record + _LINE_AT)
    head, tokens, _, word, mask = _turns(record, line, lane)
    source = _row(table, record, line, head, tokens, mask, pooled)
    target = _row(other, other_record, other_line, head, tokens, mask, pooled)
    return source, target, word, mask, other_line


@_jit
def _move_between(
    table: tl.tensor, other: tl.tensor, pooled: tl.constexpr, tile_words: tl.constexpr, words: tl.constexpr
) -> None:
    """Copy every piece of a launch without odd chunks, from rows of `table` to rows of `other`."""
    pieces: tl.constexpr = tile_words // words
    end = tl.load(table) * pieces
    piece = tl.program_id(0)
    while piece < end:
        lane = piece % pieces * words + tl.arange(0, words)
        source, target, word, mask, _ = _both(table, other, piece // pieces, lane, pooled)
        bytes_in_row = word.to(tl.int64) * 16
        _write(target + bytes_in_row, _read(source + bytes_in_row, mask), mask)
        piece += tl.num_programs(0)


@_jit
def _move_between_odd(
    table: tl.tensor, other: tl.tensor, pooled: tl.constexpr, tile_words: tl.constexpr, words: tl.constexpr
) -> None:
    """As `_move_between`, for a launch with odd chunks."""
    pieces: tl.constexpr = tile_words // words
    end = tl.load(table) * pieces
    piece = tl.program_id(0)
    while piece < end:
        lane = piece % pieces * words + tl.arange(0, words)
        source, target, word, mask, line = _both(table, other, piece // pieces, lane, pooled)
        _copy(source, target, tl.load(line + _ROW_BYTES), word, mask, tl.load(line + _GRAIN_BYTES))
        piece += tl.num_programs(0)
