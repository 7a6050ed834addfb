"""What an operator asks for, what a walk records, and what the ledger keeps."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lakebed.core.errors import Conflict, Corrupt, Invalid, NotFound, Unavailable
from lakebed.lifecycle import blockers, ledger, operator, scan_plan
from lakebed.lifecycle.blockers import Failure
from lakebed.lifecycle.engine import Activation, compile_policies
from lakebed.lifecycle.ledger import decode
from lakebed.lifecycle.model import (
    Degraded,
    Mode,
    ObjectIdentity,
    Position,
    StreamKind,
)
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.state import BucketLifecycle, PendingItem, Stream, changed
from support.lifecycle_harness import DAY_S, Harness, failing
from support.lifecycle_makers import EXACT, rule

SECOND_NS = 10**9
DAY_NS = round(DAY_S * SECOND_NS)
LONG_NS = 86_400 * SECOND_NS


# The operator.


async def walked(**changed: Any) -> tuple[Harness, Operator, str]:
    world = Harness(**changed)
    await world.policy("b", rule(rule_id="r", expiration_days=1))
    await world.run_round()
    (name,) = (await world.state()).actions
    return world, Operator(world.registers, world.settings), name


def with_mode(known: BucketLifecycle, name: str, mode: Mode) -> BucketLifecycle:
    return msgspec.structs.replace(
        known, actions={**known.actions, name: msgspec.structs.replace(known.actions[name], mode=mode)}
    )


async def test_a_cadence_of_ones_own_counts_from_the_last_scan_and_0_gives_the_kinds_back() -> None:
    """A negative one is refused; an action that is not there is named with the command that shows them."""
    world, operator_, name = await walked()
    began_ns = (await world.action("EXPIRATION_DAYS")).last_scan_ns
    assert [name] == await operator_.cadence("b", name[:4], 3 * DAY_NS)
    ours = await world.action("EXPIRATION_DAYS")
    await world.run_round(3)
    after = await world.action("EXPIRATION_DAYS")
    await operator_.cadence("b", "", 0)
    kept = await world.action("EXPIRATION_DAYS")

    assert (3 * DAY_NS, began_ns + 3 * DAY_NS) == (ours.cadence_ns, ours.next_scan_ns)
    assert (began_ns + 3 * DAY_NS, began_ns + 6 * DAY_NS) == (after.last_scan_ns, after.next_scan_ns)
    assert (0, after.next_scan_ns) == (kept.cadence_ns, kept.next_scan_ns)
    with pytest.raises(Invalid):
        await operator_.cadence("b", "", -1)
    with pytest.raises(NotFound, match="no action 'x'"):
        await operator_.cadence("b", "x", 1)


@pytest.mark.parametrize(("mode", "days"), [(Mode.EVENT_DRIVEN, 7), (Mode.SCAN_ONLY, 1)])
async def test_without_a_cadence_of_its_own_an_action_does_not_wait_for_the_end_of_the_last_one(
    mode: Mode, days: int
) -> None:
    """A cadence of years that is taken back counts no longer: the next scan comes as soon as the kind has any."""
    world, operator_, name = await walked()
    began_ns = (await world.action("EXPIRATION_DAYS")).last_scan_ns
    await operator_.cadence("b", name, 1000 * DAY_NS)
    await world.registers.bucket("b").change(changed(lambda known: with_mode(known, name, mode)))

    await operator_.cadence("b", name, 0)

    assert began_ns + days * DAY_NS == (await world.action("EXPIRATION_DAYS")).next_scan_ns


@pytest.mark.parametrize("share", [0.5, 3])
async def test_a_cadence_does_not_put_off_an_expiration_at_a_date(share: float) -> None:
    """It is the time between two safety scans: the scan at the date itself comes on time."""
    world = Harness()
    date_ns = (world.clock.now_ns() // LONG_NS + 1) * LONG_NS
    left_ns = date_ns - world.clock.now_ns()
    await world.policy("b", rule(prefix="a", expiration_date_ns=date_ns), rule(prefix="b", expiration_days=1))
    world.lake.write("b", "a")
    await world.run_round()

    await Operator(world.registers, world.settings).cadence("b", "", round(share * left_ns))
    await world.run_round(left_ns / DAY_NS - 0.1)
    before = world.left()
    await world.run_round(0.2)

    assert (["a"], []) == (before, world.left())


async def test_a_pause_is_for_the_named_actions_and_going_on_begins_with_a_walk() -> None:
    """Pausing twice, or going on without a pause, changes nothing."""
    world, operator_, name = await walked()
    await operator_.pause("b", paused=False)
    untouched = await world.action("EXPIRATION_DAYS")
    await operator_.pause("b", name)
    paused = await world.action("EXPIRATION_DAYS")
    await operator_.pause("b", paused=False)
    going = await world.action("EXPIRATION_DAYS")

    assert (True, False) == (untouched.bootstrap_complete, untouched.paused)
    assert (True, True) == (paused.bootstrap_complete, paused.paused)
    assert (False, False) == (going.bootstrap_complete, going.paused)


async def test_a_status_row_says_everything_about_its_action() -> None:
    """Every field, for an action that runs, and for a policy that cannot be read."""
    world, operator_, name = await walked()
    action = await world.action("EXPIRATION_DAYS")
    (row,) = await operator_.status("b")
    await world.lake.put("bad", b"<x/>")
    await world.run_round()
    (wrong,) = await operator_.status("bad")

    assert {
        "bucket": "b",
        "action": name,
        "rule": "r",
        "mode": "event_driven",
        "degraded": "NONE",
        "bootstrap": "complete",
        "scanned": 0,
        "scanned_percent": 100.0,
        "last_scan_ns": action.last_scan_ns,
        "next_scan_ns": action.last_scan_ns + 7 * DAY_NS,
        "gone": False,
        "why_scan": "",
        "pending": 0,
        "blockers": 0,
        "last_tick_ns": action.last_scan_ns,
        "lag_s": 0.0,
    } == row
    assert ("invalid policy", "", True) == (wrong["mode"], wrong["action"], "LifecycleConfiguration" in wrong["why"])
    assert 2 == len(await operator_.status())
    assert 1 == len(await operator_.status(limit=1))


async def test_a_reseed_names_a_delay_or_the_predicates_and_finds_somebody() -> None:
    """Neither, both, and a delay that nobody has are refused; the demand is kept on the bucket until it is walked."""
    world, operator_, _ = await walked()
    snapshot = await world.worker.compile()
    for said in ({}, {"delay_ns": DAY_NS, "predicate": True}):
        with pytest.raises(Invalid):
            await operator_.reseed(snapshot, **said)  # type: ignore[arg-type]
    with pytest.raises(NotFound, match="no action has this delay"):
        await operator_.reseed(snapshot, delay_ns=77)
    with pytest.raises(NotFound, match="predicates"):
        await operator_.reseed(snapshot, predicate=True)
    assert ["b"] == await operator_.reseed(snapshot, delay_ns=DAY_NS)
    state = await world.state()

    assert (True, (DAY_NS,), False) == (state.rescan, state.force_delays_ns, state.force_predicate)
    await world.run_round()
    assert (False, ()) == ((await world.state()).rescan, (await world.state()).force_delays_ns)


async def test_only_so_many_keys_of_a_bucket_are_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is passed by already may be given up again."""
    monkeypatch.setattr(operator, "SKIPS_MAX", 1)
    world, operator_, _ = await walked()
    for key in ("a", "a", "c"):
        stream = Stream(StreamKind.BOOTSTRAP, bucket="b", key=key)
        await world.registers.blockers.change(
            lambda known, stream=stream, key=key: (
                blockers.block(known, [Failure(stream, "b", key, "TRANSPORT_ERROR", "e")], 1, reason="r"),
                None,
            )
        )
        (blocker,) = await operator_.blockers()
        if key == "c":
            with pytest.raises(Conflict, match="which is the limit"):
                await operator_.quarantine(blocker.blocker_id, reason="x", who="me")
        else:
            await operator_.quarantine(blocker.blocker_id, reason="x", who="me")
    assert {"a": "x"} == (await world.state()).skips


