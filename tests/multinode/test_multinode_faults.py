"""Faults between real nodes. Each test ends, in its fixture, with free == total and held == 0 on every node."""

from __future__ import annotations

import asyncio

import pytest
from cluster import Cluster, check_failed
from commands import run
from nodes import D0, D1, P0, P1, SHM_BYTES, Node

from rdma_kv.sidecar.process import NETWORK_CHANGED

pytestmark = [pytest.mark.multinode, pytest.mark.asyncio(loop_scope="session")]

both = pytest.mark.parametrize("transport", ["ucx", "nixl"])
short = pytest.mark.short
TOKENS = 1024  # 4 MiB
DATA_BYTES = 64 << 10
"""More than all heartbeats and other control frames that a lossy link may drop in a test: beyond, data was dropped too."""


@short
@both
async def test_every_pair_moves_every_byte(cluster: Cluster, transport: str) -> None:
    await cluster.check_all_pairs()
    for node in (P0, P1):
        lanes = [agent["stats"]["lanes"] for agent in (await cluster.status(node))["agents"]]
        assert lanes == [["tcp"]] * len(node.ranks), "the nodes share no memory: anything else is no network"


async def test_shared_memory_of_8_mib_is_enough(cluster: Cluster) -> None:
    tokens = 3072
    assert tokens * 4096 > SHM_BYTES
    found = await asyncio.to_thread(df, cluster, D0)
    assert found == SHM_BYTES, "or this test would prove nothing"
    (await cluster.transfer(P0, D0, tokens)).check_success(tokens)


def df(cluster: Cluster, node: Node) -> int:
    lane = cluster.lane
    out = run(lane.in_sidecar(node, "df", "--output=size", "--block-size=1", "/dev/shm"), env=lane.env)
    return int(out.split()[-1])


@short
@both
async def test_a_killed_sidecar_comes_back_and_its_engine_with_it(cluster: Cluster, transport: str) -> None:
    await cluster.check_pair(P0, D0)
    under_way = cluster.start(P0, D0, TOKENS, hold=True)
    beside = cluster.start(P1, D1, TOKENS, hold=True)
    await under_way.half()
    await beside.half()
    old = await asyncio.to_thread(cluster.lane.pid, D0, "sidecar")
    await cluster.trouble(cluster.lane.signal, D0, "sidecar", "KILL")
    (await under_way.ends()).check_failure()
    await cluster.lane.wait_new(D0, "sidecar", old)
    await beside.go()
    (await beside.ends()).check_success(TOKENS)
    await cluster.ready()
    await cluster.check_pair(P0, D0)
    await cluster.check_pair(P1, D0)


async def test_a_killed_sidecar_of_the_sender(cluster: Cluster) -> None:
    under_way = cluster.start(P0, D1, TOKENS, hold=True)
    await under_way.half()
    old = await asyncio.to_thread(cluster.lane.pid, P0, "sidecar")
    await cluster.trouble(cluster.lane.signal, P0, "sidecar", "KILL")
    (await under_way.ends()).check_failure()
    await cluster.lane.wait_new(P0, "sidecar", old)
    await cluster.ready()
    await cluster.check_pair(P0, D1)


@short
@pytest.mark.parametrize("victim", [P0, D0], ids=lambda node: node.name)
async def test_a_killed_engine_ends_its_transfers_and_comes_back_under_its_name(cluster: Cluster, victim: Node) -> None:
    await cluster.check_pair(P0, D0)
    under_way = cluster.start(P0, D0, TOKENS, hold=True)
    await under_way.half()
    old = await asyncio.to_thread(cluster.lane.pid, victim, "engine")
    begin = asyncio.get_running_loop().time()
    await cluster.trouble(cluster.lane.signal, victim, "engine", "KILL")
    ends = await under_way.ends()
    survivors = ends.receive if victim is P0 else ends.send
    check_failed(survivors)
    took_s = asyncio.get_running_loop().time() - begin
    assert took_s < 3.0, f"told after {took_s:.1f} s; a second, and a busy machine"
    await cluster.reconnect_engine(victim, old)
    await cluster.ready()
    await cluster.check_pair(P0, D0)


async def test_a_stopped_sidecar_is_lost_and_found_again(cluster: Cluster) -> None:
    await cluster.check_pair(P0, D0)
    under_way = cluster.start(P0, D0, TOKENS, hold=True, timeout_s=10.0)
    await under_way.half()
    lane = cluster.lane
    await cluster.trouble(lane.signal, D0, "sidecar", "STOP", mend=lambda: lane.signal(D0, "sidecar", "CONT"))
    ends = await under_way.send.end()
    check_failed(ends)
    assert {end["outcome"] for end in ends.values()} == {"PeerLostError"}, (
        f"it would time out without a fault too: {ends}"
    )
    await cluster.check_pair(P0, D1)
    await cluster.mend()
    receives = (await under_way.ends()).receive
    assert receives, "the engine of a stopped sidecar lives"
    assert all(end["outcome"] not in {"success", "bug"} for end in receives.values()), receives
    await cluster.check_pair(P0, D0)


async def test_a_restart_in_good_order_drains(cluster: Cluster) -> None:
    under_way = cluster.start(P0, D0, TOKENS, hold=True)
    await under_way.half()
    old = await asyncio.to_thread(cluster.lane.pid, D0, "sidecar")
    await cluster.trouble(cluster.lane.signal, D0, "sidecar", "TERM")
    await under_way.go()  # what runs may end
    (await under_way.ends()).check_success(TOKENS)
    await cluster.lane.wait_new(D0, "sidecar", old)
    await cluster.ready()
    await cluster.check_pair(P0, D0)


