"""One cell of the fault matrix on loopback: all agents in one process, each a host of its own, time turned.

A trial moves one request to see that all is well, begins a second, lets the fault happen at its point, reuses every page the
moment its call has ended, lets time pass until all have ended, brings the victim back, moves a third request, and looks what
is left. Everything is compared with what `matrix.expected` demands.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import gc
import os
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from matrix import DETECTED_S, FRAME_FAULTS, TURNED, Cell, Expected, Fault, Lane, Point, Times, Victim, expected
from oracle import Oracle
from rig import SENTINEL, Cluster, RankMemory, Side, cluster
from seams import Seam, installed
from turned import HOST, Hang, TurnedLoop, on_host, run_turned

from rdma_kv.agent import Agent
from rdma_kv.config import StagingConfig, Timeouts
from rdma_kv.errors import RdmaKvError, TransferAborted
from rdma_kv.topology import ModelSpec, Topology
from rdma_kv.transport.loopback import LoopbackEndpoint, LoopbackNetwork, LoopbackTransport
from rdma_kv.transport.regions import Piece
from rdma_kv.types import ReplicaId, Role

MODEL = ModelSpec.gqa(layers=4, kv_heads=4, head_dim=8, itemsize=4, dtype="float32", fingerprint="toy")
TOKENS = 240
SRC_PAGES, DST_PAGES = list(range(3, 18)), list(range(20, 35))
SLOTS = 8
SLOT_BYTES = 1 << 14
TURN_BYTES = 1 << 12  # a WRITE of a slot takes several turns, so that a fault can happen in it
NEW = 0xEE  # what source pages hold when their call has ended and they are used again
_AFTERWARDS_S = 120.0  # bound of everything that must end by itself, of turned time


@dataclass
class Ended:
    """How one call of one agent ended, and how long after the fault."""

    host: str
    error: BaseException | None
    after_s: float
    expected_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.host}: {self.error!r:.160} after {self.after_s:.2f} s"


@dataclass
class Verdict:
    """What came of one cell."""

    cell: Cell
    seed: int
    ended: list[Ended] = field(default_factory=list)
    poisoned_bytes: int = 0
    held: dict[str, Any] = field(default_factory=dict)  # slots, by host
    leaked: dict[str, int] = field(default_factory=dict)  # pages, tasks, fds, transfers
    problems: list[str] = field(default_factory=list)
    skipped: str = ""  # why the cell cannot run on this machine

    @property
    def ok(self) -> bool:
        return not self.problems

    def judge(self, cell: Cell, times: Times, limit: Expected, senders: set[str]) -> None:
        """Compare how the calls under test ended with what is demanded."""
        victim = f"{cell.victim}/0"
        for end in self.ended:
            end.expected_s = (limit.victim_within if end.host == victim else limit.within)(times)
            if end.after_s > end.expected_s + times.slack + 1e-6:
                self.problems.append(f"too late, {end.expected_s:.2f} s at most: {end}")
            if limit.success is True and end.error is not None:
                self.problems.append(f"should have succeeded: {end}")
        good = {end.host for end in self.ended if end.error is None}
        received = [end for end in self.ended if end.host == "decode/0"]
        if limit.success is False and "decode/0" in good:
            self.problems.append("the receive should have failed, and says that it succeeded")
        # One of four sources may be done before the fault; a cancel may come beside DONE.
        cancelled = cell.fault is Fault.CANCEL and cell.victim is Victim.DECODE
        if received and received[0].error is not None and senders <= good and not cancelled:
            self.problems.append(f"all sends succeeded, and the receive did not: {received[0]}")


# --- a host and its agent -----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Host:
    """One agent as a process would have it."""

    name: str
    seam: Seam
    agent: Agent | None = None
    transports: list[HostTransport] = field(default_factory=list)
    life: int = 0

    @property
    def context(self) -> str:
        """The name under which its tasks run; each life is a host of its own."""
        return f"{self.name}~{self.life}"


class _HostLoop:
    """The loop as one host sees it: what it schedules runs as that host, whoever asked for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._context = contextvars.copy_context()

    def call_soon(self, callback: Callable[..., object], *arguments: object) -> None:
        self._loop.call_soon(callback, *arguments, context=self._context.copy())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


