"""Windows of time as a query gets them: which resolution is read, which windows count, limits, and what is missing."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from lakebed.batches import acceptance, metric_names, paths, sources
from lakebed.batches import window_query as rollups
from lakebed.batches.index import write_rows
from lakebed.batches.matchers import MATCHERS_MAX, PATTERN_CHARS_MAX, Matcher, Selector, parse, query_labels
from lakebed.batches.model import AcceptedBatch, Batch, BatchIdentity, Kind, Sample, write_record
from lakebed.batches.query import Querier
from lakebed.batches.sources import ReadResult
from lakebed.batches.window_query import RollupQuerier
from lakebed.core.clock import ManualClock
from lakebed.core.errors import Conflict, Invalid, NotFound, Overloaded
from lakebed.rollups import generations
from lakebed.rollups.codec.chunk import decode_rollup, pack, rollup_schema_v1
from lakebed.rollups.model import Generation, RollupManifest, RollupState
from lakebed.rollups.paths import GENERATION_DIGITS, INDEX, MANIFESTS, ROLLER_STATE, ROLLUP, rollup_folder
from lakebed.rollups.reader import CoverageSnapshot
from lakebed.store.memory import MemoryStore
from lakebed.store.model import read_record
from support.batch_frames import submit
from support.rollup_fixtures import accept, ask, by_hand, frame, make_roller, make_sources, shown
from support.runtimes import runtime_on

HOUR_NS = 1_760_000_400_000_000_000  # a full hour
SECOND_NS = 10**9
METRIC = "disk/used %"


def samples(*at_s: int, value: float = 1.0, metric: str = METRIC, **labels: str) -> list[Sample]:
    return [Sample(metric, HOUR_NS + each * SECOND_NS, value + each, labels=labels) for each in at_s]


async def rolled(*held: list[Sample], then_s: int = 7000) -> tuple[MemoryStore, ManualClock]:
    """One agent a list, accepted and rolled up."""
    clock = ManualClock(HOUR_NS + then_s * SECOND_NS)
    store = MemoryStore(clock=clock)
    for number, each in enumerate(held):
        await accept(store, frame(f"a{number}", 0, each), clock.now_ns() - SECOND_NS)
    await make_roller(store, clock).run()
    return store, clock


@pytest.mark.parametrize(
    ("window_s", "resolution_s"), [(60, 60), (120, 60), (300, 300), (600, 300), (3600, 3600), (7200, 3600), (90, 0)]
)
async def test_the_coarsest_rollup_that_fits_a_window_is_read(window_s: int, resolution_s: int) -> None:
    """A window of whole smaller ones is added up from them, exactly as from samples; any other from samples."""
    held = samples(*range(0, 3600, 7), host="h")
    store, clock = await rolled(held)
    from_ns = HOUR_NS // (window_s * SECOND_NS) * window_s * SECOND_NS
    answer = await ask(store, clock, METRIC, window_s, from_ns, HOUR_NS + 7200 * SECOND_NS)

    assert resolution_s == answer.resolution_s and window_s == answer.window_s
    assert by_hand([("a0", each) for each in held], METRIC, window_s) == shown(answer)
    assert (METRIC, from_ns, HOUR_NS + 7200 * SECOND_NS, clock.now_ns()) == (
        answer.metric,
        answer.from_unix_ns,
        answer.to_unix_ns,
        answer.accepted_through_unix_ns,
    )
    assert (answer.sources["rollup"] > 0) is bool(resolution_s) and (answer.sources["raw"] > 0) is not bool(
        resolution_s
    )


@pytest.mark.parametrize(
    ("from_s", "to_s", "starts"),
    [
        (0, 60, [0]),
        (0, 61, [0, 60]),
        (1, 61, [60]),
        (0, 120, [0, 60]),
        (1, 60, []),
        (60, 180, [60, 120]),
    ],
)
async def test_windows_that_begin_in_the_range_are_answered_whole(from_s: int, to_s: int, starts: list[int]) -> None:
    """The end is exclusive; a range that holds no begin of a window is empty; both ways of reading agree."""
    held = samples(0, 59, 60, 119, 120, 179)
    store, clock = await rolled(held)
    fresh = MemoryStore(clock=clock)
    await accept(fresh, frame("a0", 0, held), clock.now_ns() - SECOND_NS)

    for each in (store, fresh):
        answer = await ask(each, clock, METRIC, 60, HOUR_NS + from_s * SECOND_NS, HOUR_NS + to_s * SECOND_NS)
        found = [(bucket.start_ns - HOUR_NS) // SECOND_NS for series in answer.series for bucket in series.buckets]
        assert starts == found
        assert all(bucket.count == 2 for series in answer.series for bucket in series.buckets)


@pytest.mark.parametrize(
    ("window_s", "from_ns", "to_ns"),
    [
        (0, 0, 10),
        (60, 10, 10),
        (60, -1, 10),
        (60, 0, 366 * 86400 * SECOND_NS + 1),
    ],
)
async def test_what_is_no_range_of_windows_is_refused(window_s: int, from_ns: int, to_ns: int) -> None:
    """No window, nothing in it, or more than a year."""
    clock = ManualClock(HOUR_NS)
    with pytest.raises(Invalid, match="up to a year"):
        await ask(MemoryStore(clock=clock), clock, METRIC, window_s, from_ns, to_ns)


async def test_exactly_a_year_of_windows_is_answered() -> None:
    """The limit itself is within it."""
    clock = ManualClock(HOUR_NS)

    assert [] == (await ask(MemoryStore(clock=clock), clock, METRIC, 60, 0, 366 * 86400 * SECOND_NS)).series


async def test_limits_of_a_query_are_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks, windows and rows; exactly the limit is answered."""
    store, clock = await rolled(samples(0, 60, 120))

    async def requested() -> Any:
        return await ask(store, clock, METRIC, 60, HOUR_NS, HOUR_NS + 3600 * SECOND_NS)

    for name, enough, output in (("BUCKETS_MAX", 3, "windows"), ("ROWS_MAX", 3, "rows")):
        monkeypatch.setattr(rollups, name, enough)
        assert 3 == len((await requested()).series[0].buckets)
        monkeypatch.setattr(rollups, name, enough - 1)
        with pytest.raises(Invalid, match=f"more than {enough - 1} {output}"):
            await requested()
        monkeypatch.setattr(rollups, name, 1000)


