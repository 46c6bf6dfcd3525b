"""What the sidecar does with memory of a GPU, without one: a `Cuda` of our own in place of the driver's."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess

import numpy as np
import pytest

from rdma_kv.deaths import own_process, started_ticks
from rdma_kv.errors import ClosedError, RemoteProtocolError, SidecarLostError
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.work import Work as KernelWork
from rdma_kv.memory import SharedMemory
from rdma_kv.protocol.link import Process
from rdma_kv.session import is_cuda_event
from rdma_kv.sidecar import remote
from rdma_kv.sidecar.channel import Channel
from rdma_kv.sidecar.memory import Mappings
from rdma_kv.sidecar.remote import RemoteEngine, RemoteEvent
from rdma_kv.sidecar.wire import Await, Mapped, Segment, Work, Worked, decode_of_sidecar
from rdma_kv.staging import Segment as StagingSegment


class FakeCuda:
    """Counts what is open and pinned."""

    def __init__(self) -> None:
        self.opened: dict[int, bytes] = {}
        self.pinned: set[int] = set()

    def open_handle(self, ordinal: int, handle: bytes) -> int:
        assert ordinal == 1
        address = 0x7000_0000_0000 + len(self.opened) * (1 << 21)
        self.opened[address] = handle
        return address

    def close_handle(self, address: int) -> None:
        del self.opened[address]

    def pin(self, address: int, length_bytes: int, ordinal: int) -> None:
        assert (length_bytes, ordinal) == (8192, 1)
        assert address not in self.pinned
        self.pinned.add(address)

    def unpin(self, address: int) -> None:
        self.pinned.remove(address)


async def test_the_engine_opens_device_memory_and_pins_a_bounce_when_it_is_used():
    cuda = FakeCuda()
    mappings = Mappings(cuda, 1)
    memory = SharedMemory(8192)
    await mappings.add("sidecar", Segment(0, 8192, b"h" * 64), os.dup(memory.fd))
    (device,) = cuda.opened
    assert mappings.packed("sidecar", (0, 4096), 4096) == device + 4096
    assert not cuda.pinned
    found = {await mappings.bounce("sidecar", (0, 4096), 4096) for _ in range(3)}
    assert len(cuda.pinned) == 1
    assert found == {next(iter(cuda.pinned)) + 4096}
    with pytest.raises(RemoteProtocolError):
        await mappings.bounce("sidecar", (0, 4097), 4096)
    with pytest.raises(RemoteProtocolError, match="staging on a GPU"):
        await mappings.add("sidecar", Segment(1, 8192), os.dup(memory.fd))
    with pytest.raises(RemoteProtocolError, match="mapped already"):
        await mappings.add("sidecar", Segment(0, 8192, b"h" * 64), os.dup(memory.fd))
    with pytest.raises(RemoteProtocolError, match="shorter"):
        await mappings.add("sidecar", Segment(2, 8193, b"h" * 64), os.dup(memory.fd))
    await mappings.close()
    assert not cuda.opened
    assert not cuda.pinned
    memory.close_fd()


class FakeDevice:
    """Device memory of the sidecar."""

    address = 0x7100_0000_0000
    length_bytes = 8192

    def export_handle(self) -> bytes:
        return b"e" * 64


class Ends:
    """A `RemoteEngine`, and the engine's end of its channel."""

    def __init__(self, process: Process) -> None:
        here, there = socket.socketpair()
        self.heard: list[object] = []
        self.died = asyncio.Event()
        self.here = Channel(here, name="engine", on_frame=lambda _: None, on_lost=lambda _: None)
        self.there = Channel(there, name="sidecar", on_frame=self._on_frame, on_lost=lambda _: None, take_fds=True)
        self.engine = RemoteEngine(self.here, process, on_gpu=True, on_dead=self.died.set)

    def _on_frame(self, body: bytes) -> None:
        self.heard.append(decode_of_sidecar("sidecar", body))

    async def hear(self) -> object:
        async with asyncio.timeout(10):
            while not self.heard:
                await asyncio.sleep(0)
        return self.heard.pop(0)

    async def close(self) -> None:
        await self.here.close()
        await self.there.close()


