"""Bounds, orders and defaults of lifecycle: each is stated once and asserted at its edge."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from lakebed.core.errors import Invalid
from lakebed.core.settings import Contradiction
from lakebed.lifecycle.cluster import LogGap
from lakebed.lifecycle.delete_decision import EventMeaning, decide, meaning
from lakebed.lifecycle.dry_run import CANDIDATES, SCHEMA, ListedObject, _chunks, dry_run, judge, judging, ready
from lakebed.lifecycle.engine import Activation, compile_policies
from lakebed.lifecycle.model import (
    ActionKind,
    Mode,
    ObjectEntry,
    Position,
    Verb,
)
from lakebed.lifecycle.policy import as_xml, rules_of
from lakebed.lifecycle.reserved import ReservedKeys
from lakebed.lifecycle.seams import ChangeEvent, Facts, Family
from lakebed.lifecycle.settings import LifecycleSettings, ns
from lakebed.lifecycle.state import PendingItem
from support.lifecycle_harness import DAY_S, QUICK, RESERVED, Harness
from support.lifecycle_makers import EXACT, T0, entry, noncurrent, rule

SECOND_NS = 10**9
DAY_NS = round(DAY_S * SECOND_NS)
LONG_NS = 86_400 * SECOND_NS


# Settings.


@pytest.mark.parametrize("name", ["day_s", "poll_s", "lease_s", "concurrency", "batch", "pending_max", "retries_max"])
def test_a_setting_that_must_be_positive_is_refused_at_zero(name: str) -> None:
    """The refusal names it; the smallest value that works is taken."""
    with pytest.raises(Contradiction, match=f"lifecycle.{name}"):
        msgspec.structs.replace(LifecycleSettings(), **{name: 0}).check()
    msgspec.structs.replace(LifecycleSettings(), **{name: 1}).check()


def test_the_settings_become_a_calendar_and_a_retention() -> None:
    """Seconds become nanoseconds; a retention of 0 is for ever."""
    settings = LifecycleSettings(day_s=2.5, rounding="exact", small_delay_s=0.5, retention_s=1.5)
    calendar = settings.calendar

    assert (2_500_000_000, "exact", 500_000_000) == (calendar.day_ns, calendar.rounding, calendar.small_delay_ns)
    assert (1_500_000_000, None) == (settings.retention_ns, LifecycleSettings().retention_ns)
    assert ("midnight", LONG_NS) == (LifecycleSettings().calendar.rounding, LifecycleSettings().calendar.day_ns)
    assert 1_234_567_891 == ns(1.2345678912)


# Deciding.


def family(*entries: ObjectEntry) -> Family:
    return Family("b", "logs/a", entries)


def compiled(*rules: Any) -> Sequence[Any]:
    snapshot = compile_policies({"b": rules}, lambda _: Activation(Mode.EVENT_DRIVEN, True), EXACT)
    return list(snapshot.actions.values())


def test_noncurrent_versions_are_decided_before_the_current_one() -> None:
    """So that a marker is not put over a version that goes in the same round; one verb per entry."""
    old = noncurrent(T0 - 9 * LONG_NS)
    current = entry(version_id="v2", mtime_ns=T0 - 9 * LONG_NS, alone=False)
    found = decide(
        compiled(rule(expiration_days=1, noncurrent_days=1), rule(prefix="logs/", expiration_days=2)),
        family(current, old),
        T0,
        EXACT,
    )

    assert [("v1", Verb.VERSION), ("v2", Verb.CURRENT)] == [(one.entry.version_id, one.verb) for one in found.deletions]
    assert () == found.waits


def test_an_entry_that_is_not_due_waits_only_where_no_event_is_to_come() -> None:
    """Where its time lies after its event, or in a gap of the log; after a late tag the object's own event comes."""
    young = entry(mtime_ns=T0)
    actions = compiled(rule(expiration_days=1))
    facts = Facts(T0, 100)

    def waits(event: ChangeEvent | None, *gaps: LogGap) -> list[int]:
        return [item.due_at_ns for _, item in decide(actions, family(young), T0, EXACT, event, gaps).waits]

    due_ns = T0 + LONG_NS
    assert [] == waits(None)
    assert [due_ns] == waits(None, LogGap(T0 - 9, T0 - 1), LogGap(T0, T0))
    assert [] == waits(None, LogGap(T0 - 9, T0 - 1))
    assert [] == waits(ChangeEvent(Position(T0), "b", "logs/a", new=facts))
    assert [due_ns] == waits(ChangeEvent(Position(T0 - 1), "b", "logs/a", new=facts))
    assert [] == waits(ChangeEvent(Position(T0 - 1), "b", "logs/a", new=Facts(T0, 99)))
    assert [] == waits(ChangeEvent(Position(T0 - 1), "b", "logs/a", old=facts))
    tagged = Facts(T0, 100, extended_hash="later")
    assert [] == waits(ChangeEvent(Position(T0 + 1), "b", "logs/a", old=facts, new=tagged))


