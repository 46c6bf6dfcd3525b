"""A request on its way in: what `Agent.receive` runs and returns."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any

from rdma_kv.entry import Entry, StageTimes
from rdma_kv.errors import ConfigError, RdmaKvError
from rdma_kv.messages import Expect
from rdma_kv.peer import Peer
from rdma_kv.planner import Route
from rdma_kv.protocol.failures import Place
from rdma_kv.protocol.incoming import IncomingTransfer
from rdma_kv.registry.static import AgentRecord
from rdma_kv.session import Call, Session, Shell, TokenRange
from rdma_kv.types import Interval, ReplicaId

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Received:
    """What a receive brought.

    Attributes:
        source: the prefill replica that it came from.
        tokens: range per component name that was moved; what was asked beyond it was not to be had.
        metadata: what the sender attached, from its lowest sending rank.
        received_bytes: payload.
        seconds: from the call to the end.
        times: seconds per stage on this side, summed over boxes.
    """

    source: ReplicaId
    tokens: dict[str, TokenRange]
    metadata: dict[str, Any]
    received_bytes: int
    seconds: float
    times: StageTimes


class Receiving:
    """One call of `Agent.receive`.

    Args:
        sources: the prefill replicas it may come from; empty for any that offers it.
        after: CUDA events before which no page is written.
    """

    def __init__(
        self,
        shell: Shell,
        call: Call,
        sources: tuple[ReplicaId, ...],
        wanted: tuple[Interval, ...],
        after: tuple[Any, ...] = (),
    ) -> None:
        self._after = after
        self._shell = shell
        self._call = call
        self._wanted = wanted
        self._place = Place(call.key, call.attempt, call.replica)
        self._alone: AgentRecord | None = None  # the only agent that sends to us, if there is one
        allowed = frozenset(sources) or None
        self._session = Session(
            shell,
            call,
            sources,
            find=lambda: shell.rendezvous.wait_for_offer(self._place, allowed),
            work=self._expect,
            begin=self._begin,
        )

    async def run(self) -> Received:
        """Receive everything; see `Agent.receive`."""
        session = self._session
        self._alone = self._only_sender()
        to_tell = [(record, source) for source in session.others for record in self._agents_to_tell(source)]
        session.start()
        if session.error is not None:
            to_tell = []  # a participant has given up already
        telling = [asyncio.create_task(self._tell(record, source)) for record, source in to_tell]
        try:
            await session.outcome()
        finally:
            for task in telling:
                task.cancel()
            await asyncio.gather(*telling, return_exceptions=True)
        return self._received()

    def _agents_to_tell(self, source: ReplicaId) -> list[AgentRecord]:
        """EXPECT goes to every agent of every source, also to one that has no moves to us.

        Where one agent alone sends, its EXPECT can carry slots; then the transfer itself sends it, when it is open.
        """
        engine = self._shell.registry.engine(source.engine)
        everybody = engine.agents_of(source.index)
        return [record for record in everybody if self._alone is None or record.id != self._alone.id]

    def _only_sender(self) -> AgentRecord | None:
        """The one agent that sends to us, where the source is settled and there is one alone."""
        shell, call = self._shell, self._call
        if len(self._session.others) != 1:
            return None
        (source,) = self._session.others
        engine = shell.registry.engine(source.engine)
        try:
            busy = shell.busy_agents(shell.route(call.key, call.replica, engine, source.index), engine)
        except ConfigError:
            return None  # there is no route; the session says so
        return busy[0] if len(busy) == 1 else None

    async def _tell(self, record: AgentRecord, source: ReplicaId) -> None:
        """Tell an agent, however long it takes to reach it; it is not waited for."""
        shell, call = self._shell, self._call
        try:
            route = shell.route(call.key, call.replica, shell.registry.engine(source.engine), source.index)
            peer = await shell.links.peer(record)
        except RdmaKvError as exc:
            logger.info("cannot tell %s that %r is expected: %s", record.id, call.key, exc)
            return
        self._send_expect(peer, route, [])

    def _send_expect(self, peer: Peer, route: Route, grants: list[tuple[int, int]]) -> None:
        call = self._call
        left_s = self._session.deadline - asyncio.get_running_loop().time()
        peer.send(
            Expect(
                call.key,
                call.attempt,
                route.prefill_replica,
                route.decode_replica,
                route.digest,
                [(span.start, span.end) for span in self._wanted],
                int(1000 * max(0.0, left_s)),
                grants,
            )
        )

    def _expect(self, route: Route, peer: Peer) -> Entry:
        """Open the transfer on one link."""
        session, call = self._session, self._call
        machine = IncomingTransfer(
            call.key,
            call.attempt,
            self._shell.link_plan(route, peer.identity, tuple(span.end for span in self._wanted)),
            self._wanted,
            peer=str(peer.id),
            deadline=session.deadline,
            quiesce_s=self._shell.config.timeouts.quiesce,
            checksum=bool(peer.identity.checksum),
        )
        return self._shell.mover.open_incoming(peer, machine, call.tables, self._after)

    def _begin(self, route: Route, entry: Entry) -> None:
        """Refuse what other sources offer, and send the EXPECT that can carry slots."""
        session, peer = self._session, entry.peer
        taken = ReplicaId(peer.id.engine, route.prefill_replica)
        self._shell.rendezvous.refuse_others(self._place, session.others, taken)
        if self._alone is not None and self._alone.id == peer.id:
            self._send_expect(peer, route, self._shell.mover.give_grants_ahead(entry))

    def _received(self) -> Received:
        session = self._session
        assert session.other is not None
        names = [component.name for component in self._shell.config.model.components]
        machines = [entry.machine for entry in session.entries.values()]
        incoming = [machine for machine in machines if isinstance(machine, IncomingTransfer)]
        incoming.sort(key=lambda machine: min(machine.plan.move(number).src for number in machine.plan.moves))
        ranges = incoming[0].ranges if incoming else None
        return Received(
            source=session.other,
            tokens={name: (span.start, span.end) for name, span in zip(names, ranges or (), strict=False)},
            metadata=incoming[0].metadata if incoming else {},
            received_bytes=sum(machine.received_bytes for machine in incoming),
            seconds=asyncio.get_running_loop().time() - session.begin,
            times=session.times,
        )
