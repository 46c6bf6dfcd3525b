"""What somebody would write by hand instead: one request and answer on a TCP socket, with the same kernels.

The initiator gathers its pages into a buffer, behind a header of 16 bytes, and sends it all; the target receives it,
scatters into its own pages and answers with one byte. TCP_NODELAY, nothing else is set.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum

from rdma_kv.bench.paths import Pool
from rdma_kv.errors import RdmaKvError
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.reference import gather, scatter
from rdma_kv.memory import HostMemory

_HEADER = struct.Struct("<QQ")  # which pages of the target, as a number that both know; bytes that follow
_DONE = b"d"


class How(StrEnum):
    """Who waits for the socket, and where the kernels run."""

    BLOCKING = "blocking socket"  # one thread does all of it; the event loop is idle
    LOOP = "asyncio socket"  # all of it on the event loop
    LOOP_AND_THREAD = "asyncio socket, kernels in a thread"  # as a service must, whose loop may not stop for a copy


Kernel = Callable[[Sequence[Chunk]], None]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends on loopback, without Nagle's delay."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    for end in (ours, theirs):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return ours, theirs


class SocketEnd:
    """One end of the request and answer. Use it for one request at a time.

    Args:
        end: a connected socket; ours from now on.
        most_bytes: of a request.
    """

    def __init__(self, how: How, pool: Pool, end: socket.socket, most_bytes: int) -> None:
        self._how = how
        self._pool = pool
        self._socket = end
        self._buffer = HostMemory(_HEADER.size + most_bytes)
        self._view = memoryview(self._buffer.view.data)
        self._threads = ThreadPoolExecutor(1)
        end.setblocking(how is How.BLOCKING)

    async def request(self, number: int, pages: Sequence[int]) -> float:
        """Send these pages; seconds until the answer, seen by whoever waits for it."""
        loop = asyncio.get_running_loop()
        if self._how is How.BLOCKING:
            return await loop.run_in_executor(self._threads, self._request, number, pages)
        begin = time.perf_counter()
        message = self._message(number, pages)
        await self._run(gather, self._chunk(pages))
        await loop.sock_sendall(self._socket, message)
        self._check_answer(await loop.sock_recv(self._socket, 1))
        return time.perf_counter() - begin

    async def serve(self, number: int, pages: Sequence[int]) -> None:
        """Take one request into these pages and answer it."""
        loop = asyncio.get_running_loop()
        if self._how is How.BLOCKING:
            await loop.run_in_executor(self._threads, self._serve, number, pages)
            return
        message, chunk = self._view[: self._size(pages)], self._chunk(pages)
        got = 0
        while got < len(message):
            got += _some(await loop.sock_recv_into(self._socket, message[got:]))
        self._check_header(number, message)
        await self._run(scatter, chunk)
        await loop.sock_sendall(self._socket, _DONE)

    def close(self) -> None:
        self._socket.close()
        self._threads.shutdown(wait=False)

    def _request(self, number: int, pages: Sequence[int]) -> float:
        begin = time.perf_counter()
        message = self._message(number, pages)
        gather([self._chunk(pages)])
        self._socket.sendall(message)
        self._check_answer(self._socket.recv(1))
        return time.perf_counter() - begin

    def _serve(self, number: int, pages: Sequence[int]) -> None:
        message, chunk = self._view[: self._size(pages)], self._chunk(pages)
        got = 0
        while got < len(message):
            got += _some(self._socket.recv_into(message[got:]))
        self._check_header(number, message)
        scatter([chunk])
        self._socket.sendall(_DONE)

    async def _run(self, kernel: Kernel, chunk: Chunk) -> None:
        if self._how is How.LOOP:
            kernel([chunk])
        else:
            await asyncio.get_running_loop().run_in_executor(self._threads, kernel, [chunk])

    def _message(self, number: int, pages: Sequence[int]) -> memoryview:
        """What is sent, but for the payload that a gather puts there."""
        size = self._size(pages)
        _HEADER.pack_into(self._view, 0, number, size - _HEADER.size)
        return self._view[:size]

    def _size(self, pages: Sequence[int]) -> int:
        return _HEADER.size + len(pages) * self._pool.geometry.page_bytes

    def _chunk(self, pages: Sequence[int]) -> Chunk:
        return self._pool.chunk(pages, self._buffer.address + _HEADER.size)

    @staticmethod
    def _check_header(number: int, message: memoryview) -> None:
        if _HEADER.unpack_from(message) != (number, len(message) - _HEADER.size):
            raise RdmaKvError("the socket brought another request than was asked for")

    @staticmethod
    def _check_answer(answer: bytes) -> None:
        if answer != _DONE:
            raise RdmaKvError("the socket was closed")


def _some(got: int) -> int:
    if not got:
        raise RdmaKvError("the socket was closed")
    return got
