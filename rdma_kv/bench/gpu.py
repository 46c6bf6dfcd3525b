"""`rdma-kv bench gpu`: its parts, and what they have in common."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

from rdma_kv.bench.goals import Meter, Missing
from rdma_kv.bench.gpu_kernels import Panels, measure_kernels
from rdma_kv.bench.gpu_paths import PARTS as PATHS
from rdma_kv.bench.gpu_paths import PathSizes, measure_paths
from rdma_kv.bench.gpu_pipeline import measure_pipeline
from rdma_kv.bench.gpu_rounds import whole_part
from rdma_kv.bench.plot import Line
from rdma_kv.bench.rows import Row
from rdma_kv.errors import ConfigError
from rdma_kv.kernels.programs import programs_for

KERNELS, PIPELINE = "kernels", "pipeline"
PARTS: Final = (KERNELS, PIPELINE, *PATHS)
"""`kernels` and `pipeline` in this process; `processes`, `latency` and `host` between two."""


def check_parts(chosen: Sequence[str], known: Sequence[str]) -> None:
    """See that parts are known.

    Raises:
        ConfigError: field `--part`: one is not.
    """
    for part in chosen:
        if part not in known:
            raise ConfigError("--part", f"{part!r}; use {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """What `rdma-kv bench gpu` was asked for.

    Attributes:
        repetitions: rounds that count, after one that compiles, checks the bytes and warms up.
        quick: fewer rounds, and fewer points of the curve.
        commit: named in a row, since a machine with a GPU may have the code without its history.
        parts: of `PARTS`; none is all.
    """

    repetitions: int = 15
    quick: bool = False
    commit: str = ""
    parts: tuple[str, ...] = ()
    known: ClassVar[tuple[str, ...]] = PARTS

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise ConfigError("--repetitions", f"{self.repetitions} is not positive")
        check_parts(self.parts, self.known)

    @property
    def rounds(self) -> int:
        return min(self.repetitions, 5) if self.quick else self.repetitions

    @property
    def chosen(self) -> tuple[str, ...]:
        """The parts to run."""
        return self.parts or self.known


def measure_gpu(options: GpuOptions, meter: Meter) -> tuple[list[Row], Panels]:
    """Run all that was asked for: rows, and the panels of a plot.

    A part that cannot be run at all is a row that is not ok; the others run all the same.
    """
    missing = missing_gpus(1)
    if missing:
        return [Missing("CUDA device", missing, "")], {}
    import torch

    panels: dict[str, Mapping[str, Line]] = {}
    ordinal, rounds = torch.cuda.current_device(), options.rounds

    def kernels() -> list[Row]:
        rows, drawn = measure_kernels(ordinal, rounds, meter, quick=options.quick)
        panels.update(drawn)
        return rows

    rows: list[Row] = []
    for part, measure in ((KERNELS, kernels), (PIPELINE, lambda: measure_pipeline(ordinal, rounds, meter))):
        if part in options.chosen:
            rows += whole_part(part, measure)
            torch.cuda.empty_cache()
    sizes = PathSizes(programs_for(["cuda_ipc"]))
    between = partial(measure_paths, options.chosen, (ordinal, ordinal), sizes, rounds, meter)
    return [*rows, *whole_part("two processes", between), *about(options.commit)], panels


def missing_gpus(count: int) -> str:
    """Why nothing can be measured on so many GPUs, or nothing."""
    for name in ("torch", "triton"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed; pip install 'rdma-kv[gpu]'"
    import torch

    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if torch.cuda.device_count() < count:
        return f"{count} GPUs are needed, and torch finds {torch.cuda.device_count()}"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set; without it kernels run on the device"
    return ""


def about(commit: str) -> list[Row]:
    """On what, with which versions and of which commit figures are."""
    import platform

    import torch
    import triton

    properties = [torch.cuda.get_device_properties(ordinal) for ordinal in range(torch.cuda.device_count())]
    facts = {
        "device": f"{properties[0].name}, {properties[0].multi_processor_count} multiprocessors",
        "devices": f"{len(properties)}",
        "versions": f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}"
        + _transports(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        "commit": commit or "not said",
    }
    return [Row(name, value, "") for name, value in facts.items()]


def _transports() -> str:
    """Versions of what carries the bytes."""
    from importlib.metadata import distributions

    wanted = ("nixl-cu12", "nixl-cu13", "libucx-cu12", "libucx-cu13")
    found = {name: each.version for each in distributions() if (name := each.metadata["Name"]) in wanted}
    return "".join(f", {name} {version}" for name, version in sorted(found.items()))
