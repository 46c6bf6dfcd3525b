"""The four nodes as namespaces, where Docker cannot run: the same programs and tests, without images.

The bridge lies in a namespace of its own: nothing of it is seen on the host, and no rule of the host touches it. Each node
has its own network, process, IPC and mount namespaces, held by one process; with that everything in them ends.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from commands import ROOT, LabError, run, say
from lane import Lane, Part
from nodes import NODES, SHM_BYTES, Node

_NET = "10.99.0"
_AGAIN_S = 0.2  # until the supervisor starts a process again
_BIN = Path(sys.executable).parent


def cannot_run() -> str:
    """Why the lane cannot run here; empty where it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        run(["unshare", "--net", "--pid", "--ipc", "--mount", "--fork", "true"], limit_s=10.0)
    except LabError as exc:
        return f"no namespaces: {exc}"
    return ""


class Holder:
    """Namespaces, and the process that holds them: it ends with us, and everything in them ends with it."""

    def __init__(self, *, full: bool) -> None:
        spaces = ["--net", "--mount", "--propagation", "private"] + (["--pid", "--ipc", "--mount-proc"] if full else [])
        command = ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, "--fork", "--kill-child", "sleep", "infinity"]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        self.pid = self._child()
        self._spaces = ["--net", "--mount"] + (["--pid", "--ipc"] if full else [])

    def _child(self) -> int:
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(OSError):
                children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
                if children and Path(f"/proc/{children[0]}/comm").read_text().strip() == "sleep":
                    return int(children[0])
            time.sleep(0.01)
        raise LabError("namespaces could not be made")

    def enter(self, *arguments: str) -> list[str]:
        """A command inside."""
        return ["nsenter", "--target", str(self.pid), *self._spaces, "--", *arguments]

    def end(self) -> None:
        for pid in (self.pid, self._process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


class NetnsLane(Lane):
    """Nodes in namespaces. `up` starts them; every process is supervised as a container with a restart policy is."""

    name = "netns"

    def __init__(self, state: Path) -> None:
        super().__init__(state)
        self._holders: dict[str, Holder] = {}
        self._supervisors: dict[tuple[str, Part], subprocess.Popen[bytes]] = {}
        self._interfaces: dict[str, str] = {}

    @property
    def env(self) -> dict[str, str]:
        return {"PATH": f"{_BIN}:{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}

    # --- life ----------------------------------------------------------------------------------------------------------

    def up(self, transport: str) -> None:
        say("starting four nodes in namespaces")
        hub = self._holders["hub"] = Holder(full=False)
        run(hub.enter("ip", "link", "add", "fabric", "type", "bridge"))
        run(hub.enter("ip", "link", "set", "fabric", "up"))
        for node in NODES:
            holder = self._holders[node.name] = Holder(full=True)
            run(holder.enter("ip", "link", "set", "lo", "up"))
            run(holder.enter("mount", "-t", "sysfs", "sysfs", "/sys"))  # UCX looks for interfaces there
            run(holder.enter("mount", "-t", "tmpfs", "-o", f"size={SHM_BYTES}", "tmpfs", "/dev/shm"))
            folder = self.state / node.name
            folder.mkdir()
            run(holder.enter("mount", "-t", "tmpfs", "tmpfs", "/run"))
            run(holder.enter("mkdir", "-m", "0700", "/run/rdma-kv"))
            self.connect(node)
        self.configure(transport)
        for node in NODES:
            config = self.state / "config" / "agent.toml"
            self._supervise(node, "sidecar", [str(_BIN / "rdma-kv"), "agent", "--config", str(config)])
            engine = [sys.executable, str(ROOT / "tests" / "multinode" / "engine.py"), "--role", node.role.value]
            engine += ["--ranks", *map(str, node.ranks), "--control", str(self.control(node))]
            self._supervise(node, "engine", ["unshare", "--net", "--", *engine])

    def _supervise(self, node: Node, part: Part, command: list[str]) -> None:
        """Start a program inside a node, and again whenever it ends."""
        again = f'while :; do "$@"; echo "exit status $?" >&2; sleep {_AGAIN_S}; done'
        log = open(self.state / node.name / f"{part}.log", "ab")  # noqa: SIM115 - the process keeps it
        with log:
            self._supervisors[node.name, part] = subprocess.Popen(
                self._holders[node.name].enter("sh", "-c", again, "sh", *command),
                env={**os.environ, **self.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def down(self) -> None:
        for holder in self._holders.values():
            holder.end()
        for supervisor in self._supervisors.values():
            supervisor.wait()

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.parent.name} {path.name}\n" + path.read_text(errors="replace")[-3000:]
            for path in sorted(self.state.glob("*/*.log"))
        )

    def host(self, node: Node) -> str:
        return self.address(node)

    # --- one node ------------------------------------------------------------------------------------------------------

    def control(self, node: Node) -> Path:
        return self.state / node.name / "control.sock"

    def pid(self, node: Node, part: Part) -> int:
        """The child of the supervisor's shell; `unshare` before an engine has become the engine."""
        shell = self._supervisors[node.name, part].pid
        for _ in range(2):  # nsenter --pid forks: it is the parent of the shell
            children = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
            if not children:
                return 0
            shell = int(children[0])
        comm = Path(f"/proc/{shell}/comm").read_text().strip()
        return 0 if comm in {"sleep", "sh", "unshare"} else shell

    def inside(self, *arguments: str, check: bool = True) -> str:
        return run(arguments, limit_s=60.0, check=check)

    def in_sidecar(self, node: Node, *arguments: str) -> list[str]:
        return self._holders[node.name].enter(*arguments)

    def in_engine(self, node: Node, *arguments: str) -> list[str]:
        program = {"python": sys.executable}.get(arguments[0], arguments[0])
        rest = [word.replace("/opt/engine", str(ROOT / "tests" / "multinode")) for word in arguments[1:]]
        return self._holders[node.name].enter("unshare", "--net", "--", program, *rest)

    def in_network(self, node: Node, *arguments: str) -> str:
        return run(self._holders[node.name].enter(*arguments), limit_s=30.0)

    def started_at(self, node: Node) -> float:
        boot = time.time() - float(Path("/proc/uptime").read_text().split()[0])
        return boot + int(self._stat(node, "sidecar")[19]) / os.sysconf("SC_CLK_TCK")

    def exit_status(self, node: Node) -> int | None:
        log = (self.state / node.name / "sidecar.log").read_text(errors="replace")
        found = re.findall(r"^exit status (\d+)$", log, re.MULTILINE)
        return int(found[-1]) if found else None

    def cpu_s(self, node: Node, part: Part) -> float:
        return sum(map(int, self._stat(node, part)[11:13])) / os.sysconf("SC_CLK_TCK")

    def _stat(self, node: Node, part: Part) -> list[str]:
        """Fields of proc(5) stat from the third on."""
        return Path(f"/proc/{self.pid(node, part)}/stat").read_text().rpartition(")")[2].split()

    def address(self, node: Node) -> str:
        return f"{_NET}.{10 + NODES.index(node)}"

    def interface(self, node: Node) -> str:
        return self._interfaces[node.name]

    def disconnect(self, node: Node) -> None:
        self.in_network(node, "ip", "link", "del", self.interface(node))

    def connect(self, node: Node) -> None:
        number = int(self._interfaces.get(node.name, "eth-1").removeprefix("eth")) + 1
        name = self._interfaces[node.name] = f"eth{number}"
        hub, holder = self._holders["hub"], self._holders[node.name]
        port = f"to-{node.name}"
        pair = ["ip", "link", "add", port, "type", "veth", "peer", "name", name, "netns", str(holder.pid)]
        run(hub.enter(*pair))
        run(hub.enter("ip", "link", "set", port, "master", "fabric", "up"))
        run(holder.enter("ip", "addr", "add", f"{self.address(node)}/24", "dev", name))
        run(holder.enter("ip", "link", "set", name, "up"))
