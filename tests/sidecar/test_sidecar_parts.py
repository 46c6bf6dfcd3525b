"""The parts of the sidecar alone: errors on the wire, its file, its probes, its log lines; and what it must not import."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

from rdma_kv import errors
from rdma_kv.cli.main import run
from rdma_kv.config import Limits
from rdma_kv.errors import (
    ChecksumError,
    ConfigError,
    ErrorCode,
    FenceUnsupported,
    IncompatiblePeerError,
    LocalProtocolError,
    PeerLostError,
    RdmaKvError,
    RegistrationError,
    RemoteProtocolError,
    SidecarLostError,
    StagingFull,
    TransferAborted,
    TransferTimeout,
    TransportError,
)
from rdma_kv.kernels.launch import Chunk
from rdma_kv.layout import KvLayout
from rdma_kv.sidecar.channel import Channel
from rdma_kv.sidecar.facts import chunk_of, error_of, fault_of, int64s, layout_of, register_of, work_of
from rdma_kv.sidecar.health import Health
from rdma_kv.sidecar.logs import JsonLines
from rdma_kv.sidecar.memory import Pools
from rdma_kv.sidecar.settings import ListenAt, SidecarConfig, read_config
from rdma_kv.sidecar.wire import Fault, Register, Work
from rdma_kv.types import Owned

ROOT = Path(__file__).parents[2]

# --- errors ------------------------------------------------------------------------------------------------------------

DAMAGED = ChecksumError(
    "k",
    "RECEIVING",
    component="kv",
    layers=(1, 3),
    tokens=(0, 16),
    src_rank=2,
    expected=(1 << 64) - 1,
    found=1,
    culprit="a",
)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("to", "is none"),
        LocalProtocolError("push after finish"),
        errors.ClosedError("closed"),
        RemoteProtocolError("a/b", "lied"),
        IncompatiblePeerError("a/b", "kv.dtype", "int8 there"),
        PeerLostError("a/b", "gone"),
        SidecarLostError("sidecar /x", "gone"),
        TransportError("ucx", "not-posted", "no"),
        RegistrationError("cuda", "device-memory", "no"),
        FenceUnsupported("nixl", "cma", "no"),
        TransferTimeout("k", "MATCHING", "slow"),
        TransferAborted("k", "SENDING", "no", cause=ErrorCode.CONFIG, culprit="rank 3"),
        StagingFull("k", "staging", "none"),
        DAMAGED,
        errors.RouteMismatchError("k", "OFFER", "digest"),
        errors.RangeUnavailableError("k", "OFFER", "before"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_error_arrives_as_it_was(error: RdmaKvError):
    body = msgspec.msgpack.encode(fault_of(error))
    told = error_of(msgspec.msgpack.decode(body, type=Fault))
    assert type(told) is type(error)
    assert str(told) == str(error)
    assert vars(told) == vars(error)
    assert told.retryable == error.retryable
    assert told.told_code is error.told_code
    assert told.reason == error.reason


def test_every_code_has_an_error_here():
    for code in ErrorCode:
        assert error_of(Fault(code, "x", {})).code is code


# --- pools and chunks --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout",
    [
        KvLayout.nhd(layers=2, pages=4, page_size=16, heads=2, row_bytes=32),
        KvLayout.sglang(layers=3, pages=4, page_size=16, heads=2, row_bytes=32),
        KvLayout.mla(layers=2, pages=4, page_size=16, row_bytes=36),
    ],
    ids=lambda layout: layout.name,
)
def test_a_pool_arrives_as_it_was(layout):
    sizes = np.array(layout.required_bytes(), np.int64)
    addresses = np.arange(len(sizes), dtype=np.int64) * (1 << 30) + 4096
    message = register_of("kv", layout, addresses, sizes, Owned(1, 3))
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Register)
    assert layout_of("client", told) == layout
    assert (told.replica, told.rank) == (1, 3)
    np.testing.assert_array_equal(int64s("client", "addresses", told.addresses), addresses)


def test_a_pool_may_be_said_with_numbers_of_numpy_and_any_name():
    plain = KvLayout.nhd(layers=2, pages=4, page_size=16, heads=2, row_bytes=32)
    layout = dataclasses.replace(
        plain, num_pages=np.int64(4), page_stride=np.int64(plain.page_stride), name="\ud800" * 5000
    )
    message = register_of(
        "kv", layout, np.array([4096]), np.array(layout.required_bytes()), Owned(np.int64(0), np.int32(0))
    )
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Register)
    assert dataclasses.replace(layout_of("client", told), name=plain.name) == plain


def test_a_chunk_arrives_as_it_was():
    chunk = Chunk(
        1 << 20,
        np.arange(1, 9, dtype=np.int64).reshape(2, 4),
        np.array([0, 1, 1], np.int32),
        np.array([0, 64, 128], np.int64),
        2,
        32,
        32,
    )
    message = work_of(7, chunk, (1, 64), (1, 64), scatter=True, checksum=False, expected=(1 << 64) - 1, after=[3])
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=Work)
    found = chunk_of("sidecar", told, 1 << 20)
    assert told == message
    for field in dataclasses.fields(Chunk):
        np.testing.assert_array_equal(getattr(found, field.name), getattr(chunk, field.name))


def test_several_buffers_are_told_apart():
    """Each plane in a buffer of its own; a row across the border of two neighbours is in neither."""
    pools = Pools()
    pools.add(np.array([5000, 1000], np.int64), np.array([1000, 1000], np.int64))
    pools.add(np.array([2000], np.int64), np.array([1000], np.int64))

    def chunk(*pointers: int, offset: int = 0) -> Chunk:
        return Chunk(1, np.array([pointers], np.int64), np.zeros(1, np.int32), np.array([offset], np.int64), 1, 0, 100)

    for good in ((1000, 2000, 5000), (1900,), (2000,), (5900,)):
        pools.check("sidecar", chunk(*good))
    for bad in ((999,), (1901,), (2901,), (3000,), (5901,), (1000, 4000), (1 << 61,)):
        with pytest.raises(RemoteProtocolError):
            pools.check("sidecar", chunk(*bad))
    with pytest.raises(RemoteProtocolError):
        pools.check("sidecar", chunk(1000, offset=901))
    with pytest.raises(RemoteProtocolError):
        Pools().check("sidecar", chunk(1000))


# --- the channel -------------------------------------------------------------------------------------------------------


async def test_frames_and_descriptors_keep_their_order():
    """Large frames that do not go in one call, small ones between them, and a descriptor with every third."""
    here, there = socket.socketpair()
    got: list[tuple[int, bytes]] = []
    lost: list[RdmaKvError] = []

    def on_frame(body: bytes) -> None:
        named = b""
        if body[:1] == b"f":
            fd = receiver.fds.popleft()
            named = os.pread(fd, 8, 0)
            os.close(fd)
        got.append((len(body), named))

    sender = Channel(here, name="a", on_frame=lambda _: None, on_lost=lost.append)
    receiver = Channel(there, name="b", on_frame=on_frame, on_lost=lost.append, take_fds=True)
    files, sizes = [], []
    for number in range(30):
        size = 3_000_000 if number % 7 == 0 else 1 + number
        sizes.append((size, str(number).encode() if number % 3 == 0 else b""))
        fd = os.memfd_create("x")
        os.write(fd, str(number).encode())
        files.append(fd)
        body = (b"f" if number % 3 == 0 else b"-") * size
        sender.send(len(body).to_bytes(4, "big") + body, [fd] if number % 3 == 0 else [])
    async with asyncio.timeout(10):
        await sender.drained()
        while len(got) < 30:
            await asyncio.sleep(0)
    assert got == sizes
    for fd in files:
        os.close(fd)
    await sender.close()
    async with asyncio.timeout(10):
        while not lost:
            await asyncio.sleep(0)
    assert isinstance(lost[0], SidecarLostError)
    await receiver.close()


@pytest.mark.parametrize("ends", ["sent", "lost"])
async def test_a_descriptor_that_waits_for_room_is_the_one_that_was_meant(ends):
    """Its sender closes it, and its number is another file's when the other side reads at last."""
    before = len(os.listdir("/proc/self/fd"))
    here, there = socket.socketpair()
    got: list[bytes] = []

    def on_frame(body: bytes) -> None:
        if body == b"f":
            fd = receiver.fds.popleft()
            got.append(os.pread(fd, 8, 0))
            os.close(fd)

    sender = Channel(here, name="a", on_frame=lambda _: None, on_lost=lambda _: None)
    sender.send((4 << 20).to_bytes(4, "big") + bytes(4 << 20))  # more than the socket takes
    meant = os.memfd_create("meant")
    os.write(meant, b"meant")
    sender.send(b"\0\0\0\1f", [meant])
    os.close(meant)
    other = os.memfd_create("other")
    assert other == meant, "or this proves nothing"
    os.write(other, b"other")
    await asyncio.sleep(0)
    if ends == "sent":
        receiver = Channel(there, name="b", on_frame=on_frame, on_lost=lambda _: None, take_fds=True)
        async with asyncio.timeout(10):
            while not got:
                await asyncio.sleep(0)
        assert got == [b"meant"]
        await receiver.close()
    there.close()
    sender.lose(SidecarLostError("b", "gone"))
    os.close(other)
    assert len(os.listdir("/proc/self/fd")) == before


