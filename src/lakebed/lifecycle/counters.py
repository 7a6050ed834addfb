"""Counts per action that outlive processes: the process's own metrics, added to a register of each bucket.

Every process adds what its metrics grew by since it last did, so any number of workers add up. A process may have
several recorders, of its worker and of a page that is open: what one adds, the others do not. What a process counted
and did not add before it died is lost, at most RECORD_S of it: the ledger is exact, these are for showing.
"""

from __future__ import annotations

from functools import partial
from weakref import WeakKeyDictionary

import msgspec

from lakebed.core.errors import LakebedError
from lakebed.core.logs import logger
from lakebed.core.metrics import Metrics
from lakebed.lifecycle import paths
from lakebed.lifecycle.settings import ns
from lakebed.lifecycle.state import LifecycleState, changed
from lakebed.store.register import Register
from lakebed.store.runtime import StoreRuntime

log = logger("lifecycle")
RECORD_S = 10.0


class ActionCounts(msgspec.Struct, frozen=True):
    """What was counted for one action since its rule was first run."""

    evaluated: int = 0
    expired: int = 0
    metadata_only: int = 0
    skipped_object_lock: int = 0
    errors: int = 0

    def plus(self, more: ActionCounts) -> ActionCounts:
        return ActionCounts(*(getattr(self, name) + getattr(more, name) for name in self.__struct_fields__))


# What each process has added, by its metrics: (bucket, action) → counts.
_ADDED: WeakKeyDictionary[Metrics, dict[tuple[str, str], ActionCounts]] = WeakKeyDictionary()


class BucketCounts(msgspec.Struct, frozen=True):
    version: int = 1
    actions: dict[str, ActionCounts] = {}  # by "rule_hash/KIND"


def counts_of(runtime: StoreRuntime, bucket: str) -> Register[BucketCounts]:
    return Register(runtime, paths.bucket_counts(bucket), BucketCounts, BucketCounts(), name="lifecycle_counts")


class CountRecorder:
    """Adds what this process counted to the stored counts."""

    def __init__(self, state: LifecycleState) -> None:
        self._state = state
        self._registers: dict[str, Register[BucketCounts]] = {}
        self._added = _ADDED.setdefault(state.metrics, {})
        self._recorded_ns = state.clock.now_ns()

    async def record(self, *, now: bool = False) -> None:
        """At most every RECORD_S unless `now`. A failure is logged, and what it left is added the next time."""
        at_ns = self._state.clock.now_ns()
        if not now and at_ns - self._recorded_ns < ns(RECORD_S):
            return
        self._recorded_ns = at_ns
        counted = self._counted()
        grown: dict[str, dict[str, ActionCounts]] = {}
        for (bucket, action), total in counted.items():
            before = self._added.get((bucket, action), ActionCounts())
            if total != before:
                grown.setdefault(bucket, {})[action] = _minus(total, before)
        self._added.update(counted)  # at once: another recorder must not add it too
        left = dict(grown)
        try:
            for bucket, more in grown.items():
                try:
                    await self._register(bucket).change(changed(partial(_added, more)))
                except LakebedError as error:
                    log.warning("counts not recorded", bucket=bucket, error=error.message)
                    continue
                del left[bucket]
        finally:  # also of a worker that is stopped: the next record adds it
            for bucket, more in left.items():
                for action, one in more.items():
                    self._added[bucket, action] = _minus(self._added[bucket, action], one)

    def _register(self, bucket: str) -> Register[BucketCounts]:
        if bucket not in self._registers:
            self._registers[bucket] = counts_of(self._state.runtime, bucket)
        return self._registers[bucket]

    def _counted(self) -> dict[tuple[str, str], ActionCounts]:
        found: dict[tuple[str, str], dict[str, int]] = {}
        for field in ActionCounts.__struct_fields__:
            for family in self._state.metrics.counter(f"lakebed_lifecycle_{field}_total").collect():
                for sample in family.samples:
                    if sample.name.endswith("_total"):
                        place = found.setdefault((sample.labels["bucket"], sample.labels["action"]), {})
                        place[field] = place.get(field, 0) + int(sample.value)
        return {place: ActionCounts(**counts) for place, counts in found.items()}


def _minus(total: ActionCounts, before: ActionCounts) -> ActionCounts:
    return ActionCounts(*(getattr(total, name) - getattr(before, name) for name in total.__struct_fields__))


def _added(more: dict[str, ActionCounts], known: BucketCounts) -> BucketCounts:
    summed = {name: known.actions.get(name, ActionCounts()).plus(one) for name, one in more.items()}
    return BucketCounts(actions={**known.actions, **summed})
