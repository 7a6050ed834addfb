"""`lakebed pipeline` as real processes on the real bucket: killed with -9 at two points, it ends where it should."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lakebed.cli import exits
from lakebed.core.settings import env_name
from lakebed.spark.location import Location
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings
from support.accepted_batches import BatchesYard
from support.process_output import line_of

DEADLINE_S = 300.0
pytestmark = pytest.mark.timeout(1200)

SUMS = """
from lakebed import pipeline as lp

@lp.table
def sums(seen: lp.Table["gold.seen"]):
    return seen.selectExpr("count(distinct id) as n")
"""
CONTRACT = "table: orders\nkeys: [id]\ncolumns:\n  id: {type: long, required: true}\n"


class Command:
    """Starts `lakebed …` in a folder of its own, with the bucket in its environment."""

    def __init__(self, settings: StoreSettings, folder: Path) -> None:
        self.folder, self.errors = folder, folder / "stderr"
        self._started: list[subprocess.Popen[str]] = []
        layer = {**settings.as_layer(), "spark.quick": "true", "spark.master": "local[2]", "bronze.step_objects": 2}
        self._env = {**os.environ, **{env_name(key): str(value) for key, value in layer.items()}}

    def start(self, *line: str) -> subprocess.Popen[str]:
        """Its words are in the file `errors`, where no full pipe can stop it."""
        with self.errors.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", "lakebed", *line],
                cwd=self.folder,
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    def run(self, *line: str, stdin: str = "") -> tuple[int, Any, str]:
        process = self.start(*line)
        out, _ = process.communicate(stdin, timeout=DEADLINE_S)
        return process.returncode, json.loads(out) if out.strip() else None, self.errors.read_text()

    def kill_when(self, happened: Callable[[], bool], *line: str) -> None:
        process = self.start(*line)
        deadline = time.monotonic() + DEADLINE_S
        while not happened():
            assert time.monotonic() < deadline, f"it never came so far: {self.errors.read_text()[-2000:]}"
            assert process.poll() is None, self.errors.read_text()[-2000:]
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=DEADLINE_S)

    def clear(self) -> None:
        """Ends what a failing test leaves."""
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate(timeout=DEADLINE_S)


@pytest.fixture
def command(bucket_settings: StoreSettings, tmp_path: Path) -> Iterator[Command]:
    made = Command(bucket_settings, tmp_path)
    yield made
    made.clear()


def keys(bucket: Store, prefix: str) -> list[str]:
    async def listed() -> list[str]:
        return [info.key async for info in bucket.list(prefix)]

    return asyncio.run(listed())


@pytest.mark.full
def test_killed_anywhere_the_next_run_ends_with_every_sample_once(command: Command, bucket: Store) -> None:
    """kill -9 when the first file is written and when the first commit exists: totals are exact, nothing is doubled."""
    test_env = BatchesYard(bucket)
    for n in range(9):
        test_env.accept(n * 10, n * 10 + 9, at_s=n)
    root = "tables/bronze/batches/lake/samples/"

    command.kill_when(lambda: any(key.endswith(".parquet") for key in keys(bucket, root)), "pipeline", "run")
    command.kill_when(lambda: bool(keys(bucket, f"{root}_delta_log/")), "pipeline", "run")
    code, reports, _ = command.run("pipeline", "run", "-o", "json")
    again, rest, _ = command.run("pipeline", "run", "-o", "json")

    assert (exits.OK, exits.OK) == (code, again)
    (report,) = [each for each in reports if each["table"] == "bronze/batches/lake/samples"]
    assert report["rows_in"] == report["good"] <= 90
    assert [0] == [each["rows_in"] for each in rest]
    entries = keys(bucket, f"{root}_delta_log/")
    assert 5 == len(entries)  # nine batches, two a commit
    assert 90 == sum(_rows(bucket, key) for key in entries)


@pytest.mark.full
def test_a_run_reports_what_it_set_aside_and_ends_non_zero(command: Command, bucket: Store) -> None:
    """A damaged batch is named on stderr and in the report, the rest is in the table; dry runs change nothing."""
    test_env = BatchesYard(bucket)
    for n in range(4):
        test_env.accept(n * 10, n * 10 + 9, at_s=n)
    damaged = test_env.damage(test_env.accept(40, 49, at_s=4))
    topics = command.folder / "topics"
    topics.mkdir()
    (topics / "orders.yaml").write_text(CONTRACT)
    (command.folder / "lakebed.toml").write_text('[bronze]\ntopics = "topics"\n')
    command.run("topics", "produce", "orders", stdin='{"id": 1}\nnonsense\n')

    code, reports, words = command.run("pipeline", "run", "-o", "json")
    _, planned, _ = command.run("pipeline", "compact", "--dry-run", "-o", "json")
    _, swept, _ = command.run("pipeline", "vacuum", "--dry-run", "-o", "json")

    assert code == exits.FAILED
    by_table = {each["table"]: each for each in reports}
    samples, orders = by_table["bronze/batches/lake/samples"], by_table["bronze/topics/lake/orders"]
    assert (50, 40, 10, 0) == tuple(samples[name] for name in ("rows_in", "good", "quarantined", "duplicates"))
    assert [damaged] == samples["unreadable"]
    assert f"quarantined: {damaged}" in words
    assert (2, 1, 1, 0) == tuple(orders[name] for name in ("rows_in", "good", "quarantined", "behind"))
    assert [("bronze/batches/lake/samples", 2)] == [(each["table"], each["files_joined"]) for each in planned]
    assert [] == swept


@pytest.mark.full
def test_following_takes_what_comes_later_until_it_is_told_to_stop(command: Command, bucket: Store) -> None:
    """Each run that found something is reported as a line; Ctrl-C ends it."""
    test_env = BatchesYard(bucket)
    test_env.accept(0, 9)
    process = command.start("pipeline", "run", "--follow", "--every-s", "0.2", "-o", "jsonl")

    reported = [json.loads(line_of(process, command.errors, within_s=DEADLINE_S))["good"]]
    test_env.accept(10, 14, at_s=1)  # only now: the first run would have taken it too, until the moment it was told
    reported.append(json.loads(line_of(process, command.errors, within_s=DEADLINE_S))["good"])
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=DEADLINE_S)

    assert ([10, 5], exits.INTERRUPTED) == (reported, process.returncode)


def _rows(bucket: Store, key: str) -> int:
    lines = asyncio.run(bucket.get(key)).data.splitlines()
    adds = [json.loads(line)["add"] for line in lines if b'"add"' in line[:10]]
    return sum(json.loads(add["stats"])["numRecords"] for add in adds)


@pytest.mark.full
def test_models_killed_anywhere_end_with_every_row_once(
    command: Command, bucket: Store, bucket_settings: StoreSettings
) -> None:
    """kill -9 when a run of an appending model has written its files: the next run adds each changed row once."""
    import deltalake
    import pyarrow as pa

    location = Location.of(bucket_settings)
    options = {"storage_options": location.storage_options()}

    def orders(begin: int, end: int) -> None:
        rows = pa.table({"id": pa.array(range(begin, end), pa.int64())})
        deltalake.write_deltalake(location.uri("tables/silver/acme/shop/orders"), rows, mode="append", **options)

    for folder, name, text in (
        ("contracts", "orders.yaml", CONTRACT),
        ("models", "seen.sql", "-- incremental: append\nselect id from {{ changes('orders') }}"),
        ("models", "sums.py", SUMS),
    ):
        (command.folder / folder).mkdir(exist_ok=True)
        (command.folder / folder / name).write_text(text)
    (command.folder / "lakebed.toml").write_text('[pipeline]\ncontracts = "contracts"\ngold = "models"\n')
    orders(0, 1000)
    first, reports, _ = command.run("pipeline", "run", "seen+", "-o", "json")
    orders(1000, 3000)
    before = set(keys(bucket, "tables/gold/acme/shop/seen/"))

    command.kill_when(
        lambda: any(key.endswith(".parquet") for key in set(keys(bucket, "tables/gold/acme/shop/seen/")) - before),
        *("pipeline", "run", "seen+"),
    )
    orders(3000, 3500)
    code, _, _ = command.run("pipeline", "run", "seen+", "-o", "json")
    _, again, _ = command.run("pipeline", "plan", "-o", "json")
    _, ran, _ = command.run("pipeline", "runs", "-o", "json")

    seen = deltalake.DeltaTable(location.uri("tables/gold/acme/shop/seen"), **options).to_pyarrow_table()
    sums = deltalake.DeltaTable(location.uri("tables/gold/acme/shop/sums"), **options).to_pyarrow_table()
    assert (exits.OK, exits.OK) == (first, code)
    assert [("seen", "made", 1000), ("sums", "made", 1)] == [
        (each["table"], each["state"], each["rows"]) for each in reports
    ]
    assert list(range(3500)) == sorted(seen["id"].to_pylist())
    assert [3500] == sums["n"].to_pylist()
    assert {"unchanged"} == {each["action"] for each in again}
    assert {"done"} == {each["state"] for each in ran}
