"""Which transport a link uses, and when it is started: agents over the real ones, in one process."""

from __future__ import annotations

import asyncio
import os

import pytest
from rig import Cluster, Side, cluster

from rdma_kv.agent import Agent
from rdma_kv.config import Timeouts
from rdma_kv.errors import (
    ConfigError,
    ErrorCode,
    IncompatiblePeerError,
    LocalProtocolError,
    RdmaKvError,
    TransferAborted,
    TransportError,
)
from rdma_kv.registry.static import StaticRegistry
from rdma_kv.session import AgentConfig
from rdma_kv.topology import ModelSpec, Topology
from rdma_kv.transport.loopback import LoopbackNetwork, LoopbackTransport
from rdma_kv.transport.named import PREFERENCE, usable
from rdma_kv.transport.ucx_environment import prepare_ucx_environment
from rdma_kv.transport.ucx_library import SETTING
from rdma_kv.types import ReplicaId, Role

prepare_ucx_environment(os.environ)

MODEL = ModelSpec.gqa(layers=2, kv_heads=2, head_dim=8, itemsize=4, dtype="float32", fingerprint="toy")
PAGES, TOKENS = [0, 1, 2], 40

both = pytest.mark.skipif(
    not all(usable(backend, os.environ) for backend in PREFERENCE), reason="needs ucx and nixl, which are not both here"
)


def sides(prefill: str, decode: str) -> list[Side]:
    return [
        Side(role.value, role, Topology.with_layers(2), transports=(transport,))
        for role, transport in ((Role.PREFILL, prefill), (Role.DECODE, decode))
    ]


def started(agent: Agent) -> set[str]:
    return {name for name, state in agent.stats()["transports"].items() if state == "started"}


def chosen(agent: Agent) -> list[str]:
    return list(agent.stats()["link_transports"].values())


async def both_ends(c: Cluster, key: str, timeout_s: float = 20.0) -> list[BaseException | None]:
    """One request; what came of `send`, and of `receive`."""

    async def send() -> None:
        to = ReplicaId("decode", 0)
        async with c.prefill.agents[0].send(key, 0, PAGES, to=to, tokens=TOKENS, timeout_s=timeout_s) as out:
            await out.push()

    source = ReplicaId("prefill", 0)
    receive = c.decode.agents[0].receive(key, 0, PAGES, source=source, tokens=TOKENS, timeout_s=timeout_s)
    outcomes = await asyncio.gather(send(), receive, return_exceptions=True)
    return [outcome if isinstance(outcome, BaseException) else None for outcome in outcomes]


# --- the choice --------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    ("prefill", "decode", "expected"),
    [
        ("auto", "auto", PREFERENCE[0]),
        ("auto", "ucx", "ucx"),
        ("auto", "nixl", "nixl"),
        ("ucx", "auto", "ucx"),
        ("nixl", "auto", "nixl"),
    ],
)
async def test_the_link_uses_the_best_that_both_have_and_starts_no_other(tmp_path, prefill, decode, expected):
    async with cluster(tmp_path, MODEL, *sides(prefill, decode)) as c:
        agents = [*c.prefill.agents, *c.decode.agents]
        for agent, transport in zip(agents, (prefill, decode), strict=True):
            assert started(agent) == (set() if transport == "auto" else {transport})
        for request in range(3):
            await c.move(request, 0, 0, PAGES, [5, 3, 4], TOKENS)
        for agent in agents:
            assert started(agent) == {expected}
            assert chosen(agent) == [expected]
        assert c.prefill.agents[0].stats()["lanes"]
        c.check_nothing_leaked()


@both
async def test_auto_is_the_default(tmp_path):
    config = AgentConfig("p", Role.PREFILL, (0,), Topology.with_layers(2), MODEL)
    async with Agent(config, StaticRegistry(tmp_path / "none")) as agent:
        assert agent.stats()["transports"] == dict.fromkeys(PREFERENCE, "waiting")


