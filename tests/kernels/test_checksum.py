"""The checksum in NumPy: as defined, notices every kind of damage, adds up from any parts, and lets others run."""

from __future__ import annotations

import sys
import threading
import time

import checksum_oracle as oracle
import numpy as np
import pytest
from checksum_oracle import DAMAGES, MOST_BYTES, TILE_BYTES, Damage, assert_noticed, defined, random_bytes
from hypothesis import find, given, settings
from hypothesis import strategies as st
from kernel_pools import Bytes

from rdma_kv.errors import ConfigError
from rdma_kv.kernels import checksum as module
from rdma_kv.kernels.checksum import MULTIPLIERS, Piece, checksum, checksums, finish, tile_sum

SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 9, 100, TILE_BYTES - 1, TILE_BYTES, TILE_BYTES + 1, 5 * TILE_BYTES + 6]


def each(*damages: Damage) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("damage", damages, ids=lambda damage: damage.__name__)


# --- as defined


@pytest.mark.parametrize("offset", [0, 1, 4])
@pytest.mark.parametrize("size", SIZES)
def test_as_defined(size: int, offset: int) -> None:
    """Of an array and of an address, aligned or not."""
    data = random_bytes(size, size, offset)
    assert checksum(data) == defined(data)
    assert checksums([Piece(data.ctypes.data, size)]) == [defined(data)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0xB4D055FCF2CBBD7B),
        (b"\0", 0xBC478D691E90D6B1),
        (bytes(range(256)), 0x79B778DD294B2C3),
    ],
    ids=["nothing", "a zero", "256 bytes"],
)
def test_values_that_never_change_under_this_name(data: bytes, expected: int) -> None:
    """Both sides of a link may have different releases."""
    assert checksum(np.frombuffer(data, np.uint8)) == expected
    assert module.ALGORITHM == "tiled-multilinear-64"


def test_blocks_of_a_few_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random_bytes(1, 11 * TILE_BYTES + 5)
    expected = checksum(data)
    monkeypatch.setattr(module, "_BLOCK_TILES", 2)
    monkeypatch.setattr(module, "_MIXED_TILES", 3)
    assert checksum(data) == expected == defined(data)


def test_each_piece_by_itself() -> None:
    parts = [random_bytes(size, size) for size in SIZES]
    assert checksums([Piece(part.ctypes.data, part.size) for part in parts]) == [checksum(part) for part in parts]
    assert checksums([]) == []


def test_no_two_multipliers_can_cancel() -> None:
    """Equal or opposite in the last 33 bits: what "surely found" stands on."""
    last = MULTIPLIERS & np.uint64((1 << 33) - 1)
    assert np.all(last & np.uint64(1))
    assert np.unique(np.concatenate((last, np.uint64(1 << 33) - last))).size == 2 * MULTIPLIERS.size


# --- damage


@each(*DAMAGES)
@settings(deadline=None)
@given(draw=st.data())
def test_notices(damage: Damage, draw: st.DataObject) -> None:
    assert_noticed(checksum, damage, draw)


@settings(deadline=None)
@given(seed=st.integers(0, 99), size=st.integers(1, MOST_BYTES), cut=st.integers(1, MOST_BYTES), zeros=st.booleans())
def test_notices_a_truncated_tail(seed: int, size: int, cut: int, zeros: bool) -> None:
    """Also if it is all zeros, which add nothing to a word."""
    data = random_bytes(seed, size)
    kept = max(0, size - cut)
    if zeros:
        data[kept:] = 0
    assert checksum(data[:kept]) != checksum(data)


