"""The log's roles on one bucket and one meta store, wired in one place.

A role is made on first use: a broker has no compactor, and a worker has no writer.
"""

from __future__ import annotations

from functools import cached_property

from lakebed.core.context import Context
from lakebed.log.admin import TopicAdmin
from lakebed.log.compactor import Compactor
from lakebed.log.cost import MeteredStore
from lakebed.log.groups import Groups
from lakebed.log.kafka.coordinator import GroupCoordinator, GroupRetention
from lakebed.log.paths import uris
from lakebed.log.reader import LogReader
from lakebed.log.records import Records
from lakebed.log.retention import Retention
from lakebed.log.scheduler import CompactionScheduler
from lakebed.log.settings import LogSettings
from lakebed.log.sweeper import LogSweeper
from lakebed.meta.connect import connect
from lakebed.meta.protocol import Meta
from lakebed.meta.settings import MetaSettings
from lakebed.store.runtime import StoreRuntime
from lakebed.store.settings import StoreSettings


class LogServices:
    """`meta` is given in tests and simulation; otherwise the settings choose it. `bodies_bytes` limits the reader's
    cache. Requests to the bucket count towards the log's estimated cost."""

    def __init__(self, context: Context, meta: Meta | None = None, *, bodies_bytes: int = 0) -> None:
        self._context, self._bodies_bytes = context, bodies_bytes
        self.settings = context.settings.of(LogSettings)
        self.meta = meta or connect(context.settings.of(MetaSettings), context)
        where = context.settings.of(StoreSettings)
        self.uris = uris(where.url, where.prefix, where.moved_from)
        self.records = Records(context, self.meta)

    @cached_property
    def store(self) -> MeteredStore:
        return MeteredStore(self._context)

    @cached_property
    def runtime(self) -> StoreRuntime:
        return self._context.on(self.store)

    @cached_property
    def reader(self) -> LogReader:
        return LogReader(self.runtime, self.records, self.uris, bodies_bytes=self._bodies_bytes)

    @cached_property
    def groups(self) -> Groups:
        return Groups(self.runtime, self.records)

    @cached_property
    def admin(self) -> TopicAdmin:
        return TopicAdmin(self.runtime, self.records, self.reader, self.groups)

    @cached_property
    def compactor(self) -> Compactor:
        return Compactor(self.runtime, self.records, self.reader, self.uris, self.settings)

    @cached_property
    def retention(self) -> Retention:
        return Retention(self.runtime, self.records, self.reader, self.uris, self.groups, self.settings)

    @cached_property
    def scheduler(self) -> CompactionScheduler:
        node, runs = self._context.node, self._context.run_log("log")
        return CompactionScheduler(
            self.runtime, self.records, self.compactor, self.retention, self.settings, node=node, runs=runs
        )

    @cached_property
    def sweeper(self) -> LogSweeper:
        horizon_s = self.settings.vacuum_horizon_s
        return LogSweeper(self.runtime, self.records, self.uris, horizon_s=horizon_s)

    @cached_property
    def group_retention(self) -> GroupRetention:
        coordinator = GroupCoordinator(self.runtime, self.records)
        retention_s = self.settings.group_retention_s
        return GroupRetention(self.runtime, coordinator, self.groups, self.admin, retention_s)

    async def close(self) -> None:
        await self.meta.close()


class LogReadServices(LogServices):
    """For the console and for feeds: their reads do not count towards the log's cost."""

    @cached_property
    def runtime(self) -> StoreRuntime:
        return self._context
