"""A sidecar on the test's own loop, over the loopback transport; and one that lies."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
from sidecar_rig import TOPOLOGY, engine_config, engine_memory

from rdma_kv.client import Client
from rdma_kv.config import StagingConfig, Timeouts
from rdma_kv.errors import RdmaKvError
from rdma_kv.memory import SharedMemory
from rdma_kv.registry.static import AgentRecord, EngineRecord, dump_registry
from rdma_kv.sidecar.channel import Channel
from rdma_kv.sidecar.server import Sidecar
from rdma_kv.sidecar.settings import SidecarConfig
from rdma_kv.sidecar.wire import Attached, FromEngine, Segment, Work, decode_of_engine, encode
from rdma_kv.topology import TieBreak
from rdma_kv.transport.loopback import LoopbackNetwork, LoopbackTransport
from rdma_kv.types import AgentId, Role


def settings(folder: Path, **changes: Any) -> SidecarConfig:
    given = {"staging": StagingConfig(4, 1 << 16), "timeouts": Timeouts(quiesce=1.0), "health": ""} | changes
    return SidecarConfig(folder / "one.sock", folder / "registry.toml", **given)


@contextlib.asynccontextmanager
async def one_sidecar(folder: Path, **changes: Any) -> AsyncIterator[Sidecar]:
    """A sidecar for both engines."""
    network = LoopbackNetwork()
    async with Sidecar(settings(folder, **changes), transport=lambda name: LoopbackTransport(network, name)) as sidecar:
        yield sidecar


def write_registry(folder: Path, clients: dict[Role, Any]) -> None:
    records = []
    for role, client in clients.items():
        agent = AgentRecord(AgentId("test", role.value, role, 0), *client.address, (0,))
        records.append(EngineRecord(role.value, role, TOPOLOGY, TieBreak.REPLICA, (agent,)))
    (folder / "registry.toml").write_bytes(dump_registry("test", records))


@contextlib.asynccontextmanager
async def engines(folder: Path, sidecar: Sidecar) -> AsyncIterator[tuple[dict[Role, Client], dict[Role, Any]]]:
    """A prefill and a decode client of one sidecar, and their memory."""
    async with contextlib.AsyncExitStack() as stack:
        clients, memory = {}, {}
        for role in Role:
            memory[role] = engine_memory(role)
            clients[role] = await stack.enter_async_context(Client(engine_config(role), sidecar.config.socket))
            clients[role].register_pool(memory[role].layout, memory[role].array, replica=0, rank=0)
        write_registry(folder, clients)
        yield clients, memory


class Liar:
    """A sidecar that says what a test wants: it attaches whoever comes, shares one segment of a page, and `says`.

    Attributes:
        heard: what the client has said, in order.
    """

    def __init__(self, path: Path) -> None:
        self.heard: list[FromEngine] = []
        self.memory = SharedMemory(4096)
        self.channel: Channel | None = None
        self.lost: RdmaKvError | None = None
        self._new = asyncio.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.setblocking(False)

    async def attach(self) -> None:
        """Take the next client as far as it is attached."""
        await self.attach_half()
        self.say(Attached("liar#1", "127.0.0.1", 7600, 60.0))

    async def attach_half(self) -> None:
        """Take the next client as far as it has mapped the staging."""
        self.lost = None
        sock, _ = await asyncio.get_running_loop().sock_accept(self._listener)
        self.channel = Channel(sock, name="client", on_frame=self._on_frame, on_lost=self._on_lost)
        await self.hear(lambda message: type(message).__name__ == "Attach")
        self.channel.send(encode(Segment(0, self.memory.length_bytes)), [self.memory.fd])
        await self.hear(lambda message: type(message).__name__ == "Mapped")

    def say(self, message: Any) -> None:
        assert self.channel is not None
        self.channel.send(encode(message))

    def _on_frame(self, body: bytes) -> None:
        self.heard.append(decode_of_engine("client", body))
        self._new.set()

    def _on_lost(self, error: RdmaKvError) -> None:
        self.lost = error
        self._new.set()

    async def hear(self, wanted: Callable[[FromEngine], bool]) -> Any:
        """Wait for a message of the client, and forget all up to it."""
        async with asyncio.timeout(10.0):
            while True:
                while self.heard:
                    message = self.heard.pop(0)
                    if wanted(message):
                        return message
                self._new.clear()
                await self._new.wait()

    async def close(self) -> None:
        if self.channel is not None:
            await self.channel.close()
        self._listener.close()
        self.memory.close_fd()


def honest_work(memory: Any, number: int) -> Work:
    """A gather of the first 16 rows of one plane."""
    row = memory.layout.row_bytes
    return Work(
        work=number,
        scatter=False,
        packed=(0, 0),
        bounce=None,
        pointers=np.array([memory.array.ctypes.data], "<i8").tobytes(),
        planes=1,
        token_pool=np.zeros(8, "<i4").tobytes(),
        token_offset=(np.arange(8, dtype="<i8") * memory.layout.token_stride).tobytes(),
        heads=1,
        head_stride=row,
        row_bytes=row,
        checksum=False,
        expected=None,
        after=[],
    )
