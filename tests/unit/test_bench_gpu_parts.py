"""Parts of `bench gpu` and `bench multigpu` that need neither a GPU nor a second process."""

import numpy as np
import pytest

from rdma_kv.bench import gpu_raw
from rdma_kv.bench.goals import Bound, Missing
from rdma_kv.bench.gpu import PARTS, GpuOptions
from rdma_kv.bench.gpu_links import Link, SideSpec, Way, link_of
from rdma_kv.bench.gpu_memory import KvMemory, Pages, Rows, content, wrong_rows
from rdma_kv.bench.gpu_pipeline import _budget_rows, _slower
from rdma_kv.bench.gpu_rounds import Step, absent, faster, longer, run_rounds, whole_part
from rdma_kv.bench.gpu_steps import CONTIGUOUS, PAGES, ROWS, backends, size_name, usual_raw
from rdma_kv.bench.gpu_team import Team, TeamSpec
from rdma_kv.bench.multigpu import PARTS as MULTI_PARTS
from rdma_kv.bench.multigpu import MultiGpuOptions
from rdma_kv.bench.multigpu_peer import PEER_GOAL, enough, peer_rows
from rdma_kv.bench.rows import Row
from rdma_kv.config import GpuConfig
from rdma_kv.errors import ConfigError, RdmaKvError
from rdma_kv.kernels.reference import gather, scatter
from rdma_kv.types import Role

MIB = 1 << 20
ROWS_OF_512 = Rows(512, layers=4)


def quiet(_text, _done, _total):
    """A meter."""


def step(name, num_bytes, *took_s):
    return Step(name, num_bytes, lambda: 0.0, took_s=list(took_s))


# --- rounds


def test_a_step_that_fails_is_missing_and_the_others_go_on():
    calls = []

    def fails():
        calls.append("bad")
        if len(calls) == 2:
            raise RdmaKvError("no link")
        return 1.0

    bad, good = Step("bad", 10, fails), Step("good", 10, lambda: 2.0)
    run_rounds("test", [bad, good], 3, quiet)
    assert len(calls) == 2, "it is not tried again"
    assert good.took_s == [2.0] * 3
    (row,) = bad.rows
    assert isinstance(row, Missing)
    assert (row.value, row.ok) == ("failed: no link", False)


def test_the_first_round_checks_and_does_not_count():
    checked, took_s = [], iter((9.0, 1.0, 3.0))
    one = Step("one", 6_000_000_000, lambda: next(took_s), lambda: checked.append(True))
    run_rounds("test", [one], 2, quiet)
    assert checked == [True]
    assert one.took_s == [1.0, 3.0]
    assert [(row.name, row.value) for row in one.rows] == [("one", 4.0), ("one, spread", "2..6")]


def test_wrong_bytes_end_a_step():
    def check():
        raise RdmaKvError("3 rows arrived with other bytes")

    one = Step("one", 1, lambda: 1.0, check)
    run_rounds("test", [one], 2, quiet)
    assert one.rows[0].ok is False
    assert "3 rows" in str(one.rows[0].value)


def test_a_fault_of_the_bench_is_no_missing_row():
    with pytest.raises(ZeroDivisionError):
        run_rounds("test", [Step("one", 1, lambda: 1 / 0)], 1, quiet)


def test_a_part_that_breaks_leaves_the_others_their_rows(caplog):
    (row,) = whole_part("kernels", lambda: [Row("x", 1 / 0, "")])
    assert (row.name, row.value, row.ok) == ("kernels", "failed: ZeroDivisionError: division by zero", False)
    assert "part kernels has failed" in caplog.text
    assert [row.name for row in whole_part("kernels", lambda: [Row("x", 1.0, "")])] == ["x"]


def test_a_step_without_bytes_is_a_time():
    median, _ = step("one", 0, 1e-6, 2e-6, 9e-6).rows
    assert (median.value, median.unit) == (2.0, "us")


@pytest.mark.parametrize(("took_s", "ok"), [(0.05, True), (0.0500001, False)])
def test_faster_compares_rates_of_other_sizes(took_s, ok):
    row = faster("ours", step("ours", 1000, took_s), step("peer", 100, 0.1), 20.0)
    assert row.ok is ok
    assert row.name == "ours >= 20"
    assert row.value == pytest.approx(1000 / took_s / 1000)


