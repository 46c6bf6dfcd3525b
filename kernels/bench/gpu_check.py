"""Triton kernels on a GPU: bytes against the reference, then rates: `python -m rdma_kv.kernels.bench.gpu_check`.

Bytes: pools of the engines' layouts lie in one block of host memory that has a copy on the device. The reference works on
the block, Triton on the copy, and the two are compared whole, so a byte written beside a row counts as wrong. Exit status 1
says that a byte differed.

Rates: bytes read plus bytes written per second, as a share of what `Tensor.copy_` reaches on as many bytes in the same
process. The tables are uploaded once; what they cost a launch on the host is told apart.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from rdma_kv.kernels import reference
from rdma_kv.kernels.gather import gather
from rdma_kv.kernels.launch import Chunk, Int64Array
from rdma_kv.kernels.tiles import TILING, Tiling, upload

Bytes = npt.NDArray[np.uint8]

PROGRAMS = (4, 16, 64, 132, 264, 528)
_GIB = 1 << 30
_PAYLOAD_BYTES = _GIB // 2  # several times the L2
_POOL_BYTES = _GIB
_RUNS = 10


@dataclass(frozen=True, slots=True)
class Form:
    """How a pool is stored, in bytes; `planes` are the offsets of its (layer, kv) from its begin."""

    planes: Int64Array
    page_size: int
    page_stride: int
    token_stride: int
    head_stride: int
    heads: int
    row_bytes: int
    size: int


def form(layout: str, *, layers: int, pages: int, page_size: int, heads: int, row_bytes: int) -> Form:
    """One of the engines' layouts.

    Raises:
        KeyError: the layout is none of them.
    """
    token, page = heads * row_bytes, page_size * heads * row_bytes
    layer, kv = (each.reshape(-1) for each in np.indices((layers, 1 if layout == "mla" else 2)))
    plane, count = pages * page, layers * (1 if layout == "mla" else 2)
    planes, page_stride, token_stride, head_stride = {
        "nhd": ((layer * 2 + kv) * plane, page, token, row_bytes),
        "hnd": ((layer * 2 + kv) * plane, page, row_bytes, page_size * row_bytes),
        "mla": (layer * plane, page, token, row_bytes),
        "lightllm": (layer * 2 * plane + kv * token, 2 * page, 2 * token, row_bytes),
        "sglang": ((kv * layers + layer) * plane, page, token, row_bytes),
        "trtllm": ((layer * 2 + kv) * page, count * page, row_bytes, page_size * row_bytes),
    }[layout]
    return Form(planes, page_size, page_stride, token_stride, head_stride, heads, row_bytes, count * plane)


def chunk_of(
    kind: Form, packed: int, pools: Sequence[int], slots: Int64Array, pool_of: Int64Array, heads: range
) -> Chunk:
    """A chunk of the slots' `heads`, of pools that begin at the given addresses."""
    page, place = np.divmod(slots, kind.page_size)
    return Chunk(
        packed,
        np.add.outer(np.array(pools, np.int64), kind.planes),
        pool_of.astype(np.int32),
        page * kind.page_stride + place * kind.token_stride + heads.start * kind.head_stride,
        len(heads),
        kind.head_stride,
        kind.row_bytes,
    )


# --- bytes


