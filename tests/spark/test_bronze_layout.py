"""Ticks with nested types, wider types and a layout of files, on the real bucket."""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from lakebed.delta.log import fields_of
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from lakebed.ticks.model import BadManifest
from support.stored_ticks import Yard, parquet, table


@pytest.fixture
def yard(spark: SparkSession, bucket: Store, bucket_settings: StoreSettings) -> Yard:
    return Yard(spark, bucket, bucket_settings)


def test_nested_and_wider_types_in_a_partitioned_table(yard: Yard) -> None:
    """Values come back as they were sent; a wider type widens the column, a narrower one is taken as it is."""
    tags = pa.array([[{"k": "a", "n": 1}], None], pa.list_(pa.struct([("k", pa.string()), ("n", pa.int64())])))
    first, bodies = table(parquet(id=pa.array([1, 2], pa.int32()), day=["mo", "tu"], tags=tags))
    laid_out = msgspec.structs.replace(first, partition_by=("day",), cluster_by=("id",))
    wide, more = table(parquet(id=pa.array([2, 2**40], pa.int64()), day=["we", "we"], tags=tags), first_seq=5)
    narrow, few = table(parquet(id=pa.array([3], pa.int16()), day=["mo"], tags=tags.slice(1)), first_seq=9)

    yard.bronze().commit(yard.tick("t1", (laid_out, bodies)))
    [second] = yard.bronze().commit(yard.tick("t2", (wide, more)))
    yard.bronze().commit(yard.tick("t3", (narrow, few)))

    state = yard.bronze().table("acme", "p1", "orders").snapshot()
    assert ("long", ("day",), ("id",)) == (fields_of(state.schema_json)["id"], state.partition_by, state.cluster_by)
    assert (1, 1) == (second.rows_inserted, second.rows_replaced)
    rows = yard.rows(columns=("id", "day", "tags"))
    assert [(1, "mo"), (2, "we"), (3, "mo"), (2**40, "we")] == [row[:2] for row in rows]
    assert [[("a", 1)], [("a", 1)], None, None] == [row[2] and [tuple(one) for one in row[2]] for row in rows]
    changed = msgspec.structs.replace(narrow, partition_by=("id",))
    with pytest.raises(BadManifest, match="is partitioned by day"):
        yard.bronze().commit(yard.tick("t4", (changed, few)))
