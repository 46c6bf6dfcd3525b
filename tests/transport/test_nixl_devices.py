"""Memory of GPUs in the NIXL transport, without a GPU: posts, ways, refusals, contexts and fences, with a scripted NIXL."""

from __future__ import annotations

import asyncio
import threading
import weakref

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nixl_fakes import FakeAgent, FakeCuda, FakeNixl, Outcome, nixlBackendError, nixlRemoteDisconnectError
from transport_rig import LIMIT_S, Memory, Rig, link, write

from rdma_kv.errors import ConfigError, FenceUnsupported, RegistrationError, TransportError
from rdma_kv.transport import nixl as nixl_module
from rdma_kv.transport.base import DEVICE_MEMORY, FENCED, NOT_POSTED, WritePair, unwrap_metadata, wrap_metadata
from rdma_kv.transport.nixl import NixlTransport
from rdma_kv.transport.nixl_devices import Devices
from rdma_kv.transport.nixl_link import NixlLink, RemoteEnd
from rdma_kv.transport.nixl_metadata import Blob
from rdma_kv.transport.nixl_owner import Nixl
from rdma_kv.transport.nixl_writes import DEVICE_POST_BYTES, POST_BYTES, POST_PIECES, WriteQueue, cut
from rdma_kv.transport.regions import RegionTable
from rdma_kv.transport.ucx_lanes import GUARD
from rdma_kv.types import Descriptor, Region

MIB, GIB = 1 << 20, 1 << 30
HERE, THERE = 1 << 40, 1 << 41  # where memory of GPUs is made believe to lie
LENGTH_BYTES = 8 * GIB


def p(local_device, remote_device, length_bytes=100, offset=0):
    return WritePair(
        Descriptor(HERE + offset, length_bytes, local_device), Descriptor(THERE + offset, length_bytes, remote_device)
    )


def queue(agent, pairs, notification=b"n"):
    writes, outcome = WriteQueue(FakeNixl(), agent, "us>peer"), Outcome()
    writes.add(cut(pairs), "peer", notification, outcome)
    return writes, outcome


def lengths(agent):
    return [int(sum(piece[2] for piece in handle.pieces)) for handle in agent.handles]


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 3 * DEVICE_POST_BYTES)), max_size=9))
def test_posts_cover_each_byte_once_with_one_device_on_either_side_within_their_limits(wanted):
    pairs, offset = [], 0
    for local_device, remote_device, length_bytes in wanted:
        pairs.append(p(local_device, remote_device, length_bytes, offset))
        offset += length_bytes
    places = {}
    for batch in cut(pairs):
        assert len(batch.pieces) <= POST_PIECES
        assert sum(piece[2] for piece in batch.pieces) <= (DEVICE_POST_BYTES if batch.on_device else POST_BYTES)
        for local, remote, length_bytes in batch.pieces:
            assert local - HERE == remote - THERE
            places[local - HERE] = (length_bytes, batch.local_device, batch.remote_device)
    end, owners = 0, [(pair.local.address - HERE, pair.local.device, pair.remote.device) for pair in pairs]
    for start, (length_bytes, *devices) in sorted(places.items()):
        assert start == end
        end = start + length_bytes
        assert list([owner for owner in owners if owner[0] <= start][-1][1:]) == devices
    assert end == offset


def test_descriptors_name_the_kind_of_memory_and_the_cuda_ordinal():
    agent = FakeAgent()
    writes, _ = queue(agent, [p(1, 2), p(1, 2, offset=1000)])
    writes.turn()
    assert [handle.memory for handle in agent.handles] == [(("VRAM", {0}), ("VRAM", {1}))]
    assert len(agent.handles[0].pieces) == 2


def test_a_write_of_several_kinds_is_one_post_of_each_and_notifies_with_the_last():
    agent = FakeAgent()
    writes, outcome = queue(agent, [p(0, 0), p(1, 1), p(0, 0, offset=200), p(2, 1, offset=300)])
    for _ in range(4):
        writes.turn()
    assert len(agent.handles) == 2
    agent.finish(0, 1)
    writes.turn()
    memory = [(("DRAM", {0}), ("DRAM", {0})), (("VRAM", {0}), ("VRAM", {0})), (("VRAM", {1}), ("VRAM", {0}))]
    assert [handle.memory for handle in agent.handles] == memory
    assert [handle.notification for handle in agent.handles] == [b"", b"", b"n"]
    agent.finish(2)
    writes.turn()
    assert outcome.error is None


