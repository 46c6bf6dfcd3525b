"""The handshake of one control connection, as a machine without waiting, and the checks of a HELLO.

Theory of operation. Both directions begin with HELLO: the dialer's goes out at once, the acceptor answers when it has
accepted the dialer's. A HELLO that does not fit is answered by BYE with the name of the field, so that both sides can say
what differs, before any memory is touched. After both HELLOs the link is up; a second HELLO, or anything before the first,
is the peer's error. BYE or the end of the stream closes the link; every state before `UP` has a deadline.

Two agents of one engine have a link for control only: no KV goes between them, but one that gives a transfer up tells the
other. There nothing but ABORT by name, HEARTBEAT and BYE may come.

On a double dial (each side has dialed the other and sent its HELLO) the connection of the smaller identity stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from rdma_kv.errors import (
    ConfigError,
    ErrorCode,
    IncompatiblePeerError,
    PeerLostError,
    RdmaKvError,
    RemoteProtocolError,
)
from rdma_kv.messages import (
    PROTOCOL_VERSION,
    Abort,
    Bye,
    ComponentFacts,
    ControlMessage,
    Heartbeat,
    Hello,
    TopologyFacts,
    text_field,
)
from rdma_kv.planner import check_pair
from rdma_kv.protocol.liveness import Liveness
from rdma_kv.protocol.machine import Machine
from rdma_kv.topology import Component, ContextSplit, ModelSpec, TieBreak, Topology
from rdma_kv.types import AgentId, Owned, Role

DOUBLE_DIAL = "double dial"


class LinkState(Enum):
    GREETING = auto()  # waits for the peer's HELLO
    UP = auto()
    CLOSED = auto()


class LinkEvent(Enum):
    HELLO = auto()
    MESSAGE = auto()
    REFUSE = auto()  # we refuse the peer's HELLO, at once or when the shell has looked at it
    BYE = auto()
    LOST = auto()  # the stream ended or broke
    TIMEOUT = auto()


_S, _E = LinkState, LinkEvent

LINK_TABLE: dict[tuple[LinkState, LinkEvent], LinkState] = {
    (_S.GREETING, _E.HELLO): _S.UP,
    (_S.GREETING, _E.REFUSE): _S.CLOSED,
    (_S.GREETING, _E.BYE): _S.CLOSED,
    (_S.GREETING, _E.LOST): _S.CLOSED,
    (_S.GREETING, _E.TIMEOUT): _S.CLOSED,
    (_S.UP, _E.MESSAGE): _S.UP,
    (_S.UP, _E.REFUSE): _S.CLOSED,
    (_S.UP, _E.BYE): _S.CLOSED,
    (_S.UP, _E.LOST): _S.CLOSED,
}
LINK_TERMINAL = frozenset({_S.CLOSED})


@dataclass(frozen=True, slots=True)
class Process:
    """One process life on one host, or `Process()` where it is not known.

    Attributes:
        host: equal in two processes only if they share a kernel and a process namespace.
        pid: in that namespace.
        started: when it started, in clock ticks since boot; a number that is used again differs in this.
    """

    host: str = ""
    pid: int = 0
    started: int = 0


@dataclass(frozen=True, slots=True)
class Identity:
    """One side of a link: everything that its HELLO says, in our own words.

    `checksum` names the algorithm of the chunks' checksums, or none. `heartbeat_ms` and `lease_ms` are what this side
    would keep by itself; see `protocol.liveness`. `device_transports` and `device_lanes` are as in HELLO.
    """

    id: AgentId
    incarnation: bytes
    topology: Topology
    tie_break: TieBreak
    model: ModelSpec
    page_sizes: tuple[int, ...]
    owns: tuple[Owned, ...]
    transports: tuple[str, ...]
    slot_bytes: int
    heartbeat_ms: int = 2000
    lease_ms: int = 10_000
    process: Process = Process()
    checksum: str = ""
    device_transports: tuple[str, ...] = ()
    device_lanes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Unique name of this incarnation."""
        return f"{self.id}#{self.incarnation.hex()[:12]}"

    @property
    def ranks(self) -> frozenset[int]:
        return frozenset(owned.rank for owned in self.owns)

    def hello(self) -> Hello:
        return Hello(
            version=PROTOCOL_VERSION,
            cluster=self.id.cluster,
            engine=self.id.engine,
            role=self.id.role.value,
            rank=self.id.rank,
            incarnation=self.incarnation,
            topology=topology_facts(self.topology),
            tie_break=self.tie_break.value,
            fingerprint=self.model.fingerprint,
            components=[
                component_facts(component, page_size)
                for component, page_size in zip(self.model.components, self.page_sizes, strict=True)
            ],
            owns=[(owned.replica, owned.rank) for owned in self.owns],
            transports=list(self.transports),
            slot_bytes=self.slot_bytes,
            heartbeat_ms=self.heartbeat_ms,
            lease_ms=self.lease_ms,
            host=self.process.host,
            pid=self.process.pid,
            started=self.process.started,
            checksum=self.checksum,
            device_transports=list(self.device_transports),
            device_lanes=list(self.device_lanes),
        )


