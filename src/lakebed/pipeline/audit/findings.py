"""What a listing says of accepted batches, as joins. Pure: frames in, frames out; nothing is read here.

Two cogroups say everything:

    by identity   accepted · accepted_by_blob · accepted_by_time · repair      what a manifest refers to, when accepted
    by hash       manifests · raw_blob · raw_blob_by_time · quarantine · …     is the blob there, indexed, referred to

A manifest's own key does not say which blob it refers to, its reverse reference does. So a first pass counts (see
`counting`): what it finds in order is done with, the rest is laid side by side here and its manifests are read.
"""

from __future__ import annotations

from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lakebed.pipeline.audit import keys
from lakebed.pipeline.audit.counting import FRAME_BYTES_MIN
from lakebed.pipeline.audit.saying import each, exploded, made, nulls, plain, settled, text, those

GONE = "gone since it was listed"
CANDIDATE = "nothing refers to it; past the retry horizon"
NOTHING = "speaks of an object that is not there"

_ENTRY = {
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


def identities(listing: DataFrame, before_ns: int, only: DataFrame | None = None) -> DataFrame:
    """Everything that speaks of one batch, side by side: digest, place, accepted (null without a manifest), young,
    and the lists refs, times and marks. `only` these digests, if given."""
    rows = keys.objects(listing, keys.OF_IDENTITIES).withColumn("entry", F.struct(*_ENTRY))
    rows = rows if only is None else rows.join(only.select("digest"), "digest", how="left_semi")
    lists = {"refs": "accepted_by_blob", "times": "accepted_by_time", "marks": "repair"}
    return (
        rows.groupBy("digest")
        .agg(
            F.expr("max(place)").alias("place"),
            F.expr("max(if(kind = 'accepted', entry, null))").alias("accepted"),
            *(F.expr(those(kind)).alias(name) for name, kind in lists.items()),
        )
        .withColumn("young", F.expr(f"accepted is not null and not {settled('accepted', before_ns)}"))
    )


def judged(found: DataFrame) -> DataFrame:
    """The manifests that are judged, and so are read: digest, key."""
    return found.filter("accepted is not null and not young").selectExpr("digest", "accepted.key as key")


def told(found: DataFrame, read: DataFrame) -> DataFrame:
    """Identities with the hash and time that reading their manifests gave; of young ones, what the listing says.

    `sha256` and `at_ns` are null where there is no manifest or it cannot be read, `problem` says why.
    """
    return found.join(read.drop("key"), "digest", how="left").selectExpr(
        *found.columns,
        "frame_bytes",
        "problem",
        "if(young, get(refs, 0).sha256, read_sha256) as sha256",
        "if(young, get(times, 0).at_ns, read_at_ns) as at_ns",
    )


def of_identities(manifests: DataFrame, before_ns: int) -> DataFrame:
    """Manifests that cannot be read, and entries that speak of no manifest or lie about theirs."""
    old = settled("e", before_ns)
    lists = {"refs": "accepted_by_blob", "times": "accepted_by_time", "marks": "repair"}
    return exploded(
        manifests,
        *(
            each(name, "e", f"accepted is null and {old}", made("orphaned", kind, "e.key", "''", "e", text(NOTHING)))
            for name, kind in lists.items()
        ),
        each(
            "array(accepted)",
            "e",
            f"problem is not null and problem != '{GONE}'",
            made("corrupt", "accepted", "e.key", "e.key", "e", "problem"),
        ),
        each(
            "refs",
            "e",
            f"accepted is not null and sha256 is not null and e.sha256 != sha256 and {old}",
            made(
                "orphaned",
                "accepted_by_blob",
                "e.key",
                "accepted.key",
                "e",
                text("its manifest refers to another blob"),
            ),
        ),
        each(
            "times",
            "e",
            f"accepted is not null and not young and e.at_ns != at_ns and {old}",
            made(
                "orphaned",
                "accepted_by_time",
                "e.key",
                "accepted.key",
                "e",
                text("its manifest was accepted at another time"),
            ),
        ),
    )


def of_entries(entries: DataFrame, manifests: DataFrame, prints: DataFrame) -> DataFrame:
    """Entries by time that cannot be read, or say of their batch what its manifest and its blob do not.

    `entries` are the objects of that kind with what reading them gave, `prints` the fingerprints of the blobs.
    """
    batches = manifests.filter("accepted is not null and sha256 is not null and not young").selectExpr(
        "digest", "at_ns", "accepted.key as referrer", "sha256", "place", "frame_bytes"
    )
    spans = (
        prints.filter("problem is null")
        .groupBy("sha256", "place")
        .agg(F.sum("samples").alias("samples"), F.min("first_ns").alias("first_ns"), F.max("last_ns").alias("last_ns"))
    )
    held = entries.drop("sha256", "place").join(batches, ["digest", "at_ns"], how="inner")
    wrong = (
        "coalesce(problem, "
        "if(told_sha256 != sha256 or told_bytes != frame_bytes, 'names another blob than its manifest', null), "
        "if(told_samples != samples or told_first_ns != first_ns or told_last_ns != last_ns, "
        "'tells other samples or times than its blob has', null))"
    )
    rows = held.join(spans, ["sha256", "place"], how="left").withColumn("wrong", F.expr(wrong))
    return rows.filter(f"wrong is not null and wrong != '{GONE}'").selectExpr(
        *plain("corrupt", "accepted_by_time", "wrong", referrer="referrer")
    )


def named(listing: DataFrame) -> DataFrame:
    """The objects that have a hash in their key, as rows for `hashes`."""
    return keys.objects(listing, keys.OF_BLOBS).selectExpr("kind", *_ENTRY, *nulls(_EXTRA))


def speaking(manifests: DataFrame, read: DataFrame | None = None) -> DataFrame:
    """Every other row that speaks of a hash: manifests, references of manifests that say nothing themselves, and what
    reading the blobs said."""
    known = manifests.filter("sha256 is not null and not young")
    silent = manifests.filter("sha256 is null or young").selectExpr("explode(refs) as ref")
    rows = [
        known.selectExpr(
            "'manifest' as kind",
            "accepted.key as key",
            "accepted.size_bytes as size_bytes",
            "accepted.modified_ns as modified_ns",
            "place",
            "sha256",
            f"{keys.hour_of('at_ns')} as hour",
            "at_ns",
            "frame_bytes",
            "exists(refs, e -> e.sha256 = sha256) as referred",
            "exists(times, e -> e.at_ns = at_ns) as entered",
            "get(marks, 0).key as problem",
        ),
        silent.selectExpr("'spoken' as kind", *(f"ref.{name} as {name}" for name in _ENTRY), *nulls(_EXTRA)),
    ]
    if read is not None:
        given = ("sha256", "place", "problem")
        absent = {name: kind for name, kind in (_ENTRY | _EXTRA).items() if name not in given}
        rows.append(read.selectExpr("'verified' as kind", *given, *nulls(absent)))
    return reduce(DataFrame.unionByName, rows)


def hashes(rows: DataFrame, only: DataFrame | None = None) -> DataFrame:
    """Everything that speaks of one hash, side by side: the lists manifests, blobs, seen, conflicts, conflict_refs,
    spoken and verified. `only` these hashes, if given."""
    lists = [F.expr(those(kind)).alias(name) for kind, name in _LISTS.items()]
    chosen = rows if only is None else rows.join(only, "sha256", how="left_semi")
    return chosen.withColumn("entry", F.struct(*_ENTRY, *_EXTRA)).groupBy("sha256").agg(*lists)


def of_hashes(found: DataFrame, *, before_ns: int, ripe_ns: int) -> DataFrame:
    """Findings about blobs and their indexes. Orphans from before `ripe_ns` are candidates of garbage collection."""
    rows = found.selectExpr("*", "get(blobs, 0) as blob", "get(verified, 0) as read")
    here, wrong, old = keys.blob_key("sha256"), _wrong("m"), settled("e", before_ns)
    sound = f"(blob is not null and {wrong} is null)"
    alone = "size(manifests) + size(conflicts) + size(spoken) = 0"
    why = (
        f"if(coalesce(blob.modified_ns, 0) <= {ripe_ns}, {text(CANDIDATE)}, "
        "'nothing refers to it; younger than the retry horizon')"
    )

    def unindexed(kind: str, when: str, key: str) -> str:
        size = "coalesce(blob.size_bytes, m.frame_bytes)"
        return each(
            "manifests", "m", when, made("unindexed", kind, key, "m.key", "m", "'is not in this index'", size=size)
        )

    return exploded(
        rows,
        each(
            "manifests",
            "m",
            "blob is null",
            made("missing", "raw_blob", here, "m.key", "m", "'an accepted batch lacks it'", size="m.frame_bytes"),
        ),
        each(
            "manifests",
            "m",
            f"blob is not null and {wrong} is not null",
            made("corrupt", "raw_blob", here, "m.key", "blob", wrong),
        ),
        # Without its blob a batch has no span to index by time.
        unindexed("accepted_by_time", f"{sound} and not m.entered", keys.by_time_key("m.key", "m.at_ns")),
        unindexed("accepted_by_blob", "not m.referred", keys.by_blob_key("sha256", "m.place")),
        unindexed(
            "raw_blob_by_time", "not exists(seen, s -> s.hour = m.hour)", keys.blob_by_time_key("sha256", "m.hour")
        ),
        each(
            "manifests",
            "m",
            f"m.problem is not null and read is not null and {sound}",
            made("orphaned", "repair", "m.problem", "m.key", "m", "'the blob is good again'"),
        ),
        each("blobs", "e", f"{alone} and {old}", made("orphaned", "raw_blob", "e.key", "''", "e", why)),
        each(
            "seen",
            "e",
            f"blob is null and {old}",
            made("orphaned", "raw_blob_by_time", "e.key", "''", "e", text(NOTHING)),
        ),
        each(
            "conflicts",
            "e",
            f"blob is null and {old}",
            made("missing", "raw_blob", here, "e.key", "e", "'the submitted blob of a conflict is not there'"),
        ),
        each(
            "conflicts",
            "e",
            f"{old} and not exists(conflict_refs, r -> r.place = e.place)",
            made(
                "unindexed",
                "quarantine_by_blob",
                keys.by_blob_key("sha256", "e.place", of="quarantine"),
                "e.key",
                "e",
                "'the conflict has no reverse reference'",
            ),
        ),
        each(
            "conflict_refs",
            "e",
            f"{old} and not exists(conflicts, c -> c.place = e.place)",
            made("orphaned", "quarantine_by_blob", "e.key", "''", "e", text(NOTHING)),
        ),
    )


def of_strangers(listing: DataFrame) -> DataFrame:
    """Foreign objects, and delete markers where nothing may be deleted."""
    strange = plain("foreign", "unknown", "'lies under a prefix of batches, and is not theirs'")
    hidden = plain("missing", "deleted", "'a delete marker hides it: its key could be taken again'")
    return keys.foreign(listing).selectExpr(*strange).unionByName(keys.markers(listing).selectExpr(*hidden))


def verified(prints: DataFrame) -> DataFrame:
    """What reading the blobs said: sha256, problem, place."""
    said = (F.first("problem").alias("problem"), F.first("place").alias("place"))
    return prints.groupBy("sha256").agg(*said)


def work(found: DataFrame) -> DataFrame:
    """What is to be done about the findings: a manifest is mended once, however much is wrong with it."""
    do = (
        "case when startswith(referrer, 'accepted/v1/') then 'mend' "
        "when kind = 'quarantine_by_blob' and finding = 'unindexed' then 'mend_quarantine' "
        f"when reason = {text(CANDIDATE)} then 'judge' end as do"
    )
    chosen = found.selectExpr(do, "if(referrer = '', key, referrer) as key", "finding").filter("do is not null")
    return chosen.groupBy("do", "key").agg(F.min("finding").alias("finding")).select("do", "key", "finding")


def _wrong(manifest: str) -> str:
    """Why a blob cannot be the batch that was accepted, as far as is known of it."""
    size, wanted = "blob.size_bytes", f"{manifest}.frame_bytes"
    return (
        "coalesce(read.problem, "
        f"if(read.place != {manifest}.place, 'carries another identity than its manifest', null), "
        f"if({size} != {wanted}, concat('has ', {size}, ' bytes, not ', {wanted}), null), "
        f"if({size} < {FRAME_BYTES_MIN}, concat({size}, ' bytes are too few for a frame'), null))"
    )