async def test_descriptors_that_no_frame_names_end_the_channel_and_are_closed():
    here, there = socket.socketpair()
    lost: list[RdmaKvError] = []
    receiver = Channel(there, name="b", on_frame=lambda _: None, on_lost=lost.append, take_fds=True)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        socket.send_fds(here, [b"\0\0\0\1x"], [0] * 8)
    async with asyncio.timeout(10):
        while not lost:
            await asyncio.sleep(0)
    assert not receiver.open
    assert len(os.listdir("/proc/self/fd")) < before  # ours is closed, and theirs
    here.close()


async def test_who_does_not_read_is_given_up(monkeypatch):
    monkeypatch.setattr("rdma_kv.sidecar.channel._MOST_UNSENT_BYTES", 1 << 20)
    here, there = socket.socketpair()
    lost: list[RdmaKvError] = []
    sender = Channel(here, name="a", on_frame=lambda _: None, on_lost=lost.append)
    for _ in range(20):
        sender.send(bytes(1 << 18))
        await asyncio.sleep(0)
    assert "does not read" in str(lost[0])
    there.close()


# --- agent.toml --------------------------------------------------------------------------------------------------------

FILE = """
socket = "agent.sock"
registry = "../cluster.toml"
transport = "ucx"
listen = "0.0.0.0:7600"
allow_plaintext = true
allowed_uids = [1000, 0]
drain_s = 5
[[agent]]
engine = "decode"
rank = 4
listen = "0.0.0.0:7601"
[staging]
slots = 8
[timeouts]
lease = 20
"""


