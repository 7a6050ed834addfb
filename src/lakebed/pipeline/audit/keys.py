"""The key layout of batches in Spark's own functions: what a listing alone tells. Pure transforms of frames.

The layout is docs/formats/accepted-batch.md; a test holds these against the keys that the batches part writes.
What lies under a prefix of ours and does not fit its layout is foreign.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

PLACE = "agent=(?:[0-9a-f]{2})+/boot=(?:[0-9a-f]{2})+/[0-9]{20}-[0-9]{20}"
SHA = "[0-9a-f]{64}"
FAN = f"sha256/[0-9a-f]{{2}}/[0-9a-f]{{2}}/{SHA}"
HOUR = "date=[0-9]{4}-[0-9]{2}-[0-9]{2}/hour=[0-9]{2}"

# kind: prefix, the rest, and where each field is behind the prefix: (offset, length); no length: up to `.json`.
# Everything but a place has a fixed width, so a key that fits is cut up without a second look.
LAYOUT: dict[str, tuple[str, str, dict[str, tuple[int, int]]]] = {
    "accepted": ("accepted/v1/", rf"{PLACE}\.json", {"place": (0, 0)}),
    "accepted_by_time": (
        "accepted-by-time/v1/",
        rf"{HOUR}/[0-9]{{20}}-[0-9a-f]{{32}}\.json",
        {"hour": (0, 23), "at": (24, 20), "digest": (45, 32)},
    ),
    "accepted_by_blob": ("accepted-by-blob/v1/", rf"{FAN}/{PLACE}\.json", {"sha256": (13, 64), "place": (78, 0)}),
    "raw_blob": ("raw-blobs/v1/", rf"{FAN}\.lmbatch", {"sha256": (13, 64)}),
    "raw_blob_by_time": (
        "raw-blobs-by-time/v1/",
        rf"{HOUR}/sha256={SHA}\.json",
        {"hour": (0, 23), "sha256": (31, 64)},
    ),
    "quarantine": (
        "quarantine/v1/identity-conflict/",
        rf"{PLACE}/{SHA}\.json",
        {"place": (0, -65), "sha256": (-64, 64)},
    ),
    "quarantine_by_blob": ("quarantine-by-blob/v1/", rf"{FAN}/{PLACE}\.json", {"sha256": (13, 64), "place": (78, 0)}),
    "repair": ("repairs/v1/raw-blob/", rf"{PLACE}\.json", {"place": (0, 0)}),
}
OF_IDENTITIES = ("accepted", "accepted_by_blob", "accepted_by_time", "repair")
OF_BLOBS = ("raw_blob", "raw_blob_by_time", "quarantine", "quarantine_by_blob")


def standing(listing: DataFrame) -> DataFrame:
    """The objects that a reader of the bucket sees now. Folders that a store shows as empty objects are none."""
    folder = F.col("key").endswith("/") & (F.coalesce(F.col("size_bytes"), F.lit(0)) == 0)
    return listing.filter(F.col("is_latest") & ~F.col("is_delete_marker") & ~folder)


def objects(listing: DataFrame, kinds: Sequence[str]) -> DataFrame:
    """The objects of these kinds, with what their keys say: kind, key, size_bytes, modified_ns, place, digest, at_ns,
    hour, sha256; null where a kind has no such thing."""
    of_kind, fits = _kind(kinds)
    cut = {field: _cut(kinds, field) for field in ("place", "digest", "at", "hour", "sha256")}
    found = standing(listing).filter(_under(kinds)).withColumn("kind", of_kind).filter(fits)
    at_ns = F.expr("try_cast(at as bigint)")
    found = found.select("kind", "key", "size_bytes", "modified_ns", *(made.alias(name) for name, made in cut.items()))
    found = found.withColumn("at_ns", at_ns).withColumn(
        "digest", F.coalesce(F.col("digest"), digest(accepted_key(F.col("place"))))
    )
    # An entry in another hour than its own would be met by no reader of the index.
    return found.filter(F.col("at").isNull() | (F.col("hour") == hour(F.col("at_ns")))).drop("at")


def foreign(listing: DataFrame) -> DataFrame:
    """What lies under our prefixes and is not ours."""
    of_kind, fits = _kind(tuple(LAYOUT))
    return standing(listing).filter(_under(tuple(LAYOUT))).withColumn("kind", of_kind).filter(~fits)


def markers(listing: DataFrame) -> DataFrame:
    """Delete markers that hide an accepted manifest or a raw blob: their keys could be taken again."""
    hidden = F.col("is_latest") & F.col("is_delete_marker")
    return listing.filter(hidden & (F.col("key").startswith("accepted/v1/") | F.col("key").startswith("raw-blobs/v1/")))


def accepted_key(place: Column) -> Column:
    return F.concat(F.lit("accepted/v1/"), place, F.lit(".json"))


def digest(key: Column) -> Column:
    """The part of a manifest id that stands for its accepted key."""
    return F.substring(F.sha2(key, 256), 1, 32)


def hour(at_ns: Column) -> Column:
    """The hour folder of a moment in nanoseconds."""
    # A quotient of doubles could fall on the wrong side of the hour: only whole seconds are divided, and rounded back.
    whole = at_ns - F.pmod(at_ns, F.lit(1_000_000_000))
    seconds = F.round(whole / F.lit(1_000_000_000)).cast("bigint")
    return F.date_format(F.timestamp_seconds(seconds), "'date='yyyy-MM-dd'/hour='HH")


def blob_key(sha256: Column) -> Column:
    return F.concat(F.lit("raw-blobs/v1/"), _fan(sha256), F.lit(".lmbatch"))


def by_time_key(accepted: Column, at_ns: Column) -> Column:
    name = F.concat(F.lpad(at_ns.cast("string"), 20, "0"), F.lit("-"), digest(accepted), F.lit(".json"))
    return F.concat(F.lit("accepted-by-time/v1/"), hour(at_ns), F.lit("/"), name)


def by_blob_key(sha256: Column, place: Column, *, of: str = "accepted") -> Column:
    return F.concat(F.lit(f"{of}-by-blob/v1/"), _fan(sha256), F.lit("/"), place, F.lit(".json"))


def blob_by_time_key(sha256: Column, at_hour: Column) -> Column:
    return F.concat(F.lit("raw-blobs-by-time/v1/"), at_hour, F.lit("/sha256="), sha256, F.lit(".json"))


def _fan(sha256: Column) -> Column:
    fan = (F.substring(sha256, 1, 2), F.substring(sha256, 3, 2), sha256)
    return F.concat(F.lit("sha256/"), F.concat_ws("/", *fan))


def _under(kinds: Sequence[str]) -> Column:
    under = F.lit(False)
    for kind in kinds:
        under = under | F.col("key").startswith(LAYOUT[kind][0])
    return under


def _kind(kinds: Sequence[str]) -> tuple[Column, Column]:
    """The kind that a key under one of the prefixes claims to be, and whether it fits."""
    of_kind, fits = F.lit(None).cast("string"), F.lit(False)
    for kind in kinds:
        prefix, rest, _ = LAYOUT[kind]
        of_kind = F.when(F.col("key").startswith(prefix), kind).otherwise(of_kind)
        fits = F.when(F.col("kind") == kind, F.col("key").rlike(f"^{prefix}{rest}$")).otherwise(fits)
    return of_kind, fits


def _cut(kinds: Sequence[str], field: str) -> Column:
    made = F.lit(None).cast("string")
    for kind in kinds:
        prefix, _, fields = LAYOUT[kind]
        if field not in fields:
            continue
        offset, length = fields[field]
        whole = F.length("key") - F.lit(len(".json"))
        start = F.lit(len(prefix) + offset + 1) if offset >= 0 else whole + F.lit(offset + 1)
        width = F.lit(length) if length > 0 else whole - F.lit(len(prefix) + offset - length)
        made = F.when(F.col("kind") == kind, F.substr("key", start, width)).otherwise(made)
    return made
