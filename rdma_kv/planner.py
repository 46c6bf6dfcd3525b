"""Who sends what to whom, and where each byte lies: the routing rule and all byte arithmetic.

Both sides of a transfer call these functions with the same arguments and get the same answer; nothing here waits or
keeps state. The words are: a *route* is the list of moves of one (prefill replica, decode replica); a *move* is (src
rank, dst rank, layers, heads) of one component; a *box* is what one WRITE carries of a move: a layer interval and a
token interval. Inside a box the bytes are in the canonical order `[layer][kv][token][head][row]`.

The routing rule. For one pair of stages, one pair of context ranks, one decode rank and one head, let C be the ranks of
the prefill replica that hold the head, ascending, n of them, M the ranks of the decode replica that need it, m of them,
and j the decode rank's place in M. The sender is `C[j*n//m + k % max(1, n//m)]`, k being the decode replica's index (so
decode DP rank g of an MLA prefill without DP asks rank g mod TP) or, by option, crc32 of the transfer key.
"""

from __future__ import annotations

import hashlib
import zlib
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rdma_kv.errors import ConfigError
from rdma_kv.layout import KvLayout
from rdma_kv.topology import Component, ModelSpec, TieBreak, Topology
from rdma_kv.types import Interval

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

_PREFERRED_BOX_TOKENS = 64  # a box keeps at least this many tokens together before it gives up layers


class Move(NamedTuple):
    """`heads` of `layers` of one component go from rank `src` of prefill to rank `dst` of decode.

    `component` is the position in `ModelSpec.components`; `layers` are positions in that component's layer list;
    `heads` are global head numbers.
    """

    component: int
    src: int
    dst: int
    layers: Interval
    heads: Interval


class Box(NamedTuple):
    """One chunk of a move: position of the move in its route, layers, token positions."""

    move: int
    layers: Interval
    tokens: Interval


# --- routing -----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def check_pair(model: ModelSpec, prefill: Topology, decode: Topology) -> None:
    """Raises ConfigError, naming the field, where KV cannot go from `prefill` to `decode`."""
    model.check_topology(prefill)
    model.check_topology(decode)
    if prefill.num_layers != decode.num_layers:
        raise ConfigError(
            "layers_per_stage",
            f"prefill stages hold {prefill.num_layers} layers, decode stages {decode.num_layers}; make them equal",
        )
    p, d = prefill.attention_tp, decode.attention_tp
    if p % d and d % p:
        raise ConfigError("tp", f"attention TP (tp // dp) {p} of prefill and {d} of decode: one must divide the other")
    for component in model.components:
        rigid = "a state without tokens" if not component.has_tokens else "an opaque page"
        if not component.has_tokens or component.opaque_page_tokens:
            if p != d or prefill.cp > 1 or decode.cp > 1:
                text = f"{rigid} needs equal attention TP and cp=1, not {p} against {d}"
                raise ConfigError(f"component {component.name}", text)
            if component.opaque_page_tokens and not component.replicated and component.kv_heads != p:
                text = f"an opaque page is one rank's: kv_heads must be the attention TP {p}, not {component.kv_heads}"
                raise ConfigError(f"component {component.name}", text)


