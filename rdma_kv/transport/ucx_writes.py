"""The WRITEs of one link to its peer over UCX as data: their stages, their pieces, and the tables they look things up in."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from rdma_kv.errors import TransportError
from rdma_kv.transport.base import WritePair
from rdma_kv.transport.regions import Piece, RegionTable
from rdma_kv.transport.ucx_binding import Handle

V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast the WRITEs of a lane are posted.

    Attributes:
        piece_bytes: one put.
        window_bytes: put and not over, at most, but for a piece alone; what a later WRITE waits behind, and a fence purges.
        copies: the CPU moves the bytes, within our turns on the loop: 4 MiB at most in one.
    """

    piece_bytes: int
    window_bytes: int = 16 << 20
    copies: bool = True


PACES: Final = {
    "tcp": Pace(1 << 20),  # 0.5 ms; smaller pieces wake the target more often and cost a third of the speed
    "cma": Pace(1 << 20),  # 0.1 to 0.3 ms
    "shm": Pace(1 << 20),
    "rdma": Pace(4 << 20, copies=False),
    "cuda_ipc": Pace(1 << 30, 1 << 30, copies=False),  # it goes on by itself while the loop is busy
}

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


class Write:
    """One WRITE in progress.

    Attributes:
        unchecked: pairs that were not looked at yet; None when all are fit to be put.
        next: the piece that is put next; None before the first and behind the last.
        posted: whether a byte or the notification may have left.
        over: whether it was settled.
    """

    __slots__ = ("body", "next", "over", "pace", "pairs", "pieces", "posted", "settle", "unchecked")

    def __init__(self, pairs: Sequence[WritePair], notification: bytes, settle: Settle, pace: Pace) -> None:
        self.pairs = pairs
        self.unchecked: Iterator[WritePair] | None = iter(pairs)
        self.pace = pace
        self.pieces = _pieces(pairs, pace.piece_bytes)
        self.next: Piece | None = None
        self.body = notification
        self.settle = settle
        self.posted = False
        self.over = False


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
