"""Both transfer machines driven against each other, without any shell, and the laws that they must keep.

`Pair` plays everything around the machines of one link: the control stream (in order), the data plane (a posted WRITE
lands when it likes, its notification comes after its data, in no order to the control stream), the slot pools, gathers
and scatters. An `Order`, which hypothesis chooses, says which of the possible events comes next. After every event the
laws are checked; a machine that breaks one raises `LawBroken`.

The laws know nothing of the machines' insides: they follow what each posted WRITE may still do to memory.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from random import Random

from hypothesis import settings
from hypothesis import strategies as st

from rdma_kv.errors import ErrorCode, LocalProtocolError, PeerLostError, RdmaKvError, TransferAborted, TransportError
from rdma_kv.messages import (
    FRAME_HEADER,
    Abort,
    ControlMessage,
    Done,
    Finish,
    Grant,
    Notification,
    Offer,
    Quiesced,
    Reject,
    Release,
    Start,
    decode,
    decode_notification,
    encode,
    encode_notification,
)
from rdma_kv.planner import Box, LinkPlan, Route
from rdma_kv.protocol.actions import (
    Action,
    Finished,
    Gather,
    KeepSlot,
    Listen,
    PostWrite,
    ReleaseSlot,
    Scatter,
    SendMessage,
)
from rdma_kv.protocol.incoming import IncomingState, IncomingTransfer
from rdma_kv.protocol.outgoing import OutgoingState, OutgoingTransfer
from rdma_kv.slots import Hold, SlotPool, SlotRef
from rdma_kv.topology import Component, ContextSplit, ModelSpec, Topology
from rdma_kv.types import Interval

seeded = settings(derandomize=True, deadline=None, database=None, max_examples=100)

TRANSFER_S = 10.0
QUIESCE_S = 3.0
EVENTS = 5_000  # far more than any transfer here needs; beyond it the machines go round in circles

Cell = tuple[int, int, int]  # (move, layer, token)
Span = tuple[int, int]
OutgoingMaker = Callable[..., OutgoingTransfer]
IncomingMaker = Callable[..., IncomingTransfer]


class LawBroken(AssertionError):
    """A machine did what it must never do."""


def law(holds: object, text: str) -> None:
    if not holds:
        raise LawBroken(text)


class FakeClock:
    """Time that moves only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def advance_to(self, moment: float) -> None:
        self.now = max(self.now, moment)


# --- plans -------------------------------------------------------------------------------------------------------------


@cache
def route_of(
    *, layers: int = 2, tp: Span = (1, 1), cp: Span = (1, 1), interleave: int = 1, second: bool = False
) -> Route:
    """A route between two small engines; `tp` and `cp` are (prefill, decode)."""
    parts = [Component("kv", tuple(range(layers)), 2, 2, 8)]
    if second:
        parts.append(Component("scales", (1,), 1, 1, 4, "float32", replicated=True))
    sides = [
        Topology(tp=tp[side], cp=cp[side], layers_per_stage=(layers,), cp_split=ContextSplit(interleave))
        for side in (0, 1)
    ]
    return Route(ModelSpec(tuple(parts), "rig"), sides[0], sides[1], 0, 0)


def plan_of(route: Route, *, total: int = 8, chunk_bytes: int = 64, src: int = 0, dst: int = 0) -> LinkPlan:
    """The moves between one prefill and one decode rank."""
    moves = tuple(number for number, move in enumerate(route.moves) if (move.src, move.dst) == (src, dst))
    count = len(route.model.components)
    return LinkPlan(route, moves, (4,) * count, (4,) * count, chunk_bytes, (total,) * count)


