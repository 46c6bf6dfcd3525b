"""Dialing peer agents: once for all who ask, again with growing pauses, and by itself after a lost one.

Apart from the links, since a dial has a life of its own: it begins before there is a peer and goes on through refused
and broken connections, as long as somebody wants it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from rdma_kv.config import Timeouts
from rdma_kv.control import Connection
from rdma_kv.errors import ConfigError, IncompatiblePeerError, PeerLostError, RdmaKvError, RemoteProtocolError
from rdma_kv.greeting import Connections, greet
from rdma_kv.peer import Peer
from rdma_kv.protocol.link import DOUBLE_DIAL, Identity, Link, keeps_dialed
from rdma_kv.registry.base import Registry, record_of
from rdma_kv.registry.static import AgentRecord
from rdma_kv.tasks import Tasks
from rdma_kv.types import AgentId

logger = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.02
_ATTEMPT_S = 1.0  # for a connection to open: the kernel would try again in growing pauses, we begin anew
_SECOND_TURN_S = 0.25  # before the larger identity looks for a lost peer: the smaller one has begun by then


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


class Dialer:
    """All dials of one agent.

    Args:
        identity: awaited before any HELLO.
        adopt: makes a greeted connection (whose HELLO of ours went out at that time) the link of its peer, and calls
            `found`. It returns why it cannot for now, and raises why it never can.
    """

    def __init__(
        self,
        identity: Callable[[], Coroutine[Any, Any, Identity]],
        registry: Registry,
        connections: Connections,
        tasks: Tasks,
        *,
        timeouts: Timeouts,
        adopt: Callable[[Link, Connection, float], RdmaKvError | None],
    ) -> None:
        self._identity = identity
        self._registry = registry
        self._connections = connections
        self._tasks = tasks
        self._timeouts = timeouts
        self._adopt = adopt
        self._dials: dict[AgentId, _Dial] = {}

    # --- who wants a peer ----------------------------------------------------------------------------------------------

    async def dial(self, record: AgentRecord) -> Peer:
        """The peer of a registry record, to which there is no link now; once for all who ask.

        Waits as long as it takes; bound it with a timeout. A peer that is not up yet is tried again with growing pauses.

        Raises:
            IncompatiblePeerError, RemoteProtocolError: the handshake was refused, here or there.
            ClosedError: this agent closes.
        """
        dial = self._dials.get(record.id)
        if dial is None:
            dial = self._begin(record)
        dial.waiters += 1
        dial.hurry.set()
        try:
            return await asyncio.shield(dial.result)
        finally:
            dial.waiters -= 1
            if not dial.wanted and not dial.result.done() and not dial.greeting:
                self._end(record.id, dial)

    def redial(self, own: AgentId, lost: AgentId) -> None:
        """Look for a lost peer by ourselves, for a while. The smaller identity begins, so that both do not meet."""
        if lost in self._dials:
            return
        record = record_of(self._registry, lost)
        if record is not None:
            first_pause_s = _FIRST_RETRY_S if keeps_dialed(own, lost) else _SECOND_TURN_S
            until = asyncio.get_running_loop().time() + self._timeouts.redial
            self._begin(record, first_pause_s=first_pause_s, until=until)

    def keeps(self, own: AgentId, peer: AgentId) -> bool:
        """Whether a connection of that peer has to give way to one that we have dialed and said HELLO on."""
        dial = self._dials.get(peer)
        return dial is not None and dial.greeting and keeps_dialed(own, peer)

    def found(self, peer: Peer) -> None:
        """Its link is up, whoever dialed."""
        dial = self._dials.pop(peer.id, None)
        if dial is not None:
            if not dial.result.done():
                dial.result.set_result(peer)
            if dial.task is not None and dial.task is not asyncio.current_task():
                dial.task.cancel()

    def fail(self, error: RdmaKvError) -> None:
        """Nobody shall wait any more."""
        for dial in self._dials.values():
            if not dial.result.done():
                dial.result.set_exception(error)
                dial.result.exception()

    # --- one dial ------------------------------------------------------------------------------------------------------

    def _begin(self, record: AgentRecord, *, first_pause_s: float = 0.0, until: float = 0.0) -> _Dial:
        dial = self._dials[record.id] = _Dial(asyncio.get_running_loop().create_future(), until=until)
        dial.task = self._tasks.spawn(self._run(record, dial, first_pause_s), f"dial {record.id}")
        return dial

    def _end(self, peer: AgentId, dial: _Dial) -> None:
        if self._dials.get(peer) is dial:
            del self._dials[peer]
        if dial.task is not None and dial.task is not asyncio.current_task():
            dial.task.cancel()

    async def _run(self, record: AgentRecord, dial: _Dial, first_pause_s: float) -> None:
        loop = asyncio.get_running_loop()
        pause = _FIRST_RETRY_S
        if first_pause_s:
            await _pause(dial, first_pause_s)
        while dial.wanted and not dial.result.done():
            began = loop.time()
            dial.hurry.clear()
            try:
                # The agent may have moved since the dial began.
                await self._dial_once(record_of(self._registry, record.id) or record, dial)
            except (IncompatiblePeerError, RemoteProtocolError, ConfigError) as exc:
                self._end(record.id, dial)
                if not dial.result.done():
                    dial.result.set_exception(exc)
                    dial.result.exception()  # retrieved here: the waiters may all be gone
                return
            except (OSError, UnicodeError, TimeoutError, PeerLostError) as exc:  # UnicodeError: a name that is none
                logger.debug("dial %s: %s; again within %.2f s", record.id, exc, pause)
                hurried = await _pause(dial, began + pause - loop.time())
                pause = _FIRST_RETRY_S if hurried else min(2 * pause, self._timeouts.retry)
            except Exception as exc:
                self._end(record.id, dial)
                if not dial.result.done():  # a bug of ours must not leave the waiters waiting
                    dial.result.set_exception(exc)
                    dial.result.exception()
                raise
        self._end(record.id, dial)

    async def _dial_once(self, record: AgentRecord, dial: _Dial) -> None:
        own = await self._identity()
        async with asyncio.timeout(min(self._timeouts.connect, _ATTEMPT_S)):
            reader, writer = await asyncio.open_connection(record.host, record.port)
        connection = self._connections.make(reader, writer, str(record.id))
        adopted = False
        try:
            hello_at = asyncio.get_running_loop().time()
            link = Link(own, record.id, hello_at + self._timeouts.connect)
            connection.send(own.hello())
            dial.greeting = True
            await greet(link, connection)
            if isinstance(link.error, PeerLostError) and DOUBLE_DIAL in link.error.message:
                await self._await_inbound(dial)
                return
            if link.error is not None:
                raise link.error
            adopted = self._adopt(link, connection, hello_at) is None
        finally:
            dial.greeting = False
            if not adopted:
                await self._connections.end(connection)

    async def _await_inbound(self, dial: _Dial) -> None:
        """The peer's own connection stays: its HELLO is on the way."""
        dial.greeting = False
        await asyncio.wait([dial.result], timeout=min(self._timeouts.connect, _ATTEMPT_S))


async def _pause(dial: _Dial, pause_s: float) -> bool:
    """Wait before the next attempt, or until somebody new waits for it. True: somebody does."""
    try:
        async with asyncio.timeout(max(pause_s, 0.0)):
            await dial.hurry.wait()
    except TimeoutError:
        return False
    return True
