"""What only the loopback transport has: time and faults under the test's control, and fences."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from transport_rig import LIMIT_S, Memory, Rig, link, pair, write

from rdma_kv.errors import ConfigError, TransportError
from rdma_kv.transport.base import NOT_POSTED
from rdma_kv.transport.loopback import Fault, LoopbackNetwork, LoopbackTransport, RandomDelays, SteppedTime

MIB = 1 << 20


async def linked(rig, length_bytes=4096):
    left, right = await rig.transport("left@1"), await rig.transport("right@1")
    source, destination = await Memory(length_bytes, 1).register(left), await Memory(length_bytes).register(right)
    a, b = await link(left, right)
    b.endpoint.listen()
    return a, b, source, destination


async def until(condition) -> None:
    """Let the loop run until `condition()`; time does not pass on its own here."""
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0)


async def test_completion_and_notification_come_when_time_says_so_and_the_data_before_both():
    time = SteppedTime()
    faults = {0: Fault(completion_delay_s=3.0, notification_delay_s=1.0), 1: Fault(completion_delay_s=1.0)}
    async with Rig("loopback", LoopbackNetwork(faults=lambda posting: faults[posting.serial], sleep=time.sleep)) as rig:
        a, b, source, destination = await linked(rig)
        slow = asyncio.create_task(write(a, [pair(source, destination)], b"slow"))
        await until(lambda: time.waiting == 2)
        assert np.array_equal(destination.bytes, source.bytes)
        quick = asyncio.create_task(write(a, [], b"quick"))
        await b.wait_for(1)
        assert b.received == [b"quick"]
        await until(lambda: time.waiting == 3)
        time.advance(1.0)
        await quick
        assert await b.wait_for(2) == [b"quick", b"slow"]
        assert not slow.done()
        time.advance(1.9)
        assert time.waiting == 1
        time.advance(0.2)
        await slow


async def test_a_late_notification_waits_for_a_listener_too():
    time = SteppedTime()
    network = LoopbackNetwork(faults=lambda posting: Fault(notification_delay_s=1.0), sleep=time.sleep)
    async with Rig("loopback", network) as rig:
        a, b, source, destination = await linked(rig)
        await write(a, [pair(source, destination)], b"late")
        await until(lambda: time.waiting == 1)
        b.endpoint.unlisten()
        time.advance(1.0)
        for _ in range(10):
            await asyncio.sleep(0)
        assert b.received == []
        b.endpoint.listen()
        assert await b.wait_for(1) == [b"late"]


async def test_a_lost_notification_is_a_success_for_the_initiator_and_nothing_for_the_target():
    faults = {0: Fault(lose_notification=True)}
    async with Rig("loopback", LoopbackNetwork(faults=lambda posting: faults.get(posting.serial, Fault()))) as rig:
        a, b, source, destination = await linked(rig)
        await write(a, [pair(source, destination)], b"lost")
        assert np.array_equal(destination.bytes, source.bytes)
        await write(a, [], b"next")
        assert await b.wait_for(1) == [b"next"]


@pytest.mark.parametrize("offset", [0, 1000, 1001, 4095])
async def test_a_flipped_byte_lands_and_nobody_hears_of_it(offset):
    """The offset counts over all pairs, in their order."""
    async with Rig("loopback", LoopbackNetwork(faults=lambda posting: Fault(flip=offset))) as rig:
        a, b, source, destination = await linked(rig)
        pieces = [pair(source, destination, 0, 1001), pair(source, destination, 1001, 3095)]
        await write(a, pieces, b"flipped")
        assert await b.wait_for(1) == [b"flipped"]
        (place,) = np.flatnonzero(destination.bytes != source.bytes)
        assert place == offset
        assert destination.bytes[place] ^ source.bytes[place] == 0xFF


async def test_a_flip_beyond_the_end_is_none():
    async with Rig("loopback", LoopbackNetwork(faults=lambda posting: Fault(flip=4096))) as rig:
        a, _, source, destination = await linked(rig)
        await write(a, [pair(source, destination)], b"whole")
        assert np.array_equal(destination.bytes, source.bytes)


async def reordered(seed: int) -> list[bytes]:
    """The order in which 20 notifications arrive under random delays."""
    time = SteppedTime()
    async with Rig("loopback", LoopbackNetwork(faults=RandomDelays(seed, 1.0), sleep=time.sleep)) as rig:
        a, b, source, destination = await linked(rig)
        writes = [asyncio.create_task(write(a, [pair(source, destination)], b"%d" % n)) for n in range(20)]
        await until(lambda: time.waiting == 40)
        assert b.received == []
        for _ in range(100):
            time.advance(0.01)
            await until(lambda: time.waiting + sum(task.done() for task in writes) + len(b.received) == 40)
        await asyncio.gather(*writes)
        return b.received


async def test_random_delays_reorder_and_repeat_with_the_seed():
    first = await reordered(5)
    in_order = [b"%d" % n for n in range(20)]
    assert sorted(first, key=int) == in_order
    assert first != in_order
    assert await reordered(5) == first
    assert await reordered(6) != first


async def test_a_write_that_cannot_be_posted_touches_nothing():
    network = LoopbackNetwork(faults=lambda posting: Fault(fail_to_post=posting.notification == b"bad"))
    async with Rig("loopback", network) as rig:
        a, b, source, destination = await linked(rig)
        with pytest.raises(TransportError) as caught:
            await write(a, [pair(source, destination)], b"bad")
        assert caught.value.status == NOT_POSTED
        assert not destination.bytes.any()
        await write(a, [pair(source, destination)], b"good")
        assert await b.wait_for(1) == [b"good"]


@pytest.mark.parametrize("landed_bytes", [0, 1, 5 * MIB + 3, 9 * MIB])
async def test_a_write_that_fails_in_the_middle_leaves_a_part_and_no_notification(landed_bytes):
    def plan(posting):
        assert (posting.initiator, posting.target) == ("left@1", "right@1")
        return Fault(fail_after_bytes=landed_bytes) if posting.length_bytes else Fault()

    async with Rig("loopback", LoopbackNetwork(faults=plan)) as rig:
        a, b, source, destination = await linked(rig, 9 * MIB)
        with pytest.raises(TransportError) as caught:
            await write(a, [pair(source, destination)], b"never")
        assert caught.value.status != NOT_POSTED
        assert np.array_equal(destination.bytes[:landed_bytes], source.bytes[:landed_bytes])
        assert not destination.bytes[landed_bytes:].any()
        await write(a, [], b"after")
        assert await b.wait_for(1) == [b"after"]


async def test_unlisten_stops_a_write_in_the_middle_until_listen():
    async with Rig("loopback") as rig:
        a, b, source, destination = await linked(rig, 8 * MIB)
        writing = asyncio.create_task(write(a, [pair(source, destination)], b"whole"))
        await until(lambda: destination.bytes[0])
        b.endpoint.unlisten()
        stopped = np.count_nonzero(destination.bytes)
        for _ in range(100):
            await asyncio.sleep(0)
        assert np.count_nonzero(destination.bytes) == stopped < 8 * MIB
        b.endpoint.listen()
        await writing
        assert np.array_equal(destination.bytes, source.bytes)


async def test_no_turn_of_the_loop_copies_more_than_4_mib_over_all_writes():
    async with Rig("loopback") as rig:
        a, _, source, destination = await linked(rig, 24 * MIB)
        parts = [pair(source, destination, number * 6 * MIB, 6 * MIB) for number in range(4)]
        writes = [asyncio.create_task(write(a, [part], b"")) for part in parts]
        before = 0
        while not all(task.done() for task in writes):
            await asyncio.sleep(0)
            after = np.count_nonzero(destination.bytes)
            assert after - before <= 4 * MIB
            before = after
        await asyncio.gather(*writes)
        assert np.array_equal(destination.bytes, source.bytes)


async def test_a_region_that_goes_away_in_the_middle_ends_the_write():
    async with Rig("loopback") as rig:
        a, b, source, destination = await linked(rig, 8 * MIB)
        writing = asyncio.create_task(write(a, [pair(source, destination)], b"never"))
        await until(lambda: destination.bytes[0])
        await b.transport.deregister(destination.region)
        with pytest.raises(TransportError):
            await writing
        assert not destination.bytes.all()


@pytest.mark.parametrize("fence", ["fence_source", "fence_target"])
async def test_a_fence_ends_the_copying_for_good(fence):
    async with Rig("loopback") as rig:
        a, b, source, destination = await linked(rig, 8 * MIB)
        writing = asyncio.create_task(write(a, [pair(source, destination)], b"never"))
        await until(lambda: destination.bytes[0])
        await getattr(a.endpoint if fence == "fence_source" else b.endpoint, fence)()
        source.bytes[:] = 0xFF
        landed = destination.bytes.copy()
        with pytest.raises(TransportError):
            await writing
        assert np.array_equal(destination.bytes, landed)
        assert not landed.all()


async def test_names_are_unique_on_a_network_until_closed():
    network = LoopbackNetwork()
    first, second = LoopbackTransport(network, "a@1"), LoopbackTransport(network, "a@1")
    await first.start()
    with pytest.raises(ConfigError):
        await second.start()
    await first.close()
    await second.start()
    await second.close()


async def test_another_network_is_out_of_reach():
    async with Rig("loopback") as here, Rig("loopback") as there:
        left, right = await here.transport("left@1"), await there.transport("right@1")
        with pytest.raises(TransportError):
            await left.endpoint("right@1").connect(await right.endpoint("left@1").metadata())


async def test_a_callback_that_raises_loses_only_its_own_message():
    async with Rig("loopback") as rig:
        a, b, _, _ = await linked(rig)
        problems = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context["exception"]))

        def fussy(message):
            if message == b"bad":
                raise ValueError(message)
            b._take(message)

        b.endpoint.on_notification(fussy)
        for message in (b"one", b"bad", b"two"):
            await write(a, [], message)
        assert await b.wait_for(2) == [b"one", b"two"]
        assert [type(problem) for problem in problems] == [ValueError]
