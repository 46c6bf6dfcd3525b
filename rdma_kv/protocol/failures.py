"""Failures that come before or after the call that they concern: what is remembered of them, and for how long.

Theory of operation. Agents make their calls when their engines do, so a participant may give up before another has made
its call at all. Three memories, bounded in number and time, keep that from being lost:

* ABORTs by name whose call is not there yet. The call fails when it is made, once, instead of waiting for somebody who has
  given up. An agent that begins anew under the same name takes its ABORT back.
* Calls that failed before they knew their counterpart, and so could tell nobody. Who asks for their name is refused.
* Calls that have ended. ABORTs for them, still on their way, mean nothing: neither to them nor to the next of that name.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from rdma_kv.errors import RdmaKvError, TransferAborted
from rdma_kv.messages import Expect, Offer
from rdma_kv.protocol.recent import Recent
from rdma_kv.types import AgentId, ReplicaId

_REMEMBERED = 1024
"""Names that are remembered, each kind for itself: some ten MB at most, with the longest keys and cut texts."""

_COUNTERPARTS = 4
"""Of one name, whose ABORTs are remembered: a call that asks more replicas fails by any of these."""


class Place(NamedTuple):
    """Where messages and calls meet: a key, its attempt, and the replica of ours that is meant."""

    key: str
    attempt: int
    replica: int

    @classmethod
    def of(cls, message: Offer | Expect) -> Place:
        replica = message.decode_replica if isinstance(message, Offer) else message.prefill_replica
        return cls(message.key, message.attempt, replica)


class Told(NamedTuple):
    """An ABORT by name.

    Attributes:
        other: the counterpart that the failed transfer was with; None where it had found none.
        teller: the agent that told it.
    """

    other: ReplicaId | None
    teller: AgentId
    error: TransferAborted


class Failures:
    """The three memories of one agent.

    Args:
        keep_s: how long each entry is of use: as long as a call may wait.
    """

    def __init__(self, keep_s: float) -> None:
        self._told: Recent[Place, tuple[Told, ...]] = Recent(_REMEMBERED, keep_s)
        self._given_up: Recent[Place, RdmaKvError] = Recent(_REMEMBERED, keep_s)
        self._ended: Recent[Place, frozenset[ReplicaId | None]] = Recent(_REMEMBERED, keep_s)

    def begin(
        self, place: Place, others: tuple[ReplicaId, ...], waiting: AbstractSet[ReplicaId], now: float
    ) -> TransferAborted | None:
        """A call is made. Returns why it fails at once, if it does; that is forgotten then.

        Args:
            others: the counterparts that it may have; empty for any.
            waiting: replicas whose first message for it is here. Where it may choose, one that has not given up is taken.
        """
        self._given_up.drop(place)
        all_told = self._told.get(place, now) or ()
        if others:
            waiting = waiting & set(others)
        for told in all_told:
            concerns = told.other in others or not others
            may_choose = told.other is not None and len(others) != 1
            if concerns and not (may_choose and waiting - {told.other}):
                self._told.put(place, tuple(other for other in all_told if other is not told), now)
                return told.error
        return None

    def give_up(self, place: Place, error: RdmaKvError, now: float) -> None:
        """A call has failed that left its counterpart open and has not found it."""
        self._given_up.put(place, error, now)

    def given_up(self, place: Place, now: float) -> RdmaKvError | None:
        """Why the last call of this name failed, if it could tell nobody."""
        return self._given_up.get(place, now)

    def end(self, place: Place, other: ReplicaId | None, now: float) -> None:
        """A call has ended, well or not."""
        self._ended.put(place, (self._ended.get(place, now) or frozenset()) | {other}, now)

    def hear(self, place: Place, told: Told, now: float) -> bool:
        """Keep an ABORT for a call that is not there. False: it has been there, and has ended.

        One is kept for each counterpart, and a few of them: a peer must not fill our memory under one name.
        """
        ended = self._ended.get(place, now) or frozenset()
        if told.other in ended or None in ended or (told.other is None and ended):
            return False
        others = tuple(each for each in self._told.get(place, now) or () if each.other != told.other)
        self._told.put(place, (*others, told)[-_COUNTERPARTS:], now)
        return True

    def take_back(self, place: Place, other: ReplicaId, teller: AgentId, now: float) -> None:
        """An agent begins anew what it has aborted."""
        all_told = self._told.get(place, now)
        if all_told:
            left = tuple(each for each in all_told if (each.other, each.teller) != (other, teller))
            self._told.put(place, left, now)

    def told(self, place: Place, now: float) -> tuple[Told, ...]:
        """The ABORTs that wait for a call of this name."""
        return self._told.get(place, now) or ()
