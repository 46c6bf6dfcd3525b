"""From pages to pages: every byte as a gather and a scatter by the reference would leave it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chunk_draws import BLOCK_BYTES, after, chunks_in, moved, sizes
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import DEVICE, MISSING, REFERENCE, TRITON
from kernel_pools import Box, Geometry, Pool, box

from rdma_kv.errors import ConfigError
from rdma_kv.kernels.launch import Chunk

if MISSING:
    pytest.skip(f"not installed: {' and '.join(MISSING)}", allow_module_level=True)

with pytest.MonkeyPatch.context() as patch:  # as `implementations` does, and why
    if DEVICE == "cpu":
        patch.setenv("TRITON_INTERPRET", "1")
    from rdma_kv.kernels import peer, tiles
    from rdma_kv.kernels.peer import move

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def large_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes about as long for a piece of any size."""
    if DEVICE == "cpu":
        for shape in ("WIDE", "MIDDLE"):
            monkeypatch.setattr(peer, shape, tiles.Shape(1 << 15, 16))


def pairs_in(begin: int, seed: int, drawn: list[Any]) -> tuple[list[Chunk], list[Chunk]]:
    """Sources and targets of the drawn sizes, each with strides, order and pools of its own."""
    both = chunks_in(begin, seed, [each for each in drawn for _ in range(2)])
    return both[::2], both[1::2]


def unique_tokens(target: Chunk) -> Chunk:
    """`in_block` draws different places for the tokens of a chunk, so no two rows of a target are one."""
    assert np.unique(target.token_offset).size == target.tokens
    return target


def check(seed: int, drawn: list[Any], **options: Any) -> None:
    before = np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8)

    def by(function: Callable[..., None], **more: Any) -> Callable[[int], None]:
        def work(begin: int) -> None:
            sources, targets = pairs_in(begin, seed, drawn)
            function(sources, [unique_tokens(each) for each in targets], **more)

        return work

    expected = after(REFERENCE, before, by(moved))
    np.testing.assert_array_equal(after(TRITON, before, by(move, device=DEVICE, **options)), expected)


any_chunk = st.sampled_from([1, 2, 4, 8, 16, 16, 16]).flatmap(
    lambda grain: st.tuples(sizes(grain, most_bytes=25_000), st.just(grain))
)
even_chunk = st.tuples(sizes(16, most_bytes=25_000), st.just(16))
cuts = {
    "words": st.sampled_from([(128, 512), (512, 512), (1024, 4096), (1 << 15, 1 << 15)]),
    "programs": st.sampled_from([1, 3, 1000]),
}


@settings(deadline=None, max_examples=25, derandomize=True)
@given(seed=st.integers(0, 1 << 20), drawn=st.lists(even_chunk, min_size=1, max_size=3), **cuts)
def test_whole_words(seed: int, drawn: list[Any], words: tuple[int, int], programs: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles, "TILE_WORDS", words[1])
        check(seed, drawn, programs=programs, shape=tiles.Shape(words[0], 4))


@settings(deadline=None, max_examples=20, derandomize=True)
@given(seed=st.integers(0, 1 << 20), drawn=st.lists(any_chunk, min_size=1, max_size=3), programs=cuts["programs"])
def test_any_length_and_alignment(seed: int, drawn: list[Any], programs: int) -> None:
    check(seed, drawn, programs=programs)


# --- engines' layouts


def of(layout: str, seed: int, slots: list[int], **geometry: int) -> tuple[Any, Box]:
    memory = TRITON.memory()
    pool = Pool(memory, layout, Geometry(**geometry), np.random.default_rng(seed))
    return pool, box(pool, slots)


