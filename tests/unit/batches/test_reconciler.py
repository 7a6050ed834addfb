"""The reconciler and the sweeper: everything derived comes back, and nothing accepted ever goes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec
import pytest

from lakebed.batches import acceptance, paths
from lakebed.batches.acceptor import Acceptor, store_conflict
from lakebed.batches.codec.index import OrphanRow
from lakebed.batches.codec.pack import PackedFrame
from lakebed.batches.index import write_rows
from lakebed.batches.live import LiveBatches
from lakebed.batches.model import AcceptedBatch, BatchIdentity, write_record
from lakebed.batches.packer import write_blob
from lakebed.batches.reader import RawBatches, verified
from lakebed.batches.reconciler import AuditProgress, Reconciler, ReconcileReport
from lakebed.batches.sweeper import BlobSweeper, Evidence, judge
from lakebed.core.clock import ManualClock
from lakebed.core.errors import NotFound, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.rollups.paths import ROLLUP_WORK
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo, StoredObject, Written, read_record
from lakebed.store.protocol import Store
from support.bad_batches import put
from support.batch_frames import frame_of, submit
from support.runtimes import runtime_of, runtime_on

HORIZON_S = 3600.0


@pytest.fixture
def make_reconciler(manual_clock: ManualClock, ids: Ids, metrics: Metrics) -> Callable[..., Reconciler]:
    def make(store: Store, **more: object) -> Reconciler:
        return Reconciler(
            runtime_on(store, manual_clock, ids=ids, metrics=metrics), overlap_s=900.0, concurrency=4, **more
        )

    return make


@pytest.fixture
def make_sweeper(manual_clock: ManualClock, ids: Ids, metrics: Metrics) -> Callable[..., BlobSweeper]:
    def make(store: Store, undecided: str = "finish") -> BlobSweeper:
        return BlobSweeper(
            runtime_on(store, manual_clock, ids=ids, metrics=metrics),
            horizon_s=HORIZON_S,
            undecided=undecided,
            name="gc:test",
        )

    return make


async def keys(store: Store, prefix: str) -> list[str]:
    return [info.key async for info in store.list(prefix)]


async def indexed(store: Store) -> list[BatchIdentity]:
    """The batches of the index, as a reader finds them."""
    found = [each.entry async for each in RawBatches(store).entries(0, 2**62)]
    return [paths.identity_of(entry.accepted_manifest_key) for entry in found if entry is not None]


async def accepted_without_aftermath(store: Store, clock: ManualClock, frame: bytes) -> AcceptedBatch:
    """What a collector leaves that dies right after creating its manifest."""
    submitted = submit(frame)
    await write_blob(store, submitted)
    accepted = acceptance.manifest(submitted, at_ns=clock.now_ns(), collector_id="dead", attempt_id="a")
    await store.create(paths.accepted_key(accepted.identity), write_record(accepted))
    return accepted


async def test_an_audit_derives_everything_a_dead_collector_left_out(
    store: MemoryStore, manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler], metrics: Metrics
) -> None:
    """Its index row is written, rollup work is requested, and live state learns of the batch."""
    accepted = await accepted_without_aftermath(store, manual_clock, frame_of())
    live = LiveBatches(runtime_of(manual_clock, metrics=metrics), bytes_max=10**7, window_s=3600)

    report = await make_reconciler(store, refresh=lambda a, batch: live.add(a.accepted_at_unix_ns, batch)).audit()

    assert report.repaired == {"indexed": 1, "rollup_work": 1}
    assert [accepted.identity] == await indexed(store)
    assert len(await keys(store, ROLLUP_WORK)) == 1
    assert accepted.identity in live


async def test_more_manifests_than_are_looked_up_together_are_repaired_once_each(
    store: MemoryStore,
    manual_clock: ManualClock,
    make_reconciler: Callable[..., Reconciler],
    metrics: Metrics,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The report and the counter say how many, whatever the groups."""
    monkeypatch.setattr("lakebed.batches.reconciler.GROUP", 2)
    for n in range(5):
        await accepted_without_aftermath(store, manual_clock, frame_of(n * 10, n * 10 + 9))
    infos = [info async for info in store.list(paths.ACCEPTED)]
    found = []
    for _ in range(2):
        report = ReconcileReport("hot")
        await make_reconciler(store).check(infos, report)
        found.append((report.checked, report.read, report.repaired.get("indexed", 0)))

    assert [(5, 5, 5), (5, 0, 0)] == found
    assert 10 == metrics.value("lakebed_batches_reconciled_total", path="hot")


