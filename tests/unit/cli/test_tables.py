"""`lakebed tables forget`: how it ends, what it says, and what the trail keeps of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from lakebed.cli import exits
from lakebed.core.errors import Invalid
from lakebed.pipeline.tables import forget
from lakebed.pipeline.tables.forget import ForgetReport, ForgottenTable
from support.shell import Shell

DONE = ForgottenTable("bronze/orders", rows=2, version=4, gone_by="2026-11-20T00:00:00Z")
LATER = ForgottenTable("silver/orders", rows=1, version=9, gone_by="2026-12-24T00:00:00Z")
REFUSED = ForgottenTable("gold/orders", note="it is append-only", refused=True)
FORGET = ("tables", "forget", "acme/shop", "--key", "customer=c-1", "--key", "note=a=b")


class Report:
    """What the forgetter gives, and what it was asked for."""

    def __init__(self, *tables: ForgottenTable, complete: bool) -> None:
        self.tables, self.complete, self.asked = tables, complete, list[Any]()

    def run(self, project: str, keys: Mapping[str, str], *, only: str = "", **how: bool) -> ForgetReport:
        self.asked.append((project, dict(keys), only, how))
        return ForgetReport(project, self.tables, self.complete, "2026-11-18T00:00:00Z", how.get("dry_run", False))


@pytest.mark.parametrize(
    ("tables", "complete", "words", "code"),
    [
        ((DONE, LATER), True, (), exits.OK),
        ((DONE, LATER), True, ("--dry-run",), exits.OK),
        ((DONE, REFUSED), False, (), exits.FAILED),
        ((DONE, REFUSED), False, ("--purge",), exits.FAILED),
        ((DONE, REFUSED), False, ("--dry-run",), exits.OK),
        ((), False, (), exits.FAILED),
    ],
)
def test_a_forget_fails_while_rows_may_be_left(
    shell: Shell,
    monkeypatch: pytest.MonkeyPatch,
    tables: tuple[ForgottenTable, ...],
    complete: bool,
    words: tuple[str, ...],
    code: int,
) -> None:
    """So that a script runs it again; a dry run only shows. The last of all copies decides the date, and the trail has
    the number of rows and none of the values."""
    report, dry = Report(*tables, complete=complete), "--dry-run" in words
    monkeypatch.setattr(forget, "Forgetter", lambda context: report)

    ended, _, said = shell(*FORGET, *words, *(() if dry else ("--reason", "request 7")))

    rows, purge = sum(table.rows for table in tables), "--purge" in words
    assert code == ended
    assert f"{'would remove' if dry else 'removed'}: {rows} rows" in said.splitlines()
    assert ("hold copies until 2026-12-24T00:00:00Z" in said) == (LATER in tables)
    assert ("gold/orders was refused: it is append-only" in said) == (REFUSED in tables)
    assert ("not complete" in said) == (not complete) and "uploaded parts of ticks are deleted by 2026-11-18" in said
    asked = {"purge": purge} | ({"dry_run": True} if dry else {})
    assert [("acme/shop", {"customer": "c-1", "note": "a=b"}, "", asked)] == report.asked
    trail = [json.loads(asyncio.run(shell.store.get(key)).data) for key in shell.keys("trail/")]
    assert [] == trail if dry else trail and trail[-1]["reason"] == "request 7"
    assert "c-1" not in json.dumps(trail)


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--reason", " "),
        ("--key", "customer", "--reason", "r"),
        (
            "--key",
            " =x",
        ),
    ],
)
def test_a_forget_without_a_reason_or_with_half_a_key_changes_nothing(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    report = Report(DONE, complete=True)
    monkeypatch.setattr(forget, "Forgetter", lambda context: report)

    ended, _, _ = shell(*FORGET, *words)

    assert (exits.code_for(Invalid("")), [], []) == (ended, report.asked, shell.keys())
