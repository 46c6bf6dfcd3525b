"""When the steps of a transfer happen, noted from outside: around kernels, control messages and the data plane.

Nothing in the service knows of it. In a measured process three things are replaced before its agents are made: the two
kernels by ones that note when they begin and end, the control connection by one that looks at what passes, and the
transport by one whose endpoints note WRITEs and notifications. `time.perf_counter` is CLOCK_MONOTONIC, one clock for all
processes of a Linux host, so times of both processes can be put in one row.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

import rdma_kv.greeting
import rdma_kv.packer
from rdma_kv.control import Connection
from rdma_kv.errors import RdmaKvError
from rdma_kv.kernels.launch import Chunk
from rdma_kv.messages import ControlMessage, Done, Finish, Start
from rdma_kv.transport.base import Endpoint, NotificationCallback, Transport, WritePair


class Mark(StrEnum):
    """A moment of one transfer of one box."""

    CALLED = "called"
    START_SENT = "START sent"
    GATHER_BEGINS = "gather begins"
    GATHER_ENDS = "gather ends"
    WRITE_CALLED = "WRITE called"
    WRITE_ENDED = "WRITE ended"
    NOTIFIED = "notified"
    SCATTER_BEGINS = "scatter begins"
    SCATTER_ENDS = "scatter ends"
    FINISH_SENT = "FINISH sent"
    FINISH_READ = "FINISH read"
    DONE_SENT = "DONE sent"
    DONE_READ = "DONE read"
    RETURNED = "returned"


PATH: tuple[Mark, ...] = (
    Mark.CALLED,
    Mark.START_SENT,
    Mark.GATHER_BEGINS,
    Mark.GATHER_ENDS,
    Mark.WRITE_CALLED,
    Mark.NOTIFIED,
    Mark.SCATTER_BEGINS,
    Mark.SCATTER_ENDS,
    Mark.DONE_SENT,
    Mark.DONE_READ,
    Mark.RETURNED,
)
"""One after the other, each because of the one before: the spans between them add up to the whole.

Not of it are the end of the WRITE at the initiator, which may be noticed after the target was notified, and FINISH, which
travels while the target scatters.
"""

_SENT: dict[type[ControlMessage], Mark] = {
    Start: Mark.START_SENT,
    Finish: Mark.FINISH_SENT,
    Done: Mark.DONE_SENT,
}
_READ: dict[type[ControlMessage], Mark] = {Finish: Mark.FINISH_READ, Done: Mark.DONE_READ}


class Trace:
    """Marks of one transfer at a time, as this process sees them."""

    def __init__(self) -> None:
        self._marks: list[tuple[Mark, float]] = []

    def clear(self) -> None:
        self._marks.clear()

    def note(self, mark: Mark) -> None:
        """From any thread."""
        self._marks.append((mark, time.perf_counter()))

    def take(self) -> dict[str, float]:
        """Seconds by mark, since `clear`.

        Raises:
            RdmaKvError: a mark twice. This is for transfers of one box, one at a time.
        """
        marks = {mark.value: at_s for mark, at_s in self._marks}
        if len(marks) != len(self._marks):
            raise RdmaKvError(f"marks {[mark.value for mark, _ in self._marks]}: one is there twice")
        return marks

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Note what agents made within the block do with kernels and control messages."""
        with (
            _replaced(rdma_kv.packer, "gather", self._kernel(Mark.GATHER_BEGINS, Mark.GATHER_ENDS)),
            _replaced(rdma_kv.packer, "scatter", self._kernel(Mark.SCATTER_BEGINS, Mark.SCATTER_ENDS)),
            _replaced(rdma_kv.greeting, "Connection", lambda _: _connection_class(self)),
        ):
            yield

    def transport(self, inner: Transport) -> Transport:
        """`inner`, whose endpoints note WRITEs and notifications."""
        return cast(Transport, _TracedTransport(inner, self))

    def _kernel(self, begins: Mark, ends: Mark) -> Callable[[Any], Any]:
        def wrap(kernel: Callable[[Sequence[Chunk]], None]) -> Callable[[Sequence[Chunk]], None]:
            def run(chunks: Sequence[Chunk]) -> None:
                self.note(begins)
                kernel(chunks)
                self.note(ends)

            return run

        return wrap


T = TypeVar("T")


class _Traced(Generic[T]):
    """All of what it stands for, but for what a subclass does itself."""

    def __init__(self, inner: T, trace: Trace) -> None:
        self._inner = inner
        self._trace = trace

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


class _TracedTransport(_Traced[Transport]):
    """Its endpoints note."""

    def endpoint(self, peer: str) -> Endpoint:
        return cast(Endpoint, _TracedEndpoint(self._inner.endpoint(peer), self._trace))


class _TracedEndpoint(_Traced[Endpoint]):
    """Its WRITEs and notifications are noted."""

    async def write(self, pairs: Sequence[WritePair], notification: bytes) -> None:
        self._trace.note(Mark.WRITE_CALLED)
        await self._inner.write(pairs, notification)
        self._trace.note(Mark.WRITE_ENDED)

    def on_notification(self, callback: NotificationCallback) -> None:
        def notified(body: bytes) -> None:
            self._trace.note(Mark.NOTIFIED)
            callback(body)

        self._inner.on_notification(notified)


def _connection_class(trace: Trace) -> type[Connection]:
    """A control connection whose messages `trace` notes.

    One that is sent is noted before: the peer may have it before `send` returns. One that is read, when all of it is here.
    """

    class TracedConnection(Connection):
        def send(self, message: ControlMessage) -> None:
            _note(_SENT, message)
            super().send(message)

        async def receive(self) -> ControlMessage | None:
            message = await super().receive()
            _note(_READ, message)
            return message

    def _note(marks: Mapping[type[ControlMessage], Mark], message: ControlMessage | None) -> None:
        mark = marks.get(type(message)) if message is not None else None
        if mark is not None:
            trace.note(mark)

    return TracedConnection


@contextlib.contextmanager
def _replaced(module: ModuleType, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """`wrap` of what a module calls `name` in its place, within the block."""
    before = getattr(module, name)
    setattr(module, name, wrap(before))
    try:
        yield
    finally:
        setattr(module, name, before)


def in_order(marks: Mapping[str, float]) -> list[float]:
    """Seconds of each span of `PATH`.

    Raises:
        RdmaKvError: a mark is missing, or before the one that causes it: then something else was measured than is said.
    """
    missing = [mark.value for mark in PATH if mark.value not in marks]
    if missing:
        raise RdmaKvError(f"a transfer left no mark {', '.join(missing)}")
    spans_s = [marks[after.value] - marks[before.value] for before, after in itertools.pairwise(PATH)]
    for after, span_s in zip(PATH[1:], spans_s, strict=True):
        if span_s < 0:
            raise RdmaKvError(f"mark {after.value!r} of a transfer lies {-1e6 * span_s:.1f} us before its cause")
    return spans_s
