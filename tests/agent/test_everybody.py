"""A failure of one participant reaches all of them within a second, by whatever link there is or has to be made.

The shape is 4 + 4 agents, one a rank, each with a move to one agent of the other side only. So nobody but one agent learns
of a failure from its own transfer. Control streams are TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from rig import Side, cluster

from rdma_kv.agent import Agent
from rdma_kv.errors import (
    ClosedError,
    ErrorCode,
    PeerLostError,
    RdmaKvError,
    RemoteProtocolError,
    TransferAborted,
)
from rdma_kv.messages import Abort, Start
from rdma_kv.protocol.failures import Place
from rdma_kv.session import Session, Shell
from rdma_kv.topology import Component, ModelSpec, Topology
from rdma_kv.transport.named import usable
from rdma_kv.transport.ucx_environment import prepare_ucx_environment
from rdma_kv.types import ReplicaId, Role

prepare_ucx_environment(os.environ)

MODEL = ModelSpec.gqa(layers=2, kv_heads=4, head_dim=8, itemsize=4, dtype="float32", fingerprint="toy")
MLA = ModelSpec.mla(layers=2, latent_dim=16, fingerprint="toy")
DECODE, PREFILL = ReplicaId("decode", 0), ReplicaId("prefill", 0)
PAGES, TOKENS = [5, 2, 9], 40
LONG_S = 20.0  # what a call would wait for; far more than the second in which it has to end


def sides(tp: int = 4, agents_by: str = "rank", dp: int = 1) -> list[Side]:
    return [
        Side(role.value, role, Topology.with_layers(2, tp=tp, dp=dp), agents_by=agents_by)
        for role in (Role.PREFILL, Role.DECODE)
    ]


async def send(agent: Agent, *, to: ReplicaId | None = DECODE, hold: asyncio.Event | None = None, attempt: int = 0):
    """`hold`: push a part, and break when it is set. The caller looks after its transfer while it computes."""
    sending = agent.send("k", 0, PAGES, to=to, tokens=TOKENS, timeout_s=LONG_S, attempt=attempt)
    async with sending as out:
        await out.push((0, 16))
        while hold is not None and out.error is None:
            await asyncio.sleep(0)
            if hold.is_set():
                raise ZeroDivisionError("the worker broke")
        await out.push((16, TOKENS))
    return out


async def receive(agent: Agent, *, source: object = PREFILL, attempt: int = 0):
    return await agent.receive("k", 0, PAGES, source=source, tokens=TOKENS, timeout_s=LONG_S, attempt=attempt)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def outcomes(tasks: list[asyncio.Task], within_s: float = 1.0) -> list[object]:
    """How the calls ended, all within that time from now."""
    async with asyncio.timeout(within_s):
        return await asyncio.gather(*tasks, return_exceptions=True)


def everybody(c) -> list[Agent]:
    return [*c.prefill.agents, *c.decode.agents]


async def settled(c) -> None:
    await until(lambda: not any(a._shell.tasks or a._shell.sessions or a.stats()["transfers"] for a in everybody(c)))
    c.check_nothing_leaked()


def calls(c, bad: asyncio.Event, broken: int, to: ReplicaId | None = DECODE) -> list[asyncio.Task]:
    """Sends that never end (one of them breaks at `bad`), and receives."""
    never = asyncio.Event()
    sends = [send(agent, to=to, hold=bad if n == broken else never) for n, agent in enumerate(c.prefill.agents)]
    return [asyncio.create_task(work) for work in (*sends, *(receive(agent) for agent in c.decode.agents))]


async def under_way(c) -> None:
    """Every agent has its transfer."""
    await until(lambda: all(agent.stats()["transfers"] == 1 for agent in everybody(c)))


# --- one fails, all fail -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [DECODE, None], ids=["named", "first that expects"])
@pytest.mark.parametrize("broken", [0, 2])
async def test_a44_one_prefill_rank_of_four_fails_and_all_ranks_fail_within_a_second(tmp_path, broken, to):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        bad = asyncio.Event()
        tasks = calls(c, bad, broken, to)
        await under_way(c)
        bad.set()
        ended = await outcomes(tasks)
        assert isinstance(ended.pop(broken), ZeroDivisionError)
        for error in ended:
            assert isinstance(error, TransferAborted), ended
            assert "the worker broke" in str(error)
            assert error.cause is ErrorCode.TRANSFER_ABORTED
            assert error.culprit == f"test/prefill/prefill/{broken}"
        await settled(c)


@pytest.mark.skipif(not usable("ucx", os.environ), reason="needs ucx, which is not here")
async def test_a44_over_a_real_transport(tmp_path):
    """Boxes have moved, all links and endpoints are up, when a rank fails."""
    async with cluster(tmp_path, MODEL, *sides(), transport="ucx") as c:
        bad = asyncio.Event()
        tasks = calls(c, bad, 1)
        async with asyncio.timeout(20):
            while not all(agent.stats()["scatter_launches"] for agent in c.decode.agents):
                await asyncio.sleep(0.001)
        bad.set()
        ended = await outcomes(tasks)
        assert isinstance(ended.pop(1), ZeroDivisionError)
        assert all(isinstance(e, TransferAborted) and e.culprit == "test/prefill/prefill/1" for e in ended), ended
        await settled(c)


async def test_a44_one_decode_rank_of_four_fails_and_all_ranks_fail_within_a_second(tmp_path):
    """Its scatter breaks; the others wait for boxes that are yet to be pushed."""
    async with cluster(tmp_path, MODEL, *sides()) as c:
        c.decode.agents[3]._shell.packer.kernels.scatters.kernel = lambda chunks: 1 / 0
        tasks = calls(c, asyncio.Event(), 0)
        ended = await outcomes(tasks, 3.0)
        assert "gather or scatter failed" in str(ended.pop())
        for error in ended:
            assert isinstance(error, TransferAborted), ended
            assert error.cause is ErrorCode.LOCAL_PROTOCOL
            assert error.culprit == "test/decode/decode/3"
        await settled(c)


async def test_a44_whoever_notices_a_dead_peer_tells_all(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        tasks = calls(c, asyncio.Event(), 0)
        await under_way(c)
        (peer,) = [p for p in c.decode.agents[1]._shell.links.peers if p.id.rank == 1]
        peer.connection._writer.transport.abort()
        ended = await outcomes(tasks)
        assert {type(error) for error in ended} == {TransferAborted, PeerLostError}
        assert all(e.cause is ErrorCode.PEER_LOST for e in ended if isinstance(e, TransferAborted))
        culprits = {e.culprit for e in ended if isinstance(e, TransferAborted)}
        assert culprits <= {"test/prefill/prefill/1", "test/decode/decode/1"}


@pytest.mark.usefixtures("face")
@pytest.mark.parametrize("role", Role)
async def test_a44_an_agent_that_closes_fails_all(tmp_path, role):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        tasks = calls(c, asyncio.Event(), 0)
        await under_way(c)
        place = (0 if role is Role.PREFILL else 4) + 2
        closing = asyncio.create_task(everybody(c)[place].close())
        ended = await outcomes(tasks)
        own = ended.pop(place)
        assert isinstance(own, ClosedError)
        for error in ended:
            assert isinstance(error, TransferAborted | PeerLostError), ended
        assert sum(isinstance(e, TransferAborted) and e.cause is ErrorCode.CLOSED for e in ended) >= 6
        await closing


@pytest.mark.usefixtures("face")
async def test_an_agent_that_closes_takes_the_time_to_tell(tmp_path):
    """Links to siblings and strangers are yet to be made, and that takes a while."""
    async with cluster(tmp_path, MODEL, *sides()) as c:
        tasks = calls(c, asyncio.Event(), 0)
        await under_way(c)
        links = c.prefill.agents[2]._shell.links
        dial, timer = links.peer, asyncio.Event()

        async def slow(record):
            await timer.wait()
            return await dial(record)

        links.peer = slow
        asyncio.get_running_loop().call_later(0.2, timer.set)
        closing = asyncio.create_task(c.prefill.agents[2].close())
        ended = await outcomes(tasks)
        assert isinstance(ended.pop(2), ClosedError)
        assert all(isinstance(error, TransferAborted | PeerLostError) for error in ended), ended
        await closing


async def test_the_control_with_nobody_told_they_wait(tmp_path, monkeypatch):
    """What the tests above would see without the ABORTs by name: only the peer of the failed rank ends."""
    monkeypatch.setattr(Session, "_tell_others", lambda self, error, reached, *, everybody: None)
    async with cluster(tmp_path, MODEL, *sides()) as c:
        bad = asyncio.Event()
        tasks = calls(c, bad, 2)
        await under_way(c)
        bad.set()
        done, waiting = await asyncio.wait(tasks, timeout=1.0)
        assert len(done) == 2
        assert len(waiting) == 6
        for task in waiting:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_each_is_told_once_and_nobody_forwards(tmp_path):
    """Seven ABORTs by the one that fails; the others end their own transfers by number and say nothing to third ones."""
    async with cluster(tmp_path, MODEL, *sides()) as c:
        heard: list[tuple[str, str, int]] = []
        for agent in everybody(c):
            mover, name = agent._shell.mover, str(agent.config.id)

            def on_message(peer, message, honest=mover.on_message, name=name) -> None:
                if isinstance(message, Abort):
                    heard.append((str(peer.id), name, message.transfer))
                honest(peer, message)

            mover.on_message = on_message
        bad = asyncio.Event()
        tasks = calls(c, bad, 1)
        await under_way(c)
        bad.set()
        await outcomes(tasks)
        await settled(c)

        def told_first() -> list[str]:
            return [to for teller, to, _ in heard if teller == "test/prefill/prefill/1"]

        await until(lambda: len(told_first()) >= 7)
        assert len(told_first()) == len(set(told_first())) == 7
        others = [(teller, to) for teller, to, _ in heard if teller != "test/prefill/prefill/1"]
        assert all(teller.rsplit("/", 1)[1] == to.rsplit("/", 1)[1] for teller, to in others), (
            "beyond their own transfer"
        )


async def test_a_failure_is_told_before_its_gather_has_ended(tmp_path):
    """A kernel that hangs holds the caller's pages, so its call has to wait; the others need not."""
    prefill, decode = sides(tp=2)
    prefill.agents_by = "engine"
    async with cluster(tmp_path, MODEL, prefill, decode) as c:
        release, running = threading.Event(), threading.Event()
        packer = c.prefill.agents[0]._shell.packer
        honest = packer.kernels.gathers.kernel

        def stuck(chunks) -> None:
            running.set()
            assert release.wait(20)
            honest(chunks)

        packer.kernels.gathers.kernel = stuck
        for agent in c.decode.agents:  # nobody but the prefill agent tells anything
            agent._shell.participants = lambda route, engine: []
        sending = asyncio.create_task(send(c.prefill.agents[0]))
        first, second = (asyncio.create_task(receive(agent)) for agent in c.decode.agents)
        try:
            await until(running.is_set)
            (peer,) = [p for p in c.prefill.agents[0]._shell.links.peers if p.id.rank == 0]
            peer.connection._writer.transport.abort()
            ended = await outcomes([first, second])
            assert isinstance(ended[0], PeerLostError)
            assert isinstance(ended[1], TransferAborted)
            assert not sending.done()
        finally:
            release.set()
        with pytest.raises(PeerLostError):
            await sending


