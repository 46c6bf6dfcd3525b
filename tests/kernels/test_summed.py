"""Gather with checksums in one pass: the bytes of the reference, the checksums of NumPy, for any geometry and any cut."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernel_checks
import numpy as np
import pytest
from chunk_draws import BLOCK_BYTES, after, chunks_in, sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import DEVICE, MISSING, REFERENCE, TRITON
from kernel_checks import Kernels

from rdma_kv.errors import ConfigError
from rdma_kv.kernels import reference
from rdma_kv.kernels.checksum import Piece
from rdma_kv.kernels.checksum import checksums as by_numpy
from rdma_kv.kernels.launch import Chunk

if MISSING:
    pytest.skip(f"not installed: {' and '.join(MISSING)}", allow_module_level=True)
import torch

with pytest.MonkeyPatch.context() as patch:  # as `implementations` does, and why
    if DEVICE == "cpu":
        patch.setenv("TRITON_INTERPRET", "1")
    from rdma_kv.kernels import summed, tiles
    from rdma_kv.kernels.gather import gather

pytestmark = pytest.mark.long
SUM_WORDS = summed.SUM_WORDS


@pytest.fixture(autouse=True)
def large_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes about as long for a piece of any size."""
    if DEVICE == "cpu":
        monkeypatch.setattr(summed, "WIDE", tiles.Shape(1 << 15, 32))
        monkeypatch.setattr(summed, "NARROW", tiles.Shape(1 << 15, 32))


def expected_sums(before: np.ndarray, chunks_at: Any) -> tuple[np.ndarray, list[int]]:
    """The block after a gather by the reference, and NumPy's checksums of the packed forms."""
    memory = REFERENCE.memory()
    begin = memory.place(before)
    chunks = chunks_at(begin)
    reference.gather(chunks)
    return memory.fetch(begin), by_numpy([Piece(chunk.packed_address, chunk.packed_bytes) for chunk in chunks])


def summed_gather(chunks: Sequence[Chunk], **options: Any) -> list[int]:
    sums = gather(chunks, device=DEVICE, checksum=True, **options)
    assert sums is not None
    return sums.values()


# --- right


def test_every_check_with_checksums() -> None:
    """All layouts, slices, odd sizes: bytes by the checks of every kernel, checksums by NumPy on the host's own copy."""
    if DEVICE != "cpu":
        pytest.skip("the addresses are the host's")

    def both(chunks: Sequence[Chunk]) -> None:
        pieces = [Piece(chunk.packed_address, chunk.packed_bytes) for chunk in chunks]
        assert summed_gather(chunks) == by_numpy(pieces)

    kernels = Kernels("summed", both, reference.scatter)
    for check in (
        kernel_checks.nhd,
        kernel_checks.mla,
        kernel_checks.trtllm_blocks,
        kernel_checks.layer_slices,
        kernel_checks.misaligned_bases,
        kernel_checks.empty_token_list,
        kernel_checks.several_geometries_in_one_launch,
        kernel_checks.several_pools_in_one_chunk,
        kernel_checks.rows_from_pages_to_megabytes,
        kernel_checks.r61_same_slot_in_two_replicas,
    ):
        check(kernels)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    seed=st.integers(0, 1 << 20),
    drawn=st.lists(st.tuples(sizes(16), st.just(16)), min_size=1, max_size=3),
    words=st.sampled_from([(512, 512), (512, 2048), (2048, 2048), (1024, 8192)]),
    warps=st.sampled_from([1, 4, 16]),
    programs=st.sampled_from([1, 3, 1000]),
)
def test_as_the_reference(seed: int, drawn: list[Any], words: tuple[int, int], warps: int, programs: int) -> None:
    """Random strides, pools and orders; planes that end within tiles of the checksum; pieces and tiles of several sizes."""
    before = np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8)
    block, sums = expected_sums(before, lambda begin: chunks_in(begin, seed, drawn))
    found: list[int] = []

    def work(begin: int) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiles, "TILE_WORDS", words[1])
            chunks = chunks_in(begin, seed, drawn)
            shape = tiles.Shape(words[0], warps)
            options = {"device": DEVICE, "stream": None, "programs": programs, "shape": shape}
            found.extend(summed.launch(chunks, [True] * len(chunks), **options).values())

    np.testing.assert_array_equal(after(TRITON, before, work), block)
    assert found == sums


@settings(deadline=None, max_examples=15, derandomize=True)
@given(
    seed=st.integers(0, 1 << 20),
    drawn=st.lists(
        st.sampled_from([1, 2, 8]).flatmap(lambda grain: st.tuples(sizes(grain), st.just(grain))), min_size=1
    ),
)
def test_odd_chunks_as_the_reference(seed: int, drawn: list[Any]) -> None:
    """By the second kernel, of which the caller need not know."""
    drawn = drawn[:3]
    before = np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8)
    block, sums = expected_sums(before, lambda begin: chunks_in(begin, seed, drawn))
    found: list[int] = []
    done = after(TRITON, before, lambda begin: found.extend(summed_gather(chunks_in(begin, seed, drawn), programs=3)))
    np.testing.assert_array_equal(done, block)
    assert found == sums


# --- which


EVEN = [((3, 40, 2, 64), 16), ((1, 9, 1, 1152), 16), ((5, 0, 1, 16), 16), ((2, 100, 4, 48), 16)]
ODD = [*EVEN, ((2, 7, 1, 33), 1)]


