"""The four nodes as a test sees them: transfers between engines, faults, and what is held at the end."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from dataclasses import dataclass
from typing import Any

from commands import LabError
from engine import TOKEN_BYTES
from engine_calls import Call, EngineCalls
from lane import Lane
from nodes import NODES, Node

SETTLE_S = 25.0
"""Until nothing is held after a fault: the lease (2.5 s), a fence, the quiesce (3 s) and a restart, on a busy machine."""


@dataclass
class Ends:
    """How one transfer ended, at each rank that took part."""

    send: dict[str, dict[str, Any]]
    receive: dict[str, dict[str, Any]]

    @property
    def all(self) -> list[dict[str, Any]]:
        return [*self.send.values(), *self.receive.values()]

    @property
    def succeeded(self) -> bool:
        """Whether every rank of both sides says so."""
        return bool(self.send and self.receive) and all(end["outcome"] == "success" for end in self.all)

    def check_success(self, tokens: int) -> None:
        """Every byte is here and is what was sent."""
        self._check_both_sides()
        assert self.succeeded, self
        assert sum(end["bytes"] for end in self.receive.values()) == tokens * TOKEN_BYTES, self
        assert all(end["wrong"] == 0 and end["metadata"] for end in self.receive.values()), self

    def check_failure(self) -> None:
        """Every rank of both sides has failed, with an error that says to try again."""
        self._check_both_sides()
        assert all(_failed(end) for end in self.all), self

    def _check_both_sides(self) -> None:
        """An engine that is gone has no ends, and nothing can be said of them."""
        assert self.send, f"no rank of the sender has told its end: {self}"
        assert self.receive, f"no rank of the receiver has told its end: {self}"


def check_failed(side: dict[str, dict[str, Any]]) -> None:
    """Every rank of one side, and there are some, has failed with an error that says to try again."""
    assert side, "no rank has told its end"
    assert all(_failed(end) for end in side.values()), side


def _failed(end: dict[str, Any]) -> bool:
    return end["outcome"] not in {"success", "bug"} and bool(end["retryable"])


class Transfer:
    """One request under way."""

    def __init__(self, send: Call, receive: Call, go: Any, tokens: int) -> None:
        self.send, self.receive, self.tokens = send, receive, tokens
        self._go = go

    async def half(self) -> None:
        """Half of it is pushed, and the sender waits for `go`."""
        await self.send.event("half")

    async def go(self) -> None:
        await self._go()

    async def ends(self) -> Ends:
        """Wait for both sides. An engine that is gone ends nothing: it has no ends to show."""
        sides = []
        for call in (self.send, self.receive):
            try:
                sides.append(await call.end())
            except LabError:
                sides.append({})
        return Ends(*sides)


class Cluster:
    """Gives orders to the engines and trouble to the nodes."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.engines = {node: EngineCalls(lane.control(node)) for node in NODES}
        self._requests = itertools.count(1)
        self._mend: list[Any] = []

    async def connect(self) -> None:
        await asyncio.gather(*(engine.connect() for engine in self.engines.values()))

    async def close(self) -> None:
        await asyncio.gather(*(engine.close() for engine in self.engines.values()))

    async def ready(self) -> None:
        """Wait until every sidecar is ready and every rank attached. Raises LabError."""
        await self.lane.wait_ready()
        await asyncio.gather(*(self._attached(node) for node in NODES))

    async def _attached(self, node: Node) -> None:
        await self.engines[node].ask("open")
        deadline = time.monotonic() + SETTLE_S
        while not all(rank["attached"] for rank in (await self.engines[node].ask("report")).values()):
            if time.monotonic() > deadline:
                raise LabError(f"{node.name}: the engine does not attach")
            await asyncio.sleep(0.1)

    # --- transfers -----------------------------------------------------------------------------------------------------

    def start(self, source: Node, to: Node, tokens: int, *, timeout_s: float = 20.0, hold: bool = False) -> Transfer:
        """Begin a transfer on both sides."""
        number = next(self._requests)
        receive = self.engines[to].start(
            "receive", request=number, source=source.replica, tokens=tokens, timeout_s=timeout_s
        )
        send = self.engines[source].start(
            "send", request=number, to=to.replica, tokens=tokens, timeout_s=timeout_s, hold=hold
        )
        return Transfer(send, receive, lambda: self.engines[source].ask("go", request=number), tokens)

    async def transfer(self, source: Node, to: Node, tokens: int, *, timeout_s: float = 20.0) -> Ends:
        return await self.start(source, to, tokens, timeout_s=timeout_s).ends()

    async def check_pair(self, source: Node, to: Node, tokens: int = 512, limit_s: float = SETTLE_S) -> None:
        """A transfer between two nodes succeeds within a while; until then it fails retryably, never with a wrong byte."""
        deadline = time.monotonic() + limit_s
        while True:
            ends = await self.transfer(source, to, tokens, timeout_s=8.0)
            if ends.succeeded:
                ends.check_success(tokens)
                return
            ends.check_failure()
            if time.monotonic() > deadline:
                raise AssertionError(f"{source.name} to {to.name} does not come back: {ends}")

    async def check_all_pairs(self, tokens: int = 512) -> None:
        """Every pair of nodes can move KV."""
        for source, to in itertools.product(NODES[:2], NODES[2:]):
            await self.check_pair(source, to, tokens)

    # --- trouble -------------------------------------------------------------------------------------------------------

    async def trouble(self, method: Any, *arguments: Any, mend: Any = None) -> None:
        """Call a blocking method of the lane off the loop; `mend` undoes it at the end of the test at the latest."""
        if mend is not None:
            self._mend.append(mend)
        await asyncio.to_thread(method, *arguments)

    async def mend(self) -> None:
        """Undo what is still in the way."""
        while self._mend:
            with contextlib.suppress(LabError):  # it was undone already, or its process is gone
                await asyncio.to_thread(self._mend.pop())

    async def reconnect_engine(self, node: Node, old_pid: int) -> None:
        """After an engine has gone: wait for the next one."""
        await self.lane.wait_new(node, "engine", old_pid)
        await self.engines[node].connect()

    # --- the end -------------------------------------------------------------------------------------------------------

    async def status(self, node: Node) -> dict[str, Any]:
        return await asyncio.to_thread(self.lane.status, node)

    async def check_nothing_held(self) -> None:
        """Every slot of every agent is free within a while, no page was written that should not be, none is in use."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            said = await asyncio.gather(*(self.status(node) for node in NODES))
            held = {
                n.name: problems for n, status in zip(NODES, said, strict=True) if (problems := unsettled(status, n))
            }
            if not held:
                break
            assert time.monotonic() < deadline, f"still held: {held}"
            await asyncio.sleep(0.2)
        for node, engine in self.engines.items():
            for rank, report in (await engine.ask("report")).items():
                assert report == {"attached": True, "pages_used": 0, "poisoned": 0}, (node.name, rank, report)


def attached(status: dict[str, Any]) -> list[dict[str, Any]]:
    """The agents of a sidecar that are up."""
    return [agent for agent in status["agents"] if agent["state"] == "attached"]


def unsettled(status: dict[str, Any], node: Node) -> list[str]:
    """What a sidecar still holds; empty when all is as it was before."""
    problems = []
    if len(attached(status)) != len(node.ranks):
        problems.append(f"{len(attached(status))} agents of {len(node.ranks)} are attached")
    for agent in status["agents"]:
        stats = agent["stats"]
        if not stats:
            problems.append(f"{agent['id']} is {agent['state']}")
            continue
        if stats["slots_held"] or stats["slots_free"] + stats["slots_retired"] != stats["slots_total"]:
            text = f"{stats['slots_free']} of {stats['slots_total']} slots are free, held {stats['slots_held']}"
            problems.append(f"{agent['id']}: {text}")
        if stats["transfers"] or stats["unmatched"] or agent["calls"]:
            text = f"{stats['transfers']} transfers, {stats['unmatched']} unmatched, {agent['calls']} calls"
            problems.append(f"{agent['id']}: {text}")
    if status["slots_held"] or status["slots_free"] + status["slots_retired"] != status["slots_total"]:
        problems.append(f"{status['slots_free']} of {status['slots_total']} free, {status['slots_held']} held in all")
    return problems
