"""`rdma-kv bench`: what the planner, an agent, a transport, a whole transfer, a small one and the GPU kernels cost.

Every subcommand prints rows of a value and, where there is one, its goal, which no option changes. The exit status is 0
only if every goal is met.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rdma_kv.cli.output import console, print_json

if TYPE_CHECKING:
    from rdma_kv.bench.goals import Meter
    from rdma_kv.bench.rows import Row

bench = typer.Typer(name="bench", add_completion=False, rich_markup_mode=None)

_AsJson = Annotated[bool, typer.Option("--json", help="One line of JSON on standard output.")]
_Repetitions = Annotated[int, typer.Option(min=1, max=1000, help="Rounds that count; medians are over them.")]
_Parts = Annotated[list[str] | None, typer.Option("--part", help="Only this part; may be repeated.")]
_Commit = Annotated[str, typer.Option(help="Named in the output.", envvar="RDMA_KV_COMMIT")]


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
    transport: Annotated[
        str, typer.Option(help="auto, ucx or nixl (a process per agent), or loopback (one).")
    ] = "nixl",
    mib: Annotated[int, typer.Option(min=1, max=4096, help="KV of one move, in MiB.")] = 256,
    as_json: _AsJson = False,
) -> int:
    """CPU of two connected agents while nothing moves, then event-loop lag while KV moves between them."""
    from rdma_kv.bench.idle import IdleOptions, measure_idle

    return _show(measure_idle(IdleOptions(seconds, transport, mib), _progress), as_json=as_json)


@bench.command("transport")
def transport(
    *,
    repetitions: _Repetitions = 7,
    sizes: Annotated[
        str, typer.Option(help="Sizes such as 8,64K,16M, and PIECESxSIZE for scattered ones.")
    ] = "8,64K,1M,16M,256M,1024x64K,65536x4K",
    plot: Annotated[Path | None, typer.Option(help="Also draw throughput over size there (.svg).")] = None,
    as_json: _AsJson = False,
) -> int:
    """Our transports beside a raw socket, NIXL's own API, ucx_perftest and memcpy; interleaved, medians and spread."""
    from rdma_kv.bench.plot import check_plot, write_plot
    from rdma_kv.bench.transport import TransportOptions, measure_transport, plot_lines

    if plot is not None:
        check_plot(plot)
    options = TransportOptions(repetitions, sizes)
    with _meter() as meter:
        rows, entries = measure_transport(options, meter)
    if plot is not None:
        write_plot(plot, plot_lines(entries))
    return _show(rows, as_json=as_json)


@bench.command("transfer")
def transfer(
    *,
    transport: Annotated[str, typer.Option(help="auto, ucx or nixl (two processes), or loopback (one).")] = "nixl",
    repetitions: _Repetitions = 7,
    mib: Annotated[int, typer.Option(min=64, max=1024, help="KV of a round, in MiB; a multiple of 64.")] = 256,
    as_json: _AsJson = False,
) -> int:
    """Scattered pages to scattered pages by the public API, beside the same kernels around the raw transport."""
    from rdma_kv.bench.transfer import TransferOptions, measure_transfer

    options = TransferOptions(transport, repetitions, mib)
    with _meter() as meter:
        rows = measure_transfer(options, meter)
    return _show(rows, as_json=as_json)


@bench.command("latency")
def latency(
    *,
    transport: Annotated[str, typer.Option(help="auto, ucx or nixl (two processes), or loopback (one).")] = "nixl",
    repetitions: _Repetitions = 7,
    as_json: _AsJson = False,
) -> int:
    """64 KiB of KV from end to end beside a hand-written socket, where its time goes, and loop time of small writes."""
    from rdma_kv.bench.latency import LatencyOptions, measure_latency

    options = LatencyOptions(transport, repetitions)
    with _meter() as meter:
        rows = measure_latency(options, meter)
    return _show(rows, as_json=as_json)


@bench.command("sidecar")
def sidecar(
    *,
    transport: Annotated[str, typer.Option(help="auto, ucx or nixl.")] = "auto",
    repetitions: _Repetitions = 7,
    as_json: _AsJson = False,
) -> int:
    """Requests through sidecars beside the same through agents in the engines' processes: time, and CPU of each."""
    from rdma_kv.bench.sidecar import SidecarOptions, measure_sidecar

    options = SidecarOptions(transport, repetitions)
    with _meter() as meter:
        rows = measure_sidecar(options, meter)
    return _show(rows, as_json=as_json)


