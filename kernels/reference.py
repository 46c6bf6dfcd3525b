"""Gather and scatter on the host, in NumPy on raw addresses: the host path, and the reference of the other kernels.

A chunk becomes parts; a part is a grid `[planes, rows]` of rows of one length. Heads that lie back to back join into
one row, and so do tokens (whole pages, in the layouts that keep a page's tokens together). The rows of a part are then
items of one `window`, an array that spans from the part's lowest byte to its highest; NumPy reads only the items that
are named, so the window may run across other allocations and unmapped memory.

Traps that shape the code:
    * `ndarray.take` is the fastest way to read, but copies a source that is not contiguous, and a destination that it
      believes to overlap the source. It serves where all rows lie multiples of their length apart. The other window has
      an item at *every* byte, one row long each, and is read by fancy indexing through a temporary.
    * NumPy refuses an array whose items times item length reach 2**63, even if the items overlap. User addresses are
      below 2**47, and rows of a window below 2**16 (`_LONG_ROW_BYTES`).
    * A thread that waits for the GIL starts its 5 ms anew each time that the GIL is released and taken again at once.
      Many short calls therefore starve an event loop beside them for tens of milliseconds: see `Turns`. `take` and the
      assignment of a long row release the GIL; fancy indexing of 500 items or fewer does so only where the index is not
      contiguous: see `_spread`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rdma_kv.kernels.launch import Chunk, Int32Array, Int64Array

Bytes = npt.NDArray[np.uint8]
Rows = npt.NDArray[np.void]

_PIECE_BYTES = 2 << 20  # of one call
_PIECE_ROWS = 4096  # of one call, so that the index stays in the cache
_TEMPORARY_BYTES = 512 << 10  # of one call that goes through a temporary, for the same reason
_LONG_ROW_BYTES = 64 << 10  # from here on, one slice assignment per row costs no more than the window
_TURN_S = 1e-3  # of short calls before others get the GIL
_PAUSE_S = 100e-6  # in which a thread that waits for the GIL wakes up and takes it


def gather(chunks: Sequence[Chunk]) -> None:
    """Copy paged rows to the packed form; returns when all bytes are there.

    Call it off the event loop, from a thread of its own: it hands the GIL on each millisecond.

    Args:
        chunks: of any number of transfers, ranks and replicas. Packed forms overlap neither one another nor paged rows.

    Raises:
        ConfigError: a chunk's field has a wrong shape, dtype or range. Nothing was copied.
    """
    turns = Turns()
    for part in _parts(chunks):
        if part.row_bytes >= _LONG_ROW_BYTES:
            for paged, packed in _long_rows(part):
                packed[...] = paged
                turns.next()
        else:
            unit = part.unit()
            for window, index, rows in _pieces(part, unit, direct=unit > 1):
                if window.flags.c_contiguous and rows.flags.c_contiguous:
                    window.take(index, 0, rows, "clip")  # mode "raise" would buffer `rows`
                else:
                    rows[...] = window[index]
                turns.next()


def scatter(chunks: Sequence[Chunk]) -> None:
    """Copy the packed form to paged rows; returns when all bytes are there. As `gather`, not for the event loop.

    Writes the rows and nothing between them. If two tokens of one chunk name one place, either may remain.

    Args:
        chunks: of any number of transfers, ranks and replicas. Packed forms do not overlap paged rows.

    Raises:
        ConfigError: a chunk's field has a wrong shape, dtype or range. Nothing was copied.
    """
    turns = Turns()
    for part in _parts(chunks):
        if part.row_bytes >= _LONG_ROW_BYTES:
            for paged, packed in _long_rows(part):
                paged[...] = packed
                turns.next()
        else:
            for window, index, rows in _pieces(part, 1, direct=True):
                window[index] = np.ascontiguousarray(rows)
                turns.next()


class Turns:
    """Lets other threads have the GIL after each `_TURN_S` of a launch, if no long call did so by itself."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._due = self._last + _TURN_S

    def next(self) -> None:
        """Call it behind each copying call."""
        now = time.monotonic()
        if now - self._last >= _PAUSE_S:
            self._due = now + _TURN_S
        elif now >= self._due:
            time.sleep(_PAUSE_S)
            now = time.monotonic()
            self._due = now + _TURN_S
        self._last = now


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one length: in the paged form at `low + base[plane, pool of the row] + offset[row]`.

    Attributes:
        packed_address: first packed byte. Rows follow without a gap, planes at `plane_stride` bytes.
        low: address of the lowest paged byte.
        base: int64 `[planes, pools]`, bytes, from 0.
        pool: int32 `[rows]`, or None where `base` has one column.
        offset: int64 `[rows]`, bytes, from 0.
    """

    packed_address: int
    plane_stride: int
    low: int
    base: Int64Array
    pool: Int32Array | None
    offset: Int64Array
    row_bytes: int

    @property
    def planes(self) -> int:
        return int(self.base.shape[0])

    @property
    def rows(self) -> int:
        return int(self.offset.shape[0])

    @property
    def paged_span(self) -> int:
        """Bytes from the lowest row's first to the highest row's last."""
        return int(self.base.max()) + int(self.offset.max()) + self.row_bytes

    @property
    def packed_span(self) -> int:
        return (self.planes - 1) * self.plane_stride + self.rows * self.row_bytes

    def unit(self) -> int:
        """Bytes from item to item of a window: `row_bytes` where `take` may read it, otherwise 1."""
        apart = self.packed_address + self.packed_span <= self.low or self.low + self.paged_span <= self.packed_address
        aligned = not (self.base % self.row_bytes).any() and not (self.offset % self.row_bytes).any()
        return self.row_bytes if apart and aligned else 1


def _part(
    packed_address: int,
    plane_stride: int,
    *,
    base: Int64Array,
    pool: Int32Array | None,
    offset: Int64Array,
    row_bytes: int,
) -> _Part:
    base_low, offset_low = int(base.min()), int(offset.min())
    low = base_low + offset_low
    return _Part(packed_address, plane_stride, low, base - base_low, pool, offset - offset_low, row_bytes)


def _parts(chunks: Sequence[Chunk]) -> Iterator[_Part]:
    """The rows of all chunks, joined as far as they lie back to back in both forms."""
    for chunk in chunks:
        chunk.validate()
    for chunk in chunks:
        if not chunk.packed_bytes:
            continue
        base, pool = _used_pools(chunk)
        token_bytes = chunk.heads * chunk.row_bytes
        plane_stride = chunk.tokens * token_bytes
        if chunk.heads > 1 and chunk.head_stride != chunk.row_bytes:
            heads = np.arange(chunk.heads, dtype=np.int64) * chunk.head_stride
            yield _part(
                chunk.packed_address,
                plane_stride,
                base=base,
                pool=None if pool is None else pool.repeat(chunk.heads),
                offset=np.add.outer(chunk.token_offset, heads).reshape(-1),
                row_bytes=chunk.row_bytes,
            )
            continue
        for first, last, run in _runs(chunk.token_offset, pool, token_bytes):
            yield _part(
                chunk.packed_address + first * token_bytes,
                plane_stride,
                base=base,
                pool=None if pool is None else pool[first:last:run],
                offset=chunk.token_offset[first:last:run],
                row_bytes=run * token_bytes,
            )


def _used_pools(chunk: Chunk) -> tuple[Int64Array, Int32Array | None]:
    """Base addresses `[planes, pools]` and the column of each token; one pool in use leaves one column and None."""
    first = int(chunk.token_pool[0])
    if chunk.pointers.shape[0] == 1 or (chunk.token_pool == first).all():
        return chunk.pointers[first][:, None], None
    return chunk.pointers.T, chunk.token_pool


def _runs(offset: Int64Array, pool: Int32Array | None, token_bytes: int) -> list[tuple[int, int, int]]:
    """Intervals `(first, last, run)` of the tokens: each `run` tokens from `first` on lie back to back.

    Runs between the first and the last are cut to their greatest common divisor: the page, as a rule. A first or last
    run that is no multiple of it (the range begins or ends within a page) is an interval of its own.
    """
    tokens = int(offset.shape[0])
    breaks = offset[1:] - offset[:-1] != token_bytes
    if pool is not None:
        breaks |= pool[1:] != pool[:-1]
    starts = breaks.nonzero()[0] + 1
    if not starts.size:
        return [(0, tokens, tokens)]
    first, last = int(starts[0]), int(starts[-1])
    run = int(np.gcd.reduce(starts[1:] - starts[:-1])) or first
    if run == 1:
        return [(0, tokens, 1)]
    begin = 0 if first % run == 0 else first
    end = tokens if (tokens - last) % run == 0 else last
    intervals = [(0, begin, begin), (begin, end, run), (end, tokens, tokens - end)]
    return [interval for interval in intervals if interval[0] < interval[1]]


def _long_rows(part: _Part) -> Iterator[tuple[Bytes, Bytes]]:
    """Each row in its paged and its packed form, uint8 `[row_bytes]`."""
    length = part.row_bytes
    paged = view(part.low, part.paged_span)
    packed = view(part.packed_address, part.packed_span)
    for plane in range(part.planes):
        base = part.base[plane] if part.pool is None else part.base[plane].take(part.pool)
        at = plane * part.plane_stride
        for start in (base + part.offset).tolist():
            yield paged[start : start + length], packed[at : at + length]
            at += length


def _pieces(part: _Part, unit: int, *, direct: bool) -> Iterator[tuple[Rows, Int64Array, Rows]]:
    """What single NumPy calls copy: `window[index]` is the paged form of `rows`, both `[planes, rows]` of a piece.

    The window has an item at every `unit` bytes. Pieces are smaller where they go through a temporary: unless the caller
    copies `direct`, and where `rows` is of several planes with gaps in between.
    """
    length = part.row_bytes
    row = np.dtype((np.void, length))
    span = part.paged_span
    window: Rows = np.ndarray(((span - length) // unit + 1,), row, view(part.low, span), strides=(unit,))
    shape, strides = (part.planes, part.rows), (part.plane_stride, length)
    packed: Rows = np.ndarray(shape, row, view(part.packed_address, part.packed_span), strides=strides)
    base, offset = (part.base, part.offset) if unit == 1 else (part.base // unit, part.offset // unit)
    piece_bytes = _PIECE_BYTES if direct and part.plane_stride == part.rows * length else _TEMPORARY_BYTES
    for planes, rows in _grid(part, piece_bytes):
        piece_base = base[planes] if part.pool is None else base[planes].take(part.pool[rows], 1)
        yield window, _spread(piece_base, offset[rows]), packed[planes, rows]


def _spread(base: Int64Array, offset: Int64Array) -> Int64Array:
    """`base + offset`, in an array that is not contiguous."""
    index: Int64Array = np.empty((base.shape[0], offset.shape[0], 2), np.int64)[..., 0]
    return np.add(base, offset, out=index)


def _grid(part: _Part, piece_bytes: int) -> Iterator[tuple[slice, slice]]:
    """Cut `[planes, rows]` into pieces: some of one plane's rows, or all rows of some planes."""
    limit = max(1, min(_PIECE_ROWS, piece_bytes // part.row_bytes))
    cuts = -(-part.rows // limit)
    rows = -(-part.rows // cuts)
    planes = limit // rows  # 1 where a plane is cut
    for plane in range(0, part.planes, planes):
        for row in range(0, part.rows, rows):
            yield slice(plane, plane + planes), slice(row, row + rows)


def view(address: int, length_bytes: int) -> Bytes:
    """Memory of this process as uint8 `[length_bytes]`; owns nothing."""
    return np.asarray(_Memory(address, length_bytes))


class _Memory:
    """Tells NumPy an address, by the array interface protocol."""

    __slots__ = ("__array_interface__",)

    def __init__(self, address: int, length_bytes: int) -> None:
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "data": (address, False),
            "shape": (length_bytes,),
            "typestr": "|u1",
        }
