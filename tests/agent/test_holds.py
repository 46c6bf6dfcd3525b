"""What is held after a failure, and what frees it: fences, SETTLE, death, retirement, more memory."""

from __future__ import annotations

import asyncio
import contextlib

import numpy as np
import pytest
from rig import Side, cluster
from test_endings import MODEL, PAGES, TOKENS, receive, send, sides, until_settled

from rdma_kv.config import StagingConfig, Timeouts
from rdma_kv.errors import FenceUnsupported, PeerLostError, RdmaKvError, StagingFull
from rdma_kv.memory import HostMemory
from rdma_kv.messages import Notification, Offer, Regions, encode_notification
from rdma_kv.slots import Hold
from rdma_kv.staging import _RETAINED
from rdma_kv.topology import Topology
from rdma_kv.transport.loopback import Fault, LoopbackNetwork, LoopbackTransport

pytestmark = pytest.mark.usefixtures("face")

QUICK = Timeouts(quiesce=0.2, retry=0.05)
SMALL = StagingConfig(slots=4, slot_bytes=4096)  # a request of TOKENS takes two boxes or more


class Unfenced(LoopbackTransport):
    """As over shared memory: one kind of fence, or both, is refused, and says so."""

    def __init__(self, network: LoopbackNetwork, name: str, *kinds: str) -> None:
        super().__init__(network, name)
        self._kinds = kinds

    def endpoint(self, peer):
        endpoint = super().endpoint(peer)
        if "target" in self._kinds:
            endpoint.fence_target = self._refuse
        if "source" in self._kinds:
            endpoint.fence_source = lambda: self._close_without_proof(endpoint)
        return endpoint

    async def _refuse(self) -> None:
        raise FenceUnsupported("loopback", "no-fence", "a test says so")

    async def _close_without_proof(self, endpoint) -> None:
        await endpoint.close()
        raise FenceUnsupported("loopback", "not-destroyed", "a test says so")


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def held(agent) -> dict[str, int]:
    """Held slots by reason."""
    found: dict[str, int] = {}
    for name, count in agent.stats()["slots_held"].items():
        reason = name.rsplit(":", 1)[1]
        found[reason] = found.get(reason, 0) + count
    return found


def link_of(agent):
    (peer,) = agent._shell.links.peers
    return peer


def cut(agent) -> None:
    """Break the control stream."""
    link_of(agent).connection._writer.transport.abort()


class Still(LoopbackNetwork):
    """A network on which nothing lands while it stands still: as beside a peer whose process is stopped."""

    async def stop(self) -> None:
        await self._turn.acquire()

    def resume(self) -> None:
        self._turn.release()


@contextlib.asynccontextmanager
async def under_way(tmp_path, *, timeouts=QUICK, kinds=(), staging=StagingConfig(slots=4, slot_bytes=1 << 16)):
    """One transfer whose WRITE is posted, and of which nothing lands."""
    network = Still()
    make = lambda name: Unfenced(network, name, *kinds)  # noqa: E731
    async with cluster(
        tmp_path, MODEL, *sides(), network=network, transport=make, timeouts=timeouts, staging=staging
    ) as c:
        await network.stop()
        calls = [
            asyncio.create_task(send(c.prefill.agents[0], timeout_s=3.0)),
            asyncio.create_task(receive(c.decode.agents[0], timeout_s=3.0)),
        ]
        await until(lambda: held(c.prefill.agents[0]).get("write") and network._endpoints)
        try:
            yield c, network, calls
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
            if network._turn.locked():
                network.resume()


# --- fences ------------------------------------------------------------------------------------------------------------


async def test_a30_pages_are_free_and_slots_are_held_until_the_fence_when_decode_aborts(tmp_path):
    async with under_way(tmp_path) as (c, _, (sending, receiving)):
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        assert held(c.decode.agents[0]).get("granted"), "no proof yet"
        with pytest.raises(RdmaKvError):
            await sending
        await until_settled(c)  # no WRITE settled in time, so the link was given up and both sides fenced
        assert c.prefill.agents[0].stats()["counters"]["fences"] == 1
        assert c.decode.agents[0].stats()["counters"]["fences"] == 1


async def test_a31_nothing_of_a_slot_that_is_used_again_reaches_a_stopped_peer_that_goes_on(tmp_path):
    async with under_way(tmp_path) as (c, network, (sending, receiving)):
        prefill, decode = c.prefill.agents[0], c.decode.agents[0]
        receiving.cancel()
        await asyncio.gather(receiving, return_exceptions=True)
        with pytest.raises(RdmaKvError):
            await sending
        await until(lambda: not held(prefill))
        prefill._shell.mover._staging.segments[0].memory.view[:] = 0x77  # what the next request has gathered
        await until(lambda: not held(decode))
        network.resume()
        for _ in range(200):
            await asyncio.sleep(0)
        assert not decode._shell.mover._staging.segments[0].memory.view.any(), "not a byte has landed, old or new"
        await c.move(2, 0, 0, PAGES, PAGES, TOKENS)
        await until_settled(c)


