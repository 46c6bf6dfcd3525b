"""Many transfers at once: fair shares of small pools, shared launches, one handshake, small messages."""

import asyncio
import threading

import pytest
from rig import Side, cluster

from rdma_kv.config import StagingConfig
from rdma_kv.messages import MAX_FRAME_BYTES, Expect, Grant, Offer, encode
from rdma_kv.planner import Route
from rdma_kv.topology import ModelSpec, Topology
from rdma_kv.transport.loopback import LoopbackNetwork, RandomDelays
from rdma_kv.types import ReplicaId, Role

MODEL = ModelSpec.gqa(layers=4, kv_heads=4, head_dim=8, itemsize=4, dtype="float32", fingerprint="toy")
SMALL = StagingConfig(slots=4, slot_bytes=4096)


def sides(p=(4, 4), d=(4, 4), pages=128):
    return [
        Side("prefill", Role.PREFILL, Topology.with_layers(4, tp=p[0], dp=p[1]), pages=pages),
        Side("decode", Role.DECODE, Topology.with_layers(4, tp=d[0], dp=d[1]), pages=pages, page_size=8, kind="hnd"),
    ]


async def run_all(c, count: int, tokens: int = 37) -> None:
    """`count` requests over all pairs of replicas, all at once; every byte of each is checked at the end."""
    p_dp, d_dp = c.prefill.topology.dp, c.decode.topology.dp
    jobs = []
    for n in range(count):
        p, d, turn = n % p_dp, n // p_dp % d_dp, n // (p_dp * d_dp)
        src = [3 * (turn * d_dp + d) + i for i in range(3)]
        dst = [5 * (turn * p_dp + p) + i for i in range(5)]
        jobs.append((n, p, d, src, dst))
        for memory in c.prefill.memory_of(p):
            memory.fill(n, src, tokens)

    async def send(n, p, d, src):
        async with c.prefill.agents_of(p)[0].send(f"k{n}", p, src, to=ReplicaId("decode", d), tokens=tokens) as out:
            await out.push((0, 16))
            await out.push((16, tokens))

    async def receive(n, p, d, dst):
        return await c.decode.agents_of(d)[0].receive(
            f"k{n}", d, dst, source=ReplicaId("prefill", p), tokens=tokens, timeout_s=30
        )

    async with asyncio.timeout(30), asyncio.TaskGroup() as group:
        for n, p, d, src, dst in jobs:
            group.create_task(send(n, p, d, src))
            group.create_task(receive(n, p, d, dst))
    for n, _, d, _, dst in jobs:
        for memory in c.decode.memory_of(d):
            memory.check(n, dst, 0, tokens)
    c.check_nothing_leaked()


async def test_f37_64_transfers_over_4_by_4_agents_through_small_pools(tmp_path):
    network = LoopbackNetwork(faults=RandomDelays(7, 0.002))
    async with cluster(tmp_path, MODEL, *sides(), network=network, staging=SMALL) as c:
        await run_all(c, 64)


@pytest.mark.parametrize("slots", [2, 3])
async def test_the_smallest_pools_starve_nobody(tmp_path, slots):
    staging = StagingConfig(slots=slots, slot_bytes=4096)
    async with cluster(tmp_path, MODEL, *sides((2, 2), (2, 2)), staging=staging) as c:
        await run_all(c, 12)


async def test_a51_staging_for_one_and_a_half_requests_two_at_once(tmp_path):
    """A request needs 10 chunks, the pools have 3 slots."""
    async with cluster(tmp_path, MODEL, *sides((1, 1), (1, 1)), staging=StagingConfig(3, 4096)) as c:
        await run_all(c, 2)


async def test_p35_64_concurrent_first_contacts_make_one_handshake(tmp_path):
    async with cluster(tmp_path, MODEL, *sides((1, 1), (1, 1), pages=512)) as c:
        await run_all(c, 64)
        assert c.prefill.agents[0].stats()["handshakes"] == c.decode.agents[0].stats()["handshakes"] == 1
        assert c.prefill.agents[0].stats()["links"] == 1


async def test_p35_both_sides_dial_at_once(tmp_path):
    """Every pair of agents dials both ways at the same moment; one connection a pair stays."""
    async with cluster(tmp_path, MODEL, *sides()) as c:
        await run_all(c, 64)
        assert [agent.stats()["links"] for agent in (*c.prefill.agents, *c.decode.agents)] == [4] * 8
        assert sum(agent.stats()["handshakes"] for agent in c.prefill.agents) == 16


async def test_one_launch_serves_ready_chunks_of_several_transfers_and_replicas(tmp_path):
    """One agent owns four replicas. Chunks that get ready while a launch runs go together into the next one."""
    prefill, decode = sides()
    prefill.agents_by = decode.agents_by = "engine"
    staging = StagingConfig(slots=128, slot_bytes=1 << 16)
    async with cluster(tmp_path, MODEL, prefill, decode, staging=staging) as c:
        batcher = c.prefill.agents[0]._shell.packer.kernels.gathers
        honest, running, sizes = batcher.kernel, threading.Event(), []

        def held(chunks) -> None:
            sizes.append(len(chunks))
            assert running.wait(20)
            honest(chunks)

        batcher.kernel = held
        work = asyncio.create_task(run_all(c, 32))
        async with asyncio.timeout(20):
            while not sizes or sizes[0] + len(batcher._waiting) < 64:  # 32 requests in two pushes
                await asyncio.sleep(0)
        running.set()
        await work
        assert len(sizes) == c.prefill.agents[0].stats()["gather_launches"] <= 2
        assert sum(sizes) == c.decode.agents[0].stats()["counters"]["boxes"] == 64


async def test_no_peer_holds_more_than_half_of_a_pool(tmp_path):
    """While one decode agent stalls, transfers to another go on."""
    async with cluster(tmp_path, MODEL, *sides((1, 1), (2, 2)), staging=SMALL) as c:
        stuck = asyncio.create_task(
            c.decode.agents[0].receive("stuck", 0, [0, 1], source=ReplicaId("prefill", 0), tokens=16, timeout_s=20)
        )
        held: list[int] = []
        honest = c.decode.agents[0]._shell.packer.scatter
        gate = asyncio.Event()

        async def slow_scatter(chunk) -> None:
            held.append(1)
            await gate.wait()
            await honest(chunk)

        c.decode.agents[0]._shell.packer.scatter = slow_scatter

        async def send_stuck() -> None:
            to = ReplicaId("decode", 0)
            async with c.prefill.agents[0].send("stuck", 0, [0], to=to, tokens=16, timeout_s=20) as out:
                await out.push()

        sending = asyncio.create_task(send_stuck())
        while not held:
            await asyncio.sleep(0)
        await c.move(1, 0, 1, [5, 6, 7], [5, 6, 7, 8, 9], 37)
        assert len(held) <= 2
        gate.set()
        await asyncio.gather(stuck, sending)


def test_p75_control_messages_of_a_huge_request_stay_small():
    """61 layers x 8,192 pages: a message says ranges, never pages or layers."""
    model = ModelSpec.mla(layers=61)
    topology = Topology.with_layers(61, tp=8)
    route = Route(model, topology, topology, 0, 0)
    span = [(0, 8192 * 64)]
    slots = [(n, 1 << 40) for n in range(4096)]
    for message in (
        Expect("k" * 512, 0, 0, 0, route.digest, span, 60_000),
        Offer(1, "k" * 512, 0, 0, 0, route.digest, span, 1 << 20, 60_000),
        Grant(1, span, slots),
    ):
        assert len(encode(message)) < MAX_FRAME_BYTES // 10
