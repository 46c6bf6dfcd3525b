"""`rdma-kv bench multigpu`: KV from GPU to GPU over NVLink, by agents, by NIXL's own API, and by one kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Final

from rdma_kv.bench.goals import Meter, Missing
from rdma_kv.bench.gpu import GpuOptions, about, missing_gpus
from rdma_kv.bench.gpu_links import Link, Way
from rdma_kv.bench.gpu_rounds import Step, faster, run_rounds, whole_part
from rdma_kv.bench.gpu_steps import (
    CONTIGUOUS,
    backends,
    close_raw,
    raw_steps,
    size_name,
    transfer_step,
    usual_raw,
)
from rdma_kv.bench.gpu_team import Team, TeamSpec, team
from rdma_kv.bench.multigpu_peer import ROW_BYTES, measure_peers
from rdma_kv.bench.rows import Row
from rdma_kv.errors import RdmaKvError
from rdma_kv.kernels.programs import LANE_GB_S, programs_for

PEER, PAIR, CROSSING = "peer", "pair", "crossing"
PARTS: Final = (PEER, PAIR, CROSSING)
"""In this process; from GPU 0 to GPU 1; prefill and decode on both, all traffic between them."""
PAIR_GOAL = 0.9
"""Goal: of the rate of NIXL's own API with one descriptor, by agents over nixl, from GOAL_BYTES up."""
GOAL_BYTES = 1 << 30
SIZES: Final = (8 << 30, GOAL_BYTES, 64 << 20, 1 << 20)
GOAL_BACKEND = "nixl"
_TIMES = 5  # one after the other: their median is a sample


@dataclass(frozen=True, slots=True)
class MultiGpuOptions(GpuOptions):
    """What `rdma-kv bench multigpu` was asked for; as `GpuOptions`, with parts of its own."""

    known: ClassVar[tuple[str, ...]] = PARTS


@dataclass(frozen=True, slots=True)
class MultiSizes:
    """What is moved; tests have less.

    Attributes:
        row_bytes: of the models.
        sizes: of one transfer, the largest first.
        slot_bytes: of staging. A chunk costs either side some 0.8 ms of CPU, and 512 MiB take NVLink 1.4 ms.
        crossing_bytes: of one transfer while all processes work.
        crossing_slot_bytes: of staging then; there are two processes on each GPU.
    """

    row_bytes: tuple[int, ...] = ROW_BYTES
    sizes: tuple[int, ...] = SIZES
    slot_bytes: int = 512 << 20
    crossing_bytes: int = 1 << 30
    crossing_slot_bytes: int = 256 << 20
    layers: int = 64


def measure_multigpu(options: MultiGpuOptions, meter: Meter) -> list[Row]:
    """Run all that was asked for, on GPUs 0 and 1. What cannot be run at all is a row that is not ok."""
    missing = missing_gpus(2)
    if missing:
        return [Missing("two CUDA devices", missing, "")]
    import torch

    sizes, rounds, ordinals = MultiSizes(), options.rounds, (0, 1)
    parts: dict[str, Callable[[], list[Row]]] = {
        PEER: lambda: measure_peers(ordinals, rounds, meter, quick=options.quick),
        PAIR: lambda: measure_pair(ordinals, sizes, rounds, meter),
        CROSSING: lambda: measure_crossing(ordinals, sizes, rounds, meter),
    }
    rows: list[Row] = []
    for part, measure in parts.items():
        if part in options.chosen:
            rows += whole_part(part, measure)
            torch.cuda.empty_cache()
    return [*rows, *about(options.commit)]


def measure_pair(ordinals: tuple[int | None, int | None], sizes: MultiSizes, rounds: int, meter: Meter) -> list[Row]:
    """One prefill process on the first GPU, one decode process on the second one."""
    spec = TeamSpec((ordinals[0],), (ordinals[1],), sizes.sizes[0], layers=sizes.layers)
    meter("starting two processes", 0, 1)
    try:
        with team(spec) as pair:
            return _pair_rows(pair, sizes, rounds, meter)
    except RdmaKvError as exc:
        return [Missing("GPU 0 to GPU 1", f"failed: {exc}", "")]


def _pair_rows(pair: Team, sizes: MultiSizes, rounds: int, meter: Meter) -> list[Row]:
    least = min(GOAL_BYTES, sizes.sizes[0])  # that has a goal
    names = {size: CONTIGUOUS if size == least else f"{CONTIGUOUS} of {size_name(size)}" for size in sizes.sizes}
    smaller_first = [(names[size], size, size) for size in sorted(sizes.sizes) if size != least]
    raw = raw_steps(pair, [*smaller_first, *usual_raw(least)], times=_TIMES)
    alike = {size: raw[name] for size, name in names.items()}
    moves = _moves(pair, sizes.row_bytes, sizes.sizes, sizes.slot_bytes, "GPU 0 to 1")
    steps = [*moves.values(), *raw.values()]
    run_rounds("GPU 0 to 1", steps, rounds, meter)
    close_raw(pair)
    rows: list[Row] = []
    for (_, size, backend), move in moves.items():
        goal = PAIR_GOAL if size >= least and backend == GOAL_BACKEND else None
        rows.append(faster(f"{move.name}: to NIXL, one descriptor", move, alike[size], goal))
    return [*sorted(rows, key=lambda row: row.goal is None), *(row for step in steps for row in step.rows), *_budget()]


def measure_crossing(
    ordinals: tuple[int | None, int | None], sizes: MultiSizes, rounds: int, meter: Meter
) -> list[Row]:
    """Prefill tp=2,dp=2 to decode tp=2,dp=2, one process of either on each GPU; all of them work at once."""
    spec = TeamSpec(ordinals, ordinals, sizes.crossing_bytes, layers=sizes.layers)
    meter("starting four processes", 0, 1)
    try:
        with team(spec) as four:
            once = (sizes.crossing_bytes,)
            moves = _moves(four, sizes.row_bytes, once, sizes.crossing_slot_bytes, "both GPUs, crossing")
            run_rounds("crossing", list(moves.values()), rounds, meter)
            return [row for step in moves.values() for row in step.rows]
    except RdmaKvError as exc:
        return [Missing("tp=2,dp=2 to tp=2,dp=2", f"failed: {exc}", "")]


def _moves(
    some: Team, row_sizes: tuple[int, ...], num_bytes: tuple[int, ...], slot_bytes: int, where: str
) -> Mapping[tuple[int, int, str], Step]:
    """Transfers by row size, bytes and transport."""
    way = Way.HOST if some.spec.prefill[0] is None else Way.DIRECT
    return {
        (row_bytes, size, backend): transfer_step(
            some,
            f"{where}, {size_name(size)}{'' if len(some.prefill) == 1 else ' each'}, rows of {row_bytes:,} B: {backend}",
            Link(backend, way, row_bytes, slot_bytes=slot_bytes),
            size,
            times=_TIMES,
        )
        for row_bytes in row_sizes
        for size in num_bytes
        for backend in backends()
    }


def _budget() -> list[Row]:
    programs = programs_for(["cuda_ipc"])
    return [Row(f"programs that agents choose for cuda_ipc ({LANE_GB_S['cuda_ipc']:g} GB/s)", programs, "")]