def test_an_entry_that_goes_does_not_wait_for_another_action_too() -> None:
    """What one rule deletes now, another's later instant does not remember."""
    old = entry(mtime_ns=T0 - 2 * LONG_NS)
    found = decide(
        compiled(rule(expiration_days=1), rule(prefix="logs/", expiration_days=9)),
        family(old),
        T0,
        EXACT,
    )
    assert (1, ()) == (len(found.deletions), found.waits)


def test_a_wait_names_the_version_the_upload_and_the_identity() -> None:
    """The drain finds the same thing again."""
    upload = entry(upload_id="u", mtime_ns=T0)
    gaps = (LogGap(T0, T0),)
    ((ref, item),) = decide(compiled(rule(abort_days=3)), family(upload), T0, EXACT, None, gaps).waits

    assert PendingItem("logs/a", "", T0 + 3 * LONG_NS, upload.identity, "u") == item
    assert (ActionKind.ABORT_MPU, "u\x00\x00logs/a") == (ref.key.kind, item.id)


REMOVALS = [
    (ChangeEvent(Position(), "b", "k", old=Facts(1, 1)), False, EventMeaning.NOTHING),
    (ChangeEvent(Position(), "b", "k", old=Facts(1, 1)), True, EventMeaning.REMOVAL),
    (ChangeEvent(Position(), "b", "k", "v1", old=Facts(1, 1)), False, EventMeaning.REMOVAL),
    (ChangeEvent(Position(), "b", "k", upload_id="u", old=Facts(1, 1)), True, EventMeaning.NOTHING),
    (ChangeEvent(Position(), "b", "k", "v1"), True, EventMeaning.NOTHING),
]


@pytest.mark.parametrize(("event", "versioned", "expected"), REMOVALS, ids=range(len(REMOVALS)))
def test_a_removal_means_something_where_a_marker_may_be_left(
    event: ChangeEvent, versioned: bool, expected: EventMeaning
) -> None:
    """The end of an upload, or of an object without versions, is the end of its key."""
    assert expected is meaning(event, versioned=versioned)


# Dry runs and candidates.


async def test_a_dry_run_counts_what_goes_what_is_locked_and_what_is_reserved() -> None:
    """Bytes of what would go alone; the sample is bounded; names fall back to the rule's hash."""
    world = Harness()
    for key, size in (("a", 1), ("b", 10), ("c", 100), ("locked", 1000)):
        world.lake.write("lakebed", key, size=size)
    world.lake.write("lakebed", "own/x", size=7)
    upload = world.lake.begin_upload("lakebed", "up")
    world.lake.hold("lakebed", "locked")
    await world.clock.advance(2 * DAY_S)
    rules = (rule(rule_id="r", prefix="a", expiration_days=1), rule(expiration_days=2, abort_days=1))
    found = await dry_run(
        world.lake, "lakebed", rules, world.clock.now_ns(), QUICK.calendar, sample=2, reserved=RESERVED, keys_max=6
    )

    digest = next(one for one in found.by_action if not one.startswith("r/")).split("/")[0]
    assert (6, 4, 111, 1, 1, True) == (
        found.scanned,
        found.count,
        found.bytes,
        found.locked,
        found.reserved,
        found.complete,
    )
    assert {"r/EXPIRATION_DAYS": 1, f"{digest}/EXPIRATION_DAYS": 2, f"{digest}/ABORT_MPU": 1} == found.by_action
    assert ["a", "b"] == [one.key for one in found.sample]
    every = await dry_run(world.lake, "lakebed", rules, world.clock.now_ns(), QUICK.calendar)
    assert (5 + 1, 0, 20) == (every.count + every.locked, every.reserved, 20)
    last = every.sample[-1]
    assert ("up", "ABORT_MPU", upload, "") == (last.key, last.verb, last.upload_id, last.version_id)
    cut = await dry_run(world.lake, "lakebed", rules, world.clock.now_ns(), QUICK.calendar, keys_max=5)
    assert (5, False) == (cut.scanned, cut.complete)
    assert ("walk", 0, 0, "lakebed") == (cut.source, cut.undecided, cut.undecided_bytes, cut.bucket)


