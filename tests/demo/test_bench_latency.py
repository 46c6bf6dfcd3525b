"""`rdma-kv bench latency`: well-formed rows, spans that add up, and that it notices what would make its figures untrue."""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import subprocess
import sys

import numpy as np
import pytest

import rdma_kv.greeting
import rdma_kv.packer
from rdma_kv.bench import latency_posting
from rdma_kv.bench.goals import SPREAD, Missing
from rdma_kv.bench.latency import LatencyOptions, Measured, _post_row, measure_latency
from rdma_kv.bench.latency_posting import Poster
from rdma_kv.bench.latency_sides import GEOMETRY, REQUEST_BYTES, REQUEST_PAGES, REQUESTS, LatencySide
from rdma_kv.bench.latency_sockets import How, SocketEnd, tcp_pair
from rdma_kv.bench.latency_trace import PATH, Mark, Trace, in_order
from rdma_kv.bench.paths import Pool
from rdma_kv.bench.rows import all_ok
from rdma_kv.errors import ConfigError, RdmaKvError
from rdma_kv.memory import HostMemory
from rdma_kv.mover import Mover
from rdma_kv.transport.loopback import LoopbackNetwork, LoopbackTransport
from rdma_kv.types import Role

pytestmark = pytest.mark.long

FIELDS = {"name", "value", "unit", "goal", "ok"}
AHEAD = "64 KiB: transfers with the slot given ahead >= 1"
ONCE = LatencyOptions("loopback", 1)


def quiet(*told: object) -> None:
    """A meter that draws nothing."""


def named(rows) -> dict:
    return {row.name: row for row in rows}


# --- rows --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["nixl", "loopback"])
def test_rows_and_status(backend: str):
    command = [sys.executable, "-m", "rdma_kv.cli.main", "bench", "latency", "--transport", backend]
    done = subprocess.run([*command, "--repetitions", "1", "--json"], capture_output=True, text=True, timeout=100)
    assert done.stdout, done.stderr
    (line,) = done.stdout.splitlines()
    answer = json.loads(line)
    rows = {row["name"]: row for row in answer["rows"]}
    assert len(rows) == len(answer["rows"])
    assert all(row.keys() == FIELDS for row in answer["rows"])
    assert [row["name"] for row in answer["rows"] if row["goal"] is not None] == [AHEAD]
    assert rows[AHEAD]["value"] == 1
    assert answer["ok"] is True
    assert done.returncode == 0
    whole_us = rows["64 KiB: transfer"]["value"]
    for how in How:
        assert rows[f"64 KiB: transfer to {how}"]["value"] == pytest.approx(whole_us / rows[f"64 KiB: {how}"]["value"])
    spans_us = [row["value"] for name, row in rows.items() if name.startswith("span ") and not name.endswith(SPREAD)]
    assert len(spans_us) == len(PATH) - 1
    assert min(spans_us) >= 0
    assert rows["spans, sum of their medians"]["value"] == pytest.approx(sum(spans_us))
    assert rows["spans, median of their sums"]["value"] == pytest.approx(whole_us, abs=50)
    posts = [row["value"] for name, row in rows.items() if name.startswith("1,000 x 8 B") and not name.endswith(SPREAD)]
    assert len(posts) == 4
    assert min(posts) > 0
    assert rows["lane"]["value"] in {"nixl": {"cma", "tcp", "rdma"}, "loopback": {"loopback"}}[backend]


def test_only_ucx_has_a_goal_for_small_writes():
    measured = Measured(posts_us=[((19.0, 50.0), (9.0, 9.0)), ((25.0, 50.0), (9.0, 9.0)), ((18.0, 50.0), (9.0, 9.0))])
    row = _post_row(LatencyOptions("ucx"), measured)
    assert (row.value, row.goal, row.ok) == (19.0, 20.0, True)
    measured.posts_us[0] = ((20.0, 50.0), (9.0, 9.0))
    assert _post_row(LatencyOptions("ucx"), measured).ok is False
    assert _post_row(LatencyOptions("nixl"), measured).ok is None


def test_without_slots_given_ahead_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch):
    """The control: transfers work all the same, with a round trip more, but are not what the rows name."""
    monkeypatch.setattr(Mover, "give_grants_ahead", lambda self, entry: [])
    rows = named(measure_latency(ONCE, quiet))
    assert rows[AHEAD].value == 0
    assert rows[AHEAD].ok is False
    for name in ("64 KiB: transfer", *(f"64 KiB: transfer to {how}" for how in How)):
        assert isinstance(rows[name], Missing)
        assert f"for 0 of {REQUESTS} transfers" in rows[name].value
    assert not all_ok(list(rows.values()))
    assert not multiprocessing.active_children()


def test_other_bytes_than_were_sent_are_an_error(monkeypatch: pytest.MonkeyPatch):
    right = Pool.wrong_pages

    def spoilt(self: Pool, sent: Pool) -> int:
        self.memory.view[0] ^= 1
        return right(self, sent)

    monkeypatch.setattr(Pool, "wrong_pages", spoilt)
    with pytest.raises(RdmaKvError, match="1 pages arrived with other bytes"):
        measure_latency(ONCE, quiet)
    assert not multiprocessing.active_children()


def test_a_transport_that_is_missing_is_a_row(monkeypatch: pytest.MonkeyPatch):
    async def absent(self: LatencySide) -> dict[str, int]:
        raise RdmaKvError("not in this installation")

    monkeypatch.setattr(LatencySide, "start", absent)
    (row,) = measure_latency(LatencyOptions("ucx", 1), quiet)
    assert (row.name, row.ok) == ("ucx", False)
    assert "not in this installation" in str(row.value)
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(("options", "field"), [(("pigeon", 1), "--transport"), (("ucx", 0), "--repetitions")])
def test_bad_options_are_named(options: tuple[str, int], field: str):
    with pytest.raises(ConfigError, match=field):
        LatencyOptions(*options)


