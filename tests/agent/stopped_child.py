"""An agent in a process of its own, for `test_stopped`: it sends or receives what it is told, one JSON line a command.

Argument: a JSON object of `registry` (path), `transport`, `role`. The first line out is its address; the registry is read
after that.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from rig import make_memory
from stopped_rig import MARK, MODEL, PAGES, STAGING, TIMEOUTS, TOKENS, TOPOLOGY

from rdma_kv.agent import Agent
from rdma_kv.errors import RdmaKvError
from rdma_kv.registry.static import StaticRegistry
from rdma_kv.session import AgentConfig
from rdma_kv.transport.nixl import prepare_ucx_environment
from rdma_kv.types import ReplicaId, Role


async def send(agent: Agent, memory, request: int) -> str:
    """How it ended: `done`, or the class of the error."""
    await asyncio.to_thread(memory.fill, request, range(PAGES), TOKENS)  # the loop has heartbeats to send
    try:
        to = ReplicaId("decode", 0)
        async with agent.send(f"request-{request}", 0, list(range(PAGES)), to=to, tokens=TOKENS) as out:
            await out.push()
    except RdmaKvError as error:
        return type(error).__name__
    return "done"


async def receive(agent: Agent, request: int) -> str:
    try:
        source = ReplicaId("prefill", 0)
        await agent.receive(f"request-{request}", 0, list(range(PAGES)), source=source, tokens=TOKENS)
    except RdmaKvError as error:
        return type(error).__name__
    return "done"


def marked(agent: Agent, memory) -> int:
    """Bytes of staging and pages that no request has."""
    segments = agent._shell.mover._staging.segments
    return sum(int((view == MARK).sum()) for view in (memory.array, *(each.memory.view for each in segments)))


async def main(registry: str, transport: str, role: str) -> None:
    loop = asyncio.get_running_loop()
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    config = AgentConfig(role, Role(role), (0,), TOPOLOGY, MODEL, cluster="test", staging=STAGING, timeouts=TIMEOUTS)
    async with Agent(config, StaticRegistry(Path(registry)), transport=transport) as agent:
        memory = make_memory(MODEL, TOPOLOGY, 0, component=0, pages=PAGES, page_size=16, kind="nhd")
        agent.register_pool(memory.layout, memory.array, replica=0, rank=0)
        print(json.dumps(agent.address), flush=True)
        while line := await lines.readline():
            command = json.loads(line)
            if command == "stats":
                answer = agent.stats()
            elif command == "marked":
                answer = marked(agent, memory)
            elif role == "prefill":
                answer = await send(agent, memory, command)
            else:
                answer = await receive(agent, command)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    prepare_ucx_environment(os.environ)
    asyncio.run(main(**json.loads(sys.argv[1])))
