"""The NIXL transport's own logic: posting and its failures with a scripted NIXL, then the thread and exits for real."""

from __future__ import annotations

import asyncio
import os
import sys
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from nixl_fakes import FakeAgent, FakeNixl, Outcome, nixlBackendError, nixlRemoteDisconnectError
from transport_peer import thread_cpu_s
from transport_rig import LIMIT_S, Memory, Rig, link, pair, write

from rdma_kv.errors import ConfigError, FenceUnsupported, LocalProtocolError, RegistrationError, TransportError
from rdma_kv.transport import nixl as nixl_module
from rdma_kv.transport.base import FENCED, NOT_POSTED, WritePair
from rdma_kv.transport.nixl import NixlTransport
from rdma_kv.transport.nixl_devices import Devices
from rdma_kv.transport.nixl_link import NixlLink, RemoteEnd
from rdma_kv.transport.nixl_owner import Owner
from rdma_kv.transport.nixl_owner import _turn as turn
from rdma_kv.transport.nixl_writes import WriteQueue, cut
from rdma_kv.transport.regions import RegionTable
from rdma_kv.types import Descriptor, Region

MIB = 1 << 20


def queue_of(agent):
    return WriteQueue(FakeNixl(), agent, "us>peer")


def add(queue, length_bytes, notification=b"n", address=0x10000):
    outcome = Outcome()
    one = WritePair(Descriptor(address, length_bytes), Descriptor(2 * address, length_bytes))
    queue.add(cut([one]), "peer", notification, outcome)
    return outcome


def test_a_small_write_is_one_post_with_its_notification():
    agent = FakeAgent()
    queue = queue_of(agent)
    outcome = add(queue, 100)
    assert queue.turn()
    assert [handle.notification for handle in agent.handles] == [b"n"]
    assert not queue.turn()
    assert outcome.results == []
    agent.finish(0)
    assert queue.turn()
    assert outcome.error is None
    assert agent.handles[0].released == 1
    assert not len(queue)


def test_a_big_write_keeps_the_window_and_notifies_with_the_last_post_after_all_others():
    agent = FakeAgent()
    queue = queue_of(agent)
    outcome = add(queue, 26 * MIB)
    for _ in range(10):
        queue.turn()
    assert [handle.pieces[0][2] for handle in agent.handles] == [4 * MIB] * 4
    agent.finish(0, 2)
    queue.turn()
    queue.turn()
    assert len(agent.handles) == 6
    agent.finish(1, 3, 4)
    queue.turn()
    assert len(agent.handles) == 6
    agent.finish(5)
    queue.turn()
    assert [handle.notification for handle in agent.handles] == [b""] * 6 + [b"n"]
    assert agent.handles[6].pieces[0][2] == 2 * MIB
    assert outcome.results == []
    agent.finish(6)
    queue.turn()
    assert outcome.error is None
    covered = sorted((int(local), int(size)) for handle in agent.handles for local, _, size in handle.pieces)
    assert [local for local, _ in covered] == [0x10000 + 4 * MIB * n for n in range(7)]
    assert all(handle.released == 1 for handle in agent.handles)


def test_writes_take_turns_and_one_turn_posts_4_mib():
    agent = FakeAgent()
    queue = queue_of(agent)
    add(queue, 9 * MIB, b"first", 1 << 30)
    add(queue, 9 * MIB, b"second", 1 << 40)
    queue.turn()
    assert len(agent.handles) == 1
    queue.turn()
    assert [int(handle.pieces[0][0]) >= 1 << 40 for handle in agent.handles] == [False, True]


def test_a_failed_completion_ends_its_write_only_and_keeps_the_handles():
    agent = FakeAgent()
    queue = queue_of(agent)
    bad, good = add(queue, 9 * MIB, b"bad", 1 << 30), add(queue, 10, b"good", 1 << 40)
    for _ in range(3):
        queue.turn()
    assert len(agent.handles) == 3
    agent.handles[0].state = nixlRemoteDisconnectError("gone")
    agent.finish(1)
    queue.turn()
    assert bad.error.status == "RemoteDisconnect"
    assert isinstance(bad.error.__cause__, nixlRemoteDisconnectError)
    assert good.error is None
    assert [handle.released for handle in agent.handles] == [0, 1, 0]
    queue.close()
    assert [handle.released for handle in agent.handles] == [1, 1, 1]


