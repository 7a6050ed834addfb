"""Small bugs, one at a time: which can be planted in a source, and the source with one of them.

A bug is of a kind that a person makes: a guard that is not asked, a condition without one of its terms, a comparison
turned round or off by one, a statement left out, the smaller of two instead of the larger, a loop that ends where it
should go on, an order that is not kept. Texts, logs, annotations and what is raised are left alone.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import NamedTuple

SWAPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPPOSITE = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "reversed": "list"}
LOGGED = {"log", "print", "say", "debug", "info", "warning", "error", "exception"}
PASSED_OVER = {"annotation", "returns", "decorator_list"}
LARGEST = 1_000_000  # a constant beyond it is a unit or a limit that one more does not change
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
Edit = Callable[[], None]


class Bug(NamedTuple):
    """`index` is its place among all bugs of the source; a test that ran none of its lines cannot notice it."""

    index: int
    line: int
    end_line: int
    change: str


class _Place(NamedTuple):
    """A node, and where it stands in the node above."""

    node: ast.AST
    above: ast.AST
    field: str

    def become(self, other: ast.AST) -> None:
        ast.copy_location(other, self.node)
        beside = getattr(self.above, self.field)
        if isinstance(beside, list):
            beside[next(number for number, one in enumerate(beside) if one is self.node)] = other
        else:
            setattr(self.above, self.field, other)


def bugs_of(source: str) -> list[Bug]:
    """Every bug that can be planted in this source."""
    return [
        Bug(index, *_lines(place.node), change) for index, (place, change, _) in enumerate(_edits(ast.parse(source)))
    ]


def planted(source: str, index: int) -> ast.Module:
    """The source with one bug in it."""
    tree = ast.parse(source)
    list(_edits(tree))[index][2]()
    return ast.fix_missing_locations(tree)


def _lines(node: ast.AST) -> tuple[int, int]:
    """Of a statement with a body, its head alone."""
    if isinstance(node, ast.Slice):
        node = node.upper or node.lower or node
    first: int = node.lineno  # type: ignore[attr-defined]
    whole = not isinstance(node, ast.If | ast.ExceptHandler | ast.IfExp)
    return first, getattr(node, "end_lineno", first) if whole else first


def _edits(tree: ast.Module) -> Iterator[tuple[_Place, str, Edit]]:
    for place in _places(tree, inside=False):
        for change, edit in _changes(place):
            yield place, change, edit


def _places(above: ast.AST, *, inside: bool) -> Iterator[_Place]:
    """What functions do, from the outside to the inside."""
    for field, value in ast.iter_fields(above):
        for node in value if isinstance(value, list) else [value]:
            if not isinstance(node, ast.AST) or field in PASSED_OVER or _is_text(node):
                continue
            if inside:
                yield _Place(node, above, field)
            yield from _places(node, inside=inside or isinstance(node, FUNCTIONS))


def _is_text(node: ast.AST) -> bool:
    """A docstring, a text with values, a log line, an error: what a person reads, not what is done."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or _is_text(node.value)
    if isinstance(node, ast.Await):
        return _is_text(node.value)
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
        return name in LOGGED or name.endswith("Error")
    return isinstance(node, ast.JoinedStr | ast.Raise)


def _changes(place: _Place) -> Iterator[tuple[str, Edit]]:
    match place.node:
        case ast.Compare(ops=[operator]) as node:
            other = SWAPPED[type(operator)]
            yield f"{type(operator).__name__} → {other.__name__}", lambda: _set(node, "ops", [other()])
        case ast.BoolOp(values=values):
            for number in range(len(values)):
                rest = values[:number] + values[number + 1 :]
                yield f"without term {number + 1}", lambda rest=rest: _terms(place, rest)  # type: ignore[misc]
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "without not", lambda: place.become(operand)
        case ast.If(test=test) as node if not isinstance(test, ast.UnaryOp):
            yield "if False", lambda: _set(node, "test", ast.Constant(False))
        case ast.IfExp(body=body, orelse=orelse):
            yield "always the first", lambda: place.become(body)
            yield "always the second", lambda: place.become(orelse)
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.AugAssign() | ast.Delete():
            yield "left out", lambda: place.become(ast.Pass())
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) if not _begins(place.above):
            yield "left out", lambda: place.become(ast.Pass())
        case ast.BinOp(op=ast.Add() | ast.Sub() as operator, left=left) as node if not _is_literal(left):
            turned = ast.Sub() if isinstance(operator, ast.Add) else ast.Add()
            yield "+ ↔ -", lambda: _set(node, "op", turned)
        case ast.Constant(value=bool(value)) as node:
            yield f"{value} → {not value}", lambda: _set(node, "value", not value)
        case ast.Constant(value=int(value)) as node if 0 < abs(value) < LARGEST:
            yield f"{value} → {value + 1}", lambda: _set(node, "value", value + 1)
        case ast.Continue():
            yield "continue → break", lambda: place.become(ast.Break())
        case ast.Break():
            yield "break → continue", lambda: place.become(ast.Continue())
        case ast.Call(func=ast.Name(id=name) as function) if name in OPPOSITE:
            yield f"{name} → {OPPOSITE[name]}", lambda: _call(place.node, function, OPPOSITE[name])
        case ast.Slice() as node:
            end = "upper" if node.upper is not None else "lower"
            if getattr(node, end) is not None:
                yield f"slice without its {end} end", lambda: _set(node, end, None)
        case ast.ExceptHandler(type=ast.Tuple(elts=kinds) as caught):
            for number in range(len(kinds)):
                rest = kinds[:number] + kinds[number + 1 :]
                yield f"without exception {number + 1}", lambda rest=rest: _set(caught, "elts", rest)  # type: ignore[misc]


def _begins(above: ast.AST) -> bool:
    """A constructor: without one of its attributes nothing works at all."""
    return getattr(above, "name", "") == "__init__"


def _is_literal(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant | ast.JoinedStr)


def _set(node: ast.AST, field: str, value: object) -> None:
    setattr(node, field, value)


def _terms(place: _Place, rest: list[ast.expr]) -> None:
    if len(rest) == 1:
        place.become(rest[0])
    else:
        _set(place.node, "values", rest)


def _call(node: ast.AST, function: ast.Name, name: str) -> None:
    function.id = name
    if name == "list":
        _set(node, "keywords", [])
