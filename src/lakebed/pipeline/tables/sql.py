"""SQL over tables by their names: `select … from silver.shop.orders`, at the newest version of each table.

    tables = SqlTables(spark, settings)
    tables.sql("select customer, sum(total) from silver.shop.orders group by customer")
    tables.install()   # spark.sql understands the names too

Spark has no place for such names outside a catalog in Java, so a statement's names are replaced by temporary views.
Each statement sees one version of each table: the newest when it is given. Tables that were created since are found at
once; `refresh` forgets the list of names and views. With Delta's jars in the session, views read through Delta's own
vectorised reader; without, through `lakebed.table`, with only the columns that the statement names.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

import lakebed.spark
from lakebed.core.settings import Settings
from lakebed.delta import history
from lakebed.delta.model import Snapshot
from lakebed.pipeline.tables.source import FORMAT
from lakebed.pipeline.tables.sql_names import rewrite_names, table_of, used_columns
from lakebed.pipeline.tables.view import Tables
from lakebed.spark.location import Location
from lakebed.spark.native import has_delta, use_bucket
from lakebed.store.settings import StoreSettings
from lakebed.wiring.context import make_context

Reader = Literal["auto", "delta", "lakebed"]
NO_WORD = r"[^A-Za-z0-9_]"  # not in the name of a view
VIEWS_MAX = 256  # kept from one statement to the next


class SqlTables:
    """Tables of one bucket in one session. Synchronous, as Spark is; not for several threads at once."""

    def __init__(self, spark: SparkSession, settings: Settings, *, reader: Reader = "auto") -> None:
        """`reader` chooses how views read; `auto` takes Delta's own where the session has its jars."""
        lakebed.spark.register(spark, settings)
        self.spark, self._settings = spark, settings
        self.native = reader == "delta" or (reader == "auto" and has_delta(spark))
        if self.native:
            use_bucket(spark, Location.of(settings.of(StoreSettings)))
        self._store = make_context(settings, role="sql").store
        self._tables = Tables(make_context(settings, role="sql"))
        self._names: list[str] | None = None
        self._known: dict[str, Snapshot] = {}
        self._views: dict[str, None] = {}
        self._plain_sql: Any = type(spark).sql.__get__(spark)  # also where another one is installed

    def sql(self, text: str, *args: Any, **options: Any) -> DataFrame:
        """`spark.sql` of the statement, in which `layer.project.table` and `layer.org.project.table` are tables.

        Raises Invalid when a short name means tables of several orgs.
        """
        at: dict[str, str] = {}

        def view(table: str) -> str:
            if table not in at:
                at[table] = self._view(table, text)
            return f"`{at[table]}`"

        found: DataFrame = self._plain_sql(rewrite_names(text, self._find, view), *args, **options)
        return found

    def install(self) -> SparkSession:
        """Makes `spark.sql` of this very session understand the names."""
        self.spark.sql = self.sql
        return self.spark

    def refresh(self) -> list[str]:
        """Lists the tables again and drops the views of earlier statements; gives the names."""
        for view in self._views:
            self.spark.catalog.dropTempView(view)
        self._views.clear()
        self._known.clear()
        self._names = asyncio.run(self._tables.names())
        return list(self._names)

    def _find(self, parts: Sequence[str]) -> str:
        if self._names is None or not table_of(parts, self._names):
            self._names = asyncio.run(self._tables.names())  # one that is new, or no table at all
        return table_of(parts, self._names)

    def _view(self, table: str, text: str) -> str:
        """A view of the table's newest version, with the columns that the statement may read."""
        state = asyncio.run(history.snapshot(self._store, f"tables/{table}", known=self._known.get(table)))
        self._known[table] = state
        schema = StructType.fromJson(msgspec.json.decode(state.schema_json))
        columns = list(schema.names) if self.native else used_columns(text, schema.names)
        named = hashlib.sha256(f"{table} {state.version} {columns}".encode()).hexdigest()[:16]
        view = f"lakebed_{re.sub(NO_WORD, '_', table.rsplit('/', 1)[-1])}_{named}"
        if view not in self._views:
            if len(self._views) >= VIEWS_MAX:
                self.spark.catalog.dropTempView(oldest := next(iter(self._views)))
                del self._views[oldest]
            self._frame(table, state, schema, columns).createOrReplaceTempView(view)
            self._views[view] = None
        return view

    def _frame(self, table: str, state: Snapshot, schema: StructType, columns: Sequence[str]) -> DataFrame:
        if self.native:
            uri = Location.of(self._settings.of(StoreSettings)).uri(f"tables/{table}").replace("s3://", "s3a://", 1)
            return self.spark.read.format("delta").option("versionAsOf", state.version).load(uri)
        chosen = StructType([schema[name] for name in columns])
        return self.spark.read.format(FORMAT).schema(chosen).option("version", state.version).load(table)
