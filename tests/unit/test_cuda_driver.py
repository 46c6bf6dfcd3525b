"""libcuda's wrapper without a GPU: a driver of our own in its place, which keeps count. tests/gpu has the real one."""

from __future__ import annotations

import itertools
import threading

import cffi
import pytest

from rdma_kv.cuda import BACKEND, Cuda, DeviceMemory
from rdma_kv.errors import DEVICE_MEMORY, RegistrationError
from rdma_kv.transport import base

GPUS = 2
RELAXED = 2
OUT_OF_MEMORY = 2
INVALID = 1
NO_CONTEXT = 201
NAMES = {INVALID: "CUDA_ERROR_INVALID_VALUE", OUT_OF_MEMORY: "CUDA_ERROR_OUT_OF_MEMORY"}


class Driver:
    """Functions of libcuda by their names, as cffi calls them.

    Attributes:
        contexts: how often each device's primary context is retained.
        stacks: the contexts of each thread.
        memory: device of each allocation.
        pinned: addresses.
        opened: addresses of mappings.
        queued: copies: (destination, source, bytes, stream, device whose context was current).
    """

    def __init__(self, ffi):
        self.ffi = ffi
        self.contexts = dict.fromkeys(range(GPUS), 0)
        self.stacks = threading.local()
        self.serial = itertools.count()
        self.memory, self.pinned, self.opened, self.queued, self.streams = {}, set(), set(), [], {}
        self.text = {code: ffi.new("char[]", name.encode()) for code, name in NAMES.items()}

    def __getattr__(self, name):
        if name.startswith("cu"):  # those that no test needs
            return lambda *arguments: 0
        raise AttributeError(name)

    def number(self, pointer):
        return int(self.ffi.cast("uintptr_t", pointer))

    @property
    def stack(self):
        if not hasattr(self.stacks, "list"):
            self.stacks.list = []
        return self.stacks.list

    @property
    def current(self):
        device = self.stack[-1] - 1000
        assert self.contexts[device] > 0, "a context that was released"
        return device

    def cuGetErrorName(self, result, text):  # noqa: N802
        text[0] = self.text[result]
        return 0

    def cuDeviceGetCount(self, count):  # noqa: N802
        count[0] = GPUS
        return 0

    def cuDeviceGet(self, device, ordinal):  # noqa: N802
        device[0] = ordinal
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):  # noqa: N802
        self.contexts[device] += 1
        context[0] = self.ffi.cast("void *", 1000 + device)
        return 0

    def cuDevicePrimaryCtxRelease_v2(self, device):  # noqa: N802
        self.contexts[device] -= 1
        return 0

    def cuCtxPushCurrent_v2(self, context):  # noqa: N802
        self.stack.append(self.number(context))
        return 0

    def cuCtxPopCurrent_v2(self, context):  # noqa: N802
        self.stack.pop()
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode):  # noqa: N802
        mine = getattr(self.stacks, "mode", 0)
        self.stacks.mode, mode[0] = mode[0], mine
        return 0

    def cuMemAlloc_v2(self, address, length):  # noqa: N802
        assert self.stacks.mode == RELAXED
        if length > 1 << 40:
            return OUT_OF_MEMORY
        address[0] = 0x7000_0000_0000 + (next(self.serial) << 21)
        self.memory[address[0]] = self.current
        return 0

    def cuMemFree_v2(self, address):  # noqa: N802
        assert self.memory[address] == self.current
        self.memory[address] = None
        return 0

    def cuIpcGetMemHandle(self, handle, address):  # noqa: N802
        if self.memory.get(address) != self.current:
            return INVALID
        self.ffi.buffer(handle)[:8] = address.to_bytes(8, "little")
        return 0

    def cuIpcOpenMemHandle_v2(self, address, handle, flags):  # noqa: N802
        assert self.current is not None
        whose = int.from_bytes(self.ffi.buffer(self.ffi.addressof(handle))[:8], "little")
        if not whose or flags != 1:
            return INVALID
        address[0] = whose + (1 << 40)
        self.opened.add(address[0])
        return 0

    def cuIpcCloseMemHandle(self, address):  # noqa: N802
        assert self.current is not None
        self.opened.remove(address)
        return 0

    def cuMemHostRegister_v2(self, memory, length, flags):  # noqa: N802
        assert self.current is not None
        assert flags == 1
        if self.number(memory) in self.pinned:
            return INVALID
        self.pinned.add(self.number(memory))
        return 0

    def cuMemHostUnregister(self, memory):  # noqa: N802
        assert self.current is not None
        self.pinned.remove(self.number(memory))
        return 0

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self.stack[-1:] = [self.number(context)]
        return 0

    def cuMemcpyAsync(self, dst, src, length, stream):  # noqa: N802
        if not self.stack:
            return NO_CONTEXT
        self.queued.append((dst, src, length, self.number(stream), self.current))
        return INVALID if not length else 0

    def cuCtxGetStreamPriorityRange(self, least, greatest):  # noqa: N802
        least[0], greatest[0] = 0, -5
        return 0

    def cuStreamCreateWithPriority(self, stream, flags, priority):  # noqa: N802
        handle = 0x55 + len(self.streams)
        self.streams[handle] = (self.current, flags, priority)
        stream[0] = self.ffi.cast("void *", handle)
        return 0

    def cuStreamDestroy_v2(self, stream):  # noqa: N802
        del self.streams[self.number(stream)]
        return 0


