"""The tables of all machines, and the two transfer machines as a pair under every order of events."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from protocol_rig import (
    QUIESCE_S,
    Case,
    FakeClock,
    LawBroken,
    Order,
    Pair,
    cases,
    make_incoming,
    make_outgoing,
    offer_of,
    orders,
    plan_of,
    route_of,
    seeded,
    simple_case,
)

from rdma_kv.errors import (
    LocalProtocolError,
    RangeUnavailableError,
    RdmaKvError,
    RouteMismatchError,
    TransferAborted,
    TransferTimeout,
)
from rdma_kv.messages import Grant, Notification, Quiesced
from rdma_kv.protocol.actions import Action, Finished, Listen, PostWrite, ReleaseSlot, SendMessage
from rdma_kv.protocol.incoming import INCOMING_TABLE, INCOMING_TERMINAL, IncomingEvent, IncomingState, IncomingTransfer
from rdma_kv.protocol.link import LINK_TABLE, LINK_TERMINAL, LinkEvent, LinkState
from rdma_kv.protocol.liveness import LIFE_TABLE, LIFE_TERMINAL, LifeEvent, LifeState
from rdma_kv.protocol.machine import Machine
from rdma_kv.protocol.outgoing import OUTGOING_TABLE, OUTGOING_TERMINAL, OutgoingEvent, OutgoingState, OutgoingTransfer
from rdma_kv.slots import SlotRef

# --- tables ------------------------------------------------------------------------------------------------------------

# One line a state: what each event leads to; every pair that is not here is an error. Written without the code's tables.
OUTGOING = {
    "OFFERED": {"GRANT": "SENDING", "FAIL": "ABORTING"},
    "SENDING": {"GRANT": "SENDING", "FINISH": "FINISHING", "FAIL": "ABORTING"},
    "FINISHING": {"GRANT": "FINISHING", "DONE": "DONE", "FAIL": "ABORTING"},
    "ABORTING": {"GRANT": "ABORTING", "DONE": "ABORTING", "FAIL": "ABORTING", "SETTLED": "FAILED"},
}
INCOMING = {
    "EXPECTING": {"OFFER": "RECEIVING", "FAIL": "ABORTING"},
    "RECEIVING": {"OFFER": "RECEIVING", "COMPLETE": "DONE", "FAIL": "ABORTING"},
    "ABORTING": {"OFFER": "ABORTING", "FAIL": "ABORTING", "SETTLED": "FAILED"},
}
LINK = {
    "GREETING": {"HELLO": "UP", "REFUSE": "CLOSED", "BYE": "CLOSED", "LOST": "CLOSED", "TIMEOUT": "CLOSED"},
    "UP": {"MESSAGE": "UP", "REFUSE": "CLOSED", "BYE": "CLOSED", "LOST": "CLOSED"},
}
LIFE = {
    "ALIVE": {"HEARD": "ALIVE", "OVERDUE": "SUSPECT"},
    "SUSPECT": {"HEARD": "ALIVE", "EXPIRED": "LOST"},
}
TABLES = [
    (OUTGOING, OUTGOING_TABLE, OUTGOING_TERMINAL, OutgoingState, OutgoingEvent),
    (INCOMING, INCOMING_TABLE, INCOMING_TERMINAL, IncomingState, IncomingEvent),
    (LINK, LINK_TABLE, LINK_TERMINAL, LinkState, LinkEvent),
    (LIFE, LIFE_TABLE, LIFE_TERMINAL, LifeState, LifeEvent),
]
Table = Mapping[tuple[Enum, Enum], Enum]
every_table = pytest.mark.parametrize(
    ("expected", "table", "terminal", "states", "events"), TABLES, ids=["outgoing", "incoming", "link", "life"]
)


@every_table
def test_every_state_and_event(
    expected: dict[str, dict[str, str]],
    table: Table,
    terminal: frozenset[Enum],
    states: type[Enum],
    events: type[Enum],
):
    for state in states:
        for event in events:
            machine: Machine[Enum, Enum] = Machine(state, table, terminal)
            if state in terminal:
                assert machine.ended
                assert machine.allows(event)
                assert machine.step(event) is machine.state is state
            elif event.name in expected[state.name]:
                assert not machine.ended
                assert machine.allows(event)
                assert machine.step(event) is machine.state is states[expected[state.name][event.name]]
            else:
                assert not machine.allows(event)
                with pytest.raises(LocalProtocolError, match=f"{event.name} .* {state.name}"):
                    machine.step(event)
                assert machine.state is state


@every_table
def test_tables_name_no_terminal_state_and_leave_no_state_without_a_way_out(
    expected: dict[str, dict[str, str]],
    table: Table,
    terminal: frozenset[Enum],
    states: type[Enum],
    events: type[Enum],
):
    assert {state.name for state in states} == set(expected) | {state.name for state in terminal}
    assert not {state for state, _ in table} & terminal
    assert {event for _, event in table} == set(events)
    reached = set(terminal)
    while found := {state for (state, _), following in table.items() if following in reached} - reached:
        reached |= found
    assert reached == set(states)


# --- deadlines ---------------------------------------------------------------------------------------------------------


def outgoing_in(state: OutgoingState) -> OutgoingTransfer:
    """A sender of one box in `state`, on the way there without any fault of the peer."""
    machine = make_outgoing(simple_case(total=2, chunk_bytes=512))
    machine.push(0, *machine_span(machine), 0.0)
    if state is OutgoingState.OFFERED:
        return machine
    machine.granted(Grant(1, [(0, 2)], [(0, 1)]), 4, 0.0)
    slot = SlotRef(0, 1)
    if state is not OutgoingState.SENDING:
        machine.start_box(slot)
        machine.gathered(slot)
    if state is OutgoingState.ABORTING:
        machine.fail(TransferAborted("key1", "test", "no"), 0.0)
    elif state is OutgoingState.FINISHING:
        machine.written(slot, 0.0)
        machine.finish({}, 0.0)
    assert machine.state is state
    return machine


def machine_span(machine: OutgoingTransfer):
    layers = machine.plan.move(0).layers
    return layers, machine.available[0]


def incoming_in(state: IncomingState) -> IncomingTransfer:
    """A receiver of one box in `state`."""
    case = simple_case(total=2, chunk_bytes=512)
    machine = make_incoming(case)
    if state is not IncomingState.EXPECTING:
        machine.offered(offer_of(case, want=1), 0.0)
        machine.grant([SlotRef(0, 1)])
    if state is IncomingState.ABORTING:
        machine.fail(TransferAborted("key1", "test", "no"), 0.0)
    assert machine.state is state
    return machine


@pytest.mark.parametrize("state", [state for state in OutgoingState if state not in OUTGOING_TERMINAL])
def test_a41_every_state_of_a_sender_ends_by_its_deadline(state: OutgoingState):
    machine = outgoing_in(state)
    assert machine.deadline is not None
    assert machine.tick(machine.deadline - 0.001) == []
    assert machine.state is state
    first = machine.deadline
    machine.tick(first)
    if state is not OutgoingState.ABORTING:
        assert isinstance(machine.error, TransferTimeout)
    if machine.deadline is not None:
        assert machine.deadline == first + QUIESCE_S
        machine.tick(machine.deadline)
    assert machine.state is OutgoingState.FAILED
    assert machine.deadline is None


@pytest.mark.parametrize("state", [state for state in IncomingState if state not in INCOMING_TERMINAL])
def test_a41_every_state_of_a_receiver_ends_by_its_deadline(state: IncomingState):
    machine = incoming_in(state)
    assert machine.deadline is not None
    assert machine.tick(machine.deadline - 0.001) == []
    assert machine.state is state
    first = machine.deadline
    machine.tick(first)
    if state is not IncomingState.ABORTING:
        assert isinstance(machine.error, TransferTimeout)
    if machine.deadline is not None:
        assert machine.deadline == first + QUIESCE_S
        machine.tick(machine.deadline)
    assert machine.state is IncomingState.FAILED
    assert machine.deadline is None


def test_a41_both_sides_time_out_without_any_traffic():
    """Nothing is heard from the other side: the timers alone end both."""
    pair = Pair([simple_case()])
    (leg,) = pair.legs
    leg.offered = leg.expected = True
    clock: FakeClock = pair.clock
    for which in ("outgoing", "incoming"):
        clock.advance_to(getattr(leg, which).deadline)
        pair.tick(which)
        assert isinstance(leg.outcome(which), TransferTimeout)
        assert leg.outcome(which).retryable
    assert leg.ended


# --- the pair ----------------------------------------------------------------------------------------------------------

FAULTS = {
    "abort": "either caller gives up, at any moment",
    "kernel": "a gather or scatter fails",
    "write": "a WRITE fails, posted or not; what was posted may land later",
    "stuck": "a gather, scatter or WRITE does not end before all deadlines",
    "notes": "a notification is lost or comes again",
    "link": "either side loses the link",
    "frames": "a control message is lost, doubled or swapped with the next one",
    "time": "the deadlines of one side pass, the timers of the other are late",
}
several = st.lists(cases(), min_size=1, max_size=3)
pools = st.tuples(st.integers(2, 5), st.integers(2, 6))


@settings(seeded, max_examples=150)
@given(several, pools, orders)
def test_without_faults_everything_arrives_once(transfers: list[Case], slots: tuple[int, int], order: Order):
    pair = Pair(transfers, src_slots=slots[0], dst_slots=slots[1])
    pair.play(order)
    pair.end()
    for leg in pair.legs:
        assert leg.outgoing.state is OutgoingState.DONE
        assert leg.incoming.state is IncomingState.DONE


@pytest.mark.parametrize("fault", FAULTS)
def test_one_kind_of_fault_leaves_nothing_unsafe_or_without_an_end(fault: str):
    @settings(seeded, max_examples=60)
    @given(several, pools, orders)
    def run(transfers: list[Case], slots: tuple[int, int], order: Order) -> None:
        pair = Pair(transfers, src_slots=slots[0], dst_slots=slots[1], faults=frozenset({fault}))
        pair.play(order)
        pair.end()

    run()


@settings(seeded, max_examples=150)
@given(several, pools, orders, st.sets(st.sampled_from(sorted(FAULTS)), min_size=2))
def test_all_kinds_of_faults_together(transfers: list[Case], slots: tuple[int, int], order: Order, faults: set[str]):
    pair = Pair(transfers, src_slots=slots[0], dst_slots=slots[1], faults=frozenset(faults))
    pair.play(order)
    pair.end()


def test_a42_more_failures_than_slots_and_then_a_success():
    pair = Pair([simple_case()] * 7, src_slots=2, dst_slots=2)
    for leg in pair.legs[:-1]:
        pair.offer(leg)
        pair.expect(leg)
        pair.push(leg)
        while pair.decode.inbox:
            pair.read(pair.decode)
        pair.grant(leg, 1)
        pair.out(leg, leg.outgoing.fail(TransferAborted(leg.outgoing.key, "test", "no"), pair.clock.now))
        while pair.decode.inbox or pair.prefill.inbox:
            pair.read(pair.decode if pair.decode.inbox else pair.prefill)
        assert leg.ended
    pair.end(may_fail=True)
    assert pair.legs[-1].outcome("incoming") is None
    assert pair.decode.pool.free == pair.prefill.pool.free == 2


# --- ranges ------------------------------------------------------------------------------------------------------------


def run_to_the_end(case: Case, *, may_fail: bool = False, **kind: object) -> Pair:
    pair = Pair([case], **kind)  # type: ignore[arg-type]
    pair.end(may_fail=may_fail)
    return pair


def tokens_written(pair: Pair) -> set[int]:
    return {token for _, _, token in pair.legs[0].written}


def test_f54_asking_one_token_beyond_what_there_is_moves_only_the_missing_page():
    case = Case(plan_of(route_of(), total=2048, chunk_bytes=4096), ((0, 2048),), ((31 * 64, 2049),))
    pair = run_to_the_end(case)
    (leg,) = pair.legs
    assert tokens_written(pair) == set(range(31 * 64, 2048))
    assert [(span.start, span.end) for span in leg.incoming.ranges] == [(1984, 2048)]
    assert leg.outcome("incoming") is leg.outcome("outgoing") is None
    assert leg.incoming.received_bytes == 64 * 2 * 2 * 2 * 8  # tokens x layers x K and V x heads x row


def test_f55_a_prefix_hit_moves_only_the_rest():
    assert tokens_written(run_to_the_end(simple_case(total=16, wanted=(8, 16)))) == set(range(8, 16))


def test_f56_chunked_prefill_moves_each_token_once():
    pushes = ((0, (0, 2), (0, 20)), (0, (0, 2), (20, 32)))
    case = Case(plan_of(route_of(), total=32), ((0, 32),), ((0, 32),), pushes)
    assert tokens_written(run_to_the_end(case)) == set(range(32))


@pytest.mark.parametrize("wanted", [(8, 8), (8, 9), (0, 0), (12, 20)])
def test_a38_nothing_to_move_ends_with_finish_and_metadata(wanted: tuple[int, int]):
    pair = run_to_the_end(simple_case(total=8, wanted=wanted))
    (leg,) = pair.legs
    assert leg.outcome("outgoing") is leg.outcome("incoming") is None
    assert leg.incoming.metadata == {"number": 1}
    assert pair.sent["Finish"] == pair.sent["Done"] == 1
    assert pair.sent["Start"] == 0
    assert not pair.writes


def test_tokens_before_what_there_is_are_refused_on_both_sides():
    case = Case(plan_of(route_of(), total=8), ((4, 8),), ((0, 8),))
    (leg,) = run_to_the_end(case, may_fail=True).legs
    assert isinstance(leg.outcome("incoming"), RangeUnavailableError)
    assert isinstance(leg.outcome("outgoing"), RangeUnavailableError)


def test_different_routes_are_refused_on_both_sides():
    """R: the digest differs, since one side believes in another topology."""
    case = Case(plan_of(route_of(), total=8), ((0, 8),), ((0, 8),))

    def elsewhere(*args: object, **kind: object) -> IncomingTransfer:
        machine = IncomingTransfer(*args, **kind)  # type: ignore[arg-type]
        machine.plan = plan_of(route_of(tp=(2, 1)), total=8)
        return machine

    (leg,) = run_to_the_end(case, incoming=elsewhere, may_fail=True).legs
    assert isinstance(leg.outcome("incoming"), RouteMismatchError)
    assert isinstance(leg.outcome("outgoing"), RouteMismatchError)
    assert not leg.granted


# --- what comes late ---------------------------------------------------------------------------------------------------


def test_grants_for_data_that_is_not_wanted_do_not_go_back_and_forth():
    """Boxes outside the granted range are offered before it is known; then the target must learn that they are none."""
    pushes = ((0, (0, 2), (0, 8)), (0, (0, 2), (8, 16)))
    pair = Pair([Case(plan_of(route_of(), total=16), ((0, 16),), ((8, 16),), pushes)])
    (leg,) = pair.legs
    pair.offer(leg)
    pair.push(leg)  # the second push waits for more prefill
    pair.expect(leg)
    for _ in range(50):
        while pair.decode.inbox:
            pair.read(pair.decode)
        if leg.incoming.wanting or leg.incoming.must_answer:
            pair.grant(leg, leg.incoming.wanting)
        while pair.prefill.inbox:
            pair.read(pair.prefill)
    assert pair.sent["Grant"] == 1
    assert pair.sent["Release"] == 1
    assert pair.decode.pool.free == pair.decode.pool.total
    pair.end()
    assert tokens_written(pair) == set(range(8, 16))


def test_a_box_pushed_between_two_grants_is_sent_once():
    pushes = tuple((0, (0, 2), (token, token + 1)) for token in range(6))
    pair = Pair([Case(plan_of(route_of(), total=6), ((0, 6),), ((0, 6),), pushes)], dst_slots=2)
    (leg,) = pair.legs
    pair.offer(leg)
    pair.expect(leg)
    pair.read(pair.decode)
    pair.grant(leg, 0)
    pair.read(pair.prefill)
    pair.end()
    assert leg.outcome("incoming") is None
    assert sum(leg.written.values()) == 12


def test_a41_a_gather_that_outlives_all_deadlines_posts_nothing_and_keeps_the_pages():
    """The sender is FAILED long before; its caller gets the source pages when the kernel has ended, never earlier."""
    pair = Pair([simple_case(total=2)], faults=frozenset({"stuck"}))
    (leg,) = pair.legs
    while not leg.gathering:
        next(iter(pair.events()))[1]()
    (slot,) = leg.gathering
    leg.stuck.add(slot)
    for _ in range(2):
        pair.clock.advance_to(leg.outgoing.deadline)
        pair.tick("outgoing")
    assert leg.outgoing.state is OutgoingState.FAILED
    assert leg.outcomes["outgoing"] == []
    leg.stuck.clear()
    pair.gathered(leg, slot)
    assert isinstance(leg.outcome("outgoing"), TransferTimeout)
    assert not pair.writes
    pair.end()
    assert pair.prefill.pool.free == pair.prefill.pool.total
    assert pair.decode.pool.free == pair.decode.pool.total


def test_a32_a_target_that_gave_up_polls_until_the_late_write_has_landed():
    """Without that, the WRITE into a held slot could never settle, and the slot would be held for ever."""
    pair = Pair([simple_case(total=2, chunk_bytes=512)], faults=frozenset({"stuck"}))
    (leg,) = pair.legs
    while not pair.writes:
        next(iter(pair.events()))[1]()
    (write,) = pair.writes
    write.stuck = True
    while leg.incoming.deadline is not None:
        pair.clock.advance_to(leg.incoming.deadline)
        pair.tick("incoming")
        pair.drain()
    assert leg.incoming.state is IncomingState.FAILED
    assert not leg.incoming.settled
    assert sum(pair.decode.pool.held().values()) == 1
    assert leg.listening
    pair.end()
    assert pair.decode.pool.free == pair.decode.pool.total
    assert not leg.listening


def test_a50_one_failed_write_holds_one_slot_not_all_grants():
    """The other grants were never written to: RELEASE, since QUIESCED would be a lie."""
    pair = Pair([simple_case(total=8)], src_slots=2, dst_slots=8, faults=frozenset({"write"}))
    (leg,) = pair.legs
    while not pair.writes:
        next(iter(pair.events()))[1]()
    pair.grant(leg, leg.incoming.wanting)
    pair.write_failed(pair.writes[0])
    pair.end()
    assert len(leg.granted) == 4
    assert pair.sent["Quiesced"] == 0
    assert sum(pair.decode.pool.held().values()) == 1


# --- the laws catch broken machines ------------------------------------------------------------------------------------


class ReleasesAtAbort(IncomingTransfer):
    """Takes its grants back as soon as it has failed."""

    def fail(self, error: RdmaKvError, now: float, *, tell: bool = True) -> list[Action]:
        return [
            *super().fail(error, now, tell=tell),
            *(self.quiesced(0.0) if self.state is IncomingState.ABORTING else []),
        ]


class ReleasesOnNotification(IncomingTransfer):
    """Gives a slot back before its box is out of it."""

    def notified(self, message: Notification, now: float) -> list[Action] | None:
        actions = super().notified(message, now)
        slot = SlotRef(message.slot, message.epoch)
        return actions if actions is None else [*actions, ReleaseSlot(slot)]


class ForgetsEpochs(IncomingTransfer):
    """Takes a notification by slot number, whatever its epoch."""

    def notified(self, message: Notification, now: float) -> list[Action] | None:
        live = next((slot for slot in self._slots.granted if slot.index == message.slot), None)
        epoch = message.epoch if live is None else live.epoch
        return super().notified(Notification(message.transfer, message.slot, epoch, *note_box(message)), now)


def note_box(message: Notification):
    return message.move, message.layers, message.tokens


class DoneAtFinish(IncomingTransfer):
    """Believes FINISH, though notifications may still be on their way."""

    def _advance(self, now: float) -> list[Action]:
        if self._finish is not None:
            self._slots.landed = self._finish.boxes
            for tiling in self._tilings.values():
                tiling._left = 0
        return super()._advance(now)


class DropsAtTheDeadline(IncomingTransfer):
    """Stops polling at the deadline, with grants still out."""

    def _keep_grants(self) -> list[Action]:
        return [*super()._keep_grants(), *self._stop_listening()]


class QuiescedAfterFailure(OutgoingTransfer):
    """Says QUIESCED after a WRITE that failed."""

    def _end(self) -> list[Action]:
        self._flight.failed = False
        return super()._end()


class PostsAfterFailure(OutgoingTransfer):
    """Posts a gathered box whatever happened meanwhile."""

    def gathered(self, slot: SlotRef) -> list[Action]:
        box, target = self._flight.gathering[slot]
        if self.state is OutgoingState.SENDING:
            return super().gathered(slot)
        self._flight.writing[slot] = self._flight.gathering.pop(slot)
        return [PostWrite(slot, target, box)]


class ReportsAtOnce(OutgoingTransfer):
    """Gives source pages back while a gather reads them."""

    def fail(self, error: RdmaKvError, now: float, *, tell: bool = True) -> list[Action]:
        before = self.ended or self.error is not None
        return [*super().fail(error, now, tell=tell), *([] if before else self._report(error))]


class FreesFailedWrites(OutgoingTransfer):
    """Takes the slot of a failed WRITE for free."""

    def write_failed(self, slot: SlotRef, error: RdmaKvError, now: float, *, posted: bool) -> list[Action]:
        return super().write_failed(slot, error, now, posted=False)


class SendsTwice(OutgoingTransfer):
    """Enqueues what was pushed at every GRANT."""

    def granted(self, message: Grant, num_slots: int, now: float) -> list[Action]:
        first = self._ranges is None
        if first:
            self.all_pushed = list(self._pushed)
        else:
            self._pushed += self.all_pushed
        return super().granted(message, num_slots, now)


class NeverQuiesces(OutgoingTransfer):
    """Leaves the target's slots held for no reason."""

    def _end(self) -> list[Action]:
        actions = super()._end()
        return [a for a in actions if not (isinstance(a, SendMessage) and isinstance(a.message, Quiesced))]