@pytest.mark.parametrize(
    ("method", "errors", "not_posted"),
    [
        ("initialize_xfer", [nixlBackendError("no")], True),
        ("initialize_xfer", [None, nixlBackendError("no")], False),
        ("transfer", [nixlBackendError("no")], False),
    ],
)
def test_a_post_that_fails_says_whether_anything_left(method, errors, not_posted):
    agent = FakeAgent()
    agent.failing[method] = list(errors)
    queue = queue_of(agent)
    outcome = add(queue, 9 * MIB)
    for _ in range(3):
        queue.turn()
    assert type(outcome.error) is TransportError
    assert (outcome.error.status == NOT_POSTED) == not_posted
    assert all(handle.released == 0 for handle in agent.handles)
    assert not len(queue)


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def link_of(nixl, regions=(), clock=None):
    heard = []
    scratch = np.zeros(2, dtype=np.uint8)
    made = NixlLink(
        nixl,
        "us>peer#0",
        RegionTable(regions),
        devices=Devices(),
        scratch=scratch,
        deliver=heard.extend,
        clock=clock or Clock(),
    )
    return made, heard


def remote(name="peer"):
    return RemoteEnd(name, name.encode(), 99, RegionTable([(1 << 30, 1 << 20)]))


def test_a_first_connect_that_is_disconnected_is_tried_again_later():
    clock = Clock()
    errors = [nixlRemoteDisconnectError("closing")] * 3
    nixl = FakeNixl(lambda agent: agent.failing.update(add_remote_agent=list(errors)))
    made, _ = link_of(nixl, clock=clock)
    outcome = Outcome()
    made.connect(remote(), outcome)
    for delay_s in (0.05, 0.1, 0.2):
        assert made.active
        clock.now_s += delay_s * 0.9
        made.turn()
        assert outcome.results == []
        clock.now_s += delay_s * 0.11
        made.turn()
    assert outcome.error is None


@pytest.mark.parametrize(("error", "tries"), [(nixlRemoteDisconnectError("x"), 6), (nixlBackendError("x"), 1)])
def test_a_connect_that_cannot_work_ends_with_an_error(error, tries):
    clock = Clock()
    nixl = FakeNixl(lambda agent: agent.failing.update(add_remote_agent=[error] * 100))
    made, _ = link_of(nixl, clock=clock)
    outcome = Outcome()
    made.connect(remote(), outcome)
    while not outcome.results:
        clock.now_s += 10
        made.turn()
    assert isinstance(outcome.error, TransportError)
    assert len(nixl.made[0].failing["add_remote_agent"]) == 100 - tries
    write_outcome = Outcome()
    made.write((), b"n", write_outcome)
    assert write_outcome.error.status == NOT_POSTED


def test_an_agent_registers_what_is_known_and_what_comes():
    nixl = FakeNixl()
    made, _ = link_of(nixl, regions=[(4096, 8)])
    made.register(Region(8192, 8))
    assert nixl.made == []
    assert not made.active
    made.metadata()
    made.register(Region(12288, 8))
    (agent,) = nixl.made
    assert [entry[:2] for entry in agent.registered][1:] == [(4096, 8), (12288, 8)]
    made.deregister(Region(4096, 8))
    assert [entry[:2] for entry in agent.registered][1:] == [(12288, 8)]


def test_memory_that_nixl_refuses_is_an_error_and_a_later_try_makes_a_new_agent():
    refusals = [[None, nixlBackendError("no")], []]
    nixl = FakeNixl(lambda agent: agent.failing.update(register_memory=refusals.pop(0)))
    made, _ = link_of(nixl, regions=[(4096, 8)])
    with pytest.raises(RegistrationError):
        made.metadata()
    made.metadata()
    assert len(nixl.made) == 2


def test_closing_settles_everything_and_lets_go_of_the_agent_even_while_its_error_lives():
    nixl = FakeNixl()
    made, _ = link_of(nixl, regions=[(4096, 1 << 20)])
    connected, failed, pending = Outcome(), Outcome(), Outcome()
    made.connect(remote(), connected)
    assert connected.error is None
    one = WritePair(Descriptor(4096, 8), Descriptor(1 << 30, 8))
    made.write((one,), b"n", failed)
    made.write((one,), b"n", pending)
    made.turn()
    agent = nixl.made.pop()
    agent.handles[0].state = nixlRemoteDisconnectError("gone")
    made.turn()
    alive = weakref.ref(agent)
    del agent
    assert not made.destroyed
    made.close()
    assert made.destroyed
    assert alive() is None
    assert failed.error.status == "RemoteDisconnect"
    assert pending.error.status == FENCED
    assert not made.active
    late = Outcome()
    made.connect(remote(), late)
    assert late.error.status == "closed"
    with pytest.raises(TransportError):
        made.metadata()


