"""What a transfer is made of, alone: the kernels, one WRITE, and a loop of these without protocol.

The loop is the floor of a small request: gather, WRITE, a byte on a pipe; scatter, a byte on a pipe back. Its gather, scatter
and pipes block, and nothing else runs meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import select
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from rdma_kv.bench.contestants import make_transport
from rdma_kv.bench.gpu_memory import KvMemory
from rdma_kv.errors import RdmaKvError
from rdma_kv.kernels import reference
from rdma_kv.kernels.launch import Chunk
from rdma_kv.transport.base import Endpoint, Transport, WritePair
from rdma_kv.types import Descriptor, Role

_BYTE = b"b"
_LIMIT_S = 30.0  # of one WRITE, and of waiting for the other side's byte

Launch = Callable[[Sequence[Chunk]], None]


def launcher(ordinal: int | None, *, scatter: bool, programs: int) -> Launch:
    """One launch a call, that returns when the bytes are in place. `programs` is not read on the host."""
    if ordinal is None:
        return reference.scatter if scatter else reference.gather
    import torch

    from rdma_kv.kernels.gather import gather
    from rdma_kv.kernels.scatter import scatter as scatter_kernel

    kernel, device = scatter_kernel if scatter else gather, torch.device("cuda", ordinal)
    stream = torch.cuda.Stream(device)

    def launch(chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            kernel([chunk], device=device, stream=stream, programs=programs)
        stream.synchronize()

    return launch


def kernel_s(launch: Launch, chunks: Sequence[Chunk]) -> float:
    """Seconds of all chunks, launched one after the other without waiting between them."""
    begin = time.perf_counter()
    launch(chunks)
    return time.perf_counter() - begin


class Plain:
    """One side of a transport without an agent. Prefill writes from its staging memory to that of decode.

    Args:
        pipes: one that brings bytes from the other side, and one that takes them there.
    """

    def __init__(self, backend: str, role: Role, staging: KvMemory, pipes: tuple[Connection, Connection]) -> None:
        self._other = role.other
        self._staging = staging
        self._from, self._to = pipes
        self._transport: Transport = make_transport(backend, f"plain-{role.value}@1")
        self._endpoint: Endpoint | None = None
        self._remote = Descriptor(0, 0)

    async def open(self) -> tuple[bytes, int, int]:
        """What the other side needs: metadata, address and device of the staging memory."""
        await self._transport.start()
        staging = self._staging
        await self._transport.register(staging.address, staging.length_bytes, device=staging.device)
        self._endpoint = self._transport.endpoint(f"plain-{self._other.value}@1")
        self._endpoint.on_notification(lambda _: None)
        return await self._endpoint.metadata(), staging.address, staging.device

    async def connect(self, metadata: bytes, address: int, device: int) -> None:
        self._remote = Descriptor(address, 0, device)
        await self._opened().connect(metadata)

    def listen(self) -> None:
        """Decode: WRITEs come."""
        self._opened().listen()

    def unlisten(self) -> None:
        self._opened().unlisten()

    async def write(self, piece_bytes: int, total_bytes: int) -> float:
        """Seconds of WRITEs of `piece_bytes` each, posted together. The decode side listens."""
        sizes = [min(piece_bytes, total_bytes - at) for at in range(0, total_bytes, piece_bytes)]
        begin = time.perf_counter()
        async with asyncio.timeout(_LIMIT_S):
            await asyncio.gather(*(self._write(number * piece_bytes, size) for number, size in enumerate(sizes)))
        return time.perf_counter() - begin

    async def request(self, gather: Launch, chunk: Chunk) -> float:
        """Prefill: seconds of one request of the loop without protocol. The decode side serves."""
        begin = time.perf_counter()
        gather([chunk])
        await self._write(0, chunk.packed_bytes)
        os.write(self._to.fileno(), _BYTE)
        self._await_byte()
        return time.perf_counter() - begin

    def serve(self, scatter: Launch, chunk: Chunk, count: int) -> None:
        """Decode: take `count` requests. Blocks, so it belongs on a thread."""
        for _ in range(count):
            self._await_byte()
            scatter([chunk])
            os.write(self._to.fileno(), _BYTE)

    async def close(self) -> None:
        await self._transport.close()

    def _await_byte(self) -> None:
        readable, _, _ = select.select([self._from], [], [], _LIMIT_S)
        if not readable or os.read(self._from.fileno(), 1) != _BYTE:
            raise RdmaKvError("no byte came over the pipe: the other side is gone, or stuck")

    async def _write(self, offset: int, length_bytes: int) -> None:
        local = Descriptor(self._staging.address + offset, length_bytes, self._staging.device)
        remote = Descriptor(self._remote.address + offset, length_bytes, self._remote.device)
        await self._opened().write([WritePair(local, remote)], _BYTE)

    def _opened(self) -> Endpoint:
        if self._endpoint is None:
            raise RdmaKvError("the endpoint is not open")
        return self._endpoint
