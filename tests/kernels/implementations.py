"""The implementations that every check runs against: NumPy on the host, and Triton where it is installed.

Triton runs on a CUDA device if there is one. Otherwise, or with TRITON_INTERPRET=1 in the environment, its interpreter
runs the same kernel on host memory. Triton looks at the variable wherever a kernel is declared, its own included, so it
is set around ours only: the rest of the process has Triton as it is without.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import pytest
from kernel_checks import Kernels
from kernel_pools import Bytes

from rdma_kv.kernels import reference
from rdma_kv.kernels.launch import Chunk

MISSING = [name for name in ("torch", "triton") if importlib.util.find_spec(name) is None]


class CudaMemory:
    """Keeps what it placed on the GPU until it is dropped itself."""

    def __init__(self) -> None:
        self._placed: dict[int, Any] = {}

    def place(self, data: Bytes) -> int:
        copy = torch.from_numpy(data.copy()).to("cuda")  # torch aligns to 512 bytes
        self._placed[copy.data_ptr()] = copy
        return copy.data_ptr()

    def fetch(self, address: int) -> Bytes:
        return self._placed[address].cpu().numpy()


def launch(
    chunks: Sequence[Chunk],
    *,
    scatter: bool,
    words: int | None = None,
    tile_words: int | None = None,
    programs: int | None = None,
) -> None:
    """The public functions, but for pieces of `words`, of tiles of `tile_words` or of the same."""
    if MISSING:
        pytest.skip(f"not installed: {' and '.join(MISSING)}")
    if words is None:
        function = triton_scatter if scatter else triton_gather
        function(chunks, device=DEVICE, programs=programs)
    else:
        uploaded = tiles.upload(chunks, device=DEVICE, tile_words=tile_words or words)
        if uploaded is not None:
            uploaded.start(scatter=scatter, programs=programs or tiles.PROGRAMS, shape=tiles.Shape(words, 4))


def triton_kernels(**grid: int) -> Kernels:
    """Triton with that number of `words` in a piece, `tile_words` and `programs`."""
    return Kernels(
        "triton",
        lambda chunks: launch(chunks, scatter=False, **grid),
        lambda chunks: launch(chunks, scatter=True, **grid),
        CudaMemory if DEVICE == "cuda" else Kernels.memory,
    )


DEVICE = "cpu"
if not MISSING:
    import torch

    importlib.import_module("triton")  # before the variable is set

    with pytest.MonkeyPatch.context() as patch:
        if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
            DEVICE = "cuda"
        else:
            patch.setenv("TRITON_INTERPRET", "1")
        from rdma_kv.kernels import tiles
        from rdma_kv.kernels.gather import gather as triton_gather
        from rdma_kv.kernels.scatter import scatter as triton_scatter
    if DEVICE == "cpu":
        # the interpreter takes about as long for a tile of any size
        tiles.TILE_WORDS = 1 << 15
        tiles.WIDE = tiles.MIDDLE = tiles.NARROW = tiles.ODD = tiles.Shape(words=1 << 15, warps=16)

REFERENCE = Kernels("reference", reference.gather, reference.scatter)
TRITON = triton_kernels()
IMPLEMENTATIONS = [REFERENCE, TRITON]

each_implementation = pytest.mark.parametrize(
    "kernels",
    [pytest.param(REFERENCE, id="reference"), pytest.param(TRITON, id="triton", marks=pytest.mark.long)],
)
