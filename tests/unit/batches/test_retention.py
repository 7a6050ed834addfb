"""Retention of accepted batches: what is old goes whole, and its identity stays a duplicate."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from lakebed.batches import acceptance, paths
from lakebed.batches.codec.index import manifest_id_of
from lakebed.batches.index import AcceptedIndex, IndexedBatch, write_rows
from lakebed.batches.live import LiveBatches
from lakebed.batches.matchers import Selector
from lakebed.batches.model import AcceptedBatch, AcceptedByTime, BatchIdentity, write_record
from lakebed.batches.packer import Packer, write_blob
from lakebed.batches.reader import RawBatches
from lakebed.batches.retention import BatchRetention
from lakebed.batches.settled import TRUST_S, WAIT_S, SettledBoots
from lakebed.batches.sources import WITHOUT_LIVE, SampleSources
from lakebed.batches.sweeper import BlobSweeper
from lakebed.core.clock import ManualClock
from lakebed.core.errors import Unavailable
from lakebed.core.metrics import Metrics
from lakebed.core.runs import ActiveRun
from lakebed.rollups import paths as rollup_paths
from lakebed.rollups.reader import RollupCoverage
from lakebed.store.lease import HeldByAnother
from lakebed.store.memory import MemoryStore
from support.batch_frames import frame_of, submit
from support.batches_gateway import collector
from support.crashing_store import Died, Dying
from support.rollup_fixtures import make_roller
from support.runtimes import runtime_on

DAY_S = 86_400.0
Retain = Callable[..., BatchRetention]


@pytest.fixture
def retain(manual_clock: ManualClock) -> Retain:
    def make(store: Any, days: float = 10.0) -> BatchRetention:
        return BatchRetention(runtime_on(store, manual_clock), retention_days=days, owner="r")

    return make


async def accept(store: MemoryStore, clock: ManualClock, start: int, *, layout: str = "segment") -> AcceptedBatch:
    submitted = submit(frame_of(start, start + 9))
    await write_blob(store, submitted)
    accepted = acceptance.manifest(submitted, at_ns=clock.now_ns(), collector_id="c", attempt_id="a")
    await store.create(paths.accepted_key(accepted.identity), write_record(accepted))
    span = acceptance.span_of(submitted.batch)
    if layout == "segment":
        await write_rows(store, [acceptance.entry_of(accepted, span)], writer="c")
    else:
        for write in acceptance.derived(accepted, span):
            await store.create(write.key, write.data)
    return accepted


async def keys(store: MemoryStore, *prefixes: str) -> list[str]:
    return [info.key for prefix in prefixes for info in [each async for each in store.list(prefix)]]


EVERYTHING = (
    paths.ACCEPTED,
    paths.RAW_BLOBS,
    paths.ACCEPTED_INDEX,
    paths.ACCEPTED_BY_TIME,
    paths.ACCEPTED_BY_BLOB,
    paths.RAW_BLOBS_BY_TIME,
)


@pytest.mark.parametrize("layout", ["segment", "single"])
async def test_old_batches_go_with_all_that_is_derived_and_young_ones_stay(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain, layout: str
) -> None:
    """An hour is settled first, and removed when every collector knows; a report says how much went, and a dry run how
    much will."""
    old = await accept(store, manual_clock, 0, layout=layout)
    await manual_clock.advance(12 * DAY_S)
    young = await accept(store, manual_clock, 10, layout=layout)
    before = await keys(store, *EVERYTHING)

    rehearsed = await retain(store).run(dry_run=True)
    same = await keys(store, *EVERYTHING, paths.SETTLED)
    first = await retain(store).run()
    soon = await retain(store).run()
    still = await keys(store, *EVERYTHING)
    waiting = await retain(store).run(dry_run=True)
    await manual_clock.advance(WAIT_S)
    last = await retain(store).run()

    assert (1, before) == (rehearsed.settled_hours, same)
    for report in (rehearsed, waiting, last):
        assert (1, 1, old.frame_bytes) == (report.removed_hours, report.removed_batches, report.removed_bytes)
    assert (0, 1) == (waiting.settled_hours, waiting.waiting_hours)
    assert (1, 0, 1, before) == (first.settled_hours, first.removed_batches, soon.waiting_hours, still)
    assert (1, 1) == (last.removed_hours, last.removed_batches)
    left = await keys(store, *EVERYTHING)
    assert all(key in before for key in left) and len(left) == len(before) // 2
    assert [young.identity] == [paths.identity_of(key) for key in await keys(store, paths.ACCEPTED)]
    assert 1 == len(await keys(store, paths.RETENTION_REPORTS))


async def test_a_removed_identity_is_a_duplicate_for_ever(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain
) -> None:
    """At a collector that never saw it, years later; the next batch of the boot is new."""
    await accept(store, manual_clock, 0)
    for _ in range(2):
        await manual_clock.advance(12 * DAY_S)
        await retain(store).run()
    await manual_clock.advance(1000 * DAY_S)

    async with collector(store, clock=manual_clock) as (client, part):
        old = (await client.post("/v1/batches", content=frame_of(0, 9))).json()
        new = (await client.post("/v1/batches", content=frame_of(10, 19))).json()
        metrics = part._context.metrics

    assert (True, False) == (old["duplicate"], new["duplicate"])
    assert [1, 1] == [
        metrics.value("lakebed_batches_uploads_total", outcome=each) for each in ("duplicate", "accepted")
    ]
    assert [10] == [paths.identity_of(key).seq_start for key in await keys(store, paths.ACCEPTED)]


async def test_a_row_that_came_since_is_settled_before_its_hour_goes(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain
) -> None:
    """The reconciler indexed it late: its collectors must hear of it too."""
    await accept(store, manual_clock, 0)
    at_ns = manual_clock.now_ns()
    await manual_clock.advance(12 * DAY_S)
    await retain(store).run()
    late = acceptance.manifest(submit(frame_of(10, 19)), at_ns=at_ns, collector_id="c", attempt_id="a")
    await write_rows(store, [acceptance.entry_of(late, acceptance.span_of(submit(frame_of(10, 19)).batch))], writer="r")
    await manual_clock.advance(WAIT_S)

    again = await retain(store).run()
    await manual_clock.advance(WAIT_S)
    last = await retain(store).run()

    assert (1, 0, 2) == (again.waiting_hours, again.removed_batches, last.removed_batches)


@pytest.mark.parametrize("point", range(1, 30))
async def test_retention_that_dies_anywhere_is_finished_by_the_next(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain, point: int
) -> None:
    """Nothing is left, nothing is accepted anew, and garbage collection does not finish what was removed."""
    await accept(store, manual_clock, 0)
    await manual_clock.advance(12 * DAY_S)
    await retain(store).run()
    await manual_clock.advance(WAIT_S)
    try:
        await retain(Dying(store, point)).run()
    except Died:
        await BlobSweeper(runtime_on(store, manual_clock), horizon_s=3600.0, undecided="finish", name="gc").sweep(
            dry_run=False
        )
        await manual_clock.advance(WAIT_S)
    await retain(store).run()

    assert [] == await keys(store, *EVERYTHING)
    assert await SettledBoots(runtime_on(store, manual_clock)).find(BatchIdentity("agent-a", "boot-1", 0, 9))


async def test_a_collector_does_not_accept_with_records_it_cannot_refresh(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """After a while without an answer it does not know what was removed since: the agent retries."""
    settled = SettledBoots(runtime_on(store, manual_clock))
    identity = BatchIdentity("a", "b", 0, 9)
    assert await settled.find(identity) is None

    def away(prefix: str, *, after: str = "") -> Any:
        raise Unavailable("away")

    store.list = away  # type: ignore[method-assign]
    await manual_clock.advance(TRUST_S - 1)
    assert await settled.find(identity) is None
    await manual_clock.advance(2)
    with pytest.raises(Unavailable):
        await settled.find(identity)


async def test_a_query_says_that_retention_has_removed_a_part_of_its_range(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain
) -> None:
    """And only then: a range of the last days is complete."""
    await accept(store, manual_clock, 0)
    for _ in range(2):
        await manual_clock.advance(12 * DAY_S)
        await retain(store).run()
    now_ns = manual_clock.now_ns()

    async with collector(store, clock=manual_clock, query_collector=True) as (client, part):
        await part.follower.poll()
        ranges = [
            f"/v1/query/range?metric=cpu&from={now_ns - round(days * DAY_S * 1e9)}&to={now_ns}" for days in (30, 2)
        ]
        long, short = [(await client.get(path)).json() for path in ranges]

    assert [True] == ["retention_days" in why for why in long["why_partial"]]
    assert (True, False) == (long["partial"], short["partial"])


async def test_rollups_of_removed_hours_go_too(store: MemoryStore, manual_clock: ManualClock, retain: Retain) -> None:
    """Chunks, index chunks and manifests, once their batches are removed; what is young stays.

    Until then they are the only answer that a query of these hours has, and it says that it is complete.
    """
    began_ns = manual_clock.now_ns()
    for start in (0, 10):
        submitted = submit(frame_of(start, start + 9, at_ns=manual_clock.now_ns()))
        await write_blob(store, submitted)
        accepted = acceptance.manifest(submitted, at_ns=manual_clock.now_ns(), collector_id="c", attempt_id="a")
        await store.create(paths.accepted_key(accepted.identity), write_record(accepted))
        await write_rows(store, [acceptance.entry_of(accepted, acceptance.span_of(submitted.batch))], writer="c")
        await manual_clock.advance(60)
        await make_roller(store, manual_clock).run()
        await manual_clock.advance(6 * DAY_S)
    folders = (rollup_paths.ROLLUP, rollup_paths.INDEX, rollup_paths.MANIFESTS)
    before = await keys(store, *folders)

    await make_roller(store, manual_clock, retain_s=10 * DAY_S).run()
    kept = await keys(store, *folders)
    answers = []
    async with collector(store, clock=manual_clock, query_collector=True) as (client, part):
        await part.follower.poll()
        for window in ("", "&window_s=60"):
            path = f"/v1/query/range?metric=cpu&from={began_ns - 60 * 10**9}&to={manual_clock.now_ns()}{window}"
            answers.append((await client.get(path)).json())
    await retain(store).run()
    await manual_clock.advance(WAIT_S)
    await retain(store).run()
    await make_roller(store, manual_clock, retain_s=10 * DAY_S).run()

    points, windows = answers
    assert (before, [False, False]) == (kept, [answer["partial"] for answer in answers])
    assert 20 == sum(len(series["points"]) for series in points["series"])
    assert 20 == sum(bucket[1] for series in windows["series"] for bucket in series["buckets"])
    assert len(await keys(store, *folders)) * 2 == len(before)


async def test_an_hour_whose_index_is_damaged_is_not_removed(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain
) -> None:
    """What a damaged segment says is unknown, so its batches could not be settled."""
    await accept(store, manual_clock, 0)
    (segment,) = await keys(store, paths.ACCEPTED_INDEX)
    await store.delete(segment)
    await store.create(segment, b"half")
    await manual_clock.advance(12 * DAY_S)

    reports = [await retain(store).run() for _ in range(2)]

    assert [1, 1] == [report.damaged_hours for report in reports]
    assert 1 == len(await keys(store, paths.ACCEPTED))
    assert 0 == len([each async for each in RawBatches(store).settled()])


async def test_damaged_hours_do_not_hold_back_those_after_them(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass looks at some hours only; those that it cannot remove are not among them."""
    for start in (0, 10, 20):
        await accept(store, manual_clock, start)
        await manual_clock.advance(3600)
    for damaged in sorted(await keys(store, paths.ACCEPTED_INDEX), key=lambda key: key.split("date=")[1])[:2]:
        store.bucket.overwrite(damaged, b"half")
    await manual_clock.advance(12 * DAY_S)
    monkeypatch.setattr("lakebed.batches.retention.HOURS_MAX", 1)

    await retain(store).run()
    await manual_clock.advance(WAIT_S)
    report = await retain(store).run()

    assert (2, 1, 1) == (report.damaged_hours, report.removed_hours, report.removed_batches)


