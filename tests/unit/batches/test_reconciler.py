"""The reconciler and the sweeper: everything derived comes back, and nothing accepted ever goes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

import msgspec
import pytest

from lakebed.batches import acceptance, paths
from lakebed.batches.acceptor import Acceptor, store_conflict, write_blob
from lakebed.batches.live import LiveBatches
from lakebed.batches.model import AcceptedBatch, Batch, BatchIdentity, read_record, write_record
from lakebed.batches.reader import verified
from lakebed.batches.reconciler import AuditProgress, Reconciler
from lakebed.batches.sweeper import BlobSweeper, Evidence, judge
from lakebed.core.clock import ManualClock
from lakebed.core.errors import NotFound, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.rollups.paths import ROLLUP_WORK
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo
from lakebed.store.protocol import Store
from support.bad_batches import put
from support.batch_frames import frame_of, submit
from support.runtimes import runtime_of, runtime_on

HORIZON_S = 3600.0
DERIVED = (paths.ACCEPTED_BY_TIME, paths.ACCEPTED_BY_BLOB, paths.RAW_BLOBS_BY_TIME)


@pytest.fixture
def make_reconciler(manual_clock: ManualClock, ids: Ids, metrics: Metrics) -> Callable[..., Reconciler]:
    def make(store: Store, **more: object) -> Reconciler:
        return Reconciler(
            runtime_on(store, manual_clock, ids=ids, metrics=metrics), overlap_s=900.0, concurrency=4, **more
        )

    return make


@pytest.fixture
def make_sweeper(
    manual_clock: ManualClock, ids: Ids, metrics: Metrics, make_reconciler: Callable[..., Reconciler]
) -> Callable[..., BlobSweeper]:
    def make(store: Store, undecided: str = "finish") -> BlobSweeper:
        return BlobSweeper(
            runtime_on(store, manual_clock, ids=ids, metrics=metrics),
            make_reconciler(store),
            horizon_s=HORIZON_S,
            undecided=undecided,
            name="gc:test",
        )

    return make


async def keys(store: Store, prefix: str) -> list[str]:
    return [info.key async for info in store.list(prefix)]


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
    """By-time, by-blob and blobs-by-time come back, rollup work is asked for, and live state learns of the batch."""
    accepted = await accepted_without_aftermath(store, manual_clock, frame_of())
    live = LiveBatches(runtime_of(manual_clock, metrics=metrics), bytes_max=10**7, window_s=3600)

    report = await make_reconciler(store, refresh=lambda a, batch: live.add(a.accepted_at_unix_ns, batch)).audit()

    assert report.repaired == {"by_time": 1, "by_blob": 1, "blob_by_time": 1, "rollup_work": 1}
    for prefix in (*DERIVED, ROLLUP_WORK):
        assert len(await keys(store, prefix)) == 1, prefix
    assert accepted.identity in live


async def test_a_second_audit_has_nothing_to_do(
    store: MemoryStore, manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler]
) -> None:
    """Repairs are idempotent, and any number of reconcilers may run."""
    for n in range(5):
        await accepted_without_aftermath(store, manual_clock, frame_of(n * 10, n * 10 + 9))

    await asyncio.gather(*(make_reconciler(store).audit() for _ in range(3)))
    again = await make_reconciler(store).audit()

    assert (again.checked, again.repaired) == (5, {})
    assert len(await keys(store, paths.ACCEPTED_BY_TIME)) == 5


async def test_what_the_reconciler_derives_is_what_the_winner_would_have(
    store: MemoryStore, manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler]
) -> None:
    """Derived bytes are a function of the acceptance, so winner and reconciler never disagree."""
    frame = frame_of()
    accepted = await accepted_without_aftermath(store, manual_clock, frame)
    await make_reconciler(store).audit()

    for write in acceptance.derived(accepted, acceptance.span_of(submit(frame).batch)):
        assert write.data == (await store.get(write.key)).data


@pytest.mark.parametrize("how", ["half-written", "empty", "of another batch", "of other times"])
async def test_an_entry_by_time_that_is_damaged_is_written_anew(
    store: MemoryStore, manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler], how: str
) -> None:
    """Whatever stands there instead of what follows from the manifest and its blob; rollup work is asked for, once."""
    accepted = await accepted_without_aftermath(store, manual_clock, frame_of())
    other = await accepted_without_aftermath(store, manual_clock, frame_of(10, 19))
    await make_reconciler(store).audit()
    span = acceptance.span_of(submit(frame_of()).batch)
    entry = acceptance.by_time(accepted, span)
    bad = {
        "half-written": entry.data[:-20],
        "empty": b"",
        "of another batch": acceptance.by_time(other, span).data,
        "of other times": acceptance.by_time(accepted, msgspec.structs.replace(span, last_ns=span.last_ns + 1)).data,
    }[how]
    await put(store, entry.key, bad)
    await store.delete(acceptance.rollup_work(accepted).key)

    report = await make_reconciler(store).audit()
    again = await make_reconciler(store).audit()

    assert ({"rollup_work": 1, "rebuilt_by_time": 1}, {}) == (report.repaired, again.repaired)
    assert entry.data == (await store.get(entry.key)).data


async def test_an_entry_by_time_of_a_later_schema_is_left_alone(
    store: MemoryStore, manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler]
) -> None:
    """Whoever wrote it knows more: an older reconciler does not take that away."""
    accepted = await accepted_without_aftermath(store, manual_clock, frame_of())
    await make_reconciler(store).audit()
    entry = acceptance.by_time(accepted, acceptance.span_of(submit(frame_of()).batch))
    later = entry.data.replace(b"by_time.v1", b"by_time.v2")
    await put(store, entry.key, later)

    report = await make_reconciler(store).audit()

    assert {} == report.repaired
    assert later == (await store.get(entry.key)).data


async def test_the_steady_scan_follows_the_index_from_its_checkpoint_with_overlap(
    store: MemoryStore, manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler]
) -> None:
    """An entry that comes late, within the overlap behind the checkpoint, is still mended; a later process goes on."""
    accepted = await accepted_without_aftermath(store, manual_clock, frame_of())
    await manual_clock.advance(600)
    first = make_reconciler(store)
    assert (await first.scan()).checked == 0
    late = acceptance.by_time(accepted, acceptance.span_of(submit(frame_of()).batch))
    await store.create(late.key, late.data)

    report = await make_reconciler(store).scan()
    await manual_clock.advance(3600)
    later = await make_reconciler(store).scan()
    much_later = await make_reconciler(store).scan()

    assert report.repaired == {"by_blob": 1, "blob_by_time": 1}
    assert (later.checked, much_later.checked) == (1, 0)


async def test_the_scan_shows_how_far_it_is_behind(
    manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler], metrics: Metrics
) -> None:
    """What was accepted while it ran has waited for as long as it ran."""

    class Slow(MemoryStore):
        async def children(self, prefix: str):  # type: ignore[no-untyped-def]
            if prefix == paths.ACCEPTED_BY_TIME:
                await manual_clock.advance(7)
            return await super().children(prefix)

    await make_reconciler(Slow(clock=manual_clock)).scan()

    assert 7.0 == metrics.value("lakebed_batches_reconciler_lag_seconds")


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


@pytest.mark.parametrize("agents", [3, 1], ids=["between two agents", "inside one boot"])
async def test_an_audit_cut_off_is_resumed_from_its_cursor(
    manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler], monkeypatch: pytest.MonkeyPatch, agents: int
) -> None:
    """A crash in the middle loses no proof and repeats little: the next audit begins behind what was mended, wherever
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
    assert len(await keys(store, paths.ACCEPTED_BY_TIME)) == 12
    assert 0 < audit.audited_through_ns < manual_clock.now_ns() - 59 * 10**9


