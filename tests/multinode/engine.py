"""A stand-in for an engine, for the compose file and the multi-node tests: pools of KV, no model, NumPy only.

It attaches each of its ranks to the sidecar as an agent of its own, and obeys the lines of JSON that come over a Unix
socket. KV is a function of request and place (`rdma_kv.soak.content`), so whoever receives it knows every byte that must be
there, and a page that nobody uses must not change.

    {"id": 1, "op": "send", "request": 7, "to": 0, "tokens": 1024, "timeout_s": 30, "hold": true}
    {"id": 1, "event": "half"}                  the first half is pushed; it waits for the next line
    {"id": 2, "op": "go", "request": 7}
    {"id": 1, "result": {"0": {"outcome": "success", ...}}}     by rank

Its sidecar need not be there: it attaches whenever it is, and again after a restart.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rdma_kv import AgentConfig, KvLayout, ModelSpec, RdmaKvError, ReplicaId, Role, Topology
from rdma_kv.client import Client
from rdma_kv.soak.content import Pool

CLUSTER = "demo"
LAYERS, HEADS, ROW_BYTES, PAGE_TOKENS, NUM_PAGES = 4, 4, 128, 16, 256
TOKEN_BYTES = LAYERS * 2 * HEADS * ROW_BYTES  # of one token over all ranks of a replica: 4 KiB
MODEL = ModelSpec.gqa(layers=LAYERS, kv_heads=HEADS, head_dim=ROW_BYTES // 2, dtype="float16", fingerprint="lab")
TOPOLOGIES = {  # those of the demo, so that both find the same registry file
    Role.PREFILL: Topology.with_layers(LAYERS, tp=2, dp=2),
    Role.DECODE: Topology.with_layers(LAYERS, tp=4, dp=2),
}
STEP_S = 0.02
_RETRY_S = 0.2  # between two tries to attach

Say = Callable[[dict[str, Any]], None]


class Rank:
    """One rank: its pool, and its agent behind the sidecar's socket."""

    def __init__(self, role: Role, rank: int, socket: str) -> None:
        topology = TOPOLOGIES[role]
        heads = MODEL.components[0].heads_of(topology.attention_rank(rank), topology.attention_tp)
        self.rank = rank
        self.replica = next(r for r in range(topology.dp) if rank in topology.replica_ranks(r))
        self.pool = Pool(range(LAYERS), 2, NUM_PAGES, PAGE_TOKENS, range(heads.start, heads.end), ROW_BYTES)
        self._config = AgentConfig(role.value, role, (rank,), topology, MODEL, cluster=CLUSTER)
        self._socket = socket
        self._attaching = asyncio.Lock()
        self.client: Client | None = None

    async def attach(self) -> None:
        """Attach to the sidecar, as soon as it is there, and tell it of the pool; nothing where that is done."""
        async with self._attaching:
            if self.client is None:
                self.client = await self._attach()

    async def _attach(self) -> Client:
        client = Client(self._config, self._socket)
        while True:
            try:
                await client.__aenter__()
                break
            except (RdmaKvError, OSError) as exc:
                print(f"rank {self.rank}: {exc}", file=sys.stderr, flush=True)
                client = Client(self._config, self._socket)
                await asyncio.sleep(_RETRY_S)
        layout = KvLayout.nhd(
            layers=LAYERS, pages=NUM_PAGES, page_size=PAGE_TOKENS, heads=len(self.pool.heads), row_bytes=ROW_BYTES
        )
        told: Any = client.register_pool(layout, self.pool.memory, replica=self.replica, rank=self.rank)
        if inspect.isawaitable(told):
            await told
        return client

    async def attached(self) -> bool:
        """Whether the sidecar answers, now."""
        if self.client is None:
            return False
        try:
            async with asyncio.timeout(1.0):
                await self.client.stats()
        except (RdmaKvError, TimeoutError):
            return False
        return True

    async def detach(self) -> None:
        client, self.client = self.client, None
        if client is not None:
            await client.__aexit__(None, None, None)

    async def transfer(
        self, work: Callable[[Client, list[int]], Awaitable[dict[str, Any]]], tokens: int
    ) -> dict[str, Any]:
        """Run one side of a request on fresh pages; how it ended."""
        begin = asyncio.get_running_loop().time()
        pages = self.pool.take(tokens)
        try:
            if self.client is None:
                end = {"outcome": "NotAttached", "text": "the rank has no sidecar yet", "retryable": True}
            else:
                end = {"outcome": "success", "text": "", **await work(self.client, pages)}
        except RdmaKvError as exc:
            end = {"outcome": type(exc).__name__, "text": str(exc), "retryable": exc.retryable, "code": exc.code.name}
        except Exception as exc:  # noqa: BLE001 - told to the test: a bug
            end = {"outcome": "bug", "text": repr(exc), "retryable": False}
        finally:
            self.pool.free(pages)
        return end | {"seconds": round(asyncio.get_running_loop().time() - begin, 3)}


