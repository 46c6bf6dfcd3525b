"""Payload rate of the host kernels against `np.copyto` of the same bytes: `python -m rdma_kv.kernels.bench.host`.

Each case is one chunk of 32 MiB, its pages in random order from a pool of 256 MiB. `copyto` and the kernels run in turn,
and the best of several runs counts. `lag` is the longest that a thread beside the kernel, which sleeps 0.5 ms at a time,
overslept: what an event loop would feel.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.reference import gather, scatter

_POOL_BYTES = 256 << 20
_PAYLOAD_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Case:
    """What is taken of a pool `[planes][pages]`.

    Attributes:
        pitch: bytes from a page's token to the next.
        first_token: of the first page.
        skip: bytes by which every other plane is moved, to defeat alignment.
    """

    name: str
    planes: int
    page_size: int
    page_stride: int
    pitch: int
    row_bytes: int
    heads: int = 1
    head_stride: int = 0
    first_token: int = 0
    skip: int = 0


CASES = [
    Case("64 B rows, page 1", 2, 1, 64, 64, 64),
    Case("256 B rows, page 1", 2, 1, 256, 256, 256),
    Case("1 KiB rows, page 1", 2, 1, 1024, 1024, 1024),
    Case("4 KiB rows, page 1", 2, 1, 4096, 4096, 4096),
    Case("NHD 8 heads of 256 B, page 16", 64, 16, 16 * 2048, 2048, 256, heads=8, head_stride=256),
    Case("  from the sixth token on", 64, 16, 16 * 2048, 2048, 256, heads=8, head_stride=256, first_token=5),
    Case("  2 heads of 8", 64, 16, 16 * 2048, 2048, 256, heads=2, head_stride=256),
    Case("HND 2 heads of 8, 256 B, page 16", 64, 16, 16 * 2048, 256, 256, heads=2, head_stride=4096),
    Case("  1 head of 8", 64, 16, 16 * 2048, 256, 256),
    Case("MLA 1152 B, page 64", 61, 64, 64 * 1152, 1152, 1152),
    Case("  page 1", 61, 1, 1152, 1152, 1152),
    Case("  page 1, planes not aligned", 61, 1, 1152, 1152, 1152, skip=64),
    Case("split K/V 8 heads of 128 B, page 1", 56, 1, 1024, 1024, 128, heads=8, head_stride=128),
]


def build(case: Case, pool: npt.NDArray[np.uint8], packed: npt.NDArray[np.uint8]) -> Chunk:
    """The case's chunk; fills `packed` as nearly as whole tokens do."""
    plane_pages = _POOL_BYTES // case.planes // case.page_stride
    tokens = _PAYLOAD_BYTES // (case.planes * case.heads * case.row_bytes)
    pages = np.random.default_rng(1).permutation(plane_pages)
    offset = np.add.outer(pages * case.page_stride, np.arange(case.page_size) * case.pitch).reshape(-1)
    plane = np.arange(case.planes, dtype=np.int64)
    pointers = pool.ctypes.data + plane * plane_pages * case.page_stride + plane % 2 * case.skip
    return Chunk(
        packed.ctypes.data,
        pointers[None],
        np.zeros(tokens, np.int32),
        offset[case.first_token :][:tokens].astype(np.int64),
        case.heads,
        case.head_stride,
        case.row_bytes,
    )


def best_s(calls: list[Callable[[], object]], times: int = 15) -> list[float]:
    """Shortest time of each call, all run in turn."""
    best = [float("inf")] * len(calls)
    for _ in range(times):
        for i, call in enumerate(calls):
            start = time.perf_counter()
            call()
            best[i] = min(best[i], time.perf_counter() - start)
    return best


def lag_s(call: Callable[[], object], times: int = 10) -> float:
    """Longest oversleep of this thread while another one makes the calls."""
    worker = threading.Thread(target=lambda: [call() for _ in range(times)])
    longest = 0.0
    worker.start()
    while worker.is_alive():
        start = time.perf_counter()
        time.sleep(0.5e-3)
        longest = max(longest, time.perf_counter() - start - 0.5e-3)
    worker.join()
    return longest


def main() -> None:
    pool = np.ones(_POOL_BYTES + 4096, np.uint8)
    packed = np.ones(_PAYLOAD_BYTES, np.uint8)
    print(f"{'':36}{'copyto GB/s':>12}{'gather':>8}{'ratio':>7}{'lag ms':>8}{'scatter':>9}{'ratio':>7}{'lag ms':>8}")
    for case in CASES:
        chunk = build(case, pool, packed)
        size = chunk.packed_bytes
        launches = [partial(gather, [chunk]), partial(scatter, [chunk])]
        times = best_s([partial(np.copyto, packed[:size], pool[:size]), *launches])
        rates = [size / seconds / 1e9 for seconds in times]
        lags = [lag_s(launch) * 1e3 for launch in launches]
        cells = [f"{rate:8.1f}{rate / rates[0]:7.2f}{lag:8.1f}" for rate, lag in zip(rates[1:], lags, strict=True)]
        print(f"{case.name:36}{rates[0]:12.1f}{' '.join(cells)}")


if __name__ == "__main__":
    main()
