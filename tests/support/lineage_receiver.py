"""A small OpenLineage receiver on loopback, and what the specification (2-0-2) requires of an event."""

from __future__ import annotations

import json
import re
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MOMENT = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)")
KINDS = ("START", "RUNNING", "COMPLETE", "ABORT", "FAIL", "OTHER")


class Receiver:
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.requests: list[tuple[str, str]] = []  # path, authorization
        self.status = 201
        self.url = ""

    def told(self) -> list[tuple[str, str]]:
        return [(event["eventType"], event["job"]["name"]) for event in self.events]


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            receiver.requests.append((self.path, self.headers.get("authorization", "")))
            if receiver.status < 300:
                receiver.events.append(json.loads(body))
            self.send_response(receiver.status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()


def check(event: dict[str, Any]) -> None:
    """Fails unless the event has every field that the specification requires, in its form."""
    assert {"eventTime", "producer", "schemaURL", "run", "job"} <= event.keys()
    assert event["eventType"] in KINDS
    assert MOMENT.fullmatch(event["eventTime"]), event["eventTime"]
    assert event["schemaURL"] == "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent"
    assert re.match(r"[a-z][a-z0-9+.-]*:\S+", event["producer"])
    assert str(uuid.UUID(event["run"]["runId"])) == event["run"]["runId"]
    assert event["job"]["namespace"] and event["job"]["name"]
    for dataset in (*event.get("inputs", ()), *event.get("outputs", ())):
        assert dataset["namespace"].startswith("s3://") and dataset["name"]
    for facet in _facets(event):
        assert {"_producer", "_schemaURL"} <= facet.keys(), facet
    if event["eventType"] == "FAIL":
        told = event["run"]["facets"]["errorMessage"]
        assert told["message"] and told["programmingLanguage"]


def _facets(found: Any) -> Iterator[dict[str, Any]]:
    if isinstance(found, dict):
        for name, value in found.items():
            if name in ("facets", "inputFacets", "outputFacets"):
                yield from value.values()
            yield from _facets(value)
    elif isinstance(found, list):
        for each in found:
            yield from _facets(each)
