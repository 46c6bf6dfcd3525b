"""What comes over the socket from somebody who lies, has a bug, or may not come at all: it harms nobody else."""

from __future__ import annotations

import asyncio
import gc
import grp
import os
import random
import socket
import stat
import struct
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from inside_rig import Liar, engines, honest_work, one_sidecar, settings, write_registry
from sidecar_rig import DECODE, PAGES, PREFILL, TOKENS, engine_config, engine_memory

from rdma_kv.client import Client
from rdma_kv.errors import ConfigError, ErrorCode, IncompatiblePeerError, SidecarLostError, TransferAborted
from rdma_kv.protocol.link import Process
from rdma_kv.sidecar import attachment, server
from rdma_kv.sidecar.facts import attach_of
from rdma_kv.sidecar.server import Sidecar
from rdma_kv.sidecar.status import ask_status
from rdma_kv.sidecar.wire import MAX_FIRST_FRAME_BYTES, Attach, Cancel, Mapped, Work, encode
from rdma_kv.types import Role


async def move(clients, memory, request: int) -> None:
    """One request, checked."""
    memory[Role.PREFILL].fill(request, PAGES, TOKENS)

    async def send() -> None:
        async with clients[Role.PREFILL].send(f"k{request}", 0, PAGES, to=DECODE, tokens=TOKENS, timeout_s=10) as out:
            await out.push()

    receiving = clients[Role.DECODE].receive(f"k{request}", 0, PAGES, source=PREFILL, tokens=TOKENS, timeout_s=10)
    await asyncio.gather(send(), receiving)
    memory[Role.DECODE].check(request, PAGES, 0, TOKENS)


# --- who may come ------------------------------------------------------------------------------------------------------


async def test_a_stranger_is_refused_by_name(tmp_path):
    async with one_sidecar(tmp_path, allowed_uids=()) as sidecar:
        client = Client(engine_config(Role.PREFILL), sidecar.config.socket)
        with pytest.raises(ConfigError, match=rf"user {os.getuid()} may not attach") as caught:
            await client.start()
        assert caught.value.field == "allowed_uids"
        await client.close()
        with pytest.raises(ConfigError) as caught:
            await ask_status(sidecar.config.socket)
        assert caught.value.field == "allowed_uids"


async def test_the_socket_is_its_owners(tmp_path):
    async with one_sidecar(tmp_path) as sidecar:
        assert stat.S_IMODE(sidecar.config.socket.stat().st_mode) == 0o600
    assert not sidecar.config.socket.exists()
    group = grp.getgrgid(os.getgid()).gr_name
    async with one_sidecar(tmp_path, socket_group=group) as sidecar:
        found = sidecar.config.socket.stat()
        assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o660, os.getgid())


async def test_one_sidecar_per_path_and_stale_sockets_go(tmp_path):
    async with one_sidecar(tmp_path) as sidecar:
        with pytest.raises(ConfigError, match="served by another sidecar") as caught:
            await Sidecar(sidecar.config).start()
        assert caught.value.field == "socket"
        assert (await ask_status(sidecar.config.socket))["ready"]
    with socket.socket(socket.AF_UNIX) as left:  # of a process that was killed
        left.bind(str(sidecar.config.socket))
    async with one_sidecar(tmp_path) as sidecar:
        assert (await ask_status(sidecar.config.socket))["ready"]
    sidecar.config.socket.write_text("somebody's")
    with pytest.raises(ConfigError, match="no socket"):
        await Sidecar(sidecar.config).start()
    assert sidecar.config.socket.read_text() == "somebody's"


async def test_a_second_engine_with_a_live_identity_is_refused_by_name(tmp_path):
    async with one_sidecar(tmp_path) as sidecar, engines(tmp_path, sidecar) as (clients, memory):
        twin = Client(engine_config(Role.PREFILL), sidecar.config.socket)
        with pytest.raises(IncompatiblePeerError, match="attached already, by") as caught:
            await twin.start()
        assert caught.value.field == "identity"
        await twin.close()
        await move(clients, memory, 1)
        await clients[Role.PREFILL].close()
        async with Client(engine_config(Role.PREFILL), sidecar.config.socket):
            pass  # the former one has ended


