"""Pools, allocator, cut and assemble, against literal indexing and against the strides that a pool claims."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rdma_kv.demo.pools import LAYOUTS, PageAllocator, RankPool, Share, assemble, cut, pages_for
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


# One engine's tensor each, indexed by hand: the row of (layer, kv, page, offset, head). `h` heads, `p` tokens a page.
BY_HAND = {
    "nhd": lambda b, layer, kv, page, off, head, h, p: b[0][layer][kv][page][off][head],
    "hnd": lambda b, layer, kv, page, off, head, h, p: b[0][layer][kv][page][head][off],
    "lightllm": lambda b, layer, kv, page, off, head, h, p: b[0][layer][page][kv * h + head],
    "sglang": lambda b, layer, kv, page, off, head, h, p: b[layer + 3 * kv][page * p + off][head],
    "trtllm": lambda b, layer, kv, page, off, head, h, p: b[0][page][layer][kv][head][off],
    "mla": lambda b, layer, kv, page, off, head, h, p: b[0][layer][page][off],
}
SHAPES = {
    "nhd": [(3, 2, 7, 4, 2, 8)],
    "hnd": [(3, 2, 7, 2, 4, 8)],
    "lightllm": [(3, 28, 4, 8)],
    "sglang": [(28, 2, 8)] * 6,
    "trtllm": [(7, 3, 2, 2, 4, 8)],
    "mla": [(3, 7, 4, 8)],
}


def make(layout, rank=1, seed=3):
    """(pool of one rank, component, topology, page table of `TOKENS` positions in scattered order)."""
    component, page = (MLA, 4) if layout == "mla" else (GQA, 1 if layout == "lightllm" else 4)
    pages = PAGES * 4 // page
    pool = RankPool(layout, component, TP2, rank, pages=pages, page_size=page, seed=seed)
    table = PageAllocator(pages, seed).take(pages_for(TOKENS, page))
    return pool, component, table


@pytest.mark.parametrize("layout", LAYOUTS)
class TestEveryLayout:
    def test_buffers_have_the_engines_shape(self, layout):
        pool, _, _ = make(layout)
        assert [buffer.shape for buffer in pool.buffers] == SHAPES[layout]
        assert all(buffer.flags.c_contiguous and buffer.dtype == np.float32 for buffer in pool.buffers)
        assert len({buffer.ctypes.data for buffer in pool.buffers}) == len(pool.buffers)

    def test_write_lands_where_the_tensor_is_indexed_by_hand(self, layout):
        pool, component, table = make(layout)
        shard = cut(cells(component, TOKENS), component, TP2, 1)
        pool.write(table, shard)
        heads, size = shard.shape[3], pool.page_size
        for layer, kv, token, head in np.ndindex(shard.shape[:4]):
            row = BY_HAND[layout](pool.buffers, layer, kv, table[token // size], token % size, head, heads, size)
            np.testing.assert_array_equal(row, shard[layer, kv, token, head])

    def test_write_lands_where_the_claimed_strides_point(self, layout):
        pool, component, table = make(layout)
        shard = cut(cells(component, TOKENS), component, TP2, 1)
        pool.write(table, shard)
        claimed = pool.layout
        assert claimed.name == layout
        assert list(claimed.required_bytes()) == [buffer.nbytes for buffer in pool.buffers]
        raw = [buffer.tobytes() for buffer in pool.buffers]
        for layer, kv, token, head in np.ndindex(shard.shape[:4]):
            buffer, offset = claimed.origins[layer][kv]
            offset += table[token // pool.page_size] * claimed.page_stride
            offset += token % pool.page_size * claimed.token_stride + head * claimed.head_stride
            assert raw[buffer][offset : offset + claimed.row_bytes] == shard[layer, kv, token, head].tobytes()

    def test_read_gives_back_any_range(self, layout):
        pool, component, table = make(layout)
        shard = cut(cells(component, TOKENS), component, TP2, 1)
        pool.write(table, shard)
        for start, end in [(0, TOKENS), (0, 4), (3, 9), (10, 11), (5, 5)]:
            got = pool.read(table, end - start, start=start)
            np.testing.assert_array_equal(got, shard[:, :, start:end])
        got[:] = 0
        np.testing.assert_array_equal(pool.read(table, TOKENS), shard)

    def test_range_writes_touch_nothing_else(self, layout):
        pool, component, table = make(layout)
        shard = cut(cells(component, TOKENS), component, TP2, 1)
        pool.write(table, shard[:, :, 5:9], start=5)
        np.testing.assert_array_equal(pool.read(table, 4, start=5), shard[:, :, 5:9])
        fresh, _, _ = make(layout)
        np.testing.assert_array_equal(pool.read(table, 5), fresh.read(table, 5))
        assert pool.untouched([(table, Interval(5, 9))]) == []
        assert len(pool.untouched([(table, Interval(6, 9))])) == 3 * component.kv_factor
        assert len(pool.untouched([(table, Interval(5, 8))])) == 3 * component.kv_factor

    def test_untouched_names_what_was_not_meant(self, layout):
        pool, component, table = make(layout)
        assert pool.untouched() == []
        pool.write(table, cut(cells(component, TOKENS), component, TP2, 1))
        assert pool.untouched([(table, Interval(0, TOKENS))]) == []
        last, offset = table[(TOKENS - 1) // pool.page_size], (TOKENS - 1) % pool.page_size
        found = pool.untouched([(table, Interval(0, TOKENS - 1))])
        heads, planes = ([0], ["latent"]) if layout == "mla" else ([2, 3], ["K", "V"])
        assert found == [
            f"rank 1 {layout}: layer {layer} {plane} page {last} was touched at offsets [{offset}] heads {heads}"
            for layer in range(3)
            for plane in planes
        ]

    def test_every_flipped_bit_is_seen(self, layout):
        pool, component, table = make(layout)
        pool.write(table, cut(cells(component, TOKENS), component, TP2, 1))
        meant = [(table, Interval(0, TOKENS))]
        words = [buffer.reshape(-1).view(np.uint32) for buffer in pool.buffers]
        written = [(buffer < 0).reshape(-1) for buffer in pool.buffers]  # cells are negative, the pattern is not
        rng = np.random.default_rng(0)
        for _ in range(60):
            which = int(rng.integers(len(words)))
            place = int(rng.integers(words[which].size))
            words[which][place] ^= np.uint32(1)
            assert len(pool.untouched(meant)) == (0 if written[which][place] else 1)
            words[which][place] ^= np.uint32(1)
        assert pool.untouched(meant) == []

    def test_pattern_is_recognisable(self, layout):
        pool, _, _ = make(layout)
        whole = np.concatenate([buffer.reshape(-1) for buffer in pool.buffers])
        assert whole.min() >= 64
        assert whole.max() < 128
        other_rank, other_seed = make(layout, rank=0)[0], make(layout, seed=4)[0]
        for ours, theirs in itertools.chain(
            zip(pool.buffers, other_rank.buffers, strict=True), zip(pool.buffers, other_seed.buffers, strict=True)
        ):
            assert (ours != theirs).mean() > 0.99
        pages = {pool.read([page], pool.page_size).tobytes() for page in range(pool.pages)}
        assert len(pages) == pool.pages

    def test_copy_is_apart(self, layout):
        pool, component, table = make(layout)
        shard = cut(cells(component, TOKENS), component, TP2, 1)
        pool.write(table, shard)
        twin = pool.copy()
        twin.write(table, -shard)
        np.testing.assert_array_equal(pool.read(table, TOKENS), shard)
        np.testing.assert_array_equal(twin.read(table, TOKENS), -shard)
        assert twin.untouched([(table, Interval(0, TOKENS))]) == []


def test_pattern_does_not_repeat_by_page_in_a_large_pool():
    component = ModelSpec.gqa(layers=1, kv_heads=4, head_dim=32, itemsize=4, dtype="float32").components[0]
    pool = RankPool("nhd", component, Topology(), 0, pages=256, page_size=16)
    assert pool.buffers[0].size > 4 * 65_537
    assert len({pool.read([page], 16).tobytes() for page in range(256)}) == 256


def test_nan_is_a_touch_and_a_value():
    pool, _, table = make("hnd")
    shard = np.full((3, 2, TOKENS, 2, DIM), np.nan, np.float32)
    pool.write(table, shard)
    assert pool.untouched([(table, Interval(0, TOKENS))]) == []
    assert pool.untouched()
    assert pool.read(table, TOKENS).tobytes() == shard.tobytes()


def test_latent_fits_the_one_plane_forms_of_vllm_and_trtllm():
    kv = cells(MLA, TOKENS)
    for layout in ("nhd", "hnd", "trtllm", "mla"):
        pool = RankPool(layout, MLA, TP2, 0, pages=4, page_size=4)
        pool.write([3, 0, 2], kv)
        np.testing.assert_array_equal(pool.read([3, 0, 2], TOKENS), kv)
        assert list(pool.layout.required_bytes()) == [pool.buffers[0].nbytes]


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


def test_stage_without_a_layer_and_context_parallel_are_refused():
    sparse = Component("kv", (2,), 4, 2, 32, "float32")
    with pytest.raises(ConfigError, match="layers_per_stage"):
        RankPool("nhd", sparse, Topology(pp=2, layers_per_stage=(2, 1)), 0, pages=1, page_size=4)
    with pytest.raises(ConfigError, match="cp"):
        RankPool("nhd", GQA, Topology(cp=2, layers_per_stage=(3,), cp_split=ContextSplit()), 0, pages=1, page_size=4)


def test_bad_tables_and_shards_change_nothing():
    pool, _, table = make("nhd")
    shard = cut(cells(GQA, TOKENS), GQA, TP2, 1)
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
