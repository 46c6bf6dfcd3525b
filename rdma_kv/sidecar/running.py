"""The calls of one attached engine: each `send` and `receive` is a task that uses the engine's agent as any caller does."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from rdma_kv.agent import Agent
from rdma_kv.errors import LocalProtocolError, RdmaKvError, RemoteProtocolError, SidecarLostError
from rdma_kv.sending import Sending
from rdma_kv.sidecar.facts import error_of, fault_of, int64s, replica_id, replica_of
from rdma_kv.sidecar.remote import RemoteEvent
from rdma_kv.sidecar.wire import (
    MAX_CALLS,
    Abort,
    Answer,
    Cancel,
    Ended,
    Failed,
    Finish,
    FromSidecar,
    Push,
    Receive,
    Send,
)

logger = logging.getLogger("rdma_kv.sidecar")

_Step = Push | Finish | Abort


class EngineError(Exception):
    """The block of a send has ended by an exception in the engine."""


class _Running:
    """One call: its task, and for a send what its caller has said and was not done yet."""

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.steps: asyncio.Queue[_Step] = asyncio.Queue()
        self.finished = False  # its last step was said
        self.failed: RdmaKvError | None = None  # why it had failed when its caller gave it up
        self.events: dict[int, RemoteEvent] = {}


class Calls:
    """The calls of one client, by its numbers.

    Args:
        say: sends a message to the client.
        who: the client, for logs and errors.

    Attributes:
        refusal: why no call begins any more; None as long as they do.
    """

    def __init__(self, agent: Agent, say: Callable[[FromSidecar], None], who: str) -> None:
        self.refusal: RdmaKvError | None = None
        self._agent = agent
        self._say = say
        self._who = who
        self._last = 0
        self._running: dict[int, _Running] = {}
        self._none = asyncio.Event()
        self._none.set()
        self._lost: RdmaKvError | None = None

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, message: Send | Receive) -> None:
        """Begin a call.

        Raises:
            RemoteProtocolError: its number was used before.
        """
        if message.call <= self._last:
            raise RemoteProtocolError(self._who, f"call {message.call} after call {self._last}")
        self._last = message.call
        refusal = self.refusal
        if len(self._running) >= MAX_CALLS:
            refusal = LocalProtocolError(f"{MAX_CALLS} calls at a time are the most that a sidecar takes of one client")
        if refusal is not None:
            self._say(Ended(message.call, fault_of(refusal), None, (0.0, 0.0, 0.0)))
            verb = "send" if isinstance(message, Send) else "receive"
            self._log(verb, message, None, refusal, cancelled=False, began=time.monotonic())
            return
        running = self._running[message.call] = _Running()
        self._none.clear()
        work = self._send(message, running) if isinstance(message, Send) else self._receive(message, running)
        running.task = asyncio.create_task(work, name=f"call {message.call} {message.key}")
        running.task.add_done_callback(lambda _: self._forget(message.call))

    def step(self, message: _Step) -> None:
        """What comes next in a send. For one that has ended meanwhile it means nothing.

        Raises:
            RemoteProtocolError: there was never such a call, or its caller has said its last step already.
        """
        self._check(message.call)
        running = self._running.get(message.call)
        if running is not None:
            if running.finished:
                raise RemoteProtocolError(self._who, f"{type(message).__name__} of call {message.call} after its end")
            running.finished = not isinstance(message, Push)
            running.steps.put_nowait(message)

    def cancel(self, message: Cancel) -> None:
        """The caller was cancelled.

        Raises:
            RemoteProtocolError: there was never such a call.
        """
        self._check(message.call)
        running = self._running.get(message.call)
        if running is not None and running.task is not None:
            # Not before its first step: a call that has begun tells the participants when it is cancelled.
            asyncio.get_running_loop().call_soon(running.task.cancel)

    async def idle(self) -> None:
        """Wait until no call runs."""
        await self._none.wait()

    def lost(self, error: RdmaKvError) -> None:
        """The engine is gone: that is the outcome of all its calls, also of one that has just come."""
        self.refusal = self._lost = error
        self._agent.abort(error)

    async def lose(self, error: RdmaKvError) -> None:
        """As `lost`. Its calls fail, all participants hear of it, and nobody here waits for the caller."""
        self.lost(error)
        tasks = [running.task for running in self._running.values() if running.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _check(self, call: int) -> None:
        if call > self._last:
            raise RemoteProtocolError(self._who, f"call {call} has not begun")

    def _forget(self, call: int) -> None:
        self._running.pop(call, None)
        if not self._running:
            self._none.set()

    # --- send ----------------------------------------------------------------------------------------------------------

    async def _send(self, message: Send, running: _Running) -> None:
        began, sending, error = time.monotonic(), None, None
        call, cancelled = message.call, False
        try:
            sending = self._agent.send(
                message.key,
                message.replica,
                self._pages(message.pages),
                tokens=message.tokens,
                to=replica_id(message.to),
                attempt=message.attempt,
                timeout_s=message.timeout_s,
            )
            async with sending as out:
                out.when_failed(lambda error: self._say(Failed(call, fault_of(error))))
                self._say(Answer(call, replica_of(out.to)))
                try:
                    await self._block(call, out, running)
                except BaseException:
                    running.failed = out.error
                    raise
        except EngineError:
            cancelled = True
        except asyncio.CancelledError:
            cancelled = True
        except Exception as exc:  # noqa: BLE001 - told to the caller
            error = _told(exc)
        times = sending.times if sending is not None else None
        spent = (0.0, 0.0, 0.0) if times is None else (times.gather, times.write, times.scatter)
        to = replica_of(sending.to) if sending is not None else None
        self._say(Ended(call, None if error is None else fault_of(error), to, spent))
        self._log("send", message, to, error or running.failed, cancelled, began)

    async def _block(self, call: int, out: Sending, running: _Running) -> None:
        """What the caller does inside its block, in its order."""
        while True:
            match await running.steps.get():
                case Push(_, tokens, layers, component, event):
                    fault = None
                    try:
                        ready = self._event(running, event)
                        await out.push(tokens, layers, component=component, ready=ready)
                    except RdmaKvError as exc:
                        fault = fault_of(exc)
                    self._say(Answer(call, replica_of(out.to), fault))
                case Finish(_, metadata, problem):
                    if problem is not None:
                        out.give_up(error_of(problem))
                    else:
                        out.metadata.update(_metadata(self._who, metadata))
                    return
                case Abort(_, reason):
                    raise EngineError(reason)

    # --- receive -------------------------------------------------------------------------------------------------------

    async def _receive(self, message: Receive, running: _Running) -> None:
        began, error, cancelled = time.monotonic(), None, False
        ended = Ended(message.call, None, None, (0.0, 0.0, 0.0))
        try:
            sources = [replica for each in message.sources if (replica := replica_id(each)) is not None]
            got = await self._agent.receive(
                message.key,
                message.replica,
                self._pages(message.pages),
                tokens=message.tokens,
                source=sources or None,
                attempt=message.attempt,
                timeout_s=message.timeout_s,
                after=self._event(running, message.event),
            )
            times = (got.times.gather, got.times.write, got.times.scatter)
            metadata = msgspec.msgpack.encode(got.metadata)
            ended = Ended(
                message.call,
                None,
                replica_of(got.source),
                times,
                got.tokens,
                metadata,
                got.received_bytes,
                got.seconds,
            )
        except asyncio.CancelledError:
            cancelled = True
        except Exception as exc:  # noqa: BLE001 - told to the caller
            error = _told(exc)
            ended = Ended(message.call, fault_of(error), None, (0.0, 0.0, 0.0))
        self._say(ended)
        self._log("receive", message, ended.to, error, cancelled, began, ended.received_bytes)

    # --- small things --------------------------------------------------------------------------------------------------

    def _pages(self, tables: list[bytes]) -> dict[str, np.ndarray[Any, Any]]:
        components = self._agent.config.model.components
        if len(tables) != len(components):
            raise RemoteProtocolError(self._who, f"{len(tables)} page tables for {len(components)} components")
        return {c.name: int64s(self._who, "pages", table) for c, table in zip(components, tables, strict=True)}

    @staticmethod
    def _event(running: _Running, number: int) -> RemoteEvent | None:
        return running.events.setdefault(number, RemoteEvent(number)) if number else None

    def _log(
        self,
        verb: str,
        message: Send | Receive,
        other: tuple[str, int] | None,
        error: RdmaKvError | None,
        cancelled: bool,
        began: float,
        received_bytes: int = 0,
    ) -> None:
        """One line per outcome."""
        error = self._lost or error
        outcome = type(error).__name__ if error is not None else "cancelled" if cancelled else "success"
        facts: dict[str, object] = {
            "event": "transfer",
            "verb": verb,
            "agent": str(self._agent.config.id),
            "key": message.key,
            "replica": message.replica,
            "attempt": message.attempt,
            "other": "/".join(map(str, other)) if other else "",
            "outcome": outcome,
            "seconds": round(time.monotonic() - began, 6),
        }
        if verb == "receive":
            facts["bytes"] = received_bytes
        if error is not None:
            facts["code"], facts["retryable"], facts["error"] = error.told_code.name, error.retryable, str(error)
        level = logging.INFO if error is None else logging.WARNING
        logger.log(level, "%s %s: %s", verb, message.key, outcome, extra={"facts": facts})


def _told(exc: Exception) -> RdmaKvError:
    if isinstance(exc, RdmaKvError):
        return exc
    logger.error("a bug in a call", exc_info=exc)
    return SidecarLostError("sidecar", f"a bug: {exc!r}")


def _metadata(who: str, body: bytes) -> dict[Any, Any]:
    try:
        return msgspec.msgpack.decode(body, type=dict)
    except (msgspec.MsgspecError, RecursionError) as exc:
        raise RemoteProtocolError(who, f"metadata that is none: {exc}") from exc
