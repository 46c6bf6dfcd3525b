"""NIXL between two real processes, over tcp and over what UCX picks on one host (cma where it is allowed)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal

import pytest
from transport_child import Child, ChildError, connect
from transport_rig import LIMIT_S

from rdma_kv.transport.ucx_environment import usable_lanes

MIB = 1 << 20
LENGTH_BYTES = 64 * MIB


@pytest.fixture(params=["tcp", None], ids=["tcp", "default"])
def tls(request):
    return request.param


@contextlib.asynccontextmanager
async def two_children(tls, length_bytes=LENGTH_BYTES):
    """A child with random bytes and one with zeros, connected: (left, right, right's address, left's address, lane)."""
    async with (
        Child("left@1", "right@1", length_bytes, 1, tls) as left,
        Child("right@1", "left@1", length_bytes, 0, tls) as right,
    ):
        left_address, right_address, lane = await connect(left, right)
        yield left, right, left_address, right_address, lane


async def lag_s(left, right, address) -> float:
    """The worse p99 of the loop lag of both processes while all the memory is written."""
    await asyncio.gather(left.call("lag_start"), right.call("lag_start"))
    await left.call("write", pairs=[[0, address, LENGTH_BYTES]], notification="big")
    lags = await asyncio.gather(left.call("lag_stop"), right.call("lag_stop"))
    return max(lag["p99_s"] for lag in lags)


async def test_writes_notifications_loop_lag_and_exit_status(tls):
    async with two_children(tls) as (left, right, left_address, right_address, lane):
        assert lane == ("tcp" if tls else usable_lanes({})[0])
        await right.call("listen")
        await left.call("write", pairs=[[0, right_address, 3 * MIB + 1]], notification="small")
        assert await right.call("crc", offset=0, length_bytes=3 * MIB + 1) == await left.call(
            "crc", offset=0, length_bytes=3 * MIB + 1
        )
        lags_s = [await lag_s(left, right, right_address) for _ in range(4)]
        whole = {"offset": 0, "length_bytes": LENGTH_BYTES}
        assert await right.call("crc", **whole) == await left.call("crc", **whole)
        assert await right.call("wait", count=5) == ["small", "big", "big", "big", "big"]
        await right.call("unlisten")

        await left.call("listen")
        await right.call("clear")
        await right.call("write", pairs=[[0, left_address + MIB, MIB], [MIB, left_address, MIB]], notification="back")
        assert await left.call("wait", count=1) == ["back"]
        half = {"offset": 0, "length_bytes": 2 * MIB}
        assert await left.call("crc", **half) == await right.call("crc", **half)
        assert await left.exit(0) == 0
        assert await right.exit(3) == 3
        assert min(lags_s) < 0.010  # the best of four: a busy machine can only make it look worse


async def test_100_writes_of_random_sizes_at_random_places(tls):
    async with two_children(tls, 16 * MIB) as (left, right, _, address, _):
        await right.call("listen")
        chance = random.Random(3)
        cuts = [0, *sorted(chance.sample(range(1, 16 * MIB), 99)), 16 * MIB]
        jobs = [(cuts[n], cuts[n + 1] - cuts[n]) for n in range(100)]
        writes = [
            left.call("write", pairs=[[offset, address + offset, n]], notification=str(number))
            for number, (offset, n) in enumerate(jobs)
        ]
        await asyncio.gather(*writes)
        received = await right.call("wait", count=100)
        assert sorted(map(int, received)) == list(range(100))
        whole = {"offset": 0, "length_bytes": 16 * MIB}
        assert await right.call("crc", **whole) == await left.call("crc", **whole)


async def test_a_target_that_does_not_listen_gets_the_notification_later(tls):
    async with two_children(tls, MIB) as (left, right, _, address, _):
        writing = asyncio.create_task(left.call("write", pairs=[[0, address, MIB]], notification="early"))
        waiting = asyncio.create_task(right.call("wait", count=1))
        await left.call("crc", offset=0, length_bytes=MIB)
        await right.call("crc", offset=0, length_bytes=MIB)
        assert not writing.done()
        assert not waiting.done()
        await right.call("listen")
        assert await waiting == ["early"]
        await writing
        whole = {"offset": 0, "length_bytes": MIB}
        assert await right.call("crc", **whole) == await left.call("crc", **whole)


@pytest.mark.parametrize("listening", [True, False])
async def test_a_killed_target_ends_a_write_with_an_error(tls, listening):
    async with two_children(tls, 16 * MIB) as (left, right, _, address, _):
        await right.call("listen")
        await left.call("write", pairs=[[0, address, 16 * MIB]], notification="first")
        if not listening:
            await right.call("unlisten")
        writing = asyncio.create_task(left.call("write", pairs=[[0, address, 16 * MIB]] * 20, notification="second"))
        await left.call("crc", offset=0, length_bytes=1)
        right.process.kill()
        with contextlib.suppress(ChildError):
            await writing  # over cma it may have been over before the kill
        with pytest.raises(ChildError) as caught:
            await left.call("write", pairs=[[0, address, 1]], notification="third")
        assert caught.value.args[0] == "TransportError"
        assert await left.exit(0) == 0


async def test_closing_beside_a_stopped_target_takes_bounded_time(tls):
    async with two_children(tls, 16 * MIB) as (left, right, _, address, _):
        await right.call("listen")
        await left.call("write", pairs=[[0, address, 16 * MIB]], notification="first")
        os.kill(right.process.pid, signal.SIGSTOP)
        writing = asyncio.create_task(left.call("write", pairs=[[0, address, 16 * MIB]] * 4, notification="second"))
        await left.call("crc", offset=0, length_bytes=1)
        assert await left.exit(0) == 0
        with pytest.raises(ChildError) as caught:
            async with asyncio.timeout(LIMIT_S):
                await writing
        assert caught.value.args[0] in {"TransportError", "Gone"}
