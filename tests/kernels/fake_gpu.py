"""A GPU that a test drives: streams are queues of what was asked for, and run when they are told to, on host memory.

What is queued runs in the order of its stream and waits for events as CUDA does, so a step that is queued on the wrong
stream, or does not wait for what it needs, moves the wrong bytes here too. Kernels are those of `reference`.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import deque
from typing import ClassVar

import numpy as np

from rdma_kv.kernels import reference
from rdma_kv.kernels.checksum import Piece, checksums
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.work import Work


class FakeEvent:
    """Fired by its stream, or by a test that plays the producer. `waits` counts who waits for it on the device."""

    def __init__(self, gpu, fired=False):
        self.gpu, self.fired, self.waits, self.queries = gpu, fired, 0, 0

    def query(self):
        self.queries += 1
        self.gpu.check()
        if self.gpu.runs_by_itself:
            self.gpu.run()
        return self.fired

    def fire(self):
        with self.gpu.lock:
            self.fired = True


class FakeStream:
    def __init__(self, gpu, number):
        self.gpu, self.number, self.queue = gpu, number, deque()

    def wait_event(self, event):
        event.waits += 1
        self.queue.append(("wait", event))

    def record_event(self):
        self.gpu.check()
        event = FakeEvent(self.gpu)
        self.queue.append(("record", event))
        return event


class FakeGpu:
    """A `Device`.

    Attributes:
        ran: what ran: (kind, number of works, number of the stream).
        runs_by_itself: whenever an event is asked, as a GPU does; otherwise only in `run`.
        refuse: an exception for the next call that queues a kernel or copy, by its name.
        dead: a failure for good: events can neither be made nor asked.
        inside: threads that are inside `current`.
        strict: what queues a kernel or copy must be inside `current`.
    """

    def __init__(self, *, runs_by_itself=False):
        self.streams, self.ran, self.refuse = [], [], {}
        self.runs_by_itself, self.dead, self.closed, self.programs = runs_by_itself, False, False, []
        self.lock = threading.RLock()
        self.inside, self.strict = set(), False

    def check(self):
        if self.dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def enter(self):
        self.thread = threading.current_thread()

    @contextlib.contextmanager
    def current(self):
        thread = threading.current_thread()
        assert thread not in self.inside
        self.inside.add(thread)
        try:
            yield
        finally:
            self.inside.remove(thread)

    def stream(self):
        self.streams.append(FakeStream(self, len(self.streams)))
        return self.streams[-1]

    def event(self, fired=False):
        return FakeEvent(self, fired)

    def _queue(self, kind, stream, count, action):
        self.check()
        assert not self.strict or threading.current_thread() in self.inside
        if kind in self.refuse:
            raise self.refuse.pop(kind)
        with self.lock:
            stream.queue.append((kind, (count, action)))

    def _wait(self, stream, after):
        for event in after:
            stream.wait_event(event)

    def gather(self, works, stream, programs, after):
        chunks = [work.chunk for work in works]
        for chunk in chunks:
            chunk.validate()
        self.programs.append(programs)
        self._wait(stream, after)
        self._queue("gather", stream, len(chunks), lambda: reference.gather(chunks))
        wanted = [work for work in works if work.checksum]
        sums = self.sums(wanted, stream, programs) if wanted else list

        def spread():
            found = iter(sums())
            return [next(found) if work.checksum else None for work in works]

        return spread

    def scatter(self, chunks, stream, programs, after):
        self.programs.append(programs)
        self._wait(stream, after)
        chunks = list(chunks)
        self._queue("scatter", stream, len(chunks), lambda: reference.scatter(chunks))

    def sums(self, works, stream, programs):
        found = []
        pieces = [Piece(work.chunk.packed_address, work.chunk.packed_bytes) for work in works]
        self._queue("sums", stream, len(works), lambda: found.extend(checksums(pieces)))

        def read():
            assert len(found) == len(pieces), "read before its event"
            return found

        return read

    def copy(self, dst, src, length_bytes, stream):
        self._queue("copy", stream, 1, lambda: ctypes.memmove(dst, src, length_bytes))

    def warm(self, programs):
        self.programs.append(programs)

    def close(self):
        assert not any(stream.queue for stream in self.streams), "streams dropped under work"
        self.closed = True

    def run(self, *streams, steps=1 << 30):
        """Run these streams, or all, until all of them wait or are empty; at most so many steps of each."""
        with self.lock:
            left = [[stream, steps] for stream in streams or self.streams]
            moved = True
            while moved:
                moved = False
                for each in left:
                    while each[1] and self._step(each[0]):
                        each[1] -= 1
                        moved = True

    def _step(self, stream):
        if not stream.queue:
            return False
        kind, what = stream.queue[0]
        if kind == "wait":
            if not what.fired:
                return False
        elif kind == "record":
            what.fired = True
        else:
            count, action = what
            action()
            self.ran.append((kind, count, stream.number))
        stream.queue.popleft()
        return True


class Case:
    """One chunk: two planes of rows in a pool of random bytes, in random order, with a slot and a bounce of its own."""

    kept: ClassVar = []  # a chunk keeps no memory, and a test may drop the case before the GPU has run

    def __init__(self, seed=0, tokens=8, row_bytes=64):
        self.kept.append(self)
        rng = np.random.default_rng(seed)
        self.pool = rng.integers(0, 256, (2, 4 * tokens, row_bytes), dtype=np.uint8)
        self.slot, self.bounce = (np.zeros(2 * tokens * row_bytes, np.uint8) for _ in range(2))
        self.rows = rng.permutation(4 * tokens)[:tokens]
        self.chunk = Chunk(
            packed_address=self.slot.ctypes.data,
            pointers=np.array([[plane.ctypes.data for plane in self.pool]], np.int64),
            token_pool=np.zeros(tokens, np.int32),
            token_offset=self.rows.astype(np.int64) * row_bytes,
            heads=1,
            head_stride=row_bytes,
            row_bytes=row_bytes,
        )

    def work(self, *, bounce=False, **more):
        return Work(self.chunk, bounce=self.bounce.ctypes.data if bounce else 0, **more)

    @property
    def paged(self):
        """What stands in the chunk's rows of the pool now, in packed order."""
        return self.pool[:, self.rows].reshape(-1)

    @property
    def checksum(self):
        return checksums([Piece(self.chunk.packed_address, self.chunk.packed_bytes)])[0]
