"""libcuda through cffi, for what UCX needs beside its own modules: a current CUDA context, and memory that it can export.

Why a context. UCX's cuda modules work on the context that is current on the calling thread. Without one, `ucp_mem_map`
cannot look at the memory, an rkey of a peer's GPU memory counts as out of reach, a copy cannot be queued, and
`ucp_worker_arm` asks for the state of an event, which can end the process with a segmentation fault (seen by others in
`cuEventQuery`). The thread of an event loop has often none, and a pool's thread never. So every call of UCX that may touch
the modules runs inside `Cuda.current`: it pushes the primary context of a device, the one that torch and the CUDA runtime
use, and pops it again. To set it once and leave it there would change the current device of the engine's own code.

Nothing here is loaded before memory of a device is registered. Torch is not needed.

Source: cuda.h of CUDA 12 and 13 (the driver API).
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator
from typing import Any, Final

from rdma_kv.errors import RegistrationError
from rdma_kv.transport.ucx_binding import BACKEND

DEVICE_MEMORY: Final = "device-memory"
"""`RegistrationError.status` of all refusals that concern memory of a GPU."""

_LIBRARY: Final = "libcuda.so.1"
_CDEF: Final = """
int cuInit(unsigned flags);
int cuGetErrorName(int result, const char **text);
int cuDeviceGetCount(int *count);
int cuDeviceGet(int *device, int ordinal);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuDevicePrimaryCtxRelease_v2(int device);
int cuCtxPushCurrent_v2(void *context);
int cuCtxPopCurrent_v2(void **context);
int cuPointerGetAttribute(void *data, int attribute, unsigned long long address);
int cuMemGetAddressRange_v2(unsigned long long *base, size_t *size, unsigned long long address);
"""
_FUNCTIONS: Final = tuple(re.findall(r"\b(cu\w+)\(", _CDEF))

_MEMORY_TYPE, _DEVICE_ORDINAL, _IS_MANAGED = 2, 9, 8  # CUpointer_attribute
_IPC_CAPABLE, _HANDLE_TYPES = 10, 14
_DEVICE_TYPE: Final = 2  # CU_MEMORYTYPE_DEVICE
_FABRIC: Final = 8  # CU_MEM_HANDLE_TYPE_FABRIC

CData = Any


class Cuda:
    """libcuda, and the primary contexts that were retained. Calls on one context may come from several threads."""

    def __init__(self, path: str = _LIBRARY) -> None:
        """Load and initialize libcuda.

        Raises:
            RegistrationError: there is none, or it finds no GPU.
        """
        self._ffi: CData = importlib.import_module("cffi").FFI()
        self._ffi.cdef(_CDEF)
        try:
            self._lib: CData = self._ffi.dlopen(path)
            for name in _FUNCTIONS:
                getattr(self._lib, name)
        except (OSError, AttributeError) as exc:
            raise RegistrationError(BACKEND, DEVICE_MEMORY, f"{path} of NVIDIA's driver cannot be used: {exc}") from exc
        self._check(self._lib.cuInit(0), "cuInit")
        self._contexts: dict[int, CData] = {}

    def retain(self, ordinal: int) -> None:
        """Keep the primary context of a device alive until `close`. Where the process uses the device, it exists already.

        Raises:
            RegistrationError: there is no such device.
        """
        if ordinal in self._contexts:
            return
        count = self._out("int *", self._lib.cuDeviceGetCount)
        if not 0 <= ordinal < count:
            text = f"device {ordinal + 1} is CUDA ordinal {ordinal}, and this process sees {count} GPUs"
            raise RegistrationError(BACKEND, DEVICE_MEMORY, f"{text}; see CUDA_VISIBLE_DEVICES")
        device = self._out("int *", self._lib.cuDeviceGet, ordinal)
        self._contexts[ordinal] = self._out("void **", self._lib.cuDevicePrimaryCtxRetain, device)

    @contextlib.contextmanager
    def current(self, ordinal: int) -> Iterator[None]:
        """Inside, the primary context of a retained device is current on this thread; afterwards, what was before."""
        self._check(self._lib.cuCtxPushCurrent_v2(self._contexts[ordinal]), "cuCtxPushCurrent")
        try:
            yield
        finally:
            self._lib.cuCtxPopCurrent_v2(self._ffi.new("void **"))

    def check_memory(self, address: int, length_bytes: int, ordinal: int, *, exported: bool) -> None:
        """See that a range is what UCX can use. Inside `current`.

        Args:
            exported: whether it is of no use unless other processes can map it.

        Raises:
            RegistrationError: it is not memory of that device, lies in several allocations, or cannot be exported.
        """
        if self._attribute(_MEMORY_TYPE, address) != _DEVICE_TYPE or self._attribute(_IS_MANAGED, address):
            raise self._refusal(address, "is not memory that cudaMalloc gave out; register host memory with device 0")
        found = self._attribute(_DEVICE_ORDINAL, address)
        if found != ordinal:
            raise self._refusal(address, f"lies on device {found + 1}, not {ordinal + 1} (CUDA ordinal + 1)")
        base, size = self._ffi.new("unsigned long long *"), self._ffi.new("size_t *")
        self._check(self._lib.cuMemGetAddressRange_v2(base, size, address), "cuMemGetAddressRange")
        if address + length_bytes > base[0] + size[0]:
            raise self._refusal(address, f"goes on for {length_bytes} bytes and leaves its allocation; register each")
        if exported and not self._attribute(_IPC_CAPABLE, address) and not self._fabric(address):
            raise self._refusal(
                address,
                "cannot be exported to another process: allocate it with cudaMalloc (with PyTorch: neither "
                "expandable_segments nor cudaMallocAsync)",
            )

    def close(self) -> None:
        """Release the contexts."""
        while self._contexts:
            ordinal, _ = self._contexts.popitem()
            self._lib.cuDevicePrimaryCtxRelease_v2(self._out("int *", self._lib.cuDeviceGet, ordinal))

    def _fabric(self, address: int) -> bool:
        return bool(self._attribute(_HANDLE_TYPES, address) & _FABRIC)

    def _attribute(self, attribute: int, address: int) -> int:
        data = self._ffi.new("unsigned long long *")  # attributes are 1, 4 or 8 bytes long, little-endian
        if self._lib.cuPointerGetAttribute(data, attribute, address):
            raise self._refusal(address, "is not known to CUDA in this process")
        return int(data[0])

    def _refusal(self, address: int, text: str) -> RegistrationError:
        return RegistrationError(BACKEND, DEVICE_MEMORY, f"{address:#x} {text}")

    def _out(self, kind: str, function: CData, *arguments: int) -> CData:
        out = self._ffi.new(kind)
        self._check(function(out, *arguments), "a call of libcuda")
        return out[0]

    def _check(self, result: int, what: str) -> None:
        if result:
            text = self._ffi.new("const char **")
            known = self._lib.cuGetErrorName(result, text) == 0
            name = self._ffi.string(text[0]).decode() if known else str(result)
            raise RegistrationError(BACKEND, DEVICE_MEMORY, f"{what} failed: {name}")
