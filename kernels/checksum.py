"""The checksum of a packed chunk, and how to compute it on the host. `checksum_triton` is its twin on a GPU.

It finds what goes wrong by accident between a gather and its scatter: flipped bits, words, rows or chunks in each other's
place, ranges of zeros or of what lay in the slot before, a tail that is missing. It is *not* cryptographic: whoever may
choose the bytes can keep the sum. Authenticity is the transport's task.

**The algorithm** (`ALGORITHM` names it between peers; another algorithm needs another name). All arithmetic is modulo
2**64. Bytes are read as little-endian 32-bit words, the last word filled up with zeros, and words are cut into tiles of
`TILE_WORDS`:

    mix(x)         splitmix64's finaliser, a bijection:  x ^= x >> 30;  x *= MIX_1;  x ^= x >> 27;  x *= MIX_2;  x ^= x >> 31
    multiplier[j]  mix((j + 1) * GAMMA) | 1                            of word j of every tile: 64 bits, odd
    tile(t)        mix(sum over j of word[t, j] * multiplier[j]  +  (t + 1) * GAMMA)
    checksum       sum over t of tile(t)  +  mix(2**64 - 1 - length in bytes)

So it is a sum of terms, one a tile, each of which needs nothing but its own bytes and its number: tiles can be taken in
any order, by any number of workers, and `tile_sum`s of any parts be added up. Sums of integers do not depend on their
order, unlike those of floats, so every way of computing gives the same 64 bits.

**What is surely found**, whatever the bytes are:
    * any change within one word, so any flipped bit: a multiplier is odd, hence a word's change times its multiplier is
      not 0, and `mix` keeps unequal things unequal.
    * two flipped bits anywhere in a tile, and two words of a tile in each other's place, if they differ. Changes d and
      +-d, |d| < 2**32, cancel only where multipliers are equal or opposite in their last 33 bits; no two of the table are
      (a test looks). Flips of different bits leave an odd factor, which does not vanish.
    * zeros at the end that are missing or too many within the last tile, as then only the length differs.

**What is probably found**: everything else. For multipliers drawn at random, a change of several words of one tile stays
unseen with a probability of at most 2**(z - 63); z is the number of low bits that are equal in *all* changed words. It is
0 in nearly every accident with real data, and 31 at worst: 2**-32, where nothing but top bits of words change. (Ours are
drawn once, as both sides must agree. So this is an estimate about accidents, which do not know them.) Changes in several
tiles must in addition cancel behind `mix`, as must tiles in each other's place: about 2**-64.

Source: multilinear hashing of words by random odd multipliers, D. Lemire and O. Kaser, "Strongly universal string hashing is
fast" (2014); mix and GAMMA: G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators" (2014).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rdma_kv.errors import ConfigError
from rdma_kv.kernels.reference import Bytes, Turns, view

UInt64Array = npt.NDArray[np.uint64]

ALGORITHM = "tiled-multilinear-64"
"""Name of the algorithm between peers. Other constants are another algorithm."""

TILE_WORDS = 2048
TILE_BYTES = 4 * TILE_WORDS
GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK = (1 << 64) - 1

_WORD_BITS = np.uint64(32)
_BLOCK_TILES = 64  # of one call, with as much temporary memory: 512 KiB, so that both stay in the cache
_MIXED_TILES = 4096  # mixed together: few calls, on 32 KiB


class Piece(NamedTuple):
    """Contiguous memory; its owner keeps it mapped and unchanged until the checksum is there."""

    address: int
    length_bytes: int


def mixed(values: UInt64Array) -> UInt64Array:
    """`mix` of each value, uint64 `[...]`, in a new array."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(MIX_2)
    return values ^ (values >> np.uint64(31))


def _multipliers() -> UInt64Array:
    """uint64 `[TILE_WORDS]`."""
    places = np.arange(1, TILE_WORDS + 1, dtype=np.uint64)
    return mixed(places * np.uint64(GAMMA)) | np.uint64(1)


MULTIPLIERS = _multipliers()
MULTIPLIERS.flags.writeable = False

# Two words are read as one of 64 bits, w = first + 2**32 * second. Then w * first's multiplier has first's product in it,
# and 2**32 * second too much of it, which the factor of second makes good. So nothing has to be masked or widened.
_WHOLE = MULTIPLIERS[0::2].copy()
_SECOND = MULTIPLIERS[1::2] - (MULTIPLIERS[0::2] << _WORD_BITS)


def checksums(pieces: Sequence[Piece]) -> list[int]:
    """The checksum of each piece, from 0 to 2**64 - 1.

    Call it off the event loop, as `reference.gather`: it reads all the memory. It needs 600 KiB beside it.

    Raises:
        ConfigError: a piece's length is negative, or its address is none.
    """
    for address, length_bytes in pieces:
        check_piece(address, length_bytes)
    turns, spare = Turns(), _spare(max((piece.length_bytes for piece in pieces), default=0))
    sums = []
    for address, length_bytes in pieces:
        data = view(address, length_bytes) if length_bytes else np.empty(0, np.uint8)
        sums.append(finish(_tile_sum(data, 0, spare, turns), length_bytes))
    return sums


