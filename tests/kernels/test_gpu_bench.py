"""`bench gpu` without a GPU: what it draws, what its rows say of given samples, and how it says that there is no device."""

from __future__ import annotations

import json

import numpy as np
import pytest
from implementations import DEVICE, MISSING

from rdma_kv.bench import gpu_kernels as rows
from rdma_kv.bench.goals import Missing
from rdma_kv.bench.gpu import GpuOptions, measure_gpu
from rdma_kv.bench.rows import all_ok
from rdma_kv.cli.main import main
from rdma_kv.errors import ConfigError
from rdma_kv.kernels import reference

if MISSING:
    pytest.skip(f"not installed: {' and '.join(MISSING)}", allow_module_level=True)
import torch

with pytest.MonkeyPatch.context() as patch:  # as `implementations` does, and why
    if DEVICE == "cpu":
        patch.setenv("TRITON_INTERPRET", "1")
    from rdma_kv.kernels.bench import gpu

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


def measured(ratio: float = 1.0, few: float = 20.0) -> gpu.Measured:
    """As if every case ran at `ratio` of the copy, and ours at `few` times the per-layer kernel."""
    made = gpu.Measured("a device", 8, copy=[90.0, 100.0, 101.0], baseline=[1.0], ours_few=[few], summed=[50.0])
    made.fused, made.unsummed = {12: [45.0]}, {12: [60.0]}
    for way in ("gather", "scatter"):
        made.cases |= {(case, way): [100.0 * ratio] * 3 for case in gpu.CASES}
        made.curve |= {(way, programs): [10.0 * programs] for programs in gpu.curve_programs(8, quick=True)}
    return made


# --- rows


def test_goals_are_those_of_the_project() -> None:
    goals = {(case.name, rows._goal(case)) for case in gpu.CASES}
    assert {("rows of 1 KiB", 0.95), ("MLA, page 1, 1152 B", 0.95), ("NHD, page 16, 8 heads of 256 B", 0.95)} <= goals
    assert {("rows of 512 B", 0.85), ("NHD, page 16, 1 head of 8, 512 B", 0.85)} <= goals
    assert {("HND, page 16, 1 head of 8, 256 B", 0.8), ("HND, page 1, 1 head of 8, 256 B", 0.8)} <= goals
    assert {("rows of 64 B", None), ("MLA, page 1, 578 B", None)} <= goals


def test_rows_meet_their_goals() -> None:
    assert all_ok(rows._goals(measured()))


@pytest.mark.parametrize(
    ("ratio", "few", "wrong"), [(0.94, 20.0, "1 KiB"), (0.84, 20.0, "512 B"), (1.0, 14.9, "20 programs")]
)
def test_a_missed_goal_is_not_ok(ratio: float, few: float, wrong: str) -> None:
    missed = [row.name for row in rows._goals(measured(ratio, few)) if not row.ok]
    assert any(wrong in name for name in missed)
    assert not any("HND" in name for name in missed)


def test_the_fused_checksum_stands_beside_the_gather_without() -> None:
    shown = {row.name: row.value for row in rows.kernel_rows(measured())}
    assert shown["gather with checksum in one launch, rows of 1 KiB, 12 programs: to without"] == 0.75
    assert shown["the same without checksum, 12 programs"] == 60.0


def test_row_names_are_unique() -> None:
    made = [row.name for row in rows.kernel_rows(measured())]
    assert len(set(made)) == len(made)


def test_an_allocation_in_steady_state_is_not_ok() -> None:
    made = measured()
    made.allocations = 1
    assert [row.name for row in rows._goals(made) if not row.ok] == ["allocations from the driver in steady state <= 0"]


def test_the_curve_is_the_slower_direction_in_payload() -> None:
    made = measured()
    made.curve["scatter", 4] = [30.0]
    assert gpu.worst_payload(made)[4] == 15.0
    assert gpu.worst_payload(made)[8] == 40.0


def test_panels_hold_row_sizes_and_programs() -> None:
    over_size, over_programs = rows._panels(measured()).values()
    assert [size for size, _ in over_size["gather"]] == [64, 128, 256, 512, 1024, 4096, 16384]
    assert [programs for programs, _ in over_programs["scatter"]] == gpu.curve_programs(8, quick=True)
    assert over_size["copy"] == [(64, 100.0), (16384, 100.0)]


# --- what is drawn


@pytest.mark.parametrize("case", gpu.CASES, ids=lambda case: case.name)
def test_a_case_is_whole_random_pages_within_its_pool(case: gpu.Case) -> None:
    pool, packed = torch.empty(512 << 20, dtype=torch.uint8), torch.empty(32 << 20, dtype=torch.uint8)  # never touched
    chunk = gpu.build(case, pool, packed)
    assert 0.9 * packed.numel() < chunk.packed_bytes <= packed.numel()
    first = chunk.pointers[chunk.token_pool].min(1) + chunk.token_offset
    last = chunk.pointers[chunk.token_pool].max(1) + chunk.token_offset + (chunk.heads - 1) * chunk.head_stride
    assert first.min() >= pool.data_ptr()
    assert last.max() + chunk.row_bytes <= pool.data_ptr() + pool.numel()
    assert (np.diff(chunk.token_offset) < 0).any()
    assert set(chunk.token_pool.tolist()) == set(range(case.pools))


def test_the_check_of_rows_notices() -> None:
    """Its sample names the same bytes in both forms: right after a gather by the reference, wrong when one plane is not."""
    case = gpu.Case("", "hnd", 2, 4, 4, 48, heads=2)
    bench = gpu.Bench.__new__(gpu.Bench)
    bench._device = torch.device("cpu")
    bench._pool = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    bench._packed = torch.zeros(64 << 10, dtype=torch.uint8)
    chunk = gpu.build(case, bench._pool, bench._packed)
    reference.gather([chunk])
    paged, packed = bench._sample(chunk)
    assert bool((bench._pool[paged] == bench._packed[packed]).all())
    bench._packed[: chunk.packed_bytes // 4] ^= 1
    assert not bool((bench._pool[paged] == bench._packed[packed]).all())


# --- without a device


@no_gpu
def test_no_device_is_a_missing_row() -> None:
    made, panels = measure_gpu(GpuOptions(), lambda _text, _done, _total: None)
    assert [type(row) for row in made] == [Missing]
    assert "CUDA" in str(made[0].value)
    assert not panels


@no_gpu
@pytest.mark.parametrize(("command", "row"), [("gpu", "CUDA device"), ("multigpu", "two CUDA devices")])
def test_the_command_says_so_and_fails(
    command: str, row: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["rdma-kv", "bench", command, "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is False
    assert [each["name"] for each in said["rows"]] == [row]


def test_a_part_that_is_not_there_is_one_line_and_exit_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["rdma-kv", "bench", "gpu", "--part", "host", "--part", "hosts"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--part: 'hosts'" in line


def test_a_wrong_option_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        GpuOptions(repetitions=0)
    assert caught.value.field == "--repetitions"
    assert GpuOptions(quick=True).rounds == 5
    assert GpuOptions(repetitions=3, quick=True).rounds == 3
