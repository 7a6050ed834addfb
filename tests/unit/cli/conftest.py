"""A shell for command tests: every command line of one test works on the same bucket in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lakebed.core.context import Context
from support.shell import Shell


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "LAKEBED_STORE_URL": "memory:",
        "LAKEBED_META_BACKEND": "sqlite",
        "LAKEBED_META_PATH": str(tmp_path / "meta.sqlite"),
        "LAKEBED_TICKS_PIPELINE": "twin",
        "LAKEBED_TICKS_PAYLOAD_KEY": "0123456789abcdef0123456789abcdef0123456789A=",
    }.items():
        monkeypatch.setenv(name, value)
    made = Shell(monkeypatch, capsys)
    context_of: Callable[..., Context] = made.context_of
    monkeypatch.setattr("lakebed.wiring.context.make_context", context_of)
    return made
