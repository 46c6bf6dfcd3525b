"""Every mistake that a caller of the public API can make: a typed error that names the field, and nothing is harmed.

The same table, for people, is in docs/errors.md.
"""

import asyncio
import socket
from dataclasses import replace

import numpy as np
import pytest
from rig import Side, cluster

from rdma_kv.agent import Agent
from rdma_kv.config import GpuConfig, Limits, StagingConfig, Timeouts
from rdma_kv.datalinks import check_regions
from rdma_kv.errors import (
    ClosedError,
    ConfigError,
    IncompatiblePeerError,
    LocalProtocolError,
    RdmaKvError,
    RemoteProtocolError,
)
from rdma_kv.layout import KvLayout
from rdma_kv.messages import Regions
from rdma_kv.registry.static import StaticRegistry, parse_registry
from rdma_kv.session import AgentConfig
from rdma_kv.topology import ModelSpec, Topology
from rdma_kv.transport.loopback import LoopbackNetwork, LoopbackTransport
from rdma_kv.types import ReplicaId, Role

both_faces = pytest.mark.usefixtures("face")

MODEL = ModelSpec.gqa(layers=2, kv_heads=2, head_dim=8, itemsize=4, dtype="float32", fingerprint="toy")
DECODE, PREFILL = ReplicaId("decode", 0), ReplicaId("prefill", 0)
GOOD = {"key": "k", "replica": 0, "pages": [0, 1, 2], "to": DECODE, "tokens": 40}


def sides():
    return [Side(r.value, r, Topology.with_layers(2)) for r in (Role.PREFILL, Role.DECODE)]


def call(agent: Agent, **changes):
    given = GOOD | changes
    return agent.send(given.pop("key"), given.pop("replica"), given.pop("pages"), **given)


@both_faces
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"key": ""}, "key"),
        ({"key": 7}, "key"),
        ({"key": "half a pair \ud800"}, "key"),
        ({"key": "x" * 513}, "key"),
        ({"replica": 1}, "replica"),
        ({"replica": -1}, "replica"),
        ({"pages": [0, 1]}, "pages['kv']"),
        ({"pages": [0, 1, 32]}, "pages['kv']"),
        ({"pages": [0, 1, -1]}, "pages['kv']"),
        ({"pages": [0, 1, 1]}, "pages['kv']"),
        ({"pages": [0.5, 1, 2]}, "pages['kv']"),
        ({"pages": [[0, 1, 2]]}, "pages['kv']"),
        ({"pages": {"k": [0, 1, 2]}}, "pages"),
        ({"tokens": -1}, "tokens"),
        ({"tokens": (20, 10)}, "tokens"),
        ({"tokens": (0, 10, 20)}, "tokens"),
        ({"tokens": "all"}, "tokens"),
        ({"tokens": {"v": (0, 40)}}, "tokens"),
        ({"tokens": 1 << 40}, "tokens"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"attempt": -1}, "attempt"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"timeout_s": float("nan")}, "timeout_s"),
        ({"to": "decode/0"}, "to"),
        ({"replica": "0"}, "replica"),
        ({"to": ReplicaId("nobody", 0)}, "engine"),
        ({"to": ReplicaId("prefill", 0)}, "engine"),
        ({"to": ReplicaId("decode", 1)}, "replica"),
    ],
    ids=str,
)
async def test_a_bad_argument_of_send_is_named(tmp_path, changes, field):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        with pytest.raises(ConfigError) as caught:  # by the call; what the sidecar's registry must tell, by the block
            await call(c.prefill.agents[0], **changes).__aenter__()
        assert caught.value.field == field
        await c.move(1, 0, 0, [0, 1, 2], [3, 4, 5], 40)
        c.check_nothing_leaked()


