"""Who is told when unproven slots have left nothing to hand out."""

from __future__ import annotations

from types import SimpleNamespace

from rdma_kv.slots import Hold, SlotPool
from rdma_kv.turns import Turns

PEER = "peer#1"
MANY = 2000  # more than Python nests calls


class Waiting(SimpleNamespace):
    __hash__ = object.__hash__


def blocked_pool() -> SlotPool:
    pool = SlotPool(2)
    slot = pool.acquire(PEER, Hold.GRANTED)
    assert slot is not None
    pool.change(slot, Hold.UNPROVEN)
    return pool


def test_many_that_wait_are_told_one_after_the_other_and_each_once():
    told: list[int] = []

    def perform(entry, _actions) -> None:
        """As the mover does: a transfer that has failed wants nothing more, and slots are handed out again."""
        told.append(entry.number)
        turns.forget(entry)
        turns.hand_out()

    def on_scarce(name: str) -> None:
        for entry in turns.wanting(name):
            perform(entry, [])

    turns = Turns(blocked_pool(), perform=perform, on_scarce=on_scarce)
    peer = SimpleNamespace(name=PEER)
    machine = SimpleNamespace(wanting=1, must_answer=False)
    for number in range(MANY):
        turns._wanting.setdefault(PEER, {})[Waiting(number=number, peer=peer, machine=machine)] = None
    turns.hand_out()
    assert told == list(range(MANY))
