"""A run of a model that dies at any call of the store, or whose answer is lost: the next one ends exactly once.

The tables are the real ones, with Parquet in a folder and the log in memory; only frames are Arrow's, not Spark's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Invalid, LakebedError, OutcomeUnknown
from lakebed.core.ids import Ids
from lakebed.delta.model import DataFile, Snapshot, TableSpec, key_of
from lakebed.delta.plain import schema_json
from lakebed.pipeline.models import changes, expectations, job
from lakebed.pipeline.models.definition import Model
from lakebed.pipeline.models.expectations import ExpectationCounts
from lakebed.pipeline.models.folder import sql_model
from lakebed.pipeline.models.graph import graph_of
from lakebed.pipeline.models.job import ModelRunner
from lakebed.pipeline.models.plan import CUT_OFF, Window
from lakebed.pipeline.models.runs import ModelReport
from lakebed.pipeline.tables import files
from lakebed.pipeline.tables.table import Table
from lakebed.store.memory import MemoryStore
from support.crashing_store import Dying
from support.delta_tables import Folder
from support.runtimes import runtime_on

ORDERS = schema_json((("id", "long"), ("total", "long")))
ARROW = pa.schema([("id", pa.int64()), ("total", pa.int64())])
POINTS_MAX = 60


class Rows:
    """An Arrow table with what the job asks of a frame."""

    def __init__(self, table: pa.Table) -> None:
        self.table, self.columns = table, table.column_names
        self.schema = from_arrow_schema(table.schema)

    def cache(self) -> Rows:
        return self

    def unpersist(self) -> None: ...


class ArrowTable(Table):
    """A table whose frames are Arrow's."""

    def write(self, rows: Any) -> list[DataFile]:
        if not rows.table.num_rows:
            return []
        return files.write_files(rows.table, self.spec, self.location, self.location.filesystem())

    def read(self, version: int | None = None, *, columns: Sequence[str] = ()) -> Any:
        state = self.snapshot(version)
        return self.rows_of(state.files, self.columns_of(state), state)

    def readable(self, after: int, until: int, *, joined: bool = True) -> bool:
        kept = (Path(self.location.uri(key_of(self.spec.root, file.path))) for file in self.snapshot(until).files)
        return all(file.exists() for file in kept)

    def rows_of(self, chosen: Sequence[DataFile], columns: Sequence[str], state: Snapshot, **_: Any) -> Any:
        read = [
            files.read_file(self.location, self.location.filesystem(), self.spec.root, one.path, ARROW)
            for one in chosen
        ]
        return Rows(pa.concat_tables(read) if read else ARROW.empty_table())


class Runner(ModelRunner):
    def table(self, org_id: str, project_id: str, source: str, spec: TableSpec | None = None) -> Table:
        made = super().table(org_id, project_id, source, spec)
        return ArrowTable(None, made.spec, self.runtime, location=self._location)


