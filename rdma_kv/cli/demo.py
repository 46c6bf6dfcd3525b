"""`rdma-kv demo`: the KV cache of a real (small) model goes from prefill replicas to decode replicas and is used there."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from rdma_kv.cli.output import console, print_json
from rdma_kv.cli.sides import Side, parse_side
from rdma_kv.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from rdma_kv.demo.run import DemoOptions, EngineOptions, Verdict
    from rdma_kv.demo.shapes import Shape

PREFILL = Side(tp=2, dp=2, page=16, layout="nhd", option="--prefill")
DECODE = Side(tp=4, dp=2, page=32, layout="hnd", option="--decode")
KEYS = ("tp", "dp", "pp", "layers", "page", "layout")
LAYOUTS = ("nhd", "hnd", "lightllm", "sglang", "trtllm")
MLA_LAYOUTS = ("mla", "nhd", "hnd", "trtllm")
MODELS = ("qwen2", "mla")
MODEL_LAYERS = 4


def demo(
    *,
    prefill: Annotated[str | None, typer.Option(help="Prefill engine; default tp=2,dp=2,page=16,layout=nhd.")] = None,
    decode: Annotated[str | None, typer.Option(help="Decode engine; default tp=4,dp=2,page=32,layout=hnd.")] = None,
    model: Annotated[str, typer.Option(help="qwen2 (K and V heads) or mla (DeepSeek-V3, one latent).")] = "qwen2",
    kv_heads: Annotated[int | None, typer.Option(help="KV heads of qwen2: 1, 2, 4 or 8; 4 by default.")] = None,
    shape: Annotated[
        str | None, typer.Option(help="A named pair of engines in place of the four options above.")
    ] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every named pair of engines, one after the other.")
    ] = False,
    requests: Annotated[
        int | None, typer.Option(min=1, max=256, help="Requests over all pairs of replicas; 16, or 8 with --all.")
    ] = None,
    transport: Annotated[
        str, typer.Option(help="auto, ucx or nixl (separate processes), or loopback (one process).")
    ] = "auto",
    processes: Annotated[str, typer.Option(help="One agent process per replica, or per rank.")] = "replica",
    device: Annotated[
        str,
        typer.Option(help="Where model and KV are: cpu, cuda (processes spread over the GPUs) or cuda:N (all on one)."),
    ] = "cpu",
    seed: Annotated[int, typer.Option(min=0, help="Of weights, prompts and page tables.")] = 0,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for a run after the model is loaded.")] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on standard output.")] = False,
) -> int:
    """Move a real model's KV cache from prefill to decode replicas and generate from what arrived."""
    from rdma_kv.demo.shapes import SHAPES
    from rdma_kv.demo.shapes import shape as find_shape

    own = {"--prefill": prefill, "--decode": decode, "--kv-heads": kv_heads, "--shape": shape if everything else None}
    if (everything or shape is not None) and (given := [name for name, value in own.items() if value is not None]):
        raise ConfigError(given[0], "cannot go with --all or --shape, which say both engines themselves")
    common = _Common(requests, transport, processes, seed, timeout, device)
    if everything:
        return _run_all([_shape_options(each, common) for each in SHAPES], as_json=as_json)
    if shape is not None:
        options = _shape_options(find_shape(shape), common).options
    else:
        options = _options(model, kv_heads, prefill, decode, common)
    return _run_one(options, as_json=as_json)


class _Common(NamedTuple):
    """What all runs of one command share."""

    requests: int | None
    transport: str
    processes: str
    seed: int
    timeout_s: float
    device: str


class _Named(NamedTuple):
    shape: Shape
    options: DemoOptions


def _shape_options(shape: Shape, common: _Common) -> _Named:
    heads = shape.kv_heads if shape.model == "qwen2" else None
    return _Named(shape, _options(shape.model, heads, shape.prefill, shape.decode, common))


def _options(model: str, kv_heads: int | None, prefill: str | None, decode: str | None, common: _Common) -> DemoOptions:
    from rdma_kv.demo.model import ModelShape
    from rdma_kv.demo.run import DemoOptions

    if model not in MODELS:
        raise ConfigError("--model", f"{model!r}; use {' or '.join(MODELS)}")
    if model == "mla":
        if kv_heads is not None:
            raise ConfigError("--kv-heads", "an MLA model has one latent and no KV heads; leave it out")
        model_shape = ModelShape(seed=common.seed, layers=MODEL_LAYERS, model="mla")
    else:
        model_shape = ModelShape(seed=common.seed, layers=MODEL_LAYERS, kv_heads=4 if kv_heads is None else kv_heads)
    options = DemoOptions(
        _engine("--prefill", prefill, PREFILL, model),
        _engine("--decode", decode, DECODE, model),
        model_shape,
        16 if common.requests is None else common.requests,
        common.transport,
        common.seed,
        common.timeout_s,
        common.processes,
        common.device,
    )
    options.check()
    return options


