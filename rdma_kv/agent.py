"""The public API: one agent, its pools, `send` and `receive`.

An agent owns some ranks of one engine and is a packer and a mover in one process. `send` covers all ranks that it owns of
a replica, and all decode agents that they have moves to; `receive` the other way round. Everything runs on one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import msgspec

from rdma_kv.config import Limits, StagingConfig, Timeouts
from rdma_kv.errors import (
    ClosedError,
    ConfigError,
    LocalProtocolError,
    PeerLostError,
    RdmaKvError,
    TransferAborted,
    TransferTimeout,
)
from rdma_kv.layout import KvLayout
from rdma_kv.messages import MAX_FRAME_BYTES, Expect
from rdma_kv.mover import Entry, Mover, StageTimes
from rdma_kv.packer import Packer
from rdma_kv.peer import Links, Peer, Registry
from rdma_kv.planner import LinkPlan, PageTables, Route, Tiling
from rdma_kv.protocol.incoming import IncomingTransfer
from rdma_kv.protocol.link import Identity
from rdma_kv.protocol.outgoing import OutgoingTransfer
from rdma_kv.registry.static import AgentRecord, EngineRecord, parse_address
from rdma_kv.topology import ModelSpec, TieBreak, Topology
from rdma_kv.transport.base import Transport
from rdma_kv.transport.nixl import NixlTransport
from rdma_kv.types import AgentId, Interval, Owned, ReplicaId, Role

logger = logging.getLogger(__name__)

TokenRange = tuple[int, int]
TransportFactory = Callable[[str], Transport]

_MAX_METADATA_BYTES = MAX_FRAME_BYTES // 2


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Who an agent is and what it holds.

    Attributes:
        engine, role, topology, tie_break: as the registry lists them for this engine.
        ranks: the ranks that this agent owns; its identity is the lowest.
        model: components and fingerprint, the same on both sides.
        listen: host:port of the control plane; port 0 takes a free one (see `Agent.address`).
        staging: slots of registered memory through which all KV passes.
    """

    engine: str
    role: Role
    ranks: tuple[int, ...]
    topology: Topology
    model: ModelSpec
    cluster: str = "default"
    tie_break: TieBreak = TieBreak.REPLICA
    listen: str = "127.0.0.1:0"
    staging: StagingConfig = StagingConfig()
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()

    def __post_init__(self) -> None:
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise ConfigError("ranks", f"{self.ranks}: at least one, each once")
        for rank in self.ranks:
            self.topology.check_rank(rank)
        self.model.check_topology(self.topology)
        parse_address(self.listen)

    @property
    def id(self) -> AgentId:
        return AgentId(self.cluster, self.engine, self.role, min(self.ranks))

    @property
    def owns(self) -> tuple[Owned, ...]:
        return self.topology.owned(sorted(self.ranks))


@dataclass(frozen=True, slots=True)
class Received:
    """What a receive brought.

    Attributes:
        tokens: range per component name that was moved; what was asked beyond it was not to be had.
        metadata: what the sender attached, from its lowest sending rank.
        received_bytes: payload.
        seconds: from the call to the end.
        times: seconds per stage on this side, summed over boxes.
    """

    tokens: dict[str, TokenRange]
    metadata: dict[str, Any]
    received_bytes: int
    seconds: float
    times: StageTimes


