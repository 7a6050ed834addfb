"""What a notebook shows: rows as an HTML table in which every cell is text."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

HTML_ROWS = 10


def html_of(rows: Sequence[Any], *, caption: str = "") -> str:
    """Rows as an HTML table; every cell is text."""
    names = list(rows[0]) if rows else []
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape('' if row[name] is None else str(row[name]))}</td>" for name in names) + "</tr>"
        for row in rows
    )
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
