"""`rdma-kv bench sidecar`, for real and with few bytes: engines and sidecars in processes of their own."""

from __future__ import annotations

import multiprocessing
import os
import subprocess

import numpy as np
import pytest

from rdma_kv.bench import sidecar
from rdma_kv.bench.sidecar import Case, Engine, SidecarOptions, measure_sidecar
from rdma_kv.errors import ConfigError, RdmaKvError
from rdma_kv.types import Role


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sidecar, "POOL_BYTES", 16 << 20)
    monkeypatch.setattr(sidecar, "CASES", (Case(1, 1, 3), Case(3, 5, 1)))


@pytest.fixture
def sidecars(monkeypatch: pytest.MonkeyPatch):
    """Those that were started; all must have ended by the end of the test, and the engines too."""
    started: list[subprocess.Popen[bytes]] = []

    class Noted(subprocess.Popen[bytes]):
        def __init__(self, *arguments, **more):
            super().__init__(*arguments, **more)
            started.append(self)

    monkeypatch.setattr(sidecar.subprocess, "Popen", Noted)
    yield started
    assert len(started) == 2
    assert all(process.poll() is not None for process in started)
    assert not multiprocessing.active_children()


def quiet(text: str, done: int, total: int) -> None:
    pass


@pytest.mark.parametrize("transport", ["ucx", pytest.param("nixl", marks=pytest.mark.long)])
def test_both_ways_are_measured_and_nobody_is_left(transport: str, sidecars):
    rows = {row.name: row.value for row in measure_sidecar(SidecarOptions(transport, 1), quiet)}
    for case in ("1 x 1 MiB", "3 x 5 MiB"):
        assert rows[f"{case}: time, by sidecars to by agents"] == pytest.approx(
            rows[f"{case}: sidecar"] / rows[f"{case}: agent"]
        )
        assert rows[f"{case}: CPU of engines and sidecars, by sidecars to by agents"] > 0
        assert rows[f"{case}: sidecar, CPU of the sidecars"] > 0
    assert rows["transport"] == transport


def test_control_wrong_pages_are_seen_and_nobody_is_left_after_an_error(monkeypatch: pytest.MonkeyPatch, sidecars):
    """A prefill engine that sends other pages than it should."""
    right = Engine._parts

    def parts(self: Engine, requests: int, pages: int) -> list[tuple[int, list[int]]]:
        found = right(self, requests, pages)
        return [(n, part[::-1]) for n, part in found] if self._role is Role.PREFILL else found

    monkeypatch.setattr(sidecar, "CASES", (Case(1, 6, 1),))
    monkeypatch.setattr(Engine, "_parts", parts)
    with pytest.raises(RdmaKvError, match="6 pages arrived with other bytes"):
        measure_sidecar(SidecarOptions("ucx", 1), quiet)


@pytest.mark.long
def test_control_a_page_that_nobody_sent_is_seen(monkeypatch: pytest.MonkeyPatch, sidecars):
    right = Engine.wipe

    async def wipe(self: Engine) -> None:
        await right(self)
        self._pool.planes[:, self._pool.pages[-1]] = 1

    monkeypatch.setattr(Engine, "wipe", wipe)
    with pytest.raises(RdmaKvError, match="1 pages arrived with other bytes"):
        measure_sidecar(SidecarOptions("ucx", 1), quiet)


def test_cpu_of_a_process_is_its_own_clock():
    before = sidecar.cpu_s(os.getpid())
    while sidecar.cpu_s(os.getpid()) < before + 0.02:
        np.arange(10_000).sum()


def test_a_transport_within_one_process_is_refused():
    with pytest.raises(ConfigError) as caught:
        SidecarOptions("loopback")
    assert caught.value.field == "--transport"
