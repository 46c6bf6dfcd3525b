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

from rdma_kv.errors import ConfigError

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Chunk:
    """One packed piece: a box of a move.

    The caller owns all memory named here, and keeps it mapped and unchanged in shape until the kernel returns.

    Attributes:
        packed_address: first byte of the contiguous form (in a staging slot).
        pointers: int64 `[pools, layers * kv]`, base address of each (layer, kv) of the box, one line per pool. Lines that
            no token names must hold addresses as well.
        token_pool: int32 `[tokens]`, line of `pointers` for each token (the per-token replica index).
        token_offset: int64 `[tokens]`, bytes from the base to the token's first wanted head.
        heads: wanted heads, consecutive in the paged form at `head_stride` bytes.
        head_stride: bytes from one wanted head to the next; not read where `heads` is 1.
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
        """Tokens of the box; 0 is a chunk that moves nothing."""
        return int(self.token_offset.shape[0])

    @property
    def planes(self) -> int:
        """layers * kv of the box."""
        return int(self.pointers.shape[1])

    @property
    def packed_bytes(self) -> int:
        """Extent of the packed form."""
        return self.planes * self.tokens * self.heads * self.row_bytes

    def validate(self) -> None:
        """Check shapes, dtypes and ranges; what lies behind the addresses is the planner's word.

        Raises:
            ConfigError: names the field that cannot work.
        """
        _check_array("pointers", self.pointers, np.int64, 2)
        _check_array("token_pool", self.token_pool, np.int32, 1)
        _check_array("token_offset", self.token_offset, np.int64, 1)
        if self.token_pool.shape != self.token_offset.shape:
            raise ConfigError("token_pool", f"{self.token_pool.shape[0]} entries for {self.tokens} tokens")
        for field in ("heads", "row_bytes"):
            if getattr(self, field) < 1:
                raise ConfigError(field, f"{getattr(self, field)} is not positive")
        if self.heads > 1 and self.head_stride < self.row_bytes:
            raise ConfigError("head_stride", f"{self.head_stride} bytes is less than a row of {self.row_bytes}")
        if self.packed_bytes:
            self._check_ranges()

    def _check_ranges(self) -> None:
        pools = self.pointers.shape[0]
        if self.packed_address < 1:
            raise ConfigError("packed_address", f"{self.packed_address} is no address")
        if pools and self.pointers.min() < 1:
            raise ConfigError("pointers", f"{self.pointers.min()} is no address")
        if self.token_pool.min() < 0 or self.token_pool.max() >= pools:
            raise ConfigError("token_pool", f"names lines outside the {pools} of the pointer table")


def _check_array(field: str, array: npt.NDArray[np.generic], dtype: type[np.generic], ndim: int) -> None:
    if array.dtype != dtype or array.ndim != ndim:
        raise ConfigError(field, f"is {array.dtype} with {array.ndim} dimensions, not {dtype.__name__} with {ndim}")