async def test_a_manifest_whose_blob_is_of_another_batch_is_marked_and_not_indexed(
    store: MemoryStore, manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler]
) -> None:
    """Its bytes are whole and hashed; a query of it would be answered with the samples of another sender."""
    other = submit(frame_of(agent="other"))
    await write_blob(store, other)
    mine = BatchIdentity("agent-a", "boot-1", 0, 9)
    place = acceptance.whole_place(other.sha256, len(other.frame))
    accepted = acceptance.manifest_of(
        mine, other.sha256, place, at_ns=manual_clock.now_ns(), collector_id="c", attempt_id="a"
    )
    await store.create(paths.accepted_key(mine), write_record(accepted))

    report = await make_reconciler(store).audit()

    assert ({"marked_blob": 1}, []) == (report.repaired, await indexed(store))


async def test_a_second_audit_has_nothing_to_do(
    store: MemoryStore, manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler]
) -> None:
    """Repairs are idempotent, and any number of reconcilers may run."""
    for n in range(5):
        await accepted_without_aftermath(store, manual_clock, frame_of(n * 10, n * 10 + 9))

    await asyncio.gather(*(make_reconciler(store).audit() for _ in range(3)))
    again = await make_reconciler(store).audit()

    assert (again.checked, again.repaired) == (5, {})
    assert len(await indexed(store)) == 5


async def test_what_the_reconciler_derives_is_what_the_winner_would_have(
    store: MemoryStore, manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler]
) -> None:
    """Derived bytes are a function of the acceptance, so winner and reconciler never disagree."""
    frame = frame_of()
    accepted = await accepted_without_aftermath(store, manual_clock, frame)
    await make_reconciler(store).audit()

    found = [each.entry async for each in RawBatches(store).entries(0, manual_clock.now_ns())]
    assert [acceptance.entry_of(accepted, acceptance.span_of(submit(frame).batch))] == found


@pytest.mark.parametrize("how", ["half-written", "empty", "of another batch", "of other times"])
async def test_a_single_entry_by_time_that_is_damaged_is_superseded_by_a_row(
    store: MemoryStore, manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler], how: str
) -> None:
    """Whatever an object of the single layout says instead of what follows from the manifest and its blob; once."""
    accepted = await accepted_without_aftermath(store, manual_clock, frame_of())
    other = await accepted_without_aftermath(store, manual_clock, frame_of(10, 19))
    span = acceptance.span_of(submit(frame_of()).batch)
    entry = acceptance.by_time(accepted, span)
    bad = {
        "half-written": entry.data[:-20],
        "empty": b"",
        "of another batch": acceptance.by_time(other, span).data,
        "of other times": acceptance.by_time(accepted, msgspec.structs.replace(span, last_ns=span.last_ns + 1)).data,
    }[how]
    await put(store, entry.key, bad)

    report = await make_reconciler(store).audit()
    again = await make_reconciler(store).audit()

    assert ({"rollup_work": 2, "indexed": 2}, {}) == (report.repaired, again.repaired)
    assert acceptance.entry_of(accepted, span) in [
        each.entry async for each in RawBatches(store).entries(0, manual_clock.now_ns())
    ]


async def test_the_single_layout_is_derived_on_demand(
    store: MemoryStore, manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler]
) -> None:
    """Three objects for each row, with the bytes that earlier versions wrote; readers still return each batch once."""
    accepted = await accepted_without_aftermath(store, manual_clock, frame_of())
    await make_reconciler(store).audit()

    report = await make_reconciler(store).derive_single_objects()
    again = await make_reconciler(store).derive_single_objects()

    assert ({"single_object": 3}, {}) == (report.repaired, again.repaired)
    for write in acceptance.derived(accepted, acceptance.span_of(submit(frame_of()).batch)):
        assert write.data == (await store.get(write.key)).data
    assert [accepted.identity] == await indexed(store)


