"""The WRITEs of one link to its peer over UCX as data: their stages, their pieces, and the tables they look things up in."""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Generic, TypeVar

from rdma_kv.errors import TransportError
from rdma_kv.transport.base import WritePair
from rdma_kv.transport.regions import Piece, RegionTable
from rdma_kv.transport.ucx_binding import DONE, Handle, Request, Settled

V = TypeVar("V")

PIECE_BYTES: Final = {
    "tcp": 256 << 10,
    "cma": 1 << 20,
    "shm": 1 << 20,
    "rdma": 4 << 20,
}  # one put: 0.1 to 0.3 ms where the CPU copies

Settle = Callable[[TransportError | None], None]


class Keys(Generic[V]):
    """Disjoint address ranges and what belongs to each."""

    def __init__(self, ranges: Iterable[tuple[int, V]] = ()) -> None:
        ordered = sorted(ranges, key=lambda one: one[0])
        self._starts = [start for start, _ in ordered]
        self._values = [value for _, value in ordered]

    def at(self, address: int) -> V:
        """What belongs to the range around `address`, which is known to lie in one."""
        return self._values[bisect_right(self._starts, address) - 1]

    def __iter__(self) -> Iterator[V]:
        return iter(self._values)


class Stage(enum.Enum):
    CHECKING = enum.auto()
    PUTTING = enum.auto()
    FLUSHING = enum.auto()
    NOTIFYING = enum.auto()
    OVER = enum.auto()


class Write:
    """One WRITE in progress."""

    def __init__(self, pairs: Sequence[WritePair], notification: bytes, settle: Settle, piece_bytes: int) -> None:
        self.pairs = pairs
        self.unchecked = iter(pairs)
        self.pieces = _pieces(pairs, piece_bytes)
        self.next: Piece | None = None
        self.body = notification
        self.settle = settle
        self.stage = Stage.CHECKING
        self.posted = False
        self.puts: deque[tuple[Request, int]] = deque()  # with their bytes
        self.last: Request | Settled = DONE  # the flush, then the message


class Memory:
    """What the links of one transport share: registered memory. `keys` holds what `Ucx.put` needs of each region."""

    def __init__(self) -> None:
        self.table = RegionTable()
        self.keys: Keys[Handle] = Keys()


def _pieces(pairs: Iterable[WritePair], piece_bytes: int) -> Iterator[Piece]:
    """Cut pairs into pieces that one turn can post."""
    for pair in pairs:
        for offset in range(0, pair.local.length_bytes, piece_bytes):
            length_bytes = min(piece_bytes, pair.local.length_bytes - offset)
            yield pair.local.address + offset, pair.remote.address + offset, length_bytes