class Agent:
    """One member of the transfer service. Use with `async with`, or `start` and `close`.

    Args:
        config: who it is.
        registry: where the others are.
        transport: makes the data plane from the agent's incarnation name; NIXL by default.

    Example:
        >>> async with Agent(config, StaticRegistry("cluster.toml")) as agent:  # doctest: +SKIP
        ...     agent.register_pool(layout, memory, replica=0, rank=0)
        ...     async with agent.send("req-1", 0, pages, to=ReplicaId("decode", 1), tokens=(0, n)) as out:
        ...         await out.push(ready=event)
        ...         out.metadata["first_token"] = token
    """

    def __init__(self, config: AgentConfig, registry: Registry, *, transport: TransportFactory = NixlTransport) -> None:
        self.config = config
        self._registry = registry
        self._incarnation = os.urandom(16)
        self.name = f"{config.id}#{self._incarnation.hex()[:12]}"
        self._packer = Packer(config.role, config.model, config.topology, config.owns)
        self._transport = transport(self.name)
        self._mover = Mover(
            config.role,
            self._transport,
            self._packer,
            self._has_moves,
            staging=config.staging,
            timeouts=config.timeouts,
            limits=config.limits,
        )
        self._links = Links(self._identity, registry, self._mover, timeouts=config.timeouts, limits=config.limits)
        self._pools_ready = asyncio.Event()
        self._live: set[tuple[str, ReplicaId, ReplicaId]] = set()
        self._state = "new"
        self.address: tuple[str, int] = ("", 0)

    # --- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind the control plane and register the staging memory.

        Raises:
            ConfigError: the address cannot be bound.
            TransportError: the data plane cannot be set up.
        """
        if self._state != "new":
            raise LocalProtocolError("an agent starts once")
        self._state = "open"
        await self._mover.start()
        host, port = parse_address(self.config.listen)
        self.address = await self._links.start(host, port)

    async def close(self) -> None:
        """End everything: running transfers fail on both sides, memory is settled as far as it can be. Idempotent."""
        if self._state == "closed":
            return
        self._state = "closed"
        await self._mover.close()
        await self._links.close()
        self._packer.close()

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
        self._packer.register(self._component_name(component), layout, memory, Owned(replica, rank))
        try:
            self._packer.check_complete()
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
        to: ReplicaId,
        tokens: int | TokenRange | Mapping[str, TokenRange],
        attempt: int = 0,
        timeout_s: float | None = None,
    ) -> Sending:
        """Send a request's KV, from all ranks that this agent owns of `replica`, to a decode replica.

        Use the result with `async with`; leaving the block normally says that all is pushed, and waits until the decode
        side has everything. Pages must not change from their `push` to the end of the block.

        Args:
            key: the request's name, the same on both sides.
            pages: the request's page table; `pages[i]` holds tokens `[i * page_size, (i + 1) * page_size)`.
            to: the decode replica.
            tokens: positions that will be pushed: a count n for `[0, n)`, a range, or a range per component.
            timeout_s: for the whole transfer.

        Raises:
            ConfigError: a value that cannot be right.
            LocalProtocolError: not a prefill agent, or this key is being sent there already.
        """
        self._check_open()
        self._check_role(Role.PREFILL, "send")
        available = self._ranges(tokens)
        tables = self._packer.page_tables(replica, pages, [span.end for span in available])
        timeout_s = self._timeout(timeout_s)
        return Sending(self, _Session(self, key, replica, to, attempt, tables, timeout_s), available)

    async def receive(
        self,
        key: str,
        replica: int,
        pages: Any,  # noqa: ANN401 - page numbers, or a mapping from component to page numbers
        *,
        source: ReplicaId,
        tokens: int | TokenRange | Mapping[str, TokenRange],
        attempt: int = 0,
        timeout_s: float | None = None,
    ) -> Received:
        """Receive a request's KV into all ranks that this agent owns of `replica`.

        Returns when all KV and the metadata are in. After an error or a cancellation no page is written any more.

        Args:
            pages: the request's page table, by position as in `send`; pages of a prefix that is here already are part of it.
            tokens: positions wanted; `(start, n)` leaves a prefix of `start` tokens alone.
            source: the prefill replica.

        Raises:
            ConfigError: a value that cannot be right.
            LocalProtocolError: not a decode agent, or this key is being received from there already.
            PeerError, TransferError, TransportError: it failed; all participants have been told.
        """
        self._check_open()
        self._check_role(Role.DECODE, "receive")
        wanted = self._ranges(tokens)
        tables = self._packer.page_tables(replica, pages, [span.end for span in wanted])
        session = _Session(self, key, replica, source, attempt, tables, self._timeout(timeout_s))
        return await _receive(session, wanted)

    def stats(self) -> dict[str, Any]:
        """Counts for tests and operators: slots, transfers, tasks, links, launches."""
        gathers, scatters = self._packer.launches
        return {
            **self._mover.stats(),
            "links": len(self._links.peers),
            "handshakes": self._links.handshakes,
            "gather_launches": gathers,
            "scatter_launches": scatters,
            "lanes": sorted(self._mover.lanes),
        }

    # --- for the sessions ----------------------------------------------------------------------------------------------

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
            self._packer.check_complete(),
            config.owns,
            self._transport.backend,
            config.staging.slot_bytes,
        )

    def _route(self, key: str, own_replica: int, other: EngineRecord, other_replica: int) -> Route:
        """The route between one of our replicas and one of another engine."""
        config = self.config
        if config.role is Role.PREFILL:
            pair = (config.topology, other.topology, own_replica, other_replica)
            tie_break = config.tie_break
        else:
            pair = (other.topology, config.topology, other_replica, own_replica)
            tie_break = other.tie_break
        return Route(config.model, *pair, tie_break, key if tie_break is TieBreak.KEY else "")

    def _link_plan(self, route: Route, peer: Identity, totals: tuple[int, ...]) -> LinkPlan:
        """Our part of a route with one peer."""
        own_ranks, peer_ranks = frozenset(self.config.ranks), peer.ranks
        sending = self.config.role is Role.PREFILL
        own_pages = self._packer.check_complete()
        plan = LinkPlan(
            route,
            _moves_between(route, own_ranks if sending else peer_ranks, peer_ranks if sending else own_ranks),
            own_pages if sending else peer.page_sizes,
            peer.page_sizes if sending else own_pages,
            min(self.config.staging.slot_bytes, peer.slot_bytes),
            totals,
        )
        plan.check_chunk()
        return plan

    def _has_moves(self, peer: Peer, message: Expect) -> bool:
        """Whether an EXPECT finds moves from our ranks to the peer's."""
        engine = self._registry.engine(peer.id.engine)
        try:
            route = self._route(message.key, message.prefill_replica, engine, message.decode_replica)
        except ConfigError as exc:
            raise PeerLostError(str(peer.id), f"EXPECT names a replica that does not exist: {exc}") from exc
        return bool(_moves_between(route, frozenset(self.config.ranks), peer.identity.ranks))

    # --- checks --------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._state != "open":
            raise ClosedError("the agent is not open; use it inside `async with`")

    def _check_role(self, role: Role, verb: str) -> None:
        if self.config.role is not role:
            raise LocalProtocolError(f"{verb} belongs to a {role.value} agent; this one is {self.config.role.value}")
        if not self._pools_ready.is_set():
            self._packer.check_complete()

    def _component_name(self, name: str | None) -> str:
        components = self.config.model.components
        if name is None:
            if len(components) > 1:
                raise ConfigError("component", f"the model has {[c.name for c in components]}; say which")
            return components[0].name
        return name

    def _timeout(self, timeout_s: float | None) -> float:
        timeout_s = self.config.timeouts.transfer if timeout_s is None else timeout_s
        if timeout_s <= 0:
            raise ConfigError("timeout_s", f"{timeout_s} s is not positive")
        return timeout_s

    def _ranges(self, tokens: int | TokenRange | Mapping[str, TokenRange]) -> tuple[Interval, ...]:
        """Token range per component; one entry for a component without a token axis."""
        components = self.config.model.components
        if isinstance(tokens, Mapping):
            unknown = set(tokens) - {component.name for component in components}
            if unknown:
                raise ConfigError("tokens", f"names components {sorted(unknown)} that the model does not have")
            return tuple(_interval("tokens", tokens.get(component.name, (0, 0))) for component in components)
        span = _interval("tokens", (0, tokens) if isinstance(tokens, int) else tokens)
        return tuple(span if component.has_tokens else Interval(0, 1) for component in components)


