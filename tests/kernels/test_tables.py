"""What the Triton kernel is told: word sizes, joined heads, tiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rdma_kv.errors import ConfigError
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.tables import HEADER, Field, Tables

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


def written(*chunks: Chunk, tile_words: int = 16) -> tuple[list[dict[Field, int]], list[int]]:
    """The chunks' lines, and the list of tiles."""
    tables = Tables(chunks, tile_words)
    out = np.full(tables.size, -1, np.int64)
    tables.write(out)
    assert out[0] == tables.tiles
    lines = int(out.view(np.int32)[out[1] :][: tables.tiles].max(initial=-1)) + 1
    fields = out[HEADER : HEADER + lines * len(Field)].reshape(lines, len(Field))
    named = [dict(zip(Field, line.tolist(), strict=True)) for line in fields]
    return named, out.view(np.int32)[out[1] :][: tables.tiles].tolist()


@pytest.mark.parametrize(
    ("change", "word_bytes"),
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
def test_word_is_the_widest_that_fits_everywhere(change: dict[str, object], word_bytes: int) -> None:
    ((line,), _) = written(replace(GOOD, **change))
    assert line[Field.WORD_BYTES] == word_bytes


def test_an_odd_chunk_keeps_its_width_to_itself() -> None:
    lines, _ = written(GOOD, replace(GOOD, row_bytes=33), GOOD)
    assert [line[Field.WORD_BYTES] for line in lines] == [16, 1, 16]


def test_heads_that_lie_back_to_back_are_one_row() -> None:
    ((line,), _) = written(replace(GOOD, head_stride=64))
    assert (line[Field.HEADS], line[Field.ROW_WORDS]) == (1, 8)


def test_tiles_name_their_chunks() -> None:
    """96 words, none, 48 words, 792 words of one byte."""
    lines, tiles = written(GOOD, EMPTY, replace(GOOD, heads=1), replace(GOOD, row_bytes=33), tile_words=64)
    assert [line[Field.WORDS] for line in lines] == [96, 48, 792]
    assert [line[Field.FIRST_TILE] for line in lines] == [0, 2, 3]
    assert tiles == [0, 0, 1] + [2] * 13


def test_nothing_to_move() -> None:
    assert written() == written(EMPTY, EMPTY) == ([], [])


def test_counts_beyond_32_bits_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Tables([replace(GOOD, heads=1 << 31, row_bytes=1)], 16)
    assert caught.value.field == "heads"
