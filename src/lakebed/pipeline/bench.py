"""`lakebed bench pipeline`: accepted batches to bronze and to rollups, beside Spark's own run over the same rows; an
incremental step of gold on one million rows and on six; and the audit of a million manifests.

Spark's own reads the rows from Parquet on local disk, aggregates them into windows of a minute, and writes Parquet to
local disk. Bronze and rollups pay for what it does not: finding the batches, fetching them from the bucket, verifying
their hashes, writing to the bucket and committing; rollups make three windows with exact sums, sketches and an index.
What it costs when the data doubles is measured in the same rounds, on a second fleet of twice the samples.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from lakebed.batches import acceptance, paths
from lakebed.batches.bench import BenchFleet, fleet
from lakebed.batches.model import BatchIdentity, write_record
from lakebed.bench.harness import BenchEnvironment, Check, Contender, at_least, at_most, measured, rounds_of
from lakebed.core.context import Context
from lakebed.core.errors import Corrupt
from lakebed.core.feed import Limit
from lakebed.pipeline.models.bench import bench_models
from lakebed.rollups.bench import roll
from lakebed.spark.settings import SparkSettings

SAMPLES, SAMPLES_QUICK = 2_000_000, 600_000
ROUNDS, ROUNDS_QUICK = 5, 3
NATIVE_BARS = {"bronze": 0.9, "rollup": 0.7}  # ÷ Spark's own, samples a second
LINEAR_BAR = 2.6  # time for twice the samples ÷ time for the samples: twice, and what noise adds
OURS = {"bronze": "bronze", "rollup": "rollups"}
MANIFESTS = 1_000_000
MANIFESTS_QUICK = 20_000
DAMAGED = 10  # batches of each sort of damage
DRIVER_BAR_BYTES = 64 * 1024 * 1024  # that Python may grow by in the driver: it holds counts, never keys
START_NS = 1_760_000_000_000_000_000
STEP_NS = 36_000_000  # a batch each: a million of them are ten hours
CREATED_NS = START_NS + 40 * 86_400_000_000_000
FRAME_BYTES = 50_000


async def bench(environment: BenchEnvironment) -> Sequence[Check]:
    folder = Path(tempfile.mkdtemp(prefix="lakebed-bench-"))
    try:
        return [
            *await _samples(environment, folder),
            *await bench_models(environment),
            *await audit(environment, folder),
        ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _samples(environment: BenchEnvironment, folder: Path) -> list[Check]:
    from lakebed.spark.session import warm

    count = SAMPLES_QUICK if environment.quick else SAMPLES
    warm(environment.settings.of(SparkSettings))
    environment.report(f"Accepting {count} samples, and twice as many in a second fleet")
    once, twice = await fleet(environment, count), await fleet(environment, 2 * count)
    environment.report("Starting Spark and warming it up")
    await asyncio.to_thread(_rows, once, folder / "rows")
    contenders: dict[str, Contender] = {
        "bronze": lambda: asyncio.to_thread(ingest, once),
        "rollup": lambda: roll(once),
        "aggregate": lambda: _native(once, folder),
        "bronze twice": lambda: asyncio.to_thread(ingest, twice),
        "rollup twice": lambda: roll(twice),
    }
    for name in ("rollup", "aggregate"):  # bronze has run by now
        await contenders[name]()
    environment.report(
        f"Loading {count} samples into bronze, into rollups and through plain Spark, in turn; then twice as many"
    )
    rates = await rounds_of(ROUNDS_QUICK if environment.quick else ROUNDS, contenders)
    return [
        *(measured(f"{count} accepted samples to {OURS[name]}", rates[name], "samples/s") for name in OURS),
        measured("Spark's own read-aggregate-write of them", rates["aggregate"], "samples/s"),
        *(
            at_least(f"{OURS[n]} ÷ Spark's own read-aggregate-write", rates[n], rates["aggregate"], NATIVE_BARS[n])
            for n in OURS
        ),
        *(
            at_most(
                f"{OURS[name]}: time for twice the samples ÷ for the samples",
                [2 * count / rate for rate in rates[f"{name} twice"]],
                [count / rate for rate in rates[name]],
                LINEAR_BAR,
            )
            for name in OURS
        ),
    ]


def _session(given: BenchFleet) -> Any:
    from lakebed.spark.session import open_session

    return open_session(given.context.settings.of(SparkSettings))


def _samples_of(spark: Any, given: BenchFleet) -> Any:
    from lakebed.pipeline.bronze.samples import SampleLoader

    return SampleLoader(spark, given.context, name=f"bench/{given.context.ids.token()}")


def _rows(given: BenchFleet, to: Path) -> None:
    """The fleet's rows as Parquet on local disk, for Spark's own runs: taken from bronze itself."""
    samples = _samples_of(_session(given), given)
    samples.step(Limit())
    samples.table.read().repartition(4).write.parquet(str(to))


def ingest(given: BenchFleet) -> float:
    """Everything into a fresh table, in samples a second. Raises Corrupt unless every sample is there."""
    samples, clock = _samples_of(_session(given), given), given.context.clock
    began = clock.monotonic_s()
    report = samples.step(Limit())
    seconds = clock.monotonic_s() - began
    if report is None or report.good != given.samples or samples.table.snapshot().rows != given.samples:
        raise Corrupt(f"{given.samples} samples were accepted, but bronze reports {msgspec.to_builtins(report)}")
    return given.samples / seconds


async def _native(given: BenchFleet, folder: Path) -> float:
    spark, clock = _session(given), given.context.clock
    began = clock.monotonic_s()
    await asyncio.to_thread(aggregate, spark, folder / "rows", folder / "written")
    return given.samples / (clock.monotonic_s() - began)


def aggregate(spark: Any, rows: Path, to: Path) -> None:
    """Spark's own: one window of 60 s, with the five plain numbers of a row."""
    spark.read.parquet(str(rows)).createOrReplaceTempView("samples")
    made = spark.sql(
        """SELECT agent_id, metric, labels, time_ns - time_ns % 60000000000 AS start_ns, count(*) AS count,
                  sum(value) AS sum, min(value) AS min, max(value) AS max, max(time_ns) AS last_ns,
                  max_by(value, time_ns) AS last
           FROM samples GROUP BY ALL"""
    )
    made.write.mode("overwrite").parquet(str(to))


