"""The control messages, their limits, and the notification that follows a WRITE.

Every control message is one MessagePack map with a `type` field, inside a frame of a 4-byte big-endian length and that
many bytes. Field types and sizes are checked while decoding; what a number may mean (is this slot granted to that peer?)
is checked by the machine that gets the message. Nothing here can execute anything: no pickle, no eval.

An interval is `[start, end]` with an exclusive end; lists "per component" follow the order of the components in HELLO.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from rdma_kv.errors import ErrorCode, RemoteProtocolError

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 1 << 20
MAX_SLOTS_PER_MESSAGE = 4096  # of a GRANT or RELEASE; more go in several
MAX_COUNT = (1 << 31) - 1
MAX_TEXT = 2048  # characters
MAX_TRANSPORTS = 8  # that an agent offers
MAX_SEGMENTS = 1024  # of staging memory
MAX_SLOTS = 1 << 20  # of an agent
MIN_HEARTBEAT_MS = 10  # a peer must not be able to make us send without a pause
FRAME_HEADER = struct.Struct(">I")

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
Key = Annotated[str, Meta(min_length=1, max_length=512)]
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Index = Annotated[int, Meta(ge=0, lt=1 << 31)]
Size = Annotated[int, Meta(ge=0, lt=1 << 62)]
Address = Annotated[int, Meta(ge=0, lt=1 << 62)]
Sequence = Annotated[int, Meta(ge=1, lt=1 << 62)]
SequenceOrNone = Annotated[int, Meta(ge=0, lt=1 << 62)]  # 0 where the link has no number for the transfer
Span = tuple[Index, Index]
SlotEpoch = tuple[Index, Sequence]
Spans = Annotated[list[Span], Meta(max_length=64)]
SlotEpochs = Annotated[list[SlotEpoch], Meta(max_length=MAX_SLOTS_PER_MESSAGE)]
SlotCount = Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
SegmentFacts = tuple[Address, SlotCount, Index]  # address, slots, device
Checksum = Annotated[int, Meta(ge=0)]  # up to 2**64 - 1, as far as MessagePack goes
Digest = Annotated[bytes, Meta(min_length=16, max_length=16)]


class Message(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of all control messages."""


class TopologyFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """`Topology` on the wire."""

    tp: Index
    pp: Index
    cp: Index
    dp: Index
    layers_per_stage: Annotated[list[Index], Meta(max_length=4096)]
    cp_split: Name


class ComponentFacts(Struct, frozen=True, forbid_unknown_fields=True):
    """`Component` on the wire. `page_size` may differ between the sides; everything else must not."""

    name: Name
    layers: Annotated[list[Index], Meta(max_length=4096)]
    kv_heads: Index
    kv_factor: Index
    row_bytes: Size
    dtype: Name
    replicated: bool
    has_tokens: bool
    scale_mode: Text
    opaque_page_tokens: Index
    page_size: Index


class Hello(Message, frozen=True, tag="hello"):
    """First message in both directions: who I am, what I own, what my KV looks like.

    Attributes:
        rank: the lowest rank that this agent owns; part of its identity.
        incarnation: 16 random bytes of this process life.
        owns: (replica, rank) of everything this agent owns.
        transports: data planes that I can use, the best first. The link uses the first of the prefill side's list that
            the decode side has too.
        slot_bytes: my staging slot; a chunk is at most the smaller of both sides' slots.
        heartbeat_ms: how often I would send HEARTBEAT; the link uses the smaller of both sides' intervals.
        lease_ms: how long I wait for a sign of life before I give the peer up.
        host: equal in two processes only if they share a kernel and a process namespace; empty where unknown.
        pid, started: of my process, in that namespace: its number, and when it started, in the kernel's clock ticks
            since boot. Together they name one process life. 0 where unknown.
        checksum: algorithm of the checksum that every chunk carries; empty for none. Both sides must name the same.
        device_transports: those of `transports` that can write staging of mine that lies on a GPU.
        device_lanes: over which I would have it written there. Where both sides have a transport and a lane that leads from
            one to the other, staging of a link is on the GPUs; else it is in host memory.
    """

    version: Index
    cluster: Name
    engine: Name
    role: Name
    rank: Index
    incarnation: Digest
    topology: TopologyFacts
    tie_break: Name
    fingerprint: Text
    components: Annotated[list[ComponentFacts], Meta(min_length=1, max_length=64)]
    owns: Annotated[list[tuple[Index, Index]], Meta(min_length=1, max_length=65536)]
    transports: Annotated[list[Name], Meta(min_length=1, max_length=MAX_TRANSPORTS)]
    slot_bytes: Size
    heartbeat_ms: Annotated[int, Meta(ge=MIN_HEARTBEAT_MS, le=MAX_COUNT)]
    lease_ms: Annotated[int, Meta(ge=1, le=MAX_COUNT)]
    host: Annotated[str, Meta(max_length=256)]
    pid: Index
    started: Size
    checksum: Annotated[str, Meta(max_length=256)] = ""
    device_transports: Annotated[list[Name], Meta(max_length=MAX_TRANSPORTS)] = []
    device_lanes: Annotated[list[Name], Meta(max_length=MAX_TRANSPORTS)] = []


