"""Who judges bytes: staging memory that was used again while an older WRITE still read or wrote it.

It sits at the seams alone. A gather marks the bytes that it fills as new; a WRITE remembers when it was posted. When bytes
are copied for a WRITE from memory that was filled after the post, or to memory to which a later WRITE was posted, they are
*poisoned*: their owner had handed the memory out while somebody could still touch it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import rdma_kv.packer
from rdma_kv.kernels.launch import Chunk
from rdma_kv.transport.base import WritePair
from rdma_kv.transport.regions import Piece


@dataclass(eq=False)
class _Posted:
    """One WRITE that may still copy."""

    serial: int
    local: range
    remote: range


class Oracle:
    """Counts poisoned bytes of one process."""

    def __init__(self) -> None:
        self.poisoned_bytes = 0
        self.written_bytes = 0
        self._serial = itertools.count()
        self._filled: list[tuple[int, range]] = []
        self._posted: list[_Posted] = []
        self._all: list[_Posted] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Gathers of packers that are made within the block are seen."""
        before = rdma_kv.packer.gather
        rdma_kv.packer.gather = self._gather(before)  # type: ignore[misc]
        try:
            yield
        finally:
            rdma_kv.packer.gather = before  # type: ignore[misc]

    def _gather(self, kernel: Callable[[Sequence[Chunk]], None]) -> Callable[[Sequence[Chunk]], None]:
        def run(chunks: Sequence[Chunk]) -> None:
            for chunk in chunks:
                start = chunk.packed_address
                self._filled.append((next(self._serial), range(start, start + chunk.packed_bytes)))
            kernel(chunks)

        return run

    def transport(self, inner: Any) -> Any:
        """`inner`, whose posted WRITEs are known."""
        return _Watched(inner, self)

    def copied(self, pieces: Sequence[Piece]) -> None:
        """The network copies these bytes now."""
        for local, remote, length_bytes in pieces:
            self.written_bytes += length_bytes
            write = self._write_of(local, remote)
            if write is None:
                continue
            source = any(s > write.serial and _meet(r, local, length_bytes) for s, r in self._filled)
            target = any(w.serial > write.serial and _meet(w.remote, remote, length_bytes) for w in self._all)
            if source or target:
                self.poisoned_bytes += length_bytes

    def _write_of(self, local: int, remote: int) -> _Posted | None:
        """The oldest WRITE under way that these bytes can belong to."""
        for write in self._posted:
            if (
                local in write.local
                and remote in write.remote
                and local - write.local.start == remote - write.remote.start
            ):
                return write
        return None

    @contextlib.contextmanager
    def post(self, pairs: Sequence[WritePair]) -> Iterator[None]:
        serial = next(self._serial)
        writes = [
            _Posted(
                serial,
                range(pair.local.address, pair.local.address + pair.local.length_bytes),
                range(pair.remote.address, pair.remote.address + pair.remote.length_bytes),
            )
            for pair in pairs
        ]
        self._posted += writes
        self._all += writes
        try:
            yield
        finally:
            self._posted = [write for write in self._posted if write not in writes]


def _meet(span: range, start: int, length_bytes: int) -> bool:
    return span.start < start + length_bytes and start < span.stop


class _Watched:
    def __init__(self, inner: Any, oracle: Oracle) -> None:
        self._inner, self._oracle = inner, oracle

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def endpoint(self, peer: str) -> Any:
        return _WatchedEndpoint(self._inner.endpoint(peer), self._oracle)


class _WatchedEndpoint(_Watched):
    async def write(self, pairs: Sequence[WritePair], notification: bytes) -> None:
        with self._oracle.post(pairs):
            await self._inner.write(pairs, notification)
