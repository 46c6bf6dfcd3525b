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
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rdma_kv.config import MAX_TIMEOUT_S
from rdma_kv.deaths import own_process
from rdma_kv.errors import (
    ClosedError,
    ConfigError,
    LocalProtocolError,
    RdmaKvError,
    RouteMismatchError,
    TransferAborted,
)
from rdma_kv.kernels.checksum import ALGORITHM
from rdma_kv.layout import KvLayout
from rdma_kv.messages import Done, Expect, Offer
from rdma_kv.mover import Mover
from rdma_kv.packer import Packer
from rdma_kv.peer import Links, Peer, Registry
from rdma_kv.protocol.failures import Place
from rdma_kv.protocol.link import Identity
from rdma_kv.receiving import Received, Receiving
from rdma_kv.registry.static import is_loopback, parse_address
from rdma_kv.rendezvous import Rendezvous
from rdma_kv.sending import Sending
from rdma_kv.session import AgentConfig, Call, Shell, TokenRange, interval
from rdma_kv.transport.named import AUTO, TransportMaker, offer
from rdma_kv.transport.planes import Planes
from rdma_kv.types import Interval, Owned, ReplicaId, Role

logger = logging.getLogger(__name__)

_TELL_S = 1.0
"""How long a closing agent waits at most for peers to be told that its transfers have failed."""

Tokens = int | TokenRange | Mapping[str, TokenRange]