def test_a_big_write_between_gpus_has_posts_of_a_gib_and_two_in_flight():
    agent = FakeAgent()
    writes, _ = queue(agent, [p(1, 1, 5 * GIB)])
    for _ in range(5):
        writes.turn()
    assert lengths(agent) == [GIB, GIB]
    agent.finish(0)
    writes.turn()
    assert lengths(agent) == [GIB] * 3


def test_neither_kind_of_memory_waits_for_the_window_or_the_turn_of_the_other():
    agent = FakeAgent()
    writes, _ = queue(agent, [p(1, 1, 5 * GIB)])
    writes.add(cut([p(0, 0, 64 * MIB)]), "peer", b"host", Outcome())
    for _ in range(10):
        writes.turn()
    sizes = lengths(agent)
    assert sorted(sizes) == [4 * MIB] * 4 + [GIB] * 2
    assert set(sizes[:2]) == {GIB, 4 * MIB}  # both in the first turn


def device_link(nixl, cuda, *, device_lane="cuda_ipc", before=False, peer_devices=(1,)):
    """A connected link with registered memory of the host at 1 << 20 and of the first GPU at HERE."""
    devices = Devices(lambda: cuda)
    table = RegionTable([(1 << 20, 1 << 16)])
    if not before:
        table.add(Region(HERE, LENGTH_BYTES, 1))
        devices.admit(Region(HERE, LENGTH_BYTES, 1), exported=True, probe=lambda region: None)
    scratch = np.zeros(2, dtype=np.uint8)
    made = NixlLink(nixl, "us>peer#0", table, devices=devices, scratch=scratch, deliver=lambda messages: None)
    made.metadata()
    if before:
        region = Region(HERE, LENGTH_BYTES, 1)
        devices.admit(region, exported=True, probe=lambda region: None)
        table.add(region)
        made.register(region)
    there = RegionTable([(1 << 21, 1 << 16)])
    for device in peer_devices:
        there.add(Region(THERE, LENGTH_BYTES, device))
    connected = Outcome()
    made.connect(RemoteEnd("peer", b"peer", 99, there, bool(peer_devices), device_lane), connected)
    assert connected.error is None
    return made


def pair_of(source, destination):
    local = Descriptor(1 << 20, 8) if source == "host" else Descriptor(HERE, 8, 1)
    remote = Descriptor(1 << 21, 8) if destination == "host" else Descriptor(THERE, 8, 1)
    return WritePair(local, remote)


@pytest.mark.parametrize("device_lane", ["cuda_ipc", "rdma", "tcp"])
@pytest.mark.parametrize("source", ["host", "gpu"])
@pytest.mark.parametrize("destination", ["host", "gpu"])
def test_memory_of_a_gpu_without_a_way_is_refused_before_anything_is_posted(device_lane, source, destination):
    nixl = FakeNixl()
    made = device_link(nixl, FakeCuda(), device_lane=device_lane)
    kinds = {source, destination}
    goes = kinds == {"host"} or device_lane == "rdma" or (device_lane == "cuda_ipc" and kinds == {"gpu"})
    outcome, control = Outcome(), Outcome()
    made.write((pair_of("host", "host"), pair_of(source, destination)), b"n", outcome)
    for _ in range(3):
        made.turn()
    assert bool(nixl.made[0].handles) == goes
    if not goes:
        assert outcome.error.status == NOT_POSTED
        assert outcome.error.backend == "nixl"
        assert "pinned host memory" in str(outcome.error)
        made.write((pair_of("host", "host"),), b"n", control)
        made.turn()
        assert len(nixl.made[0].handles) == 1  # the link goes on


def test_the_device_of_a_descriptor_must_be_that_of_its_region():
    nixl = FakeNixl()
    made = device_link(nixl, FakeCuda())
    for local_device, remote_device in ((0, 1), (2, 1), (1, 0), (1, 2)):
        outcome = Outcome()
        made.write((p(local_device, remote_device, 8),), b"n", outcome)
        assert outcome.error.status == NOT_POSTED
    made.turn()
    assert nixl.made[0].handles == []


def test_an_agent_made_before_memory_of_gpus_neither_exports_nor_writes_it():
    nixl = FakeNixl()
    made = device_link(nixl, FakeCuda(), before=True)
    (agent,) = nixl.made
    assert agent.settings is None
    assert not made.with_devices
    assert [region.device for region in made.exported] == [0]
    assert {kind for kind, _ in agent.kinds.values()} == {"DRAM"}
    for source, words in (("gpu", "registered after"), ("host", "pinned host memory")):
        outcome = Outcome()
        made.write((pair_of(source, "gpu"),), b"n", outcome)
        assert outcome.error.status == NOT_POSTED
        assert words in str(outcome.error)
    made.turn()
    assert agent.handles == []


