"""A process with one agent's transport, ucx or nixl, and memory of a GPU and of the host; obeys its parent. See `Child`.

Needs torch, cffi, NumPy, msgspec and a libucp with cuda modules, or NIXL, and nothing else of the test suite.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import time

from rdma_kv.errors import FenceUnsupported, RdmaKvError, TransportError

LIMIT_S = 40.0  # far above what any command needs, the import of torch on a cold disk included
SPAWN = multiprocessing.get_context("spawn")
POISON_BYTES = 8 << 20  # 0.2 ms over PCIe
STRIDE = 40503  # odd, so that a byte that lies elsewhere differs


class Child:
    """The parent's half. `call` runs a method of the `Agent` in the process and returns or raises what it did."""

    def __init__(
        self, name: str, peer: str, ordinal: int, length_bytes: int, *, backend: str = "ucx", **environ: str
    ) -> None:
        self._pipe, there = SPAWN.Pipe()
        arguments = (there, backend, name, peer, ordinal, length_bytes, environ)
        self.process = SPAWN.Process(target=main, args=arguments, daemon=True)
        self.process.start()
        there.close()

    def call(self, command: str, **arguments):
        self.post(command, **arguments)
        return self.answer()

    def post(self, command: str, **arguments) -> None:
        self._pipe.send((command, arguments))

    def answer(self):
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError("the child does not answer")
        error, result = self._pipe.recv()
        if error is not None:
            raise error
        return result

    def end(self) -> None:
        self.process.kill()
        self.process.join(LIMIT_S)
        self._pipe.close()


