"""What a listing shows of accepted batches, as joins. Pure: frames in, frames out; nothing is read here.

Two cogroups are enough:

    by identity   accepted · accepted_by_blob · accepted_by_time · repair      what a manifest refers to, when accepted
    by hash       manifests · raw_blob · raw_blob_by_time · quarantine · …     is the blob there, indexed, referred to

A manifest's own key does not name the blob it refers to, its reverse reference does. So a first pass counts (see
`counting`): what it finds sound is finished, the rest is joined here and its manifests are read.
"""

from __future__ import annotations

from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lakebed.batches.paths import ACCEPTED, ACCEPTED_BY_BLOB, QUARANTINE_BY_BLOB
from lakebed.pipeline.audit import keys
from lakebed.pipeline.audit.counting import FRAME_BYTES_MIN
from lakebed.pipeline.audit.reading import GONE


def made(finding: str, kind: str, key: str, referrer: str, entry: str, reason: str, *, size: str = "") -> str:
    """A finding as SQL; key, referrer, reason and size are SQL too, `entry` is what it is about."""
    return (
        f"named_struct('finding', '{finding}', 'kind', '{kind}', 'key', {key}, 'referrer', {referrer}, 'size_bytes', "
        f"cast({size or f'{entry}.size_bytes'} as bigint), 'modified_ns', {entry}.modified_ns, 'reason', {reason})"
    )


def plain(finding: str, kind: str, reason: str, *, referrer: str = "''") -> list[str]:
    """A finding as columns, of a row that has key, size_bytes and modified_ns itself."""
    columns = [f"'{finding}' as finding", f"'{kind}' as kind", "key", f"{referrer} as referrer", "size_bytes"]
    return [*columns, "modified_ns", f"{reason} as reason"]


def each(entries: str, name: str, when: str, made: str) -> str:
    return f"transform(filter({entries}, {name} -> {when}), {name} -> {made})"


def exploded(rows: DataFrame, *made: str) -> DataFrame:
    return rows.selectExpr(f"explode(concat({', '.join(made)})) as f").selectExpr("f.*")


def settled(entry: str, before_ns: int) -> str:
    """Whether it was there well before the listing began; an unknown time counts as old."""
    return f"(coalesce({entry}.modified_ns, 0) <= {before_ns})"


def those(kind: str) -> str:
    return f"collect_list(if(kind = '{kind}', entry, null))"


def text(words: str) -> str:
    return f"'{words}'"


def nulls(types: dict[str, str]) -> list[str]:
    return [f"cast(null as {kind}) as {name}" for name, kind in types.items()]


CANDIDATE = "nothing refers to it; past the retry horizon"
NOTHING = "refers to an object that does not exist"

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
    "reference": "unread_refs",
    "verified": "verified",
}


