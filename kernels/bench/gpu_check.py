"""Triton kernels on a GPU against the reference, byte by byte: `python -m rdma_kv.kernels.bench.gpu_check`.

Pools of the engines' layouts lie in one block of host memory that has a copy on the device. The reference works on the
block, Triton on the copy, and the two are compared whole, so a byte written beside a row counts as wrong. Exit status 1 says
that a byte differed. `--small` is one layout with all its row lengths, for compute-sanitizer; rates are `rdma-kv bench gpu`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from rdma_kv.kernels import reference
from rdma_kv.kernels.checksum import Piece, checksums
from rdma_kv.kernels.gather import gather
from rdma_kv.kernels.launch import Chunk, Int64Array
from rdma_kv.kernels.peer import move
from rdma_kv.kernels.tiles import MIDDLE, NARROW, WIDE, Shape, upload

Bytes = npt.NDArray[np.uint8]

PROGRAMS = (4, 132, 1 << 16)
_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Form:
    """How a pool is stored, in bytes; `planes` are the offsets of its (layer, kv) from its begin."""

    planes: Int64Array
    page_size: int
    page_stride: int
    token_stride: int
    head_stride: int
    heads: int
    row_bytes: int
    size: int


def form(layout: str, *, layers: int, pages: int, page_size: int, heads: int, row_bytes: int) -> Form:
    """One of the engines' layouts.

    Raises:
        KeyError: the layout is none of them.
    """
    token, page = heads * row_bytes, page_size * heads * row_bytes
    layer, kv = (each.reshape(-1) for each in np.indices((layers, 1 if layout == "mla" else 2)))
    plane, count = pages * page, layers * (1 if layout == "mla" else 2)
    planes, page_stride, token_stride, head_stride = {
        "nhd": ((layer * 2 + kv) * plane, page, token, row_bytes),
        "hnd": ((layer * 2 + kv) * plane, page, row_bytes, page_size * row_bytes),
        "mla": (layer * plane, page, token, row_bytes),
        "lightllm": (layer * 2 * plane + kv * token, 2 * page, 2 * token, row_bytes),
        "sglang": ((kv * layers + layer) * plane, page, token, row_bytes),
        "trtllm": ((layer * 2 + kv) * page, count * page, row_bytes, page_size * row_bytes),
    }[layout]
    return Form(planes, page_size, page_stride, token_stride, head_stride, heads, row_bytes, count * plane)


def chunk_of(
    kind: Form, packed: int, pools: Sequence[int], slots: Int64Array, pool_of: Int64Array, heads: range
) -> Chunk:
    """A chunk of the slots' `heads`, of pools that begin at the given addresses."""
    page, place = np.divmod(slots, kind.page_size)
    return Chunk(
        packed,
        np.add.outer(np.array(pools, np.int64), kind.planes),
        pool_of.astype(np.int32),
        page * kind.page_stride + place * kind.token_stride + heads.start * kind.head_stride,
        len(heads),
        kind.head_stride,
        kind.row_bytes,
    )


# --- bytes


