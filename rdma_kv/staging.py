"""The memory of the staging slots: segments of equal slots, one when the agent starts, more as slots are retired or held.

A slot keeps its number and its addresses for good. Of an agent whose pools are in host memory it has one address. Of an
agent on a GPU it has two: one on the GPU, where kernels pack and unpack, and one in host memory, where the WRITEs of links
read or land that do not lead from GPU to GPU. The latter is pinned, by us: UCX pins what is registered with it where it finds
a GPU, and lets go of it when it likes.

In host memory a slot begins on a page of its own, so that it can be retired alone: its pages are then inaccessible, and a
new slot in a new segment takes its place. Memory of a GPU cannot be taken from a peer that has mapped it.
"""

from __future__ import annotations

import asyncio
import contextlib
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

from rdma_kv.config import GpuConfig, StagingConfig
from rdma_kv.cuda import Cuda, DeviceMemory
from rdma_kv.errors import RdmaKvError
from rdma_kv.memory import PAGE_BYTES, HostMemory
from rdma_kv.messages import MAX_SEGMENTS
from rdma_kv.types import Descriptor, Region

_RETAINED: Final[list[Staging]] = []
"""Staging whose agent has closed while somebody may still write there: kept until the process exits."""

_SPARE: Final[dict[tuple[int, int], list[DeviceMemory]]] = {}
"""Memory of GPUs, by ordinal and length, that no WRITE can reach any more, though peers may have it mapped. CUDA does not
allow to free it then, so it waits for the next agent."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Slots `[first, first + num_slots)`: in host memory, and on the GPU where the agent has one."""

    memory: HostMemory
    first: int
    num_slots: int
    device: DeviceMemory | None = None

    def region(self, *, on_device: bool) -> Region:
        """Where its slots begin, for WRITEs that go to or from the GPU, or host memory."""
        if not on_device:
            return Region(self.memory.address, self.memory.length_bytes)
        assert self.device is not None
        return Region(self.device.address, self.device.length_bytes, self.device.ordinal + 1)


