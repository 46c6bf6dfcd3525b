"""The public API: one agent, its pools, `send` and `receive`.

An agent owns some ranks of one engine and is a packer and a mover in one process. `send` covers all ranks that it owns of
a replica, and all decode agents that they have moves to; `receive` the other way round. Everything runs on one event
loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rdma_kv.calls import CallChecks, Tokens, check_destination, sources_of
from rdma_kv.deaths import own_process
from rdma_kv.engine_side import EngineSide
from rdma_kv.errors import (
    ClosedError,
    ConfigError,
    LocalProtocolError,
    RdmaKvError,
    RouteMismatchError,
    TransferAborted,
)
from rdma_kv.kernels.checksum import ALGORITHM
from rdma_kv.layout import Int64Array, KvLayout
from rdma_kv.links import Links
from rdma_kv.memory import locate_all
from rdma_kv.messages import Done, Expect, Offer
from rdma_kv.mover import Mover
from rdma_kv.packer import Packer
from rdma_kv.peer import Peer
from rdma_kv.protocol.failures import Place
from rdma_kv.protocol.link import Identity
from rdma_kv.receiving import Received, Receiving
from rdma_kv.registry.base import Registry
from rdma_kv.registry.static import is_loopback, parse_address
from rdma_kv.rendezvous import Rendezvous
from rdma_kv.sending import Sending
from rdma_kv.session import AgentConfig, Call, Shell, check_event
from rdma_kv.transport.named import AUTO, TransportMaker, offer
from rdma_kv.transport.planes import Planes
from rdma_kv.types import Interval, Owned, ReplicaId, Role

logger = logging.getLogger(__name__)

_TELL_S = 1.0
"""How long a closing agent waits at most for peers to be told that its transfers have failed."""


class Agent:
    """One member of the transfer service. Use with `async with`, or `start` and `close`.

    Args:
        config: who it is.
        registry: where the others are.
        transport: `auto`: the best data plane that this installation and the peer have, link by link; the name of one,
            `ucx` or `nixl`, which peers must have too; or what makes one from the agent's incarnation name.
        engine: the process that holds the pools, if it is another one; for the sidecar.

    Raises:
        ConfigError: field `transport`: unknown, or nothing that `auto` could use is installed.

    Example:
        >>> async with Agent(config, StaticRegistry("cluster.toml")) as agent:  # doctest: +SKIP
        ...     agent.register_pool(layout, memory, replica=0, rank=0)
        ...     async with agent.send("req-1", 0, pages, to=ReplicaId("decode", 1), tokens=n) as out:
        ...         await out.push(ready=event)
        ...         out.metadata["first_token"] = token
    """

    def __init__(
        self,
        config: AgentConfig,
        registry: Registry,
        *,
        transport: str | TransportMaker = AUTO,
        engine: EngineSide | None = None,
    ) -> None:
        self.config = config
        self._incarnation = os.urandom(16)
        self.name = f"{config.id}#{self._incarnation.hex()[:12]}"
        self.address: tuple[str, int] = ("", 0)
        timeouts, limits = config.timeouts, config.limits
        self._planes = Planes(self.name, offer(transport, self.name))
        packer = Packer(
            config.role,
            config.model,
            config.topology,
            config.owns,
            gpu=config.gpu,
            kernels=engine.kernels if engine else None,
        )
        rendezvous = Rendezvous(config.role, self._check_first, self._fail_session, timeouts=timeouts, limits=limits)
        mover = Mover(
            config.role,
            self._planes,
            packer,
            rendezvous,
            staging=config.staging,
            timeouts=timeouts,
            gpu=config.gpu,
            engine=engine,
        )
        links = Links(self._identity, registry, mover, timeouts=timeouts, limits=limits)
        self._shell = Shell(config, registry, packer, mover, links, rendezvous)
        self._checks = CallChecks(config, packer)
        self._pools_ready = asyncio.Event()
        self._state = "new"
        self._starting = asyncio.Lock()
        self._closing: asyncio.Task[None] | None = None

    # --- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind the control plane. Where only one transport is offered, start it and register the staging memory there.

        On a GPU this also gets kernels, memory and all transports ready, which takes some seconds.

        Raises:
            ConfigError: the address cannot be bound, the only transport is not installed, or the GPU cannot be used.
            RegistrationError: the GPU has not enough memory.
            TransportError: the only transport cannot be set up.
        """
        if self._state != "new":
            raise LocalProtocolError("an agent starts once")
        self._state = "starting"
        shell = self._shell
        host, port = parse_address(self.config.listen)
        async with self._starting:
            for begin in (shell.packer.start, shell.mover.start):
                await begin()
                self._check_starting()
            self.address = await shell.links.start(host, port)
            self._check_starting()
            self._state = "open"
        if not is_loopback(host):
            logger.warning(
                "the control stream on %s:%d is plaintext and without authentication: let a firewall keep all but the hosts "
                "of this cluster from it, or listen on an address that only those reach",
                *self.address,
            )

    async def close(self) -> None:
        """End everything: running transfers fail on both sides, memory is settled as far as it can be. Idempotent.

        It goes on if the caller is cancelled: memory must not be freed before what touches it has ended.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"close {self.name}")
            await asyncio.shield(self._closing)
        elif not self._closing.done():
            await asyncio.wait([self._closing])  # a failure is told to the first caller

    async def _close(self) -> None:
        self._state = "closed"
        shell = self._shell
        self.abort(ClosedError("the agent is closing"))
        async with self._starting:
            pass  # a start under way has ended
        try:  # a data plane that cannot be closed, or a caller that waits no longer, must not leave links up
            await shell.mover.close()
        finally:
            try:
                await shell.tasks.drain(_TELL_S)
                await shell.tasks.close()
                shell.rendezvous.close()
            finally:
                await shell.links.close()
                await shell.mover.free(kernels_ended=await shell.packer.close())

    def abort(self, error: RdmaKvError) -> None:
        """Fail all that is under way, for a reason that all participants are told. Nothing begins any more: `close` it."""
        self._shell.closed = True
        for session in list(self._shell.sessions):
            session.fail(error)

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
        """Tell where one rank keeps one component's KV. All owned ranks must be told before the first transfer.

        Args:
            layout: strides of the pool.
            memory: one buffer, or a list in the layout's buffer order (arrays or CPU tensors, contiguous, writable; tensors
                on the GPU of `AgentConfig.gpu`). It stays the engine's, and must stay mapped until the agent is closed.
            component: may be left out where the model has one.

        Raises:
            ConfigError: names the field that does not fit.
        """
        self._check_open()
        name = self._checks.component_name(component)
        device = None if self.config.gpu is None else self.config.gpu.device
        addresses, sizes = locate_all("memory", memory, device=device)
        self.register_pool_at(layout, addresses, sizes, replica=replica, rank=rank, component=name, memory=memory)

    def register_pool_at(
        self,
        layout: KvLayout,
        addresses: Int64Array,
        sizes: Int64Array,
        *,
        replica: int,
        rank: int,
        component: str,
        memory: Any = None,  # noqa: ANN401
    ) -> None:
        """As `register_pool`, for the sidecar: of memory in the process where the kernels run.

        Args:
            addresses, sizes: int64 `[buffers]`, as that process sees them.
            memory: kept alive.
        """
        self._check_open()
        self._shell.packer.register_at(component, layout, addresses, sizes, Owned(replica, rank), memory)
        try:
            self._shell.packer.check_complete()
        except ConfigError:
            return
        self._pools_ready.set()

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
    ) -> Sending:
        """Send a request's KV, from all ranks that this agent owns of `replica`, to a decode replica.

        Use the result with `async with`; leaving the block normally says that all is pushed, and waits until the decode
        side has everything. Pages must not change from their `push` to the end of the block.

        Args:
            key: the request's name, the same on both sides.
            pages: the request's page table; `pages[i]` holds tokens `[i * page_size, (i + 1) * page_size)`. Under context
                parallelism each rank counts the tokens that it keeps.
            to: the decode replica; None for the first that expects the key.
            tokens: positions that will be pushed: a count n for `[0, n)`, a range, or a range per component (in what that
                counts: `(0, 1)` for a state without tokens, pages where they are opaque).
            timeout_s: for the whole transfer.

        Raises:
            ConfigError: a value that cannot be right.
            LocalProtocolError: not a prefill agent, or this key is being sent there already.
        """
        check_destination(to)
        available, announced = self._checks.ranges(tokens)
        call = self._call(Role.PREFILL, key, replica, attempt, timeout_s, pages, available)
        return Sending(self._shell, call, to, available, announced)

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
        """Receive a request's KV into all ranks that this agent owns of `replica`.

        Returns when all KV and the metadata are in. After an error or a cancellation no page is written any more.

        Args:
            pages: the request's page table, by position as in `send`; pages of a prefix that is here already are part of
                it.
            tokens: positions wanted; `(start, n)` leaves a prefix of `start` tokens alone.
            source: the prefill replica, or several of which the first that offers the key is taken; None for any.
            after: with pools on a GPU, a CUDA event before which no page is written: kernels that were queued before it was
                recorded may still use the pages.

        Raises:
            ConfigError: a value that cannot be right.
            LocalProtocolError: not a decode agent, or this key is being received from there already.
            PeerError, TransferError, TransportError: it failed; all participants have been told.
        """
        wanted, _ = self._checks.ranges(tokens)
        call = self._call(Role.DECODE, key, replica, attempt, timeout_s, pages, wanted)
        sources = sources_of(source)
        if after is not None:
            check_event("after", after, config=self.config)
        return await Receiving(self._shell, call, sources, wanted, () if after is None else (after,)).run()

    def stats(self) -> dict[str, Any]:
        """Counts for tests and operators: slots, transfers, tasks, transports, links, launches."""
        shell = self._shell
        gathers, scatters = shell.packer.launches
        mover = shell.mover.stats()
        return {
            **mover,
            "counters": {**mover["counters"], **shell.links.counters},
            "ungreeted": shell.links.ungreeted,
            "links": len(shell.links.peers),
            "link_transports": {peer.name: peer.transport for peer in shell.links.peers},
            "suspects": sorted(peer.name for peer in shell.links.peers if peer.suspect),
            "watched_processes": shell.links.watched,
            "handshakes": shell.links.handshakes,
            "unmatched": shell.rendezvous.unmatched,
            "gather_launches": gathers,
            "scatter_launches": scatters,
            "lanes": sorted(shell.mover.lanes),
        }

    # --- inside --------------------------------------------------------------------------------------------------------

    async def _identity(self) -> Identity:
        """Who we are, once all pools are there."""
        await self._pools_ready.wait()
        config = self.config
        return Identity(
            config.id,
            self._incarnation,
            config.topology,
            config.tie_break,
            config.model,
            self._shell.packer.check_complete(),
            config.owns,
            self._planes.offered,
            config.staging.slot_bytes,
            math.floor(config.timeouts.heartbeat * 1000),
            math.ceil(config.timeouts.lease * 1000),
            own_process(),
            ALGORITHM if config.checksum else "",
            self._planes.devices,
            config.gpu.direct if config.gpu is not None else (),
        )

    def _check_first(self, peer: Peer, message: Offer | Expect) -> RdmaKvError | None:
        """Check a first message; say DONE to an EXPECT at once where no moves lie between that agent and us."""
        shell, config = self._shell, self.config
        own, other = (
            (message.prefill_replica, message.decode_replica)
            if config.sending
            else (message.decode_replica, message.prefill_replica)
        )
        if all(owned.replica != own for owned in config.owns):
            text = f"{peer.id} means replica {own}, of which this agent owns no rank"
            return RouteMismatchError(message.key, type(message).__name__.upper(), text)
        try:
            route = shell.route(message.key, own, shell.registry.engine(peer.id.engine), other)
        except ConfigError as exc:
            return exc
        if route.digest != message.digest:
            text = "both sides computed different routes (digest)"
            return RouteMismatchError(message.key, type(message).__name__.upper(), text)
        if isinstance(message, Expect) and not shell.moves(route, peer.identity.ranks):
            peer.send(Done(0, message.key, message.prefill_replica, message.decode_replica))
        return None

    def _fail_session(self, place: Place, other: ReplicaId | None, error: TransferAborted) -> bool:
        """Another participant has given up, and tells the others itself; we end our own part. False: we have none."""
        sessions = [session for session in self._shell.sessions if session.is_named(place, other)]
        for session in sessions:
            session.fail(error, tell=False)
        return bool(sessions)

    def _check_starting(self) -> None:
        if self._state != "starting":
            raise ClosedError("the agent was closed while it was starting")

    def _check_open(self) -> None:
        if self._state != "open":
            raise ClosedError("the agent is not open; use it inside `async with`")

    def _call(
        self,
        role: Role,
        key: str,
        replica: int,
        attempt: int,
        timeout_s: float | None,
        pages: Any,  # noqa: ANN401
        spans: tuple[Interval, ...],
    ) -> Call:
        """Check what `send` and `receive` have in common."""
        self._check_open()
        timeout_s = self.config.timeouts.transfer if timeout_s is None else timeout_s
        return self._checks.call(role, key, replica, attempt, timeout_s, pages, spans)
