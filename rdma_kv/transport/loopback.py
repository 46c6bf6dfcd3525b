"""The transport inside one process: memory copied by address, with time and faults under the caller's control.

Theory of operation. A `LoopbackNetwork` joins transports of one process and one event loop. `Endpoint.metadata` names
the endpoint and the memory it exports; `connect` finds that endpoint on the network. A WRITE is checked as a whole (our
registrations, what the peer exported to us, what it has registered at this moment), then runs as a task of the
initiator's endpoint. It behaves as NIXL over tcp does:

* nothing moves unless the target listens; `unlisten` in the middle stops it until the next `listen`;
* at most 1 MiB is copied per turn of the loop, over all WRITEs of the network, so that no copy blocks the loop;
* the data is there before the notification is; completion and notification are not ordered to each other;
* it ends with `TransportError` if either side closes, and what was copied by then stays copied;
* both fences work: our own tasks make every copy from our memory, and each batch looks before it lands.

Faults. A `FaultPlan` is asked once per WRITE (or `notify`) and answers with a `Fault`: late completion, late
notification or none, no posting, failure after so many bytes, a flipped byte. Different delays reorder. New faults
become new fields. Time is the network's `sleep`; with `SteppedTime` it passes only when told to.
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import itertools
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass

import msgspec

from rdma_kv.errors import ClosedError, ConfigError, RegistrationError, TransportError
from rdma_kv.transport.base import DEVICE_MEMORY, FENCED, NOT_POSTED, WritePair, unwrap_metadata, wrap_metadata
from rdma_kv.transport.listening import ListeningEndpoint
from rdma_kv.transport.regions import Piece, RegionTable, batches, check_pairs
from rdma_kv.types import Descriptor, Region

_BACKEND = "loopback"
_TURN_BYTES = 1 << 20  # one turn of the loop copies at most this: 0.2 ms, some ms where pages are touched first
_TURN_PIECES = 1024  # and at most so many pieces, about 1 ms of Python


@dataclass(frozen=True, slots=True)
class Posting:
    """One WRITE (or `notify`: zero bytes) as a `FaultPlan` sees it. `serial` counts per network, from 0."""

    serial: int
    initiator: str
    target: str
    length_bytes: int
    notification: bytes


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong with one WRITE. The default: nothing.

    Attributes:
        completion_delay_s: the initiator hears of success so much later.
        notification_delay_s: the target's notification is so much later than the data.
        fail_to_post: TransportError with `NOT_POSTED`, no byte written.
        fail_after_bytes: this many bytes land, then TransportError; no notification.
        lose_notification: the data lands and the initiator hears of success, the target of nothing.
        flip: offset of a byte, over all pairs, that lands with all its bits turned; nobody hears of it.
    """

    completion_delay_s: float = 0.0
    notification_delay_s: float = 0.0
    fail_to_post: bool = False
    fail_after_bytes: int | None = None
    lose_notification: bool = False
    flip: int | None = None


FaultPlan = Callable[[Posting], Fault]
Sleep = Callable[[float], Awaitable[None]]


def no_faults(posting: Posting) -> Fault:
    """The plan of a network on which all is well."""
    return Fault()


class RandomDelays:
    """A plan that delays completions and notifications by `[0, max_delay_s)` each, and so reorders them. Seeded."""

    def __init__(self, seed: int, max_delay_s: float) -> None:
        self._random = random.Random(seed)
        self._max_delay_s = max_delay_s

    def __call__(self, posting: Posting) -> Fault:
        return Fault(
            completion_delay_s=self._random.random() * self._max_delay_s,
            notification_delay_s=self._random.random() * self._max_delay_s,
        )


