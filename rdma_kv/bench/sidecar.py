"""What a sidecar costs: the same requests through agents in the engines' processes, and through sidecars beside them.

Four processes: an engine of either role, each with an agent of its own and with a client, and the two sidecars. Pools,
kernels, settings and transport are the same, and the ways take turns. What differs is where the mover runs: behind a
Unix socket, with staging that both processes map.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final

from rdma_kv.agent import Agent
from rdma_kv.bench.goals import Meter, Missing, figure
from rdma_kv.bench.member import PAGE_BYTES, PAGE_TOKENS, STAGING, TOPOLOGY, agent_config, write_registry
from rdma_kv.bench.paths import AGENT, PairOptions, Pool, random_memory
from rdma_kv.bench.rows import Row
from rdma_kv.bench.worker import Worker, die_with_parent, ended
from rdma_kv.client import Client
from rdma_kv.errors import RdmaKvError
from rdma_kv.memory import HostMemory
from rdma_kv.registry.static import StaticRegistry
from rdma_kv.transport.named import names
from rdma_kv.types import ReplicaId, Role

SIDECAR: Final = "sidecar"
_WAYS: Final = (AGENT, SIDECAR)
POOL_BYTES: Final = 128 << 20
_TRANSFER_S: Final = 60.0
_END_S: Final = 10.0  # for a sidecar to drain: nothing runs any more


@dataclass(frozen=True, slots=True)
class Case:
    """Requests that begin at once, all of one size; together no more than the pool.

    Attributes:
        times: a sample is the median of so many measurements in a row; the bytes of the last one are checked.
    """

    requests: int
    pages: int
    times: int

    @property
    def num_bytes(self) -> int:
        return self.requests * self.pages * PAGE_BYTES

    @property
    def name(self) -> str:
        return f"{self.requests} x {self.pages * PAGE_BYTES >> 20} MiB"


CASES: Final = (Case(1, 1, 20), Case(1, 128, 1), Case(32, 4, 1))


@dataclass(frozen=True)
class SidecarOptions(PairOptions):
    """What `rdma-kv bench sidecar` was asked for."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names(self.transport, option="--transport")  # loopback ends at the process


@dataclass
class Measured:
    """Samples, one per round that counts.

    Attributes:
        took_s: seconds of a measurement, by way and case.
        engine_s: CPU seconds of the engines' processes for one, user and system, of all threads.
        sidecar_s: of the sidecars' processes.
    """

    took_s: dict[tuple[str, Case], list[float]] = field(default_factory=dict)
    engine_s: dict[tuple[str, Case], list[float]] = field(default_factory=dict)
    sidecar_s: dict[tuple[str, Case], list[float]] = field(default_factory=dict)

    def ratio(self, case: Case, *of: dict[tuple[str, Case], list[float]]) -> float:
        """Of the medians' sums, by sidecars to by agents."""
        sums = {way: sum(median(samples[way, case]) for samples in of) for way in _WAYS}
        return sums[SIDECAR] / sums[AGENT]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What one measured engine is.

    Attributes:
        source: the prefill pool, filled; every process inherits it.
        folder: where registries and sockets are; see `_Places`.
    """

    role: Role
    backend: str
    source: HostMemory
    folder: Path


class Engine:
    """An engine's process, as the parent asks it. See `Worker`."""

    def __init__(self, spec: EngineSpec) -> None:
        self._role, self._backend, self._places = spec.role, spec.backend, _Places(spec.folder)
        decode = spec.role is Role.DECODE
        self._pool = Pool(spec.role, HostMemory(spec.source.length_bytes) if decode else spec.source)
        self._source = spec.source
        self._stack = contextlib.AsyncExitStack()
        self._ways: dict[str, Agent | Client] = {}
        self._receiving: asyncio.Future[list[int]] | None = None
        self._begin_s = 0.0  # CPU of this process when it began to receive

    async def start(self) -> dict[str, int]:
        """Both ways: where each listens."""
        config = agent_config(self._role, _TRANSFER_S)
        agent = Agent(config, StaticRegistry(self._places.registry(AGENT)), transport=self._backend)
        client = Client(config, self._places.socket(self._role))
        self._ways = {AGENT: agent, SIDECAR: client}
        for way in (agent, client):
            await self._stack.enter_async_context(way)
            way.register_pool(self._pool.layout, self._pool.memory.view, replica=0, rank=0)
        return {name: way.address[1] for name, way in self._ways.items()}

    async def expect(self, way: str, key: str, requests: int, pages: int) -> None:
        """Decode: begin to receive."""
        self._begin_s = time.process_time()
        self._receiving = asyncio.gather(
            *(self._receive(self._ways[way], f"{key}-{n}", part) for n, part in self._parts(requests, pages))
        )

    async def received(self) -> tuple[int, float]:
        """Decode: the bytes that came, once all have, and the CPU seconds that it took."""
        assert self._receiving is not None
        num_bytes = sum(await self._receiving)
        return num_bytes, time.process_time() - self._begin_s

    async def move(self, way: str, key: str, requests: int, pages: int) -> tuple[float, float]:
        """Prefill: seconds until all requests were done, and CPU seconds."""
        begin, begin_s = time.perf_counter(), time.process_time()
        await asyncio.gather(
            *(self._send(self._ways[way], f"{key}-{n}", part) for n, part in self._parts(requests, pages))
        )
        return time.perf_counter() - begin, time.process_time() - begin_s

    async def wipe(self) -> None:
        """Decode: forget what came."""
        self._pool.memory.view[:] = 0

    async def wrong_pages(self, count: int) -> int:
        """Decode: of the first pages those that are not what was sent, and of the others those that are not zero."""
        strays = sum(bool(self._pool.planes[:, page].any()) for page in self._pool.pages[count:])
        return self._pool.wrong_pages(Pool(Role.PREFILL, self._source), count) + strays

    async def close(self) -> None:
        await self._stack.aclose()

    def _parts(self, requests: int, pages: int) -> list[tuple[int, list[int]]]:
        return [(n, self._pool.pages[n * pages : (n + 1) * pages]) for n in range(requests)]

    async def _send(self, way: Agent | Client, key: str, pages: list[int]) -> None:
        tokens, to = len(pages) * PAGE_TOKENS, ReplicaId(Role.DECODE.value, 0)
        async with way.send(key, 0, pages, tokens=tokens, to=to) as out:
            await out.push()

    async def _receive(self, way: Agent | Client, key: str, pages: list[int]) -> int:
        tokens, source = len(pages) * PAGE_TOKENS, ReplicaId(Role.PREFILL.value, 0)
        return (await way.receive(key, 0, pages, tokens=tokens, source=source)).received_bytes


