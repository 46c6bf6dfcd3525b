"""The control port and strangers: what they can cost, and that peers come in beside them. Real sockets of this host.

Linux answers on all of 127.0.0.0/8, so strangers dial from 127.0.0.2 and up; the registry of the rig lists 127.0.0.1.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from links_rig import LIMIT_S, MODEL, QUICK, TOPOLOGY, Node, Recorder, Rig, identity, rig, until

from rdma_kv.agent import Agent
from rdma_kv.config import Limits, Timeouts
from rdma_kv.errors import ErrorCode, RemoteProtocolError
from rdma_kv.links import Links
from rdma_kv.messages import FRAME_HEADER, MAX_FRAME_BYTES, Bye, Finish, Start, decode, encode
from rdma_kv.protocol.link import Identity
from rdma_kv.registry.static import StaticRegistry
from rdma_kv.session import AgentConfig
from rdma_kv.transport.loopback import LoopbackNetwork, LoopbackTransport
from rdma_kv.types import Role

STRANGER, OTHER = "127.0.0.2", "127.0.0.3"
FLOOD = 500  # connections
LAG_BUDGET_S = 0.010
SLACK = 3.0  # of a busy machine
GARBAGE = FRAME_HEADER.pack(3) + b"GET"
CALM = Timeouts(heartbeat=2.0, lease=60.0, connect=60.0)  # nothing ends by a deadline here
ENDLESS = Limits(
    ungreeted=100_000,
    ungreeted_per_address=100_000,
    handshakes_per_s=1e9,
    handshake_burst=1_000_000,
    hello_bytes=1 << 20,
)


class Stranger:
    """A connection that says what it is told to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def says(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def hears(self) -> bytes:
        """All that comes until the stream has ended, or was reset."""
        async with asyncio.timeout(LIMIT_S):
            heard = b""
            with contextlib.suppress(ConnectionError):
                while more := await self.reader.read(1 << 16):
                    heard += more
            return heard

    async def bye(self) -> Bye:
        heard = await self.hears()
        message = decode("the agent", heard[FRAME_HEADER.size :])
        assert isinstance(message, Bye)
        return message

    @property
    def ended(self) -> bool:
        return self.reader.at_eof() or self.reader.exception() is not None


class Crowd:
    """Strangers, all of which are gone at the end."""

    def __init__(self) -> None:
        self.members: list[Stranger] = []

    async def dial(self, node: Node | int, address: str = STRANGER) -> Stranger:
        port = node if isinstance(node, int) else node.port
        streams = await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0))
        self.members.append(Stranger(*streams))
        return self.members[-1]


@contextlib.asynccontextmanager
async def crowd() -> AsyncIterator[Crowd]:
    made = Crowd()
    try:
        yield made
    finally:
        for member in made.members:
            member.writer.transport.abort()
        for member in made.members:
            with contextlib.suppress(OSError):
                await member.writer.wait_closed()


async def gone(node: Node) -> None:
    """Nothing is left of strangers."""
    await until(lambda: node.links.ungreeted == 0 and not node.links._acceptor._visits)
    await until(lambda: len(node.links._connections.open) == len(node.links.peers))


async def greets(r: Rig, acceptor: Node) -> Node:
    """A registered peer dials, and is let in."""
    r.publish(acceptor)
    role = acceptor.identity.id.role
    dialer = await r.node(role.other, timeouts=CALM)
    async with asyncio.timeout(LIMIT_S):
        peer = await dialer.links.peer(r.book.record(role))
    await until(lambda: acceptor.links.peers)
    assert peer.identity == acceptor.identity
    return dialer


# --- a flood -----------------------------------------------------------------------------------------------------------

# Another process, so that it takes no time of the loop that is measured. It dials as fast as it can, sends what it is told
# to, and dials again for each connection that was closed, until its input ends. It says when it has dialed FLOOD times.
FLOODER = """
import select, socket, sys
port, source, many = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
words = bytes.fromhex(sys.argv[4])
poll, open_, dialed, told = select.poll(), {}, 0, False
poll.register(0, select.POLLIN | select.POLLHUP)
while True:
    while len(open_) < many:
        one = socket.socket()
        one.bind((source, 0))
        one.setblocking(False)
        one.connect_ex(("127.0.0.1", port))
        poll.register(one, select.POLLOUT)
        open_[one.fileno()] = one
        dialed += 1
    if not told:
        told = True
        print("dialed", flush=True)
    for fd, event in poll.poll():
        if fd == 0:
            sys.exit(0)
        one = open_[fd]
        try:
            if event & select.POLLOUT:
                one.send(words or b"")
                poll.modify(fd, select.POLLIN)
            elif not one.recv(65536):
                raise ConnectionResetError
        except BlockingIOError:
            pass
        except OSError:
            poll.unregister(fd)
            del open_[fd]
            one.close()
"""


