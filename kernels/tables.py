"""What the Triton kernel reads: the chunks of one launch as one array, uploaded in one piece.

A launch is cut into *tiles*, each a run of the packed form of one chunk; a program of the grid takes every n-th tile,
whatever chunk it belongs to. The unit of a chunk is its *word*: the widest access, 16 bytes at most, that divides its
row length, its head stride and all its addresses, so that it never straddles a row or misses its alignment. All tiles
have the same number of words, hence differ in bytes from chunk to chunk. An odd row or base costs its own chunk the
width, not the launch.

The array is int64:

    [0]      number of tiles
    [1]      where the list of tiles begins, counted in int32
    [2 ...]  one line of `Field` for each chunk
    ...      for each chunk `pointers` (pool by pool), `token_offset`
    ...      as int32: for each chunk `token_pool`; then the list of tiles: the chunk of each tile

A chunk without bytes has no line. Heads that lie back to back are told as one head with a longer row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from rdma_kv.errors import ConfigError
from rdma_kv.kernels.launch import Chunk, Int64Array

WIDEST_WORD_BYTES = 16  # of one access of a GPU thread
HEADER = 2


class Field(IntEnum):
    """Columns of a chunk's line. `*_AT` are places in the array, counted in its own items or, for POOL_AT, in int32."""

    FIRST_TILE = 0
    WORD_BYTES = 1
    WORDS = 2  # of the packed form
    ROW_WORDS = 3
    HEADS = 4
    TOKENS = 5
    PLANES = 6
    HEAD_STRIDE = 7  # bytes
    PACKED_ADDRESS = 8
    POINTERS_AT = 9
    OFFSET_AT = 10
    POOL_AT = 11


@dataclass(frozen=True, slots=True)
class _Line:
    """A chunk with bytes, its heads joined where they lie back to back."""

    chunk: Chunk
    heads: int
    row_bytes: int
    word_bytes: int
    tiles: int


def _line(chunk: Chunk, tile_words: int) -> _Line:
    for field, count in (("heads", chunk.heads), ("token_offset", chunk.tokens), ("pointers", chunk.pointers.size)):
        if count >> 31:
            raise ConfigError(field, f"{count} are more than the kernel counts in 32 bits")
    joined = chunk.heads == 1 or chunk.head_stride == chunk.row_bytes
    heads, row_bytes = (1, chunk.heads * chunk.row_bytes) if joined else (chunk.heads, chunk.row_bytes)
    bits = WIDEST_WORD_BYTES | chunk.packed_address | row_bytes | (0 if joined else chunk.head_stride)
    bits |= int(np.bitwise_or.reduce(chunk.pointers, axis=None)) | int(np.bitwise_or.reduce(chunk.token_offset))
    word_bytes = bits & -bits
    return _Line(chunk, heads, row_bytes, word_bytes, -(-chunk.packed_bytes // (word_bytes * tile_words)))


class Tables:
    """The array of one launch, before there is memory for it. Reads the chunks until `write` is done.

    Attributes:
        tiles: in all chunks; 0 is a launch that moves nothing.
        size: int64 items of the array.
    """

    def __init__(self, chunks: Sequence[Chunk], tile_words: int) -> None:
        """Cut chunks into tiles of `tile_words` words.

        Raises:
            ConfigError: a chunk's field has a wrong shape, dtype or range.
        """
        for chunk in chunks:
            chunk.validate()
        self._lines = [_line(chunk, tile_words) for chunk in chunks if chunk.packed_bytes]
        self.tiles = sum(line.tiles for line in self._lines)
        tokens = sum(line.chunk.tokens for line in self._lines)
        self._arrays_at = HEADER + len(self._lines) * len(Field)
        self._int32_at = self._arrays_at + tokens + sum(line.chunk.pointers.size for line in self._lines)
        self.size = self._int32_at + -(-(tokens + self.tiles) // 2)

    def write(self, out: Int64Array) -> None:
        """Fill `out`, int64 `[size]`."""
        int32 = out.view(np.int32)
        at, int32_at, first_tile = self._arrays_at, 2 * self._int32_at, 0
        fields = out[HEADER : self._arrays_at].reshape(len(self._lines), len(Field))
        for line, to in zip(self._lines, fields, strict=True):
            chunk = line.chunk
            offset_at = at + chunk.pointers.size
            to[Field.FIRST_TILE] = first_tile
            to[Field.WORD_BYTES] = line.word_bytes
            to[Field.WORDS] = chunk.packed_bytes // line.word_bytes
            to[Field.ROW_WORDS] = line.row_bytes // line.word_bytes
            to[Field.HEADS] = line.heads
            to[Field.TOKENS] = chunk.tokens
            to[Field.PLANES] = chunk.planes
            to[Field.HEAD_STRIDE] = chunk.head_stride
            to[Field.PACKED_ADDRESS] = chunk.packed_address
            to[Field.POINTERS_AT] = at
            to[Field.OFFSET_AT] = offset_at
            to[Field.POOL_AT] = int32_at
            out[at:offset_at].reshape(chunk.pointers.shape)[...] = chunk.pointers
            at = offset_at + chunk.tokens
            out[offset_at:at] = chunk.token_offset
            int32[int32_at : int32_at + chunk.tokens] = chunk.token_pool
            int32_at += chunk.tokens
            first_tile += line.tiles
        out[0], out[1] = self.tiles, int32_at
        tiles = [line.tiles for line in self._lines]
        int32[int32_at : int32_at + self.tiles] = np.arange(len(tiles), dtype=np.int32).repeat(tiles)
