"""The audit of a million accepted manifests, on one machine, in a driver whose memory does not grow with them.

Real: the audit (`Auditor`, the quick one that `lakebed audit --quick --inventory` runs), Spark, the check of every file
of the report against its MD5, the reading of doubtful manifests from the bucket, the findings, the work, the record.
Synthetic: the bucket's contents. An S3 Inventory report in Parquet files lists what a bucket of so many batches would
hold, five objects a batch, and no such objects are made, because a sound batch is judged by its keys and never read.
A few batches are damaged on purpose, and the audit has to find exactly those; their manifests lie in the real bucket.

It is done twice, for a small number and for the whole: what the driver's memory grows by is told for both.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from lakebed.batches import acceptance, paths
from lakebed.batches.model import write_record
from lakebed.bench.harness import Check, Stand
from lakebed.context import Context
from lakebed.errors import Corrupt
from lakebed.frame.model import Identity
from lakebed.pipeline.settings import SparkSettings

MANIFESTS = 1_000_000
MANIFESTS_QUICK = 20_000
DAMAGED = 10  # batches of each sort of damage
DRIVER_BAR_BYTES = 64 * 1024 * 1024  # that Python may grow by in the driver: it holds counts, never keys
START_NS = 1_760_000_000_000_000_000
STEP_NS = 36_000_000  # a batch each: a million of them are ten hours
CREATED_NS = START_NS + 40 * 86_400_000_000_000
FRAME_BYTES = 50_000


async def audit(stand: Stand, folder: Path) -> list[Check]:
    """A part of `lakebed bench pipeline`."""
    checks: list[Check] = []
    for count in (MANIFESTS_QUICK,) if stand.quick else (MANIFESTS_QUICK, MANIFESTS):
        context = stand.apart()
        stand.tell(f"an inventory report of {count} accepted batches is made")
        await _store_doubtful(context, count)
        checks += await asyncio.to_thread(_measure, stand, context, folder / f"inventory-{count}", count)
    return checks


def _measure(stand: Stand, context: Context, folder: Path, count: int) -> list[Check]:
    from lakebed.pipeline.audit.job import Auditor
    from lakebed.pipeline.inventory import Shelf, inventory
    from lakebed.pipeline.session import open_session

    settings, clock = context.settings.of(SparkSettings), context.clock
    spark = open_session(settings)
    make_report(spark, folder, count)
    stand.tell(f"the audit of {count} manifests")
    python, java = os.getpid(), _java()
    for pid in (python, java):
        forget_peak(pid)
    before, began = resident_bytes(python), clock.monotonic_s()
    listing = inventory(spark, Shelf(folder=str(folder)), "manifest.json")
    record = Auditor(spark, context).run(listing=listing, horizon_s=0.0)
    seconds = clock.monotonic_s() - began
    listing.close()
    found = {(total.finding, total.kind): total.objects for total in record.totals}
    wanted = {
        ("missing", "raw_blob"): DAMAGED,
        ("orphaned", "raw_blob_by_time"): DAMAGED,
        ("unindexed", "accepted_by_time"): DAMAGED,
        ("orphaned", "raw_blob"): DAMAGED,
    }
    if found != wanted or record.proof.accepted != count:
        raise Corrupt(f"of {count} manifests the audit found {found}, not {wanted}")
    grown = max(0, peak_bytes(python) - before)
    return [
        Check(f"audit of {count} manifests, {listing.objects} objects", round(seconds, 1), "s"),
        Check("manifests audited", round(count / seconds, 1), "manifests/s"),
        Check("driver's Python grew by", _mb(grown), "MB", _mb(DRIVER_BAR_BYTES), grown <= DRIVER_BAR_BYTES),
        Check(f"driver's Java, with a heap of {settings.driver_memory}, had", _mb(peak_bytes(java)), "MB"),
    ]


async def _store_doubtful(context: Context, count: int) -> None:
    """Stores the manifests whose blob or entry by time is not there: the audit has to read those."""
    every = count // DAMAGED
    for number in sorted([*range(0, count, every), *range(1, count, every)]):
        identity = Identity(f"agent-{number % 1000:04d}", "boot-1", number * 100, number * 100 + 99)
        sha256 = hashlib.sha256(str(number).encode()).hexdigest()
        made = acceptance.manifest_of(
            identity, sha256, FRAME_BYTES, at_ns=START_NS + number * STEP_NS, collector_id="bench", attempt_id="bench"
        )
        await context.store.create(paths.accepted_key(identity), write_record(made))


def make_report(spark: Any, folder: Path, count: int) -> None:
    """The inventory of a bucket of so many batches. Of each `count // DAMAGED` batches, the first has no blob, the
    second no entry by time, and the third is a blob alone."""
    from pyspark.sql import functions as F

    from lakebed.pipeline.audit import keys

    every = count // DAMAGED
    text = (
        "concat('agent=', lower(hex(concat('agent-', lpad(cast(id % 1000 as string), 4, '0')))), '/boot=', "
        "lower(hex('boot-1')), '/', lpad(cast(id * 100 as string), 20, '0'), '-', "
        "lpad(cast(id * 100 + 99 as string), 20, '0'))"
    )
    batches = spark.range(count + DAMAGED).select(
        "id",
        F.expr(text).alias("place"),
        F.sha2(F.col("id").cast("string"), 256).alias("sha256"),
        (F.lit(START_NS) + F.col("id") * STEP_NS).alias("at_ns"),
    )
    accepted = keys.accepted_key("place")
    kinds = [
        (accepted, "id < {n}"),
        (keys.by_time_key(accepted, "at_ns"), "id < {n} and id % {every} != 1"),
        (keys.by_blob_key("sha256", "place"), "id < {n}"),
        (keys.blob_key("sha256"), "id >= {n} or id % {every} != 0"),
        (keys.blob_by_time_key("sha256", keys.hour_of("at_ns")), "id < {n}"),
    ]
    files: list[dict[str, Any]] = []
    for number, (key, when) in enumerate(kinds):
        rows = batches.filter(when.format(n=count, every=every)).select(
            F.lit("bench").alias("bucket"),
            F.expr(key).alias("key"),
            F.lit(FRAME_BYTES).cast("bigint").alias("size"),
            F.expr("timestamp_micros(at_ns div 1000)").alias("last_modified_date"),
        )
        rows.write.parquet(str(folder / str(number)))
        for file in sorted((folder / str(number)).glob("*.parquet")):
            digest = hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest()
            name = str(file.relative_to(folder))
            files.append({"key": name, "size": file.stat().st_size, "MD5checksum": digest})
    manifest = {
        "sourceBucket": "bench",
        "destinationBucket": "arn:aws:s3:::bench",
        "version": "2016-11-30",
        "creationTimestamp": str(CREATED_NS // 1_000_000),
        "fileFormat": "Parquet",
        "fileSchema": "message s3.inventory { bucket; key; size; last_modified_date; }",
        "files": files,
    }
    (folder / "manifest.json").write_bytes(msgspec.json.encode(manifest))


def resident_bytes(pid: int) -> int:
    return _status(pid, "VmRSS")


def peak_bytes(pid: int) -> int:
    """The most memory that the process ever had. 0 where the system does not tell."""
    return _status(pid, "VmHWM")


def forget_peak(pid: int) -> None:
    """Has the system count the most memory of a process from now on. Where it cannot, earlier peaks are counted too."""
    with suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status(pid: int, field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)


def _java() -> int:
    """The Java of this process's session: the one that it started itself."""
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            told = status.read_text()
        except OSError:
            continue
        if "Name:\tjava" in told and f"PPid:\t{os.getpid()}\n" in told:
            return int(status.parent.name)
    return 0


def _mb(size: int) -> float:
    return round(size / 1024 / 1024, 1)