@pytest.fixture
def drivers(monkeypatch):
    made = []

    def dlopen(ffi, path):
        made.append(Driver(ffi))
        return made[-1]

    monkeypatch.setattr(cffi.FFI, "dlopen", dlopen)
    return made


@pytest.fixture
def cuda(drivers):
    return Cuda()


@pytest.fixture
def driver(cuda, drivers):
    yield drivers[-1]
    assert getattr(drivers[-1].stacks, "mode", 0) == 0
    assert not drivers[-1].stack  # whatever happened, the thread's own context is current again


def refused(caught, *words):
    assert (caught.value.backend, caught.value.status) == (BACKEND, DEVICE_MEMORY) == ("cuda", base.DEVICE_MEMORY)
    for word in words:
        assert word in str(caught.value)


def test_memory_is_of_its_device_until_it_is_closed(cuda, driver):
    memory = DeviceMemory(cuda, 1, 1 << 20)
    assert (memory.ordinal, memory.length_bytes) == (1, 1 << 20)
    assert driver.memory == {memory.address: 1}
    memory.close()
    memory.close()
    assert driver.memory == {memory.address: None}
    cuda.close()
    assert driver.contexts == {0: 0, 1: 0}


def test_a_context_is_retained_as_long_as_its_memory_also_after_close(cuda, driver):
    first, second = DeviceMemory(cuda, 0, 4096), DeviceMemory(cuda, 0, 4096)
    cuda.retain(1)
    cuda.pin(0x1000, 4096, 1)
    cuda.close()
    assert driver.contexts == {0: 1, 1: 1}
    first.close()
    assert driver.contexts == {0: 1, 1: 1}
    second.close()
    assert driver.contexts == {0: 0, 1: 1}
    cuda.unpin(0x1000)
    assert driver.contexts == {0: 0, 1: 0}
    cuda.close()
    assert driver.contexts == {0: 0, 1: 0}