def test_errors_that_somebody_keeps_do_not_keep_the_agent_from_being_destroyed(caplog):
    nixl = FakeNixl()
    made, _ = link_of(nixl)
    made.metadata()
    nixl.made.pop().failing.update(
        register_memory=[nixlBackendError("no")],
        deregister_memory=[nixlBackendError("no")],
        get_new_notifs=[KeyError()],
    )
    made._registered[Region(4096, 8)] = object()
    with pytest.raises(RegistrationError) as refused:
        made.register(Region(8192, 8))
    with pytest.raises(TransportError) as refused_too:
        made.deregister(Region(4096, 8))
    turn(made)
    assert "failed" in caplog.text
    made.close()
    assert made.destroyed
    assert [kept.value.status for kept in (refused, refused_too)] == ["nixlBackendError", "Backend"]


async def test_an_unexpected_error_of_a_job_reaches_its_caller_without_what_its_frames_held():
    nixl = FakeNixl()
    made, _ = link_of(nixl)
    made.metadata()
    nixl.made.pop().failing["get_new_notifs"] = [KeyError(), KeyError()]
    owner = Owner("owner", asyncio.get_running_loop())
    owner.start()
    with pytest.raises(KeyError) as kept:
        await owner.call(made.turn)
    with pytest.raises(KeyError) as kept_too:
        future = asyncio.get_running_loop().create_future()
        owner.begin(lambda settle: settle(made.turn() or None), future)
        await future
    await owner.call(made.close)
    assert made.destroyed
    assert kept.value is not kept_too.value
    await owner.stop()


def test_a_link_that_cannot_be_polled_ends_its_writes():
    nixl = FakeNixl()
    made, _ = link_of(nixl)
    made.connect(remote(), Outcome())
    outcome = Outcome()
    made.write((), b"n", outcome)
    nixl.made[0].failing["get_new_notifs"] = [nixlBackendError("broken")]
    made.turn()
    assert outcome.error.status == "Backend"


async def test_one_endpoint_that_refuses_memory_leaves_it_registered_nowhere(monkeypatch):
    nixl = FakeNixl()
    monkeypatch.setattr(nixl_module, "load_nixl", lambda: nixl)
    transport = NixlTransport("us@1")
    await transport.start()
    memory = Memory(64)
    for peer in ("one@1", "two@1"):
        await transport.endpoint(peer).metadata()
    nixl.made[1].failing["register_memory"] = [nixlBackendError("no")]
    with pytest.raises(RegistrationError):
        await transport.register(memory.address, 64)
    assert [len(agent.registered) for agent in nixl.made] == [1, 1]
    await transport.register(memory.address, 64)
    assert [len(agent.registered) for agent in nixl.made] == [2, 2]
    nixl.made[0].failing["deregister_memory"] = [nixlBackendError("no")]
    with pytest.raises(TransportError):
        await transport.deregister(Region(memory.address, 64))
    assert [len(agent.registered) for agent in nixl.made] == [2, 1]
    await transport.close()


@pytest.mark.parametrize(
    ("tls", "ours", "theirs", "fences"),
    [
        ("tcp", "kernel/space", "kernel/space", True),
        ("tcp,cuda_copy", "", "", True),
        ("tcp,xpmem", "kernel/space", "other/space", True),
        ("tcp,xpmem", "kernel/space", "kernel/space", False),
        ("tcp,xpmem", "kernel/space", "kernel/container", False),
        ("tcp,xpmem", "kernel/space", "", False),
        ("tcp,xpmem", "", "other/space", False),
        ("all", "kernel/space", "kernel/space", False),
    ],
)
async def test_a_target_is_fenced_only_where_nothing_but_tcp_can_carry(tls, ours, theirs, fences, monkeypatch):
    nixl = FakeNixl()
    monkeypatch.setattr(nixl_module, "load_nixl", lambda: nixl)
    transports = []
    for name, host in (("us@1", ours), ("them@1", theirs)):
        monkeypatch.setattr(nixl_module, "host_id", lambda host=host: host)
        transports.append(NixlTransport(name, environ={"UCX_TLS": tls}))
        await transports[-1].start()
    here, there = (transport.endpoint("peer@1") for transport in transports)
    await there.metadata()
    nixl.made[0].get_agent_metadata = lambda: there._link.name.encode()
    await here.connect(await there.metadata())
    if fences:
        nixl.made.clear()
        await here.fence_target()
        assert here.closed
    else:
        with pytest.raises(FenceUnsupported, match="retire the slot"):
            await here.fence_target()
        assert not here.closed
    for transport in transports:
        await transport.close()