def identities(listing: DataFrame, before_ns: int, only: DataFrame | None = None) -> DataFrame:
    """Everything that refers to one batch, side by side: digest, place, accepted (null without a manifest), young,
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
    """The manifests that are checked, and so are read: digest, key."""
    return found.filter("accepted is not null and not young").selectExpr("digest", "accepted.key as key")


def with_manifests(found: DataFrame, read: DataFrame) -> DataFrame:
    """Identities with the hash and time that reading their manifests gave; of young ones, what the listing shows.

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
    """Manifests that cannot be read, and entries whose manifest does not exist or does not match."""
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
    """Entries by time that cannot be read, or do not match the manifest and the blob of their batch.

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
        "if(entry_sha256 != sha256 or entry_bytes != frame_bytes, 'names another blob than its manifest', null), "
        "if(entry_samples != samples or entry_first_ns != first_ns or entry_last_ns != last_ns, "
        "'has other samples or times than its blob', null))"
    )
    rows = held.join(spans, ["sha256", "place"], how="left").withColumn("wrong", F.expr(wrong))
    return rows.filter(f"wrong is not null and wrong != '{GONE}'").selectExpr(
        *plain("corrupt", "accepted_by_time", "wrong", referrer="referrer")
    )


def named(listing: DataFrame) -> DataFrame:
    """The objects that have a hash in their key, as rows for `hashes`."""
    return keys.objects(listing, keys.OF_BLOBS).selectExpr("kind", *_ENTRY, *nulls(_EXTRA))


def references(manifests: DataFrame, read: DataFrame | None = None) -> DataFrame:
    """Every other row that refers to a hash: manifests, references of manifests that were not read, and the result of
    reading the blobs."""
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
        silent.selectExpr("'reference' as kind", *(f"ref.{name} as {name}" for name in _ENTRY), *nulls(_EXTRA)),
    ]
    if read is not None:
        given = ("sha256", "place", "problem")
        absent = {name: kind for name, kind in (_ENTRY | _EXTRA).items() if name not in given}
        rows.append(read.selectExpr("'verified' as kind", *given, *nulls(absent)))
    return reduce(DataFrame.unionByName, rows)


def hashes(rows: DataFrame, only: DataFrame | None = None) -> DataFrame:
    """Everything that refers to one hash, side by side: the lists manifests, blobs, seen, conflicts, conflict_refs,
    unread_refs and verified. `only` these hashes, if given."""
    lists = [F.expr(those(kind)).alias(name) for kind, name in _LISTS.items()]
    chosen = rows if only is None else rows.join(only, "sha256", how="left_semi")
    return chosen.withColumn("entry", F.struct(*_ENTRY, *_EXTRA)).groupBy("sha256").agg(*lists)


def of_hashes(found: DataFrame, *, before_ns: int, ripe_ns: int) -> DataFrame:
    """Findings about blobs and their indexes. Orphans from before `ripe_ns` are candidates of garbage collection."""
    rows = found.selectExpr("*", "get(blobs, 0) as blob", "get(verified, 0) as read")
    old = settled("e", before_ns)
    return exploded(rows, *_of_manifests(), *_of_blobs(old, ripe_ns), *_of_conflicts(old))


def _of_manifests() -> list[str]:
    """Findings about the blob and the index entries of each accepted manifest, as SQL."""
    here, wrong = keys.blob_key("sha256"), _wrong("m")
    sound = f"(blob is not null and {wrong} is null)"

    def finding(when: str, made: str) -> str:
        return each("manifests", "m", when, made)

    def unindexed(kind: str, when: str, key: str) -> str:
        size = "coalesce(blob.size_bytes, m.frame_bytes)"
        return finding(when, made("unindexed", kind, key, "m.key", "m", "'is not in this index'", size=size))

    lacking = made("missing", "raw_blob", here, "m.key", "m", "'an accepted batch lacks it'", size="m.frame_bytes")
    corrupt = made("corrupt", "raw_blob", here, "m.key", "blob", wrong)
    repaired = made("orphaned", "repair", "m.problem", "m.key", "m", "'the blob is good again'")
    other_hour = "not exists(seen, s -> s.hour = m.hour)"
    return [
        finding("blob is null", lacking),
        finding(f"blob is not null and {wrong} is not null", corrupt),
        # Without its blob a batch has no span to index by time.
        unindexed("accepted_by_time", f"{sound} and not m.entered", keys.by_time_key("m.key", "m.at_ns")),
        unindexed("accepted_by_blob", "not m.referred", keys.by_blob_key("sha256", "m.place")),
        unindexed("raw_blob_by_time", other_hour, keys.blob_by_time_key("sha256", "m.hour")),
        finding(f"m.problem is not null and read is not null and {sound}", repaired),
    ]


def _of_blobs(old: str, ripe_ns: int) -> list[str]:
    """Findings about blobs that nothing refers to, and index entries of missing blobs, as SQL."""
    alone = "size(manifests) + size(conflicts) + size(unread_refs) = 0"
    why = (
        f"if(coalesce(blob.modified_ns, 0) <= {ripe_ns}, {text(CANDIDATE)}, "
        "'nothing refers to it; younger than the retry horizon')"
    )
    orphan = made("orphaned", "raw_blob", "e.key", "''", "e", why)
    dangling = made("orphaned", "raw_blob_by_time", "e.key", "''", "e", text(NOTHING))
    return [
        each("blobs", "e", f"{alone} and {old}", orphan),
        each("seen", "e", f"blob is null and {old}", dangling),
    ]


def _of_conflicts(old: str) -> list[str]:
    """Findings about the blobs of conflicts and their reverse references, as SQL."""
    reason = "'the submitted blob of a conflict is missing'"
    lacking = made("missing", "raw_blob", keys.blob_key("sha256"), "e.key", "e", reason)
    reference = keys.by_blob_key("sha256", "e.place", prefix=QUARANTINE_BY_BLOB)
    reason = "'the conflict has no reverse reference'"
    unindexed = made("unindexed", "quarantine_by_blob", reference, "e.key", "e", reason)
    dangling = made("orphaned", "quarantine_by_blob", "e.key", "''", "e", text(NOTHING))
    no_reference = "not exists(conflict_refs, r -> r.place = e.place)"
    no_conflict = "not exists(conflicts, c -> c.place = e.place)"
    return [
        each("conflicts", "e", f"blob is null and {old}", lacking),
        each("conflicts", "e", f"{old} and {no_reference}", unindexed),
        each("conflict_refs", "e", f"{old} and {no_conflict}", dangling),
    ]


def of_unknown_objects(listing: DataFrame) -> DataFrame:
    """Unknown objects, and delete markers where nothing may be deleted."""
    unknown = plain("foreign", "unknown", "'is under a prefix of batches, but does not have its layout'")
    hidden = plain("missing", "deleted", "'a delete marker hides it: its key could be taken again'")
    return keys.foreign(listing).selectExpr(*unknown).unionByName(keys.markers(listing).selectExpr(*hidden))


def of_segments(rows: DataFrame) -> DataFrame:
    """Index segments that cannot be read: their batches are reported as unindexed."""
    bad = rows.filter("problem is not null").selectExpr(
        "segment as key", "cast(null as bigint) as size_bytes", "modified_ns", "problem"
    )
    return bad.selectExpr(*plain("corrupt", "accepted_index", "problem"))


def of_packs(packed: DataFrame) -> DataFrame:
    """Packs that cannot be read: their batches are reported as missing."""
    bad = packed.filter("problem is not null").selectExpr(
        "pack as key", "cast(null as bigint) as size_bytes", "modified_ns", "problem"
    )
    return bad.selectExpr(*plain("corrupt", "raw_pack", "problem"))


def of_places(index: DataFrame, listing: DataFrame, before_ns: int) -> DataFrame:
    """Batches whose pack does not exist although their frame does, in another blob."""
    manifest = f"concat('{ACCEPTED}', substring(by_blob, {len(ACCEPTED_BY_BLOB) + 79}))"
    rows = index.filter(f"problem is null and pack is not null and modified_ns <= {before_ns}")
    there = keys.visible(listing).select("key")
    lacking = rows.join(there.withColumnRenamed("key", "pack"), "pack", how="left_anti")
    frames = there.withColumnRenamed("key", "frame")
    copied = lacking.withColumn("frame", F.expr(keys.blob_key("entry_sha256"))).join(frames, "frame", how="left_semi")
    named = copied.selectExpr("pack as key", "entry_bytes as size_bytes", "modified_ns", f"{manifest} as referrer")
    return named.selectExpr(*plain("missing", "raw_pack", "'an accepted batch lacks it'", referrer="referrer"))


def in_packs(found: DataFrame, packed: DataFrame) -> DataFrame:
    """Findings about a blob that a frame of a pack stands for name the pack, which is the object that exists."""
    places = packed.filter("problem is null").groupBy("key").agg(F.min("pack").alias("pack"))
    others = [name for name in found.columns if name != "key"]
    return found.join(places, "key", how="left").selectExpr(
        "if(kind = 'raw_blob' and finding != 'missing', coalesce(pack, key), key) as key", *others
    )


def verified(prints: DataFrame) -> DataFrame:
    """The result of reading the blobs: sha256, problem, place."""
    found = (F.first("problem").alias("problem"), F.first("place").alias("place"))
    return prints.groupBy("sha256").agg(*found)


def work(found: DataFrame) -> DataFrame:
    """The work for the findings: a manifest is repaired once, however many findings it has."""
    do = (
        f"case when startswith(referrer, '{ACCEPTED}') then 'mend' "
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
