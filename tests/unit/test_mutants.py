"""The bugs that `make mutants` plants: each changes what the source does, and nothing that only people read."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mutants.planting import bugs_of, planted

ROOT = Path(__file__).resolve().parents[2]


def with_each_bug(body: str) -> list[str]:
    """The body of a function, with each of its bugs."""
    source = f"def work():\n    {body}\n"
    return [ast.unparse(planted(source, bug.index)).split("\n", 1)[1].strip() for bug in bugs_of(source)]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("return a < b", ["return a <= b"]),
        ("return a and b and c", ["return b and c", "return a and c", "return a and b"]),
        ("return a or b", ["return b", "return a"]),
        ("return not a", ["return a"]),
        ("self.count += n", ["pass"]),
        ("await store.delete(key)", ["pass"]),
        ("return x if y else z", ["return x", "return z"]),
        ("return max(a, b)", ["return min(a, b)"]),
        ("return sorted(a, key=f)", ["return list(a)"]),
        ("return a[b:c]", ["return a[b:]"]),
        ("return a + 2", ["return a - 2", "return a + 3"]),
    ],
)
def test_bugs_are_of_the_kind_that_people_make(body: str, expected: list[str]) -> None:
    assert expected == with_each_bug(body)


@pytest.mark.parametrize(
    "body", ["raise Invalid(f'{a + 1} < {b}')", "log.warning('gone', count=1)", "'''It is < 2.'''", "return f'{a < b}'"]
)
def test_what_only_people_read_gets_no_bug(body: str) -> None:
    assert [] == with_each_bug(body)


def test_every_bug_of_a_real_module_is_another_program() -> None:
    """None leaves the source as it was, and each can be compiled."""
    source = (ROOT / "src" / "lakebed" / "log" / "commit.py").read_text()
    whole = ast.unparse(ast.parse(source))

    bugs = bugs_of(source)

    assert len(bugs) > 50
    for bug in bugs[::5]:
        tree = planted(source, bug.index)
        compile(tree, "commit.py", "exec")
        assert whole != ast.unparse(tree), bug
