"""Engines and sidecars in processes of their own, over the transports that work between processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
from sidecar_rig import (
    DECODE,
    LIMIT_S,
    PAGES,
    TOKENS,
    TRANSPORTS,
    EngineProcess,
    SidecarProcess,
    engine_config,
    pair,
    until_quiet,
)

from rdma_kv.client import Client
from rdma_kv.errors import (
    ClosedError,
    ErrorCode,
    PeerLostError,
    RdmaKvError,
    SidecarLostError,
    TransferAborted,
    TransportError,
)
from rdma_kv.types import Role


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_requests_arrive_right(tmp_path, transport):
    async with pair(tmp_path, transport=transport) as both:
        for request in range(3):
            got = await both.move(request)
            assert got.metadata == {"request": request}
            assert got.tokens == {"kv": (0, 120)}
        stats = await both.prefill.stats()
        assert stats["transports"] == {transport: "started"}
        assert stats["lanes"]
        print(transport, stats["lanes"])
        await both.quiet()


# --- a sidecar dies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", list(Role))
async def test_a_sidecar_is_killed_in_the_middle_and_comes_back(tmp_path, victim):
    async with pair(tmp_path) as both:
        await both.move(1)
        both.memory[Role.PREFILL].fill(2, PAGES, TOKENS)
        both.memory[Role.DECODE].array[:] = 0xA5
        receiving = asyncio.create_task(both.receive(2))

        async def send() -> None:
            async with both.prefill.send("k2", 0, PAGES, to=DECODE, tokens=TOKENS, timeout_s=LIMIT_S) as out:
                await out.push((0, 64))
                while len(both.memory[Role.DECODE].written()) < 64:
                    await asyncio.sleep(0.001)
                await both.sidecars[victim].kill()
                while out.error is None:
                    await asyncio.sleep(0.001)
                await out.push((64, TOKENS))

        began = time.monotonic()
        sent, received = await asyncio.gather(send(), receiving, return_exceptions=True)
        errors = {Role.PREFILL: sent, Role.DECODE: received}
        assert time.monotonic() - began < 5.0
        assert isinstance(errors[victim], SidecarLostError), errors
        assert isinstance(errors[victim.other], (PeerLostError, TransportError)), errors
        assert all(error.retryable for error in errors.values())
        waiting = asyncio.create_task(both.clients[victim].stats())  # calls wait for the sidecar
        await both.sidecars[victim].start()
        assert (await waiting)["transfers"] == 0
        both.write_registry()
        await both.move(2, attempt=1)
        await both.quiet()


@pytest.mark.long
async def test_new_calls_wait_for_the_sidecar_as_long_as_they_may_take(tmp_path):
    async with pair(tmp_path) as both:
        await both.move(1)
        await both.sidecars[Role.DECODE].kill()
        with pytest.raises(SidecarLostError) as caught:
            await both.receive(2, timeout_s=0.3)
        assert caught.value.retryable
        assert str(both.sidecars[Role.DECODE].socket) in caught.value.where
        receiving = asyncio.create_task(both.receive(3))
        await both.sidecars[Role.DECODE].start()
        await both.decode.stats()
        both.write_registry()
        await both.send(3)
        await receiving


@pytest.mark.long
async def test_a_sidecar_that_is_stopped_does_not_hold_a_call_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("rdma_kv.sidecar.link.ANSWER_S", 0.2)
    async with pair(tmp_path) as both:
        await both.move(1)
        sidecar = both.sidecars[Role.DECODE]
        sidecar.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(SidecarLostError, match="has not ended a call"):
                await both.receive(2, timeout_s=0.2)
        finally:
            sidecar.send_signal(signal.SIGCONT)
        await both.decode.stats()  # attached again, when the former agent has closed
        both.write_registry()
        await both.move(3)
        await both.quiet()


# --- an engine dies ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["send", "send forked"])
async def test_an_engine_is_killed_in_the_middle(tmp_path, what):
    async with pair(tmp_path) as both:
        await both.clients.pop(Role.PREFILL).close()
        sidecar = both.sidecars[Role.PREFILL]
        engine = EngineProcess(Role.PREFILL, sidecar.socket, what)
        try:
            both.write_registry({Role.PREFILL: await engine.start(), Role.DECODE: both.decode.address})
            receiving = asyncio.create_task(both.receive(1))
            engine.go_on()
            await engine.did("pushed")
            while len(both.memory[Role.DECODE].written()) < TOKENS // 2:
                await asyncio.sleep(0.001)
            await engine.kill()
            began = time.monotonic()
            with pytest.raises(TransferAborted) as caught:
                await receiving
            assert time.monotonic() - began < 1.0
            assert caught.value.cause is ErrorCode.SIDECAR_LOST
            assert caught.value.retryable
            line = await sidecar.logged(lambda line: line.get("event") == "transfer" and line["key"] == "k1")
            assert (line["verb"], line["outcome"]) == ("send", "SidecarLostError")
            status = await until_quiet(sidecar)
            assert status["agents"] == []
            await until_quiet(both.sidecars[Role.DECODE])
            client = both.clients[Role.PREFILL] = Client(engine_config(Role.PREFILL), sidecar.socket)
            async with client:
                both.register(Role.PREFILL)
                both.write_registry()
                await both.move(1, attempt=1)
                await both.quiet()
        finally:
            await engine.kill()


# --- the end -----------------------------------------------------------------------------------------------------------


async def get(address: str, path: str) -> int:
    """The HTTP status of a probe."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return int(answer.split()[1])