async def test_a32_what_was_granted_is_held_when_the_link_ends_under_a_write(tmp_path):
    async with under_way(tmp_path) as (c, network, (sending, receiving)):
        decode = c.decode.agents[0]
        slots = decode._shell.mover._pool
        free = slots.free
        cut(decode)
        for call in (sending, receiving):
            with pytest.raises(PeerLostError):
                await call
        assert held(decode) == {"unproven": slots.total - free}, "the initiator fences first"
        await until_settled(c)
        memory = decode._shell.mover._staging.segments[0].memory.view
        memory[:] = 0x55
        network.resume()
        await c.move(2, 0, 0, PAGES, PAGES, 1)
        assert np.count_nonzero(memory != 0x55) <= 1 << 16, "only the new request's slot was written"


@pytest.mark.parametrize("proof", ["death", "settle"])
async def test_a36_without_a_fence_of_the_target_death_or_settle_frees_it(tmp_path, proof):
    async with under_way(tmp_path, kinds=("target",), timeouts=Timeouts(quiesce=0.5)) as (c, _, (sending, receiving)):
        prefill, decode = c.prefill.agents[0], c.decode.agents[0]
        decode._shell.links._dialer.redial = prefill._shell.links._dialer.redial = lambda *args: None  # it stays away
        name = link_of(decode).name
        lost = link_of(decode)
        cut(decode)
        with pytest.raises(PeerLostError) as caught:
            await receiving
        assert caught.value.peer == "test/prefill/prefill/0"
        with pytest.raises(PeerLostError):
            await sending
        mover = decode._shell.mover
        assert held(decode).get("unproven")
        if proof == "death":
            mover.on_dead(name)
        else:
            later = type(lost)(lost.identity, lost.connection, lost.numbers, lost.transport)
            mover.on_settle(later)
        await until(lambda: not held(decode))
        stats = decode.stats()
        assert stats["slots_retired"] == 0
        assert stats["counters"]["fences_refused"] == 1
        await until_settled(c)


async def test_settled_says_whether_the_source_is_fenced(tmp_path):
    async with under_way(tmp_path) as (c, _, (sending, receiving)):
        prefill = c.prefill.agents[0]
        name = link_of(prefill).name
        assert await prefill._shell.mover.settled(name), "there was no former link"
        cut(prefill)
        await asyncio.gather(sending, receiving, return_exceptions=True)
        assert await prefill._shell.mover.settled(name)
        assert not held(prefill)


async def test_settled_is_no_where_the_source_has_no_fence(tmp_path):
    async with under_way(tmp_path, kinds=("source", "target")) as (c, _, (sending, receiving)):
        prefill = c.prefill.agents[0]
        name = link_of(prefill).name
        cut(prefill)
        await asyncio.gather(sending, receiving, return_exceptions=True)
        assert not await prefill._shell.mover.settled(name)
        await until(lambda: held(prefill).get("unproven"))


async def test_a42_more_broken_writes_than_slots_then_a_success(tmp_path):
    failing = True
    network = LoopbackNetwork(faults=lambda p: Fault(fail_after_bytes=100 if failing else None))
    async with cluster(tmp_path, MODEL, *sides(), network=network, timeouts=QUICK) as c:
        for number in range(5):
            outcomes = await asyncio.gather(
                send(c.prefill.agents[0], key=f"bad-{number}"),
                receive(c.decode.agents[0], key=f"bad-{number}"),
                return_exceptions=True,
            )
            assert all(isinstance(outcome, RdmaKvError) for outcome in outcomes), outcomes
        failing = False
        await c.move(9, 0, 0, PAGES, PAGES, TOKENS)
        await until_settled(c)
        assert c.prefill.agents[0].stats()["slots_total"] == 4


async def test_a53_close_under_a_write_that_does_not_settle_is_bounded_and_frees_all(tmp_path):
    async with under_way(tmp_path) as (c, _, (sending, receiving)):
        prefill = c.prefill.agents[0]
        async with asyncio.timeout(3.0):
            await asyncio.gather(prefill.close(), prefill.close())
            await prefill.close()
        outcomes = await asyncio.gather(sending, receiving, return_exceptions=True)
        assert all(isinstance(outcome, RdmaKvError) for outcome in outcomes)
        assert not held(prefill)
        await until(lambda: not held(c.decode.agents[0]))


