"""Tables without Spark, and what other engines find in any table of ours."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import deltalake
import duckdb
import polars as pl
import pyarrow as pa
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import AlreadyExists, Corrupt, Invalid, Unavailable
from lakebed.delta.log import Commit, encode, log_key, overlapping
from lakebed.delta.model import Snapshot, TableSpec, WriteBatch
from lakebed.delta.plain import PlainTable, schema_json
from lakebed.store.memory import MemoryStore
from lakebed.store.model import ObjectInfo, StoredObject
from support.runtimes import runtime_on

SPEC = TableSpec("t", schema_json((("id", "long"), ("name", "string"), ("other", "string"))), stats=("id",))


async def made(store: MemoryStore, clock: ManualClock, *some: list[int]) -> PlainTable:
    table = PlainTable(runtime_on(store, clock), SPEC)
    for ids in some:
        rows = pa.table({"id": ids, "name": [f"n{one}" for one in ids], "other": [None] * len(ids)})
        rows = rows.set_column(2, "other", rows.column("other").cast(pa.string()))
        file = await table.write(rows)
        await table.commit(lambda _, file=file: Commit("WRITE", (file,)))  # type: ignore[misc]
    return table


@pytest.mark.parametrize("column", ["id = 2", "name = 'n2'"])
async def test_duckdb_and_polars_find_rows_by_columns_with_and_without_a_range(tmp_path: Path, column: str) -> None:
    """A filter on a column whose range the log does not tell finds its rows too."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await made(store, clock, [1, 2], [3, 4])
    async for info in store.list("tables/t/"):
        place = tmp_path / info.key
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes((await store.get(info.key)).data)
    uri = str(tmp_path / "tables/t")

    rows = deltalake.DeltaTable(uri).to_pyarrow_dataset()

    assert [(2, "n2")] == duckdb.sql(f"SELECT id, name FROM rows WHERE {column}").fetchall()
    assert rows.count_rows() == 4
    assert [2] == pl.scan_delta(uri).sql(f"SELECT id FROM self WHERE {column}").collect()["id"].to_list()


async def test_ranges_survive_in_the_log_and_prune() -> None:
    """Our own readers open only files that can hold the value."""
    clock = ManualClock()
    table = await made(MemoryStore(clock=clock), clock, [1, 2], [3, 4])

    state = await table.snapshot()

    assert [4] == [file.high["id"] for file in overlapping(state.files, "id", 3, 3)]
    assert [3, 4] == [
        row["id"] for file in overlapping(state.files, "id", 3, 9) for row in (await table.read(file)).to_pylist()
    ]


async def test_a_race_for_the_next_version_is_planned_again() -> None:
    """Two writers: both commits are there, and a batch that another applied is not applied twice."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    one, other = (PlainTable(runtime_on(store, clock), SPEC) for _ in range(2))
    await one.commit(lambda _: Commit("WRITE"))
    await other.snapshot()
    await one.commit(lambda _: Commit("WRITE", batch=WriteBatch("app", 1)))

    def once(state: Snapshot) -> Commit | None:
        return None if state.applied.get("app", -1) >= 1 else Commit("WRITE", batch=WriteBatch("app", 1))

    assert 1 == (await other.commit(once)).version
    assert 2 == (await other.commit(lambda _: Commit("WRITE"))).version


class GoneAfterCommit(MemoryStore):
    """Takes a table's next log entry, and answers nothing from then on."""

    gone = False

    async def get(self, key: str) -> StoredObject:
        if self.gone:
            raise Unavailable("the store is away")
        return await super().get(key)

    async def create(self, key: str, data: bytes) -> ObjectInfo:
        if self.gone:
            raise Unavailable("the store is away")
        made = await super().create(key, data)
        self.gone = "_delta_log" in key
        return made


async def test_a_commit_that_stands_is_acknowledged_although_the_store_goes_away_right_after() -> None:
    """Called a failure, it would be made again: the entry is created, so nothing that follows may fail it."""
    clock = ManualClock()
    store = GoneAfterCommit(clock=clock)
    table = PlainTable(runtime_on(store, clock), SPEC)

    versions = []
    for _ in range(52):  # the fiftieth version also writes a checkpoint, which only saves time
        store.gone = False
        versions.append((await table.commit(lambda _: Commit("WRITE"))).version)

    store.gone = False
    assert list(range(52)) == versions
    assert 51 == (await PlainTable(runtime_on(store, clock), SPEC).snapshot()).version


class FirstCommitBetween(MemoryStore):
    """Another writer makes the table's first version right after a reader was told that there is none."""

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        found = [info async for info in super().list(prefix, after=after)]
        with suppress(AlreadyExists):
            await super().create(
                log_key(SPEC.root, 0), encode(Commit("WRITE", spec=SPEC), attempt_id="other", now_ms=1)
            )
        for info in found:
            yield info


async def test_a_table_whose_first_version_appears_while_it_is_read_is_not_corrupt() -> None:
    """The reader finds it empty, or at its first version; a writer commits behind it."""
    clock = ManualClock()
    table = PlainTable(runtime_on(FirstCommitBetween(clock=clock), clock), SPEC)

    assert 1 == (await table.commit(lambda _: Commit("WRITE"))).version


async def test_a_log_without_its_first_entries_is_corrupt() -> None:
    """Versions that cannot be replayed from the beginning, and no kept snapshot: nobody may guess the table."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await store.create(log_key(SPEC.root, 3), encode(Commit("WRITE"), attempt_id="other", now_ms=1))

    with pytest.raises(Corrupt):
        await PlainTable(runtime_on(store, clock), SPEC).snapshot()


async def test_a_small_tables_file_has_bounds_and_nulls_of_its_columns(manual_clock: ManualClock) -> None:
    """Of a long text a prefix, which ends above every text with it."""
    spec = TableSpec(
        "t", schema_json((("id", "long"), ("at", "long"), ("name", "string"))), keys=("id",), stats=("at", "name")
    )
    table = PlainTable(runtime_on(MemoryStore(clock=manual_clock), manual_clock), spec)
    rows = pa.table({"id": [3, 1], "at": pa.array([None, 7], pa.int64()), "name": ["a", "x" * 257]})
    file = await table.write(rows)

    assert {"id": 1, "at": 7, "name": "a"} == file.low
    assert {"id": 3, "at": 7, "name": "x" * 32 + "\U0010ffff"} == file.high
    assert ({"id": 0, "at": 1, "name": 0}, 2, {}) == (file.nulls, file.rows, file.partition)
    assert file.size == (await table._store.head(f"tables/t/{file.path}")).size


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b'"configuration":{"delta.constraints.c":"id > 0"', "the constraint c"),
        (b'"configuration":{"delta.columnMapping.mode":"name"', "maps column names"),
    ],
)
async def test_a_small_table_that_another_engine_has_made_stricter_is_not_written(
    manual_clock: ManualClock, said: bytes, why: str
) -> None:
    """Its rows could break what the table promises: no version is made, and what is there is read as before."""
    whole = MemoryStore(clock=manual_clock)
    await made(whole, manual_clock, [1, 2])
    store, key = MemoryStore(clock=manual_clock), log_key(SPEC.root, 0)
    await store.create(key, (await whole.get(key)).data.replace(b'"configuration":{', said, 1))
    table = PlainTable(runtime_on(store, manual_clock), SPEC)

    with pytest.raises(Invalid, match=why):
        await table.commit(lambda _: Commit("WRITE"))

    state = await table.snapshot()
    assert (0, 2) == (state.version, state.rows)
