"""What the documents report people to type and to set exists. The references are made from what runs, and checked."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TYPED = sorted(
    page
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if "reference" not in page.relative_to(ROOT).parts
)
COMMON = {"--help", "--version"}
WORD = re.compile(r"[a-z][a-z-]*")


def commands() -> dict[tuple[str, ...], set[str]]:
    """Every command by its words, with its options."""
    found: dict[tuple[str, ...], set[str]] = {(): set()}
    here: tuple[str, ...] = ()
    for line in (ROOT / "docs/reference/commands.md").read_text().splitlines():
        if named := re.match(r"#+ lakebed (.+)", line):
            here = tuple(named[1].split())
            found[here] = set()
        elif line.startswith("* `-"):
            found[here] |= set(re.findall(r"--?[a-z][a-z-]*", line.split("`")[1]))
    return found


def settings() -> tuple[set[str], set[str]]:
    """Every setting, and every variable."""
    text = "".join((ROOT / "docs/reference" / name).read_text() for name in ("settings.md", "settings-advanced.md"))
    return set(re.findall(r"^\| `([a-z_.]+)`<br>", text, re.M)), set(re.findall(r"`(LAKEBED_[A-Z_]+)`", text))


COMMANDS = commands()
SETTINGS, VARIABLES = settings()
SECTIONS = {name.partition(".")[0] for name in SETTINGS}


def typed(page: Path) -> list[str]:
    """What a page has people type: spans that begin with the command, and such lines of blocks, one command each."""
    text = page.read_text()
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.M | re.S)
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    lines = [
        line.strip().split("   ")[0].split("  #")[0]
        for block in blocks
        for line in block.replace("\\\n", " ").splitlines()
    ]
    pieces = [piece for line in [*lines, *spans] for piece in re.split(r"\s\|\s|&&|;|\$\(", line)]
    return [
        found[1] for piece in pieces if (found := re.match(r"\s*(?:\$ )?(?:\S*/)?lakebed((?:\s+[^\s].*)?)$", piece))
    ]


def wrong(line: str) -> str:
    """What is wrong with a typed command; empty: nothing."""
    words = line.replace("[", " ").replace("]", " ").split()
    here: tuple[str, ...] = ()
    while len(words) > len(here) and (*here, words[len(here)]) in COMMANDS:
        here = (*here, words[len(here)])
    group = any(len(each) > len(here) and each[: len(here)] == here for each in COMMANDS)
    rest = words[len(here) :]
    if group and rest and WORD.fullmatch(rest[0]):
        return f"there is no command {' '.join([*here, rest[0]])!r}"
    known = COMMANDS[here] | COMMON
    unknown = [word for word in rest if (flag := re.match(r"--[a-z][a-z-]*", word)) and flag[0] not in known]
    return f"{' '.join(here)!r} has no {unknown}" if unknown and not group else ""


@pytest.mark.parametrize("page", TYPED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_a_page_has_people_type_exists(page: Path) -> None:
    """With every option that it is given."""
    assert [] == [f"lakebed{line}: {why}" for line in typed(page) if (why := wrong(line))]


@pytest.mark.parametrize("page", TYPED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_setting_and_variable_that_a_page_names_exists(page: Path) -> None:
    """As `section.name`, and as the variable of the environment."""
    text = page.read_text()
    named = re.findall(r"`([a-z]+\.[a-z_]+)(?: ?=[^`]*)?`", text)
    unknown = [
        name
        for name in named
        if name.partition(".")[0] in SECTIONS
        and name not in SETTINGS
        and not name.endswith(".log")
        and not (ROOT / f"src/lakebed/{name.replace('.', '/')}.py").exists()  # a module is named so too
    ]
    assert [] == unknown + [name for name in re.findall(r"\bLAKEBED_[A-Z_]*[A-Z]\b", text) if name not in VARIABLES]


@pytest.mark.parametrize("page", TYPED, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_settings_file_that_a_page_shows_could_be_read(page: Path) -> None:
    """Each name in it is a setting, where its section is one of ours."""
    blocks = re.findall(r"^```[a-z]*\n(.*?)^```", page.read_text(), re.M | re.S)
    begins = [(block, re.search(r"^\[[a-z.]+\](?:\s*#.*)?$", block, re.M)) for block in blocks]
    files = [tomllib.loads(block[at.start() :]) for block, at in begins if at]
    named = {f"{section}.{name}" for file in files for section in SECTIONS & set(file) for name in file[section]}
    assert set() == named - SETTINGS


def test_the_check_itself_finds_what_does_not_exist() -> None:
    """A command, an option and a group's command that are not there."""
    assert wrong(" batches reconcile --cold") == ""
    assert "no command" in wrong(" batches mend")
    assert "--warm" in wrong(" batches reconcile --warm")
    assert "no command" in wrong(" lifecycle rules tidy")