@dataclass(frozen=True, slots=True)
class _Places:
    """Of what the processes of a run find each other by."""

    folder: Path

    def registry(self, way: str) -> Path:
        return self.folder / f"{way}.toml"

    def socket(self, role: Role) -> Path:
        return self.folder / f"{role.value}.sock"

    def config(self, role: Role) -> Path:
        return self.folder / f"{role.value}.agent.toml"

    def write_config(self, role: Role, backend: str) -> None:
        """The settings of a sidecar, as the agents beside it have them."""
        lines = [
            f'socket = "{self.socket(role).name}"',
            f'registry = "{self.registry(SIDECAR).name}"',
            f'transport = "{backend}"',
            'health = ""',
            'log_level = "error"',
            "[staging]",
            f"slots = {STAGING.slots}",
            f"slot_bytes = {STAGING.slot_bytes}",
            "[timeouts]",
            f"transfer = {_TRANSFER_S}",
        ]
        self.config(role).write_text("\n".join(lines) + "\n")


@dataclass(frozen=True)
class _Processes:
    """All of a run."""

    engines: Mapping[Role, Worker]
    sidecars: Sequence[subprocess.Popen[bytes]]

    def sidecar_cpu_s(self) -> float:
        """Of both sidecars so far."""
        return sum(cpu_s(process.pid) for process in self.sidecars)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, user and system, of all its threads: Linux's clock of each process."""
    return time.clock_gettime(~pid << 3 | 2)


def measure_sidecar(options: SidecarOptions, meter: Meter) -> list[Row]:
    """Run it all. Call it from a process without threads: it forks.

    A transport that is not there is a row that is not ok.

    Raises:
        RdmaKvError: an agent or a sidecar failed, or other bytes arrived than were sent.
    """
    meter("starting two engines and two sidecars", 0, 1)
    with contextlib.ExitStack() as stack:
        try:
            processes = stack.enter_context(_processes(options.backend))
        except RdmaKvError as exc:
            return [Missing(options.backend, f"missing: {exc}", "")]
        measured = _measure(options, processes, meter)
    return [*_rows(measured), Row("transport", options.backend, "")]


