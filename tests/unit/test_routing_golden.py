"""Routes against known answers: the golden file, and the worked examples of the public engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rdma_kv.planner import Route
from rdma_kv.topology import ModelSpec, Topology

GOLDEN = json.loads((Path(__file__).parent.parent / "data" / "routing.json").read_text())


def model_of(facts: dict) -> ModelSpec:
    if facts["mla"]:
        return ModelSpec.mla(layers=facts["layers"])
    return ModelSpec.gqa(layers=facts["layers"], kv_heads=facts["kv_heads"], head_dim=128)


def topology_of(facts: dict) -> Topology:
    return Topology(**{**facts, "layers_per_stage": tuple(facts["layers_per_stage"])})


def gqa(kv_heads: int, layers: int = 4) -> ModelSpec:
    return ModelSpec.gqa(layers=layers, kv_heads=kv_heads, head_dim=128)


def mla(layers: int = 4) -> ModelSpec:
    return ModelSpec.mla(layers=layers)


def engine(layers: int = 4, **sizes: int) -> Topology:
    return Topology.with_layers(layers, **sizes)


def heads_moved(route: Route) -> list[tuple[int, int, int, int]]:
    """(src, dst, first head, last head + 1) of a route without pipeline stages."""
    return [(move.src, move.dst, move.heads.start, move.heads.end) for move in route.moves]


# --- the golden file ---------------------------------------------------------------------------------------------------


def test_the_golden_file_is_whole():
    assert len(GOLDEN["moves"]) == 54
    assert len(GOLDEN["need_send"]) == 8


@pytest.mark.parametrize("case", GOLDEN["moves"], ids=lambda c: f"{c['name']}-{c['prefill_dp']}-{c['decode_dp']}")
def test_golden_moves(case: dict):
    route = Route(
        model_of(case["model"]),
        topology_of(case["prefill"]),
        topology_of(case["decode"]),
        case["prefill_dp"],
        case["decode_dp"],
    )
    found = [
        {
            "src": move.src,
            "dst": move.dst,
            "layers": [move.layers.start, move.layers.end],
            "heads": [move.heads.start, move.heads.end],
        }
        for move in route.moves
    ]
    assert found == case["moves"]


@pytest.mark.parametrize("table", GOLDEN["need_send"], ids=lambda t: f"{t['prefill']}-{t['decode']}")
def test_golden_rows_that_send(table: dict):
    model = model_of(table["model"])
    sides = [Topology.with_layers(table["model"]["layers"], **table[side]) for side in ("prefill", "decode")]
    route = Route(model, *sides, 0, 0)
    assert {row["rank"] for row in table["rows"]} == set(range(sides[0].num_ranks))
    for row in table["rows"]:
        targets = {move.dst for move in route.moves if move.src == row["rank"]}
        assert targets == (set(row["targets"]) if row["send"] else set()), row


# --- worked examples ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replica", range(4))
def test_g01_mla_tep4_to_dep4_is_one_to_one(replica: int):
    route = Route(mla(61), engine(61, tp=4), engine(61, tp=4, dp=4), 0, replica)
    assert heads_moved(route) == [(replica, replica, 0, 1)]


@pytest.mark.parametrize("replica", range(4))
def test_g03_mla_two_stages_to_dep4(replica: int):
    prefill = Topology(tp=2, pp=2, layers_per_stage=(31, 30))
    route = Route(mla(61), prefill, engine(61, tp=4, dp=4), 0, replica)
    found = [(move.src, move.dst, str(move.layers)) for move in route.moves]
    first = replica % 2
    assert found == [(first, replica, "[0,31)"), (first + 2, replica, "[31,61)")]


def test_g04_gqa_tp4_to_tp2():
    route = Route(gqa(8), engine(tp=4), engine(tp=2), 0, 0)
    assert heads_moved(route) == [(0, 0, 0, 2), (1, 0, 2, 4), (2, 1, 4, 6), (3, 1, 6, 8)]


def test_g05_gqa_tp2_to_tp4():
    route = Route(gqa(8), engine(tp=2), engine(tp=4), 0, 0)
    assert heads_moved(route) == [(0, 0, 0, 2), (0, 1, 2, 4), (1, 2, 4, 6), (1, 3, 6, 8)]


def test_g06_and_r09_gqa_k2_tp8_to_tp4():
    """Two heads in all; every other rank sends, the rest nothing."""
    route = Route(gqa(2), engine(tp=8), engine(tp=4), 0, 0)
    assert heads_moved(route) == [(0, 0, 0, 1), (2, 1, 0, 1), (4, 2, 1, 2), (6, 3, 1, 2)]
    assert route.senders == (0, 2, 4, 6)


@pytest.mark.parametrize("replica", range(4))
def test_g07_gqa_k2_tp4_to_adp4_is_spread(replica: int):
    route = Route(gqa(2, 28), engine(28, tp=4), engine(28, tp=4, dp=4), 0, replica)
    odd = replica % 2
    assert heads_moved(route) == [(odd, replica, 0, 1), (2 + odd, replica, 1, 2)]


def test_g08_and_r07_uneven_stages():
    prefill = Topology(pp=4, layers_per_stage=(3, 3, 2, 2))
    decode = Topology(tp=2, pp=2, layers_per_stage=(5, 5))
    route = Route(gqa(4, 10), prefill, decode, 0, 0)
    found = [(move.src, move.dst, str(move.layers), str(move.heads)) for move in route.moves]
    low, high = "[0,2)", "[2,4)"
    assert found == [
        (0, 0, "[0,3)", low),
        (0, 1, "[0,3)", high),
        (1, 0, "[3,5)", low),
        (1, 1, "[3,5)", high),
        (1, 2, "[5,6)", low),
        (1, 3, "[5,6)", high),
        (2, 2, "[6,8)", low),
        (2, 3, "[6,8)", high),
        (3, 2, "[8,10)", low),
        (3, 3, "[8,10)", high),
    ]


@pytest.mark.parametrize("source", range(2))
@pytest.mark.parametrize("replica", range(4))
def test_g09_gqa_adp2_to_adp4(source: int, replica: int):
    route = Route(gqa(4, 48), engine(48, tp=2, dp=2), engine(48, tp=4, dp=4), source, replica)
    assert heads_moved(route) == [(source, replica, 0, 4)]


@pytest.mark.parametrize("source", range(4))
def test_g10_gqa_adp4_to_tp2(source: int):
    route = Route(gqa(4), engine(tp=4, dp=4), engine(tp=2), source, 0)
    assert heads_moved(route) == [(source, 0, 0, 2), (source, 1, 2, 4)]


def test_g11_gqa_k2_tp2_to_tp4():
    route = Route(gqa(2), engine(tp=2), engine(tp=4), 0, 0)
    assert heads_moved(route) == [(0, 0, 0, 1), (0, 1, 0, 1), (1, 2, 1, 2), (1, 3, 1, 2)]


def test_g12_mla_dep4_to_tep4_replicates():
    route = Route(mla(), engine(tp=4, dp=4), engine(tp=4), 3, 0)
    assert heads_moved(route) == [(3, dst, 0, 1) for dst in range(4)]


@pytest.mark.parametrize("replica", range(2))
def test_g13_mla_tep8_to_dep2(replica: int):
    route = Route(mla(), engine(tp=8), engine(tp=2, dp=2), 0, replica)
    assert heads_moved(route) == [(replica, replica, 0, 1)]


def test_g14_mqa_tp4_to_tp2():
    route = Route(gqa(1), engine(tp=4), engine(tp=2), 0, 0)
    assert heads_moved(route) == [(0, 0, 0, 1), (2, 1, 0, 1)]


def test_g15_and_r10_one_rank_to_tp8():
    """K=4: the head of decode rank r is floor(r * K / 8)."""
    route = Route(gqa(4), engine(tp=1), engine(tp=8), 0, 0)
    assert [(move.dst, move.heads.start, move.heads.size) for move in route.moves] == [
        (dst, head, 1) for dst, head in enumerate([0, 0, 1, 1, 2, 2, 3, 3])
    ]
    assert route.senders == (0,)


def test_g16_gqa_k2_tp8_to_tp2():
    route = Route(gqa(2), engine(tp=8), engine(tp=2), 0, 0)
    assert heads_moved(route) == [(0, 0, 0, 1), (4, 1, 1, 2)]


def test_g17_gqa_k4_tp2_to_tp8():
    route = Route(gqa(4), engine(tp=2), engine(tp=8), 0, 0)
    found = [(move.src, move.dst, move.heads.start % 2) for move in route.moves]
    assert found == [(src, 4 * src + i, i // 2) for src in range(2) for i in range(4)]


# More rows of the public need-send table, MLA on 16 layers: (tp, pp, cp) of both sides, targets of each sending rank.
NEED_SEND = [
    ((2, 4, 1), (2, 2, 2), {0: [0, 2], 2: [0, 2], 1: [1, 3], 3: [1, 3], 4: [4, 6], 6: [4, 6], 5: [5, 7], 7: [5, 7]}),
    ((4, 2, 1), (2, 1, 2), {0: [0, 2], 4: [0, 2], 2: [1, 3], 6: [1, 3]}),
    ((2, 2, 1), (4, 1, 2), {0: [0, 4, 1, 5], 2: [0, 4, 1, 5], 1: [2, 6, 3, 7], 3: [2, 6, 3, 7]}),
    ((2, 1, 1), (1, 2, 4), {0: range(8)}),
]


@pytest.mark.parametrize(("prefill", "decode", "targets"), NEED_SEND, ids=str)
def test_more_rows_that_send(prefill: tuple, decode: tuple, targets: dict):
    sides = [engine(16, tp=tp, pp=pp, cp=cp) for tp, pp, cp in (prefill, decode)]
    route = Route(mla(16), *sides, 0, 0)
    assert route.senders == tuple(sorted(targets))
    for src, dsts in targets.items():
        assert {move.dst for move in route.moves if move.src == src} == set(dsts)


@pytest.mark.parametrize("source", range(4))
@pytest.mark.parametrize("replica", range(2))
def test_flags_of_attention_dp_on_both_sides(source: int, replica: int):
    """Prefill TP4, decode TP2, both with attention DP: one rank to one rank."""
    route = Route(mla(), engine(tp=4, dp=4), engine(tp=2, dp=2), source, replica)
    assert heads_moved(route) == [(source, replica, 0, 1)]


# --- cases from the field ----------------------------------------------------------------------------------------------


def test_r03_mla_tep4_to_dep8_is_spread():
    routes = [Route(mla(61), engine(61, tp=4), engine(61, tp=8, dp=8), 0, replica) for replica in range(8)]
    assert [route.senders for route in routes] == [(0,), (1,), (2,), (3,), (0,), (1,), (2,), (3,)]
    sources = [move.src for route in routes for move in route.moves]
    assert [sources.count(src) for src in range(4)] == [2, 2, 2, 2]


def test_a_rank_without_moves_is_neither_sender_nor_receiver():
    route = Route(gqa(2), engine(tp=8), engine(tp=2, dp=2), 0, 1)
    assert set(route.senders) < set(range(8))
    assert route.receivers == (1,)
