"""Which agents talk to one another in `bench gpu` and `bench multigpu`, and what one measured process is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path

from rdma_kv.bench.gpu_memory import Rows
from rdma_kv.bench.member import CLUSTER
from rdma_kv.config import GpuConfig, StagingConfig, Timeouts
from rdma_kv.session import AgentConfig
from rdma_kv.topology import Topology
from rdma_kv.types import Role

TRANSFER_S = 30.0
"""Longest that one transfer may take."""


class Way(StrEnum):
    """Where the pools of a link's agents lie, and what its WRITEs read."""

    DIRECT = "direct"  # GPU to GPU
    PINNED = "pinned"  # GPU to GPU through pinned host memory
    HOST = "host"  # host to host


@dataclass(frozen=True, slots=True)
class Link:
    """Agents that talk to one another.

    Attributes:
        transport: `ucx` or `nixl`.
        row_bytes: of their model.
        slots, slot_bytes: of their staging.
    """

    transport: str
    way: Way
    row_bytes: int
    slots: int = 16
    slot_bytes: int = 64 << 20

    @property
    def wire(self) -> tuple[str, str, int, int, int]:
        """As `Worker.ask` can carry it."""
        return self.transport, self.way.value, self.row_bytes, self.slots, self.slot_bytes

    @property
    def name(self) -> str:
        return f"{self.transport}-{self.way.value}-{self.row_bytes}-{self.slots}x{self.slot_bytes}"


Wire = tuple[str, str, int, int, int]


def link_of(wire: Wire) -> Link:
    """The other half of `Link.wire`."""
    transport, way, row_bytes, slots, slot_bytes = wire
    return Link(transport, Way(way), row_bytes, slots, slot_bytes)


@dataclass(frozen=True, slots=True)
class SideSpec:
    """What one measured process is.

    Attributes:
        ranks: of its engine: tp = dp = ranks, so each is a replica of its own.
        ordinal: of its GPU; None for a machine without one, where all ways are `HOST`.
        most_bytes: of one request, on the GPU and on the host; pools are twice as large.
        folder: where the parent writes the registry of each link.
        pipes: from the other side and to it; see `Plain`.
    """

    role: Role
    rank: int
    ranks: int
    ordinal: int | None
    layers: int
    most_bytes: int
    most_host_bytes: int
    folder: Path
    pipes: tuple[Connection, Connection]

    def registry(self, link: Link) -> Path:
        return self.folder / f"{link.name}.toml"

    @property
    def topology(self) -> Topology:
        return Topology.with_layers(self.layers, tp=self.ranks, dp=self.ranks)

    def agent_config(self, link: Link) -> AgentConfig:
        gpu = None
        if link.way is not Way.HOST and self.ordinal is not None:
            gpu = GpuConfig(self.ordinal, direct=("cuda_ipc",) if link.way is Way.DIRECT else ())
        return AgentConfig(
            engine=self.role.value,
            role=self.role,
            ranks=(self.rank,),
            topology=self.topology,
            model=Rows(link.row_bytes, self.layers).model,
            cluster=CLUSTER,
            staging=StagingConfig(slots=link.slots, slot_bytes=link.slot_bytes),
            timeouts=Timeouts(transfer=TRANSFER_S),
            gpu=gpu,
        )
