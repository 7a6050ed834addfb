"""The page of the test plan names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_test_that_the_plan_names_exists() -> None:
    """A test that is renamed or removed takes its row with it."""
    page = (ROOT / "docs/lifecycle-test-plan.md").read_text()
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", page))
    there = {
        name
        for file in (ROOT / "tests").rglob("test_lifecycle*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
    }

    assert len(named) > 80
    assert set() == named - there
