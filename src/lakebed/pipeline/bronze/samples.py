"""Bronze of batches: every accepted sample once in the table `bronze/batches/lake/samples`.

    list accepted batches → leave out loaded ones → executors read and write → one commit: files, offset and batches

The commit is the one conditional write. A crash before it leaves files that nothing refers to; a run
after it finds the offset and the batches in the table. Of two runs at once one commits, and the other plans again.
Batches that cannot be read are upserted into `quarantine/batches/lake/samples` by their key, before the
commit that passes them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from lakebed.core.context import Context
from lakebed.core.errors import Corrupt, NotFound, Overloaded, Stale
from lakebed.core.feed import Feed, FeedFilter, FeedSlice, Limit, Offset, ahead
from lakebed.core.settings import Settings
from lakebed.delta.log import decode, log_key, overlapping
from lakebed.delta.model import DataFile, Snapshot, TableSpec, WriteBatch
from lakebed.delta.stats import shown
from lakebed.pipeline.bronze import numbering as planning
from lakebed.pipeline.bronze.numbering import Range, SampleStep, SampleWork, StepNote
from lakebed.pipeline.bronze.places import SAMPLES, UNREADABLE, placed
from lakebed.pipeline.bronze.runs import PAGE, IngestReport, ObjectQuarantine, QuarantinedObject, cores_of
from lakebed.pipeline.tables import files
from lakebed.pipeline.tables.table import Table
from lakebed.spark.feeds import open_feed, reads
from lakebed.spark.location import Location
from lakebed.spark.pruning import shared_out
from lakebed.spark.tasks import in_arrow
from lakebed.store.settings import StoreSettings

SOURCE = "lakebed.batches"
OPTIONS = {"settle_s": "0"}  # the overlap replaces the pause that other readers make
OVERLAP_S = 900.0  # as far as the reconciler looks back: lost events, clock skew, retries, crashes
FOREVER = {"through_ns": 2**63 - 1}
NEVER_NS = 1
RACES_MAX = 30
BYTES_PER_TASK = 8 * 1024 * 1024  # of frames
TASKS_PER_CORE = 2
ROWS_PER_FILE = 1_000_000  # what a task holds before it writes
BYTES_PER_FILE = 256 * 1024 * 1024  # the same, as Arrow memory


Plan = Callable[[Offset, Sequence[StepNote], Snapshot, Limit, set[str]], Coroutine[Any, Any, tuple[SampleStep, Offset]]]


class SampleLoader:
    """Synchronous, as Spark is: call it from a thread of its own."""

    def __init__(
        self, spark: SparkSession, context: Context, *, overlap_s: float = OVERLAP_S, name: str = SAMPLES
    ) -> None:
        self._spark, self._context, self._overlap_s = spark, context, overlap_s
        self._location = Location.of(context.settings.of(StoreSettings))
        self._feed: Feed = open_feed(SOURCE, context, OPTIONS)
        schema = from_arrow_schema(self._feed.schema()).json()
        place = asyncio.run(placed(context.store, name))
        self._spec = TableSpec(place, schema, stats=("accepted_at", "time", "time_ns", "agent_id"))
        self.table = self._open(self._spec)
        self.quarantine = ObjectQuarantine(spark, context, asyncio.run(placed(context.store, UNREADABLE)))
        self._notes: dict[int, StepNote | None] = {}  # by version: a log entry never changes

    def step(self, limit: Limit) -> IngestReport | None:
        """Takes up to `limit` of what is new into the table, exactly once. None when nothing is new.

        Raises Overloaded when others keep committing first.
        """
        return self._taken(self._plan, limit)

    def retry(self, limit: Limit) -> IngestReport | None:
        """Loads quarantined batches that can be read now; the rest stays quarantined. None when there are none.

        A batch that is in the table and still quarantined (a run died between the two) only leaves the quarantine.
        """
        total: IngestReport | None = None
        after = ""
        while held := self.quarantine.pieces(after):
            after = held[-1].key
            report = self._taken(partial(self._plan_again, held), limit)
            still = set(report.unreadable) if report else set()
            self.quarantine.remove([piece.key for piece in held if piece.key not in still])
            total = total.plus(report) if total and report else report or total
        return total

    def backfill(self, begin_ns: int, end_ns: int) -> IngestReport | None:
        """Loads the batches accepted in this range that the table does not hold. None when it holds them all."""
        total: IngestReport | None = None
        for page in self._accepted(begin_ns, end_ns):
            report = self._taken(partial(self._plan_again, page), Limit())
            total = total.plus(report) if total and report else report or total
        return total

    def lacking(self, begin_ns: int, end_ns: int) -> int:
        """How many batches `backfill` would load."""
        state = self.table.snapshot()
        return sum(len(self._not_there(page, FOREVER, state)) for page in self._accepted(begin_ns, end_ns))

    def _accepted(self, begin_ns: int, end_ns: int) -> Iterator[list[FeedSlice]]:
        """The batches accepted in this range, page by page."""
        begin, end = {"through_ns": begin_ns - 1, "late_ms": 0}, {"through_ns": end_ns - 1, "late_ms": 0}
        found = asyncio.run(self._feed.slices(begin, end, FeedFilter()))
        return (found[at : at + PAGE] for at in range(0, len(found), PAGE))

    def _taken(self, plan: Plan, limit: Limit) -> IngestReport | None:
        bad: set[str] = set()
        for _ in range(RACES_MAX):
            state = self.table.snapshot()
            number = state.applied.get(SOURCE, -1)
            known = self._known(state)
            if number >= 0 and state.files and not known:
                raise Corrupt(
                    f"{self._spec.name} has rows of {number + 1} loads, and its log names no place to continue from",
                    hint="lakebed bronze backfill loads what it lacks of a range",
                )
            offset = known[0].offset if known else asyncio.run(self._feed.begin())
            looked_ns = self._context.clock.now_ns()
            planned, reached = asyncio.run(plan(offset, known, state, limit, bad))
            if not planned.works:
                return None
            results = self._run(planned.works)
            problems = [problem for one in results for problem in one.problems]
            found_bad = {problem.id for problem in problems} - bad
            bad |= found_bad
            if found_bad and any(work.doubled for work in planned.works):
                continue  # numbers of unreadable batches are not in the table: another batch with them is no duplicate
            self.quarantine.put(problems)
            written = [file for one in results for file in one.files]
            if planned.cut or reached == offset:  # not everything that was listed was taken
                looked_ns = known[0].looked_ns if known else NEVER_NS
            pieces = planning.unnumbered([work.piece for work in planned.works], bad)
            note = planning.note_of(reached, pieces, looked_ns)
            try:
                done = self.table.append_files(
                    written, WriteBatch(SOURCE, number + 1, after=number), note=msgspec.json.encode(note).decode()
                )
            except Stale:
                continue
            if done.repeated:  # the same step of another run: it may have taken other batches
                continue
            more = planned.cut or 0 < limit.objects <= len(planned.works)  # nothing behind the limit was listed
            return self._report(done.version, planned, results, more)
        raise Overloaded(f"others committed to {self._spec.name} first {RACES_MAX} times")

    async def _plan(
        self, offset: Offset, known: Sequence[StepNote], state: Snapshot, limit: Limit, bad: set[str]
    ) -> tuple[SampleStep, Offset]:
        reached = await self._feed.reach(offset, Limit(objects=limit.objects))
        listed = await self._feed.slices(planning.looked_back(offset, self._overlap_s), reached, FeedFilter())
        seen = {taken.id for note in known for taken in note.batches}
        fresh = [piece for piece in listed if piece.id not in seen]
        fresh = [piece async for piece in ahead(fresh, self._feed.described)]
        fresh = await asyncio.to_thread(self._not_there, fresh, offset, state)
        step = planning.plan(planning.unnumbered(fresh, bad), known, limit)
        if step.cut:  # what is left lies behind the last batch taken, or within the overlap before it
            taken_ns = [int(work.piece.id.split("-")[0]) for work in step.works]
            reached = {"through_ns": max(offset["through_ns"], *taken_ns), "late_ms": offset["late_ms"]}
        return step, reached

    async def _plan_again(
        self,
        held: Sequence[FeedSlice],
        offset: Offset,
        known: Sequence[StepNote],
        state: Snapshot,
        limit: Limit,
        bad: set[str],
    ) -> tuple[SampleStep, Offset]:
        """Quarantined batches: the notes name them as taken, so the table itself is checked for them."""
        again = {piece.id for piece in held}
        notes = [planning.without(note, again) for note in known]
        fresh = [piece async for piece in ahead(held, self._feed.described)]
        fresh = await asyncio.to_thread(self._not_there, fresh, FOREVER, state)
        return planning.plan(planning.unnumbered(fresh, bad), notes, msgspec.structs.replace(limit, objects=0)), offset

    def _not_there(self, fresh: list[FeedSlice], offset: Offset, state: Snapshot) -> list[FeedSlice]:
        """Of batches older than the overlap (indexed late by the reconciler), those that the table does not hold."""
        old_ns = offset["through_ns"] - round(self._overlap_s * 1e9)
        late = {piece.id for piece in fresh if int(piece.id.split("-")[0]) <= old_ns}
        if not late or not state.files:
            return fresh
        when = [shown(datetime.fromtimestamp(int(id.split("-")[0]) / 1e9, UTC)) for id in late]
        files = overlapping(state.files, "accepted_at", min(when)[:23], max(when)[:23] + "~")  # to the millisecond
        rows = self.table.rows_of(files, ["batch_id"], state)
        held = {row["batch_id"] for row in rows.filter(rows.batch_id.isin(sorted(late))).distinct().collect()}
        return [piece for piece in fresh if piece.id not in held]

    def _run(self, works: Sequence[SampleWork]) -> list[SampleLoadResult]:
        total = sum(work.piece.size_bytes for work in works)
        cores = cores_of(self._spark)
        tasks = max(1, min(TASKS_PER_CORE * cores, -(-total // BYTES_PER_TASK)))
        by_id = {work.piece.id: work for work in works}
        shares = shared_out([work.piece for work in works], tasks)
        requests = [(msgspec.json.encode([by_id[piece.id] for piece in share]).decode(),) for share in shares]
        frame = self._spark.createDataFrame(requests, "works string").coalesce(1)
        frame = frame.repartition(len(requests)) if len(requests) > 1 else frame
        task = ingesting(SOURCE, self._context.settings, OPTIONS, self._spec, self._location)
        return [
            msgspec.json.decode(row["result"], type=SampleLoadResult)
            for row in in_arrow(frame, task, "result string").collect()
        ]

    def _known(self, state: Snapshot) -> list[StepNote]:
        """The notes of the last steps, newest first, back to where the overlap ends."""

        async def read() -> list[StepNote]:
            found: list[StepNote] = []
            version = state.version
            while version >= 0:
                if version not in self._notes:
                    key = log_key(self._spec.root, version)
                    try:
                        actions = decode((await self._context.store.get(key)).data, key)
                    except NotFound:
                        break  # cleaned up: much older than the overlap, or the table itself has the last note
                    self._notes[version] = note_in(actions)
                note = self._notes[version]
                if note is not None:
                    found.append(note)
                    if note.offset["through_ns"] < found[0].offset["through_ns"] - 2 * self._overlap_s * 1e9:
                        break
                version -= 1
            self._notes = {at: note for at, note in self._notes.items() if at >= version}
            last = note_in([{"commitInfo": {"userMetadata": state.note}}])
            return found or ([last] if last is not None else [])

        return asyncio.run(read())

    def _report(self, version: int, step: SampleStep, results: Sequence[SampleLoadResult], more: bool) -> IngestReport:
        good = sum(one.rows for one in results)
        doubled = sum(one.doubled for one in results)
        problems = [problem for one in results for problem in one.problems]
        quarantined = sum(problem.rows for problem in problems)
        newest_ns = max(int(work.piece.id.split("-")[0]) for work in step.works)
        return IngestReport(
            table=self._spec.name,
            version=version,
            objects=len(step.works),
            rows_in=good + doubled + quarantined,
            good=good,
            quarantined=quarantined,
            duplicates=doubled,
            unreadable=tuple(problem.key for problem in problems),
            through=datetime.fromtimestamp(newest_ns / 1e9, UTC).isoformat(),
            lag_s=max(0.0, round((self._context.clock.now_ns() - newest_ns) / 1e9, 3)) if more else 0.0,
        )

    def _open(self, spec: TableSpec) -> Table:
        context = self._context
        return Table(self._spark, spec, context, location=self._location)


def note_in(actions: Sequence[dict[str, Any]]) -> StepNote | None:
    """The step's note in a log entry; None in one of compaction, retention or another writer."""
    for action in actions:
        text = action.get("commitInfo", {}).get("userMetadata")
        if text:
            try:
                return msgspec.json.decode(text, type=StepNote)
            except (msgspec.DecodeError, msgspec.ValidationError):
                return None
    return None