def _moves_between(route: Route, src_ranks: frozenset[int], dst_ranks: frozenset[int]) -> tuple[int, ...]:
    return tuple(number for number, move in enumerate(route.moves) if move.src in src_ranks and move.dst in dst_ranks)


def _interval(field_name: str, span: TokenRange) -> Interval:
    try:
        start, end = span
        if not isinstance(start, int) or not isinstance(end, int):
            raise TypeError
    except (TypeError, ValueError) as exc:
        raise ConfigError(field_name, f"{span!r} is not a (start, end) pair of whole numbers") from exc
    if not 0 <= start <= end < 1 << 31:
        raise ConfigError(field_name, f"({start}, {end}) must satisfy 0 <= start <= end < 2**31")
    return Interval(start, end)


class _Session:
    """One key between two replicas, over all links that have moves: opened, failed and ended together."""

    def __init__(
        self,
        agent: Agent,
        key: str,
        replica: int,
        other: ReplicaId,
        attempt: int,
        tables: PageTables,
        timeout_s: float,
    ) -> None:
        if not isinstance(key, str) or not 1 <= len(key) <= 512:
            raise ConfigError("key", "must be a string of 1 to 512 characters")
        if not 0 <= attempt < 1 << 31:
            raise ConfigError("attempt", f"{attempt} is not a small non-negative number")
        self.agent = agent
        self.key = key
        self.attempt = attempt
        self.tables = tables
        agent.config.topology.check_replica(replica)
        self.engine = agent._registry.engine(other.engine)
        if self.engine.role is agent.config.role:
            raise ConfigError("engine", f"{other.engine!r} is a {self.engine.role.value} engine, as we are")
        self.engine.topology.check_replica(other.index)
        self.route = agent._route(key, replica, self.engine, other.index)
        own = ReplicaId(agent.config.engine, replica)
        self._live_as = (key, own, other)
        if self._live_as in agent._live:
            raise LocalProtocolError(f"{key!r} is live between {own} and {other} already")
        self.begin = asyncio.get_running_loop().time()
        self.deadline = self.begin + timeout_s
        self.entries: dict[AgentId, Entry] = {}
        self._legs: dict[AgentId, asyncio.Task[None]] = {}
        self._error: RdmaKvError | None = None

    @property
    def error(self) -> RdmaKvError | None:
        """The first failure of any link."""
        return self._error

    def records(self) -> tuple[list[AgentRecord], list[AgentRecord]]:
        """The other side's agents of the replica: those with moves to or from us, and the idle rest."""
        agent, route = self.agent, self.route
        mine = frozenset(agent.config.ranks)
        sending = agent.config.role is Role.PREFILL
        other_replica = route.decode_replica if sending else route.prefill_replica
        busy: list[AgentRecord] = []
        idle: list[AgentRecord] = []
        for record in self.engine.agents_of(other_replica):
            theirs = frozenset(record.ranks)
            found = _moves_between(route, mine if sending else theirs, theirs if sending else mine)
            (busy if found else idle).append(record)
        return busy, idle

    def open(self, records: list[AgentRecord], work: Callable[[Peer], Entry]) -> None:
        """Start one leg per record: link, transfer, outcome."""
        self.agent._live.add(self._live_as)
        for record in records:
            self._legs[record.id] = asyncio.create_task(self._leg(record, work), name=f"leg {self.key} {record.id}")

    async def _leg(self, record: AgentRecord, work: Callable[[Peer], Entry]) -> None:
        try:
            async with asyncio.timeout_at(self.deadline):
                peer = await self.agent._links.peer(record)
            if self._error is not None:
                return
            entry = self.entries[record.id] = work(peer)
            error = await asyncio.shield(entry.outcome)
        except TimeoutError:
            error = TransferTimeout(self.key, "CONNECTING", f"{record.id} could not be reached in time")
        except RdmaKvError as exc:
            error = exc
        if error is not None:
            self.fail(error)

    def fail(self, error: RdmaKvError) -> None:
        """The first failure fails all links of the session."""
        if self._error is not None:
            return
        self._error = error
        for entry in self.entries.values():
            self.agent._mover.fail(entry, error)
        for record_id, leg in self._legs.items():
            if record_id not in self.entries and leg is not asyncio.current_task():
                leg.cancel()

    async def outcome(self) -> None:
        """Wait until every leg has ended; raise the first failure. Cancelling fails the session, waits, and re-raises."""
        waiting = asyncio.gather(*self._legs.values(), return_exceptions=True)
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self.fail(TransferAborted(self.key, "cancelled", "the caller cancelled"))
            await _finish_despite_cancel(waiting)
            raise
        finally:
            self.agent._live.discard(self._live_as)
        if self._error is not None:
            raise self._error


