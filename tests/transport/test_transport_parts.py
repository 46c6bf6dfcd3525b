"""The pure parts: region table, cutting into batches, UCX's environment and lanes."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdma_kv.errors import ConfigError
from rdma_kv.transport.base import WritePair
from rdma_kv.transport.inbox import Inbox
from rdma_kv.transport.regions import RegionTable, batches
from rdma_kv.transport.ucx_environment import choose_lane, host_id, prepare_ucx_environment, usable_lanes
from rdma_kv.types import Descriptor, Region


async def turn() -> None:
    await asyncio.sleep(0)


async def test_an_inbox_delivers_only_while_it_listens_and_has_a_callback():
    inbox, heard = Inbox(asyncio.get_running_loop()), []
    inbox.put(b"1")
    assert inbox.listen()
    await turn()
    inbox.on_notification(heard.append)
    assert heard == []  # never inside the call
    await turn()
    assert heard == [b"1"]
    assert not inbox.listen()
    assert not inbox.unlisten()
    inbox.put(b"2")
    assert inbox.unlisten()
    await turn()
    assert heard == [b"1"]
    inbox.put(b"3")
    inbox.listen()
    await turn()
    assert heard == [b"1", b"2", b"3"]
    inbox.put(b"4")
    inbox.close()
    await turn()
    assert heard == [b"1", b"2", b"3"]


async def test_an_inbox_gives_the_loop_its_turn_after_a_millisecond():
    inbox, heard = Inbox(asyncio.get_running_loop()), []

    def slow(message: bytes) -> None:
        heard.append(message)
        end = time.perf_counter() + 0.002
        while time.perf_counter() < end:
            pass

    inbox.on_notification(slow)
    inbox.listen()
    for message in (b"1", b"2"):
        inbox.put(message)
    await turn()
    assert heard == [b"1"]
    await turn()
    assert heard == [b"1", b"2"]


async def test_a_callback_that_raises_costs_no_other_message():
    loop, heard, failures = asyncio.get_running_loop(), [], []
    loop.set_exception_handler(lambda _, context: failures.append(context["exception"]))
    inbox = Inbox(loop)

    def picky(message: bytes) -> None:
        if message == b"1":
            raise ValueError("not this one")
        heard.append(message)

    inbox.on_notification(picky)
    inbox.listen()
    for message in (b"1", b"2"):
        inbox.put(message)
    await turn()
    assert heard == [b"2"]
    assert [type(failure) for failure in failures] == [ValueError]


ranges = st.tuples(st.integers(1, 300), st.integers(1, 40))


@given(st.lists(ranges, max_size=30), ranges)
def test_a_table_holds_disjoint_regions_and_covers_exactly_their_bytes(wanted, probe):
    table, kept = RegionTable(), []
    for address, length_bytes in wanted:
        region = Region(address, length_bytes)
        try:
            table.add(region)
        except ConfigError:
            assert any(
                address < other.address + other.length_bytes and other.address < address + length_bytes
                for other in kept
            )
        else:
            kept += [] if region in kept else [region]
    assert list(table) == sorted(kept, key=lambda region: region.address)
    inside = any(r.address <= probe[0] and sum(probe) <= r.address + r.length_bytes for r in kept)
    assert table.covers(Descriptor(*probe)) == inside


@given(st.lists(st.integers(1, 50), min_size=1, max_size=20), st.integers(1, 64), st.integers(1, 8))
def test_batches_carry_each_byte_once_in_order_and_keep_their_limits(lengths, max_bytes, max_pieces):
    pairs = [WritePair(Descriptor(1000 * n, size), Descriptor(7 + 1000 * n, size)) for n, size in enumerate(lengths)]
    cut = list(batches(pairs, max_bytes, max_pieces))
    assert all(0 < len(batch) <= max_pieces and sum(piece[2] for piece in batch) <= max_bytes for batch in cut)
    sent = [(local + n, remote + n) for batch in cut for local, remote, size in batch for n in range(size)]
    assert sent == [
        (pair.local.address + n, pair.remote.address + n) for pair in pairs for n in range(pair.local.length_bytes)
    ]


def port(root, device, state):
    """A device with one port as the kernel shows it."""
    directory = root / device / "ports" / "1"
    directory.mkdir(parents=True)
    (directory / "state").write_text(state + "\n")
    return root


def test_the_environment_is_quiet_and_without_infiniband_modules_only_where_there_is_no_device(tmp_path):
    environ = {}
    prepare_ucx_environment(environ, infiniband=tmp_path / "missing")
    assert environ == {"UCX_MODULES": "^ib,ib_mlx5,ib_efa", "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "FATAL"}
    environ = {}
    prepare_ucx_environment(environ, infiniband=port(tmp_path, "mlx5_0", "1: DOWN"))
    assert "UCX_MODULES" not in environ
    environ = {"UCX_MODULES": "all", "UCX_LOG_LEVEL": "info", "NIXL_LOG_LEVEL": "DEBUG"}
    prepare_ucx_environment(environ, infiniband=tmp_path / "missing")
    assert environ == {"UCX_MODULES": "all", "UCX_LOG_LEVEL": "info", "NIXL_LOG_LEVEL": "DEBUG"}


@pytest.mark.parametrize(
    ("environ", "state", "scope", "lanes"),
    [
        ({}, "4: ACTIVE", "0", ["cma", "rdma", "tcp"]),
        ({}, "4: ACTIVE", None, ["cma", "rdma", "tcp"]),
        ({}, "1: DOWN", "1", ["cma", "tcp"]),
        ({}, "4: ACTIVE", "2", ["rdma", "tcp"]),
        ({"UCX_TLS": "tcp"}, "4: ACTIVE", "0", ["tcp"]),
        ({"UCX_TLS": "tcp,cma"}, "4: ACTIVE", "0", ["cma", "tcp"]),
        ({"UCX_TLS": "rc,tcp"}, "4: ACTIVE", "0", ["rdma", "tcp"]),
        ({"UCX_TLS": "^cma"}, "4: ACTIVE", "0", ["rdma", "tcp"]),
        ({"UCX_TLS": "^shm,ib"}, "4: ACTIVE", "0", ["tcp"]),
        ({"UCX_MODULES": "^ib,ib_mlx5,ib_efa"}, "4: ACTIVE", "0", ["cma", "tcp"]),
        ({"UCX_NET_DEVICES": "eth0"}, "4: ACTIVE", "0", ["cma", "tcp"]),
        ({"UCX_NET_DEVICES": "mlx5_0:1"}, "4: ACTIVE", "0", ["cma", "rdma", "tcp"]),
    ],
)
def test_lanes_follow_ucx_settings_ports_and_ptrace(tmp_path, environ, state, scope, lanes):
    ptrace = tmp_path / "ptrace_scope"
    if scope is not None:
        ptrace.write_text(scope + "\n")
    devices = port(tmp_path / "infiniband", "mlx5_0", state)
    assert usable_lanes(environ, infiniband=devices, ptrace=ptrace) == lanes


@pytest.mark.parametrize(
    ("ours", "theirs", "same_host", "lane"),
    [
        (["cma", "rdma", "tcp"], ["cma", "tcp"], True, "cma"),
        (["cma", "rdma", "tcp"], ["cma", "rdma", "tcp"], False, "rdma"),
        (["cma", "rdma", "tcp"], ["cma", "tcp"], False, "tcp"),
        (["cma", "tcp"], ["rdma", "tcp"], True, "tcp"),
        (["tcp"], ["telepathy"], True, "tcp"),
    ],
)
def test_a_lane_is_one_that_both_sides_have(ours, theirs, same_host, lane):
    assert choose_lane(ours, theirs, same_host=same_host) == lane


def test_the_host_is_known_and_stays_the_same():
    assert host_id() == host_id() != ""
