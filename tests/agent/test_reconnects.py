"""A70 and P18 on whole agents: what a link carried before it broke changes nothing on the one that follows."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from rig import Cluster, Side, cluster

from rdma_kv.config import StagingConfig, Timeouts
from rdma_kv.deaths import own_process
from rdma_kv.messages import Abort, Ack, Done, ErrorCode, Finish, Grant, Notification, Offer, Quiesced, Release, Start
from rdma_kv.messages import encode_notification as encoded
from rdma_kv.peer import Peer
from rdma_kv.protocol.link import read_hello
from rdma_kv.topology import ModelSpec, Topology
from rdma_kv.types import Role

MODEL = ModelSpec.gqa(layers=2, kv_heads=2, head_dim=8, itemsize=4, dtype="float32", fingerprint="toy")
PAGES, OTHER_PAGES, TOKENS = [0, 1, 2], [5, 6, 7], 40
LIMIT_S = 10.0


def sides() -> list[Side]:
    return [Side(role.value, role, Topology.with_layers(2)) for role in (Role.PREFILL, Role.DECODE)]


async def until(condition) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0)


def ends(c: Cluster) -> list[Peer]:
    """The prefill side's and the decode side's end of their link."""
    return [side.agents[0]._shell.links.peers[0] for side in (c.prefill, c.decode)]


async def reconnected(c: Cluster) -> tuple[list[Peer], list[Peer]]:
    """Break the link, and let it come back by itself: (both ends before, both ends after)."""
    before = ends(c)
    before[0].connection.abort()
    await until(lambda: all(peer.lost for peer in before))
    await until(lambda: all(side.agents[0]._shell.links.peers for side in (c.prefill, c.decode)))
    return before, ends(c)


@pytest.mark.parametrize(("heartbeat", "lease"), [(2.0, 10.0), (0.0104, 0.0313), (0.0116, 0.0349), (0.01, 0.03001)])
async def test_what_an_agent_says_of_its_leases_is_never_refused(tmp_path, heartbeat, lease):
    """Rounded to milliseconds a lease is still more than three heartbeats."""
    async with cluster(tmp_path, MODEL, *sides(), timeouts=Timeouts(heartbeat=heartbeat, lease=lease)) as c:
        identity = await c.prefill.agents[0]._identity()
        assert identity.lease_ms > 3 * identity.heartbeat_ms
        assert identity.process == own_process()
        assert read_hello("peer", identity.hello()) == identity


async def carried(c: Cluster, sender: Peer, at: Side) -> None:
    """Everything that was sent before on this link has been read: an ABORT by name behind it has."""
    seen: list[str] = []
    matchmaker = at.agents[0]._shell.mover._matchmaker
    took = matchmaker.on_abort
    matchmaker.on_abort = lambda peer, message: seen.append(message.key)
    sender.send(Abort(0, "a marker", 0, 0, 0, ErrorCode.TRANSFER_ABORTED, "", ""))
    await until(lambda: seen)
    matchmaker.on_abort = took


async def test_a70_replays_of_a_former_link_are_refused(tmp_path):
    """The numbers go on: what prefill offered before the break is not new after it."""
    async with cluster(tmp_path, MODEL, *sides()) as c:
        decode = c.decode.agents[0]
        offers: list[Offer] = []
        matchmaker = decode._shell.mover._matchmaker
        took = matchmaker.on_offer
        await c.move(1, 0, 0, PAGES, PAGES, TOKENS)
        route = decode._shell.route("k", 0, c.registry.engine("prefill"), 0)
        matchmaker.on_offer = lambda peer, message: (offers.append(message), took(peer, message))
        before, (prefill_end, decode_end) = await reconnected(c)
        assert decode_end.numbers is before[1].numbers
        assert decode_end.numbers.high_water == prefill_end.numbers.given == 1
        replay = Offer(1, "request-1", 0, 0, 0, route.digest, [(0, TOKENS)], 4, 5000)
        prefill_end.send(replay)
        await carried(c, prefill_end, c.decode)
        assert decode.stats()["counters"]["replays"] == 1
        assert not offers
        assert not decode.stats()["unmatched"]
        await c.move(2, 0, 0, OTHER_PAGES, OTHER_PAGES, TOKENS)
        assert decode_end.numbers.high_water == 2
        c.check_nothing_leaked()


async def test_a70_grants_and_answers_of_a_former_link_change_nothing(tmp_path):
    """Late words for a transfer that has ended, on the link that followed: none is posted to, none is believed."""
    async with cluster(tmp_path, MODEL, *sides(), staging=StagingConfig(4, 1 << 16)) as c:
        await c.move(1, 0, 0, PAGES, PAGES, TOKENS)
        pool = c.decode.memory[0, 0].array
        _, (prefill_end, decode_end) = await reconnected(c)
        snapshot = pool.copy()
        boxes = c.prefill.agents[0].stats()["counters"]["boxes"]
        released: list[Release] = []
        mover = c.decode.agents[0]._shell.mover
        took = mover.on_message
        mover.on_message = lambda peer, message: (
            released.append(message) if isinstance(message, Release) else took(peer, message)
        )
        decode_end.send(Grant(1, [(0, TOKENS)], [(0, 1), (1, 2)]))
        decode_end.send(Ack(1, 0, 1))
        decode_end.send(Done(1))
        await carried(c, decode_end, c.prefill)
        await until(lambda: released)  # nothing was posted there, and the target is told so
        assert released == [Release(1, [(0, 1), (1, 2)])]
        for message in (Start(1), Finish(1, 1, {"request": 7}), Release(1, [(0, 1)]), Quiesced(1)):
            prefill_end.send(message)
        await carried(c, prefill_end, c.decode)
        assert c.prefill.agents[0].stats()["counters"]["boxes"] == boxes
        np.testing.assert_array_equal(pool, snapshot)
        del mover.on_message
        await c.move(2, 0, 0, OTHER_PAGES, OTHER_PAGES, TOKENS)
        np.testing.assert_array_equal(pool[:, :, PAGES], snapshot[:, :, PAGES])
        c.check_nothing_leaked()


async def test_a70_a_notification_of_a_former_links_epoch_is_dropped(tmp_path):
    """It comes over the data plane of the new link, and names a slot that is another transfer's by now."""
    async with cluster(tmp_path, MODEL, *sides(), staging=StagingConfig(2, 1 << 16)) as c:
        await c.move(1, 0, 0, PAGES, PAGES, TOKENS)
        await reconnected(c)
        await c.move(2, 0, 0, OTHER_PAGES, OTHER_PAGES, TOKENS)
        decode = c.decode.agents[0]
        pool = c.decode.memory[0, 0].array
        snapshot = pool.copy()
        (prefill_end, _) = ends(c)
        before = decode.stats()["counters"].get("stale_notifications", 0)
        stale = [Notification(number, 0, 1, 0, (0, 2), (0, TOKENS)) for number in (1, 2)]
        for note in stale:
            decode._shell.links.peers[0].endpoint.listen()
            await prefill_end.endpoint.notify(encoded(note))
            decode._shell.links.peers[0].endpoint.unlisten()
        await until(lambda: decode.stats()["counters"].get("stale_notifications", 0) == before + len(stale))
        np.testing.assert_array_equal(pool, snapshot)
        await c.move(3, 0, 0, PAGES, PAGES, TOKENS)
        c.check_nothing_leaked()
