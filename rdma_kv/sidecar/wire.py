"""The messages between an engine's process and its sidecar, and their limits.

Each is one MessagePack map with a `type` field, in a frame of a 4-byte big-endian length and that many bytes, as on the
control stream between agents. Types and sizes are checked while decoding. What a number means is checked by who gets it:
the client looks at every address before a kernel runs. Arrays travel as bytes (little-endian int64 and int32).

A call (`send`, `receive`) is named by a number that the client chooses, ascending from 1 in each connection. It ends with
one ENDED, which means that no page of it is touched any more.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from rdma_kv.errors import ConfigError, ErrorCode, RemoteProtocolError
from rdma_kv.messages import (
    FRAME_HEADER,
    MAX_SEGMENTS,
    Checksum,
    ComponentFacts,
    Index,
    Key,
    Name,
    Sequence,
    Size,
    Span,
    Text,
    TopologyFacts,
)

VERSION: Final = 1
MAX_FRAME_BYTES: Final = 64 << 20
"""A chunk of a large slot names each of its tokens (12 bytes), a request each of its pages (8 bytes)."""

MAX_FIRST_FRAME_BYTES: Final = 1 << 20  # from a process that has not attached
MAX_CALLS: Final = 1 << 16  # of one client at a time

Bytes = Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)]
SmallBytes = Annotated[bytes, Meta(max_length=1 << 20)]
Seconds = Annotated[float, Meta(gt=0, le=7 * 24 * 3600.0)]
SegmentNumber = Annotated[int, Meta(ge=0, lt=MAX_SEGMENTS * 4)]
Place = tuple[SegmentNumber, Size]  # segment, offset in bytes
Value = str | int | bool | float | list[int]
EventNumber = Annotated[int, Meta(ge=0, lt=1 << 62)]  # 0 is none
Ranges = tuple[Index, Index] | dict[str, Span]
"""No Meta on the mapping: a decoder of msgspec 0.23 for such a tuple beside such a mapping crashes the garbage collector."""

Replica = tuple[Name, Index]


class Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of all messages."""


class Fault(Struct, frozen=True, forbid_unknown_fields=True):
    """An error, with its facts. `text` is what people read."""

    code: ErrorCode
    text: Annotated[str, Meta(max_length=1 << 16)]
    facts: Annotated[dict[str, Value], Meta(max_length=32)]


class GpuFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """`GpuConfig` on the wire; the GPU by its UUID, since the two processes may count differently."""

    uuid: Annotated[bytes, Meta(min_length=16, max_length=16)]
    programs: Annotated[int, Meta(ge=1, lt=1 << 31)] | None
    stream_priority: Annotated[int, Meta(ge=-1000, le=1000)]
    direct: Annotated[list[Name], Meta(max_length=8)]


# --- from the engine's process -----------------------------------------------------------------------------------------


class Attach(Message, frozen=True, tag="attach"):
    """First message of a client: whose agent is wanted. Page sizes of components are not used here, and 0."""

    version: Index
    cluster: Name
    engine: Name
    role: Name
    ranks: Annotated[list[Index], Meta(min_length=1, max_length=1 << 16)]
    topology: TopologyFacts
    tie_break: Name
    fingerprint: Text
    components: Annotated[list[ComponentFacts], Meta(min_length=1, max_length=64)]
    checksum: bool
    gpu: GpuFacts | None
    host: Annotated[str, Meta(max_length=256)]
    pid: Index
    started: Size


class Status(Message, frozen=True, tag="status"):
    """First message of who wants to know how the sidecar is; its answer is STATUS_IS, and then the stream ends."""


class Mapped(Message, frozen=True, tag="mapped"):
    """A segment can be used; or it cannot, and `fault` says why."""

    segment: SegmentNumber
    fault: Fault | None = None


class Register(Message, frozen=True, tag="register"):
    """One rank's pool of one component, at addresses of the engine's process; see `KvLayout`."""

    component: Name
    replica: Index
    rank: Index
    origins: SmallBytes  # int64 [layers, kv, (buffer, offset)]
    kv_factor: Index
    num_pages: Size
    page_size: Index
    heads: Index
    row_bytes: Size
    page_stride: Size
    token_stride: Size
    head_stride: Size
    name: Text
    addresses: SmallBytes  # int64 [buffers]
    sizes: SmallBytes  # int64 [buffers]


