"""`rdma-kv soak`: a few seconds of it, and that what judges there can see."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from rdma_kv.cli.main import BAD_INPUT, run
from rdma_kv.errors import ConfigError
from rdma_kv.soak.content import FREED, Pool, kv_of
from rdma_kv.soak.run import SoakVerdict

KEYS = {
    "ok", "seed", "transfers", "outcomes", "trouble", "verified_bytes", "poisoned_bytes", "hung", "leaked", "p50_ms",
    "p99_ms", "transport", "lane", "seconds", "problems",
}  # fmt: skip


@pytest.mark.long
def test_a_few_seconds_are_clean():
    command = [sys.executable, "-m", "rdma_kv.cli.main", "soak", "--minutes", "0.05", "--seed", "7", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    answer = json.loads(done.stdout.splitlines()[-1])
    assert set(answer) == KEYS
    assert answer["ok"], answer
    assert done.returncode == 0
    assert answer["transfers"] > 10
    assert answer["verified_bytes"] > 1 << 20
    assert set(answer["leaked"]) == {"slots", "pages", "tasks", "fds", "bytes"}


@pytest.mark.parametrize(("option", "value"), [("--minutes", "0"), ("--minutes", "1e9"), ("--transport", "loopback")])
def test_what_cannot_work_is_refused_by_name(capsys, option, value):
    assert run(["soak", option, value]) == BAD_INPUT
    assert option in capsys.readouterr().err


@pytest.mark.parametrize(
    "spoil",
    [
        lambda v: setattr(v, "poisoned_bytes", 1),
        lambda v: setattr(v, "hung", 1),
        lambda v: v.leaked.update(fds=1),
        lambda v: v.problems.append("x"),
        lambda v: v.outcomes.clear(),
    ],
)
def test_control_everything_bad_is_not_ok(spoil):
    verdict = SoakVerdict(0)
    verdict.outcomes["success"] = 1
    assert verdict.ok
    spoil(verdict)
    assert not verdict.ok


def pool(pages: int = 8) -> Pool:
    return Pool(range(2, 4), 2, pages, 4, range(1, 3), 16)


def test_content_depends_on_everything():
    whole = kv_of(7, range(4), 2, range(4), range(32), 16).reshape(-1, 8)
    assert len(np.unique(whole, axis=0)) == len(whole)
    other = kv_of(8, range(4), 2, range(4), range(32), 16).reshape(-1, 8)
    assert not set(map(bytes, whole)) & set(map(bytes, other))
    part = kv_of(7, range(1, 3), 2, range(2, 4), range(5), 16)
    np.testing.assert_array_equal(part, kv_of(7, range(4), 2, range(4), range(5), 16)[1:3, :, :, 2:4])
    with pytest.raises(ConfigError, match="row_bytes"):
        kv_of(7, range(1), 1, range(1), range(1), 12)


def test_a_pool_counts_wrong_bytes_and_bytes_written_behind_its_back():
    source, target = pool(), pool()
    pages = source.take(9)
    source.fill(3, pages, 9)
    assert source.wrong_bytes(3, pages, 9) == 0
    assert source.wrong_bytes(4, pages, 9) > 0.9 * 2 * 2 * 9 * 2 * 16
    there = target.take(9)
    target.memory[:, :, there] = source.memory[:, :, pages]
    assert target.wrong_bytes(3, there, 9) == 0
    target.memory[1, 0, there[2], 1, 1, 15] ^= 1  # behind the last token
    target.memory[0, 1, there[0], 2, 0, 0] ^= 1
    assert target.wrong_bytes(3, there, 9) == 2
    target.free(there)
    assert target.look() == 0
    target.memory[0, 0, there[0], 0, 0, :3] = FREED ^ 1
    assert target.look() == 3
    assert target.pages_used == 0
    with pytest.raises(ConfigError, match="pages"):
        target.take(33)
