"""The links of one agent: which connection becomes the link of which incarnation, who hears of it, and how it ends.

Connections come from two sides (`dialing`, `accepting`). Here it is decided which of them become links, and a link is the
same wherever it came from.

How a link ends: BYE or the end of the stream; the end of the peer's lease; the proven death of its process; a new
connection of the same agent that takes its place. The last is decided by asking: an agent that has lost its stream, or
has restarted, dials again, maybe before the end of the old stream is noticed here. So the old link is asked for a sign
of life; where none comes, it is given up for the new one. Where one comes, the new one is refused: from the same
incarnation it is a leftover of a double dial, and may be tried again; from another, two live processes claim one identity.

A lost peer is dialed again without a call (for `Timeouts.redial`), so that a restarted one is known again within a
second or two of listening, and what both sides still hold for each other can be settled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from rdma_kv.accepting import Acceptor
from rdma_kv.config import Limits, Timeouts
from rdma_kv.control import Connection
from rdma_kv.deaths import DeathWatch
from rdma_kv.dialing import Dialer
from rdma_kv.errors import ClosedError, IncompatiblePeerError, PeerLostError, RdmaKvError, RemoteProtocolError
from rdma_kv.greeting import Connections
from rdma_kv.messages import Bye, ControlMessage, Heartbeat, Settle
from rdma_kv.peer import Numbers, Peer
from rdma_kv.protocol.border import Border
from rdma_kv.protocol.link import DOUBLE_DIAL, Identity, Link, LinkState, bye
from rdma_kv.protocol.liveness import LifeState
from rdma_kv.pulse import Pulse
from rdma_kv.registry.base import Registry, check_registered
from rdma_kv.registry.static import AgentRecord
from rdma_kv.tasks import Tasks
from rdma_kv.types import AgentId, Role

logger = logging.getLogger(__name__)

_INCARNATIONS = 16  # of one agent, whose numbers are kept
_ANSWER_S = 0.75  # for a sign of life over a link that another connection would replace
_LAST_WORDS_S = 0.2  # to read what a dead process had sent; its stream has ended by then, as far as it was its own


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
        self._registry = registry
        self._user = user
        self._timeouts = timeouts
        self._tasks = Tasks()
        self._connections = Connections(limits)
        self._border = Border(limits, registry.hosts)
        self._dialer = Dialer(identity, registry, self._connections, self._tasks, timeouts=timeouts, adopt=self._adopt)
        self._acceptor = Acceptor(
            identity, self._border, self._connections, self._tasks, timeouts=timeouts, take=self._take
        )
        self._peers: dict[AgentId, Peer] = {}
        self._numbers: dict[AgentId, dict[bytes, Numbers]] = {}  # by incarnation, the latest ones last
        self._own: AgentId | None = None  # known at the first handshake
        self._deaths = DeathWatch(self._died)
        self._closing = False
        self.handshakes = 0
        self.counters = self._acceptor.counters

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
        return await self._acceptor.start(host, port)

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
        return await self._dialer.dial(record)

    async def close(self) -> None:
        """Say goodbye to all peers and stop listening."""
        self._closing = True
        await self._acceptor.close()
        error = ClosedError("the agent is closing")
        self._dialer.fail(error)
        for peer in list(self._peers.values()):
            peer.send(bye(error))
        await self._connections.close()
        await self._tasks.close()
        self._deaths.close()

    # --- a connection that is greeted ----------------------------------------------------------------------------------

    async def _take(self, link: Link, connection: Connection) -> RdmaKvError | None:
        """Make a connection that came in the link of its peer. Returns why it cannot be."""
        return await self._make_room(link) or self._double_dial(link) or self._adopt(link, connection)

    async def _make_room(self, link: Link) -> RdmaKvError | None:
        """Give up a link whose agent dials anew, unless it still lives. Returns why the new one cannot be."""
        remote = link.remote
        assert remote is not None
        if self._peers.get(remote.id) is None:
            return None
        try:
            check_registered(self._registry, remote)
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
        if self._dialer.keeps(link.own.id, link.remote.id):
            return PeerLostError(str(link.own.id), DOUBLE_DIAL)
        return None

    def _adopt(self, link: Link, connection: Connection, hello_at: float | None = None) -> RdmaKvError | None:
        """Make a greeted connection the link of its peer. Returns why not, and then nothing has changed.

        Args:
            hello_at: when our HELLO went out; None where the peer's came first: then ours goes out now.
        """
        remote = link.remote
        assert remote is not None
        try:
            check_registered(self._registry, remote)
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
        self._dialer.found(peer)
        return None

    def _close_peer(self, peer: Peer) -> None:
        self._tasks.spawn(self._connections.end(peer.connection), f"close {peer.name}")

    def _numbers_of(self, remote: Identity) -> Numbers:
        """Those of this incarnation, which may come back after another of its agent was here; of a few are kept."""
        known = self._numbers.setdefault(remote.id, {})
        numbers = known.pop(remote.incarnation, None) or Numbers()
        known[remote.incarnation] = numbers
        while len(known) > _INCARNATIONS:
            del known[next(iter(known))]
        return numbers

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
            await self._connections.end(peer.connection)

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
        refused = isinstance(error, IncompatiblePeerError | RemoteProtocolError)
        if not self._closing and not refused and self._own is not None:
            self._dialer.redial(self._own, peer.id)

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