async def test_the_limit_of_rows_is_that_of_the_query_and_not_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of chunks and samples of several batches add up: a query's memory does not grow with their number."""
    store, clock = await rolled(samples(0, 60))
    for number in range(3):
        await accept(store, frame(f"b{number}", 0, samples(0, 60)), clock.now_ns() - SECOND_NS)

    monkeypatch.setattr(rollups, "ROWS_MAX", 8)
    whole = await ask(store, clock, METRIC, 60, HOUR_NS, HOUR_NS + 3600 * SECOND_NS)
    monkeypatch.setattr(rollups, "ROWS_MAX", 7)

    assert 4 == len(whole.series)
    with pytest.raises(Invalid, match="more than 7 rows"):
        await ask(store, clock, METRIC, 60, HOUR_NS, HOUR_NS + 3600 * SECOND_NS)


async def test_series_of_a_query_are_matched_and_come_in_order_of_their_labels() -> None:
    """Matchers hold for rollups as for samples; another metric of the same series is not mixed in."""
    held = [
        *samples(0, host="b"),
        *samples(0, host="a", value=2.0),
        *samples(0, host="c", value=3.0),
        *samples(0, metric="other", host="a", value=9.0),
    ]
    store, clock = await rolled(held)
    fresh = MemoryStore(clock=clock)
    await accept(fresh, frame("a0", 0, held), clock.now_ns() - SECOND_NS)

    for each in (store, fresh):
        answer = await RollupQuerier(runtime_on(each, clock), make_sources(each, clock)).range(
            Selector(METRIC, [parse("host!=c")]), 60, HOUR_NS, HOUR_NS + 3600 * SECOND_NS, [0.5]
        )
        assert [("a", 2.0, [2.0]), ("b", 1.0, [1.0])] == [
            (series.labels["host"], series.buckets[0].sum, series.buckets[0].quantiles) for series in answer.series
        ]


