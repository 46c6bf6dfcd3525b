"""Agents whose pools lie on GPUs, over the real transports: every layout bit for bit, events, bounds, links, endings.

With two GPUs or more the prefill agent is on the first and the decode agent on the last; with one they share it.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from gpu_agents import LIMIT_S, Child, Cluster, Side, Told, gpus

pytestmark = pytest.mark.gpu

if not gpus():
    pytest.skip("no GPU, or no torch that can use it", allow_module_level=True)

from rdma_kv.config import GpuConfig, StagingConfig, Timeouts  # noqa: E402
from rdma_kv.topology import ModelSpec, Topology  # noqa: E402
from rdma_kv.transport.named import usable  # noqa: E402
from rdma_kv.types import Role  # noqa: E402

GPUS = (0, gpus() - 1)
LAYERS = 3
KV_HEADS = 4
SPIN_CYCLES = 3_000_000_000  # 1.5 s at 2 GHz
TRANSPORTS = pytest.mark.parametrize(
    "transport",
    [
        pytest.param(name, marks=pytest.mark.skipif(not usable(name, os.environ), reason=f"{name} is not installed"))
        for name in ("ucx", "nixl")
    ],
)


def gqa(row_bytes: int, layers: int = LAYERS) -> ModelSpec:
    return ModelSpec.gqa(
        layers=layers, kv_heads=KV_HEADS, head_dim=row_bytes, itemsize=1, dtype="uint8", fingerprint="toy"
    )


def mla(row_bytes: int) -> ModelSpec:
    return ModelSpec.mla(layers=LAYERS, latent_dim=row_bytes, itemsize=1, dtype="uint8", fingerprint="toy")


@pytest.fixture(scope="module")
def children() -> Iterator[tuple[Child, Child]]:
    """A process for prefill agents and one for decode agents."""
    pair = Child(), Child()
    yield pair
    for child in pair:
        child.kill()


@pytest.fixture(scope="module")
def alone() -> Iterator[Child]:
    """A process for both agents, over the loopback transport: KV goes through pinned host memory there."""
    child = Child()
    yield child
    child.kill()


def sides(
    model: ModelSpec | None = None, transport: str = "ucx", *, prefill: dict | None = None, decode: dict | None = None
) -> tuple[Side, Side]:
    """Both on GPUs; `prefill` and `decode` say what is special."""
    model = model or gqa(64)
    topology = Topology.with_layers(model.components[0].layers[-1] + 1)
    made = []
    for role, ordinal, special in zip((Role.PREFILL, Role.DECODE), GPUS, (prefill, decode), strict=True):
        side = Side(role, topology, model, transport=transport, gpu=GpuConfig(ordinal))
        made.append(replace(side, **(special or {})))
    return made[0], made[1]


def cluster(folder, children: tuple[Child, Child], both: tuple[Side, Side]) -> Cluster:
    return Cluster(folder, *children, both)


def scattered(count: int, pages: int, seed: int) -> list[int]:
    """`count` different pages out of `pages`."""
    step = next(n for n in (7, 11, 13) if pages % n)
    return [(seed + step * n) % pages for n in range(count)]


# --- bytes -------------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """(layout, tokens a page) of both sides; `dp`: replicas of the decode engine, where attention TP is 2 or 4."""

    prefill: tuple[str, int]
    decode: tuple[str, int]
    row_bytes: int
    checksum: bool = False
    tps: tuple[int, int] = (1, 1)
    gpu: tuple[bool, bool] = (True, True)


CASES = [
    Case(("nhd", 16), ("nhd", 16), 64),
    Case(("nhd", 16), ("hnd", 64), 578, checksum=True, tps=(2, 4)),
    Case(("hnd", 64), ("nhd", 1), 1152, tps=(4, 2)),
    Case(("hnd", 16), ("hnd", 64), 64, checksum=True, tps=(1, 2)),
    Case(("nhd", 1), ("sglang", 16), 578),
    Case(("sglang", 1), ("lightllm", 1), 64, tps=(2, 1)),
    Case(("sglang", 64), ("trtllm", 16), 1152, checksum=True),
    Case(("lightllm", 1), ("trtllm", 64), 578, tps=(1, 4)),
    Case(("trtllm", 16), ("sglang", 1), 64, checksum=True, tps=(4, 1)),
    Case(("trtllm", 64), ("nhd", 16), 578),
    Case(("lightllm", 1), ("hnd", 16), 1152, checksum=True),
    Case(("mla", 64), ("mla", 16), 1152, tps=(2, 4)),
    Case(("mla", 1), ("mla", 64), 578, checksum=True),
    Case(("mla", 16), ("hnd", 1), 64, tps=(4, 1)),
    Case(("trtllm", 16), ("mla", 1), 1152),
]
TOKENS, START = 157, 19  # neither a whole page; decode has the first 19 already


def run_case(folder, children, case: Case, transport: str, direct: tuple[str, ...] | None = None) -> list[str]:
    """Two requests, at once, compared; the lanes."""
    latent = "mla" in {case.prefill[0], case.decode[0]}
    model = mla(case.row_bytes) if latent else gqa(case.row_bytes)
    special: list[dict[str, Any]] = []
    for (kind, page), tp, on_gpu, ordinal in zip((case.prefill, case.decode), case.tps, case.gpu, GPUS, strict=True):
        gpu = GpuConfig(ordinal) if direct is None else GpuConfig(ordinal, direct=direct)
        special.append(
            {
                "topology": Topology.with_layers(LAYERS, tp=tp),
                "kind": kind,
                "page": page,
                "pages": 2 * -(-TOKENS // page) + 3,
                "checksum": case.checksum,
                "gpu": gpu if on_gpu else None,
            }
        )
    both = sides(model, transport, prefill=special[0], decode=special[1])
    with cluster(folder, children, both) as c:
        src_need, dst_need = (-(-TOKENS // side.page) for side in both)
        src, dst = scattered(2 * src_need, both[0].pages, 3), scattered(2 * dst_need, both[1].pages, 5)
        started = [
            c.start(1, src[:src_need], dst[:dst_need], TOKENS, start=START),
            c.start(2, src[src_need:], dst[dst_need:], TOKENS),
        ]
        lanes = [c.finish(each) for each in started][-1]
        c.check()
        return lanes


@TRANSPORTS
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.prefill[0]}{c.prefill[1]}-{c.decode[0]}{c.decode[1]}")
def test_every_layout_bit_for_bit_from_gpu_to_gpu(tmp_path, children, case, transport):
    assert run_case(tmp_path, children, case, transport) == ["cuda_ipc"]


@TRANSPORTS
@pytest.mark.parametrize("case", [CASES[1], CASES[8], CASES[12]], ids=["nhd-hnd", "trtllm-sglang", "mla"])
def test_without_direct_lanes_kv_goes_through_pinned_host_memory(tmp_path, children, case, transport):
    (lane,) = run_case(tmp_path, children, case, transport, direct=())
    assert lane.startswith("pinned+")
    assert lane != "pinned+cuda_ipc"


@TRANSPORTS
@pytest.mark.parametrize("on_gpu", [(True, False), (False, True)], ids=["gpu-to-host", "host-to-gpu"])
@pytest.mark.parametrize("case", [CASES[1], CASES[11]], ids=["nhd-hnd", "mla"])
def test_an_agent_without_a_gpu_is_the_other_side(tmp_path, children, case, on_gpu, transport):
    (lane,) = run_case(tmp_path, children, case._replace(gpu=on_gpu), transport)
    assert lane.startswith("pinned+") is on_gpu[0]
    assert "cuda_ipc" not in lane


def test_one_side_without_direct_lanes_is_enough_for_host_staging(tmp_path, children):
    both = sides(prefill={"gpu": GpuConfig(GPUS[0], direct=())})
    with cluster(tmp_path, children, both) as c:
        (lane,) = c.move(1, [3, 1], [2, 5], 32)
        assert lane.startswith("pinned+")
        c.check()


@TRANSPORTS
def test_replicas_of_one_agent_share_page_numbers_and_not_their_bytes(tmp_path, children, transport):
    """All four pairs of replicas at once; each replica's tokens are in its own ranks' pools, under equal slot numbers."""
    topology = Topology.with_layers(LAYERS, tp=4, dp=2)
    special = {"topology": topology, "pages": 32}
    both = sides(gqa(64), transport, prefill=special, decode={**special, "kind": "hnd"})
    with cluster(tmp_path, children, both) as c:
        started = []
        for pair in range(4):
            src, dst = [4 * pair + n for n in (2, 0, 3)], [4 * pair + n for n in (1, 3, 0)]
            replicas = pair % 2, pair // 2
            started.append(c.start(pair, src, dst, 40, replicas=replicas))
        same = [17, 20], [21, 30]
        started += [c.start(4 + k, same[0], same[1], 32, replicas=(k, k)) for k in range(2)]
        for each in started:
            c.finish(each)
        c.check()


def test_a_check_that_could_not_fail_would_prove_nothing(tmp_path, children):
    """Control of the comparison: a byte that is missing, and a page that was not meant."""
    with cluster(tmp_path, children, sides()) as c:
        c.move(1, [3, 1], [2, 5], 32)
        for landed in ([], [(0, 1, [2, 5], range(31))], [(0, 2, [2, 5], range(32))], [(0, 1, [5, 2], range(32))]):
            assert c.call(Role.DECODE, "wrong", landed=landed)
        c.check()


# --- events ------------------------------------------------------------------------------------------------------------


def slow_request(c: Cluster, key: str, *, with_event: bool = True) -> tuple[Any, Any]:
    """Content 98 is overwritten by 99 by a kernel that takes 1.5 s."""
    sending = c.begin(
        Role.PREFILL,
        "send_while_writing",
        key=key,
        pages=[3, 8, 5],
        tokens=40,
        contents=(98, 99),
        cycles=SPIN_CYCLES,
        with_event=with_event,
    )
    receiving = c.begin(Role.DECODE, "receive", key=key, replica=0, pages=[1, 6, 2], tokens=(0, 40), source=0)
    return sending, receiving


@pytest.mark.parametrize("direct", [("cuda_ipc",), ()], ids=["direct", "pinned"])
def test_o25_the_gpu_waits_for_the_producer_and_push_does_not(tmp_path, children, direct):
    """A slow kernel still writes the pages when `push` is called with its event; decode gets the final data."""
    special = [{"gpu": GpuConfig(ordinal, direct=direct), "pages": 32} for ordinal in GPUS]
    with cluster(tmp_path, children, sides(prefill=special[0], decode=special[1])) as c:
        c.move(1, [10, 11], [10, 11], 32)  # the link is there
        sending, receiving = slow_request(c, "slow")
        facts = sending.result(LIMIT_S)
        receiving.result(LIMIT_S)
        assert facts["writing_after_push"]
        assert facts["push_s"] < 0.5
        assert not facts["writing_when_sent"]
        c.landed.append((0, 99, [1, 6, 2], range(40)))
        c.check()


def test_o25_control_without_the_event_decode_gets_what_was_there_before(tmp_path, children):
    with cluster(tmp_path, children, sides(prefill={"pages": 32}, decode={"pages": 32})) as c:
        c.move(1, [10, 11], [10, 11], 32)
        sending, receiving = slow_request(c, "slow", with_event=False)
        receiving.result(LIMIT_S)
        assert sending.result(LIMIT_S)["writing_when_sent"]
        c.landed.append((0, 98, [1, 6, 2], range(40)))
        c.check()


def test_o25_a_slow_producer_holds_up_nobody_else(tmp_path, children):
    with cluster(tmp_path, children, sides(prefill={"pages": 32}, decode={"pages": 32})) as c:
        c.move(1, [10, 11], [10, 11], 32)
        c.call(Role.PREFILL, "fill", request=2, replica=0, pages=[20, 21], tokens=32)
        slow = slow_request(c, "slow")
        assert c.call(Role.PREFILL, "is_writing", key="slow")
        sending = c.begin(Role.PREFILL, "send", key="k2", replica=0, pages=[20, 21], tokens=32, to=0)
        c.call(Role.DECODE, "receive", key="k2", replica=0, pages=[20, 21], tokens=(0, 32), source=0)
        sending.result(LIMIT_S)
        assert c.call(Role.PREFILL, "is_writing", key="slow")
        for each in slow:
            each.result(LIMIT_S)
        c.landed += [(0, 2, [20, 21], range(32)), (0, 99, [1, 6, 2], range(40))]
        c.check()


# --- bounds ------------------------------------------------------------------------------------------------------------


@TRANSPORTS
def test_o27_two_layers_through_the_fewest_slots(tmp_path, children, transport):
    """Two slots, one a peer; each layer takes several, and each gather waits for the WRITE before it."""
    staging = StagingConfig(slots=2, slot_bytes=8192)
    both = sides(gqa(64, layers=2), transport, prefill={"staging": staging}, decode={"staging": staging, "kind": "hnd"})
    with cluster(tmp_path, children, both) as c:
        c.landed.append((0, 1, [5, 3, 8, 6], range(64)))
        receiving = c.begin(Role.DECODE, "receive", key="k1", replica=0, pages=[5, 3, 8, 6], tokens=(0, 64), source=0)
        c.call(Role.PREFILL, "send_layers", request=1, pages=[9, 4, 7, 2], tokens=64)
        receiving.result(LIMIT_S)
        assert c.call(Role.PREFILL, "stats")["gather_launches"] >= 8
        c.check()


def test_o27_the_second_gather_waits_for_a_slow_transport(tmp_path, alone):
    """Two layers, a slot each. The first one's notification is held back: the second is not gathered meanwhile."""
    alone.call("hold_notifications")
    staging = StagingConfig(slots=2, slot_bytes=32 << 10)
    layer_bytes = 2 * 64 * KV_HEADS * 64
    assert layer_bytes == staging.slot_bytes
    special = [{"gpu": GpuConfig(0), "staging": staging} for _ in range(2)]
    both = sides(gqa(64, layers=2), "loopback", prefill=special[0], decode=special[1])
    with cluster(tmp_path, (alone, alone), both) as c:
        c.landed.append((0, 1, [5, 3, 8, 6], range(64)))
        receiving = c.begin(Role.DECODE, "receive", key="k1", replica=0, pages=[5, 3, 8, 6], tokens=(0, 64), source=0)
        sending = c.begin(Role.PREFILL, "send_layers", request=1, pages=[9, 4, 7, 2], tokens=64)
        c.call(Role.PREFILL, "until_launches", gathers=1)
        with pytest.raises(TimeoutError):
            sending.result(0.3)
        assert c.call(Role.PREFILL, "stats")["gather_launches"] == 1
        alone.call("let_go")
        sending.result(LIMIT_S)
        receiving.result(LIMIT_S)
        stats = c.call(Role.PREFILL, "stats")
        assert stats["gather_launches"] == 2
        assert stats["lanes"] == ["pinned+loopback"]
        c.check()


