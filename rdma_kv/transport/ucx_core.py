"""What all links of one ucx transport share: UCX's context with our settings, and the registered memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from rdma_kv.cuda import Cuda
from rdma_kv.errors import DEVICE_MEMORY, ConfigError, RegistrationError, TransportError
from rdma_kv.transport.ucx_binding import BACKEND, Handle
from rdma_kv.transport.ucx_cuda_link import CudaLink
from rdma_kv.transport.ucx_driver import Driver
from rdma_kv.transport.ucx_environment import host_id, usable_lanes
from rdma_kv.transport.ucx_lanes import GUARD, GUARDED_SINCE, shares_no_host_memory
from rdma_kv.transport.ucx_library import SETTING, UcxLibrary
from rdma_kv.transport.ucx_link import Hooks, UcxLink
from rdma_kv.transport.ucx_writes import Keys, Memory
from rdma_kv.types import Region

_PASSED_ON: Final = ("TLS", "NET_DEVICES")
_CUDA_FIX: Final = (
    f"it takes a libucp with the cuda modules (name one in {SETTING}, or install one of the extras nixl and nixl-cu13), "
    "a GPU, and cuda_copy in UCX_TLS where that is set; or copy to pinned host memory first"
)


@dataclass(frozen=True, slots=True)
class Context:
    """A context of UCX's. `no_cuda` says why it cannot move memory of GPUs; empty if it can."""

    handle: Handle
    no_cuda: str


def open_context(library: UcxLibrary, environ: Mapping[str, str]) -> Context:
    """A context with our settings. Where it can move memory of GPUs, it is made again with `GUARD`.

    Raises:
        ConfigError: UCX does not take a setting.
        TransportError: no context can be made with them; the text names UCX_TLS if that can be why.
    """
    ucx, settings = library.ucx, settings_of(environ)
    which = f"libucp {library.version} of {library.source} ({library.path})"
    try:
        handle = ucx.context(settings)
        if not ucx.knows_cuda(handle):
            return Context(handle, f"{which} has no CUDA memory support here; {_CUDA_FIX}")
        numbers = tuple(int(part) for part in library.version.split("."))
        if numbers < GUARDED_SINCE:
            since = ".".join(map(str, GUARDED_SINCE))
            return Context(handle, f"{which} is too old for CUDA memory, {since} is needed; {_CUDA_FIX}")
        ucx.cleanup(handle)
        return Context(ucx.context({**settings, **GUARD}), "")
    except TransportError as error:
        transports = environ.get("UCX_TLS")
        if transports is None:
            raise
        text = f"{which} refused to start with UCX_TLS={transports!r}; with a GPU present it must allow cuda_copy"
        raise TransportError(BACKEND, error.status, text) from error


