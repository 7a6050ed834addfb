"""Whether one action of one rule applies to one entry: pure, and the only place that decides eligibility.

Every question is per (rule, kind): sibling actions of a rule are scheduled, gated and evaluated apart. A rule's
status does not matter here; compiling leaves disabled rules out.
"""

from __future__ import annotations

from lakebed.core.errors import Invalid
from lakebed.lifecycle.model import ActionKind, Calendar, ObjectEntry, Rule, Verb


def action_kinds(rule: Rule) -> tuple[ActionKind, ...]:
    """The actions a rule declares, in a fixed order.

    Days and count in one NoncurrentVersionExpiration are one action, as on AWS: both must hold.
    """
    kinds: list[ActionKind] = []
    if rule.expiration_days is not None:
        kinds.append(ActionKind.EXPIRATION_DAYS)
    if rule.expiration_date_ns is not None:
        kinds.append(ActionKind.EXPIRATION_DATE)
    if rule.noncurrent_days is not None:
        kinds.append(ActionKind.NONCURRENT_DAYS)
    elif rule.newer_noncurrent is not None:
        kinds.append(ActionKind.NEWER_NONCURRENT)
    if rule.abort_days is not None:
        kinds.append(ActionKind.ABORT_MPU)
    if rule.expired_delete_marker:
        kinds.append(ActionKind.EXPIRED_DELETE_MARKER)
    return tuple(kinds)


def evaluate(rule: Rule, kind: ActionKind, entry: ObjectEntry, now_ns: int, calendar: Calendar) -> Verb:
    """What is to be done now: NONE when the rule does not apply to the entry, or is not due yet."""
    due = due_at(rule, kind, entry, calendar)
    return verb_of(kind, entry) if due is not None and due <= now_ns else Verb.NONE


def due_at(rule: Rule, kind: ActionKind, entry: ObjectEntry, calendar: Calendar) -> int | None:
    """The earliest instant at which the action is due for the entry as it is now; None when it does not apply."""
    if not applies_to_shape(kind, entry) or not matches(rule, entry):
        return None
    if kind is ActionKind.EXPIRATION_DAYS:
        return calendar.due(entry.mtime_ns, calendar.days(rule.expiration_days or 0))
    if kind is ActionKind.EXPIRATION_DATE:
        return rule.expiration_date_ns
    if kind is ActionKind.ABORT_MPU:
        return calendar.due(entry.mtime_ns, calendar.days(rule.abort_days or 0))
    if kind is ActionKind.EXPIRED_DELETE_MARKER:
        return entry.mtime_ns
    since_ns = entry.noncurrent_since_ns
    if since_ns is None or entry.newer_noncurrent < (rule.newer_noncurrent or 0):
        return None
    if kind is ActionKind.NONCURRENT_DAYS:
        return calendar.due(since_ns, calendar.days(rule.noncurrent_days or 0))
    return since_ns


def origin_ns(kind: ActionKind, entry: ObjectEntry) -> int:
    """The instant from which the action counts its days: that of the event that brings the entry."""
    noncurrent = kind in (ActionKind.NONCURRENT_DAYS, ActionKind.NEWER_NONCURRENT)
    return entry.noncurrent_since_ns or entry.mtime_ns if noncurrent else entry.mtime_ns


def verb_of(kind: ActionKind, entry: ObjectEntry) -> Verb:
    if kind is ActionKind.ABORT_MPU:
        return Verb.ABORT_MPU
    if entry.marker and entry.latest:
        return Verb.DELETE_MARKER
    return Verb.CURRENT if entry.latest else Verb.VERSION


def applies_to_shape(kind: ActionKind, entry: ObjectEntry) -> bool:
    """Whether this kind of action can apply to this kind of entry.

    Expiration takes the current version; of a delete marker only the last thing left of its key, as on AWS.
    """
    if kind is ActionKind.ABORT_MPU:
        return bool(entry.upload_id)
    if entry.upload_id:
        return False
    if kind in (ActionKind.EXPIRATION_DAYS, ActionKind.EXPIRATION_DATE):
        return entry.latest and (entry.alone if entry.marker else True)
    if kind is ActionKind.EXPIRED_DELETE_MARKER:
        return entry.latest and entry.marker and entry.alone
    return not entry.latest and entry.noncurrent_since_ns is not None


def matches(rule: Rule, entry: ObjectEntry) -> bool:
    """The rule's filter. A delete marker has neither tags nor size: a filter on them never takes it."""
    if not entry.key.startswith(rule.prefix):
        return False
    if entry.marker or entry.upload_id:
        return not predicate_sensitive(rule)
    if rule.size_greater_than is not None and entry.size <= rule.size_greater_than:
        return False
    if rule.size_less_than is not None and entry.size >= rule.size_less_than:
        return False
    return not rule.tags or set(rule.tags) <= set(entry.tags)


def predicate_sensitive(rule: Rule) -> bool:
    """Whether a change of tags or metadata alone can make the rule apply."""
    return bool(rule.tags) or rule.size_greater_than is not None or rule.size_less_than is not None


def min_trigger_age(rule: Rule, kind: ActionKind, calendar: Calendar) -> int | None:
    """How old an event is when it first makes the action due; None for a date, which no event triggers."""
    if kind is ActionKind.EXPIRATION_DAYS:
        return calendar.days(rule.expiration_days or 0)
    if kind is ActionKind.NONCURRENT_DAYS:
        return calendar.days(rule.noncurrent_days or 0)
    if kind is ActionKind.ABORT_MPU:
        return calendar.days(rule.abort_days or 0)
    if kind is ActionKind.EXPIRATION_DATE:
        return None
    return calendar.small_delay_ns


def delays(rule: Rule, kind: ActionKind, calendar: Calendar) -> tuple[int, ...]:
    """The delay groups whose sweeps must reach the action.

    A version kept by days and by count can become due the moment a newer one arrives, so it is also swept at once.
    """
    age = min_trigger_age(rule, kind, calendar)
    if age is None:
        return ()
    if kind is ActionKind.NONCURRENT_DAYS and rule.newer_noncurrent is not None:
        return (age, calendar.small_delay_ns)
    return (age,)


def event_log_horizon(rule: Rule, kind: ActionKind, calendar: Calendar) -> int:
    """How far back the event log must reach for this action: its days, and the day that rounding can add to them.

    A date is not driven by events: asking is a mistake.
    """
    age = min_trigger_age(rule, kind, calendar)
    if age is None:
        raise Invalid(f"{kind.value} is not driven by events: it has no horizon")
    return age + calendar.rounding_ns
