"""The series table of a frame: which metric and labels each series has, checked whole before it is believed.

An agent sends nearly the same samples' names again and again. A reader that keeps the tables it has checked pays for
one only when it changes, and its batches share the strings in memory.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise
from operator import lt
from typing import Any, NamedTuple

import numpy as np

from lakebed.batches.model import FrameLimits
from lakebed.core.errors import Invalid

KEPT_TABLES = 256
KEPT_BYTES_MAX = 64 * 1024  # a larger table is checked each time: few agents have one, and all kept stay in bounds

_INDEX = np.dtype("<u4")


class SeriesTable(NamedTuple):
    metric: Any
    offsets: Any
    names: Any
    values: Any
    strings: tuple[str, ...]


class TableCounts(NamedTuple):
    series: int
    labels: int
    strings: int
    string_bytes: int

    @property
    def words(self) -> int:
        return 2 * self.series + 1 + 2 * self.labels + self.strings + 1


class KnownTables:
    """The tables that one reader has checked lately, by their bytes. All under one set of limits."""

    def __init__(self, limits: FrameLimits) -> None:
        self._limits = limits
        self._known: OrderedDict[tuple[TableCounts, bytes, bytes], SeriesTable] = OrderedDict()

    def table(self, words: bytes, texts: bytes, counts: TableCounts) -> SeriesTable:
        """As `read_table`, under this reader's limits."""
        key = (counts, words, texts)
        found = self._known.get(key)
        if found is None:
            found = read_table(words, texts, counts, self._limits)
            if len(words) + len(texts) <= KEPT_BYTES_MAX:
                self._known[key] = found
                if len(self._known) > KEPT_TABLES:
                    self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        return found


def read_table(words: bytes, texts: bytes, counts: TableCounts, limits: FrameLimits) -> SeriesTable:
    """The table in these bytes. Raises Invalid for one that points outside itself, is out of order or over a limit."""
    series, labels, strings, string_bytes = counts
    # Few numpy calls: each costs about as much as checking a thousand entries.
    table = np.frombuffer(words, _INDEX, counts.words)
    metric, offsets = table[:series], table[series : 2 * series + 1]
    at = 2 * series + 1
    pairs = table[at : at + 2 * labels]
    names, values = pairs[:labels], pairs[labels:]
    below("metric", metric, strings)
    below("label", pairs, strings)
    label_counts = _spans("labels", offsets, labels)
    if _largest(label_counts) > limits.labels_per_series:
        raise Invalid(f"{_largest(label_counts)} labels in a series, over the limit of {limits.labels_per_series}")
    string_offsets = table[at + 2 * labels :]
    sizes = _spans("strings", string_offsets, string_bytes)
    read = _strings(texts, string_offsets)
    if labels:
        _check_labels(names, offsets, sizes[values], limits)
    named = sizes[metric] if not labels else np.concatenate((sizes[metric], sizes[names]))
    if _largest(named) > limits.name_bytes or not named.all():
        raise Invalid(f"a name is empty or longer than {limits.name_bytes} bytes")
    return SeriesTable(metric, offsets, names, values, read)


def below(what: str, column: Any, bound: int) -> None:
    """Raises Invalid unless every index is below `bound`."""
    if len(column) and _largest(column) >= bound:
        raise Invalid(f"a {what} index is {_largest(column)}, of {bound}")


def _check_labels(names: Any, offsets: Any, value_sizes: Any, limits: FrameLimits) -> None:
    """Names ascend strictly inside each series: a step down is allowed only where a series begins."""
    begins = np.zeros(len(names) + 1, bool)
    begins[offsets] = True
    if not ((names[1:] > names[:-1]) | begins[1:-1]).all():
        raise Invalid("labels of a series are not in ascending order of their names, each once")
    if _largest(value_sizes) > limits.label_value_bytes:
        raise Invalid(f"a label's value is longer than {limits.label_value_bytes} bytes")


def _strings(data: bytes, offsets: Any) -> tuple[str, ...]:
    bounds = offsets.tolist()
    raw = [data[start:end] for start, end in pairwise(bounds)]
    if not all(map(lt, raw, raw[1:])):
        raise Invalid("strings are not in ascending order, each once")
    if data.isascii():
        text = data.decode("ascii")
        return tuple([text[start:end] for start, end in pairwise(bounds)])
    try:
        return tuple([text.decode() for text in raw])
    except UnicodeDecodeError as error:
        raise Invalid("a string is not UTF-8") from error


def _largest(column: Any) -> int:
    return int(np.maximum.reduce(column, initial=0))


def _spans(what: str, offsets: Any, total: int) -> Any:
    """The length of each entry between offsets that must cover `total` in order."""
    if offsets[0] != 0 or offsets[-1] != total or not (offsets[1:] >= offsets[:-1]).all():
        raise Invalid(f"offsets of {what} do not cover their {total} entries in order")
    return offsets[1:] - offsets[:-1]