async def test_a_segment_that_is_damaged_is_replaced_by_a_cold_audit(
    store: MemoryStore, manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler]
) -> None:
    """Its key names the hash of its bytes: other bytes are not believed, its batches are indexed anew, and it goes."""
    accepted = await accepted_without_aftermath(store, manual_clock, frame_of())
    await make_reconciler(store, name="other").audit()
    (segment,) = await keys(store, paths.ACCEPTED_INDEX)
    await put(store, segment, (await store.get(segment)).data[:-3])
    lost = await indexed(store)
    await manual_clock.advance(1)

    report = await make_reconciler(store).audit()

    assert [] == lost
    assert {"indexed": 1, "removed_segment": 1} == report.repaired
    assert [accepted.identity] == await indexed(store)


async def test_a_proof_never_goes_back(
    manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler], ids: Ids, metrics: Metrics
) -> None:
    """An audit that ends late, after a later one has, leaves the later one's proof and its successor alone."""
    running: list[AuditProgress] = []

    class Overtaken(MemoryStore):
        async def list(self, prefix: str, *, after: str = ""):  # type: ignore[no-untyped-def]
            if prefix == paths.QUARANTINE and not running:
                await manual_clock.advance(60)
                now_ns = manual_clock.now_ns()
                later = AuditProgress(now_ns, now_ns, 1, 1, running_since_ns=now_ns)
                running.append(later)
                await reconciler.audits.change(lambda _: (later, None))
            async for info in super().list(prefix, after=after):
                yield info

    reconciler = make_reconciler(Overtaken(clock=manual_clock))
    await reconciler.audit()

    assert running == [(await reconciler.audits.read()).value]


async def test_a_missing_or_damaged_blob_is_marked_until_it_is_good_again(
    store: MemoryStore, manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler]
) -> None:
    """Damage is an object a person can list; the mark goes when the blob is back."""
    frame = frame_of()
    accepted = await accepted_without_aftermath(store, manual_clock, frame)
    await store.delete(accepted.raw_blob_key)

    missing = await make_reconciler(store).audit()
    marked = await keys(store, paths.REPAIRS)
    await store.create(accepted.raw_blob_key, b"rotten")
    damaged = await make_reconciler(store).audit()
    await store.delete(accepted.raw_blob_key)
    await store.create(accepted.raw_blob_key, frame)
    mended = await make_reconciler(store).audit()

    assert missing.repaired["marked_blob"] == 1
    assert [paths.repair_key(accepted.identity)] == marked
    assert damaged.repaired == {}
    assert mended.repaired["unmarked_blob"] == 1
    assert await keys(store, paths.REPAIRS) == []


