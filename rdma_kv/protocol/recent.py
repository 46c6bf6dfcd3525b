"""What is remembered for a while only: a map that is bounded in number and in time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

from rdma_kv.errors import ConfigError

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Recent(Generic[K, V]):
    """A map that forgets: each entry after `keep_s`, and the oldest where there would be more than `limit`.

    The caller says what time it is, on any clock that does not go back.

    Raises:
        ConfigError: `limit` or `keep_s` is not positive.
    """

    def __init__(self, limit: int, keep_s: float) -> None:
        if limit < 1:
            raise ConfigError("limit", f"{limit} is not positive")
        if not keep_s > 0:
            raise ConfigError("keep_s", f"{keep_s} s is not positive")
        self._limit = limit
        self._keep_s = keep_s
        self._entries: OrderedDict[K, tuple[float, V]] = OrderedDict()  # by age, as all are kept equally long

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, key: K, value: V, now: float) -> None:
        """Remember from now on; what was remembered under this key before is replaced."""
        self._entries.pop(key, None)
        self._entries[key] = (now + self._keep_s, value)
        self._forget(now)
        while len(self._entries) > self._limit:
            self._entries.popitem(last=False)

    def get(self, key: K, now: float) -> V | None:
        """What is remembered under the key; None for nothing."""
        self._forget(now)
        entry = self._entries.get(key)
        return entry[1] if entry is not None else None

    def drop(self, key: K) -> None:
        """Forget it now, if it is remembered."""
        self._entries.pop(key, None)

    def _forget(self, now: float) -> None:
        while self._entries and next(iter(self._entries.values()))[0] <= now:
            self._entries.popitem(last=False)
