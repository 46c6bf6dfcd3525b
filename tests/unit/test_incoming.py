"""The receiver's machine alone: which ranges it takes, when it frees its slots, and what it refuses of the peer."""

from __future__ import annotations

import dataclasses

import pytest
from protocol_rig import (
    QUIESCE_S,
    TRANSFER_S,
    Case,
    make_incoming,
    messages_of,
    offer_of,
    plan_of,
    route_of,
    simple_case,
)

from rdma_kv.errors import (
    ChecksumError,
    ErrorCode,
    LocalProtocolError,
    PeerLostError,
    RangeUnavailableError,
    RemoteProtocolError,
    RouteMismatchError,
    TransferAborted,
    TransferTimeout,
)
from rdma_kv.messages import (
    MAX_SLOTS_PER_MESSAGE,
    Abort,
    Ack,
    Done,
    Finish,
    Grant,
    Notification,
    Reject,
    Release,
)
from rdma_kv.planner import Box, LinkPlan
from rdma_kv.protocol.actions import Action, Finished, KeepSlot, Listen, ReleaseSlot, Scatter, SendMessage
from rdma_kv.protocol.incoming import IncomingState, IncomingTransfer
from rdma_kv.slots import SlotRef
from rdma_kv.types import Interval

CASE = simple_case(total=4)  # here in boxes of one token of both layers, the largest that fit
SLOTS = [SlotRef(index, 1) for index in range(4)]
NO = TransferAborted("key1", "test", "the caller gave up")


def receiving(granted: int = 4, want: int = 4) -> IncomingTransfer:
    """A receiver of four tokens with `granted` slots out."""
    machine = make_incoming(CASE)
    machine.offered(offer_of(CASE, want=want), 0.0)
    machine.grant(SLOTS[:granted])
    return machine


def note(index: int, **changes: object) -> Notification:
    """Box `index` has landed in slot `index`."""
    facts = {"transfer": 1, "slot": index, "epoch": 1, "move": 0, "layers": (0, 2), "tokens": (index, index + 1)}
    return Notification(**{**facts, **changes})  # type: ignore[arg-type]


def take(machine: IncomingTransfer, *indexes: int) -> list[Action]:
    """Boxes land and are scattered."""
    actions: list[Action] = []
    for index in indexes:
        actions += machine.notified(note(index), 0.0) or []
        actions += machine.scattered(SLOTS[index], 0.0)
    return actions


def kinds(actions: list[Action] | None) -> list[str]:
    assert actions is not None
    return [type(a.message if isinstance(a, SendMessage) else a).__name__ for a in actions]


def abort(code: ErrorCode = ErrorCode.TRANSFER_ABORTED, culprit: str = "") -> Abort:
    return Abort(1, "key1", 0, 0, 0, code, culprit, "no more")


# --- offers ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "available", "taken"),
    [
        ((0, 8), (0, 8), (0, 8)),
        ((4, 8), (0, 8), (4, 8)),
        ((1984, 2049), (0, 2048), (1984, 2048)),
        ((4, 8), (4, 8), (4, 8)),
        ((5, 8), (4, 6), (5, 6)),
        ((8, 8), (0, 8), (8, 8)),
        ((9, 12), (0, 8), (9, 9)),
        ((0, 8), (0, 0), (0, 0)),
        ((0, 0), (4, 8), (0, 0)),
    ],
)
def test_ranges_are_what_is_wanted_and_available_by_position(
    wanted: tuple[int, int], available: tuple[int, int], taken: tuple[int, int]
):
    case = Case(plan_of(route_of(), total=8), (available,), (wanted,))
    machine = make_incoming(case)
    assert machine.offered(offer_of(case), 0.0) == []
    assert machine.must_answer
    assert messages_of(machine.grant([])) == [Grant(1, [taken], [])]
    assert not machine.must_answer


