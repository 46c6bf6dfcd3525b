"""Our transports beside what carries bytes otherwise, in one run.

All contestants are made first, each pair with an environment of its own, as UCX reads its lanes from there. Then rounds:
every size of every contestant once, and again. Only the pair whose turn it is runs; all others are stopped.
"""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from rdma_kv.bench.cases import DEFAULT_SIZES, Case, parse_sizes
from rdma_kv.bench.contestants import (
    ApiInitiator,
    ApiTarget,
    Copier,
    OurInitiator,
    OurTarget,
    SocketInitiator,
    SocketTarget,
)
from rdma_kv.bench.goals import Bound, Meter, Missing, Relation, figure
from rdma_kv.bench.perftest import find_perftest, put_flags, put_seconds
from rdma_kv.bench.rows import Row
from rdma_kv.bench.worker import Side, Worker, ended, turn
from rdma_kv.errors import ConfigError, RdmaKvError
from rdma_kv.memory import HostMemory

OURS = ("ucx", "nixl")
"""Our transports; the goals hold for each of them."""

LANES: Mapping[str, Mapping[str, str | None]] = {"tcp": {"UCX_TLS": "tcp"}, "cma": {"UCX_TLS": None}}
"""What each lane needs in the environment: `cma` is what UCX takes on one host if nothing is said."""

SOCKET, API, PERFTEST, PERFTEST_ERRORS, COPY = "raw socket", "NIXL API", "ucx_perftest", "ucx_perftest -e", "memcpy"
SOCKET_GOAL = 0.9
PERFTEST_GOAL = 0.95
API_GOAL = 1.0  # to be above
PACKED_GOAL = 5.0
GOAL_BYTES = frozenset({16 << 20, 256 << 20})
PACKED_CASE = Case(65536, 4096)
_IN_US_BELOW_BYTES = 1 << 20
_WARMUP = 1  # operations of each turn that do not count, as `ucx_perftest` has them

INCLUDED = {
    "ucx, nixl": "one awaited Endpoint.write of one pair with a notification, seen from the initiator's coroutine",
    "ucx, nixl, packed": "gather of the scattered pieces into registered staging (reference kernel, a thread), 4 MiB at "
    "a time, each written while the next is gathered; the bytes end packed, without a scatter",
    "ucx, nixl, packed and unpacked": "the same, the target's scatter of each 4 MiB, and its notification back",
    SOCKET: "blocking sendall, or sendmsg of up to 1,024 pieces as they lie; recv_into at the target, packed; an "
    "acknowledgement of one byte; TCP_NODELAY",
    API: "get_xfer_descs of NumPy arrays, initialize_xfer, transfer, check_xfer_state until DONE; default agent with its "
    "progress thread; scattered: one descriptor per piece, from scattered to scattered",
    COPY: "np.copyto within one process, all bytes back to back",
}


@dataclass(frozen=True)
class TransportOptions:
    """What `rdma-kv bench transport` was asked for.

    Attributes:
        repetitions: rounds that count; one more, before them, checks the bytes.
        sizes: see `parse_sizes`.
    """

    repetitions: int = 7
    sizes: str = DEFAULT_SIZES

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise ConfigError("--repetitions", f"{self.repetitions} is not positive")
        parse_sizes(self.sizes)


class Contestant(Protocol):
    """Whoever moves bytes."""

    def takes(self, case: Case) -> bool: ...

    def check(self, case: Case) -> None:
        """Move it once and see that it has arrived."""
        ...

    def measure(self, case: Case) -> float:
        """Seconds of one operation."""
        ...


@dataclass
class Entry:
    """A contestant on a lane, and what was measured of it.

    Attributes:
        lane: empty where there is none.
        missing: why it is not there, or is no longer.
    """

    name: str
    lane: str
    contestant: Contestant | None
    missing: str = ""
    took_s: dict[Case, list[float]] = field(default_factory=dict)

    @property
    def title(self) -> str:
        return f"{self.name}, {self.lane}" if self.lane else self.name

    def median_s(self, case: Case) -> float | None:
        """None where it was not measured."""
        samples = self.took_s.get(case)
        return statistics.median(samples) if samples and not self.missing else None


# --- contestants -------------------------------------------------------------------------------------------------------


