"""Checksums on a GPU, in one launch: the twin of `checksum`, which defines the algorithm.

A launch is cut into *steps* of up to `Stepping.tiles` tiles of one piece; program p of n takes steps p, p + n, ... The
multipliers are the same in every tile, so a program makes them once and keeps them: a word costs one access to memory, one
multiplication and one addition. Whole words at an aligned address are read by 16 bytes a thread. The last
step of a piece that ends within it, and every step of a piece at an odd address, are read by bytes: slower, equal.

What a step adds goes to the piece's place in the result by an atomic addition. Additions come in any order, and the result
is the same in all of them, as integers wrap modulo 2**64. The place begins as what the length adds.

With `TRITON_INTERPRET=1` in the environment when this module is imported, Triton runs the same kernel on the host.
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
from rdma_kv.kernels.checksum import (
    GAMMA,
    MASK,
    MIX_1,
    MIX_2,
    TILE_BYTES,
    TILE_WORDS,
    Piece,
    check_piece,
    length_term,
)
from rdma_kv.kernels.dispatch import check_device, check_programs, queue_of, start
from rdma_kv.kernels.launch import Int64Array

_FIELDS = 3  # of a piece: address, length in bytes, number of its first step
_HEADER = 2  # number of steps, number of pieces

_fields = tl.constexpr(_FIELDS)
_header = tl.constexpr(_HEADER)
_gamma = tl.constexpr(GAMMA)
_mix_1 = tl.constexpr(MIX_1)
_mix_2 = tl.constexpr(MIX_2)
_tile_words = tl.constexpr(TILE_WORDS)

_jit: Callable[[Callable[..., Any]], Any] = triton.jit

# What tl.sum reduces by. The interpreter knows it and sums in NumPy; any other function it calls for each pair of values,
# and tl.sum itself it cannot call where Triton was imported before TRITON_INTERPRET was set.
_plus = tl.standard._sum_combine


@dataclass(frozen=True, slots=True)
class Stepping:
    """What a program works on at a time; to be tuned per GPU, without effect on the result.

    Attributes:
        tiles: of a step, a power of two up to 16. A tile is 8 KiB.
        warps: of a program, a power of two.
    """

    tiles: int = 4
    warps: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.tiles <= 16 or self.tiles & (self.tiles - 1):
            raise ConfigError("tiles", f"{self.tiles} is no power of two up to 16")


STEPPING = Stepping()


def checksums(
    pieces: Sequence[Piece],
    *,
    device: torch.device | str,
    stream: torch.cuda.Stream | None = None,
    programs: int | None = None,
) -> torch.Tensor:
    """The checksum of each piece, computed on `stream`; returns when that is queued, not when the sums are there.

    On the stream of a gather it sees what the gather wrote.

    Args:
        pieces: their memory must stay as it is until the stream has passed the launch.
        device: as for `gather.gather`; "cpu" needs Triton's interpreter, and there the sums are in place on return.
        stream: of that device; None is its current stream.
        programs: of the grid, so at most as many multiprocessors are taken; None is `dispatch.PROGRAMS`.

    Returns:
        int64 `[pieces]` on the device, to be used in the order of the stream. `values` makes numbers of them.

    Raises:
        ConfigError: a piece cannot be one, or an argument does not fit. Nothing was queued.
    """
    programs = check_programs(programs)
    device = check_device(device, stream)
    table, steps = _table(pieces, STEPPING.tiles)
    queue = queue_of(device, stream)
    with queue.feed.lock, queue.current(stream):
        there = queue.feed.send(table.size, lambda out: np.copyto(out, table), keep=True)
        if steps:
            start(
                _sum,
                min(programs, steps),
                (there,),
                (STEPPING.tiles,),
                warps=STEPPING.warps,
                registers=None,
                queue=queue,
            )
    return there[_HEADER : _HEADER + len(pieces)]


def values(sums: torch.Tensor) -> list[int]:
    """Results of `checksums` as the host has them: numbers from 0 to 2**64 - 1. Waits for the current stream."""
    return [value & MASK for value in sums.tolist()]


def _table(pieces: Sequence[Piece], step_tiles: int) -> tuple[Int64Array, int]:
    """What the kernel reads, and the number of steps.

    int64: number of steps, number of pieces; the result of each piece, at first what its length adds; `_FIELDS` of each
    piece; the piece of each step.
    """
    for address, length_bytes in pieces:
        check_piece(address, length_bytes)
    steps = [-(-length_bytes // (step_tiles * TILE_BYTES)) for _, length_bytes in pieces]
    total, count = sum(steps), len(pieces)
    table = np.empty(_HEADER + count * (1 + _FIELDS) + total, np.int64)
    table[:_HEADER] = total, count
    results, fields, piece_of = np.split(table[_HEADER:], [count, count * (1 + _FIELDS)])
    results.view(np.uint64)[:] = [length_term(length_bytes) for _, length_bytes in pieces]
    fields = fields.reshape(count, _FIELDS)
    first_step = 0
    for line, piece, own in zip(fields, pieces, steps, strict=True):
        line[:] = piece.address, piece.length_bytes, first_step
        first_step += own
    piece_of[:] = np.arange(count).repeat(steps)
    return table, total


@_jit
def _mix(values: tl.tensor) -> tl.tensor:
    """`checksum.mixed` of uint64 values."""
    values = (values ^ (values >> 30)) * _mix_1
    values = (values ^ (values >> 27)) * _mix_2
    return values ^ (values >> 31)


@_jit
def _bytes(address: tl.tensor, word: tl.tensor, length_bytes: tl.tensor) -> tl.tensor:
    """Words, uint64, of memory that is not aligned or ends within them, with zeros behind the end."""
    pointer = tl.pointer_type(tl.uint8)
    at = word * 4
    words = tl.load((address + at).to(pointer), mask=at < length_bytes, other=0).to(tl.uint64)
    for number in tl.static_range(1, 4):
        byte = tl.load((address + at + number).to(pointer), mask=at + number < length_bytes, other=0)
        words |= byte.to(tl.uint64) << (8 * number)
    return words


@_jit
def _sum(table: tl.tensor, step_tiles: tl.constexpr) -> None:
    """Add every step of the launch to the result of its piece."""
    lane = tl.arange(0, _tile_words)
    multiplier = _mix((lane + 1).to(tl.uint64) * _gamma) | 1
    steps = tl.load(table)
    count = tl.load(table + 1)
    lines = table + _header + count
    results = (table + _header).to(tl.pointer_type(tl.uint64))
    step = tl.program_id(0)
    while step < steps:  # range() over scalars of the interpreter fails with Triton 3.6 and NumPy 2.4
        piece = tl.load(lines + count * _fields + step)
        address = tl.load(lines + piece * _fields)
        length_bytes = tl.load(lines + piece * _fields + 1)
        own_step = step - tl.load(lines + piece * _fields + 2)
        tile = own_step * step_tiles + tl.arange(0, step_tiles)
        word = tile[:, None] * _tile_words + lane[None, :]
        end_bytes = (own_step + 1) * (step_tiles * _tile_words * 4)
        if (end_bytes <= length_bytes) & (address % 16 == 0):
            pointer = tl.multiple_of(address.to(tl.pointer_type(tl.uint32)), 16)
            words = tl.load(pointer + word).to(tl.uint64)
        else:
            words = _bytes(address, word, length_bytes)
        sums = tl.reduce(words * multiplier[None, :], 1, _plus)
        terms = _mix(sums + (tile + 1).to(tl.uint64) * _gamma)
        terms = tl.where(tile * (_tile_words * 4) < length_bytes, terms, 0)
        tl.atomic_add(results + piece, tl.reduce(terms, 0, _plus), sem="relaxed")
        step += tl.num_programs(0)