class Link:
    """One connection on its way to `UP` and from there to its end.

    Args:
        own: who we are.
        expected: whom we dialed; None where the peer dialed us.
        deadline: moment by which the peer's HELLO must be here.
    """

    def __init__(self, own: Identity, expected: AgentId | None, deadline: float) -> None:
        self.own = own
        self.expected = expected
        self.deadline: float | None = deadline
        self.remote: Identity | None = None
        self.error: RdmaKvError | None = None
        self._machine: Machine[LinkState, LinkEvent] = Machine(_S.GREETING, LINK_TABLE, LINK_TERMINAL)

    @property
    def state(self) -> LinkState:
        return self._machine.state

    @property
    def transport(self) -> str:
        """Which data plane carries the KV of this link; both sides say the same. Empty for control only.

        Only once it is up.
        """
        assert self.remote is not None
        return "" if self.control_only else choose_transport(self.own, self.remote)

    @property
    def device_lane(self) -> str:
        """The lane by which KV of this link goes between staging on the GPUs of both sides: `cuda_ipc` or `rdma`; empty
        where it passes through host memory. Only once it is up.
        """
        assert self.remote is not None
        return "" if self.control_only else device_lane(self.own, self.remote, self.transport)

    @property
    def control_only(self) -> bool:
        """Both are agents of one engine. Only once it is up."""
        assert self.remote is not None
        return self.own.id.role is self.remote.id.role

    def liveness(self, now: float, hello_at: float) -> Liveness:
        """What watches over the peer of this link, from now on. Only once it is up.

        Args:
            hello_at: when our HELLO went out.
        """
        assert self.remote is not None
        return Liveness(
            self.peer,
            now,
            hello_at=hello_at,
            heartbeat_s=min(self.own.heartbeat_ms, self.remote.heartbeat_ms) / 1000,
            lease_s=self.own.lease_ms / 1000,
            peer_lease_s=self.remote.lease_ms / 1000,
        )

    @property
    def peer(self) -> str:
        return str(self.remote.id if self.remote else self.expected or "an unknown peer")

    def received(self, message: ControlMessage) -> Bye | None:
        """Take one message. Returns the BYE that refuses it, after which the link is closed and `error` is set.

        In `UP` everything but HELLO and BYE is the caller's to handle, and refused where the link does not carry it.
        """
        if self._machine.ended:
            return None
        if isinstance(message, Bye):
            self._end(_E.BYE, _bye_error(self.peer, message))
            return None
        if self.state is _S.UP:
            if isinstance(message, Hello):
                return self._close(_E.REFUSE, RemoteProtocolError(self.peer, "a second HELLO"))
            if self.control_only and not _is_control(message):
                text = f"{type(message).__name__} on a link between two agents of one engine"
                return self._close(_E.REFUSE, RemoteProtocolError(self.peer, text))
            self._machine.step(_E.MESSAGE)
            return None
        if not isinstance(message, Hello):
            return self._close(_E.REFUSE, RemoteProtocolError(self.peer, f"{type(message).__name__} before HELLO"))
        try:
            remote = read_hello(self.peer, message)
            check_compatible(self.own, remote)
            self._check_expected(remote)
        except RdmaKvError as exc:
            return self._close(_E.REFUSE, exc)
        self.remote = remote
        self.deadline = None
        self._machine.step(_E.HELLO)
        return None

    def refuse(self, error: RdmaKvError) -> Bye:
        """We cannot have this peer, for a reason that only the shell knows (registry, double dial)."""
        return self._close(_E.REFUSE, error)

    def lost(self, error: RdmaKvError | None = None) -> None:
        """The stream has ended or broken."""
        self._end(_E.LOST, error or PeerLostError(self.peer, "closed the control stream"))

    def tick(self, now: float) -> bool:
        """True where the deadline has just passed; the link is closed then."""
        if self.deadline is None or now < self.deadline:
            return False
        self._end(_E.TIMEOUT, PeerLostError(self.peer, "no HELLO in time"))
        return True

    def _close(self, event: LinkEvent, error: RdmaKvError) -> Bye:
        self._end(event, error)
        return bye(error)

    def _end(self, event: LinkEvent, error: RdmaKvError) -> None:
        """Close for a reason; the first one counts."""
        if not self._machine.ended:
            self._machine.step(event)
            self.error = error
            self.deadline = None

    def _check_expected(self, remote: Identity) -> None:
        if self.expected is not None and remote.id != self.expected:
            raise IncompatiblePeerError(
                str(self.expected), "identity", f"{remote.id} answered; the registry names {self.expected} there"
            )


