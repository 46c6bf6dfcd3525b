"""Host memory: where a buffer lies, and page-aligned memory of our own for staging."""

from __future__ import annotations

import contextlib
import ctypes
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
        self.view: ByteArray = np.frombuffer(self._map, dtype=np.uint8)
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
        if offset_bytes % PAGE_BYTES or length_bytes % PAGE_BYTES or length_bytes <= 0 or offset_bytes < 0:
            raise ConfigError("retire", f"+{offset_bytes}, {length_bytes} bytes: whole pages of {PAGE_BYTES} only")
        if offset_bytes + length_bytes > self.length_bytes:
            raise ConfigError("retire", f"+{offset_bytes}, {length_bytes} bytes lie outside of {self.length_bytes}")
        make_inaccessible(self.address + offset_bytes, length_bytes)


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


def locate(field: str, buffer: Any) -> tuple[int, int]:  # noqa: ANN401 - anything that exposes memory
    """(address, bytes) of a C-contiguous NumPy array, a CPU torch tensor, or anything with the buffer protocol.

    Raises:
        ConfigError: not contiguous, read-only, Python objects, or not host memory.
    """
    if hasattr(buffer, "data_ptr"):
        if buffer.device.type != "cpu":
            raise ConfigError(field, f"is on {buffer.device}; only host memory can be registered so far")
        if not buffer.is_contiguous():
            raise ConfigError(field, "is not contiguous")
        return int(buffer.data_ptr()), int(buffer.numel() * buffer.element_size())
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


def locate_all(field: str, memory: Any) -> tuple[Int64Array, Int64Array]:  # noqa: ANN401 - a buffer or several
    """Addresses and sizes, int64 `[buffers]`, of one buffer or a list of buffers."""
    buffers: Sequence[Any] = memory if isinstance(memory, (list, tuple)) else [memory]
    found = [locate(f"{field}[{number}]", buffer) for number, buffer in enumerate(buffers)]
    table = np.array(found, dtype=np.int64).reshape(-1, 2)
    return table[:, 0], table[:, 1]
