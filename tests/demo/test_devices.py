"""Where the demo's processes are put, what is refused, and the demo's way over GPUs as far as it goes without one."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdma_kv.cli.demo import _show_routing
from rdma_kv.config import GpuConfig
from rdma_kv.demo import devices
from rdma_kv.demo.devices import Seen, check_device, check_unused, choose, gpus, name, parse_device, prepare, spread
from rdma_kv.demo.model import ModelShape
from rdma_kv.demo.run import DemoOptions, EngineOptions, process_specs
from rdma_kv.errors import ConfigError, LocalProtocolError
from rdma_kv.topology import Topology

HERE = Path(__file__).parent
TWO = Seen("2.11.0", "13.0", 2)


@pytest.mark.parametrize(("text", "pinned"), [("cpu", None), ("cuda", None), ("cuda:0", 0), ("cuda:17", 17)])
def test_devices_are_parsed(text, pinned):
    assert parse_device(text) == pinned


@pytest.mark.parametrize("text", ["", "gpu", "CUDA", "cuda:", "cuda:-1", "cuda:1 ", "cuda:x", "cuda:٣", "cuda:12345"])
def test_other_words_are_refused(text):
    with pytest.raises(ConfigError) as caught:
        check_device(text, "auto")
    assert caught.value.field == "--device"


def test_loopback_has_no_use_for_gpus():
    check_device("cpu", "loopback")
    for text in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match="--transport loopback") as caught:
            check_device(text, "loopback")
        assert caught.value.field == "--device"


def test_what_is_seen_decides():
    assert choose(None, TWO) == (0, 1)
    assert choose(1, TWO) == (1,)


@pytest.mark.parametrize(
    ("pinned", "seen", "words"),
    [
        (None, Seen("2.13.0+cpu", None, 0), "built without CUDA"),
        (None, Seen("2.11.0", "13.0", 0), "finds no GPU here; use --device cpu"),
        (0, Seen("2.11.0", "13.0", 0, "the driver is too old"), "here (the driver is too old); use --device cpu"),
        (2, TWO, "cuda:2 is not here; use cuda:0..cuda:1, or cuda for all"),
        (1, Seen("2.11.0", "13.0", 1), "cuda:1 is not here; use cuda:0, or"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(pinned, seen, words):
    with pytest.raises(ConfigError) as caught:
        choose(pinned, seen)
    assert caught.value.field == "--device"
    assert words in caught.value.problem


def test_the_cpu_asks_nobody(monkeypatch):
    monkeypatch.setattr(devices, "look", lambda: pytest.fail("asked"))
    assert gpus("cpu") == ()


@pytest.mark.parametrize("package", ["torch", "triton"])
def test_a_package_that_is_not_installed_is_named(monkeypatch, package):
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None if name == package else object())
    with pytest.raises(ConfigError, match=f"{package} is not installed; pip install") as caught:
        devices.look.__wrapped__()
    assert caught.value.field == "--device"


def test_another_process_is_asked(monkeypatch):
    """The real question, and how a torch that cannot be used answers it."""
    pytest.importorskip("torch")
    seen = devices.look()
    assert seen.torch.startswith(sys.modules["torch"].__version__.split("+")[0])
    assert seen.cuda == sys.modules["torch"].version.cuda
    monkeypatch.setattr(devices, "_PROBE", "import sys; sys.exit('libcuda is broken')")
    with pytest.raises(ConfigError, match="torch cannot be used: libcuda is broken"):
        devices.look.__wrapped__()


def test_the_last_words_are_those_of_the_warning():
    text = "/site/torch/cuda/__init__.py:1: UserWarning: The NVIDIA driver is too old\n  return torch._C.count() > 0\n"
    assert devices._last_words(text) == "The NVIDIA driver is too old"
    assert devices._last_words("") == ""


@pytest.mark.parametrize(
    ("count", "prefill", "decode", "expected"),
    [
        (1, 2, 2, ((0, 0), (0, 0))),
        (2, 1, 1, ((0,), (1,))),
        (2, 2, 2, ((0, 1), (1, 0))),
        (2, 3, 1, ((0, 1, 0), (1,))),
        (4, 4, 4, ((0, 1, 2, 3), (1, 2, 3, 0))),
        (8, 2, 2, ((0, 1), (2, 3))),
        (2, 4, 4, ((0, 1, 0, 1), (1, 0, 1, 0))),
    ],
)
def test_processes_are_spread_in_turn(count, prefill, decode, expected):
    assert spread(range(count), prefill, decode) == expected


@given(count=st.integers(1, 9), prefill=st.integers(1, 20), decode=st.integers(1, 20))
def test_all_gpus_are_used_and_kv_crosses(count, prefill, decode):
    ordinals = [10 + n for n in range(count)]
    left, right = spread(ordinals, prefill, decode)
    assert (len(left), len(right)) == (prefill, decode)
    assert len({*left, *right}) == min(count, prefill + decode)
    if count > 1:
        assert all(here != there for here, there in zip(left, right, strict=False))
    for side in (left, right):  # in turn: none has two more than another
        loads = [side.count(ordinal) for ordinal in ordinals]
        assert max(loads) - min(loads) <= 1


@pytest.mark.parametrize(
    ("processes", "placed"),
    [
        ("replica", ["prefill/0 on cuda:0", "decode/0 on cuda:1", "decode/1 on cuda:0"]),
        (
            "rank",
            ["prefill/0 rank 0 on cuda:0", "prefill/0 rank 1 on cuda:1", "decode/0 on cuda:1", "decode/1 on cuda:0"],
        ),
    ],
)
def test_every_process_knows_its_gpu_and_people_are_told(monkeypatch, capsys, processes, placed):
    """Prefill of two ranks, decode of two replicas of one rank, two GPUs."""
    monkeypatch.setattr(devices, "gpus", lambda text: (0, 1) if text == "cuda" else ())
    engines = [EngineOptions(Topology.with_layers(4, tp=2, dp=dp), 16, "nhd") for dp in (1, 2)]
    options = DemoOptions(*engines, ModelShape(), 4, "ucx", 0, 60.0, processes, "cuda")
    specs = process_specs(options, Path("registry.toml"))
    assert [f"{spec.name} on cuda:{spec.gpu}" for spec in specs] == placed
    model = SimpleNamespace(spec=ModelShape().spec)
    assert [spec.config(model).gpu for spec in specs] == [GpuConfig(spec.gpu) for spec in specs]
    _show_routing(options)
    assert f"GPUs    {', '.join(placed)}\n" in capsys.readouterr().out
    on_cpu = process_specs(replace(options, device="cpu"), Path("registry.toml"))
    assert {(spec.gpu, spec.config(model).gpu) for spec in on_cpu} == {(None, None)}


def test_names():
    assert name([]) == "cpu"
    assert name([1, 0, 1]) == "cuda:0+cuda:1"


def test_the_workspace_of_cublas_is_the_users_where_it_is_set():
    fresh, own = {}, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}
    prepare(fresh)
    prepare(own)
    assert fresh == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert own == {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}


def test_a_process_that_has_used_cuda_does_not_fork_replicas(monkeypatch):
    for used in (False, True):
        torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda used=used: used))
        monkeypatch.setitem(sys.modules, "torch", torch)
        if not used:
            check_unused()
            continue
        with pytest.raises(LocalProtocolError, match="start a new one"):
            check_unused()


def own_models(*options):
    command = [sys.executable, str(HERE / "own_models_demo.py"), *options, "--requests", "4", "--timeout", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        ["--prefill", "tp=2,layout=sglang", "--decode", "tp=1,layout=trtllm"],
        ["--model", "mla", "--prefill", "tp=2", "--decode", "dp=2", "--processes", "rank"],
    ],
    ids=["qwen2", "mla-by-rank"],
)
def test_processes_that_build_their_own_model_agree(options):
    status, answer, progress = own_models(*options)
    assert status == 0, (answer, progress)
    assert all(answer[check] for check in ("tokens_equal", "bytes_equal", "pages_untouched", "control_changed"))
    assert "loading the model on" in progress


@pytest.mark.long
def test_kv_that_is_lost_on_its_way_to_the_pages_is_found():
    """Control: the undivided run and the fingerprints come from the model, not from the pages."""
    status, answer, _ = own_models("broken", "--prefill", "tp=1", "--decode", "tp=1")
    assert status == 1
    assert answer["failures"] == []
    assert answer["tokens_equal"] is False
    assert answer["bytes_equal"] is False