async def test_without_retention_nothing_is_removed_however_old(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain
) -> None:
    """0 days is the setting that keeps everything, for a command too."""
    await accept(store, manual_clock, 0)
    before = await keys(store, *EVERYTHING)
    for dry_run in (True, False, False):
        await manual_clock.advance(4000 * DAY_S)
        report = await retain(store, days=0.0).run(dry_run=dry_run)
        assert (0, 0) == (report.settled_hours, report.removed_batches)

    assert before == await keys(store, *EVERYTHING) and [] == await keys(store, paths.SETTLED)


async def test_a_dry_run_counts_the_hours_beside_a_damaged_one(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain
) -> None:
    """What will not be removed is not counted as removed."""
    for start in (0, 10):
        await accept(store, manual_clock, start)
        await manual_clock.advance(3600)
    damaged = min(await keys(store, paths.ACCEPTED_INDEX), key=lambda key: key.split("date=")[1])
    store.bucket.overwrite(damaged, b"half")
    await manual_clock.advance(12 * DAY_S)

    report = await retain(store).run(dry_run=True)

    assert (1, 1, 1) == (report.damaged_hours, report.removed_hours, report.removed_batches)


async def test_a_pass_reports_what_went_and_one_that_is_held_by_another_is_no_failure(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain
) -> None:
    """A pass that removed nothing leaves no run; one beside another owner is told apart from a failure."""
    await accept(store, manual_clock, 0)
    found = []
    for pause_s in (0.0, 12 * DAY_S, WAIT_S):
        await manual_clock.advance(pause_s)
        run = ActiveRun("batches", "batch retention", "batches", {})
        await retain(store).work(run)
        found.append((run.rows_out, run.idle))
    other = BatchRetention(runtime_on(store, manual_clock), retention_days=10.0, owner="other")
    await other._lease.acquire()
    with pytest.raises(HeldByAnother) as held:
        await retain(store).work(run)

    assert [(0, True), (0, True), (1, False)] == found
    assert isinstance(held.value, run.answers)


