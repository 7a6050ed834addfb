"""What the first page shows: this process, its parts and what it asked of the store."""

from __future__ import annotations

import msgspec

from lakebed.gateway.health import Report
from lakebed.metrics import Metrics


class PartRow(msgspec.Struct, frozen=True):
    name: str
    status: str
    detail: str


class VerbRow(msgspec.Struct, frozen=True):
    verb: str
    requests: int


class Overview(msgspec.Struct, frozen=True):
    status: str
    node: str
    version: str
    authority: str
    started_at_ms: int
    parts: tuple[PartRow, ...]
    store_requests: tuple[VerbRow, ...]
    http_requests: int


def overview(report: Report, metrics: Metrics) -> Overview:
    """Pure: a health report and the registry in, one page's worth of facts out."""
    verbs: dict[str, int] = {}
    answered = 0
    for family in metrics.registry.collect():
        for sample in family.samples:
            if sample.name == "lakebed_store_requests_total":
                verbs[sample.labels["verb"]] = int(sample.value)
            elif sample.name == "lakebed_http_requests_total":
                answered += int(sample.value)
    return Overview(
        status=report.status,
        node=report.node,
        version=report.version,
        authority=report.authority,
        started_at_ms=report.started_at_ms,
        parts=tuple(PartRow(name, health.status, health.detail) for name, health in report.components.items()),
        store_requests=tuple(VerbRow(verb, count) for verb, count in sorted(verbs.items())),
        http_requests=answered,
    )
