"""Control messages and notifications: their wire form read and written by another MessagePack library, and their limits."""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from protocol_rig import seeded

from rdma_kv.errors import ErrorCode, RemoteProtocolError
from rdma_kv.messages import (
    FRAME_HEADER,
    MAX_COUNT,
    MAX_FRAME_BYTES,
    MAX_SEGMENTS,
    MAX_SLOTS,
    MAX_SLOTS_PER_MESSAGE,
    MAX_TEXT,
    MIN_HEARTBEAT_MS,
    Abort,
    Ack,
    Bye,
    ComponentFacts,
    ControlMessage,
    Done,
    Expect,
    Finish,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Notification,
    Offer,
    Quiesced,
    Regions,
    Reject,
    Release,
    Settle,
    Start,
    TopologyFacts,
    decode,
    decode_notification,
    encode,
    encode_notification,
    text_field,
)

ID = bytes(range(16))
TOPOLOGY = TopologyFacts(2, 1, 1, 2, [4], "contiguous")
COMPONENT = ComponentFacts(
    name="kv",
    layers=[0, 1, 2, 3],
    kv_heads=4,
    kv_factor=2,
    row_bytes=256,
    dtype="bfloat16",
    replicated=False,
    has_tokens=True,
    scale_mode="",
    opaque_page_tokens=0,
    page_size=16,
)

ONE_OF_EACH: list[ControlMessage] = [
    Hello(
        1,
        "c",
        "p",
        "prefill",
        0,
        ID,
        TOPOLOGY,
        "replica",
        "model",
        [COMPONENT],
        [(0, 0), (1, 1)],
        ["ucx"],
        1 << 22,
        2000,
        10_000,
        "boot/pid:[4026531836]",
        4711,
        123_456_789,
    ),
    Regions([((1 << 47) + 4096, 16, 1), (4096, 1, 0)], 1 << 22, b"\x00\xffblob"),
    Expect("key", 0, 1, 2, ID, [(16, 2048)], 60_000),
    Offer(7, "key", 3, 1, 2, ID, [(0, 2048), (0, 1)], 5, 60_000),
    Grant(7, [(16, 2048), (0, 1)], [(3, 9), (15, 1 << 40)]),
    Reject(0, ErrorCode.ROUTE_MISMATCH, "routes differ", "key", 1, 2),
    Release(7, [(3, 9)]),
    Start(7),
    Ack(7, 3, 9),
    Finish(7, 12, {"first_token": 5, "text": "é", "raw": b"\x00", "list": [1, None, True, 0.5, {"k": -1}]}),
    Done(7),
    Abort(7, "key", 0, 1, 2, ErrorCode.TRANSFER_TIMEOUT, "rank 3", "too late"),
    Quiesced(7),
    Settle(),
    Heartbeat(9, 8, True),
    Bye(ErrorCode.INCOMPATIBLE_PEER, "kv.row_bytes", "256 there, 128 here"),
]
NOTE = Notification(7, 3, 9, 2, (0, 4), (16, 80))
each = pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda message: type(message).__name__)


def body_of(message: ControlMessage) -> bytes:
    frame = encode(message)
    assert struct.unpack(">I", frame[:4]) == (len(frame) - 4,)
    return frame[FRAME_HEADER.size :]


def as_map(message: ControlMessage) -> dict[str, Any]:
    """The message as another library reads it."""
    found = msgpack.unpackb(body_of(message), strict_map_key=True)
    assert isinstance(found, dict)
    return found


def changed(message: ControlMessage, /, **fields: Any) -> bytes:
    """The body of a message as another library writes it, with some fields replaced."""
    return msgpack.packb({**as_map(message), **fields})


def the(kind: type[Message]) -> Any:
    (found,) = (message for message in ONE_OF_EACH if type(message) is kind)
    return found


def refused(body: bytes) -> str:
    with pytest.raises(RemoteProtocolError) as error:
        decode("peer 7", body)
    assert error.value.peer == "peer 7"
    return str(error.value)


# --- the wire form -----------------------------------------------------------------------------------------------------


def test_every_kind_is_here():
    assert {type(message) for message in ONE_OF_EACH} == set(ControlMessage.__args__)
    assert {type(message) for message in ONE_OF_EACH} == set(Message.__subclasses__())


@each
def test_round_trip(message: ControlMessage):
    again = decode("peer", body_of(message))
    assert again == message
    assert type(again) is type(message)


@each
def test_another_library_reads_a_map_with_a_type(message: ControlMessage):
    facts = as_map(message)
    assert facts.pop("type") == type(message).__name__.lower()
    assert list(facts) == list(message.__struct_fields__)


