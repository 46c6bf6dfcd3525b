"""What callers of `send`, `receive` and `register_pool` say, checked: the same for an agent and for a client of a sidecar."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rdma_kv.config import MAX_TIMEOUT_S
from rdma_kv.errors import ConfigError, LocalProtocolError
from rdma_kv.packer import Packer
from rdma_kv.session import AgentConfig, Call, TokenRange, interval
from rdma_kv.types import Interval, ReplicaId, Role

Tokens = int | TokenRange | Mapping[str, TokenRange]


class CallChecks:
    """Checks what one agent's callers say, against its config and its pools."""

    def __init__(self, config: AgentConfig, packer: Packer) -> None:
        self._config = config
        self._packer = packer

    def call(
        self,
        role: Role,
        key: str,
        replica: int,
        attempt: int,
        timeout_s: float,
        pages: Any,  # noqa: ANN401 - page numbers, or a mapping from component to page numbers
        spans: tuple[Interval, ...],
    ) -> Call:
        """What `send` and `receive` have in common.

        Args:
            role: the one that the verb belongs to.
            spans: as `ranges` gives them.

        Raises:
            ConfigError: names the argument that cannot be right.
            LocalProtocolError: the verb belongs to the other role.
        """
        config = self._config
        if config.role is not role:
            verb = "send" if role is Role.PREFILL else "receive"
            raise LocalProtocolError(f"{verb} belongs to a {role.value} agent; this one is {config.role.value}")
        if not isinstance(key, str) or not 1 <= len(key) <= 512 or not _is_unicode(key):
            raise ConfigError("key", "must be a string of 1 to 512 Unicode characters")
        if not isinstance(attempt, int) or not 0 <= attempt < 1 << 31:
            raise ConfigError("attempt", f"{attempt!r} is not a small non-negative number")
        if not isinstance(replica, int):
            raise ConfigError("replica", f"{replica!r} is not a whole number")
        config.topology.check_replica(replica)
        if all(owned.replica != replica for owned in config.owns):
            raise ConfigError("replica", f"{replica} has no rank on this agent, which owns {list(config.ranks)}")
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError("timeout_s", f"{timeout_s} s; more than 0 and at most {MAX_TIMEOUT_S:.0f} s are possible")
        self._packer.check_complete()
        tables = self._packer.page_tables(replica, pages, [span.end for span in spans])
        return Call(key, replica, attempt, tables, timeout_s)

    def component_name(self, name: str | None) -> str:
        """The component that a caller means.

        Raises:
            ConfigError: the model has several, and none was said.
        """
        components = self._config.model.components
        if name is None:
            if len(components) > 1:
                raise ConfigError("component", f"the model has {[c.name for c in components]}; say which")
            return components[0].name
        return name

    def ranges(self, tokens: Tokens) -> tuple[tuple[Interval, ...], Interval]:
        """Range per component, in what it counts (a mapping says that itself); and all of them in tokens.

        Raises:
            ConfigError: no range, or of a component that the model does not have.
        """
        components = self._config.model.components
        if not isinstance(tokens, Mapping):
            span = interval("tokens", (0, tokens) if isinstance(tokens, int) else tokens)
            return tuple(component.units(span, last=True) for component in components), span
        if unknown := set(tokens) - {component.name for component in components}:
            raise ConfigError("tokens", f"names {sorted(unknown)}, which the model does not have")
        default = (0, 0)
        ranges = tuple(interval("tokens", tokens.get(component.name, default)) for component in components)
        spans = [
            Interval(span.start * (part.opaque_page_tokens or 1), span.end * (part.opaque_page_tokens or 1))
            for span, part in zip(ranges, components, strict=True)
            if part.has_tokens and span.size
        ]
        return ranges, Interval(min((s.start for s in spans), default=0), max((s.end for s in spans), default=0))


def check_destination(to: object) -> None:
    """Raises ConfigError where `to` is neither None nor a ReplicaId."""
    if to is not None and not isinstance(to, ReplicaId):
        raise ConfigError("to", f"{to!r} is not a ReplicaId(engine, index)")


def sources_of(source: ReplicaId | Sequence[ReplicaId] | None) -> tuple[ReplicaId, ...]:
    """The replicas that a receive may come from; none for any.

    Raises:
        ConfigError: something else.
    """
    sources = (source,) if isinstance(source, ReplicaId) else tuple(source or ())
    if not all(isinstance(each, ReplicaId) for each in sources):
        raise ConfigError("source", f"{source!r} is not a ReplicaId(engine, index), nor a list of such")
    return sources


def _is_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8: a lone surrogate cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
