"""What rollups leave behind goes after a while, and nothing that counts goes with it, whatever crashes."""

from __future__ import annotations

from typing import Any

import pytest

from lakebed.batches.model import RetentionState, Sample, write_record
from lakebed.batches.paths import RETENTION_STATE, day_ns, hour_of
from lakebed.core.clock import ManualClock
from lakebed.core.errors import LakebedError
from lakebed.core.metrics import Metrics
from lakebed.rollups import paths
from lakebed.rollups.local_job import LocalJob
from lakebed.rollups.model import RollupManifest, RollupState
from lakebed.rollups.sweeper import EVERY_NS, RollupSweeper
from lakebed.store.memory import MemoryStore
from lakebed.store.model import read_record
from support.crashing_store import Died, Dying
from support.rollup_fixtures import Failing, accept, ask, by_hand, frame, make_roller, shown
from support.runtimes import runtime_on

HOUR_NS = 1_760_000_400_000_000_000
NOW_NS = HOUR_NS + 2 * 3600 * 10**9
DAY_S = 86_400.0


def some(agent: int) -> list[Sample]:
    return [Sample("cpu", HOUR_NS + n * 10**10, n + agent / 8) for n in range(10)]


async def keys(store: MemoryStore, *prefixes: str) -> set[str]:
    return {info.key for prefix in prefixes for info in [each async for each in store.list(prefix)]}


async def left_behind(store: MemoryStore, clock: ManualClock) -> list[tuple[str, Sample]]:
    """A generation that was abandoned behind its last chunk, one that counts, and a late batch with its note."""
    await accept(store, frame("a", 0, some(0)), clock.now_ns() - 10**9)
    gone = await accept(store, frame("gone", 0, some(1)), clock.now_ns() - 10**9)
    try:
        await make_roller(store, clock, job=Failing(store)).run()
    except LakebedError:
        await store.delete(gone.raw_blob_key)
    await make_roller(store, clock).run()
    await accept(store, frame("late", 0, some(2)), clock.now_ns() - 7200 * 10**9, late=True)
    await make_roller(store, clock).run()
    return [("a", each) for each in some(0)] + [("late", each) for each in some(2)]


async def agrees(store: MemoryStore, clock: ManualClock, reported: list[tuple[str, Sample]]) -> None:
    answer = await ask(store, clock, "cpu", 60, HOUR_NS, HOUR_NS + 3600 * 10**9)
    assert by_hand(reported, "cpu", 60) == shown(answer)


async def counted(store: MemoryStore) -> set[str]:
    """Everything that a committed manifest names, and the manifests."""
    state = read_record(await store.get(paths.ROLLER_STATE), RollupState)
    found = set()
    for key in await keys(store, paths.MANIFESTS):
        manifest = read_record(await store.get(key), RollupManifest)
        if state.counts(manifest.generation.sequence):
            found |= {key} | {chunk.key for chunk in (*manifest.chunks, *manifest.index)}
    return found


async def test_only_what_is_old_and_never_counts_is_swept() -> None:
    """Before the horizon nothing goes; after it taken notes and abandoned chunks do, counted, and it is over."""
    clock = ManualClock(NOW_NS)
    store = MemoryStore(clock=clock)
    reported = await left_behind(store, clock)
    made, counts = await keys(store, paths.ROLLUP, paths.INDEX, paths.MANIFESTS), await counted(store)
    assert counts < made

    await clock.advance(29 * DAY_S)
    young = await make_roller(store, clock).run()
    assert (0, made) == (young.swept, await keys(store, paths.ROLLUP, paths.INDEX, paths.MANIFESTS))
    await clock.advance(2 * DAY_S)
    young_note = await accept(store, frame("new", 0, some(3)), clock.now_ns() - 7200 * 10**9, late=True)
    metrics = Metrics()
    report = await make_roller(store, clock, metrics=metrics).run()

    reported += [("new", each) for each in some(3)]
    assert 1 + len(made - counts) == report.swept
    assert 1 == metrics.value("lakebed_rollup_swept_total", what="note")
    assert len(made - counts) == metrics.value("lakebed_rollup_swept_total", what="chunk")
    assert await counted(store) == await keys(store, paths.ROLLUP, paths.INDEX, paths.MANIFESTS)
    note = paths.work_key(young_note.identity, young_note.accepted_at_unix_ns)
    assert {note} == await keys(store, paths.ROLLUP_WORK)
    await agrees(store, clock, reported)
    listed = Listed(store)
    await clock.advance(EVERY_NS / 1e9 + 1)
    assert 0 == (await make_roller(listed, clock).run()).swept
    assert paths.ROLLUP not in listed.prefixes  # no abandoned number is left to look for


