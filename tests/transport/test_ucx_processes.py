"""The ucx transport between two real processes, over tcp and over what UCX picks on one host (cma where allowed)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time

import pytest
from transport_child import ChildError
from transport_rig import LIMIT_S
from ucx_rig import share, two_children

from rdma_kv.transport.base import FENCED, NOT_POSTED
from rdma_kv.transport.ucx_environment import usable_lanes

MIB = 1 << 20
LENGTH_BYTES = 64 * MIB
OLD, NEW = 0x11, 0x22  # in the source's memory before the fence, and after it; the target begins with zeros


@pytest.fixture(params=["tcp", None], ids=["tcp", "default"])
def tls(request):
    return request.param


async def same(left, right, length_bytes=LENGTH_BYTES) -> bool:
    whole = {"offset": 0, "length_bytes": length_bytes}
    return await left.call("crc", **whole) == await right.call("crc", **whole)


async def test_writes_notifications_both_ways_and_exit_status(tls):
    async with two_children(tls, LENGTH_BYTES) as (left, right, left_address, right_address, lane):
        assert lane == ("tcp" if tls else usable_lanes({})[0])
        await right.call("listen")
        await left.call("write", pairs=[[0, right_address, 3 * MIB + 1]], notification="small")
        assert await same(left, right, 3 * MIB + 1)
        await left.call("write", pairs=[[0, right_address, LENGTH_BYTES]], notification="big")
        assert await same(left, right)
        assert await right.call("wait", count=2) == ["small", "big"]
        await left.call("listen")
        await right.call("fill", value=0)
        await right.call("write", pairs=[[0, left_address + MIB, MIB], [MIB, left_address, MIB]], notification="back")
        assert await left.call("wait", count=1) == ["back"]
        assert await same(left, right, 2 * MIB)
        assert await left.exit(0) == 0
        assert await right.exit(3) == 3


async def test_100_writes_of_random_sizes_at_random_places(tls):
    async with two_children(tls, 16 * MIB) as (left, right, _, address, _):
        await right.call("listen")
        chance = random.Random(3)
        cuts = [0, *sorted(chance.sample(range(1, 16 * MIB), 99)), 16 * MIB]
        writes = [
            left.call("write", pairs=[[cuts[n], address + cuts[n], cuts[n + 1] - cuts[n]]], notification=str(n))
            for n in range(100)
        ]
        await asyncio.gather(*writes)
        assert sorted(map(int, await right.call("wait", count=100))) == list(range(100))
        assert await same(left, right, 16 * MIB)


async def test_a_target_that_does_not_listen_gets_the_notification_later(tls):
    async with two_children(tls, MIB) as (left, right, _, address, _):
        writing = asyncio.create_task(left.call("write", pairs=[[0, address, MIB]], notification="early"))
        waiting = asyncio.create_task(right.call("wait", count=1))
        await asyncio.gather(left.call("settle"), right.call("settle"))
        assert not writing.done()
        assert not waiting.done()
        await right.call("listen")
        assert await waiting == ["early"]
        await writing
        assert await same(left, right, MIB)


async def test_the_loop_stays_free_while_256_mib_move(tls):
    async with two_children(tls, 256 * MIB) as (left, right, _, address, _):
        await right.call("listen")
        lags_s = []
        for _ in range(5):  # the first one touches the pages
            await asyncio.gather(left.call("lag_start"), right.call("lag_start"))
            await left.call("write", pairs=[[0, address, 256 * MIB]], notification="big")
            lags = await asyncio.gather(left.call("lag_stop"), right.call("lag_stop"))
            lags_s.append(max(lag["p99_s"] for lag in lags))
        print(f"{tls}: p99 of the loop's lag {min(lags_s) * 1e3:.1f} ms")
        assert min(lags_s) < 0.030  # threefold, and the best of five: a busy machine can only make it look worse


async def test_1000_small_writes(tls):
    async with two_children(tls, MIB) as (left, right, _, address, _):
        await right.call("listen")
        took = await left.call("many", address=address, length_bytes=8, count=1000)
        assert len(await right.call("wait", count=1000)) == 1000
        print(
            f"{tls}: {took['median_s'] * 1e6:.0f} us to post and complete 8 bytes, {1000 / took['all_s']:.0f} a second"
        )
        assert took["median_s"] < 0.001


async def test_idle_costs_nothing(tls):
    async with two_children(tls, MIB) as (left, right, _, address, _):
        await right.call("listen")
        await left.call("write", pairs=[[0, address, MIB]], notification="x")
        shares = await asyncio.gather(share(left), share(right))
        assert max(shares) < 0.01


async def begin_write(left, right, address) -> None:
    """Begin to WRITE all of left's memory, OLD, and stop the peer in the middle, so that it cannot take all."""
    await left.call("fill", value=OLD)
    await right.call("listen")
    await left.call("write", pairs=[[0, address, 8]], notification="first")
    os.kill(right.process.pid, signal.SIGSTOP)
    await left.call("begin", pairs=[[0, address, LENGTH_BYTES]], notification="all")


