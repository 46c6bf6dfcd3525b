"""The four nodes of the lab: what runs where, and the files that tell the sidecars of each other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine import CLUSTER, TOPOLOGIES

from rdma_kv.registry.static import AgentRecord, EngineRecord, dump_registry
from rdma_kv.topology import TieBreak
from rdma_kv.types import AgentId, Role

SHM_BYTES = 8 << 20
"""/dev/shm of every sidecar and engine: staging must not need it. The tests move more than that in one request."""

FIRST_PORT = 7600


@dataclass(frozen=True)
class Node:
    """One host: a sidecar and an engine with one replica, an agent for each of its ranks."""

    name: str
    role: Role
    replica: int

    @property
    def ranks(self) -> tuple[int, ...]:
        return TOPOLOGIES[self.role].replica_ranks(self.replica)

    def port(self, rank: int) -> int:
        """Of the control stream of one rank's agent."""
        return FIRST_PORT + self.ranks.index(rank)


P0, P1 = (Node(f"p{i}", Role.PREFILL, i) for i in range(2))
D0, D1 = (Node(f"d{i}", Role.DECODE, i) for i in range(2))
NODES = (P0, P1, D0, D1)


def write_registry(folder: Path, hosts: dict[str, str]) -> None:
    """The registry file for all of them. `hosts`: name or address by node."""
    engines = []
    for role, topology in TOPOLOGIES.items():
        agents = tuple(
            AgentRecord(AgentId(CLUSTER, role.value, role, rank), hosts[node.name], node.port(rank), (rank,))
            for node in NODES
            if node.role is role
            for rank in node.ranks
        )
        engines.append(EngineRecord(role.value, role, topology, TieBreak.REPLICA, agents))
    (folder / "registry.toml").write_bytes(dump_registry(CLUSTER, engines))


def write_config(folder: Path, transport: str, hosts: dict[str, str], socket: str = "/run/rdma-kv/agent.sock") -> None:
    """`agent.toml` and `registry.toml` for all nodes. Silence is noticed sooner than by default, so that tests end sooner."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        f'socket = "{socket}"',
        'registry = "registry.toml"',
        f'transport = "{transport}"',
        "allow_plaintext = true",
        "drain_s = 5.0",
        "[staging]",
        "slots = 8",
        "slot_bytes = 1048576",
        "[timeouts]",
        "transfer = 30.0",
        "quiesce = 3.0",
        "connect = 3.0",
        "retry = 0.2",
        "heartbeat = 0.5",
        "lease = 2.5",
    ]
    for node in NODES:
        for rank in node.ranks:
            lines += ["[[agent]]", f'engine = "{node.role.value}"', f"rank = {rank}"]
            lines.append(f'listen = "0.0.0.0:{node.port(rank)}"')
    (folder / "agent.toml").write_text("\n".join(lines) + "\n")
    write_registry(folder, hosts)
