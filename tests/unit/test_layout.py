"""The shape of the source tree: few entries at the top, small files and functions, and names that report which."""

from __future__ import annotations

import ast
from collections import defaultdict
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "lakebed"
FILES = sorted(path for path in SOURCE.rglob("*.py") if "__pycache__" not in path.parts)
ENTRIES_MAX = 26
FILES_MAX = 600  # docs/decisions/017-files-follow-parts.md has the reason
LINES_MAX = 400
FUNCTION_LINES_MAX = 70
BANNED_CLASSES = {
    *("Told", "Said", "Asked", "Seen", "Aside", "Answer", "Standing", "Saying", "Place", "Crew", "Yard", "Looker"),
    *("Keeper", "Deed", "Foreman", "Door", "Switchboard", "Shelf", "Workshop", "Steward", "Aftermath", "Housekeeper"),
    *("Courier", "Piece", "Lane", "Util", "Utils", "Helper", "Helpers", "Impl"),
}


def shown(path: Path) -> str:
    return str(path.relative_to(SOURCE))


@cache
def nodes(path: Path) -> list[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every class and function of a file, read once for all tests."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, kinds)]


def public_classes() -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(shown(path))
    return found


def test_the_top_has_few_entries() -> None:
    """A reader can take in the list of parts at once."""
    entries = {path.name for path in SOURCE.iterdir()} - {"__pycache__"}

    assert len(entries) <= ENTRIES_MAX, sorted(entries)


def test_there_are_few_files() -> None:
    """Small files that only one module imports belong in that module."""
    assert len(FILES) <= FILES_MAX


def test_no_file_is_long() -> None:
    """A file longer than this holds two ideas."""
    assert [] == [(shown(path), lines) for path in FILES if (lines := len(path.read_text().splitlines())) > LINES_MAX]


def test_no_function_is_long() -> None:
    """A function longer than this is split into steps with names."""
    long = [
        (shown(path), node.name, lines)
        for path in FILES
        for node in nodes(path)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]

    assert [] == long


def test_no_module_repeats_the_name_of_its_folder() -> None:
    """`queue/queue.py` reports nothing that `queue/` does not."""
    assert [] == [shown(path) for path in FILES if path.stem == path.parent.name]


def test_public_class_names_are_unique() -> None:
    """A class name in a traceback or a search names one class."""
    assert {} == {name: places for name, places in public_classes().items() if len(places) > 1}


def test_public_class_names_are_terms_of_the_field() -> None:
    """No metaphors and no empty names."""
    assert {} == {name: places for name, places in public_classes().items() if name in BANNED_CLASSES}