@pytest.mark.long
async def test_sigterm_drains(tmp_path):
    async with pair(tmp_path) as both:
        await both.move(1)
        sidecar = both.sidecars[Role.DECODE]
        health = next(line["health"] for line in sidecar.lines if line.get("event") == "ready")
        assert [await get(health, path) for path in ("/healthz", "/readyz", "/")] == [200, 200, 404]
        receiving = asyncio.create_task(both.receive(2))
        while not (await both.decode.stats())["transfers"]:
            await asyncio.sleep(0.001)
        sidecar.send_signal(signal.SIGTERM)
        line = await sidecar.logged(lambda line: "draining" in line.get("text", ""))
        assert "1 calls of 1 agents run" in line["text"]
        assert [await get(health, path) for path in ("/healthz", "/readyz")] == [200, 503]
        assert (await sidecar.status())["ready"] is False
        with pytest.raises(SidecarLostError, match="is draining") as caught:
            await both.receive(3)
        assert caught.value.retryable
        await both.send(2)
        await receiving
        assert await sidecar.ended() == 0
        assert any("all calls have ended" in line.get("text", "") for line in sidecar.lines)
        assert not sidecar.socket.exists()


@pytest.mark.parametrize("hurried", [False, True], ids=["deadline", "second signal"])
@pytest.mark.long
async def test_calls_that_do_not_end_are_cut_off_and_the_status_says_so(tmp_path, hurried):
    async with pair(tmp_path, drain_s=30.0 if hurried else 0.3) as both:
        sidecar = both.sidecars[Role.DECODE]
        receiving = asyncio.create_task(both.receive(1))
        while not (await both.decode.stats())["transfers"]:
            await asyncio.sleep(0.001)
        sidecar.send_signal(signal.SIGTERM)
        await sidecar.logged(lambda line: "draining" in line.get("text", ""))
        if hurried:
            sidecar.send_signal(signal.SIGINT)
        with pytest.raises(SidecarLostError):
            await receiving
        assert await sidecar.ended() == 3


@pytest.mark.long
async def test_an_engine_that_closes_ends_its_calls_and_its_agent(tmp_path):
    async with pair(tmp_path) as both:
        receiving = asyncio.create_task(both.receive(1))
        while not (await both.decode.stats())["transfers"]:
            await asyncio.sleep(0.001)
        await both.decode.close()
        with pytest.raises(ClosedError):
            await receiving
        assert (await both.sidecars[Role.DECODE].status())["agents"] == []


# --- what it costs -----------------------------------------------------------------------------------------------------


def cpu_s(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.long
async def test_idle_costs_nothing(tmp_path):
    """Attached, connected, after a transfer that has begun on the link; under 1 % of a core in both processes."""
    async with pair(tmp_path) as both:
        await both.clients.pop(Role.PREFILL).close()
        sidecar = both.sidecars[Role.PREFILL]
        engine = EngineProcess(Role.PREFILL, sidecar.socket, "idle")
        try:
            both.write_registry({Role.PREFILL: await engine.start(), Role.DECODE: both.decode.address})
            engine.go_on()
            await engine.did("idle")
            with pytest.raises(RdmaKvError):
                await both.receive(1, timeout_s=0.5)  # so that there is a link
            before = cpu_s(engine.pid), cpu_s(sidecar.pid)
            await asyncio.sleep(2.0)  # what is measured
            spent = cpu_s(engine.pid) - before[0], cpu_s(sidecar.pid) - before[1]
            print(f"CPU seconds in 2 s: engine {spent[0]}, sidecar {spent[1]}")
            assert max(spent) <= 0.02
        finally:
            await engine.kill()


@pytest.mark.long
async def test_start_to_ready(tmp_path):
    sidecar = SidecarProcess(tmp_path, "one")
    began = time.monotonic()
    try:
        await sidecar.start()
        print(f"start to ready: {time.monotonic() - began:.2f} s")
        assert time.monotonic() - began < 10.0  # the goal is 3 s on a machine that does nothing else
    finally:
        await sidecar.close()


async def cli(*arguments: str) -> tuple[int, str, str]:
    """Exit status and output of a command."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "rdma_kv.cli.main",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(LIMIT_S):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.mark.long
async def test_the_command_says_how_a_sidecar_is_and_does_not_start_a_second(tmp_path):
    async with pair(tmp_path) as both:
        await both.move(1)
        sidecar = both.sidecars[Role.PREFILL]
        status, out, _ = await cli("agent", "--status", "--socket", str(sidecar.socket), "--json")
        assert (status, out.count("\n")) == (0, 1)
        answer = json.loads(out)
        assert (answer["pid"], answer["ready"], answer["slots_total"], answer["slots_held"]) == (
            sidecar.pid,
            True,
            4,
            0,
        )
        (agent,) = answer["agents"]
        assert agent["id"] == "test/prefill/prefill/0"
        assert agent["address"] == "{}:{}".format(*both.prefill.address)
        assert agent["stats"]["lanes"]
        status, out, _ = await cli("agent", "--status", "--config", str(sidecar.config))
        assert status == 0
        assert "attached" in out
        assert "4/0/0/4" in out
        status, _, err = await cli("agent", "--config", str(sidecar.config))
        assert status == 2
        assert "served by another sidecar" in err
        await both.move(2)
