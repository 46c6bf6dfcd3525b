"""Many transfers on loopback while every seventh control frame is dropped or doubled: all end by their deadline."""

from __future__ import annotations

import asyncio
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matrix import TURNED, Cell, Fault, Lane, Point, Victim
from rig import SENTINEL
from seams import installed
from trials import Trial, _small_turns
from turned import Hang, TurnedLoop, on_host, run_turned

from rdma_kv.errors import RdmaKvError
from rdma_kv.types import ReplicaId

_AT_ONCE = 10
_PAGES, _TOKENS = 3, 40
_EVERY = 7


@dataclass
class WeatherVerdict:
    """Counts of one run."""

    seed: int
    transfers: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


class _Weather(Trial):
    """One source, one target, many requests."""

    async def run_many(self, folder: Path, count: int) -> WeatherVerdict:
        verdict = self.weather = WeatherVerdict(self.seed)
        with installed(self.seam):
            async with self.cluster(folder):
                await self._one(0, list(range(_PAGES)))
                for host in self.hosts.values():
                    host.seam.every = _EVERY
                places = [list(range(_PAGES * place, _PAGES * (place + 1))) for place in range(_AT_ONCE)]
                numbers = iter(range(1, count + 1))
                await asyncio.gather(*(self._several(numbers, pages) for pages in places))
                for host in self.hosts.values():
                    host.seam.every = 0
                await self._afterwards()
                await self._left()
                await self._close()
        verdict.problems += self.verdict.problems
        return verdict

    async def _several(self, numbers: Any, pages: list[int]) -> None:
        for number in numbers:
            await self._one(number, pages)

    async def _one(self, number: int, pages: list[int]) -> None:
        """One request; both calls end by the deadline, and a receive that succeeds is right."""
        (source,), (target,) = self.c.prefill.memory_of(0), self.c.decode.memory_of(0)
        source.fill(number, pages, _TOKENS)
        begin = self.loop.now_s
        calls = [
            on_host(self.hosts["decode/0"].context, lambda: self._take(number, pages)),
            on_host(self.hosts["prefill/0"].context, lambda: self._give(number, pages)),
        ]
        await asyncio.wait(calls)
        took_s = self.loop.now_s - begin
        self.weather.transfers += 1
        for call in calls:
            error = call.exception()
            self.weather.outcomes["success" if error is None else type(error).__name__] += 1
            if error is not None and not isinstance(error, RdmaKvError):
                self.weather.problems.append(f"request {number}: not a typed end: {error!r}")
        if took_s > self.times.transfer + 1.0:
            self.weather.problems.append(f"request {number} took {took_s:.1f} s")
        if calls[0].exception() is None:
            try:
                target.check(number, pages, 0, _TOKENS)
            except AssertionError as exc:
                self.weather.problems.append(f"request {number}: wrong bytes: {exc!s:.200}")
        target.array[:, :, pages] = SENTINEL

    async def _give(self, number: int, pages: list[int]) -> None:
        agent, to = self.c.prefill.agents[0], ReplicaId("decode", 0)
        async with agent.send(f"w{number}", 0, pages, to=to, tokens=_TOKENS, timeout_s=self.times.transfer) as out:
            await out.push((0, 16))
            await out.push((16, _TOKENS))

    async def _take(self, number: int, pages: list[int]) -> None:
        agent, source = self.c.decode.agents[0], ReplicaId("prefill", 0)
        await agent.receive(f"w{number}", 0, pages, source=source, tokens=_TOKENS, timeout_s=self.times.transfer)


def run_weather(count: int, seed: int = 0) -> WeatherVerdict:
    """`count` transfers on a loop whose time is turned."""
    cell = Cell(Fault.DROP, Victim.PREFILL, Point.BEFORE_OFFER, Lane.LOOPBACK, 1)
    made: list[_Weather] = []

    async def work(loop: TurnedLoop) -> WeatherVerdict:
        made.append(_Weather(cell, seed, loop, times=TURNED))
        return await made[0].run_many(Path(folder), count)

    with tempfile.TemporaryDirectory(prefix="rdma-kv-faults-") as folder, _small_turns():
        try:
            return run_turned(work, limit_s=300.0)
        except Hang as exc:
            made[0].weather.problems.append(f"seed {seed}: hangs: {exc}")
            return made[0].weather
