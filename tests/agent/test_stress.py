"""Random requests, cancellations, failures, broken links and restarts, by seed: what must hold whatever happens."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from rig import SENTINEL, RankMemory, Side, cluster

from rdma_kv.agent import Agent
from rdma_kv.config import StagingConfig, Timeouts
from rdma_kv.errors import ClosedError, ErrorCode, LocalProtocolError, PeerLostError, RdmaKvError, TransferAborted
from rdma_kv.messages import Grant, Release
from rdma_kv.topology import ModelSpec, Topology
from rdma_kv.transport.loopback import Fault, LoopbackNetwork, LoopbackTransport, Posting, RandomDelays
from rdma_kv.types import ReplicaId, Role

GQA = ModelSpec.gqa(layers=4, kv_heads=4, head_dim=8, itemsize=4, dtype="float32", fingerprint="toy")
MLA = ModelSpec.mla(layers=4, latent_dim=32, fingerprint="toy")
SHAPES = [(1, 1, "replica"), (2, 2, "replica"), (2, 2, "engine"), (2, 1, "rank"), (4, 2, "rank"), (4, 2, "replica")]
LONG_S, SHORT_S, QUIESCE_S, UNMATCHED_S = 8.0, 0.6, 0.5, 2.0
SLACK_S = 3.0  # of a busy machine


@dataclass
class Outcome:
    """How one call of one agent ended."""

    agent: Agent
    error: BaseException | None
    result: object = None
    pages: list[np.ndarray] = field(
        default_factory=list, repr=False
    )  # of a receive: the agent's pools' pages when it ended


@dataclass
class Request:
    """One key between two replicas, and what shall happen to it."""

    number: int
    prefill: int
    decode: int
    tokens: int
    start: int
    attempt: int
    src: list[int]
    dst: list[int]
    to: bool  # the sender names the decode replica
    sources: list[int]  # that the receiver names; empty for any
    event: str
    sends: list[Outcome] = field(default_factory=list)
    receives: list[Outcome] = field(default_factory=list)


class Faults:
    """Delays for all, and a failure now and then while `left` lasts."""

    def __init__(self, seed: int, fault: Fault | None, left: int) -> None:
        self._delays = RandomDelays(seed, 0.003)
        self._random = random.Random(seed)
        self._fault = fault
        self.left = left

    def __call__(self, posting: Posting) -> Fault:
        if self._fault is not None and self.left and self._random.random() < 0.03:
            self.left -= 1
            return self._fault
        return self._delays(posting)


class Stress:
    """One run. Page tables of requests are disjoint, so that every byte can be accounted for at the end."""

    def __init__(self, c, seed: int, count: int, events: tuple[str, ...], *, long_s: float) -> None:
        self.c = c
        self.random = random.Random(seed)
        self.requests = [self._request(number, events) for number in range(count)]
        self.gate = asyncio.Semaphore(16)
        self.long_s = long_s
        self.last_left: list[object] = []

    def _request(self, number: int, events: tuple[str, ...]) -> Request:
        rnd, c = self.random, self.c
        tokens = rnd.choice([1, 7, 16, 40, 60])
        replicas = list(range(c.prefill.topology.dp))
        prefill = rnd.choice(replicas)
        to = rnd.random() < 0.6
        sources = [prefill]
        if to and rnd.random() < 0.3:
            sources = []
        elif rnd.random() < 0.3:
            sources = rnd.sample(replicas, len(replicas))
        return Request(
            number,
            prefill,
            rnd.randrange(c.decode.topology.dp),
            tokens,
            rnd.choice([0, 0, 0, tokens // 2, tokens]),
            rnd.randrange(3),
            [4 * number + place for place in range(4)],
            [8 * number + place for place in range(8)],
            to,
            sources,
            rnd.choice(events),
        )

    # --- one request ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for request in self.requests:
                group.create_task(self._one(request))

    async def _one(self, request: Request) -> None:
        async with self.gate:
            for memory in self.c.prefill.memory_of(request.prefill):
                memory.fill(request.number, request.src, request.tokens)
            senders = self.c.prefill.agents_of(request.prefill) if request.event != "no send" else []
            receivers = self.c.decode.agents_of(request.decode) if request.event != "no receive" else []
            work = [
                *(self._call(request, a, True) for a in senders),
                *(self._call(request, a, False) for a in receivers),
            ]
            await asyncio.gather(*work)

    async def _call(self, request: Request, agent: Agent, sending: bool) -> None:
        rnd = self.random
        await asyncio.sleep(rnd.choice([0, 0, 0.005, 0.05]) * rnd.random())
        timeout_s = self.long_s if request.event in {"none", "duplicate"} else SHORT_S
        if request.event in {"no send", "no receive", "timeout"}:
            timeout_s = rnd.random() * 0.2 + 0.001
        work = self._send if sending else self._receive
        if request.event == "duplicate":
            again = asyncio.create_task(self._duplicate(work, request, agent))
        task = asyncio.create_task(work(request, agent, timeout_s))
        event = "cancel send" if sending else "cancel receive"
        if request.event == event and rnd.random() < 0.7:
            await asyncio.sleep(rnd.choice([0, 0.002, 0.02, 0.1]) * rnd.random())
            task.cancel()
        done, _ = await asyncio.wait([task], timeout=timeout_s + QUIESCE_S + SLACK_S)
        assert done, f"{request} hangs"
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        outcome = Outcome(agent, error, task.result() if error is None else None)
        if error is not None and not isinstance(error, RdmaKvError | ZeroDivisionError | asyncio.CancelledError):
            raise error
        if sending:
            request.sends.append(outcome)
        else:
            outcome.pages = [memory.array[:, :, request.dst].copy() for memory in self._memory(agent, request.decode)]
            request.receives.append(outcome)
        if request.event == "duplicate":
            await again

    async def _duplicate(self, work, request: Request, agent: Agent) -> None:
        """The same call while the first is live. Where it is refused, the first must not suffer; it may also come first."""
        await asyncio.sleep(0)
        key = (f"k{request.number}", request.prefill if work == self._send else request.decode, request.attempt)
        if any((s.call.key, s.call.replica, s.call.attempt) == key for s in agent._shell.sessions):
            with pytest.raises(LocalProtocolError):
                await work(request, agent, 0.2)

    async def _send(self, request: Request, agent: Agent, timeout_s: float) -> None:
        rnd = self.random
        sending = agent.send(
            f"k{request.number}",
            request.prefill,
            request.src,
            to=ReplicaId("decode", request.decode) if request.to else None,
            tokens=request.tokens,
            attempt=request.attempt,
            timeout_s=timeout_s,
        )
        async with sending as out:
            out.metadata["request"] = request.number
            cuts = sorted({0, request.tokens, *(rnd.randrange(request.tokens + 1) for _ in range(rnd.randrange(3)))})
            parts = [(cut, layers) for cut in itertools.pairwise(cuts) for layers in ((0, 1), (1, 4))]
            rnd.shuffle(parts)
            for tokens, layers in parts:
                if rnd.random() < 0.3:
                    ready = asyncio.Event()
                    asyncio.get_running_loop().call_later(0.01 * rnd.random(), ready.set)
                    await out.push(tokens, layers, ready=ready)
                else:
                    await out.push(tokens, layers)
                if request.event == "raise" and rnd.random() < 0.5:
                    raise ZeroDivisionError

    async def _receive(self, request: Request, agent: Agent, timeout_s: float) -> object:
        return await agent.receive(
            f"k{request.number}",
            request.decode,
            request.dst,
            source=[ReplicaId("prefill", source) for source in request.sources] or None,
            tokens=(request.start, request.tokens),
            attempt=request.attempt,
            timeout_s=timeout_s,
        )

    # --- what breaks ---------------------------------------------------------------------------------------------------

    def agents(self) -> list[Agent]:
        return [*self.c.prefill.agents, *self.c.decode.agents]

    async def break_links(self, times: int) -> None:
        for _ in range(times):
            await asyncio.sleep(0.1 * self.random.random())
            connections = [x for agent in self.agents() for x in agent._shell.links._connections.open]
            if connections:
                self.random.choice(connections)._writer.transport.abort()

    async def restart(self, times: int) -> None:
        """Close an agent and start its next incarnation, at another port."""
        for _ in range(times):
            await asyncio.sleep(0.2 * self.random.random())
            side = self.random.choice([self.c.prefill, self.c.decode])
            place = self.random.randrange(len(side.agents))
            old = side.agents[place]
            async with asyncio.timeout(QUIESCE_S + SLACK_S):
                await old.close()
            new = Agent(old.config, self.c.registry, transport=lambda name: LoopbackTransport(self.c.network, name))
            await new.start()
            was, now = (f'"127.0.0.1:{agent.address[1]}"' for agent in (old, new))
            self.c.registry_path.write_text(self.c.registry_path.read_text().replace(was, now))
            for owned in new.config.owns:
                memory = side.memory[0, owned.rank]
                new.register_pool(memory.layout, memory.array, replica=owned.replica, rank=owned.rank)
            side.agents[place] = new

    # --- what must hold ------------------------------------------------------------------------------------------------

    def _memory(self, agent: Agent, replica: int) -> list[RankMemory]:
        return [memory for memory in self.c.decode.memory_of(replica) if memory.rank in agent.config.ranks]

    def check(self, *, quiet: bool) -> None:
        """Bytes and outcomes. `quiet`: nothing has failed but what a request's own event explains."""
        used: dict[int, set[int]] = {replica: set() for replica in range(self.c.decode.topology.dp)}
        for request in self.requests:
            used[request.decode].update(request.dst)
            for outcome in request.receives:
                for memory, before in zip(self._memory(outcome.agent, request.decode), outcome.pages, strict=True):
                    now = memory.array[:, :, request.dst]
                    np.testing.assert_array_equal(now, before, err_msg=f"written after its end: {request}")
                    self._check_pages(request, memory, complete=outcome.error is None)
                if outcome.error is None and outcome.result.received_bytes:
                    assert outcome.result.metadata == {"request": request.number}
                    assert outcome.result.tokens == {"kv": (request.start, request.tokens)}
                    assert outcome.result.source == ReplicaId("prefill", request.prefill)
            errors = [outcome.error for outcome in (*request.sends, *request.receives)]
            for error in filter(None, errors):  # whatever broke, nobody may have broken the protocol
                told = {getattr(error, "cause", None), getattr(error, "code", None)}
                assert not told & {ErrorCode.REMOTE_PROTOCOL, ErrorCode.INCOMPATIBLE_PEER}, (request, errors)
            if quiet and request.event in {"none", "duplicate"}:
                assert not any(errors), (request, errors)
            if request.sends and not any(s.error for s in request.sends) and request.event != "cancel receive":
                assert not any(r.error for r in request.receives), (request, errors)
        for replica, pages in used.items():
            for memory in self.c.decode.memory_of(replica):
                others = [page for page in range(memory.layout.num_pages) if page not in pages]
                assert (memory.array[:, :, others] == SENTINEL).all()

    @staticmethod
    def _check_pages(request: Request, memory: RankMemory, *, complete: bool) -> None:
        """Places of the request hold the right bytes or nothing; all others nothing."""
        if complete:
            memory.check(request.number, request.dst, request.start, request.tokens)
        places = list(range(len(request.dst)))
        right = dataclasses.replace(memory, array=np.full_like(memory.array[:, :, places], SENTINEL))
        right.fill(request.number, places, request.tokens)
        for position in range(request.start):
            right.rows(position // memory.layout.page_size, position % memory.layout.page_size)[:] = SENTINEL
        now = memory.array[:, :, request.dst]
        assert ((now == right.array) | (now == SENTINEL)).all(), request

    async def settle(self, *, quiet: bool, unmatched: bool = True) -> None:
        """Wait for the ends that come by themselves; then nothing may be left, or only slots that are held by reason."""
        async with asyncio.timeout(QUIESCE_S + SLACK_S + (UNMATCHED_S + 1.0 if unmatched else 0.0)):
            while left := self._left(quiet=quiet, unmatched=unmatched):
                self.last_left = left
                await asyncio.sleep(0.005)

    def _left(self, *, quiet: bool, unmatched: bool) -> list[object]:
        left: list[object] = []
        for agent in self.agents():
            stats = agent.stats()
            held = stats["slots_held"]
            assert stats["slots_free"] + sum(held.values()) + stats["slots_retired"] == stats["slots_total"]
            if quiet and (held or stats["transfers"]):
                left.append(stats)
            if any(name.rsplit(":", 1)[1] not in {"unproven"} for name in held):
                left.append(stats)
            machines = [entry.machine for entry in agent._shell.mover._transfers]
            if stats["tasks"] or agent._shell.tasks or agent._shell.sessions or any(not m.ended for m in machines):
                left.append(stats)
            if unmatched and stats["unmatched"]:
                left.append(stats)
        return left

    async def afterwards(self) -> None:
        """Every pair of replicas still works, one after the other."""
        number = len(self.requests)
        for prefill in range(self.c.prefill.topology.dp):
            for decode in range(self.c.decode.topology.dp):
                request = Request(
                    number, prefill, decode, 60, 0, 0, [4 * number + n for n in range(4)], [8 * number + n for n in range(8)],
                    True, [prefill], "none",
                )  # fmt: skip
                number += 1
                self.requests.append(request)
                await self._one(request)
                errors = [outcome.error for outcome in (*request.sends, *request.receives)]
                assert not any(errors), (request, errors, [agent.stats() for agent in self.agents()])


EVENTS = ("none",) * 6 + ("cancel send", "cancel receive", "raise", "timeout", "no send", "no receive", "duplicate")
MODES = {"quiet": None, "post": Fault(fail_to_post=True), "break": Fault(fail_after_bytes=100), "links": None}


async def stress(tmp_path, caplog, seed: int, mode: str, count: int) -> None:
    rnd = random.Random(1000 * seed + len(mode))
    shapes = [rnd.choice(SHAPES) for _ in range(2)]
    model = rnd.choice([GQA, GQA, MLA])
    pages = 8 * (count + 5)
    prefill, decode = (
        Side(
            role.value,
            role,
            Topology.with_layers(4, tp=tp, dp=dp),
            agents_by=agents_by,
            pages=pages,
            page_size=16 if role is Role.PREFILL else 8,
            kind=rnd.choice(["nhd", "hnd"]),
        )
        for role, (tp, dp, agents_by) in zip((Role.PREFILL, Role.DECODE), shapes, strict=True)
    )
    slots = rnd.choice([2, 4, 9])
    network = LoopbackNetwork(faults=Faults(seed, MODES[mode], 1000 if mode == "post" else 4))
    timeouts = Timeouts(quiesce=QUIESCE_S, unmatched=UNMATCHED_S, retry=0.05, connect=2.0)
    slot_bytes = rnd.choice([4096, 1 << 16])
    before = asyncio.all_tasks()
    async with cluster(
        tmp_path, model, prefill, decode, network=network, staging=StagingConfig(slots, slot_bytes), timeouts=timeouts
    ) as c:
        run = Stress(c, seed, count, EVENTS, long_s=1.0 if mode == "links" else LONG_S)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(run.run())
                if mode == "links":
                    group.create_task(run.break_links(6))
                    group.create_task(run.restart(3))
            try:
                await run.settle(quiet=True, unmatched=mode == "quiet")
            except TimeoutError:
                pytest.fail(f"left: {run.last_left}")
            network.faults.left = 0
            await run.afterwards()
            run.check(quiet=mode == "quiet")
        finally:
            for agent in run.agents():
                await agent.close()
        left = {task for task in asyncio.all_tasks() - before if task is not asyncio.current_task()}
        assert not left, left
    gc.collect()
    bad = [record for record in caplog.records if record.levelname == "ERROR"]
    assert not bad, [(record.getMessage(), record.exc_info) for record in bad]


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in (1, 2))])
async def test_whatever_happens_ends_and_leaves_nothing(tmp_path, caplog, seed, mode):
    await stress(tmp_path, caplog, seed, mode, 40)


