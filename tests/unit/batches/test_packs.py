"""Packed mode: several agents' frames in one blob, one conditional create for each identity, and every reader."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from lakebed.batches import acceptance, paths
from lakebed.batches.acceptance import Submission
from lakebed.batches.acceptor import Acceptor
from lakebed.batches.codec.pack import HEAD, decode_table, encode_pack
from lakebed.batches.derived_writes import DerivedWrites
from lakebed.batches.feed import BatchesFeed
from lakebed.batches.matchers import Selector
from lakebed.batches.model import AcceptedBatch, Batch, HeldBoot, IdentityConflict, SettledBoot, write_record
from lakebed.batches.packer import Packer, read_table, write_blob
from lakebed.batches.plot import MetricPlots
from lakebed.batches.reader import RawBatches
from lakebed.batches.reconciler import Reconciler
from lakebed.batches.retention import BatchRetention
from lakebed.batches.settings import BatchesSettings
from lakebed.batches.settled import settled_register
from lakebed.batches.sweeper import BlobSweeper
from lakebed.batches.view import RecentBatches
from lakebed.core.clock import ManualClock, settle
from lakebed.core.errors import Corrupt, Unavailable
from lakebed.core.feed import FeedFilter
from lakebed.core.settings import Contradiction
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo, Written, read_record
from lakebed.store.runtime import StoreRuntime
from support.batch_frames import START_NS, frame_of, submit
from support.references import is_freed_after
from support.rollup_fixtures import make_roller, make_sources
from support.runtimes import runtime_on
from support.tick_fixtures import context_of

HORIZON_S = 100.0
DAY_S = 86_400.0


@pytest.fixture
def runtime(store: MemoryStore, manual_clock: ManualClock) -> StoreRuntime:
    return runtime_on(store, manual_clock)


@asynccontextmanager
async def packing(runtime: StoreRuntime, *, pack_s: float = 0.05) -> AsyncIterator[Acceptor]:
    derived = DerivedWrites(runtime, waiting_max=100)
    derived.start()
    yield Acceptor(
        runtime,
        derived,
        collector_id="c",
        on_accepted=lambda *_: None,
        accepting_max=100,
        known_max=1,
        timeout_s=60.0,
        retry_after_s=1.0,
        pack_s=pack_s,
    )
    await derived.stop()


async def accept_all(runtime: StoreRuntime, frames: list[bytes]) -> list[AcceptedBatch]:
    """Accepts the frames in one flush of a collector that packs, and returns their manifests."""
    async with packing(runtime) as acceptor:
        pending = [asyncio.ensure_future(acceptor.accept(submit(frame))) for frame in frames]
        while not all(each.done() for each in pending):
            await runtime.clock.advance(0.05)  # type: ignore[attr-defined]
        await asyncio.gather(*pending)
    keys = [paths.accepted_key(submit(frame).batch.identity) for frame in frames]
    return [read_record(await runtime.store.get(key), AcceptedBatch) for key in keys]


def fleet(count: int = 3, **more: float) -> list[bytes]:
    return [frame_of(agent=f"agent-{number}", **more) for number in range(count)]  # type: ignore[arg-type]


async def blobs(store: MemoryStore) -> list[str]:
    return [info.key async for info in store.list(paths.RAW_BLOBS)]


def sweeper(runtime: StoreRuntime, undecided: str = "keep") -> BlobSweeper:
    return BlobSweeper(runtime, horizon_s=HORIZON_S, undecided=undecided, name="gc")  # type: ignore[arg-type]


def test_a_pack_tells_where_its_frames_are() -> None:
    """The table at its beginning is enough; a damaged one is Corrupt, not a wrong place."""
    frames = fleet()
    submitted = [submit(frame) for frame in frames]
    data, table = encode_pack([(each.batch.identity, each.sha256, each.frame) for each in submitted])

    assert table == decode_table(data)
    assert frames == [data[each.offset : each.offset + each.length] for each in table]
    assert all(each.offset >= HEAD.size for each in table)
    for bad in (data[:5], b"LMXX" + data[4:], data[:20] + b"~" + data[21:], data[: HEAD.size + 3]):
        with pytest.raises(Corrupt):
            decode_table(bad)


async def test_frames_of_one_flush_share_a_blob_and_each_has_its_manifest(
    runtime: StoreRuntime, store: MemoryStore
) -> None:
    """One create for the bytes of all, one for each identity; the manifest names blob, offset and length."""
    frames = fleet()

    manifests = await accept_all(runtime, frames)

    (pack,) = await blobs(store)
    assert paths.is_pack(pack)
    assert {pack} == {each.raw_blob_key for each in manifests}
    data = (await store.get(pack)).data
    assert frames == [data[each.raw_blob_offset : each.raw_blob_offset + each.frame_bytes] for each in manifests]


async def test_a_frame_that_is_alone_in_its_flush_is_a_blob_of_its_own(
    runtime: StoreRuntime, store: MemoryStore
) -> None:
    (only,) = await accept_all(runtime, fleet(1))

    assert (paths.blob_key(only.frame_sha256), 0) == (only.raw_blob_key, only.raw_blob_offset)
    assert b"raw_blob_offset" not in (await store.get(paths.accepted_key(only.identity))).data


async def test_a_full_pack_is_written_without_waiting(runtime: StoreRuntime, store: MemoryStore) -> None:
    """By bytes: what does not fit opens the next one."""
    frames = [submit(frame) for frame in fleet(4)]
    packer = Packer(runtime, wait_s=3600.0, bytes_max=2 * len(frames[0].frame))

    places = await asyncio.gather(*map(packer.store, frames))

    assert 2 == len({place.key for place in places}) == len(await blobs(store))


async def test_a_frame_that_does_not_fit_opens_the_next_pack(
    runtime: StoreRuntime, store: MemoryStore, manual_clock: ManualClock
) -> None:
    """A pack never grows over its limit; the last one is written after the wait."""
    frames = [submit(frame) for frame in fleet(5)]
    size = len(frames[0].frame)
    packer = Packer(runtime, wait_s=1.0, bytes_max=2 * size + size // 2)
    pending = [asyncio.ensure_future(packer.store(frame)) for frame in frames]
    await settle()
    await manual_clock.advance(1.0)
    places = await asyncio.gather(*pending)

    assert [2, 2, 1] == sorted(Counter(place.key for place in places).values(), reverse=True)


async def test_frames_that_come_within_the_wait_share_a_pack(
    runtime: StoreRuntime, store: MemoryStore, manual_clock: ManualClock
) -> None:
    """It counts from the first of them."""
    packer = Packer(runtime, wait_s=0.05)
    pending = []
    for frame in fleet(3):
        pending.append(asyncio.ensure_future(packer.store(submit(frame))))
        await settle()
        await manual_clock.advance(0.03)
    await manual_clock.advance(0.05)
    places = [await each for each in pending]

    assert places[0].key == places[1].key != places[2].key


async def test_a_failed_write_fails_every_frame_of_the_pack(runtime: StoreRuntime, manual_clock: ManualClock) -> None:
    class Down(MemoryStore):
        async def create(self, key: str, data: bytes) -> ObjectInfo:
            raise Unavailable("down")

    down = Down(clock=manual_clock)
    async with packing(runtime_on(down, manual_clock)) as acceptor:
        pending = [asyncio.ensure_future(acceptor.accept(submit(frame))) for frame in fleet()]
        while not all(each.done() for each in pending):
            await manual_clock.advance(0.05)
        results = await asyncio.gather(*pending, return_exceptions=True)

    assert [Unavailable] * 3 == [type(each) for each in results]


async def test_an_upload_that_is_given_up_takes_no_other_of_its_pack_with_it(
    runtime: StoreRuntime, store: MemoryStore, manual_clock: ManualClock
) -> None:
    """Its frame may lie in the pack unused; those behind it get their places all the same."""
    frames = fleet()
    packer = Packer(runtime, wait_s=0.05)
    given_up, *pending = [asyncio.ensure_future(packer.store(submit(frame))) for frame in frames]
    await settle()

    given_up.cancel()
    await manual_clock.advance(0.05)
    await settle()

    assert [True, True] == [each.done() for each in pending]
    data = (await store.get((await blobs(store))[0])).data
    places = [each.result() for each in pending]
    assert frames[1:] == [data[place.offset : place.offset + place.length] for place in places]


async def test_a_conflict_in_a_pack_is_quarantined_with_a_blob_of_its_own(
    runtime: StoreRuntime, store: MemoryStore, manual_clock: ManualClock
) -> None:
    """So the pack is not needed by the quarantine, and the record is the same as without packs."""
    await accept_all(runtime, fleet())
    rival, new = submit(frame_of(agent="agent-0", value=9.0)), submit(frame_of(agent="new"))

    async with packing(runtime) as acceptor:
        pending = [asyncio.ensure_future(acceptor.accept(each)) for each in (rival, new)]
        while not all(each.done() for each in pending):
            await manual_clock.advance(0.05)
        refused, taken = await asyncio.gather(*pending, return_exceptions=True)

    assert isinstance(refused, IdentityConflict)
    assert refused.detail["quarantined"]
    assert rival.blob_key == refused.detail["submitted_raw_blob_key"]
    assert rival.frame == (await store.get(rival.blob_key)).data
    assert not taken.duplicate  # type: ignore[union-attr]


async def test_every_reader_finds_packed_batches(
    runtime: StoreRuntime, store: MemoryStore, manual_clock: ManualClock
) -> None:
    """Queries, live state, the reconciler, the feed of bronze and Spark, rollups and the index of rolled-up data."""
    manifests = await accept_all(runtime, fleet(at_ns=manual_clock.now_ns()))
    report = await Reconciler(runtime, overlap_s=900.0, concurrency=2).audit()
    raw = RawBatches(store)
    entries = [each.entry async for each in raw.entries(0, 2**62)]

    assert (3, {}) == (report.checked, report.repaired)
    assert {each.place for each in manifests} == {entry.place for entry in entries if entry is not None}
    feed = BatchesFeed(store, now_ns=manual_clock.now_ns)
    pieces = await feed.slices(await feed.begin(), {"through_ns": 2**62, "late_ms": 0}, FeedFilter())
    rows = [await feed.load(piece, ["agent_id", "value"], FeedFilter()) for piece in pieces]
    assert ["agent-0", "agent-1", "agent-2"] == sorted(row["agent_id"][0].as_py() for row in rows)


async def test_a_lost_index_row_of_a_packed_batch_is_written_again(runtime: StoreRuntime, store: MemoryStore) -> None:
    manifests = await accept_all(runtime, fleet())
    for info in [info async for info in store.list(paths.ACCEPTED_INDEX)]:
        await store.delete(info.key)

    report = await Reconciler(runtime, overlap_s=900.0, concurrency=2).audit()

    found = [each.entry async for each in RawBatches(store).entries(0, 2**62)]
    assert {"indexed": 3, "rollup_work": 3} == report.repaired
    assert {each.place for each in manifests} == {entry.place for entry in found if entry is not None}


@pytest.mark.parametrize("field", [{"raw_blob_key": "accepted/v1/x"}, {"raw_blob_offset": 0}])
async def test_a_manifest_with_a_place_that_cannot_be_is_set_aside(
    runtime: StoreRuntime, store: MemoryStore, field: dict[str, object]
) -> None:
    first, *_ = await accept_all(runtime, fleet())
    key = paths.accepted_key(first.identity)
    await store.delete(key)
    await store.create(key, write_record(msgspec.structs.replace(first, **field)))

    report = await Reconciler(runtime, overlap_s=900.0, concurrency=2).audit()

    assert 1 == report.repaired["damaged_manifest"]


async def test_a_pack_is_deleted_only_when_no_batch_needs_it(
    runtime: StoreRuntime, store: MemoryStore, manual_clock: ManualClock
) -> None:
    """Duplicates at another collector leave a second pack: it goes, and the first stays while one manifest needs it."""
    manifests = await accept_all(runtime, fleet())
    again = await accept_all(runtime, fleet()[:2])
    young = await sweeper(runtime).sweep(dry_run=False)
    await manual_clock.advance(HORIZON_S + 1)

    dry = await sweeper(runtime).sweep(dry_run=True)
    swept = await sweeper(runtime).sweep(dry_run=False, source="by_time")

    assert {"keep": 2} == young.counts
    assert {"keep": 1, "delete": 1} == dry.counts
    assert {"delete": 1} == swept.counts
    assert manifests[:2] == again
    assert [manifests[0].raw_blob_key] == await blobs(store)


async def test_a_frame_that_the_store_refused_is_not_kept_in_memory(
    runtime: StoreRuntime, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the store is away each upload would wait for the garbage collector with all of its bytes."""

    async def away(key: str, data: bytes) -> Written:
        raise Unavailable("away")

    monkeypatch.setattr(store, "create", away)
    packer = Packer(runtime, wait_s=0.0)

    assert await is_freed_after(lambda: packer.store(submit(frame_of())), Unavailable)


