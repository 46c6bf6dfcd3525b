"""The half of an agent that lives in the engine's process: its pools, and the kernels on them.

The packer never sees a peer, a transport or the protocol. It fills a staging slot with a box (gather) or empties one
(scatter); the addresses come from the planner's arithmetic over the registered layouts. The kernels run where the pools
are: `packer_host` or `packer_cuda`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rdma_kv.config import GpuConfig
from rdma_kv.engine_side import Kernels
from rdma_kv.errors import ConfigError
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.reference import gather, scatter
from rdma_kv.kernels.work import Work
from rdma_kv.layout import KvLayout
from rdma_kv.memory import locate_all
from rdma_kv.packer_host import HostKernels
from rdma_kv.planner import Box, LinkPlan, PageTables, TokenShare, check_pages, token_offsets
from rdma_kv.topology import ModelSpec, Topology
from rdma_kv.types import Owned, Role

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pool:
    """One rank's memory of one component. The engine owns the memory and keeps it while the agent is open."""

    layout: KvLayout
    pointers: Int64Array  # [layers of the stage, kv]
    first_layer: int  # position in the component of the stage's first layer
    first_head: int
    memory: Any  # kept alive


class Packer:
    """Pools of the ranks that this agent owns, and launches over them.

    Args:
        gpu: where the pools are; None is host memory.
        kernels: in place of those of this process.
    """

    def __init__(
        self,
        role: Role,
        model: ModelSpec,
        topology: Topology,
        owns: Sequence[Owned],
        *,
        gpu: GpuConfig | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        self._role = role
        self._model = model
        self._topology = topology
        self._owns = tuple(owns)
        self._pools: dict[tuple[int, int], Pool] = {}  # (component, rank)
        self._complete: tuple[int, ...] | None = None  # page sizes, once all pools are there
        self._claimed = np.empty((0, 2), dtype=np.int64)  # [start, end) of all pool buffers
        self._device = None if gpu is None else gpu.device
        self.kernels = kernels or (HostKernels(gather, scatter) if gpu is None else _cuda_kernels(gpu))

    @property
    def launches(self) -> tuple[int, int]:
        """(gather, scatter) launches so far."""
        return self.kernels.launches

    async def start(self) -> None:
        """Get kernels ready; on a GPU that takes seconds, off the loop.

        Raises:
            ConfigError: field `gpu`: there is no such GPU, or what it needs is not installed.
        """
        await self.kernels.start()

    async def close(self) -> bool:
        """End all kernels. Whether none can touch memory any more."""
        return await self.kernels.close()

    # --- pools ---------------------------------------------------------------------------------------------------------

    def register(self, component: str, layout: KvLayout, memory: Any, owned: Owned) -> None:  # noqa: ANN401
        """Take one rank's pool of one component.

        Raises:
            ConfigError: a rank that the agent does not own, a pool twice, or a layout that does not fit model, topology or
                memory; the field is named.
        """
        addresses, sizes = locate_all("memory", memory, device=self._device)
        self.register_at(component, layout, addresses, sizes, owned, memory)

    def register_at(
        self,
        component: str,
        layout: KvLayout,
        addresses: Int64Array,
        sizes: Int64Array,
        owned: Owned,
        memory: Any = None,  # noqa: ANN401
    ) -> None:
        """As `register`, of memory that need not be this process's.

        Args:
            addresses, sizes: int64 `[buffers]`, as the process that has the memory sees it.
            memory: kept alive.
        """
        index = self._model.components.index(self._model.component(component))
        spec = self._model.components[index]
        if owned not in self._owns:
            raise ConfigError(
                "rank", f"(replica {owned.replica}, rank {owned.rank}) is not among the agent's {self._owns}"
            )
        if (index, owned.rank) in self._pools:
            raise ConfigError("rank", f"component {component!r} of rank {owned.rank} is registered already")
        layers = spec.layers_within(self._topology.stage_layers(self._topology.place(owned.rank)[0]))
        heads = spec.heads_of(self._topology.attention_rank(owned.rank), self._topology.attention_tp)
        for name, have, need in (
            ("layout.num_layers", layout.num_layers, layers.size),
            ("layout.kv_factor", layout.kv_factor, spec.kv_factor),
            ("layout.heads", layout.heads, heads.size),
            ("layout.row_bytes", layout.row_bytes, spec.row_bytes),
        ):
            if have != need:
                raise ConfigError(name, f"{have}; rank {owned.rank} holds {need} by model and topology")
        page_size = self.page_sizes.get(index, layout.page_size)
        if page_size != layout.page_size:
            raise ConfigError("layout.page_size", f"{layout.page_size}; other ranks of {component!r} have {page_size}")
        required = layout.required_bytes()
        if len(required) != len(sizes):
            raise ConfigError("memory", f"{len(sizes)} buffers; the layout {layout.name!r} has {len(required)}")
        for number, (have, need) in enumerate(zip(sizes.tolist(), required, strict=True)):
            if have < need:
                raise ConfigError(f"memory[{number}]", f"{have} bytes; the layout reaches {need}")
        self._claim(addresses, np.array(required, dtype=np.int64))
        pointers = layout.pointers(addresses)
        self._pools[index, owned.rank] = Pool(layout, pointers, layers.start, heads.start, memory)

    def _claim(self, addresses: Int64Array, sizes: Int64Array) -> None:
        """Note the memory of a pool. Two pools must not share bytes, or one request would destroy another.

        Raises:
            ConfigError: an overlap; nothing has been noted.
        """
        starts, ends = self._claimed[:, 0], self._claimed[:, 1]
        for number, (start, size) in enumerate(zip(addresses.tolist(), sizes.tolist(), strict=True)):
            if ((starts < start + size) & (start < ends)).any():
                raise ConfigError(f"memory[{number}]", "overlaps the memory of a pool that is registered already")
        self._claimed = np.concatenate([self._claimed, np.stack([addresses, addresses + sizes], axis=1)])

    @property
    def page_sizes(self) -> dict[int, int]:
        """Page size by component number, of what is registered."""
        return {component: pool.layout.page_size for (component, _), pool in self._pools.items()}

    def check_complete(self) -> tuple[int, ...]:
        """Page sizes in component order.

        Raises:
            ConfigError: a pool of an owned rank is missing.
        """
        if self._complete is not None:
            return self._complete  # nothing is ever taken away
        for index, component in enumerate(self._model.components):
            for owned in self._owns:
                stage = self._topology.stage_layers(self._topology.place(owned.rank)[0])
                if component.layers_within(stage).size and (index, owned.rank) not in self._pools:
                    raise ConfigError(
                        "register_pool",
                        f"component {component.name!r} of rank {owned.rank} has no pool; register it first",
                    )
        self._complete = tuple(self.page_sizes.get(index, 1) for index in range(len(self._model.components)))
        return self._complete

    def page_tables(self, replica: int, pages: Any, ends: Sequence[int]) -> PageTables:  # noqa: ANN401
        """Check a request's page tables.

        Args:
            pages: one sequence of page numbers for all components, or a mapping from component name to one. `pages[i]`
                holds tokens `[i * page_size, (i + 1) * page_size)` of the request.
            ends: per component, the token position behind the last one that is used.

        Raises:
            ConfigError: a table that cannot be right; the field is named.
        """
        names = [component.name for component in self._model.components]
        if isinstance(pages, Mapping):
            if set(pages) != set(names):
                raise ConfigError("pages", f"names {sorted(pages)}; the model's components are {names}")
        else:
            pages = dict.fromkeys(names, pages)
        tables = []
        for index, name in enumerate(names):
            num_pages, needed = 1 << 62, 0
            for owned in self._owns:
                pool = self._pools.get((index, owned.rank))
                if owned.replica == replica and pool is not None:
                    page_size, context = pool.layout.page_size, self._topology.place(owned.rank)[1]
                    share = TokenShare(self._topology, context, page_size, ends[index])
                    num_pages = min(num_pages, pool.layout.num_pages)
                    needed = max(needed, -(-share.kept // page_size))
            tables.append(check_pages(f"pages[{name!r}]", pages[name], num_pages, needed))
        return PageTables(replica, tuple(tables))

    # --- work ----------------------------------------------------------------------------------------------------------

    def chunk(self, plan: LinkPlan, box: Box, tables: PageTables, packed_address: int) -> Chunk:
        """The kernel's view of a box on our side. Pure arithmetic over checked page tables."""
        move = plan.move(box.move)
        sending = self._role is Role.PREFILL
        pool = self._pools[move.component, move.src if sending else move.dst]
        share = plan.src_share(box.move) if sending else plan.dst_share(box.move)
        local = share.local(plan.positions(box.move, box.tokens))
        offsets = token_offsets(pool.layout, tables.pages[move.component], local, move.heads.start - pool.first_head)
        layers = slice(box.layers.start - pool.first_layer, box.layers.end - pool.first_layer)
        return Chunk(
            packed_address=packed_address,
            pointers=pool.pointers[layers].reshape(1, -1),
            token_pool=np.zeros(local.size, dtype=np.int32),
            token_offset=offsets,
            heads=move.heads.size,
            head_stride=pool.layout.head_stride,
            row_bytes=pool.layout.row_bytes,
        )

    async def fired(self, events: Sequence[Any]) -> None:
        """Returns when all CUDA events have fired."""
        await self.kernels.fired(events)

    def use_lane(self, lane: str) -> None:
        """A link's WRITEs go over `lane` from now on: launches must outrun it."""
        self.kernels.use_lane(lane)

    async def gather(self, work: Work) -> int | None:
        """Pages to slot. Returns when the slot is filled: its checksum, if that is asked for."""
        return await self.kernels.gather(work)

    async def scatter(self, work: Work) -> int | None:
        """Slot to pages. Returns when the pages are filled.

        If the slot has another checksum than expected, that one is returned, and no page was touched.
        """
        return await self.kernels.scatter(work)


def _cuda_kernels(gpu: GpuConfig) -> Kernels:
    from rdma_kv.packer_cuda import CudaKernels

    return CudaKernels(gpu)
