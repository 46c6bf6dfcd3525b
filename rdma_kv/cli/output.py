"""What every command prints: tables for people and one line of JSON on standard output, complaints on standard error."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from rich.console import Console

MIN_WIDTH = 80  # columns; a narrower terminal wraps lines, which loses less than leaving cells out


def print_json(value: object) -> None:
    """`value` as JSON on one line of standard output; the last thing that a command prints there."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
    sys.stdout.flush()


def print_error(label: str, message: str) -> None:
    """One line on standard error, whatever the message holds."""
    print(printable(f"{label}: {message}"), file=sys.stderr, flush=True)


def printable(text: str) -> str:
    """`text` on one line, without control characters: what came from a file must not steer a terminal."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def console() -> Console:
    """Standard output for people. Square brackets are intervals here, not mark-up."""
    from rich.console import Console

    out = Console(file=sys.stdout, markup=False, emoji=False, highlight=False)
    out.width = max(out.width, MIN_WIDTH)
    return out
