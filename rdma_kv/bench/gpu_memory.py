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

    def write(self, data: Bytes) -> None:
        """Replace the first bytes by `data`; they are there on return."""
        if self._host is not None:
            self._host.view[: data.size] = data
        else:
            import torch

            self.buffer[: data.size].copy_(torch.from_numpy(data))
            torch.cuda.synchronize(self.ordinal)

    def wipe(self) -> None:
        """All zero, on return."""
        if self._host is not None:
            self._host.view[:] = 0
        else:
            import torch

            self.buffer.zero_()
            torch.cuda.synchronize(self.ordinal)

    def read(self) -> Bytes:
        """All of it, uint8 `[length_bytes]`: a copy where it lies on a GPU."""
        if self._host is not None:
            return self._host.view
        copy: Bytes = self.buffer.cpu().numpy()
        return copy


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

    def taken(self, pool: Bytes, tokens: int, plane: int) -> Bytes:
        """Rows of the first tokens in one (layer, kv) of a pool's bytes, uint8 `[tokens, row_bytes]`."""
        pages, row = self.layout.num_pages, self.rows.row_bytes
        rows: Bytes = pool[plane * pages * row : (plane + 1) * pages * row].reshape(pages, row)[self.of(tokens)]
        return rows


def content(length_bytes: int, seed: int) -> Bytes:
    """What a prefill pool holds, the same in every process that asks."""
    words = np.random.default_rng(seed).integers(0, 1 << 64, -(-length_bytes // 8), dtype=np.uint64)
    return words.view(np.uint8)[:length_bytes]


def wrong_rows(rows: Rows, tokens: int, arrived: Bytes, sent: Bytes) -> int:
    """Rows of a request in a decode pool's bytes that are not those of the prefill pool's."""
    here, there = Pages(rows, Role.DECODE, arrived.size), Pages(rows, Role.PREFILL, sent.size)
    return sum(
        int((here.taken(arrived, tokens, plane) != there.taken(sent, tokens, plane)).any(axis=1).sum())
        for plane in range(2 * rows.layers)
    )
