"""The `rdma-kv` command. Each subcommand lies in a file of its own and is named in one line here.

A command reports bad input by raising ConfigError; what becomes of errors is decided in `run` alone: one line on
standard error that begins with the command, exit status 2 for bad input or usage and 1 for anything that went wrong
later, never a traceback for what rdma-kv raises on purpose.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import cast

import typer

from rdma_kv.cli.agent import agent
from rdma_kv.cli.bench import bench
from rdma_kv.cli.demo import demo
from rdma_kv.cli.output import print_error
from rdma_kv.cli.plan import plan
from rdma_kv.cli.soak import soak
from rdma_kv.errors import ConfigError, RdmaKvError

BAD_INPUT = 2
FAILED = 1
INTERRUPTED = 130

app = typer.Typer(name="rdma-kv", add_completion=False, rich_markup_mode=None)


@app.callback()
def root() -> None:
    """KV-cache transfer between prefill and decode replicas."""


app.command("agent")(agent)
app.command("demo")(demo)
app.command("plan")(plan)
app.command("soak")(soak)
app.add_typer(bench)

# The base of all that typer itself refuses; which package it lies in depends on typer's version.
_UsageProblem: type[Exception] = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


def run(arguments: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit status."""
    command = typer.main.get_command(app)
    label = _label(arguments)
    try:
        status = command.main(args=list(arguments), prog_name="rdma-kv", standalone_mode=False)
    except _UsageProblem as error:
        problem = cast(typer.BadParameter, error)
        print_error(label, f"{problem.format_message()} (see {label} --help)")
        return problem.exit_code
    except ConfigError as error:
        print_error(label, str(error))
        return BAD_INPUT
    except RdmaKvError as error:
        print_error(label, str(error))
        return FAILED
    except (KeyboardInterrupt, typer.Abort):
        print_error(label, "interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return status if isinstance(status, int) else 0


def _label(arguments: Sequence[str]) -> str:
    names = {command.name for command in app.registered_commands}
    return f"rdma-kv {arguments[0]}" if arguments and arguments[0] in names else "rdma-kv"


def main() -> None:
    """Entry point of the installed command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no reason to fail
    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
