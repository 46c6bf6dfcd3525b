"""The demo as a command: real processes over real transports, one object on one line, a true exit status, and a control."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rdma_kv.transport.named import names

HERE = Path(__file__).parent
CHECKS = ("tokens_equal", "bytes_equal", "pages_untouched", "control_changed")


def run(*command: str) -> tuple[int, dict, str]:
    """Exit status, the object on the last line of standard output, standard error."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def demo(*options: str) -> tuple[int, dict, str]:
    return run("-m", "rdma_kv.cli.main", "demo", "--json", "--timeout", "60", *options)


@pytest.mark.parametrize(
    ("options", "transport"),
    [
        ([], "auto"),
        (["--prefill", "dp=1", "--decode", "dp=1", "--transport", "ucx"], "ucx"),
        pytest.param(
            ["--prefill", "tp=1", "--decode", "tp=4", "--kv-heads", "2", "--transport", "nixl"],
            "nixl",
            marks=pytest.mark.long,
        ),
        pytest.param(
            ["--prefill", "tp=4,dp=2", "--decode", "tp=2,dp=2", "--transport", "nixl"], "nixl", marks=pytest.mark.long
        ),
    ],
    ids=["defaults", "one-replica-each", "heads-replicated", "attention-tp-2-to-1"],
)
def test_demo_between_processes(options, transport):
    status, answer, progress = demo(*options)
    assert status == 0, answer
    assert answer["ok"] is True
    assert all(answer[check] for check in CHECKS)
    assert answer["requests"] == 16
    assert answer["bytes"] > 1 << 20
    assert answer["distinct_tokens"] >= 10
    assert answer["transport"] == names(transport)[0]
    assert answer["lane"] in {"cma", "tcp", "rdma"}
    assert answer["device"] == "cpu"
    assert "16 requests done" in progress


def test_demo_on_loopback():
    status, answer, _ = demo("--transport", "loopback", "--requests", "8")
    assert status == 0, answer
    assert answer["lane"] == answer["transport"] == "loopback"
    assert all(answer[check] for check in CHECKS)


def test_swapped_replicas_are_found_by_tokens_and_bytes():
    """Control: all transfers complete, into the wrong replica. Only what arrived can tell."""
    status, answer, _ = run(str(HERE / "swapped_demo.py"), "checks-off", "--timeout", "60")
    assert status == 1
    assert answer["failures"] == []
    assert answer["bytes"] > 1 << 20
    assert answer["tokens_equal"] is False
    assert answer["bytes_equal"] is False


def test_swapped_replicas_are_refused_by_the_checks():
    """The same swap with the checks on: not one transfer completes, and the reason is named."""
    status, answer, _ = run(str(HERE / "swapped_demo.py"), "checks-on", "--timeout", "60")
    assert status == 1
    assert answer["bytes"] == 0
    assert len(answer["failures"]) == 16
    assert all("owns no rank" in failure for failure in answer["failures"])


@pytest.mark.long
def test_a_demo_that_does_not_finish_says_so():
    status, answer, _ = demo("--timeout", "1", "--requests", "256")
    assert status == 1
    assert answer["ok"] is False
    assert answer["failures"]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--prefill", "tp=3"], "tp"),
        (["--kv-heads", "3"], "--kv-heads"),
        (["--transport", "pigeon"], "--transport"),
        (["--decode", "layout=xyz"], "--decode layout"),
        (["--prefill", "tp=4,dp=3"], "dp"),
        (["--device", "gpu"], "--device"),
        (["--device", "cuda", "--transport", "loopback"], "--device"),
        (["--device", "cuda:9999"], "--device"),
    ],
)
def test_bad_options_are_one_line_and_exit_2(options, field):
    command = [sys.executable, "-m", "rdma_kv.cli.main", "demo", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert field in line
