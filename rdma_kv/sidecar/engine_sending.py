"""A request on its way out through a sidecar: what `Client.send` returns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import msgspec

from rdma_kv.entry import StageTimes
from rdma_kv.errors import LocalProtocolError, RdmaKvError
from rdma_kv.messages import MAX_TEXT
from rdma_kv.sending import metadata_problem
from rdma_kv.session import AgentConfig, CudaEvent, TokenRange, interval, until_ready
from rdma_kv.sidecar.facts import fault_of, sendable
from rdma_kv.sidecar.link import RunningCall
from rdma_kv.sidecar.wire import Abort, Cancel, Finish, Push
from rdma_kv.types import ReplicaId

logger = logging.getLogger(__name__)


class ClientSending:
    """A request on its way out; made by `Client.send`, used with `async with`, as `Sending` is.

    Where a call's arguments concern the registry (an engine that it does not list), the error comes at the begin of the
    block, since the sidecar has the registry.

    Args:
        begin: awaits the sidecar and begins the call there.

    Attributes:
        metadata: goes to the decode side with the request (first token, lengths, ...): MessagePack values by name.
    """

    def __init__(self, config: AgentConfig, to: ReplicaId | None, begin: Callable[[], Awaitable[RunningCall]]) -> None:
        self.metadata: dict[str, Any] = {}
        self._config = config
        self._to = to
        self._begin = begin
        self._run: RunningCall | None = None
        self._state = "new"
        self._times = StageTimes()

    @property
    def to(self) -> ReplicaId | None:
        """The decode replica, once known; the sidecar says it with its answer to a push, and at the end."""
        return self._to if self._run is None or self._run.to is None else self._run.to

    @property
    def error(self) -> RdmaKvError | None:
        """Why the transfer has failed, as soon as it has. The next `push`, or the end of the block, raises it."""
        return None if self._run is None else self._run.error

    @property
    def times(self) -> StageTimes:
        """Seconds per stage on this side, summed over boxes; known at the end."""
        return self._times

    async def __aenter__(self) -> Self:
        if self._state != "new":
            raise LocalProtocolError("a sending is used once")
        self._state = "begun"
        run = self._run = await self._begin()
        try:
            await run.begun()
        except asyncio.CancelledError:
            run.say(Cancel(run.number))
            await _ended(run)
            raise
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
        """These tokens of these layers are final in the source pages (once `ready` is set); see `Sending.push`.

        Raises:
            ConfigError: outside what `send` announced.
            LocalProtocolError: pushed already, or the block has ended.
            RdmaKvError: the transfer has failed meanwhile.
        """
        event = await until_ready(ready, config=self._config)
        if self._state != "open" or self._run is None:
            raise LocalProtocolError("push outside of the `async with` block")
        if self._run.error is not None:
            raise self._run.error
        spans = [None if span is None else interval(n, span) for n, span in (("tokens", tokens), ("layers", layers))]
        if component is not None:
            self._config.model.component(component)
        pairs = [None if span is None else (span.start, span.end) for span in spans]
        number = self._run.add_event(event) if event is not None else 0
        await self._run.push(Push(self._run.number, pairs[0], pairs[1], component, number))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run = self._run
        assert run is not None
        if error is not None:
            self._state = "failed"
            run.say(Abort(run.number, sendable(f"{type(error).__name__}: {error}", MAX_TEXT)))
            await _ended(run)
            return
        self._state = "finished"
        problem = metadata_problem(self.metadata)
        if problem is not None:
            run.say(Finish(run.number, b"", fault_of(problem)))
        else:
            run.say(Finish(run.number, msgspec.msgpack.encode(self.metadata)))
        ended = await run.outcome()
        self._times = StageTimes(*ended.times)


async def _ended(run: RunningCall) -> None:
    """Wait until a call has ended that was told to, whatever comes of it."""
    try:
        await run.outcome(soon=True)
    except RdmaKvError as exc:
        logger.debug("%s", exc)
