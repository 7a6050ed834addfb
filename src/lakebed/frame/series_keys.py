"""A series as one string, for grouping without a loop: metric, agent, then names and values of labels.

Parts are joined by U+001F, which is escaped inside them, so two series have one key only if they are one series; labels
come in the order of their names, as frames keep them. Imports pyarrow when called.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lakebed.frame.model import Batch

SEPARATOR, ESCAPE = "\x1f", "\x1e"


def series_keys(batch: Batch) -> Any:
    """The key of each series of the batch, as an Arrow array of strings."""
    import pyarrow as pa

    columns = batch.columns
    texts = escaped(pa.array([*columns.strings, batch.identity.agent_id], pa.string()))
    agents = np.full(len(columns.series_metric), len(columns.strings))
    label_offsets = columns.label_offsets.astype(np.int64)
    return _keys(texts, [columns.series_metric, agents], label_offsets, columns.label_names, columns.label_values)


def row_keys(agents: Any, labels: Any) -> Any:
    """A key of each row of a chunk, whose metric goes without saying: agent and labels."""
    import pyarrow as pa

    names, values = labels.keys, labels.items
    offsets = labels.offsets.to_numpy().astype(np.int64)
    texts = escaped(pa.concat_arrays([agents, names, values]))
    at = np.arange(len(names))
    return _keys(texts, [np.arange(len(agents))], offsets, len(agents) + at, len(agents) + len(names) + at)


def _keys(texts: Any, heads: list[Any], label_offsets: Any, names: Any, values: Any) -> Any:
    """Joins texts by their numbers: first the heads of each series, then its labels, name by value."""
    import pyarrow as pa
    import pyarrow.compute as pc

    count, width = len(label_offsets) - 1, len(heads)
    first, last = int(label_offsets[0]), int(label_offsets[-1])
    offsets = (label_offsets - first) * 2 + width * np.arange(count + 1)
    items = np.empty(int(offsets[-1]), np.int64)
    for place, head in enumerate(heads):
        items[offsets[:-1] + place] = head
    at = np.repeat(width * np.arange(1, count + 1), np.diff(label_offsets)) + 2 * np.arange(last - first)
    items[at], items[at + 1] = names[first:last], values[first:last]
    parts = pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), texts.take(pa.array(items)))
    return pc.binary_join(parts, SEPARATOR)


def split_keys(keys: Any) -> tuple[Any, Any, Any]:
    """Of each key: metric, agent and labels, as Arrow arrays."""
    import pyarrow as pa
    import pyarrow.compute as pc

    parts = pc.split_pattern(keys, SEPARATOR)
    if isinstance(parts, pa.ChunkedArray):
        parts = parts.combine_chunks()
    texts, offsets = unescaped(parts.flatten()), parts.offsets.to_numpy().astype(np.int64)
    begins = offsets[:-1] - offsets[0]
    label_offsets = (offsets - offsets[0] - 2 * np.arange(len(offsets))) // 2
    series_of_label = np.repeat(np.arange(len(keys)), np.diff(label_offsets))
    at = 2 * series_of_label + 2 + 2 * np.arange(int(label_offsets[-1]))
    labels = pa.MapArray.from_arrays(
        pa.array(label_offsets.astype(np.int32)), texts.take(pa.array(at)), texts.take(pa.array(at + 1))
    )
    return texts.take(pa.array(begins)), texts.take(pa.array(begins + 1)), labels


def escaped(texts: Any) -> Any:
    import pyarrow.compute as pc

    return pc.replace_substring(
        pc.replace_substring(texts, pattern=ESCAPE, replacement=ESCAPE + "a"),
        pattern=SEPARATOR,
        replacement=ESCAPE + "b",
    )


def unescaped(texts: Any) -> Any:
    import pyarrow.compute as pc

    return pc.replace_substring(
        pc.replace_substring(texts, pattern=ESCAPE + "b", replacement=SEPARATOR),
        pattern=ESCAPE + "a",
        replacement=ESCAPE,
    )
