"""Rows by condition, and keys that are forgotten, on the real bucket and by real commands. No Spark."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest

from lakebed.cli import exits
from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.errors import Invalid, NotFound
from lakebed.core.ids import Ids
from lakebed.core.settings import env_name, load
from lakebed.delta.model import DataFile, TableSpec, WriteBatch
from lakebed.delta.plain import schema_json
from lakebed.pipeline.bronze.places import table_name
from lakebed.pipeline.tables import files
from lakebed.pipeline.tables.forget import Forgetter, ForgottenTable, delete_rows
from lakebed.pipeline.tables.table import Table
from lakebed.spark.location import Location
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections
from support.runtimes import runtime_on

COLUMNS = (("order_id", "long"), ("customer", "string"))
QUARANTINE = (("_row", "string"), ("_tick_id", "string"))
GOLD = (("country", "string"), ("spent", "double"))
CONTRACT = """
table: orders
keys: [order]
columns:
  order: {type: long, required: true, from: order_id}
  customer: string
"""
TOPIC = "table: orders\nsource: topic.orders"


class Lake:
    """A project with one table in each layer, in which customer c-1 occurs."""

    def __init__(self, bucket: Store, settings: StoreSettings, folder: Path) -> None:
        self.bucket, self.location, self.folder = bucket, Location.of(settings), folder
        (folder / "contracts").mkdir()
        (folder / "contracts" / "orders.yaml").write_text(CONTRACT)
        self.layer = {**settings.as_layer(), "pipeline.contracts": str(folder / "contracts")}
        bronze = {"order_id": [1, 2, 3], "customer": ["c-1", "c-2", "c-1"]}
        self.write("bronze", "orders", COLUMNS, bronze, ("order_id",), WriteBatch.once("t1"))
        silver = (("order", "long"), ("customer", "string"))
        self.write("silver", "orders", silver, {"order": [1, 2, 3], "customer": ["c-1", "c-2", "c-1"]}, ("order",))
        rows = ['{"order_id":7,"customer":"c-1"}', '{"order_id":8,"customer":"c-2"}', "not json"]
        self.write("quarantine", "orders", QUARANTINE, {"_row": rows, "_tick_id": ["t1"] * 3})
        self.write("gold", "spent", GOLD, {"country": ["de"], "spent": [1.5]})

    def write(
        self,
        layer: str,
        name: str,
        columns: Sequence[tuple[str, str]],
        values: Mapping[str, Any],
        keys: tuple[str, ...] = (),
        batch: WriteBatch | None = None,
        *,
        partition_by: tuple[str, ...] = (),
    ) -> Table:
        table, written = self.written(layer, name, columns, values, keys, partition_by=partition_by)
        table.append_files(written, batch or WriteBatch("silver", 0) if layer != "gold" else None)
        return table

    def written(
        self,
        layer: str,
        name: str,
        columns: Sequence[tuple[str, str]],
        values: Mapping[str, Any],
        keys: tuple[str, ...] = (),
        *,
        partition_by: tuple[str, ...] = (),
    ) -> tuple[Table, list[DataFile]]:
        """Files that no version names yet."""
        spec = TableSpec(
            table_name(layer, "acme", "shop", name), schema_json(columns), keys=keys, partition_by=partition_by
        )
        table = Table(None, spec, runtime_on(self.bucket, SystemClock(), Ids()), location=self.location)
        return table, files.write_files(pa.table(dict(values)), spec, self.location, self.location.filesystem())

    def context(self) -> Context:
        return make_context(load(sections(), stack=self.layer, env={}), role="test")

    def command(self, *line: str) -> tuple[int, Any, str]:
        env = {**os.environ, **{env_name(key): str(value) for key, value in self.layer.items()}}
        done = subprocess.run(
            [sys.executable, "-m", "lakebed", *line, "-o", "json"],
            env=env, cwd=self.folder, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        return done.returncode, json.loads(done.stdout) if done.stdout.strip() else None, done.stderr


@pytest.fixture
def lake(bucket: Store, bucket_settings: StoreSettings, tmp_path: Path) -> Lake:
    return Lake(bucket, bucket_settings, tmp_path)


def by_table(tables: Sequence[ForgottenTable]) -> dict[str, ForgottenTable]:
    return {table.table.replace("/ticks", "").replace("/acme/shop", ""): table for table in tables}


def test_a_key_is_removed_from_every_layer_and_a_dry_run_reports_the_same(lake: Lake) -> None:
    """Bronze, silver under its own column names, and rows in quarantine; a table without the column is named."""
    forgetter = Forgetter(lake.context())

    planned = forgetter.run("acme/shop", {"customer": "c-1"}, dry_run=True)
    done = forgetter.run("acme/shop", {"customer": "c-1"})
    again = forgetter.run("acme/shop", {"customer": "c-1"})

    expected = {"bronze/orders": 2, "silver/orders": 2, "quarantine/orders": 1, "gold/spent": 0}
    for report in (planned, done):
        assert expected == {name: table.rows for name, table in by_table(report.tables).items()}
    assert "no column customer" in by_table(done.tables)["gold/spent"].note
    assert all(table.gone_by for name, table in by_table(done.tables).items() if name != "gold/spent")
    assert (0, 5) == (again.rows, done.rows)
    assert done.complete


def test_a_purge_deletes_the_files_of_older_versions_that_hold_the_key(lake: Lake) -> None:
    """Afterwards no object of the table contains the value; files without it stay."""
    context = lake.context()
    forgetter = Forgetter(context)
    forgetter.run("acme/shop", {"customer": "c-1"})

    done = by_table(forgetter.run("acme/shop", {"customer": "c-1"}, purge=True).tables)

    assert {"bronze/orders": 1, "silver/orders": 1, "quarantine/orders": 1} == {
        name: table.old_files for name, table in done.items() if table.old_files
    }
    left = by_table(forgetter.run("acme/shop", {"customer": "c-1"}, dry_run=True).tables)
    assert {0} == {table.old_files for table in left.values()}
    assert {""} == {table.gone_by for table in left.values()}


def test_a_purge_finds_the_key_in_folders_of_partitions(lake: Lake) -> None:
    """The values of a partition are in the names of folders, encoded; files of no value do not stop it."""
    values: list[Any] = ["c 1:ü%", "c-2", None, "c 1:ü%"]
    for column, held, key in (("customer", values, "c 1:ü%"), ("order_id", [1, 2, None, 1], "1")):
        rows = {"order_id": [1, 2, 3, 4], "customer": values, column: held}
        lake.write("bronze", f"by_{column}", COLUMNS, rows, partition_by=(column,))

        done = Forgetter(lake.context()).run("acme/shop", {column: key}, only=f"by_{column}", purge=True)
        left = Forgetter(lake.context()).run("acme/shop", {column: key}, only=f"by_{column}", dry_run=True)

        assert [(2, 1, False)] == [(table.rows, table.old_files, table.refused) for table in done.tables]
        assert [(0, 0)] == [(table.rows, table.old_files) for table in left.tables]


@pytest.mark.parametrize(("interval", "gone_after"), [("interval 90 days", 90), ("interval 3 moons", None)])
def test_the_last_copy_is_gone_when_the_table_lets_it_go(lake: Lake, interval: str, gone_after: int | None) -> None:
    """A table may keep removed files longer than the settings say: vacuum obeys it, and so does the report."""
    table = lake.write("bronze", "kept", COLUMNS, {"order_id": [1, 2], "customer": ["c-1", "c-2"]})
    theirs = deltalake.DeltaTable(lake.location.uri(table.spec.root), storage_options=lake.location.storage_options())
    theirs.alter.set_table_properties({"delta.deletedFileRetentionDuration": interval}, raise_if_not_exists=False)

    (done,) = Forgetter(lake.context()).run("acme/shop", {"customer": "c-1"}, only="kept").tables

    if gone_after is None:
        assert "delta.deletedFileRetentionDuration" in done.gone_by
    else:
        days = (datetime.fromisoformat(done.gone_by) - datetime.now(UTC)) / timedelta(days=1)
        assert gone_after <= days + 0.01 < gone_after + 2


def test_a_purge_leaves_files_that_a_writer_is_about_to_commit(lake: Lake) -> None:
    """Such a file is in no version yet: deleted, the version that names it could not be read."""
    rows = {"order_id": [9, 10], "customer": ["c-1", "c-2"]}
    table, written = lake.written("bronze", "orders", COLUMNS, rows, ("order_id",))
    done = by_table(Forgetter(lake.context()).run("acme/shop", {"customer": "c-1"}, purge=True).tables)["bronze/orders"]
    table.append_files(written)

    again = by_table(Forgetter(lake.context()).run("acme/shop", {"customer": "c-1"}, purge=True).tables)

    assert (2, 2, True) == (done.rows, done.old_files, bool(done.gone_by))
    assert (1, 1, "") == (again["bronze/orders"].rows, again["bronze/orders"].old_files, again["bronze/orders"].gone_by)
    left = by_table(Forgetter(lake.context()).run("acme/shop", {"customer": "c-1"}, dry_run=True).tables)
    assert 0 == left["bronze/orders"].old_files


def test_older_versions_with_a_column_that_the_table_lost_are_purged_too(lake: Lake) -> None:
    """A replacement without the column leaves files that have it."""
    rows = {"order_id": [1, 2], "customer": ["c-1", "c-2"]}
    lake.write("bronze", "shrunk", COLUMNS, rows)
    table, written = lake.written("bronze", "shrunk", COLUMNS[:1], {"order_id": [1, 2]})
    table.replace_by(written)

    planned = Forgetter(lake.context()).run("acme/shop", {"customer": "c-1"}, only="shrunk", dry_run=True).tables[0]
    done = Forgetter(lake.context()).run("acme/shop", {"customer": "c-1"}, only="shrunk", purge=True).tables[0]

    assert (0, 1, True) == (planned.rows, planned.old_files, bool(planned.gone_by))
    assert (0, 1, "") == (done.rows, done.old_files, done.gone_by)


def test_a_value_that_one_table_cannot_have_does_not_stop_the_others(lake: Lake) -> None:
    """It is in no row there: the column is narrower than the one in which the value occurs."""
    narrow = (("order_id", "integer"), ("customer", "string"))
    lake.write("bronze", "small", narrow, {"order_id": pa.array([1], pa.int32()), "customer": ["c-1"]})
    lake.write("bronze", "large", COLUMNS, {"order_id": [99999999999], "customer": ["c-1"]})

    done = Forgetter(lake.context()).run("acme/shop", {"order_id": "99999999999"})

    assert 1 == done.rows
    assert not any(table.refused for table in done.tables)


def test_silver_uses_the_names_of_its_contract(lake: Lake) -> None:
    """A key is given by bronze's name of the column."""
    done = by_table(Forgetter(lake.context()).run("acme/shop", {"order_id": "2"}, only="orders").tables)

    assert [1, 1, 0] == [done[name].rows for name in ("bronze/orders", "silver/orders", "quarantine/orders")]


