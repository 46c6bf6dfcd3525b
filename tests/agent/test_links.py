"""Links over real sockets: silence, leases, reconnects, restarts, and who is refused."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sys
from collections.abc import AsyncIterator

import pytest
from links_rig import LIMIT_S, QUICK, Node, Rig, Wire, identity, rig, until

from rdma_kv.config import Timeouts
from rdma_kv.deaths import started_ticks
from rdma_kv.errors import ErrorCode, IncompatiblePeerError, PeerLostError, RemoteProtocolError
from rdma_kv.messages import FRAME_HEADER, Heartbeat, Settle, Start, decode, encode
from rdma_kv.peer import Peer
from rdma_kv.protocol.link import Process
from rdma_kv.transport.ucx_environment import host_id
from rdma_kv.types import Role

SLACK = 3.0  # of a busy machine
NEVER = Timeouts(heartbeat=600.0, lease=3600.0)  # nothing is noticed by silence
PATIENT = Timeouts(heartbeat=2.0, lease=10.0)  # the defaults


async def two(r: Rig, timeouts: Timeouts = QUICK) -> tuple[Node, Node, Wire]:
    """A prefill side that has dialed a decode side through a wire; only prefill knows where the other is."""
    prefill, decode = [await r.node(role, timeouts=timeouts) for role in (Role.PREFILL, Role.DECODE)]
    wire = await r.wire(decode)
    await dial(r, prefill)
    await until(lambda: decode.links.peers)
    return prefill, decode, wire


async def dial(r: Rig, node: Node) -> Peer:
    async with asyncio.timeout(LIMIT_S):
        return await node.links.peer(r.book.record(node.identity.id.role.other))


async def hears(from_: Node, to: Node) -> None:
    """A message goes through."""
    before = len(to.user.messages)
    from_.peer.send(Start(1))
    await until(lambda: len(to.user.messages) > before)


# --- heartbeats and leases ---------------------------------------------------------------------------------------------


async def test_idle_links_live_on_heartbeats_alone():
    async with rig() as r:
        prefill, decode, _ = await two(r)
        await asyncio.sleep(2 * QUICK.lease)  # the quiet itself is what is tested
        assert not prefill.user.heard
        assert not decode.user.heard
        assert prefill.peer.may_post
        assert decode.peer.may_post


async def test_a32_silence_makes_suspect_then_lost_and_the_link_comes_back():
    async with rig() as r:
        prefill, decode, wire = await two(r)
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        wire.only_new_talk()
        await until(lambda: "suspect" in decode.user.kinds())
        assert loop.time() - began < SLACK * 3 * QUICK.heartbeat
        assert not decode.peer.may_post
        assert decode.peer.suspect
        await until(lambda: "lost" in decode.user.kinds())
        assert QUICK.lease - QUICK.heartbeat < loop.time() - began < SLACK * QUICK.lease
        (error,) = decode.user.errors
        assert isinstance(error, PeerLostError)
        assert error.retryable
        assert "lease" in str(error)
        await until(lambda: prefill.links.peers and decode.links.peers)
        await hears(prefill, decode)


async def test_a_peer_that_speaks_again_within_the_lease_keeps_its_link():
    slow = Timeouts(heartbeat=0.1, lease=60.0)
    async with rig() as r:
        prefill, decode, wire = await two(r, slow)
        link = decode.peer
        wire.silence()
        await until(lambda: "suspect" in decode.user.kinds() and "suspect" in prefill.user.kinds())
        wire.talk()
        await until(lambda: "alive" in decode.user.kinds() and "alive" in prefill.user.kinds())
        assert decode.peer is link
        await until(lambda: link.may_post)
        assert set(decode.user.kinds()) == {"suspect", "alive"}


async def test_both_sides_beat_at_the_smaller_interval():
    """A side with a short lease must not lose one that would beat seldom."""
    async with rig() as r:
        seldom = await r.node(Role.PREFILL, timeouts=Timeouts(heartbeat=60.0, lease=300.0))
        often = await r.node(Role.DECODE)
        r.publish(often)
        await dial(r, seldom)
        await until(lambda: often.links.peers)
        await asyncio.sleep(2 * QUICK.lease)
        assert not often.user.heard


async def test_a_stalled_loop_does_not_lose_its_peers():
    """The engine holds the GIL for longer than the lease: what came meanwhile is read before anybody is judged."""
    async with rig() as r:
        prefill, decode, _ = await two(r, Timeouts(heartbeat=0.1, lease=0.31))
        for node in (prefill, decode):  # one loop: both stall; each must forgive what it cannot know
            assert node.links.peers
        blocked = asyncio.get_running_loop().time() + 1.0
        while asyncio.get_running_loop().time() < blocked:
            pass
        await asyncio.sleep(0.5)
        assert "lost" not in decode.user.kinds() + prefill.user.kinds()


async def test_a_replayed_heartbeat_ends_the_link():
    async with rig() as r:
        prefill, decode, _ = await two(r)
        prefill.peer.send(Heartbeat(10**6, 0))
        prefill.peer.send(Heartbeat(10**6, 0))
        await until(lambda: decode.user.errors)
        assert isinstance(decode.user.errors[0], RemoteProtocolError)


# --- reconnect ---------------------------------------------------------------------------------------------------------


async def test_a_broken_stream_comes_back_by_itself_as_the_same_incarnation():
    async with rig() as r:
        prefill, decode, wire = await two(r, NEVER)
        first, name = prefill.peer, prefill.peer.name
        numbers = decode.peer.numbers
        numbers.high_water = 7
        wire.cut()
        await until(lambda: first.lost)
        took_s = await until(lambda: prefill.links.peers and decode.links.peers)
        assert took_s < SLACK * 1.0
        assert prefill.peer is not first
        assert prefill.peer.name == name
        assert decode.peer.numbers is numbers
        assert all(isinstance(error, PeerLostError) for error in (*prefill.user.errors, *decode.user.errors))
        await hears(decode, prefill)


async def test_a_reconnect_is_not_refused_though_the_old_streams_end_was_not_noticed():
    """Only the dialer has seen it break; the acceptor still holds a link that looks alive, and no lease would end it."""
    async with rig() as r:
        prefill, decode, wire = await two(r, NEVER)
        old = decode.peer
        wire.only_new_talk()
        prefill.peer.connection.abort()
        took_s = await until(lambda: decode.links.peers and decode.peer is not old)
        assert took_s < 2.0
        assert isinstance(old.lost, PeerLostError)
        await until(lambda: "settle" in decode.user.kinds())
        assert decode.user.kinds() == ["lost", "settle"]
        await until(lambda: prefill.links.peers)
        await hears(prefill, decode)
        await hears(decode, prefill)


async def test_a_second_connection_of_a_live_incarnation_is_refused_for_now_and_harms_nothing():
    """The leftover of a double dial: the link that both sides use must not fall for it."""
    async with rig() as r:
        prefill, decode, _ = await two(r, NEVER)
        live = decode.peer
        reader, writer = await asyncio.open_connection("127.0.0.1", decode.port)
        writer.write(encode(prefill.identity.hello()))
        async with asyncio.timeout(LIMIT_S):
            answer = await reader.read()  # to its end
        body = decode_bye(answer)
        assert body.code is ErrorCode.PEER_LOST
        assert decode.peer is live
        assert not decode.user.heard
        await hears(prefill, decode)
        writer.close()


def decode_bye(answer: bytes):
    return decode("decode", answer[FRAME_HEADER.size :])


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
async def test_f36_streams_that_break_at_random_bytes_come_back(seed: int):
    rnd = random.Random(seed)
    async with rig() as r:
        prefill, decode, wire = await two(r, Timeouts(heartbeat=0.1, lease=2.0, retry=0.1))
        size = len(encode(prefill.identity.hello()))
        for _ in range(10):
            wire.cut_after = rnd.choice([0, 1, 3, size - 1, size, size + 1, rnd.randrange(2 * size)])
            wire.cut()
            await until(lambda: not prefill.links.peers)
            for _ in range(rnd.randrange(3)):
                prefill.links.peers and prefill.peer.send(Start(1))
                await asyncio.sleep(0.01)
            wire.cut_after = None
            wire.cut()
            await until(lambda: prefill.links.peers and decode.links.peers)
            try:
                await hears(prefill, decode)
            except ValueError:  # the link of that moment was still to be cut
                await until(lambda: prefill.links.peers and decode.links.peers)
                await hears(prefill, decode)
        kinds = {type(error) for error in (*prefill.user.errors, *decode.user.errors)}
        assert kinds == {PeerLostError}


async def test_the_target_is_told_when_former_writes_are_over():
    async with rig() as r:
        prefill, decode, wire = await two(r, NEVER)
        assert not decode.user.heard
        name = prefill.identity.name
        wire.cut()
        await until(lambda: "settle" in decode.user.kinds())
        assert decode.user.heard == [("lost", name), ("settle", name)]
        assert prefill.user.kinds() == ["lost", "settled?"]


async def test_nothing_is_settled_that_is_not_proven():
    async with rig() as r:
        prefill, decode, wire = await two(r, NEVER)
        prefill.user.is_settled = False
        wire.cut()
        await until(lambda: "settled?" in prefill.user.kinds())
        await hears(prefill, decode)  # after it, SETTLE would have come
        assert decode.user.kinds() == ["lost"]


async def test_a_restarted_peer_has_nothing_to_settle():
    async with rig() as r:
        prefill, decode, _ = await two(r, NEVER)
        decode.die()
        again = await r.node(Role.DECODE, timeouts=NEVER)
        r.publish(again)
        await until(lambda: again.links.peers)
        await hears(prefill, again)
        assert prefill.user.kinds() == ["lost"]
        assert not again.user.heard


async def test_settle_from_the_wrong_side_is_the_peers_error():
    async with rig() as r:
        prefill, decode, _ = await two(r, NEVER)
        decode.peer.send(Settle())
        await until(lambda: prefill.user.errors)
        assert isinstance(prefill.user.errors[0], RemoteProtocolError)


# --- restarts, and who claims an identity ------------------------------------------------------------------------------


@pytest.mark.parametrize("waits", [True, False], ids=["a call waits", "nobody waits"])
async def test_p18_a_restarted_peer_is_known_within_two_seconds_of_listening(waits: bool):
    """The survivor looks for it in pauses of at most a second, where the registry says that it is now."""
    async with rig() as r:
        prefill, decode, _ = await two(r, PATIENT)
        decode.die()
        await until(lambda: not prefill.links.peers)
        dialing = asyncio.create_task(dial(r, prefill)) if waits else None
        await asyncio.sleep(2.5)  # it takes a while to start; the pauses have grown by then
        again = await r.node(Role.DECODE, timeouts=PATIENT)
        r.publish(again)
        took_s = await until(lambda: prefill.links.peers and again.links.peers)
        print(f"known again after {took_s:.2f} s")
        assert took_s < 2.0
        if dialing is not None:
            assert (await dialing).name == again.identity.name
        await hears(prefill, again)
        assert prefill.user.kinds() == ["lost"]


async def test_p18_a_restarted_peer_that_dials_first_takes_its_old_places_link():
    """The old process is gone without a word (its host was switched off): the survivor's link still looks alive."""
    async with rig() as r:
        prefill, decode, wire = await two(r, NEVER)
        r.publish(prefill)
        old = prefill.peer
        wire.only_new_talk()
        decode.die()
        again = await r.node(Role.DECODE, timeouts=NEVER)
        began = asyncio.get_running_loop().time()
        await dial(r, again)
        assert asyncio.get_running_loop().time() - began < 2.0
        await until(lambda: prefill.links.peers and prefill.peer is not old)
        assert isinstance(old.lost, PeerLostError)
        assert prefill.peer.name == again.identity.name
        assert prefill.peer.numbers is not old.numbers
        await hears(again, prefill)


