"""Which work goes on which stream of a GPU and when, and what has come of it. No thread and no torch.

A *track* is a stream with its *flights*: groups of works that are queued on it, each with an event behind it. Flights of a
track land in order, so only the first of each is looked at. The tracks, all of one priority:

* `gather` and `scatter`: works whose producers are done. One launch takes all that are ready, up to a bound.
* `down` and `up`: copies between slots on the GPU and pinned memory. A gather's copies wait for its event on the GPU, each
  has an event of its own, so the first chunk's WRITE starts while the second is copied. A scatter waits for its copies.
* four in a ring: works whose producer's event has not fired. A track of the ring has one launch, and so one set of events
  to wait for; a slow producer holds up nobody else. When the ring is full, or a launch waits for the same events already,
  works are held back on the host until their events fire or a track is free: then nobody waits for a stranger either.

**Behind a producer there is a kernel, and no copy.** The GPU takes the copies of all streams, the engine's too, from few
queues, and there one that waits holds up those behind it: seen on an H200, either way. So a launch's tables go up before its
stream waits, and works with a copy of their own, to or from pinned memory or of a checksum, are always held on the host.

A scatter that has a checksum to check is launched twice: the sums, then, once they were read here and were right, the copy.

A launch whose kernel is not compiled yet does not begin: its works are in `uncompiled` once nothing of them runs, and
come back by `resume`.

Each flight has a time at which it is due, by what GPUs and lanes do at best: bytes over a rate, behind what is queued
before. Nothing depends on it but where it pays to look. What waits for a producer is due from the start.

What is queued cannot be called back. So a work is settled when an event behind all that was queued for it has fired, also
after an error. Only a device that failed for good (its events cannot be asked) ends works at once.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

from rdma_kv.errors import LocalProtocolError, RdmaKvError
from rdma_kv.kernels.device import Device, Event, NotCompiled, Stream
from rdma_kv.kernels.programs import LANE_GB_S, rate_gb_s
from rdma_kv.kernels.work import Work

LAUNCH_BYTES: Final = 64 << 20
"""A launch takes no more once it has so many bytes: about 100 us of a kernel that outruns NVLink."""

BOUNCE_BYTES: Final = 16 << 20
"""The same where bytes go through pinned memory: 300 us of a copy over PCIe, in which the next launch is queued."""

LAUNCH_WORKS: Final = 64
"""A launch takes no more works: tables cost the host some 10 us for each, and a launch shall hold up nobody for 1 ms."""

DEPTH: Final = 64
"""No more launches on a track with so many flights. The driver takes about 1,000 entries of a stream, then it blocks."""

AHEAD_S: Final = 500e-6
"""Nor on one that has so much work behind its first flight: a launch takes the host a few hundred microseconds at worst, and
until it pays, other things are waited for more, such as the WRITE of what has landed."""

UP_DEPTH: Final = 2
"""The same for scatters whose bytes come from pinned memory: one copy runs and one waits. The tables of all launches go up by
the same copy engine, in the order in which they were queued, so that a gather would wait for all those copies."""

RING: Final = 4

_COPY_BYTE_S: Final = 1e-9 / LANE_GB_S["pinned"]

STEP_S: Final = 35e-6
"""From the call that queues a kernel or a copy to its first byte, and from its last to its event: measured on an H200."""

Result = int | None | RdmaKvError
"""A checksum (of a gather that wants one; of a scatter, the wrong one), None, or what went wrong."""

Settled = tuple["Job", Result]


class DeviceFailed(Exception):
    """The device has failed for good; nothing runs on it any more."""


@dataclass(slots=True, eq=False)
class Job:
    """A work on its way.

    Attributes:
        key: the caller's name of it.
        here: (scatter) its bytes have been copied, or that is queued, from the bounce to the slot.
        checked: (scatter) its checksum was right.
    """

    work: Work
    key: Any
    scatter: bool
    here: bool = False
    checked: bool = False


class Flight(NamedTuple):
    """Jobs that are queued on a track up to `event`. `land` says what has come of them; for others it is the next step.

    `works_s`: what the device needs for it at best, from one flight to the next.
    """

    event: Event
    jobs: Sequence[Job]
    land: Callable[[], Iterable[Settled]]
    due: float
    works_s: float


class Watch(NamedTuple):
    """An event that something waits for, and since when, or at what time, it is due."""

    event: Event
    due: float


class Uncompiled(NamedTuple):
    """Jobs whose kernel is to be compiled, by `prepare` in any thread."""

    jobs: Sequence[Job]
    prepare: Callable[[], None]


@dataclass(slots=True)
class Track:
    """A stream and its flights, oldest first.

    Attributes:
        ends: when all that is queued should be done.
        works_s: of what is queued behind the last flight; see `Flight`.
        waits_for: of a track of the ring, the ids of events.
    """

    stream: Stream
    flights: deque[Flight] = field(default_factory=deque)
    ends: float = 0.0
    works_s: float = 0.0
    waits_for: frozenset[int] = frozenset()

    @property
    def full(self) -> bool:
        return len(self.flights) >= DEPTH

    @property
    def lasts(self) -> bool:
        """Whether what is queued behind the first flight keeps the device busy for longer than a launch takes at worst: once
        that one has landed there is time enough for the next."""
        return len(self.flights) > 1 and sum(flight.works_s for flight in islice(self.flights, 1, None)) > AHEAD_S

    def fly(self, jobs: Sequence[Job], land: Callable[[], Iterable[Settled]]) -> Event:
        """Note that what is queued now is all there is for the jobs."""
        event = self.stream.record_event()
        self.flights.append(Flight(event, jobs, land, self.ends, self.works_s))
        self.works_s = 0.0
        return event

    def takes(self, seconds: float, begin: float) -> None:
        """Note that something was queued that takes so long, and begins then or behind what is queued before."""
        self.ends = max(self.ends, begin) + seconds
        self.works_s += seconds

    def landed(self) -> list[Flight]:
        """Take the flights whose event has fired.

        Raises:
            DeviceFailed: events cannot be asked any more; all flights that are not settled are still here.
        """
        count = 0
        try:
            for flight in self.flights:
                if not flight.event.query():
                    break
                count += 1
        except Exception as exc:
            raise DeviceFailed(f"an event could not be asked: {exc}") from exc
        return [self.flights.popleft() for _ in range(count)]


@dataclass(slots=True)
class Held:
    """Jobs that wait for the same producers, and those of these that had not fired at the last look.

    An event that has fired counts again if it is recorded anew.
    """

    events: tuple[Any, ...]
    since: float
    pending: Sequence[Any] = ()
    jobs: deque[Job] = field(default_factory=deque)


_Key = tuple[bool, bool, frozenset[int]]
"""Of held jobs: whether they scatter, whether they take copies, and the ids of their events."""


class Schedule:
    """All works of one device, from `add` to the results of `turn`. For one thread.

    Args:
        device: whose streams it uses.
        programs: of a launch; may be set at any time, for launches from then on.
        clock: seconds.

    Attributes:
        gathers: launches so far.
        scatters: launches so far.
        uncompiled: jobs that wait for a kernel; whoever takes them out of the list gives them to `resume`.
    """

    def __init__(self, device: Device, programs: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.programs = programs
        self.gathers = 0
        self.scatters = 0
        self.uncompiled: list[Uncompiled] = []
        self._clock = clock
        self._device = device
        self._gather, self._scatter, self._down, self._up = (Track(device.stream()) for _ in range(4))
        self._ring = tuple(Track(device.stream()) for _ in range(RING))
        self._tracks = (self._gather, self._scatter, self._down, self._up, *self._ring)
        self._ready: dict[bool, deque[Job]] = {False: deque(), True: deque()}  # by whether they scatter
        self._ways = (
            (self._ready[True], self._scatter, self._up),
            (self._ready[False], self._gather, self._down),
        )
        self._held: dict[_Key, Held] = {}
        self._settled: list[Settled] = []
        self._lost: list[Flight] = []  # given up, but the device may still use what they hold

    @property
    def flying(self) -> bool:
        """Whether anything is queued on the device."""
        return any(track.flights for track in self._tracks)

    @property
    def programs(self) -> int:
        return self._programs

    @programs.setter
    def programs(self, programs: int) -> None:
        self._programs = programs
        self._byte_s = 1e-9 / rate_gb_s(programs)

    @property
    def busy(self) -> bool:
        """Whether any work is here and not settled."""
        return bool(self.flying or self._held or self.uncompiled or any(self._ready.values()))

    @property
    def due(self) -> float:
        """When the next flight should land; infinite if none is under way but behind producers."""
        main = self._tracks[:-RING]
        return min([track.flights[0].due for track in main if track.flights], default=math.inf)

    def watched(self) -> list[Watch]:
        """The events of which one fires before the next turn finds anything new. Right after a turn."""
        found = [Watch(track.flights[0].event, track.flights[0].due) for track in self._tracks if track.flights]
        return found + [Watch(event, held.since) for held in self._held.values() for event in held.pending]

    def add(self, jobs: Iterable[Job]) -> None:
        """Take jobs up; the next turn launches what it can."""
        for job in jobs:
            if job.work.after:
                work = job.work
                copied = bool(work.bounce or work.checksum or work.expected is not None)
                key = job.scatter, copied, frozenset(map(id, work.after))
                self._held.setdefault(key, Held(job.work.after, self._clock())).jobs.append(job)
            else:
                self._ready[job.scatter].append(job)

    def resume(self, uncompiled: Uncompiled, failure: Exception | None) -> None:
        """Take jobs of `uncompiled` back: their kernel is compiled now, or they fail."""
        if failure is None:
            self._ready[uncompiled.jobs[0].scatter].extend(uncompiled.jobs)
        else:
            error = failure
            self._settled.extend((job, _error("a kernel could not be compiled", error)) for job in uncompiled.jobs)

    def turn(self) -> list[Settled]:
        """Launch what is ready, at most one launch a track, and look which flights have landed: what is settled.

        Raises:
            DeviceFailed: for good; `abandon` has all that is left.
        """
        if self._held:
            self._look_at_producers()
        for queue, track, copies in self._ways:
            if _has_room(queue, track, copies):
                self._launch(track, copies, _batch(queue))
        for track in self._tracks:
            if track.flights:
                for flight in track.landed():
                    self._settled.extend(_came_of(flight))
        settled, self._settled = self._settled, []
        return settled

    @property
    def can_launch(self) -> bool:
        """Whether the next turn launches something, whatever lands until then."""
        return any(_has_room(*way) for way in self._ways)

    def abandon(self, kind: type[LocalProtocolError], why: str, *, flights: bool) -> list[Settled]:
        """Give up the works that are not queued yet, with an error each; with `flights` those that are as well.

        Their memory may be in use as long as the device works.
        """
        waiting = [*self._ready.values(), *(held.jobs for held in self._held.values())]
        jobs = [job for queue in (*waiting, *(each.jobs for each in self.uncompiled)) for job in queue]
        self._held.clear()
        self.uncompiled.clear()
        for queue in self._ready.values():
            queue.clear()
        if flights:
            for track in self._tracks:
                jobs.extend(job for flight in track.flights for job in flight.jobs)
                self._lost.extend(track.flights)
                track.flights.clear()
        settled, self._settled = self._settled, []
        return settled + [(job, kind(why)) for job in jobs]

    # --- producers -----------------------------------------------------------------------------------------------------

    def _look_at_producers(self) -> None:
        """Sort the held works: ready, onto the ring, or not yet."""
        for key, held in list(self._held.items()):
            try:
                held.pending = pending = [event for event in held.events if not event.query()]
            except Exception as exc:  # noqa: BLE001 - not an event, or the device has failed: `landed` finds out which
                del self._held[key]
                text = f"an event in `after` cannot be asked: {exc}"
                self._settled.extend((job, _error(text, exc)) for job in held.jobs)
                continue
            if not pending:
                self._ready[key[0]].extend(held.jobs)
                del self._held[key]
            elif (track := self._track_for(key)) is not None:
                track.waits_for = key[2]
                track.ends = self._clock()
                self._launch(track, track, _batch(held.jobs), pending)
                if not held.jobs:
                    del self._held[key]

    def _track_for(self, key: _Key) -> Track | None:
        """A free track of the ring, unless one waits for the same: then its producer is slow, and others need the rest."""
        _, copied, waits_for = key
        if copied or any(track.flights and track.waits_for == waits_for for track in self._ring):
            return None
        return next((track for track in self._ring if not track.flights), None)

    # --- launches ------------------------------------------------------------------------------------------------------

    def _launch(self, track: Track, copies: Track, jobs: Sequence[Job], after: Sequence[Any] = ()) -> None:
        """Queue what the jobs, all of one kind, need next. An error settles them, once nothing of them runs any more.

        Args:
            after: events that the kernel waits for; of jobs that take no copy.

        Raises:
            DeviceFailed: for good.
        """
        flying = set(jobs)
        try:
            steps = self._scatter_steps if jobs[0].scatter else self._gather_steps
            for flown in steps(track, copies, jobs, after):
                flying.difference_update(flown)
        except Exception as exc:  # noqa: BLE001 - it is the result of the works
            error = exc
            rest = [job for job in jobs if job in flying]
            try:
                if copies is not track:
                    track.stream.wait_event(copies.stream.record_event())
                track.takes(0, max(copies.ends, self._clock()) + STEP_S)
                track.fly(rest, lambda: self._not_launched(rest, error))
            except Exception as failure:
                self._settled.extend((job, _error("a launch failed", error)) for job in rest)
                raise DeviceFailed(f"a launch failed: {error}; then: {failure}") from failure

    def _not_launched(self, jobs: Sequence[Job], error: Exception) -> Sequence[Settled]:
        if isinstance(error, NotCompiled):
            self.uncompiled.append(Uncompiled(jobs, error.prepare))
            return ()
        return [(job, _error("a launch failed", error)) for job in jobs]

    def _gather_steps(
        self, track: Track, copies: Track, jobs: Sequence[Job], after: Sequence[Any]
    ) -> Iterator[Sequence[Job]]:
        """Gather, and copy to the bounces. Yields the jobs that fly."""
        sums = self._device.gather([job.work for job in jobs], track.stream, self._programs, after)
        self.gathers += 1
        self._runs(track, jobs)
        found: list[int | None] = []

        def result(place: int) -> int | None:
            if not found:
                found.extend(sums())
            return found[place]

        direct = [(job, place) for place, job in enumerate(jobs) if not job.work.bounce]
        if direct:
            yield self._fly(track, [job for job, _ in direct], lambda: [(job, result(place)) for job, place in direct])
        if len(direct) == len(jobs):
            return
        if copies is not track:
            copies.stream.wait_event(track.stream.record_event())
        copies.takes(0, track.ends + STEP_S)
        for place, job in enumerate(jobs):
            if job.work.bounce:
                chunk = job.work.chunk
                self._device.copy(job.work.bounce, chunk.packed_address, chunk.packed_bytes, copies.stream)
                copies.takes(chunk.packed_bytes * _COPY_BYTE_S, self._clock() + STEP_S)
                yield self._fly(copies, [job], lambda job=job, place=place: [(job, result(place))])  # type: ignore[misc]

    def _scatter_steps(
        self, track: Track, copies: Track, jobs: Sequence[Job], after: Sequence[Any]
    ) -> Iterator[Sequence[Job]]:
        """Copy from the bounces; sum up what is to be checked; scatter the rest. Yields the jobs that fly."""
        copied = [job for job in jobs if job.work.bounce and not job.here]
        for job in copied:
            chunk = job.work.chunk
            self._device.copy(chunk.packed_address, job.work.bounce, chunk.packed_bytes, copies.stream)
            copies.takes(chunk.packed_bytes * _COPY_BYTE_S, self._clock() + STEP_S)
            job.here = True
        if copied and copies is not track:
            track.stream.wait_event(copies.stream.record_event())
            track.takes(0, copies.ends + STEP_S)
        unchecked = [job for job in jobs if job.work.expected is not None and not job.checked]
        if unchecked:
            sums = self._device.sums([job.work for job in unchecked], track.stream, self._programs)
            self._runs(track, unchecked)
            yield self._fly(track, unchecked, lambda: self._check(unchecked, sums()))
        good = [job for job in jobs if job.work.expected is None or job.checked]
        if good:
            self._device.scatter([job.work.chunk for job in good], track.stream, self._programs, after)
            self.scatters += 1
            self._runs(track, good)
            yield self._fly(track, good, lambda: [(job, None) for job in good])

    def _runs(self, track: Track, jobs: Sequence[Job]) -> None:
        """Note that a kernel was queued."""
        num_bytes = sum([job.work.chunk.packed_bytes for job in jobs])
        track.takes(num_bytes * self._byte_s, self._clock() + STEP_S)

    def _fly(self, track: Track, jobs: Sequence[Job], land: Callable[[], Iterable[Settled]]) -> Sequence[Job]:
        track.fly(jobs, land)
        return jobs

    def _check(self, jobs: Sequence[Job], sums: Sequence[int | None]) -> Iterator[Settled]:
        """Those with the right checksum are to be scattered, before later ones."""
        right = []
        for job, found in zip(jobs, sums, strict=True):
            if found == job.work.expected:
                job.checked = True
                right.append(job)
            else:
                yield job, found
        self._ready[True].extendleft(reversed(right))


def _has_room(queue: Sequence[Job], track: Track, copies: Track) -> bool:
    """Whether the first of the queue can be launched now."""
    if not queue or track.full or copies.full or track.lasts:
        return False
    first = queue[0]
    comes_up = first.scatter and first.work.bounce and not first.here
    return not comes_up or len(track.flights) < UP_DEPTH


def _batch(queue: deque[Job]) -> list[Job]:
    """Take what goes into one launch: everything, or as much as is not worth waiting for the rest.

    Nothing is taken if this raises, for a chunk that has no size: who is in no queue and in no flight would never be told.
    """
    jobs: list[Job] = []
    num_bytes = bounced_bytes = 0
    for job in queue:
        if len(jobs) >= LAUNCH_WORKS or num_bytes >= LAUNCH_BYTES or bounced_bytes >= BOUNCE_BYTES:
            break
        num_bytes += job.work.chunk.packed_bytes
        bounced_bytes += job.work.chunk.packed_bytes if job.work.bounce else 0
        jobs.append(job)
    for _ in jobs:
        queue.popleft()
    return jobs


def _came_of(flight: Flight) -> list[Settled]:
    """What has come of a flight that has landed. It is in no track any more, so an error has to be told here."""
    try:
        return list(flight.land())
    except Exception as exc:  # noqa: BLE001 - it is the result of the works
        return [(job, _error("what came of a launch cannot be read", exc)) for job in flight.jobs]


def _error(text: str, exc: Exception) -> RdmaKvError:
    """What a work's caller is told of `exc`; ours as it is."""
    if isinstance(exc, RdmaKvError):
        return exc
    error = LocalProtocolError(f"{text}: {exc}")
    error.__cause__ = exc
    return error
