"""Who is where, from a file: the engines of a cluster, their topologies and agents.

The file is TOML:

    cluster = "demo"

    [[engine]]
    name = "prefill"
    role = "prefill"
    tie_break = "replica"
    topology = { tp = 2, pp = 1, cp = 1, dp = 2, layers_per_stage = [4], cp_split = "contiguous" }

    [[engine.agent]]
    address = "10.0.0.1:7600"
    ranks = [0]

It is read at the first look-up and again when it has changed, so a deployment can write it after its agents are up.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated

import msgspec
import tomli_w
from msgspec import Meta, Struct

from rdma_kv.errors import ConfigError
from rdma_kv.topology import ContextSplit, TieBreak, Topology
from rdma_kv.types import AgentId, ReplicaId, Role

_ADDRESS = re.compile(r"(\[(?P<v6>[^\[\]\s]+)\]|(?P<host>[^\[\]:\s]+)):(?P<port>[0-9]{1,5})")


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """One agent of an engine: where its control plane listens, and the ranks it owns."""

    id: AgentId
    host: str
    port: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """One engine: topology, tie-break of its sends, and its agents."""

    name: str
    role: Role
    topology: Topology
    tie_break: TieBreak
    agents: tuple[AgentRecord, ...]

    def agents_of(self, replica: int) -> tuple[AgentRecord, ...]:
        """The agents that own ranks of a replica."""
        self.topology.check_replica(replica)
        ranks = set(self.topology.replica_ranks(replica))
        return tuple(agent for agent in self.agents if ranks & set(agent.ranks))


class _TopologyFile(Struct, forbid_unknown_fields=True):
    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    layers_per_stage: list[int] = []
    cp_split: str = "contiguous"


class _AgentFile(Struct, forbid_unknown_fields=True):
    address: str
    ranks: Annotated[list[int], Meta(min_length=1)]


class _EngineFile(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)]
    role: Role
    topology: _TopologyFile
    agent: Annotated[list[_AgentFile], Meta(min_length=1)]
    tie_break: TieBreak = TieBreak.REPLICA


class _RegistryFile(Struct, forbid_unknown_fields=True):
    cluster: Annotated[str, Meta(min_length=1)]
    engine: Annotated[list[_EngineFile], Meta(min_length=1)]


class StaticRegistry:
    """Look-ups in a registry file.

    Args:
        path: the TOML file; it need not exist before the first look-up.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._stamp: tuple[int, int, int] | None = None
        self._engines: dict[str, EngineRecord] = {}
        self._hosts: frozenset[str] = frozenset()

    def engine(self, name: str) -> EngineRecord:
        """Raises ConfigError where the file has no such engine, or cannot be used."""
        self._reload()
        record = self._engines.get(name)
        if record is None:
            raise ConfigError("engine", f"{name!r} is not in {self._path.name}; it lists {sorted(self._engines)}")
        return record

    def agents_of(self, replica: ReplicaId) -> tuple[AgentRecord, ...]:
        return self.engine(replica.engine).agents_of(replica.index)

    def hosts(self) -> frozenset[str]:
        """Where the agents of all engines listen, as the file writes it; as it was read last while it cannot be used."""
        with contextlib.suppress(ConfigError):  # who looks up an engine is told
            self._reload()
        return self._hosts

    def _reload(self) -> None:
        try:
            stat = self._path.stat()
            stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
            if stamp == self._stamp:
                return
            text = self._path.read_bytes()
        except OSError as exc:
            raise ConfigError("registry", f"cannot read {self._path}: {exc.strerror}") from exc
        self._engines = parse_registry(text)
        self._hosts = frozenset(agent.host for engine in self._engines.values() for agent in engine.agents)
        self._stamp = stamp


