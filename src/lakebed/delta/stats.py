"""Statistics of a file, as Delta's log has them: rows, ranges and nulls of its first 32 columns.

They come from what the Parquet writer has measured already. Ranges of texts are prefixes of 32 characters; an upper one
ends in the last character of all, so it stays above every text with that prefix. Either every column that can have a
range has one, or the file has none: a dataset of delta-rs takes a column without a range, beside others, for empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import msgspec

from lakebed.delta.model import DataFile

if TYPE_CHECKING:
    import pyarrow as pa

COLUMNS_MAX = 32  # leaves, in order: Delta's default for delta.dataSkippingNumIndexedCols
PREFIX = 32  # characters of a text in a range, as Delta has it
LAST_CHARACTER = "\U0010ffff"


class Statistics(msgspec.Struct, frozen=True):
    """What is known of a file's columns; `text` is what its log entry says."""

    low: dict[str, Any]
    high: dict[str, Any]
    nulls: dict[str, Any]
    text: str


class _Leaf(msgspec.Struct, frozen=True):
    path: tuple[str, ...]
    type: Any
    index: int  # among the leaves of the Parquet file


def measured(rows: pa.Table, metadata: Any, wanted: Sequence[str] = ()) -> Statistics:
    """Of a file with these rows, by the metadata that its writer gave; `wanted` columns are measured in any place."""
    leaves = [leaf for count, leaf in enumerate(_leaves(rows.schema)) if count < COLUMNS_MAX or leaf.path[0] in wanted]
    low: dict[str, Any] = {}
    high: dict[str, Any] = {}
    nulls: dict[str, Any] = {}
    faithful = True
    for leaf in leaves:
        _put(nulls, leaf.path, _nulls(rows, metadata, leaf))
        if not _has_range(leaf.type):
            continue
        try:
            ends = _ends(rows, metadata, leaf)
        except (OverflowError, ValueError):  # a moment outside Python's years 1 to 9999
            faithful = False
            continue
        faithful = faithful and not _has_nan(rows, leaf)
        if ends is not None:
            _put(low, leaf.path, _shown(ends[0], upper=False))
            _put(high, leaf.path, _shown(ends[1], upper=True))
    said = {"numRecords": rows.num_rows, "minValues": low, "maxValues": high, "nullCount": nulls}
    if not faithful:
        said = {"numRecords": rows.num_rows, "nullCount": nulls}
    return Statistics(_known(low), _known(high), nulls, msgspec.json.encode(said).decode())


def shown(moment: datetime) -> str:
    """A moment in UTC as it is written in a range: microseconds, so that it sorts as text."""
    return moment.replace(tzinfo=None).isoformat(timespec="microseconds") + "Z"


def moments(file: DataFile, column: str) -> tuple[str | None, str | None]:
    """The range of a column of moments, as `shown` writes them; None where it is not known.

    Other engines cut moments to milliseconds: their upper ends are raised by what may have been cut.
    """
    ends: list[str | None] = []
    for bounds, upper in ((file.low, False), (file.high, True)):
        text = bounds.get(column)
        try:
            moment = datetime.fromisoformat(text) if isinstance(text, str) else None
        except ValueError:
            moment = None
        if moment is None or (moment.tzinfo is not None and moment.utcoffset() != timedelta(0)):
            ends.append(None)
            continue
        cut = upper and moment.microsecond % 1000 == 0
        ends.append(shown(moment + timedelta(microseconds=999) if cut else moment))
    return ends[0], ends[1]


def _leaves(fields: Any, path: tuple[str, ...] = (), index: list[int] | None = None) -> Iterator[_Leaf]:
    """The columns that statistics count, with their places in the file: structs by their fields, lists as one."""
    import pyarrow as pa

    at = index if index is not None else [0]
    for field in fields:
        if pa.types.is_struct(field.type):
            yield from _leaves(field.type, (*path, field.name), at)
        else:
            yield _Leaf((*path, field.name), field.type, at[0])
            at[0] += _width(field.type)


def _width(kind: Any) -> int:
    """How many leaves a type has in Parquet."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return sum(_width(field.type) for field in kind)
    if pa.types.is_map(kind):
        return _width(kind.key_type) + _width(kind.item_type)
    if pa.types.is_nested(kind):
        return _width(kind.value_type)
    return 1


def _has_range(kind: Any) -> bool:
    import pyarrow as pa

    test = pa.types
    tests = (test.is_integer, test.is_floating, test.is_decimal, test.is_boolean)
    return any(one(kind) for one in (*tests, test.is_string, test.is_large_string, test.is_date, test.is_timestamp))


def _chunks(metadata: Any, leaf: _Leaf) -> list[Any]:
    return [metadata.row_group(number).column(leaf.index).statistics for number in range(metadata.num_row_groups)]


def _nulls(rows: pa.Table, metadata: Any, leaf: _Leaf) -> int:
    chunks = _chunks(metadata, leaf)
    if _width(leaf.type) == 1 and _flat(leaf.type) and all(one is not None and one.has_null_count for one in chunks):
        return sum(one.null_count for one in chunks)
    return int(_column(rows, leaf).null_count)


def _flat(kind: Any) -> bool:
    import pyarrow as pa

    return not pa.types.is_nested(kind)


def _ends(rows: pa.Table, metadata: Any, leaf: _Leaf) -> tuple[Any, Any] | None:
    import pyarrow.compute as pc

    chunks = [one for one in _chunks(metadata, leaf) if one is None or one.num_values]
    if not chunks:
        return None
    if all(one is not None and one.has_min_max for one in chunks):
        return min(one.min for one in chunks), max(one.max for one in chunks)
    ends = pc.min_max(_column(rows, leaf)).as_py()  # texts too long for Parquet's own statistics
    return None if ends["min"] is None else (ends["min"], ends["max"])


def _has_nan(rows: pa.Table, leaf: _Leaf) -> bool:
    import pyarrow as pa
    import pyarrow.compute as pc

    return pa.types.is_floating(leaf.type) and bool(pc.any(pc.is_nan(_column(rows, leaf))).as_py())


def _column(rows: pa.Table, leaf: _Leaf) -> Any:
    import pyarrow.compute as pc

    column = rows.column(leaf.path[0])
    for name in leaf.path[1:]:
        column = pc.struct_field(column, name)
    return column


def _put(into: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for name in path[:-1]:
        into = into.setdefault(name, {})
    into[path[-1]] = value


def _shown(value: Any, *, upper: bool) -> Any:
    if isinstance(value, datetime):
        return shown(value) if value.tzinfo is not None else shown(value).removesuffix("Z")
    if isinstance(value, date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return msgspec.Raw(format(value, "f").encode())  # every digit, which a float would not keep
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    return _prefix(value, upper) if isinstance(value, str) else value


def _prefix(text: str, upper: bool) -> str:
    if len(text) <= PREFIX:
        return text
    if not upper:
        return text[:PREFIX]
    end = PREFIX
    while end < len(text) and text[end] == LAST_CHARACTER:  # nothing is above it: it must stand in the prefix
        end += 1
    return text[:end] + LAST_CHARACTER if end < len(text) else text


def _known(bounds: dict[str, Any]) -> dict[str, Any]:
    """What files are chosen by: plain values of columns; decimals and infinities have no exact JSON form."""
    return {
        name: value
        for name, value in bounds.items()
        if not isinstance(value, (dict, msgspec.Raw)) and value not in ("Infinity", "-Infinity")
    }
