"""`/metrics`: the registry as JSON, OpenMetrics or Prometheus text, by the Accept header."""

from __future__ import annotations

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakebed.core.http import json_response, operation
from lakebed.core.metrics import Metrics

RIGHT = "gateway:read:metrics"
FORMS = {
    "application/json": "json",
    "application/openmetrics-text": "openmetrics",
    "text/plain": "prometheus",
    "text/*": "prometheus",
    "*/*": "prometheus",
}


def routes(metrics: Metrics) -> list[BaseRoute]:
    @operation(right=RIGHT)
    async def negotiated(request: Request) -> Response:
        """Metrics: JSON, OpenMetrics or Prometheus text, by Accept."""
        request.state.principal.demand(RIGHT)
        wanted = preferred(request.headers.get("accept", ""))
        if wanted == "json":
            return json_response(metrics.snapshot())
        if wanted == "openmetrics":
            return Response(metrics.openmetrics(), media_type=OPENMETRICS)
        return Response(metrics.prometheus(), media_type=CONTENT_TYPE_LATEST)

    @operation(right=RIGHT)
    async def prometheus(request: Request) -> Response:
        """Metrics, always as Prometheus text."""
        request.state.principal.demand(RIGHT)
        return Response(metrics.prometheus(), media_type=CONTENT_TYPE_LATEST)

    return [Route("/metrics", negotiated), Route("/metrics/prometheus", prometheus)]


def preferred(accept: str) -> str:
    """`json`, `openmetrics` or `prometheus`: the highest weight wins, the order decides among equals."""
    best, best_weight = "prometheus", 0.0
    for item in accept.split(","):
        kind, _, parameters = item.strip().partition(";")
        form = FORMS.get(kind.strip().lower())
        weight = _weight(parameters)
        if form is not None and weight > best_weight:
            best, best_weight = form, weight
    return best


def _weight(parameters: str) -> float:
    for parameter in parameters.split(";"):
        name, _, value = parameter.strip().partition("=")
        if name == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
