"""The processes that `rdma-kv bench transfer` measures: an agent each, and beside it a baseline without protocol.

Both move the same pages of the same pools with the same kernels over a transport of the same kind. The baseline is a
loop over two slots at each end: while one is written the next is gathered, and the target gives a slot back by one byte
on a socket once it has scattered it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from rdma_kv.agent import Agent
from rdma_kv.bench.contestants import make_transport
from rdma_kv.bench.member import (
    HEADS,
    LAYERS,
    PAGE_BYTES,
    PAGE_TOKENS,
    ROW_BYTES,
    STAGING,
    agent_config,
    write_registry,
)
from rdma_kv.bench.worker import Side, Worker, ended
from rdma_kv.errors import ConfigError, RdmaKvError
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.reference import gather, scatter
from rdma_kv.layout import KvLayout
from rdma_kv.memory import HostMemory
from rdma_kv.planner import token_offsets
from rdma_kv.registry.static import StaticRegistry
from rdma_kv.topology import Topology
from rdma_kv.transport.base import Endpoint, Transport, WritePair
from rdma_kv.transport.loopback import LoopbackNetwork, LoopbackTransport
from rdma_kv.transport.named import names
from rdma_kv.types import Descriptor, ReplicaId, Role

AGENT, BASELINE = "agent", "baseline"
SLOTS = 2  # of the baseline, at each end
SLOT_PAGES = STAGING.slot_bytes // PAGE_BYTES
_TRANSFER_S = 100.0
_ACK = b"a"


@dataclass(frozen=True)
class PairOptions:
    """What a measurement of a prefill and a decode agent is asked for.

    Attributes:
        transport: `auto`, `ucx`, `nixl` or `loopback`.
        repetitions: rounds that count, after one that does not.
    """

    transport: str = "nixl"
    repetitions: int = 7

    def __post_init__(self) -> None:
        names(self.transport, option="--transport", also=("loopback",))
        if self.repetitions < 1:
            raise ConfigError("--repetitions", f"{self.repetitions} is not positive")

    @property
    def backend(self) -> str:
        """What is measured: for `auto` what two agents of this installation choose, since the baseline needs one too."""
        return names(self.transport, also=("loopback",))[0]

    @property
    def hosts(self) -> dict[str, tuple[Role, ...]]:
        """The measured processes and their roles."""
        if self.transport == "loopback":
            return {"both agents": (Role.PREFILL, Role.DECODE)}
        return {"prefill": (Role.PREFILL,), "decode": (Role.DECODE,)}


@dataclass(frozen=True)
class Geometry:
    """Shape of the KV of one rank, both of K and V."""

    layers: int
    heads: int
    row_bytes: int
    page_tokens: int

    @property
    def page_bytes(self) -> int:
        """Of all layers together."""
        return self.layers * 2 * self.page_tokens * self.heads * self.row_bytes


_GEOMETRY = Geometry(LAYERS, HEADS, ROW_BYTES, PAGE_TOKENS)


@dataclass(frozen=True)
class PathSpec:
    """What one measured process is.

    Attributes:
        roles: one, or both where the transport lives in one process.
        source: the prefill pool, filled; every process inherits it.
        acks: the baseline's socket: the prefill side's end, and the decode side's.
    """

    backend: str
    roles: tuple[Role, ...]
    source: HostMemory
    registry: Path
    acks: tuple[socket.socket, socket.socket]

    @property
    def pages(self) -> int:
        return self.source.length_bytes // PAGE_BYTES


class Pool:
    """One side's KV memory, NHD at both, all pages in use, in an order of its own."""

    def __init__(self, role: Role, memory: HostMemory, geometry: Geometry = _GEOMETRY) -> None:
        pages = memory.length_bytes // geometry.page_bytes
        self.memory = memory
        self.geometry = geometry
        self.layout = KvLayout.nhd(
            layers=geometry.layers,
            pages=pages,
            page_size=geometry.page_tokens,
            heads=geometry.heads,
            row_bytes=geometry.row_bytes,
        )
        self.pages: list[int] = np.random.default_rng(role is Role.DECODE).permutation(pages).tolist()
        self.planes = memory.view.reshape(geometry.layers * 2, pages, -1)
        self._pointers = self.layout.pointers(np.array([memory.address], dtype=np.int64)).reshape(1, -1)

    def requests(self, count: int) -> list[list[int]]:
        """The pages of each of `count` requests of one size, all pages in all."""
        size = len(self.pages) // count
        return [self.pages[at : at + size] for at in range(0, size * count, size)]

    def slices(self, count: int) -> list[list[int]]:
        """The pages of each slot that the baseline moves for `count` requests."""
        return [part[at : at + SLOT_PAGES] for part in self.requests(count) for at in range(0, len(part), SLOT_PAGES)]

    def chunk(self, pages: Sequence[int], packed_address: int) -> Chunk:
        """All layers of some pages, as the kernels take it."""
        tokens = np.arange(len(pages) * self.geometry.page_tokens, dtype=np.int64)
        return Chunk(
            packed_address=packed_address,
            pointers=self._pointers,
            token_pool=np.zeros(tokens.size, dtype=np.int32),
            token_offset=token_offsets(self.layout, np.array(pages, dtype=np.int64), tokens, 0),
            heads=self.geometry.heads,
            head_stride=self.layout.head_stride,
            row_bytes=self.geometry.row_bytes,
        )

    def wrong_pages(self, sent: Pool, count: int | None = None) -> int:
        """Of the request's first `count` pages, or of all, those that differ from those of the pool it came from."""
        pairs = zip(self.pages[:count], sent.pages[:count], strict=True)
        return sum(not np.array_equal(self.planes[:, own], sent.planes[:, other]) for own, other in pairs)


class Baseline:
    """One end of the loop without protocol."""

    def __init__(self, role: Role, pool: Pool, transport: Transport, ack: socket.socket) -> None:
        self._pool, self._transport, self._ack = pool, transport, ack
        self._other = role.other
        self._slots = HostMemory(SLOTS * STAGING.slot_bytes)
        self._kernels = ThreadPoolExecutor(1)
        self._came: asyncio.Queue[bytes] = asyncio.Queue()
        self._endpoint: Endpoint | None = None
        self._remote = 0
        ack.setblocking(False)

    async def open(self) -> tuple[bytes, int]:
        await self._transport.start()
        await self._transport.register(self._slots.address, self._slots.length_bytes)
        self._endpoint = self._transport.endpoint(f"baseline-{self._other.value}@1")
        self._endpoint.on_notification(self._came.put_nowait)
        return await self._endpoint.metadata(), self._slots.address

    async def connect(self, metadata: bytes, remote: int) -> None:
        self._remote = remote
        await self._opened().connect(metadata)

    async def send(self, count: int) -> None:
        """Move `count` requests; returns when the last slot is scattered."""
        loop, parts = asyncio.get_running_loop(), self._pool.slices(count)
        filled = self._run(gather, parts[0], 0)
        for number, part in enumerate(parts):
            slot = number % SLOTS
            await filled
            if number + 1 < len(parts):
                filled = self._run(gather, parts[number + 1], (number + 1) % SLOTS)
            if number >= SLOTS:
                await loop.sock_recv(self._ack, 1)
            offset, size = slot * STAGING.slot_bytes, len(part) * PAGE_BYTES
            pair = WritePair(Descriptor(self._slots.address + offset, size), Descriptor(self._remote + offset, size))
            await self._opened().write([pair], _ACK)
        for _ in range(min(SLOTS, len(parts))):
            await loop.sock_recv(self._ack, 1)

    def expect(self, count: int) -> asyncio.Task[int]:
        """Begin to take `count` requests; the bytes that came."""
        self._opened().listen()
        return asyncio.create_task(self._receive(self._pool.slices(count)))

    async def _receive(self, parts: Sequence[Sequence[int]]) -> int:
        loop = asyncio.get_running_loop()
        for number, part in enumerate(parts):
            await self._came.get()
            await self._run(scatter, part, number % SLOTS)
            await loop.sock_sendall(self._ack, _ACK)
        self._opened().unlisten()
        return sum(len(part) for part in parts) * PAGE_BYTES

    async def close(self) -> None:
        await self._transport.close()
        self._kernels.shutdown(wait=False)

    def _run(self, kernel: Callable[[Sequence[Chunk]], None], pages: Sequence[int], slot: int) -> asyncio.Future[None]:
        chunk = self._pool.chunk(pages, self._slots.address + slot * STAGING.slot_bytes)
        return asyncio.get_running_loop().run_in_executor(self._kernels, kernel, [chunk])

    def _opened(self) -> Endpoint:
        if self._endpoint is None:
            raise RdmaKvError("the baseline is not open")
        return self._endpoint


class Member:
    """An agent of one role, the pool, and the baseline beside it."""

    def __init__(self, spec: PathSpec, role: Role, make: Callable[[str], Transport]) -> None:
        decode = role is Role.DECODE
        self.pool = Pool(role, HostMemory(spec.source.length_bytes) if decode else spec.source)
        self.agent = Agent(agent_config(role, _TRANSFER_S), StaticRegistry(spec.registry), transport=make)
        self.baseline = Baseline(role, self.pool, make(f"baseline-{role.value}@1"), spec.acks[decode])

    async def start(self, stack: contextlib.AsyncExitStack) -> int:
        """The agent's port."""
        await stack.enter_async_context(self.agent)
        self.agent.register_pool(self.pool.layout, self.pool.memory.view, replica=0, rank=0)
        stack.push_async_callback(self.baseline.close)
        return self.agent.address[1]

    async def send(self, key: str, pages: Sequence[int], begin: float) -> float:
        """Seconds from `begin` to the end of this request."""
        tokens, to = len(pages) * PAGE_TOKENS, ReplicaId(Role.DECODE.value, 0)
        async with self.agent.send(key, 0, list(pages), tokens=tokens, to=to) as out:
            await out.push()
        return time.perf_counter() - begin

    async def receive(self, key: str, pages: Sequence[int]) -> int:
        """Bytes that came."""
        tokens, source = len(pages) * PAGE_TOKENS, ReplicaId(Role.PREFILL.value, 0)
        received = await self.agent.receive(key, 0, list(pages), tokens=tokens, source=source)
        return received.received_bytes


