"""The soak's parent: starts the agents, throws requests and trouble at them, and judges what came of it.

Everything random comes from one seed: which replicas, how long, what is cancelled or aborted, who is stopped, killed or
restarted and when. What the machine makes of it in time is not the same twice.
"""

from __future__ import annotations

import contextlib
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from rdma_kv.bench.worker import Worker
from rdma_kv.errors import ConfigError, RdmaKvError
from rdma_kv.registry.static import AgentRecord, EngineRecord, dump_registry
from rdma_kv.soak.member import CLUSTER, PAGE_TOKENS, TIMEOUTS, TOPOLOGIES, Member, MemberSpec
from rdma_kv.topology import TieBreak, Topology
from rdma_kv.transport.named import names
from rdma_kv.types import AgentId, Role

Progress = Callable[[str], None]

_AT_ONCE: Final = 8  # requests under way
_TICK_S: Final = 0.02
_MOST_TOKENS: Final = 12 * PAGE_TOKENS
_HUNG_S: Final = 10.0  # beyond every deadline: of a busy machine
_SETTLE_S: Final = TIMEOUTS.lease + TIMEOUTS.quiesce + TIMEOUTS.unmatched
_REPORT_EVERY_S: Final = 10.0


@dataclass(frozen=True)
class SoakOptions:
    """What `rdma-kv soak` was asked for."""

    minutes: float = 1.0
    seed: int = 0
    transport: str = "auto"

    def check(self) -> None:
        """Raises ConfigError: a value that cannot work."""
        names(self.transport, option="--transport")
        if not 0 < self.minutes <= 7 * 24 * 60:
            raise ConfigError("--minutes", f"{self.minutes}; more than 0 and at most a week")


@dataclass
class SoakVerdict:
    """What came of it. `leaked` holds what was still held when everything had had its time."""

    seed: int
    transfers: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)  # of calls
    trouble: Counter[str] = field(default_factory=Counter)  # what was done to them
    verified_bytes: int = 0
    poisoned_bytes: int = 0
    hung: int = 0
    leaked: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("slots", "pages", "tasks", "fds", "bytes"), 0)
    )
    latencies_s: list[float] = field(default_factory=list)
    transports: set[str] = field(default_factory=set)
    lanes: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        bad = self.poisoned_bytes or self.hung or any(self.leaked.values()) or self.problems
        return not bad and self.outcomes["success"] > 0

    def percentile_ms(self, share: float) -> float:
        """Of the time of successful receives."""
        if not self.latencies_s:
            return 0.0
        ordered = sorted(self.latencies_s)
        return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {
            "ok": self.ok,
            "seed": self.seed,
            "transfers": self.transfers,
            "outcomes": dict(sorted(self.outcomes.items())),
            "trouble": dict(sorted(self.trouble.items())),
            "verified_bytes": self.verified_bytes,
            "poisoned_bytes": self.poisoned_bytes,
            "hung": self.hung,
            "leaked": self.leaked,
            "p50_ms": round(self.percentile_ms(0.5), 3),
            "p99_ms": round(self.percentile_ms(0.99), 3),
            "transport": "+".join(sorted(self.transports)) or "none",
            "lane": "+".join(sorted(self.lanes)) or "none",
            "seconds": round(self.seconds, 3),
            "problems": self.problems[:20],
        }


@dataclass
class _Call:
    """One side of a request, in one process."""

    station: Station
    number: int
    due: float  # monotonic seconds by which it must have ended, while its process runs
    life: int


@dataclass
class _Request:
    """One key, with all its calls that have not ended."""

    number: int
    open: set[str]
    outcomes: dict[str, dict[str, Any]] = field(default_factory=dict)