async def test_a_batch_that_retention_removes_during_a_repair_is_not_reported_as_damaged(
    store: MemoryStore,
    manual_clock: ManualClock,
    make_reconciler: Callable[..., Reconciler],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its manifest was read, and then both went: no record stays of a blob that nothing needs."""
    accepted = await accepted_without_aftermath(store, manual_clock, frame_of())
    get = store.get

    async def removed_behind(key: str) -> StoredObject:
        found = await get(key)
        if key == paths.accepted_key(accepted.identity):
            await store.delete(key)
            await store.delete(accepted.raw_blob_key)
        return found

    monkeypatch.setattr(store, "get", removed_behind)
    report = await make_reconciler(store).audit()

    assert ({}, []) == (report.repaired, await keys(store, paths.REPAIRS))


@pytest.mark.parametrize("agents", [3, 1], ids=["between two agents", "inside one boot"])
async def test_an_audit_cut_off_is_resumed_from_its_cursor(
    manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler], monkeypatch: pytest.MonkeyPatch, agents: int
) -> None:
    """A crash in the middle loses no proof and repeats little: the next audit begins behind what was repaired, wherever
    among the batches of an agent that is."""
    monkeypatch.setattr("lakebed.batches.reconciler.SAVE_EVERY", 4)

    class Dying(MemoryStore):
        reads = 0

        async def get(self, key: str):  # type: ignore[no-untyped-def]
            if key.startswith(paths.ACCEPTED):
                self.reads += 1
                if self.reads == 10:
                    raise Unavailable("down")
            return await super().get(key)

    store = Dying(clock=manual_clock)
    for n in range(12):
        await accepted_without_aftermath(store, manual_clock, frame_of(n * 10, n * 10 + 9, agent=f"agent-{n % agents}"))
    with pytest.raises(Unavailable):
        await make_reconciler(store).audit()
    await manual_clock.advance(60)

    report = await make_reconciler(store).audit()

    audit = (await make_reconciler(store).audits.read()).value
    assert report.checked == 4
    assert len(await indexed(store)) == 12
    assert 0 < audit.audited_through_ns < manual_clock.now_ns() - 59 * 10**9


async def test_an_auditor_that_was_overtaken_leaves_the_next_audit_alone(
    manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another finished its audit and the next one has begun when it wakes up: its progress is not that one's."""
    monkeypatch.setattr("lakebed.batches.reconciler.SAVE_EVERY", 4)

    class Overtaken(MemoryStore):
        overtakes: Callable[[], Awaitable[None]] | None = None

        async def get(self, key: str) -> StoredObject:
            if key.startswith(paths.ACCEPTED) and self.overtakes is not None:
                overtakes, self.overtakes = self.overtakes, None
                await overtakes()
            return await super().get(key)

    store = Overtaken(clock=manual_clock)
    for n in range(8):
        await accepted_without_aftermath(store, manual_clock, frame_of(n * 10, n * 10 + 9))

    async def others() -> None:
        await make_reconciler(store).audit()
        await manual_clock.advance(60)
        began = manual_clock.now_ns()
        next_one = make_reconciler(store)
        await next_one.audits.change(lambda at: (msgspec.structs.replace(at, running_since_ns=began, cursor=""), None))

    store.overtakes = others
    await make_reconciler(store).audit()
    for key in await keys(store, paths.ACCEPTED_INDEX):
        await store.delete(key)

    report = await make_reconciler(store).audit()

    assert (8, 8) == (report.checked, len(await indexed(store)))


async def test_a_damaged_manifest_does_not_stop_an_audit(
    store: MemoryStore, manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler]
) -> None:
    """One object that cannot be read is counted and stepped over."""
    await store.create(paths.accepted_key(BatchIdentity("agent-0", "boot", 0, 9)), b"{")
    await accepted_without_aftermath(store, manual_clock, frame_of())

    report = await make_reconciler(store).audit()

    assert (report.repaired["damaged_manifest"], report.repaired["indexed"]) == (1, 1)


async def test_what_an_audit_repairs_is_counted_as_it_is_reported(
    store: MemoryStore, manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler], metrics: Metrics
) -> None:
    """Each repair under its name, and every manifest once, also when there was nothing to repair."""
    await store.create(paths.accepted_key(BatchIdentity("agent-0", "boot", 0, 9)), b"{")
    lost = await accepted_without_aftermath(store, manual_clock, frame_of(10, 19))
    await accepted_without_aftermath(store, manual_clock, frame_of())
    await store.delete(lost.raw_blob_key)

    first = await make_reconciler(store).audit()
    counted = {name: metrics.value("lakebed_batches_repairs_total", repair=name) for name in first.repaired}
    await make_reconciler(store).audit()

    assert {"damaged_manifest", "set_aside", "marked_blob", "indexed", "rollup_work"} == first.repaired.keys()
    assert first.repaired == counted
    assert 2 * 3 == metrics.value("lakebed_batches_reconciled_total", path="cold")


async def test_a_quarantine_manifest_gets_its_reverse_reference_back(
    store: MemoryStore, manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler]
) -> None:
    """Garbage collection trusts the reference's absence, so an audit restores it first."""
    accepted = await accepted_without_aftermath(store, manual_clock, frame_of())
    submitted = submit(frame_of(value=2.0))
    record = acceptance.conflict(accepted, submitted.sha256, at_ns=1, collector_id="c")
    await store_conflict(store, record)
    reference = paths.quarantine_by_blob_key(submitted.sha256, accepted.identity)
    await store.delete(reference)

    report = await make_reconciler(store).audit()

    assert report.repaired["quarantine_by_blob"] == 1
    assert [reference] == await keys(store, paths.QUARANTINE_BY_BLOB)