@both_faces
async def test_verbs_belong_to_roles(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        with pytest.raises(LocalProtocolError, match="send belongs to a prefill agent"):
            call(c.decode.agents[0], to=PREFILL)
        with pytest.raises(LocalProtocolError, match="receive belongs to a decode agent"):
            await c.prefill.agents[0].receive("k", 0, [0], source=DECODE, tokens=1)


class CudaEvent:
    """Works as a `torch.cuda.Event`, as far as an agent can tell."""

    def record(self) -> None: ...

    def wait(self) -> None: ...

    def query(self) -> bool:
        return False


@both_faces
async def test_a_cuda_event_needs_pools_on_a_gpu(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        with pytest.raises(ConfigError, match=r"set AgentConfig\.gpu") as caught:
            async with call(c.prefill.agents[0], to=DECODE) as out:
                await out.push(ready=CudaEvent())
        assert caught.value.field == "ready"
        for event, match in ((CudaEvent(), r"set AgentConfig\.gpu"), (asyncio.Event(), "is no CUDA event")):
            with pytest.raises(ConfigError, match=match) as caught:
                await c.decode.agents[0].receive("k2", 0, [0], source=PREFILL, tokens=1, after=event)
            assert caught.value.field == "after"
        await c.move(1, 0, 0, [0, 1, 2], [3, 4, 5], 40)
        c.check_nothing_leaked()


@both_faces
async def test_regions_on_a_gpu_are_refused_on_a_link_between_hosts(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        await c.move(1, 0, 0, [0, 1, 2], [3, 4, 5], 40)
        (peer,) = c.prefill.agents[0]._shell.links.peers
        address, slots, _ = peer.regions.segments[0]
        lying = Regions([(address, slots, 1)], peer.regions.slot_bytes, peer.regions.metadata)
        with pytest.raises(RemoteProtocolError, match="on a GPU"):
            check_regions(peer, lying)


@both_faces
@pytest.mark.parametrize(
    ("push", "error", "match"),
    [
        ({"tokens": (0, 41)}, ConfigError, "tokens"),
        ({"tokens": (5, 3)}, ConfigError, "tokens"),
        ({"layers": (3, 1)}, ConfigError, "layers"),
        ({"layers": (0, 9)}, ConfigError, "layers"),
        ({"component": "indexer"}, ConfigError, "component"),
    ],
)
async def test_a_bad_push_is_named(tmp_path, push, error, match):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        with pytest.raises(error, match=match):
            async with call(c.prefill.agents[0], timeout_s=2.0) as out:
                await out.push(**push)


@both_faces
async def test_pushes_in_the_wrong_place(tmp_path):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        sending = call(c.prefill.agents[0])
        with pytest.raises(LocalProtocolError, match="outside"):
            await sending.push()
        receiving = asyncio.create_task(c.decode.agents[0].receive("k", 0, [0, 1, 2], source=PREFILL, tokens=40))
        async with sending as out:
            await out.push((0, 20))
            with pytest.raises(LocalProtocolError, match="pushed before"):
                await out.push((10, 30))
            await out.push((20, 40))
        await receiving
        with pytest.raises(LocalProtocolError, match="outside"):
            await sending.push()
        with pytest.raises(LocalProtocolError, match="once"):
            async with sending:
                pass


@both_faces
@pytest.mark.parametrize(
    "metadata", [{"x": object()}, {"x": "y" * (600 << 10)}, {1: "number as name"}], ids=["object", "large", "name"]
)
async def test_metadata_that_cannot_be_sent(tmp_path, metadata):
    async with cluster(tmp_path, MODEL, *sides()) as c:
        receiving = asyncio.create_task(c.decode.agents[0].receive("k", 0, [0, 1, 2], source=PREFILL, tokens=40))
        with pytest.raises(ConfigError) as caught:
            async with call(c.prefill.agents[0]) as out:
                await out.push()
                out.metadata.update(metadata)
        assert caught.value.field == "metadata"
        with pytest.raises(RdmaKvError):
            await receiving


def config(**changes) -> AgentConfig:
    base = AgentConfig("prefill", Role.PREFILL, (0, 1), Topology.with_layers(2, tp=2), MODEL)
    return replace(base, **changes)


def agent(tmp_path, **changes) -> Agent:
    network = LoopbackNetwork()
    return Agent(
        config(**changes), StaticRegistry(tmp_path / "none"), transport=lambda n: LoopbackTransport(network, n)
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"ranks": ()}, "ranks"),
        ({"ranks": (0, 0)}, "ranks"),
        ({"ranks": (2,)}, "rank"),
        ({"listen": "nowhere"}, "listen"),
        ({"listen": "127.0.0.1:99999"}, "listen"),
        ({"listen": "10.0.0.1:7600"}, "listen"),
        ({"listen": "[::]:7600"}, "listen"),
        ({"engine": ""}, "engine"),
        ({"role": "mixed"}, "role"),
        ({"topology": Topology.with_layers(1)}, "layers_per_stage"),
        ({"topology": Topology.with_layers(2, tp=3)}, "kv_heads"),
    ],
    ids=str,
)
def test_a_bad_config_is_named(changes, field):
    with pytest.raises(ConfigError) as caught:
        config(**({"ranks": (0,)} | changes))
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: StagingConfig(slots=1), "staging.slots"),
        (lambda: StagingConfig(slot_bytes=100), "staging.slot_bytes"),
        (lambda: Timeouts(transfer=0), "timeouts.transfer"),
        (lambda: Limits(unmatched_per_peer=0), "limits.unmatched_per_peer"),
        (lambda: Topology(tp=4, dp=3), "dp"),
        (lambda: Topology(tp=0), "tp"),
        (lambda: Topology(pp=2, layers_per_stage=(1,)), "layers_per_stage"),
    ],
)
def test_bad_settings_are_named(make, field):
    with pytest.raises(ConfigError) as caught:
        make()
    assert caught.value.field == field


