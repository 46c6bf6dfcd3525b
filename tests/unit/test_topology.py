"""Rank order, head and layer intervals, and what a topology or a model refuses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulation import oracle_place, replica_grid
from strategies import topologies

from rdma_kv.errors import ConfigError
from rdma_kv.topology import MAX_KV_HEADS, MAX_LAYERS, MAX_RANKS, Component, ContextSplit, ModelSpec, Topology
from rdma_kv.types import Interval, Owned

seeded = settings(derandomize=True, deadline=None, database=None, max_examples=100)


def component(**changes: object) -> Component:
    facts = {"name": "kv", "layers": (0, 1, 2), "kv_heads": 4, "kv_factor": 2, "row_bytes": 8}
    return Component(**{**facts, **changes})


# --- ranks -------------------------------------------------------------------------------------------------------------


def test_rank_order_is_stage_then_context_then_tensor():
    topology = Topology(tp=2, pp=2, cp=3, layers_per_stage=(1, 1))
    places = [topology.place(rank) for rank in range(topology.num_ranks)]
    assert places == [(stage, context, tensor) for stage in range(2) for context in range(3) for tensor in range(2)]
    assert [topology.rank(*place) for place in places] == list(range(12))


@seeded
@given(st.integers(1, 4).flatmap(lambda attention_tp: topologies(4, attention_tp)))
def test_replicas_part_the_ranks(topology: Topology):
    replicas = [topology.replica_ranks(replica) for replica in range(topology.dp)]
    assert sorted(rank for ranks in replicas for rank in ranks) == list(range(topology.num_ranks))
    for replica, ranks in enumerate(replicas):
        assert list(ranks) == sorted(replica_grid(topology, replica).ravel())
        assert {topology.replica_of(rank) for rank in ranks} == {replica}
        assert {topology.attention_rank(rank) for rank in ranks} == set(range(topology.attention_tp))


def test_a_card_is_not_its_replica():
    """Attention DP 2 x attention TP 2: rank 2 is the first card of replica 1, rank 1 the second card of replica 0."""
    topology = Topology(tp=4, dp=2)
    assert [topology.replica_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert [topology.attention_rank(rank) for rank in range(4)] == [0, 1, 0, 1]
    assert topology.replica_ranks(1) == (2, 3)
    assert topology.owned([1, 2]) == (Owned(0, 1), Owned(1, 2))


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_is_refused(rank: int):
    with pytest.raises(ConfigError) as refused:
        Topology(tp=4).place(rank)
    assert refused.value.field == "rank"


@pytest.mark.parametrize("replica", [-1, 2])
def test_a_replica_outside_is_refused(replica: int):
    with pytest.raises(ConfigError) as refused:
        Topology(tp=4, dp=2).replica_ranks(replica)
    assert refused.value.field == "replica"


# --- layers ------------------------------------------------------------------------------------------------------------


def test_stages_are_prefix_sums():
    topology = Topology(pp=4, layers_per_stage=(3, 3, 2, 2))
    assert [topology.stage_layers(stage) for stage in range(4)] == [
        Interval(0, 3),
        Interval(3, 6),
        Interval(6, 8),
        Interval(8, 10),
    ]
    assert topology.num_layers == 10


def test_layers_spread_evenly_with_the_rest_first():
    assert Topology.with_layers(61, pp=4).layers_per_stage == (16, 15, 15, 15)


@seeded
@given(st.sets(st.integers(0, 12), min_size=1), st.integers(0, 12), st.integers(0, 12))
def test_layers_within_are_positions_in_the_component(layers: set[int], a: int, b: int):
    window = Interval(min(a, b), max(a, b))
    found = component(layers=tuple(sorted(layers))).layers_within(window)
    expected = [i for i, layer in enumerate(sorted(layers)) if window.start <= layer < window.end]
    assert list(range(found.start, found.end)) == expected


# --- heads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_heads_are_found_by_division(kv_heads: int, tp: int):
    part = component(kv_heads=kv_heads)
    topology = Topology(tp=tp, layers_per_stage=(3,))
    for rank in range(tp):
        heads = part.heads_of(rank, tp)
        expected = oracle_place(part, topology, (0, 0, rank), 1, 1).heads
        assert list(range(heads.start, heads.end)) == expected
    holders = sum(part.heads_of(rank, tp).contains(Interval(0, 1)) for rank in range(tp))
    assert part.holders_of_a_head(tp) == holders


def test_every_rank_holds_a_replicated_latent():
    part = component(kv_heads=1, kv_factor=1, replicated=True)
    assert [part.heads_of(rank, 4) for rank in range(4)] == [Interval(0, 1)] * 4
    assert part.holders_of_a_head(4) == 4


def test_r09_k2_on_tp8_has_two_heads():
    part = component(kv_heads=2)
    heads = [part.heads_of(rank, 8) for rank in range(8)]
    assert heads == [Interval(0, 1)] * 4 + [Interval(1, 2)] * 4
    assert len(set(heads)) == 2


def test_r10_k4_on_tp8_is_the_floor():
    part = component(kv_heads=4)
    assert [part.heads_of(rank, 8).start for rank in range(8)] == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize(("kv_heads", "attention_tp"), [(4, 3), (3, 2), (6, 4), (8, 12)])
def test_heads_that_do_not_divide_are_refused(kv_heads: int, attention_tp: int):
    with pytest.raises(ConfigError) as refused:
        component(kv_heads=kv_heads).heads_of(0, attention_tp)
    assert refused.value.field == "kv_heads"


# --- models ------------------------------------------------------------------------------------------------------------


def test_named_models():
    gqa = ModelSpec.gqa(layers=28, kv_heads=4, head_dim=128).component("kv")
    assert (gqa.kv_factor, gqa.row_bytes, gqa.token_layer_bytes) == (2, 256, 2048)
    mla = ModelSpec.mla(layers=61).component("kv")
    assert (mla.kv_factor, mla.row_bytes, mla.kv_heads, mla.replicated) == (1, 1152, 1, True)


# --- refusals ----------------------------------------------------------------------------------------------------------

BAD_TOPOLOGIES = [
    ({"tp": 0}, "tp"),
    ({"tp": -2}, "tp"),
    ({"tp": True}, "tp"),
    ({"tp": 2.0}, "tp"),
    ({"tp": "2"}, "tp"),
    ({"pp": 0}, "pp"),
    ({"cp": 0}, "cp"),
    ({"dp": 0}, "dp"),
    ({"tp": 4, "dp": 3}, "dp"),
    ({"tp": 2, "dp": 4}, "dp"),
    ({"tp": MAX_RANKS, "cp": 2}, "tp"),
    ({"pp": 2}, "layers_per_stage"),
    ({"layers_per_stage": ()}, "layers_per_stage"),
    ({"pp": 2, "layers_per_stage": (2, 0)}, "layers_per_stage"),
    ({"layers_per_stage": (MAX_LAYERS + 1,)}, "layers_per_stage"),
]


@pytest.mark.parametrize(("facts", "field"), BAD_TOPOLOGIES, ids=str)
def test_a_bad_topology_is_refused_by_field(facts: dict[str, object], field: str):
    with pytest.raises(ConfigError) as refused:
        Topology(**facts)
    assert refused.value.field == field
    assert str(refused.value).startswith(f"{field}: ")


@pytest.mark.parametrize(("layers", "pp"), [(3, 4), (3, 0), (0, 1)])
def test_more_stages_than_layers_are_refused(layers: int, pp: int):
    with pytest.raises(ConfigError) as refused:
        Topology.with_layers(layers, pp=pp)
    assert refused.value.field == "pp"


BAD_COMPONENTS = [
    ({"layers": ()}, "layers"),
    ({"layers": (1, 0)}, "layers"),
    ({"layers": (0, 0)}, "layers"),
    ({"layers": (-1, 0)}, "layers"),
    ({"kv_heads": 0}, "kv_heads"),
    ({"kv_heads": MAX_KV_HEADS + 1}, "kv_heads"),
    ({"kv_factor": 0}, "kv_factor"),
    ({"row_bytes": 0}, "row_bytes"),
    ({"kv_heads": 2, "replicated": True}, "kv_heads"),
]


@pytest.mark.parametrize(("facts", "field"), BAD_COMPONENTS, ids=str)
def test_a_bad_component_is_refused_by_field(facts: dict[str, object], field: str):
    with pytest.raises(ConfigError) as refused:
        component(**facts)
    assert refused.value.field == f"component kv: {field}"


def test_a_bad_model_is_refused_by_field():
    for parts in ((), (component(), component())):
        with pytest.raises(ConfigError) as refused:
            ModelSpec(parts)
        assert refused.value.field == "components"
    with pytest.raises(ConfigError) as refused:
        ModelSpec((component(),)).component("scales")
    assert refused.value.field == "component"


def test_a_topology_with_too_few_layers_or_ill_fitting_heads_is_refused():
    model = ModelSpec.gqa(layers=4, kv_heads=4, head_dim=2)
    model.check_topology(Topology(tp=8, layers_per_stage=(4,)))
    for topology, field in (
        (Topology(tp=2, layers_per_stage=(3,)), "layers_per_stage"),
        (Topology(tp=3, layers_per_stage=(4,)), "kv_heads"),
    ):
        with pytest.raises(ConfigError) as refused:
            model.check_topology(topology)
        assert refused.value.field == field


@pytest.mark.parametrize("text", ["contiguous", "interleaved:1", "interleaved:16"])
def test_context_splits_read_as_they_print(text: str):
    assert str(ContextSplit.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "striped", "interleaved", "interleaved:", "interleaved:0", "interleaved:-1", "interleaved:²", "zigzag:2"],
)
def test_another_context_split_is_refused_by_name(text: str):
    with pytest.raises(ConfigError) as refused:
        ContextSplit.parse(text)
    assert refused.value.field == "cp_split"
    assert repr(text) in str(refused.value)


def test_a_negative_interleave_is_refused():
    with pytest.raises(ConfigError) as refused:
        ContextSplit(-1)
    assert refused.value.field == "cp_split"


def test_intervals():
    assert Interval(0, 4) & Interval(2, 9) == Interval(2, 4)
    assert (Interval(0, 2) & Interval(5, 9)).size == 0
    assert str(Interval(0, 3)) == "[0,3)"
    for start, end in ((-1, 2), (3, 2)):
        with pytest.raises(ConfigError) as refused:
            Interval(start, end)
        assert refused.value.field == "interval"


def test_the_oracle_agrees_with_the_split_of_the_public_engines():
    """5 pages over 2 context ranks are 3 and 2, 7 over 4 are 2, 2, 2, 1."""
    assert [len(part) for part in np.array_split(np.arange(5), 2)] == [3, 2]
    assert [len(part) for part in np.array_split(np.arange(7), 4)] == [2, 2, 2, 1]
