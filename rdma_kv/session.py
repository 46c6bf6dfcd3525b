"""One key between two replicas, over all links that it needs: what sending and receiving have in common.

A session finds its counterpart (it may be named, or the first that offers or expects the key), opens one transfer per
peer agent that has moves to or from this agent, and ends them together: the first failure fails all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, cast

from rdma_kv.config import GpuConfig, Limits, StagingConfig, Timeouts
from rdma_kv.entry import Entry, StageTimes
from rdma_kv.errors import ClosedError, ConfigError, LocalProtocolError, RdmaKvError, TransferAborted, TransferTimeout
from rdma_kv.links import Links
from rdma_kv.messages import Abort, TransferName
from rdma_kv.mover import Mover
from rdma_kv.packer import Packer
from rdma_kv.peer import Peer
from rdma_kv.planner import LinkPlan, PageTables, Route
from rdma_kv.protocol.actions import abort_by_name
from rdma_kv.protocol.failures import Place
from rdma_kv.protocol.link import Identity
from rdma_kv.protocol.outgoing import OutgoingTransfer
from rdma_kv.registry.base import Registry
from rdma_kv.registry.static import AgentRecord, EngineRecord, is_loopback, parse_address
from rdma_kv.rendezvous import Rendezvous
from rdma_kv.tasks import Tasks
from rdma_kv.topology import ModelSpec, TieBreak, Topology
from rdma_kv.types import AgentId, Interval, Owned, ReplicaId, Role

logger = logging.getLogger(__name__)

TokenRange = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Who an agent is and what it holds.

    Attributes:
        engine, role, topology, tie_break: as the registry lists them for this engine.
        ranks: the ranks that this agent owns; its identity is the lowest.
        model: components and fingerprint, the same on both sides.
        listen: host:port of the control plane; port 0 takes a free one (see `Agent.address`).
        allow_plaintext: the control stream is not encrypted; listening off loopback needs this to be True.
        staging: slots of registered memory through which all KV passes.
        checksum: every chunk carries one, and is verified before it reaches a page. All agents that meet must agree.
        gpu: where the pools lie; None is host memory. Slots of 32 MiB or more suit a GPU.
    """

    engine: str
    role: Role
    ranks: tuple[int, ...]
    topology: Topology
    model: ModelSpec
    cluster: str = "default"
    tie_break: TieBreak = TieBreak.REPLICA
    listen: str = "127.0.0.1:0"
    allow_plaintext: bool = False
    staging: StagingConfig = StagingConfig()
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    checksum: bool = False
    gpu: GpuConfig | None = None

    def __post_init__(self) -> None:
        for name in ("engine", "cluster"):
            if not isinstance(value := getattr(self, name), str) or not 1 <= len(value) <= 256:
                raise ConfigError(name, "must be a name of 1 to 256 characters")
        if not isinstance(self.role, Role):
            raise ConfigError("role", f"{self.role!r}; use Role.PREFILL or Role.DECODE")
        if not self.ranks or len(set(self.ranks)) != len(self.ranks):
            raise ConfigError("ranks", f"{self.ranks}: at least one, each once")
        for rank in self.ranks:
            self.topology.check_rank(rank)
        self.model.check_topology(self.topology)
        try:
            host, _ = parse_address(self.listen)
        except ConfigError as exc:
            raise ConfigError("listen", exc.problem) from exc
        if not is_loopback(host) and not self.allow_plaintext:
            text = (
                f"{host} is off loopback, and the control stream is plaintext; set allow_plaintext on a trusted network"
            )
            raise ConfigError("listen", text)

    @property
    def id(self) -> AgentId:
        return AgentId(self.cluster, self.engine, self.role, min(self.ranks))

    @property
    def owns(self) -> tuple[Owned, ...]:
        return self.topology.owned(sorted(self.ranks))

    @property
    def sending(self) -> bool:
        return self.role is Role.PREFILL


