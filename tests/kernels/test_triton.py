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
from rdma_kv.kernels.tables import HEADER, Line, Tables, Tile

if MISSING:
    pytest.skip(f"not installed: {' and '.join(MISSING)}", allow_module_level=True)
import torch

from rdma_kv.kernels import tiles

pytestmark = pytest.mark.long


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
    kernel, odd = Counting(tiles._move), Counting(tiles._move_odd)
    odd.grids = kernel.grids
    monkeypatch.setattr(tiles, "_move", kernel)
    monkeypatch.setattr(tiles, "_move_odd", odd)
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


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize("row_bytes", [5 * GIB, 5 * GIB + 1])
def test_tiles_beyond_31_and_32_bits(row_bytes: int, scatter: bool) -> None:
    """Two rows of 5 GiB, of whole words and odd: the tiles around 2**31 and 2**32 and those where the second row begins."""
    if DEVICE != "cpu":
        pytest.skip("the addresses are the host's")
    words = 4096
    paged, packed = reserve(12 * GIB), reserve(11 * GIB)
    offsets = np.array([6 * GIB, 0 if row_bytes % 16 == 0 else 7], np.int64)
    pointers = np.array([[paged.ctypes.data]], np.int64)
    chunk = Chunk(packed.ctypes.data, pointers, np.zeros(2, np.int32), offsets, 1, 0, row_bytes)
    tables = Tables([chunk], words)
    table = torch.empty(tables.size, dtype=torch.int64)
    tables.write(table.numpy())
    tiles_at, row_words = int(table[1]), int(table[HEADER + Line.ROW_WORDS])
    for place in (2**31, 2**32, row_bytes):
        at = np.arange(place - 1000, place + 1000)
        there = offsets[at // row_bytes] + at % row_bytes
        source, target = (packed[at], there) if scatter else (paged[there], at)
        source = np.random.default_rng(place).integers(0, 256, at.size, np.uint8)
        (packed if scatter else paged)[at if scatter else there] = source
        tile = (place // row_bytes * row_words + place % row_bytes // 16) // words
        table[0], table[1] = 3, tiles_at + (tile - 1) * len(Tile)
        upload = tiles.Upload(table, 3, 1, words, tables.pooled, tables.odd, None)
        upload.start(scatter=scatter, programs=2, shape=tiles.Shape(words // 2, 16))
        np.testing.assert_array_equal((paged if scatter else packed)[target], source)


@pytest.mark.parametrize("grain_bytes", [1, 2, 4, 8])
def test_rows_of_any_length_at_any_alignment(grain_bytes: int) -> None:
    """Every pair of places within 16 bytes, for rows within a word, over two and over several; nothing beside them."""
    rng = np.random.default_rng(grain_bytes)
    kernels = triton_kernels(words=256, programs=3)
    for row_bytes in {
        grain_bytes,
        16 - grain_bytes,
        16 + grain_bytes,
        48 + grain_bytes,
        578 // grain_bytes * grain_bytes,
    }:
        for packed_skew in range(0, 16, max(grain_bytes, 3)):
            packed_skew = packed_skew // grain_bytes * grain_bytes
            here = rng.integers(0, 256, 64 * 1024, np.uint8)
            pitch = row_bytes + grain_bytes * 3
            skews = np.arange(0, 16, grain_bytes)
            offsets = np.arange(skews.size) * (pitch + 16) + skews
            for direction in ("gather", "scatter"):
                memory = kernels.memory()
                begin = memory.place(here)
                pointers = np.array([[begin + 32 * 1024, begin + 48 * 1024 + grain_bytes]], np.int64)
                packed = begin + 64 + packed_skew
                chunk = Chunk(packed, pointers, np.zeros(skews.size, np.int32), offsets, 1, 0, row_bytes)
                getattr(kernels, direction)([chunk])
                expected, at = here.copy(), 64 + packed_skew
                for base in (32 * 1024, 48 * 1024 + grain_bytes):
                    for offset in offsets.tolist():
                        row, run = slice(base + offset, base + offset + row_bytes), slice(at, at + row_bytes)
                        expected[run if direction == "gather" else row] = here[row if direction == "gather" else run]
                        at += row_bytes
                np.testing.assert_array_equal(memory.fetch(begin), expected)


@pytest.mark.parametrize("words", [1, 8, 64])
def test_pieces_of_tiles(words: int) -> None:
    """As many programs as there are pieces, and fewer; pieces in which no lane has work."""
    for programs in (3, 1000):
        kernels = triton_kernels(words=words, tile_words=64, programs=programs)
        s = Setting(kernels)
        sizes = {"layers": 1, "heads": 3, "pages": 2}
        both(s, box(s.pool("hnd", row_bytes=48, **sizes), [1, 0, 5]), box(s.pool("nhd", row_bytes=33, **sizes), [1]))


def test_shapes_follow_programs_and_planes() -> None:
    names = ("WIDE", "MIDDLE", "NARROW", "ODD")
    with pytest.MonkeyPatch.context() as patch:
        for number, name in enumerate(names):
            patch.setattr(tiles, name, tiles.Shape(1 << number, 1))

        def shape(programs: int, *, all_tiles: int, planes: int = 1, odd: bool = False) -> str:
            upload = tiles.Upload(torch.empty(0), all_tiles, planes, 64, False, odd, None)
            return names[upload.shape(programs).words.bit_length() - 1]

        assert shape(16, all_tiles=32) == "WIDE"
        assert shape(15, all_tiles=1) == shape(16, all_tiles=31) == "MIDDLE"
        assert shape(16, all_tiles=64, planes=33) == "MIDDLE"
        assert shape(16, all_tiles=1) == shape(1 << 30, all_tiles=1 << 20) == "NARROW"
        assert shape(16, all_tiles=32, odd=True) == shape(4096, all_tiles=1 << 20, odd=True) == "ODD"


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


def test_odd_chunks_take_no_more_programs_than_pay(counting: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "_ODD_PROGRAMS", 2)
    s = Setting(triton_kernels(words=8, programs=5))
    s.gather(box(s.pool("nhd", row_bytes=33), [1, 2, 3]))
    s.gather(box(s.pool("nhd", row_bytes=32), [1, 2, 3]))
    assert counting.grids == [(2,), (5,)]


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
    for words, warps, field in (
        (0, 4, "words"),
        (3, 4, "words"),
        (1 << 16, 4, "words"),
        (16, 3, "warps"),
        (16, 64, "warps"),
    ):
        with pytest.raises(ConfigError) as caught:
            tiles.Shape(words, warps)
        assert caught.value.field == field


def test_addresses_of_another_device_are_refused() -> None:
    """Instead of being read as the host's, which would be a crash."""
    with pytest.raises(ConfigError) as caught:
        tiles.upload([], device="cpu" if DEVICE == "cuda" else "cuda", stream=None)
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
    make = Tables.__init__

    def all_in_pool_0(tables: Tables, chunks: list[Chunk], tile_words: int) -> None:
        make(tables, [replace(chunk, token_pool=np.zeros_like(chunk.token_pool)) for chunk in chunks], tile_words)

    monkeypatch.setattr(Tables, "__init__", all_in_pool_0)
    with pytest.raises(AssertionError):
        check(TRITON)


@pytest.mark.parametrize("field", [Line.HEAD_STRIDE, Line.PLANES, Line.ROW_WORDS, Line.HEADS, Tile.WORDS])
def test_notices_a_wrong_field(field: Line | Tile, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Tables.write

    def one_less(tables: Tables, out: np.ndarray) -> None:
        write(tables, out)
        at = HEADER if isinstance(field, Line) else out[1]
        out[at + field] += -16 if field is Line.HEAD_STRIDE else -1

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
signature = {"table": "*i64"} | dict.fromkeys(("scatter", "pooled", "tile_words", "words"), "constexpr")
even = ((tiles._move, shape) for shape in (tiles.WIDE, tiles.MIDDLE, tiles.NARROW))
for kernel, shape in (*even, (tiles._move_odd, tiles.ODD)):
    for scatter in (False, True):
        for pooled in (False, True):
            constants = {(1,): scatter, (2,): pooled, (3,): tiles.TILE_WORDS, (4,): shape.words}
            source = ASTSource(kernel, signature, constants, {(0,): [["tt.divisibility", 16]]})
            options = {"num_warps": shape.warps, "maxnreg": shape.registers}
            built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
            ptx = built.asm["ptx"]
            wide = {each.split(".")[0] for each in re.findall(r"(?:ld|st)[.]global[.][a-zA-Z0-9_:.]*v2[.]b64", ptx)}
            print(*sorted(wide), built.metadata.shared, "spills" if "local" in ptx else "")
"""


def test_compiles_for_a_gpu_with_16_byte_accesses(tmp_path: Path) -> None:
    """Hopper, by the compiler that comes with Triton; without shared memory, so nothing is exchanged between threads.

    The same process has no interpreter, and refuses host memory.
    """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.strip() for line in done.stdout.splitlines()] == ["device"] + ["ld st 0"] * 16
