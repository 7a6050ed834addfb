"""Limits, answers and loops around acceptance: what is refused, what is counted, what runs when."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lakebed.batches import acceptance, conflicts, paths
from lakebed.batches.acceptor import store_conflict
from lakebed.batches.conflicts import ConflictReview, HeldBoots, conflict_id, parse_id
from lakebed.batches.derived_writes import BACKOFF_CAP_S, FLUSH_S, DerivedWrites
from lakebed.batches.model import BatchIdentity, BootHeld, HeldBoot
from lakebed.batches.packer import write_blob
from lakebed.batches.reader import RawBatches
from lakebed.batches.routes import time_ns
from lakebed.batches.segments import HEAD
from lakebed.batches.settings import BatchesSettings, ReconcilerSettings
from lakebed.batches.settled import SettledBoots
from lakebed.batches.spool import Spool
from lakebed.core.cache import ByteCache
from lakebed.core.clock import ManualClock, settle
from lakebed.core.errors import Conflict, Invalid, NotFound, Overloaded, Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import Contradiction
from lakebed.rollups.paths import ROLLUP_WORK
from lakebed.rollups.settings import RollupSettings
from lakebed.store.memory import MemoryStore
from lakebed.store.model import read_record
from support.batch_frames import frame_of, submit
from support.batches_gateway import collector
from support.crashing_store import Died, Dying
from support.runtimes import runtime_on


def test_the_first_manifest_decides_by_bytes_and_by_attempt() -> None:
    """Other bytes are a conflict; the same bytes are ours only under our own attempt."""
    submitted = submit(frame_of())
    mine = acceptance.manifest(submitted, at_ns=5, collector_id="c", attempt_id="a")

    def judged(**changed: Any) -> str:
        return acceptance.judge(mine, msgspec.structs.replace(mine, **changed))

    assert ["accepted", "duplicate", "conflict", "conflict"] == [
        judged(),
        judged(attempt_id="b"),
        judged(frame_sha256="x"),
        judged(frame_sha256="x", attempt_id="b"),
    ]
    nameless = msgspec.structs.replace(mine, attempt_id="")
    assert "duplicate" == acceptance.judge(nameless, nameless)


async def test_as_many_uploads_as_allowed_are_under_way(
    store: MemoryStore, manual_clock: ManualClock, make_acceptor: Any
) -> None:
    """One more is refused with the time to wait."""
    going = asyncio.Event()
    create = store.create

    async def held(key: str, data: bytes) -> Any:
        await going.wait()
        return await create(key, data)

    store.create = held  # type: ignore[method-assign]
    acceptor = make_acceptor(store, accepting_max=2)
    running = [asyncio.ensure_future(acceptor.accept(submit(frame_of(agent=f"a{n}")))) for n in range(2)]
    await settle()
    with pytest.raises(Overloaded) as refused:
        await acceptor.accept(submit(frame_of(agent="a9")))
    assert 2.0 == refused.value.retry_after_s
    going.set()
    assert [False, False] == [(await each).duplicate for each in running]


async def test_known_identities_are_bounded_and_outcomes_are_counted(
    store: MemoryStore, metrics: Metrics, make_acceptor: Any
) -> None:
    """Beyond the bound a duplicate is still one, by the bucket; samples are counted once."""
    acceptor = make_acceptor(store, known_max=1)
    for agent in ("a", "b", "a", "b"):
        await acceptor.accept(submit(frame_of(agent=agent)))
    with pytest.raises(Conflict):
        await acceptor.accept(submit(frame_of(agent="a", value=7.0)))

    def counted(outcome: str) -> float:
        return metrics.value("lakebed_batches_uploads_total", outcome=outcome)

    assert (2, 2, 1, 0) == tuple(counted(name) for name in ("accepted", "duplicate", "conflict", "failed"))
    assert 20 == metrics.value("lakebed_batches_samples_total")
    assert 1 == len(acceptor._known)
    assert 4 == metrics.value("lakebed_batches_accept_seconds_count")


async def test_a_blob_that_changes_while_it_is_repaired_is_not_accepted_yet(store: MemoryStore) -> None:
    """Two writers over a damaged blob: the loser sends again."""
    submitted = submit(frame_of())
    await store.create(submitted.blob_key, b"damaged")
    replace = store.replace

    async def racing(key: str, data: bytes, etag: str) -> Any:
        await store.delete(key)
        await store.create(key, b"other")
        return await replace(key, data, etag)

    store.replace = racing  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await write_blob(store, submitted)


def make_derived(store: Any, clock: ManualClock, metrics: Metrics, **more: Any) -> DerivedWrites:
    given = {"waiting_max": 2} | more
    return DerivedWrites(runtime_on(store, clock, ids=Ids.seeded(1), metrics=metrics), **given)


def put_row(after: DerivedWrites, clock: ManualClock, number: int, at_ns: int = 0) -> None:
    submitted = submit(frame_of(number * 10, number * 10 + 9))
    accepted = acceptance.manifest(submitted, at_ns=at_ns or clock.now_ns(), collector_id="c", attempt_id="x")
    after.put(accepted, acceptance.span_of(submitted.batch))


async def starts(store: MemoryStore) -> list[int]:
    """The first sequence number of each batch in the index."""
    index = RawBatches(store).index
    found = [each.entry async for each in index.entries(0, 2**62)]
    return [paths.identity_of(entry.accepted_manifest_key).seq_start for entry in found if entry is not None]


async def test_rows_of_a_flush_become_one_object(
    store: MemoryStore, manual_clock: ManualClock, metrics: Metrics
) -> None:
    """Nothing is written before the interval is over; what does not fit the queue is dropped and counted."""
    after = make_derived(store, manual_clock, metrics)
    after.start()
    for number in range(3):
        put_row(after, manual_clock, number)
    await manual_clock.advance(FLUSH_S - 0.1)
    before = [info async for info in store.list(paths.ACCEPTED_INDEX)]
    waiting = metrics.value("lakebed_batches_aftermath_waiting")
    await manual_clock.advance(0.2)
    await settle()

    assert ([], 2) == (before, waiting)
    assert 1 == len([info async for info in store.list(paths.ACCEPTED_INDEX)])
    assert [0, 10] == sorted(await starts(store))
    assert (2, 1) == tuple(
        metrics.value("lakebed_batches_aftermath_total", outcome=outcome) for outcome in ("written", "dropped")
    )
    assert 0 == metrics.value("lakebed_batches_aftermath_waiting")
    await after.stop()


async def test_rows_of_two_hours_become_two_objects_and_late_ones_are_noted_first(
    store: MemoryStore, manual_clock: ManualClock, metrics: Metrics
) -> None:
    """A segment is found by the hour of its rows; a reader that has passed that hour finds the note."""
    after = make_derived(store, manual_clock, metrics)
    after.start()
    put_row(after, manual_clock, 0, at_ns=manual_clock.now_ns() - paths.HOUR_NS)
    put_row(after, manual_clock, 1)
    await manual_clock.advance(FLUSH_S + 0.1)
    await settle()

    assert 2 == len([info async for info in store.list(paths.ACCEPTED_INDEX)])
    assert [0, 10] == await starts(store)
    assert 1 == len([info async for info in store.list(ROLLUP_WORK)])
    await after.stop()


@pytest.mark.parametrize("failures", [1, 7])
async def test_a_flush_that_fails_is_tried_until_it_is_written(
    store: MemoryStore, manual_clock: ManualClock, metrics: Metrics, failures: int
) -> None:
    """Rows wait in order through an outage; only the bound of the queue drops some."""
    create, left = store.create, failures

    async def failing(key: str, data: bytes) -> Any:
        nonlocal left
        left -= 1
        if left >= 0:
            raise Unavailable("away")
        return await create(key, data)

    store.create = failing  # type: ignore[method-assign]
    after = make_derived(store, manual_clock, metrics)
    after.start()
    put_row(after, manual_clock, 0)
    await manual_clock.advance(FLUSH_S + BACKOFF_CAP_S * failures)
    await settle()

    assert [0] == await starts(store)
    assert 1 == metrics.value("lakebed_batches_aftermath_total", outcome="written")
    await after.stop()


async def test_a_full_segment_is_written_before_its_interval_is_over(
    store: MemoryStore, manual_clock: ManualClock, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its limit of rows, and what came behind it waits for its own time."""
    monkeypatch.setattr("lakebed.batches.derived_writes.ROWS_MAX", 2)
    after = make_derived(store, manual_clock, metrics, waiting_max=10)
    after.start()
    put_row(after, manual_clock, 0)
    await settle()
    none = await starts(store)
    for number in (1, 2):
        put_row(after, manual_clock, number)
    await settle()
    full = await starts(store)
    await after.stop()

    assert ([], [0, 10]) == (none, sorted(full))
    assert [0, 10, 20] == sorted(await starts(store))


