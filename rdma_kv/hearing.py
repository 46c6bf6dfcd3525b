"""What peers say, and which transfer it is for: control messages, and notifications of what they have written.

A transfer is named by its number on the link, and a first message by key and replicas: one that no open transfer waits for
goes to the matchmaker. What is late, or comes twice, is counted and changes nothing; a number that was never used ends the
link. It is apart from the mover because it only finds the machine that is meant: what the machine answers is performed
there.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from rdma_kv.datalinks import DataLinks
from rdma_kv.entry import Entry
from rdma_kv.errors import RemoteProtocolError
from rdma_kv.messages import (
    Abort,
    Ack,
    ControlMessage,
    Done,
    Expect,
    Finish,
    Grant,
    Notification,
    Offer,
    Quiesced,
    Regions,
    Reject,
    Release,
    Start,
    TransferName,
    decode_notification,
)
from rdma_kv.peer import Peer
from rdma_kv.protocol.actions import Action
from rdma_kv.protocol.incoming import IncomingTransfer
from rdma_kv.protocol.outgoing import OutgoingTransfer
from rdma_kv.slots import SlotPool
from rdma_kv.transfers import Transfers
from rdma_kv.types import Role

logger = logging.getLogger(__name__)


class Matchmaker(Protocol):
    """Who takes the first messages that no open transfer waits for; see `rdma_kv.rendezvous`."""

    def on_expect(self, peer: Peer, message: Expect) -> None: ...

    def on_offer(self, peer: Peer, message: Offer) -> None: ...

    def on_offer_withdrawn(self, peer: Peer, abort: Abort) -> None: ...

    def on_offer_repeated(self, peer: Peer, message: Offer) -> bool: ...

    def take_offer(self, peer: Peer, name: TransferName) -> Offer | None: ...

    def on_abort(self, peer: Peer, message: Abort) -> None: ...

    def on_lost(self, peer: Peer) -> None: ...


class Hearing:
    """What one agent hears on all its links.

    Args:
        role: ours; a message that it never gets ends the link.
        matchmaker: takes EXPECTs, and OFFERs that nobody has opened a transfer for.
        perform: obeys the actions of a transfer's machine.
        use_grants_ahead: takes the slots that came with an EXPECT for a send that is under way.
    """

    def __init__(
        self,
        role: Role,
        transfers: Transfers,
        pool: SlotPool,
        links: DataLinks,
        matchmaker: Matchmaker,
        *,
        perform: Callable[[Entry, list[Action]], None],
        use_grants_ahead: Callable[[Entry, Expect], None],
    ) -> None:
        self._role = role
        self._transfers = transfers
        self._pool = pool
        self._links = links
        self._matchmaker = matchmaker
        self._perform = perform
        self._use_grants_ahead = use_grants_ahead
        self.counters: Counter[str] = Counter()

    # --- messages ------------------------------------------------------------------------------------------------------

    def on_message(self, peer: Peer, message: ControlMessage) -> None:
        """Everything after the handshake.

        Raises:
            RemoteProtocolError: a message that our role never gets, or a number that was never used; the link ends.
        """
        if isinstance(message, Abort) and not message.transfer:
            self._matchmaker.on_abort(peer, message)
        elif self._role is Role.PREFILL:
            self._on_prefill(peer, message)
        else:
            self._on_decode(peer, message)

    def _on_prefill(self, peer: Peer, message: ControlMessage) -> None:
        now = _now()
        match message:
            case Regions():
                self._links.on_regions(peer, message)
            case Expect():
                self.counters["expects"] += 1
                sending = self._transfers.sending(peer, TransferName.of(message))
                if (
                    sending is not None
                    and sending.peer is peer
                    and not sending.machine.ended
                    and sending.machine.plan.route.digest == message.digest
                ):  # it crossed our OFFER
                    self._use_grants_ahead(sending, message)
                else:
                    self._matchmaker.on_expect(peer, message)
            case Grant() | Reject() | Ack() | Done() | Abort():
                entry = self._transfers.get(peer, message.transfer)
                if entry is None:
                    self._check_number(peer, message.transfer, peer.numbers.given)
                    if isinstance(message, Grant) and message.slots:  # it crossed our last word
                        peer.send(Release(message.transfer, message.slots))
                    return
                machine = entry.machine
                assert isinstance(machine, OutgoingTransfer)
                if isinstance(message, Grant):
                    self._perform(entry, machine.granted(message, remote_slots(peer), now))
                elif isinstance(message, Reject):
                    self._perform(entry, machine.rejected(message, now))
                elif isinstance(message, Done):
                    self._perform(entry, machine.done(now))
                elif isinstance(message, Abort):
                    self._perform(entry, machine.aborted(message, now))
            case _:
                raise RemoteProtocolError(str(peer.id), f"{type(message).__name__} sent to a prefill agent")

    def _on_decode(self, peer: Peer, message: ControlMessage) -> None:
        now = _now()
        match message:
            case Offer():
                self._on_offer(peer, message)
            case Done():
                return  # this agent of the prefill replica has nothing for us
            case Reject():
                expecting = self._transfers.expecting(peer, TransferName.of(message))
                if expecting is not None and isinstance(expecting.machine, IncomingTransfer):
                    self._perform(expecting, expecting.machine.refused(message, now))
            case Release() | Start() | Finish() | Quiesced() | Abort():
                entry = self._transfers.get(peer, message.transfer)
                if entry is None:
                    self._withdraw(peer, message)
                    return
                machine = entry.machine
                assert isinstance(machine, IncomingTransfer)
                if isinstance(message, Release):
                    self._perform(entry, machine.released(message, now))
                elif isinstance(message, Start):
                    self._perform(entry, machine.started())
                elif isinstance(message, Finish):
                    self._perform(entry, machine.finished(message, now))
                elif isinstance(message, Quiesced):
                    self._perform(entry, machine.quiesced(now))
                elif isinstance(message, Abort):
                    self._perform(entry, machine.aborted(message, now))
            case _:
                raise RemoteProtocolError(str(peer.id), f"{type(message).__name__} sent to a decode agent")

    def _withdraw(self, peer: Peer, message: Release | Start | Finish | Quiesced | Abort) -> None:
        """A message for a transfer that is not live here: an OFFER that still waits, or one that has ended."""
        self._check_number(peer, message.transfer, peer.numbers.high_water)
        if isinstance(message, Abort):
            self._matchmaker.on_offer_withdrawn(peer, message)

    def _check_number(self, peer: Peer, number: int, highest: int) -> None:
        """Late messages for an ended transfer are normal; numbers that were never used are not."""
        if number > highest:
            raise RemoteProtocolError(str(peer.id), f"transfer {number} was never offered")
        self.counters["late_messages"] += 1

    def _on_offer(self, peer: Peer, message: Offer) -> None:
        entry = self._transfers.get(peer, message.transfer)
        if entry is not None:
            machine = entry.machine
            assert isinstance(machine, IncomingTransfer)
            self._perform(entry, machine.offered(message, _now()))
            return
        if message.transfer <= peer.numbers.high_water:
            if not self._matchmaker.on_offer_repeated(peer, message):
                self.counters["replays"] += 1
            return
        peer.numbers.high_water = message.transfer
        if (expecting := self._transfers.expecting(peer, TransferName.of(message))) is not None:
            self.match(expecting, message)
        else:
            self._matchmaker.on_offer(peer, message)

    def match(self, entry: Entry, offer: Offer) -> None:
        """A receive and its OFFER meet, whichever came first."""
        machine, peer = entry.machine, entry.peer
        assert isinstance(machine, IncomingTransfer)
        self._transfers.number(entry, offer.transfer)
        self._links.export(peer)
        self._perform(entry, machine.offered(offer, _now()))
        early, peer.early = peer.early, []
        for message in early:
            self._take_notification(peer, message)

    # --- notifications -------------------------------------------------------------------------------------------------

    def on_notification(self, peer: Peer, body: bytes) -> None:
        """The peer has written a box; its data is here."""
        try:
            message = decode_notification(str(peer.id), body)
        except RemoteProtocolError as exc:
            logger.warning("%s", exc)
            self.counters["bad_notifications"] += 1
            return
        self._take_notification(peer, message)

    def _take_notification(self, peer: Peer, message: Notification) -> None:
        entry = self._transfers.get(peer, message.transfer)
        machine = entry.machine if entry is not None else None
        if entry is None and message.transfer > peer.numbers.high_water and len(peer.early) < self._pool.total:
            peer.early.append(message)  # a slot given ahead was written before the OFFER was read
            return
        if entry is None or not isinstance(machine, IncomingTransfer):
            self.counters["stale_notifications"] += 1
            return
        actions = machine.notified(message, _now())
        if actions is None:
            self.counters["stale_notifications"] += 1
            return
        self._perform(entry, actions)


def remote_slots(peer: Peer) -> int:
    """How many slots the peer has told us of.

    Raises:
        RemoteProtocolError: it has granted some, and told nothing.
    """
    if peer.regions is None:
        raise RemoteProtocolError(str(peer.id), "GRANT before REGIONS")
    return peer.regions.num_slots


def _now() -> float:
    return asyncio.get_running_loop().time()