@dataclass(frozen=True)
class Case:
    """One transfer: what each side has and wants, and how the caller pushes it.

    Attributes:
        available, wanted: (start, end) per component.
        pushes: (component, layers, tokens) in order; all of `available` at once where None.
    """

    plan: LinkPlan
    available: tuple[Span, ...]
    wanted: tuple[Span, ...]
    pushes: tuple[tuple[int, Span, Span], ...] | None = None

    @property
    def pieces(self) -> tuple[tuple[int, Span, Span], ...]:
        if self.pushes is not None:
            return self.pushes
        components = self.plan.route.model.components
        return tuple((i, (0, len(part.layers)), self.available[i]) for i, part in enumerate(components))

    @property
    def cells(self) -> Counter[Cell]:
        """What has to come: what is wanted and available, by position, of each move."""
        expected: Counter[Cell] = Counter()
        for number in self.plan.moves:
            move = self.plan.move(number)
            have, want = self.available[move.component], self.wanted[move.component]
            tokens = [t for t in range(*want) if have[0] <= t < have[1] and self.carries(number, t)]
            expected.update((number, layer, t) for layer in range(move.layers.start, move.layers.end) for t in tokens)
        return expected

    def carries(self, number: int, token: int) -> bool:
        """Whether both context ranks of a move keep a position; the rig's splits are all interleaved."""
        move, route = self.plan.move(number), self.plan.route
        for topology, rank in ((route.prefill, move.src), (route.decode, move.dst)):
            if topology.cp > 1 and token // topology.cp_split.interleave % topology.cp != topology.place(rank)[1]:
                return False
        return True

    def cells_of(self, box: Box) -> list[Cell]:
        layers, tokens = range(box.layers.start, box.layers.end), range(box.tokens.start, box.tokens.end)
        return [(box.move, layer, t) for layer in layers for t in tokens if self.carries(box.move, t)]


