"""Sends spans by OTLP over HTTP, with OpenTelemetry's SDK. Needs the extra `traces`.

The SDK sends from a thread of its own, so that no request waits for the receiver. What does not fit into the queue is
dropped and counted. A receiver that is away costs spans: an exit waits for it for at most `FLUSH_S`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from lakebed import __version__
from lakebed.core.logs import logger
from lakebed.core.metrics import Metrics

BATCH_MAX = 512
FLUSH_S = 3.0
ABORT_S = 1.0

log = logger("traces")


class TraceSender:
    """Ended spans of `tracer` go to `url`. `close` sends what waits, within `flush_s`, and ends."""

    def __init__(
        self, url: str, role: str, node: str, *, timeout_s: float, queue_max: int, every_ms: int, metrics: Metrics
    ) -> None:
        # The exporter logs each attempt, in a format of its own; `CountedExporter` logs when it begins to fail.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        # The timeout is passed because the SDK would read the standard's milliseconds as seconds.
        self._exporter = CountedExporter(OTLPSpanExporter(url, timeout=timeout_s), url, queue_max, metrics)
        self._provider = TracerProvider(resource=_resource(role, node), shutdown_on_exit=False)
        self._provider.add_span_processor(BoundedProcessor(self._exporter, queue_max, every_ms))
        self.tracer = self._provider.get_tracer("lakebed", __version__)

    def close(self, flush_s: float = FLUSH_S) -> None:
        flush = threading.Thread(target=self._provider.shutdown, name="traces-flush", daemon=True)
        flush.start()
        flush.join(flush_s)
        self._exporter.shutdown()  # ends what it repeats
        flush.join(ABORT_S)


class CountedExporter(SpanExporter):
    """Counts what becomes of spans, and which of them still wait."""

    def __init__(self, inner: SpanExporter, url: str, queue_max: int, metrics: Metrics) -> None:
        self._inner, self._url, self._queue_max = inner, url, queue_max
        self._lock = threading.Lock()
        self._waiting = 0
        self._stopped = self._failing = False
        spans = metrics.counter("lakebed_trace_spans_total")
        self._sent, self._dropped, self._failed = (spans.labels(outcome=o) for o in ("sent", "dropped", "failed"))

    def admit(self) -> bool:
        """Whether the queue has room for one more span."""
        with self._lock:
            if self._waiting < self._queue_max:
                self._waiting += 1
                return True
        self._dropped.inc()
        return False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self._lock:
            self._waiting -= len(spans)
        result = SpanExportResult.FAILURE if self._stopped else self._inner.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        (self._failed if failed else self._sent).inc(len(spans))
        if failed and not self._failing:
            log.warning("traces cannot be sent", url=self._url, spans=len(spans), error=result.name)
        self._failing = failed
        return result

    def shutdown(self) -> None:
        if not self._stopped:
            self._stopped = True
            self._inner.shutdown()


class BoundedProcessor(BatchSpanProcessor):
    """Drops the newest span of a full queue, where the SDK drops the oldest without a count."""

    def __init__(self, exporter: CountedExporter, queue_max: int, every_ms: int) -> None:
        super().__init__(exporter, queue_max, every_ms, min(BATCH_MAX, queue_max))
        self._admit = exporter.admit

    def on_end(self, span: ReadableSpan) -> None:
        if span.context.trace_flags.sampled and self._admit():
            super().on_end(span)


def _resource(role: str, node: str) -> Resource:
    ours = {"service.name": f"lakebed-{role}", "service.version": __version__, "service.instance.id": node}
    return Resource.create({**ours, **OTELResourceDetector().detect().attributes})
