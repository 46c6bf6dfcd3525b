"""Who is let in at the control port, by a clock that the test turns."""

from __future__ import annotations

from pathlib import Path

import pytest

from rdma_kv.config import Limits
from rdma_kv.protocol import border
from rdma_kv.protocol.border import Border, Seldom, Visit
from rdma_kv.registry.static import StaticRegistry

NOBODY: frozenset[str] = frozenset()


def bordered(hosts: frozenset[str] = NOBODY, **limits: float) -> Border:
    return Border(Limits(**limits), lambda: hosts)


def let_in(who: Border, address: str, now: float = 0.0) -> Visit:
    visit, ended = who.enter(address, now)
    assert visit is not None
    assert ended is None
    return visit


# --- connections -------------------------------------------------------------------------------------------------------


def test_the_oldest_of_an_address_goes_for_its_next_one():
    one = bordered(ungreeted_per_address=2)
    first, second = let_in(one, "10.0.0.1"), let_in(one, "10.0.0.1")
    let_in(one, "10.0.0.2")
    third, ended = one.enter("10.0.0.1", 0.0)
    assert ended is first
    assert one.count == 3
    assert one.enter("10.0.0.1", 0.0).ended is second
    assert third is not None


def test_with_a_larger_bound_all_of_them_stay():
    one = bordered(ungreeted_per_address=3)
    for _ in range(3):
        let_in(one, "10.0.0.1")
    assert one.count == 3


def test_where_all_is_full_the_address_that_has_most_makes_room():
    one = bordered(ungreeted=4)
    alone = let_in(one, "10.0.0.1")
    many = [let_in(one, "10.0.0.2") for _ in range(3)]
    visit, ended = one.enter("10.0.0.3", 0.0)
    assert visit is not None
    assert ended is many[0]
    one.leave(visit)
    assert one.enter("10.0.0.2", 0.0).ended is None
    assert one.enter("10.0.0.2", 0.0).ended is many[1], "its own, rather than that of the quiet one"
    assert one.count == 4
    assert alone.waiting


def test_one_whose_hello_was_good_is_not_ended_and_the_newcomer_is_refused():
    one = bordered(ungreeted=1)
    first = let_in(one, "10.0.0.1")
    one.greeted(first)
    assert one.enter("10.0.0.2", 0.0) == (None, None)
    assert one.count == 1
    one.leave(first)
    one.leave(first)
    assert one.count == 0
    let_in(one, "10.0.0.2")


def test_one_that_was_ended_leaves_once():
    one = bordered(ungreeted=1)
    first = let_in(one, "10.0.0.1")
    second, ended = one.enter("10.0.0.1", 0.0)
    assert ended is first
    one.leave(first)
    assert one.count == 1
    assert second is not None
    one.leave(second)
    assert one.count == 0


@pytest.mark.parametrize("hosts", [frozenset({"10.0.0.9"}), NOBODY], ids=["listed", "control: not listed"])
def test_strangers_and_registered_addresses_do_not_take_each_others_room(hosts: frozenset[str]):
    """Each stranger has an address of its own, so nothing tells them from a peer but the registry."""
    one = bordered(hosts, ungreeted=4)
    peer, _ = one.enter("10.0.0.9", 0.0)
    turned_out = [one.enter(f"10.0.1.{number}", 1.0 + number).ended for number in range(20)]
    assert (peer in turned_out) == (not hosts)
    assert one.count == 4 + len(hosts)
    if hosts:
        more = [one.enter("10.0.0.9", 30.0) for _ in range(3)]
        assert all(visit is not None and ended is None for visit, ended in more)
        assert one.enter("10.0.0.9", 30.0).ended is peer, "its own share is bounded too"


def test_an_address_that_a_link_was_up_with_is_known():
    one = bordered()
    assert not let_in(one, "10.0.0.1").known
    one.know("10.0.0.1")
    assert let_in(one, "10.0.0.1").known
    for number in range(border.MAX_MET):
        one.know(f"10.1.{number >> 8}.{number & 255}")
    assert not let_in(one, "10.0.0.1").known, "only the latest are remembered"


def test_strangers_make_us_look_into_the_registry_once_a_second():
    looks = 0
    hosts = NOBODY

    def look() -> frozenset[str]:
        nonlocal looks
        looks += 1
        return hosts

    one = Border(Limits(), look)
    for turn in range(100):
        let_in(one, f"10.0.0.{turn}", turn * 0.01)
    assert looks == 1
    hosts = frozenset({"10.0.0.1"})
    assert not let_in(one, "10.0.0.1", 0.99).known
    assert let_in(one, "10.0.0.1", 1.0).known
    assert let_in(one, "10.0.0.1", 1.5).known
    assert looks == 2


