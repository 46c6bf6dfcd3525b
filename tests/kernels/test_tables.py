"""What the Triton kernel is told: words and grains, joined heads, tiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rdma_kv.errors import ConfigError
from rdma_kv.kernels import tables
from rdma_kv.kernels.checksum import length_term
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.tables import HEADER, Line, Tables, Tile, pair

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


# --- launches that sum


def test_tiles_of_a_launch_that_sums_cross_planes() -> None:
    """Three planes of 32 words are 96 words in tiles of 64; each names its token, plane and first packed byte."""
    tables = Tables([GOOD], 64, [True])
    out = np.full(tables.size, -1, np.int64)
    tables.write(out)
    ((line,), tiles) = (
        out[HEADER : out[1]].reshape(-1, len(Line)),
        out[out[1] :][: tables.tiles * len(Tile)].reshape(-1, len(Tile)),
    )
    assert tiles[:, Tile.WORDS].tolist() == [64, 32]
    assert tiles[:, Tile.PACKED].tolist() == [GOOD.packed_address, GOOD.packed_address + 64 * 16]
    assert (tiles[:, Tile.OFFSET_AT] == line[Line.OFFSET_AT]).all()  # both begin with the first token of a plane
    assert out[tiles[:, Tile.BASE]].tolist() == [GOOD.pointers[0, 0], GOOD.pointers[0, 2]]
    assert (line[Line.TOKENS], line[Line.PACKED]) == (4, GOOD.packed_address)


def test_results_begin_with_what_the_length_adds() -> None:
    chunks = [GOOD, EMPTY, GOOD, replace(GOOD, heads=1)]
    tables = Tables(chunks, 64, [True, True, False, True])
    out = np.full(tables.size, -1, np.int64)
    tables.write(out)
    own = out[tables.results_at :][:4].view(np.uint64).tolist()
    assert tables.size == tables.results_at + 4
    assert own == [length_term(GOOD.packed_bytes), length_term(0), 0, length_term(GOOD.packed_bytes // 2)]
    lines = out[HEADER : out[1]].reshape(-1, len(Line))
    assert lines[:, Line.RESULT_AT].tolist() == [tables.results_at, 0, tables.results_at + 3]


def test_one_pool_that_is_not_the_first_is_found_by_its_place() -> None:
    tables = Tables([replace(GOOD, token_pool=np.ones(4, np.int32))], 64, [True])
    out = np.full(tables.size, -1, np.int64)
    tables.write(out)
    tiles = out[out[1] :][: tables.tiles * len(Tile)].reshape(-1, len(Tile))
    assert out[tiles[:, Tile.BASE]].tolist() == [GOOD.pointers[1, 0], GOOD.pointers[1, 2]]


# --- both sides of a move


def test_a_pair_has_the_same_rows() -> None:
    """Heads lie back to back at the source alone: neither side may join them."""
    here, there = pair([replace(GOOD, head_stride=64, packed_address=0)], [GOOD], 16)
    arrays = []
    for side in (here, there):
        out = np.full(side.size, -1, np.int64)
        side.write(out)
        arrays.append(out)
    lines = [out[HEADER : out[1]] for out in arrays]
    assert [line[Line.HEADS] for line in lines] == [2, 2]
    assert [line[Line.HEAD_STRIDE] for line in lines] == [64, 512]
    own = [out[out[1] :][: here.tiles * len(Tile)].reshape(-1, len(Tile)) for out in arrays]
    for column in (Tile.HEAD, Tile.WORD, Tile.WORDS):
        assert (own[0][:, column] == own[1][:, column]).all()


@pytest.mark.parametrize("target", [False, True])
def test_the_grain_of_a_pair_divides_both_sides(target: bool) -> None:
    """Only strides and addresses of pages count: packed addresses are not read."""
    odd, even = replace(GOOD, head_stride=516), replace(GOOD, packed_address=7)
    here, there = pair(*([[even], [odd]] if target else [[odd], [even]]), 16)
    assert here.odd
    assert there.odd
    here, there = pair([even], [even], 16)
    assert not here.odd


# --- what is kept


def test_what_is_kept_cannot_be_changed() -> None:
    pattern = tables._pattern(3, 4, 2, 64, 16, 16, False)
    assert tables._pattern(3, 4, 2, 64, 16, 16, False) is pattern
    with pytest.raises(ValueError, match="read-only"):
        pattern.tiles[0, 0] = 1


def test_large_patterns_are_not_kept() -> None:
    many = tables._KEPT_TILES * 16
    first, again = (tables._pattern(1, many, 1, 64, 16, 16, False) for _ in range(2))
    assert first is not again
    np.testing.assert_array_equal(first.tiles, again.tiles)


def test_chunks_of_one_launch_are_looked_into_apart() -> None:
    """A wrong one among right ones is refused, wherever it stands; each has its own first pool."""
    for wrong in ({"pointers": GOOD.pointers * 0}, {"token_pool": GOOD.token_pool - np.int32(1)}):
        for place in range(3):
            chunks = [GOOD] * 3
            chunks[place] = replace(GOOD, **wrong)
            with pytest.raises(ConfigError) as caught:
                Tables(chunks, 16)
            assert caught.value.field == next(iter(wrong))
    _, tiles, _ = written(*(replace(GOOD, token_pool=np.full(4, pool, np.int32)) for pool in (1, 0, 1)), tile_words=32)
    assert [tile[Tile.BASE] for tile in tiles] == [*GOOD.pointers[1], *GOOD.pointers[0], *GOOD.pointers[1]]


def test_nothing_to_move() -> None:
    assert written()[:2] == written(EMPTY, EMPTY)[:2] == ([], [])


def test_counts_beyond_32_bits_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Tables([replace(GOOD, heads=1 << 31, row_bytes=1)], 16)
    assert caught.value.field == "heads"
