"""One live link to one incarnation of one remote agent, as everybody in the shell sees it.

A `Peer` owns everything about that incarnation: the control connection, the data endpoint, what it exported to us, and
the numbers of its transfers. When it is lost it is dropped whole; a restarted peer is a new object. Apart from `links`,
which makes and ends peers, since most of the shell knows a peer and never a connection on its way to become one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from rdma_kv.control import Connection
from rdma_kv.errors import PeerLostError, RdmaKvError
from rdma_kv.messages import ControlMessage, Notification, Regions
from rdma_kv.protocol.link import Identity, bye
from rdma_kv.protocol.liveness import LifeState
from rdma_kv.pulse import Pulse
from rdma_kv.transport.base import Endpoint
from rdma_kv.types import AgentId

logger = logging.getLogger(__name__)


@dataclass
class Numbers:
    """Numbers of the transfers with one incarnation of a peer. They go on when a broken link comes back."""

    given: int = 0  # our last one
    high_water: int = 0  # the peer's last one

    def take(self) -> int:
        self.given += 1
        return self.given


@dataclass(eq=False)
class Peer:
    """One live link to one incarnation of one remote agent.

    Attributes:
        transport: the data plane that both sides chose for this link.
        device_lane: by which KV goes between staging on the GPUs of both sides; empty where it is in host memory.
        endpoint: the data link; None until a transfer needs it.
        regions: where its staging lies; None until it told us.
        writable: done when the data link can be written to, or cannot be and `unwritable` says why.
        exported: done when our own staging was told to it.
        early: notifications that overtook their OFFER.
        lingering: the end of listening after the last transfer, while it is put off.
        pulse: whether it lives; None only before the link is up.
        reading: the task that reads its messages.
        lost: why the link has ended.
        given_up: why we end it, before it has ended.
        close: ends the control connection, after what is queued.
    """

    identity: Identity
    connection: Connection
    numbers: Numbers
    transport: str
    device_lane: str = ""
    endpoint: Endpoint | None = None
    regions: Regions | None = None
    writable: asyncio.Task[None] | None = None
    unwritable: RdmaKvError | None = None
    exported: asyncio.Task[None] | None = None
    early: list[Notification] = field(default_factory=list)
    lingering: asyncio.TimerHandle | None = None
    pulse: Pulse | None = None
    reading: asyncio.Task[None] | None = None
    lost: RdmaKvError | None = None
    given_up: RdmaKvError | None = None
    close: Callable[[Peer], None] | None = None
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.identity.name

    @property
    def id(self) -> AgentId:
        return self.identity.id

    @property
    def device_staging(self) -> bool:
        """Whether KV passes through staging on the GPUs of both sides, rather than in host memory."""
        return bool(self.device_lane)

    @property
    def may_post(self) -> bool:
        """Whether a WRITE may be posted now: not to a lost or suspect peer, nor to one that may have given us up."""
        return self.lost is None and (self.pulse is None or self.pulse.may_post)

    async def until_may_post(self) -> None:
        """Wait until a WRITE may be posted, or the link has ended: then `lost` says why."""
        if self.pulse is not None:
            await self.pulse.until_may_post()

    @property
    def suspect(self) -> bool:
        """Whether it is silent for too long, but not yet lost."""
        return self.pulse is not None and self.pulse.state is LifeState.SUSPECT

    def send(self, message: ControlMessage) -> None:
        """Put a message on the control stream; a broken stream is noticed by the reader."""
        if self.lost is None and self.connection.open:
            try:
                self.connection.send(message)
            except PeerLostError as exc:
                logger.debug("%s", exc)

    def give_up(self, error: RdmaKvError) -> None:
        """End the link from our side: the peer is told why, and `on_lost` follows with this error. Idempotent."""
        if self.lost is None and self.given_up is None:
            self.given_up = error
            self.send(bye(error))
            if self.close is not None:
                self.close(self)
