"""The demo as it runs with `--device cuda`, but on the CPU. Run as a script, with options of the demo.

Every process builds its model after the fork, prefill processes compute the undivided runs, and pools are torch's tensors.
What is left out is the GPU itself, its streams and its events. `broken` as the first word makes prefill processes lose the
last token of each prompt's KV.
"""

import sys

from rdma_kv.cli.main import run
from rdma_kv.demo import devices
from rdma_kv.demo.pools import TensorPool
from rdma_kv.demo.replica import ReplicaSpec

honest_write = TensorPool.write


def pool(self, model, rank):
    component = model.spec().components[0]
    sizes = {"pages": self.pages, "page_size": self.page_size, "seed": self.seed}
    return TensorPool(self.layout, component, self.topology, rank, device="cpu", **sizes)


def lose_the_last_token(self, pages, kv_shard, *, start=0):
    honest_write(self, pages, kv_shard[:, :, :-1], start=start)


if __name__ == "__main__":
    options = sys.argv[1:]
    devices.gpus = lambda text: ()
    ReplicaSpec.pool = pool
    if options[:1] == ["broken"]:
        TensorPool.write = lose_the_last_token
        options = options[1:]
    sys.exit(run(["demo", "--json", "--device", "cuda", *options]))