async def test_a_damaged_manifest_does_not_stop_an_audit(
    store: MemoryStore, manual_clock: ManualClock, make_reconciler: Callable[..., Reconciler]
) -> None:
    """One object that cannot be read is counted and stepped over."""
    await store.create(paths.accepted_key(BatchIdentity("agent-0", "boot", 0, 9)), b"{")
    await accepted_without_aftermath(store, manual_clock, frame_of())

    report = await make_reconciler(store).audit()

    assert (report.repaired["damaged_manifest"], report.repaired["by_time"]) == (1, 1)


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

RIPE = Evidence(
    "mine", 0, now_ns=10, horizon_ns=5, audited_through_ns=6, accepted_references=0, quarantine_references=0
)


@pytest.mark.parametrize(
    ("changes", "verdict", "reason"),
    [
        ({"existing_sha256": "theirs"}, "delete", "other bytes"),
        ({"existing_sha256": "theirs", "now_ns": 4}, "keep", "younger"),
        ({"existing_sha256": "theirs", "accepted_references": 1}, "keep", "accepted manifest refers"),
        ({"existing_sha256": "theirs", "quarantine_references": 1}, "keep", "quarantine manifest refers"),
        ({"existing_sha256": "theirs", "audited_through_ns": 4}, "keep", "no audit"),
        ({"existing_sha256": "theirs", "problem": "torn"}, "keep", "cannot be read"),
        ({"existing_sha256": "mine"}, "keep", "reverse reference is missing"),
        ({}, "finish", "completed"),
        ({"boot_held": True}, "keep", "held"),
    ],
)
def test_each_condition_alone_keeps_a_blob(changes: dict[str, object], verdict: str, reason: str) -> None:
    """All four conditions and the decided identity are needed; each refusal says why."""
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

    assert "delete" not in rehearsal.counts and "no audit" in rehearsal.rows[0].reason + rehearsal.rows[1].reason
    assert report.counts == {"delete": 1, "keep": 1}
    assert [accepted.raw_blob_key] == await keys(store, paths.RAW_BLOBS)
    assert len(await keys(store, paths.GC_REPORTS)) == 1


