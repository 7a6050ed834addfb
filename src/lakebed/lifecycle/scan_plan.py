"""What a scan is for, what it did, and which actions it lets join the sweeps: pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from lakebed.core.runs import ActiveRun
from lakebed.lifecycle.cluster import LogGap
from lakebed.lifecycle.engine import CompiledAction, PolicySnapshot
from lakebed.lifecycle.model import ActionKind, Calendar, Mode
from lakebed.lifecycle.seams import UPLOADS
from lakebed.lifecycle.state import ActionState, BucketLifecycle, ScanProgress


class BucketScan(msgspec.Struct, frozen=True):
    """What a scan did. `complete` is False when it stopped; the next one continues from its checkpoint."""

    bucket: str
    scanned: int = 0
    worked: int = 0
    complete: bool = False
    blocked: bool = False
    problem: str = ""

    def plus(self, other: BucketScan) -> BucketScan:
        return BucketScan(
            self.bucket,
            self.scanned + other.scanned,
            self.worked + other.worked,
            self.complete or other.complete,
            self.blocked or other.blocked,
            self.problem or other.problem,
        )

    def report_to(self, run: ActiveRun) -> None:
        """Reports it as the result of a run."""
        run.rows_in, run.rows_out, run.failed = self.scanned, self.worked, bool(self.problem)
        run.reason = self.problem or ("complete" if self.complete else "stopped; the next scan continues")


def scan_prefixes(actions: Iterable[CompiledAction]) -> list[str]:
    """What a scan must list: everything, or the prefixes of the rules where each has one, and the uploads where one
    aborts them. No prefix begins with another.
    """
    some = list(actions)
    wanted = sorted({one.rule.prefix for one in some})
    if "" in wanted or not wanted:
        return [""]
    prefixes: list[str] = []
    for prefix in wanted:
        if not any(prefix.startswith(known) for known in prefixes):
            prefixes.append(prefix)
    return [*prefixes, *([UPLOADS] if any(one.kind is ActionKind.ABORT_MPU for one in some) else [])]


def newest_wanted_ns(
    actions: Iterable[CompiledAction], now_ns: int, calendar: Calendar, gaps: Sequence[LogGap]
) -> int | None:
    """The latest time of an object without versions that a scan must look at; None when it must look at all.

    Later ones are not due by their age, and their events bring them. A date has no age; where no event comes, because
    of the mode or a gap in the log, the scan must see when each object will be due.
    """
    newest_ns = max((gap.to_ns for gap in gaps), default=0)
    for action in actions:
        if action.mode is Mode.SCAN_ONLY:
            return None
        if action.kind is ActionKind.EXPIRATION_DATE and (action.rule.expiration_date_ns or 0) <= now_ns:
            return None
        if action.kind is ActionKind.EXPIRATION_DAYS:
            newest_ns = max(newest_ns, calendar.cutoff(now_ns, calendar.days(action.rule.expiration_days or 0)))
    return newest_ns


def is_joining(known: ActionState) -> bool:
    """Whether the action takes part in sweeps, and its cursors were not moved back for it yet."""
    return known.bootstrap_complete and known.mode is Mode.EVENT_DRIVEN and not known.joined


def same_scan(one: ActionState, other: ActionState) -> bool:
    return one.bootstrap_started_at_ns == other.bootstrap_started_at_ns


def reseeded(action: CompiledAction, scan: ScanProgress) -> bool:
    by_delay = bool(set(action.delays_ns) & set(scan.force_delays_ns))
    return by_delay or (scan.force_predicate and action.predicate_sensitive)


def snapshot_digest(snapshot: PolicySnapshot, bucket: str) -> str:
    """Names what a scan is for, the same in every process: its set of actions, and the log they need."""
    keys = sorted(f"{action.ref.key} {action.predicate_sensitive}" for action in snapshot.of_bucket(bucket))
    return hashlib.sha256("\n".join([str(snapshot.log.generation), *keys]).encode()).hexdigest()[:16]


def needs_scan(state: BucketLifecycle, actions: Iterable[CompiledAction], now_ns: int) -> bool:
    """Whether the bucket is due for a scan, or has one under way. A date to come needs none."""
    live = [one for one in actions if one.mode is not Mode.DISABLED and not _is_to_come(one, now_ns)]
    known = [state.action(action.ref.key) or ActionState() for action in live]
    new = any(not one.bootstrap_complete for one in known)
    due = any(one.next_scan_ns <= now_ns for one in known)
    return bool(live) and (new or due or state.rescan or state.scan is not None)


def _is_to_come(action: CompiledAction, now_ns: int) -> bool:
    """Whether this is a date in the future. The other actions of its rule do not wait for it."""
    return action.kind is ActionKind.EXPIRATION_DATE and (action.rule.expiration_date_ns or 0) > now_ns


def next_scans(states: Mapping[str, BucketLifecycle], snapshot: PolicySnapshot) -> list[int]:
    """When the next scans are due."""
    wakes: list[int] = []
    for bucket, state in states.items():
        for action in snapshot.of_bucket(bucket):
            known = state.action(action.ref.key)
            if action.mode is Mode.DISABLED:
                continue
            if known is not None and known.next_scan_ns:
                wakes.append(known.next_scan_ns)
            elif action.kind is ActionKind.EXPIRATION_DATE:
                wakes.append(action.rule.expiration_date_ns or 0)
    return wakes
