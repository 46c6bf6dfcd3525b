"""Which libucp the `ucx` transport loads.

The order: what the user named (the transport's argument, then RDMA_KV_UCX_LIBRARY), and then nothing else; the
system's `libucp.so.0`, which has the verbs of the site; the one inside a NIXL wheel, which has InfiniBand, EFA and CUDA
modules; the `libucx` wheel, which has tcp, shared memory, cma and CUDA only. Whichever it is, it finds its own modules:
UCX looks in the folder `ucx` beside libucs, for files that end as libucs does (`.so.0.0.0` in NIXL's bundle).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rdma_kv.errors import ConfigError
from rdma_kv.transport.ucx_binding import Ucx

SETTING: Final = "RDMA_KV_UCX_LIBRARY"
_SONAME: Final = "libucp.so.0"
_NIXL_PACKAGES: Final = ("nixl_cu12", "nixl_cu13")
_LOADER_CACHE: Final = Path("/etc/ld.so.cache")  # some 100 KB; holds every soname, ended by a zero byte
_LOADER_FOLDERS: Final = tuple(map(Path, ("/lib", "/usr/lib", "/lib64", "/usr/lib64")))
_FIX: Final = (
    f"name a libucp in {SETTING}, install UCX on the system, or install one of the extras nixl and nixl-cu13, "
    "whose wheels bring it"
)


@dataclass(frozen=True, slots=True)
class UcxLibrary:
    """A libucp that loaded.

    Attributes:
        source: `argument`, `RDMA_KV_UCX_LIBRARY`, `system`, the NIXL package, or `libucx`.
        path: what the loader was given.
        version: the library's own word.
    """

    source: str
    path: str
    version: str
    ucx: Ucx


def load_ucx(library: str | None, environ: Mapping[str, str]) -> UcxLibrary:
    """Load the first libucp that can be loaded. Once per process and path; 0.45 s the first time.

    Raises:
        ConfigError: none can, or not the one that was named; the text names the setting and what to do.
    """
    named = ("argument", library) if library else (SETTING, environ.get(SETTING, ""))
    if named[1]:
        try:
            return _load(named[0], named[1])
        except (OSError, AttributeError) as exc:
            field = "library" if library else SETTING
            raise ConfigError(field, f"{named[1]!r} cannot be used as libucp: {exc}; {_FIX}") from exc
    refusals = []
    for source, path in candidates():
        try:
            return _load(source, path)
        except (OSError, AttributeError) as exc:
            refusals.append(f"{source}: {exc}")
    raise ConfigError(SETTING, f"no libucp found ({'; '.join(refusals)}); {_FIX}")


def candidates() -> Iterator[tuple[str, str]]:
    """(source, path) of what is tried when nothing is named, the best first. Imports nothing."""
    yield "system", _SONAME
    for package in _NIXL_PACKAGES:
        for home in _homes(package):
            for path in sorted((home.parent / f"{package}.libs").glob("libucp-*.so*")):
                yield package, str(path)
    for home in _homes("libucx"):
        path = home / "lib" / _SONAME
        if path.exists():
            yield "libucx", str(path)


def is_found(environ: Mapping[str, str]) -> bool:
    """Whether there is a libucp to try, without loading it: one that is found may still not load."""
    return bool(environ.get(SETTING)) or any(source != "system" or _on_system(environ) for source, _ in candidates())


@functools.cache
def _load(source: str, path: str) -> UcxLibrary:
    ucx = Ucx(path)
    return UcxLibrary(source, path, ucx.version, ucx)


def _on_system(environ: Mapping[str, str]) -> bool:
    """Whether the dynamic loader would find `_SONAME`: in a folder that it was told of, its cache, or its own folders."""
    told = [Path(folder) for folder in environ.get("LD_LIBRARY_PATH", "").split(":") if folder]
    if any((folder / _SONAME).exists() for folder in (*told, *_LOADER_FOLDERS)):
        return True
    try:
        return f"{_SONAME}\0".encode() in _LOADER_CACHE.read_bytes()
    except OSError:
        return False


def _homes(package: str) -> list[Path]:
    """The folders of an installed package."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(home) for home in (spec.submodule_search_locations or ())] if spec else []
