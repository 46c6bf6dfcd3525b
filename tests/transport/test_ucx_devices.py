"""Memory of GPUs in the ucx transport, without a GPU: who refuses what, which lanes lead where, what the metadata say."""

from __future__ import annotations

import os

import msgspec
import numpy as np
import pytest
from transport_rig import Memory, Side, link, write

from rdma_kv.cuda import Cuda
from rdma_kv.errors import ConfigError, FenceUnsupported, RegistrationError, TransportError
from rdma_kv.transport import ucx_core
from rdma_kv.transport.base import NOT_POSTED, WritePair, unwrap_metadata, wrap_metadata
from rdma_kv.transport.ucx import UcxTransport
from rdma_kv.transport.ucx_core import Context, open_context
from rdma_kv.transport.ucx_environment import choose_lane, usable_lanes
from rdma_kv.transport.ucx_lanes import GUARD, device_lane_of, lane_of, shares_no_host_memory, way_of
from rdma_kv.transport.ucx_library import SETTING, candidates, load_ucx
from rdma_kv.types import Descriptor

GPU = "a GPU is here: tests/gpu has the tests"
LIBRARIES = [(source, path) for source, path in candidates() if source != "system"]


def no_gpu():
    try:
        Cuda().retain(0)
    except RegistrationError:
        return True
    return False


without_gpu = pytest.mark.skipif(not no_gpu(), reason=GPU)


@pytest.fixture
async def make():
    made = []

    async def start(name, **arguments):
        transport = UcxTransport(name, **arguments)
        await transport.start()
        made.append(transport)
        return transport

    yield start
    for transport in made:
        await transport.close()


@pytest.fixture
def with_cuda(monkeypatch):
    """Transports that believe to have CUDA support; nothing on a device can be registered all the same."""

    def pretend(library, environ):
        return Context(open_context(library, environ).handle, "")

    monkeypatch.setattr("rdma_kv.transport.ucx.open_context", pretend)


def p(local_device, remote_device):
    return WritePair(Descriptor(4096, 8, local_device), Descriptor(8192, 8, remote_device))


@pytest.mark.skipif(not LIBRARIES, reason="no wheel with a libucp is installed")
@pytest.mark.parametrize("path", [path for _, path in LIBRARIES], ids=[source for source, _ in LIBRARIES])
@without_gpu
async def test_each_libucp_says_that_it_knows_no_cuda_memory_here_and_a_region_of_a_gpu_is_refused(make, path):
    transport = await make("left@1", library=path)
    ucx = transport.library.ucx
    context = ucx.context({})
    assert not ucx.knows_cuda(context)
    ucx.cleanup(context)
    with pytest.raises(RegistrationError) as caught:
        await transport.register(4096, 4096, device=1)
    assert caught.value.status == "device-memory"
    for word in (path, transport.library.source, transport.library.version, SETTING, "nixl", "cuda_copy", "pinned"):
        assert word in str(caught.value)
    await transport.deregister(await transport.register(*host()))  # memory of the host goes on to work


def host():
    host.memory = np.zeros(4096, dtype=np.uint8)
    return host.memory.ctypes.data, host.memory.nbytes


@pytest.mark.skipif(not LIBRARIES, reason="no wheel with a libucp is installed")
@pytest.mark.parametrize("path", [path for _, path in LIBRARIES], ids=[source for source, _ in LIBRARIES])
def test_the_settings_that_keep_memory_of_gpus_off_tcp_are_taken_and_a_misspelt_one_is_not(path):
    ucx = load_ucx(path, {}).ucx
    ucx.cleanup(ucx.context(dict(GUARD)))
    for name in GUARD:
        with pytest.raises(ConfigError):
            ucx.context({**GUARD, f"{name}_OF_NOBODY": GUARD[name]})


@pytest.mark.parametrize("tls", ["tcp", None], ids=str)
async def test_memory_of_the_host_moves_under_those_settings_as_without(make, monkeypatch, tls):
    """They are the context's where there is a GPU; no host WRITE may depend on what they forbid."""
    settings_of = ucx_core.settings_of
    monkeypatch.setattr(ucx_core, "settings_of", lambda environ: {**settings_of(environ), **GUARD})
    environ = {**os.environ, **({"UCX_TLS": tls} if tls else {})}
    left, right = await make("left@1", environ=environ), await make("right@1", environ=environ)
    source, destination = await Memory(3 << 20, 1).register(left), await Memory(3 << 20).register(right)
    a, b = await link(left, right)
    b.endpoint.listen()
    parts = [(0, 1), (1, 7), (8, 4096), (5000, 300_001), (1 << 20, 2 << 20)]
    await write(a, [WritePair(source.part(*one), destination.part(*one)) for one in parts], b"n")
    for offset, length_bytes in parts:
        there, here = (memory.bytes[offset : offset + length_bytes] for memory in (destination, source))
        assert np.array_equal(there, here)


