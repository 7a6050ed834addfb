"""Commits a tick, synchronously: parts verified → bronze → commit record → message → audit → result cached.

The tick is committed when its commit record is created. Each step is idempotent: when a process dies between two of
them, or a step fails, the agent's next attempt repeats the same steps, finds what is done and does the rest. Only one
finalize of an org runs in a replica, only one replica owns a project.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec

from lakebed.core.clock import now_ms
from lakebed.core.context import Context
from lakebed.core.errors import (
    AlreadyExists,
    Fenced,
    NotFound,
    Overloaded,
    TooEarly,
    Unavailable,
    Unprocessable,
)
from lakebed.core.logs import logger
from lakebed.core.runs import ActiveRun, RunLog
from lakebed.store.model import read_record
from lakebed.store.register import Register
from lakebed.ticks import commit_times, paths, verification
from lakebed.ticks import transitions as tick
from lakebed.ticks.audit import AuditRow, AuditTable
from lakebed.ticks.model import (
    COMMIT_SCHEMA,
    BadManifest,
    BronzeResult,
    BronzeTick,
    CommitRecord,
    FinalizeResult,
    ManifestPart,
    PartsDiffer,
    TickFailure,
    TickId,
    TickMessage,
    TickState,
    TickTable,
    etag_of,
)
from lakebed.ticks.ownership import Ownership
from lakebed.ticks.queue import TickQueue
from lakebed.ticks.receiver import recorded, register_of
from lakebed.ticks.settings import TicksSettings

FINALIZE = "finalize"  # as a run
FOOTERS_AT_ONCE = 16

log = logger("ticks")


class BronzeCommitter(Protocol):
    async def commit(self, tick: BronzeTick) -> BronzeResult:
        """Writes the tick's rows: upserted by key for `delta`, replaced for `full`. Idempotent by (org, project, tick).

        A repeat, also after a crash with some tables written, changes nothing twice and returns the same counts and
        versions as the first. One process never commits two ticks of one org at once, but another process may commit
        the same tick: the table's own commit decides. Raises Unprocessable when the rows do not match the manifest
        (nothing is committed then), Unavailable or Overloaded for errors to retry.
        """


class _Line:
    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.waiting = 0


class OrgLocks:
    """A lock for each org with a finalize under way, in order of arrival."""

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self._lines: dict[str, _Line] = {}

    def __len__(self) -> int:
        return len(self._lines)

    @asynccontextmanager
    async def of(self, org_id: str) -> AsyncIterator[None]:
        """Holds the org's lock. Raises Overloaded when too many wait."""
        line = self._lines.setdefault(org_id, _Line())
        if line.waiting > self._waiting_max:
            raise Overloaded(f"{self._waiting_max} finalizes of this org wait already", retry_after_s=2.0)
        line.waiting += 1
        try:
            async with line.lock:
                yield
        finally:
            line.waiting -= 1
            if not line.waiting:
                self._lines.pop(org_id, None)


