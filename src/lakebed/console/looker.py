"""Everything a page can show, each thing once: who may see it, how long it stays fresh, and where it comes from.

Pages share what they ask for by its key, so the overview and the queue's page ask the queue once between them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import msgspec

from lakebed.auth import Principal
from lakebed.console.checkup import Checkup
from lakebed.console.live import Live
from lakebed.console.samples import PATIENCE_S, TIMEOUT_S, Make, Samples, Seen, Trouble
from lakebed.context import Context
from lakebed.errors import Denied
from lakebed.gateway.health import Examiner, Report
from lakebed.lifecycle.workers import opened
from lakebed.ticks import paths as tick_paths
from lakebed.ticks.auditor import Auditor
from lakebed.views import audit, batches, lifecycle, log, queue, tables, ticks

FAST_S, SLOW_S, DEAR_S = 3.0, 8.0, 120.0  # times to live: a read or two, a listing, a scan
PREVIEW_S = 30.0  # longest walk for a dry run
PREVIEW_KEYS_MAX = 100_000  # keys of one; a larger bucket is judged over a listing


class Ask(msgspec.Struct, frozen=True):
    """One thing to show. `right` is the part's own, as its HTTP routes demand it."""

    right: str
    key: str
    ttl_s: float
    make: Make
    timeout_s: float = TIMEOUT_S
    patience_s: float = PATIENCE_S  # how long a page waits for it when nothing was ever seen


class Looker:
    def __init__(self, context: Context) -> None:
        self.context = context
        self.samples = Samples(context.clock)
        self.trail = context.trail
        self.tables = tables.Tables(context)
        self.checkup = Checkup(context.settings, context.clock)
        self.live = Live(context.metrics, context.clock, self.levels)
        self.examiner: Examiner | None = None  # the app's, known with the first request
        self._recent = batches.RecentBatches.of(context)
        self._log: log.LogWindow | None = None
        self._auditor: Auditor | None = None
        self._standing: asyncio.Task[Any] | None = None

    async def see(self, principal: Principal, asks: dict[str, Ask]) -> dict[str, Seen]:
        """Each thing as it was last seen; what this principal may not see says so, and is not asked for."""

        async def one(ask: Ask) -> Seen:
            try:
                principal.demand(ask.right)
            except Denied as error:
                return Seen(trouble=Trouble(error.code, error.message, error.hint))
            return await self._get(ask)

        found = await asyncio.gather(*(one(ask) for ask in asks.values()))
        return dict(zip(asks, found, strict=True))

    async def stop(self) -> None:
        await self.live.stop()
        await self.checkup.stop()
        if self._standing is not None:
            self._standing.cancel()
        await self.samples.stop()
        if self._log is not None:
            await self._log.close()

    # What there is to see.

    def health(self) -> Ask:
        return Ask("console:read", "health", 1.0, self._report)

    def doctor(self) -> Ask:
        return Ask("console:read", "doctor", 0.3, self.checkup.look)

    def agents(self) -> Ask:
        return Ask("batches:read", "batches.agents", SLOW_S, self._recent.agents)

    def recent(self) -> Ask:
        return Ask("batches:read", "batches.recent", SLOW_S, lambda: self._recent.newest(50))

    def conflicts(self) -> Ask:
        return Ask("batches:admin", "batches.conflicts", FAST_S, lambda: batches.conflicts(self.context))

    def topics(self) -> Ask:
        return Ask("log:read", "log.topics", FAST_S, lambda: log.topics(self.log.steward))

    def partitions(self, topic: str) -> Ask:
        make = self._of(lambda: log.partitions(self.log.steward, topic))
        return Ask(f"log:read:{topic}", f"log.partitions:{topic}", FAST_S, make)

    def groups(self, topic: str) -> Ask:
        make = self._of(lambda: self.log.groups.progress(topic))
        return Ask(f"log:read:{topic}", f"log.groups:{topic}", FAST_S, make)

    def segments(self, topic: str, partition: int) -> Ask:
        make = self._of(lambda: self.log.segments(topic, partition))
        return Ask(f"log:read:{topic}", f"log.segments:{topic}:{partition}", FAST_S, make)

    def records(self, topic: str, partition: int, offset: int | None) -> Ask:
        make = self._of(lambda: self.log.page(topic, partition, offset))
        return Ask(f"log:consume:{topic}", f"log.records:{topic}:{partition}:{offset}", FAST_S, make)

    def log_report(self) -> Ask:
        return Ask("log:read", "log.report", DEAR_S, lambda: self.log.report(), PREVIEW_S, patience_s=1.0)

    def queues(self) -> Ask:
        return Ask("queue:read", "queue.statuses", FAST_S, lambda: queue.statuses(self.context))

    def waiting(self, name: str) -> Ask:
        make = self._of(lambda: queue.waiting(self.context, name))
        return Ask(f"queue:read:{name}", f"queue.waiting:{name}", FAST_S, make)

    def letters(self, name: str) -> Ask:
        make = self._of(lambda: queue.letters(self.context, name))
        return Ask(f"queue:read:{name}", f"queue.letters:{name}", FAST_S, make)

    def batch(self, name: str, location: str) -> Ask:
        make = self._of(lambda: queue.batch(self.context, name, location))
        return Ask(f"queue:read:{name}", f"queue.batch:{name}:{location}", SLOW_S, make)

    def projects(self) -> Ask:
        return Ask("ticks:read", "ticks.standing", SLOW_S, lambda: ticks.standing(self.context))

    def silver(self) -> Ask:
        return Ask("ticks:read", "ticks.silver", SLOW_S, lambda: ticks.silver_status(self.context, self.auditor))

    def tick_letters(self) -> Ask:
        return Ask("ticks:read", "ticks.letters", SLOW_S, lambda: ticks.letters(self.context))

    def tick(self, org: str, project: str, tick: str) -> Ask:
        make = self._of(lambda: ticks.view(self.context, tick_paths.tick_id(org, project, tick)))
        return Ask(f"ticks:read:{org}/{project}", f"ticks.view:{org}/{project}/{tick}", FAST_S, make)

    def all_tables(self) -> Ask:
        return Ask("tables:read", "tables.all", SLOW_S, self.tables.all)

    def table(self, name: str) -> Ask:
        return Ask(f"tables:read:{name}", f"tables.show:{name}", FAST_S, self._of(lambda: self.tables.show(name)))

    def rows(self, name: str) -> Ask:
        return Ask(f"tables:read:{name}", f"tables.rows:{name}", SLOW_S, self._of(lambda: self.tables.sample(name)))

    def snippets(self, name: str) -> Ask:
        return Ask(f"tables:read:{name}", f"tables.how:{name}", DEAR_S, self._of(lambda: self.tables.how(name)))

    def actions(self) -> Ask:
        return Ask("lifecycle:read:*", "lifecycle.status", FAST_S, lambda: lifecycle.status(self.context))

    def rules(self) -> Ask:
        return Ask("lifecycle:read:*", "lifecycle.rules", SLOW_S, lambda: lifecycle.all_rules(self.context))

    def streams(self) -> Ask:
        return Ask("lifecycle:read:*", "lifecycle.streams", FAST_S, lambda: lifecycle.streams(self.context))

    def blockers(self) -> Ask:
        return Ask("lifecycle:read:*", "lifecycle.blockers", FAST_S, lambda: lifecycle.blockers(self.context))

    def ledger(self, bucket: str, key: str) -> Ask:
        make = self._of(lambda: lifecycle.ledger(self.context, bucket, key or None))
        return Ask(f"lifecycle:read:{bucket}", f"lifecycle.ledger:{bucket}:{key}", SLOW_S, make)

    def preview(self, bucket: str, days_ahead: float, policy: str) -> Ask:
        text = policy.encode() or None

        async def made() -> Any:
            async with opened(self.context) as site:
                return await lifecycle.preview(site, bucket, text, days_ahead=days_ahead, keys_max=PREVIEW_KEYS_MAX)

        key = f"lifecycle.preview:{bucket}:{days_ahead:g}:{sha256(text or b'').hexdigest()}"
        return Ask(f"lifecycle:read:{bucket}", key, DEAR_S, made, PREVIEW_S, PREVIEW_S)

    def audit(self) -> Ask:
        return Ask("audit:read", "audit.last", SLOW_S, lambda: audit.last(self.context))

    def deeds(self) -> Ask:
        return Ask("console:read", "trail", FAST_S, self.trail.latest)

    # What is behind it.

    @property
    def log(self) -> log.LogWindow:
        if self._log is None:
            self._log = log.LogWindow(self.context)
        return self._log

    @property
    def auditor(self) -> Auditor:
        if self._auditor is None:
            self._auditor = ticks.auditor(self.context)
        return self._auditor

    async def _report(self) -> Report:
        assert self.examiner is not None
        return await self.examiner.report()

    def _of(self, make: Make) -> Make:
        """A name that is no name raises where it is used: inside the sample, as its trouble."""

        async def made() -> Any:
            return await make()

        return made

    # Levels of the whole lake, for the picture and its charts.

    def flows(self) -> dict[str, Ask]:
        asks = (self.conflicts(), self.topics(), self.queues(), self.silver(), self.all_tables(), self.blockers())
        return {ask.key: ask for ask in (*asks, self.streams())}

    def levels(self) -> dict[str, float | None]:
        """What is known now; what is old is asked for in the background."""
        if self._standing is None or self._standing.done():
            self._standing = asyncio.create_task(self._refresh())
        return levels(lambda key: self.samples.last(key).value)

    async def _refresh(self) -> None:
        for ask in self.flows().values():
            await self._get(ask)

    async def _get(self, ask: Ask) -> Seen:
        return await self.samples.get(ask.key, ask.ttl_s, ask.make, timeout_s=ask.timeout_s, patience_s=ask.patience_s)


