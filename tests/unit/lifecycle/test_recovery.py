"""Nothing due is left behind: lost logs, policies and buckets that come and go, and workers that meet each other."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from lakebed.core.errors import Unavailable
from lakebed.lifecycle.cluster import GAPS_MAX, LogGap, LogReach, LogState, begins_ns, lost, observed, reach_hash
from lakebed.lifecycle.compiler import KEPT_POLLS
from lakebed.lifecycle.cursors import Move, advanced, rewound
from lakebed.lifecycle.model import Degraded, Mode, Position
from lakebed.lifecycle.operator import Operator
from lakebed.lifecycle.seams import Family
from lakebed.lifecycle.state import ReaderState, ScanProgress, changed
from support.lifecycle_harness import DAY_S, Harness, failing
from support.lifecycle_makers import rule

SECOND = 1_000_000_000
DAY_NS = round(DAY_S) * SECOND
FIVE_DAYS = rule(prefix="x/", expiration_days=5)


async def beside(world: Harness) -> None:
    """Another bucket with the same delay: its policy stays, so the cursors move on."""
    await world.policy("other", FIVE_DAYS)


# The log.

WHOLE = LogReach(made_ns=5, first_ns=5, servers=(("a", 1), ("b", 1)))


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (LogReach(servers=WHOLE.servers), "gone"),
        (LogReach(9, 9, WHOLE.servers), "made again"),
        (LogReach(5, None, WHOLE.servers), "no files"),
        (LogReach(5, 5, (("a", 2), ("b", 1))), "a was restarted"),
        (LogReach(5, 5, (("b", 1),)), "a was restarted or is gone"),
    ],
)
def test_every_way_to_lose_events_is_noticed_once(seen: LogReach, why: str) -> None:
    """A new generation with the reason; looked at again, nothing more is lost."""
    known = observed(LogState(), WHOLE, 1000 * SECOND)
    assert (0, 0) == (known.generation, begins_ns(known))

    lost = observed(known, seen, 2000 * SECOND)

    assert (1, 2000 * SECOND) == (lost.generation, lost.lost_ns)
    assert why in lost.lost
    assert lost is observed(lost, seen, 2001 * SECOND)
    if "restarted" in why:
        assert ((LogGap(820 * SECOND, 2000 * SECOND),), 0) == (lost.gaps, begins_ns(lost))
    else:
        assert 2000 * SECOND == begins_ns(lost)


@pytest.mark.parametrize(
    "seen",
    [
        WHOLE,
        msgspec.structs.replace(WHOLE, first_ns=7),
        msgspec.structs.replace(WHOLE, servers=()),
        msgspec.structs.replace(WHOLE, servers=(*WHOLE.servers, ("c", 3))),
    ],
)
def test_what_is_no_loss_makes_no_generation(seen: LogReach) -> None:
    """Files that retention removes, masters that do not answer, a server that joins."""
    known = observed(LogState(), WHOLE, 1000 * SECOND)

    assert 0 == observed(known, seen, 2000 * SECOND).generation
    assert WHOLE.servers == (observed(known, seen, 2000 * SECOND).reach or LogReach()).servers[:2]


def test_gaps_that_meet_are_one_and_of_too_many_the_nearest_are_joined() -> None:
    """Filers restarted week after week leave as many short gaps, and not one of months full of exceptions."""
    week, known = 7 * 86_400, observed(LogState(), WHOLE, 0)
    for number in range(1, GAPS_MAX + 11):
        for after_s in (0, 60):  # two filers, one soon after the other
            seen = LogReach(5, 5, (("a", 2 * number + (after_s > 0)), ("b", 1)))
            at_ns = (number * week + after_s) * SECOND
            known = observed(msgspec.structs.replace(known, seen_ns=at_ns - 30 * SECOND), seen, at_ns)

    assert GAPS_MAX == len(known.gaps)
    assert all(before.to_ns < after.from_ns for before, after in pairwise(known.gaps))
    lengths = [(gap.to_ns - gap.from_ns) // SECOND for gap in known.gaps]
    assert 270 == sorted(lengths)[len(lengths) // 2]
    restarts = [number * week * SECOND for number in range(1, GAPS_MAX + 11)]
    assert all(any(gap.holds(at_ns) for gap in known.gaps) for at_ns in restarts)


def test_the_first_file_of_a_log_is_no_other_log_unless_it_lacks_what_came_before() -> None:
    """A server writes its first file a minute after it started: cursors of before go on in it."""
    young = LogReach(servers=WHOLE.servers)
    known = observed(LogState(), young, 1000 * SECOND)

    written = observed(known, LogReach(1060 * SECOND, 960 * SECOND, WHOLE.servers), 1070 * SECOND)
    late = observed(known, LogReach(1060 * SECOND, 1020 * SECOND, WHOLE.servers), 1070 * SECOND)

    assert reach_hash(known) == reach_hash(written)
    assert reach_hash(written) == reach_hash(observed(written, written.reach or young, 2000 * SECOND))
    assert reach_hash(known) != reach_hash(late)
    assert reach_hash(written) != reach_hash(observed(written, WHOLE, 2000 * SECOND))


@pytest.mark.parametrize("rounding", ["exact", "midnight"])
@pytest.mark.parametrize("how", ["files", "gone", "remade", "pruned"])
async def test_a_log_that_was_lost_leads_to_a_recovery_scan_by_itself(how: str, rounding: str) -> None:
    """The worker was away; what fell due meanwhile goes with the first round, and nobody acknowledges anything."""
    world = Harness(rounding=rounding)
    await world.policy("b", FIVE_DAYS)
    await world.run_round()
    world.lake.write("b", "x/a")
    await world.clock.advance(4 * DAY_S)
    world.lake.write("b", "x/later")
    await world.clock.advance(2.2 * DAY_S)
    if how == "pruned":
        world.lake.log_begins_ns, world.lake.log = world.clock.now_ns() - SECOND, []
    else:
        world.lake.lose_log(how)

    await world.run_round()
    await world.run_round()

    assert ["x/later"] == world.left()
    assert 1 == world.metrics.value("lakebed_lifecycle_lost_log_total")
    assert (await world.registers.log.read()).value.lost
    assert Mode.SCAN_ONLY is (await world.action("EXPIRATION_DAYS")).mode
    for _ in range(30):  # no event is left of it, so scans find it when it is due
        await world.run_round(0.2)
    assert [] == world.left()
    for _ in range(12):
        await world.run_round(1)
    action = await world.action("EXPIRATION_DAYS")
    assert (Mode.EVENT_DRIVEN, Degraded.NONE) == (action.mode, action.degraded)  # the log reaches far enough again
    world.lake.write("b", "x/new")
    await world.run_round(6.1)
    assert [] == world.left()


async def test_while_it_recovers_status_says_that_events_were_lost() -> None:
    """LOST_LOG, with the reason for the scan."""
    world = Harness()
    await world.policy("b", FIVE_DAYS)
    await world.run_round()
    world.lake.lose_log("remade")
    await world.clock.advance(1)
    await world.worker._monitor.observe()
    await world.worker.compile()

    (row,) = await Operator(world.registers, world.settings).status("b")
    assert ("LOST_LOG", "waiting", "the event log lost events") == (row["degraded"], row["bootstrap"], row["why_scan"])


async def test_events_that_a_crashed_filer_lost_wait_as_exceptions() -> None:
    """Objects of its last moments have no event: they go at their own instant, and the action stays on events."""
    world = Harness()
    await world.policy("b", FIVE_DAYS)
    await world.run_round()
    await world.run_round(3)
    world.lake.write("b", "x/lost")
    world.lake.crash_server(5.0)

    await world.run_round(0.1)
    await world.run_round(0.1)
    (ref,) = (await world.worker.compile()).actions
    assert ["x/lost"] == [one.key for one in (await world.worker.resolver.pending.load(ref)).items.values()]
    assert Mode.EVENT_DRIVEN is (await world.action("EXPIRATION_DAYS")).mode
    await world.run_round(4.7)
    assert ["x/lost"] == world.left()
    await world.run_round(0.11)

    assert [] == world.left()


# Policies, buckets and cursors that come and go.


@pytest.mark.parametrize("how", ["removed", "unreadable", "replaced", "remade", "paused"])
async def test_a_policy_that_was_away_is_scanned_when_it_is_back(how: str) -> None:
    """What fell due meanwhile goes at once: another bucket has moved the cursor past it."""
    world = Harness()
    await beside(world)
    await world.policy("b", FIVE_DAYS)
    await world.run_round()
    world.lake.write("b", "x/a")
    await world.run_round(4)
    away: dict[str, Any] = {"removed": b"", "unreadable": b"<Frob/>", "replaced": None}
    if how == "remade":
        world.lake.remove_bucket("b")
        world.lake.write("b", "x/a")
    elif how == "paused":
        await Operator(world.registers).pause("b")
    elif how == "replaced":
        await world.policy("b", rule(prefix="y/", expiration_days=5))
    else:
        await world.lake.put("b", away[how])
    for _ in range(3):
        await world.run_round(2)
    assert ["x/a"] == world.left()

    if how == "paused":
        await Operator(world.registers).pause("b", paused=False)
    await world.policy("b", FIVE_DAYS)
    await world.run_round(0.01)

    assert [] == world.left()


async def test_what_a_scan_passed_while_its_rule_was_away_is_scanned_again() -> None:
    """The policy was gone for a moment only: nobody compiled without it, and the scan goes on where it was."""
    world = Harness()
    world.lake.write("b", "x/a")
    await world.clock.advance(6 * DAY_S)
    await world.policy("b", FIVE_DAYS)
    snapshot = await world.worker.compile()
    text = world.lake.policies["b"]
    await world.lake.put("b", b"")
    await world.worker.scan("b", snapshot)
    assert ["x/a"] == world.left()

    await world.lake.put("b", text)
    await world.run_round(0.01)

    assert [] == world.left()


async def test_a_policy_that_one_worker_never_saw_back_is_scanned_when_that_worker_sees_it() -> None:
    """It compiled without the bucket all the time, and moved the cursors past it, while another scanned and died."""
    world = Harness(grace_s=1.0 * DAY_S)
    await beside(world)
    await world.policy("b", FIVE_DAYS)
    await world.run_round()
    text = world.lake.policies["b"]
    await world.lake.put("b", b"")
    for _ in range(3):
        await world.run_round(1)
    assert {} == (await world.registers.bucket("b").read()).value.actions
    world.lake.write("b", "x/a")
    await world.lake.put("b", text)
    other = world.new_worker(world.lake)
    for _ in range(2):
        await other.run_round()
    await world.lake.put("b", b"")
    for _ in range(6):
        await world.run_round(1)
    assert ["x/a"] == world.left()

    await world.lake.put("b", text)
    await world.run_round(0.01)

    assert [] == world.left()


@pytest.mark.parametrize("rounding", ["exact", "midnight"])
async def test_what_a_scan_left_because_it_was_not_due_goes_by_its_event(rounding: str) -> None:
    """Rounded to midnight, it is due later than the scan less the delay says; the cursor must stand before it."""
    world = Harness(rounding=rounding)
    at_noon = 0.5 * DAY_S - world.clock.now_ns() / 1e9 % DAY_S + DAY_S
    await world.clock.advance(at_noon)
    world.lake.write("b", "x/a")
    await world.clock.advance(5.25 * DAY_S if rounding == "midnight" else 4.75 * DAY_S)
    await world.policy("b", FIVE_DAYS)
    await world.run_round()
    assert ["x/a"] == world.left()

    await world.run_round(0.5)

    assert [] == world.left()


async def test_loops_that_compile_beside_each_other_do_not_take_each_others_states(monkeypatch: Any) -> None:
    """A policy is removed between two reads: the snapshot with it is whole, and its state says that it left."""
    world = Harness()
    await world.policy("b", FIVE_DAYS)
    await world.run_round()
    buckets, snapshots = world.registers.buckets, []

    async def overtaken() -> list[str]:
        monkeypatch.setattr(world.registers, "buckets", buckets)
        await world.policy("b")
        snapshots.append(await world.worker.compile())
        return await buckets()

    monkeypatch.setattr(world.registers, "buckets", overtaken)

    before = await world.worker.compile()

    (after,) = snapshots
    assert (1, 0) == (len(before.of_bucket("b")), len(after.of_bucket("b")))
    assert before.of_bucket("b")[0].joined
    assert (await world.action("EXPIRATION_DAYS")).gone_since_ns


async def test_a_bucket_made_again_between_two_rounds_is_scanned() -> None:
    """No round saw it without a policy; it is another bucket all the same."""
    world = Harness()
    await beside(world)
    world.lake.write("b", "x/a")
    await world.policy("b", FIVE_DAYS)
    await world.run_round()
    await world.clock.advance(6 * DAY_S)
    old = world.lake.objects["b"]["x/a"]
    world.lake.remove_bucket("b")
    world.lake.objects["b"] = {"x/old": old}  # brought with its time
    world.lake.log = []
    await world.policy("b", FIVE_DAYS)

    await world.run_round()

    assert [] == world.left()
    assert "1" == (await world.state()).incarnation


@pytest.mark.parametrize("how", ["cursor", "small delay", "versioning", "older version"])
async def test_cursors_that_do_not_serve_an_action_lead_to_a_scan(how: str) -> None:
    """A register that is lost, another delay, predicates that matter from now on, a state of an older version."""
    world = Harness()
    wanted = rule(newer_noncurrent=1) if how == "small delay" else FIVE_DAYS
    await beside(world)
    await world.policy("b", wanted)
    await world.run_round()
    started_ns = next(iter((await world.state()).actions.values())).bootstrap_started_at_ns
    await world.run_round(1)
    if how == "cursor":
        await world.store.delete("lifecycle/v1/reader/02.json")
    elif how == "small delay":
        world.settings = msgspec.structs.replace(world.settings, small_delay_s=2.0)
        world.worker = world.new_worker(world.lake)
    elif how == "versioning":
        world.lake.versioned.add("b")
    else:
        await world.registers.bucket("b").change(lambda known: (msgspec.structs.replace(known, version=1), None))

    await world.run_round(0.1)
    await world.run_round(0.1)

    (action,) = (await world.state()).actions.values()
    assert started_ns < action.bootstrap_started_at_ns
    assert action.bootstrap_complete and action.joined


async def test_cursors_of_unused_delays_are_dropped_and_cause_no_lost_log() -> None:
    """The only rule with a delay left long ago; the log has moved on; a new rule with that delay is no loss."""
    world = Harness()
    await world.policy("b", rule(expiration_days=1))
    await world.policy("c", FIVE_DAYS)
    await world.run_round()
    await world.policy("c")
    await world.run_round(0.1)
    assert [str(DAY_NS)] == list((await world.reader()).originals)
    await world.run_round(60)
    world.lake.log_begins_ns = world.clock.now_ns() - 30 * DAY_NS
    await world.policy("c", FIVE_DAYS)

    await world.run_round(0.1)
    await world.run_round(0.1)

    assert 0 == world.metrics.value("lakebed_lifecycle_lost_log_total")
    assert {Mode.EVENT_DRIVEN} == {(await world.action("EXPIRATION_DAYS", one)).mode for one in "bc"}


# Two workers.


def test_a_sweep_that_began_before_a_rewind_is_refused() -> None:
    """By the generation, although the position is the one it read; and by the position and the rules."""
    known = ReaderState(generation=3, originals={"5": Position(10)}, rules={"5": "r"})
    move = Move(5, Position(10), Position(60), "r", "s")

    after = advanced(known, 3, [move])
    assert after is not None and (Position(60), "s") == (after.cursor(5), after.rules_of(5))
    assert advanced(known, 2, [move]) is None
    assert advanced(known, 3, [msgspec.structs.replace(move, seen=Position(9))]) is None
    assert advanced(known, 3, [msgspec.structs.replace(move, seen_rules="q")]) is None


def test_a_rewind_goes_to_the_floor_or_stays_before_it() -> None:
    """Never forward, under a larger generation, not before the log begins; cursors of another log are dropped."""
    known = ReaderState(generation=3, originals={"5": Position(10, 7), "6": Position(4)}, reach="r")

    after = rewound(known, [(5, 10), (6, 9), (None, 8)], generation=9, reach="r", begins_ns=0)
    assert {"5": Position(10, -1), "6": Position(4)} == after.originals
    assert (Position(8, -1), 9) == (after.predicate, after.generation)
    assert 4 == rewound(known, [], generation=1, reach="r", begins_ns=0).generation
    lost = rewound(known, [(6, 9)], generation=9, reach="r", begins_ns=7)  # the log no longer reaches back to 4
    assert Position(9, -1) == lost.cursor(6)
    other = rewound(known, [(5, 10)], generation=9, reach="s", begins_ns=20)
    assert ({"5": Position(20, -1)}, "s") == (other.originals, other.reach)


@pytest.mark.parametrize("form", ["swept while it joined", "compiled before it joined"])
async def test_two_workers_never_undo_each_others_rewind(form: str) -> None:
    """What falls due while a bucket is scanned by one worker goes by its event, whatever the other one swept."""
    world = Harness(batch=1)
    await beside(world)
    await world.run_round()
    other = world.new_worker(world.lake)
    world.lake.write("b", "x/a")
    for number in range(3):
        world.lake.write("other", f"x/{number}")
    await world.clock.advance(4.9 * DAY_S)
    await world.policy("b", FIVE_DAYS)
    cursors = await world.registers.cursors()
    old = await other._compiler.run(cursors)  # its actions of b are not active yet
    blind = world.lake.scan

    async def overlooks(bucket: str, *words: Any, **bounds: Any) -> Any:
        async for family in blind(bucket, *words, **bounds):
            if family.key != "x/a":
                yield family

    world.lake.scan = overlooks  # type: ignore[method-assign, assignment]
    if form == "compiled before it joined":
        await world.run_round()
        await world.clock.advance(0.2 * DAY_S)
        found = await other._reader.run(old, _alive, cursors)
        assert any(sweep.superseded for sweep in found.sweeps)
    else:
        await world.clock.advance(0.2 * DAY_S)
        settle, joined = other.resolver.settle, []

        async def joins_meanwhile(works: Any) -> Any:
            if not joined:
                joined.append(await world.worker.run_round())
            return await settle(works)

        other.resolver.settle = joins_meanwhile  # type: ignore[method-assign]
        found = await other._reader.run(old, _alive, cursors)
        assert joined and any(sweep.superseded for sweep in found.sweeps)

    await world.run_round(0.01)

    assert [] == world.left()


async def _alive() -> None:
    return None


async def test_a_safety_scan_moves_no_cursor_and_a_reseed_does() -> None:
    """A routine scan makes no sibling replay; a reseed moves the delay and the predicates of its actions."""
    world = Harness()
    await world.policy("b", rule(expiration_days=3, tags=(("t", "1"),)))
    await world.run_round()
    first = await world.registers.cursors()
    await world.run_round(8)
    scanned = await world.registers.cursors()
    await Operator(world.registers).reseed(await world.worker.compile(), delay_ns=3 * DAY_NS)
    assert (await world.state()).force_predicate
    await world.run_round(0.001)
    reseeded = await world.registers.cursors()

    assert first[0].generation == scanned[0].generation < reseeded[0].generation


# Exceptions.


async def test_a_removed_version_enqueues_nothing_that_the_stream_brings_anyway() -> None:
    """Expire after 365 days, old versions after one: no exception for any overwritten key, and no reads for them."""
    world = Harness()
    world.lake.versioned.add("b")
    await world.policy("b", rule(expiration_days=365), rule(noncurrent_days=1))
    await world.run_round()
    for number in range(20):
        world.lake.write("b", f"k{number}")
        world.lake.write("b", f"k{number}")
    await world.run_round(1.1)
    await world.run_round(0.1)

    assert {1} == {len(versions) for versions in world.lake.objects["b"].values()}
    for ref in (await world.worker.compile()).actions:
        assert {} == (await world.worker.resolver.pending.load(ref)).items


async def test_the_cap_is_reached_by_real_exceptions_only_and_demotes_the_action() -> None:
    """Late tags are none; three objects whose events were lost are, and then scans take over in time."""
    world = Harness(pending_max=2)
    await world.policy("b", rule(prefix="x", expiration_days=2, tags=(("t", "1"),)))
    await world.run_round()
    for key in ("x1", "x2", "x3", "x4"):
        world.lake.write("b", key)
    await world.run_round(0.1)
    for key in ("x1", "x2", "x3"):
        world.lake.tag("b", key, {"t": "1"})
    await world.run_round(0.1)
    assert Mode.EVENT_DRIVEN is (await world.action("EXPIRATION_DAYS")).mode
    world.lake.crash_server(0.3 * DAY_S)

    await world.run_round(0.01)
    await world.run_round(0.01)
    action = await world.action("EXPIRATION_DAYS")
    assert (Mode.SCAN_ONLY, Degraded.PENDING_FULL) == (action.mode, action.degraded)
    for _ in range(20):
        await world.run_round(0.1)
    assert ["x4"] == world.left()


async def test_a_scan_that_waited_out_an_outage_does_not_put_off_the_next_one() -> None:
    """Only the time worked on it counts: what the scan left goes when it is due, not nine outages later."""
    world, store = failing(retention_s=0.5 * DAY_S)  # shorter than the rule: scans only
    await world.policy("b", rule(expiration_days=1))
    world.lake.write("b", "old")
    await world.clock.advance(1.1 * DAY_S)
    store.deletes["old"] = Unavailable("the store is away")
    await world.run_round()
    began_ns = ((await world.state()).scan or ScanProgress("", 0)).started_at_ns
    await world.clock.advance(1.5 * DAY_S)
    world.lake.write("b", "young")
    store.deletes.clear()

    await world.run_round()

    action = await world.action("EXPIRATION_DAYS")
    assert (Mode.SCAN_ONLY, began_ns) == (action.mode, action.last_scan_ns)
    assert ["young"] == world.left()
    for _ in range(4):
        await world.run_round(0.3)
    assert [] == world.left()


async def test_scans_that_take_long_leave_nine_tenths_of_the_time() -> None:
    """The time worked on the parts, one after the other, is the whole scan's."""
    world, store = failing(retention_s=0.5 * DAY_S)
    world.lake.parts = 2
    await world.policy("b", rule(expiration_days=1))
    for key in "abcd":
        world.lake.write("b", key)
    scan = store.scan

    async def slow(bucket: str, after: str = "", **bounds: str) -> AsyncGenerator[Family, None]:
        async for family in scan(bucket, after, **bounds):
            await world.clock.advance(0.1 * DAY_S)
            yield family

    store.scan = slow  # type: ignore[method-assign]

    await world.run_round()

    action, took_ns = await world.action("EXPIRATION_DAYS"), 4 * DAY_NS // 10
    assert took_ns == action.bootstrap_completed_at_ns - action.last_scan_ns
    assert 9 * took_ns == action.next_scan_ns - action.bootstrap_completed_at_ns