async def test_more_than_one_sweep_takes_is_swept_by_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number is done with when nothing of it is left, and what counts stays throughout."""
    monkeypatch.setattr("lakebed.rollups.sweeper.SWEPT_MAX", 2)
    clock = ManualClock(NOW_NS)
    store = MemoryStore(clock=clock)
    await left_behind(store, clock)
    made, counts = await keys(store, paths.ROLLUP, paths.INDEX, paths.MANIFESTS), await counted(store)
    await clock.advance(31 * DAY_S)
    swept = []
    for _ in range(len(made - counts)):
        swept.append((await make_roller(store, clock).run()).swept)
        await clock.advance(EVERY_NS / 1e9 + 1)

    assert len(made - counts) > 2 and 2 + 1 >= max(swept)  # and a note
    assert counts == await keys(store, paths.ROLLUP, paths.INDEX, paths.MANIFESTS)


async def test_a_note_that_nobody_has_looked_at_stays_however_old() -> None:
    """A roller that was away for longer than the horizon still finds its late batches."""
    clock = ManualClock(NOW_NS)
    store = MemoryStore(clock=clock)
    await accept(store, frame("a", 0, some(0)), clock.now_ns() - 10**9)
    await make_roller(store, clock).run()
    await accept(store, frame("late", 0, some(1)), clock.now_ns() - 7200 * 10**9, late=True)
    await clock.advance(40 * DAY_S)

    report = await make_roller(store, clock).run()

    assert (1, 10) == (report.late, report.samples)
    await agrees(store, clock, [(agent, each) for n, agent in enumerate(("a", "late")) for each in some(n)])


async def test_a_crash_anywhere_in_a_sweep_takes_nothing_that_counts() -> None:
    """Killed before or behind any call: queries agree, what counts is whole, and the next run sweeps the rest."""
    point, ended = 0, False
    while not ended:
        point += 1
        clock = ManualClock(NOW_NS)
        store = MemoryStore(clock=clock)
        reported = await left_behind(store, clock)
        await clock.advance(31 * DAY_S)
        dying: Any = Dying(store, point)

        try:
            await make_roller(dying, clock, job=LocalJob(dying)).run()
            ended = True
        except (Died, LakebedError):
            assert dying.dead
        await agrees(store, clock, reported)
        assert await counted(store) <= await keys(store, paths.ROLLUP, paths.INDEX, paths.MANIFESTS)
        await clock.advance(62)
        await make_roller(store, clock).run()

        assert await counted(store) == await keys(store, paths.ROLLUP, paths.INDEX, paths.MANIFESTS)
        assert set() == await keys(store, paths.ROLLUP_WORK)
        await agrees(store, clock, reported)
    assert point > 20


HOUR_END_NS = HOUR_NS + 3600 * 10**9
DAY_END_NS = day_ns(hour_of(HOUR_NS).partition("/")[0]) + 24 * 3600 * 10**9
MERGED_KEY = f"{paths.merged_folder(60, hour_of(HOUR_NS).partition('/')[0])}metric=cpu/merged"
HOURLY_KEYS = {
    paths.rollup_key(60, HOUR_NS, "cpu", "000000000001-a", 0),
    paths.index_key(HOUR_NS, "000000000001-a", 0),
    paths.rollup_manifest_key("000000000001-a", HOUR_NS),
}


@pytest.mark.parametrize(
    ("end_ns", "left"),
    [
        (HOUR_NS, {*HOURLY_KEYS, MERGED_KEY}),
        (HOUR_END_NS - 1, {*HOURLY_KEYS, MERGED_KEY}),
        (HOUR_END_NS, {MERGED_KEY}),
        (DAY_END_NS - 1, {MERGED_KEY}),
        (DAY_END_NS, set()),
    ],
)
async def test_what_retention_removes_in_part_stays_until_its_end_is_removed(end_ns: int, left: set[str]) -> None:
    """Retention ends inside an hour or a day: the rest of it is kept, and its rollups are what answers for it."""
    clock = ManualClock(NOW_NS)
    store, metrics = MemoryStore(clock=clock), Metrics()
    for key in (*HOURLY_KEYS, MERGED_KEY):
        await store.create(key, b"stored")

    swept = await RollupSweeper(runtime_on(store, clock, metrics=metrics), after_s=0).sweep_before(end_ns)

    assert left == await keys(store, "")
    assert (swept, swept) == (4 - len(left), metrics.value("lakebed_rollup_swept_total", what="chunk"))


async def test_a_late_batch_whose_first_samples_retention_has_removed_is_rolled_up_once() -> None:
    """An agent's clock was wrong at its start, or its batch waited for long: what is left of it counts once."""
    clock = ManualClock(NOW_NS)
    store = MemoryStore(clock=clock)
    removed = RetentionState(removed_ns=NOW_NS - 10 * round(DAY_S * 1e9))
    await store.create(RETENTION_STATE, write_record(removed))
    await accept(store, frame("a", 0, some(0)), clock.now_ns() - 10**9)
    await make_roller(store, clock).run()
    old = Sample("cpu", HOUR_NS - 30 * round(DAY_S * 1e9), 1.0)
    await accept(store, frame("late", 0, [old, *some(1)]), clock.now_ns() - 7200 * 10**9, late=True)
    reported = [(agent, each) for n, agent in enumerate(("a", "late")) for each in some(n)]
    taken = []

    for _ in range(3):
        taken.append((await make_roller(store, clock, retain_s=10 * DAY_S).run()).late)
        await agrees(store, clock, reported)
        await clock.advance(60)

    assert [1, 0, 0] == taken
    assert not [key for key in await keys(store, paths.ROLLUP, paths.INDEX) if hour_of(old.time_ns) in key]