def layout(**changes) -> KvLayout:
    return KvLayout.nhd(**({"layers": 2, "pages": 4, "page_size": 16, "heads": 1, "row_bytes": 32} | changes))


def memory(shape: KvLayout) -> np.ndarray:
    return np.zeros(shape.required_bytes()[0], np.uint8)


@pytest.mark.parametrize(
    ("changes", "pool", "field"),
    [
        ({"layers": 3}, {}, "layout.num_layers"),
        ({"heads": 2}, {}, "layout.heads"),
        ({"row_bytes": 64}, {}, "layout.row_bytes"),
        ({"kv": 1}, {}, "layout.kv_factor"),
        ({}, {"rank": 2}, "rank"),
        ({}, {"replica": 1}, "rank"),
        ({}, {"component": "scales"}, "component"),
        ({}, {"memory": np.zeros(100, np.uint8)}, "memory[0]"),
        ({}, {"memory": [np.zeros(1 << 16, np.uint8)] * 2}, "memory"),
        ({}, {"memory": np.zeros((1 << 16, 2), np.uint8)[:, 0]}, "memory[0]"),
        ({}, {"memory": b"read-only" * 10000}, "memory[0]"),
        ({}, {"memory": 17}, "memory[0]"),
    ],
    ids=str,
)
async def test_a_pool_that_does_not_fit_is_named(tmp_path, changes, pool, field):
    async with agent(tmp_path) as a:
        shape = layout(**changes)
        given = {"memory": memory(shape), "replica": 0, "rank": 0} | pool
        with pytest.raises(ConfigError) as caught:
            a.register_pool(shape, given.pop("memory"), **given)
        assert caught.value.field == field


async def test_p42_pools_that_share_bytes_are_refused(tmp_path):
    """The same memory for two ranks, or ranges that overlap: one request would destroy another."""
    async with agent(tmp_path) as a:
        shape = layout()
        block = np.zeros(2 * shape.required_bytes()[0], np.uint8)
        first = block[: shape.required_bytes()[0]]
        a.register_pool(shape, first, replica=0, rank=0)
        with pytest.raises(ConfigError) as again:
            a.register_pool(shape, memory(shape), replica=0, rank=0)
        assert again.value.field == "rank"
        for overlapping in (first, block[64 : 64 + first.nbytes], block[first.nbytes - 1 : 2 * first.nbytes - 1]):
            with pytest.raises(ConfigError, match="overlaps"):
                a.register_pool(shape, overlapping, replica=0, rank=1)
        a.register_pool(shape, block[first.nbytes :], replica=0, rank=1)


