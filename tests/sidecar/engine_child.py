"""An engine in a process of its own: `engine_child.py ROLE SOCKET WHAT`. It says one line of JSON for each thing it has done.

WHAT: `idle` (attach and stay), `send` (push half of request 1, then stay), `send forked` (the same, with a child that keeps
the engine's files open).
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "agent"))
sys.path.insert(0, str(Path(__file__).parent))

from sidecar_rig import DECODE, PAGES, TOKENS, engine_config, engine_memory

from rdma_kv.client import Client
from rdma_kv.types import Role


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


async def main(role: Role, socket: str, what: str) -> None:
    memory = engine_memory(role)
    async with Client(engine_config(role), socket) as client:
        client.register_pool(memory.layout, memory.array, replica=0, rank=0)
        say(did="attached", address=client.address)
        await asyncio.to_thread(sys.stdin.readline)  # the registry is there
        if what == "send forked" and os.fork() == 0:
            os.read(0, 1)  # until the test is over
            os._exit(0)
        if what.startswith("send"):
            memory.fill(1, PAGES, TOKENS)
            async with client.send("k1", 0, PAGES, to=DECODE, tokens=TOKENS) as out:
                await out.push((0, TOKENS // 2))
                say(did="pushed")
                await asyncio.Event().wait()
        else:
            say(did="idle")
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(Role(sys.argv[1]), sys.argv[2], sys.argv[3]))
