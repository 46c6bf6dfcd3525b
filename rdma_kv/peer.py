"""Links to peer agents: the listener, single-flight dialing, handshakes, and one `Peer` object per live incarnation.

A `Peer` owns everything about one incarnation of one remote agent: the control connection, the data endpoint, what it
exported to us, and the numbers of its transfers. When it is lost it is dropped whole; a restarted peer is a new object.

How a link ends: BYE or the end of the stream; the end of the peer's lease; the proven death of its process; a new
connection of the same agent that takes its place. The last is decided by asking: an agent that has lost its stream, or
has restarted, dials again, maybe before the end of the old stream is noticed here. So the old link is asked for a sign
of life; where none comes, it is given up for the new one. Where one comes, the new one is refused: from the same
incarnation it is a leftover of a double dial, and may be tried again; from another, two live processes claim one identity.

A lost peer is dialed again without a call (for `Timeouts.redial`), so that a restarted one is known again within a
second or two of listening, and what both sides still hold for each other can be settled.

Whoever reaches our port may knock; `protocol.border` says who is let in. The rest is closed without an answer and without
work: the agents among those dial again. Only a first frame that is too long is answered, since trying again does not mend
that. Few connections are accepted in one turn of the loop, so that a flood of them leaves the loop to others in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from rdma_kv.config import Limits, Timeouts
from rdma_kv.control import CLOSE_S, Connection, peer_address
from rdma_kv.deaths import DeathWatch
from rdma_kv.errors import (
    ClosedError,
    ConfigError,
    IncompatiblePeerError,
    PeerLostError,
    RdmaKvError,
    RemoteProtocolError,
)
from rdma_kv.messages import MAX_FRAME_BYTES, Bye, ControlMessage, Heartbeat, Notification, Regions, Settle, decode
from rdma_kv.protocol.border import Border, Seldom, Visit
from rdma_kv.protocol.link import DOUBLE_DIAL, Identity, Link, LinkState, bye, keeps_dialed
from rdma_kv.protocol.liveness import LifeState
from rdma_kv.pulse import Pulse
from rdma_kv.registry.static import AgentRecord, EngineRecord
from rdma_kv.transport.base import Endpoint
from rdma_kv.types import AgentId, Role

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.02
_INCARNATIONS = 16  # of one agent, whose numbers are kept
_TURNS_TO_END = 3  # of the loop, until the end of a stream that has ended already is seen
_ATTEMPT_S = 1.0  # for a connection to open: the kernel would try again in growing pauses, we begin anew
_SECOND_TURN_S = 0.25  # before the larger identity looks for a lost peer: the smaller one has begun by then
_ANSWER_S = 0.75  # for a sign of life over a link that another connection would replace
_ACCEPTS_A_TURN = 8  # of the loop, 0.1 to 0.3 ms each with all that follows
_BACKLOG = 1024  # connections that the kernel keeps for us; it may have a lower bound of its own
_LAST_WORDS_S = 0.2  # to read what a dead process had sent; its stream has ended by then, as far as it was its own


class Registry(Protocol):
    """Who is where; see `rdma_kv.registry`."""

    def engine(self, name: str) -> EngineRecord: ...

    def hosts(self) -> frozenset[str]:
        """Addresses and names of all agents that it lists; the same object as long as nothing has changed."""
        ...


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

    async def drain(self, timeout_s: float) -> None:
        """Wait so long at most for what runs now."""
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=timeout_s)

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
        device_lane: by which KV goes between staging on the GPUs of both sides; empty where it is in host memory.
        endpoint: the data link; None until a transfer needs it.
        regions: where its staging lies; None until it told us.
        writable: done when the data link can be written to, or cannot be and `unwritable` says why.
        exported: done when our own staging was told to it.
        early: notifications that overtook their OFFER.
        lingering: the end of listening after the last transfer, while it is put off.
        pulse: whether it lives; None only before the link is up.
        reading: the task that reads its messages.
        lost: why the link has ended.
        given_up: why we end it, before it has ended.
        close: ends the control connection, after what is queued.
    """

    identity: Identity
    connection: Connection
    numbers: Numbers
    transport: str
    device_lane: str = ""
    endpoint: Endpoint | None = None
    regions: Regions | None = None
    writable: asyncio.Task[None] | None = None
    unwritable: RdmaKvError | None = None
    exported: asyncio.Task[None] | None = None
    early: list[Notification] = field(default_factory=list)
    lingering: asyncio.TimerHandle | None = None
    pulse: Pulse | None = None
    reading: asyncio.Task[None] | None = None
    lost: RdmaKvError | None = None
    given_up: RdmaKvError | None = None
    close: Callable[[Peer], None] | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.identity.name

    @property
    def id(self) -> AgentId:
        return self.identity.id

    @property
    def device_staging(self) -> bool:
        """Whether KV passes through staging on the GPUs of both sides, rather than in host memory."""
        return bool(self.device_lane)

    @property
    def may_post(self) -> bool:
        """Whether a WRITE may be posted now: not to a lost or suspect peer, nor to one that may have given us up."""
        return self.lost is None and (self.pulse is None or self.pulse.may_post)

    async def until_may_post(self) -> None:
        """Wait until a WRITE may be posted, or the link has ended: then `lost` says why."""
        if self.pulse is not None:
            await self.pulse.until_may_post()

    @property
    def suspect(self) -> bool:
        """Whether it is silent for too long, but not yet lost."""
        return self.pulse is not None and self.pulse.state is LifeState.SUSPECT

    def send(self, message: ControlMessage) -> None:
        """Put a message on the control stream; a broken stream is noticed by the reader."""
        if self.lost is None and self.connection.open:
            try:
                self.connection.send(message)
            except PeerLostError as exc:
                logger.debug("%s", exc)

    def give_up(self, error: RdmaKvError) -> None:
        """End the link from our side: the peer is told why, and `on_lost` follows with this error. Idempotent."""
        if self.lost is None and self.given_up is None:
            self.given_up = error
            self.send(bye(error))
            if self.close is not None:
                self.close(self)


