"""Notifications of one endpoint on their way to its callback, on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Final

from rdma_kv.errors import LocalProtocolError
from rdma_kv.transport.base import NotificationCallback

_TURN_S: Final = 0.001


class Inbox:
    """Delivers each message once, a few per turn of the loop, only while the endpoint listens and has a callback.

    What comes earlier waits here. A callback that raises loses only its own message: the error goes to the loop's
    exception handler.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._messages: deque[bytes] = deque()
        self._callback: NotificationCallback | None = None
        self._listeners = 0
        self._scheduled = False

    @property
    def listening(self) -> bool:
        return self._listeners > 0

    def on_notification(self, callback: NotificationCallback) -> None:
        self._callback = callback
        self._schedule()

    def listen(self) -> bool:
        """Count one more listener. True if it is the first."""
        self._listeners += 1
        self._schedule()
        return self._listeners == 1

    def unlisten(self) -> bool:
        """Count one listener less. True if it was the last.

        Raises:
            LocalProtocolError: nobody listens.
        """
        if not self._listeners:
            raise LocalProtocolError("unlisten() without listen()")
        self._listeners -= 1
        return not self._listeners

    def put(self, message: bytes) -> None:
        self._messages.append(message)
        self._schedule()

    def close(self) -> None:
        """Drop what waits; nothing is delivered from now on."""
        self._messages.clear()
        self._callback = None
        self._listeners = 0

    def _schedule(self) -> None:
        if self._messages and self.listening and self._callback is not None and not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        until = time.perf_counter() + _TURN_S
        while self._messages and self.listening and self._callback is not None:
            try:
                self._callback(self._messages.popleft())
            except Exception as exc:  # noqa: BLE001 - the next message must not suffer for it
                self._loop.call_exception_handler({"message": "a notification's receiver failed", "exception": exc})
            if time.perf_counter() >= until:
                break
        self._schedule()
