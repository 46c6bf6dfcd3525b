"""`rdma-kv bench transport` and `transfer`: well-formed rows, verdicts true to value and goal, missing ones named."""

from __future__ import annotations

import json
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from rdma_kv.bench import contestants, perftest, transfer, transport
from rdma_kv.bench.cases import DEFAULT_SIZES, Case, parse_sizes
from rdma_kv.bench.goals import Bound, Missing, Relation, figure
from rdma_kv.bench.paths import PathSide, Pool
from rdma_kv.bench.rows import all_ok, as_json
from rdma_kv.bench.transfer import TransferOptions, measure_transfer
from rdma_kv.bench.transport import Entry, TransportOptions
from rdma_kv.bench.worker import Worker
from rdma_kv.errors import ConfigError, RdmaKvError
from rdma_kv.kernels.reference import gather, scatter
from rdma_kv.memory import HostMemory
from rdma_kv.types import Role

pytestmark = pytest.mark.long

FIELDS = {"name", "value", "unit", "goal", "ok"}
MIB = 1 << 20


def bench(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rdma_kv.cli.main", "bench", *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


def rows_of(done: subprocess.CompletedProcess[str]) -> list[dict]:
    """The rows, and all that must hold for them whatever was measured."""
    assert done.stdout, done.stderr
    (line,) = done.stdout.splitlines()
    answer = json.loads(line)
    assert answer.keys() == {"ok", "rows"}
    rows = answer["rows"]
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        assert row.keys() == FIELDS
        if row["goal"] is not None:
            assert row["ok"] is _meets(row), row
        elif isinstance(row["value"], str) and row["value"].startswith(("missing", "failed")):
            assert row["ok"] is False
        else:
            assert row["ok"] is None
    verdicts = [row["ok"] for row in rows if row["ok"] is not None]
    assert answer["ok"] is (bool(verdicts) and all(verdicts))
    assert done.returncode == (0 if answer["ok"] else 1)
    return rows


def _meets(row: dict) -> bool:
    """The verdict, from the relation that the row's name tells."""
    found = re.search(r" (>=|>|<=) ([\d.]+)$", row["name"])
    assert found, row
    assert float(found[2]) == row["goal"]
    value = row["value"]
    if isinstance(value, str):
        assert "missing" in value or "failed" in value
        return False
    return {">=": value >= row["goal"], ">": value > row["goal"], "<=": value <= row["goal"]}[found[1]]


# --- bench transport ---------------------------------------------------------------------------------------------------


def test_transport_rows_status_and_plot(tmp_path: Path):
    plot = tmp_path / "plot.svg"
    sizes = "8,64K,16M,64x4K"
    done = bench("transport", "--sizes", sizes, "--repetitions", "1", "--json", "--plot", str(plot))
    rows = rows_of(done)
    named = {row["name"]: row for row in rows}
    absent = {row["name"] for row in rows if row["ok"] is False and row["goal"] is None}
    for lane in ("tcp", "cma"):
        for who in ("ucx", "nixl", "NIXL API", "ucx_perftest"):
            assert {f"8 B: {who}, {lane}", f"{who}, {lane}"} & (named.keys() | absent)
        if f"nixl, {lane}" not in absent:
            assert named[f"64 x 4 KiB packed: nixl, {lane}"]["value"] > 0
            assert named[f"64 x 4 KiB packed and unpacked: nixl, {lane}"]["unit"] == "us"
            assert named[f"64 x 4 KiB: NIXL API, {lane}"]["value"] > 0
    assert named["16 MiB: raw socket, tcp"]["unit"] == "GB/s"
    assert named["16 MiB: memcpy"]["value"] > 0
    assert ".." in named["16 MiB: memcpy, spread"]["value"]
    goals = [row for row in rows if row["goal"] is not None]
    assert rows[: len(goals)] == goals, "ratios with a goal come first"
    assert sorted(row["goal"] for row in goals) == sorted([0.9] * 2 + [0.95] * 2 + [1.0] * 4)
    shapes = ElementTree.fromstring(plot.read_text())
    assert len(shapes.findall(".//{*}polyline")) >= 4


def test_a_contestant_that_is_missing_is_named_and_not_ok(monkeypatch: pytest.MonkeyPatch):
    def absent(*arguments: object) -> None:
        raise RdmaKvError("not in this installation")

    monkeypatch.setattr(transport, "find_perftest", absent)
    monkeypatch.setattr(contestants, "load_nixl", absent)
    monkeypatch.setattr(transport, "OURS", ("nixl", "pigeon"))
    monkeypatch.setattr(transport, "LANES", {"cma": {"UCX_TLS": None}})
    rows, _ = transport.measure_transport(TransportOptions(1, "16M"), lambda *told: None)
    missing = {row.name: row for row in rows if isinstance(row, Missing)}
    assert {"pigeon, cma", "NIXL API, cma", "ucx_perftest, cma", "ucx_perftest -e, cma"} <= missing.keys()
    assert all(row.ok is False and str(row.value).startswith("missing: ") for row in missing.values())
    assert "pigeon" in str(missing["pigeon, cma"].value)
    bounds = [row for row in rows if row.goal is not None]
    assert bounds
    assert all(row.ok is False and "missing" in str(row.value) for row in bounds)
    assert not all_ok(rows)
    assert not multiprocessing.active_children()


def test_a_contestant_that_fails_is_missing_from_then_on():
    class Broken:
        calls = 0

        def takes(self, case: Case) -> bool:
            return True

        def check(self, case: Case) -> None:
            raise RdmaKvError("other bytes arrived than were sent")

        def measure(self, case: Case) -> float:
            self.calls += 1
            return 1.0

    broken = Broken()
    entry = Entry("nixl", "tcp", broken)
    transport._rounds([entry], [Case(1, 8)], 2, lambda *told: None)
    assert entry.missing == "failed: other bytes arrived than were sent"
    assert not broken.calls
    (row,) = transport._missing([entry])
    assert row.ok is False


@pytest.mark.parametrize(
    ("ours", "lane", "peer", "case", "goal"),
    [
        ("ucx", "tcp", transport.SOCKET, Case(1, 16 * MIB), (0.9, ">=")),
        ("nixl", "tcp", transport.SOCKET, Case(1, 256 * MIB), (0.9, ">=")),
        ("ucx", "cma", transport.PERFTEST, Case(1, 256 * MIB), (0.95, ">=")),
        ("ucx", "tcp", transport.PERFTEST, Case(1, 256 * MIB), None),
        ("ucx", "cma", transport.PERFTEST_ERRORS, Case(1, 256 * MIB), None),
        ("ucx", "tcp", transport.API, Case(1, 16 * MIB), (1.0, ">")),
        ("ucx", "cma", transport.API, Case(1, 256 * MIB), (1.0, ">")),
        ("ucx", "cma", transport.API, Case(1, MIB), None),
        ("ucx", "tcp", transport.API, Case(65536, 4096), (5.0, ">=")),
        ("ucx", "tcp", transport.API, Case(65536, 4096, unpack=True), None),
        ("ucx", "tcp", transport.API, Case(1024, 65536), None),
    ],
    ids=str,
)
def test_goals_and_ratios(ours: str, lane: str, peer: str, case: Case, goal: tuple[float, str] | None):
    mine, other = Entry(ours, lane, None), Entry(peer, lane, None)
    mine.took_s[case], other.took_s[Case(case.pieces, case.piece_bytes)] = [9.0, 2.0, 1.0], [4.0, 4.0, 0.1]
    row = transport._ratio(mine, other, case)
    assert row.value == 2.0
    assert isinstance(row, Bound)
    if goal is None:
        assert row.goal is row.ok is None
    else:
        assert (row.goal, row.relation.value) == goal
        assert row.ok is (goal[0] < 2)


def test_the_default_sizes_are_all_that_the_goals_need():
    cases = parse_sizes(DEFAULT_SIZES)
    assert transport.PACKED_CASE in cases
    assert {case.total_bytes for case in cases if not case.scattered} >= transport.GOAL_BYTES
    names = ["8 B", "64 KiB", "1 MiB", "16 MiB", "256 MiB", "1,024 x 64 KiB", "65,536 x 4 KiB"]
    assert list(dict.fromkeys(case.name for case in cases)) == names


@pytest.mark.parametrize("unpack", [False, True])
def test_arrival_is_seen_and_its_absence(unpack: bool):
    """The control of the check: what the kernels would bring passes, one other byte does not."""
    case = Case(16, 512, unpack=unpack)
    source = HostMemory(case.total_bytes)
    source.view[:] = np.frombuffer(np.random.default_rng(3).bytes(case.total_bytes), dtype=np.uint8)
    landing = contestants.Landing(source, paged=False)
    assert not landing.arrived(case)
    gather(case.chunks(landing.memory.address, source.address, case.src_offsets()))
    if unpack:
        assert not landing.arrived(case)
        scatter(case.chunks(landing.memory.address, landing.pages.address, case.dst_offsets()))
    assert landing.arrived(case)
    (landing.pages if unpack else landing.memory).view[-1] ^= 1
    assert not landing.arrived(case)


# --- ucx_perftest, rows, workers ---------------------------------------------------------------------------------------


def test_perftest_is_named_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(perftest.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RdmaKvError, match="ucx_perftest is not installed"):
        perftest.find_perftest()


def test_perftest_output_is_read_and_its_failure_told():
    line = (
        "                           8      0.211 23321.509 23321.509      686.06     686.06          43          43\n"
    )
    done = subprocess.CompletedProcess([], 0, "+---+\n" + line, "")
    assert perftest._parse(done) == pytest.approx(0.023321509)
    with pytest.raises(RdmaKvError, match="no such device"):
        perftest._parse(subprocess.CompletedProcess([], 1, "", "no such device\n"))


@pytest.mark.parametrize(
    ("relation", "below", "equal", "above"),
    [
        (Relation.AT_LEAST, False, True, True),
        (Relation.ABOVE, False, False, True),
        (Relation.AT_MOST, True, True, False),
    ],
)
def test_relations(relation: Relation, below: bool, equal: bool, above: bool):
    verdicts = [Bound("x", value, "ratio", 1.0, relation).ok for value in (0.9, 1.0, 1.1)]
    assert verdicts == [below, equal, above]
    assert Bound("x", "missing: y", "ratio", 1.0, relation).ok is False


def test_figures_and_missing_rows():
    median, spread = figure("x", [3.0, 1.0, 2.0], "us")
    assert (median.value, spread.value, median.ok) == (2.0, "1..3", None)
    assert as_json([Missing("y", "missing: z", "")]) == {
        "ok": False,
        "rows": [{"name": "y", "value": "missing: z", "unit": "", "goal": None, "ok": False}],
    }


class _Ends:
    async def fail(self) -> None:
        raise ValueError("spoilt")

    async def leave(self) -> None:
        sys.exit(3)

    async def close(self) -> None:
        """Nothing to do."""


def test_a_worker_tells_its_failure_and_its_end():
    worker = Worker("it", _Ends, {})
    with pytest.raises(RdmaKvError, match="it: ValueError: spoilt"):
        worker.ask("fail")
    with pytest.raises(RdmaKvError, match="it has ended"):
        worker.ask("leave")
        worker.ask("fail")
    worker.end()
    assert not multiprocessing.active_children()


# --- bench transfer ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["nixl", "loopback"])
def test_transfer_rows_and_status(backend: str):
    done = bench("transfer", "--transport", backend, "--mib", "64", "--repetitions", "1", "--json")
    rows = rows_of(done)
    named = {row["name"]: row for row in rows}
    assert [row["goal"] for row in rows[:5]] == [0.9] * 4 + [3.0]
    assert all(row["goal"] is None for row in rows[5:])
    for what in ("1 x 64 MiB", "8 x 8 MiB", "64 x 1 MiB"):
        fast, base = named[f"{what}: transfer"]["value"], named[f"{what}: baseline"]["value"]
        assert named[f"{what}: transfer to its baseline >= 0.9"]["value"] == pytest.approx(fast / base)
    longest = named["64 x 1 MiB: longest wait to the median, worst round <= 3"]
    assert longest["value"] >= 1
    assert named["lane"]["value"] in {"nixl": {"cma", "tcp", "rdma"}, "loopback": {"loopback"}}[backend]


def test_other_bytes_than_were_sent_are_an_error(monkeypatch: pytest.MonkeyPatch):
    right = Pool.wrong_pages

    def spoilt(self: Pool, sent: Pool) -> int:
        self.memory.view[0] ^= 1
        return right(self, sent)

    monkeypatch.setattr(Pool, "wrong_pages", spoilt)
    with pytest.raises(RdmaKvError, match="1 pages arrived with other bytes"):
        measure_transfer(TransferOptions("loopback", 1, 64), lambda *told: None)
    assert not multiprocessing.active_children()


def test_a_transport_that_is_missing_is_a_row(monkeypatch: pytest.MonkeyPatch):
    async def absent(self: PathSide) -> dict[str, int]:
        raise RdmaKvError("not in this installation")

    monkeypatch.setattr(PathSide, "start", absent)
    (row,) = measure_transfer(TransferOptions("ucx", 1, 64), lambda *told: None)
    assert (row.name, row.ok) == ("ucx", False)
    assert "not in this installation" in str(row.value)
    assert not multiprocessing.active_children()


def test_all_requests_together_are_all_pages_once():
    pool = Pool(Role.DECODE, HostMemory(64 * MIB))
    for count in transfer.COUNTS:
        parts = pool.slices(count)
        assert [page for part in parts for page in part] == pool.pages
        assert len(pool.requests(count)) == count


# --- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["transport", "--sizes", "8,many"], "--sizes"),
        (["transport", "--sizes", "8,8"], "--sizes"),
        (["transport", "--sizes", "2048M"], "--sizes"),
        (["transport", "--repetitions", "0"], "--repetitions"),
        (["transport", "--plot", "chart.png"], "--plot"),
        (["transfer", "--transport", "pigeon"], "--transport"),
        (["transfer", "--mib", "100"], "--mib"),
    ],
    ids=str,
)
def test_bad_options_are_one_line_and_exit_2(options: list[str], field: str):
    done = bench(*options, "--json")
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert field in line


def test_options_are_checked_in_code_too():
    for wrong in (lambda: TransportOptions(0), lambda: TransferOptions("nixl", 0), lambda: TransferOptions(mib=63)):
        with pytest.raises(ConfigError):
            wrong()
