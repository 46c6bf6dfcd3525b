"""NIXL (with its UCX back-end) as a transport, for memory of the host and of GPUs.

Theory of operation. One NIXL agent per endpoint, made when the endpoint is first needed; one owner thread per transport
that makes every NIXL call (`nixl_owner`); all that is in flight belongs to the endpoint's `NixlLink` on that thread
(`nixl_link`). This module is the half on the event loop: it turns calls into jobs and answers into results.

The peer's metadata travels as one MessagePack array in the envelope of `base` (`nixl_metadata`): NIXL's own blob, the
NIXL agent's name, a scratch byte for `notify`, the exported regions (checked before a byte is posted, since tcp and cma
enforce no key), and what is needed to name the lane.

Memory of GPUs needs NVIDIA's driver and a NIXL whose UCX has the cuda modules; whether it has is tried at the first
`register`. It goes over cuda_ipc between two processes of one host and process namespace (the GPU copies by itself, over
NVLink or PCIe), over rdma (untested), and no other way: see `ucx_lanes`. NIXL does not tell what UCX chose, so the way is
judged by what both sides may use, and their UCX has settings under which a WRITE that we judged wrongly fails instead of
going over tcp. They yield to the environment's own. Register such memory before the endpoint's first `metadata` or
`connect`: what a NIXL agent was made without, it does not get (`nixl_link`). See `nixl_devices` for the CUDA context.

Memory after a failure. NIXL cannot take back what it posted. After a `TransportError` whose status is neither
`NOT_POSTED` nor `FENCED` the memory of that WRITE must be held until a fence.

Fences. Both destroy this peer's NIXL agent (`NixlLink.close`), whether or not the peer answers, and see that it is gone.

* `fence_source`: what was handed to the kernel holds the old bytes and may still land at the peer; nothing reads our
  memory any more. Over cma the copy runs inside the posting call, so none is under way when the agent ends. Over cuda_ipc
  a copy that the GPU has begun is not taken back: the fence waits until the GPU has done all that this process asked of
  it, which holds up the transport's other peers for as long. Over rdma, where the agent's end destroys its queue pairs,
  this is untested.
* `fence_target`: only where the bytes can have come by tcp alone, through sockets that only this agent reads. Over cma
  the peer's process writes our memory by itself, and over cuda_ipc its GPU does, whatever we close: with memory of a GPU
  registered, also formerly, it is refused. Where UCX could have found shared memory and we
  cannot tell (one kernel, or one not known, and `UCX_TLS` does not rule it out), and over rdma (untested), it is refused.
  A target that never connects does not know the peer's kernel; there only `UCX_TLS` rules it out.

Trap. When a peer's side of a tcp connection ends, by fence, close or death, while our bytes are stuck in it, UCX 1.23
under NIXL 1.5.1 can use a connection that it has just freed, in `check_xfer_state`: of some hundred initiators that met
a fence of their target so, about one in a hundred died of SIGSEGV. Nothing here can prevent it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

import msgspec
import numpy as np

from rdma_kv.errors import (
    ClosedError,
    FenceUnsupported,
    LocalProtocolError,
    RegistrationError,
    TransportError,
)
from rdma_kv.transport.base import NOT_POSTED, WritePair, unwrap_metadata, wrap_metadata
from rdma_kv.transport.listening import ListeningEndpoint
from rdma_kv.transport.nixl_devices import Devices
from rdma_kv.transport.nixl_link import NixlLink, RemoteEnd, refusal, register
from rdma_kv.transport.nixl_metadata import Blob, decode
from rdma_kv.transport.nixl_owner import BACKEND, Nixl, Owner, fail, load_nixl
from rdma_kv.transport.outcomes import failed
from rdma_kv.transport.regions import RegionTable
from rdma_kv.transport.ucx_environment import (
    choose_lane,
    host_id,
    kernels_differ,
    prepare_ucx_environment,
    usable_lanes,
)
from rdma_kv.transport.ucx_lanes import GUARD, shares_no_host_memory
from rdma_kv.types import Region

__all__ = ["NixlEndpoint", "NixlTransport", "prepare_ucx_environment"]

T = TypeVar("T")

_NEEDED: Final = "hold the memory until the peer is proven dead (by its pidfd), or retire the slot"
_NO_TARGET_FENCE: Final = {
    "cma": "over cma the peer's process writes our memory by itself, whatever we close",
    "cuda_ipc": "over cuda_ipc the peer's GPU writes our memory by itself, whatever we close",
    "rdma": "over rdma a fence of the target is untested",
    "tcp": "UCX may have found shared memory between these processes; UCX_TLS=tcp rules that out",
    "unknown": "the lane is not known before connect",
}


class _Core:
    """What all endpoints of a transport share: the thread, NIXL, and the registered memory.

    `regions`, `devices` and `links` live on the owner thread.
    """

    def __init__(self, name: str, owner: Owner, nixl: Nixl, environ: Mapping[str, str]) -> None:
        self.name = name
        self.owner = owner
        self.nixl = nixl
        self.regions = RegionTable()
        self.devices = Devices()
        self.links: list[NixlLink] = []
        self.host = host_id()
        self.lanes = usable_lanes(environ, cuda=True)  # what they are worth without memory of GPUs: see `metadata`
        self.no_shared_memory = shares_no_host_memory(environ.get("UCX_TLS", "all"))
        self.scratch = np.zeros(2, dtype=np.uint8)
        self._serial = itertools.count()

    def make_link(self, peer: str, deliver: Callable[[list[bytes]], None]) -> NixlLink:
        """On the loop: a link whose NIXL agent's name is never used twice in this process."""
        name = f"{self.name}>{peer}#{next(self._serial)}"
        link = NixlLink(self.nixl, name, self.regions, devices=self.devices, scratch=self.scratch, deliver=deliver)
        self.owner.post(lambda: self._add(link))
        return link

    def register(self, region: Region) -> None:
        """On the thread: all links or none."""
        if not self.regions.add(region):
            return
        done: list[NixlLink] = []
        try:
            if region.device:
                self.devices.admit(region, exported="rdma" not in self.lanes, probe=self._probe)
            for link in self.links:
                link.register(region)
                done.append(link)
        except RegistrationError:
            for link in done:
                link.deregister(region)
            self.regions.remove(region)
            raise

    def deregister(self, region: Region) -> None:
        """On the thread: in every link, also if one refuses."""
        if not self.regions.remove(region):
            return
        refusals = []
        for link in self.links:
            try:
                link.deregister(region)
            except TransportError as error:
                refusals.append(error)
        if refusals:
            raise refusals[0]

    def metadata(self, link: NixlLink) -> bytes:
        """On the thread: what the peer needs to reach `link`, wrapped."""
        nixl = link.metadata()
        regions = [(region.address, region.length_bytes, region.device) for region in link.exported]
        sink = self.scratch.ctypes.data + 1
        lanes = [lane for lane in self.lanes if lane != "cuda_ipc" or link.with_devices]
        blob = Blob(link.name, nixl, sink, regions, self.host, lanes, os.getpid())
        return wrap_metadata(BACKEND, msgspec.msgpack.encode(blob))

    def device_lane(self, blob: Blob) -> str:
        """The way between our GPUs and the peer's, `tcp` if there is none. Within one process UCX has no cuda_ipc."""
        both = set(self.lanes) & set(blob.lanes)
        if "cuda_ipc" in both and blob.host == self.host != "" and blob.process != os.getpid():
            return "cuda_ipc"
        return "rdma" if "rdma" in both else "tcp"

    def close_link(self, link: NixlLink) -> None:
        """On the thread."""
        if link in self.links:
            self.links.remove(link)
            self.owner.remove(link)
            link.close()

    def end(self) -> None:
        """On the thread: the last job."""
        for link in tuple(self.links):
            self.close_link(link)
        self.devices.close()

    def _probe(self, region: Region) -> None:
        """On the thread: see that NIXL takes memory of GPUs, with an agent of its own."""
        try:
            agent = self.nixl.make_agent(f"{self.name}?{next(self._serial)}", GUARD)
        except TransportError as error:
            raise refusal(error, region) from error
        try:
            agent.deregister_memory(register(agent, region))
        except self.nixl.errors as error:
            raise refusal(error, region) from error.with_traceback(None)

    def _add(self, link: NixlLink) -> None:
        self.links.append(link)
        self.owner.add(link)


