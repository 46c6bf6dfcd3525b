"""Memory that is used again while a stopped host still has a WRITE in the middle; and the same with a broken hold.

One host stops in a WRITE. Its counterpart's call ends, its pages are used again, and a second request, with somebody else,
goes through the same staging at once. Then the host goes on. Not a byte may have been poisoned: no copy from staging that
was filled after the post, none into staging that was granted to somebody else. The control hands slots out without a proof,
as a mistaken product would, and the oracle must see it.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from matrix import Cell, Fault, Lane, Point, Victim
from rig import Side
from seams import installed
from trials import Trial, Verdict, _small_turns
from turned import TurnedLoop, run_turned

from rdma_kv.errors import LocalProtocolError
from rdma_kv.slots import Hold, SlotPool, SlotRef
from rdma_kv.topology import Topology
from rdma_kv.transport.loopback import LoopbackEndpoint
from rdma_kv.types import Role


class ReuseTrial(Trial):
    """Two replicas a side; the victim is the first of its side."""

    def sides(self) -> tuple[Side, Side]:
        topology = Topology.with_layers(4, tp=2, dp=2)
        return Side("prefill", Role.PREFILL, topology, pages=40), Side("decode", Role.DECODE, topology, pages=40)

    async def run(self, folder: Path) -> Verdict:
        victim = self.cell.victim
        other = (1, 0) if victim is Victim.PREFILL else (0, 1)  # (prefill, decode) of the second request
        with installed(self.seam), self.oracle.watching():
            async with self.cluster(folder):
                for request, pair in ((1, (0, 0)), (2, other)):
                    assert not any((await self.move(request, *pair)).values())
                self.arm()
                self.calls = self.begin(3, 0, 0, under_test=True)
                survivor = "decode/0" if victim is Victim.PREFILL else "prefill/0"
                await asyncio.wait([self.calls[survivor]])
                await asyncio.sleep(self.times.quiesce + 0.5)  # what waits for a proof has waited
                for request in (4, 5, 6):
                    errors = await self.move(request, *other)
                    if any(errors.values()):
                        self.verdict.problems.append(f"request {request} beside the stopped host: {errors}")
                await asyncio.wait(self.calls.values())
                await asyncio.sleep(2 * self.times.lease)
                self.verdict.poisoned_bytes += self.oracle.poisoned_bytes
                await self._close()
        return self.verdict


def run_reuse(victim: Victim, seed: int = 0) -> Verdict:
    """One run; `poisoned_bytes` of the verdict is what matters."""
    cell = Cell(Fault.STOP, victim, Point.DURING_WRITE, Lane.LOOPBACK, 1)

    async def work(loop: TurnedLoop) -> Verdict:
        return await ReuseTrial(cell, seed, loop).run(Path(folder))

    with tempfile.TemporaryDirectory(prefix="rdma-kv-faults-") as folder, _small_turns():
        return run_turned(work)


@contextlib.contextmanager
def broken_hold() -> Iterator[None]:
    """A product with a mistake: unproven slots are free at once, and fences say that they fenced."""
    from rdma_kv.transport.nixl import NixlEndpoint
    from rdma_kv.transport.ucx import UcxEndpoint

    change, release = SlotPool.change, SlotPool.release

    def broken_change(self: SlotPool, slot: SlotRef, reason: Hold) -> None:
        if reason is Hold.UNPROVEN:
            release(self, slot)
        else:
            change(self, slot, reason)

    def tolerant_release(self: SlotPool, slot: SlotRef) -> None:
        with contextlib.suppress(LocalProtocolError):  # it was given back before its time
            release(self, slot)

    async def nothing(self: object) -> None:
        return None

    with contextlib.ExitStack() as stack:
        stack.enter_context(_replaced(SlotPool, "change", broken_change))
        stack.enter_context(_replaced(SlotPool, "release", tolerant_release))
        for kind in (LoopbackEndpoint, NixlEndpoint, UcxEndpoint):
            for name in ("fence_source", "fence_target", "close"):
                stack.enter_context(_replaced(kind, name, nothing))
        yield


@contextlib.contextmanager
def _replaced(kind: type, name: str, by: Callable[..., object]) -> Iterator[None]:
    before = getattr(kind, name)
    setattr(kind, name, by)
    try:
        yield
    finally:
        setattr(kind, name, before)
