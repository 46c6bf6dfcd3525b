"""Who may knock: bounds on connections that are not greeted yet, and on handshakes. Pure; time is an argument.

Theory of operation. The listener of a control plane is open to everybody who reaches its port, and everything before a
good HELLO is the work of strangers. Three things are bounded:

* *Connections that are not greeted yet*, per source and in all. Each holds a task, two buffers and at most one frame of
  `Limits.hello_bytes`, so their number bounds the memory. Where there is no room, the oldest one of the source that has most
  is ended for the newcomer, rather than the newcomer refused: an honest dialer says HELLO at once and is gone from here
  within a few turns of the loop, so the oldest is the one that stalls. Were newcomers refused, connections that say nothing
  would keep everybody out until their deadline.
* *Handshakes*, per source, by a bucket of tokens. A token is taken when a first frame is there whole, before it is decoded:
  so connections that say nothing do not use up the tokens of an honest dialer behind the same address.
* *Lines in the log*, by `Seldom`.

A flood of strangers must not keep a registered peer out. So there are two shares of the same size: one for addresses that we
know, one for all others, and neither takes room from the other. Known is an address that the registry lists, and one that a
link was up with: a peer may dial from another address than it listens on, and the registry may list a name, which is not
looked up here (a stranger must not make us ask a name server). A peer of an address not known yet competes with strangers
once: it is ended for a newcomer only if no other source has more connections than it, and dials again. What is *not* bounded
is a flood that comes from a known address and says HELLO after HELLO: behind one address, peers and strangers cannot be told
apart before their HELLO is read, and the bucket holds for all of them.

A source is an IPv4 address, or the /64 network of an IPv6 address, since one host has all of those to choose from; a known
IPv6 address is a source of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import IPv6Address, IPv6Network, ip_address
from typing import Final, NamedTuple

from rdma_kv.config import Limits

MAX_BUCKETS: Final = 4096
"""Sources whose handshakes are counted; beyond that the one that was quiet for longest is forgotten: it has refilled most."""

MAX_MET: Final = 1024
"""Addresses of former links that are remembered, the latest ones."""

LOOK_AGAIN_S: Final = 1.0
"""How often strangers can make us look into the registry."""

SELDOM_S: Final = 1.0


@dataclass(eq=False, slots=True)
class Visit:
    """One connection that is not greeted yet.

    Attributes:
        source: what it counts for.
        known: it uses the share of known addresses.
        waiting: it may be ended for a newcomer.
    """

    source: str
    known: bool
    waiting: bool = True


class Entrance(NamedTuple):
    """What comes of a knock: the visit, or None where it is refused; and the one that is to be ended for it."""

    visit: Visit | None
    ended: Visit | None


class _Share:
    """Visits by source, those of each in the order in which they came."""

    def __init__(self) -> None:
        self.sources: dict[str, dict[Visit, None]] = {}
        self.count = 0

    def add(self, visit: Visit) -> None:
        self.sources.setdefault(visit.source, {})[visit] = None
        self.count += 1

    def remove(self, visit: Visit) -> None:
        """Idempotent."""
        visits = self.sources.get(visit.source, {})
        if visit in visits:
            del visits[visit]
            self.count -= 1
            if not visits:
                del self.sources[visit.source]


class Border:
    """All connections of one listener that are not greeted yet.

    Args:
        hosts: the addresses and names that the registry lists now; the same object as long as they are the same.
    """

    def __init__(self, limits: Limits, hosts: Callable[[], frozenset[str]]) -> None:
        self._limits = limits
        self._hosts = hosts
        self._shares = {known: _Share() for known in (False, True)}
        self._buckets: dict[str, tuple[float, float]] = {}  # tokens, and when they were counted; the latest last
        self._met: dict[str, None] = {}
        self._read: frozenset[str] | None = None  # hosts as we read them last
        self._listed: frozenset[str] = frozenset()
        self._look_at = float("-inf")

    @property
    def count(self) -> int:
        """Visits now; at most two shares of `Limits.ungreeted`."""
        return sum(share.count for share in self._shares.values())

    def enter(self, address: str, now: float) -> Entrance:
        """Somebody has connected. `leave` follows for every visit, but for those that were named as ended."""
        exact = _plain(address)
        known = self._knows(exact, now)
        visit = Visit(exact if known else _network(exact), known)
        share = self._shares[known]
        ended = None
        if (source := self._full(share, visit.source)) is not None:
            ended = next((other for other in share.sources[source] if other.waiting), None)
            if ended is None:
                return Entrance(None, None)
            share.remove(ended)
        share.add(visit)
        return Entrance(visit, ended)

    def may_greet(self, visit: Visit, now: float) -> bool:
        """The first frame is there. False: handshakes of its source are too many, and it is to be closed unread."""
        rate, burst = self._limits.handshakes_per_s, float(self._limits.handshake_burst)
        tokens, counted_at = self._buckets.pop(visit.source, (burst, now))
        tokens = min(burst, tokens + (now - counted_at) * rate)
        allowed = tokens >= 1.0
        self._buckets[visit.source] = (tokens - allowed, now)
        if len(self._buckets) > MAX_BUCKETS:
            del self._buckets[next(iter(self._buckets))]
        return allowed

    def greeted(self, visit: Visit) -> None:
        """Its HELLO was good: it is no longer ended for a newcomer. It counts until it leaves."""
        visit.waiting = False

    def leave(self, visit: Visit) -> None:
        """It is a link now, or has ended. Idempotent."""
        self._shares[visit.known].remove(visit)

    def know(self, address: str) -> None:
        """A link was up with this address."""
        exact = _plain(address)
        self._met.pop(exact, None)
        self._met[exact] = None
        if len(self._met) > MAX_MET:
            del self._met[next(iter(self._met))]

    def _full(self, share: _Share, source: str) -> str | None:
        """The source that a visit must go of before another one of `source` can come; None where there is room."""
        if len(share.sources.get(source, ())) >= self._limits.ungreeted_per_address:
            return source
        if share.count >= self._limits.ungreeted:
            return max(share.sources, key=lambda each: len(share.sources[each]))
        return None

    def _knows(self, address: str, now: float) -> bool:
        if address in self._met or address in self._listed:
            return True
        if now < self._look_at:
            return False
        self._look_at = now + LOOK_AGAIN_S
        hosts = self._hosts()
        if hosts is not self._read:
            self._read = hosts
            local = ("127.0.0.1", "::1") if "localhost" in hosts else ()
            self._listed = frozenset({*(_plain(host) for host in hosts), *local})
        return address in self._listed


class Seldom:
    """Lets one line through per second, and counts the others."""

    def __init__(self) -> None:
        self._next_at = float("-inf")
        self._left_out = 0

    def due(self, now: float) -> int | None:
        """How many lines were left out before this one; None where this one is left out too."""
        if now < self._next_at:
            self._left_out += 1
            return None
        self._next_at = now + SELDOM_S
        left_out, self._left_out = self._left_out, 0
        return left_out


def _plain(address: str) -> str:
    """One spelling for each address; an IPv4 address that came in IPv6 clothes is an IPv4 address. Names stay."""
    try:
        parsed = ip_address(address.partition("%")[0])  # without the zone of a link-local one
    except ValueError:
        return address
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
        parsed = parsed.ipv4_mapped
    return str(parsed)


def _network(address: str) -> str:
    """The /64 of an IPv6 address; everything else as it is. `address` is plain."""
    if ":" not in address:
        return address
    return str(IPv6Network((int(IPv6Address(address)) >> 64 << 64, 64)))
