"""`/metrics`: the registry as JSON, OpenMetrics or Prometheus text, by the Accept header."""

from __future__ import annotations

from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST as OPENMETRICS
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from lakebed.core.auth import Principal
from lakebed.core.http import json_response, operation
from lakebed.core.metrics import Metrics, ShownSeries

RIGHT = "gateway:read:metrics"
# Labels that name a thing which may be a tenant's.
THINGS = frozenset({"queue", "bucket", "table", "project", "topic", "agent", "group"})
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
        shown = _shown(request)
        wanted = preferred(request.headers.get("accept", ""))
        if wanted == "json":
            return json_response(metrics.snapshot(shown))
        if wanted == "openmetrics":
            return Response(metrics.openmetrics(shown), media_type=OPENMETRICS)
        return Response(metrics.prometheus(shown), media_type=CONTENT_TYPE_LATEST)

    @operation(right=RIGHT)
    async def prometheus(request: Request) -> Response:
        """Metrics, always as Prometheus text."""
        return Response(metrics.prometheus(_shown(request)), media_type=CONTENT_TYPE_LATEST)

    return [Route("/metrics", negotiated), Route("/metrics/prometheus", prometheus)]


def _shown(request: Request) -> ShownSeries | None:
    """Which series the caller sees: all, or for a tenant those whose labels name a thing of the tenant."""
    principal: Principal = request.state.principal
    principal.demand_list(RIGHT)
    if not principal.tenant:
        return None
    return lambda labels: any(name in THINGS and principal.owns(value) for name, value in labels.items())


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
