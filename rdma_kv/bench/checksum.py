"""What the checksum of packed chunks costs beside their gather and beside memcpy. NumPy only, one process, one thread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rdma_kv.bench.cases import Bytes, Case
from rdma_kv.bench.goals import Bound, Meter, Relation, figure
from rdma_kv.bench.rows import Row
from rdma_kv.config import StagingConfig
from rdma_kv.errors import ConfigError, RdmaKvError
from rdma_kv.kernels.checksum import ALGORITHM, Piece, checksum, checksums
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.reference import gather

MEMCPY, GATHER, CHECKSUM, BOTH = "memcpy", "gather", "checksum", "gather and checksum"
CONTESTANTS = (MEMCPY, GATHER, CHECKSUM, BOTH)
FLIPS = 64
"""Flipped bits that the measured checksum must notice; the goal of the row that says how many it did."""

_SLOT_BYTES = StagingConfig().slot_bytes
_SLOTS = StagingConfig().slots
_ROW_BYTES = (256, 4 << 10, 64 << 10)  # a head of a token; a page of one head, or a token of all; a page of all heads


@dataclass(frozen=True, slots=True)
class ChecksumOptions:
    """What `rdma-kv bench checksum` was asked for.

    Attributes:
        repetitions: rounds that count, after one that checks the sums and does not.
    """

    repetitions: int = 7

    def __post_init__(self) -> None:
        if self.repetitions < 1:
            raise ConfigError("--repetitions", f"{self.repetitions} is not positive")


class _Work(NamedTuple):
    """One case: a default staging pool of chunks, whose rows lie scattered over as much paged memory.

    Attributes:
        paged: uint8 `[slots * slot bytes]`, as `packed`.
        chunks: one a slot.
        pieces: what each chunk fills.
    """

    case: Case
    paged: Bytes
    packed: Bytes
    chunks: list[Chunk]
    pieces: list[Piece]

    def memcpy(self) -> None:
        for begin in range(0, self.packed.size, _SLOT_BYTES):
            np.copyto(self.packed[begin : begin + _SLOT_BYTES], self.paged[begin : begin + _SLOT_BYTES])

    def gather(self) -> None:
        for chunk in self.chunks:
            gather([chunk])

    def checksum(self) -> None:
        for piece in self.pieces:
            checksums([piece])

    def gather_and_checksum(self) -> None:
        """As a sender would: each slot is summed right behind its gather."""
        for chunk, piece in zip(self.chunks, self.pieces, strict=True):
            gather([chunk])
            checksums([piece])

    def contestants(self) -> dict[str, Callable[[], None]]:
        return dict(zip(CONTESTANTS, (self.memcpy, self.gather, self.checksum, self.gather_and_checksum), strict=True))


def measure_checksum(options: ChecksumOptions, meter: Meter) -> list[Row]:
    """Run it all: three row lengths, and each contestant in turn in every round.

    Raises:
        RdmaKvError: packed chunks have another checksum than their bytes have in another place.
    """
    works = _works()
    for work in works:
        _check(work)
    took_s: dict[tuple[str, str], list[float]] = {}
    total, done = (options.repetitions + 1) * len(works) * len(CONTESTANTS), 0
    for number in range(options.repetitions + 1):
        for work in works:
            for name, call in work.contestants().items():
                meter(f"round {number} of {options.repetitions}: {work.case.name}, {name}", done, total)
                begin = time.perf_counter()
                call()
                if number:
                    took_s.setdefault((work.case.name, name), []).append(time.perf_counter() - begin)
                done += 1
    meter("done", total, total)
    names = [work.case.name for work in works]
    return [
        _noticed(works[0]),
        *(row for name in names for row in _ratios(name, took_s)),
        *(row for name in names for row in _rates(name, took_s)),
        Row("algorithm", ALGORITHM, ""),
    ]


def _works() -> list[_Work]:
    size = _SLOTS * _SLOT_BYTES
    paged = np.frombuffer(np.random.default_rng(0).bytes(size), np.uint8)
    packed = np.ones(size, np.uint8)  # touched, so that no page fault is measured
    works = []
    for row_bytes in _ROW_BYTES:
        case = Case(size // row_bytes, row_bytes)
        chunks = case.chunks(packed.ctypes.data, paged.ctypes.data, case.src_offsets())
        pieces = [Piece(chunk.packed_address, chunk.packed_bytes) for chunk in chunks]
        works.append(_Work(case, paged, packed, chunks, pieces))
    return works


def _check(work: _Work) -> None:
    """Every slot has the checksum of its rows as indexing puts them together; also touches all that is measured."""
    work.gather()
    rows = work.case.rows(work.paged)[work.case.src_offsets() // work.case.piece_bytes].reshape(-1)
    begins = np.cumsum([0, *(piece.length_bytes for piece in work.pieces)])
    expected = [checksum(rows[begin:end]) for begin, end in pairwise(begins)]
    if not work.pieces or checksums(work.pieces) != expected:
        raise RdmaKvError(f"{work.case.name}: the checksum of a packed slot is not that of its rows")


def _noticed(work: _Work) -> Row:
    """Flip one bit at a time, in all slots, and count the sums that change."""
    rng, noticed = np.random.default_rng(1), 0
    for flip in range(FLIPS):
        piece = work.pieces[flip % len(work.pieces)]
        at = piece.address - work.packed.ctypes.data + int(rng.integers(piece.length_bytes))
        before = checksums([piece])
        work.packed[at] ^= 1 << int(rng.integers(8))
        noticed += checksums([piece]) != before
    return Bound(f"flipped bits noticed, of {FLIPS} >= {FLIPS}", noticed, "", FLIPS, Relation.AT_LEAST)


def _ratios(name: str, took_s: dict[tuple[str, str], list[float]]) -> list[Row]:
    """Times, so a larger ratio is a dearer checksum."""
    median_s = {contestant: statistics.median(took_s[name, contestant]) for contestant in CONTESTANTS}
    pairs = ((BOTH, GATHER), (CHECKSUM, GATHER), (CHECKSUM, MEMCPY))
    return [Row(f"{name}: time of {one} to {other}", median_s[one] / median_s[other], "ratio") for one, other in pairs]


def _rates(name: str, took_s: dict[tuple[str, str], list[float]]) -> list[Row]:
    num_bytes = _SLOTS * _SLOT_BYTES
    rows: list[Row] = []
    for contestant in CONTESTANTS:
        rows += figure(f"{name}: {contestant}", [num_bytes / s / 1e9 for s in took_s[name, contestant]], "GB/s")
    return rows
