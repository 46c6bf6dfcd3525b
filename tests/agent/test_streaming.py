"""Data that comes in pieces (chunked prefill, layer by layer), prefixes that are there already, and metadata."""

import asyncio

import numpy as np
import pytest
from rig import Side, cluster

from rdma_kv.config import StagingConfig
from rdma_kv.errors import LocalProtocolError
from rdma_kv.topology import ModelSpec, Topology
from rdma_kv.transport.loopback import Fault, LoopbackNetwork
from rdma_kv.types import ReplicaId, Role

pytestmark = pytest.mark.usefixtures("face")

MODEL = ModelSpec.gqa(layers=4, kv_heads=2, head_dim=8, itemsize=4, dtype="float32", fingerprint="toy")
DECODE, PREFILL = ReplicaId("decode", 0), ReplicaId("prefill", 0)


def sides(p_page: int = 16, d_page: int = 16, tp: int = 2):
    return [
        Side("prefill", Role.PREFILL, Topology.with_layers(4, tp=tp), page_size=p_page, pages=64),
        Side("decode", Role.DECODE, Topology.with_layers(4), page_size=d_page, pages=64, kind="hnd"),
    ]


def fill(c, pages, tokens, request=1):
    for memory in c.prefill.memory_of(0):
        memory.fill(request, pages, tokens)


def check(c, pages, start, end, request=1):
    for memory in c.decode.memory_of(0):
        memory.check(request, pages, start, end)


