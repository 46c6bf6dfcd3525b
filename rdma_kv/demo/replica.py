"""One process of the demo: an agent with the pools of its ranks, and the model that fills or uses them.

It owns all ranks of a replica, or one of them, in a process of its own (or, on loopback, as a task), and does what the
parent says over its channel. The model runs on a worker thread, never on the event loop.

With a GPU, model and pools are there. Prefill then only launches: the forward pass, the writes to the pages, and an event
behind them, with which the KV is pushed before any of it has run.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from rdma_kv.agent import Agent
from rdma_kv.config import GpuConfig, StagingConfig, Timeouts
from rdma_kv.demo.model import DemoModel, KvArray, Launched
from rdma_kv.demo.pools import PageAllocator, RankPool, Share, TensorPool, assemble, cut, pages_for, view_of
from rdma_kv.demo.verify import alteration_is_seen, compare, control_page_size, fingerprints, overwrite_page
from rdma_kv.demo.wire import (
    Arrived,
    Channel,
    Decode,
    Expected,
    Failed,
    Go,
    Inspect,
    Inspected,
    Prefill,
    Sent,
    Started,
    Stop,
    Undivided,
    Verified,
    Verify,
)
from rdma_kv.errors import RdmaKvError
from rdma_kv.registry.static import StaticRegistry
from rdma_kv.session import AgentConfig
from rdma_kv.topology import Topology
from rdma_kv.transport.named import TransportMaker
from rdma_kv.types import Interval, ReplicaId, Role

CLUSTER = "demo"
STAGING = StagingConfig(slots=8, slot_bytes=64 << 10)  # small slots, so that a request takes several chunks

T = TypeVar("T")


@dataclass(frozen=True)
class ReplicaSpec:
    """What one process is.

    Attributes:
        ranks: those of the replica that this process owns.
        pages: size of each rank's pool.
        request_timeout_s: for one transfer.
        gpu: CUDA ordinal of the GPU that has the model and the pools; None is host memory.
    """

    role: Role
    replica: int
    ranks: tuple[int, ...]
    topology: Topology
    layout: str
    page_size: int
    pages: int
    seed: int
    registry: Path
    request_timeout_s: float
    gpu: int | None = None

    @property
    def name(self) -> str:
        """For people."""
        name = f"{self.role.value}/{self.replica}"
        return name if self.alone else f"{name} rank {self.ranks[0]}"

    @property
    def alone(self) -> bool:
        """This process owns the whole replica."""
        return self.ranks == self.topology.replica_ranks(self.replica)

    @property
    def leads(self) -> bool:
        """This process judges and generates for its replica."""
        return self.ranks[0] == self.topology.replica_ranks(self.replica)[0]

    def config(self, model: DemoModel) -> AgentConfig:
        return AgentConfig(
            engine=self.role.value,
            role=self.role,
            ranks=self.ranks,
            topology=self.topology,
            model=model.spec(),
            cluster=CLUSTER,
            staging=STAGING,
            timeouts=Timeouts(transfer=self.request_timeout_s, quiesce=5.0),
            gpu=None if self.gpu is None else GpuConfig(self.gpu),
        )

    def pool(self, model: DemoModel, rank: int) -> RankPool:
        """The pool of one rank, where the model is."""
        component = model.spec().components[0]
        arguments = self.layout, component, self.topology, rank
        if self.gpu is None:
            return RankPool(*arguments, pages=self.pages, page_size=self.page_size, seed=self.seed)
        device = f"cuda:{self.gpu}"
        return TensorPool(*arguments, device=device, pages=self.pages, page_size=self.page_size, seed=self.seed)


@dataclass
class _Held:
    """One request's pages here."""

    pages: list[int]
    tokens: int
    first_token: int = 0


class _Filled(NamedTuple):
    """Prefill's KV, in its pages or on the way there.

    Attributes:
        ready: a CUDA event behind the last write; None on the CPU, where all is there.
    """

    launched: Launched
    ready: Any


