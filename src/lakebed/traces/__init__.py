"""Traces by OTLP, when the standard environment variable names a receiver; nothing at all otherwise.

with span("store get", key=key): …          # a shared, empty context manager while tracing is off
@traced("lifecycle tick")                   # the same around a function, async or not
"""

from lakebed.traces.tracer import Tracer, install, installed, outgoing, span, traced

__all__ = ["Tracer", "install", "installed", "outgoing", "span", "traced"]
