"""`rdma-kv bench gpu`, part `kernels`: rows and goals of what `rdma_kv.kernels.bench.gpu` measures, and its plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rdma_kv.bench.goals import Bound, Meter, Relation, figure
from rdma_kv.bench.plot import Line
from rdma_kv.bench.rows import Row
from rdma_kv.errors import RdmaKvError
from rdma_kv.kernels.programs import MARGIN, fewest_programs

if TYPE_CHECKING:
    from rdma_kv.kernels.bench.gpu import Case, Measured

WHOLE, HALF_KIB, SLICES = 0.95, 0.85, 0.8
"""Goals: of the copy, for rows from 1 KiB on, for rows of 512 B, for HND head slices from 256 B on."""
FEW_GOAL = 15.0
"""Goal: times the per-layer kernel, in as many programs."""
LANES = {"200 Gbit/s": 25.0, "400 Gbit/s": 50.0, "800 Gbit/s": 100.0, "NVLink, one descriptor": 297.0}
"""For which a number of programs is shown, in GB/s."""

Panels = Mapping[str, Mapping[str, Line]]


def measure_kernels(ordinal: int, rounds: int, meter: Meter, *, quick: bool) -> tuple[list[Row], Panels]:
    """Run it all: rows, and the panels of a plot.

    Raises:
        RdmaKvError: a row that was gathered or scattered is not what and where it should be.
    """
    import torch

    from rdma_kv.kernels.bench import gpu

    bench = gpu.Bench(torch.device("cuda", ordinal), rounds, meter)
    for case in gpu.CASES:
        wrong = bench.check(case)
        if wrong:
            raise RdmaKvError(f"{case.name}: {wrong} rows are wrong")
    measured = bench.run(gpu.CASES, gpu.curve_programs(bench.measured.programs, quick=quick))
    return kernel_rows(measured), _panels(measured)


def kernel_rows(measured: Measured) -> list[Row]:
    """Those with a goal first."""
    from rdma_kv.kernels.bench import gpu

    curve = gpu.worst_payload(measured)
    return [
        *_goals(measured),
        *figure("copy, read + write", measured.copy, "GB/s"),
        *(row for (case, way), samples in measured.cases.items() for row in _case(case, way, samples, measured)),
        *(
            row
            for (way, count), each in measured.curve.items()
            for row in figure(_curve_name(way, count), each, "GB/s")
        ),
        *(
            Row(f"programs for {MARGIN} x {name} ({rate:g} GB/s)", fewest_programs(rate, curve), "")
            for name, rate in LANES.items()
        ),
        *_others(measured),
    ]


def _goal(case: Case) -> float | None:
    if case.row_bytes % 16:
        return None
    if case.layout == "hnd":
        return SLICES
    return WHOLE if case.run_bytes >= 1 << 10 else HALF_KIB if case.run_bytes >= 512 else None


def _goals(measured: Measured) -> list[Row]:
    copy = statistics.median(measured.copy)
    rows: list[Row] = []
    for (case, way), samples in measured.cases.items():
        goal, ratio = _goal(case), statistics.median(samples) / copy
        if goal is not None:
            rows.append(Bound(f"{way}, {case.name}: to the copy >= {goal:g}", ratio, "ratio", goal, Relation.AT_LEAST))
    few = statistics.median(measured.ours_few) / statistics.median(measured.baseline)
    name = f"gather in 20 programs: to the per-layer kernel >= {FEW_GOAL:g}"
    rows.append(Bound(name, few, "ratio", FEW_GOAL, Relation.AT_LEAST))
    name = "allocations from the driver in steady state <= 0"
    return [*rows, Bound(name, measured.allocations, "", 0, Relation.AT_MOST)]


def _case(case: Case, way: str, samples: Sequence[float], measured: Measured) -> list[Row]:
    name = f"{way}, {case.name}"
    rows = figure(name, samples, "GB/s")
    if _goal(case) is None:
        rows.append(Row(f"{name}: to the copy", statistics.median(samples) / statistics.median(measured.copy), "ratio"))
    return rows


def _curve_name(way: str, programs: int) -> str:
    return f"{way}, rows of 1 KiB, {programs} programs"


def _others(measured: Measured) -> list[Row]:
    rows = [
        *figure("gather, rows of 4 KiB, 20 programs", measured.ours_few, "GB/s"),
        *figure("per-layer kernel, rows of 4 KiB, 20 programs", measured.baseline, "GB/s"),
        *figure("gather, then checksum, rows of 1 KiB", measured.summed, "GB/s"),
    ]
    for programs, samples in measured.fused.items():
        name = f"gather with checksum in one launch, rows of 1 KiB, {programs} programs"
        plain = measured.unsummed[programs]
        rows += figure(name, samples, "GB/s")
        rows += figure(f"the same without checksum, {programs} programs", plain, "GB/s")
        rows.append(Row(f"{name}: to without", statistics.median(samples) / statistics.median(plain), "ratio"))
    for chunks, samples in measured.host_us.items():
        rows += figure(f"host time of a gather of {chunks} chunks of 4 MiB", samples, "us")
    return rows


def _panels(measured: Measured) -> Panels:
    copy = statistics.median(measured.copy)
    sizes: dict[str, list[tuple[float, float]]] = {"gather": [], "scatter": []}
    for (case, way), samples in measured.cases.items():
        if case.layout == "sglang" and case.pools == 1:
            sizes[way].append((case.row_bytes, statistics.median(samples)))
    programs: dict[str, list[tuple[float, float]]] = {"gather": [], "scatter": []}
    for (way, count), samples in measured.curve.items():
        programs[way].append((count, statistics.median(samples)))
    return {
        "Random rows, GB/s read + written over bytes of a row": {**sizes, "copy": _flat(sizes["gather"], copy)},
        "Rows of 1 KiB, GB/s over programs": {**programs, "copy": _flat(programs["gather"], copy)},
    }


def _flat(line: Sequence[tuple[float, float]], value: float) -> list[tuple[float, float]]:
    return [(line[0][0], value), (line[-1][0], value)]