@short
async def test_a_partition_between_two_nodes_only(cluster: Cluster) -> None:
    await cluster.check_all_pairs()
    lane = cluster.lane
    under_way, beside = (cluster.start(P0, to, TOKENS, hold=True, timeout_s=10.0) for to in (D0, D1))
    await under_way.half()
    await beside.half()
    await cluster.trouble(lane.block, P0, D0, mend=lambda: lane.unblock(P0))
    await beside.go()
    (await beside.ends()).check_success(TOKENS)
    (await under_way.ends()).check_failure()
    dropped = await asyncio.to_thread(lane.dropped, P0)
    assert dropped.packets, "the rules match nothing; a transfer that nobody lets go on times out without them too"
    (await cluster.transfer(P1, D0, TOKENS)).check_success(TOKENS)
    (await cluster.transfer(P0, D1, TOKENS)).check_success(TOKENS)
    await cluster.mend()
    await cluster.check_pair(P0, D0)


async def test_connections_that_are_reset(cluster: Cluster) -> None:
    await cluster.check_pair(P0, D0)
    lane = cluster.lane
    under_way = cluster.start(P0, D0, TOKENS, hold=True, timeout_s=10.0)
    await under_way.half()
    reset = ("-j", "REJECT", "--reject-with", "tcp-reset")
    await cluster.trouble(lane.block, P0, D0, reset, ("-p", "tcp"), mend=lambda: lane.unblock(P0))
    await under_way.go()
    (await under_way.ends()).check_failure()
    await cluster.mend()
    await cluster.check_pair(P0, D0)


@both
async def test_lost_packets_cost_time_only(cluster: Cluster, transport: str) -> None:
    lane = cluster.lane
    await cluster.trouble(lane.lose_packets, D0, 0.05, mend=lambda: lane.unblock(D0))
    before = await asyncio.to_thread(lane.dropped, D0)
    for _ in range(6):
        await cluster.check_pair(P0, D0, TOKENS)
    after = await asyncio.to_thread(lane.dropped, D0)
    packets, lost_bytes = after.packets - before.packets, after.size_bytes - before.size_bytes
    lane.figures.setdefault("lost_packets", {})[transport] = packets
    assert lost_bytes > DATA_BYTES, (
        f"while the transfers ran, the rule dropped {packets} packets of {lost_bytes} bytes: no part of the data, "
        "so this proves nothing"
    )


async def test_a_slow_link_is_used_as_far_as_it_goes(cluster: Cluster) -> None:
    lane = cluster.lane
    await cluster.check_pair(P0, D0)
    await cluster.trouble(lane.slow, P0, "200mbit", mend=lambda: lane.full_speed(P0))
    tokens = 3072  # 12 MiB: half a second at that rate
    begin = asyncio.get_running_loop().time()
    ends = await cluster.transfer(P0, D0, tokens)
    took_s = asyncio.get_running_loop().time() - begin
    ends.check_success(tokens)
    least_s = tokens * 4096 * 8 / 200e6
    assert took_s > 0.9 * least_s, "the limit does not work, so this proves nothing"
    assert took_s < 10 * least_s, f"{took_s:.1f} s for what the link carries in {least_s:.1f} s"


@both
async def test_a_node_that_is_taken_off_the_network_for_a_while(cluster: Cluster, transport: str) -> None:
    await cluster.check_all_pairs()
    lane = cluster.lane
    under_way = cluster.start(P0, D0, TOKENS, hold=True, timeout_s=10.0)
    await under_way.half()
    old = await asyncio.to_thread(lane.pid, D0, "sidecar")
    await cluster.trouble(lane.disconnect, D0)
    await lane.wait_new(D0, "sidecar", old)  # it has ended itself
    await cluster.check_pair(P0, D1)
    await cluster.trouble(lane.connect, D0)
    (await under_way.ends()).check_failure()
    await cluster.ready()
    await cluster.check_all_pairs()


@short
@both
async def test_an_interface_that_comes_back_under_another_name(cluster: Cluster, transport: str) -> None:
    """The process lives through it, stopped: UCX would hold the old interface and die of the next peer."""
    await cluster.check_all_pairs()
    lane = cluster.lane
    before, old = await asyncio.to_thread(lane.interface, D0), await asyncio.to_thread(lane.pid, D0, "sidecar")
    under_way = cluster.start(P0, D0, TOKENS, hold=True, timeout_s=10.0)
    await under_way.half()
    await cluster.trouble(lane.signal, D0, "sidecar", "STOP", mend=lambda: lane.signal(D0, "sidecar", "CONT"))
    await cluster.trouble(lane.disconnect, D0)
    await cluster.trouble(lane.connect, D0)
    assert await asyncio.to_thread(lane.interface, D0) != before, "or this proves nothing"
    await cluster.mend()
    await lane.wait_new(D0, "sidecar", old)
    ended = await asyncio.to_thread(lane.exit_status, D0)
    assert ended == NETWORK_CHANGED, "it died of it instead of ending itself"
    (await under_way.ends()).check_failure()
    await cluster.ready()
    await cluster.check_all_pairs()
