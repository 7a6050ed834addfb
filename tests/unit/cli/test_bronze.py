"""`lakebed bronze`: a replay packs the next attempt with the first one's keys; what cannot be replayed is refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lakebed.cli.where import Where
from lakebed.pipeline.bronze.runs import IngestReport
from lakebed.ticks import paths
from lakebed.ticks.fakes import FakeBronze
from lakebed.ticks.model import FinalizeResult, TickId
from lakebed.ticks.outbox import Outbox, OutboxTick
from lakebed.ticks.packing import PackedTick
from support.shell import Shell
from support.tick_fixtures import Service, parquet

ORG, PROJECT, TICK = "acme", "shop", "20261115T120000__abc"
WORDS = ("--org", ORG, "--project", PROJECT, "--tick", TICK, "--reason", "a rule was wrong")


def commit(shell: Shell) -> None:
    """A tick of two parts, committed as a gateway does."""

    async def work() -> None:
        context = shell.context_of(Where().settings(), role="test")
        service = Service(context, bronze=FakeBronze(context))
        await service.issue(ORG, PROJECT)
        manifest = await service.upload(TICK, org=ORG, project=PROJECT)
        answer = await service.finalize(manifest, tick=TICK, org=ORG, project=PROJECT)
        assert 200 == answer.status_code

    asyncio.run(work())


def test_a_dry_replay_shows_the_next_attempt_and_leaves_nothing(shell: Shell, tmp_path: Path) -> None:
    """Of corrected files, and of the parts that are kept: with the keys and the mode of the first manifest."""
    commit(shell)
    file = tmp_path / "orders.parquet"
    file.write_bytes(parquet([1], note="corrected"))

    _, given, _ = shell("bronze", "replay", str(file), *WORDS, "--dry-run")
    _, kept, _ = shell("bronze", "replay", *WORDS, "--dry-run")

    first, second = json.loads(given), json.loads(kept)
    assert f"{TICK}.r2" == first["tick_id"] == second["tick_id"]
    assert [("orders", "delta", ["id"], 1)] == [
        (table["name"], table["mode"], table["primary_keys"], table["row_count"]) for table in first["tables"]
    ]
    assert 5 == second["tables"][0]["row_count"]
    assert [] == shell.keys(f"{paths.REPLAYS}/") == shell.deeds()


@pytest.mark.parametrize("known", [True, False])
def test_a_tick_that_was_never_committed_or_whose_manifest_is_gone_is_refused(shell: Shell, known: bool) -> None:
    """The error names the tick, and the command that works without the first manifest."""
    if known:
        commit(shell)

        async def forget() -> None:
            store = shell.context_of(Where().settings(), role="test").store
            await store.delete(paths.state(TickId(ORG, PROJECT, TICK)))

        asyncio.run(forget())

    code, _, words = shell("bronze", "replay", *WORDS, "--dry-run")

    assert 0 != code
    assert (f"--tick {TICK}.r2" if known else f"no tick {TICK} is committed") in words


@pytest.mark.parametrize(("begin", "end"), [("2026-01-02", "2026-01-01"), ("2026-01-01", "2026-01-01")])
def test_an_empty_range_is_refused_before_spark_starts(shell: Shell, begin: str, end: str) -> None:
    """`--to` is exclusive."""
    code, _, words = shell("bronze", "backfill", "--from", begin, "--to", end, "--reason", "x")

    assert 0 != code
    assert "is empty" in words


def test_a_replay_sends_the_next_attempt_and_leaves_its_reason(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tick, the attempt and the reason are on record before anything is sent; the outbox is empty afterwards."""
    commit(shell)
    sent: list[PackedTick] = []

    class Sending:
        def __init__(self, http: Any, runtime: Any, **more: Any) -> None: ...

        async def deliver(self, outbox: Outbox, waiting: OutboxTick) -> FinalizeResult:
            sent.append(waiting.packed)
            return FinalizeResult(waiting.packed.tick_id, "committed", 0, 5, "now")

    monkeypatch.setenv("LAKEBED_TICKS_API_SECRET", "s3cret")
    monkeypatch.setattr("lakebed.ticks.uploader.Uploader", Sending)

    code, out, _ = shell("bronze", "replay", *WORDS, "--url", "http://gw:1", "-o", "json")

    assert (0, [f"{TICK}.r2"]) == (code, [row["tick_id"] for row in json.loads(out)])
    assert [(f"{TICK}.r2", 2)] == [(packed.tick_id, len(packed.files)) for packed in sent]
    assert 1 == len(shell.keys(f"{paths.REPLAYS}/{ORG}/{PROJECT}/{TICK}/"))
    (deed,) = shell.deeds()
    assert ("bronze.replay", "a rule was wrong") == (deed[0], deed[2])
    assert not any(Path(file).exists() for packed in sent for file in packed.files.values())


