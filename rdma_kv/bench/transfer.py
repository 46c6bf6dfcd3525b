"""Whole transfers through the public API beside the same work without the protocol, in one run, interleaved."""

from __future__ import annotations

import contextlib
import socket
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rdma_kv.bench.goals import Bound, Meter, Missing, Relation, figure
from rdma_kv.bench.member import TOPOLOGY
from rdma_kv.bench.paths import (
    AGENT,
    BASELINE,
    Hosts,
    PairOptions,
    PathSide,
    PathSpec,
    connect_sides,
    hosted,
    random_memory,
)
from rdma_kv.bench.rows import Row
from rdma_kv.errors import ConfigError, RdmaKvError
from rdma_kv.types import Role

COUNTS = (1, 8, 64)  # requests that share a round's bytes
BASELINE_GOAL = 0.9
MANY_GOAL = 0.9
WAIT_GOAL = 3.0
_HOW = (AGENT, BASELINE)


@dataclass(frozen=True)
class TransferOptions(PairOptions):
    """What `rdma-kv bench transfer` was asked for.

    Attributes:
        mib: KV of one measurement, shared by 1, 8 or 64 requests.
    """

    mib: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mib < COUNTS[-1] or self.mib % COUNTS[-1]:
            raise ConfigError("--mib", f"{self.mib} is no multiple of {COUNTS[-1]}")


@dataclass
class Measured:
    """Samples, one per round that counts.

    Attributes:
        took_s: seconds until all was done, by way and number of requests.
        waits_s: the agent's seconds of each request, by number of requests.
    """

    took_s: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    waits_s: dict[int, list[list[float]]] = field(default_factory=dict)
    lanes: str = ""

    def median_s(self, how: str, count: int) -> float:
        return statistics.median(self.took_s[how, count])


def measure_transfer(options: TransferOptions, meter: Meter) -> list[Row]:
    """Run it all. Call it from a process without threads: it forks.

    A transport that is not there is a row that is not ok.

    Raises:
        RdmaKvError: an agent failed, or other bytes arrived than were sent.
    """
    with _processes(options) as hosts:
        try:
            connect_sides(hosts.workers, hosts.registry, TOPOLOGY)
        except RdmaKvError as exc:
            return [Missing(options.backend, f"missing: {exc}", "")]
        measured = _measure(options, hosts, meter)
    return _rows(options, measured)


@contextlib.contextmanager
def _processes(options: TransferOptions) -> Iterator[Hosts]:
    source, acks = random_memory(options.mib << 20), socket.socketpair()

    def side(roles: tuple[Role, ...], registry: Path) -> PathSide:
        return PathSide(PathSpec(options.backend, roles, source, registry, acks))

    with hosted(options, side, acks) as hosts:
        yield hosts


def _measure(options: TransferOptions, hosts: Hosts, meter: Meter) -> Measured:
    measured = Measured()
    total, done = (options.repetitions + 1) * len(COUNTS) * len(_HOW), 0
    for number in range(options.repetitions + 1):
        for count in COUNTS:
            for how in _HOW:
                meter(f"round {number} of {options.repetitions}: {count} requests, {how}", done, total)
                waits_s = _move(options, hosts, how, f"{number}-{count}", count)
                done += 1
                if number:
                    measured.took_s.setdefault((how, count), []).append(max(waits_s))
                    if how == AGENT:
                        measured.waits_s.setdefault(count, []).append(waits_s)
    measured.lanes = "+".join(hosts.prefill.ask("lanes"))
    meter("done", total, total)
    return measured


def _move(options: TransferOptions, hosts: Hosts, how: str, key: str, count: int) -> list[float]:
    """One measurement; every byte of it is checked."""
    hosts.decode.ask("wipe")
    hosts.decode.ask("expect", how, key, count)
    waits_s: list[float] = hosts.prefill.ask("move", how, key, count)
    received_bytes = hosts.decode.ask("received")
    if received_bytes != options.mib << 20:
        raise RdmaKvError(f"{received_bytes} bytes arrived, not {options.mib} MiB")
    wrong = hosts.decode.ask("wrong_pages")
    if wrong:
        raise RdmaKvError(f"{how}, {count} requests: {wrong} pages arrived with other bytes than were sent")
    return waits_s


# --- rows --------------------------------------------------------------------------------------------------------------


def _rows(options: TransferOptions, measured: Measured) -> list[Row]:
    return [
        *(_baseline_ratio(options, measured, count) for count in COUNTS),
        _many_ratio(options, measured),
        _wait_ratio(options, measured),
        *(row for count in COUNTS for how in _HOW for row in _figure(options, measured, how, count)),
        *_wait_rows(options, measured),
        Row("transport", options.backend, ""),
        Row("lane", measured.lanes, ""),
    ]


def _baseline_ratio(options: TransferOptions, measured: Measured, count: int) -> Row:
    ratio = measured.median_s(BASELINE, count) / measured.median_s(AGENT, count)
    name = f"{_what(options, count)}: transfer to its baseline >= {BASELINE_GOAL:g}"
    return Bound(name, ratio, "ratio", BASELINE_GOAL, Relation.AT_LEAST)


def _many_ratio(options: TransferOptions, measured: Measured) -> Row:
    ratio = measured.median_s(AGENT, COUNTS[0]) / measured.median_s(AGENT, COUNTS[-1])
    name = f"{_what(options, COUNTS[-1])} to {_what(options, COUNTS[0])} >= {MANY_GOAL:g}"
    return Bound(name, ratio, "ratio", MANY_GOAL, Relation.AT_LEAST)


def _wait_ratio(options: TransferOptions, measured: Measured) -> Row:
    """Of all rounds the worst, as no request may wait longer."""
    worst = max(max(waits) / statistics.median(waits) for waits in measured.waits_s[COUNTS[-1]])
    name = f"{_what(options, COUNTS[-1])}: longest wait to the median, worst round <= {WAIT_GOAL:g}"
    return Bound(name, worst, "ratio", WAIT_GOAL, Relation.AT_MOST)


def _figure(options: TransferOptions, measured: Measured, how: str, count: int) -> list[Row]:
    num_bytes = options.mib << 20
    samples = [num_bytes / took / 1e9 for took in measured.took_s[how, count]]
    return figure(f"{_what(options, count)}: {'transfer' if how == AGENT else 'baseline'}", samples, "GB/s")


def _wait_rows(options: TransferOptions, measured: Measured) -> list[Row]:
    rows: list[Row] = []
    for count in COUNTS[1:]:
        medians = [1e3 * statistics.median(waits) for waits in measured.waits_s[count]]
        rows += figure(f"{_what(options, count)}: median wait of a request", medians, "ms")
    return rows


def _what(options: TransferOptions, count: int) -> str:
    return f"{count} x {options.mib // count} MiB"
