"""The processes that `rdma-kv bench latency` measures: an agent each, hand-written sockets and small WRITEs beside it.

A request is a few pages of a pool, and the pool holds `REQUESTS` of them: a round moves each once, so that its bytes can be
compared at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rdma_kv.agent import Agent
from rdma_kv.bench.latency_posting import Poster
from rdma_kv.bench.latency_sockets import How, SocketEnd
from rdma_kv.bench.latency_trace import Mark, Trace
from rdma_kv.bench.member import agent_config
from rdma_kv.bench.paths import AGENT, Geometry, Pool, transport_maker
from rdma_kv.config import StagingConfig
from rdma_kv.errors import RdmaKvError
from rdma_kv.memory import HostMemory
from rdma_kv.registry.static import StaticRegistry
from rdma_kv.topology import ModelSpec, Topology
from rdma_kv.transport.base import Transport
from rdma_kv.types import ReplicaId, Role

GEOMETRY = Geometry(layers=2, heads=2, row_bytes=128, page_tokens=16)
REQUESTS = 32
REQUEST_PAGES = 4
REQUEST_BYTES = REQUEST_PAGES * GEOMETRY.page_bytes
TOPOLOGY = Topology.with_layers(GEOMETRY.layers)
_MODEL = ModelSpec.gqa(layers=GEOMETRY.layers, kv_heads=GEOMETRY.heads, head_dim=GEOMETRY.row_bytes // 2)
_STAGING = StagingConfig(slots=16, slot_bytes=1 << 20)
_TRANSFER_S = 60.0
_LOOK_S = 2e-4  # between two looks whether an EXPECT is here; before the clock starts

Ends = tuple[socket.socket, socket.socket]


@dataclass(frozen=True)
class LatencySpec:
    """What one measured process is.

    Attributes:
        roles: one, or both where the transport lives in one process.
        source: the prefill pool, filled; every process inherits it.
        ends: of each kind of socket the prefill side's end, and the decode side's.
    """

    backend: str
    roles: tuple[Role, ...]
    source: HostMemory
    registry: Path
    ends: Mapping[How, Ends]


class LatencyMember:
    """An agent of one role, its pool, and what is measured beside it."""

    def __init__(self, spec: LatencySpec, role: Role, make: Callable[[str], Transport], trace: Trace) -> None:
        decode = role is Role.DECODE
        self.pool = Pool(role, HostMemory(spec.source.length_bytes) if decode else spec.source, GEOMETRY)
        self.requests = self.pool.requests(REQUESTS)
        config = agent_config(role, _TRANSFER_S, model=_MODEL, topology=TOPOLOGY, staging=_STAGING)
        registry = StaticRegistry(spec.registry)
        self.agent = Agent(config, registry, transport=lambda name: trace.transport(make(name)))
        self.sockets = {how: SocketEnd(how, self.pool, ends[decode], REQUEST_BYTES) for how, ends in spec.ends.items()}
        self.poster = Poster(role, make(f"poster-{role.value}@1"))
        self._trace = trace

    async def start(self, stack: contextlib.AsyncExitStack) -> int:
        """The agent's port."""
        await stack.enter_async_context(self.agent)
        self.agent.register_pool(self.pool.layout, self.pool.memory.view, replica=0, rank=0)
        stack.push_async_callback(self.poster.close)
        for end in self.sockets.values():
            stack.callback(end.close)
        return self.agent.address[1]

    async def receive(self, how: str, number: int, key: str) -> None:
        """Decode: take request `number`."""
        pages = self.requests[number]
        if how != AGENT:
            await self.sockets[How(how)].serve(number, pages)
            return
        tokens, source = len(pages) * GEOMETRY.page_tokens, ReplicaId(Role.PREFILL.value, 0)
        received = await self.agent.receive(key, 0, pages, tokens=tokens, source=source)
        if received.received_bytes != REQUEST_BYTES:
            raise RdmaKvError(f"{received.received_bytes} bytes arrived, not {REQUEST_BYTES}")

    async def send(self, how: str, number: int, key: str) -> float:
        """Prefill: seconds from the call to its end. The decode side has been asked before."""
        pages = self.requests[number]
        if how != AGENT:
            return await self.sockets[How(how)].request(number, pages)
        await self._until_expected()
        self._trace.clear()
        tokens, to = len(pages) * GEOMETRY.page_tokens, ReplicaId(Role.DECODE.value, 0)
        begin = time.perf_counter()
        self._trace.note(Mark.CALLED)
        async with self.agent.send(key, 0, pages, tokens=tokens, to=to) as out:
            await out.push()
        self._trace.note(Mark.RETURNED)
        return time.perf_counter() - begin

    async def _until_expected(self) -> None:
        """The decode side's EXPECT is here, and with it what it gives ahead."""
        async with asyncio.timeout(_TRANSFER_S):
            while not self.agent.stats()["unmatched"]:  # noqa: ASYNC110 - the public API has no event for it
                await asyncio.sleep(_LOOK_S)


class LatencySide:
    """A measured process, as the parent asks it. See `Worker`."""

    def __init__(self, spec: LatencySpec) -> None:
        self._spec = spec
        self._stack = contextlib.AsyncExitStack()
        self._members: dict[Role, LatencyMember] = {}
        self._trace = Trace()
        self._working: asyncio.Task[None] | None = None
        self._taking: asyncio.Task[tuple[float, float]] | None = None

    async def start(self) -> dict[str, int]:
        """Ports by role."""
        self._stack.enter_context(self._trace.installed())
        make = transport_maker(self._spec.backend)
        self._members = {role: LatencyMember(self._spec, role, make, self._trace) for role in self._spec.roles}
        return {role.value: await member.start(self._stack) for role, member in self._members.items()}

    async def open(self) -> dict[str, tuple[bytes, int]]:
        """What the other end of each poster needs, by role."""
        return {role.value: await member.poster.open() for role, member in self._members.items()}

    async def connect(self, opened: Mapping[str, tuple[bytes, int]]) -> None:
        for role, member in self._members.items():
            await member.poster.connect(*opened[role.other.value])

    async def expect(self, how: str, number: int, key: str) -> None:
        """Decode: begin to take a request."""
        self._trace.clear()
        self._working = asyncio.create_task(self._members[Role.DECODE].receive(how, number, key))

    async def send(self, how: str, number: int, key: str) -> float:
        """Prefill: seconds that the request took."""
        return await self._members[Role.PREFILL].send(how, number, key)

    async def received(self) -> None:
        """Decode: it is here."""
        assert self._working is not None
        await self._working

    async def marks(self) -> dict[str, float]:
        """Either: of the last transfer; see `Trace`."""
        return self._trace.take()

    async def ahead(self) -> int:
        """Decode: slots that were given ahead so far."""
        counters: Mapping[str, int] = self._members[Role.DECODE].agent.stats()["counters"]
        return counters.get("slots_ahead", 0)

    async def wipe(self) -> None:
        """Decode: forget what came."""
        self._members[Role.DECODE].pool.memory.view[:] = 0

    async def wrong_pages(self) -> int:
        """Decode."""
        return self._members[Role.DECODE].pool.wrong_pages(Pool(Role.PREFILL, self._spec.source, GEOMETRY))

    async def post(self, number: int) -> tuple[float, float]:
        """Prefill; see `Poster`."""
        return await self._members[Role.PREFILL].poster.post(number)

    async def take(self, number: int) -> None:
        """Decode: begin to take small WRITEs."""
        self._taking = asyncio.create_task(self._members[Role.DECODE].poster.take(number))

    async def taken(self) -> tuple[float, float]:
        """Decode; see `Poster`."""
        assert self._taking is not None
        return await self._taking

    async def lanes(self) -> list[str]:
        """Prefill: what has carried the agent's KV."""
        lanes: Iterable[str] = self._members[Role.PREFILL].agent.stats()["lanes"]
        return list(lanes)

    async def close(self) -> None:
        await self._stack.aclose()