async def audit(environment: BenchEnvironment, folder: Path) -> list[Check]:
    """A part of `lakebed bench pipeline`."""
    checks: list[Check] = []
    for count in (MANIFESTS_QUICK,) if environment.quick else (MANIFESTS_QUICK, MANIFESTS):
        context = environment.apart()
        environment.report(f"Writing an inventory report of {count} accepted batches")
        await _store_doubtful(context, count)
        checks += await asyncio.to_thread(_measure, environment, context, folder / f"inventory-{count}", count)
    return checks


def _measure(environment: BenchEnvironment, context: Context, folder: Path, count: int) -> list[Check]:
    from lakebed.pipeline.audit.job import BucketAuditor
    from lakebed.spark.inventory import ReportLocation, inventory
    from lakebed.spark.session import open_session

    settings, clock = context.settings.of(SparkSettings), context.clock
    spark = open_session(settings)
    make_report(spark, folder, count)
    environment.report(f"Auditing {count} manifests")
    python, java = os.getpid(), _java()
    for pid in (python, java):
        forget_peak(pid)
    before, began = resident_bytes(python), clock.monotonic_s()
    listing = inventory(spark, ReportLocation(folder=str(folder)), "manifest.json")
    record = BucketAuditor(spark, context).run(listing=listing, horizon_s=0.0)
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
        identity = BatchIdentity(f"agent-{number % 1000:04d}", "boot-1", number * 100, number * 100 + 99)
        sha256 = hashlib.sha256(str(number).encode()).hexdigest()
        made = acceptance.manifest_of(
            identity,
            sha256,
            acceptance.whole_place(sha256, FRAME_BYTES),
            at_ns=START_NS + number * STEP_NS,
            collector_id="bench",
            attempt_id="bench",
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
    """The most memory that the process ever had. 0 where the system does not report it."""
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
            text = status.read_text()
        except OSError:
            continue
        if "Name:\tjava" in text and f"PPid:\t{os.getpid()}\n" in text:
            return int(status.parent.name)
    return 0


def _mb(size: int) -> float:
    return round(size / 1024 / 1024, 1)
