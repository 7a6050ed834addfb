"""What an audit finds of rollups: objects that cannot be read or are missing, and batches that were passed by. Pure."""

from __future__ import annotations

from functools import reduce

from pyspark.sql import DataFrame

from lakebed.pipeline.audit import keys
from lakebed.pipeline.audit.findings import GONE
from lakebed.pipeline.audit.saying import plain


def of_rollups(rolled: DataFrame, covers: DataFrame, others: DataFrame, objects: DataFrame) -> DataFrame:
    """Chunks and manifests of rollups that cannot be read, and chunks of rollups and of the index that are missing."""
    unknown = ("cast(null as bigint) as size_bytes", "cast(null as bigint) as modified_ns")
    bad = [
        frame.filter(f"problem is not null and problem != '{GONE}'").selectExpr("key", "problem", *unknown)
        for frame in (rolled, covers, others)
    ]
    corrupt = reduce(DataFrame.unionByName, bad).selectExpr(*plain("corrupt", "rollup", "problem"))
    chunks = covers.filter("what in ('rollup', 'index')").selectExpr("name as chunk", "what", "key", "size_bytes")
    there = objects.selectExpr("key as chunk", "size_bytes as stored_bytes", "modified_ns")
    held = chunks.join(there, "chunk", how="left")
    lacking = held.filter("stored_bytes is null or stored_bytes != size_bytes").selectExpr(
        "if(stored_bytes is null, 'missing', 'corrupt') as finding",
        "if(what = 'index', 'index_chunk', 'rollup_chunk') as kind",
        "chunk as key",
        "key as referrer",
        "size_bytes",
        "modified_ns",
        "if(stored_bytes is null, 'a committed generation lacks it', "
        "concat('has ', stored_bytes, ' bytes, not ', size_bytes)) as reason",
    )
    return corrupt.unionByName(lacking)


def of_state(state: DataFrame) -> DataFrame:
    """The roller's state, which cannot be read: key, problem."""
    unknown = ("cast(null as bigint) as size_bytes", "cast(null as bigint) as modified_ns")
    return state.selectExpr("key", "problem", *unknown).selectExpr(*plain("corrupt", "rollup", "problem"))


def of_uncovered(batches: DataFrame) -> DataFrame:
    """Accepted batches that rollups have passed by: a cold run finds them."""
    told = "'settled, and in no generation of rollups: lakebed pipeline rollup --cold'"
    key = f"concat('accepted-by-time/v1/', {keys.hour_of('at_ns')}, '/', manifest_id, '.json') as key"
    unknown = ("cast(null as bigint) as size_bytes", "cast(null as bigint) as modified_ns")
    return batches.selectExpr(key, *unknown).selectExpr(*plain("unindexed", "rollup", told))
