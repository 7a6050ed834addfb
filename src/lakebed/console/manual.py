"""The documentation inside the console: the pages of `docs/`, where this installation has the source tree.

A wheel has none: then the page says where they are. Only files that a pattern allows are read, below one folder, and
HTML inside them is shown as text.
"""

from __future__ import annotations

import re
from pathlib import Path

from markdown_it import MarkdownIt

import lakebed
from lakebed.core.errors import NotFound

DOCS = Path(lakebed.__file__).parents[2] / "docs"
NAME = re.compile(r"(?:[a-z]+/)?[A-Za-z0-9_-]+\.(md|png)")


def found(name: str, docs: Path = DOCS) -> Path:
    """The file of a name such as `parts/log.md`. Raises NotFound."""
    file = docs / name
    if not NAME.fullmatch(name) or not file.is_file():
        hint = "" if docs.is_dir() else "this installation has no documentation: it is in docs/ of the source tree"
        raise NotFound(f"the documentation has no page {name[:200]!r}", hint=hint)
    return file


def rendered(file: Path) -> str:
    """A page as HTML. Relative links lead to other pages of the manual."""
    return str(MarkdownIt("commonmark", {"html": False}).enable("table").render(file.read_text(encoding="utf-8")))
