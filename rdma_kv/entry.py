"""One transfer on one link as the shell sees it: its machine, its pages, its tasks and its outcome."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rdma_kv.errors import RdmaKvError
from rdma_kv.peer import Peer
from rdma_kv.planner import PageTables
from rdma_kv.protocol.incoming import IncomingTransfer
from rdma_kv.protocol.outgoing import OutgoingTransfer


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
