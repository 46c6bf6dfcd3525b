"""What a team of processes is asked to measure: whole transfers, their parts alone, NIXL's own API."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Sequence
from functools import partial

from rdma_kv.bench.gpu_links import Link
from rdma_kv.bench.gpu_memory import Rows
from rdma_kv.bench.gpu_rounds import Step, absent
from rdma_kv.bench.gpu_team import Team
from rdma_kv.errors import RdmaKvError
from rdma_kv.transport.named import PREFERENCE, usable

CONTIGUOUS, PAGES, ROWS = "NIXL, one descriptor", "NIXL, descriptors of 64 KiB", "NIXL, descriptors of 4 KiB"
"""What our transfers are compared with, by NIXL's own API."""
PAGE_BYTES, ROW_BYTES = 64 << 10, 4 << 10
ROWS_BYTES = 64 << 20
"""Moved in descriptors of 4 KiB, where more would take seconds; their rate is that of so many."""


def size_name(num_bytes: int) -> str:
    """As people say it."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes >> shift and not num_bytes % (1 << shift):
            return f"{num_bytes >> shift} {unit}"
    return f"{num_bytes:,} B"


def backends(only: Sequence[str] = PREFERENCE) -> dict[str, str]:
    """Transports to measure, and why one cannot be, or nothing."""
    return {name: "" if usable(name, os.environ) else f"{name} is not installed" for name in only}


def transfer_step(team: Team, name: str, link: Link, num_bytes: int, *, times: int = 1, awaited: bool = False) -> Step:
    """Whole transfers, one from each prefill rank at once, by agents.

    Args:
        times: one after the other; their median is a measurement.
        awaited: see `GpuSide.send`; then the figure is a time.
    """
    rows = Rows(link.row_bytes, team.spec.layers)
    exact = rows.tokens(num_bytes) * rows.token_bytes * len(team.prefill)

    def measure() -> float:
        return statistics.median(team.move(link, num_bytes, awaited=awaited) for _ in range(times))

    why = backends((link.transport,)).get(link.transport)
    try:
        if not why:
            team.open(link)
    except RdmaKvError as exc:
        why = str(exc)
    if why:
        return absent(name, why)
    return Step(name, 0 if awaited else exact, measure, partial(team.check, link, num_bytes))


def raw_steps(team: Team, sizes: Sequence[tuple[str, int, int]], *, times: int = 1) -> dict[str, Step]:
    """NIXL's own API from prefill 0 to decode 0.

    Args:
        sizes: name, bytes of a descriptor, bytes of all.
        times: as for `transfer_step`.
    """
    prefill, decode = team.prefill[0], team.decode[0]
    try:
        other = decode.ask("open_raw")
        prefill.ask("open_raw")
        prefill.ask("connect_raw", other)
    except RdmaKvError as exc:
        return {name: absent(name, exc) for name, _, _ in sizes}

    def measure(piece_bytes: int, total_bytes: int) -> float:
        return statistics.median(float(prefill.ask("write_raw", piece_bytes, total_bytes)) for _ in range(times))

    def check(piece_bytes: int, total_bytes: int) -> None:
        decode.ask("wipe", True)
        prefill.ask("write_raw", piece_bytes, total_bytes)
        wrong = decode.ask("wrong_pieces", piece_bytes, total_bytes)
        if wrong:
            raise RdmaKvError(f"{wrong} pieces arrived with other bytes than were sent")

    return {
        name: Step(name, total, partial(measure, piece, total), partial(check, piece, total))
        for name, piece, total in sizes
    }


def close_raw(team: Team) -> None:
    """End NIXL's own agents, whose threads spin, before other things are measured."""
    with contextlib.suppress(RdmaKvError):
        for worker in (team.prefill[0], team.decode[0]):
            worker.ask("close_raw")


def usual_raw(num_bytes: int) -> list[tuple[str, int, int]]:
    """The three sizes of descriptors that transfers of `num_bytes` are compared with."""
    return [
        (CONTIGUOUS, num_bytes, num_bytes),
        (PAGES, PAGE_BYTES, num_bytes),
        (ROWS, ROW_BYTES, min(num_bytes, ROWS_BYTES)),
    ]


class Parts:
    """The parts of a transfer from prefill 0 to decode 0, alone; and the loop made of them."""

    def __init__(self, team: Team, programs: int) -> None:
        self._team = team
        self._programs = programs

    def kernels(self, row_bytes: int, slot_bytes: int, num_bytes: int) -> tuple[Step, Step]:
        """Gather and scatter of all that a transfer moves."""
        rows = Rows(row_bytes, self._team.spec.layers)
        exact = rows.tokens(num_bytes) * rows.token_bytes
        gather, scatter = (
            Step(
                f"{kernel} alone, rows of {row_bytes:,} B",
                exact,
                partial(side.ask, "kernel", row_bytes, slot_bytes, num_bytes, self._programs),
            )
            for kernel, side in (("gather", self._team.prefill[0]), ("scatter", self._team.decode[0]))
        )
        return gather, scatter

    def write(self, backend: str, piece_bytes: int, num_bytes: int) -> Step:
        """WRITEs of slots, without kernels."""
        name, why = f"WRITE alone, {backend}", self._open(backend)

        def measure() -> float:
            decode = self._team.decode[0]
            decode.ask("listen", backend, True)
            try:
                return float(self._team.prefill[0].ask("write_plain", backend, piece_bytes, num_bytes))
            finally:
                decode.ask("listen", backend, False)

        return absent(name, why) if why else Step(name, num_bytes, measure)

    def floor(self, backend: str, row_bytes: int, num_bytes: int, count: int) -> Step:
        """The loop without protocol: the median of `count` requests is a measurement."""
        name, why = f"{size_name(num_bytes)}, rows of {row_bytes:,} B: floor, {backend}", self._open(backend)
        asked = (backend, row_bytes, num_bytes)

        def measure() -> float:
            prefill, decode = self._team.prefill[0], self._team.decode[0]
            decode.ask("serve_floor", *asked, count, self._programs)
            took_s = float(prefill.ask("floor", *asked, count, self._programs))
            decode.ask("served", backend)
            return took_s

        return absent(name, why) if why else Step(name, 0, measure)

    def _open(self, backend: str) -> str:
        """Why this back-end is not there, or nothing."""
        opened = self._team.plain
        if backend not in opened:
            opened[backend] = self._connect(backend)
        return opened[backend]

    def _connect(self, backend: str) -> str:
        prefill, decode = self._team.prefill[0], self._team.decode[0]
        why = backends((backend,))[backend]
        if why:
            return why
        try:
            theirs, ours = decode.ask("open_plain", backend), prefill.ask("open_plain", backend)
            decode.begin("connect_plain", backend, *ours)
            try:
                prefill.ask("connect_plain", backend, *theirs)
            finally:
                decode.result()
        except RdmaKvError as exc:
            return str(exc)
        return ""