# --- who takes part ----------------------------------------------------------------------------------------------------


def participants(shell: Shell, route, engine) -> list[str]:
    return [str(record.id) for record in shell.participants(route, engine)]


async def test_idle_ranks_are_told_only_where_they_may_wait(tmp_path):
    """MLA, TP 4 to TP 1: one head that one prefill rank has to send, and idle ones whose calls may wait for an EXPECT."""
    prefill, decode = sides()
    decode.topology = Topology.with_layers(2, tp=4, dp=4)
    async with cluster(tmp_path, MLA, prefill, decode) as c:
        shell = c.prefill.agents[0]._shell
        engine = c.registry.engine("decode")
        route = shell.route("k", 0, engine, 1)
        assert {move.src for move in route.moves} == {1}
        expected = ["test/decode/decode/1", *(f"test/prefill/prefill/{n}" for n in (1, 2, 3))]
        assert participants(shell, route, engine) == expected
        other = c.decode.agents[1]._shell
        expected = [f"test/prefill/prefill/{n}" for n in range(4)]
        assert (
            participants(other, other.route("k", 1, c.registry.engine("prefill"), 0), c.registry.engine("prefill"))
            == expected
        )


async def test_idle_decode_ranks_are_not_told(tmp_path):
    """A component whose layers lie in the first stage only: ranks of the second decode stage receive nothing."""
    model = ModelSpec((Component("kv", (0,), 1, 1, 64),), "toy")
    topologies = Topology(layers_per_stage=(2,)), Topology(pp=2, layers_per_stage=(1, 1))
    both = [Side(r.value, r, t, agents_by="rank") for r, t in zip((Role.PREFILL, Role.DECODE), topologies, strict=True)]
    async with cluster(tmp_path, model, *both) as c:
        shell, engine = c.prefill.agents[0]._shell, c.registry.engine("decode")
        assert participants(shell, shell.route("k", 0, engine, 0), engine) == ["test/decode/decode/0"]


