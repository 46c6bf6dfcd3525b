"""What only the NumPy kernels can get wrong: pieces, windows over far-off memory, and the GIL."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from implementations import REFERENCE
from kernel_checks import CHECKS, Check, Launch
from kernel_pools import Bytes

from rdma_kv.kernels import reference
from rdma_kv.kernels.launch import Chunk


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_small_pieces(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every chunk is cut at rows and at planes."""
    monkeypatch.setattr(reference, "_PIECE_BYTES", 200)
    monkeypatch.setattr(reference, "_TEMPORARY_BYTES", 100)
    monkeypatch.setattr(reference, "_PIECE_ROWS", 700)
    check(REFERENCE)


@pytest.mark.parametrize("long_row_bytes", [1, 100])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_long_rows_from_small_on(check: Check, long_row_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_LONG_ROW_BYTES", long_row_bytes)
    check(REFERENCE)


def test_window_over_all_user_addresses() -> None:
    """NumPy bounds items times item length; a window must fit whatever lies between two allocations."""
    ends = np.array([[0], [2**47 - 4096 - 65_535]], np.int64)
    part = reference._part(
        64, 65_535, base=ends + 4096, pool=None, offset=np.zeros(1, np.int64), row_bytes=reference._LONG_ROW_BYTES - 1
    )
    window, index, _ = next(reference._pieces(part, 1, direct=False))
    assert window.shape[0] == index.max() + 1


class Clock:
    """Stands in for the module `time`; each look at it takes `step_s`."""

    def __init__(self, step_s: float) -> None:
        self._now = 0.0
        self._step_s = step_s
        self.sleeps = 0

    def monotonic(self) -> float:
        self._now += self._step_s
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        self.sleeps += 1


def many_rows(rows: int, row_bytes: int, *, shift: int = 0) -> tuple[Chunk, Bytes]:
    """A chunk of every other row of a pool; `shift` moves the last one. The bytes are to be kept."""
    room = np.zeros(3 * (rows + 1) * row_bytes, np.uint8)
    offset = np.arange(rows, dtype=np.int64) * 2 * row_bytes
    offset[-1] += shift
    paged = np.array([[room.ctypes.data]], np.int64)
    packed = room.ctypes.data + 2 * (rows + 1) * row_bytes
    return Chunk(packed, paged, np.zeros(rows, np.int32), offset, 1, 0, row_bytes), room


@pytest.mark.parametrize("launch", [reference.gather, reference.scatter])
@pytest.mark.parametrize(("step_s", "sleeps"), [(1e-6, 0), (50e-6, 5), (200e-6, 0)])
def test_pauses_between_short_calls(
    launch: Launch, step_s: float, sleeps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch of less than a millisecond does not pause, nor one of long calls, which let others run themselves."""
    clock = Clock(step_s)
    monkeypatch.setattr(reference, "time", clock)
    chunk, _room = many_rows(1, 64)
    launch([chunk] * 110)
    assert clock.sleeps == sleeps


@pytest.mark.parametrize(
    ("launch", "shift"), [(reference.gather, 0), (reference.gather, 1), (reference.scatter, 0), (reference.scatter, 1)]
)
def test_other_threads_run_during_a_call(launch: Launch, shift: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without help of the interpreter's switch interval, and with fewer rows than NumPy's threshold of 500."""
    monkeypatch.setattr(reference, "_TURN_S", 1e9)
    monkeypatch.setattr(reference, "_PIECE_BYTES", 1 << 30)
    chunk, _room = many_rows(300, 32 << 10, shift=shift)
    interval = sys.getswitchinterval()
    worker = threading.Thread(target=launch, args=([replace(chunk)] * 12,))
    turns = 0
    sys.setswitchinterval(60)
    try:
        worker.start()
        while worker.is_alive():
            turns += 1
            time.sleep(0)
    finally:
        worker.join()
        sys.setswitchinterval(interval)
    assert turns > 4
