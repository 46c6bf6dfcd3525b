"""libucp as a transport for memory of the host and of GPUs: event-driven on the loop, with a fence per peer.

Theory of operation. One UCX context per transport, where memory is registered once; one worker per peer (`ucx_link`),
so that one link can be cut without touching another; turns on the event loop when the workers' event fds say so
(`ucx_driver`). There is no thread of ours and no polling: a target makes progress by itself, whether or not it listens.
`listen` decides when notifications are delivered, and the peer is told of it: data may land before, but a WRITE does not
end before.

The peer's metadata travels as one MessagePack array in the envelope of `base`: the name of our link, the exported
regions (checked before a byte is posted, since tcp and cma enforce no key), their rkeys, the worker's address, and what
is needed to name the lane. A link that connects says the latter in its first message too, so that a target that never
connects knows the lane, on which its fence depends.

Memory of GPUs needs a libucp that has the cuda modules and finds a GPU. It goes over cuda_ipc between processes of one
host (the GPU copies by itself, over NVLink or PCIe), over rdma (untested), and no other way: see `ucx_lanes`. Register
it before `connect`: the peer's GPU memory is mapped for the device that has memory here. All of UCX's calls then have a
CUDA context: see `rdma_kv.cuda`.

Fences. `fence_source` works on every lane: our endpoint is forced to close, every operation leaves UCX, the worker is
destroyed; nothing reads our memory then (over rdma, where that ends the queue pairs, untested). Over cuda_ipc a copy that
the GPU has begun is not taken back: UCX lets go of it when the GPU is done, and the fence waits for that. `fence_target`
works where bytes can have come by tcp alone: with the worker its sockets are closed, and what lies unread in them is
gone. Over cma the peer's process writes our memory by itself, and over cuda_ipc its GPU does, whatever we close: where
both sides have registered memory of a GPU, also formerly, and cuda_ipc may lead here, it is refused. So it is where UCX
could have found shared memory and we cannot tell, and over rdma (untested).
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from rdma_kv.errors import (
    ClosedError,
    FenceUnsupported,
    LocalProtocolError,
    RegistrationError,
    TransportError,
)
from rdma_kv.transport.base import FENCED, NOT_POSTED, WritePair, unwrap_metadata, wrap_metadata
from rdma_kv.transport.listening import ListeningEndpoint
from rdma_kv.transport.outcomes import failed
from rdma_kv.transport.regions import RegionTable
from rdma_kv.transport.ucx_binding import BACKEND
from rdma_kv.transport.ucx_core import Core, open_context
from rdma_kv.transport.ucx_environment import choose_lane, kernels_differ
from rdma_kv.transport.ucx_lanes import device_lane_of, lane_of, way_of
from rdma_kv.transport.ucx_library import UcxLibrary, load_ucx
from rdma_kv.transport.ucx_link import UcxLink
from rdma_kv.transport.ucx_metadata import Blob, Hello, decode
from rdma_kv.transport.ucx_writes import PACES
from rdma_kv.types import Region

_log = logging.getLogger(__name__)

_END_S: Final = 5.0  # a forced close took 1 to 30 ms beside a stopped peer

_NEEDED: Final = "hold the memory until the peer is proven dead (by its pidfd), or retire the slot"
_NO_TARGET_FENCE: Final = {
    "shm": "over shared memory the peer's process writes our memory by itself, whatever we close",
    "cma": "over cma the peer's process writes our memory by itself, whatever we close",
    "cuda_ipc": "over cuda_ipc the peer's GPU writes our memory by itself, whatever we close",
    "rdma": "over rdma a fence of the target is untested",
    "tcp": "UCX may have found shared memory between these processes; UCX_TLS=tcp rules that out",
    "unknown": "the lane is not known before the peer has connected",
}


class UcxEndpoint(ListeningEndpoint):
    """The link to one peer over UCX. See `Endpoint` for the contract; made by `UcxTransport.endpoint`."""

    def __init__(self, core: Core, peer: str) -> None:
        super().__init__(peer)
        self._core = core
        self._name = f"{core.name}>{peer}#{next(core.serial)}"
        self._host_lane = "unknown"
        self._device_lane = "unknown"
        self._device_memory_there = False
        self._only_tcp = core.no_shared_memory  # for memory of the host
        self._loop = asyncio.get_running_loop()
        self._link: UcxLink | None = None
        self._peer_link = ""
        self._closing: asyncio.Task[None] | None = None

    @property
    def lane(self) -> str:
        """`cma`, `shm`, `tcp`, `rdma` or `cuda_ipc`: what UCX chose for our WRITEs, or what it may choose for the peer's.

        It is the one between GPUs if both sides registered memory of GPUs, else the one between hosts.
        """
        between_devices = self._core.device_memory and self._device_memory_there
        return self._device_lane if between_devices else self._host_lane

    @property
    def host_lane(self) -> str:
        """`cma`, `shm`, `tcp` or `rdma`: as `lane` between host memories."""
        return self._host_lane

    @property
    def transports(self) -> list[tuple[str, str]]:
        """UCX's own (transport, device) of each lane to the peer, once connected: for diagnosis."""
        return [] if self._link is None or self.closed else self._link.transports

    @property
    def closed(self) -> bool:
        return self._closing is not None

    @property
    def ended(self) -> bool:
        """Closed, and nothing of it is left in UCX."""
        return self.closed and (self._link is None or self._link.ended)

    async def metadata(self) -> bytes:
        """What the peer passes to its `connect`. Makes the worker at the first call, on the loop: 1 to 5 ms.

        Raises:
            TransportError: the endpoint is closed, or the worker could not be made.
        """
        link, core = self._opened(), self._core
        regions = [region for region in core.memory.table if region in core.mapped]
        blob = Blob(
            self._name,
            [(region.address, region.length_bytes, region.device) for region in regions],
            [core.mapped[region][1] for region in regions],
            link.address,
            core.host,
            core.lanes,
        )
        return wrap_metadata(BACKEND, msgspec.msgpack.encode(blob))

    async def connect(self, metadata: bytes) -> None:
        """Make the peer's exported memory writable from here; again, with newer metadata, after it registered more.

        The peer's memory of GPUs is left out as long as we have registered none: connect again afterwards. UCX reaches
        out in the background: a peer that is not there fails the WRITEs.

        Raises:
            RegistrationError: the metadata cannot be used; UCX has not seen it, or refused one of its rkeys.
            TransportError: no lane leads to the peer, or the endpoint is closed.
        """
        link = self._opened()
        blob, regions = decode(unwrap_metadata(BACKEND, metadata))
        if self._peer_link not in {"", blob.link}:
            raise RegistrationError(BACKEND, "replaced", f"{self._peer} was connected as another endpoint before")
        core = self._core
        hello = msgspec.msgpack.encode(Hello(link.address, core.host, core.lanes, core.device_memory))
        link.connect(blob.address, *self._in_reach(regions, blob.rkeys), hello)
        self._peer_link = blob.link
        self._device_memory_there = any(region.device for region in regions)
        self._set_lanes(blob.host, blob.lanes)
        core.driver.kick(link)

    async def write(self, pairs: Sequence[WritePair], notification: bytes) -> None:
        """WRITE all pairs, then notify. Goes on if the awaiting task is cancelled.

        Raises:
            TransportError: see `Endpoint.write`; with status `NOT_POSTED` no byte left.
        """
        link, copied = self._opened(), tuple(pairs)
        way = self._host_lane
        if self._core.device_memory or self._device_memory_there:
            way = way_of(copied, self._host_lane, self._device_lane)
        link.pace = PACES.get(way, link.pace)
        future: asyncio.Future[None] = self._loop.create_future()
        link.write(copied, bytes(notification), lambda error: _settle(future, error))
        self._core.driver.kick(link)
        await future

    async def fence_source(self) -> None:
        """End the link: then nothing of UCX reads our memory for this peer. See `Endpoint`.

        Needs nothing of the peer, which may be stopped or dead. What lies in socket buffers still lands there.

        Raises:
            FenceUnsupported: UCX has not let go of all operations within 5 s; the endpoint is closed.
        """
        await self._end(FENCED)

    async def fence_target(self) -> None:
        """End the link: then what this peer posted over tcp finds nobody who reads it. See `Endpoint`.

        Raises:
            FenceUnsupported: the bytes may have come by another way than tcp, and nothing has changed; or as for
                `fence_source`.
        """
        unknown = self._device_lane == "unknown"  # the peer's first message may come behind its WRITE
        mapped = self._core.device_memory and (unknown or (self._device_memory_there and self._device_lane != "tcp"))
        lane = "cuda_ipc" if mapped else self._host_lane
        if lane == "cuda_ipc" or not self._only_tcp:
            raise FenceUnsupported(BACKEND, "no-fence", f"{_NO_TARGET_FENCE[lane]}; {_NEEDED}")
        await self._end(FENCED)

    async def close(self) -> None:
        """End the link and destroy its worker. Pending operations end with TransportError. Idempotent.

        Raises:
            FenceUnsupported: as for `fence_source`; the worker is left behind.
        """
        await self._end("closed")

    def notification(self, body: bytes) -> None:
        """From the link."""
        self._inbox.put(body)

    def hello(self, body: bytes) -> None:
        """From the link: the peer connected."""
        try:
            hello = msgspec.msgpack.decode(body, type=Hello)
        except msgspec.MsgspecError:
            self.stranger()
            return
        self._device_memory_there |= hello.device_memory
        self._set_lanes(hello.host, hello.lanes)
        assert self._link is not None
        try:
            self._link.answer(hello.address)
        except TransportError as error:  # its WRITEs land, but do not end
            _log.warning("%s cannot answer %s: %s", self._core.name, self._peer, error)

    def stranger(self) -> None:
        """From the link: a message that is not our peer's."""
        self._core.dropped_messages += 1

    async def _end(self, status: str) -> None:
        if self._closing is None or failed(self._closing):  # once more: UCX may have let go since
            self._inbox.close()
            self._closing = self._loop.create_task(self._close(status))
        await asyncio.shield(self._closing)

    async def _close(self, status: str) -> None:
        link = self._link
        if link is None or link.ended:
            return
        link.begin_end(status)
        try:
            async with asyncio.timeout(_END_S):
                await asyncio.shield(self._core.driver.ended(link))
        except TimeoutError as exc:
            error = FenceUnsupported(BACKEND, "not-ended", f"UCX still holds operations to {self._peer}; {_NEEDED}")
            link.give_up(error)
            raise error from exc

    def _say_listening(self, listening: bool) -> None:
        link = self._opened()
        link.set_listening(listening)
        self._core.driver.kick(link)

    def _opened(self) -> UcxLink:
        """The link, made at the first call."""
        if self.closed:
            raise TransportError(BACKEND, NOT_POSTED, f"the endpoint of {self._peer} is closed")
        if self._link is None:
            self._link = self._core.make_link(self._peer, self)
        return self._link

    def _in_reach(self, regions: RegionTable, rkeys: Sequence[bytes]) -> tuple[RegionTable, list[bytes]]:
        """Without the peer's GPU memory while we have none: unpacked now, its keys would stay out of reach for good."""
        if self._core.device_memory or "rdma" in self._core.lanes:
            return regions, list(rkeys)
        kept = [(region, rkey) for region, rkey in zip(regions, rkeys, strict=True) if not region.device]
        return RegionTable((region.address, region.length_bytes) for region, _ in kept), [rkey for _, rkey in kept]

    def _set_lanes(self, host: str, lanes: Sequence[str]) -> None:
        """Name the lanes, and say whether the peer's bytes come by tcp alone: its choice need not be ours."""
        core = self._core
        chosen = [name for name, _ in self.transports]
        apart = kernels_differ(host, core.host)
        allowed = choose_lane(core.lanes, lanes, same_host=host == core.host != "")
        self._host_lane = allowed if lane_of(chosen) == "unknown" else lane_of(chosen)
        self._only_tcp = core.no_shared_memory or (allowed == self._host_lane == "tcp" and apart)
        both = set(core.lanes) & set(lanes)
        possible = "cuda_ipc" if "cuda_ipc" in both and not apart else "rdma" if "rdma" in both else "tcp"
        self._device_lane = device_lane_of(chosen) if chosen else possible


