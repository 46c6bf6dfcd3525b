"""Many small WRITEs at once on one endpoint: what each costs the event loop, at both ends."""

from __future__ import annotations

import asyncio
import struct
import time
from dataclasses import dataclass, field

import numpy as np

from rdma_kv.errors import RdmaKvError
from rdma_kv.memory import HostMemory
from rdma_kv.transport.base import Endpoint, Transport, WritePair
from rdma_kv.types import Descriptor, Role

POSTS = 1_000
POST_BYTES = 8
_BODY = struct.Struct("<QQ")  # of a notification: round, number
_S = 60.0


@dataclass
class Cpu:
    """CPU seconds since it was made."""

    thread_s: float = field(default_factory=time.thread_time)
    process_s: float = field(default_factory=time.process_time)

    def us_each(self) -> tuple[float, float]:
        """Of the calling thread, and of all threads of the process, by post: microseconds."""
        spent = (time.thread_time() - self.thread_s, time.process_time() - self.process_s)
        return 1e6 * spent[0] / POSTS, 1e6 * spent[1] / POSTS


class Poster:
    """One end, with a transport of its own: prefill posts, decode takes."""

    def __init__(self, role: Role, transport: Transport) -> None:
        self._transport = transport
        self._other = role.other
        self._memory = HostMemory(POSTS * POST_BYTES)
        self._endpoint: Endpoint | None = None
        self._remote = 0
        self._bodies: list[bytes] = []
        self._all_in = asyncio.Event()

    async def open(self) -> tuple[bytes, int]:
        """What the other end needs."""
        await self._transport.start()
        await self._transport.register(self._memory.address, self._memory.length_bytes)
        self._endpoint = self._transport.endpoint(f"poster-{self._other.value}@1")
        self._endpoint.on_notification(self._notified)
        return await self._endpoint.metadata(), self._memory.address

    async def connect(self, metadata: bytes, remote: int) -> None:
        self._remote = remote
        await self._opened().connect(metadata)

    async def post(self, number: int) -> tuple[float, float]:
        """Post `POSTS` WRITEs at once; see `Cpu.us_each`, from the first call to the last completion."""
        endpoint = self._opened()
        self._memory.view[:] = _payload(number)
        pairs = [
            WritePair(
                Descriptor(self._memory.address + offset, POST_BYTES), Descriptor(self._remote + offset, POST_BYTES)
            )
            for offset in range(0, self._memory.length_bytes, POST_BYTES)
        ]
        bodies = [_BODY.pack(number, post) for post in range(POSTS)]
        cpu = Cpu()
        await asyncio.gather(*(endpoint.write([pair], body) for pair, body in zip(pairs, bodies, strict=True)))
        return cpu.us_each()

    async def take(self, number: int) -> tuple[float, float]:
        """Take them; see `Cpu.us_each`, from `listen` to the last of them.

        Raises:
            RdmaKvError: not each notification came once, or other bytes than were sent.
        """
        endpoint = self._opened()
        if len(self._bodies) > POSTS:
            raise RdmaKvError("a notification of a small WRITE came twice")
        self._bodies.clear()
        self._all_in.clear()
        self._memory.view[:] = 0
        endpoint.listen()
        cpu = Cpu()
        try:
            async with asyncio.timeout(_S):
                await self._all_in.wait()
        except TimeoutError as exc:
            raise RdmaKvError(f"{len(self._bodies)} notifications came, not {POSTS}") from exc
        spent = cpu.us_each()
        endpoint.unlisten()
        if sorted(self._bodies) != sorted(_BODY.pack(number, post) for post in range(POSTS)):
            raise RdmaKvError("not each notification of a small WRITE came once")
        if not np.array_equal(self._memory.view, _payload(number)):
            raise RdmaKvError("small WRITEs brought other bytes than were sent")
        return spent

    async def close(self) -> None:
        await self._transport.close()

    def _notified(self, body: bytes) -> None:
        self._bodies.append(body)
        if len(self._bodies) >= POSTS:
            self._all_in.set()

    def _opened(self) -> Endpoint:
        if self._endpoint is None:
            raise RdmaKvError("the endpoint is not open")
        return self._endpoint


def _payload(number: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """uint8 `[POSTS * POST_BYTES]`, other bytes in every round."""
    return np.frombuffer(np.random.default_rng(number).bytes(POSTS * POST_BYTES), dtype=np.uint8)
