"""What is installed is enough: nothing in the tree needs a package that only its developers have."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import lakebed
from lakebed.cli.main import COMMANDS

ROOT = Path(lakebed.__file__).parent
PROJECT = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["project"]
# Loaded only where an extra of this name is asked for, by a setting or a command that says so.
EXTRAS = {"meta/oxia/backend.py": "oxia", "meta/oxia/session.py": "oxia", "core/traces/export.py": "traces"}


def test_every_import_is_of_a_package_that_is_installed() -> None:
    """A dependency of tests is imported by tests alone, or inside a `try` that reports what to do without it."""
    known = _with_theirs([*PROJECT["dependencies"], "lakebed[all]"])
    owners = packages_distributions()

    strangers = {
        f"{file}: {package}"
        for file, package in _imports()
        if package not in sys.stdlib_module_names | {"lakebed", "compression"}  # the last from 3.14 on
        and not {_plain(name) for name in owners.get(package, [package])} & (known | _extra(file))
    }

    assert set() == strangers


def _imports() -> Iterator[tuple[str, str]]:
    """Every import that is not guarded, as (file, package)."""
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text())
        guarded = {id(node) for block in ast.walk(tree) if _forgives(block) for node in ast.walk(block)}
        for node in ast.walk(tree):
            if id(node) in guarded:
                continue
            if isinstance(node, ast.Import):
                yield from ((path.relative_to(ROOT).as_posix(), each.name.split(".")[0]) for each in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield path.relative_to(ROOT).as_posix(), node.module.split(".")[0]


def _forgives(node: ast.AST) -> bool:
    """A `try` with an answer to ImportError, or what only a type checker reads."""
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return True
    return isinstance(node, ast.Try) and any(
        isinstance(kind, ast.Name) and kind.id in ("ImportError", "ModuleNotFoundError")
        for handler in node.handlers
        for kind in [handler.type]
    )


def _extra(file: str) -> set[str]:
    name = EXTRAS.get(file)
    return _with_theirs(PROJECT["optional-dependencies"][name]) if name else set()


def _with_theirs(requirements: list[str]) -> set[str]:
    """These packages, and what they bring along themselves."""
    found: set[str] = set()
    left = list(requirements)
    while left:
        line = left.pop()
        if own := re.match(r"lakebed\[(.+)\]", line):  # extras made of extras
            left += [each for name in own[1].split(",") for each in PROJECT["optional-dependencies"][name]]
            continue
        name = _plain(re.split(r"[^A-Za-z0-9_.-]", line)[0])
        if name in found or "extra ==" in line:
            continue
        found.add(name)
        with suppress(PackageNotFoundError):
            left += requires(name) or []
    return found


def test_commands_of_the_core_need_no_extra() -> None:
    """A command that names no extra loads with the packages of the core alone."""
    core = _with_theirs(PROJECT["dependencies"])
    extra = _with_theirs(["lakebed[all,connect,oxia]"]) - core
    owners = packages_distributions()
    barred = sorted(name for name, dists in owners.items() if dists and {_plain(each) for each in dists} <= extra)
    places = sorted({row.place.partition(":")[0] for row in COMMANDS if not row.extra})
    code = (
        "import sys, importlib\n"
        f"sys.modules.update(dict.fromkeys({barred!r}))\n"
        f"for place in {places!r}: importlib.import_module(place)"
    )

    assert {"pyspark", "pyarrow", "grpc", "httptools"} <= set(barred)
    subprocess.run([sys.executable, "-c", code], check=True)


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_an_agent_loads_no_web_framework_and_no_store_client() -> None:
    """An agent runs on small machines: what only servers need is not loaded by its command."""
    heavy = ("starlette", "obstore", "pyspark", "pyarrow", "grpc", "uvicorn")
    code = (
        "import sys, lakebed.wiring.agent_commands, lakebed.agent.run\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "[]" == shown.stdout.strip()


def test_every_file_of_the_package_is_in_the_wheel() -> None:
    """Pages, pictures, queries and licences are package data: an installed gateway serves what a checkout serves."""
    tool = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["tool"]
    packed = {path for pattern in tool["setuptools"]["package-data"]["lakebed"] for path in ROOT.glob(pattern)}
    others = {path for path in ROOT.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}

    assert set() == {str(path.relative_to(ROOT)) for path in others - packed if path.suffix != ".md"}
