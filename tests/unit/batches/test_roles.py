"""Roles beside a collector: the follower of events, the sweeper's report, the doctor's checks, the workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
import pytest

from lakebed.batches import events, paths, sweeper
from lakebed.batches.bucket import checks, delete_markers
from lakebed.batches.events import EventFollower
from lakebed.batches.model import AcceptedBatch
from lakebed.batches.packer import write_blob
from lakebed.batches.reconciler import Reconciler, ReconcileReport
from lakebed.batches.sweeper import BlobSweeper, GcReport
from lakebed.batches.workers import event_follower, reconciler, workers
from lakebed.core.clock import ManualClock, settle
from lakebed.core.context import Context
from lakebed.core.errors import Unavailable
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.filer.model import FilerEntry, FilerEvent
from lakebed.filer.settings import FilerSettings
from lakebed.store.admin import BucketConfiguration
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo, read_record
from lakebed.wiring.parts import sections
from support.batch_frames import frame_of, submit
from support.runtimes import runtime_on

ROOT = "/buckets/lake/prod/"


class Told:
    """A filer that reports these events, moving the clock before each."""

    def __init__(self, clock: ManualClock, reported: list[tuple[float, FilerEvent]]) -> None:
        self._clock, self._told = clock, reported
        self.asked: list[tuple[list[str], int]] = []

    async def subscribe(self, prefixes: list[str], *, since_ns: int, tick_s: float) -> AsyncIterator[FilerEvent]:
        self.asked.append((prefixes, since_ns))
        for wait_s, event in self._told:
            await self._clock.advance(wait_s)
            yield event


def made_at(key: str, ts_ns: int, *, old: bool = False, gone: bool = False) -> FilerEvent:
    directory, _, name = f"{ROOT}{key}".rpartition("/")
    entry = FilerEntry(name)
    return FilerEvent(directory, ts_ns, old=entry if old or gone else None, new=None if gone else entry)


class Menders(Reconciler):
    """Notes what it is given."""

    def __init__(self) -> None:
        self.mended: list[str] = []

    async def check(self, listed: Sequence[ObjectInfo], report: ReconcileReport) -> None:
        self.mended += [info.key for info in listed]


def follower(
    store: MemoryStore, clock: ManualClock, reported: list[tuple[float, FilerEvent]], **more: float
) -> tuple[EventFollower, Menders, Told]:
    filer, role = Told(clock, reported), Menders()
    return (
        EventFollower(runtime_on(store, clock, ids=Ids.seeded(1), metrics=Metrics()), filer, ROOT, role, **more),  # type: ignore[arg-type]
        role,
        filer,
    )


async def test_a_manifest_is_repaired_after_its_grace_and_what_waits_is_told_again(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """Created manifests only, each once; the place is noted before the first one that still waits."""
    now = manual_clock.now_ns()
    key = f"{paths.ACCEPTED}x/1.json"
    reported = [
        (0.0, made_at(key, now)),
        (0.0, made_at(key, now + 1)),
        (0.0, made_at(f"{paths.ACCEPTED}x/2.json", now, old=True)),
        (0.0, made_at(f"{paths.ACCEPTED}x/3.json", now, gone=True)),
        (0.0, made_at(f"{paths.ACCEPTED}x/4.tmp", now)),
        (9.0, FilerEvent("", now + 9 * 10**9)),
    ]
    early, role, _ = follower(store, manual_clock, reported)
    await early.listen()
    assert [] == role.mended
    later, role, filer = follower(store, manual_clock, [*reported[:-1], (6.1, FilerEvent("", now + 10**10))])
    await later.listen()

    assert [key] == role.mended
    assert [([ROOT + paths.ACCEPTED], now - 1)] == filer.asked
    third, _, requested = follower(store, manual_clock, [])
    await third.listen()
    assert now + 10**10 == requested.asked[0][1]


async def test_a_follower_begins_now_and_ends_when_its_time_is_over(
    store: MemoryStore, manual_clock: ManualClock
) -> None:
    """At first nothing of the past is requested; a subscription is given up after listen_s; the place is saved."""
    now = manual_clock.now_ns()
    beats = [(2.0, FilerEvent("", now + n * 2 * 10**9)) for n in range(1, 20)]
    one, _, filer = follower(store, manual_clock, beats, listen_s=10.0)
    await one.listen()

    assert now == filer.asked[0][1]
    assert now + 12 * 10**9 == manual_clock.now_ns()
    place = msgspec.json.decode((await store.get(paths.EVENTS)).data)
    assert now + 12 * 10**9 == place["since_ns"]


async def test_more_waiting_events_than_the_limit_are_repaired_early(
    store: MemoryStore, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest first."""
    monkeypatch.setattr(events, "WAITING_MAX", 2)
    now = manual_clock.now_ns()
    one, role, _ = follower(
        store, manual_clock, [(0.0, made_at(f"{paths.ACCEPTED}{n}.json", now + n)) for n in range(3)]
    )
    await one.listen()

    assert [f"{paths.ACCEPTED}0.json"] == role.mended


