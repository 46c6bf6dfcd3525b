"""Measures gather and scatter on a GPU; `rdma_kv.bench.gpu` makes rows and goals of it, `rdma-kv bench gpu` prints them.

Figures are GB/s read plus written, of bytes counted once on each side. Everything is queued on one stream, the launches of
a sample between two events and one more before them, so the host's time is not in it. Rounds are interleaved: each goes
through the copy and all cases. Pools lie in one allocation, their pages are taken in random order, and tables are uploaded
once per case.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from rdma_kv.kernels import tiles
from rdma_kv.kernels.bench.gpu_check import chunk_of, form
from rdma_kv.kernels.bench.per_layer import gather_per_layer
from rdma_kv.kernels.checksum import Piece
from rdma_kv.kernels.checksum_triton import checksums
from rdma_kv.kernels.gather import gather
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.programs import programs_for

Meter = Callable[[str, int, int], None]
Samples = list[float]

PAYLOAD_BYTES = 512 << 20  # many times the L2 of any GPU
POOL_BYTES = 4 * PAYLOAD_BYTES  # of which pages are drawn; eight times as much for one head of eight
UNBOUND = 1 << 30  # programs: one a piece, the hardware shares them out
FEW = 20  # programs of the baseline
_LAUNCHES = 4  # of a sample
_CHECKED_ROWS = 4096


@dataclass(frozen=True, slots=True)
class Case:
    """A pool of which the first `heads` of random pages are taken. Rows of heads that lie back to back are longer."""

    name: str
    layout: str
    layers: int
    page_size: int
    pool_heads: int
    row_bytes: int
    heads: int = 1
    pools: int = 1

    @property
    def run_bytes(self) -> int:
        """Contiguous bytes of a token."""
        joined = self.layout not in {"hnd", "trtllm"}
        return self.row_bytes * (self.heads if joined else 1)


CASES = (
    Case("rows of 64 B", "sglang", 32, 1, 1, 64),
    Case("rows of 128 B", "sglang", 32, 1, 1, 128),
    Case("rows of 256 B", "sglang", 32, 1, 1, 256),
    Case("rows of 512 B", "sglang", 32, 1, 1, 512),
    Case("rows of 1 KiB", "sglang", 32, 1, 1, 1024),
    Case("rows of 4 KiB", "sglang", 32, 1, 1, 4096),
    Case("rows of 16 KiB", "sglang", 16, 1, 1, 16384),
    Case("rows of 1 KiB, two pools", "sglang", 32, 1, 1, 1024, pools=2),
    Case("NHD, page 16, 8 heads of 256 B", "nhd", 32, 16, 8, 256, heads=8),
    Case("MLA, page 64, 1152 B", "mla", 61, 64, 1, 1152),
    Case("MLA, page 1, 1152 B", "mla", 61, 1, 1, 1152),
    Case("HND, page 16, 1 head of 8, 256 B", "hnd", 32, 16, 8, 256),
    Case("HND, page 16, 2 heads of 8, 256 B", "hnd", 32, 16, 8, 256, heads=2),
    Case("HND, page 1, 1 head of 8, 256 B", "hnd", 32, 1, 8, 256),
    Case("NHD, page 16, 1 head of 8, 512 B", "nhd", 32, 16, 8, 512),
    Case("MLA, page 64, 578 B", "mla", 61, 64, 1, 578),
    Case("MLA, page 1, 578 B", "mla", 61, 1, 1, 578),
    Case("MLA, page 1, 577 B", "mla", 61, 1, 1, 577),
)
CURVE_CASE = CASES[4]
BASELINE_CASE = Case("rows of 4 KiB, one buffer a layer", "mla", 32, 1, 1, 4096)


@dataclass(slots=True)
class Measured:
    """GB/s read + written, a sample a round; times where it says so.

    Attributes:
        cases: by case and direction.
        curve: by direction and number of programs.
        ours_few: gather of BASELINE_CASE in FEW programs.
        summed: gather of CURVE_CASE and, in a second launch, its checksum.
        fused, unsummed: gather of CURVE_CASE in so many programs, with its checksum in one launch, and without.
        host_us: of a call of `gather` with so many chunks.
        allocations: from the driver, of memory, in steady state.
    """

    device: str
    programs: int
    copy: Samples = field(default_factory=list)
    cases: dict[tuple[Case, str], Samples] = field(default_factory=dict)
    curve: dict[tuple[str, int], Samples] = field(default_factory=dict)
    baseline: Samples = field(default_factory=list)
    ours_few: Samples = field(default_factory=list)
    summed: Samples = field(default_factory=list)
    fused: dict[int, Samples] = field(default_factory=dict)
    unsummed: dict[int, Samples] = field(default_factory=dict)
    host_us: dict[int, Samples] = field(default_factory=dict)
    allocations: int = 0


def build(case: Case, pool: torch.Tensor, packed: torch.Tensor) -> Chunk:
    """The case's chunk: fills `packed` as nearly as whole tokens do, from pages drawn from all of the pool's."""
    share = pool.numel() // case.pools
    shape = {"layers": case.layers, "page_size": case.page_size, "heads": case.pool_heads, "row_bytes": case.row_bytes}
    pages = share // form(case.layout, pages=1, **shape).size
    kind = form(case.layout, pages=pages, **shape)
    tokens = packed.numel() // (kind.planes.size * case.heads * case.row_bytes)
    rng = np.random.default_rng(1)
    chosen = rng.permutation(pages)[: -(-tokens // case.page_size)]
    slots = np.add.outer(chosen * case.page_size, np.arange(case.page_size)).reshape(-1)[:tokens]
    begins = [pool.data_ptr() + number * (share // 16 * 16) for number in range(case.pools)]
    return chunk_of(kind, packed.data_ptr(), begins, slots, rng.integers(0, case.pools, slots.size), range(case.heads))


def device_s(call: Callable[[], object], launches: int = _LAUNCHES) -> float:
    """Device time of one of `launches` calls in a row, behind one more that hides what the first costs the host."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    start.record()
    for _ in range(launches):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / launches


