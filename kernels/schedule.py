"""Which work goes on which stream of a GPU and when, and what has come of it. No thread, no clock, no torch.

A *track* is a stream with its *flights*: groups of works that are queued on it, each with an event behind it. Flights of a
track land in order, so only the first of each is looked at. The tracks, all of one priority:

* `gather` and `scatter`: works whose producers are done. One launch takes all that are ready, up to a bound.
* `down` and `up`: copies between slots on the GPU and pinned memory. A gather's copies wait for its event on the GPU, each
  has an event of its own, so the first chunk's WRITE starts while the second is copied. A scatter waits for its copies.
* four in a ring: works whose producer's event has not fired. All works of the same events take the same track of the ring,
  with their copies, so a slow producer holds up nobody else. When the ring is full, works are held back on the host
  until their events fire or a track is free: then nobody waits for a stranger either.

A scatter that has a checksum to check is launched twice: the sums, then, once they were read here and were right, the copy.

What is queued cannot be called back. So a work is settled when an event behind all that was queued for it has fired, also
after an error. Only a device that failed for good (its events cannot be asked) ends works at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from rdma_kv.errors import LocalProtocolError, RdmaKvError
from rdma_kv.kernels.device import Device, Event, Stream
from rdma_kv.kernels.work import Work

LAUNCH_BYTES: Final = 64 << 20
"""A launch takes no more once it has so many bytes: about 100 us of a kernel that outruns NVLink."""

BOUNCE_BYTES: Final = 16 << 20
"""The same where bytes go through pinned memory: 300 us of a copy over PCIe, in which the next launch is queued."""

LAUNCH_WORKS: Final = 128
"""A launch takes no more works: a launch's tables cost the host some 10 us for each."""

DEPTH: Final = 64
"""No more launches on a track with so many flights. The driver takes about 1,000 entries of a stream, then it blocks."""

RING: Final = 4

Result = int | None | RdmaKvError
"""A checksum (of a gather that wants one; of a scatter, the wrong one), None, or what went wrong."""

Done = Callable[[Sequence[tuple[Any, Result]]], None]
"""Takes the keys of works that are settled, with their results."""

Settled = tuple["Job", Result]


class DeviceFailed(Exception):
    """The device has failed for good; nothing runs on it any more."""


@dataclass(slots=True, eq=False)
class Job:
    """A work on its way.

    Attributes:
        key: the caller's name of it.
        done: whom to tell.
        here: (scatter) its bytes have been copied, or that is queued, from the bounce to the slot.
        checked: (scatter) its checksum was right.
    """

    work: Work
    key: Any
    done: Done
    scatter: bool
    here: bool = False
    checked: bool = False


@dataclass(frozen=True, slots=True)
class Flight:
    """Jobs that are queued on a track up to `event`. `land` says what has come of them; for others it is the next step."""

    event: Event
    jobs: Sequence[Job]
    land: Callable[[], Iterable[Settled]]


@dataclass(slots=True)
class Track:
    """A stream and its flights, oldest first. `waits_for`: of a track of the ring, which events."""

    stream: Stream
    flights: deque[Flight] = field(default_factory=deque)
    waits_for: frozenset[int] = frozenset()

    @property
    def full(self) -> bool:
        return len(self.flights) >= DEPTH

    def fly(self, jobs: Sequence[Job], land: Callable[[], Iterable[Settled]]) -> Event:
        """Note that what is queued now is all there is for the jobs."""
        event = self.stream.record_event()
        self.flights.append(Flight(event, jobs, land))
        return event

    def landed(self) -> Iterator[Flight]:
        """Take the flights whose event has fired.

        Raises:
            DeviceFailed: events cannot be asked any more.
        """
        while self.flights:
            try:
                fired = self.flights[0].event.query()
            except Exception as exc:
                raise DeviceFailed(f"an event could not be asked: {exc}") from exc
            if not fired:
                return
            yield self.flights.popleft()


@dataclass(slots=True)
class Held:
    """Jobs that wait for the same producers. An event that has fired counts again if it is recorded anew."""

    events: tuple[Any, ...]
    jobs: deque[Job] = field(default_factory=deque)


