"""UCX's environment must be set before NIXL is imported; the fixtures are in `transport_rig`."""

import os

import pytest
from transport_rig import Rig

from rdma_kv.transport.ucx_environment import prepare_ucx_environment

prepare_ucx_environment(os.environ)


@pytest.fixture(params=["loopback", "nixl", "ucx"])
async def rig(request):
    """Transports of one back-end, closed at the end."""
    async with Rig(request.param) as made:
        yield made
