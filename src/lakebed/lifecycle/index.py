"""Which actions of a bucket may apply to a key: a trie over prefixes, then the tags where they are known.

A lookup walks the key once, whatever the number of rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

T = TypeVar("T")


class PrefixTrie(Generic[T]):
    """Values under prefixes; `match` gives those whose prefix begins the key, in the order of their length."""

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()

    def add(self, prefix: str, value: T) -> None:
        node = self._root
        for char in prefix:
            node = node.below.setdefault(char, _Node())
        node.values.append(value)

    def match(self, key: str) -> list[T]:
        node, found = self._root, list(self._root.values)
        for char in key:
            after = node.below.get(char)
            if after is None:
                break
            node = after
            found += node.values
        return found


class _Node(Generic[T]):
    __slots__ = ("below", "values")

    def __init__(self) -> None:
        self.below: dict[str, _Node[T]] = {}
        self.values: list[T] = []


class TagIndex(Generic[T]):
    """Values that ask for tags, found by one of the tags they ask for; those that ask for none always match."""

    def __init__(self) -> None:
        self._any: set[T] = set()
        self._by_tag: dict[tuple[str, str], set[T]] = {}

    def add(self, tags: Iterable[tuple[str, str]], value: T) -> None:
        first = min(tags, default=None)
        if first is None:
            self._any.add(value)
        else:
            self._by_tag.setdefault(first, set()).add(value)

    def keep(self, values: Iterable[T], tags: Mapping[str, str]) -> list[T]:
        """Those that these tags do not rule out; the rest of the filter is for `evaluate`."""
        allowed = [self._by_tag[tag] for tag in tags.items() if tag in self._by_tag]
        return [value for value in values if value in self._any or any(value in some for some in allowed)]
