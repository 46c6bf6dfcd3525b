"""Plain copies between a GPU and pinned host memory, and between two GPUs: what packing is measured against. Seconds."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def host_memory(length_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Zeroed host memory, uint8 `[length_bytes]`. Pinning it takes a GPU."""
    return torch.zeros(length_bytes, dtype=torch.uint8, pin_memory=pinned)


def copy_s(target: torch.Tensor, source: torch.Tensor) -> float:
    """One copy of the driver's, from the call until the bytes are there."""
    devices = [each.device for each in (target, source) if each.is_cuda]
    for device in devices:
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    target.copy_(source, non_blocking=True)
    for device in devices:
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def slower_of_both_s(down: Callable[[], object], up: Callable[[], object], device: torch.device) -> float:
    """Two copies at once, each on a stream of its own: the longer of their times on the device."""
    times = []
    torch.cuda.synchronize(device)
    for call in (down, up):
        stream = torch.cuda.Stream(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(stream):
            begin.record()
            call()
            end.record()
        times.append((begin, end))
    torch.cuda.synchronize(device)
    return float(max(begin.elapsed_time(end) for begin, end in times)) / 1e3