@contextlib.contextmanager
def _processes(backend: str) -> Iterator[_Processes]:
    source, workers, sidecars = random_memory(POOL_BYTES), list[Worker](), list[subprocess.Popen[bytes]]()
    with tempfile.TemporaryDirectory(prefix="rdma-kv-bench-") as folder, _stopped(sidecars), ended(workers):
        places = _Places(Path(folder))
        for role in Role:
            workers.append(Worker(role.value, partial(Engine, EngineSpec(role, backend, source, Path(folder))), {}))
        for role in Role:
            places.write_config(role, backend)
            command = [sys.executable, "-m", "rdma_kv.cli.main", "agent", "--config", str(places.config(role))]
            sidecar = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_end_with_parent)  # noqa: PLW1509
            sidecars.append(sidecar)
        engines = dict(zip(Role, workers, strict=True))
        ports = {role: engine.ask("start") for role, engine in engines.items()}
        for way in _WAYS:
            write_registry(places.registry(way), {role: found[way] for role, found in ports.items()}, TOPOLOGY)
        yield _Processes(engines, sidecars)


def _end_with_parent() -> None:
    """In a sidecar's process, before it is one: there are no threads."""
    die_with_parent(signal.SIGTERM)


@contextlib.contextmanager
def _stopped(sidecars: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """End all sidecars on the way out. `sidecars` may grow meanwhile."""
    try:
        yield
    finally:
        for process in sidecars:
            process.send_signal(signal.SIGTERM)
        for process in sidecars:
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _measure(options: SidecarOptions, processes: _Processes, meter: Meter) -> Measured:
    measured = Measured()
    total, done = (options.repetitions + 1) * len(CASES) * len(_WAYS), 0
    for number in range(options.repetitions + 1):
        for case in CASES:
            for way in _WAYS:
                meter(f"round {number} of {options.repetitions}: {case.name}, {way}", done, total)
                _take(processes, measured, way, case, number)
                done += 1
    meter("done", total, total)
    return measured


def _take(processes: _Processes, measured: Measured, way: str, case: Case, number: int) -> None:
    """A sample; the bytes of the last measurement are checked."""
    decode = processes.engines[Role.DECODE]
    samples = []
    for again in range(case.times):
        if again == case.times - 1:
            decode.ask("wipe")
        samples.append(_move(processes, way, case, f"{number}-{case.name}-{way}-{again}"))
    wrong = decode.ask("wrong_pages", case.requests * case.pages)
    if wrong:
        raise RdmaKvError(f"{case.name}, {way}: {wrong} pages arrived with other bytes than were sent")
    if number:
        parts = (measured.took_s, measured.engine_s, measured.sidecar_s)
        for kept, of_one in zip(parts, zip(*samples, strict=True), strict=True):
            kept.setdefault((way, case), []).append(median(of_one))


def _move(processes: _Processes, way: str, case: Case, key: str) -> tuple[float, float, float]:
    """One measurement: seconds, CPU seconds of the engines, and of the sidecars."""
    decode, prefill = processes.engines[Role.DECODE], processes.engines[Role.PREFILL]
    sidecar_s = processes.sidecar_cpu_s()
    decode.ask("expect", way, key, case.requests, case.pages)
    took_s, prefill_s = prefill.ask("move", way, key, case.requests, case.pages)
    arrived, decode_s = decode.ask("received")
    if arrived != case.num_bytes:
        raise RdmaKvError(f"{arrived} bytes arrived, not {case.num_bytes}")
    return took_s, prefill_s + decode_s, processes.sidecar_cpu_s() - sidecar_s


def _rows(measured: Measured) -> list[Row]:
    rows: list[Row] = []
    compared = {
        "time": (measured.took_s,),
        "CPU of the engines": (measured.engine_s,),
        "CPU of engines and sidecars": (measured.engine_s, measured.sidecar_s),
    }
    for what, of in compared.items():
        rows += [
            Row(f"{case.name}: {what}, by sidecars to by agents", measured.ratio(case, *of), "ratio") for case in CASES
        ]
    for case in CASES:
        for way in _WAYS:
            for name, samples in (("", measured.took_s), (", CPU of the engines", measured.engine_s)):
                rows += figure(f"{case.name}: {way}{name}", [1e3 * took for took in samples[way, case]], "ms")
        spent_s = measured.sidecar_s[SIDECAR, case]
        rows += figure(f"{case.name}: {SIDECAR}, CPU of the sidecars", [1e3 * spent for spent in spent_s], "ms")
    return rows