def test_the_file_is_read(tmp_path):
    (tmp_path / "agent.toml").write_text(FILE)
    config = read_config(tmp_path / "agent.toml")
    assert config.socket == tmp_path / "agent.sock"
    assert config.registry == tmp_path / "../cluster.toml"
    assert config.uids == {0, 1000}
    assert config.agent == (ListenAt("decode", 4, "0.0.0.0:7601"),)
    assert (config.staging.slots, config.timeouts.lease, config.drain_s) == (8, 20, 5)
    assert SidecarConfig(Path("a"), Path("b")).uids == {os.getuid()}
    (tmp_path / "agent.toml").write_text(FILE + "[limits]\nhandshakes_per_s = 0.5\nungreeted = 7\n")
    assert read_config(tmp_path / "agent.toml").limits == Limits(handshakes_per_s=0.5, ungreeted=7)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (("socket =", "socked ="), "config"),
        (('"ucx"', "7"), "config"),
        (('"ucx"', '"ucxx"'), "transport"),
        (("[1000, 0]", "[-1]"), "allowed_uids"),
        (("slots = 8", "slots = 8.5"), "staging.slots"),
        (("allow_plaintext = true", ""), "listen"),
        (("0.0.0.0:7601", "0.0.0.0"), "agent.listen"),
        (("slots = 8", "slots = 1"), "staging.slots"),
        (("slots = 8", "slot = 8"), "staging.slot"),
        (("lease = 20", "lease = 1"), "timeouts.lease"),
        (("drain_s = 5", "drain_s = -1"), "drain_s"),
        (("drain_s = 5", 'log_level = "loud"'), "log_level"),
        (("drain_s = 5", 'log_format = "xml"'), "log_format"),
        (("drain_s = 5", 'socket_group = "no such group"'), "socket_group"),
        (("drain_s = 5", 'health = "nowhere"'), "health"),
        (("agent.sock", "x" * 108), "socket"),
    ],
    ids=str,
)
def test_what_is_wrong_in_the_file_is_named(tmp_path, change, field):
    assert change[0] in FILE
    (tmp_path / "agent.toml").write_text(FILE.replace(*change))
    with pytest.raises(ConfigError) as caught:
        read_config(tmp_path / "agent.toml")
    assert caught.value.field == field