class Send(Message, frozen=True, tag="send"):
    """Begin a send; answered by ANSWER when it has begun, or by ENDED."""

    call: Sequence
    key: Key
    replica: Index
    attempt: Index
    pages: Annotated[list[Bytes], Meta(max_length=64)]  # int64 [pages] per component
    tokens: Ranges
    to: Replica | None
    timeout_s: Seconds


class Push(Message, frozen=True, tag="push"):
    """See `Sending.push`; answered by ANSWER. `event` is a CUDA event of the client's that the GPU must wait for."""

    call: Sequence
    tokens: Span | None
    layers: Span | None
    component: Annotated[str, Meta(max_length=256)] | None
    event: EventNumber


class Finish(Message, frozen=True, tag="finish"):
    """The block of a send has ended well; or its metadata is not fit to be sent, and `fault` says why."""

    call: Sequence
    metadata: SmallBytes  # MessagePack map
    fault: Fault | None = None


class Abort(Message, frozen=True, tag="abort"):
    """The block of a send has ended by an exception."""

    call: Sequence
    reason: Text


class Receive(Message, frozen=True, tag="receive"):
    """Begin a receive; answered by ENDED."""

    call: Sequence
    key: Key
    replica: Index
    attempt: Index
    pages: Annotated[list[Bytes], Meta(max_length=64)]
    tokens: Ranges
    sources: Annotated[list[Replica], Meta(max_length=4096)]
    timeout_s: Seconds
    event: EventNumber


class Cancel(Message, frozen=True, tag="cancel"):
    """The caller was cancelled; ENDED follows, if it has not crossed this."""

    call: Sequence


class Worked(Message, frozen=True, tag="worked"):
    """The outcome of a WORK, and how many (gather, scatter) launches there were so far."""

    work: Sequence
    result: Checksum | None
    launches: tuple[Size, Size]
    fault: Fault | None = None


class Ask(Message, frozen=True, tag="ask"):
    """`Agent.stats()` is wanted; answered by STATS."""

    number: Sequence


class Closing(Message, frozen=True, tag="closing"):
    """The client closes: its calls fail, and all participants are told that. DETACH follows when they have ended."""


class Detach(Message, frozen=True, tag="detach"):
    """The client closes; no kernel of it runs any more. Answered by the end of the stream, when its agent has closed."""


# --- from the sidecar --------------------------------------------------------------------------------------------------


class Segment(Message, frozen=True, tag="segment"):
    """Staging memory to map; answered by MAPPED. Its memfd travels with this frame.

    Attributes:
        device_handle: CUDA IPC handle of as many bytes on the GPU; empty where the pools are in host memory.
    """

    segment: SegmentNumber
    length_bytes: Annotated[int, Meta(ge=1, lt=1 << 62)]
    device_handle: Annotated[bytes, Meta(max_length=64)] = b""


class Attached(Message, frozen=True, tag="attached"):
    """The agent is up. `transfer_s` is how long a call takes at most by default."""

    name: Name
    host: Name
    port: Index
    transfer_s: Seconds


class Work(Message, frozen=True, tag="work"):
    """Gather or scatter one chunk; answered by WORKED. See `kernels.work.Work` and `kernels.launch.Chunk`."""

    work: Sequence
    scatter: bool
    packed: Place
    bounce: Place | None
    pointers: Bytes
    planes: Index
    token_pool: Bytes
    token_offset: Bytes
    heads: Index
    head_stride: Annotated[int, Meta(ge=-(1 << 62), lt=1 << 62)]
    row_bytes: Size
    checksum: bool
    expected: Checksum | None
    after: Annotated[list[EventNumber], Meta(max_length=1 << 16)]


class Await(Message, frozen=True, tag="await"):
    """Wait until all these CUDA events have fired; answered by WORKED, under a number as that of a WORK."""

    work: Sequence
    events: Annotated[list[EventNumber], Meta(max_length=1 << 16)]


