"""The fault matrix as data: every cell, which of them cannot be and why, and what must come of the others.

A cell is a fault, whom it befalls, the point of the transfer, the lane, and the number of sources. `REASONS` says which do
not apply. `EXPECTED` says how long the end may take and how each participant may end. `PENDING` is the one place where
cells are named whose product part is not there yet: they run and are counted, and do not fail the suite.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Fault(StrEnum):
    """What goes wrong."""

    KILL = "kill -9"
    STALL = "SIGSTOP, SIGCONT within the lease"
    STOP = "SIGSTOP, SIGCONT long after the lease"
    EXIT = "exit"
    CANCEL = "task cancel"
    ABORT = "abort"
    BREAK = "stream broken at a random byte"
    NO_POST = "WRITE fails to post"
    NO_NOTE = "notification lost"
    DROP = "frame dropped"
    DOUBLE = "frame doubled"
    REORDER = "frames reordered"
    DELAY = "frame delayed"


class Point(StrEnum):
    """When."""

    BEFORE_OFFER = "before OFFER"
    AFTER_OFFER = "after OFFER"
    AFTER_GRANT = "after GRANT"
    DURING_WRITE = "during WRITE"
    BEFORE_ACK = "between WRITE and ACK"
    AFTER_ACKS = "after the last ACK"


class Lane(StrEnum):
    LOOPBACK = "loopback"
    NIXL_TCP = "nixl tcp"
    NIXL_CMA = "nixl cma"
    UCX_TCP = "ucx tcp"
    UCX_CMA = "ucx cma"

    @property
    def transport(self) -> str:
        return self.value.partition(" ")[0]

    @property
    def wire(self) -> str:
        return self.value.partition(" ")[2] or self.value


class Victim(StrEnum):
    """Which side the fault befalls: with four sources, one of them, or the one target."""

    PREFILL = "prefill"
    DECODE = "decode"


SOURCES = (1, 4)
FRAME_FAULTS = frozenset({Fault.DROP, Fault.DOUBLE, Fault.REORDER, Fault.DELAY})


class Cell(NamedTuple):
    fault: Fault
    victim: Victim
    point: Point
    lane: Lane
    sources: int

    def __str__(self) -> str:
        many = f"{self.sources} source{'s' if self.sources > 1 else ''}"
        return f"{self.fault} of {self.victim}, {self.point}, {self.lane}, {many}"


_LATE = {Point.BEFORE_ACK, Point.AFTER_ACKS}

REASONS: tuple[tuple[Callable[[Cell], bool], str], ...] = (
    (
        lambda c: c.fault in FRAME_FAULTS and c.lane is not Lane.LOOPBACK,
        "a TCP stream loses, doubles and reorders no frame: it breaks, which is another fault",
    ),
    (lambda c: c.fault is Fault.NO_POST and c.victim is Victim.DECODE, "only the initiator posts"),
    (lambda c: c.fault is Fault.NO_NOTE and c.victim is Victim.PREFILL, "only the target is notified"),
    (
        lambda c: c.fault is Fault.NO_POST and c.point in {Point.DURING_WRITE, *_LATE},
        "the WRITE has been posted by then",
    ),
    (lambda c: c.fault is Fault.NO_NOTE and c.point in _LATE, "the notification has come by then"),
    (
        lambda c: c.fault in FRAME_FAULTS and c.victim is Victim.PREFILL and c.point is Point.AFTER_ACKS,
        "prefill has said its last word",
    ),
)


def not_applicable(cell: Cell) -> str:
    """Why the cell cannot be; empty where it can."""
    return next((reason for applies, reason in REASONS if applies(cell)), "")


ALL = tuple(Cell(*values) for values in itertools.product(Fault, Victim, Point, Lane, SOURCES))


# --- what must come of them ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Times:
    """Seconds of one lane's runs: a clock that a test turns has all the time, a real one has not."""

    heartbeat: float
    lease: float
    transfer: float
    quiesce: float
    stall: float  # within the lease
    stop: float  # beyond lease and transfer
    slack: float  # of a busy machine