class Regions(Message, frozen=True, tag="regions"):
    """Target to initiator: where the staging slots lie and how to reach them.

    It comes before the first GRANT, and again before any GRANT of a slot in a new segment. A later one begins with the
    segments of the one before.

    Attributes:
        segments: (address, number of slots, device) of each piece of memory, in the order of the slots' numbers. The device
            is 0 for host memory, otherwise the target's CUDA ordinal + 1.
        slot_bytes: from one slot of a segment to the next.
    """

    segments: Annotated[list[SegmentFacts], Meta(min_length=1, max_length=MAX_SEGMENTS)]
    slot_bytes: Annotated[int, Meta(ge=1, le=1 << 40)]
    metadata: Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)]

    @property
    def num_slots(self) -> int:
        return sum(count for _, count, _ in self.segments)

    def place(self, slot: int) -> tuple[int, int]:
        """(address, device) of a slot below `num_slots`."""
        for address, count, device in self.segments:
            if slot < count:
                return address + slot * self.slot_bytes, device
            slot -= count
        raise IndexError(f"there are {self.num_slots} slots")


class Expect(Message, frozen=True, tag="expect"):
    """Decode to every agent of a prefill replica: I wait for `key`, for so long.

    `grants` are slots given ahead, to the only agent that sends, for a request that they can hold whole.
    """

    key: Key
    attempt: Index
    prefill_replica: Index
    decode_replica: Index
    digest: Digest
    tokens: Spans
    timeout_ms: Count
    grants: SlotEpochs = []


class Offer(Message, frozen=True, tag="offer"):
    """Prefill to decode: `key` can be had. Repeats, with a larger `want`, as boxes get ready.

    Attributes:
        transfer: this link's sequence number of the transfer; with the sender's incarnation its id.
        available: token range per component that will be pushed.
        want: boxes that are ready so far, all in all; the target grants slots up to that number.
        timeout_ms: how long the sender waits for the first answer.
    """

    transfer: Sequence
    key: Key
    attempt: Index
    prefill_replica: Index
    decode_replica: Index
    digest: Digest
    available: Spans
    want: Count
    timeout_ms: Count


class Grant(Message, frozen=True, tag="grant"):
    """Decode to prefill: send these token ranges, into these slots. Repeats as slots get free, ranges stay the same."""

    transfer: Sequence
    ranges: Spans
    slots: SlotEpochs


class Reject(Message, frozen=True, tag="reject"):
    """This OFFER (decode to prefill) or, with `transfer` 0, this EXPECT (prefill to decode) is refused."""

    transfer: SequenceOrNone
    code: ErrorCode
    message: Text
    key: Text = ""
    attempt: Index = 0
    prefill_replica: Index = 0
    decode_replica: Index = 0


class Release(Message, frozen=True, tag="release"):
    """Prefill to decode: these grants will not be used; nothing was posted to them."""

    transfer: Sequence
    slots: SlotEpochs


class TransferName(NamedTuple):
    """What a transfer is called across agents, beside the two engines."""

    key: str
    attempt: int
    prefill_replica: int
    decode_replica: int

    @classmethod
    def of(cls, message: Expect | Offer | Reject | Abort) -> TransferName:
        return cls(message.key, message.attempt, message.prefill_replica, message.decode_replica)


class Start(Message, frozen=True, tag="start"):
    """Prefill to decode, before the first WRITE of a transfer: progress your transport from here on."""

    transfer: Sequence


class Ack(Message, frozen=True, tag="ack"):
    """Decode to prefill: the box in this slot is in its pages; the grant has ended."""

    transfer: Sequence
    slot: Index
    epoch: Sequence