@pytest.mark.parametrize("device", [-1, -7])
async def test_a_negative_device_is_refused_as_such(make, with_cuda, device):
    transport = await make("left@1")
    with pytest.raises(ConfigError, match="CUDA ordinal"):
        await transport.register(4096, 4096, device=device)


@without_gpu
async def test_without_libcuda_or_a_gpu_it_is_refused_and_the_region_is_free_again(make, with_cuda):
    transport = await make("left@1")
    for _ in range(2):
        with pytest.raises(RegistrationError) as caught:
            await transport.register(4096, 4096, device=1)
        assert caught.value.status == "device-memory"
    assert await transport.register(*host())


def test_a_libcuda_that_is_none_is_refused_by_name():
    with pytest.raises(RegistrationError, match=r"libc\.so\.6"):
        Cuda("libc.so.6")


@pytest.mark.parametrize(
    ("version", "known", "word"),
    [("1.21.3", True, "too old"), ("1.9.0", True, "too old"), ("1.22.0", False, "no CUDA memory support")],
)
def test_an_old_libucp_cannot_be_kept_off_tcp_and_is_refused(version, known, word):
    class Old:
        def context(self, settings):
            assert not GUARD.keys() & settings.keys()
            return "made"

        def knows_cuda(self, context):
            return known

    context = open_context(library_of(Old(), version), {})
    assert context.handle == "made"
    assert word in context.no_cuda


def test_a_new_libucp_with_a_gpu_gets_a_context_that_is_kept_off_tcp_against_the_user_too():
    made = []

    class New:
        def context(self, settings):
            made.append(settings)
            return len(made)

        def knows_cuda(self, context):
            return True

        def cleanup(self, context):
            made.append("freed")

    context = open_context(library_of(New(), "1.23.0"), {"UCX_PROTO_EMULATION_ENABLE": "y", "UCX_PROTOS": "all"})
    assert context == Context(3, "")
    assert made[1] == "freed"
    assert GUARD.items() <= made[2].items()


def test_a_refusal_to_start_names_ucx_tls_and_cuda_copy_where_it_is_set():
    class Refusing:
        def context(self, settings):
            raise TransportError("ucx", "Unsupported operation", "a call of UCX failed")

    library = library_of(Refusing(), "1.23.0")
    with pytest.raises(TransportError, match=r"UCX_TLS='tcp'.*cuda_copy") as caught:
        open_context(library, {"UCX_TLS": "tcp"})
    assert caught.value.status == "Unsupported operation"
    with pytest.raises(TransportError) as caught:
        open_context(library, {})
    assert "UCX_TLS" not in str(caught.value)


def library_of(ucx, version):
    return ucx_core.UcxLibrary("argument", "/a/libucp.so.0", version, ucx)


@pytest.mark.parametrize(
    ("transports", "host_lane", "device_lane"),
    [
        ([], "unknown", "unknown"),
        (["tcp", "tcp"], "tcp", "tcp"),
        (["tcp", "cma"], "cma", "tcp"),
        (["cuda_copy", "tcp"], "tcp", "tcp"),
        (["cuda_ipc", "tcp"], "tcp", "cuda_ipc"),
        (["cuda_ipc", "cma", "tcp"], "cma", "cuda_ipc"),
        (["cuda_copy", "gdr_copy", "tcp"], "tcp", "tcp"),
        (["rc_mlx5", "tcp"], "rdma", "rdma"),
        (["rc_mlx5", "cuda_ipc", "tcp"], "rdma", "cuda_ipc"),
        (["srd"], "rdma", "rdma"),
        (["tcp", "posix"], "shm", "tcp"),
        (["cma", "rc_mlx5"], "cma", "rdma"),
    ],
)
def test_lanes_are_named_by_what_ucx_chose(transports, host_lane, device_lane):
    assert lane_of(transports) == host_lane
    assert device_lane_of(transports) == device_lane


@pytest.mark.parametrize(
    ("setting", "apart"),
    [
        ("tcp", True),
        ("tcp,cuda_copy", True),
        ("tcp,cuda_copy,cuda_ipc", True),
        ("all", False),
        ("tcp,sm", False),
        ("^cma", False),
    ],
)
def test_only_settings_without_shared_memory_keep_a_peer_from_host_memory(setting, apart):
    assert shares_no_host_memory(setting) is apart


@pytest.mark.parametrize(
    ("tls", "cuda", "listed"),
    [
        ("all", True, True),
        ("all", False, False),
        ("tcp", True, False),
        ("tcp,cuda", True, True),
        ("^cuda_ipc", True, False),
    ],
)
def test_cuda_ipc_is_listed_where_it_may_be_used_and_never_chosen_for_host_memory(tmp_path, tls, cuda, listed):
    lanes = usable_lanes({"UCX_TLS": tls}, infiniband=tmp_path, ptrace=tmp_path / "none", cuda=cuda)
    assert ("cuda_ipc" in lanes) is listed
    assert choose_lane(["cuda_ipc", "tcp"], ["cuda_ipc", "tcp"], same_host=True) == "tcp"


