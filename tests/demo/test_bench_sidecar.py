"""`rdma-kv bench sidecar`, for real and with few bytes: engines and sidecars in processes of their own."""

from __future__ import annotations

import pytest

from rdma_kv.bench import sidecar
from rdma_kv.bench.sidecar import Case, Engine, SidecarOptions, measure_sidecar
from rdma_kv.errors import ConfigError, RdmaKvError
from rdma_kv.types import Role


@pytest.fixture(autouse=True)
def few_bytes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sidecar, "POOL_BYTES", 16 << 20)
    monkeypatch.setattr(sidecar, "CASES", (Case(1, 1, 3), Case(3, 5, 1)))


def quiet(text: str, done: int, total: int) -> None:
    pass


@pytest.mark.parametrize("transport", ["ucx", "nixl"])
def test_both_ways_are_measured_and_nobody_is_left(transport: str):
    rows = {row.name: row.value for row in measure_sidecar(SidecarOptions(transport, 1), quiet)}
    for case in ("1 x 1 MiB", "3 x 5 MiB"):
        assert rows[f"{case}: time by sidecars to time by agents"] == pytest.approx(
            rows[f"{case}: sidecar"] / rows[f"{case}: agent"]
        )
        assert rows[f"{case}: agent, CPU of the engines"] > 0
    assert rows["transport"] == transport


def test_control_wrong_pages_are_seen(monkeypatch: pytest.MonkeyPatch):
    """A prefill engine that sends other pages than it should."""
    right = Engine._parts

    def parts(self: Engine, requests: int, pages: int) -> list[tuple[int, list[int]]]:
        found = right(self, requests, pages)
        return [(n, part[::-1]) for n, part in found] if self._role is Role.PREFILL else found

    monkeypatch.setattr(sidecar, "CASES", (Case(1, 6, 1),))
    monkeypatch.setattr(Engine, "_parts", parts)
    with pytest.raises(RdmaKvError, match="6 pages arrived with other bytes"):
        measure_sidecar(SidecarOptions("ucx", 1), quiet)


def test_cpu_of_a_process_grows_with_what_it_does():
    import os

    before = sidecar.cpu_s(os.getpid())
    while sidecar.cpu_s(os.getpid()) < before + 0.05:
        sum(range(10_000))


def test_a_transport_within_one_process_is_refused():
    with pytest.raises(ConfigError) as caught:
        SidecarOptions("loopback")
    assert caught.value.field == "--transport"
