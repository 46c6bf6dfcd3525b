"""Put recorded figures into `docs/performance.md`, as tables.

    python docs/render_performance.py          write the part of docs/performance.md between its two marks
    python docs/render_performance.py --check  only say whether it is up to date

The figures are what `rdma-kv bench ... --json` printed, kept as printed in `docs/performance/`; `machine.json` there says on
what, with which versions and of which commit. Goals that were missed are shown as missed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

PAGE: Final = Path(__file__).with_name("performance.md")
FOLDER: Final = Path(__file__).with_name("performance")
BEGIN, END = "<!-- figures -->\n", "<!-- end of figures -->\n"
TITLES: Final = {
    "transport": "`bench transport`",
    "transfer_ucx": "`bench transfer --transport ucx`, cma",
    "transfer_ucx_tcp": "`UCX_TLS=tcp`, `bench transfer --transport ucx`",
    "transfer_nixl": "`bench transfer --transport nixl`, cma",
    "latency_ucx": "`bench latency --transport ucx`, cma",
    "latency_ucx_tcp": "`UCX_TLS=tcp`, `bench latency --transport ucx`",
    "latency_nixl": "`bench latency --transport nixl`, cma",
    "idle_ucx": "`bench idle --transport ucx`",
    "idle_nixl": "`bench idle --transport nixl`",
    "sidecar": "`bench sidecar --transport ucx`, cma, of commit e0e2028",
    "gpu": "`bench gpu`, on a machine of its own: see its last rows",
    "multi_gpu": "`bench multigpu`, on a machine of its own: see its last rows",
}
_MEASURED: Final = re.compile(r"(?P<case>.+?): (?P<who>[^:]+?)(, (?P<lane>tcp|cma))?")
_SPREAD: Final = ", spread"

Row = Mapping[str, Any]


def rendered() -> str:
    """All tables."""
    parts = [_machine()]
    for name, title in TITLES.items():
        path = FOLDER / f"{name}.json"
        if path.exists():
            rows = json.loads(path.read_text())["rows"]
            parts += [f"### Figures of {title}\n", *_goals(rows)]
            parts += list(_grid(rows)) if name == "transport" else list(_plain(rows))
    return "\n".join(parts)


def _machine() -> str:
    facts = json.loads((FOLDER / "machine.json").read_text())
    lines = [f"| {key} | {value} |" for key, value in facts.items()]
    return "\n".join(["| recorded on | |", "| --- | --- |", *lines, ""])


def _goals(rows: Iterable[Row]) -> Iterator[str]:
    with_goal = [row for row in rows if row["ok"] is not None]
    if not with_goal:
        return
    yield "| goal | value | |\n| --- | --- | --- |"
    for row in with_goal:
        yield f"| {row['name']} | {_number(row['value'])} {row['unit']} | {'met' if row['ok'] else '**missed**'} |"
    yield ""


def _plain(rows: Iterable[Row]) -> Iterator[str]:
    spreads = {row["name"].removesuffix(_SPREAD): row["value"] for row in rows if row["name"].endswith(_SPREAD)}
    yield "| figure, median | value | spread |\n| --- | --- | --- |"
    for row in rows:
        if row["ok"] is None and not row["name"].endswith(_SPREAD):
            unit = row["unit"] and f" {row['unit']}"
            yield f"| {row['name']} | {_number(row['value'])}{unit} | {spreads.get(row['name'], '')} |"
    yield ""


def _grid(rows: Iterable[Row]) -> Iterator[str]:
    """Contestants down, sizes across, a table per lane."""
    figures: dict[str, dict[str, dict[str, str]]] = {}
    cases: dict[str, None] = {}
    for row in rows:
        found = _MEASURED.fullmatch(row["name"])
        if row["ok"] is not None or row["unit"] == "ratio" or not row["unit"] or found is None:
            continue
        if row["name"].endswith(_SPREAD):
            continue
        case, packed, how = found["case"].partition(" packed")
        lane = found["lane"] or "one process"
        who = found["who"] + (f",{packed}{how}" if packed else "")
        cases[case] = None
        figures.setdefault(lane, {}).setdefault(who, {})[case] = f"{_number(row['value'])} {row['unit']}"
    for lane, table in figures.items():
        yield f"| {lane} | {' | '.join(cases)} |\n|{' --- |' * (len(cases) + 1)}"
        for who, cells in table.items():
            yield f"| {who} | {' | '.join(cells.get(case, '') for case in cases)} |"
        yield ""


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def main() -> int:
    page = PAGE.read_text()
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        print(f"{PAGE} lacks its marks", file=sys.stderr)
        return 1
    wanted = before + begin + "\n" + rendered() + "\n" + end + after
    if "--check" in sys.argv[1:]:
        if wanted != page:
            print(f"{PAGE} is not up to date: run python docs/render_performance.py", file=sys.stderr)
        return int(wanted != page)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
