"""Model and place of one process of the demo as a word of its command line."""

from __future__ import annotations

import json
from pathlib import Path

from rdma_kv.demo.model import ModelShape
from rdma_kv.demo.replica import ReplicaSpec
from rdma_kv.topology import Topology
from rdma_kv.types import Role


def demo_line(shape: ModelShape, spec: ReplicaSpec) -> str:
    """Model and place of one process, for its command line."""
    topology = spec.topology
    return json.dumps(
        {
            "model": {"seed": shape.seed, "layers": shape.layers, "kv_heads": shape.kv_heads, "model": shape.model},
            "role": spec.role.value,
            "replica": spec.replica,
            "ranks": spec.ranks,
            "topology": {"tp": topology.tp, "dp": topology.dp, "pp": topology.pp},
            "pool": {
                "layout": spec.layout,
                "page_size": spec.page_size,
                "pages": spec.pages,
                "seed": spec.seed,
                "request_timeout_s": spec.request_timeout_s,
            },
        }
    )


def spec_of(text: str) -> tuple[ModelShape, ReplicaSpec]:
    """What `demo_line` wrote."""
    said = json.loads(text)
    topology = Topology.with_layers(said["model"]["layers"], **said["topology"])
    return ModelShape(**said["model"]), ReplicaSpec(
        Role(said["role"]), said["replica"], tuple(said["ranks"]), topology, registry=Path(), **said["pool"]
    )
