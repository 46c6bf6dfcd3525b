"""Agents in real processes that a test starts, asks and kills. Both engines have one rank; the KV follows `rig.cell`.

Processes come from a fork server that has imported everything, so that starting one takes a tenth of a second.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rig import make_memory

from rdma_kv.agent import Agent
from rdma_kv.config import StagingConfig, Timeouts
from rdma_kv.errors import RdmaKvError
from rdma_kv.registry.static import AgentRecord, EngineRecord, StaticRegistry, dump_registry
from rdma_kv.session import AgentConfig
from rdma_kv.topology import ModelSpec, TieBreak, Topology
from rdma_kv.transport.ucx_environment import prepare_ucx_environment
from rdma_kv.types import AgentId, Owned, ReplicaId, Role

MODEL = ModelSpec.gqa(layers=2, kv_heads=2, head_dim=64, itemsize=4, dtype="float32", fingerprint="toy")
TOPOLOGY = Topology.with_layers(2)
PAGES = [5, 2, 9, 0, 7, 11]
TOKENS = 90
ANSWER_S = 60.0  # a bound on hangs, not a goal
_POOL_PAGES = 16

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["process_agents", "rdma_kv.transport.nixl", "rdma_kv.transport.ucx"])


class Told(Exception):
    """The error of an agent in another process: its class, its text, and whether it is retryable."""

    def __init__(self, kind: str, text: str, retryable: bool) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text
        self.retryable = retryable

    def __reduce__(self) -> tuple[Any, ...]:
        return Told, (self.kind, self.text, self.retryable)


class ProcessAgent:
    """One agent in a process of its own. Use `start`, then `ask`; `kill` or `end` it.

    Attributes:
        port: where it listens.
        listens_at: since when, by the system's monotonic clock.
    """

    def __init__(
        self, role: Role, transport: str, registry: Path, timeouts: Timeouts, environment: dict[str, str]
    ) -> None:
        self.role = role
        self._ours, theirs = _CONTEXT.Pipe()
        self.process = _CONTEXT.Process(target=_main, args=(role, transport, registry, timeouts, environment, theirs))
        self._theirs = theirs
        self._asking = asyncio.Lock()  # one question at a time

    @property
    def pid(self) -> int:
        return self.process.pid

    async def start(self) -> None:
        await asyncio.to_thread(self.process.start)
        self._theirs.close()
        self.port, self.listens_at = await self._answer()

    async def ask(self, what: str, *arguments: Any) -> Any:
        """The answer to a question; see `_Member`. Raises Told where it is an error of ours."""
        async with self._asking:
            self._ours.send((what, arguments))
            return await self._answer()

    async def kill(self) -> None:
        """kill -9, and wait until it is gone. A question under way ends with Told."""
        self.process.kill()
        await asyncio.to_thread(self.process.join)

    async def end(self) -> int | None:
        """Let it close its agent; the exit status."""
        self._ours.close()
        await asyncio.to_thread(self.process.join, ANSWER_S)
        if self.process.is_alive():
            self.process.kill()
            await asyncio.to_thread(self.process.join)
        return self.process.exitcode

    async def _answer(self) -> Any:
        async with asyncio.timeout(ANSWER_S):
            try:
                answer = await asyncio.to_thread(self._ours.recv)
            except (EOFError, OSError) as exc:
                raise Told("Gone", f"{self.role.value} has ended", False) from exc
        if isinstance(answer, Told):
            raise answer
        return answer


def write_registry(path: Path, ports: dict[Role, int]) -> None:
    """Say where both agents listen; whole at any moment."""
    engines = [
        EngineRecord(
            role.value, role, TOPOLOGY, TieBreak.REPLICA,
            (AgentRecord(AgentId("default", role.value, role, 0), "127.0.0.1", port, (0,)),),
        )
        for role, port in ports.items()
    ]  # fmt: skip
    beside = path.with_suffix(".new")
    beside.write_bytes(dump_registry("default", engines))
    beside.replace(path)


class _Member:
    """What a process can be asked."""

    def __init__(self, agent: Agent) -> None:
        self.agent = agent
        self._memory = make_memory(MODEL, TOPOLOGY, 0, component=0, pages=_POOL_PAGES, page_size=16, kind="nhd")
        agent.register_pool(self._memory.layout, self._memory.array, **_owned(Owned(0, 0)))

    async def send(self, request: int, timeout_s: float) -> dict[str, Any]:
        self._memory.fill(request, PAGES, TOKENS)
        to = ReplicaId(Role.DECODE.value, 0)
        async with self.agent.send(f"k{request}", 0, PAGES, to=to, tokens=TOKENS, timeout_s=timeout_s) as out:
            await out.push()
        return {"lanes": self.agent.stats()["lanes"]}

    async def receive(self, request: int, timeout_s: float) -> None:
        """Bytes are checked."""
        source = ReplicaId(Role.PREFILL.value, 0)
        await self.agent.receive(f"k{request}", 0, PAGES, source=source, tokens=TOKENS, timeout_s=timeout_s)
        self._memory.check(request, PAGES, 0, TOKENS)

    async def block(self, seconds: float) -> None:
        """Hold the GIL and the loop, as an engine may."""
        ends = time.perf_counter() + seconds
        while time.perf_counter() < ends:
            sum(range(100_000))

    async def stats(self) -> dict[str, Any]:
        """And the number of our file descriptors."""
        return {**self.agent.stats(), "files": len(os.listdir("/proc/self/fd"))}

    async def linked(self, without: str) -> tuple[str, float]:
        """Wait for a link to a peer of another name: that name, and since when by the monotonic clock."""
        while True:
            for name in self.agent.stats()["link_transports"]:
                if name != without:
                    return name, time.monotonic()
            await asyncio.sleep(0.002)


def _owned(owned: Owned) -> dict[str, int]:
    return {"replica": owned.replica, "rank": owned.rank}


def _main(
    role: Role, transport: str, registry: Path, timeouts: Timeouts, environment: dict[str, str], pipe: Connection
) -> None:
    os.environ.update(environment)
    prepare_ucx_environment(os.environ)
    asyncio.run(_serve(role, transport, registry, timeouts, pipe))


async def _serve(role: Role, transport: str, registry: Path, timeouts: Timeouts, pipe: Connection) -> None:
    config = AgentConfig(
        role.value, role, (0,), TOPOLOGY, MODEL, staging=StagingConfig(slots=8, slot_bytes=1 << 14), timeouts=timeouts
    )
    async with Agent(config, StaticRegistry(registry), transport=transport) as agent:
        member = _Member(agent)
        pipe.send((agent.address[1], time.monotonic()))
        while True:
            try:
                what, arguments = await asyncio.to_thread(pipe.recv)
            except (EOFError, OSError):
                return
            try:
                answer = await getattr(member, what)(*arguments)
            except RdmaKvError as exc:
                answer = Told(type(exc).__name__, str(exc), exc.retryable)
            pipe.send(answer)
