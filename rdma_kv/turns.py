"""Who gets the next staging slot: round robin over the peers, and over the transfers of each that can use one.

A peer that is suspect gets none. A transfer that unproven slots alone
keep from a slot is told to whoever can add memory, or end it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from rdma_kv.entry import Entry
from rdma_kv.peer import Peer
from rdma_kv.protocol.actions import Action
from rdma_kv.protocol.outgoing import OutgoingTransfer
from rdma_kv.slots import Hold, SlotPool, SlotRef
from rdma_kv.transport.outcomes import succeeded


class Turns:
    """The order in which the transfers of one agent get slots.

    Args:
        perform: obeys the actions of a transfer's machine.
        on_scarce: told of a peer whose transfers want a slot, when unproven slots have left it none, or nearly none.
    """

    def __init__(
        self,
        pool: SlotPool,
        *,
        perform: Callable[[Entry, list[Action]], None],
        on_scarce: Callable[[str], None],
    ) -> None:
        self._pool = pool
        self._perform = perform
        self._on_scarce = on_scarce
        self._wanting: dict[str, dict[Entry, None]] = {}  # by peer, both in the order of their turns
        self._unanswered: dict[Entry, None] = {}  # whose peer waits for the first GRANT
        self._suspects: set[Peer] = set()
        self._handing_out = False
        self._telling = False

    # --- suspects ------------------------------------------------------------------------------------------------------

    def suspect(self, peer: Peer) -> None:
        self._suspects.add(peer)

    def trust(self, peer: Peer) -> None:
        """It lives, or it is lost."""
        self._suspects.discard(peer)

    def is_suspect(self, peer: Peer) -> bool:
        return peer in self._suspects

    # --- slots ---------------------------------------------------------------------------------------------------------

    def wanting(self, peer_name: str) -> list[Entry]:
        """Transfers with that peer that wait for a slot."""
        return list(self._wanting.get(peer_name, ()))

    def note(self, entry: Entry) -> None:
        """What a transfer can use may have changed."""
        machine, name = entry.machine, entry.peer.name
        if isinstance(machine, OutgoingTransfer):
            wants = machine.runnable
        else:
            exported = entry.peer.exported
            ready = exported is not None and succeeded(exported)
            wants = ready and machine.wanting > 0
            if ready and machine.must_answer:
                self._unanswered[entry] = None
        if wants:
            self._wanting.setdefault(name, {}).setdefault(entry)
        elif (others := self._wanting.get(name)) is not None:
            others.pop(entry, None)

    def forget(self, entry: Entry) -> None:
        self._wanting.get(entry.peer.name, {}).pop(entry, None)
        self._unanswered.pop(entry, None)

    def hand_out(self) -> None:
        """One slot at a time, as long as there are any."""
        if self._handing_out or not (self._wanting or self._unanswered):
            return
        self._handing_out = True
        try:
            grants: dict[Entry, list[SlotRef]] = {entry: [] for entry in self._unanswered}
            self._unanswered.clear()
            peers = deque(self._wanting)
            while peers:
                name = peers.popleft()
                if self._serve(name, grants):
                    self._wanting[name] = self._wanting.pop(name, {})  # behind the others, also next time
                    peers.append(name)
                elif not self._wanting.get(name, True):
                    del self._wanting[name]
            for entry, slots in grants.items():
                assert not isinstance(entry.machine, OutgoingTransfer)
                self._perform(entry, entry.machine.grant(slots))
        finally:
            self._handing_out = False
        if self._telling or self._pool.usable >= self._pool.working:  # it is being told, or nothing is unproven
            return
        self._telling = True  # who is told fails transfers, and each of them comes back here
        try:
            for name in [name for name, entries in self._wanting.items() if entries and self._is_scarce(name)]:
                self._on_scarce(name)
        finally:
            self._telling = False

    def _is_scarce(self, name: str) -> bool:
        return self._pool.usable < 2 or self._pool.is_blocked(name)

    def _serve(self, name: str, grants: dict[Entry, list[SlotRef]]) -> bool:
        """Give one slot to a transfer with that peer. False: none wants one, or there is none for this peer now."""
        wanting = self._wanting.get(name, {})
        suspects: list[Entry] = []
        try:
            while wanting and self._pool.can_acquire(name):
                entry = next(iter(wanting))
                del wanting[entry]
                machine = entry.machine
                if self.is_suspect(entry.peer):
                    suspects.append(entry)
                    continue
                if isinstance(machine, OutgoingTransfer):
                    if machine.runnable:
                        self._perform(entry, machine.start_box(self._acquire(name, Hold.GATHER)))
                        return True
                    continue
                missing = machine.wanting - len(grants.get(entry, ()))
                if missing > 0:
                    grants.setdefault(entry, []).append(self._acquire(name, Hold.GRANTED))
                    if missing > 1:
                        wanting[entry] = None
                    return True
            return False
        finally:
            for entry in suspects:
                wanting[entry] = None

    def _acquire(self, name: str, reason: Hold) -> SlotRef:
        slot = self._pool.acquire(name, reason)
        assert slot is not None, "can_acquire was asked"
        return slot
