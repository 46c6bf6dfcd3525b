"""Where a fault is put in: around control messages and the data plane of one agent, without a change of the product.

`installed` puts a class of its own in place of the control connection; `Seam.transport` wraps a data plane. Both tell
their `Seam` when the transfer under test reaches a point, and do to frames, WRITEs and notifications what it says. One
seam belongs to one agent: in a process of its own there is one, on loopback one for each host.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from matrix import Fault, Point

import rdma_kv.greeting
from rdma_kv.control import Connection
from rdma_kv.errors import PeerLostError, TransportError
from rdma_kv.messages import ControlMessage, Done, Grant, Offer, encode
from rdma_kv.transport.base import NOT_POSTED, NotificationCallback, WritePair

LATE_S = 0.5  # how late a delayed frame is, and how long one waits to be overtaken
_ASIDE = frozenset({"Hello", "Bye", "Heartbeat"})  # frames of the link, not of a transfer


class Seam:
    """What shall happen at one agent.

    Attributes:
        reached: told of each point that this agent sees, before it goes on.
        state: `running`, `stopped` (nothing leaves, nothing is taken) or `dead`.
        frame_fault: befalls the next frame of a transfer that is sent.
        every: each so manieth frame is dropped or doubled; 0 for none.
    """

    def __init__(self, seed: int = 0) -> None:
        self.reached: Callable[[Point], None] = lambda point: None
        self.state = "running"
        self.frame_fault: Fault | None = None
        self.every = 0
        self._frames = 0
        self.no_post = False
        self.no_note = False
        self.connections: set[SeamConnection] = set()
        self.random = random.Random(seed)
        self._later: list[Callable[[], None]] = []
        self._resumed = asyncio.Event()

    def next_fault(self) -> Fault | None:
        """What befalls the frame that is sent now."""
        fault, self.frame_fault = self.frame_fault, None
        self._frames += 1
        if fault is None and self.every and self._frames % self.every == 0:
            fault = self.random.choice([Fault.DROP, Fault.DOUBLE])
        return fault

    def when_running(self, work: Callable[[], None]) -> None:
        """Now; or, of a stopped agent, when it goes on."""
        if self.state == "stopped":
            self._later.append(work)
        elif self.state == "running":
            work()

    async def running(self) -> None:
        while self.state == "stopped":
            await self._resumed.wait()

    def stop(self) -> None:
        self.state = "stopped"

    def resume(self) -> None:
        self.state = "running"
        resumed, self._resumed = self._resumed, asyncio.Event()
        resumed.set()
        later, self._later = self._later, []
        for work in later:
            work()

    def disarm(self) -> bool:
        """Take back a fault that nothing has met yet; whether there was one."""
        armed = self.no_post or self.no_note or self.frame_fault is not None
        self.no_post = self.no_note = False
        self.frame_fault = None
        return armed

    def die(self) -> None:
        self.state = "dead"
        self._later.clear()

    def cut(self) -> None:
        """Break the control streams where they are."""
        for connection in list(self.connections):
            connection.cut(b"")

    def transport(self, inner: Any) -> Any:
        return _SeamTransport(inner, self)


class SeamConnection(Connection):
    """A control connection whose messages a seam sees and spoils."""

    def __init__(self, seam: Seam, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._seam = seam
        self._overtaken: ControlMessage | None = None
        seam.connections.add(self)

    def send(self, message: ControlMessage) -> None:
        seam = self._seam
        if isinstance(message, Offer):
            seam.reached(Point.BEFORE_OFFER)
        elif isinstance(message, Done) and message.transfer:
            seam.reached(Point.AFTER_ACKS)
        if seam.state == "dead":
            raise PeerLostError(self.name, "this process is dead")
        if seam.state == "stopped":
            seam.when_running(lambda: self._send_late(message))
            return
        self._spoil(message)
        if isinstance(message, Offer):
            seam.reached(Point.AFTER_OFFER)
        elif isinstance(message, Grant) and message.slots:
            seam.reached(Point.AFTER_GRANT)

    async def receive(self) -> ControlMessage | None:
        message = await super().receive()
        if isinstance(message, Grant) and message.slots:
            self._seam.reached(Point.AFTER_GRANT)  # as the initiator sees it
        return message

    def _spoil(self, message: ControlMessage) -> None:
        """Send, as the seam's next fault of a frame will have it."""
        fault = self._seam.next_fault() if type(message).__name__ not in _ASIDE else None
        loop = asyncio.get_running_loop()
        match fault:
            case None:
                super().send(message)
            case Fault.DROP:
                pass
            case Fault.DOUBLE:
                super().send(message)
                super().send(message)
            case Fault.DELAY:
                loop.call_later(LATE_S, self._send_late, message)
            case Fault.REORDER:
                self._overtaken = message
                loop.call_later(LATE_S, self._overtake)
                return
            case Fault.BREAK:
                self.cut(encode(message))
                return
            case _:
                raise AssertionError(f"{fault} is no fault of a frame")
        if self._overtaken is not None and type(message).__name__ not in _ASIDE:
            self._overtake()

    def _overtake(self) -> None:
        message, self._overtaken = self._overtaken, None
        if message is not None:
            self._send_late(message)

    def _send_late(self, message: ControlMessage) -> None:
        with contextlib.suppress(PeerLostError):
            super().send(message)

    def cut(self, frame: bytes) -> None:
        """Some first bytes of a frame, then nothing more in either direction."""
        self._send_all()
        if not self._writer.is_closing():
            self._writer.write(frame[: self._seam.random.randint(0, len(frame))])
            self._writer.close()

    async def close(self) -> None:
        self._seam.connections.discard(self)
        await super().close()


@contextlib.contextmanager
def installed(seam_of: Callable[[], Seam]) -> Iterator[None]:
    """Agents that run within the block use connections of the seam that `seam_of` names at that moment."""
    before = rdma_kv.greeting.Connection

    def make(*arguments: Any, **options: Any) -> SeamConnection:
        return SeamConnection(seam_of(), *arguments, **options)

    rdma_kv.greeting.Connection = make  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        rdma_kv.greeting.Connection = before  # type: ignore[misc]


class _Around:
    """All of what it stands for, but for what a subclass does itself."""

    def __init__(self, inner: Any, seam: Seam) -> None:
        self._inner = inner
        self._seam = seam

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _SeamTransport(_Around):
    def endpoint(self, peer: str) -> Any:
        return _SeamEndpoint(self._inner.endpoint(peer), self._seam)


class _SeamEndpoint(_Around):
    async def write(self, pairs: Sequence[WritePair], notification: bytes) -> None:
        seam = self._seam
        if seam.no_post:
            seam.no_post = False
            raise TransportError(self._inner.peer, NOT_POSTED, "refused by the test")
        posted = asyncio.get_running_loop().create_task(self._inner.write(pairs, notification))
        await asyncio.sleep(0)
        if self._inner.lane != "loopback":  # there the network tells when some bytes have landed
            seam.reached(Point.DURING_WRITE)
        await asyncio.shield(posted)

    def on_notification(self, callback: NotificationCallback) -> None:
        seam = self._seam

        def notified(body: bytes) -> None:
            seam.reached(Point.BEFORE_ACK)
            if seam.no_note:
                seam.no_note = False
                return
            seam.when_running(lambda: callback(body))

        self._inner.on_notification(notified)
