"""Data planes are started once, when they are needed; failures and ends reach everybody who waits."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rdma_kv.errors import ClosedError, ConfigError, RegistrationError, TransportError
from rdma_kv.transport.loopback import LoopbackNetwork, LoopbackTransport
from rdma_kv.transport.planes import Planes
from rdma_kv.types import Region

STAGING = np.zeros(4096, np.uint8)
WHERE = (STAGING.ctypes.data, STAGING.nbytes)


class Controlled(LoopbackTransport):
    """Loopback whose start waits for `go`, or raises; it says what happened to it."""

    def __init__(self, makers: Makers, name: str) -> None:
        super().__init__(makers.network, name)
        self.makers = makers
        self.closed = 0
        self.on_devices: list[Region] = []

    async def start(self) -> None:
        self.makers.starts += 1
        await self.makers.go.wait()
        if self.makers.error is not None:
            raise self.makers.error
        await super().start()

    async def register(self, address: int, length_bytes: int, *, device: int = 0):
        if self.makers.refusal is not None:
            raise self.makers.refusal
        if device and self.makers.takes_devices:
            self.on_devices.append(Region(address, length_bytes, device))
            return self.on_devices[-1]
        return await super().register(address, length_bytes, device=device)

    async def close(self) -> None:
        self.closed += 1
        await super().close()


class Makers:
    """Makes `Controlled` transports, and keeps them."""

    def __init__(self) -> None:
        self.network = LoopbackNetwork()
        self.go = asyncio.Event()
        self.go.set()
        self.error: Exception | None = None
        self.refusal: Exception | None = None
        self.takes_devices = False
        self.starts = 0
        self.made: list[Controlled] = []

    def __call__(self, name: str) -> Controlled:
        self.made.append(Controlled(self, name))
        return self.made[-1]


@pytest.fixture
async def two():
    """An agent's planes `a` and `b`, staging told; nothing has started."""
    makers = {"a": Makers(), "b": Makers()}
    planes = Planes("agent@1", makers)
    await planes.start([Region(*WHERE)])
    yield planes, makers["a"], makers["b"]
    makers["a"].go.set()
    await planes.close()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_of_several_none_is_started_before_it_is_needed(two):
    planes, a, b = two
    assert planes.offered == ("a", "b")
    assert (a.made, b.made) == ([], [])
    assert planes.states() == {"a": "waiting", "b": "waiting"}
    plane = await planes.plane("b")
    assert registered(plane.transport) == {WHERE}
    assert not plane.takes_devices
    assert plane.transport is b.made[0]
    assert a.made == []
    assert planes.states() == {"a": "waiting", "b": "started"}
    assert await planes.plane("b") is plane


async def test_the_only_one_is_started_at_once_and_its_error_is_raised():
    makers = Makers()
    planes = Planes("agent@1", {"a": makers})
    await planes.start([Region(*WHERE)])
    assert planes.states() == {"a": "started"}
    await planes.close()
    makers.error = ConfigError("transport", "is not there")
    with pytest.raises(ConfigError):
        await Planes("agent@1", {"a": makers}).start([Region(*WHERE)])


async def test_all_who_want_it_share_one_start(two):
    planes, a, _ = two
    a.go.clear()
    planes.prepare("a")
    waiting = [asyncio.create_task(planes.plane("a")) for _ in range(8)]
    await turns()
    assert planes.states()["a"] == "starting"
    assert not any(task.done() for task in waiting)
    a.go.set()
    assert len({id(plane) for plane in await asyncio.gather(*waiting)}) == 1
    assert a.starts == len(a.made) == 1


async def test_cancelling_one_leaves_the_start_to_the_others(two):
    planes, a, _ = two
    a.go.clear()
    first, second = (asyncio.create_task(planes.plane("a")) for _ in range(2))
    await turns()
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    a.go.set()
    assert (await second).transport is a.made[0]
    assert a.starts == 1


async def test_cancelling_all_leaves_the_start_to_the_next(two):
    planes, a, _ = two
    a.go.clear()
    only = asyncio.create_task(planes.plane("a"))
    await turns()
    only.cancel()
    await asyncio.wait([only])
    a.go.set()
    await planes.plane("a")
    assert a.starts == 1


@pytest.mark.parametrize("where", ["start", "register"])
async def test_a_failure_reaches_all_closes_what_was_made_and_is_tried_again(two, where):
    planes, a, _ = two
    a.go.clear()
    failure = RegistrationError("a", "refused", "not today")
    if where == "start":
        a.error = failure
    else:
        a.refusal = failure
    waiting = [asyncio.create_task(planes.plane("a")) for _ in range(3)]
    await turns()
    a.go.set()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert outcomes == [failure] * 3
    assert planes.states() == {"a": "failed", "b": "waiting"}
    assert [made.closed for made in a.made] == [1]
    a.error = a.refusal = None
    assert (await planes.plane("a")).transport is a.made[1]
    assert planes.states()["a"] == "started"


async def test_an_error_that_is_not_ours_comes_out_typed(two):
    planes, a, _ = two
    a.error = OSError("no such library")
    with pytest.raises(TransportError, match="no such library") as caught:
        await planes.plane("a")
    assert (caught.value.backend, caught.value.status) == ("a", "start")
    assert caught.value.__cause__ is a.error


