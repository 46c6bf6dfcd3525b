"""How transfers end when they do not end well: reject, timeout, abort, cancel, close, a lost peer, a WRITE that fails."""

import asyncio
import contextlib

import pytest
from rig import Side, cluster

from rdma_kv.agent import Agent
from rdma_kv.config import Timeouts
from rdma_kv.errors import (
    ClosedError,
    ConfigError,
    ErrorCode,
    LocalProtocolError,
    PeerLostError,
    RangeUnavailableError,
    RdmaKvError,
    TransferAborted,
    TransferTimeout,
    TransportError,
)
from rdma_kv.topology import ModelSpec, Topology
from rdma_kv.transport.loopback import Fault, LoopbackNetwork, LoopbackTransport
from rdma_kv.types import ReplicaId, Role

MODEL = ModelSpec.gqa(layers=2, kv_heads=2, head_dim=8, itemsize=4, dtype="float32", fingerprint="toy")
DECODE, PREFILL = ReplicaId("decode", 0), ReplicaId("prefill", 0)
PAGES, TOKENS = [5, 2, 9], 40


def sides(tp: int = 1, agents_by: str = "replica"):
    return [Side(r.value, r, Topology.with_layers(2, tp=tp), agents_by=agents_by) for r in (Role.PREFILL, Role.DECODE)]


async def send(agent, *, key="k", tokens=TOKENS, timeout_s=5.0, hold: asyncio.Event | None = None, to=DECODE):
    async with agent.send(key, 0, PAGES, to=to, tokens=tokens, timeout_s=timeout_s) as out:
        if hold is not None:
            await hold.wait()
        await out.push()


async def receive(agent, *, key="k", tokens=TOKENS, timeout_s=5.0, source=PREFILL):
    return await agent.receive(key, 0, PAGES, source=source, tokens=tokens, timeout_s=timeout_s)


async def until_settled(c) -> None:
    """The peers' last messages are on the way; they are events of this loop."""
    async with asyncio.timeout(5):
        while True:
            try:
                c.check_nothing_leaked()
                return
            except AssertionError:
                await asyncio.sleep(0)


def stalled_network(release: asyncio.Event) -> LoopbackNetwork:
    """WRITEs land, but their completion waits for `release`."""

    async def sleep(_: float) -> None:
        await release.wait()

    return LoopbackNetwork(faults=lambda posting: Fault(completion_delay_s=1.0), sleep=sleep)


