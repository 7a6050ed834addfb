"""A table's commits that race, without Spark: what others did in between is never undone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Stale
from lakebed.core.ids import Ids
from lakebed.delta.log import Commit
from lakebed.delta.model import CommitResult, DataFile, TableSpec, WriteBatch
from lakebed.delta.plain import schema_json
from lakebed.delta.stats import shown
from lakebed.pipeline.tables import compaction, files
from lakebed.pipeline.tables.table import Table
from lakebed.store.memory import MemoryStore
from support.delta_tables import Folder, read_by_task
from support.runtimes import runtime_on

SPEC = TableSpec("t", schema_json((("id", "long"), ("day", "string"))), keys=("id",), partition_by=("day",))


class World:
    """One table, seen by two writers; `between` happens while the first one's executors are at work."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.location = MemoryStore(clock=ManualClock()), Folder.at(folder)
        self.ours, self.theirs = self.opened(), self.opened()
        self.between: Callable[[], Any] = lambda: None
        self.monkeypatch = monkeypatch
        monkeypatch.setattr(compaction, "_joined", self.joined)

    def opened(self) -> Table:
        clock, ids = ManualClock(), Ids()
        return Table(None, SPEC, runtime_on(self.store, clock, ids), location=self.location)  # type: ignore[arg-type]

    def append(self, day: str, *ids: int, table: Table | None = None) -> DataFile:
        (file,) = files.write_files(rows_of(day, *ids), SPEC, self.location, self.location.filesystem())
        (table or self.theirs).append_files([file])
        return file

    def delete(self, file: DataFile) -> None:
        self.theirs.commit_on(self.theirs.snapshot(), Commit("DELETE", (), (file,)), CommitResult(0), None)

    def joined(
        self, table: Table, planned: Sequence[Sequence[DataFile]], partition_by: Sequence[str]
    ) -> list[compaction.CompactedFiles]:
        """The same task as in Spark, in this process."""
        asked = pa.RecordBatch.from_pydict({"files": [msgspec.json.encode(group).decode() for group in planned]})
        task = compaction.joining(SPEC, self.location, pa.schema([("id", pa.int64())]))
        found = [
            msgspec.json.decode(batch["file"][0].as_py(), type=compaction.CompactedFiles)
            for batch in task(iter([asked]))
        ]
        self.between()
        return found

    def overtake(self, work: Callable[[], Any]) -> None:
        """The next entry loses its race: `work` commits after it was planned, and before it is created."""
        create, raced = self.store.create, list[str]()

        async def overtaken(key: str, data: bytes) -> Any:
            if not raced:
                raced.append(key)
                await asyncio.to_thread(work)
            return await create(key, data)

        self.monkeypatch.setattr(self.store, "create", overtaken)

    def ids(self) -> list[int]:
        state = self.opened().snapshot()
        rows = read_by_task(self.location, SPEC.root, state, {"id": pa.int64()}) if state.files else []
        return sorted(row["id"] for row in rows)


def rows_of(day: str, *ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64()), "day": pa.array([day] * len(ids))})


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_a_group_that_lost_a_file_is_given_up_and_the_others_are_joined(world: World) -> None:
    """Rows that were deleted between the join and its commit do not come back."""
    gone = world.append("a", 1)
    for day, id in (("a", 2), ("b", 3), ("b", 4)):
        world.append(day, id)
    world.between = lambda: world.delete(gone)

    result = world.ours.compact()

    assert [2, 3, 4] == world.ids()
    assert (2, 1, False) == (result.files_removed, result.files_added, result.repeated)


def test_a_compaction_whose_every_group_lost_a_file_commits_nothing(world: World) -> None:
    """It says so, and the table stays at the version that won."""
    gone = world.append("a", 1)
    world.append("a", 2)
    world.between = lambda: world.delete(gone)

    result = world.ours.compact()

    assert ([2], True, 2) == (world.ids(), result.repeated, world.opened().snapshot().version)


def test_an_append_beside_a_compaction_stays(world: World) -> None:
    """The compaction is planned again on what won, with the files it has joined already."""
    world.append("a", 1)
    world.append("a", 2)
    world.between = lambda: world.append("a", 3)

    result = world.ours.compact()

    state = world.opened().snapshot()
    assert ([1, 2, 3], 2, 3) == (world.ids(), len(state.files), result.version)
    assert all(not entry["add"]["dataChange"] for entry in entries(world, 3) if "add" in entry)


