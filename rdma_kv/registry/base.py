"""What the shell asks of a registry, whichever it is, and how what an agent says of itself is held against it.

Apart from the registries, since those know where their records come from and nothing of links.
"""

from __future__ import annotations

from typing import Protocol

from rdma_kv.errors import ConfigError, IncompatiblePeerError
from rdma_kv.protocol.link import Identity
from rdma_kv.registry.static import AgentRecord, EngineRecord
from rdma_kv.types import AgentId


class Registry(Protocol):
    """Who is where; see `rdma_kv.registry`."""

    def engine(self, name: str) -> EngineRecord: ...

    def hosts(self) -> frozenset[str]:
        """Addresses and names of all agents that it lists; the same object as long as nothing has changed."""
        ...


def record_of(registry: Registry, agent: AgentId) -> AgentRecord | None:
    """Where the registry says that this agent is now; None where it does not list it."""
    try:
        engine = registry.engine(agent.engine)
    except ConfigError:
        return None
    return next((record for record in engine.agents if record.id == agent), None)


def check_registered(registry: Registry, remote: Identity) -> None:
    """What a HELLO says must be what the registry says.

    Raises:
        IncompatiblePeerError: `field` names what differs: `engine` or `identity` (not listed), `ranks`, `topology`,
            `tie_break`.
    """
    peer = str(remote.id)
    try:
        engine = registry.engine(remote.id.engine)
    except ConfigError as exc:
        raise IncompatiblePeerError(peer, "engine", exc.problem) from exc
    record = next((agent for agent in engine.agents if agent.id == remote.id), None)
    if record is None:
        raise IncompatiblePeerError(peer, "identity", "the registry has no such agent")
    for what, theirs, ours in (
        ("ranks", tuple(sorted(remote.ranks)), record.ranks),
        ("topology", remote.topology, engine.topology),
        ("tie_break", remote.tie_break, engine.tie_break),
    ):
        if theirs != ours:
            raise IncompatiblePeerError(peer, what, f"HELLO says {theirs}, the registry {ours}")