@pytest.mark.parametrize(
    ("changes", "kind", "code"),
    [
        ({"digest": bytes(16)}, RouteMismatchError, ErrorCode.ROUTE_MISMATCH),
        ({"available": [(1, 4)]}, RangeUnavailableError, ErrorCode.RANGE_UNAVAILABLE),
        ({"available": [(8, 9)]}, RangeUnavailableError, ErrorCode.RANGE_UNAVAILABLE),
        ({"available": []}, RemoteProtocolError, ErrorCode.REMOTE_PROTOCOL),
        ({"available": [(0, 4), (0, 4)]}, RemoteProtocolError, ErrorCode.REMOTE_PROTOCOL),
        ({"available": [(4, 0)]}, RemoteProtocolError, ErrorCode.REMOTE_PROTOCOL),
    ],
)
def test_an_offer_that_does_not_fit_is_rejected(changes: dict[str, object], kind: type, code: ErrorCode):
    machine = make_incoming(CASE)
    actions = machine.offered(offer_of(CASE, **changes), 0.0)
    assert kinds(actions) == ["Reject", "Finished"]
    (reject,) = messages_of(actions)
    assert isinstance(reject, Reject)
    assert (reject.transfer, reject.code) == (1, code)
    assert type(machine.error) is kind
    assert machine.settled


def test_the_total_comes_from_the_offer():
    """A contiguous context split depends on how many tokens there are, which only the sender knows."""
    case = Case(plan_of(route_of(), total=99), ((0, 6),), ((0, 8),))
    machine = make_incoming(case)
    machine.offered(offer_of(case), 0.0)
    assert machine.plan.total_tokens == (6,)


def test_slots_are_wanted_for_boxes_that_are_ready():
    machine = receiving(granted=0, want=1)
    assert machine.wanting == 1
    machine.offered(offer_of(CASE, want=3), 0.0)
    assert machine.wanting == 3
    machine.grant(SLOTS[:2])
    assert machine.wanting == 1
    machine.offered(offer_of(CASE, want=1), 0.0)
    assert machine.wanting == 0
    machine.released(Release(1, [(1, 1)]), 0.0)
    assert machine.wanting == 0
    take(machine, 0)
    assert machine.wanting == 0
    machine.offered(offer_of(CASE, want=3), 0.0)
    assert machine.wanting == 2


def test_what_was_given_back_is_not_granted_again_by_itself():
    machine = receiving(granted=3, want=4)
    machine.released(Release(1, [(2, 1)]), 0.0)
    assert machine.wanting == 0
    machine.offered(offer_of(CASE, want=3), 0.0)
    assert machine.wanting == 1


def test_nothing_is_granted_after_finish():
    machine = receiving(granted=3, want=4)
    assert machine.wanting == 1
    machine.finished(Finish(1, 3, {}), 0.0)
    assert machine.state is IncomingState.RECEIVING
    assert machine.wanting == 0


def test_an_offer_of_another_number_changes_nothing():
    machine = receiving(granted=0, want=1)
    assert machine.offered(offer_of(CASE, want=4, number=2), 0.0) == []
    assert machine.wanting == 1


def test_many_grants_go_in_messages_that_can_be_read():
    machine = receiving(granted=0, want=10_000)
    grants = messages_of(machine.grant([SlotRef(index, 1) for index in range(10_000)]))
    assert all(isinstance(grant, Grant) and grant.ranges == [(0, 4)] for grant in grants)
    assert [len(grant.slots) for grant in grants] == [MAX_SLOTS_PER_MESSAGE, MAX_SLOTS_PER_MESSAGE, 1808]


def test_a_refused_expect_tells_why():
    for code, kind in ((ErrorCode.ROUTE_MISMATCH, RouteMismatchError), (ErrorCode.CLOSED, TransferAborted)):
        machine = make_incoming(CASE)
        assert kinds(machine.refused(Reject(0, code, "not you", "key1", 0, 0), 0.0)) == ["Finished"]
        assert type(machine.error) is kind
    machine = receiving()
    assert machine.refused(Reject(0, ErrorCode.CLOSED, "", "key1", 0, 0), 0.0) == []
    assert machine.state is IncomingState.RECEIVING


# --- boxes -------------------------------------------------------------------------------------------------------------


def test_a_box_is_scattered_then_its_slot_is_free_then_the_peer_hears():
    machine = receiving()
    assert machine.notified(note(2), 0.0) == [Scatter(SLOTS[2], Box(0, Interval(0, 2), Interval(2, 3)))]
    assert machine.scattered(SLOTS[2], 0.0) == [ReleaseSlot(SLOTS[2]), SendMessage(Ack(1, 2, 1))]


