"""One agent's NIXL transport in a process of its own, driven by JSON lines on its standard input. See `transport_child`.

Arguments: our name, the peer's name, length of our memory in bytes, seed of its content (0: zeros).
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import time
import zlib

from transport_rig import LagMeter, Memory

from rdma_kv.errors import RdmaKvError
from rdma_kv.transport.base import WritePair
from rdma_kv.transport.nixl import NixlTransport, prepare_ucx_environment
from rdma_kv.types import Descriptor


class Peer:
    """Every public coroutine is a command."""

    def __init__(self, transport: NixlTransport, peer: str, memory: Memory) -> None:
        self._transport = transport
        self._endpoint = transport.endpoint(peer)
        self._memory = memory
        self._received: list[str] = []
        self._events = asyncio.Queue()
        self._meter = LagMeter()
        self._endpoint.on_notification(self._take)
        self.status = asyncio.get_running_loop().create_future()

    def _take(self, message: bytes) -> None:
        self._received.append(message.decode())
        self._events.put_nowait(None)

    async def metadata(self):
        blob = base64.b64encode(await self._endpoint.metadata()).decode()
        return {"blob": blob, "address": self._memory.address}

    async def connect(self, blob):
        await self._endpoint.connect(base64.b64decode(blob))
        return self._endpoint.lane

    async def listen(self):
        self._endpoint.listen()

    async def unlisten(self):
        self._endpoint.unlisten()

    async def write(self, pairs, notification):
        """`pairs`: (our offset, the peer's address, bytes). Answers with the seconds that it took."""
        made = [WritePair(self._memory.part(offset, n), Descriptor(address, n)) for offset, address, n in pairs]
        began = time.perf_counter()
        await self._endpoint.write(made, notification.encode())
        return time.perf_counter() - began

    async def wait(self, count):
        while len(self._received) < count:
            await self._events.get()
        return self._received

    async def crc(self, offset, length_bytes):
        return zlib.crc32(self._memory.bytes[offset : offset + length_bytes])

    async def clear(self):
        self._memory.bytes[:] = 0

    async def lag_start(self):
        self._meter = LagMeter()
        await self._meter.__aenter__()

    async def lag_stop(self):
        await self._meter.__aexit__()
        return {"p99_s": self._meter.p99_s, "max_s": max(self._meter.lags_s)}

    async def cpu(self):
        """Seconds of CPU that the process and the owner thread have used."""
        owner = self._transport.owner_thread
        return {"process_s": time.process_time(), "owner_s": thread_cpu_s(owner)}

    async def exit(self, status):
        self.status.set_result(status)


def thread_cpu_s(thread) -> float:
    """CPU seconds that a live thread has used."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


async def serve(name: str, peer: str, length_bytes: int, seed: int) -> int:
    """Obey until told to exit; the exit status."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    transport = NixlTransport(name)
    await transport.start()
    memory = await Memory(length_bytes, seed or None).register(transport)
    server = Peer(transport, peer, memory)
    reading = loop.create_task(read(lines, server))
    status = await server.status
    reading.cancel()
    await transport.close()
    return status


async def read(lines: asyncio.StreamReader, server: Peer) -> None:
    """Each command runs as a task of its own, so that a pending WRITE holds up nothing."""
    async with asyncio.TaskGroup() as group:
        while line := await lines.readline():
            command = json.loads(line)
            group.create_task(answer(server, command["number"], command["do"], command["arguments"]))
    if not server.status.done():
        server.status.set_result(0)  # the parent is gone


async def answer(server: Peer, number: int, do: str, arguments: dict) -> None:
    try:
        result = {"number": number, "result": await getattr(server, do)(**arguments)}
    except RdmaKvError as error:
        result = {"number": number, "error": type(error).__name__, "text": str(error)}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    prepare_ucx_environment(os.environ)
    sys.exit(asyncio.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))))
