"""Models with several kinds of cache: each moves by its own geometry and page table, all of them or none."""

import asyncio

import pytest
from rig import Side, cluster

from rdma_kv.errors import ConfigError, LocalProtocolError, TransferAborted
from rdma_kv.topology import Component, ModelSpec, Topology
from rdma_kv.types import ReplicaId, Role

pytestmark = pytest.mark.usefixtures("face")

DECODE, PREFILL = ReplicaId("decode", 0), ReplicaId("prefill", 0)
KV = Component("kv", (0, 2, 3), 4, 2, 16, "float8_e4m3", scale_mode="per token")
SCALES = Component("scales", (0, 2, 3), 4, 2, 4, "float32", scale_mode="per token")
INDEXER = Component("indexer", (0, 1, 2, 3), 1, 1, 33, "uint8", replicated=True)
WINDOW = Component("window", (1,), 2, 2, 24, "bfloat16")
STATE = Component("state", (1, 3), 2, 1, 100, "float32", has_tokens=False)
MODEL = ModelSpec((KV, SCALES, INDEXER, WINDOW, STATE), "many parts")
EVERYTHING = {"kv", "scales", "indexer", "window", "state"}


def sides(p_tp=2, d_tp=2, d_dp=1, **kwargs):
    return [
        Side("prefill", Role.PREFILL, Topology.with_layers(4, tp=p_tp), page_sizes={"window": 8}, **kwargs),
        Side(
            "decode",
            Role.DECODE,
            Topology.with_layers(4, tp=d_tp, dp=d_dp, pp=kwargs.pop("d_pp", 1)),
            page_sizes={"kv": 32, "window": 4},
            kind="hnd",
        ),
    ]


SRC_PAGES = {"kv": [5, 2, 9], "scales": [5, 2, 9], "indexer": [1, 3, 7], "window": [4, 0, 11, 2, 8], "state": [6]}
DST_PAGES = {"kv": [8, 1], "scales": [0, 1, 2], "indexer": [9, 8, 7], "window": [*range(20, 10, -1)], "state": [13]}
TOKENS = {"kv": (0, 40), "scales": (0, 40), "indexer": (0, 40), "window": (24, 40), "state": (0, 1)}


def fill(c) -> None:
    for index, part in enumerate(MODEL.components):
        for memory in c.prefill.memory_of(0, index):
            memory.fill(1, SRC_PAGES[part.name], TOKENS[part.name][1])


def check(c, replica: int = 0) -> None:
    for index, part in enumerate(MODEL.components):
        memories = c.decode.memory_of(replica, index)
        assert memories
        for memory in memories:
            memory.check(1, DST_PAGES[part.name], *TOKENS[part.name])


async def send(c, pushes=({},)):
    async with c.prefill.agents[0].send("k", 0, SRC_PAGES, to=DECODE, tokens=TOKENS) as out:
        for push in pushes:
            await out.push(**push)


async def receive(c, **changes):
    return await c.decode.agents[0].receive("k", 0, DST_PAGES, source=PREFILL, tokens=TOKENS | changes)


@pytest.mark.parametrize(
    "pushes",
    [
        [{}],
        [{"component": name} for name in EVERYTHING],
        [{"tokens": (0, 20), "component": c.name} for c in (KV, SCALES, INDEXER)]
        + [{"tokens": (20, 40), "component": c.name} for c in (KV, SCALES, INDEXER)]
        + [{"component": "window"}, {"component": "state"}],
        [{"layers": (n, n + 1)} for n in (3, 1, 0, 2)],
    ],
    ids=["at once", "one by one", "by tokens", "by layers"],
)
async def test_o29_every_component_moves_by_its_own_geometry(tmp_path, pushes):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        fill(c)
        _, received = await asyncio.gather(send(c, pushes), receive(c))
        assert received.tokens == TOKENS
        check(c)
        (window,) = c.decode.memory_of(0, 3)[:1]
        assert len(window.written()) == 16  # nothing before the window
        c.check_nothing_leaked()


async def test_o29_over_uneven_stages(tmp_path):
    topology = Topology(tp=2, pp=2, layers_per_stage=(3, 1))
    prefill, decode = sides()
    decode.topology = topology
    async with cluster(tmp_path, MODEL, prefill, decode) as c:
        fill(c)
        await asyncio.gather(send(c), receive(c))
        check(c)


