"""What `streams` needs of a GPU, in four words. `device_torch` has them for CUDA; tests drive a device of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.work import Work

Sums = Callable[[], list[int | None]]
"""Checksums by the works of a launch, None for those that need none. To be called once an event behind the launch fired."""


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
    """A GPU. All methods but `warm` and `close` only queue; none waits for the device."""

    def enter(self) -> None:
        """To be called first on the thread that calls all other methods, but for `warm`."""
        ...

    def stream(self) -> Stream:
        """A stream of its own, with the priority that was configured."""
        ...

    def gather(self, works: Sequence[Work], stream: Any, programs: int) -> Sums:  # noqa: ANN401
        """Pages to packed forms, in one launch, and the checksums of the works that want them.

        Raises:
            ConfigError: a chunk cannot be one. No kernel was queued.
        """
        ...

    def scatter(self, chunks: Sequence[Chunk], stream: Any, programs: int) -> None:  # noqa: ANN401
        """Packed forms to pages, in one launch; raises as `gather`."""
        ...

    def sums(self, works: Sequence[Work], stream: Any, programs: int) -> Sums:  # noqa: ANN401
        """Checksums of the packed forms of all works; raises as `gather`."""
        ...

    def copy(self, dst: int, src: int, length_bytes: int, stream: Any) -> None:  # noqa: ANN401
        """Copy bytes between the device and pinned host memory."""
        ...

    def warm(self, programs: int) -> None:
        """Compile the usual kernels. Takes seconds where they were never compiled before; waits for them to run once."""
        ...

    def close(self) -> None:
        """Give the streams back. Nothing runs on them any more."""
        ...
