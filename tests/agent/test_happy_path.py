"""Requests through whole agents: from prefill pools, over slots, into decode pools."""

import pytest
from rig import Side, cluster

from rdma_kv.topology import ModelSpec, Topology
from rdma_kv.types import Role

pytestmark = pytest.mark.usefixtures("face")

MODEL = ModelSpec.gqa(layers=4, kv_heads=4, head_dim=8, itemsize=4, dtype="float32", fingerprint="toy")


def side(role, tp, dp, **kwargs):
    return Side(role.value, role, Topology.with_layers(4, tp=tp, dp=dp), **kwargs)


async def test_one_request(tmp_path):
    async with cluster(tmp_path, MODEL, side(Role.PREFILL, 1, 1), side(Role.DECODE, 1, 1)) as c:
        (received,) = await c.move(1, 0, 0, [5, 2, 9], [1, 8, 4], 40)
        assert received.metadata == {"request": 1}
        assert received.tokens == {"kv": (0, 40)}
        assert received.received_bytes == 4 * 2 * 40 * 4 * 32
        c.check_nothing_leaked()


async def test_demo_defaults(tmp_path):
    prefill = side(Role.PREFILL, 2, 2, page_size=16)
    decode = side(Role.DECODE, 4, 2, page_size=32, kind="hnd")
    async with cluster(tmp_path, MODEL, prefill, decode) as c:
        for n in range(4):
            await c.move(n, n % 2, n // 2, [5, 2, 9], [1, 8], 41)
        c.check_nothing_leaked()
