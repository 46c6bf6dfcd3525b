"""Checksums of chunks: a byte that is flipped on the way is found before a page is touched, and named. Off by default."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from rig import SENTINEL, Cluster, Side, cluster

from rdma_kv.agent import Agent
from rdma_kv.config import StagingConfig
from rdma_kv.errors import ChecksumError, ErrorCode, IncompatiblePeerError, RemoteProtocolError, TransferAborted
from rdma_kv.kernels.checksum import ALGORITHM, checksum
from rdma_kv.kernels.reference import view
from rdma_kv.kernels.work import Work
from rdma_kv.messages import decode_notification, encode_notification
from rdma_kv.topology import Component, ModelSpec, Topology
from rdma_kv.transport.loopback import Fault, LoopbackNetwork, Posting
from rdma_kv.types import Interval, ReplicaId, Role

pytestmark = pytest.mark.usefixtures("face")

MODEL = ModelSpec.gqa(layers=4, kv_heads=4, head_dim=8, itemsize=4, dtype="float32", fingerprint="toy")
DECODE, PREFILL = ReplicaId("decode", 0), ReplicaId("prefill", 0)
PAGES, TOKENS = [5, 2, 9], 40
SMALL = StagingConfig(slots=4, slot_bytes=4096)  # several chunks a move


def sides(tp: int = 1, agents_by: str = "replica", checksums: tuple[bool, bool] = (True, True)) -> list[Side]:
    return [
        Side(role.value, role, Topology.with_layers(4, tp=tp), agents_by=agents_by, checksum=on)
        for role, on in zip((Role.PREFILL, Role.DECODE), checksums, strict=True)
    ]


class Flip:
    """A plan that flips one byte of the first WRITE that `hits`, and then no more."""

    def __init__(self, offset: int, hits=lambda note: True) -> None:
        self.offset = offset
        self.hits = hits
        self.hit: Posting | None = None

    def __call__(self, posting: Posting) -> Fault:
        if self.hit is None and self.hits(decode_notification("peer", posting.notification)):
            self.hit = posting
            return Fault(flip=self.offset)
        return Fault()


async def send(agent: Agent, attempt: int = 0) -> None:
    async with agent.send("k", 0, PAGES, to=DECODE, tokens=TOKENS, attempt=attempt, timeout_s=5.0) as out:
        await out.push()


def receive(agent: Agent, attempt: int = 0):
    return agent.receive("k", 0, PAGES, source=PREFILL, tokens=TOKENS, attempt=attempt, timeout_s=5.0)


async def everybody(c: Cluster, attempt: int = 0) -> list[object]:
    work = [
        *(send(agent, attempt) for agent in c.prefill.agents),
        *(receive(agent, attempt) for agent in c.decode.agents),
    ]
    async with asyncio.timeout(5.0):
        return await asyncio.gather(*work, return_exceptions=True)


async def settled(c: Cluster) -> None:
    async with asyncio.timeout(5.0):
        while any(a.stats()["transfers"] or a._shell.tasks for a in (*c.prefill.agents, *c.decode.agents)):
            await asyncio.sleep(0)
    c.check_nothing_leaked()


def fill(c: Cluster, request: int) -> None:
    for memory in c.prefill.memory_of(0):
        memory.fill(request, PAGES, TOKENS)


def check(c: Cluster, request: int) -> None:
    for memory in c.decode.memory_of(0):
        memory.check(request, PAGES, 0, TOKENS)


def failures(agent: Agent) -> int:
    return agent.stats()["counters"].get("checksum_failures", 0)


# --- it works where nothing is wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "d", "kind"), [(1, 1, "nhd"), (2, 4, "hnd"), (4, 1, "nhd")])
async def test_good_chunks_arrive(tmp_path, p, d, kind):
    prefill = Side("prefill", Role.PREFILL, Topology.with_layers(4, tp=p), checksum=True)
    decode = Side("decode", Role.DECODE, Topology.with_layers(4, tp=d), kind=kind, page_size=8, checksum=True)
    async with cluster(tmp_path, MODEL, prefill, decode, staging=SMALL) as c:
        for request in range(3):
            await c.move(request, 0, 0, PAGES, [1, 2, 3, 4, 5], TOKENS)
        assert not failures(c.decode.agents[0])
        c.check_nothing_leaked()


async def test_the_notification_carries_the_checksum_of_the_packed_chunk(tmp_path):
    seen: list[tuple[int, int | None]] = []
    network = LoopbackNetwork()
    async with cluster(tmp_path, MODEL, *sides(), network=network, staging=SMALL) as c:
        memory = c.prefill.agents[0]._shell.mover

        def look(posting: Posting) -> Fault:
            note = decode_notification("peer", posting.notification)
            (entry,) = memory._transfers
            slot = next(
                local for local, (_, target) in entry.machine._flight.writing.items() if target.index == note.slot
            )
            seen.append((checksum(view(memory._staging.address(slot.index), posting.length_bytes)), note.checksum))
            return Fault()

        network.faults = look
        await c.move(1, 0, 0, PAGES, PAGES, TOKENS)
        assert len(seen) > 4
        assert all(computed == told for computed, told in seen)


async def test_without_the_option_nothing_is_computed_or_sent(tmp_path):
    told: list[int | None] = []

    def look(posting: Posting) -> Fault:
        told.append(decode_notification("peer", posting.notification).checksum)
        return Fault()

    both = sides(checksums=(False, False))
    async with cluster(tmp_path, MODEL, *both, network=LoopbackNetwork(faults=look)) as c:
        await c.move(1, 0, 0, PAGES, PAGES, TOKENS)
        assert set(told) == {None}


# --- F77 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [0, 1, 1000, 4095])
async def test_f77_a_flipped_byte_is_named_and_reaches_no_page(tmp_path, offset):
    """4 layers of 256 bytes a token: chunks of 4096 bytes hold 8 tokens of 2 layers or less. The last of them is hit."""
    flip = Flip(offset, lambda note: note.tokens[1] > 0 and note.layers[0] > 0)
    async with cluster(tmp_path, MODEL, *sides(), network=LoopbackNetwork(faults=flip), staging=SMALL) as c:
        fill(c, 1)
        sent, error = await everybody(c)
        assert isinstance(error, ChecksumError), error
        note = decode_notification("peer", flip.hit.notification)
        assert error.component == "kv"
        assert error.layers == tuple(range(*note.layers))
        assert error.tokens == note.tokens
        assert error.src_rank == 0
        assert error.expected == note.checksum != error.found
        assert error.culprit == "test/prefill/prefill/0"
        assert error.retryable
        assert isinstance(sent, TransferAborted)
        assert sent.cause is ErrorCode.CHECKSUM
        assert sent.retryable
        assert f"tokens [{note.tokens[0]},{note.tokens[1]})" in str(sent)
        (memory,) = c.decode.memory_of(0)
        for position in range(*note.tokens):
            rows = memory.rows(PAGES[position // 16], position % 16)[list(error.layers)]
            assert (rows == SENTINEL).all(), "a byte of the damaged chunk is in a page"
        assert failures(c.decode.agents[0]) == 1
        await settled(c)
        assert (await everybody(c, attempt=1))[0] is None
        check(c, 1)
        assert failures(c.decode.agents[0]) == 1


async def test_f77_the_control_without_the_option_the_same_flip_arrives_unnoticed(tmp_path):
    flip = Flip(1000)
    both = sides(checksums=(False, False))
    async with cluster(tmp_path, MODEL, *both, network=LoopbackNetwork(faults=flip), staging=SMALL) as c:
        fill(c, 1)
        ended = await everybody(c)
        assert flip.hit is not None
        assert not any(isinstance(outcome, BaseException) for outcome in ended)
        with pytest.raises(AssertionError, match="request 1"):
            check(c, 1)
        assert not failures(c.decode.agents[0])


async def test_f77_every_rank_hears_which_chunk_was_damaged(tmp_path):
    """Rank 2's first chunk is hit, before the others are pushed; its siblings and all senders end by that."""
    flip = Flip(5, lambda note: note.move == 2)
    async with cluster(tmp_path, MODEL, *sides(4, "rank"), network=LoopbackNetwork(faults=flip)) as c:

        async def send_late(agent: Agent) -> None:
            async with agent.send("k", 0, PAGES, to=DECODE, tokens=TOKENS, timeout_s=5.0) as out:
                await out.push((0, 16))
                while out.error is None:
                    await asyncio.sleep(0)
                await out.push((16, TOKENS))

        work = [*(send_late(agent) for agent in c.prefill.agents), *(receive(agent) for agent in c.decode.agents)]
        async with asyncio.timeout(3.0):
            ended = await asyncio.gather(*work, return_exceptions=True)
        error = ended.pop(4 + 2)
        assert isinstance(error, ChecksumError)
        assert error.src_rank == 2
        for other in ended:
            assert isinstance(other, TransferAborted), ended
            assert other.cause is ErrorCode.CHECKSUM
            assert other.culprit == "test/prefill/prefill/2"
            assert "source rank 2" in str(other)
        await settled(c)


