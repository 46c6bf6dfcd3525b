"""What the two ends of a ucx link tell each other before a byte moves."""

from __future__ import annotations

import msgspec

from rdma_kv.errors import ConfigError, RegistrationError
from rdma_kv.transport.regions import RegionTable
from rdma_kv.transport.ucx_binding import BACKEND
from rdma_kv.types import Region

_ADDRESS_BYTES = range(8, 64 << 10)
_RKEY_BYTES = range(1, 4 << 10)


class Hello(msgspec.Struct, array_like=True):
    """What the target learns of an initiator that connects to it. `device_memory`: it has registered memory of a GPU."""

    address: bytes
    host: str
    lanes: list[str]
    device_memory: bool = False


class Blob(msgspec.Struct, array_like=True):
    """What the peer needs. `rkeys` are those of `regions`, one each; a region is (address, length in bytes, device)."""

    link: str
    regions: list[tuple[int, int, int]]
    rkeys: list[bytes]
    address: bytes
    host: str
    lanes: list[str]


def decode(data: bytes) -> tuple[Blob, RegionTable]:
    """Raises: RegistrationError: not the metadata of a `UcxEndpoint`."""
    try:
        blob = msgspec.msgpack.decode(data, type=Blob)
        regions = RegionTable()
        for region in blob.regions:
            regions.add(Region(*region))
    except (msgspec.MsgspecError, ConfigError) as exc:
        raise RegistrationError(BACKEND, "malformed", "metadata of this version cannot be read") from exc
    if blob.regions != [(region.address, region.length_bytes, region.device) for region in regions]:
        raise RegistrationError(BACKEND, "malformed", "the regions are not in the order of their addresses")
    if any(region.device < 0 for region in regions):
        raise RegistrationError(BACKEND, "malformed", "a region has no plausible device")
    if len(blob.rkeys) != len(regions):
        raise RegistrationError(BACKEND, "malformed", f"{len(blob.rkeys)} rkeys for {len(regions)} regions")
    if len(blob.address) not in _ADDRESS_BYTES or not all(len(rkey) in _RKEY_BYTES for rkey in blob.rkeys):
        raise RegistrationError(BACKEND, "malformed", "a worker address or an rkey has no plausible length")
    return blob, regions
