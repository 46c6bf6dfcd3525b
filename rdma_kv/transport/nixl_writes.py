"""The WRITEs of one NIXL agent: cutting, posting, completion. Lives on the owner thread.

Theory of operation. A WRITE is cut into posts of at most 4 MiB: over CMA the copy runs inside the posting call, over tcp
one progress call of the target takes in all that is under way. Several posts are in flight, up to a window, and WRITEs
take turns. The last post of a WRITE waits for all others of it and carries the notification, which NIXL sends when *we*
see its completion.

A post that failed is not cancelled, since NIXL cannot: its handle is kept until the agent ends. Handles of finished
posts are released at once. Each handle is a reference to the agent: `close` gives them all up, so that it can end.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rdma_kv.errors import TransportError
from rdma_kv.transport.base import NOT_POSTED
from rdma_kv.transport.nixl_owner import BACKEND, Nixl, NixlAgent, NixlHandle, Settle, translate
from rdma_kv.transport.regions import Piece

POST_BYTES = 4 << 20  # 1.5 to 3 ms inside the call, over CMA
POST_PIECES = 4096  # descriptors of one post
_WINDOW_BYTES = 16 << 20  # in flight at once: what one progress call of the target may have to take in
_WINDOW_POSTS = 64


@dataclass(slots=True, eq=False)
class _Post:
    """One NIXL transfer in flight."""

    handle: NixlHandle
    length_bytes: int


@dataclass(slots=True, eq=False)
class _Write:
    """A WRITE under way: what is still to be posted, what is in flight."""

    batches: Iterator[list[Piece]]
    target: str  # the peer's NIXL agent
    notification: bytes
    settle: Settle
    next: list[Piece] | None = None
    after: list[Piece] | None = None  # the one after `next`: None says that `next` is the last
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
        self._kept: list[NixlHandle] = []

    def __len__(self) -> int:
        return len(self._writes)

    def add(self, work: Iterator[list[Piece]], target: str, notification: bytes, settle: Settle) -> None:
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

    def close(self) -> None:
        """Let go of the agent and of all handles, to be followed by the agent's end, which alone stops their posts.

        Then `abandon` is all that may be called: WRITEs end after the agent, so that what they are told is true.
        """
        for write in self._writes:
            self._kept += [post.handle for post in write.posts]
            write.posts = []
        for handle in self._kept:
            self._release(handle)
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
        """Post at most one batch of each WRITE and 4 MiB in all. True if anything was posted, or failed."""
        budget_bytes = POST_BYTES
        for write in tuple(self._writes):
            if budget_bytes > 0 and write.next is not None and self._may_post(write):
                self._writes.rotate(-1)
                budget_bytes -= self._post(write, write.next)
        return budget_bytes < POST_BYTES

    def _may_post(self, write: _Write) -> bool:
        if write.after is None and write.posts:
            return False  # the last post waits for the others
        posts = [post for other in self._writes for post in other.posts]
        return len(posts) < _WINDOW_POSTS and sum(post.length_bytes for post in posts) < _WINDOW_BYTES

    def _post(self, write: _Write, pieces: list[Piece]) -> int:
        """Post `pieces`, the next batch of `write`. Its length in bytes."""
        length_bytes = sum(piece[2] for piece in pieces)
        try:
            handle = self._make_handle(write, pieces)
            write.posts.append(_Post(handle, length_bytes))
            write.touched = True
            self._agent.transfer(handle)  # "DONE" here is seen by the next `_reap` too
        except self._nixl.errors as error:
            self._fail(write, translate(error, f"a WRITE of {self._name} could not be posted"))
        else:
            write.advance()
        return length_bytes

    def _make_handle(self, write: _Write, pieces: list[Piece]) -> NixlHandle:
        table = np.array(pieces, dtype=np.uint64)  # [pieces, (local, remote, bytes)]; as tuples: a hundred times slower
        device = np.zeros(len(pieces), dtype=np.uint64)
        local = self._agent.get_xfer_descs(np.column_stack((table[:, 0], table[:, 2], device)), "DRAM")
        remote = self._agent.get_xfer_descs(np.column_stack((table[:, 1], table[:, 2], device)), "DRAM")
        notification = write.notification if write.after is None else b""
        return self._agent.initialize_xfer("WRITE", local, remote, write.target, notification)

    def _fail(self, write: _Write, error: TransportError) -> None:
        """Keep the handles of `write`: what they posted may still be read and still land."""
        self._kept += [post.handle for post in write.posts]
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
