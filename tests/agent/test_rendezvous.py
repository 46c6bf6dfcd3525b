"""Who finds whom: either side first, counterparts named, one of several, or any; duplicates; bounds."""

import asyncio

import pytest
from rig import Side, cluster

from rdma_kv.config import Timeouts
from rdma_kv.errors import LocalProtocolError, TransferAborted, TransferTimeout
from rdma_kv.messages import Expect, Offer
from rdma_kv.topology import ModelSpec, Topology
from rdma_kv.types import ReplicaId, Role

pytestmark = pytest.mark.usefixtures("face")

MODEL = ModelSpec.gqa(layers=2, kv_heads=2, head_dim=8, itemsize=4, dtype="float32", fingerprint="toy")
MLA = ModelSpec.mla(layers=2, latent_dim=10, fingerprint="toy")
TOKENS = 20


def sides(p=(2, 2), d=(2, 2), **kwargs):
    return [
        Side("prefill", Role.PREFILL, Topology.with_layers(2, tp=p[0], dp=p[1]), **kwargs),
        Side("decode", Role.DECODE, Topology.with_layers(2, tp=d[0], dp=d[1])),
    ]


async def send(c, agent: int, replica: int, *, key="k", to=None, request=1, timeout_s=5.0):
    pages = [3, 4]
    for memory in c.prefill.memory_of(replica):
        memory.fill(request, pages, TOKENS)
    sending = c.prefill.agents[agent].send(key, replica, pages, to=to, tokens=TOKENS, timeout_s=timeout_s)
    async with sending as out:
        await out.push()
        out.metadata["request"] = request
    return out


async def receive(c, replica: int, *, key="k", source=None, timeout_s=5.0):
    return await c.decode.agents[replica].receive(
        key, replica, [5, 6], source=source, tokens=TOKENS, timeout_s=timeout_s
    )


def check(c, replica: int, request=1):
    for memory in c.decode.memory_of(replica):
        memory.check(request, [5, 6], 0, TOKENS)


async def unmatched(agent) -> None:
    """Until a message waits there for its call."""
    async with asyncio.timeout(5):
        while not agent.stats()["unmatched"]:
            await asyncio.sleep(0)


