"""libcuda through cffi: a current CUDA context, memory of a GPU that can be exported, pinned host memory, and copies.

For what must not need torch: the mover's staging, and UCX's cuda modules. Nothing is loaded before a `Cuda` is made.

Why a context. Calls of the driver, and of UCX's cuda modules, work on the context that is current on the calling thread.
Without one, `ucp_mem_map` cannot look at the memory, an rkey of a peer's GPU memory counts as out of reach, a copy cannot
be queued, and `ucp_worker_arm` asks for the state of an event, which can end the process with a segmentation fault (seen
by others in `cuEventQuery`). The thread of an event loop has often none, and a pool's thread never. So every call of UCX
that may touch the modules runs inside `Cuda.current`: it pushes the primary context of a device, the one that torch and
the CUDA runtime use, and pops it again. To set it once and leave it there would change the current device of the engine's
own code.

Why cuMemAlloc. Its memory can be exported to other processes, whatever allocator the engine's torch was set to.

Source: cuda.h of CUDA 12 and 13 (the driver API).
"""

from __future__ import annotations

import contextlib
import importlib
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

from rdma_kv.errors import DEVICE_MEMORY, RegistrationError

BACKEND: Final = "cuda"
"""`RegistrationError.backend` of all that libcuda refuses."""

_LIBRARY: Final = "libcuda.so.1"
_CDEF: Final = """
typedef struct { char reserved[64]; } CUipcMemHandle;
int cuIpcGetMemHandle(CUipcMemHandle *handle, unsigned long long address);
int cuIpcOpenMemHandle_v2(unsigned long long *address, CUipcMemHandle handle, unsigned flags);
int cuIpcCloseMemHandle(unsigned long long address);
int cuInit(unsigned flags);
int cuGetErrorName(int result, const char **text);
int cuDeviceGetCount(int *count);
int cuDeviceGet(int *device, int ordinal);
int cuDeviceGetUuid_v2(void *uuid, int device);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuDevicePrimaryCtxRelease_v2(int device);
int cuCtxPushCurrent_v2(void *context);
int cuCtxPopCurrent_v2(void **context);
int cuCtxSetCurrent(void *context);
int cuPointerGetAttribute(void *data, int attribute, unsigned long long address);
int cuMemGetAddressRange_v2(unsigned long long *base, size_t *size, unsigned long long address);
int cuMemAlloc_v2(unsigned long long *address, size_t length);
int cuMemFree_v2(unsigned long long address);
int cuMemHostRegister_v2(void *memory, size_t length, unsigned flags);
int cuMemHostUnregister(void *memory);
int cuMemcpyAsync(unsigned long long dst, unsigned long long src, size_t length, void *stream);
int cuThreadExchangeStreamCaptureMode(int *mode);
int cuCtxGetStreamPriorityRange(int *least, int *greatest);
int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority);
int cuStreamDestroy_v2(void *stream);
int cuCtxSynchronize(void);
"""
_FUNCTIONS: Final = tuple(re.findall(r"\b(cu\w+)\(", _CDEF))

_MEMORY_TYPE, _DEVICE_ORDINAL, _IS_MANAGED = 2, 9, 8  # CUpointer_attribute
_IPC_CAPABLE, _HANDLE_TYPES = 10, 14
_DEVICE_TYPE: Final = 2  # CU_MEMORYTYPE_DEVICE
_FABRIC: Final = 8  # CU_MEM_HANDLE_TYPE_FABRIC
_NON_BLOCKING: Final = 1  # CU_STREAM_NON_BLOCKING: never waits for the default stream, nor it for this one
_RELAXED: Final = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_LAZY_PEER_ACCESS: Final = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_INVALID_CONTEXT: Final = 201  # CUDA_ERROR_INVALID_CONTEXT
_PORTABLE: Final = 1  # CU_MEMHOSTREGISTER_PORTABLE: pinned for every context of the process

CData = Any


