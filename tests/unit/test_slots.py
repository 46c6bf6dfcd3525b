"""The slot pool under random use: nothing is lost, given twice, or given back without being held."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule
from protocol_rig import seeded

from rdma_kv.errors import ConfigError, LocalProtocolError
from rdma_kv.slots import Hold, SlotPool, SlotRef

PEERS = ("a", "b", "c")


def take(pool: SlotPool, peer: str = "a", reason: Hold = Hold.GRANTED) -> SlotRef:
    slot = pool.acquire(peer, reason)
    assert slot is not None
    return slot


@pytest.mark.parametrize("total", [-1, 0, 1])
def test_a_pool_has_two_slots_at_least(total: int):
    with pytest.raises(ConfigError) as refused:
        SlotPool(total)
    assert refused.value.field == "slots"


@pytest.mark.parametrize(("total", "quota"), [(2, 1), (3, 1), (4, 2), (7, 3), (16, 8)])
def test_a_peer_holds_half_at_most(total: int, quota: int):
    pool = SlotPool(total)
    assert pool.quota == quota
    held = [take(pool) for _ in range(quota)]
    assert not pool.can_acquire("a")
    assert pool.acquire("a", Hold.GRANTED) is None
    assert pool.can_acquire("b")
    pool.change(held[0], Hold.UNPROVEN)
    assert not pool.can_acquire("a"), "a slot without a proof counts too"
    pool.release(held[0])
    assert pool.can_acquire("a")


def test_the_slot_that_came_back_last_is_used_next():
    pool = SlotPool(4)
    first = [take(pool, "a"), take(pool, "a"), take(pool, "b"), take(pool, "b")]
    assert [slot.index for slot in first] == [0, 1, 2, 3]
    for index in (2, 0, 3, 1):
        pool.release(first[index])
    again = [take(pool, "a"), take(pool, "a"), take(pool, "b"), take(pool, "b")]
    assert [slot.index for slot in again] == [1, 3, 0, 2]


def test_every_acquisition_has_an_epoch_of_its_own():
    pool = SlotPool(2)
    seen = set()
    for _ in range(5):
        slot = take(pool)
        assert slot not in seen
        assert slot.epoch >= 1, "the wire knows no epoch 0"
        seen.add(slot)
        pool.release(slot)


def test_a70_a_stale_or_foreign_slot_is_refused_and_nothing_changes():
    pool = SlotPool(2)
    old = take(pool)
    pool.release(old)
    new = take(pool, "b")
    other = take(pool)
    assert new.index == old.index
    before = (pool.free, pool.held())
    for wrong in (old, SlotRef(new.index, new.epoch + 1), SlotRef(2, 1), SlotRef(-1, 1)):
        assert not pool.is_live(wrong, "b")
        for use in (pool.release, pool.reason, lambda slot: pool.change(slot, Hold.UNPROVEN)):
            with pytest.raises(LocalProtocolError):
                use(wrong)
        assert (pool.free, pool.held()) == before
    assert pool.is_live(new, "b")
    assert not pool.is_live(new, "a")
    assert pool.is_live(other, "a")


def test_what_is_held_is_told_by_peer_and_reason():
    pool = SlotPool(6)
    slots = [take(pool, "a", Hold.GATHER), take(pool, "a", Hold.GATHER), take(pool, "b", Hold.GRANTED)]
    pool.change(slots[1], Hold.WRITE)
    assert pool.reason(slots[1]) is Hold.WRITE
    assert pool.held() == {("a", Hold.GATHER): 1, ("a", Hold.WRITE): 1, ("b", Hold.GRANTED): 1}
    for slot in slots:
        pool.release(slot)
    assert pool.held() == {}
    assert not pool._per_peer, "every incarnation is a new peer: nothing of an old one may stay"


def test_a_retired_slot_is_never_handed_out_again_and_new_ones_take_over():
    pool = SlotPool(2)
    old = take(pool)
    pool.retire(old)
    assert (pool.total, pool.working, pool.retired, pool.free) == (2, 1, 1, 1)
    for use in (pool.release, pool.retire, pool.reason):
        with pytest.raises(LocalProtocolError):
            use(old)
    pool.grow(2)
    assert (pool.total, pool.working, pool.free, pool.quota) == (4, 3, 3, 1)
    assert sorted(take(pool, peer).index for peer in "abc") == [1, 2, 3]
    assert not pool.free


def test_unproven_slots_block_their_peer_at_its_quota_and_all_when_nothing_else_is_left():
    pool = SlotPool(4)
    slots = [take(pool) for _ in range(2)]
    assert not pool.is_blocked("a"), "it gets one when one of its own comes back"
    for slot in slots:
        pool.change(slot, Hold.UNPROVEN)
    assert pool.is_blocked("a")
    assert not pool.is_blocked("b")
    assert (pool.usable, pool.unproven()) == (2, {"a": 2})
    assert pool.missing("a", wanted=4) == 2
    others = [take(pool, "b") for _ in range(2)]
    for slot in others:
        pool.change(slot, Hold.UNPROVEN)
    assert pool.usable == 0
    assert pool.is_blocked("c")
    pool.grow(pool.missing("a", wanted=4))
    assert not pool.is_blocked("a")
    assert pool.usable == 4
    for slot in (*slots, *others):
        pool.release(slot)
    assert pool.unproven() == {}


def test_a_pool_that_has_lost_a_slot_says_so_at_the_next_change():
    pool = SlotPool(3)
    pool._free.pop()
    with pytest.raises(LocalProtocolError, match="lost or doubled"):
        pool.acquire("a", Hold.GATHER)


class AnyUse(RuleBasedStateMachine):
    """Random use beside a plain model: who holds which slot for what, and the order of the free ones."""

    live = Bundle("live")
    dead = Bundle("dead")

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(5)
        self.free = list(reversed(range(5)))
        self.retired = 0
        self.holds: dict[SlotRef, tuple[str, Hold]] = {}
        self.ever: set[SlotRef] = set()

    @rule(target=live, peer=st.sampled_from(PEERS), reason=st.sampled_from(Hold))
    def acquire(self, peer: str, reason: Hold) -> SlotRef | None:
        mine = sum(holder == peer for holder, _ in self.holds.values())
        may = bool(self.free) and mine < max(1, (self.pool.total - self.retired) // 2)
        assert self.pool.can_acquire(peer) == may
        slot = self.pool.acquire(peer, reason)
        assert (slot is not None) == may
        if slot is not None:
            assert slot.index == self.free.pop()
            assert slot not in self.ever
            self.ever.add(slot)
            self.holds[slot] = (peer, reason)
        return slot

    @rule(target=dead, slot=consumes(live))
    def release(self, slot: SlotRef | None) -> SlotRef | None:
        if slot is not None:
            self.pool.release(slot)
            del self.holds[slot]
            self.free.append(slot.index)
        return slot

    @rule(target=dead, slot=consumes(live))
    def retire(self, slot: SlotRef | None) -> SlotRef | None:
        if slot is not None:
            self.pool.retire(slot)
            del self.holds[slot]
            self.retired += 1
        return slot

    @rule(count=st.integers(1, 3))
    def grow(self, count: int) -> None:
        self.free[:0] = reversed(range(self.pool.total, self.pool.total + count))
        self.pool.grow(count)

    @rule(slot=live, reason=st.sampled_from(Hold))
    def change(self, slot: SlotRef | None, reason: Hold) -> None:
        if slot is not None:
            self.pool.change(slot, reason)
            self.holds[slot] = (self.holds[slot][0], reason)

    @rule(slot=dead)
    def use_again(self, slot: SlotRef | None) -> None:
        if slot is not None:
            with pytest.raises(LocalProtocolError):
                self.pool.release(slot)
            assert not any(self.pool.is_live(slot, peer) for peer in PEERS)

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert self.pool.free == len(self.free)
        assert self.pool.free + sum(self.pool.held().values()) + self.retired == self.pool.total
        assert self.pool.retired == self.retired
        unproven = [peer for peer, reason in self.holds.values() if reason is Hold.UNPROVEN]
        assert self.pool.unproven() == {peer: unproven.count(peer) for peer in set(unproven)}
        for slot, (peer, reason) in self.holds.items():
            assert self.pool.is_live(slot, peer)
            assert self.pool.reason(slot) is reason


AnyUse.TestCase.settings = settings(seeded, max_examples=60, stateful_step_count=30)
TestAnyUse = AnyUse.TestCase
