"""`rdma-kv bench gpu` in one process: the kernels of an agent with their copies to and from pinned memory, overlapped.

What is measured are the `CudaKernels` of an agent, as its mover uses them: some chunks are under way at a time, each slot is
used again once its chunk is done. Beside them are the driver's copies of the same bytes in one piece.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from rdma_kv.bench.goals import Meter
from rdma_kv.bench.gpu_memory import SPREAD, KvMemory, Pages, Rows, content, wrong_rows
from rdma_kv.bench.gpu_rounds import Step, faster, run_rounds
from rdma_kv.bench.gpu_steps import size_name
from rdma_kv.bench.rows import Row
from rdma_kv.config import GpuConfig
from rdma_kv.errors import RdmaKvError
from rdma_kv.kernels.programs import LANE_GB_S, programs_for
from rdma_kv.kernels.work import Work
from rdma_kv.types import Role

if TYPE_CHECKING:
    from rdma_kv.packer_cuda import CudaKernels

DOWN_GOAL, BOTH_GOAL = 0.9, 0.85
"""Goals: of the plain copies' rate, to pinned memory and both ways at once."""
CPU_GOAL_US = 150.0
"""Goal: CPU time of the process for a chunk stays below."""
SLOWER_GOAL_PERCENT = 10.0
"""Goal: a decode-like step beside gathers gets slower by less."""

PAYLOAD_BYTES = 512 << 20
CHUNK_BYTES = (32 << 20, 4 << 20)
"""Of a slot. Goals of rates are for the first: slots of 32 MiB or more suit a GPU."""
_LANE = "pinned+cma"
_SLOTS = 16
_UNDER_WAY = 8  # chunks, as of the one peer of an agent with so many slots
_ROWS = Rows(4096)

Kernel = Callable[[Work], Awaitable[int | None]]


class Pipeline:
    """Two pools, slots for either way, and pinned memory. Close it.

    Args:
        ordinal: of the GPU; None puts everything into host memory, for tests of the bench.
        kernels: what is measured, not started.
    """

    def __init__(
        self,
        ordinal: int | None,
        kernels: CudaKernels,
        *,
        payload_bytes: int = PAYLOAD_BYTES,
        slot_bytes: int = max(CHUNK_BYTES),
    ) -> None:
        from rdma_kv.kernels.bench import copies

        self._runner = asyncio.Runner()
        self._kernels = kernels
        self._tokens = _ROWS.tokens(payload_bytes)
        self._payload_bytes = payload_bytes
        self._pools = {role: KvMemory(SPREAD * payload_bytes, ordinal) for role in Role}
        self._pages = {role: Pages(_ROWS, role, SPREAD * payload_bytes) for role in Role}
        self._slots = {role: KvMemory(_SLOTS * slot_bytes, ordinal) for role in Role}
        self._pinned = {role: copies.host_memory(payload_bytes, pinned=ordinal is not None) for role in Role}
        self._works: dict[tuple[Role, int], list[Work]] = {}
        self._sent = content(SPREAD * payload_bytes, 0, ordinal)
        self._pools[Role.PREFILL].write(self._sent)
        self._runner.run(kernels.start())
        kernels.use_lane(_LANE)

    def close(self) -> None:
        self._runner.run(self._kernels.close())
        self._runner.close()

    def works(self, role: Role, chunk_bytes: int) -> list[Work]:
        """All chunks: gathers of prefill, scatters of decode. Made once, so that the clock is not on it."""
        if (role, chunk_bytes) not in self._works:
            self._works[role, chunk_bytes] = self._make(role, chunk_bytes)
        return self._works[role, chunk_bytes]

    def _make(self, role: Role, chunk_bytes: int) -> list[Work]:
        slots = itertools.cycle(
            range(self._slots[role].address, self._slots[role].address + _SLOTS * chunk_bytes, chunk_bytes)
        )
        chunks = self._pages[role].chunks(self._pools[role], self._tokens, 0x1000, chunk_bytes)
        bounces = range(int(self._pinned[role].data_ptr()), 1 << 62, chunk_bytes)
        return [
            Work(replace(chunk, packed_address=slot), bounce)
            for chunk, slot, bounce in zip(chunks, slots, bounces, strict=False)
        ]

    def down_s(self, chunk_bytes: int) -> float:
        """Gather and copy to pinned memory."""
        return self._timed(_all(self._kernels.gather, self.works(Role.PREFILL, chunk_bytes)))

    def both_s(self, chunk_bytes: int) -> float:
        """Gather and copy to pinned memory, while others are copied from pinned memory and scattered."""
        return self._timed(
            _all(self._kernels.gather, self.works(Role.PREFILL, chunk_bytes)),
            _all(self._kernels.scatter, self.works(Role.DECODE, chunk_bytes)),
        )

    def cpu_s(self, measure: Callable[[int], float], chunk_bytes: int, ways: int) -> float:
        """CPU time of all threads for a chunk of `measure`."""
        chunks = ways * len(self.works(Role.PREFILL, chunk_bytes))
        begin = time.process_time()
        measure(chunk_bytes)
        return (time.process_time() - begin) / chunks

    def plain_down_s(self) -> float:
        from rdma_kv.kernels.bench import copies

        return copies.copy_s(self._pinned[Role.PREFILL], self._flat(Role.PREFILL))

    def plain_both_s(self) -> float:
        """The slower of two plain copies that run at once."""
        from rdma_kv.kernels.bench import copies

        down = partial(self._pinned[Role.PREFILL].copy_, self._flat(Role.PREFILL), non_blocking=True)
        up = partial(self._flat(Role.DECODE).copy_, self._pinned[Role.DECODE], non_blocking=True)
        return copies.slower_of_both_s(down, up, self._flat(Role.DECODE).device)

    def check(self, chunk_bytes: int) -> None:
        """Gather everything, copy it over, scatter it, and compare.

        Raises:
            RdmaKvError: a row is wrong.
        """
        self._pools[Role.DECODE].wipe()
        self.down_s(chunk_bytes)
        self._pinned[Role.DECODE].copy_(self._pinned[Role.PREFILL])
        self._timed(_all(self._kernels.scatter, self.works(Role.DECODE, chunk_bytes)))
        wrong = wrong_rows(_ROWS, self._tokens, self._pools[Role.DECODE].read(), self._sent)
        if wrong:
            raise RdmaKvError(f"{wrong} rows that went through pinned memory are wrong")

    def _flat(self, role: Role) -> Any:  # noqa: ANN401 - a tensor
        return self._pools[role].buffer[: self._payload_bytes]

    def _timed(self, *coroutines: Coroutine[Any, Any, None]) -> float:
        async def run() -> float:
            begin = time.perf_counter()
            await asyncio.gather(*coroutines)
            return time.perf_counter() - begin

        return self._runner.run(run())


