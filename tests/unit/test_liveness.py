"""Heartbeats and leases by a clock that the test turns: when a peer is suspect, lost, alive again, and may be posted to."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from protocol_rig import seeded

from rdma_kv.errors import RemoteProtocolError
from rdma_kv.messages import Heartbeat
from rdma_kv.protocol.liveness import OVERDUE_INTERVALS, LifeState, Liveness

HEARTBEAT_S, LEASE_S, PEER_LEASE_S = 2.0, 10.0, 20.0
START = 100.0
EPSILON = 1e-6


def life(**changes: float) -> Liveness:
    given = {"hello_at": START, "heartbeat_s": HEARTBEAT_S, "lease_s": LEASE_S, "peer_lease_s": PEER_LEASE_S} | changes
    return Liveness("peer", START, **given)


def run(machine: Liveness, end: float) -> list[tuple[float, Heartbeat]]:
    """Tick at every deadline up to `end`; the heartbeats that were due, with their times."""
    sent = []
    while machine.deadline is not None and machine.deadline <= end:
        now = machine.deadline
        beat = machine.tick(now)
        if beat is not None:
            sent.append((now, beat))
    return sent


def suspect() -> Liveness:
    machine = life()
    run(machine, START + OVERDUE_INTERVALS * HEARTBEAT_S)
    assert machine.state is LifeState.SUSPECT
    return machine


# --- heartbeats --------------------------------------------------------------------------------------------------------


def test_a_heartbeat_goes_out_every_interval_whatever_else_comes():
    machine = life()
    sent = []
    for step in range(1, 201):  # a message of the peer every 0.1 s
        now = START + step / 10
        sent += [at for at, _ in run(machine, now)]
        machine.heard(now)
    assert sent == pytest.approx([START + HEARTBEAT_S * n for n in range(1, 11)])


def test_the_numbers_ascend_and_acknowledge_the_last_one_heard():
    machine = life()
    assert machine.beat(START + 1) == Heartbeat(1, 0)
    machine.heartbeat(Heartbeat(5, 0), START + 1)
    assert machine.beat(START + 2) == Heartbeat(2, 5)
    assert machine.beat(START + 2, answer=True) == Heartbeat(3, 5, True)


def test_a_heartbeat_is_answered_at_once_only_where_it_asks():
    machine = life()
    assert machine.heartbeat(Heartbeat(1, 0), START) is None
    assert machine.heartbeat(Heartbeat(2, 0, True), START) == Heartbeat(1, 2)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_replayed_heartbeat_is_the_peers_error(number: int):
    machine = life()
    machine.heartbeat(Heartbeat(3, 0), START)
    with pytest.raises(RemoteProtocolError, match="only grow"):
        machine.heartbeat(Heartbeat(number, 0), START)
    assert machine.beat(START).heard == 3


def test_what_was_never_sent_cannot_be_acknowledged():
    machine = life()
    machine.beat(START)
    with pytest.raises(RemoteProtocolError, match="last one sent was 1"):
        machine.heartbeat(Heartbeat(1, 2), START)


# --- silence -----------------------------------------------------------------------------------------------------------


def test_a41_silence_makes_suspect_and_then_lost_on_time():
    machine = life()
    run(machine, START + OVERDUE_INTERVALS * HEARTBEAT_S - EPSILON)
    assert machine.state is LifeState.ALIVE
    run(machine, START + OVERDUE_INTERVALS * HEARTBEAT_S)
    assert machine.state is LifeState.SUSPECT
    run(machine, START + LEASE_S - EPSILON)
    assert machine.state is LifeState.SUSPECT
    run(machine, START + LEASE_S)
    assert machine.state is LifeState.LOST
    assert machine.deadline is None


def test_heartbeats_go_on_while_suspect_and_end_with_the_lease():
    machine = life()
    assert len(run(machine, START + 100)) == 4  # at 2, 4, 6 and 8 s
    assert machine.tick(START + 200) is None


def test_one_missing_heartbeat_is_not_suspect():
    machine = life()
    for now in (START + 2, START + 6, START + 8):  # the one at 4 did not come
        run(machine, now - EPSILON)
        machine.heard(now)
    assert machine.state is LifeState.ALIVE


def test_a_sign_of_life_ends_the_suspicion_and_begins_a_new_lease():
    machine = suspect()
    assert machine.heard(START + 9) is True
    assert machine.state is LifeState.ALIVE
    assert machine.heard(START + 9) is False
    run(machine, START + 9 + LEASE_S - EPSILON)
    assert machine.state is LifeState.SUSPECT
    run(machine, START + 9 + LEASE_S)
    assert machine.state is LifeState.LOST


def test_a_lost_peer_stays_lost():
    machine = life()
    run(machine, START + LEASE_S)
    assert machine.heard(START + LEASE_S) is False
    assert machine.tick(START + 2 * LEASE_S) is None
    assert machine.state is LifeState.LOST
    assert not machine.may_post(START)


def test_every_state_but_the_last_has_a_deadline():
    assert life().deadline == START + HEARTBEAT_S
    assert suspect().deadline is not None


# --- our own silence ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stall_s", [2 * HEARTBEAT_S + EPSILON, LEASE_S, 100 * LEASE_S])
def test_a_loop_that_was_blocked_reads_before_it_judges(stall_s: float):
    """An engine held the GIL: its own timer is late by more than an interval."""
    machine = life()
    woke = START + HEARTBEAT_S + stall_s
    assert machine.tick(woke) is not None
    assert machine.state is LifeState.ALIVE
    machine.heard(woke + 0.001)
    run(machine, woke + HEARTBEAT_S)
    assert machine.state is LifeState.ALIVE


def test_after_the_grace_a_silent_peer_is_judged():
    machine = life()
    woke = START + 5 * LEASE_S
    machine.tick(woke)
    run(machine, woke + HEARTBEAT_S - EPSILON)
    assert machine.state is LifeState.ALIVE
    run(machine, woke + HEARTBEAT_S)
    assert machine.state is LifeState.LOST


def test_a_timer_that_is_late_by_less_than_an_interval_judges_at_once():
    machine = life()
    assert machine.deadline is not None
    run(machine, START + 4)
    machine.tick(START + OVERDUE_INTERVALS * HEARTBEAT_S + 0.9 * HEARTBEAT_S)
    assert machine.state is LifeState.SUSPECT


def test_a_loop_that_is_always_late_still_notices_a_dead_peer():
    machine, now = life(), START
    for _ in range(10):
        assert machine.deadline is not None
        now = machine.deadline + 3 * HEARTBEAT_S
        machine.tick(now)
        if machine.state is LifeState.LOST:
            return
    pytest.fail("every stall put the verdict off")


# --- how long we may post ----------------------------------------------------------------------------------------------


def test_a32_posting_ends_before_the_peer_can_have_given_us_up():
    """It last heard us no earlier than the heartbeat that it acknowledged was sent; its lease, not ours, counts."""
    machine = life()
    first = machine.beat(START + 1)
    machine.beat(START + 3)
    machine.heard(START + 4)
    machine.heartbeat(Heartbeat(1, first.number), START + 4)
    ends = START + 1 + PEER_LEASE_S
    margin = PEER_LEASE_S / 10
    now = START + 4
    while now < ends:  # it goes on talking, but acknowledges nothing more: it does not hear us
        machine.heard(now)
        assert machine.may_post(now) == (now < ends - margin), now
        now += 0.25
    assert machine.state is LifeState.ALIVE


def test_hello_counts_as_the_first_heartbeat():
    """The peer may have heard it long before its own came here: our loop may have been blocked in between."""
    machine = life(lease_s=100.0, hello_at=START - 3)
    machine.heard(START + PEER_LEASE_S)
    assert machine.may_post(START - 3 + 0.9 * PEER_LEASE_S - EPSILON)
    assert not machine.may_post(START - 3 + 0.9 * PEER_LEASE_S)


def test_nothing_is_posted_to_a_suspect():
    machine = suspect()
    now = START + 6
    assert not machine.may_post(now)
    machine.heard(now)
    assert machine.may_post(now)


def test_an_old_acknowledgement_does_not_shorten_the_lease():
    machine = life()
    for number in range(1, 4):
        machine.beat(START + number)
    machine.heartbeat(Heartbeat(1, 3), START + 4)
    machine.heartbeat(Heartbeat(2, 1), START + 4)
    assert machine.may_post(START + 3 + 0.9 * PEER_LEASE_S - EPSILON)


def test_in_a_normal_life_posting_is_never_forbidden():
    """Also with the shortest lease: the acknowledgement of a heartbeat comes with the peer's next one."""
    short = 3.001 * HEARTBEAT_S
    ours, theirs = (life(lease_s=short, peer_lease_s=short) for _ in range(2))
    for step in range(1, 2000):
        now = START + step / 20
        for one, other in ((ours, theirs), (theirs, ours)):
            if (beat := one.tick(now)) is not None:
                other.heard(now)
                assert other.heartbeat(beat, now) is None
        assert ours.may_post(now)
        assert theirs.may_post(now)


