"""What the Triton kernel reads: the chunks of one launch as one array, uploaded in one piece.

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
    ...      for each chunk `token_offset`, and `pointers` (pool by pool) if the launch is pooled
    ...      for each chunk `token_pool` as int32, if the launch is pooled

A launch is *pooled* where a chunk's tokens name more than one pool. A chunk without bytes has no line. Heads that lie back
to back are told as one head with a longer row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from rdma_kv.errors import ConfigError
from rdma_kv.kernels.launch import Chunk, Int64Array

WORD_BYTES = 16
HEADER = 2


class Line(IntEnum):
    """Columns of a chunk's line.

    `*_CUT` and `*_FACTOR` are for the division of small numbers by ROW_WORDS and HEADS: see `tiles`.
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


class Tile(IntEnum):
    """Columns of a tile. `*_AT` are places in the array, counted in its own items or, for POOL_AT, in int32."""

    LINE_AT = 0
    BASE = 1  # address of the plane; in a pooled launch the place of its address in the first pool
    PACKED = 2  # address of the first packed byte of the row in which the tile begins
    OFFSET_AT = 3  # of the token in which the tile begins, as POOL_AT
    POOL_AT = 4
    HEAD = 5  # of that token
    WORD = 6  # of that row
    WORDS = 7  # of the tile


@dataclass(frozen=True, slots=True)
class _Part:
    """A chunk with bytes, its heads joined where they lie back to back."""

    chunk: Chunk
    heads: int
    row_bytes: int
    row_words: int
    grain_bytes: int
    first_pool: int
    pooled: bool

    @property
    def plane_words(self) -> int:
        return self.chunk.tokens * self.heads * self.row_words

    def tiles(self, tile_words: int) -> int:
        """Of one plane."""
        return -(-self.plane_words // tile_words)


def _part(chunk: Chunk) -> _Part:
    joined = chunk.heads == 1 or chunk.head_stride == chunk.row_bytes
    heads, row_bytes = (1, chunk.heads * chunk.row_bytes) if joined else (chunk.heads, chunk.row_bytes)
    bits = WORD_BYTES | chunk.packed_address | row_bytes | (0 if joined else chunk.head_stride)
    bits |= int(np.bitwise_or.reduce(chunk.pointers, axis=None)) | int(np.bitwise_or.reduce(chunk.token_offset))
    grain_bytes = bits & -bits
    row_words = (row_bytes - grain_bytes + WORD_BYTES - 1) // WORD_BYTES + 1
    counts = (("heads", heads), ("token_offset", chunk.tokens), ("pointers", chunk.pointers.size))
    for field, count in (*counts, ("row_bytes", row_words)):
        if count >> 31:
            raise ConfigError(field, f"{count} are more than the kernel counts in 32 bits")
    first_pool = int(chunk.token_pool[0])
    pooled = chunk.pointers.shape[0] > 1 and bool((chunk.token_pool != first_pool).any())
    return _Part(chunk, heads, row_bytes, row_words, grain_bytes, first_pool, pooled)


def _division(size: int, tile_words: int) -> tuple[int, int]:
    """Cut and factor of a division by `size`; see `tiles`."""
    cut = max(0, size - tile_words)
    return cut, -(-(1 << 31) // (size - cut))


class Tables:
    """The array of one launch, before there is memory for it. Reads the chunks until `write` is done.

    Attributes:
        tiles: in all chunks; 0 is a launch that moves nothing.
        size: int64 items of the array.
        pooled: some chunk's tokens name more than one pool.
        odd: some chunk is not made of whole words.
        tile_words: of a tile, but for a plane's last.
        planes: of all chunks.
    """

    def __init__(self, chunks: Sequence[Chunk], tile_words: int) -> None:
        """Cut chunks into tiles of `tile_words` words, a power of two up to 32,768.

        Raises:
            ConfigError: a chunk's field has a wrong shape, dtype or range.
        """
        for chunk in chunks:
            chunk.validate()
        self._parts = [_part(chunk) for chunk in chunks if chunk.packed_bytes]
        self.pooled = any(part.pooled for part in self._parts)
        self.odd = any(part.grain_bytes < WORD_BYTES for part in self._parts)
        self.tile_words = tile_words
        self.planes = sum(part.chunk.planes for part in self._parts)
        self.tiles = sum(part.chunk.planes * part.tiles(self.tile_words) for part in self._parts)
        tokens = sum(part.chunk.tokens for part in self._parts)
        self._tiles_at = HEADER + len(self._parts) * len(Line)
        self._arrays_at = self._tiles_at + self.tiles * len(Tile)
        self._int32_at = self._arrays_at + tokens
        self.size = self._int32_at
        if self.pooled:
            self._int32_at += sum(part.chunk.pointers.size for part in self._parts)
            self.size = self._int32_at + -(-tokens // 2)

    def write(self, out: Int64Array) -> None:
        """Fill `out`, int64 `[size]`."""
        out[0], out[1] = self.tiles, self._tiles_at
        lines = out[HEADER : self._tiles_at].reshape(len(self._parts), len(Line))
        tiles = out[self._tiles_at : self._arrays_at].reshape(self.tiles, len(Tile))
        at, int32_at, first_tile = self._arrays_at, 2 * self._int32_at, 0
        for number, part in enumerate(self._parts):
            chunk = part.chunk
            lines[number] = self._line(part)
            plane_tiles = part.tiles(self.tile_words)
            own = tiles[first_tile:][: chunk.planes * plane_tiles].reshape(chunk.planes, plane_tiles, len(Tile))
            first_tile += chunk.planes * plane_tiles
            own[..., Tile.LINE_AT] = HEADER + number * len(Line)
            self._write_tiles(part, own, at, int32_at)
            out[at : at + chunk.tokens] = chunk.token_offset
            at += chunk.tokens
            if self.pooled:
                own[..., Tile.BASE] = np.arange(at, at + chunk.planes)[:, None]
                out[at : at + chunk.pointers.size] = chunk.pointers.reshape(-1)
                at += chunk.pointers.size
                out.view(np.int32)[int32_at : int32_at + chunk.tokens] = chunk.token_pool
                int32_at += chunk.tokens
            else:
                own[..., Tile.BASE] = chunk.pointers[part.first_pool][:, None]

    def _line(self, part: _Part) -> list[int]:
        rows, heads = _division(part.row_words, self.tile_words), _division(part.heads, self.tile_words)
        line = [part.grain_bytes, part.row_bytes, part.row_words, *rows, part.heads, *heads]
        return [*line, part.chunk.head_stride, part.chunk.planes]

    def _write_tiles(self, part: _Part, out: Int64Array, offset_at: int, pool_at: int) -> None:
        """Fill `out`, int64 `[planes, tiles of a plane, columns]`, but for LINE_AT and BASE."""
        plane_rows = part.chunk.tokens * part.heads
        begin = np.arange(0, part.plane_words, self.tile_words)
        row, out[..., Tile.WORD] = np.divmod(begin, part.row_words)
        token, out[..., Tile.HEAD] = np.divmod(row, part.heads)
        plane = np.arange(part.chunk.planes)[:, None]
        out[..., Tile.PACKED] = part.chunk.packed_address + (plane * plane_rows + row) * part.row_bytes
        out[..., Tile.OFFSET_AT] = offset_at + token
        out[..., Tile.POOL_AT] = pool_at + token
        out[..., Tile.WORDS] = np.minimum(part.plane_words - begin, self.tile_words)