class Staging:
    """All segments of one agent, in the order of their slots. There is none before `open`.

    Args:
        gpu: where the pools are; None is host memory.
        make_host: makes host memory of so many bytes.
        share: what must happen to a segment before its slots are used: the engine maps it, where it is another process.

    Attributes:
        slot_bytes: from one slot to the next: the configured size in whole pages.
    """

    def __init__(
        self,
        config: StagingConfig,
        gpu: GpuConfig | None = None,
        *,
        make_host: Callable[[int], HostMemory] = HostMemory,
        share: Callable[[Segment], Awaitable[None]] | None = None,
    ) -> None:
        self._make_host = make_host
        self._share = share
        self.slot_bytes = -(-config.slot_bytes // PAGE_BYTES) * PAGE_BYTES
        self._slots = config.slots
        self._gpu = gpu
        self._cuda: Cuda | None = None
        self._made: list[Segment] = []  # also those that never counted; given back at the end
        self._making: set[asyncio.Task[Segment]] = set()
        self._segments: list[Segment] = []
        self._firsts: list[int] = []

    async def open(self) -> None:
        """Make the first segment.

        Raises:
            RegistrationError: the GPU has no such memory, or there is none.
        """
        if self._gpu is not None and self._cuda is None:
            self._cuda = await asyncio.to_thread(Cuda)
        self.add(await self.make(self._slots))

    @property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(self._segments)

    @property
    def num_slots(self) -> int:
        return self._segments[-1].first + self._segments[-1].num_slots if self._segments else 0

    @property
    def full(self) -> bool:
        """Whether no further segment can be told to peers."""
        return len(self._segments) >= MAX_SEGMENTS

    @property
    def on_gpu(self) -> bool:
        """Whether slots have memory on a GPU."""
        return self._gpu is not None

    async def make(self, num_slots: int) -> Segment:
        """Memory for more slots, which does not count before `add`. It stays ours whether it is added or not.

        Raises:
            OSError, RdmaKvError: there is not so much, or it could not be shared.
        """
        making = asyncio.create_task(self._make(num_slots), name="staging memory")
        self._making.add(making)
        making.add_done_callback(self._making.discard)
        return await asyncio.shield(making)  # memory that is being pinned must not be forgotten

    async def _make(self, num_slots: int) -> Segment:
        length_bytes = num_slots * self.slot_bytes
        memory, device = self._make_host(length_bytes), None
        if self._cuda is not None and self._gpu is not None:
            device = await asyncio.to_thread(self._on_device, self._cuda, self._gpu.device, memory)
        segment = Segment(memory, self.num_slots, num_slots, device)
        self._made.append(segment)
        if self._share is not None:
            await self._share(segment)
        return segment

    @staticmethod
    def _on_device(cuda: Cuda, ordinal: int, memory: HostMemory) -> DeviceMemory:
        """Pin host memory, and make the slots' other half. Blocks."""
        cuda.pin(memory.address, memory.length_bytes, ordinal)
        try:
            with contextlib.suppress(KeyError, IndexError):  # none, or another agent took the last one
                return _SPARE[ordinal, memory.length_bytes].pop()
            return DeviceMemory(cuda, ordinal, memory.length_bytes)
        except BaseException:
            cuda.unpin(memory.address)
            raise

    def add(self, segment: Segment) -> None:
        """From now on the segment is part of what peers are told."""
        self._segments.append(segment)
        self._firsts.append(segment.first)

    def regions(self, segment: Segment) -> list[Region]:
        """What data planes register of a segment."""
        direct = self._gpu is not None and bool(self._gpu.direct)
        return [segment.region(on_device=each) for each in ((True, False) if direct else (False,))]

    def address(self, index: int) -> int:
        """Where kernels find a slot: on the GPU, or in host memory."""
        segment = self._segment_of(index)
        memory = segment.memory if segment.device is None else segment.device
        return memory.address + (index - segment.first) * self.slot_bytes

    def _host_address(self, index: int) -> int:
        segment = self._segment_of(index)
        return segment.memory.address + (index - segment.first) * self.slot_bytes

    def bounce(self, index: int, *, device_staging: bool) -> int:
        """As `Work.bounce`, of a link with or without staging on the GPU."""
        return 0 if self._gpu is None or device_staging else self._host_address(index)

    def descriptor(self, index: int, length_bytes: int, *, device_staging: bool) -> Descriptor:
        """The first bytes of a slot, as a WRITE of such a link takes them."""
        if device_staging:
            assert self._gpu is not None
            return Descriptor(self.address(index), length_bytes, self._gpu.device + 1)
        return Descriptor(self._host_address(index), length_bytes)

    def retire(self, index: int) -> None:
        """Make a slot's host memory inaccessible for good.

        Raises:
            OSError: the system refused; the slot is as it was.
        """
        segment = self._segment_of(index)
        segment.memory.retire((index - segment.first) * self.slot_bytes, self.slot_bytes)

    def retain(self) -> None:
        """Keep the memory until the process exits."""
        if self not in _RETAINED:
            _RETAINED.append(self)

    async def close(self) -> None:
        """Give memory of the GPU back, unless it is retained. No kernel, copy or transport may touch it any more."""
        if self._making:
            await asyncio.wait(self._making)
        if self._cuda is None or self in _RETAINED:
            return
        cuda, self._cuda = self._cuda, None
        made, self._made = self._made, []
        await asyncio.to_thread(self._give_back, cuda, made)

    @staticmethod
    def _give_back(cuda: Cuda, made: Sequence[Segment]) -> None:
        for segment in made:
            if segment.device is not None:
                with contextlib.suppress(RdmaKvError):  # the device has failed: the process is about to end
                    cuda.unpin(segment.memory.address)
                _SPARE.setdefault((segment.device.ordinal, segment.device.length_bytes), []).append(segment.device)
        cuda.close()

    def _segment_of(self, index: int) -> Segment:
        return self._segments[bisect_right(self._firsts, index) - 1]
