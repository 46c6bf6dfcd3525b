"""What `auto` offers: the best first, of what is installed; and looking for it imports nothing."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import subprocess
import sys

import pytest

from rdma_kv.errors import ConfigError
from rdma_kv.transport import ucx_library
from rdma_kv.transport.loopback import LoopbackNetwork, LoopbackTransport
from rdma_kv.transport.named import PREFERENCE, names, offer, usable

PACKAGES = ("cffi", "nixl_cu12", "nixl_cu13", "libucx")


class Hider(importlib.abc.MetaPathFinder):
    """Packages that are not installed any more."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages

    def find_spec(self, fullname, path=None, target=None):
        if fullname in self._packages:
            raise ModuleNotFoundError(fullname)


@pytest.fixture
def hide(monkeypatch, tmp_path):
    """Hides packages, and any UCX of the system; returns the folder that the loader is told of."""
    monkeypatch.setattr(ucx_library, "_LOADER_CACHE", tmp_path / "ld.so.cache")
    monkeypatch.setattr(ucx_library, "_LOADER_FOLDERS", ())
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.delenv(ucx_library.SETTING, raising=False)

    def hide(*packages: str) -> None:
        for package in packages:
            monkeypatch.delitem(sys.modules, package, raising=False)
        monkeypatch.setattr(sys, "meta_path", [Hider(packages), *sys.meta_path])

    return hide


def test_auto_offers_all_that_is_installed_in_order():
    here = tuple(backend for backend in PREFERENCE if usable(backend, os.environ))
    assert names("auto") == here
    assert tuple(offer("auto", "me@1")) == here


@pytest.mark.parametrize(
    ("hidden", "offered"),
    [
        (("cffi",), ("nixl",)),
        (("nixl_cu12", "nixl_cu13"), ("ucx",)),
        (("libucx",), ("ucx", "nixl")),
    ],
)
def test_what_is_not_installed_is_not_offered(hide, hidden, offered):
    if missing := [p for p in ("cffi", "nixl_cu12", "libucx") if importlib.util.find_spec(p) is None]:
        pytest.skip(f"not installed: {missing}")
    hide(*hidden)
    assert names("auto") == offered


def test_nothing_installed_is_an_error_that_says_what_to_install(hide):
    hide(*PACKAGES)
    with pytest.raises(ConfigError) as caught:
        names("auto", option="--transport")
    assert caught.value.field == "--transport"
    assert "rdma-kv[nixl]" in str(caught.value)
    assert "rdma-kv[ucx]" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        offer("auto", "me@1")
    assert caught.value.field == "transport"


@pytest.mark.parametrize("where", ["told", "cache", "setting", "nowhere"])
def test_a_ucx_of_the_system_counts(hide, tmp_path, monkeypatch, where):
    pytest.importorskip("cffi")
    hide(*PACKAGES[1:])
    if where == "told":
        (tmp_path / "libucp.so.0").touch()
    elif where == "cache":
        (tmp_path / "ld.so.cache").write_bytes(b"glibc-ld.so.cache1.1\0libucp.so.0\0/usr/lib/libucp.so.0\0")
    elif where == "setting":
        monkeypatch.setenv(ucx_library.SETTING, "/opt/ucx/lib/libucp.so")
    assert usable("ucx", os.environ) is (where != "nowhere")


def test_a_longer_name_in_the_loaders_cache_is_another_library(hide, tmp_path):
    hide(*PACKAGES[1:])
    (tmp_path / "ld.so.cache").write_bytes(b"libucp.so.0.0.0\0")
    assert not usable("ucx", os.environ)


@pytest.mark.parametrize("name", ["pigeon", "", "NIXL", "loopback"])
def test_unknown_names_are_refused(name):
    with pytest.raises(ConfigError, match="auto, ucx or nixl") as caught:
        offer(name, "me@1")
    assert caught.value.field == "transport"


def test_a_name_is_offered_alone_even_where_it_is_not_installed(hide):
    hide(*PACKAGES)
    assert [tuple(offer(name, "me@1")) for name in PREFERENCE] == [("ucx",), ("nixl",)]
    assert names("loopback", also=("loopback",)) == ("loopback",)


def test_a_maker_is_called_once_and_its_product_names_itself():
    network = LoopbackNetwork()
    made: list[LoopbackTransport] = []

    def make(name: str) -> LoopbackTransport:
        made.append(LoopbackTransport(network, name))
        return made[-1]

    ((backend, again),) = offer(make, "me@1").items()
    assert backend == "loopback"
    assert again("me@1") is made[0]
    assert made[0].name == "me@1"
    assert len(made) == 1


def test_what_is_neither_name_nor_maker_is_refused():
    with pytest.raises(ConfigError) as caught:
        offer(LoopbackTransport(LoopbackNetwork(), "me@1"), "me@1")
    assert caught.value.field == "transport"


def test_looking_imports_no_back_end():
    code = (
        "import sys, rdma_kv.agent; from rdma_kv.transport.named import offer; offer('auto', 'me@1');"
        f"print([name for name in sys.modules if name.split('.')[0] in {PACKAGES!r}"
        " or name in ('rdma_kv.transport.ucx', 'rdma_kv.transport.nixl')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
