"""What rules will do, and how: when a key is due (`x-amz-expiration`), and which actions run by scans only.

Pure. The same `due_at` decides here and in every delete, so a forecast and a deletion cannot disagree about an entry;
a later change of the object, its tags or the policy changes both.
"""

from __future__ import annotations

from collections.abc import Iterable
from email.utils import formatdate

import msgspec

from lakebed.lifecycle.eligibility import action_kinds, due_at, event_log_horizon, verb_of
from lakebed.lifecycle.model import ActionKind, Calendar, Mode, Rule, Verb, rule_hash
from lakebed.lifecycle.modes import decide_mode
from lakebed.lifecycle.seams import Family

EXPIRATIONS = (ActionKind.EXPIRATION_DAYS, ActionKind.EXPIRATION_DATE)


class DueAction(msgspec.Struct, frozen=True):
    """What a rule does to one entry of a key (its object, a version, a marker, an upload), and when."""

    key: str
    rule: str
    kind: ActionKind
    verb: Verb
    due_at_ns: int
    due: bool  # by now
    version_id: str = ""
    upload_id: str = ""
    latest: bool = True
    locked: bool = False  # object lock keeps it until the lock ends


def due_actions(family: Family, rules: Iterable[Rule], now_ns: int, calendar: Calendar) -> list[DueAction]:
    """Every action that will apply to what there is of the key, the earliest first; of one entry the first one wins."""
    found = [
        DueAction(
            key=entry.key,
            rule=rule.rule_id or rule_hash(rule),
            kind=kind,
            verb=verb_of(kind, entry),
            due_at_ns=due_ns,
            due=due_ns <= now_ns,
            version_id=entry.version_id,
            upload_id=entry.upload_id,
            latest=entry.latest,
            locked=entry.locked,
        )
        for entry in family.entries
        for rule in rules
        if rule.enabled
        for kind in action_kinds(rule)
        if (due_ns := due_at(rule, kind, entry, calendar)) is not None
    ]
    return sorted(found, key=lambda one: (one.due_at_ns, one.version_id, one.upload_id, one.kind.value))


def expiration_header(actions: Iterable[DueAction]) -> str:
    """The value of AWS's `x-amz-expiration`: when the current version expires, by which rule. Empty when it does not.

    A delete marker has none, as on AWS.
    """
    first = next((one for one in actions if one.kind in EXPIRATIONS and one.verb is Verb.CURRENT), None)
    if first is None:
        return ""
    rule = first.rule.replace("\\", "\\\\").replace('"', '\\"')
    return f'expiry-date="{formatdate(first.due_at_ns // 1_000_000_000, usegmt=True)}", rule-id="{rule}"'


def scan_only_warnings(
    rules: Iterable[Rule], calendar: Calendar, *, retention_ns: int | None, lookback_ns: int
) -> list[str]:
    """One sentence for each action that no event can drive, because the event log is shorter than the rule."""
    warnings: list[str] = []
    for rule in rules:
        for kind in action_kinds(rule) if rule.enabled else ():
            mode, why = decide_mode(rule, kind, calendar, retention_ns=retention_ns, lookback_ns=lookback_ns)
            if mode is not Mode.SCAN_ONLY:
                continue
            needs = (event_log_horizon(rule, kind, calendar) + lookback_ns) / calendar.day_ns
            held = (retention_ns or 0) / calendar.day_ns
            warnings.append(
                f"rule {rule.rule_id or rule_hash(rule)}: {kind.value} runs as scan only ({why.value}): it needs the "
                f"events of {needs:.1f} days, and the event log has {held:.1f}"
            )
    return warnings
