"""The thread that watches events for a loop that sleeps."""

from __future__ import annotations

import math
import threading
import time

import pytest
from fake_gpu import FakeGpu

from rdma_kv.kernels.poller import LONGEST_S, SHORTEST_S, Poller, pause_s
from rdma_kv.kernels.schedule import Watch

SOON_S = 20


class Rig:
    def __init__(self):
        self.gpu = FakeGpu()
        self.woken = threading.Semaphore(0)
        self.wakes = 0
        self.poller = Poller(self.gpu.enter, self.wake)

    def wake(self):
        assert threading.current_thread() is self.gpu.thread
        self.wakes += 1
        self.woken.release()

    def watch(self, *events, due=0.0):
        self.poller.watch([Watch(event, time.perf_counter() + due) for event in events])

    def sleeps(self):
        """Wait until the thread sleeps without a timeout; how often it has woken by then."""
        until(lambda: self.poller._wakes_at == math.inf)
        return self.poller.looks


def until(condition):
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def rig():
    rig = Rig()
    yield rig
    rig.poller.close()
    assert not rig.poller._thread.is_alive()


@pytest.mark.parametrize(
    ("late_s", "pause"),
    [
        (-1.0, 1.0),
        (-0.004, 0.004),
        (-50e-6, SHORTEST_S),
        (0.0, SHORTEST_S),
        (400e-6, SHORTEST_S),
        (4e-3, 0.5e-3),
        (10e-3, 1.25e-3),
        (32e-3, LONGEST_S),
        (3600.0, LONGEST_S),
    ],
)
def test_a_pause_ends_when_something_is_due_and_grows_with_what_is_late(late_s, pause):
    assert pause_s([Watch(None, 100.0)], 100.0 + late_s) == pytest.approx(pause)


def test_what_is_due_next_decides():
    assert pause_s([Watch(None, 0.0), Watch(None, 100.0002), Watch(None, 105.0)], 100.0) == pytest.approx(200e-6)


def test_an_event_that_fires_wakes_once(rig):
    events = [rig.gpu.event() for _ in range(3)]
    rig.watch(*events)
    assert not rig.woken.acquire(timeout=0.05)  # the time in which nothing must happen
    events[1].fire()
    assert rig.woken.acquire(timeout=SOON_S)
    events[2].fire()
    rig.sleeps()
    assert rig.wakes == 1
    rig.watch(events[0], events[2])
    assert rig.woken.acquire(timeout=SOON_S)


def test_what_is_no_longer_watched_wakes_nobody(rig):
    event, other = rig.gpu.event(), rig.gpu.event()
    rig.watch(event)
    until(lambda: event.queries)
    rig.watch()
    event.fire()
    rig.sleeps()
    rig.watch(other)
    until(lambda: other.queries)
    assert not rig.wakes


def test_what_is_handed_over_while_it_sleeps_for_long_is_seen_in_time(rig):
    late, soon = rig.gpu.event(), rig.gpu.event()
    rig.watch(late, due=3600)
    until(lambda: 0 < rig.poller._wakes_at < math.inf)
    assert not late.queries
    soon.fire()
    rig.watch(soon)
    assert rig.woken.acquire(timeout=SOON_S)
    assert not late.queries


def test_a_hand_over_is_never_lost(rig):
    """Whatever the thread does at that moment."""
    for n in range(2000):
        event = rig.gpu.event()
        rig.watch(event, due=(n % 5) * 30e-6)
        event.fire()
        assert rig.woken.acquire(timeout=SOON_S)
    assert rig.wakes == 2000


def test_an_event_that_cannot_be_asked_wakes_too(rig):
    rig.gpu.dead = True
    rig.watch(rig.gpu.event())
    assert rig.woken.acquire(timeout=SOON_S)


def test_a_device_that_cannot_be_entered_does_not_end_the_thread():
    woken = threading.Event()
    poller = Poller(lambda: 1 // 0, woken.set)
    event = FakeGpu().event(fired=True)
    poller.watch([Watch(event, 0.0)])
    assert woken.wait(SOON_S)
    poller.close()


def test_while_nothing_is_watched_the_thread_does_not_wake(rig):
    looks = rig.sleeps()
    time.sleep(0.3)  # the time in which nothing must happen
    assert rig.poller.looks == looks
    event = rig.gpu.event()
    rig.watch(event)
    event.fire()
    assert rig.woken.acquire(timeout=SOON_S)
    after = rig.sleeps()
    assert after > looks  # the control: an event does wake it
    time.sleep(0.3)
    assert rig.poller.looks == after


def test_what_is_late_is_seldom_looked_at(rig):
    """A producer that takes a second must not cost a core: see `pause_s`."""
    event = rig.gpu.event()
    rig.watch(event, due=-1.0)
    until(lambda: event.queries)
    before, began = event.queries, time.monotonic()
    time.sleep(0.5)
    looks, took_s = event.queries - before, time.monotonic() - began
    assert 1 <= looks <= took_s / LONGEST_S
    event.fire()
    assert rig.woken.acquire(timeout=SOON_S)