async def _finish_despite_cancel(waiting: asyncio.Future[Any]) -> None:
    """Wait for `waiting` though the task is being cancelled: its pages are in use until then."""
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError:
            continue


@dataclass
class _Push:
    component: int
    layers: Interval
    tokens: Interval


class Sending:
    """A request on its way out; made by `Agent.send`, used with `async with`.

    Attributes:
        metadata: goes to the decode side with the request (first token, lengths, ...): MessagePack values by name.
    """

    def __init__(self, agent: Agent, session: _Session, available: tuple[Interval, ...]) -> None:
        self.metadata: dict[str, Any] = {}
        self._agent = agent
        self._session = session
        self._available = available
        components = agent.config.model.components
        self._pushed = [
            Tiling(Interval(0, len(component.layers)), span)
            for component, span in zip(components, available, strict=True)
        ]
        self._pushes: list[_Push] = []
        self._state = "new"
        self._busy = False

    @property
    def idle(self) -> bool:
        """Nothing of this agent goes there: there is no move from its ranks."""
        return not self._busy

    @property
    def times(self) -> StageTimes:
        """Seconds per stage on this side, summed over boxes."""
        return _sum_times(self._session)

    async def __aenter__(self) -> Self:
        if self._state != "new":
            raise LocalProtocolError("a sending is used once")
        self._state = "open"
        busy, _ = self._session.records()
        self._busy = bool(busy)
        self._session.open(busy, self._offer)
        return self

    async def push(
        self,
        tokens: TokenRange | None = None,
        layers: tuple[int, int] | None = None,
        *,
        component: str | None = None,
        ready: asyncio.Event | Awaitable[Any] | None = None,
    ) -> None:
        """These tokens of these layers are final in the source pages (once `ready` is set); they may go.

        Args:
            tokens: positions; all that `send` announced by default. A component without tokens goes with the last of them.
            layers: global layer numbers; all by default.
            component: one component by name; all by default.
            ready: awaited first.

        Raises:
            ConfigError: outside what `send` announced.
            LocalProtocolError: pushed already, or the block has ended.
            RdmaKvError: the transfer has failed meanwhile.
        """
        if ready is not None:
            await (ready.wait() if isinstance(ready, asyncio.Event) else ready)
        if self._state != "open":
            raise LocalProtocolError("push outside of the `async with` block")
        if self._session.error is not None:
            raise self._session.error
        pushes = self._split(tokens, layers, component)
        for push in pushes:
            if not self._pushed[push.component].add(push.layers, push.tokens):
                raise LocalProtocolError(f"tokens {push.tokens} of layers {push.layers} were pushed before")
            self._pushes.append(push)
            for entry in self._session.entries.values():
                self._agent._mover.push(entry, push.component, push.layers, push.tokens)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._state = "failed"
            text = f"the sender's block ended with {type(error).__name__}"
            self._session.fail(TransferAborted(self._session.key, "push", text))
            try:
                await self._session.outcome()
            except RdmaKvError:
                logger.debug("transfer %s failed: %s", self._session.key, self._session.error)
            return
        self._state = "finished"
        try:
            size = len(msgspec.msgpack.encode(self.metadata))
            if size > _MAX_METADATA_BYTES:
                raise ConfigError("metadata", f"{size} bytes; at most {_MAX_METADATA_BYTES}")
        except (TypeError, ConfigError) as exc:
            bad = (
                exc
                if isinstance(exc, ConfigError)
                else ConfigError("metadata", f"cannot be sent as MessagePack: {exc}")
            )
            self._session.fail(bad)
        for entry in self._session.entries.values():
            self._agent._mover.finish(entry, self.metadata)
        await self._session.outcome()

    # --- inside --------------------------------------------------------------------------------------------------------

    def _split(self, tokens: TokenRange | None, layers: tuple[int, int] | None, component: str | None) -> list[_Push]:
        """What a push means, per component. Components that have none of the layers are left out."""
        model = self._agent.config.model
        names = [c.name for c in model.components]
        if component is not None:
            model.component(component)
        last = max((s.end for s, c in zip(self._available, model.components, strict=True) if c.has_tokens), default=0)
        pushes = []
        for index, part in enumerate(model.components):
            if component not in {None, names[index]}:
                continue
            span = self._available[index]
            if tokens is not None and part.has_tokens:
                asked = _interval("tokens", tokens)
                if not span.contains(asked):
                    raise ConfigError("tokens", f"{asked} is outside {span}, which send() announced for {part.name!r}")
                span = asked
            elif tokens is not None and component is None and tokens[1] < last:
                continue
            which = Interval(0, len(part.layers))
            if layers is not None:
                which = part.layers_within(_interval("layers", layers))
            if span.size and which.size:
                pushes.append(_Push(index, which, span))
        return pushes

    def _offer(self, peer: Peer) -> Entry:
        """Open the transfer on one link and hand it what was pushed so far."""
        session, agent = self._session, self._agent
        totals = tuple(span.end for span in self._available)
        plan = agent._link_plan(session.route, peer.identity, totals)

        def make(number: int) -> OutgoingTransfer:
            return OutgoingTransfer(
                number,
                session.key,
                session.attempt,
                plan,
                self._available,
                peer=str(peer.id),
                deadline=session.deadline,
                quiesce_s=agent.config.timeouts.quiesce,
            )

        entry = agent._mover.open_outgoing(peer, make, session.tables)
        for push in self._pushes:
            agent._mover.push(entry, push.component, push.layers, push.tokens)
        if self._state == "finished":
            agent._mover.finish(entry, self.metadata)
        return entry


