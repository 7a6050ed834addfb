"""The protocol of audit rows: one row for each tick in each table, created if absent, removed when it expires.

`bronze_committed` records that a tick is in bronze, `silver_dispatched` that a silver job was started for it. Rows are
keyed by org, project and tick. The bucket and DynamoDB pass one contract suite.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from lakebed.ticks.model import TickId

COMMITTED = "bronze_committed"
DISPATCHED = "silver_dispatched"
LOG = "log"  # a field of a dispatched row: the last lines that its job logged
SCHEMA = "lakebed.tick-audit.v1"


class AuditRow(msgspec.Struct, frozen=True):
    """`attempt_id` is fresh for every write, so that a writer recognises its row; `fields` are those of the table."""

    org_id: str
    project_id: str
    tick_id: str
    state: str
    attempt_id: str
    at_ms: int
    expires_at_s: int
    fields: dict[str, str | int] = {}
    schema: str = SCHEMA

    @property
    def tick(self) -> TickId:
        return TickId(self.org_id, self.project_id, self.tick_id)


class AuditTable(Protocol):
    async def create(self, row: AuditRow) -> bool:
        """Writes the row if the tick has none, or only an expired one. False when there is another row."""

    async def change(self, row: AuditRow, was: AuditRow) -> bool:
        """Replaces `was` by `row`. False when `was` is no longer there."""

    async def get(self, tick: TickId) -> AuditRow | None: ...

    async def clear(self, tick: TickId) -> None:
        """Removes the tick's row; a missing one is fine."""

    def rows(self) -> AsyncIterator[AuditRow]:
        """Every row that is not expired."""

    def ticks(self) -> AsyncIterator[TickId]:
        """Every tick that has a row, found without reading the rows: an expired one may be among them."""

    async def sweep(self) -> int:
        """Removes expired rows, where the backend does not do it itself."""
