"""Which work goes on which stream when: on a GPU that the test drives."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from fake_gpu import Case, FakeGpu

from rdma_kv.errors import ClosedError, ConfigError, LocalProtocolError
from rdma_kv.kernels import schedule as module
from rdma_kv.kernels.device import NotCompiled
from rdma_kv.kernels.programs import LANE_GB_S, rate_gb_s
from rdma_kv.kernels.schedule import DeviceFailed, Job, Schedule

GATHER, SCATTER, DOWN, UP, *RING = range(8)


class Rig:
    """A schedule with the results of its works by their keys."""

    def __init__(self):
        self.gpu = FakeGpu()
        self.now = 1000.0
        self.schedule = Schedule(self.gpu, 7, lambda: self.now)
        self.results = {}

    def add(self, key, work, *, scatter=False):
        self.schedule.add([Job(work, key, scatter)])

    def turn(self):
        """One turn; the keys that are settled by it."""
        settled = self.schedule.turn()
        keys = [job.key for job, _ in settled]
        assert len({*keys, *self.results}) == len(keys) + len(self.results), "settled twice"
        self.results.update({job.key: result for job, result in settled})
        return keys

    def finish(self):
        """Turns of the schedule and runs of the GPU, until nothing is left."""
        for _ in range(100):
            if not self.schedule.busy:
                return
            self.turn()
            self.gpu.run()
        raise AssertionError("something waits for ever")

    def ran(self, kind):
        return [each[1:] for each in self.gpu.ran if each[0] == kind]


@pytest.fixture
def rig():
    return Rig()


def filled(seed=0):
    """A case whose slot holds other bytes than its pages."""
    case = Case(seed)
    case.slot[:] = np.random.default_rng(seed + 1000).integers(0, 256, case.slot.size, dtype=np.uint8)
    return case


# --- batches


def test_all_that_waits_shares_a_launch_and_each_work_has_its_own_result(rig):
    cases = [Case(n) for n in range(5)]
    for n, case in enumerate(cases):
        rig.add(n, case.work(checksum=n % 2 == 0))
    assert rig.turn() == []
    rig.gpu.run()
    assert rig.turn() == [0, 1, 2, 3, 4]
    assert rig.ran("gather") == [(5, GATHER)]
    assert rig.gpu.programs == [7]
    for n, case in enumerate(cases):
        assert np.array_equal(case.slot, case.paged)
        assert rig.results[n] == (case.checksum if n % 2 == 0 else None)
    assert not rig.schedule.busy


def test_a_launch_takes_no_more_once_it_has_its_bytes_or_works(rig, monkeypatch):
    case = Case()
    monkeypatch.setattr(module, "LAUNCH_BYTES", case.chunk.packed_bytes + 1)
    for n in range(5):
        rig.add(n, case.work())
    rig.finish()
    assert rig.ran("gather") == [(2, GATHER), (2, GATHER), (1, GATHER)]
    monkeypatch.setattr(module, "LAUNCH_BYTES", 1 << 40)
    monkeypatch.setattr(module, "LAUNCH_WORKS", 3)
    for n in range(5, 9):
        rig.add(n, case.work())
    rig.finish()
    assert rig.ran("gather")[3:] == [(3, GATHER), (1, GATHER)]


def test_through_pinned_memory_a_launch_has_less_so_that_copies_begin_early(rig, monkeypatch):
    case = Case()
    monkeypatch.setattr(module, "BOUNCE_BYTES", 2 * case.chunk.packed_bytes)
    for n in range(5):
        rig.add(n, case.work(bounce=True))
    rig.finish()
    assert rig.ran("gather") == [(2, GATHER), (2, GATHER), (1, GATHER)]
    assert rig.ran("copy") == [(1, DOWN)] * 5


def test_a_track_with_enough_on_it_gets_no_more(rig, monkeypatch):
    monkeypatch.setattr(module, "DEPTH", 3)
    for n in range(5):
        rig.add(n, Case(n).work())
        rig.turn()
    assert rig.schedule.gathers == 3
    assert not rig.schedule.can_launch
    rig.gpu.run()
    rig.turn()  # the three have landed
    assert rig.schedule.can_launch
    rig.finish()
    assert rig.ran("gather") == [(1, GATHER)] * 3 + [(2, GATHER)]
    assert len(rig.results) == 5


def keeps_busy(schedule, *, parts):
    """Have each launch of a case last for so many parts of what is enough."""
    schedule._byte_s = parts * module.AHEAD_S / Case().chunk.packed_bytes


def test_that_the_first_is_late_is_no_work_behind_it(rig):
    keeps_busy(rig.schedule, parts=0.1)
    for n in range(4):
        rig.add(n, Case(n).work())
        rig.turn()
        rig.now += 1.0  # beside an engine's kernels
    assert rig.schedule.gathers == 4
    rig.finish()


@pytest.mark.parametrize(("parts", "ahead"), [(1.5, 2), (0.7, 3), (0.3, 5)])
def test_behind_the_first_no_more_is_launched_than_lasts_until_it_has_landed(rig, parts, ahead):
    keeps_busy(rig.schedule, parts=parts)
    for n in range(7):
        rig.add(n, Case(n).work())
        rig.turn()
    assert rig.schedule.gathers == ahead
    rig.now += 3600  # time alone makes no room, so nothing need wake for it
    assert not rig.schedule.can_launch
    rig.turn()
    assert rig.schedule.gathers == ahead
    rig.gpu.run()
    rig.turn()
    assert rig.schedule.can_launch
    rig.finish()
    assert len(rig.results) == 7


def test_copies_that_cannot_keep_up_hold_gathers_back(rig, monkeypatch):
    """Or the queue of their stream fills, and the driver blocks."""
    monkeypatch.setattr(module, "DEPTH", 2)
    rig.add(0, Case(0).work(bounce=True))
    rig.add(1, Case(1).work(bounce=True))
    rig.turn()
    rig.add(2, Case(2).work(bounce=True))
    rig.gpu.run(rig.gpu.streams[GATHER])
    rig.turn()
    assert rig.schedule.gathers == 1
    rig.finish()
    assert rig.ran("gather") == [(2, GATHER), (1, GATHER)]


def test_few_copies_to_the_gpu_are_queued_at_a_time_and_hold_up_no_other_scatter(rig):
    """The tables of all launches wait behind them in the copy engine."""
    for n in range(4):
        rig.add(n, filled(n).work(bounce=True), scatter=True)
        rig.turn()
    assert rig.schedule.scatters == module.UP_DEPTH
    assert not rig.schedule.can_launch
    rig.finish()
    rig.add("direct", filled(9).work(), scatter=True)
    rig.finish()
    assert len(rig.results) == 5
    for n in range(module.UP_DEPTH):
        rig.add(10 + n, filled(n).work(), scatter=True)
        rig.turn()
    rig.add("more", filled(20).work(), scatter=True)
    assert rig.schedule.can_launch, "what takes no copy is not bounded by that"
    rig.finish()


# --- pinned memory


def test_a_chunk_is_done_when_its_own_copy_is_and_the_next_is_still_copied(rig):
    cases = [Case(n) for n in range(3)]
    for n, case in enumerate(cases):
        rig.add(n, case.work(bounce=True, checksum=True))
    rig.turn()
    down = rig.gpu.streams[DOWN]
    rig.gpu.run(down)
    assert not rig.gpu.ran  # a copy waits for the gather
    rig.gpu.run(rig.gpu.streams[GATHER])
    rig.gpu.run(down, steps=3)  # the wait, one copy, its event
    assert rig.turn() == [0]
    assert np.array_equal(cases[0].bounce, cases[0].paged)
    assert not cases[1].bounce.any()
    rig.gpu.run()
    assert rig.turn() == [1, 2]
    for n, case in enumerate(cases):
        assert np.array_equal(case.bounce, case.paged)
        assert rig.results[n] == case.checksum


def test_works_of_both_kinds_share_a_gather(rig):
    direct, bounced = Case(1), Case(2)
    rig.add("direct", direct.work(checksum=True))
    rig.add("bounced", bounced.work(bounce=True, checksum=True))
    rig.turn()
    rig.gpu.run(rig.gpu.streams[GATHER])
    assert rig.turn() == ["direct"]
    assert not bounced.bounce.any()
    rig.finish()
    assert rig.ran("gather") == [(2, GATHER)]
    assert rig.results == {"direct": direct.checksum, "bounced": bounced.checksum}


def test_a_scatter_waits_for_the_copies_of_its_bounces(rig):
    cases = [filled(n) for n in range(3)]
    for n, case in enumerate(cases):
        case.bounce[:], case.slot[:] = case.slot, 0
        rig.add(n, case.work(bounce=True), scatter=True)
    rig.turn()
    rig.gpu.run(rig.gpu.streams[SCATTER])
    assert not rig.gpu.ran
    rig.finish()
    assert rig.ran("copy") == [(1, UP)] * 3
    assert rig.ran("scatter") == [(3, SCATTER)]
    for case in cases:
        assert np.array_equal(case.paged, case.bounce)


# --- checksums


@pytest.mark.parametrize("bounce", [False, True])
def test_a_wrong_checksum_is_returned_and_only_pages_of_right_ones_are_touched(rig, bounce):
    right, wrong, free = filled(1), filled(2), filled(3)
    before = wrong.pool.copy()
    sums = right.checksum, wrong.checksum
    for case in (right, wrong, free):
        case.bounce[:] = case.slot
        case.slot[:] = 0 if bounce else case.slot
    rig.add("right", right.work(expected=sums[0], bounce=bounce), scatter=True)
    rig.add("wrong", wrong.work(expected=sums[1] ^ 1, bounce=bounce), scatter=True)
    rig.add("free", free.work(bounce=bounce), scatter=True)
    rig.turn()
    rig.gpu.run()
    assert rig.turn() == ["wrong", "free"]
    rig.finish()
    assert rig.results == {"right": None, "wrong": sums[1], "free": None}
    assert np.array_equal(wrong.pool, before)
    for case in (right, free):
        assert np.array_equal(case.paged, case.bounce)
    assert len(rig.ran("copy")) == 3 * bounce  # once each


# --- producers


def test_a_gather_waits_on_the_gpu_for_its_producer_and_gets_the_final_bytes(rig):
    case, event = Case(), rig.gpu.event()
    rig.add("late", case.work(after=(event,)))
    rig.turn()
    assert event.waits == 1
    rig.gpu.run()
    assert rig.turn() == []
    case.pool[:] = 77
    event.fire()
    rig.gpu.run()
    assert rig.turn() == ["late"]
    assert (case.slot == 77).all()
    assert rig.ran("gather") == [(1, RING[0])]


def test_a_work_of_several_producers_waits_for_all_of_them(rig):
    case, events = Case(), [rig.gpu.event() for _ in range(3)]
    rig.add("late", case.work(after=tuple(events)))
    for event in events:
        rig.turn()
        rig.gpu.run()
        assert rig.turn() == []
        event.fire()
    rig.finish()
    assert rig.results == {"late": None}


def test_works_whose_producers_are_done_take_the_main_stream_with_all_others(rig):
    cases = [Case(n) for n in range(3)]
    rig.add(0, cases[0].work())
    rig.add(1, cases[1].work(after=(rig.gpu.event(fired=True),)))
    rig.add(2, cases[2].work(after=(rig.gpu.event(fired=True), rig.gpu.event(fired=True))))
    rig.finish()
    assert rig.ran("gather") == [(3, GATHER)]


@pytest.mark.parametrize("bounce", [False, True])
@pytest.mark.parametrize("slow", [1, module.RING, module.RING + 3])
def test_slow_producers_hold_up_nobody_else(rig, slow, bounce):
    """More of them than the ring has streams, and copies to pinned memory behind them, change nothing for others."""
    late, events = [Case(n) for n in range(slow)], [rig.gpu.event() for _ in range(slow)]
    for n, (case, event) in enumerate(zip(late, events, strict=True)):
        rig.add(("late", n), case.work(bounce=bounce, after=(event,)))
    rig.turn()
    quick, landed = Case(100), filled(101)
    rig.add("quick", quick.work(bounce=bounce))
    rig.add("scatter", landed.work(), scatter=True)
    rig.turn()
    rig.gpu.run()
    assert sorted(rig.turn()) == ["quick", "scatter"]
    assert np.array_equal(quick.bounce if bounce else quick.slot, quick.paged)
    events[-1].fire()  # that of the last, which may have found no stream
    for _ in range(3):
        rig.turn()
        rig.gpu.run()
    assert ("late", slow - 1) in rig.results
    assert len(rig.results) == 3
    for event in events:
        event.fire()
    rig.finish()
    for case in late:
        assert np.array_equal(case.bounce if bounce else case.slot, case.paged)


@pytest.mark.parametrize("copy", ["bounce", "sum"])
@pytest.mark.parametrize("scatter", [False, True])
def test_nothing_that_copies_is_queued_behind_a_producer(rig, scatter, copy):
    """The GPU takes copies from few queues, and one that waits there holds up those of others."""
    case, event = filled(1), rig.gpu.event()
    case.bounce[:] = case.slot
    more = {"bounce": True} if copy == "bounce" else {"expected": case.checksum} if scatter else {"checksum": True}
    rig.add("copies", case.work(after=(event,), **more), scatter=scatter)
    rig.add("direct", filled(2).work(after=(event,)), scatter=scatter)
    rig.turn()
    assert event.waits == 1  # the control: the other one waits on the GPU
    assert [len(stream.queue) for stream in rig.gpu.streams] == [0] * 4 + [3] + [0] * 3
    assert event in [watch.event for watch in rig.schedule.watched()]
    rig.gpu.run()
    assert not rig.gpu.ran
    event.fire()
    rig.finish()
    assert set(rig.results) == {"copies", "direct"}
    assert [number for _, _, number in rig.gpu.ran if number < RING[0]]
    assert np.array_equal(case.slot, case.paged)


def test_works_of_one_producer_share_a_launch_and_later_ones_wait_on_the_host(rig):
    """So one slow producer takes one stream, however often its works come; and behind a wait there is one kernel."""
    event = rig.gpu.event()
    for n in range(4):
        rig.add(n, Case(n).work(after=(event,)))
    rig.turn()
    rig.add(4, Case(4).work(after=(event,)))
    rig.turn()
    assert event.waits == 1
    event.fire()
    rig.finish()
    assert sorted(rig.ran("gather")) == [(1, GATHER), (4, RING[0])]


def test_an_event_that_is_recorded_anew_is_waited_for_anew(rig):
    """What waits on the host for the first recording must not take that for the second."""
    event, late = rig.gpu.event(), Case(1)
    rig.add(0, Case(0).work(after=(event,)))
    rig.turn()
    event.fire()
    rig.gpu.run()
    event.fired = False  # recorded anew, for the next
    rig.add(1, late.work(after=(event,)))
    assert rig.turn() == [0]
    for _ in range(3):
        rig.gpu.run()
        assert rig.turn() == []
    late.pool[:] = 77
    event.fire()
    rig.finish()
    assert (late.slot == 77).all()


def test_of_two_events_one_that_is_recorded_anew_is_waited_for_anew(rig):
    """Also where the works wait on the host, as the ring is full."""
    for n in range(module.RING):
        rig.add(n, Case(n).work(after=(rig.gpu.event(),)))
    first, second = rig.gpu.event(fired=True), rig.gpu.event()
    rig.add("one", Case(10).work(after=(first, second)))
    rig.turn()
    first.fired = False  # a new recording
    rig.add("two", Case(11).work(after=(first, second)))
    second.fire()
    for _ in range(3):
        rig.turn()
        rig.gpu.run()
    assert not rig.results
    first.fire()
    for _ in range(3):
        rig.turn()
        rig.gpu.run()
    assert rig.results == {"one": None, "two": None}


def test_what_is_no_event_is_the_error_of_its_work_only(rig):
    rig.add("bad", Case(1).work(after=("no event",)))
    rig.add("good", Case(2).work())
    rig.finish()
    assert isinstance(rig.results["bad"], LocalProtocolError)
    assert rig.results["good"] is None


# --- errors


@pytest.mark.parametrize("kind", ["gather", "scatter", "sums", "copy"])
def test_an_error_of_a_launch_reaches_its_works_and_nobody_else(rig, kind):
    scatter = kind in {"scatter", "sums"}
    expected = filled(1).checksum if kind == "sums" else None
    before = filled(0)
    rig.add("before", before.work(), scatter=scatter)
    rig.turn()
    rig.gpu.refuse[kind] = RuntimeError("CUDA out of memory")
    rig.add("bad", filled(1).work(bounce=kind == "copy", expected=expected), scatter=scatter)
    rig.turn()
    rig.add("after", filled(2).work(), scatter=scatter)
    rig.finish()
    error = rig.results.pop("bad")
    assert isinstance(error, LocalProtocolError)
    assert "out of memory" in str(error)
    assert rig.results == {"before": None, "after": None}


def test_a_chunk_that_is_none_is_a_config_error(rig):
    chunk = replace(Case().chunk, row_bytes=0)
    rig.add("bad", Case().work()._replace(chunk=chunk))
    rig.finish()
    assert isinstance(rig.results["bad"], ConfigError)
    assert rig.results["bad"].field == "row_bytes"


def test_an_error_is_told_only_when_nothing_of_the_launch_runs_any_more(rig):
    """The gather was queued when the copy behind it was refused: until it has run, it uses the memory."""
    rig.gpu.refuse["copy"] = RuntimeError("no")
    rig.add("bad", Case().work(bounce=True))
    assert rig.turn() == []
    rig.gpu.run()
    assert rig.turn() == ["bad"]


def test_an_error_of_a_scatter_is_told_only_when_its_copies_are_done(rig):
    """The second copy is refused, the first is under way."""
    copy = rig.gpu.copy

    def once(*arguments):
        copy(*arguments)
        rig.gpu.refuse["copy"] = RuntimeError("no")

    rig.gpu.copy = once
    rig.gpu.streams[UP].queue.append(("wait", event := rig.gpu.event()))  # a slow copy
    rig.add(0, Case(0).work(bounce=True), scatter=True)
    rig.add(1, Case(1).work(bounce=True), scatter=True)
    rig.turn()
    rig.gpu.run()
    assert rig.turn() == []
    event.fire()
    rig.gpu.run()
    assert rig.turn() == [0, 1]
    assert all(isinstance(error, LocalProtocolError) for error in rig.results.values())


def test_a_copy_that_was_refused_leaves_the_copies_before_it_as_they_are(rig):
    first, second = Case(1), Case(2)
    copy, calls = rig.gpu.copy, []

    def once(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("no")
        copy(*arguments)

    rig.gpu.copy = once
    rig.add("first", first.work(bounce=True))
    rig.add("second", second.work(bounce=True))
    rig.finish()
    assert rig.results["first"] is None
    assert isinstance(rig.results["second"], LocalProtocolError)
    assert np.array_equal(first.bounce, first.paged)


def test_a_result_that_cannot_be_read_is_an_error_of_its_works(rig, monkeypatch):
    """They are in no flight any more by then, so nobody else would tell them."""
    gather = rig.gpu.gather
    monkeypatch.setattr(rig.gpu, "gather", lambda *arguments: (gather(*arguments), lambda: 1 // 0)[1])
    rig.add("first", Case(1).work())
    rig.add("second", Case(2).work(bounce=True))
    rig.turn()
    monkeypatch.undo()
    rig.add("third", Case(3).work())
    rig.finish()
    assert rig.results.pop("third") is None
    assert set(rig.results) == {"first", "second"}
    assert all(isinstance(result, LocalProtocolError) for result in rig.results.values())


def test_a_chunk_without_a_size_leaves_nobody_without_an_end(rig):
    chunk = Case(2).chunk
    rig.add("good", Case(1).work())
    rig.add("bad", Case(2).work()._replace(chunk=replace(chunk, pointers=chunk.pointers[0])))
    with pytest.raises(IndexError):
        rig.schedule.turn()
    left = rig.schedule.abandon(LocalProtocolError, "gone", flights=True)
    assert sorted(job.key for job, _ in left) == ["bad", "good"]


@pytest.mark.parametrize("what", ["flying", "launched", "held", "settled"])
def test_a_device_that_failed_leaves_nobody_waiting(rig, what):
    rig.add("flying", Case(1).work())
    rig.add("held", Case(2).work(after=(rig.gpu.event(),)))
    rig.turn()
    if what == "settled":
        rig.gpu.run(rig.gpu.streams[GATHER])
    rig.gpu.dead = True
    if what == "launched":
        rig.add("launched", Case(3).work())
    with pytest.raises(DeviceFailed):
        rig.schedule.turn()
    left = rig.schedule.abandon(LocalProtocolError, "gone", flights=True)
    keys = ["flying", "held", *(["launched"] if what == "launched" else [])]
    assert sorted(job.key for job, _ in left) == sorted(keys)
    assert all(isinstance(result, LocalProtocolError) for _, result in left)
    assert not rig.schedule.busy


def test_abandoning_without_flights_ends_what_is_not_queued(rig, monkeypatch):
    monkeypatch.setattr(module, "DEPTH", 1)
    rig.add("flying", Case(1).work())
    rig.turn()
    rig.add("ready", Case(2).work())
    rig.add("held", Case(3).work(after=(rig.gpu.event(),)))
    left = rig.schedule.abandon(ClosedError, "closed", flights=False)
    assert sorted(job.key for job, _ in left) == ["held", "ready"]
    assert all(isinstance(result, ClosedError) for _, result in left)
    rig.finish()
    assert rig.results == {"flying": None}


# --- kernels that are not compiled


@pytest.mark.parametrize(
    ("kind", "slow"), [("gather", False), ("gather", True), ("scatter", False), ("scatter", True), ("sums", False)]
)
def test_works_of_a_kernel_that_is_not_compiled_wait_for_it_and_others_do_not(rig, kind, slow):
    scatter = kind != "gather"
    case, other = filled(1), filled(2)
    case.bounce[:], expected = case.slot, case.checksum if kind == "sums" else None
    prepared = []
    rig.gpu.refuse[kind] = NotCompiled(lambda: prepared.append(kind))
    event = rig.gpu.event()
    after = (event,) if slow else ()
    bounce = scatter and not slow
    rig.add("waits", case.work(bounce=bounce, expected=expected, after=after), scatter=scatter)
    rig.turn()
    assert not rig.schedule.uncompiled  # its copies, and what waits for its producer, run
    rig.add("goes on", other.work(), scatter=scatter)
    rig.turn()
    rig.gpu.run()
    assert "goes on" in rig.turn()
    event.fire()
    rig.gpu.run()
    assert rig.turn() == []
    assert rig.schedule.busy
    (uncompiled,) = rig.schedule.uncompiled
    rig.schedule.uncompiled.clear()
    uncompiled.prepare()
    assert prepared == [kind]
    rig.schedule.resume(uncompiled, None)
    rig.finish()
    assert rig.results == {"waits": None, "goes on": None}
    assert np.array_equal(case.slot, case.paged)
    assert len(rig.ran("copy")) == bounce  # once


def test_a_kernel_that_cannot_be_compiled_is_the_error_of_its_works(rig):
    rig.gpu.refuse["gather"] = NotCompiled(lambda: None)
    rig.add("waits", Case(1).work())
    rig.turn()
    rig.gpu.run()
    rig.turn()
    (uncompiled,) = rig.schedule.uncompiled
    rig.schedule.uncompiled.clear()
    rig.schedule.resume(uncompiled, RuntimeError("no compiler"))
    assert rig.turn() == ["waits"]
    assert isinstance(rig.results["waits"], LocalProtocolError)
    assert "no compiler" in str(rig.results["waits"])


def test_abandoning_ends_what_waits_for_a_kernel(rig):
    rig.gpu.refuse["gather"] = NotCompiled(lambda: None)
    rig.add("waits", Case(1).work())
    rig.turn()
    rig.gpu.run()
    rig.turn()
    left = rig.schedule.abandon(ClosedError, "closed", flights=False)
    assert [job.key for job, _ in left] == ["waits"]
    assert not rig.schedule.busy


# --- when it pays to look


def test_a_flight_is_due_when_its_bytes_and_those_before_them_have_gone(rig):
    case = Case()
    nbytes = case.chunk.packed_bytes
    kernel_s = module.STEP_S + nbytes / (1e9 * rate_gb_s(7))
    assert rig.schedule.due == math.inf
    rig.add(0, case.work())
    rig.turn()
    assert rig.schedule.due == pytest.approx(rig.now + kernel_s, abs=1e-9)
    rig.add(1, Case(1).work())
    rig.turn()
    rig.gpu.run(rig.gpu.streams[GATHER], steps=2)
    assert rig.turn() == [0]
    assert rig.schedule.due == pytest.approx(rig.now + 2 * kernel_s - module.STEP_S, abs=1e-9)
    rig.finish()
    rig.now += 1
    rig.add(2, Case(2).work(bounce=True))
    rig.turn()
    copy_s = module.STEP_S + nbytes / (1e9 * LANE_GB_S["pinned"])
    assert rig.schedule.due == pytest.approx(rig.now + kernel_s + copy_s, abs=1e-9)
    rig.finish()
    rig.now += 1
    rig.add(3, Case(3).work(bounce=True), scatter=True)
    rig.turn()
    assert rig.schedule.due == pytest.approx(rig.now + kernel_s + copy_s, abs=1e-9)


def test_what_waits_for_a_producer_is_due_never_and_watched_since_it_came(rig):
    events = [rig.gpu.event() for _ in range(module.RING + 1)]
    for event in events:
        rig.add(event, Case().work(after=(event,)))
    rig.turn()
    assert rig.schedule.due == math.inf
    watched = rig.schedule.watched()
    assert len(watched) == module.RING + 1
    assert all(due == pytest.approx(rig.now, abs=1e-3) for _, due in watched)
    assert events[-1] in [event for event, _ in watched]  # the ring is full: it is held here
    rig.now += 5
    rig.add("quick", Case().work())
    rig.turn()
    assert rig.schedule.due == pytest.approx(rig.now, abs=1e-3)
    assert rig.schedule.watched()[-1] == (events[-1], rig.now - 5)


def test_of_several_producers_only_those_that_are_not_done_are_watched(rig):
    """One that has fired would wake the loop without end."""
    for _ in range(module.RING):
        rig.add(object(), Case().work(after=(rig.gpu.event(),)))
    done, slow = rig.gpu.event(fired=True), rig.gpu.event()
    rig.add("both", Case().work(after=(done, slow)))
    rig.turn()
    watched = [event for event, _ in rig.schedule.watched()]
    assert slow in watched
    assert done not in watched
    assert not any(event.query() for event in watched)
