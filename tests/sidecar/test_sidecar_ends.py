"""Ends that do not go as planned, and what a caller, a client or a sidecar that is wrong may cost others: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import struct
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from inside_rig import Liar, engines, one_sidecar, write_registry
from sidecar_rig import DECODE, PAGES, PREFILL, TOKENS, engine_config, engine_memory

from rdma_kv.client import Client, SyncClient
from rdma_kv.errors import ClosedError, ConfigError, RdmaKvError, RemoteProtocolError, SidecarLostError
from rdma_kv.memory import SharedMemory
from rdma_kv.protocol.link import Process
from rdma_kv.sidecar import attachment, server
from rdma_kv.sidecar.channel import Channel
from rdma_kv.sidecar.facts import attach_of, layout_of, register_of
from rdma_kv.sidecar.wire import Attached, Bye, Detach, Finish, Mapped, Push, Send, decode_of_sidecar, encode
from rdma_kv.types import Owned, ReplicaId, Role


async def attached_to_liar(folder) -> tuple[Liar, Client]:
    """A client that a liar has attached, with its pool."""
    liar = Liar(folder / "liar.sock")
    client = Client(engine_config(Role.DECODE), folder / "liar.sock")
    starting = asyncio.create_task(client.start())
    await liar.attach()
    await starting
    memory = engine_memory(Role.DECODE)
    client.register_pool(memory.layout, memory.array, replica=0, rank=0)
    return liar, client


def named(name: str):
    return lambda message: type(message).__name__ == name


# --- the client's end --------------------------------------------------------------------------------------------------


async def test_a_close_is_not_torn_apart_and_every_caller_waits_for_its_end(tmp_path):
    liar, client = await attached_to_liar(tmp_path)
    link = client._link
    first = asyncio.create_task(client.close())
    await liar.hear(named("Detach"))  # it waits for the end of the stream now
    second = asyncio.create_task(client.close())
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    for _ in range(5):
        await asyncio.sleep(0)
    assert not second.done(), "the sidecar has not closed our agent"
    assert not link.ended.is_set()
    await liar.close()
    async with asyncio.timeout(10):
        await second
    assert link.ended.is_set()


async def test_a_close_does_not_wait_as_long_as_a_call_may_take(tmp_path, monkeypatch):
    """Of a sidecar that hangs, and a call with a long deadline."""
    monkeypatch.setattr("rdma_kv.sidecar.link.ANSWER_S", 0.1)
    liar, client = await attached_to_liar(tmp_path)
    receiving = asyncio.create_task(client.receive("k", 0, PAGES, tokens=TOKENS, timeout_s=3600.0))
    await liar.hear(named("Receive"))
    async with asyncio.timeout(5):
        await client.close()
    with pytest.raises(ClosedError):
        await receiving
    await liar.close()


async def test_a_block_that_ends_by_an_error_does_not_wait_as_long_as_its_call_may_take(tmp_path, monkeypatch):
    monkeypatch.setattr("rdma_kv.sidecar.link.ANSWER_S", 0.1)
    liar = Liar(tmp_path / "liar.sock")
    client = Client(engine_config(Role.PREFILL), tmp_path / "liar.sock")
    starting = asyncio.create_task(client.start())
    await liar.attach()
    await starting
    memory = engine_memory(Role.PREFILL)
    client.register_pool(memory.layout, memory.array, replica=0, rank=0)

    async def send() -> None:
        async with client.send("k", 0, PAGES, tokens=TOKENS, timeout_s=3600.0):
            raise ZeroDivisionError

    sending = asyncio.create_task(send())
    message = await liar.hear(named("Send"))
    from rdma_kv.sidecar.wire import Answer

    liar.say(Answer(message.call, None))
    async with asyncio.timeout(5):
        with pytest.raises(ZeroDivisionError):
            await sending
    await liar.close()
    async with asyncio.timeout(10):
        await client.close()


async def test_a_close_while_the_client_reconnects_leaves_no_connection_behind(tmp_path):
    """The sidecar attaches it just when the kernels are being closed."""
    liar, client = await attached_to_liar(tmp_path)
    await liar.channel.close()
    await liar.attach_half()
    go_on = asyncio.Event()
    close_packer = client._packer.close

    async def slow() -> bool:
        liar.say(Attached("liar#2", "127.0.0.1", 7600, 60.0))
        await go_on.wait()
        return await close_packer()

    client._packer.close = slow
    closing = asyncio.create_task(client.close())
    async with asyncio.timeout(10):
        for _ in range(20):
            await asyncio.sleep(0)
        go_on.set()
        await closing
        while liar.lost is None:  # the stream has ended
            await asyncio.sleep(0.01)
    await liar.close()


def test_no_call_of_a_thread_hangs_when_the_loop_stops(tmp_path):
    """A call that came in between the last look at the client and the stop of its loop."""
    client = SyncClient(engine_config(Role.DECODE), tmp_path / "none.sock")
    loop = client._loop = asyncio.new_event_loop()
    client._thread = threading.Thread(target=loop.run_forever, daemon=True)
    client._thread.start()
    begun = threading.Event()
    ends: list[BaseException] = []

    async def never() -> None:
        begun.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            client.run(never)
        except ClosedError as exc:
            ends.append(exc)

    threads = [threading.Thread(target=call, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert begun.wait(10)
    client._stop()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive(), "it waits for a loop that has stopped"
    assert len(ends) == 4
    with pytest.raises(ClosedError):
        client.run(never)


# --- what a caller gets wrong ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"source": ReplicaId("x" * 300, 0)}, "source"),
        ({"source": ReplicaId("prefill", -1)}, "source"),
        ({"source": [ReplicaId("prefill", 1 << 40)]}, "source"),
        ({"source": ReplicaId("\ud800", 0)}, "source"),
        ({"attempt": True}, "attempt"),
    ],
    ids=str,
)
async def test_an_argument_that_no_message_can_carry_costs_its_own_call_alone(tmp_path, options, field):
    """And not the connection, with every call over it."""
    async with one_sidecar(tmp_path) as sidecar, engines(tmp_path, sidecar) as (clients, _):
        client = clients[Role.DECODE]
        link = client._link
        with pytest.raises(ConfigError) as caught:
            await client.receive("k", 0, PAGES, **{"tokens": TOKENS, "timeout_s": 0.2} | options)
        assert caught.value.field == field
        assert not link.calls
        assert (await client.stats())["transfers"] == 0
        assert client._link is link


async def test_numbers_of_numpy_are_durations_too(tmp_path):
    async with one_sidecar(tmp_path) as sidecar, engines(tmp_path, sidecar) as (clients, _):
        client = clients[Role.DECODE]
        with pytest.raises(RdmaKvError, match="no word from"):
            await client.receive("k", 0, PAGES, tokens=TOKENS, timeout_s=np.float64(0.1))
        assert not client._link.calls


async def test_a_block_may_end_by_an_error_of_any_text(tmp_path):
    """Such as that of a file name which is not UTF-8: the call ends before the block does."""
    async with one_sidecar(tmp_path) as sidecar, engines(tmp_path, sidecar) as (clients, _):
        client = clients[Role.PREFILL]
        with pytest.raises(OSError, match="name"):
            async with client.send("k", 0, PAGES, to=DECODE, tokens=TOKENS, timeout_s=5):
                raise OSError("name \udcff")
        assert not client._link.calls


# --- what a client gets wrong ------------------------------------------------------------------------------------------


def test_staging_cannot_be_cut_short_by_who_maps_it():
    """A transport that reads a slot of a file that has become shorter ends the whole process: SIGBUS."""
    memory = SharedMemory(8192)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 0)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fd, 1 << 20)
    memory.view[:] = 1
    memory.retire(4096, 4096)  # that still works
    assert memory.view[:4096].all()
    memory.close_fd()


def test_a_layout_of_buffers_that_were_not_told_is_refused_at_once():
    """Not after a list of as many entries as the layout speaks of buffers has been made."""
    memory = engine_memory(Role.PREFILL)
    addresses, sizes = np.array([memory.array.ctypes.data]), np.array([memory.array.nbytes])
    good = register_of("kv", memory.layout, addresses, sizes, Owned(0, 0))
    assert layout_of("client", good) == memory.layout
    origins = np.frombuffer(good.origins, "<i8").copy()
    for buffer in (1, 1 << 62, -1):
        origins[0] = buffer
        facts = {name: getattr(good, name) for name in good.__struct_fields__}
        with pytest.raises(RemoteProtocolError, match="buffers"):
            layout_of("client", type(good)(**facts | {"origins": origins.tobytes()}))


async def raw_engine(sidecar, folder, role: Role = Role.PREFILL) -> tuple[Channel, list, asyncio.Event]:
    """A client that says what a test wants, attached, with its pool. (channel, what it has heard, news)"""
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(sidecar.config.socket))
    heard: list = []
    news = asyncio.Event()

    def on_frame(body: bytes) -> None:
        message = decode_of_sidecar("sidecar", body)
        while channel.fds:
            os.close(channel.fds.popleft())
        if type(message).__name__ == "Segment":
            channel.send(encode(Mapped(message.segment)))
        heard.append(message)
        news.set()

    def on_lost(error: RdmaKvError) -> None:
        heard.append(error)
        news.set()

    channel = Channel(sock, name="sidecar", on_frame=on_frame, on_lost=on_lost, take_fds=True)
    channel.send(encode(attach_of(engine_config(role), None, Process())))
    told = await until(heard, news, named("Attached"))
    memory = engine_memory(role)
    channel.send(
        encode(register_of("kv", memory.layout, np.array([1 << 40]), np.array([memory.array.nbytes]), Owned(0, 0)))
    )
    write_registry(folder, {role: SimpleNamespace(address=(told.host, told.port))})
    return channel, heard, news


async def until(heard: list, news: asyncio.Event, wanted):
    async with asyncio.timeout(10):
        while True:
            for message in heard:
                if wanted(message):
                    return message
            news.clear()
            await news.wait()


async def test_a_send_that_is_finished_takes_no_more_steps(tmp_path):
    """They would wait in the sidecar for ever, as many as are sent."""
    async with one_sidecar(tmp_path) as sidecar:
        channel, heard, news = await raw_engine(sidecar, tmp_path)
        pages = [np.array(PAGES, "<i8").tobytes()]
        channel.send(encode(Send(1, "k", 0, 0, pages, (0, TOKENS), None, 30.0)))
        channel.send(encode(Finish(1, b"\x80")))
        channel.send(encode(Push(1, (0, 16), None, None, 0)))
        last = await until(heard, news, named("Bye"))
        assert "after its end" in last.fault.text
        await channel.close()


async def test_connections_are_bounded(tmp_path, monkeypatch):
    """Attached or not: each agent has memory, a port and descriptors."""
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    async with one_sidecar(tmp_path) as sidecar, engines(tmp_path, sidecar) as (clients, _):
        third = Client(engine_config(Role.PREFILL, engine="more"), sidecar.config.socket, start_s=0.3)
        with pytest.raises(SidecarLostError, match="2 connections are open"):
            await third.start()
        await third.close()
        await clients[Role.PREFILL].close()
        async with Client(engine_config(Role.PREFILL, engine="more"), sidecar.config.socket):
            pass


async def test_an_engine_that_detaches_under_its_kernels_does_not_hold_the_sidecar(tmp_path, monkeypatch):
    """It says that none runs, and never answers for those that do. The next one can attach, and the sidecar can end."""
    monkeypatch.setattr(attachment, "DETACHED_S", 0.2)
    async with one_sidecar(tmp_path) as sidecar, engines(tmp_path, sidecar) as (clients, memory):
        await clients.pop(Role.PREFILL).close()
        channel, heard, news = await raw_engine(sidecar, tmp_path)
        (agent,) = [each for each in sidecar.attachments if each.id.role is Role.PREFILL]
        write_registry(
            tmp_path,
            {Role.PREFILL: SimpleNamespace(address=agent.agent.address), Role.DECODE: clients[Role.DECODE]},
        )
        receiving = asyncio.create_task(
            clients[Role.DECODE].receive("k", 0, PAGES, source=PREFILL, tokens=TOKENS, timeout_s=20)
        )
        pages = [np.array(PAGES, "<i8").tobytes()]
        channel.send(encode(Send(1, "k", 0, 0, pages, (0, TOKENS), ("decode", 0), 20.0)))
        channel.send(encode(Push(1, None, None, None, 0)))
        await until(heard, news, named("Work"))
        channel.send(encode(Detach()))
        async with asyncio.timeout(8):
            await agent.ended.wait()
            with pytest.raises(RdmaKvError):
                await receiving
        await channel.close()


async def test_a_work_that_ends_after_the_detach_is_heard(tmp_path):
    """What its kernels say last is not thrown away: the agent would wait for it, and on a GPU keep its memory."""
    async with one_sidecar(tmp_path) as sidecar:
        channel, _, _ = await raw_engine(sidecar, tmp_path)
        (agent,) = sidecar.attachments
        kernels = agent._engine.kernels
        asking = asyncio.ensure_future(kernels._say(lambda number: attachment_await(number)))
        await asyncio.sleep(0)
        (work,) = kernels._pending
        from rdma_kv.sidecar.wire import Worked

        channel.send(encode(Detach()))
        channel.send(encode(Worked(work, None, (0, 0))))
        async with asyncio.timeout(5):
            assert await asking is None
            await agent.ended.wait()
        await channel.close()


def attachment_await(number: int):
    from rdma_kv.sidecar.wire import Await

    return Await(number, [])


# --- the sidecar's end -------------------------------------------------------------------------------------------------


async def test_calls_that_are_cut_off_leave_no_complaint_of_the_loop(tmp_path):
    complaints: list = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    async with one_sidecar(tmp_path) as sidecar, engines(tmp_path, sidecar) as (clients, _):
        receiving = asyncio.create_task(clients[Role.DECODE].receive("k", 0, PAGES, tokens=TOKENS))
        async with asyncio.timeout(10):
            while not any(attached.calls for attached in sidecar.attachments):
                await asyncio.sleep(0)
        assert await sidecar.drain(0.05, lambda _: None) == 1
        gc.collect()
        for _ in range(3):
            await asyncio.sleep(0)
        gc.collect()
        assert not complaints, complaints
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving


async def test_memory_of_an_agent_that_could_not_close_is_kept(tmp_path):
    """The log says that it stays allocated: a transport may still write there."""
    async with one_sidecar(tmp_path) as sidecar, engines(tmp_path, sidecar) as (clients, _):
        (attached,) = [each for each in sidecar.attachments if each.id.role is Role.PREFILL]
        (memory,) = attached._engine._memories
        where = weakref.ref(memory)
        del memory
        close = attached.agent.close

        async def fail() -> None:
            await close()
            raise OSError("the data plane does not end")

        attached.agent.close = fail
        await clients.pop(Role.PREFILL).close()
        async with asyncio.timeout(10):
            await attached.ended.wait()
        del attached, close, fail
        gc.collect()
        assert where() is not None


async def test_the_last_word_of_the_other_side_is_heard_though_it_reads_no_more():
    """A client that is refused has often not sent its first message yet."""
    here, there = socket.socketpair()
    heard: list = []
    channel = Channel(here, name="a", on_frame=heard.append, on_lost=heard.append)
    there.send(struct.pack(">I", 3) + b"why")
    there.close()
    channel.send(b"\0\0\0\1x")
    channel._flush()  # before the loop has read
    async with asyncio.timeout(5):
        while len(heard) < 2:
            await asyncio.sleep(0)
    assert heard[0] == b"why"
    assert isinstance(heard[1], SidecarLostError)
