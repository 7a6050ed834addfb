"""`lakebed queue drain` prints before it acks: what was not printed whole stays in the queue."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lakebed.cli import exits
from support.shell import Shell


def test_entries_that_could_not_be_printed_are_not_lost(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk behind stdout is full in the middle of a batch: the next drain gives all of it again."""
    shell("queue", "put", stdin=b"one\ntwo\n")
    printed: list[str] = []

    def full(line: str, **more: Any) -> None:
        if printed:
            raise OSError("no space left on the device")
        printed.append(line)

    with monkeypatch.context() as patched:
        patched.setattr("lakebed.queue.commands.print", full, raising=False)
        code, _, told = shell("queue", "drain")
    assert exits.FAILED == code
    assert "no space left" in told
    code, out, _ = shell("queue", "drain")

    assert exits.OK == code
    assert ["one", "two"] == [json.loads(line)["value"] for line in out.splitlines()]
