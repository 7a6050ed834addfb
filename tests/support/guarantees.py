"""The tests that `docs/guarantees.md` names, and those of them that the quick lanes run, read from the files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUICK = ("unit", "conformance", "sim", "integration", "browser", "spark")  # the folders of `make test`


def rows() -> Iterator[tuple[str, list[str]]]:
    """Each guarantee with the tests it names, as `path` or `path::name`."""
    for line in (ROOT / "docs/guarantees.md").read_text().splitlines()[5:]:
        if not line.startswith("| ") or line.startswith("| guarantee"):
            continue
        named: list[str] = []
        for path, name in re.findall(r"`(tests/[^`:]+)?(?:::([^`]+))?`", line.rsplit(" | ", 1)[-1]):
            if path or name:
                named.append((path or named[-1].split("::")[0]) + (f"::{name}" if name else ""))
        yield line[2:].split(" | ")[0], named


def quick_tests(named: str) -> list[str]:
    """The tests under such a name that are not marked `full`."""
    path, _, name = named.partition("::")
    if path.split("/")[1] not in QUICK:
        return []
    files = sorted((ROOT / path).rglob("test_*.py")) if (ROOT / path).is_dir() else [ROOT / path]
    wanted = name.replace("::", ".").split("[")[0]
    return [test for file in files for test in _quick(file) if not wanted or (test + ".").startswith(wanted + ".")]


def _quick(file: Path) -> Iterator[str]:
    tree = ast.parse(file.read_text())
    if any(_assigns_full(node) for node in tree.body):
        return
    for node in tree.body:
        inside = node.body if isinstance(node, ast.ClassDef) and not _full(node) else [node]
        for each in inside:
            if (
                isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
                and each.name.startswith("test_")
                and not _full(each)
            ):
                yield f"{node.name}.{each.name}" if isinstance(node, ast.ClassDef) else each.name


def _full(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(each) == "pytest.mark.full" for each in node.decorator_list)


def _assigns_full(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Name) and target.id == "pytestmark" for target in node.targets)
        and "pytest.mark.full" in ast.unparse(node.value)
    )
