"""What UCX may use for a peer, and the environment that our commands give it.

UCX chooses a lane by itself and NIXL does not tell which. So each side says, beside its metadata, which host it is on
and which lanes its UCX may use; the lane of a link is the best one that both have. A report may be too modest (`tcp`
where UCX found something better), never the other way round: `rdma` needs an active InfiniBand, RoCE or EFA port,
allowed by the settings, on both sides, and is not said of two processes of one host that can use `cma`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Final

INFINIBAND: Final = Path("/sys/class/infiniband")
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")

_RDMA_MODULES = ("ib", "ib_mlx5", "ib_efa")
_CMA = frozenset({"cma"})
_CMA_ALIASES = frozenset({"shm", "sm"})
_RDMA = frozenset(
    {"rc_v", "rc_verbs", "rc_x", "rc_mlx5", "dc_x", "dc_mlx5", "ud_v", "ud_verbs", "ud_x", "ud_mlx5", "srd"}
)
_RDMA_ALIASES = frozenset({"ib", "rc", "dc", "ud"})
_CUDA_IPC = frozenset({"cuda_ipc"})
_CUDA_ALIASES = frozenset({"cuda"})


def prepare_ucx_environment(environ: MutableMapping[str, str], *, infiniband: Path = INFINIBAND) -> None:
    """Set what a command of ours wants of UCX and NIXL, where the user has not. For commands, never for library use.

    Call it before NIXL is imported. Without InfiniBand devices it keeps UCX from loading the InfiniBand modules, whose
    library can end the process with a segmentation fault at exit, in place of its own status. And it quiets both
    loggers: NIXL's errors come as exceptions too, and its Python logger writes to standard output.

    Args:
        environ: usually `os.environ`; changed in place.
        infiniband: the directory of the kernel's InfiniBand devices.
    """
    if not _entries(infiniband):
        environ.setdefault("UCX_MODULES", "^" + ",".join(_RDMA_MODULES))
    environ.setdefault("UCX_LOG_LEVEL", "error")
    environ.setdefault("NIXL_LOG_LEVEL", "FATAL")


def host_id() -> str:
    """Equal in two processes only if they share a kernel and a process namespace, as CMA needs."""
    try:
        return f"{_BOOT_ID.read_text().strip()}/{_PID_NAMESPACE.readlink()}"
    except OSError:
        return ""


def kernels_differ(one: str, other: str) -> bool:
    """Whether two `host_id`s are surely of two kernels, so that their processes share no memory."""
    return bool(one) and bool(other) and one.partition("/")[0] != other.partition("/")[0]


def usable_lanes(
    environ: Mapping[str, str], *, infiniband: Path = INFINIBAND, ptrace: Path = _PTRACE_SCOPE, cuda: bool = False
) -> list[str]:
    """The lanes that UCX may use here, the best first: some of `cma` (one host only), `rdma`, `tcp`, `cuda_ipc`.

    The last is for memory of GPUs alone, and comes only with `cuda`: this UCX can move such memory.
    """
    transports = environ.get("UCX_TLS", "all")
    lanes = []
    if _allows(transports, _CMA, _CMA_ALIASES) and _may_attach(ptrace):
        lanes.append("cma")
    if _allows(transports, _RDMA, _RDMA_ALIASES) and _rdma_port(environ, infiniband):
        lanes.append("rdma")
    lanes.append("tcp")
    if cuda and _allows(transports, _CUDA_IPC, _CUDA_ALIASES):
        lanes.append("cuda_ipc")
    return lanes


def choose_lane(ours: Iterable[str], theirs: Iterable[str], *, same_host: bool) -> str:
    """The first lane for host memory of `ours` that the peer has too; `cma` only on one host."""
    common = (set(theirs) | {"tcp"}) - _CUDA_IPC
    return next((lane for lane in ours if lane in common and (lane != "cma" or same_host)), "tcp")


def _allows(setting: str, names: frozenset[str], aliases: frozenset[str] = frozenset()) -> bool:
    """Whether UCX's list `setting` (`a,b`, or `^a,b` for all but these) leaves any of `names`."""
    listed = {name.strip() for name in setting.removeprefix("^").split(",")}
    if setting.startswith("^"):
        return bool(names - listed) and not listed & aliases
    return bool(listed & (names | aliases | {"all"}))


def _may_attach(ptrace: Path) -> bool:
    """Whether Yama lets another process of ours write here: as UCX asks it, 2 and 3 count as no."""
    try:
        return ptrace.read_text().strip() in {"0", "1"}
    except OSError:
        return True  # no Yama


def _rdma_port(environ: Mapping[str, str], infiniband: Path) -> bool:
    """Whether a device has an active port and UCX may load its modules and use the device."""
    if not _allows(environ.get("UCX_MODULES", "all"), frozenset(_RDMA_MODULES)):
        return False
    wanted = environ.get("UCX_NET_DEVICES", "all")
    devices = {device.split(":")[0] for device in wanted.split(",")}
    return any(
        state.read_text().startswith("4")  # "4: ACTIVE"
        for device in _entries(infiniband)
        if wanted == "all" or device.name in devices
        for state in device.glob("ports/*/state")
    )


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []
