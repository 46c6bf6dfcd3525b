"""The sidecar: its socket, its connections, who may be which agent, and its end."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Final, Self

from rdma_kv.errors import ConfigError, IncompatiblePeerError, RdmaKvError, SidecarLostError
from rdma_kv.registry.base import Registry
from rdma_kv.registry.static import StaticRegistry
from rdma_kv.sidecar.attachment import Attachment
from rdma_kv.sidecar.facts import fault_of
from rdma_kv.sidecar.listening import UnixListener, credentials
from rdma_kv.sidecar.settings import SidecarConfig
from rdma_kv.sidecar.wire import Bye, encode
from rdma_kv.tasks import Tasks
from rdma_kv.transport.named import TransportMaker, names
from rdma_kv.types import AgentId

logger = logging.getLogger("rdma_kv.sidecar")

MAX_UNATTACHED: Final = 16  # connections at a time that have not attached; more are closed at once
MAX_CONNECTIONS: Final = 128  # of all: an attached one takes staging, a port and some ten descriptors
_PROGRESS_S: Final = 2.0  # between two lines while draining


class Sidecar:
    """Runs one agent per attached engine process and ranks. Use with `async with`.

    Args:
        registry: in place of the file that the config names.
        transport: in place of the config's, as `Agent` takes it.

    Raises:
        ConfigError: (of `start`) the socket cannot be served.
    """

    def __init__(
        self,
        config: SidecarConfig,
        *,
        registry: Registry | None = None,
        transport: str | TransportMaker | None = None,
    ) -> None:
        self.config = config
        self.registry = registry if registry is not None else StaticRegistry(config.registry)
        self.transport = transport if transport is not None else config.transport
        self.draining: RdmaKvError | None = None
        self._attachments: set[Attachment] = set()
        self._tasks = Tasks()
        self._listener: UnixListener | None = None
        self._began = time.monotonic()

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        return tuple(self._attachments)

    @property
    def ready(self) -> bool:
        """Whether engines can attach and begin calls."""
        return self._listener is not None and self.draining is None

    async def start(self) -> None:
        """Bind the socket and take connections.

        Raises:
            ConfigError: field `socket` or `socket_group`: it cannot be served; or `transport`: no engine could attach.
        """
        if isinstance(self.transport, str):
            names(self.transport)
        self._listener = UnixListener(self.config.socket, self.config.socket_group)
        asyncio.get_running_loop().add_reader(self._listener.sock, self._accept)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End everything: calls fail on all sides, agents close, memory goes back. Idempotent."""
        reason = SidecarLostError("sidecar", "is closing")
        self.draining = self.draining or reason
        self._stop_listening()
        for attachment in self.attachments:
            attachment.end(reason)
        await asyncio.gather(*(attachment.ended.wait() for attachment in self.attachments))
        await self._tasks.drain(1.0)
        await self._tasks.close()

    async def drain(self, deadline_s: float, progress: Callable[[str], None]) -> int:
        """Begin no more calls, and wait for those that run.

        Returns:
            How many still ran at the deadline.
        """
        self.draining = SidecarLostError("sidecar", "is draining: it is about to end; try again when it is back")
        began = time.monotonic()
        for attachment in self.attachments:
            attachment.refuse_calls(self.draining)
        waiting = {asyncio.create_task(attachment.idle(), name="drain") for attachment in self.attachments}
        try:
            while any(not each.done() for each in waiting) and (left_s := began + deadline_s - time.monotonic()) > 0:
                running = sum(attachment.calls for attachment in self.attachments)
                progress(f"draining: {running} calls of {len(self.attachments)} agents run, {left_s:.0f} s are left")
                await asyncio.wait(waiting, timeout=min(_PROGRESS_S, left_s))
        finally:
            for each in waiting:
                each.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        left = sum(attachment.calls for attachment in self.attachments)
        progress(f"drained: {left} calls are cut off" if left else "drained: all calls have ended")
        return left

    async def claim(self, attachment: Attachment, agent_id: AgentId, ranks: frozenset[int]) -> None:
        """Be the one that is this agent. Waits for the end of a former one that is on its way there.

        Raises:
            IncompatiblePeerError: field `identity`: another connection is, or has some of its ranks.
            SidecarLostError: the sidecar is about to end.
        """
        while (other := self._claimed(attachment, agent_id, ranks)) is not None:
            if not other.closing:
                text = f"{other.id} is attached already, by {other.who}; end that engine first, or give this one other ranks"
                raise IncompatiblePeerError(str(agent_id), "identity", text)
            await other.ended.wait()
        if self.draining is not None:
            raise self.draining

    def _claimed(self, attachment: Attachment, agent_id: AgentId, ranks: frozenset[int]) -> Attachment | None:
        for other in self._attachments:
            if other is attachment or other.agent is None or other.id is None or other.ended.is_set():
                continue
            same = (other.id.cluster, other.id.engine) == (agent_id.cluster, agent_id.engine)
            if same and not ranks.isdisjoint(other.ranks):
                return other
        return None

    def status(self) -> dict[str, Any]:
        """How it is, for operators; the fields are listed in docs/operations.md."""
        agents = [attachment.status() for attachment in self._attachments if attachment.id is not None]
        stats = [agent["stats"] for agent in agents]
        return {
            "version": importlib.import_module("rdma_kv").__version__,  # its names lie above this layer
            "pid": os.getpid(),
            "uptime_s": round(time.monotonic() - self._began, 3),
            "ready": self.ready,
            "slots_total": sum(each.get("slots_total", 0) for each in stats),
            "slots_free": sum(each.get("slots_free", 0) for each in stats),
            "slots_held": sum(sum(each.get("slots_held", {}).values()) for each in stats),
            "slots_retired": sum(each.get("slots_retired", 0) for each in stats),
            "agents": sorted(agents, key=lambda agent: str(agent["id"])),
        }

    # --- connections ---------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.sock.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as exc:  # no descriptors left: the loop would spin on a socket that stays readable
            logger.warning("no connection can be taken: %s", exc)
            self._pause()
            return
        pid, uid = credentials(sock)
        if uid not in self.config.uids:
            text = f"user {uid} may not attach to this sidecar; name it in allowed_uids of its agent.toml"
            _refuse(sock, ConfigError("allowed_uids", text))
            logger.warning("process %d of user %d was refused", pid, uid)
            return
        if len(self._attachments) >= MAX_CONNECTIONS:
            text = (
                f"{len(self._attachments)} connections are open, the most that it takes; try again when one has ended"
            )
            _refuse(sock, SidecarLostError("sidecar", text))
            logger.warning("process %d was refused: %s", pid, text)
            return
        unattached = sum(attachment.id is None for attachment in self._attachments)
        if unattached >= MAX_UNATTACHED:
            _refuse(sock, SidecarLostError("sidecar", f"{unattached} connections have not attached yet; try again"))
            return
        attachment = Attachment(self, sock, pid)
        self._attachments.add(attachment)
        self._tasks.spawn(self._serve(attachment), f"connection of process {pid}")

    async def _serve(self, attachment: Attachment) -> None:
        try:
            await attachment.run()
        finally:
            self._attachments.discard(attachment)

    def _pause(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._listener is not None
        loop.remove_reader(self._listener.sock)
        loop.call_later(1.0, self._resume)

    def _resume(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener.sock, self._accept)

    def _stop_listening(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener.sock)
            self._listener.close()
            self._listener = None


def _refuse(sock: socket.socket, error: RdmaKvError) -> None:
    """Say why, as far as it goes without waiting, and close."""
    with sock:
        sock.setblocking(False)
        try:
            sock.send(encode(Bye(fault_of(error))))
        except OSError as exc:
            logger.debug("a refusal could not be sent: %r", exc)