class Lane(Message, frozen=True, tag="lane"):
    """A link's WRITEs go over this lane from now on: launches must outrun it."""

    lane: Name


class Answer(Message, frozen=True, tag="answer"):
    """To SEND (it has begun) and PUSH, in their order; `fault` is raised to the caller."""

    call: Sequence
    to: Replica | None
    fault: Fault | None = None


class Failed(Message, frozen=True, tag="failed"):
    """A send has failed; its pages may still be read until ENDED."""

    call: Sequence
    fault: Fault


class Ended(Message, frozen=True, tag="ended"):
    """A call is over: no page of it is touched any more.

    Attributes:
        fault: why it failed; None for a success, and where it was cancelled or aborted by its caller.
        to: of a send, the decode replica; of a receive, the prefill replica.
        times: seconds of gather, write, scatter on this side.
        tokens, metadata, received_bytes, seconds: of a receive, see `Received`.
    """

    call: Sequence
    fault: Fault | None
    to: Replica | None
    times: tuple[float, float, float]
    tokens: dict[str, Span] = {}
    metadata: SmallBytes = b"\x80"
    received_bytes: Size = 0
    seconds: float = 0.0


class Stats(Message, frozen=True, tag="stats"):
    """`Agent.stats()`."""

    number: Sequence
    stats: dict[str, Any]


class StatusIs(Message, frozen=True, tag="status_is"):
    """How the sidecar is; see docs/operations.md."""

    status: dict[str, Any]


class Bye(Message, frozen=True, tag="bye"):
    """Last word: why the sidecar ends this connection, or refuses it."""

    fault: Fault


FromEngine = (
    Attach
    | Status
    | Mapped
    | Register
    | Send
    | Push
    | Finish
    | Abort
    | Receive
    | Cancel
    | Worked
    | Ask
    | Closing
    | Detach
)
FromSidecar = Segment | Attached | Work | Await | Lane | Answer | Failed | Ended | Stats | StatusIs | Bye

_encoder = msgspec.msgpack.Encoder()
_of_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
_of_sidecar: msgspec.msgpack.Decoder[FromSidecar] = msgspec.msgpack.Decoder(FromSidecar)


def encode(message: FromEngine | FromSidecar) -> bytes:
    """A whole frame.

    Raises:
        ValueError: it exceeds the limit of a frame.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(body)} bytes exceeds the limit of {MAX_FRAME_BYTES}")
    return FRAME_HEADER.pack(len(body)) + body


_ARGUMENTS: Final = {"sources": "source", "call": "send"}  # whose name is another one on the wire


def frame_of_call(message: Send | Receive | Push) -> bytes:
    """As `encode`, for what a caller has said: the sidecar would end the connection over a value that it cannot take.

    Raises:
        ConfigError: there is such a value; the argument is named.
    """
    light = message if isinstance(message, Push) else msgspec.structs.replace(message, pages=[])
    try:
        _of_engine.decode(_encoder.encode(light))
        return encode(message)
    except msgspec.ValidationError as exc:
        text, _, path = str(exc).partition(" - at `$.")
        name = re.split(r"\W", path)[0]
        raise ConfigError(_ARGUMENTS.get(name, name), text) from exc
    except UnicodeEncodeError as exc:  # of all names, only those of other engines were not compared with anything
        raise ConfigError("source" if isinstance(message, Receive) else "to", f"is no Unicode text: {exc}") from exc
    except TypeError as exc:
        raise ConfigError("arguments", f"cannot be sent: {exc}") from exc
    except ValueError as exc:
        raise ConfigError("pages", f"{exc}; page tables of so many pages cannot be sent to a sidecar") from exc


def decode_of_engine(who: str, body: bytes) -> FromEngine:
    """What a client sent.

    Raises:
        RemoteProtocolError: not a message of a client.
    """
    try:
        return _of_engine.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise RemoteProtocolError(who, f"an unreadable message: {exc}") from exc


def decode_of_sidecar(who: str, body: bytes) -> FromSidecar:
    """What a sidecar sent.

    Raises:
        RemoteProtocolError: not a message of a sidecar.
    """
    try:
        return _of_sidecar.decode(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise RemoteProtocolError(who, f"an unreadable message: {exc}") from exc
