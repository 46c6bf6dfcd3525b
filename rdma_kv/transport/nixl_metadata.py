"""What the two ends of a NIXL link tell each other before a byte moves."""

from __future__ import annotations

import msgspec

from rdma_kv.errors import ConfigError, RegistrationError
from rdma_kv.transport.nixl_owner import BACKEND
from rdma_kv.transport.regions import RegionTable
from rdma_kv.types import Region


class Blob(msgspec.Struct, array_like=True):
    """What the peer needs. See `nixl_link.RemoteEnd` for the first four; a region is (address, length in bytes, device).

    `host`, `lanes` and `process`, the process's number on its host, tell which lanes lead to us.
    """

    agent: str
    nixl: bytes
    scratch: int
    regions: list[tuple[int, int, int]]
    host: str
    lanes: list[str]
    process: int


def decode(data: bytes) -> tuple[Blob, RegionTable]:
    """Raises: RegistrationError: not the metadata of a `NixlEndpoint`."""
    try:
        blob = msgspec.msgpack.decode(data, type=Blob)
        regions = RegionTable()
        for region in blob.regions:
            regions.add(Region(*region))
    except (msgspec.MsgspecError, ConfigError) as exc:
        raise RegistrationError(BACKEND, "malformed", "metadata of this version cannot be read") from exc
    return blob, regions
