"""Command output: data to stdout in the requested format, messages to stderr."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

Output = Annotated[
    Literal["table", "json", "jsonl", "yaml"],
    Parameter(name=["--output", "-o"], help="format of the data on stdout"),
]


def emit(data: Any, output: str = "table", *, columns: Sequence[str] = ()) -> None:
    """Prints rows (a list) or one thing (a mapping or struct)."""
    plain = msgspec.to_builtins(data, enc_hook=str)
    if output == "json":
        print(msgspec.json.format(msgspec.json.encode(plain), indent=2).decode())
    elif output == "jsonl":
        for row in plain if isinstance(plain, list) else [plain]:
            print(msgspec.json.encode(row).decode())
    elif output == "yaml":
        import yaml

        print(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), end="")
    elif isinstance(plain, Mapping):
        _pairs(plain)
    else:
        _table(plain, columns)


def say(text: str) -> None:
    """Prints a message for the user."""
    print(text, file=sys.stderr, flush=True)


def _pairs(one: Mapping[str, Any]) -> None:
    width = max((len(key) for key in one), default=0)
    for key, value in one.items():
        print(f"{key:<{width}}  {_cell(value)}")


def _table(rows: Iterable[Any], columns: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    listed = [row if isinstance(row, Mapping) else {"value": row} for row in rows]
    if not listed:
        say("(nothing)")
        return
    names = list(columns) or list(listed[0])
    console = Console()
    if not console.is_terminal:  # piped: plain columns that awk and cut understand
        print("\t".join(names))
        for row in listed:
            print("\t".join(_cell(row.get(name)) for name in names))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in names:
        table.add_column(name)
    for row in listed:
        table.add_row(*(Text(_cell(row.get(name))) for name in names))  # Text: markup in data is inert
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (list, Mapping)):
        value = msgspec.json.encode(value).decode()
    return "".join(char if char.isprintable() else "\ufffd" for char in str(value))
