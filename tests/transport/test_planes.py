"""Data planes are started once, when they are needed; failures and ends reach everybody who waits."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rdma_kv.errors import ClosedError, ConfigError, RegistrationError, TransportError
from rdma_kv.transport.loopback import LoopbackNetwork, LoopbackTransport
from rdma_kv.transport.planes import Planes

STAGING = np.zeros(4096, np.uint8)
WHERE = (STAGING.ctypes.data, STAGING.nbytes)


class Controlled(LoopbackTransport):
    """Loopback whose start waits for `go`, or raises; it says what happened to it."""

    def __init__(self, makers: Makers, name: str) -> None:
        super().__init__(makers.network, name)
        self.makers = makers
        self.closed = 0

    async def start(self) -> None:
        self.makers.starts += 1
        await self.makers.go.wait()
        if self.makers.error is not None:
            raise self.makers.error
        await super().start()

    async def register(self, address: int, length_bytes: int):
        if self.makers.refusal is not None:
            raise self.makers.refusal
        return await super().register(address, length_bytes)

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
    await planes.start(*WHERE)
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
    assert (plane.staging.address, plane.staging.length_bytes) == WHERE
    assert plane.transport is b.made[0]
    assert a.made == []
    assert planes.states() == {"a": "waiting", "b": "started"}
    assert await planes.plane("b") is plane


async def test_the_only_one_is_started_at_once_and_its_error_is_raised():
    makers = Makers()
    planes = Planes("agent@1", {"a": makers})
    await planes.start(*WHERE)
    assert planes.states() == {"a": "started"}
    await planes.close()
    makers.error = ConfigError("transport", "is not there")
    with pytest.raises(ConfigError):
        await Planes("agent@1", {"a": makers}).start(*WHERE)


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
    await planes.start(*WHERE)
    await planes.close()
    planes.prepare("a")
    with pytest.raises(ClosedError):
        await planes.plane("a")
    assert makers.made == []


async def test_one_that_cannot_close_does_not_keep_the_others_open(monkeypatch):
    a, b = Makers(), Makers()
    planes = Planes("agent@1", {"a": a, "b": b})
    await planes.start(*WHERE)
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
    await planes.add(*ALSO)
    assert registered(a.made[0]) == {WHERE, ALSO}
    assert (await planes.plane("a")).staging.address == WHERE[0]
    await planes.plane("b")
    assert registered(b.made[0]) == {WHERE, ALSO}


async def test_a_start_under_way_has_what_was_added_meanwhile(two):
    planes, a, _ = two
    a.go.clear()
    planes.prepare("a")
    await turns()
    adding = asyncio.create_task(planes.add(*ALSO))
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
        await planes.add(*ALSO)
    await planes.plane("b")
    assert registered(b.made[0]) == {WHERE}
