"""What the Triton kernel is told: words and grains, joined heads, tiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rdma_kv.errors import ConfigError
from rdma_kv.kernels import tables
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.tables import HEADER, Line, Tables, Tile

GOOD = Chunk(
    packed_address=1 << 20,
    pointers=np.array([[8192, 9216, 10240], [18192, 19216, 20240]], np.int64),
    token_pool=np.array([0, 1, 0, 1], np.int32),
    token_offset=np.array([0, 64, 128, 192], np.int64),
    heads=2,
    head_stride=512,
    row_bytes=64,
)
EMPTY = Chunk(0, np.zeros((0, 3), np.int64), np.zeros(0, np.int32), np.zeros(0, np.int64), 1, 0, 64)


Lines = list[dict[Line, int]]
Tiles = list[dict[Tile, int]]


def written(*chunks: Chunk, tile_words: int = 16) -> tuple[Lines, Tiles, np.ndarray]:
    """The chunks' lines, the tiles, and the whole array."""
    made = Tables(chunks, tile_words)
    out = np.full(made.size, -1, np.int64)
    made.write(out)
    assert out[0] == made.tiles
    lines = out[HEADER : out[1]].reshape(-1, len(Line))
    own = out[out[1] :][: made.tiles * len(Tile)].reshape(-1, len(Tile))
    named = [dict(zip(Line, line.tolist(), strict=True)) for line in lines]
    return named, [dict(zip(Tile, tile.tolist(), strict=True)) for tile in own], out


@pytest.mark.parametrize(
    ("change", "grain_bytes"),
    [
        ({}, 16),
        ({"packed_address": (1 << 20) + 8}, 8),
        ({"pointers": GOOD.pointers + np.array([[0, 0, 0], [0, 4, 0]])}, 4),
        ({"token_offset": GOOD.token_offset + np.array([0, 0, 2, 0])}, 2),
        ({"token_offset": GOOD.token_offset - 16}, 16),
        ({"head_stride": 513}, 1),
        ({"head_stride": 513, "heads": 1}, 16),
        ({"row_bytes": 24}, 8),
        ({"row_bytes": 24, "head_stride": 24}, 16),  # two heads of 24 bytes are a row of 48
        ({"row_bytes": 33}, 1),
    ],
)
def test_grain_is_what_divides_everything(change: dict[str, object], grain_bytes: int) -> None:
    chunk = replace(GOOD, **change)
    ((line,), _, _) = written(chunk)
    assert line[Line.GRAIN_BYTES] == grain_bytes
    assert Tables([chunk], 16).odd == (grain_bytes < 16)


@pytest.mark.parametrize("grain_bytes", [1, 2, 4, 8, 16])
def test_words_of_a_row_are_those_that_it_can_touch(grain_bytes: int) -> None:
    for row_bytes in range(grain_bytes, 100, grain_bytes):
        touched = [(at + row_bytes - 1) // 16 - at // 16 + 1 for at in range(0, 16, grain_bytes)]
        ((line,), _, _) = written(replace(GOOD, heads=1, row_bytes=row_bytes, packed_address=(1 << 20) + grain_bytes))
        if line[Line.GRAIN_BYTES] == grain_bytes:
            assert line[Line.ROW_WORDS] == max(touched)


def test_an_odd_chunk_leaves_the_others_whole() -> None:
    lines, _, _ = written(GOOD, replace(GOOD, row_bytes=33), GOOD)
    assert [line[Line.GRAIN_BYTES] for line in lines] == [16, 1, 16]
    assert [line[Line.ROW_WORDS] for line in lines] == [4, 3, 4]


def test_heads_that_lie_back_to_back_are_one_row() -> None:
    ((line,), _, _) = written(replace(GOOD, head_stride=64))
    assert (line[Line.HEADS], line[Line.ROW_WORDS]) == (1, 8)


def test_tiles_are_of_one_plane_and_name_their_chunks() -> None:
    """Three planes each: of 32 words, of none, of 16 words, of 24 words of odd rows."""
    lines, tiles, _ = written(GOOD, EMPTY, replace(GOOD, heads=1), replace(GOOD, row_bytes=33), tile_words=16)
    assert len(lines) == 3
    assert [(tile[Tile.LINE_AT] - HEADER) // len(Line) for tile in tiles] == [0] * 6 + [1] * 3 + [2] * 6
    assert [tile[Tile.WORDS] for tile in tiles] == [16] * 9 + [16, 8] * 3


def test_tiles_begin_where_the_one_before_ends() -> None:
    """Rows of 4 words, two heads a token, four tokens a plane, tiles of 2 words."""
    _, tiles, out = written(GOOD, tile_words=2)
    rows = [row for plane in range(3) for row in range(8) for _ in range(2)]
    first_token = tiles[0][Tile.OFFSET_AT]
    assert [tile[Tile.WORD] for tile in tiles] == [0, 2] * 24
    assert [tile[Tile.HEAD] for tile in tiles] == [row % 2 for row in rows]
    assert [tile[Tile.OFFSET_AT] - first_token for tile in tiles] == [row // 2 for row in rows]
    packed = [GOOD.packed_address + 64 * row for row in range(24) for _ in range(2)]
    assert [tile[Tile.PACKED] for tile in tiles] == packed
    assert out[first_token:][:4].tolist() == GOOD.token_offset.tolist()


def test_the_base_is_an_address_where_all_tokens_are_of_one_pool() -> None:
    _, tiles, _ = written(replace(GOOD, token_pool=np.ones(4, np.int32)), tile_words=32)
    assert [tile[Tile.BASE] for tile in tiles] == GOOD.pointers[1].tolist()


def test_the_base_is_a_place_in_the_table_where_pools_differ() -> None:
    one = replace(GOOD, token_pool=np.ones(4, np.int32))
    _, tiles, out = written(GOOD, one, tile_words=32)
    assert [out[tile[Tile.BASE]] for tile in tiles] == GOOD.pointers[0].tolist() * 2
    assert [out[tile[Tile.BASE] + 3] for tile in tiles] == GOOD.pointers[1].tolist() * 2
    pools = [out.view(np.int32)[tile[Tile.POOL_AT] :][:4].tolist() for tile in tiles]
    assert pools == [[0, 1, 0, 1]] * 3 + [[1, 1, 1, 1]] * 3


@pytest.mark.parametrize("size", [1, 2, 3, 37, 100, (1 << 15) - 1, 1 << 15, (1 << 15) + 1, 5 << 20])
@pytest.mark.parametrize("tile_words", [16, 2048, 1 << 15])
def test_division_is_exact(size: int, tile_words: int) -> None:
    """As the kernel does it: whether and how often a wheel passes its end, from any stand, within a tile."""
    cut, factor = tables._division(size, tile_words)
    start = np.unique(np.clip([0, 1, size // 2, size - 2, size - 1], 0, size - 1))[:, None]
    near = np.maximum(start - cut, 0) + np.arange(tile_words)
    assert near.max() < 1 << 31
    assert factor < 1 << 32
    np.testing.assert_array_equal(2 * near * factor >> 32, (start + np.arange(tile_words)) // size)


def test_nothing_to_move() -> None:
    assert written()[:2] == written(EMPTY, EMPTY)[:2] == ([], [])


def test_counts_beyond_32_bits_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Tables([replace(GOOD, heads=1 << 31, row_bytes=1)], 16)
    assert caught.value.field == "heads"