class Agent:
    """One member of the transfer service. Use with `async with`, or `start` and `close`.

    Args:
        config: who it is.
        registry: where the others are.
        transport: `auto`: the best data plane that this installation and the peer have, link by link; the name of one,
            `ucx` or `nixl`, which peers must have too; or what makes one from the agent's incarnation name.

    Raises:
        ConfigError: field `transport`: unknown, or nothing that `auto` could use is installed.

    Example:
        >>> async with Agent(config, StaticRegistry("cluster.toml")) as agent:  # doctest: +SKIP
        ...     agent.register_pool(layout, memory, replica=0, rank=0)
        ...     async with agent.send("req-1", 0, pages, to=ReplicaId("decode", 1), tokens=n) as out:
        ...         await out.push(ready=event)
        ...         out.metadata["first_token"] = token
    """

    def __init__(self, config: AgentConfig, registry: Registry, *, transport: str | TransportMaker = AUTO) -> None:
        self.config = config
        self._incarnation = os.urandom(16)
        self.name = f"{config.id}#{self._incarnation.hex()[:12]}"
        self.address: tuple[str, int] = ("", 0)
        timeouts, limits = config.timeouts, config.limits
        self._planes = Planes(self.name, offer(transport, self.name))
        packer = Packer(config.role, config.model, config.topology, config.owns)
        rendezvous = Rendezvous(config.role, self._check_first, self._fail_session, timeouts=timeouts, limits=limits)
        mover = Mover(config.role, self._planes, packer, rendezvous, staging=config.staging, timeouts=timeouts)
        links = Links(self._identity, registry, mover, timeouts=timeouts, limits=limits)
        self._shell = Shell(config, registry, packer, mover, links, rendezvous)
        self._pools_ready = asyncio.Event()
        self._state = "new"

    # --- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind the control plane. Where only one transport is offered, start it and register the staging memory there.

        Raises:
            ConfigError: the address cannot be bound, or the only transport is not installed.
            TransportError: the only transport cannot be set up.
        """
        if self._state != "new":
            raise LocalProtocolError("an agent starts once")
        self._state = "open"
        await self._shell.mover.start()
        host, port = parse_address(self.config.listen)
        self.address = await self._shell.links.start(host, port)
        if not is_loopback(host):
            logger.warning("the control stream on %s is plaintext and without authentication", self.config.listen)

    async def close(self) -> None:
        """End everything: running transfers fail on both sides, memory is settled as far as it can be. Idempotent."""
        if self._state == "closed":
            return
        self._state = "closed"
        shell = self._shell
        shell.closed = True
        for session in list(shell.sessions):
            session.fail(ClosedError("the agent is closing"))
        try:  # a data plane that cannot be closed, or a caller that waits no longer, must not leave links up
            await shell.mover.close()
        finally:
            try:
                await shell.tasks.drain(_TELL_S)
                await shell.tasks.close()
                shell.rendezvous.close()
            finally:
                await shell.links.close()
                shell.packer.close()

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
            memory: one buffer, or a list in the layout's buffer order (arrays or CPU tensors, contiguous, writable). It
                stays the engine's, and must stay mapped until the agent is closed.
            component: may be left out where the model has one.

        Raises:
            ConfigError: names the field that does not fit.
        """
        self._check_open()
        self._shell.packer.register(self._component_name(component), layout, memory, Owned(replica, rank))
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
        if to is not None and not isinstance(to, ReplicaId):
            raise ConfigError("to", f"{to!r} is not a ReplicaId(engine, index)")
        available, announced = self._ranges(tokens)
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
    ) -> Received:
        """Receive a request's KV into all ranks that this agent owns of `replica`.

        Returns when all KV and the metadata are in. After an error or a cancellation no page is written any more.

        Args:
            pages: the request's page table, by position as in `send`; pages of a prefix that is here already are part of
                it.
            tokens: positions wanted; `(start, n)` leaves a prefix of `start` tokens alone.
            source: the prefill replica, or several of which the first that offers the key is taken; None for any.

        Raises:
            ConfigError: a value that cannot be right.
            LocalProtocolError: not a decode agent, or this key is being received from there already.
            PeerError, TransferError, TransportError: it failed; all participants have been told.
        """
        wanted, _ = self._ranges(tokens)
        call = self._call(Role.DECODE, key, replica, attempt, timeout_s, pages, wanted)
        sources = (source,) if isinstance(source, ReplicaId) else tuple(source or ())
        if not all(isinstance(each, ReplicaId) for each in sources):
            raise ConfigError("source", f"{source!r} is not a ReplicaId(engine, index), nor a list of such")
        return await Receiving(self._shell, call, sources, wanted).run()

    def stats(self) -> dict[str, Any]:
        """Counts for tests and operators: slots, transfers, tasks, transports, links, launches."""
        shell = self._shell
        gathers, scatters = shell.packer.launches
        return {
            **shell.mover.stats(),
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
        config = self.config
        if config.role is not role:
            verb = "send" if role is Role.PREFILL else "receive"
            raise LocalProtocolError(f"{verb} belongs to a {role.value} agent; this one is {config.role.value}")
        if not isinstance(key, str) or not 1 <= len(key) <= 512 or not _is_unicode(key):
            raise ConfigError("key", "must be a string of 1 to 512 Unicode characters")
        if not isinstance(attempt, int) or not 0 <= attempt < 1 << 31:
            raise ConfigError("attempt", f"{attempt!r} is not a small non-negative number")
        if not isinstance(replica, int):
            raise ConfigError("replica", f"{replica!r} is not a whole number")
        config.topology.check_replica(replica)
        if all(owned.replica != replica for owned in config.owns):
            raise ConfigError("replica", f"{replica} has no rank on this agent, which owns {list(config.ranks)}")
        timeout_s = config.timeouts.transfer if timeout_s is None else timeout_s
        if not 0 < timeout_s <= MAX_TIMEOUT_S:
            raise ConfigError("timeout_s", f"{timeout_s} s; more than 0 and at most {MAX_TIMEOUT_S:.0f} s are possible")
        self._shell.packer.check_complete()
        tables = self._shell.packer.page_tables(replica, pages, [span.end for span in spans])
        return Call(key, replica, attempt, tables, timeout_s)

    def _component_name(self, name: str | None) -> str:
        components = self.config.model.components
        if name is None:
            if len(components) > 1:
                raise ConfigError("component", f"the model has {[c.name for c in components]}; say which")
            return components[0].name
        return name

    def _ranges(self, tokens: Tokens) -> tuple[tuple[Interval, ...], Interval]:
        """Range per component, in what it counts (a mapping says that itself); and all of them in tokens."""
        components = self.config.model.components
        if not isinstance(tokens, Mapping):
            span = interval("tokens", (0, tokens) if isinstance(tokens, int) else tokens)
            return tuple(component.units(span, last=True) for component in components), span
        if unknown := set(tokens) - {component.name for component in components}:
            raise ConfigError("tokens", f"names {sorted(unknown)}, which the model does not have")
        default = (0, 0)
        ranges = tuple(interval("tokens", tokens.get(component.name, default)) for component in components)
        spans = [
            Interval(span.start * (part.opaque_page_tokens or 1), span.end * (part.opaque_page_tokens or 1))
            for span, part in zip(ranges, components, strict=True)
            if part.has_tokens and span.size
        ]
        return ranges, Interval(min((s.start for s in spans), default=0), max((s.end for s in spans), default=0))


def _is_unicode(text: str) -> bool:
    """Whether the text can be written as UTF-8: a lone surrogate cannot."""
    return not any("\ud800" <= character <= "\udfff" for character in text)
