"""`rdma-kv bench gpu`: rows and goals of what `rdma_kv.kernels.bench.gpu` measures."""

from __future__ import annotations

import importlib.util
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rdma_kv.bench.goals import Bound, Meter, Missing, Relation, figure
from rdma_kv.bench.plot import Line
from rdma_kv.bench.rows import Row
from rdma_kv.errors import ConfigError, RdmaKvError
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


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """What `rdma-kv bench gpu` was asked for.

    Attributes:
        repetitions: rounds that count, after one that compiles and warms up.
        quick: fewer rounds, and fewer points of the curve.
        commit: named in a row, since a machine with a GPU may have the code without its history.
    """

    repetitions: int = 15
    quick: bool = False
    commit: str = ""

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise ConfigError("--repetitions", f"{self.repetitions} is not positive")

    @property
    def rounds(self) -> int:
        return min(self.repetitions, 5) if self.quick else self.repetitions


def measure_gpu(options: GpuOptions, meter: Meter) -> tuple[list[Row], Panels]:
    """Run it all: rows, and the panels of a plot.

    Raises:
        RdmaKvError: a row that was gathered or scattered is not what and where it should be.
    """
    missing = _missing()
    if missing:
        return [Missing("CUDA device", missing, "")], {}
    import torch

    from rdma_kv.kernels.bench import gpu

    bench = gpu.Bench(torch.device("cuda", torch.cuda.current_device()), options.rounds, meter)
    for case in gpu.CASES:
        wrong = bench.check(case)
        if wrong:
            raise RdmaKvError(f"{case.name}: {wrong} rows are wrong")
    measured = bench.run(gpu.CASES, gpu.curve_programs(bench.measured.programs, quick=options.quick))
    curve = gpu.worst_payload(measured)
    rows = [
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
        *_versions(measured, options.commit),
    ]
    return rows, _panels(measured)


def _missing() -> str:
    """Why nothing can be measured, or nothing."""
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed; pip install 'rdma-kv[gpu]'"
    import torch

    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set; without it kernels run on the device"
    return ""


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
    for chunks, samples in measured.host_us.items():
        rows += figure(f"host time of a gather of {chunks} chunks of 4 MiB", samples, "us")
    return rows


def _versions(measured: Measured, commit: str) -> list[Row]:
    import platform

    import torch
    import triton

    facts = {
        "device": f"{measured.device}, {measured.programs} multiprocessors",
        "versions": f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}",
        "commit": commit or "not said",
    }
    return [Row(name, value, "") for name, value in facts.items()]


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