async def _all(kernel: Kernel, works: Sequence[Work]) -> None:
    """All works, some at a time. Those of one slot follow one another, as the slots are a multiple of what is under way."""

    async def some(those: Sequence[Work]) -> None:
        for work in those:
            await kernel(work)

    await asyncio.gather(*(some(works[first::_UNDER_WAY]) for first in range(_UNDER_WAY)))


def measure_pipeline(ordinal: int, rounds: int, meter: Meter) -> list[Row]:
    """Run it all.

    Raises:
        RdmaKvError: the kernels cannot be made.
    """
    from rdma_kv.packer_cuda import CudaKernels

    pipeline = Pipeline(ordinal, CudaKernels(GpuConfig(ordinal)))
    try:
        return [*_pipeline_rows(pipeline, rounds, meter), *_beside_rows(ordinal, rounds, meter), *_budget_rows()]
    finally:
        pipeline.close()


def _pipeline_rows(pipeline: Pipeline, rounds: int, meter: Meter) -> list[Row]:
    down = Step("copy, GPU to pinned", PAYLOAD_BYTES, pipeline.plain_down_s)
    both = Step("copies both ways at once, the slower", PAYLOAD_BYTES, pipeline.plain_both_s)
    ours: dict[int, tuple[Step, Step]] = {}
    cpu: dict[int, tuple[Step, Step]] = {}
    for size in CHUNK_BYTES:
        what = f"chunks of {size_name(size)}"
        check = partial(pipeline.check, size)
        ours[size] = (
            Step(f"gather and copy to pinned, {what}", PAYLOAD_BYTES, partial(pipeline.down_s, size), check),
            Step(
                f"the same while others are copied back and scattered, {what}",
                PAYLOAD_BYTES,
                partial(pipeline.both_s, size),
            ),
        )
        cpu[size] = (
            Step(f"CPU time of a chunk to pinned, {what}", 0, partial(pipeline.cpu_s, pipeline.down_s, size, 1)),
            Step(f"CPU time of a chunk both ways, {what}", 0, partial(pipeline.cpu_s, pipeline.both_s, size, 2)),
        )
    steps = [down, both, *itertools.chain(*ours.values()), *itertools.chain(*cpu.values())]
    run_rounds("pipeline", steps, rounds, meter)
    rows: list[Row] = []
    for size, (one, two) in ours.items():
        goals = (DOWN_GOAL, BOTH_GOAL) if size == CHUNK_BYTES[0] else (None, None)
        rows.append(faster(f"{one.name}: to the copy", one, down, goals[0]))
        rows.append(faster(f"{two.name}: to the copies", two, both, goals[1]))
    for step in itertools.chain(*cpu.values()):
        value = step.why if step.median_s is None else 1e6 * step.median_s
        rows.append(Row(f"{step.name} < {CPU_GOAL_US:g}", value, "us", CPU_GOAL_US))
    return [*rows, *(row for step in steps for row in step.rows)]


def _beside_rows(ordinal: int, rounds: int, meter: Meter) -> list[Row]:
    import torch

    from rdma_kv.kernels.bench.beside import Beside

    bench = Beside(torch.device("cuda", ordinal))
    alone = Step("decode-like step alone", 0, bench.step_s)
    alone_s = [bench.step_s() for _ in range(3)][-1]
    lanes: dict[int, list[str]] = {}
    for lane in LANE_GB_S:
        lanes.setdefault(programs_for([lane]), []).append(lane)
    steps = []
    for programs, those in lanes.items():
        launch_s = [bench.launch_s(programs) for _ in range(2)][-1]
        name = f"decode-like step beside gathers in {programs} programs, for {' and '.join(those)}"
        steps.append(Step(name, 0, partial(bench.step_s, programs, launch_s, alone_s)))
    run_rounds("beside", [alone, *steps], rounds, meter)
    rows = [_slower(step, alone) for step in steps]
    return [*rows, *(row for step in (alone, *steps) for row in step.rows)]


def _slower(step: Step, alone: Step) -> Row:
    name = f"{step.name}: slower by < {SLOWER_GOAL_PERCENT:g}"
    if step.median_s is None or alone.median_s is None:
        return Row(name, step.why if step.median_s is None else alone.why, "%", SLOWER_GOAL_PERCENT)
    slower = statistics.median(step.took_s) / statistics.median(alone.took_s) - 1
    return Row(name, 100 * slower, "%", SLOWER_GOAL_PERCENT)


def _budget_rows() -> list[Row]:
    """The numbers of programs that agents choose, by lane."""
    return [
        Row(f"programs that agents choose for {lane} ({rate:g} GB/s)", programs_for([lane]), "")
        for lane, rate in LANE_GB_S.items()
    ]