@pytest.mark.parametrize("undecided", ["finish", "keep"])
async def test_an_undecided_frame_keeps_its_pack(
    runtime: StoreRuntime, store: MemoryStore, manual_clock: ManualClock, undecided: str
) -> None:
    """A writer may have stalled before its manifest: past the horizon the acceptance is finished, or all is kept."""
    frames = [submit(frame) for frame in fleet()]
    packer = Packer(runtime, wait_s=0.0)
    await asyncio.gather(*map(packer.store, frames))
    await manual_clock.advance(HORIZON_S + 1)

    await sweeper(runtime, undecided).sweep(dry_run=False)

    (pack,) = await blobs(store)
    found = [read_record(await store.get(info.key), AcceptedBatch) async for info in store.list(paths.ACCEPTED)]
    assert (3 if undecided == "finish" else 0) == len(found)
    assert {pack} >= {each.raw_blob_key for each in found}
    assert {each.sha256 for each in await read_table(store, pack)} >= {each.frame_sha256 for each in found}


async def test_a_whole_blob_whose_batch_is_in_a_pack_is_garbage(
    runtime: StoreRuntime, store: MemoryStore, manual_clock: ManualClock
) -> None:
    """Collectors with and without packs share a bucket: a duplicate's own blob is not the accepted one."""
    manifests = await accept_all(runtime, fleet())
    await write_blob(store, submit(fleet()[0]))
    await manual_clock.advance(HORIZON_S + 1)

    await sweeper(runtime).sweep(dry_run=False)

    assert [manifests[0].raw_blob_key] == await blobs(store)


