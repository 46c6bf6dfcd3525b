"""The choice of a number of programs: a pure function of the curve and the lane."""

from __future__ import annotations

import pytest

from rdma_kv.errors import ConfigError
from rdma_kv.kernels.programs import DEFAULT_PROGRAMS, H200, MARGIN, fewest_programs, programs_for, rate_gb_s

CURVE = {4: 100.0, 16: 400.0, 64: 1500.0, 132: 1900.0, 264: 1900.0}


@pytest.mark.parametrize(
    ("lane_gb_s", "programs"),
    [(1, 4), (83, 4), (84, 16), (333, 16), (334, 64), (1250, 64), (1251, 132), (5000, 132)],
)
def test_the_fewest_that_outrun_the_lane_by_a_fifth(lane_gb_s: float, programs: int) -> None:
    assert MARGIN == 1.2
    assert fewest_programs(lane_gb_s, CURVE) == programs


def test_the_order_of_the_curve_does_not_matter() -> None:
    assert fewest_programs(300, dict(reversed(CURVE.items()))) == fewest_programs(300, CURVE)


def test_a_curve_that_falls_is_read_as_it_is() -> None:
    assert fewest_programs(90, {4: 120.0, 8: 100.0}) == 4
    assert fewest_programs(300, {4: 120.0, 8: 100.0}) == 4


def test_the_shipped_curve_covers_the_fastest_network() -> None:
    """100 GB/s is 800 Gbit/s. What it takes is a small part of the 132 multiprocessors."""
    assert fewest_programs(12.5) == min(H200)
    assert fewest_programs(100) <= 16


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((0.0, CURVE), "lane_gb_s"),
        ((-1.0, CURVE), "lane_gb_s"),
        ((float("nan"), CURVE), "lane_gb_s"),
        ((float("inf"), CURVE), "lane_gb_s"),
        ((1.0, {}), "curve"),
        ((1.0, CURVE, 0.9), "margin"),
        ((1.0, CURVE, float("nan")), "margin"),
    ],
)
def test_a_wrong_argument_is_named(arguments: tuple, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fewest_programs(*arguments)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("programs", "gb_s"), [(1, 25.0), (4, 100.0), (10, 250.0), (16, 400.0), (132, 1900.0), (200, 1900.0), (999, 1900.0)]
)
def test_a_rate_lies_on_lines_between_the_points_of_the_curve(programs: int, gb_s: float) -> None:
    assert rate_gb_s(programs, CURVE) == pytest.approx(gb_s)
    assert rate_gb_s(programs, dict(reversed(CURVE.items()))) == pytest.approx(gb_s)


@pytest.mark.parametrize(("arguments", "field"), [((0, CURVE), "programs"), ((4, {}), "curve")])
def test_a_rate_of_nothing_is_refused(arguments: tuple, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rate_gb_s(*arguments)
    assert caught.value.field == field


def test_before_any_lane_is_known_launches_are_ready_for_a_fast_one() -> None:
    assert programs_for([]) == DEFAULT_PROGRAMS
    assert programs_for(["pinned+tcp"]) < programs_for(["cuda_ipc", "pinned+tcp"]) <= DEFAULT_PROGRAMS
