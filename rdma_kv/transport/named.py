"""The data planes that work between processes, by the name that a user writes."""

from __future__ import annotations

from collections.abc import Callable

from rdma_kv.errors import ConfigError
from rdma_kv.transport.base import Transport

BETWEEN_PROCESSES = ("nixl", "ucx")


def transport_class(name: str, *, option: str = "transport") -> Callable[[str], Transport]:
    """What makes the named transport from an agent's incarnation name. Imports that one only.

    Raises:
        ConfigError: unknown; `option` is the field.
    """
    if name == "nixl":
        from rdma_kv.transport.nixl import NixlTransport

        return NixlTransport
    if name == "ucx":
        from rdma_kv.transport.ucx import UcxTransport

        return UcxTransport
    raise ConfigError(option, f"{name!r}; use {' or '.join(BETWEEN_PROCESSES)}")
