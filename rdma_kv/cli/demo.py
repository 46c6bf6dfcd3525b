"""`rdma-kv demo`: the KV cache of a real (small) model goes from prefill replicas to decode replicas and is used there."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from statistics import fmean
from typing import TYPE_CHECKING, Annotated

import typer

from rdma_kv.cli.output import console, print_json
from rdma_kv.cli.sides import Side, parse_side

if TYPE_CHECKING:
    from rich.console import Console

    from rdma_kv.demo.run import DemoOptions, EngineOptions, Verdict

PREFILL = Side(tp=2, dp=2, page=16, layout="nhd", option="--prefill")
DECODE = Side(tp=4, dp=2, page=32, layout="hnd", option="--decode")
KEYS = ("tp", "dp", "page", "layout")
LAYOUTS = ("nhd", "hnd")
MODEL_LAYERS = 4


def demo(
    *,
    prefill: Annotated[str | None, typer.Option(help="Prefill engine; default tp=2,dp=2,page=16,layout=nhd.")] = None,
    decode: Annotated[str | None, typer.Option(help="Decode engine; default tp=4,dp=2,page=32,layout=hnd.")] = None,
    requests: Annotated[int, typer.Option(min=1, max=256, help="Requests, spread over all pairs of replicas.")] = 16,
    kv_heads: Annotated[int, typer.Option(help="KV heads of the model: 1, 2, 4 or 8.")] = 4,
    transport: Annotated[str, typer.Option(help="nixl (a process per replica) or loopback (one process).")] = "nixl",
    seed: Annotated[int, typer.Option(min=0, help="Of weights, prompts and page tables.")] = 0,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds for the whole run after the model is loaded.")
    ] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on standard output.")] = False,
) -> int:
    """Move a real model's KV cache from prefill to decode replicas and generate from what arrived."""
    from rdma_kv.demo.model import ModelShape
    from rdma_kv.demo.run import DemoOptions, run_demo

    shape = ModelShape(seed=seed, layers=MODEL_LAYERS, kv_heads=kv_heads)
    options = DemoOptions(
        _engine("--prefill", prefill, PREFILL),
        _engine("--decode", decode, DECODE),
        shape,
        requests,
        transport,
        seed,
        timeout,
    )
    options.check()
    if not as_json:
        _show_routing(options)
    with _Progress(requests) as progress:
        verdict = run_demo(options, progress)
    if as_json:
        print_json(verdict.as_json())
    else:
        _show_verdict(console(), verdict)
    return 0 if verdict.as_json()["ok"] else 1


def _engine(option: str, text: str | None, default: Side) -> EngineOptions:
    from rdma_kv.demo.run import EngineOptions

    side = default if text is None else parse_side(option, text, default, keys=KEYS, layouts=LAYOUTS)
    return EngineOptions(side.topology(MODEL_LAYERS), side.page, side.layout)


class _Progress:
    """One bar on standard error, or plain lines where that is no terminal."""

    def __init__(self, requests: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            auto_refresh=False,  # no thread: the demo forks
        )
        self._task = self._bar.add_task("", total=requests)
        self._stage = ""

    def __enter__(self) -> _Progress:
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._console.is_terminal:
            self._bar.stop()

    def __call__(self, stage: str, done: int) -> None:
        if self._console.is_terminal:
            self._bar.update(self._task, description=stage, completed=done, refresh=True)
        elif stage != self._stage or done % 4 == 0:
            print(f"{stage} ({done} requests done)", file=sys.stderr, flush=True)
        self._stage = stage


def _show_routing(options: DemoOptions) -> None:
    """Who will send what to whom."""
    from rich.table import Table

    from rdma_kv.planner import Route

    prefill, decode = options.prefill, options.decode
    out = console()
    for name, engine in (("prefill", prefill), ("decode", decode)):
        t = engine.topology
        out.print(
            f"{name:8}tp={t.tp} dp={t.dp}, {engine.layout.upper()}, {engine.page_size} tokens a page", soft_wrap=True
        )
    table = Table(title="routing (rank to rank: KV heads)")
    table.add_column("from \\ to")
    for replica in range(decode.topology.dp):
        table.add_column(f"decode/{replica}")
    for p in range(prefill.topology.dp):
        cells = []
        for d in range(decode.topology.dp):
            moves = Route(options.shape.spec(), prefill.topology, decode.topology, p, d).moves
            cells.append("\n".join(f"{m.src} to {m.dst}: {m.heads}" for m in moves))
        table.add_row(f"prefill/{p}", *cells)
    out.print(table)


def _show_verdict(out: Console, verdict: Verdict) -> None:
    """Figures, then what differed, then one line that says it all."""
    answer = verdict.as_json()
    sent, arrived = list(verdict.sent.values()), list(verdict.arrived.values())
    if sent:
        moved, seconds = answer["bytes"], sum(s.seconds for s in sent)
        out.print(
            f"moved {moved:,} bytes of KV over {answer['lane']}; {moved / seconds / 1e9:.3f} GB/s from push to done, "
            f"handshakes included",
            soft_wrap=True,
        )
        out.print(
            f"per request, on average: compute {_mean(s.compute_s for s in sent)}, gather {_mean(s.gather_s for s in sent)}, "
            f"write {_mean(s.write_s for s in sent)}, scatter {_mean(a.scatter_s for a in arrived)}, "
            f"push to done {_mean(s.seconds for s in sent)}",
            soft_wrap=True,
        )
    for number in verdict.wrong_tokens[:4]:
        got, want = verdict.verified[number].tokens, verdict.expected[number]
        out.print(f"request {number}: tokens {got} differ from the undivided run's {want}", soft_wrap=True)
    for number in verdict.wrong_bytes[:4]:
        out.print(f"request {number}: {'; '.join(verdict.verified[number].differences[:3])}", soft_wrap=True)
    for text in [*verdict.touched[:4], *verdict.failures[:8]]:
        out.print(text, soft_wrap=True)
    checks = ("tokens_equal", "bytes_equal", "pages_untouched", "control_changed")
    out.print(", ".join(f"{name.replace('_', ' ')}: {'yes' if answer[name] else 'NO'}" for name in checks))
    out.print(f"distinct tokens of {16}: {answer['distinct_tokens']} on average")
    word = "OK" if answer["ok"] else "FAILED"
    out.print(f"{word}: {len(verdict.verified)} of {verdict.requests} requests in {answer['seconds']:.1f} s")


def _mean(values: Iterable[float]) -> str:
    return f"{1000 * fmean(values):.1f} ms"
