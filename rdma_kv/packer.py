"""The half of an agent that lives in the engine's process: its pools, and the kernels on them.

The packer never sees a peer, a transport or the protocol. It fills a staging slot with a box (gather) or empties one
(scatter); the addresses come from the planner's arithmetic over the registered layouts. Boxes that are ready when a launch
begins share it, up to 2 MiB, whatever transfer or replica they belong to. Kernels run on one worker thread, never
on the event loop. So do checksums of slots: behind the gather, while the slot is in the cache, and before the scatter.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rdma_kv.errors import ConfigError
from rdma_kv.kernels.checksum import Piece, checksums
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.reference import gather, scatter
from rdma_kv.layout import KvLayout
from rdma_kv.memory import locate_all
from rdma_kv.planner import Box, LinkPlan, PageTables, TokenShare, check_pages, token_offsets
from rdma_kv.topology import ModelSpec, Topology
from rdma_kv.types import Owned, Role

Int64Array = npt.NDArray[np.int64]

_LAUNCH_BYTES = 2 << 20
"""A launch on the host takes no more once it has so many bytes: its boxes are all done only when the last one is, and
their WRITEs, or slots, wait so long."""


@dataclass(frozen=True, slots=True)
class Pool:
    """One rank's memory of one component. The engine owns the memory and keeps it while the agent is open."""

    layout: KvLayout
    pointers: Int64Array  # [layers of the stage, kv]
    first_layer: int  # position in the component of the stage's first layer
    first_head: int
    memory: Any  # kept alive


class Packer:
    """Pools of the ranks that this agent owns, and launches over them."""

    def __init__(self, role: Role, model: ModelSpec, topology: Topology, owns: Sequence[Owned]) -> None:
        self._role = role
        self._model = model
        self._topology = topology
        self._owns = tuple(owns)
        self._pools: dict[tuple[int, int], Pool] = {}  # (component, rank)
        self._claimed = np.empty((0, 2), dtype=np.int64)  # [start, end) of all pool buffers
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="rdma-kv-packer")
        self._gathers = _Batcher(gather, _gather_launch, self._executor)
        self._scatters = _Batcher(scatter, _scatter_launch, self._executor)

    @property
    def launches(self) -> tuple[int, int]:
        """(gather, scatter) launches so far."""
        return self._gathers.launches, self._scatters.launches

    def close(self) -> None:
        self._executor.shutdown(wait=False)

    # --- pools ---------------------------------------------------------------------------------------------------------

    def register(self, component: str, layout: KvLayout, memory: Any, owned: Owned) -> None:  # noqa: ANN401
        """Take one rank's pool of one component.

        Raises:
            ConfigError: a rank that the agent does not own, a pool twice, or a layout that does not fit model, topology or
                memory; the field is named.
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
        addresses, sizes = locate_all("memory", memory)
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
        for index, component in enumerate(self._model.components):
            for owned in self._owns:
                stage = self._topology.stage_layers(self._topology.place(owned.rank)[0])
                if component.layers_within(stage).size and (index, owned.rank) not in self._pools:
                    raise ConfigError(
                        "register_pool",
                        f"component {component.name!r} of rank {owned.rank} has no pool; register it first",
                    )
        return tuple(self.page_sizes.get(index, 1) for index in range(len(self._model.components)))

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

    async def gather(self, chunk: Chunk, *, checksum: bool = False) -> int | None:
        """Pages to slot. Returns when the slot is filled; its checksum, if that is asked for."""
        return await self._gathers.run(_Job(chunk, checksum=checksum))

    async def scatter(self, chunk: Chunk, *, expected: int | None = None) -> int | None:
        """Slot to pages. Returns when the pages are filled.

        Args:
            expected: the checksum that the slot must have. If it has another, that one is returned, and no page was touched.
        """
        return await self._scatters.run(_Job(chunk, checksum=expected is not None, expected=expected))


class _Job(NamedTuple):
    """One chunk of a launch.

    Attributes:
        checksum: whether that of its packed form is needed.
        expected: what it must be before a scatter.
    """

    chunk: Chunk
    checksum: bool = False
    expected: int | None = None


Kernel = Callable[[Sequence[Chunk]], None]
_Launch = Callable[[Kernel, Sequence[_Job]], Sequence[int | None]]
_Waiting = tuple[_Job, asyncio.Future[int | None]]


def _sums(jobs: Sequence[_Job]) -> list[int | None]:
    """The checksums that are needed, each in its job's place."""
    pieces = [Piece(job.chunk.packed_address, job.chunk.packed_bytes) for job in jobs if job.checksum]
    found = iter(checksums(pieces) if pieces else ())
    return [next(found) if job.checksum else None for job in jobs]


def _gather_launch(kernel: Kernel, jobs: Sequence[_Job]) -> Sequence[int | None]:
    """Gather all, then sum them up. Per job: its checksum, if one is needed."""
    kernel([job.chunk for job in jobs])
    return _sums(jobs)


def _scatter_launch(kernel: Kernel, jobs: Sequence[_Job]) -> Sequence[int | None]:
    """Scatter those whose checksum is as expected. Per job: None, or the other checksum that its chunk has."""
    wrong = [None if found == job.expected else found for job, found in zip(jobs, _sums(jobs), strict=True)]
    good = [job.chunk for job, found in zip(jobs, wrong, strict=True) if found is None]
    if good:
        kernel(good)
    return wrong


class _Batcher:
    """Runs a kernel on the worker thread over everything that waits at that moment; each job has a result of its own.

    The thread takes the next launch by itself: while the loop is busy, with the copying of a transport for instance, the
    work goes on.
    """

    def __init__(self, kernel: Kernel, launch: _Launch, executor: ThreadPoolExecutor) -> None:
        self.kernel = kernel
        self.launches = 0
        self._launch = launch
        self._executor = executor
        self._lock = threading.Lock()  # of the two below
        self._waiting: list[_Waiting] = []
        self._running = False

    async def run(self, job: _Job) -> int | None:
        """Returns when the kernel is done with the job: its result. A launch goes on if the caller is cancelled."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[int | None] = loop.create_future()
        with self._lock:
            self._waiting.append((job, done))
            begin, self._running = not self._running, True
        if begin:
            loop.call_soon(self._begin, loop)  # with what else gets ready in this turn of the loop
        return await done

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            self._executor.submit(self._work, loop)
        except RuntimeError as exc:  # the executor was shut down
            with self._lock:
                waiting, self._waiting, self._running = self._waiting, [], False
            _settle(waiting, (), exc)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """On the worker thread."""
        while batch := self._next():
            self.launches += 1
            results: Sequence[int | None] = ()
            error = None
            try:
                results = self._launch(self.kernel, [job for job, _ in batch])
            except Exception as exc:  # noqa: BLE001 - reported to every caller of this launch
                error = exc
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
                loop.call_soon_threadsafe(_settle, batch, results, error)

    def _next(self) -> list[_Waiting]:
        """Take what goes into one launch: everything, or as much as is not worth waiting for the rest."""
        with self._lock:
            count = num_bytes = 0
            for job, _ in self._waiting:
                count += 1
                num_bytes += job.chunk.packed_bytes
                if num_bytes >= _LAUNCH_BYTES:
                    break
            batch, self._waiting = self._waiting[:count], self._waiting[count:]
            self._running = bool(batch)
        return batch


def _settle(batch: Sequence[_Waiting], results: Sequence[int | None], error: Exception | None) -> None:
    for place, (_, done) in enumerate(batch):
        if done.done():
            continue
        if error is None:
            done.set_result(results[place])
        else:
            done.set_exception(error)
