"""The incremental scan: each manifest is checked once, by whichever process, and its lag tells when it stands still."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from lakebed.batches import acceptance, incremental, paths, seq_ranges
from lakebed.batches.acceptor import Acceptor
from lakebed.batches.incremental import IncrementalScan
from lakebed.batches.model import AcceptedBatch, BatchIdentity, write_record
from lakebed.batches.packer import write_blob
from lakebed.batches.reader import RawBatches
from lakebed.batches.reconciler import Reconciler
from lakebed.console.dashboards.alerts import ALERTS
from lakebed.core.clock import ManualClock
from lakebed.core.errors import Fenced, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runs import RunLog
from lakebed.store.lease import Lease
from lakebed.store.memory import MemoryStore
from lakebed.store.protocol import Store
from support.batch_frames import frame_of, submit
from support.counting_store import CountingStore
from support.runtimes import runtime_on

DAY_S = 86_400.0
MakeScan = Callable[..., IncrementalScan]


@pytest.fixture
def make_scan(manual_clock: ManualClock, ids: Ids, metrics: Metrics) -> MakeScan:
    def make(store: Store, owner: str = "one") -> IncrementalScan:
        runtime = runtime_on(store, manual_clock, ids=ids, metrics=metrics)
        role = Reconciler(runtime, overlap_s=900.0, concurrency=4)
        return IncrementalScan(runtime, role, interval_s=300.0, owner=owner)

    return make


async def lost(store: Store, clock: ManualClock, frame: bytes) -> AcceptedBatch:
    """What a collector leaves that dies before its flush."""
    submitted = submit(frame)
    await write_blob(store, submitted)
    accepted = acceptance.manifest(submitted, at_ns=clock.now_ns(), collector_id="dead", attempt_id="a")
    await store.create(paths.accepted_key(accepted.identity), write_record(accepted))
    return accepted


async def indexed(store: Store) -> list[int]:
    found = [each.entry async for each in RawBatches(store).entries(0, 2**62)]
    return [paths.identity_of(entry.accepted_manifest_key).seq_start for entry in found if entry is not None]


@pytest.mark.parametrize(
    ("ranges", "more", "expected"),
    [
        ((), [(5, 9)], ((5, 9),)),
        (((0, 4),), [(5, 9)], ((0, 9),)),
        (((0, 4), (10, 14)), [(5, 9)], ((0, 14),)),
        (((0, 4),), [(6, 9)], ((0, 4), (6, 9))),
        (((0, 9),), [(3, 5)], ((0, 9),)),
    ],
)
def test_ranges_that_touch_become_one(
    ranges: seq_ranges.SeqRanges, more: list[tuple[int, int]], expected: seq_ranges.SeqRanges
) -> None:
    """A boot whose batches all came is one range, however many they were."""
    assert expected == seq_ranges.union(ranges, more)


def test_gaps_are_where_a_number_may_still_come() -> None:
    """Before, between and behind; a number inside a range is covered, one across a gap is not."""
    ranges = ((2, 4), (10, 14))

    assert [(0, 1), (5, 9), (15, None)] == seq_ranges.gaps(ranges)
    assert [(0, None)] == seq_ranges.gaps(())
    assert (True, False, False) == (
        seq_ranges.covers(ranges, 10, 12),
        seq_ranges.covers(ranges, 4, 10),
        seq_ranges.covers((), 0, 1),
    )


async def test_batches_of_a_collector_that_died_before_its_flush_are_indexed(
    store: MemoryStore, manual_clock: ManualClock, make_scan: MakeScan
) -> None:
    """Without events and without a cold audit; the youngest are left to their collector."""
    await lost(store, manual_clock, frame_of(0, 9))
    await manual_clock.advance(60)
    await lost(store, manual_clock, frame_of(10, 19))

    first = await make_scan(store).scan()
    found = await indexed(store)
    await manual_clock.advance(60)
    second = await make_scan(store).scan()

    assert ({"rollup_work": 1, "indexed": 1}, [0]) == (first.repaired, found)
    assert ({"rollup_work": 1, "indexed": 1}, [0, 10]) == (second.repaired, await indexed(store))


async def test_a_manifest_is_checked_once_and_an_indexed_one_is_not_read(
    manual_clock: ManualClock, make_scan: MakeScan, make_acceptor: Callable[..., Acceptor]
) -> None:
    """The second pass lists behind the watermark; a row is proof enough that blob and manifest were stored."""
    store = CountingStore(clock=manual_clock)
    acceptor = make_acceptor(store)
    for number in range(20):
        await acceptor.accept(submit(frame_of(number * 10, number * 10 + 9)))
    await manual_clock.advance(60)
    store.gets.clear()

    first, second = await make_scan(store).scan(), await make_scan(store).scan()

    assert (20, 0, {}) == (first.checked, first.read, first.repaired)
    assert (0, {}) == (second.checked, second.repaired)
    assert [] == [key for key in store.gets if key.startswith((paths.ACCEPTED, paths.RAW_BLOBS))]


async def test_a_batch_that_comes_out_of_order_is_found_in_the_gap(
    store: MemoryStore, manual_clock: ManualClock, make_scan: MakeScan
) -> None:
    """An agent that returns a parked batch days later delivers it behind others."""
    for number in (0, 1, 3):
        await lost(store, manual_clock, frame_of(number * 10, number * 10 + 9))
    await manual_clock.advance(60)
    await make_scan(store).scan()
    await manual_clock.advance(600)
    await lost(store, manual_clock, frame_of(20, 29))
    await manual_clock.advance(60)

    report = await make_scan(store).scan()

    assert (1, [0, 10, 20, 30]) == (report.checked, sorted(await indexed(store)))


async def test_a_batch_of_one_number_is_found_in_its_gap(
    store: MemoryStore, manual_clock: ManualClock, make_scan: MakeScan
) -> None:
    """The gap ends with the number that it begins with."""
    for start, end in ((0, 4), (6, 9)):
        await lost(store, manual_clock, frame_of(start, end))
    await manual_clock.advance(60)
    await make_scan(store).scan()
    await lost(store, manual_clock, frame_of(5, 5))
    await manual_clock.advance(60)
    await make_scan(store).scan()

    assert [0, 5, 6] == sorted(await indexed(store))


async def test_the_newest_gaps_of_a_boot_with_very_many_are_listed(
    store: MemoryStore, manual_clock: ManualClock, make_scan: MakeScan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a boot delivers next is checked however many numbers it has left out; so is what comes in its last gap."""
    monkeypatch.setattr(incremental, "GAPS_MAX", 2)
    for number in (1, 3, 5, 7):
        await lost(store, manual_clock, frame_of(number * 10, number * 10 + 9))
    await manual_clock.advance(60)
    await make_scan(store).scan()
    for number in (0, 6, 8):
        await lost(store, manual_clock, frame_of(number * 10, number * 10 + 9))
    await manual_clock.advance(60)

    report = await make_scan(store).scan()

    assert (2, [10, 30, 50, 60, 70, 80]) == (report.checked, sorted(await indexed(store)))