class SteppedTime:
    """Time that passes only by `advance`. Give its `sleep` to a `LoopbackNetwork`."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    @property
    def waiting(self) -> int:
        """How many sleep now."""
        return sum(not future.done() for _, _, future in self._sleepers)

    async def sleep(self, delay_s: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self.now_s + delay_s, next(self._order), future))
        await future

    def advance(self, step_s: float) -> None:
        """Let `step_s` pass and wake whoever is due, the earliest first."""
        self.now_s += step_s
        while self._sleepers and self._sleepers[0][0] <= self.now_s:
            future = heapq.heappop(self._sleepers)[2]
            if not future.done():
                future.set_result(None)


class _Blob(msgspec.Struct, array_like=True):
    """What the peer needs: which endpoint, and which memory it may write."""

    endpoint: str
    regions: list[tuple[int, int]]


class LoopbackNetwork:
    """The hub that transports of one process and one event loop share.

    Args:
        faults: asked once per WRITE; see `FaultPlan`.
        sleep: how delays pass; `asyncio.sleep`, or `SteppedTime().sleep`.
    """

    def __init__(self, *, faults: FaultPlan = no_faults, sleep: Sleep = asyncio.sleep) -> None:
        self.faults = faults
        self.sleep = sleep
        self._endpoints: dict[str, LoopbackEndpoint] = {}
        self._names: set[str] = set()
        self._serial = itertools.count()
        self._turn = asyncio.Lock()

    def _join(self, name: str) -> None:
        if name in self._names:
            raise ConfigError("name", f"{name!r} is on this loopback network already")
        self._names.add(name)

    async def _copy(self, target: LoopbackEndpoint, pieces: Sequence[Piece]) -> None:
        """Copy one batch when `target` listens. The lock spans a turn of the loop: parallel WRITEs share its budget."""
        while True:
            await target._until_listening()
            async with self._turn:
                if target._admits(pieces):
                    for local, remote, length_bytes in pieces:
                        ctypes.memmove(remote, local, length_bytes)
                    await asyncio.sleep(0)
                    return


class LoopbackEndpoint(ListeningEndpoint):
    """The link to one peer over a `LoopbackNetwork`. See `Endpoint` for the contract."""

    def __init__(self, network: LoopbackNetwork, regions: RegionTable, names: tuple[str, str], token: str) -> None:
        self._name, peer = names
        super().__init__(peer)
        self._network = network
        self._regions = regions
        self._token = token
        self._changed = asyncio.Event()  # set once per change of `listening` or `closed`, then replaced
        self._closed = False
        self._remote: tuple[LoopbackEndpoint, RegionTable] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._pending: set[asyncio.Future[None]] = set()
        network._endpoints[token] = self

    @property
    def lane(self) -> str:
        return "unknown" if self._remote is None else _BACKEND

    @property
    def host_lane(self) -> str:
        """The only one there is."""
        return self.lane

    @property
    def closed(self) -> bool:
        return self._closed

    async def metadata(self) -> bytes:
        """What the peer passes to `connect`: this endpoint and the memory registered so far."""
        if self._closed:
            raise TransportError(_BACKEND, "closed", f"the endpoint of {self._peer} is closed")
        blob = _Blob(self._token, [(region.address, region.length_bytes) for region in self._regions])
        return wrap_metadata(_BACKEND, msgspec.msgpack.encode(blob))

    async def connect(self, metadata: bytes) -> None:
        """Make the peer's exported memory writable from here.

        Raises:
            RegistrationError: the blob cannot be used; nothing has changed.
            TransportError: the endpoint it names is closed, or ours is.
        """
        blob, exported = _decode(unwrap_metadata(_BACKEND, metadata))
        remote = self._network._endpoints.get(blob.endpoint)
        if remote is None or self._closed:
            raise TransportError(_BACKEND, "closed", f"no open endpoint {blob.endpoint!r} on this loopback network")
        if self._remote is not None and self._remote[0] is not remote:
            raise RegistrationError(_BACKEND, "replaced", f"{self._peer} was connected as another endpoint before")
        self._remote = (remote, exported)

    async def write(self, pairs: Sequence[WritePair], notification: bytes) -> None:
        """WRITE all pairs, then notify. Goes on if the awaiting task is cancelled."""
        outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.add(outcome)
        outcome.add_done_callback(self._pending.discard)
        self._spawn(self._write(tuple(pairs), notification, outcome))
        await outcome

    async def fence_source(self) -> None:
        """Close: every copy from our memory is made by our own tasks, which have ended when this returns."""
        await self._stop()
        self._end_pending(FENCED)

    async def fence_target(self) -> None:
        """Close: each batch of a peer's copy looks whether we are open, on the same loop, before it lands."""
        await self.fence_source()

    async def close(self) -> None:
        """End the link. Pending WRITEs of both sides end with TransportError. Idempotent."""
        self._end_pending("closed")
        await self._stop()

    def _say_listening(self, listening: bool) -> None:
        del listening  # everybody looks at the inbox itself
        self._signal()

    async def _stop(self) -> None:
        """Refuse work from now on, and end our tasks."""
        self._closed = True
        self._network._endpoints.pop(self._token, None)
        self._inbox.close()
        self._signal()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end_pending(self, status: str) -> None:
        for outcome in tuple(self._pending):
            _end(outcome, TransportError(_BACKEND, status, f"ended while a WRITE to {self._peer} was pending"))

    def _signal(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _write(self, pairs: tuple[WritePair, ...], notification: bytes, outcome: asyncio.Future[None]) -> None:
        try:
            await self._carry(pairs, notification)
        except TransportError as error:
            _end(outcome, error)
        else:
            _end(outcome, None)

    async def _carry(self, pairs: tuple[WritePair, ...], notification: bytes) -> None:
        if self._closed or self._remote is None:
            state = "closed" if self._closed else "not connected"
            raise TransportError(_BACKEND, NOT_POSTED, f"the endpoint of {self._peer} is {state}")
        target, exported = self._remote
        for start in range(0, len(pairs), _TURN_PIECES):
            check_pairs(_BACKEND, pairs[start : start + _TURN_PIECES], self._regions, exported)
            await asyncio.sleep(0)
        length_bytes = sum(pair.local.length_bytes for pair in pairs)
        serial = next(self._network._serial)
        fault = self._network.faults(Posting(serial, self._name, self._peer, length_bytes, notification))
        if fault.fail_to_post or target._closed:
            raise TransportError(_BACKEND, NOT_POSTED, f"WRITE to {self._peer} could not be posted")
        await target._until_listening()
        left = length_bytes if fault.fail_after_bytes is None else fault.fail_after_bytes
        for batch in batches(pairs, _TURN_BYTES, _TURN_PIECES):
            pieces = _first_bytes(batch, left)
            await self._network._copy(target, pieces)
            left -= sum(piece[2] for piece in pieces)
        if fault.fail_after_bytes is not None:
            raise TransportError(_BACKEND, "failed", f"WRITE to {self._peer} failed in the middle")
        if fault.flip is not None:
            target._flip(pairs, fault.flip)
        if not fault.lose_notification:
            target._take(notification, fault.notification_delay_s)
        if fault.completion_delay_s:
            await self._network.sleep(fault.completion_delay_s)

    async def _until_listening(self) -> None:
        while not self._inbox.listening:
            if self._closed:
                raise TransportError(_BACKEND, "closed", f"{self._name} closed its endpoint of {self._peer}")
            await self._changed.wait()

    def _admits(self, pieces: Sequence[Piece]) -> bool:
        """Whether `pieces` may land here now; False if we stopped listening.

        Raises:
            TransportError: some of them lie outside of what is registered here now.
        """
        if not self._inbox.listening:
            return False
        for _, remote, length_bytes in pieces:
            if not self._regions.covers(Descriptor(remote, length_bytes)):
                raise TransportError(_BACKEND, "deregistered", f"{self._name} deregistered the target of a WRITE")
        return True

    def _flip(self, pairs: Sequence[WritePair], offset: int) -> None:
        """Turn all bits of one byte that has landed here, if it still may be touched."""
        for pair in pairs:
            if offset < pair.remote.length_bytes:
                address = pair.remote.address + offset
                if self._regions.covers(Descriptor(address, 1)):
                    ctypes.c_ubyte.from_address(address).value ^= 0xFF
                return
            offset -= pair.remote.length_bytes

    def _take(self, notification: bytes, delay_s: float) -> None:
        if not delay_s:
            self._inbox.put(notification)
            return
        self._spawn(self._take_late(notification, delay_s))

    async def _take_late(self, notification: bytes, delay_s: float) -> None:
        await self._network.sleep(delay_s)
        self._inbox.put(notification)


class LoopbackTransport:
    """A `Transport` on a `LoopbackNetwork`.

    Args:
        network: the hub; transports on different hubs cannot reach each other.
        name: unique on the hub; holds the incarnation.
    """

    def __init__(self, network: LoopbackNetwork, name: str) -> None:
        self._network = network
        self._name = name
        self._regions = RegionTable()
        self._endpoints: dict[str, LoopbackEndpoint] = {}
        self._serial = itertools.count()
        self._open = False

    @property
    def backend(self) -> str:
        return _BACKEND

    @property
    def name(self) -> str:
        return self._name

    async def start(self) -> None:
        """Join the network.

        Raises:
            ConfigError: the name is taken there.
        """
        self._network._join(self._name)
        self._open = True

    async def close(self) -> None:
        """Close all endpoints and leave the network. Idempotent."""
        if self._open:
            self._open = False
            self._network._names.discard(self._name)
        for endpoint in tuple(self._endpoints.values()):
            await endpoint.close()

    async def register(self, address: int, length_bytes: int, *, device: int = 0) -> Region:
        """Make `[address, address + length_bytes)` known. It stays the caller's and must outlive the registration.

        Args:
            device: 0; this transport copies with the CPU.

        Raises:
            ConfigError: zero length, a negative device, or an overlap.
            RegistrationError: memory of a GPU; its status is `DEVICE_MEMORY`.
        """
        self._check_open()
        if device > 0:
            text = f"device {device}: the loopback transport copies host memory only; register a copy in host memory"
            raise RegistrationError(_BACKEND, DEVICE_MEMORY, text)
        region = Region(address, length_bytes, device)
        self._regions.add(region)
        return region

    async def deregister(self, region: Region) -> None:
        """Undo one `register`. A WRITE that still goes to the region fails.

        Raises:
            ConfigError: it is not registered.
        """
        self._regions.remove(region)

    def endpoint(self, peer: str) -> LoopbackEndpoint:
        """The endpoint of `peer`, made at the first call and after a `close` of the former one."""
        self._check_open()
        endpoint = self._endpoints.get(peer)
        if endpoint is None or endpoint.closed:
            token = f"{self._name}>{peer}#{next(self._serial)}"
            endpoint = LoopbackEndpoint(self._network, self._regions, (self._name, peer), token)
            self._endpoints[peer] = endpoint
        return endpoint

    def _check_open(self) -> None:
        if not self._open:
            raise ClosedError(f"transport {self._name} is not open")


def _end(outcome: asyncio.Future[None], error: TransportError | None) -> None:
    if outcome.done():
        return  # closed, or the caller was cancelled
    if error is None:
        outcome.set_result(None)
    else:
        outcome.set_exception(error)


def _first_bytes(pieces: Sequence[Piece], limit_bytes: int) -> list[Piece]:
    """The pieces of the first `limit_bytes`, the last one cut."""
    kept: list[Piece] = []
    for local, remote, length_bytes in pieces:
        take = min(length_bytes, limit_bytes)
        if take <= 0:
            break
        kept.append((local, remote, take))
        limit_bytes -= take
    return kept


def _decode(data: bytes) -> tuple[_Blob, RegionTable]:
    try:
        blob = msgspec.msgpack.decode(data, type=_Blob)
        return blob, RegionTable(blob.regions)
    except (msgspec.MsgspecError, ConfigError) as exc:
        raise RegistrationError(_BACKEND, "malformed", "metadata of this version cannot be read") from exc
