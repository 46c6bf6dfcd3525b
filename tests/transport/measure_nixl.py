"""Measure the NIXL transport between two processes of this host: one line of JSON per lane.

Run it with the repository and this folder on PYTHONPATH. Numbers of WRITEs are medians, seen from the initiator's
coroutine; lag is how late a sleeper of 1 ms wakes, in each process, while 256 MiB move; idle is the CPU of a process
with a connected link that nobody uses, listening or not.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics

from transport_child import Child, connect

MIB = 1 << 20
BIG_BYTES = 256 * MIB
IDLE_S = 4.0


async def median_s(left: Child, address: int, length_bytes: int, count: int) -> float:
    """Median seconds of a WRITE of `length_bytes`, the first one left out."""
    times_s = [await left.call("write", pairs=[[0, address, length_bytes]], notification="n") for _ in range(count + 1)]
    return statistics.median(times_s[1:])


async def cpu_share(child: Child) -> dict[str, float]:
    """Share of one core that the process and its owner thread use over the next seconds."""
    before = await child.call("cpu")
    await asyncio.sleep(IDLE_S)
    after = await child.call("cpu")
    return {key: round((after[key] - before[key]) / IDLE_S, 5) for key in before}


async def measure(tls: str | None) -> dict:
    async with (
        Child("left@1", "right@1", BIG_BYTES, 1, tls) as left,
        Child("right@1", "left@1", BIG_BYTES, 0, tls) as right,
    ):
        _, address, lane = await connect(left, right)
        await right.call("listen")
        await median_s(left, address, BIG_BYTES, 1)  # touches all pages
        result = {"lane": lane, "cores": os.cpu_count()}
        for name, length_bytes, count in (("8 B", 8, 50), ("1 MiB", MIB, 50), ("64 MiB", 64 * MIB, 15)):
            took_s = await median_s(left, address, length_bytes, count)
            result[name] = {"ms": round(took_s * 1e3, 3), "GB/s": round(length_bytes / took_s / 1e9, 2)}
        await asyncio.gather(left.call("lag_start"), right.call("lag_start"))
        took_s = await median_s(left, address, BIG_BYTES, 4)
        lags = await asyncio.gather(left.call("lag_stop"), right.call("lag_stop"))
        result["256 MiB"] = {"ms": round(took_s * 1e3, 1), "GB/s": round(BIG_BYTES / took_s / 1e9, 2)}
        result["lag during it, ms"] = [{key[:-2]: round(s * 1e3, 2) for key, s in lag.items()} for lag in lags]
        result["CPU, listening"] = (await asyncio.gather(cpu_share(left), cpu_share(right)))[1]
        await right.call("unlisten")
        result["CPU, idle"] = await asyncio.gather(cpu_share(left), cpu_share(right))
        await left.exit(0)
        await right.exit(0)
        return result


if __name__ == "__main__":
    for setting in ("tcp", None):
        print(json.dumps(asyncio.run(measure(setting))))
