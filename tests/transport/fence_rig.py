"""The parent's half of `fence_child`: agents that a test can stop in the middle, as processes or inside the test's own.

A stopped process is stopped by SIGSTOP and found by its id only; what is in flight is read from the kernel's table of
TCP sockets. Loopback has one loop for both sides: there "stopped" means that its network stands still.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

from fence_child import FencePeer
from transport_rig import LIMIT_S, Memory

from rdma_kv import errors
from rdma_kv.transport.loopback import LoopbackNetwork, LoopbackTransport

_HERE = Path(__file__).parent
_LISTENS = "0A"  # a state in the kernel's table of sockets


async def until(holds) -> None:
    """Wait until `holds()`, a coroutine function or a function, is true."""
    deadline_s = time.monotonic() + LIMIT_S
    while True:
        found = holds()
        if await found if asyncio.iscoroutine(found) else found:
            return
        assert time.monotonic() < deadline_s, f"not within {LIMIT_S} s: {holds}"
        await asyncio.sleep(0.002)


class Agent:
    """An agent in a process of its own. The process is killed, by its id, at the end of the block."""

    def __init__(self, kind: str, name: str, length_bytes: int, tls: str | None) -> None:
        self.name = name
        self.length_bytes = length_bytes
        self._arguments = [kind, name, str(length_bytes)]
        self._tls = tls
        self._serial = itertools.count()
        self._waiting: dict[int, asyncio.Future] = {}

    async def __aenter__(self) -> Agent:
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("UCX_", "NIXL_"))}
        environ["PYTHONPATH"] = os.pathsep.join([str(_HERE), str(_HERE.parents[1])])
        # Small sockets: most of what was posted then waits in the initiator, where a fence has to stop it.
        environ |= {"UCX_TCP_SNDBUF": "256k", "UCX_TCP_RCVBUF": "256k"}
        if self._tls is not None:
            environ["UCX_TLS"] = self._tls
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(_HERE / "fence_child.py"), *self._arguments),
            env=environ,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._process.returncode is None:
            self._process.kill()  # ends a stopped process too
        await self._process.wait()
        await self._reading
        self._process.stdin.close()

    async def call(self, do: str, **arguments):
        """Run a command there; its result, or its error of ours."""
        if self._reading.done():
            raise FencePeerError("Gone", f"{self.name} exited")
        number = next(self._serial)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._process.stdin.write(json.dumps([number, do, arguments]).encode() + b"\n")
        async with asyncio.timeout(LIMIT_S):
            return await future

    async def stop(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)
        await until(lambda: self._state() == "T")

    async def resume(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def peek(self, address: int, length_bytes: int) -> bytes:
        """Memory of the process, also while it is stopped."""
        with open(f"/proc/{self._process.pid}/mem", "rb", buffering=0) as memory:
            return os.pread(memory.fileno(), length_bytes, address)

    def queued_bytes(self) -> int:
        """Bytes that wait in the TCP sockets of this process and in those at their other ends, closed ones too."""
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        ours = self._inodes()
        ends = {tuple(row[1:3]) for row in rows if row[9] in ours}
        ends |= {(there, here) for here, there in ends}
        queues = [row[4].split(":") for row in rows if tuple(row[1:3]) in ends and row[3] != _LISTENS]
        return sum(int(size, 16) for both in queues for size in both)

    def _inodes(self) -> set[str]:
        links = []
        for entry in os.scandir(f"/proc/{self._process.pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(entry.path))
        return {link[8:-1] for link in links if link.startswith("socket:[")}

    def _state(self) -> str:
        return Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(") ")[2][0]

    async def _read(self) -> None:
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            future = self._waiting.pop(answer["number"])
            if future.done():
                continue
            if "error" in answer:
                future.set_exception(FencePeerError(answer["error"], answer["text"]))
            else:
                future.set_result(answer["result"])
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(FencePeerError("Gone", f"{self.name} exited"))


class FencePeerError(Exception):
    """A command ended with an error of ours: its class name and its text."""


class LocalAgent:
    """An agent on a loopback network, with the same commands."""

    def __init__(self, network: LoopbackNetwork, name: str, length_bytes: int) -> None:
        self.name = name
        self.length_bytes = length_bytes
        self._network = network

    async def __aenter__(self) -> LocalAgent:
        self._transport = LoopbackTransport(self._network, self.name)
        await self._transport.start()
        self._memory = await Memory(self.length_bytes).register(self._transport)
        self._peer = FencePeer(self._transport, self._memory)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._network._turn.locked():
            self._network._turn.release()
        await self._transport.close()

    async def call(self, do: str, **arguments):
        try:
            async with asyncio.timeout(LIMIT_S):
                return await getattr(self._peer, do)(**arguments)
        except errors.RdmaKvError as error:
            raise FencePeerError(type(error).__name__, str(error)) from error

    async def stop(self) -> None:
        """Nothing is copied on the network any more."""
        await self._network._turn.acquire()

    async def resume(self) -> None:
        self._network._turn.release()

    def peek(self, address: int, length_bytes: int) -> bytes:
        offset = address - self._memory.address
        return self._memory.bytes[offset : offset + length_bytes].tobytes()

    def queued_bytes(self) -> int:
        return 0


@contextlib.asynccontextmanager
async def agents(kind: str, tls: str | None, length_bytes: int, *names: str):
    """Started agents of one transport. Memory is zeros."""
    network = LoopbackNetwork()
    async with contextlib.AsyncExitStack() as stack:
        made = [
            LocalAgent(network, name, length_bytes) if kind == "loopback" else Agent(kind, name, length_bytes, tls)
            for name in names
        ]
        async with asyncio.TaskGroup() as group:
            started = [group.create_task(stack.enter_async_context(agent)) for agent in made]
        yield [task.result() for task in started]


async def connect(left, right) -> tuple[int, int, str]:
    """Exchange metadata and connect both ways, both listening: (left's address, right's, the lane)."""
    here, there = await asyncio.gather(left.call("metadata", peer=right.name), right.call("metadata", peer=left.name))
    lane, other = await asyncio.gather(
        left.call("connect", peer=right.name, blob=there["blob"]),
        right.call("connect", peer=left.name, blob=here["blob"]),
    )
    assert lane == other
    await asyncio.gather(left.call("listen", peer=right.name), right.call("listen", peer=left.name))
    return here["address"], there["address"], lane
