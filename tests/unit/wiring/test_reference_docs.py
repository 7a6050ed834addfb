"""The documentation refers only to what exists: files, headings, commands, settings, metrics and tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lakebed.core.metrics import TABLE
from lakebed.wiring.parts import PARTS, sections
from support.doc_commands import ROOT, commands, misunderstood

MADE = {"docs/reference"}
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if path.parent.relative_to(ROOT).as_posix() not in MADE
)
SETTINGS = {f"{kind.section}.{field}" for kind in sections() for field in kind.__struct_fields__}
FIRST = {kind.section for kind in sections()}
METRICS = {metric.name for metric in TABLE}
FILES = (".py", ".md", ".toml", ".json", ".yaml", ".html", ".css", ".sqlite", ".batch", ".consumer", ".dead", ".closed")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def anchors(path: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    """A link to a file finds it, and one to a heading finds that too."""
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), f"{page} links to {target}"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_shown_would_be_understood(page: str) -> None:
    """Each `lakebed …` line of a code block is parsed by the command itself, and would not be refused."""
    for line in commands(text_of(page)):
        if "|" in line.split("#")[0] and re.search(r"\w \| \w", line):
            continue  # a list of verbs: `lakebed queue status | peek | dump`
        assert "" == misunderstood(line), f"{page}: {line}"


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_and_metric_named_exists(page: str) -> None:
    """A key in backquotes that begins with a section is a setting; a lakebed_ name is a metric."""
    text = text_of(page)
    for name in re.findall(r"`([a-z]+\.[a-z0-9_]+)(?: ?=[^`]*)?`", text):
        if name.split(".")[0] in FIRST and not name.endswith(FILES) and "(" not in name:
            assert name in SETTINGS or name in ALLOWED, f"{page} names {name}"
    for name in re.findall(r"\blakebed_[a-z0-9_]+[a-z0-9]\b(?!\*)", text):
        base = re.sub(r"_(bucket|sum|count)$", "", name)
        assert {name, base} & METRICS or any(known.startswith(f"{name}_") for known in METRICS), f"{page} names {name}"


ALLOWED = {"store.protocol", "store.register", "store.lease", "store.prover", "gateway.log"}  # modules and a file


def test_every_promise_names_a_test_that_exists() -> None:
    """Each row of the guarantees has at least one test, and every test it names is there."""
    rows = [line for line in text_of("docs/guarantees.md").splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 40
    for row in rows:
        last = ""
        found = re.findall(r"`([^`]+)`", row.rsplit("|", 2)[1])
        assert found, f"no test: {row}"
        for each in found:
            path, _, name = each.partition("::")
            path = path or last
            last = path
            assert (ROOT / path).exists(), f"{each} of: {row}"
            if name:
                assert re.search(rf"\b{name}\b", (ROOT / path).read_text()), f"{each} of: {row}"


PART_PAGES = [page for page in PAGES if page.startswith("docs/parts/")]
PAGE_OF = {"silver": "ticks", "spark": "pipeline", "bronze": "pipeline", "reconciler": "batches"}


def test_every_part_has_a_page() -> None:
    """Whatever plugs into the table of parts is described, and the README lists it."""
    readme = text_of("README.md")
    for part in PARTS:
        page = f"docs/parts/{PAGE_OF.get(part.name, part.name)}.md"
        assert page in PART_PAGES, f"{part.name} has no page"
        assert page in readme, f"the README does not list {page}"


@pytest.mark.parametrize("page", PART_PAGES)
def test_a_part_s_page_has_what_a_reader_looks_for(page: str) -> None:
    """Why it is there, a picture, how to use it, what it promises, what it stores and what it counts."""
    text = text_of(page)
    wanted = {
        "why": "\n## Why\n",
        "a picture": r"```[\s\S]*?[│▶└┌─][\s\S]*?```|```mermaid",
        "use": r"lakebed [a-z]+ [a-z-]+|lakebed (?:up|work|serve|sim|status)|```python",
        "guarantees": r"\.\./guarantees\.md",
        "formats": r"\.\./formats/|Formats: it stores nothing",
        "metrics": r"\.\./reference/metrics\.md",
    }

    assert [] == [what for what, pattern in wanted.items() if not re.search(pattern, text)]


@pytest.mark.parametrize("page", PART_PAGES)
def test_a_part_s_page_begins_with_its_purpose_a_command_and_a_picture(page: str) -> None:
    """Two sentences, commands that exist (the commands of all pages are checked), and a picture; then the reasons."""
    begin, *blocks = re.split(r"^```", text_of(page).partition("\n## ")[0], flags=re.M)
    sentences = re.split(r"(?<=[.?!])\s+(?=[A-Z`\[])", begin.partition("\n")[2].strip())

    assert 2 == len(sentences), sentences
    assert re.search(r"(?m)^(\S.*\| )?lakebed [a-z]+", blocks[0]), "no command comes first"
    assert re.search(r"[│▶└┌─]", blocks[2]) or "![" in blocks[-1], "no picture follows"
