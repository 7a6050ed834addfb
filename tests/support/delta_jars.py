"""Delta's own jars for Spark, through Maven, where this machine reaches it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pyspark

from support.maven_jars import jar

DELTA = "4.4.0"
ARTIFACT = f"delta-spark_{'.'.join(pyspark.__version__.split('.')[:2])}_2.13"
WITH = ("delta-storage", "delta-kernel-api", "delta-kernel-defaults", "delta-kernel-unitycatalog")


@cache
def delta_jars() -> list[Path]:
    """The jars, without what they share with Spark; none where one of them cannot be had."""
    found = [jar("io.delta", name, DELTA) for name in (ARTIFACT, *WITH)]
    return [each for each in found if each is not None] if all(found) else []
