"""The half of an agent that moves: staging slots, links, the transport and the protocol.

The mover feeds the machines of `rdma_kv.protocol` and performs their actions; it decides nothing itself. What peers say comes
in by `hearing`, who gets a slot is in `turns`, and what a box goes through in one is in `boxes`. The mover opens transfers,
drives their deadlines, and ends them. It never touches an engine's pools: a `Packer` fills and empties slots.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Final

from rdma_kv.boxes import Boxes, SlotWorker
from rdma_kv.config import GpuConfig, StagingConfig, Timeouts
from rdma_kv.datalinks import DataLinks
from rdma_kv.engine_side import EngineSide
from rdma_kv.entry import Entry, Ready
from rdma_kv.errors import ClosedError, RdmaKvError, StagingFull
from rdma_kv.growth import Growth
from rdma_kv.hearing import Hearing, Matchmaker, remote_slots
from rdma_kv.holds import INITIATOR_FIRST_S, Holds
from rdma_kv.messages import ControlMessage, Expect
from rdma_kv.peer import Peer
from rdma_kv.planner import PageTables
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
from rdma_kv.protocol.outgoing import OutgoingTransfer
from rdma_kv.slots import Hold, SlotPool, SlotRef
from rdma_kv.staging import Staging
from rdma_kv.tasks import Tasks
from rdma_kv.transfers import Transfers, name_of
from rdma_kv.transport.outcomes import succeeded
from rdma_kv.transport.planes import Planes
from rdma_kv.turns import Turns
from rdma_kv.types import Interval, Role

logger = logging.getLogger(__name__)

_FENCES_S: Final = 6.0  # that closing waits for; a fence takes some milliseconds, and a transport gives up after 5 s


class Mover:
    """Transfers of one agent over all its links.

    Args:
        matchmaker: takes EXPECTs, and OFFERs that nobody has opened a transfer for.
        role: a mover sends (prefill) or receives (decode), so one pool serves it without circles.
        gpu: where the packer's pools are; None is host memory.
        engine: the process of the pools, if it is another one.
    """

    def __init__(
        self,
        role: Role,
        planes: Planes,
        packer: SlotWorker,
        matchmaker: Matchmaker,
        *,
        staging: StagingConfig,
        timeouts: Timeouts,
        gpu: GpuConfig | None = None,
        engine: EngineSide | None = None,
    ) -> None:
        self._planes = planes
        self._matchmaker = matchmaker
        self._config = staging
        self._timeouts = timeouts
        self._pool = SlotPool(staging.slots)
        if engine is None:
            self._staging = Staging(staging, gpu)
        else:
            self._staging = Staging(staging, gpu, make_host=engine.make_host, share=engine.share)
        self._transfers = Transfers()
        self._ahead: set[IncomingTransfer] = set()  # those that had slots given ahead when last looked at
        self._quiet = asyncio.Event()  # no transfer is on its way to an end
        self._tasks = Tasks()
        self._closing = False
        self._planes_ended = False
        self._holds = Holds(
            role, self._pool, self._staging, timeouts.quiesce, perform=self._perform, changed=self._on_holds_changed
        )
        self._turns = Turns(self._pool, perform=self._perform, on_scarce=self._on_scarce)
        self._links = DataLinks(
            planes,
            self._staging,
            self._tasks,
            former_ended=self._holds.ended,
            on_notification=lambda peer, body: self._hearing.on_notification(peer, body),  # noqa: PLW0108 - made below
            on_exported=self._on_exported,
        )
        self._growth = Growth(
            staging, self._pool, self._staging, planes, self._links, self._tasks, grown=self._turns.hand_out
        )
        self._boxes = Boxes(packer, self._pool, self._staging, self._tasks, perform=self._perform)
        self._hearing = Hearing(
            role,
            self._transfers,
            self._pool,
            self._links,
            matchmaker,
            perform=self._perform,
            use_grants_ahead=lambda entry, message: self.use_grants_ahead(entry, message),  # noqa: PLW0108 - as replaced
        )
        self.counters: Counter[str] = Counter()

    @property
    def lanes(self) -> set[str]:
        """Those that have carried a WRITE."""
        return self._boxes.lanes

    # --- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._staging.open()
        (segment,) = self._staging.segments
        await self._planes.start(self._staging.regions(segment))

    async def close(self) -> None:
        """Fail what is under way, wait (bounded) until it has settled, and end the data plane."""
        self._closing = True
        loop = asyncio.get_running_loop()
        entries = list(self._transfers)
        for entry in entries:
            self._perform(entry, entry.machine.fail(ClosedError("the agent is closing"), loop.time()))
        self._note_quiet()
        try:
            async with asyncio.timeout(self._timeouts.quiesce + 1.0):
                await self._quiet.wait()
                for entry in entries:
                    await asyncio.shield(entry.outcome)
        except TimeoutError:
            logger.warning("closing while %d transfers have not settled", len(self._transfers.numbered))
        await self._holds.close(INITIATOR_FIRST_S + _FENCES_S)
        self._links.closed = True
        try:
            await self._planes.close()
            self._planes_ended = True
        finally:
            await self._tasks.close()
            for entry in entries:
                if entry.timer is not None:
                    entry.timer.cancel()

    async def free(self, *, kernels_ended: bool) -> None:
        """After `close`, when the packer is closed too: give staging back, or keep it, if something may still touch it."""
        held = {reason for _, reason in self._pool.held()} & {Hold.UNPROVEN, Hold.GRANTED, Hold.WRITE}
        if held or self._pool.retired or not (kernels_ended and self._planes_ended):
            self._staging.retain()
        await self._staging.close()

    def stats(self) -> dict[str, Any]:
        """Slots, transfers, transports and tasks: `free + sum(held) + retired == total`."""
        counted = self.counters + self._boxes.counters + self._hearing.counters + self._holds.counters
        return {
            "slots_total": self._pool.total,
            "slots_free": self._pool.free,
            "slots_held": {f"{peer}:{reason.value}": n for (peer, reason), n in self._pool.held().items()},
            "slots_retired": self._pool.retired,
            "transfers": len(self._transfers),
            "transports": self._planes.states(),
            "tasks": len(self._tasks),
            "counters": dict(counted),
        }

    # --- transfers -----------------------------------------------------------------------------------------------------

    def open_outgoing(
        self,
        peer: Peer,
        make: Callable[[int], OutgoingTransfer],
        tables: PageTables,
        pushes: Iterable[tuple[int, Interval, Interval]],
        events: Iterable[Ready] = (),
    ) -> Entry:
        """Offer a transfer to a peer.

        Args:
            make: makes the machine for the link's next number.
            pushes: what is ready already, as for `push`.
            events: of them, when kernels that still run are done.
        """
        entry = self._entry(peer, make(peer.numbers.take()), tables)
        entry.events += events
        self._transfers.offer(entry)
        if peer.lost is not None:
            self._perform(entry, entry.machine.link_lost(peer.lost, self._now()))
            return entry
        self._planes.prepare(peer.transport)  # both sides start theirs while they look for each other
        if peer.unwritable is not None:
            self._links.make_writable(peer)  # what failed for another transfer may work now
        machine = entry.machine
        assert isinstance(machine, OutgoingTransfer)
        self._perform(entry, machine.offer(pushes))
        return entry

    def open_incoming(
        self, peer: Peer, machine: IncomingTransfer, tables: PageTables, after: tuple[Any, ...] = ()
    ) -> Entry:
        """Expect a transfer from a peer; an OFFER that came before is taken now.

        Args:
            after: CUDA events before which no page is written.

        Raises:
            LocalProtocolError: this key is expected from this peer already. Nothing has changed.
        """
        entry = self._entry(peer, machine, tables)
        entry.before = after
        self._transfers.expect(entry)
        if peer.lost is not None:
            self._perform(entry, machine.link_lost(peer.lost, self._now()))
            return entry
        self._planes.prepare(peer.transport)
        self._arm(entry)
        offer = self._matchmaker.take_offer(peer, name_of(machine))
        if offer is not None:
            self._hearing.match(entry, offer)
        return entry

    def push(
        self,
        entry: Entry,
        component: int,
        layers: Interval,
        tokens: Interval,
        event: Any = None,  # noqa: ANN401 - a CUDA event
    ) -> None:
        """See `OutgoingTransfer.push`. The pages are final when `event` has fired, if there is one."""
        assert isinstance(entry.machine, OutgoingTransfer)
        if event is not None:
            entry.events.append(Ready(component, layers, tokens, event))
        self._perform(entry, entry.machine.push(component, layers, tokens, self._now()))

    def finish(self, entry: Entry, metadata: dict[str, Any]) -> None:
        """See `OutgoingTransfer.finish`."""
        assert isinstance(entry.machine, OutgoingTransfer)
        self._perform(entry, entry.machine.finish(metadata, self._now()))

    def use_grants_ahead(self, entry: Entry, message: Expect) -> None:
        """Slots that came with the EXPECT of a transfer that we send."""
        assert isinstance(entry.machine, OutgoingTransfer)
        if message.grants:
            slots = remote_slots(entry.peer)
            self._perform(entry, entry.machine.given_ahead(message, slots, self._now()))

    def give_grants_ahead(self, entry: Entry) -> list[tuple[int, int]]:
        """Slots for the EXPECT of a receive, from the only agent that sends to it: (slot, epoch) each.

        It saves a small request the round trip of OFFER and GRANT. None where the link has not exported our slots yet, or
        the request does not fit whole into what is left of a quarter of the pool.
        """
        machine, peer = entry.machine, entry.peer
        assert isinstance(machine, IncomingTransfer)
        exported = peer.exported
        if machine.state is not IncomingState.EXPECTING or exported is None or not succeeded(exported):
            return []
        if self._turns.is_suspect(peer):
            return []
        self._ahead = {m for m in self._ahead if m.state is IncomingState.EXPECTING and m.given_ahead}
        room = self._pool.working // 4 - sum(m.given_ahead for m in self._ahead)
        count = machine.plan.count_boxes(machine.wanted, room) if room > 0 else 0
        slots: list[SlotRef] = []
        while len(slots) < count <= room and (slot := self._pool.acquire(peer.name, Hold.GRANTED)) is not None:
            slots.append(slot)
        machine.give_ahead(slots)
        if slots:
            self._ahead.add(machine)
        self.counters["slots_ahead"] += len(slots)
        return [(slot.index, slot.epoch) for slot in slots]

    def fail(self, entry: Entry, error: RdmaKvError) -> None:
        """Give a transfer up; the peer is told."""
        self._perform(entry, entry.machine.fail(error, self._now()))

    # --- links ---------------------------------------------------------------------------------------------------------

    def on_message(self, peer: Peer, message: ControlMessage) -> None:
        """Called by the links for everything after the handshake.

        Raises:
            RemoteProtocolError: a message that our role never gets, or a number that was never used; the link ends.
        """
        self._hearing.on_message(peer, message)

    def on_lost(self, peer: Peer, error: RdmaKvError) -> None:
        """The control stream to a peer has ended: its transfers fail, its data link closes."""
        entries = self._transfers.of(peer)
        if not self._links.closed:  # otherwise the transport has ended the endpoint
            self._holds.lost(peer, entries)
        for entry in entries:
            self._perform(entry, entry.machine.link_lost(error, self._now()))
        self._transfers.lost(peer)
        self._matchmaker.on_lost(peer)
        self._links.lost(peer)
        self._turns.trust(peer)

    def on_suspect(self, peer: Peer) -> None:
        """A peer is silent: it gets no more slots. (Its WRITEs ask `Peer.until_may_post`.)"""
        self._turns.suspect(peer)

    def on_alive(self, peer: Peer) -> None:
        """A suspect peer was heard again."""
        self._turns.trust(peer)
        self._turns.hand_out()

    def on_dead(self, peer_name: str) -> None:
        """The process of an incarnation is proven dead."""
        self._holds.on_dead(peer_name)

    def on_settle(self, peer: Peer) -> None:
        """A peer that has come back says that all WRITEs of its former links are over."""
        self._holds.on_settle(peer)

    async def settled(self, peer_name: str) -> bool:
        """Whether all that we posted on former links to an incarnation is over; waits `quiesce` at most."""
        return await self._holds.settled(peer_name)

    def _on_exported(self, peer: Peer, error: RdmaKvError | None) -> None:
        """The peer knows our staging, or cannot be told: what waits for slots fails then."""
        for entry in [e for e in self._transfers.numbered if e.peer is peer]:
            self._perform(entry, [] if error is None else entry.machine.fail(error, self._now()))

    # --- actions -------------------------------------------------------------------------------------------------------

    def _perform(self, entry: Entry, actions: list[Action]) -> None:
        """Obey, then give slots to whoever can use them, and watch the deadline."""
        for action in actions:
            self._act(entry, action)
        if entry.machine.error is not None and not entry.failed.done():
            entry.failed.set_result(entry.machine.error)
        self._arm(entry)
        if entry.machine.settled and entry.outcome.done():
            self._transfers.forget(entry)
            self._turns.forget(entry)
        self._note_quiet()
        self._turns.note(entry)
        self._turns.hand_out()

    def _act(self, entry: Entry, action: Action) -> None:
        match action:
            case SendMessage(message):
                entry.peer.send(message)
            case Gather(slot, box):
                self._boxes.gather(entry, slot, box)
            case PostWrite(slot, target, box, checksum):
                self._boxes.write(entry, slot, target, box, checksum)
            case Scatter(slot, box, checksum):
                self._boxes.scatter(entry, slot, box, checksum)
            case ReleaseSlot(slot):
                self._holds.release(entry.peer, slot)
            case KeepSlot(slot):
                self._holds.keep(entry.peer, slot)
            case Listen(on):
                self._links.listen(entry.peer, on=on)
            case Finished(error):
                if not entry.outcome.done():
                    entry.outcome.set_result(error)

    # --- slots ---------------------------------------------------------------------------------------------------------

    def _on_scarce(self, peer_name: str) -> None:
        """Unproven slots keep transfers with a peer from theirs: add memory, or wait for a proof, or end them."""
        if self._holds.fencing or self._growth.request(peer_name):
            return
        if self._holds.hopeful or not self._pool.is_blocked(peer_name):
            return
        holders = ", ".join(f"{count} by {peer}" for peer, count in sorted(self._pool.unproven().items()))
        text = f"no staging slot can be had: of {self._pool.working} are held without a proof {holders}; "
        text += f"staging.max_staging_bytes allows no more than {self._config.max_slots} slots"
        for entry in self._turns.wanting(peer_name):
            self._perform(entry, entry.machine.fail(StagingFull(entry.machine.key, "staging", text), self._now()))

    def _on_holds_changed(self, peer_name: str) -> None:
        if not self._closing:
            if self._pool.usable < self._config.slots and self._pool.retired:
                self._growth.request(peer_name)  # in place of what was retired
            self._turns.hand_out()

    # --- small things --------------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _entry(self, peer: Peer, machine: OutgoingTransfer | IncomingTransfer, tables: PageTables) -> Entry:
        if self._closing:
            raise ClosedError("the agent is closed")
        loop = asyncio.get_running_loop()
        return Entry(peer, machine, tables, loop.create_future(), loop.create_future())

    def _arm(self, entry: Entry) -> None:
        """Have the machine's deadline driven by a timer."""
        deadline = entry.machine.deadline
        if deadline == entry.timer_at:
            return
        if entry.timer is not None:
            entry.timer.cancel()
        entry.timer_at = deadline
        entry.timer = None
        if deadline is not None:
            entry.timer = asyncio.get_running_loop().call_at(deadline, self._tick, entry)

    def _tick(self, entry: Entry) -> None:
        entry.timer_at = None
        self._perform(entry, entry.machine.tick(self._now()))

    def _note_quiet(self) -> None:
        if not self._closing:
            return
        if all(entry.machine.ended for entry in self._transfers):
            self._quiet.set()
        else:
            self._quiet.clear()