async def test_a_damaged_quarantine_manifest_still_keeps_its_blob(
    store: MemoryStore, manual_clock: ManualClock, make_sweeper: Callable[..., BlobSweeper]
) -> None:
    """Its key names the blob: an audit restores the reference from it, so garbage collection keeps the bytes."""
    accepted = await accepted_without_aftermath(store, manual_clock, frame_of())
    refused = submit(frame_of(value=2.0))
    await write_blob(store, refused)
    await store.create(paths.quarantine_key(accepted.identity, refused.sha256), b"{")
    await manual_clock.advance(HORIZON_S + 1)

    report = await make_sweeper(store).sweep(dry_run=False)

    assert {"keep": 2} == report.counts
    assert refused.frame == (await store.get(refused.blob_key)).data


# Garbage collection.

RIPE = Evidence("mine", 0, now_ns=10, horizon_ns=5)


@pytest.mark.parametrize(
    ("changes", "verdict", "reason"),
    [
        ({"existing_sha256": "theirs"}, "delete", "other bytes"),
        ({"existing_sha256": "theirs", "now_ns": 4}, "keep", "younger"),
        ({"existing_sha256": "theirs", "quarantined": True}, "keep", "quarantine manifest refers"),
        ({"existing_sha256": "theirs", "problem": "torn"}, "keep", "cannot be read"),
        ({"existing_sha256": "mine"}, "keep", "accepted manifest refers"),
        ({}, "finish", "completed"),
        ({"boot_held": True}, "keep", "held"),
    ],
)
def test_each_condition_alone_keeps_a_blob(changes: dict[str, object], verdict: str, reason: str) -> None:
    """Age, both references and the decided identity are needed; each refusal gives the reason."""
    found = judge(msgspec.structs.replace(RIPE, **changes), "finish")

    assert verdict == found.verdict
    assert reason in found.reason


async def test_a_race_lost_with_other_bytes_is_garbage_after_the_horizon(
    store: MemoryStore, manual_clock: ManualClock, make_sweeper: Callable[..., BlobSweeper]
) -> None:
    """An orphan whose identity is decided for other bytes goes; the accepted blob and everything else stays."""
    accepted = await accepted_without_aftermath(store, manual_clock, frame_of())
    orphan = submit(frame_of(value=2.0))
    await write_blob(store, orphan)
    await manual_clock.advance(HORIZON_S + 1)

    rehearsal = await make_sweeper(store).sweep(dry_run=True)
    report = await make_sweeper(store).sweep(dry_run=False)

    assert rehearsal.counts == report.counts == {"delete": 1, "keep": 1}
    assert [accepted.raw_blob_key] == await keys(store, paths.RAW_BLOBS)
    assert len(await keys(store, paths.GC_REPORTS)) == 1


@pytest.mark.parametrize("source", ["all", "by_time"])
async def test_a_quarantined_blob_is_kept_however_old_it_is(
    store: MemoryStore,
    manual_clock: ManualClock,
    make_sweeper: Callable[..., BlobSweeper],
    source: Literal["all", "by_time"],
) -> None:
    """The bytes of a conflict stay for the operator who decides it, through a real sweep past the horizon."""
    accepted = await accepted_without_aftermath(store, manual_clock, frame_of())
    refused = submit(frame_of(value=2.0))
    await write_blob(store, refused)
    seen = acceptance.blob_seen(refused.sha256, manual_clock.now_ns())
    await store.create(seen.key, seen.data)
    await store_conflict(
        store, acceptance.conflict(accepted, refused.sha256, at_ns=manual_clock.now_ns(), collector_id="c")
    )
    await manual_clock.advance(2 * 86400 + HORIZON_S)

    report = await make_sweeper(store).sweep(dry_run=False, source=source)

    assert {"keep": 2 if source == "all" else 1} == report.counts
    assert "a quarantine manifest refers to it" in {row.reason for row in report.rows}
    assert refused.frame == (await store.get(refused.blob_key)).data


async def test_a_dry_run_says_what_it_would_delete_and_why_the_rest_is_kept(
    store: MemoryStore,
    manual_clock: ManualClock,
    make_sweeper: Callable[..., BlobSweeper],
) -> None:
    """Nothing changes in a dry run, and each blob has a verdict with a reason."""
    await accepted_without_aftermath(store, manual_clock, frame_of())
    await write_blob(store, submit(frame_of(value=2.0)))
    await manual_clock.advance(HORIZON_S + 1)
    await write_blob(store, submit(frame_of(50, 59)))
    before = await keys(store, "")

    report = await make_sweeper(store).sweep(dry_run=True)

    assert before == await keys(store, "")
    assert report.counts == {"delete": 1, "keep": 2}
    assert all(row.reason for row in report.rows)


