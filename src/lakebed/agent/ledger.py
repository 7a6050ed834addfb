"""What left the queue without being accepted, and why: one JSON line each, kept across restarts, bounded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from lakebed.agent.files import Files
from lakebed.agent.model import LedgerVerb

LEDGER_BYTES_MAX = 4 * 1024 * 1024  # then the file becomes `ledger.1.jsonl` and a new one begins


class Ledger:
    def __init__(self, path: Path, files: Files, now_ms: Callable[[], int]) -> None:
        self._path, self._files, self._now_ms = path, files, now_ms

    def note(self, what: LedgerVerb, **facts: Any) -> None:
        """Adds a line, synced. A disk that refuses the line must not stop the agent: the metrics still count."""
        line = msgspec.json.encode({"at_ms": self._now_ms(), "what": what, **facts}) + b"\n"
        with contextlib.suppress(OSError):
            if self._path.exists() and self._path.stat().st_size + len(line) > LEDGER_BYTES_MAX:
                self._path.replace(self._path.with_suffix(".1.jsonl"))
            self._files.append(self._path, line)