@contextlib.asynccontextmanager
async def flood(node: Node, words: bytes, address: str = STRANGER) -> AsyncIterator[None]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-c", FLOODER, str(node.port), address, str(FLOOD), words.hex(),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        async with asyncio.timeout(LIMIT_S):
            assert await child.stdout.readline() == b"dialed\n"
        yield
        assert child.returncode is None, "it must have gone on all the time"
    finally:
        child.stdin.close()
        await child.wait()


class Lag:
    """How long single turns of the loop take, in its own processor time: what else this machine does does not count."""

    def __init__(self) -> None:
        self.worst_s = 0.0
        self.turns = 0

    async def _watch(self) -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            self.worst_s = max(self.worst_s, now - before)
            self.turns += 1
            before = now

    async def __aenter__(self) -> Lag:
        gc.collect()
        gc.disable()  # a collection of all that pytest holds is not the port's doing
        self._task = asyncio.create_task(self._watch())
        await asyncio.sleep(0)  # it watches from here on
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
        gc.enable()


HALF = FRAME_HEADER.pack(Limits().hello_bytes) + bytes(10_000)


@pytest.mark.parametrize(
    ("words", "address"),
    [
        pytest.param(b"", STRANGER, id="silent"),
        pytest.param(HALF, STRANGER, id="half a frame"),
        pytest.param(GARBAGE, STRANGER, id="garbage"),
        # HELLO after HELLO from a peer's own address would use up its tokens, as `protocol.border` says.
        pytest.param(b"", "127.0.0.1", id="silent, from the peer's address"),
        pytest.param(HALF, "127.0.0.1", id="half a frame, from the peer's address"),
    ],
)
async def test_a_flood_of_500_does_not_stop_the_loop_nor_keep_a_peer_out(words: bytes, address: str):
    limits = Limits()
    async with rig() as r:
        node = await r.node(Role.DECODE, timeouts=CALM)
        most = 0
        async with flood(node, words, address), Lag() as lag:  # in this order: to start a process takes a long turn
            await until(lambda: node.links.counters.total() >= FLOOD)
            dialer = await greets(r, node)
            sent = node.links.counters.total()
            while node.links.counters.total() < sent + FLOOD:  # the link lives in the flood
                dialer.peer.send(Start(1))
                await asyncio.sleep(0)
                most = max(most, node.links.ungreeted)
            await until(lambda: node.user.messages)
            assert node.links.peers == (node.peer,)
        assert most <= limits.ungreeted
        assert most <= limits.ungreeted_per_address + 1
        print(f"worst turn {lag.worst_s * 1e3:.1f} ms of {lag.turns}, {dict(node.links.counters)}")
        assert lag.worst_s < SLACK * LAG_BUDGET_S
        await gone(node)


async def test_without_bounds_all_of_a_flood_are_kept():
    """The control of the test above: of the numbers."""
    async with rig() as r:
        node = await r.node(Role.DECODE, timeouts=CALM, limits=ENDLESS)
        async with flood(node, HALF):
            await until(lambda: node.links.ungreeted == FLOOD)
            assert not node.links.counters
        await gone(node)


async def test_the_lag_of_a_loop_is_seen():
    """The control of the test above: of the time."""
    async with Lag() as lag:
        end = time.thread_time() + SLACK * LAG_BUDGET_S
        while time.thread_time() < end:
            pass
        await asyncio.sleep(0)
    assert lag.worst_s >= SLACK * LAG_BUDGET_S


# --- numbers -----------------------------------------------------------------------------------------------------------


async def test_the_oldest_connection_of_an_address_makes_room():
    async with rig() as r, crowd() as strangers:
        node = await r.node(Role.DECODE, timeouts=CALM, limits=Limits(ungreeted_per_address=2))
        first, second = [await strangers.dial(node) for _ in range(2)]
        elsewhere = await strangers.dial(node, OTHER)
        await until(lambda: node.links.ungreeted == 3)
        assert not node.links.counters
        third = await strangers.dial(node)
        assert await first.hears() == b""
        assert node.links.counters == {"refused_crowd": 1}
        assert node.links.ungreeted == 3
        await third.says(GARBAGE)
        assert (await third.bye()).code is ErrorCode.REMOTE_PROTOCOL
        assert not second.ended
        assert not elsewhere.ended
    await gone(node)


