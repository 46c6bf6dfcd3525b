"""Every way the ranks, heads and pages of both sides may differ, through whole agents over loopback."""

import asyncio
import itertools

import pytest
from rig import Side, cluster

from rdma_kv.errors import IncompatiblePeerError
from rdma_kv.topology import ModelSpec, TieBreak, Topology
from rdma_kv.types import ReplicaId, Role

pytestmark = pytest.mark.usefixtures("face")

LAYERS = 4


def gqa(kv_heads: int = 4, head_dim: int = 8, fingerprint: str = "toy") -> ModelSpec:
    return ModelSpec.gqa(
        layers=LAYERS, kv_heads=kv_heads, head_dim=head_dim, itemsize=4, dtype="float32", fingerprint=fingerprint
    )


MLA = ModelSpec.mla(layers=LAYERS, latent_dim=9, itemsize=2, fingerprint="toy")


def engine(role: Role, tp: int = 1, dp: int = 1, **kwargs) -> Side:
    pp, stages = kwargs.pop("pp", 1), kwargs.pop("stages", None)
    topology = (
        Topology(tp=tp, dp=dp, pp=len(stages), layers_per_stage=stages)
        if stages
        else Topology.with_layers(LAYERS, tp=tp, dp=dp, pp=pp)
    )
    return Side(role.value, role, topology, **kwargs)


def prefill(*args, **kwargs) -> Side:
    return engine(Role.PREFILL, *args, **kwargs)


def decode(*args, **kwargs) -> Side:
    return engine(Role.DECODE, *args, **kwargs)


async def move_all_pairs(c, tokens: int = 37) -> None:
    """One request between every pair of replicas, each with pages of its own."""
    pages_a, pages_b = [7, 3, 9, 1, 12], [2, 8, 5, 11, 0]
    pairs = itertools.product(range(c.prefill.topology.dp), range(c.decode.topology.dp))
    for request, (p, d) in enumerate(pairs):
        await c.move(request, p, d, pages_a, pages_b, tokens)
    c.check_nothing_leaked()


@pytest.mark.parametrize(("p_dp", "d_dp"), [*itertools.product((1, 2, 4), (1, 2, 4))])
async def test_r01_any_dp_on_either_side(tmp_path, p_dp, d_dp):
    async with cluster(tmp_path, gqa(), prefill(4, p_dp), decode(4, d_dp)) as c:
        await move_all_pairs(c)


@pytest.mark.parametrize("agents_by", ["replica", "engine", "rank"])
async def test_r02_heads_of_dp2_attention_tp2(tmp_path, agents_by):
    sides = prefill(4, 2, agents_by=agents_by), decode(4, 2, agents_by=agents_by, kind="hnd")
    async with cluster(tmp_path, gqa(4), *sides) as c:
        await move_all_pairs(c)


async def test_r03_mla_tep4_to_dep8_spreads_over_sources(tmp_path):
    async with cluster(tmp_path, MLA, prefill(4, 1, agents_by="rank"), decode(8, 8)) as c:
        for replica in range(8):
            await c.move(replica, 0, replica, [5, 2, 9], [1, 8, 4], 40)
        assert [agent.stats()["gather_launches"] for agent in c.prefill.agents] == [2, 2, 2, 2]
        c.check_nothing_leaked()


@pytest.mark.parametrize(("kinds", "tps"), [*itertools.product([("nhd", "hnd"), ("hnd", "nhd")], [(4, 2), (2, 4)])])
async def test_r06_tp4_to_tp2_and_back(tmp_path, kinds, tps):
    sides = prefill(tps[0], kind=kinds[0]), decode(tps[1], kind=kinds[1])
    async with cluster(tmp_path, gqa(8), *sides) as c:
        await move_all_pairs(c)