def listed(key: str, days: float = 5.0, **said: Any) -> ListedObject:
    return ListedObject(key, 10, 100 * DAY_NS - round(days * DAY_NS), **said)


def test_a_candidate_says_everything_about_its_row() -> None:
    """Every column of the table of candidates, with the names that the schema states."""
    snapshot = ready("b", (rule(rule_id="r", noncurrent_days=1),), QUICK.calendar)
    rows = [listed("k", 3.0, version_id="v2"), listed("k", 8.0, version_id="v1", is_latest=False)]
    (found,) = judge(rows, snapshot, "b", 100 * DAY_NS, RESERVED)
    (ref,) = snapshot.actions

    expected = ("k", "v1", "VERSION", "NONCURRENT_DAYS", "r", ref.key.rule_hash, 10, 92 * DAY_NS, 98 * DAY_NS, True)
    assert expected == msgspec.structs.astuple(found)
    assert [name for name, _ in CANDIDATES] == list(msgspec.structs.asdict(found))
    assert "size bigint" in SCHEMA and "certain boolean" in SCHEMA and "key string" in SCHEMA


def test_without_a_word_on_which_is_current_the_first_row_of_a_key_is() -> None:
    """A report may leave the column out."""
    snapshot = ready("b", (rule(expiration_days=1, newer_noncurrent=1),), QUICK.calendar)
    rows = [listed("k", age, version_id=str(n), is_latest=None) for n, age in enumerate((2.0, 4.0, 6.0, 8.0))]

    found = list(judge(rows, snapshot, "b", 100 * DAY_NS, RESERVED))

    assert [("0", "CURRENT"), ("2", "VERSION"), ("3", "VERSION")] == [(one.version_id, one.verb) for one in found]


def test_a_candidate_is_due_at_its_instant() -> None:
    """Not a nanosecond before."""
    snapshot = ready("b", (rule(expiration_days=1),), QUICK.calendar)
    row = ListedObject("k", 1, 5)
    assert [0, 1] == [len(list(judge([row], snapshot, "b", 5 + DAY_NS + ahead, RESERVED))) for ahead in (-1, 0)]


def test_many_candidates_come_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is lost at the border between two."""
    monkeypatch.setattr(_chunks, "__defaults__", (2,))
    import pyarrow as pa

    rows = [msgspec.structs.asdict(listed(f"k{n}")) for n in range(5)]
    task = judging("b", (rule(expiration_days=1),), 100 * DAY_NS, QUICK.calendar, RESERVED)
    batches = list(task(iter([pa.RecordBatch.from_pylist(rows)])))

    assert [2, 2, 1] == [batch.num_rows for batch in batches]
    assert [f"k{n}" for n in range(5)] == [key for batch in batches for key in batch["key"].to_pylist()]


# Policies.


def test_a_policys_form_is_told_by_its_first_character() -> None:
    """Behind a byte order mark and blanks; nothing is no rules."""
    text = as_xml(b'\xef\xbb\xbf {"Rules": [{"Status": "Enabled", "Filter": {"Prefix": "a"}, "Expiration": '
                  b'{"Days": 3}}]}', bucket="b", reserved=ReservedKeys("other"))  # fmt: skip
    assert text.startswith(b"<?xml")
    (found,) = rules_of(b"\xef\xbb\xbf\n" + text.split(b"\n", 1)[1])
    assert ("a", 3, True) == (found.prefix, found.expiration_days, found.enabled)
    assert ((), ()) == (rules_of(b""), rules_of(b"\xef\xbb\xbf \r\n\t"))
    with pytest.raises(Invalid):
        rules_of(b"[]")
