"""The demo with its replicas on four nodes, engines and sidecars apart: identical tokens, at the right replica."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cluster import Cluster
from commands import run
from demo_line import demo_line
from nodes import NODES

from rdma_kv.cli.demo import _Common, _options
from rdma_kv.demo.replica import ReplicaSpec
from rdma_kv.demo.run import DemoOptions, Verdict, _drive, _Station, process_specs
from rdma_kv.demo.wire import Channel, Go, Started, Stop

pytestmark = [pytest.mark.multinode, pytest.mark.asyncio(loop_scope="session")]

LOAD_S = 240.0  # six processes that import torch, on two cores


@pytest.mark.short
@pytest.mark.parametrize("transport", ["ucx", "nixl"])
async def test_the_demo_across_nodes(cluster: Cluster, transport: str) -> None:
    options = _options("qwen2", None, None, None, _Common(8, transport, "rank", 0, 120.0, "cpu"))
    await asyncio.gather(
        *(engine.ask("shut") for engine in cluster.engines.values())
    )  # their places are the demo's now
    verdict = Verdict(options.requests)
    async with replicas(cluster, options) as stations:
        async with asyncio.timeout(LOAD_S):
            await asyncio.gather(*(station.ask(None, Started, -1) for station in stations))
        for station in stations:
            station._channel.send(Go())
        async with asyncio.timeout(options.timeout_s):
            await _drive(options, stations, None, lambda _stage, _done: None, verdict)
    answer = verdict.as_json()
    assert answer["ok"], answer
    assert (answer["transport"], answer["lane"]) == (transport, "tcp")


@contextlib.asynccontextmanager
async def replicas(cluster: Cluster, options: DemoOptions) -> AsyncIterator[list[_Station]]:
    """The demo's processes, each beside the sidecar of its node."""
    stations, processes, listeners = [], [], []
    try:
        for spec in process_specs(options, Path()):
            node = next(node for node in NODES if (node.role, node.replica) == (spec.role, spec.replica))
            process = await start(cluster, cluster.lane.in_engine(node, *line(options, spec)))
            processes.append(process)
            assert process.stdin is not None
            assert process.stdout is not None
            stations.append(_Station(spec, Channel(process.stdout, process.stdin)))
        listeners = [asyncio.create_task(station.listen()) for station in stations]
        yield stations
    finally:
        for station in stations:
            with contextlib.suppress(ConnectionError):
                station._channel.send(Stop())
        for process in processes:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(20.0):
                    await process.wait()
            if process.returncode is None:
                process.kill()
                await process.wait()
        for listener in listeners:
            listener.cancel()
        await asyncio.gather(*listeners, return_exceptions=True)


def line(options: DemoOptions, spec: ReplicaSpec) -> list[str]:
    return ["python", "/opt/engine/demo_engine.py", "/run/rdma-kv/agent.sock", demo_line(options.shape, spec)]


async def start(cluster: Cluster, command: list[str]) -> asyncio.subprocess.Process:
    import os

    env = {**os.environ, **cluster.lane.env, "OMP_NUM_THREADS": "1"}
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=env)


async def test_the_engines_python_is_ours(cluster: Cluster) -> None:
    """The demo's packages are those of this environment, mounted: another version of Python could not import them."""
    program = "import sys; print(sys.version_info[:2])"
    lane = cluster.lane
    theirs = await asyncio.to_thread(run, lane.in_engine(NODES[0], "python", "-c", program), env=lane.env)
    assert theirs.strip() == str(tuple(sys.version_info[:2]))
