"""The event loop's side of kernels on a GPU. The GPU is one that runs by itself, on host memory."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "kernels"))

from fake_gpu import Case, FakeGpu

from rdma_kv import packer_cuda as module
from rdma_kv.config import GpuConfig
from rdma_kv.errors import ClosedError, ConfigError, LocalProtocolError, RegistrationError
from rdma_kv.kernels import schedule
from rdma_kv.kernels.device import NotCompiled
from rdma_kv.kernels.programs import DEFAULT_PROGRAMS
from rdma_kv.kernels.spin import MOST_S
from rdma_kv.kernels.work import Work
from rdma_kv.packer_cuda import CudaKernels

SOON_S = 20


class Clock:
    """Turned by the test."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def gpu():
    gpu = FakeGpu(runs_by_itself=True)
    gpu.strict = True
    return gpu


@pytest.fixture
def make(gpu):
    def kernels(config=None, *, opened=None, **more):
        def open_device(config):
            if opened is not None:
                opened.wait(SOON_S)
            return gpu

        return CudaKernels(config or GpuConfig(0), open_device, **more)

    return kernels


@pytest.fixture
async def kernels(make, gpu):
    kernels = make()
    await kernels.start()
    yield kernels
    gpu.runs_by_itself = True
    assert await kernels.close()
    assert gpu.closed
    assert not kernels._pumps._poller._thread.is_alive()


def ask(kernels, *works):
    return [asyncio.ensure_future(kernels.gather(work)) for work in works]


async def launched(kernels, gathers):
    """Turns of the loop until there were so many launches."""
    async with asyncio.timeout(SOON_S):
        while kernels.launches[0] < gathers:
            await asyncio.sleep(0)


async def test_both_ways_with_all_works_of_a_turn_in_one_launch(kernels):
    cases = [Case(n) for n in range(10)]
    found = await asyncio.gather(*(kernels.gather(case.work(checksum=n > 4)) for n, case in enumerate(cases)))
    assert found == [case.checksum if n > 4 else None for n, case in enumerate(cases)]
    assert kernels.launches == (1, 0)
    for case in cases:
        assert np.array_equal(case.slot, case.paged)
        case.pool[:] = 0
    wrong = [case.work(expected=case.checksum ^ (n == 3)) for n, case in enumerate(cases)]
    found = await asyncio.gather(*map(kernels.scatter, wrong))
    assert found == [None if n != 3 else case.checksum for n, case in enumerate(cases)]
    for n, case in enumerate(cases):
        assert np.array_equal(case.slot, case.paged) is (n != 3)
    assert kernels.launches == (1, 1)


async def test_the_loop_launches_and_leaves_its_thread_as_it_was(kernels, gpu):
    """`strict` sees that each launch is inside `current`."""
    entered = []
    gpu.gather, gather = (lambda *arguments: entered.extend(gpu.inside) or gather(*arguments)), gpu.gather
    await kernels.gather(Case().work())
    assert entered == [threading.main_thread()]
    assert not gpu.inside


async def test_what_fills_a_launch_is_launched_at_once_where_the_gpu_idles(kernels, gpu, monkeypatch):
    monkeypatch.setattr(module, "LAUNCH_BYTES", Case().chunk.packed_bytes)
    gpu.runs_by_itself = False
    first, second = ask(kernels, Case(0).work(), Case(1).work())
    await asyncio.sleep(0)  # both have asked
    assert kernels.launches == (1, 0), "the second waits for its turn: the first keeps the GPU busy"
    gpu.runs_by_itself = True
    await asyncio.gather(first, second)


async def test_there_is_one_pump_a_turn_of_the_loop_whoever_asks(kernels, gpu, monkeypatch):
    small, large = Case(0).work(), Case(1, tokens=64).work()
    monkeypatch.setattr(module, "LAUNCH_BYTES", large.chunk.packed_bytes)
    assert small.chunk.packed_bytes < large.chunk.packed_bytes
    pumps, gpu.runs_by_itself = kernels._pumps, False
    looks, look = [], pumps._pump
    monkeypatch.setattr(pumps, "_pump", lambda: looks.append(1) or look())
    both = ask(kernels, small, large)
    for turn in range(6):
        before = len(looks)
        await asyncio.sleep(0)
        assert len(looks) - before <= 1, turn
    assert looks
    gpu.runs_by_itself = True
    await asyncio.gather(*both)