async def test_rows_that_a_stop_leaves_unwritten_are_counted_as_dropped(
    store: MemoryStore, manual_clock: ManualClock, metrics: Metrics
) -> None:
    """The store is away until the end: an operator sees how many rows the reconciler has to find."""

    async def away(key: str, data: bytes) -> Any:
        raise Unavailable("away")

    store.create = away  # type: ignore[method-assign]
    after = make_derived(store, manual_clock, metrics, waiting_max=10)
    after.start()
    for number in range(3):
        put_row(after, manual_clock, number)
    await settle()

    await after.stop(drain_s=0.05)

    assert (0, 3) == tuple(
        metrics.value("lakebed_batches_aftermath_total", outcome=outcome) for outcome in ("written", "dropped")
    )


async def test_rows_that_are_being_written_when_a_stop_gives_up_are_counted_as_dropped(
    store: MemoryStore, manual_clock: ManualClock, metrics: Metrics
) -> None:
    """The store does not answer: those on their way and those behind them are counted, each once."""

    async def hanging(key: str, data: bytes) -> Any:
        await asyncio.Event().wait()

    store.create = hanging  # type: ignore[method-assign]
    after = make_derived(store, manual_clock, metrics, waiting_max=10)
    after.start()
    for number in range(2):
        put_row(after, manual_clock, number)
    await manual_clock.advance(FLUSH_S)
    await settle()
    put_row(after, manual_clock, 2)

    await after.stop(drain_s=0.05)

    assert (0, 3) == tuple(
        metrics.value("lakebed_batches_aftermath_total", outcome=outcome) for outcome in ("written", "dropped")
    )


