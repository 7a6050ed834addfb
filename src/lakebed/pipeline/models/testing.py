"""A model on small frames: `lp.run_model`, and the cases beside a model that `lakebed pipeline test` runs.

Cases of `spent.sql` or of the function `spent` are in `tests/spent.yaml` below the models' folder:

    - name: cancelled orders do not count
      given:
        silver.orders:
          schema: order_id long, total decimal(12,2), status string
          rows: [[1, 5.00, paid], [2, 7.00, cancelled]]
      expect: [{order_id: 1, total: 5.00}]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lakebed.core.ids import Ids
from lakebed.pipeline.models.definition import BadModel, Kind, Model, model_of, nearest
from lakebed.pipeline.models.folder import sql_model, with_views

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DIFFERENCES_MAX = 5  # rows shown of each kind


class GivenFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rows as lists in the order of the schema, or as objects. Values are read as text and cast."""

    schema: str
    rows: list[Any]


class ModelCase(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One case: the frames that a model is given, and the rows that it gives, in any order."""

    name: str
    given: dict[str, GivenFrame]
    expect: list[dict[str, Any]]


class CaseResult(msgspec.Struct, frozen=True):
    model: str
    case: str
    passed: bool
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    error: str = ""


def run_model(model: Model | Callable[..., Any] | str | Path, frames: Mapping[str, DataFrame]) -> DataFrame:
    """The frame that a model gives for these frames, by the names of its sources or of its parameters.

    The model is a decorated function, an SQL file, or one that was read from a folder. Nothing is written, and no
    expectation is applied. Raises BadModel for a frame that is missing or not wanted.
    """
    if isinstance(model, (str, Path)):
        path = Path(model)
        model = sql_model(path.stem, path.read_text())
    elif not isinstance(model, Model):
        model = model_of(model)
    named: dict[tuple[str, Kind], DataFrame] = {}
    for one in model.inputs:
        bare = one.source.rpartition(".")[2]
        found = next((frames[name] for name in (one.parameter, one.source, bare) if name and name in frames), None)
        if found is None:
            raise BadModel(f"model {model.name} reads {one.source!r}, and no frame is given for it")
        named[one.source, one.kind] = found
    wanted = {name for one in model.inputs for name in (one.parameter, one.source, one.source.rpartition(".")[2])}
    if unknown := [name for name in frames if name not in wanted]:
        raise BadModel(
            f"model {model.name} does not read {unknown[0]!r}", hint=nearest(unknown[0], sorted(wanted - {""}))
        )
    return applied(model, named, Ids())


def applied(model: Model, frames: Mapping[tuple[str, Kind], DataFrame], ids: Ids) -> DataFrame:
    """The model's frame over these. Raises BadModel when it gives something else."""
    from pyspark.sql import DataFrame as Frame

    if model.function is not None:
        given = {one.parameter: frames[one.source, one.kind] for one in model.inputs}
        rows = model.function(**given)
        if not isinstance(rows, Frame):
            raise BadModel(f"model {model.name} gives a {type(rows).__name__}, not a DataFrame")
        return rows
    views = {each: f"lakebed_{ids.token()}" for each in frames}
    spark = next(iter(frames.values())).sparkSession
    # Spark's own placeholders, not views of ours: over Connect a statement is analysed when it runs.
    statement = with_views(model.sql, views).replace("{", "{{").replace("}", "}}")
    for view in views.values():
        statement = statement.replace(f"`{view}`", f"{{{view}}}")
    return spark.sql(statement, **{view: frames[each] for each, view in views.items()})


def read_cases(folder: Path, model: Model) -> list[ModelCase]:
    """The cases beside a model; none where it has no file. Raises BadModel."""
    import yaml

    path = folder / "tests" / f"{model.name}.yaml"
    if not path.exists():
        return []
    try:
        return msgspec.convert(yaml.safe_load(path.read_text()), list[ModelCase], strict=False)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise BadModel(f"tests/{path.name}: {error}") from error


def run_case(spark: SparkSession, model: Model, case: ModelCase) -> CaseResult:
    """Runs one case; an error of the model is its result."""
    from pyspark.errors import PySparkException

    try:
        frames = {name: _frame(spark, given) for name, given in case.given.items()}
        rows = run_model(model, frames)
        missing, extra = _differences(spark, rows, case.expect)
    except (BadModel, PySparkException) as error:
        return CaseResult(model.name, case.name, False, error=str(error).splitlines()[0][:300])
    return CaseResult(model.name, case.name, not missing and not extra, missing, extra)


def _frame(spark: SparkSession, given: GivenFrame) -> DataFrame:
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    schema = StructType.fromDDL(given.schema)
    rows = [tuple(_text(each, n, field.name) for n, field in enumerate(schema.fields)) for each in given.rows]
    texts = spark.createDataFrame(rows, StructType.fromDDL(", ".join(f"`{f.name}` string" for f in schema.fields)))
    return texts.select(*(F.col(f"`{f.name}`").cast(f.dataType).alias(f.name) for f in schema.fields))


def _text(row: Any, number: int, name: str) -> str | None:
    value = row.get(name) if isinstance(row, Mapping) else row[number] if number < len(row) else None
    return None if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _differences(
    spark: SparkSession, rows: DataFrame, expect: Sequence[Mapping[str, Any]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Rows that are expected and not there, and those that are there and not expected; columns that no row of `expect`
    names are not compared.
    """
    names = list(dict.fromkeys(name for each in expect for name in each)) or rows.columns
    if unknown := [name for name in names if name not in rows.columns]:
        raise BadModel(f"it gives no column {unknown[0]!r}", hint=nearest(unknown[0], rows.columns))
    found = rows.select(*(f"`{name}`" for name in names))
    schema = ", ".join(f"`{field.name}` {field.dataType.simpleString()}" for field in found.schema.fields)
    wanted = _frame(spark, GivenFrame(schema, list(expect)))
    sides = (wanted.exceptAll(found), found.exceptAll(wanted))
    missing, extra = (tuple(str(row.asDict()) for row in side.take(DIFFERENCES_MAX)) for side in sides)
    return missing, extra