async def test_a_slot_has_one_place_on_the_gpu_and_one_in_host_memory():
    ends = Ends(Process())
    memory = ends.engine.make_host(8192)
    sharing = asyncio.create_task(ends.engine.share(StagingSegment(memory, 0, 2, FakeDevice())))
    message = await ends.hear()
    assert message == Segment(0, 8192, b"e" * 64)
    ends.engine.mapped("engine", Mapped(0))
    await sharing
    chunk = Chunk(
        FakeDevice.address + 4096,
        np.ones((1, 1), np.int64),
        np.zeros(1, np.int32),
        np.zeros(1, np.int64),
        1,
        0,
        64,
    )
    event = RemoteEvent(5)
    assert is_cuda_event(event)
    working = asyncio.create_task(ends.engine.kernels.gather(KernelWork(chunk, memory.address + 4096, after=(event,))))
    message = await ends.hear()
    assert isinstance(message, Work)
    assert (message.packed, message.bounce, message.after) == ((0, 4096), (0, 4096), [5])
    ends.engine.kernels.worked("engine", Worked(1, None, (1, 0)))
    assert await working is None
    waiting = asyncio.create_task(ends.engine.kernels.fired([event]))
    assert await ends.hear() == Await(2, [5])
    waiting.cancel()
    ends.engine.kernels.worked("engine", Worked(2, None, (1, 0)))  # late: nobody waits any more
    with pytest.raises(RemoteProtocolError):
        ends.engine.kernels.worked("engine", Worked(2, None, (1, 0)))
    assert await ends.engine.kernels.close()
    with pytest.raises(ClosedError):
        await ends.engine.kernels.gather(KernelWork(chunk))
    ends.engine.give_back()
    await ends.close()


async def test_memory_of_a_gpu_is_free_only_when_the_lost_engine_has_let_go(monkeypatch):
    """Its death proven; or its end of the socket closed while it lives. The control: neither."""
    monkeypatch.setattr(remote, "_DEATH_S", 0.2)
    monkeypatch.setattr(remote, "_DYING_S", 0.2)
    child = await asyncio.create_subprocess_exec("sleep", "1000")
    try:
        process = Process(own_process().host, child.pid, started_ticks(child.pid))
        for let_go in (False, True):
            ends = Ends(process)
            ends.engine.lose(SidecarLostError("engine", "a bug"))
            if let_go:
                await ends.there.close()
            assert await ends.engine.kernels.close() is let_go
            await ends.close()
        ends = Ends(process)  # the engine lives, and its kernels may: it was us who ended the stream
        ends.here.lose(SidecarLostError("engine", "a frame beyond the limit"))
        ends.engine.lose(SidecarLostError("engine", "a frame beyond the limit"))
        assert await ends.engine.kernels.close() is False
        await ends.close()
        ends = Ends(process)  # a work is given up while the end is waited for
        asking = asyncio.ensure_future(ends.engine.kernels.fired([]))
        await asyncio.sleep(0)
        closing = asyncio.create_task(ends.engine.kernels.close())
        await asyncio.sleep(0)
        ends.engine.lose(SidecarLostError("engine", "does not answer"))
        assert await closing is False
        with pytest.raises(SidecarLostError):
            await asking
        await ends.close()
        unseen = Ends(Process())  # in another process namespace
        unseen.engine.lose(SidecarLostError("engine", "the stream has ended"))
        await unseen.there.close()
        assert await unseen.engine.kernels.close() is False
        await unseen.close()
        ends = Ends(process)
        child.kill()
        async with asyncio.timeout(10):
            await ends.died.wait()
        ends.engine.lose(SidecarLostError("engine", "has died"))
        assert await ends.engine.kernels.close() is True
        await ends.close()
    finally:
        if child.returncode is None:
            child.kill()
        await child.wait()


def test_a_process_that_is_dying_is_told_from_one_that_lives():
    lives, ended = subprocess.Popen(["sleep", "1000"]), subprocess.Popen(["true"])
    try:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # it stays to be seen
        assert not remote.is_exiting(lives.pid)
        assert remote.is_exiting(ended.pid)
    finally:
        lives.kill()
        lives.wait()
        ended.wait()
    assert remote.is_exiting(ended.pid)
