"""Fakes of the pipeline, without Spark: the same contract on small JSON objects, for tests and simulation.

A project's bronze is one register of rows by table and key, and of what each tick did; committing a tick is one
compare-and-swap, so a repeat returns the first result.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from lakebed.core.context import Context
from lakebed.core.errors import Unprocessable
from lakebed.store.register import Register
from lakebed.ticks.model import BronzeResult, BronzeTick, SilverResult, SilverTick, TickTable


class FakeTables(msgspec.Struct, frozen=True):
    rows: dict[str, dict[str, dict[str, Any]]] = {}
    versions: dict[str, int] = {}
    ticks: dict[str, BronzeResult] = {}


class FakeSilverRuns(msgspec.Struct, frozen=True):
    runs: tuple[tuple[str, ...], ...] = ()


class FakeBronze:
    """Bronze as one register for each project, for small ticks."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def commit(self, tick: BronzeTick) -> BronzeResult:
        read = {table.name: await self._rows(table, tick.keys) for table in tick.tables}

        def apply(now: FakeTables) -> tuple[FakeTables, BronzeResult]:
            if tick.tick_id in now.ticks:
                return now, now.ticks[tick.tick_id]
            rows, versions = dict(now.rows), dict(now.versions)
            inserted = replaced = 0
            for table in tick.tables:
                old, new = rows.get(table.name, {}), read[table.name]
                hits = len(old) if table.mode == "full" else len(set(old) & set(new))
                replaced += hits
                inserted += len(new) if table.mode == "full" else len(new) - hits
                rows[table.name] = dict(new) if table.mode == "full" else {**old, **new}
                versions[table.name] = versions.get(table.name, -1) + 1
            done = BronzeResult(inserted, replaced, {table.name: versions[table.name] for table in tick.tables})
            return FakeTables(rows, versions, {**now.ticks, tick.tick_id: done}), done

        return await self.register(tick.org_id, tick.project_id).change(apply)

    def register(self, org_id: str, project_id: str) -> Register[FakeTables]:
        context = self._context
        return Register(
            context, f"ticks/v1/twin/{org_id}/{project_id}.json", FakeTables, FakeTables(), name="tick_twin"
        )

    async def _rows(self, table: TickTable, keys: dict[int, str]) -> dict[str, dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {}
        for part in table.parquets:
            stored = await self._context.store.get(keys[part.file_seq])
            try:
                listed = pq.read_table(io.BytesIO(stored.data)).to_pylist()
            except (pa.ArrowException, OSError) as error:
                raise Unprocessable(f"part {part.file_seq} is not Parquet") from error
            for number, row in enumerate(listed):
                key = [row[name] for name in table.primary_keys] or [part.file_seq, number]
                rows[msgspec.json.encode(key, enc_hook=str).decode()] = msgspec.to_builtins(row, enc_hook=str)
        return rows


class FakeSilverJob:
    """Silver that only records its ticks."""

    def __init__(self, context: Context) -> None:
        self._context = context

    async def run(self, org_id: str, project_id: str, ticks: Sequence[SilverTick]) -> SilverResult:
        done = tuple(tick.tick_id for tick in ticks)
        await self.register(org_id, project_id).change(lambda now: (FakeSilverRuns((*now.runs, done)), None))
        return SilverResult({"ticks": len(done)})

    def register(self, org_id: str, project_id: str) -> Register[FakeSilverRuns]:
        context = self._context
        return Register(
            context,
            f"ticks/v1/twin-silver/{org_id}/{project_id}.json",
            FakeSilverRuns,
            FakeSilverRuns(),
            name="tick_twin",
        )
