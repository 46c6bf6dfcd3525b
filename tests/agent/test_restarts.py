"""P01, P18 and A32 between real processes: kill -9 and restart under the same name; SIGSTOP within and beyond the lease.

`RDMA_KV_KILLS` says how often; 10 unless given, 200 under `make faults`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from process_agents import ProcessAgent, Told, write_registry

from rdma_kv.config import Timeouts
from rdma_kv.transport.named import usable
from rdma_kv.transport.ucx_environment import host_id
from rdma_kv.types import Role

KILLS = int(os.environ.get("RDMA_KV_KILLS", "10"))
TIMEOUTS = Timeouts(transfer=20.0, quiesce=2.0)
SEND_S = 20.0
KNOWN_AGAIN_S = 2.0
SLACK = 3.0  # of a busy machine
WATCHED = int(bool(host_id()) and hasattr(os, "pidfd_open"))  # processes, beside one peer on one host


def skip_unless(transport: str) -> None:
    if not usable(transport, os.environ):
        pytest.skip(f"{transport} is not installed")


async def move(prefill: ProcessAgent, decode: ProcessAgent, request: int) -> None:
    await asyncio.gather(prefill.ask("send", request, SEND_S), decode.ask("receive", request, SEND_S))


@pytest.mark.long
@pytest.mark.parametrize("transport", ["ucx", "nixl"])
async def test_p01_p18_kill_the_decode_agent_restart_it_and_send(tmp_path, transport):
    """Every other time it dies in the middle of a transfer. The survivor lives, and serves its successor at once."""
    skip_unless(transport)
    registry, rnd = tmp_path / "cluster.toml", random.Random(1)
    prefill = ProcessAgent(Role.PREFILL, transport, registry, TIMEOUTS, {})
    decode = ProcessAgent(Role.DECODE, transport, registry, TIMEOUTS, {})
    running = [prefill, decode]
    known_s: list[float] = []
    ends: Counter[str] = Counter()
    try:
        await asyncio.gather(prefill.start(), decode.start())
        write_registry(registry, {Role.PREFILL: prefill.port, Role.DECODE: decode.port})
        await move(prefill, decode, 0)
        files = 0
        for kill in range(1, KILLS + 1):
            before, _ = await prefill.ask("linked", "")
            dying = kill % 2 == 0
            if dying:
                sending = asyncio.create_task(prefill.ask("send", 2 * kill, SEND_S))
                receiving = asyncio.create_task(decode.ask("receive", 2 * kill, SEND_S))
                await asyncio.wait([sending], timeout=rnd.random() * 0.01)
            running.remove(decode)
            await decode.kill()
            if dying:
                ends[await end_of(sending, receiving)] += 1
            decode = ProcessAgent(Role.DECODE, transport, registry, TIMEOUTS, {})
            running.append(decode)
            await decode.start()
            write_registry(registry, {Role.PREFILL: prefill.port, Role.DECODE: decode.port})
            name, linked_at = await prefill.ask("linked", before)
            known_s.append(linked_at - decode.listens_at)
            await move(prefill, decode, 2 * kill + 1)
            stats = await prefill.ask("stats")
            assert list(stats["link_transports"]) == [name]
            assert (
                stats["slots_free"] + sum(stats["slots_held"].values()) + stats["slots_retired"] == stats["slots_total"]
            )
            assert stats["watched_processes"] == WATCHED, "the living are watched, and only they"
            files = files or stats["files"]
            assert stats["files"] < files + 40, "descriptors of dead peers are left"
        async with asyncio.timeout(3 * TIMEOUTS.quiesce + 5.0):
            while sum((await prefill.ask("stats"))["slots_held"].values()):
                await asyncio.sleep(0.05)
        known_s.sort()
        median_s = statistics.median(known_s)
        print(
            f"{transport}: {KILLS} kills; known again after {median_s:.2f} s, at most {known_s[-1]:.2f} s; {dict(ends)}"
        )
        assert median_s < KNOWN_AGAIN_S
        assert known_s[-1] < SLACK * KNOWN_AGAIN_S
        statuses = [await agent.end() for agent in list(running)]
        running.clear()
        assert statuses == [0, 0]
    finally:
        for agent in running:
            await agent.kill()


async def end_of(sending: asyncio.Task, receiving: asyncio.Task) -> str:
    """How the survivor's call ended: it has succeeded before, or its error may be tried again. The killed one is silent."""
    outcomes = await asyncio.gather(sending, receiving, return_exceptions=True)
    sent, received = outcomes
    if isinstance(sent, Told):
        assert sent.retryable or sent.kind == "TransportError", sent
    else:
        assert not isinstance(sent, BaseException), sent
    assert received is None or isinstance(received, Told)
    return sent.kind if isinstance(sent, Told) else "sent"