async def quarantined(store: MemoryStore, *, agent: str = "a", boot: str = "b", value: float = 2.0) -> str:
    submitted = submit(frame_of(agent=agent, boot=boot))
    existing = acceptance.manifest(submitted, at_ns=5, collector_id="c", attempt_id="x")
    other = submit(frame_of(agent=agent, boot=boot, value=value))
    record = acceptance.conflict(existing, other.sha256, at_ns=9, collector_id="c")
    await store_conflict(store, record)
    return conflict_id(record.identity, other.sha256)


async def test_conflicts_are_listed_in_pages_and_decided_once(store: MemoryStore, manual_clock: ManualClock) -> None:
    """Behind an id, only open ones if requested; the same decision again is harmless, another one is refused."""
    review = ConflictReview(runtime_on(store, manual_clock))
    ids = [await quarantined(store, agent=agent) for agent in "abc"]
    listed = await review.list()
    assert set(ids) == {view.conflict_id for view in listed} and 9 == listed[0].first_seen_unix_ns
    first = await review.list(limit=2)
    assert [view.conflict_id for view in listed] == [
        view.conflict_id for view in [*first, *await review.list(after=first[-1].conflict_id)]
    ]
    for wrong in (0, conflicts.LIST_MAX + 1):
        with pytest.raises(Invalid):
            await review.list(limit=wrong)
    for reason in ("", "  ", "r" * 2001):
        with pytest.raises(Invalid, match="reason"):
            await review.resolve(ids[0], "accept_existing", reason, "me")
    made = await review.resolve(ids[0], "accept_existing", "r" * 2000, "me")
    assert made.resolution is not None
    assert ("accept_existing", "me", manual_clock.now_ns()) == (
        made.resolution.action,
        made.resolution.resolved_by,
        made.resolution.resolved_at_unix_ns,
    )
    await manual_clock.advance(1.0)
    assert made == await review.resolve(ids[0], "accept_existing", "other words", "you")
    with pytest.raises(Conflict, match="already resolved as accept_existing by me"):
        await review.resolve(ids[0], "quarantine_boot", "no", "you")
    assert {*ids[1:]} == {view.conflict_id for view in await review.list(open_only=True)}
    with pytest.raises(NotFound):
        await review.show(ids[0][:-1] + ("0" if ids[0][-1] != "0" else "1"))


async def test_a_held_boot_is_held_with_its_reason_and_only_it(store: MemoryStore, manual_clock: ManualClock) -> None:
    """Another boot of the agent is free; a second conflict of the boot keeps the first record."""
    review, held = ConflictReview(runtime_on(store, manual_clock)), HeldBoots(runtime_on(store, manual_clock))
    one, two = await quarantined(store), await quarantined(store, value=3.0)
    await review.resolve(one, "quarantine_boot", "odd", "me")
    await review.resolve(two, "quarantine_boot", "odd too", "you")
    await store.create(f"{paths.HELD_BOOTS}not-ours.json", b"{}")
    held.check(BatchIdentity("a", "b", 0, 1))
    await held.refresh()

    with pytest.raises(BootHeld) as refused:
        held.check(BatchIdentity("a", "b", 5, 6))
    assert ("a", "b") == (refused.value.detail["agent_id"], refused.value.detail["boot_id"])
    held.check(BatchIdentity("a", "b2", 0, 1))
    held.check(BatchIdentity("a2", "b", 0, 1))
    record = read_record(await store.get(paths.held_boot_key("a", "b")), HeldBoot)
    assert ("odd", "me") == (record.reason, record.held_by)


