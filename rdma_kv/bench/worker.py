"""Measured processes: forked or spawned, asked one thing at a time, and stopped while it is not their turn.

Stopping matters: a contestant that spins while it waits would take a core from whoever is measured beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import msgspec

from rdma_kv.errors import RdmaKvError
from rdma_kv.transport.ucx_environment import prepare_ucx_environment

_ANSWER_S = 120.0
_END_S = 10.0  # for a process to close what it has
_END = "end"
_PR_SET_PDEATHSIG = 1  # Source: linux/prctl.h


class Side(Protocol):
    """What a process does. All its other methods are coroutines that take and return MessagePack values."""

    async def close(self) -> None: ...


class Worker:
    """One measured process, running from the start. Where it forks, make it in a process without threads.

    Args:
        make: makes the `Side`, in the process.
        environ: what differs there from our environment; None removes a variable.
        spawned: a fresh interpreter instead of a fork, which CUDA does not survive; `make` must be picklable.
    """

    def __init__(
        self, name: str, make: Callable[[], Side], environ: Mapping[str, str | None], *, spawned: bool = False
    ) -> None:
        process = (
            multiprocessing.get_context("spawn").Process if spawned else multiprocessing.get_context("fork").Process
        )
        self.name = name
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = process(target=_child, args=(make, environ, theirs, self._pipe), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return self._process.pid

    def ask(self, method: str, *arguments: object) -> Any:  # noqa: ANN401 - whatever the side answers
        """Call a method of the side and wait for its answer. Raises as `result`."""
        self.begin(method, *arguments)
        return self.result()

    def begin(self, method: str, *arguments: object) -> None:
        """Call a method of the side; `result` takes its answer.

        Raises:
            RdmaKvError: the process has ended.
        """
        try:
            self._pipe.send_bytes(msgspec.msgpack.encode((method, arguments)))
        except OSError as exc:
            raise RdmaKvError(f"{self.name} has ended") from exc

    def result(self) -> Any:  # noqa: ANN401 - as `ask`
        """The answer to the last `begin`.

        Raises:
            RdmaKvError: the side failed, has ended, or took too long. Then the process is ended, or its late answer would be
                taken for that to the next question.
        """
        if not self._pipe.poll(_ANSWER_S):
            self.end(force=True)
            raise RdmaKvError(f"{self.name} did not answer within {_ANSWER_S:.0f} s")
        try:
            fine, value = msgspec.msgpack.decode(self._pipe.recv_bytes())
        except (EOFError, OSError) as exc:
            raise RdmaKvError(f"{self.name} has ended") from exc
        if not fine:
            raise RdmaKvError(f"{self.name}: {value}")
        return value

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def end(self, *, force: bool = False) -> None:
        """End the process: by word, or by force where that is asked for or it takes too long."""
        if force:
            self._process.kill()
        else:
            self.tell_end()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def tell_end(self) -> None:
        """Let the process close what it has and end; does not wait."""
        self.resume()
        with contextlib.suppress(RdmaKvError):
            self.begin(_END)  # closing the pipe would not do: processes forked later hold it too

    def _signal(self, number: signal.Signals) -> None:
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, number)


@contextlib.contextmanager
def ended(workers: Sequence[Worker]) -> Iterator[None]:
    """End all workers on the way out, by force after an error. `workers` may grow meanwhile."""
    try:
        yield
    except BaseException:
        for worker in workers:
            worker.end(force=True)
        raise
    for worker in workers:
        worker.tell_end()
    for worker in workers:
        worker.end()


@contextlib.contextmanager
def turn(*workers: Worker) -> Iterator[None]:
    """Let these processes run, and only within the block."""
    for worker in workers:
        worker.resume()
    try:
        yield
    finally:
        for worker in workers:
            worker.pause()


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have this process told so when the thread that made it has ended. Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _child(make: Callable[[], Side], environ: Mapping[str, str | None], pipe: Connection, parents: Connection) -> None:
    parents.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    die_with_parent()  # also while stopped
    for name, value in environ.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")  # a peer that ends first is no news
    prepare_ucx_environment(os.environ)
    asyncio.run(_serve(make, pipe))


async def _serve(make: Callable[[], Side], pipe: Connection) -> None:
    loop = asyncio.get_running_loop()
    side = make()
    try:
        while True:
            try:
                question = await loop.run_in_executor(None, pipe.recv_bytes)
            except (EOFError, OSError):
                return
            method, arguments = msgspec.msgpack.decode(question)
            if method == _END:
                return
            pipe.send_bytes(msgspec.msgpack.encode(await _answer(side, method, arguments)))
    finally:
        await side.close()


async def _answer(side: Side, method: str, arguments: Sequence[object]) -> tuple[bool, object]:
    try:
        return True, await getattr(side, method)(*arguments)
    except Exception as exc:  # noqa: BLE001 - told to the parent
        return False, f"{type(exc).__name__}: {exc}"