def test_while_silver_is_behind_the_report_is_not_complete(lake: Lake) -> None:
    """A bronze version that silver has not read may bring the rows back."""
    lake.write(
        "bronze", "orders", COLUMNS, {"order_id": [9], "customer": ["c-1"]}, ("order_id",), WriteBatch.once("t2")
    )

    report = Forgetter(lake.context()).run("acme/shop", {"customer": "c-1"})

    assert not report.complete


def test_rows_in_a_topic_that_silver_is_made_of_are_reported_until_they_are_deleted(lake: Lake) -> None:
    """They stay and are named with the command; after it, once silver has read that version, the report is complete."""
    (lake.folder / "contracts" / "orders.yaml").write_text(CONTRACT.replace("table: orders", TOPIC))
    topic, rows = "bronze/topics/lake/orders", {"order_id": [1, 2], "customer": ["c-1", "c-2"]}
    runtime = runtime_on(lake.bucket, SystemClock(), Ids())
    for name, columns, batch in (
        (topic, COLUMNS, WriteBatch("lakebed.topic", 0)),
        ("silver/lake/main/orders", (("order", "long"), ("customer", "string")), WriteBatch("silver", 0)),
    ):
        table = Table(None, TableSpec(name, schema_json(columns)), runtime, location=lake.location)
        held = pa.table(dict(zip((column for column, _ in columns), rows.values(), strict=True)))
        table.append_files(files.write_files(held, table.spec, lake.location, lake.location.filesystem()), batch)
    forgetter = Forgetter(lake.context())

    first = forgetter.run("lake/main", {"customer": "c-1"}, purge=True)
    delete_rows(lake.context(), topic, "customer = 'c-1'")
    second = forgetter.run("lake/main", {"customer": "c-1"})
    table.append_files([], WriteBatch("silver", 1))
    third = forgetter.run("lake/main", {"customer": "c-1"})

    assert [(topic, 0, True), ("silver/lake/main/orders", 1, False)] == [
        (one.table, one.rows, one.refused) for one in first.tables
    ]
    assert f"such rows stay (1): lakebed tables delete {topic}" in first.tables[0].note
    assert [False, False, True] == [one.complete for one in (first, second, third)]
    assert not any(one.refused for one in second.tables)


