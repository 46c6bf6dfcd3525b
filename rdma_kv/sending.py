"""A request on its way out: what `Agent.send` returns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec

from rdma_kv.entry import Entry, Ready, StageTimes
from rdma_kv.errors import ConfigError, LocalProtocolError, RdmaKvError, TransferAborted
from rdma_kv.messages import MAX_FRAME_BYTES
from rdma_kv.peer import Peer
from rdma_kv.planner import Route, Tiling
from rdma_kv.protocol.failures import Place
from rdma_kv.protocol.outgoing import OutgoingTransfer
from rdma_kv.session import Call, CudaEvent, Session, Shell, TokenRange, interval, until_ready
from rdma_kv.types import Interval, ReplicaId

logger = logging.getLogger(__name__)

MAX_METADATA_BYTES = MAX_FRAME_BYTES // 2


class _Push(NamedTuple):
    component: int
    layers: Interval
    tokens: Interval
    event: Any = None  # a CUDA event; the pages are final when it has fired


class Sending:
    """A request on its way out; made by `Agent.send`, used with `async with`.

    Attributes:
        metadata: goes to the decode side with the request (first token, lengths, ...): MessagePack values by name.
    """

    def __init__(
        self, shell: Shell, call: Call, to: ReplicaId | None, available: tuple[Interval, ...], announced: Interval
    ) -> None:
        self.metadata: dict[str, Any] = {}
        self._shell = shell
        self._call = call
        self._available = available
        self._announced = announced
        self._place = Place(call.key, call.attempt, call.replica)
        self._session = Session(
            shell,
            call,
            (to,) if to is not None else (),
            find=lambda: shell.rendezvous.wait_for_expect(self._place),
            work=self._offer,
            begin=self._begin,
            bound=lambda other, busy: shell.rendezvous.forget_expects(self._place, other, {each.id for each in busy}),
        )
        components = shell.config.model.components
        self._tilings = [
            Tiling(Interval(0, len(part.layers)), span) for part, span in zip(components, available, strict=True)
        ]
        self._pushes: list[_Push] = []
        self._state = "new"

    @property
    def to(self) -> ReplicaId | None:
        """The decode replica, once known."""
        return self._session.other

    @property
    def error(self) -> RdmaKvError | None:
        """Why the transfer has failed, as soon as it has. The next `push`, or the end of the block, raises it."""
        return self._session.error

    @property
    def times(self) -> StageTimes:
        """Seconds per stage on this side, summed over boxes."""
        return self._session.times

    def when_failed(self, told: Callable[[RdmaKvError], None]) -> None:
        """Have `told` hear why the transfer has failed, as soon as it has: now, or later."""
        self._session.on_failed = told
        if self._session.error is not None:
            told(self._session.error)

    def give_up(self, error: RdmaKvError) -> None:
        """Fail the transfer; all participants are told the reason. The end of the block raises it."""
        self._session.fail(error)

    async def __aenter__(self) -> Self:
        if self._state != "new":
            raise LocalProtocolError("a sending is used once")
        self._session.start()
        self._state = "open"
        return self

    async def push(
        self,
        tokens: TokenRange | None = None,
        layers: tuple[int, int] | None = None,
        *,
        component: str | None = None,
        ready: asyncio.Event | Awaitable[Any] | CudaEvent | None = None,
    ) -> None:
        """These tokens of these layers are final in the source pages (once `ready` is set); they may go.

        Args:
            tokens: positions; all that `send` announced by default. Each component gets its share of them: a state without
                tokens goes with the last, an opaque page when it is complete. With `component`, in what that counts.
            layers: global layer numbers; all by default.
            component: one component by name; all by default.
            ready: awaited first. A CUDA event is not waited for here: the GPU waits for it, before it reads the pages.

        Raises:
            ConfigError: outside what `send` announced.
            LocalProtocolError: pushed already, or the block has ended.
            RdmaKvError: the transfer has failed meanwhile.
        """
        event = await until_ready(ready, config=self._shell.config)
        if self._state != "open":
            raise LocalProtocolError("push outside of the `async with` block")
        if self._session.error is not None:
            raise self._session.error
        for push in self._split(tokens, layers, component):
            if not self._tilings[push.component].add(push.layers, push.tokens):
                raise LocalProtocolError(f"tokens {push.tokens} of layers {push.layers} were pushed before")
            push = push._replace(event=event)
            self._pushes.append(push)
            for entry in self._session.entries.values():
                self._shell.mover.push(entry, *push)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session = self._session
        if error is not None:
            self._state = "failed"
            session.fail(
                TransferAborted(self._call.key, "push", f"the block ended with {type(error).__name__}: {error}")
            )
            try:
                await session.outcome()
            except RdmaKvError as exc:
                logger.debug("%s", exc)
            return
        self._state = "finished"
        problem = metadata_problem(self.metadata)
        if problem is not None:
            session.fail(problem)
        for entry in session.entries.values():
            self._shell.mover.finish(entry, self.metadata)
        await session.outcome()

    def _split(self, tokens: TokenRange | None, layers: tuple[int, int] | None, component: str | None) -> list[_Push]:
        """What a push means, per component. Components that have none of the layers are left out."""
        components = self._shell.config.model.components
        if component is not None:
            self._shell.config.model.component(component)
        asked = None if tokens is None else interval("tokens", tokens)
        which = None if layers is None else interval("layers", layers)
        if component is None and asked is not None and not self._announced.contains(asked):
            raise ConfigError("tokens", f"{asked} is outside {self._announced}, which send() announced")
        num_layers = self._shell.config.topology.num_layers
        if which is not None and which.end > num_layers:
            raise ConfigError("layers", f"{which} is outside the model's {num_layers} layers")
        last = asked is None or asked.end == self._announced.end
        pushes = []
        for index, part in enumerate(components):
            span = self._available[index]
            if component not in {None, part.name}:
                continue
            if asked is not None and component is None:
                span &= part.units(asked, last)
            elif asked is not None:
                if not span.contains(asked):
                    raise ConfigError("tokens", f"{asked} is outside {span}, which send() announced for {part.name!r}")
                span = asked
            own_layers = Interval(0, len(part.layers)) if which is None else part.layers_within(which)
            if span.size and own_layers.size:
                pushes.append(_Push(index, own_layers, span))
        return pushes

    def _offer(self, route: Route, peer: Peer) -> Entry:
        """Open the transfer on one link and hand it what was pushed so far."""
        session, shell, call = self._session, self._shell, self._call
        plan = shell.link_plan(route, peer.identity, tuple(span.end for span in self._available))
        now = asyncio.get_running_loop().time()

        def make(number: int) -> OutgoingTransfer:
            return OutgoingTransfer(
                number,
                call.key,
                call.attempt,
                plan,
                self._available,
                peer=str(peer.id),
                deadline=session.deadline,
                quiesce_s=shell.config.timeouts.quiesce,
                timeout_s=session.deadline - now,
            )

        events = [Ready(*push) for push in self._pushes if push.event is not None]
        return shell.mover.open_outgoing(peer, make, call.tables, [push[:3] for push in self._pushes], events)

    def _begin(self, route: Route, entry: Entry) -> None:
        """Use the slots that were given ahead, and end it where the block has ended already."""
        mover, peer = self._shell.mover, entry.peer
        decode = ReplicaId(peer.id.engine, route.decode_replica)
        expect = self._shell.rendezvous.take_expect(peer, self._place, decode)
        if expect is not None:
            mover.use_grants_ahead(entry, expect)
        if self._state == "finished":
            mover.finish(entry, self.metadata)


def metadata_problem(metadata: dict[str, Any]) -> ConfigError | None:
    """Why a request's metadata cannot be sent; None where it can."""
    try:
        size = len(msgspec.msgpack.encode(metadata))
    except (TypeError, ValueError) as exc:
        return ConfigError("metadata", f"cannot be sent as MessagePack: {exc}")
    if size > MAX_METADATA_BYTES:
        return ConfigError("metadata", f"{size} bytes; at most {MAX_METADATA_BYTES}")
    if not all(isinstance(name, str) for name in metadata):
        return ConfigError("metadata", "names must be strings")
    return None
