"""One peer's NIXL agent, its memory, its connection. Lives on the owner thread; nothing else may touch it.

Theory of operation. A NIXL agent per peer, so that ending one link disturbs no other, and so that destroying the agent
can fence. A `WriteQueue` does the WRITEs. `notify` is a WRITE of one byte from and to scratch memory that each agent
brings along: unlike NIXL's bare notification it tells when it has left, and so when progress may stop.

`close` is the fence. It drops every reference to the agent, so that its destructor runs inside `close`, on this thread,
and returns when its sockets are closed and no queue of it is left. That is seen, not assumed: a weak reference to NIXL's
own object dies after the destructor. Only then do pending WRITEs end.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rdma_kv.errors import RegistrationError, TransportError
from rdma_kv.transport.base import FENCED, NOT_POSTED, WritePair
from rdma_kv.transport.nixl_owner import BACKEND, Nixl, NixlAgent, Settle, translate
from rdma_kv.transport.nixl_writes import POST_BYTES, POST_PIECES, WriteQueue
from rdma_kv.transport.regions import Piece, RegionTable, batches, check_pairs
from rdma_kv.types import Region

_LINGER_S = 0.02  # progress after the last WRITE: a notification larger than the socket's buffer is still leaving
_MARK = b"\x01"  # before every notification: NIXL does not send an empty one
_CONNECT_DELAYS_S = (0.05, 0.1, 0.2, 0.4, 0.8)  # before the 2nd try and so on; a peer's close is asynchronous


@dataclass(frozen=True, slots=True)
class RemoteEnd:
    """The peer as its metadata describes it.

    Attributes:
        agent: its NIXL agent's name.
        blob: NIXL's own metadata.
        scratch: address of a byte that we may write for `notify`.
        regions: what we may write.
    """

    agent: str
    blob: bytes
    scratch: int
    regions: RegionTable


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
        scratch: NDArray[np.uint8],
        deliver: Callable[[list[bytes]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.listening = False
        self._nixl = nixl
        self._regions = regions
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
        """Whether no agent of this link is left, and so nothing that it posted; asked from any thread, after `close`."""
        return self._closed and (self._native is None or self._native() is None)

    def metadata(self) -> bytes:
        """NIXL's metadata of this agent, with all memory registered so far.

        Raises:
            TransportError: the agent could not be made.
            RegistrationError: NIXL refused a region.
        """
        return self._ensure_agent().get_agent_metadata()

    def register(self, region: Region) -> None:
        """Register `region` if there is an agent; a later one takes it from the table.

        Raises:
            RegistrationError: NIXL refused it.
        """
        if self._agent is None:
            return
        entry = [(region.address, region.length_bytes, 0, "")]
        try:
            self._registered[region] = self._agent.register_memory(entry, "DRAM")
        except self._nixl.errors as error:
            cause = error.with_traceback(None)  # as in `translate`
            raise RegistrationError(BACKEND, type(error).__name__, f"{region} could not be registered") from cause

    def deregister(self, region: Region) -> None:
        """Undo `register`.

        Raises:
            TransportError: NIXL refused it.
        """
        registered = self._registered.pop(region, None)
        if registered is None or self._agent is None:
            return
        try:
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
        except TransportError as error:
            settle(error)
            return
        scratch: Piece = (self._scratch.ctypes.data, self._remote.scratch, 1)
        work = batches(pairs, POST_BYTES, POST_PIECES) if pairs else iter([[scratch]])
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
        """Destroy the agent, the only thing that fences its posts, then end everything pending. See `destroyed`."""
        writes, self._writes = self._writes, None
        if writes is not None:
            writes.close()
        self._closed = True
        self._drop_agent()
        error = TransportError(BACKEND, FENCED if self.destroyed else "closed", f"{self.name} was closed")
        if writes is not None:
            writes.abandon(error)
        self.abandon(error)

    def _ensure_agent(self) -> NixlAgent:
        if self._closed:
            raise TransportError(BACKEND, "closed", f"{self.name} was closed")
        if self._agent is not None:
            return self._agent
        self._agent = self._nixl.make_agent(self.name)
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
