"""What silver reads: a bronze table of ticks, or one that is only appended to (samples, records of topics and queues).

Both give frames with the same lineage, so that silver's transforms do not know the difference. Rows of ticks are chosen
by their tick, wherever compaction has put them since; appended rows are read from the files that the loads brought,
which compaction, retention and deletes do not change.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lakebed.delta.model import ONCE
from lakebed.pipeline.bronze.parts import FILE_SEQ, INGESTED_AT
from lakebed.pipeline.bronze.places import LAKE
from lakebed.pipeline.tables.table import Table
from lakebed.spark.feeds import FEEDS

LOADS = frozenset(FEEDS)  # applications that load a source: each of their versions brings rows


class SilverSource:
    """A bronze table at its versions; `appended` for a source other than ticks."""

    def __init__(self, table: Table, *, appended: bool) -> None:
        self.table, self._appended = table, appended

    def read(self, version: int) -> DataFrame:
        return self._with_lineage(self.table.read(version))

    def since(self, after: int, until: int) -> tuple[DataFrame, bool]:
        """The rows between two versions, and whether they are the whole table instead of an addition to it."""
        if after < 0:
            return self.read(until), True
        changes = self.table.changes(after, until)
        if self._appended:
            loads = {each.version for each in changes if LOADS & set(each.applications)}
            return self._with_lineage(self.table.added(after, until, versions=loads)), False
        if any(change.overwrites for change in changes):
            return self.read(until), True
        ticks = [app.removeprefix(ONCE) for change in changes for app in change.applications]
        return self.table.added(after, until, joined=True).filter(F.col("_tick_id").isin(ticks)), False

    def readable(self, after: int, until: int) -> bool:
        """Whether these versions can still be read: their files may be swept, their log entries cleaned up."""
        return self.table.readable(after, until, joined=not self._appended)

    def _with_lineage(self, rows: DataFrame) -> DataFrame:
        """Rows of a source without ticks: `_tick_id` is their batch or position, org and project are the lake's."""
        if not self._appended:
            return rows
        samples = "batch_id" in rows.columns
        position = [name for name in ("_partition", "_offset", "_sequence", "_index") if name in rows.columns]
        org, project = LAKE
        return rows.withColumns(
            {
                "_tick_id": F.col("batch_id") if samples else F.concat_ws("/", *position),
                "_org_id": F.lit(org),
                "_project_id": F.lit(project),
                FILE_SEQ: F.lit(None).cast("int"),
                INGESTED_AT: F.col("accepted_at" if samples else "_time"),
            }
        )
