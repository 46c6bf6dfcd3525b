"""What the multi-node tests rely on to fail: their checks of transfers and of the firewall's counters. Needs no node."""

from __future__ import annotations

from typing import Any

import pytest
from cluster import Ends, check_failed
from commands import LabError
from engine import TOKEN_BYTES
from lane import Dropped, parse_dropped

TOKENS = 16
SENT = {"outcome": "success"}
RECEIVED = {"outcome": "success", "bytes": TOKENS * TOKEN_BYTES // 2, "wrong": 0, "metadata": True}
LOST = {"outcome": "PeerLostError", "retryable": True}

Side = dict[str, dict[str, Any]]


def side(*ends: dict[str, Any]) -> Side:
    return {str(rank): end for rank, end in enumerate(ends)}


def test_a_transfer_with_every_byte_is_a_success_and_no_failure() -> None:
    ends = Ends(side(SENT), side(RECEIVED, RECEIVED))
    assert ends.succeeded
    ends.check_success(TOKENS)
    with pytest.raises(AssertionError):
        ends.check_failure()


def test_a_transfer_that_all_ranks_lost_is_a_failure_and_no_success() -> None:
    ends = Ends(side(LOST), side(LOST, LOST))
    assert not ends.succeeded
    ends.check_failure()
    check_failed(ends.receive)
    with pytest.raises(AssertionError):
        ends.check_success(TOKENS)


@pytest.mark.parametrize(
    ("send", "receive"),
    [
        pytest.param({}, side(LOST, LOST), id="no-sender"),
        pytest.param(side(LOST), {}, id="no-receiver"),
        pytest.param({}, {}, id="neither"),
        pytest.param(side(LOST), side(LOST, RECEIVED), id="a-rank-succeeded"),
        pytest.param(side(LOST), side(LOST, {"outcome": "bug", "retryable": False}), id="a-bug"),
        pytest.param(side({"outcome": "ConfigError", "retryable": False}), side(LOST), id="no-use-to-try-again"),
    ],
)
def test_this_is_no_failure_of_both_sides(send: Side, receive: Side) -> None:
    with pytest.raises(AssertionError):
        Ends(send, receive).check_failure()


@pytest.mark.parametrize(
    ("send", "receive", "tokens"),
    [
        pytest.param({}, side(RECEIVED, RECEIVED), TOKENS, id="no-sender"),
        pytest.param(side(SENT), {}, 0, id="no-receiver"),
        pytest.param({}, {}, 0, id="neither"),
        pytest.param(side(LOST), side(RECEIVED, RECEIVED), TOKENS, id="the-sender-failed"),
        pytest.param(side(SENT), side(RECEIVED), TOKENS, id="bytes-are-missing"),
        pytest.param(side(SENT), side(RECEIVED, RECEIVED | {"wrong": 1}), TOKENS, id="a-wrong-byte"),
        pytest.param(side(SENT), side(RECEIVED, RECEIVED | {"metadata": False}), TOKENS, id="another-request"),
    ],
)
def test_this_is_no_success(send: Side, receive: Side, tokens: int) -> None:
    with pytest.raises(AssertionError):
        Ends(send, receive).check_success(tokens)


@pytest.mark.parametrize("ends", [{}, side(RECEIVED), side(LOST, RECEIVED)], ids=["nobody", "success", "in-part"])
def test_this_side_has_not_failed(ends: Side) -> None:
    with pytest.raises(AssertionError):
        check_failed(ends)


LISTING = """\
Chain INPUT (policy ACCEPT 1187 packets, 24117248 bytes)
    pkts      bytes target     prot opt in     out     source               destination
"""


def rule(packets: int, size_bytes: int, target: str, source: str, rest: str = "") -> str:
    return f"{packets:8} {size_bytes:8} {target:10} {{every}} --  !lo    *  {source:20} 0.0.0.0/0            {rest}\n"


LOSSY = rule(18, 665040, "DROP", "0.0.0.0/0", "statistic mode random probability 0.04999999981")
BLOCKED = rule(5, 300, "DROP", "10.99.0.12")
RESET = rule(7, 420, "REJECT", "10.99.0.12", "reject-with tcp-reset")
NOTHING = rule(0, 0, "DROP", "192.0.2.1")


@pytest.mark.parametrize("every", ["0", "all"])  # both ways in which versions of iptables write it
@pytest.mark.parametrize(
    ("rules", "dropped"),
    [
        (LOSSY, Dropped(18, 665040)),
        (LOSSY + RESET + BLOCKED, Dropped(23, 665340)),
        (NOTHING, Dropped(0, 0)),
    ],
    ids=["one-rule", "among-others", "matches-nothing"],
)
def test_what_was_dropped_is_read_from_the_rules_that_drop(rules: str, dropped: Dropped, every: str) -> None:
    assert parse_dropped(LISTING + rules.format(every=every)) == dropped


@pytest.mark.parametrize("rules", ["", RESET], ids=["no-rule", "rejects-only"])
def test_a_chain_without_a_rule_that_drops_is_an_error_and_not_nothing(rules: str) -> None:
    with pytest.raises(LabError, match="no rule drops"):
        parse_dropped(LISTING + rules)
