"""The tests' end of an engine's control socket."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from pathlib import Path
from typing import Any

from commands import LabError

CALL_S = 60.0  # beyond every timeout that a test gives to a transfer


class Call:
    """One order: its events, then its result."""

    def __init__(self) -> None:
        self.result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.events: asyncio.Queue[str] = asyncio.Queue()

    async def event(self, name: str) -> None:
        """Wait for an event. Raises LabError where the order ended without it."""
        waiting = asyncio.ensure_future(self.events.get())
        async with asyncio.timeout(CALL_S):
            await asyncio.wait({waiting, self.result}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            raise LabError(f"no {name!r}: {self.result.result()}")
        if waiting.result() != name:
            raise LabError(f"{waiting.result()!r} instead of {name!r}")

    async def end(self) -> Any:
        """Wait for the result. Raises LabError: the engine went away, or could not do it."""
        async with asyncio.timeout(CALL_S):
            return await asyncio.shield(self.result)


class EngineCalls:
    """Give orders to one engine. `connect` first, and again after the engine was killed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None

    async def connect(self, limit_s: float = 20.0) -> None:
        """Raises TimeoutError: nobody has listened for so long."""
        await self.close()
        async with asyncio.timeout(limit_s):
            while True:
                try:
                    reader, self._writer = await asyncio.open_unix_connection(self._path)
                except OSError:
                    await asyncio.sleep(0.05)
                    continue
                break
        self._listener = asyncio.create_task(self._listen(reader))

    def start(self, op: str, **arguments: Any) -> Call:
        """Send an order."""
        number, call = next(self._numbers), Call()
        if self._writer is None or self._writer.is_closing():
            call.result.set_exception(LabError(f"{self._path}: the engine is gone"))
            return call
        self._calls[number] = call
        self._writer.write(json.dumps({"id": number, "op": op, **arguments}).encode() + b"\n")
        return call

    async def ask(self, op: str, **arguments: Any) -> Any:
        """Send an order and wait for its result."""
        return await self.start(op, **arguments).end()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                answer = json.loads(line)
                call = self._calls[answer["id"]]
                if "event" in answer:
                    call.events.put_nowait(answer["event"])
                    continue
                del self._calls[answer["id"]]
                if "error" in answer:
                    call.result.set_exception(LabError(f"{self._path}: {answer['error']}"))
                else:
                    call.result.set_result(answer["result"])
        for call in self._calls.values():
            call.result.set_exception(LabError(f"{self._path}: the engine is gone"))
            call.result.exception()  # known; nobody may be waiting
        self._calls.clear()
        if self._writer is not None:
            self._writer.close()

    async def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        if self._listener is not None:
            self._listener.cancel()
            await asyncio.gather(self._listener, return_exceptions=True)
