"""The asynchronous client of a sidecar: as `Agent`, with the kernels here and everything else there; see `rdma_kv.client`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec

from rdma_kv.calls import CallChecks, Tokens, check_destination, sources_of
from rdma_kv.cuda import Cuda
from rdma_kv.deaths import own_process
from rdma_kv.engine_side import Kernels
from rdma_kv.entry import StageTimes
from rdma_kv.errors import ClosedError, LocalProtocolError, RdmaKvError, SidecarLostError
from rdma_kv.layout import KvLayout
from rdma_kv.memory import locate_all
from rdma_kv.packer import Packer
from rdma_kv.receiving import Received
from rdma_kv.session import AgentConfig, Call, check_event
from rdma_kv.sidecar.engine_sending import ClientSending
from rdma_kv.sidecar.facts import attach_of, register_of, replica_id, replica_of
from rdma_kv.sidecar.link import EngineLink, RunningCall
from rdma_kv.sidecar.memory import Pools
from rdma_kv.sidecar.wire import Closing, GpuFacts, Ranges, Receive, Register, Send
from rdma_kv.types import Owned, ReplicaId, Role

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.05  # between two attempts to reach the sidecar; twice that each time, up to the next
_LONGEST_PAUSE_S: Final = 1.0
_STATS_S: Final = 5.0


class Client:
    """One member of the transfer service, whose mover is a sidecar. Use with `async with`, or `start` and `close`.

    Of `config` counts who it is: engine, role, ranks, topology, model, cluster, tie_break, checksum, gpu. Where it listens,
    staging, timeouts and limits are the sidecar's to say (its agent.toml), and ignored here.

    Args:
        socket: path of the sidecar's socket.
        start_s: how long `start` waits for a sidecar that is not up yet.

    Attributes:
        address: (host, port) where the sidecar's agent listens, as the registry must list it.
        name: of the agent's incarnation.

    Raises:
        ConfigError: see `Agent`.

    Example:
        >>> async with Client(config, "/run/rdma-kv/agent.sock") as client:  # doctest: +SKIP
        ...     client.register_pool(layout, memory, replica=0, rank=0)
        ...     received = await client.receive("req-1", 1, pages, source=ReplicaId("prefill", 0), tokens=n)
    """

    def __init__(self, config: AgentConfig, socket: str | Path, *, start_s: float = 30.0) -> None:
        self.config = config
        self.address: tuple[str, int] = ("", 0)
        self.name = str(config.id)
        self._path = Path(socket)
        self._start_s = start_s
        self._packer = Packer(config.role, config.model, config.topology, config.owns, gpu=config.gpu)
        self._checks = CallChecks(config, self._packer)
        self._pools = Pools()
        self._registered: list[Register] = []
        self._transfer_s = config.timeouts.transfer
        self._cuda: Cuda | None = None
        self._link: EngineLink | None = None
        self._latest: EngineLink | None = None  # the same, or the last one, whose kernels may still run
        self._why: RdmaKvError | None = None  # there is no link
        self._changed = asyncio.Event()  # there is one, or there will be none
        self._refused: asyncio.Future[RdmaKvError] | None = None  # the first attempt, for good
        self._keeping: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._state = "new"

    @property
    def kernels(self) -> Kernels:
        """What gathers and scatters, in this process."""
        return self._packer.kernels

    # --- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Get the kernels ready, and attach to the sidecar.

        Raises:
            ConfigError: the sidecar refuses us, or the GPU cannot be used; the field is named.
            IncompatiblePeerError: another process is this agent (`identity`), or the sidecar has another version.
            SidecarLostError: it cannot be reached in `start_s`.
        """
        if self._state != "new":
            raise LocalProtocolError("a client starts once")
        self._state = "open"
        await self._packer.start()
        if self.config.gpu is not None:
            self._cuda = await asyncio.to_thread(Cuda)
        self._refused = asyncio.get_running_loop().create_future()
        self._keeping = asyncio.create_task(self._keep(), name=f"sidecar of {self.config.id}")
        attached = asyncio.ensure_future(self._changed.wait())
        waiting: list[asyncio.Future[Any]] = [attached, self._refused]
        try:
            await asyncio.wait(waiting, timeout=self._start_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            attached.cancel()
        if self._refused.done():
            raise self._refused.result()
        if self._link is None:
            raise SidecarLostError(f"sidecar {self._path}", f"not reached within {self._start_s} s: {self._why}")

    async def close(self) -> None:
        """End everything: running calls fail on both sides, kernels end, the sidecar's agent closes. Idempotent.

        It goes on if the caller is cancelled: pools must not be freed before the last kernel on them has ended.
        """
        if self._closing is None:
            self._state = "closed"
            self._closing = asyncio.create_task(self._close(), name=f"close {self.config.id}")
            await asyncio.shield(self._closing)
        elif not self._closing.done():
            await asyncio.wait([self._closing])  # a failure is told to the first caller

    async def _close(self) -> None:
        why = self._why = ClosedError("the client is closing")
        self._changed.set()
        if self._keeping is not None:
            self._keeping.cancel()  # what is still attaching ends with it; a link that is up does not
            await asyncio.gather(self._keeping, return_exceptions=True)
        link, self._link = self._latest, None
        if link is not None:
            link.say(Closing())
            await link.end_calls(why)
            await link.end_kernels()
        await self._packer.close()
        if link is not None:
            await link.detach()
            await link.close()
        if self._cuda is not None and (link is None or not link.kept):
            await asyncio.to_thread(self._cuda.close)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def register_pool(
        self,
        layout: KvLayout,
        memory: Any,  # noqa: ANN401 - an array, a tensor, or a list of them
        *,
        replica: int,
        rank: int,
        component: str | None = None,
    ) -> None:
        """Tell where one rank keeps one component's KV; see `Agent.register_pool`. After a reconnect it is told again.

        Raises:
            ConfigError: names the field that does not fit.
        """
        self._check_open()
        name = self._checks.component_name(component)
        device = None if self.config.gpu is None else self.config.gpu.device
        addresses, sizes = locate_all("memory", memory, device=device)
        owned = Owned(replica, rank)
        self._packer.register_at(name, layout, addresses, sizes, owned, memory)
        self._pools.add(addresses, sizes)
        message = register_of(name, layout, addresses, sizes, owned)
        self._registered.append(message)
        if self._link is not None:
            self._link.say(message)

    # --- transfers -----------------------------------------------------------------------------------------------------

    def send(
        self,
        key: str,
        replica: int,
        pages: Any,  # noqa: ANN401 - page numbers, or a mapping from component to page numbers
        *,
        tokens: Tokens,
        to: ReplicaId | None = None,
        attempt: int = 0,
        timeout_s: float | None = None,
    ) -> ClientSending:
        """Send a request's KV; see `Agent.send`. What only the registry can tell is wrong is raised by the block's begin.

        Raises:
            ConfigError: a value that cannot be right.
            LocalProtocolError: not a prefill agent.
        """
        self._check_open()
        check_destination(to)
        spans, announced = self._checks.ranges(tokens)
        call = self._call(Role.PREFILL, key, replica, attempt, timeout_s, pages, spans)
        ranges: Ranges = _mapping(tokens) or (announced.start, announced.end)

        async def begin() -> RunningCall:
            link, deadline = await self._attached(call.timeout_s)

            def make(number: int) -> Send:
                left_s = max(1e-3, deadline - asyncio.get_running_loop().time())
                where = replica_of(to)
                return Send(number, key, replica, attempt, _pages(call), ranges, where, left_s)

            return link.begin(deadline, make)

        return ClientSending(self.config, to, begin)

    async def receive(
        self,
        key: str,
        replica: int,
        pages: Any,  # noqa: ANN401 - page numbers, or a mapping from component to page numbers
        *,
        tokens: Tokens,
        source: ReplicaId | Sequence[ReplicaId] | None = None,
        attempt: int = 0,
        timeout_s: float | None = None,
        after: Any = None,  # noqa: ANN401 - a CUDA event
    ) -> Received:
        """Receive a request's KV; see `Agent.receive`. After an error or a cancellation no page is written any more.

        Raises:
            ConfigError: a value that cannot be right.
            LocalProtocolError: not a decode agent, or this key is being received from there already.
            SidecarLostError: the sidecar has ended meanwhile, or could not be reached in time.
            PeerError, TransferError, TransportError: it failed; all participants have been told.
        """
        self._check_open()
        spans, announced = self._checks.ranges(tokens)
        call = self._call(Role.DECODE, key, replica, attempt, timeout_s, pages, spans)
        sources = [(each.engine, each.index) for each in sources_of(source)]
        if after is not None:
            check_event("after", after, config=self.config)
        ranges: Ranges = _mapping(tokens) or (announced.start, announced.end)
        link, deadline = await self._attached(call.timeout_s)
        event = 0 if after is None else link.add_event(after)

        def make(number: int) -> Receive:
            left_s = max(1e-3, deadline - asyncio.get_running_loop().time())
            return Receive(number, key, replica, attempt, _pages(call), ranges, sources, left_s, event)

        try:
            ended = await link.begin(deadline, make).outcome()
        finally:
            link.drop_event(event)
        other = replica_id(ended.to)
        assert other is not None
        metadata = msgspec.msgpack.decode(ended.metadata)
        times = StageTimes(*ended.times)
        return Received(other, ended.tokens, metadata, ended.received_bytes, ended.seconds, times)

    async def stats(self) -> dict[str, Any]:
        """What `Agent.stats` says, of the sidecar's agent. To be awaited, since another process is asked.

        Raises:
            SidecarLostError: it cannot be reached, or does not answer within 5 s.
        """
        self._check_open()
        link, _ = await self._attached(_STATS_S)
        return await link.stats(_STATS_S)

    # --- inside --------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._state != "open":
            raise ClosedError("the client is not open; use it inside `async with`")

    def _call(
        self,
        role: Role,
        key: str,
        replica: int,
        attempt: int,
        timeout_s: float | None,
        pages: Any,  # noqa: ANN401
        spans: Any,  # noqa: ANN401 - tuple[Interval, ...]
    ) -> Call:
        timeout_s = self._transfer_s if timeout_s is None else timeout_s
        return self._checks.call(role, key, replica, attempt, timeout_s, pages, spans)

    async def _attached(self, timeout_s: float) -> tuple[EngineLink, float]:
        """A link that is up, and the deadline of a call that begins now.

        Raises:
            ClosedError: the client closes.
            SidecarLostError: there is none in time.
        """
        deadline = asyncio.get_running_loop().time() + float(timeout_s)  # which may be NumPy's
        while True:
            if self._state != "open":
                raise ClosedError("the client is closing")
            if self._link is not None and self._link.up:
                return self._link, deadline
            self._changed.clear()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._changed.wait()
            except TimeoutError:
                raise SidecarLostError(f"sidecar {self._path}", f"not reached in time: {self._why}") from None

    async def _keep(self) -> None:
        """Keep a link up, from the start to `close`."""
        pause_s, first = _FIRST_PAUSE_S, True
        while True:
            link = self._latest = EngineLink(self._path, self.kernels, self._pools, self._cuda, self.config.gpu)
            try:
                await self._open(link)
            except RdmaKvError as exc:
                self._why = exc
                await link.close()
                if first and not exc.retryable and self._refused is not None:
                    self._refused.set_result(exc)
                    return
                logger.log(logging.DEBUG if exc.retryable else logging.WARNING, "cannot attach: %s", exc)
            except Exception as exc:
                logger.exception("cannot attach to %s", link.where)
                self._why = SidecarLostError(link.where, f"a bug: {exc!r}")
                await link.close()
            except BaseException:
                await link.close()
                raise
            else:
                first, began = False, asyncio.get_running_loop().time()
                await link.ended.wait()
                if asyncio.get_running_loop().time() - began > _LONGEST_PAUSE_S:
                    pause_s = _FIRST_PAUSE_S  # or it is lost each time that it is there: no reason to hurry
                if self._state != "open":
                    return
                self._why = link.error
                if self._link is link:
                    self._link = None
                logger.warning("reconnecting: %s", link.error)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    async def _open(self, link: EngineLink) -> None:
        gpu = None
        if self.config.gpu is not None and self._cuda is not None:
            own = self.config.gpu
            uuid = await asyncio.to_thread(self._cuda.uuid, own.device)
            gpu = GpuFacts(uuid, own.programs, own.stream_priority, list(own.direct))
        attached = await link.open(attach_of(self.config, gpu, own_process()))
        for message in self._registered:
            link.say(message)
        self.name, self.address = attached.name, (attached.host, attached.port)
        self._transfer_s = attached.transfer_s
        self._link = link
        self._changed.set()


def _mapping(tokens: Tokens) -> dict[str, tuple[int, int]] | None:
    """Ranges per component, where the caller gave them so."""
    if isinstance(tokens, (int, tuple, list)):
        return None
    assert not isinstance(tokens, int)
    return {name: (span[0], span[1]) for name, span in dict(tokens).items()}


def _pages(call: Call) -> list[bytes]:
    """The checked page tables as messages carry them."""
    return [table.astype("<i8").tobytes() for table in call.tables.pages]
