"""A small request from end to end beside a socket written by hand, where its time goes, and what small WRITEs cost.

Two processes, an agent each. One request at a time: the decode side asks for it first, and only then does the prefill
side send, so the slot has been given ahead. The ways take turns, round by round.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rdma_kv.bench.goals import Bound, Meter, Missing, Relation, figure
from rdma_kv.bench.latency_posting import POST_BYTES, POSTS
from rdma_kv.bench.latency_sides import REQUEST_BYTES, REQUESTS, TOPOLOGY, LatencySide, LatencySpec
from rdma_kv.bench.latency_sockets import How, tcp_pair
from rdma_kv.bench.latency_trace import PATH, Mark, in_order
from rdma_kv.bench.paths import AGENT, Hosts, PairOptions, connect_sides, hosted, random_memory
from rdma_kv.bench.rows import Row
from rdma_kv.errors import RdmaKvError
from rdma_kv.types import Role

POST_GOAL_US = 20.0  # of loop time for each of many small WRITEs, on ucx
_WAYS = (AGENT, *How)
_WARM_UPS = 3  # transfers before slots can be counted on to be given ahead
_REST_S = 0.03  # before each round: NIXL's thread goes on for 20 ms after its last WRITE
_WHAT = f"{REQUEST_BYTES >> 10} KiB"

Marks = Mapping[str, float]

_SPANS: dict[tuple[Mark, Mark], str] = {
    (Mark.CALLED, Mark.START_SENT): "send() called to START sent",
    (Mark.START_SENT, Mark.GATHER_BEGINS): "START sent to gather begins",
    (Mark.GATHER_BEGINS, Mark.GATHER_ENDS): "gather",
    (Mark.GATHER_ENDS, Mark.WRITE_CALLED): "gather ends to WRITE called",
    (Mark.WRITE_CALLED, Mark.NOTIFIED): "WRITE called to target notified",
    (Mark.NOTIFIED, Mark.SCATTER_BEGINS): "target notified to scatter begins",
    (Mark.SCATTER_BEGINS, Mark.SCATTER_ENDS): "scatter",
    (Mark.SCATTER_ENDS, Mark.DONE_SENT): "scatter ends to DONE sent",
    (Mark.DONE_SENT, Mark.DONE_READ): "DONE sent to DONE read",
    (Mark.DONE_READ, Mark.RETURNED): "DONE read to send() returns",
}
_BESIDES: dict[tuple[Mark, Mark], str] = {
    (Mark.WRITE_CALLED, Mark.WRITE_ENDED): "WRITE called to its end at the initiator",
    (Mark.WRITE_ENDED, Mark.FINISH_SENT): "end of WRITE to FINISH sent",
    (Mark.FINISH_SENT, Mark.FINISH_READ): "FINISH sent to FINISH read",
    (Mark.FINISH_READ, Mark.SCATTER_ENDS): "FINISH read to scatter ends (below 0: DONE waited for FINISH)",
}


@dataclass(frozen=True)
class LatencyOptions(PairOptions):
    """What `rdma-kv bench latency` was asked for."""


@dataclass
class Measured:
    """What came of the rounds that count.

    Attributes:
        took_s: of each round the median of its requests, by way.
        marks: of each round, of each transfer of an agent.
        ahead: transfers of an agent whose slot was given ahead.
        posts_us: CPU of the loop's thread and of the process for a post, at the initiator and the target, by round.
    """

    took_s: dict[str, list[float]] = field(default_factory=dict)
    marks: list[list[Marks]] = field(default_factory=list)
    ahead: int = 0
    posts_us: list[tuple[tuple[float, float], tuple[float, float]]] = field(default_factory=list)
    lanes: str = ""

    @property
    def transfers(self) -> int:
        return sum(map(len, self.marks))

    def spans_us(self, first: Mark, last: Mark) -> list[float]:
        """Median of each round."""
        return [
            1e6 * statistics.median(each[last.value] - each[first.value] for each in one_round)
            for one_round in self.marks
        ]


def measure_latency(options: LatencyOptions, meter: Meter) -> list[Row]:
    """Run it all. Call it from a process without threads: it forks.

    A transport that is not there is a row that is not ok.

    Raises:
        RdmaKvError: an agent failed, other bytes arrived than were sent, or a notification did not arrive once.
    """
    with _processes(options) as hosts:
        try:
            connect_sides(hosts.workers, hosts.registry, TOPOLOGY)
        except RdmaKvError as exc:
            return [Missing(options.backend, f"missing: {exc}", "")]
        measured = _measure(options, hosts, meter)
    return _rows(options, measured)


@contextlib.contextmanager
def _processes(options: LatencyOptions) -> Iterator[Hosts]:
    source, pairs = random_memory(REQUESTS * REQUEST_BYTES), {how: tcp_pair() for how in How}

    def side(roles: tuple[Role, ...], registry: Path) -> LatencySide:
        return LatencySide(LatencySpec(options.backend, roles, source, registry, pairs))

    with hosted(options, side, itertools.chain(*pairs.values())) as hosts:
        yield hosts


# --- measuring ---------------------------------------------------------------------------------------------------------


def _measure(options: LatencyOptions, hosts: Hosts, meter: Meter) -> Measured:
    measured = Measured()
    total, done = (options.repetitions + 1) * (len(_WAYS) + 1), 0
    _first_transfers(hosts)
    for number in range(options.repetitions + 1):
        for how in _WAYS:
            meter(f"round {number} of {options.repetitions}: {_WHAT}, {how}", done, total)
            ahead = hosts.decode.ask("ahead")
            took_s, marks = _round(hosts, how, str(number))
            done += 1
            if number:
                measured.took_s.setdefault(how, []).append(statistics.median(took_s))
            if number and how == AGENT:
                measured.ahead += hosts.decode.ask("ahead") - ahead
                measured.marks.append(marks)
        meter(f"round {number} of {options.repetitions}: {POSTS:,} small writes", done, total)
        posts_us = _post(hosts, number)
        done += 1
        if number:
            measured.posts_us.append(posts_us)
    measured.lanes = "+".join(hosts.prefill.ask("lanes"))
    meter("done", total, total)
    return measured


def _first_transfers(hosts: Hosts) -> None:
    """Connect the agents, and let the decode side tell where its slots lie: only then are any given ahead."""
    for number in range(_WARM_UPS):
        _request(hosts, AGENT, number, f"first-{number}")


def _round(hosts: Hosts, how: str, name: str) -> tuple[list[float], list[Marks]]:
    """Seconds of each request, and the marks of each transfer of an agent. Every byte is checked."""
    hosts.decode.ask("wipe")
    time.sleep(_REST_S)
    took_s, marks = [], []
    for number in range(REQUESTS):
        took_s.append(_request(hosts, how, number, f"{name}-{number}"))
        if how == AGENT:
            marks.append(hosts.prefill.ask("marks") | hosts.decode.ask("marks"))
            in_order(marks[-1])
    wrong = hosts.decode.ask("wrong_pages")
    if wrong:
        raise RdmaKvError(f"{how}: {wrong} pages arrived with other bytes than were sent")
    return took_s, marks


def _request(hosts: Hosts, how: str, number: int, key: str) -> float:
    """Seconds from the call at the prefill side to its end there."""
    hosts.decode.ask("expect", how, number, key)
    took_s: float = hosts.prefill.ask("send", how, number, key)
    hosts.decode.ask("received")
    return took_s


def _post(hosts: Hosts, number: int) -> tuple[tuple[float, float], tuple[float, float]]:
    hosts.decode.ask("take", number)
    posted = hosts.prefill.ask("post", number)
    return tuple(posted), tuple(hosts.decode.ask("taken"))


# --- rows --------------------------------------------------------------------------------------------------------------


def _rows(options: LatencyOptions, measured: Measured) -> list[Row]:
    return [
        _ahead_row(measured),
        _post_row(options, measured),
        *_transfer_rows(measured),
        *(row for how in How for row in figure(f"{_WHAT}: {how}", [1e6 * s for s in measured.took_s[how]], "us")),
        *_span_rows(measured),
        *_posting_rows(measured),
        Row("transport", options.backend, ""),
        Row("lane", measured.lanes, ""),
    ]


def _ahead_row(measured: Measured) -> Row:
    share = measured.ahead / measured.transfers
    return Bound(f"{_WHAT}: transfers with the slot given ahead >= 1", share, "share", 1.0, Relation.AT_LEAST)


def _transfer_rows(measured: Measured) -> list[Row]:
    """Ratios to each socket, then the transfer itself. Without slots given ahead it is another thing than is named."""
    names = [f"{_WHAT}: transfer to {how}" for how in How]
    if measured.ahead < measured.transfers:
        why = f"missing: slots were given ahead for {measured.ahead} of {measured.transfers} transfers only"
        return [Missing(name, why, "") for name in (*names, f"{_WHAT}: transfer")]
    transfer_s = statistics.median(measured.took_s[AGENT])
    ratios = [transfer_s / statistics.median(measured.took_s[how]) for how in How]
    return [
        *(Row(name, ratio, "ratio") for name, ratio in zip(names, ratios, strict=True)),
        *figure(f"{_WHAT}: transfer", [1e6 * s for s in measured.took_s[AGENT]], "us"),
    ]


def _span_rows(measured: Measured) -> list[Row]:
    """Spans one after the other, their sum beside the median whole, and what happens meanwhile."""
    rows, total_us = [], 0.0
    for number, (first, last) in enumerate(itertools.pairwise(PATH), 1):
        span_us = measured.spans_us(first, last)
        total_us += statistics.median(span_us)
        rows += figure(f"span {number}: {_SPANS[first, last]}", span_us, "us")
    rows.append(Row("spans, sum of their medians", total_us, "us"))
    rows += figure("spans, median of their sums", measured.spans_us(PATH[0], PATH[-1]), "us")
    for (first, last), name in _BESIDES.items():
        rows += figure(f"meanwhile: {name}", measured.spans_us(first, last), "us")
    return rows


def _post_row(options: LatencyOptions, measured: Measured) -> Row:
    """Loop time of a post: with a goal where the WRITE is made on the loop, by our own code."""
    value = statistics.median(initiator[0] for initiator, _ in measured.posts_us)
    name = f"{POSTS:,} x {POST_BYTES} B at once: loop time of each at the initiator"
    return Row(name, value, "us", POST_GOAL_US if options.backend == "ucx" else None)


def _posting_rows(measured: Measured) -> list[Row]:
    what = f"{POSTS:,} x {POST_BYTES} B at once"
    rows = []
    initiator, target = zip(*measured.posts_us, strict=True)
    samples = {
        "loop time of each at the target": [thread for thread, _ in target],
        "CPU of each at the initiator, all threads": [process for _, process in initiator],
        "CPU of each at the target, all threads": [process for _, process in target],
    }
    for name, values_us in samples.items():
        rows += figure(f"{what}: {name}", values_us, "us")
    return rows
