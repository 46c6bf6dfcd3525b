"""Importing rdma_kv is free, and everything it promises is there."""

import importlib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rdma_kv

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "triton", "nixl", "nixl_cu12", "nixl_cu13", "numpy")

USE_EVERYTHING = """
import json, sys
import rdma_kv
for name in rdma_kv.__all__:
    getattr(rdma_kv, name)
print(json.dumps(list(sys.modules)))
"""

LOOK_AT_IMPORT = """
import json, logging, os, sys, threading
before = dict(os.environ), set(os.listdir("."))
import rdma_kv
print(json.dumps({
    "modules": sorted(sys.modules),
    "threads": threading.active_count(),
    "handlers": len(logging.getLogger().handlers) + len(logging.getLogger("rdma_kv").handlers),
    "changed": (dict(os.environ), set(os.listdir("."))) != before,
}))
"""


def run(code: str, folder: Path) -> str:
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert not done.stderr
    return done.stdout


def test_import_loads_nothing_heavy_and_changes_nothing(tmp_path):
    seen = json.loads(run(LOOK_AT_IMPORT, tmp_path))
    loaded = set(seen["modules"])
    assert loaded.isdisjoint(HEAVY)
    assert {name for name in loaded if name.split(".")[0] == "rdma_kv"} == {"rdma_kv"}
    assert "asyncio" not in loaded
    assert seen["threads"] == 1
    assert seen["handlers"] == 0
    assert not seen["changed"]


def test_all_public_names_together_load_neither_nixl_nor_torch(tmp_path):
    assert set(json.loads(run(USE_EVERYTHING, tmp_path))).isdisjoint(set(HEAVY) - {"numpy"})


@pytest.mark.parametrize("name", rdma_kv.__all__)
def test_every_public_name_resolves(name):
    value = getattr(rdma_kv, name)
    assert value is getattr(rdma_kv, name)
    assert name in dir(rdma_kv)
    if name != "__version__":
        assert value.__name__ == name
        assert getattr(importlib.import_module(value.__module__), name) is value


def test_names_are_listed_once_and_in_order():
    assert rdma_kv.__all__ == sorted(set(rdma_kv.__all__))


def test_every_error_is_public():
    errors = importlib.import_module("rdma_kv.errors")
    kinds = {
        name for name, value in vars(errors).items() if isinstance(value, type) and value.__module__ == errors.__name__
    }
    assert kinds <= set(rdma_kv.__all__)


def test_other_names_are_refused_as_python_does():
    with pytest.raises(AttributeError, match="no attribute 'Agnet'"):
        rdma_kv.Agnet  # noqa: B018


def test_version_is_that_of_the_project_file():
    assert rdma_kv.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
