"""A real gateway on an embedded bucket with a little of everything in it, for browsers and screenshots.

Between the gateway and its bucket is a wire that can be cut. Some of what is seeded is hostile on purpose.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pyarrow as pa

from lakebed.batches.model import GarbageProof
from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import env_name, load
from lakebed.embedded.endpoints import BucketEndpoints
from lakebed.lifecycle.ledger import DeletionLedger
from lakebed.lifecycle.model import ActionKind, Degraded, Mode, ObjectIdentity, Position, Rule, StreamKind
from lakebed.lifecycle.policy import render_xml
from lakebed.lifecycle.scan_plan import BucketScan
from lakebed.lifecycle.state import ActionState, Blocker, BlockerState, BucketLifecycle, LedgerRow, ReaderState, Stream
from lakebed.lifecycle.workers import open_services, state_of
from lakebed.log.services import LogServices
from lakebed.pipeline.audit import paths
from lakebed.pipeline.audit.conservation import conservation_row
from lakebed.pipeline.audit.model import (
    AUDIT_SCHEMA,
    AuditFinding,
    AuditRecord,
    Conservation,
    ConservationRow,
    FindingTotal,
)
from lakebed.pipeline.audit.stored import publish, report_to
from lakebed.queue.roles import Queue
from lakebed.store import admin
from lakebed.store.connect import connect
from lakebed.store.settings import StoreSettings
from lakebed.ticks.adapters import open_audit, open_queue, open_vault
from lakebed.ticks.audit import DISPATCHED
from lakebed.ticks.dispatcher import Dispatcher
from lakebed.ticks.fakes import FakeSilverJob
from lakebed.wiring.parts import sections
from support import tick_fixtures as ticks_kit
from support.batch_frames import frame_of
from support.process_output import line_of
from support.runtimes import runtime_of

DEADLINE_S = 150.0
HOSTILE = '</pre><script>window.__hacked=1</script><img src=x onerror="window.__hacked=2">\'"><svg onload=alert(1)>'
HOSTILE_KEY = "inbox/\"><img src=x onerror='window.__hacked=3'><script>window.__hacked=4</script>.csv"
ORG, PROJECT = "acme", "shop"
RETIRED = "reports/2025/summary.parquet"
DAY_NS = 86_400 * 10**9
AUDIT_LOST = 17  # samples, of one agent's hour, that the last audit missed in bronze


class Wire:
    """Carries bytes to the bucket until it is cut; then every connection ends at once, until it is repaired."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target, self._cut = target, False
        self._open: set[socket.socket] = set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._cut = True
        for one in list(self._open):
            _end(one)

    def mend(self) -> None:
        self._cut = False

    def close(self) -> None:
        self.cut()
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._server.accept()
            except OSError:
                return
            if self._cut:
                _end(here)
                continue
            there = socket.create_connection(self._target)
            self._open |= {here, there}
            for source, sink in ((here, there), (there, here)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                sink.sendall(data)
        except OSError:
            pass
        for one in (source, sink):
            self._open.discard(one)
            _end(one)


def _end(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


class Patient(httpx2.AsyncClient):
    """Comes again when it has to, as every client of a gateway should."""

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        deadline_s = time.monotonic() + DEADLINE_S
        while (answer := await super().send(request, **options)).status_code == 503 and time.monotonic() < deadline_s:
            await asyncio.sleep(0.5)
        return answer


class Yard:
    def __init__(
        self, weed: BucketEndpoints, folder: Path, *, keys: list[dict[str, Any]] | None = None, prefix: str = ""
    ) -> None:
        host, port = weed.s3.removeprefix("http://").split(":")
        self.wire = Wire((host, int(port)))
        self.folder = folder
        self.prefix = prefix or f"yard-{Ids().token()}"
        reported = {
            **weed.as_settings(),
            "store.prefix": self.prefix,
            "meta.path": str(folder / "meta.sqlite"),
            "ticks.pipeline": "twin",
            "ticks.payload_key": ticks_kit.PAYLOAD_KEY,
            "log.linger_ms": "1",
        }
        self._told = {key: value for key, value in reported.items() if key in _known()}
        self.env = {env_name(key): value for key, value in self._told.items()}
        self._keys = keys
        self.context = self._context()
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.stored = weed

    def _context(self) -> Context:
        settings = load(sections(), flags=self._told)
        clock, ids, metrics = SystemClock(), Ids(), Metrics()
        store = connect(settings.of(StoreSettings), runtime_of(clock, ids, metrics))
        return Context(node="yard", settings=settings, store=store, clock=clock, ids=ids, metrics=metrics)

    def start(self, *arguments: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LAKEBED_")}
        env = {**clean, **self.env, "PYTHONPATH": os.pathsep.join(sys.path), "LAKEBED_GATEWAY_PROVE": "never"}
        env["LAKEBED_STORE_ENDPOINT"] = f"http://127.0.0.1:{self.wire.port}"
        if self._keys:
            lines = [
                f'[[keys]]\nname = "{key["name"]}"\nsecret = "{key["secret"]}"\nrights = {json.dumps(key["rights"])}\n'
                for key in self._keys
            ]
            (self.folder / "keys.toml").write_text("\n".join(lines))
            (self.folder / "keys.toml").chmod(0o600)
            env["LAKEBED_GATEWAY_KEYS_FILE"] = str(self.folder / "keys.toml")
        log = (self.folder / "gateway.log").open("wb")
        command = [sys.executable, "-m", "lakebed", "serve", *arguments]
        self._process = subprocess.Popen(command, env=env, cwd=self.folder, stdout=subprocess.PIPE, stderr=log)
        self.url = json.loads(line_of(self._process, self.folder / "gateway.log"))["url"]

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def close(self) -> None:
        self.stop()
        self.wire.close()

    # What lies in it.

    def seed(self) -> None:
        self.run(self._seed)

    def run(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """In a thread of its own: playwright has a loop running in ours."""
        with ThreadPoolExecutor(1) as alone:
            return alone.submit(lambda: asyncio.run(work())).result()

    async def _seed(self) -> None:
        await asyncio.gather(self._log(), self._batches(), self._queue())
        await self._ticks()
        await self._lifecycle()
        await self._audit()
        await asyncio.to_thread(self._tables)

    def send(self, number: int) -> None:
        """A little more of everything that comes in through the gateway."""
        with httpx2.Client(base_url=self.url, timeout=DEADLINE_S) as client:
            now_ns = time.time_ns()
            frame = frame_of(number * 50, number * 50 + 49, agent="web-7", boot="boot-live", at_ns=now_ns)
            assert client.post("/v1/batches", content=frame).status_code == 200
            produced = {
                "topic": "orders",
                "partition": 0,
                "records": [f'{{"order": {number * 5 + n}}}' for n in range(5)],
            }
            assert client.post("/v1/produce", json={"topic_partitions": [produced]}).status_code == 200

    async def _client(self) -> httpx2.AsyncClient:
        return Patient(base_url=self.url, timeout=DEADLINE_S)

    async def _batches(self) -> None:
        async with await self._client() as client:
            now_ns = time.time_ns()
            for number, agent in enumerate(["web-1", "web-2", "db-1", HOSTILE[:60]]):
                for batch in range(4):
                    frame = frame_of(batch * 20, batch * 20 + 19, agent=agent, at_ns=now_ns - number * 10**9)
                    answer = await client.post("/v1/batches", content=frame)
                    assert answer.status_code == 200, answer.text
            first = frame_of(0, 19, agent="web-1", at_ns=now_ns)
            assert (await client.post("/v1/batches", content=first)).json()["duplicate"]
            for agent in ("web-2", "db-1"):
                other = frame_of(0, 19, agent=agent, value=99.0, at_ns=now_ns)
                assert (await client.post("/v1/batches", content=other)).status_code == 409

    async def _log(self) -> None:
        async with await self._client() as client:
            for number in range(14):
                parts = [
                    {"topic": "orders", "partition": n, "records": [_order(number * 40 + m) for m in range(20 + n * 7)]}
                    for n in range(3)
                ]
                assert (await client.post("/v1/produce", json={"topic_partitions": parts})).status_code == 200
                if number == 8:
                    await self._compact()
            clicks = [{"topic": "clicks", "partition": 0, "records": ["plain text", HOSTILE, '{"a": "<b>bold</b>"}']}]
            assert (await client.post("/v1/produce", json={"topic_partitions": clicks})).status_code == 200
            for group, offset in (("billing", 200), ("search", 120)):
                output = {"topic_partitions": [{"topic": "orders", "partition": 0, "offset": offset}]}
                assert (await client.post(f"/v1/groups/{group}/commit", json=output)).status_code == 200

    async def _compact(self) -> None:
        services = LogServices(self.context)
        async with self.context.run_log("log").record("log compaction") as run:
            await services.scheduler.work(run)
        await services.meta.close()

    async def _queue(self) -> None:
        async with await self._client() as client:
            for number in range(12):
                entry = {"key": "aGVsbG8=", "value": "eyJvcmRlciI6IDF9" if number % 2 else _b64(HOSTILE.encode())}
                count = 1 if number == 1 else number + 1  # the second is rejected below: of several it would be split
                answer = await client.post("/v1/queues/orders/entries", json=[entry] * count)
                assert answer.status_code == 200, answer.text
        queue = Queue.of(self.context, "orders")
        collector = queue.collector("collector-1")
        for number in range(4):
            batch = await collector.next_batch()
            assert batch is not None
            if number == 0:
                await collector.ack(batch)
            if number == 1:
                trouble = await queue.consumer.reject(batch.claimed, f"schema is unknown: {HOSTILE[:30]}", last=True)
                await queue.dead_letters.bury(batch.claimed, trouble)

    async def _ticks(self) -> None:
        secret = await open_vault(self.context).issue(ORG, PROJECT)
        sent = {"x-api-key": ORG, "x-api-secret": secret}
        async with await self._client() as client:
            for number in range(5):
                tick = f"20261116T12{number:02d}00__{number:04x}"
                parts = {n: ticks_kit.parquet(range(n * 10, n * 10 + 10)) for n in (1, 2, 3)}
                base = f"/v1/projects/{PROJECT}/ticks/{tick}"
                for seq, data in parts.items():
                    headers = {**sent, "x-sha256": ticks_kit.sha(data)}
                    answer = await client.put(f"{base}/parts/{seq}", content=data, headers=headers)
                    assert answer.status_code in (200, 202), answer.text
                if number == 4:
                    continue  # still uploading
                output = ticks_kit.manifest(parts, dict.fromkeys(parts, 10), tick=tick, project=PROJECT)
                answer = await client.post(f"{base}/finalize", json=output, headers=sent)
                assert answer.status_code == 200, answer.text
                if number == 2:
                    await self.dispatch()

    async def dispatch(self) -> None:
        queue, rows = open_queue(self.context), open_audit(self.context, DISPATCHED)
        dispatcher = Dispatcher(self.context, queue=queue, dispatched=rows, job=FakeSilverJob(self.context))
        await dispatcher.round()

    async def _lifecycle(self) -> None:
        lifecycle, now_ns = state_of(self.context), time.time_ns()
        actions = {
            "a1b2c3d4/EXPIRATION_DAYS": ActionState("old-logs", bootstrap_complete=True, last_scan_ns=now_ns - DAY_NS,
                                                    next_scan_ns=now_ns + 6 * DAY_NS),
            "e5f6a7b8/NONCURRENT_DAYS": ActionState("old-versions", mode=Mode.SCAN_ONLY, degraded=Degraded.NONE,
                                                    last_scan_ns=now_ns - DAY_NS, next_scan_ns=now_ns + DAY_NS),
        }  # fmt: skip
        state = BucketLifecycle(actions=actions)
        await lifecycle.bucket("landing").change(lambda _: (state, None))
        async with self.context.run_log("lifecycle").record("lifecycle scan", "landing", {"bucket": "landing"}) as run:
            BucketScan("landing", 2400, 120, complete=True).report_to(run)
        async with self.context.run_log("tables").record("models", f"{ORG}/{PROJECT}", {"org": ORG}) as run:
            run.fail("daily: the column total is missing")
        await self._landing()
        streams = (
            Stream(StreamKind.ORIGINAL, 30 * DAY_NS, Position(now_ns - 30 * DAY_NS, 0)),
            Stream(StreamKind.BOOTSTRAP, bucket="landing", key=RETIRED),
        )
        blockers = {
            f"b{n}": Blocker(f"b{n}", streams[n], "landing", key, "object lock", "retention until 2027-01-01",
                             now_ns - 3600 * 10**9, now_ns, 30)
            for n, key in enumerate([HOSTILE_KEY, RETIRED])
        }  # fmt: skip
        await lifecycle.blockers.change(lambda _: (BlockerState(blockers=blockers), None))
        cursors = ReaderState(originals={str(30 * DAY_NS): Position(now_ns - 30 * DAY_NS - 95 * 10**9, 0)})
        await lifecycle.readers[0].change(lambda _: (cursors, None))
        rows = [
            LedgerRow(now_ns - n * 10**9, "run-1", "landing", key, "a1b2c3d4", ActionKind.EXPIRATION_DAYS, "DELETE",
                      ObjectIdentity(now_ns, 10), "ORIGINAL", rule_id="old-logs", due_at_ns=now_ns - DAY_NS,
                      outcome="DONE")
            for n, key in enumerate(["logs/2025/a.log", HOSTILE_KEY])
        ]  # fmt: skip
        await DeletionLedger(self.context).append(rows)

    async def _landing(self) -> None:
        """A bucket of its own with objects and rules in force: what a dry run and a retry really meet."""
        s3 = admin.client(self.stored.store_settings())
        with suppress(s3.exceptions.BucketAlreadyOwnedByYou):  # a slow server has made it, and was asked again
            await asyncio.to_thread(s3.create_bucket, Bucket="landing")
        for key, size in ((RETIRED, 700), ("tmp/a.csv", 1000), ("tmp/b.csv", 2000), ("kept/c.csv", 4000)):
            await asyncio.to_thread(s3.put_object, Bucket="landing", Key=key, Body=b"x" * size)
        retired = Rule("retired", prefix="reports/2025/", expiration_date_ns=1_767_225_600 * 10**9)
        async with open_services(self.context) as services:
            await services.lake.put("landing", render_xml((Rule("old-tmp", prefix="tmp/", expiration_days=7), retired)))

    async def _audit(self) -> None:
        """An audit that was completed: of 7,200 samples of two agents, 17 of one hour never reached bronze."""
        hours = [_hour("web-1", 11, 3600), _hour("web-1", 12, 2400), _hour("db-1", 12, 1200, bronze_lost=AUDIT_LOST)]
        whole = _hour("", 0, sum(one.sent for one in hours), bronze_lost=AUDIT_LOST)
        assert whole.bronze is not None and whole.rollup is not None
        kept = Conservation(
            checked=True, agents=2, hours=len(hours), rows=tuple(one for one in hours if one.wrong),
            stages={"sent": whole.sent, "accepted": whole.accepted, "bronze": whole.bronze, "rollup": whole.rollup,
                    "rollup_due": whole.rollup},
            lost=whole.lost, doubled=whole.doubled, changed=whole.changed,
        )  # fmt: skip
        now_ns = time.time_ns()
        orphan = AuditFinding("orphaned", "raw_blob", f"raw-blobs/v1/{HOSTILE_KEY}", size_bytes=2048, reason="nobody's")
        record = AuditRecord(
            AUDIT_SCHEMA, paths.audit_id(now_ns - 9 * 10**9, self.context.ids.token()), now_ns - 9 * 10**9, now_ns,
            "list", True, not kept.wrong, 412, 3_400_000, {"accepted": 100},
            (FindingTotal("orphaned", "raw_blob", 1, 2048, False),), (orphan,), 0,
            GarbageProof(now_ns - 60 * 10**9, "list", 100, 2, True), (), 0, kept,
        )  # fmt: skip
        async with self.context.run_log("audit").record("audit", "full", {"depth": "full"}) as run:
            await publish(self.context, record)
            run.lines.append(f"info finding {HOSTILE}")
            report_to(run, record)

    def _tables(self) -> None:
        from deltalake import write_deltalake

        from lakebed.pipeline.bronze.places import table_name
        from lakebed.spark.location import Location

        location = Location.of(self.context.settings.of(StoreSettings))
        rows = pa.table({
            "order_id": pa.array(range(40), pa.int64()), "city": ["Basel", "Bern", "Chur", "Zug"] * 10,
            "total": [n * 1.25 for n in range(40)], "note": ["", HOSTILE, "express", "gift"] * 10,
        })  # fmt: skip
        refused = pa.table({"reason": ["total_not_negative"] * 3, "row": [HOSTILE, '{"total": -1}', "{}"]})
        for layer, table, data in (("bronze", "orders", rows), ("silver", "orders", rows), ("gold", "by_city", rows),
                                   ("quarantine", "orders", refused)):  # fmt: skip
            uri = location.uri(f"tables/{table_name(layer, ORG, PROJECT, table)}")
            for _ in range(2):
                write_deltalake(uri, data, mode="append", storage_options=location.storage_options())


def _hour(agent: str, hour: int, samples: int, bronze_lost: int = 0) -> ConservationRow:
    """One agent's hour, through what makes the rows of every audit."""
    there = samples - bronze_lost
    found = dict.fromkeys(("gap", "overlap", "unreadable", "bronze_doubled", "bronze_changed", "rollup_lost",
                           "rollup_doubled", "rollup_changed", "waiting", "expired", "explained", "high",
                           "low"), 0)  # fmt: skip
    found |= {"sent": samples, "accepted": samples, "bronze": there, "rollup": there, "bronze_lost": bronze_lost}
    named = {"agent_id": agent, "hour": f"date=2026-11-16/hour={hour:02d}"}
    return conservation_row({**named, **found}, bronze=True, rollups=True)


def _order(number: int) -> str:
    return json.dumps({"order": number, "total": number * 1.5, "customer": {"id": number % 7, "city": "Basel"}})


def _known() -> set[str]:
    return {row["key"] for row in load(sections()).rows()}


def _b64(data: bytes) -> str:
    import base64

    return base64.b64encode(data).decode()


@contextmanager
def yard_on(weed: BucketEndpoints, folder: Path, **options: Any) -> Iterator[Yard]:
    """Started and seeded; stopped at the end."""
    test_env = Yard(weed, folder, **options)
    try:
        test_env.start()
        yield test_env
    finally:
        test_env.close()