class Station:
    """One agent as the parent sees it: its process, and whether it runs.

    Args:
        make: makes the member, in the process.
        environ: what differs there; see `Worker`.
    """

    def __init__(
        self,
        spec: MemberSpec,
        make: Callable[[MemberSpec], Member] = Member,
        environ: Mapping[str, str | None] | None = None,
    ) -> None:
        self.spec = spec
        self._make = make
        self._environ = environ or {}
        self.worker = self._fork()
        self.port = 0
        self.life = 0
        self.paused_at: float | None = None
        self.resume_at = 0.0
        self.fds = 0  # open when an agent of this process had been used and closed

    def _fork(self) -> Worker:
        return Worker(self.spec.name, partial(self._make, self.spec), self._environ)

    @property
    def name(self) -> str:
        return self.spec.name

    def open(self) -> None:
        self.port = self.worker.ask("open")

    def restart(self, *, force: bool) -> None:
        """End the process, by SIGKILL or by word, and start another of the same name."""
        self.worker.end(force=force)
        self.worker = self._fork()
        self.life += 1
        self.paused_at = None
        self.open()

    def pause(self, seconds: float, now: float) -> None:
        self.worker.pause()
        self.paused_at, self.resume_at = now, now + seconds

    def resume(self, now: float) -> float:
        """Go on; how long it was stopped, in seconds."""
        self.worker.resume()
        assert self.paused_at is not None
        stopped_s, self.paused_at = now - self.paused_at, None
        return stopped_s


def write_registry(path: Path, topologies: Mapping[Role, Topology], stations: Iterable[Station]) -> None:
    """Say where everybody listens now; the file is replaced as a whole."""
    records = []
    for role, topology in topologies.items():
        agents = tuple(
            AgentRecord(AgentId(CLUSTER, role.value, role, s.spec.rank), "127.0.0.1", s.port, (s.spec.rank,))
            for s in stations
            if s.spec.role is role
        )
        records.append(EngineRecord(role.value, role, topology, TieBreak.REPLICA, agents))
    beside = path.with_suffix(".new")
    beside.write_bytes(dump_registry(CLUSTER, records))
    beside.replace(path)


