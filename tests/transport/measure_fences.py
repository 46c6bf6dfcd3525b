"""Measure what a fence costs: one line of JSON per transport, lane and case.

Run it with the repository and this folder on PYTHONPATH. Milliseconds are medians, seen from the coroutine that fences;
lag is the worst of all rounds: how late a sleeper of 1 ms woke meanwhile. `idle`: nothing pending. `stopped`: a WRITE in
flight to a stopped peer. `target`: a WRITE of a stopped peer in flight.
"""

from __future__ import annotations

import asyncio
import json
import statistics

from fence_rig import agents
from test_fences import LENGTH_BYTES, NO_SHARED_MEMORY, ON_ONE_HOST, begin_write, connected, stopped_in_the_middle

ROUNDS = 9


async def idle(left, right):
    await connected(left, right)
    return await left.call("fence", peer=right.name, kind="source")


async def stopped(left, right):
    address, lane = await connected(left, right)
    await stopped_in_the_middle(left, right, address, lane)
    return await left.call("fence", peer=right.name, kind="source")


async def target(left, right):
    address, _ = await connected(left, right)
    await begin_write(left, right, address)
    await left.stop()
    return await right.call("fence", peer=left.name, kind="target")


async def measure(kind: str, tls: str | None, what) -> dict:
    """Rounds of `what`, each with two fresh agents."""
    took = []
    for _ in range(ROUNDS):
        async with agents(kind, tls, LENGTH_BYTES, "left@1", "right@1") as (left, right):
            took.append(await what(left, right))
    return {
        "transport": kind,
        "tls": tls,
        "case": what.__name__,
        "ms": round(statistics.median(one["ms"] for one in took), 2),
        "worst ms": round(max(one["ms"] for one in took), 2),
        "worst lag, ms": round(max(one["lag_ms"] for one in took), 2),
    }


if __name__ == "__main__":
    for kind, tls in NO_SHARED_MEMORY + ON_ONE_HOST:
        cases = (idle, stopped) if (kind, tls) in ON_ONE_HOST else (idle, stopped, target)
        for case in cases:
            print(json.dumps(asyncio.run(measure(kind, tls, case))), flush=True)