async def test_a_damaged_table_keeps_the_pack(
    runtime: StoreRuntime, store: MemoryStore, manual_clock: ManualClock
) -> None:
    first, *_ = await accept_all(runtime, fleet())
    await store.delete(first.raw_blob_key)
    await store.create(first.raw_blob_key, b"LMPK not a table at all")
    await manual_clock.advance(HORIZON_S + 1)

    report = await sweeper(runtime).sweep(dry_run=False)

    assert {"keep": 1} == report.counts


async def test_retention_removes_a_pack_with_the_last_hour_that_needs_it(
    runtime: StoreRuntime, store: MemoryStore, manual_clock: ManualClock
) -> None:
    """A pack whose batches were accepted in two hours stays until both are old."""
    early, late = (submit(frame) for frame in fleet(2))
    places = await asyncio.gather(*map(Packer(runtime, wait_s=0.0).store, (early, late)))
    await _accept_at(runtime, early, places[0])
    await manual_clock.advance(2 * 3600.0)
    await _accept_at(runtime, late, places[1])
    retention = BatchRetention(runtime, retention_days=1.0, owner="o")

    async def passes() -> list[str]:
        for _ in range(2):  # settle, then remove
            await retention.run()
            await manual_clock.advance(3700.0)
        await retention.run()
        return await blobs(store)

    await manual_clock.advance(DAY_S - 3 * 3600.0 + 3599.0)
    first = await passes()
    await manual_clock.advance(6 * 3600.0)
    second = await passes()

    assert [places[0].key] == first
    assert [] == second
    assert [] == [info.key async for info in store.list(paths.ACCEPTED)]


