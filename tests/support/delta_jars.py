"""Delta's own jars for Spark, through Maven, where this machine reaches it."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pyspark

DELTA = "4.4.0"
ARTIFACT = f"delta-spark_{'.'.join(pyspark.__version__.split('.')[:2])}_2.13"
WITH = ("delta-storage", "delta-kernel-api", "delta-kernel-defaults", "delta-kernel-unitycatalog")
FETCH_S = 240


@cache
def delta_jars() -> list[Path]:
    """The jars; none where Maven is missing or not reached."""
    found = _stored()
    if not found and (maven := shutil.which("mvn")):
        command = [maven, "-q", "-B", "dependency:get", f"-Dartifact=io.delta:{ARTIFACT}:{DELTA}"]
        try:
            subprocess.run(command, timeout=FETCH_S, check=True, capture_output=True)
        except (subprocess.SubprocessError, OSError):
            return []
        found = _stored()
    return found


def _stored() -> list[Path]:
    home = Path.home() / ".m2" / "repository" / "io" / "delta"
    jars = [home / name / DELTA / f"{name}-{DELTA}.jar" for name in (ARTIFACT, *WITH)]
    return [jar for jar in jars if jar.is_file()] if jars[0].is_file() else []