async def test_after_a_fence_of_the_source_its_memory_can_be_used_at_once():
    async with two_children("tcp", LENGTH_BYTES) as (left, right, _, address, _):
        await begin_write(left, right, address)
        took_s = await left.call("fence", kind="source")
        await left.call("fill", value=NEW)
        assert await left.call("outcome") == FENCED
        os.kill(right.process.pid, signal.SIGCONT)
        await right.call("settle")
        old, new = await right.call("count", value=OLD), await right.call("count", value=NEW)
        print(f"fence {took_s * 1e3:.1f} ms; of {LENGTH_BYTES} bytes landed {old}, poisoned {new}")
        assert took_s < 1.0
        assert 8 <= old < LENGTH_BYTES
        assert new == 0


async def test_without_a_fence_its_memory_would_be_sent_with_new_content():
    async with two_children("tcp", LENGTH_BYTES) as (left, right, _, address, _):
        await begin_write(left, right, address)
        await left.call("fill", value=NEW)
        os.kill(right.process.pid, signal.SIGCONT)
        assert await left.call("outcome") == "done"
        assert await right.call("count", value=NEW) > 0


async def test_after_a_fence_of_the_target_nothing_lands():
    async with two_children("tcp", LENGTH_BYTES) as (left, right, _, address, _):
        await left.call("fill", value=OLD)
        await right.call("listen")
        await left.call("write", pairs=[[0, address, 8]], notification="first")
        await left.call("begin", pairs=[[0, address, LENGTH_BYTES]] * 20, notification="all")
        while await right.call("count", value=OLD) < MIB:
            pass  # not before it is under way
        await right.call("fence", kind="target")
        await right.call("fill", value=NEW)
        assert await left.call("outcome") not in {"done", NOT_POSTED}
        await right.call("settle")
        assert await right.call("count", value=NEW) == LENGTH_BYTES


async def test_the_target_cannot_be_fenced_where_the_peer_writes_by_itself():
    async with two_children(None, MIB) as (left, right, _, address, lane):
        if lane != "cma":
            pytest.skip("cma is not allowed here")
        with pytest.raises(ChildError, match=r"pidfd.*retire the slot") as caught:
            await right.call("fence", kind="target")
        assert caught.value.args[0] == "FenceUnsupported"
        await right.call("listen")
        await left.call("write", pairs=[[0, address, MIB]], notification="as before")


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
async def test_a_killed_target_is_noticed(tls, busy):
    async with two_children(tls, 16 * MIB) as (left, right, _, address, _):
        await right.call("listen")
        await left.call("write", pairs=[[0, address, 16 * MIB]], notification="first")
        await right.call("unlisten")
        if busy:
            await left.call("begin", pairs=[[0, address, 16 * MIB]], notification="second")
        right.process.kill()
        began = time.perf_counter()
        await right.process.wait()
        if busy:
            assert await left.call("outcome") != "done"  # where the death is seen first, nothing was posted
            print(f"{tls}: noticed after {(time.perf_counter() - began) * 1e3:.0f} ms")
            assert time.perf_counter() - began < 1.0
        await left.call("begin", pairs=[[0, address, 1]], notification="third")
        assert await left.call("outcome") == NOT_POSTED
        assert await left.exit(0) == 0


async def test_a_killed_initiator_leaves_its_target_well(tls):
    async with two_children(tls, 16 * MIB) as (left, right, _, address, _):
        await right.call("listen")
        await left.call("write", pairs=[[0, address, 16 * MIB]], notification="first")
        await left.call("begin", pairs=[[0, address, 16 * MIB]] * 10, notification="second")
        left.process.kill()
        await left.process.wait()
        await right.call("unlisten")
        await right.call("settle")
        assert await right.exit(0) == 0


async def test_closing_beside_a_stopped_target_takes_bounded_time(tls):
    async with two_children(tls, 16 * MIB) as (left, right, _, address, _):
        await right.call("listen")
        await left.call("write", pairs=[[0, address, 16 * MIB]], notification="first")
        os.kill(right.process.pid, signal.SIGSTOP)
        writing = asyncio.create_task(left.call("write", pairs=[[0, address, 16 * MIB]] * 4, notification="second"))
        await left.call("crc", offset=0, length_bytes=1)
        assert await left.exit(0) == 0
        with contextlib.suppress(ChildError):  # over cma it may have been over before
            async with asyncio.timeout(LIMIT_S):
                await writing