@pytest.mark.parametrize(("took_s", "ok"), [(1.25, True), (1.26, False)])
def test_longer_compares_with_the_sum(took_s, ok):
    parts = [step("gather", 1, 0.25), step("WRITE", 1, 0.5), step("scatter", 1, 0.25)]
    row = longer("ours", step("ours", 1, took_s), parts, 1.25)
    assert (row.ok, row.value) == (ok, took_s)


def test_a_ratio_whose_peer_is_missing_says_so():
    row = faster("ours", step("ours", 1, 1.0), absent("NIXL", "not installed"), 20.0)
    assert isinstance(row, Bound)
    assert (row.value, row.ok) == ("NIXL: missing: not installed", False)
    assert faster("ours", step("ours", 1, 1.0), absent("NIXL", "gone"), None).ok is None


# --- memory and pages


def moved(tokens, slot_bytes, pool_bytes=8 * MIB):
    """A request through staging by the reference kernels: what is in the decode pool, and what was in the prefill pool."""
    src, dst, staging = KvMemory(pool_bytes, None), KvMemory(pool_bytes, None), KvMemory(pool_bytes, None)
    sent = content(pool_bytes, 3)
    src.write(sent)
    dst.wipe()
    for role, memory, kernel in ((Role.PREFILL, src, gather), (Role.DECODE, dst, scatter)):
        chunks = Pages(ROWS_OF_512, role, pool_bytes).chunks(memory, tokens, staging.address, slot_bytes)
        assert sum(chunk.packed_bytes for chunk in chunks) == tokens * ROWS_OF_512.token_bytes
        assert all(chunk.packed_bytes <= slot_bytes for chunk in chunks)
        kernel(chunks)
    return dst.read().copy(), sent


def test_all_rows_of_a_request_come_over_in_chunks_of_a_slot():
    arrived, sent = moved(1000, 64 << 10)
    assert wrong_rows(ROWS_OF_512, 1000, arrived, sent) == 0
    assert wrong_rows(ROWS_OF_512, 1001, arrived, sent) == 8, "the next token's rows of all planes were not moved"


def test_one_wrong_byte_is_one_wrong_row():
    arrived, sent = moved(100, 1 * MIB)
    arrived[np.flatnonzero(arrived)[5]] ^= 0xFF
    assert wrong_rows(ROWS_OF_512, 100, arrived, sent) == 1


def test_pages_are_scattered_and_each_side_has_its_own_order():
    prefill, decode = (Pages(ROWS_OF_512, role, 8 * MIB).of(1000) for role in (Role.PREFILL, Role.DECODE))
    for order in (prefill, decode):
        assert len(set(order.tolist())) == 1000
        assert (np.abs(np.diff(order)) == 1).mean() < 0.02
    assert (prefill != decode).mean() > 0.9


def test_content_is_the_same_where_the_seed_is():
    assert np.array_equal(content(1001, 1), content(1001, 1))
    assert not np.array_equal(content(1001, 1), content(1001, 2))
    assert content(1001, 1).size == 1001


def test_less_than_a_token_is_refused():
    with pytest.raises(RdmaKvError, match="less than a token"):
        Rows(4096).tokens(4096)


# --- NIXL's descriptors


def test_pieces_have_places_of_their_own():
    src, dst = gpu_raw.places(4096, MIB, 2 * MIB)
    for offsets in (src, dst):
        assert len(set(offsets.tolist())) == 256
        assert 0 <= offsets.min() <= offsets.max() <= 2 * MIB - 4096
    assert not np.array_equal(src, dst)
    assert [offsets.tolist() for offsets in gpu_raw.places(MIB, MIB, 2 * MIB)] == [[0], [0]]


def test_a_piece_in_another_place_is_wrong():
    sent, arrived = content(2 * MIB, 0), np.zeros(2 * MIB, np.uint8)
    src, dst = gpu_raw.places(4096, MIB, 2 * MIB)
    for here, there in zip(src, dst, strict=True):
        arrived[there : there + 4096] = sent[here : here + 4096]
    assert gpu_raw.wrong_pieces(4096, MIB, arrived, sent) == 0
    first, second = dst[0], dst[1]
    arrived[first : first + 4096] = arrived[second : second + 4096]
    assert gpu_raw.wrong_pieces(4096, MIB, arrived, sent) == 1


def test_rows_of_4_kib_move_64_mib_at_most():
    assert usual_raw(1 << 30) == [(CONTIGUOUS, 1 << 30, 1 << 30), (PAGES, 64 << 10, 1 << 30), (ROWS, 4 << 10, 64 * MIB)]
    assert usual_raw(MIB)[2] == (ROWS, 4 << 10, MIB)


# --- links and options


