"""What the fences of a transport promise: memory that was given back is not read, and not written, by anything old.

Each side overwrites its memory the moment its fence has returned, then the other side, stopped until then, goes on. Not
one byte of what was written after the fence may have travelled, or have been travelled over. The controls do the same
with a fence that does nothing, to see that the test can see.
"""

from __future__ import annotations

import asyncio

import pytest
from fence_rig import FencePeerError, agents, connect, until
from transport_rig import LIMIT_S, Rig, link

from rdma_kv.errors import FenceUnsupported, TransportError
from rdma_kv.transport.base import FENCED, NOT_POSTED

MIB = 1 << 20
LENGTH_BYTES = 128 * MIB
OLD, NEW = 0x11, 0x22  # in memory before the fence, and after it; the target begins with zeros

NO_SHARED_MEMORY = [("loopback", None), ("nixl", "tcp"), ("ucx", "tcp")]
ON_ONE_HOST = [("nixl", None), ("ucx", None)]  # whatever UCX picks: cma, where it is allowed


def over(links):
    return pytest.mark.parametrize(("kind", "tls"), links, ids=["-".join(filter(None, link)) for link in links])


everywhere, without_shared_memory, on_one_host = (
    over(links) for links in (NO_SHARED_MEMORY + ON_ONE_HOST, NO_SHARED_MEMORY, ON_ONE_HOST)
)


async def begin_write(initiator, target, address):
    """Start a WRITE of all the memory; return when some of it has landed, and not all."""
    await initiator.call("begin", peer=target.name, address=address, length_bytes=LENGTH_BYTES)
    await until(lambda: target.peek(address + 2 * MIB, 1)[0] == OLD)


async def connected(left, right):
    """The address of the right's memory, and the lane. The left's memory is `OLD`, and a first WRITE is done."""
    _, address, lane = await connect(left, right)
    await left.call("fill", value=OLD)
    assert await left.call("write", peer=right.name, address=address, length_bytes=1, notification="first") == "done"
    assert await right.call("heard") == [left.name, "first"]
    return address, lane


async def nothing_on_the_way(target, initiator):
    """Wait until `target` has read what its sockets hold, and ended the turn in which it did."""
    await until(lambda: target.queued_bytes() == 0)
    await target.call("metadata", peer=initiator.name)


async def outcome_or_gone(initiator, target):
    """How the WRITE ended. UCX can end the process of an initiator whose target closes: see `rdma_kv.transport.nixl`."""
    try:
        return await initiator.call("outcome", peer=target.name)
    except FencePeerError as error:
        if error.args[0] != "Gone":
            raise
        return "gone"


async def stopped_in_the_middle(left, right, address, lane):
    """A WRITE under way to a target that was stopped, with bytes stuck in the sockets where there are any."""
    await begin_write(left, right, address)
    await right.stop()
    if lane == "tcp":
        await until(lambda: right.queued_bytes() > 0)
        assert right.peek(address + LENGTH_BYTES - 1, 1)[0] == 0
    assert await left.call("pending", peer=right.name)


@everywhere
async def test_a_fenced_source_is_not_read_any_more_beside_a_stopped_target(kind, tls):
    async with agents(kind, tls, LENGTH_BYTES, "left@1", "right@1") as (left, right):
        address, lane = await connected(left, right)
        await stopped_in_the_middle(left, right, address, lane)
        await left.call("fence", peer=right.name, kind="source", fill=NEW)
        assert await left.call("outcome", peer=right.name) == FENCED
        await right.resume()
        await nothing_on_the_way(right, left)
        assert await right.call("count", value=NEW) == 0
        assert await right.call("count", value=OLD) > 2 * MIB


@without_shared_memory
async def test_control_a_source_that_is_not_fenced_is_read(kind, tls):
    async with agents(kind, tls, LENGTH_BYTES, "left@1", "right@1") as (left, right):
        address, lane = await connected(left, right)
        await stopped_in_the_middle(left, right, address, lane)
        await left.call("fence", peer=right.name, kind="nothing", fill=NEW)
        await right.resume()
        assert await left.call("outcome", peer=right.name) == "done"
        assert await right.call("count", value=NEW) > 0


async def test_control_a_source_whose_posts_nixl_has_cancelled_is_read():
    async with agents("nixl", "tcp", LENGTH_BYTES, "left@1", "right@1") as (left, right):
        address, lane = await connected(left, right)
        await stopped_in_the_middle(left, right, address, lane)
        await left.call("fence", peer=right.name, kind="cancel", fill=NEW)
        assert await left.call("outcome", peer=right.name) == "cancelled"
        await right.resume()
        await until(lambda: right.call("count", value=NEW))


@without_shared_memory
@pytest.mark.parametrize("kind_of_fence", ["target", "nothing"], ids=["fence", "control"])
async def test_nothing_of_a_stopped_initiator_lands_behind_a_fence(kind, tls, kind_of_fence):
    async with agents(kind, tls, LENGTH_BYTES, "left@1", "right@1") as (left, right):
        address, _ = await connected(left, right)
        await begin_write(left, right, address)
        await left.stop()
        assert right.peek(address + LENGTH_BYTES - 1, 1)[0] == 0
        await right.call("fence", peer=left.name, kind=kind_of_fence, fill=NEW)
        await left.resume()
        outcome = await outcome_or_gone(left, right)
        await nothing_on_the_way(right, left)
        changed_bytes = LENGTH_BYTES - await right.call("count", value=NEW)
        if kind_of_fence == "target":
            assert outcome != "done"
            assert changed_bytes == 0
        else:
            assert outcome == "done"
            assert changed_bytes > 0