def test_an_agent_made_with_memory_of_gpus_has_the_settings_that_keep_it_off_tcp():
    nixl = FakeNixl()
    made = device_link(nixl, FakeCuda())
    assert nixl.made[0].settings == GUARD
    assert nixl.made[0].kinds[HERE] == ("VRAM", 0)
    assert [region.device for region in made.exported] == [0, 1]


def fenced(prepare):
    """Close a link whose WRITE `prepare` has brought to a point: what happened in order, the outcome, the link."""
    events, cuda = [], FakeCuda()
    nixl = FakeNixl(on_call=lambda method: events.append(method) if method == "check_xfer_state" else None)
    made = device_link(nixl, cuda)
    outcome = prepare(made, nixl)
    events.clear()
    native = weakref.finalize(nixl.made.pop().agent, events.append, "agent destroyed")
    cuda.on_synchronize = lambda: events.append("synchronize")
    outcome.on_result = lambda: events.append("settled")
    made.close()
    assert not native.alive
    return events, outcome.results, made


def test_a_fence_waits_for_the_gpus_before_and_after_the_agent_ends():
    def under_way(made, nixl):
        outcome = Outcome()
        made.write((pair_of("gpu", "gpu"),), b"n", outcome)
        made.turn()
        return outcome

    events, settled, made = fenced(under_way)
    assert events == ["synchronize", "check_xfer_state", "agent destroyed", "synchronize", "settled"]
    assert [error.status for error in settled] == [FENCED]
    assert made.destroyed


def test_a_fence_waits_also_for_a_write_that_failed_before():
    def failed(made, nixl):
        outcome = Outcome()
        made.write((pair_of("gpu", "gpu"),), b"n", outcome)
        made.turn()
        nixl.made[0].handles[0].state = nixlRemoteDisconnectError("gone")
        made.turn()
        assert outcome.error.status == "RemoteDisconnect"
        return outcome

    events, _, made = fenced(failed)
    assert events == ["synchronize", "check_xfer_state", "agent destroyed", "synchronize"]
    assert made.destroyed


def test_a_fence_does_not_wait_for_gpus_that_have_nothing_of_the_link():
    def over(made, nixl):
        outcome = Outcome()
        made.write((pair_of("gpu", "gpu"),), b"n", Outcome())
        made.turn()
        nixl.made[0].finish(0)
        made.turn()
        made.write((pair_of("host", "host"),), b"n", outcome)
        made.turn()
        return outcome

    events, settled, made = fenced(over)
    assert events == ["agent destroyed", "settled"]
    assert [error.status for error in settled] == [FENCED]
    assert made.destroyed


def test_where_cuda_cannot_tell_nothing_is_called_fenced(caplog):
    cuda, nixl, outcome = FakeCuda(), FakeNixl(), Outcome()
    made = device_link(nixl, cuda)
    made.write((pair_of("gpu", "gpu"),), b"n", outcome)
    made.turn()
    nixl.made.clear()
    cuda.failing = RegistrationError("cuda", DEVICE_MEMORY, "cuCtxSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS")
    made.close()
    assert not made.destroyed
    assert outcome.error.status == "closed"
    assert "ILLEGAL_ADDRESS" in caplog.text


class Fakes:
    """Transports over a scripted NIXL and CUDA; `loaded` holds each `Cuda` that was asked for, `bare` the calls of NIXL
    that were made without a CUDA context after memory of a GPU was registered, or with one before."""

    def __init__(self, monkeypatch):
        self.loaded = []
        self.bare = []
        self.nixl = FakeNixl(on_call=self._called)
        self.transports = []
        monkeypatch.setattr(nixl_module, "load_nixl", lambda: self.nixl)
        monkeypatch.setattr(nixl_module, "Devices", lambda: Devices(self._load))

    def _load(self):
        self.loaded.append(FakeCuda())
        return self.loaded[-1]

    def _called(self, method):
        if len(self.loaded) == 1 and self.loaded[0].retained and not self.loaded[0].current_now:
            self.bare.append(method)

    async def make(self, name, tls="all"):
        transport = NixlTransport(name, environ={"UCX_TLS": tls})
        await transport.start()
        self.transports.append(transport)
        return transport


