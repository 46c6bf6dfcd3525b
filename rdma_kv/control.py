"""The control stream: one framed, typed message after the other over an asyncio stream.

A TCP stream does not lose single frames; it breaks. Then `messages` ends or raises, and whoever owns the connection decides
what that means for its transfers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from rdma_kv.errors import PeerLostError, RemoteProtocolError
from rdma_kv.messages import FRAME_HEADER, MAX_FRAME_BYTES, ControlMessage, decode, encode

CLOSE_S = 1.0  # for what is queued, while closing


class Connection:
    """One open control stream, owned by the peer object that uses it.

    Args:
        name: the peer, for errors.
        send_buffer_bytes: more unsent bytes than that mean that the peer does not read; the link is given up.
    """

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, name: str, send_buffer_bytes: int
    ) -> None:
        self.name = name
        self._reader = reader
        self._writer = writer
        self._send_buffer_bytes = send_buffer_bytes
        self._closed: asyncio.Task[None] | None = None

    @property
    def open(self) -> bool:
        return not self._writer.is_closing()

    def send(self, message: ControlMessage) -> None:
        """Queue a message; never waits.

        Raises:
            PeerLostError: the stream is closed, or the peer has not read for too long (then it is closed now).
            ValueError: the message exceeds the frame limit.
        """
        frame = encode(message)
        if self._writer.is_closing():
            raise PeerLostError(self.name, "the control stream is closed")
        self._writer.write(frame)
        if self._writer.transport.get_write_buffer_size() > self._send_buffer_bytes:
            self._writer.transport.abort()
            raise PeerLostError(
                self.name, f"does not read its control stream: {self._send_buffer_bytes} bytes are waiting"
            )

    async def receive(self) -> ControlMessage | None:
        """The next message; None at a clean end of the stream.

        Raises:
            PeerLostError: the stream broke, also in the middle of a frame.
            RemoteProtocolError: a frame that is too large or unreadable.
        """
        try:
            try:
                header = await self._reader.readexactly(FRAME_HEADER.size)
            except asyncio.IncompleteReadError as exc:
                if not exc.partial:
                    return None
                raise
            (length,) = FRAME_HEADER.unpack(header)
            if length > MAX_FRAME_BYTES:
                raise RemoteProtocolError(
                    self.name, f"a frame of {length} bytes exceeds the limit of {MAX_FRAME_BYTES}"
                )
            body = await self._reader.readexactly(length)
        except asyncio.IncompleteReadError as exc:
            raise PeerLostError(self.name, "the control stream broke inside a frame") from exc
        except OSError as exc:
            raise PeerLostError(self.name, f"the control stream broke: {exc}") from exc
        return decode(self.name, body)

    async def messages(self) -> AsyncIterator[ControlMessage]:
        """All messages until a clean end."""
        while (message := await self.receive()) is not None:
            yield message

    async def close(self) -> None:
        """Send what is queued, then close. Idempotent, and bounded: a peer that does not read is cut off."""
        if self._closed is None:
            self._writer.close()
            # A task of its own: a cancelled `wait_closed` would leave every later one cancelled too.
            self._closed = asyncio.create_task(self._writer.wait_closed(), name=f"close {self.name}")
            self._closed.add_done_callback(lambda task: task.cancelled() or task.exception())  # a reset is an end too
        _, waiting = await asyncio.wait([self._closed], timeout=CLOSE_S)
        if waiting:
            self._writer.transport.abort()
            await asyncio.wait([self._closed], timeout=CLOSE_S)