# --- stopped processes -------------------------------------------------------------------------------------------------

SHORT = Timeouts(transfer=20.0, quiesce=2.0, heartbeat=0.2, lease=1.0)
LONG = Timeouts(transfer=20.0, quiesce=2.0, heartbeat=0.1, lease=60.0)


@contextlib.asynccontextmanager
async def pair(
    tmp_path: Path, transport: str, prefill: Timeouts, decode: Timeouts | None = None
) -> AsyncIterator[tuple[ProcessAgent, ProcessAgent]]:
    """Both agents, connected."""
    registry = tmp_path / "cluster.toml"
    agents = [
        ProcessAgent(role, transport, registry, timeouts, {})
        for role, timeouts in ((Role.PREFILL, prefill), (Role.DECODE, decode or prefill))
    ]
    try:
        await asyncio.gather(*(agent.start() for agent in agents))
        write_registry(registry, {agent.role: agent.port for agent in agents})
        await move(*agents, 0)
        yield agents[0], agents[1]
    finally:
        for agent in agents:
            os.kill(agent.pid, signal.SIGCONT)
            await agent.kill()


async def stats_until(agent: ProcessAgent, condition: Callable[[dict[str, Any]], object]) -> float:
    """Ask until it holds; how many seconds that took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    async with asyncio.timeout(20.0):
        while not condition(await agent.ask("stats")):
            await asyncio.sleep(0.005)
    return loop.time() - began


@pytest.mark.parametrize("transport", ["ucx", "nixl"])
@pytest.mark.parametrize("stopped", ["prefill", "decode"])
async def test_a32_a_stopped_peer_is_lost_with_its_lease_and_serves_again_when_it_goes_on(tmp_path, transport, stopped):
    """Its connection stays open, and no network library would ever notice (measured: not within 60 s)."""
    skip_unless(transport)
    async with pair(tmp_path, transport, SHORT) as (prefill, decode):
        victim, survivor = (prefill, decode) if stopped == "prefill" else (decode, prefill)
        what = "receive" if stopped == "prefill" else "send"
        os.kill(victim.pid, signal.SIGSTOP)
        calling = asyncio.create_task(survivor.ask(what, 1, SEND_S))
        began = asyncio.get_running_loop().time()
        with pytest.raises(Told) as told:
            await calling
        took_s = asyncio.get_running_loop().time() - began
        print(f"{transport}, {stopped} stopped: its peer's call ended after {took_s:.2f} s")
        assert told.value.kind == "PeerLostError"
        assert told.value.retryable
        assert "lease" in str(told.value)
        assert took_s < SLACK * SHORT.lease
        os.kill(victim.pid, signal.SIGCONT)
        for agent in (prefill, decode):
            await stats_until(agent, lambda stats: stats["links"] == 1)
        await move(prefill, decode, 2)
        for agent in (prefill, decode):
            await stats_until(agent, lambda stats: not stats["slots_held"])


@pytest.mark.parametrize("transport", ["ucx", "nixl"])
@pytest.mark.parametrize("stopped", ["prefill", "decode"])
async def test_a_peer_that_was_stopped_for_less_than_its_lease_loses_nothing(tmp_path, transport, stopped):
    skip_unless(transport)
    async with pair(tmp_path, transport, LONG) as (prefill, decode):
        victim, survivor = (prefill, decode) if stopped == "prefill" else (decode, prefill)
        os.kill(victim.pid, signal.SIGSTOP)
        calling = asyncio.create_task(survivor.ask("receive" if stopped == "prefill" else "send", 1, SEND_S))
        await asyncio.sleep(5 * LONG.heartbeat)  # it is suspect by then: its call waits
        assert not calling.done()
        os.kill(victim.pid, signal.SIGCONT)
        await asyncio.gather(calling, victim.ask("send" if stopped == "prefill" else "receive", 1, SEND_S))
        for agent in (prefill, decode):
            stats = await agent.ask("stats")
            assert stats["handshakes"] == 1
            assert not stats["slots_held"]
        await stats_until(survivor, lambda stats: not stats["suspects"])


@pytest.mark.long
@pytest.mark.parametrize("transport", ["ucx", "nixl"])
async def test_an_engine_that_blocks_its_loop_for_longer_than_its_own_lease_gives_nobody_up(tmp_path, transport):
    """What came meanwhile lies unread: the peer was not silent, we were deaf."""
    skip_unless(transport)
    impatient = Timeouts(transfer=20.0, quiesce=2.0, heartbeat=0.1, lease=0.5)
    async with pair(tmp_path, transport, LONG, impatient) as (prefill, decode):
        for _ in range(3):
            await decode.ask("block", 3 * impatient.lease)
        await move(prefill, decode, 1)
        for agent in (prefill, decode):
            assert (await agent.ask("stats"))["handshakes"] == 1
