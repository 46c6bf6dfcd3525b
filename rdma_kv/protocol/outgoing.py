"""The prefill side of one transfer on one link, as a machine without waiting.

Theory of operation. `offer()` starts it. The caller pushes (layers, tokens) as its data gets ready; what was pushed is
cut into boxes once the GRANT has told which token ranges the decode side wants. A box runs when it has a grant (a slot of
the target) and, only then, a local slot from the shell: gather, WRITE, release. So a sender never holds local staging
while it waits for the peer, and senders and receivers cannot wait in a circle. Grants beyond the ready boxes go back with
RELEASE. When everything in the granted ranges is written and the caller has given the metadata, FINISH goes out, and
DONE ends the transfer; only that transition is success.

After a failure no box starts. Source pages are safe when the running gathers are done: then the caller gets its error.
The posted WRITEs are awaited for `quiesce_s`: if all succeeded (or none was posted), QUIESCED tells the target that its
slots are free. A WRITE that failed, or that did not settle in time, keeps its local slot held: the transport may still
read it. Then only the grants that nothing was posted to go back, with RELEASE.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, NamedTuple

from rdma_kv.errors import (
    ErrorCode,
    LocalProtocolError,
    RangeUnavailableError,
    RdmaKvError,
    RemoteProtocolError,
    RouteMismatchError,
    TransferAborted,
    TransferTimeout,
)
from rdma_kv.messages import (
    MAX_COUNT,
    MAX_SLOTS_PER_MESSAGE,
    Abort,
    Expect,
    Finish,
    Grant,
    Offer,
    Quiesced,
    Reject,
    Release,
    Start,
)
from rdma_kv.planner import Box, LinkPlan, clip
from rdma_kv.protocol.actions import (
    Action,
    Finished,
    Gather,
    KeepSlot,
    PostWrite,
    ReleaseSlot,
    SendMessage,
    abort_message,
)
from rdma_kv.protocol.machine import Machine
from rdma_kv.slots import SlotRef
from rdma_kv.types import Interval


class OutgoingState(Enum):
    OFFERED = auto()  # OFFER is out
    SENDING = auto()  # ranges are known
    FINISHING = auto()  # FINISH is out
    ABORTING = auto()  # failed; gathers and WRITEs settle
    DONE = auto()
    FAILED = auto()


class OutgoingEvent(Enum):
    GRANT = auto()
    FINISH = auto()
    DONE = auto()
    FAIL = auto()
    SETTLED = auto()


_S, _E = OutgoingState, OutgoingEvent

OUTGOING_TABLE: dict[tuple[OutgoingState, OutgoingEvent], OutgoingState] = {
    (_S.OFFERED, _E.GRANT): _S.SENDING,
    (_S.SENDING, _E.GRANT): _S.SENDING,
    (_S.SENDING, _E.FINISH): _S.FINISHING,
    (_S.FINISHING, _E.GRANT): _S.FINISHING,  # crossed our FINISH; the target frees it when all boxes are in
    (_S.FINISHING, _E.DONE): _S.DONE,
    (_S.ABORTING, _E.GRANT): _S.ABORTING,  # crossed our ABORT; QUIESCED frees it
    (_S.OFFERED, _E.FAIL): _S.ABORTING,
    (_S.SENDING, _E.FAIL): _S.ABORTING,
    (_S.FINISHING, _E.FAIL): _S.ABORTING,
    (_S.ABORTING, _E.FAIL): _S.ABORTING,
    (_S.ABORTING, _E.DONE): _S.ABORTING,  # crossed our ABORT: too late to be a success
    (_S.ABORTING, _E.SETTLED): _S.FAILED,
}
OUTGOING_TERMINAL = frozenset({_S.DONE, _S.FAILED})


@dataclass(slots=True)
class _Flight:
    """Boxes on their way: local slot -> (box, target slot)."""

    gathering: dict[SlotRef, tuple[Box, SlotRef]] = field(default_factory=dict)
    writing: dict[SlotRef, tuple[Box, SlotRef]] = field(default_factory=dict)
    written: int = 0
    failed: bool = False


class _Push(NamedTuple):
    """What the caller pushed.

    Attributes:
        boxes: it, cut for all that is available; None if it was not cut yet.
    """

    component: int
    layers: Interval
    tokens: Interval
    boxes: list[Box] | None


class OutgoingTransfer:
    """One transfer as its initiator sees it.

    Args:
        number: the link's sequence number.
        plan: moves of this link; `plan.total_tokens` is what will be available.
        available: token range per component that the caller will push.
        deadline: moment, on the caller's clock, by which it must be DONE.
        timeout_s: the same as a duration from now, for the peer, whose clock is another.
        quiesce_s: how long posted WRITEs may take to settle after a failure.
    """

    def __init__(
        self,
        number: int,
        key: str,
        attempt: int,
        plan: LinkPlan,
        available: tuple[Interval, ...],
        *,
        peer: str,
        deadline: float,
        quiesce_s: float,
        timeout_s: float = 60.0,
    ) -> None:
        self.number = number
        self.key = key
        self.attempt = attempt
        self.plan = plan
        self.available = available
        self.peer = peer
        self.deadline: float | None = deadline
        self.error: RdmaKvError | None = None
        self.told = False  # the failure came as an ABORT: who sent it tells the other participants too
        self._quiesce_s = quiesce_s
        self._timeout_ms = int(min(1000 * max(0.0, timeout_s), MAX_COUNT))
        self._machine: Machine[OutgoingState, OutgoingEvent] = Machine(_S.OFFERED, OUTGOING_TABLE, OUTGOING_TERMINAL)
        self._ranges: tuple[Interval, ...] | None = None
        self._pushed: list[_Push] = []  # before the ranges are known
        self._left = 0  # layers x tokens of the granted ranges that were not pushed yet
        self._boxes: deque[Box] = deque()
        self._want = 0
        self._grants: deque[SlotRef] = deque()
        self._epochs: dict[int, int] = {}  # of each slot, the last that was granted
        self._flight = _Flight()
        self._metadata: dict[str, Any] | None = None
        self._started = False
        self._link_up = True
        self._reported = False

    # --- what the shell asks -------------------------------------------------------------------------------------------

    @property
    def state(self) -> OutgoingState:
        return self._machine.state

    @property
    def runnable(self) -> bool:
        """A box is ready and has a grant: give it a local slot with `start_box`."""
        return self.state is _S.SENDING and bool(self._boxes) and bool(self._grants)

    @property
    def ended(self) -> bool:
        return self._machine.ended

    @property
    def succeeded(self) -> bool:
        return self.state is _S.DONE

    @property
    def settled(self) -> bool:
        """Terminal, and no local slot is tied up by it."""
        return self._machine.ended and not self._flight.writing and not self._flight.gathering

    @property
    def ranges(self) -> tuple[Interval, ...] | None:
        """Granted token range per component, once known."""
        return self._ranges

    # --- the caller ----------------------------------------------------------------------------------------------------

    def offer(self, pushes: Iterable[tuple[int, Interval, Interval]] = ()) -> list[Action]:
        """Begin, with what was pushed already: see `push`."""
        for component, layers, tokens in pushes:
            self._note(component, layers, tokens)
        return [SendMessage(self._offer())]

    def push(self, component: int, layers: Interval, tokens: Interval, now: float) -> list[Action]:
        """`layers` (positions in the component) x `tokens` are final in the source pages; never pushed before."""
        if self._metadata is not None:
            raise LocalProtocolError(f"push after finish of {self.key!r}")
        if self._machine.ended or self.state is _S.ABORTING:
            return []
        if self._ranges is None:
            self._note(component, layers, tokens)
            return [SendMessage(self._offer())]
        return self._enqueue([_Push(component, layers, tokens, None)], self._want, now)

    def finish(self, metadata: dict[str, Any], now: float) -> list[Action]:
        """Nothing more will be pushed; `metadata` goes with the request."""
        if self._metadata is not None:
            raise LocalProtocolError(f"finish twice of {self.key!r}")
        self._metadata = metadata
        return self._advance(now)

    # --- messages of the peer ------------------------------------------------------------------------------------------

    def granted(self, message: Grant, num_slots: int, now: float) -> list[Action]:
        if not self._machine.allows(_E.GRANT):
            return self._violation("GRANT after DONE", now)
        if any(slot >= num_slots for slot, _ in message.slots):
            return self._violation(f"GRANT of a slot outside 0..{num_slots - 1}", now)
        self._machine.step(_E.GRANT)
        slots = self._new(message)
        if self.state in {_S.ABORTING, _S.FAILED}:
            return self._unused(*slots)
        if self.state is not _S.SENDING:
            return []
        told = self._want
        if self._ranges is None:
            ranges = tuple(Interval(*span) for span in message.ranges if span[0] <= span[1])
            if len(ranges) != len(self.available) or not all(
                a.contains(r) or not r.size for a, r in zip(self.available, ranges, strict=True)
            ):
                return self._violation("GRANT of ranges that were not offered", now)
            self._ranges = ranges
            self._left = sum(tiling.left for tiling in self.plan.tilings(ranges).values())
            self._want = 0
        elif [tuple(span) for span in message.ranges] != [(r.start, r.end) for r in self._ranges]:
            return self._violation("GRANT changes the ranges", now)
        self._grants += slots
        pushed, self._pushed = self._pushed, []
        actions = self._enqueue(pushed, told, now)
        return actions + (self._give_back(len(self._grants) - len(self._boxes)) if self.state is _S.SENDING else [])

    def given_ahead(self, message: Expect, num_slots: int, now: float) -> list[Action]:
        """Slots that came with the EXPECT: as a first GRANT of what both sides know that it will say."""
        wanted = [Interval(*span) for span in message.tokens if span[0] <= span[1]]
        if not message.grants or len(wanted) != len(self.available):
            return []
        ranges = [clip(want, have) for want, have in zip(wanted, self.available, strict=True)]
        if not all(have.contains(span) or not span.size for span, have in zip(ranges, self.available, strict=True)):
            return []  # the target will refuse the OFFER, by range
        return self.granted(Grant(self.number, [(r.start, r.end) for r in ranges], message.grants), num_slots, now)

    def _new(self, message: Grant) -> list[SlotRef]:
        """The slots of a GRANT, each once: an epoch that a later GRANT repeats may be in use or over."""
        slots = []
        for slot, epoch in message.slots:
            if epoch > self._epochs.get(slot, 0):
                self._epochs[slot] = epoch
                slots.append(SlotRef(slot, epoch))
        return slots

    def done(self, now: float) -> list[Action]:
        if not self._machine.allows(_E.DONE):
            return self._violation("DONE before FINISH", now)
        self._machine.step(_E.DONE)
        if self.state is not _S.DONE:
            return []
        self.deadline = None
        return self._report(None)

    def rejected(self, message: Reject, now: float) -> list[Action]:
        kinds = {ErrorCode.ROUTE_MISMATCH: RouteMismatchError, ErrorCode.RANGE_UNAVAILABLE: RangeUnavailableError}
        kind = kinds.get(message.code)
        if kind is not None:
            return self.fail(kind(self.key, self.state.name, message.message), now, tell=False)
        return self.fail(self._abort_error(message.code, self.peer, message.message), now, tell=False)

    def aborted(self, message: Abort, now: float) -> list[Action]:
        self.told = self.told or (self.error is None and not self.ended)
        return self.fail(self._abort_error(message.code, message.culprit, message.message), now, tell=False)

    def link_lost(self, error: RdmaKvError, now: float) -> list[Action]:
        self._link_up = False
        return self.fail(error, now, tell=False)

    # --- what came of actions ------------------------------------------------------------------------------------------

    def start_box(self, slot: SlotRef) -> list[Action]:
        """The shell has a local slot for the next box. Only while `runnable`."""
        box, target = self._boxes.popleft(), self._grants.popleft()
        self._flight.gathering[slot] = (box, target)
        actions: list[Action] = []
        if not self._started:
            self._started = True
            actions.append(SendMessage(Start(self.number)))
        return [*actions, Gather(slot, box)]

    def gathered(self, slot: SlotRef, checksum: int | None = None) -> list[Action]:
        """The slot holds its box, with that checksum where the link has agreed on one."""
        box, target = self._flight.gathering.pop(slot)
        if self.state is not _S.SENDING:
            return [ReleaseSlot(slot), *self._unused(target), *self._settle()]
        self._flight.writing[slot] = (box, target)
        return [PostWrite(slot, target, box, checksum)]

    def gather_failed(self, slot: SlotRef, error: RdmaKvError, now: float) -> list[Action]:
        _, target = self._flight.gathering.pop(slot)
        return [ReleaseSlot(slot), *self._unused(target), *self.fail(error, now), *self._settle()]

    def written(self, slot: SlotRef, now: float) -> list[Action]:
        """The WRITE succeeded: its slot is no longer read. Also a late proof for a slot that was kept."""
        del self._flight.writing[slot]
        self._flight.written += 1
        return [ReleaseSlot(slot), *self._advance(now), *self._settle()]

    def write_failed(self, slot: SlotRef, error: RdmaKvError, now: float, *, posted: bool) -> list[Action]:
        """The WRITE failed. Where it was posted, nobody knows what it still reads, so the slot stays held."""
        _, target = self._flight.writing.pop(slot)
        self._flight.failed |= posted
        local: list[Action] = [KeepSlot(slot)] if posted else [ReleaseSlot(slot), *self._unused(target)]
        return [*local, *self.fail(error, now), *self._settle()]

    def tick(self, now: float) -> list[Action]:
        """The deadline may have passed."""
        if self.deadline is None or now < self.deadline:
            return []
        if self.state is not _S.ABORTING:
            return self.fail(TransferTimeout(self.key, self.state.name, f"{self.peer} did not finish in time"), now)
        self._flight.failed |= bool(self._flight.writing)
        kept: list[Action] = [KeepSlot(slot) for slot in self._flight.writing]
        return [*kept, *self._end()]  # a gather under way still reports by itself

    def fail(self, error: RdmaKvError, now: float, *, tell: bool = True) -> list[Action]:
        """Give up. The first failure counts; after the end nothing happens."""
        if self._machine.ended or self.state is _S.ABORTING:
            return []
        self._machine.step(_E.FAIL)
        self.error = error
        self.deadline = now + self._quiesce_s
        self._boxes.clear()
        actions: list[Action] = []
        if tell and self._link_up:
            message = abort_message(self.number, self.key, self.attempt, self.plan.route, error)
            actions.append(SendMessage(message))
        return actions + self._settle()

    # --- inside --------------------------------------------------------------------------------------------------------

    def _offer(self) -> Offer:
        route = self.plan.route
        return Offer(
            transfer=self.number,
            key=self.key,
            attempt=self.attempt,
            prefill_replica=route.prefill_replica,
            decode_replica=route.decode_replica,
            digest=route.digest,
            available=[(span.start, span.end) for span in self.available],
            want=self._want,
            timeout_ms=self._timeout_ms,
        )

    def _cut(self, component: int, layers: Interval, tokens: Interval) -> list[Box]:
        span = tokens & (self._ranges or self.available)[component]
        return [
            box
            for number in self.plan.moves
            if self.plan.move(number).component == component
            for box in self.plan.cut(number, layers, span)
        ]

    def _note(self, component: int, layers: Interval, tokens: Interval) -> None:
        """Keep what was pushed, cut as it will be where the target wants all that is available."""
        boxes = self._cut(component, layers, tokens)
        self._pushed.append(_Push(component, layers, tokens, boxes))
        self._want += len(boxes)

    def _enqueue(self, pushed: list[_Push], told: int, now: float) -> list[Action]:
        """Cut what was pushed into boxes; `told` is the number of boxes that the target knows of."""
        for component, layers, tokens, cut in pushed:
            assert self._ranges is not None
            as_noted = tokens & self._ranges[component] == tokens & self.available[component]
            boxes = cut if cut is not None and as_noted else self._cut(component, layers, tokens)
            self._boxes += boxes
            self._want += len(boxes)
            self._left -= sum(box.layers.size * self.plan.carried(box.move, box.tokens) for box in boxes)
        actions: list[Action] = [SendMessage(self._offer())] if self._want != told else []
        return actions + self._advance(now)

    def _give_back(self, count: int) -> list[Action]:
        """RELEASE the last `count` grants: nothing was or will be posted to them."""
        slots = [self._grants.pop() for _ in range(count)]
        if not self._link_up:
            return []
        parts = [slots[first : first + MAX_SLOTS_PER_MESSAGE] for first in range(0, len(slots), MAX_SLOTS_PER_MESSAGE)]
        return [SendMessage(Release(self.number, [(slot.index, slot.epoch) for slot in part])) for part in parts]

    def _unused(self, *targets: SlotRef) -> list[Action]:
        """Grants that no WRITE was posted to go back at the end of a failed transfer, or at once after it."""
        self._grants += targets
        return self._give_back(len(self._grants)) if self._machine.ended and self._flight.failed else []

    def _advance(self, now: float) -> list[Action]:
        """Send FINISH when all is written and the metadata is there."""
        if self.state is not _S.SENDING or self._metadata is None:
            return []
        if self._left:
            text = f"finish of {self.key!r}, but {self._left} layer-tokens of the granted ranges were never pushed"
            return self.fail(LocalProtocolError(text), now)
        if self._boxes or self._flight.gathering or self._flight.writing:
            return []
        self._machine.step(_E.FINISH)
        return [SendMessage(Finish(self.number, self._flight.written, self._metadata))]

    def _settle(self) -> list[Action]:
        """After a failure: report when the gathers are done, end when the WRITEs are."""
        if self.error is None or self._flight.gathering:
            return []
        actions = self._report(self.error)
        return actions if self._flight.writing or self._machine.ended else actions + self._end()

    def _end(self) -> list[Action]:
        """Stop, and tell the target what is proven: all its slots are free, or those that no WRITE was posted to."""
        self.deadline = None
        self._machine.step(_E.SETTLED)
        if self._flight.failed:
            return self._give_back(len(self._grants))
        return [SendMessage(Quiesced(self.number))] if self._link_up else []

    def _report(self, error: RdmaKvError | None) -> list[Action]:
        if self._reported:
            return []
        self._reported = True
        return [Finished(error)]

    def _violation(self, text: str, now: float) -> list[Action]:
        return self.fail(RemoteProtocolError(self.peer, f"{text} (transfer {self.key!r}, {self.state.name})"), now)

    def _abort_error(self, code: ErrorCode, culprit: str, text: str) -> TransferAborted:
        return TransferAborted(self.key, self.state.name, text, cause=code, culprit=culprit or self.peer)