async def test_notes_and_marks_of_removed_batches_go_too_and_the_hour_is_forgotten(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain
) -> None:
    """Nothing is left that names what is gone; those of a young batch stay."""
    made = []
    for start, pause_s in ((0, 12 * DAY_S), (10, 0.0)):
        accepted = await accept(store, manual_clock, start)
        note = acceptance.rollup_work(accepted)
        made.append([note.key, paths.repair_key(accepted.identity)])
        await store.create(note.key, note.data)
        await store.create(made[-1][1], b"{}")
        await manual_clock.advance(pause_s)
    for _ in range(2):
        await retain(store).run()
        await manual_clock.advance(WAIT_S)

    assert sorted(made[1]) == sorted(await keys(store, "rollup-work/v1/", paths.REPAIRS))
    assert {} == (await retain(store).state.read()).value.pending


async def test_what_is_removed_moves_on_through_hours_in_which_nothing_came(
    store: MemoryStore, manual_clock: ManualClock, metrics: Metrics
) -> None:
    """Rollups go by it, also of a lake that fell silent; where nothing was ever removed it says so."""
    role = BatchRetention(runtime_on(store, manual_clock, metrics=metrics), retention_days=10.0, owner="r")
    await role.run()
    never = (await role.state.read()).value.removed_ns
    await accept(store, manual_clock, 0)
    for pause_s in (12 * DAY_S, WAIT_S, 5 * DAY_S):
        await manual_clock.advance(pause_s)
        report = await role.run()

    assert (0, report.before_unix_ns) == (never, (await role.state.read()).value.removed_ns)
    assert 1 == metrics.value("lakebed_batches_retention_removed_total")