async def test_beginning_anew_is_for_the_named_actions_and_not_for_demoted_ones() -> None:
    """A demoted action comes back by a reseed alone."""
    world = Harness()
    await world.policy("b", rule(prefix="x", expiration_days=1), rule(prefix="y", abort_days=1))
    await world.run_round()
    names = sorted((await world.state()).actions)
    demoted = next(ref for ref in (await world.worker.compile()).actions if str(ref.key) == names[1])
    await world.worker.resolver.demote(demoted, Degraded.LAG_HIGH, "late")
    operator_ = Operator(world.registers)
    await operator_.rebootstrap("b", names[1][:16])
    after = (await world.state()).actions
    assert [True, True] == [after[name].bootstrap_complete for name in names]
    await operator_.rebootstrap("b")
    after = (await world.state()).actions
    assert [False, True] == [after[name].bootstrap_complete for name in names]


async def test_the_lag_of_an_action_is_that_of_its_slowest_sweep() -> None:
    """Of the predicates too, where it looks at them; none while it is on scans or waits for its walk."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1, tags=(("t", "1"),)))
    await world.run_round()
    operator_, now_ns = Operator(world.registers, world.settings), world.clock.now_ns()
    behind = {"original": 30, "predicate": 70}
    for shard, register in enumerate(world.registers.readers):
        late_ns = behind["predicate"] * SECOND_NS if shard == 2 else SECOND_NS
        await register.change(
            lambda known, late_ns=late_ns: (
                msgspec.structs.replace(
                    known,
                    originals={str(DAY_NS): Position(now_ns - DAY_NS - behind["original"] * SECOND_NS)},
                    predicate=Position(now_ns - late_ns),
                ),
                None,
            )
        )
    (row,) = await operator_.status("b")
    (ref,) = (await world.worker.compile()).actions
    await world.worker.resolver.demote(ref, Degraded.LAG_HIGH, "late")
    (scans,) = await operator_.status("b")

    assert (69.0, 0.0) == (row["lag_s"], scans["lag_s"])  # the small delay of 1 s is none


# Walks.


async def test_a_walk_settles_in_batches_and_counts_what_it_scanned() -> None:
    """Each batch asks for the lease first; the counter counts complete walks."""
    world = Harness(batch=2)
    for number in range(5):
        world.lake.write("b", f"k{number}")
    await world.clock.advance(2 * DAY_S)
    world.lake.write("b", "young")
    await world.policy("b", rule(expiration_days=1))
    left: list[int] = []

    async def alive() -> None:
        left.append(len(world.left()))

    snapshot = await world.worker.compile()
    scan = await world.worker._scanner.run("b", 0, await world.worker._scanner.begin("b", snapshot), snapshot, alive)

    assert (6, 5, True, False) == (scan.scanned, scan.worked, scan.complete, scan.blocked)
    assert [6, 4, 2, 1] == left
    assert 6 == world.metrics.value("lakebed_lifecycle_scanned_total", bucket="b")


async def test_a_walk_under_way_says_how_far_it_has_come() -> None:
    """The checkpoint is behind the last resolved key, and the count goes on when the walk does."""
    world, store = failing(batch=2)
    for number in range(5):
        world.lake.write("b", f"k{number}")
    await world.clock.advance(2 * DAY_S)
    store.deletes["k3"] = Unavailable("down")
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    state = await world.state()
    rows = await Operator(world.registers).status("b")
    assert state.scan is not None and ("k/k2", 3) == (state.scan.ranges[0].after, state.scan.scanned)
    assert [] == rows
    store.deletes.clear()
    (scan,) = (await world.run_round(0.01)).scans
    assert (2, True) == (scan.scanned, scan.complete)


async def test_a_finished_action_is_recorded_whole() -> None:
    """Every field that later rounds and the operator read."""
    world, _, _ = await walked()
    action = await world.action("EXPIRATION_DAYS")
    at_ns = world.clock.now_ns()
    expected = ("r", Mode.EVENT_DRIVEN, Degraded.NONE, 0, True, at_ns, at_ns, at_ns, at_ns + 7 * DAY_NS, 0, False)
    generation = (await world.registers.cursors())[0].generation
    assert (*expected, (DAY_NS,), False, 0, generation, 0, "") == msgspec.structs.astuple(action)


async def test_a_date_that_is_to_come_is_the_next_scan() -> None:
    """Afterwards it is scanned daily, since late objects are taken too."""
    world = Harness(day_s=86_400.0)
    date_ns = (world.clock.now_ns() // LONG_NS + 5) * LONG_NS
    await world.policy("b", rule(expiration_date_ns=date_ns))
    await world.run_round()
    before = await world.action("EXPIRATION_DATE")
    await world.clock.advance((date_ns - world.clock.now_ns()) / SECOND_NS)
    await world.worker.run_round()
    after = await world.action("EXPIRATION_DATE")

    assert (Mode.SCAN_AT_DATE, date_ns) == (before.mode, before.next_scan_ns)
    assert date_ns + LONG_NS == after.next_scan_ns


async def test_the_digest_of_a_walk_is_its_buckets_actions_in_any_order() -> None:
    """Another bucket's rules do not restart it."""
    a, b = rule(prefix="a", expiration_days=1), rule(prefix="b", expiration_days=2)

    def digest(policies: dict[str, tuple[Any, ...]]) -> str:
        return scan_plan.snapshot_digest(compile_policies(policies, lambda _: Activation(), EXACT), "b")

    first = digest({"b": (a, b)})
    assert first == digest({"b": (b, a), "c": (a,)})
    assert first != digest({"b": (a,), "c": (b,)})


