"""When a key is due, AWS's header for it, and the warning about rules that the event log is too short for."""

from __future__ import annotations

import pytest

from lakebed.lifecycle.forecast import due_actions, expiration_header, scan_only_warnings
from lakebed.lifecycle.model import ActionKind, Calendar, ObjectEntry, ObjectIdentity, Rule, Verb
from lakebed.lifecycle.seams import Family

DAY_NS = 86_400 * 1_000_000_000
MADE_NS = 1_355_270_400 * 1_000_000_000  # 2012-12-12T00:00:00Z
CALENDAR = Calendar()


def entry(**changes: object) -> ObjectEntry:
    known = {"bucket": "b", "key": "logs/a", "identity": ObjectIdentity(MADE_NS + 1, 10)}
    return ObjectEntry(**(known | changes))  # type: ignore[arg-type]


def family(*entries: ObjectEntry) -> Family:
    return Family("b", "logs/a", entries)


def test_the_header_is_that_of_aws() -> None:
    """The date is the midnight at which the object goes; the rule is the one that takes it first."""
    rules = (Rule("slow", expiration_days=30), Rule("fast", prefix="logs/", expiration_days=10), Rule("x", prefix="y"))

    found = due_actions(family(entry()), rules, MADE_NS, CALENDAR)

    assert [("fast", False), ("slow", False)] == [(one.rule, one.due) for one in found]
    assert 'expiry-date="Sun, 23 Dec 2012 00:00:00 GMT", rule-id="fast"' == expiration_header(found)


def test_a_quote_in_a_rule_id_does_not_end_it() -> None:
    """A header is parsed by others."""
    found = due_actions(family(entry()), (Rule('a"b', expiration_days=1),), MADE_NS, CALENDAR)

    assert expiration_header(found).endswith('rule-id="a\\"b"')


@pytest.mark.parametrize(
    "rule",
    [
        Rule("off", enabled=False, expiration_days=1),
        Rule("tags", tags=(("k", "v"),), expiration_days=1),
        Rule("uploads", abort_days=1),
        Rule("old", noncurrent_days=1),
    ],
)
def test_what_no_rule_takes_has_no_header(rule: Rule) -> None:
    """Disabled, another tag, uploads only, noncurrent versions only."""
    assert "" == expiration_header(due_actions(family(entry()), (rule,), MADE_NS, CALENDAR))


def test_versions_markers_and_uploads_have_their_own_lines() -> None:
    """A noncurrent version goes by its own action and has no header; a marker that is not alone stays."""
    marker = entry(marker=True, version_id="m", alone=False)
    older = entry(version_id="v", latest=False, noncurrent_since_ns=MADE_NS, alone=False, locked=True)
    rules = (Rule("all", expiration_days=1, noncurrent_days=2),)

    found = due_actions(family(marker, older), rules, MADE_NS + 3 * DAY_NS, CALENDAR)

    assert [("v", ActionKind.NONCURRENT_DAYS, Verb.VERSION, True, True)] == [
        (one.version_id, one.kind, one.verb, one.due, one.locked) for one in found
    ]
    assert "" == expiration_header(found)
    upload = entry(upload_id="u")
    (aborted,) = due_actions(family(upload), (Rule("u", abort_days=7),), MADE_NS, CALENDAR)
    assert ("u", Verb.ABORT_MPU) == (aborted.upload_id, aborted.verb)


def test_a_rule_longer_than_the_log_is_named() -> None:
    """Only that one, and only while the log has an end."""
    rules = (Rule("short", expiration_days=1), Rule("long", expiration_days=90), Rule("off", False, expiration_days=90))

    warnings = scan_only_warnings(rules, CALENDAR, retention_ns=30 * DAY_NS, lookback_ns=DAY_NS // 24)

    assert 1 == len(warnings) and "rule long: EXPIRATION_DAYS runs as scan only" in warnings[0]
    assert "and the event log has 30.0" in warnings[0]
    assert [] == scan_only_warnings(rules, CALENDAR, retention_ns=None, lookback_ns=0)
