"""The event loop's side of kernels on a GPU. The GPU is one that runs by itself, on host memory."""

from __future__ import annotations

import asyncio
import importlib.util
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[1] / "kernels"))

from fake_gpu import Case, FakeGpu

from rdma_kv.config import GpuConfig
from rdma_kv.errors import ClosedError, ConfigError, LocalProtocolError
from rdma_kv.kernels.streams import KernelStreams
from rdma_kv.packer_cuda import CudaKernels


@pytest.fixture
def gpu():
    return FakeGpu(runs_by_itself=True)


@pytest.fixture
def make(gpu):
    def kernels(config=None, *, opened=None):
        def open_streams(config, programs):
            if opened is not None:
                opened.wait(20)
            return KernelStreams(config.device, programs=programs, priority=config.stream_priority, device=gpu)

        return CudaKernels(config or GpuConfig(0), open_streams)

    return kernels


@pytest.fixture
async def kernels(make):
    kernels = make()
    await kernels.start()
    yield kernels
    assert await kernels.close()


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


async def test_results_come_back_in_one_call_to_the_loop(kernels, gpu, monkeypatch):
    loop, calls = asyncio.get_running_loop(), []
    handed_on = loop.call_soon_threadsafe

    def counted(callback, *arguments, **more):
        calls.append(threading.current_thread().name)
        return handed_on(callback, *arguments, **more)

    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    await asyncio.gather(*(kernels.gather(Case(n).work()) for n in range(10)))
    assert calls == ["rdma-kv-gpu"]


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
    await asyncio.sleep(0)  # it is not handed over yet
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
    least = kernels.programs
    kernels.use_lane("pinned+tcp")
    assert kernels.programs == least
    await kernels.start()
    await kernels.gather(Case().work())
    kernels.use_lane("cuda_ipc")
    await kernels.gather(Case().work())
    kernels.use_lane("pinned+cma")  # the faster one is still in use
    await kernels.gather(Case().work())
    await kernels.close()
    assert gpu.programs[0] == least < gpu.programs[1] == gpu.programs[2]


async def test_a_configured_number_of_programs_stays(make, gpu):
    kernels = make(GpuConfig(0, programs=3))
    await kernels.start()
    kernels.use_lane("cuda_ipc")
    await kernels.gather(Case().work())
    await kernels.close()
    assert gpu.programs == [3]


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
