"""The WRITEs of one NIXL agent: cutting, posting, completion. Lives on the owner thread.

Theory of operation. A WRITE is cut into posts. Each has one kind of memory on either side: a list of descriptors of
NIXL's is of the host or of GPUs. Between hosts a post has at most 4 MiB: over CMA the copy runs inside the posting call,
over tcp one progress call of the target takes in all that is under way. What a GPU or a NIC copies by itself costs
neither: there a post has up to 1 GiB. Several posts are in flight, up to a window of each kind, and WRITEs take turns.
The last post of a WRITE waits for all others of it and carries the notification, which NIXL sends when *we* see its
completion.

A post that failed is not cancelled, since NIXL cannot: its handle is kept until the agent ends. Handles of finished
posts are released at once. Each handle is a reference to the agent: `close` gives them all up, so that it can end.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rdma_kv.errors import TransportError
from rdma_kv.transport.base import NOT_POSTED, WritePair
from rdma_kv.transport.nixl_owner import BACKEND, Nixl, NixlAgent, NixlHandle, Settle, translate
from rdma_kv.transport.regions import Piece, batches

POST_BYTES: Final = 4 << 20  # 1.5 to 3 ms inside the call, over CMA
POST_PIECES: Final = 4096  # descriptors of one post
DEVICE_POST_BYTES: Final = 1 << 30  # with memory of a GPU; over NVLink one of 64 MiB reaches four fifths of the rate
_WINDOW_BYTES: Final = 16 << 20  # in flight at once: what one progress call of the target may have to take in
_DEVICE_WINDOW_BYTES: Final = 2 << 30  # with memory of a GPU: what a fence may have to wait for, 7 ms over NVLink
_WINDOW_POSTS: Final = 64


class Batch(NamedTuple):
    """What one post carries, from one device (see `Descriptor.device`) to one device of the peer's."""

    pieces: list[Piece]
    local_device: int = 0
    remote_device: int = 0

    @property
    def on_device(self) -> bool:
        """Whether memory of a GPU is on either side."""
        return bool(self.local_device or self.remote_device)


def memory_of(device: int) -> tuple[str, int]:
    """NIXL's words for a device: the kind of memory, and its number among those of that kind."""
    return ("VRAM", device - 1) if device else ("DRAM", 0)


def cut(pairs: Iterable[WritePair]) -> Iterator[Batch]:
    """The posts of a WRITE of checked pairs, in order within each pair of devices. Looks at all pairs at the first."""
    groups: dict[tuple[int, int], list[WritePair]] = {}
    for pair in pairs:
        groups.setdefault((pair.local.device, pair.remote.device), []).append(pair)
    for devices, group in groups.items():
        post_bytes = DEVICE_POST_BYTES if any(devices) else POST_BYTES
        for pieces in batches(group, post_bytes, POST_PIECES):
            yield Batch(pieces, *devices)


@dataclass(slots=True, eq=False)
class _Post:
    """One NIXL transfer in flight."""

    handle: NixlHandle
    length_bytes: int
    on_device: bool


@dataclass(slots=True, eq=False)
class _Write:
    """A WRITE under way: what is still to be posted, what is in flight."""

    batches: Iterator[Batch]
    target: str  # the peer's NIXL agent
    notification: bytes
    settle: Settle
    next: Batch | None = None
    after: Batch | None = None  # the one after `next`: None says that `next` is the last
    posts: list[_Post] = field(default_factory=list)
    touched: bool = False  # something was handed to NIXL

    def __post_init__(self) -> None:
        self.advance()
        self.advance()

    def advance(self) -> None:
        self.next, self.after = self.after, next(self.batches, None)

    @property
    def done(self) -> bool:
        return self.next is None and not self.posts


