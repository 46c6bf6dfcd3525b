"""One link to one peer over UCX: a worker of its own, an endpoint to the peer's worker, and the WRITEs in progress.

Theory of operation. The worker is the unit that can be destroyed: with it go all connections of this link, ours to the
peer and the peer's to us, whatever lies unread in their sockets, and nothing of any other link. So there is one worker
per peer, which costs 1 to 5 ms and 6 to 10 file descriptors.

A WRITE goes through four stages, each a queue: its pairs are checked, all of them before any is posted, and its pieces
are put, in turn with those of other WRITEs and never more than a window ahead; a flush of the endpoint tells that all
landed; an active message carries the notification, once the peer listens. Only so is the message never before the data:
over cma a put takes another way than the message. One flush covers all WRITEs that were put before it, and one message
carries all notifications that are due: with small WRITEs, these two are what costs.

Three messages: NOTIFICATIONS; HELLO, the first of an initiator, with its worker's address; LISTENING, the target's answer
and its word at every change. A target needs an endpoint for that, and so hears of the initiator's death too.

Each turn makes progress, ends what is over and posts more, again and again until nothing is due or its time is up: what
UCX finishes at once is finished in one turn. If nothing is due, the worker has been armed: its event fd becomes readable
when something is (see `ucx_driver`). Before that, a turn waits actively for what little is under way, for as long as
that has paid off lately, tens of microseconds at most: falling asleep and waking up costs as much.

Failure. UCX tells of a dead peer through the endpoint's error handler, during `progress`; then all WRITEs end. Their
operations may still read our memory until the link has `ended`: each of them has left UCX, and the worker is gone.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, Protocol

import msgspec

from rdma_kv.errors import RegistrationError, TransportError
from rdma_kv.transport.base import FENCED, NOT_POSTED, WritePair
from rdma_kv.transport.regions import Piece, RegionTable, check_pairs
from rdma_kv.transport.ucx_binding import BACKEND, Handle, Request, Settled, Ucx
from rdma_kv.transport.ucx_writes import PACES, Keys, Memory, Settle, Write

NOTIFICATIONS: Final = 0
HELLO: Final = 1
LISTENING: Final = 2

TURN_BYTES: Final = 4 << 20  # posted per turn of the loop at most, where the CPU copies them
WINDOW_REQUESTS: Final = 256
CHECKS: Final = 256  # pairs checked between two looks at the clock, 0.3 ms
FLUSHES: Final = 4  # under way: what is put meanwhile waits for the next, and shares it
FLUSH_BYTES: Final = 1 << 20  # put since the last one: a flush does not wait for more small WRITEs to join it
NOTES: Final = 256  # notifications in one message
SPIN_S: Final = 50e-6
SPIN_LEAST_S: Final = 3e-6  # less is not worth a look at the clock
SPIN_BYTES: Final = 256 << 10  # more under way than that takes longer than a wake-up
SPIN_AGAIN: Final = 64  # a link on which it did not pay off tries again every so often

_BODIES: Final = msgspec.msgpack.Decoder(list[bytes])


class _Reach:
    """An endpoint of UCX's and what became of it."""

    def __init__(self, ucx: Ucx, worker: Handle, address: bytes) -> None:
        self.address = address
        self.failure = ""
        self.handle, self._callback = ucx.connect(worker, address, self._fail)

    def _fail(self, words: str) -> None:
        self.failure = self.failure or words


class _Spin:
    """How long to wait actively: twice as long where it paid off, half as long where it did not."""

    def __init__(self) -> None:
        self._seconds = SPIN_S / 4
        self._skipped = 0

    def budget_s(self) -> float:
        if self._seconds >= SPIN_LEAST_S:
            return self._seconds
        self._skipped = (self._skipped + 1) % SPIN_AGAIN
        return 0.0 if self._skipped else SPIN_S / 4

    def learn(self, *, paid: bool) -> None:
        if paid:
            self._seconds = min(2 * max(self._seconds, SPIN_LEAST_S), SPIN_S)
        elif self._seconds >= SPIN_LEAST_S:
            self._seconds /= 2


