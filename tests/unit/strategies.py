"""Random questions to the planner: models, topologies, layouts, and requests on them."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from simulation import Pool, PoolKind, PoolShape, Scenario

from rdma_kv.layout import KvLayout
from rdma_kv.topology import Component, ContextSplit, ModelSpec, TieBreak, Topology
from rdma_kv.types import Interval


@st.composite
def attention_sizes(draw: st.DrawFn, kv_heads: int) -> tuple[int, int]:
    """Attention TP of both sides that K heads allow."""
    fits = [t for t in range(1, 9) if kv_heads % t == 0 or t % kv_heads == 0]
    prefill = draw(st.sampled_from(fits))
    return prefill, draw(st.sampled_from([t for t in fits if t % prefill == 0 or prefill % t == 0]))


@st.composite
def stage_sizes(draw: st.DrawFn, layers: int) -> tuple[int, ...]:
    """Up to three pipeline stages, uneven as they come."""
    stages = draw(st.integers(1, min(3, layers)))
    cuts = (
        sorted(draw(st.sets(st.integers(1, layers - 1), min_size=stages - 1, max_size=stages - 1)))
        if layers > 1
        else []
    )
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))


@st.composite
def topologies(draw: st.DrawFn, layers: int, attention_tp: int) -> Topology:
    dp = draw(st.sampled_from([1, 1, 2, 3, 4]))
    stages = draw(stage_sizes(layers))
    cp = draw(st.sampled_from([1, 1, 2, 3] if attention_tp * len(stages) <= 8 else [1]))
    split = ContextSplit(draw(st.sampled_from([0, 0, 1, 2, 5])))
    return Topology(tp=attention_tp * dp, dp=dp, pp=len(stages), cp=cp, layers_per_stage=stages, cp_split=split)


@st.composite
def components(draw: st.DrawFn, layers: int, kv_heads: int, mla: bool) -> tuple[Component, ...]:
    """The main cache on every layer, and now and then a second one with a geometry and layers of its own."""
    row_bytes = draw(st.sampled_from([1, 2, 3, 8]))
    kv = 1 if mla else draw(st.sampled_from([2, 2, 1]))
    main = Component("kv", tuple(range(layers)), kv_heads, kv, row_bytes, replicated=mla)
    if not draw(st.booleans()):
        return (main,)
    some = sorted(draw(st.sets(st.integers(0, layers - 1), min_size=1)))
    replicated = mla or draw(st.booleans())
    second = Component("second", tuple(some), 1 if replicated else kv_heads, 1, 5, "uint8", replicated=replicated)
    return main, second


@st.composite
def pool_kinds(draw: st.DrawFn, component: Component) -> PoolKind:
    names = ["nhd", "hnd", "trtllm", "custom", "custom"]
    if component.kv_factor == 2:
        names += ["lightllm", "sglang"]
    if component.replicated and component.kv_factor == 1:
        names.append("mla")
    name = draw(st.sampled_from(names))
    return PoolKind(name, 1 if name == "lightllm" else draw(st.integers(1, 7)))


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    layers = draw(st.integers(1, 6))
    mla = draw(st.sampled_from([False, False, True]))
    kv_heads = 1 if mla else draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    prefill_tp, decode_tp = draw(attention_sizes(kv_heads))
    prefill = draw(topologies(layers, prefill_tp))
    decode = draw(topologies(layers, decode_tp))
    parts = draw(components(layers, kv_heads, mla))
    total = draw(st.integers(1, 24))
    start = draw(st.integers(0, total - 1))
    end = draw(st.sampled_from([start, *range(start + 1, total + 1)]))
    unit = max(part.token_layer_bytes for part in parts)
    return Scenario(
        model=ModelSpec(parts),
        prefill=prefill,
        decode=decode,
        prefill_replica=draw(st.integers(0, prefill.dp - 1)),
        decode_replica=draw(st.integers(0, decode.dp - 1)),
        src_pools=tuple(draw(pool_kinds(part)) for part in parts),
        dst_pools=tuple(draw(pool_kinds(part)) for part in parts),
        total_tokens=total,
        within=Interval(start, end),
        chunk_bytes=unit * draw(st.sampled_from([1, 2, 3, 7, 50, 10_000])),
        tie_break=draw(st.sampled_from(TieBreak)),
        key=draw(st.text(max_size=3)),
        token_cuts=tuple(draw(st.sets(st.integers(0, total), max_size=2))),
        layer_cuts=tuple(draw(st.sets(st.integers(0, layers), max_size=2))),
        seed=draw(st.integers(0, 1 << 16)),
    )


@st.composite
def layouts(draw: st.DrawFn) -> KvLayout:
    """The layout of one small pool."""
    component = Component("kv", (0, 1), 1, draw(st.sampled_from([1, 2])), 1, replicated=True)
    kind = draw(pool_kinds(component))
    heads = 1 if kind.layout == "mla" else draw(st.integers(1, 4))
    shape = PoolShape(2, component.kv_factor, draw(st.integers(1, 6)), kind.page_size, heads, draw(st.integers(1, 4)))
    return Pool(kind.layout, shape, np.random.default_rng(draw(st.integers(0, 1 << 16)))).layout
