"""`ucx_perftest` of the libucx wheel: UCX's own measure of its puts, a server and a client process per figure."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from rdma_kv.errors import RdmaKvError

_PACKAGE = "libucx"  # of the wheels libucx-cu12 and libucx-cu13
_RUN_S = 120.0
_CONNECT_S = 5.0
_PAUSE_S = 0.02
_ATTEMPTS = 3
_SOCKETS = Path("/proc/net/tcp")
_LISTENS = "0A"  # Source: linux/tcp_states.h
_LEAST_WARMUP, _MOST_ITERATIONS = 1, 2000
_TURN_BYTES = 256 << 20  # what one figure moves at most, unless two iterations are more
_OVERALL_US = -5  # column of the last line of `-f`: microseconds per message, over all


class Perftest(NamedTuple):
    """The installed program.

    Attributes:
        version: of the wheel.
    """

    program: Path
    libraries: Path
    version: str


def find_perftest() -> Perftest:
    """The program of the installed wheel.

    Raises:
        RdmaKvError: it is not installed.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        program = Path(place) / "bin" / "ucx_perftest"
        if program.is_file():
            version = Path(place) / "UCX_WHEEL_VERSION.txt"
            text = version.read_text().strip() if version.is_file() else "unknown"
            return Perftest(program, Path(place) / "lib", text)
    raise RdmaKvError("ucx_perftest is not installed (wheel libucx-cu12)")


def put_flags(size_bytes: int, *, errors: bool) -> list[str]:
    """What the client is told; `errors` is UCX's peer error handling, which our transports have on."""
    iterations = max(2, min(_MOST_ITERATIONS, _TURN_BYTES // size_bytes // 2))
    warmup = max(_LEAST_WARMUP, iterations // 10)
    flags = ["-t", "ucp_put_bw", "-s", str(size_bytes), "-n", str(iterations), "-w", str(warmup), "-f"]
    return [*flags, "-e"] if errors else flags


def put_seconds(perftest: Perftest, size_bytes: int, environ: Mapping[str, str | None], *, errors: bool) -> float:
    """Seconds per put of one run. A run that fails is tried again: its port may have been taken meanwhile.

    Raises:
        RdmaKvError: the program failed; the text is its last line.
    """
    settings = _environment(perftest, environ, errors=errors)
    for attempt in range(1, _ATTEMPTS + 1):
        port = _free_port()
        command = [str(perftest.program), "-p", str(port), *(["-e"] if errors else [])]
        client = [str(perftest.program), "127.0.0.1", "-p", str(port), *put_flags(size_bytes, errors=errors)]
        with _server(command, settings) as server:
            _wait_for_listener(server, port)
            done = _run(client, settings)
        if not done.returncode or attempt == _ATTEMPTS:
            break
    return _parse(done)


def _run(command: list[str], environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=_RUN_S, check=False)
    except subprocess.TimeoutExpired as exc:
        raise RdmaKvError(f"ucx_perftest did not end within {_RUN_S:.0f} s") from exc


def _free_port() -> int:
    """A port that can be bound at every address, as the server binds it: none in TIME_WAIT."""
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def _wait_for_listener(server: subprocess.Popen[bytes], port: int) -> None:
    """Until the server listens or has ended, bounded; without connecting, as it takes one connection only."""
    place, until_s = f":{port:04X} ", time.monotonic() + _CONNECT_S
    while server.poll() is None and time.monotonic() < until_s:
        for line in _SOCKETS.read_text().splitlines():
            if place in line and line.split()[3] == _LISTENS:
                return
        time.sleep(_PAUSE_S)


def _environment(perftest: Perftest, environ: Mapping[str, str | None], *, errors: bool) -> dict[str, str]:
    changes = {"LD_LIBRARY_PATH": str(perftest.libraries), **environ}
    if errors:
        changes["UCX_RNDV_THRESH"] = "inf"  # or puts with error handling become messages, ten times slower
    merged = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}


@contextlib.contextmanager
def _server(command: list[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    nothing = subprocess.DEVNULL
    process = subprocess.Popen(command, env=environ, stdin=nothing, stdout=nothing, stderr=nothing)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _parse(done: subprocess.CompletedProcess[str]) -> float:
    lines = [line for line in done.stdout.splitlines() if line.strip() and line.strip()[0].isdigit()]
    try:
        return float(lines[-1].split()[_OVERALL_US]) / 1e6
    except (IndexError, ValueError) as exc:
        last = (done.stderr or done.stdout).strip().splitlines()[-1:]
        raise RdmaKvError(f"ucx_perftest failed: {last[0] if last else f'exit status {done.returncode}'}") from exc
