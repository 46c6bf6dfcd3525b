"""What every implementation of gather and scatter must do. A check raises AssertionError where one does not.

The checks know neither the reference nor a GPU: they take a `Kernels`, place pools in its memory, launch, and compare
all of that memory with plain loops over shaped arrays. To check another implementation, add it to `implementations`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from kernel_pools import GUARD, Box, Bytes, Geometry, HostMemory, Memory, Pool, box

from rdma_kv.kernels.launch import Chunk

Launch = Callable[[Sequence[Chunk]], None]


@dataclass(frozen=True)
class Kernels:
    """An implementation: the two launches, and the memory they work in."""

    name: str
    gather: Launch
    scatter: Launch
    memory: Callable[[], Memory] = HostMemory


Check = Callable[[Kernels], None]


class Setting:
    """The memory of one check, with random bytes everywhere."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.memory = kernels.memory()
        self.rng = np.random.default_rng(20)

    def pool(self, layout: str, *, skew: int = 0, fill: int | None = None, **geometry: int) -> Pool:
        return Pool(self.memory, layout, Geometry(**geometry), self.rng, skew=skew, fill=fill)

    def pools(self, count: int, layout: str, *, skew: int = 0, **geometry: int) -> list[Pool]:
        return [self.pool(layout, skew=skew * i, **geometry) for i in range(count)]

    def gather(self, *boxes: Box, skew: int = 0) -> list[Bytes]:
        """One launch over all boxes; checks every byte, and returns the packed forms."""
        slots = [self._slot(box.size, skew) for box in boxes]
        self.kernels.gather([box.chunk(address) for box, (address, _) in zip(boxes, slots, strict=True)])
        packed = []
        for each, (address, here) in zip(boxes, slots, strict=True):
            if each.size:
                here[GUARD + skew :][: each.size] = np.concatenate(each.rows())
            np.testing.assert_array_equal(self.memory.fetch(address - GUARD - skew), here)
            packed.append(here[GUARD + skew :][: each.size])
        self._check_pools(boxes)
        return packed

    def scatter(self, *boxes: Box, skew: int = 0, same_bytes: bool = False) -> list[Bytes]:
        """One launch over all boxes; checks every byte, and returns what was packed."""
        slots = [self._slot(box.size, skew) for box in boxes]
        if same_bytes:
            slots = [slots[0]] * len(boxes)
        self.kernels.scatter([box.chunk(address) for box, (address, _) in zip(boxes, slots, strict=True)])
        for each, (address, here) in zip(boxes, slots, strict=True):
            at = GUARD + skew
            for row in each.rows():
                row[...] = here[at : at + row.size]
                at += row.size
            np.testing.assert_array_equal(self.memory.fetch(address - GUARD - skew), here)
        self._check_pools(boxes)
        return [here[GUARD + skew :][: each.size] for each, (_, here) in zip(boxes, slots, strict=True)]

    def _slot(self, size: int, skew: int) -> tuple[int, Bytes]:
        here = self.rng.integers(0, 256, GUARD + skew + size + GUARD, np.uint8)
        return self.memory.place(here) + GUARD + skew, here

    def _check_pools(self, boxes: Sequence[Box]) -> None:
        for each in boxes:
            for pool in each.pools:
                pool.assert_as_here()


def both(setting: Setting, *boxes: Box, skew: int = 0) -> None:
    setting.gather(*boxes, skew=skew)
    setting.scatter(*boxes, skew=skew)


SLOTS = [9, 2, 3, 14, 15, 12, 0, 7]


def nhd(k: Kernels) -> None:
    s = Setting(k)
    both(s, box(s.pool("nhd"), SLOTS))


def hnd(k: Kernels) -> None:
    s = Setting(k)
    both(s, box(s.pool("hnd"), SLOTS))


def mla(k: Kernels) -> None:
    s = Setting(k)
    both(s, box(s.pool("mla", kv=1, heads=1, row_bytes=1152), SLOTS))


def mla_fp8_with_inline_scale(k: Kernels) -> None:
    s = Setting(k)
    both(s, box(s.pool("mla", kv=1, heads=1, row_bytes=578, page_size=5), SLOTS))


def lightllm(k: Kernels) -> None:
    s = Setting(k)
    both(s, box(s.pool("lightllm", page_size=1, pages=17), SLOTS))


def sglang_split_kv(k: Kernels) -> None:
    s = Setting(k)
    both(s, box(s.pool("sglang"), SLOTS))


def trtllm_blocks(k: Kernels) -> None:
    s = Setting(k)
    both(s, box(s.pool("trtllm"), SLOTS))