# The ledger.


async def test_a_move_takes_only_so_many_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest waits for the next one; every row is there before, between and after."""
    monkeypatch.setattr(ledger, "SEGMENTS_MAX", 2)
    world = Harness(fold_s=0.0)
    await world.policy("b", rule(expiration_days=1))
    await world.run_round()
    for number in range(3):
        world.lake.write("b", f"k{number}")
        await world.run_round(1.01)
    before = await world.ledger()
    mover = world.worker._mover
    counts, seen = [], []
    for _ in range(4):
        counts.append(await mover.run())
        seen.append(len(await world.ledger()))

    assert (6, [2, 2, 2, 0], [6, 6, 6, 6]) == (len(before), counts, seen)


async def test_rows_of_each_bucket_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after a move, by key and whole."""
    world = Harness()
    for bucket in ("b", "c"):
        await world.policy(bucket, rule(expiration_days=1))
    await world.run_round()
    for bucket in ("b", "c"):
        world.lake.write(bucket, "k")
    await world.run_round(1.01)
    for _ in range(2):
        assert {"b"} == {row.bucket for row in await world.ledger("b")}
        assert (2, 0) == (len(await world.ledger("c", "k")), len(await world.ledger("c", "other")))
        await world.worker._mover.run()


def test_a_damaged_line_names_its_segment() -> None:
    """Whoever reads the ledger knows which object to look at."""
    with pytest.raises(Corrupt, match="seg-1"):
        decode(b'{"at_ns": 1}\n', "seg-1")


