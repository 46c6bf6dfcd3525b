"""The control stream over real sockets of this host: order, ends, breaks, and a peer that does not read."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from rdma_kv import control
from rdma_kv.control import Connection
from rdma_kv.errors import ErrorCode, PeerLostError, RemoteProtocolError
from rdma_kv.messages import FRAME_HEADER, MAX_FRAME_BYTES, Ack, Bye, Done, Finish, Start, encode

LIMIT = 1 << 20  # of unsent bytes


@contextlib.asynccontextmanager
async def streams() -> AsyncIterator[tuple[Connection, asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection, and the bare stream of its peer."""
    left, right = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=left)
    peer_reader, peer_writer = await asyncio.open_connection(sock=right)
    connection = Connection(reader, writer, name="the peer", send_buffer_bytes=LIMIT)
    try:
        yield connection, peer_reader, peer_writer
    finally:
        await connection.close()
        peer_writer.transport.abort()
        with contextlib.suppress(OSError):
            await peer_writer.wait_closed()


async def both() -> tuple[Connection, Connection]:
    """Two connections with each other, over TCP."""
    accepted: asyncio.Future[Connection] = asyncio.get_running_loop().create_future()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted.set_result(Connection(reader, writer, name="dialer", send_buffer_bytes=LIMIT))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    dialed = Connection(reader, writer, name="acceptor", send_buffer_bytes=LIMIT)
    server.close()
    return dialed, await accepted


async def test_frames_arrive_in_order_and_then_the_end():
    one, other = await both()
    sent = [Ack(1, index, 1) for index in range(500)] + [Finish(1, 500, {"data": b"x" * 100_000}), Done(1)]
    for message in sent:
        one.send(message)
    await one.close()
    assert [message async for message in other.messages()] == sent
    assert await other.receive() is None
    await other.close()


async def test_both_directions_are_one_connection():
    one, other = await both()
    for number in range(1, 4):
        one.send(Start(number))
        assert await other.receive() == Start(number)
        other.send(Done(number))
        assert await one.receive() == Done(number)
    await other.close()
    assert await one.receive() is None
    await one.close()


async def test_a_frame_may_come_byte_by_byte():
    async with streams() as (connection, _, writer):
        receiving = asyncio.create_task(connection.receive())
        for byte in encode(Start(7)):
            writer.write(bytes([byte]))
            await writer.drain()
        assert await receiving == Start(7)


async def test_an_end_between_frames_is_clean():
    async with streams() as (connection, _, writer):
        writer.write(encode(Start(7)))
        writer.write_eof()
        assert await connection.receive() == Start(7)
        assert await connection.receive() is None
        assert await connection.receive() is None


FOUR_BYTES = FRAME_HEADER.pack(4) + b"\x81\xa1a\x01"
CUTS = [(frame, cut) for frame in (encode(Start(7)), FOUR_BYTES) for cut in range(1, len(frame))]


@pytest.mark.parametrize(("frame", "cut"), CUTS, ids=lambda v: str(v) if isinstance(v, int) else f"{len(v)} bytes")
async def test_an_end_inside_a_frame_is_a_loss(frame: bytes, cut: int):
    """A frame whose body is as long as a header must not look like a clean end when it is cut before the body."""
    async with streams() as (connection, _, writer):
        writer.write(frame[:cut])
        writer.write_eof()
        with pytest.raises(PeerLostError, match="broke inside a frame") as lost:
            await connection.receive()
        assert lost.value.peer == "the peer"


async def test_a_reset_is_a_loss():
    class Broken(asyncio.StreamReader):
        async def read(self, n: int = -1) -> bytes:
            raise ConnectionResetError(f"reset, {n} bytes were wanted")

    async with streams() as (connection, _, _writer):
        connection._reader = Broken()
        with pytest.raises(PeerLostError, match="reset"):
            await connection.receive()