async def test_a_window_of_nan_alone_has_a_count_and_no_numbers() -> None:
    """No quantile, no least, no last; beside numbers NaN is only counted."""
    held = [*samples(0, 1, value=math.nan), *samples(60, value=5.0), *samples(61, value=math.nan)]
    store, clock = await rolled(held)
    answer = await ask(store, clock, METRIC, 60, HOUR_NS, HOUR_NS + 3600 * SECOND_NS, [0.0, 1.0])
    nothing, mixed = answer.series[0].buckets

    assert (2, 2, 0.0, -1, [None, None]) == (
        nothing.count,
        nothing.nan_count,
        nothing.sum,
        nothing.last_ns,
        nothing.quantiles,
    )
    assert all(math.isnan(each) for each in (nothing.min, nothing.max, nothing.last))
    assert (2, 1, 65.0, 65.0, 65.0, [65.0, 65.0]) == (
        mixed.count,
        mixed.nan_count,
        mixed.sum,
        mixed.min,
        mixed.last,
        mixed.quantiles,
    )
    assert HOUR_NS + 60 * SECOND_NS == mixed.last_ns == mixed.start_ns


async def test_a_quantile_is_unknown_where_an_old_chunk_has_no_sketch() -> None:
    """Samples beside a chunk of version 1 are not taken for the whole window; windows of their own have theirs."""
    store, clock = await rolled(samples(0, 10, 20))
    for key in [info.key async for info in store.list(ROLLUP)]:
        new = decode_rollup((await store.get(key)).data)
        store.bucket.overwrite(key, pack(new.select(rollup_schema_v1().names).cast(rollup_schema_v1())))
    await accept(store, frame("a0", 3, samples(30, 70)), clock.now_ns() - SECOND_NS)

    answer = await ask(store, clock, METRIC, 60, HOUR_NS, HOUR_NS + 3600 * SECOND_NS, [0.5])

    (series,) = answer.series
    assert [(4, [None]), (1, [71.0])] == [(each.count, each.quantiles) for each in series.buckets]


async def test_more_batches_than_a_query_reads_make_the_answer_partial() -> None:
    """Exactly the limit is whole; what is rolled up does not count against it."""
    store, clock = await rolled(samples(0), samples(1))
    for number in range(3):
        await accept(store, frame(f"b{number}", 0, samples(number)), clock.now_ns() - SECOND_NS)

    async def requested(limit: int) -> Any:
        return await RollupQuerier(runtime_on(store, clock), make_sources(store, clock, limit)).range(
            Selector(METRIC), 60, HOUR_NS, HOUR_NS + 3600 * SECOND_NS
        )

    whole, cut = await requested(3), await requested(2)
    only = "read without the live state of other collectors: set batches.query_collector on one of them"
    assert ([only], 5, 3) == (whole.why_partial, len(whole.series), whole.sources["raw"])
    assert [only, "more than 2 raw batches are in no rollup yet"] == cut.why_partial
    assert 2 == cut.sources["raw"] and cut.partial


class Spooled:
    """A spool that gives these batches; None for one that cannot be read."""

    def __init__(self, *held: tuple[AcceptedBatch, Batch | None]) -> None:
        self._held = held

    async def unlanded(self) -> AsyncIterator[tuple[AcceptedBatch, Batch | None]]:
        for each in self._held:
            yield each

    def damaged_files(self) -> int:
        return 0


def spooled_sources(store: MemoryStore, clock: ManualClock, spool: Spooled, limit: int = 10) -> sources.SampleSources:
    made = make_sources(store, clock, limit)
    made._spool = spool
    return made