async def test_in_all_there_are_no_more_than_the_limit():
    async with rig() as r, crowd() as strangers:
        node = await r.node(Role.DECODE, timeouts=CALM, limits=Limits(ungreeted=3))
        members = [await strangers.dial(node, f"127.0.1.{number + 1}") for number in range(10)]
        await until(lambda: node.links.counters["refused_crowd"] == 7)
        assert node.links.ungreeted == 3
        await until(lambda: sum(member.ended for member in members) == 7)
        await greets(r, node)
        assert node.links.counters == {"refused_crowd": 7}, "a registered address has a share of its own"
    await gone(node)


async def test_connections_that_come_faster_than_they_are_served_leave_nothing_behind():
    """With room for one, many are ended before their task has begun."""
    async with rig() as r, crowd() as strangers:
        node = await r.node(Role.DECODE, timeouts=CALM, limits=Limits(ungreeted=1))
        async with asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(strangers.dial(node, f"127.0.1.{number + 1}"))
        await until(lambda: node.links.counters["refused_crowd"] == 49)
        assert node.links.ungreeted == 1
        await until(lambda: node.links.open_tasks == 1 and len(node.links._connections.open) == 1)
    await gone(node)
    assert node.links.open_tasks == 0


async def test_an_agent_closes_with_strangers_at_its_door():
    async with crowd() as strangers:
        async with rig() as r:
            node = await r.node(Role.DECODE, timeouts=CALM)
            members = [await strangers.dial(node) for _ in range(10)]
            await until(lambda: node.links.ungreeted == 10)
        for member in members:
            assert await member.hears() == b""
    await gone(node)


async def test_one_that_says_nothing_is_closed_at_the_deadline():
    async with rig() as r, crowd() as strangers:
        node = await r.node(Role.DECODE, timeouts=replace(QUICK, connect=0.05))
        member = await strangers.dial(node)
        assert await member.hears() == b""
        assert node.links.counters == {"refused_late": 1}
    await gone(node)


# --- handshakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("burst", [2, 3], ids=["bounded", "control: one more"])
async def test_handshakes_beyond_the_rate_are_closed_unread(burst: int):
    limits = Limits(handshake_burst=burst, handshakes_per_s=1e-6)
    async with rig() as r, crowd() as strangers:
        node = await r.node(Role.DECODE, timeouts=CALM, limits=limits)
        for _ in range(2):
            member = await strangers.dial(node)
            await member.says(GARBAGE)
            assert "unreadable" in (await member.bye()).message
        third = await strangers.dial(node)
        await third.says(GARBAGE)
        if burst == 3:
            assert "unreadable" in (await third.bye()).message
        else:
            assert await third.hears() == b""
            assert node.links.counters == {"refused_rate": 1}
        await greets(r, node)
    await gone(node)


async def test_a_peer_whose_handshake_came_too_often_gets_in_when_there_is_a_token_again():
    limits = Limits(handshake_burst=1, handshakes_per_s=10.0)
    async with rig() as r, crowd() as strangers:
        node = await r.node(Role.DECODE, timeouts=CALM, limits=limits)
        member = await strangers.dial(node, "127.0.0.1")
        await member.says(GARBAGE)
        await member.bye()
        await greets(r, node)
        assert node.links.counters["refused_rate"] >= 1


# --- length and memory -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [Limits(hello_bytes=2048), Limits()], ids=["bounded", "control: the default"])
async def test_a_first_frame_is_bounded_and_later_ones_are_not(limits: Limits):
    long = replace(MODEL, fingerprint="f" * 2000)
    async with rig() as r:
        node = await r.node(Role.DECODE, timeouts=CALM, limits=limits, model=long)
        dialer = await r.node(Role.PREFILL, timeouts=CALM, model=long)
        r.publish(node)
        if limits == Limits():
            async with asyncio.timeout(LIMIT_S):
                peer = await dialer.links.peer(r.book.record(Role.DECODE))
            finish = Finish(1, 0, {"x": b"y" * 500_000})
            assert len(encode(finish)) > limits.hello_bytes
            peer.send(finish)
            await until(lambda: node.user.messages)
            assert node.user.messages == [finish]
            return
        with pytest.raises(RemoteProtocolError, match=r"exceeds the limit of 2048.*raise limits\.hello_bytes"):
            async with asyncio.timeout(LIMIT_S):
                await dialer.links.peer(r.book.record(Role.DECODE))
        assert node.links.counters == {"refused_length": 1}
        await gone(node)


