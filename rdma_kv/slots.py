"""The pool of staging slots: who holds which one, and why.

A slot is free, held by one (peer, reason), or retired for good. Each acquisition gives it a new epoch; an epoch that is
not the slot's own is stale and refused. At every moment `free + held + retired == total`, and each change checks that.
The pool never waits and never guesses: memory that a transport may still touch stays held until its owner has a proof
and releases it, or takes its memory away and retires it.
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

    Attributes:
        total: slots so far; it grows, and never shrinks.
        retired: slots whose memory is gone.

    Raises:
        ConfigError: fewer than 2 slots.
    """

    def __init__(self, total: int) -> None:
        if total < 2:
            raise ConfigError("slots", f"{total} staging slots; at least 2 are needed")
        self.total = total
        self.retired = 0
        self._free = list(reversed(range(total)))  # the last one freed is the next one used: it is in the cache
        self._epochs = [0] * total
        self._holds: dict[int, tuple[str, Hold]] = {}
        self._per_peer: Counter[str] = Counter()
        self._unproven: Counter[str] = Counter()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def working(self) -> int:
        """Slots that have memory."""
        return self.total - self.retired

    @property
    def usable(self) -> int:
        """Slots that are free, or will be by themselves: all but the retired and the unproven."""
        return self.working - self._unproven.total()

    @property
    def quota(self) -> int:
        """Most slots that one peer holds at a time."""
        return max(1, self.working // 2)

    def held(self) -> dict[tuple[str, Hold], int]:
        """Held slots by (peer, reason); `free + sum(held().values()) + retired == total`."""
        return dict(Counter(self._holds.values()))

    def unproven(self) -> dict[str, int]:
        """Slots held as unproven, by peer."""
        return dict(self._unproven)

    def can_acquire(self, peer: str) -> bool:
        return bool(self._free) and self._per_peer[peer] < self.quota

    def is_blocked(self, peer: str) -> bool:
        """Whether unproven slots alone keep `peer` from a slot: waiting for transfers to end does not help."""
        return self.usable <= 0 or self._unproven[peer] >= self.quota

    def missing(self, peer: str, wanted: int) -> int:
        """Slots to add so that `peer` is not blocked, and at least `wanted` are usable."""
        return max(wanted - self.usable, 2 * (self._unproven[peer] + 1) - self.working, 0)

    def acquire(self, peer: str, reason: Hold) -> SlotRef | None:
        """A free slot under a new epoch, or None where none is free or `peer` is at its quota."""
        if not self.can_acquire(peer):
            return None
        index = self._free.pop()
        self._epochs[index] += 1
        self._per_peer[peer] += 1
        self._set(index, peer, reason)
        self._check()
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
        self._set(slot.index, peer, reason)
        self._check()

    def release(self, slot: SlotRef) -> None:
        """Give the slot back. The caller has the proof that nothing touches it any more.

        Raises:
            LocalProtocolError: it is free already, or the epoch is stale. Nothing changes.
        """
        self._drop(slot)
        self._free.append(slot.index)
        self._check()

    def retire(self, slot: SlotRef) -> None:
        """End the slot for good. The caller has taken its memory away, so that nothing can touch it.

        Raises:
            LocalProtocolError: as for `release`.
        """
        self._drop(slot)
        self.retired += 1
        self._check()

    def grow(self, count: int) -> None:
        """Add `count` free slots behind the last one. Their memory is there, and told to whoever may be granted one."""
        self._free[:0] = reversed(range(self.total, self.total + count))
        self._epochs += [0] * count
        self.total += count
        self._check()

    def _set(self, index: int, peer: str, reason: Hold) -> None:
        before = self._holds.get(index)
        if before is not None and before[1] is Hold.UNPROVEN:
            self._proven(peer)
        self._holds[index] = (peer, reason)
        if reason is Hold.UNPROVEN:
            self._unproven[peer] += 1

    def _proven(self, peer: str) -> None:
        self._unproven[peer] -= 1
        if not self._unproven[peer]:
            del self._unproven[peer]

    def _drop(self, slot: SlotRef) -> None:
        peer, reason = self._hold_of(slot)
        del self._holds[slot.index]
        if reason is Hold.UNPROVEN:
            self._proven(peer)
        self._per_peer[peer] -= 1
        if not self._per_peer[peer]:
            del self._per_peer[peer]

    def _hold_of(self, slot: SlotRef) -> tuple[str, Hold]:
        hold = self._holds.get(slot.index)
        if hold is None or self._epochs[slot.index] != slot.epoch:
            raise LocalProtocolError(f"slot {slot.index} epoch {slot.epoch} is not held")
        return hold

    def _check(self) -> None:
        """Every slot is in one place; asked after each change, since all safety rests on it."""
        if len(self._free) + len(self._holds) + self.retired != self.total:
            text = f"{len(self._free)} free + {len(self._holds)} held + {self.retired} retired is not {self.total}"
            raise LocalProtocolError(f"slots were lost or doubled: {text}")