async def test_f56_chunked_prefill_of_20_and_12_tokens(tmp_path):
    """Page 16; the second chunk begins inside a page. Each token moves once, as soon as its chunk is there."""
    async with cluster(tmp_path, MODEL, *sides()) as c:
        source, target = [3, 8], [1, 6]
        (agent,) = c.prefill.agents
        receiving = asyncio.create_task(c.decode.agents[0].receive("k", 0, target, source=PREFILL, tokens=32))
        fill(c, source, 20)
        async with agent.send("k", 0, source, to=DECODE, tokens=32) as out:
            await out.push((0, 20))
            while len(c.decode.memory_of(0)[0].written()) < 20:
                await asyncio.sleep(0)
            assert c.decode.memory_of(0)[0].written() == {(target[t // 16], t % 16) for t in range(20)}
            with pytest.raises(LocalProtocolError, match="pushed before"):
                await out.push((19, 32))
            fill(c, source, 32)
            await out.push((20, 32))
        received = await receiving
        assert received.received_bytes == 32 * 4 * 2 * 2 * 32
        check(c, target, 0, 32)
        c.check_nothing_leaked()


async def test_layer_by_layer_with_a_ready_event(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        source, target = [3, 8, 5], [1, 6, 2]
        events = [asyncio.Event() for _ in range(4)]
        receiving = asyncio.create_task(c.decode.agents[0].receive("k", 0, target, source=PREFILL, tokens=40))
        sending = c.prefill.agents[0].send("k", 0, source, to=DECODE, tokens=40)
        async with sending as out, asyncio.TaskGroup() as group:
            for layer, event in enumerate(events):
                group.create_task(out.push(layers=(layer, layer + 1), ready=event))
            for _ in range(20):
                await asyncio.sleep(0)
            assert c.prefill.agents[0].stats()["gather_launches"] == 0  # nothing is ready
            fill(c, source, 40)
            for event in reversed(events):
                event.set()
        await receiving
        check(c, target, 0, 40)
        c.check_nothing_leaked()


async def test_o25_the_source_is_read_after_its_event_only(tmp_path):
    """send() is called while the producer still writes; decode gets the final data."""
    async with cluster(tmp_path, MODEL, *sides()) as c:
        source, target = [3, 8, 5], [1, 6, 2]
        ready = asyncio.Event()
        fill(c, source, 40, request=99)  # not final
        receiving = asyncio.create_task(c.decode.agents[0].receive("k", 0, target, source=PREFILL, tokens=40))

        async def produce() -> None:
            while not c.prefill.agents[0].stats()["transfers"]:
                await asyncio.sleep(0)
            fill(c, source, 40, request=1)
            ready.set()

        producer = asyncio.create_task(produce())
        async with c.prefill.agents[0].send("k", 0, source, to=DECODE, tokens=40) as out:
            await out.push(ready=ready)
        await asyncio.gather(receiving, producer)
        check(c, target, 0, 40)


async def test_f55_decode_has_the_first_two_of_four_pages(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        (received,) = await c.move(1, 0, 0, [9, 4, 7, 2], [5, 3, 8, 6], 64, start=32)
        assert received.tokens == {"kv": (32, 64)}
        assert received.received_bytes == 32 * 4 * 2 * 2 * 32
        assert {page for page, _ in c.decode.memory_of(0)[0].written()} == {8, 6}
        c.check_nothing_leaked()


async def test_f54_trimmed_by_position_not_by_count(tmp_path):
    """Prompt 2,048, page 64; decode holds 31 pages and asks for 2,049 tokens: only page 31 moves, into its page 31."""
    async with cluster(tmp_path, MODEL, *sides(64, 64)) as c:
        source, target = list(range(63, 31, -1)), list(range(33))
        fill(c, source, 2048)
        receiving = asyncio.create_task(
            c.decode.agents[0].receive("k", 0, target, source=PREFILL, tokens=(31 * 64, 2049))
        )
        async with c.prefill.agents[0].send("k", 0, source, to=DECODE, tokens=2048) as out:
            await out.push()
        received = await receiving
        assert received.tokens == {"kv": (31 * 64, 2048)}
        check(c, target, 31 * 64, 2048)
        assert {page for page, _ in c.decode.memory_of(0)[0].written()} == {31}


@pytest.mark.parametrize("push", [True, False], ids=["pushed", "never pushed"])
async def test_a38_decode_has_everything_already(tmp_path, push):
    """Nothing moves, the pages are free at once, and both sides end with FINISH and its metadata."""
    async with cluster(tmp_path, MODEL, *sides()) as c:
        receiving = asyncio.create_task(c.decode.agents[0].receive("k", 0, [1, 2, 3], source=PREFILL, tokens=(40, 40)))
        async with c.prefill.agents[0].send("k", 0, [4, 5, 6], to=DECODE, tokens=40) as out:
            if push:
                await out.push()
            out.metadata["first_token"] = 7
        received = await receiving
        assert received.tokens == {"kv": (40, 40)}
        assert (received.received_bytes, received.metadata) == (0, {"first_token": 7})
        assert not c.decode.memory_of(0)[0].written()
        assert c.prefill.agents[0].stats()["gather_launches"] == 0
        c.check_nothing_leaked()


async def test_f65_metadata_of_three_requests_at_once(tmp_path):
    """First token, log-probabilities and lengths in three buffers of their own; each arrives with its own request."""
    async with cluster(tmp_path, MODEL, *sides()) as c:
        logprobs = [np.linspace(-n, 0, 5 + n, dtype=np.float32) for n in range(3)]

        async def send(n: int) -> None:
            async with c.prefill.agents[0].send(f"k{n}", 0, [n], to=DECODE, tokens=10 + n) as out:
                await out.push()
                out.metadata |= {"first_token": 100 + n, "logprobs": logprobs[n].tobytes(), "lengths": [10 + n, n]}

        async def receive(n: int):
            return await c.decode.agents[0].receive(f"k{n}", 0, [n], source=PREFILL, tokens=10 + n)

        *_, a, b, d = await asyncio.gather(*(send(n) for n in (2, 0, 1)), *(receive(n) for n in range(3)))
        for n, received in enumerate((a, b, d)):
            assert received.metadata["first_token"] == 100 + n
            assert received.metadata["lengths"] == [10 + n, n]
            np.testing.assert_array_equal(np.frombuffer(received.metadata["logprobs"], np.float32), logprobs[n])


async def test_f65_success_needs_data_and_metadata(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        fill(c, [4, 5, 6], 40)
        receiving = asyncio.create_task(c.decode.agents[0].receive("k", 0, [1, 2, 3], source=PREFILL, tokens=40))
        async with c.prefill.agents[0].send("k", 0, [4, 5, 6], to=DECODE, tokens=40) as out:
            await out.push()
            while len(c.decode.memory_of(0)[0].written()) < 40 or c.decode.agents[0].stats()["slots_held"]:
                await asyncio.sleep(0)
            for _ in range(20):
                await asyncio.sleep(0)
            assert not receiving.done()  # all data is in, the metadata is not
            out.metadata["first_token"] = 1
        assert (await receiving).metadata == {"first_token": 1}


async def test_o34_source_pages_are_free_after_remote_visibility_only(tmp_path):
    """The block of `send` ends when decode has everything in its pages, not when the WRITE was posted."""
    release = asyncio.Event()

    async def sleep(_: float) -> None:
        await release.wait()

    network = LoopbackNetwork(faults=lambda posting: Fault(notification_delay_s=1.0), sleep=sleep)
    async with cluster(tmp_path, MODEL, *sides(), network=network) as c:
        fill(c, [4, 5, 6], 40)
        receiving = asyncio.create_task(c.decode.agents[0].receive("k", 0, [1, 2, 3], source=PREFILL, tokens=40))

        async def send() -> None:
            async with c.prefill.agents[0].send("k", 0, [4, 5, 6], to=DECODE, tokens=40) as out:
                await out.push()

        sending = asyncio.create_task(send())
        while not c.prefill.agents[0].stats()["lanes"]:
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        assert not sending.done()  # written, but decode has not taken it
        release.set()
        await sending
        check(c, [1, 2, 3], 0, 40)
        await receiving


async def test_o27_few_slots_and_a_slow_transport_keep_layers_intact(tmp_path):
    """Every layer needs a slot of its own; there are two, one a peer. The next gather waits for the WRITE before it."""
    network = LoopbackNetwork(faults=lambda posting: Fault(completion_delay_s=0.001, notification_delay_s=0.002))
    staging = StagingConfig(slots=2, slot_bytes=4096)
    async with cluster(tmp_path, MODEL, *sides(), network=network, staging=staging) as c:
        await c.move(1, 0, 0, [9, 4, 7, 2], [5, 3, 8, 6], 64)
        assert c.prefill.agents[0].stats()["gather_launches"] >= 8
        c.check_nothing_leaked()
