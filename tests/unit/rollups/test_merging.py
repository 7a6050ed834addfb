"""Chunks are merged as they age, and a query over merged chunks returns what it returned before, bit for bit."""

from __future__ import annotations

import pytest

from lakebed.batches.model import Kind, Sample
from lakebed.batches.reader import RawBatches
from lakebed.batches.retention import BatchRetention
from lakebed.batches.settled import WAIT_S
from lakebed.core.clock import ManualClock
from lakebed.core.errors import Unavailable
from lakebed.rollups import merging, paths
from lakebed.rollups.model import MergedSpans
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo
from support.counting_store import CountingStore
from support.rollup_fixtures import accept, ask, by_hand, frame, make_roller, shown
from support.runtimes import runtime_on

S = 10**9
HOUR_NS, DAY_NS = 3600 * S, 86_400 * S
BEGIN_NS = 1_759_276_800 * S  # 2025-10-01
LAST_NS = BEGIN_NS + 29 * DAY_NS  # the day before the last of that month


def samples(begin_ns: int, count: int, step_s: int) -> list[Sample]:
    return [
        Sample("cpu", begin_ns + n * step_s * S, 0.1 * n - 1e9 * (n % 3), Kind.COUNTER, {"host": f"h{n % 2}"})
        for n in range(count)
    ]


async def filled(
    store: MemoryStore, clock: ManualClock, days: int, first_ns: int = BEGIN_NS
) -> list[tuple[str, Sample]]:
    """Days with two batches each, rolled up twice a day."""
    reported: list[tuple[str, Sample]] = []
    for day in range(days):
        for half in range(2):
            begin_ns = first_ns + day * DAY_NS + half * 12 * HOUR_NS
            some = samples(begin_ns, 24, 1800)
            reported += [("a", sample) for sample in some]
            await clock.advance((begin_ns + 12 * HOUR_NS - clock.now_ns()) / S)
            await accept(store, frame("a", 1000 * (2 * day + half), some), clock.now_ns())
            await make_roller(store, clock).run()
    return reported


async def test_a_month_of_chunks_is_read_from_one_object() -> None:
    """Hours become days, and days a month; the windows are those of the samples."""
    clock = ManualClock(BEGIN_NS)
    store = CountingStore(clock=clock)
    reported = await filled(store, clock, 33)
    for _ in range(6):
        await clock.advance(3600)
        await make_roller(store, clock).run()
    spans = set((await make_roller(store, clock)._merger.spans.read()).value.through)
    store.gets.clear()

    answer = await ask(store, clock, "cpu", 3600, BEGIN_NS, BEGIN_NS + 31 * DAY_NS)

    assert {"month=2025-10", "date=2025-10-01", "date=2025-11-01"} <= spans
    assert 1 == answer.sources["rollup"]
    assert len([key for key in store.gets if "lmrollup" in key]) <= 1
    month = [each for each in reported if each[1].time_ns < BEGIN_NS + 31 * DAY_NS]
    assert by_hand(month, "cpu", 3600) == shown(answer)


async def test_a_run_merges_so_many_spans_and_the_next_ones_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lake whose rollups were away for long holds the roller's lease no longer for it; months wait for their days."""
    clock = ManualClock(BEGIN_NS)
    store = MemoryStore(clock=clock)
    with monkeypatch.context() as none:
        none.setattr(merging, "SPANS_PER_RUN", 0)
        await filled(store, clock, 5, first_ns=BEGIN_NS + 28 * DAY_NS)
    monkeypatch.setattr(merging, "SPANS_PER_RUN", 2)

    runs = [(await make_roller(store, clock).run()).merged for _ in range(5)]

    assert ([2, 2, 1], [0]) == (runs[:3], runs[4:])
    days = {f"date=2025-10-{day}" for day in (29, 30, 31)}
    assert (
        days | {"date=2025-11-01", "month=2025-10"}
        == (await make_roller(store, clock)._merger.spans.read()).value.through.keys()
    )


async def test_late_samples_of_a_merged_day_are_counted_once() -> None:
    """Before, between and after the day is merged again; a reader with an older look falls back to the hours."""
    clock = ManualClock(BEGIN_NS)
    store = MemoryStore(clock=clock)
    reported = await filled(store, clock, 3)
    await clock.advance(3600)
    await make_roller(store, clock).run()
    late = samples(BEGIN_NS + HOUR_NS + S, 5, 60)
    await accept(store, frame("late", 0, late), clock.now_ns())
    reported += [("late", sample) for sample in late]
    whole = (BEGIN_NS, BEGIN_NS + 3 * DAY_NS)

    raw = await ask(store, clock, "cpu", 300, *whole)
    await clock.advance(60)
    await make_roller(store, clock).run()
    rolled = await ask(store, clock, "cpu", 300, *whole)
    await clock.advance(7200)
    await make_roller(store, clock).run()
    again = await ask(store, clock, "cpu", 300, *whole)

    expected = by_hand(reported, "cpu", 300)
    assert [expected] * 3 == [shown(each) for each in (raw, rolled, again)]
    assert "date=2025-10-01" in (await make_roller(store, clock)._merger.spans.read()).value.through


