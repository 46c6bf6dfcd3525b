"""What only the Triton kernels can get wrong: tiles and grids, words, launches, what a GPU's compiler makes of them."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import kernel_checks
import numpy as np
import pytest
from implementations import DEVICE, MISSING, REFERENCE, TRITON, triton_kernels
from kernel_checks import Check, Setting, both
from kernel_pools import box
from test_kernels import GIB, reserve

from rdma_kv.errors import ConfigError
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.tables import HEADER, Field, Tables

if MISSING:
    pytest.skip(f"not installed: {' and '.join(MISSING)}", allow_module_level=True)
import torch

from rdma_kv.kernels import tiles


def each(*checks: Check) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("check", checks, ids=lambda check: check.__name__)


class Counting:
    """The kernel, with a note of the grid of each launch; or without the kernel."""

    def __init__(self, kernel: object) -> None:
        self._kernel = kernel
        self.grids: list[tuple[int, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        self.grids.append(grid)
        return self._kernel[grid] if self._kernel else lambda *_args, **_options: None


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    kernel = Counting(tiles._move)
    monkeypatch.setattr(tiles, "_move", kernel)
    return kernel


# --- tiles and grids


@each(
    kernel_checks.nhd,
    kernel_checks.hnd,
    kernel_checks.trtllm_blocks,
    kernel_checks.several_boxes_of_one_pool,
    kernel_checks.r27_payload_of_the_named_replica,
    kernel_checks.r61_same_slot_in_two_replicas,
    kernel_checks.g21_scatter_to_replicas,
)
def test_small_tiles(check: Check) -> None:
    """Rows, heads, tokens and planes longer and shorter than a tile of 16 words, with several tiles a program."""
    check(triton_kernels(words=16, programs=3))


@pytest.mark.parametrize("words", [4, 8, 64])
def test_wheels_turn_within_and_between_tiles(words: int) -> None:
    """One row, head, token or plane among many, in words of each size."""
    s = Setting(triton_kernels(words=words, programs=2))
    for row_bytes in (40, 12, 3):
        one = {"layers": 1, "kv": 1, "heads": 1, "page_size": 1, "pages": 2, "row_bytes": row_bytes}
        for more in ({}, {"layers": 3, "kv": 2}, {"heads": 3}, {"layers": 2, "heads": 2}):
            both(s, box(s.pool("hnd", **one | more), [1]), box(s.pool("hnd", **one | more), [1, 0]))


@pytest.mark.parametrize("programs", [1, 2, 7, 1000])
def test_any_number_of_programs(programs: int) -> None:
    """More than tiles, and none that divides them."""
    kernel_checks.several_geometries_in_one_launch(triton_kernels(words=256, programs=programs))


def test_programs_bound_the_grid(counting: Counting) -> None:
    s = Setting(triton_kernels(words=8, programs=3))
    s.gather(box(s.pool("nhd"), [1, 2, 3]))
    s.gather(box(s.pool("nhd", layers=1, kv=1, row_bytes=16), [1]))
    assert counting.grids == [(3,), (1,)]


def test_tiles_beyond_31_and_32_bits() -> None:
    """Two rows of 5 GiB and a byte: the tiles around 2**31 and 2**32 and the one in which the second row begins."""
    if DEVICE != "cpu":
        pytest.skip("the addresses are the host's")
    words, row_bytes = 4096, 5 * GIB + 1
    paged, packed = reserve(11 * GIB), reserve(11 * GIB)
    offsets = np.array([5 * GIB + 64, 7], np.int64)
    pointers = np.array([[paged.ctypes.data]], np.int64)
    chunk = Chunk(packed.ctypes.data, pointers, np.zeros(2, np.int32), offsets, 1, 0, row_bytes)
    tables = Tables([replace(chunk, row_bytes=words)], words)  # two tiles, told to be others
    for place in (2**31, 2**32, row_bytes):
        tile = place // words - 1
        rows = np.random.default_rng(place).integers(0, 256, 2 * words, np.uint8)
        for at, byte in zip(range(tile * words, (tile + 2) * words), rows, strict=True):
            paged[offsets[at // row_bytes] + at % row_bytes] = byte
        table = torch.empty(tables.size, dtype=torch.int64)
        tables.write(table.numpy())
        line = table[HEADER:]
        line[Field.WORD_BYTES] = 1
        line[Field.ROW_WORDS] = row_bytes
        line[Field.WORDS] = 2 * row_bytes
        line[Field.FIRST_TILE] = -tile
        upload = tiles.Upload(table, 2, tiles.Tiling(words), None)
        upload.start(scatter=False, programs=1)
        np.testing.assert_array_equal(packed[tile * words :][: 2 * words], rows)


# --- launches


def test_all_layers_are_one_launch(counting: Counting) -> None:
    s = Setting(TRITON)
    for layout in ("nhd", "sglang", "lightllm"):
        both(s, box(s.pool(layout, layers=9), [3, 1, 2]))
        assert len(counting.grids) == 2
        counting.grids.clear()


def test_all_chunks_are_one_launch(counting: Counting) -> None:
    """Of several pools, replicas and geometries, aligned and not."""
    s = Setting(TRITON)
    boxes = [
        box(s.pools(3, "lightllm", page_size=1, pages=20), [7, 3, 9, 3], [1, 0, 2, 1]),
        box(s.pool("mla", kv=1, heads=1, row_bytes=578), [4, 2]),
        box(s.pool("nhd"), []),
        box(s.pool("hnd", skew=1), [5, 6, 7], heads=range(1, 3)),
    ]
    s.gather(*boxes)
    assert len(counting.grids) == 1
    s.scatter(*boxes)
    assert len(counting.grids) == 2


def test_nothing_is_no_launch(counting: Counting) -> None:
    s = Setting(TRITON)
    both(s, box(s.pool("nhd"), []))
    assert not counting.grids


def random_chunks(rng: np.random.Generator, begin: int) -> list[Chunk]:
    """Any geometry and alignment, within 1 MiB from `begin`; no two rows overlap."""
    chunks, at = [], begin
    for _ in range(24):
        pools, planes, tokens, heads = (int(rng.integers(1, most)) for most in (4, 5, 9, 4))
        row_bytes = int(rng.choice([1, 2, 3, 12, 16, 48, 64, 100, 257, 512]))
        head_stride = row_bytes + int(rng.choice([0, 0, 1, 16, row_bytes]))
        pitch = heads * head_stride + int(rng.choice([0, 16, 5]))
        packed = at + int(rng.choice([0, 0, 1, 2]))
        paged = -(-(packed + planes * tokens * heads * row_bytes) // 16) * 16 + int(rng.choice([0, 0, 4, 7]))
        plane = 2 * tokens * pitch
        chunk = Chunk(
            packed,
            paged + plane * np.arange(pools * planes).reshape(pools, planes),
            rng.integers(0, pools, tokens, np.int32),
            rng.permutation(2 * tokens)[:tokens] * pitch,
            heads,
            head_stride,
            row_bytes,
        )
        chunks.append(chunk)
        at = -(-(paged + pools * planes * plane) // 64) * 64
    assert at < begin + (1 << 20)
    return chunks


@pytest.mark.parametrize("seed", range(3))
def test_as_the_reference(seed: int) -> None:
    """Random bytes, among them NaN patterns of any type, after a gather and after a scatter of all chunks."""
    before = np.random.default_rng(seed).integers(0, 256, 1 << 20, np.uint8)
    for direction in ("gather", "scatter"):
        after = []
        for kernels in (REFERENCE, TRITON, triton_kernels(words=1024, programs=5)):
            memory = kernels.memory()
            address = memory.place(before)
            getattr(kernels, direction)(random_chunks(np.random.default_rng(seed), address))
            after.append(memory.fetch(address))
        assert np.count_nonzero(after[0] != before) > 10_000
        np.testing.assert_array_equal(after[1], after[0])
        np.testing.assert_array_equal(after[2], after[0])


# --- refusals


def test_a_wrong_argument_is_named() -> None:
    chunk = Chunk(64, np.full((1, 1), 64), np.zeros(1, np.int32), np.zeros(1, np.int64), 1, 0, 16)
    with pytest.raises(ConfigError) as caught:
        triton_kernels(programs=0).gather([chunk])
    assert caught.value.field == "programs"
    for words in (0, 3, 1 << 16):
        with pytest.raises(ConfigError) as caught:
            tiles.Tiling(words)
        assert caught.value.field == "words"


def test_addresses_of_another_device_are_refused() -> None:
    """Instead of being read as the host's, which would be a crash."""
    with pytest.raises(ConfigError) as caught:
        tiles.upload([], device="cpu" if DEVICE == "cuda" else "cuda", stream=None, tiling=tiles.TILING)
    assert caught.value.field == "device"


