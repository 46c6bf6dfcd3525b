"""One agent's transport and memory, driven by commands: in a process of its own, or in the test's (see `fence_rig`).

Arguments: the transport, our name, length of our memory in bytes.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
import time

import numpy as np
from transport_rig import LIMIT_S, LagMeter, Memory

from rdma_kv.errors import ClosedError, RdmaKvError, TransportError
from rdma_kv.memory import PAGE_BYTES, make_inaccessible
from rdma_kv.transport.base import WritePair
from rdma_kv.transport.nixl import NixlTransport, prepare_ucx_environment
from rdma_kv.transport.ucx import UcxTransport
from rdma_kv.types import Descriptor

TRANSPORTS = {"nixl": NixlTransport, "ucx": UcxTransport}


class FencePeer:
    """Every public coroutine is a command."""

    def __init__(self, transport, memory: Memory) -> None:
        self._transport = transport
        self._memory = memory
        self._received = asyncio.Queue()
        self._endpoints = {}
        self._writing = {}
        self.ended = asyncio.get_running_loop().create_future()

    async def metadata(self, peer):
        """Of the peer's endpoint, made anew if it was closed."""
        endpoint = self._endpoints[peer] = self._transport.endpoint(peer)
        endpoint.on_notification(lambda message: self._received.put_nowait([peer, message.decode()]))
        return {"blob": base64.b64encode(await endpoint.metadata()).decode(), "address": self._memory.address}

    async def connect(self, peer, blob):
        await self._endpoints[peer].connect(base64.b64decode(blob))
        return self._endpoints[peer].lane

    async def listen(self, peer):
        self._endpoints[peer].listen()

    async def write(self, peer, address, length_bytes, notification):
        """WRITE the first bytes of our memory to `address`. How it ended: `done`, or the error's status."""
        pair = WritePair(self._memory.part(0, length_bytes), Descriptor(address, length_bytes))
        try:
            await self._endpoints[peer].write([pair], notification.encode())
        except TransportError as error:
            return error.status
        return "done"

    async def begin(self, peer, address, length_bytes):
        """Start a WRITE whose end `outcome` tells."""
        job = self.write(peer, address, length_bytes, "begun")
        self._writing[peer] = asyncio.get_running_loop().create_task(job)

    async def outcome(self, peer):
        return await self._writing[peer]

    async def pending(self, peer):
        return not self._writing[peer].done()

    async def heard(self):
        """The next notification: (peer, message)."""
        return await self._received.get()

    async def fill(self, value):
        self._memory.bytes[:] = value

    async def count(self, value):
        return int(np.count_nonzero(self._memory.bytes == value))

    async def fence(self, peer, kind, fill=None):
        """Fence, and overwrite our memory with `fill` before anything else happens. Milliseconds and the worst lag.

        Two kinds are broken: `nothing` does nothing, `cancel` cancels every post in NIXL's own way and keeps the agent.
        """
        endpoint = self._endpoints[peer]
        calls = {
            "source": endpoint.fence_source,
            "target": endpoint.fence_target,
            "close": endpoint.close,
            "nothing": do_nothing,
            "cancel": lambda: cancel_posts(endpoint),
        }
        async with LagMeter() as meter:
            await asyncio.sleep(0)
            began = time.perf_counter()
            await calls[kind]()
            took_ms = (time.perf_counter() - began) * 1e3
            if fill is not None:
                self._memory.bytes[:] = fill
        return {"ms": took_ms, "lag_ms": max(meter.lags_s, default=0.0) * 1e3}

    async def retire(self, offset, length_bytes):
        """Make part of our memory inaccessible, in whole pages: the first byte of it, and how many bytes it is."""
        first = -(-(self._memory.address + offset) // PAGE_BYTES) * PAGE_BYTES
        length_bytes = length_bytes // PAGE_BYTES * PAGE_BYTES - PAGE_BYTES
        make_inaccessible(first, length_bytes)
        return first, length_bytes

    async def sample(self, offset, length_bytes, value):
        """How many bytes of a part of our memory are `value`."""
        return int(np.count_nonzero(self._memory.bytes[offset : offset + length_bytes] == value))

    async def closed(self, peer):
        """Whether the endpoint refuses to listen."""
        try:
            self._endpoints[peer].listen()
        except ClosedError:
            return True
        return False

    async def exit(self):
        self.ended.set_result(None)


async def do_nothing() -> None:
    pass


async def cancel_posts(endpoint) -> None:
    """End the WRITEs of a NIXL endpoint and release their handles."""
    link = endpoint._link

    def cancel():
        link._writes.abandon(TransportError("nixl", "cancelled", "by a test"))
        for post in link._writes._kept:
            post.handle.release()

    await endpoint._core.owner.call(cancel)


async def serve(kind: str, name: str, length_bytes: int) -> None:
    """Obey until told to exit, or until the parent is gone."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    transport = TRANSPORTS[kind](name)
    await transport.start()
    server = FencePeer(transport, await Memory(length_bytes).register(transport))
    reading = loop.create_task(read(lines, server))
    await server.ended
    reading.cancel()
    async with asyncio.timeout(LIMIT_S):
        await transport.close()


async def read(lines: asyncio.StreamReader, server: FencePeer) -> None:
    """Each command is a task of its own, so that one that waits holds up nothing."""
    async with asyncio.TaskGroup() as group:
        while line := await lines.readline():
            group.create_task(answer(server, *json.loads(line)))
    if not server.ended.done():
        server.ended.set_result(None)


async def answer(server: FencePeer, number: int, do: str, arguments: dict) -> None:
    try:
        result = {"number": number, "result": await getattr(server, do)(**arguments)}
    except RdmaKvError as error:
        result = {"number": number, "error": type(error).__name__, "text": str(error)}
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    prepare_ucx_environment(os.environ)
    asyncio.run(serve(sys.argv[1], sys.argv[2], int(sys.argv[3])))