# --- races that the runs above, or a reader, have found ----------------------------------------------------------------


def sides(dp: int = 1) -> list[Side]:
    return [Side(role.value, role, Topology.with_layers(4, tp=dp, dp=dp)) for role in (Role.PREFILL, Role.DECODE)]


POOL = StagingConfig(8, 1 << 16)
PAGES, TOKENS = [5, 2, 9], 40


def receive(
    c, replica: int = 0, *, attempt: int = 0, source: ReplicaId | None = ReplicaId("prefill", 0), timeout_s=5.0
):
    agent = c.decode.agents[replica]
    return agent.receive("k", replica, PAGES, source=source, tokens=TOKENS, attempt=attempt, timeout_s=timeout_s)


async def send(c, replica: int = 0, *, attempt: int = 0) -> None:
    to = ReplicaId("decode", replica)
    sending = c.prefill.agents[replica].send("k", replica, PAGES, to=to, tokens=TOKENS, attempt=attempt, timeout_s=5.0)
    async with sending as out:
        await out.push()


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0)


async def test_a_refused_expect_is_told_by_its_whole_name(tmp_path):
    timeouts = Timeouts(unmatched=0.1, quiesce=1.0)
    async with cluster(tmp_path, GQA, *sides(2), staging=POOL, timeouts=timeouts) as c:
        await c.move(1, 1, 1, PAGES, PAGES, TOKENS)
        with pytest.raises(TransferAborted, match="has asked for this key"):
            await receive(c, 1, attempt=2, source=ReplicaId("prefill", 1))
        assert c.decode.agents[1].stats()["counters"]["slots_ahead"] == 1
        c.check_nothing_leaked()


