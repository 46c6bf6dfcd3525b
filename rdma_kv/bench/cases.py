"""Sizes that `rdma-kv bench transport` moves, and where their pieces lie."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rdma_kv.errors import ConfigError
from rdma_kv.kernels.launch import Chunk

DEFAULT_SIZES = "8,64K,1M,16M,256M,1024x64K,65536x4K"
_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20}
_SIZE = re.compile(r"(?:(\d+)x)?(\d+)([KM]?)")
_MOST_BYTES = 1 << 30
_SLOT_BYTES = 4 << 20  # as staging slots have by default
_SRC_ORDER, _DST_ORDER = 1, 2  # seeds

Int64Array = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Case:
    """One thing to move: a piece, or many that lie scattered.

    Attributes:
        unpack: the target's scatter, and its word that it is done, are part of it.
    """

    pieces: int
    piece_bytes: int
    unpack: bool = False

    @property
    def total_bytes(self) -> int:
        return self.pieces * self.piece_bytes

    @property
    def scattered(self) -> bool:
        return self.pieces > 1

    @property
    def name(self) -> str:
        count = f"{self.pieces:,} x " if self.scattered else ""
        return count + _size_name(self.piece_bytes)

    @property
    def wire(self) -> tuple[int, int, bool]:
        """As `Worker.ask` can carry it."""
        return self.pieces, self.piece_bytes, self.unpack

    @property
    def repetitions(self) -> int:
        """Operations of one turn: the median of them is one sample."""
        return max(1, min(100, (64 << 20) // self.total_bytes))

    @property
    def parts(self) -> list[slice]:
        """The pieces of each staging slot, in order: a transport of ours gathers and writes them one after the other."""
        step = max(1, _SLOT_BYTES // self.piece_bytes) if self.scattered else 1
        return [slice(first, min(first + step, self.pieces)) for first in range(0, self.pieces, step)]

    def src_offsets(self) -> Int64Array:
        """Where piece i lies at the source, int64 `[pieces]`, bytes: all pieces back to back, in disorder."""
        return self._offsets(_SRC_ORDER)

    def dst_offsets(self) -> Int64Array:
        """Where piece i belongs at the target; as `src_offsets`, in another order."""
        return self._offsets(_DST_ORDER)

    def chunks(self, packed_address: int, paged_address: int, offsets: Int64Array) -> list[Chunk]:
        """What a gather or scatter launch gets, for each of the `parts`."""
        return [
            Chunk(
                packed_address=packed_address + part.start * self.piece_bytes,
                pointers=np.array([[paged_address]], dtype=np.int64),
                token_pool=np.zeros(part.stop - part.start, dtype=np.int32),
                token_offset=offsets[part],
                heads=1,
                head_stride=self.piece_bytes,
                row_bytes=self.piece_bytes,
            )
            for part in self.parts
        ]

    def rows(self, memory: Bytes) -> Bytes:
        """The first bytes of `memory` as uint8 `[pieces, piece_bytes]`."""
        return memory[: self.total_bytes].reshape(self.pieces, self.piece_bytes)

    def _offsets(self, seed: int) -> Int64Array:
        order = np.random.default_rng(seed).permutation(self.pieces) if self.scattered else np.zeros(1)
        return order.astype(np.int64) * self.piece_bytes


def parse_sizes(text: str) -> list[Case]:
    """Cases of a list as in `DEFAULT_SIZES`; a scattered one comes a second time, with the target's scatter.

    Raises:
        ConfigError: a size cannot be read, is 0, beyond 1 GiB, or there twice.
    """
    cases: list[Case] = []
    for part in text.split(","):
        found = _SIZE.fullmatch(part.strip())
        case = Case(int(found[1] or 1), int(found[2]) * _FACTORS[found[3]]) if found else Case(0, 0)
        if not 0 < case.total_bytes <= _MOST_BYTES:
            raise ConfigError("--sizes", f"{part!r} is no size up to 1 GiB such as 8, 64K, 16M or 1024x64K")
        if case in cases:
            raise ConfigError("--sizes", f"{part!r} is there twice")
        cases.append(case)
        if case.scattered:
            cases.append(Case(case.pieces, case.piece_bytes, unpack=True))
    return cases


def _size_name(num_bytes: int) -> str:
    for factor, unit in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes % factor == 0:
            return f"{num_bytes // factor:,} {unit}"
    return f"{num_bytes:,} B"