def levels(seen: Callable[[str], Any]) -> dict[str, float | None]:
    """Pure: the last answers in, the numbers of the picture out; None for what is not known."""
    found: dict[str, float | None] = {}
    conflicts, topics, queues = seen("batches.conflicts"), seen("log.topics"), seen("queue.statuses")
    silver, listed, held, streams = (
        seen(key) for key in ("ticks.silver", "tables.all", "lifecycle.blockers", "lifecycle.streams")
    )
    found["conflicts_open"] = None if conflicts is None else sum(view.resolution is None for view in conflicts)
    found["log_records"] = None if topics is None else sum(row.records for row in topics)
    found["log_uncompacted"] = None if topics is None else sum(row.uncompacted for row in topics)
    found["queue_waiting"] = None if queues is None else sum(row.pending for row in queues)
    found["queue_claimed"] = None if queues is None else sum(row.claimed for row in queues)
    found["queue_dead"] = None if queues is None else sum(row.dead for row in queues)
    found["queue_oldest_s"] = None if queues is None else max((row.pending_age_s or 0.0 for row in queues), default=0.0)
    found["ticks_undispatched"] = None if silver is None else silver["undispatched"]
    found["ticks_lag_s"] = None if silver is None else silver["lag_s"]
    found["ticks_dead"] = None if silver is None else silver["dead"]
    found["tables"] = None if listed is None else len(listed)
    found["table_rows"] = None if listed is None else sum(max(0, row.rows) for row in listed)
    found["blockers"] = None if held is None else len(held)
    found["lifecycle_behind_s"] = None if streams is None else max((row.behind_s for row in streams), default=0.0)
    return found
