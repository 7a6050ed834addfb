"""The load test's collector: what brokers, their processes, the host and the client say, sample by sample."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from lakebed.bench.cpu import cpu_s, rss_bytes
from lakebed.bench.hammer import Connection
from lakebed.bench.loadtest_client import Client
from lakebed.bench.loadtest_summary import quantiles, total

ASKING = b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: application/json\r\n\r\n"


class Samples(msgspec.Struct):
    """The latest metrics of each broker, and rows for the plots."""

    latest: dict[str, dict[str, Any]] = {}
    brokers: list[dict[str, Any]] = []
    client: list[dict[str, Any]] = []


async def collect(
    folder: Path,
    urls: Mapping[str, str],
    pids: Mapping[str, int],
    client: Client,
    *,
    sample_s: float,
    ended: asyncio.Event,
) -> Samples:
    """Samples until `ended`, and one last time when the hammer rests."""
    samples = Samples()
    with (folder / "metrics-30s.jsonl").open("wb") as metrics, (folder / "client-30s.jsonl").open("wb") as own:
        measured = 0
        while True:
            last = ended.is_set()
            for broker, url in urls.items():
                await _sample(samples, broker, url, pids[broker], client, metrics)
            row = {"at_ms": int(time.time() * 1000), **_client(client, client.latencies_ms[measured:])}
            measured = len(client.latencies_ms)
            samples.client.append(row)
            own.write(msgspec.json.encode(row) + b"\n")
            if last:
                return samples
            try:
                await asyncio.wait_for(ended.wait(), sample_s)
            except TimeoutError:
                continue


async def _sample(samples: Samples, broker: str, url: str, pid: int, client: Client, file: BinaryIO) -> None:
    connection = Connection(url)
    try:
        _, body = await connection.ask(ASKING)
        found: dict[str, Any] = msgspec.json.decode(body)
    except OSError:
        return  # a broker that is gone has no more samples; the summary says so
    finally:
        connection.close()
    samples.latest[broker] = found
    process = {"cpu_s": round(cpu_s(pid), 2), "rss_bytes": rss_bytes(pid)}
    row = {"broker": broker, "at_s": round(time.perf_counter() - client.began, 3), "process": process}
    samples.brokers.append(
        row | {"records": total(found, "lakebed_log_records_total", direction="in"), "host_load": os.getloadavg()[0]}
    )
    file.write(
        msgspec.json.encode(
            {"at_ms": int(time.time() * 1000), **row, "host": {"load": os.getloadavg()}, "metrics": found}
        )
        + b"\n"
    )


def _client(client: Client, latencies_ms: list[float]) -> dict[str, Any]:
    return {
        "at_s": round(time.perf_counter() - client.began, 3),
        "acknowledged": client.acknowledged,
        "requests": client.requests,
        "failed": client.failed,
        "unknown": client.unknown,
        "cpu_s": round(time.process_time(), 3),
        "latency_ms": quantiles(latencies_ms),
    }
