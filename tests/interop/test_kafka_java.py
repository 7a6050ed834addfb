"""Kafka's Java client, versions 3 and 4, on a gateway. Its jar comes through Maven, where this machine reaches it."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from pathlib import Path

import pyspark
import pytest

from lakebed.store.settings import StoreSettings
from support.log_processes import crew_of, settings_of
from support.maven_jars import jar

SOURCE = Path(__file__).with_name("KafkaClient.java")


def classpath(version: str) -> str:
    """The client, and the libraries that it shares with Spark. Skips where it cannot be fetched."""
    client = jar("org.apache.kafka", "kafka-clients", version)
    if client is None or not shutil.which("javac"):
        pytest.skip("the Java client is not tested: it needs javac, and its jar through mvn")
    shared = Path(pyspark.__file__).parent / "jars"
    names = ("lz4-java", "slf4j-api", "snappy-java", "zstd-jni")
    return ":".join(map(str, [client, *(each for name in names for each in shared.glob(f"{name}-*.jar"))]))


@pytest.mark.full
@pytest.mark.parametrize("version", ["3.9.1", "4.1.0"])
async def test_the_java_client_works(version: str, tmp_path: Path) -> None:
    """Topics, idempotent producers with each compression, a group, commits, offsets by time; no transactions."""
    path = classpath(version)
    async with crew_of(tmp_path, settings_of(StoreSettings(url="memory:"), tmp_path)) as (supervised, ports):
        await supervised.start("b0", "serve", ports[0], "--kafka-port", str(ports[1]))
        await supervised.ready("b0")

        def work() -> list[str]:
            subprocess.run(["javac", "-cp", path, "-d", tmp_path, SOURCE], check=True, timeout=120)
            command = ["java", "-cp", f"{tmp_path}:{path}", "KafkaClient", f"127.0.0.1:{ports[1]}", "java"]
            done = subprocess.run(command, check=True, timeout=200, capture_output=True, text=True)
            return done.stdout.splitlines()

        found = await asyncio.to_thread(work)

    assert ["partitions 3", "read 200 committed 203 earliest 1", "transactions refused"] == found