class Stalling(MemoryStore):
    """Holds back creates of accepted manifests on request."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(clock=clock)
        self.go = asyncio.Event()
        self.stalled = 0

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        if key.startswith(paths.ACCEPTED) and b'"collector_id":"slow"' in data:
            self.stalled += 1
            await self.go.wait()
        return await super().create(key, data)


@pytest.mark.parametrize("undecided", ["finish", "keep"])
@pytest.mark.parametrize("rival", [None, "same", "other"])
async def test_a_writer_stalled_past_the_horizon_never_ends_with_a_deleted_blob(
    manual_clock: ManualClock,
    make_acceptor: Callable[..., Acceptor],
    make_sweeper: Callable[..., BlobSweeper],
    undecided: str,
    rival: str | None,
) -> None:
    """Whatever was accepted meanwhile and however often garbage was collected: every accepted blob is there."""
    store = Stalling(manual_clock)
    slow = make_acceptor(store, "slow", timeout_s=10 * HORIZON_S)
    stalled = asyncio.create_task(slow.accept(submit(frame_of())))
    while not store.stalled:
        await asyncio.sleep(0)
    if rival is not None:
        other = submit(frame_of(value=1.0 if rival == "same" else 2.0))
        await make_acceptor(store, "fast").accept(other)
    for _ in range(3):
        await manual_clock.advance(HORIZON_S + 1)
        await make_sweeper(store, undecided).sweep(dry_run=False)

    store.go.set()
    result = (await asyncio.gather(stalled, return_exceptions=True))[0]

    found = await keys(store, paths.ACCEPTED)
    assert len(found) == 1
    existing = read_record(await store.get(found[0]), AcceptedBatch)
    verified((await store.get(existing.raw_blob_key)).data, existing.frame_sha256)
    if rival == "other":
        assert result.code == "identity_conflict"  # type: ignore[union-attr]
    else:
        assert not isinstance(result, BaseException), result
        assert result.duplicate == (rival == "same" or undecided == "finish")


class Eager(BlobSweeper):
    """Deletes what nobody refers to once it is old, as if no writer could be slow."""

    async def _accepted(self, frame: PackedFrame) -> AcceptedBatch | None:
        nobody = acceptance.whole_place("0" * 64, 1)
        return await super()._accepted(frame) or acceptance.manifest_of(
            frame.identity, "nobody", nobody, at_ns=1, collector_id="", attempt_id=""
        )


async def test_a_sweeper_that_trusts_age_alone_would_lose_an_accepted_batch(
    manual_clock: ManualClock, make_acceptor: Callable[..., Acceptor], make_sweeper: Callable[..., BlobSweeper]
) -> None:
    """The conditions without the decided identity are not enough: this is the loss that ours prevents."""
    store = Stalling(manual_clock)
    stalled = asyncio.create_task(make_acceptor(store, "slow", timeout_s=10 * HORIZON_S).accept(submit(frame_of())))
    while not store.stalled:
        await asyncio.sleep(0)
    await manual_clock.advance(HORIZON_S + 1)
    eager = make_sweeper(store)
    eager.__class__ = Eager
    await eager.sweep(dry_run=False)
    store.go.set()

    accepted = await stalled

    assert not accepted.duplicate
    with pytest.raises(NotFound):
        await store.get(paths.blob_key(accepted.frame_sha256))


async def test_an_undecided_orphan_is_finished_not_lost(
    store: MemoryStore,
    manual_clock: ManualClock,
    make_sweeper: Callable[..., BlobSweeper],
    make_acceptor: Callable[..., Acceptor],
) -> None:
    """A batch whose collector died before the manifest becomes accepted; the agent's late retry is a duplicate."""
    submitted = submit(frame_of())
    await write_blob(store, submitted)
    await manual_clock.advance(HORIZON_S + 1)

    report = await make_sweeper(store).sweep(dry_run=False)
    answer = await make_acceptor(store).accept(submitted)

    assert report.counts == {"finish": 1}
    assert answer.duplicate
    assert len(await indexed(store)) == 1