REQUESTS = 12  # at once
ROUNDS = 4


def move_beside_steps(c: Cluster, model_tokens: int, pages: int) -> tuple[list[float], list[float]]:
    """Milliseconds of decode-like steps in the decode agent's process: alone, and while requests arrive."""
    page_tables = [list(range(pages * n, pages * (n + 1))) for n in range(REQUESTS)]
    for request, table in enumerate(page_tables):
        c.call(Role.PREFILL, "fill", request=request, replica=0, pages=table, tokens=model_tokens)
        c.landed.append((0, request, table, range(model_tokens)))
    c.call(Role.DECODE, "make_decode_step")
    c.call(Role.DECODE, "decode_steps", least=20)  # clocks go up
    alone_ms = c.call(Role.DECODE, "decode_steps", least=50)
    many = {"rounds": ROUNDS, "pages": page_tables, "tokens": model_tokens}
    beside = c.begin(Role.DECODE, "decode_steps", least=20, beside=Role.DECODE.value)
    receiving = c.begin(Role.DECODE, "receive_many", **many)
    sending = c.begin(Role.PREFILL, "send_many", **many)
    beside_ms = beside.result(LIMIT_S)
    sending.result(LIMIT_S)
    receiving.result(LIMIT_S)
    return alone_ms, beside_ms