def test_a_link_survives_the_wire():
    link = Link("nixl", Way.PINNED, 512, slot_bytes=MIB)
    assert link_of(link.wire) == link
    assert link.name != Link("nixl", Way.DIRECT, 512, slot_bytes=MIB).name


def test_the_way_of_a_link_is_the_agents_gpu(tmp_path):
    def config(way, ordinal):
        spec = SideSpec(Role.DECODE, 1, 2, ordinal, 4, MIB, MIB, tmp_path, (None, None))
        return spec.agent_config(Link("ucx", way, 512))

    assert config(Way.DIRECT, 1).gpu == GpuConfig(1)
    assert config(Way.PINNED, 0).gpu == GpuConfig(0, direct=())
    assert config(Way.HOST, 0).gpu is None
    assert config(Way.DIRECT, None).gpu is None, "on a machine without a GPU"
    assert (config(Way.HOST, 0).topology.tp, config(Way.HOST, 0).topology.dp) == (2, 2)


def test_all_traffic_of_two_gpus_crosses(tmp_path):
    four = Team(TeamSpec((0, 1), (0, 1), MIB), [None] * 2, [None] * 2, tmp_path, [])
    assert [four.target(rank) for rank in range(2)] == [1, 0]
    pair = Team(TeamSpec((0,), (1,), MIB), [None], [None], tmp_path, [])
    assert pair.target(0) == 0


@pytest.mark.parametrize("options", [GpuOptions, MultiGpuOptions])
def test_wrong_options_are_named(options):
    for field, arguments in (("--repetitions", {"repetitions": 0}), ("--part", {"parts": ("pipe",)})):
        with pytest.raises(ConfigError) as caught:
            options(**arguments)
        assert caught.value.field == field
    assert options(repetitions=9, quick=True).rounds == 5


def test_no_part_is_all_parts():
    assert GpuOptions().chosen == PARTS == ("kernels", "pipeline", "processes", "latency", "host")
    assert GpuOptions(parts=("host",)).chosen == ("host",)
    assert MultiGpuOptions().chosen == MULTI_PARTS


def test_a_transport_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setattr("rdma_kv.bench.gpu_steps.usable", lambda name, environ: name == "ucx")
    assert backends() == {"ucx": "", "nixl": "nixl is not installed"}


@pytest.mark.parametrize(
    ("size", "name"), [(1 << 30, "1 GiB"), (64 * MIB, "64 MiB"), (3 << 10, "3 KiB"), (1000, "1,000 B")]
)
def test_sizes_are_said_as_people_do(size, name):
    assert size_name(size) == name


# --- rows of goals


def curve(*gb_s):
    return {
        4 << place: step(f"{4 << place} programs", 1 << 30, (1 << 30) / rate / 1e9) for place, rate in enumerate(gb_s)
    }


def test_the_fewest_programs_that_meet_the_goal_suffice():
    copy = step("copy", 1 << 30, (1 << 30) / 400e9)
    assert enough(copy, curve(150.0, 380.0, 399.0)) == 8
    assert enough(copy, curve(150.0, 300.0, 299.0)) == 8, "none does: the fastest"


@pytest.mark.parametrize(("gb_s", "ok"), [(400 * PEER_GOAL + 0.1, True), (400 * PEER_GOAL - 0.1, False)])
def test_the_peer_kernel_has_a_goal_at_the_largest_size(gb_s, ok):
    copies = {size: step("copy", 1 << 30, (1 << 30) / 400e9) for size in (1 << 30, MIB)}
    rows = peer_rows(copies, {(512, 1 << 30): curve(gb_s), (512, MIB): curve(1.0)})
    assert [row.ok for row in rows] == [ok, None, None, None]
    assert [row.value for row in rows[1::2]] == [4, 4]


@pytest.mark.parametrize(("beside_s", "ok"), [(1.09, True), (1.11, False)])
def test_a_step_may_get_slower_by_a_tenth(beside_s, ok):
    row = _slower(step("beside", 0, beside_s), step("alone", 0, 1.0))
    assert row.ok is ok
    assert row.value == pytest.approx(100 * (beside_s - 1))


def test_a_step_whose_gathers_ended_is_not_ok():
    assert _slower(absent("beside", "the gathers ended"), step("alone", 0, 1.0)).ok is False


def test_the_budget_of_every_lane_is_shown():
    rows = {row.name: row.value for row in _budget_rows()}
    assert [name for name in rows if "cuda_ipc" in name]
    assert all(isinstance(programs, int) and programs >= 1 for programs in rows.values())
