"""Settings of an agent, frozen and checked when made. Nothing here reads the environment."""

from __future__ import annotations

from dataclasses import dataclass

from rdma_kv.errors import ConfigError

MAX_TIMEOUT_S = 7 * 24 * 3600.0
"""A week: longer waits are mistakes, and durations on the wire have a bound."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds.

    Attributes:
        transfer: default for a whole send or receive, from the call to its outcome.
        quiesce: how long posted WRITEs and grants may take to settle after a failure.
        connect: one handshake with a peer.
        retry: longest pause between two attempts to reach a peer.
        unmatched: longest that an OFFER or EXPECT waits here for its call, whatever its sender would wait.
    """

    transfer: float = 60.0
    quiesce: float = 10.0
    connect: float = 10.0
    retry: float = 1.0
    unmatched: float = 600.0

    def __post_init__(self) -> None:
        for name in ("transfer", "quiesce", "connect", "retry", "unmatched"):
            if not 0 < getattr(self, name) <= MAX_TIMEOUT_S:
                text = f"{getattr(self, name)} s; more than 0 and at most {MAX_TIMEOUT_S:.0f} s are possible"
                raise ConfigError(f"timeouts.{name}", text)


@dataclass(frozen=True, slots=True)
class StagingConfig:
    """The staging pool of one agent: `slots` equal slots of `slot_bytes`.

    More slots let more chunks be in flight; a slot bounds the size of one WRITE.
    """

    slots: int = 16
    slot_bytes: int = 4 << 20

    def __post_init__(self) -> None:
        if not 2 <= self.slots <= 1 << 20:
            raise ConfigError("staging.slots", f"{self.slots}; from 2 up to {1 << 20} are possible")
        if not 4096 <= self.slot_bytes < 1 << 40:
            raise ConfigError("staging.slot_bytes", f"{self.slot_bytes}; at least 4096 bytes")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what peers can make an agent keep.

    Attributes:
        unmatched_per_peer: OFFERs and EXPECTs that wait for their counterpart.
        send_buffer_bytes: control bytes that wait for one peer; beyond it the link is given up.
    """

    unmatched_per_peer: int = 1024
    send_buffer_bytes: int = 16 << 20

    def __post_init__(self) -> None:
        for name in ("unmatched_per_peer", "send_buffer_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"limits.{name}", f"{getattr(self, name)} is not positive")