async def test_exceptions_cost_reads_in_proportion_to_their_number() -> None:
    """Each segment is read once by a process, however many follow: 200 items, some 200 writes, few reads."""
    from lakebed.lifecycle.model import ObjectIdentity
    from lakebed.lifecycle.pending import PendingStore
    from lakebed.lifecycle.state import PendingItem

    world = Harness()
    await world.policy("b", FIVE_DAYS)
    (ref,) = (await world.worker.compile()).actions
    gets = 0
    get = world.store.get

    async def counted(key: str) -> Any:
        nonlocal gets
        gets += 1
        return await get(key)

    world.store.get = counted  # type: ignore[method-assign]
    pending = PendingStore(world.registers.runtime)
    for number in range(200):
        await pending.upsert(ref, [PendingItem(f"k{number}", "", 5, ObjectIdentity(1, 1))])
    for _ in range(10):
        assert 200 == len((await pending.load(ref)).items)

    assert gets <= 200


async def test_a_sweep_uses_a_kept_snapshot_only_while_nothing_joined_and_the_log_is_the_same() -> None:
    """For two polls. What changed since makes the next sweep compile; so does a change while it was compiled."""
    world = Harness()
    await beside(world)
    await world.run_round()
    other = world.new_worker(world.lake)
    compiler = other._compiler

    async def kept() -> bool:
        known = (await world.registers.log.read()).value
        return compiler.kept_for(await world.registers.cursors(), known) is not None

    await other.compile()
    before = [await kept()]
    await world.policy("b", FIVE_DAYS)
    await world.run_round()  # another worker: an action joins, under a new generation
    joined = [await kept(), compiler.kept() is not None]
    await other.compile()
    again = await kept()
    other.wake("read")
    woken = await kept()
    await other.compile()
    await world.registers.log.change(changed(lambda known: lost(known, "gone", world.clock.now_ns())))
    lost_log = await kept()
    await other.compile()
    fresh = await kept()
    await world.clock.advance(KEPT_POLLS * world.settings.poll_s)
    late = await kept()

    assert ([True], [False, True], True) == (before, joined, again)
    assert (False, False, True, False) == (woken, lost_log, fresh, late)

    everything = world.lake.all

    async def changes_meanwhile() -> Any:
        found = await everything()
        other.wake("read")
        return found

    world.lake.all = changes_meanwhile  # type: ignore[method-assign]
    await other.compile()
    assert not await kept()


async def test_sweeps_of_a_resting_cluster_read_no_states() -> None:
    """With the snapshot that the scans compiled, a round of events costs the same whatever the number of buckets."""
    world = Harness()
    for number in range(20):
        await world.policy(f"b{number}", rule(expiration_days=1))
    await world.run_round()
    await world.worker.compile()
    read: list[str] = []
    get = world.registers.store.get

    async def noted(key: str, *words: Any, **said: Any) -> Any:
        read.append(key)
        return await get(key, *words, **said)

    world.registers.store.get = noted  # type: ignore[method-assign]
    await world.worker._read(hold=True)

    assert [] == [key for key in read if "/buckets/" in key]
