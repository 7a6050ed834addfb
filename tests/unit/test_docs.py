"""The documents tell the truth about the tree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])


def test_every_guarantee_names_a_test_that_exists() -> None:
    """Each promise's test is there, and each row has one."""
    rows = [line for line in (ROOT / "docs/guarantees.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert rows

    for row in rows:
        named = re.findall(r"`(tests/[^`:]*)", row)
        assert named, row
        assert [] == [path for path in named if not (ROOT / path).exists()], row


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page points at something in the tree."""
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())

    assert [] == [link for link in links if "://" not in link and not (page.parent / link).exists()]


def test_pinned_requirements_carry_no_addresses() -> None:
    """The lock file pins every line to one version and names no place to download from."""
    text = (ROOT / "requirements.lock").read_text()
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]

    assert [] == [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.\[\]-]+==[A-Za-z0-9_.+!-]+( ;.*)?", line)]


def test_every_file_that_the_architecture_names_exists() -> None:
    """The map of what to change where leads to files that are there."""
    text = (ROOT / "docs/architecture.md").read_text()
    named = {name for name in re.findall(r"`([a-z_/]+\.py)`", text) if "/" in name}

    assert len(named) > 30
    assert [] == sorted(name for name in named if not (ROOT / "src/lakebed" / name).exists())
