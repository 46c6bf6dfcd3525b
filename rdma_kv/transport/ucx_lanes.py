"""Which way bytes go over UCX, in our words, and which WRITEs have none. Pure.

Memory of the host and memory of GPUs take different ways over one endpoint. For the host: `rdma`, `cma`, `shm` or `tcp`.
For GPUs: `rdma` (untested, and on GPUDirect), or `cuda_ipc` between two GPUs, or one, of one host. That is all: UCX itself
would also carry GPU memory by messages over tcp, through host memory and back, at 0.4 GB/s. Nothing here ever asks for
that. Host memory of the same kind goes a hundred times faster, so staging in pinned memory is the fix, and a refusal says
so. `GUARD` makes sure of it where we err: without these two protocols UCX fails a WRITE instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rdma_kv.errors import TransportError
from rdma_kv.transport.base import NOT_POSTED, WritePair
from rdma_kv.transport.ucx_binding import BACKEND

GUARD: Final = {
    "PROTO_EMULATION_ENABLE": "n",  # no put by active messages, which is what goes over tcp
    "PROTOS": "^put/rndv",  # no put by rendezvous: there the peer may read our memory by itself, which no fence of ours ends
}
"""Settings, without `UCX_`, of a context that can move memory of GPUs. They go over the user's: never means never."""

GUARDED_SINCE: Final = (1, 22)
"""The first UCX that was seen to take `GUARD` and whose flush waits for CUDA copies (`uct_cuda_base_ep_flush`)."""

_HOST_SHARED: Final = frozenset({"cma", "knem", "xpmem", "posix", "sysv", "self"})
_CUDA: Final = frozenset({"cuda", "cuda_copy", "cuda_ipc", "gdr_copy"})
_NOT_SHARED: Final = _CUDA | {"tcp"}  # transports by which no peer reaches our host memory itself


def lane_of(transports: Iterable[str]) -> str:
    """The best way to host memory of the transports that UCX chose: `rdma`, `cma`, `shm` (another kind), `tcp`, `unknown`."""
    names = set(transports) - _CUDA
    if names & _HOST_SHARED:
        return "cma" if "cma" in names else "shm"
    if names - _NOT_SHARED:
        return "rdma"
    return "tcp" if "tcp" in names else "unknown"


def device_lane_of(transports: Iterable[str]) -> str:
    """The way to memory of GPUs: `cuda_ipc`, `rdma`, `unknown`, or `tcp`, which is none."""
    names = set(transports)
    if "cuda_ipc" in names:
        return "cuda_ipc"
    if names - _NOT_SHARED - _HOST_SHARED:
        return "rdma"
    return "tcp" if names else "unknown"


def shares_no_host_memory(setting: str) -> bool:
    """Whether UCX_TLS rules out that a peer reaches our host memory by itself."""
    return set(setting.split(",")) <= _NOT_SHARED


def way_of(pairs: Sequence[WritePair], host_lane: str, device_lane: str, *, backend: str = BACKEND) -> str:
    """Which lane a WRITE takes; the one of its host memory if it has both kinds.

    Raises:
        TransportError: only UCX's tcp path would carry it. Its status is `NOT_POSTED`.
    """
    way = "" if pairs else host_lane
    for pair in pairs:
        local, remote = pair.local.device, pair.remote.device
        if not local and not remote:
            way = host_lane
        elif device_lane == "rdma" or (device_lane == "cuda_ipc" and local and remote):
            way = way or device_lane
        else:
            raise TransportError(
                backend,
                NOT_POSTED,
                f"{pair} cannot go: {_why(local, remote, device_lane)}. Copy to pinned host memory on the side of the "
                "GPU and WRITE between host memories",
            )
    return way


def _why(local: int, remote: int, device_lane: str) -> str:
    tcp = "UCX would send memory of a GPU over tcp at 0.4 GB/s, which this transport never does"
    if device_lane == "cuda_ipc":
        place = "host memory to a GPU" if remote else "a GPU to host memory"
        return f"cuda_ipc leads from GPU to GPU, not from {place}, and {tcp}"
    return f"neither cuda_ipc nor rdma leads to this peer (lane {device_lane}), and {tcp}"