class PathSide:
    """A measured process, as the parent asks it. See `Worker`."""

    def __init__(self, spec: PathSpec) -> None:
        self._spec = spec
        self._stack = contextlib.AsyncExitStack()
        self._members: dict[Role, Member] = {}
        self._receiving: asyncio.Future[list[int]] | None = None

    async def start(self) -> dict[str, int]:
        """Ports by role."""
        make = transport_maker(self._spec.backend)
        self._members = {role: Member(self._spec, role, make) for role in self._spec.roles}
        return {role.value: await member.start(self._stack) for role, member in self._members.items()}

    async def open(self) -> dict[str, tuple[bytes, int]]:
        """What the other end of each baseline needs, by role."""
        return {role.value: await member.baseline.open() for role, member in self._members.items()}

    async def connect(self, opened: Mapping[str, tuple[bytes, int]]) -> None:
        for role, member in self._members.items():
            await member.baseline.connect(*opened[role.other.value])

    async def wipe(self) -> None:
        """Decode: forget what came."""
        self._members[Role.DECODE].pool.memory.view[:] = 0

    async def expect(self, how: str, key: str, count: int) -> None:
        """Decode: begin to receive `count` requests."""
        member = self._members[Role.DECODE]
        if how == BASELINE:
            self._receiving = asyncio.gather(*[member.baseline.expect(count)])
        else:
            requests = enumerate(member.pool.requests(count))
            self._receiving = asyncio.gather(*(member.receive(f"{key}-{number}", part) for number, part in requests))

    async def received(self) -> int:
        """Decode: the bytes that came, once all have."""
        assert self._receiving is not None
        return sum(await self._receiving)

    async def move(self, how: str, key: str, count: int) -> list[float]:
        """Prefill: seconds until each request was done; all begin at once. The baseline tells only the last."""
        member = self._members[Role.PREFILL]
        begin = time.perf_counter()
        if how == BASELINE:
            await member.baseline.send(count)
            return [time.perf_counter() - begin]
        requests = enumerate(member.pool.requests(count))
        return await asyncio.gather(*(member.send(f"{key}-{number}", part, begin) for number, part in requests))

    async def wrong_pages(self) -> int:
        """Decode."""
        return self._members[Role.DECODE].pool.wrong_pages(Pool(Role.PREFILL, self._spec.source))

    async def lanes(self) -> list[str]:
        """Prefill: what has carried the agent's KV."""
        lanes: Iterable[str] = self._members[Role.PREFILL].agent.stats()["lanes"]
        return list(lanes)

    async def close(self) -> None:
        await self._stack.aclose()


@dataclass(frozen=True)
class Hosts:
    """The worker of each role; they may be one."""

    workers: Sequence[Worker]
    prefill: Worker
    decode: Worker
    registry: Path


@contextlib.contextmanager
def hosted(
    options: PairOptions, side: Callable[[tuple[Role, ...], Path], Side], ends: Iterable[socket.socket]
) -> Iterator[Hosts]:
    """The measured processes, until the end of the block.

    Args:
        side: makes what a process is, there, from its roles and the registry's place.
        ends: sockets that the processes inherit; ours are closed.
    """
    workers: list[Worker] = []
    by_role: dict[Role, Worker] = {}
    with tempfile.TemporaryDirectory(prefix="rdma-kv-bench-") as folder, ended(workers):
        registry = Path(folder) / "registry.toml"
        for name, roles in options.hosts.items():
            workers.append(Worker(name, partial(side, roles, registry), {}))
            by_role |= dict.fromkeys(roles, workers[-1])
        for end in ends:
            end.close()
        yield Hosts(workers, by_role[Role.PREFILL], by_role[Role.DECODE], registry)


def random_memory(length_bytes: int) -> HostMemory:
    """What a prefill pool holds, for all processes that are forked later."""
    memory = HostMemory(length_bytes, shared=True)
    memory.view[:] = np.frombuffer(np.random.default_rng(0).bytes(length_bytes), dtype=np.uint8)
    return memory


def connect_sides(workers: Sequence[Worker], registry: Path, topology: Topology) -> None:
    """Start the sides, write the registry, and tell each what the other end of its own data link needs.

    Args:
        workers: sides with `start` (ports by role), `open` (what the other end needs, by role) and `connect`.
        topology: of either engine, which is one agent of rank 0.

    Raises:
        RdmaKvError: one could not; its transport is not there, for instance.
    """
    ports: dict[str, int] = {}
    opened: dict[str, object] = {}
    for worker in workers:
        ports |= worker.ask("start")
        opened |= worker.ask("open")
    write_registry(registry, {Role(name): port for name, port in ports.items()}, topology)
    for worker in workers:
        worker.begin("connect", opened)
    for worker in workers:
        worker.result()


def transport_maker(backend: str) -> Callable[[str], Transport]:
    """Makes transports by name; those on loopback are of one network."""
    if backend != "loopback":
        return lambda name: make_transport(backend, name)
    network = LoopbackNetwork()
    return lambda name: LoopbackTransport(network, name)