async def test_f77_the_damaged_component_and_its_global_layers_are_named(tmp_path):
    """Layers in the error are the model's, not positions in the component."""
    kv = Component("kv", (0, 1, 2, 3), 2, 2, 32)
    scales = Component("scales", (1, 3), 2, 1, 8, "float32", scale_mode="per token")
    flip = Flip(3, lambda note: note.move == 1)
    network = LoopbackNetwork(faults=flip)
    async with cluster(tmp_path, ModelSpec((kv, scales), "toy"), *sides(), network=network) as c:
        _, error = await everybody(c)
        assert isinstance(error, ChecksumError), error
        assert (error.component, error.layers, error.tokens) == ("scales", (1, 3), (0, TOKENS))


# --- one launch --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("face", ["library"], indirect=True)  # it calls the packer
async def test_a_damaged_chunk_does_not_fail_the_others_of_its_launch(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        fill(c, 1)
        source, target = c.prefill.agents[0]._shell.packer, c.decode.agents[0]._shell.packer
        route = c.decode.agents[0]._shell.route("k", 0, c.registry.engine("prefill"), 0)
        peer = await c.decode.agents[0]._shell.links.peer(c.registry.engine("prefill").agents[0])
        plan = c.decode.agents[0]._shell.link_plan(route, peer.identity, (TOKENS,))
        boxes = [
            box for tokens in ((0, 16), (16, 32), (32, 40)) for box in plan.cut(0, Interval(0, 4), Interval(*tokens))
        ]
        slots = [np.zeros(plan.box_bytes(box), np.uint8) for box in boxes]
        tables = [packer.page_tables(0, PAGES, [TOKENS]) for packer in (source, target)]
        chunks = [source.chunk(plan, b, tables[0], s.ctypes.data) for b, s in zip(boxes, slots, strict=True)]
        sums = await asyncio.gather(*(source.gather(Work(chunk, checksum=True)) for chunk in chunks))
        assert sums == [checksum(slot) for slot in slots]
        slots[1][77] ^= 1
        before = target.launches[1]
        chunks = [target.chunk(plan, b, tables[1], s.ctypes.data) for b, s in zip(boxes, slots, strict=True)]
        found = await asyncio.gather(*(target.scatter(Work(x, expected=s)) for x, s in zip(chunks, sums, strict=True)))
        assert target.launches[1] == before + 1
        assert found == [None, checksum(slots[1]), None]
        (memory,) = c.decode.memory_of(0)
        assert memory.written() == {(page, token) for page in (PAGES[0], PAGES[2]) for token in range(16)} - {
            (PAGES[2], token) for token in range(8, 16)
        }
        assert (
            await target.scatter(Work(chunks[1], expected=checksum(slots[1]))) is None
        )  # the control: it fits its own sum
        assert await source.gather(Work(chunks[0])) is None


# --- who agrees --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", [(True, False), (False, True)])
async def test_sides_that_differ_refuse_each_other_by_name(tmp_path, on):
    async with cluster(tmp_path, MODEL, *sides(checksums=on)) as c:
        ended = await everybody(c)
        for error in ended:
            assert isinstance(error, IncompatiblePeerError), ended
            assert error.field == "checksum"
            assert ALGORITHM in str(error)


@pytest.mark.parametrize("agreed", [True, False])
async def test_a_notification_against_the_agreement_is_the_peers_error(tmp_path, agreed):
    """A sender with a bug: no checksum where one was agreed on, or one where none was."""
    async with cluster(tmp_path, MODEL, *sides(checksums=(agreed, agreed))) as c:
        await c.move(1, 0, 0, PAGES, PAGES, TOKENS)
        (peer,) = c.prefill.agents[0]._shell.links.peers
        honest = peer.endpoint.write

        async def write(pairs, body: bytes) -> None:
            note = decode_notification("peer", body)
            changed = {name: getattr(note, name) for name in note.__struct_fields__}
            changed["checksum"] = None if agreed else 17
            await honest(pairs, encode_notification(type(note)(**changed)))

        peer.endpoint.write = write
        sent, error = await everybody(c)
        assert isinstance(error, RemoteProtocolError), error
        assert "against the handshake" in str(error)
        assert isinstance(sent, TransferAborted)
        assert sent.cause is ErrorCode.REMOTE_PROTOCOL
