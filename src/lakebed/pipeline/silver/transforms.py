"""Silver's transforms: bronze rows in, and each of them out again as good, quarantined or duplicate.

Every function takes frames and plain values and gives a frame: no session, no I/O, no clock. A value that cannot be
read as its contract's type is a reason, never a silent null; a value that would be changed by reading it is one too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StringType, StructType

from lakebed.delta.types import parse_type, word_of
from lakebed.pipeline.bronze.drift import Fit, fit
from lakebed.pipeline.bronze.parts import FILE_SEQ, INGESTED_AT
from lakebed.pipeline.bronze.ticks import LINEAGE
from lakebed.pipeline.silver.contract import BadContract, Contract
from lakebed.spark.tasks import line_of

KEPT_LINEAGE = ("_tick_id", "_org_id", "_project_id", INGESTED_AT)
REASONS = "_reasons"
RANK = "_rank"
STORED = "_stored"
WIDEST = "decimal(38,18)"
QUARANTINE = {
    "_row": "string",  # the bronze row, whole, as JSON
    REASONS: {"type": "array", "elementType": "string", "containsNull": True},
    "_tick_id": "string",
    "_org_id": "string",
    "_project_id": "string",
    FILE_SEQ: "integer",
    INGESTED_AT: "timestamp",
    "_bronze_version": "long",
}


def fitted(contract: Contract, bronze: StructType) -> Fit:
    """The contract beside the columns that bronze has. Raises BadManifest where its drift policy says so.

    Columns that the contract names and bronze lacks are null (and, when required, a reason).
    """
    used = {contract.source_of(name) for name in contract.columns}
    mine = {name: parse_type(column.type) for name, column in contract.columns.items()}
    more = {
        field.name: field.dataType.jsonValue()
        for field in bronze.fields
        if field.name not in LINEAGE and field.name not in used
    }
    return fit(contract.table, mine, {**mine, **more}, contract.drift)


def cast(
    rows: DataFrame,
    contract: Contract,
    columns: Mapping[str, Any],
    lineage: Sequence[str] = (*KEPT_LINEAGE, FILE_SEQ),
) -> DataFrame:
    """The contract's columns, lineage, the row as it came (`_row`) and what is wrong with it (`_reasons`)."""
    have = {field.name: field.dataType for field in rows.schema.fields}
    values: list[Column] = []
    reasons: list[Column] = []
    for name, kind in columns.items():
        wanted, kind = contract.columns.get(name), word_of(kind)
        source = contract.source_of(name) if wanted else name
        if source not in have:
            values.append(F.lit(None).cast(_ddl(kind)).alias(name))
            needed = bool(wanted and wanted.required)
            reasons.append(_when(F.lit(needed), f"{name}: required, and bronze has no {source}"))
            continue
        raw, read = F.col(source), F.col(source).try_cast(_ddl(kind))
        values.append(read.alias(name))
        reasons.append(_when(raw.isNotNull() & read.isNull(), f"{name}: cannot be read as {kind}"))
        lossy = _changed(raw, read, have[source], kind)
        reasons.append(_when(lossy, f"{name}: would be changed by reading it as {kind}"))
        if wanted and wanted.required:
            reasons.append(_when(raw.isNull(), f"{name}: required, and null"))
    return rows.select(
        *values,
        *lineage,
        F.to_json(F.struct(*[F.col(name) for name in have]), {"ignoreNullFields": "false"}).alias("_row"),
        F.array_compact(F.array(*reasons)).alias(REASONS),
    )


def checked(rows: DataFrame, contract: Contract) -> DataFrame:
    """Adds each check that is false to the reasons. Like SQL's own, a check that is null (a value is missing) holds."""
    failed = [
        _when(F.coalesce(~_expression(rows, contract, name, text), F.lit(False)), f"check {name}")
        for name, text in contract.checks.items()
    ]
    return rows.withColumn(REASONS, F.concat(REASONS, F.array_compact(F.array(*failed)))) if failed else rows


def quarantined(rows: DataFrame, version: int) -> DataFrame:
    """The rows that have a reason, as the quarantine table keeps them."""
    lineage = ("_tick_id", "_org_id", "_project_id", FILE_SEQ, INGESTED_AT)
    at = F.lit(version).cast("long").alias("_bronze_version")
    reasons = F.col(REASONS).cast("array<string>").alias(REASONS)
    return rows.filter(F.size(REASONS) > 0).select("_row", reasons, *lineage, at)


def good(rows: DataFrame, columns: Sequence[str]) -> DataFrame:
    """The rows without a reason, with silver's columns only."""
    return rows.filter(F.size(REASONS) == 0).select(*columns, *KEPT_LINEAGE)