class IgnoresItsDeadline(OutgoingTransfer):
    def tick(self, now: float) -> list[Action]:
        return [] if self.state is not OutgoingState.ABORTING else super().tick(now)


class NeverReports(IncomingTransfer):
    def scattered(self, slot: SlotRef, now: float) -> list[Action]:
        return [action for action in super().scattered(slot, now) if not isinstance(action, Finished | Listen)]


@pytest.mark.parametrize(
    ("broken", "faults", "law"),
    [
        (ReleasesAtAbort, {"abort"}, "while a WRITE may land"),
        (ReleasesOnNotification, set(), "while it is being emptied"),
        (ForgetsEpochs, {"notes"}, "stale notification|taken twice|may land|overwritten"),
        (DoneAtFinish, set(), "DONE, but not every cell"),
        (DropsAtTheDeadline, {"stuck"}, "nobody listens"),
        (QuiescedAfterFailure, {"write"}, "while a WRITE may land"),
        (PostsAfterFailure, {"abort"}, "a WRITE is posted in"),
        (ReportsAtOnce, {"abort"}, "source pages went back"),
        (FreesFailedWrites, {"write"}, "while its WRITE may read it|while a WRITE may land"),
        (SendsTwice, set(), "a failure without a fault|accused"),
        (NeverQuiesces, {"abort"}, "held though nothing can land"),
        (NeverReports, set(), "no outcome|polled for nothing"),
    ],
)
def test_the_laws_catch(broken: type[OutgoingTransfer] | type[IncomingTransfer], faults: set[str], law: str):
    side = "outgoing" if issubclass(broken, OutgoingTransfer) else "incoming"

    @settings(seeded, max_examples=400, phases=[Phase.generate], report_multiple_bugs=False)
    @given(several, pools, orders)
    def run(transfers: list[Case], slots: tuple[int, int], order: Order) -> None:
        pair = Pair(transfers, src_slots=slots[0], dst_slots=slots[1], faults=frozenset(faults), **{side: broken})
        pair.play(order)
        pair.end()

    with pytest.raises(LawBroken, match=law):
        run()


def test_the_laws_catch_a_sender_without_a_deadline():
    """It would wait for ever for a receiver that never came."""
    pair = Pair([simple_case()], outgoing=IgnoresItsDeadline)
    (leg,) = pair.legs
    pair.offer(leg)
    pair.clock.advance_to(leg.outgoing.deadline)
    pair.tick("outgoing")
    with pytest.raises(LawBroken, match="OFFERED and EXPECTING after all deadlines"):
        pair.check_end()
