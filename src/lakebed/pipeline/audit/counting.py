"""The first pass over a listing: counts, by identity and by hash. What it finds sound is finished. Pure.

Lists are expensive, and nearly everything is sound: only the rest is joined side by side, in `findings`.

By identity, a manifest is plain when it has one reverse reference, one entry by time and no mark. That reference may
have a wrong key. A blob is of one batch, so the count by hash shows it: it names a blob that another manifest has too,
or a conflict, or one that does not exist, or is not in the index of the hour. Such manifests are read.
What no listing shows is in `UNSEEN`.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lakebed.pipeline.audit import keys

UNSEEN = (
    "what is inside an object: hashes, identities, formats, entries, samples",
    "a reverse reference under the key of a blob that nothing else refers to, indexed in the hour of the acceptance",
    "an entry by time under another moment of the same hour",
)
FRAME_BYTES_MIN = 32 + 40 + 2  # prefix, header and two ids of a letter: less cannot be a frame


def counted(listing: DataFrame, before_ns: int) -> DataFrame:
    """Each identity, by counts alone: digest, place, sha256, at_ns, size_bytes, modified_ns, and whether it is plain:
    an old manifest with one reference, one entry by time and no mark."""
    one = {"a": "accepted", "r": "accepted_by_blob", "t": "accepted_by_time", "m": "repair"}
    sums = [F.expr(f"count_if(kind = '{kind}')").alias(name) for name, kind in one.items()]
    mine = [F.expr(f"max(if(kind = 'accepted', {name}, null))").alias(name) for name in ("size_bytes", "modified_ns")]
    values = [F.expr(f"max({name})").alias(name) for name in ("place", "sha256", "at_ns")]
    rows = keys.objects(listing, keys.OF_IDENTITIES).groupBy("digest").agg(*sums, *mine, *values)
    plain = f"a = 1 and r = 1 and t = 1 and m = 0 and coalesce(modified_ns, 0) <= {before_ns}"
    return rows.selectExpr("digest", "place", "sha256", "at_ns", "size_bytes", "modified_ns", f"{plain} as plain")


def strange(found: DataFrame, unsound: DataFrame) -> DataFrame:
    """The identities that must be checked: those that are not plain, and those whose hash is not in order, because
    their reference may have a wrong key. digest."""
    doubted = found.filter("plain").join(unsound, "sha256", how="left_semi")
    return found.filter("not plain").select("digest").unionByName(doubted.select("digest"))


def plain_manifests(found: DataFrame) -> DataFrame:
    """The manifests that are plain, as rows for `hashes`."""
    return found.filter("plain").selectExpr(
        "'manifest' as kind",
        f"{keys.accepted_key('place')} as key",
        "size_bytes",
        "modified_ns",
        "place",
        "sha256",
        f"{keys.hour_of('at_ns')} as hour",
        "at_ns",
        "cast(null as bigint) as frame_bytes",
        "true as referred",
        "true as entered",
        "cast(null as string) as problem",
    )


def unsound_hashes(rows: DataFrame) -> DataFrame:
    """Of the rows for `hashes`, the hashes that are not simply one plain manifest with its blob, seen in its hour."""
    sums = rows.groupBy("sha256").agg(
        F.expr("count_if(kind = 'manifest' and referred and entered and frame_bytes is null)").alias("m"),
        F.expr("count_if(kind = 'raw_blob')").alias("b"),
        F.expr("count_if(kind = 'raw_blob_by_time')").alias("s"),
        F.expr("count(*)").alias("n"),
        F.expr("min(if(kind = 'raw_blob', coalesce(size_bytes, 0), null))").alias("size"),
        F.expr("max(if(kind = 'manifest', xxhash64(hour), null))").alias("wanted"),
        F.expr("max(if(kind = 'raw_blob_by_time', xxhash64(hour), null))").alias("there"),
    )
    sound = f"m = 1 and b = 1 and s = 1 and n = 3 and wanted = there and size >= {FRAME_BYTES_MIN}"
    return sums.filter(f"not ({sound})").select("sha256")
