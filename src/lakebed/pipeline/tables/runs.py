"""What wrote to tables: the recorded runs of models, and the last versions of each table as runs of bronze, silver,
gold and maintenance.
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlencode

from lakebed.console.runs import RunRecord
from lakebed.core.context import Context
from lakebed.core.errors import LakebedError
from lakebed.pipeline.models.runs import PipelineRun
from lakebed.pipeline.models.runs import runs as recorded_runs
from lakebed.pipeline.tables.view import Tables, TableVersion

TABLES_READ = 40  # tables whose versions are read
VERSIONS_READ = 3  # of one table
MODEL_RUNS_READ = 20
MAINTENANCE = {"OPTIMIZE": "table compaction", "VACUUM END": "table vacuum"}


class TablesRuns:
    right = "tables:read"

    def __init__(self, context: Context) -> None:
        self._tables, self._store = Tables(context), context.store

    async def latest(self, limit: int) -> list[RunRecord]:
        """The last runs of models, and the last versions of the first TABLES_READ tables."""
        gate = asyncio.Semaphore(8)

        async def of(name: str) -> list[RunRecord]:
            async with gate:
                try:
                    return [run(name, one) for one in await self._tables.versions(name, VERSIONS_READ)]
                except LakebedError:
                    return []  # the tables page shows what is wrong with it

        names = (await self._tables.names())[:TABLES_READ]
        found = [one for runs in await asyncio.gather(*map(of, names)) for one in runs]
        found += [models(one) for one in await recorded_runs(self._store, limit=MODEL_RUNS_READ)]
        return sorted(found, key=lambda one: one.ended_at_ms, reverse=True)[:limit]

    async def close(self) -> None:
        return None


def run(name: str, version: TableVersion) -> RunRecord:
    """Pure: a version as a run."""
    layer = name.partition("/")[0]
    return RunRecord(
        MAINTENANCE.get(version.operation.upper(), f"{layer} table"),
        name,
        "done",
        version.at_ms,
        rows_out=(version.rows_inserted + version.rows_replaced) or None,
        reason=f"version {version.version}, {version.operation.lower()}",
        href=f"/tables?{urlencode({'table': name})}",
    )


def models(recorded: PipelineRun) -> RunRecord:
    """Pure: a run over the models of a project."""
    wrong = [f"{one.table}: {one.error or one.reason}" for one in recorded.models if one.state in ("failed", "refused")]
    done = ", ".join(f"{one.table} {one.state}" for one in recorded.models)
    return RunRecord(
        "models",
        f"{recorded.org_id}/{recorded.project_id}",
        recorded.state,
        recorded.began_ms + round(recorded.seconds * 1000),
        recorded.began_ms,
        rows_out=sum(one.rows for one in recorded.models) or None,
        reason="; ".join(wrong) or f"{recorded.trigger}: {done}",
    )
