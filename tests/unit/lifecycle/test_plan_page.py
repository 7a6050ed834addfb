"""The test plan in README.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_that_the_plan_names_exists() -> None:
    """A test that is renamed or removed takes its row with it."""
    page = (HERE / "README.md").read_text()
    named = set(re.findall(r"`(test_[a-z0-9_]+)`", page))
    there = {
        name
        for file in HERE.parents[1].rglob("*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
    }

    assert len(named) > 80
    assert set() == named - there