async def test_a70_a_replayed_number_and_a_stale_epoch_are_refused(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        await c.move(1, 0, 0, PAGES, PAGES, TOKENS)
        decode = c.decode.agents[0]
        mover, peer = decode._shell.mover, link_of(decode)
        before = c.decode.memory_of(0)[0].array.copy()
        number = peer.numbers.high_water
        mover.on_message(peer, Offer(number, "request-1", 0, 0, 0, bytes(16), [(0, TOKENS)], 1, 5000))
        mover._hearing.on_notification(peer, encode_notification(Notification(number, 0, 1, 0, (0, 2), (0, TOKENS))))
        counters = decode.stats()["counters"]
        assert (counters["replays"], counters["stale_notifications"]) == (1, 1)
        assert np.array_equal(before, c.decode.memory_of(0)[0].array)
        c.check_nothing_leaked()


# --- suspects ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_suspect_peer_gets_nothing_until_it_is_alive(tmp_path, side):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        await c.move(1, 0, 0, PAGES, PAGES, TOKENS)
        agent = (c.prefill if side == "prefill" else c.decode).agents[0]
        mover, peer = agent._shell.mover, link_of(agent)
        serial = next(c.network._serial)
        mover.on_suspect(peer)
        moving = asyncio.create_task(c.move(2, 0, 0, [1, 3, 4], [6, 7, 8], TOKENS))
        await until(lambda: mover._turns.wanting(peer.name))
        for _ in range(200):
            await asyncio.sleep(0)
        assert not held(c.prefill.agents[0])
        assert next(c.network._serial) == serial + 1, "nothing was posted"
        mover.on_alive(peer)
        await moving
        c.check_nothing_leaked()


# --- retirement --------------------------------------------------------------------------------------------------------


async def test_slots_without_any_proof_are_retired_and_replaced(tmp_path):
    staging = StagingConfig(slots=2, slot_bytes=1 << 16)
    async with under_way(tmp_path, kinds=("target",), staging=staging) as (c, network, (sending, receiving)):
        prefill, decode = c.prefill.agents[0], c.decode.agents[0]
        for agent in (prefill, decode):
            agent._shell.links._dialer.redial = lambda *args: None
        prefill._shell.mover._holds.settled = no_word
        prefill._shell.mover.settled = no_word
        cut(decode)
        await asyncio.gather(sending, receiving, return_exceptions=True)
        await until(lambda: decode.stats()["slots_retired"] == 1)
        await until(lambda: decode.stats()["slots_total"] == 3)
        stats = decode.stats()
        assert (stats["slots_free"], stats["slots_held"], stats["counters"]["slots_retired"]) == (2, {}, 1)
        network.resume()
        pool = decode._shell.mover._pool
        other = pool.acquire("somebody else", Hold.SCATTER)
        await c.move(2, 0, 0, PAGES, PAGES, TOKENS)
        assert pool._epochs[2] > 0, "the new slot is used"
        pool.release(other)
        assert [count for _, count, _ in link_of(prefill).regions.segments] == [2, 1]
        await until_settled(c)


@pytest.mark.parametrize("why", ["segments", "system"])
async def test_slots_that_cannot_be_retired_are_held_until_a_proof_comes_late(tmp_path, monkeypatch, caplog, why):
    def refuse(self, offset_bytes: int, length_bytes: int) -> None:
        raise OSError(12, "no more mappings")

    if why == "segments":
        monkeypatch.setattr("rdma_kv.staging.MAX_SEGMENTS", 1)
    else:
        monkeypatch.setattr(HostMemory, "retire", refuse)
    async with under_way(tmp_path, kinds=("target",)) as (c, _, (sending, receiving)):
        decode = c.decode.agents[0]
        mover, name = decode._shell.mover, link_of(decode).name
        decode._shell.links._dialer.redial = c.prefill.agents[0]._shell.links._dialer.redial = lambda *args: None
        cut(decode)
        await asyncio.gather(sending, receiving, return_exceptions=True)
        await until(lambda: "no proof" in caplog.text)
        before = held(decode)
        assert before.get("unproven")
        assert decode.stats()["slots_retired"] == 0
        mover.on_dead(name)
        assert not held(decode)
        assert decode.stats()["slots_free"] == decode.stats()["slots_total"] == 4


async def test_staging_outlives_an_agent_that_closes_without_a_proof(tmp_path):
    async with under_way(tmp_path, kinds=("target",), timeouts=Timeouts(quiesce=0.2)) as (c, _, calls):
        decode = c.decode.agents[0]
        decode._shell.links._dialer.redial = c.prefill.agents[0]._shell.links._dialer.redial = lambda *args: None
        staging = decode._shell.mover._staging
        await decode.close()
        await asyncio.gather(*calls, return_exceptions=True)
        assert staging in _RETAINED
        assert c.prefill.agents[0]._shell.mover._staging not in _RETAINED
    assert c.prefill.agents[0]._shell.mover._staging not in _RETAINED, "its source was fenced"


async def test_new_memory_is_told_to_links_that_are_up(tmp_path):
    """Two prefill replicas: one link ends without a proof, the other one learns of the new segment and uses it."""
    network = LoopbackNetwork()
    topology = Topology.with_layers(2, tp=2, dp=2)
    both = [Side(side.name, side.role, topology, agents_by="replica") for side in sides()]
    async with cluster(
        tmp_path,
        MODEL,
        *both,
        network=network,
        transport=lambda name: Unfenced(network, name, "target"),
        staging=StagingConfig(slots=2, slot_bytes=1 << 16),
        timeouts=QUICK,
    ) as c:
        decode = c.decode.agents[0]
        await c.move(1, 1, 0, PAGES, PAGES, TOKENS)
        mover = decode._shell.mover
        assert mover._growth.request("anybody") is False, "enough is there"
        taken = [mover._pool.acquire(peer, hold) for peer, hold in (("x", Hold.UNPROVEN), ("y", Hold.UNPROVEN))]
        assert mover._growth.request("anybody")
        await until(lambda: mover._pool.total == 4)
        (peer,) = c.prefill.agents[1]._shell.links.peers
        await until(lambda: len(peer.regions.segments) == 2)
        await c.move(2, 1, 0, PAGES, PAGES, TOKENS)
        assert max(mover._pool._epochs[2:]) > 0
        for slot in taken:
            mover._pool.release(slot)


async def no_word(peer_name: str) -> bool:
    return False


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda r: {"slot_bytes": 4095}, "HELLO said"),
        (lambda r: {"segments": [(r.segments[0][0] + 4096, *r.segments[0][1:])]}, "other segments"),
        (lambda r: {"segments": [*r.segments, (r.segments[0][0] + r.slot_bytes, 1, 0)]}, "overlap"),
        (lambda r: {"segments": [*r.segments, ((1 << 62) - 1, 1 << 20, 0), (0, 1 << 20, 0)]}, "slots; at most"),
    ],
)
async def test_regions_that_cannot_be_end_the_link(tmp_path, change, what):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        await c.move(1, 0, 0, PAGES, PAGES, TOKENS)
        prefill = c.prefill.agents[0]
        peer = link_of(prefill)
        known = {name: getattr(peer.regions, name) for name in ("segments", "slot_bytes", "metadata")}
        link_of(c.decode.agents[0]).send(Regions(**(known | change(peer.regions))))
        await until(lambda: peer.lost is not None)
        assert what in str(peer.lost)


