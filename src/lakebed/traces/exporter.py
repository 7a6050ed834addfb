"""Sends spans to a receiver from a thread of its own, so that no request ever waits for it.

What does not fit into the queue is dropped and counted; a receiver that is away costs spans, never work.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

from lakebed.metrics import Metrics
from lakebed.traces.model import Span, Value
from lakebed.traces.otlp import encode

QUEUE_MAX = 4096
BATCH_MAX = 512
EVERY_S = 1.0


class Exporter:
    """`put` may be called from anywhere. `close` sends what waits, within the timeout of one request, and ends."""

    def __init__(
        self,
        url: str,
        *,
        resource: Mapping[str, Value],
        headers: Mapping[str, str],
        timeout_s: float,
        metrics: Metrics,
        queue_max: int = QUEUE_MAX,
    ) -> None:
        self._url, self._resource, self._timeout_s = urlsplit(url), dict(resource), timeout_s
        self._headers = {**headers, "content-type": "application/json"}
        self._queue: deque[Span] = deque()
        self._queue_max = queue_max
        spans = metrics.counter("lakebed_trace_spans_total")
        self._sent, self._dropped, self._failed = (spans.labels(outcome=o) for o in ("sent", "dropped", "failed"))
        self._wake, self._closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def put(self, span: Span) -> None:
        """Never waits: a full queue drops the span."""
        if len(self._queue) >= self._queue_max:
            self._dropped.inc()
            return
        self._queue.append(span)
        if len(self._queue) >= BATCH_MAX:
            self._wake.set()

    def close(self) -> None:
        self._closing.set()
        self._wake.set()
        self._thread.join(self._timeout_s + EVERY_S)

    def _run(self) -> None:
        while True:
            self._wake.wait(EVERY_S)
            self._wake.clear()
            closing = self._closing.is_set()
            while self._queue:
                if not self._send() and closing:
                    return  # the receiver is away: an exit does not wait for it
            if closing:
                return

    def _send(self) -> bool:
        batch = [self._queue.popleft() for _ in range(min(BATCH_MAX, len(self._queue)))]
        ok = self._post(encode(batch, self._resource))
        (self._sent if ok else self._failed).inc(len(batch))
        return ok

    def _post(self, body: bytes) -> bool:
        kind = HTTPSConnection if self._url.scheme == "https" else HTTPConnection
        connection = kind(self._url.hostname or "", self._url.port, timeout=self._timeout_s)
        try:
            connection.request("POST", self._url.path or "/", body=body, headers=self._headers)
            response = connection.getresponse()
            response.read(64 * 1024)
            return response.status < 300
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()