class SampleLoadResult(msgspec.Struct, frozen=True):
    """The result of some of a task's batches."""

    files: tuple[DataFile, ...] = ()
    problems: tuple[QuarantinedObject, ...] = ()
    rows: int = 0
    doubled: int = 0


def ingesting(
    source: str, settings: Settings, options: dict[str, str], spec: TableSpec, location: Location
) -> Callable[[files.Batches], files.Batches]:
    """The task: its input is a JSON list of SampleWork a row, its output a JSON SampleLoadResult a row."""

    def ingest(batches: files.Batches) -> files.Batches:
        import pyarrow as pa

        filesystem = location.filesystem()
        feed = open_feed(source, settings, options)
        for batch in batches:
            for text in batch["works"].to_pylist():
                works = msgspec.json.decode(text, type=list[SampleWork])
                for result in _ingested(feed, works, spec, location, filesystem):
                    yield pa.RecordBatch.from_arrays([pa.array([msgspec.json.encode(result).decode()])], ["result"])

    return ingest


def _ingested(
    feed: Any, works: Sequence[SampleWork], spec: TableSpec, location: Location, filesystem: Any
) -> Iterator[SampleLoadResult]:
    import pyarrow as pa

    doubled_of = {work.piece.id: work.doubled for work in works}
    held: list[Any] = []
    problems: list[QuarantinedObject] = []
    size = rows = doubled = 0

    def flushed() -> SampleLoadResult:
        table = pa.Table.from_batches(held) if rows else None
        written = files.write_files(table, spec, location, filesystem) if table else []
        return SampleLoadResult(tuple(written), tuple(problems), rows, doubled)

    for read in reads(feed, [work.piece for work in works], spec.columns, FeedFilter()):
        if read.problem:
            problems.append(_problem(read.piece, read.problem))
            continue
        taken = without(read.rows, doubled_of[read.piece.id])
        doubled += read.rows.num_rows - taken.num_rows
        held.append(taken)
        size, rows = size + taken.nbytes, rows + taken.num_rows
        if rows >= ROWS_PER_FILE or size >= BYTES_PER_FILE:
            yield flushed()
            held, problems, size, rows, doubled = [], [], 0, 0, 0
    if held or problems:
        yield flushed()


def without(rows: Any, doubled: Sequence[Range], column: str = "seq") -> Any:
    """The rows whose number lies in none of the ranges."""
    import pyarrow.compute as pc

    for first, last in doubled:
        number = rows.column(column)
        rows = rows.filter(pc.or_(pc.less(number, first), pc.greater(number, last)))
    return rows


def _problem(piece: FeedSlice, problem: str) -> QuarantinedObject:
    return QuarantinedObject(piece.key, problem, piece.id, piece.rows)
