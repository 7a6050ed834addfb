"""`lakebed bench ticks`: a finalize beside a plain Spark write of the same rows, ten orgs beside one, warm latencies.

Everything goes through the gateway's app, in process: parts are uploaded first, and what is measured is the POST that
verifies, writes bronze, sends the message and writes the audit row before it responds. The plain write is Spark's own
Parquet from and to local disk: no bucket, no check of the rows and no commit.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from lakebed.bench.harness import BenchEnvironment, Check, at_most, measured, rounds_of
from lakebed.bench.load import tree_cpu_s
from lakebed.core.clock import Clock
from lakebed.core.context import Context
from lakebed.core.errors import Unavailable
from lakebed.gateway.app import build
from lakebed.spark.settings import SparkSettings
from lakebed.ticks.adapters import open_vault
from lakebed.wiring.ticks import component

ROWS = 100_000
SMALL_ROWS = 1_000
PARTS = 2
ORGS = 10
FINALIZE_BAR = 0.8  # ÷ a plain Spark write of the same rows
ORGS_BAR = 2.0  # ten orgs at once ÷ one org alone: in time where there are cores for them, and in CPU time a tick
P95_BAR_S = 5.0
KNOWN_S = 30.0


async def bench(environment: BenchEnvironment) -> Sequence[Check]:
    context = environment.context()
    ticks = component(context)
    await ticks.start()
    folder = Path(tempfile.mkdtemp(prefix="lakebed-bench-"))
    try:
        agent = BenchUploader(context, build(context, [ticks]))
        return await _measure(environment, context, agent, folder)
    finally:
        await ticks.stop()
        shutil.rmtree(folder, ignore_errors=True)


async def _measure(environment: BenchEnvironment, context: Context, agent: BenchUploader, folder: Path) -> list[Check]:
    environment.report("Spark starts and warms up with three small ticks")
    for n in range(3):
        await agent.finalized("warm", f"t{n}", SMALL_ROWS, 0)
    rounds = 3 if environment.quick else 7
    big = _parts(ROWS, 0)
    for n, body in enumerate(big):
        (folder / f"part-{n}.parquet").write_bytes(body)
    plain = PlainSparkWrite(context, folder)
    await asyncio.to_thread(plain.write)

    async def plainly() -> float:
        return await asyncio.to_thread(plain.write)

    async def finalized() -> float:
        return await agent.finalized(f"big-{context.ids.token()}", "t", ROWS, 0)

    environment.report(
        f"finalize of {ROWS} rows in {PARTS} parts and a plain Spark write of the same rows, alternating"
    )
    seen = await rounds_of(rounds, {"finalize": finalized, "plain": plainly})
    again = [await agent.finalized("again", f"t{n}", ROWS, n * ROWS // 2) for n in range(rounds)]
    ticked = [await agent.finalized("ticked", f"t{n}", SMALL_ROWS, n * SMALL_ROWS) for n in range(10)]
    environment.report(f"{ORGS} orgs at once, one org with one tick, and one org with {ORGS} ticks")
    alone, serial, parallel, alone_cpu, parallel_cpu = [], [], [], [], []
    for _ in range(3):
        seconds, cpu = await agent.measured(1, 1)
        alone.append(seconds)
        alone_cpu.append(cpu)
        seconds, cpu = await agent.measured(ORGS, 1)
        parallel.append(seconds)
        parallel_cpu.append(cpu / ORGS)
        serial.append((await agent.measured(1, ORGS))[0])
    cores = os.cpu_count() or 1
    spread = at_most(f"{ORGS} orgs at once ÷ one org's tick", parallel, alone, ORGS_BAR)
    if cores < ORGS:  # a finalize is CPU-bound: this bar applies where there is a core for each org
        spread = measured(
            f"{ORGS} orgs at once ÷ one org's tick, CPU-bound on {cores} cores", _ratios(parallel, alone), "ratio"
        )
    warm = sorted([*seen["finalize"], *again, *alone, *ticked])
    p95 = warm[min(len(warm) - 1, int(len(warm) * 0.95))]
    return [
        measured(f"finalize of {ROWS} new rows", seen["finalize"], "s"),
        measured("plain Spark write of them", seen["plain"], "s"),
        at_most("finalize ÷ plain write", seen["finalize"], seen["plain"], FINALIZE_BAR),
        measured(f"finalize of {ROWS} rows, half of them replacing", again[1:], "s"),
        measured(f"finalize of {SMALL_ROWS} new rows", ticked, "s"),
        measured("one org, one small tick", alone, "s"),
        measured(f"{ORGS} orgs at once, a small tick each", parallel, "s"),
        measured(f"one org, {ORGS} small ticks (one after the other)", serial, "s"),
        spread,
        at_most(f"CPU time of a tick, {ORGS} orgs at once ÷ one org's alone", parallel_cpu, alone_cpu, ORGS_BAR),
        measured(f"{ORGS} orgs at once ÷ the same ticks in one org", _ratios(parallel, serial), "ratio"),
        Check(f"p95 of {len(warm)} warm finalizes, one at a time", round(p95, 3), "s", P95_BAR_S, p95 < P95_BAR_S),
    ]


class BenchUploader:
    """Uploads ticks and finalizes them through the app."""

    def __init__(self, context: Context, app: Any) -> None:
        self._context, self._clock = context, context.clock
        self._vault = open_vault(context)
        self._client = httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=app), base_url="http://127.0.0.1", timeout=120.0
        )
        self._secrets: dict[str, str] = {}

    async def finalized(self, org: str, tick: str, rows: int, first: int) -> float:
        """Seconds of the finalize alone; its parts are uploaded before."""
        manifest = await self._upload(org, tick, rows, first)
        return await self._finalize(org, tick, manifest)

    async def measured(self, orgs: int, ticks_each: int) -> tuple[float, float]:
        """Seconds from the first finalize to the last answer, of this many orgs at once; and the CPU time of all
        processes in them. With a core for each org, the former is the latter of one tick.
        """
        run = self._context.ids.token()
        names = [(f"org-{run}-{n}", f"t{m}") for n in range(orgs) for m in range(ticks_each)]
        manifests = [await self._upload(org, tick, SMALL_ROWS, n * SMALL_ROWS) for n, (org, tick) in enumerate(names)]
        began, cpu = self._clock.monotonic_s(), tree_cpu_s()
        await asyncio.gather(
            *(self._finalize(org, tick, manifest) for (org, tick), manifest in zip(names, manifests, strict=True))
        )
        return self._clock.monotonic_s() - began, tree_cpu_s() - cpu

    async def _upload(self, org: str, tick: str, rows: int, first: int) -> bytes:
        if org not in self._secrets:
            self._secrets[org] = await self._vault.issue(org, "bench")
            await self._known(org)
        bodies = _parts(rows, first)
        for seq, body in enumerate(bodies):
            sha256 = hashlib.sha256(body).hexdigest()
            await self._request("PUT", org, f"{tick}/parts/{seq}", body, {"x-sha256": sha256})
        return _manifest(tick, bodies, rows)

    async def _known(self, org: str) -> None:
        """Waits until the service knows the org: it lists secrets at most every few seconds."""
        head = {"x-api-key": org, "x-api-secret": self._secrets[org]}
        until_s = self._clock.monotonic_s() + KNOWN_S
        while (await self._client.get("/v1/projects/bench/status", headers=head)).status_code == 403:
            if self._clock.monotonic_s() > until_s:
                raise Unavailable(f"the service does not know {org} after {KNOWN_S:.0f} s")
            await self._clock.sleep(0.2)

    async def _finalize(self, org: str, tick: str, manifest: bytes) -> float:
        began = self._clock.monotonic_s()
        await self._request("POST", org, f"{tick}/finalize", manifest, {})
        return self._clock.monotonic_s() - began

    async def _request(self, method: str, org: str, path: str, body: bytes, headers: dict[str, str]) -> None:
        sent = {"x-api-key": org, "x-api-secret": self._secrets[org], **headers}
        answer = await self._client.request(method, f"/v1/projects/bench/ticks/{path}", content=body, headers=sent)
        if answer.status_code not in (200, 202):
            raise Unavailable(f"{method} {path} returned {answer.status_code}: {answer.text[:300]}")


class PlainSparkWrite:
    """Spark's own write of the same rows, from and to local disk."""

    def __init__(self, context: Context, folder: Path) -> None:
        self._settings = context.settings.of(SparkSettings)
        self._clock: Clock = context.clock
        self._folder = folder

    def write(self) -> float:
        from lakebed.spark.session import open_session

        spark = open_session(self._settings)
        began = self._clock.monotonic_s()
        rows = spark.read.parquet(*[str(path) for path in sorted(self._folder.glob("part-*.parquet"))])
        rows.write.mode("overwrite").parquet(str(self._folder / "written"))
        return self._clock.monotonic_s() - began