def check_bounds(child: Child, device: int, kernels: set[str], *, programs: int, priority: int) -> None:
    """All launches of a process: on streams of their own, with the configured priority and number of programs."""
    launches = child.call("launches")
    default = child.call("default_streams", device=device)
    assert {kernel for kernel, *_ in launches} == kernels
    assert {number for _, number, _, _ in launches} == {programs}
    assert not {handle for _, _, handle, _ in launches} & default
    assert {found for *_, found in launches} == {priority}


def o28_sides(transport: str, ordinals: tuple[int, int]) -> tuple[Side, Side]:
    """Requests of 64 MiB: 8 layers, 4 heads, rows of 1 KiB, 1,024 tokens."""
    staging = StagingConfig(slots=16, slot_bytes=4 << 20)
    special = [
        {"gpu": GpuConfig(ordinal, programs=8, stream_priority=-1), "staging": staging, "pages": 64 * REQUESTS}
        for ordinal in ordinals
    ]
    model = gqa(1024, layers=8)
    return sides(model, transport, prefill=special[0], decode={**special[1], "kind": "hnd"})


def test_o28_decode_kernels_run_beside_moving_kv(tmp_path, alone):
    """All in one process and on one GPU: gathers, scatters and copies on it, and a step as decoding does it."""
    alone.call("meet")
    with cluster(tmp_path, (alone, alone), o28_sides("loopback", (0, 0))) as c:
        alone.call("launches")
        alone_ms, beside_ms = (statistics.median(times) for times in move_beside_steps(c, 1024, 64))
        print(f"a step takes {alone_ms:.3f} ms alone and {beside_ms:.3f} ms beside transfers")
        assert beside_ms < 1.3 * alone_ms
        check_bounds(alone, 0, {"gather", "scatter"}, programs=8, priority=-1)
        c.check()


