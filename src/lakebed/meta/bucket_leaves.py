"""Leaves kept in memory. They never change, so what is here is never stale."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from lakebed.meta.bucket_model import Leaf

CACHE_BYTES_MAX = 64 * 1024 * 1024


class LeafCache:
    """Decoded leaves by object key, least recently used out first."""

    def __init__(self, size_bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._leaves: OrderedDict[str, Leaf] = OrderedDict()
        self._size_bytes, self._size_bytes_max = 0, size_bytes_max

    def get(self, key: str) -> Leaf | None:
        found = self._leaves.get(key)
        if found is not None:
            self._leaves.move_to_end(key)
        return found

    def add(self, key: str, leaf: Leaf) -> None:
        if key not in self._leaves:
            self._leaves[key] = leaf
            self._size_bytes += leaf.size_bytes
        while self._size_bytes > self._size_bytes_max and len(self._leaves) > 1:
            _, oldest = self._leaves.popitem(last=False)
            self._size_bytes -= oldest.size_bytes


class LeavesAtHand(Mapping[str, Leaf]):
    """Leaves that were fetched for a call, and behind them those that happen to be in the cache."""

    def __init__(self, cached: Callable[[str], Leaf | None], fetched: dict[str, Leaf]) -> None:
        self._cached, self.fetched = cached, fetched

    def __getitem__(self, id: str) -> Leaf:
        found = self.fetched.get(id) or self._cached(id)
        if found is None:
            raise KeyError(id)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.fetched)

    def __len__(self) -> int:
        return len(self.fetched)
