"""Fixtures of the multi-node tests. `python -m tests.multinode` starts the nodes and then the tests of the files
`test_multinode_*`; alone they are not collected. Other files need no nodes: they test what those tests rely on, and run with
all others.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import lab_state
import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from cluster import Cluster

if lab_state.LANE is None:
    collect_ignore_glob = ["test_multinode_*"]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "multinode: runs on the four nodes of `make multinode` only")
    config.addinivalue_line("markers", "short: of the short form of the multi-node tests, which CI runs")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call" and report.failed and lab_state.LANE is not None:
        with contextlib.suppress(Exception):
            report.sections.append(("nodes", lab_state.LANE.logs()))
    return report


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def whole_cluster() -> AsyncIterator[Cluster]:
    from cluster import Cluster

    assert lab_state.LANE is not None
    cluster = Cluster(lab_state.LANE)
    await cluster.connect()
    yield cluster
    await cluster.close()


@pytest_asyncio.fixture(loop_scope="session")
async def cluster(whole_cluster: Cluster, request: pytest.FixtureRequest) -> AsyncIterator[Cluster]:
    """All nodes up, on the transport that the test names by `@pytest.mark.parametrize("transport", ...)`, ucx otherwise.

    However the test ends, what it has put in the way is taken away. Where it passed, nothing may be held on any node.
    """
    callspec = getattr(request.node, "callspec", None)
    transport = callspec.params.get("transport", "ucx") if callspec else "ucx"
    await asyncio.to_thread(whole_cluster.lane.use, transport)
    await whole_cluster.ready()
    yield whole_cluster
    await whole_cluster.mend()
    await whole_cluster.ready()
    await whole_cluster.check_nothing_held()
