"""Where the demo's replicas keep their model and their pools: in host memory, or on GPUs.

The demo forks, and CUDA does not survive a fork: a child of a process that has used CUDA, if only to count the GPUs,
cannot use it. Hence another process is asked what there is, and whoever forks never imports torch for a GPU.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import MutableMapping, Sequence
from typing import NamedTuple

from rdma_kv.errors import ConfigError, LocalProtocolError

OPTION = "--device"
CPU = "cpu"
_FIX = "use --device cpu, or run on a machine with an NVIDIA GPU"
_PROBE_S = 120.0  # the import of torch from a cold disk, and the driver's start
_PROBE = """
import json, torch
cuda = torch.version.cuda
print(json.dumps([torch.__version__, cuda, torch.cuda.device_count() if cuda and torch.cuda.is_available() else 0]))
"""


class Seen(NamedTuple):
    """What a process of this installation sees.

    Attributes:
        torch: its version.
        cuda: the version of CUDA that it was built for; None for a build without.
        gpus: how many it can use.
        complaint: the last line that was said about it.
    """

    torch: str
    cuda: str | None
    gpus: int
    complaint: str = ""


def parse_device(text: str) -> int | None:
    """The GPU that `cuda:N` pins; None for `cpu` and `cuda`.

    Raises:
        ConfigError: anything else.
    """
    if text in {CPU, "cuda"}:
        return None
    match = re.fullmatch(r"cuda:(\d{1,4})", text, re.ASCII)
    if match is None:
        raise ConfigError(OPTION, f"{text!r}; use cpu, cuda (all GPUs that there are) or cuda:N for one of them")
    return int(match[1])


def check_device(text: str, transport: str) -> None:
    """What can be said of `--device` without looking at the machine.

    Raises:
        ConfigError: a word that means nothing, or a transport that stays in one process, which has no use for GPUs.
    """
    parse_device(text)
    if text != CPU and transport == "loopback":
        raise ConfigError(
            OPTION, f"{text} does not go with --transport loopback; use auto, ucx or nixl, or --device cpu"
        )


def gpus(text: str) -> tuple[int, ...]:
    """CUDA ordinals of the GPUs that `--device` means; none for `cpu`. May start a process, and remembers its answer.

    Raises:
        ConfigError: torch is missing or has no CUDA, there is no GPU, or not that one; the text says what to do.
    """
    pinned = parse_device(text)
    return () if text == CPU else choose(pinned, look())


def choose(pinned: int | None, seen: Seen) -> tuple[int, ...]:
    """`pinned`, or all that there are.

    Raises:
        ConfigError: as `gpus`.
    """
    if seen.cuda is None:
        raise ConfigError(
            OPTION, f"torch {seen.torch} is built without CUDA; install one for CUDA, or use --device cpu"
        )
    if not seen.gpus:
        reason = f" ({seen.complaint})" if seen.complaint else ""
        raise ConfigError(OPTION, f"torch {seen.torch} for CUDA {seen.cuda} finds no GPU here{reason}; {_FIX}")
    if pinned is not None and pinned >= seen.gpus:
        last = f"..cuda:{seen.gpus - 1}" if seen.gpus > 1 else ""
        raise ConfigError(OPTION, f"cuda:{pinned} is not here; use cuda:0{last}, or cuda for all")
    return tuple(range(seen.gpus)) if pinned is None else (pinned,)


@functools.cache
def look() -> Seen:
    """Ask another process what torch sees, so that this one can fork afterwards.

    Raises:
        ConfigError: torch or triton is not installed, or torch cannot be used.
    """
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                OPTION, f"{package} is not installed; pip install 'rdma-kv[demo,gpu]', or use --device cpu"
            )
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired as exc:
        raise ConfigError(OPTION, f"torch did not say within {_PROBE_S:.0f} s what GPUs there are; {_FIX}") from exc
    complaint = _last_words(done.stderr)
    if done.returncode:
        raise ConfigError(OPTION, f"torch cannot be used: {complaint or f'exit status {done.returncode}'}; {_FIX}")
    version, cuda, count = json.loads(done.stdout.splitlines()[-1])
    return Seen(version, cuda, count, complaint)


def _last_words(text: str) -> str:
    """The last line that is no quoted source, without the place that a Python warning puts before it; at most 200
    characters."""
    lines = [line for line in text.splitlines() if line.strip() and not line[0].isspace()]
    return lines[-1].rpartition("Warning: ")[2].strip()[:200] if lines else ""


def spread(gpus: Sequence[int], prefill: int, decode: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which GPU each process of the two engines is on: in turn, the decode side behind the prefill side.

    All GPUs are used where there are as many processes. Where the prefill side ends with the last GPU the decode side
    begins with the second, so that from one process to its counterpart KV goes to another GPU wherever there are two.

    Args:
        gpus: at least one.
        prefill, decode: processes of each engine.

    Returns:
        CUDA ordinals of the prefill processes, and of the decode processes.
    """
    count = len(gpus)
    shift = prefill % count or 1
    return (
        tuple(gpus[place % count] for place in range(prefill)),
        tuple(gpus[(place + shift) % count] for place in range(decode)),
    )


def check_unused() -> None:
    """That children of this process could use CUDA.

    Raises:
        LocalProtocolError: this process has used CUDA itself.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise LocalProtocolError("this process has used CUDA, which its forked replicas could not; start a new one")


def prepare(environ: MutableMapping[str, str]) -> None:
    """Before torch is imported by a process that will use a GPU: let cuBLAS sum in the same order every time.

    Source: "Reproducibility" in the documentation of PyTorch, "Results reproducibility" in that of cuBLAS.
    """
    environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def name(ordinals: Sequence[int]) -> str:
    """`cpu`, or the GPUs as `cuda:0+cuda:1`."""
    return "+".join(f"cuda:{ordinal}" for ordinal in sorted(set(ordinals))) or CPU