def test_a_compaction_that_loses_the_race_of_its_commit_follows_what_won(world: World) -> None:
    """What it has joined is not thrown away for an append beside it."""
    world.append("a", 1)
    world.append("a", 2)
    world.overtake(lambda: world.append("a", 3))

    result = world.ours.compact()

    assert ([1, 2, 3], 3, 2) == (world.ids(), result.version, result.files_removed)


def test_a_dry_compaction_says_what_it_would_do_and_does_nothing(world: World) -> None:
    """Where there is nothing to join it says that too."""
    world.append("a", 1)
    alone = [world.ours.compact(dry_run=dry_run) for dry_run in (True, False)]
    world.append("a", 2)

    result = world.ours.compact(dry_run=True)

    assert [(0, 0, True)] * 2 == [(one.files_added, one.files_removed, one.repeated) for one in alone]
    assert (1, 2, False) == (result.files_added, result.files_removed, result.repeated)
    assert (1, 2) == (world.opened().snapshot().version, len(world.opened().snapshot().files))


def test_a_batch_that_another_applied_while_ours_was_written_is_not_applied_twice(world: World) -> None:
    """The writer that lost the race looks at what won before it goes on behind it."""
    world.append("a", 1)
    world.ours.snapshot()
    late = world.append("a", 2, table=world.opened())
    world.theirs.append_files([late], WriteBatch("app", 7))

    result = world.ours.append_files([late], WriteBatch("app", 7))
    earlier = world.ours.append_files([late], WriteBatch("app", 6))
    with pytest.raises(Stale):
        world.ours.append_files([late], WriteBatch("app", 9, after=8))
    later = world.ours.append_files([late], WriteBatch("app", 8, after=7))

    assert (True, True, False) == (result.repeated, earlier.repeated, later.repeated)
    assert {"app": 8} == world.opened().snapshot().applied


@pytest.mark.parametrize("batch", [WriteBatch("app", 7), WriteBatch("app", 7, after=-1), WriteBatch.once("job")])
@pytest.mark.parametrize("replaces", [False, True])
def test_a_batch_that_another_applied_just_before_our_entry_is_not_applied_behind_it(
    world: World, batch: WriteBatch, replaces: bool
) -> None:
    """Both saw a table without it: the one that loses the race of the entry answers that it is there."""
    world.append("a", 1)
    (late,) = files.write_files(rows_of("a", 2), SPEC, world.location, world.location.filesystem())
    world.overtake(lambda: world.theirs.append_files([late], batch))

    result = (world.ours.replace_by if replaces else world.ours.append_files)([late], batch)

    state = world.opened().snapshot()
    assert (True, 1, 1) == (result.repeated, result.version, state.version)
    assert ([1, 2], 2) == (world.ids(), len(state.files))


def test_a_batch_that_follows_another_is_stale_when_a_rival_came_just_before_our_entry(world: World) -> None:
    """It was made of what the batch before it left: its rows are not put behind the rival's."""
    world.append("a", 1)
    (late,) = files.write_files(rows_of("a", 2), SPEC, world.location, world.location.filesystem())
    world.overtake(lambda: world.theirs.append_files([late], WriteBatch("app", 7, after=-1)))

    with pytest.raises(Stale):
        world.ours.append_files([late], WriteBatch("app", 8, after=-1))

    state = world.opened().snapshot()
    assert ([1, 2], {"app": 7}, 1) == (world.ids(), state.applied, state.version)


def test_a_commit_planned_on_a_state_that_moved_is_not_made(world: World) -> None:
    """An upsert read files that may be gone: it is told, and plans again."""
    file = world.append("a", 1)
    state = world.ours.snapshot()
    world.append("a", 2)

    with pytest.raises(compaction.Raced):
        world.ours.commit_on(state, Commit("MERGE", (), (file,)), CommitResult(0), None)

    assert [1, 2] == world.ids()


