"""`rdma-kv soak`: random requests, aborts, stalls and restarts among agents in processes, for as long as is asked."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from rdma_kv.cli.output import console, print_json


def soak(
    *,
    minutes: Annotated[float, typer.Option(help="How long trouble is made; start and end come on top.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of everything random.")] = 0,
    transport: Annotated[str, typer.Option(help="auto, ucx or nixl.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON on standard output.")] = False,
) -> int:
    """Try whether anything is lost, poisoned, hung or leaked: 4 prefill and 4 decode agents under all kinds of trouble.

    Exit status 0 only if every call has ended in time, every byte that was received was verified, none was written where
    it must not be, and nothing is held at the end.
    """
    from rdma_kv.soak.run import SoakOptions, run_soak

    verdict = run_soak(SoakOptions(minutes, seed, transport), _progress)
    answer = verdict.as_json()
    if as_json:
        print_json(answer)
    else:
        _table(answer)
    return 0 if verdict.ok else 1


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _table(answer: dict[str, object]) -> None:
    from rich.table import Table

    table = Table("what", "value")
    for name, value in answer.items():
        text = ", ".join(f"{k} {v}" for k, v in value.items()) if isinstance(value, dict) else value
        text = "\n".join(map(str, text)) if isinstance(text, list) else str(text)
        table.add_row(name, text)
    console().print(table)