# --- the checks notice


SEVERAL_POOLS = [
    kernel_checks.several_pools_in_one_chunk,
    kernel_checks.r27_payload_of_the_named_replica,
    kernel_checks.r61_same_slot_in_two_replicas,
    kernel_checks.g21_scatter_to_replicas,
]


@each(kernel_checks.nhd, kernel_checks.mla, *SEVERAL_POOLS)
def test_notices_a_kernel_that_does_nothing(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_move", Counting(None))
    with pytest.raises(AssertionError):
        check(TRITON)


@each(*SEVERAL_POOLS)
def test_notices_that_the_pool_is_ignored(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Tables.write

    def all_in_pool_0(tables: Tables, out: np.ndarray) -> None:
        write(tables, out)
        for line in out[HEADER:][: len(tables._lines) * len(Field)].reshape(-1, len(Field)):
            out.view(np.int32)[line[Field.POOL_AT] :][: line[Field.TOKENS]] = 0

    monkeypatch.setattr(Tables, "write", all_in_pool_0)
    with pytest.raises(AssertionError):
        check(TRITON)


@pytest.mark.parametrize("field", [Field.HEAD_STRIDE, Field.PLANES, Field.WORDS])
def test_notices_a_wrong_field(field: Field, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Tables.write

    def one_less(tables: Tables, out: np.ndarray) -> None:
        write(tables, out)
        out[HEADER + field] -= 16 if field is Field.HEAD_STRIDE else 1

    monkeypatch.setattr(Tables, "write", one_less)
    with pytest.raises(AssertionError):
        kernel_checks.several_pools_in_one_chunk(TRITON)


# --- for a GPU, with none


COMPILE = """
import re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rdma_kv.errors import ConfigError
from rdma_kv.kernels import tiles
from rdma_kv.kernels.gather import gather
try:
    gather([], device="cpu")
except ConfigError as refused:
    print(refused.field)
signature = {"table": "*i64", "scatter": "constexpr", "tile_words": "constexpr"}
for scatter in (False, True):
    source = ASTSource(tiles._move, signature, {(1,): scatter, (2,): tiles.TILING.words}, {(0,): [["tt.divisibility", 16]]})
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": tiles.TILING.warps})
    print(*sorted(set(re.findall(r"(?:ld|st)[.]global[.]v\\S+", built.asm["ptx"]))))
"""


def test_compiles_for_a_gpu_with_16_byte_accesses(tmp_path: Path) -> None:
    """Hopper, by the compiler that comes with Triton. The same process has no interpreter, and refuses host memory."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["device"] + ["ld.global.v2.b64 st.global.v2.b64"] * 2