@each
def test_another_library_writes_what_we_read(message: ControlMessage):
    facts = as_map(message)
    shuffled = dict(sorted(facts.items(), reverse=True))
    assert decode("peer", msgpack.packb(shuffled)) == message


def test_codes_are_numbers_on_the_wire():
    assert as_map(the(Abort))["code"] == 8
    assert as_map(the(Bye))["code"] == 4


def test_a_notification_is_an_array():
    body = encode_notification(NOTE)
    assert msgpack.unpackb(body) == [7, 3, 9, 2, [0, 4], [16, 80], None]
    assert decode_notification("peer", msgpack.packb([7, 3, 9, 2, [0, 4], [16, 80], None])) == NOTE
    assert decode_notification("peer", msgpack.packb([7, 3, 9, 2, [0, 4], [16, 80]])) == NOTE
    assert len(body) < 64


@pytest.mark.parametrize("checksum", [0, 1, (1 << 64) - 1])
def test_a_notification_carries_any_checksum(checksum: int):
    note = Notification(7, 3, 9, 2, (0, 4), (16, 80), checksum)
    body = encode_notification(note)
    assert msgpack.unpackb(body)[-1] == checksum
    assert decode_notification("peer", body) == note
    assert len(body) < 64


@pytest.mark.parametrize("checksum", [-1, 1.5, "1", True, [1]])
def test_what_is_no_checksum_is_refused(checksum: Any):
    with pytest.raises(RemoteProtocolError):
        decode_notification("peer", msgpack.packb([7, 3, 9, 2, [0, 4], [16, 80], checksum]))


def test_p75_one_grant_for_a_large_request_is_far_below_the_frame_limit():
    """61 layers x 8,192 pages cost nothing on the wire: a message names slots and ranges, never pages."""
    slots = [(index, (1 << 62) - 1) for index in range(MAX_SLOTS_PER_MESSAGE)]
    assert len(encode(Grant(1, [(0, 8192 * 64)] * 64, slots))) < 100_000


# --- limits ------------------------------------------------------------------------------------------------------------

INDEX_TOP, SEQUENCE_TOP = (1 << 31) - 1, (1 << 62) - 1
NUMBERS = [
    (Hello, "rank", 0, INDEX_TOP),
    (Hello, "version", 0, INDEX_TOP),
    (Hello, "slot_bytes", 0, (1 << 62) - 1),
    (Hello, "heartbeat_ms", MIN_HEARTBEAT_MS, MAX_COUNT),
    (Hello, "lease_ms", 1, MAX_COUNT),
    (Hello, "pid", 0, INDEX_TOP),
    (Hello, "started", 0, (1 << 62) - 1),
    (Regions, "slot_bytes", 1, 1 << 40),
    (Expect, "attempt", 0, INDEX_TOP),
    (Expect, "timeout_ms", 0, MAX_COUNT),
    (Offer, "transfer", 1, SEQUENCE_TOP),
    (Offer, "want", 0, MAX_COUNT),
    (Offer, "timeout_ms", 0, MAX_COUNT),
    (Grant, "transfer", 1, SEQUENCE_TOP),
    (Reject, "transfer", 0, SEQUENCE_TOP),
    (Release, "transfer", 1, SEQUENCE_TOP),
    (Start, "transfer", 1, SEQUENCE_TOP),
    (Ack, "slot", 0, INDEX_TOP),
    (Ack, "epoch", 1, SEQUENCE_TOP),
    (Finish, "boxes", 0, MAX_COUNT),
    (Done, "transfer", 0, SEQUENCE_TOP),
    (Abort, "transfer", 0, SEQUENCE_TOP),
    (Quiesced, "transfer", 1, SEQUENCE_TOP),
    (Heartbeat, "number", 1, SEQUENCE_TOP),
    (Heartbeat, "heard", 0, SEQUENCE_TOP),
]


@pytest.mark.parametrize(("kind", "field", "low", "high"), NUMBERS, ids=lambda v: getattr(v, "__name__", v))
def test_numbers_have_bounds(kind: type[Message], field: str, low: int, high: int):
    message = the(kind)
    for inside in (low, high):
        assert getattr(decode("peer", changed(message, **{field: inside})), field) == inside
    for outside in (low - 1, high + 1):
        assert field in refused(changed(message, **{field: outside}))


@each
def test_a_number_that_can_be_offered_can_be_answered(message: ControlMessage):
    if hasattr(message, "transfer"):
        assert decode("peer", changed(message, transfer=SEQUENCE_TOP)).transfer == SEQUENCE_TOP


