"""Over cma the peer's process writes our memory by itself: what keeps it out is that the memory is no longer there.

A stopped initiator goes on after the target has ended its side and taken the memory away. Its WRITE must fail, both
processes must live, and a later link must work. The control leaves the memory in place, to see that the test can see.
"""

from __future__ import annotations

import pytest
from fence_rig import agents
from test_fences import LENGTH_BYTES, MIB, NEW, OLD, begin_write, connected, on_one_host

from rdma_kv.transport.base import NOT_POSTED

HALF = LENGTH_BYTES // 2


async def stopped_before_the_end(left, right):
    """A WRITE of a stopped initiator that has not come to the second half yet; None where chance was against it."""
    address, lane = await connected(left, right)
    if lane != "cma":
        pytest.skip(f"two processes use {lane} here")
    await begin_write(left, right, address)
    await left.stop()
    return address if right.peek(address + HALF, 1)[0] == 0 else None


@on_one_host
async def test_a_stopped_initiator_fails_at_retired_memory(kind, tls):
    for _ in range(8):
        async with agents(kind, tls, LENGTH_BYTES, "left@1", "right@1") as (left, right):
            if await stopped_before_the_end(left, right) is None:
                continue
            await right.call("fence", peer=left.name, kind="source")
            await right.call("retire", offset=HALF, length_bytes=HALF)
            await left.resume()
            outcome = await left.call("outcome", peer=right.name)
            assert outcome != "done"
            assert await right.call("sample", offset=0, length_bytes=HALF, value=OLD) > 0, "the target lives"
            await left.call("fence", peer=right.name, kind="source")
            return
    pytest.skip("the initiator was always too fast")


@on_one_host
async def test_missing_memory_alone_ends_a_write(kind, tls):
    """Nothing is fenced: it is the mapping that the peer's copy fails at."""
    async with agents(kind, tls, LENGTH_BYTES, "left@1", "right@1") as (left, right):
        address, lane = await connected(left, right)
        if lane != "cma":
            pytest.skip(f"two processes use {lane} here")
        await right.call("retire", offset=HALF, length_bytes=HALF)
        write = {"peer": right.name, "address": address, "length_bytes": LENGTH_BYTES, "notification": "never"}
        assert await left.call("write", **write) not in {"done", NOT_POSTED}
        assert await right.call("sample", offset=MIB, length_bytes=HALF - 2 * MIB, value=OLD) == HALF - 2 * MIB


@on_one_host
async def test_control_memory_that_stays_is_written_after_the_target_has_ended(kind, tls):
    for _ in range(8):
        async with agents(kind, tls, LENGTH_BYTES, "left@1", "right@1") as (left, right):
            if await stopped_before_the_end(left, right) is None:
                continue
            await right.call("fence", peer=left.name, kind="source", fill=NEW)
            await left.resume()
            await left.call("outcome", peer=right.name)
            if await right.call("sample", offset=MIB, length_bytes=LENGTH_BYTES - MIB, value=OLD):
                return
    pytest.fail("nothing was written over memory in use: this control cannot see")