def _parts(rows: int, first: int) -> list[bytes]:
    step = rows // PARTS
    return [_parquet(first + n * step, step) for n in range(PARTS)]


def _parquet(first: int, rows: int) -> bytes:
    ids = range(first, first + rows)
    table = pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "customer": pa.array([n % 977 for n in ids], pa.int64()),
            "note": pa.array([f"note of {n}" for n in ids]),
            "price": pa.array([n * 0.25 for n in ids]),
            "at": pa.array([n * 1_000_000 for n in ids], pa.timestamp("us", "UTC")),
            "open": pa.array([n % 3 == 0 for n in ids]),
        }
    )
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def _manifest(tick: str, bodies: Sequence[bytes], rows: int) -> bytes:
    kinds = {
        "id": "long",
        "customer": "long",
        "note": "string",
        "price": "double",
        "at": "timestamp",
        "open": "boolean",
    }
    table = {
        "name": "orders",
        "mode": "delta",
        "schema": [{"name": name, "type": kind} for name, kind in kinds.items()],
        "primary_keys": ["id"],
        "row_count": rows,
        "parquets": [
            {"file_seq": n, "sha256": hashlib.sha256(body).hexdigest(), "rows": rows // PARTS, "bytes": len(body)}
            for n, body in enumerate(bodies)
        ],
    }
    return msgspec.json.encode({"tick_id": tick, "project_id": "bench", "dt": "20261115", "tables": [table]})


def _ratios(values: Sequence[float], bare: Sequence[float]) -> list[float]:
    return [value / base for value, base in zip(values, bare, strict=True)]
