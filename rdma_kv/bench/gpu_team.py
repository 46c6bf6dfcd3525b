"""The parent's side of `bench gpu` and `bench multigpu`: spawned processes, links between their agents, transfers.

A team has as many decode as prefill processes. Prefill rank i sends to decode rank i + 1, the last one to the first: with
one of each that is a pair, with one of each on every GPU all traffic crosses.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rdma_kv.bench.gpu_links import Link, SideSpec, Way
from rdma_kv.bench.gpu_memory import LAYERS, Rows
from rdma_kv.bench.gpu_sides import GpuSide
from rdma_kv.bench.member import CLUSTER
from rdma_kv.bench.worker import Worker, ended
from rdma_kv.errors import RdmaKvError
from rdma_kv.registry.static import AgentRecord, EngineRecord, dump_registry
from rdma_kv.topology import TieBreak, Topology
from rdma_kv.types import AgentId, Role


@dataclass(frozen=True, slots=True)
class TeamSpec:
    """What a team is.

    Attributes:
        prefill, decode: CUDA ordinal of each process of a role, None for host memory alone; as many of either.
        most_bytes: of one request on a GPU, and of one in host memory.
    """

    prefill: tuple[int | None, ...]
    decode: tuple[int | None, ...]
    most_bytes: int
    most_host_bytes: int = 256 << 20
    layers: int = LAYERS

    @property
    def topology(self) -> Topology:
        """Of both engines."""
        ranks = len(self.prefill)
        return Topology.with_layers(self.layers, tp=ranks, dp=ranks)


@dataclass
class Team:
    """Running processes. Times are seconds.

    Attributes:
        devices: their names, one a process.
        moved: requests so far; keys are made of it.
        links: whose agents are there.
        plain: transports without agents that were opened, each with why it is not there, or nothing.
    """

    spec: TeamSpec
    prefill: Sequence[Worker]
    decode: Sequence[Worker]
    folder: Path
    devices: Sequence[str]
    moved: int = 0
    links: set[Link] = field(default_factory=set)
    plain: dict[str, str] = field(default_factory=dict)

    @property
    def workers(self) -> list[Worker]:
        return [*self.prefill, *self.decode]

    def target(self, rank: int) -> int:
        """The decode rank that a prefill rank sends to."""
        return (rank + 1) % len(self.decode)

    def open(self, link: Link) -> None:
        """Make a link's agents, unless they are there.

        Raises:
            RdmaKvError: one could not be made.
        """
        if link in self.links:
            return
        ports = _all(self.workers, "open_agent", link.wire)
        engines, split = [], len(self.prefill)
        for role, found in ((Role.PREFILL, ports[:split]), (Role.DECODE, ports[split:])):
            agents = tuple(
                AgentRecord(AgentId(CLUSTER, role.value, role, rank), "127.0.0.1", port, (rank,))
                for rank, port in enumerate(found)
            )
            engines.append(EngineRecord(role.value, role, self.spec.topology, TieBreak.REPLICA, agents))
        (self.folder / f"{link.name}.toml").write_bytes(dump_registry(CLUSTER, engines))
        self.links.add(link)

    def move(self, link: Link, num_bytes: int, *, awaited: bool = False) -> float:
        """One request of so many bytes from every prefill rank at once: the longest of them.

        Args:
            awaited: see `GpuSide.send`.

        Raises:
            RdmaKvError: a transfer failed, or had other than its bytes.
        """
        self.open(link)
        self.moved += 1
        key, ranks = f"request-{self.moved}", range(len(self.prefill))
        for rank in ranks:
            self.decode[self.target(rank)].ask("expect", link.wire, key, num_bytes, rank)
        try:
            for rank in ranks:
                self.prefill[rank].begin("send", link.wire, key, num_bytes, self.target(rank), awaited)
            took_s = _results(self.prefill)
        except BaseException:
            with contextlib.suppress(RdmaKvError):
                _all(self.decode, "received")  # they end as the sends did
            raise
        rows = Rows(link.row_bytes, self.spec.layers)
        expected = rows.tokens(num_bytes) * rows.token_bytes
        arrived = _all(self.decode, "received")
        if any(came != expected for came in arrived):
            raise RdmaKvError(f"{arrived} bytes arrived, not {expected}")
        return float(max(took_s))

    def check(self, link: Link, num_bytes: int) -> None:
        """Move a request into zeroed pages, and compare every byte.

        Raises:
            RdmaKvError: some are not what was sent, or the transfer failed.
        """
        _all(self.decode, "wipe", link.way is not Way.HOST)
        self.move(link, num_bytes)
        for rank in range(len(self.prefill)):
            self.decode[self.target(rank)].begin("wrong_rows", link.wire, num_bytes, rank)
        wrong = sum(_results(self.decode))
        if wrong:
            raise RdmaKvError(f"{wrong} rows arrived with other bytes than were sent")

    def lanes(self, link: Link) -> str:
        """What carried it."""
        lanes: list[str] = self.prefill[0].ask("lanes", link.wire)
        return "+".join(lanes) or "none"


@contextlib.contextmanager
def team(spec: TeamSpec) -> Iterator[Team]:
    """Spawn the processes, with their pools filled; end them after the block, by force after an error.

    Raises:
        RdmaKvError: a process could not begin.
    """
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory(prefix="rdma-kv-bench-") as folder, ended(workers):
        pipes = [_pipes() for _ in spec.prefill]
        for role, ordinals in ((Role.PREFILL, spec.prefill), (Role.DECODE, spec.decode)):
            for rank, ordinal in enumerate(ordinals):
                side = SideSpec(
                    role=role,
                    rank=rank,
                    ranks=len(ordinals),
                    ordinal=ordinal,
                    layers=spec.layers,
                    most_bytes=spec.most_bytes,
                    most_host_bytes=spec.most_host_bytes,
                    folder=Path(folder),
                    pipes=pipes[rank][role is Role.DECODE],
                )
                workers.append(Worker(f"{role.value} {rank}", partial(GpuSide, side), {}, spawned=True))
        for ends in pipes:
            for end in (*ends[0], *ends[1]):
                end.close()
        split = len(spec.prefill)
        made = Team(spec, workers[:split], workers[split:], Path(folder), [])
        made.devices = _all(workers, "start")
        yield made


def _pipes() -> tuple[tuple[Connection, Connection], tuple[Connection, Connection]]:
    """For either side: what brings bytes, and what takes them away."""
    context = multiprocessing.get_context("spawn")
    (here, there), (back, forth) = context.Pipe(duplex=False), context.Pipe(duplex=False)
    return (here, forth), (back, there)


def _all(workers: Sequence[Worker], method: str, *arguments: object) -> list[Any]:
    """Ask all at once.

    Raises:
        RdmaKvError: what the first of them said that failed; all have answered.
    """
    for worker in workers:
        worker.begin(method, *arguments)
    return _results(workers)


def _results(workers: Sequence[Worker]) -> list[Any]:
    """Answers, or the first error once all have answered."""
    answers, errors = [], []
    for worker in workers:
        try:
            answers.append(worker.result())
        except RdmaKvError as exc:
            errors.append(exc)
    if errors:
        raise errors[0]
    return answers
