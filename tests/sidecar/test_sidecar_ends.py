"""Ends that do not go as planned, and what a caller, a client or a sidecar that is wrong may cost others: nothing."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import struct
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from inside_rig import Liar, engines, honest_work, one_sidecar, settings, write_registry
from sidecar_rig import DECODE, PAGES, PREFILL, TOKENS, engine_config, engine_memory

from rdma_kv.client import Client, SyncClient
from rdma_kv.deaths import own_process, started_ticks
from rdma_kv.errors import (
    ClosedError,
    ConfigError,
    LocalProtocolError,
    RdmaKvError,
    RemoteProtocolError,
    SidecarLostError,
)
from rdma_kv.memory import SharedMemory
from rdma_kv.protocol.link import Process
from rdma_kv.sidecar import attachment, engine_client, interfaces, link, server
from rdma_kv.sidecar.channel import Channel
from rdma_kv.sidecar.facts import attach_of, layout_of, register_of
from rdma_kv.sidecar.listening import credentials
from rdma_kv.sidecar.logs import TextLines
from rdma_kv.sidecar.wire import (
    Answer,
    Attached,
    Await,
    Detach,
    Finish,
    Mapped,
    Push,
    Send,
    Worked,
    decode_of_sidecar,
    encode,
)
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
    connection = client._link
    first = asyncio.create_task(client.close())
    await liar.hear(named("Detach"))  # it waits for the end of the stream now
    second = asyncio.create_task(client.close())
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    for _ in range(5):
        await asyncio.sleep(0)
    assert not second.done(), "the sidecar has not closed our agent"
    assert not connection.ended.is_set()
    await liar.close()
    async with asyncio.timeout(10):
        await second
    assert connection.ended.is_set()


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
        before = client._link
        with pytest.raises(ConfigError) as caught:
            await client.receive("k", 0, PAGES, **{"tokens": TOKENS, "timeout_s": 0.2} | options)
        assert caught.value.field == field
        assert not before.calls
        assert (await client.stats())["transfers"] == 0
        assert client._link is before


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
        third = Client(engine_config(Role.PREFILL, cluster="more"), sidecar.config.socket, start_s=0.3)
        with pytest.raises(SidecarLostError, match="2 connections are open"):
            await third.start()
        await third.close()
        await clients[Role.PREFILL].close()
        async with Client(engine_config(Role.PREFILL, cluster="more"), sidecar.config.socket):
            pass


async def test_an_engine_that_detaches_under_its_kernels_does_not_hold_the_sidecar(tmp_path, monkeypatch):
    """It says that none runs, and never answers for those that do. The next one can attach, and the sidecar can end."""
    monkeypatch.setattr(attachment, "DETACHED_S", 0.2)
    async with one_sidecar(tmp_path) as sidecar, engines(tmp_path, sidecar) as (clients, _):
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
        asking = asyncio.ensure_future(kernels._say(lambda number: Await(number, [])))
        await asyncio.sleep(0)
        (work,) = kernels._pending
        channel.send(encode(Detach()))
        channel.send(encode(Worked(work, None, (0, 0))))
        async with asyncio.timeout(5):
            assert await asking is None
            await agent.ended.wait()
        await channel.close()


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


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "control"])
async def test_memory_of_an_agent_that_could_not_close_is_kept(tmp_path, monkeypatch, caplog, fails):
    """The log says that it stays allocated: a transport may still write there."""
    before = list(attachment._KEPT)
    async with one_sidecar(tmp_path) as sidecar, engines(tmp_path, sidecar) as (clients, _):
        (attached,) = [each for each in sidecar.attachments if each.id.role is Role.PREFILL]
        ended, agent = attached.ended, attached.agent
        where = weakref.ref(attached._engine._memories[0])
        if fails:
            monkeypatch.setattr(agent, "close", partial(close_and_fail, agent.close))
        await clients.pop(Role.PREFILL).close()
        async with asyncio.timeout(10):
            await ended.wait()
    monkeypatch.undo()
    del attached, agent
    assert ("stays allocated" in caplog.text) == fails
    caplog.clear()
    gc.collect()
    assert (where() is not None) == fails
    attachment._KEPT[:] = before


async def close_and_fail(close) -> None:
    await close()
    raise OSError("the data plane does not end")


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


# --- small things ------------------------------------------------------------------------------------------------------


async def test_a_client_that_is_dropped_each_time_does_not_hurry(tmp_path, monkeypatch):
    """A sidecar that dies of each attach must not be busy with nothing else."""
    monkeypatch.setattr(engine_client, "_FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(engine_client, "_LONGEST_PAUSE_S", 10.0)
    liar, client = await attached_to_liar(tmp_path)
    began = asyncio.get_running_loop().time()
    for _ in range(5):
        await liar.channel.close()
        await liar.attach()
    assert asyncio.get_running_loop().time() - began > 0.01 * (1 + 2 + 4 + 8 + 16)
    await liar.close()
    async with asyncio.timeout(10):
        await client.close()


async def test_a_kernel_that_does_not_end_keeps_staging_mapped(tmp_path, monkeypatch):
    """It waits for an event that never fires: the client closes all the same, and does not say that it has ended."""
    monkeypatch.setattr(link, "KERNELS_S", 0.1)
    monkeypatch.setattr(link, "DETACH_S", 0.1)
    liar, client = await attached_to_liar(tmp_path)
    own, stuck = client._link, asyncio.Event()

    async def gather(_work) -> None:
        await stuck.wait()
        raise LocalProtocolError("closed before the GPU was done; the memory is in use")

    async def end_kernels() -> bool:
        stuck.set()
        return False

    monkeypatch.setattr(client.kernels, "gather", gather)
    monkeypatch.setattr(client._packer, "close", end_kernels)
    memory = engine_memory(Role.DECODE)
    client._pools.add(np.array([memory.array.ctypes.data]), np.array([memory.array.nbytes]))
    liar.say(honest_work(memory, 1))
    async with asyncio.timeout(10):
        while not len(own._works):
            await asyncio.sleep(0)
        await client.close()
    assert len(own._mappings) == 1
    assert own in link._KEPT
    async with asyncio.timeout(10):
        await liar.hear(named("Detach"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not [message for message in liar.heard if named("Worked")(message)]
    assert liar.lost is None, "the end of the stream says that no kernel runs"
    link._KEPT.remove(own)
    own._channel.release()
    await liar.close()


async def test_what_is_refused_has_a_line_too(tmp_path, caplog):
    caplog.set_level("INFO", logger="rdma_kv.sidecar")
    async with one_sidecar(tmp_path) as sidecar, engines(tmp_path, sidecar) as (clients, _):
        await sidecar.drain(0.0, lambda _: None)
        with pytest.raises(SidecarLostError, match="draining"):
            await clients[Role.DECODE].receive("k", 0, PAGES, tokens=TOKENS)
    (facts,) = [record.facts for record in caplog.records if getattr(record, "facts", {}).get("event") == "transfer"]
    assert (facts["verb"], facts["key"], facts["outcome"]) == ("receive", "k", "SidecarLostError")


def test_a_key_cannot_forge_a_line_of_text():
    record = logging.LogRecord("rdma_kv.x", logging.INFO, "f", 1, "send %s", ("a\nb\x1b[2J",), None)
    record.facts = {"key": "a\r\nb\x85c"}
    text = TextLines().format(record)
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text


def test_a_large_user_id_is_one():
    """They are unsigned, in user namespaces and directories up to 4 billion."""
    here, there = socket.socketpair()
    with here, there:
        assert credentials(here) == (os.getpid(), os.getuid())
    sock = SimpleNamespace(getsockopt=lambda *_: struct.pack("=iII", 7, 3_000_000_000, 0))
    assert credentials(sock) == (7, 3_000_000_000)


async def test_a_transport_that_is_none_is_named_before_the_start(tmp_path):
    sidecar = server.Sidecar(settings(tmp_path), transport="carrier pigeon")
    with pytest.raises(ConfigError) as caught:
        await sidecar.start()
    assert caught.value.field == "transport"
    assert not list(tmp_path.iterdir())


def test_an_interrupted_dump_of_addresses_is_noticed():
    plain, interrupted = struct.pack("=IHHII", 16, 20, 2, 1, 0), struct.pack("=IHHII", 16, 20, 2 | 0x10, 1, 0)
    assert not interfaces._is_interrupted(plain + plain)
    assert interfaces._is_interrupted(plain + interrupted)


@pytest.mark.parametrize("how", ["error", "cancelled"])
async def test_what_the_caller_has_ended_itself_is_logged_as_that(tmp_path, caplog, how):
    caplog.set_level("INFO", logger="rdma_kv.sidecar")

    async def send(client: Client) -> None:
        async with client.send("k", 0, PAGES, to=DECODE, tokens=TOKENS, timeout_s=20):
            begun.set()
            if how == "error":
                raise ZeroDivisionError
            await asyncio.Event().wait()

    begun = asyncio.Event()
    async with one_sidecar(tmp_path) as sidecar, engines(tmp_path, sidecar) as (clients, _):
        sending = asyncio.create_task(send(clients[Role.PREFILL]))
        await begun.wait()
        if how == "cancelled":
            sending.cancel()
        with pytest.raises((ZeroDivisionError, asyncio.CancelledError)):
            await sending
    (facts,) = [record.facts for record in caplog.records if getattr(record, "facts", {}).get("event") == "transfer"]
    assert (facts["verb"], facts["outcome"]) == ("send", "cancelled")


async def test_an_agent_that_cannot_be_made_leaves_nothing_behind(tmp_path):
    """No descriptor that watches over the engine's process, for instance."""

    def fail(_name: str):
        raise ConfigError("transport", "cannot be made")

    child = await asyncio.create_subprocess_exec("sleep", "1000")
    try:
        process = Process(own_process().host, child.pid, started_ticks(child.pid))
        async with server.Sidecar(settings(tmp_path), transport=fail) as sidecar:
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(3):
                reader, writer = await asyncio.open_unix_connection(sidecar.config.socket)
                writer.write(encode(attach_of(engine_config(Role.PREFILL), None, process)))
                async with asyncio.timeout(10):
                    assert b"cannot be made" in await reader.read()
                    writer.close()
                    await writer.wait_closed()
                    while sidecar.attachments:
                        await asyncio.sleep(0)
            assert len(os.listdir("/proc/self/fd")) == before
    finally:
        child.kill()
        await child.wait()


async def test_a_call_that_comes_with_the_end_has_a_line_too(tmp_path, caplog):
    """Both are read at once, so the end is known before the call has begun."""
    caplog.set_level("INFO", logger="rdma_kv.sidecar")
    async with one_sidecar(tmp_path) as sidecar:
        channel, heard, news = await raw_engine(sidecar, tmp_path)
        pages = [np.array(PAGES, "<i8").tobytes()]
        channel.send(encode(Send(1, "k", 0, 0, pages, (0, TOKENS), None, 30.0)))
        channel.send(struct.pack(">I", 1) + b"\xc1")
        await until(heard, news, named("Bye"))
        await channel.close()
    (facts,) = [record.facts for record in caplog.records if getattr(record, "facts", {}).get("event") == "transfer"]
    assert (facts["key"], facts["outcome"]) == ("k", "SidecarLostError")
