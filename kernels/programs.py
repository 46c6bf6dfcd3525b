"""How many programs a launch should have: as few as outrun the lane, so that the engine keeps its multiprocessors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from rdma_kv.errors import ConfigError

DEFAULT_PROGRAMS = 16
"""Of a launch, where no lane is known."""

MARGIN = 1.2
"""By how much the kernel must outrun the lane, so that it is never what a transfer waits for."""

H200: Mapping[int, float] = MappingProxyType(
    {4: 150.0, 8: 295.0, 12: 440.0, 16: 580.0, 20: 720.0, 24: 860.0, 32: 1150.0, 48: 1690.0, 132: 1860.0}
)
"""Payload in GB/s by number of programs, of gather and scatter whichever is slower, rows of 1 KiB; rounded down from what
`rdma-kv bench gpu` measured on an H200."""


def fewest_programs(lane_gb_s: float, curve: Mapping[int, float] = H200, margin: float = MARGIN) -> int:
    """The fewest programs of the curve that carry `margin` times what the lane does; where none do, the fastest.

    Args:
        lane_gb_s: payload that the lane takes, in GB/s (1e9 bytes).
        curve: payload in GB/s by number of programs.
        margin: at least 1.

    Raises:
        ConfigError: an argument that no lane or curve can have.
    """
    if not curve:
        raise ConfigError("curve", "is empty; measure one with `rdma-kv bench gpu`")
    if not (lane_gb_s > 0 and lane_gb_s != float("inf")):
        raise ConfigError("lane_gb_s", f"{lane_gb_s} is no rate")
    if not margin >= 1:
        raise ConfigError("margin", f"{margin} is below 1, so the kernel would be slower than the lane")
    enough = [programs for programs, gb_s in curve.items() if gb_s >= margin * lane_gb_s]
    if enough:
        return min(enough)
    fastest = max(curve.values())
    return min(programs for programs, gb_s in curve.items() if gb_s == fastest)


def rate_gb_s(programs: int, curve: Mapping[int, float] = H200) -> float:
    """What so many programs carry, in GB/s: along lines between the points of the curve, from (0, 0) to its end.

    Raises:
        ConfigError: the number is not positive, or the curve is empty.
    """
    if programs < 1:
        raise ConfigError("programs", f"{programs} is not positive")
    if not curve:
        raise ConfigError("curve", "is empty; measure one with `rdma-kv bench gpu`")
    below, below_gb_s = 0, 0.0
    for number, gb_s in sorted(curve.items()):
        if programs <= number:
            return below_gb_s + (gb_s - below_gb_s) * (programs - below) / (number - below)
        below, below_gb_s = number, gb_s
    return below_gb_s


LANE_GB_S: Mapping[str, float] = MappingProxyType({"cuda_ipc": 300.0, "rdma": 50.0, "pinned": 55.0})
"""What a lane carries, in GB/s: NVLink between two H200 under transfers, 400 Gbit/s, PCIe 5 x16 one way. All that goes
through pinned host memory is bound by PCIe first. One copy alone has 395 over NVLink: the 12 programs of 300 outrun that
too, by a tenth, and the engine keeps four multiprocessors that transfers gain nothing by."""


def programs_for(lanes: Iterable[str], curve: Mapping[int, float] = H200) -> int:
    """The fewest programs that outrun the fastest of some lanes; `DEFAULT_PROGRAMS` if there are none.

    Args:
        lanes: as `Agent.stats` names them: `cuda_ipc`, `rdma`, `pinned+tcp`, ...
        curve: as for `fewest_programs`.
    """
    rates = [LANE_GB_S.get(lane.partition("+")[0], LANE_GB_S["pinned"]) for lane in lanes]
    return fewest_programs(max(rates), curve) if rates else DEFAULT_PROGRAMS