class NixlEndpoint(ListeningEndpoint):
    """The link to one peer over NIXL. See `Endpoint` for the contract; made by `NixlTransport.endpoint`."""

    def __init__(self, core: _Core, peer: str) -> None:
        super().__init__(peer)
        self._core = core
        self._host_lane = "unknown"
        self._device_lane = "unknown"
        self._device_memory_there = False
        self._only_tcp = core.no_shared_memory  # surely; the lane may say tcp where UCX has found something better
        self._loop = asyncio.get_running_loop()
        self._link = core.make_link(peer, self._deliver)
        self._pending: set[asyncio.Future[None]] = set()
        self._loading: tuple[bytes, asyncio.Task[None]] | None = None
        self._closing: asyncio.Task[None] | None = None

    @property
    def lane(self) -> str:
        """`cma`, `tcp`, `rdma` or `cuda_ipc`: the best that UCX may use on both sides; see `ucx_environment`.

        It is the one between GPUs if both sides registered memory of GPUs, else the one between hosts.
        """
        between_devices = self._link.with_devices and self._device_memory_there
        return self._device_lane if between_devices else self._host_lane

    @property
    def host_lane(self) -> str:
        """`cma`, `tcp` or `rdma`: as `lane` between host memories."""
        return self._host_lane

    @property
    def closed(self) -> bool:
        return self._closing is not None

    async def metadata(self) -> bytes:
        """What the peer passes to its `connect`. Makes the NIXL agent at the first call (0.4 s the first time).

        Raises:
            TransportError: the endpoint is closed, or the agent could not be made.
            RegistrationError: NIXL refused memory that was registered before.
        """
        self._check_open()
        return await self._core.owner.call(lambda: self._core.metadata(self._link))

    async def connect(self, metadata: bytes) -> None:
        """Make the peer's exported memory writable from here; again, with newer metadata, after it registered more.

        Raises:
            RegistrationError: the metadata cannot be used; NIXL has not seen it.
            TransportError: NIXL could not reach the peer, also after retries, or the endpoint is closed.
        """
        self._check_open()
        blob, regions = decode(unwrap_metadata(BACKEND, metadata))
        before = self._loading
        if before is None or before[0] != metadata or failed(before[1]):
            task = self._loop.create_task(self._load(blob, regions, before and before[1]))
            task.add_done_callback(failed)
            self._loading = (metadata, task)
        assert self._loading is not None
        await asyncio.shield(self._loading[1])

    async def write(self, pairs: Sequence[WritePair], notification: bytes) -> None:
        """WRITE all pairs, then notify. Goes on if the awaiting task is cancelled.

        Raises:
            TransportError: see `Endpoint.write`; with status `NOT_POSTED` no byte left.
        """
        self._check_open()
        copied = tuple(pairs)
        future = self._future()
        self._core.owner.begin(lambda settle: self._link.write(copied, notification, settle), future)
        await future

    async def fence_source(self) -> None:
        """Destroy the NIXL agent: then nothing reads our memory for what was posted to this peer. See `Endpoint`.

        Some milliseconds, also beside a stopped peer; where a GPU may still read, until it is done.

        Raises:
            FenceUnsupported: something still refers to the agent, or CUDA cannot tell whether a GPU is done; the endpoint
                is closed, and in the former case another call may succeed.
        """
        await self._fence()

    async def fence_target(self) -> None:
        """Destroy the NIXL agent: then what this peer posted over tcp finds nobody who reads it. See `Endpoint`.

        Raises:
            FenceUnsupported: not on this lane, and nothing has changed; or as for `fence_source`.
        """
        lane = "cuda_ipc" if self._core.devices.present else self._host_lane
        if lane == "cuda_ipc" or not self._only_tcp:
            raise FenceUnsupported(BACKEND, "no-fence", f"{_NO_TARGET_FENCE[lane]}; {_NEEDED}")
        await self._fence()

    async def close(self) -> None:
        """End the link and destroy its NIXL agent. Pending operations end at once, with TransportError. Idempotent."""
        ending = self._end()
        for future in tuple(self._pending):
            fail(future, TransportError(BACKEND, "closed", f"closed while an operation to {self._peer} was pending"))
        await asyncio.shield(ending)

    async def _fence(self) -> None:
        await asyncio.shield(self._end())
        if not self._link.destroyed:
            raise FenceUnsupported(
                BACKEND,
                "not-destroyed",
                "something still refers to the NIXL agent, or a GPU has not said that it is done; hold the memory and "
                "fence again",
            )

    def _end(self) -> asyncio.Task[None]:
        """Destroy the agent, once; what is pending ends after it."""
        if self._closing is None:
            self._inbox.close()
            self._closing = self._loop.create_task(self._close_link())
        return self._closing

    def _say_listening(self, listening: bool) -> None:
        self._core.owner.post(lambda: self._set_listening(listening))

    async def _close_link(self) -> None:
        await self._core.owner.call(lambda: self._core.close_link(self._link))

    async def _load(self, blob: Blob, regions: RegionTable, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
            self._check_open()
        core = self._core
        on_device = any(region.device for region in regions)
        device_lane = core.device_lane(blob)
        remote = RemoteEnd(blob.agent, blob.nixl, blob.scratch, regions, on_device, device_lane)
        future = self._future()
        core.owner.begin(lambda settle: self._link.connect(remote, settle), future)
        await future
        self._host_lane = choose_lane(core.lanes, blob.lanes, same_host=blob.host == core.host != "")
        self._device_lane, self._device_memory_there = device_lane, on_device
        apart = kernels_differ(blob.host, core.host)
        self._only_tcp = self._host_lane == "tcp" and (core.no_shared_memory or apart)

    def _future(self) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def _deliver(self, messages: list[bytes]) -> None:
        """On the thread."""
        self._core.owner.tell(lambda: self._receive(messages))

    def _receive(self, messages: list[bytes]) -> None:
        if not self.closed:
            for message in messages:
                self._inbox.put(message)

    def _set_listening(self, listening: bool) -> None:
        """On the thread."""
        self._link.listening = listening

    def _check_open(self) -> None:
        if self.closed:
            raise TransportError(BACKEND, NOT_POSTED, f"the endpoint of {self._peer} is closed")


class NixlTransport:
    """A `Transport` over NIXL, for memory of the host and of GPUs.

    Args:
        name: of our agent; holds the incarnation, so that no NIXL agent's name is ever used by two processes.
        environ: where UCX's settings are read to name the lane; default `os.environ`. UCX itself reads the real one.
    """

    def __init__(self, name: str, *, environ: Mapping[str, str] | None = None) -> None:
        self._name = name
        self._environ = os.environ if environ is None else environ
        self._core: _Core | None = None
        self._endpoints: dict[str, NixlEndpoint] = {}
        self._closing: asyncio.Task[None] | None = None

    @property
    def backend(self) -> str:
        return BACKEND

    @property
    def name(self) -> str:
        return self._name

    @property
    def owner_thread(self) -> threading.Thread:
        """The thread that makes all NIXL calls, for measurements.

        Raises:
            LocalProtocolError: the transport was not started.
        """
        if self._core is None:
            raise LocalProtocolError(f"start transport {self._name} first")
        return self._core.owner.thread

    async def start(self) -> None:
        """Start the owner thread and import NIXL there (50 to 200 ms, for about 50 ms of which it holds the GIL).

        Raises:
            ConfigError: NIXL is not installed; the text names the extra.
            LocalProtocolError: it was started before.
        """
        if self._core is not None or self._closing is not None:
            raise LocalProtocolError(f"transport {self._name} was started before")
        owner = Owner(f"nixl-{self._name}", asyncio.get_running_loop())
        owner.start()
        try:
            nixl = await owner.call(load_nixl)
        except BaseException:
            await owner.stop()
            raise
        self._core = _Core(self._name, owner, nixl, self._environ)

    async def close(self) -> None:
        """Close all endpoints, then end and join the owner thread, without blocking the loop. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def register(self, address: int, length_bytes: int, *, device: int = 0) -> Region:
        """Register memory with every endpoint, present and future. It stays the caller's and must outlive that.

        Memory of GPUs is for endpoints whose first `metadata` or `connect` comes after it. Over cuda_ipc a peer maps the
        whole allocation around it: give memory that peers write an allocation of its own. The first of it takes 0.5 s.

        Args:
            device: 0 for the host, else the CUDA ordinal + 1: memory of cudaMalloc on that GPU.

        Raises:
            ConfigError: zero length, a negative device, or an overlap.
            RegistrationError: NIXL refused it; no endpoint has it. With status `device-memory`: there is no driver of
                NVIDIA's or no such GPU, this NIXL moves no CUDA memory here, or the range is not what `device` says, or
                cannot be exported; the text says which, and what to do.
        """
        core = self._opened()
        region = Region(address, length_bytes, device)
        await core.owner.call(lambda: core.register(region))
        return region

    async def deregister(self, region: Region) -> None:
        """Undo one `register`. Peers that have older metadata can still write there: see the contract.

        Raises:
            ConfigError: it is not registered.
            TransportError: NIXL refused it.
        """
        core = self._opened()
        await core.owner.call(lambda: core.deregister(region))

    def endpoint(self, peer: str) -> NixlEndpoint:
        """The endpoint of `peer`, made at the first call and after a `close` of the former one."""
        core = self._opened()
        endpoint = self._endpoints.get(peer)
        if endpoint is None or endpoint.closed:
            endpoint = self._endpoints[peer] = NixlEndpoint(core, peer)
        return endpoint

    async def _close(self) -> None:
        if self._core is None:
            return
        try:
            await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints.values()))
            await self._core.owner.call(self._core.end)
        finally:
            await self._core.owner.stop()

    def _opened(self) -> _Core:
        if self._core is None:
            raise LocalProtocolError(f"start transport {self._name} first")
        if self._closing is not None:
            raise ClosedError(f"transport {self._name} is closed")
        return self._core
