"""The guarded delete, decided: identity, policy, eligibility, lock, in the seed's order; pure.

Called with what was read last before the dispatch. None means go; anything else is the outcome.
"""

from __future__ import annotations

from collections.abc import Iterable

from lakebed.errors import Corrupt, Denied, Invalid, LakebedError, NotFound, Stale, Unavailable
from lakebed.lifecycle.engine import action_keys
from lakebed.lifecycle.evaluate import evaluate
from lakebed.lifecycle.home import Home
from lakebed.lifecycle.model import ActionKey, Calendar, Entry, Outcome, Resolution, Rule, Verb


def same_entry(one: Entry, other: Entry) -> bool:
    return (one.version_id, one.upload_id) == (other.version_id, other.upload_id)


def guard(
    wanted: Entry,
    verb: Verb,
    key: ActionKey,
    rule: Rule,
    *,
    live: Iterable[Entry],
    policy: Iterable[Rule],
    home: Home,
    now_ns: int,
    calendar: Calendar,
) -> Outcome | None:
    if home.holds(wanted.bucket, wanted.key):
        return Outcome.SKIPPED_RESERVED
    current = next((entry for entry in live if same_entry(entry, wanted)), None)
    if current is None:
        return Outcome.NOT_FOUND
    if current.identity != wanted.identity:
        return Outcome.STALE_IDENTITY
    if key not in action_keys(policy):
        return Outcome.STALE_POLICY
    if evaluate(rule, key.kind, current, now_ns, calendar) is not verb:
        return Outcome.NO_LONGER_ELIGIBLE
    return Outcome.SKIPPED_OBJECT_LOCK if current.locked else None


def outcome_of(error: LakebedError) -> Outcome:
    """What the store's refusal means."""
    if isinstance(error, NotFound):
        return Outcome.NOT_FOUND
    if isinstance(error, Stale):
        return Outcome.STALE_IDENTITY
    if isinstance(error, Denied):
        return Outcome.SKIPPED_OBJECT_LOCK
    if isinstance(error, (Corrupt, Invalid)) and not isinstance(error, Unavailable):
        return Outcome.FATAL_EVENT_ERROR
    return Outcome.TRANSPORT_ERROR


_RESOLUTIONS = {
    Outcome.DELETED: Resolution.DONE,
    Outcome.NOT_FOUND: Resolution.NOOP_RESOLVED,
    Outcome.STALE_IDENTITY: Resolution.NOOP_RESOLVED,
    Outcome.STALE_POLICY: Resolution.NOOP_RESOLVED,
    Outcome.NO_LONGER_ELIGIBLE: Resolution.NOOP_RESOLVED,
    Outcome.SKIPPED_OBJECT_LOCK: Resolution.NOOP_RESOLVED,
    Outcome.SKIPPED_RESERVED: Resolution.NOOP_RESOLVED,
    Outcome.TRANSPORT_ERROR: Resolution.RETRY_LATER,
    Outcome.FATAL_EVENT_ERROR: Resolution.BLOCKED,
}


def resolution_of(outcome: Outcome) -> Resolution:
    """The seed's table, one row each."""
    return _RESOLUTIONS[outcome]
