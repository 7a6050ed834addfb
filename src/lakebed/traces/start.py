"""Turns tracing on for a process, by OpenTelemetry's standard environment variables. Nothing set: nothing is on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import unquote, urlsplit

from lakebed import __version__
from lakebed.clock import Clock
from lakebed.errors import Invalid
from lakebed.ids import Ids
from lakebed.metrics import Metrics
from lakebed.traces.exporter import Exporter
from lakebed.traces.model import Value
from lakebed.traces.tracer import Tracer, install

TIMEOUT_S = 10.0


@contextmanager
def tracing(
    role: str, node: str, env: Mapping[str, str], *, clock: Clock, ids: Ids, metrics: Metrics
) -> Iterator[None]:
    """On while inside, when a receiver is named; what waits is sent at the end. Raises Invalid for a wrong variable."""
    url = endpoint(env)
    if not url:
        yield
        return
    resource: dict[str, Value] = {
        "service.name": env.get("OTEL_SERVICE_NAME") or f"lakebed-{role}",
        "service.version": __version__,
        "service.instance.id": node,
        **pairs(env.get("OTEL_RESOURCE_ATTRIBUTES", "")),
    }
    headers = pairs(env.get("OTEL_EXPORTER_OTLP_TRACES_HEADERS") or env.get("OTEL_EXPORTER_OTLP_HEADERS", ""))
    exporter = Exporter(url, resource=resource, headers=headers, timeout_s=_timeout_s(env), metrics=metrics)
    install(Tracer(exporter.put, clock=clock, ids=ids, ratio=ratio(env)))
    try:
        yield
    finally:
        install(None)
        exporter.close()


def endpoint(env: Mapping[str, str]) -> str:
    """The address spans are sent to, or nothing. The traces' own variable is used as it is."""
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true" or env.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return ""
    own, general = env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", ""), env.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")
    url = own or (f"{general.rstrip('/')}/v1/traces" if general else "")
    if url and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
        name = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" if own else "OTEL_EXPORTER_OTLP_ENDPOINT"
        raise Invalid(f"{name}={url} is not an http address", hint="OTLP over HTTP listens on port 4318 by default")
    return url


def ratio(env: Mapping[str, str]) -> float:
    """The share of traces that is recorded, by OTEL_TRACES_SAMPLER and its argument."""
    sampler = env.get("OTEL_TRACES_SAMPLER", "parentbased_always_on").removeprefix("parentbased_")
    if sampler in ("always_on", "always_off"):
        return float(sampler == "always_on")
    try:
        share = float(env.get("OTEL_TRACES_SAMPLER_ARG", "1"))
    except ValueError:
        share = -1.0
    if sampler != "traceidratio" or not 0.0 <= share <= 1.0:
        raise Invalid(
            f"OTEL_TRACES_SAMPLER={sampler} with argument {env.get('OTEL_TRACES_SAMPLER_ARG', '')!r} is not known",
            hint="traceidratio with an OTEL_TRACES_SAMPLER_ARG from 0 to 1, always_on or always_off",
        )
    return share


def pairs(text: str) -> dict[str, str]:
    """`a=1,b=2`, percent-encoded, as the standard writes lists."""
    found = (pair.partition("=") for pair in text.split(",") if "=" in pair)
    return {key.strip(): unquote(value.strip()) for key, _, value in found}


def _timeout_s(env: Mapping[str, str]) -> float:
    told = env.get("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT") or env.get("OTEL_EXPORTER_OTLP_TIMEOUT", "")
    try:
        return float(told) / 1000 if told else TIMEOUT_S
    except ValueError:
        raise Invalid(f"OTEL_EXPORTER_OTLP_TIMEOUT={told} is not a number of milliseconds") from None
