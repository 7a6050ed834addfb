"""What one action says about one entry: every kind, eligible and not, under every filter."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakebed.core.errors import Invalid
from lakebed.lifecycle.eligibility import (
    action_kinds,
    delays,
    due_at,
    evaluate,
    event_log_horizon,
    min_trigger_age,
)
from lakebed.lifecycle.model import ActionKind, Calendar, ObjectEntry, Rule, Verb
from support.lifecycle_makers import DAY, EXACT, MIDNIGHT, T0, entry, marker, noncurrent, rule

DAYS, DATE = ActionKind.EXPIRATION_DAYS, ActionKind.EXPIRATION_DATE
NONCURRENT, NEWER = ActionKind.NONCURRENT_DAYS, ActionKind.NEWER_NONCURRENT
ABORT, MARKER = ActionKind.ABORT_MPU, ActionKind.EXPIRED_DELETE_MARKER
UPLOAD = entry(upload_id="u1")

WORKED = [
    (rule(expiration_days=3), DAYS, entry(), T0 + 3 * DAY, Verb.CURRENT),
    (rule(expiration_days=3), DAYS, marker(), T0 + 3 * DAY, Verb.DELETE_MARKER),
    (rule(expiration_date_ns=T0 + DAY), DATE, entry(), T0 + DAY, Verb.CURRENT),
    (rule(expiration_date_ns=T0 - DAY), DATE, entry(), T0 - DAY, Verb.CURRENT),
    (rule(noncurrent_days=2), NONCURRENT, noncurrent(T0 + DAY), T0 + 3 * DAY, Verb.VERSION),
    (rule(noncurrent_days=2, newer_noncurrent=1), NONCURRENT, noncurrent(T0, 1), T0 + 2 * DAY, Verb.VERSION),
    (rule(newer_noncurrent=2), NEWER, noncurrent(T0 + DAY, 2), T0 + DAY, Verb.VERSION),
    (rule(abort_days=7), ABORT, UPLOAD, T0 + 7 * DAY, Verb.ABORT_MPU),
    (rule(expired_delete_marker=True), MARKER, marker(), T0, Verb.DELETE_MARKER),
]


@pytest.mark.parametrize(("rule", "kind", "entry", "due", "verb"), WORKED)
def test_an_action_is_due_at_its_instant_and_not_a_nanosecond_before(
    rule: Rule, kind: ActionKind, entry: ObjectEntry, due: int, verb: Verb
) -> None:
    """Each kind names its due instant exactly, and acts from then on."""
    assert due == due_at(rule, kind, entry, EXACT)
    assert Verb.NONE is evaluate(rule, kind, entry, due - 1, EXACT)
    assert verb is evaluate(rule, kind, entry, due, EXACT)


@pytest.mark.parametrize(
    ("rule", "kind", "entry"),
    [
        (rule(expiration_days=1), DAYS, noncurrent(T0)),
        (rule(expiration_days=1), DAYS, marker(alone=False)),
        (rule(expiration_days=1), DAYS, UPLOAD),
        (rule(expiration_date_ns=T0), DATE, noncurrent(T0)),
        (rule(noncurrent_days=1), NONCURRENT, entry()),
        (rule(noncurrent_days=1), NONCURRENT, UPLOAD),
        (rule(noncurrent_days=1, newer_noncurrent=2), NONCURRENT, noncurrent(T0, 1)),
        (rule(newer_noncurrent=2), NEWER, noncurrent(T0, 1)),
        (rule(newer_noncurrent=2), NEWER, entry()),
        (rule(abort_days=1), ABORT, entry()),
        (rule(expired_delete_marker=True), MARKER, marker(alone=False)),
        (rule(expired_delete_marker=True), MARKER, entry()),
        (rule(expired_delete_marker=True), MARKER, noncurrent(T0)),
    ],
)
def test_an_action_leaves_entries_of_another_shape_alone(rule: Rule, kind: ActionKind, entry: ObjectEntry) -> None:
    """However old, what an action does not speak about is never due."""
    assert due_at(rule, kind, entry, EXACT) is None
    assert Verb.NONE is evaluate(rule, kind, entry, T0 + 10_000 * DAY, EXACT)


FILTERS: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({}, {}, True),
    ({"prefix": ""}, {"key": "anything"}, True),
    ({"prefix": "logs/"}, {"key": "logs/a"}, True),
    ({"prefix": "logs/"}, {"key": "logs"}, False),
    ({"prefix": "logs"}, {"key": "logs-old/a"}, True),
    ({"prefix": "logs/"}, {"key": "Logs/a"}, False),
    ({"tags": (("env", "dev"),)}, {"tags": (("env", "dev"), ("team", "x"))}, True),
    ({"tags": (("env", "dev"),)}, {"tags": (("env", "prod"),)}, False),
    ({"tags": (("env", "dev"),)}, {}, False),
    ({"tags": (("a", "1"), ("b", "2"))}, {"tags": (("a", "1"),)}, False),
    ({"size_greater_than": 100}, {"size": 100}, False),
    ({"size_greater_than": 100}, {"size": 101}, True),
    ({"size_less_than": 100}, {"size": 100}, False),
    ({"size_less_than": 100}, {"size": 99}, True),
    ({"size_greater_than": 0}, {"size": 0}, False),
    ({"size_greater_than": 10, "size_less_than": 12, "prefix": "a"}, {"size": 11, "key": "a"}, True),
    ({"prefix": "a", "tags": (("k", "v"),), "size_less_than": 5}, {"key": "a", "tags": (("k", "v"),), "size": 4}, True),
    (
        {"prefix": "a", "tags": (("k", "v"),), "size_less_than": 5},
        {"key": "a", "tags": (("k", "v"),), "size": 5},
        False,
    ),
]


@pytest.mark.parametrize(("narrowed", "made", "applies"), FILTERS)
def test_a_filter_takes_what_it_says_and_nothing_else(
    narrowed: dict[str, Any], made: dict[str, Any], applies: bool
) -> None:
    """Prefixes are literal, sizes are strict, tags are all needed, and And means and."""
    found = evaluate(rule(expiration_days=1, **narrowed), DAYS, entry(**made), T0 + DAY, EXACT)

    assert (Verb.CURRENT if applies else Verb.NONE) is found


def test_a_delete_marker_is_never_taken_by_tags_or_size() -> None:
    """A marker has neither, so a rule that asks for them does not speak about it."""
    assert due_at(rule(expiration_days=1, tags=(("a", "b"),)), DAYS, marker(), EXACT) is None
    assert due_at(rule(expiration_days=1, size_less_than=5), DAYS, marker(), EXACT) is None


def test_sibling_actions_of_one_rule_are_evaluated_apart() -> None:
    """A rule with three actions expires each thing by its own clock."""
    many = rule(expiration_days=90, noncurrent_days=30, abort_days=7)

    assert (DAYS, NONCURRENT, ABORT) == action_kinds(many)
    at = T0 + 30 * DAY
    assert Verb.NONE is evaluate(many, DAYS, entry(), at, EXACT)
    assert Verb.VERSION is evaluate(many, NONCURRENT, noncurrent(T0), at, EXACT)
    assert Verb.ABORT_MPU is evaluate(many, ABORT, UPLOAD, at, EXACT)


def test_days_and_count_of_noncurrent_versions_are_one_action() -> None:
    """As on AWS a version must be old enough and beyond the count; a count alone is its own kind."""
    assert (NONCURRENT,) == action_kinds(rule(noncurrent_days=1, newer_noncurrent=3))
    assert (NEWER,) == action_kinds(rule(newer_noncurrent=3))
    assert (DAY, EXACT.small_delay_ns) == delays(rule(noncurrent_days=1, newer_noncurrent=3), NONCURRENT, EXACT)


def test_days_are_rounded_up_to_midnight_when_asked() -> None:
    """An object of ten in the morning with three days goes at the fourth midnight, as AWS documents."""
    midnight = T0 // DAY * DAY

    assert midnight + 4 * DAY == due_at(rule(expiration_days=3), DAYS, entry(), MIDNIGHT)
    assert midnight + 3 * DAY == due_at(rule(expiration_days=3), DAYS, entry(mtime_ns=midnight), MIDNIGHT)
    assert T0 + 3 * DAY == due_at(rule(expiration_days=3), DAYS, entry(), EXACT)


@given(
    origin=st.integers(0, 4 * DAY),
    days=st.integers(1, 3),
    now=st.integers(0, 12 * DAY),
    rounding=st.sampled_from(["exact", "midnight"]),
    day=st.sampled_from([7, DAY]),
)
def test_the_cutoff_of_a_sweep_is_exactly_the_events_that_are_due(
    origin: int, days: int, now: int, rounding: str, day: int
) -> None:
    """An event is behind the cutoff if and only if what it made is due: none is swept too early, none too late."""
    calendar = Calendar(day_ns=day, rounding=rounding)  # type: ignore[arg-type]
    delay = calendar.days(days)

    assert (calendar.due(origin, delay) <= now) == (origin <= calendar.cutoff(now, delay))


def test_the_length_of_a_day_is_a_setting() -> None:
    """With a day of three seconds, two days are six seconds."""
    quick = Calendar(day_ns=3, rounding="exact")

    assert T0 + 6 == due_at(rule(expiration_days=2), DAYS, entry(), quick)
    assert 6 == min_trigger_age(rule(expiration_days=2), DAYS, quick)


@pytest.mark.parametrize(
    ("rule", "kind", "age"),
    [
        (rule(expiration_days=3), DAYS, 3 * DAY),
        (rule(noncurrent_days=4), NONCURRENT, 4 * DAY),
        (rule(abort_days=5), ABORT, 5 * DAY),
        (rule(newer_noncurrent=6), NEWER, EXACT.small_delay_ns),
        (rule(expired_delete_marker=True), MARKER, EXACT.small_delay_ns),
    ],
)
def test_trigger_age_and_horizon_are_the_rules_days_or_the_small_delay(rule: Rule, kind: ActionKind, age: int) -> None:
    """What the reader must be able to look back, per kind."""
    assert age == min_trigger_age(rule, kind, EXACT)
    assert age == event_log_horizon(rule, kind, EXACT)
    assert (age,) == delays(rule, kind, EXACT)


def test_a_date_has_no_trigger_age_and_asking_for_its_horizon_is_a_mistake() -> None:
    """No event makes a date come."""
    dated = rule(expiration_date_ns=T0)

    assert min_trigger_age(dated, DATE, EXACT) is None
    assert () == delays(dated, DATE, EXACT)
    with pytest.raises(Invalid):
        event_log_horizon(dated, DATE, EXACT)
