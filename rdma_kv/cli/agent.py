"""`rdma-kv agent`: the sidecar, a mover in a process of its own beside an engine; and how one is."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from rdma_kv.cli.output import console, print_json
from rdma_kv.errors import ConfigError


def agent(
    *,
    config: Annotated[Path | None, typer.Option(help="The sidecar's agent.toml.")] = None,
    status: Annotated[bool, typer.Option("--status", help="Ask a running sidecar how it is, and end.")] = False,
    socket: Annotated[Path | None, typer.Option(help="Of the sidecar to ask; else that of --config.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="With --status: one line of JSON.")] = False,
) -> int:
    """Run a sidecar until SIGTERM, which drains it; or, with --status, ask one.

    Exit status: 0 when all calls had ended, 2 where it cannot start, 3 when calls were cut off. Logs go to standard error.
    """
    from rdma_kv.sidecar.settings import read_config

    if not status:
        if config is None:
            raise ConfigError("--config", "is missing; name the sidecar's agent.toml")
        if socket is not None or as_json:
            raise ConfigError("--socket" if socket is not None else "--json", "goes with --status only")
        return _serve(config)
    from rdma_kv.sidecar.status import ask_status

    if socket is None:
        if config is None:
            raise ConfigError("--socket", "is missing; name the socket of the sidecar to ask, or its --config")
        socket = read_config(config).socket
    answer = asyncio.run(ask_status(socket))
    if as_json:
        print_json(answer)
    else:
        _table(answer)
    return 0


def _serve(path: Path) -> int:
    from rdma_kv.sidecar.process import run_sidecar
    from rdma_kv.sidecar.settings import read_config
    from rdma_kv.transport.ucx_environment import prepare_ucx_environment

    prepare_ucx_environment(os.environ)
    return run_sidecar(read_config(path))


def _table(answer: dict[str, Any]) -> None:
    from rich.table import Table

    out = console()
    ready = "ready" if answer["ready"] else "not ready"
    out.print(f"rdma-kv {answer['version']}, process {answer['pid']}, up for {answer['uptime_s']} s, {ready}")
    table = Table("agent", "state", "address", "calls", "slots: free/held/retired/all", "lanes")
    for each in answer["agents"]:
        stats = each["stats"]
        held = sum(stats.get("slots_held", {}).values())
        slots = [stats.get("slots_free", 0), held, stats.get("slots_retired", 0), stats.get("slots_total", 0)]
        lanes = ", ".join(stats.get("lanes", ()))
        table.add_row(each["id"], each["state"], each["address"], str(each["calls"]), "/".join(map(str, slots)), lanes)
    out.print(table)
