"""Pools of the engines as shaped arrays, the launches over them, and what a launch must do: plain loops, no strides.

Whatever a kernel computes from strides and offsets is looked up here by indices: a row is `pool.row(layer, kv, slot,
head)`, a slice of the array that has the engine's shape. The numbers of a `Chunk` are then read off NumPy's own views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rdma_kv.kernels.launch import Chunk

Bytes = npt.NDArray[np.uint8]
RowAt = Callable[[list[Bytes], int, int, int, int], Bytes]

GUARD = 64  # bytes before and behind each allocation that nobody may touch


class Memory(Protocol):
    """Where a kernel's bytes lie: the host's memory, or a GPU's."""

    def place(self, data: Bytes) -> int:
        """Copy `data` to memory that the kernels reach; the address of the copy, a multiple of 64."""
        ...

    def fetch(self, address: int) -> Bytes:
        """What now stands where `place` gave this address."""
        ...


class HostMemory:
    """Keeps what it placed until it is dropped itself."""

    def __init__(self) -> None:
        self._placed: dict[int, Bytes] = {}

    def place(self, data: Bytes) -> int:
        room = np.empty(data.size + 64, np.uint8)
        copy = room[-room.ctypes.data % 64 :][: data.size]
        copy[...] = data
        self._placed[copy.ctypes.data] = copy
        return copy.ctypes.data

    def fetch(self, address: int) -> Bytes:
        return self._placed[address]


@dataclass(frozen=True)
class Geometry:
    """What all layouts are told. `slots` are counted through the pages: slot = page * page_size + place in the page."""

    layers: int = 2
    kv: int = 2
    pages: int = 4
    page_size: int = 4
    heads: int = 4
    row_bytes: int = 32

    @property
    def slots(self) -> int:
        return self.pages * self.page_size


@dataclass(frozen=True)
class Layout:
    """How an engine shapes its pool: the shapes of the allocations, and where in them a row lies."""

    shapes: Callable[[Geometry], list[tuple[int, ...]]]
    row: Callable[[Geometry], RowAt]


