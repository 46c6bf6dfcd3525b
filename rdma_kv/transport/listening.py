"""What the endpoints of all back-ends do alike: notifications come in while somebody listens, and the peer is told of it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence

from rdma_kv.errors import ClosedError
from rdma_kv.transport.base import NotificationCallback, WritePair
from rdma_kv.transport.inbox import Inbox


class ListeningEndpoint(ABC):
    """The half of an `Endpoint` that knows nothing of its back-end. See there for the contract."""

    def __init__(self, peer: str) -> None:
        self._peer = peer
        self._inbox = Inbox(asyncio.get_running_loop())

    @property
    def peer(self) -> str:
        return self._peer

    @property
    @abstractmethod
    def closed(self) -> bool:
        """Whether the end has begun."""

    @abstractmethod
    async def write(self, pairs: Sequence[WritePair], notification: bytes) -> None:
        """See `Endpoint.write`."""

    @abstractmethod
    def _say_listening(self, listening: bool) -> None:
        """Whether anybody listens has changed."""

    async def notify(self, message: bytes) -> None:
        """Notify without data. Waits, as a WRITE does, until the peer listens.

        Raises:
            TransportError: as for `write`.
        """
        await self.write((), message)

    def on_notification(self, callback: NotificationCallback) -> None:
        self._inbox.on_notification(callback)

    def listen(self) -> None:
        if self.closed:
            raise ClosedError(f"the endpoint of {self._peer} is closed")
        if self._inbox.listen():
            self._say_listening(True)

    def unlisten(self) -> None:
        if not self.closed and self._inbox.unlisten():
            self._say_listening(False)
