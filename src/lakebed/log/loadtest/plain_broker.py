"""The baseline of `lakebed bench log`: a plain broker with one thread per request and JSON.

It does what the log's broker does for a produce: decode, coalesce by size and delay in one flusher thread, one shared
blob in the bucket, one commit per partition in SQLite, index, clear. Nothing in it is tuned, nothing is slowed down.

    python -m lakebed.log.loadtest.plain_broker META_FILE BATCH_BYTES DELAY_MS
"""

from __future__ import annotations

import base64
import json
import os
import sqlite3
import struct
import sys
import threading
import time
import uuid
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from lakebed.core.settings import load
from lakebed.store.settings import StoreSettings
from lakebed.wiring.parts import sections


class PlainBroker:
    def __init__(self, meta: Path, batch_bytes: int, delay_s: float) -> None:
        store = load(sections(), env=os.environ).of(StoreSettings)
        self._bucket = store.url.removeprefix("s3://")
        self._s3 = boto3.client(
            "s3",
            endpoint_url=store.endpoint or None,
            region_name=store.region,
            aws_access_key_id=store.access_key_id.reveal() or None,
            aws_secret_access_key=store.secret_access_key.reveal() or None,
            config=Config(request_checksum_calculation="when_required", s3={"addressing_style": "path"}),
        )
        self._sql = sqlite3.connect(meta, check_same_thread=False, isolation_level=None)
        self._sql.execute("PRAGMA journal_mode = WAL")
        self._sql.execute("PRAGMA synchronous = full")
        self._sql.execute("CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID")
        self._batch_bytes, self._delay_s = batch_bytes, delay_s
        self._lock = threading.Condition()
        self._groups: dict[tuple[str, int], list[tuple[list[bytes], Future[Any]]]] = {}
        self._size, self._first_at = 0, 0.0
        threading.Thread(target=self._flush_for_ever, daemon=True).start()

    def produce(self, request: dict[str, Any]) -> list[dict[str, Any]]:
        waiting = []
        with self._lock:
            for part in request["topic_partitions"]:
                records = [r.encode() if isinstance(r, str) else base64.b64decode(r["base64"]) for r in part["records"]]
                done: Future[Any] = Future()
                self._groups.setdefault((part["topic"], part["partition"]), []).append((records, done))
                self._first_at = self._first_at or time.monotonic()
                self._size += sum(map(len, records))
                waiting.append(done)
            self._lock.notify()
        return [done.result() for done in waiting]

    def _flush_for_ever(self) -> None:
        while True:
            with self._lock:
                while not self._groups or (
                    self._size < self._batch_bytes and time.monotonic() < self._first_at + self._delay_s
                ):
                    self._lock.wait(self._delay_s if self._groups else None)
                groups, self._groups, self._size, self._first_at = self._groups, {}, 0, 0.0
            self._append_shared(groups)

    def _append_shared(self, groups: dict[tuple[str, int], list[tuple[list[bytes], Future[Any]]]]) -> None:
        bodies: list[bytes] = []
        headers: list[dict[str, Any]] = []
        at = 0
        for (topic, partition), chunks in groups.items():
            records = [record for some, _ in chunks for record in some]
            body = b"".join(struct.pack(">I", len(record)) + record for record in records)
            headers.append(
                {
                    "topic": topic,
                    "partition": partition,
                    "msg_count": len(records),
                    "encoding": "bytes-batch-v1",
                    "body_offset": at,
                    "body_length": len(body),
                }
            )
            at += len(body)
            bodies.append(body)
        header = json.dumps({"version": 1, "created_at_ms": 0, "partitions": headers}).encode()
        key = f"llog-plain/wal-shared/{uuid.uuid4()}"
        blob = struct.pack(">4sI", b"LLS1", len(header)) + header + b"".join(bodies)
        self._s3.put_object(Bucket=self._bucket, Key=key, Body=blob)
        for ((topic, partition), chunks), place in zip(groups.items(), headers, strict=True):
            self._commit(topic, partition, chunks, place, key)

    def _commit(self, topic: str, partition: int, chunks: list[Any], place: dict[str, Any], key: str) -> None:
        folder = f"llog/{topic}/partitions/{partition}"
        found = self._sql.execute("SELECT value FROM entries WHERE key = ?", (f"{folder}/meta/control",)).fetchone()
        control: dict[str, Any] = {"log_state": "OPEN", "sequence_counter": 0, "pending": None}
        if found:
            control = json.loads(found[0])
        start = control["sequence_counter"] + 1
        end = control["sequence_counter"] = control["sequence_counter"] + place["msg_count"]
        control["pending"] = {"append_id": str(uuid.uuid4()), "data_key": key, **place}
        self._put(f"{folder}/meta/control", control)
        self._put(f"{folder}/index/{end:020d}", {"type": "WAL", "data_key": key, **place})
        control["pending"] = None
        self._put(f"{folder}/meta/control", control)
        for records, done in chunks:
            done.set_result({"topic": topic, "partition": partition, "ok": True, "start_offset": start})
            start += len(records)

    def _put(self, key: str, value: dict[str, Any]) -> None:
        self._sql.execute("INSERT OR REPLACE INTO entries VALUES (?, ?)", (key, json.dumps(value)))


def main() -> None:
    meta, batch_bytes, delay_ms = sys.argv[1:]
    broker = PlainBroker(Path(meta), int(batch_bytes), float(delay_ms) / 1000)

    class Requests(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({"status": "ok"})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._answer({"results": broker.produce(json.loads(body))})

        def _answer(self, value: dict[str, Any]) -> None:
            body = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Silent."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 256  # the default of 5 would refuse connections, not slow them

    server = Server(("127.0.0.1", 0), Requests)
    server.daemon_threads = True
    print(json.dumps({"url": f"http://127.0.0.1:{server.server_port}"}), flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
