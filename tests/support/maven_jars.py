"""Jars through Maven, where this machine reaches it."""

from __future__ import annotations

import shutil
import subprocess
from functools import cache
from pathlib import Path

import pyspark

FETCH_S = 240


@cache
def jar(group: str, name: str, *versions: str) -> Path | None:
    """The jar in the first of these versions that is there; None where Maven is missing or has none of them."""
    for version in versions:
        found = Path.home() / ".m2" / "repository" / Path(*group.split(".")) / name / version / f"{name}-{version}.jar"
        if found.is_file() or _fetched(f"{group}:{name}:{version}", found):
            return found
    return None


def _fetched(artifact: str, into: Path) -> bool:
    maven = shutil.which("mvn")
    if maven is None:
        return False
    command = [maven, "-q", "-B", "dependency:get", "-Dtransitive=false", f"-Dartifact={artifact}"]
    try:
        subprocess.run(command, timeout=FETCH_S, check=False, capture_output=True)
    except (subprocess.SubprocessError, OSError):
        return False
    return into.is_file()


@cache
def spark_kafka_jars() -> list[Path]:
    """Spark's own Kafka source and sink with Kafka's Java client; none where one of them cannot be had."""
    spark = "org.apache.spark"
    found = [
        jar(spark, "spark-sql-kafka-0-10_2.13", pyspark.__version__),
        # Another version where the repository lacks this one: it is about tokens, which are not used.
        jar(spark, "spark-token-provider-kafka-0-10_2.13", pyspark.__version__, "4.0.0"),
        jar("org.apache.kafka", "kafka-clients", "3.9.2"),
        jar("org.apache.commons", "commons-pool2", "2.13.1"),
    ]
    return [each for each in found if each is not None] if all(found) else []
