"""Measures copies and the peer kernel between two GPUs in one process; `rdma_kv.bench.multigpu` makes rows of it.

Seconds on the device, from events around some launches in a row. The kernel runs on either GPU; CUDA has mapped the pages of
the other one for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from rdma_kv.errors import RdmaKvError
from rdma_kv.kernels.bench.gpu import device_s
from rdma_kv.kernels.launch import Chunk

Move = Callable[..., object]
"""`kernels.peer.move`."""

_LEAST_BYTES = 1 << 30  # of a sample of copies


def open_peers(src: torch.device, dst: torch.device) -> None:
    """Let each of two GPUs reach the other's memory; torch does that at the first copy.

    Raises:
        RdmaKvError: they cannot.
    """
    for one, other in ((src, dst), (dst, src)):
        if not torch.cuda.can_device_access_peer(one, other):
            raise RdmaKvError(f"{one} cannot reach memory of {other}")
        torch.zeros(1, device=one).to(other)
        torch.cuda.synchronize(one)


def copy_s(target: torch.Tensor, source: torch.Tensor) -> float:
    """One of several copies in a row, by the driver."""
    times = min(64, max(2, _LEAST_BYTES // source.numel()))
    with torch.cuda.device(source.device):
        return device_s(lambda: target.copy_(source, non_blocking=True), times)


def move_s(
    move: Move, sources: Sequence[Chunk], targets: Sequence[Chunk], device: torch.device, programs: int
) -> float:
    """One of several launches in a row, tables and all."""
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        return device_s(lambda: move(sources, targets, device=device, stream=stream, programs=programs))
