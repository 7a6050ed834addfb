"""What is told of tables, from their logs."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.context import Context
from lakebed.core.errors import Corrupt, NotFound
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import load
from lakebed.delta.log import Commit
from lakebed.delta.model import DataFile, Snapshot, TableSpec
from lakebed.delta.plain import PlainTable, schema_json
from lakebed.pipeline.tables import view as views
from lakebed.pipeline.tables.view import Tables
from lakebed.store.memory import MemoryStore
from lakebed.wiring.parts import sections
from support.runtimes import runtime_on


@pytest.mark.parametrize("name", ["silver/orders", "../secrets", ""])
async def test_a_table_that_is_not_there_is_not_told_about(name: str) -> None:
    """Columns, rows and lines to copy of a table that does not exist are NotFound, with where to look."""
    clock = ManualClock()
    tables = Tables(
        Context(
            node="n",
            settings=load(sections()),
            store=MemoryStore(clock=clock),
            clock=clock,
            ids=Ids.seeded(1),
            metrics=Metrics(),
        )
    )

    for asked in (tables.show, tables.sample, tables.how):
        with pytest.raises(NotFound) as refused:
            await asked(name)
        assert refused.value.hint == "lakebed tables list"


SPEC = TableSpec("silver/orders", schema_json((("id", "long"), ("name", "string"))), keys=("id",))


async def written(table: PlainTable, *ids: int) -> None:
    file = await table.write(pa.table({"id": list(ids), "name": [f"n{one}" for one in ids]}))
    await table.commit(lambda _: Commit("WRITE", (file,), rows_inserted=len(ids)))


async def test_a_table_is_shown_as_it_is_now() -> None:
    """A second look sees what was committed since the first, in every number and in the rows."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    tables = Tables(
        Context(node="n", settings=load(sections()), store=store, clock=clock, ids=Ids.seeded(1), metrics=Metrics())
    )
    table = PlainTable(runtime_on(store, clock, Ids.seeded(2)), SPEC)
    await written(table, 1, 2)
    first, sampled = await tables.show("silver/orders"), await tables.sample("silver/orders")
    await clock.advance(5.0)
    await written(table, 3)

    second, (row,) = await tables.show("silver/orders"), await tables.all()
    again = await tables.sample("silver/orders")

    assert (0, 2, 1) == (first.version, first.rows, first.files)
    assert (1, 3, 2) == (second.version, second.rows, second.files)
    assert (1, 3, 2, second.bytes, "silver") == (row.version, row.rows, row.files, row.bytes, row.layer)
    assert [(1, 1), (0, 2)] == [(one.version, one.rows_inserted) for one in second.versions]
    assert 5000 == second.versions[0].at_ms - second.versions[1].at_ms
    assert [("id", "key"), ("name", "")] == [(column.name, column.role) for column in second.columns]
    assert [["1", "n1"], ["2", "n2"]] == sampled.rows
    assert [["3", "n3"]] == again.rows  # of the newest file


async def test_a_table_whose_log_cannot_be_read_says_why_and_hides_no_other() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await written(PlainTable(runtime_on(store, clock, Ids.seeded(2)), SPEC), 1)
    await store.create("tables/bad/_delta_log/00000000000000000000.json", b"{")
    tables = Tables(
        Context(node="n", settings=load(sections()), store=store, clock=clock, ids=Ids.seeded(1), metrics=Metrics())
    )

    bad, good = await tables.all()

    assert ("bad", -1, True) == (bad.name, bad.version, bool(bad.problem))
    assert ("silver/orders", 1, "") == (good.name, good.rows, good.problem)


def opened(store: MemoryStore, clock: ManualClock, **flags: Any) -> Tables:
    settings = load(sections(), flags={name.replace("_", ".", 1): value for name, value in flags.items()})
    return Tables(Context(node="n", settings=settings, store=store, clock=clock, ids=Ids.seeded(1), metrics=Metrics()))


def table_of(store: MemoryStore, clock: ManualClock, spec: TableSpec = SPEC) -> PlainTable:
    return PlainTable(runtime_on(store, clock, Ids.seeded(2)), spec)


async def test_of_many_versions_the_last_are_shown_newest_first() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    table = table_of(store, clock)
    for number in range(views.VERSIONS_SHOWN + 3):
        await written(table, number)

    shown = await opened(store, clock).show("silver/orders")

    assert views.VERSIONS_SHOWN + 2 == shown.version
    assert list(range(shown.version, 2, -1)) == [one.version for one in shown.versions]
    assert {"WRITE"} == {one.operation for one in shown.versions}


