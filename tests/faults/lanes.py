"""Cells of the fault matrix on real lanes: every agent in a process of its own, stopped exactly at the point.

An agent that reaches the point says so over a pipe and waits, its loop standing still, until the parent has let the fault
happen: by a signal, or by telling the victim to do it to itself. What is judged is what `matrix.expected` demands.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from matrix import DETECTED_S, REAL, Cell, Expected, Fault, Lane, Point, Times, Victim, expected
from seams import Seam, installed
from trials import Ended, Verdict, timeouts

from rdma_kv.config import StagingConfig
from rdma_kv.errors import RdmaKvError, TransferAborted
from rdma_kv.soak.member import LAYERS, Member, MemberSpec
from rdma_kv.soak.run import Station, write_registry
from rdma_kv.topology import Topology
from rdma_kv.transport.named import TransportMaker, offer
from rdma_kv.types import Role

TOKENS = 960
_STAGING = StagingConfig(slots=8, slot_bytes=512 << 10)
_POLL_S = 0.01
_SEEN = {  # by which side; one that both see is seen by the victim
    Victim.PREFILL: frozenset({Point.BEFORE_OFFER, Point.AFTER_OFFER, Point.AFTER_GRANT, Point.DURING_WRITE}),
    Victim.DECODE: frozenset({Point.AFTER_GRANT, Point.BEFORE_ACK, Point.AFTER_ACKS}),
}
_POINT_S = 10.0  # for the point to be reached, and for the parent's word there
_END_S = 30.0  # for all calls to end after what is demanded
_SETTLE_S = 3 * (REAL.lease + REAL.quiesce) + REAL.transfer


class FaultMember(Member):
    """A member with a seam. `points` goes to the parent: this process waits there for its word."""

    def __init__(self, points: Connection, spec: MemberSpec) -> None:
        super().__init__(spec)
        self._points = points
        self._armed: Point | None = None
        self._under_test = 0
        self._seam = Seam(spec.rank)
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(installed(lambda: self._seam))

    def _transport(self) -> str | TransportMaker:
        (backend,) = offer(self._spec.transport, "any")
        return lambda name: self._seam.transport(offer(backend, name)[backend](name))

    async def arm(self, point: str, number: int) -> None:
        """Stop at a point of the transfers from now on; `number` is the request under test."""
        self._armed, self._under_test = Point(point), number
        self._seam.reached = self._reached

    def _reached(self, point: Point) -> None:
        if point is not self._armed:
            return
        self._armed = None
        self._points.send(point.value)
        if self._points.poll(_POINT_S) and (fault := self._points.recv()):
            self._strike(Fault(fault))

    async def strike(self, fault: str, number: int) -> None:
        """Let a fault happen to us now, in a request."""
        self._under_test = number
        self._strike(Fault(fault))

    def _strike(self, fault: Fault) -> None:
        assert self._agent is not None
        match fault:
            case Fault.CANCEL:
                if (task := self._calls.get(self._under_test)) is not None:
                    task.cancel()
            case Fault.ABORT:
                for session in list(self._agent._shell.sessions):
                    session.fail(TransferAborted(session.call.key, "test", "given up by the test"))
            case Fault.NO_POST:
                self._seam.no_post = True
            case Fault.NO_NOTE:
                self._seam.no_note = True
            case _:
                self._seam.frame_fault = fault

    async def disarm(self) -> bool:
        """Take back a fault that nothing has met; whether there was one."""
        return self._seam.disarm()

    async def cut(self) -> None:
        """Break our control streams where they are."""
        self._seam.cut()


class LaneStation(Station):
    """A station whose member stops at points."""

    def __init__(
        self, spec: MemberSpec, environ: dict[str, str | None], member: Callable[..., FaultMember] = FaultMember
    ) -> None:
        self.points, self._theirs = multiprocessing.Pipe()
        super().__init__(spec, functools.partial(member, self._theirs), environ)


def environ_of(lane: Lane) -> dict[str, str | None]:
    return {"UCX_TLS": "tcp" if lane.wire == "tcp" else None}


class LaneTrial:
    """One cell on a real lane."""

    def __init__(self, cell: Cell, seed: int, folder: Path, *, times: Times = REAL) -> None:
        self.cell, self.seed, self.times = cell, seed, times
        self.verdict = Verdict(cell, seed)
        self.registry = folder / "registry.toml"
        self.topologies = {
            Role.PREFILL: Topology.with_layers(LAYERS, tp=cell.sources),
            Role.DECODE: Topology.with_layers(LAYERS),
        }
        specs = [MemberSpec(Role.DECODE, 0, *self._common())]
        specs += [MemberSpec(Role.PREFILL, rank, *self._common()) for rank in range(cell.sources)]
        self.stations = {spec.name: LaneStation(spec, environ_of(cell.lane)) for spec in specs}
        self.struck_at = self.back_at = 0.0
        self.paused = False

    def _common(self) -> tuple[Any, ...]:
        times = timeouts(self.times)
        return self.registry, self.cell.lane.transport, self.topologies, 80, _STAGING, times

    @property
    def victim(self) -> LaneStation:
        return self.stations[f"{self.cell.victim}/0"]

    @property
    def observer(self) -> LaneStation:
        """The one agent that waits at the point: the victim, where that sees it."""
        if self.cell.point in _SEEN[self.cell.victim]:
            return self.victim
        return self.stations["prefill/0" if self.cell.victim is Victim.DECODE else "decode/0"]

    # --- one request ---------------------------------------------------------------------------------------------------

    def begin(self, number: int) -> set[str]:
        for station in self.stations.values():
            station.worker.ask("begin", number, 0, TOKENS, self.times.transfer, False)
        return set(self.stations)

    def move(self, number: int) -> dict[str, dict[str, Any]]:
        """A request in which nothing happens; how each call ended."""
        left, ends = self.begin(number), {}
        deadline = time.monotonic() + self.times.transfer + _END_S
        while left and time.monotonic() < deadline:
            for name in list(left):
                for end in self.stations[name].worker.ask("take"):
                    ends[name] = end
                    left.discard(name)
            time.sleep(_POLL_S)
        return ends | {name: {"outcome": "hangs", "text": "", "seconds": _END_S} for name in left}

    # --- the whole -----------------------------------------------------------------------------------------------------

    def run(self) -> Verdict:
        verdict = self.verdict
        with killed(self.stations.values()):
            for station in self.stations.values():
                station.open()
            self._write_registry()
            if bad := [end for end in self.move(1).values() if end["outcome"] != "success" or end["wrong"]]:
                verdict.problems.append(f"before any fault: {bad}")
            lanes = {lane for s in self.stations.values() for lane in s.worker.ask("report")["lanes"]}
            if lanes != {self.cell.lane.wire}:
                verdict.skipped = f"two processes use {'+'.join(sorted(lanes))} here"
                return verdict
            self.observer.worker.ask("arm", self.cell.point.value, 2)
            left = self.begin(2)
            if not self._strike_at_the_point():
                verdict.problems.append("the point was never reached")
            self._collect(left)
            self._judge(expected(self.cell))
            if self.cell.fault not in {Fault.KILL, Fault.EXIT} and self.victim.worker.ask("disarm"):
                verdict.problems.append("the fault never happened")
            self._afterwards()
            self._left()
        return verdict

    def _strike_at_the_point(self) -> bool:
        observer = self.observer
        if not observer.points.poll(_POINT_S):
            return False
        observer.points.recv()
        self.struck_at = self.back_at = time.monotonic()
        victim, fault = self.victim, self.cell.fault
        word = ""
        match fault:
            case Fault.KILL:
                victim.worker.end(force=True)
            case Fault.STALL | Fault.STOP:
                away_s = self.times.stall if fault is Fault.STALL else self.times.stop
                victim.pause(away_s, self.struck_at)
                self.back_at += away_s
            case Fault.EXIT if observer is victim:
                observer.points.send("")
                victim.worker.tell_end()
                return True
            case Fault.EXIT:
                victim.worker.tell_end()
            case Fault.BREAK if self.cell.victim is Victim.PREFILL and observer is not victim:
                victim.worker.ask("cut")  # it may have no more to say
            case _ if observer is victim:
                word = fault.value
            case _:
                victim.worker.ask("strike", fault.value, 2)
        with contextlib.suppress(OSError):
            observer.points.send(word)
        return True

    def _collect(self, left: set[str]) -> None:
        """Take the ends of all calls as they come, and let a stopped victim go on when it is time."""
        gone = self.cell.fault in {Fault.KILL, Fault.EXIT}
        if gone:
            left.discard(self.victim.name)
        deadline = self.back_at + self.times.transfer + _END_S
        while left and time.monotonic() < deadline:
            now = time.monotonic()
            if self.victim.paused_at is not None and now >= self.back_at:
                self.victim.resume(now)
            for station in self.stations.values():
                if gone and station is self.victim:
                    continue
                if station.paused_at is None and station.name in left:
                    for end in station.worker.ask("take"):
                        self._ended_call(station, end)
                        left.discard(station.name)
            time.sleep(_POLL_S)
        self.verdict.problems += [f"{name}: hangs" for name in sorted(left)]
        if self.victim.paused_at is not None:
            self.victim.resume(time.monotonic())

    def _ended_call(self, station: Station, end: dict[str, Any]) -> None:
        since = max(self.struck_at, self.back_at if station is self.victim else 0.0)
        error = None if end["outcome"] == "success" else RdmaKvError(f"{end['outcome']} {end['text']}")
        self.verdict.ended.append(Ended(station.name, error, time.monotonic() - since))
        self.verdict.poisoned_bytes += end["wrong"]
        if end["outcome"] == "bug":
            self.verdict.problems.append(f"{station.name}: not a typed end: {end['text']}")

    def _judge(self, limit: Expected) -> None:
        self.verdict.judge(self.cell, self.times, limit, {n for n in self.stations if n.startswith("prefill")})

    def _afterwards(self) -> None:
        if self.cell.fault is Fault.KILL or self.cell.fault is Fault.EXIT:
            self.victim.restart(force=True)
            self._write_registry()
        for number in (3, 4, 5):
            ends = self.move(number)
            bad = {name: end for name, end in ends.items() if end["outcome"] != "success"}
            self.verdict.poisoned_bytes += sum(end.get("wrong", 0) for end in ends.values())
            took_s = max(end["seconds"] for end in ends.values())
            told = number == 3 and all(
                end["outcome"] in {"PeerLostError", "TransferAborted", "TransferTimeout"} for end in bad.values()
            )
            if bad and not told:
                self.verdict.problems.append(f"request {number} afterwards: {bad}")
            elif took_s > (DETECTED_S if bad else self.times.lease) + self.times.slack:
                self.verdict.problems.append(f"request {number} afterwards took {took_s:.2f} s: {bad}")

    def _left(self) -> None:
        deadline = time.monotonic() + _SETTLE_S
        while True:
            reports = {name: station.worker.ask("report") for name, station in self.stations.items()}
            left = {n: r for n, r in reports.items() if r["slots"] or r["tasks"] or r["pages"] or r["calls"]}
            if not left or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        verdict = self.verdict
        verdict.poisoned_bytes += sum(report["poisoned"] for report in reports.values())
        for name, report in left.items():
            verdict.held[name] = report["held"]
            verdict.problems.append(f"{name} still has {report}")
        for name, station in self.stations.items():
            if (fds := station.worker.ask("shut")) > _FDS_OF_A_PROCESS:
                verdict.leaked["fds"] = verdict.leaked.get("fds", 0) + fds
                verdict.problems.append(f"{name}: {fds} file descriptors are open after the agent has closed")
        if verdict.poisoned_bytes:
            verdict.problems.append(f"{verdict.poisoned_bytes} poisoned bytes")

    def _write_registry(self) -> None:
        write_registry(self.registry, self.topologies, list(self.stations.values()))


@contextlib.contextmanager
def killed(stations: Iterable[LaneStation]) -> Iterator[None]:
    """Kill all processes on the way out, stopped ones too."""
    try:
        yield
    finally:
        for station in stations:
            station.worker.end(force=True)
            station.points.close()
            station._theirs.close()


_FDS_OF_A_PROCESS = 12  # what a transport's libraries keep for the process: measured below 8


def run_lane_cell(cell: Cell, seed: int = 0) -> Verdict:
    """Run one cell in processes of its own. Call it from a process without threads: it forks."""
    with tempfile.TemporaryDirectory(prefix="rdma-kv-faults-") as folder:
        return LaneTrial(cell, seed, Path(folder)).run()


def run_restarts(lane: Lane, count: int, seed: int = 0) -> Verdict:
    """The decode agent is killed and started again under its name, again and again, now and then in a transfer.

    What was under way ends for the survivor, every request after a restart succeeds at once, and nothing adds up.
    """
    cell = Cell(Fault.KILL, Victim.DECODE, Point.AFTER_GRANT, lane, 1)
    with tempfile.TemporaryDirectory(prefix="rdma-kv-faults-") as folder:
        return _Restarts(cell, seed, Path(folder)).run_all(count)


class _Restarts(LaneTrial):
    def run_all(self, count: int) -> Verdict:
        rnd, verdict = random.Random(self.seed), self.verdict
        with killed(self.stations.values()):
            for station in self.stations.values():
                station.open()
            self._write_registry()
            survivor = self.stations["prefill/0"]
            if bad := [end for end in self.move(1).values() if end["outcome"] != "success"]:
                verdict.problems.append(f"before any restart: {bad}")
            for turn in range(count):
                self._one(survivor, turn, rnd)
                if verdict.problems:
                    verdict.problems.append(f"at restart {turn}, seed {self.seed}")
                    break
            self._left()
        return verdict

    def _one(self, survivor: LaneStation, turn: int, rnd: random.Random) -> None:
        number = 10 * (turn + 1)
        busy = rnd.random() < 0.7
        if busy:
            self.begin(number)
            time.sleep(rnd.choice([0.0, 0.002, 0.01, 0.03]))
        self.victim.restart(force=True)
        begun = time.monotonic()
        self._write_registry()
        while busy and not (ends := survivor.worker.ask("take")):
            # Its deadline, not a second: where it had no link yet, its OFFER goes to the next life, which knows nothing.
            if time.monotonic() - begun > self.times.transfer + DETECTED_S + self.times.slack:
                self.verdict.problems.append("the survivor's call did not end")
                return
            time.sleep(_POLL_S)
        if busy and ends[0]["outcome"] == "bug":
            self.verdict.problems.append(f"the survivor's call: {ends}")
        for end in (bad := self.move(number + 1)).values():
            self.verdict.poisoned_bytes += end.get("wrong", 0)
            if end["outcome"] != "success":
                self.verdict.problems.append(f"the request after a restart: {bad}")
                return