class Listed:
    """A store that notes what is listed."""

    def __init__(self, store: Any) -> None:
        self._store, self.prefixes = store, list[str]()

    def list(self, prefix: str, **more: Any) -> Any:
        self.prefixes.append(prefix)
        return self._store.list(prefix, **more)

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._store, verb)


async def test_more_late_batches_than_one_look_takes_are_rolled_up_run_by_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one look leaves out is taken by the next; until then a query says that it is missing, and no note goes."""
    monkeypatch.setattr("lakebed.rollups.late_samples.LATE_MAX", 2)
    clock = ManualClock(NOW_NS)
    store = MemoryStore(clock=clock)
    await accept(store, frame("a", 0, some(0)), clock.now_ns() - 10**9)
    await make_roller(store, clock).run()
    told = [("a", each) for each in some(0)]
    for n in range(5):
        await accept(store, frame(f"late-{n}", 0, some(n)), clock.now_ns() - (7200 - n) * 10**9, late=True)
        told += [(f"late-{n}", each) for each in some(n)]
        await clock.advance(1)
    await clock.advance(40 * DAY_S)

    early = await ask(store, clock, "cpu", 60, HOUR_NS, HOUR_NS + 3600 * 10**9)
    runs = [await make_roller(store, clock).run() for _ in range(3)]

    assert "late batches" in " ".join(early.why_partial)
    assert [(2, 2), (2, 2), (1, 1)] == [(each.late, each.swept) for each in runs]
    await agrees(store, clock, told)


async def test_notes_of_one_instant_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some stores tell times in whole seconds: more notes than one look takes, all alike, do not hold the roller up."""
    monkeypatch.setattr("lakebed.rollups.late_samples.LATE_MAX", 2)
    clock = ManualClock(NOW_NS)
    store = MemoryStore(clock=clock)
    await make_roller(store, clock).run()
    for n in range(4):
        await accept(store, frame(f"late-{n}", 0, some(n)), clock.now_ns() - 7200 * 10**9, late=True)

    report = await make_roller(store, clock).run()

    assert (4, 40) == (report.late, report.samples)
