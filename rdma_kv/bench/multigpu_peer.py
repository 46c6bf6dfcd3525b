"""`rdma-kv bench multigpu`, part `peer`: the driver's copies between two GPUs, and the kernel that needs no staging.

The kernel runs on the GPU that it writes, and reads the other one's pages: that is faster by a hundredth than the other way
round. One step of each row size shows the other way.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from rdma_kv.bench.goals import Meter, Missing
from rdma_kv.bench.gpu_memory import SPREAD, KvMemory, Pages, Rows, content, wrong_rows
from rdma_kv.bench.gpu_rounds import Step, faster, run_rounds
from rdma_kv.bench.gpu_steps import size_name
from rdma_kv.bench.rows import Row
from rdma_kv.errors import RdmaKvError
from rdma_kv.types import Role

if TYPE_CHECKING:
    from rdma_kv.kernels.bench.peers import Move
    from rdma_kv.kernels.launch import Chunk

PEER_GOAL = 0.93
"""Goal: of the copy's rate, by the peer kernel, for the largest size."""
PROGRAMS = (4, 8, 12, 16, 20, 24, 28, 32, 48, 64, 96, 132)
PUSHING = 132  # programs of the kernel that writes the other GPU's pages
ROW_BYTES = (512, 1152, 4096)
SIZES = (1 << 30, 64 << 20, 1 << 20)

_SLOT_BYTES = 1 << 30  # of what a chunk has, where nothing is staged


class Peers:
    """Pools on two GPUs that reach each other's memory.

    Raises:
        RdmaKvError: (of the constructor) they do not.
    """

    def __init__(self, ordinals: tuple[int, int], most_bytes: int) -> None:
        import torch

        from rdma_kv.kernels.bench.peers import open_peers

        self._devices = {role: torch.device("cuda", ordinal) for role, ordinal in zip(Role, ordinals, strict=True)}
        open_peers(*self._devices.values())
        self._pools = {
            role: KvMemory(SPREAD * most_bytes, ordinal) for role, ordinal in zip(Role, ordinals, strict=True)
        }
        self._sent = content(SPREAD * most_bytes, 0, ordinals[1])
        self._pools[Role.PREFILL].write(self._sent)

    def copy(self, num_bytes: int) -> Step:
        """The driver's copy."""
        from rdma_kv.kernels.bench.peers import copy_s

        source, target = (self._pools[role].buffer[:num_bytes] for role in (Role.PREFILL, Role.DECODE))
        return Step(f"peer copy, {size_name(num_bytes)}", num_bytes, partial(copy_s, target, source))

    def kernel(
        self,
        move: Move,
        row_bytes: int,
        num_bytes: int,
        programs: int,
        *,
        where: Role = Role.DECODE,
        checked: bool = False,
    ) -> Step:
        """Scattered rows to scattered rows in one launch.

        Args:
            where: whose GPU runs it.
            checked: compare what has arrived, once.
        """
        from rdma_kv.kernels.bench.peers import move_s

        rows = Rows(row_bytes)
        tokens = rows.tokens(num_bytes)
        chunks = {role: self._chunks(role, rows, tokens) for role in Role}
        name = f"peer kernel, {size_name(num_bytes)}, rows of {row_bytes:,} B, {programs} programs"
        name += "" if where is Role.DECODE else " on the source's GPU"
        measure = partial(move_s, move, chunks[Role.PREFILL], chunks[Role.DECODE], self._devices[where], programs)

        def check() -> None:
            self._pools[Role.DECODE].wipe()
            measure()
            wrong = wrong_rows(rows, tokens, self._pools[Role.DECODE].read(), self._sent)
            if wrong:
                raise RdmaKvError(f"{wrong} rows are wrong")

        step = Step(name, tokens * rows.token_bytes, measure)
        if checked:
            step.check = check
        return step

    def _chunks(self, role: Role, rows: Rows, tokens: int) -> list[Chunk]:
        pool = self._pools[role]
        return Pages(rows, role, pool.length_bytes).chunks(pool, tokens, pool.address, _SLOT_BYTES)


def measure_peers(ordinals: tuple[int, int], rounds: int, meter: Meter, *, quick: bool) -> list[Row]:
    """Run it all."""
    try:
        from rdma_kv.kernels.peer import move

        peers = Peers(ordinals, SIZES[0])
    except (RdmaKvError, ImportError) as exc:
        return [Missing("two GPUs in one process", f"missing: {exc}", "")]
    copies = {size: peers.copy(size) for size in SIZES}
    programs = PROGRAMS[1::2] if quick else PROGRAMS
    curves = {
        (row_bytes, size): {
            count: peers.kernel(move, row_bytes, size, count, checked=count in {programs[0], programs[-1]})
            for count in programs
        }
        for row_bytes in ROW_BYTES
        for size in SIZES
    }
    pushed = [
        peers.kernel(move, row_bytes, SIZES[0], PUSHING, where=Role.PREFILL, checked=True) for row_bytes in ROW_BYTES
    ]
    steps = [*copies.values(), *(step for curve in curves.values() for step in curve.values()), *pushed]
    run_rounds("peers", steps, rounds, meter)
    return [*peer_rows(copies, curves), *(row for step in steps for row in step.rows)]


def peer_rows(copies: Mapping[int, Step], curves: Mapping[tuple[int, int], Mapping[int, Step]]) -> list[Row]:
    """The kernel beside the copy, in the number of programs that suffices."""
    rows: list[Row] = []
    largest = max(copies)
    for (row_bytes, size), curve in curves.items():
        goal = PEER_GOAL if size == largest else None
        count = enough(copies[size], curve)
        name = f"peer kernel, {size_name(size)}, rows of {row_bytes:,} B: to the peer copy"
        rows.append(faster(name, curve[count], copies[size], goal))
        rows.append(Row(f"peer kernel, {size_name(size)}, rows of {row_bytes:,} B: programs that suffice", count, ""))
    return rows


def enough(copy: Step, curve: Mapping[int, Step]) -> int:
    """The fewest programs that meet the goal; where none do, the fastest."""
    rates = {count: step.num_bytes / step.median_s for count, step in curve.items() if step.median_s is not None}
    if not rates or copy.median_s is None:
        return min(curve)
    goal = PEER_GOAL * copy.num_bytes / copy.median_s
    fine = [count for count, rate in rates.items() if rate >= goal]
    return min(fine) if fine else max(rates, key=lambda count: rates[count])
