"""Frames and metadata that no honest peer sends; the long form runs under `make faults`."""

from __future__ import annotations

import pytest
from fuzzing import FuzzReport, fuzz, fuzz_border

from rdma_kv import messages


def test_p79_spoilt_frames_end_in_a_typed_error_and_harm_nobody_else(tmp_path):
    report = fuzz(tmp_path, seed=1, count=6000)
    assert report.ok, report.problems
    assert sum(report.frames.values()) >= 6000
    assert report.healthy_transfers > 0
    assert all(report.refused[place] for place in ("border", "metadata", "connect", "sockets", "mover")), report.refused


def test_control_a_border_that_lets_an_error_through_is_seen(monkeypatch):
    """Without its net the decoder raises msgspec's own errors: the run must say so."""
    monkeypatch.setattr(messages, "RemoteProtocolError", ValueError)
    report = FuzzReport(1)
    fuzz_border(1, 400, report)
    assert any("at the border" in problem for problem in report.problems)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_same_seed_makes_the_same_frames(seed):
    from frames import Spoiler

    left, right = Spoiler(seed), Spoiler(seed)
    assert [left.frame() for _ in range(200)] == [right.frame() for _ in range(200)]
