"""Draw the state diagrams of `docs/states.md` from the tables that the machines run on.

    python docs/render_states.py          write docs/states.md
    python docs/render_states.py --check  only say whether it is up to date

A machine starts in the first member of its state enum. What a state means is the comment beside it in the source.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from rdma_kv.protocol.incoming import INCOMING_TABLE, INCOMING_TERMINAL, IncomingState
from rdma_kv.protocol.link import LINK_TABLE, LINK_TERMINAL, LinkState
from rdma_kv.protocol.liveness import LIFE_TABLE, LIFE_TERMINAL, LifeState
from rdma_kv.protocol.outgoing import OUTGOING_TABLE, OUTGOING_TERMINAL, OutgoingState

TARGET = Path(__file__).with_name("states.md")
HEAD = """# The state machines

Drawn by `python docs/render_states.py` from the tables in `rdma_kv/protocol/`; do not edit by hand. What surrounds the
machines is in [design.md](design.md). In the tables a row is the state, a column the event, a cell the next state. An
empty cell is an error and changes nothing; final states have no row and absorb every event.
"""


class Drawing(NamedTuple):
    """One machine, and the words above its picture."""

    title: str
    text: str
    states: type[Enum]
    table: Mapping[tuple[Any, Any], Any]
    terminal: frozenset[Any]


DRAWINGS = (
    Drawing(
        "Link: the handshake of one control connection",
        "`rdma_kv/protocol/link.py`. The `connect` timeout ends `GREETING`; `UP` lasts until BYE, the end of the stream, or "
        "the loss of the peer (below).",
        LinkState,
        LINK_TABLE,
        LINK_TERMINAL,
    ),
    Drawing(
        "Liveness: the peer of one link that is up",
        "`rdma_kv/protocol/liveness.py`. A timer of its own judges the silence: two heartbeats, then the `lease`.",
        LifeState,
        LIFE_TABLE,
        LIFE_TERMINAL,
    ),
    Drawing(
        "Outgoing: the prefill side of one transfer on one link",
        "`rdma_kv/protocol/outgoing.py`. The `quiesce` timeout ends `ABORTING`, the transfer's own every other state.",
        OutgoingState,
        OUTGOING_TABLE,
        OUTGOING_TERMINAL,
    ),
    Drawing(
        "Incoming: the decode side of one transfer on one link",
        "`rdma_kv/protocol/incoming.py`. The `quiesce` timeout ends `ABORTING`, the transfer's own every other state.",
        IncomingState,
        INCOMING_TABLE,
        INCOMING_TERMINAL,
    ),
)


def render_states() -> str:
    """The whole of `docs/states.md`."""
    return "\n".join([HEAD, *(_section(drawing) for drawing in DRAWINGS)])


def _section(drawing: Drawing) -> str:
    return "\n".join(
        [f"## {drawing.title}\n", f"{drawing.text}\n", _diagram(drawing), _meanings(drawing), _matrix(drawing)]
    )


def _diagram(drawing: Drawing) -> str:
    labels: dict[tuple[str, str], list[str]] = {}
    for (state, event), following in drawing.table.items():
        labels.setdefault((state.name, following.name), []).append(event.name)
    first = next(iter(drawing.states)).name
    lines = [
        f"    [*] --> {first}",
        *(f"    {a} --> {b} : {', '.join(events)}" for (a, b), events in labels.items()),
        *(f"    {state.name} --> [*]" for state in drawing.states if state in drawing.terminal),
    ]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```\n"])


def _meanings(drawing: Drawing) -> str:
    states, events = _comments(drawing.states), _comments(_events(drawing))
    lines = []
    for state in drawing.states:
        words = [*states.get(state.name, ()), *(["final"] if state in drawing.terminal else ())]
        if words:
            lines.append(f"* `{state.name}`: {'; '.join(words)}")
    lines += [f"* event {name}: {'; '.join(words)}" for name, words in events.items()]
    return "\n".join([*lines, ""])


def _matrix(drawing: Drawing) -> str:
    events = list(_events(drawing))
    lines = [f"| | {' | '.join(event.name for event in events)} |", f"| --- |{' --- |' * len(events)}"]
    for state in drawing.states:
        if state not in drawing.terminal:
            cells = (drawing.table.get((state, event)) for event in events)
            lines.append(f"| `{state.name}` | {' | '.join(f'`{cell.name}`' if cell else '' for cell in cells)} |")
    return "\n".join([*lines, ""])


def _events(drawing: Drawing) -> type[Enum]:
    return type(next(iter(drawing.table))[1])


def _comments(members: type[Enum]) -> dict[str, list[str]]:
    """By name, the comment beside each member in the source."""
    found = re.findall(r"^\s+([A-Z_]+) = auto\(\)  # (.+)$", inspect.getsource(members), re.MULTILINE)
    return {name: [text] for name, text in found}


def main(arguments: list[str]) -> int:
    """Write the file, or look whether it is up to date. The exit status."""
    text = render_states()
    if "--check" in arguments:
        return 0 if TARGET.is_file() and TARGET.read_text(encoding="utf-8") == text else 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
