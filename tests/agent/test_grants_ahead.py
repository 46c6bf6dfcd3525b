"""Slots that go with the EXPECT: they save a small request a round trip, and always come back."""

import asyncio

import pytest
from rig import Side, cluster

from rdma_kv.config import StagingConfig, Timeouts
from rdma_kv.errors import RdmaKvError, TransferTimeout
from rdma_kv.messages import Expect, Grant, Notification, Offer, encode_notification
from rdma_kv.topology import ModelSpec, Topology
from rdma_kv.types import ReplicaId, Role

MODEL = ModelSpec.gqa(layers=2, kv_heads=2, head_dim=8, itemsize=4, dtype="float32", fingerprint="toy")
DECODE, PREFILL = ReplicaId("decode", 0), ReplicaId("prefill", 0)
PAGES, TOKENS = [5, 2, 9], 40
POOL = StagingConfig(slots=8, slot_bytes=1 << 16)


def sides(tp: int = 1, agents_by: str = "replica"):
    return [Side(r.value, r, Topology.with_layers(2, tp=tp), agents_by=agents_by) for r in (Role.PREFILL, Role.DECODE)]


async def send(c, key="k", timeout_s=5.0, tokens=TOKENS):
    async with c.prefill.agents[0].send(key, 0, PAGES, to=DECODE, tokens=tokens, timeout_s=timeout_s) as out:
        await out.push()


def receive(c, key="k", timeout_s=5.0, tokens=TOKENS):
    return c.decode.agents[0].receive(key, 0, PAGES, source=PREFILL, tokens=tokens, timeout_s=timeout_s)


def ahead(c) -> int:
    return c.decode.agents[0].stats()["counters"].get("slots_ahead", 0)


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


def free(c) -> list[int]:
    return [agent.stats()["slots_free"] for agent in (*c.prefill.agents, *c.decode.agents)]


def watch(c) -> list:
    """Messages that decode sends from now on."""
    (peer,) = c.decode.agents[0]._shell.links.peers
    honest, seen = peer.send, []

    def send(message) -> None:
        seen.append(message)
        honest(message)

    peer.send = send
    return seen


async def warm(c) -> None:
    await c.move(1, 0, 0, PAGES, PAGES, TOKENS)
    assert ahead(c) == 0  # the link was not exported yet


async def test_decode_first_on_a_warm_link_needs_no_grant_to_begin(tmp_path):
    async with cluster(tmp_path, MODEL, *sides(), staging=POOL) as c:
        await warm(c)
        seen = watch(c)
        for memory in c.prefill.memory_of(0):
            memory.fill(2, PAGES, TOKENS)
        receiving = asyncio.create_task(receive(c))
        await until(lambda: c.prefill.agents[0].stats()["unmatched"])
        (expect,) = (m for m in seen if isinstance(m, Expect))
        assert len(expect.grants) == ahead(c) == 1
        await asyncio.gather(send(c), receiving)
        for memory in c.decode.memory_of(0):
            memory.check(2, PAGES, 0, TOKENS)
        assert all(not m.slots for m in seen if isinstance(m, Grant))  # it wrote into what was given ahead
        c.check_nothing_leaked()


async def test_an_expect_that_crosses_the_offer_is_used_too(tmp_path):
    async with cluster(tmp_path, MODEL, *sides(), staging=POOL) as c:
        await warm(c)
        await asyncio.gather(send(c), receive(c))
        assert ahead(c) == 1
        await until(lambda: free(c) == [8, 8])
        c.check_nothing_leaked()


async def test_they_come_back_when_the_receive_times_out(tmp_path):
    async with cluster(tmp_path, MODEL, *sides(), staging=POOL, timeouts=Timeouts(quiesce=2.0)) as c:
        await warm(c)
        with pytest.raises(TransferTimeout):
            await receive(c, timeout_s=0.2)
        assert ahead(c) == 1
        await until(lambda: free(c) == [8, 8])
        assert c.decode.agents[0].stats()["transfers"] == 0


async def test_they_come_back_when_the_receive_is_cancelled(tmp_path):
    async with cluster(tmp_path, MODEL, *sides(), staging=POOL) as c:
        await warm(c)
        receiving = asyncio.create_task(receive(c))
        await until(lambda: c.prefill.agents[0].stats()["unmatched"])
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        await until(lambda: free(c) == [8, 8])
        c.check_nothing_leaked()


