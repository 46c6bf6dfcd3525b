"""The turned clock and the judge of the fault matrix: what they promise, and that they can fail."""

from __future__ import annotations

import asyncio
import time

import pytest
from matrix import TURNED, Cell, Fault, Lane, Point, Victim, expected
from trials import Ended, Verdict
from turned import Hang, on_host, run_turned

from rdma_kv.errors import PeerLostError


def test_time_passes_at_once_and_in_order():
    async def work(loop):
        begin, order = loop.now_s, []

        async def sleeper(seconds):
            await asyncio.sleep(seconds)
            order.append((seconds, round(loop.now_s - begin, 6)))

        await asyncio.gather(*map(sleeper, (3600.0, 1.0, 60.0)))
        return order

    real = time.monotonic()
    assert run_turned(work) == [(1.0, 1.0), (60.0, 60.0), (3600.0, 3600.0)]
    assert time.monotonic() - real < 5.0


def test_a_stopped_host_does_nothing_until_it_goes_on():
    async def work(loop):
        noted = []

        async def ticking(name):
            for _ in range(4):
                await asyncio.sleep(1.0)
                noted.append((name, round(loop.now_s - 1000.0, 6)))

        tasks = [on_host(name, lambda name=name: ticking(name)) for name in ("a", "b")]
        await asyncio.sleep(1.5)
        loop.stop_host("a")
        await asyncio.sleep(10.0)
        loop.resume_host("a")
        await asyncio.gather(*tasks)
        return noted

    noted = run_turned(work)
    assert [at for name, at in noted if name == "b"] == [1.0, 2.0, 3.0, 4.0]
    assert [at for name, at in noted if name == "a"] == [1.0, 11.5, 12.5, 13.5]


def test_a_hang_is_said_and_not_waited_for():
    async def work(loop):
        await asyncio.Event().wait()

    with pytest.raises(Hang, match="nothing can happen"):
        run_turned(work)


def judged(cell: Cell, *ends: Ended) -> list[str]:
    verdict = Verdict(cell, 0, list(ends))
    verdict.judge(cell, TURNED, expected(cell), {"prefill/0"})
    return verdict.problems


LOST = PeerLostError("peer", "gone")


@pytest.mark.parametrize(
    ("fault", "ends", "says"),
    [
        (Fault.KILL, [Ended("decode/0", LOST, 0.5)], None),
        (Fault.KILL, [Ended("decode/0", LOST, 1.5)], "too late"),
        (Fault.KILL, [Ended("decode/0", None, 0.5)], "should have failed"),
        (Fault.STALL, [Ended("prefill/0", LOST, 0.5), Ended("decode/0", LOST, 0.5)], "should have succeeded"),
        (Fault.DROP, [Ended("prefill/0", None, 0.5), Ended("decode/0", LOST, 0.5)], "all sends succeeded"),
        (Fault.DROP, [Ended("prefill/0", LOST, 9.0), Ended("decode/0", LOST, 9.0)], None),
    ],
)
def test_control_the_judge_sees_what_is_wrong(fault, ends, says):
    problems = judged(Cell(fault, Victim.PREFILL, Point.AFTER_GRANT, Lane.LOOPBACK, 1), *ends)
    assert bool(problems) == (says is not None)
    assert says is None or any(says in problem for problem in problems)