async def test_r18_a_second_live_process_of_one_identity_is_refused():
    async with rig() as r:
        prefill, decode, _ = await two(r, NEVER)
        r.publish(prefill)
        twin = await r.node(Role.DECODE, timeouts=NEVER)
        with pytest.raises(IncompatiblePeerError) as refused:
            await dial(r, twin)
        assert refused.value.field == "identity"
        assert not prefill.user.heard
        await hears(prefill, decode)


async def test_a_stranger_cannot_end_a_link():
    """What the registry does not list is refused before the live link is asked or given up."""
    async with rig() as r:
        prefill, decode, wire = await two(r, NEVER)
        r.publish(prefill)
        wire.only_new_talk()  # it would not answer
        stranger = await r.node(Role.DECODE, timeouts=NEVER, owns=(), topology=decode.identity.topology)
        reader, writer = await asyncio.open_connection("127.0.0.1", prefill.port)
        hello = stranger.identity.hello()
        fields = {name: getattr(hello, name) for name in hello.__struct_fields__}
        writer.write(encode(type(hello)(**{**fields, "owns": [(0, 0)], "tie_break": "key"})))
        async with asyncio.timeout(LIMIT_S):
            answer = decode_bye(await reader.read())
        assert answer.field == "tie_break"
        assert not prefill.user.heard
        writer.close()


