"""Settings of an agent, frozen and checked when made. Nothing here reads the environment."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from rdma_kv.errors import ConfigError

MAX_TIMEOUT_S = 7 * 24 * 3600.0
"""A week: longer waits are mistakes, and durations on the wire have a bound."""

MIN_HEARTBEAT_S = 0.01
"""A hundred a second and peer; more would be load, not a sign of life."""

MIN_HELLO_BYTES = 1024
"""Less, and the HELLO of a small model would not fit."""

MAX_HELLO_BYTES = 1 << 20
"""No frame is longer, before or after the handshake; `messages.MAX_FRAME_BYTES`."""


DIRECT_LANES = ("cuda_ipc", "rdma")
"""Over which memory of a GPU may be written by itself."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds.

    Attributes:
        transfer: default for a whole send or receive, from the call to its outcome.
        quiesce: how long posted WRITEs and grants may take to settle after a failure.
        connect: one handshake with a peer.
        retry: longest pause between two attempts to reach a peer.
        unmatched: longest that an OFFER or EXPECT waits here for its call, whatever its sender would wait.
        heartbeat: pause between two heartbeats to a peer; a link uses the smaller of both sides' values. A peer of which
            two are overdue is suspect.
        lease: how long a peer may be silent before it is lost; more than three heartbeats.
        redial: how long a peer whose link was lost is dialed again without a call that needs it.
    """

    transfer: float = 60.0
    quiesce: float = 10.0
    connect: float = 10.0
    retry: float = 1.0
    unmatched: float = 600.0
    heartbeat: float = 2.0
    lease: float = 10.0
    redial: float = 600.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value <= MAX_TIMEOUT_S:
                text = f"{value} s; more than 0 and at most {MAX_TIMEOUT_S:.0f} s are possible"
                raise ConfigError(f"timeouts.{field.name}", text)
        if self.heartbeat < MIN_HEARTBEAT_S:
            raise ConfigError("timeouts.heartbeat", f"{self.heartbeat} s; at least {MIN_HEARTBEAT_S} s")
        if not self.lease > 3 * self.heartbeat:
            text = f"{self.lease} s; must be more than three heartbeats of {self.heartbeat} s"
            raise ConfigError("timeouts.lease", text)


@dataclass(frozen=True, slots=True)
class StagingConfig:
    """The staging pool of one agent: `slots` equal slots of `slot_bytes`.

    More slots let more chunks be in flight; a slot bounds the size of one WRITE.

    Attributes:
        max_staging_bytes: how far the pool may grow where slots are held without a proof that no transport touches them
            any more; None for four times `slots * slot_bytes`.
    """

    slots: int = 16
    slot_bytes: int = 4 << 20
    max_staging_bytes: int | None = None

    def __post_init__(self) -> None:
        if not 2 <= self.slots <= 1 << 20:
            raise ConfigError("staging.slots", f"{self.slots}; from 2 up to {1 << 20} are possible")
        if not 4096 <= self.slot_bytes < 1 << 40:
            raise ConfigError("staging.slot_bytes", f"{self.slot_bytes}; at least 4096 bytes")
        if self.max_staging_bytes is not None and self.max_staging_bytes < self.slots * self.slot_bytes:
            text = f"{self.max_staging_bytes}; at least slots * slot_bytes, {self.slots * self.slot_bytes} bytes"
            raise ConfigError("staging.max_staging_bytes", text)

    @property
    def max_slots(self) -> int:
        """Most slots at a time that are not retired; at most 1,048,576 as peers count them."""
        if self.max_staging_bytes is None:
            return min(4 * self.slots, 1 << 20)
        return min(self.max_staging_bytes // self.slot_bytes, 1 << 20)


@dataclass(frozen=True, slots=True)
class GpuConfig:
    """The GPU whose memory holds an agent's pools.

    Attributes:
        device: CUDA ordinal, as this process counts.
        programs: of one gather or scatter launch, and so at most as many multiprocessors; None chooses the fewest that
            outrun the lanes in use. See `kernels.programs`.
        stream_priority: of the streams that kernels and copies run on; lower runs first, 0 is that of other streams.
        direct: lanes over which staging on the GPU itself is used, where both sides name the lane: `cuda_ipc` between
            processes of one host, `rdma` where GPUDirect RDMA is set up (untested). To all other peers KV goes through
            pinned host memory; with none, to all.
    """

    device: int
    programs: int | None = None
    stream_priority: int = 0
    direct: tuple[str, ...] = ("cuda_ipc",)

    def __post_init__(self) -> None:
        if not 0 <= self.device < 1024:
            raise ConfigError("gpu.device", f"{self.device!r} is no CUDA ordinal")
        if self.programs is not None and not 1 <= self.programs < 1 << 31:
            raise ConfigError("gpu.programs", f"{self.programs}; at least 1, or None for an automatic choice")
        for lane in self.direct:
            if lane not in DIRECT_LANES:
                raise ConfigError("gpu.direct", f"{lane!r}; use {' or '.join(DIRECT_LANES)}")


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what peers can make an agent keep.

    Attributes:
        unmatched_per_peer: OFFERs and EXPECTs that wait for their counterpart.
        send_buffer_bytes: control bytes that wait for one peer; beyond it the link is given up.
        hello_bytes: the first frame of a connection, while it comes from anybody. A HELLO of one component and 8 ranks has
            less than 1 KiB, and a rank takes at most 7 bytes: 64 KiB are enough for 9,000 ranks in one agent.
        ungreeted: connections that have come in and whose HELLO has not; as many again from addresses that we know. See
            `protocol.border`.
        ungreeted_per_address: of these, from one address.
        handshakes_per_s: HELLOs of one address that are read in the long run; more are closed unread.
        handshake_burst: so many are read at once, after a quiet time.
    """

    unmatched_per_peer: int = 1024
    send_buffer_bytes: int = 16 << 20
    hello_bytes: int = 64 << 10
    ungreeted: int = 128
    ungreeted_per_address: int = 32
    handshakes_per_s: float = 50.0
    handshake_burst: int = 256

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not 0 < value < math.inf or (value < 1 and field.name != "handshakes_per_s"):
                raise ConfigError(f"limits.{field.name}", f"{value} must be positive, and finite")
        if not MIN_HELLO_BYTES <= self.hello_bytes <= MAX_HELLO_BYTES:
            text = (
                f"{self.hello_bytes}; from {MIN_HELLO_BYTES} up to {MAX_HELLO_BYTES} bytes, a whole frame, are possible"
            )
            raise ConfigError("limits.hello_bytes", text)