def sized(low: int, high: int, item: Any = "x") -> tuple[list[Any], list[Any]]:
    """Values just inside and just outside of a range of lengths."""
    make = (lambda n: item * n) if isinstance(item, str | bytes) else (lambda n: [item] * n)
    return [make(low), make(high)], [make(high + 1), *([make(low - 1)] if low else [])]


SIZES = [
    (Hello, "cluster", *sized(1, 256)),
    (Hello, "engine", *sized(1, 256)),
    (Hello, "role", *sized(1, 256)),
    (Hello, "tie_break", *sized(1, 256)),
    (Hello, "host", *sized(0, 256)),
    (Hello, "checksum", *sized(0, 256)),
    (Hello, "transports", [["ucx"], ["ucx"] * 8], [[], ["ucx"] * 9]),
    (Hello, "incarnation", *sized(16, 16, b"\x01")),
    (Hello, "fingerprint", *sized(0, MAX_TEXT)),
    (Hello, "components", *sized(1, 64, msgspec.to_builtins(COMPONENT))),
    (Hello, "owns", *sized(1, 65536, [0, 0])),
    (Regions, "metadata", *sized(0, MAX_FRAME_BYTES - 200, b"\x01")),
    (Expect, "key", *sized(1, 512)),
    (Expect, "digest", *sized(16, 16, b"\x01")),
    (Expect, "tokens", *sized(0, 64, [0, 1])),
    (Offer, "key", *sized(1, 512)),
    (Offer, "digest", *sized(16, 16, b"\x01")),
    (Offer, "available", *sized(0, 64, [0, 1])),
    (Grant, "ranges", *sized(0, 64, [0, 1])),
    (Grant, "slots", *sized(0, MAX_SLOTS_PER_MESSAGE, [0, 1])),
    (Release, "slots", *sized(0, MAX_SLOTS_PER_MESSAGE, [0, 1])),
    (Reject, "message", *sized(0, MAX_TEXT)),
    (Abort, "key", *sized(1, 512)),
    (Abort, "culprit", *sized(0, MAX_TEXT)),
    (Abort, "counterpart", *sized(0, 256)),
    (Abort, "message", *sized(0, MAX_TEXT, "é")),
    (Bye, "field", *sized(0, MAX_TEXT)),
    (Bye, "message", *sized(0, MAX_TEXT)),
]


@pytest.mark.parametrize(
    ("kind", "field", "inside", "outside"),
    [case for case in SIZES if case[1] != "metadata"],
    ids=lambda v: getattr(v, "__name__", v) if isinstance(v, type | str) and len(str(v)) < 60 else "",
)
def test_lengths_have_bounds(kind: type[Message], field: str, inside: list[Any], outside: list[Any]):
    message = the(kind)
    for value in inside:
        assert len(getattr(decode("peer", changed(message, **{field: value})), field)) == len(value)
    for value in outside:
        assert field in refused(changed(message, **{field: value}))


def test_facts_inside_a_hello_have_bounds():
    hello = as_map(the(Hello))
    for part, name, value in (
        ("topology", "tp", -1),
        ("topology", "tp", 1 << 31),
        ("topology", "layers_per_stage", [1] * 4097),
        ("topology", "cp_split", ""),
        ("components", "layers", [0] * 4097),
        ("components", "row_bytes", -1),
        ("components", "replicated", 1),
        ("components", "name", ""),
        ("components", "extra", 1),
        ("topology", "extra", 1),
    ):
        old = hello[part]
        new = {**old, name: value} if isinstance(old, dict) else [{**old[0], name: value}]
        refused(changed(the(Hello), **{part: new}))


def test_names_of_transports_have_bounds():
    for inside in ("u", "x" * 256):
        assert decode("peer", changed(the(Hello), transports=["ucx", inside])).transports == ["ucx", inside]
    for outside in ("", "x" * 257, 1, None, ["ucx"]):
        assert "transports" in refused(changed(the(Hello), transports=["ucx", outside]))


@pytest.mark.parametrize("slot", [[0], [0, 1, 2], [-1, 1], [0, 0], [1 << 31, 1], [0, 1 << 62], ["0", 1], None])
def test_a_slot_is_an_index_and_an_epoch_from_1(slot: Any):
    refused(changed(the(Grant), slots=[slot]))
    refused(changed(the(Release), slots=[slot]))


# --- what is not a message ---------------------------------------------------------------------------------------------


