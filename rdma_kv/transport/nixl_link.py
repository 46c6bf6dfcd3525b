"""One peer's NIXL agent, its memory, its connection. Lives on the owner thread; nothing else may touch it.

Theory of operation. A NIXL agent per peer, so that ending one link disturbs no other, and so that destroying the agent
can fence. A `WriteQueue` does the WRITEs. `notify` is a WRITE of one byte from and to scratch memory that each agent
brings along: unlike NIXL's bare notification it tells when it has left, and so when progress may stop.

`close` is the fence. It drops every reference to the agent, so that its destructor runs inside `close`, on this thread,
and returns when its sockets are closed and no queue of it is left. That is seen, not assumed: a weak reference to NIXL's
own object dies after the destructor. Only then do pending WRITEs end. A copy that a GPU has begun is not taken back by
that: in one try the agent's end lasted as long as the copy, but nothing promises it, nor that it would be safe to unmap the
peer's memory below a copy. So where a post with memory of a GPU has not been seen to end, `close` waits for the GPUs
before it destroys the agent, and again after it, for what began in between.

Memory of GPUs is for agents that were made when some was registered: with the settings that keep it off tcp
(`ucx_lanes.GUARD`), and with a CUDA context, without which the keys of the peer's are unpacked to no use, for good. An
agent that was made before neither exports nor writes it.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rdma_kv.errors import RegistrationError, TransportError
from rdma_kv.transport.base import DEVICE_MEMORY, FENCED, NOT_POSTED, WritePair
from rdma_kv.transport.nixl_devices import Devices
from rdma_kv.transport.nixl_owner import BACKEND, Nixl, NixlAgent, Settle, translate
from rdma_kv.transport.nixl_writes import Batch, WriteQueue, cut, memory_of
from rdma_kv.transport.regions import RegionTable, check_pairs
from rdma_kv.transport.ucx_lanes import GUARD, way_of
from rdma_kv.types import Region

_logger = logging.getLogger(__name__)

_LINGER_S = 0.02  # progress after the last WRITE: a notification larger than the socket's buffer is still leaving
_MARK = b"\x01"  # before every notification: NIXL does not send an empty one
_DEVICE_FIX = (
    "it takes a NIXL whose UCX has the cuda modules (nixl-cu12 or nixl-cu13, as the driver), and cuda_copy and cuda_ipc in "
    "UCX_TLS where that is set; or copy to pinned host memory first"
)
_CONNECT_DELAYS_S = (0.05, 0.1, 0.2, 0.4, 0.8)  # before the 2nd try and so on; a peer's close is asynchronous


@dataclass(frozen=True, slots=True)
class RemoteEnd:
    """The peer as its metadata describes it.

    Attributes:
        agent: its NIXL agent's name.
        blob: NIXL's own metadata.
        scratch: address of a byte that we may write for `notify`.
        regions: what we may write.
        on_device: whether some of them are memory of GPUs.
        device_lane: the way between our GPUs and its: `cuda_ipc`, `rdma`, or `tcp`, which is none.
    """

    agent: str
    blob: bytes
    scratch: int
    regions: RegionTable
    on_device: bool = False
    device_lane: str = "tcp"


def register(agent: NixlAgent, region: Region) -> object:
    """Register `region`, with its device's context current; what `deregister_memory` takes."""
    kind, number = memory_of(region.device)
    return agent.register_memory([(region.address, region.length_bytes, number, "")], kind)


def refusal(error: Exception, region: Region) -> RegistrationError:
    """NIXL's exception of `register` as ours."""
    if region.device:
        return RegistrationError(
            BACKEND, DEVICE_MEMORY, f"NIXL refused {region}: {type(error).__name__}; {_DEVICE_FIX}"
        )
    return RegistrationError(BACKEND, type(error).__name__, f"{region} could not be registered")


@dataclass(slots=True, eq=False)
class _Connect:
    """A connection that is being tried."""

    remote: RemoteEnd
    settle: Settle
    delays_s: Iterator[float]
    due_s: float


