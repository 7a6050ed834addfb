"""What every load into bronze shares: its report, and the quarantine of unreadable objects."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import msgspec
from pyspark.sql import SparkSession

from lakebed.core.context import Context
from lakebed.core.feed import FeedSlice
from lakebed.delta.model import TableSpec
from lakebed.delta.predicate import VALUES_MAX, Comparison, Predicate
from lakebed.pipeline.tables.table import Table
from lakebed.spark.location import Location
from lakebed.spark.session import parallelism
from lakebed.store.settings import StoreSettings

OBJECTS = "key string, id string, problem string, rows long, seen_at timestamp"


class IngestReport(msgspec.Struct, frozen=True):
    """A run, or a step of one: rows_in = good + quarantined + duplicates.

    `unreadable` are the objects that were quarantined whole; `lag_s` and `behind` are what is left to load.
    """

    table: str
    version: int = -1
    steps: int = 1
    objects: int = 0
    rows_in: int = 0
    good: int = 0
    quarantined: int = 0
    duplicates: int = 0
    unreadable: tuple[str, ...] = ()
    through: str = ""
    lag_s: float = 0.0
    behind: int = 0

    def plus(self, later: IngestReport) -> IngestReport:
        return msgspec.structs.replace(
            later,
            version=max(self.version, later.version),
            through=later.through or self.through,
            steps=self.steps + later.steps,
            objects=self.objects + later.objects,
            rows_in=self.rows_in + later.rows_in,
            good=self.good + later.good,
            quarantined=self.quarantined + later.quarantined,
            duplicates=self.duplicates + later.duplicates,
            unreadable=(*self.unreadable, *later.unreadable),
        )

    @property
    def sound(self) -> bool:
        return not self.unreadable and not self.quarantined


def cores_of(spark: SparkSession) -> int:
    """How many tasks run at once; through Spark Connect only the number after a shuffle is known."""
    return parallelism(spark)


PAGE = 1_000  # quarantined objects that are listed at once


class QuarantinedObject(msgspec.Struct, frozen=True):
    key: str
    problem: str
    id: str = ""
    rows: int = 0


class ObjectQuarantine:
    """A table of unreadable objects, by key. Adding an object again changes nothing."""

    def __init__(self, spark: SparkSession, context: Context, name: str) -> None:
        self._spark, self._clock = spark, context.clock
        schema = spark.createDataFrame([], OBJECTS).schema.json()
        self.table = Table(
            spark,
            TableSpec(name, schema, keys=("key",)),
            context,
            location=Location.of(context.settings.of(StoreSettings)),
        )

    def put(self, problems: Sequence[QuarantinedObject]) -> None:
        if not problems:
            return
        now = datetime.fromtimestamp(self._clock.now_ns() / 1e9, UTC)
        found = {one.key: (one.key, one.id, one.problem, one.rows, now) for one in problems}
        self.table.upsert(self._spark.createDataFrame(list(found.values()), OBJECTS))

    def pieces(self, after: str = "") -> list[FeedSlice]:
        """The quarantined objects behind this key, to be read again, in order of their keys: a page of them."""
        rows = self.table.read(columns=["key", "id"])
        page = rows.filter(rows.key > after).orderBy("key").limit(PAGE).collect()
        return [FeedSlice(row["key"], id=row["id"]) for row in page]

    def remove(self, keys: Sequence[str]) -> None:
        """Takes objects out of the quarantine. Idempotent."""
        for at in range(0, len(keys), VALUES_MAX):
            # Not a replace of what was read: that would take out what another job has put there meanwhile.
            self.table.delete(Predicate((Comparison("key", "in", tuple(keys[at : at + VALUES_MAX])),)))
