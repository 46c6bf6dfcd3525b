"""Two connected agents: their CPU while nothing moves, and their event loops while KV moves.

Each agent is a process of its own, forked before any thread or event loop exists; on loopback, which lives in one
process, both are in one. This process only asks and waits, so it takes no core from them.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import socket
import statistics
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from rdma_kv.bench.member import PAGE_BYTES, PAGE_TOKENS, TOPOLOGY, HostSpec, serve, write_registry
from rdma_kv.bench.rows import Progress, Row, percentile
from rdma_kv.bench.wire import Answer, Channel, Check, Checked, Move, Moved, Question, Rest, Rested, Started, Stop
from rdma_kv.errors import RdmaKvError
from rdma_kv.transport.loopback import LoopbackNetwork, LoopbackTransport
from rdma_kv.transport.named import TransportMaker, names
from rdma_kv.transport.ucx_environment import prepare_ucx_environment
from rdma_kv.types import Role

MOVES = 7  # odd, and medians over them, as other work may share the cores
CPU_GOAL_PERCENT = 1.0
LAG_GOAL_MS = 10.0
_BESIDES_S = 120.0  # for all but the idle window
_END_S = 15.0  # for a process to close its agents

A = TypeVar("A", bound=Answer)


@dataclass(frozen=True)
class IdleOptions:
    """What `rdma-kv bench idle` was asked for.

    Attributes:
        seconds: the idle window.
        transport: `auto`, `ucx`, `nixl` or `loopback`.
        mib: size of one move.
    """

    seconds: float
    transport: str
    mib: int

    def __post_init__(self) -> None:
        names(self.transport, option="--transport", also=("loopback",))

    @property
    def pages(self) -> int:
        return (self.mib << 20) // PAGE_BYTES

    @property
    def hosts(self) -> dict[str, tuple[Role, ...]]:
        """The measured processes and the roles of their agents."""
        if self.transport == "loopback":
            return {"both agents": (Role.PREFILL, Role.DECODE)}
        return {"prefill": (Role.PREFILL,), "decode": (Role.DECODE,)}


def measure_idle(options: IdleOptions, progress: Progress) -> list[Row]:
    """Run it all. Call it from a process without threads: it forks.

    Raises:
        RdmaKvError: an agent failed, ran out of time, or other bytes arrived than were sent.
    """
    if options.transport != "loopback":
        prepare_ucx_environment(os.environ)
    with tempfile.TemporaryDirectory(prefix="rdma-kv-bench-") as folder:
        registry = Path(folder) / "registry.toml"
        specs = [HostSpec(name, roles, options.pages, registry, _BESIDES_S) for name, roles in options.hosts.items()]
        with _processes(specs, options.transport) as sockets:
            return asyncio.run(_measure(options, specs, sockets, progress))


# --- processes ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _processes(specs: Sequence[HostSpec], transport: str) -> Iterator[list[socket.socket]]:
    """Fork one process per spec; end them on the way out, by force after an error or where they take too long."""
    context = multiprocessing.get_context("fork")
    pairs = [socket.socketpair() for _ in specs]
    children = []
    for spec, pair in zip(specs, pairs, strict=True):
        others = [end for other in pairs for end in other if end is not pair[1]]
        child = context.Process(target=_child, args=(spec, transport, pair[1], others), daemon=True)
        child.start()
        children.append(child)
    for _, theirs in pairs:
        theirs.close()
    try:
        yield [ours for ours, _ in pairs]
    except BaseException:
        for child in children:
            child.kill()  # it may be in the middle of a long rest
        raise
    finally:
        for child in children:
            child.join(_END_S)
            if child.is_alive():
                child.kill()
                child.join()


def _child(spec: HostSpec, transport: str, end: socket.socket, others: list[socket.socket]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    for other in others:
        other.close()

    async def main() -> None:
        channel = Channel(*await asyncio.open_connection(sock=end))
        network = LoopbackNetwork()
        make: str | TransportMaker = partial(LoopbackTransport, network) if transport == "loopback" else transport
        await serve(spec, channel, make)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def _channels(sockets: Sequence[socket.socket]) -> AsyncIterator[list[Channel]]:
    channels = [Channel(*await asyncio.open_connection(sock=end)) for end in sockets]
    try:
        yield channels
    finally:
        for channel in channels:
            channel.send(Stop())
            await channel.close()


# --- measuring ---------------------------------------------------------------------------------------------------------


async def _measure(
    options: IdleOptions, specs: Sequence[HostSpec], sockets: Sequence[socket.socket], progress: Progress
) -> list[Row]:
    async with _channels(sockets) as channels:
        try:
            async with asyncio.timeout(options.seconds + _BESIDES_S):
                progress(f"starting two agents over {options.transport}")
                ports: dict[Role, int] = {}
                for spec, channel in zip(specs, channels, strict=True):
                    ports |= zip(spec.roles, _as(Started, await channel.answer()).ports, strict=True)
                write_registry(specs[0].registry, ports, TOPOLOGY)
                return await _rows(options, channels, progress)
        except TimeoutError as exc:
            raise RdmaKvError(f"not finished within {options.seconds + _BESIDES_S:.0f} s") from exc


async def _rows(options: IdleOptions, channels: Sequence[Channel], progress: Progress) -> list[Row]:
    names = list(options.hosts)
    await _ask(channels, Move("first", PAGE_TOKENS), Moved)
    progress(f"idle for {options.seconds:g} s, connected")
    rested = await _ask(channels, Rest(options.seconds), Rested)
    moves = []
    for number in range(MOVES):
        moved = await _ask(channels, Move(f"move-{number}", options.pages * PAGE_TOKENS), Moved)
        progress(f"moved {options.mib} MiB in {_took_s(moved):.3f} s")
        moves.append(moved)
    await _check(options, channels, moves)
    return [*_cpu_rows(names, rested), *_lag_rows(names, moves), *_speed_rows(options, moves)]


async def _check(options: IdleOptions, channels: Sequence[Channel], moves: Sequence[Sequence[Moved]]) -> None:
    """Raises RdmaKvError where not all bytes arrived, or others than were sent."""
    for moved in moves:
        received = sum(part.received_bytes for part in moved)
        if received != options.mib << 20:
            raise RdmaKvError(f"{received} bytes arrived, not {options.mib} MiB")
    wrong = sum(checked.wrong_pages for checked in await _ask(channels, Check(), Checked))
    if wrong:
        raise RdmaKvError(f"{wrong} of {options.pages} pages arrived with other bytes than were sent")


def _cpu_rows(names: Sequence[str], rested: Sequence[Rested]) -> list[Row]:
    return [
        Row(f"idle CPU, {name}", 100 * rest.cpu_s / rest.seconds, "% of a core", CPU_GOAL_PERCENT)
        for name, rest in zip(names, rested, strict=True)
    ]


def _lag_rows(names: Sequence[str], moves: Sequence[Sequence[Moved]]) -> list[Row]:
    """Per process: how late timers were. Where cores are short, a good part of that is waiting for one."""
    rows = []
    for place, name in enumerate(names):
        parts = [moved[place] for moved in moves]
        title = f"event-loop lag while KV moves, {name}"
        p50, p99 = (statistics.median(percentile(part.lag_s, share) for part in parts) for share in (0.50, 0.99))
        longest = max(max(part.lag_s) for part in parts)
        waited = sum(part.core_wait_s for part in parts) / sum(_took_s(moved) for moved in moves)
        rows += [
            Row(f"{title}, p50", 1e3 * p50, "ms"),
            Row(f"{title}, p99", 1e3 * p99, "ms", LAG_GOAL_MS),
            Row(f"{title}, longest of all", 1e3 * longest, "ms"),
            Row(f"event loop ready but without a core, {name}", 100 * waited, "% of the time"),
        ]
    return rows


def _speed_rows(options: IdleOptions, moves: Sequence[Sequence[Moved]]) -> list[Row]:
    num_bytes = options.mib << 20
    sender = next((part for part in moves[-1] if part.lane), Moved(lane="none", transport="none"))
    return [
        Row(f"{options.mib} MiB of KV, push to done", num_bytes / statistics.median(map(_took_s, moves)) / 1e9, "GB/s"),
        Row("transport", sender.transport, ""),
        Row("lane", sender.lane, ""),
    ]


def _took_s(moved: Sequence[Moved]) -> float:
    """Only the sender's process has timed a move."""
    return max(part.seconds for part in moved)


async def _ask(channels: Sequence[Channel], question: Question, answer: type[A]) -> list[A]:
    """The answers of all processes, which work at the same time."""
    for channel in channels:
        channel.send(question)
    return [_as(answer, await channel.answer()) for channel in channels]


def _as(kind: type[A], answer: Answer) -> A:
    if not isinstance(answer, kind):
        raise RdmaKvError(f"a measured process answered {type(answer).__name__}, not {kind.__name__}")
    return answer