class Schedule:
    """All works of one device, from `add` to the results of `turn`. For one thread.

    Args:
        device: whose streams it uses.
        programs: of a launch; may be set at any time, for launches from then on.

    Attributes:
        gathers: launches so far.
        scatters: launches so far.
    """

    def __init__(self, device: Device, programs: int) -> None:
        self.programs = programs
        self.gathers = 0
        self.scatters = 0
        self._device = device
        self._gather, self._scatter, self._down, self._up = (Track(device.stream()) for _ in range(4))
        self._ring = tuple(Track(device.stream()) for _ in range(RING))
        self._tracks = (self._gather, self._scatter, self._down, self._up, *self._ring)
        self._ready: dict[bool, deque[Job]] = {False: deque(), True: deque()}  # by whether they scatter
        self._held: dict[tuple[bool, frozenset[int]], Held] = {}  # by that and the ids of their events
        self._settled: list[Settled] = []
        self._lost: list[Flight] = []  # given up, but the device may still use what they hold

    @property
    def flying(self) -> bool:
        """Whether anything is queued on the device."""
        return any(track.flights for track in self._tracks)

    @property
    def busy(self) -> bool:
        """Whether any work is not settled."""
        return bool(self.flying or self._held or any(self._ready.values()))

    def add(self, jobs: Iterable[Job]) -> None:
        """Take jobs up; the next turn launches what it can."""
        for job in jobs:
            if job.work.after:
                key = job.scatter, frozenset(map(id, job.work.after))
                self._held.setdefault(key, Held(job.work.after)).jobs.append(job)
            else:
                self._ready[job.scatter].append(job)

    def turn(self) -> list[Settled]:
        """Launch what is ready, at most one launch a track, and look which flights have landed: what is settled.

        Raises:
            DeviceFailed: for good; `abandon` has all that is left.
        """
        self._look_at_producers()
        for scatter, track, copies in ((True, self._scatter, self._up), (False, self._gather, self._down)):
            if self._ready[scatter] and not track.full and not copies.full:
                self._launch(track, copies, _batch(self._ready[scatter]))
        for track in self._tracks:
            for flight in track.landed():
                self._settled.extend(flight.land())
        settled, self._settled = self._settled, []
        return settled

    @property
    def can_launch(self) -> bool:
        """Whether the next turn launches something, whatever lands until then."""
        pairs = ((True, self._scatter, self._up), (False, self._gather, self._down))
        return any(self._ready[scatter] and not (track.full or copies.full) for scatter, track, copies in pairs)

    def abandon(self, kind: type[LocalProtocolError], why: str, *, flights: bool) -> list[Settled]:
        """Give up the works that are not queued yet, with an error each; with `flights` those that are as well.

        Their memory may be in use as long as the device works.
        """
        jobs = [job for queue in (*self._ready.values(), *(held.jobs for held in self._held.values())) for job in queue]
        self._held.clear()
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
                pending = [event for event in held.events if not event.query()]
                track = self._track_for(key[1]) if pending else None
                if track is not None and not track.full:
                    track.waits_for = key[1]
                    for event in pending:  # again for each launch: it may have been recorded anew
                        track.stream.wait_event(event)
            except Exception as exc:  # noqa: BLE001 - not an event, or the device has failed: `landed` finds out which
                del self._held[key]
                text = f"an event in `after` cannot be waited for: {exc}"
                self._settled.extend((job, _error(text, exc)) for job in held.jobs)
                continue
            if not pending:
                self._ready[key[0]].extend(held.jobs)
                del self._held[key]
            elif track is not None and not track.full:
                self._launch(track, track, _batch(held.jobs))
                if not held.jobs:
                    del self._held[key]

    def _track_for(self, waits_for: frozenset[int]) -> Track | None:
        """The track of the ring that waits for the same, or a free one."""
        flying = [track for track in self._ring if track.flights]
        same = next((track for track in flying if track.waits_for == waits_for), None)
        return same or next((track for track in self._ring if not track.flights), None)

    # --- launches ------------------------------------------------------------------------------------------------------

    def _launch(self, track: Track, copies: Track, jobs: Sequence[Job]) -> None:
        """Queue what the jobs, all of one kind, need next. An error settles them, once nothing of them runs any more.

        Raises:
            DeviceFailed: for good.
        """
        flying = set(jobs)
        try:
            steps = self._scatter_steps if jobs[0].scatter else self._gather_steps
            for flown in steps(track, copies, jobs):
                flying.difference_update(flown)
        except Exception as exc:  # noqa: BLE001 - it is the result of the works
            error = exc
            rest = [job for job in jobs if job in flying]
            try:
                if copies is not track:
                    track.stream.wait_event(copies.stream.record_event())
                track.fly(rest, lambda: [(job, _error("a launch failed", error)) for job in rest])
            except Exception as failure:
                self._settled.extend((job, _error("a launch failed", error)) for job in rest)
                raise DeviceFailed(f"a launch failed: {error}; then: {failure}") from failure

    def _gather_steps(self, track: Track, copies: Track, jobs: Sequence[Job]) -> Iterator[Sequence[Job]]:
        """Gather, and copy to the bounces. Yields the jobs that fly."""
        self.gathers += 1
        sums = self._device.gather([job.work for job in jobs], track.stream, self.programs)
        found: list[int | None] = []

        def result(place: int) -> int | None:
            if not found:
                found.extend(sums())
            return found[place]

        direct = [(job, place) for place, job in enumerate(jobs) if not job.work.bounce]
        if direct:
            yield self._fly(track, [job for job, _ in direct], lambda: [(job, result(place)) for job, place in direct])
        if len(direct) < len(jobs) and copies is not track:
            copies.stream.wait_event(track.stream.record_event())
        for place, job in enumerate(jobs):
            if job.work.bounce:
                chunk = job.work.chunk
                self._device.copy(job.work.bounce, chunk.packed_address, chunk.packed_bytes, copies.stream)
                yield self._fly(copies, [job], lambda job=job, place=place: [(job, result(place))])  # type: ignore[misc]

    def _scatter_steps(self, track: Track, copies: Track, jobs: Sequence[Job]) -> Iterator[Sequence[Job]]:
        """Copy from the bounces; sum up what is to be checked; scatter the rest. Yields the jobs that fly."""
        copied = [job for job in jobs if job.work.bounce and not job.here]
        for job in copied:
            chunk = job.work.chunk
            self._device.copy(chunk.packed_address, job.work.bounce, chunk.packed_bytes, copies.stream)
            job.here = True
        if copied and copies is not track:
            track.stream.wait_event(copies.stream.record_event())
        unchecked = [job for job in jobs if job.work.expected is not None and not job.checked]
        if unchecked:
            sums = self._device.sums([job.work for job in unchecked], track.stream, self.programs)
            yield self._fly(track, unchecked, lambda: self._check(unchecked, sums()))
        good = [job for job in jobs if job.work.expected is None or job.checked]
        if good:
            self.scatters += 1
            self._device.scatter([job.work.chunk for job in good], track.stream, self.programs)
            yield self._fly(track, good, lambda: [(job, None) for job in good])

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


def _batch(queue: deque[Job]) -> list[Job]:
    """Take what goes into one launch: everything, or as much as is not worth waiting for the rest."""
    jobs: list[Job] = []
    num_bytes = bounced_bytes = 0
    while queue and len(jobs) < LAUNCH_WORKS and num_bytes < LAUNCH_BYTES and bounced_bytes < BOUNCE_BYTES:
        job = queue.popleft()
        num_bytes += job.work.chunk.packed_bytes
        bounced_bytes += job.work.chunk.packed_bytes if job.work.bounce else 0
        jobs.append(job)
    return jobs


def _error(text: str, exc: Exception) -> RdmaKvError:
    """What a work's caller is told of `exc`; ours as it is."""
    if isinstance(exc, RdmaKvError):
        return exc
    error = LocalProtocolError(f"{text}: {exc}")
    error.__cause__ = exc
    return error
