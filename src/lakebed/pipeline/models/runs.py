"""Records of runs, one JSON object each, and their reader. See docs/formats/tables.md#runs-of-models.

A record is written once, after the run: tables are the truth, and a run that died before its record is seen there.
Runs that found nothing to do leave none.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Literal

import msgspec

from lakebed.core.errors import Corrupt, NotFound
from lakebed.core.logs import logger
from lakebed.core.runs import ActiveRun
from lakebed.pipeline.models.definition import Action
from lakebed.store.protocol import Store

RUNS = "pipeline/runs/v1/"
FORMAT = 1
KEEP_DAYS = 90  # a run a minute makes some 130,000 objects of 1 KB
RUNS_MAX = 1_000  # that one reader is given
LOOKED_MAX = 10_000  # records that one reader looks at: those of a model may be rare among all

LOAD, SILVER, MODELS = "bronze load", "silver", "models"  # kinds of runs, as the console shows them
COMPACTION, RETENTION, VACUUM = "table compaction", "table retention", "table vacuum"

ModelState = Literal["made", "unchanged", "waiting", "refused", "failed", "skipped"]
log = logger("pipeline")


class ExpectationResult(msgspec.Struct, frozen=True):
    """How many rows did not meet a condition."""

    condition: str
    action: Action
    failed: int


class ModelReport(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a run did with one model. `rows` were written; rows_in = rows + quarantined + dropped. `deleted`: rows that
    the table had.
    """

    table: str
    state: ModelState
    mode: str = ""
    reason: str = ""
    version: int = -1
    rows: int = 0
    replaced: int = 0
    deleted: int = 0
    rows_in: int = 0
    quarantined: int = 0
    dropped: int = 0
    sources: dict[str, int] = {}
    after: dict[str, int] = {}
    expectations: tuple[ExpectationResult, ...] = ()
    columns: dict[str, tuple[str, ...]] = {}  # each column's own, as `silver.orders.total`; where Spark tells them
    seconds: float = 0.0
    error: str = ""

    @property
    def repeated(self) -> bool:
        return self.state != "made"


class PipelineRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """One run over the models of a project. `trigger`: command, tick, change, lag or schedule."""

    run_id: str
    org_id: str
    project_id: str
    trigger: str
    began_ms: int
    seconds: float
    state: Literal["done", "failed"]
    models: tuple[ModelReport, ...] = ()
    reason: str = ""
    format: int = FORMAT


def report_to(run: ActiveRun, record: PipelineRun) -> None:
    """Reports it as the result of a run, for the console: by model what was made of how much, or why not."""
    wrong = [f"{one.table}: {one.error or one.reason}" for one in record.models if one.state in ("failed", "refused")]
    states = ", ".join(f"{one.table} {one.state}" for one in record.models)
    run.rows_in = sum(one.rows_in for one in record.models)
    run.rows_out = sum(one.rows for one in record.models)
    run.reason, run.idle = f"{record.trigger}: {states}", not any(one.state == "made" for one in record.models)
    for one in record.models:
        run.note(f"{one.table} {one.state}: {one.rows} rows in {one.seconds:g} s; {one.error or one.reason}")
    if wrong:
        run.fail("; ".join(wrong))


def run_key(record: PipelineRun) -> str:
    day = datetime.fromtimestamp(record.began_ms / 1000, UTC).strftime("%Y-%m-%d")
    return f"{RUNS}{day}/{record.run_id}.json"


async def write_run(store: Store, record: PipelineRun) -> None:
    """Never raises: the run is over, and its tables say what it did."""
    if not any(each.state in ("made", "failed", "refused") for each in record.models):
        return
    try:
        await store.create(run_key(record), msgspec.json.encode(record))
    except Exception as error:
        log.warning("a run was not recorded", run=record.run_id, error=str(error)[:300])


async def runs(
    store: Store, *, org_id: str = "", project_id: str = "", model: str = "", limit: int = 100
) -> list[PipelineRun]:
    """The last runs, newest first, among the last LOOKED_MAX; of one project or model, where named. Raises Corrupt
    for a record that is none.
    """
    found: list[PipelineRun] = []
    looked = 0
    for day in reversed(await store.children(RUNS)):
        keys = [info.key async for info in store.list(f"{RUNS}{day}/")]
        for key in sorted(keys, reverse=True):
            looked += 1
            try:
                record = decode_run((await store.get(key)).data, key)
            except NotFound:
                continue  # expired since it was listed
            wanted = (org_id in ("", record.org_id)) and (project_id in ("", record.project_id))
            if wanted and (not model or any(each.table == model for each in record.models)):
                found.append(record)
            if len(found) >= min(limit, RUNS_MAX) or looked >= LOOKED_MAX:
                return found
    return found


def decode_run(data: bytes, key: str) -> PipelineRun:
    try:
        record = msgspec.json.decode(data, type=PipelineRun)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise Corrupt(f"{key!r} is no record of a run: {error}", key=key) from error
    if record.format != FORMAT:
        raise Corrupt(f"{key!r} has format {record.format}, which this version cannot read", key=key)
    return record


async def expire_runs(store: Store, now_ns: int, *, days: int = KEEP_DAYS) -> int:
    """Deletes records of days that are past; gives how many."""
    oldest = (datetime.fromtimestamp(now_ns / 1e9, UTC) - timedelta(days=days)).strftime("%Y-%m-%d")
    gone = 0
    for day in await store.children(RUNS):
        if day < oldest:
            for key in [info.key async for info in store.list(f"{RUNS}{day}/")]:
                await store.delete(key)
                gone += 1
    return gone


def failed(reports: Sequence[ModelReport]) -> bool:
    return any(each.state in ("failed", "refused") for each in reports)
