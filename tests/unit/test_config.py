"""Settings are refused by name when they cannot work."""

from __future__ import annotations

import dataclasses
import math

import pytest

from rdma_kv.config import MAX_HELLO_BYTES, MIN_HEARTBEAT_S, MIN_HELLO_BYTES, Limits, StagingConfig, Timeouts
from rdma_kv.errors import ConfigError
from rdma_kv.messages import MAX_FRAME_BYTES


@pytest.mark.parametrize("settings", [Timeouts(), StagingConfig(), Limits()])
def test_the_defaults_work_and_are_frozen(settings: Timeouts | StagingConfig | Limits):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(settings, dataclasses.fields(settings)[0].name, 3)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Timeouts)])
def test_timeouts_are_positive_and_finite(name: str):
    least = {"heartbeat": MIN_HEARTBEAT_S, "lease": 6.001}.get(name, 0.001)
    assert getattr(Timeouts(**{name: least}), name) == least
    for value in (0, -1.0, math.nan, math.inf, -math.inf):
        with pytest.raises(ConfigError) as refused:
            Timeouts(**{name: value})
        assert refused.value.field == f"timeouts.{name}"


@pytest.mark.parametrize(("heartbeat", "lease"), [(2.0, 6.0), (2.0, 1.0), (4.0, 10.0), (0.1, 0.1)])
def test_a_lease_is_more_than_three_heartbeats(heartbeat: float, lease: float):
    """Otherwise one late heartbeat, or a busy moment, would cost a link."""
    with pytest.raises(ConfigError) as refused:
        Timeouts(heartbeat=heartbeat, lease=lease)
    assert refused.value.field == "timeouts.lease"
    assert Timeouts(heartbeat=heartbeat, lease=3.001 * heartbeat).heartbeat == heartbeat


def test_heartbeats_are_not_a_load():
    with pytest.raises(ConfigError) as refused:
        Timeouts(heartbeat=MIN_HEARTBEAT_S / 2)
    assert refused.value.field == "timeouts.heartbeat"


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
    least = {"hello_bytes": MIN_HELLO_BYTES, "handshakes_per_s": 0.001}.get(name, 1)
    assert getattr(Limits(**{name: least}), name) == least
    for value in (0, -1, math.nan, math.inf):
        with pytest.raises(ConfigError) as refused:
            Limits(**{name: value})
        assert refused.value.field == f"limits.{name}"


def test_a_hello_fits_a_frame_and_a_small_one_always_passes():
    assert MAX_HELLO_BYTES == MAX_FRAME_BYTES
    assert Limits(hello_bytes=MAX_FRAME_BYTES).hello_bytes == MAX_FRAME_BYTES
    for value in (MIN_HELLO_BYTES - 1, MAX_FRAME_BYTES + 1):
        with pytest.raises(ConfigError, match=f"{value}; from") as refused:
            Limits(hello_bytes=value)
        assert refused.value.field == "limits.hello_bytes"


def test_staging_may_grow_to_four_times_unless_said_otherwise():
    assert StagingConfig(slots=4, slot_bytes=4096).max_slots == 16
    assert StagingConfig(slots=1 << 20, slot_bytes=4096).max_slots == 1 << 20, "as peers can count them"
    assert StagingConfig(slots=4, slot_bytes=4096, max_staging_bytes=4 * 4096).max_slots == 4
    assert StagingConfig(slots=4, slot_bytes=4096, max_staging_bytes=6 * 4096 + 5).max_slots == 6
    with pytest.raises(ConfigError) as refused:
        StagingConfig(slots=4, slot_bytes=4096, max_staging_bytes=4 * 4096 - 1)
    assert refused.value.field == "staging.max_staging_bytes"
