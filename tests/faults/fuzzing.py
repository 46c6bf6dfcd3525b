"""Frames that no honest peer sends, against the border, against the mover, and over sockets against living agents.

What must hold: whatever comes ends in a message, or in `RemoteProtocolError` (a typed refusal of metadata); agents stay up,
a healthy peer beside the attacker goes on with every byte right, memory and unmatched messages stay bounded, and nothing
is left when the attacker is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from frames import Spoiler, blobs
from rig import Cluster, Side, cluster

from rdma_kv.agent import Agent
from rdma_kv.config import Limits, StagingConfig, Timeouts
from rdma_kv.errors import RdmaKvError, RegistrationError, RemoteProtocolError, TransportError
from rdma_kv.messages import FRAME_HEADER, Notification, decode, decode_notification, encode
from rdma_kv.peer import Numbers, Peer
from rdma_kv.protocol.link import Identity
from rdma_kv.topology import ModelSpec, Topology
from rdma_kv.transport.base import unwrap_metadata, wrap_metadata
from rdma_kv.transport.loopback import LoopbackNetwork, LoopbackTransport
from rdma_kv.types import ReplicaId, Role

MODEL = ModelSpec.gqa(layers=2, kv_heads=2, head_dim=8, itemsize=4, dtype="float32", fingerprint="toy")
GROWTH_BYTES = 8 << 20  # of Python's memory over a whole run: unmatched messages are bounded by count, and small here
_TIMEOUTS = Timeouts(quiesce=0.3, connect=2.0, retry=0.05, unmatched=1.0)
_KEYS = ("k0", "k1", "k2")
_BATCH = 64  # frames between two turns of the loop


@dataclass
class FuzzReport:
    """Counts of one run; `problems` is empty where all is well."""

    seed: int
    frames: Counter[str] = field(default_factory=Counter)  # by where they went
    refused: Counter[str] = field(default_factory=Counter)
    healthy_transfers: int = 0
    growth_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, Any]:
        return {
            "ok": self.ok,
            "seed": self.seed,
            "frames": dict(self.frames),
            "refused": dict(self.refused),
            "healthy_transfers": self.healthy_transfers,
            "growth_bytes": self.growth_bytes,
            "problems": self.problems[:20],
        }


def fuzz_border(seed: int, count: int, report: FuzzReport) -> None:
    """Bodies of frames and of notifications to the decoders."""
    spoiler = Spoiler(seed)
    for number in range(count):
        body = spoiler.body()
        into: Callable[[str, bytes], object] = decode
        if number % 4 == 0:
            into, body = decode_notification, _notification(spoiler)
        report.frames["border"] += 1
        try:
            into("fuzz", body)
        except RemoteProtocolError:
            report.refused["border"] += 1
        except Exception as exc:  # noqa: BLE001 - what is looked for
            report.problems.append(f"seed {seed}, frame {number} at the border: {exc!r} of {body[:80].hex()}")


def _notification(spoiler: Spoiler) -> bytes:
    valid = msgspec.msgpack.encode(spoiler.message(Notification))
    return valid if spoiler.random.random() < 0.3 else spoiler.bytes_of(valid)


def fuzz_metadata(seed: int, count: int, report: FuzzReport) -> None:
    """Metadata blobs to the envelope of every transport, and to what parses its inside."""
    from rdma_kv.transport import loopback, ucx_metadata

    spoiler = Spoiler(seed)
    inside: dict[str, tuple[Callable[[bytes], object], bytes]] = {
        "loopback": (loopback._decode, msgspec.msgpack.encode(loopback._Blob("a#0", [(4096, 4096)]))),
        "ucx": (
            ucx_metadata.decode,
            msgspec.msgpack.encode(ucx_metadata.Blob("a#0", [(4096, 64, 0)], [b"k" * 9], b"a" * 60, "h", ["tcp"])),
        ),
    }
    for backend in ("loopback", "nixl", "ucx"):
        parse, body = inside.get(backend, (None, b"opaque" * 20))
        for number, blob in enumerate(blobs(wrap_metadata(backend, body), spoiler, count)):
            report.frames["metadata"] += 1
            _expect_refusal(
                report, f"seed {seed}, envelope {number}", partial(unwrap_metadata, backend, blob), sure=True
            )
        if parse is None:
            continue
        for number, blob in enumerate(blobs(body, spoiler, count)):  # a right checksum over a spoilt inside
            report.frames["metadata"] += 1
            wrapped = wrap_metadata(backend, blob)
            _expect_refusal(report, f"seed {seed}, {backend} {number}", partial(_parse, parse, backend, wrapped))


def _parse(parse: Callable[[bytes], object], backend: str, wrapped: bytes) -> object:
    return parse(unwrap_metadata(backend, wrapped))


def _expect_refusal(report: FuzzReport, where: str, parse: Callable[[], object], *, sure: bool = False) -> None:
    try:
        parse()
    except RegistrationError:
        report.refused["metadata"] += 1
    except Exception as exc:  # noqa: BLE001 - what is looked for
        report.problems.append(f"{where}: {exc!r}")
    else:
        if sure:
            report.problems.append(f"{where}: a damaged blob was taken")


# --- living agents ------------------------------------------------------------------------------------------------------


async def fuzz_agents(folder: Path, seed: int, count: int, report: FuzzReport) -> None:
    """`count` frames to living agents: one in eight over sockets, the rest straight into the movers."""
    sides = [
        Side(role.value, role, Topology.with_layers(2, tp=2, dp=2), pages=64) for role in (Role.PREFILL, Role.DECODE)
    ]
    network = LoopbackNetwork()
    async with cluster(
        folder, MODEL, *sides, network=network, timeouts=_TIMEOUTS, staging=StagingConfig(8, 1 << 14)
    ) as c:
        attackers = []
        for side in sides:
            attackers.append(await side.agents[1]._identity())
            await side.agents[1].close()
        ended = asyncio.Event()
        with _problems_logged(report):
            healthy = asyncio.create_task(_healthy(c, ended, report))
            try:
                for side, identity in zip(sides, reversed(attackers), strict=True):
                    attack = _Attack(c, side.agents[0], identity, seed, report)
                    await attack.metadata(min(200, count // 10))
                    await attack.over_sockets(count // 16)
                    await attack.into_the_mover(count // 2 - count // 16)
                    await attack.gone()
            finally:
                ended.set()
                await healthy
        for agent in (side.agents[0] for side in sides):
            stats = agent.stats()
            if (
                stats["slots_free"] != stats["slots_total"]
                or stats["transfers"]
                or stats["unmatched"]
                or stats["tasks"]
            ):
                report.problems.append(f"seed {seed}: left behind: {stats}")
        for side in sides:
            del side.agents[1:]


@contextlib.contextmanager
def _problems_logged(report: FuzzReport) -> Iterator[None]:
    """What an agent reports as a bug of its own is a problem of the run."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            report.problems.append(f"seed {report.seed}: logged: {record.getMessage()} {record.exc_info}")

    handler = Handler(logging.ERROR)
    for name in ("rdma_kv", "asyncio"):
        logging.getLogger(name).addHandler(handler)
    try:
        yield
    finally:
        for name in ("rdma_kv", "asyncio"):
            logging.getLogger(name).removeHandler(handler)