def test_notices_every_bit_of_a_tile() -> None:
    data = random_bytes(0, TILE_BYTES)
    sums = {checksum(data)}
    for bit in range(0, 8 * TILE_BYTES, 7):  # comes by every bit of a word
        data[bit // 8] ^= 1 << bit % 8
        sums.add(checksum(data))
        data[bit // 8] ^= 1 << bit % 8
    assert len(sums) == 1 + len(range(0, 8 * TILE_BYTES, 7))


def test_notices_where_words_lie_in_constant_data() -> None:
    """One word among equal ones, moved from place to place; and tiles of zeros, more or fewer."""
    data = np.full(2 * TILE_BYTES, 0x3F, np.uint8)
    sums = set()
    for place in range(0, data.size, 44):
        data[place : place + 4] = 0x80
        sums.add(checksum(data))
        data[place : place + 4] = 0x3F
    assert len(sums) == len(range(0, data.size, 44))
    assert len({checksum(np.zeros(count * TILE_BYTES, np.uint8)) for count in range(9)}) == 9


# --- controls: the tests of damage can fail


def plain_sum(data: Bytes) -> int:
    """Notices a flipped bit, and never where words lie."""
    words = np.concatenate((data, np.zeros(-data.size % 4, np.uint8))).view("<u4")
    return int(words.sum(dtype=np.uint64)) + data.size


def whole_words(data: Bytes) -> int:
    """Words of 64 bits times odd multipliers: as much arithmetic, but top bits cancel."""
    words = np.concatenate((data, np.zeros(-data.size % 8, np.uint8))).view("<u8")
    return int((words * np.resize(MULTIPLIERS, words.size)).sum(dtype=np.uint64)) + data.size


@pytest.mark.parametrize(
    ("weak", "damage"),
    [
        (plain_sum, oracle.swaps_words),
        (plain_sum, oracle.swaps_tiles),
        (whole_words, oracle.flips_the_sign_of_two_values),
    ],
    ids=lambda function: function.__name__,
)
def test_a_weak_checksum_fails(weak: oracle.Checksum, damage: Damage) -> None:
    def slips_through(draw: st.DataObject) -> bool:
        try:
            assert_noticed(weak, damage, draw)
        except AssertionError:
            return True
        return False

    assert find(st.data(), slips_through, settings=settings(deadline=None, max_examples=1000, database=None))


def test_the_weak_ones_notice_a_bit() -> None:
    data = random_bytes(0, 1000)
    before = [plain_sum(data), whole_words(data)]
    data[500] ^= 1
    assert all(one != other for one, other in zip(before, [plain_sum(data), whole_words(data)], strict=True))


# --- parts


@settings(deadline=None)
@given(draw=st.data(), size=st.integers(0, 9 * TILE_BYTES))
def test_parts_in_any_order_add_up(draw: st.DataObject, size: int) -> None:
    data = random_bytes(size, size)
    inner = max(0, -(-size // TILE_BYTES) - 1)
    cuts = sorted(draw.draw(st.sets(st.integers(1, inner)))) if inner else []
    parts = list(zip([0, *cuts], [*cuts, inner + 1], strict=True))
    total = sum(
        tile_sum(data[first * TILE_BYTES : end * TILE_BYTES], first) for first, end in draw.draw(st.permutations(parts))
    )
    assert finish(total, size) == checksum(data)


def test_a_part_with_a_wrong_number_does_not_fit() -> None:
    data = random_bytes(0, 2 * TILE_BYTES)
    assert tile_sum(data[:TILE_BYTES], 0) != tile_sum(data[:TILE_BYTES], 1)


# --- refusals, and other threads


@pytest.mark.parametrize(
    ("piece", "field"),
    [(Piece(64, -1), "length_bytes"), (Piece(64, 1 << 62), "length_bytes"), (Piece(0, 8), "address")],
    ids=str,
)
def test_no_piece(piece: Piece, field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checksums([piece])
    assert caught.value.field == field


@pytest.mark.parametrize(
    "data",
    [np.zeros(8, np.int8), np.zeros((2, 4), np.uint8), np.zeros(8, np.uint8)[::2]],
    ids=["signed", "two dimensions", "with gaps"],
)
def test_no_bytes(data: np.ndarray) -> None:
    with pytest.raises(ConfigError) as caught:
        checksum(data)
    assert caught.value.field == "data"


def test_no_tile() -> None:
    with pytest.raises(ConfigError) as caught:
        tile_sum(np.zeros(8, np.uint8), -1)
    assert caught.value.field == "first_tile"


TILES = np.broadcast_to(np.ones(1024, np.uint64), (200_000, 1024))  # a tenth of a second of work without its memory
CALLS = {
    "einsum": lambda: np.einsum("ij,j->i", TILES, module._WHOLE),
    "with the GIL": lambda: sum(range(2_000_000)),
}


@pytest.mark.parametrize("call", CALLS)
def test_other_threads_run_during_a_call(call: str) -> None:
    """During one call of the long one, without help of the switch interval. The control keeps the GIL."""
    interval = sys.getswitchinterval()
    worker = threading.Thread(target=CALLS[call])
    turns = 0
    sys.setswitchinterval(60)
    try:
        worker.start()
        while worker.is_alive():
            turns += 1
            time.sleep(0)
    finally:
        worker.join()
        sys.setswitchinterval(interval)
    assert turns <= 4 if call == "with the GIL" else turns > 4


def test_pauses_between_short_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small pieces hand the GIL on as a gather does."""
    called = []

    class Noted:
        def next(self) -> None:
            called.append(self)

    monkeypatch.setattr(module, "Turns", Noted)
    data = random_bytes(0, 1000)
    checksums([Piece(data.ctypes.data, data.size)] * 5)
    assert len(called) == 5
    assert len(set(called)) == 1
