"""The compiled engine: routing, delay groups, modes, activation."""

from __future__ import annotations

import pytest

from lakebed.lifecycle.delete_decision import EventMeaning, guard, lock_forbids, meaning, resolution_of
from lakebed.lifecycle.engine import (
    ActionRef,
    Activation,
    PrefixTrie,
    action_keys,
    compile_policies,
    needs_predicate,
)
from lakebed.lifecycle.model import (
    ActionKey,
    ActionKind,
    Degraded,
    DeleteOutcome,
    Mode,
    Position,
    Rule,
    StreamResolution,
    Verb,
    rule_hash,
)
from lakebed.lifecycle.modes import LagLevel, decide_mode, judge_lag, safety_scan_every
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.lifecycle.seams import ChangeEvent, Facts
from support.lifecycle_makers import DAY, EXACT, T0, entry, rule

ACTIVE = Activation(Mode.EVENT_DRIVEN, True)


def test_delay_groups_are_shared_across_buckets_and_actions_are_not() -> None:
    """100 buckets × 5 rules with three distinct days: 500 actions, 3 groups, every action in its group."""
    days = (1, 1, 7, 7, 30)
    policies = {
        f"b{n}": tuple(rule(prefix=f"p{i}/", expiration_days=day) for i, day in enumerate(days)) for n in range(100)
    }

    found = compile_policies(policies, lambda _: ACTIVE, EXACT)

    assert 500 == len(found.actions)
    assert {DAY: 200, 7 * DAY: 200, 30 * DAY: 100} == {d: len(r) for d, r in found.original_delay_groups.items()}
    assert ["p2/"] == [a.rule.prefix for a in found.match_original("b7", "p2/x", 7 * DAY)]
    assert [] == found.match_original("b7", "p2/x", DAY)
    assert [] == found.match_original("nobody", "p2/x", DAY)


@pytest.mark.parametrize(
    "known",
    [
        Activation(Mode.EVENT_DRIVEN, False),
        Activation(Mode.SCAN_ONLY, True),
        Activation(Mode.SCAN_AT_DATE, True),
        Activation(Mode.DISABLED, True),
    ],
)
def test_only_a_bootstrapped_event_driven_action_is_swept(known: Activation) -> None:
    """Two-phase activation: a new, degraded or disabled action is in no sweep; scans still find the first three."""
    narrowed = rule(expiration_days=1, tags=(("a", "b"),))
    found = compile_policies({"b": (narrowed,)}, lambda _: known, EXACT)

    assert {} == found.original_delay_groups
    assert frozenset() == found.predicate_actions
    assert (known.mode is not Mode.DISABLED) == bool(found.match_path("b", "x"))


def test_siblings_are_activated_apart() -> None:
    """A rule's 7-day abort may run while its 90-day expiration still waits for its bootstrap."""
    both = rule(expiration_days=90, abort_days=7)
    ready = ActionRef("b", ActionKey(rule_hash(both), ActionKind.ABORT_MPU))

    found = compile_policies({"b": (both,)}, lambda ref: ACTIVE if ref == ready else Activation(), EXACT)

    assert {7 * DAY: frozenset({ready})} == found.original_delay_groups


def test_disabled_rules_are_not_compiled_and_not_wanted() -> None:
    """A delete cannot be justified by a disabled rule."""
    off = rule(expiration_days=1, enabled=False)

    assert {} == compile_policies({"b": (off,)}, lambda _: ACTIVE, EXACT).actions
    assert frozenset() == action_keys((off,))


def test_dates_and_predicates_have_their_own_collections() -> None:
    """A date is in no delay group; a tag rule is in the predicate sweep as well as in its group."""
    dated, tagged = rule(expiration_date_ns=T0), rule(expiration_days=2, tags=(("a", "b"),))
    found = compile_policies({"b": (dated, tagged)}, lambda _: ACTIVE, EXACT)

    assert [T0] == list(found.date_actions.values())
    assert [2 * DAY] == list(found.original_delay_groups)
    assert [tagged] == [a.rule for a in found.match_predicate("b", "any")]


def test_the_trie_gives_every_prefix_of_the_key_and_no_other() -> None:
    """Literal prefixes, the empty one included."""
    trie: PrefixTrie[str] = PrefixTrie()
    for prefix in ("", "a", "a/", "a/b", "b"):
        trie.add(prefix, prefix)

    assert ["", "a", "a/", "a/b"] == trie.match("a/bc")
    assert [""] == trie.match("c")
    assert ["", "a"] == trie.match("a")