@pytest.mark.parametrize("row_bytes", [32, 33])
@pytest.mark.parametrize(
    ("one", "other"), [("nhd", "hnd"), ("hnd", "nhd"), ("trtllm", "sglang"), ("lightllm", "trtllm")]
)
def test_between_layouts_and_page_sizes(one: str, other: str, row_bytes: int) -> None:
    """Heads that lie back to back on one side only; other places, other page sizes."""
    here, source = of(one, 1, [9, 2, 3, 14, 15], row_bytes=row_bytes)
    there, target = of(other, 2, [4, 0, 11, 5, 7], page_size=2, pages=8, row_bytes=row_bytes)
    move([source.chunk(1)], [target.chunk(1)], device=DEVICE)
    for target_row, source_row in zip(target.rows(), source.rows(), strict=True):
        target_row[...] = source_row
    here.assert_as_here()
    there.assert_as_here()


# --- launches


def test_nothing_to_move() -> None:
    empty = Chunk(0, np.zeros((1, 3), np.int64), np.zeros(0, np.int32), np.zeros(0, np.int64), 1, 0, 64)
    move([], [], device=DEVICE)
    move([empty], [empty], device=DEVICE)


GOOD = Chunk(0, np.full((1, 2), 4096), np.zeros(3, np.int32), np.arange(3) * 64, 2, 32, 16)


@pytest.mark.parametrize(
    ("target", "field"),
    [
        (replace(GOOD, heads=1), "targets"),
        (replace(GOOD, row_bytes=32), "targets"),
        (replace(GOOD, pointers=np.full((1, 3), 4096)), "targets"),
        (replace(GOOD, token_offset=np.arange(2), token_pool=np.zeros(2, np.int32)), "targets"),
        (replace(GOOD, pointers=np.zeros((1, 2), np.int64)), "pointers"),
        (replace(GOOD, pointers=-GOOD.pointers), "pointers"),
        (replace(GOOD, token_pool=np.ones(3, np.int32)), "token_pool"),
        (replace(GOOD, head_stride=8), "head_stride"),
    ],
)
def test_a_wrong_chunk_is_named(target: Chunk, field: str) -> None:
    """On either side."""
    for sources, targets in (([GOOD], [target]), ([target], [GOOD])):
        with pytest.raises(ConfigError) as caught:
            move(sources, targets, device=DEVICE)
        assert caught.value.field == field


def test_a_wrong_argument_is_named() -> None:
    for targets, options, field in (
        ([GOOD, GOOD], {}, "targets"),
        ([GOOD], {"programs": 0}, "programs"),
        ([GOOD], {"device": "cpu" if DEVICE == "cuda" else "cuda"}, "device"),
    ):
        with pytest.raises(ConfigError) as caught:
            move([GOOD], targets, **{"device": DEVICE} | options)
        assert caught.value.field == field


def test_the_check_notices_a_kernel_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class DoesNothing:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *_args, **_options: None

    monkeypatch.setattr(peer, "_move_between", DoesNothing())
    with pytest.raises(AssertionError):
        check(3, [((2, 9, 2, 64), 16)])


# --- for a GPU, with none


COMPILE = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rdma_kv.kernels import peer, tiles
signature = {"table": "*i64", "other": "*i64"} | dict.fromkeys(("pooled", "tile_words", "words"), "constexpr")
aligned = {(0,): [["tt.divisibility", 16]], (1,): [["tt.divisibility", 16]]}
even = ((peer._move_between, shape) for shape in (peer.WIDE, peer.MIDDLE, tiles.MIDDLE, tiles.NARROW))
for kernel, shape in (*even, (peer._move_between_odd, tiles.ODD)):
    for pooled in (False, True):
        constants = {(2,): pooled, (3,): tiles.TILE_WORDS, (4,): shape.words}
        source = ASTSource(kernel, signature, constants, aligned)
        options = {"num_warps": shape.warps, "maxnreg": shape.registers}
        built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        ptx = built.asm["ptx"]
        wide = {each.split(".")[0] for each in re.findall(r"(?:ld|st)[.]global[.][a-zA-Z0-9_:.]*v2[.]b64", ptx)}
        print(*sorted(wide), built.metadata.shared)
"""


def test_compiles_for_a_gpu_with_16_byte_accesses(tmp_path: Path) -> None:
    """Hopper, by the compiler that comes with Triton; nothing is exchanged between threads."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.strip() for line in done.stdout.splitlines()] == ["ld st 0"] * 10
