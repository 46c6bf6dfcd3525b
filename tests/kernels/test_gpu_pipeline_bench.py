"""The pipeline of `bench gpu` on host memory: all its bytes, and how many chunks are under way; no figures."""

import asyncio
import contextlib
import ctypes

import numpy as np
import pytest

from rdma_kv.bench.gpu_pipeline import Pipeline
from rdma_kv.errors import RdmaKvError
from rdma_kv.kernels.reference import gather, scatter
from rdma_kv.types import Role

pytest.importorskip("torch")

MIB = 1 << 20


class HostPipelineKernels:
    """As `CudaKernels`, on host memory: the reference kernels, and a copy to or from the bounce."""

    def __init__(self, *, skip: int = 0) -> None:
        self.lane = ""
        self.open = False
        self.most = self.under_way = 0
        self._skip = skip  # the work that is not copied

    async def start(self):
        self.open = True

    async def close(self):
        self.open = False
        return True

    def use_lane(self, lane):
        self.lane = lane

    async def gather(self, work):
        async with self._one():
            gather([work.chunk])
            self._skip -= 1
            if self._skip:
                view(work.bounce, work.chunk.packed_bytes)[:] = view(work.chunk.packed_address, work.chunk.packed_bytes)

    async def scatter(self, work):
        async with self._one():
            view(work.chunk.packed_address, work.chunk.packed_bytes)[:] = view(work.bounce, work.chunk.packed_bytes)
            scatter([work.chunk])

    @contextlib.asynccontextmanager
    async def _one(self):
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        await asyncio.sleep(0)
        yield
        self.under_way -= 1


def view(address, length_bytes):
    return np.frombuffer((ctypes.c_uint8 * length_bytes).from_address(address), np.uint8)


@pytest.fixture
def pipeline():
    kernels = HostPipelineKernels()
    made = Pipeline(None, kernels, payload_bytes=16 * MIB, slot_bytes=MIB)
    yield made, kernels
    made.close()
    assert not kernels.open


def test_the_pipeline_moves_all_bytes_some_chunks_at_a_time(pipeline):
    made, kernels = pipeline
    made.check(MIB)
    assert kernels.most == 8
    assert kernels.lane.startswith("pinned")
    assert made.down_s(MIB) > 0
    assert made.both_s(MIB) > 0
    assert made.cpu_s(made.both_s, MIB, 2) > 0
    assert len(made.works(Role.PREFILL, MIB)) == 16
    assert len({work.bounce for work in made.works(Role.DECODE, MIB)}) == 16


def test_a_chunk_that_was_not_copied_is_noticed():
    made = Pipeline(None, HostPipelineKernels(skip=3), payload_bytes=16 * MIB, slot_bytes=MIB)
    with pytest.raises(RdmaKvError, match="256 rows"):
        made.check(MIB)
    made.close()