async def test_who_gives_up_while_dialing_breaks_no_transfer_of_the_peer(tmp_path):
    async with cluster(tmp_path, GQA, *sides()) as c:
        links = c.decode.agents[0]._shell.links
        dials = links._dialer._dials
        asking = asyncio.create_task(links.peer(c.registry.engine("prefill").agents[0]))
        await until(lambda: any(dial.greeting for dial in dials.values()))
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await c.move(1, 0, 0, PAGES, PAGES, TOKENS)
        assert c.prefill.agents[0].stats()["handshakes"] == 1
        assert not dials


async def test_a_receive_that_gave_slots_ahead_can_be_repeated_after_a_lost_link(tmp_path):
    async with cluster(tmp_path, GQA, *sides(), staging=POOL) as c:
        await c.move(1, 0, 0, PAGES, PAGES, TOKENS)
        receiving = asyncio.create_task(receive(c))
        await until(lambda: c.prefill.agents[0].stats()["unmatched"])
        (peer,) = c.decode.agents[0]._shell.links.peers
        peer.connection._writer.transport.abort()
        with pytest.raises(PeerLostError):
            await receiving
        await until(lambda: not any(agent.stats()["links"] for agent in (*c.prefill.agents, *c.decode.agents)))
        await asyncio.gather(send(c), receive(c))
        assert c.decode.agents[0].stats()["transfers"] == 0


