"""The synchronous client: threads of an engine that knows no asyncio, with sidecars in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from sidecar_rig import DECODE, PREFILL, Pair, SidecarProcess, engine_config, until_quiet

from rdma_kv.client import SyncClient
from rdma_kv.errors import ClosedError, ConfigError, LocalProtocolError, TransferTimeout
from rdma_kv.types import Role

PAGES, TOKENS = [5, 2], 32


@contextlib.asynccontextmanager
async def sidecars(folder):
    async with contextlib.AsyncExitStack() as stack:
        made = {}
        for role in Role:
            made[role] = SidecarProcess(folder, role.value)
            stack.push_async_callback(made[role].close)
            await made[role].start()
        yield made


async def engine(folder, work: Callable[[Pair], None]) -> None:
    """Run `work` in a thread, with two clients that are up and both sidecars; all is free at the end."""
    async with sidecars(folder) as running:

        def engines() -> None:
            both = Pair(folder)
            with contextlib.ExitStack() as stack:
                for role in Role:
                    both.clients[role] = stack.enter_context(SyncClient(engine_config(role), running[role].socket))
                    both.register(role)
                both.write_registry()
                work(both)

        await asyncio.to_thread(engines)
        for sidecar in running.values():
            assert (await until_quiet(sidecar))["agents"] == []


def send(both: Pair, request: int, pages=PAGES, ready: threading.Event | None = None) -> None:
    both.memory[Role.PREFILL].fill(request, pages, TOKENS)
    with both.prefill.send(f"k{request}", 0, pages, to=DECODE, tokens=TOKENS, timeout_s=20.0) as out:
        out.push((0, 16))
        out.push((16, TOKENS), ready=ready)
        out.metadata["request"] = request
    assert out.to == DECODE
    assert out.error is None


def receive(both: Pair, request: int, pages=PAGES) -> None:
    got = both.decode.receive(f"k{request}", 0, pages, source=PREFILL, tokens=TOKENS, timeout_s=20.0)
    assert got.metadata == {"request": request}
    both.memory[Role.DECODE].check(request, pages, 0, TOKENS)


async def test_threads_move_requests_at_a_time(tmp_path):
    def work(both: Pair) -> None:
        with ThreadPoolExecutor(16) as threads:
            calls = []
            for request in range(8):  # each has pages of its own
                pages = [2 * request, 2 * request + 1]
                calls += [threads.submit(send, both, request, pages), threads.submit(receive, both, request, pages)]
            for call in calls:
                call.result(timeout=30)
        assert both.prefill.stats()["transfers"] == 0

    await engine(tmp_path, work)


async def test_errors_come_to_the_thread_that_called(tmp_path):
    def work(both: Pair) -> None:
        with pytest.raises(ConfigError) as caught:
            both.prefill.send("k", 0, [1], tokens=TOKENS)
        assert caught.value.field == "pages['kv']"
        with pytest.raises(LocalProtocolError, match="receive belongs to a decode agent"):
            both.prefill.receive("k", 0, PAGES, source=DECODE, tokens=TOKENS)
        with pytest.raises(TransferTimeout):
            both.decode.receive("k", 0, PAGES, tokens=TOKENS, timeout_s=0.1)
        with pytest.raises(ZeroDivisionError), both.prefill.send("k2", 0, PAGES, to=DECODE, tokens=TOKENS) as out:
            out.push((0, 16))
            raise ZeroDivisionError
        ready = threading.Event()
        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(send, both, 3, PAGES, ready), threads.submit(receive, both, 3)]
            ready.set()
            for call in calls:
                call.result(timeout=30)

    await engine(tmp_path, work)


async def test_closing_ends_the_calls_of_other_threads(tmp_path):
    def work(both: Pair) -> None:
        with ThreadPoolExecutor(1) as threads:
            call = threads.submit(both.decode.receive, "k", 0, PAGES, tokens=TOKENS)
            while not both.decode._client._link.calls:
                time.sleep(0.001)
            both.decode.close()
            with pytest.raises(ClosedError):
                call.result(timeout=30)
        with pytest.raises(ClosedError):
            both.decode.receive("k", 0, PAGES, tokens=TOKENS)
        both.decode.close()

    await engine(tmp_path, work)


async def test_two_threads_may_close_at_a_time(tmp_path):
    def work(both: Pair) -> None:
        with ThreadPoolExecutor(3) as threads:
            call = threads.submit(both.decode.receive, "k", 0, PAGES, tokens=TOKENS)
            while not both.decode._client._link.calls:
                time.sleep(0.001)
            closes = [threads.submit(both.decode.close) for _ in range(2)]
            for close in closes:
                close.result(timeout=30)
            with pytest.raises(ClosedError):
                call.result(timeout=30)

    await engine(tmp_path, work)