class Project:
    """Silver orders, and one model over their changes; `quarantines` are the totals that it does not want."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, model: Model) -> None:
        self.store, self.location, self.folder = MemoryStore(clock=ManualClock()), Folder.at(folder), folder
        self.graph = graph_of([model], {"orders"})
        spec = TableSpec("silver/acme/shop/orders", ORDERS, keys=("id",))
        self.orders = ArrowTable(None, spec, runtime_on(self.store, ManualClock(), Ids()), location=self.location)
        monkeypatch.setattr(job, "applied", _applied)
        monkeypatch.setattr(changes, "_latest", _latest)
        monkeypatch.setattr(changes, "exists", _there)
        for name in ("judged", "counted", "kept", "quarantined"):
            monkeypatch.setattr(expectations, name, globals()[f"_{name}"])

    def add(self, *rows: tuple[int, int]) -> None:
        self.orders.append_files(self.orders.write(Rows(pa.Table.from_pylist([_row(*row) for row in rows], ARROW))))

    def has(self, key: str) -> bool:
        return any(key.endswith(each.name) for each in self.folder.rglob("*.parquet"))

    def rewrite_and_vacuum(self, *rows: tuple[int, int]) -> None:
        """The same rows and these in one new file, as after a compaction and a week; the former files are deleted."""
        former = [file.path for file in self.orders.snapshot().files]
        held = [tuple(row.values()) for row in self.orders.read().table.to_pylist()]
        self.orders.replace(Rows(pa.Table.from_pylist([_row(*row) for row in (*held, *rows)], ARROW)))
        for file in self.folder.rglob("*.parquet"):
            if any(path.endswith(file.name) for path in former):
                file.unlink()

    def run(self, store: Any = None, window: Window | None = None, full_refresh: bool = False) -> ModelReport:
        runtime = runtime_on(store or self.store, ManualClock(), Ids())
        runner = Runner(None, self.graph, runtime, location=self.location)
        reports, error = runner.run("acme", "shop", window=window, full_refresh=full_refresh)
        if error is not None:
            raise error
        return reports[0]

    def rows(self, layer: str = "gold") -> list[tuple[int, int]]:
        runner = Runner(None, self.graph, runtime_on(self.store, ManualClock(), Ids()), location=self.location)
        held = runner.table("acme", "shop", f"{layer}.spent").read().table
        return sorted((row["id"], row["total"]) for row in held.to_pylist())


def _row(number: int, total: int) -> dict[str, int]:
    return {"id": number, "total": total}


def _applied(model: Model, frames: Mapping[Any, Rows], ids: Ids) -> Rows:
    return next(iter(frames.values()))


def _latest(table: Any, written: Iterable[tuple[int, list[DataFile]]], state: Snapshot) -> Rows:
    return Rows(table.rows_of([file for _, some in written for file in some], (), state).table)


async def _there(store: Any, key: str) -> bool:
    return True  # data files are in the folder, not in the store


def _judged(rows: Rows, expect: Any) -> Rows:
    return rows


def _counted(rows: Rows, expect: Any) -> ExpectationCounts:
    bad = sum(row["total"] < 0 for row in rows.table.to_pylist())
    return ExpectationCounts(rows.table.num_rows, bad)


def _kept(rows: Rows, expect: Any) -> Rows:
    return Rows(pa.Table.from_pylist([row for row in rows.table.to_pylist() if row["total"] >= 0], ARROW))


def _quarantined(rows: Rows, expect: Any, *more: Any) -> Rows:
    return Rows(pa.Table.from_pylist([row for row in rows.table.to_pylist() if row["total"] < 0], ARROW))


READS = "select id, total from {{ changes('orders') }}"
APPEND = f"-- incremental: append\n{READS}"
MERGE = f"-- incremental: merge\n-- keys: id\n{READS}"
EXPECT = "-- expect: total >= 0 | quarantine\n"


class LostAnswers:
    """A store whose next commit is applied, and answered with nothing."""

    def __init__(self, store: Any, part: str) -> None:
        self._store, self._part, self.lost = store, part, 0

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._store, verb)

    async def create(self, key: str, data: bytes) -> Any:
        made = await self._store.create(key, data)
        if self._part in key and "_delta_log" in key and not self.lost:
            self.lost += 1
            raise OutcomeUnknown("no answer")
        return made


@pytest.mark.parametrize("sql", [APPEND, MERGE, EXPECT + APPEND, EXPECT + MERGE])
def test_a_run_that_dies_at_any_call_is_finished_by_the_next_exactly_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: str
) -> None:
    """Before and behind every call of the store, between quarantine and table too; rows that came since come once."""
    monkeypatch.setattr(expectations, "QUARANTINE_SCHEMA", from_arrow_schema(ARROW))
    model, died, alive = sql_model("spent", sql), 0, 0
    for point in range(1, POINTS_MAX):
        with monkeypatch.context() as patched:
            project = Project(tmp_path / str(point), patched, model)
            project.add((1, 10), (2, -20))
            project.run()
            project.add((3, 30), (4, -40))
            dying = Dying(project.store, point)
            try:
                project.run(dying)
            except LakebedError:
                died += 1
            if point % 3:
                project.add((5, 50))
            report = project.run()
            more = [(5, 50)] if point % 3 else []
            good, bad = project.rows(), project.rows("quarantine") if EXPECT in sql else []

            assert [(1, 10), (2, -20), (3, 30), (4, -40), *more] == sorted(good + bad), point
            assert "made" == report.state or not more, point
            assert "unchanged" == project.run().state
        alive = 0 if dying.dead else alive + 1  # a call that fails by itself has nothing behind it
        if alive > 4:
            break

    assert died > 5
    assert point < POINTS_MAX - 1


@pytest.mark.parametrize("sql", [APPEND, MERGE, EXPECT + APPEND])
@pytest.mark.parametrize("part", ["gold/", "quarantine/"])
def test_an_answer_that_is_lost_neither_doubles_nor_loses_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sql: str, part: str
) -> None:
    """The commit was applied: the next run finds its batch in the table, and goes on behind it."""
    monkeypatch.setattr(expectations, "QUARANTINE_SCHEMA", from_arrow_schema(ARROW))
    if part == "quarantine/" and EXPECT not in sql:
        return
    project = Project(tmp_path, monkeypatch, sql_model("spent", sql))
    project.add((1, 10), (2, -20))
    project.run()
    project.add((3, 30), (4, -40))
    losing = LostAnswers(project.store, part)

    with pytest.raises(LakebedError):
        project.run(losing)
    project.add((5, 50))
    report = project.run()
    rows = sorted(project.rows() + (project.rows("quarantine") if EXPECT in sql else []))

    assert (1, "made") == (losing.lost, report.state)
    assert [(1, 10), (2, -20), (3, 30), (4, -40), (5, 50)] == rows


def test_two_runs_at_once_write_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that lost the race finds its batch written by the other, plans again, and has nothing left to do."""
    project = Project(tmp_path, monkeypatch, sql_model("spent", APPEND))
    project.add((1, 10))
    project.run()
    project.add((2, 20))
    runs = 0

    def overtaken(model: Model, frames: Mapping[Any, Rows], ids: Ids) -> Rows:
        nonlocal runs
        runs += 1
        if runs == 1:
            project.add((3, 30))
            project.run()
        return _applied(model, frames, ids)

    monkeypatch.setattr(job, "applied", overtaken)

    report = project.run()

    assert ("unchanged", [(1, 10), (2, 20), (3, 30)]) == (report.state, project.rows())


