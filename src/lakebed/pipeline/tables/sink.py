"""A table as the end of a stream: each micro-batch is one commit, which carries the micro-batch's number.

It is made of plain values alone, so it travels: through Spark Connect a stream's function runs in the server, and there
the table is opened anew from them, on the session that brings the rows. What is opened never travels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from lakebed.core.settings import Settings
from lakebed.delta.model import TableSpec, WriteBatch
from lakebed.pipeline.tables.frames import quoted
from lakebed.pipeline.tables.table import Table
from lakebed.spark.location import Location
from lakebed.store.settings import StoreSettings
from lakebed.wiring.context import make_context


class TableSink:
    """For `foreachBatch`. The same number again changes nothing, so a stream into a table is exactly once.

    `application` names the stream in the table's log: two streams into one table need two names, and a stream that
    begins anew with an empty checkpoint needs another one.
    """

    def __init__(
        self, settings: Settings, name: str, schema: StructType, *, application: str, keys: Sequence[str] = ()
    ) -> None:
        self._settings, self._application = settings, application
        self.spec = TableSpec(name, schema.json(), keys=tuple(keys))
        self._table: Table | None = None

    def __call__(self, rows: DataFrame, number: int) -> None:
        wanted = rows.select(*map(quoted, self.spec.columns))
        self.table(rows.sparkSession).append(wanted, WriteBatch(self._application, number))

    def table(self, spark: SparkSession) -> Table:
        """The table on this session; opened once in each process."""
        if self._table is None or self._table.spark is not spark:
            context = make_context(self._settings, role="stream")
            location = Location.of(self._settings.of(StoreSettings))
            self._table = Table(spark, self.spec, context, location=location)
        return self._table

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_table": None}