async def test_a_chunk_that_cannot_be_is_its_askers_error_and_nobody_elses(kernels):
    wrong = replace(Case(0).chunk, pointers=np.zeros(3, np.int64))
    with pytest.raises(ConfigError) as caught:
        await kernels.gather(Work(wrong))
    assert caught.value.field == "pointers"
    right = Case(1)
    await kernels.gather(right.work())
    assert np.array_equal(right.slot, right.paged)


# --- who notices


async def test_what_ends_while_the_loop_sleeps_wakes_it_once(kernels, gpu, monkeypatch):
    gpu.runs_by_itself = False
    loop, calls = asyncio.get_running_loop(), []
    handed_on = loop.call_soon_threadsafe

    def counted(callback, *arguments, **more):
        calls.append(threading.current_thread().name)
        return handed_on(callback, *arguments, **more)

    tasks = ask(kernels, *(Case(n).work() for n in range(10)))
    await launched(kernels, 1)
    await asyncio.sleep(2 * MOST_S)  # the loop looks no longer by itself
    assert not kernels._pumps._soon
    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    gpu.run()
    await asyncio.wait_for(asyncio.gather(*tasks), SOON_S)
    assert calls == ["rdma-kv-gpu"]


async def test_what_is_due_soon_the_loop_notices_itself_and_no_longer_than_that_pays(make, gpu, monkeypatch):
    clock = Clock()
    kernels = make(clock=clock)
    await kernels.start()
    gpu.runs_by_itself = False
    pumps, wakes = kernels._pumps, []
    monkeypatch.setattr(pumps, "_wake", lambda: None)
    monkeypatch.setattr(pumps._poller, "_wake", lambda: wakes.append(1))
    (task,) = ask(kernels, Case().work())
    await launched(kernels, 1)
    turns = pumps._schedule
    seen = []
    for _ in range(50):
        seen.append(pumps._soon)
        await asyncio.sleep(0)
    assert all(seen)  # the clock stands still, and it looks in every turn of the loop
    gpu.run()
    await asyncio.wait_for(task, SOON_S)
    assert not turns.busy
    assert not wakes
    assert not pumps._soon
    (task,) = ask(kernels, Case().work())
    await launched(kernels, 2)
    clock.now += MOST_S
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not pumps._soon  # it was due long ago
    assert pumps._poller._watched
    monkeypatch.undo()
    pumps._poller._wake = pumps._wake
    gpu.run()
    pumps._pump_soon()
    await asyncio.wait_for(task, SOON_S)
    gpu.runs_by_itself = True
    assert await kernels.close()


