"""The processes that `rdma-kv bench transport` measures: our transports, NIXL's own API, a socket, a copy.

A pair is an initiator, whose `run` returns seconds per operation, and a target, whose `run` does what its side needs for
so many operations. Memory is page-aligned; the source is one mapping that all initiators inherit.
"""

from __future__ import annotations

import asyncio
import importlib
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rdma_kv.bench.cases import Case
from rdma_kv.errors import RdmaKvError, TransportError
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.reference import gather, scatter
from rdma_kv.memory import HostMemory
from rdma_kv.transport.base import Endpoint, Transport, WritePair
from rdma_kv.transport.nixl_owner import load_nixl
from rdma_kv.types import Descriptor

Wire = tuple[int, int, bool]
_PIECES_PER_CALL = 1024  # of one sendmsg: IOV_MAX
_PROMPT = b"n"
_WRITES = 3  # of our packed way under way at a time: while one ends the next is copied


def make_transport(backend: str, name: str) -> Transport:
    """One of our transports.

    Raises:
        RdmaKvError: this installation has none of that name.
    """
    try:
        module = importlib.import_module(f"rdma_kv.transport.{backend}")
        transport: Transport = getattr(module, f"{backend.capitalize()}Transport")(name)
    except (ImportError, AttributeError, OSError) as exc:
        raise RdmaKvError(f"transport {backend} is not there: {exc}") from exc
    return transport


