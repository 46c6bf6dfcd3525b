"""Things that are measured side by side: in each round every one of them once, and what their samples say as rows."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from rdma_kv.bench.goals import Bound, Meter, Missing, Relation, figure
from rdma_kv.bench.rows import Row
from rdma_kv.errors import RdmaKvError

logger = logging.getLogger(__name__)


@dataclass
class Step:
    """One thing to measure.

    Attributes:
        num_bytes: of one measurement; 0 where its rows are a time and no rate.
        measure: does it once, in seconds.
        check: called once, after the first measurement: raises where other bytes arrived than were sent.
        took_s: a sample a round.
        missing: why there is none.
    """

    name: str
    num_bytes: int
    measure: Callable[[], float]
    check: Callable[[], object] = lambda: None
    took_s: list[float] = field(default_factory=list)
    missing: str = ""

    @property
    def median_s(self) -> float | None:
        """None where there is no sample."""
        return statistics.median(self.took_s) if self.took_s else None

    @property
    def rows(self) -> list[Row]:
        """Its figure, or a row that says why there is none."""
        if not self.took_s:
            return [Missing(self.name, self.why, "")]
        if not self.num_bytes:
            return figure(self.name, [1e6 * took for took in self.took_s], "us")
        return figure(self.name, [self.num_bytes / took / 1e9 for took in self.took_s], "GB/s")

    @property
    def why(self) -> str:
        return self.missing or "failed: not measured"

    def take(self, *, counts: bool) -> None:
        """Measure once. The first time, that does not count, the bytes are checked. An error is the end of the step.

        Raises:
            Exception: no error of ours, the system's or the device's, but a fault of the bench itself.
        """
        if self.missing:
            return
        try:
            took_s = self.measure()
            if counts:
                self.took_s.append(took_s)
            else:
                self.check()
        except (RdmaKvError, OSError, RuntimeError) as exc:  # torch and Triton raise the last
            self.missing = f"failed: {exc}"
            self.took_s.clear()


def absent(name: str, why: object) -> Step:
    """A step that cannot be."""
    return Step(name, 0, lambda: 0.0, missing=f"missing: {why}")


def run_rounds(what: str, steps: Sequence[Step], rounds: int, meter: Meter) -> None:
    """Measure all steps, `rounds` times and once before: that does not count."""
    total = (rounds + 1) * len(steps)
    for number in range(rounds + 1):
        for place, step in enumerate(steps):
            meter(f"{what}, round {number} of {rounds}: {step.name}", number * len(steps) + place, total)
            step.take(counts=number > 0)
    meter(f"{what}: done", total, total)


def whole_part(name: str, measure: Callable[[], list[Row]]) -> list[Row]:
    """The rows of a part; one that says what went wrong where it broke: others keep their figures."""
    try:
        return measure()
    except Exception as exc:
        logger.exception("part %s has failed", name)
        return [Missing(name, f"failed: {type(exc).__name__}: {exc}", "")]


def faster(name: str, step: Step, peer: Step, goal: float | None) -> Row:
    """How many times the rate of `peer` that of `step` is, and whether that is at least `goal`."""
    return _bound(name, (step, peer), lambda: _rate(step) / _rate(peer), goal, Relation.AT_LEAST)


def longer(name: str, step: Step, parts: Iterable[Step], goal: float | None) -> Row:
    """How many times as long as all of `parts` together `step` takes, and whether that is at most `goal`."""
    parts = list(parts)
    return _bound(name, (step, *parts), lambda: _time(step) / sum(map(_time, parts)), goal, Relation.AT_MOST)


def _bound(
    name: str, needed: Sequence[Step], ratio: Callable[[], float], goal: float | None, relation: Relation
) -> Row:
    name += "" if goal is None else f" {relation.value} {goal:g}"
    for step in needed:
        if step.median_s is None:
            return Bound(name, f"{step.name}: {step.why}", "ratio", goal, relation)
    return Bound(name, ratio(), "ratio", goal, relation)


def _time(step: Step) -> float:
    return statistics.median(step.took_s)


def _rate(step: Step) -> float:
    return step.num_bytes / _time(step)