async def test_an_idle_rank_that_waits_for_an_expect_ends_with_the_others(tmp_path):
    prefill, decode = sides()
    decode.topology = Topology.with_layers(2, tp=4, dp=4)
    async with cluster(tmp_path, MLA, prefill, decode) as c:
        receiver = c.decode.agents[0]  # its EXPECT reaches the rank that sends, and no other
        links = receiver._shell.links
        dial, gate = links.peer, asyncio.Event()

        async def slow(record):
            if record.ranks != (0,):
                await gate.wait()
            return await dial(record)

        links.peer = slow
        waiting = [asyncio.create_task(send(agent, to=None)) for agent in c.prefill.agents[1:]]
        receiving = asyncio.create_task(receive(receiver))
        await broken_send(c.prefill.agents[0])
        ended = await outcomes([*waiting, receiving])
        assert all(isinstance(error, TransferAborted) and "the worker broke" in str(error) for error in ended), ended
        gate.set()


async def test_siblings_are_linked_for_control_only(tmp_path):
    async with cluster(tmp_path, MODEL, *sides(tp=2)) as c:
        bad = asyncio.Event()
        tasks = calls(c, bad, 0)
        await under_way(c)
        assert c.prefill.agents[1].stats()["links"] == 2
        bad.set()
        await outcomes(tasks)
        first, second = c.prefill.agents
        await until(
            lambda: any(p.id.role is Role.PREFILL for p in first._shell.links.peers)
        )  # telling goes on behind a call
        (peer,) = [p for p in first._shell.links.peers if p.id.role is Role.PREFILL]
        assert first.stats()["link_transports"][peer.name] == ""
        assert peer.endpoint is peer.regions is peer.exported is peer.writable is None
        peer.send(Start(1))  # what has no place there ends the link, and nothing else
        await until(lambda: peer.lost is not None)
        assert isinstance(peer.lost, RemoteProtocolError)
        assert all(p.id.role is Role.DECODE for p in second._shell.links.peers)
        await asyncio.gather(
            *(send(agent, attempt=1) for agent in c.prefill.agents),
            *(receive(agent, attempt=1) for agent in c.decode.agents),
        )
        await settled(c)