async def test_prefill_first_decode_named(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        sending = asyncio.create_task(send(c, 0, 0, to=ReplicaId("decode", 1)))
        await unmatched(c.decode.agents[1])
        await receive(c, 1, source=ReplicaId("prefill", 0))
        await sending
        check(c, 1)
        c.check_nothing_leaked()


async def test_decode_first_prefill_does_not_know_whom(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        receiving = asyncio.create_task(receive(c, 1, source=ReplicaId("prefill", 0)))
        await unmatched(c.prefill.agents[0])
        out = await send(c, 0, 0, to=None)
        await receiving
        assert out.to == ReplicaId("decode", 1)
        check(c, 1)
        c.check_nothing_leaked()


async def test_prefill_waits_for_whoever_expects_the_key(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        sending = asyncio.create_task(send(c, 1, 1, to=None))
        for _ in range(5):
            await asyncio.sleep(0)
        await receive(c, 0, source=ReplicaId("prefill", 1))
        assert (await sending).to == ReplicaId("decode", 0)
        check(c, 0)


@pytest.mark.parametrize("offer_first", [True, False])
async def test_decode_takes_whoever_offers(tmp_path, offer_first):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        if offer_first:
            sending = asyncio.create_task(send(c, 1, 1, to=ReplicaId("decode", 0)))
            await unmatched(c.decode.agents[0])
            received = await receive(c, 0)
            await sending
        else:
            receiving = asyncio.create_task(receive(c, 0))
            await send(c, 1, 1, to=ReplicaId("decode", 0))
            received = await receiving
        assert received.source == ReplicaId("prefill", 1)
        check(c, 0)
        c.check_nothing_leaked()


async def test_both_unknown_never_meet_and_both_say_so(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        outcomes = await asyncio.gather(
            send(c, 0, 0, timeout_s=0.3), receive(c, 0, timeout_s=0.3), return_exceptions=True
        )
        assert [type(o) for o in outcomes] == [TransferTimeout, TransferTimeout]
        assert all("anybody" in str(o) for o in outcomes)
        c.check_nothing_leaked()


async def test_expect_to_several_prefill_replicas_the_taker_wins(tmp_path):
    """Generation first: decode does not know which replica will take the request; the others let it expire."""
    async with cluster(tmp_path, MODEL, *sides(p=(4, 4))) as c:
        sources = [ReplicaId("prefill", n) for n in range(4)]
        receiving = asyncio.create_task(receive(c, 0, source=sources))
        for agent in c.prefill.agents:
            await unmatched(agent)
        await send(c, 2, 2, to=None)
        assert (await receiving).source == ReplicaId("prefill", 2)
        check(c, 0)
        assert [agent.stats()["unmatched"] for agent in c.prefill.agents] == [1, 1, 0, 1]


async def test_an_expect_expires_with_its_receive(tmp_path):
    timeouts = Timeouts(unmatched=0.1, quiesce=1.0)
    async with cluster(tmp_path, MODEL, *sides(), timeouts=timeouts) as c:
        receiving = asyncio.create_task(receive(c, 0, source=ReplicaId("prefill", 0)))
        await unmatched(c.prefill.agents[0])
        with pytest.raises(TransferAborted, match="has asked for this key"):
            await receiving
        assert c.prefill.agents[0].stats()["unmatched"] == 0


async def test_an_offer_expires_and_the_sender_hears_it(tmp_path):
    timeouts = Timeouts(unmatched=0.1, quiesce=1.0)
    async with cluster(tmp_path, MODEL, *sides(), timeouts=timeouts) as c:
        with pytest.raises(TransferAborted, match="has asked for this key"):
            await send(c, 0, 0, to=ReplicaId("decode", 0))
        assert c.decode.agents[0].stats()["unmatched"] == 0


async def test_r27_an_explicit_replica_beats_every_rule(tmp_path):
    """The key's number and hash say otherwise; the request goes where it was told."""
    async with cluster(tmp_path, MODEL, *sides()) as c:
        for number, replica in enumerate([1, 1, 0, 0, 1]):
            to, source = ReplicaId("decode", replica), ReplicaId("prefill", 1)
            await asyncio.gather(
                send(c, 1, 1, key=str(number), to=to, request=number),
                receive(c, replica, key=str(number), source=source),
            )
            check(c, replica, request=number)


async def test_f68_different_request_ids_are_mapped_by_an_explicit_key(tmp_path):
    """Both engines name the request as they like; the transfer has a key of its own, taken literally."""
    async with cluster(tmp_path, MODEL, *sides()) as c:
        keys = {"cmpl-17-abc-0": "xfer-1", "cmpl-17-abc": "xfer-1-0"}  # suffixes are never stripped
        for request, key in enumerate(keys.values()):
            sending = send(c, 0, 0, key=key, to=ReplicaId("decode", 0), request=request)
            _, received = await asyncio.gather(sending, receive(c, 0, key=key, source=ReplicaId("prefill", 0)))
            assert received.metadata == {"request": request}
        with pytest.raises(TransferTimeout):
            await asyncio.gather(
                send(c, 0, 0, key="a-0", to=ReplicaId("decode", 0), timeout_s=0.2),
                receive(c, 0, key="a", source=ReplicaId("prefill", 0), timeout_s=0.2),
            )


async def test_the_same_key_from_two_prefill_replicas_stays_two_transfers(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        first = asyncio.create_task(send(c, 0, 0, to=ReplicaId("decode", 0), request=1))
        second = asyncio.create_task(send(c, 1, 1, to=ReplicaId("decode", 0), request=2))
        while c.decode.agents[0].stats()["unmatched"] < 2:
            await asyncio.sleep(0)
        received = await receive(c, 0, source=ReplicaId("prefill", 1))
        assert received.metadata == {"request": 2}
        check(c, 0, request=2)
        assert (await receive(c, 0, source=ReplicaId("prefill", 0))).metadata == {"request": 1}
        check(c, 0, request=1)
        await asyncio.gather(first, second)


async def test_a_duplicate_receive_is_refused_without_harm(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        first = asyncio.create_task(receive(c, 0))
        await asyncio.sleep(0)
        with pytest.raises(LocalProtocolError):
            await receive(c, 0)
        await send(c, 0, 0, to=ReplicaId("decode", 0))
        assert (await first).metadata == {"request": 1}


async def test_unmatched_messages_are_bounded_per_peer(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        await asyncio.gather(send(c, 0, 0, to=ReplicaId("decode", 0)), receive(c, 0, source=ReplicaId("prefill", 0)))
        decode, prefill = c.decode.agents[0], c.prefill.agents[0]
        (peer,) = prefill._shell.links.peers
        (back,) = decode._shell.links.peers
        route = prefill._shell.route("x", 0, c.registry.engine("decode"), 0)
        limit = decode.config.limits.unmatched_per_peer
        peer.numbers.given = 100 + limit + 50  # as if it had offered them
        for n in range(limit + 50):
            peer.send(Offer(100 + n, f"x{n}", 0, 0, 0, route.digest, [(0, 1)], 0, 60_000))
            back.send(Expect(f"x{n}", 0, 0, 0, route.digest, [(0, 1)], 60_000))
        async with asyncio.timeout(10):
            while decode.stats()["unmatched"] < limit or prefill.stats()["unmatched"] < limit:
                await asyncio.sleep(0)
        for _ in range(100):
            await asyncio.sleep(0)
        assert decode.stats()["unmatched"] == prefill.stats()["unmatched"] == limit
        # A call that is answered makes room; the link lives on.
        await asyncio.gather(
            send(c, 0, 0, key="new", to=ReplicaId("decode", 1)),
            receive(c, 1, key="new", source=ReplicaId("prefill", 0)),
        )


async def test_r04_idle_ranks_learn_from_expect_that_nothing_is_wanted(tmp_path):
    """MLA prefill TP 4: one rank sends to each decode replica. `send(to=None)` of the others ends at once."""
    async with cluster(tmp_path, MLA, *sides(p=(4, 1), d=(2, 2), agents_by="rank")) as c:
        receiving = asyncio.create_task(receive(c, 1, source=ReplicaId("prefill", 0)))
        outs = await asyncio.gather(*(send(c, rank, 0, to=None) for rank in range(4)))
        await receiving
        assert {out.to for out in outs} == {ReplicaId("decode", 1)}
        assert [bool(agent.stats()["gather_launches"]) for agent in c.prefill.agents] == [False, True, False, False]
        check(c, 1)
        c.check_nothing_leaked()


async def test_a_key_can_be_used_again_at_once(tmp_path):
    """The next EXPECT of a key may be here before the sender of the first has left its block."""
    async with cluster(tmp_path, MODEL, *sides()) as c:
        to, source = ReplicaId("decode", 0), ReplicaId("prefill", 0)
        await asyncio.gather(send(c, 0, 0, to=to), receive(c, 0, source=source))
        for request in range(20):
            first = asyncio.create_task(send(c, 0, 0, to=None, request=request))
            await receive(c, 0, source=source)
            again = asyncio.create_task(receive(c, 0, source=source, timeout_s=2.0))
            await first
            await send(c, 0, 0, to=None, request=request, timeout_s=2.0)
            assert (await again).metadata == {"request": request}
        c.check_nothing_leaked()
