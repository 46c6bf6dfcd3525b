"""A simulation that carries out what the planner answers, and an oracle that knows the answer otherwise.

The oracle uses none of the planner's arithmetic: ranks come from a NumPy grid, heads and layers from `array_split`,
strides from shaped NumPy arrays, owned positions from a list, and the sender from the rule read word by word. A pool's
cell is `truth[layer, kv, head, token, byte]`; all other bytes are poison, so that whatever is read or written beside the
cells of the request shows.
"""

from __future__ import annotations

import binascii
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rdma_kv.layout import KvLayout, Origin
from rdma_kv.planner import LinkPlan, Route, token_offsets
from rdma_kv.topology import Component, ModelSpec, TieBreak, Topology
from rdma_kv.types import Interval

SRC_POISON = 255  # truth is below 200, so poison that was moved is seen
DST_POISON = 254


# --- questions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PoolKind:
    """How one side stores one component."""

    layout: str
    page_size: int


@dataclass(frozen=True)
class Scenario:
    """One request from one prefill replica to one decode replica, with every page of it."""

    model: ModelSpec
    prefill: Topology
    decode: Topology
    prefill_replica: int
    decode_replica: int
    src_pools: tuple[PoolKind, ...]
    dst_pools: tuple[PoolKind, ...]
    total_tokens: int
    within: Interval
    chunk_bytes: int
    tie_break: TieBreak = TieBreak.REPLICA
    key: str = "request"
    token_cuts: tuple[int, ...] = ()
    layer_cuts: tuple[int, ...] = ()
    seed: int = 0

    def route(self) -> Route:
        return Route(
            self.model,
            self.prefill,
            self.decode,
            self.prefill_replica,
            self.decode_replica,
            tie_break=self.tie_break,
            key=self.key,
        )

    def link(self, route: Route) -> LinkPlan:
        """All moves over one link."""
        return LinkPlan(
            route=route,
            moves=tuple(range(len(route.moves))),
            prefill_pages=tuple(kind.page_size for kind in self.src_pools),
            decode_pages=tuple(kind.page_size for kind in self.dst_pools),
            chunk_bytes=self.chunk_bytes,
            total_tokens=(self.total_tokens,) * len(self.model.components),
        )


def simple(
    model: ModelSpec,
    prefill: Topology,
    decode: Topology,
    *,
    replicas: tuple[int, int] = (0, 0),
    src: PoolKind | None = None,
    dst: PoolKind | None = None,
    tokens: int = 11,
    start: int = 0,
) -> Scenario:
    """A scenario of one component, written down by hand."""
    name = "mla" if model.components[0].replicated else "nhd"
    within = Interval(start, tokens)
    return Scenario(
        model=model,
        prefill=prefill,
        decode=decode,
        prefill_replica=replicas[0],
        decode_replica=replicas[1],
        src_pools=(src or PoolKind(name, 4),),
        dst_pools=(dst or PoolKind(name, 4),),
        total_tokens=tokens,
        within=within,
        chunk_bytes=1 << 20,
    )


# --- pools -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PoolShape:
    layers: int
    kv: int
    pages: int
    page_size: int
    heads: int
    row_bytes: int


class Pool:
    """Memory of one rank for one component, seen by NumPy.

    Attributes:
        buffers: uint8 arrays, the memory itself.
        planes: `[layer][kv]` views of shape `[pages, page_size, heads, row_bytes]` on it, made by reshaping.
        layout: what rdma-kv is told about it.
    """

    def __init__(self, name: str, shape: PoolShape, rng: np.random.Generator) -> None:
        make = {"custom": _custom}.get(name) or (lambda shape, rng: _named(name, shape))
        self.layout, self.buffers, self.planes = make(shape, rng)

    def fill(self, value: int) -> None:
        for buffer in self.buffers:
            buffer[...] = value


Built = tuple[KvLayout, list[np.ndarray], list[list[np.ndarray]]]