async def test_an_abort_for_a_replica_of_which_the_peer_has_no_rank_ends_the_link(tmp_path):
    async with cluster(tmp_path, MODEL, *sides(tp=2, dp=2)) as c:
        never = asyncio.Event()
        sending = asyncio.create_task(send(c.prefill.agents[0], hold=never))
        receiving = asyncio.create_task(receive(c.decode.agents[0]))
        await until(lambda: c.prefill.agents[0].stats()["transfers"] and c.decode.agents[0].stats()["transfers"])
        peer = await c.prefill.agents[1]._shell.links.peer(c.registry.engine("prefill").agents[0])
        peer.send(Abort(0, "k", 0, 0, 0, ErrorCode.CLOSED, "", "not mine to tell", "decode"))
        await until(lambda: peer.lost is not None)
        assert isinstance(peer.lost, RemoteProtocolError)
        assert not sending.done()
        assert not receiving.done()
        for task in (sending, receiving):
            task.cancel()
        await asyncio.gather(sending, receiving, return_exceptions=True)


# --- failures that come before their call ------------------------------------------------------------------------------


async def fails_at_once(work) -> TransferAborted:
    async with asyncio.timeout(1.0):
        with pytest.raises(TransferAborted) as caught:
            await work
    return caught.value


async def broken_send(agent: Agent, *, to: ReplicaId | None = DECODE) -> None:
    with pytest.raises(ZeroDivisionError):
        async with agent.send("k", 0, PAGES, to=to, tokens=TOKENS, timeout_s=LONG_S) as out:
            await out.push((0, 16))
            await until(lambda: to is None or out._session.entries)
            raise ZeroDivisionError("the worker broke")


