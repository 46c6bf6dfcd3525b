"""Settings are refused by name when they cannot work."""

from __future__ import annotations

import dataclasses
import math

import pytest

from rdma_kv.config import Limits, StagingConfig, Timeouts
from rdma_kv.errors import ConfigError


@pytest.mark.parametrize("settings", [Timeouts(), StagingConfig(), Limits()])
def test_the_defaults_work_and_are_frozen(settings: Timeouts | StagingConfig | Limits):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(settings, dataclasses.fields(settings)[0].name, 3)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Timeouts)])
def test_timeouts_are_positive_and_finite(name: str):
    assert getattr(Timeouts(**{name: 0.001}), name) == 0.001
    for value in (0, -1.0, math.nan, math.inf, -math.inf):
        with pytest.raises(ConfigError) as refused:
            Timeouts(**{name: value})
        assert refused.value.field == f"timeouts.{name}"


@pytest.mark.parametrize(
    ("name", "inside", "outside"),
    [("slots", (2, 1 << 20), (-1, 0, 1, (1 << 20) + 1)), ("slot_bytes", (4096, (1 << 40) - 1), (0, 4095, 1 << 40))],
)
def test_staging_fits_the_wire(name: str, inside: tuple[int, ...], outside: tuple[int, ...]):
    for value in inside:
        assert getattr(StagingConfig(**{name: value}), name) == value
    for value in outside:
        with pytest.raises(ConfigError) as refused:
            StagingConfig(**{name: value})
        assert refused.value.field == f"staging.{name}"


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Limits)])
def test_limits_are_positive(name: str):
    assert getattr(Limits(**{name: 1}), name) == 1
    for value in (0, -1):
        with pytest.raises(ConfigError) as refused:
            Limits(**{name: value})
        assert refused.value.field == f"limits.{name}"
