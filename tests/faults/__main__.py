"""All of the proofs: `python -m tests.faults`, or `make faults`. Progress on standard error, counts and a verdict at the end.

Parts can be asked for by name; each prints what it ran, what it could not run and why, and what went wrong with the seed.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
for _folder in (_HERE, _HERE.parent / "agent"):
    sys.path.insert(0, str(_folder))

from fuzzing import fuzz  # noqa: E402
from lanes import run_lane_cell, run_restarts  # noqa: E402
from matrix import ALL, Cell, Lane, Victim, chosen_cells, not_applicable, pairwise, pending  # noqa: E402
from poison import run_poison  # noqa: E402
from reuse import broken_hold, run_reuse  # noqa: E402
from trials import Verdict, run_cell  # noqa: E402
from weather import run_weather  # noqa: E402

from rdma_kv.soak.run import SoakOptions, run_soak  # noqa: E402
from rdma_kv.transport.ucx_environment import prepare_ucx_environment  # noqa: E402

REAL_LANES = [lane for lane in Lane if lane is not Lane.LOOPBACK]
CONTROLS = (  # where a broken hold shows on real lanes; on the others it may take many tries
    (Victim.PREFILL, Lane.NIXL_CMA),
    (Victim.DECODE, Lane.NIXL_TCP),
    (Victim.DECODE, Lane.UCX_TCP),
)
_TRIES = 4  # of a control: where the peer is stopped is chance


class Run:
    """Counts and complaints of everything that ran."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.failures: list[str] = []
        self.counts: Counter[str] = Counter()
        self.poisoned_bytes = 0
        self.report = open(options.report, "w") if options.report else None  # noqa: SIM115 - for the whole run

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def fail(self, text: str) -> None:
        self.failures.append(text)
        self.say(f"FAILED {text}")

    def note(self, part: str, **facts: Any) -> None:
        if self.report is not None:
            self.report.write(json.dumps({"part": part, **facts}, default=str) + "\n")
            self.report.flush()

    # --- parts ---------------------------------------------------------------------------------------------------------

    def lanes(self) -> None:
        """Cells on real lanes that cover all pairs."""
        fits = [cell for cell in ALL if cell.lane in REAL_LANES and not not_applicable(cell)]
        self._cells("real lanes", pairwise(fits, self.options.seed), run_lane_cell)

    def loopback(self) -> None:
        """Every cell on loopback."""
        self._cells("loopback", chosen_cells([Lane.LOOPBACK]), run_cell)

    def _cells(self, part: str, cells: list[Cell], run: Callable[[Cell, int], Verdict]) -> None:
        began = time.monotonic()
        for number, cell in enumerate(cells):
            if number % 10 == 0:
                self.say(f"{part}: {number} of {len(cells)} cells, {time.monotonic() - began:.0f} s")
            verdict = run(cell, self.options.seed)
            self._cell(part, cell, verdict)

    def _cell(self, part: str, cell: Cell, verdict: Verdict) -> None:
        self.poisoned_bytes += verdict.poisoned_bytes
        self.note(
            part,
            cell=str(cell),
            ended=[(end.host, repr(end.error), round(end.after_s, 3), end.expected_s) for end in verdict.ended],
            poisoned_bytes=verdict.poisoned_bytes,
            held=verdict.held,
            leaked=verdict.leaked,
            problems=verdict.problems,
            skipped=verdict.skipped,
        )
        if verdict.skipped:
            self.counts["cells not applicable here"] += 1
            self.say(f"not applicable: {cell}: {verdict.skipped}")
        elif verdict.ok:
            self.counts["cells passed"] += 1
        elif reason := pending(cell):
            self.counts["cells pending"] += 1
            self.say(f"pending ({reason}): {cell}: {verdict.problems[0]:.300}")
        else:
            self.counts["cells failed"] += 1
            self.fail(f"{cell} (seed {verdict.seed}): {'; '.join(verdict.problems):.600}")

    def poison(self) -> None:
        """256 MiB to and from a stopped peer, on every lane; and with a broken hold."""
        for lane in REAL_LANES:
            for victim in Victim:
                verdict = run_poison(victim, lane, mib=self.options.mib)
                self.note("poison", verdict=vars(verdict))
                self.say(f"poison: {victim} stopped, {lane}: {verdict.poisoned_bytes} bytes, {verdict.seconds:.0f} s")
                self.counts["poison runs"] += not verdict.skipped
                self.poisoned_bytes += verdict.poisoned_bytes
                if verdict.poisoned_bytes or verdict.problems:
                    self.fail(f"poison, {victim} stopped, {lane}: {verdict.poisoned_bytes} bytes, {verdict.problems}")
        for victim, lane in CONTROLS:
            found = 0
            for _ in range(_TRIES):
                verdict = run_poison(victim, lane, mib=self.options.mib, broken=True)
                found = verdict.poisoned_bytes
                if found or verdict.skipped:
                    break
            self.note("control", verdict=vars(verdict))
            self.say(f"control, broken hold: {victim} stopped, {lane}: {found} bytes poisoned")
            if not found and not verdict.skipped:
                self.fail(f"the control with a broken hold is blind: {victim} stopped, {lane}")

    def reuse(self) -> None:
        """The same on loopback, with the oracle; and its control."""
        for victim in Victim:
            verdict = run_reuse(victim, self.options.seed)
            self.poisoned_bytes += verdict.poisoned_bytes
            if verdict.poisoned_bytes or verdict.problems:
                self.fail(f"reuse on loopback, {victim}: {verdict.poisoned_bytes} bytes, {verdict.problems}")
            with broken_hold():
                found = run_reuse(victim, self.options.seed).poisoned_bytes
            self.say(f"control, broken hold on loopback, {victim} stopped: {found} bytes poisoned")
            if not found:
                self.fail(f"the control with a broken hold is blind on loopback: {victim}")

    def weather(self) -> None:
        """Every seventh frame dropped or doubled."""
        verdict = run_weather(self.options.transfers, self.options.seed)
        self.note("weather", verdict=vars(verdict))
        self.say(f"weather: {verdict.transfers} transfers, {dict(verdict.outcomes)}")
        self.counts["transfers in bad weather"] = verdict.transfers
        for problem in verdict.problems:
            self.fail(f"weather, seed {verdict.seed}: {problem}")

    def restarts(self) -> None:
        """kill -9 of the decode agent, again and again."""
        for lane in (Lane.UCX_TCP, Lane.NIXL_CMA):
            verdict = run_restarts(lane, self.options.restarts, self.options.seed)
            self.say(f"restarts: {self.options.restarts} on {lane}")
            self.counts["restarts"] += self.options.restarts
            self.poisoned_bytes += verdict.poisoned_bytes
            for problem in verdict.problems:
                self.fail(f"restarts on {lane}, seed {verdict.seed}: {problem}")

    def fuzz(self) -> None:
        """Frames that no honest peer sends."""
        with tempfile.TemporaryDirectory(prefix="rdma-kv-faults-") as folder:
            report = fuzz(Path(folder), self.options.seed, self.options.frames, self.say)
        self.note("fuzz", verdict=report.as_json())
        self.say(f"fuzz: {report.as_json()}")
        self.counts["fuzzed frames"] = sum(report.frames.values())
        for problem in report.problems:
            self.fail(f"fuzz: {problem}")

    def soak(self) -> None:
        """A minute of everything at once, on each transport."""
        for transport in ("ucx", "nixl"):
            verdict = run_soak(SoakOptions(self.options.minutes, self.options.seed, transport), self.say)
            self.note("soak", verdict=verdict.as_json())
            self.say(f"soak: {verdict.as_json()}")
            self.counts["soak transfers"] += verdict.transfers
            self.poisoned_bytes += verdict.poisoned_bytes
            if not verdict.ok:
                self.fail(f"soak over {transport}, seed {verdict.seed}: {verdict.problems}, leaked {verdict.leaked}")