async def test_retention_leaves_a_pack_of_which_a_frame_may_still_be_accepted(
    runtime: StoreRuntime, store: MemoryStore, manual_clock: ManualClock
) -> None:
    """A collector that stalled before its manifest goes on after the other frames' hour was removed."""
    early, stalled = (submit(frame) for frame in fleet(2))
    places = await asyncio.gather(*map(Packer(runtime, wait_s=0.0).store, (early, stalled)))
    await _accept_at(runtime, early, places[0])
    await manual_clock.advance(DAY_S + 2 * 3600.0)
    retention = BatchRetention(runtime, retention_days=1.0, owner="o")
    for _ in range(3):  # settle, then remove
        await retention.run()
        await manual_clock.advance(3700.0)

    await _accept_at(runtime, stalled, places[1])

    found = [read_record(await store.get(info.key), AcceptedBatch) async for info in store.list(paths.ACCEPTED)]
    assert [stalled.batch.identity] == [each.identity for each in found]
    assert stalled.batch.identity == (await RawBatches(store).batch(stalled.sha256, found[0].place)).identity


async def _accept_at(runtime: StoreRuntime, submitted: Submission, place: object) -> None:
    made = acceptance.manifest(
        submitted,
        place,  # type: ignore[arg-type]
        at_ns=runtime.clock.now_ns(),
        collector_id="c",
        attempt_id="a",
    )
    await runtime.store.create(paths.accepted_key(made.identity), write_record(made))
    derived = DerivedWrites(runtime, waiting_max=10)
    derived.start()
    derived.put(made, acceptance.span_of(submitted.batch))
    await derived.stop()