def test_what_there_is_not_is_refused_with_cudas_own_word(cuda, driver):
    with pytest.raises(RegistrationError) as caught:
        cuda.allocate(0, 1 << 50)
    refused(caught, "cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(RegistrationError) as caught:
        cuda.allocate(0, 0)
    refused(caught, "0 bytes")
    for ordinal in (GPUS, -1):
        with pytest.raises(RegistrationError) as caught:
            DeviceMemory(cuda, ordinal, 4096)
        refused(caught, f"ordinal {ordinal}", "CUDA_VISIBLE_DEVICES")
    assert not driver.memory


def test_memory_is_given_back_once_and_where_it_is(cuda, driver):
    address = cuda.allocate(0, 4096)
    cuda.retain(1)
    for ordinal, other in ((1, address), (0, address + 1)):
        with pytest.raises(RegistrationError) as caught:
            cuda.free(ordinal, other)
        refused(caught, "not held")
    cuda.free(0, address)
    with pytest.raises(RegistrationError):
        cuda.free(0, address)


def test_pinned_memory_is_unpinned_where_it_was_pinned(cuda, driver):
    cuda.pin(0x2000, 4096, 1)
    assert driver.pinned == {0x2000}
    with pytest.raises(RegistrationError) as caught:
        cuda.pin(0x2000, 4096, 1)
    refused(caught, "cuMemHostRegister")
    cuda.unpin(0x2000)
    assert not driver.pinned
    with pytest.raises(RegistrationError) as caught:
        cuda.unpin(0x2000)
    refused(caught, "not held")


def test_memory_is_exported_and_what_was_opened_is_closed_once(cuda, driver):
    address = cuda.allocate(1, 4096)
    handle = cuda.export_handle(address)
    assert len(handle) == 64
    here = cuda.open_handle(0, handle)
    assert driver.opened == {here}
    with pytest.raises(RegistrationError) as caught:
        cuda.export_handle(here)
    refused(caught)
    cuda.close_handle(here)
    assert not driver.opened
    cuda.free(1, address)
    for wrong in (
        lambda: cuda.close_handle(here),
        lambda: cuda.export_handle(address),
        lambda: cuda.open_handle(0, b"short"),
        lambda: cuda.open_handle(0, bytes(64)),
    ):
        with pytest.raises(RegistrationError) as caught:
            wrong()
        refused(caught)


def test_a_copy_is_queued_on_its_stream_in_the_context_of_its_device(cuda, driver):
    cuda.retain(1)
    cuda.copy_async(1, 0x10, 0x20, 30, 0x55)
    assert driver.queued == [(0x10, 0x20, 30, 0x55, 1)]
    with pytest.raises(RegistrationError) as caught:
        cuda.copy_async(1, 0x10, 0x20, 0, 0x55)
    refused(caught, "cuMemcpyAsync", "CUDA_ERROR_INVALID_VALUE")


def test_a_thread_that_has_no_context_gets_that_of_the_copiers_device(cuda, driver):
    copy = cuda.copier(1, 0x55)

    def in_a_thread():
        copy(0x10, 0x20, 30)
        copy(0x30, 0x40, 50)

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert driver.queued == [(0x10, 0x20, 30, 0x55, 1), (0x30, 0x40, 50, 0x55, 1)]
    assert not driver.stack, "another thread's is its own business"
    with cuda.current(1), pytest.raises(RegistrationError) as caught:
        copy(0x10, 0x20, 0)
    refused(caught, "cuMemcpyAsync", "CUDA_ERROR_INVALID_VALUE")


def test_streams_have_the_priority_that_was_asked_for_and_wait_for_no_default_stream(cuda, driver):
    assert cuda.priorities(0) == range(-5, 1)
    stream = cuda.make_stream(0, -3)
    assert driver.streams == {stream: (0, 1, -3)}
    cuda.drop_stream(0, stream)
    assert not driver.streams


def test_what_could_not_be_entered_leaves_the_context_of_the_thread(cuda, driver, monkeypatch):
    """Else the engine's own code would go on with our device."""
    cuda.retain(1)
    monkeypatch.setattr(driver, "cuThreadExchangeStreamCaptureMode", lambda mode: INVALID, raising=False)
    with pytest.raises(RegistrationError) as caught, cuda.current(1):
        raise AssertionError("it was entered")
    refused(caught, "cuThreadExchangeStreamCaptureMode")
    assert not driver.stack


def test_from_many_threads_a_context_is_retained_once_and_each_has_its_own_stack(cuda, driver):
    found, barrier = [], threading.Barrier(8)

    def use():
        barrier.wait(20)
        for _ in range(50):
            address = cuda.allocate(0, 4096)
            cuda.free(0, address)
        found.append(len(driver.stack))

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [0] * 8
    assert driver.contexts[0] == 1
    cuda.close()
    assert driver.contexts[0] == 0


def test_a_library_that_is_none_is_refused_by_name():
    with pytest.raises(RegistrationError) as caught:
        Cuda("libc.so.6")
    refused(caught, "libc.so.6")