class _Pair:
    """An initiator and a target process.

    Raises:
        RdmaKvError: they do not come together, or their lane is another one than `lane`.
    """

    def __init__(self, initiator: Worker, target: Worker, lane: str, *, unpacks: bool) -> None:
        self._initiator, self._target = initiator, target
        self._unpacks = unpacks
        with turn(initiator, target):
            ours, theirs = initiator.ask("open"), target.ask("open")
            initiator.begin("connect", theirs)
            target.begin("connect", ours)
            found, _ = initiator.result(), target.result()
            if found and found != lane:
                raise RdmaKvError(f"its lane is {found}")

    def takes(self, case: Case) -> bool:
        return self._unpacks or not case.unpack

    def check(self, case: Case) -> None:
        with turn(self._initiator, self._target):
            self._target.ask("wipe")
            self._run(case, 1)
            if not self._target.ask("arrived", case.wire):
                raise RdmaKvError(f"{case.name}: other bytes arrived than were sent")

    def measure(self, case: Case) -> float:
        with turn(self._initiator, self._target):
            return statistics.median(self._run(case, _WARMUP + case.repetitions)[_WARMUP:])

    def _run(self, case: Case, count: int) -> list[float]:
        self._target.begin("run", case.wire, count)
        self._initiator.begin("run", case.wire, count)
        took_s: list[float] = self._initiator.result()
        self._target.result()
        return took_s


class _Copy:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        worker.pause()

    def takes(self, case: Case) -> bool:
        return not case.unpack

    def check(self, case: Case) -> None:
        self.measure(case)

    def measure(self, case: Case) -> float:
        with turn(self._worker):
            took_s: list[float] = self._worker.ask("run", case.wire, _WARMUP + case.repetitions)
        return statistics.median(took_s[_WARMUP:])


class _Perftest:
    """`ucx_perftest`, without error handling or with it."""

    def __init__(self, environ: Mapping[str, str | None], *, errors: bool) -> None:
        self._perftest = find_perftest()
        self._environ, self._errors = environ, errors

    def takes(self, case: Case) -> bool:
        return not case.scattered and (not self._errors or case.total_bytes in GOAL_BYTES)

    def check(self, case: Case) -> None:
        """It checks nothing itself."""

    def measure(self, case: Case) -> float:
        return put_seconds(self._perftest, case.total_bytes, self._environ, errors=self._errors)


class _Field:
    """Makes all contestants. Every process lands in `workers`, whatever becomes of its pair."""

    def __init__(self, source: HostMemory) -> None:
        self.workers: list[Worker] = []
        self._source = source

    def entries(self) -> Iterator[Entry]:
        for lane, environ in LANES.items():
            for name in OURS:
                make = (partial(OurInitiator, name), partial(OurTarget, name))
                yield self._entry(name, lane, partial(self._pair, name, lane, *make, unpacks=True))
            if lane == "tcp":
                yield self._entry(SOCKET, lane, partial(self._pair, SOCKET, lane, SocketInitiator, SocketTarget))
            yield self._entry(API, lane, partial(self._pair, API, lane, ApiInitiator, ApiTarget))
            yield self._entry(PERFTEST, lane, partial(_Perftest, environ, errors=False))
            yield self._entry(PERFTEST_ERRORS, lane, partial(_Perftest, environ, errors=True))
        yield self._entry(COPY, "", lambda: _Copy(self._worker(COPY, Copier, {})))

    def _entry(self, name: str, lane: str, make: Callable[[], Contestant]) -> Entry:
        try:
            return Entry(name, lane, make())
        except RdmaKvError as exc:
            return Entry(name, lane, None, f"missing: {exc}")

    def _pair(
        self,
        name: str,
        lane: str,
        initiator: Callable[[HostMemory], Side],
        target: Callable[[HostMemory], Side],
        *,
        unpacks: bool = False,
    ) -> _Pair:
        environ = LANES[lane]
        left = self._worker(f"{name}, {lane}, initiator", initiator, environ)
        right = self._worker(f"{name}, {lane}, target", target, environ)
        return _Pair(left, right, lane, unpacks=unpacks)

    def _worker(self, name: str, make: Callable[[HostMemory], Side], environ: Mapping[str, str | None]) -> Worker:
        worker = Worker(name, partial(make, self._source), environ)
        self.workers.append(worker)
        return worker


# --- measuring ---------------------------------------------------------------------------------------------------------


def measure_transport(options: TransportOptions, meter: Meter) -> tuple[list[Row], list[Entry]]:
    """Run it all. Call it from a process without threads: it forks.

    A contestant that fails is missing from then on; the others go on.

    Returns:
        rows, ratios first; and all that they were made from.
    """
    cases = parse_sizes(options.sizes)
    source = HostMemory(max(case.total_bytes for case in cases), shared=True)
    source.view[:] = np.frombuffer(np.random.default_rng(0).bytes(source.length_bytes), dtype=np.uint8)
    field_ = _Field(source)
    with ended(field_.workers):
        meter("starting", 0, 1)
        entries = list(field_.entries())
        _rounds(entries, cases, options.repetitions, meter)
    return [*_ratios(entries, cases), *_missing(entries), *_figures(entries, cases), *_notes()], entries


def _rounds(entries: Sequence[Entry], cases: Sequence[Case], repetitions: int, meter: Meter) -> None:
    total, done = (repetitions + 1) * len(cases), 0
    for number in range(repetitions + 1):
        for case in cases:
            meter(f"round {number} of {repetitions}, {case.name}", done, total)
            for entry in entries:
                _step(entry, case, first=number == 0)
            done += 1
    meter("done", total, total)


