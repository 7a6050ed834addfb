"""A bucket in memory that records which keys were read and which folders were listed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from lakebed.core.clock import Clock
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo, StoredObject

VERBS = ("get", "get_range", "head", "list", "children", "create", "replace", "upload", "delete")


class CountingStore(MemoryStore):
    def __init__(self, *, clock: Clock) -> None:
        super().__init__(clock=clock)
        self.gets: list[str] = []
        self.lists: list[str] = []

    async def get(self, key: str) -> StoredObject:
        self.gets.append(key)
        return await super().get(key)

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        self.lists.append(prefix)
        async for info in super().list(prefix, after=after):
            yield info


def count_requests(monkeypatch: pytest.MonkeyPatch, store: Any) -> list[str]:
    """The verbs of all requests to this store from now on, in their order."""
    asked: list[str] = []
    for verb in VERBS:
        real = getattr(store, verb)
        monkeypatch.setattr(store, verb, lambda *a, verb=verb, real=real, **k: (asked.append(verb), real(*a, **k))[1])
    return asked
