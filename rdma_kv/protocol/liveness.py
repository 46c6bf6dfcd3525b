"""Whether the peer of one link still lives, and how long we may post to it: heartbeats and leases, without a clock.

Theory of operation. Each side sends a HEARTBEAT every interval, whatever else it sends; both sides of a link use the
smaller of their two intervals, so that neither can outlive the other's patience by its settings. Every message of the
peer is a sign of life. When two heartbeats are overdue the peer is SUSPECT: nothing new is posted to it, and the next
sign of life ends that. When it has been silent for our lease it is LOST, for good: a peer that comes back afterwards
gets a new link. No time of day and no moment crosses the wire, only durations (in HELLO) and numbers.

`may_post` is the other half of a lease. The peer gives us up when it has not heard from us for *its* lease. A heartbeat
that it has acknowledged was heard no earlier than we sent it. So up to that moment plus its lease, less a margin, it
has not given us up, whatever has happened since; later it may have, and may use its memory for others.

Our own silence is not the peer's. If our timer fires late by more than an interval, the event loop was blocked (an
engine that holds the GIL), and what the peer sent meanwhile may lie unread. Then the verdict waits one more interval. It
waits so a bounded number of times, so that a loop which is always late still notices a dead peer.
"""

from __future__ import annotations

from collections import deque
from enum import Enum, auto
from typing import Final

from rdma_kv.errors import RemoteProtocolError
from rdma_kv.messages import Heartbeat
from rdma_kv.protocol.machine import Machine

OVERDUE_INTERVALS: Final = 2.5
"""Silence that makes a peer suspect: two heartbeats are overdue, and half an interval is left for the way."""

_MARGIN: Final = 0.1  # of the peer's lease: clocks that run unequally, and the time from `may_post` to the post itself
_MAX_GRACES: Final = 3  # in a row without a sign of life
_MAX_UNACKNOWLEDGED: Final = 64  # heartbeats that we remember; a lease is a few


class LifeState(Enum):
    ALIVE = auto()
    SUSPECT = auto()  # two heartbeats are overdue: nothing new is posted to it
    LOST = auto()  # its lease has ended; the link is given up


class LifeEvent(Enum):
    HEARD = auto()  # any message of the peer
    OVERDUE = auto()  # two heartbeats should have come
    EXPIRED = auto()  # silent for the whole lease


_S, _E = LifeState, LifeEvent

LIFE_TABLE: dict[tuple[LifeState, LifeEvent], LifeState] = {
    (_S.ALIVE, _E.HEARD): _S.ALIVE,
    (_S.ALIVE, _E.OVERDUE): _S.SUSPECT,
    (_S.SUSPECT, _E.HEARD): _S.ALIVE,
    (_S.SUSPECT, _E.EXPIRED): _S.LOST,
}
LIFE_TERMINAL = frozenset({_S.LOST})


class Liveness:
    """The peer of one link that is up.

    Args:
        peer: who it is, for errors.
        now: when its HELLO was heard.
        hello_at: when ours went out: the peer heard it, and began to count, no earlier.
        heartbeat_s: the smaller of both sides' intervals.
        lease_s: how long we wait for a sign of life.
        peer_lease_s: how long it waits for one of ours.

    Attributes:
        heartbeat_s, lease_s: as above.
    """

    def __init__(
        self, peer: str, now: float, *, hello_at: float, heartbeat_s: float, lease_s: float, peer_lease_s: float
    ) -> None:
        self.heartbeat_s = heartbeat_s
        self.lease_s = lease_s
        self._peer = peer
        self._posting_s = peer_lease_s * (1 - _MARGIN)  # from the sending of an acknowledged heartbeat
        self._machine: Machine[LifeState, LifeEvent] = Machine(_S.ALIVE, LIFE_TABLE, LIFE_TERMINAL)
        self._next_beat = now + heartbeat_s
        self._number = 0  # of our last heartbeat
        self._unacknowledged: deque[tuple[int, float]] = deque(maxlen=_MAX_UNACKNOWLEDGED)  # (number, sent at)
        self._acknowledged_at = hello_at  # when the last one that was acknowledged was sent; HELLO is the first
        self._heard_number = 0
        self._heard_at = now
        self._judge_from = now
        self._graces = 0

    @property
    def state(self) -> LifeState:
        return self._machine.state

    @property
    def deadline(self) -> float | None:
        """When `tick` is due; None where the peer is lost."""
        if self._machine.ended:
            return None
        return min(self._next_beat, max(self._verdict_at, self._judge_from))

    @property
    def _verdict_at(self) -> float:
        """When the silence of the peer means something new."""
        return self._heard_at + (self._overdue_s if self.state is _S.ALIVE else self.lease_s)

    @property
    def _overdue_s(self) -> float:
        return OVERDUE_INTERVALS * self.heartbeat_s

    def may_post(self, now: float) -> bool:
        """Whether a WRITE may be posted: the peer cannot have given us up, and is not suspect itself."""
        return self.state is _S.ALIVE and now < self._acknowledged_at + self._posting_s

    def tick(self, now: float) -> Heartbeat | None:
        """The timer has fired. Returns the heartbeat to send, if one is due; `state` says what the silence means."""
        deadline = self.deadline
        if deadline is None or now < deadline:
            return None
        if now - deadline > self.heartbeat_s and self._graces < _MAX_GRACES:
            self._graces += 1
            self._judge_from = now + self.heartbeat_s
        if now >= self._judge_from:
            self._judge(now - self._heard_at)
        if self._machine.ended or now < self._next_beat:
            return None
        return self.beat(now)

    def heard(self, now: float) -> bool:
        """The peer has sent something. True where it was suspect until now."""
        self._heard_at = now
        self._graces = 0
        if self.state is _S.ALIVE:
            return False  # of every message: no need to look into the table
        return self._machine.step(_E.HEARD) is _S.ALIVE

    def beat(self, now: float, *, answer: bool = False) -> Heartbeat:
        """A heartbeat to send now.

        Args:
            answer: ask the peer to acknowledge it at once rather than with its next one.
        """
        self._number += 1
        self._unacknowledged.append((self._number, now))
        self._next_beat = now + self.heartbeat_s
        return Heartbeat(self._number, self._heard_number, answer)

    def heartbeat(self, message: Heartbeat, now: float) -> Heartbeat | None:
        """A heartbeat of the peer, beside `heard`. Returns the one that answers it, where it asks for that.

        Raises:
            RemoteProtocolError: a number that was used before, or an acknowledgement of what was never sent.
        """
        if message.number <= self._heard_number:
            raise RemoteProtocolError(
                self._peer, f"heartbeat {message.number} after {self._heard_number}; their numbers only grow"
            )
        if message.heard > self._number:
            raise RemoteProtocolError(
                self._peer, f"acknowledges heartbeat {message.heard}; the last one sent was {self._number}"
            )
        self._heard_number = message.number
        while self._unacknowledged and self._unacknowledged[0][0] <= message.heard:
            _, self._acknowledged_at = self._unacknowledged.popleft()
        return self.beat(now) if message.answer else None

    def _judge(self, silence_s: float) -> None:
        if self.state is _S.ALIVE and silence_s >= self._overdue_s:
            self._machine.step(_E.OVERDUE)
        if self.state is _S.SUSPECT and silence_s >= self.lease_s:
            self._machine.step(_E.EXPIRED)
