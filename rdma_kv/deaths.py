"""Proof that a peer's process has died, where the kernel can give it: a pidfd of a process on the same host.

Theory of operation. A broken stream or an ended lease says that a peer is out of reach, not that it is dead: it may be
stopped, and write into our memory when it goes on. A pidfd tells the difference. It is opened at the handshake, when
the peer has just spoken, and becomes readable when all threads of that process have ended and its memory is gone, so
that nothing it copies by itself can land any more. (What is still in the buffers of a socket can.)

A pid is a number in one process namespace and is used again. So the peer says in HELLO which host and namespace it is
in and when its process started; where the host is ours, the pidfd is opened first and the start compared afterwards: if
it is the same, the descriptor means that very process. In every other case there is no watch, and no proof.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rdma_kv.protocol.link import Process
from rdma_kv.transport.ucx_environment import host_id

logger = logging.getLogger(__name__)

MAX_WATCHES: Final = 256
"""Processes that are watched at a time, one file descriptor each of the 1,024 that a process usually has; the oldest watch
makes room."""

_PROC = Path("/proc")
_START_FIELD = 22  # of /proc/PID/stat, counted from 1
_AFTER_NAME = 3  # the first field behind the process's name, which may hold anything


def own_process() -> Process:
    """This process, as HELLO says it; unknown where /proc does not tell."""
    host, started = host_id(), started_ticks(os.getpid())
    return Process(host, os.getpid(), started) if host and started else Process()


def started_ticks(pid: int) -> int:
    """When a process of our namespace started, in clock ticks since boot; 0 where there is none."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text(errors="replace")
        return int(stat[stat.rindex(")") + 1 :].split()[_START_FIELD - _AFTER_NAME])
    except (OSError, ValueError, IndexError):
        return 0


class DeathWatch:
    """Watches over the processes of peers, by the names of their incarnations. Lives on one event loop.

    Args:
        on_dead: called once with the name of a peer whose process has ended; it is not watched any more then.
        most: bound on the watches.
    """

    def __init__(self, on_dead: Callable[[str], None], *, most: int = MAX_WATCHES) -> None:
        self._on_dead = on_dead
        self._most = most
        self._watched: dict[str, int] = {}  # pidfd by name, the oldest first

    def __contains__(self, name: str) -> bool:
        return name in self._watched

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, name: str, process: Process) -> bool:
        """Watch over the process of a peer that has just spoken. False: there can be no proof of its death here."""
        if name in self._watched:
            return True
        descriptor = _open(process)
        if descriptor is None:
            return False
        while len(self._watched) >= self._most:
            self.forget(next(iter(self._watched)))
        self._watched[name] = descriptor
        asyncio.get_running_loop().add_reader(descriptor, self._died, name)
        return True

    def forget(self, name: str) -> None:
        """Nobody needs to know any more. Idempotent."""
        descriptor = self._watched.pop(name, None)
        if descriptor is not None:
            asyncio.get_running_loop().remove_reader(descriptor)
            os.close(descriptor)

    def close(self) -> None:
        """End all watches. Idempotent."""
        for name in list(self._watched):
            self.forget(name)

    def _died(self, name: str) -> None:
        self.forget(name)
        self._on_dead(name)


def _open(process: Process) -> int | None:
    """A pidfd that means that very process; None where it is not on our host, is gone, or is ourselves."""
    if not process.host or not process.pid or process.pid == os.getpid() or process.host != host_id():
        return None
    try:
        descriptor = os.pidfd_open(process.pid)
    except (OSError, AttributeError) as exc:  # gone already; not allowed here; not Linux
        logger.debug("no pidfd of process %d: %r", process.pid, exc)
        return None
    if started_ticks(process.pid) == process.started:
        return descriptor
    os.close(descriptor)
    return None
