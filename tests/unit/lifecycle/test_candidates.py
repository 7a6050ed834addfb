"""Rules over a listing: the same engine says the same, and says when a listing cannot tell."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pyarrow as pa

from lakebed.lifecycle.drainer import Applier, ApplyReport
from lakebed.lifecycle.dry_run import Candidate, ListedObject, dry_run, judge, judging, ready
from lakebed.lifecycle.model import Rule
from lakebed.lifecycle.reserved import ReservedKeys
from support.lifecycle_harness import DAY_S, QUICK, RESERVED, Harness
from support.lifecycle_makers import rule

DAY = round(DAY_S) * 1_000_000_000
NOW = 100 * DAY


def judged(
    rows: list[ListedObject], *rules: Rule, bucket: str = "b", reserved: ReservedKeys = RESERVED
) -> list[Candidate]:
    return list(judge(rows, ready(bucket, rules, QUICK.calendar), bucket, NOW, reserved))


def row(key: str, days: float = 5.0, size: int | None = 10, **said: Any) -> ListedObject:
    return ListedObject(key, size, NOW - round(days * DAY), "e", **said)


def test_age_prefix_and_size_are_decided_by_the_listing() -> None:
    """What is due is a certain candidate, with the rule that wants it."""
    rows = [row("a/old"), row("a/young", 0.5), row("b/old"), row("c/big", size=100), row("c/small", size=1)]

    found = judged(
        rows,
        rule(rule_id="a", prefix="a/", expiration_days=1),
        rule(prefix="c/", size_greater_than=50, expiration_days=1),
    )

    assert [("a/old", "CURRENT", "EXPIRATION_DAYS", True), ("c/big", "CURRENT", "EXPIRATION_DAYS", True)] == [
        (one.key, one.verb, one.kind, one.certain) for one in found
    ]
    assert ("a", 10, NOW - 4 * DAY) == (found[0].rule_id, found[0].size, found[0].due_at_ns)


def test_what_a_listing_does_not_show_is_not_certain() -> None:
    """Tags, a missing size, a missing time; a certain rule goes before one that is not."""
    tagged = rule(rule_id="t", tags=(("tmp", "1"),), expiration_days=1)
    plain = rule(rule_id="p", prefix="both", expiration_days=2)
    sized = rule(rule_id="s", prefix="s", size_less_than=5, expiration_days=1)

    assert [("x", False)] == [(one.key, one.certain) for one in judged([row("x")], tagged)]
    assert [("p", True)] == [(one.rule_id, one.certain) for one in judged([row("both")], tagged, plain)]
    assert [False] == [one.certain for one in judged([row("s", size=None)], sized)]
    assert [False] == [one.certain for one in judged([ListedObject("x", 1, None)], rule(expiration_days=1))]
    assert [] == judged([row("x", 0.5)], tagged)


def test_versions_are_judged_as_a_family() -> None:
    """Successor's time, counts of newer ones, and a marker only when it is alone."""
    family = [
        row("k", 1.5, version_id="3", is_latest=True),
        row("k", 2.5, version_id="2", is_latest=False),
        row("k", 9.0, version_id="1", is_latest=False),
    ]
    alone = [row("m", 5.0, 0, version_id="9", is_delete_marker=True)]

    assert ["1"] == [one.version_id for one in judged(family, rule(noncurrent_days=2))]
    assert ["1"] == [one.version_id for one in judged(family, rule(newer_noncurrent=1))]
    assert ["2", "1"] == [one.version_id for one in judged(family, rule(noncurrent_days=1))]
    assert ["DELETE_MARKER"] == [one.verb for one in judged(alone, rule(expired_delete_marker=True))]
    assert [] == judged([*alone, row("m", 9.0, version_id="8", is_latest=False)], rule(expired_delete_marker=True))


def test_lakebeds_own_keys_are_no_candidates() -> None:
    """Whatever the policy says."""
    assert [] == judged([row("own/accepted")], rule(expiration_days=1), bucket="lakebed")


def test_batches_of_arrow_go_in_and_come_out() -> None:
    """A key whose versions lie in two batches is one family; empty input gives nothing."""
    names = list(ListedObject.__struct_fields__)
    rows = [
        row("k", 1.5, version_id="2", is_latest=True),
        row("k", 9.0, version_id="1", is_latest=False),
    ]
    batches = [pa.RecordBatch.from_pylist([{name: getattr(one, name) for name in names}]) for one in rows]
    task = judging("b", (rule(noncurrent_days=1),), NOW, QUICK.calendar, RESERVED)

    assert ["1"] == [one["version_id"] for batch in task(iter(batches)) for one in batch.to_pylist()]
    assert [] == list(task(iter(())))


async def test_a_walk_and_a_listing_say_the_same() -> None:
    """On a bucket without tags or locks the dry run and the candidates are the same keys and bytes."""
    world = Harness()
    for number in range(30):
        world.lake.write("b", f"{'a' if number % 3 else 'z'}/{number:02d}", size=number)
    await world.clock.advance(2 * DAY_S)
    rules = (rule(prefix="a/", expiration_days=1), rule(prefix="z/", size_greater_than=9, expiration_days=1))
    now_ns = world.clock.now_ns()
    listed = [
        ListedObject(key, found[0].size, found[0].mtime_ns) for key, found in sorted(world.lake.objects["b"].items())
    ]

    walked = await dry_run(world.lake, "b", rules, now_ns, QUICK.calendar, reserved=RESERVED)
    found = list(judge(listed, ready("b", rules, QUICK.calendar), "b", now_ns, RESERVED))

    assert (walked.count, walked.bytes) == (len(found), sum(one.size for one in found))
    assert {one.key for one in walked.sample} <= {one.key for one in found}
    short = await dry_run(world.lake, "b", rules, now_ns, QUICK.calendar, keys_max=10)
    assert (10, False) == (short.scanned, short.complete)


async def test_candidates_are_applied_by_the_guarded_delete() -> None:
    """What changed since, what no rule wants, and what never was, stays or passes; verdicts are in the ledger."""
    world = Harness()
    for key in ("old", "overwritten", "kept"):
        world.lake.write("b", key)
    await world.policy("b", rule(rule_id="r", prefix="o", expiration_days=1))
    await world.clock.advance(1.5 * DAY_S)
    world.lake.write("b", "overwritten")

    async def keys() -> AsyncIterator[str]:
        for key in ("kept", "never-was", "old", "old", "overwritten"):
            yield key

    applier = Applier(world.worker.resolver, QUICK)
    done = await applier.run("b", keys(), await world.worker.compile())

    assert ApplyReport(keys=4, deleted=1, passed=3) == done
    assert ["kept", "overwritten"] == world.left()
    assert ["", "DELETED"] == [one.outcome for one in await world.ledger("b", "old")]