def test_done_comes_with_the_last_of_data_and_finish():
    machine = receiving()
    take(machine, 3, 1, 0, 2)
    assert kinds(machine.finished(Finish(1, 4, {"token": 5}), 0.0)) == ["Done", "Finished"]
    assert machine.state is IncomingState.DONE
    assert machine.metadata == {"token": 5}
    assert machine.settled
    assert machine.deadline is None


def test_finish_may_overtake_the_last_notifications():
    machine = receiving()
    machine.started()
    take(machine, 0, 1)
    assert machine.finished(Finish(1, 4, {}), 0.0) == []
    assert machine.wanting == 0
    take(machine, 2)
    assert machine.notified(note(3), 0.0) == [Scatter(SLOTS[3], Box(0, Interval(0, 2), Interval(3, 4)))]
    assert machine.state is IncomingState.RECEIVING
    actions = machine.scattered(SLOTS[3], 0.0)
    assert kinds(actions) == ["ReleaseSlot", "Done", "Listen", "Finished"]
    assert Listen(on=False) in actions


def test_grants_that_crossed_finish_are_free_at_done():
    machine = receiving()
    machine.grant([SlotRef(9, 7)])
    take(machine, 0, 1, 2, 3)
    actions = machine.finished(Finish(1, 4, {}), 0.0)
    assert ReleaseSlot(SlotRef(9, 7)) in actions
    assert machine.settled


@pytest.mark.parametrize(
    "changes",
    [{"epoch": 2}, {"slot": 4}, {"slot": (1 << 31) - 1}, {"epoch": 1 << 61}],
    ids=["stale epoch", "another slot", "no such slot", "an epoch that never was"],
)
def test_a70_a_notification_without_a_live_grant_changes_nothing(changes: dict[str, int]):
    machine = receiving()
    assert machine.notified(note(0, **changes), 0.0) is None
    assert machine.state is IncomingState.RECEIVING
    assert machine.received_bytes == 0


def test_a_notification_counts_once():
    machine = receiving()
    take(machine, 0)
    assert machine.notified(note(0), 0.0) is None
    assert machine.received_bytes == 64


def test_start_switches_polling_on_once():
    machine = receiving()
    assert machine.started() == [Listen(on=True)]
    assert machine.started() == []


# --- the peer's mistakes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"move": 1},
        {"move": (1 << 31) - 1},
        {"layers": (0, 3)},
        {"layers": (2, 0)},
        {"layers": (1, 1)},
        {"tokens": (1, 0)},
        {"tokens": (0, 0)},
        {"tokens": (0, 5)},
        {"tokens": (4, 5)},
        {"tokens": (0, (1 << 31) - 1)},
        {"tokens": (0, 2)},  # larger than a chunk
        {"tokens": (2, 3)},  # overlaps what came before
        {"tokens": (2, 3), "layers": (1, 2)},
    ],
)
def test_a_box_that_cannot_be_is_refused(changes: dict[str, object]):
    machine = receiving()
    take(machine, 2)
    actions = machine.notified(note(0, **changes), 0.0)
    assert kinds(actions) == ["ReleaseSlot", "Abort", "Finished"]
    assert isinstance(machine.error, RemoteProtocolError)
    (told,) = messages_of(actions or [])
    assert isinstance(told, Abort)
    assert told.code is ErrorCode.REMOTE_PROTOCOL
    assert machine.state is IncomingState.ABORTING
    assert sorted(a.slot.index for a in machine.quiesced(0.0) if isinstance(a, ReleaseSlot)) == [1, 3]
    assert machine.state is IncomingState.FAILED


class CountsNothingOutside(LinkPlan):
    """Would notice if positions were computed for tokens that only the peer believes in."""

    def carried(self, number: int, tokens: Interval) -> int:
        assert Interval(0, 8).contains(tokens), f"{tokens.size} positions were about to be listed"
        return super().carried(number, tokens)


