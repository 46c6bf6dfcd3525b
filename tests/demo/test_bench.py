"""`rdma-kv bench idle` as a command: well-formed rows, a true exit status, budgets with threefold slack."""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys

import numpy as np
import pytest

from rdma_kv.bench import idle
from rdma_kv.bench.idle import IdleOptions, measure_idle
from rdma_kv.bench.member import PAGE_BYTES, Pool
from rdma_kv.errors import RdmaKvError
from rdma_kv.transport.named import names
from rdma_kv.types import Role

SLACK = 3  # times the goal: other work may share the cores
FIELDS = {"name", "value", "unit", "goal", "ok"}


def bench_idle(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rdma_kv.cli.main", "bench", "idle", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize(
    ("transport", "processes", "lane"),
    [
        ("auto", ("prefill", "decode"), None),
        ("nixl", ("prefill", "decode"), None),
        ("loopback", ("both agents",), "loopback"),
    ],
)
def test_rows_and_status(transport: str, processes: tuple[str, ...], lane: str | None):
    done = bench_idle("--seconds", "1", "--mib", "32", "--json", "--transport", transport)
    assert done.stdout, done.stderr
    (line,) = done.stdout.splitlines()
    answer = json.loads(line)
    assert answer.keys() == {"ok", "rows"}
    rows = {row["name"]: row for row in answer["rows"]}
    assert len(rows) == len(answer["rows"])
    for row in answer["rows"]:
        assert row.keys() == FIELDS
        if row["goal"] is None:
            assert row["ok"] is None
        else:
            assert row["ok"] is (row["value"] < row["goal"])
            if transport != "loopback":  # whose copies run on the event loop, and it is for tests
                assert row["value"] < SLACK * row["goal"], row
    for name in processes:
        assert rows[f"idle CPU, {name}"]["goal"] == 1
        lag = f"event-loop lag while KV moves, {name}"
        assert rows[f"{lag}, p99"]["goal"] == 10
        assert rows[f"{lag}, p50"]["value"] <= rows[f"{lag}, p99"]["value"] <= rows[f"{lag}, longest of all"]["value"]
        assert rows[f"event loop ready but without a core, {name}"]["value"] >= 0
    assert sum(row["goal"] is not None for row in answer["rows"]) == 2 * len(processes)
    assert rows["32 MiB of KV, push to done"]["value"] > 0
    assert rows["transport"]["value"] == names(transport, also=("loopback",))[0]
    assert rows["lane"]["value"] in ({lane} if lane else {"cma", "tcp", "rdma"})
    assert answer["ok"] is all(row["ok"] for row in answer["rows"] if row["goal"] is not None)
    assert done.returncode == (0 if answer["ok"] else 1)
    assert done.stderr.count("moved 32 MiB") == idle.MOVES


@pytest.mark.parametrize(
    ("options", "field"),
    [(["--transport", "pigeon"], "--transport"), (["--seconds", "0"], "--seconds"), (["--mib", "0"], "--mib")],
    ids=lambda value: str(value),
)
def test_bad_options_are_one_line_and_exit_2(options: list[str], field: str):
    done = bench_idle("--json", *options)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert field in line


def test_other_bytes_than_were_sent_are_an_error(monkeypatch: pytest.MonkeyPatch):
    """The control: the decode side compares with a pool that the prefill side does not have."""
    right = Pool.wrong_pages

    def spoilt(self: Pool) -> int:
        self.memory.reshape(-1)[0] ^= 1
        return right(self)

    monkeypatch.setattr(Pool, "wrong_pages", spoilt)
    with pytest.raises(RdmaKvError, match="1 of 2 pages"):
        measure_idle(IdleOptions(0.01, "loopback", 2), lambda text: None)
    assert not multiprocessing.active_children()


def test_a_process_that_ends_early_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(idle, "serve", lambda *arguments: idle.asyncio.sleep(0))
    with pytest.raises(RdmaKvError, match="has ended"):
        measure_idle(IdleOptions(0.01, "loopback", 2), lambda text: None)
    assert not multiprocessing.active_children()


def test_pages_are_compared_whatever_their_layout_and_place():
    sent, arrived = Pool(Role.PREFILL, 3), Pool(Role.DECODE, 3)
    assert sent.memory.nbytes == arrived.memory.nbytes == 3 * PAGE_BYTES
    assert arrived.wrong_pages() == 3
    for index in range(3):
        arrived.page(index)[:] = sent.page(index)
    assert arrived.wrong_pages() == 0
    assert not np.array_equal(sent.memory.reshape(-1), arrived.memory.reshape(-1))
    arrived.page(1)[0, 0, 0, 0, 0] ^= 1
    assert arrived.wrong_pages() == 1