class Block:
    """Host memory that pools and packed forms are cut from, one after the other."""

    def __init__(self, size: int, rng: np.random.Generator) -> None:
        room = rng.integers(0, 256, size + 64, np.uint8)
        self.here: Bytes = room[-room.ctypes.data % 64 :][:size]
        self.rng = rng
        self._used = 0

    def cut(self, size: int, skew: int) -> int:
        """Address of `size` fresh bytes, `skew` off a multiple of 64, with 64 bytes around that nobody may touch.

        Raises:
            MemoryError: the block is used up.
        """
        begin = self._used + 64 + skew
        self._used = -(-(begin + size) // 64) * 64
        if self._used + 64 > self.here.size:
            raise MemoryError(f"{self._used + 64} bytes of {self.here.size}")
        return self.here.ctypes.data + begin

    def chunk(self, layout: str, *, row_bytes: int, skew: int = 0, heads: range = range(4), pools: int = 1) -> Chunk:
        """Random tokens of fresh pools, a page in whole among them; of MLA's one head in any case."""
        heads, pool_heads = (range(1), 1) if layout == "mla" else (heads, 4)
        kind = form(layout, layers=3, pages=9, page_size=4, heads=pool_heads, row_bytes=row_bytes)
        slots = np.concatenate((np.arange(12, 16), self.rng.permutation(12)[:7], [17, 30]))
        pool_of = self.rng.integers(0, pools, slots.size)
        begins = [self.cut(kind.size, skew * (pool + 1)) for pool in range(pools)]
        packed = self.cut(kind.planes.size * slots.size * len(heads) * row_bytes, skew)
        return chunk_of(kind, packed, begins, slots, pool_of, heads)


def launches(block: Block) -> Iterator[tuple[str, list[Chunk]]]:
    """What is checked: each layout alone, then all of it in one launch."""
    chunks = []
    for layout in ("nhd", "hnd", "mla", "lightllm", "sglang", "trtllm"):
        each = [
            *(block.chunk(layout, row_bytes=size) for size in (1, 2, 3, 5, 8, 16, 33, 66, 256, 578, 1152, 4096)),
            *(block.chunk(layout, row_bytes=64, skew=skew) for skew in (1, 2, 3, 4, 8)),
            *(block.chunk(layout, row_bytes=64, heads=heads) for heads in (range(1), range(1, 3), range(3, 4))),
            *(block.chunk(layout, row_bytes=size, pools=3) for size in (7, 128)),
        ]
        yield layout, each
        chunks += each
    yield "all in one launch", chunks
    yield "no chunk", []


def wrong_bytes(chunks: Sequence[Chunk], block: Block, there: torch.Tensor, tiling: Tiling, programs: int) -> int:
    """Bytes of the block that differ after a gather, plus those after a scatter of other packed bytes."""
    delta = there.data_ptr() - block.here.ctypes.data
    moved = [
        replace(chunk, packed_address=chunk.packed_address + delta, pointers=chunk.pointers + delta) for chunk in chunks
    ]
    wrong = 0
    for scatter in (False, True):
        if scatter:
            for chunk in chunks:
                begin = chunk.packed_address - block.here.ctypes.data
                block.here[begin : begin + chunk.packed_bytes] ^= 0x5A
        there.copy_(torch.from_numpy(block.here))
        uploaded = upload(moved, device=there.device, tiling=tiling)
        if uploaded is not None:
            uploaded.start(scatter=scatter, programs=programs)
        (reference.scatter if scatter else reference.gather)(chunks)
        wrong += int(np.count_nonzero(there.cpu().numpy() != block.here))
    return wrong


def wrong_bytes_far_apart(device: torch.device) -> int:
    """As `wrong_bytes`, for planes and tokens more than 4 GiB apart, in words of 16 bytes and of one."""
    pool = torch.zeros(11 * _GIB, dtype=torch.uint8, device=device)
    wrong = 0
    for row_bytes in (4096, 4097):
        planes = np.array([64, 64 + 5 * _GIB], np.int64)
        offsets = np.array([4 * _GIB + 64, 0, 2 * _GIB, 2 * _GIB - 8192], np.int64)
        starts = np.add.outer(planes, offsets).reshape(-1).tolist()
        packed = torch.zeros(len(starts) * row_bytes, dtype=torch.uint8, device=device)
        rows = torch.randint(0, 256, (len(starts), row_bytes), dtype=torch.uint8, device=device)
        chunk = Chunk(
            packed.data_ptr(), planes[None] + pool.data_ptr(), np.zeros(4, np.int32), offsets, 1, 0, row_bytes
        )
        uploaded = upload([chunk], device=device)
        assert uploaded is not None
        for start, row in zip(starts, rows, strict=True):
            pool[start : start + row_bytes] = row
        uploaded.start(scatter=False, programs=16)
        wrong += int((packed != rows.reshape(-1)).sum())
        packed.copy_(rows.flip(0).reshape(-1))
        uploaded.start(scatter=True, programs=16)
        wrong += sum(
            int((pool[start : start + row_bytes] != row).sum()) for start, row in zip(starts, rows.flip(0), strict=True)
        )
    return wrong


def check(device: torch.device, tilings: Sequence[Tiling], programs: Sequence[int]) -> bool:
    """Print each launch and its number of wrong bytes; whether all were right."""
    block = Block(48 << 20, np.random.default_rng(11))
    there = torch.empty(block.here.size, dtype=torch.uint8, device=device)
    counts = []
    for name, chunks in launches(block):
        for tiling in tilings:
            counts.append(sum(wrong_bytes(chunks, block, there, tiling, each) for each in programs))
            print(f"{name:20} {len(chunks):4} chunks  {tiling.words:6} x {tiling.warps:<3} wrong bytes: {counts[-1]}")
    if device.type == "cuda":
        counts.append(wrong_bytes_far_apart(device))
        print(f"{'beyond 32 bits':20} {'':36}wrong bytes: {counts[-1]}")
    return not any(counts)


# --- rates


@dataclass(frozen=True, slots=True)
class Case:
    """A pool of which the first `heads` of random pages are taken."""

    name: str
    layout: str
    layers: int
    page_size: int
    pool_heads: int
    row_bytes: int
    heads: int = 1


CASES = [
    Case("64 B rows, page 1", "sglang", 32, 1, 1, 64),
    Case("256 B rows, page 1", "sglang", 32, 1, 1, 256),
    Case("512 B rows, page 1", "sglang", 32, 1, 1, 512),
    Case("1 KiB rows, page 1", "sglang", 32, 1, 1, 1024),
    Case("4 KiB rows, page 1", "sglang", 32, 1, 1, 4096),
    Case("NHD 8 heads of 256 B, page 16", "nhd", 32, 16, 8, 256, heads=8),
    Case("  2 heads of 8", "nhd", 32, 16, 8, 256, heads=2),
    Case("HND 2 heads of 8, 256 B, page 16", "hnd", 32, 16, 8, 256, heads=2),
    Case("  1 head of 8", "hnd", 32, 16, 8, 256),
    Case("MLA 1152 B, page 64", "mla", 61, 64, 1, 1152),
    Case("  page 1", "mla", 61, 1, 1, 1152),
    Case("  578 B (words of 2 B), page 1", "mla", 61, 1, 1, 578),
]


def build(case: Case, pool: torch.Tensor, packed: torch.Tensor) -> Chunk:
    """The case's chunk; takes half the pool, or fewer heads of more of it, and at most fills `packed`."""
    layout, heads, row_bytes = case.layout, case.pool_heads, case.row_bytes
    page_bytes = form(
        layout, layers=case.layers, pages=1, page_size=case.page_size, heads=heads, row_bytes=row_bytes
    ).size
    pages = pool.numel() // page_bytes
    kind = form(layout, layers=case.layers, pages=pages, page_size=case.page_size, heads=heads, row_bytes=row_bytes)
    tokens = min(packed.numel() // (kind.planes.size * case.heads * row_bytes), pages * case.page_size * 7 // 8)
    order = np.random.default_rng(1).permutation(pages)
    slots = np.add.outer(order * case.page_size, np.arange(case.page_size)).reshape(-1)[:tokens]
    return chunk_of(kind, packed.data_ptr(), [pool.data_ptr()], slots, np.zeros(tokens, np.int64), range(case.heads))


def device_s(call: Callable[[], object]) -> float:
    """Device time of one call, the best of several; the one before it hides what it costs the host."""
    best = float("inf")
    for _ in range(_RUNS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        call()
        start.record()
        call()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / 1e3)
    return best


def rates(device: torch.device, tiling: Tiling, programs: Sequence[int]) -> None:
    """Print the table: for each number of programs gather and scatter, in percent of the copy."""
    pool = torch.ones(_POOL_BYTES, dtype=torch.uint8, device=device)
    packed = torch.ones(_PAYLOAD_BYTES, dtype=torch.uint8, device=device)
    ceiling = 2 * _PAYLOAD_BYTES / device_s(lambda: packed.copy_(pool[:_PAYLOAD_BYTES]))
    print(f"\n{torch.cuda.get_device_name(device)}: copy {ceiling / 1e9:.0f} GB/s read + write")
    print(f"tiles of {tiling.words} words, {tiling.warps} warps; gather / scatter, % of the copy, by programs")
    print(f"{'':34}" + "".join(f"{each:>12}" for each in programs))
    for case in CASES:
        chunk = build(case, pool, packed)
        uploaded = upload([chunk], device=device, tiling=tiling)
        assert uploaded is not None
        cells = []
        for each in programs:
            launches = [partial(uploaded.start, scatter=scatter, programs=each) for scatter in (False, True)]
            times = [device_s(launch) for launch in launches]
            cells.append("/".join(f"{200 * chunk.packed_bytes / took / ceiling:5.1f}" for took in times))
        print(f"{case.name:34}" + "".join(f"{cell:>12}" for cell in cells))


def host_cost(device: torch.device) -> None:
    """Print what a call costs the calling thread, tables and launch, without waiting for the device."""
    pool = torch.ones(64 << 20, dtype=torch.uint8, device=device)
    packed = torch.ones(32 << 20, dtype=torch.uint8, device=device)
    whole = build(CASES[5], pool, packed)
    for chunks in (1, 32):
        launch = partial(gather, [whole] * chunks, device=device)
        launch()
        best = float("inf")
        for _ in range(20):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            launch()
            best = min(best, time.perf_counter() - start)
        print(f"host time of a call of {chunks} chunks of {whole.tokens} tokens, 64 planes: {best * 1e6:.0f} us")


def _tiling(text: str) -> Tiling:
    words, warps = text.split("x")
    return Tiling(int(words), int(warps))


def main() -> int:
    """Check, then measure; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cpu: only the bytes, in Triton's interpreter")
    parser.add_argument("--tiling", action="append", type=_tiling, help="words x warps, as 2048x16; may be repeated")
    parser.add_argument("--programs", type=int, nargs="+", default=PROGRAMS)
    parser.add_argument("--bytes-only", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    tilings = arguments.tiling or [TILING]
    if not check(device, tilings, arguments.programs):
        print("WRONG BYTES")
        return 1
    print("all bytes right")
    if device.type == "cuda" and not arguments.bytes_only:
        for tiling in tilings:
            rates(device, tiling, arguments.programs)
        host_cost(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