class Landing:
    """A target's memory, and what must have arrived there.

    Attributes:
        memory: where bytes land.
        pages: where a scatter of ours puts them.
    """

    def __init__(self, source: HostMemory, *, paged: bool) -> None:
        self.memory = HostMemory(source.length_bytes)
        self.pages = HostMemory(source.length_bytes)
        self._source = source
        self._paged = paged  # pieces land in their places, not packed

    def wipe(self) -> None:
        for memory in (self.memory, self.pages):
            memory.view[:] = 0

    def arrived(self, case: Case) -> bool:
        """Whether the bytes of `case` are here, and in their places."""
        sent = case.rows(self._source.view)[case.src_offsets() // case.piece_bytes]
        here = case.rows((self.pages if case.unpack else self.memory).view)
        if case.unpack or self._paged:
            here = here[case.dst_offsets() // case.piece_bytes]
        return np.array_equal(here, sent)


# --- our transports ----------------------------------------------------------------------------------------------------


class OurTarget:
    """The passive end of one of our transports."""

    def __init__(self, backend: str, source: HostMemory) -> None:
        self._landing = Landing(source, paged=False)
        self._transport = make_transport(backend, "target@1")
        self._endpoint: Endpoint | None = None
        self._came: asyncio.Queue[bytes] = asyncio.Queue()

    async def open(self) -> bytes:
        """What the initiator needs."""
        memory = self._landing.memory
        self._endpoint = await _start(self._transport, "initiator@1", memory)
        self._endpoint.on_notification(self._came.put_nowait)
        return msgspec.msgpack.encode((await self._endpoint.metadata(), memory.address))

    async def connect(self, other: bytes) -> str:
        return await _connect(self._endpoint, other)

    async def wipe(self) -> None:
        self._landing.wipe()

    async def arrived(self, wire: Wire) -> bool:
        return self._landing.arrived(Case(*wire))

    async def run(self, wire: Wire, count: int) -> None:
        """Let `count` operations happen. Parts are scattered as they come, whichever comes first."""
        case, endpoint = Case(*wire), _there(self._endpoint)
        chunks = case.chunks(self._landing.memory.address, self._landing.pages.address, case.dst_offsets())
        endpoint.listen()
        for _ in range(count):
            for _ in chunks:
                number = int.from_bytes(await self._came.get(), "little")
                if case.unpack:
                    await asyncio.to_thread(scatter, [chunks[number]])
            if case.unpack:
                await endpoint.notify(_PROMPT)
        endpoint.unlisten()

    async def close(self) -> None:
        await self._transport.close()


class OurInitiator:
    """The active end of one of our transports."""

    def __init__(self, backend: str, source: HostMemory) -> None:
        self._source = source
        self._staging = HostMemory(source.length_bytes)
        self._transport = make_transport(backend, "initiator@1")
        self._endpoint: Endpoint | None = None
        self._remote = 0
        self._came: asyncio.Queue[bytes] = asyncio.Queue()

    async def open(self) -> bytes:
        self._endpoint = await _start(self._transport, "target@1", self._source, self._staging)
        self._endpoint.on_notification(self._came.put_nowait)
        return msgspec.msgpack.encode((await self._endpoint.metadata(), 0))

    async def connect(self, other: bytes) -> str:
        """The lane."""
        _, self._remote = msgspec.msgpack.decode(other)
        return await _connect(self._endpoint, other)

    async def run(self, wire: Wire, count: int) -> list[float]:
        """Seconds of each operation."""
        case, endpoint = Case(*wire), _there(self._endpoint)
        chunks = case.chunks(self._staging.address, self._source.address, case.src_offsets())
        if case.unpack:
            endpoint.listen()
        took_s = []
        for _ in range(count):
            begin = time.perf_counter()
            if case.scattered:
                await self._write_packed(endpoint, case, chunks)
            else:
                await self._write(endpoint, case, self._source.address, 0)
            if case.unpack:
                await self._came.get()
            took_s.append(time.perf_counter() - begin)
        if case.unpack:
            endpoint.unlisten()
        return took_s

    async def _write_packed(self, endpoint: Endpoint, case: Case, chunks: Sequence[Chunk]) -> None:
        """Each part is written when it is gathered, while a thread gathers the next ones."""
        loop = asyncio.get_running_loop()
        filled: asyncio.Queue[int] = asyncio.Queue()

        def fill() -> None:
            for number, chunk in enumerate(chunks):
                gather([chunk])
                loop.call_soon_threadsafe(filled.put_nowait, number)

        filling = asyncio.create_task(asyncio.to_thread(fill))
        writing: deque[asyncio.Task[None]] = deque()
        for _ in chunks:
            write = self._write(endpoint, case, self._staging.address, await filled.get())
            writing.append(asyncio.create_task(write))
            if len(writing) == _WRITES:
                await writing.popleft()
        await asyncio.gather(filling, *writing)

    async def _write(self, endpoint: Endpoint, case: Case, at: int, number: int) -> None:
        part = case.parts[number]
        offset, size = part.start * case.piece_bytes, (part.stop - part.start) * case.piece_bytes
        pair = WritePair(Descriptor(at + offset, size), Descriptor(self._remote + offset, size))
        await endpoint.write([pair], number.to_bytes(4, "little"))

    async def close(self) -> None:
        await self._transport.close()


async def _start(transport: Transport, peer: str, *memories: HostMemory) -> Endpoint:
    await transport.start()
    for memory in memories:
        await transport.register(memory.address, memory.length_bytes)
    return transport.endpoint(peer)


async def _connect(endpoint: Endpoint | None, other: bytes) -> str:
    metadata, _ = msgspec.msgpack.decode(other)
    opened = _there(endpoint)
    await opened.connect(metadata)
    return opened.lane


def _there(endpoint: Endpoint | None) -> Endpoint:
    if endpoint is None:
        raise RdmaKvError("not open")
    return endpoint


# --- NIXL's own API ----------------------------------------------------------------------------------------------------


class _Api:
    """A NIXL agent as NIXL's documentation makes it: all defaults, so with its progress thread."""

    def __init__(self, name: str) -> None:
        self.nixl = load_nixl()
        self.agent: Any = self.nixl.api.nixl_agent(name, self.nixl.api.nixl_agent_config(backends=["UCX"]))

    def open(self, memory: HostMemory) -> bytes:
        self.agent.register_memory([(memory.address, memory.length_bytes, 0, "")], "DRAM")
        return msgspec.msgpack.encode((self.agent.get_agent_metadata(), memory.address))


class ApiTarget:
    """The passive end: its progress thread does the work."""

    def __init__(self, source: HostMemory) -> None:
        self._landing = Landing(source, paged=True)
        self._api: _Api | None = None

    async def open(self) -> bytes:
        self._api = _Api("target")
        return self._api.open(self._landing.memory)

    async def connect(self, other: bytes) -> str:
        """Nothing to do: a target needs no metadata."""
        del other
        return ""

    async def wipe(self) -> None:
        self._landing.wipe()

    async def arrived(self, wire: Wire) -> bool:
        return self._landing.arrived(Case(*wire))

    async def run(self, wire: Wire, count: int) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        self._api = None


class ApiInitiator:
    """The active end: `initialize_xfer`, `transfer`, and `check_xfer_state` until it is done."""

    def __init__(self, source: HostMemory) -> None:
        self._source = source
        self._api: _Api | None = None
        self._peer = ""
        self._remote = 0

    async def open(self) -> bytes:
        self._api = _Api("initiator")
        return self._api.open(self._source)

    async def connect(self, other: bytes) -> str:
        assert self._api is not None
        metadata, self._remote = msgspec.msgpack.decode(other)
        self._peer = self._api.agent.add_remote_agent(metadata).decode()
        return ""

    async def run(self, wire: Wire, count: int) -> list[float]:
        """Seconds of each operation, from addresses in an array to DONE."""
        case = Case(*wire)
        local = _table(self._source.address + case.src_offsets(), case.piece_bytes)
        remote = _table(self._remote + case.dst_offsets(), case.piece_bytes)
        return [self._write(local, remote) for _ in range(count)]

    def _write(self, local: npt.NDArray[np.uint64], remote: npt.NDArray[np.uint64]) -> float:
        assert self._api is not None
        agent = self._api.agent
        begin = time.perf_counter()
        ours, theirs = agent.get_xfer_descs(local, "DRAM"), agent.get_xfer_descs(remote, "DRAM")
        handle = agent.initialize_xfer("WRITE", ours, theirs, self._peer, _PROMPT)
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        took_s = time.perf_counter() - begin
        if state != "DONE":
            raise TransportError("nixl", state, "a transfer of NIXL's API failed")
        agent.release_xfer_handle(handle)
        return took_s

    async def close(self) -> None:
        self._api = None


def _table(addresses: npt.NDArray[np.int64], length_bytes: int) -> npt.NDArray[np.uint64]:
    """`[pieces, (address, bytes, device)]`, the fastest form that the API takes."""
    columns = (addresses, np.full_like(addresses, length_bytes), np.zeros_like(addresses))
    return np.column_stack(columns).astype(np.uint64)


# --- a socket, a copy --------------------------------------------------------------------------------------------------


class SocketTarget:
    """Receives into memory with a blocking TCP socket, and acknowledges each operation with one byte."""

    def __init__(self, source: HostMemory) -> None:
        self._landing = Landing(source, paged=False)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._socket: socket.socket | None = None

    async def open(self) -> bytes:
        return str(self._listener.getsockname()[1]).encode()

    async def connect(self, other: bytes) -> str:
        del other
        self._socket, _ = self._listener.accept()
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return "tcp"

    async def wipe(self) -> None:
        self._landing.wipe()

    async def arrived(self, wire: Wire) -> bool:
        return self._landing.arrived(Case(*wire))

    async def run(self, wire: Wire, count: int) -> None:
        assert self._socket is not None
        view = memoryview(self._landing.memory.view.data)[: Case(*wire).total_bytes]
        for _ in range(count):
            got = 0
            while got < len(view):
                more = self._socket.recv_into(view[got:])
                if not more:
                    raise RdmaKvError("the socket was closed")
                got += more
            self._socket.sendall(_PROMPT)

    async def close(self) -> None:
        self._listener.close()
        if self._socket is not None:
            self._socket.close()


class SocketInitiator:
    """Writes with a blocking TCP socket and waits for one byte."""

    def __init__(self, source: HostMemory) -> None:
        self._view = memoryview(source.view.data)
        self._socket: socket.socket | None = None

    async def open(self) -> bytes:
        return b""

    async def connect(self, other: bytes) -> str:
        self._socket = socket.create_connection(("127.0.0.1", int(other)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return "tcp"

    async def run(self, wire: Wire, count: int) -> list[float]:
        """Seconds of each operation; scattered pieces go as they lie, up to 1,024 of them in one `sendmsg`."""
        assert self._socket is not None
        case = Case(*wire)
        took_s = []
        for _ in range(count):
            begin = time.perf_counter()
            if case.scattered:
                self._send_pieces(case)
            else:
                self._socket.sendall(self._view[: case.total_bytes])
            if self._socket.recv(1) != _PROMPT:
                raise RdmaKvError("the socket was closed")
            took_s.append(time.perf_counter() - begin)
        return took_s

    def _send_pieces(self, case: Case) -> None:
        assert self._socket is not None
        pieces = [self._view[at : at + case.piece_bytes] for at in case.src_offsets().tolist()]
        while pieces:
            sent = self._socket.sendmsg(pieces[:_PIECES_PER_CALL])
            whole, rest = divmod(sent, case.piece_bytes)
            del pieces[:whole]
            if rest:
                self._socket.sendall(pieces.pop(0)[rest:])

    async def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


class Copier:
    """`np.copyto` within one process: what memory allows."""

    def __init__(self, source: HostMemory) -> None:
        self._source = source
        self._target = HostMemory(source.length_bytes)

    async def run(self, wire: Wire, count: int) -> list[float]:
        size = Case(*wire).total_bytes
        return [_timed(lambda: np.copyto(self._target.view[:size], self._source.view[:size])) for _ in range(count)]

    async def close(self) -> None:
        """Nothing to do."""


def _timed(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin
