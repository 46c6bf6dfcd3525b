"""A few faults between real processes; `make faults` runs the rest, with 256 MiB and two hundred restarts."""

from __future__ import annotations

import pytest
from lanes import run_lane_cell, run_restarts
from matrix import REAL, Cell, Fault, Lane, Point, Victim
from poison import run_poison
from weather import run_weather

CELLS = [
    Cell(Fault.BREAK, Victim.DECODE, Point.BEFORE_ACK, Lane.UCX_TCP, 1),
    Cell(Fault.KILL, Victim.PREFILL, Point.AFTER_GRANT, Lane.NIXL_CMA, 1),
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_cell_between_processes(cell):
    verdict = run_lane_cell(cell)
    if verdict.skipped:
        pytest.skip(verdict.skipped)
    assert verdict.ok, (verdict.problems, [str(end) for end in verdict.ended])


@pytest.mark.long
def test_p01_the_decode_agent_is_killed_and_restarted_ten_times():
    verdict = run_restarts(Lane.UCX_TCP, 10, seed=1)
    assert verdict.ok, verdict.problems


@pytest.mark.parametrize(("victim", "lane"), [(Victim.DECODE, Lane.NIXL_TCP)])
def test_memory_of_a_sender_whose_target_is_stopped(victim, lane):
    verdict = run_poison(victim, lane, mib=16, times=REAL)
    if verdict.skipped:
        pytest.skip(verdict.skipped)
    assert verdict.poisoned_bytes == 0, verdict
    assert not verdict.problems, verdict


def test_f36_every_seventh_frame_dropped_or_doubled():
    verdict = run_weather(200, seed=1)
    assert not verdict.problems, (verdict.problems, verdict.seed)
    assert verdict.transfers > 200
    assert len(verdict.outcomes) > 1, "nothing was ever dropped"
