"""When to look again at once. The time is the test's."""

from __future__ import annotations

import pytest

from rdma_kv.kernels.spin import AGAIN, GRACE_S, LEAST_S, MOST_S, Spin

US = 1e-6


def looks_for(spin, due_s, step_s=5 * US, begin_s=1000.0):
    """How long it looks for what never comes."""
    now = begin_s
    while spin.goes_on(now, begin_s + due_s):
        now += step_s
    return now - begin_s


def paid(spin, times=10):
    for _ in range(times):
        spin.begun()
        assert spin.goes_on(0.0, 10 * US)
        spin.found()
    spin.begun()
    return spin


def test_it_looks_for_what_is_due_soon_and_a_little_longer():
    assert looks_for(paid(Spin()), 20 * US) == pytest.approx(20 * US + GRACE_S, abs=6 * US)
    assert looks_for(paid(Spin()), -50 * US) == pytest.approx(GRACE_S, abs=6 * US)  # late already


def test_it_never_looks_for_longer_than_the_most():
    assert looks_for(paid(Spin()), MOST_S - 2 * US) == pytest.approx(MOST_S, abs=6 * US)


@pytest.mark.parametrize("due_s", [MOST_S * 1.1, 1.0, float("inf")])
def test_what_is_due_later_is_waited_for_asleep(due_s):
    assert looks_for(paid(Spin()), due_s) == 0


def test_once_it_has_given_up_it_does_not_look_until_something_begins_or_ends():
    spin = paid(Spin())
    assert looks_for(spin, 20 * US)
    assert not spin.goes_on(1001.0, 1001.0)
    spin.found()
    assert spin.goes_on(1002.0, 1002.0)


def test_where_it_does_not_pay_it_looks_less_and_less_and_then_now_and_then():
    spin, took_s = Spin(), []
    for _ in range(10 + 2 * AGAIN):
        spin.begun()
        took_s.append(looks_for(spin, 5 * US, step_s=US))
    assert took_s[0] > took_s[2] > 0
    assert sum(each > 0 for each in took_s[10:]) == 2
    assert sum(took_s[10:]) / len(took_s[10:]) < LEAST_S


def test_what_pays_again_is_learned_again():
    spin = Spin()
    for _ in range(20):
        spin.begun()
        looks_for(spin, 5 * US)
    for _ in range(3 * AGAIN):
        spin.begun()
        if spin.goes_on(0.0, 5 * US):
            spin.found()
    spin.begun()
    assert looks_for(spin, 20 * US) == pytest.approx(20 * US + GRACE_S, abs=6 * US)


def test_what_begins_while_it_looks_is_no_failure():
    spin = paid(Spin())
    for n in range(20):
        assert spin.goes_on(n * 10 * US, n * 10 * US + 20 * US)
        spin.begun()
    assert looks_for(spin, 20 * US) > GRACE_S


def test_a_budget_that_is_too_small_for_what_is_due_is_tried_in_full_now_and_then():
    """Or what takes longer than the budget could never show that it would have paid."""
    spin = Spin()
    for _ in range(20):
        spin.begun()
        looks_for(spin, 5 * US)
    tries = 0
    for _ in range(2 * AGAIN):
        spin.begun()
        if spin.goes_on(0.0, MOST_S - 10 * US):
            tries += 1
            spin.found()
    assert tries > AGAIN // 2  # from the first on, all
    spin.begun()
    assert spin.goes_on(0.0, MOST_S - 10 * US)
