"""Links of agents without movers, over real sockets, and a wire between them that can be cut or gone silent."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

from rdma_kv.config import Limits, Timeouts
from rdma_kv.errors import ConfigError, RdmaKvError
from rdma_kv.links import Links
from rdma_kv.messages import ControlMessage
from rdma_kv.peer import Peer
from rdma_kv.protocol.link import Identity, Process
from rdma_kv.registry.static import AgentRecord, EngineRecord
from rdma_kv.topology import ModelSpec, TieBreak, Topology
from rdma_kv.types import AgentId, Role

MODEL = ModelSpec.gqa(layers=2, kv_heads=2, head_dim=8, itemsize=4, dtype="float32", fingerprint="toy")
TOPOLOGY = Topology.with_layers(2)
QUICK = Timeouts(heartbeat=0.1, lease=0.5, connect=5.0)
LIMIT_S = 10.0


class Wire:
    """A TCP forwarder to one port. Connections through it can be cut, or carry nothing more while they stay open.

    Attributes:
        cut_after: bytes from the dialer after which a connection is reset; None for never. Counts for each connection.
    """

    def __init__(self, port: int) -> None:
        self.port = 0
        self.target = port
        self.cut_after: int | None = None
        self.accepted = 0
        self._talking = asyncio.Event()
        self._talking.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def silence(self) -> None:
        """Nothing is forwarded from here on; what is sent is kept, and forwarded at `talk`."""
        self._talking.clear()

    def talk(self) -> None:
        self._talking.set()

    def cut(self) -> None:
        """Reset all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self._writers.add(writer)
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(back)
        talking = self._talking  # of this moment: see `only_new_talk`
        for source, target, limit in ((reader, back, self.cut_after), (there, writer, None)):
            task = asyncio.create_task(self._forward(source, target, (writer, back), limit, talking))
            self._tasks.add(task)

    @staticmethod
    async def _forward(
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        both: tuple[asyncio.StreamWriter, ...],
        limit: int | None,
        talking: asyncio.Event,
    ) -> None:
        left = 1 << 60 if limit is None else limit
        with contextlib.suppress(OSError):
            while left and (data := await source.read(1 << 16)):
                await talking.wait()
                target.write(data[:left])
                await target.drain()
                left -= len(data[:left])
        if talking.is_set():  # a silent wire does not tell that one end has closed, either
            for writer in both:
                writer.close() if left else writer.transport.abort()

    def only_new_talk(self) -> None:
        """All connections of now fall silent for ever; later ones work."""
        self._talking.clear()
        self._talking = asyncio.Event()
        self._talking.set()


@dataclass
class Recorder:
    """A `LinkUser` that writes down what it hears."""

    heard: list[tuple[str, str]] = field(default_factory=list)  # (what, incarnation name)
    messages: list[ControlMessage] = field(default_factory=list)
    errors: list[RdmaKvError] = field(default_factory=list)
    is_settled: bool = True

    def on_message(self, peer: Peer, message: ControlMessage) -> None:
        self.messages.append(message)

    def on_lost(self, peer: Peer, error: RdmaKvError) -> None:
        self.heard.append(("lost", peer.name))
        self.errors.append(error)

    def on_suspect(self, peer: Peer) -> None:
        self.heard.append(("suspect", peer.name))

    def on_alive(self, peer: Peer) -> None:
        self.heard.append(("alive", peer.name))

    def on_dead(self, peer_name: str) -> None:
        self.heard.append(("dead", peer_name))

    def on_settle(self, peer: Peer) -> None:
        self.heard.append(("settle", peer.name))

    async def settled(self, peer_name: str) -> bool:
        self.heard.append(("settled?", peer_name))
        return self.is_settled

    def kinds(self) -> list[str]:
        return [what for what, _ in self.heard]


class Book:
    """A registry whose addresses the test sets."""

    def __init__(self) -> None:
        self.ports: dict[Role, int] = {Role.PREFILL: 1, Role.DECODE: 1}
        self.listed = frozenset({"127.0.0.1"})

    def engine(self, name: str) -> EngineRecord:
        for role, port in self.ports.items():
            if role.value == name:
                record = AgentRecord(agent_id(role), "127.0.0.1", port, (0,))
                return EngineRecord(name, role, TOPOLOGY, TieBreak.REPLICA, (record,))
        raise ConfigError("engine", f"{name!r} is unknown")

    def hosts(self) -> frozenset[str]:
        return self.listed

    def record(self, role: Role) -> AgentRecord:
        return self.engine(role.value).agents[0]


def agent_id(role: Role) -> AgentId:
    return AgentId("c", role.value, role, 0)


def identity(role: Role, timeouts: Timeouts = QUICK, process: Process = Process()) -> Identity:
    """A new incarnation."""
    return Identity(
        agent_id(role), os.urandom(16), TOPOLOGY, TieBreak.REPLICA, MODEL, (16,), TOPOLOGY.owned([0]), ("loopback",),
        1 << 20, int(timeouts.heartbeat * 1000), int(timeouts.lease * 1000), process,
    )  # fmt: skip


@dataclass
class Node:
    """One agent's links."""

    links: Links
    user: Recorder
    identity: Identity
    port: int = 0

    @property
    def peer(self) -> Peer:
        (peer,) = self.links.peers
        return peer

    async def close(self) -> None:
        await self.links.close()

    def die(self) -> None:
        """As a process that is killed: nobody says goodbye, and nobody dials any more."""
        self.links._closing = self.links._acceptor._closing = True
        for connection in list(self.links._connections.open):
            connection.abort()
        self.links._acceptor._server.close()
        for dial in list(self.links._dialer._dials.values()):
            dial.task.cancel()


class Rig:
    """Prefill and decode links with a wire in front of the decode side's port (and of the prefill side's, where asked)."""

    def __init__(self) -> None:
        self.book = Book()
        self.nodes: list[Node] = []
        self.wires: list[Wire] = []

    async def node(
        self,
        role: Role,
        *,
        timeouts: Timeouts = QUICK,
        process: Process = Process(),
        limits: Limits = Limits(),
        **facts: object,
    ) -> Node:
        """A new incarnation of one side; it listens, and the registry does not know where."""
        who = replace(identity(role, timeouts, process), **facts)

        async def own() -> Identity:
            return who

        user = Recorder()
        links = Links(own, self.book, user, timeouts=timeouts, limits=limits)
        node = Node(links, user, who)
        _, node.port = await links.start("127.0.0.1", 0)
        self.nodes.append(node)
        return node

    async def wire(self, to: Node) -> Wire:
        """The registry sends whoever dials `to` through this."""
        wire = Wire(to.port)
        await wire.start()
        self.wires.append(wire)
        self.book.ports[to.identity.id.role] = wire.port
        return wire

    def publish(self, node: Node) -> None:
        self.book.ports[node.identity.id.role] = node.port


@contextlib.asynccontextmanager
async def rig() -> AsyncIterator[Rig]:
    made = Rig()
    before = asyncio.all_tasks()
    try:
        yield made
    finally:
        for node in made.nodes:
            await node.close()
        for wire in made.wires:
            await wire.close()
        for node in made.nodes:
            assert node.links.watched == 0
    async with asyncio.timeout(LIMIT_S):
        while left := asyncio.all_tasks() - before - {asyncio.current_task()}:
            await asyncio.wait(left)


async def until(condition: Callable[[], object]) -> float:
    """Wait for it; how many seconds that took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)
    return loop.time() - began
