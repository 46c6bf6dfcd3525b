"""The measured processes of `bench gpu` and `bench multigpu`: agents of one role, and what they are compared with.

A process is one rank, with a pool on one GPU and one in host memory. Its agents are opened as they are asked for, one for
each `Link`. Nothing of CUDA is touched before `start`, since the processes are spawned.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterable

from rdma_kv.agent import Agent
from rdma_kv.bench.gpu_links import TRANSFER_S, Link, SideSpec, Way, Wire, link_of
from rdma_kv.bench.gpu_memory import SPREAD, Kv, KvMemory, Pages, Rows, content, wrong_rows
from rdma_kv.bench.gpu_plain import Launch, Plain, kernel_s, launcher
from rdma_kv.bench.gpu_raw import RawNixl, wrong_pieces
from rdma_kv.errors import RdmaKvError
from rdma_kv.kernels.launch import Chunk
from rdma_kv.registry.static import StaticRegistry
from rdma_kv.types import ReplicaId, Role

_EXPECT_LOOK_S = 50e-6  # between two looks for an EXPECT


class GpuSide:
    """A measured process, as the parent asks it. See `Worker`."""

    def __init__(self, spec: SideSpec) -> None:
        self._spec = spec
        self._stack = contextlib.AsyncExitStack()
        self._pools: dict[bool, KvMemory] = {}  # by whether it lies on the GPU
        self._orders: dict[tuple[int, bool], Pages] = {}
        self._sent: dict[tuple[int, KvMemory], Kv] = {}
        self._staging: KvMemory | None = None
        self._agents: dict[Link, Agent] = {}
        self._raw: RawNixl | None = None
        self._plain: dict[str, Plain] = {}
        self._launches: dict[int, Launch] = {}  # by number of programs
        self._chunks: dict[tuple[int, int, int], list[Chunk]] = {}
        self._receiving: asyncio.Task[int] | None = None
        self._serving: asyncio.Future[None] | None = None

    async def start(self) -> str:
        """Make the device's pool, filled at prefill; the device's name."""
        name = "host"
        if self._spec.ordinal is not None:
            import torch

            torch.cuda.set_device(self._spec.ordinal)
            name = torch.cuda.get_device_name(self._spec.ordinal)
        self._pool(gpu=self._spec.ordinal is not None)
        return name

    async def close(self) -> None:
        await self._stack.aclose()

    # --- agents --------------------------------------------------------------------------------------------------------

    async def open_agent(self, wire: Wire) -> int:
        """Make and start a link's agent: its port."""
        link = link_of(wire)
        agent = Agent(
            self._spec.agent_config(link), StaticRegistry(self._spec.registry(link)), transport=link.transport
        )
        await self._stack.enter_async_context(agent)
        pool, rows = self._pool(gpu=self._on_gpu(link)), Rows(link.row_bytes, self._spec.layers)
        layout = rows.layout(pool.length_bytes)
        agent.register_pool(layout, pool.buffer, replica=self._spec.rank, rank=self._spec.rank)
        self._agents[link] = agent
        return agent.address[1]

    async def expect(self, wire: Wire, key: str, num_bytes: int, source: int) -> None:
        """Decode: begin to receive."""
        link = link_of(wire)
        self._receiving = asyncio.create_task(
            self._receive(link, key, num_bytes, ReplicaId(Role.PREFILL.value, source))
        )

    async def received(self) -> int:
        """Decode: the bytes that came, once all have."""
        assert self._receiving is not None
        return await self._receiving

    async def _receive(self, link: Link, key: str, num_bytes: int, source: ReplicaId) -> int:
        agent, pages, tokens = self._agents[link], self._pages(link), self._rows(link).tokens(num_bytes)
        received = await agent.receive(key, self._spec.rank, pages.of(tokens), tokens=tokens, source=source)
        return received.received_bytes

    async def send(self, wire: Wire, key: str, num_bytes: int, target: int, awaited: bool) -> float:
        """Prefill: seconds from the call of `send` to the end of its block.

        Args:
            awaited: the clock starts when the EXPECT has come, with what is given ahead.
        """
        link = link_of(wire)
        agent, tokens, to = self._agents[link], self._rows(link).tokens(num_bytes), ReplicaId(Role.DECODE.value, target)
        pages = self._pages(link).of(tokens)
        if awaited:
            async with asyncio.timeout(TRANSFER_S):
                while not agent.stats()["unmatched"]:  # noqa: ASYNC110 - the public API has no event for it
                    await asyncio.sleep(_EXPECT_LOOK_S)
        begin = time.perf_counter()
        async with agent.send(key, self._spec.rank, pages, tokens=tokens, to=to) as out:
            await out.push()
        return time.perf_counter() - begin

    async def lanes(self, wire: Wire) -> list[str]:
        """What has carried a link's KV."""
        lanes: Iterable[str] = self._agents[link_of(wire)].stats()["lanes"]
        return list(lanes)

    async def wipe(self, gpu: bool) -> None:
        """Decode: forget what came."""
        await asyncio.to_thread(self._pool(gpu=gpu and self._spec.ordinal is not None).wipe)

    async def wrong_rows(self, wire: Wire, num_bytes: int, source: int) -> int:
        """Decode: rows of the last request that are not those of prefill rank `source`."""
        link = link_of(wire)
        pool, rows = self._pool(gpu=self._on_gpu(link)), self._rows(link)

        def count() -> int:  # takes seconds, in which heartbeats go on
            return wrong_rows(rows, rows.tokens(num_bytes), pool.read(), self._sent_by(source, pool))

        return await asyncio.to_thread(count)

    # --- NIXL's own API ------------------------------------------------------------------------------------------------

    async def open_raw(self) -> bytes:
        """What the other side needs."""
        self._raw = RawNixl(self._spec.role, self._pool(gpu=self._spec.ordinal is not None))
        return self._raw.opened()

    async def connect_raw(self, other: bytes) -> None:
        self._opened_raw().connect(other)

    async def close_raw(self) -> None:
        """End its progress thread, which spins, before other things are measured."""
        self._raw = None

    async def write_raw(self, piece_bytes: int, total_bytes: int) -> float:
        """Prefill: seconds of one WRITE."""
        return self._opened_raw().write(piece_bytes, total_bytes)

    async def wrong_pieces(self, piece_bytes: int, total_bytes: int) -> int:
        """Decode."""
        pool = self._pool(gpu=self._spec.ordinal is not None)

        def count() -> int:
            return wrong_pieces(piece_bytes, total_bytes, pool.read(), self._sent_by(0, pool))

        return await asyncio.to_thread(count)

    def _opened_raw(self) -> RawNixl:
        if self._raw is None:
            raise RdmaKvError("NIXL's API is not open")
        return self._raw

    # --- parts, and the loop without protocol --------------------------------------------------------------------------

    async def kernel(self, row_bytes: int, slot_bytes: int, num_bytes: int, programs: int) -> float:
        """Seconds of our kernel over all that is moved: gather at prefill, scatter at decode."""
        return kernel_s(self._launch(programs), self._packed(row_bytes, slot_bytes, num_bytes))

    async def open_plain(self, backend: str) -> tuple[bytes, int, int]:
        """What the other side needs."""
        plain = Plain(backend, self._spec.role, self._staged(), self._spec.pipes)
        self._stack.push_async_callback(plain.close)
        self._plain[backend] = plain
        return await plain.open()

    async def connect_plain(self, backend: str, metadata: bytes, address: int, device: int) -> None:
        await self._plain[backend].connect(metadata, address, device)

    async def listen(self, backend: str, on: bool) -> None:
        """Decode."""
        plain = self._plain[backend]
        (plain.listen if on else plain.unlisten)()

    async def write_plain(self, backend: str, piece_bytes: int, total_bytes: int) -> float:
        """Prefill: seconds of the WRITEs alone."""
        return await self._plain[backend].write(piece_bytes, total_bytes)

    async def serve_floor(self, backend: str, row_bytes: int, num_bytes: int, count: int, programs: int) -> None:
        """Decode: begin to take `count` small requests of the loop without protocol."""
        launch, (chunk,) = self._launch(programs), self._packed(row_bytes, num_bytes, num_bytes)
        plain = self._plain[backend]
        plain.listen()
        loop = asyncio.get_running_loop()
        self._serving = loop.run_in_executor(None, plain.serve, launch, chunk, count)

    async def served(self, backend: str) -> None:
        """Decode: they are done."""
        assert self._serving is not None
        await self._serving
        self._plain[backend].unlisten()

    async def floor(self, backend: str, row_bytes: int, num_bytes: int, count: int, programs: int) -> float:
        """Prefill: median seconds of `count` small requests of the loop without protocol."""
        launch, (chunk,) = self._launch(programs), self._packed(row_bytes, num_bytes, num_bytes)
        return statistics.median([await self._plain[backend].request(launch, chunk) for _ in range(count)])

    # --- memory --------------------------------------------------------------------------------------------------------

    def _pool(self, *, gpu: bool) -> KvMemory:
        """The pool there, made when it is first asked for."""
        if gpu not in self._pools:
            spec = self._spec
            most_bytes = spec.most_host_bytes if spec.ordinal is not None and not gpu else spec.most_bytes
            memory = KvMemory(SPREAD * most_bytes, spec.ordinal if gpu else None)
            if spec.role is Role.PREFILL:
                memory.write(content(memory.length_bytes, spec.rank, memory.ordinal))
            else:
                memory.wipe()
            self._pools[gpu] = memory
        return self._pools[gpu]

    def _staged(self) -> KvMemory:
        if self._staging is None:
            self._staging = KvMemory(self._spec.most_bytes, self._spec.ordinal)
        return self._staging

    def _sent_by(self, rank: int, pool: KvMemory) -> Kv:
        """What the pool of a prefill rank that is like `pool` holds; the last one is kept."""
        if (rank, pool) not in self._sent:
            self._sent.clear()  # before the next is made: two may not fit
            self._sent[rank, pool] = content(pool.length_bytes, rank, pool.ordinal)
        return self._sent[rank, pool]

    def _on_gpu(self, link: Link) -> bool:
        return link.way is not Way.HOST and self._spec.ordinal is not None

    def _rows(self, link: Link) -> Rows:
        return Rows(link.row_bytes, self._spec.layers)

    def _pages(self, link: Link) -> Pages:
        return self._pages_of(link.row_bytes, gpu=self._on_gpu(link))

    def _pages_of(self, row_bytes: int, *, gpu: bool) -> Pages:
        key = (row_bytes, gpu)
        if key not in self._orders:
            length_bytes = self._pool(gpu=gpu).length_bytes
            self._orders[key] = Pages(Rows(row_bytes, self._spec.layers), self._spec.role, length_bytes)
        return self._orders[key]

    def _packed(self, row_bytes: int, slot_bytes: int, num_bytes: int) -> list[Chunk]:
        """All that is moved, in chunks of a slot, in our staging memory."""
        key = (row_bytes, slot_bytes, num_bytes)
        if key not in self._chunks:
            gpu = self._spec.ordinal is not None
            pages = self._pages_of(row_bytes, gpu=gpu)
            tokens = pages.rows.tokens(num_bytes)
            self._chunks[key] = pages.chunks(self._pool(gpu=gpu), tokens, self._staged().address, slot_bytes)
        return self._chunks[key]

    def _launch(self, programs: int) -> Launch:
        if programs not in self._launches:
            scatter = self._spec.role is Role.DECODE
            self._launches[programs] = launcher(self._spec.ordinal, scatter=scatter, programs=programs)
        return self._launches[programs]