async def test_held_boots_are_known_up_to_their_limit(
    store: MemoryStore, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is listed is bounded; a listing that fails releases none."""
    monkeypatch.setattr(conflicts, "HELD_MAX", 2)
    for boot in ("b1", "b2", "b3"):
        await store.create(paths.held_boot_key("a", boot), b"{}")
    held = HeldBoots(runtime_on(store, manual_clock))
    await held.refresh()

    def failing(*_: Any, **__: Any) -> Any:
        raise Unavailable("away")

    monkeypatch.setattr(store, "list", failing)
    await held.try_refresh()

    for boot in ("b1", "b2"):
        with pytest.raises(BootHeld):
            held.check(BatchIdentity("a", boot, 0, 1))
    held.check(BatchIdentity("a", "b3", 0, 1))


async def test_a_released_boot_is_accepted_again(store: MemoryStore, manual_clock: ManualClock) -> None:
    """The decision about the conflict stays; a boot that is not held cannot be released."""
    review, held = ConflictReview(runtime_on(store, manual_clock)), HeldBoots(runtime_on(store, manual_clock))
    one = await quarantined(store)
    made = await review.resolve(one, "quarantine_boot", "odd", "me")
    released = await review.release("a", "b")
    await held.refresh()

    held.check(BatchIdentity("a", "b", 5, 6))
    assert ("odd", "me") == (released.reason, released.held_by)
    assert made.resolution == (await review.show(one)).resolution
    with pytest.raises(NotFound, match="is not quarantined"):
        await review.release("a", "b")


@pytest.mark.parametrize("point", range(1, 12))
async def test_a_boot_that_was_decided_to_be_held_is_held_wherever_the_decision_broke_off(
    store: MemoryStore, manual_clock: ManualClock, point: int
) -> None:
    """A conflict never shows as quarantined while its boot is still accepted: a crash leaves it open, or both done."""
    one = await quarantined(store)
    with suppress(Died):
        await ConflictReview(runtime_on(Dying(store, point), manual_clock)).resolve(one, "quarantine_boot", "odd", "me")
    held = HeldBoots(runtime_on(store, manual_clock))
    await held.refresh()

    if (await ConflictReview(runtime_on(store, manual_clock)).show(one)).resolution is not None:
        with pytest.raises(BootHeld):
            held.check(BatchIdentity("a", "b", 5, 6))


@pytest.mark.parametrize(
    "text", ["", "a.b.c", "zz.62.0-1." + "a" * 64, "61.62.0-1." + "A" * 64, "61.62.0-1." + "a" * 63]
)
def test_what_is_no_conflict_id_is_refused(text: str) -> None:
    """Hex of agent and boot, the sequences and a whole hash."""
    with pytest.raises(Invalid):
        parse_id(text)
    good = conflict_id(BatchIdentity("ä", "b", 3, 9), "a" * 64)
    assert (BatchIdentity("ä", "b", 3, 9), "a" * 64) == parse_id(good)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (BatchesSettings, {"frame_bytes_max": 10, "upload_bytes_max": 9, "body_bytes_max": 10}),
        (BatchesSettings, {"aftermath_max": 0}),
        (BatchesSettings, {"known_max": 0}),
        (ReconcilerSettings, {"overlap_s": 0.0}),
        (ReconcilerSettings, {"gc_access_key_id": "x"}),
        (ReconcilerSettings, {"gc_horizon_s": 899.0}),
        (RollupSettings, {"overlap_s": 1.0}),
        (RollupSettings, {"batches_max": 0}),
        (RollupSettings, {"lease_s": 0.5}),
        (RollupSettings, {"overlap_s": 900.0, "sweep_after_s": 1799.0}),
        (RollupSettings, {"interval_s": -1.0}),
    ],
)
def test_settings_that_cannot_be_are_refused(kind: Any, values: dict[str, Any]) -> None:
    """Each at its limit is fine."""
    with pytest.raises(Contradiction):
        kind.of(values)
    ReconcilerSettings.of({"gc_horizon_s": 900.0})
    RollupSettings.of({"overlap_s": 900.0, "sweep_after_s": 1800.0, "lease_s": 1.0, "batches_max": 1})
    assert (1.0, 0.05) == tuple(
        BatchesSettings.of(
            {"acceptance": "local_spool", "spool_dir": "x", "object_landing_interval_ms": ms}
        ).landing_interval_s
        for ms in (0, 50)
    )


def test_times_of_a_query_are_nanoseconds_or_have_an_offset() -> None:
    """A time without one is refused."""
    assert 1_700_000_000_123_456_789 == time_ns("1700000000123456789", "from")
    assert 1_767_225_600_000_001_000 == time_ns("2026-01-01T00:00:00.000001Z", "to")
    assert 1_767_222_000_000_000_000 == time_ns("2026-01-01T00:00:00+01:00", "to")
    for wrong, output in (("2026-01-01T00:00:00", "offset"), ("soon", "not a time"), ("-5", "not a time")):
        with pytest.raises(Invalid, match=output):
            time_ns(wrong, "to")


@pytest.mark.parametrize("query", ["lookback_s=x", "lookback_s=-1", "lookback_s=1000000001", "lookback_s=nan"])
async def test_a_number_of_a_query_has_a_range(store: MemoryStore, query: str) -> None:
    """Anything else is 400."""
    async with collector(store) as (client, _):
        assert 400 == (await client.get(f"/v1/query/latest?metric=cpu&{query}")).status_code
        assert 200 == (await client.get("/v1/query/latest?metric=cpu&lookback_s=0.5")).status_code
        assert 400 == (await client.get("/v1/query/range?metric=cpu&window_s=60&q=x")).status_code


async def test_health_says_how_batches_are_accepted(store: MemoryStore) -> None:
    """A query collector that has not looked lately is degraded."""
    async with collector(store, query_collector=True) as (client, part):
        await part.follower.poll()
        await client.post("/v1/batches", content=frame_of())
        good = await part.health()
        part.follower.caught_up_ns = 0
        late = await part.health()

    assert ("ok", "s3_manifest, 1 batches live") == (good.status, good.detail)
    assert ("degraded", "the query collector has not caught up") == (late.status, late.detail)


def test_kept_objects_are_bounded_by_their_bytes() -> None:
    """The longest unused goes first; a value that is put again counts once, with its new size."""
    kept: ByteCache[str] = ByteCache(10)
    for name in "ab":
        kept.put(name, 5, name)
    assert "a" == kept.get("a")
    kept.put("c", 5, "c")
    assert ["a", None, "c"] == [kept.get(name) for name in "abc"]
    kept.put("a", 3, "A")
    kept.put("d", 2, "d")
    assert ["A", "c", "d"] == [kept.get(name) for name in "acd"]
    kept.put("e", 11, "e")
    assert [None] * 4 == [kept.get(name) for name in "acde"]


async def test_uploads_that_share_a_write_are_each_read_back(
    store: MemoryStore, manual_clock: ManualClock, metrics: Metrics, tmp_path: Path
) -> None:
    """Each record of a group is found where it was written; the gauges count bytes and batches until they land."""
    reported: Any = {"bytes_max": 1 << 20, "known_max": 10, "retry_after_s": 1.0}
    runtime = runtime_on(store, manual_clock, ids=Ids.seeded(1), metrics=metrics)
    spool = Spool(
        runtime,
        tmp_path,
        settled=SettledBoots(runtime),
        collector_id="c",
        on_accepted=lambda *_: None,
        **reported,
    )
    await spool.open()
    frames = [submit(frame_of(end=9 + n, agent=f"a{n}")) for n in range(4)]
    await asyncio.gather(*map(spool.accept, frames))

    held = {accepted.agent_id: batch async for accepted, batch in spool.unlanded()}
    assert {f"a{n}": 10 + n for n in range(4)} == {
        agent: batch.columns.samples if batch is not None else None for agent, batch in held.items()
    }
    assert 4 == metrics.value("lakebed_batches_spool_batches")
    assert sum(len(each.frame) + HEAD.size for each in frames) == metrics.value("lakebed_batches_spool_bytes")
    for each in frames:
        spool.landed(each.batch.identity)
    assert 0 == metrics.value("lakebed_batches_spool_batches") == metrics.value("lakebed_batches_spool_bytes")
    assert (await spool.accept(frames[0])).duplicate
    await spool.close()
