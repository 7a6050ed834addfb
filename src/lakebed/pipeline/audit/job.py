"""The audit: one listing, everything joined against it, and the results stored.

    findings   → table audit/findings, replaced whole         bytes first
    work       → audit/v1/<id>/tasks/…jsonl                   bytes first
    the record → audit/v1/<id>/audit.json, created if absent  the one conditional write
    the last   → audit/v1/last.json, a register               derived

An audit that dies leaves files that nothing refers to. The driver holds counts and the first findings only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import msgspec
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from lakebed.batches.model import AuditWorkFile, GarbageProof
from lakebed.batches.paths import ACCEPTED, QUARANTINE, RAW_BLOBS
from lakebed.core.context import Context
from lakebed.core.errors import Corrupt, Unavailable
from lakebed.delta.model import TableSpec
from lakebed.pipeline.audit import counting, findings, keys, paths, reading
from lakebed.pipeline.audit.conservation import (
    ConservationCheck,
    DroppedSamples,
    RemovedBatches,
    as_listed,
    read_rollup_state,
    removed_batches,
)
from lakebed.pipeline.audit.flow import FlowCheck
from lakebed.pipeline.audit.model import (
    AUDIT_SCHEMA,
    FINDINGS_SHOWN,
    AuditFinding,
    AuditRecord,
    Conservation,
    FindingTotal,
)
from lakebed.pipeline.audit.stored import publish
from lakebed.pipeline.audit.sums import prints
from lakebed.pipeline.settings import AuditSettings
from lakebed.pipeline.tables.table import Table
from lakebed.rollups.model import RollupState
from lakebed.spark.lineage import Dataset, lineage_of
from lakebed.spark.listing import Listing, cause, list_bucket
from lakebed.spark.location import Location
from lakebed.spark.tasks import in_arrow
from lakebed.store.settings import StoreSettings

WORK_LINES = 5_000  # of one file
WORK_MAX = 1_000_000  # lines of one audit; the reconciler's own audit finds the rest
MANIFESTS_PER_TASK = 200  # below, a task costs more to start than to run
FINDINGS_PER_FILE = 200_000
ROUNDS_MAX = 10  # wrong references that lead to one another, each found by reading the one before
TASKS = 8  # that read objects: they wait for the bucket more than they work
INVENTORY_MARGIN_NS = 86_400_000_000_000  # a report may lack what was written within a day before it

Batches = Iterator[Any]


class BucketAuditor:
    """Audits the batches of one bucket. Synchronous, as Spark is: call it from a thread of its own."""

    def __init__(self, spark: SparkSession, context: Context) -> None:
        self._spark, self._context = spark, context
        self._settings = context.settings.of(AuditSettings)
        self._grace_s = self._settings.grace_s
        self._bucket = context.settings.of(StoreSettings)
        self._rollups: RollupState | Corrupt = RollupState()

    def run(
        self,
        *,
        horizon_s: float,
        listing: Listing | None = None,
        verify: bool = False,
        dropped: Sequence[DroppedSamples] = (),
        grace_s: float | None = None,
    ) -> AuditRecord:
        """One audit, whole, from a listing taken now or one that is given.

        `verify` reads every manifest and blob, and compares all stages sample by sample; `dropped` are the numbers
        that agents report as given up, `grace_s` overrides the setting.

        Blobs that nothing refers to and that are older than `horizon_s` become candidates of garbage collection.

        What is wrong in the bucket is in the record; this raises only when the audit could not be made.
        """
        self._grace_s = self._settings.grace_s if grace_s is None else grace_s
        # The roller's state first: what it has committed is in a listing that starts later.
        self._rollups = asyncio.run(read_rollup_state(self._context.store)) if verify else RollupState()
        taken = listing or list_bucket(self._spark, self._bucket, clock=self._context.clock)
        read = [Dataset(ACCEPTED.rstrip("/")), Dataset(RAW_BLOBS.rstrip("/"))]
        try:
            with lineage_of(self._context).job("audit", inputs=read) as run:
                if listing is not None and verify:
                    self._rollups = as_listed(self._rollups, taken.rows, self._through_ns(taken))
                # After the listing: what was removed meanwhile is in it.
                removed = asyncio.run(removed_batches(self._context.store)) if verify else RemovedBatches()
                dropped = (*dropped, *removed.ranges)
                record = self._audit(taken, verify, round(horizon_s * 1e9), dropped, removed.before_ns)
                run.wrote("tables/audit/findings", rows=sum(total.objects for total in record.totals))
                return record
        except PySparkException as error:
            raise Unavailable(f"the audit was not completed: {cause(error)}") from error
        finally:
            if listing is None:
                taken.close()

    def _audit(
        self,
        taken: Listing,
        verify: bool,
        horizon_ns: int,
        dropped: Sequence[DroppedSamples],
        removed_ns: int,
    ) -> AuditRecord:
        through_ns = self._through_ns(taken)
        index, packed, listing = self._one_layout(taken.rows)
        audit_id = paths.audit_id(taken.began_ns, self._context.ids.token())
        conserver = ConservationCheck(self._spark, self._context, self._keep, packed)
        kept, fingerprints = Conservation(), None
        if verify:
            manifests = self._manifests(findings.identities(listing, through_ns))
            fingerprints = self._prints(listing, packed)
            kept = conserver.run(
                manifests,
                fingerprints,
                listing,
                self._rollups,
                judged_ns=through_ns,
                grace_ns=round(self._grace_s * 1e9),
                dropped=dropped,
                removed_ns=removed_ns,
            )
            flow = FlowCheck(self._spark, self._context)
            kept = msgspec.structs.replace(kept, flows=flow.run(), gold=flow.gold())
            referring = findings.references(manifests, findings.verified(fingerprints))
            hashes = findings.hashes(referring.unionByName(findings.named(listing)))
        else:
            sums, named = self._keep(counting.counted(listing, through_ns)), findings.named(listing)
            unsound = self._keep(counting.unsound_hashes(named.unionByName(counting.plain_manifests(sums))))
            manifests, referring, unsound = self._doubted(listing, through_ns, sums, unsound)
            hashes = findings.hashes(referring.unionByName(named), unsound)
        found = (
            findings.of_identities(manifests, through_ns)
            .unionByName(findings.of_hashes(hashes, before_ns=through_ns, ripe_ns=through_ns - horizon_ns))
            .unionByName(findings.of_unknown_objects(listing))
        )
        more = [conserver.findings, *self._of_objects(index, packed, listing, through_ns)]
        if fingerprints is not None:
            more.append(findings.of_entries(self._entries(taken.rows, index), manifests, fingerprints))
        found = found if packed is None else findings.in_packs(found, packed)
        found = self._keep(reduce(DataFrame.unionByName, [each for each in more if each is not None], found))
        totals = self._totals(found)
        self._tabulate(found, audit_id, totals)
        (work, left), (shown, hidden) = self._work(found, audit_id, totals), self._shown(found, totals)
        record = AuditRecord(
            schema=AUDIT_SCHEMA,
            audit_id=audit_id,
            began_at_unix_ns=taken.began_ns,
            completed_at_unix_ns=self._context.clock.now_ns(),
            source=taken.source,
            verified=verify,
            ok=not any(total.wrong for total in totals) and not kept.wrong,
            objects=taken.objects,
            size_bytes=taken.size_bytes,
            prefixes=taken.tops,
            totals=totals,
            findings=shown,
            findings_left_out=hidden,
            proof=self._proof(taken, through_ns, left),
            work=work,
            work_left_out=left,
            conservation=kept,
            unseen=() if verify else counting.UNSEEN,
        )
        asyncio.run(publish(self._context, record))
        return record

    def _through_ns(self, taken: Listing) -> int:
        """Objects written up to here are checked: later ones may be incomplete, or listed in part."""
        if taken.source == "inventory":
            return taken.began_ns - INVENTORY_MARGIN_NS
        return taken.began_ns - round(self._grace_s * 1e9)

    def _doubted(
        self, listing: DataFrame, through_ns: int, sums: DataFrame, unsound: DataFrame
    ) -> tuple[DataFrame, DataFrame, DataFrame]:
        """The identities that are not in order, as read; what they say of hashes; and the hashes to look at with them.

        A manifest that is read may refer to the blob of another manifest: then that one is read too.
        """
        strange = self._keep(counting.strange(sums, unsound))
        for _ in range(ROUNDS_MAX):
            manifests = self._manifests(findings.identities(listing, through_ns, strange))
            referring = self._keep(findings.references(manifests))
            fresh = self._keep(referring.select("sha256").join(unsound, "sha256", how="left_anti").distinct())
            if fresh.isEmpty():
                break
            unsound = self._keep(unsound.unionByName(fresh))
            more = self._keep(counting.strange(sums, unsound))
            if more.count() == strange.count():
                break
            strange = more
        return manifests, referring, unsound

    def _manifests(self, identities: DataFrame) -> DataFrame:
        """The identities with what their manifests say, which are read."""
        found = self._keep(identities)
        manifests = findings.judged(found)
        tasks = min(TASKS, -(-manifests.count() // MANIFESTS_PER_TASK))
        if not tasks:  # the listing shows everything
            return self._keep(findings.with_manifests(found, self._spark.createDataFrame([], reading.MANIFESTS)))
        read = in_arrow(manifests.repartition(tasks), reading.reading_manifests(self._bucket), reading.MANIFESTS)
        return self._keep(findings.with_manifests(found, read))

    def _prints(self, listing: DataFrame, packed: DataFrame | None) -> DataFrame:
        """The fingerprints of every blob: the one time that they are read."""
        blobs = keys.located(keys.objects(listing, ("raw_blob",)).select("key", "sha256"), packed).repartition(TASKS)
        return self._keep(prints(in_arrow(blobs, reading.reading_samples(self._bucket), reading.SAMPLES)))

    def _one_layout(self, rows: DataFrame) -> tuple[DataFrame | None, DataFrame | None, DataFrame]:
        """The rows of the index, the frames of packs, and a listing in which both are objects of their own."""
        index, packed = self._index_rows(rows), self._packed(rows)
        listing = rows if index is None else self._keep(keys.expanded(rows, index))
        return index, packed, listing if packed is None else self._keep(keys.unpacked(listing, packed))

    def _of_objects(
        self, index: DataFrame | None, packed: DataFrame | None, listing: DataFrame, through_ns: int
    ) -> list[DataFrame]:
        """Findings about objects that hold several batches: segments of the index, and packs."""
        found = [findings.of_packs(packed)] if packed is not None else []
        if index is not None:
            found += [findings.of_segments(index), findings.of_places(index, listing, through_ns)]
        return found

    def _packed(self, listing: DataFrame) -> DataFrame | None:
        """The frames of all packs, whose tables are read; None when there is no pack."""
        packs = self._keep(keys.objects(listing, ("raw_pack",)).select("key", "modified_ns", "size_bytes"))
        tasks = min(TASKS, -(-packs.count() // MANIFESTS_PER_TASK))
        if not tasks:
            return None
        return self._keep(in_arrow(packs.repartition(tasks), reading.reading_packs(self._bucket), reading.PACKED))

    def _index_rows(self, listing: DataFrame) -> DataFrame | None:
        """The rows of the index segments, which are read; None when there is no segment."""
        segments = self._keep(keys.objects(listing, ("accepted_index",)).select("key", "modified_ns"))
        tasks = min(TASKS, -(-segments.count() // MANIFESTS_PER_TASK))
        if not tasks:
            return None
        task = reading.reading_segments(self._bucket)
        return self._keep(in_arrow(segments.repartition(tasks), task, reading.INDEX_ROWS))

    def _entries(self, listing: DataFrame, index: DataFrame | None) -> DataFrame:
        """The entries by time, single objects and rows, with what each of them says."""
        listed = keys.objects(listing, ("accepted_by_time",))
        entries = listed.select("key").repartition(TASKS)
        read = in_arrow(entries, reading.reading_entries(self._bucket), reading.ENTRIES)
        found = listed.join(read, "key", how="inner")
        if index is None:
            return found
        rows = keys.expanded(listing.limit(0), index)
        content = index.filter("problem is null").select(*read.columns)
        superseded = found.join(content.select("key"), "key", how="left_anti")
        return superseded.unionByName(keys.objects(rows, ("accepted_by_time",)).join(content, "key", how="inner"))

    def _totals(self, found: DataFrame) -> tuple[FindingTotal, ...]:
        rows = (
            found.groupBy("finding", "kind").agg(F.count("*").alias("n"), F.sum("size_bytes").alias("size")).collect()
        )
        made = [
            FindingTotal(row["finding"], row["kind"], row["n"], row["size"] or 0, is_wrong(row["finding"], row["kind"]))
            for row in rows
        ]
        return tuple(sorted(made, key=lambda total: (not total.wrong, total.finding, total.kind)))

    def _tabulate(self, found: DataFrame, audit_id: str, totals: tuple[FindingTotal, ...]) -> None:
        table = Table(
            self._spark,
            TableSpec(paths.FINDINGS_TABLE, found.schema.json()),
            self._context,
            location=Location.of(self._bucket),
        )
        if totals:
            files = -(-sum(total.objects for total in totals) // FINDINGS_PER_FILE)
            table.replace(found.coalesce(files), note=audit_id)
        else:
            table.replace_by([], note=audit_id)

    def _work(
        self, found: DataFrame, audit_id: str, totals: Sequence[FindingTotal]
    ) -> tuple[tuple[AuditWorkFile, ...], int]:
        """Writes what is to be done, from the executors, and gives the files and how many lines were left out."""
        if not totals:
            return (), 0
        wanted = self._keep(findings.work(found).limit(WORK_MAX))
        count = wanted.count()
        left = max(0, findings.work(found).count() - count) if count >= WORK_MAX else 0
        if not count:
            return (), 0
        spread = wanted.repartition(max(1, -(-count // (WORK_LINES * 4))), "do")
        task = writing(Location.of(self._bucket), paths.work_folder(audit_id))
        rows = in_arrow(spread.sortWithinPartitions("do", "key"), task, "file string").collect()
        files = [msgspec.json.decode(row["file"], type=AuditWorkFile) for row in rows]
        return tuple(sorted(files, key=lambda file: (file.do, file.key))), left

    def _shown(self, found: DataFrame, totals: tuple[FindingTotal, ...]) -> tuple[tuple[AuditFinding, ...], int]:
        rows = found.orderBy("finding", "kind", "key").limit(FINDINGS_SHOWN).collect() if totals else []
        return tuple(AuditFinding(**row.asDict()) for row in rows), sum(total.objects for total in totals) - len(rows)

    def _proof(self, taken: Listing, through_ns: int, left: int) -> GarbageProof:
        counted = keys.visible(taken.rows).agg(
            F.count_if(F.col("key").startswith(ACCEPTED)),
            F.count_if(F.col("key").startswith(QUARANTINE)),
        )
        accepted, quarantined = counted.first() or (0, 0)
        return GarbageProof(through_ns, taken.source, accepted, quarantined, whole=left == 0)

    def _keep(self, frame: DataFrame) -> DataFrame:
        """The frame, computed now and kept on disk, cut off from how it was made: a plan over kept frames that carries
        all their plans costs more to make than to run. If an executor is lost with it, the audit fails without a
        result."""
        return frame.localCheckpoint(eager=True, storageLevel=StorageLevel.DISK_ONLY)


def is_wrong(finding: str, kind: str) -> bool:
    """Whether a finding makes the audit fail. Orphaned blobs are expected, and so are index entries of swept ones."""
    return finding != "orphaned"


def writing(location: Location, folder: str) -> Callable[[Batches], Batches]:
    """The task that writes lines of work into files of its own and describes them."""

    def write(batches: Batches) -> Batches:
        import uuid

        import pyarrow as pa

        filesystem = location.filesystem()
        waiting: dict[str, list[bytes]] = {}

        def flush(do: str) -> str:
            key = f"{folder}{do}-{uuid.uuid4()}.jsonl"
            with filesystem.open_output_stream(location.path(key)) as sink:
                sink.write(b"\n".join(waiting[do]) + b"\n")
            return msgspec.json.encode(AuditWorkFile(key, do, len(waiting.pop(do)))).decode()

        for batch in batches:
            done = []
            for line in batch.to_pylist():
                waiting.setdefault(line["do"], []).append(msgspec.json.encode(line))
                if len(waiting[line["do"]]) >= WORK_LINES:
                    done.append(flush(line["do"]))
            yield pa.record_batch([pa.array(done, pa.string())], names=["file"])
        yield pa.record_batch([pa.array([flush(do) for do in list(waiting)], pa.string())], names=["file"])

    return write
