"""What is remembered for a while: how long, how much, and what goes first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_rig import seeded

from rdma_kv.errors import ConfigError
from rdma_kv.protocol.recent import Recent


def test_an_entry_is_there_until_its_time_is_over():
    recent: Recent[str, int] = Recent(4, 2.0)
    recent.put("a", 1, 10.0)
    assert recent.get("a", 11.9) == 1
    assert recent.get("b", 11.9) is None
    assert recent.get("a", 12.0) is None
    assert len(recent) == 0


def test_the_oldest_goes_first():
    recent: Recent[str, int] = Recent(2, 10.0)
    for number, key in enumerate("abc"):
        recent.put(key, number, float(number))
    assert [recent.get(key, 3.0) for key in "abc"] == [None, 1, 2]
    recent.put("b", 7, 4.0)  # anew: now `c` is the oldest
    recent.put("d", 8, 5.0)
    assert [recent.get(key, 5.0) for key in "bcd"] == [7, None, 8]
    assert recent.get("b", 13.9) == 7


def test_what_is_dropped_is_gone_and_may_be_dropped_again():
    recent: Recent[str, int] = Recent(2, 10.0)
    recent.put("a", 1, 0.0)
    recent.drop("a")
    recent.drop("a")
    assert recent.get("a", 0.0) is None


@seeded
@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3)), max_size=40))
def test_it_is_a_map_of_the_last_few_that_are_young_enough(limit: int, puts: list[tuple[int, int]]):
    recent: Recent[int, int] = Recent(limit, 5.0)
    now, known = 0.0, {}
    for value, (key, step) in enumerate(puts):
        now += step
        recent.put(key, value, now)
        known.pop(key, None)
        known[key] = (now, value)
        young = [(k, v) for k, (at, v) in known.items() if now < at + 5.0][-limit:]
        assert {k: recent.get(k, now) for k in range(7) if recent.get(k, now) is not None} == dict(young)
        assert len(recent) <= limit


@pytest.mark.parametrize(
    ("limit", "keep_s", "field"), [(0, 1.0, "limit"), (1, 0.0, "keep_s"), (1, float("nan"), "keep_s")]
)
def test_bounds_must_be_positive(limit: int, keep_s: float, field: str):
    with pytest.raises(ConfigError) as caught:
        Recent(limit, keep_s)
    assert caught.value.field == field