class Agent:
    """The child's half: a transport, an endpoint, registered `gpu` and `host` memory, and some that is not.

    What differs between the back-ends is in `UcxAgent` and `NixlAgent`.
    """

    def __init__(self, name: str, peer: str, ordinal: int, length_bytes: int) -> None:
        import torch

        self.torch = torch
        self.name, self.peer, self.ordinal = name, peer, ordinal
        self.memory = {"gpu": torch.zeros(length_bytes, dtype=torch.uint8, device=f"cuda:{ordinal}")}
        self.memory["host"] = torch.zeros(min(length_bytes, 4 << 20), dtype=torch.uint8).pin_memory()
        self.memory["spare"] = torch.zeros(4096, dtype=torch.uint8, device=f"cuda:{ordinal}")
        self.memory["pinned"] = torch.zeros(4096, dtype=torch.uint8).pin_memory()
        self.memory["pageable"] = torch.zeros(4096, dtype=torch.uint8)
        self.devices = {"gpu": ordinal + 1, "host": 0}
        self.transport = self.make_transport()
        self.heard = asyncio.Queue()
        self.expected = None

    async def start(self):
        """Addresses by kind, and our metadata."""
        await self.transport.start()
        for kind, device in self.devices.items():
            await self.register(kind, device)
        self.endpoint = self.transport.endpoint(self.peer)
        self.endpoint.on_notification(self._notified)
        self.endpoint.listen()
        return {kind: memory.data_ptr() for kind, memory in self.memory.items()}, await self.endpoint.metadata()

    async def connect(self, metadata):
        await self.endpoint.connect(metadata)

    async def fill(self, kind, offset, length_bytes, seed):
        self.memory[kind].zero_()
        self.memory[kind][offset : offset + length_bytes] = self._pattern(kind, length_bytes, seed)
        self.torch.cuda.synchronize(self.ordinal)

    async def expect(self, kind, offset, length_bytes, seed):
        """Clear our memory; at the next notification it must hold this pattern and nothing else."""
        self.memory[kind].zero_()
        self.torch.cuda.synchronize(self.ordinal)
        self.expected = (kind, offset, length_bytes, self._pattern(kind, length_bytes, seed))

    async def notified(self):
        """(body, whether the bytes were right when it came)."""
        async with asyncio.timeout(LIMIT_S):
            return await self.heard.get()

    async def write(self, local, remote, addresses, length_bytes, remote_device, body=b"n"):
        """One WRITE, `local` and `remote` being (kind, offset); its seconds."""
        began = time.perf_counter()
        await self.endpoint.write([self._pair(local, remote, addresses, length_bytes, remote_device)], body)
        return time.perf_counter() - began

    async def scattered(self, addresses, remote_device, length_bytes, parts):
        """One WRITE of as many pairs, each to where it came from in a pattern of `length_bytes`."""
        step = length_bytes // parts
        places = [("gpu", n * step) for n in range(parts)]
        pairs = [self._pair(place, place, addresses, step, remote_device) for place in places[::-1]]
        await self.endpoint.write(pairs, b"n")

    async def many(self, addresses, remote_device, length_bytes, count):
        """`count` WRITEs at once, each to a place of its own."""
        made = [self._pair(("gpu", n * length_bytes), ("gpu", n * length_bytes), addresses, length_bytes, remote_device)
                for n in range(count)]  # fmt: skip
        await asyncio.gather(*(self.endpoint.write([one], str(n).encode()) for n, one in enumerate(made)))

    async def bodies(self, count):
        async with asyncio.timeout(LIMIT_S):
            return [(await self.heard.get())[0] for _ in range(count)]

    async def reuse(self, addresses, remote_device, length_bytes, fence):
        """Post a WRITE as one put and, once UCX has it, overwrite the end of its source: after a fence, or at once.

        What the fence raised, its seconds, and whether the WRITE was under way.
        """
        self.post_at_once(length_bytes)
        # The end is overwritten, by the copy engine: the copy of UCX comes there last, and may keep all multiprocessors.
        poison = self.torch.full((POISON_BYTES,), 0xAA, dtype=self.torch.uint8).pin_memory()
        end = self.memory["gpu"][-POISON_BYTES:]
        end.copy_(poison, non_blocking=True)  # all that happens once is over after it
        self.memory["gpu"].zero_()
        self.torch.cuda.synchronize(self.ordinal)
        pair = self._pair(("gpu", 0), ("gpu", 0), addresses, length_bytes, remote_device)
        writing = asyncio.ensure_future(self.endpoint.write([pair], b"n"))
        while not self.is_posted() and not writing.done():
            await asyncio.sleep(0)
        under_way, began, error = not writing.done(), time.perf_counter(), ""
        if fence:
            try:
                await self.endpoint.fence_source()
            except FenceUnsupported as exc:
                error = repr(exc)
        took_s = time.perf_counter() - began
        end.copy_(poison, non_blocking=True)
        self.torch.cuda.synchronize(self.ordinal)
        status = getattr((await asyncio.gather(writing, return_exceptions=True))[0], "status", "done")
        return error, took_s, under_way, status

    async def count(self, value, kind="gpu"):
        """How many bytes of our memory have a value, once all that was under way has had half a second."""
        await asyncio.sleep(0.5)
        parts = self.memory[kind].split(256 << 20)  # each takes as much again
        return sum(int(self.torch.count_nonzero(part == value)) for part in parts)

    async def ask_ucx(self, **arguments):
        """A WRITE that our own table of lanes does not look at; how it ended."""
        self.let_all_pass()
        try:
            await self.write(**arguments)
        except TransportError as error:
            return error.status
        return "done"

    async def export(self):
        """What CUDA says of our GPU memory: exportable the old way, and the kinds of handles it allows."""
        from rdma_kv import cuda as libcuda

        cuda = libcuda.Cuda()
        address = self.memory["gpu"].data_ptr()
        return [cuda._attribute(what, address) for what in (libcuda._IPC_CAPABLE, libcuda._HANDLE_TYPES)]

    async def register(self, kind, device, length_bytes=None):
        memory = self.memory[kind]
        length_bytes = memory.nbytes if length_bytes is None else length_bytes
        await self.transport.register(memory.data_ptr(), length_bytes, device=device)

    async def fence_target(self):
        await self.endpoint.fence_target()

    async def current_device(self):
        """The one that is current for the application's own code on the loop's thread."""
        return self.torch.cuda.current_device()

    async def bare_write(self, **arguments):
        """As `write`, on a loop's thread that has no CUDA context before, between and after: whether that is so."""
        await asyncio.to_thread(asyncio.run, self.fill("gpu", 0, arguments["length_bytes"], 77))
        before = context_here()
        await self.write(**arguments)
        return before is None and context_here() is None

    async def idle_share(self):
        """Share of one core that this process uses over a second."""
        before = time.process_time()
        await asyncio.sleep(1)
        return time.process_time() - before

    async def close(self):
        await self.transport.close()

    def _notified(self, body):
        right = None
        if self.expected is not None:
            kind, offset, length_bytes, pattern = self.expected
            memory = self.memory[kind]
            same = self.torch.equal(memory[offset : offset + length_bytes], pattern)
            right = same and int(self.torch.count_nonzero(memory)) == int(self.torch.count_nonzero(pattern))
        self.heard.put_nowait((body, right))

    def _pair(self, local, remote, addresses, length_bytes, remote_device):
        from rdma_kv.transport.base import WritePair
        from rdma_kv.types import Descriptor

        (kind, offset), (there, remote_offset) = local, remote
        own_device = self.ordinal + 1 if self.memory[kind].is_cuda else 0
        here = Descriptor(self.memory[kind].data_ptr() + offset, length_bytes, own_device)
        device = remote_device if there in {"gpu", "spare"} else 0
        return WritePair(here, Descriptor(addresses[there] + remote_offset, length_bytes, device))

    def _pattern(self, kind, length_bytes, seed):
        """`[length_bytes]` uint8, the same on every device."""
        places = self.torch.arange(length_bytes, device=self.memory[kind].device, dtype=self.torch.int32)
        return ((places * STRIDE + 257 * seed) >> 8).to(self.torch.uint8)


