"""Which columns of its sources each column of a model is computed from, by Spark's analysed plan. No job runs.

A column that goes through a Python function has no entry, nor has any in a session over Spark Connect. Of a union the
columns of its first side are named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from pyspark.sql import DataFrame

from lakebed.pipeline.models.definition import Kind


def column_lineage(rows: DataFrame, frames: Mapping[tuple[str, Kind], DataFrame]) -> dict[str, tuple[str, ...]]:
    """For each column of `rows` those that its values come from, as `source.column`; joins and filters aside."""
    try:
        plan = rows._jdf.queryExecution().analyzed()
        leaves = {
            each.exprId().id(): f"{source}.{each.name()}"
            for (source, _), frame in frames.items()
            for each in _each(frame._jdf.queryExecution().analyzed().output())
        }
        nodes = msgspec.json.decode(plan.toJSON())
        outputs = [(each.name(), each.exprId().id()) for each in _each(plan.output())]
    except Exception:  # of a session over Connect, or of another Spark: lineage is never worth a failure
        return {}
    made = _aliases(nodes)
    found = {
        name: tuple(sorted({leaves[one] for one in _reached(number, made) if one in leaves}))
        for name, number in outputs
    }
    return {name: columns for name, columns in found.items() if columns}


def _each(sequence: Any) -> Any:
    return (sequence.apply(number) for number in range(sequence.size()))


def _aliases(nodes: list[Any]) -> dict[int, set[int]]:
    """What each named expression of the plan is made of, by number. Expressions are lists in order of depth."""
    made: dict[int, set[int]] = {}

    def visit(value: Any) -> None:
        if isinstance(value, list):
            if value and isinstance(value[0], dict) and str(value[0].get("class", "")).endswith(".Alias"):
                number = _number(value[0])
                if number is not None:
                    made.setdefault(number, set()).update(_references(value[1:]))
            for each in value:
                visit(each)
        elif isinstance(value, dict):
            for each in value.values():
                visit(each)

    visit(nodes)
    return made


def _references(nodes: list[Any]) -> set[int]:
    found = set()
    for each in nodes:
        if isinstance(each, dict) and str(each.get("class", "")).endswith(".AttributeReference"):
            number = _number(each)
            if number is not None:
                found.add(number)
    return found


def _number(node: Mapping[str, Any]) -> int | None:
    number = node.get("exprId", {}).get("id")
    return int(number) if number is not None else None


def _reached(number: int, made: Mapping[int, set[int]]) -> set[int]:
    seen: set[int] = set()
    left = [number]
    while left:
        each = left.pop()
        if each not in seen:
            seen.add(each)
            left += made.get(each, set())
    return seen
