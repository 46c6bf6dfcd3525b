"""Engines whose pools lie on a GPU beside sidecars in processes of their own: staging that the sidecar allocates and exports,
kernels that run here."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("agent", "sidecar")]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed"),
]


class GpuPair:
    """Both engines of a `Pair`, with their memory on a GPU."""

    def __init__(self, both) -> None:
        import torch
        from sidecar_rig import Role

        self.both = both
        self.tensors = {role: torch.from_numpy(both.memory[role].array).to("cuda:0") for role in Role}

    async def open(self, stack, direct: tuple[str, ...]) -> None:
        from sidecar_rig import Role, engine_config

        from rdma_kv.client import Client
        from rdma_kv.config import GpuConfig

        for role in Role:
            config = engine_config(role, gpu=GpuConfig(0, direct=direct))
            client = Client(config, self.both.sidecars[role].socket, start_s=120.0)
            self.both.clients[role] = await stack.enter_async_context(client)
            client.register_pool(self.both.memory[role].layout, self.tensors[role], replica=0, rank=0)
        self.both.write_registry()

    async def move(self, request: int) -> None:
        """The producer's kernels are queued and an event is recorded; nothing is waited for on the host."""
        import torch
        from sidecar_rig import DECODE, LIMIT_S, PAGES, PREFILL, TOKENS, Role

        both = self.both
        both.memory[Role.PREFILL].fill(request, PAGES, TOKENS)
        source = torch.from_numpy(both.memory[Role.PREFILL].array).pin_memory()
        ready, used = torch.cuda.Event(), torch.cuda.Event()
        self.tensors[Role.PREFILL].copy_(source, non_blocking=True)
        ready.record()
        used.record()

        async def send() -> None:
            key = f"k{request}"
            async with both.prefill.send(key, 0, PAGES, to=DECODE, tokens=TOKENS, timeout_s=LIMIT_S) as out:
                await out.push((0, 64), ready=ready)
                await out.push((64, TOKENS), ready=ready)

        receiving = both.decode.receive(
            f"k{request}", 0, PAGES, source=PREFILL, tokens=TOKENS, timeout_s=LIMIT_S, after=used
        )
        await asyncio.gather(send(), receiving)
        both.memory[Role.DECODE].array[:] = self.tensors[Role.DECODE].cpu().numpy()
        both.memory[Role.DECODE].check(request, PAGES, 0, TOKENS)


@pytest.mark.parametrize(
    ("direct", "lane"), [(("cuda_ipc",), "cuda_ipc"), ((), "pinned+cma")], ids=["on the GPU", "pinned"]
)
async def test_requests_between_gpus_through_sidecars(tmp_path, direct, lane):
    import contextlib

    import torch

    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
    from sidecar_rig import Pair, Role, SidecarProcess

    both = Pair(tmp_path)
    async with contextlib.AsyncExitStack() as stack:
        for role in Role:
            sidecar = SidecarProcess(tmp_path, role.value, transport="ucx")
            stack.push_async_callback(sidecar.close)
            await sidecar.start()
            both.sidecars[role] = sidecar
        pair = GpuPair(both)
        await pair.open(stack, direct)
        for request in range(3):
            await pair.move(request)
        assert (await both.prefill.stats())["lanes"] == [lane]
        await both.quiet()
        await both.sidecars[Role.DECODE].kill()  # the engine's staging was the sidecar's: it is opened anew
        await both.sidecars[Role.DECODE].start()
        await both.decode.stats()
        both.write_registry()
        await pair.move(4)
        await both.quiet()
