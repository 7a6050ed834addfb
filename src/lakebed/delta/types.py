"""Types of columns: words of manifests and contracts, Delta's JSON, Arrow's types, and which may become which. Pure.

string · decimal(12,2) · array<long> · map<string,double> · struct<street:string,zip:integer>
"""

from __future__ import annotations

import re
from typing import Any

from lakebed.core.errors import Invalid

PRIMITIVES = ("string", "binary", "boolean", "byte", "short", "integer", "long", "float", "double", "date", "timestamp")
DEPTH_MAX = 8
FIELDS_MAX = 1_000
HINT = f"one of {', '.join(PRIMITIVES)}, decimal(p,s), array<type>, map<type,type>, struct<name:type,…>"
_TOKEN = re.compile(r"\s*(decimal\(\s*\d{1,2}\s*,\s*\d{1,2}\s*\)|[^\W\d]\w*|[<>,:])\s*")
_DECIMAL = re.compile(r"decimal\((\d{1,2}),(\d{1,2})\)")
_WHOLE = {"byte": 3, "short": 5, "integer": 10, "long": 20}  # digits that Delta's widening to a decimal needs


def parse_type(word: str) -> Any:
    """Delta's form of a type: itself, or a JSON object for nested types. Raises Invalid."""
    tokens, at = [], 0
    while at < len(word):
        found = _TOKEN.match(word, at)
        if found is None:
            raise _unknown(word)
        tokens.append(re.sub(r"\s", "", found[1]))
        at = found.end()
    kind, rest = _parse(tokens, word, 0)
    if rest:
        raise _unknown(word)
    return kind


def is_type(word: str) -> bool:
    try:
        parse_type(word)
    except Invalid:
        return False
    return True


def word_of(kind: Any) -> str:
    """The word of Delta's form; what an array, a map or a struct allows to be null is not part of it."""
    if isinstance(kind, str):
        return kind
    if kind["type"] == "array":
        return f"array<{word_of(kind['elementType'])}>"
    if kind["type"] == "map":
        return f"map<{word_of(kind['keyType'])},{word_of(kind['valueType'])}>"
    fields = [f"{one['name']}:{word_of(one['type'])}" for one in kind["fields"]]
    return f"struct<{','.join(fields)}>"


def widens(old: Any, new: Any) -> bool:
    """Whether every value of the old type is one of the new, as Delta's type widening has it. Not for equal types."""
    if not isinstance(old, str) or not isinstance(new, str) or old == new:
        return False
    order = ("byte", "short", "integer", "long")
    if old in order and new in order:
        return order.index(old) < order.index(new)
    if (old, new) == ("float", "double") or (old in order[:3] and new == "double"):
        return True
    if wide := _DECIMAL.fullmatch(new):
        whole, scale = int(wide[1]) - int(wide[2]), int(wide[2])
        if old in _WHOLE:
            return whole >= max(10, _WHOLE[old])
        if narrow := _DECIMAL.fullmatch(old):
            return whole >= int(narrow[1]) - int(narrow[2]) and scale >= int(narrow[2])
    return (old, new) == ("date", "timestamp_ntz")


def arrow_type(kind: Any) -> Any:
    """The Arrow type of a column of this Delta type; inner values may be null, whatever the table says of them."""
    import pyarrow as pa

    if isinstance(kind, dict):
        if kind["type"] == "array":
            return pa.list_(pa.field("element", arrow_type(kind["elementType"])))
        if kind["type"] == "map":
            return pa.map_(arrow_type(kind["keyType"]), arrow_type(kind["valueType"]))
        return pa.struct([pa.field(one["name"], arrow_type(one["type"])) for one in kind["fields"]])
    if kind.startswith("decimal"):
        precision, scale = kind[8:-1].split(",")
        return pa.decimal128(int(precision), int(scale))
    return {
        "string": pa.string(), "binary": pa.binary(), "boolean": pa.bool_(), "byte": pa.int8(), "short": pa.int16(),
        "integer": pa.int32(), "long": pa.int64(), "float": pa.float32(), "double": pa.float64(), "date": pa.date32(),
        "timestamp": pa.timestamp("us", tz="UTC"), "timestamp_ntz": pa.timestamp("us"), "void": pa.null(),
    }[kind]  # fmt: skip


def _parse(tokens: list[str], word: str, depth: int) -> tuple[Any, list[str]]:
    """The type at the start of the tokens, and the tokens after it."""
    if not tokens or depth > DEPTH_MAX:
        raise _unknown(word)
    head, rest = tokens[0], tokens[1:]
    if head in PRIMITIVES:
        return head, rest
    if found := _DECIMAL.fullmatch(head):
        if 1 <= int(found[1]) <= 38 and int(found[2]) <= int(found[1]):
            return f"decimal({int(found[1])},{int(found[2])})", rest
        raise _unknown(word)
    if head not in ("array", "map", "struct") or rest[:1] != ["<"]:
        raise _unknown(word)
    rest = rest[1:]
    if head == "struct":
        return _struct(rest, word, depth)
    first, rest = _parse(rest, word, depth + 1)
    if head == "array":
        return {"type": "array", "elementType": first, "containsNull": True}, _after(rest, ">", word)
    second, rest = _parse(_after(rest, ",", word), word, depth + 1)
    found_map = {"type": "map", "keyType": first, "valueType": second, "valueContainsNull": True}
    return found_map, _after(rest, ">", word)


def _struct(rest: list[str], word: str, depth: int) -> tuple[Any, list[str]]:
    fields: list[dict[str, Any]] = []
    while True:
        if len(rest) < 2 or not re.fullmatch(r"[^\W\d]\w*", rest[0]) or len(fields) >= FIELDS_MAX:
            raise _unknown(word)
        name = rest[0]
        kind, rest = _parse(_after(rest[1:], ":", word), word, depth + 1)
        fields.append({"name": name, "type": kind, "nullable": True, "metadata": {}})
        if rest[:1] != [","]:
            break
        rest = rest[1:]
    if len({one["name"].casefold() for one in fields}) != len(fields):
        raise _unknown(word)
    return {"type": "struct", "fields": fields}, _after(rest, ">", word)


def _after(tokens: list[str], wanted: str, word: str) -> list[str]:
    if tokens[:1] != [wanted]:
        raise _unknown(word)
    return tokens[1:]


def _unknown(word: str) -> Invalid:
    return Invalid(f"there is no type {word[:200]!r}", hint=HINT)