# --- marks -------------------------------------------------------------------------------------------------------------


def test_spans_add_up_to_the_whole():
    marks = {mark.value: at_s for mark, at_s in zip(PATH, itertools.accumulate(range(len(PATH))), strict=True)}
    assert in_order(marks) == list(range(1, len(PATH)))
    assert sum(in_order(marks)) == marks[Mark.RETURNED] - marks[Mark.CALLED]


def test_a_mark_that_is_missing_or_before_its_cause_is_an_error():
    marks = {mark.value: float(number) for number, mark in enumerate(PATH)}
    with pytest.raises(RdmaKvError, match="no mark notified"):
        in_order({name: at_s for name, at_s in marks.items() if name != Mark.NOTIFIED})
    with pytest.raises(RdmaKvError, match=r"'gather ends' of a transfer lies .* before its cause"):
        in_order(marks | {Mark.GATHER_ENDS.value: 0.5})


def test_a_mark_that_comes_twice_is_an_error():
    trace = Trace()
    trace.note(Mark.NOTIFIED)
    assert trace.take().keys() == {"notified"}
    trace.note(Mark.NOTIFIED)
    with pytest.raises(RdmaKvError, match="twice"):
        trace.take()
    trace.clear()
    assert trace.take() == {}


def test_what_is_replaced_is_put_back():
    before = rdma_kv.packer.gather, rdma_kv.packer.scatter, rdma_kv.greeting.Connection
    trace = Trace()
    with trace.installed():
        assert rdma_kv.packer.gather is not before[0]
        rdma_kv.packer.gather([])
        assert list(trace.take()) == ["gather begins", "gather ends"]
    assert (rdma_kv.packer.gather, rdma_kv.packer.scatter, rdma_kv.greeting.Connection) == before


# --- sockets -----------------------------------------------------------------------------------------------------------


class Sockets:
    """Both ends of one kind of socket, in this process."""

    def __init__(self, how: How) -> None:
        ours, theirs = tcp_pair()
        source, landing = HostMemory(REQUESTS * REQUEST_BYTES), HostMemory(REQUESTS * REQUEST_BYTES)
        source.view[:] = np.frombuffer(np.random.default_rng(1).bytes(source.length_bytes), dtype=np.uint8)
        self.sent, self.came = Pool(Role.PREFILL, source, GEOMETRY), Pool(Role.DECODE, landing, GEOMETRY)
        self.initiator = SocketEnd(how, self.sent, ours, REQUEST_BYTES)
        self.target = SocketEnd(how, self.came, theirs, REQUEST_BYTES)

    async def move(self, number: int, wanted: int) -> float:
        ours, theirs = self.sent.requests(REQUESTS)[number], self.came.requests(REQUESTS)[wanted]
        work = self.initiator.request(number, ours), self.target.serve(wanted, theirs)
        try:
            async with asyncio.timeout(20):
                took_s, _ = await asyncio.gather(*work)
        finally:
            self.target.close()
            self.initiator.close()
        return took_s


@pytest.mark.parametrize("how", list(How), ids=str)
async def test_a_hand_written_request_moves_its_pages_and_no_others(how: How):
    both = Sockets(how)
    assert await both.move(3, 3) > 0
    assert both.came.wrong_pages(both.sent) == REQUEST_PAGES * (REQUESTS - 1)


async def test_a_hand_written_request_for_other_pages_is_an_error():
    with pytest.raises(RdmaKvError, match="another request"):
        await Sockets(How.LOOP).move(3, 4)


# --- small writes ------------------------------------------------------------------------------------------------------


async def posters() -> tuple[Poster, Poster]:
    network = LoopbackNetwork()
    prefill, decode = (
        Poster(role, LoopbackTransport(network, f"poster-{role.value}@1")) for role in (Role.PREFILL, Role.DECODE)
    )
    ours, theirs = await prefill.open(), await decode.open()
    await prefill.connect(*theirs)
    await decode.connect(*ours)
    return prefill, decode


async def test_small_writes_are_counted_and_compared_every_round():
    prefill, decode = await posters()
    for number in range(2):
        posted, taken = await asyncio.gather(prefill.post(number), decode.take(number))
        assert min(posted) > 0
        assert min(taken) > 0
    await prefill.close()
    await decode.close()


@pytest.mark.parametrize("fault", ["twice", "spoilt", "late"])
async def test_small_writes_that_go_wrong_are_an_error(fault: str):
    """The controls of the check above."""
    prefill, decode = await posters()
    posting = asyncio.create_task(prefill.post(0))
    taking = asyncio.create_task(decode.take(0))
    await asyncio.sleep(0)  # both have begun, and nothing has been copied
    if fault == "twice":
        decode._notified(latency_posting._BODY.pack(0, 0))
    elif fault == "spoilt":
        prefill._memory.view[-1] ^= 1
    if fault == "late":
        await asyncio.gather(posting, taking)
        decode._notified(latency_posting._BODY.pack(0, 0))
        taking = asyncio.create_task(decode.take(1))
    text = {"twice": "not each notification", "spoilt": "other bytes", "late": "came twice"}[fault]
    with pytest.raises(RdmaKvError, match=text):
        await taking
    await posting
    await prefill.close()
    await decode.close()