@pytest.mark.parametrize("drawn", [EVEN, ODD])
def test_only_those_that_are_wanted(drawn: list[Any]) -> None:
    before = np.random.default_rng(1).integers(0, 256, BLOCK_BYTES, np.uint8)
    block, sums = expected_sums(before, lambda begin: chunks_in(begin, 1, drawn))
    for wanted in ([True] * len(drawn), [number % 2 == 0 for number in range(len(drawn))]):
        found: list[Any] = []
        done = after(
            TRITON,
            before,
            lambda begin, wanted=wanted, found=found: found.append(
                gather(chunks_in(begin, 1, drawn), device=DEVICE, checksum=wanted)
            ),
        )
        np.testing.assert_array_equal(done, block)
        values = found[0].values()
        assert [each for each, own in zip(values, wanted, strict=True) if own] == [
            each for each, own in zip(sums, wanted, strict=True) if own
        ]


def test_none_is_wanted() -> None:
    before = np.random.default_rng(2).integers(0, 256, BLOCK_BYTES, np.uint8)
    block, _ = expected_sums(before, lambda begin: chunks_in(begin, 2, EVEN))
    for checksum in (False, [False] * len(EVEN)):
        found: list[Any] = []
        done = after(
            TRITON,
            before,
            lambda begin, checksum=checksum, found=found: found.append(
                gather(chunks_in(begin, 2, EVEN), device=DEVICE, checksum=checksum)
            ),
        )
        np.testing.assert_array_equal(done, block)
        assert found == [None]


def test_nothing_to_sum() -> None:
    empty = Chunk(0, np.zeros((0, 3), np.int64), np.zeros(0, np.int32), np.zeros(0, np.int64), 1, 0, 64)
    assert summed_gather([]) == []
    assert summed_gather([empty, empty]) == by_numpy([Piece(0, 0)] * 2)


def test_results_outlive_the_next_launch() -> None:
    """They are memory of their own, and two launches of one stream do not share it."""
    before = np.random.default_rng(3).integers(0, 256, BLOCK_BYTES, np.uint8)
    _, sums = expected_sums(before, lambda begin: chunks_in(begin, 3, EVEN))
    memory = TRITON.memory()
    chunks = chunks_in(memory.place(before), 3, EVEN)
    first = gather(chunks, device=DEVICE, checksum=True)
    other = gather(chunks[::-1], device=DEVICE, checksum=True)
    gather(chunks, device=DEVICE)
    assert first is not None
    assert other is not None
    assert (first.values(), other.values()) == (sums, sums[::-1])
    host = torch.zeros(len(chunks), dtype=torch.int64, pin_memory=DEVICE == "cuda")
    first.copy_to(host)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert host.numpy().view(np.uint64).tolist() == sums


def test_shapes_follow_programs_and_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summed, "WIDE", tiles.Shape(4096, 32))
    monkeypatch.setattr(summed, "NARROW", tiles.Shape(512, 4))
    assert summed.best_shape(16, 16 * 4096) == summed.best_shape(800, 1 << 30) == summed.WIDE
    assert summed.best_shape(16, 16 * 4096 - 1) == summed.best_shape(801, 1 << 30) == summed.NARROW


# --- refusals


def test_a_wrong_argument_is_named() -> None:
    chunk = Chunk(64, np.full((1, 1), 64), np.zeros(1, np.int32), np.zeros(1, np.int64), 1, 0, 16)
    for chunks, options, field in (
        ([chunk], {"checksum": [True, True]}, "checksum"),
        ([chunk], {"checksum": True, "programs": 0}, "programs"),
        ([chunk], {"checksum": True, "device": "cpu" if DEVICE == "cuda" else "cuda"}, "device"),
        ([chunk, replace(chunk, row_bytes=0)], {"checksum": True}, "row_bytes"),
    ):
        with pytest.raises(ConfigError) as caught:
            gather(chunks, **{"device": DEVICE} | options)
        assert caught.value.field == field


# --- the tests notice


@pytest.fixture
def does_nothing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    class DoesNothing:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *_args, **_options: None

    monkeypatch.setattr(summed, "_gather_summed", DoesNothing())
    return


@pytest.mark.usefixtures("does_nothing")
def test_notices_a_kernel_that_does_nothing() -> None:
    before = np.random.default_rng(4).integers(0, 256, BLOCK_BYTES, np.uint8)
    block, sums = expected_sums(before, lambda begin: chunks_in(begin, 4, EVEN))
    found: list[int] = []
    done = after(TRITON, before, lambda begin: found.extend(summed_gather(chunks_in(begin, 4, EVEN))))
    assert np.count_nonzero(done != block) > 1000
    assert found[0] != sums[0]


# --- for a GPU, with none


COMPILE = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rdma_kv.kernels import summed, tiles
signature = {"table": "*i64", "multipliers": "*i64"}
signature |= dict.fromkeys(("pooled", "tile_words", "words", "deep"), "constexpr")
aligned = {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}
for shape in (summed.WIDE, summed.NARROW):
    for pooled in (False, True):
        deep = summed.deep_of(shape, shape.words)
        constants = {(2,): pooled, (3,): tiles.TILE_WORDS, (4,): shape.words, (5,): deep}
        source = ASTSource(summed._gather_summed, signature, constants, aligned)
        options = {"num_warps": shape.warps, "maxnreg": shape.registers}
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        ptx, layouts = built.asm["ptx"], built.asm["ttgir"]
        wide = {each.split(".")[0] for each in re.findall(r"(?:ld|st)[.]global[.][a-zA-Z0-9_:.]*v2[.]b64", ptx)}
        moved = re.findall(r"convert_layout.*tensor<[0-9]+x2x", layouts)
        print(*sorted(wide), len(moved), built.metadata.shared <= 4 * shape.warps * 16)
"""


def test_compiles_for_a_gpu_with_16_byte_accesses(tmp_path: Path) -> None:
    """Hopper, by the compiler that comes with Triton: words stay where they were read, only sums go between threads."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.strip() for line in done.stdout.splitlines()] == ["ld st 0 True"] * 4
