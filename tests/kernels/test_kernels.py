"""Every implementation against every check, and the property that a gather undoes a scatter."""

from __future__ import annotations

import kernel_checks
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import CHECKS, IMPLEMENTATIONS, Check, Kernels, Setting
from kernel_pools import Box

NAMED = [
    kernel_checks.r27_payload_of_the_named_replica,
    kernel_checks.r61_same_slot_in_two_replicas,
    kernel_checks.g21_scatter_to_replicas,
]

each_implementation = pytest.mark.parametrize("kernels", IMPLEMENTATIONS, ids=lambda kernels: kernels.name)


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
@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_gather_undoes_scatter(kernels: Kernels, data: st.DataObject) -> None:
    setting = Setting(kernels)
    launch = data.draw(st.lists(boxes(setting), min_size=1, max_size=3))
    skew = data.draw(st.sampled_from([0, 0, 1, 8]))
    scattered = setting.scatter(*launch, skew=skew)
    gathered = setting.gather(*launch, skew=skew)
    for before, after in zip(scattered, gathered, strict=True):
        np.testing.assert_array_equal(after, before)