@pytest.mark.parametrize("agents_by", ["replica", "rank"])
async def test_r07_uneven_stages(tmp_path, agents_by):
    sides = prefill(1, stages=(1, 1, 2), agents_by=agents_by), decode(2, stages=(3, 1), agents_by=agents_by)
    async with cluster(tmp_path, gqa(), *sides) as c:
        await move_all_pairs(c)


async def test_r09_fewer_heads_than_ranks(tmp_path):
    async with cluster(tmp_path, gqa(2), prefill(8, agents_by="rank"), decode(4)) as c:
        await move_all_pairs(c)
        senders = [bool(agent.stats()["gather_launches"]) for agent in c.prefill.agents]
        assert senders == [True, False] * 4


async def test_r10_one_rank_feeds_replicated_heads(tmp_path):
    async with cluster(tmp_path, gqa(4), prefill(1), decode(8)) as c:
        await move_all_pairs(c)
        assert [memory.heads[0] for memory in c.decode.memory_of(0)] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(("heads", "p_tp", "d_tp"), [(1, 4, 2), (2, 2, 8), (8, 8, 1), (8, 1, 4), (4, 8, 8), (1, 1, 8)])
async def test_r13_tp_matrix(tmp_path, heads, p_tp, d_tp):
    """A sample end to end; the whole matrix is proven on the plan in the unit tests."""
    async with cluster(tmp_path, gqa(heads), prefill(p_tp), decode(d_tp)) as c:
        await move_all_pairs(c)


@pytest.mark.parametrize(("heads", "p", "d"), [(4, (8, 2), (4, 2)), (2, (8, 2), (8, 1)), (8, (4, 4), (8, 2))])
async def test_r13_with_attention_dp(tmp_path, heads, p, d):
    async with cluster(tmp_path, gqa(heads), prefill(*p), decode(*d)) as c:
        await move_all_pairs(c)


async def refused(c, field: str) -> None:
    """Both calls fail fast, and both sides name the field."""

    async def send() -> None:
        to = ReplicaId("decode", 0)
        async with c.prefill.agents[0].send("k", 0, [0, 1, 2, 3], to=to, tokens=10, timeout_s=10) as out:
            await out.push()

    async def receive() -> None:
        source = ReplicaId("prefill", 0)
        await c.decode.agents[0].receive("k", 0, [0, 1, 2, 3], source=source, tokens=10, timeout_s=10)

    async with asyncio.timeout(1.0):
        outcomes = await asyncio.gather(send(), receive(), return_exceptions=True)
    for outcome in outcomes:
        assert isinstance(outcome, IncompatiblePeerError), outcome
        assert outcome.field == field
    c.check_nothing_leaked()


async def test_r05_only_the_peers_head_dim_differs(tmp_path):
    sides = prefill(), decode(model=gqa(head_dim=16))
    async with cluster(tmp_path, gqa(), *sides) as c:
        await refused(c, "kv.row_bytes")


async def test_other_weights_or_rope_are_refused(tmp_path):
    sides = prefill(), decode(model=gqa(fingerprint="other rope"))
    async with cluster(tmp_path, gqa(), *sides) as c:
        await refused(c, "fingerprint")


async def test_r13_tp3_to_tp2_is_refused_before_anything_is_sent(tmp_path):
    """The caller hears it from the route, without waiting for the peer."""
    async with cluster(tmp_path, gqa(6), prefill(3), decode(2)) as c:
        async with asyncio.timeout(1.0):
            with pytest.raises(Exception, match="attention TP") as sent:
                async with c.prefill.agents[0].send("k", 0, [0], to=ReplicaId("decode", 0), tokens=1) as out:
                    await out.push()
            with pytest.raises(Exception, match="attention TP") as received:
                await c.decode.agents[0].receive("k", 0, [0], source=ReplicaId("prefill", 0), tokens=1)
        assert sent.value.field == received.value.field == "tp"


