"""The checks notice kernels that do nothing, or do the wrong thing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import kernel_checks
import numpy as np
import pytest
from kernel_checks import CHECKS, Check, Kernels, Launch

from rdma_kv.kernels import reference
from rdma_kv.kernels.launch import Chunk

ONLY_GATHERS = [kernel_checks.one_slot_gathered_twice, kernel_checks.r61_same_slot_in_two_replicas]
ONLY_SCATTERS = [kernel_checks.g21_scatter_to_replicas]
SEVERAL_POOLS = [
    kernel_checks.several_pools_in_one_chunk,
    kernel_checks.runs_end_where_the_pool_changes,
    kernel_checks.several_geometries_in_one_launch,
    kernel_checks.r27_payload_of_the_named_replica,
    kernel_checks.r61_same_slot_in_two_replicas,
    kernel_checks.g21_scatter_to_replicas,
]


def does_nothing(_chunks: Sequence[Chunk]) -> None:
    pass


def forgets_the_last_chunk(launch: Launch) -> Launch:
    return lambda chunks: launch(chunks[:-1])


def ignores_token_pool(launch: Launch) -> Launch:
    return lambda chunks: launch([replace(chunk, token_pool=np.zeros_like(chunk.token_pool)) for chunk in chunks])


def ignores_head_stride(launch: Launch) -> Launch:
    return lambda chunks: launch([replace(chunk, head_stride=chunk.row_bytes) for chunk in chunks])


def loses_the_last_byte_of_a_row(launch: Launch) -> Launch:
    return lambda chunks: launch([replace(chunk, row_bytes=chunk.row_bytes - 1) for chunk in chunks])


def touches_a_byte_behind(address: int) -> None:
    byte = reference.view(address, 1)
    byte ^= 0xFF


def gathers_one_byte_too_many(chunks: Sequence[Chunk]) -> None:
    reference.gather(chunks)
    touches_a_byte_behind(chunks[0].packed_address + chunks[0].packed_bytes)


def scatters_one_byte_too_many(chunks: Sequence[Chunk]) -> None:
    reference.scatter(chunks)
    chunk = chunks[0]
    touches_a_byte_behind(int(chunk.pointers[chunk.token_pool[0], 0] + chunk.token_offset[0]) + chunk.row_bytes)


def assert_noticed(check: Check, gather: Launch, scatter: Launch) -> None:
    with pytest.raises(AssertionError):
        check(Kernels("wrong", gather, scatter))


def each(checks: Sequence[Check]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("check", checks, ids=lambda check: check.__name__)


@each([check for check in CHECKS if check not in ONLY_SCATTERS])
def test_notices_a_gather_that_does_nothing(check: Check) -> None:
    assert_noticed(check, does_nothing, reference.scatter)


@each([check for check in CHECKS if check not in ONLY_GATHERS])
def test_notices_a_scatter_that_does_nothing(check: Check) -> None:
    assert_noticed(check, reference.gather, does_nothing)


@each(SEVERAL_POOLS)
def test_notices_that_the_pool_is_ignored(check: Check) -> None:
    if check not in ONLY_SCATTERS:
        assert_noticed(check, ignores_token_pool(reference.gather), reference.scatter)
    if check not in ONLY_GATHERS:
        assert_noticed(check, reference.gather, ignores_token_pool(reference.scatter))


@each([kernel_checks.several_geometries_in_one_launch, kernel_checks.several_boxes_of_one_pool])
def test_notices_a_forgotten_chunk(check: Check) -> None:
    assert_noticed(check, forgets_the_last_chunk(reference.gather), reference.scatter)
    assert_noticed(check, reference.gather, forgets_the_last_chunk(reference.scatter))


@each([kernel_checks.hnd, kernel_checks.trtllm_blocks, kernel_checks.head_slices])
def test_notices_that_the_head_stride_is_ignored(check: Check) -> None:
    assert_noticed(check, ignores_head_stride(reference.gather), reference.scatter)
    assert_noticed(check, reference.gather, ignores_head_stride(reference.scatter))


@each([kernel_checks.nhd, kernel_checks.mla, kernel_checks.sglang_split_kv])
def test_notices_short_rows(check: Check) -> None:
    assert_noticed(check, loses_the_last_byte_of_a_row(reference.gather), reference.scatter)
    assert_noticed(check, reference.gather, loses_the_last_byte_of_a_row(reference.scatter))


@each([kernel_checks.nhd, kernel_checks.hnd, kernel_checks.mla, kernel_checks.one_token])
def test_notices_a_byte_too_many(check: Check) -> None:
    assert_noticed(check, gathers_one_byte_too_many, reference.scatter)
    assert_noticed(check, reference.gather, scatters_one_byte_too_many)
