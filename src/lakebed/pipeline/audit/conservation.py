"""Runs the conservation of an audit: from what agents numbered, through accepted and bronze, to rollups.

Stages that do not exist yet (no bronze table, no rollups) are left out of the record. The samples themselves are
compared only for batches whose checksum differs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import reduce

import msgspec
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from lakebed.batches.paths import ACCEPTED_BY_TIME, HOUR_NS
from lakebed.batches.paths import hour_of as hour_folder
from lakebed.batches.reader import RawBatches
from lakebed.core.context import Context
from lakebed.core.errors import Corrupt, NotFound
from lakebed.delta.log import decode, log_key
from lakebed.delta.model import Snapshot, TableSpec
from lakebed.pipeline.audit import keys, paths, reading, sums
from lakebed.pipeline.audit.findings import plain
from lakebed.pipeline.audit.model import LOSSES_SHOWN, Conservation, ConservationRow
from lakebed.pipeline.audit.reading import GONE
from lakebed.pipeline.bronze.places import SAMPLES, placed
from lakebed.pipeline.bronze.samples import note_in
from lakebed.pipeline.tables.compaction import kept_since_us
from lakebed.pipeline.tables.table import Table
from lakebed.rollups import paths as rollup_paths
from lakebed.rollups.model import RollupState
from lakebed.spark.location import Location
from lakebed.spark.tasks import in_arrow
from lakebed.store.protocol import Store
from lakebed.store.settings import StoreSettings

NOTES_MAX = 200  # versions read back for the last offset of bronze: between two steps there is only maintenance
TASKS = 8
FOREVER_NS = 2**63 - 1
SAMPLE_COLUMNS = ("agent_id", "boot_id", "seq", "metric", "labels", "time_ns", "value", "kind", "batch_id")


class DroppedSamples(msgspec.Struct, frozen=True):
    """Numbers that an agent reports as given up: they were never sent, so they are not lost."""

    agent_id: str
    boot_id: str
    first: int
    last: int


async def read_rollup_state(store: Store) -> RollupState | Corrupt:
    """What the roller has committed, or why that cannot be read. Read before a listing, so that the listing has it."""
    try:
        return msgspec.json.decode((await store.get(rollup_paths.ROLLER_STATE)).data, type=RollupState)
    except NotFound:
        return RollupState()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Corrupt(f"does not decode: {error}")


def as_listed(state: RollupState | Corrupt, listing: DataFrame, through_ns: int) -> RollupState | Corrupt:
    """The state as far as a given listing shows it: generations that were committed later do not count, and batches
    that no generation covers are not checked."""
    if isinstance(state, Corrupt):
        return state
    made = keys.visible(listing).filter(F.col("key").startswith(rollup_paths.MANIFESTS))
    old = made.filter(F.coalesce(F.col("modified_ns"), F.lit(0)) <= F.lit(through_ns))
    last = old.agg(F.max(_generation()).alias("last")).first()
    newest = int(last["last"] or 0) if last else 0
    return msgspec.structs.replace(state, committed=min(state.committed, newest), settled_ns=0)


class RemovedBatches(msgspec.Struct, frozen=True):
    """What retention removes: numbers that are no gap, and the time before which no stage is compared."""

    ranges: tuple[DroppedSamples, ...] = ()
    before_ns: int = 0


async def removed_batches(store: Store) -> RemovedBatches:
    raw = RawBatches(store)
    ranges = [
        DroppedSamples(agent_id, boot_id, first, last)
        async for agent_id, boot_id, boot in raw.settled()
        for first, last in boot.ranges
    ]
    return RemovedBatches(tuple(ranges), await raw.removed_ns())


class ConservationCheck:
    def __init__(
        self,
        spark: SparkSession,
        context: Context,
        keep: Callable[[DataFrame], DataFrame],
        packed: DataFrame | None = None,
    ) -> None:
        self._spark, self._context, self._keep, self._packed = spark, context, keep, packed
        self._bucket = context.settings.of(StoreSettings)
        self.findings: DataFrame | None = None  # of the rollups, once they were checked
        self._uncovered: Callable[[], DataFrame] | None = None
        self._kept_since_us = 0

    def run(
        self,
        manifests: DataFrame,
        prints: DataFrame,
        listing: DataFrame,
        state: RollupState | Corrupt,
        *,
        judged_ns: int,
        grace_ns: int,
        dropped: Sequence[DroppedSamples],
        removed_ns: int = 0,
    ) -> Conservation:
        """Compares all stages.

        `prints` are the fingerprints of every blob, `state` is the roller's state before the listing began,
        batches accepted before `removed_ns` were removed by retention, and are compared in no stage,
        `judged_ns` is the latest time of objects that are checked, and clocks may differ by `grace_ns`.
        """
        batches = self._keep(sums.batches(manifests, prints))
        good = self._keep(sums.good(batches, prints))
        given_up = self._spark.createDataFrame(
            [(each.agent_id, each.boot_id.encode().hex(), each.first, each.last) for each in dropped],
            "agent_id string, boot string, first bigint, last bigint",
        )
        numbers = self._keep(sums.numbering(batches, given_up))
        parts = [
            good.selectExpr("agent_id", "hour", "samples as accepted", "high", "low"),
            numbers,
            sums.unreadable(batches, prints),
        ]
        # A number of two batches is in bronze once, unless they came too far apart for it to see.
        twice = sums.overlapping(batches) if not numbers.filter("overlap > 0").isEmpty() else None
        bronze = self._bronze(good, twice, judged_ns, grace_ns, removed_ns)
        rollups = self._rollups(good, listing, state, removed_ns)
        wide = self._keep(sums.by_agent_and_hour(*parts, *bronze, *rollups))
        self._tabulate(wide)
        return self._summary(wide, bool(bronze), bool(rollups))

    def _bronze(
        self, good: DataFrame, twice: DataFrame | None, judged_ns: int, grace_ns: int, removed_ns: int
    ) -> list[DataFrame]:
        table = self._table(asyncio.run(placed(self._context.store, SAMPLES)))
        state = table.snapshot()
        if state.version < 0:
            return []
        rows = table.read(state.version, columns=SAMPLE_COLUMNS).filter(f"batch_id >= '{removed_ns:020d}'")
        until_ns, looked_ns = self._bronze_reached(table, state)
        self._kept_since_us = kept_since_us(state)
        both = self._keep(
            sums.against_bronze(
                good,
                sums.bronze_prints(rows),
                until_ns=until_ns,
                looked_ns=looked_ns - grace_ns if looked_ns else FOREVER_NS,
                kept_since_us=self._kept_since_us,
                judged_ns=judged_ns,
            )
        )
        counted = both.select("agent_id", "hour", "bronze", "waiting", "expired")
        named = both.filter("suspect").select("manifest_id", "sha256")
        if twice is not None:
            there = both.filter("bronze > 0 and sha256 is not null").join(twice, "manifest_id", how="left_semi")
            named = named.unionByName(there.select("manifest_id", "sha256"))
        suspects = self._keep(named)
        if suspects.isEmpty():
            return [counted]
        return [counted, self._compared(suspects, good, rows)]

    def _compared(self, suspects: DataFrame, good: DataFrame, rows: DataFrame) -> DataFrame:
        blobs = suspects.filter("sha256 is not null").select("sha256").distinct()
        named = blobs.selectExpr(f"{keys.blob_key('sha256')} as key", "sha256")
        requests = keys.located(named, self._packed).repartition(TASKS)
        read = in_arrow(requests, reading.reading_samples(self._bucket), reading.SAMPLES).filter("problem is null")
        boots = good.join(blobs, "sha256", how="left_semi").selectExpr(
            "agent_id", "decode(unhex(boot), 'utf-8') as boot_id"
        )
        blamed = suspects.select(F.col("manifest_id").alias("batch_id")).distinct()
        strange = rows.join(F.broadcast(blamed), "batch_id", how="left_semi")
        same = rows.join(F.broadcast(boots.distinct()), ["agent_id", "boot_id"], how="left_semi")
        found = same.unionByName(strange.join(F.broadcast(boots.distinct()), ["agent_id", "boot_id"], how="left_anti"))
        mine = good.selectExpr("*", "decode(unhex(boot), 'utf-8') as boot_id").join(
            boots.distinct(), ["agent_id", "boot_id"], how="left_semi"
        )
        old = mine.filter(sums.is_expired(self._kept_since_us)).select("agent_id", "boot_id", "first", "last")
        return sums.compared(sums.hashed(read), found, blamed, old.distinct())

    def _bronze_reached(self, table: Table, state: Snapshot) -> tuple[int, int]:
        """How far the last step of bronze came, by acceptance, and when it listed. Without a note all of it is due."""

        async def read() -> tuple[int, int]:
            for version in range(state.version, max(-1, state.version - NOTES_MAX), -1):
                key = log_key(table.spec.root, version)
                note = note_in(decode((await self._context.store.get(key)).data, key))
                if note is not None:
                    return note.offset["through_ns"], note.looked_ns
            return FOREVER_NS, 0

        return asyncio.run(read())

    def _rollups(
        self, good: DataFrame, listing: DataFrame, state: RollupState | Corrupt, removed_ns: int
    ) -> list[DataFrame]:
        if isinstance(state, Corrupt):
            damaged = [(rollup_paths.ROLLER_STATE, state.message)]
            self.findings = of_state(self._spark.createDataFrame(damaged, "key string, problem string"))
            return []
        if not state.windows_s:
            return []
        objects, number = keys.visible(listing), _generation()
        gone = [F.lit(each) for each in state.abandoned]
        counts = (number <= F.lit(state.committed)) & (~number.isin(*gone) if gone else F.lit(True))
        window = f"{rollup_paths.ROLLUP}window={min(state.windows_s)}s/"
        chunks = objects.filter(F.col("key").startswith(window) & counts).select("key").repartition(TASKS)
        made = objects.filter(F.col("key").startswith(rollup_paths.MANIFESTS) & counts).select("key").repartition(TASKS)
        rolled = self._keep(in_arrow(chunks, reading.reading_rollups(self._bucket), reading.ROLLUPS))
        covers = self._keep(in_arrow(made, reading.reading_covers(self._bucket), reading.COVERS))
        others = F.col("key").startswith(rollup_paths.INDEX) | (
            F.col("key").startswith(rollup_paths.ROLLUP) & ~F.col("key").startswith(window)
        )
        unread = objects.filter(others & counts).select("key").repartition(TASKS)
        bad = in_arrow(unread, reading.reading_chunks(self._bucket), reading.CHUNKS)
        # The roller has taken the notes it has read; it tries unreadable batches again in every run.
        fresh = F.col("key").startswith(rollup_paths.ROLLUP_WORK) & (
            F.col("modified_ns") >= F.lit(state.notes_ms * 1_000_000)
        )
        late = objects.filter(fresh | F.col("key").startswith(rollup_paths.ROLLER_UNREADABLE)).select(
            F.regexp_extract("key", r"([^/]+)\.json$", 1).alias("manifest_id")
        )
        self.findings = of_rollups(rolled, covers, bad, objects, removed_ns)
        covered = covers.filter("what = 'batch'").selectExpr("name as manifest_id")
        due = sums.due_in_rollups(good, covered, late, state.settled_ns)
        self._uncovered = lambda: of_uncovered(sums.uncovered(good, covered, late, state.settled_ns))
        got = (
            rolled.filter("problem is null")
            .groupBy("agent_id", "hour")
            .agg(
                F.sum("rollup").alias("rollup"),
                F.sum("total").alias("r_total"),
                F.min("least").alias("r_least"),
                F.max("greatest").alias("r_greatest"),
            )
        )
        # In the hour after, chunks may have samples of removed batches whose agents' clocks were ahead.
        kept = f"hour >= '{hour_folder(removed_ns + HOUR_NS)}'" if removed_ns else "true"
        return [sums.against_rollups(due.filter(kept), got.filter(kept))]

    def _tabulate(self, wide: DataFrame) -> None:
        self._table(paths.CONSERVATION_TABLE, wide.schema.json()).replace(wide)

    def _summary(self, wide: DataFrame, bronze: bool, rollups: bool) -> Conservation:
        names = [name for name in wide.columns if name not in ("agent_id", "hour", "high", "low")]
        every = (F.count_distinct("agent_id").alias("agents"), F.count("*").alias("hours"))
        total = wide.agg(*every, *(F.sum(name).alias(name) for name in names)).first()
        found = {name: int(total[name] or 0) for name in (*names, "agents", "hours")} if total else {}
        if found["uncovered"] and self.findings is not None and self._uncovered is not None:
            self.findings = self.findings.unionByName(self._uncovered())
        wrong = wide.filter(sums.WRONG).orderBy("agent_id", "hour")
        rows = [conservation_row(row.asDict(), bronze, rollups) for row in wrong.limit(LOSSES_SHOWN).collect()]
        count = wrong.count() if len(rows) == LOSSES_SHOWN else len(rows)
        whole = conservation_row({"agent_id": "", "hour": "", "high": 0, "low": 0} | found, bronze, rollups)
        stages = {"sent": whole.sent, "accepted": whole.accepted}
        stages |= {"bronze": whole.bronze} if whole.bronze is not None else {}
        stages |= {"rollup": whole.rollup, "rollup_due": found["due"]} if whole.rollup is not None else {}
        return Conservation(
            checked=True,
            agents=found["agents"],
            hours=found["hours"],
            stages=stages,
            waiting=found["waiting"],
            expired=found["expired"],
            kept_since_unix_ns=self._kept_since_us * 1000,
            lost=whole.lost,
            doubled=whole.doubled,
            changed=whole.changed,
            explained=whole.explained,
            rows=tuple(rows),
            rows_left_out=count - len(rows),
        )

    def _table(self, name: str, schema_json: str = '{"type":"struct","fields":[]}') -> Table:
        context = self._context
        location = Location.of(self._bucket)
        spec = TableSpec(name, schema_json)
        return Table(self._spark, spec, context, location=location)


def _generation() -> Column:
    """The number in the name of a chunk or a manifest of rollups."""
    return F.expr("try_cast(substring_index(substring_index(key, '/', -1), '-', 1) as bigint)")


def conservation_row(row: dict[str, object], bronze: bool, rollups: bool) -> ConservationRow:
    """A row of the wide table for the record. Stages that do not exist are null, and lose nothing."""
    count = {name: int(str(value)) for name, value in row.items() if name not in ("agent_id", "hour")}
    stages = {
        "lost": {"accepted": "gap", "raw": "unreadable", "bronze": "bronze_lost", "rollup": "rollup_lost"},
        "doubled": {"accepted": "overlap", "bronze": "bronze_doubled", "rollup": "rollup_doubled"},
        "changed": {"bronze": "bronze_changed", "rollup": "rollup_changed"},
    }
    named = {what: {at: count[column] for at, column in where.items()} for what, where in stages.items()}
    return ConservationRow(
        agent_id=str(row["agent_id"]),
        hour=str(row["hour"]),
        sent=count["sent"],
        accepted=count["accepted"],
        bronze=count["bronze"] if bronze else None,
        rollup=count["rollup"] if rollups else None,
        waiting=count["waiting"],
        expired=count["expired"],
        explained=count["explained"],
        checksum=f"{count['high']:x}:{count['low']:x}",
        **named,
    )


def of_rollups(
    rolled: DataFrame, covers: DataFrame, others: DataFrame, objects: DataFrame, removed_ns: int
) -> DataFrame:
    """Chunks and manifests of rollups that cannot be read, and chunks of rollups and of the index that are missing.

    A manifest outlives the chunks of its earlier hours, which retention has removed up to `removed_ns`.
    """
    unknown = ("cast(null as bigint) as size_bytes", "cast(null as bigint) as modified_ns")
    bad = [
        frame.filter(f"problem is not null and problem != '{GONE}'").selectExpr("key", "problem", *unknown)
        for frame in (rolled, covers, others)
    ]
    corrupt = reduce(DataFrame.unionByName, bad).selectExpr(*plain("corrupt", "rollup", "problem"))
    chunks = covers.filter("what in ('rollup', 'index')").selectExpr("name as chunk", "what", "key", "size_bytes")
    chunks = chunks.filter(F.regexp_extract("chunk", "(date=[^/]+/hour=[^/]+)/", 1) >= F.lit(hour_folder(removed_ns)))
    there = objects.selectExpr("key as chunk", "size_bytes as stored_bytes", "modified_ns")
    held = chunks.join(there, "chunk", how="left")
    lacking = held.filter("stored_bytes is null or stored_bytes != size_bytes").selectExpr(
        "if(stored_bytes is null, 'missing', 'corrupt') as finding",
        "if(what = 'index', 'index_chunk', 'rollup_chunk') as kind",
        "chunk as key",
        "key as referrer",
        "size_bytes",
        "modified_ns",
        "if(stored_bytes is null, 'a committed generation lacks it', "
        "concat('has ', stored_bytes, ' bytes, not ', size_bytes)) as reason",
    )
    return corrupt.unionByName(lacking)


def of_state(state: DataFrame) -> DataFrame:
    """The roller's state, which cannot be read: key, problem."""
    unknown = ("cast(null as bigint) as size_bytes", "cast(null as bigint) as modified_ns")
    return state.selectExpr("key", "problem", *unknown).selectExpr(*plain("corrupt", "rollup", "problem"))


def of_uncovered(batches: DataFrame) -> DataFrame:
    """Accepted batches that rollups have skipped: a cold run finds them."""
    reason = "'settled, and in no generation of rollups: lakebed pipeline rollup --cold'"
    key = f"concat('{ACCEPTED_BY_TIME}', {keys.hour_of('at_ns')}, '/', manifest_id, '.json') as key"
    unknown = ("cast(null as bigint) as size_bytes", "cast(null as bigint) as modified_ns")
    return batches.selectExpr(key, *unknown).selectExpr(*plain("unindexed", "rollup", reason))