READER_KINDS = [
    (rule(expiration_days=10), ActionKind.EXPIRATION_DAYS, 10 * DAY),
    (rule(noncurrent_days=10), ActionKind.NONCURRENT_DAYS, 10 * DAY),
    (rule(abort_days=10), ActionKind.ABORT_MPU, 10 * DAY),
    (rule(newer_noncurrent=1), ActionKind.NEWER_NONCURRENT, EXACT.small_delay_ns),
    (rule(expired_delete_marker=True), ActionKind.EXPIRED_DELETE_MARKER, EXACT.small_delay_ns),
]


@pytest.mark.parametrize(("one", "kind", "horizon"), READER_KINDS)
def test_too_short_a_log_makes_an_action_scan_only(one: Rule, kind: ActionKind, horizon: int) -> None:
    """The gate stands exactly at horizon plus lookback, per kind."""
    enough = decide_mode(one, kind, EXACT, retention_ns=horizon + DAY, lookback_ns=DAY)
    short = decide_mode(one, kind, EXACT, retention_ns=horizon + DAY - 1, lookback_ns=DAY)

    assert (Mode.EVENT_DRIVEN, Degraded.NONE) == enough
    assert (Mode.SCAN_ONLY, Degraded.RETENTION_BELOW_HORIZON) == short
    assert (Mode.EVENT_DRIVEN, Degraded.NONE) == decide_mode(one, kind, EXACT, retention_ns=None, lookback_ns=DAY)


def test_a_date_passes_the_gate_and_an_operators_pause_comes_first() -> None:
    """A date needs no log; paused and disabled actions say so."""
    dated = rule(expiration_date_ns=T0)
    date, days = ActionKind.EXPIRATION_DATE, ActionKind.EXPIRATION_DAYS

    assert (Mode.SCAN_AT_DATE, Degraded.NONE) == decide_mode(dated, date, EXACT, retention_ns=1, lookback_ns=DAY)
    assert (Mode.DISABLED, Degraded.OPERATOR_PAUSED) == decide_mode(
        dated, date, EXACT, retention_ns=None, lookback_ns=0, paused=True
    )
    off = rule(expiration_days=1, enabled=False)
    assert (Mode.DISABLED, Degraded.NONE) == decide_mode(off, days, EXACT, retention_ns=None, lookback_ns=0)


@pytest.mark.parametrize(
    ("lag", "verdict"),
    [
        (49, LagLevel.HEALTHY),
        (50, LagLevel.WARN),
        (79, LagLevel.WARN),
        (80, LagLevel.FORCE_SCAN),
        (94, LagLevel.FORCE_SCAN),
        (95, LagLevel.DEMOTE),
    ],
)
def test_lag_is_judged_by_the_logs_retention(lag: int, verdict: LagLevel) -> None:
    """Warn at half, scan at 0.8, give up on events at 0.95; an endless log never lags."""
    assert verdict is judge_lag(lag, 100)
    assert LagLevel.HEALTHY is judge_lag(lag, None)


@pytest.mark.parametrize(
    ("one", "kind", "days"),
    [
        (rule(expiration_days=1), ActionKind.EXPIRATION_DAYS, 7),
        (rule(expiration_days=20), ActionKind.EXPIRATION_DAYS, 20),
        (rule(noncurrent_days=90), ActionKind.NONCURRENT_DAYS, 30),
        (rule(abort_days=1), ActionKind.ABORT_MPU, 1),
        (rule(abort_days=3), ActionKind.ABORT_MPU, 3),
        (rule(expiration_date_ns=T0), ActionKind.EXPIRATION_DATE, 1),
        (rule(newer_noncurrent=1), ActionKind.NEWER_NONCURRENT, 7),
        (rule(expired_delete_marker=True), ActionKind.EXPIRED_DELETE_MARKER, 7),
    ],
)
def test_safety_scans_have_a_cadence_per_kind(one: Rule, kind: ActionKind, days: int) -> None:
    """As the design's table says."""
    assert days * DAY == safety_scan_every(one, kind, EXACT)


A, B = Facts(1, 10, ("f1",), "x"), Facts(2, 10, ("f1",), "x")


