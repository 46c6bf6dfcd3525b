"""The parent's half of `ucx_peer`. Run as a program, it measures the ucx transport beside NIXL's: a line of JSON each.

Run it with the repository and this folder on PYTHONPATH. Numbers are medians, seen from the initiator's coroutine; lag
is how late a sleeper of 1 ms wakes in each process while 256 MiB move.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path

from transport_child import Child, connect

MIB = 1 << 20
IDLE_S = 3.0
_HERE = Path(__file__).parent


class UcxChild(Child):
    """A child that runs `ucx_peer`."""

    def __init__(self, kind: str, name: str, peer: str, length_bytes: int, seed: int, tls: str | None) -> None:
        super().__init__(name, peer, length_bytes, seed, tls)
        self._arguments = [kind, *self._arguments]

    async def __aenter__(self) -> UcxChild:
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("UCX_", "NIXL_"))}
        environ["PYTHONPATH"] = os.pathsep.join([str(_HERE), str(_HERE.parents[1])])
        if self._tls is not None:
            environ["UCX_TLS"] = self._tls
        pipe = asyncio.subprocess.PIPE
        program = [sys.executable, str(_HERE / "ucx_peer.py"), *self._arguments]
        self.process = await asyncio.create_subprocess_exec(
            *program, env=environ, stdin=pipe, stdout=pipe, limit=1 << 24
        )
        self._reading = asyncio.create_task(self._read())
        return self


@contextlib.asynccontextmanager
async def two_children(tls, length_bytes, kind="ucx"):
    """A child with random bytes and one with zeros, connected: (left, right, left's address, right's address, lane)."""
    async with (
        UcxChild(kind, "left@1", "right@1", length_bytes, 1, tls) as left,
        UcxChild(kind, "right@1", "left@1", length_bytes, 0, tls) as right,
    ):
        left_address, right_address, lane = await connect(left, right)
        yield left, right, left_address, right_address, lane


async def measure(kind: str, tls: str | None) -> dict:
    async with two_children(tls, 256 * MIB, kind) as (left, right, _, address, lane):
        await right.call("listen")
        await left.call("many", address=address, length_bytes=256 * MIB, count=1)  # touches all pages
        result = {"kind": kind, "lane": lane, "cores": os.cpu_count()}
        if kind == "ucx":
            result["library"] = await left.call("library")
        sizes = (("8 B", 8, 1000), ("64 KiB", 65536, 300), ("1 MiB", MIB, 100), ("64 MiB", 64 * MIB, 9))
        for name, length_bytes, count in sizes:
            took = await left.call("many", address=address, length_bytes=length_bytes, count=count)
            result[name] = {
                "ms": round(took["median_s"] * 1e3, 3),
                "GB/s": round(length_bytes / took["median_s"] / 1e9, 2),
            }
        took_s = min([await left.call("batch", address=address, length_bytes=65536, count=1024) for _ in range(3)])
        result["1024 x 64 KiB"] = {"ms": round(took_s * 1e3, 1), "GB/s": round(1024 * 65536 / took_s / 1e9, 2)}
        await asyncio.gather(left.call("lag_start"), right.call("lag_start"))
        took = await left.call("many", address=address, length_bytes=256 * MIB, count=5)
        lags = await asyncio.gather(left.call("lag_stop"), right.call("lag_stop"))
        result["256 MiB"] = {
            "ms": round(took["median_s"] * 1e3, 1),
            "GB/s": round(256 * MIB / took["median_s"] / 1e9, 2),
        }
        result["lag, ms"] = [{key[:-2]: round(s * 1e3, 2) for key, s in lag.items()} for lag in lags]
        result["idle cores"] = await asyncio.gather(share(left), share(right))
        await left.exit(0)
        await right.exit(0)
        return result


async def share(child: UcxChild) -> float:
    """Share of one core that a child uses over the next seconds."""
    before = await child.call("process_s")
    await asyncio.sleep(IDLE_S)
    return round((await child.call("process_s") - before) / IDLE_S, 5)


if __name__ == "__main__":
    for setting in ("tcp", None):
        for which in ("ucx", "nixl"):
            print(json.dumps(asyncio.run(measure(which, setting))), flush=True)