def _engine(option: str, text: str | None, default: Side, model: str) -> EngineOptions:
    from rdma_kv.demo.pools import TOKEN_GRANULAR
    from rdma_kv.demo.run import EngineOptions

    layouts = MLA_LAYOUTS if model == "mla" else LAYOUTS
    if model == "mla":
        default = replace(default, layout="mla")
    side = default if text is None else parse_side(option, text, default, keys=KEYS, layouts=layouts)
    token_granular = side.layout in TOKEN_GRANULAR and "page=" not in (text or "")
    return EngineOptions(side.topology(MODEL_LAYERS), 1 if token_granular else side.page, side.layout)


def _run_one(options: DemoOptions, *, as_json: bool) -> int:
    from rdma_kv.demo.run import run_demo

    if not as_json:
        _show_routing(options)
    with _Progress(options.requests) as progress:
        verdict = run_demo(options, progress)
    if as_json:
        print_json(verdict.as_json())
    else:
        _show_verdict(console(), verdict)
    return 0 if verdict.as_json()["ok"] else 1


def _run_all(named: list[_Named], *, as_json: bool) -> int:
    """Every shape in turn: a line for each, then one verdict."""
    from rdma_kv.demo.run import run_demo

    answers = []
    for number, (shape, options) in enumerate(named, 1):
        print(f"[{number}/{len(named)}] {shape.name}: {shape.what}", file=sys.stderr, flush=True)
        if options.requests == 16:
            options = replace(options, requests=8)
        verdict = run_demo(options, lambda stage, done: None)
        answer = {"name": shape.name, **verdict.as_json()}
        answers.append(answer)
        if not as_json:
            out = console()
            word = "ok    " if answer["ok"] else "FAILED"
            text = f"{word} {shape.name:17} {shape.prefill:22} -> {shape.decode:28} {answer['bytes']:>9,} bytes"
            out.print(f"{text}, {answer['transport']} ({answer['lane']}), {answer['seconds']:.1f} s", soft_wrap=True)
            if not answer["ok"]:
                _show_verdict(out, verdict)
    good = all(answer["ok"] for answer in answers)
    if as_json:
        print_json({"ok": good, "shapes": answers})
    else:
        passed = sum(1 for answer in answers if answer["ok"])
        console().print(f"{'OK' if good else 'FAILED'}: {passed} of {len(answers)} shapes")
    return 0 if good else 1


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

    from rdma_kv.demo.run import process_specs
    from rdma_kv.planner import Route

    prefill, decode = options.prefill, options.decode
    out = console()
    for name, engine in (("prefill", prefill), ("decode", decode)):
        t = engine.topology
        out.print(
            f"{name:8}tp={t.tp} dp={t.dp}, {engine.layout.upper()}, {engine.page_size} tokens a page", soft_wrap=True
        )
    if options.on_gpus:
        places = (f"{spec.name} on cuda:{spec.gpu}" for spec in process_specs(options, Path()))
        out.print(f"GPUs    {', '.join(places)}", soft_wrap=True)
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
    sent = [answer for answers in verdict.sent.values() for answer in answers]
    arrived = [answer for answers in verdict.arrived.values() for answer in answers]
    if sent:
        rates = [
            sum(a.received_bytes for a in verdict.arrived[n]) / max(s.seconds for s in verdict.sent[n]) / 1e9
            for n in verdict.sent
        ]
        where = f" on {answer['device']}" if answer["device"] != "cpu" else ""
        out.print(
            f"moved {answer['bytes']:,} bytes of KV{where} over {answer['transport']} ({answer['lane']}); "
            f"from push to done {median(rates):.3f} GB/s (median of small requests, beside the model on the same cores)",
            soft_wrap=True,
        )
        stages = {
            "compute": [s.compute_s for s in sent],
            "gather": [s.gather_s for s in sent],
            "write": [s.write_s for s in sent],
            "scatter": [a.scatter_s for a in arrived],
            "push to done": [s.seconds for s in sent],
        }
        means = ", ".join(f"{name} {_mean(values)}" for name, values in stages.items())
        out.print(f"per request and process, on average: {means}", soft_wrap=True)
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
