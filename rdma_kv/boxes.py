"""What a box goes through in a staging slot: gather and WRITE where it is sent, scatter where it is received.

Each step is a task, and ends in one word to the machine of the transfer. It is apart from the mover because all that a
box waits for is awaited here: kernels, the data link, the right to post to a peer, CUDA events of the engine. What decides
does not wait.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from rdma_kv.entry import Entry
from rdma_kv.errors import LocalProtocolError, RdmaKvError, TransportError
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.work import Work
from rdma_kv.messages import Notification, encode_notification
from rdma_kv.peer import Peer
from rdma_kv.planner import Box, LinkPlan, PageTables
from rdma_kv.protocol.actions import Action
from rdma_kv.protocol.incoming import IncomingTransfer
from rdma_kv.protocol.outgoing import OutgoingTransfer
from rdma_kv.slots import Hold, SlotPool, SlotRef
from rdma_kv.staging import Staging
from rdma_kv.tasks import Tasks
from rdma_kv.transport.base import NOT_POSTED, Endpoint, WritePair
from rdma_kv.types import Descriptor


class SlotWorker(Protocol):
    """What the mover needs of a packer."""

    def chunk(self, plan: LinkPlan, box: Box, tables: PageTables, packed_address: int) -> Chunk: ...

    async def gather(self, work: Work) -> int | None: ...

    async def scatter(self, work: Work) -> int | None: ...

    async def fired(self, events: Sequence[Any]) -> None: ...

    def use_lane(self, lane: str) -> None: ...


class Boxes:
    """The work on the boxes of all transfers of one agent.

    Args:
        perform: obeys the actions of a transfer's machine.

    Attributes:
        lanes: that have carried a WRITE.
    """

    def __init__(
        self,
        packer: SlotWorker,
        pool: SlotPool,
        staging: Staging,
        tasks: Tasks,
        *,
        perform: Callable[[Entry, list[Action]], None],
    ) -> None:
        self._packer = packer
        self._pool = pool
        self._staging = staging
        self._tasks = tasks
        self._perform = perform
        self.counters: Counter[str] = Counter()
        self.lanes: set[str] = set()
        self._used_lanes: set[str] = set()  # that the packer knows of

    # --- gather and scatter --------------------------------------------------------------------------------------------

    def gather(self, entry: Entry, slot: SlotRef, box: Box) -> None:
        """Begin to pack the box from the caller's pages into the slot."""
        self.counters["boxes"] += 1
        self._tasks.spawn(self._gather(entry, slot, box), f"gather {entry.machine.key}")

    def scatter(self, entry: Entry, slot: SlotRef, box: Box, checksum: int | None) -> None:
        """Begin to unpack the box from the slot into the caller's pages."""
        self.counters["boxes"] += 1
        self._pool.change(slot, Hold.SCATTER)
        self._tasks.spawn(self._scatter(entry, slot, box, checksum), f"scatter {entry.machine.key}")

    async def _gather(self, entry: Entry, slot: SlotRef, box: Box) -> None:
        machine = entry.machine
        assert isinstance(machine, OutgoingTransfer)
        begin = _now()
        result = await self._pack(entry, slot, box, self._packer.gather, checksum=bool(entry.peer.identity.checksum))
        if isinstance(result, RdmaKvError):
            self._perform(entry, machine.gather_failed(slot, result, _now()))
            return
        entry.times.gather += _now() - begin
        self._perform(entry, machine.gathered(slot, result))

    async def _scatter(self, entry: Entry, slot: SlotRef, box: Box, checksum: int | None) -> None:
        machine = entry.machine
        assert isinstance(machine, IncomingTransfer)
        begin = _now()
        if entry.peer.endpoint is not None:
            self._use_lane(entry.peer, entry.peer.endpoint)
        if (error := await self._until_free(entry)) is not None:
            self._perform(entry, machine.scatter_failed(slot, error, _now()))
            return
        result = await self._pack(entry, slot, box, self._packer.scatter, expected=checksum)
        if isinstance(result, RdmaKvError):
            self._perform(entry, machine.scatter_failed(slot, result, _now()))
            return
        if checksum is not None and result is not None:
            self.counters["checksum_failures"] += 1
            self._perform(entry, machine.scatter_damaged(slot, box, checksum, result, _now()))
            return
        entry.times.scatter += _now() - begin
        self._perform(entry, machine.scattered(slot, _now()))

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

    # --- WRITE ---------------------------------------------------------------------------------------------------------

    def write(self, entry: Entry, slot: SlotRef, target: SlotRef, box: Box, checksum: int | None) -> None:
        """Begin to WRITE the box from our slot into the peer's slot `target`."""
        self._pool.change(slot, Hold.WRITE)
        task = self._tasks.spawn(self._write(entry, slot, target, box, checksum), f"write {entry.machine.key}")
        entry.writes.add(task)
        task.add_done_callback(entry.writes.discard)

    async def _write(self, entry: Entry, slot: SlotRef, target: SlotRef, box: Box, checksum: int | None) -> None:
        machine, peer = entry.machine, entry.peer
        assert isinstance(machine, OutgoingTransfer)
        begin = _now()
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
            self._perform(entry, machine.write_failed(slot, error, _now(), posted=posted))
            return
        except asyncio.CancelledError:
            error = TransportError(peer.transport, "closed", "the data link was closed")
            self._perform(entry, machine.write_failed(slot, error, _now(), posted=posted))
            raise
        entry.times.write += _now() - begin
        self.lanes.add(self._use_lane(peer, peer.endpoint))
        self._perform(entry, machine.written(slot, _now()))

    # --- lanes ---------------------------------------------------------------------------------------------------------

    def _use_lane(self, peer: Peer, endpoint: Endpoint) -> str:
        """What carries the KV of a link, in honest words. Kernels must outrun it."""
        lane = endpoint.lane
        if self._staging.on_gpu and not peer.device_staging:
            lane = f"pinned+{endpoint.host_lane}"
        elif lane == "unknown":  # to NIXL's side that only receives; the handshake told
            lane = peer.device_lane or lane
        if lane not in self._used_lanes:
            self._used_lanes.add(lane)
            self._packer.use_lane(lane)
        return lane


def _now() -> float:
    return asyncio.get_running_loop().time()
