"""Processes with agents whose pools lie on GPUs, and a cluster of a prefill and a decode agent in them.

A process lives through many tests, since its start (torch, CUDA, the first compilation of the kernels) takes seconds; it
opens and closes agents as it is told. Both agents of a cluster may be in one process, where the transport can.

Without a GPU (`gpu=None`) the same agents keep their pools in host memory.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import multiprocessing
import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rdma_kv.config import GpuConfig, StagingConfig, Timeouts
from rdma_kv.errors import RdmaKvError
from rdma_kv.registry.static import AgentRecord, EngineRecord, StaticRegistry, dump_registry
from rdma_kv.session import AgentConfig
from rdma_kv.topology import ModelSpec, TieBreak, Topology
from rdma_kv.types import AgentId, ReplicaId, Role

LIMIT_S = 60.0  # of any answer: a bound on hangs, no goal
OPEN_S = 180.0  # of the first agent of a process, which compiles the kernels
TIMEOUTS = Timeouts(transfer=30.0, quiesce=2.0)
_SPAWN = multiprocessing.get_context("spawn")


def gpus() -> int:
    """How many there are; 0 without torch."""
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


class Told(Exception):
    """An error of ours in another process: its class, its text, the field of a ConfigError, and whether to try again."""

    def __init__(self, kind: str, text: str, field_name: str, retryable: bool) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text, self.field, self.retryable = kind, text, field_name, retryable

    def __reduce__(self) -> tuple[Any, ...]:
        return Told, (self.kind, self.text, self.field, self.retryable)


@dataclass(frozen=True)
class Side:
    """One engine, all of whose ranks one agent owns; the engine is named after its role."""

    role: Role
    topology: Topology
    model: ModelSpec
    kind: str = "nhd"
    page: int = 16
    pages: int = 16
    transport: str = "ucx"
    gpu: GpuConfig | None = None
    staging: StagingConfig = StagingConfig(slots=8, slot_bytes=64 << 10)
    checksum: bool = False
    timeouts: Timeouts = TIMEOUTS

    def config(self) -> AgentConfig:
        return AgentConfig(
            self.role.value,
            self.role,
            tuple(range(self.topology.num_ranks)),
            self.topology,
            self.model,
            staging=self.staging,
            timeouts=self.timeouts,
            checksum=self.checksum,
            gpu=self.gpu,
        )


# --- the parent's half -------------------------------------------------------------------------------------------------


class Child:
    """A process that obeys: `call` and `begin` run a method of `Member` there, several at a time if they are begun so."""

    def __init__(self, **environ: str) -> None:
        self._pipe, there = _SPAWN.Pipe()
        self.process = _SPAWN.Process(target=main, args=(there, environ), daemon=True)
        self.process.start()
        there.close()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._gone = False
        threading.Thread(target=self._listen, daemon=True).start()

    def begin(self, command: str, **arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._gone:
                raise Told("Gone", "the process has ended", "", False)
            number = next(self._numbers)
            self._waiting[number] = future
            self._pipe.send((number, command, arguments))
        return future

    def call(self, command: str, *, limit_s: float = LIMIT_S, **arguments: Any) -> Any:
        return self.begin(command, **arguments).result(limit_s)

    def kill(self) -> None:
        """kill -9; what was begun ends with Told."""
        self.process.kill()
        self.process.join(LIMIT_S)

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, error, result = self._pipe.recv()
                with self._lock:
                    future = self._waiting.pop(number)
                future.set_result(result) if error is None else future.set_exception(error)
        with self._lock:
            self._gone = True
            waiting = list(self._waiting.values())
        for future in waiting:
            future.set_exception(Told("Gone", "the process has ended", "", False))


class Cluster:
    """A prefill and a decode agent, open and known to each other. Use with `with`: it closes them."""

    def __init__(self, folder: Path, prefill: Child, decode: Child, sides: Sequence[Side]) -> None:
        self.children = {Role.PREFILL: prefill, Role.DECODE: decode}
        self.sides = {side.role: side for side in sides}
        self._registry = folder / "cluster.toml"
        self._ports: dict[Role, int] = {}
        self.landed: list[tuple[int, int, list[int], range]] = []  # (decode replica, request, pages, tokens)
        opening = {role: self._open(role) for role in self.sides}
        errors = [future.exception(OPEN_S) for future in opening.values()]
        if any(errors):
            for role, error in zip(opening, errors, strict=True):
                if error is None:
                    self.call(role, "close")
            raise next(error for error in errors if error is not None)
        self._ports = {role: future.result() for role, future in opening.items()}
        self._write_registry()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        closing = [self.begin(role, "close") for role in self.sides]
        for future in closing:
            future.result(LIMIT_S)

    def begin(self, role: Role, command: str, **arguments: Any) -> Future[Any]:
        return self.children[role].begin(command, name=role.value, **arguments)

    def call(self, role: Role, command: str, **arguments: Any) -> Any:
        return self.begin(role, command, **arguments).result(LIMIT_S)

    def replace(self, role: Role, child: Child) -> None:
        """The agent's process is gone; open its successor in another."""
        self.children[role] = child
        self._ports[role] = self._open(role).result(OPEN_S)
        self._write_registry()

    def move(
        self,
        request: int,
        src: list[int],
        dst: list[int],
        tokens: int,
        *,
        start: int = 0,
        replicas: tuple[int, int] = (0, 0),
    ) -> list[str]:
        """One request: filled, sent, received. The lanes of the prefill agent. `check` compares."""
        return self.finish(self.start(request, src, dst, tokens, start=start, replicas=replicas))

    def start(
        self,
        request: int,
        src: list[int],
        dst: list[int],
        tokens: int,
        *,
        start: int = 0,
        replicas: tuple[int, int] = (0, 0),
    ) -> tuple[Future[Any], Future[Any]]:
        """As `move`, which `finish` ends."""
        self.landed.append((replicas[1], request, dst, range(start, tokens)))
        key, (prefill, decode) = f"k{request}", replicas
        sending = self.begin(
            Role.PREFILL, "send", key=key, replica=prefill, pages=src, tokens=tokens, to=decode, request=request
        )
        receiving = self.begin(
            Role.DECODE, "receive", key=key, replica=decode, pages=dst, tokens=(start, tokens), source=prefill
        )
        return sending, receiving

    def finish(self, started: tuple[Future[Any], Future[Any]]) -> list[str]:
        lanes = started[0].result(LIMIT_S)
        started[1].result(LIMIT_S)
        return lanes

    def check(self) -> None:
        """All decode pools hold what has landed, bit for bit, and nothing else; nothing is held on either side."""
        assert self.call(Role.DECODE, "wrong", landed=self.landed) == []
        self.check_settled()

    def check_settled(self) -> None:
        for role in self.sides:
            self.call(role, "settle")

    def _open(self, role: Role) -> Future[Any]:
        return self.begin(role, "open", side=self.sides[role], registry=self._registry)

    def _write_registry(self) -> None:
        """Whole at any moment."""
        engines = [
            EngineRecord(
                role.value,
                role,
                side.topology,
                TieBreak.REPLICA,
                (
                    AgentRecord(
                        AgentId("default", role.value, role, 0), "127.0.0.1", self._ports[role], side.config().ranks
                    ),
                ),
            )
            for role, side in self.sides.items()
        ]
        draft = self._registry.with_suffix(".new")
        draft.write_bytes(dump_registry("default", engines))
        draft.replace(self._registry)