@pytest.mark.parametrize("length", [MAX_FRAME_BYTES + 1, (1 << 32) - 1])
async def test_a_length_beyond_the_limit_is_refused_before_the_body_comes(length: int):
    async with streams() as (connection, _, writer):
        writer.write(FRAME_HEADER.pack(length))
        with pytest.raises(RemoteProtocolError, match=f"a frame of {length} bytes") as refused:
            await connection.receive()
        assert refused.value.peer == "the peer"


async def test_the_largest_frame_is_taken():
    """The stream's own buffer limit is smaller than a frame; that must not matter."""
    one, other = await both()
    spare = MAX_FRAME_BYTES - len(encode(Finish(1, 0, {"a": b"x" * 70_000}))) + FRAME_HEADER.size + 70_000
    message = Finish(1, 0, {"a": b"x" * spare})
    frame = encode(message)
    assert len(frame) == FRAME_HEADER.size + MAX_FRAME_BYTES
    one.send(message)
    assert await other.receive() == message
    await one.close()
    await other.close()


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x80", b"not MessagePack", encode(Start(7))], ids=repr)
async def test_p79_an_unreadable_frame_is_a_typed_error(body: bytes):
    async with streams() as (connection, _, writer):
        writer.write(FRAME_HEADER.pack(len(body)) + body)
        with pytest.raises(RemoteProtocolError, match="unreadable control message"):
            await connection.receive()


async def test_a_peer_that_does_not_read_is_given_up():
    """It costs the limit and one frame, never more, and is noticed while sending; nothing waits."""
    async with streams() as (connection, _, _writer):
        message = Finish(1, 0, {"data": b"x" * 50_000})
        sent = 0
        with pytest.raises(PeerLostError, match=f"does not read its control stream: {LIMIT} bytes"):
            while sent < 1000:
                connection.send(message)
                sent += 1
        assert sent * 50_000 > LIMIT
        assert sent < 1000
        assert not connection.open
        with pytest.raises(PeerLostError, match="is closed"):
            connection.send(Start(1))


async def test_nothing_is_sent_on_a_closed_connection():
    async with streams() as (connection, _, _writer):
        assert connection.open
        await connection.close()
        assert not connection.open
        with pytest.raises(PeerLostError, match="is closed"):
            connection.send(Start(1))


async def test_a_message_that_is_too_large_is_our_error_and_the_link_stays():
    async with streams() as (connection, reader, _writer):
        with pytest.raises(ValueError, match="exceeds the frame limit"):
            connection.send(Finish(1, 0, {"data": bytes(MAX_FRAME_BYTES)}))
        connection.send(Start(7))
        assert await reader.readexactly(len(encode(Start(7)))) == encode(Start(7))


async def test_what_is_queued_goes_out_before_the_close():
    async with streams() as (connection, reader, _writer):
        message = Finish(1, 0, {"data": b"x" * 400_000})
        connection.send(message)
        connection.send(Bye(ErrorCode.CLOSED, "", "closing"))
        _, received = await asyncio.gather(connection.close(), reader.read(-1))
        assert received == encode(message) + encode(Bye(ErrorCode.CLOSED, "", "closing"))


async def test_close_is_idempotent_also_at_once():
    async with streams() as (connection, _, writer):
        await asyncio.gather(connection.close(), connection.close())
        await connection.close()
        writer.transport.abort()
        await connection.close()


async def test_close_cuts_a_peer_off_that_does_not_read(monkeypatch: pytest.MonkeyPatch):
    """The close is bounded (here its time is over at once), for all who close, and again later."""
    monkeypatch.setattr(control, "CLOSE_S", 0.001)
    async with streams() as (connection, _, _writer):
        connection.send(Finish(1, 0, {"data": b"x" * 900_000}))
        await asyncio.gather(connection.close(), connection.close())
        assert connection._writer.transport.get_write_buffer_size() == 0
        await connection.close()


async def test_a_cancelled_close_does_not_spoil_the_next_one(monkeypatch: pytest.MonkeyPatch):
    async with streams() as (connection, _, _writer):
        connection.send(Finish(1, 0, {"data": b"x" * 900_000}))
        closing = asyncio.create_task(connection.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        monkeypatch.setattr(control, "CLOSE_S", 0.001)
        await connection.close()
        assert not connection.open
