"""Command lines of one test on one bucket in memory."""

from __future__ import annotations

import asyncio
import io
import json
from typing import Any

import pytest

from lakebed.cli.main import run
from lakebed.core.clock import SystemClock
from lakebed.core.context import Context
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.settings import Settings
from lakebed.store.memory import MemoryStore


class AheadClock(SystemClock):
    """The system's clock, ahead by as much as a test reports: hours pass without waiting for them."""

    ahead_s = 0.0

    def now_ns(self) -> int:
        return super().now_ns() + round(self.ahead_s * 1e9)


class Shell:
    """Runs command lines given as words, and keeps the store that they share."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.clock = AheadClock()
        self.store = MemoryStore(clock=self.clock)
        self.contexts: list[Context] = []

    def context_of(self, settings: Settings, *, role: str) -> Context:
        made = Context(
            node=f"{role}-node", settings=settings, store=self.store, clock=self.clock, ids=Ids(), metrics=Metrics()
        )
        self.contexts.append(made)
        return made

    def __call__(self, *words: str, stdin: bytes = b"") -> tuple[int, str, str]:
        """The exit code, the data on stdout and the words on stderr."""
        self._monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = run(words)
        reported = self._capsys.readouterr()
        return code, reported.out, reported.err

    def data(self, *words: str, stdin: bytes = b"") -> Any:
        """The data of a command that succeeds, decoded from `-o json`."""
        code, out, err = self(*words, "-o", "json", stdin=stdin)
        assert code == 0, err
        return json.loads(out)

    def keys(self, prefix: str = "") -> list[str]:
        """The keys of the bucket below a prefix."""

        async def listed() -> list[str]:
            return [info.key async for info in self.store.list(prefix)]

        return asyncio.run(listed())

    def deeds(self) -> list[tuple[str, dict[str, str], str, str, str]]:
        """What the trail holds, newest first: what, subject, reason, outcome, detail."""
        rows = self.data("trail")
        return [(row["what"], row["subject"], row["reason"], row["outcome"], row["detail"]) for row in rows]
