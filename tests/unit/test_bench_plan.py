"""`rdma-kv bench plan`: rows that are true to what they say, budgets with threefold slack, and nothing heavy imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rdma_kv.bench import plan as bench_plan
from rdma_kv.bench.rows import Row, all_ok, as_json, median_ms, percentile
from rdma_kv.cli import main
from rdma_kv.errors import ConfigError

SLACK = 3  # times the goal: other work may share the cores
FIELDS = {"name", "value", "unit", "goal", "ok"}

Capture = pytest.CaptureFixture[str]


def bench(*options: str) -> int:
    return main.run(["bench", "plan", *options])


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """The command with rows that a test gives it."""
    monkeypatch.setattr(bench_plan, "measure_plan", lambda progress: list(request.param))


# --- the command -------------------------------------------------------------------------------------------------------


def test_every_goal_is_measured_and_the_status_is_true():
    done = subprocess.run(
        [sys.executable, "-m", "rdma_kv.cli.main", "bench", "plan", "--json"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    (line,) = done.stdout.splitlines()
    answer = json.loads(line)
    assert answer.keys() == {"ok", "rows"}
    rows = answer["rows"]
    assert len({row["name"] for row in rows}) == len(rows)
    for row in rows:
        assert row.keys() == FIELDS
        assert row["unit"] == "ms"
        assert row["ok"] is (row["value"] < row["goal"])
        assert 0 < row["value"] < SLACK * row["goal"], row
        assert row["name"] in done.stderr
    assert answer["ok"] is all(row["ok"] for row in rows)
    assert done.returncode == (0 if answer["ok"] else 1)
    goals = {row["name"]: row["goal"] for row in rows}
    for part, goal, count in (("byte runs of 65,536 pages", 20, 8), ("one request", 10, 4), ("table of all", 200, 2)):
        assert [found for name, found in goals.items() if name.startswith(part)] == [goal] * count
    assert any("nhd, half of the heads" in name for name in goals)
    assert any("1,048,576 DP pairs" in name for name in goals)
    assert any("16,384 DP pairs" in name for name in goals)


def test_it_needs_neither_torch_nor_nixl():
    code = """
import sys
from rdma_kv.bench import plan
from rdma_kv.cli import main
plan.measure_plan = lambda progress: []
main.run(["bench", "plan", "--json"])
print(sorted(name for name in sys.modules if name.split(".")[0] in {"torch", "triton", "nixl", "nixl_cu12", "nixl_cu13"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("measured", "status"),
    [
        ((Row("a", 1.0, "ms", 2.0), Row("b", "cma", "")), 0),
        ((Row("a", 2.0, "ms", 2.0),), 1),
        ((Row("a", 1.0, "ms", 2.0), Row("b", 3.0, "ms", 2.0)), 1),
        ((Row("b", 3.0, "ms"),), 1),
    ],
    indirect=["measured"],
    ids=["met", "reached-is-not-below", "one-of-two-missed", "no-goal-at-all"],
)
@pytest.mark.usefixtures("measured")
def test_the_status_is_that_of_the_rows(capsys: Capture, status: int):
    assert bench("--json") == status
    assert json.loads(capsys.readouterr().out)["ok"] is (status == 0)
    assert bench() == status


@pytest.mark.parametrize("measured", [(Row("name", 3.25, "ms", 2.0), Row("lane", "cma", ""))], indirect=True)
@pytest.mark.usefixtures("measured")
def test_the_table_shows_values_and_goals(capsys: Capture):
    assert bench() == 1
    rows = [line.split("│")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert cells == [["name", "3.250", "ms", "< 2", "NO"], ["lane", "cma", "", "", ""]]


@pytest.mark.parametrize("options", [["--goal", "1"], ["extra"]], ids=str)
def test_usage_is_refused(capsys: Capture, options: list[str]):
    assert bench(*options) == main.BAD_INPUT
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1


# --- rows --------------------------------------------------------------------------------------------------------------


def test_a_row_knows_whether_its_goal_is_met():
    assert Row("a", 1.0, "ms", 2.0).ok is True
    assert Row("a", 2.0, "ms", 2.0).ok is False
    assert Row("a", float("nan"), "ms", 2.0).ok is False
    assert Row("a", 1.0, "ms").ok is None
    assert not all_ok([])
    assert as_json([Row("a", 1.0, "ms")]) == {
        "ok": False,
        "rows": [{"name": "a", "value": 1.0, "unit": "ms", "goal": None, "ok": None}],
    }


def test_percentiles_are_samples():
    samples = [float(n) for n in range(100, 0, -1)]
    assert percentile(samples, 0.50) == 50
    assert percentile(samples, 0.99) == 99
    assert percentile([7.0], 0.99) == 7


def test_the_median_counts_each_repetition_after_its_preparation():
    calls: list[str] = []
    took_ms = median_ms(lambda: calls.append("work"), 3, before=lambda: calls.append("before"))
    assert calls == ["before", "work"] * 3
    assert 0 < took_ms < 100


def test_other_transports_are_refused():
    from rdma_kv.bench.idle import IdleOptions
    from rdma_kv.bench.transfer import TransferOptions

    for wrong in (lambda: IdleOptions(1.0, "pigeon", 32), lambda: TransferOptions("pigeon")):
        with pytest.raises(ConfigError) as refused:
            wrong()
        assert refused.value.field == "--transport"


def test_auto_is_measured_as_what_two_agents_choose():
    from rdma_kv.bench.transfer import TransferOptions
    from rdma_kv.transport.named import PREFERENCE, names

    assert TransferOptions("auto").backend == names("auto")[0]
    assert len(TransferOptions("auto").hosts) == 2
    for name in (*PREFERENCE, "loopback"):
        assert TransferOptions(name).backend == name