async def test_readers_hear_of_a_removal_before_anything_is_gone(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query that meets a missing batch meanwhile calls it removed, not lost."""
    await accept(store, manual_clock, 0)
    await manual_clock.advance(12 * DAY_S)
    retention = retain(store)
    await retention.run()
    await manual_clock.advance(WAIT_S + 1)
    known: list[int] = []
    delete = store.delete

    async def deleting(key: str) -> None:
        if key.startswith(paths.ACCEPTED):
            known.append((await retain(store).state.read()).value.removed_ns)
        await delete(key)

    monkeypatch.setattr(store, "delete", deleting)
    report = await retention.run()

    assert 1 == report.removed_batches
    assert known and all(report.before_unix_ns - 11 * DAY_S * 1e9 < each for each in known)


async def test_a_dry_run_counts_more_hours_than_one_pass_removes(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention that is set for the first time takes several passes: the dry run says what all of them will remove."""
    monkeypatch.setattr("lakebed.batches.retention.HOURS_MAX", 2)
    for number in range(5):
        await accept(store, manual_clock, number * 10)
        await manual_clock.advance(3600.0)
    await manual_clock.advance(12 * DAY_S)

    rehearsed, first = await retain(store).run(dry_run=True), await retain(store).run()

    assert (5, 5, 2) == (rehearsed.removed_hours, rehearsed.removed_batches, first.settled_hours)


async def an_hour_about_to_go(store: MemoryStore, clock: ManualClock, retain: Retain) -> int:
    """A batch whose hour the next pass removes; when it was accepted."""
    await accept(store, clock, 0)
    at_ns = clock.now_ns()
    await clock.advance(12 * DAY_S)
    await retain(store).run()
    await clock.advance(WAIT_S)
    return at_ns


async def test_a_query_during_which_retention_removes_batches_says_so(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks for what was removed after it has read: when it began, nothing was."""
    at_ns = await an_hour_about_to_go(store, manual_clock, retain)
    raw = RawBatches(store)
    live = LiveBatches(runtime_on(store, manual_clock), bytes_max=0, window_s=0.0)
    coverage = RollupCoverage(store, raw)
    sources = SampleSources(live, raw, coverage, follower=None, spool=None, batches_max=100, clock=manual_clock)
    entries, removed = raw.entries, []

    async def removing(*args: Any, **more: Any) -> AsyncIterator[IndexedBatch]:
        removed.append((await retain(store).run()).removed_batches)
        async for each in entries(*args, **more):
            yield each

    monkeypatch.setattr(raw, "entries", removing)
    reading = await sources.points([].append, Selector("cpu", ()), at_ns, at_ns + 10**9, manual_clock.now_ns())

    assert ([1], 0) == (removed, reading.sources["raw"])
    assert [True] == ["batches.retention_days" in why for why in reading.why() if why != WITHOUT_LIVE]


async def test_a_segment_that_is_written_during_a_removal_stays(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reconciler indexes a batch of the hour meanwhile: its row is not lost, and it goes with the next passes."""
    at_ns = await an_hour_about_to_go(store, manual_clock, retain)
    late, delete = list[AcceptedBatch](), store.delete

    async def deleting(key: str) -> None:
        await delete(key)
        if not late:
            late.append(await accept(store, ManualClock(at_ns), 10))

    monkeypatch.setattr(store, "delete", deleting)
    await retain(store).run()
    rows = [row async for some in AcceptedIndex(store).rows_of_hour(paths.hour_of(at_ns)) for row in some]
    for _ in range(2):
        await retain(store).run()
        await manual_clock.advance(WAIT_S)
    await retain(store).run()

    assert [10] == [paths.identity_of(row.accepted_manifest_key).seq_start for row in rows]
    assert [] == await keys(store, *EVERYTHING)
    assert await SettledBoots(runtime_on(store, manual_clock)).find(late[0].identity)


async def test_a_row_that_comes_as_its_hour_is_about_to_go_is_settled_first(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the records were compared, before anything is gone: its identity must be known for ever, too."""
    at_ns = await an_hour_about_to_go(store, manual_clock, retain)
    late, replace = list[AcceptedBatch](), store.replace

    async def announcing(key: str, *args: Any) -> Any:
        written = await replace(key, *args)
        if key == paths.RETENTION_STATE and not late:
            late.append(await accept(store, ManualClock(at_ns), 10))
        return written

    monkeypatch.setattr(store, "replace", announcing)
    await retain(store).run()
    kept = await keys(store, paths.ACCEPTED)
    for _ in range(2):
        await retain(store).run()
        await manual_clock.advance(WAIT_S)
    await retain(store).run()

    assert paths.accepted_key(late[0].identity) in kept
    assert [] == await keys(store, *EVERYTHING)
    assert await SettledBoots(runtime_on(store, manual_clock)).find(late[0].identity)


async def test_a_pack_with_a_frame_that_nobody_decided_outlasts_its_hour(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain
) -> None:
    """Other batches of the same boot were removed; this one's acceptance is completed from the pack."""
    frames = [submit(frame_of(number, number + 9)) for number in (0, 10)]
    packer = Packer(runtime_on(store, manual_clock), wait_s=1.0)
    storing = [asyncio.ensure_future(packer.store(each)) for each in frames]
    await manual_clock.advance(2.0)
    places = await asyncio.gather(*storing)
    made = acceptance.manifest(frames[0], places[0], at_ns=manual_clock.now_ns(), collector_id="c", attempt_id="a")
    await store.create(paths.accepted_key(made.identity), write_record(made))
    await write_rows(store, [acceptance.entry_of(made, acceptance.span_of(frames[0].batch))], writer="c")
    await manual_clock.advance(12 * DAY_S)
    await retain(store).run()
    await manual_clock.advance(WAIT_S)

    last = await retain(store).run()
    sweeper = BlobSweeper(runtime_on(store, manual_clock), horizon_s=3600.0, undecided="finish", name="gc")

    assert (1, 1) == (last.removed_hours, last.removed_batches)
    assert {"finish": 1} == (await sweeper.sweep(dry_run=False)).counts
    assert [frames[1].batch.identity] == [paths.identity_of(key) for key in await keys(store, paths.ACCEPTED)]


async def test_a_long_removal_keeps_its_lease(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An hour of a large fleet takes longer than a lease: no second process begins the same hour."""
    monkeypatch.setattr("lakebed.batches.index.GROUP", 1)
    for number in range(6):
        await accept(store, manual_clock, number * 10)
    await manual_clock.advance(12 * DAY_S)
    await retain(store).run()
    await manual_clock.advance(WAIT_S)
    delete, others = store.delete, list[str]()

    async def slow(key: str) -> None:
        await delete(key)
        if key.startswith(paths.ACCEPTED):
            await manual_clock.advance(300.0)
            with pytest.raises(HeldByAnother):
                await retain(store).run()
            others.append(key)

    monkeypatch.setattr(store, "delete", slow)
    report = await retain(store).run()

    assert (6, 6) == (len(others), report.removed_batches)


async def test_a_malformed_manifest_in_a_pack_does_not_keep_the_hour(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pack stays for the sweeper, the hour goes."""
    frames = [submit(frame_of(number, number + 9)) for number in (0, 10)]
    packer = Packer(runtime_on(store, manual_clock), wait_s=1.0)
    storing = [asyncio.ensure_future(packer.store(each)) for each in frames]
    await manual_clock.advance(2.0)
    for submitted, place in zip(frames, await asyncio.gather(*storing), strict=True):
        made = acceptance.manifest(submitted, place, at_ns=manual_clock.now_ns(), collector_id="c", attempt_id="a")
        if submitted is frames[0]:
            await store.create(paths.accepted_key(made.identity), write_record(made))
            await write_rows(store, [acceptance.entry_of(made, acceptance.span_of(submitted.batch))], writer="c")
        else:
            await store.create(paths.accepted_key(made.identity), b"{}")
    await manual_clock.advance(12 * DAY_S)
    await retain(store).run()
    await manual_clock.advance(WAIT_S)

    last = await retain(store).run()

    assert (1, 0) == (last.removed_hours, last.damaged_hours)
    assert 1 == len(await keys(store, paths.RAW_BLOBS))
    sweeper = BlobSweeper(runtime_on(store, manual_clock), horizon_s=3600.0, undecided="finish", name="gc")
    assert {"keep": 1} == (await sweeper.sweep(dry_run=False)).counts


# Rows of the index.


def rows_of(*starts: int, at_ns: int = 10**9) -> list[AcceptedByTime]:
    found = []
    for number, start in enumerate(starts):
        submitted = submit(frame_of(start, start + 9))
        accepted = acceptance.manifest(submitted, at_ns=at_ns + number * 10**9, collector_id="c", attempt_id="a")
        found.append(acceptance.entry_of(accepted, acceptance.span_of(submitted.batch)))
    return found


async def shown(index: AcceptedIndex, from_ns: int, to_ns: int, **more: Any) -> list[AcceptedByTime | None]:
    return [each.entry async for each in index.entries(from_ns, to_ns, **more)]


async def test_a_segment_that_was_damaged_is_whole_again_when_its_rows_are_written_again(store: MemoryStore) -> None:
    """Its key is the hash of its bytes: what is there instead is replaced."""
    rows = rows_of(0, 10)
    await write_rows(store, rows, writer="c")
    (segment,) = await keys(store, paths.ACCEPTED_INDEX)
    await store.delete(segment)
    await store.create(segment, b"half")

    await write_rows(store, rows, writer="c")

    assert rows == await shown(AcceptedIndex(store), 0, 10**12)


async def test_of_two_rows_of_a_batch_the_one_that_was_stored_last_counts(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """A repaired row takes the place of a wrong one, in listings and in look-ups."""
    (right,) = rows_of(0)
    wrong = msgspec.structs.replace(right, samples=right.samples + 1)
    await write_rows(store, [wrong], writer="c")
    await manual_clock.advance(1.0)
    await write_rows(store, [right], writer="r")
    await manual_clock.advance(1.0)
    others = rows_of(0, 20, at_ns=right.accepted_at_unix_ns)  # the same row in a third segment
    await write_rows(store, others, writer="d")

    listed = await shown(AcceptedIndex(store), 0, 10**12)
    found = await AcceptedIndex(store).find([manifest_id_of(right)])

    assert others == listed
    assert [right] == list(found.values())


async def test_a_segment_is_passed_over_only_when_all_of_its_rows_were_given(store: MemoryStore) -> None:
    """A reader that began in its middle, or ended there, gets the other rows later."""
    rows = rows_of(0, 10, 20)
    await write_rows(store, rows, writer="c")
    seen: dict[str, int] = {}
    index = AcceptedIndex(store)
    first, last = rows[0].accepted_at_unix_ns, rows[2].accepted_at_unix_ns

    parts = [await shown(index, first + 1, last, seen=seen), await shown(index, first, last - 1, seen=seen)]
    whole = await shown(index, first, last, seen=seen)

    assert [rows[1:], rows[:2], rows] == [*parts, whole]
    assert [] == await shown(index, first, last, seen=seen)


async def test_an_hour_is_removed_after_the_whole_wait_and_not_before(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain
) -> None:
    """Collectors that trust what they know of a boot hear of it within the wait, and not a moment later."""
    await accept(store, manual_clock, 0)
    await manual_clock.advance(12 * DAY_S)
    await retain(store).run()
    await manual_clock.advance(WAIT_S - 1.0)

    early = await retain(store).run()
    await manual_clock.advance(1.0)
    late = await retain(store).run()

    assert (1, 0, 1) == (early.waiting_hours, early.removed_hours, late.removed_hours)


async def test_what_was_removed_is_not_taken_back_by_an_older_hour(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain
) -> None:
    """An hour before the removed ones appears, of a batch that was indexed late: queries are still told of them all."""
    begin_ns = manual_clock.now_ns()
    await manual_clock.advance(5 * DAY_S)
    await accept(store, manual_clock, 0)
    await manual_clock.advance(12 * DAY_S)
    retention = retain(store)
    await retention.run()
    await manual_clock.advance(WAIT_S)
    await retention.run()
    removed_ns = (await retention.state.read()).value.removed_ns
    await accept(store, ManualClock(begin_ns), 10)
    await retention.run()
    await manual_clock.advance(WAIT_S)

    assert 1 == (await retention.run()).removed_hours
    assert removed_ns == (await retention.state.read()).value.removed_ns > begin_ns + round(5 * DAY_S * 1e9)


async def test_a_row_that_came_since_has_the_whole_wait_for_itself(
    store: MemoryStore, manual_clock: ManualClock, retain: Retain
) -> None:
    """The wait of its hour begins again when it is settled: a collector may not know of it before."""
    await accept(store, manual_clock, 0)
    at_ns = manual_clock.now_ns()
    await manual_clock.advance(12 * DAY_S)
    await retain(store).run()
    await accept(store, ManualClock(at_ns), 10)
    await manual_clock.advance(WAIT_S)
    await retain(store).run()
    await manual_clock.advance(WAIT_S - 1.0)

    early = await retain(store).run()
    await manual_clock.advance(1.0)
    last = await retain(store).run()

    assert (1, 0, 2) == (early.waiting_hours, early.removed_batches, last.removed_batches)
