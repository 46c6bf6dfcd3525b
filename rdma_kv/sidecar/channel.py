"""One end of the Unix socket between an engine's process and its sidecar: frames, and file descriptors with them.

`control.Connection` does not fit: asyncio's streams neither send nor take file descriptors. So the socket is driven by the
loop's readers and writers here. Frames are handed to `on_frame` in the callback that read them, without a task or a
queue in between; what is sent in one turn of the loop leaves in one system call. Nothing runs while nothing comes.

A descriptor travels with the first byte of the frame that names it, so it has come when that frame is whole; the kernel
keeps their order. Who takes none (`take_fds` False) never gets any: the kernel closes those that are sent.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from rdma_kv.errors import RdmaKvError, RemoteProtocolError, SidecarLostError
from rdma_kv.messages import FRAME_HEADER
from rdma_kv.sidecar.wire import MAX_FRAME_BYTES

logger = logging.getLogger(__name__)

_READ_BYTES: Final = 256 << 10
_MOST_BUFFERS: Final = 64  # of one system call
_MOST_FDS: Final = 16  # that wait for their frame
_MOST_UNSENT_BYTES: Final = 4 * MAX_FRAME_BYTES
"""The other side has not read for long: what waits for it is bounded by its own calls and slots, which are fewer."""

_CLOSE_S: Final = 1.0  # for what is queued, while closing


class Channel:
    """Frames over a connected Unix stream socket, which it owns. For one event loop.

    Args:
        name: the other side, for errors.
        on_frame: gets the body of each frame. What it raises ends the channel.
        on_lost: told once why it has ended, unless we closed it.
        farewell: the frame that tells the other side why we end the channel over what it sent.
        hold: keep the socket open when the channel has ended, until `release`: the other side takes its end for a sign that
            nothing here touches its memory any more.
        take_fds: whether file descriptors may come.
        limit_bytes: of a frame.

    Attributes:
        fds: descriptors that have come and that no frame has claimed yet; whoever takes one closes it.
        ended: set when nothing is sent or received any more.
        ended_there: whether it was the other side that ended it.
    """

    def __init__(
        self,
        sock: socket.socket,
        *,
        name: str,
        on_frame: Callable[[bytes], None],
        on_lost: Callable[[RdmaKvError], None],
        farewell: Callable[[RdmaKvError], bytes] | None = None,
        take_fds: bool = False,
        hold: bool = False,
        limit_bytes: int = MAX_FRAME_BYTES,
    ) -> None:
        self.name = name
        self.limit_bytes = limit_bytes
        self.fds: deque[int] = deque()
        self._sock = sock
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._farewell = farewell
        self._ancillary_bytes = socket.CMSG_SPACE(_MOST_FDS * array.array("i").itemsize) if take_fds else 0
        self._received = bytearray()
        self._unsent: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._unsent_bytes = 0
        self._flushing = False
        self._writing = False  # the loop watches for room
        self._empty = asyncio.Event()
        self._empty.set()
        self.open = True
        self.ended = asyncio.Event()
        self.ended_there = False
        self._closing = False
        self._hold = hold
        sock.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(sock, self._read)

    # --- sending -------------------------------------------------------------------------------------------------------

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Queue a frame; never waits. What is sent on a channel that has ended is dropped: its end has been told.

        Args:
            fds: go with it. They may be closed at once: another file could have their numbers when the frame leaves.
        """
        if not self.open:
            return
        self._unsent.append((memoryview(frame), [os.dup(fd) for fd in fds]))
        self._unsent_bytes += len(frame)
        self._empty.clear()
        if self._unsent_bytes > _MOST_UNSENT_BYTES:
            self.lose(SidecarLostError(self.name, f"does not read: {self._unsent_bytes} bytes wait for it"))
        elif not self._flushing and not self._writing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    async def drained(self) -> None:
        """Wait until everything has gone to the kernel, or the channel has ended."""
        await self._empty.wait()

    def _flush(self) -> None:
        self._flushing = False
        try:
            while self.open and self._unsent:
                self._write_some()
        except BlockingIOError:
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._sock, self._flush)
            return
        except OSError as exc:
            while self.open and not self._closing and self._read_some():
                pass  # its last word may say why it reads no more
            self.ended_there = self.ended_there or isinstance(exc, ConnectionError)
            self.lose(SidecarLostError(self.name, f"the stream broke: {exc}"))
            return
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._sock)
        self._empty.set()

    def _write_some(self) -> None:
        """One system call: one frame with its descriptors, or several without."""
        first, fds = self._unsent[0]
        if fds:
            sent = socket.send_fds(self._sock, [first], list(fds))
            self._unsent[0] = (first, ())  # they went with the first byte
            _close_all(fds)
        else:
            buffers: list[memoryview] = []
            for frame, with_fds in self._unsent:
                if with_fds or len(buffers) == _MOST_BUFFERS:
                    break
                buffers.append(frame)
            sent = self._sock.sendmsg(buffers)
        self._unsent_bytes -= sent
        while sent:
            frame, with_fds = self._unsent[0]
            if sent < len(frame):
                self._unsent[0] = (frame[sent:], with_fds)
                return
            sent -= len(frame)
            self._unsent.popleft()

    # --- receiving -----------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        self._read_some()

    def _read_some(self) -> bool:
        """One system call. Whether something has come."""
        try:
            more = self._receive()
        except BlockingIOError:
            return False
        except OSError as exc:
            self.ended_there = isinstance(exc, ConnectionError)
            self.lose(SidecarLostError(self.name, f"the stream broke: {exc}"))
            return False
        if not more:
            self.ended_there = True
            self.lose(SidecarLostError(self.name, "the stream has ended"))
            return False
        self._received += more
        try:
            while self.open and (body := self._next_frame()) is not None:
                self._on_frame(body)
        except RdmaKvError as exc:
            self._refuse(exc)
        except Exception as exc:
            logger.exception("a message of %s could not be handled", self.name)
            self._refuse(SidecarLostError(self.name, f"a bug: {exc!r}"))
        return True

    def _refuse(self, error: RdmaKvError) -> None:
        if self._farewell is not None and self.open and not self._unsent:
            with contextlib.suppress(OSError):
                self._sock.send(self._farewell(error))
        self.lose(error)

    def _receive(self) -> bytes:
        if not self._ancillary_bytes:
            return self._sock.recv(_READ_BYTES)
        more, found, _, _ = self._sock.recvmsg(_READ_BYTES, self._ancillary_bytes, socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in found:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
                self.fds.extend(fds)
        if len(self.fds) > _MOST_FDS:
            raise OSError(f"{len(self.fds)} file descriptors that no frame has named")
        return more

    def _next_frame(self) -> bytes | None:
        start = FRAME_HEADER.size
        if len(self._received) < start:
            return None
        (length,) = FRAME_HEADER.unpack_from(self._received)
        if length > self.limit_bytes:
            raise RemoteProtocolError(self.name, f"a frame of {length} bytes exceeds the limit of {self.limit_bytes}")
        if len(self._received) < start + length:
            return None
        body = bytes(memoryview(self._received)[start : start + length])
        del self._received[: start + length]
        return body

    # --- the end -------------------------------------------------------------------------------------------------------

    def lose(self, error: RdmaKvError) -> None:
        """End it at once, for a reason; `on_lost` is told. Idempotent."""
        if self.open:
            self._end()
            self._on_lost(error)

    async def close(self) -> None:
        """Send what is queued, for a second at most, and end it. `on_lost` is not told. Idempotent."""
        if not self.open:
            return
        self._closing = True
        self._loop.remove_reader(self._sock)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self.drained()
        if self.open:
            self._end()

    def release(self) -> None:
        """Close the socket of a channel that has ended. Idempotent."""
        self._sock.close()

    def _end(self) -> None:
        self.open = False
        self._loop.remove_reader(self._sock)
        if self._writing:
            self._loop.remove_writer(self._sock)
            self._writing = False
        self.ended.set()
        if not self._hold:
            self._sock.close()
        for _, fds in self._unsent:
            _close_all(fds)
        self._unsent.clear()
        self._empty.set()
        _close_all(self.fds)
        self.fds.clear()


def _close_all(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