def simple_case(total: int = 8, wanted: Span | None = None, *, chunk_bytes: int = 64) -> Case:
    """One move of two layers, 32 bytes for a token of a layer, everything pushed at once."""
    plan = plan_of(route_of(), total=total, chunk_bytes=chunk_bytes)
    return Case(plan, ((0, total),), (wanted or (0, total),))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A transfer that can succeed: prefix hits, ends beyond what there is, empty ranges, pushes in pieces of any order."""
    kinds = ({}, {}, {"tp": (2, 1)}, {"cp": (2, 1)}, {"cp": (1, 2), "interleave": 2}, {"second": True}, {"layers": 3})
    total = draw(st.integers(0, 9))
    plan = plan_of(
        route_of(**draw(st.sampled_from(kinds))), total=total, chunk_bytes=draw(st.sampled_from([32, 64, 512]))
    )
    parts = plan.route.model.components
    first = draw(st.sampled_from([0, 0, min(2, total)]))
    starts = [draw(st.integers(first, total)) for _ in parts]
    wanted = tuple((start, draw(st.integers(start, total + 2))) for start in starts)
    pushes = [
        (index, layers, tokens)
        for index, part in enumerate(parts)
        for tokens in draw(pieces(first, total))
        for layers in draw(pieces(0, len(part.layers)))
    ]
    return Case(plan, ((first, total),) * len(parts), wanted, tuple(draw(st.permutations(pushes))))


@st.composite
def pieces(draw: st.DrawFn, start: int, end: int) -> list[Span]:
    """`[start, end)` in up to three pieces, in order; nothing where it is empty."""
    ends = sorted({start, end, *draw(st.lists(st.integers(start, end), max_size=2))})
    return list(pairwise(ends))


@dataclass(frozen=True)
class Order:
    """Which events come first; those that are left then happen in a fixed order.

    Attributes:
        length: how many events are chosen.
        calm: how many of them come before the first fault.
        faults_of_8: how often one that may be a fault is one.
    """

    seed: int
    length: int
    calm: int
    faults_of_8: int

    def choose(self) -> Iterator[tuple[bool, int]]:
        """(whether it may be a fault, a number that chooses among the possible events)."""
        chance = Random(self.seed)
        for step in range(self.length):
            yield step >= self.calm and chance.randrange(8) < self.faults_of_8, chance.randrange(1 << 16)


orders = st.builds(Order, st.integers(0, 1 << 32), st.integers(0, 200), st.integers(0, 60), st.sampled_from([1, 1, 4]))


# --- one machine alone -------------------------------------------------------------------------------------------------


def make_outgoing(case: Case, number: int = 1, **times: float) -> OutgoingTransfer:
    """The sender of a case, on a clock that begins at 0."""
    available = tuple(Interval(*span) for span in case.available)
    kind = {"deadline": TRANSFER_S, "quiesce_s": QUIESCE_S, **times}
    return OutgoingTransfer(number, f"key{number}", 0, case.plan, available, peer="the decode agent", **kind)


def make_incoming(case: Case, number: int = 1, **more: object) -> IncomingTransfer:
    """The receiver of a case, on a clock that begins at 0."""
    wanted = tuple(Interval(*span) for span in case.wanted)
    kind = {"deadline": TRANSFER_S, "quiesce_s": QUIESCE_S, **more}
    return IncomingTransfer(f"key{number}", 0, case.plan, wanted, peer="the prefill agent", **kind)


def offer_of(case: Case, want: int = 0, number: int = 1, **changes: object) -> Offer:
    """The OFFER that the sender of a case would make."""
    facts = {
        "transfer": number,
        "key": f"key{number}",
        "attempt": 0,
        "prefill_replica": 0,
        "decode_replica": 0,
        "digest": case.plan.route.digest,
        "available": list(case.available),
        "want": want,
        "timeout_ms": 1000,
    }
    return Offer(**{**facts, **changes})  # type: ignore[arg-type]


def messages_of(actions: Sequence[Action]) -> list[ControlMessage]:
    """What goes to the peer, each as it comes out of the wire there."""
    sent = [action.message for action in actions if isinstance(action, SendMessage)]
    return [decode("rig", encode(message)[FRAME_HEADER.size :]) for message in sent]


# --- the data plane ----------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Write:
    """A posted WRITE.

    Attributes:
        landed: all its bytes are in the target's slot; before, they may arrive at any time.
        settled: its end was reported to the initiator.
        failed: that end was an error, so local memory may still be read.
        stuck: neither lands nor ends for now.
    """

    number: int
    slot: SlotRef
    target: SlotRef
    box: Box
    landed: bool = False
    settled: bool = False
    failed: bool = False
    stuck: bool = False
    dropped: bool = False  # its notification never comes

    @property
    def note(self) -> Notification:
        layers, tokens = self.box.layers, self.box.tokens
        return Notification(
            self.number,
            self.target.index,
            self.target.epoch,
            self.box.move,
            (layers.start, layers.end),
            (tokens.start, tokens.end),
        )


@dataclass(eq=False)
class Side:
    """What the rig keeps for one side of the link."""

    name: str
    pool: SlotPool
    inbox: deque[ControlMessage] = field(default_factory=deque)
    up: bool = True


@dataclass(eq=False)
class Leg:
    """One transfer with both its machines."""

    number: int
    case: Case
    outgoing: OutgoingTransfer
    incoming: IncomingTransfer
    offered: bool = False
    expected: bool = False  # the decode side's caller has asked
    waiting: Offer | None = None  # an OFFER before that
    pushed: int = 0
    finished: bool = False
    gathering: dict[SlotRef, Box] = field(default_factory=dict)
    scattering: dict[SlotRef, Box] = field(default_factory=dict)
    stuck: set[SlotRef] = field(default_factory=set)  # gathers and scatters that do not end for now
    granted: list[SlotRef] = field(default_factory=list)  # all grants that ever were
    used: set[SlotRef] = field(default_factory=set)  # grants that a WRITE was posted to
    written: Counter[Cell] = field(default_factory=Counter)  # in the destination pages
    outcomes: dict[str, list[RdmaKvError | None]] = field(default_factory=lambda: {"outgoing": [], "incoming": []})
    listening: bool = False
    violations: int = 0

    @property
    def ended(self) -> bool:
        return self.outgoing.ended and self.incoming.ended

    def outcome(self, side: str) -> RdmaKvError | None:
        (only,) = self.outcomes[side]
        return only


Event = tuple[str, Callable[[], None]]


class Pair:
    """All transfers of one link, from a prefill agent to a decode agent.

    Args:
        src_slots, dst_slots: sizes of the pools.
        faults: names of the faults that may happen; see `_faults`.
        outgoing, incoming: what makes the machines; the real ones unless a broken one is to be caught.
    """

    def __init__(
        self,
        cases: Sequence[Case],
        *,
        src_slots: int = 4,
        dst_slots: int = 4,
        faults: frozenset[str] = frozenset(),
        outgoing: OutgoingMaker = OutgoingTransfer,
        incoming: IncomingMaker = IncomingTransfer,
    ) -> None:
        self.clock = FakeClock()
        self.prefill = Side("prefill", SlotPool(src_slots))
        self.decode = Side("decode", SlotPool(dst_slots))
        self.faults = faults
        self.memory: dict[int, Write] = {}  # destination slot -> what landed there last
        self.writes: list[Write] = []
        self.notes: list[Write] = []  # on their way
        self.told: list[Write] = []  # delivered at least once
        self.sent: Counter[str] = Counter()
        self.link_was_lost = False
        self.frames_were_mangled = False
        self.legs = [self._leg(number, case, outgoing, incoming) for number, case in enumerate(cases, 1)]

    def _leg(self, number: int, case: Case, outgoing: OutgoingMaker, incoming: IncomingMaker) -> Leg:
        available = tuple(Interval(*span) for span in case.available)
        wanted = tuple(Interval(*span) for span in case.wanted)
        times = {"deadline": self.clock.now + TRANSFER_S + number, "quiesce_s": QUIESCE_S}
        key, asked = f"key{number}", replace(case.plan, total_tokens=tuple(span.end for span in wanted))
        return Leg(
            number,
            case,
            outgoing(number, key, 0, case.plan, available, peer="the decode agent", **times),
            incoming(key, 0, asked, wanted, peer="the prefill agent", **times),
        )

    # --- events ----------------------------------------------------------------------------------------------------

    def play(self, order: Order) -> None:
        """The events that `order` chooses."""
        for maybe_fault, number in order.choose():
            events = (list(self._faults()) if maybe_fault else []) or list(self.events())
            if not events:
                return
            events[number % len(events)][1]()
            self.check()

    def drain(self) -> None:
        """All that can happen by itself, in a fixed order, until nothing is left."""
        turn = 0
        for _ in range(EVENTS):
            events = list(self.events())
            if not events:
                return
            turn += 5
            events[turn % len(events)][1]()
            self.check()
        raise LawBroken("the machines do not come to rest")

    def end(self, *, may_fail: bool = False) -> None:
        """Bring everything to its end, by the deadlines where needed, then let late things happen, and check it all."""
        self.drain()
        if not (self.prefill.up and self.decode.up):
            self._lose(self.prefill)
            self._lose(self.decode)
            self.drain()
        while (moment := self._next_deadline()) is not None:
            self.clock.advance_to(moment)
            self.tick("outgoing")
            self.tick("incoming")
            self.check()
            self.drain()
        self._unstick()
        self.drain()
        self.check_end(may_fail=may_fail or bool(self.faults))

    def events(self) -> Iterator[Event]:
        """What can happen without any fault."""
        for side in (self.prefill, self.decode):
            if side.inbox:
                yield f"{side.name} reads", lambda side=side: self.read(side)
        if self._listens():
            yield from ((f"note of {w.target}", lambda w=w: self._notify(w)) for w in self.notes)
        for write in self.writes:
            if not write.settled and not write.stuck:
                if write.landed:
                    yield f"written {write.slot}", lambda w=write: self._written(w)
                elif not (self.prefill.up and self.decode.up):
                    yield f"broken {write.slot}", lambda w=write: self.write_failed(w)
                elif self._listens():
                    yield f"land {write.slot}", lambda w=write: self._land(w)
        for leg in self.legs:
            yield from self._events_of(leg)

    def _events_of(self, leg: Leg) -> Iterator[Event]:
        out, inc = leg.outgoing, leg.incoming
        yield from (
            (f"gathered {slot}", lambda slot=slot: self.gathered(leg, slot))
            for slot in leg.gathering
            if slot not in leg.stuck
        )
        yield from (
            (f"scattered {slot}", lambda slot=slot: self._scattered(leg, slot))
            for slot in leg.scattering
            if slot not in leg.stuck
        )
        if not leg.offered:
            yield f"offer {leg.number}", lambda: self.offer(leg)
        elif leg.pushed < len(leg.case.pieces):
            yield f"push {leg.number}", lambda: self.push(leg)
        elif not leg.finished:
            yield f"finish {leg.number}", lambda: self._finish(leg)
        if not leg.expected:
            yield f"expect {leg.number}", lambda: self.expect(leg)
        if inc.must_answer:
            yield f"answer {leg.number}", lambda: self.grant(leg, 0)
        if inc.wanting and self.decode.pool.can_acquire("prefill"):
            yield f"grant one {leg.number}", lambda: self.grant(leg, 1)
            yield f"grant all {leg.number}", lambda: self.grant(leg, inc.wanting)
        if out.runnable and self.prefill.pool.can_acquire("decode"):
            yield f"start {leg.number}", lambda: self._start(leg)

    def _faults(self) -> Iterator[Event]:
        """What can go wrong now, of the kinds that are switched on."""
        on = self.faults
        for leg in self.legs:
            abort = TransferAborted(leg.outgoing.key, "test", "the caller gave up")
            if "abort" in on and leg.offered:
                yield "outgoing abort", lambda leg=leg, e=abort: self.out(leg, leg.outgoing.fail(e, self.clock.now))
            if "abort" in on and leg.expected:
                yield "incoming abort", lambda leg=leg, e=abort: self._in(leg, leg.incoming.fail(e, self.clock.now))
            if "kernel" in on:
                yield from (("gather fails", lambda leg=leg, s=s: self._gather_failed(leg, s)) for s in leg.gathering)
                yield from (
                    ("scatter fails", lambda leg=leg, s=s: self._scatter_failed(leg, s)) for s in leg.scattering
                )
            if "stuck" in on:
                running = [s for s in (*leg.gathering, *leg.scattering) if s not in leg.stuck]
                yield from (("stuck", lambda leg=leg, s=s: leg.stuck.add(s)) for s in running)
        for write in self.writes:
            if "write" in on and not write.settled:
                yield "write fails", lambda w=write: self.write_failed(w)
                if not write.landed:
                    yield "write is not posted", lambda w=write: self._write_refused(w)
            if "write" in on and write.failed and not write.landed:
                yield "failed write lands", lambda w=write: self._land(w)
            if "stuck" in on and not write.settled and not write.stuck:
                yield "write is stuck", lambda w=write: setattr(w, "stuck", True)
        if "notes" in on:
            yield from (("note lost", lambda w=w: self._drop_note(w)) for w in self.notes)
            yield from (("note again", lambda w=w: self._notify(w)) for w in self.told)
        if "frames" in on:
            for side in (self.prefill, self.decode):
                if side.inbox:
                    yield "frame lost", lambda s=side: self._mangle(s, s.inbox.popleft)
                    yield "frame doubled", lambda s=side: self._mangle(s, lambda: s.inbox.appendleft(s.inbox[0]))
                    yield "frames swapped", lambda s=side: self._mangle(s, lambda: s.inbox.insert(1, s.inbox.popleft()))
        if "link" in on:
            yield from ((f"{s.name} loses", lambda s=s: self._lose(s)) for s in (self.prefill, self.decode) if s.up)
        if "time" in on and self._next_deadline() is not None:
            yield "time out there", lambda: self._pass_time("outgoing")
            yield "time in here", lambda: self._pass_time("incoming")

    # --- the callers -----------------------------------------------------------------------------------------------

    def offer(self, leg: Leg) -> None:
        leg.offered = True
        self.out(leg, leg.outgoing.offer() if self.prefill.up else self._lost(leg.outgoing))

    def push(self, leg: Leg) -> None:
        component, layers, tokens = leg.case.pieces[leg.pushed]
        leg.pushed += 1
        self.out(leg, leg.outgoing.push(component, Interval(*layers), Interval(*tokens), self.clock.now))

    def _finish(self, leg: Leg) -> None:
        leg.finished = True
        self.out(leg, leg.outgoing.finish({"number": leg.number}, self.clock.now))

    def expect(self, leg: Leg) -> None:
        leg.expected = True
        offer, leg.waiting = leg.waiting, None
        if not self.decode.up:
            self._in(leg, self._lost(leg.incoming))
        elif offer is not None:
            self._in(leg, leg.incoming.offered(offer, self.clock.now))

    def grant(self, leg: Leg, count: int) -> None:
        slots = []
        while len(slots) < count and (slot := self.decode.pool.acquire("prefill", Hold.GRANTED)) is not None:
            slots.append(slot)
        leg.granted += slots
        self._in(leg, leg.incoming.grant(slots))

    def _start(self, leg: Leg) -> None:
        slot = self.prefill.pool.acquire("decode", Hold.GATHER)
        assert slot is not None
        self.out(leg, leg.outgoing.start_box(slot))

    def gathered(self, leg: Leg, slot: SlotRef) -> None:
        del leg.gathering[slot]
        self.out(leg, leg.outgoing.gathered(slot))

    def _gather_failed(self, leg: Leg, slot: SlotRef) -> None:
        del leg.gathering[slot]
        self.out(leg, leg.outgoing.gather_failed(slot, LocalProtocolError("gather"), self.clock.now))

    def _scattered(self, leg: Leg, slot: SlotRef) -> None:
        box = leg.scattering.pop(slot)
        content = self.memory.get(slot.index)
        law(
            content is not None and (content.number, content.box, content.target) == (leg.number, box, slot),
            "a slot was overwritten before its box was out of it",
        )
        leg.written.update(leg.case.cells_of(box))
        self._in(leg, leg.incoming.scattered(slot, self.clock.now))

    def _scatter_failed(self, leg: Leg, slot: SlotRef) -> None:
        del leg.scattering[slot]
        self._in(leg, leg.incoming.scatter_failed(slot, LocalProtocolError("scatter"), self.clock.now))

    # --- the data plane --------------------------------------------------------------------------------------------

    def _listens(self) -> bool:
        return self.decode.up and any(leg.listening for leg in self.legs)

    def _land(self, write: Write) -> None:
        write.landed = True
        self.memory[write.target.index] = write
        if not write.dropped:
            self.notes.append(write)

    def _written(self, write: Write) -> None:
        write.settled = True
        leg = self.legs[write.number - 1]
        self.out(leg, leg.outgoing.written(write.slot, self.clock.now))

    def write_failed(self, write: Write) -> None:
        write.settled = write.failed = True
        leg, error = self.legs[write.number - 1], TransportError("rig", "failed", "the WRITE broke")
        self.out(leg, leg.outgoing.write_failed(write.slot, error, self.clock.now, posted=True))

    def _write_refused(self, write: Write) -> None:
        self.writes.remove(write)
        leg, error = self.legs[write.number - 1], TransportError("rig", "not posted", "the WRITE was refused")
        self.out(leg, leg.outgoing.write_failed(write.slot, error, self.clock.now, posted=False))

    def _drop_note(self, write: Write) -> None:
        write.dropped = True
        self.notes.remove(write)

    def _notify(self, write: Write) -> None:
        leg, again = self.legs[write.number - 1], write in self.told
        if write in self.notes:
            self.notes.remove(write)
            self.told.append(write)
        if not self.decode.up:
            return
        before = self._snapshot(leg)
        note = decode_notification("prefill", encode_notification(write.note))
        actions = leg.incoming.notified(note, self.clock.now)
        if actions is None:
            law(self._snapshot(leg) == before, "a stale notification changed something")
            return
        law(not again, "one notification was taken twice")
        self._in(leg, actions)

    def _snapshot(self, leg: Leg) -> object:
        inc = leg.incoming
        return inc.state, inc.wanting, inc.must_answer, inc.settled, inc.received_bytes, inc.deadline, inc.error

    # --- the control stream ----------------------------------------------------------------------------------------

    def _send(self, sender: Side, to: Side, message: ControlMessage) -> None:
        self.sent[type(message).__name__] += 1
        body = encode(message)[FRAME_HEADER.size :]
        if sender.up and to.up:
            to.inbox.append(decode(sender.name, body))

    def read(self, side: Side) -> None:
        self.deliver(side, side.inbox.popleft())

    def deliver(self, side: Side, message: ControlMessage) -> None:
        """Hand a message to the machine that it is for, as the shell would."""
        assert hasattr(message, "transfer")
        if isinstance(message, Abort) and message.transfer == 0:
            self._aborted_by_name(side, message)
            return
        leg, now = self.legs[message.transfer - 1], self.clock.now
        if side is self.prefill:
            match message:
                case Grant():
                    self.out(leg, leg.outgoing.granted(message, self.decode.pool.total, now))
                case Done():
                    self.out(leg, leg.outgoing.done(now))
                case Reject():
                    self.out(leg, leg.outgoing.rejected(message, now))
                case Abort():
                    self.out(leg, leg.outgoing.aborted(message, now))
            return
        if not leg.expected:  # no call has asked for it: the OFFER waits
            match message:
                case Offer():
                    leg.waiting = message
                case Abort():
                    leg.waiting = None
            return
        match message:
            case Offer() if leg.incoming.ended and leg.incoming.number == 0:
                self._send(self.decode, self.prefill, Reject(message.transfer, ErrorCode.LOCAL_PROTOCOL, "nobody asks"))
            case Offer():
                self._in(leg, leg.incoming.offered(message, now))
            case _ if leg.incoming.number == 0:
                return  # our call never met the OFFER that this is about
            case Release():
                self._in(leg, leg.incoming.released(message, now))
            case Start():
                self._in(leg, leg.incoming.started())
            case Finish():
                self._in(leg, leg.incoming.finished(message, now))
            case Quiesced():
                self._in(leg, leg.incoming.quiesced(0.0))
            case Abort():
                self._in(leg, leg.incoming.aborted(message, now))

    def _aborted_by_name(self, side: Side, message: Abort) -> None:
        """A receiver gave up before any OFFER came: the shell fails the call of that name."""
        law(side is self.prefill, "a sender knows its number")
        (leg,) = (leg for leg in self.legs if leg.outgoing.key == message.key)
        if leg.offered:
            error = TransferAborted(message.key, "test", message.message, cause=message.code)
            self.out(leg, leg.outgoing.fail(error, self.clock.now))

    def _mangle(self, side: Side, change: Callable[[], object]) -> None:
        """What a TCP stream never does; the demand is a typed end and no unsafe memory, not success."""
        if side.inbox:
            self.frames_were_mangled = True
            change()

    def _lose(self, side: Side) -> None:
        """One side notices that the link is gone. What it has sent may still arrive; what comes to it does not."""
        if not side.up:
            return
        side.up = False
        self.link_was_lost = True
        side.inbox.clear()
        for leg in self.legs:
            if side is self.prefill and leg.offered:
                self.out(leg, self._lost(leg.outgoing))
            elif side is self.decode and leg.expected:
                self._in(leg, self._lost(leg.incoming))

    def _lost(self, machine: OutgoingTransfer | IncomingTransfer) -> list[Action]:
        return machine.link_lost(PeerLostError(machine.peer, "the stream broke"), self.clock.now)

    # --- time ------------------------------------------------------------------------------------------------------

    def _machines(self, which: str) -> list[OutgoingTransfer | IncomingTransfer]:
        return [getattr(leg, which) for leg in self.legs if (leg.offered if which == "outgoing" else leg.expected)]

    def _next_deadline(self) -> float | None:
        machines = self._machines("outgoing") + self._machines("incoming")
        return min((m.deadline for m in machines if m.deadline is not None), default=None)

    def tick(self, which: str) -> None:
        for leg in self.legs:
            if which == "outgoing" and leg.offered:
                self.out(leg, leg.outgoing.tick(self.clock.now))
            elif which == "incoming" and leg.expected:
                self._in(leg, leg.incoming.tick(self.clock.now))

    def _pass_time(self, which: str) -> None:
        """One side's timers fire; the other's are late."""
        moments = [m.deadline for m in self._machines(which) if m.deadline is not None]
        if moments:
            self.clock.advance_to(min(moments))
            self.tick(which)

    def _unstick(self) -> None:
        """Long after the end: what was stuck ends too."""
        for leg in self.legs:
            leg.stuck.clear()
        for write in self.writes:
            write.stuck = False

    # --- actions ---------------------------------------------------------------------------------------------------

    def out(self, leg: Leg, actions: list[Action]) -> None:
        """Perform what an outgoing machine asks."""
        pool, out = self.prefill.pool, leg.outgoing
        for action in actions:
            match action:
                case SendMessage(message):
                    if isinstance(message, Abort) and message.code is ErrorCode.REMOTE_PROTOCOL:
                        leg.violations += 1
                    self._send(self.prefill, self.decode, message)
                case Gather(slot, box):
                    law(out.state is OutgoingState.SENDING, f"a gather begins in {out.state.name}")
                    law(not leg.outcomes["outgoing"], "source pages are read after their caller got them back")
                    law(
                        pool.is_live(slot, "decode") and pool.reason(slot) is Hold.GATHER,
                        "a gather into a foreign slot",
                    )
                    leg.gathering[slot] = box
                case PostWrite(slot, target, box):
                    law(out.state is OutgoingState.SENDING, f"a WRITE is posted in {out.state.name}")
                    law(self.prefill.up, "a WRITE is posted on a lost link")
                    law(target in leg.granted and target not in leg.used, "a WRITE into a slot that was not granted")
                    leg.used.add(target)
                    pool.change(slot, Hold.WRITE)
                    self.writes.append(Write(leg.number, slot, target, box))
                case ReleaseSlot(slot):
                    reading = [w for w in self.writes if w.slot == slot and not (w.settled and not w.failed)]
                    law(not reading, "a source slot was released while its WRITE may read it")
                    law(slot not in leg.gathering, "a source slot was released while it is being filled")
                    pool.release(slot)
                case KeepSlot(slot):
                    pool.change(slot, Hold.UNPROVEN)
                case Finished(error):
                    law(not leg.gathering, "source pages went back while a gather reads them")
                    law((error is None) == (out.state is OutgoingState.DONE), "the outcome is not that of the state")
                    leg.outcomes["outgoing"].append(error)
                case _:
                    raise LawBroken(f"{type(action).__name__} is not for a sender")

    def _in(self, leg: Leg, actions: list[Action]) -> None:
        """Perform what an incoming machine asks."""
        pool, inc = self.decode.pool, leg.incoming
        for action in actions:
            match action:
                case SendMessage(message):
                    if isinstance(message, Abort) and message.code is ErrorCode.REMOTE_PROTOCOL:
                        leg.violations += 1
                    self._send(self.decode, self.prefill, message)
                case Scatter(slot, box):
                    law(inc.state is IncomingState.RECEIVING, f"a scatter begins in {inc.state.name}")
                    law(not leg.outcomes["incoming"], "destination pages are written after their caller got them back")
                    pool.change(slot, Hold.SCATTER)
                    leg.scattering[slot] = box
                case ReleaseSlot(slot):
                    landing = [w for w in self.writes if w.target.index == slot.index and not w.landed]
                    law(not landing, "a destination slot was released while a WRITE may land in it")
                    law(slot not in leg.scattering, "a destination slot was released while it is being emptied")
                    pool.release(slot)
                case KeepSlot(slot):
                    pool.change(slot, Hold.UNPROVEN)
                case Listen(on):
                    law(leg.listening != on, "listening was switched twice")
                    leg.listening = on
                case Finished(error):
                    law(not leg.scattering, "destination pages went back while a scatter writes them")
                    law((error is None) == (inc.state is IncomingState.DONE), "the outcome is not that of the state")
                    leg.outcomes["incoming"].append(error)
                case _:
                    raise LawBroken(f"{type(action).__name__} is not for a receiver")

    # --- laws ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """What holds at every moment."""
        for side in (self.prefill, self.decode):
            law(side.pool.free + sum(side.pool.held().values()) == side.pool.total, "a slot was lost or made")
        for leg in self.legs:
            for machine in (leg.outgoing, leg.incoming):
                law(
                    machine.ended == (machine.deadline is None),
                    f"{machine.state.name}: a deadline until the end, none after",
                )
            for which in ("outgoing", "incoming"):
                law(len(leg.outcomes[which]) <= 1, f"two outcomes of {which}")
            if leg.incoming.state is IncomingState.DONE:
                law(leg.written == leg.case.cells, "DONE, but not every cell is in its page exactly once")
                law(leg.incoming.metadata == {"number": leg.number}, "DONE without the request's metadata")
            if leg.outgoing.state is OutgoingState.DONE:
                law(leg.incoming.state is IncomingState.DONE, "the sender is DONE, the receiver is not")
            law(all(count == 1 for count in leg.written.values()), "a cell was written twice")

    def check_end(self, *, may_fail: bool = False) -> None:
        """What holds when all deadlines have passed and all that was late has come."""
        for leg in self.legs:
            law(leg.ended, f"{leg.outgoing.state.name} and {leg.incoming.state.name} after all deadlines")
            law(all(len(found) == 1 for found in leg.outcomes.values()), "a caller got no outcome")
            law(leg.violations == 0 or self.frames_were_mangled, "one honest side accused the other")
            law(not leg.gathering and not leg.scattering, "a kernel was forgotten")
            law(not (leg.listening and leg.incoming.settled), "the transport is polled for nothing")
        if not self.frames_were_mangled:
            law(all(write.settled for write in self.writes), "nobody listens, so a WRITE can never settle")
        self._check_holds()
        if not may_fail:
            law(
                all(leg.outcome(side) is None for leg in self.legs for side in leg.outcomes),
                "a failure without a fault",
            )
            law(self.prefill.pool.free == self.prefill.pool.total, "the sender lost a slot")
            law(self.decode.pool.free == self.decode.pool.total, "the receiver lost a slot")

    def _check_holds(self) -> None:
        """A slot is held only for a reason that is true of this very slot."""
        reasons = {reason for pool in (self.prefill.pool, self.decode.pool) for _, reason in pool.held()}
        law(reasons <= {Hold.UNPROVEN}, f"slots are held as {reasons} after the end")
        failed = {write.slot for write in self.writes if write.failed}
        failed |= {write.slot for write in self.writes if not write.settled}
        held = sum(self.prefill.pool.held().values())
        law(held == len(failed), f"the sender holds {held} slots, {len(failed)} WRITEs failed")
        if self.link_was_lost or self.frames_were_mangled:
            return
        doubtful = {w.target for w in self.writes if w.failed or w.dropped}
        for leg in self.legs:
            for slot in leg.granted:
                if self.decode.pool.is_live(slot, "prefill"):
                    law(slot in doubtful, "a destination slot is held though nothing can land in it")
