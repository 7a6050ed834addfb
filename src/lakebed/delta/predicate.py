"""Conditions on a table's columns: parsed from text, compared with what a log knows of a file, applied to rows.

    customer = 'c-17' and total >= 10.5 and at < '2026-11-01T00:00:00Z' and note is not null

Every comparison must hold; as in SQL, one with a null does not. A file is left out only when its bounds, its null
counts or its partition prove that no row of it can match, so a predicate never loses a row. Pure: no store, no Spark.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, date, datetime, timedelta
from decimal import Context as DecimalContext
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from lakebed.core.errors import Corrupt, Invalid
from lakebed.delta.log import fields_of
from lakebed.delta.model import DataFile

if TYPE_CHECKING:
    import pyarrow as pa

Operator = Literal["=", "!=", "<", "<=", ">", ">=", "in", "is null", "is not null"]
TERMS_MAX = 64
VALUES_MAX = 10_000  # in one list
HINT = "column = value, with and between: id = 5 and at >= '2026-01-01' and name in ('a', 'b') and note is null"
WHOLE = {"byte": 8, "short": 16, "integer": 32, "long": 64}  # bits
DECIMAL_DIGITS_MAX = 38  # Delta's own limit
FLOATS = ("float", "double")
_TOKEN = re.compile(
    r"\s*(?:(?P<text>'(?:[^']|'')*')|(?P<number>[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)|`(?P<quoted>[^`]+)`"
    r"|(?P<word>[^\W\d]\w*)|(?P<sign><=|>=|<>|!=|=|<|>|\(|\)|,))"
)
_DIGITS = DecimalContext(prec=DECIMAL_DIGITS_MAX)
_TEXT_ROUNDED = timedelta(milliseconds=1)  # Delta writers may cut a bound of a timestamp to milliseconds


class Comparison(msgspec.Struct, frozen=True):
    """One column beside one value, or several for `in`."""

    column: str
    operator: Operator
    value: Any = None


class Predicate(msgspec.Struct, frozen=True):
    """Comparisons that must all hold. Without any, every row matches."""

    terms: tuple[Comparison, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.terms)

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(term.column for term in self.terms))

    def typed(self, schema_json: str) -> Predicate:
        """The same with values in their columns' types. Raises Invalid for an unknown column or an unfit value."""
        kinds = fields_of(schema_json)
        return Predicate(tuple(_typed(term, kinds) for term in self.terms))

    def may_match(self, file: DataFile, kinds: Mapping[str, Any]) -> bool:
        """Whether a row of the file can match. The values must be typed; `kinds` are the columns' types."""
        return all(_may_hold(term, file, kinds.get(term.column)) for term in self.terms)

    def expression(self, types: Mapping[str, pa.DataType]) -> Any:
        """The predicate for pyarrow, on columns of these types; None matches all."""
        import pyarrow.dataset as ds

        found = None
        for term in self.terms:
            one = _expression(ds.field(term.column), term, types[term.column])
            found = one if found is None else found & one
        return found


def parse_predicate(text: str) -> Predicate:
    """The predicate in this text. Raises Invalid, naming the place; `or` and functions are not part of the language."""
    tokens = _Tokens(text)
    terms = [_comparison(tokens)]
    while tokens.word("and"):
        terms.append(_comparison(tokens))
    if not tokens.done:
        raise tokens.wrong("and")
    if len(terms) > TERMS_MAX:
        raise Invalid(f"a condition has at most {TERMS_MAX} comparisons")
    return Predicate(tuple(terms))


def equal(values: Mapping[str, Any]) -> Predicate:
    """That each of these columns has this value; null for None."""
    return Predicate(tuple(Comparison(name, "is null" if v is None else "=", v) for name, v in values.items()))


