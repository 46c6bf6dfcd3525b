"""Lost messages, and many transfers of which half are aborted: all end, in success or a typed error, and nothing is left."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable

import pytest
from rig import Side, cluster

from rdma_kv.agent import Agent
from rdma_kv.config import StagingConfig, Timeouts
from rdma_kv.errors import ErrorCode, RdmaKvError, TransferAborted, TransferTimeout
from rdma_kv.messages import Ack, Done
from rdma_kv.topology import ModelSpec, Topology
from rdma_kv.transport.loopback import Fault, LoopbackNetwork, RandomDelays
from rdma_kv.types import ReplicaId, Role

pytestmark = pytest.mark.usefixtures("face")

MODEL = ModelSpec.gqa(layers=2, kv_heads=2, head_dim=8, itemsize=4, dtype="float32", fingerprint="toy")
DECODE, PREFILL = ReplicaId("decode", 0), ReplicaId("prefill", 0)
PAGES, TOKENS = [5, 2, 9], 40


def sides(pages: int = 32) -> list[Side]:
    return [Side(role.value, role, Topology.with_layers(2), pages=pages) for role in (Role.PREFILL, Role.DECODE)]


async def send(c, *, key: str = "k", timeout_s: float = 5.0) -> None:
    async with c.prefill.agents[0].send(key, 0, PAGES, to=DECODE, tokens=TOKENS, timeout_s=timeout_s) as out:
        await out.push()


async def receive(c, *, key: str = "k", timeout_s: float = 5.0) -> object:
    return await c.decode.agents[0].receive(key, 0, PAGES, source=PREFILL, tokens=TOKENS, timeout_s=timeout_s)


async def until(condition: Callable[[], object], limit_s: float = 5.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0)


def quiet(c) -> bool:
    """No slot is held, no transfer under way, no task left."""
    agents = (*c.prefill.agents, *c.decode.agents)
    stats = [agent.stats() for agent in agents]
    return all(
        s["slots_free"] == s["slots_total"] and not s["transfers"] and not s["tasks"] and not a._shell.tasks
        for s, a in zip(stats, agents, strict=True)
    )


# --- one message is lost -----------------------------------------------------------------------------------------------


def lose(agent: Agent, kind: type) -> list[object]:
    """From now on the next message of a kind that the agent sends to its only peer is lost."""
    (peer,) = agent._shell.links.peers
    honest, lost = peer.send, []

    def send_most(message: object) -> None:
        if isinstance(message, kind) and not lost:
            lost.append(message)
        else:
            honest(message)  # type: ignore[arg-type]

    peer.send = send_most
    return lost


async def test_a43_a_lost_notification_is_an_error_on_both_sides_at_the_deadline(tmp_path):
    """FINISH counts one box more than came. Every WRITE has succeeded, so QUIESCED frees the slot of the lost one."""
    lost = {0}
    network = LoopbackNetwork(faults=lambda posting: Fault(lose_notification=posting.serial in lost))
    async with cluster(tmp_path, MODEL, *sides(), network=network) as c:
        began = asyncio.get_running_loop().time()
        ended = await asyncio.gather(send(c, timeout_s=4.0), receive(c, timeout_s=0.3), return_exceptions=True)
        assert [type(error) for error in ended] == [TransferAborted, TransferTimeout]
        assert ended[0].cause is ErrorCode.TRANSFER_TIMEOUT
        assert asyncio.get_running_loop().time() - began < 2.0
        await until(lambda: quiet(c))
        await c.move(2, 0, 0, PAGES, PAGES, TOKENS)


async def test_a43_a_lost_ack_costs_nothing(tmp_path):
    """Slots are given by GRANT; ACK only says that one has ended."""
    async with cluster(tmp_path, MODEL, *sides(), staging=StagingConfig(2, 4096)) as c:
        await c.move(1, 0, 0, PAGES, PAGES, TOKENS)
        lost = lose(c.decode.agents[0], Ack)
        await c.move(2, 0, 0, PAGES, PAGES, TOKENS)
        assert lost
        await until(lambda: quiet(c))


async def test_a43_after_a_lost_done_the_sender_ends_at_its_deadline(tmp_path):
    """Decode has everything, truly. The sender cannot know, and says so; its pages are free then, and so is all else."""
    async with cluster(tmp_path, MODEL, *sides()) as c:
        await c.move(1, 0, 0, PAGES, PAGES, TOKENS)
        lost = lose(c.decode.agents[0], Done)
        for memory in c.prefill.memory_of(0):
            memory.fill(2, PAGES, TOKENS)
        ended = await asyncio.gather(send(c, timeout_s=0.5), receive(c), return_exceptions=True)
        assert lost
        assert isinstance(ended[0], TransferTimeout)
        for memory in c.decode.memory_of(0):
            memory.check(2, PAGES, 0, TOKENS)
        await until(lambda: quiet(c))
        await c.move(3, 0, 0, PAGES, PAGES, TOKENS)


# --- half of many are aborted ------------------------------------------------------------------------------------------

KINDS = ("raise", "cancel send", "cancel receive")


async def run_half_aborted(c, seed: int, count: int, at_once: int) -> tuple[int, int]:
    """`count` transfers, every second one aborted at a random point. Returns how many were good, and failed."""
    rnd = random.Random(seed)
    gate = asyncio.Semaphore(at_once)
    free = list(range(at_once))  # each that runs has pages of its own

    async def points() -> None:
        for _ in range(rnd.randrange(1, 60)):  # turns of the loop: anywhere from the call to the end
            await asyncio.sleep(0)

    async def sender(key: str, pages: list[int], kind: str) -> None:
        sending = c.prefill.agents[0].send(key, 0, pages, to=DECODE, tokens=TOKENS, timeout_s=20.0)
        async with sending as out:
            for cut in itertools.pairwise([0, 16, 32, TOKENS]):
                if kind == "raise" and rnd.random() < 0.4:
                    await points()
                    raise ZeroDivisionError
                await out.push(cut)
            if kind == "raise":
                raise ZeroDivisionError

    async def one(number: int) -> bool:
        async with gate:
            place = free.pop()
            pages = [3 * place + n for n in range(3)]
            kind = rnd.choice(KINDS) if number % 2 else ""
            for memory in c.prefill.memory_of(0):
                memory.fill(number, pages, TOKENS)
            key = f"k{number}"
            sending = asyncio.create_task(sender(key, pages, kind))
            receiving = asyncio.create_task(
                c.decode.agents[0].receive(key, 0, pages, source=PREFILL, tokens=TOKENS, timeout_s=20.0)
            )
            if kind.startswith("cancel"):
                await points()
                (sending if kind == "cancel send" else receiving).cancel()
            ended = await asyncio.gather(sending, receiving, return_exceptions=True)
            if ended[1] is None or not isinstance(ended[1], BaseException):
                for memory in c.decode.memory_of(0):
                    memory.check(number, pages, 0, TOKENS)
            errors = [error for error in ended if isinstance(error, BaseException)]
            known = RdmaKvError | ZeroDivisionError | asyncio.CancelledError
            assert all(isinstance(error, known) for error in errors), errors
            assert not any(isinstance(error, TransferTimeout) for error in errors), errors
            assert kind or not errors, errors
            free.append(place)
            return not errors

    results = await asyncio.gather(*(one(number) for number in range(count)))
    return sum(results), count - sum(results)


async def test_a48_f37_a_thousand_transfers_half_aborted_at_random_points_on_rings_of_four_slots(tmp_path, caplog):
    """No deadlock (F37): more are under way than there are slots. No slot, transfer or task is left (A48)."""
    before = asyncio.all_tasks()
    network = LoopbackNetwork(faults=RandomDelays(5, 0.001))
    staging, timeouts = StagingConfig(4, 4096), Timeouts(quiesce=5.0)
    async with cluster(tmp_path, MODEL, *sides(64), network=network, staging=staging, timeouts=timeouts) as c:
        async with asyncio.timeout(90):
            good, failed = await run_half_aborted(c, 48, 1000, 16)
        assert good >= 500
        assert failed >= 400  # some were over before they could be aborted
        await until(lambda: quiet(c))
        for agent in (*c.prefill.agents, *c.decode.agents):
            assert agent.stats()["slots_free"] == agent.stats()["slots_total"] == 4
            assert not agent.stats()["slots_held"]
        for _ in range(3):
            await c.move(7, 0, 0, PAGES, PAGES, TOKENS)
    assert not {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize("seed", range(3))
async def test_a48_aborts_at_random_points_of_four_by_four_agents(tmp_path, seed):
    """Any rank aborts at any point; its siblings and the other side end too, and the next attempt works."""
    rnd = random.Random(seed)
    topology = Topology.with_layers(2, tp=4)
    model = ModelSpec.gqa(layers=2, kv_heads=4, head_dim=8, itemsize=4, dtype="float32", fingerprint="toy")
    both = [Side(role.value, role, topology, agents_by="rank") for role in (Role.PREFILL, Role.DECODE)]
    async with cluster(tmp_path, model, *both, staging=StagingConfig(4, 4096)) as c:
        for number in range(12):
            tasks = [
                asyncio.create_task(send_all(agent, f"k{number}", rnd.choice([DECODE, None])))
                for agent in c.prefill.agents
            ]
            tasks += [
                asyncio.create_task(
                    agent.receive(f"k{number}", 0, PAGES, source=PREFILL, tokens=TOKENS, timeout_s=20.0)
                )
                for agent in c.decode.agents
            ]
            for _ in range(rnd.randrange(80)):
                await asyncio.sleep(0)
            rnd.choice(tasks).cancel()
            async with asyncio.timeout(3.0):
                await asyncio.gather(*tasks, return_exceptions=True)
            await c.move(number, 0, 0, [1, 3, 4], [6, 7, 8], TOKENS, key=f"again-{number}")
        await until(lambda: quiet(c))


async def send_all(agent: Agent, key: str, to: ReplicaId | None) -> None:
    async with agent.send(key, 0, PAGES, to=to, tokens=TOKENS, timeout_s=20.0) as out:
        await out.push()
