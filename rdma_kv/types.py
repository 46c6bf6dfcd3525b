"""The small frozen words that every layer shares.

Four word pairs never mix: src/dst (the way of the bytes), initiator/target (who posts), local/remote (whose memory),
prefill/decode (the engine's role).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rdma_kv.errors import ConfigError


class Role(StrEnum):
    """What an engine does with KV: compute it (prefill) or use it (decode)."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Role:
        """The role of the peers."""
        return Role.DECODE if self is Role.PREFILL else Role.PREFILL


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """Half-open `[start, end)` over layers, heads or token positions."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ConfigError("interval", f"[{self.start}, {self.end}) must satisfy 0 <= start <= end")

    @property
    def size(self) -> int:
        return self.end - self.start

    def __and__(self, other: Interval) -> Interval:
        """The common part; an empty interval where there is none."""
        start = max(self.start, other.start)
        return Interval(start, max(start, min(self.end, other.end)))

    def contains(self, other: Interval) -> bool:
        return self.start <= other.start and other.end <= self.end

    def __str__(self) -> str:
        return f"[{self.start},{self.end})"


@dataclass(frozen=True, slots=True, order=True)
class ReplicaId:
    """One attention-DP group of an engine: the ranks that share one request's KV."""

    engine: str
    index: int

    def __str__(self) -> str:
        return f"{self.engine}/{self.index}"


@dataclass(frozen=True, slots=True, order=True)
class AgentId:
    """Who an agent is across restarts: (cluster, engine, role, lowest rank it owns)."""

    cluster: str
    engine: str
    role: Role
    rank: int

    def __str__(self) -> str:
        return f"{self.cluster}/{self.engine}/{self.role.value}/{self.rank}"


@dataclass(frozen=True, slots=True)
class Owned:
    """One (replica, rank) that an agent owns."""

    replica: int
    rank: int


@dataclass(frozen=True, slots=True)
class Region:
    """Local memory that a transport registered. Owned by the transport until `deregister`.

    Attributes:
        address: first byte, as a pointer in this process.
        length_bytes: extent.
        device: 0 for host memory, otherwise the CUDA ordinal + 1.
    """

    address: int
    length_bytes: int
    device: int = 0


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A piece of a region: address, length in bytes, device. Local or remote is said by whoever holds it."""

    address: int
    length_bytes: int
    device: int = 0
