"""`make multinode`: four nodes on this machine, in containers or in namespaces, and the tests that need them.

    python -m tests.multinode [--short] [--lane docker|netns] [--json] [-k EXPRESSION]

The first line on standard output says the lane. With `--json` one line of JSON ends the output: what ran, figures, verdict.
Exit status: 0 all passed, 1 something failed, 2 usage, 3 the lab could not be set up, 130 interrupted.

It ends what it started, also after Ctrl-C, SIGTERM or a failure, and touches no process, container, network or firewall
rule that it did not make. What stays: the cache of a private Docker (~/.cache/rdma-kv; `--clean` removes it), Debian's
packages that were installed for it, and in a Docker that ran already the images under the tag `lab`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import docker_engine  # noqa: E402
import images  # noqa: E402
import lab_state  # noqa: E402
import netns_lane  # noqa: E402
import pytest  # noqa: E402
from commands import LabError, say  # noqa: E402
from docker_lane import DockerLane  # noqa: E402
from lane import Lane  # noqa: E402

CANNOT = 3
INTERRUPTED = 130


class Outcomes:
    """Pytest plug-in: counts tests, and says at once what has failed."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failed: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or (report.outcome != "passed" and report.when in {"setup", "teardown"}):
            outcome = report.outcome if report.when == "call" or report.skipped else "error"
            self.counts[outcome] += 1
            if report.failed:
                self.failed.append(f"{report.nodeid} ({report.when})")
                say(f"FAILED {self.failed[-1]}\n{report.longreprtext[-3000:]}")


def main() -> int:
    options = _parse()
    if options.clean:
        shutil.rmtree(_cache(), ignore_errors=True)
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs have it ignored
    begin, outcomes = time.monotonic(), Outcomes()
    answer: dict[str, Any] = {"ok": False, "lane": "none"}
    status = CANNOT
    try:
        with _lane(options) as lane:
            answer["lane"] = lane.name
            lane.figures["up_s"] = round(time.monotonic() - begin, 1)
            lab_state.LANE = lane
            status = int(pytest.main(_pytest_arguments(options), plugins=[outcomes]))
            answer["figures"] = lane.figures
            if status == pytest.ExitCode.INTERRUPTED:
                status = INTERRUPTED
            say("taking the nodes down")
    except LabError as exc:
        answer["problem"] = str(exc)
        say(str(exc))
    except KeyboardInterrupt:
        say("interrupted; everything that was started has ended")
        status = INTERRUPTED
    answer |= {"seconds": round(time.monotonic() - begin, 1), "failures": outcomes.failed, **outcomes.counts}
    answer["ok"] = status == 0
    if options.json:
        print(json.dumps(answer), flush=True)
    else:
        _verdict(answer)
    return status


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.multinode", description="the multi-node tests")
    parser.add_argument("--short", action="store_true", help="the short form, as in CI: a few minutes")
    parser.add_argument("--lane", choices=("docker", "netns"), help="by default docker, and netns where it cannot run")
    parser.add_argument("--json", action="store_true", help="one line of JSON at the end")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="tests by name, as pytest takes it")
    parser.add_argument("--clean", action="store_true", help="remove the cache of the private Docker, and end")
    return parser.parse_args()


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rdma-kv" / "multinode"


def _interrupt(_signal: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _pytest_arguments(options: argparse.Namespace) -> list[str]:
    marks = "multinode and short" if options.short else "multinode"
    arguments = [str(HERE), "-m", marks, "-p", "no:cacheprovider", "--durations=5", "-v"]
    return [*arguments, "-k", options.k] if options.k else arguments


@contextlib.contextmanager
def _lane(options: argparse.Namespace) -> Iterator[Lane]:
    """Four nodes that are up. Raises LabError."""
    with contextlib.ExitStack() as stack:
        docker_engine.clear_stale()
        name = f"{docker_engine.NAME}{os.getpid()}-"
        state = Path(tempfile.mkdtemp(prefix=name, dir="/tmp"))  # a short path: sockets lie in it
        stack.callback(shutil.rmtree, state, ignore_errors=True)
        stack.enter_context(docker_engine.hold(state))
        state.chmod(0o755)  # the user of the images reads the configs
        docker = None if options.lane == "netns" else _docker(stack, needed=options.lane == "docker")
        print(f"lane: {'docker' if docker else 'netns'}", flush=True)
        if docker is not None:
            seconds = images.build(docker)
            lane: Lane = DockerLane(docker, state, f"rdmakvlab{os.getpid()}")
            lane.figures |= {"image_mb": images.size_mb(docker, images.RUNTIME), "build_s": seconds}
            lane.figures["private_docker"] = docker.private
        else:
            if why := netns_lane.cannot_run():
                raise LabError(why)
            lane = netns_lane.NetnsLane(state)
        stack.callback(lane.down)
        lane.up("ucx")
        yield lane


def _docker(stack: contextlib.ExitStack, *, needed: bool) -> docker_engine.Docker | None:
    """A Docker that runs, or a private one; None, with the reason said, where neither can be."""
    try:
        if (docker := docker_engine.running_docker()) is not None:
            if os.geteuid() != 0:
                raise LabError("faults are made by signals and nsenter on the host, which needs root; use sudo")
            return docker
        if why := docker_engine.cannot_start_private():
            raise LabError(why)
        return stack.enter_context(docker_engine.private_docker(_cache()))
    except LabError as exc:
        if needed:
            raise
        say(f"no Docker: {exc}")
        return None


def _verdict(answer: dict[str, Any]) -> None:
    for name, value in answer.get("figures", {}).items():
        print(f"{name}: {value}")
    for failed in answer["failures"]:
        print(f"FAILED {failed}")
    counts = ", ".join(
        f"{answer[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped") if answer.get(outcome)
    )
    print(
        f"{'OK' if answer['ok'] else 'NOT OK'}: lane {answer['lane']}, {counts or 'nothing ran'}, {answer['seconds']} s"
    )


if __name__ == "__main__":
    sys.exit(main())