async def test_a_filer_that_fails_is_asked_again_after_a_pause(store: MemoryStore, manual_clock: ManualClock) -> None:
    """The loop continues."""
    one, _, filer = follower(store, manual_clock, [])
    tries: list[int] = []

    async def failing(prefixes: Any, *, since_ns: int, tick_s: float) -> AsyncIterator[FilerEvent]:
        tries.append(since_ns)
        raise Unavailable("away")
        yield

    filer.subscribe = failing  # type: ignore[method-assign, assignment]
    running = asyncio.ensure_future(one.run())
    await settle()
    await manual_clock.advance(events.PAUSE_S - 0.1)
    assert 1 == len(tries)
    await manual_clock.advance(0.2)
    assert 2 == len(tries)
    running.cancel()


def made_sweeper(store: MemoryStore, clock: ManualClock, metrics: Metrics) -> BlobSweeper:
    runtime = runtime_on(store, clock, ids=Ids.seeded(2), metrics=metrics)
    return BlobSweeper(runtime, horizon_s=3600.0, undecided="finish", name="gc:t")


async def test_a_sweep_reports_each_blob_with_its_age_and_keeps_the_report(
    store: MemoryStore, manual_clock: ManualClock, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verdicts are counted also beyond the rows that are listed; foreign keys are kept; a dry run stores nothing."""
    monkeypatch.setattr(sweeper, "ROWS_MAX", 2)
    for agent in "ab":
        await write_blob(store, submit(frame_of(agent=agent)))
    await store.create(f"{paths.RAW_BLOBS}notes.txt", b"123")
    await manual_clock.advance(3600.0)
    swept = made_sweeper(store, manual_clock, metrics)
    dry = await swept.sweep(dry_run=True)
    assert [] == [info async for info in store.list(paths.GC_REPORTS)]
    report = await swept.sweep(dry_run=False)
    (kept,) = [info async for info in store.list(paths.GC_REPORTS)]

    assert {"finish": 2, "keep": 1} == dry.counts
    assert {"finish": 2, "keep": 1} == report.counts and 2 == len(report.rows)
    assert report == read_record(await store.get(kept.key), GcReport)
    assert (False, "all", manual_clock.now_ns(), 3600) == (
        report.dry_run,
        report.source,
        report.at_unix_ns,
        report.rows[-1].age_s,
    )
    assert 2 == metrics.value("lakebed_batches_gc_blobs_total", verdict="finish")
    (first, _) = [info.key async for info in store.list(paths.ACCEPTED)]
    finished = read_record(await store.get(first), AcceptedBatch)
    assert ("gc:t", manual_clock.now_ns()) == (finished.collector_id, finished.accepted_at_unix_ns)
    assert {"keep": 3} == (await swept.sweep(dry_run=False)).counts


async def test_doctor_examines_only_a_bucket(manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another store passes; the bucket is requested the folders that are protected; an error is a warning."""

    def context(**flags: Any) -> Context:
        settings = load(sections(), flags=flags)
        return Context(
            node="n",
            settings=settings,
            store=MemoryStore(clock=manual_clock),
            clock=manual_clock,
            ids=Ids(),
            metrics=Metrics(),
        )

    (only,) = await checks(context(**{"store.url": "memory:"}))
    assert "pass" == only.verdict
    requested: list[list[str]] = []

    async def state(_: Any, prefixes: list[str]) -> BucketConfiguration:
        requested.append(prefixes)
        if len(requested) > 1:
            raise Unavailable("away", hint="later")
        return BucketConfiguration(False, (), ())

    monkeypatch.setattr("lakebed.store.admin.bucket_state", state)
    there = context(**{"store.url": "s3://lake", "store.prefix": "prod/"})
    assert ["pass", "pass", "pass", "warn", "pass"] == [each.verdict for each in await checks(there)]
    assert [["prod/accepted/v1/", "prod/raw-blobs/v1/", "prod/trail/v2/"]] == requested
    (warned,) = await checks(there)
    assert ("warn", True) == (warned.verdict, "away" in warned.seen)
    assert "pass" == delete_markers(BucketConfiguration(True, (), ())).verdict


async def test_workers_are_those_that_the_settings_ask_for(manual_clock: ManualClock) -> None:
    """Events with a filer, garbage collection with an interval; the root of events is bucket and prefix."""

    def context(**flags: Any) -> Context:
        settings = load(sections(), flags={"store.url": "s3://lake", "store.prefix": "/prod/", **flags})
        return Context(
            node="n",
            settings=settings,
            store=MemoryStore(clock=manual_clock),
            clock=manual_clock,
            ids=Ids(),
            metrics=Metrics(),
        )

    names: Callable[[Context], list[str]] = lambda each: [worker.name for worker in workers(each)]  # noqa: E731
    assert ["batches-reconciler", "batches-findings"] == names(context())
    full = context(
        **{"reconciler.gc_interval_s": 60.0, "reconciler.audit_interval_s": 60.0, "filer.grpc": "127.0.0.1:1"}
    )
    assert ["batches-reconciler", "batches-findings", "batches-events", "batches-audit", "batches-gc"] == names(full)
    made = event_follower(full, reconciler(full), full.settings.of(FilerSettings))
    assert "/buckets/lake/prod/" == made._root