@each
def test_unknown_missing_and_mistyped_fields_are_refused(message: ControlMessage):
    assert "surprise" in refused(changed(message, surprise=1))
    facts = as_map(message)
    required = len(message.__struct_fields__) - len(message.__struct_defaults__)
    for name in message.__struct_fields__[:required]:
        refused(msgpack.packb({key: value for key, value in facts.items() if key != name}))
    for name in message.__struct_fields__:
        for wrong in (None, 1.5, 7 if isinstance(getattr(message, name), bool) else True, {1: 1}):
            refused(changed(message, **{name: wrong}))


@each
def test_cut_and_lengthened_bodies_are_refused(message: ControlMessage):
    body = body_of(message)
    for length in range(len(body)):
        refused(body[:length])
    refused(body + b"\x00")
    refused(body + body)


@pytest.mark.parametrize("kind", ["", "HELLO", "beat", "start ", "message", None, 3, b"start"])
def test_unknown_kinds_are_refused(kind: Any):
    refused(msgpack.packb({"type": kind, "transfer": 1}))


def test_the_type_may_come_last_but_not_be_missing():
    assert decode("peer", msgpack.packb({"transfer": 1, "type": "start"})) == Start(1)
    refused(msgpack.packb({"transfer": 1}))


@pytest.mark.parametrize("code", [0, max(ErrorCode) + 1, -1, 1 << 40, "closed", None])
def test_unknown_codes_are_refused(code: Any):
    refused(changed(the(Bye), code=code))


