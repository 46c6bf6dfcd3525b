"""One measured figure, and what a run of them says together."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Progress = Callable[[str], None]
"""Told what is being measured now."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        goal: what the value must stay below, in the same unit; None where the row only informs.
    """

    name: str
    value: float | str
    unit: str
    goal: float | None = None

    @property
    def ok(self) -> bool | None:
        """Whether the goal is met; None without one."""
        if self.goal is None:
            return None
        return not isinstance(self.value, str) and self.value < self.goal

    def as_json(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "unit": self.unit, "goal": self.goal, "ok": self.ok}


def all_ok(rows: Sequence[Row]) -> bool:
    """Whether every row with a goal meets it, and there is one."""
    verdicts = [row.ok for row in rows if row.ok is not None]
    return bool(verdicts) and all(verdicts)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """The object that `--json` prints."""
    return {"ok": all_ok(rows), "rows": [row.as_json() for row in rows]}


def median_ms(work: Callable[[], object], repetitions: int, *, before: Callable[[], object] = lambda: None) -> float:
    """Median milliseconds of `work`; `before` runs ahead of each repetition and is not counted."""
    times_ns = []
    for _ in range(repetitions):
        before()
        begin = time.perf_counter_ns()
        work()
        times_ns.append(time.perf_counter_ns() - begin)
    return statistics.median(times_ns) / 1e6


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of all do not exceed."""
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]
