"""Gather on a GPU: paged rows to the packed form, in one launch. The host's twin is `reference.gather`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rdma_kv.kernels import tiles
from rdma_kv.kernels.launch import Chunk


def gather(
    chunks: Sequence[Chunk],
    *,
    device: torch.device | str,
    stream: torch.cuda.Stream | None = None,
    programs: int | None = None,
) -> None:
    """Copy paged rows to the packed form, on `stream`; returns when that is queued, not when the bytes are there.

    One launch serves all chunks. The first one in a process compiles, which takes seconds.

    Args:
        chunks: of any number of transfers, ranks and replicas. Packed forms overlap neither one another nor paged rows.
            Their arrays are free on return, the memory behind their addresses once the stream has passed the launch.
        device: whose kernels run; all addresses must be valid there, on the GPU itself, a peer or pinned host memory.
            "cpu" takes addresses of this process and needs Triton's interpreter; there the bytes are in place on return.
        stream: of that device; None is its current stream. Orders this launch with what produces and uses the bytes.
        programs: of the grid, so at most as many multiprocessors are taken; None is `tiles.PROGRAMS`. What a lane needs
            says `programs.fewest_programs`. One a piece (any large number) is fastest, where nothing else runs.

    Raises:
        ConfigError: a chunk's field has a wrong shape, dtype or range, or an argument does not fit. Nothing was queued.
    """
    tiles.launch(chunks, scatter=False, device=device, stream=stream, programs=programs)
