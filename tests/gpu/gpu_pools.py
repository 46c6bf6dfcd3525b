"""Pools of every engine's layout as tensors on a GPU (or the CPU), filled by a formula and compared whole.

A pool is written and read by indexing tensors of the engine's own shape; strides, planner and kernels have no part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from rdma_kv.layout import KvLayout
from rdma_kv.topology import ModelSpec, Topology

SENTINEL = 0xA5


class Dims(NamedTuple):
    """`row` in bytes; `page` in tokens."""

    layers: int
    kv: int
    pages: int
    page: int
    heads: int
    row: int


class Kind(NamedTuple):
    """One engine's tensors: shapes of the buffers; the view `[pages, page, heads, row]` of one layer's K or V; the layout."""

    shapes: Callable[[Dims], list[tuple[int, ...]]]
    plane: Callable[[list[torch.Tensor], int, int, Dims], torch.Tensor]
    layout: Callable[[Dims], KvLayout]


def _common(d: Dims) -> dict[str, int]:
    return {"layers": d.layers, "pages": d.pages, "page_size": d.page, "row_bytes": d.row}


KINDS = {
    "nhd": Kind(
        lambda d: [(d.layers, d.kv, d.pages, d.page, d.heads, d.row)],
        lambda b, layer, kv, d: b[0][layer, kv],
        lambda d: KvLayout.nhd(**_common(d), heads=d.heads, kv=d.kv),
    ),
    "hnd": Kind(
        lambda d: [(d.layers, d.kv, d.pages, d.heads, d.page, d.row)],
        lambda b, layer, kv, d: b[0][layer, kv].transpose(1, 2),
        lambda d: KvLayout.hnd(**_common(d), heads=d.heads, kv=d.kv),
    ),
    "lightllm": Kind(
        lambda d: [(d.layers, d.pages, 2 * d.heads, d.row)],
        lambda b, layer, kv, d: b[0][layer, :, None, kv * d.heads : (kv + 1) * d.heads],
        lambda d: KvLayout.lightllm(layers=d.layers, slots=d.pages, heads=d.heads, row_bytes=d.row),
    ),
    "sglang": Kind(
        lambda d: [(d.pages * d.page, d.heads, d.row)] * (2 * d.layers),
        lambda b, layer, kv, d: b[kv * d.layers + layer].view(d.pages, d.page, d.heads, d.row),
        lambda d: KvLayout.sglang(**_common(d), heads=d.heads),
    ),
    "trtllm": Kind(
        lambda d: [(d.pages, d.layers, d.kv, d.heads, d.page, d.row)],
        lambda b, layer, kv, d: b[0][:, layer, kv].transpose(1, 2),
        lambda d: KvLayout.trtllm(**_common(d), heads=d.heads, kv=d.kv),
    ),
    "mla": Kind(
        lambda d: [(d.layers, d.pages, d.page, d.row)],
        lambda b, layer, kv, d: b[0][layer][:, :, None],
        lambda d: KvLayout.mla(**_common(d)),
    ),
}


def cells(request: int, layers: range, kv: int, heads: range, tokens: range, row: int, device: str) -> torch.Tensor:
    """uint8 `[layers, kv, tokens, heads, row]`: what the KV of a request is, as a function of the place."""

    def along(values: Iterable[int], dim: int) -> torch.Tensor:
        shape = [1] * 5
        shape[dim] = -1
        return torch.tensor(list(values), dtype=torch.int32, device=device).view(shape)

    layer, token, head = along(layers, 0), along(tokens, 2), along(heads, 3)
    mixed = request * 101 + layer * 31 + along(range(kv), 1) * 17 + token * 7 + head * 59 + along(range(row), 4) * 3
    return ((mixed + token * head * 13 + token * layer * 5) % 251).to(torch.uint8)


class Pool:
    """The pool of one rank of an engine with one component; all bytes begin as `SENTINEL`."""

    def __init__(
        self, kind: str, model: ModelSpec, topology: Topology, rank: int, *, pages: int, page: int, device: str
    ) -> None:
        (component,) = model.components
        layers = component.layers_within(topology.stage_layers(topology.place(rank)[0]))
        heads = component.heads_of(topology.attention_rank(rank), topology.attention_tp)
        self.kind, self.device = KINDS[kind], device
        self.dims = Dims(layers.size, component.kv_factor, pages, page, heads.size, component.row_bytes)
        self.layers, self.heads = range(layers.start, layers.end), range(heads.start, heads.end)
        self.layout = self.kind.layout(self.dims)
        self.buffers = self._empty()

    def writer(self, request: int, pages: Sequence[int], tokens: range) -> Callable[[], None]:
        """Writes a request's KV to its pages when it is called: kernels on the current stream, and no wait for any."""
        return self._writer(self.buffers, request, pages, tokens)

    def wrong(self, landed: Iterable[tuple[int, Sequence[int], range]]) -> list[str]:
        """Where the pool is not what it was at first, but for these (request, page table, tokens); empty if nowhere."""
        expected = self._empty()
        for request, pages, tokens in landed:
            self._writer(expected, request, pages, tokens)()
        found = []
        for number, (now, then) in enumerate(zip(self.buffers, expected, strict=True)):
            differs = (now != then).flatten()
            count = int(differs.sum())
            if count:
                found.append(
                    f"buffer {number} of {self.layout.name}: {count} bytes, the first at {int(differs.int().argmax())}"
                )
        return found

    def _empty(self) -> list[torch.Tensor]:
        shapes = self.kind.shapes(self.dims)
        return [torch.full(shape, SENTINEL, dtype=torch.uint8, device=self.device) for shape in shapes]

    def _writer(
        self, buffers: list[torch.Tensor], request: int, pages: Sequence[int], tokens: range
    ) -> Callable[[], None]:
        d = self.dims
        data = cells(request, self.layers, d.kv, self.heads, tokens, d.row, self.device)
        page = torch.tensor([pages[t // d.page] for t in tokens], device=self.device)
        offset = torch.tensor([t % d.page for t in tokens], device=self.device)

        def write(held: Any = (data, page, offset)) -> None:
            for layer in range(d.layers):
                for kv in range(d.kv):
                    self.kind.plane(buffers, layer, kv, d)[page, offset] = data[layer, kv]

        return write
