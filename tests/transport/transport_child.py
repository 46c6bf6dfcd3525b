"""The parent's half of `transport_peer`: a NIXL transport in another process."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from pathlib import Path

from transport_rig import LIMIT_S

_HERE = Path(__file__).parent


class ChildError(Exception):
    """A command ended with an error of ours; its class name is the first argument."""


class Child:
    """Start with `async with`; the process is killed at the end if it has not exited by then."""

    def __init__(self, name: str, peer: str, length_bytes: int, seed: int, tls: str | None) -> None:
        self.name = name
        self._arguments = [name, peer, str(length_bytes), str(seed)]
        self._tls = tls
        self._serial = itertools.count()
        self._waiting: dict[int, asyncio.Future] = {}

    async def __aenter__(self) -> Child:
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("UCX_", "NIXL_"))}
        environ["PYTHONPATH"] = os.pathsep.join([str(_HERE), str(_HERE.parents[1])])
        if self._tls is not None:
            environ["UCX_TLS"] = self._tls
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(_HERE / "transport_peer.py"),
            *self._arguments,
            env=environ,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 24,
        )
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._reading
        self.process.stdin.close()

    async def call(self, do: str, **arguments):
        """Run a command there; its result."""
        number = next(self._serial)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self._send(number, do, arguments)
        await self.process.stdin.drain()
        async with asyncio.timeout(LIMIT_S):
            return await self._waiting[number]

    async def exit(self, status: int) -> int:
        """Let it exit with `status`; the status that it has."""
        self._send(next(self._serial), "exit", {"status": status})
        async with asyncio.timeout(LIMIT_S):
            return await self.process.wait()

    def _send(self, number: int, do: str, arguments: dict) -> None:
        line = json.dumps({"number": number, "do": do, "arguments": arguments})
        self.process.stdin.write(line.encode() + b"\n")

    async def _read(self) -> None:
        while line := await self.process.stdout.readline():
            answer = json.loads(line)
            future = self._waiting.pop(answer["number"], None)
            if future is None or future.done():
                continue
            if "error" in answer:
                future.set_exception(ChildError(answer["error"], answer["text"]))
            else:
                future.set_result(answer["result"])
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ChildError("Gone", f"{self.name} exited"))


async def connect(left: Child, right: Child):
    """Connect two children both ways: (address of the left's memory, of the right's, the lane)."""
    here, there = await asyncio.gather(left.call("metadata"), right.call("metadata"))
    lanes = await asyncio.gather(left.call("connect", blob=there["blob"]), right.call("connect", blob=here["blob"]))
    assert lanes[0] == lanes[1]
    return here["address"], there["address"], lanes[0]