async def test_a_span_that_was_taken_out_meanwhile_is_not_used() -> None:
    """A generation that touches it was committed between the two looks."""
    from lakebed.batches.reader import RawBatches
    from lakebed.rollups.reader import RollupCoverage

    store = MemoryStore(clock=ManualClock())
    coverage = RollupCoverage(store, RawBatches(store))

    assert {"date=b": 2} == coverage.usable({"date=a": 1, "date=b": 2}, {"date=b": 2})
    assert {} == coverage.usable({"date=a": 1}, {"date=a": 3})
    assert {} == await coverage.merged_spans()
    kept = MergedSpans({"date=2025-10-01": 1, "month=2025-10": 1, "date=2025-10-02": 1})
    key = f"{paths.ROLLUP}window=60s/date=2025-10-01/hour=00/metric=cpu/000000000002-x-000.lmrollup.zst"
    from lakebed.rollups.merging import touched

    assert {"date=2025-10-02"} == set(kept.without(touched([key])).through)


async def test_a_day_with_a_damaged_chunk_is_not_merged() -> None:
    """It stays readable hour by hour, and the query says that a chunk is missing."""
    clock = ManualClock(BEGIN_NS)
    store = MemoryStore(clock=clock)
    await filled(store, clock, 1)
    (key, *_) = [info.key async for info in store.list(f"{paths.ROLLUP}window=60s/")]
    await store.delete(key)
    await store.create(key, b"half")
    await clock.advance(2 * 86_400)

    report = await make_roller(store, clock).run()

    assert 0 == report.merged
    assert {} == (await make_roller(store, clock)._merger.spans.read()).value.through


@pytest.mark.parametrize("lost", ["chunk", "list"])
@pytest.mark.parametrize("span", ["date=2025-10-30", "month=2025-10"])
async def test_a_merged_chunk_that_the_store_loses_is_missed(lost: str, span: str) -> None:
    """The register lists the day or month: an answer without its samples is partial, for every metric of it."""
    clock = ManualClock(LAST_NS)
    store = MemoryStore(clock=clock)
    await filled(store, clock, 1 if span.startswith("date") else 3, LAST_NS)
    await clock.advance(3600)
    await make_roller(store, clock).run()
    assert span in (await make_roller(store, clock)._merger.spans.read()).value.through
    whole = (LAST_NS, LAST_NS + DAY_NS)
    before = await ask(store, clock, "cpu", 3600, *whole)
    gone = [
        info.key
        async for info in store.list(paths.ROLLUP_MERGED)
        if f"/{span}/" in info.key and info.key.endswith(".zst" if lost == "chunk" else ".json")
    ]
    for key in gone:
        await store.delete(key)

    after = await ask(store, clock, "cpu", 3600, *whole)

    damage = [["chunks cannot be read" in why for why in each.why_partial] for each in (before, after)]
    assert ([False], [False, True]) == (damage[0], damage[1])
    assert gone


async def test_days_whose_merged_chunks_are_lost_are_merged_again_for_their_month() -> None:
    """A month is not made of less than its days, and what is lost of a copy comes back from the chunks themselves."""
    clock = ManualClock(LAST_NS)
    store = MemoryStore(clock=clock)
    reported = await filled(store, clock, 2, LAST_NS)
    register = make_roller(store, clock)._merger.spans
    assert {"date=2025-10-30"} == set((await register.read()).value.usable)
    for info in [info async for info in store.list(paths.ROLLUP_MERGED)]:
        await store.delete(info.key)
    for _ in range(3):
        await clock.advance(86_400)
        await make_roller(store, clock).run()

    answer = await ask(store, clock, "cpu", 3600, LAST_NS, LAST_NS + 2 * DAY_NS)

    assert "month=2025-10" in (await register.read()).value.usable
    assert by_hand(reported, "cpu", 3600) == shown(answer)


