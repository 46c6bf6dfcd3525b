"""`rdma-kv bench gpu` between two processes on one GPU: whole transfers, small ones, and those through pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from rdma_kv.bench.goals import Meter, Missing
from rdma_kv.bench.gpu_links import Link, Way
from rdma_kv.bench.gpu_rounds import Step, faster, longer, run_rounds, whole_part
from rdma_kv.bench.gpu_steps import (
    CONTIGUOUS,
    PAGES,
    ROWS,
    Parts,
    backends,
    close_raw,
    raw_steps,
    size_name,
    transfer_step,
    usual_raw,
)
from rdma_kv.bench.gpu_team import Team, TeamSpec, team
from rdma_kv.bench.rows import Row
from rdma_kv.config import StagingConfig
from rdma_kv.errors import RdmaKvError

SUM_GOAL = 1.25
"""Goal: of a transfer's time, times that of its gather, WRITE and scatter alone."""
PAGES_GOAL, ROWS_GOAL = 20.0, 100.0
"""Goals: times the rate of NIXL's own API with descriptors of 64 KiB and of 4 KiB."""
FLOOR_GOAL = 2.5
"""Goal: of a small transfer's time, times that of the loop without protocol."""
PINNED_GOAL = 0.8
"""Goal: of the host lane's rate, through pinned memory."""

_LATENCY_TIMES = 20  # small requests of one measurement: their median is a sample


@dataclass(frozen=True, slots=True)
class PathSizes:
    """What is moved; tests have less.

    Attributes:
        row_bytes: of the models, each with all of the rest.
        whole_bytes, small_bytes, host_bytes: of one transfer of the parts `processes`, `latency` and `host`.
        slot_bytes: of staging on GPUs: large, since a chunk costs each side some 0.7 ms of CPU.
        pinned_slot_bytes: of staging through pinned memory: smaller, so that its copies overlap a WRITE that is far slower.
            Host agents have the default.
        programs: of the kernels that are measured alone, as agents choose it.
    """

    programs: int
    row_bytes: tuple[int, ...] = (4096, 512)
    whole_bytes: int = 1 << 30
    small_bytes: int = 1 << 20
    host_bytes: int = 256 << 20
    slot_bytes: int = 128 << 20
    pinned_slot_bytes: int = 16 << 20
    layers: int = 64


K = TypeVar("K")
Part = Callable[[Team, PathSizes, int, Meter], list[Row]]


def measure_paths(
    parts: Sequence[str], ordinals: tuple[int | None, int | None], sizes: PathSizes, rounds: int, meter: Meter
) -> list[Row]:
    """Run those of `PARTS` that are named, between a prefill and a decode process.

    Args:
        ordinals: CUDA ordinals of the two; None is host memory alone.
    """
    chosen = [part for part in PARTS if part in parts]
    if not chosen:
        return []
    most_bytes = max(sizes.whole_bytes, sizes.host_bytes) if "processes" in chosen else sizes.host_bytes
    spec = TeamSpec((ordinals[0],), (ordinals[1],), most_bytes, sizes.host_bytes, sizes.layers)
    meter("starting two processes", 0, 1)
    rows: list[Row] = []
    try:
        with team(spec) as pair:
            for part in chosen:
                rows += whole_part(part, partial(PARTS[part], pair, sizes, rounds, meter))
    except RdmaKvError as exc:
        rows.append(Missing("two processes", f"failed: {exc}", ""))
    return rows


