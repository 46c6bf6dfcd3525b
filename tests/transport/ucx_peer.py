"""One agent's transport over UCX, or NIXL beside it, in a process of its own; obeys JSON lines. See `ucx_rig`.

Arguments: `ucx` or `nixl`, our name, the peer's name, length of our memory in bytes, seed of its content (0: zeros).
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import time

from transport_peer import Peer, read
from transport_rig import Memory

from rdma_kv.errors import TransportError
from rdma_kv.transport.base import WritePair
from rdma_kv.transport.nixl import NixlTransport
from rdma_kv.transport.ucx import UcxTransport
from rdma_kv.transport.ucx_environment import prepare_ucx_environment
from rdma_kv.types import Descriptor


class UcxPeer(Peer):
    """Adds what the tests of fences and the measurements need."""

    async def begin(self, pairs, notification):
        """Start a WRITE and return at once."""
        self._writing = asyncio.create_task(self.write(pairs, notification))
        self._writing.add_done_callback(lambda task: task.exception())

    async def outcome(self):
        """How the WRITE of `begin` ended: `done`, or the status of its error."""
        try:
            await self._writing
        except TransportError as error:
            return error.status
        return "done"

    async def fence(self, kind):
        """Fence, and how many seconds it took."""
        began = time.perf_counter()
        await getattr(self._endpoint, f"fence_{kind}")()
        return time.perf_counter() - began

    async def fill(self, value):
        self._memory.bytes[:] = value

    async def count(self, value):
        """How many bytes of our memory are `value`."""
        return int((self._memory.bytes == value).sum())

    async def many(self, address, length_bytes, count):
        """`count` WRITEs, one after the other: the median of their seconds and all of them together."""
        made = [WritePair(self._memory.part(0, length_bytes), Descriptor(address, length_bytes))]
        times_s, began = [], time.perf_counter()
        for _ in range(count):
            start = time.perf_counter()
            await self._endpoint.write(made, b"n")
            times_s.append(time.perf_counter() - start)
        return {"median_s": statistics.median(times_s), "all_s": time.perf_counter() - began}

    async def batch(self, address, length_bytes, count):
        """One WRITE of `count` pieces with gaps between them; its seconds."""
        made = [
            WritePair(
                self._memory.part(2 * n * length_bytes, length_bytes),
                Descriptor(address + 2 * n * length_bytes, length_bytes),
            )
            for n in range(count)
        ]
        began = time.perf_counter()
        await self._endpoint.write(made, b"batch")
        return time.perf_counter() - began

    async def settle(self):
        """Let pass what a peer that just went on could still bring: 1,000 turns of the loop, 0.2 s at least."""
        until = time.perf_counter() + 0.2
        for turn in range(1 << 30):
            if turn >= 1000 and time.perf_counter() > until:
                return
            await asyncio.sleep(0)

    async def process_s(self):
        """CPU seconds of this process."""
        return time.process_time()

    async def library(self):
        """Of `ucx`: where its libucp came from, and its version."""
        return [self._transport.library.source, self._transport.library.version]


async def serve(kind: str, name: str, peer: str, length_bytes: int, seed: int) -> int:
    """Obey until told to exit; the exit status."""
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader(limit=1 << 24)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    transport = {"ucx": UcxTransport, "nixl": NixlTransport}[kind](name)
    await transport.start()
    memory = await Memory(length_bytes, seed or None).register(transport)
    server = UcxPeer(transport, peer, memory)
    reading = loop.create_task(read(lines, server))
    status = await server.status
    reading.cancel()
    await transport.close()
    return status


if __name__ == "__main__":
    prepare_ucx_environment(os.environ)
    sys.exit(asyncio.run(serve(*sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5]))))
