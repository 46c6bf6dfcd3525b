"""The control stream: one framed, typed message after the other over an asyncio stream.

A TCP stream does not lose single frames; it breaks. Then `messages` ends or raises, and whoever owns the connection decides
what that means for its transfers.

Messages that nobody waits for leave together with the next one, at the latest in the next turn of the loop, and those that
came together are read together: a system call and a wake-up of the peer cost more than a message.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Final

from rdma_kv.errors import PeerLostError, RemoteProtocolError
from rdma_kv.messages import FRAME_HEADER, MAX_FRAME_BYTES, Ack, ControlMessage, Release, decode, encode

CLOSE_S: Final = 1.0  # for what is queued, while closing
READ_BYTES: Final = 64 << 10
TURN_S: Final = 0.001  # of messages that have come, before the loop gets its turn
_CAN_WAIT: Final = (Ack, Release)
_MOST_UNSENT_BYTES: Final = 64 << 10


class Connection:
    """One open control stream, owned by the peer object that uses it.

    Args:
        name: the peer, for errors.
        send_buffer_bytes: more unsent bytes than that mean that the peer does not read; the link is given up.
        hello_bytes: longest frame that is taken before `greeted`.

    Attributes:
        refused_bytes: length of the frame that was refused for its length; 0 for none.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        name: str,
        send_buffer_bytes: int,
        hello_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.name = name
        self._reader = reader
        self._writer = writer
        self._send_buffer_bytes = send_buffer_bytes
        self._unsent: list[bytes] = []  # frames
        self._unsent_bytes = 0
        self._received = bytearray()
        self._turn_ends = 0.0
        self._closed: asyncio.Task[None] | None = None
        self._longest_bytes = hello_bytes
        self.refused_bytes = 0

    @property
    def address(self) -> str:
        """Of the other end; empty where it has none."""
        return peer_address(self._writer)

    def greeted(self) -> None:
        """The handshake is over: frames may have their full length from here on."""
        self._longest_bytes = MAX_FRAME_BYTES

    def wait(self) -> None:
        """Leave what comes in the kernel's buffer until `go_on`: nobody reads now, and our memory would fill."""
        self._writer.transport.pause_reading()  # type: ignore[attr-defined]

    def go_on(self) -> None:
        self._writer.transport.resume_reading()  # type: ignore[attr-defined]

    @property
    def open(self) -> bool:
        return not self._writer.is_closing()

    @property
    def ended(self) -> bool:
        """Whether the peer has ended its side, and nothing that it said is left to read."""
        return self._reader.at_eof() and not self._received

    def send(self, message: ControlMessage) -> None:
        """Queue a message; never waits.

        Raises:
            PeerLostError: the stream is closed, or the peer has not read for too long (then it is closed now).
            ValueError: the message exceeds the frame limit.
        """
        frame = encode(message)
        if self._writer.is_closing():
            raise PeerLostError(self.name, "the control stream is closed")
        self._unsent.append(frame)
        self._unsent_bytes += len(frame)
        if not isinstance(message, _CAN_WAIT) or self._unsent_bytes > _MOST_UNSENT_BYTES:
            self._send_all()
        elif len(self._unsent) == 1:
            asyncio.get_running_loop().call_soon(self._send_all)
        if self._writer.transport.get_write_buffer_size() > self._send_buffer_bytes:
            self._writer.transport.abort()
            raise PeerLostError(
                self.name, f"does not read its control stream: {self._send_buffer_bytes} bytes are waiting"
            )

    def _send_all(self) -> None:
        frames, self._unsent, self._unsent_bytes = self._unsent, [], 0
        if frames and not self._writer.is_closing():
            self._writer.write(b"".join(frames))

    async def receive(self) -> ControlMessage | None:
        """The next message; None at a clean end of the stream.

        Raises:
            PeerLostError: the stream broke, also in the middle of a frame.
            RemoteProtocolError: a frame that is too large or unreadable.
        """
        body = await self.frame()
        return None if body is None else decode(self.name, body)

    async def frame(self) -> bytes | None:
        """The next message as it came, not looked at; None at a clean end of the stream.

        Raises:
            PeerLostError: the stream broke, also in the middle of a frame.
            RemoteProtocolError: a frame that is too large. Nothing is read any more.
        """
        while (body := self._next_frame()) is None:
            try:
                more = await self._reader.read(READ_BYTES)
            except OSError as exc:
                raise PeerLostError(self.name, f"the control stream broke: {exc}") from exc
            self._turn_ends = time.perf_counter() + TURN_S
            if not more:
                if self._received:
                    raise PeerLostError(self.name, "the control stream broke inside a frame")
                return None
            self._received += more
        if time.perf_counter() >= self._turn_ends:
            await asyncio.sleep(0)
            self._turn_ends = time.perf_counter() + TURN_S
        return body

    async def drop_refused(self) -> None:
        """Read the rest of a frame that was refused for its length, and forget it. Returns at the end of the stream too.

        Closed with bytes unread, the stream would be reset, and its peer might never read why.
        """
        left = FRAME_HEADER.size + self.refused_bytes - len(self._received)
        self._received.clear()
        try:
            while left > 0 and (more := await self._reader.read(READ_BYTES)):
                left -= len(more)
        except OSError:
            return  # the peer does not want to know

    def _next_frame(self) -> bytes | None:
        """Take the body of the next frame out of what has come, if it is there whole."""
        start = FRAME_HEADER.size
        if len(self._received) < start:
            return None
        (length,) = FRAME_HEADER.unpack_from(self._received)
        if length > self._longest_bytes:
            self.refused_bytes = length
            text = f"a frame of {length} bytes exceeds the limit of {self._longest_bytes}"
            if length <= MAX_FRAME_BYTES:
                text += " before the handshake; raise limits.hello_bytes on the side that says so"
            raise RemoteProtocolError(self.name, text)
        if len(self._received) < start + length:
            return None
        body = bytes(memoryview(self._received)[start : start + length])
        del self._received[: start + length]
        return body

    async def messages(self) -> AsyncIterator[ControlMessage]:
        """All messages until a clean end."""
        while (message := await self.receive()) is not None:
            yield message

    def abort(self) -> None:
        """Cut the stream off: nothing that is queued is sent any more. `close` it all the same."""
        self._writer.transport.abort()

    async def close(self) -> None:
        """Send what is queued, then close. Idempotent, and bounded: a peer that does not read is cut off."""
        if self._closed is None:
            self._send_all()
            self._writer.close()
            # A task of its own: a cancelled `wait_closed` would leave every later one cancelled too.
            self._closed = asyncio.create_task(self._writer.wait_closed(), name=f"close {self.name}")
            self._closed.add_done_callback(lambda task: task.cancelled() or task.exception())  # a reset is an end too
        _, waiting = await asyncio.wait([self._closed], timeout=CLOSE_S)
        if waiting:
            self._writer.transport.abort()
            await asyncio.wait([self._closed], timeout=CLOSE_S)


def peer_address(writer: asyncio.StreamWriter) -> str:
    """The address of a stream's other end; empty where it has none."""
    name = writer.get_extra_info("peername")
    return str(name[0]) if isinstance(name, tuple) and name else ""
