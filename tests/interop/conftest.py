"""One Spark session for the lane: Lakebed's own, with Delta's and Kafka's jars where Maven can be reached."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

from lakebed.core.settings import load
from lakebed.spark.session import close_session, open_session
from lakebed.spark.settings import SparkSettings
from support.delta_jars import delta_jars
from support.maven_jars import spark_kafka_jars

DELTA = {
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # Small tables: few tasks for the log.
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.sql.sources.parallelPartitionDiscovery.parallelism": "2",  # VACUUM lists in so many tasks: 10,000 by default
    "spark.databricks.delta.retentionDurationCheck.enabled": "false",
    # No checksum files beside files that other engines replace.
    "spark.hadoop.fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "spark.hadoop.fs.AbstractFileSystem.file.impl": "org.apache.hadoop.fs.local.RawLocalFs",
}


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    # Tasks open the folder's location, which is a class of the tests.
    known = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), known)))
    delta, kafka = delta_jars(), spark_kafka_jars()
    conf = {**(DELTA if delta else {}), "spark.jars": ",".join(map(str, [*delta, *kafka]))}
    settings = load(
        [SparkSettings], stack={"spark.master": "local[2]", "spark.shuffle_partitions": 1, "spark.quick": True}
    )
    given = settings.of(SparkSettings)

    yield open_session(msgspec.structs.replace(given, conf={**given.conf, **conf}))
    close_session()


@pytest.fixture(scope="session")
def kafka_spark(spark: SparkSession) -> SparkSession:
    """The session, with Spark's own Kafka source and sink. Skips where their jars cannot be fetched."""
    if not spark_kafka_jars():
        pytest.skip("Spark's Kafka source is not tested: its jars cannot be fetched with mvn")
    return spark


@pytest.fixture(scope="session")
def delta_spark(spark: SparkSession) -> SparkSession:
    """The session, with Delta's jars. Skips where they cannot be fetched."""
    if not delta_jars():
        pytest.skip("delta-spark is not tested: its jars cannot be fetched with mvn")
    return spark