@pytest.mark.parametrize(
    ("pairs", "host_lane", "device_lane", "way"),
    [
        ([], "cma", "tcp", "cma"),
        ([p(0, 0)], "tcp", "tcp", "tcp"),
        ([p(0, 0)], "cma", "cuda_ipc", "cma"),
        ([p(1, 1)], "cma", "cuda_ipc", "cuda_ipc"),
        ([p(1, 2), p(2, 1)], "tcp", "cuda_ipc", "cuda_ipc"),
        ([p(1, 1), p(0, 0)], "cma", "cuda_ipc", "cma"),
        ([p(0, 0), p(1, 1)], "cma", "cuda_ipc", "cma"),
        ([p(1, 1)], "rdma", "rdma", "rdma"),
        ([p(0, 1)], "rdma", "rdma", "rdma"),
        ([p(1, 0)], "rdma", "rdma", "rdma"),
        ([p(1, 1)], "tcp", "tcp", None),
        ([p(1, 1)], "cma", "tcp", None),
        ([p(1, 1)], "unknown", "unknown", None),
        ([p(0, 1)], "cma", "cuda_ipc", None),
        ([p(1, 0)], "cma", "cuda_ipc", None),
        ([p(0, 0), p(0, 1)], "tcp", "tcp", None),
    ],
)
def test_a_write_takes_a_lane_that_leads_there_or_none(pairs, host_lane, device_lane, way):
    if way is not None:
        assert way_of(pairs, host_lane, device_lane) == way
        return
    with pytest.raises(TransportError, match="pinned host memory") as caught:
        way_of(pairs, host_lane, device_lane)
    assert caught.value.status == NOT_POSTED


async def test_a_write_to_memory_of_a_gpu_is_refused_before_a_byte_is_posted(make):
    left, right = await make("left@1"), await make("right@1")
    source, destination = await Memory(4096, 1).register(left), await Memory(4096).register(right)
    a, b = Side(left, "right@1"), Side(right, "left@1")
    await b.endpoint.connect(await a.endpoint.metadata())
    inner = msgspec.msgpack.decode(unwrap_metadata("ucx", await b.endpoint.metadata()))
    inner[1] = [[address, length_bytes, 1] for address, length_bytes, _ in inner[1]]  # as if it were on a GPU
    await a.endpoint.connect(wrap_metadata("ucx", msgspec.msgpack.encode(inner)))
    b.endpoint.listen()
    to_gpu = WritePair(source.part(0, 4096), Descriptor(destination.address, 4096, 1))
    for pairs in ([to_gpu], [WritePair(source.part(0, 8), destination.part(0, 8)), to_gpu]):
        with pytest.raises(TransportError) as caught:
            await a.endpoint.write(pairs, b"never")
        assert caught.value.status == NOT_POSTED
        assert "pinned host memory" in str(caught.value)
    assert not destination.bytes.any()
    await a.endpoint.notify(b"the link lives")
    assert await b.wait_for(1) == [b"the link lives"]


@pytest.mark.parametrize("region", [[8192, 4096, -1], [8192, 4096], [8192, 4096, 0, 0], [8192, 4096, "gpu"]], ids=str)
async def test_a_region_with_no_plausible_device_is_refused(make, region):
    left, right = await make("left@1"), await make("right@1")
    await Memory(4096).register(right)
    inner = msgspec.msgpack.decode(unwrap_metadata("ucx", await right.endpoint("left@1").metadata()))
    inner[1] = [region]
    with pytest.raises(RegistrationError):
        await left.endpoint("right@1").connect(wrap_metadata("ucx", msgspec.msgpack.encode(inner)))


@pytest.mark.parametrize(
    ("lane", "there", "fenced"),
    [
        ("cuda_ipc", True, False),
        ("rdma", True, False),
        ("unknown", False, False),  # its first message may come behind its WRITE
        ("cuda_ipc", False, True),  # a peer without memory of a GPU has mapped none
        ("tcp", True, True),  # on another host
    ],
)
async def test_memory_of_a_gpu_rules_out_a_fence_of_the_target_where_the_peer_may_map_it(
    make, monkeypatch, lane, there, fenced
):
    environ = {**os.environ, "UCX_TLS": "tcp"}
    left, right = await make("left@1", environ=environ), await make("right@1", environ=environ)
    a, b = await link(left, right)
    with monkeypatch.context() as patch:
        patch.setattr(ucx_core.Core, "device_memory", True)
        patch.setattr(b.endpoint, "_device_lane", lane)
        patch.setattr(b.endpoint, "_device_memory_there", there)
        if fenced:
            await b.endpoint.fence_target()
        else:
            with pytest.raises(FenceUnsupported, match="peer's GPU writes"):
                await b.endpoint.fence_target()
    assert b.endpoint.closed == fenced
    await b.endpoint.fence_target()  # the control: without such memory of ours, it is there
    assert a.endpoint.lane == "tcp"