# --- the child's half --------------------------------------------------------------------------------------------------


@dataclass
class _Open:
    side: Side
    agent: Any
    pools: dict[int, Any]  # by rank
    device: str
    landings: int = 0  # receives under way
    events: dict[str, Any] = field(default_factory=dict)  # of slow producers, by key


class Member:
    """What a process can be asked; all methods but the first group take the agent's `name`."""

    def __init__(self) -> None:
        self._open: dict[str, _Open] = {}
        self._network: Any = None
        self._release = asyncio.Event()
        self._step: Any = None
        self.launched: deque[tuple[str, int, int, int]] = deque(maxlen=100_000)

    # --- the process ---------------------------------------------------------------------------------------------------

    async def hold_notifications(self) -> None:
        """Agents with transport `loopback` that open from now on meet; no notification arrives before `let_go`."""
        from rdma_kv.transport.loopback import Fault, LoopbackNetwork

        async def sleep(_: float) -> None:
            await self._release.wait()

        self._release.clear()
        self._network = LoopbackNetwork(faults=lambda _: Fault(notification_delay_s=1.0), sleep=sleep)

    async def let_go(self) -> None:
        self._release.set()

    async def meet(self) -> None:
        """As `hold_notifications`, without a fault."""
        from rdma_kv.transport.loopback import LoopbackNetwork

        self._network = LoopbackNetwork()

    async def launches(self) -> list[tuple[str, int, int, int]]:
        """(kernel, programs, stream's handle, stream's priority) of each launch since the last question."""
        found = list(self.launched)
        self.launched.clear()
        return found

    async def default_streams(self, device: int) -> set[int]:
        """The handles that mean the default stream of a GPU."""
        import torch

        return {0, 1, 2, torch.cuda.default_stream(device).cuda_stream}  # 1 and 2 are its names in the driver's API

    # --- agents --------------------------------------------------------------------------------------------------------

    async def open(self, name: str, side: Side, registry: Path) -> int:
        """Start an agent and register all its pools; its port."""
        from gpu_pools import Pool

        from rdma_kv.agent import Agent
        from rdma_kv.transport.loopback import LoopbackTransport

        transport: Any = side.transport
        if transport == "loopback":
            transport = lambda own: LoopbackTransport(self._network, own)  # noqa: E731
        agent = Agent(side.config(), StaticRegistry(registry), transport=transport)
        try:
            await agent.start()
        except BaseException:
            await agent.close()
            raise
        device = "cpu" if side.gpu is None else f"cuda:{side.gpu.device}"
        opened = self._open[name] = _Open(side, agent, {}, device)
        for owned in agent.config.owns:
            pool = Pool(
                side.kind, side.model, side.topology, owned.rank, pages=side.pages, page=side.page, device=device
            )
            opened.pools[owned.rank] = pool
            self._wait_for_gpu(opened)
            agent.register_pool(pool.layout, pool.buffers, replica=owned.replica, rank=owned.rank)
        return agent.address[1]

    async def close(self, name: str) -> None:
        await self._open.pop(name).agent.close()

    async def stats(self, name: str) -> dict[str, Any]:
        return self._open[name].agent.stats()

    async def settle(self, name: str) -> None:
        """Wait until every slot is free and nothing is under way."""
        async with asyncio.timeout(LIMIT_S / 2):
            while not _settled(stats := self._open[name].agent.stats()):
                assert _sum(stats) == stats["slots_total"], stats
                await asyncio.sleep(0.005)

    async def wrong_pool(self, name: str, how: str) -> None:
        """Open no pool of this agent as it should be: `how` says what is wrong. Raises what `register_pool` does."""
        import torch

        opened = self._open[name]
        pool, rank = opened.pools[0], 0
        (shape,) = (tuple(buffer.shape) for buffer in pool.buffers)
        memory = {
            "host array": lambda: pool.buffers[0].cpu().numpy(),
            "host tensor": lambda: pool.buffers[0].cpu(),
            "another device": lambda: torch.empty(shape, dtype=torch.uint8, device=_another(opened.device)),
            "not contiguous": lambda: torch.empty((*shape[:-1], 2 * shape[-1]), dtype=torch.uint8, device=pool.device)[
                ..., ::2
            ],
        }[how]()
        fresh = type(opened.agent)(opened.agent.config, StaticRegistry(Path("none")), transport=opened.side.transport)
        async with fresh:
            fresh.register_pool(pool.layout, memory, replica=0, rank=rank)

    # --- transfers -----------------------------------------------------------------------------------------------------

    async def fill(self, name: str, request: int, replica: int, pages: list[int], tokens: int) -> None:
        """Write a request's KV to its pages; it is there when this returns."""
        opened = self._open[name]

        def write() -> None:
            for rank in opened.side.topology.replica_ranks(replica):
                opened.pools[rank].writer(request, pages, range(tokens))()
            self._wait_for_gpu(opened)

        await asyncio.to_thread(write)

    async def send(
        self, name: str, key: str, replica: int, pages: list[int], tokens: int, to: int, request: int | None = None
    ) -> list[str]:
        """Send a request, filled before where it is given; the agent's lanes."""
        if request is not None:
            await self.fill(name, request, replica, pages, tokens)
        agent = self._open[name].agent
        async with agent.send(key, replica, pages, to=ReplicaId(Role.DECODE.value, to), tokens=tokens) as out:
            await out.push()
        return agent.stats()["lanes"]

    async def receive(
        self, name: str, key: str, replica: int, pages: list[int], tokens: tuple[int, int], source: int
    ) -> int:
        opened = self._open[name]
        opened.landings += 1
        try:
            origin = ReplicaId(Role.PREFILL.value, source)
            received = await opened.agent.receive(key, replica, pages, source=origin, tokens=tokens)
        finally:
            opened.landings -= 1
        return received.received_bytes

    async def wrong(self, name: str, landed: list[tuple[int, int, list[int], range]]) -> list[str]:
        """Where the pools of all ranks differ from (replica, request, pages, tokens) over their first content."""
        opened = self._open[name]
        found = []
        for rank, pool in opened.pools.items():
            replica = opened.side.topology.replica_of(rank)
            mine = [(request, pages, tokens) for place, request, pages, tokens in landed if place == replica]
            found += [f"rank {rank}: {text}" for text in await asyncio.to_thread(pool.wrong, mine)]
        return found

    async def send_while_writing(
        self,
        name: str,
        key: str,
        pages: list[int],
        tokens: int,
        contents: tuple[int, int],
        cycles: int,
        with_event: bool,
    ) -> dict[str, Any]:
        """Push pages that a slow kernel still writes.

        The pages hold `contents[0]`. A stream spins for `cycles`, then writes `contents[1]`; its event comes after that.

        Returns:
            How long `push` took, whether the producer was still at it afterwards, and whether it was when all was sent.
        """
        import torch

        opened = self._open[name]
        await self.fill(name, contents[0], 0, pages, tokens)
        writers = [pool.writer(contents[1], pages, range(tokens)) for pool in opened.pools.values()]
        self._wait_for_gpu(opened)
        stream = torch.cuda.Stream(opened.device)
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            for write in writers:
                write()
            event = opened.events[key] = torch.cuda.Event()
            event.record(stream)
        to = ReplicaId(Role.DECODE.value, 0)
        async with opened.agent.send(key, 0, pages, to=to, tokens=tokens) as out:
            began = time.perf_counter()
            await out.push(ready=event if with_event else None)
            push_s, writing = time.perf_counter() - began, not event.query()
        sent_early = not event.query()
        await asyncio.to_thread(event.synchronize)
        return {"push_s": push_s, "writing_after_push": writing, "writing_when_sent": sent_early}

    async def is_writing(self, name: str, key: str) -> bool:
        """Whether the slow producer of a request is still at it; waits until it has begun."""
        events = self._open[name].events
        async with asyncio.timeout(LIMIT_S):
            while key not in events:
                await asyncio.sleep(0.001)
        return not events[key].query()

    async def send_layers(self, name: str, request: int, pages: list[int], tokens: int) -> None:
        """Send a request layer by layer, all of them at once."""
        opened = self._open[name]
        await self.fill(name, request, 0, pages, tokens)
        to = ReplicaId(Role.DECODE.value, 0)
        async with opened.agent.send(f"k{request}", 0, pages, to=to, tokens=tokens) as out:
            for layer in range(opened.side.topology.num_layers):
                await out.push(layers=(layer, layer + 1))

    async def send_and_fail(self, name: str, key: str, pages: list[int], tokens: int) -> None:
        """Push the first layer only; when some of it has gone, leave the block with an error."""
        agent = self._open[name].agent
        before = agent.stats()["gather_launches"]
        to = ReplicaId(Role.DECODE.value, 0)
        with suppress(LookupError):
            async with agent.send(key, 0, pages, to=to, tokens=tokens) as out:
                await out.push(layers=(0, 1))
                async with asyncio.timeout(LIMIT_S):
                    while agent.stats()["gather_launches"] == before:
                        await asyncio.sleep(0)
                raise LookupError("prefill has given up")

    async def until_launches(self, name: str, gathers: int) -> None:
        """Wait for so many gathers in all."""
        async with asyncio.timeout(LIMIT_S):
            while self._open[name].agent.stats()["gather_launches"] < gathers:
                await asyncio.sleep(0.001)

    # --- beside the engine's own kernels -------------------------------------------------------------------------------

    async def make_decode_step(self, name: str) -> None:
        """A graph of kernels that read 2 GiB of weights: about 0.5 ms of an H200, bound by its memory as decoding is."""
        import torch

        device = self._open[name].device

        def make() -> Any:
            with torch.cuda.device(device):
                weights = [torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(16)]
                vector = torch.randn(1, 8192, device=device, dtype=torch.bfloat16)

                def step() -> None:
                    for weight in weights:
                        vector @ weight

                stream = torch.cuda.Stream(device)
                with torch.cuda.stream(stream):
                    step()  # cuBLAS gets its workspace outside of the graph
                    stream.synchronize()
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                        step()
                return graph, stream, weights, vector

        self._step = await asyncio.to_thread(make)

    async def decode_steps(self, name: str, least: int, beside: str = "") -> list[float]:
        """Milliseconds of each of at least `least` steps; with `beside`, as long as that agent receives.

        Raises:
            AssertionError: it has not received all the while.
        """
        import torch

        graph, stream, *_ = self._step
        opened = self._open[beside] if beside else None
        if opened is not None:
            async with asyncio.timeout(LIMIT_S):
                while not opened.landings:
                    await asyncio.sleep(0)

        def measure() -> list[float]:
            took = []
            with torch.cuda.device(self._open[name].device), torch.cuda.stream(stream):
                while opened.landings if opened is not None else len(took) < least:
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record(stream)
                    graph.replay()
                    end.record(stream)
                    end.synchronize()
                    took.append(begin.elapsed_time(end))
            return took

        took = await asyncio.to_thread(measure)
        assert len(took) >= least, f"{len(took)} steps beside the transfers, and {least} are needed"
        return took

    async def send_many(self, name: str, rounds: int, pages: list[list[int]], tokens: int) -> None:
        """Requests from pages of their own, all at once; and that several times."""
        for turn in range(rounds):
            sends = (self.send(name, f"{turn}-{n}", 0, table, tokens, 0) for n, table in enumerate(pages))
            await asyncio.gather(*sends)

    async def receive_many(self, name: str, rounds: int, pages: list[list[int]], tokens: int) -> None:
        """The other side of `send_many`."""
        opened = self._open[name]
        opened.landings += 1  # also between two rounds
        try:
            for turn in range(rounds):
                receives = (
                    self.receive(name, f"{turn}-{n}", 0, table, (0, tokens), 0) for n, table in enumerate(pages)
                )
                await asyncio.gather(*receives)
        finally:
            opened.landings -= 1

    def _wait_for_gpu(self, opened: _Open) -> None:
        """For what was launched on the default stream; not for others."""
        if opened.device != "cpu":
            import torch

            torch.cuda.current_stream(opened.device).synchronize()


