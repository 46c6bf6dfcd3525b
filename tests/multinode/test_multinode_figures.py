"""Figures of the images and containers, and the goals that they must meet."""

from __future__ import annotations

import asyncio
import time

import pytest
from cluster import Cluster
from commands import run
from nodes import D0, NODES, P0

pytestmark = [pytest.mark.multinode, pytest.mark.short, pytest.mark.asyncio(loop_scope="session")]

READY_S = 3.0
IDLE_S = 15.0  # watched; heartbeats come every half second, so this is many of them
IDLE_CORE = 0.01
IMAGE_MB = 450


async def test_a_sidecar_is_ready_soon(cluster: Cluster) -> None:
    lane = cluster.lane
    old = await asyncio.to_thread(lane.pid, D0, "sidecar")
    await cluster.trouble(lane.signal, D0, "sidecar", "TERM")
    await lane.wait_new(D0, "sidecar", old)
    await lane.wait_ready(D0)
    ready_s = time.time() - await asyncio.to_thread(lane.started_at, D0)
    lane.figures["ready_s"] = round(ready_s, 2)
    assert ready_s < READY_S
    await cluster.ready()


async def test_idle_containers_cost_next_to_nothing(cluster: Cluster) -> None:
    await cluster.check_all_pairs()  # links are up, heartbeats go
    lane = cluster.lane
    parts = [(node, part) for node in NODES for part in ("sidecar", "engine")]
    begin, before = time.monotonic(), [await asyncio.to_thread(lane.cpu_s, *each) for each in parts]
    await asyncio.sleep(IDLE_S)  # the watched time itself
    after = [await asyncio.to_thread(lane.cpu_s, *each) for each in parts]
    seconds = time.monotonic() - begin
    idle = {
        f"{node.name}-{part}": round((b - a) / seconds, 5)
        for (node, part), a, b in zip(parts, before, after, strict=True)
    }
    lane.figures["idle_cores"] = idle
    assert max(idle.values()) < IDLE_CORE, idle


async def test_the_runtime_image_is_small_and_holds_no_more_than_it_needs(cluster: Cluster) -> None:
    lane = cluster.lane
    if lane.name != "docker":
        pytest.skip("the netns lane runs without images")
    assert lane.figures["image_mb"] < IMAGE_MB
    found = "[m for m in ('torch', 'pip', 'transformers') if importlib.util.find_spec(m)]"
    program = f"import importlib.util, os, shutil; print(os.getuid(), {found}, shutil.which('cc'), shutil.which('gcc'))"
    assert run(lane.in_sidecar(P0, "python", "-c", program), env=lane.env).split() == ["10001", "[]", "None", "None"]
