"""Lifecycle's registers in one place: buckets, the reader, the troubles, the ledger's moves. Opened once, kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lakebed.clock import Clock
from lakebed.ids import Ids
from lakebed.lifecycle import paths
from lakebed.lifecycle.state import BucketState, Fold, LastTick, ReaderState, Troubles, Wake
from lakebed.metrics import Metrics
from lakebed.store.protocol import Store
from lakebed.store.register import Register

R = TypeVar("R")


class Shelf:
    def __init__(self, store: Store, *, clock: Clock, ids: Ids, metrics: Metrics) -> None:
        self.store, self.clock, self.ids, self.metrics = store, clock, ids, metrics
        self.reader: Register[ReaderState] = self._open(paths.READER, ReaderState, ReaderState(), "lifecycle_reader")
        self.troubles: Register[Troubles] = self._open(paths.TROUBLES, Troubles, Troubles(), "lifecycle_troubles")
        self.fold: Register[Fold] = self._open(paths.FOLD, Fold, Fold(), "lifecycle_fold")
        self.wake: Register[Wake] = self._open(paths.WAKE, Wake, Wake(), "lifecycle_wake")
        self.tick: Register[LastTick] = self._open(paths.TICK, LastTick, LastTick(), "lifecycle_tick")
        self._buckets: dict[str, Register[BucketState]] = {}

    def bucket(self, name: str) -> Register[BucketState]:
        if name not in self._buckets:
            key = paths.bucket_state(name)
            self._buckets[name] = self._open(key, BucketState, BucketState(), "lifecycle_bucket")
        return self._buckets[name]

    async def buckets(self) -> list[str]:
        """Buckets that lifecycle has state of, whether or not they still have a policy."""
        return list(await self.store.children(paths.BUCKETS))

    def _open(self, key: str, kind: type[R], initial: R, name: str) -> Register[R]:
        return Register(self.store, key, kind, initial, clock=self.clock, ids=self.ids, metrics=self.metrics, name=name)


def changed(change: Callable[[R], R]) -> Callable[[R], tuple[R, R]]:
    """A change without a result of its own gives the new value."""

    def decide(value: R) -> tuple[R, R]:
        after = change(value)
        return after, after

    return decide