@dataclass
class Shell:
    """The parts of one agent that its sessions share.

    Attributes:
        sessions: those under way.
        closed: no session starts any more.
    """

    config: AgentConfig
    registry: Registry
    packer: Packer
    mover: Mover
    links: Links
    rendezvous: Rendezvous
    sessions: set[Session] = field(default_factory=set)
    closed: bool = False
    tasks: Tasks = field(default_factory=Tasks)

    def route(self, key: str, own_replica: int, other: EngineRecord, other_replica: int) -> Route:
        """The route between one of our replicas and one of another engine."""
        config = self.config
        if config.sending:
            pair = (config.topology, other.topology, own_replica, other_replica)
            tie_break = config.tie_break
        else:
            pair = (other.topology, config.topology, other_replica, own_replica)
            tie_break = other.tie_break
        return _route(config.model, *pair, tie_break, key if tie_break is TieBreak.KEY else "")

    def moves(self, route: Route, peer_ranks: Iterable[int]) -> tuple[int, ...]:
        """Positions of the route's moves between our ranks and a peer's."""
        own, theirs = frozenset(self.config.ranks), frozenset(peer_ranks)
        src, dst = (own, theirs) if self.config.sending else (theirs, own)
        return tuple(number for number, move in enumerate(route.moves) if move.src in src and move.dst in dst)

    def busy_agents(self, route: Route, engine: EngineRecord) -> list[AgentRecord]:
        """The agents of the other side with which the route has moves of our ranks."""
        own = frozenset(self.config.ranks)
        if self.config.sending:
            ranks = {move.dst for move in route.moves if move.src in own}
        else:
            ranks = {move.src for move in route.moves if move.dst in own}
        return [record for record in engine.agents if not ranks.isdisjoint(record.ranks)]

    def participants(self, route: Route, engine: EngineRecord) -> list[AgentRecord]:
        """All other agents that a failure on a route concerns: those that send or receive something, of both engines.

        And the idle ones of the prefill replica: their `send(to=None)` may wait for an EXPECT that will not come now. Idle
        decode agents wait for nothing.

        Args:
            engine: the other side's.
        """
        src, dst = {move.src for move in route.moves}, {move.dst for move in route.moves}
        if route.moves:
            src.update(route.prefill.replica_ranks(route.prefill_replica))
        own, theirs = (src, dst) if self.config.sending else (dst, src)
        found = [agent for agent in engine.agents if not theirs.isdisjoint(agent.ranks)]
        return found + [agent for agent in self.siblings() if not own.isdisjoint(agent.ranks)]

    def siblings(self) -> list[AgentRecord]:
        """The other agents of our own engine; none where the registry does not list it (any more)."""
        try:
            agents = self.registry.engine(self.config.engine).agents
        except ConfigError:
            return []
        return [agent for agent in agents if agent.id != self.config.id]

    def link_plan(self, route: Route, peer: Identity, totals: tuple[int, ...]) -> LinkPlan:
        """Our part of a route with one peer.

        Raises:
            ConfigError: the smaller of both sides' slots does not hold one token of one layer.
        """
        own_pages = self.packer.check_complete()
        prefill_pages, decode_pages = (
            (own_pages, peer.page_sizes) if self.config.sending else (peer.page_sizes, own_pages)
        )
        chunk_bytes = min(self.config.staging.slot_bytes, peer.slot_bytes)
        plan = LinkPlan(route, self.moves(route, peer.ranks), prefill_pages, decode_pages, chunk_bytes, totals)
        plan.check_chunk()
        return plan


_route = lru_cache(maxsize=128)(Route)
"""Routes are the same for every request between two replicas, unless the key breaks ties."""


def interval(name: str, span: TokenRange) -> Interval:
    """A caller's (start, end) pair.

    Raises:
        ConfigError: `name` is not two whole numbers with 0 <= start <= end.
    """
    try:
        start, end = span
    except (TypeError, ValueError) as exc:
        raise ConfigError(name, f"{span!r} is not a (start, end) pair") from exc
    if not isinstance(start, int) or not isinstance(end, int) or not 0 <= start <= end < 1 << 31:
        raise ConfigError(name, f"({start!r}, {end!r}) must be whole numbers with 0 <= start <= end < 2**31")
    return Interval(start, end)


class CudaEvent(Protocol):
    """What is needed of a `torch.cuda.Event` that was recorded."""

    def query(self) -> bool: ...


