"""`lakebed pipeline rollup` and `lakebed batches query` on a real bucket: what people type, and what scripts trust."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from pyspark.sql import SparkSession

from lakebed.batches.model import Sample
from lakebed.cli import exits
from lakebed.cli.main import run
from lakebed.core.clock import SystemClock
from lakebed.core.settings import env_name
from lakebed.spark.settings import SparkSettings
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from support.bad_batches import BAD, BLOBS, ENTRIES, spoil, told_key
from support.rollup_fixtures import accept, by_hand, frame

pytestmark = pytest.mark.timeout(600)
MINUTE_NS = 60 * 10**9
# Rollups read by hash: an entry that does not give one is as good as none.
PROBLEMS = BLOBS | dict.fromkeys(ENTRIES, "its entry in the index is missing or damaged")


@pytest.fixture
def command(
    spark: SparkSession,
    spark_settings: SparkSettings,
    bucket_settings: StoreSettings,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Any:
    """Runs `lakebed …` on the bucket and the session of this lane; gives its exit code, its data and its words."""
    for key, value in (bucket_settings.as_layer() | spark_settings.as_layer()).items():
        monkeypatch.setenv(env_name(key), str(value).lower() if isinstance(value, bool) else str(value))

    def ask(*line: str) -> tuple[int, Any, str]:
        capsys.readouterr()
        code = run(list(line))
        output = capsys.readouterr()
        return code, json.loads(output.out) if output.out.strip() else None, output.err

    return ask


def test_what_cannot_be_read_is_set_aside_by_key_and_the_rest_is_rolled_up_and_asked_for(
    command: Any, bucket: Store
) -> None:
    """Every kind of bad batch is named and ends the command with 1; windows come from rollups, and report it."""
    now_ns = SystemClock().now_ns()
    begin_ns = now_ns // MINUTE_NS * MINUTE_NS - 10 * MINUTE_NS
    reported = [(f"good-{n}", Sample("cpu", begin_ns + n * 10**9 + i, i + n / 8)) for n in range(3) for i in range(5)]
    for agent in sorted({agent for agent, _ in reported}):
        held = [sample for name, sample in reported if name == agent]
        asyncio.run(accept(bucket, frame(agent, 0, held), now_ns - 10**9))
    bad = {}
    for number, how in enumerate(BAD):
        made = asyncio.run(accept(bucket, frame("bad", number, [Sample("cpu", begin_ns, 1.0)]), now_ns - 2 * 10**9))
        bad[told_key(asyncio.run(spoil(bucket, made, how)), how)] = how

    code, report, words = command("pipeline", "rollup", "--engine", "spark")
    again, second, _ = command("pipeline", "rollup", "--engine", "local")
    requested, answer, source = command(
        "batches", "query", "cpu", "--window-s", "60", "--q", "0.5", "--q", "1", "-o", "json"
    )
    refused, nothing, why = command("batches", "query", "cpu", "--q", "0.5")

    assert (exits.FAILED, 3, 15) == (code, report["batches"], report["samples"])
    assert bad.keys() == {each["key"] for each in report["unreadable"]}
    for each in report["unreadable"]:
        assert PROBLEMS[bad[each["key"]]] in each["problem"]
        assert f"skipped: {each['key']}" in words
    assert report["unreadable"] == second["unreadable"]
    assert (exits.FAILED, 0, bad.keys()) == (again, second["samples"], {each["key"] for each in second["unreadable"]})
    assert (exits.OK, 60, 1) == (requested, answer["resolution_s"], answer["sources"]["rollup"])
    assert "from rollups of 60 s: 1 rollup" in source
    found = {series["labels"]["agent_id"]: series["buckets"] for series in answer["series"]}
    wanted = {dict(labels)["agent_id"]: windows for labels, windows in by_hand(reported, "cpu", 60).items()}
    assert wanted == {agent: {row[0]: tuple(row[:8]) for row in rows} for agent, rows in found.items()}
    assert all(abs(row[8][0] - 2) < 1 and row[8][1] == row[4] for rows in found.values() for row in rows)
    assert any("6 accepted batches cannot be read" in each for each in answer["why_partial"])
    assert (3, None) == (refused, nothing)
    assert "--window-s" in why


def test_other_windows_than_those_of_the_first_run_are_refused(
    command: Any, bucket: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting that was changed ends the command with Invalid and what to do; nothing is touched."""
    now_ns = SystemClock().now_ns()
    asyncio.run(accept(bucket, frame("a", 0, [Sample("cpu", now_ns, 1.0)]), now_ns - 10**9))
    assert command("pipeline", "rollup", "--engine", "local")[0] == exits.OK
    monkeypatch.setenv(env_name("rollups.windows_s"), "[10, 60]")

    code, report, words = command("pipeline", "rollup", "--engine", "local")

    assert (3, None) == (code, report)
    assert "the stored rollups have [60, 300, 3600] s" in words
    assert "rollups.windows_s" in words
