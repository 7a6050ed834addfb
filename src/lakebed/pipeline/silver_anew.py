"""What silver knows and bronze does not any more, for making silver anew: pure transforms.

Bronze keeps the last committed row of a key and drops rows past their retention, while silver keeps the latest by the
data's own order, for ever. So bronze alone cannot make silver again: rows that only silver has take part beside it,
and rows that were set aside and have left bronze since stay set aside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from lakebed.pipeline.bronze_parts import FILE_SEQ
from lakebed.pipeline.contract import Contract
from lakebed.pipeline.silver import KEPT_LINEAGE


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


def still_aside(quarantine: DataFrame, recomputed: DataFrame, keys: Sequence[str]) -> DataFrame:
    """The quarantined rows that are in bronze no more: what became of them is still told. `keys` are bronze's."""

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
