"""Tables when answers of the bucket are lost: writers with clients of their own append and upsert through a proxy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count

import deltalake
import pyarrow as pa
import pytest

from lakebed.core.clock import SystemClock
from lakebed.core.errors import LakebedError, Overloaded, Unavailable
from lakebed.core.ids import Ids
from lakebed.delta.log import Commit, overlapping
from lakebed.delta.model import DataFile, Snapshot, TableSpec, WriteBatch
from lakebed.delta.plain import PlainTable, schema_json
from lakebed.store.connect import connect
from lakebed.store.settings import StoreSettings
from support.fleet import behind
from support.histories import Event, Seen, Write, check
from support.lossy_proxy import LossyProxy
from support.runtimes import runtime_of, runtime_on
from support.traffic import Traffic

LOAD_S = 6.0
DROPPED, COMMITTED = 25, 60
RETRIES_S = 100.0
SPEC = TableSpec("t", schema_json((("id", "string"), ("turn", "long"))), keys=("id",))


class Writer:
    """One writer as a process would be: own client, own names, own knowledge of the table."""

    def __init__(self, name: str, store: StoreSettings, traffic: Traffic, history: list[Event]) -> None:
        clock, ids = SystemClock(), Ids()
        self.name, self._traffic, self._history = name, traffic, history
        self._table = PlainTable(runtime_on(connect(store, runtime_of(clock, ids)), clock, ids), SPEC)

    async def append(self) -> None:
        """Adds a row of its own in each commit, under the commit's number: promised once, and in order."""
        for number in count():
            if not self._traffic.goes_on():
                return
            row = f"{self.name}-{number}"
            await self._commit(number, lambda row=row: self._one_row(row, 0), lambda state: ())  # type: ignore[misc]
            self._history.append(Write(self.name, "appended", row, "ok"))

    async def upsert(self) -> None:
        """Replaces its one row in each commit: the file that held it goes, in the version that brings the new one."""
        for number in count():
            if not self._traffic.goes_on():
                return

            def holding(state: Snapshot) -> tuple[DataFile, ...]:
                return tuple(overlapping(state.files, "id", self.name, self.name))

            await self._commit(number, lambda turn=number: self._one_row(self.name, turn), holding)  # type: ignore[misc]
            self._history.append(Write(self.name, f"turns of {self.name}", f"{self.name} turn {number}", "ok", number))

    async def _one_row(self, row: str, turn: int) -> DataFile:
        return await self._table.write(pa.table({"id": [row], "turn": pa.array([turn], pa.int64())}))

    async def _commit(self, number: int, write: Callable, removes: Callable[[Snapshot], tuple[DataFile, ...]]) -> None:  # type: ignore[type-arg]
        """Repeats until it is told that the batch is in the table."""
        batch = WriteBatch(self.name, number)

        async with asyncio.timeout(RETRIES_S):
            while True:
                try:
                    file = await write()

                    def plan(state: Snapshot, file: DataFile = file) -> Commit | None:
                        if state.applied.get(batch.application, -1) >= number:
                            return None
                        return Commit("MERGE", (file,), removes(state), batch)

                    await self._table.commit(plan)
                    return
                except (Unavailable, Overloaded) as error:
                    self._traffic.answers[error.code] += 1
                except LakebedError as error:
                    self._traffic.answers[f"never: {error.code} {error.message}"] += 1
                    raise


@pytest.mark.full
async def test_tables_keep_their_promises_when_answers_are_lost(bucket_settings: StoreSettings) -> None:
    """Every acknowledged commit is in the table once, in its writer's order, for our reader and for another engine."""
    history: list[Event] = []
    with LossyProxy(bucket_settings.endpoint, seed=23) as proxy:
        lossy = behind(bucket_settings, proxy.endpoint)
        traffic = Traffic(proxy, seconds=LOAD_S, dropped=DROPPED, enough=lambda: len(history) > COMMITTED)
        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(Writer(f"a{number}", lossy, traffic, history).append())
            for number in range(2):
                group.create_task(Writer(f"u{number}", lossy, traffic, history).upsert())
    traffic.demand()

    print(dict(proxy.counts), dict(traffic.answers), len(history))
    ours = await rows_of_ours(bucket_settings)
    assert check([*history, *found(ours, history)]) == []
    assert sorted(ours) == sorted(rows_of_delta_rs(bucket_settings))


async def rows_of_ours(settings: StoreSettings) -> list[tuple[str, int]]:
    clock, ids = SystemClock(), Ids()
    table = PlainTable(runtime_on(connect(settings, runtime_of(clock, ids)), clock, ids), SPEC)
    files = (await table.snapshot()).files
    return [(row["id"], row["turn"]) for file in files for row in (await table.read(file)).to_pylist()]


def rows_of_delta_rs(settings: StoreSettings) -> list[tuple[str, int]]:
    options = {
        "AWS_ENDPOINT_URL": settings.endpoint,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": settings.region,
        "AWS_ACCESS_KEY_ID": settings.access_key_id.reveal(),
        "AWS_SECRET_ACCESS_KEY": settings.secret_access_key.reveal(),
    }
    bucket = settings.url.removeprefix("s3://").strip("/")
    table = deltalake.DeltaTable(f"s3://{bucket}/{settings.prefix}/{SPEC.root}", storage_options=options)
    return [(row["id"], row["turn"]) for row in table.to_pyarrow_table().to_pylist()]


def found(rows: list[tuple[str, int]], history: list[Event]) -> list[Seen]:
    """Appended rows in their order; and of each upserted row its last turn, with the turns that it has replaced."""
    upserted = {one.client for one in history if isinstance(one, Write) and one.place != "appended"}
    appended = sorted((row.split("-")[0], int(row.split("-")[1])) for row, _ in rows if row not in upserted)
    seen = [Seen("appended", f"{name}-{number}") for name, number in appended]
    for row, last in rows:
        if row in upserted:
            seen += [Seen(f"turns of {row}", f"{row} turn {turn}", turn) for turn in range(last + 1)]
    return seen