def _step(entry: Entry, case: Case, *, first: bool) -> None:
    contestant = entry.contestant
    if contestant is None or not contestant.takes(case):
        return
    try:
        if first:
            contestant.check(case)
        else:
            entry.took_s.setdefault(case, []).append(contestant.measure(case))
    except RdmaKvError as exc:
        entry.missing, entry.contestant = f"failed: {exc}", None


# --- rows --------------------------------------------------------------------------------------------------------------


def _ratios(entries: Sequence[Entry], cases: Sequence[Case]) -> list[Row]:
    """Those with a goal first."""
    rows = [
        _ratio(ours, peer, case)
        for case in cases
        for lane in LANES
        for ours in entries
        if ours.lane == lane and ours.name in OURS
        for peer in entries
        if _compared(ours, peer, case)
    ]
    return sorted(rows, key=lambda row: row.goal is None)


def _compared(ours: Entry, peer: Entry, case: Case) -> bool:
    if peer.name == COPY:
        return not case.unpack
    if peer.lane != ours.lane or peer.name in OURS:
        return False
    if peer.name == PERFTEST_ERRORS:
        return case.total_bytes in GOAL_BYTES and not case.scattered
    return not (peer.name == PERFTEST and case.scattered)


def _ratio(ours: Entry, peer: Entry, case: Case) -> Row:
    """How many times as fast as `peer` ours is."""
    goal, relation = _goal(ours, peer, case)
    sign = f" {relation.value} {goal:g}" if goal is not None else ""
    name = f"{_what(case)}, {ours.lane}: {ours.name} to {peer.name}{sign}"
    mine, other = ours.median_s(case), peer.median_s(Case(case.pieces, case.piece_bytes))
    if mine is None or other is None:
        absent = next(entry for entry, took in ((ours, mine), (peer, other)) if took is None)
        return Bound(name, f"{absent.title} {absent.missing}", "ratio", goal, relation)
    return Bound(name, other / mine, "ratio", goal, relation)


def _goal(ours: Entry, peer: Entry, case: Case) -> tuple[float | None, Relation]:
    if case == PACKED_CASE and peer.name == API:
        return PACKED_GOAL, Relation.AT_LEAST
    if not case.scattered and case.total_bytes in GOAL_BYTES:
        if peer.name == SOCKET:
            return SOCKET_GOAL, Relation.AT_LEAST
        if peer.name == PERFTEST and ours.lane == "cma":
            return PERFTEST_GOAL, Relation.AT_LEAST
        if peer.name == API:
            return API_GOAL, Relation.ABOVE
    return None, Relation.AT_LEAST


def _missing(entries: Sequence[Entry]) -> list[Row]:
    return [Missing(entry.title, entry.missing, "") for entry in entries if entry.missing]


def _figures(entries: Sequence[Entry], cases: Sequence[Case]) -> list[Row]:
    rows: list[Row] = []
    for case in cases:
        for entry in entries:
            if entry.median_s(case) is not None:
                how = _what(case) if entry.name in OURS else case.name
                rows += _figure(f"{how}: {entry.title}", case, entry.took_s[case])
    return rows


def _figure(name: str, case: Case, took_s: Sequence[float]) -> list[Row]:
    if case.total_bytes < _IN_US_BELOW_BYTES:
        return figure(name, [1e6 * took for took in took_s], "us")
    return figure(name, [case.total_bytes / took / 1e9 for took in took_s], "GB/s")


def _what(case: Case) -> str:
    if not case.scattered:
        return case.name
    return f"{case.name} {'packed and unpacked' if case.unpack else 'packed'}"


def _notes() -> list[Row]:
    """What each figure is of, and of which machine."""
    notes = dict(INCLUDED)
    try:
        perftest = find_perftest()
        flags = " ".join(put_flags(16 << 20, errors=False))
        notes[PERFTEST] = (
            f"libucx {perftest.version}, for 16 MiB `{flags}`: puts back to back, one flush at the end, no error handling"
        )
        notes[PERFTEST_ERRORS] = "the same with -e (error handling) and UCX_RNDV_THRESH=inf, without which it is slower"
    except RdmaKvError as exc:
        notes[PERFTEST] = str(exc)
    notes["machine"] = f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}"
    return [Row(f"about {name}", text, "") for name, text in notes.items()]


def plot_lines(entries: Sequence[Entry]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """What `write_plot` draws: contiguous sizes, a panel per lane, memcpy in both."""
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for lane in LANES:
        lines = panels[lane] = {}
        for entry in entries:
            if entry.lane not in {lane, ""} or entry.name == PERFTEST_ERRORS:
                continue
            took = {case: entry.median_s(case) for case in entry.took_s if not case.scattered}
            points = [(float(case.total_bytes), case.total_bytes / s / 1e9) for case, s in took.items() if s]
            if points:
                lines[entry.name] = sorted(points)
    return panels
