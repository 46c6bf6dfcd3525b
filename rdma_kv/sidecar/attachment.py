"""One connection of the sidecar: from the first message of a client to the end of its agent.

Theory of operation. A connection begins unattached, for a few seconds and with small frames. ATTACH starts an agent; while it
starts, the engine maps staging, so messages go on being handled. The end is one of: DETACH, the end of the stream (the
engine has died), a message that cannot be (its bug), or the end of the sidecar. In each case, in this order: calls fail, and
all participants are told; the agent closes, which settles what others may still write, within seconds; memory goes back.
Only then may another client attach as the same agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from typing import Any, Final, Protocol

from rdma_kv.agent import Agent
from rdma_kv.config import GpuConfig
from rdma_kv.cuda import Cuda
from rdma_kv.errors import ClosedError, ConfigError, RdmaKvError, RemoteProtocolError, SidecarLostError
from rdma_kv.protocol.link import Process
from rdma_kv.registry.base import Registry
from rdma_kv.sidecar.channel import Channel
from rdma_kv.sidecar.facts import check_version, fault_of, int64s, layout_of, role_of
from rdma_kv.sidecar.remote import RemoteEngine
from rdma_kv.sidecar.running import Calls
from rdma_kv.sidecar.settings import SidecarConfig
from rdma_kv.sidecar.wire import (
    MAX_FIRST_FRAME_BYTES,
    MAX_FRAME_BYTES,
    Abort,
    Ask,
    Attach,
    Attached,
    Bye,
    Cancel,
    Closing,
    Detach,
    Finish,
    FromEngine,
    FromSidecar,
    GpuFacts,
    Mapped,
    Push,
    Receive,
    Register,
    Send,
    Stats,
    Status,
    StatusIs,
    Worked,
    decode_of_engine,
    encode,
)
from rdma_kv.transport.named import TransportMaker
from rdma_kv.types import AgentId

logger = logging.getLogger("rdma_kv.sidecar")

FIRST_S: Final = 5.0
"""How long a connection may stay without having attached."""

DETACHED_S: Final = 20.0
"""How long after DETACH the works of an engine may stay unanswered, which has said that none runs."""

_KEPT: Final[list[RemoteEngine]] = []
"""Engines whose agents could not be closed: something may still touch their staging, so it stays until the process exits."""


class Host(Protocol):
    """What a connection needs of the sidecar."""

    config: SidecarConfig
    registry: Registry
    transport: str | TransportMaker

    async def claim(self, attachment: Attachment, agent_id: AgentId, ranks: frozenset[int]) -> None: ...

    def status(self) -> dict[str, Any]: ...


class Attachment:
    """One connection, which it owns. Use `run`, which returns when all of it has ended.

    Args:
        pid: of the process at the other end, 0 where the kernel does not tell (another process namespace).

    Attributes:
        agent: None until one has started to start.
        id: whose agent it is; None before.
        ranks: that it claims.
        attached: whether its agent is up.
        ended: when nothing of it is left.
    """

    def __init__(self, host: Host, sock: socket.socket, pid: int) -> None:
        self.agent: Agent | None = None
        self.id: AgentId | None = None
        self.ranks: frozenset[int] = frozenset()
        self.attached = False
        self.who = f"engine process {pid}" if pid else "an engine"
        self.pid = pid
        self.ended = asyncio.Event()
        self._host = host
        self._engine: RemoteEngine | None = None
        self._calls: Calls | None = None
        self._end: asyncio.Future[RdmaKvError | None] = asyncio.get_running_loop().create_future()
        self._starting: asyncio.Task[None] | None = None
        self._lost = False
        self._late: asyncio.TimerHandle | None = None
        self._channel = Channel(
            sock,
            name=self.who,
            on_frame=self._on_frame,
            on_lost=self._finish,
            farewell=lambda error: encode(Bye(fault_of(error))),
            limit_bytes=MAX_FIRST_FRAME_BYTES,
        )

    @property
    def closing(self) -> bool:
        """Whether it is on its way to its end."""
        return self._end.done()

    @property
    def calls(self) -> int:
        """Calls that run."""
        return 0 if self._calls is None else len(self._calls)

    def refuse_calls(self, error: RdmaKvError) -> None:
        """Begin no more calls."""
        if self._calls is not None:
            self._calls.refusal = error

    async def idle(self) -> None:
        """Wait until no call runs."""
        if self._calls is not None:
            await self._calls.idle()

    def end(self, error: RdmaKvError) -> None:
        """End it for a reason of the sidecar's, which the client is told."""
        self._finish(error)

    def status(self) -> dict[str, Any]:
        """One entry of the sidecar's status."""
        return {
            "id": str(self.id),
            "pid": self.pid,
            "state": "closing" if self.closing else "attached" if self.attached else "attaching",
            "calls": self.calls,
            "staging_bytes": 0 if self._engine is None else self._engine.staging_bytes,
            "name": "" if self.agent is None else self.agent.name,
            "address": "" if self.agent is None else "{}:{}".format(*self.agent.address),
            "stats": {} if self.agent is None or not self.attached else self.agent.stats(),
        }

    async def run(self) -> None:
        """Serve the connection to its end, and clean up behind it."""
        first = asyncio.get_running_loop().call_later(FIRST_S, self._too_slow)
        try:
            error = await self._end
            await self._clean_up(error)
        finally:
            first.cancel()
            self.ended.set()

    # --- messages ------------------------------------------------------------------------------------------------------

    def _on_frame(self, body: bytes) -> None:
        try:
            message = decode_of_engine(self.who, body)
            if self._end.done():
                self._on_late(message)
            elif self.id is None:
                self._on_first(message)
            elif not self.attached:
                self._on_starting(message)
            else:
                self._on_message(message)
        except RdmaKvError as exc:
            self._finish(exc)

    def _on_first(self, message: FromEngine) -> None:
        match message:
            case Status():
                self._say(StatusIs(self._host.status()))
                self._finish(None)
            case Attach():
                check_version(self.who, message)
                self.id = AgentId(message.cluster, message.engine, role_of(message), min(message.ranks))
                self.ranks = frozenset(message.ranks)
                self._channel.limit_bytes = MAX_FRAME_BYTES
                self._starting = asyncio.create_task(self._attach(message), name=f"attach {self.id}")
            case _:
                raise RemoteProtocolError(self.who, f"{type(message).__name__} before ATTACH")

    def _on_starting(self, message: FromEngine) -> None:
        if not isinstance(message, Mapped) or self._engine is None:
            raise RemoteProtocolError(self.who, f"{type(message).__name__} before ATTACHED")
        self._engine.mapped(self.who, message)

    def _on_message(self, message: FromEngine) -> None:
        agent, engine, calls = self.agent, self._engine, self._calls
        assert agent is not None
        assert engine is not None
        assert calls is not None
        match message:
            case Worked():
                engine.kernels.worked(self.who, message)
            case Push() | Finish() | Abort():
                calls.step(message)
            case Send() | Receive():
                calls.begin(message)
            case Cancel():
                calls.cancel(message)
            case Ask():
                self._say(Stats(message.number, agent.stats()))
            case Mapped():
                engine.mapped(self.who, message)
            case Register():
                agent.register_pool_at(
                    layout_of(self.who, message),
                    int64s(self.who, "addresses", message.addresses),
                    int64s(self.who, "sizes", message.sizes),
                    replica=message.replica,
                    rank=message.rank,
                    component=message.component,
                )
            case Closing():
                agent.abort(ClosedError("the agent is closing"))
            case Detach():
                self._finish(None)
            case _:
                raise RemoteProtocolError(self.who, f"{type(message).__name__} after ATTACH")

    def _on_late(self, message: FromEngine) -> None:
        """After the end nothing begins. What was asked of an engine that has detached may still be answered."""
        if self._engine is not None and not self._lost:
            match message:
                case Worked():
                    self._engine.kernels.worked(self.who, message)
                case Mapped():
                    self._engine.mapped(self.who, message)

    def _say(self, message: FromSidecar) -> None:
        self._channel.send(encode(message))

    # --- the beginning -------------------------------------------------------------------------------------------------

    async def _attach(self, message: Attach) -> None:
        """Start the agent; its failure ends the connection."""
        try:
            await self._start(message)
        except RdmaKvError as exc:
            self._finish(exc)
        except Exception as exc:
            logger.exception("%s could not be attached", self.id)
            self._finish(SidecarLostError("sidecar", f"a bug: {exc!r}"))

    async def _start(self, message: Attach) -> None:
        host = self._host
        assert self.id is not None
        gpu = None if message.gpu is None else await asyncio.to_thread(_find_gpu, message.gpu)
        config = host.config.agent_config(message, gpu)
        await host.claim(self, self.id, self.ranks)
        process = Process(message.host, message.pid, message.started)
        engine = self._engine = RemoteEngine(self._channel, process, on_gpu=gpu is not None, on_dead=self._died)
        try:
            self.agent = Agent(config, host.registry, transport=host.transport, engine=engine)
        except BaseException:  # no agent will close them
            engine.kernels.unwatch()
            raise
        self._calls = Calls(self.agent, self._say, self.who)
        await self.agent.start()
        self.attached = True
        self._say(Attached(self.agent.name, *self.agent.address, config.timeouts.transfer))
        facts = {
            "event": "attached",
            "agent": str(self.id),
            "pid": self.pid,
            "address": "{}:{}".format(*self.agent.address),
        }
        logger.info("%s has attached as %s", self.who, self.id, extra={"facts": facts})

    def _died(self) -> None:
        self._finish(SidecarLostError(self.who, "has died"))

    def _too_slow(self) -> None:
        if self.id is None:
            self._finish(SidecarLostError(self.who, f"has not attached within {FIRST_S} s"))

    # --- the end -------------------------------------------------------------------------------------------------------

    def _finish(self, error: RdmaKvError | None) -> None:
        if self._end.done():
            if error is not None and not self._lost:
                self._lose(error)  # it has detached, and dies while its agent closes
            return
        self._end.set_result(error)
        if self._channel.open and error is not None:
            self._channel.send(encode(Bye(fault_of(error))))
        if error is not None:
            self._lose(error)

    def _lose(self, error: RdmaKvError) -> None:
        """At once: peers wait for it, and kernels of an engine that is gone do not answer."""
        self._lost = True
        cause = error if isinstance(error, SidecarLostError) else SidecarLostError(self.who, str(error))
        if self._engine is not None:
            self._engine.lose(cause)
        if self._calls is not None:
            self._calls.lost(cause)

    async def _clean_up(self, error: RdmaKvError | None) -> None:
        began = time.monotonic()
        self._late = asyncio.get_running_loop().call_later(DETACHED_S, self._overdue)
        try:
            await self._close(error, began)
        finally:
            self._late.cancel()

    def _overdue(self) -> None:
        """It has detached, and its agent has not closed yet: is it the engine that we wait for?"""
        if self._engine is not None and self._engine.busy:
            self._finish(SidecarLostError(self.who, f"has detached, and not answered for its works in {DETACHED_S} s"))
        else:
            self._late = asyncio.get_running_loop().call_later(DETACHED_S, self._overdue)

    async def _close(self, error: RdmaKvError | None, began: float) -> None:
        if self._starting is not None:
            self._starting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._starting
        if self._calls is not None:
            lost = (
                error
                if isinstance(error, SidecarLostError)
                else SidecarLostError(self.who, str(error or "has detached"))
            )
            await self._calls.lose(lost)
        if self.agent is not None:
            try:
                await self.agent.close()
            except Exception:  # the data plane may still hold memory: it is kept
                if self._engine is not None:
                    _KEPT.append(self._engine)
                logger.exception("the agent %s could not be closed; its staging stays allocated", self.id)
            else:
                if self._engine is not None:
                    self._engine.give_back()
        await self._channel.close()
        if self.id is not None:
            why = "detached" if error is None else str(error)
            facts = {"event": "detached", "agent": str(self.id), "pid": self.pid, "why": why}
            facts["seconds"] = round(time.monotonic() - began, 3)
            logger.log(
                logging.INFO if error is None else logging.WARNING, "%s: %s", self.id, why, extra={"facts": facts}
            )
        elif error is not None:
            logger.warning("%s", error)


def _find_gpu(facts: GpuFacts) -> GpuConfig:
    """The engine's GPU as this process counts.

    Raises:
        RegistrationError: there is no GPU here, or libcuda cannot be used.
        ConfigError: this process does not see that GPU.
    """
    with contextlib.closing(Cuda()) as cuda:
        device = cuda.ordinal_of(facts.uuid)
    if device is None:
        raise ConfigError("gpu.device", f"the sidecar does not see GPU {facts.uuid.hex()}; see CUDA_VISIBLE_DEVICES")
    return GpuConfig(device, facts.programs, facts.stream_priority, tuple(facts.direct))
