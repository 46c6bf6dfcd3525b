"""What the transport tests share: memory with a pattern, transports of one back-end, the lag of an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time

import numpy as np

from rdma_kv.transport.base import WritePair
from rdma_kv.transport.loopback import LoopbackNetwork, LoopbackTransport
from rdma_kv.transport.nixl import NixlTransport
from rdma_kv.transport.ucx import UcxTransport
from rdma_kv.types import Descriptor

_MAKE = {"nixl": NixlTransport, "ucx": UcxTransport}

LIMIT_S = 20.0  # upper bound of any one await: far above what is needed, so that only a hang reaches it


class Memory:
    """Host memory of a test; random bytes from `seed`, or zeros without one."""

    def __init__(self, length_bytes: int, seed: int | None = None) -> None:
        if seed is None:
            self.bytes = np.zeros(length_bytes, dtype=np.uint8)
        else:
            self.bytes = np.random.default_rng(seed).integers(1, 256, length_bytes, dtype=np.uint8)
        self.address = self.bytes.ctypes.data
        self.region = None

    async def register(self, transport) -> Memory:
        self.region = await transport.register(self.address, self.bytes.nbytes)
        return self

    def part(self, offset: int, length_bytes: int) -> Descriptor:
        return Descriptor(self.address + offset, length_bytes)


def pair(source: Memory, destination: Memory, offset=0, length_bytes=None, destination_offset=None) -> WritePair:
    """A pair between the same offsets of two memories, if not said otherwise."""
    length_bytes = source.bytes.nbytes - offset if length_bytes is None else length_bytes
    there = offset if destination_offset is None else destination_offset
    return WritePair(source.part(offset, length_bytes), destination.part(there, length_bytes))


class Rig:
    """Makes started transports of one back-end that can reach each other, and closes them."""

    def __init__(self, kind: str, network: LoopbackNetwork | None = None) -> None:
        self.kind = kind
        self._network = network or LoopbackNetwork()
        self._transports = []

    async def transport(self, name: str):
        made = LoopbackTransport(self._network, name) if self.kind == "loopback" else _MAKE[self.kind](name)
        await made.start()
        self._transports.append(made)
        return made

    async def __aenter__(self) -> Rig:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        async with asyncio.timeout(LIMIT_S):
            for transport in self._transports:
                await transport.close()


class Side:
    """One end of a link under test: the endpoint and every notification that its callback got."""

    def __init__(self, transport, peer: str) -> None:
        self.transport = transport
        self.endpoint = transport.endpoint(peer)
        self.received: list[bytes] = []
        self.endpoint.on_notification(self._take)
        self._events = asyncio.Queue()

    def _take(self, message: bytes) -> None:
        self.received.append(message)
        self._events.put_nowait(message)

    async def wait_for(self, count: int) -> list[bytes]:
        """Wait until `count` notifications have come in all."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.received) < count:
                await self._events.get()
        return self.received


async def link(left, right) -> tuple[Side, Side]:
    """Connect the endpoints of two transports, both ways. What is registered by now can be written."""
    a, b = Side(left, right.name), Side(right, left.name)
    async with asyncio.timeout(LIMIT_S):
        to_a, to_b = await asyncio.gather(a.endpoint.metadata(), b.endpoint.metadata())
        await asyncio.gather(a.endpoint.connect(to_b), b.endpoint.connect(to_a))
    return a, b


async def write(side: Side, pairs, notification: bytes) -> None:
    """A WRITE that must end in time."""
    async with asyncio.timeout(LIMIT_S):
        await side.endpoint.write(pairs, notification)


class LagMeter:
    """How late the loop wakes a sleeper of 1 ms, while the block runs."""

    def __init__(self) -> None:
        self.lags_s: list[float] = []
        self._due = 0.0

    async def __aenter__(self) -> LagMeter:
        self._due = time.perf_counter() + 0.001
        self._task = asyncio.create_task(self._measure())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._note()  # the sleeper that was not woken any more

    async def _measure(self) -> None:
        while True:
            self._due = time.perf_counter() + 0.001
            await asyncio.sleep(0.001)
            self._note()

    def _note(self) -> None:
        self.lags_s.append(max(0.0, time.perf_counter() - self._due))

    @property
    def p99_s(self) -> float:
        ordered = sorted(self.lags_s)
        return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