class Block:
    """Host memory that pools and packed forms are cut from, one after the other."""

    def __init__(self, size: int, rng: np.random.Generator) -> None:
        room = rng.integers(0, 256, size + 64, np.uint8)
        self.here: Bytes = room[-room.ctypes.data % 64 :][:size]
        self.rng = rng
        self._used = 0

    def cut(self, size: int, skew: int) -> int:
        """Address of `size` fresh bytes, `skew` off a multiple of 64, with 64 bytes around that nobody may touch.

        Raises:
            MemoryError: the block is used up.
        """
        begin = self._used + 64 + skew
        self._used = -(-(begin + size) // 64) * 64
        if self._used + 64 > self.here.size:
            raise MemoryError(f"{self._used + 64} bytes of {self.here.size}")
        return self.here.ctypes.data + begin

    def chunk(self, layout: str, *, row_bytes: int, skew: int = 0, heads: range = range(4), pools: int = 1) -> Chunk:
        """Random tokens of fresh pools, a page in whole among them; of MLA's one head in any case."""
        heads, pool_heads = (range(1), 1) if layout == "mla" else (heads, 4)
        kind = form(layout, layers=3, pages=9, page_size=4, heads=pool_heads, row_bytes=row_bytes)
        slots = np.concatenate((np.arange(12, 16), self.rng.permutation(12)[:7], [17, 30]))
        pool_of = self.rng.integers(0, pools, slots.size)
        begins = [self.cut(kind.size, skew * (pool + 1)) for pool in range(pools)]
        packed = self.cut(kind.planes.size * slots.size * len(heads) * row_bytes, skew)
        return chunk_of(kind, packed, begins, slots, pool_of, heads)


def launches(block: Block) -> Iterator[tuple[str, list[Chunk]]]:
    """What is checked: each layout alone, then all of it in one launch."""
    chunks = []
    for layout in ("nhd", "hnd", "mla", "lightllm", "sglang", "trtllm"):
        each = [
            *(block.chunk(layout, row_bytes=size) for size in (1, 2, 3, 5, 8, 16, 33, 66, 256, 578, 1152, 4096)),
            *(block.chunk(layout, row_bytes=64, skew=skew) for skew in (1, 2, 3, 4, 8)),
            *(block.chunk(layout, row_bytes=64, heads=heads) for heads in (range(1), range(1, 3), range(3, 4))),
            *(block.chunk(layout, row_bytes=size, pools=3) for size in (7, 128)),
        ]
        yield layout, each
        chunks += each
    yield "all in one launch", chunks
    yield "no chunk", []


def wrong_bytes(chunks: Sequence[Chunk], block: Block, there: torch.Tensor, shape: Shape, programs: int) -> int:
    """Bytes of the block that differ after a gather, plus those after a scatter of other packed bytes."""
    moved = moved_to(there, block, chunks)
    wrong = 0
    for scatter in (False, True):
        if scatter:
            for chunk in chunks:
                begin = chunk.packed_address - block.here.ctypes.data
                block.here[begin : begin + chunk.packed_bytes] ^= 0x5A
        there.copy_(torch.from_numpy(block.here))
        uploaded = upload(moved, device=there.device)
        if uploaded is not None:
            uploaded.start(scatter=scatter, programs=programs, shape=shape)
        (reference.scatter if scatter else reference.gather)(chunks)
        wrong += int(np.count_nonzero(there.cpu().numpy() != block.here))
    return wrong


def wrong_sums(chunks: Sequence[Chunk], block: Block, there: torch.Tensor, programs: int) -> int:
    """Bytes of the block that differ after a gather with checksums, plus checksums that do: of all chunks, then of half."""
    wrong = 0
    reference.gather(chunks)
    expected = checksums([Piece(chunk.packed_address, chunk.packed_bytes) for chunk in chunks])
    for wanted in ([True] * len(chunks), [number % 2 == 0 for number in range(len(chunks))]):
        before = torch.from_numpy(block.here).to(there.device)
        there.copy_(before)
        for chunk in chunks:
            begin = chunk.packed_address - block.here.ctypes.data
            there[begin : begin + chunk.packed_bytes] = 0x77
        sums = gather(moved_to(there, block, chunks), device=there.device, programs=programs, checksum=wanted)
        found = sums.values() if sums is not None else [0] * len(chunks)
        wrong += sum(here != own for here, own, each in zip(expected, found, wanted, strict=True) if each)
        wrong += int((there != before).sum())
    return wrong


def wrong_bytes_between(
    pairs: Sequence[tuple[Chunk, Chunk]], block: Block, there: torch.Tensor, shape: Shape | None, programs: int
) -> int:
    """Bytes of the block that differ after a move from the first chunks' pages to the second chunks'."""
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    there.copy_(torch.from_numpy(block.here))
    moved = [moved_to(there, block, chunks) for chunks in (sources, targets)]
    move(*moved, device=there.device, programs=programs, shape=shape)
    packed = np.empty(max(chunk.packed_bytes for chunk in sources), np.uint8)
    for source, target in pairs:
        reference.gather([replace(source, packed_address=packed.ctypes.data)])
        reference.scatter([replace(target, packed_address=packed.ctypes.data)])
    return int(np.count_nonzero(there.cpu().numpy() != block.here))


def pairs_of(block: Block) -> Iterator[tuple[str, list[tuple[Chunk, Chunk]]]]:
    """Launches from pages to pages: every layout to another one, in whole words; then odd rows and addresses as well."""
    layouts = ("nhd", "hnd", "lightllm", "sglang", "trtllm")
    even = [
        (block.chunk(one, row_bytes=size, pools=pools), block.chunk(other, row_bytes=size, pools=4 - pools))
        for one, other in zip(layouts, layouts[1:] + layouts[:1], strict=True)
        for size, pools in ((16, 1), (256, 3), (1152, 2))
    ]
    even += [(block.chunk("mla", row_bytes=1152), block.chunk("mla", row_bytes=1152))]
    odd = [
        (block.chunk("nhd", row_bytes=size), block.chunk("hnd", row_bytes=size, skew=skew))
        for size, skew in ((16, 0), (33, 0), (66, 2), (64, 8), (1, 1), (578, 4))
    ]
    yield "between pages", even
    yield "between odd pages", odd + even


def summable(block: Block) -> Iterator[Chunk]:
    """Chunks of whole words, so that they are summed in the same pass: planes that end within tiles of the checksum, tiles
    of several planes, several pools; and one longer than a program's piece."""
    for layout in ("nhd", "hnd", "mla", "lightllm", "sglang", "trtllm"):
        for row_bytes, pools in ((16, 1), (48, 2), (256, 1), (1152, 3), (4096, 1)):
            yield block.chunk(layout, row_bytes=row_bytes, pools=pools)
    yield block.chunk("hnd", row_bytes=16 << 10, pools=2)


def moved_to(there: torch.Tensor, block: Block, chunks: Sequence[Chunk]) -> list[Chunk]:
    """The same chunks in the copy of the block."""
    delta = there.data_ptr() - block.here.ctypes.data
    return [
        replace(chunk, packed_address=chunk.packed_address + delta, pointers=chunk.pointers + delta) for chunk in chunks
    ]


def wrong_bytes_far_apart(device: torch.device) -> int:
    """As `wrong_bytes`, for planes and tokens more than 4 GiB apart, in words of 16 bytes and of one."""
    pool = torch.zeros(11 * _GIB, dtype=torch.uint8, device=device)
    wrong = 0
    for row_bytes in (4096, 4097):
        planes = np.array([64, 64 + 5 * _GIB], np.int64)
        offsets = np.array([4 * _GIB + 64, 0, 2 * _GIB, 2 * _GIB - 8192], np.int64)
        starts = np.add.outer(planes, offsets).reshape(-1).tolist()
        packed = torch.zeros(len(starts) * row_bytes, dtype=torch.uint8, device=device)
        rows = torch.randint(0, 256, (len(starts), row_bytes), dtype=torch.uint8, device=device)
        chunk = Chunk(
            packed.data_ptr(), planes[None] + pool.data_ptr(), np.zeros(4, np.int32), offsets, 1, 0, row_bytes
        )
        uploaded = upload([chunk], device=device)
        assert uploaded is not None
        for start, row in zip(starts, rows, strict=True):
            pool[start : start + row_bytes] = row
        uploaded.start(scatter=False, programs=16)
        wrong += int((packed != rows.reshape(-1)).sum())
        packed.copy_(rows.flip(0).reshape(-1))
        uploaded.start(scatter=True, programs=16)
        wrong += sum(
            int((pool[start : start + row_bytes] != row).sum()) for start, row in zip(starts, rows.flip(0), strict=True)
        )
    return wrong


def check(device: torch.device, shapes: Sequence[Shape], programs: Sequence[int], *, small: bool = False) -> bool:
    """Print each launch and its number of wrong bytes; whether all were right."""
    block = Block(48 << 20, np.random.default_rng(11))
    there = torch.empty(block.here.size, dtype=torch.uint8, device=device)
    counts = []
    for name, chunks in launches(block):
        for shape in shapes:
            counts.append(sum(wrong_bytes(chunks, block, there, shape, each) for each in programs))
            print(f"{name:20} {len(chunks):4} chunks  {shape.words:6} x {shape.warps:<3} wrong bytes: {counts[-1]}")
        counts.append(sum(wrong_sums(chunks, block, there, each) for each in programs))
        print(f"{name:20} {len(chunks):4} chunks  {'checksums':12} wrong: {counts[-1]}")
        if small:
            break
    block = Block(128 << 20, np.random.default_rng(12))
    there = torch.empty(block.here.size, dtype=torch.uint8, device=device)
    whole = [chunk for chunk in summable(block) if not small or chunk.packed_bytes < 1 << 20]
    counts.append(sum(wrong_sums(whole, block, there, each) for each in programs))
    print(f"{'summed as moved':20} {len(whole):4} chunks  {'checksums':12} wrong: {counts[-1]}")
    for name, pairs in pairs_of(block):
        for own_shape in (None, *shapes):
            counts.append(sum(wrong_bytes_between(pairs, block, there, own_shape, each) for each in programs))
            own = f"{own_shape.words:6} x {own_shape.warps:<3}" if own_shape else f"{'best shape':12}"
            print(f"{name:20} {len(pairs):4} chunks  {own} wrong bytes: {counts[-1]}")
    if device.type == "cuda" and not small:
        counts.append(wrong_bytes_far_apart(device))
        print(f"{'beyond 32 bits':20} {'':36}wrong bytes: {counts[-1]}")
    return not any(counts)


def _shape(text: str) -> Shape:
    words, warps = text.split("x")
    return Shape(int(words), int(warps))


def main() -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cpu: in Triton's interpreter")
    parser.add_argument(
        "--shape", action="append", type=_shape, help="words x warps of a program, as 2048x16; may be repeated"
    )
    parser.add_argument("--programs", type=int, nargs="+", default=PROGRAMS)
    parser.add_argument("--small", action="store_true", help="one layout, far fewer bytes")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    right = check(device, arguments.shape or [WIDE, MIDDLE, NARROW], arguments.programs, small=arguments.small)
    print("all bytes right" if right else "WRONG BYTES")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