def _named(name: str, s: PoolShape) -> Built:
    """The engines' shapes, as their tensors have them."""
    common = {"layers": s.layers, "row_bytes": s.row_bytes}
    paged = {**common, "pages": s.pages, "page_size": s.page_size}
    every = range(s.layers)
    if name == "sglang":
        shape = (s.pages * s.page_size, s.heads, s.row_bytes)
        tensors = [np.zeros(shape, np.uint8) for _ in range(2 * s.layers)]
        planes = [[tensors[kv * s.layers + layer] for kv in range(2)] for layer in every]
        planes = [[plane.reshape(s.pages, s.page_size, s.heads, s.row_bytes) for plane in pair] for pair in planes]
        return KvLayout.sglang(**paged, heads=s.heads), [tensor.reshape(-1) for tensor in tensors], planes
    if name == "nhd":
        tensor = np.zeros((s.layers, s.kv, s.pages, s.page_size, s.heads, s.row_bytes), np.uint8)
        planes = [[tensor[layer, kv] for kv in range(s.kv)] for layer in every]
        layout = KvLayout.nhd(**paged, heads=s.heads, kv=s.kv)
    elif name == "hnd":
        tensor = np.zeros((s.layers, s.kv, s.pages, s.heads, s.page_size, s.row_bytes), np.uint8)
        planes = [[tensor[layer, kv].transpose(0, 2, 1, 3) for kv in range(s.kv)] for layer in every]
        layout = KvLayout.hnd(**paged, heads=s.heads, kv=s.kv)
    elif name == "mla":
        tensor = np.zeros((s.layers, s.pages, s.page_size, s.row_bytes), np.uint8)
        planes = [[tensor[layer][:, :, None]] for layer in every]
        layout = KvLayout.mla(**paged)
    elif name == "lightllm":
        tensor = np.zeros((s.layers, s.pages, 2 * s.heads, s.row_bytes), np.uint8)
        halves = [slice(0, s.heads), slice(s.heads, None)]
        planes = [[tensor[layer][:, None, half] for half in halves] for layer in every]
        layout = KvLayout.lightllm(**common, slots=s.pages, heads=s.heads)
    else:
        tensor = np.zeros((s.pages, s.layers, s.kv, s.heads, s.page_size, s.row_bytes), np.uint8)
        planes = [[tensor[:, layer, kv].transpose(0, 2, 1, 3) for kv in range(s.kv)] for layer in every]
        layout = KvLayout.trtllm(**paged, heads=s.heads, kv=s.kv)
    return layout, [tensor.reshape(-1)], planes


