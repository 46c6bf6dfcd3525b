"""Frames, notifications and metadata blobs that a peer could send: valid ones, and what a seeded spoiler makes of them.

`Spoiler` knows the structure: it makes every kind of control message with values from all over their range, and spoils the
MessagePack behind a valid frame (a field gone, doubled, of another type, out of range, too long, nested), the frame
(a wrong length, cut, joined) or just the bytes.
"""

from __future__ import annotations

import random
import struct
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from rdma_kv import messages
from rdma_kv.errors import ErrorCode
from rdma_kv.messages import FRAME_HEADER, MAX_FRAME_BYTES, MAX_TEXT

KINDS: tuple[type[msgspec.Struct], ...] = typing.get_args(messages.ControlMessage)
_EDGES = (-1, 0, 1, 2, 127, 128, 255, 65535, (1 << 31) - 1, 1 << 31, (1 << 62) - 1, 1 << 62, (1 << 64) - 1)


class Spoiler:
    """Makes frames from one seed; the same seed makes the same frames."""

    def __init__(self, seed: int, likely: Mapping[str, Sequence[Any]] | None = None) -> None:
        self.random = random.Random(seed)
        self._likely = dict(likely or {})  # by field: values that mean something to whoever reads the frame

    # --- valid ---------------------------------------------------------------------------------------------------------

    def message(self, kind: type[msgspec.Struct] | None = None) -> msgspec.Struct:
        """A message of some kind that passes the border, with values that nobody agreed on."""
        kind = kind or self.random.choice(KINDS)
        hints = typing.get_type_hints(kind, include_extras=True)
        return kind(**{name: self._field(name, hints[name]) for name in kind.__struct_fields__})

    def _field(self, name: str, hint: Any) -> Any:
        if name in self._likely and self.random.random() < 0.9:
            return self.random.choice(self._likely[name])
        return self._value(hint)

    def _value(self, hint: Any) -> Any:
        rnd = self.random
        bounds: dict[str, Any] = {}
        while typing.get_origin(hint) is typing.Annotated:
            hint, *metas = typing.get_args(hint)
            for meta in metas:
                for name in ("ge", "lt", "le", "min_length", "max_length"):
                    if getattr(meta, name, None) is not None:
                        bounds[name] = getattr(meta, name)
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in {typing.Union, types.UnionType}:
            return self._value(rnd.choice(arguments))
        if hint is bool:
            return rnd.random() < 0.5
        if hint is ErrorCode:
            return rnd.choice(list(ErrorCode))
        if hint is int:
            low = bounds.get("ge", 0)
            high = bounds["lt"] - 1 if "lt" in bounds else bounds.get("le", (1 << 62) - 1)
            return rnd.choice([low, min(high, low + rnd.randrange(8)), rnd.randint(low, high), high])
        if hint is str:
            least, most = bounds.get("min_length", 0), min(bounds.get("max_length", 64), MAX_TEXT)
            length = rnd.choice([least, rnd.randint(least, min(most, 40))])
            return "".join(rnd.choice("kabc\u00e9\u4e2d\x00/") for _ in range(length))
        if hint is bytes:
            least, most = bounds.get("min_length", 0), min(bounds.get("max_length", 64), 64)
            return rnd.randbytes(rnd.randint(least, max(least, most)))
        if origin is list:
            least, most = bounds.get("min_length", 0), min(bounds.get("max_length", 4), 4)
            return [self._value(arguments[0]) for _ in range(rnd.randint(least, max(least, most)))]
        if origin is tuple:
            return tuple(self._value(argument) for argument in arguments)
        if origin is dict:
            return {self._value(str): rnd.choice([None, 1, "x", [1, 2], {"a": b"b"}]) for _ in range(rnd.randrange(3))}
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            return self.message(hint)
        if hint is type(None):
            return None
        return rnd.choice([None, 0, "", b"", [], {}])

    # --- spoilt --------------------------------------------------------------------------------------------------------

    def body(self) -> bytes:
        """The body of one frame: valid (one in four), spoilt in its structure, or random bytes."""
        rnd = self.random
        way = rnd.randrange(8)
        if way == 0:
            return rnd.randbytes(rnd.choice([0, 1, 3, 17, 200]))
        valid = msgspec.msgpack.encode(self.message())
        if way in {1, 2}:
            return valid
        if way == 3:
            return self.bytes_of(valid)
        value = msgspec.msgpack.decode(valid)
        for _ in range(rnd.choice([1, 1, 2])):
            value = self._spoil(value)
        return msgspec.msgpack.encode(value)

    def bytes_of(self, data: bytes) -> bytes:
        """`data` with bytes flipped, cut off, put in or doubled."""
        rnd = self.random
        spoilt = bytearray(data)
        for _ in range(rnd.choice([1, 1, 2, 5])):
            place = rnd.randrange(len(spoilt) + 1)
            match rnd.randrange(4):
                case 0 if place < len(spoilt):
                    spoilt[place] ^= 1 << rnd.randrange(8)
                case 1:
                    del spoilt[place:]
                case 2:
                    spoilt[place:place] = rnd.randbytes(rnd.randint(1, 9))
                case _:
                    spoilt += spoilt[place:]
        return bytes(spoilt[:4096])

    def frame(self) -> bytes:
        """What goes over the stream: mostly a right header and a body as above, sometimes a lie about the length."""
        rnd, body = self.random, self.body()
        match rnd.randrange(12):
            case 0:
                return FRAME_HEADER.pack(rnd.choice([0, 1, MAX_FRAME_BYTES + 1, 0xFFFFFFFF])) + body
            case 1:
                return (FRAME_HEADER.pack(len(body)) + body)[: rnd.randrange(len(body) + 4)]
            case _:
                return FRAME_HEADER.pack(len(body)) + body

    def _spoil(self, value: Any) -> Any:
        """One change somewhere in a decoded message."""
        rnd = self.random
        if isinstance(value, dict) and value:
            name = rnd.choice(list(value))
            match rnd.randrange(5):
                case 0:
                    return {key: each for key, each in value.items() if key != name}
                case 1:
                    return {**value, rnd.choice(["x", "transfer", "type", 7]): self._other()}
                case _:
                    return {**value, name: self._spoil(value[name])}
        if isinstance(value, list) and value and rnd.random() < 0.7:
            place = rnd.randrange(len(value))
            if rnd.random() < 0.2:
                return value * rnd.choice([2, 50])
            return [self._spoil(each) if index == place else each for index, each in enumerate(value)]
        if isinstance(value, int) and not isinstance(value, bool) and rnd.random() < 0.6:
            return rnd.choice(_EDGES)
        if isinstance(value, str) and rnd.random() < 0.5:
            return value + rnd.choice(["x", "\x00", "k" * 5000])
        return self._other()

    def _other(self) -> Any:
        rnd = self.random
        nested: Any = 1
        for _ in range(rnd.choice([3, 60])):
            nested = [nested]
        return rnd.choice([None, True, 1.5, float("nan"), -1, 1 << 63, "", "x" * 600, b"\xff" * 40, [], {}, nested])


def blobs(valid: bytes, spoiler: Spoiler, count: int) -> list[bytes]:
    """Spoilt metadata: none of them equals `valid`."""
    made = [b"", valid[:-1], valid + b"\x00", valid[:4], struct.pack("<4sHHII", b"RKVM", 1, 4, 1 << 31, 0)]
    while len(made) < count:
        made.append(spoiler.bytes_of(valid))
    return [blob for blob in made[:count] if blob != valid]