def test_what_cannot_be_forgotten_is_refused(lake: Lake) -> None:
    """A key that no table has is a mistake, and so is a project without tables."""
    forgetter = Forgetter(lake.context())

    with pytest.raises(Invalid, match="no table of acme/shop has the columns nope"):
        forgetter.run("acme/shop", {"nope": "1"})
    with pytest.raises(NotFound, match="acme/none"):
        forgetter.run("acme/none", {"customer": "1"})


@pytest.mark.full
def test_the_commands_read_delete_and_forget(lake: Lake) -> None:
    """Reads show matching rows only; deletes need a reason, and the audit trail has no value of the key."""
    code, rows, _ = lake.command(
        "tables", "read", "bronze/ticks/acme/shop/orders", "--where", "customer = 'c-1'", "--columns", "order_id"
    )
    assert (exits.OK, [{"order_id": 1}, {"order_id": 3}]) == (code, rows)

    code, _, said = lake.command("tables", "delete", "bronze/ticks/acme/shop/orders", "--where", "order_id = 3")
    assert code != exits.OK and "a reason is required" in said

    code, done, _ = lake.command(
        "tables", "delete", "bronze/ticks/acme/shop/orders", "--where", "order_id = 3", "--reason", "wrong"
    )
    assert (exits.OK, 1) == (code, done["rows"])

    code, done, said = lake.command(
        "tables", "forget", "acme/shop", "--key", "customer=c-1", "--reason", "request 7", "--purge"
    )
    assert (exits.OK, True) == (code, done["complete"])
    assert "removed: 4 rows" in said

    _, trail, _ = lake.command("trail")
    shown = json.dumps(trail)
    assert "tables.forget" in shown and "request 7" in shown and "c-1" not in shown
