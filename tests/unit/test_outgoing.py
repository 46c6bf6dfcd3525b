"""The sender's machine alone: what it says, when it is fed by hand, and what it refuses of the peer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from protocol_rig import QUIESCE_S, TRANSFER_S, Case, make_outgoing, messages_of, plan_of, route_of, simple_case

from rdma_kv.errors import (
    ErrorCode,
    LocalProtocolError,
    PeerLostError,
    RangeUnavailableError,
    RdmaKvError,
    RemoteProtocolError,
    RouteMismatchError,
    TransferAborted,
    TransferTimeout,
    TransportError,
)
from rdma_kv.messages import (
    MAX_COUNT,
    MAX_SLOTS_PER_MESSAGE,
    Abort,
    Finish,
    Grant,
    Offer,
    Quiesced,
    Reject,
    Release,
    Start,
)
from rdma_kv.protocol.actions import Action, Finished, Gather, KeepSlot, PostWrite, ReleaseSlot, SendMessage
from rdma_kv.protocol.outgoing import OutgoingState, OutgoingTransfer
from rdma_kv.slots import SlotRef
from rdma_kv.types import Interval

SLOTS = 16  # of the target
ALL = Interval(0, 2)
LOCAL, OTHER = SlotRef(0, 1), SlotRef(1, 1)
NO = TransferAborted("key1", "test", "the caller gave up")
BROKEN = TransportError("test", "broken", "the WRITE broke")


def span(start: int, end: int) -> Interval:
    return Interval(start, end)


def pushed(total: int = 8, wanted: tuple[int, int] | None = None) -> OutgoingTransfer:
    """A sender with `total` tokens in boxes of two tokens of one layer; with ranges, but no slots, if `wanted`."""
    machine = make_outgoing(simple_case(total=total))
    machine.push(0, ALL, span(0, total), 0.0)
    if wanted is not None:
        machine.granted(Grant(1, [wanted], []), SLOTS, 0.0)
    return machine


def give(machine: OutgoingTransfer, *slots: tuple[int, int]) -> list[Action]:
    """GRANT with the ranges that the machine has."""
    ranges = [(r.start, r.end) for r in machine.ranges or ()]
    return machine.granted(Grant(1, ranges, list(slots)), SLOTS, 0.0)


def kinds(actions: list[Action]) -> list[str]:
    """What the actions are, messages by their own name."""
    return [type(a.message if isinstance(a, SendMessage) else a).__name__ for a in actions]


def writing(boxes: int = 2) -> OutgoingTransfer:
    """A sender whose first box is being written and whose second is being gathered; both are granted."""
    machine = pushed(total=2 * boxes, wanted=(0, 2 * boxes))
    give(machine, *((index, 1) for index in range(2 * boxes)))
    machine.start_box(LOCAL)
    machine.gathered(LOCAL)
    machine.start_box(OTHER)
    return machine


def finishing() -> OutgoingTransfer:
    machine = pushed(wanted=(8, 8))
    machine.finish({}, 0.0)
    assert machine.state is OutgoingState.FINISHING
    return machine


# --- offers and grants -------------------------------------------------------------------------------------------------


def test_the_offer_says_what_there_is():
    machine = make_outgoing(simple_case(total=8), number=7, timeout_s=2.5)
    (offer,) = messages_of(machine.offer())
    digest = machine.plan.route.digest
    assert offer == Offer(7, "key7", 0, 0, 0, digest, [(0, 8)], want=0, timeout_ms=2500)


@pytest.mark.parametrize(("timeout_s", "told_ms"), [(-1.0, 0), (0.0, 0), (1e12, MAX_COUNT), (float("inf"), MAX_COUNT)])
def test_any_timeout_can_be_told(timeout_s: float, told_ms: int):
    machine = make_outgoing(simple_case(), timeout_s=timeout_s)
    (offer,) = messages_of(machine.offer())
    assert isinstance(offer, Offer)
    assert offer.timeout_ms == told_ms


def test_pushes_before_the_ranges_raise_what_is_wanted():
    machine = make_outgoing(simple_case(total=8))
    wants = [messages_of(machine.push(0, ALL, span(at, at + 2), 0.0))[0].want for at in (0, 2, 4)]
    assert wants == [2, 4, 6]


def test_the_first_grant_corrects_what_is_wanted():
    """8 boxes were offered, 2 are in the range; without the correction the target would go on granting 8."""
    machine = pushed(total=8)
    offer, release = messages_of(machine.granted(Grant(1, [(6, 8)], [(i, 1) for i in range(4)]), SLOTS, 0.0))
    assert isinstance(offer, Offer)
    assert offer.want == 2
    assert release == Release(1, [(3, 1), (2, 1)])


@pytest.mark.parametrize("wanted", [(8, 8), (0, 0), (4, 4)])
def test_an_empty_range_takes_everything_offered_back(wanted: tuple[int, int]):
    machine = pushed(total=8)
    offer, release = messages_of(machine.granted(Grant(1, [wanted], [(0, 1)]), SLOTS, 0.0))
    assert isinstance(offer, Offer)
    assert offer.want == 0
    assert release == Release(1, [(0, 1)])
    assert not machine.runnable


def test_what_is_wanted_is_told_once():
    machine = pushed(total=4)
    assert messages_of(machine.granted(Grant(1, [(0, 4)], []), SLOTS, 0.0)) == []
    assert messages_of(give(machine, (0, 1))) == []


def test_a_push_between_grants_is_cut_once():
    machine = make_outgoing(simple_case(total=4))
    machine.granted(Grant(1, [(0, 4)], []), SLOTS, 0.0)
    (offer,) = messages_of(machine.push(0, ALL, span(0, 4), 0.0))
    assert isinstance(offer, Offer)
    assert offer.want == 4
    assert messages_of(give(machine, (0, 1))) == []
    assert messages_of(give(machine, *((i, 1) for i in range(1, 8)))) == [Release(1, [(7, 1), (6, 1), (5, 1), (4, 1)])]


def test_many_unused_grants_go_back_in_messages_that_can_be_read():
    total = 2 * MAX_SLOTS_PER_MESSAGE
    machine = pushed(total=total, wanted=(0, total))
    for first in range(0, total, MAX_SLOTS_PER_MESSAGE):
        slots = [(index, 1) for index in range(first, first + MAX_SLOTS_PER_MESSAGE)]
        assert machine.granted(Grant(1, [(0, total)], slots), total, 0.0) == []
    machine.start_box(LOCAL)
    machine.gathered(LOCAL)
    _, *released = messages_of(machine.write_failed(LOCAL, BROKEN, 0.0, posted=True))
    assert all(isinstance(message, Release) for message in released)
    assert [len(message.slots) for message in released] == [MAX_SLOTS_PER_MESSAGE, MAX_SLOTS_PER_MESSAGE - 1]


def test_a_grant_that_comes_twice_is_used_once():
    """Two boxes in one slot would overwrite each other, or what the target has put there since."""
    machine = pushed(total=4, wanted=(0, 4))
    give(machine, (3, 9), (3, 9))
    assert give(machine, (3, 9), (3, 8)) == []
    machine.start_box(LOCAL)
    assert not machine.runnable
    give(machine, (3, 10))
    assert machine.runnable


def test_start_goes_out_once_before_the_first_box():
    machine = pushed(total=2, wanted=(0, 2))
    assert not machine.runnable
    give(machine, (3, 9), (4, 9))
    assert machine.runnable
    assert kinds(machine.start_box(LOCAL)) == ["Start", "Gather"]
    assert kinds(machine.start_box(OTHER)) == ["Gather"]
    assert not machine.runnable
    (post,) = machine.gathered(LOCAL)
    assert isinstance(post, PostWrite)
    assert (post.slot, post.target) == (LOCAL, SlotRef(3, 9))


def test_finish_waits_for_data_and_metadata():
    machine = pushed(total=1, wanted=(0, 1))
    give(machine, (0, 1))
    assert machine.finish({"token": 5}, 0.0) == []
    machine.start_box(LOCAL)
    assert machine.gathered(LOCAL) != []
    assert kinds(machine.written(LOCAL, 0.0)) == ["ReleaseSlot", "Finish"]
    assert machine.state is OutgoingState.FINISHING
    assert machine.done(0.0) == [Finished(None)]
    assert machine.settled
    assert machine.deadline is None


def test_finish_before_the_grant_is_kept():
    machine = pushed(total=1)
    assert machine.finish({"token": 5}, 0.0) == []
    machine.granted(Grant(1, [(0, 1)], [(0, 1)]), SLOTS, 0.0)
    machine.start_box(LOCAL)
    machine.gathered(LOCAL)
    *_, finish = messages_of(machine.written(LOCAL, 0.0))
    assert finish == Finish(1, 1, {"token": 5})


def test_a38_finish_of_an_empty_range_needs_no_push():
    machine = make_outgoing(simple_case(total=8))
    machine.finish({}, 0.0)
    assert messages_of(machine.granted(Grant(1, [(8, 8)], []), SLOTS, 0.0)) == [Finish(1, 0, {})]


# --- our own caller's mistakes -----------------------------------------------------------------------------------------


def test_push_and_finish_after_finish_are_our_callers_error():
    machine = pushed()
    machine.finish({}, 0.0)
    before = machine.state
    with pytest.raises(LocalProtocolError, match="push after finish"):
        machine.push(0, ALL, span(0, 1), 0.0)
    with pytest.raises(LocalProtocolError, match="finish twice"):
        machine.finish({}, 0.0)
    assert machine.state is before


def test_finishing_without_having_pushed_all_fails_both_sides():
    machine = make_outgoing(simple_case(total=8))
    machine.push(0, ALL, span(0, 7), 0.0)
    machine.granted(Grant(1, [(0, 8)], []), SLOTS, 0.0)
    abort, quiesced = messages_of(machine.finish({}, 0.0))
    assert isinstance(abort, Abort)
    assert abort.code is ErrorCode.LOCAL_PROTOCOL
    assert isinstance(quiesced, Quiesced)
    assert isinstance(machine.error, LocalProtocolError)


def test_pushing_twice_never_ends_well():
    machine = make_outgoing(simple_case(total=8))
    machine.granted(Grant(1, [(0, 8)], []), SLOTS, 0.0)
    for tokens in (span(0, 8), span(0, 2)):
        machine.push(0, ALL, tokens, 0.0)
    machine.finish({}, 0.0)
    assert isinstance(machine.error, LocalProtocolError)


def test_what_was_not_pushed_outside_of_the_range_does_not_matter():
    machine = make_outgoing(simple_case(total=8))
    machine.push(0, ALL, span(6, 8), 0.0)
    machine.granted(Grant(1, [(7, 8)], []), SLOTS, 0.0)
    machine.finish({}, 0.0)
    assert machine.state is OutgoingState.SENDING


# --- the peer's mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "grant",
    [
        Grant(1, [(0, 9)], []),
        Grant(1, [(7, 9)], []),
        Grant(1, [(5, 3)], []),
        Grant(1, [], []),
        Grant(1, [(0, 8), (0, 8)], []),
        Grant(1, [(0, 8)], [(SLOTS, 1)]),
        Grant(1, [(0, 8)], [(0, 1), ((1 << 31) - 1, 1)]),
    ],
    ids=["end", "end of a part", "inverted", "no component", "two components", "slot number", "large slot number"],
)
def test_a_grant_that_cannot_be_is_refused(grant: Grant):
    machine = pushed(total=8)
    actions = machine.granted(grant, SLOTS, 0.0)
    assert kinds(actions) == ["Abort", "Finished", "Quiesced"]
    abort, _ = messages_of(actions)
    assert isinstance(abort, Abort)
    assert abort.code is ErrorCode.REMOTE_PROTOCOL
    assert isinstance(machine.error, RemoteProtocolError)
    assert machine.error.peer == "the decode agent"
    assert machine.state is OutgoingState.FAILED


def test_a_grant_before_what_is_available_is_refused():
    machine = make_outgoing(Case(plan_of(route_of(), total=8), ((4, 8),), ((4, 8),)))
    machine.granted(Grant(1, [(3, 8)], []), SLOTS, 0.0)
    assert isinstance(machine.error, RemoteProtocolError)


@pytest.mark.parametrize("ranges", [[(0, 7)], [(1, 8)], [], [(0, 8), (0, 8)], [(8, 0)]])
def test_ranges_never_change(ranges: list[tuple[int, int]]):
    machine = pushed(total=8, wanted=(0, 8))
    machine.granted(Grant(1, ranges, [(0, 1)]), SLOTS, 0.0)
    assert isinstance(machine.error, RemoteProtocolError)
    assert not machine.runnable


@pytest.mark.parametrize("make", [pushed, lambda: pushed(wanted=(0, 8)), lambda: pushed(wanted=(8, 8))])
def test_done_before_finish_is_refused(make: Callable[[], OutgoingTransfer]):
    machine = make()
    actions = machine.done(0.0)
    assert isinstance(machine.error, RemoteProtocolError)
    assert [a.error for a in actions if isinstance(a, Finished)] == [machine.error]
    assert machine.state is OutgoingState.FAILED


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (ErrorCode.ROUTE_MISMATCH, RouteMismatchError),
        (ErrorCode.RANGE_UNAVAILABLE, RangeUnavailableError),
        (ErrorCode.LOCAL_PROTOCOL, TransferAborted),
        (ErrorCode.STAGING_FULL, TransferAborted),
    ],
)
def test_a_refused_offer_tells_why(code: ErrorCode, kind: type[RdmaKvError]):
    machine = pushed()
    actions = machine.rejected(Reject(1, code, "not you"), 0.0)
    assert "Abort" not in kinds(actions)
    assert type(machine.error) is kind
    assert "not you" in str(machine.error)
    if isinstance(machine.error, TransferAborted):
        assert (machine.error.cause, machine.error.culprit) == (code, "the decode agent")


def abort(code: ErrorCode = ErrorCode.TRANSFER_ABORTED, culprit: str = "") -> Abort:
    return Abort(1, "key1", 0, 0, 0, code, culprit, "no more")


@pytest.mark.parametrize(("culprit", "named"), [("rank 3", "rank 3"), ("", "the decode agent")])
def test_an_abort_names_cause_and_culprit(culprit: str, named: str):
    machine = pushed()
    machine.aborted(abort(ErrorCode.STAGING_FULL, culprit), 0.0)
    assert isinstance(machine.error, TransferAborted)
    assert (machine.error.cause, machine.error.culprit) == (ErrorCode.STAGING_FULL, named)


def test_a_reason_that_no_wire_can_carry_is_told_as_well_as_can_be():
    machine = pushed()
    told, _ = messages_of(machine.fail(TransferAborted("key1", "test", "\udcff" + "x" * 5000), 0.0))
    assert isinstance(told, Abort)
    assert told.message.startswith("?xxx")


# --- endings -----------------------------------------------------------------------------------------------------------


def ends(machine: OutgoingTransfer) -> list[list[Action]]:
    """Everything that can still come to a machine that has ended."""
    return [
        machine.aborted(abort(), 5.0),
        machine.aborted(abort(), 5.0),
        machine.fail(NO, 5.0),
        machine.done(5.0),
        machine.rejected(Reject(1, ErrorCode.CLOSED, ""), 5.0),
        machine.tick(1e9),
        machine.link_lost(PeerLostError("peer", "gone"), 5.0),
    ]


def test_a_failure_that_an_abort_brought_is_told_by_who_sent_it():
    """A REJECT is not told by its sender to others: it may know of no transfer."""
    heard, own, rejected, done = pushed(), pushed(), pushed(), finishing()
    heard.aborted(abort(), 0.0)
    heard.fail(NO, 0.0)
    own.fail(NO, 0.0)
    own.aborted(abort(), 0.0)
    rejected.rejected(Reject(1, ErrorCode.CLOSED, ""), 0.0)
    done.done(0.0)
    done.aborted(abort(), 0.0)
    assert [machine.told for machine in (heard, own, rejected, done)] == [True, False, False, False]


@pytest.mark.parametrize("checksum", [None, 0, 17])
def test_a_checksum_goes_from_the_gather_to_the_write(checksum: int | None):
    machine = pushed(wanted=(0, 8))
    give(machine, (0, 1))
    machine.start_box(LOCAL)
    (action,) = machine.gathered(LOCAL, checksum)
    assert isinstance(action, PostWrite)
    assert action.checksum == checksum


def test_the_first_cause_goes_into_an_abort():
    machine = pushed()
    message, _ = messages_of(machine.fail(TransferAborted("key1", "x", "no", cause=ErrorCode.CONFIG, culprit="r"), 0.0))
    assert isinstance(message, Abort)
    assert (message.code, message.culprit, message.counterpart) == (ErrorCode.CONFIG, "r", "")


def test_a34_abort_after_done():
    machine = finishing()
    machine.done(0.0)
    assert ends(machine) == [[]] * 7
    assert machine.state is OutgoingState.DONE
    assert machine.error is None


def test_a34_abort_twice_and_done_after_abort():
    machine = finishing()
    machine.aborted(abort(), 0.0)
    error = machine.error
    assert ends(machine) == [[]] * 7
    assert machine.state is OutgoingState.FAILED
    assert machine.error is error


def test_a34_done_while_the_last_writes_settle_is_no_success():
    machine = writing()
    machine.fail(NO, 0.0)
    assert machine.state is OutgoingState.ABORTING
    assert machine.done(0.0) == []
    assert machine.fail(NO, 0.0) == machine.aborted(abort(), 0.0) == []
    assert machine.state is OutgoingState.ABORTING


def test_a_crossing_grant_is_not_used_and_needs_no_release():
    """In FINISHING the target frees it at DONE, after an abort QUIESCED does."""
    machine = finishing()
    assert machine.granted(Grant(1, [(8, 8)], [(0, 1)]), SLOTS, 0.0) == []
    machine.fail(NO, 0.0)
    assert machine.granted(Grant(1, [(8, 8)], [(1, 1)]), SLOTS, 0.0) == []


def test_after_a_failure_the_caller_waits_for_gathers_and_quiesced_for_writes():
    machine = writing()
    assert kinds(machine.fail(NO, 1.0)) == ["Abort"]
    assert machine.deadline == 1.0 + QUIESCE_S
    assert not machine.runnable
    assert machine.gathered(OTHER) == [ReleaseSlot(OTHER), Finished(NO)]
    assert kinds(machine.written(LOCAL, 2.0)) == ["ReleaseSlot", "Quiesced"]
    assert machine.state is OutgoingState.FAILED
    assert machine.settled


def test_a50_a_write_that_was_not_posted_frees_both_slots():
    machine = writing()
    machine.gathered(OTHER)
    actions = machine.write_failed(LOCAL, BROKEN, 0.0, posted=False)
    assert actions[0] == ReleaseSlot(LOCAL)
    assert kinds(actions) == ["ReleaseSlot", "Abort", "Finished"]
    assert kinds(machine.written(OTHER, 0.0)) == ["ReleaseSlot", "Quiesced"]


def test_a_posted_write_that_failed_keeps_its_slots_and_only_these():
    machine = writing()
    actions = machine.write_failed(LOCAL, BROKEN, 0.0, posted=True)
    assert kinds(actions) == ["KeepSlot", "Abort"]
    actions = machine.gathered(OTHER)
    assert kinds(actions) == ["ReleaseSlot", "Finished", "Release"]
    (release,) = messages_of(actions)
    assert isinstance(release, Release)
    assert sorted(release.slots) == [(1, 1), (2, 1), (3, 1)]  # 0 was written to
    late = messages_of(machine.granted(Grant(1, [(0, 4)], [(9, 1)]), SLOTS, 0.0))
    assert late == [Release(1, [(9, 1)])]


def test_a31_writes_that_do_not_settle_are_kept_until_they_do():
    machine = writing()
    machine.gathered(OTHER)
    machine.tick(TRANSFER_S)
    assert isinstance(machine.error, TransferTimeout)
    actions = machine.tick(TRANSFER_S + QUIESCE_S)
    assert [a for a in actions if isinstance(a, KeepSlot)] == [KeepSlot(LOCAL), KeepSlot(OTHER)]
    assert "Quiesced" not in kinds(actions)
    assert machine.ended
    assert not machine.settled
    assert machine.written(LOCAL, 99.0) == [ReleaseSlot(LOCAL)]
    assert kinds(machine.write_failed(OTHER, BROKEN, 99.0, posted=False)) == ["ReleaseSlot", "Release"]
    assert machine.settled


def test_a_gather_that_outlives_the_deadlines_is_waited_for_and_never_posted():
    machine = writing()
    machine.written(LOCAL, 0.0)
    machine.tick(TRANSFER_S)
    assert kinds(machine.tick(TRANSFER_S + QUIESCE_S)) == ["Quiesced"]  # nothing was posted that did not succeed
    assert not machine.settled
    actions = machine.gathered(OTHER)
    assert kinds(actions) == ["ReleaseSlot", "Finished"]
    assert machine.settled


def test_a_gather_that_fails_late_still_reports():
    machine = writing()
    machine.tick(TRANSFER_S)
    machine.tick(TRANSFER_S + QUIESCE_S)
    actions = machine.gather_failed(OTHER, LocalProtocolError("kernel"), 99.0)
    assert kinds(actions) == ["ReleaseSlot", "Release", "Finished"]
    assert isinstance(machine.error, TransferTimeout)


def test_after_a_lost_link_nothing_is_said():
    machine = writing()
    lost = PeerLostError("peer", "gone")
    assert machine.link_lost(lost, 0.0) == []
    assert machine.gathered(OTHER) == [ReleaseSlot(OTHER), Finished(lost)]
    assert machine.write_failed(LOCAL, BROKEN, 0.0, posted=True) == [KeepSlot(LOCAL)]
    assert machine.state is OutgoingState.FAILED
    assert machine.link_lost(lost, 0.0) == []


def test_pushes_after_a_failure_do_nothing():
    machine = pushed(total=8, wanted=(0, 8))
    machine.fail(NO, 0.0)
    assert machine.push(0, ALL, span(0, 1), 0.0) == []
    assert machine.finish({}, 0.0) == []


def test_layers_may_come_one_by_one():
    machine = make_outgoing(simple_case(total=2, chunk_bytes=512))
    machine.granted(Grant(1, [(0, 2)], []), SLOTS, 0.0)
    for layer in range(2):
        machine.push(0, span(layer, layer + 1), span(0, 2), 0.0)
    give(machine, (0, 1), (1, 1))
    boxes = []
    for slot in (LOCAL, OTHER):
        boxes += [action.box for action in machine.start_box(slot) if isinstance(action, Gather)]
    assert [box.layers for box in boxes] == [span(0, 1), span(1, 2)]


def test_start_is_for_the_target_to_poll():
    machine = pushed(total=1, wanted=(0, 1))
    give(machine, (0, 1))
    assert messages_of(machine.start_box(LOCAL)) == [Start(1)]
