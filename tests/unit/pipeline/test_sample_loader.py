"""Steps of batches into bronze: how far one may claim to have looked, who is first, and what is set aside. No Spark."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Corrupt, Overloaded
from lakebed.core.feed import FeedFilter, FeedSlice, Limit, Offset, SliceRead
from lakebed.delta.log import log_key
from lakebed.delta.model import DataFile, Snapshot, TableSpec
from lakebed.pipeline.bronze import samples as module
from lakebed.pipeline.bronze.numbering import SampleWork, StepNote, note_of
from lakebed.pipeline.bronze.runs import QuarantinedObject
from lakebed.pipeline.bronze.samples import (
    NEVER_NS,
    RACES_MAX,
    SOURCE,
    SampleLoader,
    SampleLoadResult,
)
from lakebed.store.memory import MemoryStore
from support.fake_tables import FakeTable
from support.runtimes import runtime_on

S = 10**9
OVERLAP_S = 900.0
SCHEMA = '{"type":"struct","fields":[]}'


def piece(at_s: int, first: int, last: int, series: str = "a") -> FeedSlice:
    """A batch that was accepted at this second."""
    at_ns = at_s * S
    return FeedSlice(f"k{at_s}", last - first + 1, 100, id=f"{at_ns:020d}-x", series=series, first=first, last=last)


class FakeFeed:
    """The accepted batches as the index shows them now."""

    def __init__(self) -> None:
        self.pieces: list[FeedSlice] = []

    async def begin(self) -> Offset:
        return {"through_ns": -1, "late_ms": 0}

    async def reach(self, start: Offset, limit: Limit) -> Offset:
        after = [at for at in map(_at, self.pieces) if at > start["through_ns"]]
        chosen = sorted(after)[: limit.objects or None]
        return {"through_ns": max(chosen, default=start["through_ns"]), "late_ms": start["late_ms"]}

    async def slices(self, start: Offset, end: Offset, wanted: FeedFilter) -> list[FeedSlice]:
        return sorted((one for one in self.pieces if start["through_ns"] < _at(one) <= end["through_ns"]), key=_at)

    async def described(self, piece: FeedSlice) -> FeedSlice:
        return next(one for one in self.pieces if one.id == piece.id)


def _at(one: FeedSlice) -> int:
    return int(one.id.split("-")[0])


class FakeQuarantine:
    def __init__(self, done: list[tuple[Any, ...]]) -> None:
        self.held: dict[str, QuarantinedObject] = {}
        self.page = 1000
        self._done = done

    def put(self, problems: Sequence[QuarantinedObject]) -> None:
        self.held |= {each.key: each for each in problems}
        self._done += [("quarantine", each.key) for each in problems]

    def pieces(self, after: str = "") -> list[FeedSlice]:
        found = [FeedSlice(each.key, id=each.id) for key, each in sorted(self.held.items()) if key > after]
        return found[: self.page]

    def remove(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.held.pop(key, None)


class Loader(SampleLoader):
    """A loader on fakes: its tasks only count, and batches whose key is in `bad` cannot be read."""

    def __init__(self, clock: ManualClock) -> None:
        store = MemoryStore(clock=clock)
        self._context: Any = runtime_on(store, clock)
        self._overlap_s = OVERLAP_S
        self._feed: Any = FakeFeed()
        self._spec = TableSpec("batches/samples", '{"type":"struct","fields":[]}')
        self._notes = {}
        self.done: list[tuple[Any, ...]] = []
        self.fake = FakeTable("batches/samples", self.done)
        self.table: Any = self.fake
        self.quarantine: Any = FakeQuarantine(self.done)
        self.bad: set[str] = set()
        self.taken: list[str] = []

    @property
    def pieces(self) -> list[FeedSlice]:
        return self._feed.pieces  # type: ignore[no-any-return]

    @property
    def notes(self) -> list[StepNote]:
        """The notes of the commits, newest first."""
        texts = [entry[3] for entry in self.done if entry[0] == "append_files"]
        return [msgspec.json.decode(text, type=StepNote) for text in reversed(texts)]

    def _known(self, state: Snapshot) -> list[StepNote]:
        return self.notes

    def _not_there(self, fresh: list[FeedSlice], offset: Offset, state: Snapshot) -> list[FeedSlice]:
        return [one for one in fresh if one.key not in self.taken]

    def _run(self, works: Sequence[SampleWork]) -> list[SampleLoadResult]:
        good = [work for work in works if work.piece.key not in self.bad]
        doubled = sum(last - first + 1 for work in good for first, last in work.doubled)
        problems = tuple(
            QuarantinedObject(work.piece.key, "damaged", work.piece.id, work.piece.rows)
            for work in works
            if work.piece.key in self.bad
        )
        rows = sum(work.piece.rows for work in good) - doubled
        return [SampleLoadResult((), problems, rows, doubled)]


@pytest.fixture
def loader(manual_clock: ManualClock) -> Loader:
    made = Loader(manual_clock)
    made.pieces.extend([piece(1000, 0, 9), piece(1001, 10, 19), piece(1002, 20, 29)])
    return made


def test_a_step_takes_what_is_new_and_says_how_far_it_looked(loader: Loader, manual_clock: ManualClock) -> None:
    """The commit carries the offset, the batches and the moment of the listing; a second run finds nothing."""
    report = loader.step(Limit())

    assert report is not None
    assert (3, 30, 30, 0, 0, ()) == (
        report.objects,
        report.rows_in,
        report.good,
        report.duplicates,
        report.quarantined,
        report.unreadable,
    )
    assert (1002 * S, manual_clock.now_ns()) == (loader.notes[0].offset["through_ns"], loader.notes[0].looked_ns)
    assert ["k1000", "k1001", "k1002"] == [f"k{int(each.id.split('-')[0]) // S}" for each in loader.notes[0].batches]
    assert None is loader.step(Limit())


async def _advance(clock: ManualClock) -> None:
    await clock.advance(60.0)


def test_a_step_that_left_something_does_not_claim_to_have_looked_at_it(
    loader: Loader, manual_clock: ManualClock
) -> None:
    """An audit calls a batch lost when a listing after its entry did not bring it: such a claim must be true."""
    first = loader.step(Limit(rows=15))
    cut = loader.notes[0]
    asyncio.run(_advance(manual_clock))
    loader.step(Limit())
    looked_ns = manual_clock.now_ns()
    whole = loader.notes[0]
    asyncio.run(_advance(manual_clock))
    loader.pieces.extend([piece(1003, 30, 39), piece(1004, 40, 49)])
    loader.step(Limit(rows=10))

    assert first is not None and first.lag_s > 0
    assert (NEVER_NS, 1000 * S) == (cut.looked_ns, cut.offset["through_ns"])
    assert (looked_ns, 1002 * S) == (whole.looked_ns, whole.offset["through_ns"])
    assert (looked_ns, 1003 * S) == (loader.notes[0].looked_ns, loader.notes[0].offset["through_ns"])


def test_a_retry_brings_in_what_was_mended_and_claims_no_look(loader: Loader, manual_clock: ManualClock) -> None:
    """What is still damaged stays quarantined; the offset and the moment of the last listing do not move."""
    loader.bad = {"k1001", "k1002"}
    loader.step(Limit())
    before = loader.notes[0]
    asyncio.run(_advance(manual_clock))
    loader.bad = {"k1002"}
    loader.taken = ["k1000"]

    report = loader.retry(Limit())

    assert report is not None
    assert (10, 0, ("k1002",)) == (report.good, report.duplicates, report.unreadable)
    assert ["k1002"] == list(loader.quarantine.held)
    assert (before.offset, before.looked_ns) == (loader.notes[0].offset, loader.notes[0].looked_ns)


def test_a_retry_after_a_crash_only_empties_the_quarantine(loader: Loader) -> None:
    """The batch is in the table already: it is not loaded again, and leaves the quarantine."""
    loader.bad = {"k1001"}
    loader.step(Limit())
    loader.bad, loader.taken = set(), ["k1000", "k1001", "k1002"]
    commits = len(loader.notes)

    assert None is loader.retry(Limit())
    assert ({}, commits) == (loader.quarantine.held, len(loader.notes))
    assert None is loader.retry(Limit())


@pytest.mark.parametrize("order", [("mended", "there", "bad"), ("there", "mended", "bad"), ("mended", "bad", "there")])
def test_a_retry_goes_through_every_page_of_the_quarantine(loader: Loader, order: tuple[str, ...]) -> None:
    """A page with nothing to load ends nothing: what is mended on any of them is loaded, and counted."""
    loader.bad = {"k1000", "k1001", "k1002"}
    loader.step(Limit())
    fate = dict(zip(("k1000", "k1001", "k1002"), order, strict=True))
    loader.bad = {key for key, now in fate.items() if now == "bad"}
    loader.taken = [key for key, now in fate.items() if now == "there"]
    loader.quarantine.page = 1

    report = loader.retry(Limit())

    assert report is not None
    assert (10, 10, tuple(loader.bad)) == (report.good, report.quarantined, report.unreadable)
    assert loader.bad == set(loader.quarantine.held)


def test_a_backfill_loads_what_is_lacking_of_its_range_page_by_page(
    loader: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From its begin up to before its end; a page that the table holds ends nothing."""
    monkeypatch.setattr(module, "PAGE", 2)
    loader.pieces[:] = [piece(1000 + n, n * 10, n * 10 + 9) for n in range(8)]
    loader.taken = ["k1001", "k1002", "k1003"]
    where = (1001 * S, 1007 * S)

    lacking = loader.lacking(*where)
    report = loader.backfill(*where)
    loader.taken += [f"k{1000 + n}" for n in (4, 5, 6)]

    assert report is not None
    assert (3, 3, 30) == (lacking, report.objects, report.good)
    taken = [int(each.id.split("-")[0]) // S for note in loader.notes for each in note.batches]
    assert [1004, 1005, 1006] == sorted(taken)
    assert (0, None) == (loader.lacking(*where), loader.backfill(*where))


class Held:
    """Rows of `batch_id`, as far as a loader asks for them."""

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = ids
        self.batch_id = self

    def isin(self, wanted: Sequence[str]) -> Any:
        return wanted

    def filter(self, wanted: Sequence[str]) -> Held:
        return Held([id for id in self.ids if id in wanted])

    def distinct(self) -> Held:
        return self

    def collect(self) -> list[dict[str, str]]:
        return [{"batch_id": id} for id in self.ids]


def test_a_batch_that_is_indexed_late_is_looked_for_in_the_files_of_its_time(loader: Loader) -> None:
    """Older than the overlap, no note names it any more: the table itself says whether it has it."""
    late, there, edge, fresh = (piece(at_s, 0, 9) for at_s in (1000, 1001, 2000, 2001))
    offset = {"through_ns": 2900 * S, "late_ms": 0}

    def file(name: str, begin: str, end: str) -> DataFile:
        day = "1970-01-01T"
        low, high = ({"accepted_at": f"{day}{text}Z"} for text in (begin, end))
        return DataFile(name, 9, 10, low=low, high=high)

    files = (
        file("before", "00:10:00.000000", "00:16:39.999000"),
        file("first", "00:10:00.000000", "00:16:40.000000"),
        file("last", "00:33:20.000000", "00:50:00.000000"),
        file("after", "00:33:20.001000", "00:50:00.000000"),
    )
    asked: list[Sequence[str]] = []

    def rows_of(chosen: Sequence[DataFile], columns: Sequence[str], state: Snapshot) -> Held:
        asked.append([each.path for each in chosen])
        return Held([there.id, edge.id, fresh.id])

    loader.table = SimpleNamespace(rows_of=rows_of)
    given = [late, there, edge, fresh]

    found = SampleLoader._not_there(loader, given, offset, Snapshot(version=1, files=files))

    assert ([late, fresh], [["first", "last"]]) == (found, asked)
    assert [fresh] == SampleLoader._not_there(loader, [fresh], offset, Snapshot(version=1, files=files))
    assert given == SampleLoader._not_there(loader, given, offset, Snapshot())
    assert 1 == len(asked)


def test_the_lag_is_told_while_the_limit_may_have_left_something(loader: Loader, manual_clock: ManualClock) -> None:
    """Nothing behind the limit is listed, so as many batches as it allows may not be all; fewer are."""
    first, second = loader.step(Limit(objects=2)), loader.step(Limit(objects=2))
    loader.pieces.append(piece(1003, 30, 39))
    whole = loader.step(Limit())

    assert first is not None and second is not None and whole is not None
    assert (2, 1, 1) == (first.objects, second.objects, whole.objects)
    behind_s = round(manual_clock.now_ns() / 1e9 - 1001, 3)
    assert (behind_s, 0.0, 0.0) == (first.lag_s, second.lag_s, whole.lag_s)


def test_what_cannot_be_read_is_set_aside_before_the_commit_that_passes_it(loader: Loader) -> None:
    """A crash between the two reads it again; the other way round it would be lost."""
    loader.bad = {"k1001"}

    report = loader.step(Limit())

    assert report is not None
    assert (30, 20, 10, ("k1001",)) == (report.rows_in, report.good, report.quarantined, report.unreadable)
    assert [("quarantine", "k1001"), "append_files"] == [
        entry if entry[0] == "quarantine" else entry[0] for entry in loader.done
    ]


def test_numbers_of_an_unreadable_batch_are_no_duplicates_of_a_good_one(loader: Loader) -> None:
    """A batch with the same numbers is taken whole, because the unreadable one brought none of them."""
    loader.pieces[:] = [piece(1000, 0, 9), piece(1001, 0, 9)]
    loader.bad = {"k1000"}

    report = loader.step(Limit())

    assert report is not None
    assert (10, 0, 10) == (report.good, report.duplicates, report.quarantined)


def test_numbers_that_came_twice_are_counted_as_duplicates_across_steps(loader: Loader) -> None:
    """In one step or in the next: each number is in the table once."""
    loader.step(Limit())
    loader.pieces.extend([piece(1003, 25, 34), piece(1004, 30, 39)])

    report = loader.step(Limit())

    assert report is not None
    assert (20, 10, 10) == (report.rows_in, report.good, report.duplicates)


@pytest.mark.parametrize("kind", ["other batch", "same batch"])
def test_of_two_runs_one_commits_and_the_other_plans_again(loader: Loader, kind: str) -> None:
    """The rival took the first batch: ours takes the rest, and nothing twice."""
    rival = note_of({"through_ns": 1000 * S, "late_ms": 0}, [piece(1000, 0, 9)], 5)
    number = 1 if kind == "other batch" else 0

    def overtake() -> None:
        loader.fake.before = lambda: None
        loader.done.append(("append_files", "batches/samples", number, msgspec.json.encode(rival).decode()))
        loader.fake.state = Snapshot(version=0, applied={SOURCE: number})

    loader.fake.before = overtake
    report = loader.step(Limit())

    assert report is not None
    assert (2, 20) == (report.objects, report.good)
    assert [2, 1] == [len(note.batches) for note in loader.notes]
    assert {SOURCE: number + 1} == loader.fake.state.applied


def test_a_run_that_is_always_overtaken_gives_up(loader: Loader) -> None:
    """Overloaded, which is retried; nothing of it is committed."""
    tries = []

    def overtake() -> None:
        tries.append(1)
        loader.fake.state = Snapshot(version=0, applied={SOURCE: 10 * len(tries)})

    loader.fake.before = overtake

    with pytest.raises(Overloaded):
        loader.step(Limit())

    assert (RACES_MAX, []) == (len(tries), loader.done)


def test_listing_goes_back_over_the_overlap(loader: Loader) -> None:
    """A batch that was indexed late, with an acceptance before the offset, is found; one that is known is not."""
    loader.step(Limit())
    loader.pieces.append(piece(1002 - round(OVERLAP_S) + 1, 50, 59, series="late"))
    loader.pieces.append(piece(1003, 30, 39))

    report = loader.step(Limit())

    assert report is not None
    assert (2, 20) == (report.objects, report.good)


def test_notes_are_read_back_as_far_as_two_overlaps_and_cached(manual_clock: ManualClock) -> None:
    """Entries of others are passed over; an entry is read once however many steps follow."""
    loader = Loader(manual_clock)
    through_s = [100, None, 2000, None, 4000, 4100]
    reads: list[str] = []

    async def fill() -> None:
        for version, at_s in enumerate(through_s):
            note = note_of({"through_ns": at_s * S, "late_ms": 0}, [], 0) if at_s is not None else None
            text = msgspec.json.encode(note).decode() if note else "another writer's"
            entry = msgspec.json.encode({"commitInfo": {"userMetadata": text}})
            await loader._context.store.create(log_key(loader._spec.root, version), entry)

    asyncio.run(fill())
    get = loader._context.store.get

    async def counted(key: str) -> Any:
        reads.append(key)
        return await get(key)

    loader._context.store.get = counted
    known = SampleLoader._known(loader, Snapshot(version=5))
    first = len(reads)
    SampleLoader._known(loader, Snapshot(version=5))

    assert [4100, 4000, 2000] == [note.offset["through_ns"] // S for note in known]
    assert (4, 4) == (first, len(reads))
    loader._notes[0] = None  # of a step long ago
    SampleLoader._known(loader, Snapshot(version=5))
    assert [2, 3, 4, 5] == sorted(loader._notes)  # no more than a load looks back to


def test_the_note_of_the_very_first_version_counts(manual_clock: ManualClock) -> None:
    """Its batches are within the overlap of the second load: unknown, they would be loaded twice."""
    loader = Loader(manual_clock)
    notes = [note_of({"through_ns": at_s * S, "late_ms": 0}, [piece(at_s, 0, 9)], 0) for at_s in (100, 200)]

    async def fill() -> None:
        for version, note in enumerate(notes):
            entry = msgspec.json.encode({"commitInfo": {"userMetadata": msgspec.json.encode(note).decode()}})
            await loader._context.store.create(log_key(loader._spec.root, version), entry)

    asyncio.run(fill())

    assert notes[::-1] == SampleLoader._known(loader, Snapshot(version=1))


@pytest.mark.parametrize("kept", [3, 4])
def test_a_log_that_was_cleaned_up_behind_the_last_steps_stops_no_load(manual_clock: ManualClock, kept: int) -> None:
    """A load a month: the entries of the load before are gone. The last note is then the table's own."""
    loader = Loader(manual_clock)
    note = note_of({"through_ns": 4100 * S, "late_ms": 0}, [], 0)
    text = msgspec.json.encode(note).decode()

    async def fill() -> None:
        for version, said in ((3, {"userMetadata": text}), (4, {"lakebedNote": text})):
            if version >= kept:
                entry = msgspec.json.encode({"commitInfo": said})
                await loader._context.store.create(log_key(loader._spec.root, version), entry)

    asyncio.run(fill())

    assert [note] == SampleLoader._known(loader, Snapshot(version=4, note=text))


def test_a_load_that_lost_its_place_does_not_begin_again(loader: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are in the table, and nothing says which: all of them again would be doubles."""
    loader.step(Limit())
    loader.fake.state = msgspec.structs.replace(loader.fake.state, files=(DataFile("part", 9, 30),))
    monkeypatch.setattr(Loader, "_known", lambda self, state: [])

    with pytest.raises(Corrupt, match="names no place"):
        loader.step(Limit())


def test_a_large_task_is_reported_in_parts_and_each_problem_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a task holds is written when it is enough; the counts of the parts add up to the whole."""
    import pyarrow as pa

    works = [SampleWork(piece(n, 10 * n, 10 * n + 1), ((10 * n, 10 * n),) if n == 3 else ()) for n in range(1, 6)]
    rows = {work.piece.id: pa.record_batch({"seq": [work.piece.first, work.piece.last]}) for work in works}
    read = [
        SliceRead(work.piece, None, "damaged") if n == 0 else SliceRead(work.piece, rows[work.piece.id])
        for n, work in enumerate(works)
    ]
    written: list[list[int]] = []

    def write(table: Any, *given: Any, **more: Any) -> list[Any]:
        written.append(table["seq"].to_pylist())
        return []

    monkeypatch.setattr(module, "ROWS_PER_FILE", 3)
    monkeypatch.setattr(module, "reads", lambda *given: iter(read))
    monkeypatch.setattr(module.files, "write_files", write)

    results = list(module._ingested(None, works, TableSpec("t", SCHEMA), None, None))  # type: ignore[arg-type]

    assert [[20, 21, 31], [40, 41, 50, 51]] == written
    assert [(3, 1, ["k1"]), (4, 0, [])] == [
        (one.rows, one.doubled, [problem.key for problem in one.problems]) for one in results
    ]
