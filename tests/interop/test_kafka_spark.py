"""Spark's own Kafka source and sink, batch and streaming, on a gateway."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest
from pyspark.sql import DataFrame, SparkSession

from lakebed.store.settings import StoreSettings
from support.log_processes import crew_of, settings_of

PARTITIONS, COUNT = 3, 300


def kafka(spark: SparkSession, servers: str, *, stream: bool = False) -> DataFrame:
    options = {"kafka.bootstrap.servers": servers, "subscribe": "lake", "startingOffsets": "earliest"}
    reader: Any = spark.readStream if stream else spark.read
    frame: DataFrame = reader.format("kafka").options(**options).load()
    return frame.selectExpr("cast(key as string) key", "cast(value as string) value", "partition", "offset")


def written(spark: SparkSession, servers: str, first: int, count: int) -> dict[str, str]:
    rows = {f"k{number}": f"value {number}" for number in range(first, first + count)}
    frame = spark.createDataFrame(list(rows.items()), "key string, value string")
    frame.write.format("kafka").option("kafka.bootstrap.servers", servers).option("topic", "lake").save()
    return rows


def streamed(spark: SparkSession, servers: str, folder: Path) -> dict[str, str]:
    """What a query that takes all there is has found so far. It goes on from its checkpoint."""
    found = kafka(spark, servers, stream=True).writeStream.format("parquet")
    query = found.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)
    assert query.start(str(folder / "rows")).awaitTermination(200)
    rows = spark.read.parquet(str(folder / "rows")).collect()
    assert len(rows) == len({(row.partition, row.offset) for row in rows}), "a record was read twice"
    return {row.key: row.value for row in rows}


@pytest.mark.full
async def test_sparks_own_source_and_sink_work(kafka_spark: SparkSession, tmp_path: Path) -> None:
    """Every record that Spark writes is read by Spark, in a batch and in a stream that goes on, and by HTTP."""
    async with crew_of(tmp_path, settings_of(StoreSettings(url="memory:"), tmp_path)) as (supervised, ports):
        await supervised.start("b0", "serve", ports[0], "--kafka-port", str(ports[1]))
        await supervised.ready("b0")
        url, servers = supervised.urls["b0"], f"127.0.0.1:{ports[1]}"
        made = [{"topic": "lake", "partition": number, "records": ["from http"]} for number in range(PARTITIONS)]

        def work() -> None:
            assert httpx2.post(f"{url}/v1/produce", json={"topic_partitions": made}, timeout=30).json()["success_count"]
            rows = written(kafka_spark, servers, 0, COUNT)
            batch = kafka(kafka_spark, servers).collect()
            assert rows == {row.key: row.value for row in batch if row.key is not None}
            assert PARTITIONS + COUNT == len(batch)
            assert rows == {key: value for key, value in streamed(kafka_spark, servers, tmp_path).items() if key}
            rows |= written(kafka_spark, servers, COUNT, COUNT)
            assert rows == {key: value for key, value in streamed(kafka_spark, servers, tmp_path).items() if key}
            wanted = [{"topic": "lake", "partition": number, "fetch_offset": 1} for number in range(PARTITIONS)]
            answer = httpx2.post(f"{url}/v1/consume", json={"topic_partitions": wanted}, timeout=30).json()
            by_http = [record for one in answer["results"] for record in one["records"]]
            assert rows == {each["key"]: each["value"] for each in by_http if isinstance(each, dict) and "key" in each}

        await asyncio.to_thread(work)