def _head_moves(
    kv_heads: int, replicated: bool, prefill_tp: int, decode_tp: int, tie_break: int
) -> list[tuple[int, int, Interval]]:
    """The rule inside one pair of attention TP groups: (src attention rank, dst attention rank, heads), sorted."""

    def holders(head: int, tp: int) -> range:
        if replicated:
            return range(tp)
        first = head * tp // kv_heads
        return range(first, first + max(1, tp // kv_heads))

    spans: dict[tuple[int, int], list[Interval]] = {}
    for head in range(kv_heads):
        have, need = holders(head, prefill_tp), holders(head, decode_tp)
        n, m = len(have), len(need)
        for j, dst in enumerate(need):
            src = have[j * n // m + tie_break % max(1, n // m)]
            joined = spans.setdefault((src, dst), [])
            if joined and joined[-1].end == head:
                joined[-1] = Interval(joined[-1].start, head + 1)
            else:
                joined.append(Interval(head, head + 1))
    return [(src, dst, heads) for (src, dst), found in sorted(spans.items()) for heads in found]


def _stages(component: Component, topology: Topology) -> list[Interval]:
    """The component's layers of each stage."""
    ends = [0, *accumulate(topology.layers_per_stage)]
    return [component.layers_within(Interval(start, end)) for start, end in pairwise(ends)]


def _stage_overlaps(src: list[Interval], dst: list[Interval]) -> list[tuple[int, int, Interval]]:
    """(src stage, dst stage, common layers) of every pair of stages that have some; both lists ascend."""
    overlaps = []
    i = j = 0
    while i < len(src) and j < len(dst):
        layers = src[i] & dst[j]
        if layers.size:
            overlaps.append((i, j, layers))
        if src[i].end <= dst[j].end:
            i += 1
        else:
            j += 1
    return overlaps


def _tie_break_classes(component: Component, prefill: Topology, decode: Topology) -> int:
    """max(1, n//m) of the rule, one number for all heads: only k modulo it matters."""
    return max(1, component.holders_of_a_head(prefill.attention_tp) // component.holders_of_a_head(decode.attention_tp))


@lru_cache(maxsize=256)
def _pattern(
    component: Component, prefill: Topology, decode: Topology, tie_break: int
) -> tuple[tuple[int, int, Interval, Interval], ...]:
    """Moves between replicas 0 and 0, sorted. Those of other replicas are the same, all ranks shifted by one amount."""
    heads = _head_moves(component.kv_heads, component.replicated, prefill.attention_tp, decode.attention_tp, tie_break)
    return tuple(
        sorted(
            (src_base + a, dst_base + b, layers, h)
            for src_stage, dst_stage, layers in _stage_overlaps(_stages(component, prefill), _stages(component, decode))
            for src_base in (prefill.rank(src_stage, context, 0) for context in range(prefill.cp))
            for dst_base in (decode.rank(dst_stage, context, 0) for context in range(decode.cp))
            for a, b, h in heads
        )
    )


@dataclass(frozen=True)
class Route:
    """Everything that both sides derive for one (prefill replica, decode replica) and, by option, one key.

    Raises:
        ConfigError: the pair cannot exchange KV, or a replica does not exist.
    """

    model: ModelSpec
    prefill: Topology
    decode: Topology
    prefill_replica: int
    decode_replica: int
    tie_break: TieBreak = TieBreak.REPLICA
    key: str = ""

    def __post_init__(self) -> None:
        check_pair(self.model, self.prefill, self.decode)
        self.prefill.check_replica(self.prefill_replica)
        self.decode.check_replica(self.decode_replica)

    @property
    def tie_break_index(self) -> int:
        """k of the rule."""
        return zlib.crc32(self.key.encode()) if self.tie_break is TieBreak.KEY else self.decode_replica

    @cached_property
    def moves(self) -> tuple[Move, ...]:
        """All moves of all components, component by component; a move's position here is its number on the wire."""
        components = enumerate(self.model.components)
        return tuple(chain.from_iterable(self._component_moves(index, component) for index, component in components))

    def _component_moves(self, index: int, component: Component) -> list[Move]:
        """Moves of one component, sorted by (src, dst, layers, heads)."""
        classes = _tie_break_classes(component, self.prefill, self.decode)
        pattern = _pattern(component, self.prefill, self.decode, self.tie_break_index % classes)
        first_src = self.prefill_replica * self.prefill.attention_tp
        first_dst = self.decode_replica * self.decode.attention_tp
        return [Move(index, first_src + src, first_dst + dst, layers, heads) for src, dst, layers, heads in pattern]

    @cached_property
    def digest(self) -> bytes:
        """16 bytes over model, topologies, both replica indices and the tie-break; equal on both sides or refused."""
        facts = (
            1,
            astuple(self.model),
            _topology_facts(self.prefill),
            _topology_facts(self.decode),
            self.prefill_replica,
            self.decode_replica,
            self.tie_break.value,
            self.tie_break_index,
        )
        return hashlib.blake2b(msgspec.msgpack.encode(facts), digest_size=16).digest()

    @cached_property
    def senders(self) -> tuple[int, ...]:
        return tuple(sorted({move.src for move in self.moves}))

    @cached_property
    def receivers(self) -> tuple[int, ...]:
        return tuple(sorted({move.dst for move in self.moves}))


def _topology_facts(topology: Topology) -> tuple[object, ...]:
    return (topology.tp, topology.pp, topology.cp, topology.dp, topology.layers_per_stage, str(topology.cp_split))


@dataclass(frozen=True, slots=True, eq=False)
class RouteTable:
    """The moves of all pairs of replicas of two engines, one row each: int32 `[moves]` a column.

    Sorted by component, prefill replica, decode replica; inside a pair the rows are in the order of `Route.moves`.
    The columns mean what the fields of `Move` do; layers and heads are half-open.
    """

    component: Int32Array
    prefill_replica: Int32Array
    decode_replica: Int32Array
    src: Int32Array
    dst: Int32Array
    layer_start: Int32Array
    layer_end: Int32Array
    head_start: Int32Array
    head_end: Int32Array

    def __len__(self) -> int:
        return int(self.src.size)


def route_table(model: ModelSpec, prefill: Topology, decode: Topology) -> RouteTable:
    """The moves of `Route(model, prefill, decode, p, d)` for all pairs (p, d), with the tie-break `TieBreak.REPLICA`.

    No loop runs over pairs, so it serves engines of thousands of replicas. A move takes 36 bytes.

    Raises:
        ConfigError: the engines cannot exchange KV.
    """
    check_pair(model, prefill, decode)
    patterns = [_patterns(component, prefill, decode) for component in model.components]
    ends = [0, *accumulate(prefill.dp * decode.dp * pattern.shape[2] for pattern in patterns)]
    columns = np.empty((9, ends[-1]), dtype=np.int32)
    for index, (pattern, (start, end)) in enumerate(zip(patterns, pairwise(ends), strict=True)):
        _fill_pairs(columns[:, start:end], index, pattern, prefill, decode)
    return RouteTable(*columns)


def _patterns(component: Component, prefill: Topology, decode: Topology) -> Int32Array:
    """int32 `[6, tie-break classes, moves]`: src, dst, layer start and end, head start and end of `_pattern`.

    Row d % classes is that of decode replica d. All classes have equally many moves: where there is more than one, each
    prefill rank holds one head, so nothing joins, and a class names one sender per stage, context, head and decode rank.
    """
    classes = min(_tie_break_classes(component, prefill, decode), decode.dp)
    moves = [
        [
            (src, dst, layers.start, layers.end, heads.start, heads.end)
            for src, dst, layers, heads in _pattern(component, prefill, decode, tie_break)
        ]
        for tie_break in range(classes)
    ]
    return np.ascontiguousarray(np.array(moves, dtype=np.int32).reshape(classes, -1, 6).transpose(2, 0, 1))


def _fill_pairs(columns: Int32Array, component: int, pattern: Int32Array, prefill: Topology, decode: Topology) -> None:
    """Fill int32 `[9, moves]`, in the order of `RouteTable`'s fields, with one component's moves of all pairs."""
    grid = columns.reshape(9, prefill.dp, decode.dp, pattern.shape[2])
    prefill_replica = np.arange(prefill.dp, dtype=np.int32)[:, None, None]
    decode_replica = np.arange(decode.dp, dtype=np.int32)[:, None]
    src, dst, *spans = pattern[:, np.arange(decode.dp) % pattern.shape[1]]  # each [decode replicas, moves of a pair]
    grid[0] = component
    grid[1] = prefill_replica
    grid[2] = decode_replica
    np.add(src, prefill_replica * prefill.attention_tp, out=grid[3])
    grid[4] = dst + decode_replica * decode.attention_tp
    for column, span in enumerate(spans, 5):
        grid[column] = span


# --- token positions under context parallelism -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenShare:
    """Which token positions one context rank keeps, and where in its own pages.

    With `cp` = 1 it keeps all. `contiguous` splits whole pages: floor(n / cp) each, the rest to the lowest ranks.

    Attributes:
        total_tokens: positions of the request that exist, `[0, total_tokens)`; `contiguous` depends on it.
    """

    topology: Topology
    context: int
    page_size: int
    total_tokens: int

    def positions(self, within: Interval) -> Int64Array:
        """Owned positions inside `within`, ascending, int64."""
        if self.topology.cp == 1:
            return np.arange(within.start, within.end, dtype=np.int64)
        interleave = self.topology.cp_split.interleave
        if not interleave:
            span = within & self._contiguous()
            return np.arange(span.start, span.end, dtype=np.int64)
        every = np.arange(within.start, within.end, dtype=np.int64)
        mine: Int64Array = every[every // interleave % self.topology.cp == self.context]
        return mine

    def local(self, positions: Int64Array) -> Int64Array:
        """Index of each owned position among all that this rank keeps: page = local // page_size."""
        if self.topology.cp == 1:
            return positions
        interleave = self.topology.cp_split.interleave
        if not interleave:
            return positions - self._contiguous().start
        local: Int64Array = positions // (interleave * self.topology.cp) * interleave + positions % interleave
        return local

    @property
    def kept(self) -> int:
        """How many of `[0, total_tokens)` this rank keeps."""
        if self.topology.cp == 1:
            return self.total_tokens
        interleave = self.topology.cp_split.interleave
        if not interleave:
            return self._contiguous().size
        rounds, rest = divmod(self.total_tokens, interleave * self.topology.cp)
        return rounds * interleave + min(max(rest - self.context * interleave, 0), interleave)

    def _contiguous(self) -> Interval:
        pages = -(-self.total_tokens // self.page_size)
        each, rest = divmod(pages, self.topology.cp)
        first = self.context * each + min(self.context, rest)
        last = first + each + (self.context < rest)
        return Interval(min(first * self.page_size, self.total_tokens), min(last * self.page_size, self.total_tokens))


def move_positions(src: TokenShare, dst: TokenShare, within: Interval) -> Int64Array:
    """Positions of `within` that a move carries: those that both its context ranks keep."""
    positions = src.positions(within)
    if dst.topology.cp == 1:
        return positions
    return np.intersect1d(positions, dst.positions(within), assume_unique=True)


# --- boxes -------------------------------------------------------------------------------------------------------------


def box_bytes(component: Component, move: Move, layers: int, tokens: int) -> int:
    """Packed size of `layers` x `tokens` of a move."""
    return layers * component.kv_factor * tokens * move.heads.size * component.row_bytes


def cut(
    number: int,
    move: Move,
    component: Component,
    layers: Interval,
    tokens: Interval,
    *,
    positions: Int64Array,
    chunk_bytes: int,
) -> list[Box]:
    """Cut `layers` x `tokens` of a move into boxes of at most `chunk_bytes`, which tile it exactly.

    All layers stay together as long as a box holds a fair number of tokens; then layers are split.

    Args:
        number: the move's position in its route.
        positions: the positions of `tokens` that the move carries (`move_positions`); nothing is cut where it is empty.

    Raises:
        ConfigError: one token of one layer does not fit into `chunk_bytes`.
    """
    if not positions.size or not layers.size:
        return []
    unit = box_bytes(component, move, 1, 1)
    if unit > chunk_bytes:
        raise ConfigError("slot_bytes", f"{chunk_bytes} is less than one token of one layer, {unit} bytes")
    want_tokens = min(int(positions.size), _PREFERRED_BOX_TOKENS)
    per_box_layers = max(1, min(layers.size, chunk_bytes // (unit * want_tokens)))
    per_box_tokens = min(int(positions.size), chunk_bytes // (unit * per_box_layers))
    starts = [tokens.start, *positions[per_box_tokens::per_box_tokens].tolist()]
    spans = [Interval(a, b) for a, b in zip(starts, [*starts[1:], tokens.end], strict=True)]
    return [
        Box(number, Interval(first, min(first + per_box_layers, layers.end)), span)
        for span in spans
        for first in range(layers.start, layers.end, per_box_layers)
    ]


@dataclass(frozen=True)
class LinkPlan:
    """The part of a route that goes over one link: from the ranks of one prefill agent to those of one decode agent.

    Attributes:
        moves: positions in `route.moves`, ascending.
        prefill_pages, decode_pages: page size per component, in tokens (contiguous context splits depend on them).
        chunk_bytes: largest box; the smaller of both sides' slots.
        total_tokens: positions of the request that exist, per component.
    """

    route: Route
    moves: tuple[int, ...]
    prefill_pages: tuple[int, ...]
    decode_pages: tuple[int, ...]
    chunk_bytes: int
    total_tokens: tuple[int, ...]

    def move(self, number: int) -> Move:
        return self.route.moves[number]

    def component(self, number: int) -> Component:
        return self.route.model.components[self.move(number).component]

    def check_chunk(self) -> None:
        """Raises ConfigError where one token of one layer of some move does not fit into a chunk."""
        for number in self.moves:
            unit = box_bytes(self.component(number), self.move(number), 1, 1)
            if unit > self.chunk_bytes:
                raise ConfigError(
                    "staging.slot_bytes", f"{self.chunk_bytes} is less than one token of one layer, {unit} bytes"
                )

    def src_share(self, number: int) -> TokenShare:
        """What the sending rank keeps."""
        move, prefill = self.move(number), self.route.prefill
        context = prefill.place(move.src)[1]
        return TokenShare(prefill, context, self.prefill_pages[move.component], self.total_tokens[move.component])

    def dst_share(self, number: int) -> TokenShare:
        """What the receiving rank keeps."""
        move, decode = self.move(number), self.route.decode
        context = decode.place(move.dst)[1]
        return TokenShare(decode, context, self.decode_pages[move.component], self.total_tokens[move.component])

    def positions(self, number: int, tokens: Interval) -> Int64Array:
        """The positions of `tokens` that move `number` carries."""
        return move_positions(self.src_share(number), self.dst_share(number), tokens)

    def carried(self, number: int, tokens: Interval) -> int:
        """How many of `tokens` move `number` carries."""
        if self.route.prefill.cp == 1 and self.route.decode.cp == 1:
            return tokens.size
        return int(self.positions(number, tokens).size)

    def cut(self, number: int, layers: Interval, tokens: Interval) -> list[Box]:
        """Boxes of `layers` x `tokens` of one move, clipped to the move's layers; none where it carries nothing."""
        move = self.move(number)
        positions = self.positions(number, tokens)
        component = self.component(number)
        layers = move.layers & layers
        return cut(number, move, component, layers, tokens, positions=positions, chunk_bytes=self.chunk_bytes)

    def box_bytes(self, box: Box) -> int:
        """Packed size of a box."""
        tokens = self.carried(box.move, box.tokens)
        return box_bytes(self.component(box.move), self.move(box.move), box.layers.size, tokens)

    def count_boxes(self, ranges: tuple[Interval, ...], most: int) -> int:
        """How many boxes token ranges `ranges` (per component) make when cut at once; counted up to `most` + 1."""
        count = 0
        for number in self.moves:
            move = self.move(number)
            count += len(self.cut(number, move.layers, ranges[move.component]))
            if count > most:
                break
        return count

    def tilings(self, ranges: tuple[Interval, ...]) -> dict[int, Tiling]:
        """What has to come for token ranges `ranges` (per component): a Tiling for each move that carries anything."""
        wanted = {}
        for number in self.moves:
            move = self.move(number)
            tokens = ranges[move.component]
            carried = self.carried(number, tokens)
            if carried:
                wanted[number] = Tiling(move.layers, tokens, carried)
        return wanted


def clip(want: Interval, have: Interval) -> Interval:
    """What moves: wanted and available, by position; empty, at the wanted start, where nothing does."""
    return Interval(want.start, max(want.start, min(want.end, have.end)))


class Tiling:
    """Watches that boxes tile `layers` x `tokens`: each once, nothing outside.

    Args:
        carried: how many of the tokens really come, where context parallelism leaves some out; all by default.

    Example:
        >>> tiling = Tiling(Interval(0, 2), Interval(0, 8))
        >>> tiling.add(Interval(0, 2), Interval(0, 5))
        True
        >>> tiling.complete
        False
    """

    def __init__(self, layers: Interval, tokens: Interval, carried: int | None = None) -> None:
        self._layers = layers
        self._tokens = tokens
        self._left = layers.size * (tokens.size if carried is None else carried)
        self._seen = np.empty((0, 4), dtype=np.int64)
        self._count = 0

    @property
    def complete(self) -> bool:
        return self._left == 0

    @property
    def left(self) -> int:
        """Layers x tokens that no box has covered yet."""
        return self._left

    def add(self, layers: Interval, tokens: Interval, carried: int | None = None) -> bool:
        """Count a box, of which `carried` tokens (all, by default) are real.

        False, and nothing changes, where it is empty, overlaps an earlier one or lies outside.
        """
        if not (layers.size and tokens.size and self._layers.contains(layers) and self._tokens.contains(tokens)):
            return False
        seen = self._seen[: self._count]
        overlaps = (
            (seen[:, 0] < layers.end)
            & (layers.start < seen[:, 1])
            & (seen[:, 2] < tokens.end)
            & (tokens.start < seen[:, 3])
        )
        if overlaps.any():
            return False
        if self._count == len(self._seen):
            self._seen = np.concatenate([self._seen, np.empty((max(16, self._count), 4), dtype=np.int64)])
        self._seen[self._count] = (layers.start, layers.end, tokens.start, tokens.end)
        self._count += 1
        self._left -= layers.size * (tokens.size if carried is None else carried)
        return True


# --- bytes -------------------------------------------------------------------------------------------------------------


def check_pages(field: str, pages: npt.ArrayLike, num_pages: int, needed: int) -> Int64Array:
    """A request's page table as int64 `[n]`.

    Raises:
        ConfigError: not one-dimensional whole numbers, a page outside the pool, one page twice, or too few pages.
    """
    try:
        table = np.asarray(pages)
    except ValueError as exc:  # ragged
        raise ConfigError(field, "must be a one-dimensional sequence of page numbers") from exc
    if table.ndim != 1 or (table.size and table.dtype.kind not in "iu"):
        raise ConfigError(field, "must be a one-dimensional sequence of page numbers")
    table = table.astype(np.int64)
    if table.size:
        ordered = np.sort(table)  # 0.4 ms for 65,536 pages, a tenth of a set of them
        if ordered[0] < 0 or ordered[-1] >= num_pages:
            raise ConfigError(field, f"holds a page outside 0..{num_pages - 1}")
        if (ordered[1:] == ordered[:-1]).any():
            raise ConfigError(field, "holds one page twice")
    if table.size < needed:
        raise ConfigError(field, f"has {table.size} pages, the token range needs {needed}")
    return table


@dataclass(frozen=True, slots=True)
class PageTables:
    """One request's checked page tables in one replica: int64 `[n]` per component."""

    replica: int
    pages: tuple[Int64Array, ...]


def token_offsets(layout: KvLayout, pages: Int64Array, local: Int64Array, first_head: int) -> Int64Array:
    """Bytes from a plane's origin to head `first_head` (of the rank's own) of each token, int64 `[tokens]`.

    Args:
        pages: the request's page table on this rank; `pages[i]` holds local tokens `[i * page_size, (i+1) * page_size)`.
        local: local token indices (`TokenShare.local`).
    """
    page, token = np.divmod(local, layout.page_size)
    offsets: Int64Array = (
        pages[page] * layout.page_stride + token * layout.token_stride + first_head * layout.head_stride
    )
    return offsets


class Runs(NamedTuple):
    """Byte runs inside one plane: int64 arrays of offsets (from the plane's origin) and lengths, in packed order."""

    offsets: Int64Array
    lengths: Int64Array


def byte_runs(layout: KvLayout, pages: Int64Array, local: Interval, heads: Interval) -> Runs:
    """The longest contiguous runs that hold `heads` (of the rank's own) of local tokens `local`, in one plane.

    Neighbouring runs are merged, also across pages that lie side by side. The same runs hold in every plane. Runs are in
    ascending token order; inside a page whose heads lie apart, head by head.
    """
    if not local.size or not heads.size:
        empty = np.empty(0, dtype=np.int64)
        return Runs(empty, empty)
    first_page, last_page = local.start // layout.page_size, (local.end - 1) // layout.page_size
    base = pages[first_page : last_page + 1] * layout.page_stride
    begin = local.start - first_page * layout.page_size  # counted from the first page's first token
    row = layout.row_bytes
    head_offsets = np.arange(heads.start, heads.end, dtype=np.int64) * layout.head_stride
    if layout.head_stride == row or heads.size == 1:  # one run holds all wanted heads of a token
        row, head_offsets = row * heads.size, head_offsets[:1]
    if layout.token_stride == row or layout.page_size == 1:  # one run holds all wanted tokens of a page
        counts = np.full(base.size, layout.page_size, dtype=np.int64)
        counts[-1] = local.end - last_page * layout.page_size
        counts[0] -= begin
        base[0] += begin * layout.token_stride
        offsets = base[:, None] + head_offsets
        lengths = np.broadcast_to((counts * row)[:, None], offsets.shape)
    else:
        tokens = np.arange(layout.page_size, dtype=np.int64) * layout.token_stride
        if head_offsets.size == 1 and (int(tokens[-1]) + row) % layout.page_stride:
            # Pages lie whole page strides apart, so no row ends where one of another page begins: nothing to merge.
            starts = (base[:, None] + (tokens + head_offsets)).reshape(-1)[begin : begin + local.size]
            return Runs(starts, np.broadcast_to(np.int64(row), starts.shape))
        starts = (base[:, None] + tokens).reshape(-1)[begin : begin + local.size]
        offsets = starts[:, None] + head_offsets
        lengths = np.full(offsets.shape, row, dtype=np.int64)
    return _merge(offsets.reshape(-1), lengths.reshape(-1))


def _merge(offsets: Int64Array, lengths: Int64Array) -> Runs:
    """Join runs where one ends and the next begins."""
    begins = offsets[1:] != offsets[:-1] + lengths[:-1]
    if begins.all():
        return Runs(offsets, lengths)
    starts = np.concatenate([[0], np.flatnonzero(begins) + 1])
    return Runs(offsets[starts], np.add.reduceat(lengths, starts))