class UcxAgent(Agent):
    def make_transport(self):
        from rdma_kv.transport.ucx import UcxTransport

        return UcxTransport(self.name)

    async def lanes(self):
        return self.endpoint.lane, self.endpoint.transports, self.transport.library.version

    async def without_guard(self):
        """Before `start`: let UCX do as it likes."""
        from rdma_kv.transport import ucx_core

        ucx_core.GUARD = {}

    def let_all_pass(self):
        from rdma_kv.transport import ucx

        ucx.way_of = lambda pairs, host_lane, device_lane: host_lane

    def post_at_once(self, length_bytes):
        from rdma_kv.transport.ucx_writes import PACES, Pace

        PACES["cuda_ipc"] = Pace(length_bytes, copies=False)

    def is_posted(self):
        return self.endpoint._opened().holds_memory


class NixlAgent(Agent):
    def make_transport(self):
        from rdma_kv.transport.nixl import NixlTransport

        return NixlTransport(self.name)

    async def lanes(self):
        return self.endpoint.lane, self.endpoint.host_lane

    async def without_guard(self):
        """Before `start`: let UCX do as it likes."""
        from rdma_kv.transport import nixl, nixl_link

        nixl.GUARD = nixl_link.GUARD = {}

    def let_all_pass(self):
        from rdma_kv.transport import nixl_link

        nixl_link.way_of = lambda pairs, host_lane, device_lane, *, backend: host_lane

    def post_at_once(self, length_bytes):
        from rdma_kv.transport import nixl_writes

        nixl_writes.DEVICE_POST_BYTES = length_bytes

    def is_posted(self):
        try:
            return self.endpoint._link._writes.on_device
        except RuntimeError:  # the owner thread changes what we look at
            return False


AGENTS = {"ucx": UcxAgent, "nixl": NixlAgent}


def context_here():
    """The CUDA context that is current on this thread, as a number, or None."""
    context = ctypes.c_void_p()
    result = ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context))
    assert result == 0, result
    return context.value


def main(pipe, backend: str, name: str, peer: str, ordinal: int, length_bytes: int, environ: dict[str, str]) -> None:
    os.environ.update(environ)
    asyncio.run(serve(pipe, AGENTS[backend], name, peer, ordinal, length_bytes))


async def serve(pipe, kind: type[Agent], name: str, peer: str, ordinal: int, length_bytes: int) -> None:
    loop = asyncio.get_running_loop()
    agent = await loop.run_in_executor(None, kind, name, peer, ordinal, length_bytes)  # torch sets a context there
    while True:
        command, arguments = await loop.run_in_executor(None, pipe.recv)
        try:
            pipe.send((None, await getattr(agent, command)(**arguments)))
        except RdmaKvError as error:  # of anything else the process dies, and the parent sees the end of the pipe
            pipe.send((RuntimeError(f"{type(error).__name__}|{getattr(error, 'status', '')}|{error}"), None))
