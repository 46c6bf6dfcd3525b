"""The sidecar's Unix socket: who may connect, and one sidecar per path.

A lock file beside it (`PATH.lock`) says whether a sidecar serves the path: the kernel lets go of the lock when the process
ends, however it does. So a socket file that is found under the lock is stale, and nobody takes away a live one.
"""

from __future__ import annotations

import contextlib
import fcntl
import grp
import os
import socket
import stat
import struct
from pathlib import Path
from typing import Final

from rdma_kv.errors import ConfigError

_UCRED: Final = struct.Struct("iII")  # pid, uid, gid; see unix(7)
_BACKLOG: Final = 128


class UnixListener:
    """A listening socket, bound and locked until `close`.

    Raises:
        ConfigError: (of the constructor) field `socket` or `socket_group`: another sidecar serves the path, something else
            lies there, or the system refuses; the text says what.
    """

    def __init__(self, path: Path, group: str = "") -> None:
        self._path = path
        self._lock = _lock(path)
        try:
            self.sock = _bind(path, group)
            self._inode = path.stat().st_ino
        except BaseException:
            os.close(self._lock)
            raise

    def close(self) -> None:
        """Take the socket file away, if it is still ours, and let go of the path. Idempotent."""
        if self._lock < 0:
            return
        self.sock.close()
        with contextlib.suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
        os.close(self._lock)
        self._lock = -1


def _lock(path: Path) -> int:
    try:
        lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as exc:
        raise ConfigError("socket", f"{path}.lock cannot be made: {exc.strerror}") from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        os.close(lock)
        raise ConfigError("socket", f"{path} is served by another sidecar; end it, or name another path") from exc
    return lock


def _bind(path: Path, group: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    mask = os.umask(0o177)  # the file is nobody else's from its first moment
    try:
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise ConfigError("socket", f"{path} is there already, and no socket; name another path, or remove it")
            path.unlink()
        sock.bind(str(path))
        if group:
            os.chown(path, -1, grp.getgrnam(group).gr_gid)
            path.chmod(0o660)
        sock.listen(_BACKLOG)
    except OSError as exc:
        sock.close()
        raise ConfigError("socket", f"{path} cannot be served: {exc.strerror}") from exc
    except BaseException:
        sock.close()
        raise
    finally:
        os.umask(mask)
    return sock


def credentials(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that connected, as the kernel says; pid 0 where it is in another process namespace."""
    pid, uid, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return pid, uid
