"""Tracing on, with every ended span available."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import format_span_id, format_trace_id

from lakebed.core import traces


class Recorded:
    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def __call__(self) -> list[ReadableSpan]:
        """In the order in which they ended."""
        return list(self._exporter.get_finished_spans())


@contextmanager
def recording() -> Iterator[Recorded]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    traces.install(provider.get_tracer("test"))
    try:
        yield Recorded(exporter)
    finally:
        traces.install(None)
        provider.shutdown()


def trace_id(span: ReadableSpan) -> str:
    return format_trace_id(span.context.trace_id)


def span_id(span: ReadableSpan) -> str:
    return format_span_id(span.context.span_id)


def parent_id(span: ReadableSpan) -> str:
    """Empty for the first span of a trace."""
    return format_span_id(span.parent.span_id) if span.parent is not None else ""


def error(span: ReadableSpan) -> str:
    return span.status.description or ""
