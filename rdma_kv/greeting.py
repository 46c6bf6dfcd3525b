"""Control connections: their opening, the reading of their first frame, and their end.

Apart from dialing and accepting, since both sides greet alike; only who came in by itself may be refused unread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rdma_kv.config import Limits
from rdma_kv.control import Connection
from rdma_kv.errors import PeerLostError, RdmaKvError, RemoteProtocolError
from rdma_kv.messages import decode
from rdma_kv.protocol.link import Link, bye


class Connections:
    """The control connections of one agent.

    Attributes:
        open: all that are, greeted or not.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.open: set[Connection] = set()

    def make(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, name: str) -> Connection:
        """A connection over streams that are open; `end` or `drop` it."""
        limits = self._limits
        connection = Connection(
            reader, writer, name=name, send_buffer_bytes=limits.send_buffer_bytes, hello_bytes=limits.hello_bytes
        )
        self.open.add(connection)
        return connection

    async def end(self, connection: Connection) -> None:
        """Send what is queued, then close. Idempotent."""
        try:
            await connection.close()
        finally:
            self.open.discard(connection)

    def drop(self, connection: Connection) -> None:
        """Cut it off, and do not wait for its end."""
        connection.abort()
        self.open.discard(connection)

    async def close(self) -> None:
        """Close all, after what is queued. Whoever owns one still ends it."""
        await asyncio.gather(*(connection.close() for connection in list(self.open)))


async def greet(link: Link, connection: Connection, may_read: Callable[[], bool] | None = None) -> bool:
    """Read until the link is up or closed; its error says why.

    Args:
        may_read: asked when the first frame is there whole, before it is decoded; where it says no, the connection is cut
            off. None where we dialed.

    Returns:
        False where nothing came in time.

    Raises:
        PeerLostError: the stream has closed under an answer of ours.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout_at(link.deadline):
            body = await connection.frame()
        if body is not None and may_read is not None and not may_read():
            link.lost(PeerLostError(connection.name, "too many handshakes of its address"))
            connection.abort()
            return True
        message = None if body is None else decode(connection.name, body)
    except TimeoutError:
        link.tick(loop.time())
        return False
    except RdmaKvError as exc:
        if isinstance(exc, RemoteProtocolError):
            connection.send(bye(exc))
        link.lost(exc)
        return True
    if message is None:
        link.lost()
    elif (refusal := link.received(message)) is not None:
        connection.send(refusal)
    return True