class LinkUser(Protocol):
    """Who hears about peers: the mover."""

    def on_message(self, peer: Peer, message: ControlMessage) -> None: ...

    def on_lost(self, peer: Peer, error: RdmaKvError) -> None:
        """The link has ended, for whatever reason. The peer's memory is not proven out of reach by that."""
        ...

    def on_suspect(self, peer: Peer) -> None:
        """Two heartbeats are overdue: post nothing new."""
        ...

    def on_alive(self, peer: Peer) -> None:
        """A suspect peer has given a sign of life."""
        ...

    def on_dead(self, peer_name: str) -> None:
        """The process of an incarnation is proven dead, maybe long after its link was lost (then `on_lost` came first)."""
        ...

    def on_settle(self, peer: Peer) -> None:
        """The peer, a prefill agent, says that all WRITEs of its former links to us are over."""
        ...

    async def settled(self, peer_name: str) -> bool:
        """Wait until all our WRITEs of former links to that incarnation are over. False: that cannot be known."""
        ...


@dataclass
class _Dial:
    """A dial under way, shared by all who want that peer."""

    result: asyncio.Future[Peer]
    task: asyncio.Task[None] | None = None
    greeting: bool = False  # our HELLO is out: a double dial is decided by identity; the peer may use the link already
    waiters: int = 0
    until: float = 0.0  # it goes on without waiters up to then
    hurry: asyncio.Event = field(default_factory=asyncio.Event)  # somebody new waits: no more pause

    @property
    def wanted(self) -> bool:
        return self.waiters > 0 or asyncio.get_running_loop().time() < self.until


