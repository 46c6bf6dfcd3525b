"""The files beside docker/compose.yaml fit together, and what the images need is in the lists that make them."""

from __future__ import annotations

import re
from pathlib import Path

from rdma_kv.registry.static import parse_address, parse_registry
from rdma_kv.sidecar.settings import read_config
from rdma_kv.types import Role

DOCKER = Path(__file__).parents[2] / "docker"
COMPOSE = (DOCKER / "compose.yaml").read_text(encoding="utf-8")
REGISTRY = parse_registry((DOCKER / "config" / "registry.toml").read_bytes())
CONFIG = read_config(DOCKER / "config" / "agent.toml")


def test_every_agent_listens_where_the_registry_says_that_it_is():
    listed = {(record.name, min(agent.ranks)): agent.port for record in REGISTRY.values() for agent in record.agents}
    assert listed == {(each.engine, each.rank): parse_address(each.listen)[1] for each in CONFIG.agent}


def test_every_node_of_the_registry_is_a_sidecar_with_the_ranks_of_its_engine():
    started = {}
    for node, role, ranks in re.findall(
        r"^  (\w+)-engine:\n    <<: \*engine\n(?:    build:\n(?:      .*\n)+)?"
        r'    command: \["--role", "(\w+)", "--ranks", ([\d", ]+)\]$',
        COMPOSE,
        re.MULTILINE,
    ):
        started[Role(role), node] = sorted(int(rank) for rank in re.findall(r"\d+", ranks))
        assert f"aliases: [{node}]" in COMPOSE
    listed: dict[tuple[Role, str], list[int]] = {}
    for record in REGISTRY.values():
        for agent in record.agents:
            listed.setdefault((record.role, agent.host), []).extend(agent.ranks)
    assert started == listed
    assert len(started) == 4


def test_the_health_check_asks_where_the_sidecar_answers():
    port = parse_address(CONFIG.health)[1]
    assert f":-{port}}}" in (DOCKER / "healthcheck").read_text(encoding="utf-8")


def test_a_container_is_not_killed_while_it_drains():
    grace_s = float(re.search(r"stop_grace_period: (\d+)s # more than drain_s and quiesce", COMPOSE)[1])
    assert grace_s >= CONFIG.drain_s + CONFIG.timeouts.quiesce + 5


def test_the_socket_lies_on_the_shared_volume():
    assert CONFIG.socket == Path("/run/rdma-kv/agent.sock")
    assert COMPOSE.count(":/run/rdma-kv") == 8


def test_no_image_is_built_with_more_than_the_project_asks_for():
    """Each requirement of the image has a pin, and each dependency of the project is among them."""
    text = (DOCKER / "context.py").read_text(encoding="utf-8")
    wanted = set(re.findall(r'"([\w-]+)"', re.search(r"^REQUIREMENTS = \((.*)\)", text, re.MULTILINE)[1]))
    project = (DOCKER.parent / "pyproject.toml").read_text(encoding="utf-8")
    needed = set(re.findall(r'"([A-Za-z_0-9-]+)', re.search(r"\ndependencies = \[(.*?)\]", project, re.DOTALL)[1]))
    assert wanted == needed | {"cffi"}, "cffi is what the ucx transport asks for"
    pins = (DOCKER.parent / "constraints.txt").read_text(encoding="utf-8")
    assert all(f"\n{name}==" in pins for name in {*wanted, "nixl-cu12"})