async def test_what_cannot_work_is_named_by_the_sidecar(tmp_path):
    """Of another version, of a role that is none, a GPU that is not there: the client raises it at once."""
    async with one_sidecar(tmp_path) as sidecar:
        good = attach_of(engine_config(Role.PREFILL), None, Process())
        for changes, kind, field in (
            ({"version": 99}, IncompatiblePeerError, "version"),
            ({"role": "both"}, ConfigError, "role"),
            ({"ranks": [7]}, ConfigError, "rank"),
        ):
            facts = {name: getattr(good, name) for name in good.__struct_fields__}
            bad = Attach(**facts | changes)
            client = Client(engine_config(Role.PREFILL), sidecar.config.socket)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("rdma_kv.sidecar.engine_client.attach_of", lambda *_, bad=bad: bad)
                with pytest.raises(kind) as caught:
                    await client.start()
            assert caught.value.field == field
            await client.close()


async def test_nobody_serves_the_socket(tmp_path):
    client = Client(engine_config(Role.PREFILL), tmp_path / "none.sock", start_s=0.2)
    with pytest.raises(SidecarLostError, match=r"not reached within 0\.2 s") as caught:
        await client.start()
    assert caught.value.retryable
    await client.close()


# --- garbage -----------------------------------------------------------------------------------------------------------


async def open_raw(path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_unix_connection(path)


async def test_garbage_harms_nobody_else(tmp_path):
    """Random bytes, random frames, and valid messages in the wrong place, while requests move."""
    rnd = random.Random(7)
    async with one_sidecar(tmp_path) as sidecar, engines(tmp_path, sidecar) as (clients, memory):
        good = encode(attach_of(engine_config(Role.PREFILL), None, Process()))
        for number in range(60):
            reader, writer = await open_raw(sidecar.config.socket)
            kind = number % 4
            if kind == 0:
                writer.write(rnd.randbytes(rnd.randrange(1, 400)))
            elif kind == 1:
                body = rnd.randbytes(rnd.randrange(1, 200))
                writer.write(struct.pack(">I", len(body)) + body)
            elif kind == 2:
                writer.write(encode(Cancel(1)))
            else:
                flipped = bytearray(good)
                flipped[rnd.randrange(4, len(flipped))] ^= 1 << rnd.randrange(8)
                writer.write(bytes(flipped))
            writer.write_eof()
            async with asyncio.timeout(10):
                await reader.read()
            writer.close()
            await writer.wait_closed()
            if number % 10 == 0:
                await move(clients, memory, number)
        await move(clients, memory, 99)
        async with asyncio.timeout(10):
            while len(sidecar.attachments) > 2:
                await asyncio.sleep(0)


async def test_an_engine_that_sends_garbage_loses_its_own_agent_alone(tmp_path):
    async with one_sidecar(tmp_path) as sidecar, engines(tmp_path, sidecar) as (clients, memory):
        await move(clients, memory, 1)
        before = clients[Role.DECODE].name
        link = clients[Role.PREFILL]._link
        link._channel.send(struct.pack(">I", 3) + b"\xc1\xc1\xc1")
        async with asyncio.timeout(10):
            await link.ended.wait()
        assert isinstance(link.error, SidecarLostError)
        assert "unreadable" in str(link.error)
        await clients[Role.PREFILL].stats()  # it is back by itself
        assert clients[Role.DECODE].name == before
        write_registry(tmp_path, clients)
        await move(clients, memory, 2)


@pytest.mark.parametrize("how_far", ["attach", "mapped twice", "calls early"])
async def test_an_engine_that_goes_wrong_while_it_attaches(tmp_path, how_far):
    """It ends before it has mapped its staging, or says what it cannot say yet; the next one attaches as usual."""
    async with one_sidecar(tmp_path) as sidecar:
        reader, writer = await open_raw(sidecar.config.socket)
        writer.write(encode(attach_of(engine_config(Role.PREFILL), None, Process())))
        async with asyncio.timeout(10):
            assert b"segment" in await reader.read(100)  # it waits for the mapping now
            if how_far == "mapped twice":
                writer.write(2 * encode(Mapped(0)))
            elif how_far == "calls early":
                writer.write(encode(Cancel(1)))
            writer.write_eof()
            await reader.read()
        writer.close()
        await writer.wait_closed()
        async with engines(tmp_path, sidecar) as (clients, memory):
            await move(clients, memory, 1)
            assert len(sidecar.attachments) == 2


async def test_a_frame_beyond_the_limit_ends_the_connection(tmp_path):
    async with one_sidecar(tmp_path) as sidecar:
        reader, writer = await open_raw(sidecar.config.socket)
        writer.write(struct.pack(">I", MAX_FIRST_FRAME_BYTES + 1))
        async with asyncio.timeout(10):
            assert b"exceeds the limit" in await reader.read()
        writer.close()
        await writer.wait_closed()


async def test_connections_that_do_not_attach_are_few_and_short(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "MAX_UNATTACHED", 3)
    monkeypatch.setattr(attachment, "FIRST_S", 0.1)
    async with one_sidecar(tmp_path) as sidecar:
        raw = [await open_raw(sidecar.config.socket) for _ in range(4)]
        async with asyncio.timeout(10):
            assert b"have not attached yet" in await raw[3][0].read()
            for reader, _ in raw[:3]:
                assert b"has not attached within" in await reader.read()
        for _, writer in raw:
            writer.close()
            await writer.wait_closed()
        assert (await ask_status(sidecar.config.socket))["agents"] == []


async def test_descriptors_that_are_sent_to_a_sidecar_are_not_taken(tmp_path):
    async with one_sidecar(tmp_path) as sidecar:
        before = len(os.listdir("/proc/self/fd"))
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(sidecar.config.socket))
            socket.send_fds(sock, [b"\0"], [0] * 8)
            while not sidecar.attachments:
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert len(os.listdir("/proc/self/fd")) <= before + 2  # both ends of the connection


