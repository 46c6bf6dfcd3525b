"""What the KV of a request is in the soak: a function of request and place, so that a wrong byte is known by itself."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from rdma_kv.errors import ConfigError

Bytes = npt.NDArray[np.uint8]

FREED: Final = 0xA5
"""What a page holds when nobody uses it. A page that is free and holds anything else was written behind its owner's back."""

_WORD_BYTES = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # Source: splitmix64, as the two multipliers below
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def kv_of(request: int, layers: range, kv_factor: int, heads: range, tokens: range, row_bytes: int) -> Bytes:
    """The bytes `[layers, kv, tokens, heads, row_bytes]` of a request.

    Every 8 bytes are a hash of request and place: bytes of another request, layer, head or token agree in one of 256, and
    whole words never in practice.

    Raises:
        ConfigError: rows that are not whole words.
    """
    if row_bytes % _WORD_BYTES:
        raise ConfigError("row_bytes", f"{row_bytes} is no multiple of {_WORD_BYTES}")
    axes = (layers, range(kv_factor), tokens, heads, range(row_bytes // _WORD_BYTES))
    place: npt.NDArray[np.uint64] = np.full(1, request, dtype=np.uint64)
    with np.errstate(over="ignore"):
        for number, axis in enumerate(axes):
            steps = np.array(axis, dtype=np.uint64).reshape([-1 if n == number else 1 for n in range(len(axes))])
            place = place * np.uint64(1 << 20) + steps if number else place * np.uint64(1 << 12) + steps
            place = (place ^ (place >> np.uint64(29))) * _GOLDEN
        for shift, factor in zip((30, 27), _MIX, strict=True):
            place = (place ^ (place >> np.uint64(shift))) * factor
    return np.ascontiguousarray(place).view(np.uint8)


class Pool:
    """One rank's KV memory in `[layers, kv, pages, tokens, heads, row]`, and which of its pages are free.

    Attributes:
        poisoned_bytes: bytes of free pages that were written, counted when a page is taken or looked at.
    """

    def __init__(
        self, layers: range, kv_factor: int, num_pages: int, page_size: int, heads: range, row_bytes: int
    ) -> None:
        self.layers, self.heads = layers, heads
        self.page_size = page_size
        shape = (len(layers), kv_factor, num_pages, page_size, len(heads), row_bytes)
        self.memory: Bytes = np.full(shape, FREED, dtype=np.uint8)
        self.poisoned_bytes = 0
        self._free = list(range(num_pages))
        self._num_pages = num_pages

    @property
    def pages_used(self) -> int:
        return self._num_pages - len(self._free)

    def take(self, tokens: int) -> list[int]:
        """Pages for so many tokens, those first that were freed last: what is written late then does most harm.

        Raises:
            ConfigError: there are not so many.
        """
        count = -(-tokens // self.page_size)
        if count > len(self._free):
            raise ConfigError("tokens", f"{tokens} need {count} pages, {len(self._free)} are free")
        pages = [self._free.pop() for _ in range(count)]
        self._look(pages)
        return pages

    def free(self, pages: list[int]) -> None:
        """Give pages back; they are overwritten at once."""
        self.memory[:, :, pages] = FREED
        self._free += pages

    def fill(self, request: int, pages: list[int], tokens: int) -> None:
        """Put the first `tokens` tokens of a request there."""
        for layer in range(len(self.layers)):  # one at a time: a hash takes much more memory than its result
            rows = self._rows(layer, pages)
            rows[:, :tokens] = self._content(request, layer, tokens)
            kv_factor, _, heads, row_bytes = rows.shape
            self.memory[layer][:, pages] = rows.reshape(kv_factor, len(pages), self.page_size, heads, row_bytes)

    def wrong_bytes(self, request: int, pages: list[int], tokens: int) -> int:
        """Bytes of a request's tokens that are not its own, and of its last page's rest that are not `FREED`."""
        wrong = 0
        for layer in range(len(self.layers)):
            rows = self._rows(layer, pages)
            wrong += int(np.count_nonzero(rows[:, :tokens] != self._content(request, layer, tokens)))
            wrong += int(np.count_nonzero(rows[:, tokens:] != FREED))
        return wrong

    def look(self) -> int:
        """Look at all free pages; poisoned bytes so far."""
        self._look(self._free)
        return self.poisoned_bytes

    def _look(self, pages: list[int]) -> None:
        for layer in self.memory:
            written = int(np.count_nonzero(layer[:, pages] != FREED))
            if written:
                self.poisoned_bytes += written
                layer[:, pages] = FREED

    def _content(self, request: int, layer: int, tokens: int) -> Bytes:
        """`[kv, tokens, heads, row]` of one of our layers."""
        _, kv_factor, _, _, _, row_bytes = self.memory.shape
        layers = self.layers[layer : layer + 1]
        content: Bytes = kv_of(request, layers, kv_factor, self.heads, range(tokens), row_bytes)[0]
        return content

    def _rows(self, layer: int, pages: list[int]) -> Bytes:
        """A copy of pages of one of our layers as `[kv, tokens, heads, row]`."""
        part: Bytes = self.memory[layer][:, pages]
        kv_factor, count, page_size, heads, row_bytes = part.shape
        return part.reshape(kv_factor, count * page_size, heads, row_bytes)
