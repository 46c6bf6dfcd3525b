"""The fault matrix on loopback, every cell; and that the suite can see what it looks for."""

from __future__ import annotations

import pytest
from matrix import ALL, REASONS, Lane, Victim, chosen_cells, not_applicable, pairwise, pending
from reuse import broken_hold, run_reuse
from trials import run_cell

LOOPBACK = [cell for cell in ALL if cell.lane is Lane.LOOPBACK and not not_applicable(cell)]


@pytest.mark.parametrize("cell", LOOPBACK, ids=str)
def test_cell(cell):
    verdict = run_cell(cell)
    if (reason := pending(cell)) and not verdict.ok:
        pytest.skip(f"{reason}: {verdict.problems[0]:.200}")
    assert verdict.ok, (verdict.problems, [str(end) for end in verdict.ended], f"seed {verdict.seed}")


def test_every_cell_runs_or_says_why_not():
    run, skipped = [c for c in ALL if not not_applicable(c)], [c for c in ALL if not_applicable(c)]
    assert len(run) + len(skipped) == len(set(ALL))
    for field in range(5):
        assert {cell[field] for cell in ALL} == {cell[field] for cell in run}, "something runs nowhere"
    for applies, reason in REASONS:
        assert any(map(applies, ALL)), f"excludes nothing: {reason}"


def test_the_covering_part_has_every_pair_of_the_whole():
    cells = [cell for cell in ALL if cell.lane is not Lane.LOOPBACK and not not_applicable(cell)]
    chosen = pairwise(cells)

    def pairs(some):
        return {(i, c[i], j, c[j]) for c in some for i in range(5) for j in range(i)}

    assert pairs(chosen) == pairs(cells)
    assert len(chosen) < len(cells) / 3
    assert len(chosen_cells([Lane.LOOPBACK])) == len(LOOPBACK)


@pytest.mark.parametrize("victim", Victim)
def test_memory_used_again_beside_a_stopped_host_is_not_poisoned(victim):
    verdict = run_reuse(victim)
    assert verdict.poisoned_bytes == 0, verdict
    assert not verdict.problems, verdict


@pytest.mark.parametrize("victim", Victim)
def test_control_a_broken_hold_poisons(victim):
    with broken_hold():
        assert run_reuse(victim).poisoned_bytes > 0