@pytest.mark.skipif(gpus() < 2, reason="needs two GPUs: on one, two processes take turns")
@TRANSPORTS
def test_o28_decode_kernels_run_beside_kv_that_comes_from_another_gpu(tmp_path, children, transport):
    with cluster(tmp_path, children, o28_sides(transport, GPUS)) as c:
        for child in children:
            child.call("launches")
        alone_ms, beside_ms = (statistics.median(times) for times in move_beside_steps(c, 1024, 64))
        print(f"{transport}: a step takes {alone_ms:.3f} ms alone and {beside_ms:.3f} ms beside transfers")
        assert beside_ms < 1.3 * alone_ms
        for child, ordinal, kernel in zip(children, GPUS, ("gather", "scatter"), strict=True):
            check_bounds(child, ordinal, {kernel}, programs=8, priority=-1)
        c.check()


# --- endings -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", [("cuda_ipc",), ()], ids=["direct", "pinned"])
@TRANSPORTS
def test_an_abort_in_the_middle_leaves_every_slot_free(tmp_path, children, transport, direct):
    special = [{"gpu": GpuConfig(ordinal, direct=direct), "pages": 256} for ordinal in GPUS]
    with cluster(tmp_path, children, sides(gqa(578), transport, prefill=special[0], decode=special[1])) as c:
        c.move(1, [0, 1], [0, 1], 32)
        table, tokens = list(range(10, 200)), 190 * 16
        for attempt in range(3):
            key = f"given-up-{attempt}"
            receiving = c.begin(Role.DECODE, "receive", key=key, replica=0, pages=table, tokens=(0, tokens), source=0)
            c.call(Role.PREFILL, "send_and_fail", key=key, pages=table, tokens=tokens)
            with pytest.raises(Told) as told:
                receiving.result(LIMIT_S)
            assert told.value.kind == "TransferAborted"
            c.check_settled()
        for role in (Role.PREFILL, Role.DECODE):
            stats = c.call(role, "stats")
            assert sum(stats["slots_held"].values()) == 0
            assert stats["slots_free"] + stats["slots_retired"] == stats["slots_total"]
        c.move(2, table, table, tokens)  # over everything that may have landed before
        c.check()


