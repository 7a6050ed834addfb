"""Lifecycle's settings."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from lakebed.lifecycle.model import DAY_S, SECOND_NS, Calendar
from lakebed.settings import Contradiction, Section, describe


class LifecycleSettings(Section, frozen=True):
    section: ClassVar[str] = "lifecycle"

    day_s: Annotated[float, describe("how long a day is; only tests change it")] = float(DAY_S)
    rounding: Annotated[
        Literal["exact", "midnight"], describe("due to the nanosecond, or at the next midnight UTC as on AWS")
    ] = "midnight"
    small_delay_s: Annotated[float, describe("distance kept to writes under way")] = 60.0
    flush_lag_s: Annotated[float, describe("how late an event may still appear in the store's log")] = 120.0
    lookback_s: Annotated[float, describe("how far behind a walk's start its cursors are seeded at least")] = 3600.0
    retention_s: Annotated[float, describe("how long the store keeps its event log; 0 is for ever")] = 0.0
    poll_s: Annotated[float, describe("longest time between two looks at policies")] = 60.0
    concurrency: Annotated[int, describe("deletes under way at once")] = 16
    deletes_per_s: Annotated[float, describe("most deletes in a second; 0 is no limit")] = 0.0
    batch: Annotated[int, describe("events or keys resolved together between two checkpoints")] = 256
    policy_fresh_s: Annotated[float, describe("how old a policy may be when a delete relies on it")] = 1.0
    pending_max: Annotated[int, describe("exceptions waiting per action before it is demoted to scans")] = 50_000
    retries_max: Annotated[int, describe("consecutive retries of one place before it becomes a blocker")] = 30
    retry_age_s: Annotated[float, describe("age of the first retry after which it becomes a blocker")] = 4 * 3600.0
    lease_s: Annotated[float, describe("how long a silent worker keeps its streams")] = 30.0
    fold_s: Annotated[float, describe("time between two moves of the ledger into its table; 0 is never")] = 300.0
    shared_prefixes: Annotated[
        str, describe("prefixes of Lakebed's own bucket that rules may touch, comma between; empty: none")
    ] = ""
    grace_s: Annotated[float, describe("how long the state of a removed rule is kept")] = 7.0 * DAY_S

    def check(self) -> None:
        if any(not part.strip() for part in self.shared_prefixes.split(",")) and self.shared_prefixes:
            raise Contradiction("lifecycle.shared_prefixes", "lifecycle.shared_prefixes", "a prefix in it is empty")
        for name in ("day_s", "poll_s", "lease_s"):
            if getattr(self, name) <= 0:
                raise Contradiction(f"lifecycle.{name}", f"lifecycle.{name}", "it must be more than 0")
        for name in ("concurrency", "batch", "pending_max", "retries_max"):
            if getattr(self, name) < 1:
                raise Contradiction(f"lifecycle.{name}", f"lifecycle.{name}", "it must be at least 1")

    @property
    def calendar(self) -> Calendar:
        return Calendar(ns(self.day_s), self.rounding, ns(self.small_delay_s))

    @property
    def shared(self) -> tuple[str, ...]:
        return tuple(one.strip() for one in self.shared_prefixes.split(",") if one.strip())

    @property
    def retention_ns(self) -> int | None:
        return ns(self.retention_s) or None


def ns(seconds: float) -> int:
    return round(seconds * SECOND_NS)
