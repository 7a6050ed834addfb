"""One listing of a bucket as a DataFrame: what audits and lifecycle rules are joined against.

    found = list_bucket(spark, settings, clock=clock)
    found.rows                       # key, size_bytes, modified_ns, etag, version_id, is_latest, is_delete_marker
    found.close()

Tasks list folders in parallel and give pages to Spark as Arrow; the driver sees folder names and counts, never the
keys. The listing is taken once and kept on the executors' disks, so every join over it sees the same bucket.
An S3 Inventory report gives the same columns: see `inventory.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from lakebed.core.clock import Clock
from lakebed.core.errors import Invalid, Unavailable
from lakebed.spark.tasks import in_arrow
from lakebed.store.reader import BucketReader, ObjectPage
from lakebed.store.settings import StoreSettings

FOLDERS_WANTED = 128  # folders that tasks share: enough that none waits long for the last
REQUESTS_MAX = 256  # that planning may make
TOPS_MAX = 1000
TASKS_MIN = 8  # a task waits for the bucket more than it works
LISTING = (
    "key string, size_bytes bigint, modified_ns bigint, etag string, version_id string, "
    "is_latest boolean, is_delete_marker boolean"
)

Batches = Iterator[Any]


class Listing(msgspec.Struct, frozen=True):
    """A listing that was taken. What was written after `began_ns` may or may not be in it.

    `rows` has the columns of LISTING, one row an object (a version, where there are versions). `source` says where it
    comes from: `list`, `versions` or `inventory`.
    """

    rows: DataFrame
    began_ns: int
    source: str
    objects: int
    size_bytes: int = 0
    tops: dict[str, int] = {}  # objects under each folder of the first level, for up to TOPS_MAX of them

    def close(self) -> None:
        """Deletes the kept rows."""
        self.rows.unpersist()


class Folder(msgspec.Struct, frozen=True):
    """What one task lists: everything below a prefix, or only the objects directly in it."""

    prefix: str
    deep: bool


def list_bucket(
    spark: SparkSession,
    settings: StoreSettings,
    *,
    clock: Clock,
    prefix: str = "",
    versions: bool | None = None,
    tasks: int = 0,
) -> Listing:
    """Lists the bucket below `store.prefix`, whole or under a folder. `versions` None: as the bucket has them.

    Raises Denied, NotFound or Unavailable when the bucket cannot be listed completely: a partial listing is never used.
    """
    if not settings.url.startswith("s3://"):
        raise Invalid(f"a listing is taken of S3, not of {settings.url!r}", hint="set store.url to s3://…")
    began_ns = clock.now_ns()
    reader = BucketReader(settings)
    try:
        every = reader.versioned() if versions is None else versions
        folders = plan(reader.folders, prefix)
    finally:
        reader.close()
    planned = spark.createDataFrame([(each.prefix, each.deep) for each in folders], "prefix string, deep boolean")
    spread = tasks or max(TASKS_MIN, int(spark.conf.get("spark.sql.shuffle.partitions") or 0))
    shared = planned.repartition(min(len(folders), spread))
    rows = in_arrow(shared, listing_pages(settings, versions=every), LISTING)
    return kept(rows, began_ns, "versions" if every else "list")


def kept(rows: DataFrame, began_ns: int, source: str) -> Listing:
    """The listing of these rows, taken now and kept on disk. Raises Unavailable when a task could not do its share."""
    held = rows.persist(StorageLevel.DISK_ONLY)
    top = F.substring_index("key", "/", 1).alias("top")
    sums = (F.count("*").alias("objects"), F.sum("size_bytes").alias("size_bytes"))
    try:
        counted = held.groupBy(top).agg(*sums).toLocalIterator()
        return _listing(held, began_ns, source, counted)
    except PySparkException as error:
        held.unpersist()
        raise Unavailable(f"the listing was not completed: {cause(error)}") from error


def _listing(rows: DataFrame, began_ns: int, source: str, counted: Iterator[Any]) -> Listing:
    objects = size_bytes = 0
    tops: dict[str, int] = {}
    for row in counted:
        objects, size_bytes = objects + row["objects"], size_bytes + (row["size_bytes"] or 0)
        if len(tops) < TOPS_MAX:
            tops[row["top"]] = row["objects"]
    return Listing(rows, began_ns, source, objects, size_bytes, dict(sorted(tops.items())))


def plan(folders: Callable[[str], list[str] | None], prefix: str = "", *, wanted: int = FOLDERS_WANTED) -> list[Folder]:
    """Folders that together hold every key under the prefix once, some `wanted` of them where there are so many.

    `folders` names the folders below one, or returns None for too many: that one is listed whole.
    """
    whole: list[str] = []
    planned: list[Folder] = []
    waiting = deque([prefix])
    requests = 0
    while waiting and len(waiting) + len(whole) < wanted and requests < REQUESTS_MAX:
        at = waiting.popleft()
        below, requests = folders(at), requests + 1
        if below is None:
            whole.append(at)
        else:
            planned.append(Folder(at, deep=False))
            waiting.extend(below)
    return planned + [Folder(each, deep=True) for each in (*whole, *waiting)]


def listing_pages(settings: StoreSettings, *, versions: bool) -> Callable[[Batches], Batches]:
    """The task that lists its folders, a record batch a page."""

    def list_pages(batches: Batches) -> Batches:
        reader = BucketReader(settings, versions=versions)
        try:
            for batch in batches:
                for prefix, deep in zip(batch["prefix"].to_pylist(), batch["deep"].to_pylist(), strict=True):
                    for page in reader.walk(prefix, deep=deep):
                        yield arrow(page)
        finally:
            reader.close()

    return list_pages


def arrow(page: ObjectPage) -> Any:
    """A page as a record batch with the columns of LISTING."""
    import pyarrow as pa

    return pa.record_batch(
        [
            pa.array(page.key, pa.string()),
            pa.array(page.size_bytes, pa.int64()),
            pa.array(page.modified_ns, pa.int64()),
            pa.array(page.etag, pa.string()),
            pa.array(page.version_id, pa.string()),
            pa.array(page.is_latest, pa.bool_()),
            pa.array(page.is_delete_marker, pa.bool_()),
        ],
        names=list(msgspec.structs.asdict(page)),
    )


def cause(error: PySparkException) -> str:
    """The line of a task's error that names the cause."""
    lines = [line.strip() for line in str(error).splitlines() if "lakebed.core.errors." in line]
    return (lines[-1] if lines else str(error).splitlines()[0])[:300]
