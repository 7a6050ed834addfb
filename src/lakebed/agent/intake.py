"""What every source passes its samples through: the check that no collector will refuse, and the count of what failed.

A sample that would spoil its whole frame is stopped here, alone, with the place it came from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lakebed import logs
from lakebed.errors import Invalid
from lakebed.frame.model import LIMITS, Kind, Sample
from lakebed.metrics import Metrics

TIME_NS_MAX = 2**63 - 1
REPORTED_MAX = 5  # bad items told one by one in each report; the rest are counted


def checked(metric: str, time_ns: int, value: float, kind: Kind, labels: Mapping[str, str]) -> Sample:
    """The sample, or Invalid saying what no frame could carry. Labels with empty values are left out."""
    _name("metric", metric)
    if any(not value for value in labels.values()):
        labels = {name: value for name, value in labels.items() if value}
    if len(labels) > LIMITS.labels_per_series:
        raise Invalid(f"{len(labels)} labels are over the limit of {LIMITS.labels_per_series}")
    for name, text in labels.items():
        _name("label", name)
        if _size(text) > LIMITS.label_value_bytes:
            raise Invalid(f"the value of label {name!r} is longer than {LIMITS.label_value_bytes} bytes")
    if not 0 <= time_ns <= TIME_NS_MAX:
        raise Invalid(f"time {time_ns} ns is not between 1970 and 2262")
    return Sample(metric, time_ns, value, kind, labels)


class Complaints:
    """Bad items of one source: counted in a metric, the first few of each report logged with their place."""

    def __init__(self, source: str, metrics: Metrics) -> None:
        self._source, self._metrics, self._log = source, metrics, logs.logger("agent")

    def report(self, complaints: Iterable[tuple[int, str]], *, origin: str = "") -> int:
        """Takes (line or item number, what is wrong); returns how many there were."""
        found = list(complaints)
        if found:
            self._metrics.counter("lakebed_agent_bad_samples_total").labels(self._source).inc(len(found))
            first = [f"{place}: {why}" for place, why in found[:REPORTED_MAX]]
            self._log.warning("bad samples", source=self._source, origin=origin, count=len(found), first=first)
        return len(found)


def _name(what: str, name: str) -> None:
    if not 1 <= _size(name) <= LIMITS.name_bytes:
        raise Invalid(f"a {what} name must be 1 to {LIMITS.name_bytes} bytes: {name[:40]!r}")


def _size(text: str) -> int:
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise Invalid(f"text is not Unicode: {error.reason}") from error
