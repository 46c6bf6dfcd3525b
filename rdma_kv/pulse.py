"""The pulse of one link: drives its `Liveness` with one timer, sends its heartbeats, and asks the peer for a sign of life.

Nothing else is spent on a link that is idle: one timer, that fires once an interval.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from rdma_kv.messages import Heartbeat
from rdma_kv.protocol.liveness import LifeState, Liveness

_TURNS: Final = 4  # of the loop, from bytes in a socket to the message that they are


class Pulse:
    """Lives as long as its link; `stop` ends it.

    Args:
        life: the machine that decides.
        send: puts a heartbeat on the control stream.
        changed: hears of every change of the peer's state. It may call `stop`.
    """

    def __init__(self, life: Liveness, send: Callable[[Heartbeat], None], changed: Callable[[LifeState], None]) -> None:
        self._life = life
        self._send = send
        self._changed = changed
        self._loop = asyncio.get_running_loop()
        self._asked: dict[asyncio.Future[bool], int] = {}  # the heartbeat that must be acknowledged
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self._renewing = False  # an acknowledgement was asked for, and has not come
        self._news = asyncio.Event()  # set once, and then replaced
        self._arm()

    @property
    def state(self) -> LifeState:
        return self._life.state

    async def until_may_post(self) -> None:
        """Wait until a WRITE may be posted, or the link has ended.

        Where only the peer's acknowledgement is old (our loop was blocked for long), it is asked for a new one at once.
        """
        while not (self._stopped or self.may_post):
            if self.state is LifeState.ALIVE and not self._renewing:
                self._renewing = True
                self._send(self._life.beat(self._loop.time(), answer=True))
            await self._news.wait()

    @property
    def may_post(self) -> bool:
        """Whether a WRITE may be posted to the peer now; see `Liveness.may_post`."""
        return not self._stopped and self._life.may_post(self._loop.time())

    def heard(self) -> None:
        """A message of the peer has come, of whatever kind."""
        if self._life.heard(self._loop.time()):
            self._changed(self.state)
            self._tell()

    def take(self, message: Heartbeat) -> None:
        """A heartbeat has come; call `heard` too.

        Raises:
            RemoteProtocolError: its numbers cannot be.
        """
        answer = self._life.heartbeat(message, self._loop.time())
        if answer is not None:
            self._send(answer)
        for future, number in self._asked.items():
            if number <= message.heard and not future.done():
                future.set_result(True)
        self._renewing = False
        self._tell()

    async def answers(self, within_s: float) -> bool:
        """Ask the peer for a sign of life. False: none came in time, or the link has ended."""
        if self._stopped:
            return False
        beat = self._life.beat(self._loop.time(), answer=True)
        future: asyncio.Future[bool] = self._loop.create_future()
        self._asked[future] = beat.number
        try:
            self._send(beat)
            await asyncio.wait([future], timeout=within_s)
            for _ in range(_TURNS):  # the loop may have been blocked, and the answer lie unread
                if not future.done():
                    await asyncio.sleep(0)
            return future.done() and future.result()
        finally:
            del self._asked[future]

    def stop(self) -> None:
        """The link has ended. Idempotent."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for future in self._asked:
            if not future.done():
                future.set_result(False)
        self._tell()

    def _tell(self) -> None:
        """Wake who waits to post."""
        self._news.set()
        self._news = asyncio.Event()

    def _arm(self) -> None:
        deadline = self._life.deadline
        self._timer = None if deadline is None or self._stopped else self._loop.call_at(deadline, self._tick)

    def _tick(self) -> None:
        before = self.state
        beat = self._life.tick(self._loop.time())
        if beat is not None:
            self._send(beat)
        if self.state is not before:
            self._changed(self.state)
        self._arm()
