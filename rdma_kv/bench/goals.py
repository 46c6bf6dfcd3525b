"""Rows whose goal is not "stay below", contestants that are missing, and the spread of repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rdma_kv.bench.rows import Row

SPREAD = ", spread"
"""End of the name of a row that says how far the repetitions of the row before lie apart."""

Meter = Callable[[str, int, int], None]
"""Told what is being measured now, and how many of how many steps are done."""


class Relation(StrEnum):
    """How a value must lie to its goal."""

    AT_LEAST = ">="
    ABOVE = ">"
    AT_MOST = "<="


@dataclass(frozen=True, slots=True)
class Bound(Row):
    """A figure that must lie so to its goal."""

    relation: Relation = Relation.AT_LEAST

    @property
    def ok(self) -> bool | None:
        if self.goal is None:
            return None
        if isinstance(self.value, str):
            return False
        match self.relation:
            case Relation.AT_LEAST:
                return self.value >= self.goal
            case Relation.ABOVE:
                return self.value > self.goal
            case Relation.AT_MOST:
                return self.value <= self.goal


@dataclass(frozen=True, slots=True)
class Missing(Row):
    """What could not be measured; the value says why. Never ok, also without a goal."""

    @property
    def ok(self) -> bool | None:
        return False


def figure(name: str, samples: Sequence[float], unit: str) -> list[Row]:
    """Median of the repetitions, then how far they lie apart."""
    spread = f"{min(samples):.4g}..{max(samples):.4g}"
    return [Row(name, statistics.median(samples), unit), Row(name + SPREAD, spread, unit)]
