"""Links to peer agents: the listener, single-flight dialing, handshakes, and one `Peer` object per live incarnation.

A `Peer` owns everything about one incarnation of one remote agent: the control connection, the data endpoint, what it
exported to us, and the numbers of its transfers. When it is lost it is dropped whole; a restarted peer is a new object.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from rdma_kv.config import Limits, Timeouts
from rdma_kv.control import Connection
from rdma_kv.errors import (
    ClosedError,
    ConfigError,
    IncompatiblePeerError,
    PeerLostError,
    RdmaKvError,
    RemoteProtocolError,
)
from rdma_kv.messages import Bye, ControlMessage, Notification, Regions
from rdma_kv.protocol.link import DOUBLE_DIAL, Identity, Link, LinkState, bye, keeps_dialed
from rdma_kv.registry.static import AgentRecord, EngineRecord
from rdma_kv.transport.base import Endpoint
from rdma_kv.types import AgentId

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.02


class Registry(Protocol):
    """Who is where; see `rdma_kv.registry`."""

    def engine(self, name: str) -> EngineRecord: ...


class Tasks:
    """The tasks of one owner. A task reports its own failures; one that does not is logged as a bug."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("task %s failed", task.get_name(), exc_info=task.exception())

    async def close(self) -> None:
        """Cancel what still runs and wait for its end."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Numbers:
    """Numbers of the transfers with one incarnation of a peer. They go on when a broken link comes back."""

    given: int = 0  # our last one
    high_water: int = 0  # the peer's last one

    def take(self) -> int:
        self.given += 1
        return self.given


@dataclass(eq=False)
class Peer:
    """One live link to one incarnation of one remote agent.

    Attributes:
        transport: the data plane that both sides chose for this link.
        endpoint: the data link; None until a transfer needs it.
        regions: where its staging lies; None until it told us.
        writable: done when the data link can be written to, or cannot be and `unwritable` says why.
        exported: done when our own staging was told to it.
        early: notifications that overtook their OFFER.
        lingering: the end of listening after the last transfer, while it is put off.
        lost: why the link has ended.
    """

    identity: Identity
    connection: Connection
    numbers: Numbers
    transport: str
    endpoint: Endpoint | None = None
    regions: Regions | None = None
    writable: asyncio.Task[None] | None = None
    unwritable: RdmaKvError | None = None
    exported: asyncio.Task[None] | None = None
    early: list[Notification] = field(default_factory=list)
    lingering: asyncio.TimerHandle | None = None
    lost: RdmaKvError | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.identity.name

    @property
    def id(self) -> AgentId:
        return self.identity.id

    def send(self, message: ControlMessage) -> None:
        """Put a message on the control stream; a broken stream is noticed by the reader."""
        if self.lost is None and self.connection.open:
            try:
                self.connection.send(message)
            except PeerLostError as exc:
                logger.debug("%s", exc)


class LinkUser(Protocol):
    """Who hears about peers: the mover."""

    def on_message(self, peer: Peer, message: ControlMessage) -> None: ...

    def on_lost(self, peer: Peer, error: RdmaKvError) -> None: ...


@dataclass
class _Dial:
    """A dial under way, shared by all who want that peer."""

    result: asyncio.Future[Peer]
    task: asyncio.Task[None] | None = None
    greeting: bool = False  # our HELLO is out: a double dial is decided by identity; the peer may use the link already
    waiters: int = 0


class Links:
    """All links of one agent.

    Args:
        identity: awaited before any HELLO; resolves when the agent's pools are registered.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        identity: Callable[[], Coroutine[Any, Any, Identity]],
        registry: Registry,
        user: LinkUser,
        *,
        timeouts: Timeouts,
        limits: Limits,
    ) -> None:
        self._identity = identity
        self._registry = registry
        self._user = user
        self._timeouts = timeouts
        self._limits = limits
        self._server: asyncio.Server | None = None
        self._tasks = Tasks()
        self._peers: dict[AgentId, Peer] = {}
        self._dials: dict[AgentId, _Dial] = {}
        self._numbers: dict[AgentId, tuple[bytes, Numbers]] = {}  # by incarnation
        self._connections: set[Connection] = set()  # all that are open, greeted or not
        self._closing = False
        self.handshakes = 0

    @property
    def peers(self) -> tuple[Peer, ...]:
        return tuple(self._peers.values())

    @property
    def open_tasks(self) -> int:
        return len(self._tasks)

    # --- life ----------------------------------------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen. Port 0 chooses a free one. Returns where.

        Raises:
            ConfigError: the address cannot be bound.
        """
        try:
            self._server = await asyncio.start_server(self._accept, host, port)
        except OSError as exc:
            raise ConfigError("listen", f"cannot bind {host}:{port}: {exc.strerror}") from exc
        bound = self._server.sockets[0].getsockname()
        return bound[0], bound[1]

    async def close(self) -> None:
        """Say goodbye to all peers and stop listening."""
        self._closing = True
        if self._server is not None:
            await _stop_listening(self._server)
        error = ClosedError("the agent is closing")
        for dial in self._dials.values():
            if not dial.result.done():
                dial.result.set_exception(error)
                dial.result.exception()
        for peer in list(self._peers.values()):
            peer.send(bye(error))
        await asyncio.gather(*(connection.close() for connection in list(self._connections)))
        await self._tasks.close()

    # --- dialing -------------------------------------------------------------------------------------------------------

    async def peer(self, record: AgentRecord) -> Peer:
        """The live peer of a registry record; dials where there is none, once for all who ask.

        Waits as long as it takes; bound it with a timeout. A peer that is not up yet is tried again with growing pauses.

        Raises:
            IncompatiblePeerError, RemoteProtocolError: the handshake was refused, here or there.
            ClosedError: this agent closes.
        """
        if self._closing:
            raise ClosedError("the agent is closed")
        if (peer := self._peers.get(record.id)) is not None:
            return peer
        dial = self._dials.get(record.id)
        if dial is None:
            dial = self._dials[record.id] = _Dial(asyncio.get_running_loop().create_future())
            dial.task = self._tasks.spawn(self._dial(record, dial), f"dial {record.id}")
        dial.waiters += 1
        try:
            return await asyncio.shield(dial.result)
        finally:
            dial.waiters -= 1
            if not dial.waiters and not dial.result.done() and not dial.greeting:
                self._end_dial(record.id, dial)

    def _end_dial(self, peer: AgentId, dial: _Dial) -> None:
        if self._dials.get(peer) is dial:
            del self._dials[peer]
        if dial.task is not None and dial.task is not asyncio.current_task():
            dial.task.cancel()

    async def _dial(self, record: AgentRecord, dial: _Dial) -> None:
        pause = _FIRST_RETRY_S
        while dial.waiters and not dial.result.done():
            try:
                await self._dial_once(self._current(record), dial)
            except (IncompatiblePeerError, RemoteProtocolError, ConfigError) as exc:
                self._end_dial(record.id, dial)
                if not dial.result.done():
                    dial.result.set_exception(exc)
                    dial.result.exception()  # retrieved here: the waiters may all be gone
                return
            except (OSError, TimeoutError, PeerLostError) as exc:
                logger.debug("dial %s: %s; again in %.2f s", record.id, exc, pause)
                await asyncio.sleep(pause)
                pause = min(2 * pause, self._timeouts.retry)
            except Exception as exc:
                if not dial.result.done():  # a bug of ours must not leave the waiters waiting
                    dial.result.set_exception(exc)
                    dial.result.exception()
                raise
        self._end_dial(record.id, dial)

    def _current(self, record: AgentRecord) -> AgentRecord:
        """Where the registry says that this agent is now: it may have moved since the dial began."""
        try:
            engine = self._registry.engine(record.id.engine)
        except ConfigError:
            return record
        return next((agent for agent in engine.agents if agent.id == record.id), record)

    async def _dial_once(self, record: AgentRecord, dial: _Dial) -> None:
        own = await self._identity()
        async with asyncio.timeout(self._timeouts.connect):
            reader, writer = await asyncio.open_connection(record.host, record.port)
        connection = self._connection(reader, writer, str(record.id))
        adopted = False
        try:
            link = Link(own, record.id, asyncio.get_running_loop().time() + self._timeouts.connect)
            connection.send(own.hello())
            dial.greeting = True
            await self._greet(link, connection)
            if isinstance(link.error, PeerLostError) and DOUBLE_DIAL in link.error.message:
                await self._await_inbound(dial)
                return
            if link.error is not None:
                raise link.error
            adopted = self._adopt(link, connection) is None
        finally:
            dial.greeting = False
            if not adopted:
                await self._end(connection)

    async def _await_inbound(self, dial: _Dial) -> None:
        """The peer's own connection stays: its HELLO is on the way."""
        dial.greeting = False
        await asyncio.wait([dial.result], timeout=self._timeouts.connect)

    # --- accepting -----------------------------------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = self._connection(reader, writer, "an unknown peer")
        if self._closing:
            writer.transport.abort()
        else:
            self._tasks.spawn(self._accepted(connection), "accept")

    async def _accepted(self, connection: Connection) -> None:
        adopted = False
        try:
            async with asyncio.timeout(self._timeouts.connect):
                own = await self._identity()
            link = Link(own, None, asyncio.get_running_loop().time() + self._timeouts.connect)
            await self._greet(link, connection)
            if link.error is not None:
                logger.info("refused a connection: %s", link.error)
                return
            refusal = self._double_dial(link) or self._adopt(link, connection, answer=True)
            if refusal is not None:
                connection.send(link.refuse(refusal))
                return
            adopted = True
        except (PeerLostError, TimeoutError, OSError) as exc:
            logger.debug("connection ended in its handshake: %s", exc)
        finally:
            if not adopted:
                await self._end(connection)

    def _double_dial(self, link: Link) -> RdmaKvError | None:
        assert link.remote is not None
        dial = self._dials.get(link.remote.id)
        if dial is not None and dial.greeting and keeps_dialed(link.own.id, link.remote.id):
            return PeerLostError(str(link.own.id), DOUBLE_DIAL)
        return None

    # --- both ----------------------------------------------------------------------------------------------------------

    def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> Connection:
        connection = Connection(reader, writer, name=name, send_buffer_bytes=self._limits.send_buffer_bytes)
        self._connections.add(connection)
        return connection

    async def _end(self, connection: Connection) -> None:
        await connection.close()
        self._connections.discard(connection)

    async def _greet(self, link: Link, connection: Connection) -> None:
        """Read until the link is up or closed; its error says why."""
        try:
            async with asyncio.timeout_at(link.deadline):
                message = await connection.receive()
        except TimeoutError:
            link.tick(asyncio.get_running_loop().time())
            return
        except RdmaKvError as exc:
            if isinstance(exc, RemoteProtocolError):
                connection.send(bye(exc))
            link.lost(exc)
            return
        if message is None:
            link.lost()
        elif (refusal := link.received(message)) is not None:
            connection.send(refusal)

    def _adopt(self, link: Link, connection: Connection, *, answer: bool = False) -> RdmaKvError | None:
        """Make a greeted connection the link of its peer. Returns why not, and then nothing has changed.

        Args:
            answer: send our HELLO, since the peer's came first.
        """
        remote = link.remote
        assert remote is not None
        try:
            self._check_registered(remote)
        except RdmaKvError as exc:
            if not answer:
                connection.send(bye(exc))
                raise
            return exc
        if (live := self._peers.get(remote.id)) is not None:
            what = "identity" if live.identity.incarnation != remote.incarnation else "connection"
            return IncompatiblePeerError(
                str(remote.id), what, f"a live link to {live.name} exists; two agents must not claim one identity"
            )
        if answer:
            connection.send(link.own.hello())
        self.handshakes += 1
        connection.name = str(remote.id)
        peer = Peer(remote, connection, self._numbers_of(remote), link.transport)
        self._peers[remote.id] = peer
        self._tasks.spawn(self._read(peer, link), f"read {peer.name}")
        dial = self._dials.pop(remote.id, None)
        if dial is not None:
            if not dial.result.done():
                dial.result.set_result(peer)
            if dial.task is not None and dial.task is not asyncio.current_task():
                dial.task.cancel()
        return None

    def _numbers_of(self, remote: Identity) -> Numbers:
        """Those of this incarnation; a restarted peer begins anew, and its old ones are forgotten."""
        incarnation, numbers = self._numbers.get(remote.id, (b"", Numbers()))
        if incarnation != remote.incarnation:
            numbers = Numbers()
        self._numbers[remote.id] = remote.incarnation, numbers
        return numbers

    def _check_registered(self, remote: Identity) -> None:
        """What a HELLO says must be what the registry says."""
        peer = str(remote.id)
        try:
            engine = self._registry.engine(remote.id.engine)
        except ConfigError as exc:
            raise IncompatiblePeerError(peer, "engine", exc.problem) from exc
        record = next((agent for agent in engine.agents if agent.id == remote.id), None)
        if record is None:
            raise IncompatiblePeerError(peer, "identity", "the registry has no such agent")
        for what, theirs, ours in (
            ("ranks", tuple(sorted(remote.ranks)), record.ranks),
            ("topology", remote.topology, engine.topology),
            ("tie_break", remote.tie_break, engine.tie_break),
        ):
            if theirs != ours:
                raise IncompatiblePeerError(peer, what, f"HELLO says {theirs}, the registry {ours}")

    async def _read(self, peer: Peer, link: Link) -> None:
        """Feed the peer's messages to the user until the stream ends."""
        try:
            async for message in peer.connection.messages():
                refusal = link.received(message)
                if refusal is not None:
                    peer.send(refusal)
                if link.state is LinkState.CLOSED:
                    break
                if not isinstance(message, Bye):
                    self._user.on_message(peer, message)
            link.lost()
        except RdmaKvError as exc:
            peer.send(bye(exc))
            link.lost(exc)
        finally:
            error = link.error or PeerLostError(str(peer.id), "the link was closed")
            peer.lost = error
            if self._peers.get(peer.id) is peer:
                del self._peers[peer.id]
            self._user.on_lost(peer, error)
            await self._end(peer.connection)


async def _stop_listening(server: asyncio.Server) -> None:
    """Close a server without losing a connection that is being accepted at this moment.

    asyncio leaks the socket of a connection that it has accepted but not yet attached when the server closes (an assertion
    fails in a task of its own). So: accept nothing more, let what was accepted reach its callback, then close.
    """
    loop = asyncio.get_running_loop()
    for listening in server.sockets:
        loop.remove_reader(listening.fileno())
    for _ in range(4):
        await asyncio.sleep(0)
    server.close()