def test_tokens_from_the_wire_are_checked_before_they_are_counted():
    """Under context parallelism counting lists positions: 2**31 of them are 16 GiB."""
    plan = plan_of(route_of(cp=(2, 2), interleave=1), total=8)
    plan = CountsNothingOutside(**{f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)})
    case = Case(plan, ((0, 8),), ((0, 8),))
    machine = make_incoming(case)
    machine.offered(offer_of(case, want=1), 0.0)
    machine.grant(SLOTS[:1])
    assert machine.notified(note(0, tokens=(0, (1 << 31) - 1)), 0.0) is not None
    assert isinstance(machine.error, RemoteProtocolError)


@pytest.mark.parametrize("boxes", [0, 1, 5, (1 << 31) - 1])
def test_a_finish_whose_count_cannot_be_is_refused_at_once(boxes: int):
    machine = receiving()
    take(machine, 0, 1)
    assert "Abort" in kinds(machine.finished(Finish(1, boxes, {}), 0.0))
    assert isinstance(machine.error, RemoteProtocolError)


def test_a_finish_that_leaves_a_hole_is_refused():
    machine = receiving()
    take(machine, 0, 1, 2)
    assert "Abort" in kinds(machine.finished(Finish(1, 3, {}), 0.0))
    assert isinstance(machine.error, RemoteProtocolError)
    assert machine.state is IncomingState.ABORTING


def test_finish_twice_is_refused():
    machine = receiving()
    machine.finished(Finish(1, 4, {}), 0.0)
    machine.finished(Finish(1, 4, {}), 0.0)
    assert isinstance(machine.error, RemoteProtocolError)


def test_finish_before_the_first_grant_is_refused():
    machine = make_incoming(CASE)
    machine.offered(offer_of(CASE), 0.0)
    machine.finished(Finish(1, 0, {}), 0.0)
    assert isinstance(machine.error, RemoteProtocolError)
    machine = make_incoming(CASE)
    machine.finished(Finish(1, 0, {}), 0.0)
    assert isinstance(machine.error, RemoteProtocolError)


@pytest.mark.parametrize("slots", [[(0, 2)], [(4, 1)], [(0, 1), (9, 1)], [(3, 1)]])
def test_release_of_what_is_not_granted_is_refused_and_frees_nothing(slots: list[tuple[int, int]]):
    machine = receiving()
    take(machine, 3)
    assert "ReleaseSlot" not in kinds(machine.released(Release(1, slots), 0.0))
    assert isinstance(machine.error, RemoteProtocolError)


def test_release_after_finish_is_refused():
    machine = receiving()
    machine.finished(Finish(1, 4, {}), 0.0)
    assert "ReleaseSlot" not in kinds(machine.released(Release(1, [(0, 1)]), 0.0))
    assert isinstance(machine.error, RemoteProtocolError)


# --- checksums ---------------------------------------------------------------------------------------------------------


def checked() -> IncomingTransfer:
    """A receiver whose link has agreed on checksums."""
    machine = make_incoming(CASE, checksum=True)
    machine.offered(offer_of(CASE, want=4), 0.0)
    machine.grant(SLOTS)
    return machine


def test_a_checksum_goes_with_its_box_to_the_scatter():
    box = Box(0, Interval(0, 2), Interval(0, 1))
    assert checked().notified(note(0, checksum=17), 0.0) == [Scatter(SLOTS[0], box, 17)]
    assert checked().notified(note(0, checksum=0), 0.0) == [Scatter(SLOTS[0], box, 0)]
    assert receiving().notified(note(0), 0.0) == [Scatter(SLOTS[0], box)]


@pytest.mark.parametrize(("agreed", "checksum"), [(True, None), (False, 17), (False, 0)])
def test_a_checksum_that_was_not_agreed_on_or_is_missing_is_the_peers_error(agreed: bool, checksum: int | None):
    machine = checked() if agreed else receiving()
    actions = machine.notified(note(0, checksum=checksum), 0.0)
    assert kinds(actions) == ["ReleaseSlot", "Abort", "Finished"]
    assert isinstance(machine.error, RemoteProtocolError)
    assert "against the handshake" in str(machine.error)


def test_after_the_end_a_notification_is_a_proof_whatever_it_carries():
    machine = checked()
    machine.fail(NO, 0.0)
    assert machine.notified(note(0), 0.0) == [ReleaseSlot(SLOTS[0])]
    assert machine.error is NO


