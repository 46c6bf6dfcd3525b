"""The decode side of one transfer on one link, as a machine without waiting.

Theory of operation. It begins when the caller wants a key (`EXPECTING`); the OFFER gives it a number and tells which
tokens can be had. The token range per component is what the caller wants, cut to what is available, by position. The
shell then grants slots as the pool has them, fairly over all transfers. Each notification names a granted slot under
its live epoch and a box of a move that this link carries; the boxes of each move must tile its layers x tokens exactly.
A box is scattered, its slot released, ACK sent. When FINISH has come and all its boxes are in the pages, DONE goes out:
the only success. FINISH can overtake the last notifications (they travel on the data plane), so grants are not taken
back before the count of boxes is reached.

After a failure the caller gets its error as soon as no scatter runs any more: nothing touches its pages then. Granted
slots stay held until the notification of their epoch, QUIESCED or RELEASE proves that no WRITE can land in them; where
no proof comes they are kept, also after the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any

from rdma_kv.errors import (
    ChecksumError,
    ErrorCode,
    RangeUnavailableError,
    RdmaKvError,
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
    Offer,
    Reject,
    Release,
    text_field,
)
from rdma_kv.planner import Box, LinkPlan, Tiling, clip
from rdma_kv.protocol.actions import (
    Action,
    Finished,
    KeepSlot,
    Listen,
    ReleaseSlot,
    Scatter,
    SendMessage,
    abort_message,
)
from rdma_kv.protocol.machine import Machine
from rdma_kv.slots import SlotRef
from rdma_kv.types import Interval


class IncomingState(Enum):
    EXPECTING = auto()  # no OFFER yet
    RECEIVING = auto()  # ranges are fixed, slots are granted
    ABORTING = auto()  # failed; scatters end, grants wait for a proof
    DONE = auto()
    FAILED = auto()


class IncomingEvent(Enum):
    OFFER = auto()
    COMPLETE = auto()
    FAIL = auto()
    SETTLED = auto()


_S, _E = IncomingState, IncomingEvent

INCOMING_TABLE: dict[tuple[IncomingState, IncomingEvent], IncomingState] = {
    (_S.EXPECTING, _E.OFFER): _S.RECEIVING,
    (_S.RECEIVING, _E.OFFER): _S.RECEIVING,
    (_S.RECEIVING, _E.COMPLETE): _S.DONE,
    (_S.EXPECTING, _E.FAIL): _S.ABORTING,
    (_S.RECEIVING, _E.FAIL): _S.ABORTING,
    (_S.ABORTING, _E.OFFER): _S.ABORTING,  # crossed our ABORT
    (_S.ABORTING, _E.FAIL): _S.ABORTING,
    (_S.ABORTING, _E.SETTLED): _S.FAILED,
}
INCOMING_TERMINAL = frozenset({_S.DONE, _S.FAILED})


@dataclass(slots=True)
class _Slots:
    """Local slots of this transfer, and how many were granted."""

    granted: set[SlotRef] = field(default_factory=set)  # the peer may write them
    scattering: set[SlotRef] = field(default_factory=set)
    given: int = 0  # grants so far, less those that came back unused
    landed: int = 0  # notifications so far


class IncomingTransfer:
    """One transfer as its target sees it.

    Args:
        plan: moves of this link; `total_tokens` is set from the OFFER.
        wanted: token range per component that the caller needs.
        deadline: moment, on the caller's clock, by which it must be DONE.
        quiesce_s: how long to wait for proofs after a failure.
        checksum: every notification brings one; otherwise none does.
    """

    def __init__(
        self,
        key: str,
        attempt: int,
        plan: LinkPlan,
        wanted: tuple[Interval, ...],
        *,
        peer: str,
        deadline: float,
        quiesce_s: float,
        checksum: bool = False,
    ) -> None:
        self.number = 0
        self.key = key
        self.attempt = attempt
        self.plan = plan
        self.wanted = wanted
        self.peer = peer
        self.deadline: float | None = deadline
        self.error: RdmaKvError | None = None
        self.told = False  # the failure came as an ABORT: who sent it tells the other participants too
        self.ranges: tuple[Interval, ...] | None = None
        self.metadata: dict[str, Any] = {}
        self.received_bytes = 0
        self._quiesce_s = quiesce_s
        self._checksum = checksum
        self._machine: Machine[IncomingState, IncomingEvent] = Machine(_S.EXPECTING, INCOMING_TABLE, INCOMING_TERMINAL)
        self._slots = _Slots()
        self._tilings: dict[int, Tiling] = {}
        self._want = 0
        self._answered = False  # the first GRANT, which carries the ranges, is out
        self._finish: Finish | None = None
        self._listening = False
        self._link_up = True
        self._reported = False

    # --- what the shell asks -------------------------------------------------------------------------------------------

    @property
    def state(self) -> IncomingState:
        return self._machine.state

    @property
    def wanting(self) -> int:
        """Slots that could be granted now."""
        return max(0, self._want - self._slots.given) if self.state is _S.RECEIVING and self._finish is None else 0

    @property
    def must_answer(self) -> bool:
        """The peer waits for the first GRANT, and there will be no slots with it."""
        return self.state is _S.RECEIVING and not self._answered and not self._want

    @property
    def ended(self) -> bool:
        return self._machine.ended

    @property
    def succeeded(self) -> bool:
        return self.state is _S.DONE

    @property
    def settled(self) -> bool:
        """Terminal, and no local slot is tied up by it."""
        return self._machine.ended and not self._slots.granted and not self._slots.scattering

    # --- messages of the peer ------------------------------------------------------------------------------------------

    def offered(self, message: Offer, now: float) -> list[Action]:
        """The first OFFER, or a repetition with more boxes."""
        if self.state is not _S.EXPECTING:
            if message.transfer == self.number and self.state is _S.RECEIVING:
                self._machine.step(_E.OFFER)
                self._want = message.want
            self.number = self.number or message.transfer  # our ABORT by name crossed it: proofs come under this number
            return []
        self.number = message.transfer
        refusal = self._refusal(message)
        if refusal is not None:
            reject = SendMessage(Reject(self.number, refusal.code, text_field(refusal.reason)))
            return [reject, *self.fail(refusal, now, tell=False)]
        self._machine.step(_E.OFFER)
        available = [Interval(*span) for span in message.available]
        self.plan = _with_totals(self.plan, tuple(span.end for span in available))
        self.ranges = tuple(clip(want, have) for want, have in zip(self.wanted, available, strict=True))
        self._tilings = self.plan.tilings(self.ranges)
        self._want = message.want
        self._answered = self._slots.given > 0  # slots given ahead say all that a first GRANT does
        return []

    def finished(self, message: Finish, now: float) -> list[Action]:
        if self.state is not _S.RECEIVING:
            return [] if self.state is not _S.EXPECTING else self._violation("FINISH before GRANT", now)
        if self._finish is not None or not self._answered:
            return self._violation("FINISH out of order", now)
        if not self._slots.landed <= message.boxes <= self._slots.landed + len(self._slots.granted):
            return self._violation(f"FINISH of {message.boxes} boxes, which cannot be", now)
        self._finish = message
        return self._advance(now)

    def released(self, message: Release, now: float) -> list[Action]:
        slots = {SlotRef(index, epoch) for index, epoch in message.slots}
        if not slots <= self._slots.granted or (self.state is _S.RECEIVING and self._finish is not None):
            return self._violation("RELEASE of a slot that is not granted, or after FINISH", now)
        self._slots.granted -= slots
        self._slots.given -= len(slots)
        self._want = min(self._want, self._slots.given)  # no more until the next OFFER
        return [*(ReleaseSlot(slot) for slot in slots), *self._settle()]

    def started(self) -> list[Action]:
        if self._listening or self.settled or not self._link_up:
            return []
        self._listening = True
        return [Listen(on=True)]

    def notified(self, message: Notification, now: float) -> list[Action] | None:
        """A WRITE has landed. None: the epoch is not live, nothing was done (counted by the shell)."""
        slot = SlotRef(message.slot, message.epoch)
        if slot not in self._slots.granted:
            return None
        self._slots.granted.discard(slot)
        if self.state is not _S.RECEIVING:  # late, but a proof
            return [ReleaseSlot(slot), *self._settle()]
        self._slots.landed += 1
        box, tiling = self._box(message), self._tilings.get(message.move)
        if (message.checksum is not None) is not self._checksum:
            text = f"notification {'without' if self._checksum else 'with'} a checksum, against the handshake"
            return [ReleaseSlot(slot), *self._violation(text, now)]
        if box is None or tiling is None:
            return [ReleaseSlot(slot), *self._violation("notification of a box outside the transfer", now)]
        num_bytes = self.plan.box_bytes(box)
        if num_bytes > self.plan.chunk_bytes or not tiling.add(
            box.layers, box.tokens, self.plan.carried(box.move, box.tokens)
        ):
            return [ReleaseSlot(slot), *self._violation("notification of a box that overlaps or does not fit", now)]
        self._slots.scattering.add(slot)
        self.received_bytes += num_bytes
        return [Scatter(slot, box, message.checksum)]

    def quiesced(self, now: float) -> list[Action]:
        """No WRITE of this transfer is or will be under way: every grant is free. Also a late proof."""
        if self.state is _S.RECEIVING:
            return self._violation("QUIESCED without ABORT", now)
        slots, self._slots.granted = self._slots.granted, set()
        return [*(ReleaseSlot(slot) for slot in slots), *self._settle()]

    def refused(self, message: Reject, now: float) -> list[Action]:
        """The prefill side will not serve our EXPECT: nothing was or will be posted to slots given ahead."""
        if self.number:
            return []
        slots, self._slots.granted = self._slots.granted, set()
        released: list[Action] = [ReleaseSlot(slot) for slot in slots]
        if self.state is not _S.EXPECTING:
            return [*released, *self._settle()]
        error: RdmaKvError
        if message.code is ErrorCode.ROUTE_MISMATCH:
            error = RouteMismatchError(self.key, self.state.name, message.message)
        else:
            error = TransferAborted(self.key, self.state.name, message.message, cause=message.code, culprit=self.peer)
        return [*released, *self.fail(error, now, tell=False)]

    def aborted(self, message: Abort, now: float) -> list[Action]:
        error = TransferAborted(
            self.key, self.state.name, message.message, cause=message.code, culprit=message.culprit or self.peer
        )
        self.told = self.told or (self.error is None and not self.ended)
        return self.fail(error, now, tell=False)

    def link_lost(self, error: RdmaKvError, now: float) -> list[Action]:
        self._link_up = False
        return [*self.fail(error, now, tell=False), *self._keep_grants(), *self._stop_listening()]

    # --- what came of actions ------------------------------------------------------------------------------------------

    @property
    def given_ahead(self) -> int:
        """Slots that the peer may write though it has offered nothing yet."""
        return len(self._slots.granted) if not self.number else 0

    def give_ahead(self, slots: list[SlotRef]) -> None:
        """Local slots that go with the EXPECT. They stay granted until a proof, as all others."""
        self._slots.granted.update(slots)
        self._slots.given += len(slots)

    def grant(self, slots: list[SlotRef]) -> list[Action]:
        """The shell has local slots for this transfer: at most `wanting`, or none to answer the first OFFER."""
        self._answered = True
        self._slots.granted.update(slots)
        self._slots.given += len(slots)
        ranges = [(span.start, span.end) for span in self.ranges or ()]
        pairs = [(slot.index, slot.epoch) for slot in slots]
        parts = [pairs[first : first + MAX_SLOTS_PER_MESSAGE] for first in range(0, len(pairs), MAX_SLOTS_PER_MESSAGE)]
        return [SendMessage(Grant(self.number, ranges, part)) for part in parts or [[]]]

    def scattered(self, slot: SlotRef, now: float) -> list[Action]:
        self._slots.scattering.discard(slot)
        if self.state is not _S.RECEIVING:
            return [ReleaseSlot(slot), *self._settle()]
        actions = self._advance(now)
        if self.succeeded:  # DONE acknowledges all
            return [ReleaseSlot(slot), *actions]
        return [ReleaseSlot(slot), SendMessage(Ack(self.number, slot.index, slot.epoch)), *actions]

    def scatter_failed(self, slot: SlotRef, error: RdmaKvError, now: float) -> list[Action]:
        self._slots.scattering.discard(slot)
        return [ReleaseSlot(slot), *self.fail(error, now), *self._settle()]

    def scatter_damaged(self, slot: SlotRef, box: Box, expected: int, found: int, now: float) -> list[Action]:
        """The slot holds other bytes than were sent; no page was touched."""
        move = self.plan.move(box.move)
        component = self.plan.route.model.components[move.component]
        error = ChecksumError(
            self.key,
            self.state.name,
            component=component.name,
            layers=component.layers[box.layers.start : box.layers.end],
            tokens=(box.tokens.start, box.tokens.end),
            src_rank=move.src,
            expected=expected,
            found=found,
            culprit=self.peer,
        )
        return self.scatter_failed(slot, error, now)

    def tick(self, now: float) -> list[Action]:
        """The deadline may have passed."""
        if self.deadline is None or now < self.deadline:
            return []
        if self.state is _S.ABORTING:
            return self._keep_grants()
        waiting = "no OFFER came" if self.state is _S.EXPECTING else f"{self.peer} did not finish in time"
        return self.fail(TransferTimeout(self.key, self.state.name, waiting), now)

    def fail(self, error: RdmaKvError, now: float, *, tell: bool = True) -> list[Action]:
        """Give up. The first failure counts; after the end nothing happens."""
        if self._machine.ended or self.state is _S.ABORTING:
            return []
        self._machine.step(_E.FAIL)
        self.error = error
        self.deadline = now + self._quiesce_s
        actions: list[Action] = []
        if tell and self._link_up:
            message = abort_message(self.number, self.key, self.attempt, self.plan.route, error)
            actions.append(SendMessage(message))
        return actions + self._settle()

    # --- inside --------------------------------------------------------------------------------------------------------

    def _refusal(self, message: Offer) -> RdmaKvError | None:
        if message.digest != self.plan.route.digest:
            return RouteMismatchError(self.key, self.state.name, "both sides computed different routes (digest)")
        if len(message.available) != len(self.wanted) or any(start > end for start, end in message.available):
            return RemoteProtocolError(self.peer, "OFFER does not list one range per component")
        for want, (start, end) in zip(self.wanted, message.available, strict=True):
            if want.size and want.start < end and want.start < start:
                text = f"tokens {want} wanted, [{start},{end}) available"
                return RangeUnavailableError(self.key, self.state.name, text)
            decode = self.plan.route.decode
            if decode.cp > 1 and not decode.cp_split.interleave and want.end < end:
                text = f"a contiguous context split is over the whole prompt of {end} tokens; only {want} are wanted"
                return RangeUnavailableError(self.key, self.state.name, text)
        return None

    def _box(self, message: Notification) -> Box | None:
        """The box that a notification names; None where it lies outside what this transfer brings."""
        if message.move not in self._tilings or self.ranges is None:
            return None
        move = self.plan.move(message.move)
        layers, tokens, range_ = message.layers, message.tokens, self.ranges[move.component]
        if not (
            move.layers.start <= layers[0] <= layers[1] <= move.layers.end
            and range_.start <= tokens[0] <= tokens[1] <= range_.end
        ):
            return None
        return Box(message.move, Interval(*layers), Interval(*tokens))

    def _advance(self, now: float) -> list[Action]:
        """DONE when FINISH is here and all its boxes are in the pages."""
        finish = self._finish
        if finish is None or self._slots.scattering or self._slots.landed < finish.boxes:
            return []
        if self._slots.landed > finish.boxes or not all(tiling.complete for tiling in self._tilings.values()):
            return self._violation("FINISH, but its boxes do not tile the transfer", now)
        self._machine.step(_E.COMPLETE)
        self.deadline = None
        self.metadata = finish.metadata
        unused, self._slots.granted = self._slots.granted, set()
        return [
            SendMessage(Done(self.number)),
            *(ReleaseSlot(slot) for slot in unused),
            *self._stop_listening(),
            *self._report(None),
        ]

    def _settle(self) -> list[Action]:
        """After a failure: report when the scatters are done, end when the grants are proven free."""
        if self.error is None or self._slots.scattering:
            return []
        actions = self._report(self.error)
        if self._slots.granted:
            return actions
        self._machine.step(_E.SETTLED)
        self.deadline = None
        return [*actions, *self._stop_listening()]

    def _keep_grants(self) -> list[Action]:
        """No proof came: the grants stay held, and the transfer ends. (A scatter under way still reports by itself.)

        The transport is progressed further, or a WRITE into a held slot could never settle.
        """
        if self.state is not _S.ABORTING:
            return []
        self._machine.step(_E.SETTLED)
        self.deadline = None
        return [*(KeepSlot(slot) for slot in self._slots.granted), *self._settle()]

    def _stop_listening(self) -> list[Action]:
        if not self._listening:
            return []
        self._listening = False
        return [Listen(on=False)]

    def _report(self, error: RdmaKvError | None) -> list[Action]:
        if self._reported:
            return []
        self._reported = True
        return [Finished(error)]

    def _violation(self, text: str, now: float) -> list[Action]:
        return self.fail(RemoteProtocolError(self.peer, f"{text} (transfer {self.key!r}, {self.state.name})"), now)


def _with_totals(plan: LinkPlan, totals: tuple[int, ...]) -> LinkPlan:
    return replace(plan, total_tokens=totals)
