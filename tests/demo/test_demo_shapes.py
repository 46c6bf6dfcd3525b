"""The demo over the whole list of shapes, over NIXL, with a process per replica and with a process per rank."""

import json
import subprocess
import sys

import pytest

from rdma_kv.demo.shapes import SHAPES

CHECKS = ("tokens_equal", "bytes_equal", "pages_untouched", "control_changed")


@pytest.mark.long
@pytest.mark.parametrize("processes", ["replica", "rank"])
def test_every_shape(processes):
    command = ["-m", "rdma_kv.cli.main", "demo", "--all", "--json", "--requests", "4", "--processes", processes]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=500, check=False)
    answer = json.loads(done.stdout.splitlines()[-1])
    wrong = [each for each in answer["shapes"] if not all(each[check] for check in CHECKS)]
    assert not wrong
    assert [each["name"] for each in answer["shapes"]] == [shape.name for shape in SHAPES]
    assert answer["ok"] is True
    assert done.returncode == 0


def test_an_unknown_shape_is_refused_by_name():
    command = [sys.executable, "-m", "rdma_kv.cli.main", "demo", "--shape", "round"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--shape: unknown shape 'round'" in done.stderr