def is_cuda_event(value: object) -> bool:
    """Whether it is a `torch.cuda.Event`, or works as one: this process need not have torch."""
    return all(callable(getattr(value, name, None)) for name in ("record", "query", "wait"))


def check_event(name: str, value: object, *, config: AgentConfig) -> None:
    """See that a caller's CUDA event can be waited for.

    Raises:
        ConfigError: `name` is no CUDA event, or the pools are not on a GPU.
    """
    if not is_cuda_event(value):
        raise ConfigError(name, f"{value!r} is no CUDA event")
    if config.gpu is None:
        raise ConfigError(name, "is a CUDA event, and the pools are in host memory; set AgentConfig.gpu")
    if getattr(value, "cuda_event", 1) == 0:
        raise ConfigError(name, "was never recorded; record it behind the kernels that fill the pages")


async def until_ready(
    ready: asyncio.Event | Awaitable[Any] | CudaEvent | None, *, config: AgentConfig
) -> CudaEvent | None:
    """Await what a push waits for. A CUDA event is not awaited but returned: the GPU waits for it.

    Raises:
        ConfigError: `ready` is a CUDA event that cannot be waited for.
    """
    if is_cuda_event(ready):
        check_event("ready", ready, config=config)
        return cast(CudaEvent, ready)
    if isinstance(ready, asyncio.Event):
        await ready.wait()
    elif ready is not None:
        await cast(Awaitable[Any], ready)
    return None


class Call(NamedTuple):
    """What the caller said, checked."""

    key: str
    replica: int
    attempt: int
    tables: PageTables
    timeout_s: float