def test_the_run_that_finishes_what_was_cut_off_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rows of that batch, also when nothing newer has come."""
    monkeypatch.setattr(expectations, "QUARANTINE_SCHEMA", from_arrow_schema(ARROW))
    project = Project(tmp_path, monkeypatch, sql_model("spent", EXPECT + APPEND))
    project.add((1, 10))
    project.run()
    project.add((2, 20), (3, -30))
    with pytest.raises(LakebedError):
        project.run(LostAnswers(project.store, "quarantine/"))

    report = project.run()

    assert ("made", "increment", CUT_OFF) == (report.state, report.mode, report.reason)
    assert (2, 1, 1) == (report.rows_in, report.rows, report.quarantined)


@pytest.mark.parametrize("first", [True, False])
def test_a_run_that_was_cut_off_is_finished_though_vacuum_took_its_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Days later its sources have other files: the table is made of what they have now, and goes on from there."""
    monkeypatch.setattr(expectations, "QUARANTINE_SCHEMA", from_arrow_schema(ARROW))
    project = Project(tmp_path, monkeypatch, sql_model("spent", EXPECT + MERGE))

    async def there(store: Any, key: str) -> bool:
        return project.has(key)

    monkeypatch.setattr(changes, "exists", there)
    project.add((1, 10), (2, -20))
    if not first:
        project.run()
        project.add((3, 30), (4, -40))
    with pytest.raises(LakebedError):
        project.run(LostAnswers(project.store, "quarantine/"))
    project.rewrite_and_vacuum((5, 50))

    report = project.run()
    rows = [(1, 10), (2, -20), (5, 50)] if first else [(1, 10), (2, -20), (3, 30), (4, -40), (5, 50)]

    assert ("made", "refresh") == (report.state, report.mode)
    assert "deleted by vacuum" in report.reason
    assert rows == sorted(project.rows() + project.rows("quarantine"))
    assert "unchanged" == project.run().state
    project.add((6, 60))
    assert ("made", "increment") == ((later := project.run()).state, later.mode)


def test_a_backfill_of_versions_that_vacuum_took_computes_the_table_from_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The versions that the table was made from may be old: its command does not fail for ever."""
    project = Project(tmp_path, monkeypatch, sql_model("spent", f"-- time: id\n{MERGE}"))
    project.add((1, 10))
    project.run()
    project.rewrite_and_vacuum((2, 20))

    report = project.run(window=Window("0", "9"))

    assert ("made", "refresh", [(1, 10), (2, 20)]) == (report.state, report.mode, project.rows())


@pytest.mark.parametrize("full", [False, True])
def test_a_merge_with_a_key_twice_publishes_nothing_in_its_first_run_and_in_a_refresh_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """As in every later run: a table with a key twice would be wrong for all that pair its rows by key."""
    project = Project(tmp_path, monkeypatch, sql_model("spent", MERGE))
    if full:
        project.add((1, 10))
        project.run()
    project.add((2, 20), (2, 21))

    with pytest.raises(Invalid, match="id more than once"):
        project.run(full_refresh=full)

    assert ([(1, 10)] if full else []) == project.rows()
