"""Bronze on the real bucket: exact counts, once per tick, and nothing at all of a tick that is wrong."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from lakebed.core.errors import Unavailable
from lakebed.core.settings import load
from lakebed.pipeline.bronze.ticks import TableDone
from lakebed.pipeline.tables import merge
from lakebed.pipeline.tables.maintenance import TableMaintenance
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from lakebed.ticks.model import BadManifest, BronzeTick, ManifestPart, TickColumn
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections
from support.stored_ticks import Yard, parquet, table

TWO_DAYS_S = 2 * 86_400.0


@pytest.fixture
def env(spark: SparkSession, bucket: Store, bucket_settings: StoreSettings) -> Yard:
    return Yard(spark, bucket, bucket_settings)


def counts(done: TableDone) -> tuple[int, int, int]:
    return done.rows_inserted, done.rows_replaced, done.duplicates


@pytest.mark.parametrize("rows_max", [merge.ROWS_MAX, 0], ids=["file by file", "by frames"])
def test_rows_are_upserted_by_key_and_counted_exactly(
    env: Yard, rows_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New keys are inserted, known ones replaced, and of a key that comes twice in a tick the last row stays.

    So it is for ticks that are merged file by file, and for those that are too large for it.
    """
    monkeypatch.setattr(merge, "ROWS_MAX", rows_max)
    first = env.tick("t1", table(parquet(id=[1, 2, 3], note=["a", "b", "c"])))
    second = env.tick(
        "t2",
        table(
            parquet(id=[3, 4, 4], note=["x", "early", "late"]),
            parquet(id=[5, 3], note=["e", "last"]),
        ),
    )

    [one] = env.bronze().commit(first)
    [two] = env.bronze().commit(second)

    assert (3, 0, 0) == counts(one)
    assert (2, 1, 2) == counts(two)
    assert [(1, "a"), (2, "b"), (3, "last"), (4, "late"), (5, "e")] == env.rows()


def test_every_column_is_kept_with_its_lineage(env: Yard) -> None:
    """A row reports which tick, org, project and part it came from, and when."""
    moment = datetime(2026, 11, 15, 12, tzinfo=UTC)
    body = parquet(
        id=pa.array(["k"]),
        at=pa.array([moment], pa.timestamp("ns", "UTC")),
        price=pa.array([None], pa.decimal128(12, 2)),
        colour=pa.array(["red"]).dictionary_encode(),
    )

    env.bronze().commit(env.tick("t1", table(body, first_seq=7)))

    row = env.bronze().table("acme", "p1", "orders").read().collect()[0].asDict()
    assert ("k", None, "red") == (row["id"], row["price"], row["colour"])
    assert row["at"].astimezone(UTC) == moment
    lineage = ("t1", "acme", "p1", 7)
    assert lineage == (row["_tick_id"], row["_org_id"], row["_project_id"], row["_file_seq"])
    assert row["_ingested_at"] is not None


def test_a_full_table_replaces_everything(env: Yard) -> None:
    """After a full tick nothing older is read; an empty one empties the table."""
    env.bronze().commit(env.tick("t1", table(parquet(id=[1, 2], note=["a", "b"]))))

    [full] = env.bronze().commit(env.tick("t2", table(parquet(id=[2, 9], note=["B", "n"]), mode="full")))
    empty = parquet(id=pa.array([], pa.int64()), note=pa.array([], pa.string()))
    [none] = env.bronze().commit(env.tick("t3", table(empty, mode="full")))

    assert (2, 2, 0) == counts(full)
    assert (0, 2, 0) == counts(none)
    assert [] == env.rows()


def test_a_repeated_tick_changes_nothing_and_answers_as_the_first_time(env: Yard) -> None:
    """Anyone who repeats it and whatever was committed since: same counts, same versions."""
    tick = env.tick("t1", table(parquet(id=[1, 2, 2], note=["a", "b", "c"])))
    [first] = env.bronze().commit(tick)
    env.bronze().commit(env.tick("t2", table(parquet(id=[2], note=["newer"]))))

    [again] = env.bronze().commit(tick)

    assert again.repeated
    assert (first.version, *counts(first)) == (again.version, *counts(again))
    assert [(1, "a"), (2, "newer")] == env.rows()


def test_two_processes_at_one_tick_write_it_once(env: Yard) -> None:
    """Anyone who loses finds the other's work and gives the same answer."""
    env.bronze().commit(env.tick("t1", table(parquet(id=[1, 2], note=["a", "b"]))))
    tick = env.tick("t2", table(parquet(id=[2, 3], note=["B", "c"])))

    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda bronze: bronze.commit(tick)[0], [env.bronze(), env.bronze()]))

    assert [(1, 1, 0)] * 2 == [counts(done) for done in answers]
    assert [1, 1] == [done.version for done in answers]
    assert [(1, "a"), (2, "B"), (3, "c")] == env.rows()


class Failing:
    """A store that dies before the second table's log entry is created."""

    def __init__(self, store: Store, word: str) -> None:
        self._store, self._word = store, word

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def create(self, key: str, data: bytes) -> Any:
        if self._word in key:
            raise Unavailable("injected")
        return await self._store.create(key, data)


