"""The four nodes as the containers of docker/compose.yaml."""

from __future__ import annotations

import contextlib
import json
import sysconfig
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import images
from commands import ROOT, LabError, run, say
from docker_engine import Docker, enter_network
from lane import RESTART_S, Lane, Part
from nodes import NODES, Node

COMPOSE_FILE = ROOT / "docker" / "compose.yaml"
_PACKAGES = "/opt/packages"


class DockerLane(Lane):
    """Containers under a project name of our own.

    Args:
        state: a folder for configs and the engines' control sockets.
        project: prefix of all containers, networks and volumes.
    """

    name = "docker"

    def __init__(self, docker: Docker, state: Path, project: str) -> None:
        super().__init__(state)
        self.docker = docker
        self.project = project
        self._override = state / "compose.lab.json"

    @property
    def env(self) -> dict[str, str]:
        return {
            **self.docker.env,
            "RDMA_KV_IMAGE": images.RUNTIME,
            "RDMA_KV_ENGINE_IMAGE": images.ENGINE,
            "RDMA_KV_CONFIG": str(self.state / "config"),
        }

    # --- life ----------------------------------------------------------------------------------------------------------

    def up(self, transport: str) -> None:
        self.configure(transport)
        self._write_override()
        say("starting eight containers")
        self.compose("up", "-d", "--no-build")

    def down(self) -> None:
        with contextlib.suppress(LabError):
            self.compose("kill")
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "5")

    def logs(self) -> str:
        return self.compose("logs", "--no-color", "--tail", "40")

    def compose(self, *arguments: str) -> str:
        """Raises LabError."""
        files = ["-f", str(COMPOSE_FILE), "-f", str(self._override)]
        return run([*self.docker.compose, "-p", self.project, *files, *arguments], env=self.env)

    def _write_override(self) -> None:
        """Where the tests reach the engines, and the packages of the demo."""
        services: dict[str, Any] = {}
        for node in NODES:
            folder = self.state / node.name
            folder.mkdir()
            folder.chmod(0o777)  # for the user of the image
            command = [
                "--role",
                node.role.value,
                "--ranks",
                *map(str, node.ranks),
                "--control",
                "/run/lab/control.sock",
            ]
            services[f"{node.name}-engine"] = {
                "command": command,
                "volumes": [f"{folder}:/run/lab", f"{sysconfig.get_path('platlib')}:{_PACKAGES}:ro"],
                "healthcheck": {"test": ["CMD", "test", "-S", "/run/lab/control.sock"]},
                "tmpfs": ["/tmp"],  # torch wants one
            }
        self._override.write_text(json.dumps({"services": services}))

    def host(self, node: Node) -> str:
        return node.name

    # --- one node ------------------------------------------------------------------------------------------------------

    def control(self, node: Node) -> Path:
        return self.state / node.name / "control.sock"

    def container(self, node: Node, part: Part) -> str:
        """Its id. Found by labels: names differ between the versions of compose."""
        labels = (f"com.docker.compose.project={self.project}", f"com.docker.compose.service={node.name}-{part}")
        filters = [word for label in labels for word in ("--filter", f"label={label}")]
        return self.docker.docker("ps", "--all", "--quiet", "--no-trunc", *filters).strip()

    def inspect(self, node: Node, part: Part) -> dict[str, Any]:
        """What the daemon says of a container."""
        answer: list[dict[str, Any]] = json.loads(self.docker.docker("inspect", self.container(node, part)))
        return answer[0]

    def pid(self, node: Node, part: Part) -> int:
        state = self.inspect(node, part)["State"]
        return int(state["Pid"]) if state["Running"] else 0

    def inside(self, *arguments: str, check: bool = True) -> str:
        return self.docker.inside(*arguments, check=check)

    def in_sidecar(self, node: Node, *arguments: str) -> list[str]:
        return [self.docker.client, "exec", "-i", self.container(node, "sidecar"), *arguments]

    def in_engine(self, node: Node, *arguments: str) -> list[str]:
        packages = ["-e", f"PYTHONPATH={_PACKAGES}", "-e", "HOME=/tmp", "-e", "OMP_NUM_THREADS=1"]
        return [self.docker.client, "exec", "-i", *packages, self.container(node, "engine"), *arguments]

    def in_network(self, node: Node, *arguments: str) -> str:
        return run(enter_network(self.docker, self.pid(node, "sidecar"), arguments), limit_s=30.0)

    def started_at(self, node: Node) -> float:
        text: str = self.inspect(node, "sidecar")["State"][
            "StartedAt"
        ]  # with nanoseconds, which datetime does not take
        return datetime.fromisoformat(f"{text[:26].rstrip('Z')}+00:00").timestamp()

    def exit_status(self, node: Node) -> int | None:
        """Of the last end that the daemon tells, within a minute: a container that runs again has no exit status."""
        now = time.time()
        since = ["--since", f"{now - RESTART_S:.3f}", "--until", f"{now:.3f}", "--filter", "event=die"]
        form = [
            "--filter",
            f"container={self.container(node, 'sidecar')}",
            "--format",
            "{{.Actor.Attributes.exitCode}}",
        ]
        found = self.docker.docker("events", *since, *form).split()
        return int(found[-1]) if found else None

    def cpu_s(self, node: Node, part: Part) -> float:
        """Of the container's cgroup: health checks count too."""
        for line in self.inside("cat", f"/proc/{self.pid(node, part)}/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if "cpuacct" in controllers.split(","):
                return int(self.inside("cat", f"/sys/fs/cgroup/cpuacct{path}/cpuacct.usage")) / 1e9
            if not controllers and (stat := self.inside("cat", f"/sys/fs/cgroup{path}/cpu.stat", check=False)):
                return int(stat.split()[1]) / 1e6
        raise LabError("the daemon's cgroups cannot be read")

    @property
    def _fabric(self) -> str:
        return f"{self.project}_fabric"

    def address(self, node: Node) -> str:
        networks = self.inspect(node, "sidecar")["NetworkSettings"]["Networks"]
        address: str = networks[self._fabric]["IPAddress"]
        return address

    def interface(self, node: Node) -> str:
        for line in self.in_network(node, "ip", "-o", "-4", "addr", "show").splitlines():
            _, name, _, address, *_ = line.split()
            if address.split("/")[0] == self.address(node):
                return name.split("@")[0]
        raise LabError(f"{node.name} has no interface on the fabric")

    def disconnect(self, node: Node) -> None:
        self.docker.docker("network", "disconnect", self._fabric, self.container(node, "sidecar"))

    def connect(self, node: Node) -> None:
        container = self.container(node, "sidecar")
        self.docker.docker("network", "connect", "--alias", node.name, self._fabric, container)