async def test_p35_first_contacts_and_double_dials_make_one_link():
    async with rig() as r:
        prefill, decode = [await r.node(role) for role in (Role.PREFILL, Role.DECODE)]
        r.publish(prefill)
        r.publish(decode)
        peers = await asyncio.gather(*(dial(r, node) for _ in range(32) for node in (prefill, decode)))
        assert {peer.lost for peer in peers} == {None}
        assert prefill.links.handshakes == decode.links.handshakes == 1
        await hears(prefill, decode)
        await hears(decode, prefill)


async def test_nobody_is_looked_for_for_ever():
    async with rig() as r:
        prefill, decode, _ = await two(r, Timeouts(redial=0.3))
        decode.die()
        await until(lambda: not prefill.links.peers)
        assert prefill.links._dialer._dials
        assert await until(lambda: not prefill.links._dialer._dials) < SLACK * 1.5


# --- proven death ------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def a_process() -> AsyncIterator[asyncio.subprocess.Process]:
    """One that waits until it is killed, or its standard input ends."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    await child.stdout.readline()
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()
        child.stdin.close()


@pytest.mark.skipif(not host_id() or not hasattr(os, "pidfd_open"), reason="needs /proc and os.pidfd_open")
async def test_a36_the_death_of_a_process_is_proven_and_ends_its_link_at_once():
    """Its stream stays open here (it is ours), and no lease ends: only the process itself can have told."""
    async with rig() as r:
        async with a_process() as child:
            prefill = await r.node(Role.PREFILL, timeouts=NEVER)
            process = Process(host_id(), child.pid, started_ticks(child.pid))
            decode = await r.node(Role.DECODE, timeouts=NEVER, process=process)
            r.publish(decode)
            await dial(r, prefill)
            assert prefill.links.watched == 1
            name = prefill.peer.name
            child.kill()
            took_s = await until(lambda: "dead" in prefill.user.kinds())
        assert took_s < SLACK * 0.5
        assert prefill.user.heard[:2] == [("lost", name), ("dead", name)]
        assert "died" in str(prefill.user.errors[0])
        assert prefill.links.watched in {0, 1}  # the claim is dialed again: this process answers in its name


@pytest.mark.skipif(not host_id() or not hasattr(os, "pidfd_open"), reason="needs /proc and os.pidfd_open")
async def test_the_watch_outlives_the_link():
    """A stopped process, its stream broken: its death is the proof that somebody may wait for."""
    async with rig() as r, a_process() as child:
        prefill = await r.node(Role.PREFILL, timeouts=NEVER)
        process = Process(host_id(), child.pid, started_ticks(child.pid))
        decode = await r.node(Role.DECODE, timeouts=NEVER, process=process)
        r.publish(decode)
        await dial(r, prefill)
        name = prefill.peer.name
        decode.die()
        await until(lambda: prefill.user.errors)
        assert prefill.user.kinds() == ["lost"]
        assert prefill.links.watched == 1
        child.kill()
        await until(lambda: "dead" in prefill.user.kinds())
        assert prefill.user.heard == [("lost", name), ("dead", name)]
        prefill.links.forget(name)


# --- how long we may post ----------------------------------------------------------------------------------------------


async def test_a32_after_a_long_stall_nothing_is_posted_before_the_peer_has_answered():
    """It may have given us up meanwhile. Where it has not, one question is enough; we need not wait for its next beat."""
    async with rig() as r:
        prefill, _, wire = await two(r, Timeouts(heartbeat=100.0, lease=400.0))
        pulse, loop = prefill.peer.pulse, asyncio.get_running_loop()
        began = loop.time()
        pulse._loop = Shifted(loop, 395.0)  # beyond the peer's lease, less the margin
        assert not prefill.peer.may_post
        assert not prefill.peer.suspect
        await asyncio.wait_for(asyncio.gather(*(prefill.peer.until_may_post() for _ in range(5))), LIMIT_S)
        assert prefill.peer.may_post
        assert loop.time() - began < SLACK
        assert pulse._life._number == 1  # asked once for all
        wire.silence()
        pulse._loop = Shifted(loop, 800.0)
        waiting = asyncio.create_task(prefill.peer.until_may_post())
        await until(lambda: pulse._life._number == 2)
        assert not waiting.done()
        prefill.peer.connection.abort()
        await asyncio.wait_for(waiting, LIMIT_S)
        assert prefill.peer.lost if prefill.links.peers else True


class Shifted:
    """A loop whose clock is ahead."""

    def __init__(self, loop: asyncio.AbstractEventLoop, by_s: float) -> None:
        self._loop = loop
        self._by_s = by_s

    def time(self) -> float:
        return self._loop.time() + self._by_s

    def __getattr__(self, name: str):
        return getattr(self._loop, name)


async def test_numbers_go_on_when_an_incarnation_comes_back_after_another():
    """Else its OFFERs would be taken for replays."""
    async with rig() as r:
        prefill, decode, _ = await two(r, NEVER)
        first = prefill.peer.numbers
        first.given = 5
        assert prefill.links._numbers_of(identity(Role.DECODE)) is not first
        assert prefill.links._numbers_of(decode.identity) is first
        for _ in range(100):
            prefill.links._numbers_of(identity(Role.DECODE))
        assert len(prefill.links._numbers[decode.identity.id]) <= 16


async def test_a_dial_that_fails_as_it_never_should_does_not_poison_the_next(monkeypatch):
    async with rig() as r:
        prefill, decode = await r.node(Role.PREFILL, timeouts=NEVER), await r.node(Role.DECODE, timeouts=NEVER)
        r.publish(prefill)
        with monkeypatch.context() as patched:
            patched.setattr(decode.links._dialer, "_dial_once", broken)
            with pytest.raises(RuntimeError, match="a bug"):
                await dial(r, decode)
        await dial(r, decode)


async def broken(*_) -> None:
    raise RuntimeError("a bug")
