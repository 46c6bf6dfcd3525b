"""Pools, allocator, cut and assemble, against literal indexing and against the strides that a pool claims."""

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdma_kv.demo.pools import (
    LAYOUTS,
    PageAllocator,
    RankPool,
    Share,
    TensorPool,
    assemble,
    check_pools,
    cut,
    pages_for,
    view_of,
)
from rdma_kv.demo.verify import alter_head, alteration_is_seen, compare, fingerprints
from rdma_kv.errors import ConfigError, LocalProtocolError
from rdma_kv.topology import Component, ContextSplit, ModelSpec, Topology
from rdma_kv.types import Interval

DIM = 8
GQA = ModelSpec.gqa(layers=3, kv_heads=4, head_dim=DIM, itemsize=4, dtype="float32").components[0]
MLA = ModelSpec.mla(layers=3, latent_dim=DIM, itemsize=4, dtype="float32").components[0]
TP2 = Topology(tp=2, layers_per_stage=(3,), pp=1)
TP1 = Topology(layers_per_stage=(3,))
PAGES = 7
TOKENS = 11


def cells(component, tokens):
    """KV of the whole model in which every word is another number, `[layers, kv, tokens, heads, dim]`."""
    shape = (len(component.layers), component.kv_factor, tokens, component.kv_heads, component.row_bytes // 4)
    return -1.0 - np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


class Place(NamedTuple):
    """One rank, and which layers and heads of four it holds, written out."""

    topology: Topology
    rank: int
    layers: list[int]
    heads: list[int]


PLACES = {
    "all layers": Place(TP2, 1, [0, 1, 2], [2, 3]),
    "last stage": Place(Topology(tp=4, pp=2, dp=2, layers_per_stage=(1, 2)), 7, [1, 2], [2, 3]),
    "one layer": Place(Topology(pp=2, layers_per_stage=(2, 1)), 1, [2], [0, 1, 2, 3]),
}

# One engine's tensor each, indexed by hand: the row of (layer, kv, page, offset, head). `n` layers and `h` heads are the
# rank's own, `p` tokens a page.
BY_HAND = {
    "nhd": lambda b, layer, kv, page, off, head, n, h, p: b[0][layer][kv][page][off][head],
    "hnd": lambda b, layer, kv, page, off, head, n, h, p: b[0][layer][kv][page][head][off],
    "lightllm": lambda b, layer, kv, page, off, head, n, h, p: b[0][layer][page][kv * h + head],
    "sglang": lambda b, layer, kv, page, off, head, n, h, p: b[layer + n * kv][page * p + off][head],
    "trtllm": lambda b, layer, kv, page, off, head, n, h, p: b[0][page][layer][kv][head][off],
    "mla": lambda b, layer, kv, page, off, head, n, h, p: b[0][layer][page][off],
}
SHAPES = {
    "nhd": lambda n, kv, h: [(n, kv, 7, 4, h, 8)],
    "hnd": lambda n, kv, h: [(n, kv, 7, h, 4, 8)],
    "lightllm": lambda n, kv, h: [(n, 28, 2 * h, 8)],
    "sglang": lambda n, kv, h: [(28, h, 8)] * (2 * n),
    "trtllm": lambda n, kv, h: [(7, n, kv, h, 4, 8)],
    "mla": lambda n, kv, h: [(n, 7, 4, 8)],
}
FORMS = {
    **{layout: (layout, GQA) for layout in ("nhd", "hnd", "lightllm", "sglang", "trtllm")},
    "mla": ("mla", MLA),
    **{f"{layout} latent": (layout, MLA) for layout in ("nhd", "hnd", "trtllm")},
}


def page_of(layout):
    return 1 if layout == "lightllm" else 4


class Made:
    """A pool of one rank, its shard of numbered cells, and a page table of `TOKENS` positions in scattered order."""

    def __init__(self, form, place="all layers", seed=3):
        self.layout, self.component = FORMS[form]
        self.topology, self.rank, self.layers, heads = PLACES[place]
        self.latent = self.component is MLA
        self.heads, self.planes = ([0], ["latent"]) if self.latent else (heads, ["K", "V"])
        pages = PAGES * 4 // page_of(self.layout)
        self.pool = RankPool(
            self.layout,
            self.component,
            self.topology,
            self.rank,
            pages=pages,
            page_size=page_of(self.layout),
            seed=seed,
        )
        self.table = PageAllocator(pages, seed).take(pages_for(TOKENS, self.pool.page_size))
        self.shard = cells(self.component, TOKENS)[self.layers][:, :, :, self.heads]

    def filled(self):
        self.pool.write(self.table, self.shard)
        return self


def test_all_layouts_are_tried():
    assert {layout for layout, _ in FORMS.values()} == set(LAYOUTS)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", PLACES)
class TestEveryLayout:
    def test_buffers_have_the_engines_shape(self, form, place):
        made = Made(form, place)
        buffers = made.pool.buffers
        wanted = SHAPES[made.layout](len(made.layers), len(made.planes), len(made.heads))
        assert [buffer.shape for buffer in buffers] == wanted
        assert all(buffer.flags.c_contiguous and buffer.dtype == np.float32 for buffer in buffers)
        assert len({buffer.ctypes.data for buffer in buffers}) == len(buffers)

    def test_cut_gives_what_the_pool_holds(self, form, place):
        made = Made(form, place)
        shard = cut(cells(made.component, TOKENS), made.component, made.topology, made.rank)
        np.testing.assert_array_equal(shard, made.shard)

    def test_write_lands_where_the_tensor_is_indexed_by_hand(self, form, place):
        made = Made(form, place).filled()
        layers, heads, size = len(made.layers), len(made.heads), made.pool.page_size
        for layer, kv, token, head in np.ndindex(made.shard.shape[:4]):
            at = made.table[token // size], token % size
            row = BY_HAND[made.layout](made.pool.buffers, layer, kv, *at, head, layers, heads, size)
            np.testing.assert_array_equal(row, made.shard[layer, kv, token, head])

    def test_write_lands_where_the_claimed_strides_point(self, form, place):
        made = Made(form, place).filled()
        claimed, size = made.pool.layout, made.pool.page_size
        assert claimed.name == made.layout
        assert (claimed.num_layers, claimed.kv_factor, claimed.heads) == made.shard.shape[:2] + made.shard.shape[3:4]
        assert list(claimed.required_bytes()) == [buffer.nbytes for buffer in made.pool.buffers]
        raw = [buffer.tobytes() for buffer in made.pool.buffers]
        for layer, kv, token, head in np.ndindex(made.shard.shape[:4]):
            buffer, offset = claimed.origins[layer][kv]
            offset += made.table[token // size] * claimed.page_stride
            offset += token % size * claimed.token_stride + head * claimed.head_stride
            assert raw[buffer][offset : offset + claimed.row_bytes] == made.shard[layer, kv, token, head].tobytes()

    def test_read_gives_back_any_range(self, form, place):
        made = Made(form, place).filled()
        for start, end in [(0, TOKENS), (0, 4), (3, 9), (10, 11), (5, 5)]:
            got = made.pool.read(made.table, end - start, start=start)
            np.testing.assert_array_equal(got, made.shard[:, :, start:end])
        got[:] = 0
        np.testing.assert_array_equal(made.pool.read(made.table, TOKENS), made.shard)

    def test_range_writes_touch_nothing_else(self, form, place):
        made = Made(form, place)
        pool, table, planes = made.pool, made.table, len(made.layers) * len(made.planes)
        pool.write(table, made.shard[:, :, 5:9], start=5)
        np.testing.assert_array_equal(pool.read(table, 4, start=5), made.shard[:, :, 5:9])
        np.testing.assert_array_equal(pool.read(table, 5), Made(form, place).pool.read(table, 5))
        assert pool.untouched([(table, Interval(5, 9))]) == []
        assert len(pool.untouched([(table, Interval(6, 9))])) == planes
        assert len(pool.untouched([(table, Interval(5, 8))])) == planes

    def test_untouched_names_what_was_not_meant(self, form, place):
        made = Made(form, place)
        pool, table = made.pool, made.table
        assert pool.untouched() == []
        made.filled()
        assert pool.untouched([(table, Interval(0, TOKENS))]) == []
        last, offset = table[(TOKENS - 1) // pool.page_size], (TOKENS - 1) % pool.page_size
        assert pool.untouched([(table, Interval(0, TOKENS - 1))]) == [
            f"rank {made.rank} {made.layout}: layer {layer} {plane} page {last} was touched at offsets [{offset}] "
            f"heads {made.heads}"
            for layer in made.layers
            for plane in made.planes
        ]

    def test_every_flipped_bit_is_seen(self, form, place):
        made = Made(form, place).filled()
        meant = [(made.table, Interval(0, TOKENS))]
        words = [buffer.reshape(-1).view(np.uint32) for buffer in made.pool.buffers]
        written = [(buffer < 0).reshape(-1) for buffer in made.pool.buffers]  # cells are negative, the pattern is not
        rng = np.random.default_rng(0)
        for _ in range(20):
            which = int(rng.integers(len(words)))
            word = int(rng.integers(words[which].size))
            words[which][word] ^= np.uint32(1)
            assert len(made.pool.untouched(meant)) == (0 if written[which][word] else 1)
            words[which][word] ^= np.uint32(1)
        assert made.pool.untouched(meant) == []

    def test_pattern_is_recognisable(self, form, place):
        pool = Made(form, place).pool
        whole = np.concatenate([buffer.reshape(-1) for buffer in pool.buffers])
        assert whole.min() >= 64
        assert whole.max() < 128
        for ours, theirs in zip(pool.buffers, Made(form, place, seed=4).pool.buffers, strict=True):
            assert (ours != theirs).mean() > 0.99
        pages = {pool.read([page], pool.page_size).tobytes() for page in range(pool.pages)}
        assert len(pages) == pool.pages

    def test_copy_is_apart(self, form, place):
        made = Made(form, place).filled()
        twin = made.pool.copy()
        twin.write(made.table, -made.shard)
        np.testing.assert_array_equal(made.pool.read(made.table, TOKENS), made.shard)
        np.testing.assert_array_equal(twin.read(made.table, TOKENS), -made.shard)
        assert twin.untouched([(made.table, Interval(0, TOKENS))]) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pattern_differs_by_rank(layout):
    component = MLA if layout == "mla" else GQA
    topology = Topology(tp=2, pp=3, layers_per_stage=(1, 1, 1))
    pools = [RankPool(layout, component, topology, rank, pages=7, page_size=page_of(layout)) for rank in range(6)]
    for one, other in itertools.combinations(pools, 2):
        for ours, theirs in zip(one.buffers, other.buffers, strict=True):
            assert (ours != theirs).mean() > 0.99


def test_pattern_does_not_repeat_by_page_in_a_large_pool():
    component = ModelSpec.gqa(layers=1, kv_heads=4, head_dim=32, itemsize=4, dtype="float32").components[0]
    pool = RankPool("nhd", component, Topology(), 0, pages=256, page_size=16)
    assert pool.buffers[0].size > 4 * 65_537
    assert len({pool.read([page], 16).tobytes() for page in range(256)}) == 256


def test_nan_is_a_touch_and_a_value():
    made = Made("hnd")
    pool, table = made.pool, made.table
    shard = np.full((3, 2, TOKENS, 2, DIM), np.nan, np.float32)
    pool.write(table, shard)
    assert pool.untouched([(table, Interval(0, TOKENS))]) == []
    assert pool.untouched()
    assert pool.read(table, TOKENS).tobytes() == shard.tobytes()


@pytest.mark.parametrize(
    ("layout", "component", "page", "field"),
    [
        ("blocked", GQA, 4, "layout"),
        ("lightllm", GQA, 16, "page"),
        ("nhd", GQA, 0, "page"),
        ("lightllm", MLA, 1, "layout"),
        ("sglang", MLA, 4, "layout"),
        ("mla", GQA, 4, "layout"),
        ("nhd", ModelSpec.gqa(layers=3, kv_heads=4, head_dim=8).components[0], 4, "dtype"),
    ],
)
def test_refused_by_name(layout, component, page, field):
    with pytest.raises(ConfigError) as error:
        RankPool(layout, component, TP2, 0, pages=4, page_size=page)
    assert error.value.field == field
    with pytest.raises(ConfigError) as error:
        check_pools(layout, component, TP2, page)
    assert error.value.field == field


def test_pool_without_a_page_is_refused():
    with pytest.raises(ConfigError, match="pages"):
        RankPool("nhd", GQA, TP2, 0, pages=0, page_size=4)


def test_whole_engines_are_checked_before_they_are_built():
    for layout, component in FORMS.values():
        for topology, *_ in PLACES.values():
            check_pools(layout, component, topology, page_of(layout))
    with pytest.raises(ConfigError, match="kv_heads"):
        check_pools("nhd", GQA, Topology(tp=3, layers_per_stage=(3,)), 4)
    with pytest.raises(ConfigError, match="layers_per_stage"):
        check_pools("nhd", GQA, Topology(pp=2, layers_per_stage=(3, 1)), 4)


def test_stage_without_a_layer_and_context_parallel_are_refused():
    sparse = Component("kv", (2,), 4, 2, 32, "float32")
    with pytest.raises(ConfigError, match="layers_per_stage"):
        RankPool("nhd", sparse, Topology(pp=2, layers_per_stage=(2, 1)), 0, pages=1, page_size=4)
    with pytest.raises(ConfigError, match="cp"):
        RankPool("nhd", GQA, Topology(cp=2, layers_per_stage=(3,), cp_split=ContextSplit()), 0, pages=1, page_size=4)


def test_bad_tables_and_shards_change_nothing():
    made = Made("nhd")
    pool, table, shard = made.pool, made.table, made.shard
    for bad in ([-1, 0, 1], [0, 1, PAGES], [0, 1, 1], [0, 1], []):
        with pytest.raises(LocalProtocolError):
            pool.write(bad, shard)
        with pytest.raises(LocalProtocolError):
            pool.read(bad, TOKENS)
    for wrong in (shard[:, :, :, :1], shard[:2], shard[:, :1], shard[..., :4], shard[0], shard.astype(np.float64)):
        with pytest.raises(LocalProtocolError):
            pool.write(table, wrong)
    assert pool.untouched() == []


# --- allocator ----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 5), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=30))
def test_no_page_is_ever_held_twice(pages, seed, steps):
    allocator = PageAllocator(pages, seed)
    held = []
    for take, number in steps:
        if take and number > pages - sum(map(len, held)):
            with pytest.raises(ConfigError):
                allocator.take(number)
        elif take:
            held.append(allocator.take(number))
        elif held:
            allocator.free(held.pop(number % len(held)))
        flat = [page for table in held for page in table]
        assert len(set(flat)) == len(flat)
        assert set(flat) <= set(range(pages))
        assert allocator.free_pages + len(flat) == pages


def test_tables_are_scattered_and_seeded():
    tables = [PageAllocator(64, seed).take(16) for seed in range(20)]
    neighbours = [sum(b == a + 1 for a, b in itertools.pairwise(table)) for table in tables]
    assert sum(neighbours) / len(neighbours) < 1
    assert tables[3] == PageAllocator(64, 3).take(16)
    assert len({tuple(table) for table in tables}) == 20


def test_double_free_frees_nothing():
    allocator = PageAllocator(8)
    table = allocator.take(3)
    for bad in ([*table, table[0]], [*table[:2], next(p for p in range(8) if p not in table)]):
        with pytest.raises(LocalProtocolError):
            allocator.free(bad)
        assert allocator.free_pages == 5
    allocator.free(table)
    with pytest.raises(LocalProtocolError):
        allocator.free(table)
    assert sorted(allocator.take(8)) == list(range(8))


# --- cut and assemble ---------------------------------------------------------------------------------------------------


def component_of(layers, kv_heads):
    return ModelSpec.gqa(layers=layers, kv_heads=kv_heads, head_dim=4, itemsize=4, dtype="float32").components[0]


@pytest.mark.parametrize(
    ("kv_heads", "topology", "heads"),
    [
        (4, Topology(tp=2), [[0, 1], [2, 3]]),
        (4, Topology(tp=4, dp=2), [[0, 1], [2, 3], [0, 1], [2, 3]]),
        (4, Topology(tp=2, dp=2), [[0, 1, 2, 3], [0, 1, 2, 3]]),
        (4, Topology(tp=8), [[0], [0], [1], [1], [2], [2], [3], [3]]),
        (2, Topology(tp=8, dp=2), [[0], [0], [1], [1]] * 2),
        (1, Topology(tp=4), [[0]] * 4),
    ],
)
def test_cut_gives_each_rank_its_heads(kv_heads, topology, heads):
    component = component_of(1, kv_heads)
    kv = cells(component, 5)
    for rank, wanted in enumerate(heads):
        shard = cut(kv, component, topology, rank)
        np.testing.assert_array_equal(shard, kv[:, :, :, wanted])
        assert shard.flags.c_contiguous
        assert not np.shares_memory(shard, kv)


def test_cut_gives_each_stage_its_layers():
    component = component_of(10, 2)
    topology = Topology(tp=2, pp=4, layers_per_stage=(3, 3, 2, 2))
    kv = cells(component, 3)
    for stage, layers in enumerate([(0, 1, 2), (3, 4, 5), (6, 7), (8, 9)]):
        for tensor in range(2):
            shard = cut(kv, component, topology, stage * 2 + tensor)
            np.testing.assert_array_equal(shard, kv[list(layers)][:, :, :, [tensor]])


def test_layers_of_a_component_are_positions_in_its_list():
    sparse = Component("kv", (1, 3, 5), 2, 2, 16, "float32")
    topology = Topology(pp=2, layers_per_stage=(4, 2))
    kv = cells(sparse, 3)
    np.testing.assert_array_equal(cut(kv, sparse, topology, 0), kv[:2])
    np.testing.assert_array_equal(cut(kv, sparse, topology, 1), kv[2:])
    pool = RankPool("nhd", sparse, topology, 1, pages=2, page_size=4)
    pool.write([1], kv[2:])
    assert [line.split(" was ")[0] for line in pool.untouched()] == [
        "rank 1 nhd: layer 5 K page 1",
        "rank 1 nhd: layer 5 V page 1",
    ]


TOPOLOGIES = [
    Topology(tp=tp, pp=len(stages), dp=dp, layers_per_stage=stages)
    for tp in (1, 2, 4, 8)
    for dp in (1, 2, 4, 8)
    if dp <= tp
    for stages in ((5,), (3, 2))
]


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_assemble_undoes_cut(kv_heads):
    component = component_of(5, kv_heads)
    kv = cells(component, 6)
    for topology in TOPOLOGIES:
        for replica in range(topology.dp):
            shards = {rank: cut(kv, component, topology, rank) for rank in topology.replica_ranks(replica)}
            whole, differences = assemble(shards, component, topology)
            np.testing.assert_array_equal(whole, kv)
            assert differences == []


def test_assemble_undoes_cut_of_a_latent():
    kv = cells(MLA, 6)
    topology = Topology(tp=4, pp=2, layers_per_stage=(2, 1))
    whole, differences = assemble({rank: cut(kv, MLA, topology, rank) for rank in range(8)}, MLA, topology)
    np.testing.assert_array_equal(whole, kv)
    assert differences == []


@pytest.mark.parametrize("stages", [(1, 3), (3, 1), (1, 1, 2), (2, 1, 1)])
def test_assemble_puts_each_stage_at_its_layers(stages):
    component = component_of(4, 2)
    topology = Topology(tp=2, pp=len(stages), layers_per_stage=stages)
    owner = [stage for stage, layers in enumerate(stages) for _ in range(layers)]
    shards = {
        stage * 2 + head: np.full((stages[stage], 2, 5, 1, 4), 10 * stage + head, np.float32)
        for stage in range(len(stages))
        for head in range(2)
    }
    whole, differences = assemble(dict(reversed(shards.items())), component, topology)
    assert differences == []
    for layer, head in np.ndindex(4, 2):
        assert (whole[layer, :, :, head] == 10 * owner[layer] + head).all()


def test_assemble_names_unequal_copies_of_a_latent_by_its_layer():
    topology = Topology(tp=2, pp=2, layers_per_stage=(2, 1))
    shards = {rank: cut(cells(MLA, 6), MLA, topology, rank) for rank in range(4)}
    shards[3].view(np.uint32)[0, 0, 5, 0, 7] ^= 1
    assert assemble(shards, MLA, topology).differences == [
        "layer 2 latent head 0: rank 3 holds other bytes than rank 2"
    ]


def test_assemble_wants_every_stage():
    topology = Topology(pp=2, layers_per_stage=(2, 1))
    shards = {rank: cut(cells(MLA, 6), MLA, topology, rank) for rank in range(2)}
    for ranks in ([0], [1]):
        with pytest.raises(LocalProtocolError):
            assemble({rank: shards[rank] for rank in ranks}, MLA, topology)
    with pytest.raises(LocalProtocolError):
        assemble({0: shards[1], 1: shards[0]}, MLA, topology)


def test_assemble_names_unequal_copies():
    component = component_of(2, 2)
    topology = Topology(tp=4, layers_per_stage=(2,))
    kv = cells(component, 6)
    shards = {rank: cut(kv, component, topology, rank) for rank in range(4)}
    shards[3].view(np.uint32)[1, 1, 4, 0, 2] ^= 1
    whole, differences = assemble(shards, component, topology)
    assert differences == ["layer 1 V head 1: rank 3 holds other bytes than rank 2"]
    np.testing.assert_array_equal(whole, kv)


def test_assemble_wants_all_ranks_of_one_replica():
    component = component_of(1, 4)
    topology = Topology(tp=4, dp=2)
    kv = cells(component, 6)
    shards = {rank: cut(kv, component, topology, rank) for rank in range(4)}
    for ranks in ([0], [0, 2], [0, 1, 2, 3], []):
        with pytest.raises(LocalProtocolError):
            assemble({rank: shards[rank] for rank in ranks}, component, topology)
    with pytest.raises(LocalProtocolError):
        assemble({2: shards[2], 3: shards[3][:, :, :5]}, component, topology)


def test_cut_refuses_what_is_not_the_model():
    kv = cells(GQA, 6)
    for wrong in (kv[:2], kv[:, :1], kv[:, :, :, :2], kv[0]):
        with pytest.raises(LocalProtocolError):
            cut(wrong, GQA, TP1, 0)
    assert Share.of(GQA, TP1, 0) == (Interval(0, 3), Interval(0, 4))


# --- both sides of a transfer, whatever lies between them ---------------------------------------------------------------

SPLITS = [
    (Topology(pp=2, layers_per_stage=(2, 1)), Topology(tp=2, layers_per_stage=(3,))),
    (Topology(tp=2, layers_per_stage=(3,)), Topology(tp=4, pp=2, dp=2, layers_per_stage=(1, 2))),
    (Topology(tp=4, pp=3, layers_per_stage=(1, 1, 1)), Topology(tp=8, pp=2, layers_per_stage=(2, 1))),
]


def fill(layout, component, topology, replica, table, kv, seed=0):
    """Pools of a replica that hold `kv` in the pages of `table`."""
    pools = {}
    for rank in topology.replica_ranks(replica):
        pages = PAGES * 4 // page_of(layout)
        pools[rank] = RankPool(layout, component, topology, rank, pages=pages, page_size=page_of(layout), seed=seed)
        pools[rank].write(table, cut(kv, component, topology, rank))
    return pools


def table_of(layout, seed):
    return PageAllocator(PAGES * 4 // page_of(layout), seed).take(pages_for(TOKENS, page_of(layout)))


@pytest.mark.parametrize(
    ("source", "destination"),
    [pair for pair in itertools.product(FORMS, FORMS) if len({FORMS[f][1] for f in pair}) == 1],
)
def test_kv_goes_through_the_pools_of_uneven_stages(source, destination):
    (layout, component), (other, _) = FORMS[source], FORMS[destination]
    kv = cells(component, TOKENS)
    expected = fingerprints(kv)
    for prefill, decode in SPLITS:
        table, place = table_of(layout, 1), table_of(other, 2)
        sent = {rank: pool.read(table, TOKENS) for rank, pool in fill(layout, component, prefill, 0, table, kv).items()}
        moved, differences = assemble(sent, component, prefill)
        assert differences == []
        for replica in range(decode.dp):
            pools = fill(other, component, decode, replica, place, moved, seed=1)
            shards = {rank: pool.read(place, TOKENS) for rank, pool in pools.items()}
            arrived, differences = assemble(shards, component, decode)
            np.testing.assert_array_equal(arrived, kv)
            assert differences == []
            for rank, shard in shards.items():
                assert compare(expected, shard, component, decode, rank) == []
                assert alteration_is_seen(expected, shard, component, decode, rank, page=2, page_size=4)
                assert pools[rank].untouched([(place, Interval(0, TOKENS))]) == []


def test_a_stage_in_the_wordof_another_is_seen():
    """Two stages of equal size hold shards of equal shape; only the bytes tell them apart."""
    topology = Topology(pp=2, layers_per_stage=(1, 1))
    for component in (
        component_of(2, 2),
        ModelSpec.mla(layers=2, latent_dim=4, itemsize=4, dtype="float32").components[0],
    ):
        kv = cells(component, 5)
        exchanged = {0: cut(kv, component, topology, 1), 1: cut(kv, component, topology, 0)}
        arrived, _ = assemble(exchanged, component, topology)
        np.testing.assert_array_equal(arrived, kv[::-1])
        for rank, shard in exchanged.items():
            found = compare(fingerprints(kv), shard, component, topology, rank)
            assert len(found) == component.kv_factor * component.kv_heads
            assert all(line.startswith(f"layer {rank} ") for line in found)


def test_one_wrong_head_of_a_late_stage_is_named_by_its_layer():
    topology = Topology(tp=2, pp=2, layers_per_stage=(2, 1))
    kv = cells(GQA, TOKENS)
    wrong = alter_head(cut(kv, GQA, topology, 3), layer=0, kv=1, head=1, page=0, page_size=4)
    assert compare(fingerprints(kv), wrong, GQA, topology, 3) == [
        "layer 2 V head 3 on rank 3 is not what prefill wrote"
    ]


# --- tensors -----------------------------------------------------------------------------------------------------------


class Tensors:
    """The tensor pool of a `Made`, on the CPU, and its shard as a view of a bigger tensor."""

    def __init__(self, made):
        torch = pytest.importorskip("torch")
        sizes = {"pages": made.pool.pages, "page_size": made.pool.page_size, "seed": 3}
        self.pool = TensorPool(made.layout, made.component, made.topology, made.rank, device="cpu", **sizes)
        whole = torch.from_numpy(cells(made.component, TOKENS))
        self.shard = view_of(whole, made.component, made.topology, made.rank)

    def assert_as(self, pool):
        for tensor, array in zip(self.pool.buffers, pool.buffers, strict=True):
            np.testing.assert_array_equal(tensor.numpy().view(np.uint32), array.view(np.uint32))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", PLACES)
class TestTensorPool:
    def test_it_writes_and_reads_as_the_pool_of_arrays(self, form, place):
        made = Made(form, place)
        tensors = Tensors(made)
        tensors.assert_as(made.pool)
        for start, end in ((0, 3), (3, 4), (4, TOKENS)):  # inside a page, to its end, over several
            made.pool.write(made.table, made.shard[:, :, start:end], start=start)
            tensors.pool.write(made.table, tensors.shard[:, :, start:end], start=start)
            tensors.assert_as(made.pool)
        read = tensors.pool.read(made.table, 6, start=3)
        assert isinstance(read, np.ndarray)
        np.testing.assert_array_equal(read, made.shard[:, :, 3:9])
        assert tensors.pool.untouched([(made.table, Interval(0, TOKENS))]) == []

    def test_it_says_what_was_touched_in_the_same_words(self, form, place):
        made = Made(form, place).filled()
        tensors = Tensors(made)
        tensors.pool.write(made.table, tensors.shard)
        found = tensors.pool.untouched([(made.table, Interval(1, TOKENS))])
        assert found
        assert found == made.pool.untouched([(made.table, Interval(1, TOKENS))])

    def test_a_copy_has_tensors_of_its_own(self, form, place):
        made = Made(form, place).filled()
        tensors = Tensors(made)
        twin = tensors.pool.copy()
        tensors.pool.write(made.table, tensors.shard)
        assert twin.untouched() == []
        assert tensors.pool.untouched() != []

    def test_wrong_shards_and_tables_are_refused_before_anything_is_written(self, form, place):
        made = Made(form, place)
        tensors = Tensors(made)
        for table, shard in (
            (made.table, tensors.shard.double()),
            (made.table, tensors.shard[..., :-1]),
            (made.table[:-1], tensors.shard),
            ([*made.table[:-1], made.table[0]], tensors.shard),
            ([-1, *made.table[1:]], tensors.shard),
        ):
            with pytest.raises(LocalProtocolError):
                tensors.pool.write(table, shard)
        assert tensors.pool.untouched() == []
