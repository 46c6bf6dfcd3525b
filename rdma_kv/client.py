"""The API of an engine whose mover is a sidecar: as `Agent`, with the kernels here and everything else there.

`Client` is for asyncio. `SyncClient` is the same for everybody else: it blocks, and threads may share it. Both reconnect to
a sidecar that has ended or restarted by themselves, and register the pools again. Calls that were under way fail with a
`SidecarLostError`, which is retryable; new ones wait for the sidecar as long as they may take.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from rdma_kv.errors import ClosedError, LocalProtocolError, RdmaKvError
from rdma_kv.layout import KvLayout
from rdma_kv.receiving import Received
from rdma_kv.session import AgentConfig, CudaEvent, TokenRange
from rdma_kv.sidecar.engine_client import Client
from rdma_kv.sidecar.engine_sending import ClientSending
from rdma_kv.types import ReplicaId

__all__ = ["Client", "ClientSending", "SyncClient", "SyncSending"]

T = TypeVar("T")


def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()


async def _end_tasks() -> None:
    """End what still runs on a loop that is about to stop: its callers wait for an outcome."""
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    _cancel(tasks)
    await asyncio.gather(*tasks, return_exceptions=True)


class SyncSending:
    """A request on its way out; made by `SyncClient.send`, used with `with`. For one thread at a time."""

    def __init__(self, client: SyncClient, sending: ClientSending) -> None:
        self._client = client
        self._sending = sending

    @property
    def metadata(self) -> dict[str, Any]:
        """See `Sending.metadata`."""
        return self._sending.metadata

    @property
    def to(self) -> ReplicaId | None:
        """See `ClientSending.to`."""
        return self._sending.to

    @property
    def error(self) -> RdmaKvError | None:
        """See `Sending.error`."""
        return self._sending.error

    def __enter__(self) -> Self:
        self._client.run(self._sending.__aenter__)
        return self

    def push(
        self,
        tokens: TokenRange | None = None,
        layers: tuple[int, int] | None = None,
        *,
        component: str | None = None,
        ready: threading.Event | CudaEvent | None = None,
    ) -> None:
        """See `Sending.push`; a `threading.Event` is waited for by this thread, a CUDA event by the GPU."""
        if isinstance(ready, threading.Event):
            ready.wait()
            ready = None
        event = ready
        self._client.run(lambda: self._sending.push(tokens, layers, component=component, ready=event))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.run(lambda: self._sending.__aexit__(kind, error, trace))


class SyncClient:
    """`Client` without asyncio: every call blocks, and any number of threads may make calls at a time.

    An event loop runs in a thread of its own, from `start` to `close`. A call that is interrupted (Ctrl-C) is cancelled, and
    ends when its pages are no longer touched. Use with `with`.

    Args:
        config, socket, start_s: see `Client`.
    """

    def __init__(self, config: AgentConfig, socket: str | Path, *, start_s: float = 30.0) -> None:
        self.config = config
        self._where = Path(socket)
        self._start_s = start_s
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: Client | None = None

    @property
    def address(self) -> tuple[str, int]:
        """See `Client.address`."""
        return ("", 0) if self._client is None else self._client.address

    def start(self) -> None:
        """See `Client.start`."""
        if self._thread is not None:
            raise LocalProtocolError("a client starts once")
        loop = self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="rdma-kv-client", daemon=True)
        self._thread.start()

        async def start() -> Client:
            client = Client(self.config, self._where, start_s=self._start_s)
            try:
                await client.start()
            except BaseException:
                await client.close()
                raise
            return client

        try:
            self._client = self.run(start)
        except BaseException:
            self._stop()
            raise

    def close(self) -> None:
        """See `Client.close`. Calls of other threads fail with `ClosedError`. Idempotent."""
        if self._client is not None and self._loop is not None:
            self.run(self._client.close)
        self._stop()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def register_pool(
        self,
        layout: KvLayout,
        memory: Any,  # noqa: ANN401
        *,
        replica: int,
        rank: int,
        component: str | None = None,
    ) -> None:
        """See `Client.register_pool`."""
        client = self._open()

        async def register() -> None:
            client.register_pool(layout, memory, replica=replica, rank=rank, component=component)

        self.run(register)

    def send(self, key: str, replica: int, pages: Any, **options: Any) -> SyncSending:  # noqa: ANN401
        """See `Client.send`, with its options."""
        client = self._open()

        async def make() -> ClientSending:
            return client.send(key, replica, pages, **options)

        return SyncSending(self, self.run(make))

    def receive(self, key: str, replica: int, pages: Any, **options: Any) -> Received:  # noqa: ANN401
        """See `Client.receive`, with its options."""
        client = self._open()
        return self.run(lambda: client.receive(key, replica, pages, **options))

    def stats(self) -> dict[str, Any]:
        """See `Client.stats`."""
        return self.run(self._open().stats)

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run something of the client's on its loop and wait for the outcome, as its methods do.

        Raises:
            ClosedError: the client is not open.
        """
        outcome: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        async def awaited() -> T:
            return await work()

        def end(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                outcome.set_exception(ClosedError("the call was cancelled"))
            elif (error := task.exception()) is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(task.result())

        def begin() -> None:
            task = asyncio.create_task(awaited())
            tasks.append(task)
            task.add_done_callback(end)

        with self._lock:  # the loop does not stop before it has begun what was accepted
            loop = self._loop
            if loop is None or threading.current_thread() is self._thread:
                raise ClosedError("the client is not open; use it inside `with`, and not from its own thread")
            loop.call_soon_threadsafe(begin)
        try:
            return outcome.result()
        except BaseException:
            if not outcome.done():  # it is this thread that was interrupted
                loop.call_soon_threadsafe(_cancel, tasks)
                outcome.exception()
            raise

    def _open(self) -> Client:
        if self._client is None or self._loop is None:
            raise ClosedError("the client is not open; use it inside `with`")
        return self._client

    def _stop(self) -> None:
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(_end_tasks(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()
