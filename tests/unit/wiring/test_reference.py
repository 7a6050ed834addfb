"""The reference is made from what runs, and what is committed is what is made."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from lakebed.core.metrics import TABLE
from lakebed.core.settings import is_public
from lakebed.wiring import reference
from lakebed.wiring.parts import sections
from lakebed.wiring.reference import write
from support.doc_commands import ROOT

PAGES = reference.pages()


@pytest.mark.parametrize("name", sorted(PAGES))
def test_a_committed_page_is_current(name: str) -> None:
    """A change of a command, a setting, a metric, a route or an alert comes with its page: `make docs`."""
    assert PAGES[name] == (ROOT / name).read_text(encoding="utf-8")


def test_every_setting_metric_route_and_command_is_there() -> None:
    """Nothing a user can set, read, call or type is undocumented."""
    from lakebed.cli.main import COMMANDS

    for kind in sections():
        for field in kind.__struct_fields__:
            page = "settings.md" if is_public(kind, field) else "settings-advanced.md"
            assert f"`{kind.section}.{field}`" in PAGES[f"docs/reference/{page}"]
    for metric in TABLE:
        assert f"`{metric.name}`" in PAGES["docs/reference/metrics.md"]
    for path in reference.description()["paths"]:
        assert f"`{path}`" in PAGES["docs/reference/http.md"]
    for command in COMMANDS:
        assert f"## lakebed {command.name}\n" in PAGES["docs/reference/commands.md"]


def test_pages_carry_no_machine_and_no_secret() -> None:
    """The same text on any machine: no host, no home, no process."""
    for name, text in PAGES.items():
        for word in (str(ROOT), f"{Path.home()}/", f"{socket.gethostname()}-"):
            assert word not in text, f"{name} carries {word}"


def test_only_what_changed_is_written(tmp_path: Path) -> None:
    """A second run of `make docs` writes nothing; a page that somebody edited is made again."""
    first = write(tmp_path, PAGES)
    second = write(tmp_path, PAGES)
    (tmp_path / "docs/reference/http.md").write_text("edited")

    assert sorted(PAGES) == sorted(first)
    assert [] == second
    assert ["docs/reference/http.md"] == write(tmp_path, PAGES)
