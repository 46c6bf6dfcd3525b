"""The ucx transport in one process: which library, what it refuses, what it leaves behind, its fences and messages."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from transport_rig import LIMIT_S, Memory, Side, link, pair, write

from rdma_kv.errors import ConfigError, FenceUnsupported, LocalProtocolError, RegistrationError, TransportError
from rdma_kv.transport import ucx_library
from rdma_kv.transport.base import FENCED, NOT_POSTED, unwrap_metadata, wrap_metadata
from rdma_kv.transport.ucx import UcxTransport
from rdma_kv.transport.ucx_library import SETTING, UcxLibrary, candidates, load_ucx
from rdma_kv.transport.ucx_writes import Keys

MIB = 1 << 20
TCP = {**os.environ, "UCX_TLS": "tcp"}


@pytest.fixture
async def make():
    """Makes started transports, closed at the end."""
    made = []

    async def start(name, **arguments):
        transport = UcxTransport(name, **arguments)
        await transport.start()
        made.append(transport)
        return transport

    yield start
    async with asyncio.timeout(LIMIT_S):
        for transport in made:
            await transport.close()


async def linked(make, length_bytes, environ=None):
    left, right = await make("left@1", environ=environ), await make("right@1", environ=environ)
    source, destination = await Memory(length_bytes, 1).register(left), await Memory(length_bytes).register(right)
    return *await link(left, right), source, destination


def test_a_named_library_that_cannot_be_loaded_is_refused_with_the_setting(tmp_path):
    nonsense = tmp_path / "libucp.so.0"
    nonsense.write_bytes(b"no library")
    for path in (str(nonsense), str(tmp_path / "missing.so"), "libc.so.6"):
        with pytest.raises(ConfigError, match=f"cannot be used as libucp.*{SETTING}") as caught:
            load_ucx(path, {})
        assert caught.value.field == "library"
        with pytest.raises(ConfigError, match="install UCX on the system") as caught:
            load_ucx(None, {SETTING: path})
        assert caught.value.field == SETTING


def test_without_any_library_the_text_says_what_to_do(monkeypatch):
    monkeypatch.setattr(ucx_library, "candidates", lambda: [("system", "libucp.so.of-nobody")])
    with pytest.raises(ConfigError, match=r"no libucp found \(system: .*extras nixl") as caught:
        load_ucx(None, {})
    assert caught.value.field == SETTING


def test_the_argument_goes_before_the_setting_and_that_before_what_is_found():
    found = load_ucx(None, {})
    assert found.source in {"system", "nixl_cu12", "nixl_cu13", "libucx"}
    assert found.version.count(".") == 2
    assert load_ucx(found.path, {SETTING: "/nowhere"}).source == "argument"
    assert load_ucx(None, {SETTING: found.path}).source == SETTING
    assert next(iter(candidates())) == ("system", "libucp.so.0")


def test_the_wheels_are_found_without_importing_them(tmp_path, monkeypatch):
    for name in ("nixl_cu13", "nixl_cu13.libs", "libucx", "libucx/lib"):
        (tmp_path / name).mkdir()
    for name in ("nixl_cu13", "libucx"):
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('imported')")
    for name in (
        "nixl_cu13.libs/libucp-0a1b.so.0.0.0",
        "nixl_cu13.libs/libucs-0a1b.so.0.0.0",
        "libucx/lib/libucp.so.0",
    ):
        (tmp_path / name).touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    here = [(source, Path(path).name) for source, path in candidates() if path.startswith(str(tmp_path))]
    assert here == [("nixl_cu13", "libucp-0a1b.so.0.0.0"), ("libucx", "libucp.so.0")]


async def test_start_reports_the_library_and_refuses_a_second_time(make):
    transport = await make("left@1")
    assert isinstance(transport.library, UcxLibrary)
    assert transport.backend == "ucx"
    with pytest.raises(LocalProtocolError):
        await transport.start()
    with pytest.raises(LocalProtocolError):
        UcxTransport("right@1").endpoint("left@1")


async def test_a_setting_that_ucx_does_not_take_is_named_and_the_transport_can_be_started_later():
    transport = UcxTransport("left@1", environ={"UCX_RNDV_THRESH": "soon"})
    with pytest.raises(ConfigError) as caught:
        await transport.start()
    assert caught.value.field == "UCX_RNDV_THRESH"
    await transport.close()


async def test_20_transports_leave_no_file_descriptor(make):
    await linked(make, 4096)
    before = len(os.listdir("/proc/self/fd"))
    for number in range(10):
        left, right = UcxTransport(f"a@{number}"), UcxTransport(f"b@{number}")
        await asyncio.gather(left.start(), right.start())
        source, destination = await Memory(MIB, 1).register(left), await Memory(MIB).register(right)
        a, b = await link(left, right)
        b.endpoint.listen()
        await write(a, [pair(source, destination)], b"x")
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(left.close(), right.close())
    assert len(os.listdir("/proc/self/fd")) <= before


@pytest.mark.parametrize("environ", [None, TCP], ids=["default", "tcp"])
async def test_a_target_goes_on_after_its_initiator_made_a_new_endpoint(make, environ):
    """An initiator that closed comes back to a target that did not: the answer goes to the new worker."""
    a, b, source, destination = await linked(make, MIB, environ)
    b.endpoint.listen()
    await write(a, [pair(source, destination)], b"first")
    await a.endpoint.close()
    c = Side(a.transport, "right@1")
    await c.endpoint.connect(await b.endpoint.metadata())
    destination.bytes[:] = 0
    await write(c, [pair(source, destination)], b"second")
    assert np.array_equal(source.bytes, destination.bytes)
    assert await b.wait_for(2) == [b"first", b"second"]


async def test_messages_of_strangers_are_counted_and_dropped(make):
    left, right = await make("left@1"), await make("right@1")
    stranger, known = left.endpoint("right@1"), right.endpoint("somebody@1")
    heard = []
    known.on_notification(heard.append)
    known.listen()
    await stranger.connect(await known.metadata())
    notifying = asyncio.create_task(stranger.notify(b"psst"))
    async with asyncio.timeout(LIMIT_S):
        while not right.dropped_messages:
            await asyncio.sleep(0)
        await stranger.close()
        with pytest.raises(TransportError):
            await notifying
    assert right.dropped_messages == 1  # its HELLO: nobody told it that it may go on
    assert heard == []


async def test_both_fences_end_pending_writes_and_come_again(make):
    a, b, source, destination = await linked(make, 32 * MIB, TCP)
    writing = asyncio.create_task(a.endpoint.write([pair(source, destination)], b"never"))
    await asyncio.sleep(0)
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(a.endpoint.fence_source() for _ in range(3)))
        with pytest.raises(TransportError) as caught:
            await writing
        assert caught.value.status == FENCED
        await b.endpoint.fence_target()
        await b.endpoint.fence_target()
        await b.endpoint.close()
        with pytest.raises(TransportError) as caught:
            await a.endpoint.write([pair(source, destination)], b"later")
        assert caught.value.status == NOT_POSTED
        c, d = await link(a.transport, b.transport)
        d.endpoint.listen()
        await write(c, [pair(source, destination)], b"again")
    assert np.array_equal(source.bytes, destination.bytes)


async def test_a_fence_of_the_target_is_refused_before_the_lane_is_known(make):
    transport = await make("left@1", environ={})
    endpoint = transport.endpoint("right@1")
    with pytest.raises(FenceUnsupported, match="not known"):
        await endpoint.fence_target()
    await endpoint.metadata()


async def test_memory_deregistered_under_a_pending_write_is_unmapped_later(make):
    a, b, source, destination = await linked(make, 32 * MIB, TCP)
    other = await Memory(4096).register(a.transport)
    writing = asyncio.create_task(a.endpoint.write([pair(source, destination)], b"x"))
    await asyncio.sleep(0)
    await a.transport.deregister(other.region)
    b.endpoint.listen()
    async with asyncio.timeout(LIMIT_S):
        await writing
    await a.transport.deregister(source.region)
    assert np.array_equal(source.bytes, destination.bytes)


async def test_a_small_write_does_not_wait_for_a_big_one(make):
    a, b, source, destination = await linked(make, 128 * MIB, TCP)
    b.endpoint.listen()
    order = []

    async def one(name, offset, length_bytes):
        await write(a, [pair(source, destination, offset, length_bytes)], name.encode())
        order.append(name)

    await asyncio.gather(one("big", 0, 127 * MIB), one("small", 127 * MIB, 8))
    assert order == ["small", "big"]


@pytest.mark.parametrize("fields", [{2: []}, {2: [b""]}, {3: b"x"}, {3: b"x" * 70000}], ids=str)
async def test_metadata_with_implausible_parts_is_refused(make, fields):
    left, right = await make("left@1"), await make("right@1")
    await Memory(4096).register(right)
    inner = msgspec.msgpack.decode(unwrap_metadata("ucx", await right.endpoint("left@1").metadata()))
    for place, value in fields.items():
        inner[place] = value
    with pytest.raises(RegistrationError):
        await left.endpoint("right@1").connect(wrap_metadata("ucx", msgspec.msgpack.encode(inner)))


async def test_ucx_itself_says_which_lanes_it_chose(make):
    a, _, _, _ = await linked(make, 4096, TCP)
    assert {transport for transport, _ in a.endpoint.transports} == {"tcp"}
    assert a.endpoint.lane == "tcp"


def test_keys_finds_the_range_around_an_address():
    keys = Keys([(300, "c"), (100, "a"), (200, "b")])
    assert [keys.at(address) for address in (100, 199, 200, 250, 300, 999)] == ["a", "a", "b", "b", "c", "c"]
    assert list(keys) == ["a", "b", "c"]