@both
async def test_none_in_common_is_refused_on_both_sides_by_name(tmp_path):
    async with cluster(tmp_path, MODEL, *sides("ucx", "nixl"), timeouts=Timeouts(connect=5.0)) as c:
        for error in await both_ends(c, "k"):
            assert isinstance(error, IncompatiblePeerError)
            assert error.field == "transport"
            assert "prefill has 'ucx', decode has 'nixl'" in str(error)
        c.check_nothing_leaked()


@both
async def test_one_agent_serves_two_peers_over_two_transports_at_once(tmp_path):
    prefill = Side("prefill", Role.PREFILL, Topology.with_layers(2), transports=("auto",), pages=64)
    decode = Side("decode", Role.DECODE, Topology.with_layers(2, tp=2, dp=2), transports=("ucx", "nixl"), pages=64)
    async with cluster(tmp_path, MODEL, prefill, decode) as c:
        moves = []
        for request in range(8):
            pages = list(range(8 * request, 8 * request + 3))
            moves.append(c.move(request, 0, request % 2, pages, pages[::-1], TOKENS))
        await asyncio.gather(*moves)  # compares every byte
        (agent,) = c.prefill.agents
        assert started(agent) == {"ucx", "nixl"}
        assert sorted(chosen(agent)) == ["nixl", "ucx"]
        assert [started(other) for other in c.decode.agents] == [{"ucx"}, {"nixl"}]
        c.check_nothing_leaked()


# --- the start ---------------------------------------------------------------------------------------------------------


async def test_a_name_that_does_not_exist_is_refused(tmp_path):
    config = AgentConfig("p", Role.PREFILL, (0,), Topology.with_layers(2), MODEL)
    with pytest.raises(ConfigError) as caught:
        Agent(config, StaticRegistry(tmp_path / "none"), transport="pigeon")
    assert caught.value.field == "transport"


async def test_the_only_transport_fails_with_its_own_error_at_the_start(tmp_path):
    """Also what a maker made: its start is the agent's."""
    config = AgentConfig("p", Role.PREFILL, (0,), Topology.with_layers(2), MODEL)
    network = LoopbackNetwork()

    def taken(name: str) -> LoopbackTransport:
        network._join(name)
        return LoopbackTransport(network, name)

    agent = Agent(config, StaticRegistry(tmp_path / "none"), transport=taken)
    with pytest.raises(ConfigError):
        await agent.start()
    assert agent.stats()["transports"] == {"loopback": "failed"}
    await agent.close()
    with pytest.raises(LocalProtocolError):
        await agent.start()


@both
@pytest.mark.parametrize("broken", ["prefill", "decode"])
async def test_a_transport_that_cannot_start_fails_what_needs_it_and_is_tried_again(tmp_path, monkeypatch, broken):
    """The library that the user named is none: noticed when a link needs it, and typed on both sides."""
    prefill, decode = ("auto", "ucx") if broken == "prefill" else ("ucx", "auto")
    async with cluster(tmp_path, MODEL, *sides(prefill, decode)) as c:
        agent = (c.prefill if broken == "prefill" else c.decode).agents[0]
        with monkeypatch.context() as patch:
            patch.setenv(SETTING, "/dev/null")
            for attempt in ("a", "b"):
                async with asyncio.timeout(10):  # far below the transfer's own
                    sent, received = await both_ends(c, attempt, timeout_s=60.0)
                here, there = (sent, received) if broken == "prefill" else (received, sent)
                assert isinstance(here, RdmaKvError)
                assert SETTING in str(here)
                if broken == "prefill":
                    assert isinstance(here, TransportError)
                    assert (here.backend, here.status) == ("ucx", "not-posted")
                    cause = ErrorCode.TRANSPORT
                else:
                    assert isinstance(here, ConfigError)
                    assert here.field == SETTING
                    cause = ErrorCode.CONFIG
                assert isinstance(there, TransferAborted)
                assert there.cause is cause
                assert agent.stats()["transports"] == {"ucx": "failed", "nixl": "waiting"}
        await c.move(3, 0, 0, PAGES, PAGES, TOKENS)  # the same link; now it can start
        assert started(agent) == {"ucx"}
        assert agent.stats()["handshakes"] == 1
        c.check_nothing_leaked()