def _nhd(g: Geometry) -> RowAt:
    return lambda b, layer, kv, slot, head: b[layer][kv, slot // g.page_size, slot % g.page_size, head]


def _hnd(g: Geometry) -> RowAt:
    return lambda b, layer, kv, slot, head: b[layer][kv, slot // g.page_size, head, slot % g.page_size]


def _mla(g: Geometry) -> RowAt:
    return lambda b, layer, _kv, slot, _head: b[layer][slot // g.page_size, slot % g.page_size]


def _lightllm(g: Geometry) -> RowAt:
    return lambda b, layer, kv, slot, head: b[0][layer, slot, kv * g.heads + head]


def _sglang(g: Geometry) -> RowAt:
    return lambda b, layer, kv, slot, head: b[kv * g.layers + layer][slot, head]


def _trtllm(g: Geometry) -> RowAt:
    return lambda b, layer, kv, slot, head: b[0][slot // g.page_size, layer, kv, head, slot % g.page_size]


LAYOUTS = {
    "nhd": Layout(lambda g: [(g.kv, g.pages, g.page_size, g.heads, g.row_bytes)] * g.layers, _nhd),
    "hnd": Layout(lambda g: [(g.kv, g.pages, g.heads, g.page_size, g.row_bytes)] * g.layers, _hnd),
    "mla": Layout(lambda g: [(g.pages, g.page_size, g.row_bytes)] * g.layers, _mla),
    "lightllm": Layout(lambda g: [(g.layers, g.slots, g.kv * g.heads, g.row_bytes)], _lightllm),
    "sglang": Layout(lambda g: [(g.slots, g.heads, g.row_bytes)] * (g.kv * g.layers), _sglang),
    "trtllm": Layout(lambda g: [(g.pages, g.layers, g.kv, g.heads, g.page_size, g.row_bytes)], _trtllm),
}


class Pool:
    """One rank's pool: random bytes (or all `fill`) here, and a copy of them in the kernels' memory.

    `skew` puts each allocation another few bytes off alignment.
    """

    def __init__(
        self,
        memory: Memory,
        layout: str,
        geometry: Geometry,
        rng: np.random.Generator,
        *,
        skew: int = 0,
        fill: int | None = None,
    ) -> None:
        self.geometry = geometry
        self._memory = memory
        self._row = LAYOUTS[layout].row(geometry)
        self._whole: list[Bytes] = []  # each allocation with its guards
        self._shaped: list[Bytes] = []
        self._placed: list[int] = []
        for i, shape in enumerate(LAYOUTS[layout].shapes(geometry)):
            begin, size = GUARD + skew * (i + 1), int(np.prod(shape))
            low, high = (0, 256) if fill is None else (fill, fill + 1)
            whole = rng.integers(low, high, begin + size + GUARD, np.uint8)
            self._whole.append(whole)
            self._shaped.append(whole[begin : begin + size].reshape(shape))
            self._placed.append(memory.place(whole))

    def row(self, layer: int, kv: int, slot: int, head: int) -> Bytes:
        return self._row(self._shaped, layer, kv, slot, head)

    def address(self, layer: int, kv: int, slot: int, head: int) -> int:
        """Where the kernels find that row."""
        here = self.row(layer, kv, slot, head).ctypes.data
        for whole, placed in zip(self._whole, self._placed, strict=True):
            if 0 <= here - whole.ctypes.data < whole.size:
                return placed + here - whole.ctypes.data
        raise LookupError((layer, kv, slot, head))

    def assert_as_here(self) -> None:
        """All bytes in the kernels' memory, the guards and gaps too, are those of the arrays here."""
        for whole, placed in zip(self._whole, self._placed, strict=True):
            np.testing.assert_array_equal(self._memory.fetch(placed), whole)


@dataclass(frozen=True)
class Box:
    """A chunk in words: layers x kv x tokens x heads. A token is (which of `pools`, slot)."""

    pools: Sequence[Pool]
    tokens: Sequence[tuple[int, int]]
    layers: range
    heads: range

    @property
    def size(self) -> int:
        geometry = self.pools[0].geometry
        return len(self.layers) * geometry.kv * len(self.tokens) * len(self.heads) * geometry.row_bytes

    def rows(self) -> list[Bytes]:
        """The rows in canonical order."""
        return [
            self.pools[pool].row(layer, kv, slot, head)
            for layer in self.layers
            for kv in range(self.pools[0].geometry.kv)
            for pool, slot in self.tokens
            for head in self.heads
        ]

    def chunk(self, packed_address: int) -> Chunk:
        geometry, first, head = self.pools[0].geometry, self.layers.start, self.heads.start
        planes = [(layer, kv) for layer in self.layers for kv in range(geometry.kv)]
        pointers = [[pool.address(layer, kv, 0, 0) for layer, kv in planes] for pool in self.pools]
        begin = self.pools[0].address(first, 0, 0, 0)
        offsets = [self.pools[0].address(first, 0, slot, head) - begin for _, slot in self.tokens]
        stride = self.pools[0].address(first, 0, 0, 1) - begin if geometry.heads > 1 else 0
        return Chunk(
            packed_address,
            np.array(pointers, np.int64),
            np.array([pool for pool, _ in self.tokens], np.int32),
            np.array(offsets, np.int64),
            len(self.heads),
            stride,
            geometry.row_bytes,
        )


def box(pools: Pool | Sequence[Pool], slots: Sequence[int], pool_of: Sequence[int] | None = None, **cut: range) -> Box:
    """All layers and heads unless `cut` says `layers=` or `heads=`; all tokens of pool 0 unless `pool_of` does."""
    pools = [pools] if isinstance(pools, Pool) else pools
    geometry = pools[0].geometry
    tokens = list(zip(pool_of if pool_of is not None else [0] * len(slots), slots, strict=True))
    return Box(pools, tokens, cut.get("layers", range(geometry.layers)), cut.get("heads", range(geometry.heads)))
