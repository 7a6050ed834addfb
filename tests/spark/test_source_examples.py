"""The examples in the documentation of the sources are executed, as they stand."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import lakebed.spark
from lakebed.core.settings import load
from lakebed.delta.model import TableSpec
from lakebed.pipeline.tables.table import Table
from lakebed.queue.model import KeyValueEntry
from lakebed.queue.roles import Queue
from lakebed.spark.location import Location
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections
from support.accepted_batches import BatchesYard
from support.topic_records import LogYard

pytestmark = pytest.mark.timeout(600)

PAGE = Path(__file__).parents[2] / "docs/parts/pipeline.md"


@pytest.mark.full
def test_the_page_s_examples_run(
    spark: SparkSession, bucket: Store, bucket_settings: StoreSettings, tmp_path: Path
) -> None:
    """Every Python block of the section, one after the other, gives what the page says."""
    layer = {**bucket_settings.as_layer(), "meta.path": str(tmp_path / "meta.sqlite")}
    context = make_context(load(sections(), stack=layer), role="test")
    BatchesYard(bucket).accept(0, 9)
    LogYard(context).append("orders", b"one", b"two", b"three")

    async def put() -> None:
        ingestor = Queue.of(context, "work").ingestor()
        await (await ingestor.ingest([KeyValueEntry(b"k", b"v")] * 3)).await_durable()
        await ingestor.close()

    asyncio.run(put())
    section = PAGE.read_text().split("## Spark sources\n")[1].split("\n## ")[0]
    first, *blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    spec = TableSpec("copied/orders", spark.createDataFrame([], "partition int, offset bigint").schema.json())
    location = Location.of(bucket_settings)
    table = Table(spark, spec, context.on(bucket), location=location)
    names: dict[str, Any] = {"spark": spark, "checkpoint": str(tmp_path / "checkpoint"), "settings": context.settings}

    exec(first, names)  # registers by the environment, in which there is no bucket here
    lakebed.spark.register(spark, context.settings)
    for block in blocks:
        exec(block, names)

    assert 4 == len(blocks)
    assert {"cpu", "memory"} == {row["metric"] for row in names["by_metric"]}
    assert [(2, "two"), (3, "three")] == sorted(tuple(row) for row in names["recent"])
    assert [(1, 3)] == [tuple(row) for row in names["sequences"]]
    assert [(0, 1), (0, 2), (0, 3)] == sorted(tuple(row) for row in table.read().collect())
