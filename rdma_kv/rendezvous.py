"""Where first messages and calls meet: EXPECTs and OFFERs that came before their call, and calls that wait for one.

Either side may come first. What waits here holds no staging memory, is bounded per peer, and has a deadline; one that
cannot be kept, or that nobody asks for in time, is refused with a reason, so that the other side does not wait in vain.

Failures may come before their call too: see `rdma_kv.protocol.failures`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rdma_kv.config import Limits, Timeouts
from rdma_kv.errors import LocalProtocolError, RdmaKvError, RemoteProtocolError, TransferAborted
from rdma_kv.messages import MAX_TEXT, Abort, Expect, Offer, Reject, TransferName, text_field
from rdma_kv.peer import Peer
from rdma_kv.protocol.failures import Failures, Place, Told
from rdma_kv.types import AgentId, ReplicaId, Role

_GRACE_S = 1.0
"""A message is kept a little longer than its sender waits: the two clocks began at different moments."""

Check = Callable[[Peer, Offer | Expect], RdmaKvError | None]
AbortHandler = Callable[[Place, ReplicaId | None, TransferAborted], bool]
"""Fails the calls at a place that are with that counterpart; None for those that left it open. False: there is none."""

_KEPT_TEXT = 200  # characters of what is remembered of an ABORT


@dataclass(eq=False)
class _Unmatched:
    """A message that waits for its call."""

    peer: Peer
    message: Offer | Expect
    timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


@dataclass(eq=False)
class _Call:
    """A call that waits for a message. `allowed` are the replicas it may come from; None for any."""

    allowed: frozenset[ReplicaId] | None
    found: asyncio.Future[ReplicaId]


class Rendezvous:
    """First messages of all peers of one agent.

    Args:
        role: ours.
        check: returns the error where a first message cannot be right. It answers an EXPECT with DONE itself where no
            moves lie between us and the peer.
        fail_session: a participant has given up, by the name of the transfer; fail our part of it.
    """

    def __init__(
        self, role: Role, check: Check, fail_session: AbortHandler, *, timeouts: Timeouts, limits: Limits
    ) -> None:
        self._role = role
        self._check = check
        self._fail_session = fail_session
        self._timeouts = timeouts
        self._limits = limits
        self._offers: dict[Place, list[_Unmatched]] = {}
        self._expects: dict[Place, list[_Unmatched]] = {}
        self._receives: dict[Place, _Call] = {}
        self._sends: dict[Place, _Call] = {}
        self._per_peer: dict[str, int] = {}
        self._failures = Failures(timeouts.transfer)

    @property
    def unmatched(self) -> int:
        """Messages that wait for their call."""
        return sum(self._per_peer.values())

    # --- calls ---------------------------------------------------------------------------------------------------------

    def begin(self, place: Place, others: tuple[ReplicaId, ...]) -> TransferAborted | None:
        """A call is made. Returns why it fails at once: a participant of it has given up before.

        Args:
            others: the counterparts that it may have; empty for any. Where there are several, one whose first message
                waits here is taken, whoever else has given up.
        """
        table = self._expects if self._role is Role.PREFILL else self._offers
        waiting = {_sender(unmatched) for unmatched in table.get(place, [])}
        return self._failures.begin(place, others, waiting, _now())

    def give_up(self, place: Place, error: RdmaKvError) -> None:
        """A call has failed that left its counterpart open and has not found it: who asks for it now is refused."""
        self._failures.give_up(place, error, _now())
        for table in (self._offers, self._expects):
            for unmatched in list(table.get(place, [])):
                self._drop(table, place, unmatched)
                _refuse_message(unmatched.peer, unmatched.message, error)

    def ended(self, place: Place, other: ReplicaId | None) -> None:
        """A call has ended, well or not: ABORTs of it that are still on their way mean nothing."""
        self._failures.end(place, other, _now())

    async def wait_for_offer(self, place: Place, allowed: frozenset[ReplicaId] | None) -> ReplicaId:
        """The first prefill replica (of `allowed`) that offers the key to our decode replica."""
        return await self._wait(self._receives, place, allowed, self._offers.get(place, []))

    async def wait_for_expect(self, place: Place) -> ReplicaId:
        """The first decode replica that expects the key from our prefill replica."""
        return await self._wait(self._sends, place, None, self._expects.get(place, []))

    async def _wait(
        self,
        calls: dict[Place, _Call],
        place: Place,
        allowed: frozenset[ReplicaId] | None,
        waiting: list[_Unmatched],
    ) -> ReplicaId:
        for unmatched in waiting:
            source = _sender(unmatched)
            if allowed is None or source in allowed:
                return source
        if place in calls:
            raise LocalProtocolError(f"{place.key!r} of replica {place.replica} is waited for already")
        call = calls[place] = _Call(allowed, asyncio.get_running_loop().create_future())
        try:
            return await call.found
        finally:
            del calls[place]

    def take_offer(self, peer: Peer, name: TransferName) -> Offer | None:
        """Hand over the OFFER of this very transfer, if it has come."""
        place = Place(name.key, name.attempt, name.decode_replica)
        for unmatched in self._offers.get(place, []):
            message = unmatched.message
            if unmatched.peer is peer and TransferName.of(message) == name and isinstance(message, Offer):
                self._drop(self._offers, place, unmatched)
                return message
        return None

    def take_expect(self, peer: Peer, place: Place, decode: ReplicaId) -> Expect | None:
        """Hand over the EXPECT of this very transfer, if it has come."""
        for unmatched in self._expects.get(place, []):
            message = unmatched.message
            if unmatched.peer is peer and _sender(unmatched) == decode and isinstance(message, Expect):
                self._drop(self._expects, place, unmatched)
                return message
        return None

    def forget_expects(self, place: Place, decode: ReplicaId, busy: set[AgentId]) -> None:
        """A send knows its counterpart: what agents asked for that we have nothing for is answered.

        Those of `busy` agents stay for the transfers with them.
        """
        for unmatched in list(self._expects.get(place, [])):
            if _sender(unmatched) == decode and unmatched.peer.id not in busy:
                self._drop(self._expects, place, unmatched)
                _return_grants(unmatched)

    def refuse_others(self, place: Place, asked: Iterable[ReplicaId], taken: ReplicaId) -> None:
        """A receive that asked several replicas has chosen one: offers of the others are not needed."""
        unwanted = set(asked) - {taken}
        for unmatched in list(self._offers.get(place, [])):
            if _sender(unmatched) in unwanted:
                self._drop(self._offers, place, unmatched)
                _refuse(unmatched, f"the request was taken from {taken}")

    def _forget(self, place: Place, other: ReplicaId, error: TransferAborted, teller: AgentId) -> None:
        """Drop what waits of a transfer that has failed. Its sender hears why, unless it told us itself."""
        for table in (self._offers, self._expects):
            for unmatched in [u for u in table.get(place, []) if _sender(u) == other]:
                self._drop(table, place, unmatched)
                if unmatched.peer.id == teller:
                    _return_grants(unmatched)
                else:
                    _refuse_message(unmatched.peer, unmatched.message, error)

    # --- messages ------------------------------------------------------------------------------------------------------

    def on_offer(self, peer: Peer, message: Offer) -> None:
        """An OFFER that no open transfer waits for."""
        refusal = self._check(peer, message)
        if refusal is not None:
            peer.send(_reject(message, refusal))
            return
        place = Place.of(message)
        if self._refused(peer, place, message):
            return
        if any(
            u.peer is peer and u.message.prefill_replica == message.prefill_replica for u in self._offers.get(place, [])
        ):
            _refuse_message(peer, message, LocalProtocolError("this key is offered already"))
            return
        if self._keep(self._offers, place, peer, message):
            self._wake(self._receives.get(place), ReplicaId(peer.id.engine, message.prefill_replica))

    def on_offer_repeated(self, peer: Peer, message: Offer) -> bool:
        """A waiting OFFER with more boxes. False: none of that number waits."""
        for unmatched in self._offers.get(Place.of(message), []):
            known = unmatched.message
            if unmatched.peer is peer and isinstance(known, Offer) and known.transfer == message.transfer:
                unmatched.message = message
                return True
        return False

    def on_offer_withdrawn(self, peer: Peer, abort: Abort) -> None:
        """The peer has aborted, by its number, a transfer that we have not answered."""
        for place, waiting in list(self._offers.items()):
            for unmatched in list(waiting):
                message = unmatched.message
                if unmatched.peer is peer and isinstance(message, Offer) and message.transfer == abort.transfer:
                    self._drop(self._offers, place, unmatched)
                    told = Told(_sender(unmatched), peer.id, _abort_error(peer, abort, _KEPT_TEXT))
                    self._failures.hear(place, told, _now())

    def on_expect(self, peer: Peer, message: Expect) -> None:
        """A decode agent waits for a key."""
        refusal = self._check(peer, message)
        if refusal is not None:
            peer.send(_reject(message, refusal))
            return
        place = Place.of(message)
        if self._refused(peer, place, message):
            return
        if any(
            u.peer is peer and u.message.decode_replica == message.decode_replica for u in self._expects.get(place, [])
        ):
            _return_grants(_Unmatched(peer, message))
            return  # told twice, waits once
        if self._keep(self._expects, place, peer, message):
            self._wake(self._sends.get(place), ReplicaId(peer.id.engine, message.decode_replica))

    def on_abort(self, peer: Peer, message: Abort) -> None:
        """A participant has given up, by the name of the transfer: of the other engine, or of ours.

        Raises:
            RemoteProtocolError: the peer has no rank in the replica that it speaks for.
        """
        ours, theirs = message.prefill_replica, message.decode_replica
        if self._role is Role.DECODE:
            ours, theirs = theirs, ours
        sibling = peer.id.role is self._role
        speaks_for = ours if sibling else theirs
        if all(owned.replica != speaks_for for owned in peer.identity.owns):
            raise RemoteProtocolError(str(peer.id), f"ABORT for replica {speaks_for}, of which it has no rank")
        place, error = Place(message.key, message.attempt, ours), _abort_error(peer, message)
        engine = message.counterpart if sibling else peer.id.engine
        other = ReplicaId(engine, theirs) if engine else None
        if other is not None:
            self._forget(place, other, error, peer.id)
        if not self._fail_session(place, other, error):
            self._failures.hear(place, Told(other, peer.id, _abort_error(peer, message, _KEPT_TEXT)), _now())

    def on_lost(self, peer: Peer) -> None:
        """Nothing of a lost peer waits."""
        for table in (self._offers, self._expects):
            for place, waiting in list(table.items()):
                for unmatched in [u for u in waiting if u.peer is peer]:
                    self._drop(table, place, unmatched)

    def close(self) -> None:
        """Nothing waits any more; slots given ahead go back."""
        for table in (self._offers, self._expects):
            for waiting in table.values():
                for unmatched in waiting:
                    unmatched.stop_timer()
                    _return_grants(unmatched)
            table.clear()
        self._per_peer.clear()

    # --- inside --------------------------------------------------------------------------------------------------------

    def _refused(self, peer: Peer, place: Place, message: Offer | Expect) -> bool:
        """Refuse a first message of a call that has failed here. Otherwise the peer begins anew after what it aborted."""
        error = self._failures.given_up(place, _now())
        if error is not None:
            _refuse_message(peer, message, error)
            return True
        index = message.prefill_replica if isinstance(message, Offer) else message.decode_replica
        self._failures.take_back(place, ReplicaId(peer.id.engine, index), peer.id, _now())
        return False

    @staticmethod
    def _wake(call: _Call | None, source: ReplicaId) -> None:
        if call is not None and not call.found.done() and (call.allowed is None or source in call.allowed):
            call.found.set_result(source)

    def _keep(
        self,
        table: dict[Place, list[_Unmatched]],
        place: Place,
        peer: Peer,
        message: Offer | Expect,
    ) -> bool:
        count = self._per_peer.get(peer.name, 0)
        if count >= self._limits.unmatched_per_peer:
            error = LocalProtocolError(f"{count} of your messages wait here for their calls already")
            _refuse_message(peer, message, error)
            return False
        loop = asyncio.get_running_loop()
        unmatched = _Unmatched(peer, message)
        own_s, senders_s = self._timeouts.unmatched, message.timeout_ms / 1000
        wait_s = min(own_s, senders_s + _GRACE_S)
        unmatched.timer = loop.call_later(wait_s, self._expire, table, place, unmatched)
        table.setdefault(place, []).append(unmatched)
        self._per_peer[peer.name] = count + 1
        return True

    def _expire(self, table: dict[Place, list[_Unmatched]], place: Place, unmatched: _Unmatched) -> None:
        """Its sender has given up by itself, or has more patience than we: then it is told."""
        self._drop(table, place, unmatched)
        if unmatched.message.timeout_ms / 1000 > self._timeouts.unmatched:
            _refuse(unmatched, f"nobody here has asked for this key within {self._timeouts.unmatched:.1f} s")
        else:
            _return_grants(unmatched)

    def _drop(self, table: dict[Place, list[_Unmatched]], place: Place, unmatched: _Unmatched) -> None:
        unmatched.stop_timer()
        table[place].remove(unmatched)
        if not table[place]:
            del table[place]
        self._per_peer[unmatched.peer.name] -= 1
        if not self._per_peer[unmatched.peer.name]:
            del self._per_peer[unmatched.peer.name]


def _now() -> float:
    return asyncio.get_running_loop().time()


def _sender(unmatched: _Unmatched) -> ReplicaId:
    """The replica that a waiting message speaks for."""
    message = unmatched.message
    index = message.prefill_replica if isinstance(message, Offer) else message.decode_replica
    return ReplicaId(unmatched.peer.id.engine, index)


def _return_grants(unmatched: _Unmatched) -> None:
    """An EXPECT is dropped: whoever gave slots ahead needs to know that nothing was posted to them."""
    if isinstance(unmatched.message, Expect) and unmatched.message.grants:
        _refuse(unmatched, "the slots that were given ahead are not needed")


def _refuse(unmatched: _Unmatched, text: str) -> None:
    _refuse_message(unmatched.peer, unmatched.message, LocalProtocolError(text))


def _refuse_message(peer: Peer, message: Offer | Expect, error: RdmaKvError) -> None:
    peer.send(_reject(message, error))


def _abort_error(peer: Peer, message: Abort, most: int = MAX_TEXT) -> TransferAborted:
    """An ABORT by name as the error of the call that it ends, with texts of at most `most` characters."""
    culprit = (message.culprit or str(peer.id))[:most]
    return TransferAborted(message.key, "aborted", message.message[:most], cause=message.code, culprit=culprit)


def _reject(message: Offer | Expect, error: RdmaKvError) -> Reject:
    return Reject(
        message.transfer if isinstance(message, Offer) else 0,
        error.told_code,
        text_field(error.reason),
        message.key,
        message.attempt,
        message.prefill_replica,
        message.decode_replica,
    )
