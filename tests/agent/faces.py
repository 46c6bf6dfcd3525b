"""The two faces of the service for one set of tests: an `Agent`, and a `Client` with a real sidecar behind a real socket.

The sidecar runs on the test's own event loop, so that the loopback transport and its faults serve both faces, and tests can
look at its agent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from rdma_kv.agent import Agent
from rdma_kv.client import Client
from rdma_kv.registry.static import StaticRegistry
from rdma_kv.session import AgentConfig
from rdma_kv.sidecar.server import Sidecar
from rdma_kv.sidecar.settings import SidecarConfig
from rdma_kv.transport.base import Transport

face = "library"
"""Or "sidecar": what `enter` makes. Set by the fixture of that name."""


class SeenThrough(Client):
    """A client whose sidecar's agent the test can see: at once, while others await it."""

    inside: Agent

    def stats(self) -> dict:
        return self.inside.stats()

    @property
    def _shell(self):
        return self.inside._shell


async def enter(
    stack: contextlib.AsyncExitStack,
    folder: Path,
    config: AgentConfig,
    registry: StaticRegistry,
    transport: str | Callable[[str], Transport],
) -> Agent | SeenThrough:
    """One member of the cluster, up until the stack unwinds."""
    if face == "library":
        return await stack.enter_async_context(Agent(config, registry, transport=transport))
    socket = folder / f"{config.engine}-{min(config.ranks)}.sock"
    settings = SidecarConfig(
        socket,
        folder / "registry.toml",
        staging=config.staging,
        timeouts=config.timeouts,
        limits=config.limits,
        health="",
    )
    sidecar = await stack.enter_async_context(Sidecar(settings, registry=registry, transport=transport))
    client = await stack.enter_async_context(SeenThrough(config, socket))
    (attachment,) = sidecar.attachments
    assert attachment.agent is not None
    client.inside = attachment.agent
    return client
