"""A peer that is stopped in the middle of 256 MiB, in processes of their own: memory that is used again must not be touched.

The content of a request is one byte value, so that a single byte of the new request at a place of the old one is seen.

* *source*: the target is stopped, the sender's call ends, its pages and its staging carry the next request to another
  target, and the stopped one goes on. Bytes of the new request at it: 0.
* *target*: the sender is stopped, the receiver's call ends, its pages and staging take the next request from another
  sender, and the stopped one goes on. Bytes of the old request in what the new one brought, or in free pages: 0. Over cma
  the staging that was granted must not be handed out meanwhile: it is held, or retired.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from lanes import FaultMember, LaneStation, environ_of, killed
from matrix import PATIENT, Lane, Point, Times, Victim
from reuse import broken_hold
from trials import timeouts

from rdma_kv.config import StagingConfig
from rdma_kv.soak.content import Pool
from rdma_kv.soak.member import LAYERS, PAGE_TOKENS, MemberSpec
from rdma_kv.soak.run import write_registry
from rdma_kv.topology import Topology
from rdma_kv.types import Role

BYTES_OF_TOKEN = LAYERS * 2 * 4 * 128
MIB = 1 << 20
_STAGING_PARTS = 16
_LIMIT_S = 120.0


class _Plain(Pool):
    """A pool whose requests are one byte value each."""

    def _content(self, request: int, layer: int, tokens: int) -> Any:
        _, kv_factor, _, _, heads, row_bytes = self.memory.shape
        return np.full((kv_factor, tokens, heads, row_bytes), value_of(request), dtype=np.uint8)


def value_of(request: int) -> int:
    return 0x10 + request


class PoisonMember(FaultMember):
    """A member with plain content; `broken` makes its product hand memory out without a proof."""

    def __init__(self, broken: bool, points: Connection, spec: MemberSpec) -> None:
        super().__init__(points, spec)
        pool = self._pool
        self._pool = _Plain(pool.layers, 2, spec.num_pages, PAGE_TOKENS, pool.heads, pool.memory.shape[-1])
        if broken:
            self._stack.enter_context(broken_hold())

    async def count(self, request: int) -> int:
        """Bytes of a request in our pool and in our staging."""
        assert self._agent is not None
        segments = self._agent._shell.mover._staging.segments
        places = [(segment.memory.address, segment.memory.length_bytes) for segment in segments]
        return int(np.count_nonzero(self._pool.memory == value_of(request))) + _count(places, value_of(request))


def _count(places: list[tuple[int, int]], value: int) -> int:
    """Bytes of this process with that value; read as a file, since retired memory must not be touched."""
    found = 0
    with open("/proc/self/mem", "rb", buffering=0) as memory:
        for address, length_bytes in places:
            for offset in range(0, length_bytes, MIB):
                with contextlib.suppress(OSError):  # retired: nobody can read it, and nobody can have written it
                    part = os.pread(memory.fileno(), min(MIB, length_bytes - offset), address + offset)
                    found += int(np.count_nonzero(np.frombuffer(part, np.uint8) == value))
    return found


@dataclass
class PoisonVerdict:
    """What came of one run."""

    victim: Victim
    lane: Lane
    broken: bool
    poisoned_bytes: int = 0
    held_meanwhile: int = 0  # slots of the stopped peer that were held or retired when its counterpart's call had ended
    problems: list[str] = field(default_factory=list)
    skipped: str = ""
    seconds: float = 0.0


class PoisonTrial:
    """One stopped peer; `victim` is the side that is stopped."""

    def __init__(self, victim: Victim, lane: Lane, folder: Path, *, mib: int, broken: bool, times: Times) -> None:
        self.verdict = PoisonVerdict(victim, lane, broken)
        self.times = times
        self.tokens = mib * MIB // BYTES_OF_TOKEN
        self.registry = folder / "registry.toml"
        two, one = Topology.with_layers(LAYERS, tp=2, dp=2), Topology.with_layers(LAYERS)
        # two on the side that is stopped: the second of them carries the new request
        self.topologies = {
            Role.PREFILL: two if victim is Victim.PREFILL else one,
            Role.DECODE: two if victim is Victim.DECODE else one,
        }
        staging = StagingConfig(_STAGING_PARTS, mib * MIB // _STAGING_PARTS)
        self.stations = {}
        for role, topology in self.topologies.items():
            for rank in range(topology.tp):
                spec = MemberSpec(
                    role,
                    rank,
                    self.registry,
                    lane.transport,
                    self.topologies,
                    self.tokens // PAGE_TOKENS + 16,
                    staging,
                    timeouts(times),
                )
                self.stations[spec.name] = _Station(spec, environ_of(lane), broken)
        self.stopped = self.stations[f"{victim}/0"]
        self.second = self.stations[f"{victim}/1"]
        self.survivor = self.stations["decode/0" if victim is Victim.PREFILL else "prefill/0"]

    def begin(self, number: int, station: LaneStation, tokens: int, timeout_s: float) -> None:
        """A request between the survivor and one of the two."""
        for each, other in ((self.survivor, station.spec.replica), (station, 0)):
            each.worker.ask("begin", number, other, tokens, timeout_s, False)

    def end_of(self, station: LaneStation, number: int) -> dict[str, Any]:
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline:
            for end in station.worker.ask("take"):
                if end["number"] == number:
                    return end  # type: ignore[no-any-return]
            time.sleep(0.01)
        return {"number": number, "outcome": "hangs", "text": "", "wrong": 0}

    def run(self) -> PoisonVerdict:
        verdict, begun = self.verdict, time.monotonic()
        with killed(self.stations.values()):
            for station in self.stations.values():
                station.open()
            write_registry(self.registry, self.topologies, list(self.stations.values()))
            for number, station in ((1, self.stopped), (2, self.second)):
                self._whole(number, station, 64)
            lane = self._sender(self.stopped).worker.ask("report")["lanes"]
            if lane != [verdict.lane.wire]:
                verdict.skipped = f"two processes use {'+'.join(lane)} here"
                return verdict
            self._stop_in_the_middle()
            first = self.end_of(self.survivor, 3)
            if first["outcome"] == "success":
                verdict.problems.append("the survivor's call succeeded beside a stopped peer")
            report = self.survivor.worker.ask("report")
            verdict.held_meanwhile = report["slots"] + report["retired"]
            if not (verdict.held_meanwhile or verdict.broken) and (verdict.victim, verdict.lane.wire) == (
                Victim.PREFILL,
                "cma",
            ):
                verdict.problems.append("staging that was granted to a stopped peer was handed out without a proof")
            self._whole(4, self.second, self.tokens)  # the same pages, and staging as it is handed out
            time.sleep(self.times.lease + self.times.quiesce)  # whoever waits for a proof has waited
            self._whole(5, self.second, self.tokens)
            before = self._new_bytes(self.survivor)
            self.stopped.resume(time.monotonic())
            old = self.end_of(self.stopped, 3)
            if old["outcome"] in {"success", "hangs", "bug"}:
                verdict.problems.append(f"the stopped peer's call: {old}")
            self._settled()
            verdict.poisoned_bytes += max(0, before - self._new_bytes(self.survivor))  # used again, and changed later
            verdict.poisoned_bytes += self._new_bytes(self.stopped)  # it was never sent any of that
            self._whole(6, self.second, self.tokens // 4)
            for station in self.stations.values():
                verdict.poisoned_bytes += station.worker.ask("report")["poisoned"]
        verdict.seconds = time.monotonic() - begun
        return verdict

    @staticmethod
    def _new_bytes(station: LaneStation) -> int:
        return sum(station.worker.ask("count", number) for number in (4, 5))

    def _sender(self, station: LaneStation) -> LaneStation:
        return station if station.spec.role is Role.PREFILL else self.survivor

    def _whole(self, number: int, station: LaneStation, tokens: int) -> None:
        """A request that must succeed; wrong bytes count as poisoned."""
        self.begin(number, station, tokens, _LIMIT_S / 2)
        for each in (station, self.survivor):
            end = self.end_of(each, number)
            self.verdict.poisoned_bytes += end["wrong"]
            if end["outcome"] != "success":
                self.verdict.problems.append(f"{each.name}: request {number}: {end['outcome']} {end['text']}")

    def _stop_in_the_middle(self) -> None:
        sender = self._sender(self.stopped)
        sender.worker.ask("arm", Point.DURING_WRITE.value, 3)
        self.begin(3, self.stopped, self.tokens, self.times.transfer)
        if not sender.points.poll(_LIMIT_S / 4):
            self.verdict.problems.append("no WRITE has begun")
            return
        sender.points.recv()
        if sender is self.stopped:
            sender.points.send("")
            time.sleep(0.02)  # somewhere in the middle of its WRITEs
        self.stopped.pause(_LIMIT_S, time.monotonic())
        if sender is not self.stopped:
            sender.points.send("")

    def _settled(self) -> None:
        """Everything held comes back, now that the stopped peer has gone on."""
        deadline = time.monotonic() + self.times.transfer + 3 * (self.times.lease + self.times.quiesce)
        while time.monotonic() < deadline:
            held = {n: r["held"] for n, s in self.stations.items() if (r := s.worker.ask("report"))["slots"]}
            if not held:
                return
            time.sleep(0.05)
        if not self.verdict.broken:
            self.verdict.problems.append(f"still held: {held}")


class _Station(LaneStation):
    def __init__(self, spec: MemberSpec, environ: dict[str, str | None], broken: bool) -> None:
        super().__init__(spec, environ, partial(PoisonMember, broken))


def run_poison(
    victim: Victim, lane: Lane, *, mib: int = 256, broken: bool = False, times: Times = PATIENT
) -> PoisonVerdict:
    """One run. Call it from a process without threads: it forks."""
    with tempfile.TemporaryDirectory(prefix="rdma-kv-faults-") as folder:
        return PoisonTrial(victim, lane, Path(folder), mib=mib, broken=broken, times=times).run()