def test_files_that_are_old_as_a_whole_leave_without_being_read(
    tmp_path: Path, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file whose last row is exactly at the moment is not old as a whole, nor is one with rows without a time."""
    spec = TableSpec("t", schema_json((("time", "timestamp"),)), stats=("time",))
    location, store = Folder.at(tmp_path), MemoryStore(clock=manual_clock)
    table = Table(None, spec, runtime_on(store, manual_clock, Ids()), location=location)  # type: ignore[arg-type]
    moment = datetime(2026, 11, 16, tzinfo=UTC)
    for times in ([-2, -1], [-1, 0], [0, 1], [-1, None]):
        values = [None if at is None else moment + timedelta(hours=at) for at in times]
        rows = pa.table({"time": pa.array(values, pa.timestamp("us", "UTC"))})
        table.append_files(files.write_files(rows, spec, location, location.filesystem()))
    ends = {"time": shown(moment - timedelta(hours=1))}
    table.append_files([DataFile("theirs.parquet", 1, 2, low=ends, high=ends)])  # nulls unknown: it must be read
    asked: list[list[Any]] = []
    monkeypatch.setattr(table, "rows_of", lambda mixed, *_: asked.append([file.path for file in mixed]) or _Frame())
    monkeypatch.setattr(table, "write", lambda rows: [])
    held = [file.path for file in table.snapshot().files]

    with monkeypatch.context() as patched:
        patched.setattr(compaction, "F", _Column())
        patched.setattr(compaction, "quoted", str)
        result = table.remove_before("time", moment)

    assert [[held[1], held[3], held[4]]] == asked
    assert (8, [held[2]]) == (result.rows_removed, [file.path for file in table.snapshot().files])
    assert moment.timestamp() * 1_000_000 == compaction.kept_since_us(table.snapshot())


@pytest.mark.parametrize(("stay", "removed"), [(0, 5), (3, 2), (5, 0)])
def test_a_removal_counts_the_rows_that_went(
    tmp_path: Path, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch, stay: int, removed: int
) -> None:
    """A file that is old in part, or of which no range is known, is written again with what stays; where everything
    stays there is no version, and none where no file is old."""
    spec = TableSpec("t", schema_json((("time", "timestamp"),)), stats=("time",))
    runtime = runtime_on(MemoryStore(clock=manual_clock), manual_clock, Ids())
    table = Table(None, spec, runtime, location=Folder.at(tmp_path))  # type: ignore[arg-type]
    moment = datetime(2026, 11, 16, tzinfo=UTC)
    table.append_files([DataFile("young", 1, 9, low={"time": shown(moment)}, high={"time": shown(moment)})])
    none_old = table.remove_before("time", moment)
    table.append_files([DataFile("theirs", 1, 5)])
    monkeypatch.setattr(table, "rows_of", lambda mixed, *_: _Frame())
    monkeypatch.setattr(table, "write", lambda rows: [DataFile("rest", 1, stay)] if stay else [])

    with monkeypatch.context() as patched:
        patched.setattr(compaction, "F", _Column())
        patched.setattr(compaction, "quoted", str)
        result = table.remove_before("time", moment)

    state = table.snapshot()
    assert (True, 0) == (none_old.repeated, none_old.version)
    assert (removed, not removed, 2 if removed else 1) == (result.rows_removed, result.repeated, state.version)
    assert (14 - removed, moment.timestamp() * 1_000_000 if removed else 0) == (
        state.rows,
        compaction.kept_since_us(state),
    )


def test_rows_that_come_late_and_are_older_than_an_earlier_removal_go_too(
    tmp_path: Path, manual_clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the moment is an earlier one, by a clock that is behind; the mark of a removal never goes back."""
    spec = TableSpec("t", schema_json((("time", "timestamp"),)), stats=("time",))
    location, store = Folder.at(tmp_path), MemoryStore(clock=manual_clock)
    table = Table(None, spec, runtime_on(store, manual_clock, Ids()), location=location)  # type: ignore[arg-type]
    moment = datetime(2026, 11, 16, tzinfo=UTC)
    monkeypatch.setattr(table, "rows_of", lambda *_: _Frame())
    monkeypatch.setattr(table, "write", lambda rows: [])
    removed = []
    for limit in (moment, moment - timedelta(hours=1)):
        rows = pa.table({"time": pa.array([moment - timedelta(hours=3)] * 2, pa.timestamp("us", "UTC"))})
        table.append_files(files.write_files(rows, spec, location, location.filesystem()))
        with monkeypatch.context() as patched:
            patched.setattr(compaction, "F", _Column())
            removed.append(table.remove_before("time", limit).rows_removed)

    assert ([2, 2], ()) == (removed, table.snapshot().files)
    assert moment.timestamp() * 1_000_000 == compaction.kept_since_us(table.snapshot())


class _Frame:
    """Stands where Spark's frame would: its rows are all filtered out."""

    def filter(self, _: Any) -> _Frame:
        return self

    def select(self, *_: Any) -> _Frame:
        return self

    def coalesce(self, _: int) -> _Frame:
        return self


class _Column:
    def __getattr__(self, name: str) -> Any:
        return lambda *_: self

    def __or__(self, _: object) -> _Column:
        return self

    def __ge__(self, _: object) -> _Column:
        return self


def entries(world: World, version: int) -> list[dict[str, Any]]:
    data = asyncio.run(world.store.get(f"{SPEC.root}/_delta_log/{version:020d}.json")).data
    return [msgspec.json.decode(line) for line in data.splitlines()]