# --- more memory -------------------------------------------------------------------------------------------------------


async def one_send(c, key: str) -> BaseException | None:
    calls = (send(c.prefill.agents[0], key=key, timeout_s=2.0), receive(c.decode.agents[0], key=key, timeout_s=2.0))
    return (await asyncio.gather(*calls, return_exceptions=True))[0]


@pytest.mark.parametrize(("slots", "full"), [(4, True), (None, False)])
async def test_held_slots_are_made_up_for_as_far_as_allowed(tmp_path, slots, full):
    """The source has no fence here: what is held stays held."""
    failing = True
    network = LoopbackNetwork(faults=lambda p: Fault(fail_after_bytes=100 if failing else None))
    limit = None if slots is None else slots << 16
    staging = StagingConfig(slots=4, slot_bytes=1 << 16, max_staging_bytes=limit)
    async with cluster(
        tmp_path,
        MODEL,
        *sides(),
        network=network,
        transport=lambda name: Unfenced(network, name, *(("source",) if "/prefill/" in name else ())),
        staging=staging,
        timeouts=QUICK,
    ) as c:
        prefill = c.prefill.agents[0]
        for number in range(10):  # some of them find the link that is just ending
            if held(prefill) == {"unproven": 2}:
                break
            assert not isinstance(await one_send(c, f"bad-{number}"), StagingFull)
            await until(lambda: set(held(prefill)) == {"unproven"})
        failing = False
        if not full:
            await c.move(9, 0, 0, PAGES, PAGES, TOKENS)
            stats = prefill.stats()
            assert stats["slots_total"] > 4
            assert held(prefill) == {"unproven": 2}, "what is held is never used again"
            return
        error = await one_send(c, "no room")
        assert isinstance(error, StagingFull)
        assert "staging.max_staging_bytes" in str(error)
        assert "test/decode/decode/0" in str(error)
        assert error.retryable
        assert prefill.stats()["slots_total"] == 4
