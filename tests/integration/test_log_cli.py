"""`lakebed topics` on a real bucket: lines in, records out, offsets as people write them."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from lakebed.cli.main import run
from lakebed.core.settings import env_name
from lakebed.store.settings import StoreSettings


class Shell:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        self._monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(stdin)))
        code = run(["topics", *arguments])
        output = self._capsys.readouterr()
        return code, output.out, output.err


@pytest.fixture
def shell(
    bucket_settings: StoreSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Shell:
    settings = {
        "store.url": bucket_settings.url,
        "store.prefix": bucket_settings.prefix,
        "store.endpoint": bucket_settings.endpoint,
        "store.access_key_id": bucket_settings.access_key_id.reveal(),
        "store.secret_access_key": bucket_settings.secret_access_key.reveal(),
        "meta.path": str(tmp_path / "meta.sqlite"),
    }
    for key, value in settings.items():
        monkeypatch.setenv(env_name(key), value)
    monkeypatch.chdir(tmp_path)
    return Shell(monkeypatch, capsys)


def test_lines_go_in_and_come_out_from_wherever_they_are_asked_for(shell: Shell) -> None:
    """start, end, a number, from the end, a time; text, a format, JSON; a group continues where it stopped."""
    code, out, _ = shell("produce", "orders", stdin=b"a\nb\nc\nd\n")

    assert code == 0 and msgspec.json.decode(out)["end_offset"] == 4
    assert shell("consume", "orders")[1] == "a\nb\nc\nd\n"
    assert shell("consume", "orders", "--offset", "-2")[1] == "c\nd\n"
    assert shell("consume", "orders", "--offset", "end")[1] == ""
    assert shell("consume", "orders", "--offset", "@0", "-c", "1")[1] == "a\n"
    assert shell("consume", "orders", "--offset", "2999-01-01")[1] == ""
    assert shell("consume", "orders", "-o", "3", "-c", "1", "-f", "%t/%p %o %S %% %s\\n")[1] == "orders/0 3 1 % c\n"
    assert msgspec.json.decode(shell("consume", "orders", "-o", "4", "-f", "json")[1])["record"] == "d"
    assert shell("consume", "orders", "--group", "g", "-c", "3")[1] == "a\nb\nc\n"
    assert shell("consume", "orders", "--group", "g")[1] == "d\n"
    assert shell("seek", "orders", "--group", "g", "--to", "-2", "--reason", "again", "--dry-run")[0] == 0
    assert shell("consume", "orders", "--group", "g")[1] == ""
    assert shell("seek", "orders", "--group", "g", "--to", "-2", "--reason", "again")[0] == 0
    assert shell("consume", "orders", "--group", "g")[1] == "c\nd\n"
    rows = msgspec.json.decode(shell("list", "-o", "json")[1])
    assert rows == [{"topic": "orders", "partitions": 1, "records": 4, "uncompacted": 4}]
    report = msgspec.json.decode(shell("report", "-o", "json")[1])
    assert (report["stored_objects"], report["groups"][0]["lag"]) == (1, 0)


def test_what_destroys_needs_a_reason_and_can_be_tried_dry(shell: Shell) -> None:
    """Trim, fence and delete report what they would do, do it, and refuse without a reason."""
    shell("produce", "orders", stdin=b"a\nb\nc\n")

    assert shell("trim", "orders", "--before", "2")[0] != 0
    assert shell("trim", "orders", "--before", "2", "--reason", "r", "--dry-run")[0] == 0
    assert shell("consume", "orders")[1] == "a\nb\nc\n"
    assert shell("trim", "orders", "--before", "2", "--reason", "r")[0] == 0
    assert shell("consume", "orders")[1] == "b\nc\n"
    assert shell("fence", "orders", "--reason", "stop")[0] == 0
    code, _, output = shell("produce", "orders", stdin=b"d\n")
    assert code != 0 and "fenced: stop" in output and "unfence" in output
    assert shell("unfence", "orders")[0] == 0
    assert shell("delete", "orders", "--reason", "done")[0] == 0
    assert "nothing" in shell("list")[2]
    code, _, output = shell("consume", "nowhere")
    assert code != 0 and "does not exist" in output
