"""How one rank stores one component of the KV cache, by strides in bytes.

A layout says where the row of (layer, kv, page, token in page, head) begins:

    origin[layer][kv] + page * page_stride + token * token_stride + head * head_stride

Each origin is an offset inside one of the pool's buffers, so separate K and V tensors, one tensor a layer, and one block
for all layers are the same thing to everybody above. A row is contiguous and `row_bytes` long. The named constructors
know the layouts of the engines; a layout of another engine is written with `KvLayout(...)` itself.

Sources of the named forms: the public sources of vLLM, SGLang, LightLLM and TensorRT-LLM, as their KV tensors are shaped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rdma_kv.errors import ConfigError

Int64Array = npt.NDArray[np.int64]


class Origin(NamedTuple):
    """Where the first page of one (layer, kv) begins: byte `offset` of the pool's buffer number `buffer`."""

    buffer: int
    offset: int


class _Level(NamedTuple):
    """One dimension of a plane: `steps` times what lies inside, which spans `extent` bytes, `stride` bytes apart."""

    stride: int
    steps: int
    extent: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Strides of one rank's pool of one component.

    Attributes:
        origins: `[num_layers][kv_factor]`; layers are those of the rank's pipeline stage, in order.
        num_pages, page_size: pages of `page_size` tokens each. Token-granular pools have `page_size` 1.
        heads: heads on this rank.
        row_bytes: contiguous bytes of one head of one token.
        page_stride, token_stride, head_stride: bytes.

    Raises:
        ConfigError: a size that is not positive, or strides or origins that let two rows share bytes.
    """

    origins: tuple[tuple[Origin, ...], ...]
    num_pages: int
    page_size: int
    heads: int
    row_bytes: int
    page_stride: int
    token_stride: int
    head_stride: int
    name: str = "custom"

    def __post_init__(self) -> None:
        for field in ("num_pages", "page_size", "heads", "row_bytes"):
            if getattr(self, field) < 1:
                raise ConfigError(field, f"{getattr(self, field)} is not positive")
        if not self.origins or len({len(planes) for planes in self.origins}) != 1 or not self.origins[0]:
            raise ConfigError(
                "origins", "needs the same number of kv planes, at least one, in each of one or more layers"
            )
        if any(origin.offset < 0 or origin.buffer < 0 for planes in self.origins for origin in planes):
            raise ConfigError("origins", "buffers and offsets must not be negative")
        self._check_planes_disjoint(self._check_rows_disjoint())

    def _check_rows_disjoint(self) -> list[_Level]:
        """Nested strides: sorted by size, each must span all that the smaller ones cover."""
        levels = []
        extent = self.row_bytes
        dims = [
            (self.head_stride, self.heads, "head_stride"),
            (self.token_stride, self.page_size, "token_stride"),
            (self.page_stride, self.num_pages, "page_stride"),
        ]
        for stride, count, field in sorted(dims):
            if count == 1:
                continue
            if stride < extent:
                raise ConfigError(
                    field, f"{stride} bytes is less than the {extent} bytes that lie inside; rows would overlap"
                )
            levels.append(_Level(stride, count, extent))
            extent = stride * (count - 1) + extent
        return levels

    def _check_planes_disjoint(self, levels: list[_Level]) -> None:
        """No plane of a (layer, kv) may reach into the rows of another; into its gaps it may."""
        offsets: dict[int, list[int]] = {}
        for planes in self.origins:
            for buffer, offset in planes:
                offsets.setdefault(buffer, []).append(offset)
        for found in offsets.values():
            for shift in _near_shifts(np.sort(np.array(found, dtype=np.int64)), self.plane_bytes):
                if _rows_meet(levels, self.row_bytes, shift):
                    raise ConfigError("origins", f"two planes {shift} bytes apart would share bytes")

    @property
    def num_layers(self) -> int:
        return len(self.origins)

    @property
    def kv_factor(self) -> int:
        return len(self.origins[0])

    @property
    def plane_bytes(self) -> int:
        """From a plane's origin to behind its last row."""
        return (
            (self.num_pages - 1) * self.page_stride
            + (self.page_size - 1) * self.token_stride
            + (self.heads - 1) * self.head_stride
            + self.row_bytes
        )

    def required_bytes(self) -> tuple[int, ...]:
        """Smallest size of each buffer that the layout reaches into."""
        need = [0] * (1 + max(origin.buffer for planes in self.origins for origin in planes))
        for planes in self.origins:
            for buffer, offset in planes:
                need[buffer] = max(need[buffer], offset + self.plane_bytes)
        return tuple(need)

    def pointers(self, buffer_addresses: Int64Array) -> Int64Array:
        """Base addresses, int64 `[num_layers, kv_factor]`, for buffers that begin at `buffer_addresses`."""
        table = np.array(self.origins, dtype=np.int64)  # [layers, kv, (buffer, offset)]
        return buffer_addresses[table[..., 0]] + table[..., 1]

    # Named layouts. `layers` counts the layers of the rank's stage, `heads` the rank's own heads.

    @classmethod
    def nhd(cls, *, layers: int, pages: int, page_size: int, heads: int, row_bytes: int, kv: int = 2) -> KvLayout:
        """vLLM NHD: one buffer for all layers, each layer `(kv, pages, page_size, heads, dim)`."""
        token = heads * row_bytes
        plane = pages * page_size * token
        return cls(
            _stacked(layers, kv, plane),
            pages,
            page_size,
            heads,
            row_bytes,
            page_size * token,
            token,
            row_bytes,
            name="nhd",
        )

    @classmethod
    def hnd(cls, *, layers: int, pages: int, page_size: int, heads: int, row_bytes: int, kv: int = 2) -> KvLayout:
        """vLLM HND: one buffer for all layers, each layer `(kv, pages, heads, page_size, dim)`."""
        head = page_size * row_bytes
        plane = pages * heads * head
        return cls(
            _stacked(layers, kv, plane), pages, page_size, heads, row_bytes, heads * head, row_bytes, head, name="hnd"
        )

    @classmethod
    def mla(cls, *, layers: int, pages: int, page_size: int, row_bytes: int) -> KvLayout:
        """Latent cache: one buffer for all layers, each layer `(pages, page_size, latent_dim)`."""
        plane = pages * page_size * row_bytes
        return cls(
            _stacked(layers, 1, plane),
            pages,
            page_size,
            1,
            row_bytes,
            page_size * row_bytes,
            row_bytes,
            row_bytes,
            name="mla",
        )

    @classmethod
    def lightllm(cls, *, layers: int, slots: int, heads: int, row_bytes: int) -> KvLayout:
        """LightLLM: one buffer `(layers, slots, 2 * heads, dim)`, token-granular, K heads first, then V heads."""
        token = 2 * heads * row_bytes
        origins = tuple(
            (Origin(0, layer * slots * token), Origin(0, layer * slots * token + heads * row_bytes))
            for layer in range(layers)
        )
        return cls(origins, slots, 1, heads, row_bytes, token, token, row_bytes, name="lightllm")

    @classmethod
    def sglang(cls, *, layers: int, pages: int, page_size: int, heads: int, row_bytes: int) -> KvLayout:
        """SGLang: a K buffer and a V buffer for each layer, `(slots, heads, dim)`; all K layers first, then all V."""
        token = heads * row_bytes
        origins = tuple((Origin(layer, 0), Origin(layers + layer, 0)) for layer in range(layers))
        return cls(origins, pages, page_size, heads, row_bytes, page_size * token, token, row_bytes, name="sglang")

    @classmethod
    def trtllm(cls, *, layers: int, pages: int, page_size: int, heads: int, row_bytes: int, kv: int = 2) -> KvLayout:
        """TensorRT-LLM: one buffer of blocks, each `(layers, kv, heads, page_size, dim)`."""
        head = page_size * row_bytes
        plane = heads * head
        origins = tuple(tuple(Origin(0, (layer * kv + k) * plane) for k in range(kv)) for layer in range(layers))
        return cls(origins, pages, page_size, heads, row_bytes, layers * kv * plane, row_bytes, head, name="trtllm")

    @classmethod
    def opaque(cls, *, layers: int, pages: int, page_bytes: int) -> KvLayout:
        """Pages whose interior only their back-end understands: one buffer, each layer `(pages, page_bytes)`."""
        origins = _stacked(layers, 1, pages * page_bytes)
        return cls(origins, pages, 1, 1, page_bytes, page_bytes, page_bytes, page_bytes, name="opaque")


def _stacked(layers: int, kv: int, plane_bytes: int) -> tuple[tuple[Origin, ...], ...]:
    """Origins of one buffer in which the planes lie one behind the other, `[layer][kv]`."""
    return tuple(tuple(Origin(0, (layer * kv + k) * plane_bytes) for k in range(kv)) for layer in range(layers))


def _near_shifts(offsets: Int64Array, reach: int) -> set[int]:
    """Distances below `reach` between any two of the ascending `offsets`."""
    shifts: set[int] = set()
    for lag in range(1, offsets.size):
        apart = offsets[lag:] - offsets[:-lag]
        near = apart[apart < reach]
        if not near.size:
            break
        shifts.update(near.tolist())
    return shifts


def _rows_meet(levels: list[_Level], row_bytes: int, shift: int) -> bool:
    """Whether a plane and the same plane `shift` bytes further have a byte in common; `levels` from the innermost."""
    if not levels:
        return abs(shift) < row_bytes
    *inner, (stride, steps, extent) = levels
    first = max(1 - steps, -((shift + extent - 1) // stride))
    last = min(steps - 1, (extent - 1 - shift) // stride)
    return any(_rows_meet(inner, row_bytes, shift + k * stride) for k in range(first, last + 1))
