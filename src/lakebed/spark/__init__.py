"""What Lakebed holds, as Spark sources: `lakebed.batches`, `lakebed.topic` and `lakebed.queue`, batch and streaming.

    import lakebed.spark

    lakebed.spark.register(spark)
    spark.read.format("lakebed.batches").option("start", "2026-11-15T00:00:00Z").load()

Where the bucket is comes from the settings that every Lakebed command reads: `lakebed.toml`, a running stack, the
environment, or the options `config` and `dir`, which name the first two. Credentials are never options: options show in
plans. Importing this module registers the sources with the active session, if there is one.
"""

from __future__ import annotations

import sys
from typing import Any

from lakebed.core.settings import Settings

PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


def register(spark: Any, settings: Settings | None = None) -> None:
    """Makes the sources known to this session. Idempotent.

    With `settings` they read there; without, each read finds its own as a Lakebed command would.
    """
    from lakebed.spark.sources import SOURCES, bound

    spark.conf.set(PUSHDOWN, "true")
    for source in SOURCES:
        spark.dataSource.register(bound(source, settings) if settings is not None else source)


def _register_active() -> None:
    if "pyspark.sql" not in sys.modules:
        return
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is not None:
        register(active)


_register_active()
