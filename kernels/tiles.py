"""The Triton kernels behind `gather` and `scatter`, and their launch: theory of the tiling.

A tile is a run of words of one plane of one chunk (`tables` says what a word is). Programs take pieces of tiles, as large as
their `Shape` says, and each lane of a piece has one word. The packed form of a plane is one line of words, so consecutive
lanes always have consecutive packed words: that side is coalesced whatever the geometry, and the paged side as far as rows
reach. No lane idles but in a plane's last tile.

Where a lane's word lies in the paged form is read off an odometer whose wheels are word in row, head, token. The host gives
its stand at the tile's first word. From there each lane goes on by i words, and the turns of a wheel are what the next one
goes on by. As none goes on by more than a tile, this is 32-bit arithmetic with one divisor for all lanes, whatever the
sizes; offsets and addresses have 64 bits throughout. What it costs is one load from the tables and some 40 instructions for
16 bytes, several words a thread, so that many loads are under way before the first is waited for.

**Division of small numbers.** A wheel longer than a tile passes its end once at most, so its front is cut off (`*_CUT`), and
the dividend is below 2**16 and the divisor at most 2**15. All lanes divide by one divisor, so they multiply by a factor,
2**31 / divisor rounded up (`*_FACTOR`), and keep the high half of twice the product: exact, because dividend times divisor
stays below 2**31.

**Odd chunks** have rows of any length at any address. A word is 16 aligned bytes where it is *written*; where it is read it
lies across two aligned words, which are read whole and shifted together. The first and the last word of a row are written in
part, in units of the chunk's grain. So any alignment costs three accesses of 16 bytes instead of two, and a few narrow ones.

Copying is between addresses that the tables name, so a kernel takes no argument but the tables. Words are copied, never
interpreted: NaN patterns and any dtype pass unchanged. A word of 16 bytes is two int64 that Triton is told to be adjacent
and aligned, and becomes one access. Cache hints do not help: of `.cs`, `.cg`, `.wt`, evict_first and evict_last none was
faster than none, with many small programs.

With `TRITON_INTERPRET=1` in the environment when this module is imported, Triton runs the same kernels on the host, in
NumPy, on addresses of this process: slow, for tests, and one launch at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from rdma_kv.errors import ConfigError
from rdma_kv.kernels.dispatch import INTERPRETED, PROGRAMS, Queue, check_device, check_programs, queue_of, start
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.tables import Line, Tables, Tile

__all__ = ["INTERPRETED", "PROGRAMS", "Shape", "Upload", "launch", "upload"]

_LINE_AT = tl.constexpr(int(Tile.LINE_AT))
_BASE = tl.constexpr(int(Tile.BASE))
_PACKED = tl.constexpr(int(Tile.PACKED))
_OFFSET_AT = tl.constexpr(int(Tile.OFFSET_AT))
_POOL_AT = tl.constexpr(int(Tile.POOL_AT))
_HEAD = tl.constexpr(int(Tile.HEAD))
_WORD = tl.constexpr(int(Tile.WORD))
_WORDS = tl.constexpr(int(Tile.WORDS))
_TILE_FIELDS = tl.constexpr(len(Tile))
_GRAIN_BYTES = tl.constexpr(int(Line.GRAIN_BYTES))
_ROW_BYTES = tl.constexpr(int(Line.ROW_BYTES))
_ROW_WORDS = tl.constexpr(int(Line.ROW_WORDS))
_ROW_CUT = tl.constexpr(int(Line.ROW_CUT))
_ROW_FACTOR = tl.constexpr(int(Line.ROW_FACTOR))
_HEADS = tl.constexpr(int(Line.HEADS))
_HEAD_CUT = tl.constexpr(int(Line.HEAD_CUT))
_HEAD_FACTOR = tl.constexpr(int(Line.HEAD_FACTOR))
_HEAD_STRIDE = tl.constexpr(int(Line.HEAD_STRIDE))
_PLANES = tl.constexpr(int(Line.PLANES))

_jit: Callable[[Callable[..., Any]], Any] = triton.jit


TILE_WORDS = 8192
"""Of a tile in the tables: 128 KiB, so that they are small beside the bytes."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a program works on at a time; to be tuned per GPU, without effect on the result.

    Attributes:
        words: of a piece, of 16 bytes each; a power of two up to 32,768. More than a tile's are as many.
        warps: of a program, a power of two up to 32.
        registers: a thread has at most; None leaves it to the compiler. 32 let a multiprocessor hold all its 64 warps.
    """

    words: int
    warps: int
    registers: int | None = None

    def __post_init__(self) -> None:
        for field, value, most in (("words", self.words, 1 << 15), ("warps", self.warps, 32)):
            if not 1 <= value <= most or value & (value - 1):
                raise ConfigError(field, f"{value} is no power of two up to {most:,}")


# Measured on an H200. Few programs want as much in flight as registers hold (MIDDLE where planes are shorter than that).
# Where each can have but one piece, small programs share the work out best, two words a thread. Odd chunks want one word a
# thread, and programs that stay: more of them than _ODD_PROGRAMS are slower.
WIDE = Shape(8192, 32)
MIDDLE = Shape(2048, 32)
NARROW = Shape(256, 4, 32)
ODD = Shape(1024, 32, 32)
_ODD_PROGRAMS = 1056


def best_shape(programs: int, *, tiles: int, planes: int, tile_words: int, odd: bool) -> Shape:
    """Of so many programs that share so many tiles, of which `planes` begin a plane."""
    if odd:
        return ODD
    if programs >= tiles * (tile_words // NARROW.words):
        return NARROW
    return WIDE if tiles >= 2 * max(programs, planes) else MIDDLE


def bounded(programs: int, shape: Shape, *, tiles: int, tile_words: int, odd: bool) -> int:
    """As many programs as have something to do, and no more than pay."""
    pieces = tiles * (tile_words // min(shape.words, tile_words))
    return min(programs, pieces, _ODD_PROGRAMS) if odd else min(programs, pieces)


@dataclass(frozen=True, slots=True)
class Upload:
    """Tables on the device, as launches on `stream` read them; dropping it there and then is safe.

    Attributes:
        table: int64 `[Tables.size]`.
        tiles: of the launch.
        plane_tiles: of them, those that begin a plane.
        tile_words: of a tile.
        pooled: see `tables`, as `odd`.
        stream: None is the device's current stream.
    """

    table: torch.Tensor
    tiles: int
    plane_tiles: int
    tile_words: int
    pooled: bool
    odd: bool
    stream: torch.cuda.Stream | None

    def shape(self, programs: int) -> Shape:
        """The best of so many programs."""
        return best_shape(programs, tiles=self.tiles, planes=self.plane_tiles, tile_words=self.tile_words, odd=self.odd)

    def start(self, *, scatter: bool, programs: int, shape: Shape | None = None) -> None:
        """Launch the kernel once: scatter, or gather. May be called again while the chunks' memory lasts.

        Args:
            scatter: from the packed form to the paged one.
            programs: of the grid; no more than there are pieces are started.
            shape: of a program, instead of the best.
        """
        queue = queue_of(self.table.device, self.stream)
        with queue.feed.lock, queue.current(self.stream):
            _start(self, self.table, queue, scatter=scatter, programs=programs, shape=shape or self.shape(programs))


def upload(
    chunks: Sequence[Chunk],
    *,
    device: torch.device | str,
    stream: torch.cuda.Stream | None = None,
    tile_words: int | None = None,
) -> Upload | None:
    """Send the tables of a launch to the device, in one copy on `stream`, to be launched any number of times.

    `gather` and `scatter` do without an `Upload`: they have memory for the tables of one launch.

    Args:
        chunks: as for `gather`.
        device: as for `gather`.
        stream: as for `gather`.
        tile_words: a power of two up to 32,768; None is `TILE_WORDS`.

    Returns:
        None if the chunks have no bytes.

    Raises:
        ConfigError: a chunk's field has a wrong shape, dtype or range, or the device cannot run the kernel.
    """
    device = check_device(device, stream)
    tables = Tables(chunks, TILE_WORDS if tile_words is None else tile_words)
    if not tables.tiles:
        return None
    queue = queue_of(device, stream)
    with queue.feed.lock, queue.current(stream):
        table = queue.feed.send(tables.size, tables.write, keep=True)
    return Upload(table, tables.tiles, tables.planes, tables.tile_words, tables.pooled, tables.odd, stream)


def launch(
    chunks: Sequence[Chunk],
    *,
    scatter: bool,
    device: torch.device | str,
    stream: torch.cuda.Stream | None,
    programs: int | None,
) -> None:
    """One small copy and one launch for all chunks, or neither if they have no bytes. See `gather` and `scatter`."""
    programs = check_programs(programs)
    device = check_device(device, stream)
    tables = Tables(chunks, TILE_WORDS)
    if not tables.tiles:
        return
    queue = queue_of(device, stream)
    shape = best_shape(programs, tiles=tables.tiles, planes=tables.planes, tile_words=tables.tile_words, odd=tables.odd)
    with queue.feed.lock, queue.current(stream):
        table = queue.feed.send(tables.size, tables.write)
        _start(tables, table, queue, scatter=scatter, programs=programs, shape=shape)


def _start(
    told: Tables | Upload, table: torch.Tensor, queue: Queue, *, scatter: bool, programs: int, shape: Shape
) -> None:
    start(
        _move_odd if told.odd else _move,
        bounded(programs, shape, tiles=told.tiles, tile_words=told.tile_words, odd=told.odd),
        (table,),
        (scatter, told.pooled, told.tile_words, min(shape.words, told.tile_words)),
        warps=shape.warps,
        registers=shape.registers,
        queue=queue,
    )


@_jit
def _quotient(near: tl.tensor, factor: tl.tensor) -> tl.tensor:
    """Each int32 of `near` by the divisor whose factor this is."""
    return tl.umulhi(near.to(tl.uint32) * 2, factor).to(tl.int32)


@_jit
def _turns(record: tl.tensor, line: tl.tensor, lane: tl.tensor) -> tuple[tl.tensor, ...]:
    """For each lane of a tile, from the tile's first word: on which head it is, how many tokens and rows it has gone on, its
    word in the row, and whether it has work at all."""
    word = tl.load(record + _WORD).to(tl.int32)
    head = tl.load(record + _HEAD).to(tl.int32)
    heads = tl.load(line + _HEADS).to(tl.int32)
    mask = lane < tl.load(record + _WORDS).to(tl.int32)

    near = tl.maximum(word - tl.load(line + _ROW_CUT).to(tl.int32), 0) + lane
    rows = _quotient(near, tl.load(line + _ROW_FACTOR).to(tl.uint32))
    near = tl.maximum(head - tl.load(line + _HEAD_CUT).to(tl.int32), 0) + rows
    tokens = _quotient(near, tl.load(line + _HEAD_FACTOR).to(tl.uint32))
    word_in_row = word + lane - rows * tl.load(line + _ROW_WORDS).to(tl.int32)
    return head + rows - tokens * heads, tokens, rows, word_in_row, mask


@_jit
def _row(
    table: tl.tensor,
    record: tl.tensor,
    line: tl.tensor,
    head: tl.tensor,
    tokens: tl.tensor,
    mask: tl.tensor,
    pooled: tl.constexpr,
) -> tl.tensor:
    """The address of each lane's row in the paged form, within one plane."""
    row = tl.load(table + tl.load(record + _OFFSET_AT) + tokens, mask=mask, other=0)
    row += head.to(tl.int64) * tl.load(line + _HEAD_STRIDE)
    base = tl.load(record + _BASE)
    if pooled:
        pools = table.to(tl.pointer_type(tl.int32)) + tl.load(record + _POOL_AT)
        pool = tl.load(pools + tokens, mask=mask, other=0)
        row += tl.load(table + base + pool * tl.load(line + _PLANES).to(tl.int32), mask=mask, other=0)
    else:
        row += base
    return row


