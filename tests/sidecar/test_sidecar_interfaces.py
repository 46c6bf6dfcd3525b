"""A sidecar notices that the network under it has gone: `rdma_kv.sidecar.interfaces`, in a network namespace of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from rdma_kv.sidecar.interfaces import addresses, has_changed

ETH0 = (2, bytes([10, 0, 0, 1]))
MORE = (3, bytes([10, 0, 1, 1]))

SPACES = [
    ["unshare", "--net"],
    ["unshare", "--user", "--map-root-user", "--net"],
]  # root, or anybody where that is allowed

CHILD = """
import asyncio, subprocess
from rdma_kv.sidecar.interfaces import Watch, addresses

def ip(*words):
    subprocess.run(["ip", *words], check=True)

async def told(event, change):
    event.clear()
    watch = Watch(event.set)
    watch.start()
    change()
    try:
        async with asyncio.timeout(SECONDS):
            await event.wait()
        return True
    except TimeoutError:
        return False
    finally:
        watch.close()

async def main():
    event = asyncio.Event()
    CASE

asyncio.run(main())
"""


def child(case: str, seconds: float) -> str:
    """Run `case` in a network namespace that has `lo` only; what it printed."""
    prefix = next(
        (each for each in SPACES if not subprocess.run([*each, "true"], capture_output=True).returncode), None
    )
    if prefix is None:
        pytest.skip("no network namespaces here: neither root nor user namespaces")
    program = CHILD.replace("SECONDS", str(seconds)).replace(
        "CASE", textwrap.indent(textwrap.dedent(case), "    ").strip()
    )
    done = subprocess.run([*prefix, sys.executable, "-c", program], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_what_is_a_change():
    assert has_changed(frozenset({ETH0}), frozenset()), "the only address has gone"
    assert has_changed(frozenset({ETH0, MORE}), frozenset({MORE})), "one of them has gone"
    assert has_changed(frozenset({ETH0}), frozenset({(9, ETH0[1])})), "the same address on another interface"
    assert has_changed(frozenset(), frozenset({ETH0})), "there was none to run over"
    assert not has_changed(frozenset({ETH0}), frozenset({ETH0, MORE}))
    assert not has_changed(frozenset(), frozenset())


def test_loopback_does_not_count():
    assert all(address != bytes([127, 0, 0, 1]) for _, address in addresses({}))


def test_an_interface_that_goes_is_told_at_once():
    case = """
    ip("link", "add", "x0", "type", "veth", "peer", "name", "x1")
    ip("addr", "add", "10.1.1.1/24", "dev", "x0")
    print(await told(event, lambda: ip("link", "del", "x0")), addresses())
    """
    assert child(case, 5.0) == "True frozenset()"


def test_the_first_address_of_all_is_told():
    case = """
    ip("link", "add", "x0", "type", "veth", "peer", "name", "x1")
    print(await told(event, lambda: ip("addr", "add", "10.1.1.1/24", "dev", "x0")))
    """
    assert child(case, 5.0) == "True"


def test_one_more_address_is_not_told():
    case = """
    ip("link", "add", "x0", "type", "veth", "peer", "name", "x1")
    ip("addr", "add", "10.1.1.1/24", "dev", "x0")
    print(await told(event, lambda: ip("addr", "add", "10.1.2.1/24", "dev", "x0")), len(addresses()))
    """
    assert child(case, 0.3) == "False 2"


def test_only_named_interfaces_count_where_ucx_is_told_which():
    case = """
    import os
    for name in ("x0", "y0"):
        ip("link", "add", name, "type", "veth", "peer", "name", name + "p")
    ip("addr", "add", "10.1.1.1/24", "dev", "x0")
    ip("addr", "add", "10.1.2.1/24", "dev", "y0")
    os.environ["UCX_NET_DEVICES"] = "x0"
    print(len(addresses()), await told(event, lambda: ip("link", "del", "y0")))
    """
    assert child(case, 0.3) == "1 False"