async def test_without_nixl_the_error_names_the_extra(monkeypatch):
    for name in ("nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, name, None)
    transport = NixlTransport("us@1")
    with pytest.raises(ConfigError, match=r"rdma-kv\[nixl\]"):
        await transport.start()
    with pytest.raises(LocalProtocolError):
        transport.endpoint("peer@1")
    await transport.close()


class Broken:
    """A link with a bug."""

    active = True
    error = None
    with_devices = False

    def turn(self):
        raise ValueError("bug")

    def abandon(self, error):
        self.error = error
        self.active = False

    def close(self):
        pass


async def test_a_bug_in_one_link_ends_that_link_and_not_the_thread(caplog):
    owner = Owner("owner", asyncio.get_running_loop())
    owner.start()
    broken = Broken()
    owner.post(lambda: owner.add(broken))
    async with asyncio.timeout(LIMIT_S):
        while broken.error is None:
            await owner.call(lambda: None)
    assert broken.error.status == "bug"
    with pytest.raises(ZeroDivisionError):
        await owner.call(lambda: 1 // 0)
    assert await owner.call(lambda: 42) == 42
    await owner.stop()
    assert not owner.thread.is_alive()
    assert "failed" in caplog.text


class Listening:
    """A link that listens, and counts its turns. `moves`: in how many turns from now on something comes."""

    active = True

    def __init__(self, *, with_devices):
        self.with_devices = with_devices
        self.turns, self.moves = 0, 0

    def turn(self):
        self.turns += 1
        self.moves = max(0, self.moves - 1)
        return self.moves > 0

    def abandon(self, error):
        self.active = False

    close = abandon


@pytest.mark.parametrize("with_devices", [False, True])
async def test_a_link_that_listens_for_long_is_looked_at_a_thousand_times_a_second_at_most(with_devices):
    """Right after something has come it is looked at more often: see `pause_s`."""
    owner, listening = Owner("owner", asyncio.get_running_loop()), Listening(with_devices=with_devices)
    owner.start()
    await owner.call(lambda: owner.add(listening))
    begin, turns = time.monotonic(), listening.turns
    await asyncio.sleep(0.3)  # the time that is measured
    took_s = time.monotonic() - begin
    quiet = (listening.turns - turns) / took_s
    assert quiet < 1100 + 100 / took_s, "the first 10 ms have some hundred turns more"
    busy = await owner.call(lambda: _turns_while_it_moves(listening, 1000))
    await until(lambda: listening.moves == 0)
    assert listening.turns - busy >= 1000, "the control: it does look"
    await owner.call(lambda: owner.remove(listening))
    await owner.stop()


def _turns_while_it_moves(listening, count):
    listening.moves = count
    return listening.turns


async def until(condition):
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def test_two_connected_idle_endpoints_cost_nothing():
    async with Rig("nixl") as rig:
        left, right = await rig.transport("left@1"), await rig.transport("right@1")
        source, destination = await Memory(4096, 1).register(left), await Memory(4096).register(right)
        a, b = await link(left, right)
        b.endpoint.listen()
        await write(a, [pair(source, destination)], b"busy once")
        await b.wait_for(1)
        b.endpoint.unlisten()
        threads = [left.owner_thread, right.owner_thread]
        last, began = [thread_cpu_s(thread) for thread in threads], time.monotonic()
        while True:  # the short linger after the WRITE ends first
            assert time.monotonic() - began < LIMIT_S
            await asyncio.sleep(0.5)
            used = [thread_cpu_s(thread) - before for thread, before in zip(threads, last, strict=True)]
            if max(used) < 0.005:
                break
            last = [thread_cpu_s(thread) for thread in threads]
        b.endpoint.listen()
        await write(a, [pair(source, destination)], b"and awake at once")
        await b.wait_for(2)


PROGRAM = """
import asyncio, logging, os, sys
from rdma_kv.transport.nixl import NixlTransport, prepare_ucx_environment

prepare_ucx_environment(os.environ)
logging.basicConfig(filename=sys.argv[3], filemode="w", format="%(message)s")

async def main(close):
    left, right = NixlTransport("left@1"), NixlTransport("right@1")
    await left.start()
    await right.start()
    here, there = left.endpoint("right@1"), right.endpoint("left@1")
    await here.connect(await there.metadata())
    there.listen()
    await here.notify(b"x")
    if close:
        await left.close()
        await right.close()

asyncio.run(main(sys.argv[1] == "close"))
logging.error("handlers live, raiseExceptions %s", logging.raiseExceptions)
print("the end")
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("status", [0, 3])
@pytest.mark.parametrize("closing", ["close", "forget"])
async def test_a_program_that_used_nixl_keeps_its_status_output_and_log(closing, status, tmp_path):
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("UCX_", "NIXL_"))}
    environ["PYTHONPATH"] = str(Path(__file__).parents[2])
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-W", "error", "-c", PROGRAM, closing, str(status), str(tmp_path / "log")),
        env=environ,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(LIMIT_S):
        output, errors = await process.communicate()
    assert (output, errors, process.returncode) == (b"the end\n", b"", status)
    assert (tmp_path / "log").read_text() == "handlers live, raiseExceptions True\n"