def parse_registry(text: bytes) -> dict[str, EngineRecord]:
    """The engines of a registry file, by name.

    Raises:
        ConfigError: not TOML, a missing or unknown field, an engine twice, a rank claimed by two agents or by none, two
            agents at one address, an address that cannot mean the same to all.
    """
    try:
        content = msgspec.toml.decode(text, type=_RegistryFile)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise ConfigError("registry", str(exc)) from exc
    engines: dict[str, EngineRecord] = {}
    addresses: set[tuple[str, int]] = set()
    for entry in content.engine:
        if entry.name in engines:
            raise ConfigError("registry", f"engine {entry.name!r} is listed twice")
        record = _engine_record(content.cluster, entry)
        for agent in record.agents:
            if (agent.host, agent.port) in addresses:
                raise ConfigError("registry", f"two agents claim the address {agent.host}:{agent.port}")
            addresses.add((agent.host, agent.port))
        engines[entry.name] = record
    _check_reachable(engines.values())
    return engines


def _check_reachable(engines: Iterable[EngineRecord]) -> None:
    """An address must mean the same agent to everybody who reads the file.

    Raises:
        ConfigError: an unspecified address, or loopback beside addresses of other hosts.
    """
    local: list[AgentRecord] = []
    remote: list[AgentRecord] = []
    for agent in (agent for engine in engines for agent in engine.agents):
        if _is_unspecified(agent.host):
            raise ConfigError(
                "agent.address", f"{agent.host} of {agent.id} is no place to dial; name an address of its host"
            )
        (local if is_loopback(agent.host) else remote).append(agent)
    if local and remote:
        raise ConfigError(
            "agent.address",
            f"{local[0].host} of {local[0].id} means another host to {remote[0].id} on {remote[0].host}; "
            "name an address that all can reach",
        )


def _is_unspecified(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return host == "*"


def is_loopback(host: str) -> bool:
    """Whether an address reaches this host only. Names other than `localhost` are taken for other hosts."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False  # a name


def dump_registry(cluster: str, engines: list[EngineRecord]) -> bytes:
    """The file that `parse_registry` reads back."""
    entries = [
        {
            "name": engine.name,
            "role": engine.role.value,
            "tie_break": engine.tie_break.value,
            "topology": {
                "tp": engine.topology.tp,
                "pp": engine.topology.pp,
                "cp": engine.topology.cp,
                "dp": engine.topology.dp,
                "layers_per_stage": list(engine.topology.layers_per_stage),
                "cp_split": str(engine.topology.cp_split),
            },
            "agent": [
                {"address": f"{_bracket(agent.host)}:{agent.port}", "ranks": list(agent.ranks)}
                for agent in engine.agents
            ],
        }
        for engine in engines
    ]
    return tomli_w.dumps({"cluster": cluster, "engine": entries}).encode()


def parse_address(text: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port`.

    Raises:
        ConfigError: no host, no port, or a port outside 0..65535.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ConfigError("address", f"{text!r} is not host:port; an IPv6 host stands in brackets")
    return match["v6"] or match["host"], int(match["port"])


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _engine_record(cluster: str, entry: _EngineFile) -> EngineRecord:
    facts = entry.topology
    topology = Topology(
        facts.tp, facts.pp, facts.cp, facts.dp, tuple(facts.layers_per_stage), ContextSplit.parse(facts.cp_split)
    )
    owner: dict[int, str] = {}
    agents = []
    for agent in entry.agent:
        for rank in agent.ranks:
            topology.check_rank(rank)
            if rank in owner:
                raise ConfigError(
                    "registry", f"engine {entry.name!r}: rank {rank} is claimed by {owner[rank]} and {agent.address}"
                )
            owner[rank] = agent.address
        host, port = parse_address(agent.address)
        identity = AgentId(cluster, entry.name, entry.role, min(agent.ranks))
        agents.append(AgentRecord(identity, host, port, tuple(sorted(agent.ranks))))
    missing = sorted(set(range(topology.num_ranks)) - set(owner))
    if missing:
        raise ConfigError("registry", f"engine {entry.name!r}: no agent owns rank {missing[0]}")
    return EngineRecord(entry.name, entry.role, topology, entry.tie_break, tuple(agents))
