"""The one thread that calls NIXL, and the loading of NIXL.

Theory of operation. NIXL's calls hold the GIL or block, it has no event to wait for, and it makes progress only inside
its calls. So one thread owns all of them. It takes jobs from a queue and answers on the event loop, by
`call_soon_threadsafe` only. Between jobs it gives each *active* link (one that listens, has a WRITE pending, or
connects) a turn: post a little, ask for completions and notifications. When no link is active it blocks on the queue:
idle costs nothing. When turns bring nothing it spins briefly, then sleeps on the queue, so that it wakes at once for a
job and leaves the GIL to others: for as long as nothing has moved, and 1 ms at most; so to listen for long costs a
thousand short looks a second. With memory of GPUs, an eighth of that: there what comes is not waited for by the
processors that copy it, and half of the time of a WRITE is much. The spins keep the GIL, but for those after an answer:
the loop that it has woken would wait for it.

A NIXL agent is destroyed with the last reference to it, and only that ends what it posted. Frames of a traceback are
such references, and whoever keeps an exception keeps them: so no exception leaves this thread with its frames' locals,
and those of NIXL leave without a traceback.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import logging
import logging.config
import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rdma_kv.errors import ConfigError, TransportError
from rdma_kv.pauses import PARTS, pause_s, sharpen_sleeps

BACKEND = "nixl"
MODULES = ("nixl_cu12", "nixl_cu13")  # never `nixl`: the meta package imports torch
_SPINS = 20  # turns without sleep after the last movement: some 0.2 ms, a small WRITE's latency
_SHORTEST_PAUSE_S = 50e-6
_LONGEST_PAUSE_S = 1e-3
_EXIT_JOIN_S = 2.0  # how long a process that forgot `close` waits for the thread at its exit

T = TypeVar("T")
Settle = Callable[[TransportError | None], None]
"""Told once how an operation ended: None is success. Called on the owner thread."""

_logger = logging.getLogger(__name__)


class NixlHandle(Protocol):
    """`nixl_xfer_handle`, the part that we use."""

    def release(self) -> None: ...


class NixlAgent(Protocol):
    """`nixl_agent`, the part that we use. Every method raises one of `Nixl.errors`; none returns an error."""

    backends: dict[str, int]
    agent: object  # NIXL's own; every transfer handle holds it too

    def create_backend(self, backend: str, init_params: dict[str, str]) -> None: ...

    def get_agent_metadata(self) -> bytes: ...

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> object: ...

    def deregister_memory(self, dereg_list: object) -> None: ...

    def add_remote_agent(self, metadata: bytes) -> bytes: ...

    def make_connection(self, remote_agent: str) -> None: ...

    def get_xfer_descs(self, descs: NDArray[np.uint64], mem_type: str) -> object: ...

    def initialize_xfer(
        self, operation: str, local_descs: object, remote_descs: object, remote_agent: str, notif_msg: bytes
    ) -> NixlHandle: ...

    def transfer(self, handle: NixlHandle) -> str: ...

    def check_xfer_state(self, handle: NixlHandle) -> str: ...

    def get_new_notifs(self) -> dict[str, list[bytes]]: ...


@dataclass(frozen=True)
class Nixl:
    """The loaded wrapper.

    Attributes:
        api: module `nixl_cu12` or `nixl_cu13`.
        errors: all that it raises.
    """

    api: Any
    errors: tuple[type[Exception], ...]

    def make_agent(self, name: str, settings: Mapping[str, str] | None = None) -> NixlAgent:
        """A NIXL agent with the UCX back-end and no thread of its own (its progress thread spins on a whole core).

        Args:
            settings: of UCX, without `UCX_`, where its environment has none; neither may hold a comma.

        Raises:
            TransportError: UCX refused to start.
        """
        sync = self.api.nixl_thread_sync_t.NIXL_THREAD_SYNC_RW  # the default crashes with more than one thread
        backends = [] if settings else ["UCX"]
        config = self.api.nixl_agent_config(enable_prog_thread=False, sync_mode=sync, backends=backends)
        try:
            agent: NixlAgent = self.api.nixl_agent(name, config)
            if settings:
                joined = ",".join(f"{key}={value}" for key, value in settings.items())
                agent.create_backend("UCX", {"engine_config": joined})
        except self.errors as error:
            raise translate(error, "the agent could not be made; see UCX_TLS and UCX_NET_DEVICES") from None
        if "UCX" not in agent.backends:
            raise TransportError(BACKEND, "no-ucx", "this NIXL has no UCX plug-in")
        return agent


def load_nixl() -> Nixl:
    """Import NIXL's wrapper.

    Raises:
        ConfigError: neither wheel is installed.
    """
    causes = []
    for name in MODULES:
        try:
            return _import(name)
        except ImportError as error:
            causes.append(str(error))
    raise ConfigError("transport", f"nixl is not installed; pip install 'rdma-kv[nixl]' ({'; '.join(causes)})")


def _import(name: str) -> Nixl:
    with _logging_untouched():
        api = importlib.import_module(name)
        bindings = importlib.import_module(f"{name}._bindings")
    found = (value for value in vars(bindings).values() if isinstance(value, type) and issubclass(value, Exception))
    return Nixl(api, tuple(found))


@contextlib.contextmanager
def _logging_untouched() -> Iterator[None]:
    """Keep NIXL's wrapper from reconfiguring the process's logging as it is imported.

    Its `dictConfig` closes every handler of the process (a log file opened with mode "w" gets nothing any more) and
    sends the logger `nixl` to standard output; then it switches `logging.raiseExceptions` off. Without all that its
    messages go the way of all others. Calls of `dictConfig` by other threads meanwhile pass.
    """
    configure, raises = logging.config.dictConfig, logging.raiseExceptions

    def all_but_nixl(config: Any) -> None:  # noqa: ANN401 - as the standard library's stub has it
        if set(config.get("loggers", ())) != {"nixl"}:
            configure(config)

    logging.config.dictConfig = all_but_nixl
    try:
        yield
    finally:
        logging.config.dictConfig = configure
        logging.raiseExceptions = raises


def translate(error: Exception, message: str) -> TransportError:
    """NIXL's exception as ours; its class name becomes the status.

    The traceback is dropped: its frames would keep a transfer handle, and with it the agent, from being destroyed.
    """
    status = type(error).__name__.removeprefix("nixl").removesuffix("Error")
    ours = TransportError(BACKEND, status, message)
    ours.__cause__ = error.with_traceback(None)
    return ours


class Turnable(Protocol):
    """What the owner polls. `with_devices`: what it waits for may be the work of a GPU."""

    with_devices: bool

    @property
    def active(self) -> bool: ...

    def turn(self) -> bool:
        """Make progress without blocking for long. True if something moved."""
        ...

    def abandon(self, error: TransportError) -> None:
        """End everything pending with `error`."""
        ...

    def close(self) -> None: ...


class Owner:
    """The thread. Everything but `_run` and the jobs is called on the event loop.

    Args:
        name: of the thread.
        loop: where results arrive.
    """

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._links: list[Turnable] = []
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._fruitless = 0
        self._moved_at_s = 0.0
        self._sharp = False  # its sleeps end when they should
        self._told = False  # the loop was woken since the last job or sleep

    @property
    def thread(self) -> threading.Thread:
        return self._thread

    def start(self) -> None:
        atexit.register(self._halt)  # a daemon thread inside C++ when the interpreter dies can end it with an abort
        self._thread.start()

    async def stop(self) -> None:
        """Close all links, end the thread and join it, off the loop."""
        self._jobs.put(None)
        await self._loop.run_in_executor(None, self._thread.join)
        atexit.unregister(self._halt)

    def post(self, job: Callable[[], None]) -> None:
        """Run `job` on the thread; it must not raise."""
        self._jobs.put(job)

    def call(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run `job` on the thread; the future has its result or exception."""
        future: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = job()
            except Exception as error:  # noqa: BLE001 - all of it goes to whoever awaits
                traceback.clear_frames(error.__traceback__)
                self.tell(partial(fail, future, error))
            else:
                self.tell(partial(succeed, future, result))

        self._jobs.put(run)
        return future

    def begin(self, job: Callable[[Settle], None], future: asyncio.Future[None]) -> None:
        """Run `job` on the thread; `future` ends when the job, now or in a later turn, settles."""

        def settle(error: TransportError | None) -> None:
            self.tell(partial(succeed, future, None) if error is None else partial(fail, future, error))

        def run() -> None:
            try:
                job(settle)
            except Exception as error:  # noqa: BLE001 - all of it goes to whoever awaits
                traceback.clear_frames(error.__traceback__)
                self.tell(partial(fail, future, error))

        self._jobs.put(run)

    def tell(self, callback: Callable[[], None]) -> None:
        """From the thread: run `callback` on the event loop."""
        self._told = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(callback)

    def add(self, link: Turnable) -> None:
        """On the thread: poll `link` from now on."""
        self._links.append(link)

    def remove(self, link: Turnable) -> None:
        """On the thread: forget `link`."""
        if link in self._links:
            self._links.remove(link)

    def _run(self) -> None:
        while True:
            try:
                job = self._next_job()
            except queue.Empty:
                moved = [_turn(link) for link in tuple(self._links) if link.active]
                self._fruitless += 1
                if any(moved):
                    self._note_movement()
                continue
            if job is None:
                break
            self._told = False
            job()
            self._note_movement()
        for link in tuple(self._links):
            link.close()

    def _next_job(self) -> Callable[[], None] | None:
        """Wait for a job as long as the state of the links allows.

        Raises:
            queue.Empty: it is time for a turn.
        """
        active = [link for link in self._links if link.active]
        if not active:
            return self._jobs.get()
        if self._fruitless < _SPINS:
            if self._told:
                time.sleep(0)  # the loop was woken, and may wait for the GIL
            return self._jobs.get_nowait()
        self._told = False
        since_s = time.monotonic() - self._moved_at_s
        with_devices = any(link.with_devices for link in active)
        if with_devices and not self._sharp:
            self._sharp = True
            sharpen_sleeps()  # between hosts it would only make for more looks
        parts = PARTS if with_devices else 1
        return self._jobs.get(timeout=pause_s(since_s, _SHORTEST_PAUSE_S, _LONGEST_PAUSE_S, parts))

    def _note_movement(self) -> None:
        self._fruitless, self._moved_at_s = 0, time.monotonic()

    def _halt(self) -> None:
        self._jobs.put(None)
        self._thread.join(_EXIT_JOIN_S)


def _turn(link: Turnable) -> bool:
    """A turn whose bug ends this link, not the thread that all others need."""
    try:
        return link.turn()
    except Exception as error:
        _logger.exception("a link of the NIXL transport failed")
        traceback.clear_frames(error.__traceback__)
        link.abandon(TransportError(BACKEND, "bug", f"unexpected {type(error).__name__}: {error}"))
        return True


def succeed(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
