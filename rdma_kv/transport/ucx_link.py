"""One link to one peer over UCX: a worker of its own, an endpoint to the peer's worker, and the WRITEs in progress.

Theory of operation. The worker is the unit that can be destroyed: with it go all connections of this link, ours to the
peer and the peer's to us, whatever lies unread in their sockets, and nothing of any other link. So there is one worker
per peer, which costs 1 to 5 ms and 6 to 10 file descriptors.

A WRITE goes through four stages: its pairs are checked, all of them before any is posted; its pieces are put, in turn
with those of other WRITEs and never more than a window ahead; one flush of the endpoint tells that all landed; an
active message carries the notification, once the peer listens. Only so is the message never before the data: over cma a
put takes another way than the message.

Three messages: NOTIFICATION; HELLO, the first of an initiator, with its worker's address; LISTENING, the target's answer
and its word at every change. A target needs an endpoint for that, and so hears of the initiator's death too.

Each turn makes progress, ends what is over, posts more, and says whether there is more to do at once. If there is not,
the worker has been armed: its event fd becomes readable when there is (see `ucx_driver`).

Failure. UCX tells of a dead peer through the endpoint's error handler, during `progress`; then all WRITEs end. Their
operations may still read our memory until the link has `ended`: each of them has left UCX, and the worker is gone.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final, Protocol

from rdma_kv.errors import RegistrationError, TransportError
from rdma_kv.transport.base import FENCED, NOT_POSTED, WritePair
from rdma_kv.transport.regions import RegionTable, check_pairs
from rdma_kv.transport.ucx_binding import BACKEND, DONE, Handle, Request, Settled, Ucx
from rdma_kv.transport.ucx_writes import PIECE_BYTES, Keys, Memory, Settle, Stage, Write

NOTIFICATION: Final = 0
HELLO: Final = 1
LISTENING: Final = 2

TURN_BYTES: Final = 4 << 20  # posted per turn of the loop at most
WINDOW_BYTES: Final = 16 << 20  # posted and not over: what a later WRITE waits behind, and a fence purges
WINDOW_REQUESTS: Final = 256
CHECKS: Final = 256  # pairs checked between two looks at the clock, 0.3 ms


class _Reach:
    """An endpoint of UCX's and what became of it."""

    def __init__(self, ucx: Ucx, worker: Handle, address: bytes) -> None:
        self.address = address
        self.failure = ""
        self.handle, self._callback = ucx.connect(worker, address, self._fail)

    def _fail(self, words: str) -> None:
        self.failure = self.failure or words


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
            self._callbacks = [self._receive(message_id) for message_id in (NOTIFICATION, HELLO, LISTENING)]
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
        self._writes: deque[Write] = deque()
        self._in_flight_bytes = 0
        self._orphans: deque[tuple[Request, object]] = deque()  # operations nobody waits for, with what they read
        self.piece_bytes = PIECE_BYTES["tcp"]  # set it when the lane is known
        self._fenced: list[Write] = []  # end when the link has ended
        self._ending = False
        self.ended = False

    @property
    def drained(self) -> bool:
        """Whether it was told to end and nothing is left in UCX: `destroy` it."""
        return self._ending and not self._orphans

    @property
    def holds_memory(self) -> bool:
        """Whether an operation in UCX may refer to registered memory."""
        return not self.ended and bool(self._orphans or any(write.puts for write in self._writes))

    @property
    def busy(self) -> bool:
        """Whether anything is pending, so that the guard timer is needed."""
        return bool(self._writes or self._orphans or (self._ending and not self.ended))

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
        self._writes.append(Write(pairs, notification, settle, self.piece_bytes))

    def turn(self, until: float) -> bool:
        """Do what is due, until `time.perf_counter()` passes `until`. False: nothing is, and the worker is armed."""
        if self.ended:
            return False
        moved = self._advance(until)
        self._reap()
        if self._ending:
            if not self._orphans:
                return False
        else:
            self._take_messages()
            if self._forward is not None and self._forward.failure:
                self._end_writes(TransportError(BACKEND, self._forward.failure, "the link failed"))
            else:
                moved |= self._post(until)
        return moved or not self._armed()

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
            if message_id == NOTIFICATION:
                self._hooks.notification(body)
            elif message_id == LISTENING:
                self._peer_listens = body == b"\1"
            else:
                self._hooks.hello(body)

    def _armed(self) -> bool:
        try:
            return self._ucx.arm(self._worker)
        except TransportError as error:  # no event will tell of anything any more
            for reach in filter(None, (self._forward, self._reply)):
                reach.failure = reach.failure or error.status
            return True

    def _advance(self, until: float) -> bool:
        moved = False
        while self._ucx.progress(self._worker):
            moved = True
            if time.perf_counter() >= until:
                break
        return moved

    def _post(self, until: float) -> bool:
        """Take each WRITE one step further in turn. Whether any moved."""
        moved = False
        room = TURN_BYTES
        waiting = 0  # WRITEs in a row that could not move
        while self._writes and waiting < len(self._writes):
            write = self._writes[0]
            try:
                step = self._step(write)
            except TransportError as error:
                self._settle(write, error)
                continue
            if write.stage is Stage.OVER:
                self._settle(write, None)
                continue
            self._writes.rotate(-1)
            if not step:
                waiting += 1
                continue
            moved, waiting, room = True, 0, room - step
            if room <= 0 or time.perf_counter() >= until:
                break
        return moved

    def _step(self, write: Write) -> int:
        """Take one step. How much it moved: bytes put, or 1; 0 if it must wait."""
        if write.stage is Stage.CHECKING:
            return self._check(write)
        if write.stage is Stage.PUTTING:
            return self._put(write)
        if write.last is not DONE:
            return 0
        if write.stage is Stage.NOTIFYING:
            write.stage = Stage.OVER
        elif not self._peer_listens:
            return 0
        else:
            assert self._forward is not None
            write.stage = Stage.NOTIFYING
            write.posted = True
            write.last = self._ucx.send(self._forward.handle, NOTIFICATION, self._name, self._ucx.pinned(write.body))
        return 1

    def _check(self, write: Write) -> int:
        if self._forward is None:
            raise TransportError(BACKEND, NOT_POSTED, "the endpoint is not connected")
        batch = tuple(islice(write.unchecked, CHECKS))
        check_pairs(BACKEND, batch, self._memory.table, self._remote)
        if len(batch) < CHECKS:
            write.stage = Stage.PUTTING if write.pairs else Stage.FLUSHING
            write.next = next(write.pieces, None)
        return 1

    def _put(self, write: Write) -> int:
        """Put one piece of `write`, or begin its flush."""
        assert self._forward is not None
        if write.next is None:
            write.last = self._ucx.flush(self._forward.handle)
            write.stage = Stage.FLUSHING
            return 1
        local, remote, length_bytes = write.next
        if self._in_flight_bytes >= WINDOW_BYTES or len(write.puts) >= WINDOW_REQUESTS:
            return 0
        write.posted = True
        key, rkey = self._memory.keys.at(local), self._rkeys.at(remote)
        request = self._ucx.put(self._forward.handle, local, length_bytes, remote, rkey, key)
        if not isinstance(request, Settled):
            write.puts.append((request, length_bytes))
            self._in_flight_bytes += length_bytes
        write.next = next(write.pieces, None)
        return length_bytes

    def _reap(self) -> None:
        """Free the operations that are over. An error of one ends its WRITE."""
        for write in tuple(self._writes):
            status = 0
            while write.puts and (outcome := self._ucx.outcome(write.puts[0][0])) is not None:
                self._in_flight_bytes -= write.puts.popleft()[1]
                status = min(status, outcome)
            if not isinstance(write.last, Settled) and (outcome := self._ucx.outcome(write.last)) is not None:
                write.last = DONE
                status = min(status, outcome)
            if status < 0:
                self._settle(write, TransportError(BACKEND, self._ucx.status_string(status), "WRITE failed"))
        while self._orphans and self._ucx.outcome(self._orphans[0][0]) is not None:
            self._orphans.popleft()

    def _settle(self, write: Write, error: TransportError | None) -> None:
        """Take `write` out, keep what of it is still in UCX, and tell."""
        self._writes.remove(write)
        for request, length_bytes in write.puts:
            self._in_flight_bytes -= length_bytes
            self._orphans.append((request, None))
        self._abandon(write.last, write.body)
        if error is not None and not write.posted:
            error = TransportError(BACKEND, NOT_POSTED, str(error))
        if error is not None and error.status == FENCED:
            self._fenced.append(write)
        else:
            write.settle(error)

    def _end_writes(self, error: TransportError) -> None:
        for write in tuple(self._writes):
            self._settle(write, error)

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
