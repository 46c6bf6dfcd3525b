"""The data planes that work between processes, by the name that a user writes, and what an agent offers its peers.

`auto` offers all that this installation can use, the best first. Whether it can is judged by what is installed; nothing
is imported or loaded for it, so a library that is there and broken is noticed when a link needs it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from rdma_kv.errors import ConfigError
from rdma_kv.transport.base import Transport

TransportMaker = Callable[[str], Transport]
"""Makes one agent's transport from the agent's incarnation name."""

AUTO: Final = "auto"
PREFERENCE: Final = ("ucx", "nixl")
"""The order of `auto`. Both move the bytes through libucp; `ucx` is told by events what `nixl` finds out by polling, its
target makes progress by itself, and cutting one peer off has not brought the other process down. The figures decide where
they disagree with that: see "The default transport" in docs/performance.md."""

_FIX: Final = (
    "pip install 'rdma-kv[nixl]' (nixl-cu13 for CUDA 13), and 'rdma-kv[ucx]' beside it or beside a UCX of the system"
)


def offer(transport: str | TransportMaker, name: str) -> dict[str, TransportMaker]:
    """What an agent offers its peers, the best first: makers by back-end name.

    Args:
        transport: `auto`, a name of `PREFERENCE`, or a maker, which is called here since only its product has a name.
        name: the agent's incarnation name.

    Raises:
        ConfigError: field `transport`: unknown, or nothing that `auto` could use is installed.
    """
    if isinstance(transport, str):
        return {backend: _MAKERS[backend] for backend in names(transport)}
    if not callable(transport):
        raise ConfigError("transport", f"{transport!r}; use {_choices()}, or a function from a name to a Transport")
    made = transport(name)
    return {made.backend: lambda _: made}


def names(transport: str, *, option: str = "transport", also: Sequence[str] = ()) -> tuple[str, ...]:
    """The back-ends that a name stands for, the best first. Imports nothing heavy.

    Args:
        option: the field of errors.
        also: names that stand for themselves.

    Raises:
        ConfigError: unknown, or nothing that `auto` could use is installed; the text says what to install.
    """
    if transport == AUTO:
        found = tuple(backend for backend in PREFERENCE if usable(backend, os.environ))
        if not found:
            raise ConfigError(option, f"neither {' nor '.join(PREFERENCE)} can be used here; {_FIX}")
        return found
    if transport not in {*PREFERENCE, *also}:
        raise ConfigError(option, f"{transport!r}; use {_choices(also)}")
    return (transport,)


def usable(backend: str, environ: Mapping[str, str]) -> bool:
    """Whether this installation has what a back-end needs. Looks for packages and files; loads nothing."""
    if backend == "nixl":
        from rdma_kv.transport.nixl_owner import MODULES

        return any(map(_installed, MODULES))
    from rdma_kv.transport.ucx_library import is_found

    return _installed("cffi") and is_found(environ)


def _make_ucx(name: str) -> Transport:
    from rdma_kv.transport.ucx import UcxTransport

    return UcxTransport(name)


def _make_nixl(name: str) -> Transport:
    from rdma_kv.transport.nixl import NixlTransport

    return NixlTransport(name)


_MAKERS: Final[Mapping[str, TransportMaker]] = {"ucx": _make_ucx, "nixl": _make_nixl}
"""Each imports its back-end when it is called."""


def _choices(also: Sequence[str] = ()) -> str:
    *first, last = (AUTO, *PREFERENCE, *also)
    return f"{', '.join(first)} or {last}"


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