def remembers(agent: Agent) -> int:
    return len(agent._shell.rendezvous._failures.told(Place("k", 0, 0), asyncio.get_running_loop().time()))


async def test_p19_a_receive_that_comes_after_the_failure_of_its_send_fails_at_once(tmp_path):
    """Also on the ranks to which the failed agent has nothing to send."""
    async with cluster(tmp_path, MODEL, *sides()) as c:
        await broken_send(c.prefill.agents[0])
        await until(lambda: all(remembers(agent) for agent in c.decode.agents))
        for agent in c.decode.agents:
            error = await fails_at_once(receive(agent))
            assert "the worker broke" in str(error)
            assert error.culprit == "test/prefill/prefill/0"
        for agent in c.prefill.agents[1:]:
            await fails_at_once(send(agent))
        assert not any(agent.stats()["unmatched"] for agent in everybody(c))


@pytest.mark.parametrize("expect_first", [True, False])
async def test_p19_a_send_that_never_knew_whom_to_send_to_is_missed_at_once(tmp_path, expect_first):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        if not expect_first:
            await broken_send(c.prefill.agents[2], to=None)
        tasks = [asyncio.create_task(receive(agent)) for agent in c.decode.agents]
        if expect_first:
            await until(lambda: c.prefill.agents[2].stats()["unmatched"])
            await broken_send(c.prefill.agents[2], to=None)
        for error in await outcomes(tasks):
            assert isinstance(error, TransferAborted)
            assert "the worker broke" in str(error)


