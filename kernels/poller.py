"""A thread that watches events of a GPU for an event loop that sleeps, and wakes it when one has fired.

The loop's thread queues launches and looks at events itself, whenever it runs: see `packer_cuda`. What is left is to notice
that something is done while the loop sleeps. CUDA can call back by itself, but a host function on a stream holds up what is
queued behind it, and the driver's thread must get the interpreter to run it. So one thread asks, as seldom as will do:

* While nothing is handed to it, it sleeps without a timeout.
* An event that is due later is not asked before that. One that is late is asked at intervals of an eighth of how late it
  is, from 100 us to 4 ms. A wake-up costs up to 180 us of CPU on a virtual machine whose processors sleep (measured; a
  tenth elsewhere), so what a slow producer costs is 5 % of a core at most.
* When one has fired, it wakes the loop, once, and sleeps until the loop hands it events anew.

To hand over costs the loop a few microseconds: the thread is woken only if it would sleep for too long.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from rdma_kv import pauses
from rdma_kv.kernels.device import Event
from rdma_kv.kernels.schedule import Watch

SHORTEST_S: Final = 100e-6
LONGEST_S: Final = 4e-3
"""Of a pause between two looks at what is late."""


def pause_s(watched: Sequence[Watch], now: float) -> float:
    """How long to sleep before any of the events is worth a look."""
    return min([pauses.pause_s(now - due, SHORTEST_S, LONGEST_S) for _, due in watched], default=math.inf)


class Poller:
    """See the module. `watch` and `close` are for one thread, that of the event loop.

    Args:
        enter: is called on the thread first.
        wake: is called on the thread when an event has fired, or could not be asked. Must be quick and not raise.
        clock: seconds, the one of the times that events are due.
    """

    def __init__(
        self, enter: Callable[[], None], wake: Callable[[], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._enter, self._wake, self._clock = enter, wake, clock
        self._watched: Sequence[Watch] = ()
        self._told: Sequence[Watch] | None = None  # of those an event has fired, and the loop was woken
        self._bell = threading.Lock()  # free while the thread is to wake: acquired by the thread alone
        self._bell.acquire()
        self._rung = False
        self._wakes_at = -math.inf  # infinite: only by the bell. Past: it is awake, and will look at what there is
        self._ended = False
        self._looks = 0
        self._thread = threading.Thread(target=self._run, name="rdma-kv-gpu", daemon=True)
        self._thread.start()

    @property
    def looks(self) -> int:
        """How often the thread has woken: it stands still while nothing is handed to it."""
        return self._looks

    @property
    def thread(self) -> threading.Thread:
        """For measurements."""
        return self._thread

    def watch(self, watched: Sequence[Watch]) -> None:
        """Watch these from now on, instead of those before; none, if there are none."""
        self._watched = watched
        if watched and self._wakes_at > self._clock() + pause_s(watched, self._clock()) + SHORTEST_S / 2:
            self._ring()

    def close(self) -> None:
        """End the thread, and wait for that: it is awake for microseconds at a time."""
        self._ended = True
        self._ring()
        self._thread.join()

    def _ring(self) -> None:
        if not self._rung:
            self._rung = True
            self._bell.release()

    # --- on the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pauses.sharpen_sleeps()
        with contextlib.suppress(Exception):  # the device has failed: then events cannot be asked either
            self._enter()
        while not self._ended:
            watched = self._watched
            if not watched or watched is self._told:
                self._sleep(watched, None)
                continue
            self._sleep(watched, pause_s(watched, self._clock()))
            self._looks += 1
            if self._watched is watched and any(_fired(event) for event, _ in watched):
                self._told = watched
                self._wake()

    def _sleep(self, watched: Sequence[Watch], seconds: float | None) -> None:
        """Until the bell rings, or so long; not at all if something else is handed over meanwhile.

        The order is what matters: `watch` sets what is watched and then looks when this thread wakes, this one the other way
        round. So one of both sees the other's.
        """
        self._wakes_at = math.inf if seconds is None else self._clock() + seconds
        if self._watched is watched and self._bell.acquire(timeout=-1 if seconds is None else seconds):
            self._rung = False
            if seconds is None:
                self._looks += 1
        self._wakes_at = -math.inf


def _fired(event: Event) -> bool:
    try:
        return event.query()
    except Exception:  # noqa: BLE001 - the loop finds out what it is
        return True
