"""`make mutants`: plants random bugs, one at a time, and shows which of them no unit or simulation test notices.

First the tests run once, to see which lines each of them runs; that is kept in build/mutants until a source or a test
changes. Then each bug is tested by the quickest of the tests that run its line, those named after its module first, in
a process of its own that is forked from one with all packages loaded. No file is changed. A bug that makes a test hang
is noticed. One in twenty is tested without its bug as well: those tests must pass, or the count is worth nothing.
What is left is to be judged by a person: some bugs change nothing that anybody can see.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib
import importlib.machinery
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import coverage
import pytest

from mutants.planting import bugs_of, planted

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "mutants"
LANES = ("tests/unit", "tests/sim")
# Measured by themselves, shown by `make demo`, or checked by what they find: no unit test looks at them.
NOT_PLANTED = ("bench", "demo", "simulation", "loadtest", "/sim/", "__main__", "_pb2", "/vendor/", "wiring/reference")
PACKAGES = ("boto3", "cyclopts", "deltalake", "duckdb", "grpc", "hypothesis", "jinja2", "kio", "msgspec", "obstore")
PACKAGES += ("polars", "prometheus_client", "pyarrow.parquet", "pytest_asyncio", "rich.table", "structlog", "uvicorn")
TESTS_MAX, TESTS_S = 120, 40.0  # of the tests that run a line
TEST_S, BUG_S = 30.0, 120.0  # then it hangs
CONTROL_EVERY, FAILS = 20, "failed without the bug"


class Row(NamedTuple):
    file: str
    line: int
    index: int
    change: str
    code: str
    end: str  # caught, survived, not run by any test, or failed without the bug


class Seen(NamedTuple):
    """Which tests run each line of each file, and how long each test takes."""

    tests: dict[str, dict[int, set[str]]]
    seconds: dict[str, float]

    def of(self, file: str, lines: Iterable[int]) -> list[str]:
        """The tests for a bug, the likeliest to notice it first."""
        known = self.tests.get(file, {})
        part, module = Path(file).parts[2], Path(file).stem
        found = set[str]().union(*(known.get(line, ()) for line in lines)) - {""}
        nearest = sorted(found, key=lambda test: (module not in test, f"/{part}/" not in test, self.seconds[test]))
        taken, left_s = list[str](), TESTS_S
        for test in nearest[:TESTS_MAX]:
            left_s -= self.seconds[test]
            if left_s < 0 and taken:
                break
            taken.append(test)
        return taken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modules", nargs="*", help="parts of paths below src/lakebed, such as log/kafka; all without")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 2)
    wanted = parser.parse_args()
    os.chdir(ROOT)
    seen = looked(wanted.jobs)
    every = [(file, bug) for file in sources(wanted.modules) for bug in bugs_of(file.read_text())]
    chosen = random.Random(wanted.seed).sample(every, min(wanted.count, len(every)))
    print(f"{len(every)} bugs can be planted; {len(chosen)} of them are, by seed {wanted.seed}", flush=True)
    for name in PACKAGES:
        with suppress(ImportError):
            importlib.import_module(name)
    workers = [worker(chosen[number :: wanted.jobs], seen) for number in range(wanted.jobs)]
    rows = [row for read_end in workers for row in rows_of(read_end)]
    report(rows)
    return int(any(row.end == FAILS for row in rows))


def sources(modules: list[str]) -> Iterator[Path]:
    for file in sorted(Path("src/lakebed").rglob("*.py")):
        if not any(word in str(file) for word in NOT_PLANTED) and (
            not modules or any(module in str(file) for module in modules)
        ):
            yield file


def looked(jobs: int) -> Seen:
    """From a run of the tests on these very sources, now or earlier."""
    digest = hashlib.sha256()
    for file in sorted([*Path("src").rglob("*.py"), *Path("tests").rglob("*.py")]):
        digest.update(str(file).encode() + file.read_bytes())
    folder = KEPT / digest.hexdigest()[:16]
    if not (folder / "complete").exists():
        print(f"{' and '.join(LANES)} run once, to see which lines each test runs", flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        command = [sys.executable, "-m", "pytest", *LANES, "-m", "not full", "-n", str(jobs)]
        paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        subprocess.run(
            [*command, "-p", "mutants.coverage_plugin"],
            env={**os.environ, "LAKEBED_MUTANTS": str(folder), "PYTHONPATH": paths},
            check=True,
        )
        (folder / "complete").touch()
    tests: dict[str, dict[int, set[str]]] = {}
    for data in folder.glob("lines.*"):
        lines = coverage.CoverageData(basename=str(data))
        lines.read()
        for path in lines.measured_files():
            known = tests.setdefault(str(Path(path).relative_to(ROOT)), {})
            for line, names in lines.contexts_by_lineno(path).items():
                known.setdefault(line, set()).update(names)
    timed = (row.split("\t", 1) for file in folder.glob("seconds.*") for row in file.read_text().splitlines())
    return Seen(tests, {test: float(seconds) for seconds, test in timed})


def worker(chosen: list[tuple[Path, Any]], seen: Seen) -> int:
    """A process that writes the row of each bug; gives the end to read from."""
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(write_end)
        return read_end
    with os.fdopen(write_end, "w") as rows:
        for number, (file, bug) in enumerate(chosen):
            source = file.read_text()
            tests = seen.of(str(file), range(bug.line, bug.end_line + 1))
            end = tried(file, planted(source, bug.index), tests) if tests else "not run"
            if tests and number % CONTROL_EVERY == 0 and tried(file, ast.parse(source), tests) != "survived":
                end = FAILS
            code = source.splitlines()[bug.line - 1].strip()
            rows.write(json.dumps(Row(str(file), bug.line, bug.index, bug.change, code, end)) + "\n")
            rows.flush()
    os._exit(0)


def rows_of(read_end: int) -> Iterator[Row]:
    with os.fdopen(read_end) as rows:
        for row in rows:
            yield Row(*json.loads(row))


def tried(file: Path, tree: ast.Module, tests: list[str]) -> str:
    child = os.fork()
    if child == 0:
        os.setsid()
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        try:
            os._exit(int(with_bug(file.resolve(), compile(tree, str(file.resolve()), "exec"), tests)))
        except BaseException:
            os._exit(1)
    until_s = time.monotonic() + BUG_S
    while time.monotonic() < until_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "caught"
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "caught"


def with_bug(file: Path, code: CodeType, tests: list[str]) -> int:
    """Runs the tests in this process, which has loaded nothing of Lakebed yet."""
    loader, whole = importlib.machinery.SourceFileLoader, importlib.machinery.SourceFileLoader.get_code

    def get_code(self: importlib.machinery.SourceFileLoader, name: str) -> CodeType | None:
        return code if Path(self.path).resolve() == file else whole(self, name)

    loader.get_code = get_code  # type: ignore[method-assign]
    return int(pytest.main([*tests, "-x", "--tb=no", "-p", "no:xdist", "-o", f"timeout={TEST_S}"]))


def report(rows: list[Row]) -> None:
    for row in sorted(row for row in rows if row.end != "caught"):
        print(f"{row.end}: {row.file}:{row.line} [{row.change}] {row.code}")
    ends = Counter(row.end for row in rows)
    run = ends["caught"] + ends["survived"]
    print(f"{ends['caught']} caught and {ends['survived']} survived of {run} that a test runs", end="")
    print(f" ({ends['caught'] / max(1, run):.0%}); {ends['not run']} are in lines that only other lanes run, or none")


if __name__ == "__main__":
    sys.exit(main())