class Core:
    """What all endpoints of a transport share. Lives on the loop; memory is mapped in a thread, as that pins pages."""

    def __init__(self, name: str, library: UcxLibrary, context: Context, environ: Mapping[str, str]) -> None:
        self.name = name
        self.ucx = library.ucx
        self.library = library
        self.context = context.handle
        self.driver = Driver(asyncio.get_running_loop())
        self.memory = Memory()
        self.mapped: dict[Region, tuple[Handle, bytes]] = {}
        self.retired: list[tuple[Region, Handle]] = []  # deregistered, but an operation may still refer to it
        self.mapping = asyncio.Lock()
        self.links: list[UcxLink] = []
        self.host = host_id()
        self.lanes = usable_lanes(environ, cuda=not context.no_cuda)
        self.no_shared_memory = shares_no_host_memory(environ.get("UCX_TLS", "all"))
        self.dropped_messages = 0
        self.serial = itertools.count()
        self._no_cuda = context.no_cuda
        self._cuda: Cuda | None = None
        self._first_device = 0

    @property
    def device_memory(self) -> bool:
        """Whether memory of a GPU is registered, or ever was: peers may still hold a mapping of it."""
        return self._first_device > 0

    def make_link(self, peer: str, hooks: Hooks) -> UcxLink:
        """A new link, known to the driver."""
        ucx, context, memory, names = self.ucx, self.context, self.memory, (self.name, peer)
        if self._no_cuda:
            link = UcxLink(ucx, context, memory, names, hooks)
        else:
            link = CudaLink(ucx, context, memory, names, hooks, current=self.current)
        self.links = [*(each for each in self.links if not each.ended), link]
        self.driver.add(link)
        return link

    def current(self, device: int = 0) -> contextlib.AbstractContextManager[None]:
        """What must be entered around calls of UCX: a CUDA context of `device`, or of the first one that has memory here.

        Nothing as long as no device has: then UCX has no work on a GPU, and its context would cost memory there.
        """
        device = device or self._first_device
        return contextlib.nullcontext() if self._cuda is None or not device else self._cuda.current(device - 1)

    async def register(self, region: Region) -> None:
        """Goes on if the awaiting task is cancelled: memory that UCX has pinned is never forgotten.

        Raises:
            ConfigError: a negative device, zero length, or an overlap.
            RegistrationError: UCX refused it, or it is on a device and cannot be used; status `DEVICE_MEMORY`.
        """
        if region.device < 0:
            raise ConfigError("device", f"{region.device}; 0 is the host, n + 1 the GPU of CUDA ordinal n")
        if region.device and self._no_cuda:
            raise RegistrationError(BACKEND, DEVICE_MEMORY, self._no_cuda)
        await asyncio.shield(asyncio.ensure_future(self._register(region)))

    async def _register(self, region: Region) -> None:
        async with self.mapping:
            if not self.memory.table.add(region):
                return
            self.memory.table.remove(region)  # no WRITE may use it before UCX knows it
            self.mapped[region] = await asyncio.to_thread(self._map, region)
            if region.device and not self._first_device:
                self._first_device = region.device
            self._index()
            self.memory.table.add(region)

    def _map(self, region: Region) -> tuple[Handle, bytes]:
        """In a thread, which has no CUDA context of its own."""
        if not region.device:
            return self.ucx.map_memory(self.context, region.address, region.length_bytes, cuda=False)
        if self._cuda is None:
            self._cuda = Cuda()
        ordinal = region.device - 1
        self._cuda.retain(ordinal)
        with self._cuda.current(ordinal):
            exported = "rdma" not in self.lanes
            self._cuda.check_memory(region.address, region.length_bytes, ordinal, exported=exported)
            return self.ucx.map_memory(self.context, region.address, region.length_bytes, cuda=True)

    def _unmap(self, region: Region, memory: Handle) -> None:
        with self.current(region.device):
            self.ucx.unmap_memory(self.context, memory)

    async def deregister(self, region: Region) -> None:
        async with self.mapping:
            if self.memory.table.remove(region):
                self.retired.append((region, self.mapped.pop(region)[0]))
                self._index()
            self.links = [link for link in self.links if not link.ended]
            if not any(link.holds_memory for link in self.links):
                retired, self.retired = self.retired, []
                for former, memory in retired:
                    await asyncio.to_thread(self._unmap, former, memory)

    async def close(self) -> None:
        async with self.mapping:
            for region, memory in [*((region, memory) for region, (memory, _) in self.mapped.items()), *self.retired]:
                self._unmap(region, memory)
            with self.current():
                self.ucx.cleanup(self.context)
            if self._cuda is not None:
                self._cuda.close()

    def _index(self) -> None:
        keys = ((region.address, self.ucx.put_param(memory)) for region, (memory, _) in self.mapped.items())
        self.memory.keys = Keys(keys)


def settings_of(environ: Mapping[str, str]) -> dict[str, str]:
    """Ours, where the user has none, and those of the user that a transport may have for itself. Without `UCX_`."""
    settings = {"RNDV_THRESH": "inf"}  # or, with peer error handling, puts are emulated by messages: ten times slower
    if "cma" in usable_lanes(environ):
        settings["CMA_TX_QUOTA"] = "1"  # a call copies 512 KiB, not 4 MiB: no long turn, and faster
    for name in (*settings, *_PASSED_ON):
        if f"UCX_{name}" in environ:
            settings[name] = environ[f"UCX_{name}"]
    return settings