async def test_candidates_also_come_from_the_hour_index(
    store: MemoryStore, manual_clock: ManualClock, make_sweeper: Callable[..., BlobSweeper]
) -> None:
    """The fast source finds an indexed orphan, and drops index entries of blobs that are gone. A folder of somebody
    else does not stop it."""
    await accepted_without_aftermath(store, manual_clock, frame_of())
    orphan = submit(frame_of(value=2.0))
    await write_blob(store, orphan)
    seen = acceptance.blob_seen(orphan.sha256, manual_clock.now_ns())
    await store.create(seen.key, seen.data)
    await store.create(f"{paths.RAW_BLOBS_BY_TIME}backup/notes.txt", b"kept")
    await manual_clock.advance(86400 * 2)

    first = await make_sweeper(store).sweep(dry_run=False, source="by_time")
    await store.create(seen.key, seen.data)  # as if that sweep had died right behind the blob
    await make_sweeper(store).sweep(dry_run=True, source="by_time")
    assert seen.key in await keys(store, paths.RAW_BLOBS_BY_TIME)  # a dry run deletes nothing
    await make_sweeper(store).sweep(dry_run=False, source="by_time")

    assert first.counts["delete"] == 1
    assert [f"{paths.RAW_BLOBS_BY_TIME}backup/notes.txt"] == await keys(store, paths.RAW_BLOBS_BY_TIME)
    with pytest.raises(NotFound):
        await store.get(seen.key)


async def test_a_blob_with_a_reverse_reference_is_kept_though_its_quarantine_manifest_is_missing(
    store: MemoryStore, manual_clock: ManualClock, make_sweeper: Callable[..., BlobSweeper]
) -> None:
    """A collector that dies between the two leaves the reference: the bytes wait for the manifest."""
    await accepted_without_aftermath(store, manual_clock, frame_of())
    refused = submit(frame_of(value=2.0))
    await write_blob(store, refused)
    reference = acceptance.quarantine_by_blob(refused.batch.identity, refused.sha256)
    await store.create(reference.key, reference.data)
    await manual_clock.advance(HORIZON_S + 1)

    report = await make_sweeper(store).sweep(dry_run=False)

    assert {"keep": 2} == report.counts
    assert refused.frame == (await store.get(refused.blob_key)).data


@pytest.mark.parametrize("damage", ["head", "body", "gone"])
async def test_a_blob_that_cannot_be_read_is_kept_and_the_sweep_goes_on(
    store: MemoryStore, manual_clock: ManualClock, make_sweeper: Callable[..., BlobSweeper], damage: str
) -> None:
    """Its identity is unknown, so nothing is known of its references; the garbage beside it goes."""
    bad, orphan = submit(frame_of(50, 59)), submit(frame_of(value=2.0))
    await accepted_without_aftermath(store, manual_clock, frame_of())
    await store.create(bad.blob_key, b"no frame" if damage == "head" else bad.frame[:-9])
    await write_blob(store, orphan)
    await manual_clock.advance(HORIZON_S + 1)
    real = store.get_range

    async def get_range(key: str, offset: int, length: int) -> bytes:
        if damage == "gone" and key == bad.blob_key:
            raise NotFound(key)
        return await real(key, offset, length)

    store.get_range = get_range  # type: ignore[method-assign]
    report = await make_sweeper(store).sweep(dry_run=False)

    assert {"keep": 2, "delete": 1} == report.counts
    (row,) = [row for row in report.rows if row.key == bad.blob_key]
    assert "its frame cannot be read" in row.reason


