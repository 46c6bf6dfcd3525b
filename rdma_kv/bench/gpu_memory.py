"""KV memory of one measured process, on a GPU or the host, and the scattered pages in it.

A page is one token of one layer: a row of K and one of V, each alone. Pools are twice as large as what is moved, and their
pages are taken in an order of each side's own, so no two rows of a request lie side by side but by chance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from rdma_kv.errors import RdmaKvError
from rdma_kv.kernels.launch import Chunk
from rdma_kv.layout import KvLayout
from rdma_kv.memory import HostMemory
from rdma_kv.planner import token_offsets
from rdma_kv.topology import ModelSpec
from rdma_kv.types import Role

Bytes = npt.NDArray[np.uint8]
Int64Array = npt.NDArray[np.int64]
Kv = Any
"""uint8 `[bytes]`: a NumPy array of the host's memory, or a tensor of a GPU's."""

_FACTORS = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)  # odd, and large: neighbours differ in all bytes

LAYERS = 64
SPREAD = 2
"""Times the bytes of a request that a pool has."""


class KvMemory:
    """Bytes of this process.

    Attributes:
        ordinal: CUDA ordinal, None on the host.
        device: as transports count: 0 on the host, else ordinal + 1.
        buffer: what a pool is registered with.
        address: first byte.
    """

    def __init__(self, length_bytes: int, ordinal: int | None) -> None:
        self.length_bytes = length_bytes
        self.ordinal = ordinal
        self.device = 0 if ordinal is None else ordinal + 1
        self._host = HostMemory(length_bytes) if ordinal is None else None
        if self._host is not None:
            self.buffer: Any = self._host.view
            self.address = self._host.address
        else:
            import torch

            self.buffer = torch.empty(length_bytes, dtype=torch.uint8, device=f"cuda:{ordinal}")
            self.address = int(self.buffer.data_ptr())

    def write(self, data: Kv) -> None:
        """Replace all bytes by `data`, which lies on the same device; they are there on return."""
        if self._host is not None:
            self._host.view[:] = data
        else:
            import torch

            self.buffer.copy_(data)
            torch.cuda.synchronize(self.ordinal)

    def wipe(self) -> None:
        """All zero, on return."""
        if self._host is not None:
            self._host.view[:] = 0
        else:
            import torch

            self.buffer.zero_()
            torch.cuda.synchronize(self.ordinal)

    def read(self) -> Kv:
        """All of it, uint8 `[length_bytes]`, where it lies."""
        return self.buffer if self._host is None else self._host.view


@dataclass(frozen=True, slots=True)
class Rows:
    """Shape of the KV of one rank: K and V of one head, a page a token."""

    row_bytes: int
    layers: int = LAYERS

    @property
    def token_bytes(self) -> int:
        return 2 * self.layers * self.row_bytes

    @property
    def model(self) -> ModelSpec:
        return ModelSpec.gqa(layers=self.layers, kv_heads=1, head_dim=self.row_bytes, itemsize=1, dtype="uint8")

    def tokens(self, num_bytes: int) -> int:
        """How many tokens have so many bytes; the last one that does not fit is left out.

        Raises:
            RdmaKvError: not one does.
        """
        if num_bytes < self.token_bytes:
            raise RdmaKvError(f"{num_bytes} bytes are less than a token of {self.token_bytes}")
        return num_bytes // self.token_bytes

    def layout(self, pool_bytes: int) -> KvLayout:
        return KvLayout.nhd(
            layers=self.layers, pages=pool_bytes // self.token_bytes, page_size=1, heads=1, row_bytes=self.row_bytes
        )


class Pages:
    """The scattered pages of one pool."""

    def __init__(self, rows: Rows, role: Role, pool_bytes: int) -> None:
        self.rows = rows
        self.layout = rows.layout(pool_bytes)
        order = np.random.default_rng(1 + (role is Role.DECODE)).permutation(self.layout.num_pages)
        self._order: Int64Array = order.astype(np.int64)

    def of(self, tokens: int) -> Int64Array:
        """Page of each of the first `tokens` tokens of a request, int64 `[tokens]`."""
        return self._order[:tokens]

    def chunks(self, memory: KvMemory, tokens: int, packed_address: int, slot_bytes: int) -> list[Chunk]:
        """All layers of the first tokens, as many a chunk as `slot_bytes` hold, packed one behind the other."""
        step = self.rows.tokens(slot_bytes)
        pointers = self.layout.pointers(np.array([memory.address], dtype=np.int64)).reshape(1, -1)
        whole = Chunk(
            packed_address=packed_address,
            pointers=pointers,
            token_pool=np.zeros(tokens, dtype=np.int32),
            token_offset=token_offsets(self.layout, self.of(tokens), np.arange(tokens, dtype=np.int64), 0),
            heads=1,
            head_stride=self.layout.head_stride,
            row_bytes=self.rows.row_bytes,
        )
        return [
            replace(
                whole,
                packed_address=packed_address + first * self.rows.token_bytes,
                token_pool=whole.token_pool[first : first + step],
                token_offset=whole.token_offset[first : first + step],
            )
            for first in range(0, tokens, step)
        ]

    def taken(self, pool: Kv, pages: Any, plane: int) -> Kv:  # noqa: ANN401
        """Rows of some pages in one (layer, kv) of a pool's bytes, uint8 `[pages, row_bytes]`."""
        count, row = self.layout.num_pages, self.rows.row_bytes
        return pool[plane * count * row : (plane + 1) * count * row].reshape(count, row)[pages]


def content(length_bytes: int, seed: int, ordinal: int | None = None) -> Kv:
    """What a prefill pool holds, the same in every process that asks for such memory: of a GPU, or of the host (None)."""
    words = -(-length_bytes // 8)
    if ordinal is None:
        made = np.random.default_rng(seed).integers(0, 1 << 64, words, dtype=np.uint64)
        return made.view(np.uint8)[:length_bytes]
    import torch

    mixed = torch.arange(words, dtype=torch.int64, device=f"cuda:{ordinal}")
    for factor in _FACTORS:
        mixed.mul_(factor).add_(seed)
        mixed.bitwise_xor_(mixed >> 29)
    torch.cuda.empty_cache()  # what is staged is not torch's to give
    return mixed.view(torch.uint8)[:length_bytes]


def indices(places: Int64Array, pool: Kv) -> Any:  # noqa: ANN401
    """Places in a form by which `pool`, an array or a tensor, can be indexed where it lies."""
    if isinstance(pool, np.ndarray):
        return places
    import torch

    return torch.from_numpy(places).to(pool.device)


def wrong_rows(rows: Rows, tokens: int, arrived: Kv, sent: Kv) -> int:
    """Rows of a request in a decode pool's bytes that are not those of the prefill pool's. Both lie on one device."""
    here, there = Pages(rows, Role.DECODE, len(arrived)), Pages(rows, Role.PREFILL, len(sent))
    taken, expected = (indices(side.of(tokens), arrived) for side in (here, there))
    return sum(
        int((here.taken(arrived, taken, plane) != there.taken(sent, expected, plane)).any(1).sum())
        for plane in range(2 * rows.layers)
    )
