"""The data planes of one agent: each is started once, when the first link needs it.

Theory of operation. An agent offers several transports and each link chooses one of them (`protocol.link`). Starting one
costs imports and threads (0.1 to 0.5 s), so one that no link has chosen is not started. Where an agent offers a single
one there is nothing to choose: it is started with the agent, and its errors are those of the agent's start.

A start is a task of its own, shared by all who want that plane: cancelling one of them does not end it. It makes the
transport, starts it and registers the staging; if any of that fails the transport is closed and everybody who waits gets
the error. The next who wants the plane tries again, with a new transport.

Staging may grow. What is added is registered with every plane that has started, and with those that start later.

Memory of a GPU is registered too, where a plane takes it; one that does not is used with host memory alone. Which of them
take it is part of the HELLO, so an agent that has such memory starts all planes with itself, and offers those that started.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rdma_kv.errors import DEVICE_MEMORY, ClosedError, RdmaKvError, RegistrationError, TransportError
from rdma_kv.transport.base import Transport
from rdma_kv.transport.named import TransportMaker
from rdma_kv.transport.outcomes import failed, succeeded
from rdma_kv.types import Region

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plane:
    """A data plane that has started, with the agent's staging memory registered.

    Attributes:
        takes_devices: memory of GPUs is among it.
    """

    transport: Transport
    takes_devices: bool


class Planes:
    """All data planes that an agent offers. Use `start` and `close` around everything else.

    Args:
        name: the agent's incarnation name.
        makers: by back-end name, the best first; see `named.offer`.
    """

    def __init__(self, name: str, makers: Mapping[str, TransportMaker]) -> None:
        self._name = name
        self._makers = dict(makers)
        self._staging: list[Region] = []
        self._starts: dict[str, asyncio.Task[Plane]] = {}  # under way or done; never failed
        self._failed: set[str] = set()  # the last try
        self._closing = False

    @property
    def offered(self) -> tuple[str, ...]:
        """Names of the back-ends, the best first."""
        return tuple(self._makers)

    def states(self) -> dict[str, str]:
        """Of each back-end that is offered: `waiting` (for a link that chooses it), `starting`, `started` or `failed`."""
        return {backend: self._state(backend) for backend in self._makers}

    @property
    def devices(self) -> tuple[str, ...]:
        """Those that were started and have the agent's memory of a GPU registered."""
        ended_well = {name: start.result() for name, start in self._starts.items() if succeeded(start)}
        return tuple(name for name in self._makers if name in ended_well and ended_well[name].takes_devices)

    async def start(self, staging: Sequence[Region]) -> None:
        """Say where the staging memory lies. Starts the plane where only one is offered, and all where some is on a GPU.

        Raises:
            RdmaKvError: as `plane`; of several, none could be started.
        """
        self._staging = list(staging)
        if len(self._makers) == 1:
            await self.plane(*self._makers)
        elif any(piece.device for piece in staging):
            await self._start_all()

    def prepare(self, backend: str) -> None:
        """Begin to start a plane that will be needed. A failure is told to whoever asks for the plane."""
        if backend not in self._starts and not self._closing:
            self._begin(backend)

    async def plane(self, backend: str) -> Plane:
        """A plane that has started; starts it where nobody has.

        Cancelling the caller leaves the start to the others.

        Raises:
            ConfigError, TransportError: it cannot be started; a later call tries again.
            ClosedError: the agent closes.
        """
        start = self._starts.get(backend)
        if start is None:
            self._check_open()
            start = self._begin(backend)
        if not start.done():
            await asyncio.wait([start])
        self._check_open()
        return start.result()

    async def add(self, staging: Sequence[Region]) -> None:
        """Register more staging memory, everywhere.

        Raises:
            RdmaKvError: a plane refused it; those that start later are not given it. Do not use the memory.
        """
        starts = tuple(self._starts.values())  # those that begin from here on register it themselves
        self._staging += staging
        try:
            if starts:
                await asyncio.wait(starts)
            for plane in [start.result() for start in starts if succeeded(start)]:
                for piece in staging:
                    if plane.takes_devices or not piece.device:  # it may have it already: registrations are counted
                        await _register(plane.transport, piece)
        except BaseException:
            for piece in staging:
                self._staging.remove(piece)
            raise

    async def close(self) -> None:
        """Close every plane that was started; a start under way ends first. Idempotent.

        Raises:
            RdmaKvError: the first that a plane's `close` raised; all were closed.
        """
        self._closing = True
        if self._starts:
            await asyncio.wait(self._starts.values())
        started = [start.result().transport for start in self._starts.values() if succeeded(start)]
        outcomes = await asyncio.gather(*(transport.close() for transport in started), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome

    def _begin(self, backend: str) -> asyncio.Task[Plane]:
        self._failed.discard(backend)
        start = asyncio.create_task(self._start(backend), name=f"start {backend} of {self._name}")
        start.add_done_callback(failed)  # marks it as seen: nobody may be waiting
        self._starts[backend] = start
        return start

    async def _start(self, backend: str) -> Plane:
        transport: Transport | None = None
        try:
            transport = self._makers[backend](self._name)
            await transport.start()
            return Plane(transport, await self._register_all(transport))
        except BaseException as exc:
            if transport is not None:
                await self._discard(transport)
            del self._starts[backend]
            self._failed.add(backend)
            if isinstance(exc, RdmaKvError) or not isinstance(exc, Exception):
                raise
            raise TransportError(backend, "start", f"the transport could not be started: {exc!r}") from exc

    async def _start_all(self) -> None:
        """Those that cannot be started are not offered."""
        outcomes = await asyncio.gather(*map(self.plane, self._makers), return_exceptions=True)
        for backend, outcome in zip(tuple(self._makers), outcomes, strict=True):
            if isinstance(outcome, RdmaKvError) and len(self._makers) > 1:
                logger.warning("%s offers no %s: %s", self._name, backend, outcome)
                del self._makers[backend]
            elif isinstance(outcome, BaseException):
                raise outcome

    async def _register_all(self, transport: Transport) -> bool:
        """Register what there is. Whether memory of GPUs is among it.

        Raises:
            RdmaKvError: host memory was refused, or memory of a GPU for another reason than that it is one's.
        """
        takes = any(piece.device for piece in self._staging)
        for piece in tuple(self._staging):
            try:
                if takes or not piece.device:
                    await _register(transport, piece)
            except RegistrationError as exc:
                if not piece.device or exc.status != DEVICE_MEMORY:
                    raise
                takes = False
                text = "%s of %s does not take memory of the GPU, so KV goes through pinned host memory there: %s"
                logger.warning(text, transport.backend, self._name, exc)
        return takes

    async def _discard(self, transport: Transport) -> None:
        """Close what has failed to start; that error counts, not this one."""
        try:
            await transport.close()
        except RdmaKvError as exc:
            logger.warning("%s of %s failed to start, and to close: %s", transport.backend, self._name, exc)

    def _state(self, backend: str) -> str:
        start = self._starts.get(backend)
        if start is not None:
            return "started" if succeeded(start) else "starting"
        return "failed" if backend in self._failed else "waiting"

    def _check_open(self) -> None:
        if self._closing:
            raise ClosedError("the agent is closed")


async def _register(transport: Transport, piece: Region) -> None:
    await transport.register(piece.address, piece.length_bytes, device=piece.device)
