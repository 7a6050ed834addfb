"""What Lakebed holds, as Spark sources: `lakebed.batches`, `lakebed.topic` and `lakebed.queue`, batch and streaming;
and `lakebed.table`, a source and a sink.

    import lakebed.spark

    lakebed.spark.register(spark)
    spark.read.format("lakebed.batches").option("start", "2026-11-15T00:00:00Z").load()

Where the bucket is comes from the settings that every Lakebed command reads: `lakebed.toml`, a running stack, the
environment, or the options `config` and `dir`, which name the first two. Credentials are never options: options show in
plans. Importing this module first registers the sources with the active session, if there is one.
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
    from pyspark.sql.utils import is_remote

    from lakebed.spark.sources import SOURCES, bound
    from lakebed.wiring.parts import PARTS, resolve

    spark.conf.set(PUSHDOWN, "true")
    if not is_remote():  # Spark Connect resolves names in its server
        spark.createDataFrame([], "id long")  # makes it this thread's active session: writers look sources up there
    for source in (*SOURCES, *(resolve(part.source) for part in PARTS if part.source)):
        spark.dataSource.register(bound(source, settings) if settings is not None else source)


def _register_active() -> None:
    if "pyspark.sql" not in sys.modules:
        return
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    # A part that uses this package is being imported first, in a worker of Spark Connect too: its source cannot be
    # loaded now, and whoever imports a part registers what it needs.
    if active is not None and not any(name.startswith("lakebed.pipeline.") for name in sys.modules):
        register(active)


_register_active()