# --- a sidecar that lies -----------------------------------------------------------------------------------------------


def changed(message: Work, **changes) -> Work:
    return Work(**{name: getattr(message, name) for name in message.__struct_fields__} | changes)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            lambda m: {"pointers": np.array([m.array.ctypes.data - 8], "<i8").tobytes()},
            "outside of the registered pools",
        ),
        (lambda m: {"pointers": np.array([4096], "<i8").tobytes()}, "outside of the registered pools"),
        (
            lambda m: {"pointers": np.array([m.array.ctypes.data + m.array.nbytes - 256], "<i8").tobytes()},
            "outside of the registered pools",
        ),
        (lambda m: {"token_offset": np.full(8, 1 << 40, "<i8").tobytes()}, "outside of the registered pools"),
        (lambda m: {"token_offset": np.full(8, -8, "<i8").tobytes()}, "behind its planes"),
        (lambda m: {"token_offset": np.full(8, (1 << 62) + 9, "<i8").tobytes()}, "behind its planes"),
        (lambda m: {"heads": 2, "head_stride": 1 << 40, "row_bytes": 8}, "outside of the registered pools"),
        (lambda m: {"packed": (0, 4096 - 8)}, "not mapped here"),
        (lambda m: {"packed": (1, 0)}, "not mapped here"),
        (lambda m: {"row_bytes": 4096}, "not mapped here"),
        (lambda m: {"token_offset": b"123"}, "no array"),
        (lambda m: {"token_pool": np.full(8, 3, "<i4").tobytes()}, "cannot be one"),
        (lambda m: {"planes": 0}, "planes"),
        (lambda m: {"bounce": (0, 0)}, "without a GPU"),
        (lambda m: {"after": [17]}, "not one of ours"),
    ],
)
@pytest.mark.parametrize("scatter", [False, True], ids=["gather", "scatter"])
async def test_a_chunk_outside_of_what_was_registered_is_refused(tmp_path, change, match, scatter):
    liar = Liar(tmp_path / "liar.sock")
    memory = engine_memory(Role.PREFILL)
    client = Client(engine_config(Role.PREFILL), tmp_path / "liar.sock")
    starting = asyncio.create_task(client.start())
    await liar.attach()
    await starting
    client.register_pool(memory.layout, memory.array, replica=0, rank=0)
    before = memory.array.copy()
    work = changed(honest_work(memory, 1), scatter=scatter)
    liar.say(changed(work, **change(memory)))
    answer = await liar.hear(lambda message: type(message).__name__ == "Worked")
    assert answer.fault is not None
    assert answer.fault.code is ErrorCode.REMOTE_PROTOCOL
    assert match in answer.fault.text
    assert not liar.memory.view.any()
    np.testing.assert_array_equal(memory.array, before)
    liar.say(changed(work, work=2, scatter=False))  # the control: an honest one is done
    answer = await liar.hear(lambda message: type(message).__name__ == "Worked")
    assert answer.fault is None
    assert bytes(liar.memory.view[:256]) == bytes(memory.array.reshape(-1)[:256])
    closing = asyncio.create_task(client.close())
    await liar.hear(lambda message: type(message).__name__ == "Detach")
    await liar.close()
    await closing


