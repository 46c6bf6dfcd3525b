"""What `schedule` needs of a GPU, in four words. `device_torch` has them for CUDA; tests drive a device of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.work import Work

Sums = Callable[[], list[int | None]]
"""Checksums by the works of a launch, None for those that need none. To be called once an event behind the launch fired."""


class NotCompiled(Exception):
    """A launch has not begun, as its kernel is not compiled.

    Attributes:
        prepare: compiles and loads it, in any thread: seconds. Then the same launch can begin.
    """

    def __init__(self, prepare: Callable[[], None]) -> None:
        super().__init__("a kernel is not compiled yet")
        self.prepare = prepare


class Event(Protocol):
    """A mark on a stream."""

    def query(self) -> bool:
        """Whether all that was queued before the mark is done. Does not wait.

        Raises:
            Exception: the device has failed for good.
        """
        ...


class Stream(Protocol):
    """Work that runs in order, beside that of other streams."""

    def wait_event(self, event: Any) -> None:  # noqa: ANN401 - a producer's event is torch's
        """What is queued from now on waits for the event, on the device."""
        ...

    def record_event(self) -> Event:
        """A mark behind what is queued now."""
        ...


class Device(Protocol):
    """A GPU. All methods but `warm` and `close` only queue; none waits for the device, and none compiles a kernel."""

    def enter(self) -> None:
        """To be called first on a thread of our own that only asks events."""
        ...

    def current(self) -> AbstractContextManager[None]:
        """Inside, this thread may call all other methods and ask events; afterwards it is as its owner left it.

        Raises:
            RegistrationError: (on the way in or out) the device has failed for good.
        """
        ...

    def stream(self) -> Stream:
        """A stream of its own, with the priority that was configured."""
        ...

    def gather(self, works: Sequence[Work], stream: Any, programs: int, after: Sequence[Any]) -> Sums:  # noqa: ANN401
        """Pages to packed forms, in one launch, and the checksums of the works that want them.

        Args:
            works: of the launch.
            stream: that runs it.
            programs: of the grid.
            after: events that the kernel waits for, on the device. Nothing but the kernel is queued behind them, so none
                of the works may want a checksum. Without, the stream's order is all there is.

        Raises:
            ConfigError: a chunk cannot be one. No kernel was queued.
            NotCompiled: as it says; a part of the launch that does no harm twice may have been queued.
        """
        ...

    def scatter(self, chunks: Sequence[Chunk], stream: Any, programs: int, after: Sequence[Any]) -> None:  # noqa: ANN401
        """Packed forms to pages, in one launch; otherwise as `gather`."""
        ...

    def sums(self, works: Sequence[Work], stream: Any, programs: int) -> Sums:  # noqa: ANN401
        """Checksums of the packed forms of all works; raises as `gather`."""
        ...

    def copy(self, dst: int, src: int, length_bytes: int, stream: Any) -> None:  # noqa: ANN401
        """Copy bytes between the device and pinned host memory."""
        ...

    def warm(self, programs: int) -> None:
        """Compile the usual kernels, and use each stream once. Needs no `current`.

        Takes seconds where they were never compiled before; waits for them to run once.
        """
        ...

    def close(self) -> None:
        """Give the streams back. Nothing runs on them any more."""
        ...