class UcxTransport:
    """A `Transport` over libucp, for memory of the host and of GPUs.

    Args:
        name: of our agent; holds the incarnation. The peer's endpoint for us must be made with the same name.
        library: path of libucp; default: RDMA_KV_UCX_LIBRARY, or the first that is found (see `ucx_library`).
        environ: settings of this transport (RDMA_KV_UCX_LIBRARY, UCX_TLS, UCX_NET_DEVICES); default `os.environ`. All
            other settings of UCX are read by UCX from the environment of the process, but for the two that keep memory
            of GPUs off tcp (see `ucx_lanes.GUARD`).
    """

    def __init__(self, name: str, *, library: str | None = None, environ: Mapping[str, str] | None = None) -> None:
        self._name = name
        self._library = library
        self._environ = os.environ if environ is None else environ
        self._core: Core | None = None
        self._endpoints: dict[str, UcxEndpoint] = {}
        self._starting = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def backend(self) -> str:
        return BACKEND

    @property
    def name(self) -> str:
        return self._name

    @property
    def library(self) -> UcxLibrary:
        """Which libucp was loaded, and its version."""
        return self._opened().library

    @property
    def dropped_messages(self) -> int:
        """Messages that named another sender than the peer of their link."""
        return self._opened().dropped_messages

    async def start(self) -> None:
        """Load libucp in a thread (0.5 s the first time) and make a context (5 ms; two, and longer, where there is a GPU).

        Raises:
            ConfigError: cffi or libucp is missing, or UCX does not take a setting; the text says what to do.
            LocalProtocolError: it was started before.
            TransportError: UCX refused to start. It does where there is a GPU and UCX_TLS is without cuda_copy.
        """
        if self._starting or self._core is not None or self._closing is not None:
            raise LocalProtocolError(f"transport {self._name} was started before")
        self._starting = True
        try:
            library = await asyncio.to_thread(load_ucx, self._library, self._environ)
            context = open_context(library, self._environ)
        finally:
            self._starting = False
        self._core = Core(self._name, library, context, self._environ)
        _log.info("%s uses libucp %s of %s (%s)", self._name, library.version, library.source, library.path)

    async def close(self) -> None:
        """End all links, then free UCX's context. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def register(self, address: int, length_bytes: int, *, device: int = 0) -> Region:
        """Register memory for every endpoint. It stays the caller's and must outlive the registration.

        Peers may write there, not read. Over cuda_ipc a peer maps the whole allocation around it: give memory that
        peers write an allocation of its own.

        Args:
            device: 0 for the host, else the CUDA ordinal + 1: memory of cudaMalloc on that GPU.

        Raises:
            ConfigError: zero length, or an overlap.
            RegistrationError: UCX refused it. With status `device-memory`: this libucp moves no CUDA memory here, or
                the range is not what `device` says, or cannot be exported; the text says which, and what to do.
        """
        core = self._opened()
        region = Region(address, length_bytes, device)
        await core.register(region)
        return region

    async def deregister(self, region: Region) -> None:
        """Undo one `register`. Peers that have older metadata can still write there: see the contract.

        Raises:
            ConfigError: it is not registered.
            TransportError: UCX refused it.
        """
        await self._opened().deregister(region)

    def endpoint(self, peer: str) -> UcxEndpoint:
        """The endpoint of `peer`, made at the first call and after a `close` of the former one."""
        core = self._opened()
        endpoint = self._endpoints.get(peer)
        if endpoint is None or endpoint.closed:
            self._endpoints = {name: each for name, each in self._endpoints.items() if not each.ended}
            endpoint = self._endpoints[peer] = UcxEndpoint(core, peer)
        return endpoint

    async def _close(self) -> None:
        if self._core is None:
            return
        core, endpoints = self._core, self._endpoints.values()
        outcomes = await asyncio.gather(*(endpoint.close() for endpoint in endpoints), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        if not all(link.ended for link in core.links):  # also of endpoints that were replaced
            raise FenceUnsupported(BACKEND, "not-ended", f"UCX still holds operations of a former link; {_NEEDED}")
        await core.close()

    def _opened(self) -> Core:
        if self._core is None:
            raise LocalProtocolError(f"start transport {self._name} first")
        if self._closing is not None:
            raise ClosedError(f"transport {self._name} is closed")
        return self._core


def _settle(future: asyncio.Future[None], error: TransportError | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
