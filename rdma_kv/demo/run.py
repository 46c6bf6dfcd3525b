"""The demo's parent: starts the replicas, hands out requests, and judges what came of them.

Every replica, or every rank, is a process of its own, forked after the model's imports and before any thread or
event loop exists. On loopback, which lives in one process, they are tasks.

With GPUs each process builds the model by itself, after the fork, and the parent never does: CUDA does not survive a
fork. The tokens of the undivided run come from a prefill process then, so that the same kind of device computes them.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from rdma_kv.demo import devices
from rdma_kv.demo.model import DemoModel, ModelShape, warm
from rdma_kv.demo.pools import check_pools, pages_for
from rdma_kv.demo.replica import CLUSTER, ReplicaSpec, model_thread, serve
from rdma_kv.demo.wire import (
    Arrived,
    Channel,
    Decode,
    Expected,
    Failed,
    Go,
    Inspect,
    Inspected,
    Prefill,
    Sent,
    Started,
    Stop,
    Undivided,
    Verified,
    Verify,
)
from rdma_kv.errors import ConfigError, RdmaKvError
from rdma_kv.planner import check_pair
from rdma_kv.registry.static import AgentRecord, EngineRecord, dump_registry
from rdma_kv.topology import TieBreak, Topology
from rdma_kv.transport.base import Transport
from rdma_kv.transport.loopback import LoopbackNetwork, LoopbackTransport
from rdma_kv.transport.named import names
from rdma_kv.transport.ucx_environment import prepare_ucx_environment
from rdma_kv.types import AgentId, Role

NEW_TOKENS = 16
_AT_ONCE = 4  # requests under way
_LOAD_S = 180.0  # for processes that each import torch, build the model, start CUDA and compile kernels


@dataclass(frozen=True)
class EngineOptions:
    """One engine of the demo."""

    topology: Topology
    page_size: int
    layout: str


@dataclass(frozen=True)
class DemoOptions:
    """What `rdma-kv demo` was asked for."""

    prefill: EngineOptions
    decode: EngineOptions
    shape: ModelShape
    requests: int
    transport: str
    seed: int
    timeout_s: float
    processes: str = "replica"
    device: str = devices.CPU

    @property
    def on_gpus(self) -> bool:
        return self.device != devices.CPU

    def check(self) -> None:
        """Raises ConfigError where model, sides or counts do not fit together, or the GPUs asked for are not there."""
        spec = self.shape.spec()
        check_pair(spec, self.prefill.topology, self.decode.topology)
        for option, engine in (("--prefill", self.prefill), ("--decode", self.decode)):
            try:
                check_pools(engine.layout, spec.components[0], engine.topology, engine.page_size)
            except ConfigError as exc:
                raise ConfigError(f"{option} {exc.field}", exc.problem) from exc
        names(self.transport, option="--transport", also=("loopback",))
        if self.processes not in {"replica", "rank"}:
            raise ConfigError("--processes", f"{self.processes!r}; use replica or rank")
        devices.check_device(self.device, self.transport)
        devices.gpus(self.device)  # last, since it takes seconds


@dataclass(frozen=True)
class Request:
    """One request of the demo and the replicas that serve it.

    Replicas number their requests by themselves, so two pairs of replicas have requests of the same key; only (key, prefill
    replica, decode replica) names one.
    """

    number: int
    key: str
    prompt: list[int]
    prefill: int
    decode: int


@dataclass
class Verdict:
    """What came of the demo."""

    requests: int
    expected: dict[int, list[int]] = field(default_factory=dict)
    sent: dict[int, list[Sent]] = field(default_factory=dict)  # of each process
    arrived: dict[int, list[Arrived]] = field(default_factory=dict)
    verified: dict[int, Verified] = field(default_factory=dict)
    touched: list[str] = field(default_factory=list)
    inspected: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0
    loading_s: float = 0.0  # of processes that load the model themselves
    device: str = devices.CPU  # or the GPUs in use

    @property
    def complete(self) -> bool:
        return len(self.verified) == self.requests and not self.failures

    @property
    def wrong_tokens(self) -> list[int]:
        return [n for n, v in sorted(self.verified.items()) if v.tokens != self.expected.get(n)]

    @property
    def wrong_bytes(self) -> list[int]:
        return [n for n, v in sorted(self.verified.items()) if v.differences]

    @property
    def blind_controls(self) -> list[int]:
        """Requests for which a spoilt copy was not noticed."""
        return [
            n for n, v in sorted(self.verified.items()) if v.overwritten_tokens == v.tokens or not v.alteration_seen
        ]

    @property
    def distinct_tokens(self) -> float:
        """Different tokens among the 16 generated from transferred pages, on average."""
        counts = [len(set(v.tokens[1:])) for v in self.verified.values()]
        return sum(counts) / len(counts) if counts else 0.0

    @property
    def lanes(self) -> list[str]:
        return sorted({lane for answers in self.sent.values() for sent in answers for lane in sent.lanes})

    @property
    def transports(self) -> list[str]:
        return sorted({name for answers in self.sent.values() for sent in answers for name in sent.transports})

    @property
    def received_bytes(self) -> int:
        return sum(arrived.received_bytes for answers in self.arrived.values() for arrived in answers)

    def as_json(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        answer = {
            "requests": self.requests,
            "bytes": self.received_bytes,
            "tokens_equal": self.complete and not self.wrong_tokens,
            "bytes_equal": self.complete and not self.wrong_bytes,
            "pages_untouched": self.inspected > 0 and not self.touched,
            "control_changed": self.complete and not self.blind_controls,
            "distinct_tokens": round(self.distinct_tokens, 2),
            "device": self.device,
            "transport": "+".join(self.transports) or "none",
            "lane": "+".join(self.lanes) or "none",
            "seconds": round(self.seconds, 3),
            "failures": self.failures[:20],
        }
        good = all(answer[k] for k in ("tokens_equal", "bytes_equal", "pages_untouched", "control_changed"))
        return {"ok": good and self.distinct_tokens >= 10 and not self.failures, **answer}


Progress = Callable[[str, int], None]
"""Told (stage, requests done so far)."""


def run_demo(options: DemoOptions, progress: Progress) -> Verdict:
    """Run the whole demo. Call it from a process without threads that has not used CUDA: it forks.

    Raises:
        ConfigError: options that do not fit together.
        LocalProtocolError: this process has used CUDA.
        RdmaKvError: the replicas could not be started.
    """
    options.check()
    if options.transport != "loopback":
        prepare_ucx_environment(os.environ)
    model = None
    if options.on_gpus:
        devices.check_unused()
    else:
        progress("loading the model", 0)
        model = warm(options.shape)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rdma-kv-demo-") as folder, contextlib.ExitStack() as stack:
        specs = process_specs(options, Path(folder) / "registry.toml")
        if model is None or options.transport != "loopback":
            make = partial(_build_here, options.shape) if model is None else partial(_inherited, model)
            start = _connect(stack.enter_context(_processes(specs, make, options.transport)))
        else:
            start = _tasks(specs, model)
        verdict = asyncio.run(_parent(options, specs, model, progress, start))
    verdict.seconds = time.perf_counter() - begin - verdict.loading_s
    return verdict


# --- replicas ----------------------------------------------------------------------------------------------------------


def place(options: DemoOptions) -> list[Request]:
    """Spread the requests over all pairs of replicas, in turn."""
    prefill_dp, decode_dp = options.prefill.topology.dp, options.decode.topology.dp
    count: Counter[tuple[int, int]] = Counter()
    requests = []
    for number, prompt in enumerate(options.shape.prompts(options.requests, options.seed)):
        pair = number % prefill_dp, number // prefill_dp % decode_dp
        requests.append(Request(number, f"request-{count[pair]}", prompt, *pair))
        count[pair] += 1
    return requests


def process_specs(options: DemoOptions, registry: Path) -> list[ReplicaSpec]:
    """One for each process: those of prefill, then those of decode, each in the order of their ranks.

    Raises:
        ConfigError: the GPUs asked for are not there.
    """
    requests = place(options)
    specs = []
    for role, engine in ((Role.PREFILL, options.prefill), (Role.DECODE, options.decode)):
        for replica in range(engine.topology.dp):
            mine = [r.prompt for r in requests if (r.prefill if role is Role.PREFILL else r.decode) == replica]
            needed = sum(pages_for(len(prompt), engine.page_size) for prompt in mine)
            ranks = engine.topology.replica_ranks(replica)
            specs += [
                ReplicaSpec(
                    role,
                    replica,
                    group,
                    engine.topology,
                    engine.layout,
                    engine.page_size,
                    pages=needed + max(8, needed // 2),
                    seed=options.seed * 1000 + 2 * replica + (role is Role.DECODE),
                    registry=registry,
                    request_timeout_s=options.timeout_s,
                )
                for group in ([ranks] if options.processes == "replica" else [(rank,) for rank in ranks])
            ]
    ordinals = devices.gpus(options.device)
    if not ordinals:
        return specs
    prefill = sum(spec.role is Role.PREFILL for spec in specs)
    placed = devices.spread(ordinals, prefill, len(specs) - prefill)
    return [replace(spec, gpu=gpu) for spec, gpu in zip(specs, [*placed[0], *placed[1]], strict=True)]


ModelMaker = Callable[[ReplicaSpec], DemoModel]
"""How a process comes by its model."""


def _inherited(model: DemoModel, spec: ReplicaSpec) -> DemoModel:
    """From the parent, by the fork."""
    return model


def _build_here(shape: ModelShape, spec: ReplicaSpec) -> DemoModel:
    """By building it in the process that will use it, on its GPU."""
    devices.prepare(os.environ)
    return warm(shape, spec.gpu)


@contextlib.contextmanager
def _processes(specs: list[ReplicaSpec], make: ModelMaker, transport: str) -> Iterator[list[socket.socket]]:
    """Fork one process per spec; end them, by force if need be, on the way out."""
    context = multiprocessing.get_context("fork")
    pairs = [socket.socketpair() for _ in specs]
    children = []
    for number, spec in enumerate(specs):
        others = [end for n, pair in enumerate(pairs) for end in pair if (n, end) != (number, pair[1])]
        child = context.Process(target=_child, args=(spec, make, transport, pairs[number][1], others), daemon=True)
        child.start()
        children.append(child)
    for _, theirs in pairs:
        theirs.close()
    try:
        yield [ours for ours, _ in pairs]
    finally:
        for child in children:
            child.join(10.0)
            if child.is_alive():
                child.kill()
                child.join()


def _child(
    spec: ReplicaSpec, make: ModelMaker, transport: str, end: socket.socket, others: list[socket.socket]
) -> None:
    for other in others:
        other.close()
    model = make(spec)

    async def main() -> None:
        channel = Channel(*await asyncio.open_connection(sock=end))
        with model_thread() as executor:
            await serve(spec, model, channel, transport, executor)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def _connect(sockets: list[socket.socket]) -> AsyncIterator[list[Channel]]:
    channels = [Channel(*await asyncio.open_connection(sock=end)) for end in sockets]
    try:
        yield channels
    finally:
        for channel in channels:
            channel.send(Stop())
            await channel.close()


@contextlib.asynccontextmanager
async def _tasks(specs: list[ReplicaSpec], model: DemoModel) -> AsyncIterator[list[Channel]]:
    """All replicas as tasks of this loop, over one loopback network."""
    network = LoopbackNetwork()
    channels = []

    def transport(name: str) -> Transport:
        return LoopbackTransport(network, name)

    with model_thread() as executor:
        async with asyncio.TaskGroup() as group:
            for spec in specs:
                ours, theirs = socket.socketpair()
                channels.append(Channel(*await asyncio.open_connection(sock=ours)))
                channel = Channel(*await asyncio.open_connection(sock=theirs))
                group.create_task(serve(spec, model, channel, transport, executor))
            try:
                yield channels
            finally:
                for channel in channels:
                    channel.send(Stop())
        for channel in channels:
            await channel.close()


# --- the parent --------------------------------------------------------------------------------------------------------


class _Station:
    """One replica as the parent sees it: its channel, and who waits for which answer."""

    def __init__(self, spec: ReplicaSpec, channel: Channel) -> None:
        self.spec = spec
        self._channel = channel
        self._waiting: dict[tuple[type, int], asyncio.Future[Any]] = {}
        self._gone = ""

    async def ask(self, message: Any, answer: type, number: int) -> Any:  # noqa: ANN401 - the answer's type is an argument
        """Send a message and await the answer of that type and request.

        Raises:
            RdmaKvError: the replica says that it failed, or is gone.
        """
        if self._gone:
            raise RdmaKvError(self._gone)
        future = self._future(answer, number)
        if message is not None:
            self._channel.send(message)
        try:
            return await future
        finally:
            self._waiting.pop((answer, number), None)

    async def listen(self) -> None:
        """Resolve answers until the replica ends."""
        while (message := await self._channel.receive()) is not None:
            number = getattr(message, "number", -1)
            if isinstance(message, Failed):
                self._fail(f"{self.name}: request {number}: {message.error}", number)
                continue
            future = self._future(type(message), number)
            if not future.done():
                future.set_result(message)
        self._gone = f"{self.name}: the process has ended"
        self._fail(self._gone)

    @property
    def name(self) -> str:
        return self.spec.name

    def _future(self, answer: type, number: int) -> asyncio.Future[Any]:
        """Of one answer, which may come before it is asked for."""
        key = answer, number
        if key not in self._waiting:
            self._waiting[key] = asyncio.get_running_loop().create_future()
        return self._waiting[key]

    def _fail(self, text: str, number: int | None = None) -> None:
        for (_, waiting_for), future in self._waiting.items():
            if number in {None, waiting_for} and not future.done():
                future.set_exception(RdmaKvError(text))


async def _parent(
    options: DemoOptions,
    specs: list[ReplicaSpec],
    model: DemoModel | None,
    progress: Progress,
    start: contextlib.AbstractAsyncContextManager[list[Channel]],
) -> Verdict:
    verdict = Verdict(options.requests, device=devices.name([spec.gpu for spec in specs if spec.gpu is not None]))
    limit_s = options.timeout_s
    async with start as channels:
        stations = [_Station(spec, channel) for spec, channel in zip(specs, channels, strict=True)]
        listeners = [asyncio.create_task(station.listen()) for station in stations]
        try:
            begin = time.perf_counter()
            if model is None:
                limit_s = _LOAD_S
                async with asyncio.timeout(limit_s):
                    await _start(options, stations, f"loading the model on {verdict.device}", progress)
                limit_s, verdict.loading_s = options.timeout_s, time.perf_counter() - begin
            async with asyncio.timeout(limit_s):
                if model is not None:
                    await _start(options, stations, "starting the agents", progress)
                await _drive(options, stations, model, progress, verdict)
        except TimeoutError:
            verdict.failures.append(f"not finished within {limit_s:.0f} s")
        finally:
            for listener in listeners:
                listener.cancel()
            await asyncio.gather(*listeners, return_exceptions=True)
    return verdict


async def _start(options: DemoOptions, stations: list[_Station], stage: str, progress: Progress) -> None:
    """Wait until all agents listen, and tell them of each other."""
    progress(stage, 0)
    addresses = await asyncio.gather(*(station.ask(None, Started, -1) for station in stations))
    _write_registry(options, stations, addresses)
    for station in stations:
        station._channel.send(Go())


async def _drive(
    options: DemoOptions, stations: list[_Station], model: DemoModel | None, progress: Progress, verdict: Verdict
) -> None:
    by_place: dict[tuple[Role, int], list[_Station]] = {}
    for station in stations:
        by_place.setdefault((station.spec.role, station.spec.replica), []).append(station)
    gate = asyncio.Semaphore(_AT_ONCE)
    with model_thread() as executor:

        async def one(request: Request) -> None:
            async with gate:
                try:
                    await _request(request, by_place, _reference(request, by_place, model, executor), verdict)
                except RdmaKvError as exc:
                    verdict.failures.append(str(exc))
                progress("moving KV", len(verdict.verified) + len(verdict.failures))

        await asyncio.gather(*(one(request) for request in place(options)))
    progress("looking at untouched pages", options.requests)
    for station in stations:
        inspected = await station.ask(Inspect(), Inspected, -1)
        verdict.inspected += 1
        verdict.touched += [f"{station.name}: {text}" for text in inspected.touched]


def _reference(
    request: Request,
    stations: dict[tuple[Role, int], list[_Station]],
    model: DemoModel | None,
    executor: Executor,
) -> Callable[[], Awaitable[list[int]]]:
    """What begins the undivided run of a request: here, or in its prefill process where that has the GPU."""

    async def there() -> list[int]:
        question = Undivided(request.number, request.prompt, NEW_TOKENS)
        expected = await stations[Role.PREFILL, request.prefill][0].ask(question, Expected, request.number)
        tokens: list[int] = expected.tokens
        return tokens

    if model is None:
        return there
    work = partial(model.undivided, request.prompt, NEW_TOKENS)
    return lambda: asyncio.get_running_loop().run_in_executor(executor, work)


async def _request(
    request: Request,
    stations: dict[tuple[Role, int], list[_Station]],
    reference: Callable[[], Awaitable[list[int]]],
    verdict: Verdict,
) -> None:
    """One request through prefill, transfer, decode and judgement. The first process of a replica leads it."""
    prefill, decode = stations[Role.PREFILL, request.prefill], stations[Role.DECODE, request.decode]
    number, key = request.number, request.key
    prefill_job = Prefill(number, key, request.prompt, request.decode)
    decode_job = Decode(number, key, len(request.prompt), request.prefill)
    answers = await asyncio.gather(
        *(station.ask(prefill_job, Sent, number) for station in prefill),
        *(station.ask(decode_job, Arrived, number) for station in decode),
    )
    sent, arrived = answers[: len(prefill)], answers[len(prefill) :]
    verdict.sent[number], verdict.arrived[number] = sent, arrived
    shards = {rank: data for answer in arrived for rank, data in answer.shards.items()}
    verify = decode[0].ask(Verify(number, sent[0].fingerprints, NEW_TOKENS, shards), Verified, number)
    verdict.expected[number], verdict.verified[number] = await asyncio.gather(reference(), verify)


def _write_registry(options: DemoOptions, stations: list[_Station], addresses: list[Started]) -> None:
    engines = []
    for role, engine in ((Role.PREFILL, options.prefill), (Role.DECODE, options.decode)):
        agents = tuple(
            AgentRecord(AgentId(CLUSTER, role.value, role, min(s.spec.ranks)), at.host, at.port, s.spec.ranks)
            for s, at in zip(stations, addresses, strict=True)
            if s.spec.role is role
        )
        engines.append(EngineRecord(role.value, role, engine.topology, TieBreak.REPLICA, agents))
    path = stations[0].spec.registry
    draft = path.with_suffix(".new")
    draft.write_bytes(dump_registry(CLUSTER, engines))
    draft.replace(path)
