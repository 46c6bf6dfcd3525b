"""Sidecars as they are run, `rdma-kv agent` in processes of their own, and what engines beside them have.

Both engines have one rank; the KV follows `rig.cell`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import tomli_w
from rig import RankMemory, make_memory

from rdma_kv.client import Client
from rdma_kv.registry.static import AgentRecord, EngineRecord, dump_registry
from rdma_kv.session import AgentConfig
from rdma_kv.sidecar.status import ask_status
from rdma_kv.topology import ModelSpec, TieBreak, Topology
from rdma_kv.transport.named import usable
from rdma_kv.types import AgentId, ReplicaId, Role

MODEL = ModelSpec.gqa(layers=4, kv_heads=2, head_dim=64, itemsize=4, dtype="float32", fingerprint="toy")
TOPOLOGY = Topology.with_layers(4)
PREFILL, DECODE = ReplicaId("prefill", 0), ReplicaId("decode", 0)
PAGES, TOKENS = [5, 2, 9, 30, 17, 8, 1, 12], 120
TRANSPORTS = [name for name in ("ucx", "nixl") if usable(name, os.environ)]
LIMIT_S = 20.0


class SidecarProcess:
    """One `rdma-kv agent`, from its start to its end.

    Attributes:
        lines: what it has logged, each line as the object that it is; other lines as {"text": line}.
    """

    def __init__(self, folder: Path, name: str, **settings: Any) -> None:
        self.socket = folder / f"{name}.sock"
        self.config = folder / f"{name}.toml"
        said = {
            "socket": self.socket.name,
            "registry": "registry.toml",
            "transport": TRANSPORTS[0],
            "health": "127.0.0.1:0",
            "staging": {"slots": 4, "slot_bytes": 1 << 16},
            "timeouts": {"quiesce": 2.0, "retry": 0.1},
        }
        self.config.write_text(tomli_w.dumps(said | settings))
        self.lines: list[dict[str, Any]] = []
        self._new_line = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        self.lines.clear()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rdma_kv.cli.main",
            "agent",
            "--config",
            str(self.config),
            stderr=asyncio.subprocess.PIPE,
        )
        self._reading = asyncio.create_task(self._read())
        await self.logged(lambda line: line.get("event") == "ready")

    async def _read(self) -> None:
        assert self._process is not None
        assert self._process.stderr is not None
        while line := await self._process.stderr.readline():
            text = line.decode().strip()
            try:
                self.lines.append(json.loads(text))
            except ValueError:
                self.lines.append({"text": text})
            self._new_line.set()
        self._new_line.set()

    async def logged(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait for a log line."""
        async with asyncio.timeout(LIMIT_S):
            seen = 0
            while True:
                for line in self.lines[seen:]:
                    if wanted(line):
                        return line
                seen = len(self.lines)
                assert self._reading is not None
                assert not self._reading.done(), f"the sidecar has ended: {self.lines}"
                self._new_line.clear()
                await self._new_line.wait()

    def send_signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def ended(self) -> int:
        """Its exit status."""
        assert self._process is not None
        assert self._reading is not None
        async with asyncio.timeout(LIMIT_S):
            await self._reading
            return await self._process.wait()

    async def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        await self.ended()

    async def status(self) -> dict[str, Any]:
        return await ask_status(self.socket)

    async def close(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self.ended()


def engine_config(role: Role, **changes: Any) -> AgentConfig:
    return AgentConfig(role.value, role, (0,), TOPOLOGY, MODEL, **{"cluster": "test"} | changes)


def engine_memory(role: Role) -> RankMemory:
    kind = "nhd" if role is Role.PREFILL else "hnd"
    return make_memory(MODEL, TOPOLOGY, 0, component=0, pages=32, page_size=16, kind=kind)


class Pair:
    """A prefill and a decode engine in this process, each with a sidecar process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sidecars: dict[Role, SidecarProcess] = {}
        self.clients: dict[Role, Client] = {}
        self.memory = {role: engine_memory(role) for role in Role}

    @property
    def prefill(self) -> Client:
        return self.clients[Role.PREFILL]

    @property
    def decode(self) -> Client:
        return self.clients[Role.DECODE]

    def write_registry(self, addresses: dict[Role, tuple[str, int]] | None = None) -> None:
        """Both sidecars' agents, where they listen now."""
        addresses = addresses or {role: client.address for role, client in self.clients.items()}
        records = []
        for role, (host, port) in addresses.items():
            agent = AgentRecord(AgentId("test", role.value, role, 0), host, port, (0,))
            records.append(EngineRecord(role.value, role, TOPOLOGY, TieBreak.REPLICA, (agent,)))
        path = self.folder / "registry.new"
        path.write_bytes(dump_registry("test", records))
        path.rename(self.folder / "registry.toml")

    def register(self, role: Role) -> None:
        memory = self.memory[role]
        self.clients[role].register_pool(memory.layout, memory.array, replica=0, rank=0)

    async def send(self, request: int, *, attempt: int = 0, timeout_s: float = LIMIT_S) -> None:
        self.memory[Role.PREFILL].fill(request, PAGES, TOKENS)
        sending = self.prefill.send(
            f"k{request}", 0, PAGES, to=DECODE, tokens=TOKENS, attempt=attempt, timeout_s=timeout_s
        )
        async with sending as out:
            await out.push()
            out.metadata["request"] = request

    async def receive(self, request: int, *, attempt: int = 0, timeout_s: float = LIMIT_S) -> Any:
        got = await self.decode.receive(
            f"k{request}", 0, PAGES, source=PREFILL, tokens=TOKENS, attempt=attempt, timeout_s=timeout_s
        )
        self.memory[Role.DECODE].check(request, PAGES, 0, TOKENS)
        return got

    async def move(self, request: int, **options: Any) -> Any:
        """One request from fill to check."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.send(request, **options))
            receiving = group.create_task(self.receive(request, **options))
        return receiving.result()

    async def quiet(self) -> None:
        """Wait until every slot of both sidecars is free."""
        async with asyncio.timeout(LIMIT_S):
            for sidecar in self.sidecars.values():
                await until_quiet(sidecar)


async def until_quiet(sidecar: SidecarProcess) -> dict[str, Any]:
    """Wait until all slots of a sidecar are free, or it has none; the status then."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            status = await sidecar.status()
            closing = any(agent["state"] != "attached" for agent in status["agents"])
            if not closing and status["slots_free"] + status["slots_retired"] == status["slots_total"]:
                assert status["slots_held"] == 0, status
                return status
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def pair(folder: Path, *, of: dict[Role, dict[str, Any]] | None = None, **settings: Any) -> AsyncIterator[Pair]:
    """Two sidecar processes and their engines here, connected; all ended at the end.

    Args:
        of: settings of single sidecars.
    """
    made = Pair(folder)
    async with contextlib.AsyncExitStack() as stack:
        for role in Role:
            sidecar = SidecarProcess(folder, role.value, **settings | (of or {}).get(role, {}))
            stack.push_async_callback(sidecar.close)
            await sidecar.start()
            made.sidecars[role] = sidecar
        for role in Role:
            client = Client(engine_config(role), made.sidecars[role].socket)
            made.clients[role] = await stack.enter_async_context(client)
            made.register(role)
        made.write_registry()
        yield made


class EngineProcess:
    """An engine in a process of its own, see `engine_child`."""

    def __init__(self, role: Role, socket: Path, what: str) -> None:
        self._arguments = (role.value, str(socket), what)
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> tuple[str, int]:
        """Where its agent listens."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(Path(__file__).with_name("engine_child.py")),
            *self._arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        host, port = (await self.did("attached"))["address"]
        return host, port

    async def did(self, what: str) -> dict[str, Any]:
        """Wait until it says that it has done something, which is the next that it says."""
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(LIMIT_S):
            said = json.loads(await self._process.stdout.readline())
        assert said["did"] == what, said
        return said

    def go_on(self) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")

    async def kill(self) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        self._process._transport.close()  # a child that it has forked has its ends of the pipes
        async with asyncio.timeout(LIMIT_S):
            await self._process.wait()
