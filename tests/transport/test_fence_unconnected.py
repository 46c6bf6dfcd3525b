"""A target that only exports, as a decode agent does, never connects: its fence must work where the lane allows it."""

from __future__ import annotations

from fence_rig import agents
from test_fences import FENCED, LENGTH_BYTES, NEW, OLD, begin_write, outcome_or_gone, without_shared_memory


async def connected_one_way(left, right) -> int:
    """Left can write to right, and right knows nothing of left but its name. The address of right's memory."""
    exported = await right.call("metadata", peer=left.name)
    await left.call("metadata", peer=right.name)
    await left.call("connect", peer=right.name, blob=exported["blob"])
    await right.call("listen", peer=left.name)
    await left.call("fill", value=OLD)
    write = {"peer": right.name, "address": exported["address"], "length_bytes": 1, "notification": "first"}
    assert await left.call("write", **write) == "done"
    return exported["address"]


@without_shared_memory
async def test_a_target_that_never_connected_fences_a_stopped_initiator(kind, tls):
    async with agents(kind, tls, LENGTH_BYTES, "left@1", "right@1") as (left, right):
        address = await connected_one_way(left, right)
        await begin_write(left, right, address)
        await left.stop()
        await right.call("fence", peer=left.name, kind="target", fill=NEW)
        await left.resume()
        assert await outcome_or_gone(left, right) not in {"done", FENCED}
        assert await right.call("count", value=NEW) == LENGTH_BYTES
