"""Memory of GPUs over the nixl transport, between two processes of one host. Needs a GPU and NIXL."""

from __future__ import annotations

import importlib.util

import pytest
from cuda_pair import LENGTH_BYTES, MIB, Child, Pair, gpus, moves

pytestmark = pytest.mark.gpu

FENCED_BYTES = 10 << 30  # 9 ms within one GPU: the source is overwritten in the middle of it

if not gpus():
    pytest.skip("no GPU, or no torch that can use it", allow_module_level=True)
if not any(map(importlib.util.find_spec, ("nixl_cu12", "nixl_cu13"))):
    pytest.skip("NIXL is not installed", allow_module_level=True)

two_gpus = pytest.mark.skipif(gpus() < 2, reason="needs two GPUs")


@pytest.fixture(scope="module")
def one():
    """Both processes on the first GPU."""
    pair = Pair("nixl")
    yield pair
    pair.end()


@pytest.fixture(scope="module")
def two():
    pair = Pair("nixl", 0, 1)
    yield pair
    pair.end()


@pytest.fixture
def one_more():
    pair = Pair("nixl", length_bytes=4 * MIB)
    yield pair
    pair.end()


SIZES = pytest.mark.parametrize("length_bytes", [1, 4096, MIB + 3, 256 * MIB])


@SIZES
def test_bytes_are_there_when_the_notification_comes(one, length_bytes):
    moves(one, length_bytes)


@two_gpus
@SIZES
def test_bytes_go_from_one_gpu_to_another(two, length_bytes):
    moves(two, length_bytes)
    assert two.right.call("current_device") == 0  # the application's own choice


def test_the_lane_is_cuda_ipc_on_both_sides_and_carries_200_writes_at_once(one):
    for child in (one.left, one.right):
        lane, host_lane = child.call("lanes")
        assert lane == "cuda_ipc"
        assert host_lane in {"cma", "tcp"}
    length_bytes, count = 4096, 200
    one.left.call("fill", kind="gpu", offset=0, length_bytes=length_bytes * count, seed=9)
    one.right.call("expect", kind="gpu", offset=0, length_bytes=length_bytes * count, seed=9)
    one.left.call("many", addresses=one.addresses, remote_device=one.device, length_bytes=length_bytes, count=count)
    bodies = one.right.call("bodies", count=count)
    assert sorted(bodies, key=int) == [str(n).encode() for n in range(count)]


def test_a_write_of_many_pairs_of_an_odd_length_is_whole(one):
    parts, length_bytes = 5000, 5000 * 4099  # more than one post takes
    one.left.call("fill", kind="gpu", offset=0, length_bytes=length_bytes, seed=5)
    one.right.call("expect", kind="gpu", offset=0, length_bytes=length_bytes, seed=5)
    one.left.call(
        "scattered", addresses=one.addresses, remote_device=one.device, length_bytes=length_bytes, parts=parts
    )
    assert one.right.call("notified") == (b"n", True)


def test_host_memory_goes_its_own_way_beside_it(one):
    moves(one, MIB + 3, source="host", destination="host")


@pytest.mark.parametrize(("source", "destination"), [("host", "gpu"), ("gpu", "host")])
def test_between_host_and_gpu_a_write_is_refused_before_a_byte_is_posted(one, source, destination):
    one.left.call("fill", kind=source, offset=0, length_bytes=4096, seed=77)
    one.right.call("expect", kind=destination, offset=0, length_bytes=1, seed=0)
    with pytest.raises(RuntimeError, match=r"TransportError\|not-posted.*pinned host memory"):
        one.write((source, 0), (destination, 0), 4096)
    assert one.right.call("count", kind=destination, value=0) == (LENGTH_BYTES if destination == "gpu" else 4 * MIB)
    moves(one, 4096)  # the link lives


@pytest.mark.parametrize(("source", "destination"), [("spare", "gpu"), ("gpu", "spare")])
def test_memory_of_a_gpu_that_is_not_registered_is_refused_before_a_byte_is_posted(one, source, destination):
    with pytest.raises(RuntimeError, match=r"TransportError\|not-posted.*in no region"):
        one.write((source, 0), (destination, 0), 4096)
    moves(one, 4096)


