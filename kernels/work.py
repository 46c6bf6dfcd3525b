"""What a packer asks its kernels for: a chunk, and what is to happen around its copy."""

from __future__ import annotations

from typing import Any, NamedTuple

from rdma_kv.kernels.launch import Chunk


class Work(NamedTuple):
    """One chunk of a launch.

    Attributes:
        chunk: its packed address is that of the slot where kernels reach it: on the GPU where the pools are there.
        bounce: address of the slot in pinned host memory, where the transport takes or leaves the bytes; 0 where it uses the
            packed memory itself.
        checksum: of a gather: the packed form's is wanted.
        expected: of a scatter: what the packed form's must be, before any page is touched.
        after: CUDA events that the launch's stream waits for.
    """

    chunk: Chunk
    bounce: int = 0
    checksum: bool = False
    expected: int | None = None
    after: tuple[Any, ...] = ()