async def test_a_start_that_nobody_waits_for_may_fail_in_silence(two, caplog):
    planes, a, _ = two
    a.error = OSError("no such library")
    planes.prepare("a")
    await turns(20)
    assert planes.states()["a"] == "failed"
    assert not caplog.records


async def test_close_ends_a_start_under_way_and_closes_all_that_started(two):
    planes, a, b = two
    await planes.plane("b")
    a.go.clear()
    waiting = asyncio.create_task(planes.plane("a"))
    await turns()
    closing = asyncio.create_task(planes.close())
    await turns()
    assert not closing.done()
    a.go.set()
    await closing
    with pytest.raises(ClosedError):
        await waiting
    assert [made.closed for made in (*a.made, *b.made)] == [1, 1]
    assert a.network._names == b.network._names == set()
    await planes.close()


async def test_nothing_starts_after_the_close():
    makers = Makers()
    planes = Planes("agent@1", {"a": makers, "b": makers})
    await planes.start([Region(*WHERE)])
    await planes.close()
    planes.prepare("a")
    with pytest.raises(ClosedError):
        await planes.plane("a")
    assert makers.made == []


async def test_one_that_cannot_close_does_not_keep_the_others_open(monkeypatch):
    a, b = Makers(), Makers()
    planes = Planes("agent@1", {"a": a, "b": b})
    await planes.start([Region(*WHERE)])
    await planes.plane("a")
    await planes.plane("b")

    async def stuck(self) -> None:
        raise TransportError("a", "not-ended", "stuck")

    with monkeypatch.context() as patch:
        patch.setattr(a.made[0], "close", stuck.__get__(a.made[0]))
        with pytest.raises(TransportError, match="stuck"):
            await planes.close()
    assert b.made[0].closed == 1
    await a.made[0].close()


MORE = np.zeros(4096, np.uint8)
ALSO = (MORE.ctypes.data, MORE.nbytes)


def registered(transport: Controlled) -> set[tuple[int, int]]:
    return {(region.address, region.length_bytes) for region in transport._regions}


async def test_staging_that_is_added_is_registered_everywhere_now_and_later(two):
    planes, a, b = two
    await planes.plane("a")
    await planes.add([Region(*ALSO)])
    assert registered(a.made[0]) == {WHERE, ALSO}
    await planes.plane("b")
    assert registered(b.made[0]) == {WHERE, ALSO}


async def test_a_start_under_way_has_what_was_added_meanwhile(two):
    planes, a, _ = two
    a.go.clear()
    planes.prepare("a")
    await turns()
    adding = asyncio.create_task(planes.add([Region(*ALSO)]))
    await turns()
    assert not adding.done(), "or it might be told to peers before it can be written"
    a.go.set()
    await adding
    assert registered(a.made[0]) == {WHERE, ALSO}


async def test_staging_that_is_refused_is_not_given_to_later_starts(two):
    planes, a, b = two
    await planes.plane("a")
    a.refusal = RegistrationError("a", "refused", "no more")
    with pytest.raises(RegistrationError):
        await planes.add([Region(*ALSO)])
    await planes.plane("b")
    assert registered(b.made[0]) == {WHERE}


ON_GPU = Region(0x7F00_0000_0000, 4096, device=1)
MORE_ON_GPU = Region(0x7F00_0001_0000, 4096, device=1)


async def on_gpu(a: Makers, b: Makers) -> Planes:
    planes = Planes("agent@1", {"a": a, "b": b})
    await planes.start([ON_GPU, Region(*WHERE)])
    return planes


async def test_with_memory_of_a_gpu_all_start_and_say_who_takes_it():
    a, b = Makers(), Makers()
    b.takes_devices = True
    planes = await on_gpu(a, b)
    assert planes.states() == {"a": "started", "b": "started"}
    assert planes.devices == ("b",)
    assert registered(a.made[0]) == registered(b.made[0]) == {WHERE}, "host memory goes to both"
    assert b.made[0].on_devices == [ON_GPU]
    await planes.add([MORE_ON_GPU, Region(*ALSO)])
    assert registered(a.made[0]) == {WHERE, ALSO}
    assert b.made[0].on_devices == [ON_GPU, MORE_ON_GPU]
    await planes.close()


async def test_with_memory_of_a_gpu_one_that_cannot_start_is_not_offered():
    a, b = Makers(), Makers()
    a.error = TransportError("a", "start", "no such library")
    planes = await on_gpu(a, b)
    assert planes.offered == ("b",)
    await planes.close()


async def test_with_memory_of_a_gpu_none_that_can_start_is_an_error():
    a, b = Makers(), Makers()
    a.error = b.error = TransportError("a", "start", "no such library")
    with pytest.raises(TransportError, match="no such library"):
        await on_gpu(a, b)


async def test_memory_of_a_gpu_refused_for_another_reason_than_that_is_an_error():
    a, b = Makers(), Makers()
    a.refusal = b.refusal = RegistrationError("a", "NO_MEMORY", "no more")
    with pytest.raises(RegistrationError, match="no more"):
        await on_gpu(a, b)


async def test_a_cancelled_agent_start_does_not_hang_with_memory_of_a_gpu():
    a, b = Makers(), Makers()
    a.go.clear()
    planes = Planes("agent@1", {"a": a, "b": b})
    starting = asyncio.create_task(planes.start([ON_GPU, Region(*WHERE)]))
    await turns()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    a.go.set()
    await planes.close()
    assert [made.closed for made in (*a.made, *b.made)] == [1, 1]
