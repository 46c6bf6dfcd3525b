"""What the parent and the measured processes say to each other: typed MessagePack frames over a socket pair."""

from __future__ import annotations

import asyncio
import struct

import msgspec
from msgspec import Struct

from rdma_kv.errors import RdmaKvError

_HEADER = struct.Struct(">I")


class Started(Struct, frozen=True, tag=True):
    """Process: my agents listen there, in the order in which they were asked for."""

    ports: list[int]


class Move(Struct, frozen=True, tag=True):
    """Parent: move `tokens` under `key`, from the agent of one process to that of the other."""

    key: str
    tokens: int


class Moved(Struct, frozen=True, tag=True):
    """Process: done. What only the other side knows is 0 or empty.

    Attributes:
        lag_s: how late each timer of 1 ms was meanwhile.
        core_wait_s: how long the event loop's thread was ready meanwhile and had no core.
        seconds: from the sender's push to its DONE.
        received_bytes: payload.
    """

    lag_s: list[float] = []
    core_wait_s: float = 0.0
    seconds: float = 0.0
    received_bytes: int = 0
    lane: str = ""
    transport: str = ""


class Rest(Struct, frozen=True, tag=True):
    """Parent: do nothing for so long."""

    seconds: float


class Rested(Struct, frozen=True, tag=True):
    """Process: CPU seconds of all my threads over a window of `seconds`."""

    cpu_s: float
    seconds: float


class Check(Struct, frozen=True, tag=True):
    """Parent: look whether what was moved last arrived as it was sent."""


class Checked(Struct, frozen=True, tag=True):
    """Process: how many pages differ, of those that it received."""

    wrong_pages: int


class Failed(Struct, frozen=True, tag=True):
    """Process: what was asked could not be done."""

    error: str


class Stop(Struct, frozen=True, tag=True):
    """Parent: close the agents and end."""


Question = Move | Rest | Check | Stop
Answer = Started | Moved | Rested | Checked | Failed
_decoder = msgspec.msgpack.Decoder(Question | Answer)


class Channel:
    """One end of the socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, message: Question | Answer) -> None:
        body = msgspec.msgpack.encode(message)
        self._writer.write(_HEADER.pack(len(body)) + body)

    async def receive(self) -> Question | Answer | None:
        """The next message; None when the other end is gone."""
        try:
            (length,) = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            message: Question | Answer = _decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        return message

    async def answer(self) -> Answer:
        """The next answer.

        Raises:
            RdmaKvError: the process failed, or is gone.
        """
        message = await self.receive()
        if isinstance(message, Failed):
            raise RdmaKvError(message.error)
        if not isinstance(message, Answer):
            raise RdmaKvError("a measured process has ended")
        return message

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return
