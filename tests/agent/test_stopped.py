"""A process that is stopped in the middle of WRITEs and goes on later, over real lanes.

A stopped prefill: decode gives the link up when the lease ends. Over tcp a fence frees the granted slots; over cma, where
the stopped process would write by itself as soon as it goes on, they are retired. Either way new memory is not written by
old WRITEs, both processes live, and the next request is right. A stopped decode: prefill fences its source, and what its
slots hold from then on never travels.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from rig import check_sums, make_memory
from stopped_rig import MARK, MODEL, PAGES, STAGING, TIMEOUTS, TOKENS, TOPOLOGY

from rdma_kv.agent import Agent
from rdma_kv.errors import PeerLostError
from rdma_kv.registry.static import AgentRecord, EngineRecord, StaticRegistry, dump_registry
from rdma_kv.session import AgentConfig
from rdma_kv.topology import TieBreak
from rdma_kv.transport.nixl import NixlTransport
from rdma_kv.transport.ucx import UcxTransport
from rdma_kv.types import AgentId, ReplicaId, Role

pytestmark = pytest.mark.long

HERE = Path(__file__).parent
TRANSPORTS = {"ucx": UcxTransport, "nixl": NixlTransport}
LIMIT_S = 30.0


class Child:
    """The process that is stopped. It is killed, by its id, at the end of the block."""

    def __init__(self, registry: Path, transport: str, tls: str | None, role: Role) -> None:
        self._arguments = json.dumps({"registry": str(registry), "transport": transport, "role": role.value})
        self._tls = tls

    async def __aenter__(self) -> Child:
        environ = {key: value for key, value in os.environ.items() if not key.startswith(("UCX_", "NIXL_"))}
        environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(HERE.parents[1])])
        if self._tls is not None:
            environ["UCX_TLS"] = self._tls
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(HERE / "stopped_child.py"), self._arguments),
            env=environ,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 20,
        )
        self.address = await self.answer()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        self.process.stdin.close()

    def tell(self, command) -> None:
        self.process.stdin.write(json.dumps(command).encode() + b"\n")

    async def answer(self):
        async with asyncio.timeout(LIMIT_S):
            line = await self.process.stdout.readline()
        assert line, f"the child has gone, status {self.process.returncode}"
        return json.loads(line)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@contextlib.asynccontextmanager
async def both(tmp_path, monkeypatch, transport: str, tls: str | None, *, child_role: Role):
    """(child, the agent of the other role here, its pool)."""
    role = child_role.other
    path = tmp_path / "registry.toml"
    if tls is not None:
        monkeypatch.setenv("UCX_TLS", tls)
    async with contextlib.AsyncExitStack() as stack:
        child = await stack.enter_async_context(Child(path, transport, tls, child_role))
        config = AgentConfig(
            role.value, role, (0,), TOPOLOGY, MODEL, cluster="test", staging=STAGING, timeouts=TIMEOUTS
        )
        agent = await stack.enter_async_context(Agent(config, StaticRegistry(path), transport=transport))
        records = [
            EngineRecord(who.value, who, TOPOLOGY, TieBreak.REPLICA, (AgentRecord(name, *address, (0,)),))
            for who, name, address in (
                (child_role, AgentId("test", child_role.value, child_role, 0), child.address),
                (role, config.id, agent.address),
            )
        ]
        path.write_bytes(dump_registry("test", records))
        memory = make_memory(MODEL, TOPOLOGY, 0, component=0, pages=PAGES, page_size=16, kind="hnd")
        agent.register_pool(memory.layout, memory.array, replica=0, rank=0)
        stack.callback(check_sums, agent)
        yield child, agent, memory


async def send(prefill: Agent, request: int) -> None:
    to = ReplicaId("decode", 0)
    async with prefill.send(f"request-{request}", 0, list(range(PAGES)), to=to, tokens=TOKENS) as out:
        await out.push()


def receiving(decode: Agent, request: int) -> asyncio.Task:
    source = ReplicaId("prefill", 0)
    call = decode.receive(f"request-{request}", 0, list(range(PAGES)), source=source, tokens=TOKENS)
    return asyncio.create_task(call)


async def until(condition) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.001)


lanes = pytest.mark.parametrize(("transport", "tls"), [("ucx", "tcp"), ("ucx", None), ("nixl", "tcp"), ("nixl", None)])


@lanes
async def test_a31_a_stopped_decode_that_goes_on_gets_nothing_of_what_came_into_the_slots_later(
    tmp_path, monkeypatch, transport, tls
):
    async with both(tmp_path, monkeypatch, transport, tls, child_role=Role.DECODE) as (child, prefill, memory):
        memory.fill(1, range(PAGES), TOKENS)
        child.tell(1)
        await send(prefill, 1)
        assert await child.answer() == "done"

        child.tell(2)
        boxes = prefill.stats()["counters"]["boxes"]
        doomed = asyncio.create_task(send(prefill, 2))
        await until(lambda: prefill.stats()["counters"]["boxes"] > boxes + 8)
        child.signal(signal.SIGSTOP)
        with pytest.raises(PeerLostError) as caught:
            await doomed
        assert caught.value.peer == "test/decode/decode/0"
        await until(lambda: not prefill.stats()["slots_held"])
        assert prefill.stats()["slots_free"] == STAGING.slots
        for view in free_memory(prefill):
            view[:] = MARK
        child.signal(signal.SIGCONT)
        assert await child.answer() in {"PeerLostError", "TransferAborted"}
        await until(lambda: prefill.stats()["links"] == 1)
        assert await asked(child, "marked") == 0

        child.tell(3)
        await send(prefill, 3)
        assert await child.answer() == "done"
        assert await asked(child, "marked") == 0
        theirs = await asked(child, "stats")
        assert theirs["slots_held"] == {}


@lanes
async def test_a32_a_stopped_prefill_that_goes_on_writes_nothing_that_was_given_to_others(
    tmp_path, monkeypatch, transport, tls
):
    async with both(tmp_path, monkeypatch, transport, tls, child_role=Role.PREFILL) as (child, decode, memory):
        warm = receiving(decode, 1)
        child.tell(1)
        assert await child.answer() == "done"
        await warm
        await asyncio.to_thread(memory.check, 1, range(PAGES), 0, TOKENS)  # the loop has heartbeats to send
        shared = tls is None and (await asked(child, "stats"))["lanes"] != ["tcp"]

        doomed = receiving(decode, 2)
        boxes = decode.stats()["counters"]["boxes"]
        child.tell(2)
        await until(lambda: decode.stats()["counters"]["boxes"] > boxes + 8)
        child.signal(signal.SIGSTOP)
        with pytest.raises(PeerLostError) as caught:
            await doomed
        assert caught.value.peer == "test/prefill/prefill/0"
        await until(lambda: not decode.stats()["slots_held"])
        stats = decode.stats()
        if shared:
            assert stats["slots_retired"] > 0
            await until(lambda: decode.stats()["slots_free"] == STAGING.slots)
        else:
            assert stats["slots_retired"] == 0

        views = free_memory(decode)
        for view in views:
            view[:] = MARK
        child.signal(signal.SIGCONT)
        assert await child.answer() in {"PeerLostError", "TransferAborted", "TransportError"}
        await until(lambda: decode.stats()["links"] == 1)
        assert all(np.all(view == MARK) for view in views), "not a byte has landed in memory that was free"

        last = receiving(decode, 3)
        child.tell(3)
        assert await child.answer() == "done"
        await last
        await asyncio.to_thread(memory.check, 3, range(PAGES), 0, TOKENS)
        theirs = await asked(child, "stats")
        assert theirs["slots_held"] == {}
        assert theirs["slots_free"] == theirs["slots_total"]


def free_memory(agent: Agent) -> list[np.ndarray]:
    """The bytes of each free slot."""
    mover = agent._shell.mover
    found = []
    for index in mover._pool._free:
        segment = mover._staging._segment_of(index)
        start = (index - segment.first) * mover._staging.slot_bytes
        found.append(segment.memory.view[start : start + mover._staging.slot_bytes])
    return found


async def asked(child: Child, command: str):
    child.tell(command)
    return await child.answer()