delays = st.lists(st.floats(0.0, 30.0), min_size=1, max_size=30)


@seeded
@given(delays, st.lists(st.sampled_from(["heard", "ack", "ask", "tick"]), min_size=1, max_size=30), st.booleans())
def test_whatever_happens_the_laws_hold(pauses: list[float], events: list[str], late: bool):
    """Never LOST within the lease of a sign of life; never posted beyond the peer's lease; a beat is due in an interval."""
    machine, now, heard_at, number = life(), START, START, 0
    sent: dict[int, float] = {0: START}
    acknowledged = 0
    for pause, event in zip(itertools.cycle(pauses), events, strict=False):
        before = machine.state
        now += pause
        if not late:
            for at, beat in run(machine, now):
                sent[beat.number] = at
        if event == "tick" and (due := machine.tick(now)) is not None:
            sent[due.number] = now
        if event != "tick" and machine.state is not LifeState.LOST:
            machine.heard(now)
            heard_at = now
            if event != "heard":
                number += 1
                acknowledged = max(sent)
                answer = machine.heartbeat(Heartbeat(number, acknowledged, event == "ask"), now)
                assert (answer is not None) == (event == "ask")
                if answer is not None:
                    sent[answer.number] = now
        if machine.state is LifeState.LOST:
            assert before is LifeState.LOST or now - heard_at >= LEASE_S - EPSILON
            assert machine.deadline is None
        else:
            assert machine.deadline is not None
            assert machine.deadline <= max(sent.values()) + HEARTBEAT_S + EPSILON
        if machine.may_post(now):
            assert now < sent[acknowledged] + PEER_LEASE_S
            assert machine.state is LifeState.ALIVE
