from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def refusals_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only a test moves would hold every refusal back; one test measures the time itself."""
    monkeypatch.setattr("lakebed.ticks.vault.REFUSAL_S", 0.0)