def _custom(s: PoolShape, rng: np.random.Generator) -> Built:
    """Any order of page, token and head, with gaps after each; planes here and there in one or two buffers."""
    order = rng.permutation(3)
    sizes = np.array([s.pages, s.page_size, s.heads])[order]
    padded = (*(sizes + rng.integers(0, 3, 3)), s.row_bytes + int(rng.integers(0, 3)))
    span = int(np.prod(padded))
    buffers: list[np.ndarray] = [np.zeros(0, np.uint8) for _ in range(int(rng.integers(1, 3)))]
    places = []
    for number in rng.permutation(s.layers * s.kv):
        index = int(rng.integers(0, len(buffers)))
        offset = len(buffers[index]) + int(rng.integers(0, 9))
        buffers[index] = np.zeros(offset + span, np.uint8)
        places.append((int(number), index, offset))
    buffers = [buffer if buffer.size else np.zeros(1, np.uint8) for buffer in buffers]
    planes: list[list[np.ndarray]] = [[np.empty(0)] * s.kv for _ in range(s.layers)]
    origins = [[Origin(0, 0)] * s.kv for _ in range(s.layers)]
    for number, index, offset in places:
        block = buffers[index][offset : offset + span].reshape(padded)
        block = block[: sizes[0], : sizes[1], : sizes[2], : s.row_bytes]
        planes[number // s.kv][number % s.kv] = block.transpose(*np.argsort(order), 3)
        origins[number // s.kv][number % s.kv] = Origin(index, offset)
    strides = planes[0][0].strides
    return (
        KvLayout(
            origins=tuple(map(tuple, origins)),
            num_pages=s.pages,
            page_size=s.page_size,
            heads=s.heads,
            row_bytes=s.row_bytes,
            page_stride=strides[0],
            token_stride=strides[1],
            head_stride=strides[2],
        ),
        buffers,
        planes,
    )


# --- the oracle --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """What one rank of the replica holds of one component, worked out without the planner."""

    layers: list[int]  # positions in the component's layer list
    heads: list[int]
    tokens: list[int]


def replica_grid(topology: Topology, replica: int) -> np.ndarray:
    """Ranks of a replica, `[stage, context, attention rank]`."""
    grid = np.arange(topology.pp * topology.cp * topology.tp)
    return grid.reshape(topology.pp, topology.cp, topology.dp, -1)[:, :, replica]


def oracle_place(
    component: Component, topology: Topology, where: tuple[int, int, int], page_size: int, total: int
) -> Place:
    stage, context, tensor = where
    tp = topology.tp // topology.dp
    stages = np.split(np.arange(sum(topology.layers_per_stage)), np.cumsum(topology.layers_per_stage)[:-1])
    layers = [i for i, layer in enumerate(component.layers) if layer in stages[stage]]
    if component.replicated:
        heads = [0]
    elif tp <= component.kv_heads:
        heads = np.array_split(np.arange(component.kv_heads), tp)[tensor].tolist()
    else:
        heads = [int(np.repeat(np.arange(component.kv_heads), tp // component.kv_heads)[tensor])]
    every = topology.cp_split.interleave
    if every:
        tokens = [t for t in range(total) if (t // every) % topology.cp == context]
    else:
        pages = np.array_split(np.arange(-(-total // page_size)), topology.cp)[context]
        tokens = [t for t in range(total) if t // page_size in pages]
    return Place(layers, heads, tokens)


def oracle_places(
    component: Component, topology: Topology, replica: int, page_size: int, total: int
) -> dict[int, tuple[Place, tuple[int, int]]]:
    """Every rank of a replica: what it holds, and its (stage, context)."""
    return {
        int(rank): (oracle_place(component, topology, where, page_size, total), where[:2])
        for where, rank in np.ndenumerate(replica_grid(topology, replica))
    }


def oracle_senders(s: Scenario, number: int) -> set[tuple[int, int, int, int]]:
    """(src, dst, layer, head) of one component by the routing rule, read word by word."""
    component = s.model.components[number]
    sides = [
        oracle_places(component, topology, replica, kinds[number].page_size, s.total_tokens)
        for topology, replica, kinds in (
            (s.prefill, s.prefill_replica, s.src_pools),
            (s.decode, s.decode_replica, s.dst_pools),
        )
    ]
    k = binascii.crc32(s.key.encode()) if s.tie_break is TieBreak.KEY else s.decode_replica
    found = set()
    for dst, (need, place) in sides[1].items():
        for head in need.heads:
            same = sorted(r for r, (other, at) in sides[1].items() if at == place and head in other.heads)
            j, m = same.index(dst), len(same)
            for at in {at for _, at in sides[0].values()}:
                have = sorted(r for r, (other, where) in sides[0].items() if where == at and head in other.heads)
                n = len(have)
                src = have[j * n // m + k % max(1, n // m)]
                found |= {(src, dst, layer, head) for layer in need.layers if layer in sides[0][src][0].layers}
    return found


class Side:
    """All pools of one replica for one component, with the request's page tables."""

    def __init__(self, s: Scenario, number: int, *, sends: bool) -> None:
        topology = s.prefill if sends else s.decode
        replica = s.prefill_replica if sends else s.decode_replica
        kind = (s.src_pools if sends else s.dst_pools)[number]
        rng = np.random.default_rng([s.seed, number, int(sends)])
        component = s.model.components[number]
        self.places: dict[int, Place] = {}
        self.pools: dict[int, Pool] = {}
        self.tables: dict[int, np.ndarray] = {}
        found = oracle_places(component, topology, replica, kind.page_size, s.total_tokens)
        for rank, (place, _) in found.items():
            if not place.layers:
                continue
            needed = -(-len(place.tokens) // kind.page_size)
            pages = needed + 1 + int(rng.integers(0, 3))
            shape = PoolShape(
                len(place.layers), component.kv_factor, pages, kind.page_size, len(place.heads), component.row_bytes
            )
            self.places[rank] = place
            self.pools[rank] = Pool(kind.layout, shape, rng)
            self.tables[rank] = rng.permutation(pages)[: needed + int(rng.integers(0, 2))].astype(np.int64)

    def put(self, rank: int, truth: np.ndarray, tokens: Interval) -> None:
        """Write the cells of `tokens` that `rank` holds."""
        place, pool, table = self.places[rank], self.pools[rank], self.tables[rank]
        page_size = pool.layout.page_size
        kept = [i for i, t in enumerate(place.tokens) if tokens.start <= t < tokens.end]
        pages = table[[i // page_size for i in kept]]
        slots = np.array([i % page_size for i in kept], dtype=np.int64)
        positions = np.array([place.tokens[i] for i in kept], dtype=np.int64)
        for i, layer in enumerate(place.layers):
            for kv in range(truth.shape[1]):
                cells = truth[layer, kv][place.heads][:, positions]  # [head, token, row]
                pool.planes[i][kv][pages, slots] = cells.transpose(1, 0, 2)


# --- the check ---------------------------------------------------------------------------------------------------------


def check(s: Scenario) -> None:
    """Carry the plan out and compare it with the oracle.

    Raises:
        AssertionError: another set of senders than the rule's, a byte of the destination that is wrong, written twice
            or not at all, a byte beside the request that was touched, or boxes that do not tile.
    """
    route = s.route()
    link = s.link(route)
    for number, component in enumerate(s.model.components):
        check_senders(s, route, number)
        src = Side(s, number, sends=True)
        dst = Side(s, number, sends=False)
        rng = np.random.default_rng(s.seed)
        shape = (len(component.layers), component.kv_factor, component.kv_heads, s.total_tokens, component.row_bytes)
        truth = rng.integers(0, 200, shape, dtype=np.uint8)
        for rank, pool in src.pools.items():
            pool.fill(SRC_POISON)
            src.put(rank, truth, Interval(0, s.total_tokens))
        for pool in dst.pools.values():
            pool.fill(DST_POISON)
        written = _carry_out(s, link, number, src, dst)
        _compare(s, dst, truth, written)


def check_senders(s: Scenario, route: Route, number: int) -> None:
    """The moves are those of the rule, none is there twice, and who is expected is who sends."""
    moves = [move for move in route.moves if move.component == number]
    cells = Counter(
        (move.src, move.dst, layer, head)
        for move in moves
        for layer in range(move.layers.start, move.layers.end)
        for head in range(move.heads.start, move.heads.end)
    )
    expected = oracle_senders(s, number)
    assert set(cells) == expected
    assert set(cells.values()) <= {1}
    assert moves == sorted(moves)
    sources = {dst: {src for src, to, _, _ in expected if to == dst} for _, dst, _, _ in expected}
    for dst, wanted in sources.items():
        assert {move.src for move in moves if move.dst == dst} == wanted


def _carry_out(s: Scenario, link: LinkPlan, number: int, src: Side, dst: Side) -> dict[int, list[np.ndarray]]:
    """Copy every box byte by byte; how often each destination byte was written, by rank and buffer."""
    written = {rank: [np.zeros(b.size, np.int64) for b in pool.buffers] for rank, pool in dst.pools.items()}
    tilings = link.tilings((s.within,) * len(s.model.components))
    for index, move in enumerate(link.route.moves):
        if move.component != number:
            continue
        tiling = tilings.get(index)
        for layers, tokens in _pushes(s, number):
            for box in link.cut(index, layers, tokens):
                assert link.box_bytes(box) <= s.chunk_bytes
                assert tiling is not None, "a box of a move that is said to carry nothing"
                assert tiling.add(box.layers, box.tokens, link.carried(index, box.tokens)), "boxes do not tile"
                assert not tiling.add(box.layers, box.tokens), "a box was taken twice"
                _copy(link, index, box.layers, box.tokens, src, dst, written)
        assert tiling is None or tiling.complete
    return written


def _pushes(s: Scenario, number: int) -> list[tuple[Interval, Interval]]:
    """The request in pieces, as a producer hands it over: a grid of layers and tokens."""
    layers = len(s.model.components[number].layers)
    grid = [
        sorted({outer.start, outer.end, *(c for c in cuts if outer.start < c < outer.end)})
        for outer, cuts in ((Interval(0, layers), s.layer_cuts), (s.within, s.token_cuts))
    ]
    rows, columns = ([Interval(a, b) for a, b in pairwise(ends)] for ends in grid)
    return [(row, column) for column in columns for row in rows]


def _copy(
    link: LinkPlan,
    index: int,
    layers: Interval,
    tokens: Interval,
    src: Side,
    dst: Side,
    written: dict[int, list[np.ndarray]],
) -> None:
    move = link.route.moves[index]
    positions = link.positions(index, tokens)
    shares = (link.src_share(index), link.dst_share(index))
    ends = []
    for side, rank, share in ((src, move.src, shares[0]), (dst, move.dst, shares[1])):
        place, layout = side.places[rank], side.pools[rank].layout
        assert set(range(move.heads.start, move.heads.end)) <= set(place.heads), "heads that the rank does not hold"
        assert set(range(layers.start, layers.end)) <= set(place.layers), "layers that the rank does not hold"
        local = share.local(positions)
        assert local.size == 0 or 0 <= local.min() <= local.max() < side.tables[rank].size * layout.page_size
        first_head = move.heads.start - place.heads[0]
        offsets = token_offsets(layout, side.tables[rank], local, first_head)
        heads = np.arange(move.heads.size) * layout.head_stride
        cells = offsets[:, None, None] + heads[:, None] + np.arange(layout.row_bytes)
        ends.append((side.pools[rank], layers.start - place.layers[0], cells))
    (from_pool, from_layer, from_cells), (to_pool, to_layer, to_cells) = ends
    for layer in range(layers.size):
        for kv in range(to_pool.layout.kv_factor):
            a = from_pool.layout.origins[from_layer + layer][kv]
            b = to_pool.layout.origins[to_layer + layer][kv]
            to_pool.buffers[b.buffer][b.offset + to_cells] = from_pool.buffers[a.buffer][a.offset + from_cells]
            np.add.at(written[move.dst][b.buffer], b.offset + to_cells, 1)


def _compare(s: Scenario, dst: Side, truth: np.ndarray, written: dict[int, list[np.ndarray]]) -> None:
    for rank, pool in dst.pools.items():
        got = [buffer.copy() for buffer in pool.buffers]
        pool.fill(DST_POISON)
        dst.put(rank, truth, s.within)
        for number, (found, expected, times) in enumerate(zip(got, pool.buffers, written[rank], strict=True)):
            assert np.array_equal(found, expected), f"decode rank {rank}, buffer {number}: wrong bytes"
            assert np.array_equal(times, expected != DST_POISON), f"decode rank {rank}, buffer {number}: not once each"
