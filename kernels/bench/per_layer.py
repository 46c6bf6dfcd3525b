"""The baseline of `bench gpu`: the gather that engines launch once per layer, written for itself in its usual shape.

20 programs of one warp; a program takes every 20th token and copies its row 256 elements at a time. It is that small so that
the engine's compute keeps its multiprocessors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

PROGRAMS = 20
_WARPS = 1
_BLOCK = 256
_STAGES = 3

_jit: Callable[[Callable[..., Any]], Any] = triton.jit


@_jit
def _gather_layer(
    layer: tl.tensor, slots: tl.tensor, out: tl.tensor, tokens: tl.tensor, row: tl.tensor, block: tl.constexpr
) -> None:
    """Rows of `row` elements of the slots, from `layer` `[slots, row]` to `out` `[tokens, row]`."""
    place = tl.arange(0, block)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        source = layer + tl.load(slots + token) * row
        target = out + tl.cast(token, tl.int64) * row
        for begin in range(0, row, block):
            mask = begin + place < row
            tl.store(target + begin + place, tl.load(source + begin + place, mask=mask), mask=mask)


def gather_per_layer(layers: Sequence[torch.Tensor], slots: torch.Tensor, out: torch.Tensor) -> None:
    """One launch a layer.

    Args:
        layers: each `[slots, row]`, of a type of 2 bytes.
        slots: int64 `[tokens]`, on the device.
        out: `[layers, tokens, row]`, of that type.
    """
    for layer, to in zip(layers, out, strict=True):
        _gather_layer[(PROGRAMS,)](
            layer, slots, to, slots.numel(), layer.shape[1], block=_BLOCK, num_warps=_WARPS, num_stages=_STAGES
        )