class _Tokens:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    @property
    def done(self) -> bool:
        return not self.text[self.at :].strip()

    def next(self, *kinds: str) -> tuple[str, str] | None:
        """The next token if it is of one of these kinds, and moves behind it."""
        found = _TOKEN.match(self.text, self.at)
        if found is None or found.lastgroup not in kinds:
            return None
        self.at = found.end()
        return str(found.lastgroup), str(found[found.lastgroup])

    def word(self, wanted: str) -> bool:
        before = self.at
        if (found := self.next("word")) and found[1].lower() == wanted:
            return True
        self.at = before
        return False

    def sign(self, *wanted: str) -> str:
        before = self.at
        if (found := self.next("sign")) and found[1] in wanted:
            return found[1]
        self.at = before
        return ""

    def wrong(self, wanted: str) -> Invalid:
        rest = self.text[self.at :].strip()[:40]
        return Invalid(f"the condition has {rest!r} where {wanted} is expected", hint=HINT)


def _comparison(tokens: _Tokens) -> Comparison:
    name = tokens.next("word", "quoted")
    if name is None:
        raise tokens.wrong("a column")
    if tokens.word("is"):
        absent = not tokens.word("not")
        if not tokens.word("null"):
            raise tokens.wrong("null")
        return Comparison(name[1], "is null" if absent else "is not null")
    if tokens.word("in"):
        return Comparison(name[1], "in", _list(tokens))
    sign = tokens.sign("=", "!=", "<>", "<", "<=", ">", ">=")
    if not sign:
        raise tokens.wrong("a comparison")
    return Comparison(name[1], "!=" if sign == "<>" else sign, _value(tokens))  # type: ignore[arg-type]


def _list(tokens: _Tokens) -> tuple[Any, ...]:
    if not tokens.sign("("):
        raise tokens.wrong("(")
    values = [_value(tokens)]
    while tokens.sign(","):
        values.append(_value(tokens))
    if not tokens.sign(")"):
        raise tokens.wrong(")")
    if len(values) > VALUES_MAX:
        raise Invalid(f"a list has at most {VALUES_MAX} values")
    return tuple(values)


def _value(tokens: _Tokens) -> Any:
    if tokens.word("true"):
        return True
    if tokens.word("false"):
        return False
    found = tokens.next("text", "number")
    if found is None:
        raise tokens.wrong("a value")
    kind, text = found
    if kind == "text":
        return text[1:-1].replace("''", "'")
    return int(text) if re.fullmatch(r"[+-]?\d+", text) else Decimal(text)


def _typed(term: Comparison, kinds: Mapping[str, Any]) -> Comparison:
    if term.column not in kinds:
        raise Invalid(f"there is no column {term.column!r}", hint=f"columns: {', '.join(kinds)}")
    if term.operator in ("is null", "is not null"):
        return term
    kind = kinds[term.column]
    if not isinstance(kind, str):
        raise Invalid(f"column {term.column!r} has no order: only `is null` and `is not null` apply to it")
    if term.operator == "in":
        return Comparison(term.column, "in", tuple(_as(value, kind, term.column) for value in term.value))
    return Comparison(term.column, term.operator, _as(term.value, kind, term.column))


def _as(value: Any, kind: str, column: str) -> Any:
    """The value as a column of this Delta type has it; text is read, nothing is rounded."""
    try:
        found = _read(value, kind)
    except (ValueError, TypeError, InvalidOperation, OverflowError):
        found = None
    if found is None:
        raise Invalid(f"column {column!r} is {kind}: {value!r} is no value of it")
    return found


def _read(value: Any, kind: str) -> Any:
    if kind == "boolean":
        return value if isinstance(value, bool) else {"true": True, "false": False}.get(str(value).lower())
    if isinstance(value, bool):
        return None
    if kind in WHOLE:
        exact = Decimal(str(value))
        ends = 1 << (WHOLE[kind] - 1)
        return int(exact) if exact == exact.to_integral_value() and -ends <= exact < ends else None
    if kind in FLOATS:
        return float(value)
    if kind.startswith("decimal"):
        precision, scale = map(int, kind[8:-1].split(","))
        exact = Decimal(str(value))
        found = exact.quantize(Decimal(1).scaleb(-scale), context=_DIGITS)
        return found if found == exact and len(found.as_tuple().digits) <= precision else None
    if kind == "binary":
        return value if isinstance(value, bytes) else str(value).encode()
    if kind == "date":
        return value if type(value) is date else date.fromisoformat(str(value))
    if kind in ("timestamp", "timestamp_ntz"):
        return moment_of(value)
    return value if isinstance(value, str) else str(value) if isinstance(value, (int, Decimal)) else None