class Hooks(Protocol):
    """What a link tells, during a turn."""

    def notification(self, body: bytes) -> None: ...

    def hello(self, body: bytes) -> None:
        """The peer connected. May call `answer`."""
        ...

    def stranger(self) -> None:
        """A message named another sender than our peer and was dropped."""
        ...


class UcxLink:
    """See the module. Everything here runs on the event loop's thread.

    Args:
        names: of our transport, which goes with every message, and of the peer, whose messages must carry it.
        hooks: what is told of messages, during a turn.
    """

    def __init__(self, ucx: Ucx, context: Handle, memory: Memory, names: tuple[str, str], hooks: Hooks) -> None:
        self._ucx = ucx
        self._memory = memory
        self._name, self._peer = (name.encode() for name in names)
        self._hooks = hooks
        self._worker = ucx.worker(context)
        try:
            self.event_fd = ucx.event_fd(self._worker)
            self.address = ucx.address(self._worker)
            self._callbacks = [self._receive(message_id) for message_id in (NOTIFICATIONS, HELLO, LISTENING)]
        except TransportError:
            ucx.destroy_worker(self._worker)
            raise
        self._forward: _Reach | None = None  # for our WRITEs
        self._reply: _Reach | None = None  # for our LISTENING; the same one where both connect
        self._arrived: deque[tuple[int, bytes]] = deque()
        self._listening = False
        self._peer_listens = False
        self._remote = RegionTable()
        self._rkeys: Keys[Handle] = Keys()
        self._unpacked: dict[bytes, Handle] = {}
        self._putting: deque[Write] = deque()  # being checked or put, in turns
        self._puts: deque[tuple[Request, int, Write]] = deque()  # under way, with their bytes
        self._put_bytes = 0  # of `_puts`
        self._unflushed: list[Write] = []  # all put
        self._unflushed_bytes = 0
        self._flushes: deque[tuple[Request, list[Write]]] = deque()
        self._landed: list[Write] = []  # their notifications are due
        self._notes: deque[tuple[Request, object, list[Write]]] = deque()  # under way, with the bytes they read
        self._spin = _Spin()
        self._orphans: deque[tuple[Request, object]] = deque()  # operations nobody waits for, with what they read
        self.pace = PACES["tcp"]  # of the WRITEs that begin now; set it when the lane is known
        self._fenced: list[Write] = []  # end when the link has ended
        self._ending = False
        self.ended = False

    @property
    def drained(self) -> bool:
        """Whether it was told to end and nothing is left in UCX: `destroy` it."""
        return self._ending and not self._in_ucx

    @property
    def holds_memory(self) -> bool:
        """Whether an operation in UCX may refer to registered memory."""
        return not self.ended and self._in_ucx

    @property
    def busy(self) -> bool:
        """Whether anything is pending, so that the guard timer is needed."""
        waiting = self._putting or self._unflushed or self._landed
        return bool(waiting) or self._in_ucx or (self._ending and not self.ended)

    @property
    def _in_ucx(self) -> bool:
        return bool(self._puts or self._flushes or self._notes or self._orphans)

    @property
    def transports(self) -> list[tuple[str, str]]:
        """(transport, device) of each lane that UCX chose for our WRITEs; empty before `connect`, or if it cannot say."""
        if self._forward is None or self._forward.failure:
            return []
        try:
            return self._ucx.transports(self._forward.handle)
        except TransportError:
            return []

    def connect(self, address: bytes, regions: RegionTable, rkeys: Sequence[bytes], hello: bytes) -> None:
        """Make the peer's regions writable, in the order of `regions`. Again with newer ones: they replace the former.

        Raises:
            RegistrationError: UCX cannot use an rkey, or the address is another worker's; nothing has changed.
            TransportError: the endpoint cannot be made.
        """
        if self._forward is not None and address != self._forward.address:
            raise RegistrationError(BACKEND, "replaced", "the peer was connected as another endpoint before")
        if self._forward is None:
            self._forward = self._reach(address)
            self._say(self._forward, HELLO, hello)
        for rkey in rkeys:
            if rkey not in self._unpacked:
                self._unpacked[rkey] = self._ucx.unpack_rkey(self._forward.handle, rkey)
        handles = [self._unpacked[rkey] for rkey in rkeys]
        self._rkeys = Keys((region.address, handle) for region, handle in zip(regions, handles, strict=True))
        self._remote = regions

    def answer(self, address: bytes) -> None:
        """The peer's HELLO: say there whether we listen, now and at every change."""
        if self._reply is None or self._reply.address != address:
            before, self._reply = self._reply, None
            if before is not None and before is not self._forward:
                self._close(before)
            self._reply = self._reach(address)
        self._say(self._reply, LISTENING, bytes([self._listening]))

    def set_listening(self, listening: bool) -> None:
        self._listening = listening
        if self._reply is not None and not self._reply.failure:
            self._say(self._reply, LISTENING, bytes([listening]))

    def write(self, pairs: Sequence[WritePair], notification: bytes, settle: Settle) -> None:
        """Begin a WRITE. `settle` is called once, during a turn, `begin_end` or `destroy`."""
        self._putting.append(Write(pairs, notification, settle, self.pace))

    def turn(self, until: float) -> bool:
        """Do what is due, until `time.perf_counter()` passes `until`. False: nothing is, and the worker is armed."""
        if self.ended:
            return False
        room = TURN_BYTES
        while True:
            self._advance(until)
            self._reap()
            put_bytes, moved = 0, False
            if not self._ending:
                self._take_messages()
                put_bytes, moved = self._go_on(until, room)
            elif self.drained:
                return False
            room -= put_bytes
            now = time.perf_counter()
            if room <= 0 or now >= until:
                return True
            if not moved and not self._wait_actively(now) and self._armed():
                return False

    def begin_end(self, status: str) -> None:
        """End all WRITEs with `status` and force the endpoints to close. Turns go on until it is `drained`.

        Then no operation is left in UCX, and `destroy` sees to it that nothing of the peer can come in. With status
        `FENCED` the WRITEs end only then.
        """
        if self._ending:
            return
        self._ending = True
        self._end_writes(TransportError(BACKEND, status, f"{status} while an operation was pending"))
        for reach in {self._forward, self._reply} - {None}:
            assert reach is not None
            self._close(reach)

    def give_up(self, error: TransportError) -> None:
        """UCX has not let go in time: end the WRITEs that wait for it. The worker stays."""
        for write in self._fenced:
            write.settle(error)
        self._fenced.clear()

    def _reach(self, address: bytes) -> _Reach:
        """The endpoint to a worker: one for both uses."""
        for reach in (self._forward, self._reply):
            if reach is not None and reach.address == address and not reach.failure:
                return reach
        reach = _Reach(self._ucx, self._worker, address)
        self._callbacks.append(reach)
        return reach

    def _say(self, reach: _Reach, message_id: int, body: bytes) -> None:
        """Send what nobody waits for. If it cannot be sent, the endpoint has failed."""
        try:
            self._abandon(self._ucx.send(reach.handle, message_id, self._name, self._ucx.pinned(body)), body)
        except TransportError as error:
            reach.failure = reach.failure or error.status

    def _close(self, reach: _Reach) -> None:
        with contextlib.suppress(TransportError):  # gone already: what is left of it goes with the worker
            self._abandon(self._ucx.close(reach.handle), reach)

    def _take_messages(self) -> None:
        while self._arrived:
            message_id, body = self._arrived.popleft()
            if message_id == NOTIFICATIONS:
                self._take_notifications(body)
            elif message_id == LISTENING:
                self._peer_listens = body == b"\1"
            else:
                self._hooks.hello(body)

    def _take_notifications(self, body: bytes) -> None:
        try:
            bodies = _BODIES.decode(body)
        except msgspec.MsgspecError:
            self._hooks.stranger()
            return
        for one in bodies:
            self._hooks.notification(one)

    def _wait_actively(self, now: float) -> bool:
        """Look for the end of what is under way a little longer. Whether UCX did something."""
        if not self._in_ucx or self._put_bytes > SPIN_BYTES:
            return False
        until = now + self._spin.budget_s()
        while time.perf_counter() < until:
            if self._ucx.progress(self._worker):
                self._spin.learn(paid=True)
                return True
        self._spin.learn(paid=False)
        return False

    def _armed(self) -> bool:
        try:
            return self._ucx.arm(self._worker)
        except TransportError as error:  # no event will tell of anything any more
            for reach in filter(None, (self._forward, self._reply)):
                reach.failure = reach.failure or error.status
            return True

    def _advance(self, until: float) -> None:
        while self._ucx.progress(self._worker):
            if time.perf_counter() >= until:
                break

    def _go_on(self, until: float, room: int) -> tuple[int, bool]:
        """Take WRITEs further, with at most about `room` bytes. How many the CPU copies, and whether any WRITE moved."""
        forward = self._forward
        if forward is None:
            return 0, self._refuse()
        if forward.failure:
            self._end_writes(TransportError(BACKEND, forward.failure, "the link failed"))
            return 0, False
        put_bytes, moved = self._post(forward.handle, until, room)
        moved |= self._flush(forward.handle)
        moved |= self._notify(forward.handle)
        return put_bytes, moved

    def _refuse(self) -> bool:
        error = TransportError(BACKEND, NOT_POSTED, "the endpoint is not connected")
        refused = bool(self._putting)
        while self._putting:
            self._settle(self._putting.popleft(), error)
        return refused

    def _post(self, endpoint: Handle, until: float, room: int) -> tuple[int, bool]:
        """Check and put, a piece of each WRITE in turn. How many bytes the CPU copies, and whether any WRITE moved."""
        put_bytes, moved = 0, False
        while self._putting and put_bytes < room and (not moved or time.perf_counter() < until):
            write = self._putting.popleft()
            try:
                if write.over:  # one of its puts failed
                    continue
                if write.unchecked is not None:
                    self._check(write, write.unchecked)
                if write.next is not None and write.unchecked is None:
                    behind_bytes = self._put_bytes + write.next[2]
                    if self._puts and (behind_bytes > write.pace.window_bytes or len(self._puts) >= WINDOW_REQUESTS):
                        self._putting.appendleft(write)
                        break
                    put_bytes += self._put(endpoint, write, write.next)
                moved = True
            except TransportError as error:
                self._settle(write, error)
                moved = True
                continue
            if write.unchecked is None and write.next is None:
                (self._unflushed if write.pairs else self._landed).append(write)
            else:
                self._putting.append(write)
        return put_bytes, moved

    def _check(self, write: Write, unchecked: Iterator[WritePair]) -> None:
        batch = tuple(islice(unchecked, CHECKS))
        check_pairs(BACKEND, batch, self._memory.table, self._remote)
        if len(batch) < CHECKS:
            write.unchecked = None
            write.next = next(write.pieces, None)

    def _put(self, endpoint: Handle, write: Write, piece: Piece) -> int:
        local, remote, length_bytes = piece
        write.posted = True
        key, rkey = self._memory.keys.at(local), self._rkeys.at(remote)
        request = self._ucx.put(endpoint, local, length_bytes, remote, rkey, key)
        if not isinstance(request, Settled):
            self._puts.append((request, length_bytes, write))
            self._put_bytes += length_bytes
        self._unflushed_bytes += length_bytes
        write.next = next(write.pieces, None)
        return length_bytes if write.pace.copies else 0

    def _flush(self, endpoint: Handle) -> bool:
        """Begin one flush for all that was put. Whether it did."""
        if not self._unflushed or len(self._flushes) >= FLUSHES:
            return False
        if self._putting and self._unflushed_bytes < FLUSH_BYTES and len(self._unflushed) < NOTES:
            return False
        writes, self._unflushed, self._unflushed_bytes = self._unflushed, [], 0
        try:
            request = self._ucx.flush(endpoint)
        except TransportError as error:
            self._settle_all(writes, error)
            return True
        if isinstance(request, Settled):
            self._land(writes)
        else:
            self._flushes.append((request, writes))
        return True

    def _land(self, writes: Sequence[Write]) -> None:
        self._landed += [write for write in writes if not write.over]

    def _notify(self, endpoint: Handle) -> bool:
        """Send the notifications that are due. Whether there were any."""
        if not self._landed or not self._peer_listens:
            return False
        writes, self._landed = self._landed[:NOTES], self._landed[NOTES:]
        writes = [write for write in writes if not write.over]
        for write in writes:
            write.posted = True
        body = self._ucx.pinned(msgspec.msgpack.encode([write.body for write in writes]))
        try:
            request = self._ucx.send(endpoint, NOTIFICATIONS, self._name, body)
        except TransportError as error:
            self._settle_all(writes, error)
            return True
        if isinstance(request, Settled):
            self._settle_all(writes, None)
        else:
            self._notes.append((request, body, writes))
        return True

    def _reap(self) -> None:
        """Free the operations that are over. An error of one ends its WRITEs."""
        while self._puts and (status := self._ucx.outcome(self._puts[0][0])) is not None:
            _, length_bytes, write = self._puts.popleft()
            self._put_bytes -= length_bytes
            if status < 0:
                self._settle_all([write], self._failed(status))
        while self._flushes and (status := self._ucx.outcome(self._flushes[0][0])) is not None:
            _, writes = self._flushes.popleft()
            if status < 0:
                self._settle_all(writes, self._failed(status))
            self._land(writes)
        while self._notes and (status := self._ucx.outcome(self._notes[0][0])) is not None:
            _, _, writes = self._notes.popleft()
            self._settle_all(writes, self._failed(status) if status < 0 else None)
        while self._orphans and self._ucx.outcome(self._orphans[0][0]) is not None:
            self._orphans.popleft()

    def _failed(self, status: int) -> TransportError:
        return TransportError(BACKEND, self._ucx.status_string(status), "WRITE failed")

    def _settle_all(self, writes: Iterable[Write], error: TransportError | None) -> None:
        for write in writes:
            self._settle(write, error)

    def _settle(self, write: Write, error: TransportError | None) -> None:
        """Tell the outcome, once. What of it is still in UCX stays in `_puts`; a queue that holds it passes it over."""
        if write.over:
            return
        write.over = True
        if error is not None and not write.posted:
            error = TransportError(BACKEND, NOT_POSTED, str(error))
        if error is not None and error.status == FENCED:
            self._fenced.append(write)
        else:
            write.settle(error)

    def _end_writes(self, error: TransportError) -> None:
        """All WRITEs fail; their operations stay in UCX until it lets go of them."""
        waiting = [*self._putting, *self._unflushed, *self._landed]
        waiting += [write for _, writes in self._flushes for write in writes]
        waiting += [write for _, _, writes in self._notes for write in writes]
        self._putting.clear()
        self._unflushed, self._landed = [], []
        self._settle_all(waiting, error)

    def _abandon(self, operation: Request | Settled, reads: object) -> None:
        if not isinstance(operation, Settled):
            self._orphans.append((operation, reads))

    def destroy(self) -> None:
        """Destroy the worker. The loop must have forgotten its event fd."""
        for rkey in self._unpacked.values():
            self._ucx.destroy_rkey(rkey)
        self._ucx.destroy_worker(self._worker)
        self.ended = True
        self.give_up(TransportError(BACKEND, FENCED, "fenced while an operation was pending"))

    def _receive(self, message_id: int) -> object:
        def handle(header: bytes, body: bytes) -> None:
            if header == self._peer:
                self._arrived.append((message_id, body))
            else:
                self._hooks.stranger()

        return self._ucx.on_message(self._worker, message_id, handle)
