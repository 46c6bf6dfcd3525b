"""How the tables of launches reach a GPU without a wait and without an allocation: one `Feed` a stream.

A launch takes a piece of pinned memory, writes its tables there and queues their copy into the feed's memory on the device,
in front of its kernel. Two rules make it safe, and neither ever waits:

* Pieces are cut from a *sheet*, one behind the other. When a sheet is used up, an event is recorded, behind the last of its
  copies, and it is used again only when that has fired. If all are under way, a new one is made: so there is about as much
  as was ever queued at once. An event a sheet, and not a launch: to record one takes the host half as long as a copy does.
  Of sheets that are free the last is taken, which the host's caches know best.
* The memory on the device is one for all launches of the stream. Copies and kernels of a stream run in order, so a copy
  cannot overtake the kernel that reads what was there before.

The order of copy and kernel on the stream has to be that of the calls, so a feed belongs to whoever holds its `lock`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from rdma_kv.kernels.launch import Int64Array

SHEET_ITEMS = 64 << 10
"""Of a sheet, at least: 512 KiB, tables of some eighty launches of 4 MiB, or of one of 512 MiB."""

Copy = Callable[[int, int, int], object]
"""Queues a copy to one address from another of so many bytes on a feed's stream; its device is current."""


class Mark(Protocol):
    """A `torch.cuda.Event`, as far as it is needed."""

    def record(self, stream: torch.cuda.Stream | None = None) -> None: ...

    def query(self) -> bool: ...


class AlwaysPassed:
    """The mark of the host, where a copy is done when it was asked for."""

    def record(self, stream: torch.cuda.Stream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True


class Sheet:
    """Memory of the host that copies read.

    Attributes:
        host: int64 `[items]`, pinned where there is a GPU.
        array: the same for NumPy.
        copied: once recorded, fires when all copies that read it are done.
        used: items, by copies since it fired.
    """

    __slots__ = ("address", "array", "copied", "host", "used")

    def __init__(self, host: torch.Tensor, copied: Mark) -> None:
        self.host, self.copied, self.used = host, copied, 0
        self.address = host.data_ptr()
        self.array: Int64Array = host.numpy()


class Feed:
    """See the module. Use it with its `lock` held, and with its device and stream current.

    Args:
        device: whose launches it feeds.
        mark: makes what a sheet is guarded by.
        copy: what queues a copy. Torch's own would record an event for each of them, to guard what sheets guard.

    Attributes:
        lock: of whoever writes, copies and launches.
    """

    def __init__(self, device: torch.device, mark: Callable[[], Mark], copy: Copy) -> None:
        self.lock = threading.Lock()
        self._device, self._mark, self._copy = device, mark, copy
        self._sheet: Sheet | None = None
        self._line: deque[Sheet] = deque()  # under way, in the order of their copies
        self._free: list[Sheet] = []
        self._there: torch.Tensor | None = None
        self._items = 0  # of `_there`

    @property
    def sheets(self) -> int:
        """That there are."""
        return len(self._line) + len(self._free) + (self._sheet is not None)

    def send(self, size: int, write: Callable[[Int64Array], None], *, keep: bool = False) -> torch.Tensor:
        """Queue the copy of `size` items on the current stream; where it goes, int64 `[size]` or longer.

        Args:
            size: of the array that `write` is given.
            write: fills it.
            keep: the memory is the caller's, instead of the next launch's.
        """
        sheet = self._sheet
        if sheet is None or sheet.used + size > sheet.array.shape[0]:
            sheet = self._turned(size)
        begin, end = sheet.used, sheet.used + size
        write(sheet.array[begin:end])
        sheet.used = end + end % 2  # before the copy: should it fail halfway, nobody else writes there
        there = torch.empty(size, dtype=torch.int64, device=self._device) if keep else self._memory(size)
        self._copy(there.data_ptr(), sheet.address + 8 * begin, 8 * size)
        return there

    def _turned(self, size: int) -> Sheet:
        """Another sheet for the next copies, with room for `size` items."""
        if self._sheet is not None:
            self._sheet.copied.record()
            self._line.append(self._sheet)
            self._sheet = None  # before what may fail: a sheet in line twice would be written while a copy reads it
        while self._line and self._line[0].copied.query():
            self._free.append(self._line.popleft())
        sheet = self._free.pop() if self._free else None
        if sheet is None or sheet.array.shape[0] < size:  # one that is too small goes: its copies are done
            host = _empty(_rounded(size), torch.device("cpu"), pinned=self._device.type == "cuda")
            sheet = Sheet(host, self._mark())
        sheet.used = 0
        self._sheet = sheet
        return sheet

    def _memory(self, size: int) -> torch.Tensor:
        """Memory on the device for tables that the stream's next launch is done with."""
        if self._there is None or self._items < size:
            items = _rounded(size)
            self._there = _empty(items, self._device)  # may fail: then all is as it was
            self._items = items
        return self._there


def _empty(items: int, device: torch.device, *, pinned: bool = False) -> torch.Tensor:
    """Memory that is written again and again, whatever the thread's modes: one made inside the engine's
    `torch.inference_mode` could not be written outside of it."""
    with torch.inference_mode(mode=False):
        return torch.empty(items, dtype=torch.int64, device=device, pin_memory=pinned)


def _rounded(size: int) -> int:
    """Up to a power of two, so that memory seldom grows."""
    return max(SHEET_ITEMS, 1 << (size - 1).bit_length())
