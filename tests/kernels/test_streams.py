"""The thread of the streams: what it calls back, when it sleeps, how it ends. On a GPU that the test drives."""

from __future__ import annotations

import queue
import threading
import time

import numpy as np
import pytest
from fake_gpu import Case, FakeGpu

from rdma_kv.errors import ClosedError, ConfigError, LocalProtocolError
from rdma_kv.kernels.streams import KernelStreams

SOON_S = 20


class Rig:
    """Streams on a GPU, and what was called back: one list a call."""

    def __init__(self, *, runs_by_itself=True):
        self.gpu = FakeGpu(runs_by_itself=runs_by_itself)
        self.streams = KernelStreams(0, programs=5, priority=0, device=self.gpu)
        self.calls = queue.Queue()
        self.threads = set()

    def done(self, results):
        self.threads.add(threading.current_thread().name)
        self.calls.put(list(results))

    def gather(self, *works):
        self.streams.gather(enumerate(works), self.done)

    def results(self, count):
        """Those of so many works."""
        found = []
        while len(found) < count:
            found += self.calls.get(timeout=SOON_S)
        return dict(found)

    def sleeps(self):
        """Wait until the thread does; how often it has looked by then."""
        until(lambda: self.streams._wake._waiters)
        return self.streams.looks


def until(condition):
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def make():
    made = []

    def rig(**arguments):
        made.append(Rig(**arguments))
        return made[-1]

    yield rig
    for each in made:
        each.gpu.dead = False
        each.gpu.runs_by_itself = True
        assert each.streams.close()
        assert not each.streams._thread.is_alive()


def test_works_go_both_ways_and_are_called_back_on_the_thread(make):
    rig = make()
    cases = [Case(n) for n in range(20)]
    rig.gather(*[case.work(checksum=True, bounce=n % 2 == 0) for n, case in enumerate(cases)])
    assert rig.results(20) == {n: case.checksum for n, case in enumerate(cases)}
    for n, case in enumerate(cases):
        assert np.array_equal(case.bounce if n % 2 == 0 else case.slot, case.paged)
        case.pool[:] = 0
    works = [case.work(expected=case.checksum) for case in cases]
    rig.streams.scatter(enumerate(works), rig.done)
    assert rig.results(20) == dict.fromkeys(range(20))
    for case in cases:
        assert np.array_equal(case.slot, case.paged)
    assert rig.threads == {"rdma-kv-gpu"}
    gathers, scatters = rig.streams.launches
    assert 1 <= gathers <= 20
    assert 1 <= scatters <= 20


def test_all_that_is_done_at_a_time_is_called_back_at_once(make):
    rig = make(runs_by_itself=False)
    rig.gather(*[Case(n).work() for n in range(9)])
    until(lambda: rig.streams.launches[0])
    rig.gpu.run()
    assert len(rig.calls.get(timeout=SOON_S)) == 9