class Session:
    """One call of `send` or `receive`, from its counterpart to its outcome.

    Args:
        others: the replicas that it may be with; empty for any that comes.
        find: awaits the counterpart where it is not the only one of `others`.
        work: opens the transfer with one peer.
        begin: does what comes next with a transfer that is open; where it raises, the transfer fails.
        bound: hears of the counterpart and of its agents that have moves with us.

    Attributes:
        on_failed: told of the first failure at once, as soon as somebody sets it.
    """

    def __init__(
        self,
        shell: Shell,
        call: Call,
        others: tuple[ReplicaId, ...],
        *,
        find: Callable[[], Coroutine[Any, Any, ReplicaId]],
        work: Callable[[Route, Peer], Entry],
        begin: Callable[[Route, Entry], None],
        bound: Callable[[ReplicaId, list[AgentRecord]], None] = lambda other, busy: None,
    ) -> None:
        self.shell = shell
        self.call = call
        self.others = others
        for other in others:
            self._engine_of(other)
        self.begin = asyncio.get_running_loop().time()
        self.deadline = self.begin + call.timeout_s
        self.error: RdmaKvError | None = None
        self.other: ReplicaId | None = None
        self.entries: dict[AgentId, Entry] = {}
        self._find = find
        self._work = work
        self._begin = begin
        self._place = Place(call.key, call.attempt, call.replica)
        self._bound = bound
        self._legs: dict[AgentId, asyncio.Task[None]] = {}
        self._main: asyncio.Task[None] | None = None
        self.on_failed: Callable[[RdmaKvError], None] = lambda error: None
        self._check_unique()

    @property
    def times(self) -> StageTimes:
        """Seconds per stage on this side, summed over boxes."""
        total = StageTimes()
        for entry in self.entries.values():
            total.gather += entry.times.gather
            total.write += entry.times.write
            total.scatter += entry.times.scatter
        return total

    def start(self) -> None:
        """Begin in the background; `outcome` waits for the end. It fails at once where a participant has given up already."""
        if self.shell.closed:
            raise ClosedError("the agent is closed")
        self._check_unique()
        self.error = self.shell.rendezvous.begin(self._place, self.others)
        self.shell.sessions.add(self)
        self._main = asyncio.create_task(self._run(), name=f"session {self.call.key}")

    def is_named(self, place: Place, other: ReplicaId | None) -> bool:
        """Whether this is the session that a participant speaks of.

        Args:
            other: the counterpart that the participant's own call is with. None where it has none: then those sessions are
                meant that left theirs open too, whether they have found it or not.
        """
        if place != self._place:
            return False
        if other is None:
            return not self.others
        return self.other == other if self.other is not None else not self.others or other in self.others

    def fail(self, error: RdmaKvError, *, tell: bool = True) -> None:
        """The first failure fails all links of the session.

        Args:
            tell: let all participants know, opening links where needed. Otherwise, where one of them has told all, only
                those with whom our own transfer was still to come.
        """
        if self.error is not None or self._complete or (self._main is not None and self._main.done()):
            return
        self.error = error
        self.on_failed(error)
        open_yet = {record_id for record_id, entry in self.entries.items() if not entry.machine.succeeded}
        for entry in self.entries.values():
            self.shell.mover.fail(entry, error)  # tells its peer
        self._tell_others(error, open_yet, everybody=tell)
        for record_id, leg in self._legs.items():
            if record_id not in self.entries and leg is not asyncio.current_task():
                leg.cancel()
        if not self._legs and self._main is not None and self._main is not asyncio.current_task():
            self._main.cancel()

    @property
    def _complete(self) -> bool:
        """Every transfer has succeeded, and the other side knows it: too late to fail."""
        return bool(self._legs) and all(
            record_id in self.entries and self.entries[record_id].machine.succeeded for record_id in self._legs
        )

    async def outcome(self) -> None:
        """Wait until everything has ended; raise the first failure.

        Cancelling fails the session, waits until its pages are no longer touched, and re-raises.
        """
        assert self._main is not None
        try:
            await asyncio.wait([self._main])
        except asyncio.CancelledError:
            self.fail(TransferAborted(self.call.key, "cancelled", "the caller cancelled"))
            await _despite_cancelling(self._main)
            raise
        finally:
            self.shell.sessions.discard(self)
            self.shell.rendezvous.ended(self._place, self.other)
        if not self._main.cancelled() and (bug := self._main.exception()) is not None:
            raise bug
        if self.error is not None:
            raise self.error
        if any(not entry.machine.succeeded for entry in self.entries.values()):
            raise TransferAborted(self.call.key, "internal", "a transfer has ended without an outcome")

    async def _run(self) -> None:
        if self.error is not None:
            return
        try:
            async with asyncio.timeout_at(self.deadline):
                self.other = self.others[0] if len(self.others) == 1 else await self._find()
            engine = self._engine_of(self.other)
            call = self.call
            route = self.shell.route(call.key, call.replica, engine, self.other.index)
            busy = self.shell.busy_agents(route, engine)
            self._bound(self.other, busy)
            for record in busy:
                work = self._leg(record, route)
                self._legs[record.id] = asyncio.create_task(work, name=f"leg {call.key} {record.id}")
        except TimeoutError:
            who = ", ".join(map(str, self.others)) or "anybody"
            self.fail(TransferTimeout(self.call.key, "MATCHING", f"no word from {who} in time"))
        except RdmaKvError as exc:
            self.fail(exc)
        if self._legs:
            await asyncio.wait(self._legs.values())
        for leg in self._legs.values():
            if not leg.cancelled() and (bug := leg.exception()) is not None:
                raise bug

    async def _leg(self, record: AgentRecord, route: Route) -> None:
        """One peer agent: link, transfer, outcome."""
        try:
            async with asyncio.timeout_at(self.deadline):
                peer = await self.shell.links.peer(record)
            if self.error is not None:
                return
            await self._transfer(record, route, peer)
        except TimeoutError:
            self.fail(TransferTimeout(self.call.key, "CONNECTING", f"{record.id} could not be reached in time"))
        except RdmaKvError as exc:
            self.fail(exc)

    async def _transfer(self, record: AgentRecord, route: Route, peer: Peer) -> None:
        """Open the transfer with one peer and wait for its outcome: until then our pages are in use, whatever happens.

        A failure is told to all when it happens, not when the last kernel has let go of the pages.
        """
        try:
            entry = self.entries[record.id] = self._work(route, peer)
            entry.failed.add_done_callback(lambda _: self._entry_failed(entry))
            try:
                self._begin(route, entry)
            except RdmaKvError as exc:
                self.shell.mover.fail(entry, exc)
        except Exception as exc:
            if not isinstance(exc, RdmaKvError):
                self.fail(TransferAborted(self.call.key, "internal", f"a bug: {exc!r}"))
            if record.id in self.entries:
                await asyncio.shield(self.entries[record.id].outcome)
            raise
        if await self._outcome_of(entry) is not None:
            self._entry_failed(entry)

    async def _outcome_of(self, entry: Entry) -> RdmaKvError | None:
        """Wait for it, but not for ever where a send has failed: a gather may wait for a CUDA event that never fires.

        Such a gather would only read pages of a transfer that has ended, into a slot that stays held.
        """
        if isinstance(entry.machine, OutgoingTransfer):
            both: list[asyncio.Future[Any]] = [entry.outcome, entry.failed]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not entry.outcome.done():
                await asyncio.wait([entry.outcome], timeout=self.shell.config.timeouts.quiesce + 1.0)
                if not entry.outcome.done():
                    return entry.machine.error
        return await asyncio.shield(entry.outcome)

    def _entry_failed(self, entry: Entry) -> None:
        error = entry.machine.error
        if error is not None:
            self.fail(error, tell=not entry.machine.told)

    def _tell_others(self, error: RdmaKvError, reached: set[AgentId], *, everybody: bool) -> None:
        """ABORT by name to the participants that are not `reached` by our transfers."""
        call = self.call
        for other in (self.other,) if self.other is not None else self.others:
            try:
                engine = self._engine_of(other)
                route = self.shell.route(call.key, call.replica, engine, other.index)
            except ConfigError:
                continue  # there is no route between us, or no such engine any more, so nobody waits
            name = TransferName(call.key, call.attempt, route.prefill_replica, route.decode_replica)
            find = self.shell.participants if everybody else self.shell.busy_agents
            for record in find(route, engine):
                if record.id not in reached and (everybody or record.id not in self.entries):
                    counterpart = other.engine if record.id.role is self.shell.config.role else ""
                    self._spawn_tell(record, abort_by_name(name, error, counterpart=counterpart))
        if self.other is None and not self.others:
            self._tell_siblings(error, everybody=everybody)

    def _tell_siblings(self, error: RdmaKvError, *, everybody: bool) -> None:
        """We do not know our counterpart, but the agents of our replica may: they tell theirs. Who finds us is refused."""
        call, shell = self.call, self.shell
        shell.rendezvous.give_up(self._place, error)
        if not everybody:
            return
        message = abort_by_name(TransferName(call.key, call.attempt, call.replica, call.replica), error)
        ranks = set(shell.config.topology.replica_ranks(call.replica))
        for record in shell.siblings():
            if not ranks.isdisjoint(record.ranks):
                self._spawn_tell(record, message)

    def _spawn_tell(self, record: AgentRecord, message: Abort) -> None:
        self.shell.tasks.spawn(self._tell(record, message), f"abort {self.call.key} {record.id}")

    async def _tell(self, record: AgentRecord, message: Abort) -> None:
        try:
            async with asyncio.timeout(self.shell.config.timeouts.connect):
                peer = await self.shell.links.peer(record)
            peer.send(message)
        except (RdmaKvError, TimeoutError) as exc:
            logger.info("cannot tell %s that %r has failed: %s", record.id, self.call.key, exc)

    def _check_unique(self) -> None:
        call = self.call
        for other in self.shell.sessions:
            theirs = other.call
            if (theirs.key, theirs.replica, theirs.attempt) == (call.key, call.replica, call.attempt) and (
                not other.others or not self.others or set(other.others) & set(self.others)
            ):
                raise LocalProtocolError(f"{call.key!r} of replica {call.replica} is live already")

    def _engine_of(self, other: ReplicaId) -> EngineRecord:
        """The engine of a counterpart.

        Raises:
            ConfigError: not in the registry, of our own role, or without such a replica.
        """
        engine = self.shell.registry.engine(other.engine)
        if engine.role is self.shell.config.role:
            raise ConfigError("engine", f"{other.engine!r} is a {engine.role.value} engine, as we are")
        engine.topology.check_replica(other.index)
        return engine


async def _despite_cancelling(task: asyncio.Task[None]) -> None:
    """Wait for `task` though we are being cancelled: pages are in use until then. Bounded by the task's own deadlines."""
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            continue
