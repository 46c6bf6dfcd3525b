"""Chunks of any geometry in one block of memory, drawn by Hypothesis, and what a launch over them must leave there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st
from kernel_checks import Kernels
from kernel_pools import Bytes

from rdma_kv.kernels import reference
from rdma_kv.kernels.launch import Chunk

BLOCK_BYTES = 4 << 20


def in_block(rng: np.random.Generator, begin: int, sizes: tuple[int, int, int, int], grain: int, at: int) -> Chunk:
    """A chunk of `(planes, tokens, heads, row bytes)` from `begin + at` on, its strides, order and pools at random.

    Every address and stride is a multiple of `grain`. No two rows overlap, whatever pool they are of.
    """
    planes, tokens, heads, row_bytes = sizes
    pools = int(rng.integers(1, 4))
    head_stride = row_bytes + grain * int(rng.choice([0, 0, 1]))
    pitch = heads * head_stride + grain * int(rng.choice([0, 1]))
    plane = 2 * tokens * pitch + grain * int(rng.integers(0, 3))
    at = -(-at // 64) * 64 + grain * int(rng.integers(0, 64 // grain))
    packed = begin + at
    paged = packed + planes * tokens * heads * row_bytes + 64
    paged = -(-paged // 64) * 64 + grain * int(rng.integers(0, 64 // grain))
    places = rng.permutation(pools * planes).reshape(pools, planes)
    return Chunk(
        packed,
        paged + plane * places,
        rng.integers(0, pools, tokens, np.int32),
        rng.permutation(2 * tokens)[:tokens] * pitch,
        heads,
        head_stride,
        row_bytes,
    )


def end_of(chunk: Chunk) -> int:
    """Behind its last byte."""
    if not chunk.packed_bytes:
        return chunk.packed_address
    last = int(chunk.pointers.max()) + int(chunk.token_offset.max()) + (chunk.heads - 1) * chunk.head_stride
    return max(last + chunk.row_bytes, chunk.packed_address + chunk.packed_bytes)


@st.composite
def sizes(draw: st.DrawFn, grain: int, most_bytes: int = 60_000) -> tuple[int, int, int, int]:
    """Planes, tokens, heads and row bytes of a chunk."""
    row_bytes = grain * draw(st.one_of(st.integers(1, 9), st.sampled_from([16, 64, 72, 257])))
    planes, heads = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    tokens = draw(st.integers(0, max(1, most_bytes // (planes * heads * row_bytes))))
    return planes, min(tokens, 400), heads, row_bytes


def chunks_in(begin: int, seed: int, drawn: Sequence[tuple[tuple[int, int, int, int], int]]) -> list[Chunk]:
    """One chunk for each of the drawn sizes and grains, one behind the other."""
    rng, chunks, at = np.random.default_rng(seed), [], 64
    for each, grain in drawn:
        chunk = in_block(rng, begin, each, grain, at)
        at = max(at, end_of(chunk) - begin) + 64
        chunks.append(chunk)
    assert at < BLOCK_BYTES
    return chunks


def after(kernels: Kernels, before: Bytes, work: Callable[[int], object]) -> Bytes:
    """The block after `work`, which is told its address."""
    memory = kernels.memory()
    begin = memory.place(before)
    work(begin)
    return memory.fetch(begin)


def moved(sources: Sequence[Chunk], targets: Sequence[Chunk]) -> None:
    """What a move must do: a gather, then a scatter, of each pair by the reference."""
    packed = np.empty(max((chunk.packed_bytes for chunk in sources), default=1) or 1, np.uint8)
    for source, target in zip(sources, targets, strict=True):
        reference.gather([replace(source, packed_address=packed.ctypes.data)])
        reference.scatter([replace(target, packed_address=packed.ctypes.data)])
