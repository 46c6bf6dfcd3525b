"""A whole cluster in one process for the agent's tests: engines, agents, pools filled by a formula, one registry file.

`cell()` says what every KV byte must be; pools are written and read by plain shaped indexing, never by the code under test.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from faces import enter

from rdma_kv.agent import Agent
from rdma_kv.config import StagingConfig, Timeouts
from rdma_kv.layout import KvLayout
from rdma_kv.registry.static import AgentRecord, EngineRecord, StaticRegistry, dump_registry
from rdma_kv.session import AgentConfig
from rdma_kv.topology import ModelSpec, TieBreak, Topology
from rdma_kv.transport.base import Transport
from rdma_kv.transport.loopback import LoopbackNetwork, LoopbackTransport
from rdma_kv.types import ReplicaId, Role

SENTINEL = 0xA5


def cell(request: int, layers: range, kv: int, heads: range, positions: np.ndarray, row_bytes: int) -> np.ndarray:
    """uint8 `[layers, kv, tokens, heads, row_bytes]`: what the KV of a request is, as a function of the place."""
    layer = np.array(layers)[:, None, None, None, None]
    plane = np.arange(kv)[None, :, None, None, None]
    token = positions[None, None, :, None, None]
    head = np.array(heads)[None, None, None, :, None]
    byte = np.arange(row_bytes)[None, None, None, None, :]
    mixed = request * 101 + layer * 31 + plane * 17 + token * 7 + head * 59 + byte * 3 + token * head * 13
    return (mixed % 251).astype(np.uint8)


@dataclass
class RankMemory:
    """One rank's pool of one component as its engine would shape it."""

    component: int
    layout: KvLayout
    array: np.ndarray  # shaped
    layers: range
    heads: range
    rank: int = 0
    topology: Topology | None = None

    def rows(self, page: int, token: int) -> np.ndarray:
        """View `[layers, kv, heads, row]` of one token."""
        if self.layout.name == "hnd":
            return self.array[:, :, page, :, token]
        return self.array[:, :, page, token]

    def kept(self, total: int) -> list[int]:
        """Positions of a prompt that this rank keeps, in its own order; by hand, not by the planner."""
        if self.topology is None or self.topology.cp == 1:
            return list(range(total))
        cp, context = self.topology.cp, self.topology.place(self.rank)[1]
        interleave = self.topology.cp_split.interleave
        if interleave:
            return [t for t in range(total) if t // interleave % cp == context]
        pages = [list(range(a, min(a + self.layout.page_size, total))) for a in range(0, total, self.layout.page_size)]
        sizes = [len(pages) // cp + (c < len(pages) % cp) for c in range(cp)]
        first = sum(sizes[:context])
        return [t for page in pages[first : first + sizes[context]] for t in page]

    def fill(self, request: int, pages: Sequence[int], tokens: int) -> None:
        seed = component_seed(self.component, request)
        data = cell(seed, self.layers, self.layout.kv_factor, self.heads, np.arange(tokens), self.layout.row_bytes)
        for place, position in enumerate(self.kept(tokens)):
            page, token = pages[place // self.layout.page_size], place % self.layout.page_size
            self.rows(page, token)[:] = data[:, :, position]

    def check(self, request: int, pages: Sequence[int], start: int, end: int) -> None:
        seed = component_seed(self.component, request)
        data = cell(seed, self.layers, self.layout.kv_factor, self.heads, np.arange(end), self.layout.row_bytes)
        for place, position in enumerate(self.kept(end)):
            if position < start:
                continue
            page, token = pages[place // self.layout.page_size], place % self.layout.page_size
            np.testing.assert_array_equal(
                self.rows(page, token), data[:, :, position], err_msg=f"request {request}, token {position}"
            )

    def written(self) -> set[tuple[int, int]]:
        """(page, token) places that no longer hold the sentinel everywhere."""
        return {
            (page, token)
            for page in range(self.layout.num_pages)
            for token in range(self.layout.page_size)
            if (self.rows(page, token) != SENTINEL).any()
        }


def component_seed(index: int, request: int) -> int:
    """Components of one request hold different bytes."""
    return request + 1000 * index


def make_memory(
    model: ModelSpec, topology: Topology, rank: int, *, component: int, pages: int, page_size: int, kind: str
) -> RankMemory:
    spec = model.components[component]
    layers = spec.layers_within(topology.stage_layers(topology.place(rank)[0]))
    heads = spec.heads_of(topology.attention_rank(rank), topology.attention_tp)
    count, kv, row = layers.size, spec.kv_factor, spec.row_bytes
    make: Callable[..., KvLayout] = KvLayout.hnd if kind == "hnd" else KvLayout.nhd
    layout = make(layers=count, pages=pages, page_size=page_size, heads=heads.size, row_bytes=row, kv=kv)
    inner = (heads.size, page_size) if kind == "hnd" else (page_size, heads.size)
    array = np.full((count, kv, pages, *inner, row), SENTINEL, dtype=np.uint8)
    return RankMemory(
        component, layout, array, range(layers.start, layers.end), range(heads.start, heads.end), rank, topology
    )


@dataclass
class Side:
    """One engine of the test cluster."""

    name: str
    role: Role
    topology: Topology
    page_size: int = 16
    page_sizes: dict[str, int] = field(default_factory=dict)  # of components that differ
    kind: str = "nhd"
    pages: int = 32
    agents_by: str = "replica"  # or "engine", "rank"
    tie_break: TieBreak = TieBreak.REPLICA
    model: ModelSpec | None = None  # where it differs from the cluster's
    transports: tuple[str, ...] = ()  # of each agent, where they differ from the cluster's
    checksum: bool = False
    agents: list[Agent] = field(default_factory=list)  # or clients of a sidecar, see `faces`
    memory: dict[tuple[int, int], RankMemory] = field(default_factory=dict)  # by (component, rank)

    def rank_groups(self) -> list[tuple[int, ...]]:
        if self.agents_by == "engine":
            return [tuple(range(self.topology.num_ranks))]
        if self.agents_by == "rank":
            return [(rank,) for rank in range(self.topology.num_ranks)]
        return [self.topology.replica_ranks(replica) for replica in range(self.topology.dp)]

    def agents_of(self, replica: int) -> list[Agent]:
        ranks = set(self.topology.replica_ranks(replica))
        return [agent for agent in self.agents if ranks & set(agent.config.ranks)]

    def memory_of(self, replica: int, component: int = 0) -> list[RankMemory]:
        ranks = self.topology.replica_ranks(replica)
        return [self.memory[component, rank] for rank in ranks if (component, rank) in self.memory]


@dataclass
class Cluster:
    """Both engines, running."""

    model: ModelSpec
    prefill: Side
    decode: Side
    network: LoopbackNetwork | None
    registry_path: Path
    registry: StaticRegistry

    def check_sums(self) -> None:
        """Every slot of every agent is in one place: free, held by a peer for a reason, or retired."""
        for agent in [*self.prefill.agents, *self.decode.agents]:
            check_sums(agent)

    def check_nothing_leaked(self) -> None:
        for agent in [*self.prefill.agents, *self.decode.agents]:
            stats = agent.stats()
            assert stats["slots_free"] + stats["slots_retired"] == stats["slots_total"], (agent.name, stats)
            assert stats["transfers"] == 0, (agent.name, stats)

    async def move(
        self,
        request: int,
        prefill_replica: int,
        decode_replica: int,
        src_pages: Sequence[int],
        dst_pages: Sequence[int],
        tokens: int,
        *,
        start: int = 0,
        key: str | None = None,
        timeout_s: float = 20.0,
    ) -> list:
        """One request from fill to check; every agent of both replicas takes part."""
        key = key or f"request-{request}"
        for memory in self.prefill.memory_of(prefill_replica):
            memory.fill(request, src_pages, tokens)

        async def send(agent: Agent) -> None:
            to = ReplicaId(self.decode.name, decode_replica)
            async with agent.send(key, prefill_replica, src_pages, to=to, tokens=tokens, timeout_s=timeout_s) as out:
                await out.push()
                out.metadata["request"] = request

        async def receive(agent: Agent) -> object:
            source = ReplicaId(self.prefill.name, prefill_replica)
            return await agent.receive(
                key, decode_replica, dst_pages, source=source, tokens=(start, tokens), timeout_s=timeout_s
            )

        async with asyncio.TaskGroup() as group:
            for agent in self.prefill.agents_of(prefill_replica):
                group.create_task(send(agent))
            tasks = [group.create_task(receive(agent)) for agent in self.decode.agents_of(decode_replica)]
        for memory in self.decode.memory_of(decode_replica):
            memory.check(request, dst_pages, start, tokens)
        return [task.result() for task in tasks]


def check_sums(agent: Agent) -> None:
    stats = agent.stats()
    held = sum(stats["slots_held"].values())
    assert stats["slots_free"] + held + stats["slots_retired"] == stats["slots_total"], (agent.name, stats)


@contextlib.asynccontextmanager
async def cluster(
    tmp_path: Path,
    model: ModelSpec,
    prefill: Side,
    decode: Side,
    *,
    network: LoopbackNetwork | None = None,
    transport: str | Callable[[str], Transport] | None = None,
    staging: StagingConfig = StagingConfig(slots=4, slot_bytes=1 << 16),
    timeouts: Timeouts = Timeouts(quiesce=2.0),
) -> AsyncIterator[Cluster]:
    """Start all agents of both engines, with the face that `faces.face` says; stop them at the end."""
    network = network or LoopbackNetwork()
    make = transport or (lambda name: LoopbackTransport(network, name))
    path = tmp_path / "registry.toml"
    registry = StaticRegistry(path)
    async with contextlib.AsyncExitStack() as stack:
        records = []
        for side in (prefill, decode):
            agent_records = []
            for place, ranks in enumerate(side.rank_groups()):
                config = AgentConfig(
                    side.name,
                    side.role,
                    ranks,
                    side.topology,
                    side.model or model,
                    cluster="test",
                    tie_break=side.tie_break,
                    staging=staging,
                    timeouts=timeouts,
                    checksum=side.checksum,
                )
                own = side.transports[place] if side.transports else make
                agent = await enter(stack, tmp_path, config, registry, own)
                side.agents.append(agent)
                agent_records.append(AgentRecord(config.id, *agent.address, ranks))
            records.append(EngineRecord(side.name, side.role, side.topology, side.tie_break, tuple(agent_records)))
        path.write_bytes(dump_registry("test", records))
        for side in (prefill, decode):
            for agent in side.agents:
                own_model = side.model or model
                for (index, spec), owned in itertools.product(enumerate(own_model.components), agent.config.owns):
                    if not spec.layers_within(side.topology.stage_layers(side.topology.place(owned.rank)[0])).size:
                        continue
                    memory = make_memory(
                        own_model,
                        side.topology,
                        owned.rank,
                        component=index,
                        pages=side.pages,
                        page_size=side.page_sizes.get(spec.name, side.page_size) if spec.has_tokens else 1,
                        kind=side.kind,
                    )
                    side.memory[index, owned.rank] = memory
                    agent.register_pool(
                        memory.layout, memory.array, replica=owned.replica, rank=owned.rank, component=spec.name
                    )
        made = Cluster(model, prefill, decode, network, path, registry)
        stack.callback(made.check_sums)  # before the agents close
        yield made
    made.check_sums()
