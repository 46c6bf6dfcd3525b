"""Gather on a GPU: paged rows to the packed form, in one launch. The host's twin is `reference.gather`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rdma_kv.kernels import summed, tiles
from rdma_kv.kernels.launch import Chunk
from rdma_kv.kernels.summed import Checksums


def gather(
    chunks: Sequence[Chunk],
    *,
    device: torch.device | str,
    stream: torch.cuda.Stream | None = None,
    programs: int | None = None,
    checksum: bool | Sequence[bool] = False,
) -> Checksums | None:
    """Copy paged rows to the packed form, on `stream`; returns when that is queued, not when the bytes are there.

    One launch serves all chunks. The first one in a process compiles, which takes seconds.

    Args:
        chunks: of any number of transfers, ranks and replicas. Packed forms overlap neither one another nor paged rows.
            Their arrays are free on return, the memory behind their addresses once the stream has passed the launch.
        device: whose kernels run; all addresses must be valid there, on the GPU itself, a peer or pinned host memory.
            "cpu" takes addresses of this process and needs Triton's interpreter; there the bytes are in place on return.
        stream: of that device; None is its current stream. Orders this launch with what produces and uses the bytes.
        programs: of the grid, so at most as many multiprocessors are taken; None is `dispatch.PROGRAMS`. What a lane needs
            says `programs.fewest_programs`. One a piece (any large number) is fastest, where nothing else runs.
        checksum: of the packed forms, computed in the same pass: of all chunks, or of those where it says so. Identical to
            `checksum.checksum`. In a launch with a chunk whose rows, strides or addresses 16 does not divide, a second
            kernel reads them once more, behind the first.

    Returns:
        The checksums, on the device; None where none is wanted.

    Raises:
        ConfigError: a chunk's field has a wrong shape, dtype or range, or an argument does not fit. Nothing was queued.
    """
    wanted = summed.wanted_of(checksum, len(chunks))
    if wanted is not None:
        return summed.launch(chunks, wanted, device=device, stream=stream, programs=programs)
    tiles.launch(chunks, scatter=False, device=device, stream=stream, programs=programs)
    return None