def head_slices(k: Kernels) -> None:
    s = Setting(k)
    for layout in ("nhd", "hnd", "lightllm", "sglang", "trtllm"):
        for heads in (range(1), range(3, 4), range(1, 3), range(1, 4)):
            both(s, box(s.pool(layout), SLOTS, heads=heads))


def layer_slices(k: Kernels) -> None:
    s = Setting(k)
    for layout in ("nhd", "hnd", "lightllm", "sglang", "trtllm"):
        both(s, box(s.pool(layout, layers=4), SLOTS, layers=range(1, 3)))


def odd_row_sizes(k: Kernels) -> None:
    s = Setting(k)
    for row_bytes in (1, 2, 3, 5, 8, 16, 33, 66):
        for layout in ("nhd", "hnd"):
            both(s, box(s.pool(layout, heads=3, page_size=3, pages=6, row_bytes=row_bytes), SLOTS, heads=range(1, 3)))


def misaligned_bases(k: Kernels) -> None:
    s = Setting(k)
    for skew in (1, 3, 4, 8):
        both(s, box(s.pool("sglang", skew=skew), SLOTS), skew=skew)
        both(s, box(s.pool("hnd", skew=skew), SLOTS, heads=range(1, 4)), skew=skew)
        both(s, box(s.pools(2, "nhd", skew=skew), SLOTS, [0, 1, 1, 0, 0, 0, 1, 1]), skew=skew)


def empty_token_list(k: Kernels) -> None:
    s = Setting(k)
    both(s, box(s.pool("nhd"), []), box(s.pool("hnd"), [3]), box(s.pool("mla", kv=1, heads=1), []))


def one_token(k: Kernels) -> None:
    s = Setting(k)
    for layout in ("nhd", "hnd", "lightllm", "sglang", "trtllm"):
        both(s, box(s.pool(layout), [13]))


def runs_of_tokens(k: Kernels) -> None:
    """Whole pages, neighbouring pages, ranges that begin and end within a page, one long run, runs of any length."""
    s = Setting(k)
    whole = [[*range(8, 12), *range(4), *range(20, 24)], [*range(4, 12), *range(4), *range(16, 20)]]
    ragged = [[10, 11, *range(4), *range(4, 8), 20], [11, *range(4, 8), *range(16, 20)], [*range(4, 12), 0, 1]]
    odd = [list(range(24)), [3, *range(8, 24)], [0, 1, 2, 9, 10, 4, 6, 7], [5, 4, 3, 2], [7, 8]]
    for slots in (*whole, *ragged, *odd):
        for layout in ("nhd", "hnd", "lightllm", "sglang", "trtllm"):
            both(s, box(s.pool(layout, pages=6), slots))
        both(s, box(s.pool("hnd", pages=6), slots, heads=range(2, 3)))
        both(s, box(s.pool("mla", pages=6, kv=1, heads=1, row_bytes=18), slots))


def runs_end_where_the_pool_changes(k: Kernels) -> None:
    s = Setting(k)
    for pool_of in ([0, 0, 0, 1, 1, 1, 1, 0], [1, 1, 0, 0, 1, 1, 0, 0], [0, 1, 0, 1, 0, 1, 0, 1]):
        both(s, box(s.pools(2, "nhd"), range(4, 12), pool_of))


def several_geometries_in_one_launch(k: Kernels) -> None:
    s = Setting(k)
    both(
        s,
        box(s.pool("nhd"), SLOTS),
        box(s.pool("mla", kv=1, heads=1, row_bytes=578, layers=5), [4, 2]),
        box(s.pool("hnd", heads=2, row_bytes=66, page_size=16, pages=2), range(3, 30), heads=range(1, 2)),
        box(s.pools(3, "lightllm", page_size=1, pages=20), SLOTS, [2, 0, 0, 1, 1, 1, 2, 0]),
        box(s.pool("sglang"), [1]),
    )


def several_boxes_of_one_pool(k: Kernels) -> None:
    s = Setting(k)
    pool = s.pool("hnd", layers=4)
    cuts = [(layers, heads) for layers in (range(1), range(1, 4)) for heads in (range(1), range(1, 4))]
    both(s, *(box(pool, SLOTS, layers=layers, heads=heads) for layers, heads in cuts))


def several_pools_in_one_chunk(k: Kernels) -> None:
    s = Setting(k)
    for layout in ("nhd", "hnd", "lightllm", "sglang", "trtllm"):
        both(s, box(s.pools(3, layout), SLOTS, [1, 0, 2, 2, 1, 1, 0, 2], heads=range(1, 3)))
        both(s, box(s.pools(3, layout), SLOTS, [2] * len(SLOTS)))