class Soak:
    """One run. Made and used in a process without threads: it forks."""

    def __init__(self, options: SoakOptions, registry: Path, progress: Progress) -> None:
        self._options = options
        self._registry = registry
        self._progress = progress
        self._random = random.Random(options.seed)
        self._numbers = 0
        self._calls: dict[tuple[str, int], _Call] = {}
        self._requests: dict[int, _Request] = {}
        self._cancels: list[tuple[float, str, int]] = []
        self.verdict = SoakVerdict(options.seed)
        self.stations = {
            spec.name: Station(spec)
            for role in Role
            for spec in (MemberSpec(role, rank, registry, options.transport) for rank in range(4))
        }

    def run(self) -> None:
        """Warm up, make trouble, let all settle, look what is left."""
        begin = time.monotonic()
        self._open_all()
        self._every_pair("warm-up")
        for station in self.stations.values():
            station.fds = station.worker.ask("shut")
        self._open_all()
        self._make_trouble(time.monotonic() + 60 * self._options.minutes)
        self._progress("no more trouble; waiting for all to end")
        self._wait_for_calls()
        self._every_pair("afterwards")
        self._settle()
        self._close_all()
        self.verdict.seconds = time.monotonic() - begin

    # --- agents --------------------------------------------------------------------------------------------------------

    def _open_all(self) -> None:
        for station in self.stations.values():
            station.open()
        self._write_registry()

    def _write_registry(self) -> None:
        write_registry(self._registry, TOPOLOGIES, self.stations.values())

    def _of(self, role: Role, replica: int) -> list[Station]:
        return [s for s in self.stations.values() if s.spec.role is role and s.spec.replica == replica]

    # --- requests ------------------------------------------------------------------------------------------------------

    def _begin(self, prefill: int, decode: int, tokens: int, timeout_s: float, *, fail: bool = False) -> int:
        self._numbers += 1
        number = self._numbers
        sides = [(Role.DECODE, decode, prefill), (Role.PREFILL, prefill, decode)]
        stations = [(s, other) for role, own, other in sides for s in self._of(role, own)]
        request = self._requests[number] = _Request(number, {s.name for s, _ in stations})
        self.verdict.transfers += 1
        due = time.monotonic() + timeout_s + TIMEOUTS.lease + TIMEOUTS.quiesce + _HUNG_S
        for station, other in stations:
            if station.paused_at is not None:
                request.open.discard(station.name)  # an engine that is stopped calls nobody
                continue
            self._calls[station.name, number] = _Call(station, number, due, station.life)
            self._ask(station, "begin", number, other, tokens, timeout_s, fail and station.spec.role is Role.PREFILL)
        return number

    def _random_request(self) -> None:
        rnd = self._random
        event = rnd.choices(["", "cancel", "abort", "timeout"], [75, 12, 6, 7])[0]
        timeout_s = rnd.uniform(0.001, 0.2) if event == "timeout" else rnd.uniform(4.0, 8.0)
        prefill, decode = rnd.randrange(2), rnd.randrange(4)
        number = self._begin(prefill, decode, rnd.randint(1, _MOST_TOKENS), timeout_s, fail=event == "abort")
        if event:
            self.verdict.trouble[event] += 1
        if event == "cancel":
            victim = rnd.choice(sorted(self._requests[number].open) or [""])
            self._cancels.append((time.monotonic() + rnd.choice([0.0, 0.0, 0.02, 0.1]), victim, number))
            self._cancel_due(time.monotonic())

    def _ask(self, station: Station, method: str, *arguments: object) -> Any:  # noqa: ANN401 - the member's answer
        try:
            return station.worker.ask(method, *arguments)
        except RdmaKvError as exc:
            self.verdict.problems.append(str(exc))
            self._restart(station, force=True)
            return None

    def _collect(self) -> None:
        """Take what has ended, and notice what should have."""
        now = time.monotonic()
        for station in self.stations.values():
            if station.paused_at is not None:
                continue
            for end in self._ask(station, "take") or ():
                self._ended(station.name, end)
        for (name, number), call in list(self._calls.items()):
            if call.station.paused_at is None and now > call.due:
                self.verdict.hung += 1
                self.verdict.problems.append(f"{name}: request {number} hangs")
                self._forget(name, number)

    def _ended(self, name: str, end: Mapping[str, Any]) -> None:
        verdict, number = self.verdict, end["number"]
        verdict.outcomes[end["outcome"]] += 1
        verdict.verified_bytes += end["bytes"] if not end["wrong"] else 0
        verdict.poisoned_bytes += end["wrong"]
        if end["wrong"]:
            verdict.problems.append(f"{name}: request {number}: {end['wrong']} wrong bytes")
        if end["outcome"] == "bug":
            verdict.problems.append(f"{name}: request {number}: {end['text']}")
        if end["bytes"]:
            verdict.latencies_s.append(end["seconds"])
        self._forget(name, number)

    def _forget(self, name: str, number: int) -> None:
        self._calls.pop((name, number), None)
        request = self._requests.get(number)
        if request is not None:
            request.open.discard(name)
            if not request.open:
                del self._requests[number]

    def _wait_for_calls(self) -> None:
        """Everybody goes on, and every call ends, or is counted as hung."""
        for station in self.stations.values():
            self._resume(station)
        while self._calls:
            self._collect()
            time.sleep(_TICK_S)

    def _every_pair(self, when: str) -> None:
        """One request between each two replicas, one after the other: all must succeed."""
        for prefill in range(TOPOLOGIES[Role.PREFILL].dp):
            for decode in range(TOPOLOGIES[Role.DECODE].dp):
                before = self.verdict.outcomes["success"]
                self._begin(prefill, decode, _MOST_TOKENS, TIMEOUTS.transfer)
                calls = len(self._calls)
                self._wait_for_calls()
                if (missing := calls - (self.verdict.outcomes["success"] - before)) != 0:
                    self.verdict.problems.append(
                        f"{when}: {missing} calls of prefill/{prefill} to decode/{decode} failed"
                    )

    # --- trouble -------------------------------------------------------------------------------------------------------

    def _make_trouble(self, until: float) -> None:
        rnd = self._random
        next_trouble = time.monotonic() + rnd.uniform(0.5, 2.0)
        next_report = time.monotonic() + _REPORT_EVERY_S
        while (now := time.monotonic()) < until:
            if len(self._requests) < _AT_ONCE:
                self._random_request()
            for station in self.stations.values():
                if station.paused_at is not None and now >= station.resume_at:
                    self._resume(station)
            self._cancel_due(now)
            if now >= next_trouble:
                self._trouble(rnd.choice(list(self.stations.values())), now)
                next_trouble = now + rnd.uniform(0.5, 4.0)
            if now >= next_report:
                next_report = now + _REPORT_EVERY_S
                self._progress(f"{until - now:.0f} s left: {self._summary()}")
            self._collect()
            time.sleep(_TICK_S)

    def _trouble(self, station: Station, now: float) -> None:
        rnd = self._random
        kind = rnd.choices(["stall", "stop", "kill", "exit"], [4, 2, 3, 2])[0]
        if station.paused_at is not None:
            return
        self.verdict.trouble[kind] += 1
        if kind == "stall":
            station.pause(rnd.uniform(0.05, 0.5 * TIMEOUTS.lease), now)
        elif kind == "stop":
            station.pause(rnd.uniform(1.5, 3.0) * TIMEOUTS.lease, now)
        else:
            self._restart(station, force=kind == "kill")

    def _restart(self, station: Station, *, force: bool) -> None:
        """A new process under the old name. The calls of the old one end with it."""
        station.restart(force=force)
        self._write_registry()
        for name, number in [place for place in self._calls if place[0] == station.name]:
            self.verdict.outcomes["ended with its process"] += 1
            self._forget(name, number)

    def _resume(self, station: Station) -> None:
        if station.paused_at is None:
            return
        stopped_s = station.resume(time.monotonic())
        for call in self._calls.values():
            call.due += stopped_s  # whoever waits for it may have waited longer

    def _cancel_due(self, now: float) -> None:
        left = []
        for at, name, number in self._cancels:
            if now < at:
                left.append((at, name, number))
            elif (name, number) in self._calls and self.stations[name].paused_at is None:
                self._ask(self.stations[name], "cancel", number)
        self._cancels = left

    def _summary(self) -> str:
        verdict = self.verdict
        return (
            f"{verdict.transfers} requests, {verdict.outcomes['success']} calls succeeded, "
            f"{verdict.trouble.total()} times trouble, {verdict.poisoned_bytes} bytes poisoned, {verdict.hung} hung"
        )

    # --- what is left --------------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Wait for what ends by itself; what is held then has leaked."""
        until = time.monotonic() + _SETTLE_S
        while True:
            reports = {s.name: self._ask(s, "report") or {} for s in self.stations.values()}
            left = [r for r in reports.values() if any(r.get(what) for what in ("slots", "tasks", "pages", "calls"))]
            if not left or time.monotonic() > until:
                break
            time.sleep(0.1)
        for name, report in reports.items():
            self.verdict.poisoned_bytes += report.get("poisoned", 0)
            self.verdict.lanes.update(report.get("lanes", ()))
            self.verdict.transports.update(report.get("transport", ()))
            for what in ("slots", "pages", "tasks", "bytes"):
                self.verdict.leaked[what] += report.get(what, 0)
            if report.get("slots") or report.get("tasks"):
                self.verdict.problems.append(
                    f"{name} still holds {report['held']}, {report['tasks']} tasks and transfers"
                )

    def _close_all(self) -> None:
        expected: dict[Role, int] = {}
        for station in self.stations.values():
            expected[station.spec.role] = max(expected.get(station.spec.role, 0), station.fds)
        for station in self.stations.values():
            fds = self._ask(station, "shut") or 0
            more = fds - expected[station.spec.role]
            if more > 0:
                self.verdict.leaked["fds"] += more
                self.verdict.problems.append(f"{station.name}: {more} file descriptors more than after the warm-up")


def run_soak(options: SoakOptions, progress: Progress) -> SoakVerdict:
    """Run it all. Call it from a process without threads: it forks.

    Raises:
        ConfigError: options that cannot work.
        RdmaKvError: the agents could not be started.
    """
    options.check()
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")  # peers that vanish are the point
    with tempfile.TemporaryDirectory(prefix="rdma-kv-soak-") as folder:
        progress(f"4 prefill and 4 decode agents for {60 * options.minutes:.0f} s, seed {options.seed}")
        soak = Soak(options, Path(folder) / "registry.toml", progress)
        with _all_ended(soak):
            soak.run()
    return soak.verdict


@contextlib.contextmanager
def _all_ended(soak: Soak) -> Iterator[None]:
    """No process is left, whatever happens."""
    try:
        yield
    except BaseException:
        for station in soak.stations.values():
            station.worker.end(force=True)
        raise
    for station in soak.stations.values():
        station.worker.tell_end()
    for station in soak.stations.values():
        station.worker.end()