class Cuda:
    """libcuda, and the primary contexts that were retained. May be used from several threads, but for `close`.

    Args:
        path: of the library.

    Raises:
        RegistrationError: (of the constructor) there is none, or it finds no GPU. As of all methods: backend `cuda`,
            status `DEVICE_MEMORY`; the text has CUDA's own name of the error.
    """

    def __init__(self, path: str = _LIBRARY) -> None:
        self._ffi: CData = importlib.import_module("cffi").FFI()
        self._ffi.cdef(_CDEF)
        try:
            self._lib: CData = self._ffi.dlopen(path)
            for name in _FUNCTIONS:
                getattr(self._lib, name)
        except (OSError, AttributeError) as exc:
            raise RegistrationError(BACKEND, DEVICE_MEMORY, f"{path} of NVIDIA's driver cannot be used: {exc}") from exc
        self._check(self._lib.cuInit(0), "cuInit")
        self._lock = threading.Lock()  # of the three below
        self._contexts: dict[int, CData] = {}
        self._held: dict[int, int] = {}  # ordinal of each address that was allocated or pinned
        self._closed = False
        self._popped: CData = self._ffi.new("void **")  # what is read by nobody

    def retain(self, ordinal: int) -> None:
        """Keep the primary context of a device alive until `close`. Where the process uses the device, it exists already.

        Raises:
            RegistrationError: there is no such device.
        """
        if ordinal in self._contexts:
            return
        count = self._out("int *", "cuDeviceGetCount")
        if not 0 <= ordinal < count:
            text = f"device {ordinal + 1} is CUDA ordinal {ordinal}, and this process sees {count} GPUs"
            raise RegistrationError(BACKEND, DEVICE_MEMORY, f"{text}; see CUDA_VISIBLE_DEVICES")
        with self._lock:
            if ordinal not in self._contexts:
                device = self._out("int *", "cuDeviceGet", ordinal)
                self._contexts[ordinal] = self._out("void **", "cuDevicePrimaryCtxRetain", device)

    def uuid(self, ordinal: int) -> bytes:
        """The 16 bytes by which every process of this host knows a device, however it counts.

        Raises:
            RegistrationError: there is no such device.
        """
        uuid = self._ffi.new("unsigned char[16]")
        device = self._out("int *", "cuDeviceGet", ordinal)
        self._check(self._lib.cuDeviceGetUuid_v2(uuid, device), "cuDeviceGetUuid")
        return bytes(self._ffi.buffer(uuid))

    def ordinal_of(self, uuid: bytes) -> int | None:
        """The device of that `uuid` as this process counts; None where it does not see it.

        Raises:
            RegistrationError: the driver has failed.
        """
        count = self._out("int *", "cuDeviceGetCount")
        return next((ordinal for ordinal in range(count) if self.uuid(ordinal) == uuid), None)

    def current(self, ordinal: int) -> contextlib.AbstractContextManager[None]:
        """Inside, the primary context of a retained device is current on this thread; afterwards, what was before.

        Calls inside neither spoil, nor are refused for, a CUDA graph that another thread captures: see `leave_captures`.

        Raises:
            RegistrationError: (on the way in or out) the device has failed.
        """
        return _Current(self, self._contexts[ordinal])

    def leave_captures(self, mode: int = _RELAXED) -> int:
        """Let this thread allocate memory and ask events while another one captures a CUDA graph; the mode it had.

        Engines capture in the strictest mode as a rule: in it, such a call of any thread fails and spoils the capture, unless
        the thread has declared that what it does has nothing to do with it.
        """
        out = self._ffi.new("int *", mode)
        self._check(self._lib.cuThreadExchangeStreamCaptureMode(out), "cuThreadExchangeStreamCaptureMode")
        return int(out[0])

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

    def allocate(self, ordinal: int, length_bytes: int) -> int:
        """Memory of a device that other processes can map, until `free`: its address, aligned to 256 bytes or more.

        What lies there is undefined. CUDA exports whole allocations of its own, at least 2 MiB each: below that several
        share one, and a peer that may map one can reach the others.

        Raises:
            RegistrationError: there is no such device, or no memory.
        """
        if length_bytes < 1:
            raise RegistrationError(BACKEND, DEVICE_MEMORY, f"{length_bytes} bytes cannot be allocated")
        self.retain(ordinal)
        with self.current(ordinal):
            address = int(self._out("unsigned long long *", "cuMemAlloc_v2", length_bytes))
        with self._lock:
            self._held[address] = ordinal
        return address

    def free(self, ordinal: int, address: int) -> None:
        """Give memory of `allocate` back. Waits for the work of the device that was queued before.

        Peers must have closed their mappings, and no kernel of ours may reach it any more.

        Raises:
            RegistrationError: it is not memory of `allocate` there, or the device has failed.
        """
        with self._giving_back(ordinal, address):
            self._check(self._lib.cuMemFree_v2(address), "cuMemFree")

    def export_handle(self, address: int) -> bytes:
        """What another process of this host passes to `open_handle`: 64 bytes. Only of memory of `allocate`.

        Raises:
            RegistrationError: it is not memory of `allocate`, or the system does not let processes share memory of GPUs.
        """
        ordinal = self._held.get(address)
        if ordinal is None:
            raise self._refusal(address, "was not allocated here, or given back; what was imported cannot be exported")
        handle = self._ffi.new("CUipcMemHandle *")
        with self.current(ordinal):
            self._check(self._lib.cuIpcGetMemHandle(handle, address), "cuIpcGetMemHandle")
        return bytes(self._ffi.buffer(handle))

    def open_handle(self, ordinal: int, handle: bytes) -> int:
        """Map memory of another process of this host, until `close_handle`: its address here.

        Args:
            ordinal: of the device that maps it: that where it lies, as this process counts, or one that reaches that.
            handle: of `export_handle`. A process cannot open its own.

        Raises:
            RegistrationError: it is no handle, or the memory or the other process is gone.
        """
        self.retain(ordinal)
        if len(handle) != self._ffi.sizeof("CUipcMemHandle"):
            raise RegistrationError(BACKEND, DEVICE_MEMORY, f"a handle of CUDA has 64 bytes, not {len(handle)}")
        value = self._ffi.new("CUipcMemHandle *", [handle])
        out = self._ffi.new("unsigned long long *")
        with self.current(ordinal):
            self._check(self._lib.cuIpcOpenMemHandle_v2(out, value[0], _LAZY_PEER_ACCESS), "cuIpcOpenMemHandle")
        with self._lock:
            self._held[int(out[0])] = ordinal
        return int(out[0])

    def close_handle(self, address: int) -> None:
        """End the mapping of `open_handle`. No kernel or copy may be under way there.

        Raises:
            RegistrationError: nothing was opened there, or the device has failed.
        """
        with self._giving_back(self._held.get(address, -1), address):
            self._check(self._lib.cuIpcCloseMemHandle(address), "cuIpcCloseMemHandle")

    def pin(self, address: int, length_bytes: int, ordinal: int) -> None:
        """Pin host memory, for all devices, until `unpin`: so copies of it run beside the host, and at the full rate.

        Args:
            address: of memory that is mapped until then. Pages that a fork shares would be pinned in the parent.
            length_bytes: extent.
            ordinal: of a device whose context is there while it is pinned.

        Raises:
            RegistrationError: it is pinned already, or cannot be.
        """
        self.retain(ordinal)
        pointer = self._ffi.cast("void *", address)
        with self.current(ordinal):
            self._check(self._lib.cuMemHostRegister_v2(pointer, length_bytes, _PORTABLE), "cuMemHostRegister")
        with self._lock:
            self._held[address] = ordinal

    def unpin(self, address: int) -> None:
        """End what `pin` did. No copy may be under way there.

        Raises:
            RegistrationError: nothing is pinned there, or the device has failed.
        """
        with self._giving_back(self._held.get(address, -1), address):
            self._check(self._lib.cuMemHostUnregister(self._ffi.cast("void *", address)), "cuMemHostUnregister")

    def copy_async(self, ordinal: int, dst: int, src: int, length_bytes: int, stream: int) -> None:
        """Queue a copy between any two addresses of this process, on the device or the host; does not wait for it.

        Host memory must be pinned: with other memory the call may wait for the copy. Both stay as they are until the
        stream has passed it.

        Args:
            ordinal: a device that was retained, that of the stream.
            dst: where the bytes go.
            src: where they come from.
            length_bytes: how many.
            stream: CUstream, as torch's `Stream.cuda_stream`; 0 is the default stream.

        Raises:
            RegistrationError: CUDA did not take it; or it reports what an earlier kernel or copy did.
        """
        pointer = self._ffi.cast("void *", stream)
        with self.current(ordinal):
            self._check(self._lib.cuMemcpyAsync(dst, src, length_bytes, pointer), "cuMemcpyAsync")

    def copier(self, ordinal: int, stream: int) -> Callable[[int, int, int], None]:
        """`copy_async` to one stream of a device that is the thread's current one: dst, src, length_bytes. Cheaper.

        A thread in which nothing has used CUDA yet gets the device's primary context, as CUDA's runtime would give it.
        """
        self.retain(ordinal)
        copy, check, pointer = self._lib.cuMemcpyAsync, self._check, self._ffi.cast("void *", stream)

        def queue(dst: int, src: int, length_bytes: int) -> None:
            result = copy(dst, src, length_bytes, pointer)
            if result == _INVALID_CONTEXT:
                check(self._lib.cuCtxSetCurrent(self._contexts[ordinal]), "cuCtxSetCurrent")
                result = copy(dst, src, length_bytes, pointer)
            check(result, "cuMemcpyAsync")

        return queue

    def priorities(self, ordinal: int) -> range:
        """Priorities that streams of a device can have. The smallest runs first, 0 is the last and that of other streams.

        Raises:
            RegistrationError: there is no such device.
        """
        self.retain(ordinal)
        least, greatest = self._ffi.new("int *"), self._ffi.new("int *")
        with self.current(ordinal):
            self._check(self._lib.cuCtxGetStreamPriorityRange(least, greatest), "cuCtxGetStreamPriorityRange")
        return range(greatest[0], least[0] + 1)

    def make_stream(self, ordinal: int, priority: int = 0) -> int:
        """A stream that nobody else has: CUstream. Torch's own streams come from a pool of 32, and are given out again.

        Args:
            ordinal: of the device.
            priority: of `priorities`; CUDA takes the nearest for another.

        Raises:
            RegistrationError: there is no such device, or it has failed.
        """
        self.retain(ordinal)
        out = self._ffi.new("void **")
        with self.current(ordinal):
            self._check(
                self._lib.cuStreamCreateWithPriority(out, _NON_BLOCKING, priority), "cuStreamCreateWithPriority"
            )
        return int(self._ffi.cast("uintptr_t", out[0]))

    def drop_stream(self, ordinal: int, stream: int) -> None:
        """End a stream of `make_stream`. What is queued on it still runs.

        Raises:
            RegistrationError: the device has failed.
        """
        with self.current(ordinal):
            self._check(self._lib.cuStreamDestroy_v2(self._ffi.cast("void *", stream)), "cuStreamDestroy")

    def synchronize(self, ordinal: int) -> None:
        """Wait until a device has done all that was asked of its primary context so far, by anybody in this process.

        Blocks the thread and lets other threads run. For ends and fences: it waits for the application's kernels too.

        Raises:
            RegistrationError: the device has failed; the text names the error, which may be of an earlier kernel.
        """
        with self.current(ordinal):
            self._check(self._lib.cuCtxSynchronize(), "cuCtxSynchronize")

    def close(self) -> None:
        """Release the contexts; those whose memory is still allocated or pinned when that is given back. Idempotent."""
        with self._lock:
            self._closed = True
            self._release()

    def _release(self) -> None:
        """Holds the lock."""
        for ordinal in self._contexts.keys() - self._held.values():
            del self._contexts[ordinal]
            self._lib.cuDevicePrimaryCtxRelease_v2(self._out("int *", "cuDeviceGet", ordinal))

    @contextlib.contextmanager
    def _giving_back(self, ordinal: int, address: int) -> Iterator[None]:
        """Inside, the context of the device is current; afterwards the address is nobody's.

        Raises:
            RegistrationError: it is not held there.
        """
        with self._lock:
            if self._held.get(address) != ordinal:
                raise self._refusal(address, "is not held here: it was given back, or never allocated or pinned")
            with self.current(ordinal):
                yield
            del self._held[address]
            if self._closed:
                self._release()

    def _fabric(self, address: int) -> bool:
        return bool(self._attribute(_HANDLE_TYPES, address) & _FABRIC)

    def _attribute(self, attribute: int, address: int) -> int:
        data = self._ffi.new("unsigned long long *")  # attributes are 1, 4 or 8 bytes long, little-endian
        if self._lib.cuPointerGetAttribute(data, attribute, address):
            raise self._refusal(address, "is not known to CUDA in this process")
        return int(data[0])

    def _refusal(self, address: int, text: str) -> RegistrationError:
        return RegistrationError(BACKEND, DEVICE_MEMORY, f"{address:#x} {text}")

    def _out(self, kind: str, function: str, *arguments: int) -> CData:
        """What a function puts behind its first argument."""
        out = self._ffi.new(kind)
        self._check(getattr(self._lib, function)(out, *arguments), function.removesuffix("_v2"))
        return out[0]

    def _check(self, result: int, what: str) -> None:
        if result:
            text = self._ffi.new("const char **")
            known = self._lib.cuGetErrorName(result, text) == 0
            name = self._ffi.string(text[0]).decode() if known else str(result)
            raise RegistrationError(BACKEND, DEVICE_MEMORY, f"{what} failed: {name}")


