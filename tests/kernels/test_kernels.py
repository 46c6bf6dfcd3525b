"""Every implementation against every check, memory further apart than 32 bits, and that a gather undoes a scatter."""

from __future__ import annotations

import mmap

import kernel_checks
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import REFERENCE, each_implementation
from kernel_checks import CHECKS, Check, Kernels, Setting
from kernel_pools import Box, Bytes, HostMemory

from rdma_kv.kernels.launch import Chunk

GIB = 1 << 30

NAMED = [
    kernel_checks.r27_payload_of_the_named_replica,
    kernel_checks.r61_same_slot_in_two_replicas,
    kernel_checks.g21_scatter_to_replicas,
]


@each_implementation
@pytest.mark.parametrize("check", [c for c in CHECKS if c not in NAMED], ids=lambda check: check.__name__)
def test_check(kernels: Kernels, check: Check) -> None:
    check(kernels)


@each_implementation
def test_r27_payload_of_the_named_replica(kernels: Kernels) -> None:
    kernel_checks.r27_payload_of_the_named_replica(kernels)


@each_implementation
def test_r61_same_slot_in_two_replicas(kernels: Kernels) -> None:
    kernel_checks.r61_same_slot_in_two_replicas(kernels)


@each_implementation
def test_g21_scatter_to_replicas(kernels: Kernels) -> None:
    kernel_checks.g21_scatter_to_replicas(kernels)


def reserve(size: int) -> Bytes:
    """Zeros of which only touched pages cost memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    return np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)


@each_implementation
@pytest.mark.parametrize("shift", [0, 1, 96])
@pytest.mark.parametrize("row_bytes", [96, 66_000])
@pytest.mark.parametrize("packed_at", [0, 3 * GIB])
def test_offsets_beyond_31_and_32_bits(kernels: Kernels, packed_at: int, row_bytes: int, shift: int) -> None:
    """Planes 2.5 GiB apart and tokens 3 GiB apart; the packed form before the pool, or in the midst of it."""
    if kernels.memory is not HostMemory:
        pytest.skip("the addresses are the host's")
    sparse = reserve(6 * GIB)
    planes, offsets = [1 << 20, (1 << 20) + 5 * GIB // 2 + shift], [0, 96 * 1000, 3 * GIB, 2**31 - 32, 96]
    starts = [plane + offset for plane in planes for offset in offsets]
    assert max(starts) > 5 * GIB
    rng = np.random.default_rng(3)
    rows = rng.integers(1, 256, (len(starts), row_bytes), np.uint8)
    if row_bytes > 96:
        offsets[-1] = 8 << 20  # tokens must not overlap
        starts = [plane + offset for plane in planes for offset in offsets]
    chunk = Chunk(
        sparse.ctypes.data + packed_at,
        np.array([planes], np.int64) + sparse.ctypes.data,
        np.zeros(len(offsets), np.int32),
        np.array(offsets, np.int64),
        1,
        0,
        row_bytes,
    )
    packed = sparse[packed_at : packed_at + rows.size].reshape(rows.shape)
    for start, row in zip(starts, rows, strict=True):
        sparse[start : start + row_bytes] = row
    kernels.gather([chunk])
    np.testing.assert_array_equal(packed, rows)
    packed[...] = rows[::-1]
    kernels.scatter([chunk])
    for start, row in zip(starts, rows[::-1], strict=True):
        np.testing.assert_array_equal(sparse[start : start + row_bytes], row)
        assert sparse[start - 1] == 0 or start - row_bytes in starts


@st.composite
def boxes(draw: st.DrawFn, setting: Setting) -> Box:
    """Any part of any layout, with the tokens in any order: shuffled, or in runs."""
    layout = draw(st.sampled_from(["nhd", "hnd", "mla", "lightllm", "sglang", "trtllm"]))
    size = {"layers": draw(st.integers(1, 3)), "pages": draw(st.integers(1, 4)), "page_size": draw(st.integers(1, 5))}
    size |= {"row_bytes": draw(st.one_of(st.integers(1, 80), st.sampled_from([128, 256])))}
    size |= {"heads": 1, "kv": 1} if layout == "mla" else {"heads": draw(st.integers(1, 4)), "kv": 2}
    pools = setting.pools(draw(st.integers(1, 3)), layout, skew=draw(st.sampled_from([0, 0, 1, 4])), **size)
    places = [(pool, slot) for pool in range(len(pools)) for slot in range(size["pages"] * size["page_size"])]
    places = draw(st.one_of(st.just(places), st.permutations(places)))
    first, last = sorted((draw(st.integers(0, len(places))), draw(st.integers(0, len(places)))))
    layers = draw(st.integers(0, size["layers"] - 1))
    heads = draw(st.integers(0, size["heads"] - 1))
    return Box(
        pools,
        places[first:last],
        range(layers, draw(st.integers(layers + 1, size["layers"]))),
        range(heads, draw(st.integers(heads + 1, size["heads"]))),
    )


@each_implementation
def test_gather_undoes_scatter(kernels: Kernels) -> None:
    @settings(max_examples=300 if kernels is REFERENCE else 60, deadline=None, derandomize=True)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        setting = Setting(kernels)
        launch = data.draw(st.lists(boxes(setting), min_size=1, max_size=3))
        skew = data.draw(st.sampled_from([0, 0, 1, 8]))
        scattered = setting.scatter(*launch, skew=skew)
        gathered = setting.gather(*launch, skew=skew)
        for before, after in zip(scattered, gathered, strict=True):
            np.testing.assert_array_equal(after, before)

    check()