@bench.command("checksum")
def checksum(*, repetitions: _Repetitions = 7, as_json: _AsJson = False) -> int:
    """The checksum of packed chunks beside their gather and memcpy; interleaved, medians and spread."""
    from rdma_kv.bench.checksum import ChecksumOptions, measure_checksum

    options = ChecksumOptions(repetitions)
    with _meter() as meter:
        rows = measure_checksum(options, meter)
    return _show(rows, as_json=as_json)


@bench.command("gpu")
def gpu(
    *,
    part: _Parts = None,
    repetitions: _Repetitions = 15,
    quick: Annotated[bool, typer.Option("--quick", help="At most 5 rounds, and fewer numbers of programs.")] = False,
    commit: _Commit = "",
    plot: Annotated[Path | None, typer.Option(help="Also draw GB/s over row size and programs there (.svg).")] = None,
    as_json: _AsJson = False,
) -> int:
    """On a CUDA device: kernels beside a copy, copies to the host, whole transfers between two processes beside NIXL."""
    from rdma_kv.bench.gpu import GpuOptions, measure_gpu
    from rdma_kv.bench.plot import check_plot, write_plot

    if plot is not None:
        check_plot(plot)
    options = GpuOptions(repetitions, quick, commit, tuple(part or ()))
    with _meter() as meter:
        rows, panels = measure_gpu(options, meter)
    if plot is not None and panels:
        write_plot(plot, panels)
    return _show(rows, as_json=as_json)


@bench.command("multigpu")
def multigpu(
    *,
    part: _Parts = None,
    repetitions: _Repetitions = 15,
    quick: Annotated[bool, typer.Option("--quick", help="At most 5 rounds, and fewer numbers of programs.")] = False,
    commit: _Commit = "",
    as_json: _AsJson = False,
) -> int:
    """From GPU to GPU: the driver's copies, NIXL's own API, transfers by agents, and a kernel that needs no staging."""
    from rdma_kv.bench.multigpu import MultiGpuOptions, measure_multigpu

    options = MultiGpuOptions(repetitions, quick, commit, tuple(part or ()))
    with _meter() as meter:
        rows = measure_multigpu(options, meter)
    return _show(rows, as_json=as_json)


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _meter() -> Iterator[Meter]:
    """A progress bar on standard error, or lines where that is no terminal.

    It is drawn only when told: a thread that draws must not be there at a fork.
    """
    if not sys.stderr.isatty():
        yield lambda text, done, total: _progress(f"{done}/{total} {text}")
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}"),
    )
    out = Console(file=sys.stderr, markup=False, emoji=False, highlight=False)
    with Progress(*columns, console=out, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("", total=1, what="")

        def meter(text: str, done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, what=text)
            progress.refresh()

        yield meter


def _show(rows: Sequence[Row], *, as_json: bool) -> int:
    """Print the rows and return the exit status."""
    from rdma_kv.bench import rows as bench_rows

    if as_json:
        print_json(bench_rows.as_json(rows))
    else:
        _table(rows)
    return 0 if bench_rows.all_ok(rows) else 1


def _table(rows: Sequence[Row]) -> None:
    """Rows as a table; a spread stands beside its median."""
    from rich.table import Table

    from rdma_kv.bench.goals import SPREAD, Bound

    spreads = {row.name: row.value for row in rows if row.name.endswith(SPREAD)}
    table = Table("name", "value", "unit", "goal", "ok")
    for row in rows:
        if row.name in spreads:
            continue
        value = row.value if isinstance(row.value, str) else f"{row.value:.3f}"
        if row.name + SPREAD in spreads:
            value += f" ({spreads[row.name + SPREAD]})"
        relation = row.relation.value if isinstance(row, Bound) else "<"
        goal = "" if row.goal is None else f"{relation} {row.goal:g}"
        table.add_row(row.name, value, row.unit, goal, {None: "", True: "yes", False: "NO"}[row.ok])
    console().print(table)
