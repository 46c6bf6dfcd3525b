"""What an agent needs of the process that holds the pools: its own, or another one, to which it is a sidecar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rdma_kv.kernels.work import Work
from rdma_kv.memory import HostMemory
from rdma_kv.staging import Segment


class Kernels(Protocol):
    """Gather and scatter, where the pools are."""

    @property
    def launches(self) -> tuple[int, int]:
        """(gather, scatter) launches so far."""
        ...

    async def start(self) -> None:
        """Get ready.

        Raises:
            ConfigError: they cannot run there; the field is named.
        """
        ...

    async def close(self) -> bool:
        """End. Whether no kernel can touch memory any more."""
        ...

    async def gather(self, work: Work) -> int | None:
        """Pages to slot. Returns when the slot is filled: its checksum, if that is asked for."""
        ...

    async def scatter(self, work: Work) -> int | None:
        """Slot to pages. Returns when the pages are filled, or with a wrong checksum, and then no page was touched."""
        ...

    async def fired(self, events: Sequence[Any]) -> None:
        """Returns when all CUDA events have fired. May be cancelled.

        Raises:
            LocalProtocolError: the GPU has failed.
        """
        ...

    def use_lane(self, lane: str) -> None:
        """A link's WRITEs go over `lane` from now on: launches must outrun it."""
        ...


class EngineSide(Protocol):
    """The engine's process, where that is another one."""

    @property
    def kernels(self) -> Kernels: ...

    def make_host(self, length_bytes: int) -> HostMemory:
        """Host memory for staging that both processes can map."""
        ...

    async def share(self, segment: Segment) -> None:
        """Have the engine map a segment; its slots are used when this has returned.

        Raises:
            RdmaKvError: the engine is gone, or cannot map it.
        """
        ...