async def test_more_blobs_than_are_judged_together_are_judged_once_each(
    store: MemoryStore,
    manual_clock: ManualClock,
    make_sweeper: Callable[..., BlobSweeper],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A report lists a limited number of them; its counts go on."""
    monkeypatch.setattr("lakebed.batches.sweeper.GROUP", 2)
    monkeypatch.setattr("lakebed.batches.sweeper.ROWS_MAX", 3)
    for number in range(5):
        await accepted_without_aftermath(store, manual_clock, frame_of(number * 10, number * 10 + 9))
    await manual_clock.advance(HORIZON_S + 1)

    report = await make_sweeper(store).sweep(dry_run=True)

    assert ({"keep": 5}, 3) == (report.counts, len({row.key for row in report.rows}))


async def test_candidates_that_are_gone_are_passed_over_and_without_an_audit_there_are_none(
    store: MemoryStore, manual_clock: ManualClock, make_sweeper: Callable[..., BlobSweeper]
) -> None:
    """A finding is a hint, and so is the row of an orphan: what is left of them is judged."""
    await accepted_without_aftermath(store, manual_clock, frame_of())
    left, gone = submit(frame_of(value=2.0)), submit(frame_of(value=3.0))
    await write_blob(store, left)
    rows = [OrphanRow(each.sha256, manual_clock.now_ns(), "") for each in (gone, left)]
    await write_rows(store, [], rows, writer="c")
    none = await make_sweeper(store).sweep(dry_run=True, source="audit")
    work = "audit/v1/one/tasks/judge-1.jsonl"
    lines = [msgspec.json.encode({"do": "judge", "key": each.blob_key}) for each in (gone, left)]
    await store.create(work, b"\n".join(lines))
    record = {
        "schema": "lakebed.audit.v1",
        "audit_id": "one",
        "work": [{"key": work, "do": "judge", "lines": 2}],
        "proof": {"through_ns": 17, "source": "list", "accepted": 1, "quarantined": 0, "whole": True},
    }
    await store.create("audit/v1/one/audit.json", msgspec.json.encode(record))
    await store.create("audit/v1/last.json", msgspec.json.encode({"audit_id": "one", "ok": True}))
    await manual_clock.advance(HORIZON_S + 1)

    found = [await make_sweeper(store).sweep(dry_run=True, source=source) for source in ("audit", "by_time")]

    assert {} == none.counts
    assert [[left.blob_key], [left.blob_key]] == [[row.key for row in each.rows] for each in found]


async def test_every_blob_that_collectors_recorded_as_undecided_is_a_candidate(
    store: MemoryStore, manual_clock: ManualClock, make_sweeper: Callable[..., BlobSweeper]
) -> None:
    """Those that are blobs of their own, each; several in one segment and in others."""
    for number in range(3):
        await accepted_without_aftermath(store, manual_clock, frame_of(number * 10, number * 10 + 9))
        orphan = submit(frame_of(number * 10, number * 10 + 9, value=2.0))
        await write_blob(store, orphan)
        rows = [OrphanRow(orphan.sha256, manual_clock.now_ns(), "")]
        await write_rows(store, [], rows, writer=f"collector-{number % 2}")
    await manual_clock.advance(HORIZON_S + 1)

    report = await make_sweeper(store).sweep(dry_run=False, source="by_time")

    assert {"delete": 3} == report.counts
    assert 3 == len(await keys(store, paths.RAW_BLOBS))


async def test_rollup_work_is_noted_before_a_row_that_comes_late(
    store: MemoryStore, manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler]
) -> None:
    """A crash after the row and before the note would leave a batch that is never rolled up."""
    await accepted_without_aftermath(store, manual_clock, frame_of(0, 9))
    await manual_clock.advance(7200.0)
    created: list[str] = []
    create = store.create

    async def creating(key: str, data: bytes) -> Written:
        created.append(key)
        return await create(key, data)

    store.create = creating  # type: ignore[method-assign]
    await make_reconciler(store).audit()

    order = [key for key in created if key.startswith((paths.ACCEPTED_INDEX, ROLLUP_WORK))]
    assert [True, False] == [key.startswith(ROLLUP_WORK) for key in order]


async def test_a_resumed_audit_removes_no_damaged_segment(
    store: MemoryStore, manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler]
) -> None:
    """It has not looked up the batches before its cursor: only an audit that saw everything may."""
    accepted = await accepted_without_aftermath(store, manual_clock, frame_of(0, 9))
    reconciler = make_reconciler(store)
    await reconciler.audit()
    (segment,) = await keys(store, paths.ACCEPTED_INDEX)
    await store.delete(segment)
    await store.create(segment, b"half")
    cursor = paths.accepted_key(accepted.identity)
    await reconciler.audits.change(lambda _: (AuditProgress(running_since_ns=1, cursor=cursor), None))

    await reconciler.audit()
    resumed = await keys(store, paths.ACCEPTED_INDEX)
    await reconciler.audit()

    assert [segment] == resumed
    assert [accepted.identity] == await indexed(store)  # the whole audit has written its row again