def _is_control(message: ControlMessage) -> bool:
    """Whether a link for control only carries it. A number is of a transfer, and there is none on such a link."""
    return isinstance(message, Heartbeat) or (isinstance(message, Abort) and not message.transfer)


def keeps_dialed(own: AgentId, peer: AgentId) -> bool:
    """On a double dial: whether the connection that we dialed stays."""
    return own < peer


def bye(error: RdmaKvError) -> Bye:
    """How a refusal is told to the peer."""
    field = str(getattr(error, "field", ""))
    return Bye(error.code, text_field(field), text_field(error.reason))


def _bye_error(peer: str, message: Bye) -> RdmaKvError:
    if message.code in {ErrorCode.INCOMPATIBLE_PEER, ErrorCode.CONFIG}:
        return IncompatiblePeerError(peer, message.field, f"refused by the peer: {message.message}")
    if message.code is ErrorCode.REMOTE_PROTOCOL:
        return RemoteProtocolError(peer, f"refused by the peer: {message.message}")
    return PeerLostError(peer, f"said goodbye: {message.message}")


def read_hello(peer: str, message: Hello) -> Identity:
    """A HELLO in our own words.

    Raises:
        RemoteProtocolError: it contradicts itself.
        IncompatiblePeerError: another protocol version.
    """
    if message.version != PROTOCOL_VERSION:
        raise IncompatiblePeerError(peer, "version", f"speaks protocol {message.version}, we speak {PROTOCOL_VERSION}")
    try:
        topology = read_topology(message.topology)
        model = ModelSpec(tuple(read_component(facts) for facts in message.components), message.fingerprint)
        role, tie_break = Role(message.role), TieBreak(message.tie_break)
        owns = tuple(Owned(replica, rank) for replica, rank in message.owns)
        if owns != topology.owned(sorted({rank for _, rank in message.owns})):
            raise ConfigError("owns", "does not match the topology, or is not in ascending order")
        if owns[0].rank != message.rank:
            raise ConfigError("rank", "is not the lowest rank owned")
        if message.slot_bytes < 1 or any(facts.page_size < 1 for facts in message.components):
            raise ConfigError("slot_bytes", "slot_bytes and page_size must be positive")
        if len(set(message.transports)) != len(message.transports):
            raise ConfigError("transports", "names one twice")
        if not set(message.device_transports) <= set(message.transports):
            raise ConfigError("device_transports", "names one that is not among transports")
        if message.lease_ms <= 3 * message.heartbeat_ms:
            raise ConfigError("lease_ms", "is not more than three heartbeats")
    except (ConfigError, ValueError) as exc:
        raise RemoteProtocolError(peer, f"HELLO contradicts itself: {exc}") from exc
    return Identity(
        id=AgentId(message.cluster, message.engine, role, message.rank),
        incarnation=message.incarnation,
        topology=topology,
        tie_break=tie_break,
        model=model,
        page_sizes=tuple(facts.page_size for facts in message.components),
        owns=owns,
        transports=tuple(message.transports),
        slot_bytes=message.slot_bytes,
        heartbeat_ms=message.heartbeat_ms,
        lease_ms=message.lease_ms,
        process=Process(message.host, message.pid, message.started),
        checksum=message.checksum,
        device_transports=tuple(message.device_transports),
        device_lanes=tuple(message.device_lanes),
    )