async def _healthy(c: Cluster, ended: asyncio.Event, report: FuzzReport) -> None:
    """A peer that behaves, beside the attacker: every transfer arrives, every byte right."""
    number = 0
    while not ended.is_set():
        try:
            await c.move(number % 200, 0, 0, [1, 2, 3], [4, 5, 6], 40, key=f"healthy-{number}")
        except Exception as exc:  # noqa: BLE001 - told
            report.problems.append(
                f"seed {report.seed}: a healthy transfer failed: {exc!r} {getattr(exc, 'exceptions', '')}"
            )
            return
        number += 1
        report.healthy_transfers += 1
        await asyncio.sleep(0.002)


class _Attack:
    """A peer with a right name and nothing else right, against one agent."""

    def __init__(self, c: Cluster, agent: Agent, identity: Identity, seed: int, report: FuzzReport) -> None:
        self._c, self._agent, self._identity, self._report = c, agent, identity, report
        self._seed = seed
        prefill = agent.config.sending
        route = agent._shell.route("k0", 0, c.registry.engine(identity.id.engine), 1)
        own, other = ("prefill_replica", "decode_replica") if prefill else ("decode_replica", "prefill_replica")
        self._spoiler = Spoiler(
            seed + prefill,
            {
                "key": _KEYS,
                "digest": [route.digest],
                own: [0],
                other: [1, 1, 0],
                "attempt": [0, 0, 1],
                "transfer": range(4),
                "tokens": [[(0, 40)]],
                "available": [[(0, 40)], [(0, 16)]],
                "ranges": [[(0, 40)]],
                "slots": [[], [(0, 1)], [(3, 7), (3, 8)]],
                "grants": [[], [(1, 1)]],
                "timeout_ms": [50],
                "boxes": range(3),
                "metadata": [b"", b"RKVM", {}],
            },
        )
        self._calls: set[asyncio.Task[None]] = set()

    async def metadata(self, count: int) -> None:
        """Spoilt blobs to an endpoint: refused, and the good one works afterwards."""
        async with contextlib.AsyncExitStack() as stack:
            transports = []
            for name in ("blob-a", "blob-b"):
                transport = LoopbackTransport(self._c.network, name)
                await transport.start()
                stack.push_async_callback(transport.close)
                transports.append(transport)
            left, right = transports[0].endpoint("blob-b"), transports[1].endpoint("blob-a")
            good = await right.metadata()
            for number, blob in enumerate(blobs(good, self._spoiler, count)):
                self._report.frames["connect"] += 1
                try:
                    await left.connect(blob)
                except (RegistrationError, TransportError):
                    self._report.refused["connect"] += 1
                else:
                    self._report.problems.append(f"seed {self._seed}: blob {number} was taken")
            await left.connect(good)
            right.listen()
            await left.notify(b"works")

    def _incarnation(self) -> Identity:
        return replace(self._identity, incarnation=self._spoiler.random.randbytes(16))

    async def over_sockets(self, count: int) -> None:
        """A right HELLO (or a spoilt one), then frames until the agent has had enough of it; and again."""
        sent = 0
        while sent < count:
            host, port = self._agent.address
            reader, writer = await asyncio.open_connection(host, port)
            try:
                if self._spoiler.random.random() < 0.9:
                    writer.write(encode(self._incarnation().hello()))
                    await _frame(reader)
                self._live()
                for _ in range(min(count - sent, 200)):
                    writer.write(self._spoiler.frame())
                    sent += 1
                    self._report.frames["sockets"] += 1
                    if sent % 4 == 0:
                        await asyncio.sleep(0)
                    if writer.is_closing() or reader.at_eof():
                        break
                writer.write_eof()
                async with asyncio.timeout(5):
                    await reader.read()  # to the end: the agent closes it
                self._report.refused["sockets"] += 1
            except (ConnectionError, OSError, asyncio.IncompleteReadError):
                self._report.refused["sockets"] += 1
            except TimeoutError:
                self._report.problems.append(f"seed {self._seed}: a broken connection was not closed within 5 s")
            finally:
                writer.close()
                with contextlib.suppress(ConnectionError, OSError):
                    await writer.wait_closed()

    async def into_the_mover(self, count: int) -> None:
        """Frames that pass the border, by a peer whose link is up."""
        mover = self._agent._shell.mover
        peer = self._peer()
        for number in range(count):
            self._report.frames["mover"] += 1
            if number % _BATCH == 0:
                self._live()
                await asyncio.sleep(0)
            frame = encode(self._spoiler.message())
            try:
                mover.on_message(peer, decode("fuzz", frame[FRAME_HEADER.size :]))
            except RemoteProtocolError as exc:
                self._report.refused["mover"] += 1
                peer.lost = exc
                mover.on_lost(peer, exc)
                peer = self._peer()
            except Exception as exc:  # noqa: BLE001 - what is looked for
                self._report.problems.append(f"seed {self._seed}, {frame[:200]!r}: {exc!r}")
                return
            limit = 2 * Limits().unmatched_per_peer
            if self._agent.stats()["unmatched"] > limit:
                self._report.problems.append(f"seed {self._seed}: more than {limit} unmatched messages are kept")
                return
        peer.lost = RemoteProtocolError("fuzz", "the end")
        mover.on_lost(peer, peer.lost)

    def _peer(self) -> Peer:
        return Peer(self._incarnation(), _Nowhere(), Numbers(given=3), "loopback")

    def _live(self) -> None:
        """Keep calls of our own under way that the frames may mean."""
        for key in _KEYS:
            if len(self._calls) < len(_KEYS):
                task = asyncio.create_task(self._call(key))
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)

    async def _call(self, key: str) -> None:
        other = ReplicaId(self._identity.id.engine, 1)
        with contextlib.suppress(RdmaKvError):
            if self._agent.config.sending:
                async with self._agent.send(key, 0, [7, 8, 9], to=other, tokens=40, timeout_s=0.3) as out:
                    await out.push()
            else:
                await self._agent.receive(key, 0, [7, 8, 9], source=other, tokens=40, timeout_s=0.3)

    async def gone(self) -> None:
        """The attacker has left: everything of it goes within the deadlines."""
        await asyncio.gather(*self._calls)
        try:
            async with asyncio.timeout(_TIMEOUTS.unmatched + _TIMEOUTS.quiesce + 5.0):
                while self._left():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            self._report.problems.append(f"seed {self._seed}: left after the attack: {self._agent.stats()}")

    def _left(self) -> bool:
        stats = self._agent.stats()
        attackers = [name for name in stats["slots_held"] if str(self._identity.id) in name]
        return bool(stats["unmatched"] or attackers)


