"""`rdma-kv bench`: what the planner costs, and what an agent costs while idle and while KV moves.

Every subcommand prints rows of a value and, where there is one, its goal, which no option changes. The exit status is 0
only if every goal is met.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from rdma_kv.cli.output import console, print_json

if TYPE_CHECKING:
    from rdma_kv.bench.rows import Row

bench = typer.Typer(name="bench", add_completion=False, rich_markup_mode=None)

_AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON on standard output.")]


@bench.callback()
def root() -> None:
    """Measure against the project's goals; exit status 1 where one is missed."""


@bench.command("plan")
def plan(*, as_json: _AsJson = False) -> int:
    """Times of the planner: byte runs, one request, all pairs of replicas. Medians."""
    from rdma_kv.bench.plan import measure_plan

    return _show(measure_plan(_progress), as_json=as_json)


@bench.command("idle")
def idle(
    *,
    seconds: Annotated[float, typer.Option(min=1.0, max=3600.0, help="Length of the idle window.")] = 10.0,
    transport: Annotated[str, typer.Option(help="nixl (a process per agent) or loopback (one process).")] = "nixl",
    mib: Annotated[int, typer.Option(min=1, max=4096, help="KV of one move, in MiB.")] = 256,
    as_json: _AsJson = False,
) -> int:
    """CPU of two connected agents while nothing moves, then event-loop lag while KV moves between them."""
    from rdma_kv.bench.idle import IdleOptions, measure_idle

    return _show(measure_idle(IdleOptions(seconds, transport, mib), _progress), as_json=as_json)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _show(rows: Sequence[Row], *, as_json: bool) -> int:
    """Print the rows and return the exit status."""
    from rdma_kv.bench import rows as bench_rows

    if as_json:
        print_json(bench_rows.as_json(rows))
    else:
        _table(rows)
    return 0 if bench_rows.all_ok(rows) else 1


def _table(rows: Sequence[Row]) -> None:
    from rich.table import Table

    table = Table("name", "value", "unit", "goal", "ok")
    for row in rows:
        value = row.value if isinstance(row.value, str) else f"{row.value:.3f}"
        goal = "" if row.goal is None else f"< {row.goal:g}"
        table.add_row(row.name, value, row.unit, goal, {None: "", True: "yes", False: "NO"}[row.ok])
    console().print(table)