@pytest.mark.parametrize(("bad", "code"), [((), 0), (("k1",), 1)])
def test_process_loads_now_and_ends_non_zero_when_something_was_set_aside(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, bad: tuple[str, ...], code: int
) -> None:
    """Every source, whatever one of them holds; the load is in the audit trail."""
    loads = [IngestReport("bronze/batches/lake/samples", 3, rows_in=5, good=5), IngestReport("t", unreadable=bad)]

    class Loading:
        refined = None

        def __init__(self, context: Any) -> None: ...

        def run(self) -> list[IngestReport]:
            return loads

    monkeypatch.setattr("lakebed.pipeline.bronze.ingestion.Ingestion", Loading)

    found, out, _ = shell("bronze", "process", "-o", "json")

    assert code == found
    assert [("bronze/batches/lake/samples", 5), ("t", 0)] == [(row["table"], row["good"]) for row in json.loads(out)]
    assert ["bronze.process"] == [deed[0] for deed in shell.deeds()]


@pytest.mark.parametrize(
    ("report", "code"),
    [(None, 0), (IngestReport("s", 4, rows_in=9, good=9), 0), (IngestReport("s", 4, unreadable=("k",)), 1)],
)
def test_a_backfill_loads_its_range_and_a_dry_one_only_counts(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, report: IngestReport | None, code: int
) -> None:
    """From the first moment up to the second, in nanoseconds; only what is loaded is in the audit trail."""
    asked: list[tuple[str, int, int]] = []

    class Samples:
        table = SimpleNamespace(spec=SimpleNamespace(name="s"))

        def __init__(self, spark: Any, context: Any) -> None: ...

        def lacking(self, begin_ns: int, end_ns: int) -> int:
            asked.append(("lacking", begin_ns, end_ns))
            return 7

        def backfill(self, begin_ns: int, end_ns: int) -> IngestReport | None:
            asked.append(("backfill", begin_ns, end_ns))
            return report

    monkeypatch.setattr("lakebed.pipeline.bronze.samples.SampleLoader", Samples)
    monkeypatch.setattr("lakebed.spark.session.open_session", lambda settings: None)
    line = ("bronze", "backfill", "--from", "2026-11-01", "--to", "2026-11-02T00:00:01Z", "--reason", "restored")

    dry, counted, _ = shell(*line, "--dry-run", "-o", "json")
    before = shell.deeds()
    found, out, _ = shell(*line, "-o", "json")

    begin_s = 1_793_491_200
    span = (begin_s * 10**9, (begin_s + 86_401) * 10**9)
    assert [("lacking", *span), ("backfill", *span)] == asked
    assert (0, [{"table": "s", "batches": 7}], []) == (dry, json.loads(counted), before)
    assert (code, [4] if report else []) == (found, [row["version"] for row in json.loads(out)])
    assert [("bronze.backfill", "restored")] == [(deed[0], deed[2]) for deed in shell.deeds()]