class Finish(Message, frozen=True, tag="finish"):
    """Prefill to decode: every box was written, no grant is used any more, and this is the request's metadata."""

    transfer: Sequence
    boxes: Count
    metadata: dict[str, Any]


class Done(Message, frozen=True, tag="done"):
    """Decode to prefill: all boxes and the metadata are in, source pages are free.

    With `transfer` 0, prefill to decode: the EXPECT of `key` finds no moves between us; nothing will come.
    """

    transfer: SequenceOrNone
    key: Text = ""
    prefill_replica: Index = 0
    decode_replica: Index = 0


class Abort(Message, frozen=True, tag="abort"):
    """Either side: this transfer has failed.

    With `transfer` 0 it goes by its name across agents, (key, prefill replica, decode replica, attempt): to participants
    that have no transfer of it on this link, or not yet.

    Attributes:
        culprit: who began; empty for the sender itself.
        counterpart: only between two agents of one engine: the engine on the other side of the transfer. Empty there where
            the call that failed had not found its counterpart; the index of that replica then means nothing.
    """

    transfer: SequenceOrNone
    key: Key
    attempt: Index
    prefill_replica: Index
    decode_replica: Index
    code: ErrorCode
    culprit: Text
    message: Text
    counterpart: Annotated[str, Meta(max_length=256)] = ""


class Quiesced(Message, frozen=True, tag="quiesced"):
    """Prefill to decode after an abort: every posted WRITE has succeeded or none was posted; all grants are free."""

    transfer: Sequence


class Settle(Message, frozen=True, tag="settle"):
    """Prefill to decode, on a link that came back: every WRITE that I posted on former links to you is over.

    Nothing of them is still on its way to your slots; what they granted is yours again.
    """


class Heartbeat(Message, frozen=True, tag="heartbeat"):
    """Either side, every interval: I live.

    Attributes:
        number: of my heartbeats on this link, ascending.
        heard: number of the last one that I heard of you; 0 for none.
        answer: acknowledge this one at once, rather than with your next heartbeat.
    """

    number: Sequence
    heard: SequenceOrNone
    answer: bool = False


class Bye(Message, frozen=True, tag="bye"):
    """Last message of a link: why it ends. `field` names what does not match in a refused handshake."""

    code: ErrorCode
    field: Text
    message: Text


ControlMessage = (
    Hello
    | Regions
    | Expect
    | Offer
    | Grant
    | Reject
    | Release
    | Start
    | Ack
    | Finish
    | Done
    | Abort
    | Quiesced
    | Settle
    | Heartbeat
    | Bye
)


class Notification(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What follows the data of one WRITE over the data plane: which box lies in which granted slot.

    `move` is the move's number in the route that both sides computed. `checksum` is that of the packed chunk, by the
    algorithm that both sides' HELLOs name; None where they name none.
    """

    transfer: Sequence
    slot: Index
    epoch: Sequence
    move: Index
    layers: Span
    tokens: Span
    checksum: Checksum | None = None


def text_field(text: str) -> str:
    """`text` as a `Text` field can carry it: cut, and without lone surrogates, which no encoder takes."""
    return text[:MAX_TEXT].encode("utf-8", "replace").decode()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ControlMessage)
_notification_decoder = msgspec.msgpack.Decoder(Notification)


def encode(message: ControlMessage) -> bytes:
    """One message as a whole frame.

    Raises:
        ValueError: the body would exceed MAX_FRAME_BYTES.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise ValueError(
            f"a {type(message).__name__} of {len(body)} bytes exceeds the frame limit of {MAX_FRAME_BYTES}"
        )
    return FRAME_HEADER.pack(len(body)) + body


def decode(peer: str, body: bytes) -> ControlMessage:
    """One frame's body.

    Raises:
        RemoteProtocolError: not MessagePack, an unknown kind, a missing, unknown or out-of-range field.
    """
    try:
        return _decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as exc:
        raise RemoteProtocolError(peer, f"unreadable control message: {exc}") from exc


def encode_notification(notification: Notification) -> bytes:
    return _encoder.encode(notification)


def decode_notification(peer: str, body: bytes) -> Notification:
    """Raises RemoteProtocolError where the bytes are not a notification."""
    try:
        return _notification_decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError, ValueError) as exc:
        raise RemoteProtocolError(peer, f"unreadable notification: {exc}") from exc
