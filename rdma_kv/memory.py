"""Where a buffer lies, and page-aligned host memory of our own for staging. Memory of GPUs of our own is in `cuda`."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from rdma_kv.errors import ConfigError

PAGE_BYTES: Final = mmap.PAGESIZE

_PROT_NONE: Final = 0
_MADV_WIPEONFORK: Final = 18  # Linux 4.14; the mmap module does not name it
_MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x2, 0x10, 0x20, 0x4000  # Linux, on x86-64 and aarch64
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

Int64Array = npt.NDArray[np.int64]
ByteArray = npt.NDArray[np.uint8]


class HostMemory:
    """Page-aligned anonymous memory, owned by this object, in huge pages where the system has them.

    A child process that is forked finds zeros there, unless it is shared: a child's copy-on-write would move pages of
    ours away from under a transport. (Were it not mapped in the child, memory of the child's could come to lie there, and be
    unmapped with this object.)

    Args:
        shared: with children that are forked later, who see what is written here.

    Attributes:
        address: first byte.
        length_bytes: extent.
    """

    def __init__(self, length_bytes: int, *, shared: bool = False) -> None:
        kind = mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE
        self._map = mmap.mmap(-1, length_bytes, flags=kind | mmap.MAP_ANONYMOUS)
        if not shared:
            self._map.madvise(_MADV_WIPEONFORK)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._use(self._map, length_bytes)

    def _use(self, mapped: mmap.mmap, length_bytes: int) -> None:
        self.view: ByteArray = np.frombuffer(mapped, dtype=np.uint8)
        self.address = int(self.view.ctypes.data)
        self.length_bytes = length_bytes

    def retire(self, offset_bytes: int, length_bytes: int) -> None:
        """Put an inaccessible mapping over whole pages of it, for good: their memory goes back to the system.

        Whoever still writes there, another process too, gets EFAULT (over cma) instead of writing. A transport of this
        process must not: a read or a write by the CPU ends the process. The addresses are never given to anybody else
        as long as this object lives.

        Raises:
            ConfigError: not whole pages of this memory; nothing has changed.
            OSError: the system refused; nothing has changed.
        """
        self.check_pages(offset_bytes, length_bytes)
        make_inaccessible(self.address + offset_bytes, length_bytes)

    def check_pages(self, offset_bytes: int, length_bytes: int) -> None:
        """Raises ConfigError where a range is not whole pages of this memory."""
        if offset_bytes % PAGE_BYTES or length_bytes % PAGE_BYTES or length_bytes <= 0 or offset_bytes < 0:
            raise ConfigError("retire", f"+{offset_bytes}, {length_bytes} bytes: whole pages of {PAGE_BYTES} only")
        if offset_bytes + length_bytes > self.length_bytes:
            raise ConfigError("retire", f"+{offset_bytes}, {length_bytes} bytes lie outside of {self.length_bytes}")


class SharedMemory(HostMemory):
    """Host memory that another process maps too: it is a file without a name, of which `fd` is sent there.

    Attributes:
        fd: file descriptor of it, open as long as this object lives, or until `close_fd`.
    """

    def __init__(self, length_bytes: int) -> None:
        self.fd = os.memfd_create("rdma-kv-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, length_bytes)
            # Who gets the descriptor could cut the file short, and the next touch of our mapping would end this process.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._map = mmap.mmap(self.fd, length_bytes, flags=mmap.MAP_SHARED)
        except BaseException:
            self.close_fd()
            raise
        self._use(self._map, length_bytes)

    def retire(self, offset_bytes: int, length_bytes: int) -> None:
        """As `HostMemory.retire`; the other process finds zeros there, and writes what nobody reads."""
        self.check_pages(offset_bytes, length_bytes)
        self._map.madvise(mmap.MADV_REMOVE, offset_bytes, length_bytes)
        super().retire(offset_bytes, length_bytes)

    def close_fd(self) -> None:
        """Idempotent. The mappings stay."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def make_inaccessible(address: int, length_bytes: int) -> None:
    """Replace whole pages of this process by pages that nobody can read or write. For good: see `HostMemory.retire`.

    Raises:
        OSError: the system refused; nothing has changed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    numbers = [ctypes.c_int] * 3
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *numbers, ctypes.c_long]
    flags = _MAP_PRIVATE | _MAP_FIXED | _MAP_ANONYMOUS | _MAP_NORESERVE
    if libc.mmap(address, length_bytes, _PROT_NONE, flags, -1, 0) in (None, _MAP_FAILED):
        code = ctypes.get_errno()
        raise OSError(code, f"an inaccessible mapping was refused: {os.strerror(code)}")


def locate(field: str, buffer: Any, *, device: int | None = None) -> tuple[int, int]:  # noqa: ANN401 - exposes memory
    """(address, bytes) of a C-contiguous NumPy array, a torch tensor, or anything with the buffer protocol.

    Args:
        device: CUDA ordinal of the GPU where it must lie; None is host memory.

    Raises:
        ConfigError: not contiguous, read-only, Python objects, or not where it must lie.
    """
    if hasattr(buffer, "data_ptr"):
        place = buffer.device
        if device is None and place.type != "cpu":
            raise ConfigError(field, f"is on {place}, and the agent's pools are in host memory; set AgentConfig.gpu")
        if device is not None and (place.type != "cuda" or place.index != device):
            raise ConfigError(field, f"is on {place}, and the agent's pools are on cuda:{device} (AgentConfig.gpu)")
        if not buffer.is_contiguous():
            raise ConfigError(field, "is not contiguous")
        return int(buffer.data_ptr()), int(buffer.numel() * buffer.element_size())
    if device is not None:
        raise ConfigError(field, f"is in host memory, and the agent's pools are on cuda:{device} (AgentConfig.gpu)")
    try:
        array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, dtype=np.uint8)
    except BufferError as exc:
        raise ConfigError(field, "is not contiguous") from exc
    except (TypeError, ValueError) as exc:
        raise ConfigError(field, f"{type(buffer).__name__} exposes no memory") from exc
    if array.dtype.hasobject:
        raise ConfigError(field, "holds Python objects, not bytes")
    if not array.flags.c_contiguous:
        raise ConfigError(field, "is not contiguous")
    if not array.flags.writeable:
        raise ConfigError(field, "is read-only")
    return int(array.ctypes.data), int(array.nbytes)


def locate_all(field: str, memory: Any, *, device: int | None = None) -> tuple[Int64Array, Int64Array]:  # noqa: ANN401
    """Addresses and sizes, int64 `[buffers]`, of one buffer or a list of buffers. See `locate`."""
    buffers: Sequence[Any] = memory if isinstance(memory, (list, tuple)) else [memory]
    found = [locate(f"{field}[{number}]", buffer, device=device) for number, buffer in enumerate(buffers)]
    table = np.array(found, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