class _Current:
    """See `Cuda.current`. Entered for every turn of a loop, so it makes as few objects as will do."""

    __slots__ = ("_context", "_cuda", "_mode")

    def __init__(self, cuda: Cuda, context: CData) -> None:
        self._cuda, self._context = cuda, context

    def __enter__(self) -> None:
        cuda = self._cuda
        if result := cuda._lib.cuCtxPushCurrent_v2(self._context):
            cuda._check(result, "cuCtxPushCurrent")
        self._mode = cuda._ffi.new("int *", _RELAXED)
        if result := cuda._lib.cuThreadExchangeStreamCaptureMode(self._mode):
            cuda._lib.cuCtxPopCurrent_v2(cuda._popped)  # what cannot be entered is not left: no `__exit__` follows
            cuda._check(result, "cuThreadExchangeStreamCaptureMode")

    def __exit__(self, *_: object) -> None:
        cuda = self._cuda
        result = cuda._lib.cuThreadExchangeStreamCaptureMode(self._mode)  # it holds what was before
        cuda._lib.cuCtxPopCurrent_v2(cuda._popped)
        if result:
            cuda._check(result, "cuThreadExchangeStreamCaptureMode")


class DeviceMemory:
    """Memory of a GPU that other processes can map, owned by this object until `close`.

    Attributes:
        ordinal: CUDA ordinal of the GPU.
        address: first byte.
        length_bytes: extent.

    Raises:
        RegistrationError: (of the constructor) there is no such device, or no memory.
    """

    def __init__(self, cuda: Cuda, ordinal: int, length_bytes: int) -> None:
        self.ordinal = ordinal
        self.length_bytes = length_bytes
        self.address = cuda.allocate(ordinal, length_bytes)
        self._cuda: Cuda | None = cuda

    def export_handle(self) -> bytes:
        """See `Cuda.export_handle`.

        Raises:
            RegistrationError: it is closed, or the system does not let processes share memory of GPUs.
        """
        if self._cuda is None:
            raise RegistrationError(BACKEND, DEVICE_MEMORY, "memory that was given back cannot be exported")
        return self._cuda.export_handle(self.address)

    def close(self) -> None:
        """Give it back, see `Cuda.free`. Idempotent; the address must not be used any more.

        Raises:
            RegistrationError: the device has failed; the memory is lost with its context.
        """
        cuda, self._cuda = self._cuda, None
        if cuda is not None:
            cuda.free(self.ordinal, self.address)
