"""The seam between the mover and a data plane.

A `Transport` belongs to one agent and lives on one event loop. It has one `Endpoint` per peer agent, and everything that
concerns that peer (its NIXL agent, its connection, its pending operations) is owned by the endpoint: closing or fencing
one endpoint never disturbs another.

What a back-end promises, and the conformance suite checks:

* `register` takes memory once, of the host or, where the back-end can, of a GPU; every endpoint, present or future, can
  use it. Memory stays the caller's and must outlive the registration.
* Memory of a GPU goes only by ways that are made for it. A WRITE that has none (host memory to a GPU over cuda_ipc, say)
  is refused with `NOT_POSTED` before anything is posted: copy to pinned host memory and WRITE from there.
* `Endpoint.metadata()` is what the *peer* needs to reach us. It is wrapped (magic, version, length, checksum) before it
  leaves, and `connect` opens the wrapping before the back-end sees a byte, because a damaged blob can brick a back-end.
* `write` returns when all bytes are visible at the remote side and the notification has been handed on. It raises
  `TransportError` otherwise; then *nobody knows* how much landed or will still land, and the local memory must be held.
  Cancelling the awaiting task does not cancel the WRITE.
* Each notification reaches the remote endpoint's callback exactly once and never before its data. Notifications are
  unordered, also to the control stream.
* A target makes progress only between `listen()` and `unlisten()`; calls nest. Idle costs nothing.
* Callbacks and results arrive on the event loop. No call blocks the loop.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from rdma_kv import errors
from rdma_kv.errors import RegistrationError
from rdma_kv.types import Descriptor, Region

NotificationCallback = Callable[[bytes], None]

NOT_POSTED: Final = "not-posted"
"""`TransportError.status` of a WRITE of which nothing was handed to the network: its memory need not be held."""

FENCED: Final = "fenced"
"""`TransportError.status` of a WRITE that a fence ended: nothing of it reads local memory any more. What has left may
still land at the peer."""

DEVICE_MEMORY: Final = errors.DEVICE_MEMORY
"""`RegistrationError.status` of all refusals that concern memory of a GPU."""

_MAGIC = b"RKVM"
_VERSION = 1
_HEADER = struct.Struct("<4sHHII")  # magic, version, length of the back-end's name, length of the blob, crc32
_MAX_BLOB_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WritePair:
    """One run of bytes of a WRITE: `local` is read here, `remote` is written there; both have the same length."""

    local: Descriptor
    remote: Descriptor


class Endpoint(Protocol):
    """The link to one peer agent. Made by `Transport.endpoint`, ended by `close`."""

    @property
    def peer(self) -> str: ...

    @property
    def lane(self) -> str:
        """What carries the bytes, in honest words; `unknown` before it is known.

        `tcp`, `cma`, `shm` (another kind of shared memory), `rdma`, `loopback`; `cuda_ipc` between GPUs of one host.
        It is the way between GPUs where both sides have registered memory of a GPU, else the same as `host_lane`.
        """
        ...

    @property
    def host_lane(self) -> str:
        """What carries bytes between host memories, also where memory of GPUs is registered; `unknown` as for `lane`."""
        ...

    async def metadata(self) -> bytes:
        """What the peer passes to its `connect`, wrapped. Covers the memory registered so far."""
        ...

    async def connect(self, metadata: bytes) -> None:
        """Make the peer's memory writable from here. Single-flight: a second call with the same bytes joins the first.

        Raises:
            RegistrationError: the blob is truncated, damaged, of another version or back-end. Nothing has changed, and
                a later call with a good blob works.
        """
        ...

    async def write(self, pairs: Sequence[WritePair], notification: bytes) -> None:
        """WRITE all pairs, then deliver `notification` to the remote endpoint's callback.

        Raises:
            TransportError: posting or completion failed; the local memory may still be read and the remote written,
                unless its status is `NOT_POSTED`. With status `FENCED` only the remote may still be written.
        """
        ...

    async def notify(self, message: bytes) -> None:
        """Deliver `message` to the remote endpoint's callback, without data.

        Ends as a `write` does: not before the peer listens.

        Raises:
            TransportError: as for `write`.
        """
        ...

    def on_notification(self, callback: NotificationCallback) -> None:
        """Set the one receiver of notifications; called on the event loop."""
        ...

    def listen(self) -> None:
        """From now on incoming WRITEs and notifications make progress. Calls nest."""
        ...

    def unlisten(self) -> None: ...

    async def fence_source(self) -> None:
        """When this returns, nothing posted before reads local memory any more, and its memory may be used again.

        Ends as `close` does, but pending WRITEs end with status `FENCED` (or `NOT_POSTED`), and not before that is
        true. Idempotent, also after `close`. `Transport.endpoint` then makes a new endpoint; both sides exchange
        metadata again.

        Raises:
            FenceUnsupported: there is no such fence, or it could not be proven; the text says what is needed instead.
        """
        ...

    async def fence_target(self) -> None:
        """When this returns, nothing this peer posted can land here any more. Also does what `fence_source` does.

        Raises:
            FenceUnsupported: this lane has no such fence, and nothing has changed; or it could not be proven, and the
                endpoint is closed. The text says what is needed instead.
        """
        ...

    async def close(self) -> None:
        """End the link. Pending writes end with TransportError. Idempotent."""
        ...


class Transport(Protocol):
    """One data plane of one agent. Use `start` and `close` around everything else."""

    @property
    def backend(self) -> str:
        """Which data plane this is (`nixl`, `loopback`, ...); both sides of a link must have the same."""
        ...

    @property
    def name(self) -> str: ...

    async def start(self) -> None: ...

    async def close(self) -> None:
        """End all endpoints, then free the back-end. Idempotent."""
        ...

    async def register(self, address: int, length_bytes: int, *, device: int = 0) -> Region:
        """Register memory `[address, address + length_bytes)`. Same range again: the same region, counted.

        Register memory of a GPU before the first `metadata` or `connect` of an endpoint that shall move it.

        Args:
            device: 0 for the host, else the CUDA ordinal + 1: memory of cudaMalloc on that GPU.

        Raises:
            ConfigError: zero length, a negative device, or an overlap with another region that is not the same range.
            RegistrationError: the back-end refused it. With status `DEVICE_MEMORY`: it moves no memory of GPUs here, or
                the range is not what `device` says; the text says which.
        """
        ...

    async def deregister(self, region: Region) -> None:
        """Undo one `register`. The caller has made sure that no peer holds a grant in it."""
        ...

    def endpoint(self, peer: str) -> Endpoint:
        """The endpoint of `peer`, made at the first call. `peer` names one incarnation of one agent, on both sides
        together: a restarted peer gets another name and therefore another endpoint."""
        ...


def wrap_metadata(backend: str, blob: bytes) -> bytes:
    """Put a back-end's blob into a checked envelope."""
    name = backend.encode()
    body = name + blob
    return _HEADER.pack(_MAGIC, _VERSION, len(name), len(blob), zlib.crc32(body)) + body