@_jit
def _place(
    table: tl.tensor, tile: tl.tensor, tiles_at: tl.tensor, lane: tl.tensor, pooled: tl.constexpr
) -> tuple[tl.tensor, ...]:
    """For each lane of a tile: the address of its row in the paged form, the number of its row counted from the tile's
    first, its word in that row, and whether it has work at all. Then the places of the tile and of its chunk's line."""
    record = table + tiles_at + tile.to(tl.int64) * _TILE_FIELDS
    line = table + tl.load(record + _LINE_AT)
    head, tokens, rows, word_in_row, mask = _turns(record, line, lane)
    return _row(table, record, line, head, tokens, mask, pooled), rows, word_in_row, mask, record, line


@_jit
def _read(address: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Words of 16 bytes as int64 `[tile_words, 2]`, from aligned int64 addresses `[tile_words]`."""
    pointer = tl.multiple_of(address.to(tl.pointer_type(tl.int64))[:, None], [1, 16]) + tl.arange(0, 2)[None, :]
    return tl.load(pointer, mask=mask[:, None])


@_jit
def _write(address: tl.tensor, words: tl.tensor, mask: tl.tensor) -> None:
    """The counterpart of `_read`."""
    pointer = tl.multiple_of(address.to(tl.pointer_type(tl.int64))[:, None], [1, 16]) + tl.arange(0, 2)[None, :]
    tl.store(pointer, words, mask=mask[:, None])


@_jit
def _move(
    table: tl.tensor, scatter: tl.constexpr, pooled: tl.constexpr, tile_words: tl.constexpr, words: tl.constexpr
) -> None:
    """Copy every piece of a launch without odd chunks: program p of n takes pieces p, p + n, ..."""
    pieces: tl.constexpr = tile_words // words
    tiles_at = tl.load(table + 1)
    end = tl.load(table) * pieces
    piece = tl.program_id(0)
    while piece < end:  # range() over scalars of the interpreter fails with Triton 3.6 and NumPy 2.4
        lane = piece % pieces * words + tl.arange(0, words)
        row, _, word, mask, record, _ = _place(table, piece // pieces, tiles_at, lane, pooled)
        paged = row + word.to(tl.int64) * 16
        packed = tl.load(record + _PACKED) + tl.load(record + _WORD) * 16 + lane.to(tl.int64) * 16
        if scatter:
            _write(paged, _read(packed, mask), mask)
        else:
            _write(packed, _read(paged, mask), mask)
        piece += tl.num_programs(0)


@_jit
def _edges(
    target: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    low_half: tl.tensor,
    high_half: tl.tensor,
    unit: tl.constexpr,
) -> None:
    """Write bytes `[begin, end)` of the 16 at each `target`, in units of type `unit`."""
    unit_bytes: tl.constexpr = unit.primitive_bitwidth // 8
    pointer = target.to(tl.pointer_type(unit))
    for number in tl.static_range(16 // unit_bytes):
        half = low_half if number * unit_bytes < 8 else high_half
        value = (half >> (number * unit_bytes % 8 * 8)).to(unit)
        tl.store(pointer + number, value, mask=(begin <= number * unit_bytes) & (number * unit_bytes < end))


@_jit
def _shifted(
    source: tl.tensor, target: tl.tensor, row_bytes: tl.tensor, word: tl.tensor, mask: tl.tensor, grain: tl.tensor
) -> None:
    """Copy words of rows between addresses of any alignment, int64 `[tile_words]`, by aligned accesses.

    A word is aligned where it is written. Where it is read it lies across two aligned ones, which are shifted together:
    so up to 15 bytes beside the row are read, within the aligned 16 bytes of a byte of it.
    """
    skew = (target & 15).to(tl.int32)
    bytes_in_row = word.to(tl.int64) * 16 - skew
    begin = tl.where(word == 0, skew, 0)
    end = tl.minimum(row_bytes - bytes_in_row, 16).to(tl.int32)
    end = tl.where(mask, end, 0)  # a lane without work, as a word that the row does not reach, has no byte
    place = source + bytes_in_row
    behind = 16 - (place & 15).to(tl.int32)  # bytes that the first aligned word has of this one
    first = _read(place & -16, (begin < end) & (begin < behind))
    second = _read((place & -16) + 16, (begin < end) & (behind < end))
    first_low, first_high = tl.split(first.to(tl.uint64, bitcast=True))
    second_low, second_high = tl.split(second.to(tl.uint64, bitcast=True))
    far = behind <= 8
    low = tl.where(far, first_high, first_low)
    middle = tl.where(far, second_low, first_high)
    high = tl.where(far, second_high, second_low)
    shift = ((place & 7) * 8).to(tl.uint64)
    low_half = (low >> shift) | (middle << 1 << (63 - shift))
    high_half = (middle >> shift) | (high << 1 << (63 - shift))
    at = target - skew + word.to(tl.int64) * 16
    whole = (begin == 0) & (end == 16)
    _write(at, tl.join(low_half, high_half).to(tl.int64, bitcast=True), whole)
    begin = tl.where(whole, 16, begin)
    if grain == 8:
        _edges(at, begin, end, low_half, high_half, tl.uint64)
    elif grain == 4:
        _edges(at, begin, end, low_half, high_half, tl.uint32)
    elif grain == 2:
        _edges(at, begin, end, low_half, high_half, tl.uint16)
    else:
        _edges(at, begin, end, low_half, high_half, tl.uint8)


@_jit
def _copy(
    source: tl.tensor, target: tl.tensor, row_bytes: tl.tensor, word: tl.tensor, mask: tl.tensor, grain: tl.tensor
) -> None:
    """Copy words of rows between addresses of that grain, int64 `[tile_words]`."""
    if grain == 16:
        bytes_in_row = word.to(tl.int64) * 16
        _write(target + bytes_in_row, _read(source + bytes_in_row, mask), mask)
    else:
        _shifted(source, target, row_bytes, word, mask, grain)


@_jit
def _move_odd(
    table: tl.tensor, scatter: tl.constexpr, pooled: tl.constexpr, tile_words: tl.constexpr, words: tl.constexpr
) -> None:
    """As `_move`, for a launch with odd chunks."""
    pieces: tl.constexpr = tile_words // words
    tiles_at = tl.load(table + 1)
    end = tl.load(table) * pieces
    piece = tl.program_id(0)
    while piece < end:
        lane = piece % pieces * words + tl.arange(0, words)
        paged, rows, word, mask, record, line = _place(table, piece // pieces, tiles_at, lane, pooled)
        row_bytes = tl.load(line + _ROW_BYTES)
        packed = tl.load(record + _PACKED) + rows.to(tl.int64) * row_bytes
        grain = tl.load(line + _GRAIN_BYTES)
        if scatter:
            _copy(packed, paged, row_bytes, word, mask, grain)
        else:
            _copy(paged, packed, row_bytes, word, mask, grain)
        piece += tl.num_programs(0)
