"""The listener of the control plane: who has knocked, up to a good HELLO.

Whoever reaches our port may knock; `protocol.border` says who is let in. The rest is closed without an answer and without
work: the agents among those dial again. Only a first frame that is too long is answered, since trying again does not mend
that. Few connections are accepted in one turn of the loop, so that a flood of them leaves the loop to others in between.

Apart from the links, since all of this is the work of strangers: nothing here knows a peer. Whether a greeted connection
becomes a link is not decided here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from rdma_kv.config import Timeouts
from rdma_kv.control import CLOSE_S, Connection, peer_address
from rdma_kv.errors import ConfigError, PeerLostError, RdmaKvError
from rdma_kv.greeting import Connections, greet
from rdma_kv.messages import MAX_FRAME_BYTES
from rdma_kv.protocol.border import Border, Seldom, Visit
from rdma_kv.protocol.link import Identity, Link
from rdma_kv.tasks import Tasks

logger = logging.getLogger(__name__)

_TURNS_TO_END = 3  # of the loop, until the end of a stream that has ended already is seen
_ACCEPTS_A_TURN = 8  # of the loop, 0.1 to 0.3 ms each with all that follows
_BACKLOG = 1024  # connections that the kernel keeps for us; it may have a lower bound of its own


class Acceptor:
    """The listener of one agent, and the connections that came in and are no links yet.

    Args:
        identity: awaited before anything is read.
        take: makes a greeted connection the link of its peer, or returns why it cannot be.

    Attributes:
        counters: connections that were turned away, by why.
    """

    def __init__(
        self,
        identity: Callable[[], Coroutine[Any, Any, Identity]],
        border: Border,
        connections: Connections,
        tasks: Tasks,
        *,
        timeouts: Timeouts,
        take: Callable[[Link, Connection], Coroutine[Any, Any, RdmaKvError | None]],
    ) -> None:
        self._identity = identity
        self._border = border
        self._connections = connections
        self._tasks = tasks
        self._timeouts = timeouts
        self._take = take
        self._server: asyncio.Server | None = None
        self._closing = False
        self._visits: dict[Visit, tuple[Connection, asyncio.Task[None]]] = {}
        self._complaints, self._refusals = Seldom(), Seldom()
        self.counters: Counter[str] = Counter()

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
        """Stop listening. Who has come in already stays the caller's to end."""
        self._closing = True
        if self._server is not None:
            await _stop_listening(self._server)

    # --- one connection ------------------------------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._closing:
            self._connections.make(reader, writer, "an unknown peer").abort()
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
        connection = self._connections.make(reader, writer, "an unknown peer")
        connection.wait()
        self._visits[visit] = connection, self._tasks.spawn(self._accepted(connection, visit), "accept")

    def _turn_out(self, visit: Visit) -> None:
        """End a connection that waits for its HELLO, or for our pools."""
        connection, task = self._visits.pop(visit)
        self._connections.drop(connection)  # the task may not even have begun
        task.cancel()

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
            refusal = await self._take(link, connection)
            if refusal is not None:
                connection.send(link.refuse(refusal))
                return
            adopted = True
        except (PeerLostError, TimeoutError, OSError) as exc:
            logger.debug("connection ended in its handshake: %s", exc)
        finally:
            try:
                if not adopted:
                    await self._connections.end(connection)
            finally:
                self._border.leave(visit)
                self._visits.pop(visit, None)

    async def _greet(self, link: Link, connection: Connection, visit: Visit) -> None:
        """Read until the link is up or closed, and count those that were turned away."""
        in_time = await greet(link, connection, lambda: self._may_greet(visit))
        if not in_time:
            self.counters["refused_late"] += 1
            self._complain(visit.source, "no HELLO in time")
        elif connection.refused_bytes:
            await self._refuse_length(connection, visit)

    def _may_greet(self, visit: Visit) -> bool:
        if self._border.may_greet(visit, asyncio.get_running_loop().time()):
            return True
        self.counters["refused_rate"] += 1
        self._complain(visit.source, "too many handshakes of one address")
        return False

    async def _refuse_length(self, connection: Connection, visit: Visit) -> None:
        """A first frame was too long. Where it may be an honest HELLO, see that its sender reads why it is refused."""
        self.counters["refused_length"] += 1
        self._complain(visit.source, f"a first frame of {connection.refused_bytes} bytes")
        if connection.refused_bytes <= MAX_FRAME_BYTES:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await connection.drop_refused()

    async def _ended_meanwhile(self, connection: Connection) -> bool:
        """Whether the dialer has given this connection up: a process that was stopped finds many such in its backlog.

        Taken for live links, they would end what is begun on them.
        """
        for _ in range(_TURNS_TO_END):
            if connection.ended:
                return True
            await asyncio.sleep(0)
        return connection.ended

    # --- the log -------------------------------------------------------------------------------------------------------

    def _complain(self, address: str, what: str) -> None:
        """Log that somebody was turned away, once a second at most."""
        others = self._complaints.due(asyncio.get_running_loop().time())
        if others is not None:
            more = f", and {others} before that" if others else ""
            logger.warning("a connection of %s was closed: %s%s", address or "an unknown address", what, more)

    def _log_refusal(self, error: RdmaKvError) -> None:
        others = self._refusals.due(asyncio.get_running_loop().time())
        if others is not None:
            logger.info("refused a connection: %s%s", error, f" (and {others} others before)" if others else "")


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