def test_submitted_from_many_threads_each_work_is_settled_once(make):
    rig = make()
    cases = [Case(n) for n in range(64)]

    def submit(first):
        for n in range(first, first + 8):
            rig.streams.gather([(n, cases[n].work())], rig.done)

    threads = [threading.Thread(target=submit, args=(first,)) for first in range(0, 64, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(rig.results(64)) == list(range(64))
    for case in cases:
        assert np.array_equal(case.slot, case.paged)


def test_the_number_of_programs_can_be_set_while_it_runs(make):
    rig = make()
    rig.streams.warm()
    rig.gather(Case().work())
    rig.results(1)
    rig.streams.programs = 12
    rig.gather(Case().work())
    rig.results(1)
    assert rig.gpu.programs == [5, 5, 12]
    assert rig.streams.programs == 12


# --- sleep


def test_while_nothing_is_under_way_the_thread_does_not_wake(make):
    rig = make()
    looks = rig.sleeps()
    time.sleep(0.3)  # the time in which nothing must happen
    assert rig.streams.looks == looks
    rig.gather(Case().work())
    rig.results(1)
    looks = rig.sleeps()
    time.sleep(0.3)
    assert rig.streams.looks == looks
    assert looks > 0  # the control: work does wake it


def test_a_slow_producer_is_looked_at_a_thousand_times_a_second_at_most(make):
    rig = make()
    event = rig.gpu.event()
    rig.gather(Case().work(after=(event,)))
    time.sleep(0.1)  # by then pauses are as long as they get
    before = rig.streams.looks
    time.sleep(0.5)
    looks = rig.streams.looks - before
    assert 1 <= looks <= 600
    event.fire()
    assert rig.results(1) == {0: None}


# --- errors


def test_an_error_of_a_launch_is_the_result_of_its_works_and_the_thread_goes_on(make):
    rig = make()
    rig.gpu.refuse["gather"] = ConfigError("row_bytes", "is nothing")
    rig.gather(Case(1).work())
    assert isinstance(rig.results(1)[0], ConfigError)
    rig.gather(Case(2).work())
    assert rig.results(1) == {0: None}


def test_a_gpu_that_fails_for_good_ends_all_works_and_refuses_new_ones(make):
    rig = make(runs_by_itself=False)
    rig.gather(Case(1).work(), Case(2).work(after=(rig.gpu.event(),)))
    until(lambda: rig.streams.launches[0] == 2)
    rig.gpu.dead = True
    found = rig.results(2)
    assert all(type(error) is LocalProtocolError for error in found.values())
    assert "illegal memory access" in str(found[0])
    assert "restart" in str(found[0])
    with pytest.raises(LocalProtocolError, match="illegal memory access"):
        rig.gather(Case(3).work())
    for stream in rig.gpu.streams:
        stream.queue.clear()


def test_an_error_of_our_own_on_the_thread_ends_all_works_too_and_what_is_queued_is_known_to_run(monkeypatch):
    rig = Rig(runs_by_itself=False)
    rig.gather(Case().work())
    until(lambda: rig.streams.launches[0])
    monkeypatch.setattr(rig.streams._schedule, "turn", lambda: 1 // 0)
    error = rig.results(1)[0]
    assert isinstance(error, LocalProtocolError)
    assert "ZeroDivisionError" in str(error)
    with pytest.raises(LocalProtocolError):
        rig.gather(Case().work())
    assert not rig.streams.close()
    assert not rig.gpu.closed


# --- the end


def test_close_waits_for_what_is_queued_and_ends_the_rest():
    rig = Rig(runs_by_itself=False)
    held = rig.gpu.event()
    rig.gather(Case(1).work())
    until(lambda: rig.streams.launches[0])
    closing = threading.Thread(target=rig.streams.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()  # the gather runs
    with pytest.raises(ClosedError):
        rig.gather(Case(2).work(after=(held,)))
    rig.gpu.run()
    assert rig.results(1) == {0: None}
    closing.join(SOON_S)
    assert not closing.is_alive()
    assert rig.gpu.closed
    assert rig.streams.close()  # again


def test_close_ends_what_waits_on_the_host_for_its_producer():
    rig = Rig()
    events = [rig.gpu.event() for _ in range(6)]
    rig.gather(*[Case(n).work(after=(event,)) for n, event in enumerate(events)])
    until(lambda: rig.streams.launches[0] == 4)
    closing = threading.Thread(target=rig.streams.close)
    closing.start()
    found = rig.results(2)
    assert all(isinstance(error, ClosedError) for error in found.values())
    for event in events:
        event.fire()
    found = rig.results(4)
    assert set(found.values()) == {None}
    closing.join(SOON_S)
    assert not closing.is_alive()


def test_close_does_not_wait_for_ever_and_says_that_memory_is_in_use():
    rig = Rig()
    rig.gather(Case().work(after=(rig.gpu.event(),)))
    until(lambda: rig.streams.launches[0])
    assert not rig.streams.close(timeout_s=0.05)
    assert isinstance(rig.results(1)[0], LocalProtocolError)
    assert not rig.gpu.closed  # a stream must not be dropped under what is queued
    assert not rig.streams.close()
    assert not rig.streams._thread.is_alive()
