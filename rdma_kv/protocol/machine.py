"""A state machine as one table `{(state, event): state}`. A missing entry is the error; terminal states absorb."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from rdma_kv.errors import LocalProtocolError

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class Machine(Generic[S, E]):
    """The current state and the table that moves it.

    Args:
        table: every allowed (state, event).
        terminal: states that nothing leaves; events there change nothing.
    """

    def __init__(self, start: S, table: Mapping[tuple[S, E], S], terminal: frozenset[S]) -> None:
        self.state = start
        self.ended = start in terminal
        self._table = table
        self._terminal = terminal

    def allows(self, event: E) -> bool:
        return self.ended or (self.state, event) in self._table

    def step(self, event: E) -> S:
        """Move to the next state.

        Raises:
            LocalProtocolError: the table has no entry; the state stays.
        """
        if self.ended:
            return self.state
        following = self._table.get((self.state, event))
        if following is None:
            raise LocalProtocolError(f"{event.name} is not possible in {self.state.name}")
        self.state = following
        self.ended = following in self._terminal
        return following
