"""Decoded objects that never change, kept for the next reader, bounded by the bytes they were stored in."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class ByteCache(Generic[T]):
    """The values used last, by key. Only for objects that are never written again: a value has no version."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max, self._bytes = bytes_max, 0
        self._held: OrderedDict[str, tuple[int, T]] = OrderedDict()

    def get(self, key: str) -> T | None:
        found = self._held.get(key)
        if found is None:
            return None
        self._held.move_to_end(key)
        return found[1]

    def put(self, key: str, size_bytes: int, value: T) -> None:
        """Holds the value. Two readers may have read the same object at the same time: it counts once."""
        before = self._held.pop(key, None)
        self._bytes += size_bytes - (before[0] if before is not None else 0)
        self._held[key] = (size_bytes, value)
        while self._bytes > self._bytes_max:
            self._bytes -= self._held.popitem(last=False)[1][0]
