"""KV-cache transfer between prefill and decode replicas by one-sided WRITE.

The public names. Importing this package imports nothing else: each name is loaded when it is first used, so
`import rdma_kv` costs no NumPy, no NIXL and no torch, and has no side effect.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rdma_kv.agent import Agent
    from rdma_kv.client import Client, SyncClient
    from rdma_kv.config import GpuConfig, Limits, StagingConfig, Timeouts
    from rdma_kv.errors import (
        ChecksumError,
        ClosedError,
        ConfigError,
        ErrorCode,
        FenceUnsupported,
        IncompatiblePeerError,
        LocalProtocolError,
        PeerError,
        PeerLostError,
        RangeUnavailableError,
        RdmaKvError,
        RegistrationError,
        RemoteProtocolError,
        RouteMismatchError,
        SidecarLostError,
        StagingFull,
        TransferAborted,
        TransferError,
        TransferTimeout,
        TransportError,
    )
    from rdma_kv.layout import KvLayout, Origin
    from rdma_kv.planner import Move, Route
    from rdma_kv.receiving import Received
    from rdma_kv.registry.static import AgentRecord, EngineRecord, StaticRegistry, dump_registry, parse_registry
    from rdma_kv.sending import Sending
    from rdma_kv.session import AgentConfig
    from rdma_kv.topology import Component, ContextSplit, ModelSpec, TieBreak, Topology
    from rdma_kv.transport.loopback import LoopbackNetwork, LoopbackTransport
    from rdma_kv.transport.nixl import NixlTransport
    from rdma_kv.types import AgentId, Interval, ReplicaId, Role

__version__ = "0.1.0"

__all__ = [
    "Agent",
    "AgentConfig",
    "AgentId",
    "AgentRecord",
    "ChecksumError",
    "Client",
    "ClosedError",
    "Component",
    "ConfigError",
    "ContextSplit",
    "EngineRecord",
    "ErrorCode",
    "FenceUnsupported",
    "GpuConfig",
    "IncompatiblePeerError",
    "Interval",
    "KvLayout",
    "Limits",
    "LocalProtocolError",
    "LoopbackNetwork",
    "LoopbackTransport",
    "ModelSpec",
    "Move",
    "NixlTransport",
    "Origin",
    "PeerError",
    "PeerLostError",
    "RangeUnavailableError",
    "RdmaKvError",
    "Received",
    "RegistrationError",
    "RemoteProtocolError",
    "ReplicaId",
    "Role",
    "Route",
    "RouteMismatchError",
    "Sending",
    "SidecarLostError",
    "StagingConfig",
    "StagingFull",
    "StaticRegistry",
    "SyncClient",
    "TieBreak",
    "Timeouts",
    "Topology",
    "TransferAborted",
    "TransferError",
    "TransferTimeout",
    "TransportError",
    "__version__",
    "dump_registry",
    "parse_registry",
]

_HOMES = {
    "rdma_kv.agent": ("Agent",),
    "rdma_kv.client": ("Client", "SyncClient"),
    "rdma_kv.config": ("GpuConfig", "Limits", "StagingConfig", "Timeouts"),
    "rdma_kv.layout": ("KvLayout", "Origin"),
    "rdma_kv.planner": ("Move", "Route"),
    "rdma_kv.registry.static": ("AgentRecord", "EngineRecord", "StaticRegistry", "dump_registry", "parse_registry"),
    "rdma_kv.receiving": ("Received",),
    "rdma_kv.sending": ("Sending",),
    "rdma_kv.session": ("AgentConfig",),
    "rdma_kv.topology": ("Component", "ContextSplit", "ModelSpec", "TieBreak", "Topology"),
    "rdma_kv.transport.loopback": ("LoopbackNetwork", "LoopbackTransport"),
    "rdma_kv.transport.nixl": ("NixlTransport",),
    "rdma_kv.types": ("AgentId", "Interval", "ReplicaId", "Role"),
}
"""Module by module what is not in `rdma_kv.errors`, where all remaining names live."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Load a public name at its first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(_HOME_OF.get(name, "rdma_kv.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
