"""The planner carried out on simulated pools: each byte once and right, boxes that tile, runs that are longest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import simulation
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from simulation import PoolKind, Scenario, check, check_senders, simple
from strategies import layouts, scenarios

from rdma_kv import planner
from rdma_kv.errors import ConfigError
from rdma_kv.layout import KvLayout
from rdma_kv.planner import (
    Box,
    LinkPlan,
    Move,
    Route,
    Tiling,
    TokenShare,
    byte_runs,
    check_pages,
    check_pair,
    cut,
    move_positions,
    token_offsets,
)
from rdma_kv.topology import Component, ContextSplit, ModelSpec, TieBreak, Topology
from rdma_kv.types import Interval

seeded = settings(derandomize=True, deadline=None, database=None)


def gqa(kv_heads: int, layers: int = 2, head_dim: int = 2) -> ModelSpec:
    return ModelSpec.gqa(layers=layers, kv_heads=kv_heads, head_dim=head_dim)


def mla(layers: int = 2) -> ModelSpec:
    return ModelSpec.mla(layers=layers, latent_dim=3)


def engine(layers: int = 2, **sizes: int) -> Topology:
    return Topology.with_layers(layers, **sizes)


# --- the whole plan ----------------------------------------------------------------------------------------------------


@settings(seeded, max_examples=350)
@given(scenarios())
def test_each_byte_is_written_once_and_right(scenario: Scenario):
    check(scenario)


@pytest.fixture
def refuted() -> Iterator[Callable[[], None]]:
    """Demands that the property does not hold, whatever the test has broken."""

    @settings(seeded, max_examples=250, phases=[Phase.generate], report_multiple_bugs=False)
    @given(scenarios())
    def property_holds(scenario: Scenario) -> None:
        check(scenario)

    def demand() -> None:
        planner._pattern.cache_clear()
        with pytest.raises(AssertionError):
            property_holds()

    yield demand
    planner._pattern.cache_clear()


def test_control_heads_by_modulo_are_found_out(monkeypatch: pytest.MonkeyPatch, refuted: Callable[[], None]):
    def holders(head: int, kv_heads: int, tp: int) -> list[int]:
        return [rank for rank in range(tp) if (rank % kv_heads == head if tp > kv_heads else head % tp == rank)]

    def by_modulo(kv_heads: int, replicated: bool, prefill_tp: int, decode_tp: int, k: int):
        moves = []
        for head in range(kv_heads):
            have = list(range(prefill_tp)) if replicated else holders(head, kv_heads, prefill_tp)
            need = list(range(decode_tp)) if replicated else holders(head, kv_heads, decode_tp)
            n, m = len(have), len(need)
            senders = [have[j * n // m + k % max(1, n // m)] for j in range(m)]
            moves += [(src, dst, Interval(head, head + 1)) for src, dst in zip(senders, need, strict=True)]
        return moves

    monkeypatch.setattr(planner, "_head_moves", by_modulo)
    refuted()


def test_control_a_first_holder_that_always_sends_is_found_out(
    monkeypatch: pytest.MonkeyPatch, refuted: Callable[[], None]
):
    monkeypatch.setattr(Route, "tie_break_index", 0)
    refuted()


def test_control_a_first_replica_that_always_sends_is_found_out(
    monkeypatch: pytest.MonkeyPatch, refuted: Callable[[], None]
):
    right = Route._component_moves
    monkeypatch.setattr(
        Route,
        "_component_moves",
        lambda self, index, component: right(replace(self, prefill_replica=0), index, component),
    )
    refuted()


def test_control_tokens_trimmed_by_list_length_are_found_out(
    monkeypatch: pytest.MonkeyPatch, refuted: Callable[[], None]
):
    monkeypatch.setattr(TokenShare, "local", lambda self, positions: np.arange(positions.size))
    refuted()


def test_control_a_head_offset_that_is_forgotten_is_found_out(
    monkeypatch: pytest.MonkeyPatch, refuted: Callable[[], None]
):
    right = token_offsets
    monkeypatch.setattr(
        simulation, "token_offsets", lambda layout, pages, local, first_head: right(layout, pages, local, 0)
    )
    refuted()


def test_control_a_token_sent_twice_is_found_out(monkeypatch: pytest.MonkeyPatch, refuted: Callable[[], None]):
    right = planner.cut

    def overlapping(number: int, move: Move, component: Component, layers: Interval, tokens: Interval, **rest):
        boxes = right(number, move, component, layers, tokens, **rest)
        return [boxes[0]._replace(tokens=tokens), *boxes[1:]] if len(boxes) > 1 else boxes

    monkeypatch.setattr(planner, "cut", overlapping)
    refuted()


def test_control_a_context_split_that_counts_from_the_end_is_found_out(
    monkeypatch: pytest.MonkeyPatch, refuted: Callable[[], None]
):
    def rest_to_the_highest(self: TokenShare) -> Interval:
        pages = -(-self.total_tokens // self.page_size)
        ends = [i * pages // self.topology.cp * self.page_size for i in (self.context, self.context + 1)]
        return Interval(*(min(end, self.total_tokens) for end in ends))

    monkeypatch.setattr(TokenShare, "_contiguous", rest_to_the_highest)
    refuted()


# --- cases from the field ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefill_dp", [1, 2, 4])
@pytest.mark.parametrize("decode_dp", [1, 2, 4])
@pytest.mark.parametrize("model", [gqa(4), mla()], ids=["gqa", "mla"])
def test_r01_every_path_with_and_without_attention_dp(model: ModelSpec, prefill_dp: int, decode_dp: int):
    """A replica of a DP engine routes as the same replica would alone, its ranks shifted."""
    prefill, decode = engine(tp=2 * prefill_dp, dp=prefill_dp), engine(tp=2 * decode_dp, dp=decode_dp)
    for p in range(prefill_dp):
        for d in range(decode_dp):
            check(simple(model, prefill, decode, replicas=(p, d)))
            alone = Route(model, engine(tp=2), engine(tp=2), 0, 0)
            shifted = [move._replace(src=move.src + 2 * p, dst=move.dst + 2 * d) for move in alone.moves]
            assert list(Route(model, prefill, decode, p, d).moves) == shifted


@pytest.mark.parametrize("prefill_replica", [0, 1])
@pytest.mark.parametrize("decode_replica", [0, 1])
def test_r02_attention_dp_2_by_attention_tp_2(prefill_replica: int, decode_replica: int):
    """Every head is right on every rank, and one card is never taken for its replica."""
    both = engine(tp=4, dp=2)
    scenario = simple(gqa(4), both, both, replicas=(prefill_replica, decode_replica))
    check(scenario)
    route = scenario.route()
    assert route.senders == both.replica_ranks(prefill_replica)
    assert route.receivers == both.replica_ranks(decode_replica)
    heads = {move.dst: move.heads for move in route.moves}
    assert list(heads.values()) == [Interval(0, 2), Interval(2, 4)]


@pytest.mark.parametrize("replica", range(8))
def test_r03_mla_tep4_to_dep8(replica: int):
    scenario = simple(mla(), engine(tp=4), engine(tp=8, dp=8), replicas=(0, replica))
    check(scenario)
    assert scenario.route().senders == (replica % 4,)


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4)], ids=["tp4_tp2", "tp2_tp4"])
@pytest.mark.parametrize("src", ["nhd", "hnd"])
@pytest.mark.parametrize("dst", ["nhd", "hnd"])
def test_r06_layouts_across_tp(sizes: tuple[int, int], src: str, dst: str):
    prefill, decode = (engine(tp=tp) for tp in sizes)
    check(simple(gqa(8), prefill, decode, src=PoolKind(src, 4), dst=PoolKind(dst, 4)))


def test_r07_uneven_stages():
    prefill = Topology(pp=4, layers_per_stage=(3, 3, 2, 2))
    check(simple(gqa(2, layers=10), prefill, Topology(pp=2, layers_per_stage=(5, 5))))
    check(simple(gqa(2, layers=10), Topology(tp=2, pp=2, layers_per_stage=(5, 5)), prefill))


def test_r09_more_ranks_than_heads():
    check(simple(gqa(2), engine(tp=8), engine(tp=4)))
    check(simple(gqa(2), engine(tp=4), engine(tp=8)))


def test_r10_one_rank_to_tp8():
    check(simple(gqa(4), engine(tp=1), engine(tp=8)))


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("prefill_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("decode_tp", [1, 2, 4, 8])
def test_r13_the_whole_matrix(kv_heads: int, prefill_tp: int, decode_tp: int):
    """With and without attention DP; the layer count is small, as it is the heads that this is about."""
    model = gqa(kv_heads, layers=1)
    check(simple(model, engine(1, tp=prefill_tp), engine(1, tp=decode_tp), tokens=3))
    for prefill_dp, decode_dp in ((1, 2), (2, 1), (2, 2)):
        prefill = engine(1, tp=prefill_tp * prefill_dp, dp=prefill_dp)
        decode = engine(1, tp=decode_tp * decode_dp, dp=decode_dp)
        check(simple(model, prefill, decode, replicas=(prefill_dp - 1, decode_dp - 1), tokens=2))


@pytest.mark.parametrize("model", [gqa(6), mla()], ids=["gqa", "mla"])
@pytest.mark.parametrize("sizes", [(3, 2), (2, 3)], ids=["tp3_tp2", "tp2_tp3"])
def test_r13_tp3_against_tp2_is_refused_fast(model: ModelSpec, sizes: tuple[int, int]):
    prefill, decode = (engine(tp=tp) for tp in sizes)
    begin = time.perf_counter()
    with pytest.raises(ConfigError) as refused:
        Route(model, prefill, decode, 0, 0)
    assert time.perf_counter() - begin < 1
    assert refused.value.field == "tp"


def test_r27_each_in_its_replica():
    """Ten requests over two replicas: what is meant for one never gets to a rank of the other."""
    both = engine(tp=4, dp=2)
    for request in range(10):
        replica = request % 2
        route = Route(gqa(4), both, both, 0, replica)
        assert set(route.receivers) <= set(both.replica_ranks(replica))


@pytest.mark.parametrize(("src", "dst"), [(16, 32), (64, 16), (16, 16), (1, 64)])
@pytest.mark.parametrize("tokens", [1, 37, 64, 100])
def test_r60_page_sizes_and_a_partial_last_page(src: int, dst: int, tokens: int):
    scenario = simple(gqa(2), engine(tp=2), engine(tp=1), tokens=tokens)
    check(replace(scenario, src_pools=(PoolKind("nhd", src),), dst_pools=(PoolKind("hnd", dst),)))
    check(replace(scenario, src_pools=(PoolKind("hnd", src),), dst_pools=(PoolKind("trtllm", dst),)))


def pages_touched(scenario: Scenario, tokens: Interval) -> tuple[set[int], set[int]]:
    """Indices into the page tables of source and destination that `tokens` of move 0 reach."""
    link = scenario.link(scenario.route())
    positions = link.positions(0, tokens)
    local = link.src_share(0).local(positions), link.dst_share(0).local(positions)
    sizes = scenario.src_pools[0].page_size, scenario.dst_pools[0].page_size
    return tuple(set((part // size).tolist()) for part, size in zip(local, sizes, strict=True))


def test_f54_a_prefix_that_ends_a_token_short():
    """Prompt 2,048, page 64; decode holds 31 pages and asks for 2,049 tokens, of which prefill has all but the last."""
    page = PoolKind("nhd", 64)
    asked, available = Interval(31 * 64, 2049), Interval(0, 2048)
    scenario = simple(gqa(1), engine(), engine(), src=page, dst=page, tokens=2048, start=31 * 64)
    assert scenario.within == asked & available
    assert pages_touched(scenario, scenario.within) == ({31}, {31})
    check(scenario)


def test_f55_the_first_pages_are_held():
    page = PoolKind("nhd", 16)
    scenario = simple(gqa(1), engine(), engine(), src=page, dst=page, tokens=64, start=32)
    assert pages_touched(scenario, scenario.within) == ({2, 3}, {2, 3})
    check(scenario)


def test_f55_with_other_page_sizes():
    scenario = simple(gqa(1), engine(), engine(), src=PoolKind("nhd", 16), dst=PoolKind("hnd", 32), tokens=64, start=32)
    assert pages_touched(scenario, scenario.within) == ({2, 3}, {1})
    check(scenario)


def test_f56_chunked_prefill():
    """Page 16, pushes of 20 and 12 tokens: the second page is written from both, each token once."""
    page = PoolKind("nhd", 16)
    check(replace(simple(gqa(2), engine(tp=2), engine(), src=page, dst=page, tokens=32), token_cuts=(20,)))


def test_a38_nothing_to_move():
    scenario = simple(gqa(2), engine(), engine(), tokens=8, start=8)
    assert scenario.link(scenario.route()).tilings((scenario.within,)) == {}
    check(scenario)


def test_g22_pages_over_context_ranks():
    for pages, cp, expected in ((5, 2, [3, 2]), (7, 4, [2, 2, 2, 1])):
        shares = [TokenShare(engine(cp=cp), context, 16, pages * 16) for context in range(cp)]
        assert [share.positions(Interval(0, pages * 16)).size // 16 for share in shares] == expected


def test_contexts_that_share_no_token_carry_nothing():
    """Two halves on both sides: no box and nothing to wait for between the first and the second."""
    scenario = simple(gqa(1), engine(cp=2), engine(cp=2), tokens=16)
    route = scenario.route()
    link = scenario.link(route)
    carrying = {(route.moves[number].src, route.moves[number].dst) for number in link.tilings((scenario.within,))}
    assert carrying == {(0, 0), (1, 1)}
    check(scenario)


def test_a_state_without_tokens_moves_as_one_entry():
    state = Component("state", (0, 1), 4, 1, 6, has_tokens=False)
    model = ModelSpec((state,))
    check(simple(model, engine(tp=2, dp=1), engine(tp=4, dp=2), replicas=(0, 1), tokens=1))
    for prefill, decode in ((engine(tp=2), engine(tp=4)), (engine(tp=2, cp=2), engine(tp=2))):
        with pytest.raises(ConfigError) as refused:
            Route(model, prefill, decode, 0, 0)
        assert refused.value.field == "component state"


# --- routes ------------------------------------------------------------------------------------------------------------


@settings(seeded, max_examples=100)
@given(scenarios())
def test_every_pair_of_replicas_follows_the_rule(scenario: Scenario):
    for p in range(scenario.prefill.dp):
        for d in range(scenario.decode.dp):
            pair = replace(scenario, prefill_replica=p, decode_replica=d)
            route = pair.route()
            for number in range(len(pair.model.components)):
                check_senders(pair, route, number)
            assert set(route.senders) <= set(pair.prefill.replica_ranks(p))
            assert set(route.receivers) == {move.dst for move in route.moves} <= set(pair.decode.replica_ranks(d))


def test_the_key_spreads_requests_to_one_small_replica():
    routes = [
        Route(mla(), engine(tp=8), engine(tp=1), 0, 0, tie_break=TieBreak.KEY, key=f"request-{i}") for i in range(200)
    ]
    assert {route.senders for route in routes} == {(src,) for src in range(8)}


def rebuilt(scenario: Scenario) -> Route:
    """The same facts in objects of their own, as the other end has them."""
    model = ModelSpec(tuple(replace(part, layers=tuple(part.layers)) for part in scenario.model.components))
    sides = (
        replace(side, cp_split=ContextSplit(side.cp_split.interleave)) for side in (scenario.prefill, scenario.decode)
    )
    return Route(
        model, *sides, scenario.prefill_replica, scenario.decode_replica, tie_break=scenario.tie_break, key=scenario.key
    )


@settings(seeded, max_examples=50)
@given(scenarios())
def test_both_ends_compute_one_digest(scenario: Scenario):
    here, there = scenario.route(), rebuilt(scenario)
    assert here.digest == there.digest
    assert len(here.digest) == 16
    assert here.moves == there.moves


BASE = Route(gqa(4, layers=4), engine(4, tp=4, dp=2), engine(4, tp=4, dp=2), 0, 0)


def other_part(**changes: object) -> ModelSpec:
    return ModelSpec((replace(BASE.model.components[0], **changes),))


OTHER_FACTS = {
    "component name": {"model": other_part(name="k")},
    "layer ids": {"model": other_part(layers=(0, 1, 3))},
    "kv heads": {"model": other_part(kv_heads=8)},
    "kv factor": {"model": other_part(kv_factor=1)},
    "row bytes": {"model": other_part(row_bytes=8)},
    "dtype": {"model": other_part(dtype="float16")},
    "replicated": {"model": other_part(kv_heads=1, replicated=True)},
    "token axis": {"model": other_part(has_tokens=False)},
    "scale mode": {"model": other_part(scale_mode="per-token")},
    "one more component": {"model": ModelSpec((*BASE.model.components, Component("s", (0,), 1, 1, 4)))},
    "fingerprint": {"model": replace(BASE.model, fingerprint="rope=2")},
    "prefill tp": {"prefill": engine(4, tp=8, dp=2)},
    "prefill dp": {"prefill": engine(4, tp=4, dp=4)},
    "decode tp": {"decode": engine(4, tp=2, dp=2)},
    "decode dp": {"decode": engine(4, tp=4, dp=1)},
    "decode pp": {"decode": engine(4, tp=4, dp=2, pp=2)},
    "decode cp": {"decode": engine(4, tp=4, dp=2, cp=2)},
    "context split": {"decode": replace(BASE.decode, cp_split=ContextSplit(16))},
    "prefill replica": {"prefill_replica": 1},
    "decode replica": {"decode_replica": 1},
    "tie-break": {"tie_break": TieBreak.KEY},
}


def test_any_other_fact_gives_another_digest():
    digests = {name: replace(BASE, **changes).digest for name, changes in OTHER_FACTS.items()}
    digests["stages"] = replace(BASE, prefill=Topology(tp=4, dp=2, pp=2, layers_per_stage=(1, 3))).digest
    digests["other stages"] = replace(BASE, prefill=Topology(tp=4, dp=2, pp=2, layers_per_stage=(3, 1))).digest
    for key in ("a", "b"):
        digests[f"key {key}"] = replace(BASE, tie_break=TieBreak.KEY, key=key).digest
    assert BASE.digest not in digests.values()
    assert len(set(digests.values())) == len(digests)
    assert replace(BASE, key="only the key tie-break looks at it").digest == BASE.digest


# --- refusals ----------------------------------------------------------------------------------------------------------

BAD_PAIRS = [
    (gqa(4), engine(tp=3), engine(tp=1), "kv_heads"),
    (gqa(4), engine(tp=1), engine(tp=3), "kv_heads"),
    (gqa(3), engine(tp=2), engine(tp=2), "kv_heads"),
    (gqa(4), engine(3), engine(2), "layers_per_stage"),
    (gqa(4, layers=3), engine(2), engine(2), "layers_per_stage"),
    (gqa(6), engine(tp=3), engine(tp=2), "tp"),
    (gqa(12), engine(tp=4), engine(tp=12, dp=2), "tp"),
]


@pytest.mark.parametrize(("model", "prefill", "decode", "field"), BAD_PAIRS)
def test_a_pair_that_cannot_exchange_is_refused_by_field(
    model: ModelSpec, prefill: Topology, decode: Topology, field: str
):
    for _ in range(2):  # a refusal is not remembered as a success
        with pytest.raises(ConfigError) as refused:
            check_pair(model, prefill, decode)
        assert refused.value.field == field


@pytest.mark.parametrize(("prefill_replica", "decode_replica"), [(2, 0), (0, 2), (-1, 0), (0, -1)])
def test_a_replica_that_is_not_there_is_refused(prefill_replica: int, decode_replica: int):
    with pytest.raises(ConfigError) as refused:
        replace(BASE, prefill_replica=prefill_replica, decode_replica=decode_replica)
    assert refused.value.field == "replica"


@pytest.mark.parametrize(
    "pages",
    [[0, 8], [-1], [3, 3], [0], [[0, 1]], [[0], [1, 2]], [0.0, 1.0], ["a", "b"], None, [True, False], [1 << 70, 1]],
)
def test_a_bad_page_table_is_refused_by_field(pages: object):
    with pytest.raises(ConfigError) as refused:
        check_pages("pages", pages, 8, 2)
    assert refused.value.field == "pages"


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8, np.uint64])
def test_a_good_page_table_becomes_int64(dtype: type):
    table = check_pages("pages", np.array([7, 0, 3], dtype=dtype), 8, 2)
    assert table.dtype == np.int64
    assert table.tolist() == [7, 0, 3]
    assert check_pages("pages", [], 8, 0).size == 0


# --- boxes -------------------------------------------------------------------------------------------------------------


def test_a_slot_too_small_for_one_token_of_one_layer_is_refused():
    move = BASE.moves[0]
    arguments = (0, move, BASE.model.components[0], move.layers, Interval(0, 8))
    with pytest.raises(ConfigError) as refused:
        cut(*arguments, positions=np.arange(8), chunk_bytes=15)
    assert refused.value.field == "slot_bytes"
    assert len(cut(*arguments, positions=np.arange(8), chunk_bytes=16)) == 8 * move.layers.size


def test_layers_stay_together_while_tokens_are_many():
    """A box of 64 tokens by all layers is worth more than one of all tokens by one layer."""
    move = BASE.moves[0]
    unit = 16 * move.layers.size
    arguments = (0, move, BASE.model.components[0], move.layers, Interval(0, 1000))
    boxes = cut(*arguments, positions=np.arange(1000), chunk_bytes=unit * 100)
    assert {box.layers for box in boxes} == {move.layers}
    assert [box.tokens.size for box in boxes] == [100] * 10
    boxes = cut(*arguments, positions=np.arange(1000), chunk_bytes=unit * 16)
    assert {box.layers.size for box in boxes} == {1}


def test_nothing_is_cut_where_nothing_is_carried():
    move = BASE.moves[0]
    part = BASE.model.components[0]
    none = np.empty(0, np.int64)
    assert cut(0, move, part, move.layers, Interval(0, 8), positions=none, chunk_bytes=1) == []
    assert cut(0, move, part, Interval(1, 1), Interval(0, 8), positions=np.arange(8), chunk_bytes=1) == []


@st.composite
def boxes_in(draw: st.DrawFn, most: int = 5) -> tuple[Interval, Interval]:
    pairs = [sorted(draw(st.tuples(st.integers(0, most), st.integers(0, most)))) for _ in range(2)]
    return Interval(*pairs[0]), Interval(*pairs[1])


@settings(seeded, max_examples=200)
@given(boxes_in(), st.lists(boxes_in(), max_size=12))
def test_a_tiling_takes_each_cell_once_and_nothing_else(whole: tuple, offered: list[tuple]):
    tiling = Tiling(*whole)
    grid = np.zeros((6, 6), dtype=bool)
    inside = np.zeros((6, 6), dtype=bool)
    inside[whole[0].start : whole[0].end, whole[1].start : whole[1].end] = True
    for layers, tokens in offered:
        box = np.zeros((6, 6), dtype=bool)
        box[layers.start : layers.end, tokens.start : tokens.end] = True
        fits = bool(box.any() and not (box & grid).any() and not (box & ~inside).any())
        assert tiling.add(layers, tokens) == fits
        grid |= box & fits
        assert tiling.left == (inside & ~grid).sum()
        assert tiling.complete == bool(np.array_equal(grid, inside))


def test_a_tiling_takes_thousands_of_boxes():
    tiling = Tiling(Interval(0, 4), Interval(0, 1000))
    for token in range(1000):
        for layer in range(4):
            assert not tiling.complete
            assert tiling.add(Interval(layer, layer + 1), Interval(token, token + 1))
    assert tiling.complete
    assert not tiling.add(Interval(3, 4), Interval(500, 501))


@settings(seeded, max_examples=100)
@given(scenarios())
def test_boxes_of_a_link_tile_and_fit(scenario: Scenario):
    route = scenario.route()
    link = scenario.link(route)
    for number, tiling in link.tilings((scenario.within,) * len(scenario.model.components)).items():
        move = route.moves[number]
        boxes = link.cut(number, move.layers, scenario.within)
        sizes = []
        for box in boxes:
            assert box.move == number
            assert 0 < link.box_bytes(box) <= scenario.chunk_bytes
            assert tiling.add(box.layers, box.tokens, link.carried(number, box.tokens))
            sizes.append(link.box_bytes(box))
        assert tiling.complete
        whole = link.box_bytes(Box(number, move.layers, scenario.within))
        assert sum(sizes) == whole


@settings(seeded, max_examples=100)
@given(scenarios())
def test_moves_into_one_rank_share_no_position_and_miss_none(scenario: Scenario):
    """Over all context ranks of prefill, a decode rank gets each position that it keeps from exactly one."""
    route = scenario.route()
    link = scenario.link(route)
    every = Interval(0, scenario.total_tokens)
    for dst in route.receivers:
        found: dict[tuple, list[int]] = {}
        for number, move in enumerate(route.moves):
            if move.dst == dst:
                head_layer = (move.component, move.heads, move.layers)
                found.setdefault(head_layer, []).extend(link.positions(number, every).tolist())
        for (component, _, _), positions in found.items():
            context = scenario.decode.place(dst)[1]
            share = TokenShare(scenario.decode, context, scenario.dst_pools[component].page_size, scenario.total_tokens)
            assert sorted(positions) == share.positions(every).tolist()


def test_positions_of_a_move_are_those_that_both_keep():
    src = TokenShare(Topology(cp=2, cp_split=ContextSplit(2)), 1, 4, 16)
    dst = TokenShare(Topology(cp=2), 1, 4, 16)
    assert src.positions(Interval(0, 16)).tolist() == [2, 3, 6, 7, 10, 11, 14, 15]
    assert dst.positions(Interval(0, 16)).tolist() == [8, 9, 10, 11, 12, 13, 14, 15]
    assert move_positions(src, dst, Interval(0, 15)).tolist() == [10, 11, 14]
    assert src.local(np.array([10, 11, 14])).tolist() == [4, 5, 6]
    assert dst.local(np.array([10, 11, 14])).tolist() == [2, 3, 6]


def test_a_link_is_a_part_of_a_route():
    route = Route(gqa(4), engine(tp=4), engine(tp=2), 0, 0)
    link = LinkPlan(route, (2,), (16,), (16,), 1 << 20, (32,))
    assert set(link.tilings((Interval(0, 32),))) == {2}
    assert link.component(2).name == "kv"
    assert link.move(2) == route.moves[2]


# --- byte runs ---------------------------------------------------------------------------------------------------------


@st.composite
def run_questions(draw: st.DrawFn) -> tuple[KvLayout, np.ndarray, Interval, Interval]:
    layout = draw(layouts())
    in_order = draw(st.booleans())
    pages = np.arange(layout.num_pages) if in_order else np.array(draw(st.permutations(range(layout.num_pages))))
    tokens = sorted(draw(st.tuples(*[st.integers(0, layout.num_pages * layout.page_size)] * 2)))
    heads = sorted(draw(st.tuples(*[st.integers(0, layout.heads)] * 2)))
    return layout, pages, Interval(*tokens), Interval(*heads)


@settings(seeded, max_examples=300)
@given(run_questions())
def test_runs_are_the_bytes_and_the_longest(question: tuple):
    layout, pages, tokens, heads = question
    untouched = pages.copy()
    runs = byte_runs(layout, pages, tokens, heads)
    found = [byte for at, n in zip(*map(np.ndarray.tolist, runs), strict=True) for byte in range(at, at + n)]
    expected = [
        int(pages[token // layout.page_size]) * layout.page_stride
        + token % layout.page_size * layout.token_stride
        + head * layout.head_stride
        + byte
        for token in range(tokens.start, tokens.end)
        for head in range(heads.start, heads.end)
        for byte in range(layout.row_bytes)
    ]
    assert sorted(found) == sorted(expected)
    assert len(set(found)) == len(found)
    assert int(runs.lengths.sum()) == tokens.size * heads.size * layout.row_bytes
    assert (runs.lengths > 0).all()
    assert (runs.offsets[1:] != runs.offsets[:-1] + runs.lengths[:-1]).all(), "two neighbours could be one"
    assert np.array_equal(pages, untouched), "the page table is the caller's"


@settings(seeded, max_examples=100)
@given(run_questions())
def test_runs_begin_where_token_offsets_say(question: tuple):
    layout, pages, tokens, heads = question
    if not tokens.size or not heads.size:
        return
    runs = byte_runs(layout, pages, tokens, heads)
    first = token_offsets(layout, pages, np.arange(tokens.start, tokens.end), heads.start)
    assert runs.offsets[0] == first[0]
    covered = {byte for at, n in zip(*map(np.ndarray.tolist, runs), strict=True) for byte in range(at, at + n)}
    assert set(first.tolist()) <= covered


def test_g24_a_head_slice_of_hnd_is_one_run_a_page():
    """Page 16, head dim 128, bf16: half of 4 heads is one run of 8,192 bytes, at 8,192 for the odd rank."""
    layout = KvLayout.hnd(layers=1, pages=4, page_size=16, heads=4, row_bytes=256)
    runs = byte_runs(layout, np.array([2]), Interval(0, 16), Interval(2, 4))
    assert runs.offsets.tolist() == [2 * 16_384 + 8_192]
    assert runs.lengths.tolist() == [8_192]


def test_g25_a_head_slice_of_nhd_is_one_run_a_token():
    layout = KvLayout.nhd(layers=1, pages=4, page_size=16, heads=4, row_bytes=256)
    runs = byte_runs(layout, np.array([2]), Interval(0, 16), Interval(2, 4))
    assert runs.lengths.tolist() == [512] * 16


def test_pages_side_by_side_are_one_run():
    layout = KvLayout.nhd(layers=1, pages=8, page_size=4, heads=2, row_bytes=8)
    runs = byte_runs(layout, np.array([1, 2, 3, 6, 7, 0]), Interval(2, 23), Interval(0, 2))
    assert runs.offsets.tolist() == [64 + 32, 6 * 64, 0]
    assert runs.lengths.tolist() == [3 * 64 - 32, 2 * 64, 3 * 16]


def test_an_empty_range_has_no_runs():
    layout = KvLayout.nhd(layers=1, pages=2, page_size=4, heads=2, row_bytes=8)
    for tokens, heads in ((Interval(3, 3), Interval(0, 2)), (Interval(0, 3), Interval(1, 1))):
        runs = byte_runs(layout, np.array([0, 1]), tokens, heads)
        assert runs.offsets.size == runs.lengths.size == 0
