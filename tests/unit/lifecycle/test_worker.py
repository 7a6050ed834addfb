"""The worker over the in-memory twin: every kind of rule, end to end, on a manual clock."""

from __future__ import annotations

from lakebed.lifecycle.enforcer import NOTE_S
from lakebed.lifecycle.model import DeleteOutcome, Mode, Verb
from lakebed.lifecycle.operator import Operator
from support.lifecycle_harness import DAY_S, Harness
from support.lifecycle_makers import DAY, rule


async def test_an_object_expires_at_its_instant_and_the_ledger_says_why() -> None:
    """Neither before nor noticeably after, with the rule, the identity and the verdict on record."""
    world = Harness()
    await world.policy("b", rule(rule_id="old", prefix="logs/", expiration_days=2))
    await world.run_round()
    world.lake.write("b", "logs/a")
    world.lake.write("b", "kept/a")

    await world.run_round(1.99)
    assert ["kept/a", "logs/a"] == world.left()
    await world.run_round(0.02)

    assert ["kept/a"] == world.left()
    planned, verdict = await world.ledger(key="logs/a")
    assert ("", "old") == (planned.outcome, planned.rule_id)
    assert (DeleteOutcome.DELETED, Verb.CURRENT) == (verdict.outcome, verdict.verb)
    assert verdict.stream.startswith("ORIGINAL:")


async def test_the_worker_wakes_when_something_is_due() -> None:
    """Not on a fixed tick: the round says when the next object is due."""
    world = Harness(poll_s=10_000.0)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "a")
    due_ns = world.clock.now_ns() + round(DAY_S * 1e9)

    assert due_ns == (await world.run_round(0.1)).wake_ns


async def test_what_existed_before_the_policy_is_deleted_by_the_walk() -> None:
    """A new policy takes what is already due at once, and leaves the rest to its events."""
    world = Harness()
    world.lake.write("b", "old")
    await world.clock.advance(3 * DAY_S)
    world.lake.write("b", "young")
    await world.policy("b", rule(expiration_days=2))

    await world.run_round()
    assert ["young"] == world.left()
    assert (await world.action("EXPIRATION_DAYS")).bootstrap_complete
    await world.run_round(2.01)

    assert [] == world.left()
    assert (await world.ledger(key="old"))[0].stream.startswith("BOOTSTRAP:")
    assert (await world.ledger(key="young"))[0].stream.startswith("ORIGINAL:")


async def test_an_overwrite_resets_the_clock() -> None:
    """The rewritten object lives its full time."""
    world = Harness()
    await world.policy("b", rule(expiration_days=2))
    await world.run_round()
    world.lake.write("b", "a")
    await world.clock.advance(1.5 * DAY_S)
    world.lake.write("b", "a")

    await world.run_round(1.0)
    assert ["a"] == world.left()
    await world.run_round(1.01)
    assert [] == world.left()


async def test_a_tag_added_late_expires_at_the_objects_own_instant() -> None:
    """Tagged at age one day under a two-day rule: gone at two days, not at three, by the object's own event."""
    world = Harness()
    await world.policy("b", rule(expiration_days=2, tags=(("tmp", "yes"),)))
    await world.run_round()
    world.lake.write("b", "a")
    await world.run_round(1.0)
    world.lake.tag("b", "a", {"tmp": "yes"})

    await world.run_round(0.5)
    assert ["a"] == world.left()
    (action,) = (await world.worker.compile()).actions
    assert {} == (await world.worker.resolver.pending.load(action)).items
    await world.run_round(0.51)

    assert [] == world.left()


async def test_a_tag_added_after_the_instant_expires_at_once() -> None:
    """The predicate sweep runs close to now."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1, tags=(("tmp", "yes"),)))
    await world.run_round()
    world.lake.write("b", "a")
    await world.run_round(5)
    world.lake.tag("b", "a", {"tmp": "yes"})

    await world.run_round(0.02)

    assert [] == world.left()


async def test_a_tag_taken_away_keeps_the_object() -> None:
    """Rules are asked about what is, not about what an event said."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1, tags=(("tmp", "yes"),)))
    await world.run_round()
    world.lake.write("b", "a", tags={"tmp": "yes"})
    await world.run_round(0.5)
    world.lake.tag("b", "a", {})

    await world.run_round(2)

    assert ["a"] == world.left()