@TRANSPORTS
def test_a_killed_decode_process_leaves_prefill_healthy(tmp_path, children, transport):
    """It dies in the middle of a transfer. The first transfer to its successor is right."""
    prefill, decode = children[0], Child()
    timeouts = Timeouts(transfer=40.0, quiesce=2.0, heartbeat=0.2, lease=2.0)
    special = [{"gpu": GpuConfig(ordinal), "pages": 512, "timeouts": timeouts} for ordinal in GPUS]
    both = sides(gqa(1152), transport, prefill=special[0], decode=special[1])
    successor = Child()  # starts meanwhile
    try:
        with cluster(tmp_path, (prefill, decode), both) as c:
            c.move(1, [0, 1], [0, 1], 32)
            table, tokens = list(range(2, 502)), 500 * 16  # 221 MB in chunks of 64 KiB
            before = c.call(Role.PREFILL, "stats")["gather_launches"]
            sending, receiving = c.start(2, table, table, tokens)
            c.call(Role.PREFILL, "until_launches", gathers=before + 2)
            decode.kill()
            for future in (sending, receiving):
                with pytest.raises(Told) as told:
                    future.result(LIMIT_S)
                assert told.value.kind == "Gone" or told.value.retryable or told.value.kind == "TransportError"
            c.landed.clear()
            c.replace(Role.DECODE, successor)
            c.move(3, table[:100], table[100:200], 100 * 16)
            c.check()
    finally:
        decode.kill()
        successor.kill()


# --- mistakes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("host array", "host memory"),
        ("host tensor", "cpu"),
        ("another device", "is on"),
        ("not contiguous", "not contiguous"),
    ],
)
def test_a_pool_that_is_not_where_it_should_be_is_refused(tmp_path, children, how, words):
    with cluster(tmp_path, children, sides()) as c:
        with pytest.raises(Told) as told:
            c.call(Role.PREFILL, "wrong_pool", how=how)
        assert told.value.kind == "ConfigError"
        assert told.value.field == "memory[0]"
        assert words in told.value.text


@pytest.mark.parametrize(
    ("gpu", "field"),
    [(GpuConfig(1023), "gpu.device"), (GpuConfig(0, stream_priority=1000), "gpu.stream_priority")],
    ids=["no such GPU", "no such priority"],
)
def test_a_gpu_that_is_not_there_is_refused_by_name(tmp_path, children, gpu, field):
    with pytest.raises(Told) as told:
        cluster(tmp_path, children, sides(prefill={"gpu": gpu}))
    assert told.value.kind == "ConfigError"
    assert told.value.field == field