def _sum(stats: dict[str, Any]) -> int:
    return stats["slots_free"] + sum(stats["slots_held"].values()) + stats["slots_retired"]


def _settled(stats: dict[str, Any]) -> bool:
    nothing_held = not sum(stats["slots_held"].values()) and not stats["transfers"]
    return nothing_held and stats["slots_free"] + stats["slots_retired"] == stats["slots_total"]


def _another(device: str) -> str:
    """A device that this one is not: another GPU, or that of tensors without memory."""
    return f"cuda:{(int(device.partition(':')[2]) + 1) % gpus()}" if gpus() > 1 else "meta"


def _watch_launches(member: Member) -> None:
    """Note every launch of the agents' kernels; they run as always."""
    from rdma_kv.kernels import device_torch

    class Watched(device_torch.TorchDevice):
        def gather(self, works: Any, stream: Any, programs: int, after: Any) -> Any:
            member.launched.append(("gather", programs, stream.cuda_stream, stream.priority))
            return super().gather(works, stream, programs, after)

        def scatter(self, chunks: Any, stream: Any, programs: int, after: Any) -> None:
            member.launched.append(("scatter", programs, stream.cuda_stream, stream.priority))
            super().scatter(chunks, stream, programs, after)

    device_torch.TorchDevice = Watched


def main(pipe: Connection, environ: dict[str, str]) -> None:
    from rdma_kv.transport.ucx_environment import prepare_ucx_environment

    os.environ.update(environ)
    prepare_ucx_environment(os.environ)
    asyncio.run(_serve(pipe))


async def _serve(pipe: Connection) -> None:
    member = Member()
    if gpus():
        _watch_launches(member)
    tasks: set[asyncio.Task[None]] = set()
    while True:
        try:
            question = await asyncio.to_thread(pipe.recv)
        except (EOFError, OSError):
            os._exit(0)  # agents of a parent that is gone need no farewell
        task = asyncio.create_task(_answer(member, pipe, *question))
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _answer(member: Member, pipe: Connection, number: int, command: str, arguments: dict[str, Any]) -> None:
    try:
        pipe.send((number, None, await getattr(member, command)(**arguments)))
    except RdmaKvError as error:
        told = Told(type(error).__name__, str(error), getattr(error, "field", ""), error.retryable)
        pipe.send((number, told, None))
    except Exception:  # noqa: BLE001 - the test shall see it, with its place
        pipe.send((number, AssertionError(traceback.format_exc()), None))