async def test_a_boot_that_was_heard_within_the_hour_is_listed_by_every_pass(
    store: MemoryStore, manual_clock: ManualClock, make_scan: MakeScan
) -> None:
    """An agent that sends every half an hour does not wait for its repair."""
    await lost(store, manual_clock, frame_of(0, 9))
    await manual_clock.advance(3000)
    await make_scan(store).scan()
    await lost(store, manual_clock, frame_of(10, 19))
    await manual_clock.advance(60)
    await make_scan(store).scan()

    assert [0, 10] == sorted(await indexed(store))


async def test_a_pass_that_fails_leaves_its_ranges_to_others(
    store: MemoryStore, manual_clock: ManualClock, make_scan: MakeScan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a range is listed, and while what was found is checked: another process need not wait for the lease."""
    await lost(store, manual_clock, frame_of())
    await manual_clock.advance(60)

    async def failing(*_: Any) -> Any:
        raise Unavailable("away")

    for target, name in ((IncrementalScan, "_new_of"), (Reconciler, "check")):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, failing)
            with pytest.raises(Unavailable):
                await make_scan(store, "one").scan()
    report = await make_scan(store, "two").scan()

    assert (1, [0]) == (report.checked, await indexed(store))


async def test_two_reconcilers_share_the_ranges(
    store: MemoryStore, manual_clock: ManualClock, make_scan: MakeScan
) -> None:
    """Under leases no manifest is checked by both, and together they check all."""
    for number in range(40):
        await lost(store, manual_clock, frame_of(agent=f"agent-{number}"))
    await manual_clock.advance(60)

    one, two = await asyncio.gather(make_scan(store, "one").scan(), make_scan(store, "two").scan())

    assert 40 == one.checked + two.checked
    assert 40 == len(await indexed(store))


@pytest.mark.parametrize(
    "changed",
    [{"raw_blob_key": ""}, {"accepted_at_unix_ns": 10**25 // 10**3}, {"frame_sha256": "x"}, {"seq_end": 77}],
    ids=["no blob", "no time", "no hash", "other batch"],
)
async def test_a_malformed_manifest_is_set_aside_by_key_and_the_scan_goes_on(
    store: MemoryStore, manual_clock: ManualClock, make_scan: MakeScan, changed: dict[str, object]
) -> None:
    """It is recorded for an operator, once, and the watermark passes it."""
    bad = acceptance.manifest(submit(frame_of()), at_ns=manual_clock.now_ns(), collector_id="c", attempt_id="a")
    await store.create(paths.accepted_key(bad.identity), write_record(msgspec.structs.replace(bad, **changed)))
    await lost(store, manual_clock, frame_of(10, 19))
    await manual_clock.advance(60)

    first, second = await make_scan(store).scan(), await make_scan(store).scan()

    assert {"damaged_manifest": 1, "set_aside": 1, "rollup_work": 1, "indexed": 1} == first.repaired
    assert (0, [10]) == (second.checked, await indexed(store))
    assert [paths.repair_key(bad.identity)] == [info.key async for info in store.list(paths.REPAIRS)]


async def test_a_quiet_boot_is_listed_less_often_and_a_closed_one_no_longer(
    manual_clock: ManualClock, make_scan: MakeScan
) -> None:
    """A year of restarts does not make each pass list every boot there ever was."""
    store = CountingStore(clock=manual_clock)
    await lost(store, manual_clock, frame_of(boot="old"))
    old = f"{paths.ACCEPTED}agent={b'agent-a'.hex()}/boot={b'old'.hex()}/"
    agent = BatchIdentity("agent-a", "old", 0, 9)
    assert paths.accepted_key(agent).startswith(old)
    listed = []
    for days in (0.001, 4.0, 0.1, 1.0, 40.0, 400.0):
        await manual_clock.advance(days * DAY_S)
        store.lists.clear()
        await make_scan(store).scan()
        listed.append(sum(prefix == old for prefix in store.lists))

    assert [True, True, False, True, True, False] == [count > 0 for count in listed]


async def test_a_backlog_larger_than_one_pass_is_finished_by_the_next_ones(
    store: MemoryStore, manual_clock: ManualClock, make_scan: MakeScan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left out holds the watermark in time back, so the lag says that there is more."""
    monkeypatch.setattr(incremental, "KEYS_MAX", 3)
    for number in range(8):
        await lost(store, manual_clock, frame_of(number * 10, number * 10 + 9))
    scan = make_scan(store)
    await manual_clock.advance(60)
    lags = []
    for _ in range(4):
        await scan.scan()
        lags.append(scan.lag_s())

    assert 8 == len(await indexed(store))
    assert 60 == lags[0] and incremental.GRACE_NS / 1e9 == lags[-1]


@pytest.mark.parametrize("quiet_days", [0.125, 40.0])
async def test_a_backlog_of_a_boot_that_is_long_quiet_is_finished_by_the_next_passes(
    store: MemoryStore,
    manual_clock: ManualClock,
    make_scan: MakeScan,
    monkeypatch: pytest.MonkeyPatch,
    quiet_days: float,
) -> None:
    """What did not fit is neither put off nor closed; the lag says that there is more until all of it is checked."""
    monkeypatch.setattr(incremental, "KEYS_MAX", 3)
    for number in range(8):
        await lost(store, manual_clock, frame_of(number * 10, number * 10 + 9))
    scan = make_scan(store)
    await manual_clock.advance(quiet_days * DAY_S)
    found = []
    for _ in range(3):
        await scan.scan()
        found.append((len(await indexed(store)), scan.lag_s() == incremental.GRACE_NS / 1e9))

    assert [(3, False), (6, False), (8, True)] == found


async def test_the_alert_fires_when_the_reconciler_stands_still(
    store: MemoryStore, manual_clock: ManualClock, make_scan: MakeScan, metrics: Metrics
) -> None:
    """Every pass fails: errors are counted, the lag grows with the clock, and the alert's expression becomes true."""
    alert = next(each for each in ALERTS if each.name == "ReconcilerBehind")
    name, _, threshold = alert.expr.removeprefix("max(").replace(")", "").partition(" > ")

    def fires() -> bool:
        return metrics.value(name) > float(threshold)

    scan = make_scan(store)
    await scan.scan()
    well = fires()

    async def away(prefix: str) -> list[str]:
        raise Unavailable("away")

    store.children = away  # type: ignore[method-assign]
    running = asyncio.create_task(scan.run(RunLog(runtime_on(store, manual_clock), "batches")))
    await manual_clock.advance(3500)
    soon = fires()
    await manual_clock.advance(1000)
    late = fires()
    running.cancel()

    assert (False, False, True) == (well, soon, late)
    assert metrics.value("lakebed_batches_reconciler_errors_total") >= 10


async def test_the_lag_is_that_of_the_range_that_is_furthest_behind(
    store: MemoryStore, manual_clock: ManualClock, metrics: Metrics, ids: Ids, make_scan: MakeScan
) -> None:
    """Also of one that another process holds; that counts with what the other has checked, and not before."""
    runtime = runtime_on(store, manual_clock, ids=ids, metrics=metrics)
    behind = [grace_s := incremental.GRACE_NS / 1e9]
    scan = make_scan(store)
    await scan.scan()
    for number, wait_s in ((0, 600.0), (incremental.RANGES - 1, 60.0)):
        await manual_clock.advance(wait_s)
        held = Lease(runtime, paths.range_lease_key(number), owner="other", lease_s=3600.0)
        taken = await held.acquire()
        await scan.scan()
        behind.append(metrics.value("lakebed_batches_reconciler_lag_seconds"))
        await held.release(taken)
    await manual_clock.advance(5.0)
    await scan.scan()
    behind.append(metrics.value("lakebed_batches_reconciler_lag_seconds"))

    assert [grace_s, 600.0 + grace_s, 60.0 + grace_s, grace_s] == behind


async def test_a_range_that_another_process_has_just_checked_is_not_listed_again(
    manual_clock: ManualClock, make_scan: MakeScan
) -> None:
    """Ten workers scan a lake as often as one does; a command checks at once."""
    store = CountingStore(clock=manual_clock)
    accepted = await lost(store, manual_clock, frame_of())
    folder = paths.accepted_key(accepted.identity).rpartition("/")[0] + "/"
    await manual_clock.advance(60)
    await make_scan(store).scan()
    listed = []
    for wait_s, force in ((0.0, False), (0.0, True), (300.0, False)):
        await manual_clock.advance(wait_s)
        store.lists.clear()
        await make_scan(store, "two").scan(force=force)
        listed.append(folder in store.lists)

    assert [False, True, True] == listed


async def test_a_scan_that_was_overtaken_moves_no_watermark(
    store: MemoryStore, manual_clock: ManualClock, make_scan: MakeScan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It paused for longer than its lease: the watermark stays as the next holder has left it."""
    await lost(store, manual_clock, frame_of(0, 9))
    await manual_clock.advance(60.0)
    one, two = make_scan(store, "one"), make_scan(store, "two")
    check = one._reconciler.check

    async def paused(*args: Any) -> None:
        await check(*args)
        await manual_clock.advance(incremental.LEASE_S + 60.0)
        await two.scan()

    monkeypatch.setattr(one._reconciler, "check", paused)
    with pytest.raises(Fenced):
        await one.scan()

    through_ns = await incremental.checked_through_ns(one._runtime)
    assert manual_clock.now_ns() - incremental.GRACE_NS == through_ns


async def test_marks_of_boots_that_retention_has_removed_go_too(
    store: MemoryStore, manual_clock: ManualClock, make_scan: MakeScan
) -> None:
    """A year of restarts under retention leaves no more than the boots that are there: of one that is closed, and of
    one whose agent is gone too."""
    gone = [await lost(store, manual_clock, frame_of(boot="old")), await lost(store, manual_clock, frame_of(agent="b"))]
    await manual_clock.advance(60)
    await make_scan(store).scan()
    await manual_clock.advance(31 * DAY_S)
    gone.append(await lost(store, manual_clock, frame_of(boot="new")))
    await lost(store, manual_clock, frame_of(boot="last"))
    await manual_clock.advance(60)
    await make_scan(store).scan()
    before = await marked(store, manual_clock)
    for accepted in gone:
        await store.delete(paths.accepted_key(accepted.identity))
    await manual_clock.advance(60)

    await make_scan(store).scan()

    assert (2, 2) == before
    assert (1, 0) == await marked(store, manual_clock)


async def marked(store: Store, clock: ManualClock) -> tuple[int, int]:
    """How many boots the watermarks have, open and closed."""
    found = [(await each.read()).value for each in incremental._registers(runtime_on(store, clock))]
    return sum(len(each.boots) for each in found), sum(len(each.closed) for each in found)


async def test_a_scan_continues_where_another_process_has_just_been(
    store: MemoryStore, manual_clock: ManualClock, make_scan: MakeScan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its marks were read before that process took the range and released it: what it checked is not checked again, and
    what it noted is not taken back."""
    await lost(store, manual_clock, frame_of(0, 9))
    await manual_clock.advance(60)
    await make_scan(store).scan()
    await lost(store, manual_clock, frame_of(10, 19))
    await manual_clock.advance(60)
    one, two = make_scan(store, "one"), make_scan(store, "two")
    take, others = one._take, list[int]()

    async def overtaken(*args: Any) -> Any:
        if not others:
            others.append((await two.scan()).checked)
            await manual_clock.advance(60)
        return await take(*args)

    monkeypatch.setattr(one, "_take", overtaken)
    first = await one.scan()
    again = await make_scan(store).scan()

    assert ([1], 0, 0) == (others, first.checked, again.checked)
