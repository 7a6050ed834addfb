"""`lakebed queue` on the real bucket: what people type, and what they get."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from lakebed.cli import exits
from lakebed.cli.main import run
from lakebed.core.settings import env_name
from lakebed.store.settings import StoreSettings
from support.runtimes import runtime_of


@pytest.fixture
def lakebed(
    bucket_settings: StoreSettings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Any:
    """Runs one command line; gives its exit code, its data and its words."""
    monkeypatch.chdir(tmp_path)
    for key, value in bucket_settings.as_layer().items():
        monkeypatch.setenv(env_name(key), str(value))

    def command(line: str, *, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = run(line.split("|") if "|" in line else line.split())
        told = capsys.readouterr()
        return code, told.out, told.err

    return command


def test_what_is_put_is_seen_and_drained(lakebed: Any) -> None:
    """put, status, peek, dump and drain, one after the other; peeking takes nothing."""
    code, put, _ = lakebed("queue put --queue orders --key k -o json", stdin=b"one\ntwo\n")
    location = json.loads(put)["location"]
    _, status, _ = lakebed("queue status -o json")
    _, peeked, _ = lakebed("queue peek --queue orders -o json")
    _, batch, _ = lakebed(f"queue dump {location}")
    _, manifest, _ = lakebed("queue dump ingest/orders/manifest.json")
    _, _, would = lakebed("queue drain --queue orders --dry-run")
    _, drained, words = lakebed("queue drain --queue orders")
    _, again, _ = lakebed("queue drain --queue orders")
    _, _, cleaned = lakebed("queue sweep --queue orders")

    assert code == exits.OK
    assert [(row["queue"], row["pending"]) for row in json.loads(status)] == [("orders", 1)]
    assert json.loads(peeked)[0]["first"] == [{"key": "k", "value": "one"}, {"key": "k", "value": "two"}]
    assert (json.loads(batch)["kind"], json.loads(batch)["count"]) == ("binary batch", 2)
    assert json.loads(manifest)["object"]["pending"] == [location]
    assert "1 batches would be taken" in would
    assert [json.loads(line)["value"] for line in drained.splitlines()] == ["one", "two"]
    assert "1 batches were taken" in words
    assert again == ""
    assert "1 done batches and 0 orphans were deleted" in cleaned


@pytest.mark.full
def test_dead_letters_are_listed_shown_replayed_and_discarded(lakebed: Any, bucket_settings: StoreSettings) -> None:
    """A batch that cannot be read becomes a letter; closing one needs a reason, may be tried dry, is on record."""
    _, put, _ = lakebed("queue put --value fine -o json")
    _bury(bucket_settings)
    lakebed("queue drain")
    _, listed, _ = lakebed("queue dlq list -o json")
    letter = json.loads(listed)[0]["id"]
    _, shown, _ = lakebed(f"queue dlq show {letter}")
    without, _, why = lakebed(f"queue|dlq|discard|{letter}|--reason| ")
    _, _, would = lakebed(f"queue|dlq|discard|{letter}|--reason|a test|--dry-run")
    code, _, replayed = lakebed(f"queue|dlq|replay|{letter}|--reason|the reader was mended")
    lakebed("queue drain")
    _, relisted, _ = lakebed("queue dlq list -o json")
    second = json.loads(relisted)[0]["id"]
    _, _, discarded = lakebed(f"queue|dlq|discard|{second}|--reason|beyond repair")
    _, closed, _ = lakebed(f"queue dump ingest/manifest.closed/{second}.json")
    missing, _, told = lakebed(f"queue|dlq|show|{second}")
    _, trail, _ = lakebed("trail -o json")

    assert json.loads(put)["sequence"] == 1
    assert json.loads(shown)["undecodable"].startswith("corrupt")
    assert without != exits.OK
    assert "a reason is required" in why
    assert f"would discard {letter}" in would
    assert code == exits.OK
    assert "enqueued again as sequence 3" in replayed
    assert second != letter
    assert f"{second} was discarded" in discarded
    assert json.loads(closed)["object"]["reason"] == "beyond repair"
    assert missing != exits.OK
    assert "lakebed queue dlq list" in told
    assert [
        ("queue.discard", second, "beyond repair", "done"),
        ("queue.replay", letter, "the reader was mended", "done"),
    ] == [
        (deed["what"], deed["subject"]["letter"], deed["reason"], deed["outcome"])
        for deed in json.loads(trail)
        if "letter" in deed["subject"]
    ]


def _bury(settings: StoreSettings) -> None:
    """Enqueues a batch that nobody can read."""
    import asyncio

    from lakebed.core.clock import SystemClock
    from lakebed.core.ids import Ids
    from lakebed.core.metrics import Metrics
    from lakebed.queue.model import Append
    from lakebed.queue.roles import Queue
    from lakebed.queue.settings import QueueSettings
    from lakebed.store.connect import connect
    from lakebed.store.runtime import StoreRuntime

    async def work() -> None:
        clock, ids, metrics = SystemClock(), Ids(), Metrics()
        store = connect(settings, runtime_of(clock, ids, metrics))
        runtime = StoreRuntime(clock=clock, ids=ids, metrics=metrics, store=store)
        queue = Queue("default", QueueSettings(), runtime)
        await store.create("ingest/00000000/bad.batch", b"not a batch")
        await queue.producer.append([Append("test", 1, 0, "ingest/00000000/bad.batch", 11, 1)])

    asyncio.run(work())


def test_what_is_not_there_is_told(lakebed: Any) -> None:
    """A wrong name, a wrong key, nothing to put: one line on what, one on what next."""
    named, _, name_told = lakebed("queue peek --queue Orders!")
    keyed, _, _ = lakebed("queue dump ingest/nothing")
    empty, _, nothing = lakebed("queue put", stdin=b"")

    assert exits.OK not in (named, keyed, empty)
    assert "is invalid" in name_told
    assert "no entries" in nothing
