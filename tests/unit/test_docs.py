"""The documents report the truth about the tree."""

from __future__ import annotations

import json
import re
import runpy
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from lakebed.console.pages import PAGES as CONSOLE_PAGES
from lakebed.store.prices import AS_OF, LIST_PRICES
from support import guarantees

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
SEVERAL_FORMATS = {"batches", "lifecycle", "log", "queue", "rollups", "tables", "ticks"}


def test_every_guarantee_names_a_test_that_exists() -> None:
    """Each promise's test is there, and each row has one."""
    rows = [line for line in (ROOT / "docs/guarantees.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert rows

    for row in rows:
        named = re.findall(r"`(tests/[^`:]*)", row)
        assert named, row
        assert [] == [path for path in named if not (ROOT / path).exists()], row


# These need a cluster, or a whole Spark audit of a damaged bucket: only `make test-full` shows them.
FULL_ONLY = ("Pipeline: the same jobs run unchanged on a standalone cluster", "Audit: a wrong reverse reference")


def test_every_guarantee_is_touched_by_the_quick_lanes() -> None:
    """`make test` runs at least one test of each promise; `make test-full` runs the exhaustive ones too."""
    untouched = [promise for promise, named in guarantees.rows() if not any(map(guarantees.quick_tests, named))]

    assert [] == [promise for promise in untouched if not promise.startswith(FULL_ONLY)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link of a page points at something in the tree."""
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())

    assert [] == [link for link in links if "://" not in link and not (page.parent / link).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_test_that_a_page_names_exists(page: Path) -> None:
    """The file, and the function where one is named; a changelog may name what was."""
    if page.name == "CHANGELOG.md":
        return
    there: dict[str, str] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        there[path.name] = there.get(path.name, "") + path.read_text()
    named = set(re.findall(r"(test_\w+\.py)(?:::(test_\w+))?", page.read_text()))

    assert [] == sorted(file for file, _ in named if file not in there)
    assert [] == sorted(f"{file}::{name}" for file, name in named if name and f"def {name}(" not in there[file])


def headings(page: Path) -> list[str]:
    """The anchors of a page, as GitHub makes them of its headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    found = re.findall(r"^#+ (.+)$", text, re.M)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in found]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_into_pages_lead_to_a_heading(page: Path) -> None:
    """Every anchor of a link is a heading of its page."""
    links = re.findall(r"\]\(([^)#\s]*)#([^)\s]+)\)", page.read_text())
    pages = [(page.parent / link if link else page, anchor) for link, anchor in links if "://" not in link]

    assert [] == [f"{to.name}#{anchor}" for to, anchor in pages if to.suffix == ".md" and anchor not in headings(to)]


@pytest.mark.parametrize("page", sorted((ROOT / "docs/formats").glob("*.md")), ids=lambda page: page.stem)
def test_every_stored_format_has_a_command_that_shows_it(page: Path) -> None:
    """Each section of a page of several formats, and each page of one, names a command."""
    whole = page.read_text()
    formats = re.split(r"^## ", whole, flags=re.M)[1:] if page.stem in SEVERAL_FORMATS else [whole]

    assert [] == [text.split("\n")[0] for text in formats if not re.search(r"`lakebed [a-z]+", text)]


def test_every_file_that_the_architecture_names_exists() -> None:
    """The map of what to change where leads to files that are there."""
    text = (ROOT / "docs/architecture.md").read_text()
    named = {name for name in re.findall(r"`([a-z_/]+\.py)`", text) if "/" in name}

    assert len(named) > 30
    assert [] == sorted(name for name in named if not (ROOT / "src/lakebed" / name).exists())


def imported_by(name: str) -> set[str]:
    code = (ROOT / "src/lakebed" / name).read_text()
    found = re.findall(r"from lakebed\.([\w.]+) import ([\w, ]+)", code)
    modules = {module for module, _ in found} | {
        f"{at}.{each.strip()}" for at, names in found for each in names.split(",")
    }
    return {f"{module.replace('.', '/')}.py" for module in modules}


def test_every_data_path_of_the_architecture_is_a_path_of_the_code() -> None:
    """Each file is passed once, and two neighbours of one part are joined: one imports the other, or a third both."""
    text = (ROOT / "docs/architecture.md").read_text()
    walks = re.findall(r"^\| an? (batch|record|tick|delete) \| (.+) \|$", text, re.M)
    assert 4 == len(walks)

    for what, walk in walks:
        steps = [re.findall(r"`([a-z_/]+\.py)`", step) for step in walk.split("→")]
        files = [name for step in steps for name in step]
        assert len(set(files)) == len(files) >= 7, what
        for one, other in [(one, other) for before, after in pairwise(steps) for one in before for other in after]:
            part = one.partition("/")[0]
            if part != other.partition("/")[0]:
                continue
            inside = [
                str(path.relative_to(ROOT / "src/lakebed")) for path in (ROOT / "src/lakebed" / part).rglob("*.py")
            ]
            joined = [name for name in inside if {one, other} <= imported_by(name) | {name}]
            assert joined, (what, one, other)


def test_the_chart_and_its_page_have_the_same_numbers() -> None:
    """The picture is the one that its script draws, and the page states each total."""
    module = runpy.run_path(str(ROOT / "docs/charts/comparison.py"))
    page = (ROOT / "docs/cost.md").read_text()

    assert module["svg"]() == (ROOT / "docs/charts/comparison.svg").read_text()
    for name, cost in module["COSTS"].items():
        assert f"| {name} |" in page and f"| {sum(cost.values()):,.0f} |" in page
    for milliseconds in module["LATENCIES_MS"].values():
        assert f"{milliseconds:g} ms" in page


def test_every_price_has_one_source() -> None:
    """The page states each price and its date as the code has them; the chart computes with them, or with others."""
    module = runpy.run_path(str(ROOT / "docs/charts/comparison.py"))
    page = (ROOT / "docs/cost.md").read_text()
    doubled = {name: 2 * price for name, price in msgspec.structs.asdict(LIST_PRICES).items()}

    for price in msgspec.structs.asdict(LIST_PRICES).values():
        assert re.search(rf"\${price:g}0?\b", page), price
    assert AS_OF in page and AS_OF in module["svg"]() and AS_OF in (ROOT / "README.md").read_text()
    twice = module["costs"](msgspec.structs.replace(LIST_PRICES, **doubled))
    for name, cost in module["COSTS"].items():
        assert 2 * sum(cost.values()) == pytest.approx(sum(twice[name].values()))


def test_the_recording_is_drawn_from_a_run_and_shows_all_of_it() -> None:
    """Every line that was typed is in the picture, which is the one that its script draws and runs no script."""
    module = runpy.run_path(str(ROOT / "docs/recording/record.py"))
    events = [(at, text) for at, text in json.loads((ROOT / "docs/recording/quickstart.json").read_text())]
    picture = (ROOT / "docs/recording/quickstart.svg").read_text()

    assert module["svg"](events) == picture and "<script" not in picture
    assert [f"$ {command}" for command in module["COMMANDS"]] == [text for _, text in events if text.startswith("$ ")]
    assert not [text for _, text in events if "Traceback" in text]


def test_every_page_of_the_console_has_its_picture_in_the_documentation() -> None:
    """As `make screenshots` names them; no picture is there that no page shows."""
    shown = set(re.findall(r"screenshots/([\w-]+\.png)", "".join(page.read_text() for page in PAGES)))

    assert {f"{page.name}-light.png" for page in CONSOLE_PAGES} <= shown
    assert shown == {file.name for file in (ROOT / "docs/screenshots").glob("*.png")}
