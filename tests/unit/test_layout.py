"""Layouts against NumPy arrays of the engines' shapes, and what a layout refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import Pool, PoolShape
from strategies import layouts

from rdma_kv.errors import ConfigError
from rdma_kv.layout import KvLayout, Origin

seeded = settings(derandomize=True, deadline=None, database=None, max_examples=100)

NAMED = ["nhd", "hnd", "mla", "lightllm", "sglang", "trtllm"]


def pool_of(name: str, kv: int = 2) -> Pool:
    shape = PoolShape(
        layers=3,
        kv=1 if name == "mla" else kv,
        pages=5,
        page_size=1 if name == "lightllm" else 4,
        heads=1 if name == "mla" else 2,
        row_bytes=6,
    )
    return Pool(name, shape, np.random.default_rng(0))


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def check_against_numpy(pool: Pool) -> None:
    """Strides and origins are those of the views."""
    layout = pool.layout
    for layer, planes in enumerate(pool.planes):
        for kv, plane in enumerate(planes):
            sizes = (layout.num_pages, layout.page_size, layout.heads, layout.row_bytes)
            assert plane.shape == sizes
            strides = (layout.page_stride, layout.token_stride, layout.head_stride, 1)
            for size, ours, theirs in zip(sizes, strides, plane.strides, strict=True):
                assert size == 1 or ours == theirs
            origin = layout.origins[layer][kv]
            assert address(plane) == address(pool.buffers[origin.buffer]) + origin.offset


@pytest.mark.parametrize("name", NAMED)
def test_named_layouts_are_the_arrays_of_the_engines(name: str):
    pool = pool_of(name)
    check_against_numpy(pool)
    assert pool.layout.name == name
    assert (pool.layout.num_layers, pool.layout.kv_factor) == (3, 1 if name == "mla" else 2)
    assert pool.layout.required_bytes() == tuple(buffer.size for buffer in pool.buffers)


@pytest.mark.parametrize("name", ["nhd", "hnd", "trtllm"])
def test_layouts_with_one_plane_a_layer(name: str):
    pool = pool_of(name, kv=1)
    check_against_numpy(pool)
    assert pool.layout.required_bytes() == tuple(buffer.size for buffer in pool.buffers)


@pytest.mark.parametrize("name", [*NAMED, "custom"])
def test_pointers_are_addresses_of_planes(name: str):
    pool = pool_of(name)
    pointers = pool.layout.pointers(np.array([address(buffer) for buffer in pool.buffers], dtype=np.int64))
    assert pointers.dtype == np.int64
    assert pointers.tolist() == [[address(plane) for plane in planes] for planes in pool.planes]


@pytest.mark.parametrize("seed", range(10))
def test_custom_strides(seed: int):
    shape = PoolShape(layers=2, kv=2, pages=3, page_size=4, heads=2, row_bytes=3)
    check_against_numpy(Pool("custom", shape, np.random.default_rng(seed)))


@seeded
@given(layouts())
def test_no_two_rows_share_a_byte(layout: KvLayout):
    touched = [np.zeros(size, dtype=np.int64) for size in layout.required_bytes()]
    cells = (
        np.arange(layout.num_pages)[:, None, None, None] * layout.page_stride
        + np.arange(layout.page_size)[:, None, None] * layout.token_stride
        + np.arange(layout.heads)[:, None] * layout.head_stride
        + np.arange(layout.row_bytes)
    )
    for planes in layout.origins:
        for origin in planes:
            assert cells.max() + 1 == layout.plane_bytes
            np.add.at(touched[origin.buffer], origin.offset + cells, 1)
    assert all(count.max(initial=0) <= 1 for count in touched)


FINE = {
    "origins": ((Origin(0, 0), Origin(0, 10_000)),),
    "num_pages": 4,
    "page_size": 4,
    "heads": 2,
    "row_bytes": 8,
    "page_stride": 64,
    "token_stride": 16,
    "head_stride": 8,
}

BAD = [
    ({"num_pages": 0}, "num_pages"),
    ({"page_size": -1}, "page_size"),
    ({"heads": 0}, "heads"),
    ({"row_bytes": 0}, "row_bytes"),
    ({"origins": ()}, "origins"),
    ({"origins": ((),)}, "origins"),
    ({"origins": ((Origin(0, 0),), (Origin(0, 9), Origin(0, 99)))}, "origins"),
    ({"origins": ((Origin(0, -1),),)}, "origins"),
    ({"origins": ((Origin(-1, 0),),)}, "origins"),
    ({"head_stride": 7}, "head_stride"),
    ({"head_stride": 0}, "head_stride"),
    ({"head_stride": -8}, "head_stride"),
    ({"token_stride": 15}, "token_stride"),
    ({"token_stride": 8}, "token_stride"),
    ({"page_stride": 63}, "page_stride"),
    ({"page_stride": 0}, "page_stride"),
    ({"page_stride": -64}, "page_stride"),
    ({"origins": ((Origin(0, 0), Origin(0, 0)),)}, "origins"),
    ({"origins": ((Origin(0, 0), Origin(0, 255)),)}, "origins"),
    ({"origins": ((Origin(0, 8),), (Origin(0, 0),))}, "origins"),
]


def test_the_layout_that_the_bad_ones_are_made_of():
    assert KvLayout(**FINE).required_bytes() == (10_000 + 4 * 64,)


@pytest.mark.parametrize(("facts", "field"), BAD, ids=str)
def test_a_bad_layout_is_refused_by_field(facts: dict[str, object], field: str):
    with pytest.raises(ConfigError) as refused:
        KvLayout(**{**FINE, **facts})
    assert refused.value.field == field
    assert str(refused.value).startswith(f"{field}: ")


def test_strides_of_a_single_item_do_not_matter():
    assert KvLayout(**{**FINE, "num_pages": 1, "page_stride": 0}).plane_bytes == 64
    assert KvLayout(**{**FINE, "heads": 1, "head_stride": 0}).plane_bytes == 3 * 64 + 3 * 16 + 8


def test_planes_may_lie_between_each_other():
    """K and V of one token side by side, and a V plane in the gap behind each K page."""
    half = {"row_bytes": 4, "head_stride": 8}
    KvLayout(**{**FINE, **half, "origins": ((Origin(0, 0), Origin(0, 4)),)})
    gap = {"page_stride": 128, "origins": ((Origin(0, 0), Origin(0, 64)),)}
    KvLayout(**{**FINE, **gap})
    KvLayout(**{**FINE, "origins": ((Origin(0, 0), Origin(1, 0)),)})


@seeded
@given(st.integers(0, 300), st.sampled_from([(64, 16, 8), (128, 16, 8), (24, 100, 8), (8, 40, 1000), (300, 30, 8)]))
def test_planes_that_share_bytes_are_refused_and_no_others(shift: int, strides: tuple[int, int, int]):
    page, token, head = strides
    facts = {**FINE, "page_stride": page, "token_stride": token, "head_stride": head, "origins": ((Origin(0, 0),),)}
    rows = {p * page + t * token + h * head + b for p in range(4) for t in range(4) for h in range(2) for b in range(8)}
    facts["origins"] = ((Origin(0, 0), Origin(0, shift)),)
    if rows & {row + shift for row in rows}:
        with pytest.raises(ConfigError) as refused:
            KvLayout(**facts)
        assert refused.value.field == "origins"
    else:
        KvLayout(**facts)
