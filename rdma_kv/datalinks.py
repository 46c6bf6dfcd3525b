"""The data links of an agent: where each peer's staging lies, where ours was told, and when we listen.

Theory of operation. A link gets a data endpoint when the first transfer needs it. The target tells the initiator in REGIONS
where its slots lie, before the first GRANT; when segments were added it tells all initiators again, before it grants a
slot of them. The initiator then connects again, with the newer metadata. What a peer says is checked before it is used.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any, Final

from rdma_kv.errors import RdmaKvError, RemoteProtocolError
from rdma_kv.messages import MAX_SLOTS, Regions
from rdma_kv.peer import Peer
from rdma_kv.staging import Staging
from rdma_kv.tasks import Tasks
from rdma_kv.transport.base import Endpoint
from rdma_kv.transport.outcomes import succeeded
from rdma_kv.transport.planes import Planes

_LINGER_S: Final = 0.1
"""Of listening. Each change of mind costs a message, and with NIXL polling meanwhile costs little."""


class DataLinks:
    """The data plane of the links of one agent.

    Args:
        former_ended: waits until the data endpoints of former links to an incarnation have ended.
        on_notification: takes what arrives.
        on_exported: told when a first export has ended, well or not.
    """

    def __init__(
        self,
        planes: Planes,
        staging: Staging,
        tasks: Tasks,
        *,
        former_ended: Callable[[str], Coroutine[Any, Any, None]],
        on_notification: Callable[[Peer, bytes], None],
        on_exported: Callable[[Peer, RdmaKvError | None], None],
    ) -> None:
        self._planes = planes
        self._staging = staging
        self._tasks = tasks
        self._former_ended = former_ended
        self._on_notification = on_notification
        self._on_exported = on_exported
        self._exporting: dict[Peer, None] = {}  # links that were told of our staging, or are being told
        self.closed = False

    # --- their staging -------------------------------------------------------------------------------------------------

    def on_regions(self, peer: Peer, message: Regions) -> None:
        """A peer tells where its slots lie.

        Raises:
            RemoteProtocolError: it cannot be so, or does not begin with what it told before.
        """
        check_regions(peer, message)
        peer.regions = message
        self.make_writable(peer)

    def make_writable(self, peer: Peer) -> None:
        """Connect to what the peer told; again where that failed."""
        if peer.regions is not None and not self.closed:
            peer.unwritable = None
            if peer.writable is None or peer.writable.done():  # else it takes the latest
                peer.writable = self._tasks.spawn(self._connect(peer), f"connect {peer.name}")

    async def _connect(self, peer: Peer) -> None:
        """Make the peer's slots writable, as it told last. A failure is kept for the WRITEs that await it."""
        connected: Regions | None = None
        try:
            while peer.regions is not None and peer.regions is not connected:
                connected = peer.regions
                peer.endpoint = await self._endpoint(peer)
                await peer.endpoint.connect(connected.metadata)
        except RdmaKvError as exc:
            peer.unwritable = exc

    async def _endpoint(self, peer: Peer) -> Endpoint:
        """The data link to a peer; a link before it to the same incarnation has ended first."""
        await self._former_ended(peer.name)
        plane = await self._planes.plane(peer.transport)
        return plane.transport.endpoint(peer.name)

    # --- our staging ---------------------------------------------------------------------------------------------------

    def export(self, peer: Peer) -> None:
        """Tell an initiator where our staging lies, unless it was told. `peer.exported` is done when GRANTs can follow."""
        if peer.exported is None:
            self._exporting[peer] = None
            peer.exported = self._tasks.spawn(self._export(peer), f"export to {peer.name}")
            peer.exported.add_done_callback(lambda task: self._exported(peer, task))

    async def export_again(self) -> None:
        """Tell all initiators of the segments that were added. A link on which that fails is given up."""
        await asyncio.gather(*(self._export_again(peer) for peer in tuple(self._exporting)))

    def lost(self, peer: Peer) -> None:
        """The link has ended: nothing is connected or exported any more."""
        self._exporting.pop(peer, None)
        for task in (peer.writable, peer.exported):
            if task is not None:
                task.cancel()

    async def _export(self, peer: Peer) -> None:
        peer.endpoint = await self._endpoint(peer)
        peer.endpoint.on_notification(lambda body: self._on_notification(peer, body))
        segments = []
        for each in self._staging.segments:
            place = each.region(on_device=peer.device_staging)
            segments.append((place.address, each.num_slots, place.device))
        metadata = await peer.endpoint.metadata()  # of at least these segments: they are registered before they count
        peer.send(Regions(segments, self._staging.slot_bytes, metadata))

    async def _export_again(self, peer: Peer) -> None:
        if peer.exported is not None:
            await asyncio.wait([peer.exported])
        if peer.lost is not None or peer.exported is None or not succeeded(peer.exported):
            return  # it will be told all when it is told anything
        try:
            await self._export(peer)
        except RdmaKvError as exc:
            peer.give_up(exc)

    def _exported(self, peer: Peer, task: asyncio.Task[None]) -> None:
        """REGIONS is out: grants can follow. Or it cannot be: what waits fails, and the next transfer tries again."""
        error = None if task.cancelled() else task.exception()
        if error is not None and peer.exported is task:
            peer.exported = None
            self._exporting.pop(peer, None)
        self._on_exported(peer, error if isinstance(error, RdmaKvError) else None)

    # --- listening -----------------------------------------------------------------------------------------------------

    def listen(self, peer: Peer, *, on: bool) -> None:
        """Listen to a peer's notifications, and a little beyond the last transfer, as the next one may follow at once."""
        if peer.endpoint is None:
            return
        if on:
            if peer.lingering is None:
                peer.endpoint.listen()
            else:
                peer.lingering.cancel()
                peer.lingering = None
        elif peer.lingering is None:
            peer.lingering = asyncio.get_running_loop().call_later(_LINGER_S, self._unlisten, peer, peer.endpoint)
        else:
            peer.endpoint.unlisten()

    def _unlisten(self, peer: Peer, endpoint: Endpoint) -> None:
        peer.lingering = None
        if peer.lost is None and not self.closed:
            endpoint.unlisten()


def check_regions(peer: Peer, message: Regions) -> None:
    """See that a peer's REGIONS can be true.

    Raises:
        RemoteProtocolError: too many slots, slots smaller than it said in HELLO, segments that overlap, or other ones than
            before at the beginning.
    """
    problem = ""
    before = peer.regions
    spans = sorted((address, address + count * message.slot_bytes) for address, count, _ in message.segments)
    if message.num_slots > MAX_SLOTS:
        problem = f"{message.num_slots} slots; at most {MAX_SLOTS}"
    elif message.slot_bytes < peer.identity.slot_bytes:
        problem = f"slots of {message.slot_bytes} bytes; HELLO said {peer.identity.slot_bytes}"
    elif any(bool(device) != peer.device_staging for _, _, device in message.segments):
        problem = f"memory that is {'not ' if peer.device_staging else ''}on a GPU; by the HELLOs it is otherwise"
    elif any(first[1] > second[0] for first, second in pairwise(spans)):
        problem = "segments that overlap"
    elif before is not None and (
        message.slot_bytes != before.slot_bytes or message.segments[: len(before.segments)] != before.segments
    ):
        problem = "other segments than before"
    if problem:
        raise RemoteProtocolError(str(peer.id), f"REGIONS of {problem}")
