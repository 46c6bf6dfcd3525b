"""What both processes of `test_stopped` agree on."""

from rdma_kv.config import StagingConfig, Timeouts
from rdma_kv.topology import ModelSpec, Topology

MODEL = ModelSpec.gqa(layers=4, kv_heads=4, head_dim=64, itemsize=4, dtype="float32", fingerprint="toy")
TOPOLOGY = Topology.with_layers(4)
PAGES, TOKENS = 128, 2048  # 16 MiB
STAGING = StagingConfig(slots=8, slot_bytes=1 << 17)
MARK = 0xFE  # no byte of KV has this value
TIMEOUTS = Timeouts(quiesce=1.5, retry=0.1, heartbeat=0.1, lease=1.0)
