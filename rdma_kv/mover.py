"""The half of an agent that moves: staging slots, links, the transport and the protocol.

The mover feeds the machines of `rdma_kv.protocol` and performs their actions; it decides nothing itself but the order in
which transfers get slots (round robin). It never touches an engine's pools: a `Packer` fills and empties slots.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final, Protocol

from rdma_kv.config import GpuConfig, StagingConfig, Timeouts
from rdma_kv.datalinks import DataLinks
from rdma_kv.engine_side import EngineSide
from rdma_kv.entry import Entry, Ready, StageTimes
from rdma_kv.errors import (
    ClosedError,
    LocalProtocolError,
    RdmaKvError,
    RemoteProtocolError,
    StagingFull,
    TransportError,
)
from rdma_kv.growth import Growth
from rdma_kv.holds import INITIATOR_FIRST_S, Holds
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.work import Work
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
    encode_notification,
)
from rdma_kv.peer import Peer, Tasks
from rdma_kv.planner import Box, LinkPlan, PageTables
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
from rdma_kv.transport.base import NOT_POSTED, Endpoint, WritePair
from rdma_kv.transport.outcomes import succeeded
from rdma_kv.transport.planes import Planes
from rdma_kv.turns import Turns
from rdma_kv.types import Descriptor, Interval, Role

logger = logging.getLogger(__name__)

__all__ = ["Entry", "Mover", "StageTimes"]

_FENCES_S: Final = 6.0  # that closing waits for; a fence takes some milliseconds, and a transport gives up after 5 s


class Matchmaker(Protocol):
    """Who takes the first messages that no open transfer waits for; see `rdma_kv.rendezvous`."""

    def on_expect(self, peer: Peer, message: Expect) -> None: ...

    def on_offer(self, peer: Peer, message: Offer) -> None: ...

    def on_offer_withdrawn(self, peer: Peer, abort: Abort) -> None: ...

    def on_offer_repeated(self, peer: Peer, message: Offer) -> bool: ...

    def take_offer(self, peer: Peer, name: TransferName) -> Offer | None: ...

    def on_abort(self, peer: Peer, message: Abort) -> None: ...

    def on_lost(self, peer: Peer) -> None: ...


class SlotWorker(Protocol):
    """What the mover needs of a packer."""

    def chunk(self, plan: LinkPlan, box: Box, tables: PageTables, packed_address: int) -> Chunk: ...

    async def gather(self, work: Work) -> int | None: ...

    async def scatter(self, work: Work) -> int | None: ...

    async def fired(self, events: Sequence[Any]) -> None: ...

    def use_lane(self, lane: str) -> None: ...


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
        self._role = role
        self._planes = planes
        self._packer = packer
        self._matchmaker = matchmaker
        self._config = staging
        self._timeouts = timeouts
        self._pool = SlotPool(staging.slots)
        self._gpu = gpu
        if engine is None:
            self._staging = Staging(staging, gpu)
        else:
            self._staging = Staging(staging, gpu, make_host=engine.make_host, share=engine.share)
        self._entries: dict[tuple[str, int], Entry] = {}  # numbered transfers, by (peer, number)
        self._sending: dict[tuple[str, TransferName], Entry] = {}  # sends under way, by peer and name
        self._expecting: dict[tuple[str, TransferName], Entry] = {}  # receives without OFFER, by peer and name
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
            on_notification=self._on_notification,
            on_exported=self._on_exported,
        )
        self._growth = Growth(
            staging, self._pool, self._staging, planes, self._links, self._tasks, grown=self._turns.hand_out
        )
        self.counters: Counter[str] = Counter()
        self.lanes: set[str] = set()  # that have carried a WRITE
        self._used_lanes: set[str] = set()  # that the packer knows of

    # --- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        await self._staging.open()
        (segment,) = self._staging.segments
        await self._planes.start(self._staging.regions(segment))

    async def close(self) -> None:
        """Fail what is under way, wait (bounded) until it has settled, and end the data plane."""
        self._closing = True
        loop = asyncio.get_running_loop()
        entries = [*self._entries.values(), *self._expecting.values()]
        for entry in entries:
            self._perform(entry, entry.machine.fail(ClosedError("the agent is closing"), loop.time()))
        self._note_quiet()
        try:
            async with asyncio.timeout(self._timeouts.quiesce + 1.0):
                await self._quiet.wait()
                for entry in entries:
                    await asyncio.shield(entry.outcome)
        except TimeoutError:
            logger.warning("closing while %d transfers have not settled", len(self._entries))
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
        return {
            "slots_total": self._pool.total,
            "slots_free": self._pool.free,
            "slots_held": {f"{peer}:{reason.value}": n for (peer, reason), n in self._pool.held().items()},
            "slots_retired": self._pool.retired,
            "transfers": len(self._entries) + len(self._expecting),
            "transports": self._planes.states(),
            "tasks": len(self._tasks),
            "counters": dict(self.counters + self._holds.counters),
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
        number = peer.numbers.take()
        entry = self._entry(peer, make(number), tables)
        entry.events += events
        self._entries[peer.name, number] = entry
        self._sending[peer.name, _name_of(entry.machine)] = entry
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
        name = _name_of(machine)
        if (peer.name, name) in self._expecting or any(
            e.peer is peer
            and isinstance(e.machine, IncomingTransfer)
            and not e.machine.ended
            and _name_of(e.machine) == name
            for e in self._entries.values()
        ):
            raise LocalProtocolError(f"{machine.key!r} is being received already")
        self._expecting[peer.name, name] = entry
        if peer.lost is not None:
            self._perform(entry, machine.link_lost(peer.lost, self._now()))
            return entry
        self._planes.prepare(peer.transport)
        self._arm(entry)
        offer = self._matchmaker.take_offer(peer, name)
        if offer is not None:
            self._match(entry, offer)
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
            slots = self._remote_slots(entry.peer)
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

    # --- what peers say ------------------------------------------------------------------------------------------------

    def on_message(self, peer: Peer, message: ControlMessage) -> None:
        """Called by the links for everything after the handshake.

        Raises:
            RemoteProtocolError: a message that our role never gets, or a number that was never used; the link ends.
        """
        if isinstance(message, Abort) and not message.transfer:
            self._matchmaker.on_abort(peer, message)
        elif self._role is Role.PREFILL:
            self._on_prefill(peer, message)
        else:
            self._on_decode(peer, message)

    def on_lost(self, peer: Peer, error: RdmaKvError) -> None:
        """The control stream to a peer has ended: its transfers fail, its data link closes."""
        entries = [entry for entry in [*self._entries.values(), *self._expecting.values()] if entry.peer is peer]
        if not self._links.closed:  # otherwise the transport has ended the endpoint
            self._holds.lost(peer, entries)
        for entry in entries:
            self._perform(entry, entry.machine.link_lost(error, self._now()))
        for place in [place for place, entry in self._expecting.items() if entry.peer is peer]:
            del self._expecting[place]  # what it gave ahead is held by the link; a new one may expect the same name
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

    def _on_prefill(self, peer: Peer, message: ControlMessage) -> None:
        now = self._now()
        match message:
            case Regions():
                self._links.on_regions(peer, message)
            case Expect():
                self.counters["expects"] += 1
                sending = self._sending.get((peer.name, TransferName.of(message)))
                if (
                    sending is not None
                    and sending.peer is peer
                    and not sending.machine.ended
                    and sending.machine.plan.route.digest == message.digest
                ):  # it crossed our OFFER
                    self.use_grants_ahead(sending, message)
                else:
                    self._matchmaker.on_expect(peer, message)
            case Grant() | Reject() | Ack() | Done() | Abort():
                entry = self._entries.get((peer.name, message.transfer))
                if entry is None:
                    self._check_number(peer, message.transfer, peer.numbers.given)
                    if isinstance(message, Grant) and message.slots:  # it crossed our last word
                        peer.send(Release(message.transfer, message.slots))
                    return
                machine = entry.machine
                assert isinstance(machine, OutgoingTransfer)
                if isinstance(message, Grant):
                    self._perform(entry, machine.granted(message, self._remote_slots(peer), now))
                elif isinstance(message, Reject):
                    self._perform(entry, machine.rejected(message, now))
                elif isinstance(message, Done):
                    self._perform(entry, machine.done(now))
                elif isinstance(message, Abort):
                    self._perform(entry, machine.aborted(message, now))
            case _:
                raise RemoteProtocolError(str(peer.id), f"{type(message).__name__} sent to a prefill agent")

    def _on_decode(self, peer: Peer, message: ControlMessage) -> None:
        now = self._now()
        match message:
            case Offer():
                self._on_offer(peer, message)
            case Done():
                return  # this agent of the prefill replica has nothing for us
            case Reject():
                expecting = self._expecting.get((peer.name, TransferName.of(message)))
                if expecting is not None and isinstance(expecting.machine, IncomingTransfer):
                    self._perform(expecting, expecting.machine.refused(message, now))
            case Release() | Start() | Finish() | Quiesced() | Abort():
                entry = self._entries.get((peer.name, message.transfer))
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
        entry = self._entries.get((peer.name, message.transfer))
        if entry is not None:
            machine = entry.machine
            assert isinstance(machine, IncomingTransfer)
            self._perform(entry, machine.offered(message, self._now()))
            return
        if message.transfer <= peer.numbers.high_water:
            if not self._matchmaker.on_offer_repeated(peer, message):
                self.counters["replays"] += 1
            return
        peer.numbers.high_water = message.transfer
        if (expecting := self._expecting.get((peer.name, TransferName.of(message)))) is not None:
            self._match(expecting, message)
        else:
            self._matchmaker.on_offer(peer, message)

    def _match(self, entry: Entry, offer: Offer) -> None:
        machine, peer = entry.machine, entry.peer
        assert isinstance(machine, IncomingTransfer)
        self._expecting.pop((peer.name, _name_of(machine)), None)
        self._entries[peer.name, offer.transfer] = entry
        self._links.export(peer)
        self._perform(entry, machine.offered(offer, self._now()))
        early, peer.early = peer.early, []
        for message in early:
            self._take_notification(peer, message)

    # --- the data link -------------------------------------------------------------------------------------------------

    def _remote_slots(self, peer: Peer) -> int:
        if peer.regions is None:
            raise RemoteProtocolError(str(peer.id), "GRANT before REGIONS")
        return peer.regions.num_slots

    def _on_exported(self, peer: Peer, error: RdmaKvError | None) -> None:
        """The peer knows our staging, or cannot be told: what waits for slots fails then."""
        for entry in [e for e in self._entries.values() if e.peer is peer]:
            self._perform(entry, [] if error is None else entry.machine.fail(error, self._now()))

    def _on_notification(self, peer: Peer, body: bytes) -> None:
        try:
            message = decode_notification(str(peer.id), body)
        except RemoteProtocolError as exc:
            logger.warning("%s", exc)
            self.counters["bad_notifications"] += 1
            return
        self._take_notification(peer, message)

    def _take_notification(self, peer: Peer, message: Notification) -> None:
        entry = self._entries.get((peer.name, message.transfer))
        machine = entry.machine if entry is not None else None
        if entry is None and message.transfer > peer.numbers.high_water and len(peer.early) < self._pool.total:
            peer.early.append(message)  # a slot given ahead was written before the OFFER was read
            return
        if entry is None or not isinstance(machine, IncomingTransfer):
            self.counters["stale_notifications"] += 1
            return
        actions = machine.notified(message, self._now())
        if actions is None:
            self.counters["stale_notifications"] += 1
            return
        self._perform(entry, actions)

    # --- actions -------------------------------------------------------------------------------------------------------

    def _perform(self, entry: Entry, actions: list[Action]) -> None:
        """Obey, then give slots to whoever can use them, and watch the deadline."""
        for action in actions:
            self._act(entry, action)
        if entry.machine.error is not None and not entry.failed.done():
            entry.failed.set_result(entry.machine.error)
        self._arm(entry)
        if entry.machine.settled and entry.outcome.done():
            self._forget(entry)
        self._note_quiet()
        self._turns.note(entry)
        self._turns.hand_out()

    def _act(self, entry: Entry, action: Action) -> None:
        match action:
            case SendMessage(message):
                entry.peer.send(message)
            case Gather(slot, box):
                self.counters["boxes"] += 1
                self._tasks.spawn(self._gather(entry, slot, box), f"gather {entry.machine.key}")
            case PostWrite(slot, target, box, checksum):
                self._pool.change(slot, Hold.WRITE)
                task = self._tasks.spawn(self._write(entry, slot, target, box, checksum), f"write {entry.machine.key}")
                entry.writes.add(task)
                task.add_done_callback(entry.writes.discard)
            case Scatter(slot, box, checksum):
                self.counters["boxes"] += 1
                self._pool.change(slot, Hold.SCATTER)
                self._tasks.spawn(self._scatter(entry, slot, box, checksum), f"scatter {entry.machine.key}")
            case ReleaseSlot(slot):
                self._holds.release(entry.peer, slot)
            case KeepSlot(slot):
                self._holds.keep(entry.peer, slot)
            case Listen(on):
                self._links.listen(entry.peer, on=on)
            case Finished(error):
                if not entry.outcome.done():
                    entry.outcome.set_result(error)

    async def _gather(self, entry: Entry, slot: SlotRef, box: Box) -> None:
        machine = entry.machine
        assert isinstance(machine, OutgoingTransfer)
        begin = self._now()
        result = await self._pack(entry, slot, box, self._packer.gather, checksum=bool(entry.peer.identity.checksum))
        if isinstance(result, RdmaKvError):
            self._perform(entry, machine.gather_failed(slot, result, self._now()))
            return
        entry.times.gather += self._now() - begin
        self._perform(entry, machine.gathered(slot, result))

    async def _pack(
        self,
        entry: Entry,
        slot: SlotRef,
        box: Box,
        kernel: Callable[[Work], Awaitable[int | None]],
        *,
        checksum: bool = False,
        expected: int | None = None,
    ) -> RdmaKvError | int | None:
        """Run gather or scatter of a box in a slot: what it returns, or the error for caller and peer if it goes wrong."""
        staging = self._staging
        try:
            chunk = self._packer.chunk(entry.machine.plan, box, entry.tables, staging.address(slot.index))
            bounce = staging.bounce(slot.index, device_staging=entry.peer.device_staging)
            return await kernel(Work(chunk, bounce, checksum, expected, entry.after(box)))
        except RdmaKvError as exc:
            return exc
        except Exception as exc:  # noqa: BLE001 - a kernel's own failure
            return LocalProtocolError(f"gather or scatter failed: {exc!r}")

    async def _write(self, entry: Entry, slot: SlotRef, target: SlotRef, box: Box, checksum: int | None) -> None:
        machine, peer = entry.machine, entry.peer
        assert isinstance(machine, OutgoingTransfer)
        begin = self._now()
        posted = False
        try:
            if peer.writable is None or peer.regions is None:
                raise TransportError(peer.transport, NOT_POSTED, "no data link")
            await asyncio.shield(peer.writable)
            await peer.until_may_post()
            if peer.lost is not None:
                raise TransportError(peer.transport, NOT_POSTED, f"the link has ended: {peer.lost}")
            if machine.error is not None:
                raise TransportError(peer.transport, NOT_POSTED, f"given up meanwhile: {machine.error}")
            if peer.unwritable is not None or peer.endpoint is None:
                raise TransportError(
                    peer.transport, NOT_POSTED, f"no data link: {peer.unwritable}"
                ) from peer.unwritable
            num_bytes = machine.plan.box_bytes(box)
            remote, device = peer.regions.place(target.index)
            local = self._staging.descriptor(slot.index, num_bytes, device_staging=peer.device_staging)
            pair = WritePair(local, Descriptor(remote, num_bytes, device))
            note = Notification(
                machine.number,
                target.index,
                target.epoch,
                box.move,
                (box.layers.start, box.layers.end),
                (box.tokens.start, box.tokens.end),
                checksum,
            )
            posted = True
            await peer.endpoint.write([pair], encode_notification(note))
        except Exception as exc:  # noqa: BLE001 - told to caller and peer
            error = exc if isinstance(exc, RdmaKvError) else LocalProtocolError(f"WRITE failed: {exc!r}")
            posted = posted and not (isinstance(exc, TransportError) and exc.status == NOT_POSTED)
            self._perform(entry, machine.write_failed(slot, error, self._now(), posted=posted))
            return
        except asyncio.CancelledError:
            error = TransportError(peer.transport, "closed", "the data link was closed")
            self._perform(entry, machine.write_failed(slot, error, self._now(), posted=posted))
            raise
        entry.times.write += self._now() - begin
        self.lanes.add(self._use_lane(peer, peer.endpoint))
        self._perform(entry, machine.written(slot, self._now()))

    async def _scatter(self, entry: Entry, slot: SlotRef, box: Box, checksum: int | None) -> None:
        machine = entry.machine
        assert isinstance(machine, IncomingTransfer)
        begin = self._now()
        if entry.peer.endpoint is not None:
            self._use_lane(entry.peer, entry.peer.endpoint)
        if (error := await self._until_free(entry)) is not None:
            self._perform(entry, machine.scatter_failed(slot, error, self._now()))
            return
        result = await self._pack(entry, slot, box, self._packer.scatter, expected=checksum)
        if isinstance(result, RdmaKvError):
            self._perform(entry, machine.scatter_failed(slot, result, self._now()))
            return
        if checksum is not None and result is not None:
            self.counters["checksum_failures"] += 1
            self._perform(entry, machine.scatter_damaged(slot, box, checksum, result, self._now()))
            return
        entry.times.scatter += self._now() - begin
        self._perform(entry, machine.scattered(slot, self._now()))

    async def _until_free(self, entry: Entry) -> RdmaKvError | None:
        """Wait for the events before which no page may be written, on the host: what is queued cannot be called back.

        Returns:
            Why the transfer has failed meanwhile.
        """
        if not entry.before:
            return None
        fired = asyncio.ensure_future(self._packer.fired(entry.before))
        try:
            both: list[asyncio.Future[Any]] = [fired, entry.failed]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not fired.done():
                return entry.failed.result()
            fired.result()
        except RdmaKvError as exc:
            return exc
        finally:
            fired.cancel()
        entry.before = ()
        return None

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

    def _use_lane(self, peer: Peer, endpoint: Endpoint) -> str:
        """What carries the KV of a link, in honest words. Kernels must outrun it."""
        lane = endpoint.lane
        if self._gpu is not None and not peer.device_staging:
            lane = f"pinned+{endpoint.host_lane}"
        elif lane == "unknown":  # to NIXL's side that only receives; the handshake told
            lane = peer.device_lane or lane
        if lane not in self._used_lanes:
            self._used_lanes.add(lane)
            self._packer.use_lane(lane)
        return lane

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

    def _forget(self, entry: Entry) -> None:
        machine = entry.machine
        self._entries.pop((entry.peer.name, machine.number), None)
        self._turns.forget(entry)
        place = (entry.peer.name, _name_of(machine))
        for table in (self._expecting, self._sending):
            if table.get(place) is entry:
                del table[place]

    def _note_quiet(self) -> None:
        if not self._closing:
            return
        if all(entry.machine.ended for entry in [*self._entries.values(), *self._expecting.values()]):
            self._quiet.set()
        else:
            self._quiet.clear()


def _name_of(machine: OutgoingTransfer | IncomingTransfer) -> TransferName:
    route = machine.plan.route
    return TransferName(machine.key, machine.attempt, route.prefill_replica, route.decode_replica)