async def _receive(session: _Session, wanted: tuple[Interval, ...]) -> Received:
    agent = session.agent
    busy, idle = session.records()

    def expect(peer: Peer) -> None:
        route = session.route
        peer.send(
            Expect(
                session.key,
                session.attempt,
                route.prefill_replica,
                route.decode_replica,
                route.digest,
                [(span.start, span.end) for span in wanted],
            )
        )

    def open_leg(peer: Peer) -> Entry:
        plan = agent._link_plan(session.route, peer.identity, tuple(span.end for span in wanted))
        machine = IncomingTransfer(
            session.key,
            session.attempt,
            plan,
            wanted,
            peer=str(peer.id),
            deadline=session.deadline,
            quiesce_s=agent.config.timeouts.quiesce,
        )
        entry = agent._mover.open_incoming(peer, machine, session.tables)
        expect(peer)
        return entry

    session.open(busy, open_leg)
    telling = [asyncio.create_task(_tell_idle(agent, record, expect)) for record in idle]
    try:
        await session.outcome()
    finally:
        for task in telling:
            task.cancel()
        await asyncio.gather(*telling, return_exceptions=True)
    return _received(session)


async def _tell_idle(agent: Agent, record: AgentRecord, expect: Callable[[Peer], None]) -> None:
    """An agent of the prefill replica that has nothing for us learns that from our EXPECT; we do not wait for it."""
    try:
        expect(await agent._links.peer(record))
    except RdmaKvError as exc:
        logger.info("cannot tell idle agent %s: %s", record.id, exc)


def _received(session: _Session) -> Received:
    names = [component.name for component in session.agent.config.model.components]
    machines = [entry.machine for entry in session.entries.values()]
    incoming = [machine for machine in machines if isinstance(machine, IncomingTransfer)]
    incoming.sort(key=lambda machine: min(machine.plan.move(number).src for number in machine.plan.moves))
    ranges = incoming[0].ranges if incoming else None
    return Received(
        tokens={name: (span.start, span.end) for name, span in zip(names, ranges or (), strict=False)},
        metadata=incoming[0].metadata if incoming else {},
        received_bytes=sum(machine.received_bytes for machine in incoming),
        seconds=asyncio.get_running_loop().time() - session.begin,
        times=_sum_times(session),
    )


def _sum_times(session: _Session) -> StageTimes:
    total = StageTimes()
    for entry in session.entries.values():
        total.gather += entry.times.gather
        total.write += entry.times.write
        total.scatter += entry.times.scatter
    return total
