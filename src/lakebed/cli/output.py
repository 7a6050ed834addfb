"""Command output: data to stdout in the requested format, messages to stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from lakebed.core.errors import shown_text

Output = Annotated[
    Literal["table", "json", "jsonl", "yaml"],
    Parameter(name=["--output", "-o"], help="format of the data on stdout"),
]


def shown_bytes(data: bytes) -> bytes:
    """Data for stdout: as it is into a pipe or a file, without control characters on a terminal."""
    return shown_text(data.decode(errors="replace")).encode() if sys.stdout.isatty() else data


def emit(data: Any, output: str = "table", *, columns: Sequence[str] = ()) -> None:
    """Prints rows (a list) or one thing (a mapping or struct). A table has times and sizes as people read them."""
    plain = msgspec.to_builtins(data, enc_hook=str)
    if output == "json":
        show(msgspec.json.format(msgspec.json.encode(plain), indent=2).decode())
    elif output == "jsonl":
        for row in plain if isinstance(plain, list) else [plain]:
            show(msgspec.json.encode(row).decode())
    elif output == "yaml":
        import yaml

        print(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), end="")
    elif isinstance(plain, Mapping):
        _pairs(plain)
    else:
        _table(plain, columns)


def say(text: str) -> None:
    """Prints a message for the user."""
    print(shown_text(text), file=sys.stderr, flush=True)


def show(text: str, *, flush: bool = False) -> None:
    """Prints data as text: as it is into a pipe or a file, without control characters on a terminal."""
    print(shown_text(text) if sys.stdout.isatty() else text, flush=flush)


@contextmanager
def byte_bar(total_bytes: int, *, always: bool = False) -> Iterator[Callable[[int], None]]:
    """A bar of uploaded bytes on stderr, on a terminal; `always` also in a notebook. Yields what takes each size."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("uploading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    shown = always or console.is_terminal
    with Progress(*columns, console=console, disable=not shown) as progress:
        task = progress.add_task("parts", total=total_bytes)
        yield lambda size_bytes: progress.advance(task, size_bytes)


def size_text(size_bytes: float) -> str:
    """1,500,000 as `1.5 MB`."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(size_bytes) < 1000:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.1f} TB"


def time_text(at_ns: int) -> str:
    """A time since 1970 as `2026-01-31 12:00:00Z`; empty for 0, which means never."""
    seconds = at_ns // 1_000_000_000
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%SZ}" if 0 < seconds < YEAR_9999_S else ""


YEAR_9999_S = 253_402_300_800
# Columns that hold a time or a size, by the end of their names: the unit goes, since the value says it.
TIMES = {"_at_unix_ns": 1, "_unix_ns": 1, "_at_ns": 1, "_at_ms": 1_000_000, "_unix_ms": 1_000_000}


def readable(name: str, value: Any) -> tuple[str, str]:
    """A field as a person reads it: its name without the unit, and its value. `-o json` has the raw ones."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    for ending, unit_ns in TIMES.items():
        if name.endswith(ending):
            label = name.removesuffix(ending) + ("_at" if "_at" in ending else "")
            return label, time_text(int(value) * unit_ns) if number else _cell(value)
    if name == "bytes" or name.endswith("_bytes"):
        return name.removesuffix("_bytes"), size_text(value) if number else _cell(value)
    return name, _cell(value)


def _labels(names: Sequence[str]) -> list[str]:
    """The names without their units; with them where two would be the same."""
    plain = [_cell(name) for name in names]
    short = [readable(name, None)[0] for name in plain]
    return [name if short.count(label) > 1 else label for name, label in zip(plain, short, strict=True)]


def _pairs(one: Mapping[str, Any]) -> None:
    cells = [readable(key, value)[1] for key, value in one.items()]
    shown = list(zip(_labels(list(one)), cells, strict=True))
    width = max((len(key) for key, _ in shown), default=0)
    for key, value in shown:
        print(f"{key:<{width}}  {value}")


def _table(rows: Iterable[Any], columns: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    listed = [row if isinstance(row, Mapping) else {"value": row} for row in rows]
    if not listed:
        say("(nothing)")
        return
    names = list(columns) or list(listed[0])
    labels = _labels(names)
    cells = [[readable(name, row.get(name))[1] for name in names] for row in listed]
    console = Console()
    if not console.is_terminal:  # piped: plain columns that awk and cut understand
        print("\t".join(labels))
        for row in cells:
            print("\t".join(row))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for label in labels:
        table.add_column(Text(label))
    for row in cells:
        table.add_row(*map(Text, row))  # Text: markup in data is inert
    console.print(table)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping) and not any(isinstance(each, list | Mapping) for each in value.values()):
        value = ", ".join(f"{key} {each}" for key, each in value.items())
    elif isinstance(value, (list, Mapping)):
        value = msgspec.json.encode(value).decode() if value else ""
    return "".join(char if char.isprintable() else "\ufffd" for char in str(value))
