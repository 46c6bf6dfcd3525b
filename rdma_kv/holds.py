"""Slots that a transport may still touch, by the link that they were used on, and what makes them free again.

Theory of operation. A slot is unproven when its WRITE has failed, or has not settled in time (source), or when no proof
came that nothing lands in it any more (target). Nobody can take back what was posted, so such a slot is held; and since
only the end of the data link can give a proof, a link with unproven slots is given up, and the next transfer makes a new
one. When a link has ended, its data endpoint is fenced:

* source: `fence_source` frees its slots. What has left our memory may still land at the peer, but that is the peer's to
  hold.
* target: `fence_target` frees its slots where the lane has such a fence. An initiator that still answers fences first: it
  hears of the end of the link and gets a moment for it, since some transports can crash an initiator whose target ends
  while bytes are stuck, and since its late notifications are proofs.
* target without a fence (the peer's process may write our memory by itself): our side of the endpoint is ended, and
  then the slots are free when the peer has said that its WRITEs are over (SETTLE), or its process is proven dead.
  Where neither comes within `quiesce` of the link's end the slots are *retired*: an inaccessible mapping is put over
  their memory, the peer's late copy fails, and new slots at new addresses take their place. Slots of an agent
  on a GPU are not: what a peer has mapped cannot be taken from it, and of a host half alone the GPU half would be lost for
  good. They are held until SETTLE or a death.

Where our own side could not be ended with a proof, one more attempt is made; after that its slots are held until the
process exits, as our own transport may still read or write them. `SlotPool` knows how many are held by whom.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from rdma_kv.entry import Entry
from rdma_kv.errors import PeerLostError, RdmaKvError
from rdma_kv.peer import Peer
from rdma_kv.protocol.actions import Action
from rdma_kv.protocol.incoming import IncomingTransfer
from rdma_kv.slots import Hold, SlotPool, SlotRef
from rdma_kv.staging import Staging
from rdma_kv.tasks import Tasks
from rdma_kv.transport.base import Endpoint
from rdma_kv.types import Role

logger = logging.getLogger(__name__)

INITIATOR_FIRST_S: Final = 1.0  # for the peer's own fence, and its last notifications, before ours; less with `quiesce`

_DEAD: Final = 256  # names at most; their links end at once


class Proof(Enum):
    """What is known of a data endpoint of ours."""

    NONE = auto()  # it may still touch memory
    ENDED = auto()  # our side has ended; the peer may write by itself
    FENCED = auto()  # nothing of it touches our memory


@dataclass(eq=False)
class LinkHolds:
    """What is held for one link.

    Attributes:
        slots: unproven ones.
        inaccessible: those of them whose memory is gone.
        entries: transfers of the link, from its end on.
        ended: our side was fenced or closed, as well as could be.
        over: nothing is to be waited for: no slot is held, or the peer's WRITEs are over.
        peer_over: the peer has said so, or is dead.
        finished: all that happens by itself has happened.
    """

    peer: Peer
    slots: set[SlotRef] = field(default_factory=set)
    inaccessible: set[SlotRef] = field(default_factory=set)
    entries: list[Entry] = field(default_factory=list)
    proof: Proof = Proof.NONE
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)
    peer_over: bool = False
    finished: bool = False


class Holds:
    """All slots of one agent that are held without a proof.

    Args:
        perform: obeys the actions of a transfer's machine.
        changed: told when a link has been fenced, and when nothing more is to come: slots may be free or retired.
    """

    def __init__(
        self,
        role: Role,
        pool: SlotPool,
        staging: Staging,
        quiesce_s: float,
        *,
        perform: Callable[[Entry, list[Action]], None],
        changed: Callable[[str], None],
    ) -> None:
        self._role = role
        self._pool = pool
        self._staging = staging
        self._quiesce_s = quiesce_s
        self._perform = perform
        self._changed = changed
        self._links: dict[Peer, LinkHolds] = {}
        self._dead: dict[str, None] = {}  # told before their link has ended, the latest
        self._tasks = Tasks()
        self._closed = False
        self.counters: Counter[str] = Counter()

    # --- slots ---------------------------------------------------------------------------------------------------------

    def keep(self, peer: Peer, slot: SlotRef) -> None:
        """Hold a slot without a proof. A link that is up is given up for it, after what is being said on it."""
        if peer.lost is not None and peer not in self._links and not self._closed:
            self._pool.release(slot)  # its link has ended with a proof since
            return
        self._pool.change(slot, Hold.UNPROVEN)
        link = self._of(peer)
        link.slots.add(slot)
        if not link.peer_over:
            link.over.clear()
        if peer.lost is None and peer.given_up is None:
            text = f"a WRITE did not settle, so its memory is held until the data link has ended ({self._role.value})"
            asyncio.get_running_loop().call_soon(peer.give_up, PeerLostError(str(peer.id), text))

    def release(self, peer: Peer, slot: SlotRef) -> None:
        """Nothing touches the slot any more: back to the pool, if its memory is still there."""
        link = self._links.get(peer)
        if link is not None and slot in link.inaccessible:
            self._pool.retire(slot)
            self.counters["slots_retired"] += 1
        else:
            self._pool.release(slot)
        if link is not None and slot in link.slots:
            link.slots.discard(slot)
            link.inaccessible.discard(slot)
            if not link.slots:
                link.over.set()
                self._forget(link)

    # --- links ---------------------------------------------------------------------------------------------------------

    def lost(self, peer: Peer, entries: list[Entry]) -> None:
        """A link has ended, its transfers are about to be told: end its data endpoint, and free what that proves."""
        link = self._of(peer)
        link.entries = entries
        if peer.name in self._dead:
            del self._dead[peer.name]
            link.peer_over = True
            link.over.set()
        self._tasks.spawn(self._end(link), f"end of the link to {peer.name}")

    def on_settle(self, peer: Peer) -> None:
        """The peer says on this link that its WRITEs of the former ones are over."""
        for link in self._former(peer.name):
            if link.peer is not peer:
                self._note_over(link)

    def on_dead(self, peer_name: str) -> None:
        """The peer's process is proven dead: it writes nothing by itself any more."""
        links = self._former(peer_name)
        if not all(link.peer.lost for link in links) or not links:
            self._dead[peer_name] = None
            if len(self._dead) > _DEAD:
                del self._dead[next(iter(self._dead))]
        for link in links:
            if link.peer.lost is not None:
                self._note_over(link)

    async def ended(self, peer_name: str) -> None:
        """Wait until our data endpoints of all former links to that incarnation have ended."""
        for link in self._former(peer_name):
            if link.peer.lost is not None:
                await link.ended.wait()

    async def settled(self, peer_name: str) -> bool:
        """Whether nothing that we posted on former links is read from our memory any more; waits `quiesce` at most."""
        try:
            async with asyncio.timeout(self._quiesce_s):
                await self.ended(peer_name)
        except TimeoutError:
            return False
        return all(link.proof is not Proof.NONE for link in self._former(peer_name) if link.peer.lost is not None)

    @property
    def fencing(self) -> bool:
        """Whether slots are held only as long as a fence takes."""
        return any(link.slots and not link.ended.is_set() for link in self._links.values())

    @property
    def hopeful(self) -> bool:
        """Whether slots may become free or be retired by themselves."""
        return any(link.slots and not link.finished for link in self._links.values())

    async def close(self, timeout_s: float) -> None:
        """Wait (bounded) until all links that have ended, or were given up, have been fenced. Then nothing more happens."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while waiting := [link.ended.wait() for link in self._links.values() if not link.ended.is_set()]:
                    await asyncio.gather(*waiting)
        self._closed = True
        await self._tasks.close()

    # --- inside --------------------------------------------------------------------------------------------------------

    def _of(self, peer: Peer) -> LinkHolds:
        if peer not in self._links:
            self._links[peer] = LinkHolds(peer)
        return self._links[peer]

    def _former(self, peer_name: str) -> list[LinkHolds]:
        return [link for link in self._links.values() if link.peer.name == peer_name]

    def _note_over(self, link: LinkHolds) -> None:
        link.peer_over = True
        link.over.set()
        if link.ended.is_set():
            self._judge(link)

    async def _end(self, link: LinkHolds) -> None:
        ends_at = asyncio.get_running_loop().time() + self._quiesce_s
        endpoint = link.peer.endpoint
        if endpoint is None:
            link.proof = Proof.FENCED  # nothing was ever posted
        else:
            if self._role is Role.DECODE and link.slots:
                await self._let_initiator_fence(link, endpoint)
            link.proof = await self._fence(link, endpoint)
        link.ended.set()
        self._judge(link)
        self._changed(link.peer.name)
        if link.slots and endpoint is not None:
            await self._wait_over(link, ends_at)
            if link.proof is Proof.NONE:
                link.proof = await self._fence(link, endpoint)
                self._judge(link)
            if link.slots and link.proof is Proof.ENDED and self._role is Role.DECODE:
                self._retire(link)
        link.finished = True
        if link.slots:
            logger.warning(
                "%d staging slots are held: no proof that nothing of %s touches them", len(link.slots), link.peer.name
            )
        self._forget(link)
        self._changed(link.peer.name)

    async def _let_initiator_fence(self, link: LinkHolds, endpoint: Endpoint) -> None:
        """Progress what comes in meanwhile: a WRITE that lands whole is a proof."""
        with contextlib.suppress(RdmaKvError):
            endpoint.listen()
        await self._wait_over(link, asyncio.get_running_loop().time() + min(self._quiesce_s, INITIATOR_FIRST_S))

    @staticmethod
    async def _wait_over(link: LinkHolds, until: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await link.over.wait()

    async def _fence(self, link: LinkHolds, endpoint: Endpoint) -> Proof:
        """End our side. What that proves."""
        if self._role is Role.DECODE and not link.slots:
            return await self._end_only(link, endpoint)
        try:
            if self._role is Role.DECODE:
                await endpoint.fence_target()
            else:
                await endpoint.fence_source()
                await self._until_written(link)
        except Exception as exc:  # noqa: BLE001 - whatever a back-end raises, its end must be waited for no longer
            logger.info("no fence of the data link to %s: %s", link.peer.name, exc)
        else:
            self.counters["fences"] += 1
            return Proof.FENCED
        self.counters["fences_refused"] += 1
        return await self._end_only(link, endpoint) if self._role is Role.DECODE else Proof.NONE

    @staticmethod
    async def _end_only(link: LinkHolds, endpoint: Endpoint) -> Proof:
        try:
            await endpoint.fence_source()
        except Exception as exc:  # noqa: BLE001 - as above
            logger.info("the data link to %s could not be ended: %s", link.peer.name, exc)
            return Proof.NONE
        return Proof.ENDED

    async def _until_written(self, link: LinkHolds) -> None:
        """The WRITEs have ended with the fence; their tasks have yet to say so."""
        async with asyncio.timeout(self._quiesce_s):
            while writes := [task for entry in link.entries for task in entry.writes]:
                await asyncio.wait(writes)

    def _judge(self, link: LinkHolds) -> None:
        """Free what is proven."""
        ended = link.proof is Proof.ENDED and link.peer_over
        if link.proof is Proof.FENCED or ended:
            self._let_go(link)

    def _let_go(self, link: LinkHolds) -> None:
        for entry in link.entries:
            if isinstance(entry.machine, IncomingTransfer) and entry.machine.ended:
                self._perform(entry, entry.machine.quiesced(asyncio.get_running_loop().time()))
        for slot in tuple(link.slots):
            self.release(link.peer, slot)

    def _retire(self, link: LinkHolds) -> None:
        """Take the memory of the slots away. Our gathers and scatters do not use them, and our endpoint has ended."""
        if self._staging.full or self._staging.on_gpu:
            return
        try:
            for slot in link.slots - link.inaccessible:
                self._staging.retire(slot.index)
                link.inaccessible.add(slot)
        except OSError as exc:
            logger.warning("slots of %s cannot be retired: %s", link.peer.name, exc)
            return
        self._let_go(link)

    def _forget(self, link: LinkHolds) -> None:
        """Nothing is held and nothing more will happen; a link without a proof stays, for `settled`."""
        if not link.slots and (link.peer.lost is None or (link.finished and link.proof is not Proof.NONE)):
            self._links.pop(link.peer, None)
