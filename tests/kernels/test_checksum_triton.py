"""The Triton twin of the checksum: bit for bit as NumPy, for odd sizes and addresses, many pieces, and any grid."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import checksum_oracle as oracle
import numpy as np
import pytest
from checksum_oracle import DAMAGES, MOST_BYTES, TILE_BYTES, Damage, assert_noticed, random_bytes
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import DEVICE, MISSING, TRITON
from kernel_pools import Bytes

from rdma_kv.errors import ConfigError
from rdma_kv.kernels import checksum as numpy_twin
from rdma_kv.kernels.checksum import Piece

if MISSING:
    pytest.skip(f"not installed: {' and '.join(MISSING)}", allow_module_level=True)

with pytest.MonkeyPatch.context() as patch:  # as `implementations` does, and why
    if DEVICE == "cpu":
        patch.setenv("TRITON_INTERPRET", "1")
    from rdma_kv.kernels import checksum_triton
    from rdma_kv.kernels.checksum_triton import Stepping, checksums, values


def sums(parts: Sequence[Bytes], *, offset: int = 0, programs: int | None = None) -> list[int]:
    """The checksum of each part, where the kernel can read it, `offset` bytes off the widest word's alignment."""
    memory = TRITON.memory()
    placed = [memory.place(np.concatenate((np.zeros(offset, np.uint8), part, np.ones(64, np.uint8)))) for part in parts]
    pieces = [Piece(address + offset, part.size) for address, part in zip(placed, parts, strict=True)]
    return values(checksums(pieces, device=DEVICE, programs=programs))


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 99), size=st.integers(0, 6 * TILE_BYTES), offset=st.sampled_from([0, 0, 1, 2, 4, 8, 15]))
def test_as_numpy(seed: int, size: int, offset: int) -> None:
    data = random_bytes(seed, size)
    assert sums([data], offset=offset) == [numpy_twin.checksum(data)]


@pytest.mark.parametrize("step_tiles", [1, 2, 16])
@pytest.mark.parametrize("programs", [1, 2, 7, 1000])
def test_any_grid(programs: int, step_tiles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of every kind in one launch, empty ones among them; more and fewer programs than steps."""
    monkeypatch.setattr(checksum_triton, "STEPPING", Stepping(tiles=step_tiles))
    edges = [0, 1, 4, TILE_BYTES - 1, TILE_BYTES, TILE_BYTES + 1, 4 * TILE_BYTES, 17 * TILE_BYTES + 3, 0]
    parts = [random_bytes(number, size) for number, size in enumerate(edges)]
    assert sums(parts, programs=programs) == [numpy_twin.checksum(part) for part in parts]


def test_nothing() -> None:
    assert values(checksums([], device=DEVICE)) == []


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@settings(deadline=None, max_examples=15)
@given(draw=st.data())
def test_notices(damage: Damage, draw: st.DataObject) -> None:
    assert_noticed(lambda data: sums([data])[0], damage, draw)


def test_notices_a_kernel_that_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without its work the twin differs, and overlooks damage."""

    class DoesNothing:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *_args, **_options: None

    monkeypatch.setattr(checksum_triton, "_sum", DoesNothing())
    data = random_bytes(0, MOST_BYTES)
    assert sums([data]) != [numpy_twin.checksum(data)]
    before = sums([data])
    data[0] ^= 1
    assert sums([data]) == before


def test_the_oracle_agrees() -> None:
    """So it is not only the same mistake twice."""
    data = random_bytes(5, MOST_BYTES)
    assert sums([data]) == [oracle.defined(data)]


# --- refusals


def test_a_wrong_argument_is_named() -> None:
    for pieces, options, field in (
        ([Piece(64, -1)], {}, "length_bytes"),
        ([Piece(0, 8)], {}, "address"),
        ([], {"programs": 0}, "programs"),
        ([], {"device": "cpu" if DEVICE == "cuda" else "cuda"}, "device"),
    ):
        with pytest.raises(ConfigError) as caught:
            checksums(pieces, **{"device": DEVICE} | options)
        assert caught.value.field == field
    for tiles in (0, 3, 32):
        with pytest.raises(ConfigError) as caught:
            Stepping(tiles=tiles)
        assert caught.value.field == "tiles"


# --- for a GPU, with none


COMPILE = """
import re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from rdma_kv.kernels import checksum_triton as twin
signature, aligned = {"table": "*i64", "step_tiles": "constexpr"}, {(0,): [["tt.divisibility", 16]]}
source = ASTSource(twin._sum, signature, {(1,): twin.STEPPING.tiles}, aligned)
built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": twin.STEPPING.warps})
print("16 bytes" if re.search(r"ld[.]global[.]v4[.]b32|ld[.]global[.]v2[.]b64", built.asm["ptx"]) else "narrow")
print(*sorted(set(re.findall(r"(?:atom|red)[.]global[.]\\S+", built.asm["ptx"]))))
"""


def test_compiles_for_a_gpu_with_16_byte_reads(tmp_path: Path) -> None:
    """Hopper, by the compiler that comes with Triton; additions are of integers, so their order does not matter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    width, additions = done.stdout.splitlines()
    assert width == "16 bytes"
    assert additions.endswith("add.u64")
    assert " " not in additions
