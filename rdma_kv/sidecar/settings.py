"""Settings of a sidecar: `SidecarConfig`, and the file `agent.toml` that says it."""

from __future__ import annotations

import grp
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from rdma_kv.config import MAX_TIMEOUT_S, GpuConfig, Limits, StagingConfig, Timeouts
from rdma_kv.errors import ConfigError
from rdma_kv.registry.static import is_loopback, parse_address
from rdma_kv.session import AgentConfig
from rdma_kv.sidecar.facts import config_of
from rdma_kv.sidecar.wire import Attach
from rdma_kv.transport.named import AUTO, PREFERENCE

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("json", "text")


@dataclass(frozen=True, slots=True)
class ListenAt:
    """Where the agent of one engine's ranks listens. `rank` is the lowest that the agent owns."""

    engine: str
    rank: int
    listen: str


@dataclass(frozen=True, slots=True)
class SidecarConfig:
    """What is the sidecar's to say, for all agents that it runs.

    Attributes:
        socket: path of the Unix socket where engines attach.
        registry: path of the registry file.
        transport: as `Agent` takes it: `auto`, `ucx` or `nixl`.
        listen: host:port of the control plane of each agent that `agent` does not name; port 0 takes a free one.
        agent: where single agents listen.
        allow_plaintext: as `AgentConfig.allow_plaintext`; `health` off loopback needs it too.
        health: host:port of `/healthz` and `/readyz`; empty for none.
        allowed_uids: user ids that may attach; None for the sidecar's own.
        socket_group: name of the group that may connect to the socket too (mode 0660); empty for nobody else (0600).
        drain_s: how long running calls may take after SIGTERM.
        log_level, log_format: of the lines on standard error.
        staging, timeouts, limits: of each agent; those of the clients do not count.
    """

    socket: Path
    registry: Path
    transport: str = AUTO
    listen: str = "127.0.0.1:0"
    agent: tuple[ListenAt, ...] = ()
    allow_plaintext: bool = False
    health: str = "127.0.0.1:7690"
    allowed_uids: tuple[int, ...] | None = None
    socket_group: str = ""
    drain_s: float = 30.0
    log_level: str = "info"
    log_format: str = "json"
    staging: StagingConfig = field(default_factory=StagingConfig)
    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if not 0 < len(os.fsencode(self.socket)) < 108:
            raise ConfigError("socket", f"{str(self.socket)!r}: a path of 1 to 107 bytes, as Unix sockets have")
        for name, address in (("listen", self.listen), *(("agent.listen", each.listen) for each in self.agent)):
            self._check_address(name, address)
        if self.health:
            self._check_address("health", self.health)
        places = [(each.engine, each.rank) for each in self.agent]
        if len(set(places)) != len(places):
            raise ConfigError("agent", f"{places}: each engine and rank once")
        if self.transport not in {AUTO, *PREFERENCE}:
            raise ConfigError("transport", f"{self.transport!r}; use {', '.join((AUTO, *PREFERENCE))}")
        if wrong := [uid for uid in self.allowed_uids or () if not 0 <= uid < 1 << 32]:
            raise ConfigError("allowed_uids", f"{wrong[0]} is no user id")
        if not 0 <= self.drain_s <= MAX_TIMEOUT_S:
            raise ConfigError("drain_s", f"{self.drain_s} s; from 0 to {MAX_TIMEOUT_S:.0f} s are possible")
        if self.log_level not in LEVELS:
            raise ConfigError("log_level", f"{self.log_level!r}; use {', '.join(LEVELS)}")
        if self.log_format not in FORMATS:
            raise ConfigError("log_format", f"{self.log_format!r}; use {' or '.join(FORMATS)}")
        if self.socket_group:
            try:
                grp.getgrnam(self.socket_group)
            except KeyError as exc:
                raise ConfigError("socket_group", f"there is no group {self.socket_group!r} here") from exc

    def _check_address(self, name: str, address: str) -> None:
        try:
            host, _ = parse_address(address)
        except ConfigError as exc:
            raise ConfigError(name, exc.problem) from exc
        if not is_loopback(host) and not self.allow_plaintext:
            text = f"{host} is off loopback, and what goes there is plaintext; set allow_plaintext on a trusted network"
            raise ConfigError(name, text)

    @property
    def uids(self) -> frozenset[int]:
        """User ids that may attach."""
        return frozenset((os.getuid(),) if self.allowed_uids is None else self.allowed_uids)

    def agent_config(self, message: Attach, gpu: GpuConfig | None) -> AgentConfig:
        """The config of the agent for a client that attaches: who it is, is its own; the rest is ours.

        Raises:
            ConfigError: it cannot work; the field is named.
        """
        listen = self.listen
        for each in self.agent:
            if each.engine == message.engine and each.rank == min(message.ranks):
                listen = each.listen
        return config_of(
            message,
            gpu=gpu,
            listen=listen,
            allow_plaintext=self.allow_plaintext,
            staging=self.staging,
            timeouts=self.timeouts,
            limits=self.limits,
        )


class _AgentFile(Struct, forbid_unknown_fields=True):
    engine: str
    rank: int
    listen: str


class _ConfigFile(Struct, forbid_unknown_fields=True):
    socket: str
    registry: str
    transport: str = AUTO
    listen: str = "127.0.0.1:0"
    agent: list[_AgentFile] = []
    allow_plaintext: bool = False
    health: str = "127.0.0.1:7690"
    allowed_uids: list[int] | None = None
    socket_group: str = ""
    drain_s: float = 30.0
    log_level: str = "info"
    log_format: str = "json"
    staging: dict[str, int | float] = {}
    timeouts: dict[str, float] = {}
    limits: dict[str, int | float] = {}


def read_config(path: Path) -> SidecarConfig:
    """Read `agent.toml`. Paths in it are relative to its folder.

    Raises:
        ConfigError: it cannot be read, or a value cannot work; the field is named.
    """
    try:
        said = msgspec.toml.decode(path.read_bytes(), type=_ConfigFile)
    except OSError as exc:
        raise ConfigError("config", f"cannot read {path}: {exc.strerror}") from exc
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as exc:
        raise ConfigError("config", f"{path}: {exc}") from exc
    folder = path.parent
    return SidecarConfig(
        socket=folder / said.socket,
        registry=folder / said.registry,
        transport=said.transport,
        listen=said.listen,
        agent=tuple(ListenAt(each.engine, each.rank, each.listen) for each in said.agent),
        allow_plaintext=said.allow_plaintext,
        health=said.health,
        allowed_uids=None if said.allowed_uids is None else tuple(said.allowed_uids),
        socket_group=said.socket_group,
        drain_s=said.drain_s,
        log_level=said.log_level,
        log_format=said.log_format,
        staging=_table("staging", StagingConfig, said.staging),
        timeouts=_table("timeouts", Timeouts, said.timeouts),
        limits=_table("limits", Limits, said.limits),
    )


def _table(name: str, kind: type[Any], values: dict[str, Any]) -> Any:  # noqa: ANN401 - an object of `kind`
    known = set(kind.__dataclass_fields__)
    if unknown := sorted(set(values) - known):
        raise ConfigError(f"{name}.{unknown[0]}", f"is no setting; {name} has {', '.join(sorted(known))}")
    for setting, value in values.items():
        if isinstance(value, float) and "float" not in str(kind.__dataclass_fields__[setting].type):
            raise ConfigError(f"{name}.{setting}", f"{value}; a whole number is needed")
    return kind(**values)