class WriteQueue:
    """All WRITEs of one agent.

    Args:
        nixl: the loaded wrapper.
        agent: the NIXL agent; `close` gives it up.
        name: for messages.
    """

    def __init__(self, nixl: Nixl, agent: NixlAgent, name: str) -> None:
        self._nixl = nixl
        self._agent = agent
        self._name = name
        self._writes: deque[_Write] = deque()
        self._kept: list[_Post] = []

    def __len__(self) -> int:
        return len(self._writes)

    @property
    def on_device(self) -> bool:
        """Whether a GPU may still be at work for what was posted."""
        return any(post.on_device for post in self._posts()) or any(post.on_device for post in self._kept)

    def add(self, work: Iterator[Batch], target: str, notification: bytes, settle: Settle) -> None:
        """Queue a WRITE of the batches `work`, at least one, to NIXL agent `target`; `turn` posts it."""
        self._writes.append(_Write(work, target, notification, settle))

    def turn(self) -> bool:
        """Reap completions, then post what the window allows. True if something moved."""
        moved = False
        for write in tuple(self._writes):
            moved = self._reap(write) or moved
        return self._post_some() or moved

    def abandon(self, error: TransportError) -> None:
        """End all with `error`."""
        for write in tuple(self._writes):
            self._fail(write, error)

    def see_devices_done(self) -> None:
        """Let UCX see, before its end, that GPUs are done, so that it ends without a copy of theirs under way."""
        for post in (*self._posts(), *self._kept):
            if post.on_device:
                with contextlib.suppress(*self._nixl.errors):
                    self._agent.check_xfer_state(post.handle)

    def close(self) -> None:
        """Let go of the agent and of all handles, to be followed by the agent's end, which alone stops their posts.

        Then `abandon` is all that may be called: WRITEs end after the agent, so that what they are told is true.
        """
        for write in self._writes:
            self._kept += write.posts
            write.posts = []
        for post in self._kept:
            self._release(post.handle)
        self._kept.clear()
        del self._agent

    def _reap(self, write: _Write) -> bool:
        """Release the finished posts of `write`. True if any, or if it failed."""
        before, write.posts = write.posts, []
        for place, post in enumerate(before):
            try:
                done = self._agent.check_xfer_state(post.handle) == "DONE"
            except self._nixl.errors as error:
                write.posts += before[place:]
                self._fail(write, translate(error, f"a WRITE of {self._name} failed"))
                return True
            if done:
                self._release(post.handle)
            else:
                write.posts.append(post)
        if write.done:
            self._end(write, None)
        return len(write.posts) < len(before)

    def _post_some(self) -> bool:
        """Post at most one batch of each WRITE, and 4 MiB between hosts in all. True if anything was posted, or failed."""
        budget_bytes, posted = POST_BYTES, False
        for write in tuple(self._writes):
            batch = write.next
            if batch is not None and (budget_bytes > 0 or batch.on_device) and self._may_post(write, batch):
                self._writes.rotate(-1)
                length_bytes = self._post(write, batch)
                budget_bytes -= 0 if batch.on_device else length_bytes
                posted = True
        return posted

    def _may_post(self, write: _Write, batch: Batch) -> bool:
        if write.after is None and write.posts:
            return False  # the last post waits for the others
        posts = self._posts()
        window_bytes = _DEVICE_WINDOW_BYTES if batch.on_device else _WINDOW_BYTES
        in_flight_bytes = sum(post.length_bytes for post in posts if post.on_device == batch.on_device)
        return len(posts) < _WINDOW_POSTS and in_flight_bytes < window_bytes

    def _posts(self) -> list[_Post]:
        return [post for write in self._writes for post in write.posts]

    def _post(self, write: _Write, batch: Batch) -> int:
        """Post `batch`, the next one of `write`. Its length in bytes."""
        length_bytes = sum(piece[2] for piece in batch.pieces)
        try:
            handle = self._make_handle(write, batch)
            write.posts.append(_Post(handle, length_bytes, batch.on_device))
            write.touched = True
            self._agent.transfer(handle)  # "DONE" here is seen by the next `_reap` too
        except self._nixl.errors as error:
            self._fail(write, translate(error, f"a WRITE of {self._name} could not be posted"))
        else:
            write.advance()
        return length_bytes

    def _make_handle(self, write: _Write, batch: Batch) -> NixlHandle:
        # [pieces, (local, remote, bytes)]; as tuples: a hundred times slower
        table = np.array(batch.pieces, dtype=np.uint64)
        local = self._descriptors(table[:, 0], table[:, 2], batch.local_device)
        remote = self._descriptors(table[:, 1], table[:, 2], batch.remote_device)
        notification = write.notification if write.after is None else b""
        return self._agent.initialize_xfer("WRITE", local, remote, write.target, notification)

    def _descriptors(self, addresses: NDArray[np.uint64], lengths: NDArray[np.uint64], device: int) -> object:
        kind, number = memory_of(device)
        numbers = np.full(len(addresses), number, dtype=np.uint64)
        return self._agent.get_xfer_descs(np.column_stack((addresses, lengths, numbers)), kind)

    def _fail(self, write: _Write, error: TransportError) -> None:
        """Keep the handles of `write`: what they posted may still be read and still land."""
        self._kept += write.posts
        write.posts = []
        if not write.touched:
            cause, error = error, TransportError(BACKEND, NOT_POSTED, f"nothing of a WRITE of {self._name} was posted")
            error.__cause__ = cause
        self._end(write, error)

    def _end(self, write: _Write, error: TransportError | None) -> None:
        self._writes.remove(write)
        write.settle(error)

    def _release(self, handle: NixlHandle) -> None:
        with contextlib.suppress(*self._nixl.errors):  # in flight: then the agent's end takes it along
            handle.release()
