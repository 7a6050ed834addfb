"""Why an action waits for a scan: it missed events since its last one, or may have."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lakebed.lifecycle.compiler import reconciled
from lakebed.lifecycle.engine import action_keys
from lakebed.lifecycle.model import Mode
from lakebed.lifecycle.settings import LifecycleSettings
from lakebed.lifecycle.state import STATE_VERSION, ActionState, BucketLifecycle, Degraded
from support.lifecycle_makers import rule

SETTINGS = LifecycleSettings()
DAY_NS = SETTINGS.calendar.day_ns
NOW_NS = 1000 * DAY_NS
RULE = rule(rule_id="r", expiration_days=3)
(KEY,) = action_keys((RULE,))
SERVED = ActionState(
    rule_id="r", bootstrap_complete=True, bootstrap_started_at_ns=NOW_NS - DAY_NS, delays_ns=(3 * DAY_NS,), joined=7
)


def compiled(known: ActionState, *, version: int = STATE_VERSION, **changed: Any) -> tuple[ActionState, ActionState]:
    """The action before and after its bucket was compiled."""
    state = BucketLifecycle(version=version, incarnation="one", actions={str(KEY): known})
    after = reconciled(state, {KEY: RULE}, SETTINGS, NOW_NS, **{"incarnation": "one", **changed})
    return known, after.actions[str(KEY)]


@pytest.mark.parametrize(
    ("known", "changed"),
    [
        ({}, {}),
        ({"predicate": True}, {"versioned": True}),
        ({"log_generation": 2}, {"log_generation": 2}),
        ({"delays_ns": (DAY_NS, 3 * DAY_NS)}, {}),
        ({}, {"away_ns": NOW_NS - DAY_NS}),
        ({"bootstrap_complete": False}, {"versioned": True, "log_generation": 1, "version": 1}),
        ({"mode": Mode.SCAN_ONLY, "delays_ns": ()}, {"versioned": True, "log_generation": 1}),
    ],
)
def test_an_action_that_missed_nothing_goes_on(known: dict[str, Any], changed: dict[str, Any]) -> None:
    """Also one that waits for a scan anyway, and one that only scans serve."""
    before, after = compiled(msgspec.structs.replace(SERVED, **known), **changed)

    assert before == after


@pytest.mark.parametrize(
    ("known", "changed", "why"),
    [
        ({"gone_since_ns": NOW_NS - 1}, {}, "its rule was away"),
        ({}, {"away_ns": NOW_NS - DAY_NS + 1}, "its rule was away"),
        ({"delays_ns": (2 * DAY_NS,)}, {}, "its delay is another one now"),
        ({}, {"versioned": True}, "it depends on predicates now"),
        ({"log_generation": 1}, {"log_generation": 2}, "the event log lost events"),
        ({}, {"version": STATE_VERSION - 1}, "its state is of an older version"),
        ({}, {"incarnation": "two"}, "the bucket was made again"),
        ({"mode": Mode.SCAN_ONLY, "bootstrap_complete": False}, {"incarnation": "two"}, "the bucket was made again"),
    ],
)
def test_an_action_that_may_have_missed_events_waits_for_a_scan_and_says_why(
    known: dict[str, Any], changed: dict[str, Any], why: str
) -> None:
    """No sweep serves it until then; an event log that lost events is shown as such."""
    before, after = compiled(msgspec.structs.replace(SERVED, **known), **changed)

    assert (why, False, 0, 0) == (after.why_scan, after.bootstrap_complete, after.joined, after.gone_since_ns)
    lost = (Degraded.LOST_LOG, NOW_NS) if why == "the event log lost events" else (Degraded.NONE, 0)
    assert (before.mode, *lost) == (after.mode, after.degraded, after.degraded_since_ns)


def test_a_rule_that_left_is_remembered_for_the_grace() -> None:
    """Then it is forgotten; what is known of its scan does not count any more."""
    state = BucketLifecycle(version=STATE_VERSION, actions={str(KEY): SERVED})
    grace_ns = round(SETTINGS.grace_s * 1e9)
    left = reconciled(state, {}, SETTINGS, NOW_NS)
    still = reconciled(left, {}, SETTINGS, NOW_NS + grace_ns - 1)
    gone = reconciled(left, {}, SETTINGS, NOW_NS + grace_ns)

    away = msgspec.structs.replace(SERVED, gone_since_ns=NOW_NS, bootstrap_complete=False)
    assert ({str(KEY): away}, left.actions, {}) == (left.actions, still.actions, gone.actions)