@dataclass
class Replica:
    """The pools of one process and what lies in them."""

    spec: ReplicaSpec
    model: DemoModel
    agent: Agent
    executor: Executor
    pools: dict[int, RankPool] = field(default_factory=dict)
    held: dict[int, _Held] = field(default_factory=dict)

    def __post_init__(self) -> None:
        spec = self.spec
        for rank in spec.ranks:
            pool = self.pools[rank] = spec.pool(self.model, rank)
            self.agent.register_pool(pool.layout, pool.buffers, replica=spec.replica, rank=rank)
        self._allocator = PageAllocator(spec.pages, spec.seed)

    async def compute(self, work: Callable[[], T]) -> T:
        """Run model or NumPy work off the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, work)

    def take(self, number: int, tokens: int) -> list[int]:
        pages = self._allocator.take(pages_for(tokens, self.spec.page_size))
        self.held[number] = _Held(pages, tokens)
        return pages

    def fill(self, pages: list[int], prompt: list[int]) -> _Filled:
        """Compute a prompt's KV and write it to its pages; on a GPU, only launch that."""
        component, topology = self.model.spec().components[0], self.spec.topology
        with self.model.scope():
            launched = self.model.launch(prompt)
            for rank, pool in self.pools.items():
                if isinstance(pool, TensorPool):
                    pool.write(pages, view_of(launched.kv, component, topology, rank))
                else:
                    pool.write(pages, cut(launched.kv.numpy(), component, topology, rank))
            return _Filled(launched, self.model.record())

    async def prefill(self, job: Prefill) -> Sent:
        begin = time.perf_counter()
        pages = self.take(job.number, len(job.prompt))
        filled = await self.compute(partial(self.fill, pages, job.prompt))
        pushed = time.perf_counter()
        to = ReplicaId(Role.DECODE.value, job.to)
        async with self.agent.send(job.key, self.spec.replica, pages, to=to, tokens=len(job.prompt)) as out:
            await out.push(ready=filled.ready)
            output = partial(self.model.output, filled.launched)
            first_token, extras = (
                output() if filled.ready is None else await self.compute(output)
            )  # a GPU is waited for
            out.metadata.update(extras, first_token=first_token)
        seconds = time.perf_counter() - pushed
        times = out.times
        said: Any = self.agent.stats()  # of a sidecar's client it is to be awaited
        stats = await said if inspect.isawaitable(said) else said
        started = [name for name, state in stats["transports"].items() if state == "started"]
        prints = await self.compute(lambda: fingerprints(self.model.fetch(filled.launched)))
        return Sent(job.number, prints, pushed - begin, seconds, times.gather, times.write, stats["lanes"], started)

    async def undivided(self, job: Undivided) -> Expected:
        tokens = await self.compute(partial(self.model.undivided, job.prompt, job.new_tokens))
        return Expected(job.number, tokens)

    async def decode(self, job: Decode) -> Arrived:
        pages = self.take(job.number, job.prompt_tokens)
        source = ReplicaId(Role.PREFILL.value, job.source)
        received = await self.agent.receive(
            job.key, self.spec.replica, pages, source=source, tokens=(0, job.prompt_tokens)
        )
        held = self.held[job.number]
        held.first_token = received.metadata["first_token"]
        shards = {} if self.spec.leads else await self.compute(partial(self._shards, held))
        encoded = {rank: shard.tobytes() for rank, shard in shards.items()}
        return Arrived(job.number, received.received_bytes, received.times.scatter, encoded)

    def _shards(self, held: _Held) -> dict[int, KvArray]:
        with self.model.scope():
            return {rank: pool.read(held.pages, held.tokens) for rank, pool in self.pools.items()}

    def _decode_shard(self, rank: int, data: bytes, tokens: int) -> KvArray:
        """Another process's shard `[layers of its stage, kv, tokens, heads, dim]`."""
        component = self.model.spec().components[0]
        share = Share.of(component, self.spec.topology, rank)
        shape = (share.layers.size, component.kv_factor, tokens, share.heads.size, -1)
        return np.frombuffer(data, dtype=np.float32).reshape(shape)

    async def verify(self, job: Verify) -> Verified:
        return await self.compute(partial(self._verify, job))

    def _verify(self, job: Verify) -> Verified:
        held, component, topology = self.held[job.number], self.model.spec().components[0], self.spec.topology
        shards = self._shards(held)
        shards |= {rank: self._decode_shard(rank, data, held.tokens) for rank, data in job.shards.items()}
        together = assemble(shards, component, topology)
        differences = list(together.differences)
        for rank, shard in shards.items():
            differences += compare(job.fingerprints, shard, component, topology, rank)
        begin = time.perf_counter()
        tokens = self.model.generate(together.kv, held.first_token, job.new_tokens)
        generate_s = time.perf_counter() - begin
        page_size = min(self.spec.page_size, held.tokens)
        spoilt = overwrite_page(together.kv, 0, control_page_size(self.spec.page_size, held.tokens))
        first = self.spec.ranks[0]
        return Verified(
            job.number,
            [held.first_token, *tokens],
            [held.first_token, *self.model.generate(spoilt, held.first_token, job.new_tokens)],
            differences,
            alteration_is_seen(
                job.fingerprints, shards[first], component, topology, first, page=0, page_size=page_size
            ),
            generate_s,
        )

    def inspect(self) -> Inspected:
        used = [(held.pages, Interval(0, held.tokens)) for held in self.held.values()]
        with self.model.scope():
            return Inspected([text for pool in self.pools.values() for text in pool.untouched(used)])


async def serve(
    spec: ReplicaSpec, model: DemoModel, channel: Channel, transport: str | TransportMaker, executor: Executor
) -> None:
    """Be one process of a replica until the parent says Stop or is gone."""
    async with Agent(spec.config(model), StaticRegistry(spec.registry), transport=transport) as agent:
        replica = Replica(spec, model, agent, executor)
        channel.send(Started(*agent.address))
        async with asyncio.TaskGroup() as group:
            while not isinstance(message := await channel.receive(), Stop | None):
                if not isinstance(message, Go):
                    group.create_task(_answer(replica, message, channel))
    await channel.close()


async def _answer(replica: Replica, message: Prefill | Decode | Undivided | Verify | Inspect, channel: Channel) -> None:
    number = -1 if isinstance(message, Inspect) else message.number
    try:
        match message:
            case Prefill():
                channel.send(await replica.prefill(message))
            case Decode():
                channel.send(await replica.decode(message))
            case Undivided():
                channel.send(await replica.undivided(message))
            case Verify():
                channel.send(await replica.verify(message))
            case Inspect():
                channel.send(await replica.compute(replica.inspect))
    except RdmaKvError as exc:
        channel.send(Failed(number, f"{type(exc).__name__}: {exc}"))


def model_thread() -> ThreadPoolExecutor:
    """One thread for all model work of a process."""
    return ThreadPoolExecutor(1, thread_name_prefix="demo-model")
