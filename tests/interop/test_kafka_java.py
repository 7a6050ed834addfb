"""Kafka's Java client, versions 3 and 4, on a gateway. Its jar comes through Maven, where this machine reaches it."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import threading
import time
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


LOCKED_S = 8.0  # longer than a gateway waits for the file: it answers that meta is away


def told(meta: Path, command: list[str]) -> list[str]:
    """What the client prints. When it is about to commit, another process locks meta for a while."""
    lines: list[str] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None and client.stdout is not None
        end = threading.Timer(200, client.kill)
        end.start()
        for line in client.stdout:
            lines.append(line.strip())
            if line.startswith("commits"):
                with sqlite3.connect(meta, isolation_level=None) as other:
                    other.execute("BEGIN IMMEDIATE")
                    client.stdin.write("\n")
                    client.stdin.flush()
                    time.sleep(LOCKED_S)
                    other.execute("ROLLBACK")
        end.cancel()
    return lines


@pytest.mark.full
@pytest.mark.parametrize("version", ["3.9.1", "4.1.0"])
async def test_the_java_client_works(version: str, tmp_path: Path) -> None:
    """Topics, idempotent producers with each compression, a group, commits, offsets by time; no transactions.

    A commit while meta is away is retried until it is there again.
    """
    path = classpath(version)
    settings = settings_of(StoreSettings(url="memory:"), tmp_path)
    async with crew_of(tmp_path, settings) as (supervised, ports):
        await supervised.start("b0", "serve", ports[0], "--kafka-port", str(ports[1]))
        await supervised.ready("b0")

        def work() -> list[str]:
            subprocess.run(["javac", "-cp", path, "-d", tmp_path, SOURCE], check=True, timeout=120)
            command = ["java", "-cp", f"{tmp_path}:{path}", "KafkaClient", f"127.0.0.1:{ports[1]}", "java"]
            return told(Path(settings["meta.path"]), command)

        found = await asyncio.to_thread(work)

    read = ["partitions 3", "read 200 committed 203 earliest 1", "commits when told", "committed"]
    assert [*read, "transactions refused"] == found
