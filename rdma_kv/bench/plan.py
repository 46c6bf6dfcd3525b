"""The planner's times against its goals. NumPy only: no engine, no torch, no transport."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from rdma_kv import planner
from rdma_kv.bench.rows import Progress, Row, median_ms
from rdma_kv.layout import KvLayout
from rdma_kv.planner import Route, byte_runs, route_table
from rdma_kv.topology import ModelSpec, Topology
from rdma_kv.types import Interval

REPETITIONS = 15  # odd, and medians, as other work may share the cores
RUNS_GOAL_MS = 20.0
ROUTE_GOAL_MS = 10.0
TABLE_GOAL_MS = 200.0

PAGES = 65_536
PAGE_TOKENS = 16
_HEADS = 8
_ROW_BYTES = 256  # head dim 128 in two bytes
_LATENT_BYTES = 1152  # MLA: 512 + 64 in two bytes
_GQA = ModelSpec.gqa(layers=64, kv_heads=8, head_dim=128)
_MLA = ModelSpec.mla(layers=61)


def measure_plan(progress: Progress) -> list[Row]:
    """All rows: byte runs, one request, all pairs."""
    rows = []
    for group in (_byte_runs(), _routes(), _tables()):
        for row in group:
            progress(f"{row.name}: {row.value:.3f} {row.unit}")
            rows.append(row)
    return rows


# --- byte runs ---------------------------------------------------------------------------------------------------------


class _Case(NamedTuple):
    name: str
    layout: KvLayout
    heads: Interval


def _cases() -> list[_Case]:
    pool = 2 * PAGES  # a request's pages lie scattered in a larger pool
    every, half = Interval(0, _HEADS), Interval(_HEADS // 2, _HEADS)
    sizes = {"layers": 1, "pages": pool, "page_size": PAGE_TOKENS, "heads": _HEADS, "row_bytes": _ROW_BYTES}
    nhd, hnd = KvLayout.nhd(**sizes), KvLayout.hnd(**sizes)
    return [
        _Case("nhd, all heads", nhd, every),
        _Case("nhd, half of the heads", nhd, half),
        _Case("hnd, all heads", hnd, every),
        _Case("hnd, half of the heads", hnd, half),
        _Case("trtllm, half of the heads", KvLayout.trtllm(**sizes), half),
        _Case("sglang, half of the heads", KvLayout.sglang(**sizes), half),
        _Case(
            "mla latent",
            KvLayout.mla(layers=1, pages=pool, page_size=PAGE_TOKENS, row_bytes=_LATENT_BYTES),
            Interval(0, 1),
        ),
        _Case(
            "lightllm, pages of one token, half of the heads",
            KvLayout.lightllm(layers=1, slots=pool, heads=_HEADS, row_bytes=_ROW_BYTES),
            half,
        ),
    ]


def _byte_runs() -> Iterator[Row]:
    table = np.random.default_rng(0).permutation(2 * PAGES)[:PAGES].astype(np.int64)
    for name, layout, heads in _cases():
        tokens = Interval(0, PAGES * layout.page_size)
        took_ms = median_ms(lambda: byte_runs(layout, table, tokens, heads), REPETITIONS)  # noqa: B023 - called at once
        yield Row(f"byte runs of {PAGES:,} pages: {name}", took_ms, "ms", RUNS_GOAL_MS)


# --- routes ------------------------------------------------------------------------------------------------------------


def _forget() -> None:
    """Empty the planner's caches."""
    planner._pattern.cache_clear()
    planner.check_pair.cache_clear()


def _routes() -> Iterator[Row]:
    """One request between two engines of 1,024 ranks: all its moves, and the digest that both sides compare."""
    for name, model in (("8 KV heads", _GQA), ("mla", _MLA)):
        engine = _engine(model, tp=128, pp=8)

        def route() -> bytes:
            found = Route(model, engine, engine, 0, 0)  # noqa: B023 - called at once
            assert found.moves
            return found.digest

        title = f"one request, 1,024 to 1,024 ranks (tp 128, pp 8), {name}"
        yield Row(f"{title}, cold", median_ms(route, REPETITIONS, before=_forget), "ms", ROUTE_GOAL_MS)
        yield Row(f"{title}, warm", median_ms(route, REPETITIONS), "ms", ROUTE_GOAL_MS)


def _tables() -> Iterator[Row]:
    """All DP pairs of two DEP engines of 1,024 ranks, in both readings of that."""
    for tp, pp in ((1024, 1), (128, 8)):
        engine = _engine(_MLA, tp=tp, dp=tp, pp=pp)
        took_ms = median_ms(lambda: route_table(_MLA, engine, engine), REPETITIONS, before=_forget)  # noqa: B023
        name = f"table of all {tp * tp:,} DP pairs, 1,024 to 1,024 ranks (tp = dp = {tp}, pp {pp})"
        yield Row(name, took_ms, "ms", TABLE_GOAL_MS)


def _engine(model: ModelSpec, *, tp: int, pp: int, dp: int = 1) -> Topology:
    return Topology.with_layers(len(model.components[0].layers), tp=tp, pp=pp, dp=dp)
