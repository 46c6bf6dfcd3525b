"""The watch over peers' processes: which process a pidfd means, that its end is noticed, and that no descriptor is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest

from rdma_kv.deaths import DeathWatch, own_process, started_ticks
from rdma_kv.protocol.link import Process
from rdma_kv.transport.ucx_environment import host_id

pytestmark = pytest.mark.skipif(
    not host_id() or not hasattr(os, "pidfd_open"), reason="needs Linux with /proc, and os.pidfd_open"
)
LIMIT_S = 10.0


@contextlib.asynccontextmanager
async def child() -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that waits until it is killed, or its standard input ends."""
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    await started.stdout.readline()
    try:
        yield started
    finally:
        if started.returncode is None:
            started.kill()
        await started.wait()
        started.stdin.close()


def life_of(pid: int) -> Process:
    return Process(host_id(), pid, started_ticks(pid))


@contextlib.contextmanager
def watching(**settings: int) -> Iterator[tuple[DeathWatch, asyncio.Queue[str]]]:
    """A watch and what it says; at its end all descriptors are closed."""
    dead: asyncio.Queue[str] = asyncio.Queue()
    before = pidfds()
    watch = DeathWatch(dead.put_nowait, **settings)
    try:
        yield watch, dead
    finally:
        watch.close()
        watch.close()
        assert pidfds() == before
        assert len(watch) == 0


def pidfds() -> int:
    """How many descriptors of processes we hold. asyncio may hold some for its own children: they only count."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            count += "pidfd" in os.readlink(f"/proc/self/fd/{name}")
    return count


def test_our_own_process_is_known():
    own = own_process()
    assert own == Process(host_id(), os.getpid(), started_ticks(os.getpid()))
    assert own.started > 0


def test_a_process_that_is_not_there_has_no_start():
    assert started_ticks(2**30) == 0


@pytest.mark.parametrize("end", ["kill", "exit"])
async def test_the_end_of_a_process_is_noticed_once(end: str):
    async with child() as peer:
        with watching() as (watch, dead):
            assert watch.watch("peer#1", life_of(peer.pid))
            assert watch.watch("peer#1", life_of(peer.pid))  # again: the same watch
            assert len(watch) == 1
            assert "peer#1" in watch
            if end == "kill":
                peer.kill()
            else:
                peer.stdin.close()
            async with asyncio.timeout(LIMIT_S):
                assert await dead.get() == "peer#1"
            assert "peer#1" not in watch
            assert dead.empty()


async def test_a_stopped_process_is_not_dead():
    """That is the difference to silence: it may go on."""
    async with child() as peer, child() as other:
        with watching() as (watch, dead):
            assert watch.watch("stopped", life_of(peer.pid))
            assert watch.watch("killed", life_of(other.pid))
            os.kill(peer.pid, signal.SIGSTOP)
            other.kill()
            async with asyncio.timeout(LIMIT_S):
                assert await dead.get() == "killed"
            assert dead.empty()
            assert "stopped" in watch


async def test_what_cannot_be_proven_is_not_watched():
    async with child() as peer:
        life = life_of(peer.pid)
        with watching() as (watch, _):
            for other in (
                Process(),
                replace(life, host="another/pid:[1]"),
                replace(life, started=life.started + 1),  # the number is used again
                replace(life, pid=2**30),
                replace(own_process()),  # we would not live to see it
            ):
                assert not watch.watch("peer#1", other), other
            assert len(watch) == 0
            assert watch.watch("peer#1", life)


async def test_who_is_forgotten_is_not_told():
    async with child() as peer, child() as other:
        with watching() as (watch, dead):
            watch.watch("forgotten", life_of(peer.pid))
            watch.watch("kept", life_of(other.pid))
            watch.forget("forgotten")
            watch.forget("forgotten")
            peer.kill()
            await peer.wait()
            other.kill()
            async with asyncio.timeout(LIMIT_S):
                assert await dead.get() == "kept"
            assert dead.empty()


async def test_the_number_of_watches_is_bounded():
    async with child() as peer:
        with watching(most=3) as (watch, _):
            for number in range(10):
                assert watch.watch(f"peer#{number}", life_of(peer.pid))
            assert len(watch) == 3
            assert all(f"peer#{number}" in watch for number in (7, 8, 9))