def processes(pair: Team, sizes: PathSizes, rounds: int, meter: Meter) -> list[Row]:
    """Whole transfers beside NIXL's own API, and beside the sum of their parts."""
    raw = raw_steps(pair, usual_raw(sizes.whole_bytes))
    parts = Parts(pair, sizes.programs)
    writes = {name: parts.write(name, sizes.slot_bytes, sizes.whole_bytes) for name in backends()}
    kernels = {
        row_bytes: parts.kernels(row_bytes, sizes.slot_bytes, sizes.whole_bytes) for row_bytes in sizes.row_bytes
    }
    links = {
        (row_bytes, name): Link(name, _device_way(pair), row_bytes, slot_bytes=sizes.slot_bytes)
        for row_bytes in sizes.row_bytes
        for name in backends()
    }
    moves = {
        (row_bytes, name): transfer_step(pair, _what(sizes.whole_bytes, row_bytes, name), link, sizes.whole_bytes)
        for (row_bytes, name), link in links.items()
    }
    both = [step for steps in kernels.values() for step in steps]
    steps = [*both, *writes.values(), *moves.values(), *raw.values()]
    run_rounds("two processes", steps, rounds, meter)
    close_raw(pair)
    rows: list[Row] = []
    for (row_bytes, name), move in moves.items():
        rows += [
            longer(
                f"{move.name}: to gather, WRITE and scatter alone", move, (*kernels[row_bytes], writes[name]), SUM_GOAL
            ),
            faster(f"{move.name}: to {PAGES}", move, raw[PAGES], PAGES_GOAL),
            faster(f"{move.name}: to {ROWS}", move, raw[ROWS], ROWS_GOAL),
            faster(f"{move.name}: to {CONTIGUOUS}", move, raw[CONTIGUOUS], None),
        ]
    return [
        *rows,
        *_figures(steps),
        *_lanes(pair, links, moves),
        Row("programs of the kernels alone", sizes.programs, ""),
    ]


def latency(pair: Team, sizes: PathSizes, rounds: int, meter: Meter) -> list[Row]:
    """Small transfers on links that are warm, beside the loop without protocol."""
    parts = Parts(pair, sizes.programs)
    rows: list[Row] = []
    steps: list[Step] = []
    for row_bytes in sizes.row_bytes:
        for name in backends():
            link = Link(name, _device_way(pair), row_bytes, slot_bytes=sizes.slot_bytes)
            what = _what(sizes.small_bytes, row_bytes, name)
            move = transfer_step(pair, what, link, sizes.small_bytes, times=_LATENCY_TIMES, awaited=True)
            steps += [move, parts.floor(name, row_bytes, sizes.small_bytes, _LATENCY_TIMES)]
    run_rounds("small transfers", steps, rounds, meter)
    for move, floor in zip(steps[::2], steps[1::2], strict=True):
        rows.append(longer(f"{move.name}: to its floor", move, [floor], FLOOR_GOAL))
    return [*rows, *_figures(steps)]


def host(pair: Team, sizes: PathSizes, rounds: int, meter: Meter) -> list[Row]:
    """GPU to GPU through pinned host memory, beside the same transfer between host memories."""
    row_bytes, default = sizes.row_bytes[0], StagingConfig()
    links: dict[tuple[str, Way], Link] = {}
    for name in backends():
        links[name, Way.PINNED] = Link(name, Way.PINNED, row_bytes, slot_bytes=sizes.pinned_slot_bytes)
        links[name, Way.HOST] = Link(name, Way.HOST, row_bytes, default.slots, default.slot_bytes)
    moves = {
        (name, way): transfer_step(
            pair, f"{_what(sizes.host_bytes, row_bytes, name)}, {way.value}", link, sizes.host_bytes
        )
        for (name, way), link in links.items()
    }
    run_rounds("through host memory", list(moves.values()), rounds, meter)
    rows = [
        faster(f"{moves[name, Way.PINNED].name} to host", moves[name, Way.PINNED], moves[name, Way.HOST], PINNED_GOAL)
        for name in backends()
    ]
    return [*rows, *_figures(list(moves.values())), *_lanes(pair, links, moves)]


PARTS: Mapping[str, Part] = {"processes": processes, "latency": latency, "host": host}


def _device_way(pair: Team) -> Way:
    return Way.HOST if pair.spec.prefill[0] is None else Way.DIRECT


def _what(num_bytes: int, row_bytes: int, backend: str) -> str:
    return f"{size_name(num_bytes)}, rows of {row_bytes:,} B: transfer, {backend}"


def _figures(steps: Sequence[Step]) -> list[Row]:
    return [row for step in steps for row in step.rows]


def _lanes(pair: Team, links: Mapping[K, Link], moves: Mapping[K, Step]) -> list[Row]:
    """What carried each transfer that was measured."""
    return [Row(f"{moves[key].name}: lane", pair.lanes(link), "") for key, link in links.items() if moves[key].took_s]
