"""The two-process parts of `bench gpu` and `bench multigpu`, for real, on host memory and with few bytes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal

import pytest

from rdma_kv.bench import worker
from rdma_kv.bench.goals import Bound, Missing
from rdma_kv.bench.gpu_links import Link, Way
from rdma_kv.bench.gpu_paths import PARTS, PathSizes, measure_paths
from rdma_kv.bench.gpu_rounds import run_rounds
from rdma_kv.bench.gpu_steps import CONTIGUOUS, PAGES, ROWS, raw_steps, transfer_step, usual_raw
from rdma_kv.bench.gpu_team import TeamSpec, team
from rdma_kv.bench.multigpu import MultiSizes, measure_crossing, measure_pair
from rdma_kv.bench.worker import Worker
from rdma_kv.errors import RdmaKvError
from rdma_kv.transport.named import PREFERENCE

pytestmark = pytest.mark.long

MIB = 1 << 20
SIZES = PathSizes(
    programs=4,
    row_bytes=(4096, 512),
    whole_bytes=4 * MIB,
    small_bytes=64 << 10,
    host_bytes=4 * MIB,
    slot_bytes=MIB,
    pinned_slot_bytes=MIB,
    layers=4,
)
LINK = Link("nixl", Way.HOST, 512, slot_bytes=MIB)


def quiet(_text: str, _done: int, _total: int) -> None:
    """A meter."""


def pair():
    return team(TeamSpec((None,), (None,), 4 * MIB, layers=4))


@pytest.fixture(autouse=True)
def no_process_is_left():
    yield
    assert not multiprocessing.active_children()


def test_every_part_measures_every_transport():
    rows = measure_paths(tuple(PARTS), (None, None), SIZES, 1, quiet)
    named = {row.name: row for row in rows}
    assert len(named) == len(rows)
    assert not [row for row in rows if isinstance(row, Missing)]
    goals = [row for row in rows if row.goal is not None]
    assert all(isinstance(row, Bound) and isinstance(row.value, float) and row.value > 0 for row in goals)
    each = len(PREFERENCE)
    found = sorted(row.goal for row in goals)
    assert found == sorted([1.25, 20.0, 100.0, 2.5] * each * 2 + [0.8] * each)
    for row_bytes in ("4,096", "512"):
        for backend in PREFERENCE:
            assert named[f"4 MiB, rows of {row_bytes} B: transfer, {backend}"].unit == "GB/s"
            assert named[f"64 KiB, rows of {row_bytes} B: transfer, {backend}"].unit == "us"
            assert named[f"64 KiB, rows of {row_bytes} B: floor, {backend}"].unit == "us"
        for kernel in ("gather", "scatter"):
            assert named[f"{kernel} alone, rows of {row_bytes} B"].value > 0
    for name in (CONTIGUOUS, PAGES, ROWS):
        assert ".." in str(named[f"{name}, spread"].value)
    assert named["4 MiB, rows of 4,096 B: transfer, nixl, host: lane"].value in {"cma", "tcp", "rdma"}


def test_a_part_that_is_not_asked_for_starts_no_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rdma_kv.bench.gpu_paths.team", None)
    assert measure_paths(("kernels", "pipeline"), (None, None), SIZES, 1, quiet) == []


def test_several_gpus_are_the_same_processes():
    sizes = MultiSizes(
        (512, 1152), (2 * MIB, 256 << 10), MIB, crossing_bytes=2 * MIB, crossing_slot_bytes=MIB, layers=4
    )
    rows = [*measure_pair((None, None), sizes, 1, quiet), *measure_crossing((None, None), sizes, 1, quiet)]
    assert not [row for row in rows if isinstance(row, Missing)]
    goals = [row.name for row in rows if row.goal is not None]
    assert goals == [
        f"GPU 0 to 1, 2 MiB, rows of {size} B: nixl: to NIXL, one descriptor >= 0.9" for size in ("512", "1,152")
    ]
    crossing = {row.name for row in rows if "crossing" in row.name}
    assert {f"both GPUs, crossing, 2 MiB each, rows of 512 B: {backend}" for backend in PREFERENCE} <= crossing


def test_other_bytes_than_were_sent_are_noticed():
    """The control: decode compares with what another prefill rank would have sent."""
    with pair() as two:
        two.check(LINK, MIB)
        assert two.decode[0].ask("wrong_rows", LINK.wire, MIB, 1) == MIB // 512
        for name, piece, total in usual_raw(MIB):
            step = raw_steps(two, [(name, piece, total)])[name]
            run_rounds("raw", [step], 1, quiet)
            assert step.took_s
            two.decode[0].ask("wipe", True)
            assert two.decode[0].ask("wrong_pieces", piece, total) == total // piece


def test_a_transport_that_is_not_there_is_missing_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rdma_kv.bench.gpu_steps.usable", lambda name, _environ: name == "nixl")
    sizes = PathSizes(4, (512,), MIB, 64 << 10, MIB, MIB, layers=4)
    rows = {row.name: row for row in measure_paths(("processes",), (None, None), sizes, 1, quiet)}
    absent = rows["1 MiB, rows of 512 B: transfer, ucx"]
    assert (absent.ok, absent.value) == (False, "missing: ucx is not installed")
    assert rows[f"1 MiB, rows of 512 B: transfer, ucx: to {PAGES} >= 20"].ok is False
    assert rows["1 MiB, rows of 512 B: transfer, nixl"].value > 0


def test_a_process_that_dies_is_a_failed_step_and_is_cleared_away():
    with pytest.raises(RdmaKvError, match="all is over"), pair() as two:
        step = transfer_step(two, "transfer", LINK, MIB)
        run_rounds("before", [step], 1, quiet)
        assert step.took_s
        child = next(each for each in multiprocessing.active_children() if each.pid == two.decode[0].pid)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        again = transfer_step(two, "again", LINK, MIB)
        run_rounds("after", [again], 1, quiet)
        assert "decode 0 has ended" in again.missing
        raise RdmaKvError("all is over")


class Slow:
    """A side that does not answer in time."""

    async def answer(self, value: int) -> int:
        return value

    async def hang(self) -> None:
        await asyncio.sleep(60)

    async def close(self) -> None:
        """Nothing to do."""


@pytest.mark.parametrize("spawned", [False, True])
def test_a_late_answer_is_not_taken_for_the_next(spawned: bool, monkeypatch: pytest.MonkeyPatch):
    slow = Worker("slow", Slow, {}, spawned=spawned)
    assert slow.ask("answer", 1) == 1
    monkeypatch.setattr(worker, "_ANSWER_S", 0.1)
    with pytest.raises(RdmaKvError, match="did not answer"):
        slow.ask("hang")
    with pytest.raises(RdmaKvError, match="has ended"):
        slow.ask("answer", 2)
