"""Scatter on a GPU: the packed form to paged rows, in one launch. The host's twin is `reference.scatter`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rdma_kv.kernels import tiles
from rdma_kv.kernels.launch import Chunk


def scatter(
    chunks: Sequence[Chunk],
    *,
    device: torch.device | str,
    stream: torch.cuda.Stream | None = None,
    programs: int | None = None,
) -> None:
    """Copy the packed form to paged rows, on `stream`; returns when that is queued, not when the bytes are there.

    Writes the rows and nothing between them. If two tokens of a launch name one place, each of its words is of either.

    Args:
        chunks: of any number of transfers, ranks and replicas. Packed forms do not overlap paged rows. Their arrays are
            free on return, the memory behind their addresses once the stream has passed the launch.
        device: as for `gather`.
        stream: as for `gather`.
        programs: as for `gather`.

    Raises:
        ConfigError: a chunk's field has a wrong shape, dtype or range, or an argument does not fit. Nothing was queued.
    """
    tiles.launch(chunks, scatter=True, device=device, stream=stream, programs=programs)
