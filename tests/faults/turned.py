"""Time that passes only when nobody can go on, and hosts inside one process that can be stopped and killed.

Theory of operation. `TurnedLoop` is asyncio's own loop with another clock: when no callback is ready and no socket has
anything, the clock jumps to the next timer. Minutes of timeouts pass in milliseconds, and how busy the machine is plays no
part. Work of threads would be overtaken by such a jump, so kernels run in the loop (`in_the_loop`).

A *host* is a name in a context variable. Tasks, timers and callbacks inherit it from whoever made them, so everything that
an agent does carries the name of the host that started it. Callbacks of a stopped host are put aside, and what comes to its
sockets stays in the kernel: as after SIGSTOP. A killed host is stopped for ever and its sockets are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import rdma_kv.packer

T = TypeVar("T")

HOST: contextvars.ContextVar[str] = contextvars.ContextVar("host", default="")
_GRACE_S = 0.0002  # of real time, for what the kernel is still handing from one socket to another
_REAL_LIMIT_S = 20.0  # for one run; each takes a second or less
_LAST_S = 3.0  # of real time, to end after a hang


class Hang(Exception):
    """Somebody waits, and nothing can ever happen any more; or the clock stands still beside endless work."""


class _Selector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Waits by turning the clock of its loop; sockets of stopped hosts have nothing to say."""

    loop: TurnedLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        events = self._audible(super().select(0))
        if not events and (timeout is None or timeout > 0):
            time.sleep(_GRACE_S)
            events = self._audible(super().select(0))
            if not events:
                self.loop.turn(timeout)
        self.loop.put_timers_aside()
        return events

    def _audible(self, events: list[Any]) -> list[Any]:
        stopped = self.loop.stopped
        if not stopped:
            return events
        return [(key, mask) for key, mask in events if not any(_host(h) in stopped for h in _handles(key.data))]


def _handles(data: Any) -> list[asyncio.Handle]:
    return [handle for handle in data or () if isinstance(handle, asyncio.Handle)]


def _host(handle: asyncio.Handle) -> str:
    return handle._context.get(HOST, "")


class TurnedLoop(asyncio.SelectorEventLoop):
    """See the module. `now_s` is the clock, in seconds.

    Attributes:
        main: cancelled where the loop hangs; `hung` says so.
    """

    def __init__(self, limit_s: float) -> None:
        self.now_s = 1000.0
        self.stopped: set[str] = set()
        self.main: asyncio.Task[Any] | None = None
        self.hung = ""
        self._aside: list[asyncio.Handle] = []
        self._limit_s = limit_s
        self._give_up_at = time.monotonic() + limit_s
        selector = _Selector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        return self.now_s

    def turn(self, step_s: float | None) -> None:
        """Nobody can go on before `step_s` has passed; None: never."""
        if step_s is not None:
            self.now_s += step_s
        else:
            self._hang("nothing can happen any more")

    def _hang(self, text: str) -> None:
        if self.main is not None and not self.hung:
            self.hung = text
            self._give_up_at = time.monotonic() + _LAST_S
            self.main.cancel()
        elif time.monotonic() > self._give_up_at:
            raise Hang(self.hung or text)  # it does not even end when told to

    def _run_once(self) -> None:
        if time.monotonic() > self._give_up_at:
            self._hang(f"not done within {self._limit_s:.0f} s of real time")
        if self.stopped:
            ready = list(self._ready)
            self._ready.clear()
            for handle in ready:
                (self._aside if _host(handle) in self.stopped else self._ready).append(handle)
        super()._run_once()

    def put_timers_aside(self) -> None:
        """Timers of stopped hosts that are due wait for the host."""
        if not self.stopped:
            return
        due = [
            h for h in self._scheduled if h._when <= self.now_s + self._clock_resolution and _host(h) in self.stopped
        ]
        if due:
            self._scheduled = [h for h in self._scheduled if h not in due]
            heapq.heapify(self._scheduled)
            for handle in due:
                handle._scheduled = False
            self._aside += due

    def stop_host(self, name: str) -> None:
        self.stopped.add(name)

    def resume_host(self, name: str) -> None:
        """Go on: timers that were due meanwhile fire at once, as after SIGCONT."""
        self.stopped.discard(name)
        aside, self._aside = self._aside, []
        for handle in aside:
            (self._ready if _host(handle) == name else self._aside).append(handle)


def on_host(name: str, work: Callable[[], Coroutine[Any, Any, T]]) -> asyncio.Task[T]:
    """Start a task as that host does."""
    context = contextvars.copy_context()
    context.run(HOST.set, name)
    return asyncio.get_running_loop().create_task(work(), context=context)


def call_on_host(name: str, call: Callable[..., T], *arguments: Any) -> T:
    """Make a call as that host does."""
    context = contextvars.copy_context()
    context.run(HOST.set, name)
    return context.run(call, *arguments)


class _InTheLoop:
    """An executor that runs at once, in the caller's thread."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def submit(self, work: Callable[..., object], *arguments: object) -> None:
        work(*arguments)

    def shutdown(self, *, wait: bool = True) -> None: ...


@contextlib.contextmanager
def in_the_loop() -> Iterator[None]:
    """Agents that are made within the block run their kernels in the loop."""
    before = rdma_kv.packer_host.ThreadPoolExecutor
    rdma_kv.packer_host.ThreadPoolExecutor = _InTheLoop  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        rdma_kv.packer_host.ThreadPoolExecutor = before  # type: ignore[misc]


def run_turned(work: Callable[[TurnedLoop], Coroutine[Any, Any, T]], limit_s: float = _REAL_LIMIT_S) -> T:
    """Run to the end on a loop of its own.

    Raises:
        Hang: see there.
    """
    loop = TurnedLoop(limit_s)

    async def main() -> T:
        loop.main = asyncio.current_task()
        return await work(loop)

    with asyncio.Runner(loop_factory=lambda: loop) as runner, in_the_loop():
        try:
            return runner.run(main())
        except asyncio.CancelledError:
            raise Hang(loop.hung or "cancelled") from None