async def test_packed_batches_are_rolled_up_and_found_through_the_rollup_index(
    runtime: StoreRuntime, store: MemoryStore, manual_clock: ManualClock
) -> None:
    """A chunk of the index names the place of a packed frame, so a query reads it without the index by time."""
    await accept_all(runtime, fleet(at_ns=START_NS))
    await manual_clock.advance(7200.0)
    report = await make_roller(store, manual_clock).run()

    sources = make_sources(store, manual_clock)
    taken: list[Batch] = []
    await sources.points(taken.append, Selector("cpu"), START_NS, START_NS + 10**9, 2**62)

    assert (3, []) == (report.batches, report.unreadable)
    assert ["agent-0", "agent-1", "agent-2"] == sorted(each.identity.agent_id for each in taken)


def test_packing_is_refused_with_a_local_spool(tmp_path: object) -> None:
    with pytest.raises(Contradiction):
        BatchesSettings(acceptance="local_spool", spool_dir=tmp_path, pack_ms=10).check()  # type: ignore[arg-type]
    with pytest.raises(Contradiction):
        BatchesSettings(pack_ms=6_000).check()


async def _held(runtime: StoreRuntime, submitted: Submission) -> None:
    identity = submitted.batch.identity
    record = HeldBoot("lightmetrics.held_boot.v1", identity.agent_id, identity.boot_id, "odd", "ann", 1)
    await runtime.store.create(paths.held_boot_key(identity.agent_id, identity.boot_id), write_record(record))


async def _settled(runtime: StoreRuntime, submitted: Submission) -> None:
    identity = submitted.batch.identity
    done = SettledBoot(((identity.seq_start, identity.seq_end),), 1)
    await settled_register(runtime, identity.agent_id, identity.boot_id).change(lambda _: (done, None))


async def _outrun(runtime: StoreRuntime, submitted: Submission) -> None:
    other = submit(frame_of(agent=submitted.batch.identity.agent_id, value=7.0))
    await write_blob(runtime.store, other)
    made = acceptance.manifest(other, at_ns=1, collector_id="c", attempt_id="a")
    await runtime.store.create(paths.accepted_key(made.identity), write_record(made))


async def _nothing(runtime: StoreRuntime, submitted: Submission) -> None:
    return None


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("prepare", "goes", "accepted"),
    [(_nothing, False, True), (_held, False, False), (_settled, True, False), (_outrun, True, False)],
    ids=["undecided", "boot held", "removed by retention", "other bytes accepted"],
)
async def test_a_sweep_finds_in_the_bucket_what_decides_about_a_frame(
    runtime: StoreRuntime,
    store: MemoryStore,
    manual_clock: ManualClock,
    packed: bool,
    prepare: Any,
    goes: bool,
    accepted: bool,
) -> None:
    """Each fact alone, on a frame that is a blob of its own and on frames of a pack: deleted, kept, or accepted."""
    frames = [submit(frame) for frame in fleet(2 if packed else 1)]
    packer = Packer(runtime, wait_s=0.0)
    places = await asyncio.gather(*map(packer.store, frames))
    for frame in frames:
        await prepare(runtime, frame)
    await manual_clock.advance(HORIZON_S + 1)

    await sweeper(runtime, "finish").sweep(dry_run=False)

    assert (places[0].key not in await blobs(store)) is goes
    keys = [paths.accepted_key(frame.batch.identity) for frame in frames]
    found = [info.key async for info in store.list(paths.ACCEPTED)]
    mine = [read_record(await store.get(key), AcceptedBatch) for key in found if key in keys]
    assert (len(frames) if accepted else 0) == sum(each.raw_blob_key == places[0].key for each in mine)


async def test_the_console_opens_a_packed_batch_and_offers_its_metrics(
    runtime: StoreRuntime, store: MemoryStore, manual_clock: ManualClock
) -> None:
    """The series of a batch and the names for a plot are read out of the pack."""
    _, manifest, _ = await accept_all(runtime, fleet())
    context = context_of(store, clock=manual_clock)
    recent = RecentBatches(context)

    opened = await recent.detail(manifest.identity)
    names = await MetricPlots(context, recent).names()

    assert ("", 2) == (opened.error, opened.series_count)
    assert [("cpu", ("host",))] == [(each.metric, each.labels) for each in names]