def value_of(text: str, kind: Any) -> Any:
    """The value of a partition, from its text in the log. Raises Corrupt for text that its column cannot have."""
    try:
        found = _read(text, kind)
    except (ValueError, TypeError, InvalidOperation, OverflowError):
        found = None
    if found is None:
        raise Corrupt(f"a partition has the value {text!r}, but its column is {kind}")
    return found


def moment_of(value: Any) -> datetime:
    """A moment in UTC; one without a zone is in UTC. Raises ValueError."""
    found = value if isinstance(value, datetime) else datetime.fromisoformat(str(value))
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found.astimezone(UTC)


def _may_hold(term: Comparison, file: DataFile, kind: Any) -> bool:
    name = term.column
    if name in file.partition:
        return _in_partition(term, file.partition[name], kind)
    nulls = file.nulls.get(name)
    counted = isinstance(nulls, int) and not file.vector  # of a struct, nulls are counted by field
    if term.operator == "is null":
        return nulls != 0 or not counted
    if counted and nulls == file.rows > 0:
        return False
    if term.operator in ("is not null", "!="):
        return True
    if kind in FLOATS and term.operator in (">", ">="):
        return True  # bounds do not count NaN, which Spark orders above every number
    bounds = _bounds(file, name, kind)
    return bounds is None or _overlaps(term, *bounds)


def _in_partition(term: Comparison, text: str | None, kind: Any) -> bool:
    if text is None or term.operator in ("is null", "is not null"):
        return (term.operator == "is null") == (text is None)
    try:
        value = _read(text, kind)
    except (ValueError, TypeError, InvalidOperation):
        return True
    return value is None or (value != term.value if term.operator == "!=" else _overlaps(term, value, value))


def _bounds(file: DataFile, name: str, kind: Any) -> tuple[Any, Any] | None:
    """The range of the column's values, no narrower than it is; None when it is not known."""
    low, high = file.low.get(name), file.high.get(name)
    if low is None or high is None or not isinstance(kind, str) or kind.startswith("decimal") or kind == "binary":
        return None  # a decimal in JSON may have been rounded
    try:
        if kind in ("timestamp", "timestamp_ntz"):
            return moment_of(low), moment_of(high) + _TEXT_ROUNDED
        return _read(low, kind), _read(high, kind)
    except (ValueError, TypeError, InvalidOperation, OverflowError):
        return None


def _overlaps(term: Comparison, low: Any, high: Any) -> bool:
    tests: dict[str, Callable[[Any], bool]] = {
        "=": lambda value: low <= value <= high,
        "<": lambda value: low < value,
        "<=": lambda value: low <= value,
        ">": lambda value: high > value,
        ">=": lambda value: high >= value,
    }
    try:
        if term.operator == "in":
            return any(low <= value <= high for value in term.value)
        return tests[term.operator](term.value)
    except TypeError:
        return True


def _expression(field: Any, term: Comparison, kind: pa.DataType) -> Any:
    import pyarrow as pa

    if term.operator == "is null":
        return field.is_null()
    if term.operator == "is not null":
        return field.is_valid()
    if term.operator == "in":
        return field.isin(pa.array(list(term.value), kind))
    value = pa.scalar(term.value, kind)
    return {
        "=": field == value,
        "!=": field != value,
        "<": field < value,
        "<=": field <= value,
        ">": field > value,
        ">=": field >= value,
    }[term.operator]


def chosen(files: Iterable[DataFile], predicate: Predicate, schema_json: str) -> list[DataFile]:
    """The files that may hold a matching row. The predicate must be typed."""
    kinds = fields_of(schema_json)
    return [file for file in files if predicate.may_match(file, kinds)]