async def test_o29_one_forgotten_component_fails_the_request(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        outcomes = await asyncio.gather(
            send(c, [{"component": name} for name in EVERYTHING - {"scales"}]), receive(c), return_exceptions=True
        )
        assert isinstance(outcomes[0], LocalProtocolError)
        assert isinstance(outcomes[1], TransferAborted)


async def test_a_prefix_hit_may_differ_by_component(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        fill(c)
        _, received = await asyncio.gather(send(c), receive(c, kv=(32, 40), indexer=(40, 40)))
        assert received.tokens == TOKENS | {"kv": (32, 40), "indexer": (40, 40)}
        assert {page for page, _ in c.decode.memory_of(0, 0)[0].written()} == {1}
        assert not c.decode.memory_of(0, 2)[0].written()


async def test_a_recurrent_state_needs_equal_attention_tp(tmp_path):
    async with cluster(tmp_path, MODEL, *sides(p_tp=2, d_tp=1)) as c:
        with pytest.raises(ConfigError) as caught:
            await send(c)
        assert caught.value.field == "component state"


@pytest.mark.parametrize(
    ("pages", "field"),
    [
        ({**SRC_PAGES, "kv": [5, 2]}, "pages['kv']"),
        ({**SRC_PAGES, "kv": [5, 5, 2]}, "pages['kv']"),
        ({**SRC_PAGES, "state": [32]}, "pages['state']"),
        ({name: SRC_PAGES[name] for name in EVERYTHING - {"scales"}}, "pages"),
        ({**SRC_PAGES, "window": [[4, 0], [11, 2]]}, "pages['window']"),
    ],
)
async def test_bad_pages_name_their_component(tmp_path, pages, field):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        with pytest.raises(ConfigError) as caught:
            c.prefill.agents[0].send("k", 0, pages, to=DECODE, tokens=TOKENS)
        assert caught.value.field == field


OPAQUE = Component("blocks", (0, 1, 2, 3), 2, 1, 96, "packed", opaque_page_tokens=16)
PACKED = ModelSpec((KV, OPAQUE), "a back-end of its own")


async def test_opaque_pages_move_whole_when_they_are_complete(tmp_path):
    """A page of 16 tokens whose interior nobody knows: 40 tokens are three pages, of which the last one is partial."""
    async with cluster(
        tmp_path,
        PACKED,
        Side("prefill", Role.PREFILL, Topology.with_layers(4, tp=2), page_sizes={"blocks": 1}),
        Side("decode", Role.DECODE, Topology.with_layers(4, tp=2), page_sizes={"blocks": 1}),
    ) as c:
        for memory in (*c.prefill.memory_of(0, 0), *c.prefill.memory_of(0, 1)):
            memory.fill(1, [5, 2, 9], 40 if memory.component == 0 else 3)
        receiving = asyncio.create_task(c.decode.agents[0].receive("k", 0, [1, 3, 4], source=PREFILL, tokens=(16, 40)))
        blocks = c.decode.memory_of(0, 1)[0]
        async with c.prefill.agents[0].send("k", 0, [5, 2, 9], to=DECODE, tokens=40) as out:
            await out.push((0, 20))
            await out.push((20, 35))  # completes page 1
            while not blocks.written():
                await asyncio.sleep(0)
            assert {page for page, _ in blocks.written()} == {3}
            await out.push((35, 40))
        received = await receiving
        assert received.tokens == {"kv": (16, 40), "blocks": (1, 3)}
        for memory in c.decode.memory_of(0, 1):
            memory.check(1, [1, 3, 4], 1, 3)
        for memory in c.decode.memory_of(0, 0):
            memory.check(1, [1, 3, 4], 16, 40)
        c.check_nothing_leaked()


async def test_opaque_pages_need_equal_geometry(tmp_path):
    async with cluster(
        tmp_path,
        PACKED,
        Side("prefill", Role.PREFILL, Topology.with_layers(4, tp=2), page_sizes={"blocks": 1}),
        Side("decode", Role.DECODE, Topology.with_layers(4, tp=4), page_sizes={"blocks": 1}),
    ) as c:
        with pytest.raises(ConfigError) as caught:
            async with c.prefill.agents[0].send("k", 0, [0], to=DECODE, tokens=1) as out:
                await out.push()
        assert caught.value.field == "component blocks"
