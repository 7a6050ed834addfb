"""`lakebed batches query` and `metrics`: from the gateway of a running stack, or else from the bucket."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import httpx2
import msgspec
from cyclopts import Parameter

from lakebed.batches.metric_names import MetricNames, metric_names, unknown
from lakebed.batches.query import DAY_NS, time_ns
from lakebed.cli.output import Output, emit, say
from lakebed.cli.where import Where, in_loop
from lakebed.core.clock import SystemClock
from lakebed.core.errors import Invalid, NotFound

TIMEOUT_S = 60.0
Params = list[tuple[str, str | int | float | bool | None]]
Match = Annotated[list[str] | None, Parameter(help="label matcher such as host=web-1 or zone!~eu-.*; may be repeated")]
Since = Annotated[float, Parameter(help="how far back to look, in seconds")]
From = Annotated[str, Parameter(name="--from", help="start, such as 2026-01-31T12:00:00Z, instead of --since-s")]
To = Annotated[str, Parameter(help="end, such as 2026-01-31T13:00:00Z (default: now)")]


def query(
    metric: Annotated[str, Parameter(help="the metric's name")],
    /,
    *,
    match: Match = None,
    since_s: Since = 3600.0,
    from_: From = "",
    to: To = "",
    latest: Annotated[bool, Parameter(help="only the newest point of each series", negative="")] = False,
    window_s: Annotated[
        int, Parameter(help="return one row per window of this many seconds, from rollups and samples")
    ] = 0,
    q: Annotated[list[float] | None, Parameter(help="quantile such as 0.99, with --window-s; may be repeated")] = None,
    where: Where = Where(),
    output: Output = "table",
) -> None:
    """Query points or windows of a metric.

    A running stack's gateway answers, completely; without one the bucket is read. Exits 4 for an unknown metric.
    """
    if q and not window_s:
        raise Invalid("quantiles need windows", hint="add --window-s SECONDS")
    if latest and (window_s or from_ or to):
        raise Invalid("--latest looks back from now, for one point", hint="limit how far with --since-s SECONDS")
    start_ns, end_ns = _range(since_s, from_, to)
    params: Params = [("metric", metric), *(("match", text) for text in match or ())]
    if latest:
        path, params = "/v1/query/latest", [*params, ("lookback_s", str(since_s))]
    else:
        path, params = "/v1/query/range", [*params, ("from", str(start_ns)), ("to", str(end_ns))]
    if window_s:
        params += [("window_s", str(window_s)), *(("q", str(each)) for each in q or ())]
    answer = _from_gateway(where, path, params)
    if answer is None:
        answer = in_loop(
            lambda: _from_bucket(where, metric, match or [], since_s, (start_ns, end_ns), latest, window_s, q)
        )
    # A metric that had samples within a day is known, though it may have none in a shorter range.
    if not answer["series"] and (error := unknown(metric, _names(where, min(start_ns, end_ns - DAY_NS), end_ns))):
        raise error
    _explain(answer)
    emit(list(_rows(answer)) if output == "table" else answer, output)


def metrics(
    *, since_s: Since = 86400.0, from_: From = "", to: To = "", where: Where = Where(), output: Output = "table"
) -> None:
    """List the metrics with samples in a range: name, number of series, and names of labels."""
    found = _names(where, *_range(since_s, from_, to))
    if found.partial:
        say(f"may be incomplete: {'; '.join(found.why_partial)}")
    rows = [{"metric": each.metric, "series": each.series, "labels": ", ".join(each.labels)} for each in found.metrics]
    emit(rows if output == "table" else found, output)


def _range(since_s: float, start: str, end: str) -> tuple[int, int]:
    end_ns = time_ns(end, "--to") if end else SystemClock().now_ns()
    return (time_ns(start, "--from") if start else max(0, end_ns - round(since_s * 1e9))), end_ns


def _names(where: Where, start_ns: int, end_ns: int) -> MetricNames:
    answer = _from_gateway(where, "/v1/query/metrics", [("from", str(start_ns)), ("to", str(end_ns))])
    if answer is not None:
        return msgspec.convert(answer, MetricNames)

    async def read() -> MetricNames:
        context, sources, _ = _sources(where)
        return await metric_names(sources, start_ns, end_ns, context.clock.now_ns())

    return in_loop(read)


def _from_gateway(where: Where, path: str, params: Params) -> Any:
    """The answer of the running stack's gateway; None when none runs, or when it wants a key."""
    from lakebed.embedded.endpoints import find

    try:
        url = find(where.folder).gateway
        answer = httpx2.get(f"{url}{path}", params=params, timeout=TIMEOUT_S, trust_env=False)
    except (NotFound, httpx2.HTTPError):
        return None
    if answer.status_code == 400:
        problem = answer.json()
        raise Invalid(str(problem.get("message", "")), hint=str(problem.get("hint", "")))
    return answer.json() if answer.status_code == 200 else None


def _sources(where: Where) -> Any:
    from lakebed.batches.settings import BatchesSettings
    from lakebed.batches.sources import SampleSources

    context = where.context("query")
    settings = context.settings.of(BatchesSettings)
    return context, SampleSources.of_bucket(context, batches_max=settings.query_batches_max), settings


async def _from_bucket(
    where: Where,
    metric: str,
    match: Sequence[str],
    since_s: float,
    between_ns: tuple[int, int],
    latest: bool,
    window_s: int,
    q: list[float] | None,
) -> Any:
    from lakebed.batches.matchers import Selector, parse
    from lakebed.batches.query import Querier
    from lakebed.batches.window_query import RollupQuerier

    context, sources, settings = _sources(where)
    selector = Selector(metric, [parse(text) for text in match])
    querier = Querier(sources, points_max=settings.query_points_max, clock=context.clock)
    answer: Any
    if window_s:
        answer = await RollupQuerier(context, sources).range(selector, window_s, *between_ns, q or ())
    elif latest:
        answer = await querier.latest(selector, lookback_s=since_s)
    else:
        answer = await querier.range(selector, *between_ns)
    return msgspec.to_builtins(answer)


def _explain(answer: Any) -> None:
    """What the numbers were read from, and what may be missing, for a person."""
    if "resolution_s" in answer:
        resolution = f"rollups of {answer['resolution_s']} s" if answer["resolution_s"] else "samples alone"
        read = ", ".join(f"{n} {name}" for name, n in answer["sources"].items() if n)
        say(f"from {resolution}: {read or 'nothing'}")
    if answer["partial"]:
        say(f"may be incomplete: {'; '.join(answer['why_partial'])}")


def _rows(answer: Any) -> Iterator[dict[str, Any]]:
    for series in answer["series"]:
        labels = ", ".join(f"{name}={value}" for name, value in series["labels"].items())
        for at_ns, value in series.get("points", ()):
            yield {"time": _iso(at_ns), "value": value, "labels": labels}
        for start_ns, count, total, low, high, _, last, _, quantiles in series.get("buckets", ()):
            row = {"time": _iso(start_ns), "count": count, "sum": total, "min": low, "max": high, "last": last}
            yield (
                row
                | {f"q{q:g}": each for q, each in zip(answer["quantiles"], quantiles, strict=True)}
                | {"labels": labels}
            )


def _iso(at_ns: int) -> str:
    return f"{datetime.fromtimestamp(at_ns / 1e9, UTC):%Y-%m-%dT%H:%M:%S.%f}"[:-3] + "Z"
