"""Whether the network under a running sidecar is still the one that it began with.

UCX looks at the interfaces once, when a transport starts, and dies of one that was taken away: after a container was taken
off its network and put back, the next peer that connects makes this process end with a segmentation fault. No transport can
be told of it either. So the sidecar watches its addresses, and ends itself, with an exit status of its own, when one of them
is gone; whoever supervises it starts it anew, on the network that is there then.

An address that comes in addition is no reason: nothing runs over it. Unless there was none at the beginning: then nothing
can run until a transport finds the new one.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Final

Addresses = frozenset[tuple[int, bytes]]
"""(interface index, address in network order). An interface that comes back has another index, whatever its name."""

_HEADER: Final = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_ADDRESS: Final = struct.Struct("=BBBBI")  # ifaddrmsg: family, prefix length, flags, scope, interface index
_ATTRIBUTE: Final = struct.Struct("=HH")  # rtattr: length, type
_DONE, _ERROR, _NEW_ADDRESS, _GET_ADDRESS = 3, 2, 20, 22
_DUMP: Final = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_INTERRUPTED: Final = 0x10  # NLM_F_DUMP_INTR
_DUMPS: Final = 5  # at most, while addresses go on changing
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_GLOBAL: Final = 0  # scope; loopback and link-local addresses have others
_GROUPS: Final = 0x1 | 0x10 | 0x100  # links, IPv4 addresses, IPv6 addresses
_READ_BYTES: Final = 1 << 16


def has_changed(before: Addresses, now: Addresses) -> bool:
    """Whether a process that began with `before` must begin again."""
    return bool(before - now) or (not before and bool(now))


def addresses(environ: Mapping[str, str] = os.environ) -> Addresses:
    """What this process's network namespace has now: global addresses, IPv4 and IPv6.

    Where `UCX_NET_DEVICES` names interfaces, only theirs: on a host's network others come and go.

    Raises:
        OSError: the kernel does not say.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE) as sock:
        sock.bind((0, 0))
        body = _ADDRESS.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
        for _ in range(_DUMPS):
            sock.send(_HEADER.pack(_HEADER.size + len(body), _GET_ADDRESS, _DUMP, 1, 0) + body)
            found: set[tuple[int, bytes]] = set()
            parts = [sock.recv(_READ_BYTES)]
            while not _read_dump(parts[-1], found):
                parts.append(sock.recv(_READ_BYTES))
            if not any(map(_is_interrupted, parts)):
                break
    named = {name.partition(":")[0] for name in environ.get("UCX_NET_DEVICES", "").split(",")}
    chosen = {index for index, name in socket.if_nameindex() if name in named}
    return frozenset(each for each in found if not chosen or each[0] in chosen)


def _is_interrupted(part: bytes) -> bool:
    """Whether addresses have changed while the kernel told them: some that are there may be missing."""
    position, flags = 0, 0
    while position + _HEADER.size <= len(part):
        length, _, some, *_ = _HEADER.unpack_from(part, position)
        flags |= some
        position += _aligned(max(length, _HEADER.size))
    return bool(flags & _INTERRUPTED)


def _read_dump(part: bytes, found: set[tuple[int, bytes]]) -> bool:
    """Take the addresses out of a part of the kernel's answer; whether it was the last."""
    position = 0
    while position + _HEADER.size <= len(part):
        length, kind, *_ = _HEADER.unpack_from(part, position)
        if kind == _DONE:
            return True
        if kind == _ERROR or length < _HEADER.size:
            raise OSError("the kernel does not tell its addresses")
        if kind == _NEW_ADDRESS:
            _read_address(part[position + _HEADER.size : position + length], found)
        position += _aligned(length)
    return False


def _read_address(body: bytes, found: set[tuple[int, bytes]]) -> None:
    _, _, _, scope, index = _ADDRESS.unpack_from(body)
    attributes: dict[int, bytes] = {}
    position = _ADDRESS.size
    while position + _ATTRIBUTE.size <= len(body):
        length, kind = _ATTRIBUTE.unpack_from(body, position)
        if length < _ATTRIBUTE.size:
            break
        attributes[kind] = body[position + _ATTRIBUTE.size : position + length]
        position += _aligned(length)
    address = attributes.get(_IFA_LOCAL, attributes.get(_IFA_ADDRESS))
    if scope == _GLOBAL and address is not None:
        found.add((index, address))


def _aligned(length: int) -> int:
    return (length + 3) & ~3


class Watch:
    """Tells once when the addresses are no longer those of the beginning. The kernel wakes it up; idle it costs nothing.

    Args:
        on_change: called on the event loop that `start` ran on.
    """

    def __init__(self, on_change: Callable[[], None]) -> None:
        self._on_change = on_change
        self._sock: socket.socket | None = None
        self._before: Addresses = frozenset()

    def start(self) -> None:
        """Begin to watch. Call it before any transport starts.

        Raises:
            OSError: the kernel does not say.
        """
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
        self._sock = socket.socket(socket.AF_NETLINK, kind, socket.NETLINK_ROUTE)
        self._sock.bind((0, _GROUPS))  # first: a change after the look below is told
        self._before = addresses()
        asyncio.get_running_loop().add_reader(self._sock, self._read)

    def _read(self) -> None:
        assert self._sock is not None
        try:
            while self._sock.recv(_READ_BYTES):
                pass
        except BlockingIOError:
            pass
        except OSError:  # more was told than fits: the look below finds it all the same
            pass
        if has_changed(self._before, addresses()):
            self.close()
            self._on_change()

    def close(self) -> None:
        """Watch no more. Idempotent."""
        if self._sock is not None:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()
            self._sock = None