class Finalizer:
    def __init__(
        self,
        context: Context,
        *,
        bronze: BronzeCommitter,
        queue: TickQueue,
        committed: AuditTable,
        ownership: Ownership,
    ) -> None:
        self._context, self._clock = context, context.clock
        self._settings = context.settings.of(TicksSettings)
        self._bronze, self._queue, self._committed, self._ownership = bronze, queue, committed, ownership
        self._locks = OrgLocks(self._settings.waiting_max)
        self._under_way: set[TickId] = set()
        self._runs = RunLog(context, "ticks", node=context.node, repeated_ms=0)  # a state names the record of its run
        self._results = context.metrics.counter("lakebed_ticks_finalized_total")
        self._seconds = context.metrics.histogram("lakebed_ticks_finalize_seconds")
        self._rows = context.metrics.counter("lakebed_ticks_rows_total")

    async def finalize(self, of: TickId, body: bytes) -> FinalizeResult:
        """Commits the tick, or returns its first result.

        Raises PartsDiffer (409), BadManifest (422), TooEarly (425) while another finalize runs, and Unavailable or
        Overloaded for errors to retry.
        """
        held = (await register_of(self._context, of).read()).value
        if held.result is not None:
            tick.repeated_or_raise(held, verification.parsed(body))
            if held.manifest is None and (record := await recorded(self._context.store, of)):
                self._same_or_raise(body, record)
            self._results.labels(outcome="cached").inc()
            return held.result
        if of in self._under_way:
            raise TooEarly("this tick is being finalized", retry_after_s=self._settings.retry_after_s)
        self._under_way.add(of)
        began_s = self._clock.monotonic_s()
        try:
            named = {"org": of.org_id, "project": of.project_id, "tick": of.tick_id}
            async with (
                self._locks.of(of.org_id),
                self._ownership.of(of.org_id, of.project_id) as epoch,
                self._runs.record(FINALIZE, of.path, named) as run,
            ):
                run.answers = (PartsDiffer, TooEarly, Overloaded)
                result = await self._commit(of, body, epoch, run)
                run.idle, run.rows_out = True, result.rows_inserted + result.rows_replaced
        except Fenced as error:
            raise Unavailable("another replica has claimed this project", hint="finalize again") from error
        finally:
            self._under_way.discard(of)
        self._results.labels(outcome="committed").inc()
        self._seconds.observe(self._clock.monotonic_s() - began_s)
        return result

    async def _commit(self, of: TickId, body: bytes, epoch: int, run: ActiveRun) -> FinalizeResult:
        register = register_of(self._context, of)
        seen = (await register.read()).value
        if seen.result is not None:
            return seen.result
        run.note(f"{iso(run.began_ms)} finalize on {self._context.node}")
        record = await recorded(self._context.store, of)
        if record is not None:
            self._same_or_raise(body, record)
        if record is None:
            try:
                verified, sent = await self._verify(of, seen, body, register, epoch)
            except BadManifest as error:
                await self._fail(register, error, epoch, run, by_bronze=False)
                raise
            self._note(run, f"{len(verified.keys)} parts verified")
            await register.change(
                lambda now: tick.begin(now, seen, sent, epoch=epoch, now_ms=now_ms(self._clock)), epoch=epoch
            )
            record = await self._record(of, verified, body, await self._write(verified, register, epoch, run))
        self._note(run, f"committed at {record.committed_at}")
        await self._queue.send(self._message(record))
        self._note(run, "message to silver sent")
        await commit_times.note(self._context, of)
        await self._committed.create(self._row(record))
        result = FinalizeResult(
            of.tick_id, "committed", record.bronze.rows_inserted, record.bronze.rows_replaced, record.committed_at
        )
        manifest = verification.parsed(body)
        return await register.change(
            lambda now: tick.finish(now, of, result, manifest=manifest, log=run.lines, now_ms=now_ms(self._clock)),
            epoch=epoch,
        )

    def _note(self, run: ActiveRun, words: str) -> None:
        run.note(f"+{now_ms(self._clock) - run.began_ms} ms {words}")

    def _same_or_raise(self, body: bytes, record: CommitRecord) -> None:
        """Raises BadManifest when a committed tick is finalized with another manifest, however long ago it was."""
        if not verification.is_of_record(body, record):
            raise tick.other_manifest()

    async def _verify(
        self, of: TickId, seen: TickState, body: bytes, register: Register[TickState], epoch: int
    ) -> tuple[BronzeTick, Any]:
        """The tick for bronze: every listed part exists, is Parquet, and has the rows and columns of the manifest."""
        found = verification.decode_manifest(body, of)
        verification.compare_parts(found, seen.parts)
        gate = asyncio.Semaphore(FOOTERS_AT_ONCE)

        async def is_gone(table: TickTable, listed: ManifestPart) -> bool:
            async with gate:
                try:
                    part = seen.parts[str(listed.file_seq)]
                    footer = await verification.read_footer(self._context.store, part)
                except NotFound:
                    return True
                verification.check_footer(footer, listed, table, self._settings.part_rows_max)
                return False

        parts = [(table, listed) for table in found.tables for listed in table.parquets]
        checked = await asyncio.gather(*(is_gone(*each) for each in parts), return_exceptions=True)
        gone = [listed.file_seq for (_, listed), lost in zip(parts, checked, strict=True) if lost is True]
        for error in (each for each in checked if isinstance(each, BaseException)):
            raise error  # that of the first part in the manifest
        for seq in gone:
            lost = seen.parts[str(seq)]
            await register.change(
                lambda now, seq=seq, lost=lost: tick.forget(now, seq, lost, now_ms=now_ms(self._clock)),  # type: ignore[misc]
                epoch=epoch,
            )
        if gone:
            raise PartsDiffer(missing=gone)
        keys = {int(seq): part.key for seq, part in seen.parts.items()}
        verified = BronzeTick(of.org_id, of.project_id, of.tick_id, found.dt or self._day(), found.tables, keys, epoch)
        return verified, msgspec.json.decode(body)

    async def _write(
        self, verified: BronzeTick, register: Register[TickState], epoch: int, run: ActiveRun
    ) -> BronzeResult:
        try:
            done = await self._bronze.commit(verified)
        except BadManifest as error:
            await self._fail(register, error, epoch, run, by_bronze=True)
            raise
        except Unprocessable as error:
            refused = BadManifest("rows_refused", error.message, hint=error.hint)
            await self._fail(register, refused, epoch, run, by_bronze=True)
            raise refused from error
        tables = etag_of(done.versions)
        self._note(run, f"bronze: {done.rows_inserted} rows inserted, {done.rows_replaced} replaced, {tables}")
        return done

    async def _fail(
        self, register: Register[TickState], error: BadManifest, epoch: int, run: ActiveRun, *, by_bronze: bool
    ) -> None:
        self._results.labels(outcome="refused").inc()
        failure = TickFailure(error.detail["error_class"], error.message, run.name)
        log.warning("finalize refused", error_class=failure.error_class, error=error.message, by_bronze=by_bronze)
        await register.change(
            lambda now: tick.fail(now, failure, by_bronze=by_bronze, now_ms=now_ms(self._clock)), epoch=epoch
        )

    async def _record(self, of: TickId, verified: BronzeTick, body: bytes, done: BronzeResult) -> CommitRecord:
        """Creates the commit record: from here on the tick is committed. The first record stays."""
        at_ms = now_ms(self._clock)
        modes = {table.mode for table in verified.tables}
        record = CommitRecord(
            schema=COMMIT_SCHEMA,
            org_id=of.org_id,
            project_id=of.project_id,
            tick_id=of.tick_id,
            dt=verified.dt,
            mode=modes.pop() if len(modes) == 1 else "mixed",
            manifest_sha256=hashlib.sha256(body).hexdigest(),
            parts={str(part.file_seq): part.sha256 for table in verified.tables for part in table.parquets},
            bronze=done,
            committed_at=iso(at_ms),
            committed_at_ms=at_ms,
            attempt_id=self._context.ids.token(),
            manifest_digest=verification.digest_of(body),
        )
        try:
            await self._context.store.create(paths.commit(of), msgspec.json.encode(record))
        except AlreadyExists as error:
            return read_record(error.current, CommitRecord)
        self._rows.labels(change="inserted").inc(done.rows_inserted)
        self._rows.labels(change="replaced").inc(done.rows_replaced)
        return record

    def _day(self) -> str:
        return iso(now_ms(self._clock))[:10].replace("-", "")

    def _message(self, record: CommitRecord) -> TickMessage:
        return message_of(record, iso(now_ms(self._clock)))

    def _row(self, record: CommitRecord) -> AuditRow:
        return AuditRow(
            org_id=record.org_id,
            project_id=record.project_id,
            tick_id=record.tick_id,
            state="committed",
            attempt_id=self._context.ids.token(),
            at_ms=record.committed_at_ms,
            expires_at_s=round(now_ms(self._clock) / 1000 + self._settings.audit_ttl_s),
            fields={
                "mode": record.mode,
                "dt": record.dt,
                "committed_at": record.committed_at,
                "rows_inserted": record.bronze.rows_inserted,
                "rows_replaced": record.bronze.rows_replaced,
                "bronze_db_etag": etag_of(record.bronze.versions),
            },
        )


def message_of(record: CommitRecord, emitted_at: str) -> TickMessage:
    return TickMessage(
        org_id=record.org_id,
        project_id=record.project_id,
        tick_id=record.tick_id,
        mode=record.mode,
        dt=record.dt,
        bronze_db_key=paths.bronze(record.org_id, record.project_id),
        bronze_db_etag=etag_of(record.bronze.versions),
        emitted_at=emitted_at,
    )


def iso(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
