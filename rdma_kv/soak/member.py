"""One agent of the soak in a process of its own, with a pool of KV; the parent asks it one short thing at a time."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rdma_kv.agent import Agent
from rdma_kv.config import StagingConfig, Timeouts
from rdma_kv.errors import RdmaKvError
from rdma_kv.layout import KvLayout
from rdma_kv.registry.static import StaticRegistry
from rdma_kv.session import AgentConfig
from rdma_kv.soak.content import Pool
from rdma_kv.topology import ModelSpec, Topology
from rdma_kv.transport.named import TransportMaker
from rdma_kv.types import ReplicaId, Role

CLUSTER = "soak"
LAYERS, HEADS, ROW_BYTES, PAGE_TOKENS = 4, 4, 128, 16
NUM_PAGES = 256
MODEL = ModelSpec.gqa(layers=LAYERS, kv_heads=HEADS, head_dim=ROW_BYTES // 2, fingerprint="soak")
TOPOLOGIES = {  # four agents a side, one a rank; a request has two senders and one receiver
    Role.PREFILL: Topology.with_layers(LAYERS, tp=4, dp=2),
    Role.DECODE: Topology.with_layers(LAYERS, tp=4, dp=4),
}
STAGING = StagingConfig(slots=16, slot_bytes=256 << 10)
TIMEOUTS = Timeouts(transfer=10.0, quiesce=2.0, connect=3.0, retry=0.2, unmatched=10.0, heartbeat=0.3, lease=1.5)


@dataclass(frozen=True)
class MemberSpec:
    """Which agent a process is: the one of `rank`, and what it is made of."""

    role: Role
    rank: int
    registry: Path
    transport: str
    topologies: Mapping[Role, Topology] = field(default_factory=lambda: TOPOLOGIES)
    num_pages: int = NUM_PAGES
    staging: StagingConfig = STAGING
    timeouts: Timeouts = TIMEOUTS

    @property
    def name(self) -> str:
        return f"{self.role.value}/{self.rank}"

    @property
    def replica(self) -> int:
        topology = self.topologies[self.role]
        return next(r for r in range(topology.dp) if self.rank in topology.replica_ranks(r))


class Member:
    """A `rdma_kv.bench.worker.Side`: every public coroutine answers the parent at once."""

    def __init__(self, spec: MemberSpec) -> None:
        logging.getLogger("rdma_kv").setLevel(logging.ERROR)  # that peers vanish is no news here
        topology = spec.topologies[spec.role]
        component = MODEL.components[0]
        heads = component.heads_of(topology.attention_rank(spec.rank), topology.attention_tp)
        self._spec = spec
        self._pool = Pool(range(LAYERS), 2, spec.num_pages, PAGE_TOKENS, range(heads.start, heads.end), ROW_BYTES)
        self._agent: Agent | None = None
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._ended: list[dict[str, Any]] = []
        self._inherited_fds = _open_fds()  # of the parent, more for a process that was forked later

    async def open(self) -> int:
        """Start the agent; where it listens."""
        spec = self._spec
        config = AgentConfig(
            engine=spec.role.value,
            role=spec.role,
            ranks=(spec.rank,),
            topology=spec.topologies[spec.role],
            model=MODEL,
            cluster=CLUSTER,
            staging=spec.staging,
            timeouts=spec.timeouts,
        )
        agent = self._agent = Agent(config, StaticRegistry(spec.registry), transport=self._transport())
        await agent.start()
        pool = self._pool
        layout = KvLayout.nhd(
            layers=LAYERS, pages=spec.num_pages, page_size=PAGE_TOKENS, heads=len(pool.heads), row_bytes=ROW_BYTES
        )
        agent.register_pool(layout, pool.memory, replica=spec.replica, rank=spec.rank)
        return agent.address[1]

    def _transport(self) -> str | TransportMaker:
        """What the agent is given; a test puts something in between."""
        return self._spec.transport

    async def shut(self) -> int:
        """Close the agent; file descriptors of our own that are open afterwards."""
        if self._agent is not None:
            await self._agent.close()
            self._agent = None
        return _open_fds() - self._inherited_fds

    async def close(self) -> None:
        """The process ends."""
        await self.shut()

    async def begin(self, number: int, other: int, tokens: int, timeout_s: float, fail: bool) -> None:
        """Start our side of a request. `fail`: the sender raises after half of it."""
        call = self._call(number, other, tokens, timeout_s, fail)
        self._calls[number] = asyncio.create_task(call, name=f"request {number}")

    async def cancel(self, number: int) -> None:
        """Cancel our side of a request, if it runs still."""
        if (task := self._calls.get(number)) is not None:
            task.cancel()

    async def take(self) -> list[dict[str, Any]]:
        """What has ended since the last time."""
        ended, self._ended = self._ended, []
        return ended

    async def report(self) -> dict[str, Any]:
        """What is held at this moment, and poisoned bytes so far."""
        assert self._agent is not None
        stats = self._agent.stats()
        return {
            "slots": sum(stats["slots_held"].values()),
            "held": stats["slots_held"],
            "retired": stats["slots_retired"],
            "bytes": sum(stats["slots_held"].values()) * self._spec.staging.slot_bytes,
            "tasks": stats["tasks"] + stats["transfers"] + stats["unmatched"],
            "pages": self._pool.pages_used,
            "calls": len(self._calls),
            "poisoned": self._pool.look(),
            "lanes": stats["lanes"],
            "transport": sorted(set(stats["link_transports"].values()) - {""}),
        }

    async def _call(self, number: int, other: int, tokens: int, timeout_s: float, fail: bool) -> None:
        loop, pool = asyncio.get_running_loop(), self._pool
        begin = loop.time()
        end: dict[str, Any] = {"number": number, "outcome": "success", "text": "", "bytes": 0, "wrong": 0}
        pages = pool.take(tokens)
        try:
            if self._spec.role is Role.PREFILL:
                pool.fill(number, pages, tokens)
                await self._send(number, other, pages, tokens, timeout_s, fail)
            else:
                end["bytes"] = await self._receive(number, other, pages, tokens, timeout_s)
                end["wrong"] = pool.wrong_bytes(number, pages, tokens)
        except asyncio.CancelledError:
            end["outcome"] = "cancelled"
        except _Failed:
            end["outcome"] = "aborted"
        except RdmaKvError as exc:
            end |= {"outcome": type(exc).__name__, "text": str(exc)}
        except Exception as exc:  # noqa: BLE001 - told to the parent: a bug
            end |= {"outcome": "bug", "text": repr(exc)}
        finally:
            pool.free(pages)
            end["seconds"] = loop.time() - begin
            self._ended.append(end)
            del self._calls[number]

    async def _send(self, number: int, other: int, pages: list[int], tokens: int, timeout_s: float, fail: bool) -> None:
        assert self._agent is not None
        to = ReplicaId(Role.DECODE.value, other)
        sending = self._agent.send(
            f"request-{number}", self._spec.replica, pages, to=to, tokens=tokens, timeout_s=timeout_s
        )
        async with sending as out:
            await out.push((0, tokens // 2))
            await asyncio.sleep(0)
            if fail:
                raise _Failed
            await out.push((tokens // 2, tokens))

    async def _receive(self, number: int, other: int, pages: list[int], tokens: int, timeout_s: float) -> int:
        assert self._agent is not None
        source = ReplicaId(Role.PREFILL.value, other)
        received = await self._agent.receive(
            f"request-{number}", self._spec.replica, pages, source=source, tokens=tokens, timeout_s=timeout_s
        )
        return received.received_bytes


class _Failed(Exception):
    """The engine gives a request up."""


def _open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))
