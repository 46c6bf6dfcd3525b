"""`rdma-kv bench checksum`: every contestant is measured, the goal can be missed, and nothing heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rdma_kv.bench import checksum as bench
from rdma_kv.bench.checksum import ChecksumOptions, measure_checksum
from rdma_kv.cli import main
from rdma_kv.errors import ConfigError, RdmaKvError
from rdma_kv.kernels.checksum import ALGORITHM, Piece

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_SLOTS", 2)


def test_the_command(capsys: Capture) -> None:
    assert main.run(["bench", "checksum", "--repetitions", "1", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    answer = json.loads(line)
    assert answer["ok"]
    rows = {row["name"]: row for row in answer["rows"]}
    assert len(rows) == len(answer["rows"])
    assert [name for name, row in rows.items() if row["goal"] is not None] == ["flipped bits noticed, of 64 >= 64"]
    assert rows["algorithm"]["value"] == ALGORITHM
    for size in ("256 B", "4 KiB", "64 KiB"):
        values = {name.split(": ")[1]: row["value"] for name, row in rows.items() if f" x {size}: " in name}
        ratios = {
            f"time of {pair}" for pair in ("gather and checksum to gather", "checksum to gather", "checksum to memcpy")
        }
        assert set(values) == ratios | {c + end for c in bench.CONTESTANTS for end in ("", ", spread")}
        assert all(value > 0 for name, value in values.items() if not name.endswith("spread"))
        expected = values["memcpy"] / values["checksum"]
        assert values["time of checksum to memcpy"] == pytest.approx(expected)


def test_a_checksum_that_notices_nothing_misses_the_goal(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(bench, "checksums", lambda pieces: [7 for _ in pieces])
    monkeypatch.setattr(bench, "checksum", lambda _data: 7)
    assert main.run(["bench", "checksum", "--repetitions", "1", "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["ok"]


def test_a_gather_that_does_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "gather", lambda _chunks: None)
    with pytest.raises(RdmaKvError, match="not that of its rows"):
        measure_checksum(ChecksumOptions(1), lambda _what, _done, _total: None)


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError) as caught:
        ChecksumOptions(0)
    assert caught.value.field == "--repetitions"


def test_pieces_cover_what_is_copied() -> None:
    for work in bench._works():
        ends = [piece.address + piece.length_bytes for piece in work.pieces]
        assert work.pieces[0] == Piece(work.packed.ctypes.data, 4 << 20)
        assert [piece.address for piece in work.pieces[1:]] == ends[:-1]
        assert ends[-1] - work.packed.ctypes.data == work.packed.size == work.paged.size


def test_it_needs_neither_torch_nor_nixl() -> None:
    code = """
import sys
from rdma_kv.bench import checksum
print(sorted(name for name in sys.modules if name.split(".")[0] in {"torch", "triton", "nixl", "nixl_cu12", "nixl_cu13"}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
