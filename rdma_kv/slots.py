"""The pool of staging slots: who holds which one, and why.

A slot is free or held by one (peer, reason). Each acquisition gives it a new epoch; an epoch that is not the slot's own
is stale and refused. At every moment `free + held == total`. The pool never waits and never guesses: memory that a
transport may still touch stays held until its owner has a proof and releases it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from rdma_kv.errors import ConfigError, LocalProtocolError


class Hold(StrEnum):
    """Why a slot is not free."""

    GATHER = "gather"  # source: being filled
    WRITE = "write"  # source: a WRITE reads it
    GRANTED = "granted"  # target: a peer may write it
    SCATTER = "scatter"  # target: being emptied
    UNPROVEN = "unproven"  # a WRITE failed or was not settled: the transport may still touch it


@dataclass(frozen=True, slots=True)
class SlotRef:
    """One acquisition of a slot."""

    index: int
    epoch: int


class SlotPool:
    """`total` equal slots. Owned by the mover; not thread-safe.

    Args:
        total: number of slots, at least 2 so that work on one overlaps with the transport of another.

    Raises:
        ConfigError: fewer than 2 slots.
    """

    def __init__(self, total: int) -> None:
        if total < 2:
            raise ConfigError("slots", f"{total} staging slots; at least 2 are needed")
        self.total = total
        self._free = list(reversed(range(total)))  # the last one freed is the next one used: it is in the cache
        self._epochs = [0] * total
        self._holds: dict[int, tuple[str, Hold]] = {}
        self._per_peer: Counter[str] = Counter()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def quota(self) -> int:
        """Most slots that one peer holds at a time."""
        return max(1, self.total // 2)

    def held(self) -> dict[tuple[str, Hold], int]:
        """Held slots by (peer, reason); `free + sum(held().values()) == total`."""
        return dict(Counter(self._holds.values()))

    def can_acquire(self, peer: str) -> bool:
        return bool(self._free) and self._per_peer[peer] < self.quota

    def acquire(self, peer: str, reason: Hold) -> SlotRef | None:
        """A free slot under a new epoch, or None where none is free or `peer` is at its quota."""
        if not self.can_acquire(peer):
            return None
        index = self._free.pop()
        self._epochs[index] += 1
        self._holds[index] = (peer, reason)
        self._per_peer[peer] += 1
        return SlotRef(index, self._epochs[index])

    def is_live(self, slot: SlotRef, peer: str) -> bool:
        """Whether `peer` holds this very acquisition."""
        hold = self._holds.get(slot.index)
        return hold is not None and hold[0] == peer and self._epochs[slot.index] == slot.epoch

    def reason(self, slot: SlotRef) -> Hold:
        return self._hold_of(slot)[1]

    def change(self, slot: SlotRef, reason: Hold) -> None:
        """Hold the slot for another reason; holder and epoch stay."""
        peer, _ = self._hold_of(slot)
        self._holds[slot.index] = (peer, reason)

    def release(self, slot: SlotRef) -> None:
        """Give the slot back. The caller has the proof that nothing touches it any more.

        Raises:
            LocalProtocolError: it is free already, or the epoch is stale. Nothing changes.
        """
        peer, _ = self._hold_of(slot)
        del self._holds[slot.index]
        self._per_peer[peer] -= 1
        if not self._per_peer[peer]:
            del self._per_peer[peer]
        self._free.append(slot.index)

    def _hold_of(self, slot: SlotRef) -> tuple[str, Hold]:
        hold = self._holds.get(slot.index)
        if hold is None or self._epochs[slot.index] != slot.epoch:
            raise LocalProtocolError(f"slot {slot.index} epoch {slot.epoch} is not held")
        return hold
