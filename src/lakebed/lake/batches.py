"""Samples: sent as batches that are accepted once, and queried."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

import msgspec

from lakebed.batches.codec.frame import columns_of, encode
from lakebed.batches.model import BatchIdentity, Kind, Sample
from lakebed.core.errors import Invalid
from lakebed.core.runtime import Runtime
from lakebed.lake.client import LakeClient
from lakebed.lake.notebook import HTML_ROWS, html_of

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class SeriesPoints(msgspec.Struct, frozen=True):
    """One series of a response: its labels and its points as (time in ns, value), null for NaN."""

    labels: dict[str, str]
    kind: str
    points: list[tuple[int, float | None]]


class SampleResponse(msgspec.Struct, frozen=True):
    """`partial`: something may be missing; `why_partial` says what."""

    metric: str
    partial: bool
    why_partial: list[str]
    series: list[SeriesPoints]

    def rows(self) -> list[dict[str, Any]]:
        """One row a point: time_ns, value, metric and the labels."""
        return [
            {"time_ns": at, "value": math.nan if value is None else value, "metric": self.metric, **each.labels}
            for each in self.series
            for at, value in each.points
        ]

    def _repr_html_(self) -> str:
        """The first points, for a notebook."""
        caption = self.metric + (f" (may be incomplete: {'; '.join(self.why_partial)})" if self.partial else "")
        return html_of(self.rows()[:HTML_ROWS], caption=caption)

    def to_pandas(self) -> Any:
        import pandas

        frame = pandas.DataFrame(self.rows())
        return frame.assign(time=pandas.to_datetime(frame["time_ns"], utc=True)) if len(frame) else frame


class AsyncBatches:
    """Samples of one sender: this process, under a boot id of its own."""

    def __init__(self, client: LakeClient, runtime: Runtime, agent_id: str) -> None:
        self._client, self._clock = client, runtime.clock
        self._agent_id, self._boot_id, self._sequence = agent_id, f"boot-{runtime.ids.token()}", 0

    async def send(self, samples: Iterable[Sample | Mapping[str, Any]]) -> int:
        """Sends samples as one batch; returns their number when the batch is accepted, once however often it is sent.

        A sample is a mapping with `metric` and `value`, and optionally `labels`, `time_ns` and `kind`.
        """
        listed = [self._sample(each) for each in samples]
        if not listed:
            return 0
        first = self._sequence
        self._sequence += len(listed)  # a batch that fails keeps its numbers: they are never used for other samples
        identity = BatchIdentity(self._agent_id, self._boot_id, first, first + len(listed) - 1)
        await self._client.call("POST", "/v1/batches", content=encode(identity, columns_of(listed)))
        return len(listed)

    async def query(
        self,
        metric: str,
        *,
        match: Mapping[str, str] | None = None,
        last: str = "1h",
        start: datetime | None = None,
        end: datetime | None = None,
    ) -> SampleResponse:
        """Points of a metric's series: of the last `1h` (`30s`, `15m`, `7d`), or between two times."""
        now_ns = self._clock.now_ns()
        to_ns = _ns(end) if end else now_ns
        from_ns = _ns(start) if start else to_ns - seconds_of(last) * 1_000_000_000
        params = [*_selector(metric, match or {}), ("from", str(from_ns)), ("to", str(to_ns))]
        answer = await self._client.call("GET", "/v1/query/range", params=params)
        return msgspec.json.decode(answer.content, type=SampleResponse)

    async def latest(self, metric: str, *, match: Mapping[str, str] | None = None) -> SampleResponse:
        """The newest value of each series."""
        answer = await self._client.call("GET", "/v1/query/latest", params=_selector(metric, match or {}))
        return msgspec.json.decode(answer.content, type=SampleResponse)

    def _sample(self, given: Sample | Mapping[str, Any]) -> Sample:
        if isinstance(given, Sample):
            return given
        try:
            return Sample(
                metric=str(given["metric"]),
                time_ns=int(given.get("time_ns") or self._clock.now_ns()),
                value=float(given["value"]),
                kind=Kind[str(given.get("kind", "gauge")).upper()],
                labels={str(name): str(value) for name, value in (given.get("labels") or {}).items()},
            )
        except (KeyError, TypeError, ValueError) as error:
            raise Invalid(f"not a sample: {given!r} ({error})", hint='{"metric": "cpu", "value": 0.5}') from error


def seconds_of(text: str) -> int:
    """`15m` as seconds. Raises Invalid."""
    number, unit = text[:-1], text[-1:]
    if not (number.isascii() and number.isdigit()) or unit not in UNITS_S:
        raise Invalid(f"{text!r} is not a duration", hint="such as 30s, 15m, 1h or 7d")
    return int(number) * UNITS_S[unit]


def _ns(moment: datetime) -> int:
    if moment.tzinfo is None:
        raise Invalid(f"{moment} has no time zone", hint="datetime(…, tzinfo=timezone.utc)")
    return round(moment.timestamp() * 1_000_000) * 1000


def _selector(metric: str, match: Mapping[str, str]) -> list[tuple[str, str]]:
    """`match` holds values, or matchers as `{"host": "=~web-.*"}`."""
    return [("metric", metric), *(("match", f"{name}{_matcher(value)}") for name, value in match.items())]


def _matcher(value: str) -> str:
    return value if value.startswith(("=~", "!~", "!=")) else f"={value}"