async def test_versions_whose_log_entries_were_cleaned_up_are_left_out() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    table = table_of(store, clock)
    await written(table, 1)
    await written(table, 2)
    tables = opened(store, clock)
    await tables.show("silver/orders")
    await store.delete("tables/silver/orders/_delta_log/00000000000000000000.json")

    assert [1] == [one.version for one in (await tables.show("silver/orders")).versions]


async def test_columns_say_their_type_role_and_whether_they_may_be_null() -> None:
    """A nested type is shown as JSON; a partition column says so."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    fields = [
        {"name": "id", "type": "long", "nullable": False, "metadata": {}},
        {"name": "day", "type": "string", "nullable": True, "metadata": {}},
        {"name": "tags", "type": {"type": "array", "elementType": "string", "containsNull": True}, "metadata": {}},
    ]
    schema = msgspec.json.encode({"type": "struct", "fields": fields}).decode()

    found = views._columns(Snapshot(schema_json=schema, keys=("id",), partition_by=("day",)))

    assert [("id", "long", False, "key"), ("day", "string", True, "partition")] == [
        (one.name, one.type, one.nullable, one.role) for one in found[:2]
    ]
    assert ("tags", True, "") == (found[2].name, found[2].nullable, found[2].role)
    assert '"elementType":"string"' in found[2].type
    assert [] == views._columns(Snapshot())
    assert [] == await opened(store, clock).all()


async def test_a_sample_has_as_many_rows_as_asked_for_and_never_more_than_the_limit() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await written(table_of(store, clock), *range(views.SAMPLE_ROWS + 5))
    tables = opened(store, clock)

    assert 3 == len((await tables.sample("silver/orders", count=3)).rows)
    assert views.SAMPLE_ROWS == len((await tables.sample("silver/orders", count=1000)).rows)
    assert ["id", "name"] == (await tables.sample("silver/orders")).columns


async def test_a_sample_is_of_the_newest_file_that_is_there_and_not_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was swept since is passed over; where every file is too large the note says so."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    table = table_of(store, clock)
    await written(table, 1)
    await written(table, *range(2, 2000))
    tables = opened(store, clock)
    small, large = sorted((await table.snapshot()).files, key=lambda file: file.size)

    monkeypatch.setattr(views, "SAMPLE_FILE_BYTES_MAX", small.size)
    assert [["1", "n1"]] == (await tables.sample("silver/orders")).rows
    monkeypatch.setattr(views, "SAMPLE_FILE_BYTES_MAX", small.size - 1)
    none = await tables.sample("silver/orders")
    assert ([], ["id", "name"]) == (none.rows, none.columns)
    assert f"over {small.size - 1} bytes" in none.note
    monkeypatch.setattr(views, "SAMPLE_FILE_BYTES_MAX", large.size)
    await store.delete(f"tables/silver/orders/{large.path}")
    assert [["1", "n1"]] == (await tables.sample("silver/orders")).rows


async def test_a_table_without_rows_says_so_and_a_file_that_is_no_parquet_is_corrupt() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    table = table_of(store, clock)
    await table.commit(lambda _: Commit("CREATE TABLE", ()))
    tables = opened(store, clock)

    assert "no rows" == (await tables.sample("silver/orders")).note
    await store.create("tables/silver/orders/bad.parquet", b"no parquet")
    await table.commit(lambda _: Commit("WRITE", (DataFile("bad.parquet", 10, 1),), rows_inserted=1))
    with pytest.raises(Corrupt, match=r"bad\.parquet"):
        await tables.sample("silver/orders")


def test_a_cell_is_bounded_and_nothing_is_empty() -> None:
    longest = "x" * views.CELL_CHARS_MAX

    assert ("", "0", longest, f"{longest}…") == tuple(map(views._cell, (None, 0, longest, f"{longest}y")))


def test_a_sample_shows_the_values_of_partition_columns() -> None:
    """They are in the log alone, not in the file."""
    out = io.BytesIO()
    pq.write_table(pa.table({"id": [1, 2]}), out)

    found = views._sample(out.getvalue(), DataFile("f", 1, 2, {"day": "2026-11-15"}), ["day", "id", "other"], 5)

    assert [["2026-11-15", "1", ""], ["2026-11-15", "2", ""]] == found.rows


@pytest.mark.parametrize(
    ("url", "prefix", "expected"),
    [
        ("s3://lake", "", "s3://lake/tables/silver/orders"),
        ("s3://lake/", "/team/", "s3://lake/team/tables/silver/orders"),
        ("memory:", "", "memory:///tables/silver/orders"),
    ],
)
async def test_lines_to_copy_name_the_tables_address(url: str, prefix: str, expected: str) -> None:
    """Every engine's line has the address; Spark's own scheme is s3a."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    await written(table_of(store, clock), 1)
    tables = opened(store, clock, store_url=url, store_prefix=prefix)

    shown, lines = await tables.show("silver/orders"), await tables.how("silver/orders")

    assert expected == shown.uri
    assert ["Polars", "DuckDB", "Spark", "Shell"] == [line.name for line in lines]
    assert all(f'"{expected}"' in line.text for line in lines[:2])
    assert f'load("{expected.replace("s3://", "s3a://")}")' in lines[2].text
    assert "lakebed env" in lines[3].text


