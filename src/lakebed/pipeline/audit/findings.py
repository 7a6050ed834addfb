"""What a listing says of accepted batches, as joins. Pure: frames in, frames out; nothing is read here.

Two cogroups say everything:

    by identity   accepted · accepted_by_blob · accepted_by_time · repair      what a manifest refers to, when accepted
    by hash       manifests · raw_blob · raw_blob_by_time · quarantine · …     is the blob there, indexed, referred to

A manifest's own key does not say which blob it refers to, its reverse reference does. So a manifest is read only when
it has not exactly one reverse reference and one entry by time: `doubtful` names those, and a sound bucket has none.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from lakebed.pipeline.audit import keys

FRAME_BYTES_MIN = 32 + 40 + 2  # prefix, header and two ids of a letter: less cannot be a frame
GONE = "gone since it was listed"
CANDIDATE = "nothing refers to it; past the retry horizon"
FINDING = (
    "finding string, kind string, key string, referrer string, size_bytes bigint, modified_ns bigint, reason string"
)
_ENTRY = ("key", "size_bytes", "modified_ns", "place", "sha256", "hour", "at_ns")

When = Callable[[Column], Column]


def identities(listing: DataFrame, before_ns: int) -> DataFrame:
    """Everything that speaks of one batch, side by side: digest, place, accepted (null without a manifest), young,
    and the lists refs, times and marks."""
    rows = keys.objects(listing, keys.OF_IDENTITIES).withColumn("entry", F.struct(*_ENTRY))
    return (
        rows.groupBy("digest")
        .agg(
            F.max("place").alias("place"),
            F.max(F.when(F.col("kind") == "accepted", F.col("entry"))).alias("accepted"),
            _those("accepted_by_blob").alias("refs"),
            _those("accepted_by_time").alias("times"),
            _those("repair").alias("marks"),
        )
        .withColumn("young", F.col("accepted").isNotNull() & ~_old(F.col("accepted"), before_ns))
    )


def doubtful(found: DataFrame) -> DataFrame:
    """The manifests that must be read, because the listing does not say what is in them: digest, key."""
    unsure = (F.size("refs") != 1) | (F.size("times") != 1)
    return found.filter(F.col("accepted").isNotNull() & ~F.col("young") & unsure).select(
        "digest", F.col("accepted.key").alias("key")
    )


def every(found: DataFrame) -> DataFrame:
    """All manifests that are judged, for an audit that verifies: digest, key."""
    judged = F.col("accepted").isNotNull() & ~F.col("young")
    return found.filter(judged).select("digest", F.col("accepted.key").alias("key"))


def told(found: DataFrame, read: DataFrame) -> DataFrame:
    """Identities with the hash and time of their manifests; of those that were read, reading has the last word.

    `sha256` and `at_ns` are null where there is no manifest or it cannot be read, `problem` says why.
    """
    listed = F.col("accepted").isNotNull() & F.col("problem").isNull() & F.col("read_sha256").isNull()
    both = found.join(read.drop("key"), "digest", how="left")
    sha256 = F.when(listed, F.get("refs", F.lit(0))["sha256"]).otherwise(F.col("read_sha256"))
    at_ns = F.when(listed, F.get("times", F.lit(0))["at_ns"]).otherwise(F.col("read_at_ns"))
    return both.withColumns({"sha256": sha256, "at_ns": at_ns}).drop("read_sha256", "read_at_ns")


def of_identities(manifests: DataFrame, before_ns: int) -> DataFrame:
    """Manifests that cannot be read, and entries that speak of no manifest or lie about theirs."""
    key = F.col("accepted.key")
    alone = F.col("accepted").isNull()
    none = F.array().cast(f"array<struct<{FINDING.replace(' string', ':string').replace(' bigint', ':bigint')}>>")

    def entries(name: str, kind: str) -> Column:
        old = F.filter(name, lambda entry: _old(entry, before_ns))
        return F.transform(
            old,
            lambda entry: _made("orphaned", kind, entry["key"], "", entry, "speaks of an object that is not there"),
        )

    lying = F.filter("refs", lambda entry: (entry["sha256"] != F.col("sha256")) & _old(entry, before_ns))
    bad = F.col("problem").isNotNull() & (F.col("problem") != GONE)
    orphans = F.concat(
        entries("refs", "accepted_by_blob"), entries("times", "accepted_by_time"), entries("marks", "repair")
    )
    made = F.concat(
        F.when(alone, orphans).otherwise(none),
        F.when(bad, F.array(_made("corrupt", "accepted", key, key, F.col("accepted"), F.col("problem")))).otherwise(
            none
        ),
        F.transform(
            F.when(F.col("sha256").isNotNull(), lying).otherwise(F.filter("refs", lambda _: F.lit(False))),
            lambda entry: _made(
                "orphaned", "accepted_by_blob", entry["key"], key, entry, "its manifest refers to another blob"
            ),
        ),
    )
    return _exploded(manifests, made)


def hashes(manifests: DataFrame, listing: DataFrame, verified: DataFrame | None) -> DataFrame:
    """Everything that speaks of one hash, side by side: the lists manifests, blobs, seen, conflicts, conflict_refs,
    spoken (references of manifests that say nothing themselves) and verified (what reading the blob said)."""
    known = manifests.filter(F.col("sha256").isNotNull() & ~F.col("young"))
    silent = manifests.filter(F.col("sha256").isNull() | F.col("young")).select(F.explode("refs").alias("ref"))
    rows = [
        keys.objects(listing, keys.OF_BLOBS).select("kind", *_ENTRY, *_nulls(_EXTRA)),
        known.select(
            F.lit("manifest").alias("kind"),
            F.col("accepted.key").alias("key"),
            F.col("accepted.size_bytes").alias("size_bytes"),
            F.col("accepted.modified_ns").alias("modified_ns"),
            "place",
            "sha256",
            keys.hour(F.col("at_ns")).alias("hour"),
            "at_ns",
            "frame_bytes",
            F.exists("refs", lambda entry: entry["sha256"] == F.col("sha256")).alias("referred"),
            F.exists("times", lambda entry: entry["at_ns"] == F.col("at_ns")).alias("entered"),
            F.get("marks", F.lit(0))["key"].alias("problem"),
        ),
        silent.select(F.lit("spoken").alias("kind"), *(f"ref.{name}" for name in _ENTRY), *_nulls(_EXTRA)),
    ]
    if verified is not None:
        given = {"sha256": F.col("sha256"), "place": F.col("place"), "problem": F.col("problem")}
        names = {name: kind for name, kind in {**_ENTRY_TYPES, **_EXTRA}.items() if name not in given}
        rows.append(verified.select(F.lit("verified").alias("kind"), *given, *_nulls(names)).select(*rows[0].columns))
    entry = F.struct(*_ENTRY, *_EXTRA)
    lists = [_those(kind).alias(name) for kind, name in _LISTS.items()]
    return _union(*rows).withColumn("entry", entry).groupBy("sha256").agg(*lists)


_ENTRY_TYPES = {
    "key": "string",
    "size_bytes": "bigint",
    "modified_ns": "bigint",
    "place": "string",
    "sha256": "string",
    "hour": "string",
    "at_ns": "bigint",
}
_EXTRA = {"frame_bytes": "bigint", "referred": "boolean", "entered": "boolean", "problem": "string"}
_LISTS = {
    "manifest": "manifests",
    "raw_blob": "blobs",
    "raw_blob_by_time": "seen",
    "quarantine": "conflicts",
    "quarantine_by_blob": "conflict_refs",
    "spoken": "spoken",
    "verified": "verified",
}


def of_hashes(found: DataFrame, *, before_ns: int, ripe_ns: int) -> DataFrame:
    """Findings about blobs and their indexes. Orphans from before `ripe_ns` are candidates of garbage collection."""
    rows = found.withColumns({"blob": F.get("blobs", F.lit(0)), "read": F.get("verified", F.lit(0))})
    blob, read, sha256 = F.col("blob"), F.col("read"), F.col("sha256")
    missing, here = blob.isNull(), keys.blob_key(sha256)

    def sound(manifest: Column) -> Column:
        return ~missing & _wrong(blob, read, manifest).isNull()

    def each(name: str, when: When, made: When) -> Column:
        return F.transform(F.filter(name, when), made)

    def unindexed(kind: str, when: When, key: When) -> Column:
        size = F.coalesce(blob["size_bytes"], F.lit(None).cast("bigint"))
        return each(
            "manifests",
            when,
            lambda manifest: _made(
                "unindexed",
                kind,
                key(manifest),
                manifest["key"],
                manifest,
                "is not in this index",
                F.coalesce(size, manifest["frame_bytes"]),
            ),
        )

    refers = (F.size("manifests") + F.size("conflicts") + F.size("spoken")) > 0
    ripe = F.coalesce(blob["modified_ns"], F.lit(0)) <= F.lit(ripe_ns)
    why = F.when(ripe, CANDIDATE).otherwise("nothing refers to it; younger than the retry horizon")
    made = F.concat(
        each(
            "manifests",
            lambda _: missing,
            lambda m: _made(
                "missing", "raw_blob", here, m["key"], m, "an accepted batch has no blob", m["frame_bytes"]
            ),
        ),
        each(
            "manifests",
            lambda m: ~missing & _wrong(blob, read, m).isNotNull(),
            lambda m: _made("corrupt", "raw_blob", here, m["key"], blob, _wrong(blob, read, m)),
        ),
        # Without its blob a batch has no span to index by time.
        unindexed(
            "accepted_by_time", lambda m: sound(m) & ~m["entered"], lambda m: keys.by_time_key(m["key"], m["at_ns"])
        ),
        unindexed("accepted_by_blob", lambda m: ~m["referred"], lambda m: keys.by_blob_key(sha256, m["place"])),
        unindexed(
            "raw_blob_by_time",
            lambda m: ~F.exists("seen", lambda entry: entry["hour"] == m["hour"]),
            lambda m: keys.blob_by_time_key(sha256, m["hour"]),
        ),
        each(
            "manifests",
            lambda m: m["problem"].isNotNull() & read.isNotNull() & sound(m),
            lambda m: _made("orphaned", "repair", m["problem"], m["key"], m, "the blob is good again"),
        ),
        each(
            "blobs",
            lambda entry: ~refers & _old(entry, before_ns),
            lambda entry: _made("orphaned", "raw_blob", entry["key"], "", entry, why),
        ),
        each(
            "seen",
            lambda entry: missing & _old(entry, before_ns),
            lambda entry: _made(
                "orphaned", "raw_blob_by_time", entry["key"], "", entry, "speaks of an object that is not there"
            ),
        ),
        each(
            "conflicts",
            lambda entry: missing & _old(entry, before_ns),
            lambda entry: _made(
                "missing", "raw_blob", here, entry["key"], entry, "a conflict's submitted blob is not there"
            ),
        ),
        each(
            "conflicts",
            lambda entry: (
                _old(entry, before_ns) & ~F.exists("conflict_refs", lambda other: other["place"] == entry["place"])
            ),
            lambda entry: _made(
                "unindexed",
                "quarantine_by_blob",
                keys.by_blob_key(sha256, entry["place"], of="quarantine"),
                entry["key"],
                entry,
                "the conflict has no reverse reference",
            ),
        ),
        each(
            "conflict_refs",
            lambda entry: (
                _old(entry, before_ns) & ~F.exists("conflicts", lambda other: other["place"] == entry["place"])
            ),
            lambda entry: _made(
                "orphaned", "quarantine_by_blob", entry["key"], "", entry, "speaks of an object that is not there"
            ),
        ),
    )
    return _exploded(rows, made)


def of_strangers(listing: DataFrame) -> DataFrame:
    """Foreign objects, and delete markers where nothing may be deleted."""
    row = F.struct(F.col("size_bytes"), F.col("modified_ns"))
    strange = _made("foreign", "unknown", F.col("key"), "", row, "lies under a prefix of batches, and is not theirs")
    hidden = _made("missing", "deleted", F.col("key"), "", row, "a delete marker hides it: its key can be taken again")
    return (
        keys.foreign(listing)
        .select(strange.alias("f"))
        .select("f.*")
        .unionByName(keys.markers(listing).select(hidden.alias("f")).select("f.*"))
    )


def verified(prints: DataFrame) -> DataFrame:
    """What reading the blobs said: sha256, problem, place."""
    said = (F.first("problem").alias("problem"), F.first("place").alias("place"))
    return prints.groupBy("sha256").agg(*said)


def of_problems(problems: DataFrame) -> DataFrame:
    """Rollup chunks and manifests that cannot be read: key, problem."""
    row = F.struct(F.lit(None).cast("bigint").alias("size_bytes"), F.lit(None).cast("bigint").alias("modified_ns"))
    bad = _made("corrupt", "rollup", F.col("key"), "", row, F.col("problem"))
    return problems.filter(F.col("problem") != GONE).select(bad.alias("f")).select("f.*")


def work(found: DataFrame) -> DataFrame:
    """What is to be done about the findings: a manifest is mended once, however much is wrong with it."""
    conflicts = (F.col("kind") == "quarantine_by_blob") & (F.col("finding") == "unindexed")
    do = (
        F.when(F.col("referrer").startswith("accepted/v1/"), "mend")
        .when(conflicts, "mend_quarantine")
        .when(F.col("reason") == CANDIDATE, "judge")
    )
    key = F.when(F.col("referrer") == "", F.col("key")).otherwise(F.col("referrer"))
    chosen = found.select(do.alias("do"), key.alias("key"), "finding").filter("do is not null")
    return chosen.groupBy("do", "key").agg(F.min("finding").alias("finding")).select("do", "key", "finding")


def _wrong(blob: Column, read: Column, manifest: Column) -> Column:
    """Why a blob cannot be the batch that was accepted, as far as is known of it."""
    size, wanted = blob["size_bytes"], manifest["frame_bytes"]
    return F.coalesce(
        read["problem"],
        F.when(read["place"] != manifest["place"], "carries another identity than its manifest"),
        F.when(size != wanted, F.concat_ws("", F.lit("has "), size, F.lit(" bytes, not "), wanted)),
        F.when(size < FRAME_BYTES_MIN, F.concat_ws("", size, F.lit(" bytes are too few for a frame"))),
    )


def _old(entry: Column, before_ns: int) -> Column:
    """Whether it was there well before the listing began; a time that is not told is taken for old."""
    return F.coalesce(entry["modified_ns"], F.lit(0)) <= F.lit(before_ns)


def _made(
    finding: str,
    kind: str,
    key: Column,
    referrer: str | Column,
    entry: Column,
    reason: str | Column,
    size: Column | None = None,
) -> Column:
    return F.struct(
        F.lit(finding).alias("finding"),
        F.lit(kind).alias("kind"),
        key.alias("key"),
        (F.lit(referrer) if isinstance(referrer, str) else referrer).alias("referrer"),
        (entry["size_bytes"] if size is None else size).cast("bigint").alias("size_bytes"),
        entry["modified_ns"].alias("modified_ns"),
        (F.lit(reason) if isinstance(reason, str) else reason).alias("reason"),
    )


def _those(kind: str) -> Column:
    return F.collect_list(F.when(F.col("kind") == kind, F.col("entry")))


def _nulls(types: dict[str, str]) -> list[Column]:
    return [F.lit(None).cast(kind).alias(name) for name, kind in types.items()]


def _exploded(rows: DataFrame, made: Column) -> DataFrame:
    return rows.select(F.explode(made).alias("f")).select("f.*")


def _union(*frames: DataFrame) -> DataFrame:
    return reduce(DataFrame.unionByName, frames)
