"""The way of tables to a GPU: no pinned byte is used again before the copy that reads it is done, and none waits."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from implementations import DEVICE, MISSING

if MISSING:
    pytest.skip(f"not installed: {' and '.join(MISSING)}", allow_module_level=True)
import torch

from rdma_kv.kernels.feed import SHEET_ITEMS, AlwaysPassed, Feed

with pytest.MonkeyPatch.context() as patch:  # as `implementations` does, and why
    if DEVICE == "cpu":
        patch.setenv("TRITON_INTERPRET", "1")
    from rdma_kv.kernels import dispatch
from rdma_kv.errors import ConfigError


class Stream:
    """Says which marks have been passed: those recorded before `passed` was last raised."""

    def __init__(self) -> None:
        self.recorded = self.passed = 0

    def mark(self) -> Mark:
        return Mark(self)

    def drain(self) -> None:
        self.passed = self.recorded


class Mark:
    def __init__(self, stream: Stream) -> None:
        self._stream, self._place = stream, 0

    def record(self, stream: object = None) -> None:
        self._stream.recorded += 1
        self._place = self._stream.recorded

    def query(self) -> bool:
        return self._place <= self._stream.passed


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def feed(stream: Stream) -> Feed:
    return Feed(torch.device("cpu"), stream.mark, ctypes.memmove)


class Written:
    """Notes where it was asked to write."""

    def __init__(self) -> None:
        self.begins: list[int] = []

    def __call__(self, out: np.ndarray) -> None:
        self.begins.append(out.ctypes.data)
        out[:] = len(self.begins)


def test_what_is_written_arrives(feed: Feed) -> None:
    write = Written()
    for number, size in enumerate((1, 7, 900, 2), 1):
        assert feed.send(size, write)[:size].tolist() == [number] * size


def test_pieces_follow_one_another_at_16_bytes(feed: Feed) -> None:
    write = Written()
    for size in (3, 4, 5):
        feed.send(size, write)
    assert np.diff(write.begins).tolist() == [4 * 8, 4 * 8]
    assert feed.sheets == 1


def test_the_memory_there_is_one_unless_it_is_kept(feed: Feed) -> None:
    write = Written()
    first, second = feed.send(10, write), feed.send(10, write)
    assert first.data_ptr() == second.data_ptr()
    kept = [feed.send(10, write, keep=True) for _ in range(2)]
    assert len({each.data_ptr() for each in (*kept, first)}) == 3
    assert [each.tolist() for each in kept] == [[3] * 10, [4] * 10]


def test_a_sheet_is_not_written_again_before_its_mark_is_passed(feed: Feed, stream: Stream) -> None:
    """Nothing is passed: every piece lies elsewhere, and there are more sheets."""
    write, size = Written(), SHEET_ITEMS // 2
    for _ in range(6):
        feed.send(size, write)
    assert len(set(write.begins)) == 6
    assert feed.sheets == 3
    assert stream.recorded == 2  # one a sheet that is used up, not one a copy


def test_passed_sheets_are_used_again_and_no_more_are_made(feed: Feed, stream: Stream) -> None:
    write, size = Written(), SHEET_ITEMS // 2
    for _ in range(6):
        feed.send(size, write)
    places = set(write.begins)
    for _ in range(20):
        stream.drain()
        feed.send(size, write)
    assert set(write.begins) == places
    assert feed.sheets == 3


def test_only_passed_ones(feed: Feed, stream: Stream) -> None:
    """Of three used-up sheets the first is done: it is the one that is used next, and the one after that is new."""
    write = Written()
    for number in range(4):
        feed.send(SHEET_ITEMS, write)
        if number == 1:
            stream.drain()  # the first alone was recorded by now
    first = write.begins[0]
    assert write.begins[2] == first
    assert write.begins[3] not in write.begins[:3]


def test_larger_tables_get_larger_sheets(feed: Feed, stream: Stream) -> None:
    write = Written()
    for size in (10, SHEET_ITEMS + 1, 5 * SHEET_ITEMS, 10):
        assert feed.send(size, write).shape[0] >= size
        stream.drain()
    big = feed.send(5 * SHEET_ITEMS, write)
    assert big[: 5 * SHEET_ITEMS].unique().tolist() == [5]


def test_a_failed_write_leaves_the_feed_usable(feed: Feed) -> None:
    def fails(out: np.ndarray) -> None:
        raise LookupError

    write = Written()
    feed.send(4, write)
    with pytest.raises(LookupError):
        feed.send(4, fails)
    assert feed.send(4, write)[:4].tolist() == [2] * 4


def test_without_memory_for_a_sheet_none_is_written_while_it_is_read(
    feed: Feed, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sheet that stood in the line twice was handed out twice: its second copies read what the first ones left to write."""
    write = Written()
    feed.send(SHEET_ITEMS, write)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", _no_memory)
        for _ in range(2):
            with pytest.raises(MemoryError):
                feed.send(10, write)
    stream.drain()
    for _ in range(3):
        feed.send(SHEET_ITEMS, write)  # nothing is passed from here on
    assert len(set(write.begins[1:])) == 3
    assert feed.sheets == 3


def test_without_memory_there_the_next_launch_may_have_it(feed: Feed, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Written()
    feed.send(10, write)
    feed.send(SHEET_ITEMS, write)
    feed.send(2 * SHEET_ITEMS, write, keep=True)  # so that only memory there is missing
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", _no_memory)
        with pytest.raises(MemoryError):
            feed._memory(2 * SHEET_ITEMS)
    assert feed.send(2 * SHEET_ITEMS, write)[-1].item() == 4


def _no_memory(*_: object, **__: object) -> torch.Tensor:
    raise MemoryError


@pytest.mark.parametrize("first", [True, False])
def test_the_modes_of_the_thread_do_not_matter(feed: Feed, first: bool) -> None:
    """It is the engine's: in inference mode at one launch, and not at the next; or with tensors on a GPU by default."""
    write = Written()
    for number, inference in enumerate((first, not first, first, not first), 1):
        for size in (10, number * SHEET_ITEMS):
            with torch.inference_mode(mode=inference), torch.device("meta"):
                assert feed.send(size, write)[:size].unique().tolist() == [len(write.begins)]


def test_sizes_beyond_what_is_remembered(feed: Feed) -> None:
    """Views are kept for some sizes only; all are right."""
    write = Written()
    for number in range(1, 200):
        assert feed.send(number, write)[:number].tolist() == [number] * number


def test_the_mark_of_the_host_is_always_passed() -> None:
    mark = AlwaysPassed()
    mark.record()
    assert mark.query()


# --- streams


def test_a_queue_is_the_same_for_the_same_stream() -> None:
    device = torch.device(DEVICE)
    assert dispatch.queue_of(device, None) is dispatch.queue_of(device, None)
    if DEVICE == "cuda":
        stream = torch.cuda.Stream()
        made = dispatch.queue_of(device, stream)
        assert made is dispatch.queue_of(torch.device("cuda", torch.cuda.current_device()), stream)
        assert made is not dispatch.queue_of(device, None)
        dispatch.forget(stream)
        assert dispatch.queue_of(device, stream) is not made


def test_programs() -> None:
    assert dispatch.check_programs(None) == dispatch.PROGRAMS
    assert dispatch.check_programs(1) == 1
    with pytest.raises(ConfigError) as caught:
        dispatch.check_programs(0)
    assert caught.value.field == "programs"