class Bench:
    """One GPU, its pool and packed memory, and what was measured."""

    def __init__(self, device: torch.device, rounds: int, meter: Meter) -> None:
        self._device, self._rounds, self._meter = device, rounds, meter
        self._pool = torch.randint(0, 256, (POOL_BYTES * 4,), dtype=torch.uint8, device=device)
        self._packed = torch.zeros(PAYLOAD_BYTES, dtype=torch.uint8, device=device)
        properties = torch.cuda.get_device_properties(device)
        self._multiprocessors = properties.multi_processor_count
        self.measured = Measured(properties.name, self._multiprocessors)

    def pool(self, case: Case) -> torch.Tensor:
        return self._pool[: POOL_BYTES * (4 if case.heads < case.pool_heads else 1)]

    def check(self, case: Case) -> int:
        """Rows, of a random sample in each direction, that are not where and what they should be."""
        chunk = build(case, self.pool(case), self._packed)
        uploaded = tiles.upload([chunk], device=self._device)
        if uploaded is None:
            return 0
        generator = torch.Generator(self._device).manual_seed(5)
        wrong = 0
        for scatter in (False, True):
            if scatter:
                self._packed.random_(0, 256, generator=generator)
            uploaded.start(scatter=scatter, programs=UNBOUND)
            paged, packed = self._sample(chunk)
            wrong += int((self._pool[paged] != self._packed[packed]).any(1).sum())
        return wrong

    def _sample(self, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Places of the bytes of some rows in the pool and in the packed memory, int64 `[rows, row_bytes]`."""
        rng = np.random.default_rng(7)
        plane, token, head = (
            rng.integers(0, most, _CHECKED_ROWS) for most in (chunk.planes, chunk.tokens, chunk.heads)
        )
        paged = chunk.pointers[chunk.token_pool[token], plane] + chunk.token_offset[token] + head * chunk.head_stride
        packed = ((plane * chunk.tokens + token) * chunk.heads + head) * chunk.row_bytes
        each = torch.arange(chunk.row_bytes, device=self._device)
        first = torch.from_numpy(paged - self._pool.data_ptr()).to(self._device)
        return first[:, None] + each, torch.from_numpy(packed).to(self._device)[:, None] + each

    def run(self, cases: Sequence[Case], curve: Sequence[int]) -> Measured:
        """All rounds. Their first, which is not kept, compiles and warms up."""
        works = list(self._works(cases, curve))
        total = (self._rounds + 1) * len(works)
        for number in range(self._rounds + 1):
            for place, (name, num_bytes, call, samples) in enumerate(works):
                self._meter(f"round {number} of {self._rounds}: {name}", number * len(works) + place, total)
                gb_s = 2 * num_bytes / device_s(call) / 1e9
                if number:
                    samples.append(gb_s)
        self._host(works[0][2])
        self._meter("done", total, total)
        return self.measured

    def _works(
        self, cases: Sequence[Case], curve: Sequence[int]
    ) -> Iterator[tuple[str, int, Callable[[], object], Samples]]:
        """What a round measures: name, payload, call, and where the samples go."""
        source = self._pool[:PAYLOAD_BYTES]
        yield "copy", PAYLOAD_BYTES, partial(self._packed.copy_, source), self.measured.copy
        for case in cases:
            for direction in ("gather", "scatter"):
                call, num_bytes = self._launch(case, direction, UNBOUND)
                yield (
                    f"{direction}, {case.name}",
                    num_bytes,
                    call,
                    self.measured.cases.setdefault((case, direction), []),
                )
        for programs in curve:
            for direction in ("gather", "scatter"):
                call, num_bytes = self._launch(CURVE_CASE, direction, programs)
                samples = self.measured.curve.setdefault((direction, programs), [])
                yield f"{direction}, {programs} programs", num_bytes, call, samples
        call, num_bytes = self._launch(BASELINE_CASE, "gather", FEW)
        yield f"gather, {BASELINE_CASE.name}, {FEW} programs", num_bytes, call, self.measured.ours_few
        yield "per-layer kernel", num_bytes, self._baseline(), self.measured.baseline
        call, num_bytes = self._launch(CURVE_CASE, "gather", UNBOUND)
        piece = Piece(self._packed.data_ptr(), num_bytes)

        def summed() -> None:
            call()
            checksums([piece], device=self._device, programs=4 * self._multiprocessors)

        yield "gather and checksum", num_bytes, summed, self.measured.summed
        yield from self._sums()

    def _sums(self) -> Iterator[tuple[str, int, Callable[[], object], Samples]]:
        """Gathers by the public call, tables and all, with and without checksum."""
        chunk = build(CURVE_CASE, self.pool(CURVE_CASE), self._packed)
        for programs in (programs_for(["cuda_ipc"]), 4 * self._multiprocessors):
            for checksum, samples in ((False, self.measured.unsummed), (True, self.measured.fused)):
                call = partial(gather, [chunk], device=self._device, programs=programs, checksum=checksum)
                name = f"gather{', checksum' if checksum else ''}, {programs} programs, with tables"
                yield name, chunk.packed_bytes, call, samples.setdefault(programs, [])

    def _launch(self, case: Case, direction: str, programs: int) -> tuple[Callable[[], object], int]:
        chunk = build(case, self.pool(case), self._packed)
        uploaded = tiles.upload([chunk], device=self._device)
        assert uploaded is not None
        return partial(uploaded.start, scatter=direction == "scatter", programs=programs), chunk.packed_bytes

    def _baseline(self) -> Callable[[], object]:
        chunk = build(BASELINE_CASE, self.pool(BASELINE_CASE), self._packed)
        pool = self.pool(BASELINE_CASE).view(torch.bfloat16)
        row, slots = chunk.row_bytes // 2, pool.numel() // BASELINE_CASE.layers // (chunk.row_bytes // 2)
        layers = list(pool[: BASELINE_CASE.layers * slots * row].view(BASELINE_CASE.layers, slots, row))
        chosen = torch.from_numpy(chunk.token_offset // chunk.row_bytes).to(self._device)
        out = self._packed.view(torch.bfloat16)[: len(layers) * chosen.numel() * row]
        return partial(gather_per_layer, layers, chosen, out.view(len(layers), -1, row))

    def _host(self, busy: Callable[[], object]) -> None:
        """Host time of a call, tables and launch, and what it takes from the driver, while the device has other work."""
        chunk = build(CASES[8], self._pool[: 64 << 20], self._packed[: 4 << 20])
        for chunks in (1, 32):
            call = partial(gather, [chunk] * chunks, device=self._device)
            samples = self.measured.host_us.setdefault(chunks, [])
            for number in range(self._rounds + 5):
                if number == 5:
                    before = self._allocated()
                busy()
                begin = time.perf_counter()
                call()
                if number >= 5:
                    samples.append((time.perf_counter() - begin) * 1e6)
                torch.cuda.synchronize(self._device)
            self.measured.allocations += self._allocated() - before

    def _allocated(self) -> int:
        device = torch.cuda.memory_stats(self._device)["num_device_alloc"]
        return int(device) + int(torch.cuda.host_memory_stats().get("num_host_alloc", 0))


def curve_programs(multiprocessors: int, *, quick: bool) -> list[int]:
    """From 4 to 4 a multiprocessor."""
    few = [4, 8, 16, 20, 32, 64] if quick else [4, 8, 12, 16, 20, 24, 32, 48, 64, 96]
    return sorted({*few, *(multiprocessors * times for times in (1, 2, 4))})


def worst_payload(measured: Measured) -> dict[int, float]:
    """The curve that a choice of programs needs: payload in GB/s by number of programs, of the slower direction."""
    programs = {number for _, number in measured.curve}
    return {
        number: min(statistics.median(measured.curve[way, number]) for way in ("gather", "scatter")) / 2
        for number in sorted(programs)
    }