def test_a_tick_that_was_half_done_goes_on_where_it_stopped(env: Yard, bucket: Store) -> None:
    """The first table has the tick once, the second gets it on the retry, and the counts are the true ones."""
    tick = env.tick(
        "t1",
        table(parquet(id=[1, 2], note=["a", "b"])),
        table(parquet(id=[7], note=["s"]), name="stock", first_seq=5),
    )
    broken: Any = Failing(bucket, "stock/_delta_log")
    with pytest.raises(Unavailable):
        env.bronze(store=broken).commit(tick)

    orders, stock = env.bronze().commit(tick)

    assert (orders.repeated, stock.repeated) == (True, False)
    assert ((2, 0, 0), (1, 0, 0)) == (counts(orders), counts(stock))
    assert (0, 0) == (env.versions("orders"), env.versions("stock"))


GOOD = parquet(id=[1, 2], note=["a", "b"])
SCHEMA = (TickColumn("id", "long"), TickColumn("note", "string"))
ONE_BAD_PART: list[tuple[str, bytes, dict[str, Any]]] = [
    ("not_parquet", b"these are no rows", {"schema": SCHEMA}),
    ("not_parquet", GOOD[: len(GOOD) // 2], {"schema": SCHEMA}),
    ("row_count_mismatch", GOOD, {"parquets": (ManifestPart(9, "0" * 64, 3, len(GOOD)),), "row_count": 3}),
    ("missing_column", parquet(id=[1]), {"schema": SCHEMA}),
    ("unknown_column", parquet(id=[1], note=["a"], more=[1]), {"schema": SCHEMA}),
    ("wrong_type", parquet(id=["1"], note=["a"]), {"schema": SCHEMA}),
    ("null_key", parquet(id=pa.array([1, None], pa.int64()), note=["a", "b"]), {}),
]


@pytest.mark.parametrize("case", range(len(ONE_BAD_PART)))
def test_one_bad_part_is_named_and_nothing_is_committed(env: Yard, case: int) -> None:
    """A part that is not what the manifest reports is refused by its number; no table of the tick is written."""
    error_class, body, changed = ONE_BAD_PART[case]
    good, bad = table(GOOD), table(body, name="stock", first_seq=9, **changed)

    with pytest.raises(BadManifest) as refused:
        env.bronze().commit(env.tick("t1", good, bad))

    assert (error_class, "stock", 9) == tuple(refused.value.detail[k] for k in ("error_class", "table", "file_seq"))
    assert [] == env.bronze().names("acme", "p1")


def test_new_columns_follow_the_policy(env: Yard) -> None:
    """Evolve adds them as nullable, freeze refuses, discard leaves them out and reports it; a type never changes."""
    env.bronze().commit(env.tick("t1", table(parquet(id=[1], note=["a"]))))

    def wider(name: str, key: int) -> BronzeTick:
        return env.tick(name, table(parquet(id=[key], note=["w"], more=[1.5])))

    with pytest.raises(BadManifest, match="frozen"):
        env.bronze("freeze").commit(wider("t2", 2))
    [discarded] = env.bronze("discard").commit(wider("t3", 3))
    [evolved] = env.bronze().commit(wider("t4", 4))
    [narrow] = env.bronze().commit(env.tick("t5", table(parquet(id=[1], note=["again"]))))
    with pytest.raises(BadManifest) as conflict:
        env.bronze().commit(env.tick("t6", table(parquet(id=[6], note=[6]))))

    assert (("more",), ("more",)) == (discarded.discarded, evolved.added)
    assert (0, 1, 0) == counts(narrow)
    assert [(1, "again", None), (3, "w", None), (4, "w", 1.5)] == sorted(
        env.rows(columns=("id", "note", "more")), key=lambda row: row[0]
    )
    assert conflict.value.detail["error_class"] == "schema_conflict"


def test_a_table_of_the_layout_before_is_used_where_it_is(env: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its next tick is merged into it; a table that is new in the same project gets the place of now."""
    with monkeypatch.context() as before:
        before.setattr("lakebed.pipeline.bronze.ticks.table_name", lambda *parts: "/".join(parts))
        env.bronze().commit(env.tick("t1", table(parquet(id=[1, 2], note=["a", "b"]))))

    (old, new) = env.bronze().commit(
        env.tick(
            "t2",
            table(parquet(id=[2, 3], note=["new", "c"])),
            table(parquet(id=[9], note=["n"]), name="fresh", first_seq=1),
        )
    )

    assert ((1, 1, 0), (1, 0, 0)) == (counts(old), counts(new))
    assert [(1, "a"), (2, "new"), (3, "c")] == env.rows()
    assert ["bronze/acme/p1/orders", "bronze/ticks/acme/p1/fresh"] == [
        env.bronze().table("acme", "p1", name).spec.name for name in ("orders", "fresh")
    ]
    assert ["fresh", "orders"] == env.bronze().names("acme", "p1")


def test_rows_past_their_retention_go_and_others_stay(env: Yard, bucket_settings: StoreSettings) -> None:
    """A file with old and new rows is written again without the old, and a second run finds nothing."""
    env.bronze().commit(env.tick("t1", table(parquet(id=[1, 2], note=["a", "b"]))))
    asyncio.run(env.clock.advance(TWO_DAYS_S))
    env.bronze().commit(env.tick("t2", table(parquet(id=[2], note=["new"]))))

    layer = {**bucket_settings.as_layer(), "bronze.retention_days": 1}
    context = msgspec.structs.replace(make_context(load(sections(), stack=layer), role="test"), clock=env.clock)
    done = [TableMaintenance(context, lambda: env.spark).expire() for _ in range(2)]
    first, again = ([(one.table, one.rows_removed) for one in each] for each in done)

    assert ([("bronze/ticks/acme/p1/orders", 1)], []) == (first, again)
    assert [(2, "new")] == env.rows()