class NixlLink:
    """The owner thread's half of an endpoint.

    Args:
        nixl: the loaded wrapper.
        name: of the NIXL agent; never used again in this process.
        regions: all registered memory, the transport's own table on the owner thread.
        devices: the transport's GPUs.
        scratch: two bytes, kept alive by the link: what `notify` sends, and where the peer's `notify` lands.
        deliver: told each batch of notifications that came in.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        nixl: Nixl,
        name: str,
        regions: RegionTable,
        *,
        devices: Devices,
        scratch: NDArray[np.uint8],
        deliver: Callable[[list[bytes]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.listening = False
        self.with_devices = False  # whether the agent takes memory of GPUs; read from any thread
        self._nixl = nixl
        self._regions = regions
        self._devices = devices
        self._devices_done = True
        self._scratch = scratch
        self._deliver = deliver
        self._clock = clock
        self._agent: NixlAgent | None = None
        self._native: weakref.ref[object] | None = None  # dead once the agent's destructor has returned
        self._registered: dict[Region, object] = {}
        self._remote: RemoteEnd | None = None
        self._connect: _Connect | None = None
        self._writes: WriteQueue | None = None  # lives with the agent
        self._linger_until_s = 0.0
        self._closed = False

    @property
    def active(self) -> bool:
        """Whether turns are needed."""
        if self._agent is None:
            return False
        busy = self.listening or bool(self._writes) or self._connect is not None
        return busy or self._clock() < self._linger_until_s

    @property
    def destroyed(self) -> bool:
        """Whether no agent of this link is left, and nothing that it posted; asked from any thread, after `close`."""
        return self._closed and self._devices_done and (self._native is None or self._native() is None)

    @property
    def exported(self) -> list[Region]:
        """What the agent's metadata cover."""
        return [region for region in self._regions if self.with_devices or not region.device]

    def metadata(self) -> bytes:
        """NIXL's metadata of this agent, with all memory registered so far.

        Raises:
            TransportError: the agent could not be made.
            RegistrationError: NIXL refused a region.
        """
        return self._ensure_agent().get_agent_metadata()

    def register(self, region: Region) -> None:
        """Register `region` if there is an agent that takes it; a later one takes it from the table.

        Raises:
            RegistrationError: NIXL refused it.
        """
        if self._agent is None or (region.device and not self.with_devices):
            return
        try:
            with self._devices.at(region.device):
                self._registered[region] = register(self._agent, region)
        except self._nixl.errors as error:
            raise refusal(error, region) from error.with_traceback(None)  # as in `translate`

    def deregister(self, region: Region) -> None:
        """Undo `register`.

        Raises:
            TransportError: NIXL refused it.
        """
        registered = self._registered.pop(region, None)
        if registered is None or self._agent is None:
            return
        try:
            with self._devices.at(region.device):
                self._agent.deregister_memory(registered)
        except self._nixl.errors as error:
            raise translate(error, f"{region} could not be deregistered") from None

    def connect(self, remote: RemoteEnd, settle: Settle) -> None:
        """Load the peer's metadata, with retries in later turns. The caller has one connection under way at a time."""
        if self._remote is not None and self._remote.agent != remote.agent:
            settle(RegistrationError(BACKEND, "replaced", f"{self.name} was connected to {self._remote.agent} before"))
            return
        try:
            self._ensure_agent()
        except TransportError as error:
            settle(error)
            return
        self._connect = _Connect(remote, settle, iter(_CONNECT_DELAYS_S), self._clock())
        self._try_connect(self._connect)

    def write(self, pairs: tuple[WritePair, ...], notification: bytes, settle: Settle) -> None:
        """Check and queue a WRITE; turns post it. No pairs: only the notification."""
        if self._remote is None or self._writes is None:
            settle(TransportError(BACKEND, NOT_POSTED, f"{self.name} is not connected"))
            return
        try:
            check_pairs(BACKEND, pairs, self._regions, self._remote.regions)
            self._check_way(pairs, self._remote)
        except TransportError as error:
            settle(error)
            return
        scratch = Batch([(self._scratch.ctypes.data, self._remote.scratch, 1)])
        work = cut(pairs) if pairs else iter([scratch])
        self._writes.add(work, self._remote.agent, _MARK + notification, settle)

    def turn(self) -> bool:
        """Connect, post, reap, fetch: whatever is due. True if something moved."""
        moved = False
        now_s = self._clock()
        if self._connect is not None and now_s >= self._connect.due_s:
            self._try_connect(self._connect)
            moved = True
        if self._writes:
            moved = self._writes.turn() or moved
            self._linger_until_s = now_s + _LINGER_S
        if self._agent is not None:
            moved = self._fetch(self._agent) or moved  # also the only progress while lingering
        return moved

    def abandon(self, error: TransportError) -> None:
        """End everything pending with `error`; the link is of no use any more. The agent stays until `close`."""
        self._remote = None
        self.listening = False
        if self._connect is not None:
            self._end_connect(self._connect, error)
        if self._writes is not None:
            self._writes.abandon(error)

    def close(self) -> None:
        """Destroy the agent, the only thing that fences its posts, then end everything pending. See `destroyed`.

        Blocks the thread until the GPUs are done, where one may still be at work for a post of this link.
        """
        writes, self._writes = self._writes, None
        on_device = writes is not None and writes.on_device
        if writes is not None:
            if on_device and self._wait_for_devices():
                writes.see_devices_done()
            writes.close()
        self._closed = True
        self._drop_agent()
        self._devices_done = not on_device or self._wait_for_devices()
        error = TransportError(BACKEND, FENCED if self.destroyed else "closed", f"{self.name} was closed")
        if writes is not None:
            writes.abandon(error)
        self.abandon(error)

    def _ensure_agent(self) -> NixlAgent:
        if self._closed:
            raise TransportError(BACKEND, "closed", f"{self.name} was closed")
        if self._agent is not None:
            return self._agent
        with_devices = self._devices.present
        self._agent = self._nixl.make_agent(self.name, GUARD) if with_devices else self._nixl.make_agent(self.name)
        self.with_devices = with_devices
        self._native = weakref.ref(self._agent.agent)
        try:
            self.register(Region(self._scratch.ctypes.data, self._scratch.nbytes))
            for region in self._regions:
                self.register(region)
        except RegistrationError:
            self._drop_agent()
            raise
        self._writes = WriteQueue(self._nixl, self._agent, self.name)
        return self._agent

    def _drop_agent(self) -> None:
        """All that refers to the agent must go, or it is not destroyed."""
        self._registered.clear()
        self._writes = None
        self._agent = None

    def _check_way(self, pairs: tuple[WritePair, ...], remote: RemoteEnd) -> None:
        """Raises: TransportError: no way leads there for memory of a GPU; its status is `NOT_POSTED`."""
        if self.with_devices:
            way_of(pairs, "host", remote.device_lane, backend=BACKEND)
            return
        if self._devices.present and any(pair.local.device for pair in pairs):
            text = f"memory of GPUs was registered after {self.name} had begun; close the endpoint and make a new one"
            raise TransportError(BACKEND, NOT_POSTED, text)
        if remote.on_device:
            way_of(pairs, "host", "tcp", backend=BACKEND)

    def _wait_for_devices(self) -> bool:
        """Whether the GPUs are known to be done."""
        try:
            self._devices.synchronize()
        except RegistrationError:
            _logger.exception("%s cannot tell whether the GPUs still read memory", self.name)
            return False
        return True

    def _try_connect(self, attempt: _Connect) -> None:
        remote = attempt.remote
        try:
            agent = self._ensure_agent()
            found = agent.add_remote_agent(remote.blob).decode()
            agent.make_connection(found)
        except self._nixl.errors as error:
            failure = translate(error, f"{self.name} could not load the metadata of {remote.agent}")
            delay_s = next(attempt.delays_s, None) if failure.status == "RemoteDisconnect" else None
            if delay_s is None:
                self._end_connect(attempt, failure)
            else:
                attempt.due_s = self._clock() + delay_s
            return
        if found == remote.agent:
            self._remote = remote
            self._end_connect(attempt, None)
        else:
            self._end_connect(attempt, RegistrationError(BACKEND, "name", f"NIXL calls {remote.agent} {found!r}"))

    def _end_connect(self, attempt: _Connect, failure: TransportError | None) -> None:
        self._connect = None
        attempt.settle(failure)

    def _fetch(self, agent: NixlAgent) -> bool:
        """Hand on the notifications that came in. True if any."""
        try:
            senders = agent.get_new_notifs()
        except self._nixl.errors as error:
            self.abandon(translate(error, f"{self.name} can no longer be polled"))
            return True
        messages = [message.removeprefix(_MARK) for received in senders.values() for message in received]
        if messages:
            self._deliver(messages)
        return bool(messages)
