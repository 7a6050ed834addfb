"""An audit's decisions around its joins: how old is judged, what garbage collection may rely on, what is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyarrow.fs import LocalFileSystem
from pyspark.errors import PySparkException

from lakebed.batches.model import AuditWorkFile
from lakebed.core.context import Context
from lakebed.core.errors import Corrupt, Unavailable
from lakebed.core.settings import load
from lakebed.delta.log import log_key
from lakebed.delta.model import Snapshot
from lakebed.pipeline.audit import job, sums
from lakebed.pipeline.audit.conservation import (
    FOREVER_NS,
    NOTES_MAX,
    ConservationCheck,
    conservation_row,
    read_rollup_state,
)
from lakebed.pipeline.audit.job import INVENTORY_MARGIN_NS, BucketAuditor, is_wrong, writing
from lakebed.pipeline.audit.model import FindingTotal
from lakebed.pipeline.bronze.numbering import note_of
from lakebed.rollups.model import RollupState
from lakebed.rollups.paths import ROLLER_STATE
from lakebed.spark.listing import Listing
from lakebed.wiring.context import make_context
from lakebed.wiring.parts import sections
from support.audit_record import RECORD
from support.fake_tables import FakeFunctions, FakeTable

S = 10**9


@pytest.fixture
def context() -> Context:
    flags = {"store.url": "memory:", "audit.grace_s": 300}
    return make_context(load(sections(), flags=flags), role="test")


class Rows:
    """A frame of so many rows."""

    def __init__(self, count: int = 0, first: tuple[int, ...] = ()) -> None:
        self._count, self._first = count, first

    def limit(self, most: int) -> Rows:
        return Rows(min(self._count, most))

    def count(self) -> int:
        return self._count

    def first(self) -> tuple[int, ...]:
        return self._first

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **more: self


def listing(source: str = "list", closed: list[str] | None = None) -> Listing:
    class Taken(Rows):
        def unpersist(self) -> None:
            (closed if closed is not None else []).append("closed")

    rows: Any = Taken(first=(5, 2))
    return Listing(rows, 1_000_000 * S, source, 7)


def test_what_is_younger_than_the_grace_is_not_judged_nor_a_day_of_an_inventory(context: Context) -> None:
    """A listing shows what was written before it; a report may lack a day. A grace that is given wins."""
    auditor = BucketAuditor(None, context)  # type: ignore[arg-type]
    judged = [auditor._through_ns(listing(source)) for source in ("list", "versions", "inventory")]
    auditor._grace_s = 0.0

    assert [1_000_000 * S - 300 * S] * 2 + [1_000_000 * S - INVENTORY_MARGIN_NS] == judged
    assert 1_000_000 * S == auditor._through_ns(listing())


@pytest.mark.parametrize(("lines", "kept", "left"), [(0, 0, 0), (3, 3, 0), (4, 4, 0), (9, 4, 5)])
def test_garbage_collection_gets_no_proof_when_work_was_left_out(
    context: Context, monkeypatch: pytest.MonkeyPatch, lines: int, kept: int, left: int
) -> None:
    """A manifest that was not mended may be what refers to a blob."""
    written = msgspec.json.encode(AuditWorkFile("k", "mend", kept)).decode()
    monkeypatch.setattr(job, "WORK_MAX", 4)
    monkeypatch.setattr(job, "F", FakeFunctions())
    monkeypatch.setattr(job.findings, "work", lambda found: Rows(lines))
    monkeypatch.setattr(job.Location, "of", lambda settings: None)
    monkeypatch.setattr(
        job, "in_arrow", lambda *given: type("Done", (), {"collect": lambda self: [{"file": written}]})()
    )
    monkeypatch.setattr(BucketAuditor, "_keep", lambda self, frame: frame)
    auditor: Any = BucketAuditor(None, context)  # type: ignore[arg-type]

    files, left_out = auditor._work(Rows(), "audit-1", (FindingTotal("orphan", "", 1, 1, wrong=False),))
    proof = auditor._proof(listing(), 17, left_out)

    assert (left, [kept] if kept else []) == (left_out, [file.lines for file in files])
    assert (17, "list", 5, 2, left == 0) == (
        proof.through_ns,
        proof.source,
        proof.accepted,
        proof.quarantined,
        proof.whole,
    )


def test_only_orphans_are_not_wrong() -> None:
    """What is missing, corrupt, unindexed or foreign fails the audit."""
    kinds = ("missing", "corrupt", "unindexed", "foreign", "orphaned")

    assert ["missing", "corrupt", "unindexed", "foreign"] == [each for each in kinds if is_wrong(each, "raw_blob")]


class Auditor(BucketAuditor):
    """Notes in which order it looks, and what it is asked for."""

    def __init__(self, context: Context, order: list[Any]) -> None:
        super().__init__(None, context)  # type: ignore[arg-type]
        self.order, self.error = order, False

    def _audit(self, taken: Listing, verify: bool, horizon_ns: int, dropped: Any, removed_ns: int) -> Any:
        self.order.append(("audit", verify, horizon_ns, self._rollups.committed, self._grace_s))
        if self.error:
            raise PySparkException("an executor was lost")
        return RECORD


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    noted: list[Any] = []

    async def state(store: Any) -> RollupState:
        noted.append("state")
        return RollupState(committed=9, settled_ns=5)

    def listed(*given: Any, **more: Any) -> Listing:
        noted.append("listing")
        return listing(closed=noted)

    monkeypatch.setattr(job, "read_rollup_state", state)
    monkeypatch.setattr(job, "list_bucket", listed)
    monkeypatch.setattr(job, "as_listed", lambda roller, rows, through_ns: msgspec.structs.replace(roller, committed=4))
    return noted


def test_the_roller_is_asked_before_the_listing_and_the_listing_is_freed(context: Context, order: list[Any]) -> None:
    """What was committed before is in a listing that starts later; a quick audit asks nobody."""
    auditor = Auditor(context, order)

    auditor.run(horizon_s=2.5, verify=True, grace_s=1.0)
    full = list(order)
    order.clear()
    auditor.run(horizon_s=2.5)

    assert ["state", "listing", ("audit", True, 2_500_000_000, 9, 1.0), "closed"] == full
    assert ["listing", ("audit", False, 2_500_000_000, 0, 300), "closed"] == order


def test_a_listing_that_was_given_is_judged_as_it_shows_and_left_to_its_owner(
    context: Context, order: list[Any]
) -> None:
    """Generations that it does not show do not count, and it is not freed here."""
    Auditor(context, order).run(horizon_s=1.0, verify=True, listing=listing("inventory", closed=order))

    assert ["state", ("audit", True, S, 4, 300)] == order


def test_an_audit_that_fails_is_unavailable_and_frees_its_listing(context: Context, order: list[Any]) -> None:
    """It is no audit with findings: it can be made again."""
    auditor = Auditor(context, order)
    auditor.error = True

    with pytest.raises(Unavailable, match="not completed"):
        auditor.run(horizon_s=1.0)

    assert "closed" == order[-1]


class Folder:
    """A location in a folder of this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def filesystem(self) -> LocalFileSystem:
        return LocalFileSystem()

    def path(self, key: str) -> str:
        (self._folder / key).parent.mkdir(parents=True, exist_ok=True)
        return str(self._folder / key)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_work_is_written_in_files_of_limited_length_and_every_line_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Each file is of one kind of work and has as many lines as its description says."""
    monkeypatch.setattr(job, "WORK_LINES", 3)
    lines = [{"do": do, "key": f"{do}-{n}", "finding": "missing"} for do in ("judge", "mend") for n in range(count)]
    batches = [pa.RecordBatch.from_pylist(lines[at : at + 2]) for at in range(0, len(lines), 2)]
    where: Any = Folder(tmp_path)

    rows = [text for batch in writing(where, "audit/x/")(iter(batches)) for text in batch["file"].to_pylist()]
    files = [msgspec.json.decode(text, type=AuditWorkFile) for text in rows]

    stored = {file.key: (tmp_path / file.key).read_text().splitlines() for file in files}
    assert {file.key: file.lines for file in files} == {key: len(held) for key, held in stored.items()}
    assert all(file.lines <= 3 for file in files)
    assert all(json.loads(line)["do"] == file.do for file in files for line in stored[file.key])
    assert sorted(line["key"] for line in lines) == sorted(
        json.loads(line)["key"] for held in stored.values() for line in held
    )


async def test_a_roller_state_that_cannot_be_read_is_a_problem_and_none_is_none(context: Context) -> None:
    """A damaged state must not look like rollups that never ran."""
    none = await read_rollup_state(context.store)
    await context.store.create(ROLLER_STATE, b'{"committed": 3, "settled_ns": 7, "windows_s": [60]}')
    good = await read_rollup_state(context.store)
    await context.store.delete(ROLLER_STATE)
    await context.store.create(ROLLER_STATE, b'{"committed": ')

    assert (RollupState(), RollupState(committed=3, settled_ns=7, windows_s=(60,))) == (none, good)
    assert isinstance(await read_rollup_state(context.store), Corrupt)


@pytest.mark.parametrize("others", [0, 3, NOTES_MAX - 1, NOTES_MAX])
def test_how_far_bronze_came_is_in_its_last_step_however_much_maintenance_followed(
    context: Context, others: int
) -> None:
    """Without a note within reach everything is due: nothing is excused by a guess."""
    import asyncio

    note = msgspec.json.encode(note_of({"through_ns": 42, "late_ms": 0}, [], 7)).decode()
    table: Any = FakeTable("batches/samples", [])

    async def fill() -> None:
        for version in range(others + 1):
            entry = {"commitInfo": {"userMetadata": note}} if version == 0 else {"commitInfo": {}}
            await context.store.create(log_key(table.spec.root, version), msgspec.json.encode(entry))

    asyncio.run(fill())
    check = ConservationCheck.__new__(ConservationCheck)
    check._context = context

    reached = check._bronze_reached(table, Snapshot(version=others))

    assert ((42, 7) if others < NOTES_MAX else (FOREVER_NS, 0)) == reached


def test_a_stage_that_does_not_exist_has_no_count_and_loses_nothing() -> None:
    """Every count of a row is shown under its stage."""
    names = [*sums.COUNTS, "rollup_lost", "rollup_doubled", "rollup_changed"]
    row: dict[str, object] = {"agent_id": "a", "hour": "h"} | {name: n for n, name in enumerate(names, 1)}
    at = {name: n for n, name in enumerate(names, 1)}

    both = conservation_row(row, True, True)
    none = conservation_row(row, False, False)

    assert (at["bronze"], at["rollup"], None, None) == (both.bronze, both.rollup, none.bronze, none.rollup)
    assert {
        "accepted": at["gap"], "raw": at["unreadable"], "bronze": at["bronze_lost"], "rollup": at["rollup_lost"]
    } == both.lost  # fmt: skip
    assert {"accepted": at["overlap"], "bronze": at["bronze_doubled"], "rollup": at["rollup_doubled"]} == both.doubled
    assert {"bronze": at["bronze_changed"], "rollup": at["rollup_changed"]} == both.changed
    assert (at["sent"], at["accepted"], at["waiting"], at["expired"], at["explained"]) == (
        both.sent, both.accepted, both.waiting, both.expired, both.explained,
    )  # fmt: skip