def test_every_setting_is_documented_with_its_default():
    text = (ROOT / "docs/operations.md").read_text().split("### `agent.toml`\n", 1)[1].split("\n#", 1)[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", text, re.MULTILINE))
    fields = {field.name: field for field in dataclasses.fields(SidecarConfig)}
    assert set(rows) == set(fields)
    for name, field in fields.items():
        if isinstance(field.default, (str, bool)):
            assert rows[name].strip("`") == msgspec.json.encode(field.default).decode(), name
        elif isinstance(field.default, float):
            assert float(rows[name].strip("`")) == field.default


def test_every_field_of_the_status_is_documented(tmp_path):
    from rdma_kv.sidecar.server import Sidecar

    text = (ROOT / "docs/operations.md").read_text().split("### How a sidecar is\n", 1)[1].split("\n#", 1)[0]
    listed = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert listed == set(Sidecar(SidecarConfig(tmp_path / "s", tmp_path / "r")).status())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--config: is missing"),
        (["--status"], "--socket: is missing"),
        (["--config", "none.toml"], "cannot read none.toml"),
        (["--config", "none.toml", "--json"], "--json: goes with --status only"),
    ],
)
def test_the_command_says_what_is_missing(capsys, monkeypatch, tmp_path, arguments, said):
    monkeypatch.chdir(tmp_path)
    assert run(["agent", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_sidecar_that_is_not_there_is_a_failure(capsys, tmp_path):
    assert run(["agent", "--status", "--socket", str(tmp_path / "none"), "--json"]) == 1
    assert "cannot be reached" in capsys.readouterr().err


# --- probes and logs ---------------------------------------------------------------------------------------------------


async def test_probes_are_answered_and_others_are_not():
    ready = False
    health = Health(lambda: ready)
    await health.start("127.0.0.1:0")

    async def ask(head: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(*health.address)
        writer.write(head)
        async with asyncio.timeout(10):
            answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        return answer

    assert b" 200 OK" in await ask(b"GET /healthz HTTP/1.1\r\n\r\n")
    assert b" 503 " in await ask(b"GET /readyz HTTP/1.1\r\n\r\n")
    ready = True
    assert b"ready\n" in await ask(b"GET /readyz?x=1 HTTP/1.1\r\n\r\n")
    assert b"ready\n" not in await ask(b"HEAD /readyz HTTP/1.1\r\n\r\n")
    assert b" 405 " in await ask(b"POST /readyz HTTP/1.1\r\n\r\n")
    assert await ask(b"x" * 10000) == b""
    with pytest.raises(ConfigError) as caught:
        await Health(lambda: True).start("{}:{}".format(*health.address))
    assert caught.value.field == "health"
    await health.close()


async def test_connections_that_say_nothing_do_not_keep_a_probe_out(monkeypatch):
    monkeypatch.setattr("rdma_kv.sidecar.health._MOST", 2)
    health = Health(lambda: True)
    await health.start("127.0.0.1:0")
    silent = [await asyncio.open_connection(*health.address) for _ in range(3)]
    async with asyncio.timeout(1.0):  # less than they may stay silent
        assert await silent[0][0].read() == b""
        reader, writer = await asyncio.open_connection(*health.address)
        writer.write(b"GET /readyz HTTP/1.1\r\n\r\n")
        assert b" 200 OK" in await reader.read()
    for _, each in [*silent, (reader, writer)]:
        each.close()
        await each.wait_closed()
    await health.close()


def test_a_log_line_is_one_object():
    record = logging.LogRecord("rdma_kv.x", logging.WARNING, "f", 1, "two\nlines %s", ("more",), None)
    record.facts = {"event": "transfer", "key": "k"}
    text = JsonLines().format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert (line["level"], line["message"], line["event"]) == ("warning", "two\nlines more", "transfer")


def test_neither_sidecar_nor_client_imports_torch():
    code = "import sys, rdma_kv.client, rdma_kv.sidecar.process; print('torch' in sys.modules, 'triton' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=ROOT
    )
    assert done.stdout.split() == ["False", "False"]