async def test_a_slow_producer_keeps_the_loop_asleep(kernels, gpu):
    event = gpu.event()
    (task,) = ask(kernels, Case().work(after=(event,)))
    await launched(kernels, 1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    pumps = kernels._pumps
    assert not pumps._soon
    other = Case()
    await kernels.gather(other.work())  # nobody else is held up
    assert not task.done()
    event.fire()
    assert await asyncio.wait_for(task, SOON_S) is None


async def test_other_callbacks_run_between_pumps(kernels, gpu, monkeypatch):
    """Five launches are five turns of the loop."""
    monkeypatch.setattr(schedule, "LAUNCH_WORKS", 1)
    gpu.runs_by_itself = False
    tasks, seen = ask(kernels, *(Case(n).work() for n in range(5))), []
    while len(seen) < 50 and kernels.launches[0] < 5:
        await asyncio.sleep(0)
        seen.append(kernels.launches[0])
    assert seen[-1] == 5
    assert all(after - before <= 1 for before, after in itertools.pairwise([0, *seen]))
    gpu.run()
    await asyncio.wait_for(asyncio.gather(*tasks), SOON_S)


async def test_works_that_come_while_the_loop_looks_share_a_launch(kernels, gpu):
    gpu.runs_by_itself = False
    first = ask(kernels, Case().work())
    await launched(kernels, 1)
    more = ask(kernels, *(Case(n).work() for n in range(7)))
    await launched(kernels, 2)
    gpu.run()
    await asyncio.wait_for(asyncio.gather(*first, *more), SOON_S)
    assert kernels.launches == (2, 0)


# --- what could hold up the loop


async def test_a_launch_that_held_up_the_loop_is_counted(make, gpu, monkeypatch):
    clock = Clock()
    kernels = make(clock=clock)
    await kernels.start()
    takes_s, gather = [0.0], gpu.gather

    def slow(*arguments):
        clock.now += takes_s[0]
        return gather(*arguments)

    monkeypatch.setattr(gpu, "gather", slow)
    for takes_s[0], slow_launches in ((0.0, 0), (0.001, 0), (0.003, 1), (0.003, 2), (0.0, 2)):
        await kernels.gather(Case().work())
        assert kernels.slow_launches == slow_launches
    assert await kernels.close()


async def test_a_kernel_that_is_not_compiled_is_compiled_in_a_thread(kernels, gpu):
    threads, compiled = [], threading.Event()

    def prepare():
        threads.append((threading.current_thread(), set(gpu.inside)))
        assert compiled.wait(SOON_S)

    gpu.refuse["gather"] = NotCompiled(prepare)
    case = Case(1)
    (waiting,) = ask(kernels, case.work(checksum=True))
    while not threads:
        await asyncio.sleep(0.001)
    assert await kernels.scatter(Case(2).work()) is None  # the loop goes on, and so do others
    assert await kernels.gather(Case(3).work()) is None
    assert not waiting.done()
    compiled.set()
    assert await asyncio.wait_for(waiting, SOON_S) == case.checksum
    ((thread, inside),) = threads
    assert thread is not threading.main_thread()
    assert thread in inside


async def test_a_kernel_that_cannot_be_compiled_is_an_error(kernels, gpu):
    gpu.refuse["gather"] = NotCompiled(lambda: 1 // 0)
    with pytest.raises(LocalProtocolError, match="compiled"):
        await kernels.gather(Case().work())
    assert await kernels.gather(Case().work()) is None


async def test_without_a_thread_to_compile_in_the_works_fail_and_others_go_on(kernels, gpu, monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    gpu.runs_by_itself = False
    (flying,) = ask(kernels, Case(1).work())
    await launched(kernels, 1)
    gpu.refuse["gather"] = NotCompiled(lambda: None)
    (task,) = ask(kernels, Case(2).work())
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.get_running_loop(), "run_in_executor", refuse)
        gpu.runs_by_itself = True
        with pytest.raises(LocalProtocolError, match="new thread"):
            await asyncio.wait_for(task, SOON_S)
    assert await asyncio.wait_for(flying, SOON_S) is None
    assert await kernels.gather(Case(3).work()) is None


# --- errors


async def test_an_error_reaches_its_caller(kernels, gpu):
    gpu.refuse["scatter"] = RuntimeError("out of memory")
    with pytest.raises(LocalProtocolError, match="out of memory"):
        await kernels.scatter(Case().work())
    assert await kernels.scatter(Case().work()) is None


async def test_a_cancelled_caller_does_not_end_the_launch(kernels, gpu):
    case, other, event = Case(1), Case(2), gpu.event()
    task = asyncio.ensure_future(kernels.gather(case.work(after=(event,))))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    event.fire()
    later = kernels.gather(other.work(after=(event, gpu.event(fired=True))))
    assert await later is None
    while not case.slot.any():
        await asyncio.sleep(0.001)
    assert np.array_equal(case.slot, case.paged)


async def test_before_the_start_and_after_the_end_works_are_refused(make, gpu):
    kernels = make()
    with pytest.raises(LocalProtocolError, match="started"):
        await kernels.gather(Case().work())
    assert kernels.launches == (0, 0)
    await kernels.start()
    with pytest.raises(LocalProtocolError, match="once"):
        await kernels.start()
    waiting = asyncio.ensure_future(kernels.gather(Case().work(after=(gpu.event(),))))
    await asyncio.sleep(0)  # it is not launched yet
    assert kernels.launches == (0, 0)
    assert await kernels.close()
    with pytest.raises(ClosedError):
        await waiting
    with pytest.raises(ClosedError):
        await kernels.scatter(Case().work())
    assert await kernels.close()
    assert gpu.closed
    with pytest.raises(LocalProtocolError):
        await kernels.start()


@pytest.mark.parametrize("end", ["close", "cancel"])
async def test_a_start_that_nobody_waits_for_leaves_no_thread(make, gpu, end):
    opened = threading.Event()
    kernels = make(opened=opened)
    start = asyncio.ensure_future(kernels.start())
    await asyncio.sleep(0)
    if end == "close":
        assert await kernels.close()
        opened.set()
        with pytest.raises(ClosedError):
            await start
    else:
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        opened.set()
        while not gpu.closed:
            await asyncio.sleep(0.001)
    assert gpu.closed


async def test_launches_have_as_many_programs_as_the_fastest_lane_takes(make, gpu):
    kernels = make()
    assert kernels.programs == DEFAULT_PROGRAMS == 16  # whatever the lane will be
    await kernels.start()
    await kernels.gather(Case().work())
    kernels.use_lane("pinned+tcp")
    await kernels.gather(Case().work())
    kernels.use_lane("cuda_ipc")
    await kernels.gather(Case().work())
    kernels.use_lane("pinned+cma")  # the faster one is still in use
    await kernels.gather(Case().work())
    await kernels.close()
    warm, unknown, pinned, fast, both = gpu.programs
    assert warm == unknown == 16
    assert pinned < fast == both


async def test_a_lane_that_comes_into_use_before_the_start_counts(make, gpu):
    kernels = make()
    kernels.use_lane("pinned+tcp")
    await kernels.start()
    await kernels.gather(Case().work())
    await kernels.close()
    assert gpu.programs == [kernels.programs] * 2
    assert kernels.programs < 16


async def test_a_configured_number_of_programs_stays(make, gpu):
    kernels = make(GpuConfig(0, programs=3))
    await kernels.start()
    kernels.use_lane("cuda_ipc")
    await kernels.gather(Case().work())
    await kernels.close()
    assert gpu.programs == [3, 3]


async def test_a_gpu_that_fails_for_good_ends_all_works_and_refuses_new_ones(make, gpu):
    kernels = make()
    await kernels.start()
    gpu.runs_by_itself = False
    event = gpu.event()
    tasks = ask(kernels, Case(1).work(), Case(2).work(after=(event,)))
    tasks.append(asyncio.ensure_future(kernels.fired([gpu.event()])))
    await launched(kernels, 2)
    await asyncio.sleep(2 * MOST_S)  # whoever looks next finds out
    gpu.dead = True
    found = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), SOON_S)
    assert all(type(error) is LocalProtocolError for error in found)
    assert "illegal memory access" in str(found[0])
    assert "restart" in str(found[0])
    with pytest.raises(LocalProtocolError, match="illegal memory access"):
        await kernels.gather(Case(3).work())
    assert await kernels.close()  # nothing runs any more on a GPU that has failed
    assert not gpu.closed  # but pinned memory must not be given back
    assert not kernels._pumps._poller._thread.is_alive()


