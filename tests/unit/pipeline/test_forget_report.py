"""What a report of forgetting says when a table did not take part."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lakebed.core.clock import ManualClock
from lakebed.core.errors import Invalid
from lakebed.core.settings import Settings
from lakebed.pipeline.tables.forget import Forgetter, ForgottenTable


@pytest.mark.parametrize(
    ("refuses", "read", "complete"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_forgetting_is_complete_only_when_no_table_refused_and_silver_has_read_all(
    monkeypatch: pytest.MonkeyPatch, manual_clock: ManualClock, refuses: bool, read: bool, complete: bool
) -> None:
    """A table that Lakebed may not write keeps its rows: whoever asked must hear of it, and the others go on."""

    async def tables(self: Forgetter, project: str, only: str) -> list[tuple[str, str]]:
        return [("bronze", "theirs"), ("bronze", "ours")]

    def forget(self: Forgetter, layer: str, name: str, keys: Any, **_: Any) -> ForgottenTable:
        if name == "theirs" and refuses:
            raise Invalid("another engine's table")
        return ForgottenTable(name, rows=2, version=1)

    monkeypatch.setattr(Forgetter, "_tables", tables)
    monkeypatch.setattr(Forgetter, "_forget", forget)
    monkeypatch.setattr(Forgetter, "_complete", lambda *_: read)
    forgetter = object.__new__(Forgetter)
    forgetter._context = SimpleNamespace(settings=Settings({}, {}), clock=manual_clock)  # type: ignore[assignment]

    report = forgetter.run("acme/shop", {"customer": "c-1"})

    assert (complete, 2 if refuses else 4) == (report.complete, report.rows)
    assert [refuses, False] == [one.refused for one in report.tables]
