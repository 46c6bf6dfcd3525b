"""`/healthz` and `/readyz` for probes: the smallest HTTP server that does it. It says yes or no, and nothing else.

Alive is a sidecar whose event loop answers. Ready is one where engines can attach and begin calls; while it drains it is
alive and not ready.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Final

from rdma_kv.errors import ConfigError
from rdma_kv.registry.static import parse_address

_REQUEST_BYTES: Final = 4096  # of the head; probes send some hundred
_REQUEST_S: Final = 2.0
_MOST: Final = 32  # connections at a time; the oldest makes room


class Health:
    """Answers probes, on one event loop.

    Args:
        ready: asked for each `/readyz`.

    Attributes:
        address: where it listens.
    """

    def __init__(self, ready: Callable[[], bool]) -> None:
        self._ready = ready
        self._open: dict[asyncio.Task[Any] | None, None] = {}  # the oldest first
        self._server: asyncio.Server | None = None
        self.address: tuple[str, int] = ("", 0)

    async def start(self, address: str) -> None:
        """Listen at host:port.

        Raises:
            ConfigError: field `health`: the address cannot be bound.
        """
        host, port = parse_address(address)
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=_REQUEST_BYTES)
        except OSError as exc:
            raise ConfigError("health", f"{address} cannot be bound: {exc.strerror or exc}") from exc
        bound = self._server.sockets[0].getsockname()
        self.address = (bound[0], bound[1])

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own = asyncio.current_task()
        self._open[own] = None
        if len(self._open) > _MOST:  # those that say nothing must not keep a probe out
            oldest = next(iter(self._open))
            del self._open[oldest]
            if oldest is not None:
                oldest.cancel()
        try:
            async with asyncio.timeout(_REQUEST_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass  # no probe; it gets the end of the stream
        finally:
            self._open.pop(own, None)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if method not in {b"GET", b"HEAD"}:
            status, text = "405 Method Not Allowed", "GET only\n"
        elif path == b"/healthz":
            status, text = "200 OK", "alive\n"
        elif path == b"/readyz":
            status, text = ("200 OK", "ready\n") if self._ready() else ("503 Service Unavailable", "not ready\n")
        else:
            status, text = "404 Not Found", "/healthz or /readyz\n"
        lines = (
            f"HTTP/1.1 {status}\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        )
        return (lines + ("" if method == b"HEAD" else text)).encode()
