"""Registered memory of one side as a table, and the cutting of a WRITE into pieces that fit one turn. Pure.

Every back-end checks a WRITE against two tables before it posts a byte: its own registrations and what the peer
exported. Some lanes enforce no key of their own (a WRITE into unmapped memory can end the target's process), so the
tables are the only guard.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence

from rdma_kv.errors import ConfigError, TransportError
from rdma_kv.transport.base import NOT_POSTED, WritePair
from rdma_kv.types import Descriptor, Region

Piece = tuple[int, int, int]
"""(local address, remote address, length in bytes) of one contiguous copy."""


class RegionTable:
    """Disjoint regions, each counted as often as it was registered.

    Addresses of the host and of all GPUs are of one space (CUDA's unified addressing), so one order serves them all.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """Start with `ranges` of (address, length in bytes).

        Raises:
            ConfigError: two of them overlap, or one is empty.
        """
        self._starts: list[int] = []
        self._regions: list[Region] = []
        self._counts: dict[Region, int] = {}
        for address, length_bytes in ranges:
            self.add(Region(address, length_bytes))

    def __iter__(self) -> Iterator[Region]:
        return iter(tuple(self._regions))

    def __len__(self) -> int:
        return len(self._regions)

    def add(self, region: Region) -> bool:
        """Count one more registration of `region`. True if it is the first.

        Raises:
            ConfigError: zero length, a negative device, or an overlap with a region that is not the same range.
        """
        if region in self._counts:
            self._counts[region] += 1
            return False
        self._check(region)
        place = bisect_right(self._starts, region.address)
        self._starts.insert(place, region.address)
        self._regions.insert(place, region)
        self._counts[region] = 1
        return True

    def remove(self, region: Region) -> bool:
        """Undo one `add`. True if the region is gone now.

        Raises:
            ConfigError: it is not registered.
        """
        if region not in self._counts:
            raise ConfigError("region", f"[{region.address:#x}, +{region.length_bytes}) is not registered")
        self._counts[region] -= 1
        if self._counts[region]:
            return False
        del self._counts[region]
        place = bisect_right(self._starts, region.address) - 1
        del self._starts[place], self._regions[place]
        return True

    def covers(self, descriptor: Descriptor) -> bool:
        """Whether `descriptor` lies inside one region."""
        place = bisect_right(self._starts, descriptor.address) - 1
        if place < 0:
            return False
        region = self._regions[place]
        end = region.address + region.length_bytes
        return descriptor.device == region.device and descriptor.address + descriptor.length_bytes <= end

    def _check(self, region: Region) -> None:
        if region.length_bytes <= 0 or region.address <= 0:
            raise ConfigError("region", f"{region.length_bytes} bytes at {region.address:#x} cannot be registered")
        if region.device < 0:
            raise ConfigError("device", f"{region.device}; 0 is the host, n + 1 the GPU of CUDA ordinal n")
        place = bisect_right(self._starts, region.address)
        before, after = self._regions[:place][-1:], self._regions[place : place + 1]
        for other in before + after:
            if (
                region.address < other.address + other.length_bytes
                and other.address < region.address + region.length_bytes
            ):
                raise ConfigError("region", f"{region} overlaps {other}; register each byte once")


def check_pairs(backend: str, pairs: Iterable[WritePair], local: RegionTable, remote: RegionTable) -> None:
    """See that every pair can be written.

    Raises:
        TransportError: lengths differ or are not positive, the local memory is not registered, or the remote memory was
            not exported. Its status is `NOT_POSTED`.
    """
    for pair in pairs:
        if pair.local.length_bytes != pair.remote.length_bytes or pair.local.length_bytes <= 0:
            raise TransportError(backend, NOT_POSTED, f"lengths of {pair} must be equal and positive")
        if not local.covers(pair.local):
            raise TransportError(backend, NOT_POSTED, f"{pair.local} is in no region registered here")
        if not remote.covers(pair.remote):
            raise TransportError(backend, NOT_POSTED, f"{pair.remote} is in no region that the peer exported")


def batches(pairs: Sequence[WritePair], max_bytes: int, max_pieces: int) -> Iterator[list[Piece]]:
    """Cut `pairs`, in order, into lists of at most `max_bytes` and `max_pieces`.

    Lazy, so that a huge WRITE costs no long turn.
    """
    batch: list[Piece] = []
    room = max_bytes
    for pair in pairs:
        offset, length_bytes = 0, pair.local.length_bytes
        while offset < length_bytes:
            take = min(room, length_bytes - offset)
            batch.append((pair.local.address + offset, pair.remote.address + offset, take))
            offset += take
            room -= take
            if not room or len(batch) == max_pieces:
                yield batch
                batch, room = [], max_bytes
    if batch:
        yield batch