class HostTransport(LoopbackTransport):
    """Notifications are delivered by the host that gets them, not by the one that sent them."""

    def endpoint(self, peer: str) -> LoopbackEndpoint:
        endpoint = super().endpoint(peer)
        if not isinstance(endpoint._inbox._loop, _HostLoop):
            endpoint._inbox._loop = _HostLoop(endpoint._inbox._loop)  # type: ignore[assignment]
        return endpoint


class FaultNetwork(LoopbackNetwork):
    """A network on which nothing lands at a stopped host, as over tcp, and where a point in the middle of a WRITE exists."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__()
        self.oracle = oracle
        self.hosts: dict[str, Host] = {}  # by name of the transport

    async def _copy(self, target: LoopbackEndpoint, pieces: Sequence[Piece]) -> None:
        """As the network does, without its lock: a stopped host must not hold it."""
        host = self.hosts[target._name]
        while True:
            await target._until_listening()
            await host.seam.running()
            if target._admits(pieces):
                self.oracle.copied(pieces)
                for local, remote, length_bytes in pieces:
                    np.copyto(_view(remote, length_bytes), _view(local, length_bytes))
                break
        initiator = self.hosts[target._peer]
        initiator.seam.reached(Point.DURING_WRITE)
        await asyncio.sleep(0)


def _view(address: int, length_bytes: int) -> np.ndarray:
    import ctypes

    return np.frombuffer((ctypes.c_uint8 * length_bytes).from_address(address), dtype=np.uint8)


class Trial:
    """One cell, or a control, on one loop."""

    def __init__(self, cell: Cell, seed: int, loop: TurnedLoop, *, times: Times = TURNED) -> None:
        self.cell, self.seed, self.loop, self.times = cell, seed, loop, times
        self.verdict = Verdict(cell, seed)
        self.oracle = Oracle()
        self.network = FaultNetwork(self.oracle)
        self.hosts: dict[str, Host] = {}
        self.struck_at: float | None = None
        self.back_at = 0.0  # when the victim could run again
        self.calls: dict[str, asyncio.Task[None]] = {}
        self._dead: list[tuple[Host, Agent]] = []
        self._restart = False
        self._background: set[asyncio.Task[Any]] = set()

    # --- the cluster ---------------------------------------------------------------------------------------------------

    def sides(self) -> tuple[Side, Side]:
        return (
            Side("prefill", Role.PREFILL, Topology.with_layers(4, tp=self.cell.sources), agents_by="rank", pages=40),
            Side("decode", Role.DECODE, Topology.with_layers(4), agents_by="rank", pages=40, kind="hnd"),
        )

    @contextlib.asynccontextmanager
    async def cluster(self, folder: Path) -> AsyncIterator[Cluster]:
        """The agents of both sides, each on a host of its own."""
        sides = self.sides()
        async with cluster(
            folder,
            MODEL,
            *sides,
            network=self.network,
            transport=self._transport,
            staging=StagingConfig(SLOTS, SLOT_BYTES),
            timeouts=timeouts(self.times),
        ) as c:
            HOST.set("")
            for side in sides:
                for agent in side.agents:
                    self.hosts[_host_name(agent.name)].agent = agent
            self.c: Cluster = c
            yield c
            c.prefill.agents.clear()
            c.decode.agents.clear()

    def _transport(self, name: str) -> Any:
        """Called where an agent is made: what the agent starts from here on runs as its host."""
        host = self.hosts.setdefault(_host_name(name), Host(_host_name(name), Seam(self.seed)))
        HOST.set(host.context)
        transport = HostTransport(self.network, name)
        host.transports.append(transport)
        self.network.hosts[name] = host
        return host.seam.transport(self.oracle.transport(transport))

    def seam(self) -> Seam:
        return self.hosts[HOST.get().partition("~")[0]].seam

    @property
    def victim(self) -> Host:
        return self.hosts[f"{self.cell.victim}/0"]

    # --- calls ---------------------------------------------------------------------------------------------------------

    async def move(self, request: int, prefill: int = 0, decode: int = 0) -> dict[str, BaseException | None]:
        """One request from fill to check, everything right or an error by host."""
        tasks = self.begin(request, prefill, decode)
        await asyncio.wait(tasks.values())
        return {name: task.exception() for name, task in tasks.items()}

    def begin(
        self, request: int, prefill: int = 0, decode: int = 0, *, under_test: bool = False
    ) -> dict[str, asyncio.Task[None]]:
        """Start all calls of one request between two replicas; by host."""
        for memory in self.c.prefill.memory_of(prefill):
            memory.fill(request, SRC_PAGES, TOKENS)
        tasks = {}
        for side, replica in ((self.c.decode, decode), (self.c.prefill, prefill)):
            for agent in side.agents_of(replica):
                host = self.hosts[_host_name(agent.name)]
                work = self._call(host, agent, request, (prefill, decode), under_test=under_test)
                tasks[host.name] = on_host(host.context, lambda work=work: work)
        return tasks

    async def _call(
        self, host: Host, agent: Agent, request: int, replicas: tuple[int, int], *, under_test: bool
    ) -> None:
        seam = host.seam
        error: BaseException | None = None
        try:
            await (self._send if agent.config.sending else self._receive)(agent, request, *replicas)
        except (RdmaKvError, asyncio.CancelledError) as exc:
            error = exc
        if seam.state == "dead":
            return  # nobody is there to whom it could end
        self._reuse(agent, request, replicas[0 if agent.config.sending else 1], right=error is None)
        if under_test:
            since = self.struck_at if self.struck_at is not None else self.loop.now_s
            if host is self.victim:
                since = max(since, self.back_at)
            self.verdict.ended.append(Ended(host.name, error, self.loop.now_s - since))
        elif error is not None:
            raise error

    async def _send(self, agent: Agent, request: int, prefill: int, decode: int) -> None:
        to = ReplicaId("decode", decode)
        timeout_s = self.times.transfer
        async with agent.send(f"k{request}", prefill, SRC_PAGES, to=to, tokens=TOKENS, timeout_s=timeout_s) as out:
            await out.push((0, TOKENS // 2))
            await out.push((TOKENS // 2, TOKENS))

    async def _receive(self, agent: Agent, request: int, prefill: int, decode: int) -> None:
        source = ReplicaId("prefill", prefill)
        timeout_s = self.times.transfer
        await agent.receive(f"k{request}", decode, DST_PAGES, source=source, tokens=TOKENS, timeout_s=timeout_s)

    def _reuse(self, agent: Agent, request: int, replica: int, *, right: bool) -> None:
        """The call has ended: its pages are the engine's again, and get something else at once."""
        side = self.c.prefill if agent.config.sending else self.c.decode
        for memory in side.memory_of(replica):
            if memory.rank not in agent.config.ranks:
                continue
            if agent.config.sending:
                memory.array[:] = NEW
                continue
            if right:
                wrong = wrong_bytes(memory, request)
                self.verdict.poisoned_bytes += wrong
                if wrong:
                    self.verdict.problems.append(f"{wrong} wrong bytes were reported as received")
            memory.array[:] = SENTINEL

    # --- the fault -----------------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """Let the fault happen at its point, once."""
        for host in self.hosts.values():
            host.seam.reached = self._reached

    def _reached(self, point: Point) -> None:
        if point is self.cell.point and self.struck_at is None:
            self.struck_at = self.back_at = self.loop.now_s
            contextvars.Context().run(self._strike)

    def _strike(self) -> None:
        cell, host, seam = self.cell, self.victim, self.victim.seam
        agent = host.agent
        assert agent is not None
        match cell.fault:
            case Fault.KILL:
                self._kill(host, agent)
            case Fault.STALL | Fault.STOP:
                away_s = self.times.stall if cell.fault is Fault.STALL else self.times.stop
                self.back_at += away_s
                seam.stop()
                self.loop.stop_host(host.context)
                self.loop.call_later(away_s, self._go_on, host)
            case Fault.EXIT:
                self._restart = True
                self._dead.append((host, agent))
                self._keep(on_host(host.context, agent.close))
            case Fault.CANCEL:
                self.calls[host.name].cancel()
            case Fault.ABORT:
                for session in list(agent._shell.sessions):
                    on_host(host.context, lambda s=session: _fail(s))
            case Fault.BREAK if cell.point is Point.AFTER_ACKS and cell.victim is Victim.PREFILL:
                seam.cut()
            case Fault.NO_POST:
                seam.no_post = True
            case Fault.NO_NOTE:
                seam.no_note = True
            case _:
                assert cell.fault in {*FRAME_FAULTS, Fault.BREAK}
                seam.frame_fault = cell.fault

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._background.add(task)

    def _go_on(self, host: Host) -> None:
        self.loop.resume_host(host.context)
        host.seam.resume()

    def _kill(self, host: Host, agent: Agent) -> None:
        """The process is gone: it does nothing any more, and the kernel closes what it had open."""
        self._restart = True
        host.seam.die()
        self.loop.stop_host(host.context)
        for connection in list(host.seam.connections):
            connection._writer.transport.abort()
        server = agent._shell.links._acceptor._server
        if server is not None:
            server.close()
        for transport in host.transports:
            self.network._names.discard(transport.name)
            for endpoint in transport._endpoints.values():
                endpoint._closed = True
                self.network._endpoints.pop(endpoint._token, None)
                endpoint._signal()
        self._dead.append((host, agent))
        self._keep(self.calls[host.name])

    async def restart(self) -> None:
        """The victim's next life, under the same name, at another port."""
        host = self.victim
        old = host.agent
        assert old is not None
        if self.cell.fault is Fault.EXIT:
            await asyncio.wait(self._background)
        host.life += 1
        host.seam = Seam(self.seed)
        host.transports = []
        side = self.c.prefill if self.cell.victim is Victim.PREFILL else self.c.decode

        async def start() -> Agent:
            new = Agent(old.config, self.c.registry, transport=self._transport)
            await new.start()
            for owned in new.config.owns:
                memory = side.memory[0, owned.rank]
                new.register_pool(memory.layout, memory.array, replica=owned.replica, rank=owned.rank)
            return new

        new = host.agent = await on_host(host.context, start)
        place = next(place for place, agent in enumerate(side.agents) if agent is old)
        side.agents[place] = new
        was, now = (f'"127.0.0.1:{port}"' for port in (self._ports[host.name], new.address[1]))
        self.c.registry_path.write_text(self.c.registry_path.read_text().replace(was, now))

    # --- the whole -----------------------------------------------------------------------------------------------------

    async def run(self, folder: Path) -> Verdict:
        verdict, limit = self.verdict, expected(self.cell)
        fds = _fds()
        with installed(self.seam), self.oracle.watching():
            async with self.cluster(folder):
                self._ports = {name: host.agent.address[1] for name, host in self.hosts.items() if host.agent}
                if any(problem := (await self.move(1)).values()):
                    verdict.problems.append(f"before any fault: {list(problem)}")
                self.arm()
                self.calls = self.begin(2, under_test=True)
                await asyncio.wait(self._ending(), timeout=_AFTERWARDS_S)
                self._judge(limit)
                if self.victim.seam.disarm():
                    verdict.problems.append("the fault never happened")
                if self._restart:
                    await self.restart()
                await self._afterwards()
                await self._left()
                await self._close()
        gc.collect()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        self._leak("tasks", len(tasks), tasks)
        self._leak("fds", _fds() - fds)
        if verdict.poisoned_bytes:
            verdict.problems.append(f"{verdict.poisoned_bytes} poisoned bytes")
        return verdict

    def _ending(self) -> list[asyncio.Task[None]]:
        """Calls that end: all but a killed process's own."""
        return [
            task for name, task in self.calls.items() if self.cell.fault is not Fault.KILL or name != self.victim.name
        ]

    def _judge(self, limit: Expected) -> None:
        verdict = self.verdict
        if self.struck_at is None:
            verdict.problems.append("the point was never reached")
            return
        for name, task in self.calls.items():
            if task.done() and not task.cancelled() and (bug := task.exception()) is not None:
                verdict.problems.append(f"{name}: not a typed end: {bug!r}")
            elif not task.done() and task in self._ending():
                verdict.problems.append(f"{name}: hangs")
        verdict.judge(self.cell, self.times, limit, {name for name in self.calls if name.startswith("prefill")})

    async def _afterwards(self) -> None:
        """Everybody who lives, or lives again, still works.

        The first call may meet a link that the other side has given up, and say so at once; the next one must go through.
        """
        for request in (3, 4):
            before = self.loop.now_s
            try:
                async with asyncio.timeout(_AFTERWARDS_S):
                    errors = [error for error in (await self.move(request)).values() if error is not None]
            except TimeoutError:
                self.verdict.problems.append(f"request {request} afterwards hangs")
                return
            took_s = self.loop.now_s - before
            told = request == 3 and all(getattr(error, "retryable", False) for error in errors)
            if errors and not told:
                self.verdict.problems.append(f"request {request} afterwards: {errors} after {took_s:.2f} s")
            elif took_s > (DETECTED_S if errors else self.times.lease + 2.0):
                self.verdict.problems.append(f"request {request} afterwards took {took_s:.2f} s: {errors}")

    async def _left(self) -> None:
        """Wait for what ends by itself; then nothing may be held or left."""
        agents = [host.agent for host in self.hosts.values() if host.agent is not None]
        until = self.loop.now_s + self.times.transfer + 2 * (self.times.lease + self.times.quiesce)
        while self.loop.now_s < until and any(_unsettled(agent) for agent in agents):
            await asyncio.sleep(0.05)
        verdict = self.verdict
        for agent in agents:
            if left := _unsettled(agent):
                verdict.held[_host_name(agent.name)] = left
                verdict.problems.append(f"{_host_name(agent.name)} still has {left}")
        pools = list(self.c.decode.memory.values())
        poisoned = sum(int((memory.array != SENTINEL).sum()) for memory in pools)
        self._leak("pages", poisoned)
        verdict.poisoned_bytes += poisoned + self.oracle.poisoned_bytes

    def _leak(self, what: str, count: int, which: object = "") -> None:
        if count > 0:
            self.verdict.leaked[what] = count
            self.verdict.problems.append(f"{count} {what} leaked: {which!s:.300}")

    async def _close(self) -> None:
        dead = {id(agent) for _, agent in self._dead}
        for host in self.hosts.values():
            if host.agent is not None and id(host.agent) not in dead:
                await on_host(host.context, host.agent.close)
        for host, agent in self._dead:
            corpse = f"{host.name}~0"
            self.loop.resume_host(corpse)
            await on_host(corpse, agent.close)
        if self._background:
            await asyncio.wait(self._background)


