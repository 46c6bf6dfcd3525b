"""The demo on GPUs as a command: tokens, bytes and controls as on the CPU, replicas spread over the GPUs that there are."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import pytest
from gpu_agents import gpus

pytestmark = pytest.mark.gpu

if not gpus():
    pytest.skip("no GPU, or no torch that can use it", allow_module_level=True)

if importlib.util.find_spec("transformers") is None:
    pytest.skip("needs transformers", allow_module_level=True)

from rdma_kv.demo.devices import name, spread  # noqa: E402

CHECKS = ("tokens_equal", "bytes_equal", "pages_untouched", "control_changed")
LIMIT_S = 300.0


def run(*options: str) -> tuple[int, str, str]:
    """Exit status, standard output, standard error."""
    command = [sys.executable, "-m", "rdma_kv.cli.main", "demo", "--json", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return done.returncode, done.stdout, done.stderr


def demo(*options: str) -> dict:
    device = () if "--device" in options else ("--device", "cuda")
    status, output, errors = run(*device, "--requests", "8", *options)
    assert output, errors[-4000:]
    answer = json.loads(output.splitlines()[-1])
    assert status == 0, (answer, errors[-4000:])
    assert answer["ok"] is True
    assert all(answer[check] for check in CHECKS)
    assert answer["distinct_tokens"] >= 10
    return answer


@pytest.mark.parametrize(
    ("options", "processes"),
    [
        ([], (2, 2)),
        (["--shape", "lightllm-in", "--transport", "nixl"], (1, 2)),
        (["--shape", "mla-tep-dep", "--processes", "rank"], (4, 4)),
        (["--prefill", "tp=2,pp=2,layers=3+1,layout=sglang", "--decode", "dp=2", "--transport", "ucx"], (1, 2)),
    ],
    ids=["defaults", "lightllm-over-nixl", "mla-by-rank", "stages-over-ucx"],
)
def test_demo_on_gpus(options, processes):
    """As many GPUs as there are, or as there are processes."""
    answer = demo(*options)
    prefill, decode = spread(range(gpus()), *processes)
    assert answer["device"] == name([*prefill, *decode])
    assert answer["lane"] == "cuda_ipc"
    assert answer["bytes"] > 1 << 19


@pytest.mark.skipif(gpus() < 2, reason="needs two GPUs")
def test_one_gpu_can_be_pinned():
    assert demo("--device", "cuda:1", "--prefill", "tp=1", "--decode", "tp=1")["device"] == "cuda:1"


def test_a_gpu_that_is_not_there_is_refused_by_name():
    status, output, errors = run("--device", "cuda:1000")
    assert (status, output) == (2, "")
    assert "--device: cuda:1000 is not here" in errors
