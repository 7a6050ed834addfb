"""Settings of lifecycle: due dates, limits, retries and leases."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from lakebed.core.settings import Contradiction, Section, describe
from lakebed.lifecycle.model import DAY_S, SECOND_NS, Calendar


class LifecycleSettings(Section, frozen=True):
    section: ClassVar[str] = "lifecycle"

    day_s: Annotated[float, describe("Length of a day in seconds; only tests change it.")] = float(DAY_S)
    buckets: Annotated[
        tuple[str, ...],
        describe("Names the buckets that lifecycle may delete from, as patterns; empty means every one with a policy."),
    ] = ()
    rounding: Annotated[
        Literal["exact", "midnight"],
        describe(
            "Chooses when an object is due: exact to the nanosecond, or at the next midnight UTC as on AWS.",
            when="objects must expire at their exact age",
        ),
    ] = "midnight"
    small_delay_s: Annotated[
        float, describe("Delays a delete by this time, so that writes in progress finish first.")
    ] = 60.0
    flush_lag_s: Annotated[float, describe("Limits how late an event may still appear in the store's log.")] = 120.0
    lookback_s: Annotated[float, describe("Starts the cursors of a scan at least this long before the scan began.")] = (
        3600.0
    )
    retention_s: Annotated[
        float,
        describe(
            "States how long the store keeps its event log; 0 means forever.",
            when="the filer's log is deleted after some time",
        ),
    ] = 0.0
    poll_s: Annotated[float, describe("Reads policies at least this often.")] = 60.0
    concurrency: Annotated[int, describe("Limits the deletes in progress at the same time.")] = 16
    deletes_per_s: Annotated[
        float,
        describe("Limits deletes per second; 0 means no limit.", when="deletes slow other users of the store down"),
    ] = 0.0
    batch: Annotated[int, describe("Sets how many events or keys are processed between two checkpoints.")] = 256
    policy_fresh_s: Annotated[float, describe("Limits the age of a policy when a delete depends on it.")] = 1.0
    pending_max: Annotated[
        int, describe("Limits the waiting exceptions of one action; beyond it the action switches to scans.")
    ] = 50_000
    retries_max: Annotated[int, describe("Limits consecutive retries at one position before it becomes a blocker.")] = (
        30
    )
    retry_age_s: Annotated[
        float, describe("Limits the age of the first retry before the position becomes a blocker.")
    ] = 4 * 3600.0
    lease_s: Annotated[float, describe("Keeps the streams of a worker that stopped reporting for this long.")] = 30.0
    fold_s: Annotated[float, describe("Moves the ledger into its table at this interval; 0 means never.")] = 300.0
    ledger_retention_s: Annotated[
        float, describe("Keeps rows of the ledger for this long after the decision; 0 means forever.")
    ] = 400.0 * DAY_S
    events_topic: Annotated[
        str,
        describe("Publishes each deletion as a CloudEvent to this topic of the log; empty means no events."),
    ] = ""
    run_hours: Annotated[
        str, describe("Limits work to these hours of the day in UTC, as 01-06; empty means always.")
    ] = ""
    shared_prefixes: Annotated[
        str,
        describe(
            "Lists prefixes of Lakebed's own bucket that rules may delete from, separated by commas; empty means none.",
            when="other data is stored in Lakebed's bucket",
        ),
    ] = ""
    grace_s: Annotated[float, describe("Keeps the state of a removed rule for this long.")] = 7.0 * DAY_S

    def check(self) -> None:
        if any(not part.strip() for part in self.shared_prefixes.split(",")) and self.shared_prefixes:
            raise Contradiction("lifecycle.shared_prefixes", "lifecycle.shared_prefixes", "contains an empty prefix")
        for name in ("day_s", "poll_s", "lease_s"):
            if getattr(self, name) <= 0:
                raise Contradiction(f"lifecycle.{name}", f"lifecycle.{name}", "must be above 0")
        for name in ("concurrency", "batch", "pending_max", "retries_max"):
            if getattr(self, name) < 1:
                raise Contradiction(f"lifecycle.{name}", f"lifecycle.{name}", "must be at least 1")

        if self.events_topic and not self.fold_s:
            raise Contradiction("lifecycle.events_topic", "lifecycle.fold_s", "events come from the ledger's moves")

        self.hours_closed_s(0)

    def hours_closed_s(self, now_ns: int) -> float:
        """How long `run_hours` still keep the workers from working; 0 while they may. Raises Contradiction."""
        if not self.run_hours:
            return 0.0
        found = re.fullmatch(r"([01]\d|2[0-3])-([01]\d|2[0-4])", self.run_hours)
        if found is None or found[1] == found[2]:
            raise Contradiction("lifecycle.run_hours", "lifecycle.run_hours", "must be two hours, as 01-06 or 22-04")
        opens_s, closes_s = int(found[1]) * 3600, int(found[2]) * 3600
        at_s = now_ns / SECOND_NS % DAY_S
        is_open = opens_s <= at_s < closes_s if opens_s < closes_s else at_s >= opens_s or at_s < closes_s
        return 0.0 if is_open else (opens_s - at_s) % DAY_S

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