def test_f77_a_damaged_box_fails_the_transfer_by_name_and_frees_its_slot():
    machine = checked()
    machine.notified(note(0, checksum=17), 0.0)
    machine.notified(note(1, checksum=18), 0.0)
    box = Box(0, Interval(0, 2), Interval(1, 2))
    actions = machine.scatter_damaged(SLOTS[1], box, 18, 99, 0.0)
    assert kinds(actions) == ["ReleaseSlot", "Abort"]  # the caller waits for the scatter that still runs
    error = machine.error
    assert isinstance(error, ChecksumError)
    assert (error.component, error.layers, error.tokens) == ("kv", (0, 1), (1, 2))
    assert (error.src_rank, error.expected, error.found) == (CASE.plan.move(0).src, 18, 99)
    assert error.culprit == "the prefill agent"
    assert error.retryable
    (message,) = messages_of(actions)
    assert isinstance(message, Abort)
    assert (message.code, message.culprit) == (ErrorCode.CHECKSUM, "the prefill agent")
    assert kinds(machine.scattered(SLOTS[0], 0.0)) == ["ReleaseSlot", "Finished"]
    machine.quiesced(0.0)
    assert machine.state is IncomingState.FAILED
    assert machine.settled


def test_a_damaged_box_after_a_failure_changes_nothing_but_its_slot():
    machine = checked()
    machine.notified(note(0, checksum=17), 0.0)
    machine.fail(NO, 0.0)
    actions = machine.scatter_damaged(SLOTS[0], Box(0, Interval(0, 2), Interval(0, 1)), 17, 99, 0.0)
    assert kinds(actions) == ["ReleaseSlot", "Finished"]
    assert machine.error is NO


# --- endings -----------------------------------------------------------------------------------------------------------


def ends(machine: IncomingTransfer) -> list[list[Action] | None]:
    """Everything that can still come to a machine that has ended."""
    return [
        machine.aborted(abort(), 5.0),
        machine.aborted(abort(), 5.0),
        machine.fail(NO, 5.0),
        machine.quiesced(0.0),
        machine.finished(Finish(1, 4, {}), 5.0),
        machine.offered(offer_of(CASE, want=9), 5.0),
        machine.released(Release(1, [(0, 1)]), 5.0),
        machine.started(),
        machine.tick(1e9),
        machine.link_lost(PeerLostError("peer", "gone"), 5.0),
    ]


def test_a_failure_that_an_abort_brought_is_told_by_who_sent_it():
    """The first failure decides who tells: what comes later changes nothing."""
    heard = receiving()
    heard.aborted(abort(), 0.0)
    heard.fail(NO, 0.0)
    assert heard.told
    own = receiving()
    own.fail(NO, 0.0)
    own.aborted(abort(), 0.0)
    refused = receiving()
    refused.link_lost(PeerLostError("peer", "gone"), 0.0)
    done = receiving()
    take(done, 0, 1, 2, 3)
    done.finished(Finish(1, 4, {}), 0.0)
    done.aborted(abort(), 0.0)
    assert not own.told
    assert not refused.told
    assert not done.told


def test_a34_everything_after_done():
    machine = receiving()
    take(machine, 0, 1, 2, 3)
    machine.finished(Finish(1, 4, {}), 0.0)
    assert ends(machine) == [[]] * 10
    assert machine.notified(note(0), 5.0) is None
    assert machine.state is IncomingState.DONE
    assert machine.error is None


def test_a34_everything_after_abort():
    machine = receiving()
    machine.fail(NO, 0.0)
    machine.quiesced(0.0)
    assert machine.state is IncomingState.FAILED
    assert ends(machine) == [[]] * 10
    assert machine.error is NO


def test_a30_grants_are_held_after_an_abort_until_quiesced():
    machine = receiving()
    assert kinds(machine.fail(NO, 1.0)) == ["Abort", "Finished"]
    assert machine.deadline == 1.0 + QUIESCE_S
    assert machine.fail(NO, 2.0) == machine.aborted(abort(), 2.0) == []
    assert machine.notified(note(0), 2.0) == [ReleaseSlot(SLOTS[0])]  # late, but a proof
    assert machine.released(Release(1, [(1, 1)]), 2.0) == [ReleaseSlot(SLOTS[1])]
    assert machine.state is IncomingState.ABORTING
    assert {a.slot for a in machine.quiesced(0.0) if isinstance(a, ReleaseSlot)} == set(SLOTS[2:])
    assert machine.state is IncomingState.FAILED