class _Nowhere:
    """The control stream of a peer that does not read."""

    open = True

    def send(self, message: object) -> None:
        encode(message)


async def _frame(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(5):
        (length,) = FRAME_HEADER.unpack(await reader.readexactly(FRAME_HEADER.size))
        return await reader.readexactly(length)


def fuzz(folder: Path, seed: int, count: int, progress: Callable[[str], None] = lambda text: None) -> FuzzReport:
    """`count` frames in all: two thirds at the border, the rest to living agents; and metadata beside them."""
    report = FuzzReport(seed)
    progress(f"fuzz: {count} frames, seed {seed}")
    tracing = not tracemalloc.is_tracing()
    fuzz_border(seed, 2 * count // 3, report)
    fuzz_metadata(seed, max(50, count // 100), report)
    progress("fuzz: living agents")
    if tracing:
        tracemalloc.start(1)
    try:
        before = tracemalloc.get_traced_memory()[0]
        asyncio.run(fuzz_agents(folder, seed, count - 2 * count // 3, report))
        report.growth_bytes = tracemalloc.get_traced_memory()[1] - before
    finally:
        if tracing:
            tracemalloc.stop()
    if report.growth_bytes > GROWTH_BYTES:
        report.problems.append(f"seed {seed}: {report.growth_bytes} bytes of Python's memory at the most")
    return report