async def test_a_date_is_one_walk_at_its_time() -> None:
    """Nothing before; everything that matches at the date; later arrivals on the daily scan."""
    world = Harness()
    date_ns = (world.clock.now_ns() // DAY + 1) * DAY
    wait_days = (date_ns - world.clock.now_ns()) / 1e9 / DAY_S
    await world.policy("b", rule(prefix="x/", expiration_date_ns=date_ns))
    world.lake.write("b", "x/a")
    run_round = await world.run_round()
    await world.run_round(wait_days - 0.1)
    assert ["x/a"] == world.left()
    assert Mode.SCAN_AT_DATE is (await world.action("EXPIRATION_DATE")).mode
    assert run_round.wake_ns <= date_ns

    await world.run_round(0.2)
    assert [] == world.left()
    world.lake.write("b", "x/b")
    await world.run_round(1.01)
    assert [] == world.left()


async def test_what_else_a_rule_with_a_date_to_come_wants_does_not_wait_for_the_date() -> None:
    """Its uploads are aborted and its old versions go from the first round on, what is there and what comes."""
    world = Harness()
    world.lake.versioned.add("b")
    date_ns = (world.clock.now_ns() // DAY + 1) * DAY
    for _ in range(2):
        world.lake.write("b", "a")
    world.lake.begin_upload("b", "u")
    await world.clock.advance(1.5 * DAY_S)
    await world.policy("b", rule(expiration_date_ns=date_ns, noncurrent_days=1, abort_days=1))

    await world.run_round()
    first = (len(world.lake.objects["b"]["a"]), len(world.lake.uploads["b"]))
    world.lake.write("b", "a")
    world.lake.begin_upload("b", "v")
    await world.run_round(1.01)

    assert ((1, 0), (1, 0)) == (first, (len(world.lake.objects["b"]["a"]), len(world.lake.uploads["b"])))
    assert world.clock.now_ns() < date_ns == (await world.action("EXPIRATION_DATE")).next_scan_ns


async def test_versions_markers_and_counts() -> None:
    """Current → marker, noncurrent by days, then the lone marker goes."""
    world = Harness()
    world.lake.versioned.add("b")
    await world.policy("b", rule(expiration_days=2, noncurrent_days=1))
    await world.run_round()
    world.lake.write("b", "a")

    await world.run_round(2.01)
    assert [True, False] == [one.marker for one in world.lake.objects["b"]["a"]]
    await world.run_round(1.01)
    assert [True] == [one.marker for one in world.lake.objects["b"]["a"]]
    await world.run_round(1.5)
    assert [] == world.left()


async def test_an_expired_marker_goes_when_its_last_version_goes() -> None:
    """A client deletes the last version behind a marker: the marker follows after the small delay."""
    world = Harness()
    world.lake.versioned.add("b")
    await world.policy("b", rule(expired_delete_marker=True))
    await world.run_round()
    world.lake.write("b", "a")
    world.lake.remove("b", "a")
    await world.run_round(1)
    assert 2 == len(world.lake.objects["b"]["a"])
    marker, version = world.lake.objects["b"]["a"]
    world.lake._drop("b", "a", version)

    await world.run_round(0.02)

    assert marker.marker and [] == world.left()


async def test_the_end_of_a_version_from_before_versioning_leaves_no_marker_behind() -> None:
    """The null version goes without an id in its event; the marker that is alone then goes too, by that event."""
    world = Harness()
    world.lake.write("b", "a")
    world.lake.versioned.add("b")
    await world.policy("b", rule(expiration_days=1, noncurrent_days=1))
    await world.run_round()

    await world.run_round(1.1)
    assert [True, False] == [one.marker for one in world.lake.objects["b"]["a"]]
    await world.run_round(1.1)
    await world.run_round(0.1)

    assert [] == world.left()


async def test_where_versioning_is_suspended_the_marker_takes_the_null_versions_place() -> None:
    """The current null version is replaced by a null marker, an older version stays until its own rule takes it."""
    world = Harness()
    world.lake.versioned.add("b")
    world.lake.write("b", "a")
    world.lake.versioned.discard("b")
    world.lake.suspended.add("b")
    world.lake.write("b", "a")
    await world.policy("b", rule(expiration_days=1), rule(noncurrent_days=3))
    await world.run_round()

    await world.run_round(1.1)
    assert [("null", True), ("v000002", False)] == [
        (one.version_id, one.marker) for one in world.lake.objects["b"]["a"]
    ]
    await world.run_round(2.1)
    await world.run_round(0.1)

    assert [] == world.left()


async def test_only_so_many_newer_noncurrent_versions_are_kept() -> None:
    """Two are kept beside the current one, whatever their age."""
    world = Harness()
    world.lake.versioned.add("b")
    await world.policy("b", rule(newer_noncurrent=2))
    await world.run_round()
    for _ in range(6):
        world.lake.write("b", "a")

    await world.run_round(0.02)

    assert 3 == len(world.lake.objects["b"]["a"])


async def test_days_and_count_must_both_hold() -> None:
    """A version beyond the count waits for its days; one old enough waits for the count, and goes when it is passed."""
    world = Harness()
    world.lake.versioned.add("b")
    await world.policy("b", rule(noncurrent_days=1, newer_noncurrent=1))
    await world.run_round()
    for _ in range(3):
        world.lake.write("b", "a")
    await world.run_round(0.5)
    assert 3 == len(world.lake.objects["b"]["a"])
    await world.run_round(0.6)
    assert 2 == len(world.lake.objects["b"]["a"])
    world.lake.write("b", "a")

    await world.run_round(0.02)

    assert 2 == len(world.lake.objects["b"]["a"])


async def test_an_upload_left_open_is_aborted() -> None:
    """By its own age; uploads under another prefix stay."""
    world = Harness()
    await world.policy("b", rule(prefix="in/", abort_days=1))
    await world.run_round()
    world.lake.begin_upload("b", "in/x")
    world.lake.begin_upload("b", "other/x")

    await world.run_round(1.01)

    assert ["other/x"] == [key for key, _ in world.lake.uploads["b"].values()]


async def test_an_object_under_lock_is_skipped_and_counted_and_goes_with_a_later_scan() -> None:
    """Never bypassed, never retried in between; the safety scan finds it when the lock is off."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    world.lake.write("b", "a")
    world.lake.hold("b", "a")
    await world.run_round(1.01)
    assert ["a"] == world.left()
    assert 1 == world.metrics.value(
        "lakebed_lifecycle_verdicts_total", bucket="b", kind="EXPIRATION_DAYS", outcome="SKIPPED_OBJECT_LOCK"
    )
    world.lake.hold("b", "a", False)

    await world.run_round(2)
    assert ["a"] == world.left()
    await world.run_round(5)
    assert [] == world.left()


async def test_a_changed_policy_takes_back_what_the_old_one_wanted() -> None:
    """After the edit nothing is deleted for the old rule, and the unrelated rule's action keeps its progress."""
    world = Harness()
    one, other = rule(prefix="x/", expiration_days=1), rule(prefix="y/", expiration_days=1)
    await world.policy("b", one, other)
    await world.run_round()
    before = (await world.state()).actions
    world.lake.write("b", "x/a")
    world.lake.write("b", "y/a")
    await world.policy("b", rule(prefix="x/", expiration_days=5), other)

    await world.run_round(1.01)

    assert ["x/a"] == world.left()
    after = (await world.state()).actions
    assert 3 == len(after)
    assert 1 == sum(1 for name, state in after.items() if name in before and not state.gone_since_ns)
    await world.run_round(4.01)
    assert [] == world.left()


async def test_a_removed_and_restored_rule_misses_nothing() -> None:
    """What fell due while the rule was away is found when it is back."""
    world = Harness()
    wanted = rule(prefix="x/", expiration_days=1)
    keep = rule(prefix="zzz/", expiration_days=1)
    await world.policy("b", wanted, keep)
    await world.run_round()
    world.lake.write("b", "x/a")
    await world.run_round(0.5)
    await world.policy("b", keep)
    await world.run_round(2)
    assert ["x/a"] == world.left()

    await world.policy("b", wanted, keep)
    await world.run_round(0.1)

    assert [] == world.left()


async def test_a_policy_that_does_not_parse_stops_only_its_own_bucket() -> None:
    """The bucket says what is wrong; the others go on."""
    world = Harness()
    await world.policy("good", rule(expiration_days=1))
    await world.lake.put("bad", b"<LifecycleConfiguration><Rul/></LifecycleConfiguration>")
    await world.run_round()
    world.lake.write("good", "a")
    world.lake.write("bad", "a")

    await world.run_round(1.01)

    assert [] == world.left("good")
    assert ["a"] == world.left("bad")
    assert "Rul" in (await world.state("bad")).problem


async def test_two_workers_do_no_harm_to_each_other() -> None:
    """Whoever holds the lease reads; both may tick at will."""
    world = Harness()
    other = world.new_worker(world.lake)
    await world.policy("b", rule(expiration_days=1))
    for number in range(5):
        world.lake.write("b", f"k{number}")
        await world.run_round(0.3)
        await other.run_round()
    await world.run_round(1.1)
    await other.run_round()

    assert [] == world.left()
    assert 5 == len(world.lake.removed)


async def test_a_completed_round_is_put_on_record_but_not_each_of_many() -> None:
    """Status says when the last one was; rounds that follow each other closely share one write."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1))
    operator = Operator(world.registers)
    never = await operator.last_round_ns()
    await world.run_round()
    first_ns = await operator.last_round_ns()
    await world.clock.advance(NOTE_S / 2)
    await world.worker.run_round()
    close_ns = await operator.last_round_ns()
    await world.clock.advance(NOTE_S / 2)
    await world.worker.run_round()
    (row,) = await operator.status("b")

    assert 0 == never
    assert first_ns == close_ns > 0
    assert first_ns + round(NOTE_S * 1e9) == row["last_tick_ns"] == world.clock.now_ns()
    assert "test" == (await world.registers.last_round.read()).value.who
