"""Failures that come before or after their call: whom they concern, for how long, and what ends them."""

from __future__ import annotations

import pytest

from rdma_kv.errors import TransferAborted, TransferTimeout
from rdma_kv.messages import Expect, Offer
from rdma_kv.protocol.failures import Failures, Place, Told
from rdma_kv.types import AgentId, ReplicaId, Role

KEEP_S = 10.0
PLACE = Place("k", 0, 0)
A, B, C = (ReplicaId("d", index) for index in range(3))
TELLER, SIBLING = AgentId("c", "d", Role.DECODE, 0), AgentId("c", "p", Role.PREFILL, 1)
NOBODY: frozenset[ReplicaId] = frozenset()


def told(other: ReplicaId | None, teller: AgentId = TELLER) -> Told:
    return Told(other, teller, TransferAborted("k", "aborted", f"from {other}"))


def heard(*others: ReplicaId | None) -> Failures:
    failures = Failures(KEEP_S)
    for other in others:
        assert failures.hear(PLACE, told(other), 0.0)
    return failures


def reason(failures: Failures, others: tuple[ReplicaId, ...], waiting: frozenset[ReplicaId] = NOBODY) -> str | None:
    error = failures.begin(PLACE, others, waiting, 1.0)
    return error.message if error is not None else None


def test_a_place_is_of_our_own_replica():
    digest = bytes(16)
    assert Place.of(Expect("k", 3, 1, 2, digest, [], 1)) == Place("k", 3, 1)
    assert Place.of(Offer(1, "k", 3, 1, 2, digest, [], 0, 1)) == Place("k", 3, 2)


@pytest.mark.parametrize(
    ("aborted", "others", "waiting", "fails"),
    [
        (A, (A,), (), True),
        (A, (A,), (A,), True),
        (A, (B,), (), False),
        (A, (B,), (B,), False),
        # the call may choose: it fails, unless one that has not given up is here already
        (A, (A, B), (), True),
        (A, (A, B), (A,), True),
        (A, (A, B), (B,), False),
        (A, (A, B), (A, B), False),
        (A, (A, B), (C,), True),
        (A, (B, C), (), False),
        (A, (), (), True),
        (A, (), (A,), True),
        (A, (), (B,), False),
        # a sibling that had found nobody: it means those that leave it open too, whoever waits
        (None, (), (), True),
        (None, (), (B,), True),
        (None, (A,), (), False),
        (None, (A, B), (), False),
    ],
)
def test_which_calls_an_abort_concerns(aborted, others, waiting, fails):
    assert (reason(heard(aborted), others, frozenset(waiting)) is not None) is fails


def test_an_abort_fails_one_call_and_only_of_its_own_name():
    failures = heard(A, B)
    for place in (Place("k", 1, 0), Place("k", 0, 1), Place("x", 0, 0)):
        assert failures.begin(place, (A,), NOBODY, 1.0) is None
    assert reason(failures, (A,)) == "from d/0"
    assert reason(failures, (A,)) is None
    assert reason(failures, (B,)) == "from d/1"


def test_an_abort_is_of_use_for_as_long_as_a_call_may_wait():
    failures = heard(A)
    assert failures.begin(PLACE, (A,), NOBODY, KEEP_S) is None
    assert failures.told(PLACE, KEEP_S) == ()


def test_the_last_abort_of_a_counterpart_counts():
    failures = heard(A)
    failures.hear(PLACE, Told(A, SIBLING, TransferAborted("k", "aborted", "later")), 0.5)
    assert len(failures.told(PLACE, 1.0)) == 1
    assert reason(failures, (A,)) == "later"


def test_a_peer_cannot_fill_the_memory_under_one_name():
    failures = Failures(KEEP_S)
    for index in range(100):
        failures.hear(PLACE, told(ReplicaId("d", index)), 0.0)
    assert [each.other.index for each in failures.told(PLACE, 1.0) if each.other] == list(range(96, 100))


def test_only_who_told_it_takes_an_abort_back():
    failures = heard(A, B)
    failures.take_back(PLACE, A, SIBLING, 1.0)
    failures.take_back(PLACE, C, TELLER, 1.0)
    failures.take_back(Place("x", 0, 0), A, TELLER, 1.0)
    assert len(failures.told(PLACE, 1.0)) == 2
    failures.take_back(PLACE, A, TELLER, 1.0)
    assert reason(failures, (A,)) is None
    assert reason(failures, (B,)) is not None


@pytest.mark.parametrize(
    ("ended", "aborted", "kept"),
    [(A, A, False), (A, B, True), (A, None, False), (None, A, False), (None, None, False)],
)
def test_an_abort_of_a_call_that_has_ended_means_nothing(ended, aborted, kept):
    failures = Failures(KEEP_S)
    failures.end(PLACE, ended, 0.0)
    assert failures.hear(PLACE, told(aborted), 1.0) is kept
    assert failures.hear(Place("k", 1, 0), told(aborted), 1.0)
    assert failures.hear(PLACE, told(aborted), KEEP_S + 1.0)  # the control: it is forgotten in time


def test_all_calls_of_a_name_that_have_ended_are_known():
    failures = Failures(KEEP_S)
    failures.end(PLACE, A, 0.0)
    failures.end(PLACE, B, 0.0)
    assert not failures.hear(PLACE, told(A), 1.0)
    assert not failures.hear(PLACE, told(B), 1.0)
    assert failures.hear(PLACE, told(C), 1.0)


def test_a_call_that_could_tell_nobody_is_known_until_it_is_made_anew():
    failures, error = Failures(KEEP_S), TransferTimeout("k", "MATCHING", "nobody came")
    assert failures.given_up(PLACE, 0.0) is None
    failures.give_up(PLACE, error, 0.0)
    assert failures.given_up(PLACE, KEEP_S - 0.1) is error
    assert failures.given_up(Place("k", 1, 0), 1.0) is None
    assert failures.begin(PLACE, (), NOBODY, 1.0) is None
    assert failures.given_up(PLACE, 1.0) is None
    failures.give_up(PLACE, error, 0.0)
    assert failures.given_up(PLACE, KEEP_S) is None