class Engine:
    """All ranks of one node, and the requests that run on them."""

    def __init__(self, role: Role, ranks: list[int], socket: str) -> None:
        self.role = role
        self.ranks = [Rank(role, rank, socket) for rank in ranks]
        self._go: dict[int, asyncio.Event] = {}

    async def open(self) -> dict[str, Any]:
        """Attach all ranks."""
        await asyncio.gather(*(rank.attach() for rank in self.ranks))
        return {}

    async def shut(self) -> dict[str, Any]:
        """Detach all ranks; their agents end."""
        await asyncio.gather(*(rank.detach() for rank in self.ranks))
        return {}

    async def send(
        self, say: Say, request: int, to: int, tokens: int, timeout_s: float, hold: bool = False
    ) -> dict[str, Any]:
        gate = self._go[request] = asyncio.Event()
        told = []

        async def one(rank: Rank, client: Client, pages: list[int]) -> dict[str, Any]:
            rank.pool.fill(request, pages, tokens)
            other = ReplicaId(Role.DECODE.value, to)
            async with client.send(
                f"request-{request}", rank.replica, pages, to=other, tokens=tokens, timeout_s=timeout_s
            ) as out:
                out.metadata["request"] = request
                await out.push((0, tokens // 2))
                if hold:
                    told.append(rank)
                    if len(told) == len(self.ranks):
                        say({"event": "half"})
                    while not gate.is_set() and out.error is None:  # an engine looks between two steps of its model
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(STEP_S):
                                await gate.wait()
                await out.push((tokens // 2, tokens))
            return {}

        try:
            return await self._all(one, tokens)
        finally:
            self._go.pop(request, None)

    async def go(self, request: int) -> dict[str, Any]:
        """Let a `send` that holds go on."""
        if request in self._go:
            self._go[request].set()
        return {}

    async def receive(self, request: int, source: int, tokens: int, timeout_s: float) -> dict[str, Any]:
        async def one(rank: Rank, client: Client, pages: list[int]) -> dict[str, Any]:
            received = await client.receive(
                f"request-{request}",
                rank.replica,
                pages,
                source=ReplicaId(Role.PREFILL.value, source),
                tokens=tokens,
                timeout_s=timeout_s,
            )
            wrong = await asyncio.to_thread(rank.pool.wrong_bytes, request, pages, tokens)
            named = received.metadata.get("request") == request
            return {"bytes": received.received_bytes, "wrong": wrong, "metadata": named}

        return await self._all(one, tokens)

    async def report(self) -> dict[str, Any]:
        """Per rank: whether its sidecar answers, pages in use, bytes of free pages that were written."""
        return {
            str(rank.rank): {
                "attached": await rank.attached(),
                "pages_used": rank.pool.pages_used,
                "poisoned": rank.pool.look(),
            }
            for rank in self.ranks
        }

    async def _all(
        self, work: Callable[[Rank, Client, list[int]], Awaitable[dict[str, Any]]], tokens: int
    ) -> dict[str, Any]:
        async def one(rank: Rank) -> dict[str, Any]:
            return await rank.transfer(lambda client, pages: work(rank, client, pages), tokens)

        ends = await asyncio.gather(*(one(rank) for rank in self.ranks))
        return {str(rank.rank): end for rank, end in zip(self.ranks, ends, strict=True)}


async def serve(engine: Engine, control: Path) -> None:
    """Obey everybody who connects to the socket `control`, until SIGTERM."""

    async def converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def answer(line: bytes) -> None:
            call = json.loads(line)
            number, op = call.pop("id"), call.pop("op")

            def say(answer: dict[str, Any]) -> None:
                writer.write(json.dumps({"id": number} | answer).encode() + b"\n")

            try:
                work = engine.send(say, **call) if op == "send" else getattr(engine, op)(**call)
                say({"result": await work})
            except Exception as exc:  # noqa: BLE001 - told to the test: a bug, or a call that cannot be
                say({"error": repr(exc)})

        tasks = set()
        with contextlib.closing(writer):
            while line := await reader.readline():
                task = asyncio.create_task(answer(line))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    end = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, end.set)  # as PID 1 it has no default
    server = await asyncio.start_unix_server(converse, control)
    os.chmod(control, 0o666)  # the tests are another user
    async with server:
        attaching = asyncio.create_task(engine.open())
        await end.wait()
    attaching.cancel()
    await engine.shut()


def main() -> None:
    parser = argparse.ArgumentParser(description="a stand-in for an engine")
    parser.add_argument("--role", type=Role, required=True, choices=list(Role))
    parser.add_argument("--ranks", type=int, nargs="+", required=True)
    parser.add_argument("--socket", default="/run/rdma-kv/agent.sock", help="of the sidecar")
    parser.add_argument("--control", type=Path, default=Path("/run/engine/control.sock"))
    options = parser.parse_args()
    options.control.unlink(missing_ok=True)  # of a process that was killed
    asyncio.run(serve(Engine(options.role, options.ranks, options.socket), options.control))


if __name__ == "__main__":
    main()