async def _fail(session: Any) -> None:
    session.fail(TransferAborted(session.call.key, "test", "given up by the test"))


def wrong_bytes(memory: RankMemory, request: int) -> int:
    """Bytes of a received request that are not its own, and bytes beside it that changed."""
    right = dataclasses.replace(memory, array=np.full_like(memory.array, SENTINEL))
    right.fill(request, DST_PAGES, TOKENS)
    return int((memory.array != right.array).sum())


def timeouts(times: Times) -> Timeouts:
    wanted = {
        "transfer": times.transfer,
        "quiesce": times.quiesce,
        "connect": 2.0,
        "retry": 0.2,
        "unmatched": times.transfer,
        "heartbeat": times.heartbeat,
        "lease": times.lease,
    }
    known = {each.name for each in dataclasses.fields(Timeouts)}
    return Timeouts(**{name: value for name, value in wanted.items() if name in known})


def _unsettled(agent: Agent) -> dict[str, Any]:
    """What an agent still has; empty where it is as it was."""
    stats = agent.stats()
    left = {name: stats[name] for name in ("slots_held", "transfers", "tasks", "unmatched") if stats[name]}
    if agent._shell.sessions:
        left["sessions"] = len(agent._shell.sessions)
    return left


def _host_name(name: str) -> str:
    """`prefill/0` of `cluster/engine/role/rank#incarnation`."""
    _, engine, _, rank = name.partition("#")[0].split("/")
    return f"{engine}/{rank}"


def _fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def _small_turns() -> Iterator[None]:
    import rdma_kv.transport.loopback as module

    before = module._TURN_BYTES
    module._TURN_BYTES = TURN_BYTES  # type: ignore[misc]
    try:
        yield
    finally:
        module._TURN_BYTES = before  # type: ignore[misc]


def run_cell(cell: Cell, seed: int = 0, trial: Callable[[Cell, int, TurnedLoop], Trial] = Trial) -> Verdict:
    """Run one loopback cell to its verdict."""
    assert cell.lane is Lane.LOOPBACK
    made: list[Trial] = []

    async def work(loop: TurnedLoop) -> Verdict:
        made.append(trial(cell, seed, loop))
        return await made[0].run(Path(folder))

    with tempfile.TemporaryDirectory(prefix="rdma-kv-faults-") as folder, _small_turns():
        try:
            return run_turned(work)
        except Hang as exc:
            verdict = made[0].verdict
            verdict.problems.append(f"hangs: {exc}")
            return verdict