def checksum(data: Bytes) -> int:
    """The checksum of `data`, uint8 `[length]`, contiguous, at any address. See `checksums`.

    Raises:
        ConfigError: `data` is no such array.
    """
    return finish(tile_sum(data), data.size)


def tile_sum(data: Bytes, first_tile: int = 0) -> int:
    """What the tiles in `data` add to the checksum of something longer; from 0 to 2**64 - 1.

    Parts of a whole may be cut wherever tiles meet, and taken in any order: `finish` of the sum is the whole's checksum.

    Args:
        data: uint8 `[length]`, contiguous. Only the last part of a whole may end within a tile.
        first_tile: number in the whole of the tile with which `data` begins.

    Raises:
        ConfigError: `data` is no such array, or `first_tile` is negative.
    """
    if first_tile < 0:
        raise ConfigError("first_tile", f"{first_tile} is negative")
    return _tile_sum(_checked(data), first_tile, _spare(data.size), Turns())


def finish(tile_sums: int, length_bytes: int) -> int:
    """The checksum, from the sum of all `tile_sum`s and the length of the whole."""
    return (tile_sums + length_term(length_bytes)) & MASK


def length_term(length_bytes: int) -> int:
    """What the length adds to a checksum, from 0 to 2**64 - 1: `mix`, in Python, as every launch on a GPU asks for it."""
    value = MASK - length_bytes
    value = (value ^ (value >> 30)) * MIX_1 & MASK
    value = (value ^ (value >> 27)) * MIX_2 & MASK
    return value ^ (value >> 31)


def check_piece(address: int, length_bytes: int) -> None:
    """Raises ConfigError where a piece cannot be one; what lies behind the address is the caller's word."""
    if not 0 <= length_bytes < 1 << 62:
        raise ConfigError("length_bytes", f"{length_bytes}; from 0 on")
    if length_bytes and address < 1:
        raise ConfigError("address", f"{address} is no address")


def _checked(data: Bytes) -> Bytes:
    if data.dtype != np.uint8 or data.ndim != 1 or not data.flags.c_contiguous:
        raise ConfigError("data", f"is {data.dtype} with {data.ndim} dimensions; contiguous uint8 with one is needed")
    return data


def _spare(length_bytes: int) -> UInt64Array:
    """Room for the second words of a block, uint64 `[tiles, TILE_WORDS / 2]`."""
    return np.empty((max(1, min(_BLOCK_TILES, length_bytes // TILE_BYTES)), TILE_WORDS // 2), np.uint64)


def _tile_sum(data: Bytes, first_tile: int, spare: UInt64Array, turns: Turns) -> int:
    tiles, rest = divmod(data.size, TILE_BYTES)
    whole = data[: tiles * TILE_BYTES].view("<u8").reshape(tiles, TILE_WORDS // 2)
    total = 0
    for begin in range(0, tiles, _MIXED_TILES):
        sums = _weighted(whole[begin : begin + _MIXED_TILES], spare, turns)
        total += _terms(sums, first_tile + begin)
    if rest:
        last = np.zeros(TILE_BYTES, np.uint8)  # words of zeros add nothing
        last[:rest] = data[-rest:]
        total += _terms(_weighted(last.view("<u8").reshape(1, -1), spare, turns), first_tile + tiles)
    return total & MASK


def _weighted(tiles: UInt64Array, spare: UInt64Array, turns: Turns) -> UInt64Array:
    """Words times multipliers, summed within each tile: uint64 `[tiles]` of `[tiles, TILE_WORDS / 2]`.

    Of NumPy's ways to multiply and sum integers, `einsum` is the fastest, by a third before `dot`; it needs no temporary
    and releases the GIL, as does the shift.
    """
    sums = np.empty(tiles.shape[0], np.uint64)
    for begin in range(0, sums.size, spare.shape[0]):
        block = tiles[begin : begin + spare.shape[0]]
        out = sums[begin : begin + spare.shape[0]]
        np.einsum("ij,j->i", block, _WHOLE, out=out)
        out += np.einsum("ij,j->i", np.right_shift(block, _WORD_BITS, out=spare[: out.size]), _SECOND)
        turns.next()
    return sums


def _terms(sums: UInt64Array, first_tile: int) -> int:
    """Sum of the terms of tiles whose words have these weighted sums; changes `sums`."""
    sums += np.arange(first_tile + 1, first_tile + 1 + sums.size, dtype=np.uint64) * np.uint64(GAMMA)
    return int(mixed(sums).sum(dtype=np.uint64))
