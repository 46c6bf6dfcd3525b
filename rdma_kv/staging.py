"""The memory of the staging slots: segments of equal slots, one when the agent starts, more as slots are retired or held.

A slot keeps its number and its address for good. It begins on a page of its own, so that it can be retired alone: its
pages are then inaccessible, and a new slot in a new segment takes its place.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

from rdma_kv.config import StagingConfig
from rdma_kv.memory import PAGE_BYTES, HostMemory
from rdma_kv.messages import MAX_SEGMENTS

_RETAINED: Final[list[Staging]] = []
"""Staging whose agent has closed while somebody may still write there: kept until the process exits."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Slots `[first, first + num_slots)` in one piece of memory."""

    memory: HostMemory
    first: int
    num_slots: int


class Staging:
    """All segments of one agent, in the order of their slots.

    Attributes:
        slot_bytes: from one slot to the next: the configured size in whole pages.
    """

    def __init__(self, config: StagingConfig) -> None:
        self.slot_bytes = -(-config.slot_bytes // PAGE_BYTES) * PAGE_BYTES
        self._segments: list[Segment] = []
        self._firsts: list[int] = []
        self.add(self.make(config.slots))

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._segments)

    @property
    def num_slots(self) -> int:
        last = self._segments[-1]
        return last.first + last.num_slots

    @property
    def full(self) -> bool:
        """Whether no further segment can be told to peers."""
        return len(self._segments) >= MAX_SEGMENTS

    def make(self, num_slots: int) -> Segment:
        """Memory for more slots, which does not count before `add`."""
        first = self.num_slots if self._segments else 0
        return Segment(HostMemory(num_slots * self.slot_bytes), first, num_slots)

    def add(self, segment: Segment) -> None:
        """From now on the segment is part of what peers are told."""
        self._segments.append(segment)
        self._firsts.append(segment.first)

    def address(self, index: int) -> int:
        """First byte of a slot."""
        segment = self._segment_of(index)
        return segment.memory.address + (index - segment.first) * self.slot_bytes

    def retire(self, index: int) -> None:
        """Make a slot inaccessible for good.

        Raises:
            OSError: the system refused; the slot is as it was.
        """
        segment = self._segment_of(index)
        segment.memory.retire((index - segment.first) * self.slot_bytes, self.slot_bytes)

    def retain(self) -> None:
        """Keep the memory mapped until the process exits."""
        _RETAINED.append(self)

    def _segment_of(self, index: int) -> Segment:
        return self._segments[bisect_right(self._firsts, index) - 1]
