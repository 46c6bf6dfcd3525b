"""What the demo's parent and its replicas say to each other: typed MessagePack frames over a socket pair."""

from __future__ import annotations

import asyncio
import struct
from typing import Any

import msgspec
from msgspec import Struct

_HEADER = struct.Struct(">I")


class Started(Struct, frozen=True, tag=True):
    """Replica: my agent listens there."""

    host: str
    port: int


class Go(Struct, frozen=True, tag=True):
    """Parent: the registry file is written."""


class Prefill(Struct, frozen=True, tag=True):
    """Parent to a prefill replica: compute this prompt and send its KV."""

    number: int
    key: str
    prompt: list[int]
    to: int


class Sent(Struct, frozen=True, tag=True):
    """Prefill replica: it is with the decode replica. `seconds` from push to DONE."""

    number: int
    fingerprints: list[list[list[bytes]]]
    compute_s: float
    seconds: float
    gather_s: float
    write_s: float
    lanes: list[str]
    transports: list[str]


class Decode(Struct, frozen=True, tag=True):
    """Parent to a decode replica: receive this request."""

    number: int
    key: str
    prompt_tokens: int
    source: int


class Arrived(Struct, frozen=True, tag=True):
    """Decode process: all KV and metadata are here. `shards`, float32 bytes by rank, where another process judges."""

    number: int
    received_bytes: int
    scatter_s: float
    shards: dict[int, bytes]


class Undivided(Struct, frozen=True, tag=True):
    """Parent to a prefill process: run this prompt as if nothing were divided, on the kind of device that is used here."""

    number: int
    prompt: list[int]
    new_tokens: int


class Expected(Struct, frozen=True, tag=True):
    """Prefill process: the tokens of the undivided run."""

    number: int
    tokens: list[int]


class Verify(Struct, frozen=True, tag=True):
    """Parent to a decode process: judge what arrived against what prefill wrote, and generate from it.

    `shards` are those of the replica's other processes.
    """

    number: int
    fingerprints: list[list[list[bytes]]]
    new_tokens: int
    shards: dict[int, bytes]


class Verified(Struct, frozen=True, tag=True):
    """Decode replica: tokens from the transferred pages, what differed, and the two controls."""

    number: int
    tokens: list[int]
    overwritten_tokens: list[int]
    differences: list[str]
    alteration_seen: bool
    generate_s: float


class Inspect(Struct, frozen=True, tag=True):
    """Parent: every transfer has ended; look at all pages that should not have been touched."""


class Inspected(Struct, frozen=True, tag=True):
    """Replica: what was touched and should not have been."""

    touched: list[str]


class Failed(Struct, frozen=True, tag=True):
    """Replica: this request failed here."""

    number: int
    error: str


class Stop(Struct, frozen=True, tag=True):
    """Parent: close the agent and end."""


Message = (
    Started
    | Go
    | Prefill
    | Sent
    | Decode
    | Arrived
    | Undivided
    | Expected
    | Verify
    | Verified
    | Inspect
    | Inspected
    | Failed
    | Stop
)
_decoder = msgspec.msgpack.Decoder(Message)


class Channel:
    """One end of the socket pair."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, message: Message) -> None:
        body = msgspec.msgpack.encode(message)
        self._writer.write(_HEADER.pack(len(body)) + body)

    async def receive(self) -> Any:  # noqa: ANN401 - one of Message; the caller matches
        """The next message; None when the other end is gone."""
        try:
            (length,) = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            return _decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def close(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return