async def test_other_ranks_have_the_same_page_size(tmp_path):
    async with agent(tmp_path) as a:
        a.register_pool(layout(), memory(layout()), replica=0, rank=0)
        with pytest.raises(ConfigError) as caught:
            a.register_pool(layout(page_size=32), memory(layout(page_size=32)), replica=0, rank=1)
        assert caught.value.field == "layout.page_size"


async def test_a_transfer_before_all_pools_are_there(tmp_path):
    async with agent(tmp_path) as a:
        with pytest.raises(ConfigError) as caught:
            call(a)
        assert caught.value.field == "register_pool"


async def test_the_agent_is_not_open(tmp_path):
    a = agent(tmp_path)
    for _ in range(2):
        with pytest.raises(ClosedError):
            call(a)
        with pytest.raises(ClosedError):
            a.register_pool(layout(), memory(layout()), replica=0, rank=0)
        await a.close()
    with pytest.raises(LocalProtocolError, match="once"):
        await a.start()


@both_faces
async def test_a_slot_too_small_for_one_token_of_one_layer(tmp_path):
    model = ModelSpec.gqa(layers=2, kv_heads=8, head_dim=128, itemsize=4, fingerprint="wide rows")
    staging = StagingConfig(slots=2, slot_bytes=4096)
    async with cluster(tmp_path, model, *sides(), staging=staging) as c:
        with pytest.raises(ConfigError) as caught:
            async with call(c.prefill.agents[0], timeout_s=5) as out:
                await out.push()
        assert caught.value.field == "staging.slot_bytes"


async def test_r18_the_address_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        host, port = taken.getsockname()
        with pytest.raises(ConfigError) as caught:
            async with agent(tmp_path, listen=f"{host}:{port}"):
                pass
    assert caught.value.field == "listen"


@both_faces
async def test_r18_two_processes_claim_one_rank(tmp_path):
    """The second incarnation of an identity is refused by a peer that knows the first and has a live link to it."""
    async with cluster(tmp_path, MODEL, *sides()) as c:
        await c.move(1, 0, 0, [0, 1, 2], [3, 4, 5], 40)
        twin_config = c.prefill.agents[0].config
        async with Agent(twin_config, c.registry, transport=lambda n: LoopbackTransport(c.network, n)) as twin:
            pool = c.prefill.memory[0, 0]
            twin.register_pool(pool.layout, pool.array.copy(), replica=0, rank=0)
            with pytest.raises(IncompatiblePeerError) as caught:
                async with call(twin, timeout_s=5) as out:
                    await out.push()
            assert caught.value.field == "identity"
        await c.move(2, 0, 0, [0, 1, 2], [3, 4, 5], 40)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost", "[::1]", "[::]"])
def test_r17_addresses_that_mean_nothing_to_a_remote_peer_are_refused(host):
    text = f"""
        cluster = "c"
        [[engine]]
        name = "prefill"
        role = "prefill"
        topology = {{ layers_per_stage = [2] }}
        agent = [{{ address = "{host}:7600", ranks = [0] }}]
        [[engine]]
        name = "decode"
        role = "decode"
        topology = {{ layers_per_stage = [2] }}
        agent = [{{ address = "10.0.0.2:7600", ranks = [0] }}]
    """
    with pytest.raises(ConfigError) as caught:
        parse_registry(text.encode())
    assert caught.value.field == "agent.address"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"device": -1}, "gpu.device"),
        ({"programs": 0}, "gpu.programs"),
        ({"direct": ("tcp",)}, "gpu.direct"),
    ],
)
def test_a_bad_gpu_setting_is_named(changes, field):
    with pytest.raises(ConfigError) as caught:
        GpuConfig(**({"device": 0} | changes))
    assert caught.value.field == field