def check_compatible(own: Identity, remote: Identity) -> None:
    """Whether KV can be exchanged. Page sizes, NHD or HND, and parallel layouts may differ; the rest may not.

    Two agents of one engine exchange no KV, only news of transfers that have failed. They must be of one cluster and see
    the same engine.

    Raises:
        IncompatiblePeerError: `field` names what differs.
    """
    peer = str(remote.id)

    def same(field: str, ours: object, theirs: object) -> None:
        if ours != theirs:
            raise IncompatiblePeerError(peer, field, f"{theirs!r} there, {ours!r} here; both sides must agree")

    def same_secret(field: str, ours: object, theirs: object) -> None:
        """A stranger that guesses does not learn our value from the refusal."""
        if ours != theirs:
            raise IncompatiblePeerError(peer, field, f"{theirs!r} is not that of the other side; both must agree")

    same_secret("cluster", own.id.cluster, remote.id.cluster)
    if own.id.role is remote.id.role:
        if own.id.engine != remote.id.engine:
            raise IncompatiblePeerError(peer, "role", f"both are {own.id.role.value}; KV goes from prefill to decode")
        if own.id == remote.id:
            raise IncompatiblePeerError(peer, "identity", "is our own; two agents must not claim one identity")
        same("topology", own.topology, remote.topology)
        same("tie_break", own.tie_break, remote.tie_break)
        return
    choose_transport(own, remote)
    if own.checksum != remote.checksum:
        there, here = remote.checksum or "none", own.checksum or "none"
        text = f"{there} there, {here} here; set AgentConfig.checksum on all agents or on none"
        raise IncompatiblePeerError(peer, "checksum", text)
    same_secret("fingerprint", own.model.fingerprint, remote.model.fingerprint)
    same(
        "components",
        [component.name for component in own.model.components],
        [component.name for component in remote.model.components],
    )
    for ours, theirs in zip(own.model.components, remote.model.components, strict=True):
        for field in (
            "dtype",
            "kv_factor",
            "row_bytes",
            "layers",
            "kv_heads",
            "replicated",
            "has_tokens",
            "scale_mode",
            "opaque_page_tokens",
        ):
            same(f"{ours.name}.{field}", getattr(ours, field), getattr(theirs, field))
    prefill, decode = (own, remote) if own.id.role is Role.PREFILL else (remote, own)
    try:
        check_pair(own.model, prefill.topology, decode.topology)
    except ConfigError as exc:
        raise IncompatiblePeerError(peer, exc.field, exc.problem) from exc


def choose_transport(own: Identity, remote: Identity) -> str:
    """The first data plane of the prefill side's list that the decode side has too: the same, whichever side asks.

    One that can write from GPU to GPU comes before all that cannot.

    Raises:
        IncompatiblePeerError: `field` is `transport`; they have none in common.
    """
    prefill, decode = (own, remote) if own.id.role is Role.PREFILL else (remote, own)
    common = [transport for transport in prefill.transports if transport in decode.transports]
    if common:
        return next((transport for transport in common if device_lane(own, remote, transport)), common[0])
    text = (
        f"prefill has {', '.join(map(repr, prefill.transports))}, decode has {', '.join(map(repr, decode.transports))}, "
        "and none is common; set the same transport on both sides, or auto on both and install what one side lacks"
    )
    raise IncompatiblePeerError(str(remote.id), "transport", text)


def device_lane(own: Identity, remote: Identity, transport: str) -> str:
    """The lane of a transport from staging on a GPU of one side to staging on a GPU of the other: `cuda_ipc` between two
    processes of one host, `rdma`, or empty, if there is none. The same, whichever side asks."""
    if transport not in own.device_transports or transport not in remote.device_transports:
        return ""
    lanes = set(own.device_lanes) & set(remote.device_lanes)
    apart = own.process.host == remote.process.host != "" and own.process.pid != remote.process.pid
    if "cuda_ipc" in lanes and apart:
        return "cuda_ipc"
    return "rdma" if "rdma" in lanes else ""


def component_facts(component: Component, page_size: int) -> ComponentFacts:
    """A component as messages carry it."""
    return ComponentFacts(
        name=component.name,
        layers=list(component.layers),
        kv_heads=component.kv_heads,
        kv_factor=component.kv_factor,
        row_bytes=component.row_bytes,
        dtype=component.dtype,
        replicated=component.replicated,
        has_tokens=component.has_tokens,
        scale_mode=component.scale_mode,
        opaque_page_tokens=component.opaque_page_tokens,
        page_size=page_size,
    )


def read_component(facts: ComponentFacts) -> Component:
    """Raises ConfigError where it is none."""
    return Component(
        facts.name,
        tuple(facts.layers),
        facts.kv_heads,
        facts.kv_factor,
        facts.row_bytes,
        facts.dtype,
        facts.replicated,
        facts.has_tokens,
        facts.scale_mode,
        facts.opaque_page_tokens,
    )


def topology_facts(topology: Topology) -> TopologyFacts:
    """A topology as messages carry it."""
    stages = list(topology.layers_per_stage)
    return TopologyFacts(topology.tp, topology.pp, topology.cp, topology.dp, stages, str(topology.cp_split))


def read_topology(facts: TopologyFacts) -> Topology:
    """Raises ConfigError where it is none."""
    stages = tuple(facts.layers_per_stage)
    return Topology(facts.tp, facts.pp, facts.cp, facts.dp, stages, ContextSplit.parse(facts.cp_split))