async def test_spans_that_retention_removes_leave_the_register() -> None:
    """What is removed on purpose is not reported as damage, and the register does not grow for ever."""
    clock = ManualClock(BEGIN_NS)
    store = MemoryStore(clock=clock)
    await filled(store, clock, 3)
    await clock.advance(3600)
    await make_roller(store, clock).run()
    register = make_roller(store, clock)._merger.spans
    held = set((await register.read()).value.through)
    await clock.advance(30 * 86_400)
    for _ in range(3):  # settled, removed, and nothing is left
        await BatchRetention(runtime_on(store, clock), retention_days=10.0, owner="r").run()
        await clock.advance(WAIT_S)

    await make_roller(store, clock, retain_s=10 * 86_400).run()

    answer = await ask(store, clock, "cpu", 3600, BEGIN_NS, BEGIN_NS + DAY_NS)
    assert ("date=2025-10-01" in held, MergedSpans()) == (True, (await register.read()).value)
    assert not [why for why in answer.why_partial if "cannot be read" in why]
    assert [why for why in answer.why_partial if "batches.retention_days" in why]


async def test_a_month_that_retention_reaches_is_read_by_its_days() -> None:
    """The merged chunk of a month would keep its first days until its last one is old enough."""
    clock = ManualClock(BEGIN_NS)
    store = MemoryStore(clock=clock)
    reported = await filled(store, clock, 33)
    for _ in range(6):
        await clock.advance(3600)
        await make_roller(store, clock).run()
    whole = set((await make_roller(store, clock)._merger.spans.read()).value.through)
    for _ in range(3):
        await BatchRetention(runtime_on(store, clock), retention_days=20.0, owner="r").run()
        await clock.advance(WAIT_S)

    for _ in range(2):
        await make_roller(store, clock, retain_s=20 * 86_400).run()

    merged = {info.key.split("/")[3] async for info in store.list(paths.ROLLUP_MERGED)}
    removed_ns = await RawBatches(store).removed_ns()
    begin_ns = removed_ns // DAY_NS * DAY_NS + DAY_NS
    answer = await ask(store, clock, "cpu", 3600, begin_ns, BEGIN_NS + 33 * DAY_NS)
    kept = [(agent, sample) for agent, sample in reported if sample.time_ns >= begin_ns]
    assert "month=2025-10" in whole and removed_ns > BEGIN_NS + 12 * DAY_NS
    assert not {span for span in merged if span.startswith("month=") or span <= "date=2025-10-12"}
    assert by_hand(kept, "cpu", 3600) == shown(answer)


async def test_a_generation_is_committed_only_after_its_days_left_the_register() -> None:
    """The register cannot be written: the generation waits, and late samples are read from their batch meanwhile."""
    clock = ManualClock(BEGIN_NS)

    class Refusing(MemoryStore):
        refusing = False

        async def replace(self, key: str, data: bytes, etag: str) -> ObjectInfo:
            if self.refusing and key == paths.ROLLER_MERGED:
                raise Unavailable("no answer")
            return await super().replace(key, data, etag)

    store = Refusing(clock=clock)
    reported = await filled(store, clock, 2)
    await clock.advance(3600)
    await make_roller(store, clock).run()
    late = samples(BEGIN_NS + HOUR_NS + S, 5, 60)
    await accept(store, frame("late", 0, late), clock.now_ns())
    reported += [("late", sample) for sample in late]
    await clock.advance(60)
    store.refusing = True

    with pytest.raises(Unavailable):
        await make_roller(store, clock).run()

    answer = await ask(store, clock, "cpu", 300, BEGIN_NS, BEGIN_NS + 2 * DAY_NS)
    assert by_hand(reported, "cpu", 300) == shown(answer)


async def test_a_year_of_windows_reads_tens_of_objects() -> None:
    """A list and a chunk for each month, and for each day of the one that runs; the other chunks are not looked at."""
    clock = ManualClock(BEGIN_NS)
    store = CountingStore(clock=clock)
    weeks, reported = 56, list[tuple[str, Sample]]()
    for week in range(weeks):
        some = samples(BEGIN_NS + 7 * week * DAY_NS, 7, 86_400)
        reported += [("a", sample) for sample in some]
        await clock.advance(7 * 86_400)
        await accept(store, frame("a", 7 * week, some), clock.now_ns())
        await make_roller(store, clock, windows_s=(3600,)).run()
    for _ in range(3):
        await clock.advance(3600)
        await make_roller(store, clock, windows_s=(3600,)).run()
    end_ns = BEGIN_NS + 7 * weeks * DAY_NS
    from_ns = end_ns - 365 * DAY_NS
    chunks = len([info.key async for info in store.list(paths.ROLLUP)])
    store.gets.clear()
    store.lists.clear()

    answer = await ask(store, clock, "cpu", 3600, from_ns, end_ns)

    assert by_hand([each for each in reported if each[1].time_ns >= from_ns], "cpu", 3600) == shown(answer)
    assert {"counter"} == {series.kind for series in answer.series}  # also after both merges
    assert 7 * weeks == chunks
    assert 12 + 27 == answer.sources["rollup"] == len([key for key in store.gets if key.endswith(".lmrollup.zst")])
    assert len(store.gets) + len(store.lists) < 100, (store.gets, store.lists)
