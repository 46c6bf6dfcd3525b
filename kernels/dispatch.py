"""From tables to a running kernel, in few microseconds of the host: streams as launches see them, and compiled kernels.

`torch.cuda.device` and `torch.cuda.stream` are entered only where the caller's thread is elsewhere, and what is current is
asked of Triton's driver, a tenth of what torch's objects take. Triton's own dispatcher looks at every argument of every call;
a kernel whose constants were seen before is started as the compiled kernel that the first call returned, by its own public
`kernel[grid](arguments, stream=...)`. Arguments are addresses then, which saves a look-up of each pointer. All tables lie at
multiples of 16 bytes, which is what the first call told the compiler.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
from triton.runtime import driver

from rdma_kv.cuda import Cuda
from rdma_kv.errors import ConfigError
from rdma_kv.kernels.device import NotCompiled
from rdma_kv.kernels.feed import AlwaysPassed, Feed
from rdma_kv.kernels.programs import DEFAULT_PROGRAMS

PROGRAMS = DEFAULT_PROGRAMS
"""Programs of one launch unless told otherwise. They take at most as many multiprocessors, and leave the rest to the engine's
compute. On an H200, 16 of them carry 580 GB/s of payload, more than any lane there; `programs` chooses for a lane."""


def _nothing() -> None:
    """For `INTERPRETED`."""


INTERPRETED = not isinstance(triton.jit(_nothing), triton.JITFunction)  # as decided by TRITON_INTERPRET at import

# The first whose compiled kernels were seen to take constants among the arguments, as their own dispatcher gives them.
_DIRECT = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)
_HERE: AbstractContextManager[None] = nullcontext()


@cache
def _cuda() -> Cuda:
    """libcuda, for as long as the process lives."""
    return Cuda()


class Queue:
    """A stream of a device. `of` gives the same for the same.

    Attributes:
        device: with its index.
        index: of the device; -1 is the host, with the interpreter.
        handle: of the stream, CUDA's.
        feed: of its tables; hold its lock from the copy of a launch's tables to its start.
    """

    def __init__(self, device: torch.device, handle: int) -> None:
        self.device, self.handle = device, handle
        self.index = -1 if device.type == "cpu" else device.index
        if self.index < 0:
            self.feed = Feed(device, AlwaysPassed, ctypes.memmove)
        else:
            self.feed = Feed(device, torch.cuda.Event, _cuda().copier(self.index, handle))

    def current(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[None]:
        """Make device and stream those that torch uses in this thread; `stream` is this one's, None the current one."""
        if self.index < 0:
            return _HERE
        active = driver.active
        if active.get_current_device() != self.index:
            return on(self.device, stream)
        if stream is None or active.get_current_stream(self.index) == self.handle:
            return _HERE
        entered: AbstractContextManager[None] = torch.cuda.stream(stream)
        return entered


_queues: dict[tuple[int, int], Queue] = {}


def queue_of(device: torch.device, stream: torch.cuda.Stream | None) -> Queue:
    """That of a checked device and its stream; None is its current stream."""
    if device.type == "cpu":
        index, handle = -1, 0
    else:
        active = driver.active
        index = active.get_current_device() if device.index is None else device.index
        handle = active.get_current_stream(index) if stream is None else stream.cuda_stream
    queue = _queues.get((index, handle))
    if queue is None:
        made = Queue(device if index < 0 else torch.device("cuda", index), handle)
        queue = _queues.setdefault((index, handle), made)
    return queue


def forget(stream: torch.cuda.Stream) -> None:
    """Drop what is kept for a stream that ends; nothing may run on it any more."""
    _queues.pop((stream.device.index, stream.cuda_stream), None)


def check_programs(programs: int | None) -> int:
    """The number of programs; None is `PROGRAMS`.

    Raises:
        ConfigError: it is not positive.
    """
    if programs is None:
        return PROGRAMS
    if programs < 1:
        raise ConfigError("programs", f"{programs} is not positive")
    return programs


def check_device(device: torch.device | str, stream: torch.cuda.Stream | None) -> torch.device:
    """Where a kernel is to run.

    Raises:
        ConfigError: kernels cannot run there, or the stream is another device's.
    """
    device = torch.device(device)
    if device.type != ("cpu" if INTERPRETED else "cuda"):
        why = "TRITON_INTERPRET was set" if INTERPRETED else "TRITON_INTERPRET was not set"
        raise ConfigError("device", f"{device}, but {why} when the kernel was imported")
    if stream is not None and device.index not in {None, stream.device.index}:
        raise ConfigError("stream", f"is of {stream.device}, not {device}")
    return device


@contextmanager
def on(device: torch.device, stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Make device and stream those that torch and Triton use in this thread."""
    if device.type == "cuda":
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield
    else:
        yield


_compiled: dict[tuple[Any, ...], tuple[Any, Any]] = {}


class _Caller(threading.local):
    may_not_compile = False


_caller = _Caller()


def forbid_compiling(forbidden: bool) -> None:
    """Whether a launch of this thread that would have to compile its kernel raises `NotCompiled` from now on.

    With Triton before 3.6 it compiles all the same: there, what was compiled is not known here.
    """
    _caller.may_not_compile = forbidden


def start(
    kernel: Any,  # noqa: ANN401 - Triton is not typed
    programs: int,
    tables: Sequence[torch.Tensor],
    constants: tuple[Any, ...],
    *,
    warps: int,
    registers: int | None,
    queue: Queue,
) -> None:
    """Start a kernel on a queue that is current.

    Args:
        kernel: takes tables, then constants.
        programs: of the grid.
        tables: on the device, at multiples of 16 bytes; kept until the stream has passed the launch.
        constants: of the kernel.
        warps: of a program.
        registers: a thread has at most; None leaves it to the compiler.
        queue: whose stream runs it.

    Raises:
        NotCompiled: see `forbid_compiling`; nothing was started.
    """
    key = (id(kernel), queue.index, warps, registers, constants)
    known = _compiled.get(key)
    if known is not None:
        known[1][(programs, 1, 1)](*[table.data_ptr() for table in tables], *constants, stream=queue.handle)
        return
    options = {"num_warps": warps} | ({"maxnreg": registers} if registers else {})
    if _caller.may_not_compile and _DIRECT and isinstance(kernel, triton.JITFunction):
        raise NotCompiled(lambda: _compile(kernel, len(tables), constants, options, queue, key))
    compiled = kernel[(programs,)](*tables, *constants, **options)
    if _DIRECT and isinstance(kernel, triton.JITFunction) and compiled is not None:
        _compiled[key] = (kernel, compiled)  # the kernel too, so that no other has its id


def _compile(
    kernel: Any,  # noqa: ANN401
    tables: int,
    constants: tuple[Any, ...],
    options: dict[str, int],
    queue: Queue,
    key: tuple[Any, ...],
) -> None:
    """Compile a kernel for `start`, and load it onto the device, without a launch."""
    with on(queue.device, None):
        anywhere = torch.empty(2, dtype=torch.int64, device=queue.device)
        compiled = kernel.warmup(*[anywhere] * tables, *constants, grid=(1,), **options)
        compiled[(1, 1, 1)]  # what it returns is ready to be called
    _compiled[key] = (kernel, compiled)