NESTED = msgpack.packb({**as_map(Finish(1, 0, {})), "metadata": {"a": 1}})[:-1]  # ends where the value of "a" begins
HOSTILE = {
    "deep lists": b"\x91" * 100_000 + b"\x01",
    "deep maps": b"\x81\xa1a" * 100_000 + b"\x01",
    "deep keys": b"\x81" * 100_000 + b"\x01",
    "a list of 4 G": b"\xdd\xff\xff\xff\xff",
    "a map of 4 G": b"\xdf\xff\xff\xff\xff",
    "bytes of 4 G": b"\xc6\xff\xff\xff\xff",
    "a text of 4 G": b"\xdb\xff\xff\xff\xff",
    "a key that is a map": b"\x81\x80\x01",
    "a key that holds a map": b"\x81\x91\x80\x01",
    "a broken time": b"\xd7\xff" + b"\xff" * 8,
    "a broken long time": b"\xc7\x0c\xff" + b"\xff" * 12,
    "the unused byte": b"\xc1",
    "broken utf-8": b"\xa1\xff",
    "half a surrogate": b"\xa3\xed\xa0\x80",
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_metadata_is_refused(value: bytes):
    """Metadata is the only part of a message without a schema."""
    refused(NESTED + value)
    refused(value)
    with pytest.raises(RemoteProtocolError):
        decode_notification("peer", value)


def test_metadata_has_names_that_are_text():
    refused(changed(the(Finish), metadata={1: 2}))
    refused(changed(the(Finish), metadata=[1, 2]))


json = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(seeded, max_examples=50)
@given(st.dictionaries(st.text(max_size=4), json | st.binary(max_size=4), max_size=3))
def test_metadata_arrives_as_it_was_sent(metadata: dict[str, Any]):
    found = decode("peer", body_of(Finish(1, 0, metadata)))
    assert isinstance(found, Finish)
    assert found.metadata == metadata
    assert msgpack.unpackb(body_of(found))["metadata"] == metadata


@settings(seeded, max_examples=300)
@given(st.binary(max_size=80))
@example(b"")
def test_p79_random_bytes_are_refused(body: bytes):
    refused(body)
    with pytest.raises(RemoteProtocolError):
        decode_notification("peer", body)


@settings(seeded, max_examples=300)
@given(st.sampled_from(ONE_OF_EACH), st.integers(0, 1 << 16), st.integers(0, 255))
def test_p79_a_flipped_byte_gives_a_message_or_a_typed_error(message: ControlMessage, place: int, value: int):
    body = bytearray(body_of(message))
    body[place % len(body)] = value
    try:
        found = decode("peer", bytes(body))
    except RemoteProtocolError:
        return
    assert isinstance(found, Message)
    assert decode("peer", body_of(found)) == found  # whatever it says, it is inside all limits


@seeded
@given(st.sampled_from(ONE_OF_EACH), st.data())
def test_p79_a_random_field_gives_a_message_or_a_typed_error(message: ControlMessage, data: st.DataObject):
    field = data.draw(st.sampled_from(message.__struct_fields__ or ("surprise",)))
    value = data.draw(st.integers() | st.text(max_size=3) | st.lists(st.integers(-1, 9), max_size=3) | st.none())
    facts = {**msgspec.to_builtins(message, builtin_types=(bytes,)), field: value}
    try:
        found = decode("peer", msgspec.msgpack.encode(facts))
    except (RemoteProtocolError, OverflowError):  # OverflowError: no MessagePack writes so large a number
        return
    assert getattr(found, field) is not None


# --- notifications -----------------------------------------------------------------------------------------------------

GOOD = [7, 3, 9, 2, [0, 4], [16, 80]]


@pytest.mark.parametrize(
    "facts",
    [
        [],
        GOOD[:-1],
        [*GOOD, None, 1],
        [0, *GOOD[1:]],
        [7, -1, *GOOD[2:]],
        [7, 1 << 31, *GOOD[2:]],
        [7, 3, 0, *GOOD[3:]],
        [7, 3, 1 << 62, *GOOD[3:]],
        [7, 3, 9, 1 << 31, *GOOD[4:]],
        [7, 3, 9, 2, [0], [16, 80]],
        [7, 3, 9, 2, [0, 4, 5], [16, 80]],
        [7, 3, 9, 2, [0, -4], [16, 80]],
        [7, 3, 9, 2, [0, 4], [16, 1 << 31]],
        [7, 3, 9, 2, [0, 4], None],
        ["7", *GOOD[1:]],
        [7.0, *GOOD[1:]],
        {"transfer": 7},
        7,
    ],
)
def test_notifications_outside_their_form_are_refused(facts: Any):
    with pytest.raises(RemoteProtocolError) as error:
        decode_notification("peer 7", msgpack.packb(facts))
    assert error.value.peer == "peer 7"


def test_notifications_are_read_whole():
    body = encode_notification(NOTE)
    assert decode_notification("peer", body) == NOTE
    for length in range(len(body)):
        with pytest.raises(RemoteProtocolError):
            decode_notification("peer", body[:length])
    with pytest.raises(RemoteProtocolError):
        decode_notification("peer", body + b"\x00")


# --- encoding ----------------------------------------------------------------------------------------------------------


def test_a_message_beyond_the_frame_limit_is_not_sent():
    spare = MAX_FRAME_BYTES - len(body_of(Finish(1, 0, {"a": b"x" * 70_000}))) + 70_000
    assert len(body_of(Finish(1, 0, {"a": b"x" * spare}))) == MAX_FRAME_BYTES
    with pytest.raises(ValueError, match="Finish of 1048577 bytes"):
        encode(Finish(1, 0, {"a": b"x" * (spare + 1)}))
    with pytest.raises(ValueError, match="Regions"):
        encode(Regions([(0, 1, 0)], 1, bytes(MAX_FRAME_BYTES)))


@pytest.mark.parametrize(
    ("text", "told"), [("", ""), ("é" * 3000, "é" * MAX_TEXT), ("a\udcffb", "a?b"), ("\ud800" * 3000, "?" * MAX_TEXT)]
)
def test_any_text_can_be_told(text: str, told: str):
    assert text_field(text) == told
    assert decode("peer", body_of(Bye(ErrorCode.CLOSED, "", text_field(text)))) == Bye(ErrorCode.CLOSED, "", told)


# --- regions -----------------------------------------------------------------------------------------------------------


def test_slots_are_counted_through_the_segments():
    regions = Regions([(1 << 20, 3, 0), (1 << 30, 1, 2), (1 << 24, 2, 0)], 4096, b"")
    assert regions.num_slots == 6
    places = [regions.place(slot) for slot in range(6)]
    assert places[:3] == [((1 << 20) + 4096 * n, 0) for n in range(3)]
    assert places[3:] == [(1 << 30, 2), (1 << 24, 0), ((1 << 24) + 4096, 0)]
    with pytest.raises(IndexError):
        regions.place(6)


@pytest.mark.parametrize(
    "segments",
    [
        [],
        [(0, 1, 0)] * (MAX_SEGMENTS + 1),
        [(-1, 1, 0)],
        [(1 << 62, 1, 0)],
        [(0, 0, 0)],
        [(0, MAX_SLOTS + 1, 0)],
        [(0, 1, -1)],
        [(0, 1)],
    ],
)
def test_segments_that_cannot_be_are_not_read(segments: list[tuple[int, ...]]):
    with pytest.raises(RemoteProtocolError):
        decode(
            "peer", msgspec.msgpack.encode({"type": "regions", "segments": segments, "slot_bytes": 1, "metadata": b""})
        )
