"""One transfer on one link as the shell sees it: its machine, its pages, its tasks and its outcome."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rdma_kv.errors import RdmaKvError
from rdma_kv.peer import Peer
from rdma_kv.planner import Box, PageTables
from rdma_kv.protocol.incoming import IncomingTransfer
from rdma_kv.protocol.outgoing import OutgoingTransfer
from rdma_kv.types import Interval


class Ready(NamedTuple):
    """A CUDA event that makes a part of the pages ready: layers (positions in the component) and token positions."""

    component: int
    layers: Interval
    tokens: Interval
    event: Any


@dataclass
class StageTimes:
    """Seconds spent in each stage, summed over boxes (boxes overlap)."""

    gather: float = 0.0
    write: float = 0.0
    scatter: float = 0.0


@dataclass(eq=False)
class Entry:
    """One transfer on one link, with what the shell needs to serve it.

    Attributes:
        events: of pages whose kernels may still run.
        before: CUDA events before which no page is written; empty once they have fired.
        failed: resolved with the error when the transfer fails, while kernels may still touch the caller's pages.
        outcome: resolved once, when the caller's pages are no longer touched: None or the error.
    """

    peer: Peer
    machine: OutgoingTransfer | IncomingTransfer
    tables: PageTables
    outcome: asyncio.Future[RdmaKvError | None]
    failed: asyncio.Future[RdmaKvError]
    times: StageTimes = field(default_factory=StageTimes)
    writes: set[asyncio.Task[None]] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None
    timer_at: float | None = None
    events: list[Ready] = field(default_factory=list)
    before: tuple[Any, ...] = ()

    def after(self, box: Box) -> tuple[Any, ...]:
        """The CUDA events that a gather of the box must wait for; some may have fired. They are not asked here: only whoever
        launches may, without disturbing the engine's captures of CUDA graphs."""
        if not self.events:
            return ()
        component = self.machine.plan.move(box.move).component
        found = {
            id(each.event): each.event
            for each in self.events
            if each.component == component and (each.layers & box.layers).size and (each.tokens & box.tokens).size
        }
        return tuple(found.values())