async def test_a_sidecar_that_speaks_nonsense_is_left(tmp_path):
    liar = Liar(tmp_path / "liar.sock")
    client = Client(engine_config(Role.PREFILL), tmp_path / "liar.sock")
    starting = asyncio.create_task(client.start())
    await liar.attach()
    await starting
    link = client._link
    liar.channel.send(struct.pack(">I", 4) + msgspec.msgpack.encode("abc"))
    async with asyncio.timeout(10):
        await link.ended.wait()
    assert isinstance(link.error, SidecarLostError)
    await liar.close()
    await client.close()


# --- staging -----------------------------------------------------------------------------------------------------------


async def test_slots_that_are_added_while_the_engine_lives_reach_it(tmp_path):
    """As `Growth` adds them; half of a request's slots then lie in the new segment."""
    async with one_sidecar(tmp_path) as sidecar, engines(tmp_path, sidecar) as (clients, memory):
        await move(clients, memory, 1)
        for attached in sidecar.attachments:
            mover = attached.agent._shell.mover
            (peer,) = attached.agent._shell.links.peers
            mover._growth._config = replace(mover._config, slots=8, max_staging_bytes=8 << 16)
            assert mover._growth.request(peer.name)
        async with asyncio.timeout(10):
            while any(a.agent.stats()["slots_total"] < 8 for a in sidecar.attachments):
                await asyncio.sleep(0)
        assert [len(client._link._mappings) for client in clients.values()] == [2, 2]
        for request in range(2, 6):
            await move(clients, memory, request)
        for attached in sidecar.attachments:
            assert attached.agent.stats()["slots_free"] == 8


def held() -> tuple[int, int]:
    """Descriptors of this process, and mappings of staging."""
    gc.collect()  # mappings go with their objects
    with open("/proc/self/maps") as maps:
        return len(os.listdir("/proc/self/fd")), maps.read().count("rdma-kv-staging")


async def test_memory_of_an_agent_that_has_closed_goes_back(tmp_path):
    async with one_sidecar(tmp_path) as sidecar:
        before = held()
        for _ in range(3):
            async with engines(tmp_path, sidecar) as (clients, memory):
                await move(clients, memory, 1)
            assert not sidecar.attachments
        del clients, memory
        async with asyncio.timeout(10):  # links linger for a moment, and their descriptors with them
            while any(now > then for now, then in zip(held(), before, strict=True)):
                await asyncio.sleep(0.05)


async def test_an_engine_that_vanishes_in_the_middle_is_an_abort_for_the_other(tmp_path):
    async with one_sidecar(tmp_path) as sidecar, engines(tmp_path, sidecar) as (clients, memory):
        await move(clients, memory, 1)
        receiving = asyncio.create_task(
            clients[Role.DECODE].receive("k2", 0, PAGES, source=PREFILL, tokens=TOKENS, timeout_s=10)
        )
        sending = clients[Role.PREFILL].send("k2", 0, PAGES, to=DECODE, tokens=TOKENS, timeout_s=10)
        with pytest.raises(SidecarLostError):
            async with sending as out:
                await out.push((0, 16))
                clients[Role.PREFILL]._link._channel._sock.shutdown(socket.SHUT_RDWR)
                while out.error is None:
                    await asyncio.sleep(0)
                await out.push((16, TOKENS))
        with pytest.raises(TransferAborted) as caught:
            await receiving
        assert caught.value.cause is ErrorCode.SIDECAR_LOST
        stats = await clients[Role.DECODE].stats()
        async with asyncio.timeout(10):
            while stats["slots_free"] + stats["slots_retired"] != stats["slots_total"]:
                stats = await clients[Role.DECODE].stats()
        assert settings(tmp_path).staging.slots == stats["slots_total"] - stats["slots_retired"]