async def test_a_spooled_batch_that_was_rolled_up_long_ago_counts_once() -> None:
    """After a restart the spool gives it once more: only the index still knows that rollups have it."""
    clock = ManualClock(HOUR_NS + 3000 * SECOND_NS)
    store = MemoryStore(clock=clock)
    frames = [frame(agent, 0, samples(1, 2)) for agent in ("old", "new")]
    old = await accept(store, frames[0], clock.now_ns() - SECOND_NS)
    new = acceptance.manifest(submit(frames[1]), at_ns=clock.now_ns(), collector_id="c", attempt_id="a")
    for _ in range(2):
        await make_roller(store, clock).run()
        await clock.advance(7200)
    spool = Spooled(*((one, submit(data).batch) for one, data in zip((old, new), frames, strict=True)))

    answer = await RollupQuerier(runtime_on(store, clock), spooled_sources(store, clock, spool)).range(
        Selector(METRIC), 3600, HOUR_NS, HOUR_NS + 3600 * SECOND_NS
    )

    assert [("new", 2), ("old", 2)] == [(each.labels["agent_id"], each.buckets[0].count) for each in answer.series]
    assert (1, 1) == (answer.sources["spool"], answer.sources["rollup"])


async def test_a_query_says_what_it_lacks_of_a_spool() -> None:
    """More batches than it reads, and one that cannot be read unless it has it from elsewhere."""
    clock = ManualClock(HOUR_NS + 7000 * SECOND_NS)
    store = MemoryStore(clock=clock)
    held = [submit(frame(f"a{n}", 0, samples(n))) for n in range(3)]
    made = [acceptance.manifest(each, at_ns=clock.now_ns(), collector_id="c", attempt_id="a") for each in held]
    whole = list(zip(made, [each.batch for each in held], strict=True))

    async def requested(spool: Spooled, limit: int) -> tuple[list[str], int]:
        querier = Querier(spooled_sources(store, clock, spool, limit), points_max=100, clock=clock)
        answer = await querier.range(Selector(METRIC), HOUR_NS, HOUR_NS + 3600 * SECOND_NS)
        return answer.why_partial[1:], answer.sources["spool"]

    assert ([], 3) == await requested(Spooled(*whole), 3)
    assert (["more than 2 spooled batches are not in the bucket yet"], 2) == await requested(Spooled(*whole), 2)
    lacking = ["1 accepted batches cannot be read: see repairs/v1/"]
    assert (lacking, 2) == await requested(Spooled((made[0], None), *whole[1:]), 5)
    assert ([], 3) == await requested(Spooled(*whole, (made[0], None)), 5)


@pytest.mark.parametrize("lost", [False, True])
async def test_points_behind_a_part_of_an_index_that_cannot_be_read_are_said_to_be_missing(lost: bool) -> None:
    """A chunk of the rollups' index that is damaged or lost, and a segment of the index by time."""
    store, clock = await rolled(samples(0), samples(1))
    data = frame("b", 0, samples(2))
    accepted = await accept(store, data, clock.now_ns() - SECOND_NS, indexed=False)
    await write_rows(store, [acceptance.entry_of(accepted, acceptance.span_of(submit(data).batch))], writer="c")
    (segment,) = [info.key async for info in store.list(paths.ACCEPTED_INDEX)]
    store.bucket.overwrite(segment, b"junk")
    (chunk,) = [info.key async for info in store.list(INDEX)]
    store.bucket.overwrite(chunk, b"junk")
    real = store.get

    async def get(key: str) -> Any:
        if lost and key == chunk:
            raise NotFound(key)
        return await real(key)

    store.get = get  # type: ignore[method-assign]
    querier = Querier(make_sources(store, clock), points_max=100, clock=clock)
    answer = await querier.range(Selector(METRIC), HOUR_NS, HOUR_NS + 3600 * SECOND_NS, late_s=1e6)

    assert [
        "1 index segments cannot be read: lakebed batches reconcile --cold",
        "1 rollup or index chunks cannot be read",
    ] == answer.why_partial[1:]