PARTS = ("lanes", "poison", "restarts", "soak", "loopback", "reuse", "weather", "fuzz")  # those that fork come first


def main() -> int:
    """Run what was asked for; 0 only if nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all without")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mib", type=int, default=256, help="of the poison runs")
    parser.add_argument("--frames", type=int, default=200_000, help="of the fuzz")
    parser.add_argument("--transfers", type=int, default=1000, help="in bad weather")
    parser.add_argument("--restarts", type=int, default=200, help="on each of two lanes")
    parser.add_argument("--minutes", type=float, default=1.0, help="of soak, on each transport")
    parser.add_argument("--report", help="a file for one line of JSON per cell and run")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    prepare_ucx_environment(os.environ)
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    logging.getLogger("rdma_kv").setLevel(logging.ERROR)  # peers that vanish are what is asked for
    run = Run(options)
    began = time.monotonic()
    for part in PARTS:
        if part in options.parts or not options.parts:
            getattr(run, part)()
    reasons = Counter(reason for cell in ALL if (reason := not_applicable(cell)))
    print(f"{len(ALL)} cells, of which {len(ALL) - reasons.total()} can be; not applicable:")
    for reason, count in reasons.most_common():
        print(f"  {count:4} {reason}")
    for name, count in run.counts.items():
        print(f"{count:7} {name}")
    print(f"{run.poisoned_bytes:7} poisoned bytes")
    for failure in run.failures:
        print(f"FAILED {failure}")
    word, took_s = "FAILED" if run.failures else "ok", time.monotonic() - began
    print(f"{word}: {len(run.failures)} failures, {took_s:.0f} s, seed {options.seed}")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
