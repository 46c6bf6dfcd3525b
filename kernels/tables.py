"""What the Triton kernels read: the chunks of one launch as one array, uploaded in one piece.

A launch is cut into *tiles*, each a run of words of one (layer, kv) plane of one chunk; the programs of the grid share them,
whatever chunk they belong to. The host works out where a tile begins, with all divisions of 64 bits, so that the kernel
divides in 32 bits and from there only.

A *word* is 16 bytes, the widest access of a GPU thread. Where row length, head stride and all addresses of a chunk are
multiples of 16, its rows are cut into words and nothing is left over. Any other chunk is *odd*: the words of a row are
the aligned words of 16 bytes that the row can touch where it is written, the first and the last of them in part. An odd
chunk costs its launch a slower loop, not the width: see `tiles`.

The array is int64:

    [0]      number of tiles
    [1]      where the tiles begin
    [2 ...]  one line of `Line` for each chunk
    ...      one of `Tile` for each tile
    ...      `token_offset` of each chunk
    ...      `pointers` (pool by pool) of each chunk, if the launch is pooled or sums
    ...      `token_pool` of each chunk as int32, if the launch is pooled
    ...      if the launch sums: of each chunk, those without bytes too, what its checksum begins with

A launch is *pooled* where a chunk's tokens name more than one pool. A chunk without bytes has no line. Heads that lie back
to back are told as one head with a longer row.

A launch that *sums* computes checksums as it gathers: see `summed`. Its tiles are cut from the whole of a chunk, across
planes, so that each begins where a tile of the checksum does. `pair` is for the launch that needs no packed form.

All this is host time of every launch, so it is little Python: what depends on a chunk's sizes alone is kept (`_pattern`),
and what looks into its arrays looks into those of all chunks at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rdma_kv.errors import ConfigError
from rdma_kv.kernels.checksum import length_term
from rdma_kv.kernels.launch import Chunk, Int64Array

WORD_BYTES = 16
HEADER = 2
_KEPT_TILES = 10_000  # of a pattern that is kept, 640 KB: a chunk of 1 GiB has 8,192 and some
_KEPT_PATTERNS = 64
_INT64 = np.dtype(np.int64)  # compared with a dtype, not with a type: twenty times as fast
_INT32 = np.dtype(np.int32)


class Line(IntEnum):
    """Columns of a chunk's line.

    `*_CUT` and `*_FACTOR` are for the division of small numbers by ROW_WORDS, HEADS and TOKENS: see `tiles`. Those from
    TOKENS on are read by launches that sum.
    """

    GRAIN_BYTES = 0  # the power of two that divides all lengths and addresses; 16 if the chunk is not odd
    ROW_BYTES = 1
    ROW_WORDS = 2
    ROW_CUT = 3
    ROW_FACTOR = 4
    HEADS = 5
    HEAD_CUT = 6
    HEAD_FACTOR = 7
    HEAD_STRIDE = 8  # bytes
    PLANES = 9
    TOKENS = 10
    TOKEN_CUT = 11
    TOKEN_FACTOR = 12
    OFFSET_AT = 13  # of the chunk's first token
    PACKED = 14  # address of the chunk's first packed byte
    RESULT_AT = 15  # of its checksum; 0 if none is wanted


class Tile(IntEnum):
    """Columns of a tile. `*_AT` are places in the array, counted in its own items or, for POOL_AT, in int32."""

    LINE_AT = 0
    BASE = 1  # address of the plane; in a launch that is pooled or sums the place of its address, in the first pool
    PACKED = 2  # address of the first packed byte of the row in which the tile begins
    OFFSET_AT = 3  # of the token in which the tile begins, as POOL_AT
    POOL_AT = 4
    HEAD = 5  # of that token
    WORD = 6  # of that row
    WORDS = 7  # of the tile


class _Part(NamedTuple):
    """A chunk with bytes, its heads joined where they lie back to back."""

    chunk: Chunk
    tokens: int
    planes: int
    heads: int
    row_bytes: int
    bits: int  # of the addresses and lengths; the lowest that is set says what divides them all
    first_pool: int
    pooled: bool
    place: int  # among the chunks of the launch

    @property
    def joined(self) -> bool:
        return self.heads == 1


class _Pattern(NamedTuple):
    """What the sizes of a chunk say of its tiles and its line, whatever the addresses; read-only.

    Attributes:
        tiles: int64 `[tiles, columns]`, with BASE, PACKED, OFFSET_AT and POOL_AT counted from 0. BASE counts planes.
        plane_tiles: of one plane; 0 if tiles cross planes.
        line: columns of `Line` up to HEAD_FACTOR.
        tokens: TOKENS and what follows for their division.
    """

    tiles: Int64Array
    plane_tiles: int
    line: tuple[int, ...]
    tokens: tuple[int, int, int]


class Tables:
    """The array of one launch, before there is memory for it. Reads the chunks until `write` is done.

    Attributes:
        tiles: in all chunks; 0 is a launch that moves nothing.
        size: int64 items of the array.
        pooled: some chunk's tokens name more than one pool.
        odd: some chunk is not made of whole words.
        tile_words: of a tile, but for a plane's last.
        planes: of all chunks.
        results_at: place of the first chunk's checksum, `results` of them; both 0 in a launch that does not sum.
    """

    def __init__(self, chunks: Sequence[Chunk], tile_words: int, sums: Sequence[bool] | None = None) -> None:
        """Cut chunks into tiles of `tile_words` words, a power of two up to 32,768.

        Args:
            chunks: of the launch.
            tile_words: of a tile; where sums are wanted a multiple of a checksum's tile.
            sums: for each chunk whether its checksum is wanted; None is a launch that does not sum. Of one with odd
                chunks nothing can be written: look at `odd`.

        Raises:
            ConfigError: a chunk's field has a wrong shape, dtype or range.
        """
        self._set(_parts(chunks), tile_words, sums, chunks)

    @classmethod
    def of(cls, parts: list[_Part], tile_words: int, *, pooled: bool) -> Tables:
        """Of parts that are known to be right; `pooled` even if none of them is."""
        made = cls.__new__(cls)
        made._set(parts, tile_words, None, (), pooled=pooled)
        return made

    def _set(
        self,
        parts: list[_Part],
        tile_words: int,
        sums: Sequence[bool] | None,
        chunks: Sequence[Chunk],
        *,
        pooled: bool = False,
    ) -> None:
        self._parts, self._sums, self._chunks = parts, sums, chunks
        self.tile_words = tile_words
        self.pooled, self.odd = pooled, False
        self._patterns: list[_Pattern] = []
        self._grains: list[int] = []
        self.tiles = self.planes = tokens = pointers = 0
        across = sums is not None
        for part in parts:
            grain_bytes = part.bits & -part.bits
            self.odd |= grain_bytes < WORD_BYTES
            self.pooled |= part.pooled
            pattern = _pattern(part.planes, part.tokens, part.heads, part.row_bytes, grain_bytes, tile_words, across)
            self._patterns.append(pattern)
            self._grains.append(grain_bytes)
            self.tiles += pattern.tiles.shape[0]
            self.planes += part.planes
            tokens += part.tokens
            pointers += part.chunk.pointers.size
        self._tiles_at = HEADER + len(parts) * len(Line)
        self._offsets_at = self._tiles_at + self.tiles * len(Tile)
        self._pointers_at = self._pools_at = self.size = self._offsets_at + tokens
        self._told = self.pooled or across  # pointers stand in the array, and tiles name their places
        if self._told:
            self._pools_at = self.size = self._pointers_at + pointers
        if self.pooled:
            self.size += -(-tokens // 2)
        self.results_at, self.results = (self.size, len(chunks)) if across else (0, 0)
        self.size += self.results

    def write(self, out: Int64Array) -> None:
        """Fill `out`, int64 `[size]`."""
        places = self._places()
        lines: list[int] = [self.tiles, self._tiles_at]
        starts: list[tuple[int, ...]] = []
        line_at = HEADER
        for part, pattern, grain, (offset_at, base_at, pool_at) in zip(
            self._parts, self._patterns, self._grains, places, strict=True
        ):
            chunk = part.chunk
            wanted = self._sums is not None and self._sums[part.place]
            lines += (grain, *pattern.line, chunk.head_stride, part.planes, *pattern.tokens)
            lines += (offset_at, chunk.packed_address, self.results_at + part.place if wanted else 0)
            starts.append((line_at, base_at, chunk.packed_address, offset_at, pool_at, 0, 0, 0))
            line_at += len(Line)
        out[: self._tiles_at] = lines
        if starts:
            self._write_tiles(out, np.array(starts, np.int64))
            self._write_arrays(out)
        if self._sums is not None:
            out[self.results_at : self.results_at + self.results].view(np.uint64)[:] = [
                length_term(chunk.packed_bytes) if wanted else 0
                for chunk, wanted in zip(self._chunks, self._sums, strict=True)
            ]

    def _places(self) -> list[tuple[int, int, int]]:
        """Of each part: where its offsets begin, its pointers (of the first pool that a kernel looks for), its pools."""
        places = []
        offset_at, pointer_at, pool_at = self._offsets_at, self._pointers_at, 2 * self._pools_at
        for part in self._parts:
            first = 0 if self.pooled else part.first_pool * part.planes
            places.append((offset_at, pointer_at + first if self._told else 0, pool_at if self.pooled else 0))
            offset_at += part.tokens
            pointer_at += part.chunk.pointers.size
            pool_at += part.tokens
        return places

    def _write_tiles(self, out: Int64Array, starts: Int64Array) -> None:
        tiles = out[self._tiles_at : self._offsets_at].reshape(self.tiles, len(Tile))
        first = 0
        for part, pattern, start in zip(self._parts, self._patterns, starts, strict=True):
            count = pattern.tiles.shape[0]
            own = tiles[first : first + count]
            first += count
            np.add(pattern.tiles, start, out=own)
            if not self._told:
                addresses = part.chunk.pointers[part.first_pool]
                own[:, Tile.BASE] = addresses if pattern.plane_tiles == 1 else addresses.repeat(pattern.plane_tiles)

    def _write_arrays(self, out: Int64Array) -> None:
        chunks = [part.chunk for part in self._parts]
        _join([chunk.token_offset for chunk in chunks], out[self._offsets_at : self._pointers_at])
        if self._told:
            _join([chunk.pointers.reshape(-1) for chunk in chunks], out[self._pointers_at : self._pools_at])
        if self.pooled:
            tokens = self._pointers_at - self._offsets_at
            at = 2 * self._pools_at
            _join([chunk.token_pool for chunk in chunks], out.view(np.int32)[at : at + tokens])


def pair(sources: Sequence[Chunk], targets: Sequence[Chunk], tile_words: int) -> tuple[Tables, Tables]:
    """The tables of a launch from paged rows to paged rows: tile by tile the same rows, of one size, on both sides.

    `packed_address` is not read. Both have the same `pooled`, and the same `odd` if odd is what either side's chunk is.

    Raises:
        ConfigError: a chunk's field has a wrong shape, dtype or range, or a target is not of its source's sizes.
    """
    if len(sources) != len(targets):
        raise ConfigError("targets", f"{len(targets)} chunks for {len(sources)} sources")
    ways = [_parts(chunks, packed=False) for chunks in (sources, targets)]
    for number, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if _sizes(source) != _sizes(target):
            here, there = (dict(zip(_SIZES, _sizes(chunk), strict=True)) for chunk in (source, target))
            raise ConfigError("targets", f"chunk {number} has {there}, its source {here}")
    for number, (source_part, target_part) in enumerate(zip(*ways, strict=True)):
        ways[0][number], ways[1][number] = _alike(source_part, target_part)
    pooled = any(part.pooled for parts in ways for part in parts)
    return Tables.of(ways[0], tile_words, pooled=pooled), Tables.of(ways[1], tile_words, pooled=pooled)


_SIZES = ("planes", "tokens", "heads", "row_bytes")


def _sizes(chunk: Chunk) -> tuple[int, int, int, int]:
    return chunk.pointers.shape[1], chunk.token_offset.shape[0], chunk.heads, chunk.row_bytes


def _alike(one: _Part, other: _Part) -> tuple[_Part, _Part]:
    """Both with heads joined only if both have, and with the grain that divides both."""
    bits = one.bits | other.bits
    if one.joined == other.joined:
        if one.bits & -one.bits == other.bits & -other.bits:
            return one, other
        return one._replace(bits=bits), other._replace(bits=bits)
    chunk = one.chunk
    for part in (one, other):
        bits |= chunk.row_bytes | part.chunk.head_stride
    sizes: dict[str, Any] = {"heads": chunk.heads, "row_bytes": chunk.row_bytes, "bits": bits}
    return one._replace(**sizes), other._replace(**sizes)


def _parts(chunks: Sequence[Chunk], *, packed: bool = True) -> list[_Part]:
    """Of the chunks with bytes. `packed`: there is a packed form.

    Checks as `Chunk.validate` does, which says what is wrong where anything is.
    """
    used: list[tuple[int, Chunk, int, int]] = []
    for place, chunk in enumerate(chunks):
        pointers, pool, offset = chunk.pointers, chunk.token_pool, chunk.token_offset
        if (
            pointers.dtype != _INT64
            or offset.dtype != _INT64
            or pool.dtype != _INT32
            or pointers.ndim != 2
            or offset.ndim != 1
            or pool.shape != offset.shape
            or chunk.heads < 1
            or chunk.row_bytes < 1
            or (chunk.heads > 1 and chunk.head_stride < chunk.row_bytes)
        ):
            raise _refused(chunks, packed=packed)
        tokens, planes = offset.shape[0], pointers.shape[1]
        if tokens and planes:
            if not pointers.shape[0] or (packed and chunk.packed_address < 1):
                raise _refused(chunks, packed=packed)
            used.append((place, chunk, tokens, planes))
    if not used:
        return []
    try:
        return _looked_into(used, packed=packed)
    except LookupError:
        raise _refused(chunks, packed=packed) from None


def _looked_into(used: list[tuple[int, Chunk, int, int]], *, packed: bool) -> list[_Part]:
    """Raises LookupError where an array names what cannot be."""
    pointers = [chunk.pointers.reshape(-1) for _, chunk, _, _ in used]
    pools = [chunk.token_pool for _, chunk, _, _ in used]
    (offset_bits,) = _reduced([chunk.token_offset for _, chunk, _, _ in used], np.bitwise_or)
    (pointer_bits,) = _reduced(pointers, np.bitwise_or)
    if min(pointer_bits) < 0 or any(map(_zeros, pointers)):
        raise LookupError("pointers")  # below 1
    first = last = [0] * len(used)
    if any(map(_nonzeros, pools)):
        first, last = _reduced(pools, np.minimum, np.maximum)
    parts = []
    for number, (place, chunk, tokens, planes) in enumerate(used):
        heads, row_bytes, head_stride = chunk.heads, chunk.row_bytes, chunk.head_stride
        bits = WORD_BYTES | pointer_bits[number] | offset_bits[number]
        if packed:
            bits |= chunk.packed_address
        if heads == 1 or head_stride == row_bytes:
            heads, row_bytes = 1, heads * row_bytes
        else:
            bits |= head_stride
        bits |= row_bytes
        if first[number] < 0 or last[number] >= chunk.pointers.shape[0]:
            raise LookupError("token_pool")
        pooled = first[number] != last[number]
        parts.append(_Part(chunk, tokens, planes, heads, row_bytes, bits, first[number], pooled, place))
    for part in parts:
        counts = (("heads", part.heads), ("token_offset", part.tokens), ("pointers", part.chunk.pointers.size))
        for field, count in (*counts, ("row_bytes", part.row_bytes >> 4)):
            if count >> 31:
                raise ConfigError(field, f"{count} are more than the kernel counts in 32 bits")
    return parts


def _nonzeros(array: npt.NDArray[Any]) -> int:
    return int(np.count_nonzero(array))  # a fifth of what a reduction costs


def _zeros(array: npt.NDArray[Any]) -> int:
    return int(array.shape[0]) - _nonzeros(array)


def _refused(chunks: Sequence[Chunk], *, packed: bool) -> ConfigError:
    """What is wrong with the chunks, of which something is."""
    try:
        for chunk in chunks:
            (chunk if packed else replace(chunk, packed_address=1)).validate()
    except ConfigError as wrong:
        return wrong
    return ConfigError("chunks", "changed while they were read")


def _reduced(arrays: Sequence[npt.NDArray[Any]], *by: np.ufunc) -> list[list[int]]:
    """Each array, none empty, reduced by each function: as many lists, of one number an array."""
    if len(arrays) == 1:
        return [[int(function.reduce(arrays[0]))] for function in by]
    sizes = [array.shape[0] for array in arrays]
    starts = np.add.accumulate([0, *sizes[:-1]])
    joined = np.concatenate(arrays)
    return [function.reduceat(joined, starts).tolist() for function in by]


def _join(arrays: Sequence[npt.NDArray[Any]], out: npt.NDArray[Any]) -> None:
    if len(arrays) == 1:
        out[:] = arrays[0]
    else:
        np.concatenate(arrays, out=out)


def _division(size: int, tile_words: int) -> tuple[int, int]:
    """Cut and factor of a division by `size`; see `tiles`."""
    cut = max(0, size - tile_words)
    return cut, -(-(1 << 31) // (size - cut))


def _pattern(
    planes: int, tokens: int, heads: int, row_bytes: int, grain_bytes: int, tile_words: int, across: bool
) -> _Pattern:
    """Of a chunk of these sizes; `across`: tiles cross planes."""
    row_words = (row_bytes - grain_bytes + WORD_BYTES - 1) // WORD_BYTES + 1
    if planes * tokens * heads * row_words <= (_KEPT_TILES - planes) * tile_words:
        return _kept_pattern(planes, tokens, heads, row_bytes, row_words, tile_words, across)
    return _new_pattern(planes, tokens, heads, row_bytes, row_words, tile_words, across)


def _new_pattern(
    planes: int, tokens: int, heads: int, row_bytes: int, row_words: int, tile_words: int, across: bool
) -> _Pattern:
    plane_rows = tokens * heads
    plane_words = plane_rows * row_words
    if across:
        words, lines = planes * plane_words, 1
    else:
        words, lines = plane_words, planes
    begin = np.arange(0, words, tile_words)
    out = np.zeros((lines, begin.shape[0], len(Tile)), np.int64)
    row, out[..., Tile.WORD] = np.divmod(begin, row_words)
    token, out[..., Tile.HEAD] = np.divmod(row, heads)
    plane, token = np.divmod(token, tokens)
    plane = plane + np.arange(lines)[:, None]
    out[..., Tile.BASE] = plane
    out[..., Tile.PACKED] = (row + (0 if across else plane * plane_rows)) * row_bytes
    out[..., Tile.OFFSET_AT] = out[..., Tile.POOL_AT] = token
    out[..., Tile.WORDS] = np.minimum(words - begin, tile_words)
    out.flags.writeable = False
    line = (row_bytes, row_words, *_division(row_words, tile_words), heads, *_division(heads, tile_words))
    plane_tiles = 0 if across else begin.shape[0]
    return _Pattern(out.reshape(-1, len(Tile)), plane_tiles, line, (tokens, *_division(tokens, tile_words)))


_kept_pattern = lru_cache(_KEPT_PATTERNS)(_new_pattern)