TURNED = Times(heartbeat=0.5, lease=2.0, transfer=10.0, quiesce=2.0, stall=0.4, stop=14.0, slack=0.0)
REAL = Times(heartbeat=0.3, lease=1.2, transfer=5.0, quiesce=1.0, stall=0.25, stop=8.0, slack=1.5)

PATIENT = Times(heartbeat=1.0, lease=4.0, transfer=6.0, quiesce=1.0, stall=0.25, stop=8.0, slack=1.5)
"""Where members fill and look through 256 MiB on their loops."""


@dataclass(frozen=True)
class Expected:
    """How a cell may end.

    Attributes:
        within: seconds from the fault to the outcome of everybody who runs.
        victim_within: the same for the victim, from the moment it can run again.
        success: whether all must succeed (True), nobody may (False), or either may be, with right bytes (None).
    """

    within: Callable[[Times], float]
    victim_within: Callable[[Times], float]
    success: bool | None


DETECTED_S = 1.0  # from the detection of a failure to everybody's outcome


def expected(cell: Cell) -> Expected:
    """The demand on a cell."""
    at_once = lambda t: DETECTED_S  # noqa: E731
    by_lease = lambda t: t.lease + DETECTED_S  # noqa: E731
    by_deadline = lambda t: t.transfer + DETECTED_S  # noqa: E731
    # After the last ACK, and between processes also before it, prefill may have said FINISH: decode may have everything.
    last = cell.point is Point.AFTER_ACKS or (
        cell.point is Point.BEFORE_ACK and cell.victim is Victim.PREFILL and cell.lane is not Lane.LOOPBACK
    )
    match cell.fault:
        case Fault.KILL | Fault.EXIT | Fault.CANCEL | Fault.ABORT:
            closing = (lambda t: t.quiesce + DETECTED_S) if cell.fault is Fault.EXIT else at_once
            return Expected(at_once, closing, None if last else False)
        case Fault.STALL:
            return Expected(lambda t: t.stall + DETECTED_S, at_once, True)
        case Fault.STOP:
            return Expected(by_lease, at_once, None if last else False)
        case Fault.BREAK:
            return Expected(by_lease, by_lease, None)
        case Fault.NO_POST:
            return Expected(at_once, at_once, False)
        case Fault.NO_NOTE:
            return Expected(by_deadline, by_deadline, False)
        case Fault.DROP | Fault.REORDER | Fault.DELAY | Fault.DOUBLE:
            return Expected(by_deadline, by_deadline, None)


PENDING: tuple[tuple[Callable[[Cell], bool], str], ...] = ()
"""Cells whose part of the product is not there yet, and which part: adjust it here and nowhere else."""


def pending(cell: Cell) -> str:
    return next((reason for applies, reason in PENDING if applies(cell)), "")


# --- which of them run --------------------------------------------------------------------------------------------------


def pairwise(cells: Iterable[Cell], seed: int = 0) -> list[Cell]:
    """A few of `cells` in which every pair of values that any of them has is there: greedy, the same for one seed."""
    left = list(cells)
    random.Random(seed).shuffle(left)
    missing = {pair for cell in left for pair in _pairs(cell)}
    chosen: list[Cell] = []
    while missing:
        best = max(left, key=lambda cell: len(missing & _pairs(cell)))
        chosen.append(best)
        missing -= _pairs(best)
        left.remove(best)
    return chosen


def _pairs(cell: Cell) -> set[tuple[tuple[int, object], tuple[int, object]]]:
    return set(itertools.combinations(enumerate(cell), 2))


def chosen_cells(lanes: Iterable[Lane], seed: int = 0) -> list[Cell]:
    """All that apply on loopback; on the other lanes a part that covers all pairs."""
    lanes = set(lanes)
    fits = [cell for cell in ALL if cell.lane in lanes and not not_applicable(cell)]
    return [cell for cell in fits if cell.lane is Lane.LOOPBACK] + pairwise(
        [cell for cell in fits if cell.lane is not Lane.LOOPBACK], seed
    )
