"""The transfers of one agent that are under way, and how each is found: by its number on a link, or by its name.

One that is sent has both from its OFFER on. One that is received has its name alone until an OFFER gives it a number. It
is apart from the mover because whoever hears a peer must find them too.
"""

from __future__ import annotations

from collections.abc import Iterator

from rdma_kv.entry import Entry
from rdma_kv.errors import LocalProtocolError
from rdma_kv.messages import TransferName
from rdma_kv.peer import Peer
from rdma_kv.protocol.incoming import IncomingTransfer
from rdma_kv.protocol.outgoing import OutgoingTransfer


class Transfers:
    """Those with a number, and the receives without one; to iterate is safe while they change.

    One with a number stays until `forget`, also when its link has ended: what is late still finds it, by the name of the
    peer's incarnation.
    """

    def __init__(self) -> None:
        self._numbered: dict[tuple[str, int], Entry] = {}  # by peer and number
        self._sending: dict[tuple[str, TransferName], Entry] = {}  # sends under way, by peer and name
        self._expecting: dict[tuple[str, TransferName], Entry] = {}  # receives without OFFER, by peer and name

    def __len__(self) -> int:
        return len(self._numbered) + len(self._expecting)

    def __iter__(self) -> Iterator[Entry]:
        return iter([*self._numbered.values(), *self._expecting.values()])

    @property
    def numbered(self) -> list[Entry]:
        """Those that a message may name by its number."""
        return list(self._numbered.values())

    def of(self, peer: Peer) -> list[Entry]:
        """Those on that link."""
        return [entry for entry in self if entry.peer is peer]

    # --- how they come and go ------------------------------------------------------------------------------------------

    def offer(self, entry: Entry) -> None:
        """A send begins."""
        self._numbered[entry.peer.name, entry.machine.number] = entry
        self._sending[entry.peer.name, name_of(entry.machine)] = entry

    def expect(self, entry: Entry) -> None:
        """A receive begins.

        Raises:
            LocalProtocolError: this key is expected on this link already. Nothing has changed.
        """
        peer, name = entry.peer, name_of(entry.machine)
        if (peer.name, name) in self._expecting or any(
            e.peer is peer
            and isinstance(e.machine, IncomingTransfer)
            and not e.machine.ended
            and name_of(e.machine) == name
            for e in self._numbered.values()
        ):
            raise LocalProtocolError(f"{entry.machine.key!r} is being received already")
        self._expecting[peer.name, name] = entry

    def number(self, entry: Entry, number: int) -> None:
        """An OFFER gives a receive its number."""
        self._expecting.pop((entry.peer.name, name_of(entry.machine)), None)
        self._numbered[entry.peer.name, number] = entry

    def lost(self, peer: Peer) -> None:
        """A link has ended: what it expects has no number, and will have none."""
        for place in [place for place, entry in self._expecting.items() if entry.peer is peer]:
            del self._expecting[place]  # what it gave ahead is held by the link; a new one may expect the same name

    def forget(self, entry: Entry) -> None:
        """Nothing more is to come of it."""
        machine = entry.machine
        self._numbered.pop((entry.peer.name, machine.number), None)
        place = (entry.peer.name, name_of(machine))
        for table in (self._expecting, self._sending):
            if table.get(place) is entry:
                del table[place]

    # --- how they are found --------------------------------------------------------------------------------------------

    def get(self, peer: Peer, number: int) -> Entry | None:
        return self._numbered.get((peer.name, number))

    def sending(self, peer: Peer, name: TransferName) -> Entry | None:
        """The send of that name; it may have ended, or be of a former link."""
        return self._sending.get((peer.name, name))

    def expecting(self, peer: Peer, name: TransferName) -> Entry | None:
        """The receive of that name that waits for its OFFER."""
        return self._expecting.get((peer.name, name))


def name_of(machine: OutgoingTransfer | IncomingTransfer) -> TransferName:
    """How both sides call a transfer before it has a number."""
    route = machine.plan.route
    return TransferName(machine.key, machine.attempt, route.prefill_replica, route.decode_replica)
