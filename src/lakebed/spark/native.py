"""Delta's own reader in a session that has its jars: found by itself, given the bucket, never required.

The jars are an extra: `spark.conf` names them (`spark.jars` or `spark.jars.packages`: delta-spark for this Spark,
hadoop-aws for this Hadoop). A session whose settings name delta-spark is configured for it at its start.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession
from pyspark.sql.utils import is_remote

from lakebed.spark.location import Location

EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
CATALOG = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
S3A = "org.apache.hadoop.fs.s3a.S3AFileSystem"
JARS = ("spark.jars", "spark.jars.packages", "spark.driver.extraClassPath")


def delta_conf(conf: Mapping[str, str]) -> dict[str, str]:
    """What a session needs beside Delta's jars; nothing when `conf` does not name them. Pure."""
    if not any("delta-spark" in conf.get(name, "") for name in JARS):
        return {}
    return {"spark.sql.extensions": EXTENSION, "spark.sql.catalog.spark_catalog": CATALOG}


def has_delta(spark: SparkSession) -> bool:
    """Whether this session can read Delta tables on S3 by itself: the classes are there, and Delta is configured."""
    if is_remote():
        return False  # the server's classes cannot be seen from here
    try:
        if EXTENSION not in (spark.conf.get("spark.sql.extensions", "") or ""):
            return False
        jvm: Any = spark._jvm
        loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
        for name in (CATALOG, S3A):
            loader.loadClass(name)
    except Py4JError:  # a class is not there
        return False
    return True


def use_bucket(spark: SparkSession, location: Location) -> None:
    """Gives Hadoop's S3 client this bucket's address and credentials; other buckets keep theirs."""
    conf: Any = spark.sparkContext._jsc.hadoopConfiguration()
    values = {
        "endpoint": location.endpoint,
        "endpoint.region": location.region,
        "access.key": location.access_key_id,
        "secret.key": location.secret_access_key,
        "path.style.access": "true" if location.endpoint else "",
        "connection.ssl.enabled": "false" if location.endpoint.startswith("http://") else "",
    }
    for name, value in values.items():
        if value:
            conf.set(f"fs.s3a.bucket.{location.bucket}.{name}", value)
