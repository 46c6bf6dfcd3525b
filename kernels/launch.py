"""What one gather or scatter launch is: arrays that a NumPy loop and a Triton grid read alike.

A launch packs (or unpacks) any number of *chunks*, of one or of several transfers, ranks and replicas. In the packed
form a chunk is contiguous in the canonical order `[layer][kv][token][head][row]`; in the paged form each row lies at

    pointers[pool of the token][layer, kv] + token_offset[token] + head * head_stride

`pointers` is the pointer table: one line per (replica, rank) pool, with the base address of each (layer, kv). A token
names its pool by `token_pool`, so the same slot number in two replicas stays two places. `token_offset` is bytes from
such a base to the token's first wanted head: page * page_stride + in-page position * token_stride + first head *
head_stride; the planner computes it (all byte arithmetic lives there), kernels only execute it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One packed piece: a box of a move.

    Attributes:
        packed_address: first byte of the contiguous form (in a staging slot).
        pointers: int64 `[pools, layers * kv]`, base address of each (layer, kv) of the box, one line per pool.
        token_pool: int32 `[tokens]`, line of `pointers` for each token (the per-token replica index).
        token_offset: int64 `[tokens]`, bytes from the base to the token's first wanted head.
        heads: wanted heads, consecutive in the paged form at `head_stride` bytes.
        row_bytes: contiguous bytes of one head of one token.
    """

    packed_address: int
    pointers: Int64Array
    token_pool: Int32Array
    token_offset: Int64Array
    heads: int
    head_stride: int
    row_bytes: int

    @property
    def tokens(self) -> int:
        return int(self.token_offset.shape[0])

    @property
    def planes(self) -> int:
        """layers * kv of the box."""
        return int(self.pointers.shape[1])

    @property
    def packed_bytes(self) -> int:
        return self.planes * self.tokens * self.heads * self.row_bytes