@pytest.mark.parametrize(
    ("address", "listed"),
    [
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("fe80::1%eth0", "fe80::1"),
        ("2001:db8:0:0::5", "2001:db8::5"),
        ("127.0.0.1", "localhost"),
        ("::1", "localhost"),
    ],
)
def test_an_address_is_known_in_every_spelling(address: str, listed: str):
    assert let_in(bordered(frozenset({listed})), address).known
    assert not let_in(bordered(frozenset({"db.example"})), address).known


def test_a_host_of_ipv6_is_one_source_with_all_addresses_that_it_may_choose():
    one = bordered(frozenset({"2001:db8::99"}), ungreeted_per_address=1)
    first = let_in(one, "2001:db8::1")
    assert one.enter("2001:db8::2", 0.0).ended is first
    let_in(one, "2001:db8:0:1::1")
    assert let_in(one, "2001:db8::99").known, "a peer within it is not one of them"


def test_an_address_that_is_none_counts_as_one():
    one = bordered(ungreeted_per_address=1)
    first = let_in(one, "")
    assert one.enter("", 0.0).ended is first


# --- handshakes --------------------------------------------------------------------------------------------------------


def test_a_burst_then_a_rate():
    one = bordered(handshakes_per_s=2.0, handshake_burst=3)
    visit = let_in(one, "10.0.0.1")
    assert [one.may_greet(visit, 100.0) for _ in range(5)] == [True, True, True, False, False]
    assert not one.may_greet(visit, 100.4)
    assert one.may_greet(visit, 100.5)
    assert not one.may_greet(visit, 100.9)
    assert [one.may_greet(visit, 200.0) for _ in range(4)] == [True, True, True, False], "no more than a burst"


def test_a_larger_burst_lets_more_pass():
    one = bordered(handshakes_per_s=2.0, handshake_burst=5)
    visit = let_in(one, "10.0.0.1")
    assert all(one.may_greet(visit, 100.0) for _ in range(5))


def test_each_address_has_its_own_tokens():
    one = bordered(handshakes_per_s=1.0, handshake_burst=1)
    visits = [let_in(one, f"10.0.0.{number}") for number in range(3)]
    assert all(one.may_greet(visit, 0.0) for visit in visits)
    assert not any(one.may_greet(visit, 0.0) for visit in visits)


def test_connections_that_say_nothing_take_no_tokens():
    one = bordered(handshake_burst=1)
    for _ in range(100):
        one.enter("10.0.0.1", 0.0)
    visit, _ = one.enter("10.0.0.1", 0.0)
    assert visit is not None
    assert one.may_greet(visit, 0.0)


def test_addresses_without_number_cost_bounded_memory():
    one = bordered(handshake_burst=1)
    for number in range(border.MAX_BUCKETS + 100):
        visit, _ = one.enter(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}", 0.0)
        assert visit is not None
        assert one.may_greet(visit, float(number))
    assert len(one._buckets) == border.MAX_BUCKETS


# --- the log, and the registry -----------------------------------------------------------------------------------------


def test_one_line_a_second_says_how_many_there_were():
    line = Seldom()
    assert line.due(10.0) == 0
    assert [line.due(10.0 + tenth / 10) for tenth in range(10)] == [None] * 10
    assert line.due(11.0) == 10
    assert line.due(12.0) == 0


FILE = """
cluster = "c"
[[engine]]
name = "p"
role = "prefill"
topology = {{ layers_per_stage = [2] }}
agent = [{{ address = "{}:7600", ranks = [0] }}]
"""


def test_a_registry_tells_its_hosts_and_keeps_them_while_the_file_is_broken(tmp_path: Path):
    path = tmp_path / "cluster.toml"
    registry = StaticRegistry(path)
    assert registry.hosts() == NOBODY
    path.write_text(FILE.format("10.0.0.1"))
    assert registry.hosts() == {"10.0.0.1"}
    assert registry.hosts() is registry.hosts()
    path.write_text("half a fi")
    assert registry.hosts() == {"10.0.0.1"}
    path.write_text(FILE.format("node-7"))
    assert registry.hosts() == {"node-7"}
