"""Turns tracing on for a process, by OpenTelemetry's standard environment variables. Nothing set: nothing is on.

What is read here is checked before anything starts; the SDK reads the other variables itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit

from lakebed.core.errors import Invalid
from lakebed.core.metrics import Metrics
from lakebed.core.traces import install

TIMEOUT_MS = 10_000
QUEUE_MAX = 4096  # spans
EVERY_MS = 1000

GENERAL, OWN = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
SAMPLERS = ("always_on", "always_off", "traceidratio")


@contextmanager
def tracing(role: str, node: str, *, metrics: Metrics) -> Iterator[None]:
    """On while inside, when a receiver is named; what waits is sent at the end.

    Raises Invalid for a wrong variable, and when a receiver is named but the extra `traces` is not installed.
    """
    env = os.environ
    url = endpoint(env)
    if not url:
        yield
        return
    check_sampler(env)
    timeout = "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT" if "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT" in env else ""
    timeout_ms = positive(env, timeout or "OTEL_EXPORTER_OTLP_TIMEOUT", TIMEOUT_MS)
    queue_max = positive(env, "OTEL_BSP_MAX_QUEUE_SIZE", QUEUE_MAX)
    every_ms = positive(env, "OTEL_BSP_SCHEDULE_DELAY", EVERY_MS)
    try:
        from lakebed.core.traces.export import TraceSender
    except ImportError as error:
        name = OWN if env.get(OWN) else GENERAL
        raise Invalid(
            f"{name} is set, but the packages that send traces are not installed: {error}",
            hint=f"pip install 'lakebed[traces]', or unset {name}",
        ) from error
    sending = TraceSender(
        url, role, node, timeout_s=timeout_ms / 1000, queue_max=queue_max, every_ms=every_ms, metrics=metrics
    )
    install(sending.tracer)
    try:
        yield
    finally:
        install(None)
        sending.close()


def endpoint(env: Mapping[str, str]) -> str:
    """The address spans are sent to, or nothing. The traces' own variable is used as it is."""
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true" or env.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return ""
    own, general = env.get(OWN, ""), env.get(GENERAL, "")
    url = own or (f"{general.rstrip('/')}/v1/traces" if general else "")
    if url and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
        raise Invalid(
            f"{OWN if own else GENERAL}={url} is not an http address",
            hint="OTLP over HTTP listens on port 4318 by default",
        )
    return url


def check_sampler(env: Mapping[str, str]) -> None:
    """Raises Invalid where the SDK would only log a line and record every trace."""
    sampler, argument = env.get("OTEL_TRACES_SAMPLER") or SAMPLERS[0], env.get("OTEL_TRACES_SAMPLER_ARG") or "1"
    plain = sampler.lower().removeprefix("parentbased_")
    try:
        known = plain in SAMPLERS and (plain != "traceidratio" or 0.0 <= float(argument) <= 1.0)
    except ValueError:
        known = False
    if not known:
        raise Invalid(
            f"OTEL_TRACES_SAMPLER={sampler} with OTEL_TRACES_SAMPLER_ARG={argument} is not known",
            hint="traceidratio with an OTEL_TRACES_SAMPLER_ARG from 0 to 1, always_on or always_off",
        )


def positive(env: Mapping[str, str], name: str, default: int) -> int:
    value = env.get(name) or str(default)
    if not value.isdecimal() or int(value) == 0:
        raise Invalid(f"{name}={value} is not a whole number above 0")
    return int(value)
