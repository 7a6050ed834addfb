"""`lakebed meta`, on a file of this test's own and on a store in memory."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from lakebed.cli import exits
from lakebed.cli.main import run
from lakebed.core.clock import SystemClock
from lakebed.core.errors import Invalid
from lakebed.core.ids import Ids
from lakebed.core.metrics import Metrics
from lakebed.core.runtime import Runtime
from lakebed.meta.sqlite.backend import SqliteMeta


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stack and no settings file but what the test sets."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LAKEBED_STORE_URL", "memory:")


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedded meta store with a control record and a value that is no text."""
    path = tmp_path / "meta.sqlite"
    monkeypatch.setenv("LAKEBED_META_BACKEND", "sqlite")
    monkeypatch.setenv("LAKEBED_META_PATH", str(path))

    async def fill() -> None:
        meta = SqliteMeta(Runtime(SystemClock(), Ids(), Metrics()), path)
        await meta.put("llog/orders/partitions/0/meta/control", b'{"log_state":"OPEN"}', partition_key="orders:0")
        await meta.put("llog/orders/partitions/0/odd", b"\xff\x00", partition_key="orders:0")
        await meta.close()

    asyncio.run(fill())


def test_an_entry_is_shown_with_its_value_decoded(filled: None, capsys: pytest.CaptureFixture[str]) -> None:
    """JSON in a value is JSON in the output."""
    code = run(["meta", "get", "llog/orders/partitions/0/meta/control", "-g", "orders:0", "-o", "json"])

    assert code == exits.OK
    assert json.loads(capsys.readouterr().out)["value"] == {"log_state": "OPEN"}


def test_a_scan_shows_every_entry_below_a_prefix(filled: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Values that are no text do not break a listing."""
    code = run(["meta", "scan", "llog/orders/", "-o", "jsonl"])

    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == exits.OK
    assert [row["key"].rsplit("/", 1)[-1] for row in rows] == ["control", "odd"]


def test_what_only_the_bucket_has_is_refused_elsewhere(filled: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Heads and leaves of another backend are not made up."""
    assert run(["meta", "dump", "orders:0"]) == exits.code_for(Invalid(""))
    assert "meta.backend" in capsys.readouterr().err


def test_a_group_that_was_never_written_has_an_empty_head(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dump, groups and a dry sweep of an empty bucket show nothing and change nothing."""
    monkeypatch.setenv("LAKEBED_META_BACKEND", "bucket")

    codes = [run(["meta", "groups"]), run(["meta", "sweep", "--dry-run"]), run(["meta", "dump", "orders:0"])]

    head = json.loads(capsys.readouterr().out)
    assert codes == [exits.OK] * 3
    assert (head["hot"], head["refs"], head["version"]) == ([], [], 0)


def test_a_scan_ends_at_its_limit_and_shows_one_group_where_it_is_named(
    filled: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A limit bounds the rows; a group's name selects its own."""
    found = []
    for words in (["--limit", "1"], ["-g", "orders:0"]):
        assert exits.OK == run(["meta", "scan", "llog/orders/", "-o", "jsonl", *words])
        found.append(len(capsys.readouterr().out.splitlines()))

    assert [1, 2] == found