class Links:
    """All links of one agent.

    Args:
        identity: awaited before any HELLO; resolves when the agent's pools are registered.

    Attributes:
        handshakes: those that succeeded.
        counters: connections that were turned away, by why.
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
        self._numbers: dict[AgentId, dict[bytes, Numbers]] = {}  # by incarnation, the latest ones last
        self._connections: set[Connection] = set()  # all that are open, greeted or not
        self._own: AgentId | None = None  # known at the first handshake
        self._deaths = DeathWatch(self._died)
        self._closing = False
        self._border = Border(limits, registry.hosts)
        self._visits: dict[Visit, tuple[Connection, asyncio.Task[None]]] = {}
        self._complaints, self._refusals = Seldom(), Seldom()
        self.handshakes = 0
        self.counters: Counter[str] = Counter()

    @property
    def peers(self) -> tuple[Peer, ...]:
        return tuple(self._peers.values())

    @property
    def open_tasks(self) -> int:
        return len(self._tasks)

    @property
    def ungreeted(self) -> int:
        """Connections that have come in and are no links yet."""
        return self._border.count

    @property
    def watched(self) -> int:
        """Processes whose death would be noticed by itself."""
        return len(self._deaths)

    def forget(self, peer_name: str) -> None:
        """Nobody needs a proof of this incarnation's death any more; ends the watch over its process."""
        self._deaths.forget(peer_name)

    # --- life ----------------------------------------------------------------------------------------------------------

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen. Port 0 chooses a free one. Returns where.

        Raises:
            ConfigError: the address cannot be bound.
        """
        try:
            # asyncio accepts up to `backlog` connections in one turn: few, then, and the kernel is told its own number.
            self._server = await asyncio.start_server(self._accept, host, port, backlog=_ACCEPTS_A_TURN)
        except OSError as exc:
            raise ConfigError("listen", f"cannot bind {host}:{port}: {exc.strerror}") from exc
        for listening in self._server.sockets:
            with listening.dup() as same:
                same.listen(_BACKLOG)
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
        self._deaths.close()

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
            dial = self._begin_dial(record)
        dial.waiters += 1
        dial.hurry.set()
        try:
            return await asyncio.shield(dial.result)
        finally:
            dial.waiters -= 1
            if not dial.wanted and not dial.result.done() and not dial.greeting:
                self._end_dial(record.id, dial)

    def _begin_dial(self, record: AgentRecord, *, first_pause_s: float = 0.0, until: float = 0.0) -> _Dial:
        dial = self._dials[record.id] = _Dial(asyncio.get_running_loop().create_future(), until=until)
        dial.task = self._tasks.spawn(self._dial(record, dial, first_pause_s), f"dial {record.id}")
        return dial

    def _redial(self, lost: AgentId, error: RdmaKvError) -> None:
        """Look for a lost peer by ourselves, for a while. The smaller identity begins, so that both do not meet."""
        if self._closing or isinstance(error, IncompatiblePeerError | RemoteProtocolError) or lost in self._dials:
            return
        record = self._record(lost)
        if record is not None and self._own is not None:
            first_pause_s = _FIRST_RETRY_S if keeps_dialed(self._own, lost) else _SECOND_TURN_S
            until = asyncio.get_running_loop().time() + self._timeouts.redial
            self._begin_dial(record, first_pause_s=first_pause_s, until=until)

    def _end_dial(self, peer: AgentId, dial: _Dial) -> None:
        if self._dials.get(peer) is dial:
            del self._dials[peer]
        if dial.task is not None and dial.task is not asyncio.current_task():
            dial.task.cancel()

    async def _dial(self, record: AgentRecord, dial: _Dial, first_pause_s: float) -> None:
        loop = asyncio.get_running_loop()
        pause = _FIRST_RETRY_S
        if first_pause_s:
            await _pause(dial, first_pause_s)
        while dial.wanted and not dial.result.done():
            began = loop.time()
            dial.hurry.clear()
            try:
                await self._dial_once(self._record(record.id) or record, dial)
            except (IncompatiblePeerError, RemoteProtocolError, ConfigError) as exc:
                self._end_dial(record.id, dial)
                if not dial.result.done():
                    dial.result.set_exception(exc)
                    dial.result.exception()  # retrieved here: the waiters may all be gone
                return
            except (OSError, UnicodeError, TimeoutError, PeerLostError) as exc:  # UnicodeError: a name that is none
                logger.debug("dial %s: %s; again within %.2f s", record.id, exc, pause)
                hurried = await _pause(dial, began + pause - loop.time())
                pause = _FIRST_RETRY_S if hurried else min(2 * pause, self._timeouts.retry)
            except Exception as exc:
                self._end_dial(record.id, dial)
                if not dial.result.done():  # a bug of ours must not leave the waiters waiting
                    dial.result.set_exception(exc)
                    dial.result.exception()
                raise
        self._end_dial(record.id, dial)

    def _record(self, agent: AgentId) -> AgentRecord | None:
        """Where the registry says that this agent is now: it may have moved since the dial began."""
        try:
            engine = self._registry.engine(agent.engine)
        except ConfigError:
            return None
        return next((record for record in engine.agents if record.id == agent), None)

    async def _dial_once(self, record: AgentRecord, dial: _Dial) -> None:
        own = await self._identity()
        async with asyncio.timeout(min(self._timeouts.connect, _ATTEMPT_S)):
            reader, writer = await asyncio.open_connection(record.host, record.port)
        connection = self._connection(reader, writer, str(record.id))
        adopted = False
        try:
            hello_at = asyncio.get_running_loop().time()
            link = Link(own, record.id, hello_at + self._timeouts.connect)
            connection.send(own.hello())
            dial.greeting = True
            await self._greet(link, connection)
            if isinstance(link.error, PeerLostError) and DOUBLE_DIAL in link.error.message:
                await self._await_inbound(dial)
                return
            if link.error is not None:
                raise link.error
            adopted = self._adopt(link, connection, hello_at) is None
        finally:
            dial.greeting = False
            if not adopted:
                await self._end(connection)

    async def _await_inbound(self, dial: _Dial) -> None:
        """The peer's own connection stays: its HELLO is on the way."""
        dial.greeting = False
        await asyncio.wait([dial.result], timeout=min(self._timeouts.connect, _ATTEMPT_S))

    # --- accepting -----------------------------------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closing:
            self._connection(reader, writer, "an unknown peer").abort()
            return
        address = peer_address(writer)
        visit, ended = self._border.enter(address, asyncio.get_running_loop().time())
        if ended is not None or visit is None:
            self.counters["refused_crowd"] += 1
            self._complain(ended.source if ended is not None else address, "too many connections without a HELLO")
        if ended is not None:
            self._turn_out(ended)
        if visit is None:
            writer.transport.abort()
            return
        connection = self._connection(reader, writer, "an unknown peer")
        connection.wait()
        self._visits[visit] = connection, self._tasks.spawn(self._accepted(connection, visit), "accept")

    def _turn_out(self, visit: Visit) -> None:
        """End a connection that waits for its HELLO, or for our pools."""
        connection, task = self._visits.pop(visit)
        connection.abort()
        self._connections.discard(connection)  # the task may not even have begun
        task.cancel()

    def _complain(self, address: str, what: str) -> None:
        """Log that somebody was turned away, once a second at most."""
        others = self._complaints.due(asyncio.get_running_loop().time())
        if others is not None:
            more = f", and {others} before that" if others else ""
            logger.warning("a connection of %s was closed: %s%s", address or "an unknown address", what, more)

    async def _accepted(self, connection: Connection, visit: Visit) -> None:
        adopted = False
        try:
            async with asyncio.timeout(self._timeouts.connect):
                own = await self._identity()
            link = Link(own, None, asyncio.get_running_loop().time() + self._timeouts.connect)
            connection.go_on()
            await self._greet(link, connection, visit)
            if link.error is not None:
                self._log_refusal(link.error)
                return
            self._border.greeted(visit)
            if await self._ended_meanwhile(connection):
                return
            refusal = await self._make_room(link) or self._double_dial(link) or self._adopt(link, connection)
            if refusal is not None:
                connection.send(link.refuse(refusal))
                return
            adopted = True
        except (PeerLostError, TimeoutError, OSError) as exc:
            logger.debug("connection ended in its handshake: %s", exc)
        finally:
            try:
                if not adopted:
                    await self._end(connection)
            finally:
                self._border.leave(visit)
                self._visits.pop(visit, None)

    def _log_refusal(self, error: RdmaKvError) -> None:
        others = self._refusals.due(asyncio.get_running_loop().time())
        if others is not None:
            logger.info("refused a connection: %s%s", error, f" (and {others} others before)" if others else "")

    async def _ended_meanwhile(self, connection: Connection) -> bool:
        """Whether the dialer has given this connection up: a process that was stopped finds many such in its backlog.

        Taken for live links, they would end what is begun on them.
        """
        for _ in range(_TURNS_TO_END):
            if connection.ended:
                return True
            await asyncio.sleep(0)
        return connection.ended

    async def _make_room(self, link: Link) -> RdmaKvError | None:
        """Give up a link whose agent dials anew, unless it still lives. Returns why the new one cannot be."""
        remote = link.remote
        assert remote is not None
        if self._peers.get(remote.id) is None:
            return None
        try:
            self._check_registered(remote)
        except RdmaKvError as exc:
            return exc
        while (live := self._peers.get(remote.id)) is not None:
            if await self._still_there(live):
                if live.identity.incarnation == remote.incarnation:
                    return PeerLostError(str(link.own.id), "the link before this one still lives")
                text = f"a live link to {live.name} exists; two agents must not claim one identity"
                return IncompatiblePeerError(str(remote.id), "identity", text)
            error = PeerLostError(str(live.id), "dialed anew, and gives no sign of life over its old connection")
            self._lose(live, error)
        return None

    async def _still_there(self, live: Peer) -> bool:
        """Whether the other end of a link answers on it."""
        if live.pulse is None or live.suspect:
            return False
        answered = await live.pulse.answers(min(_ANSWER_S, self._timeouts.connect / 2))
        return answered and live.lost is None

    def _double_dial(self, link: Link) -> RdmaKvError | None:
        assert link.remote is not None
        dial = self._dials.get(link.remote.id)
        if dial is not None and dial.greeting and keeps_dialed(link.own.id, link.remote.id):
            return PeerLostError(str(link.own.id), DOUBLE_DIAL)
        return None

    # --- both ----------------------------------------------------------------------------------------------------------

    def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> Connection:
        limits = self._limits
        connection = Connection(
            reader, writer, name=name, send_buffer_bytes=limits.send_buffer_bytes, hello_bytes=limits.hello_bytes
        )
        self._connections.add(connection)
        return connection

    async def _end(self, connection: Connection) -> None:
        try:
            await connection.close()
        finally:
            self._connections.discard(connection)

    async def _greet(self, link: Link, connection: Connection, visit: Visit | None = None) -> None:
        """Read until the link is up or closed; its error says why.

        Args:
            visit: of a connection that came in; None where we dialed.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(link.deadline):
                body = await connection.frame()
            if body is not None and visit is not None and not self._border.may_greet(visit, loop.time()):
                self.counters["refused_rate"] += 1
                self._complain(visit.source, "too many handshakes of one address")
                link.lost(PeerLostError(connection.name, "too many handshakes of its address"))
                connection.abort()
                return
            message = None if body is None else decode(connection.name, body)
        except TimeoutError:
            link.tick(loop.time())
            if visit is not None:
                self.counters["refused_late"] += 1
                self._complain(visit.source, "no HELLO in time")
            return
        except RdmaKvError as exc:
            if isinstance(exc, RemoteProtocolError):
                connection.send(bye(exc))
            link.lost(exc)
            if visit is not None and connection.refused_bytes:
                await self._refuse_length(connection, visit)
            return
        if message is None:
            link.lost()
        elif (refusal := link.received(message)) is not None:
            connection.send(refusal)

    async def _refuse_length(self, connection: Connection, visit: Visit) -> None:
        """A first frame was too long. Where it may be an honest HELLO, see that its sender reads why it is refused."""
        self.counters["refused_length"] += 1
        self._complain(visit.source, f"a first frame of {connection.refused_bytes} bytes")
        if connection.refused_bytes <= MAX_FRAME_BYTES:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await connection.drop_refused()

    def _adopt(self, link: Link, connection: Connection, hello_at: float | None = None) -> RdmaKvError | None:
        """Make a greeted connection the link of its peer. Returns why not, and then nothing has changed.

        Args:
            hello_at: when our HELLO went out; None where the peer's came first: then ours goes out now.
        """
        remote = link.remote
        assert remote is not None
        try:
            self._check_registered(remote)
        except RdmaKvError as exc:
            if hello_at is not None:
                connection.send(bye(exc))
                raise
            return exc
        if self._peers.get(remote.id) is not None:
            return PeerLostError(str(remote.id), "another connection was faster")
        now = asyncio.get_running_loop().time()
        if hello_at is None:
            connection.send(link.own.hello())
        self._own = link.own.id
        self.handshakes += 1
        connection.name = str(remote.id)
        connection.greeted()
        self._border.know(connection.address)
        again = remote.incarnation in self._numbers.get(remote.id, {})
        numbers = self._numbers_of(remote)
        peer = Peer(remote, connection, numbers, link.transport, link.device_lane, close=self._close_peer)
        self._peers[remote.id] = peer
        life = link.liveness(now, now if hello_at is None else hello_at)
        peer.pulse = Pulse(life, peer.send, lambda state: self._life_changed(peer, state))
        self._deaths.watch(peer.name, remote.process)
        peer.reading = self._tasks.spawn(self._read(peer, link), f"read {peer.name}")
        if again and (link.own.id.role, remote.id.role) == (Role.PREFILL, Role.DECODE):
            self._tasks.spawn(self._settle(peer), f"settle {peer.name}")
        dial = self._dials.pop(remote.id, None)
        if dial is not None:
            if not dial.result.done():
                dial.result.set_result(peer)
            if dial.task is not None and dial.task is not asyncio.current_task():
                dial.task.cancel()
        return None

    def _close_peer(self, peer: Peer) -> None:
        self._tasks.spawn(self._end(peer.connection), f"close {peer.name}")

    def _numbers_of(self, remote: Identity) -> Numbers:
        """Those of this incarnation, which may come back after another of its agent was here; of a few are kept."""
        known = self._numbers.setdefault(remote.id, {})
        numbers = known.pop(remote.incarnation, None) or Numbers()
        known[remote.incarnation] = numbers
        while len(known) > _INCARNATIONS:
            del known[next(iter(known))]
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

    # --- a link that is up ---------------------------------------------------------------------------------------------

    async def _read(self, peer: Peer, link: Link) -> None:
        """Feed the peer's messages to the user until the stream ends."""
        pulse = peer.pulse
        assert pulse is not None
        try:
            async for message in peer.connection.messages():
                if peer.lost is not None:
                    break  # given up meanwhile: what it had sent before does not count any more
                pulse.heard()
                refusal = link.received(message)
                if refusal is not None:
                    peer.send(refusal)
                if link.state is LinkState.CLOSED:
                    break
                if isinstance(message, Heartbeat):
                    pulse.take(message)
                elif isinstance(message, Settle):
                    self._on_settle(peer, link)
                elif not isinstance(message, Bye):
                    self._user.on_message(peer, message)
            link.lost()
        except RdmaKvError as exc:
            peer.send(bye(exc))
            link.lost(exc)
        finally:
            error = peer.given_up or link.error or PeerLostError(str(peer.id), "the link was closed")
            self._lose(peer, error, abort=False)
            await self._end(peer.connection)

    def _lose(self, peer: Peer, error: RdmaKvError, *, abort: bool = True) -> None:
        """End a link now. Idempotent: the first reason counts.

        Args:
            abort: cut the stream off; otherwise its reader closes it.
        """
        if peer.lost is not None:
            return
        peer.lost = error
        if peer.pulse is not None:
            peer.pulse.stop()
        if self._peers.get(peer.id) is peer:
            del self._peers[peer.id]
        if abort:
            logger.warning("%s", error)
            peer.connection.abort()
        self._user.on_lost(peer, error)
        self._redial(peer.id, error)

    def _life_changed(self, peer: Peer, state: LifeState) -> None:
        if state is LifeState.SUSPECT:
            logger.warning("%s is silent: two heartbeats are overdue; nothing new is posted to it", peer.name)
            self._user.on_suspect(peer)
        elif state is LifeState.ALIVE:
            logger.info("%s gives signs of life again", peer.name)
            self._user.on_alive(peer)
        else:
            self._lose(peer, PeerLostError(str(peer.id), "was silent for its whole lease"))

    def _died(self, name: str) -> None:
        """The process of a peer has ended."""
        if not self._closing:
            self._tasks.spawn(self._bury(name), f"bury {name}")

    async def _bury(self, name: str) -> None:
        """End the link of a dead process, but read what it had sent before: it may have said goodbye."""
        peer = next((peer for peer in self._peers.values() if peer.name == name), None)
        if peer is not None and peer.reading is not None:
            await asyncio.wait([peer.reading], timeout=_LAST_WORDS_S)
            self._lose(peer, PeerLostError(str(peer.id), "its process has died"))
        self._user.on_dead(name)

    async def _settle(self, peer: Peer) -> None:
        """The link came back: tell the target when nothing of the former ones is under way to it any more."""
        if await self._user.settled(peer.name):
            peer.send(Settle())

    def _on_settle(self, peer: Peer, link: Link) -> None:
        if (link.own.id.role, peer.id.role) != (Role.DECODE, Role.PREFILL):
            raise RemoteProtocolError(str(peer.id), f"SETTLE sent to a {link.own.id.role.value} agent")
        self._user.on_settle(peer)


async def _pause(dial: _Dial, pause_s: float) -> bool:
    """Wait before the next attempt, or until somebody new waits for it. True: somebody does."""
    try:
        async with asyncio.timeout(max(pause_s, 0.0)):
            await dial.hurry.wait()
    except TimeoutError:
        return False
    return True


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
