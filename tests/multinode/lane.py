"""What the tests may ask of the four nodes, whatever they run in; `docker_lane` and `netns_lane` answer."""

from __future__ import annotations

import asyncio
import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from commands import ROOT, LabError, run
from nodes import NODES, Node, write_config

Part = Literal["sidecar", "engine"]
_POLL_S = 0.1
RESTART_S = 60.0  # of a container that was restarted often, on a busy machine
HEALTHCHECK = ROOT / "docker" / "healthcheck"


class Dropped(NamedTuple):
    """What firewall rules have dropped since they were made."""

    packets: int
    size_bytes: int


def parse_dropped(listing: str) -> Dropped:
    """The sum over the rules that drop, of a chain as `iptables -n -v -x -L CHAIN` prints it.

    Raises:
        LabError: no rule of the chain drops.
    """
    found = re.findall(r"^ *(\d+) +(\d+) +DROP ", listing, re.MULTILINE)
    if not found:
        raise LabError(f"no rule drops anything:\n{listing}")
    return Dropped(*(sum(map(int, column)) for column in zip(*found, strict=True)))


class Lane(ABC):
    """Four nodes that run. All methods may block for as long as the programs that they call.

    Attributes:
        name: `docker` or `netns`.
        figures: what was measured on the way, for the verdict.
    """

    name: str

    def __init__(self, state: Path) -> None:
        self.state = state
        self.figures: dict[str, Any] = {}
        self.transport = ""

    # --- life ----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def up(self, transport: str) -> None:
        """Start all nodes. Raises LabError."""

    def configure(self, transport: str) -> None:
        """Write the files that all sidecars read at their start."""
        self.transport = transport
        write_config(self.state / "config", transport, {node.name: self.host(node) for node in NODES})

    @abstractmethod
    def host(self, node: Node) -> str:
        """Name or address by which the others find a node."""

    def use(self, transport: str) -> None:
        """Restart all sidecars with another transport, if it is another. Raises LabError."""
        if transport == self.transport:
            return
        self.configure(transport)
        old = {node: self.pid(node, "sidecar") for node in NODES}
        for node in NODES:
            self.signal(node, "sidecar", "TERM")
        deadline = time.monotonic() + RESTART_S
        while any(self.pid(node, "sidecar") in {0, old[node]} for node in NODES):
            if time.monotonic() > deadline:
                raise LabError(f"the sidecars have not restarted within {RESTART_S} s")
            time.sleep(_POLL_S)

    @abstractmethod
    def down(self) -> None:
        """End everything, also after a part of `up`."""

    @abstractmethod
    def logs(self) -> str:
        """The last lines of all that runs, for a test that has failed."""

    # --- one node ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def control(self, node: Node) -> Path:
        """The control socket of its engine."""

    @abstractmethod
    def pid(self, node: Node, part: Part) -> int:
        """Of the process, as `inside` counts; 0 while there is none. A restart changes it."""

    @abstractmethod
    def inside(self, *arguments: str, check: bool = True) -> str:
        """Run a program where those PIDs are right. Raises LabError."""

    @abstractmethod
    def in_sidecar(self, node: Node, *arguments: str) -> list[str]:
        """The command line that runs a program beside a node's sidecar, as its user."""

    @abstractmethod
    def in_engine(self, node: Node, *arguments: str) -> list[str]:
        """The command line that runs a program beside a node's engine, with the packages that the demo needs."""

    @abstractmethod
    def address(self, node: Node) -> str:
        """IP address on the fabric."""

    @abstractmethod
    def interface(self, node: Node) -> str:
        """Name of the interface on the fabric."""

    @abstractmethod
    def disconnect(self, node: Node) -> None:
        """Take a node off the fabric: its interface is gone."""

    @abstractmethod
    def connect(self, node: Node) -> None:
        """Put it back, under the same address and another interface name."""

    # --- what both do alike --------------------------------------------------------------------------------------------

    def status(self, node: Node) -> dict[str, Any]:
        """What the sidecar says of itself. Raises LabError: it is not there."""
        command = ["rdma-kv", "agent", "--status", "--socket", "/run/rdma-kv/agent.sock", "--json"]
        answer: dict[str, Any] = json.loads(run(self.in_sidecar(node, *command), env=self.env, limit_s=30.0))
        return answer

    @property
    def env(self) -> dict[str, str]:
        """For the command lines of `in_sidecar` and `in_engine`."""
        return {}

    def ready(self, node: Node) -> bool:
        """Whether the sidecar says that it is."""
        try:
            self.in_network(node, str(HEALTHCHECK))
        except LabError:
            return False
        return True

    @abstractmethod
    def started_at(self, node: Node) -> float:
        """When the sidecar's process was started, in seconds since the epoch."""

    @abstractmethod
    def exit_status(self, node: Node) -> int | None:
        """With which the sidecar that ran before has ended; None where none has."""

    @abstractmethod
    def cpu_s(self, node: Node, part: Part) -> float:
        """CPU time so far of everything in a container, or of the process."""

    def signal(self, node: Node, part: Part, name: str) -> None:
        """Send a signal to the process itself. Raises LabError."""
        self.inside("kill", f"-{name}", str(self.pid(node, part)))

    @abstractmethod
    def in_network(self, node: Node, *arguments: str) -> str:
        """Run a host's program in the network namespace of a node's sidecar. Raises LabError."""

    def block(self, node: Node, other: Node, target: Sequence[str] = ("-j", "DROP"), match: Sequence[str] = ()) -> None:
        """A rule for all that comes from and goes to another node."""
        address = self.address(other)
        for chain, side in (("INPUT", "-s"), ("OUTPUT", "-d")):
            self.in_network(node, "iptables", "-w", "-A", chain, side, address, *match, *target)

    def lose_packets(self, node: Node, probability: float) -> None:
        """Drop a part of what comes in."""
        match = ["-m", "statistic", "--mode", "random", "--probability", str(probability)]
        self.in_network(node, "iptables", "-w", "-A", "INPUT", "!", "-i", "lo", *match, "-j", "DROP")

    def dropped(self, node: Node) -> Dropped:
        """What the rules of `block` and `lose_packets` have dropped of all that came in, by the kernel's own counters.

        Raises LabError: there is no such rule, so nothing was in the way.
        """
        return parse_dropped(self.in_network(node, "iptables", "-w", "-n", "-v", "-x", "-L", "INPUT"))

    def unblock(self, node: Node) -> None:
        """Remove all rules that the lab made for a node."""
        self.in_network(node, "iptables", "-w", "-F", "INPUT")
        self.in_network(node, "iptables", "-w", "-F", "OUTPUT")

    def slow(self, node: Node, rate: str) -> None:
        """Limit what a node sends. `rate` as tc takes it."""
        shape = ["tbf", "rate", rate, "burst", "64kb", "latency", "50ms"]
        self.in_network(node, "tc", "qdisc", "replace", "dev", self.interface(node), "root", *shape)

    def full_speed(self, node: Node) -> None:
        self.in_network(node, "tc", "qdisc", "del", "dev", self.interface(node), "root")

    # --- waiting -------------------------------------------------------------------------------------------------------

    async def wait_ready(self, *nodes: Node, limit_s: float = RESTART_S) -> float:
        """Seconds until the sidecars of these nodes (all by default) were ready. Raises LabError: not in time."""
        begin = time.monotonic()
        for node in nodes or NODES:
            while not await asyncio.to_thread(self.ready, node):
                if time.monotonic() - begin > limit_s:
                    raise LabError(f"the sidecar of {node.name} is not ready after {limit_s} s")
                await asyncio.sleep(_POLL_S)
        return time.monotonic() - begin

    async def wait_new(self, node: Node, part: Part, old: int, limit_s: float = RESTART_S) -> int:
        """PID of the process that has taken the place of `old`. Raises LabError: none has."""
        begin = time.monotonic()
        while (pid := await asyncio.to_thread(self.pid, node, part)) in {0, old}:
            if time.monotonic() - begin > limit_s:
                raise LabError(f"nothing has taken the place of the {part} of {node.name}")
            await asyncio.sleep(_POLL_S)
        return pid