async def test_they_come_back_when_the_prefill_agent_closes(tmp_path):
    async with cluster(tmp_path, MODEL, *sides(), staging=POOL) as c:
        await warm(c)
        receiving = asyncio.create_task(receive(c))
        await until(lambda: c.prefill.agents[0].stats()["unmatched"])
        await c.prefill.agents[0].close()
        with pytest.raises(RdmaKvError):
            await receiving
        assert c.decode.agents[0].stats()["slots_free"] == 8


async def test_they_come_back_when_the_send_fails_at_once(tmp_path):
    async with cluster(tmp_path, MODEL, *sides(), staging=POOL) as c:
        await warm(c)
        receiving = asyncio.create_task(receive(c))
        await until(lambda: c.prefill.agents[0].stats()["unmatched"])
        with pytest.raises(ZeroDivisionError):
            async with c.prefill.agents[0].send("k", 0, PAGES, to=DECODE, tokens=TOKENS):
                raise ZeroDivisionError
        with pytest.raises(RdmaKvError):
            await receiving
        await until(lambda: free(c) == [8, 8])


async def test_a_shorter_prompt_gives_back_what_it_does_not_need(tmp_path):
    async with cluster(tmp_path, MODEL, *sides(), staging=StagingConfig(slots=16, slot_bytes=4096)) as c:
        await warm(c)
        receiving = asyncio.create_task(receive(c, tokens=30))
        await until(lambda: c.prefill.agents[0].stats()["unmatched"])
        assert ahead(c) > 1
        await asyncio.gather(send(c, tokens=10), receiving)
        assert (await receiving).tokens == {"kv": (0, 10)}
        await until(lambda: free(c) == [16, 16])


async def test_at_most_a_quarter_of_the_pool_and_whole_requests_only(tmp_path):
    async with cluster(tmp_path, MODEL, *sides(), staging=POOL) as c:
        await warm(c)
        tasks = [asyncio.create_task(receive(c, key=f"k{n}")) for n in range(5)]
        await until(lambda: c.prefill.agents[0].stats()["unmatched"] == 5)
        assert ahead(c) == 2
        assert c.decode.agents[0].stats()["slots_free"] == 6
        await asyncio.gather(*(send(c, key=f"k{n}") for n in range(5)), *tasks)
        await until(lambda: free(c) == [8, 8])
    async with cluster(tmp_path, MODEL, *sides(), staging=StagingConfig(slots=8, slot_bytes=4096)) as c:
        await warm(c)
        await asyncio.gather(send(c), receive(c))
        assert ahead(c) == 0  # more boxes than a quarter of the pool


async def test_none_to_several_agents(tmp_path):
    async with cluster(tmp_path, MODEL, *sides(2, "rank"), staging=POOL) as c:
        for request in range(3):
            await c.move(request, 0, 0, PAGES, PAGES, TOKENS)
        assert ahead(c) > 0  # rank to rank: one agent sends to each
    prefill, decode = sides(2, "rank")
    decode.agents_by = "replica"
    async with cluster(tmp_path, MODEL, prefill, decode, staging=POOL) as c:
        for request in range(3):
            await c.move(request, 0, 0, PAGES, PAGES, TOKENS)
        assert ahead(c) == 0


async def test_a_notification_that_overtakes_its_offer_is_kept_for_it(tmp_path):
    async with cluster(tmp_path, MODEL, *sides(), staging=POOL) as c:
        await warm(c)
        receiving = asyncio.create_task(receive(c))
        await until(lambda: c.prefill.agents[0].stats()["unmatched"])
        decode = c.decode.agents[0]
        mover = decode._shell.mover
        (peer,) = decode._shell.links.peers
        (entry,) = mover._transfers
        (slot,) = entry.machine._slots.granted
        number = peer.numbers.high_water + 1
        note = Notification(number, slot.index, slot.epoch, 0, (0, 2), (0, TOKENS))
        mover._hearing.on_notification(peer, encode_notification(note))
        assert len(peer.early) == 1
        route = entry.machine.plan.route
        mover.on_message(peer, Offer(number, "k", 0, 0, 0, route.digest, [(0, TOKENS)], 1, 5000))
        await until(lambda: decode.stats()["scatter_launches"] == 2)
        assert not peer.early
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
