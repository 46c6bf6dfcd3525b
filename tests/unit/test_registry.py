"""The registry file: what it says, what it refuses, and when it is read."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_rig import seeded

from rdma_kv.errors import ConfigError
from rdma_kv.registry.static import (
    AgentRecord,
    EngineRecord,
    StaticRegistry,
    dump_registry,
    parse_address,
    parse_registry,
)
from rdma_kv.topology import ContextSplit, TieBreak, Topology
from rdma_kv.types import AgentId, ReplicaId, Role

GOOD = """
cluster = "demo"

[[engine]]
name = "p"
role = "prefill"
tie_break = "key"
topology = { tp = 4, dp = 2, layers_per_stage = [3] }

[[engine.agent]]
address = "10.0.0.1:7600"
ranks = [2, 0]

[[engine.agent]]
address = "[fe80::1]:7600"
ranks = [1, 3]

[[engine]]
name = "d"
role = "decode"
topology = { pp = 2, cp = 2, layers_per_stage = [1, 2], cp_split = "interleaved:4" }

[[engine.agent]]
address = "host-7:7601"
ranks = [0, 1, 2, 3]
"""


def parse(*swaps: tuple[str, str]) -> dict[str, EngineRecord]:
    """The engines of `GOOD` with some texts replaced by others; each must be there."""
    text = GOOD
    for old, new in swaps:
        assert old in text
        text = text.replace(old, new, 1)
    return parse_registry(text.encode())


def refused(*swaps: tuple[str, str]) -> ConfigError:
    with pytest.raises(ConfigError) as error:
        parse(*swaps)
    return error.value


# --- what it says ------------------------------------------------------------------------------------------------------


def test_a_file_says_who_is_where():
    engines = parse()
    assert list(engines) == ["p", "d"]
    prefill, decode = engines.values()
    assert prefill.topology == Topology(tp=4, dp=2, layers_per_stage=(3,))
    assert prefill.tie_break is TieBreak.KEY
    assert prefill.agents == (
        AgentRecord(AgentId("demo", "p", Role.PREFILL, 0), "10.0.0.1", 7600, (0, 2)),
        AgentRecord(AgentId("demo", "p", Role.PREFILL, 1), "fe80::1", 7600, (1, 3)),
    )
    assert decode.tie_break is TieBreak.REPLICA
    assert decode.topology.cp_split == ContextSplit(4)


def test_the_agents_of_a_replica_are_those_that_own_its_ranks():
    engine = parse()["p"]  # replica 0 is ranks 0 and 1, replica 1 ranks 2 and 3
    assert [agent.id.rank for agent in engine.agents_of(0)] == [0, 1]
    alone = replace(engine, agents=(replace(engine.agents[0], ranks=(0, 1)), replace(engine.agents[1], ranks=(2, 3))))
    assert [agent.id.rank for agent in alone.agents_of(1)] == [1]
    with pytest.raises(ConfigError) as error:
        engine.agents_of(2)
    assert error.value.field == "replica"


def test_what_is_dumped_is_read_back():
    engines = parse()
    assert parse_registry(dump_registry("demo", list(engines.values()))) == engines


@st.composite
def clusters(draw: st.DrawFn) -> list[EngineRecord]:
    records = []
    names = draw(st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=3, unique=True))
    for number, name in enumerate(names):
        stages = draw(st.lists(st.integers(1, 3), min_size=1, max_size=2))
        dp = draw(st.integers(1, 2))
        tp = dp * draw(st.integers(1, 2))
        split = ContextSplit(draw(st.integers(0, 2)))
        topology = Topology(tp, len(stages), draw(st.integers(1, 2)), dp, tuple(stages), split)
        ranks = draw(st.permutations(range(topology.num_ranks)))
        cut = draw(st.integers(1, len(ranks)))
        role = draw(st.sampled_from(Role))
        agents = tuple(
            AgentRecord(
                AgentId("c", name, role, min(part)), draw(st.sampled_from(["h", "fe80::7", "10.0.0.1"])), port, part
            )
            for port, part in ((number * 2, tuple(sorted(ranks[:cut]))), (number * 2 + 1, tuple(sorted(ranks[cut:]))))
            if part
        )
        records.append(EngineRecord(name, role, topology, draw(st.sampled_from(TieBreak)), agents))
    return records


@seeded
@given(clusters())
def test_any_cluster_survives_the_file(records: list[EngineRecord]):
    assert parse_registry(dump_registry("c", records)) == {record.name: record for record in records}


def test_r23_names_that_run_together_stay_apart():
    """("a1", 0) and ("a", 10) differ as keys and as text; so do 10.0.0.1:15000 and 10.0.0.11:5000."""
    one, other = AgentId("c", "a1", Role.DECODE, 0), AgentId("c", "a", Role.DECODE, 10)
    assert one != other
    assert str(one) != str(other)
    assert len({one, other, AgentId("c", "a1", Role.PREFILL, 0)}) == 3
    assert len({str(ReplicaId("a1", 0)), str(ReplicaId("a", 10))}) == 2
    assert parse_address("10.0.0.1:15000") != parse_address("10.0.0.11:5000")
    text = """
        cluster = "c"
        [[engine]]
        name = "a"
        role = "prefill"
        topology = { tp = 11, layers_per_stage = [1] }
        [[engine.agent]]
        address = "10.0.0.1:15000"
        ranks = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        [[engine.agent]]
        address = "10.0.0.11:5000"
        ranks = [10]
        [[engine]]
        name = "a1"
        role = "prefill"
        topology = { tp = 1, layers_per_stage = [1] }
        [[engine.agent]]
        address = "10.0.0.1:5000"
        ranks = [0]
    """
    agents = [agent for engine in parse_registry(text.encode()).values() for agent in engine.agents]
    assert len({agent.id for agent in agents}) == len({str(agent.id) for agent in agents}) == 3


# --- what it refuses ---------------------------------------------------------------------------------------------------


def test_r18_two_agents_claim_one_rank():
    error = refused(("ranks = [1, 3]", "ranks = [1, 3, 0]"))
    assert error.field == "registry"
    assert "rank 0 is claimed by 10.0.0.1:7600 and [fe80::1]:7600" in str(error)


def test_r18_one_agent_claims_a_rank_twice():
    assert "rank 2" in str(refused(("ranks = [2, 0]", "ranks = [2, 0, 2]")))


def test_r18_an_engine_is_listed_twice():
    """Two deployments with one name: neither is taken."""
    assert "'p' is listed twice" in str(refused(('name = "d"', 'name = "p"')))


@pytest.mark.parametrize("address", ["10.0.0.1:7600", "10.0.0.1:07600"])
def test_r18_two_agents_at_one_address(address: str):
    """Also across engines: two processes of one host cannot both be there."""
    assert "claim the address 10.0.0.1:7600" in str(refused(("host-7:7601", address)))
    assert "claim the address" in str(refused(("[fe80::1]:7600", address)))


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "[0:0::0]", "*"])
def test_r17_no_host_at_all_is_refused(host: str):
    error = refused(("host-7:7601", f"{host}:7601"))
    assert error.field == "agent.address"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "[::1]", "localhost", "LOCALHOST"])
def test_r17_loopback_is_refused_beside_other_hosts_and_fine_alone(host: str):
    assert refused(("host-7:7601", f"{host}:7601")).field == "agent.address"
    alone = parse(("10.0.0.1:7600", f"{host}:1"), ("[fe80::1]:7600", f"{host}:2"), ("host-7:7601", f"{host}:3"))
    assert len(alone) == 2


def test_a_rank_that_nobody_owns():
    assert "no agent owns rank 3" in str(refused(("ranks = [1, 3]", "ranks = [1]")))


def test_a_rank_that_the_topology_does_not_have():
    assert refused(("ranks = [1, 3]", "ranks = [1, 3, 4]")).field == "rank"
    assert refused(("ranks = [1, 3]", "ranks = [1, -3]")).field == "rank"


@pytest.mark.parametrize(
    ("swap", "field"),
    [
        (("tp = 4, dp = 2", "tp = 3, dp = 2"), "dp"),
        (("tp = 4, dp = 2", "tp = 0"), "tp"),
        (("layers_per_stage = [3]", "layers_per_stage = [3, 3]"), "layers_per_stage"),
        (("interleaved:4", "zigzag"), "cp_split"),
        (("10.0.0.1:7600", "10.0.0.1"), "address"),
        (('role = "decode"', 'role = "both"'), "registry"),
        (('tie_break = "key"', 'tie_break = "random"'), "registry"),
        (("ranks = [2, 0]", "ranks = []"), "registry"),
        (("ranks = [2, 0]", 'ranks = ["0", "2"]'), "registry"),
        (("ranks = [2, 0]", "ranks = [2, 0]\nport = 3"), "registry"),
        (('role = "decode"', 'role = "decode"\nshards = 2'), "registry"),
        (("tp = 4, dp = 2", "tp = 4, dp = 2, ep = 4"), "registry"),
        (('cluster = "demo"', 'cluster = "demo"\nversion = 2'), "registry"),
        (('cluster = "demo"', 'cluster = ""'), "registry"),
        (('cluster = "demo"', ""), "registry"),
        (('name = "d"', 'name = ""'), "registry"),
        (('name = "d"', 'name = "d'), "registry"),
    ],
)
def test_other_contradictions_are_refused_by_name(swap: tuple[str, str], field: str):
    assert refused(swap).field == field


@pytest.mark.parametrize(
    "text",
    [b"", b'cluster = "c"', b'cluster = "c"\nengine = []', b"\xff\xfe", b"\x00", b"x=" + b"[" * 10_000],
    ids=repr,
)
def test_what_is_no_registry_is_refused(text: bytes):
    with pytest.raises(ConfigError) as error:
        parse_registry(text)
    assert error.value.field == "registry"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:7600", ("10.0.0.1", 7600)),
        ("host-7.local:0", ("host-7.local", 0)),
        ("[::1]:65535", ("::1", 65535)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]):
    assert parse_address(text) == address


BAD_HOSTS = ["fe80::1", "::1:80", "[::1]", "[::1:80", "::1]:80", "[]:80", "[[::1]]:80", "ho st:80", "host:80:80", ":80"]
BAD_PORTS = ["", ":", ":-1", ":+1", ":65536", ":8 0", ":0x50", ":80\n", ":²", ":١٢", ":" + "9" * 5000]


@pytest.mark.parametrize("text", ["", *BAD_HOSTS, *(f"host{port}" for port in BAD_PORTS)], ids=lambda text: text[:12])
def test_what_is_no_address_is_refused(text: str):
    """An IPv6 host without brackets could be read in two ways, so it is none; nor are digits that only look like some."""
    with pytest.raises(ConfigError) as error:
        parse_address(text)
    assert error.value.field == "address"


# --- when it is read ---------------------------------------------------------------------------------------------------


def test_the_file_may_come_later_and_is_read_again_when_it_changes(tmp_path: Path):
    path = tmp_path / "registry.toml"
    registry = StaticRegistry(path)
    with pytest.raises(ConfigError) as error:
        registry.engine("p")
    assert error.value.field == "registry"
    path.write_text(GOOD)
    assert registry.engine("p").name == "p"
    assert [agent.id.rank for agent in registry.agents_of(ReplicaId("p", 0))] == [0, 1]
    with pytest.raises(ConfigError, match=r"'q' is not in registry.toml; it lists \['d', 'p'\]"):
        registry.engine("q")
    path.write_text(GOOD.replace('name = "p"', 'name = "other"'))
    assert registry.engine("other").name == "other"
    with pytest.raises(ConfigError):
        registry.engine("p")


def test_a_file_that_was_replaced_is_seen_though_size_and_time_are_the_same(tmp_path: Path):
    path, new = tmp_path / "registry.toml", tmp_path / "new"
    path.write_text(GOOD)
    registry = StaticRegistry(path)
    registry.engine("p")
    new.write_text(GOOD.replace('name = "p"', 'name = "q"'))
    stat = path.stat()
    os.utime(new, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    new.replace(path)
    assert registry.engine("q").name == "q"


def test_an_unchanged_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "registry.toml"
    path.write_text(GOOD)
    registry = StaticRegistry(path)
    first = registry.engine("p")
    monkeypatch.setattr(Path, "read_bytes", lambda self: pytest.fail(f"read {self} again"))
    assert registry.engine("p") is first


def test_a_broken_file_is_an_error_until_it_is_mended(tmp_path: Path):
    path = tmp_path / "registry.toml"
    registry = StaticRegistry(path)
    for text in (GOOD, GOOD[: len(GOOD) // 2] + "[", GOOD):
        path.write_text(text)
        if text == GOOD:
            assert registry.engine("d").name == "d"
        else:
            for _ in range(2):
                with pytest.raises(ConfigError):
                    registry.engine("d")
    path.unlink()
    with pytest.raises(ConfigError, match="cannot read"):
        registry.engine("d")