async def test_receives_of_one_key_must_not_share_a_source(tmp_path):
    async with cluster(tmp_path, GQA, *sides()) as c:
        receiving = asyncio.create_task(receive(c))
        await asyncio.sleep(0)
        with pytest.raises(LocalProtocolError):
            await receive(c, source=None)
        await asyncio.gather(send(c), receiving)


async def test_a_bug_in_a_transport_ends_the_transfer(tmp_path):
    async with cluster(tmp_path, GQA, *sides()) as c:
        await c.move(1, 0, 0, PAGES, PAGES, TOKENS)
        (peer,) = c.prefill.agents[0]._shell.links.peers
        peer.endpoint.write = lambda pairs, note: 1 / 0
        async with asyncio.timeout(3):
            outcomes = await asyncio.gather(send(c), receive(c), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [LocalProtocolError, TransferAborted]


async def test_a_grant_for_a_transfer_that_has_ended_goes_back(tmp_path):
    async with cluster(tmp_path, GQA, *sides()) as c:
        await c.move(1, 0, 0, PAGES, PAGES, TOKENS)
        (peer,) = c.prefill.agents[0]._shell.links.peers
        sent: list[object] = []
        peer.send = sent.append
        c.prefill.agents[0]._shell.mover.on_message(peer, Grant(peer.numbers.given, [(0, TOKENS)], [(3, 7)]))
        assert sent == [Release(peer.numbers.given, [(3, 7)])]
        del peer.send


async def test_a_dial_under_way_follows_the_registry(tmp_path):
    """An agent restarts at another port while somebody dials the old one."""
    async with cluster(tmp_path, GQA, *sides()) as c:
        old = c.prefill.agents[0]
        await old.close()
        receiving = asyncio.create_task(receive(c))
        await asyncio.sleep(0.05)
        async with Agent(old.config, c.registry, transport=lambda name: LoopbackTransport(c.network, name)) as new:
            was, now = (f'"127.0.0.1:{agent.address[1]}"' for agent in (old, new))
            c.registry_path.write_text(c.registry_path.read_text().replace(was, now))
            pool = c.prefill.memory[0, 0]
            new.register_pool(pool.layout, pool.array, replica=0, rank=0)
            c.prefill.agents[0] = new
            await until(lambda: new.stats()["unmatched"])
            await asyncio.gather(send(c), receiving)


async def test_a_send_that_is_entered_after_the_close_ends_at_once(tmp_path):
    async with cluster(tmp_path, GQA, *sides()) as c:
        sending = c.prefill.agents[0].send("k", 0, PAGES, to=None, tokens=TOKENS)
        await c.prefill.agents[0].close()
        async with asyncio.timeout(1):
            with pytest.raises(ClosedError):
                async with sending:
                    pass