@pytest.mark.parametrize(
    ("old", "new", "version", "means"),
    [
        (None, A, "", EventMeaning.AGE_ORIGIN),
        (A, B, "", EventMeaning.AGE_ORIGIN),
        (A, Facts(1, 11, ("f1",), "x"), "", EventMeaning.AGE_ORIGIN),
        (A, Facts(1, 10, ("f2",), "x"), "", EventMeaning.AGE_ORIGIN),
        (A, Facts(2, 10, ("f1",), "y"), "", EventMeaning.AGE_ORIGIN),
        (A, Facts(1, 10, ("f1",), "y"), "", EventMeaning.PREDICATE_CHANGE),
        (A, A, "", EventMeaning.NOTHING),
        (A, None, "", EventMeaning.NOTHING),
        (A, None, "v1", EventMeaning.REMOVAL),
        (None, None, "", EventMeaning.NOTHING),
    ],
)
def test_a_new_age_is_told_from_a_change_of_predicates(
    old: Facts | None, new: Facts | None, version: str, means: EventMeaning
) -> None:
    """Content and time make a new age, whatever else changed; metadata alone does not."""
    assert means is meaning(ChangeEvent(Position(1, 0), "b", "k", version, old=old, new=new))


def test_the_guard_refuses_in_the_designs_order() -> None:
    """Gone, another identity, another policy, not due any more, locked: each its outcome; else go."""
    wanted = entry()
    one = rule(expiration_days=1)
    key = ActionKey(rule_hash(one), ActionKind.EXPIRATION_DAYS)

    def ask(live: object, policy: tuple[Rule, ...] = (one,), now: int = T0 + DAY) -> DeleteOutcome | None:
        found = () if live is None else (live,)
        return guard(
            wanted,
            Verb.CURRENT,
            key,
            one,
            live=found,  # type: ignore[arg-type]
            policy=policy,
            reserved=ReservedKeys("lakebed"),
            now_ns=now,
            calendar=EXACT,
        )

    assert DeleteOutcome.NOT_FOUND is ask(None)
    assert DeleteOutcome.STALE_IDENTITY is ask(entry(size=5))
    assert DeleteOutcome.STALE_POLICY is ask(entry(), policy=(rule(expiration_days=2),))
    assert DeleteOutcome.NO_LONGER_ELIGIBLE is ask(entry(), now=T0)
    assert DeleteOutcome.SKIPPED_OBJECT_LOCK is ask(entry(locked=True))
    assert ask(entry()) is None
    unrelated = rule(prefix="other/", abort_days=3)
    assert ask(entry(), policy=(unrelated, one)) is None


@pytest.mark.parametrize(
    ("verb", "version", "forbidden"),
    [
        (Verb.CURRENT, "", True),
        (Verb.CURRENT, "null", True),
        (Verb.CURRENT, "v1", False),
        (Verb.VERSION, "v1", True),
        (Verb.DELETE_MARKER, "v1", True),
    ],
)
def test_a_lock_forbids_removal_and_no_marker(verb: Verb, version: str, forbidden: bool) -> None:
    """A marker above a locked version removes nothing, so it is created, as on AWS."""
    assert forbidden is lock_forbids(entry(locked=True, version_id=version), verb)
    assert not lock_forbids(entry(version_id=version), verb)


def test_every_outcome_has_its_resolution() -> None:
    """Only transport errors and fatal ones hold a cursor."""
    held = {o: resolution_of(o) for o in DeleteOutcome if not resolution_of(o).resolved}

    assert {
        DeleteOutcome.TRANSPORT_ERROR: StreamResolution.RETRY_LATER,
        DeleteOutcome.FATAL_EVENT_ERROR: StreamResolution.BLOCKED,
    } == held


@pytest.mark.parametrize("versioned", [False, True])
def test_only_an_expiration_by_days_looks_at_removals_of_other_versions(versioned: bool) -> None:
    """It alone may meet a marker that was left alone; a rule that asks for tags or sizes always looks."""
    by_kind = {kind: needs_predicate(rule(), kind, versioned) for kind in ActionKind}

    assert {kind: versioned and kind is ActionKind.EXPIRATION_DAYS for kind in ActionKind} == by_kind
    assert all(needs_predicate(rule(tags=(("a", "b"),)), kind, versioned) for kind in ActionKind)
    assert all(needs_predicate(rule(size_less_than=5), kind, versioned) for kind in ActionKind)
