"""Paged KV memory as the engines shape it, and the cutting of KV into the shards of ranks.

This is the independent check of a transfer. A pool is written and read by plain indexing of arrays that have the shape
of that engine's tensor; the strides of `KvLayout`, the planner and the kernels have no part in it. `RankPool.layout` is
only what the pool tells rdma-kv about itself.

Every word of a pool begins as a seeded pattern of floats in [64, 128): finite, never zero, far from any KV value of the
demo model. `untouched` computes the pattern again and finds each word outside of what was meant to be written that is
no longer the pattern; between calls it costs no memory.

Layouts (`layers`, `heads` are the rank's own; kv = 2, or 1 for a latent):

    nhd       (layers, kv, pages, page, heads, dim)          vLLM
    hnd       (layers, kv, pages, heads, page, dim)          vLLM
    lightllm  (layers, slots, 2 * heads, dim)                K heads first, then V heads
    sglang    K buffers of all layers, then V buffers, each (slots, heads, dim)
    trtllm    (pages, layers, kv, heads, page, dim)
    mla       (layers, pages, page, dim)

`RankPool` keeps them in host memory, `TensorPool` as torch tensors, on a GPU for instance; both judge what they hold with
the same lines, over arrays in host memory.

LightLLM is token-granular: its page size must be 1, and its page table is the request's slot table, one slot a token.
A page table covers a request from position 0, whatever part of it is written or read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rdma_kv.demo.model import KvArray
from rdma_kv.errors import ConfigError, LocalProtocolError
from rdma_kv.layout import KvLayout
from rdma_kv.topology import Component, Topology
from rdma_kv.types import Interval

Int64Array = npt.NDArray[np.int64]

_PATTERN_WORDS = 65_537  # prime, hence no page of a pool looks like another page


class _Dims(NamedTuple):
    layers: int
    kv: int
    pages: int
    page: int
    heads: int
    dim: int


class _Engine(NamedTuple):
    """One engine's tensor: the shapes of its buffers, its layout, and one layer's K or V as a view.

    `plane(buffers, layer, kv, dims)` is a writable view `[pages, page, heads, dim]` of NumPy's arrays or of torch's tensors;
    all planes together are all words.
    """

    shapes: Callable[[_Dims], list[tuple[int, ...]]]
    plane: Callable[[list[Any], int, int, _Dims], Any]
    layout: Callable[[_Dims], KvLayout]


def _row(d: _Dims) -> int:
    return d.dim * 4


_ENGINES = {
    "nhd": _Engine(
        lambda d: [(d.layers, d.kv, d.pages, d.page, d.heads, d.dim)],
        lambda b, layer, kv, _d: b[0][layer, kv],
        lambda d: KvLayout.nhd(
            layers=d.layers, pages=d.pages, page_size=d.page, heads=d.heads, row_bytes=_row(d), kv=d.kv
        ),
    ),
    "hnd": _Engine(
        lambda d: [(d.layers, d.kv, d.pages, d.heads, d.page, d.dim)],
        lambda b, layer, kv, _d: b[0][layer, kv].swapaxes(1, 2),
        lambda d: KvLayout.hnd(
            layers=d.layers, pages=d.pages, page_size=d.page, heads=d.heads, row_bytes=_row(d), kv=d.kv
        ),
    ),
    "lightllm": _Engine(
        lambda d: [(d.layers, d.pages, 2 * d.heads, d.dim)],
        lambda b, layer, kv, d: b[0][layer, :, None, kv * d.heads : (kv + 1) * d.heads],
        lambda d: KvLayout.lightllm(layers=d.layers, slots=d.pages, heads=d.heads, row_bytes=_row(d)),
    ),
    "sglang": _Engine(
        lambda d: [(d.pages * d.page, d.heads, d.dim)] * (2 * d.layers),
        lambda b, layer, kv, d: b[kv * d.layers + layer].reshape(d.pages, d.page, d.heads, d.dim),
        lambda d: KvLayout.sglang(layers=d.layers, pages=d.pages, page_size=d.page, heads=d.heads, row_bytes=_row(d)),
    ),
    "trtllm": _Engine(
        lambda d: [(d.pages, d.layers, d.kv, d.heads, d.page, d.dim)],
        lambda b, layer, kv, _d: b[0][:, layer, kv].swapaxes(1, 2),
        lambda d: KvLayout.trtllm(
            layers=d.layers, pages=d.pages, page_size=d.page, heads=d.heads, row_bytes=_row(d), kv=d.kv
        ),
    ),
    "mla": _Engine(
        lambda d: [(d.layers, d.pages, d.page, d.dim)],
        lambda b, layer, _kv, _d: b[0][layer][:, :, None],
        lambda d: KvLayout.mla(layers=d.layers, pages=d.pages, page_size=d.page, row_bytes=_row(d)),
    ),
}

LAYOUTS = tuple(_ENGINES)
TOKEN_GRANULAR = frozenset({"lightllm"})
"""Layouts whose page size must be 1."""


class Share(NamedTuple):
    """What of a component one rank holds: positions in its layer list, and global heads."""

    layers: Interval
    heads: Interval

    @classmethod
    def of(cls, component: Component, topology: Topology, rank: int) -> Share:
        """Layers of the rank's stage, heads of its attention rank.

        Raises:
            ConfigError: the rank does not exist, heads and attention TP do not divide, or cp is above 1 (the demo cuts
                no token axis).
        """
        if topology.cp > 1:
            raise ConfigError("cp", f"{topology.cp}; pools of the demo hold all tokens, use cp=1")
        stage, _, _ = topology.place(rank)
        return cls(
            component.layers_within(topology.stage_layers(stage)),
            component.heads_of(topology.attention_rank(rank), topology.attention_tp),
        )


def plane_name(component: Component, kv: int) -> str:
    """`K` or `V`; `latent` where a component has one plane."""
    return "KV"[kv] if component.kv_factor == 2 else "latent"


class RankPool:
    """The KV pages of one component on one rank.

    Attributes:
        buffers: the engine's tensors, C-contiguous float32. The pool owns them as long as it lives; they are never
            allocated again, so their addresses may be registered.
        layout: what `buffers` are to rdma-kv, by the named constructor of the same name.
        share: layers (positions in `component.layers`) and global heads that this rank holds.

    Args:
        layout: one of `LAYOUTS`.
        pages: pages of `page_size` tokens (slots, for a token-granular layout).
        seed: of the initial pattern, which also differs by rank and buffer. Give each engine another one: then what
            a faulty transfer brings from prefill's unwritten memory is seen as well.

    Raises:
        ConfigError: an unknown layout, one that cannot hold the component, or a size that cannot work.
    """

    def __init__(
        self,
        layout: str,
        component: Component,
        topology: Topology,
        rank: int,
        *,
        pages: int,
        page_size: int,
        seed: int = 0,
    ) -> None:
        self.share = Share.of(component, topology, rank)
        _check_fit(layout, component, self.share, page_size)
        if pages < 1:
            raise ConfigError("pages", f"{pages}; a pool needs a page")
        self.component = component
        self.rank = rank
        self._engine = _ENGINES[layout]
        self._dims = _Dims(
            self.share.layers.size,
            component.kv_factor,
            pages,
            page_size,
            self.share.heads.size,
            component.row_bytes // 4,
        )
        self._seed = (seed, rank)
        self.layout = self._engine.layout(self._dims)
        self.buffers = self._pattern()

    @property
    def pages(self) -> int:
        return self._dims.pages

    @property
    def page_size(self) -> int:
        return self._dims.page

    def write(self, pages: Sequence[int], kv_shard: KvArray, *, start: int = 0) -> None:
        """Put positions `[start, start + tokens)` of a request into its pages.

        Args:
            pages: the request's page table, from position 0.
            kv_shard: float32 `[layers, kv, tokens, heads, dim]` of this rank.

        Raises:
            LocalProtocolError: a shard of another shape, or a page table that is too short, repeats or leaves the pool.
        """
        d = self._dims
        page, offset = self._places(pages, self._positions(kv_shard, start))
        for layer in range(d.layers):
            for kv in range(d.kv):
                self._engine.plane(self.buffers, layer, kv, d)[page, offset] = kv_shard[layer, kv]

    def read(self, pages: Sequence[int], tokens: int, *, start: int = 0) -> KvArray:
        """Positions `[start, start + tokens)` of a request: a new float32 array `[layers, kv, tokens, heads, dim]`.

        Raises:
            LocalProtocolError: a page table that is too short, repeats or leaves the pool.
        """
        d = self._dims
        page, offset = self._places(pages, Interval(start, start + tokens))
        shard = np.empty((d.layers, d.kv, tokens, d.heads, d.dim), np.float32)
        for layer in range(d.layers):
            for kv in range(d.kv):
                shard[layer, kv] = self._engine.plane(self.buffers, layer, kv, d)[page, offset]
        return shard

    def untouched(self, written: Iterable[tuple[Sequence[int], Interval]] = ()) -> list[str]:
        """What changed since the start outside of `written`; empty when all is well.

        Compares every word of every buffer: other pages, the rest of a last partial page, and positions outside of the
        token interval. Needs as much memory as the pool while it runs.

        Args:
            written: (page table, token positions) of each request that was meant to land here.

        Returns:
            One line for each (layer, plane, page) that was touched, with its token offsets and global heads.
        """
        d = self._dims
        places = [self._places(pages, tokens) for pages, tokens in written]
        expected, found_here = self._pattern(), self._in_host_memory()
        found = []
        for layer in range(d.layers):
            for kv in range(d.kv):
                now = self._engine.plane(found_here, layer, kv, d)
                then = self._engine.plane(expected, layer, kv, d)
                for page, offset in places:
                    then[page, offset] = now[page, offset]
                wrong = (now.view(np.uint32) != then.view(np.uint32)).any(axis=-1)  # [pages, page, heads]
                for page_id in np.flatnonzero(wrong.any(axis=(1, 2))):
                    offsets, heads = (np.unique(index) for index in np.nonzero(wrong[page_id]))
                    found.append(
                        f"rank {self.rank} {self.layout.name}: layer "
                        f"{self.component.layers[self.share.layers.start + layer]} {plane_name(self.component, kv)} "
                        f"page {page_id} was touched at offsets {offsets.tolist()} "
                        f"heads {(heads + self.share.heads.start).tolist()}"
                    )
        return found

    def copy(self) -> RankPool:
        """A pool with buffers of its own and the same content and pattern, for controls that damage it."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.buffers = self._copies()
        return twin

    def _copies(self) -> list[Any]:
        return [buffer.copy() for buffer in self.buffers]

    def _in_host_memory(self) -> list[KvArray]:
        """The buffers, to be looked at."""
        return self.buffers

    def _positions(self, kv_shard: Any, start: int) -> Interval:  # noqa: ANN401 - an array, or a tensor of torch
        """Those of a shard that begins at `start`.

        Raises:
            LocalProtocolError: it is no shard of this rank.
        """
        d = self._dims
        tokens = kv_shard.shape[2] if kv_shard.ndim == 5 else 0
        shape, dtype = (d.layers, d.kv, tokens, d.heads, d.dim), str(kv_shard.dtype).removeprefix("torch.")
        if tuple(kv_shard.shape) != shape or dtype != "float32":
            raise LocalProtocolError(
                f"rank {self.rank} holds float32 [{d.layers}, {d.kv}, tokens, {d.heads}, {d.dim}], "
                f"not {dtype} {list(kv_shard.shape)}"
            )
        return Interval(start, start + tokens)

    def _pattern(self) -> list[KvArray]:
        """The buffers as they were at the start."""
        buffers = []
        for index, shape in enumerate(self._engine.shapes(self._dims)):
            rng = np.random.default_rng([*self._seed, index])
            words = (rng.random(_PATTERN_WORDS, np.float32) + np.float32(1)) * np.float32(64)
            buffers.append(np.resize(words, shape))
        return buffers

    def _places(self, pages: Sequence[int], tokens: Interval) -> tuple[Int64Array, Int64Array]:
        """Page and offset of each position, int64 `[tokens]`."""
        table = np.asarray(pages, np.int64)
        if table.size and (table.min() < 0 or table.max() >= self.pages):  # NumPy would wrap a negative page
            raise LocalProtocolError(f"pages {list(pages)} leave the pool's 0..{self.pages - 1}")
        if len(set(table.tolist())) != table.size:
            raise LocalProtocolError(f"pages {list(pages)} name a page twice")
        if tokens.end > table.size * self.page_size:
            raise LocalProtocolError(f"{table.size} pages of {self.page_size} tokens do not hold positions {tokens}")
        positions = np.arange(tokens.start, tokens.end)
        return table[positions // self.page_size], positions % self.page_size


class TensorPool(RankPool):
    """The same pages as tensors of torch, on a GPU for instance.

    `write` takes tensors of the same device and only launches: it waits for nothing, and what was written is there for
    what comes later on the current stream. `read` and `untouched` copy to host memory, and wait for that; transfers that
    write here must have ended.

    Args:
        device: as torch names it, such as `cuda:1`.
    """

    buffers: list[Any]

    def __init__(
        self,
        layout: str,
        component: Component,
        topology: Topology,
        rank: int,
        *,
        device: str,
        pages: int,
        page_size: int,
        seed: int = 0,
    ) -> None:
        import torch

        super().__init__(layout, component, topology, rank, pages=pages, page_size=page_size, seed=seed)
        self.buffers = [torch.from_numpy(buffer).to(device, copy=True) for buffer in self.buffers]

    def write(self, pages: Sequence[int], kv_shard: Any, *, start: int = 0) -> None:  # noqa: ANN401
        """As `RankPool.write`, page by page: a list of indices would have to be copied to the GPU, and waited for."""
        d = self._dims
        tokens = self._positions(kv_shard, start)
        self._places(pages, tokens)
        for layer in range(d.layers):
            for kv in range(d.kv):
                plane, rows = self._engine.plane(self.buffers, layer, kv, d), kv_shard[layer, kv]
                for first in range(tokens.start - tokens.start % d.page, tokens.end, d.page):
                    here = Interval(first, first + d.page) & tokens
                    into = plane[pages[first // d.page], here.start - first : here.end - first]
                    into.copy_(rows[here.start - start : here.end - start])

    def read(self, pages: Sequence[int], tokens: int, *, start: int = 0) -> KvArray:
        """As `RankPool.read`: an array in host memory."""
        import torch

        d = self._dims
        places = self._places(pages, Interval(start, start + tokens))
        page, offset = (torch.from_numpy(index).to(self.buffers[0].device) for index in places)
        shard = np.empty((d.layers, d.kv, tokens, d.heads, d.dim), np.float32)
        for layer in range(d.layers):
            for kv in range(d.kv):
                shard[layer, kv] = self._engine.plane(self.buffers, layer, kv, d)[page, offset].cpu().numpy()
        return shard

    def _copies(self) -> list[Any]:
        return [buffer.clone() for buffer in self.buffers]

    def _in_host_memory(self) -> list[KvArray]:
        return [buffer.cpu().numpy() for buffer in self.buffers]


def check_pools(layout: str, component: Component, topology: Topology, page_size: int) -> None:
    """Whether every rank of an engine could have its `RankPool`; allocates nothing.

    Raises:
        ConfigError: as `RankPool` would.
    """
    for stage in range(topology.pp):  # ranks of one stage differ only in which heads they hold
        _check_fit(layout, component, Share.of(component, topology, topology.rank(stage, 0, 0)), page_size)


def _check_fit(layout: str, component: Component, share: Share, page_size: int) -> None:
    """Raises ConfigError where `layout` cannot hold `component` on this rank."""
    if layout not in _ENGINES:
        raise ConfigError("layout", f"unknown {layout!r}; use one of {', '.join(LAYOUTS)}")
    if component.dtype != "float32" or component.row_bytes % 4:
        raise ConfigError("dtype", f"{component.dtype} rows of {component.row_bytes} bytes; the pools hold float32")
    if not share.layers.size:
        raise ConfigError("layers_per_stage", f"this rank's stage has no layer of component {component.name!r}")
    if layout in {"lightllm", "sglang"} and component.kv_factor != 2:
        raise ConfigError("layout", f"{layout} keeps K and V; component {component.name!r} has one plane, use mla")
    if layout == "mla" and (component.kv_factor, component.kv_heads) != (1, 1):
        raise ConfigError("layout", f"mla keeps one latent row a token; component {component.name!r} has heads")
    if page_size < 1:
        raise ConfigError("page", f"{page_size} tokens; must be positive")
    if layout in TOKEN_GRANULAR and page_size != 1:
        raise ConfigError("page", f"{page_size}; {layout} is token-granular, use page=1")


class PageAllocator:
    """Hands out scattered pages; never one that is held already.

    One object for a replica: its ranks use the same page numbers.
    """

    def __init__(self, pages: int, seed: int = 0) -> None:
        self._rng = np.random.default_rng([seed, pages])
        self.pages = pages
        self._free: list[int] = self._rng.permutation(pages).tolist()
        self._held: set[int] = set()

    @property
    def free_pages(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages in random order, held until `free`.

        Raises:
            ConfigError: fewer are free; nothing is taken.
        """
        if not 0 <= count <= len(self._free):
            raise ConfigError("pages", f"{count} wanted, {len(self._free)} of {self.pages} are free")
        taken, self._free = self._free[:count], self._free[count:]
        self._held.update(taken)
        return taken

    def free(self, pages: Iterable[int]) -> None:
        """Give pages back.

        Raises:
            LocalProtocolError: one is not held, or named twice; nothing is freed.
        """
        back = list(pages)
        if len(set(back)) != len(back) or not self._held.issuperset(back):
            raise LocalProtocolError(f"pages {back} are not all held once")
        self._held.difference_update(back)
        self._free = self._rng.permutation([*self._free, *back]).tolist()


def pages_for(tokens: int, page_size: int) -> int:
    """Pages that `tokens` positions need."""
    return -(-tokens // page_size)


def cut(kv: KvArray, component: Component, topology: Topology, rank: int) -> KvArray:
    """The shard of one rank: layers of its stage, heads of its attention rank.

    Args:
        kv: float32 `[layers, kv, tokens, kv_heads, dim]` of the whole model.

    Returns:
        A new contiguous array `[layers of the stage, kv, tokens, heads of the rank, dim]`; ranks that share a head each
        get it.
    """
    shard: KvArray = view_of(kv, component, topology, rank).copy()
    return shard


def view_of(kv: Any, component: Component, topology: Topology, rank: int) -> Any:  # noqa: ANN401 - array or tensor
    """As `cut`, without copying: a view of NumPy's array or of torch's tensor."""
    if (
        kv.ndim != 5
        or kv.shape[:2] != (len(component.layers), component.kv_factor)
        or (kv.shape[3] != component.kv_heads)
    ):
        raise LocalProtocolError(f"KV of shape {list(kv.shape)} is not component {component.name!r} of the model")
    layers, heads = Share.of(component, topology, rank)
    return kv[layers.start : layers.end, :, :, heads.start : heads.end]


class Assembled(NamedTuple):
    """KV of the whole model from the shards of one replica, and where copies of one head are not bit-equal."""

    kv: KvArray
    differences: list[str]


def assemble(shards: Mapping[int, KvArray], component: Component, topology: Topology) -> Assembled:
    """Join what the ranks of one replica hold; the inverse of `cut`.

    Each head is taken from the lowest rank that holds it, and compared with every other holder's copy.

    Args:
        shards: float32 `[layers, kv, tokens, heads, dim]` by rank: all ranks of one replica.

    Raises:
        LocalProtocolError: ranks of several replicas, a missing rank, or a shard of the wrong shape.
    """
    replicas = {topology.replica_of(rank) for rank in shards}
    if len(replicas) != 1 or set(shards) != set(topology.replica_ranks(*replicas)):
        raise LocalProtocolError(f"ranks {sorted(shards)} are not the ranks of one replica")
    tokens, dim = shards[min(shards)].shape[2], component.row_bytes // 4
    kv = np.empty((len(component.layers), component.kv_factor, tokens, component.kv_heads, dim), np.float32)
    taken_from: dict[tuple[int, int], int] = {}
    differences = []
    for rank in sorted(shards):
        layers, heads = Share.of(component, topology, rank)
        shard = shards[rank]
        if shard.shape != (layers.size, component.kv_factor, tokens, heads.size, dim):
            raise LocalProtocolError(f"shard of rank {rank} has shape {list(shard.shape)}")
        for i, layer in enumerate(range(layers.start, layers.end)):
            for j, head in enumerate(range(heads.start, heads.end)):
                copy = shard[i, :, :, j]  # [kv, tokens, dim]
                holder = taken_from.setdefault((layer, head), rank)
                if holder == rank:
                    kv[layer, :, :, head] = copy
                    continue
                differences += [
                    f"layer {component.layers[layer]} {plane_name(component, p)} head {head}: "
                    f"rank {rank} holds other bytes than rank {holder}"
                    for p in range(component.kv_factor)
                    if copy[p].tobytes() != kv[layer, p, :, head].tobytes()
                ]
    return Assembled(kv, differences)