async def test_a_send_that_nobody_receives_times_out(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        with pytest.raises(TransferTimeout):
            await send(c.prefill.agents[0], timeout_s=0.2)
        await until_settled(c)


async def test_a41_a_receive_without_any_traffic_times_out(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        with pytest.raises(TransferTimeout):
            await receive(c.decode.agents[0], timeout_s=0.2)
        await until_settled(c)


async def test_a_peer_that_is_not_there_times_out(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        await c.decode.agents[0].close()
        with pytest.raises(TransferTimeout, match="could not be reached"):
            await send(c.prefill.agents[0], timeout_s=0.3)


async def test_tokens_that_prefill_does_not_have_are_refused_by_range(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        outcomes = await asyncio.gather(
            send(c.prefill.agents[0], tokens=(16, 40)), receive(c.decode.agents[0]), return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [RangeUnavailableError] * 2
        await until_settled(c)


async def test_p19_a_failing_prefill_is_told_to_decode_within_a_second(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        waiting = asyncio.create_task(receive(c.decode.agents[0]))
        with pytest.raises(ZeroDivisionError):
            async with c.prefill.agents[0].send("k", 0, PAGES, to=DECODE, tokens=TOKENS) as out:
                await out.push((0, 16))
                raise ZeroDivisionError("the worker broke")
        async with asyncio.timeout(1.0):
            with pytest.raises(TransferAborted, match="the worker broke") as caught:
                await waiting
        assert caught.value.cause is ErrorCode.TRANSFER_ABORTED
        await until_settled(c)


async def test_a44_one_rank_of_several_fails_all(tmp_path):
    async with cluster(tmp_path, MODEL, *sides(tp=2, agents_by="rank")) as c:
        bad = asyncio.Event()

        async def broken_send() -> None:
            async with c.prefill.agents[1].send("k", 0, PAGES, to=DECODE, tokens=TOKENS):
                await bad.wait()
                raise ZeroDivisionError

        tasks = [
            asyncio.create_task(send(c.prefill.agents[0])),
            asyncio.create_task(broken_send()),
            *(asyncio.create_task(receive(agent)) for agent in c.decode.agents),
        ]
        bad.set()
        async with asyncio.timeout(2.0):
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(outcomes[1], ZeroDivisionError)
        assert any(isinstance(outcome, TransferAborted) for outcome in outcomes[2:])
        await until_settled(c)


async def test_a30_decode_aborts_while_a_write_is_in_flight(tmp_path):
    release = asyncio.Event()
    async with cluster(tmp_path, MODEL, *sides(), network=stalled_network(release)) as c:
        sending = asyncio.create_task(send(c.prefill.agents[0]))
        receiving = asyncio.create_task(receive(c.decode.agents[0]))
        while not any(name.endswith(":write") for name in c.prefill.agents[0].stats()["slots_held"]):
            await asyncio.sleep(0)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        with pytest.raises(TransferAborted):
            await sending
        held = c.prefill.agents[0].stats()["slots_held"]
        assert any(name.endswith(":write") for name in held), held  # its WRITE has not completed
        release.set()
        await until_settled(c)


async def test_a52_cancel_in_the_middle_of_a_write_pins_the_source(tmp_path):
    release = asyncio.Event()
    async with cluster(tmp_path, MODEL, *sides(), network=stalled_network(release)) as c:
        sending = asyncio.create_task(send(c.prefill.agents[0]))
        receiving = asyncio.create_task(receive(c.decode.agents[0]))
        while not any(name.endswith(":write") for name in c.prefill.agents[0].stats()["slots_held"]):
            await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
        with pytest.raises(TransferAborted):
            await receiving
        assert any(name.endswith(":write") for name in c.prefill.agents[0].stats()["slots_held"])
        release.set()
        await until_settled(c)


async def test_a50_a_write_that_fails_to_post_costs_nothing(tmp_path):
    network = LoopbackNetwork(faults=lambda posting: Fault(fail_to_post=True))
    async with cluster(tmp_path, MODEL, *sides(), network=network) as c:
        async with asyncio.timeout(1.0):
            outcomes = await asyncio.gather(
                send(c.prefill.agents[0]), receive(c.decode.agents[0]), return_exceptions=True
            )
        assert isinstance(outcomes[0], TransportError)
        assert isinstance(outcomes[1], TransferAborted)
        assert outcomes[1].cause is ErrorCode.TRANSPORT
        await until_settled(c)


async def test_a_write_that_breaks_ends_the_link_and_both_slots_are_free_after_the_fences(tmp_path):
    broken = {0}
    network = LoopbackNetwork(faults=lambda p: Fault(fail_after_bytes=100 if p.serial in broken else None))
    timeouts = Timeouts(quiesce=0.1)
    async with cluster(tmp_path, MODEL, *sides(), network=network, timeouts=timeouts) as c:
        outcomes = await asyncio.gather(send(c.prefill.agents[0]), receive(c.decode.agents[0]), return_exceptions=True)
        assert isinstance(outcomes[0], TransportError)
        assert isinstance(outcomes[1], TransferAborted)
        await c.move(2, 0, 0, PAGES, PAGES, TOKENS)
        await until_settled(c)
        for agent in (*c.prefill.agents, *c.decode.agents):
            assert agent.stats()["handshakes"] == 2
            assert agent.stats()["counters"]["fences"] == 1


async def test_a_bug_of_ours_is_no_success(tmp_path, monkeypatch):
    """An exception that nobody foresaw fails the call, and the other side hears of it."""
    async with cluster(tmp_path, MODEL, *sides()) as c:
        monkeypatch.setattr(c.prefill.agents[0]._shell, "link_plan", lambda *args: 1 / 0, raising=False)
        async with asyncio.timeout(2.0):
            outcomes = await asyncio.gather(
                send(c.prefill.agents[0]), receive(c.decode.agents[0]), return_exceptions=True
            )
        assert isinstance(outcomes[0], ZeroDivisionError)
        assert isinstance(outcomes[1], TransferAborted)
        monkeypatch.undo()
        await c.move(2, 0, 0, [1, 3, 4], [6, 7, 8], TOKENS)


async def test_another_attempt_is_another_transfer(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        prefill, decode = c.prefill.agents[0], c.decode.agents[0]
        waiting = asyncio.create_task(decode.receive("k", 0, PAGES, source=PREFILL, tokens=TOKENS, attempt=1))

        async def attempt(number: int, timeout_s: float) -> None:
            sending = prefill.send("k", 0, PAGES, to=DECODE, tokens=TOKENS, attempt=number, timeout_s=timeout_s)
            async with sending as out:
                await out.push()

        with pytest.raises(TransferTimeout):
            await attempt(0, 0.2)
        assert not waiting.done()
        await attempt(1, 5.0)
        await waiting


async def test_a34_abort_twice_and_after_done(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        agent = c.prefill.agents[0]
        sending = agent.send("k", 0, PAGES, to=DECODE, tokens=TOKENS)
        receiving = asyncio.create_task(receive(c.decode.agents[0]))
        async with sending as out:
            await out.push()
        await receiving
        error = TransferAborted("k", "test", "late")
        for _ in range(2):
            sending._session.fail(error)
        c.check_nothing_leaked()


async def test_a42_more_failures_than_slots_then_a_success(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        for n in range(6):
            with pytest.raises(ZeroDivisionError):
                async with c.prefill.agents[0].send(f"bad-{n}", 0, PAGES, to=DECODE, tokens=TOKENS) as out:
                    await out.push()
                    raise ZeroDivisionError
        await c.move(1, 0, 0, PAGES, PAGES, TOKENS)
        await until_settled(c)


async def test_a53_close_with_transfers_in_flight_twice(tmp_path):
    release = asyncio.Event()
    async with cluster(tmp_path, MODEL, *sides(), network=stalled_network(release)) as c:
        sending = asyncio.create_task(send(c.prefill.agents[0]))
        receiving = asyncio.create_task(receive(c.decode.agents[0]))
        while not any(name.endswith(":write") for name in c.prefill.agents[0].stats()["slots_held"]):
            await asyncio.sleep(0)
        async with asyncio.timeout(5.0):
            await c.prefill.agents[0].close()
            await c.prefill.agents[0].close()
        with pytest.raises(RdmaKvError):
            await sending
        with pytest.raises((TransferAborted, PeerLostError)):
            await receiving
        with pytest.raises(ClosedError):
            await send(c.prefill.agents[0])


async def test_a36_a_peer_that_goes_away_is_named(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        never = asyncio.Event()
        sending = asyncio.create_task(send(c.prefill.agents[0], hold=never))
        receiving = asyncio.create_task(receive(c.decode.agents[0]))
        while not c.decode.agents[0].stats()["links"]:
            await asyncio.sleep(0)
        (peer,) = c.decode.agents[0]._shell.links.peers
        peer.connection._writer.transport.abort()
        with pytest.raises(PeerLostError) as caught:
            await receiving
        assert caught.value.peer == "test/prefill/prefill/0"
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError, RdmaKvError):
            await sending


async def test_a_link_comes_back_for_the_next_transfer(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        await c.move(1, 0, 0, PAGES, PAGES, TOKENS)
        (peer,) = c.decode.agents[0]._shell.links.peers
        peer.connection._writer.transport.abort()
        while any(agent.stats()["links"] for agent in (*c.prefill.agents, *c.decode.agents)):
            await asyncio.sleep(0)
        await c.move(2, 0, 0, [1, 3, 4], [6, 7, 8], TOKENS)
        await until_settled(c)


async def test_a_push_outside_of_what_was_announced_is_named(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        receiving = asyncio.create_task(receive(c.decode.agents[0]))
        with pytest.raises(ConfigError) as caught:
            async with c.prefill.agents[0].send("k", 0, PAGES, to=DECODE, tokens=TOKENS) as out:
                await out.push((0, 41))
        assert caught.value.field == "tokens"
        with pytest.raises(TransferAborted):
            await receiving
        await until_settled(c)


async def test_a_part_that_was_never_pushed_fails_both(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        receiving = asyncio.create_task(receive(c.decode.agents[0]))
        with pytest.raises(LocalProtocolError, match="never pushed"):
            async with c.prefill.agents[0].send("k", 0, PAGES, to=DECODE, tokens=TOKENS) as out:
                await out.push((0, 39))
        with pytest.raises(TransferAborted):
            await receiving
        await until_settled(c)


async def test_the_same_key_again_is_refused_without_harm_to_the_first(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        go = asyncio.Event()
        for memory in c.prefill.memory_of(0):
            memory.fill(1, PAGES, TOKENS)
        first = asyncio.create_task(send(c.prefill.agents[0], hold=go))
        receiving = asyncio.create_task(receive(c.decode.agents[0]))
        await asyncio.sleep(0)
        with pytest.raises(LocalProtocolError):
            await send(c.prefill.agents[0])
        with pytest.raises(LocalProtocolError):
            await receive(c.decode.agents[0])
        go.set()
        await asyncio.gather(first, receiving)
        for memory in c.decode.memory_of(0):
            memory.check(1, PAGES, 0, TOKENS)
        c.check_nothing_leaked()


async def test_a_data_plane_that_cannot_be_closed_leaves_no_link_up(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        agent, (host, port) = c.prefill.agents[0], c.prefill.agents[0].address
        planes = agent._shell.mover._planes
        honest = planes.close

        async def stuck() -> None:
            await honest()
            raise TransportError("loopback", "stuck", "operations are held")

        planes.close = stuck
        with pytest.raises(TransportError):
            await agent.close()
        assert agent.stats()["links"] == 0
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(host, port)


async def test_a_send_whose_gather_never_ends_fails_in_bounded_time_and_the_agent_closes(tmp_path):
    """As where a producer's CUDA event never fires, since the engine's stream is stuck."""
    timeouts = Timeouts(quiesce=0.3)
    async with cluster(tmp_path, MODEL, *sides(), timeouts=timeouts) as c:
        agent = c.prefill.agents[0]
        never = asyncio.Event()

        async def stuck(work) -> None:
            await never.wait()

        agent._shell.packer.gather = stuck
        receiving = asyncio.create_task(receive(c.decode.agents[0], key="stuck", timeout_s=0.3))
        async with asyncio.timeout(20):
            with pytest.raises(RdmaKvError):
                await send(agent, key="stuck", timeout_s=0.3)
            with pytest.raises(RdmaKvError):
                await receiving
            assert {key.rpartition(":")[2] for key in agent.stats()["slots_held"]} == {"gather"}, (
                "it may still be filled"
            )
            await agent.close()


async def test_a_cancelled_close_goes_on_and_frees_nothing_before_the_transports_have_ended(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        agent = c.prefill.agents[0]
        mover, order, go = agent._shell.mover, [], asyncio.Event()
        honest_close, honest_free = mover._planes.close, mover._staging.close

        async def slow_close() -> None:
            await go.wait()
            await honest_close()
            order.append("planes")

        async def free() -> None:
            order.append("staging")
            await honest_free()

        mover._planes.close, mover._staging.close = slow_close, free
        closing = asyncio.create_task(agent.close())
        for _ in range(20):
            await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert order == []
        go.set()
        await agent.close()
        assert order == ["planes", "staging"]


async def test_a_close_during_the_start_waits_for_it_and_leaves_nothing_open(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        template = c.prefill.agents[0]
        network = LoopbackNetwork()
        agent = Agent(template.config, c.registry, transport=lambda name: LoopbackTransport(network, name))
        go = asyncio.Event()

        async def slow_start() -> None:
            await go.wait()

        agent._shell.packer.start = slow_start
        starting = asyncio.create_task(agent.start())
        await asyncio.sleep(0)
        with pytest.raises(ClosedError):
            agent.send("k", 0, PAGES, tokens=TOKENS)
        closing = asyncio.create_task(agent.close())
        await asyncio.sleep(0)
        assert not closing.done()
        go.set()
        with pytest.raises(ClosedError, match="while it was starting"):
            await starting
        await closing
        assert agent.address == ("", 0), "nothing listens"