@pytest.mark.parametrize("source", ["all", "by_time"])
async def test_a_quarantined_blob_is_kept_however_old_it_is(
    store: MemoryStore,
    manual_clock: ManualClock,
    make_sweeper: Callable[..., BlobSweeper],
    source: Literal["all", "by_time"],
) -> None:
    """The bytes of a conflict stay for whoever has to decide it, through a real sweep past the horizon."""
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

    assert {"keep": 2} == report.counts
    assert "a quarantine manifest refers to it" in {row.reason for row in report.rows}
    assert refused.frame == (await store.get(refused.blob_key)).data


async def test_a_dry_run_says_what_it_would_delete_and_why_the_rest_is_kept(
    store: MemoryStore,
    manual_clock: ManualClock,
    make_sweeper: Callable[..., BlobSweeper],
    make_reconciler: Callable[..., Reconciler],
) -> None:
    """Nothing changes in a dry run, and each blob has a verdict with a reason."""
    await accepted_without_aftermath(store, manual_clock, frame_of())
    await write_blob(store, submit(frame_of(value=2.0)))
    await manual_clock.advance(HORIZON_S + 1)
    await make_reconciler(store).audit()
    await write_blob(store, submit(frame_of(50, 59)))
    before = await keys(store, "")

    report = await make_sweeper(store).sweep(dry_run=True)

    assert before == await keys(store, "")
    assert report.counts == {"delete": 1, "keep": 2}
    assert all(row.reason for row in report.rows)


class Stalling(MemoryStore):
    """Holds back creates of accepted manifests until told."""

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

    async def _standing(self, batch: Batch) -> str:
        return await super()._standing(batch) or "nobody"


async def test_a_sweeper_that_trusts_age_alone_would_lose_an_accepted_batch(
    manual_clock: ManualClock, make_acceptor: Callable[..., Acceptor], make_sweeper: Callable[..., BlobSweeper]
) -> None:
    """The four conditions without the decided identity are not enough: this is the loss that ours prevents."""
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
    assert len(await keys(store, paths.ACCEPTED_BY_TIME)) == 1


async def test_candidates_also_come_from_the_hour_index(
    store: MemoryStore, manual_clock: ManualClock, make_sweeper: Callable[..., BlobSweeper]
) -> None:
    """The fast source finds an indexed orphan, and drops index entries of blobs that are gone."""
    await accepted_without_aftermath(store, manual_clock, frame_of())
    orphan = submit(frame_of(value=2.0))
    await write_blob(store, orphan)
    seen = acceptance.blob_seen(orphan.sha256, manual_clock.now_ns())
    await store.create(seen.key, seen.data)
    await manual_clock.advance(86400 * 2)

    first = await make_sweeper(store).sweep(dry_run=False, source="by_time")
    await make_sweeper(store).sweep(dry_run=False, source="by_time")

    assert first.counts["delete"] == 1
    with pytest.raises(NotFound):
        await store.get(seen.key)
    assert AuditProgress() != (await make_sweeper(store)._reconciler.audits.read()).value
