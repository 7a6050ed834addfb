"""Which series a query means: a metric's name and label matchers, `name=value`, `name!=value`, `name=~re`, `name!~re`.

The sender's identity is the label `agent_id` of every series: a sample's own label of that name never replaces it.
Patterns match whole values, in time linear in their length (RE2, through Arrow), and are tried once per distinct value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from lakebed.batches.model import SampleColumns
from lakebed.core.errors import Invalid

MATCHERS_MAX = 32
PATTERN_CHARS_MAX = 1000
VERDICTS_MAX = 100_000  # distinct label values remembered by one query

AGENT_LABEL = "agent_id"  # reserved: it always holds the sender's identity
EXPORTED = "exported_"  # Prometheus's prefix for a sample's own label whose name is reserved

_FORM = re.compile(r"([^=!~]+)(=~|!~|!=|=)(.*)", re.DOTALL)


class Matcher(msgspec.Struct, frozen=True):
    label: str
    op: Literal["=", "!=", "=~", "!~"]
    value: str


class Selector:
    """A metric and matchers. A label that is absent counts as empty."""

    def __init__(self, metric: str, matchers: Sequence[Matcher] = ()) -> None:
        if not metric:
            raise Invalid("a query needs a metric", hint="add metric=NAME")
        if len(matchers) > MATCHERS_MAX:
            raise Invalid(f"{len(matchers)} matchers, over the limit of {MATCHERS_MAX}")
        self.metric = metric
        self._plain = [m for m in matchers if m.op in ("=", "!=")]
        self._patterns = [(m, _Pattern(m.value)) for m in matchers if m.op in ("=~", "!~")]

    def takes(self, labels: Mapping[str, str]) -> bool:
        return all((labels.get(m.label, "") == m.value) == (m.op == "=") for m in self._plain) and all(
            pattern.fits(labels.get(m.label, "")) == (m.op == "=~") for m, pattern in self._patterns
        )

    def series(self, columns: SampleColumns, agent_id: str) -> dict[int, dict[str, str]]:
        """The series of these columns that are meant, with their labels as `query_labels` gives them."""
        try:
            wanted = columns.strings.index(self.metric)
        except ValueError:
            return {}
        found = {}
        for series in (columns.series_metric == wanted).nonzero()[0].tolist():
            labels = query_labels(agent_id, columns.labels(series))
            if self.takes(labels):
                found[series] = labels
        return found


def query_labels(agent_id: str, own: Mapping[str, str]) -> dict[str, str]:
    """The labels of a series as queries match and answer them: its own ones, and `agent_id` from the batch's identity.

    Stored bytes are never changed, so a sample may carry a label `agent_id` of its own. It is shown as
    `exported_agent_id`, with the prefix repeated while that name is taken too: one sender cannot pose as another.
    """
    labels = dict(own)
    claimed = labels.pop(AGENT_LABEL, None)
    if claimed is not None:
        name = EXPORTED + AGENT_LABEL
        while name in labels:
            name = EXPORTED + name
        labels[name] = claimed
    labels[AGENT_LABEL] = agent_id
    return labels


def parse(text: str) -> Matcher:
    """One matcher as written in a URL or on a command line. Raises Invalid."""
    form = _FORM.fullmatch(text)
    if form is None:
        raise Invalid(f"{text!r} is not a matcher", hint="write name=value, name!=value, name=~re or name!~re")
    label, op, value = form.groups()
    return msgspec.convert({"label": label.strip(), "op": op, "value": value}, Matcher)


class _Pattern:
    def __init__(self, pattern: str) -> None:
        if len(pattern) > PATTERN_CHARS_MAX:
            raise Invalid(f"pattern of {len(pattern)} characters, over the limit of {PATTERN_CHARS_MAX}")
        self._pattern = f"^(?s:{pattern})$"
        self._verdicts: dict[str, bool] = {}
        self.fits("")

    def fits(self, value: str) -> bool:
        known = self._verdicts.get(value)
        if known is None:
            known = self._match(value)
            if len(self._verdicts) < VERDICTS_MAX:
                self._verdicts[value] = known
        return known

    def _match(self, value: str) -> bool:
        import pyarrow as pa
        import pyarrow.compute as pc

        try:
            matched: Any = pc.match_substring_regex(pa.scalar(value), self._pattern)
        except pa.ArrowInvalid as error:
            raise Invalid(f"pattern {self._pattern[5:-2]!r} does not compile: {error}") from error
        return bool(matched.as_py())
