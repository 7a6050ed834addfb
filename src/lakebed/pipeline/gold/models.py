"""Gold: SQL files over silver and over each other, run in the order of what they read.

    select customer, sum(total) as spent from {{ ref('orders') }} group by customer

A file's name is its table's name. Each result replaces its table whole, and the version says which versions of what it
was made from: a run over unchanged sources changes nothing, and one that started earlier never replaces a later one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import msgspec
from pyspark.errors import AnalysisException, ParseException, PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructField, StructType

from lakebed.core.errors import Invalid, Unavailable
from lakebed.core.traces import traced
from lakebed.delta.model import Snapshot, TableSpec
from lakebed.pipeline.bronze.ticks import table_name
from lakebed.pipeline.tables.table import Table
from lakebed.spark.location import Location
from lakebed.spark.tasks import line_of
from lakebed.store.runtime import StoreRuntime

MODELS_MAX = 500
SQL_BYTES_MAX = 256 * 1024
NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")
REF = re.compile(r"\{\{\s*ref\(\s*['\"]([A-Za-z0-9_.-]+)['\"]\s*\)\s*\}\}")


class BadModel(Invalid):
    code = "bad_model"


class Model(msgspec.Struct, frozen=True):
    name: str
    sql: str

    @property
    def refs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(REF.findall(self.sql)))

    def with_views(self, views: Mapping[str, str]) -> str:
        return REF.sub(lambda found: f"`{views[found[1]]}`", self.sql)


class Origin(msgspec.Struct, frozen=True):
    """What a gold version was made from."""

    sources: dict[str, int]
    sql_sha256: str

    def covers(self, other: Origin) -> bool:
        """Whether a table made from this needs nothing from the other: the same, or of the same SQL and no older."""
        if self.sql_sha256 != other.sql_sha256 or self.sources.keys() != other.sources.keys():
            return False
        return all(self.sources[name] >= version for name, version in other.sources.items())


class GoldReport(msgspec.Struct, frozen=True):
    table: str
    version: int
    rows: int
    sources: dict[str, int]
    repeated: bool


def read_models(folder: Path) -> list[Model]:
    """Every *.sql of the folder. Raises BadModel."""
    paths = sorted(folder.glob("*.sql"))
    if len(paths) > MODELS_MAX:
        raise BadModel(f"{folder} has more than {MODELS_MAX} models")
    for path in paths:
        if not NAME.fullmatch(path.stem):
            raise BadModel(f"{path.name}: {path.stem!r} is no table name", hint="lower case, digits and _")
        if path.stat().st_size > SQL_BYTES_MAX:
            raise BadModel(f"{path.name} has more than {SQL_BYTES_MAX} bytes")
    return [Model(path.stem, path.read_text()) for path in paths]


def in_order(models: Sequence[Model], sources: Collection[str]) -> list[Model]:
    """The models, each after all that it reads. Raises BadModel for a circle, an unknown ref or a duplicate name."""
    by_name = {model.name: model for model in models}
    for model in models:
        if model.name in sources:
            raise BadModel(f"{model.name}.sql has the name of a silver table")
        if not model.refs:
            raise BadModel(f"{model.name}.sql reads nothing", hint="name a table with {{ ref('orders') }}")
        if unknown := [ref for ref in model.refs if ref not in by_name and ref not in sources]:
            raise BadModel(f"{model.name}.sql reads {unknown[0]!r}, which is no table of silver or gold")
    graph = {model.name: [ref for ref in model.refs if ref in by_name] for model in models}
    try:
        return [by_name[name] for name in TopologicalSorter(graph).static_order()]
    except CycleError as error:
        raise BadModel(f"gold models refer to each other in a circle: {' → '.join(error.args[1])}") from error


class Gold:
    """Runs models for one project after the other. Synchronous, as Spark is."""

    def __init__(
        self, spark: SparkSession, models: Sequence[Model], runtime: StoreRuntime, *, location: Location
    ) -> None:
        self.models = tuple(models)
        self._spark, self._runtime, self._location = spark, runtime, location

    @traced("gold models")
    def run(self, org_id: str, project_id: str, silver: Mapping[str, Table]) -> list[GoldReport]:
        """Makes every model from silver as it is now. Idempotent; tables with unchanged sources are left alone."""
        known = dict(silver)
        versions = {name: table.snapshot().version for name, table in silver.items()}
        reports = []
        for model in in_order(self.models, silver):
            try:
                report = self._make(model, org_id, project_id, known, versions)
            except (AnalysisException, ParseException) as error:
                raise BadModel(f"{model.name}.sql: {line_of(error)}") from error
            except PySparkException as error:
                raise Unavailable(f"Spark could not make gold {model.name}: {line_of(error)}") from error
            versions[model.name] = report.version
            reports.append(report)
        return reports

    def table(self, org_id: str, project_id: str, name: str, schema: StructType | None = None) -> Table:
        spec = TableSpec(table_name("gold", org_id, project_id, name), (schema or StructType([])).json())
        return Table(self._spark, spec, self._runtime, location=self._location)

    def _make(
        self, model: Model, org_id: str, project_id: str, known: dict[str, Table], versions: dict[str, int]
    ) -> GoldReport:
        sources = {ref: versions[ref] for ref in model.refs}
        origin = Origin(sources, hashlib.sha256(model.sql.encode()).hexdigest())
        held = self.table(org_id, project_id, model.name)
        known[model.name] = held
        state = held.snapshot()
        if _covered(origin)(state):
            return GoldReport(model.name, state.version, state.rows, sources, repeated=True)
        views = {ref: f"lakebed_{self._runtime.ids.token()}" for ref in model.refs}
        try:
            for ref, view in views.items():
                pinned = versions[ref] if versions[ref] >= 0 else None
                known[ref].read(pinned).createOrReplaceTempView(view)
            rows = self._spark.sql(model.with_views(views))
            table = self.table(org_id, project_id, model.name, _nullable(rows))
            note = msgspec.json.encode(origin).decode()
            done = table.replace(rows, note=note, unless=_covered(origin))
        finally:
            for view in views.values():
                self._spark.catalog.dropTempView(view)
        known[model.name] = table
        return GoldReport(model.name, done.version, table.snapshot(done.version).rows, sources, done.repeated)


def _covered(origin: Origin) -> Callable[[Snapshot], bool]:
    def covered(state: Snapshot) -> bool:
        if not state.note:
            return False
        try:
            return msgspec.json.decode(state.note, type=Origin).covers(origin)
        except (msgspec.DecodeError, msgspec.ValidationError):
            return False  # another writer's note

    return covered


def _nullable(rows: DataFrame) -> StructType:
    return StructType([StructField(field.name, field.dataType, True) for field in rows.schema.fields])