@on_one_host
async def test_shared_memory_has_no_fence_of_the_target_and_the_refusal_changes_nothing(kind, tls):
    async with agents(kind, tls, MIB, "left@1", "right@1") as (left, right):
        await right.call("metadata", peer=left.name)
        with pytest.raises(FencePeerError, match="not known") as caught:
            await right.call("fence", peer=left.name, kind="target")
        assert caught.value.args[0] == "FenceUnsupported"
        address, _ = await connected(left, right)
        with pytest.raises(FencePeerError, match=r"dead \(by its pidfd\), or retire the slot") as caught:
            await right.call("fence", peer=left.name, kind="target")
        assert caught.value.args[0] == "FenceUnsupported"
        write = {"peer": right.name, "address": address, "length_bytes": MIB, "notification": "goes on"}
        assert await left.call("write", **write) == "done"
        assert await right.call("count", value=OLD) == MIB


async def test_control_closing_the_target_keeps_no_write_over_cma_out():
    for _ in range(8):  # where the initiator is stopped is chance: it may find the link closed before its next copy
        async with agents("nixl", None, LENGTH_BYTES, "left@1", "right@1") as (left, right):
            address, lane = await connected(left, right)
            if lane != "cma":
                pytest.skip(f"two processes use {lane} here")
            await begin_write(left, right, address)
            await left.stop()
            await right.call("fence", peer=left.name, kind="close", fill=NEW)
            await left.resume()
            assert await outcome_or_gone(left, right) != "done"
            if await right.call("count", value=NEW) < LENGTH_BYTES:
                return
    pytest.fail("nothing landed behind a closed endpoint, in 8 tries")


@everywhere
async def test_a_fence_leaves_other_peers_alone_and_the_same_peer_can_come_back(kind, tls):
    async with agents(kind, tls, LENGTH_BYTES, "left@1", "right@1", "other@1") as (left, right, other):
        address, lane = await connected(left, right)
        elsewhere, _ = await connected(left, other)
        await stopped_in_the_middle(left, right, address, lane)
        if kind != "loopback":  # its network stands still for all
            await begin_write(left, other, elsewhere)
        await left.call("fence", peer=right.name, kind="source")
        await right.resume()
        if kind == "loopback":
            await begin_write(left, other, elsewhere)
        assert await left.call("outcome", peer=other.name) == "done"
        assert await other.call("count", value=OLD) == LENGTH_BYTES
        assert await other.call("heard") == [left.name, "begun"]

        await right.call("fence", peer=left.name, kind="source")
        await right.call("fill", value=0)
        address, _ = await connected(left, right)
        write = {"peer": right.name, "address": address, "length_bytes": LENGTH_BYTES, "notification": "again"}
        assert await left.call("write", **write) == "done"
        assert await right.call("heard") == [left.name, "again"]
        assert await right.call("count", value=OLD) == LENGTH_BYTES


@everywhere
async def test_fences_with_nothing_pending_twice_after_close_and_after_one_another(kind, tls):
    async with agents(kind, tls, MIB, "left@1", "right@1", "other@1") as (left, right, other):
        both = ["source"] if (kind, tls) in ON_ONE_HOST else ["source", "target"]
        for peer, first in ((right, "source"), (other, "close")):
            address, _ = await connected(left, peer)
            for name in (first, *both, *both):
                await left.call("fence", peer=peer.name, kind=name)
                assert await left.call("closed", peer=peer.name)
            write = {"peer": peer.name, "address": address, "length_bytes": MIB, "notification": "late"}
            assert await left.call("write", **write) == NOT_POSTED
            assert await peer.call("count", value=OLD) == 1


@pytest.mark.parametrize("kind", ["loopback", "nixl"])
async def test_fences_at_once_before_connect_and_after_the_transport_closed(kind):
    async with Rig(kind) as rig:
        left, right = await rig.transport("left@1"), await rig.transport("right@1")
        unconnected = left.endpoint("nobody@1")
        a, _ = await link(left, right)
        notifying = asyncio.create_task(a.endpoint.notify(b"nobody listens"))
        await asyncio.sleep(0)
        async with asyncio.timeout(LIMIT_S):
            await unconnected.fence_source()
            fences = [asyncio.create_task(a.endpoint.fence_source()) for _ in range(3)]
            await asyncio.sleep(0)
            fences[0].cancel()
            assert (await asyncio.gather(*fences[1:])) == [None, None]
            with pytest.raises(TransportError) as caught:
                await notifying
            assert caught.value.status in {FENCED, NOT_POSTED}
            await left.close()
            await a.endpoint.fence_source()


async def test_a_fence_of_nixl_that_cannot_be_proven_is_refused_until_it_can():
    async with Rig("nixl") as rig:
        endpoint = (await rig.transport("left@1")).endpoint("right@1")
        await endpoint.metadata()
        kept = endpoint._link._agent.agent
        for _ in range(2):
            with pytest.raises(FenceUnsupported, match="hold the memory"):
                await endpoint.fence_source()
        del kept
        await endpoint.fence_source()
