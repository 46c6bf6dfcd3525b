"""What a chunk says of itself, and how a wrong one is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from implementations import each_implementation
from kernel_checks import Kernels

from rdma_kv.errors import ConfigError
from rdma_kv.kernels.launch import Chunk

GOOD = Chunk(
    packed_address=4096,
    pointers=np.array([[8192, 9216, 10240], [18192, 19216, 20240]], np.int64),
    token_pool=np.array([0, 1, 0, 1], np.int32),
    token_offset=np.array([0, 64, 128, 192], np.int64),
    heads=2,
    head_stride=512,
    row_bytes=64,
)


def test_sizes() -> None:
    assert (GOOD.tokens, GOOD.planes, GOOD.packed_bytes) == (4, 3, 3 * 4 * 2 * 64)


def test_a_good_chunk_passes() -> None:
    GOOD.validate()
    replace(GOOD, heads=1, head_stride=0).validate()


@each_implementation
def test_a_chunk_without_bytes_needs_no_address(kernels: Kernels) -> None:
    nothing = Chunk(0, np.zeros((0, 3), np.int64), np.zeros(0, np.int32), np.zeros(0, np.int64), 1, 0, 64)
    nothing.validate()
    for launch in (kernels.gather, kernels.scatter):
        launch([nothing])
        launch([])


@each_implementation
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("pointers", GOOD.pointers.astype(np.int32)),
        ("pointers", GOOD.pointers.astype(np.uint64)),
        ("pointers", GOOD.pointers[0]),
        ("pointers", GOOD.pointers * 0),
        ("pointers", -GOOD.pointers),
        ("token_pool", GOOD.token_pool.astype(np.int64)),
        ("token_pool", GOOD.token_pool[:3]),
        ("token_pool", GOOD.token_pool[None]),
        ("token_pool", GOOD.token_pool + np.int32(1)),
        ("token_pool", GOOD.token_pool - np.int32(1)),
        ("token_offset", GOOD.token_offset.astype(np.float64)),
        ("token_offset", GOOD.token_offset[:, None]),
        ("heads", 0),
        ("head_stride", 63),
        ("head_stride", -512),
        ("row_bytes", 0),
        ("packed_address", 0),
    ],
)
def test_a_wrong_field_is_named(kernels: Kernels, field: str, value: Any) -> None:
    wrong = replace(GOOD, **{field: value})
    for refuse in (Chunk.validate, lambda chunk: kernels.gather([chunk]), lambda chunk: kernels.scatter([chunk])):
        with pytest.raises(ConfigError) as caught:
            refuse(wrong)
        assert caught.value.field == field


@each_implementation
def test_a_wrong_chunk_stops_the_launch_before_any_copy(kernels: Kernels) -> None:
    paged, packed = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    one = np.zeros(1, np.int64)
    good = Chunk(packed.ctypes.data, paged.ctypes.data + one[None], one.astype(np.int32), one, 1, 0, 64)
    for launch in (kernels.gather, kernels.scatter):
        with pytest.raises(ConfigError):
            launch([good, replace(good, row_bytes=-1)])
    assert not packed.any()
    assert paged[63] == 63