def test_pages_come_back_when_the_last_scatter_has_ended():
    machine = receiving()
    machine.notified(note(0), 0.0)
    machine.notified(note(1), 0.0)
    assert kinds(machine.aborted(abort(ErrorCode.STAGING_FULL, "rank 3"), 0.0)) == []
    assert isinstance(machine.error, TransferAborted)
    assert (machine.error.cause, machine.error.culprit) == (ErrorCode.STAGING_FULL, "rank 3")
    assert kinds(machine.quiesced(0.0)) == ["ReleaseSlot", "ReleaseSlot"]
    assert machine.scattered(SLOTS[0], 0.0) == [ReleaseSlot(SLOTS[0])]
    assert machine.scattered(SLOTS[1], 0.0) == [ReleaseSlot(SLOTS[1]), Finished(machine.error)]
    assert machine.state is IncomingState.FAILED


def test_a_failed_scatter_fails_the_transfer_and_frees_its_slot():
    machine = receiving()
    machine.notified(note(0), 0.0)
    error = LocalProtocolError("kernel")
    assert kinds(machine.scatter_failed(SLOTS[0], error, 0.0)) == ["ReleaseSlot", "Abort", "Finished"]
    assert machine.error is error


def test_a32_without_a_proof_grants_are_kept_and_proven_later():
    machine = receiving()
    machine.started()
    machine.tick(TRANSFER_S)
    assert isinstance(machine.error, TransferTimeout)
    kept = machine.tick(TRANSFER_S + QUIESCE_S)
    assert set(kept) == {KeepSlot(slot) for slot in SLOTS}
    assert machine.ended
    assert not machine.settled
    assert machine.notified(note(0), 99.0) == [ReleaseSlot(SLOTS[0])]
    assert machine.released(Release(1, [(1, 1)]), 99.0) == [ReleaseSlot(SLOTS[1])]
    actions = machine.quiesced(0.0)
    assert {a.slot for a in actions if isinstance(a, ReleaseSlot)} == set(SLOTS[2:])
    assert actions[-1] == Listen(on=False)
    assert machine.settled


def test_a_target_with_held_slots_polls_though_start_came_late():
    machine = receiving()
    machine.tick(TRANSFER_S)
    machine.tick(TRANSFER_S + QUIESCE_S)
    assert machine.started() == [Listen(on=True)]
    assert machine.quiesced(0.0)[-1] == Listen(on=False)
    assert machine.started() == []


def test_a36_a_lost_link_keeps_the_grants_reports_and_stops_polling():
    machine = receiving()
    machine.started()
    lost = PeerLostError("the prefill agent", "gone")
    actions = machine.link_lost(lost, 0.0)
    assert set(actions) == {*(KeepSlot(slot) for slot in SLOTS), Finished(lost), Listen(on=False)}
    assert machine.state is IncomingState.FAILED
    assert not machine.settled
    assert machine.link_lost(lost, 0.0) == []
    assert machine.started() == []


def test_a_scatter_that_outlives_a_lost_link_is_waited_for():
    machine = receiving()
    machine.notified(note(0), 0.0)
    lost = PeerLostError("the prefill agent", "gone")
    assert Finished(lost) not in machine.link_lost(lost, 0.0)
    assert machine.state is IncomingState.FAILED
    assert machine.scattered(SLOTS[0], 0.0) == [ReleaseSlot(SLOTS[0]), Finished(lost)]


def test_a_receiver_that_never_met_its_offer_aborts_by_name():
    machine = make_incoming(CASE)
    (told,) = messages_of(machine.fail(NO, 0.0))
    assert isinstance(told, Abort)
    assert (told.transfer, told.key) == (0, "key1")
    assert machine.settled


def test_a38_an_empty_range_is_done_with_finish_alone():
    case = simple_case(total=4, wanted=(4, 4))
    machine = make_incoming(case)
    machine.offered(offer_of(case, want=4), 0.0)
    machine.grant([])
    actions = machine.finished(Finish(1, 0, {"token": 1}), 0.0)
    assert actions == [SendMessage(Done(1)), Finished(None)]