async def test_ranks_that_left_the_other_side_open_learn_from_one_that_did_too(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        waiting = [asyncio.create_task(send(agent, to=None)) for agent in c.prefill.agents[1:3]]
        await broken_send(c.prefill.agents[0], to=None)
        for error in await outcomes(waiting):
            assert isinstance(error, TransferAborted)
        await until(lambda: remembers(c.prefill.agents[3]))
        await fails_at_once(send(c.prefill.agents[3], to=None))


async def test_a_send_that_comes_after_its_receive_was_cancelled_fails_at_once(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        receiving = asyncio.create_task(receive(c.decode.agents[1]))
        await until(lambda: c.prefill.agents[1].stats()["unmatched"])
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        await until(lambda: all(remembers(agent) for agent in c.prefill.agents))
        for to, agent in zip([DECODE, None, DECODE, None], c.prefill.agents, strict=True):
            error = await fails_at_once(send(agent, to=to))
            assert "cancelled" in str(error)
        assert not any(agent.stats()["unmatched"] for agent in c.prefill.agents)


async def test_another_attempt_is_not_meant(tmp_path):
    async with cluster(tmp_path, MODEL, *sides(tp=2)) as c:
        await broken_send(c.prefill.agents[0])
        await until(lambda: all(remembers(agent) for agent in c.decode.agents))
        await asyncio.gather(
            *(send(agent, attempt=1) for agent in c.prefill.agents),
            *(receive(agent, attempt=1) for agent in c.decode.agents),
        )


async def test_a_peer_that_begins_anew_takes_its_abort_back(tmp_path):
    """One agent a side: the name may even be used again, if it is the teller that does."""
    async with cluster(tmp_path, MODEL, *sides(tp=1)) as c:
        await broken_send(c.prefill.agents[0])
        await until(lambda: remembers(c.decode.agents[0]))
        sending = asyncio.create_task(send(c.prefill.agents[0]))
        await until(lambda: c.decode.agents[0].stats()["unmatched"])
        await asyncio.gather(sending, receive(c.decode.agents[0]))


async def test_a34_an_abort_after_done_means_nothing_to_the_next_call(tmp_path):
    """One rank is done, another fails: the first keeps its success, and a later call of the same name is not hit."""
    async with cluster(tmp_path, MODEL, *sides(tp=2)) as c:
        bad = asyncio.Event()
        broken = asyncio.create_task(send(c.prefill.agents[1], hold=bad))
        other = asyncio.create_task(receive(c.decode.agents[1]))
        await asyncio.gather(send(c.prefill.agents[0]), receive(c.decode.agents[0]))
        await until(lambda: c.prefill.agents[1].stats()["transfers"] and c.decode.agents[1].stats()["transfers"])
        bad.set()
        ended = await outcomes([broken, other])
        assert [type(error) for error in ended] == [ZeroDivisionError, TransferAborted]
        await until(lambda: not any(agent._shell.tasks for agent in everybody(c)))
        assert not any(remembers(agent) for agent in everybody(c))
        await asyncio.gather(send(c.prefill.agents[0]), receive(c.decode.agents[0]))


async def test_an_abort_of_one_source_does_not_fail_a_receive_from_another(tmp_path):
    async with cluster(tmp_path, MODEL, *sides(tp=2, dp=2)) as c:
        hold = asyncio.Event()
        chosen = c.prefill.agents[1]

        async def send_second() -> None:
            async with chosen.send("k", 1, PAGES, to=DECODE, tokens=TOKENS, timeout_s=LONG_S) as out:
                await hold.wait()
                await out.push()

        sources = [ReplicaId("prefill", 0), ReplicaId("prefill", 1)]
        receiving = asyncio.create_task(receive(c.decode.agents[0], source=sources))
        sending = asyncio.create_task(send_second())
        await until(lambda: c.decode.agents[0].stats()["transfers"] and chosen.stats()["transfers"])
        await broken_send(c.prefill.agents[0])
        await until(lambda: not any(agent._shell.tasks for agent in everybody(c)))
        hold.set()
        await sending
        assert (await receiving).source == ReplicaId("prefill", 1)


# --- nothing is left behind --------------------------------------------------------------------------------------------


async def test_a_transfer_that_fails_between_its_opening_and_its_first_grant_leaves_no_entry(tmp_path):
    async with cluster(tmp_path, MODEL, *sides(tp=1)) as c:
        await c.move(1, 0, 0, PAGES, PAGES, TOKENS)  # the next EXPECT brings slots along
        receiving = asyncio.create_task(receive(c.decode.agents[0]))
        await until(lambda: c.prefill.agents[0].stats()["unmatched"])
        mover = c.prefill.agents[0]._shell.mover

        def refuse(entry, message) -> None:
            raise RemoteProtocolError("the peer", "GRANT before REGIONS")

        mover.use_grants_ahead = refuse
        async with asyncio.timeout(1.0):
            with pytest.raises(RemoteProtocolError):
                await send(c.prefill.agents[0])
            with contextlib.suppress(RdmaKvError):
                await receiving
        await settled(c)


async def test_a_bug_between_the_opening_and_the_first_grant_leaves_no_entry(tmp_path):
    async with cluster(tmp_path, MODEL, *sides(tp=1)) as c:
        receiving = asyncio.create_task(receive(c.decode.agents[0]))
        await until(lambda: c.prefill.agents[0].stats()["unmatched"])
        c.prefill.agents[0]._shell.rendezvous.take_expect = lambda *args: 1 / 0
        async with asyncio.timeout(1.0):
            with pytest.raises(ZeroDivisionError):
                await send(c.prefill.agents[0])
            with pytest.raises(TransferAborted):
                await receiving
        await settled(c)


def test_the_shell_without_its_own_engine_in_the_registry_has_no_siblings():
    config = SimpleNamespace(engine="p", id=None)

    class Nothing:
        def engine(self, name: str):
            from rdma_kv.errors import ConfigError

            raise ConfigError("engine", "not in the file")

    shell = Shell(config, Nothing(), None, None, None, None)  # type: ignore[arg-type]
    assert shell.siblings() == []