def test_a_fence_of_the_target_is_refused_and_changes_nothing(one):
    with pytest.raises(RuntimeError, match=r"FenceUnsupported\|no-fence"):
        one.right.call("fence_target")
    moves(one, 4096)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "spare", "device": 99}, "this process sees"),
        ({"kind": "pinned", "device": 1}, "cudaMalloc"),
        ({"kind": "pageable", "device": 1}, "not known to CUDA"),
    ],
)
def test_a_range_that_is_not_what_the_device_says_is_refused(one, arguments, words):
    with pytest.raises(RuntimeError, match=rf"RegistrationError\|device-memory.*{words}"):
        one.left.call("register", **arguments)


def test_ucx_tls_without_cuda_copy_is_refused_by_name_when_memory_is_registered():
    child = Child("left@1", "right@1", 0, 4096, backend="nixl", UCX_TLS="tcp")
    try:
        with pytest.raises(RuntimeError, match=r"RegistrationError\|device-memory.*cuda_copy"):
            child.call("start")
    finally:
        child.end()


def test_without_cuda_ipc_a_write_is_refused_and_nothing_goes_over_tcp():
    pair = Pair("nixl", length_bytes=4 * MIB, UCX_TLS="tcp,cuda_copy")
    try:
        with pytest.raises(RuntimeError, match=r"TransportError\|not-posted.*over tcp"):
            pair.write(("gpu", 0), ("gpu", 0), 4096)
        assert pair.right.call("count", value=0) == 4 * MIB
        moves(pair, MIB, source="host", destination="host")
    finally:
        pair.end()


@pytest.mark.parametrize("guard", [False, True], ids=["control", "guarded"])
def test_ucx_itself_is_kept_from_sending_memory_of_a_gpu_over_tcp(guard):
    """Also where our own table of lanes errs. The control shows that UCX would."""
    pair = Pair("nixl", length_bytes=4 * MIB, guard=guard, UCX_TLS="tcp,cuda_copy", UCX_LOG_LEVEL="fatal")
    try:
        pair.left.call("fill", kind="gpu", offset=0, length_bytes=4 * MIB, seed=77)
        status = pair.write(("gpu", 0), ("gpu", 0), MIB, command="ask_ucx")
        untouched = pair.right.call("count", value=0) == 4 * MIB
        print(f"guard {guard}: {status}")
        assert (status != "done") is untouched is guard
    finally:
        pair.end()


def test_a_loop_whose_thread_has_no_cuda_context_needs_none_and_gets_none(one_more):
    one_more.right.call("expect", kind="gpu", offset=0, length_bytes=MIB, seed=77)
    assert one_more.write(("gpu", 0), ("gpu", 0), MIB, command="bare_write")
    assert one_more.right.call("notified") == (b"n", True)


def test_closing_gives_all_back_and_the_peer_hears_of_it(one_more):
    moves(one_more, MIB)
    one_more.right.call("close")
    with pytest.raises(RuntimeError, match="TransportError"):
        one_more.write(("gpu", 0), ("gpu", 0), MIB)
    one_more.left.call("close")


def test_the_death_of_the_target_ends_the_next_write_and_closes(one_more):
    moves(one_more, MIB)
    one_more.right.end()
    with pytest.raises(RuntimeError, match="TransportError"):
        one_more.write(("gpu", 0), ("gpu", 0), MIB)
    one_more.left.call("close")


@pytest.mark.parametrize("fence", [False, True], ids=["control", "fenced"])
def test_after_a_fence_of_the_source_nothing_reads_it_any_more(fence):
    """The control overwrites the source while the GPU copies: the target must see some of it, or the test has no power."""
    pair = Pair("nixl", 0, gpus() - 1, length_bytes=FENCED_BYTES)
    try:
        error, took_s, under_way, status = pair.left.call(
            "reuse",
            addresses=pair.addresses,
            remote_device=pair.device,
            length_bytes=FENCED_BYTES,
            fence=fence,
        )
        poisoned = pair.right.call("count", value=0xAA)
        print(f"fence {fence}: {took_s * 1e3:.2f} ms, {status}, {error or 'no error'}, {poisoned} bytes poisoned")
        assert under_way
        assert not error
        assert status == ("fenced" if fence else "done")
        assert (poisoned == 0) is fence
    finally:
        pair.end()