def one_slot_gathered_twice(k: Kernels) -> None:
    s = Setting(k)
    s.gather(box(s.pool("nhd"), [3, 3, 9, 3]), box(s.pool("hnd"), [3, 3, 9, 3]))


def rows_from_pages_to_megabytes(k: Kernels) -> None:
    s = Setting(k)
    both(s, box(s.pool("nhd", row_bytes=8192, pages=6, page_size=2), [2, 3, 8, 9, 4]))
    both(s, box(s.pool("hnd", row_bytes=70_001, heads=2, page_size=1, skew=1), [2, 0]))
    both(s, box(s.pools(2, "mla", kv=1, heads=1, row_bytes=70_000, page_size=2), [4, 2, 3, 2], [0, 1, 1, 0]))
    both(s, box(s.pool("mla", kv=1, heads=1, layers=1, row_bytes=3 << 20, page_size=1, pages=2), [1]))


def more_tokens_than_one_call_takes(k: Kernels) -> None:
    s = Setting(k)
    slots = s.rng.permutation(9500)[:9001].tolist()
    both(s, box(s.pool("sglang", layers=1, kv=1, heads=2, page_size=1, pages=9500, row_bytes=2), slots))
    both(s, box(s.pool("lightllm", layers=1, kv=1, heads=1, page_size=1, pages=9500, row_bytes=300), slots))


def r27_payload_of_the_named_replica(k: Kernels) -> None:
    """Requests 0..9 of two replicas in one launch; the replica is as told, not the request's number modulo two."""
    s = Setting(k)
    replicas = [s.pool("nhd", fill=replica) for replica in range(2)]
    told = [0, 0, 1, 1, 1, 0, 1, 0, 0, 1]
    packed = s.gather(*(box(replicas, [request], [told[request]]) for request in range(10)))
    assert [set(each.tolist()) for each in packed] == [{replica} for replica in told]
    s.scatter(*(box(replicas, [request], [told[request]]) for request in range(10)))


def r61_same_slot_in_two_replicas(k: Kernels) -> None:
    """Slots [7, 3, 9, 3] of replicas [1, 0, 1, 1] in one gather are four different rows."""
    s = Setting(k)
    replicas = s.pools(2, "lightllm", page_size=1, pages=10, layers=3)
    (packed,) = s.gather(box(replicas, [7, 3, 9, 3], [1, 0, 1, 1], layers=range(1)))
    k_rows = packed.reshape(2, 4, -1)[0]
    assert len({row.tobytes() for row in k_rows}) == 4
    for row, (replica, slot) in zip(k_rows, [(1, 7), (0, 3), (1, 9), (1, 3)], strict=True):
        expected = [replicas[replica].row(0, 0, slot, head) for head in range(4)]
        np.testing.assert_array_equal(row, np.concatenate(expected))


def g21_scatter_to_replicas(k: Kernels) -> None:
    """Slots [7, 3] of replicas [1, 0], two cards a replica: row 0 to cards 2 and 3, row 1 to cards 0 and 1.

    One chunk for each card index within a replica; its pointer table has one line per replica.
    """
    s = Setting(k)
    cards = s.pools(4, "lightllm", page_size=1, pages=10)
    by_index = [[cards[replica * 2 + index] for replica in range(2)] for index in range(2)]
    boxes = [box(pools, [7, 3], [1, 0], layers=range(1)) for pools in by_index]
    packed = s.scatter(*boxes, same_bytes=True)[0].reshape(2, 2, -1)
    for row, slot, holders in ((0, 7, (2, 3)), (1, 3, (0, 1))):
        for card in holders:
            for kv in range(2):
                got = np.concatenate([cards[card].row(0, kv, slot, head) for head in range(4)])
                np.testing.assert_array_equal(got, packed[kv, row])


CHECKS = [
    nhd,
    hnd,
    mla,
    mla_fp8_with_inline_scale,
    lightllm,
    sglang_split_kv,
    trtllm_blocks,
    head_slices,
    layer_slices,
    odd_row_sizes,
    misaligned_bases,
    empty_token_list,
    one_token,
    runs_of_tokens,
    runs_end_where_the_pool_changes,
    several_geometries_in_one_launch,
    several_boxes_of_one_pool,
    several_pools_in_one_chunk,
    one_slot_gathered_twice,
    rows_from_pages_to_megabytes,
    more_tokens_than_one_call_takes,
    r27_payload_of_the_named_replica,
    r61_same_slot_in_two_replicas,
    g21_scatter_to_replicas,
]