async def test_who_sends_a_whole_long_frame_reads_why_it_is_refused():
    """Closed with bytes unread, the connection would be reset, and the answer might be lost."""
    async with rig() as r, crowd() as strangers:
        node = await r.node(Role.DECODE, timeouts=CALM)
        member = await strangers.dial(node)
        member.writer.write(FRAME_HEADER.pack(MAX_FRAME_BYTES) + bytes(MAX_FRAME_BYTES))
        bye = await member.bye()
        assert bye.code is ErrorCode.REMOTE_PROTOCOL
        assert f"a frame of {MAX_FRAME_BYTES} bytes" in bye.message
        assert member.reader.exception() is None
    await gone(node)


def held_bytes(node: Node) -> int:
    """What our process holds of connections that are no links."""
    connections = [connection for connection, _ in node.links._acceptor._visits.values()]
    return sum(len(each._received) + len(each._reader._buffer) for each in connections)  # type: ignore[attr-defined]


@pytest.mark.parametrize("limits", [Limits(hello_bytes=4096), ENDLESS], ids=["bounded", "control: the whole frame"])
async def test_half_sent_frames_cost_bounded_memory(limits: Limits):
    count, length = 10, limits.hello_bytes
    async with rig() as r, crowd() as strangers:
        node = await r.node(Role.DECODE, timeouts=CALM, limits=limits)
        for _ in range(count):
            member = await strangers.dial(node)
            await member.says(FRAME_HEADER.pack(length) + bytes(length - 1))
        await until(lambda: held_bytes(node) == count * (FRAME_HEADER.size + length - 1))
        longer = await strangers.dial(node)
        await longer.says(FRAME_HEADER.pack(length + 1))
        assert (await longer.bye()).code is ErrorCode.REMOTE_PROTOCOL
        assert held_bytes(node) == count * (FRAME_HEADER.size + length - 1)


async def test_before_the_pools_are_there_nothing_is_read():
    """The kernel holds what comes, and no more of it than a socket's buffers."""
    ready = asyncio.Event()
    who = identity(Role.DECODE, CALM)

    async def own() -> Identity:
        await ready.wait()
        return who

    async with rig() as r, crowd() as strangers:
        links = Links(own, r.book, Recorder(), timeouts=CALM, limits=Limits())
        node = Node(links, Recorder(), who)
        r.nodes.append(node)
        _, node.port = await links.start("127.0.0.1", 0)
        member = await strangers.dial(node)
        raw: socket.socket = member.writer.get_extra_info("socket")
        member.writer.write(HALF * 1000)
        async with asyncio.timeout(LIMIT_S):
            while node.links.ungreeted == 0 or member.writer.transport.get_write_buffer_size() == 0:
                await asyncio.sleep(0)
        assert raw.fileno() >= 0
        assert held_bytes(node) == 0
        ready.set()
        await until(
            lambda: held_bytes(node) or node.links.counters or not node.links.ungreeted
        )  # control: now it is read


# --- the log -----------------------------------------------------------------------------------------------------------


async def test_a_flood_is_a_line_a_second(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO, logger="rdma_kv")
    async with rig() as r, crowd() as strangers:
        node = await r.node(Role.DECODE, timeouts=CALM, limits=Limits(ungreeted_per_address=1))
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(50):
            await strangers.dial(node)
        await until(lambda: node.links.counters["refused_crowd"] == 49)
        for _ in range(20):
            member = await strangers.dial(node, OTHER)
            await member.says(GARBAGE)
            await member.bye()
        seconds = loop.time() - began
    closed = [record for record in caplog.records if record.getMessage().startswith(f"a connection of {STRANGER}")]
    refused = [record for record in caplog.records if record.getMessage().startswith("refused a connection")]
    assert 1 <= len(closed) <= 1 + seconds
    assert closed[0].levelno == logging.WARNING
    assert 1 <= len(refused) <= 1 + seconds


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "127.0.0.1:0"], ids=["off loopback", "control: loopback"])
async def test_listening_off_loopback_warns_with_the_address_and_what_to_do(tmp_path, caplog, listen: str):
    config = AgentConfig("p", Role.PREFILL, (0,), TOPOLOGY, MODEL, listen=listen, allow_plaintext=True)
    network = LoopbackNetwork()
    registry = StaticRegistry(tmp_path / "none")
    async with Agent(config, registry, transport=lambda name: LoopbackTransport(network, name)) as agent:
        host, port = agent.address
        stats = agent.stats()
    warned = [record.getMessage() for record in caplog.records if "plaintext" in record.getMessage()]
    if host == "127.0.0.1":
        assert not warned
    else:
        (text,) = warned
        assert f"{host}:{port}" in text
        assert re.search("firewall|listen on", text)
    assert stats["ungreeted"] == 0
