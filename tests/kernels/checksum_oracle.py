"""The checksum as its definition reads, in plain integers; and damage that it must notice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st
from kernel_pools import Bytes

Checksum = Callable[[Bytes], int]
Damage = Callable[[st.DataObject, Bytes], None]

LIMIT = 1 << 64
GAMMA, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
TILE_WORDS = 2048
TILE_BYTES = 8192
MOST_BYTES = 3 * TILE_BYTES + 100  # several tiles, and a tail


def mix(x: int) -> int:
    x = (x ^ x >> 30) * MIX_1 % LIMIT
    x = (x ^ x >> 27) * MIX_2 % LIMIT
    return x ^ x >> 31


def defined(data: Bytes) -> int:
    """The checksum, word by word."""
    words = np.concatenate((data, np.zeros(-data.size % 4, np.uint8))).view("<u4").tolist()
    total = mix(LIMIT - 1 - data.size)
    for tile, begin in enumerate(range(0, len(words), TILE_WORDS)):
        weighted = (
            word * (mix((place + 1) * GAMMA % LIMIT) | 1)
            for place, word in enumerate(words[begin : begin + TILE_WORDS])
        )
        total += mix((sum(weighted) + (tile + 1) * GAMMA) % LIMIT)
    return total % LIMIT


def random_bytes(seed: int, size: int, offset: int = 0) -> Bytes:
    """`size` bytes that begin `offset` behind an address that every word fits."""
    room = np.zeros(size + 64, np.uint8)
    data = room[-room.ctypes.data % 16 + offset :][:size]
    data[:] = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return data


# --- damage: each function changes the bytes in place. It may find nothing to change; then they are as before.


def flips_a_bit(draw: st.DataObject, data: Bytes) -> None:
    data[draw.draw(st.integers(0, data.size - 1))] ^= 1 << draw.draw(st.integers(0, 7))


def flips_two_bits(draw: st.DataObject, data: Bytes) -> None:
    flips_a_bit(draw, data)
    flips_a_bit(draw, data)


def flips_the_sign_of_two_values(draw: st.DataObject, data: Bytes) -> None:
    """The top bits of two words: what a product modulo 2**64 of longer words would lose."""
    for _ in range(2):
        data[4 * draw.draw(st.integers(0, data.size // 4 - 1)) + 3] ^= 0x80


def swaps_words(draw: st.DataObject, data: Bytes) -> None:
    _swap(draw, data, 4)


def swaps_rows(draw: st.DataObject, data: Bytes) -> None:
    _swap(draw, data, draw.draw(st.sampled_from([2, 8, 48, 256])))


def swaps_tiles(draw: st.DataObject, data: Bytes) -> None:
    _swap(draw, data, TILE_BYTES)


def _swap(draw: st.DataObject, data: Bytes, unit: int) -> None:
    places = st.integers(0, max(0, data.size // unit - 1))
    one, other = (unit * draw.draw(places) for _ in range(2))
    kept = data[one : one + unit].copy()
    data[one : one + unit] = data[other : other + unit]
    data[other : other + unit] = kept


def zeroes_a_range(draw: st.DataObject, data: Bytes) -> None:
    begin = draw.draw(st.integers(0, data.size - 1))
    data[begin : draw.draw(st.integers(begin + 1, data.size))] = 0


def shifts(draw: st.DataObject, data: Bytes) -> None:
    data[:] = np.roll(data, draw.draw(st.integers(1, data.size)))


def repeats_an_earlier_range(draw: st.DataObject, data: Bytes) -> None:
    """As a chunk that lies in another one's place."""
    size = draw.draw(st.integers(1, max(1, data.size // 2)))
    data[-size:] = data[:size].copy()


DAMAGES: list[Damage] = [
    flips_a_bit,
    flips_two_bits,
    flips_the_sign_of_two_values,
    swaps_words,
    swaps_rows,
    swaps_tiles,
    zeroes_a_range,
    shifts,
    repeats_an_earlier_range,
]


def assert_noticed(checksum: Checksum, damage: Damage, draw: st.DataObject) -> None:
    """The sum differs just where the bytes do."""
    data = random_bytes(draw.draw(st.integers(0, 99)), draw.draw(st.integers(4, MOST_BYTES)))
    before, sum_before = data.copy(), checksum(data)
    damage(draw, data)
    assert (checksum(data) == sum_before) == np.array_equal(data, before)