@pytest.fixture
async def fakes(monkeypatch):
    made = Fakes(monkeypatch)
    yield made
    for transport in made.transports:
        await transport.close()
    assert all(cuda.closed for cuda in made.loaded)


async def test_without_memory_of_gpus_nothing_of_cuda_is_loaded(fakes):
    transport = await fakes.make("us@1")
    await transport.register(4096, 4096)
    await transport.endpoint("peer@1").metadata()
    assert fakes.loaded == []
    assert [agent.settings for agent in fakes.nixl.made] == [None]


async def test_all_calls_of_nixl_have_a_context_once_memory_of_a_gpu_is_registered(fakes):
    transport = await fakes.make("us@1")
    host, first = await transport.register(4096, 4096), await transport.register(HERE, 4096, device=1)
    endpoint = transport.endpoint("peer@1")
    await endpoint.metadata()
    second = await transport.register(THERE, 4096, device=2)
    agent = fakes.nixl.made[-1]
    assert agent.kinds[HERE] == ("VRAM", 0)
    assert agent.kinds[THERE] == ("VRAM", 1)
    endpoint.listen()
    for region in (host, first, second):
        await transport.deregister(region)
    await endpoint.close()
    (cuda,) = fakes.loaded
    assert cuda.current_now == [0]
    assert fakes.bare == []
    assert threading.current_thread() is not transport.owner_thread  # whose context it is, not the application's
    await transport.close()
    assert cuda.closed


@pytest.mark.parametrize("method", ["register_memory", "make_agent"])
async def test_memory_that_this_nixl_cannot_move_is_refused_when_it_is_registered(fakes, method, monkeypatch):
    def refuse(agent):
        if method == "make_agent":
            raise TransportError("nixl", "Backend", "UCX_TLS lacks cuda_copy")
        agent.failing["register_memory"] = [nixlBackendError("no")]

    transport = await fakes.make("us@1")
    object.__setattr__(fakes.nixl, "prepare", refuse)
    for _ in range(2):
        with pytest.raises(RegistrationError, match="pinned host memory") as caught:
            await transport.register(HERE, 4096, device=1)
        assert caught.value.status == DEVICE_MEMORY
    object.__setattr__(fakes.nixl, "prepare", lambda agent: None)
    fakes.nixl.made.clear()
    await transport.register(HERE, 4096)  # as host memory: nothing is remembered
    await transport.endpoint("peer@1").metadata()
    assert [agent.settings for agent in fakes.nixl.made] == [None]
    assert all(cuda.closed for cuda in fakes.loaded)


@pytest.mark.parametrize("device", [3, 1000])
async def test_a_gpu_that_is_not_there_is_refused(fakes, device):
    transport = await fakes.make("us@1")
    with pytest.raises(RegistrationError, match="sees 2 GPUs") as caught:
        await transport.register(HERE, 4096, device=device)
    assert caught.value.status == DEVICE_MEMORY
    with pytest.raises(ConfigError, match="CUDA ordinal"):
        await transport.register(HERE, 4096, device=-1)


async def test_the_same_memory_of_a_gpu_registered_twice_is_one_region_counted(fakes):
    transport = await fakes.make("us@1")
    region = await transport.register(HERE, 4096, device=1)
    assert await transport.register(HERE, 4096, device=1) == region
    with pytest.raises(ConfigError):
        await transport.register(HERE, 4096)  # the same bytes are not host memory too
    for _ in range(2):
        await transport.deregister(region)
    with pytest.raises(ConfigError):
        await transport.deregister(region)


def changed(metadata, **fields):
    """Metadata with some fields of its `Blob` replaced: as another process, host or installation would say it."""
    blob = msgspec.msgpack.decode(unwrap_metadata("nixl", metadata), type=Blob)
    return wrap_metadata("nixl", msgspec.msgpack.encode(msgspec.structs.replace(blob, **fields)))