async def test_tables_are_found_at_every_depth_up_to_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders inside a table and folders that begin with _ are not looked into."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    for name in ("b", "a/x", "a/y/z", "1/2/3/4/5", "1/2/3/4/5x/6", "_hidden/t", "b/inside"):
        await store.create(f"tables/{name}/_delta_log/00000000000000000000.json", b"{}")
    tables = opened(store, clock)

    assert ["1/2/3/4/5", "a/x", "a/y/z", "b"] == await tables.names()
    monkeypatch.setattr(views, "TABLES_MAX", 2)
    assert ["a/x", "b"] == await tables.names()
    monkeypatch.setattr(views, "FOLDERS_MAX", 2)
    assert [] == await tables.names()


async def test_no_table_of_a_large_lake_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is looked for among all of them: one that is left out would be reported as not there."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    wanted = [f"silver/org{number // 5:03d}/p/t{number % 5}" for number in range(600)]
    for name in wanted:
        await store.create(f"tables/{name}/_delta_log/00000000000000000000.json", b"{}")
    tables = opened(store, clock)

    assert wanted == await tables.names()
    assert wanted == [row.name for row in await tables.all()]
    assert wanted[:200] == [row.name for row in await tables.first()]


async def test_a_sample_passes_over_files_without_rows() -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    table = table_of(store, clock)
    await written(table, 1)
    await written(table)

    assert [["1", "n1"]] == (await opened(store, clock).sample("silver/orders")).rows


async def test_snapshots_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    for name in ("a", "b", "c"):
        await written(table_of(store, clock, TableSpec(name, SPEC.schema_json)), 1)
    tables = opened(store, clock)
    monkeypatch.setattr(views, "FIRST_MAX", 2)
    for name in ("a", "b", "c"):
        await tables.show(name)

    assert len(tables._known) <= 2


async def test_a_sample_tries_a_few_files_and_no_more() -> None:
    """A table whose newest files were swept costs a few requests, not one for each file."""
    clock = ManualClock()

    class Counting(MemoryStore):
        async def get(self, key: str) -> Any:
            got.append(key)
            return await super().get(key)

    got: list[str] = []
    store = Counting(clock=clock)
    table = table_of(store, clock)
    for number in range(views.FILES_TRIED + 2):
        await written(table, number)
    newest = [file.path for file in (await table.snapshot()).files][::-1]
    for path in newest[: views.FILES_TRIED]:
        await store.delete(f"tables/silver/orders/{path}")
    tables = opened(store, clock)
    got.clear()

    assert [] == (await tables.sample("silver/orders")).rows
    assert views.FILES_TRIED == len([key for key in got if key.endswith(".parquet")])


async def test_a_version_has_the_time_of_its_commit_and_not_of_its_object() -> None:
    """A table that was copied keeps its times; a log entry without one has its object's."""
    clock = ManualClock()
    store = MemoryStore(clock=clock)
    for number, info in enumerate((b'{"commitInfo":{"timestamp":5000,"operation":"WRITE"}}', b'{"commitInfo":{}}')):
        start = b'{"protocol":{"minReaderVersion":1,"minWriterVersion":2}}\n' + msgspec.json.encode(
            {"metaData": {"id": "t", "format": {"provider": "parquet"}, "schemaString": SPEC.schema_json,
                          "partitionColumns": [], "configuration": {}}}
        )  # fmt: skip
        data = info + b"\n" + (start if number == 0 else b'{"txn":{"appId":"a","version":1}}') + b"\n"
        await store.create(f"tables/t/_delta_log/{number:020d}.json", data)

    shown = await opened(store, clock).show("t")

    assert [(1, clock.now_ns() // 1_000_000), (0, 5000)] == [(one.version, one.at_ms) for one in shown.versions]
