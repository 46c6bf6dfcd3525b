"""Running programs for the lab: their output in the error, a deadline on each, and nothing that outlives it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRESS = "multinode:"
LIMIT_S = 600.0


class LabError(Exception):
    """The lab itself could not do something; says what, and what the program said."""


def say(text: str) -> None:
    """A line of progress on standard error."""
    print(PROGRESS, text, file=sys.stderr, flush=True)


def run(
    arguments: Sequence[str], *, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S, check: bool = True
) -> str:
    """Standard output of a program.

    Raises:
        LabError: it is not there, failed (where `check`), or took longer than `limit_s`; its process group is gone then.
    """
    try:
        process = subprocess.Popen(
            arguments,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as exc:
        raise LabError(f"{arguments[0]}: {exc.strerror}") from exc
    try:
        out, problem = process.communicate(timeout=limit_s)
    except BaseException as exc:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(exc, subprocess.TimeoutExpired):
            raise LabError(f"{' '.join(arguments)}: not finished within {limit_s:.0f} s") from exc
        raise
    if check and process.returncode:
        text = (problem or out).strip()[-4000:]
        raise LabError(f"{' '.join(arguments)}: exit status {process.returncode}\n{text}")
    return out


def works(arguments: Sequence[str], *, env: Mapping[str, str] | None = None, limit_s: float = 30.0) -> bool:
    """Whether a program exists and ends with status 0."""
    try:
        run(arguments, env=env, limit_s=limit_s)
    except LabError:
        return False
    return True