@pytest.mark.parametrize(
    ("tls", "devices", "fields", "lane"),
    [
        (("all", "all"), (1, 1), {}, "cuda_ipc"),
        (("all", "tcp,cuda"), (1, 1), {}, "cuda_ipc"),
        (("^cuda_ipc", "all"), (1, 1), {}, "tcp"),
        (("all", "tcp,cuda_copy"), (1, 1), {}, "tcp"),
        (("all", "all"), (1, 1), {"host": "other/space"}, "tcp"),
        (("all", "all"), (1, 1), {"host": ""}, "tcp"),
        (("all", "all"), (1, 1), {"process": None}, "tcp"),  # one process
        (("all", "all"), (0, 1), {}, "host"),
        (("all", "all"), (1, 0), {}, "host"),
        (("all", "all"), (0, 0), {}, "host"),
    ],
)
async def test_the_lane_is_cuda_ipc_between_two_processes_of_one_host_that_may_use_it(
    fakes, tls, devices, fields, lane, monkeypatch
):
    ends = []
    for name, setting, device in zip(("us@1", "them@1"), tls, devices, strict=True):
        transport = await fakes.make(name, setting)
        await transport.register(4096, 4096)
        if device:
            await transport.register(HERE, 4096, device=device)
        ends.append(transport.endpoint("peer@1"))
    here, there = ends
    fields = {"process": -1} | fields
    if fields["process"] is None:
        del fields["process"]
    assert here.lane == here.host_lane == "unknown"
    await here.connect(changed(await there.metadata(), **fields))
    assert here.host_lane in {"cma", "tcp", "rdma"}
    assert here.lane == (here.host_lane if lane == "host" else lane)
    if lane == "tcp":
        with pytest.raises(TransportError) as caught:
            await here.write([WritePair(Descriptor(HERE, 8, 1), Descriptor(HERE, 8, 1))], b"n")
        assert caught.value.status == NOT_POSTED
        assert not any(agent.handles for agent in fakes.nixl.made)


async def test_a_target_with_memory_of_a_gpu_is_not_fenced_also_formerly(fakes):
    transport = await fakes.make("us@1", "tcp,cuda_copy,cuda_ipc")
    endpoint = transport.endpoint("peer@1")
    region = await transport.register(HERE, 4096, device=1)
    await endpoint.metadata()
    await transport.deregister(region)
    with pytest.raises(FenceUnsupported, match="cuda_ipc"):
        await endpoint.fence_target()
    assert not endpoint.closed
    control = await fakes.make("them@1", "tcp,cuda_copy,cuda_ipc")
    await control.endpoint("peer@1").fence_target()


async def test_metadata_with_a_negative_device_are_refused(fakes):
    here, there = await fakes.make("us@1"), await fakes.make("them@1")
    metadata = await there.endpoint("us@1").metadata()
    with pytest.raises(RegistrationError, match="cannot be read"):
        await here.endpoint("them@1").connect(changed(metadata, regions=[(4096, 8, -1)]))
    await here.endpoint("them@1").connect(changed(metadata, regions=[(4096, 8, 1)]))


async def test_real_nixl_refuses_host_memory_that_is_called_memory_of_a_gpu(monkeypatch):
    """A NIXL that took it would hand host addresses to the GPU, or addresses of a GPU to the kernel."""
    monkeypatch.setattr(nixl_module, "Devices", lambda: Devices(FakeCuda))
    async with Rig("nixl") as rig:
        transport, memory = await rig.transport("us@1"), Memory(1 << 16)
        async with asyncio.timeout(LIMIT_S):
            with pytest.raises(RegistrationError) as caught:
                await transport.register(memory.address, memory.bytes.nbytes, device=1)
        assert caught.value.status == DEVICE_MEMORY
        assert await transport.register(memory.address, memory.bytes.nbytes)


@pytest.mark.parametrize("guard", [{}, {"TLS": "none_such"}, GUARD], ids=["none", "unusable", "guard"])
async def test_memory_of_the_host_moves_under_the_settings_of_agents_with_gpus(guard, monkeypatch):
    """In real NIXL; that it takes settings at all is seen by one that it refuses."""
    make_agent = Nixl.make_agent
    monkeypatch.setattr(Nixl, "make_agent", lambda self, name, settings=None: make_agent(self, name, guard))
    async with Rig("nixl") as rig:
        left, right = await rig.transport("left@1"), await rig.transport("right@1")
        source, destination = await Memory(5 * MIB, 1).register(left), await Memory(5 * MIB).register(right)
        if "TLS" in guard:
            with pytest.raises(TransportError, match="UCX_TLS"):
                await left.endpoint("right@1").metadata()
            return
        a, b = await link(left, right)
        b.endpoint.listen()
        parts = [(0, 1), (1, 7), (8, 4096), (5000, 300_001), (MIB, 4 * MIB)]
        await write(a, [WritePair(source.part(*one), destination.part(*one)) for one in parts], b"n")
        for offset, length_bytes in parts:
            there, here = (memory.bytes[offset : offset + length_bytes] for memory in (destination, source))
            assert np.array_equal(there, here)
