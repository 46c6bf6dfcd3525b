"""One measured process: one agent, or both where the transport lives in one process, and a pool of KV for each.

The parent says when to move, rest and check. What is measured is measured here, about this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rdma_kv.agent import Agent
from rdma_kv.bench.wire import (
    Answer,
    Channel,
    Check,
    Checked,
    Failed,
    Move,
    Moved,
    Question,
    Rest,
    Rested,
    Started,
    Stop,
)
from rdma_kv.config import StagingConfig, Timeouts
from rdma_kv.errors import RdmaKvError
from rdma_kv.layout import KvLayout
from rdma_kv.registry.static import AgentRecord, EngineRecord, StaticRegistry, dump_registry
from rdma_kv.session import AgentConfig
from rdma_kv.topology import ModelSpec, TieBreak, Topology
from rdma_kv.transport.named import TransportMaker
from rdma_kv.types import AgentId, ReplicaId, Role

CLUSTER = "bench"
LAYERS, HEADS, ROW_BYTES = 16, 8, 256
PAGE_TOKENS = 16  # of all layers together 1 MiB: see `PAGE_BYTES`
PAGE_BYTES = LAYERS * 2 * PAGE_TOKENS * HEADS * ROW_BYTES
MODEL = ModelSpec.gqa(layers=LAYERS, kv_heads=HEADS, head_dim=ROW_BYTES // 2)
TOPOLOGY = Topology.with_layers(LAYERS)
STAGING = StagingConfig(slots=16, slot_bytes=4 << 20)
_TIMER_S = 1e-3
_SETTLE_S = 0.2  # before the idle window, for what still ends after a transfer

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class HostSpec:
    """One measured process.

    Attributes:
        roles: of its agents.
        pages: of each pool.
    """

    name: str
    roles: tuple[Role, ...]
    pages: int
    registry: Path
    timeout_s: float


class Pool:
    """One rank's KV memory: NHD at prefill, HND at decode, all pages in use, in an order of its own."""

    def __init__(self, role: Role, pages: int) -> None:
        self.role = role
        make, inner = (
            (KvLayout.nhd, (PAGE_TOKENS, HEADS)) if role is Role.PREFILL else (KvLayout.hnd, (HEADS, PAGE_TOKENS))
        )
        self.layout = make(layers=LAYERS, pages=pages, page_size=PAGE_TOKENS, heads=HEADS, row_bytes=ROW_BYTES)
        self.pages: list[int] = np.random.default_rng(role is Role.DECODE).permutation(pages).tolist()
        shape = (LAYERS, 2, pages, *inner, ROW_BYTES)
        if role is Role.PREFILL:
            words = np.random.default_rng(0).integers(0, 1 << 64, pages * PAGE_BYTES // 8, dtype=np.uint64)
            self.memory: Bytes = words.view(np.uint8).reshape(shape)
        else:
            self.memory = np.full(shape, 0xA5, dtype=np.uint8)

    def page(self, index: int) -> Bytes:
        """Page `index` of the request, as `[layers, kv, tokens, heads, row]`."""
        page = self.memory[:, :, self.pages[index]]
        return page if self.role is Role.PREFILL else page.swapaxes(2, 3)

    def wrong_pages(self) -> int:
        """Pages that do not hold what the prefill pool's page of the same index does."""
        sent = Pool(Role.PREFILL, len(self.pages))
        return sum(not np.array_equal(self.page(index), sent.page(index)) for index in range(len(self.pages)))


class Member:
    """One agent and its pool."""

    def __init__(self, agent: Agent, pages: int) -> None:
        self.agent = agent
        self.role = agent.config.role
        self.pool = Pool(self.role, pages)
        agent.register_pool(self.pool.layout, self.pool.memory, replica=0, rank=0)

    async def move(self, job: Move) -> Moved:
        """Our side of one transfer."""
        pages = self.pool.pages[: -(-job.tokens // PAGE_TOKENS)]
        if self.role is Role.DECODE:
            source = ReplicaId(Role.PREFILL.value, 0)
            received = await self.agent.receive(job.key, 0, pages, tokens=job.tokens, source=source)
            return Moved(received_bytes=received.received_bytes)
        begin = asyncio.get_running_loop().time()
        async with self.agent.send(job.key, 0, pages, tokens=job.tokens, to=ReplicaId(Role.DECODE.value, 0)) as out:
            await out.push()
        seconds = asyncio.get_running_loop().time() - begin
        stats = self.agent.stats()
        started = [name for name, state in stats["transports"].items() if state == "started"]
        return Moved(seconds=seconds, lane="+".join(stats["lanes"]), transport="+".join(started))


async def serve(spec: HostSpec, channel: Channel, transport: str | TransportMaker) -> None:
    """Be one measured process until the parent says Stop or is gone."""
    try:
        async with _members(spec, transport) as members:
            channel.send(Started([member.agent.address[1] for member in members]))
            while isinstance(message := await channel.receive(), Move | Rest | Check):
                channel.send(await _answer(members, message))
    except RdmaKvError as exc:
        channel.send(Failed(f"{spec.name}: {exc}"))
    await channel.close()


def agent_config(
    role: Role,
    timeout_s: float,
    *,
    model: ModelSpec = MODEL,
    topology: Topology = TOPOLOGY,
    staging: StagingConfig = STAGING,
) -> AgentConfig:
    """Of the one agent of that role, which is an engine by itself."""
    return AgentConfig(
        engine=role.value,
        role=role,
        ranks=(0,),
        topology=topology,
        model=model,
        cluster=CLUSTER,
        staging=staging,
        timeouts=Timeouts(transfer=timeout_s),
    )


def write_registry(registry: Path, ports: Mapping[Role, int], topology: Topology) -> None:
    """Of an engine of either role, which is one agent of rank 0 on that port."""
    engines = []
    for role, port in ports.items():
        agent = AgentRecord(AgentId(CLUSTER, role.value, role, 0), "127.0.0.1", port, (0,))
        engines.append(EngineRecord(role.value, role, topology, TieBreak.REPLICA, (agent,)))
    registry.write_bytes(dump_registry(CLUSTER, engines))


@contextlib.asynccontextmanager
async def _members(spec: HostSpec, transport: str | TransportMaker) -> AsyncIterator[list[Member]]:
    registry = StaticRegistry(spec.registry)
    async with contextlib.AsyncExitStack() as stack:
        members = []
        for role in spec.roles:
            agent = Agent(agent_config(role, spec.timeout_s), registry, transport=transport)
            await stack.enter_async_context(agent)
            members.append(Member(agent, spec.pages))
        yield members


async def _answer(members: Sequence[Member], message: Question) -> Answer:
    match message:
        case Move():
            return await _move(members, message)
        case Rest():
            return await _rest(message.seconds)
        case Check():
            return Checked(sum(member.pool.wrong_pages() for member in members if member.role is Role.DECODE))
        case Stop():
            raise AssertionError("not a question")


async def _move(members: Sequence[Member], job: Move) -> Moved:
    waited_s = _core_wait_s()
    async with _lag_probe() as lag_s:
        parts = await asyncio.gather(*(member.move(job) for member in members))
    return Moved(
        lag_s=lag_s,
        core_wait_s=_core_wait_s() - waited_s,
        seconds=max(part.seconds for part in parts),
        received_bytes=sum(part.received_bytes for part in parts),
        lane="".join(part.lane for part in parts),
        transport="".join(part.transport for part in parts),
    )


async def _rest(seconds: float) -> Rested:
    await asyncio.sleep(_SETTLE_S)
    loop = asyncio.get_running_loop()
    begin, cpu_s = loop.time(), _cpu_s()
    await asyncio.sleep(seconds)
    return Rested(_cpu_s() - cpu_s, loop.time() - begin)


def _cpu_s() -> float:
    """CPU seconds of this process so far, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _core_wait_s() -> float:
    """Seconds that the calling thread has been ready to run without a core; 0 where the kernel does not count them."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except OSError:
        return 0.0


@contextlib.asynccontextmanager
async def _lag_probe() -> AsyncIterator[list[float]]:
    """Collects how late timers of 1 ms are, one after the other; at least one, as the last is waited for."""
    lag_s: list[float] = []
    ended = False

    async def probe() -> None:
        loop = asyncio.get_running_loop()
        while not ended:
            planned = loop.time() + _TIMER_S
            await asyncio.sleep(_TIMER_S)
            lag_s.append(loop.time() - planned)

    task = asyncio.create_task(probe())
    await asyncio.sleep(0)  # the first timer runs before the work begins
    try:
        yield lag_s
    finally:
        ended = True
        await task