def unwrap_metadata(backend: str, wrapped: bytes) -> bytes:
    """Open an envelope of `wrap_metadata`.

    Raises:
        RegistrationError: too short, too long, wrong magic, version, back-end or checksum.
    """
    if len(wrapped) < _HEADER.size:
        raise RegistrationError(backend, "truncated", f"metadata has {len(wrapped)} bytes, header needs {_HEADER.size}")
    magic, version, name_bytes, blob_bytes, checksum = _HEADER.unpack_from(wrapped)
    if magic != _MAGIC or version != _VERSION:
        raise RegistrationError(backend, "version", f"metadata of version {version}, we speak {_VERSION}")
    body = wrapped[_HEADER.size :]
    if blob_bytes > _MAX_BLOB_BYTES or len(body) != name_bytes + blob_bytes:
        raise RegistrationError(
            backend, "length", f"metadata body has {len(body)} bytes, not {name_bytes + blob_bytes}"
        )
    if zlib.crc32(body) != checksum:
        raise RegistrationError(backend, "checksum", "metadata was damaged on the way")
    name = body[:name_bytes].decode("utf-8", "replace")
    if name != backend:
        raise RegistrationError(
            backend, "backend", f"the peer's metadata is of transport {name!r}; both sides need the same"
        )
    return body[name_bytes:]
