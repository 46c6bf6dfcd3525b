"""Context parallelism on either side: contiguous pages or interleaved tokens, stated by each side."""

import pytest
from rig import Side, cluster

from rdma_kv.errors import RangeUnavailableError
from rdma_kv.topology import ContextSplit, ModelSpec, Topology
from rdma_kv.types import Role

pytestmark = pytest.mark.usefixtures("face")

GQA = ModelSpec.gqa(layers=2, kv_heads=4, head_dim=8, itemsize=4, dtype="float32", fingerprint="toy")
MLA = ModelSpec.mla(layers=2, latent_dim=10, fingerprint="toy")


def topology(tp=1, cp=1, split="contiguous", dp=1):
    return Topology.with_layers(2, tp=tp, cp=cp, dp=dp, cp_split=ContextSplit.parse(split))


@pytest.mark.parametrize("agents_by", ["replica", "rank"])
@pytest.mark.parametrize("model", [GQA, MLA], ids=["gqa", "mla"])
@pytest.mark.parametrize(
    ("p", "d"),
    [
        (topology(cp=2), topology()),
        (topology(), topology(cp=2)),
        (topology(tp=2, cp=3, split="interleaved:4"), topology(tp=4)),
        (topology(tp=2), topology(tp=1, cp=4, split="interleaved:1")),
        (topology(cp=2), topology(cp=2, split="interleaved:16")),
        (topology(cp=4), topology(tp=2, cp=2, dp=2)),
    ],
    ids=["2 to 1", "1 to 2", "interleaved 3 to 1", "1 to interleaved 4", "contiguous to interleaved", "4 to 2, dp 2"],
)
async def test_context_parallel(tmp_path, model, p, d, agents_by):
    prefill = Side("prefill", Role.PREFILL, p, agents_by=agents_by)
    decode = Side("decode", Role.DECODE, d, page_size=8, kind="hnd", agents_by=agents_by)
    async with cluster(tmp_path, model, prefill, decode) as c:
        for tokens in (1, 17, 71):  # also so few that some ranks keep none
            replica = d.dp - 1
            await c.move(tokens, 0, replica, [9, 4, 7, 2, 11], [5, 3, 8, 6, 1, 0, 2, 4, 10], tokens)
        c.check_nothing_leaked()


async def test_a_prefix_hit_under_context_parallelism(tmp_path):
    prefill = Side("prefill", Role.PREFILL, topology(cp=2))
    decode = Side("decode", Role.DECODE, topology(cp=2, split="interleaved:4"), page_size=8)
    async with cluster(tmp_path, GQA, prefill, decode) as c:
        await c.move(1, 0, 0, [9, 4, 7, 2, 11], [5, 3, 8, 6, 1], 71, start=33)
        c.check_nothing_leaked()


async def test_a_contiguous_split_is_over_the_whole_prompt(tmp_path):
    import asyncio

    from rdma_kv.types import ReplicaId

    sides = Side("prefill", Role.PREFILL, topology()), Side("decode", Role.DECODE, topology(cp=2))
    async with cluster(tmp_path, GQA, *sides) as c:

        async def send() -> None:
            async with c.prefill.agents[0].send("k", 0, [1, 2, 3], to=ReplicaId("decode", 0), tokens=40) as out:
                await out.push()

        receiving = c.decode.agents[0].receive("k", 0, [1, 2], source=ReplicaId("prefill", 0), tokens=30)
        outcomes = await asyncio.gather(send(), receiving, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [RangeUnavailableError] * 2