@pytest.mark.parametrize("way", ["in", "out"])
async def test_a_gpu_that_is_found_dead_by_a_call_of_libcuda_has_failed_for_good(make, gpu, monkeypatch, way):
    kernels = make()
    await kernels.start()

    @contextlib.contextmanager
    def current():
        error = RegistrationError("cuda", "device-memory", "cuThreadExchangeStreamCaptureMode failed")
        if way == "in":
            raise error
        gpu.inside.add(threading.current_thread())
        yield
        gpu.inside.clear()
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(gpu, "current", current)
        (task,) = ask(kernels, Case().work())
        if way == "out":
            assert await task is None  # it was done
        else:
            with pytest.raises(LocalProtocolError, match="restart"):
                await task
    with pytest.raises(LocalProtocolError, match="restart"):
        await kernels.gather(Case().work())
    assert await kernels.close()


async def test_an_error_of_our_own_ends_all_works_too_and_what_is_queued_is_known_to_run(make, gpu, monkeypatch):
    kernels = make()
    await kernels.start()
    gpu.runs_by_itself = False
    (task,) = ask(kernels, Case().work())
    await launched(kernels, 1)
    monkeypatch.setattr(kernels._pumps._schedule, "turn", lambda: 1 // 0)
    kernels._pumps._pump_soon()
    with pytest.raises(LocalProtocolError, match="ZeroDivisionError"):
        await task
    with pytest.raises(LocalProtocolError):
        await kernels.gather(Case().work())
    assert not await kernels.close()
    assert not gpu.closed


# --- events that nothing is launched for


async def test_fired_waits_for_all_events(kernels, gpu):
    events = [gpu.event() for _ in range(3)]
    task = asyncio.ensure_future(kernels.fired(events))
    for event in events:
        await asyncio.sleep(0.003)
        assert not task.done()
        event.fire()
    await asyncio.wait_for(task, SOON_S)
    await asyncio.wait_for(kernels.fired(events), SOON_S)
    await asyncio.wait_for(kernels.fired([]), SOON_S)
    with pytest.raises(LocalProtocolError, match="event"):
        await kernels.fired(["no event"])


async def test_fired_can_be_cancelled_and_then_nobody_looks(kernels, gpu):
    event = gpu.event()
    task = asyncio.ensure_future(kernels.fired([event]))
    while not event.queries:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not kernels._pumps._poller._watched
    assert not kernels._pumps._waits


async def test_fired_ends_with_the_kernels(make, gpu):
    kernels = make()
    await kernels.start()
    task = asyncio.ensure_future(kernels.fired([gpu.event()]))
    await asyncio.sleep(0)
    assert await kernels.close()
    with pytest.raises(ClosedError):
        await task


# --- the end


async def test_close_waits_for_what_is_queued_and_ends_the_rest(make, gpu):
    kernels = make()
    await kernels.start()
    gpu.runs_by_itself = False
    (task,) = ask(kernels, Case(1).work())
    await launched(kernels, 1)
    closing = asyncio.ensure_future(kernels.close())
    done, _ = await asyncio.wait([closing, task], timeout=0.05)  # the time in which nothing must happen
    assert not done
    with pytest.raises(ClosedError):
        await kernels.gather(Case(2).work())
    gpu.run()
    assert await asyncio.wait_for(task, SOON_S) is None
    assert await asyncio.wait_for(closing, SOON_S)
    assert gpu.closed
    assert await kernels.close()  # again


async def test_a_close_whose_caller_is_cancelled_goes_on(make, gpu):
    kernels = make()
    await kernels.start()
    gpu.runs_by_itself = False
    (task,) = ask(kernels, Case(1).work())
    await launched(kernels, 1)
    closing = asyncio.ensure_future(kernels.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert not gpu.closed
    gpu.run()
    assert await asyncio.wait_for(kernels.close(), SOON_S)
    assert await task is None
    assert gpu.closed


async def test_close_ends_what_waits_on_the_host_for_its_producer(make, gpu):
    kernels = make()
    await kernels.start()
    events = [gpu.event() for _ in range(schedule.RING + 2)]
    tasks = ask(kernels, *(Case(n).work(after=(event,)) for n, event in enumerate(events)))
    await launched(kernels, schedule.RING)
    closing = asyncio.ensure_future(kernels.close())
    found = await asyncio.wait_for(asyncio.gather(*tasks[schedule.RING :], return_exceptions=True), SOON_S)
    assert all(isinstance(error, ClosedError) for error in found)
    for event in events:
        event.fire()
    assert await asyncio.wait_for(asyncio.gather(*tasks[: schedule.RING]), SOON_S) == [None] * schedule.RING
    assert await asyncio.wait_for(closing, SOON_S)


async def test_close_begins_no_scatter_whose_checksum_is_summed(make, gpu):
    kernels = make()
    await kernels.start()
    gpu.runs_by_itself = False
    case = Case(1)
    case.slot[:] = 7
    before = case.pool.copy()
    task = asyncio.ensure_future(kernels.scatter(case.work(expected=case.checksum)))
    async with asyncio.timeout(SOON_S):
        while not kernels._pumps._schedule.flying:
            await asyncio.sleep(0)
    closing = asyncio.ensure_future(kernels.close())
    await asyncio.sleep(0)
    gpu.run()
    assert await asyncio.wait_for(closing, SOON_S)
    with pytest.raises(ClosedError):
        await task
    assert np.array_equal(case.pool, before)
    assert kernels.launches == (0, 0)
    assert gpu.closed


async def test_close_does_not_wait_for_ever_and_says_that_memory_is_in_use(make, gpu, monkeypatch):
    monkeypatch.setattr(module, "CLOSE_S", 0.05)
    kernels = make()
    await kernels.start()
    (task,) = ask(kernels, Case().work(after=(gpu.event(),)))
    await launched(kernels, 1)
    assert not await kernels.close()
    with pytest.raises(LocalProtocolError):
        await task
    assert not gpu.closed  # a stream must not be dropped under what is queued
    assert not await kernels.close()
    assert not kernels._pumps._poller._thread.is_alive()


async def test_close_waits_for_a_kernel_that_is_compiled_and_ends_its_works(make, gpu):
    kernels = make()
    await kernels.start()
    compiled = threading.Event()
    began = threading.Event()

    def prepare():
        began.set()
        assert compiled.wait(SOON_S)

    gpu.refuse["gather"] = NotCompiled(prepare)
    (task,) = ask(kernels, Case().work())
    while not began.is_set():
        await asyncio.sleep(0.001)
    closing = asyncio.ensure_future(kernels.close())
    await asyncio.sleep(0)
    assert not gpu.closed
    compiled.set()
    with pytest.raises(ClosedError):
        await task
    assert await asyncio.wait_for(closing, SOON_S)
    assert gpu.closed


# --- without a GPU


def has_gpu():
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


@pytest.mark.skipif(has_gpu(), reason="a GPU is here: tests/gpu has the tests")
async def test_without_a_gpu_the_start_says_what_is_missing():
    kernels = CudaKernels(GpuConfig(0))
    with pytest.raises(ConfigError) as caught:
        await kernels.start()
    assert caught.value.field == "gpu"
    assert await kernels.close()


@pytest.mark.parametrize(
    "missing", ["torch", *(pytest.param(name, marks=pytest.mark.long) for name in ("triton", "cffi"))]
)
def test_what_is_not_installed_is_named_with_the_extra_that_brings_it(missing):
    """In a process of its own, where the import fails as it does without the package."""
    script = f"""
import asyncio, sys
sys.modules[{missing!r}] = None
from rdma_kv.config import GpuConfig
from rdma_kv.errors import ConfigError
from rdma_kv.packer_cuda import CudaKernels
loaded = [name for name in ("torch", "triton", "cffi") if sys.modules.get(name)]
assert not loaded, loaded
try:
    asyncio.run(CudaKernels(GpuConfig(0)).start())
except ConfigError as error:
    print(error.field, error)
"""
    if importlib.util.find_spec("torch") is None and missing != "torch":
        pytest.skip("torch is not installed, and is missed first")
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=100)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("gpu gpu: ")
    assert missing in ran.stdout
    assert "rdma-kv[gpu]" in ran.stdout