async def test_a_reseed_survives_an_edit_of_the_policy_under_its_walk() -> None:
    """The walk begins again for the new set of actions, and still brings the demoted ones back to events."""
    world, store = failing()
    tagged = rule(prefix="t", expiration_days=2, tags=(("t", "1"),))
    await world.policy("b", tagged)
    await world.run_round()
    (ref,) = (await world.worker.compile()).actions
    world.lake.write("b", "t1", tags={"t": "1"})
    await world.clock.advance(3 * DAY_S)
    await world.worker.resolver.demote(ref, Degraded.LAG_HIGH, "late")
    operator_, snapshot = Operator(world.registers), await world.worker.compile()
    await operator_.reseed(snapshot, delay_ns=2 * DAY_NS)
    await operator_.reseed(snapshot, predicate=True)
    store.deletes["t1"] = Unavailable("down")
    await world.run_round()
    under_way = (await world.state()).scan
    await world.policy("b", tagged, rule(prefix="other", expiration_days=1))
    await world.run_round(0.01)
    again = (await world.state()).scan
    store.deletes.clear()
    await world.run_round(0.01)

    assert under_way is not None and again is not None and under_way.snapshot != again.snapshot
    assert ((2 * DAY_NS,), True) == (again.force_delays_ns, again.force_predicate)
    assert {Mode.EVENT_DRIVEN} == {one.mode for one in (await world.state()).actions.values()}


async def test_a_version_or_an_upload_that_was_given_up_leaves_the_exceptions() -> None:
    """Found by its upload, its version and its key, each in its place."""
    world, operator_, name = await walked()
    (ref,) = (await world.worker.compile()).actions
    items = [PendingItem("k", "v1", 5, ObjectIdentity(1, 1)), PendingItem("k", "", 5, ObjectIdentity(1, 1), "u1")]
    await world.worker.resolver.pending.upsert(ref, items)
    for item in items:
        stream = Stream(
            StreamKind.PENDING, bucket="b", action=name, key="k", version_id=item.version_id, upload_id=item.upload_id
        )
        await world.registers.blockers.change(
            lambda known, stream=stream: (
                blockers.block(known, [Failure(stream, "b", "k", "TRANSPORT_ERROR", "e")], 1, reason="r"),
                None,
            )
        )
        (blocker,) = await operator_.blockers()
        await operator_.quarantine(blocker.blocker_id, reason="known", who="me")

    assert {} == (await world.worker.resolver.pending.load(ref)).items