def latest(rows: DataFrame, contract: Contract, stored: DataFrame | None = None) -> DataFrame:
    """One row per key: the latest by the contract's order, then by when it came in.

    With `stored`, rows that are not later than what silver already has for their key are left out; of equals the row
    that comes now wins.
    """
    both = rows.withColumn(STORED, F.lit(False))
    if stored is not None:
        held = stored.join(rows.select(*contract.keys).distinct(), on=list(contract.keys), how="left_semi")
        both = both.unionByName(held.withColumn(STORED, F.lit(True)), allowMissingColumns=True)
    newest = Window.partitionBy(*contract.keys).orderBy(
        *[F.col(name).desc_nulls_last() for name in contract.order_by],
        F.col(STORED).asc(),
        F.col(INGESTED_AT).desc_nulls_last(),
        F.col("_tick_id").desc_nulls_last(),
    )
    ranked = both.withColumn(RANK, F.row_number().over(newest))
    return ranked.filter((F.col(RANK) == 1) & ~F.col(STORED)).drop(RANK, STORED)


def _changed(raw: Column, read: Column, kind: DataType, word: str) -> Column:
    """Whether reading changed the value: it does not come back as itself, or text has more digits than are kept."""
    if word_of(kind.jsonValue()) == word:
        return F.lit(False)
    if "<" in word:  # maps cannot be compared
        return read.isNotNull() & ~F.coalesce(F.to_json(read.try_cast(kind)).eqNullSafe(F.to_json(raw)), F.lit(False))
    if not isinstance(kind, StringType):
        back = read.try_cast(kind)
        return raw.isNotNull() & read.isNotNull() & ~F.coalesce(back.eqNullSafe(raw), F.lit(False))
    if word.startswith("decimal"):
        return read.isNotNull() & (read.cast(WIDEST) != raw.try_cast(WIDEST))
    return F.lit(False)


def _expression(rows: DataFrame, contract: Contract, name: str, text: str) -> Column:
    try:
        found = F.expr(text)
        kind = rows.select(found.alias("_check")).schema["_check"].dataType
    except (AnalysisException, ParseException) as error:
        raise BadContract(f"contract of {contract.table!r}: check {name}: {line_of(error)}") from error
    if kind.typeName() != "boolean":
        raise BadContract(f"contract of {contract.table!r}: check {name} is {kind.simpleString()}, not true or false")
    return found


def _when(wrong: Column, reason: str) -> Column:
    return F.when(wrong, F.lit(reason))


def _ddl(kind: str) -> str:
    return {"byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint"}.get(kind, kind)


def only_in_silver(held: DataFrame, recomputed: DataFrame, contract: Contract, columns: Iterable[str]) -> DataFrame:
    """Silver's rows that bronze no longer has, under bronze's column names, to be cast and checked like any others.

    `recomputed` are bronze's rows after the cast. A key and its tick name the same row in both.
    """
    have = set(held.columns)
    keys = [key for key in contract.keys if key in have]
    theirs = recomputed.select("_tick_id", *[_text(key).alias(f"_{key}") for key in keys]).distinct()
    same = [held["_tick_id"].eqNullSafe(theirs["_tick_id"]), *[_text(held[key]) == theirs[f"_{key}"] for key in keys]]
    left = held.join(theirs, on=same, how="left_anti")
    sources: dict[str, str] = {}
    for name in columns:
        if name in have:
            sources.setdefault(contract.source_of(name) if name in contract.columns else name, name)
    values = [F.col(name).alias(source) for source, name in sources.items()]
    return left.select(*values, *KEPT_LINEAGE, F.lit(None).cast("int").alias(FILE_SEQ))


def kept_in_quarantine(quarantine: DataFrame, recomputed: DataFrame, keys: Sequence[str]) -> DataFrame:
    """The quarantined rows that are no longer in bronze; they stay quarantined. `keys` are bronze's."""

    def named(rows: DataFrame) -> DataFrame:
        return rows.withColumns({f"_key_{n}": _value(name) for n, name in enumerate(keys)})

    same = ["_tick_id", *[f"_key_{n}" for n in range(len(keys))]]
    left = named(quarantine).join(named(recomputed).select(*same).distinct(), on=same, how="left_anti")
    return left.select(*quarantine.columns)


def _text(key: str | Column) -> Column:
    """A key as text: a contract that has changed may have given it another type."""
    return (F.col(key) if isinstance(key, str) else key).cast("string")


def _value(name: str) -> Column:
    return F.coalesce(F.get_json_object("_row", f"$['{name}']"), F.lit(""))
