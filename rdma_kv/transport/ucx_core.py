"""What all links of one ucx transport share: UCX's context with our settings, and the registered memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Mapping
from typing import Final

from rdma_kv.transport.ucx_binding import Handle
from rdma_kv.transport.ucx_driver import Driver
from rdma_kv.transport.ucx_environment import host_id, usable_lanes
from rdma_kv.transport.ucx_library import UcxLibrary
from rdma_kv.transport.ucx_link import UcxLink
from rdma_kv.transport.ucx_writes import Keys, Memory
from rdma_kv.types import Region

_PASSED_ON: Final = ("TLS", "NET_DEVICES")
_SHARED_MEMORY: Final = frozenset({"cma", "knem", "xpmem", "posix", "sysv", "self", "cuda_ipc"})
_NOT_SHARED: Final = frozenset({"tcp", "cuda_copy"})  # transports by which no peer reaches our memory itself


class Core:
    """What all endpoints of a transport share. Lives on the loop; memory is mapped in a thread, as that pins pages."""

    def __init__(self, name: str, library: UcxLibrary, context: Handle, environ: Mapping[str, str]) -> None:
        self.name = name
        self.ucx = library.ucx
        self.library = library
        self.context = context
        self.driver = Driver(asyncio.get_running_loop())
        self.memory = Memory()
        self.mapped: dict[Region, tuple[Handle, bytes]] = {}
        self.retired: list[Handle] = []  # deregistered memory that an operation may still refer to
        self.mapping = asyncio.Lock()
        self.links: list[UcxLink] = []
        self.host = host_id()
        self.lanes = usable_lanes(environ)
        self.no_shared_memory = set(environ.get("UCX_TLS", "all").split(",")) <= _NOT_SHARED
        self.dropped_messages = 0
        self.serial = itertools.count()

    async def register(self, region: Region) -> None:
        """Goes on if the awaiting task is cancelled: memory that UCX has pinned is never forgotten."""
        await asyncio.shield(asyncio.ensure_future(self._register(region)))

    async def _register(self, region: Region) -> None:
        async with self.mapping:
            if not self.memory.table.add(region):
                return
            self.memory.table.remove(region)  # no WRITE may use it before UCX knows it
            address, length_bytes = region.address, region.length_bytes
            self.mapped[region] = await asyncio.to_thread(self.ucx.map_memory, self.context, address, length_bytes)
            self._index()
            self.memory.table.add(region)

    async def deregister(self, region: Region) -> None:
        async with self.mapping:
            if self.memory.table.remove(region):
                self.retired.append(self.mapped.pop(region)[0])
                self._index()
            self.links = [link for link in self.links if not link.ended]
            if not any(link.holds_memory for link in self.links):
                retired, self.retired = self.retired, []
                for memory in retired:
                    await asyncio.to_thread(self.ucx.unmap_memory, self.context, memory)

    async def close(self) -> None:
        async with self.mapping:
            for memory in [*(memory for memory, _ in self.mapped.values()), *self.retired]:
                self.ucx.unmap_memory(self.context, memory)
            self.ucx.cleanup(self.context)

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


def lane_of(transports: Iterable[str]) -> str:
    """The best of the transports that UCX chose, in our words: `rdma`, `cma`, `shm` (another kind), `tcp`; or `unknown`."""
    names = set(transports)
    if names & _SHARED_MEMORY:
        return "cma" if "cma" in names else "shm"
    if names - _NOT_SHARED:
        return "rdma"
    return "tcp" if "tcp" in names else "unknown"