async def test_r04_ranks_with_nothing_to_send_open_no_data_endpoint(tmp_path):
    """MLA without DP on the prefill side: one of four sends to each decode replica; the others return early."""
    async with cluster(tmp_path, MLA, prefill(4, 1, agents_by="rank"), decode(2, 2)) as c:
        await c.move(0, 0, 1, [5, 2, 9], [1, 8, 4], 40)
        lanes = [agent.stats()["lanes"] for agent in c.prefill.agents]
        assert lanes == [[], ["loopback"], [], []]
        endpoints = {name for name in c.network._endpoints if "prefill" in name.split(" ")[0]}
        assert all("prefill/1#" in name for name in endpoints), endpoints
        c.check_nothing_leaked()


async def test_r16_replicas_on_one_host_answer_as_themselves(tmp_path):
    async with cluster(tmp_path, gqa(), prefill(4, 4), decode(4, 4)) as c:
        everyone = [*c.prefill.agents, *c.decode.agents]
        assert len({agent.address for agent in everyone}) == len({agent.name for agent in everyone}) == 8
        await c.move(0, 3, 1, [5, 2, 9], [1, 8, 4], 40)
        (peer,) = c.prefill.agents[3]._shell.links.peers
        assert {owned.replica for owned in peer.identity.owns} == {1}


async def test_r16_the_wrong_agent_at_an_address_is_refused(tmp_path):
    async with cluster(tmp_path, gqa(), prefill(), decode(2, 2)) as c:
        text = c.registry_path.read_text()
        one, two = (f"{agent.address[0]}:{agent.address[1]}" for agent in c.decode.agents)
        c.registry_path.write_text(text.replace(one, "X").replace(two, one).replace("X", two))
        with pytest.raises(IncompatiblePeerError) as caught:
            async with c.prefill.agents[0].send("k", 0, [0], to=ReplicaId("decode", 0), tokens=1) as out:
                await out.push()
        assert caught.value.field == "identity"


async def test_r27_each_request_lands_in_its_replica(tmp_path):
    """Request ids 0..9 on dp=2; an explicit replica beats any rule over the id."""
    async with cluster(tmp_path, gqa(), prefill(2, 2), decode(2, 2)) as c:
        for request in range(10):
            replica = 0 if request in {3, 5} else request % 2  # explicit for two odd ones
            await c.move(request, request % 2, replica, [request], [request], 10)
        for replica in range(2):
            (memory,) = c.decode.memory_of(replica)
            mine = {r for r in range(10) if (0 if r in {3, 5} else r % 2) == replica}
            assert memory.written() == {(page, token) for page in mine for token in range(10)}


@pytest.mark.parametrize(
    ("p_page", "d_page", "tokens"), [(16, 32, 41), (64, 16, 100), (1, 16, 19), (16, 1, 19), (16, 16, 16)]
)
async def test_r60_page_sizes_differ_and_the_last_page_is_partial(tmp_path, p_page, d_page, tokens):
    sides = prefill(2, page_size=p_page, pages=128), decode(2, page_size=d_page, pages=128, kind="hnd")
    async with cluster(tmp_path, gqa(), *sides) as c:
        src = [(7 * n + 3) % 128 for n in range(-(-tokens // p_page))]
        dst = [(11 * n + 5) % 128 for n in range(-(-tokens // d_page))]
        await c.move(1, 0, 0, src, dst, tokens)
        used = {(dst[t // d_page], t % d_page) for t in range(tokens)}
        assert all(memory.written() == used for memory in c.decode.memory_of(0))


async def test_tie_break_by_key_spreads_small_decode_engines(tmp_path):
    sides = prefill(4, 1, agents_by="rank", tie_break=TieBreak.KEY), decode(1)
    async with cluster(tmp_path, MLA, *sides) as c:
        for request in range(12):
            await c.move(request, 0, 0, [request], [request], 10)
        launches = [agent.stats()["gather_launches"] for agent in c.prefill.agents]
        assert sum(launches) == 12
        assert sum(1 for n in launches if n) >= 3