async def test_batches_of_another_time_cost_a_query_no_room() -> None:
    """A backlog of old samples that is accepted now does not cut off a query of the last hour."""
    clock = ManualClock(HOUR_NS + 7000 * SECOND_NS)
    store = MemoryStore(clock=clock)
    for number in range(4):
        data = frame(f"a{number}", 0, samples(number * 3600))
        accepted = await accept(store, data, clock.now_ns() - SECOND_NS, indexed=False)
        await write_rows(store, [acceptance.entry_of(accepted, acceptance.span_of(submit(data).batch))], writer="c")

    querier = Querier(make_sources(store, clock, 1), points_max=100, clock=clock)
    answer = await querier.range(Selector(METRIC), HOUR_NS, HOUR_NS + 3600 * SECOND_NS, late_s=1e6)

    assert (["a0"], []) == ([each.labels["agent_id"] for each in answer.series], answer.why_partial[1:])
    assert 1 == answer.sources["raw"]


@pytest.mark.parametrize("at_once", [1, 2, 3])
async def test_chunks_are_read_once_however_many_are_held_at_once(
    monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """A query over more chunks than it holds keys of counts every sample once."""
    monkeypatch.setattr(rollups, "CHUNKS_AT_ONCE", at_once)
    held = samples(10, 3700, 7300, 10900)
    store, clock = await rolled(held, then_s=15000)

    answer = await ask(store, clock, METRIC, 60, HOUR_NS, HOUR_NS + 4 * 3600 * SECOND_NS)

    assert by_hand([("a0", each) for each in held], METRIC, 60) == shown(answer)
    assert 4 == answer.sources["rollup"]


async def test_more_late_batches_than_a_query_reads_make_the_answer_partial() -> None:
    """They come from their notes, behind what is settled, and share the limit."""
    store, clock = await rolled(samples(0))
    for number in range(3):
        await accept(store, frame(f"b{number}", 0, samples(number)), clock.now_ns() - 7200 * SECOND_NS, late=True)

    async def requested(limit: int) -> Any:
        return await RollupQuerier(runtime_on(store, clock), make_sources(store, clock, limit)).range(
            Selector(METRIC), 60, HOUR_NS, HOUR_NS + 3600 * SECOND_NS
        )

    whole, cut = await requested(3), await requested(2)

    assert ([], 3) == (whole.why_partial[1:], whole.sources["raw"])
    assert (["more than 2 raw batches are in no rollup yet"], 2) == (cut.why_partial[1:], cut.sources["raw"])


async def test_points_beyond_the_limit_of_batches_are_said_to_be_missing() -> None:
    """Indexed ones and those of the tail share the limit."""
    store, clock = await rolled(samples(0), samples(1), samples(2))

    async def requested(limit: int) -> Any:
        querier = Querier(make_sources(store, clock, limit), points_max=100, clock=clock)
        return await querier.range(Selector(METRIC), HOUR_NS, HOUR_NS + 3600 * SECOND_NS, late_s=1e6)

    assert [] == (await requested(3)).why_partial[1:] and 3 == (await requested(3)).sources["raw"]
    assert ["more than 2 raw batches are in the range"] == (await requested(2)).why_partial[1:]
    assert 2 == (await requested(2)).sources["raw"]


async def test_points_are_in_order_inside_the_range_and_have_their_kind() -> None:
    """The start is in it, the end is not; points of several batches are one series."""
    clock = ManualClock(HOUR_NS + 100 * SECOND_NS)
    store = MemoryStore(clock=clock)
    later = [Sample(METRIC, HOUR_NS + s * SECOND_NS, s, Kind.COUNTER, {"h": "1"}) for s in (5, 3)]
    earlier = [Sample(METRIC, HOUR_NS + s * SECOND_NS, s, Kind.COUNTER, {"h": "1"}) for s in (1, 4)]
    await accept(store, frame("a", 0, later), clock.now_ns() - 2 * SECOND_NS)
    await accept(store, frame("a", 2, earlier), clock.now_ns() - SECOND_NS)
    querier = Querier(make_sources(store, clock), points_max=3, clock=clock)

    async def requested(from_s: int, to_s: int, **more: float) -> Any:
        return await querier.range(Selector(METRIC), HOUR_NS + from_s * SECOND_NS, HOUR_NS + to_s * SECOND_NS, **more)

    answer = await requested(1, 5, late_s=1000)
    (series,) = answer.series
    assert [1.0, 3.0, 4.0] == [value for _, value in series.points] and "counter" == series.kind
    assert {"agent_id": "a", "h": "1"} == series.labels and 2 == answer.sources["raw"]
    with pytest.raises(Invalid, match="more than 3 points"):
        await requested(1, 6, late_s=1000)
    assert clock.now_ns() == answer.accepted_through_unix_ns
    soon = await requested(1, 5, late_s=10)
    assert ([], HOUR_NS + 15 * SECOND_NS) == (soon.series, soon.accepted_through_unix_ns)
    latest = await querier.latest(Selector(METRIC), lookback_s=97)
    assert [[(HOUR_NS + 5 * SECOND_NS, 5.0)]] == [each.points for each in latest.series]
    assert [] == (await querier.latest(Selector(METRIC), lookback_s=94)).series
    for from_s, to_s in ((5, 5), (0, 31 * 86400 + 1)):
        with pytest.raises(Invalid, match="31 days"):
            await requested(from_s, to_s)


def test_a_reading_says_everything_that_is_missing() -> None:
    """Its own reasons first, then batches and chunks that cannot be read, with their numbers."""
    assert [] == ReadResult().why()
    assert [
        "x",
        "2 accepted batches cannot be read: see repairs/v1/",
        "1 rollup or index chunks cannot be read",
    ] == ReadResult(missing=["x"], damaged=2, damaged_chunks=1).why()


async def test_work_of_a_query_goes_on_a_few_at_a_time_and_its_error_is_raised() -> None:
    """No more than READ_AHEAD at once; what was under way has ended before the error comes."""
    running, most, ended = 0, 0, 0

    async def one(number: int) -> None:
        nonlocal running, most, ended
        running += 1
        most = max(most, running)
        await a_while()
        running -= 1
        ended += 1
        if number == 3:
            raise Invalid("three")

    with pytest.raises(Invalid, match="three"):
        await sources.several([one(number) for number in range(40)])
    assert (40, sources.READ_AHEAD) == (ended, most)


async def a_while() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def test_matchers_have_a_form_and_limits() -> None:
    """Each operator, values that hold operators themselves, and what is too much."""
    assert [Matcher("a", "=", "b=c"), Matcher("a", "!=", ""), Matcher("a", "=~", "x|y"), Matcher("a", "!~", "z")] == [
        parse(text) for text in ("a=b=c", " a !=", "a=~x|y", "a!~z")
    ]
    for wrong in ("", "a", "=b"):
        with pytest.raises(Invalid, match="not a matcher"):
            parse(wrong)
    with pytest.raises(Invalid, match="needs a metric"):
        Selector("")
    many = [Matcher("a", "=", "b")] * MATCHERS_MAX
    Selector("m", many)
    with pytest.raises(Invalid, match="over the limit of 32"):
        Selector("m", [*many, *many[:1]])
    Selector("m", [Matcher("a", "=~", "x" * PATTERN_CHARS_MAX)])
    with pytest.raises(Invalid, match="over the limit of 1000"):
        Selector("m", [Matcher("a", "=~", "x" * (PATTERN_CHARS_MAX + 1))])
    with pytest.raises(Invalid, match="does not compile"):
        Selector("m", [Matcher("a", "!~", "(")])
    both = Selector("m", [Matcher("a", "=~", "x.*"), Matcher("a", "!~", ".*z"), Matcher("b", "!=", "1")])
    assert [True, False, False, False] == [
        both.takes(labels) for labels in ({"a": "xy\n"}, {"a": "xz"}, {"a": "ax"}, {"a": "x", "b": "1"})
    ]


def test_a_label_that_claims_an_agent_is_renamed_until_its_name_is_free() -> None:
    """The sender's identity is never replaced."""
    assert {"agent_id": "me", "h": "1"} == query_labels("me", {"h": "1"})
    own = {"agent_id": "you", "exported_agent_id": "x"}
    assert {"agent_id": "me", "exported_agent_id": "x", "exported_exported_agent_id": "you"} == query_labels("me", own)
    assert {"agent_id": "you", "exported_agent_id": "x"} == own


def gen(sequence: int, last_at_ns: int = 10) -> Generation:
    return Generation(sequence, f"d{sequence}", 1, last_at_ns)


def test_a_state_counts_committed_numbers_that_were_not_abandoned() -> None:
    """And gives the next generation a number that nobody had."""
    state = RollupState(committed=4, abandoned=(2, 6))
    assert [True, False, True, False, False] == [state.counts(number) for number in (1, 2, 4, 5, 6)]
    names = [paths.manifest_id(each, at) for each, at in ((frame_identity(1), 50), (frame_identity(2), 30))]
    made = generations.generation(state, names, (60,))
    assert (7, 30, 50) == (made.sequence, made.first_at_ns, made.last_at_ns)
    assert made.digest == generations.generation(state, reversed(names), (60,)).digest
    assert made.digest != generations.generation(state, names, (300,)).digest
    assert f"{7:0{GENERATION_DIGITS}d}-{made.digest}" == made.id


def frame_identity(number: int) -> BatchIdentity:
    return BatchIdentity(f"a{number}", "b", 0, 1)


def test_a_generation_is_begun_committed_or_abandoned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one under way is a conflict; limits are reported."""
    begun = generations.begin(RollupState(), gen(1), (60,))
    assert (gen(1), (60,)) == (begun.pending, begun.windows_s) and begun == generations.begin(begun, gen(1), (60,))
    for wrong in (lambda: generations.begin(begun, gen(2), (60,)), lambda: generations.commit(begun, gen(2))):
        with pytest.raises(Conflict):
            wrong()
    done = generations.commit(begun, gen(1))
    assert (1, None, (gen(1),)) == (done.committed, done.pending, done.recent)
    gone = generations.abandon(begun)
    assert ((1,), None, 0) == (gone.abandoned, gone.pending, gone.committed) and done is generations.abandon(done)
    monkeypatch.setattr(generations, "RECENT_MAX", 1)
    monkeypatch.setattr(generations, "ABANDONED_MAX", 1)
    with pytest.raises(Overloaded):
        generations.commit(generations.begin(done, gen(2), (60,)), gen(2))
    with pytest.raises(Overloaded):
        generations.abandon(generations.begin(gone, gen(2), (60,)))


def test_what_is_settled_only_moves_on_and_drops_older_generations() -> None:
    """Nanoseconds of the overlap, milliseconds of notes; a generation that ends exactly at what is settled stays."""
    overlap_ns = 5_000_000_000
    state = RollupState(recent=(gen(1, 4_999_999_999), gen(2, 5_000_000_000)), notes_ms=100)
    after = generations.advance(state, 10_000_000_000, 9_000, overlap_ns)
    back = generations.advance(after, 1, 1, overlap_ns)

    assert (10_000_000_000, 5_000_000_000, 4_000, (gen(2, 5_000_000_000),)) == (
        after.through_ns,
        after.settled_ns,
        after.notes_ms,
        after.recent,
    )
    assert back == after


async def test_a_cold_run_believes_only_manifests_of_numbers_that_count() -> None:
    """What an abandoned generation covered is not covered; one that cannot be read is reported."""
    clock = ManualClock(HOUR_NS)
    store = MemoryStore(clock=clock)
    for number in (1, 2, 3):
        made = RollupManifest("lightmetrics.rollup_manifest.v1", gen(number), (60,), 1, (f"m{number}",), (), ())
        await store.create(gen(number).manifest_key, write_record(made))
    await store.create(gen(4).manifest_key, b"damaged")
    await store.create(f"{MANIFESTS}notes.txt", b"x")
    state = RollupState(committed=4, abandoned=(2,))

    found = await make_roller(store, clock)._all_covered(CoverageSnapshot(state, frozenset({"m0"})))

    assert {"m0", "m1", "m3"} == found.ids and 1 == len(found.damaged)


async def test_the_kind_of_a_series_survives_in_rollups(manual_clock: ManualClock) -> None:
    """A counter is a counter in windows from samples, from chunks and from both, in any order."""
    store = MemoryStore(clock=manual_clock)
    hour_ns = 3600 * 10**9
    begin_ns = manual_clock.now_ns() // hour_ns * hour_ns
    await manual_clock.advance(7200)
    for number, rolled in enumerate((True, False)):
        samples = [
            Sample("requests", begin_ns + number * 10**9, 1.0, Kind.COUNTER),
            Sample("load", begin_ns + number * 10**9, 1.0, Kind.GAUGE),
        ]
        await accept(store, frame("a", number * 2, samples), manual_clock.now_ns())
        if rolled:
            await make_roller(store, manual_clock).run()

    kinds = {}
    for metric in ("requests", "load"):
        answer = await ask(store, manual_clock, metric, 3600, begin_ns, begin_ns + hour_ns)
        kinds[metric] = ([series.kind for series in answer.series], answer.sources["rollup"], answer.sources["raw"])

    assert {"requests": (["counter"], 1, 1), "load": (["gauge"], 1, 1)} == kinds


async def test_a_query_reads_as_many_chunks_as_its_range_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 2,000 of one hour, none merged yet: every one of them counts."""
    monkeypatch.setattr(rollups, "decode_rollup", functools.cache(decode_rollup))  # they have the same bytes
    store, clock = await rolled(samples(0))
    folder = rollup_folder(60, paths.hour_of(HOUR_NS), METRIC)
    (made,) = [info.key async for info in store.list(folder)]
    chunk, state = (await store.get(made)).data, await store.get(ROLLER_STATE)
    for number in range(2, 2101):
        await store.create(f"{folder}{number:012d}-x-000.lmrollup.zst", chunk)
    more = msgspec.structs.replace(read_record(state, RollupState), committed=2100)
    await store.replace(ROLLER_STATE, write_record(more), state.info.etag)

    answer = await ask(store, clock, METRIC, 60, HOUR_NS, HOUR_NS + 60 * SECOND_NS)

    assert (2100, [2100]) == (answer.sources["rollup"], [each.count for each in answer.series[0].buckets])
    assert ["read without the live state of other collectors" in why for why in answer.why_partial] == [True]


@pytest.mark.parametrize(("most", "told"), [(2, False), (1, True)])
async def test_names_say_when_not_all_series_were_counted(
    monkeypatch: pytest.MonkeyPatch, most: int, told: bool
) -> None:
    """Every metric is named beyond the limit too; a series that comes again does not count against it."""
    monkeypatch.setattr(metric_names, "SERIES_MAX", most)
    store, clock = await rolled([*samples(0, 60, host="a"), *samples(1, 61, host="b")], samples(2, metric="z"))

    end_ns = HOUR_NS + 3600 * SECOND_NS
    names = await metric_names.metric_names(make_sources(store, clock), HOUR_NS, end_ns, clock.now_ns())

    assert [METRIC, "z"] == [each.metric for each in names.metrics]
    assert (most, told) == (names.metrics[0].series, any("more than 1 series" in why for why in names.why_partial))
