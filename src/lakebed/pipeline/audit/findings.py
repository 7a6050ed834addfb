"""What a listing says of accepted batches, as joins. Pure: frames in, frames out; nothing is read here.

Two cogroups say everything:

    by identity   accepted · accepted_by_blob · accepted_by_time · repair      what a manifest refers to, when accepted
    by hash       manifests · raw_blob · raw_blob_by_time · quarantine · …     is the blob there, indexed, referred to

A manifest's own key does not say which blob it refers to, its reverse reference does. So a manifest is read only when
it has not exactly one reverse reference and one entry by time: `doubtful` names those, and a sound bucket has none.

Lists cost, and nearly everything is sound. So a first pass only counts, by identity and by hash, and what it finds in
order is done with; the rest is laid side by side.
"""

from __future__ import annotations

from functools import reduce

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lakebed.pipeline.audit import keys

FRAME_BYTES_MIN = 32 + 40 + 2  # prefix, header and two ids of a letter: less cannot be a frame
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


def counted(listing: DataFrame, before_ns: int) -> DataFrame:
    """Each identity, by counts alone: digest, place, sha256, at_ns, size_bytes, modified_ns, and whether it is plain:
    an old manifest with one reference, one entry by time and no mark."""
    one = {"a": "accepted", "r": "accepted_by_blob", "t": "accepted_by_time", "m": "repair"}
    sums = [F.expr(f"count_if(kind = '{kind}')").alias(name) for name, kind in one.items()]
    mine = [F.expr(f"max(if(kind = 'accepted', {name}, null))").alias(name) for name in ("size_bytes", "modified_ns")]
    told = [F.expr(f"max({name})").alias(name) for name in ("place", "sha256", "at_ns")]
    rows = keys.objects(listing, keys.OF_IDENTITIES).groupBy("digest").agg(*sums, *mine, *told)
    plain = f"a = 1 and r = 1 and t = 1 and m = 0 and coalesce(modified_ns, 0) <= {before_ns}"
    return rows.selectExpr("digest", "place", "sha256", "at_ns", "size_bytes", "modified_ns", f"{plain} as plain")


def plain_manifests(found: DataFrame) -> DataFrame:
    """The manifests that the first pass found in order, as rows for `hashes`."""
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
            *(F.expr(_those(kind)).alias(name) for name, kind in lists.items()),
        )
        .withColumn("young", F.expr(f"accepted is not null and not {_old('accepted', before_ns)}"))
    )


def doubtful(found: DataFrame) -> DataFrame:
    """The manifests that must be read, because the listing does not say what is in them: digest, key."""
    return every(found.filter("size(refs) != 1 or size(times) != 1"))


def every(found: DataFrame) -> DataFrame:
    """All manifests that are judged, for an audit that verifies: digest, key."""
    return found.filter("accepted is not null and not young").selectExpr("digest", "accepted.key as key")


def told(found: DataFrame, read: DataFrame) -> DataFrame:
    """Identities with the hash and time of their manifests; of those that were read, reading has the last word.

    `sha256` and `at_ns` are null where there is no manifest or it cannot be read, `problem` says why.
    """
    listed = "accepted is not null and problem is null and read_sha256 is null"
    return found.join(read.drop("key"), "digest", how="left").selectExpr(
        *found.columns,
        "frame_bytes",
        "problem",
        f"if({listed}, get(refs, 0).sha256, read_sha256) as sha256",
        f"if({listed}, get(times, 0).at_ns, read_at_ns) as at_ns",
    )


def of_identities(manifests: DataFrame, before_ns: int) -> DataFrame:
    """Manifests that cannot be read, and entries that speak of no manifest or lie about theirs."""
    old = _old("e", before_ns)
    lists = {"refs": "accepted_by_blob", "times": "accepted_by_time", "marks": "repair"}
    return _exploded(
        manifests,
        *(
            _each(name, "e", f"accepted is null and {old}", _made("orphaned", kind, "e.key", "''", "e", _text(NOTHING)))
            for name, kind in lists.items()
        ),
        _each(
            "array(accepted)",
            "e",
            f"problem is not null and problem != '{GONE}'",
            _made("corrupt", "accepted", "e.key", "e.key", "e", "problem"),
        ),
        _each(
            "refs",
            "e",
            f"accepted is not null and sha256 is not null and e.sha256 != sha256 and {old}",
            _made(
                "orphaned",
                "accepted_by_blob",
                "e.key",
                "accepted.key",
                "e",
                _text("its manifest refers to another blob"),
            ),
        ),
    )


def speaking(manifests: DataFrame, listing: DataFrame, read: DataFrame | None) -> DataFrame:
    """Every row that speaks of a hash: objects, manifests, references of manifests that say nothing themselves, and
    what reading the blobs said."""
    known = manifests.filter("sha256 is not null and not young")
    silent = manifests.filter("sha256 is null or young").selectExpr("explode(refs) as ref")
    rows = [
        keys.objects(listing, keys.OF_BLOBS).selectExpr("kind", *_ENTRY, *_nulls(_EXTRA)),
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
        silent.selectExpr("'spoken' as kind", *(f"ref.{name} as {name}" for name in _ENTRY), *_nulls(_EXTRA)),
    ]
    if read is not None:
        given = ("sha256", "place", "problem")
        absent = {name: kind for name, kind in (_ENTRY | _EXTRA).items() if name not in given}
        rows.append(read.selectExpr("'verified' as kind", *given, *_nulls(absent)))
    return reduce(DataFrame.unionByName, rows)


def hashes(rows: DataFrame, only: DataFrame | None = None) -> DataFrame:
    """Everything that speaks of one hash, side by side: the lists manifests, blobs, seen, conflicts, conflict_refs,
    spoken and verified. `only` these hashes, if given."""
    lists = [F.expr(_those(kind)).alias(name) for kind, name in _LISTS.items()]
    chosen = rows if only is None else rows.join(only, "sha256", how="left_semi")
    return chosen.withColumn("entry", F.struct(*_ENTRY, *_EXTRA)).groupBy("sha256").agg(*lists)


def of_hashes(found: DataFrame, *, before_ns: int, ripe_ns: int) -> DataFrame:
    """Findings about blobs and their indexes. Orphans from before `ripe_ns` are candidates of garbage collection."""
    rows = found.selectExpr("*", "get(blobs, 0) as blob", "get(verified, 0) as read")
    here, wrong, old = keys.blob_key("sha256"), _wrong("m"), _old("e", before_ns)
    sound = f"(blob is not null and {wrong} is null)"
    alone = "size(manifests) + size(conflicts) + size(spoken) = 0"
    why = (
        f"if(coalesce(blob.modified_ns, 0) <= {ripe_ns}, {_text(CANDIDATE)}, "
        "'nothing refers to it; younger than the retry horizon')"
    )

    def unindexed(kind: str, when: str, key: str) -> str:
        size = "coalesce(blob.size_bytes, m.frame_bytes)"
        return _each(
            "manifests", "m", when, _made("unindexed", kind, key, "m.key", "m", "'is not in this index'", size=size)
        )

    return _exploded(
        rows,
        _each(
            "manifests",
            "m",
            "blob is null",
            _made("missing", "raw_blob", here, "m.key", "m", "'an accepted batch lacks it'", size="m.frame_bytes"),
        ),
        _each(
            "manifests",
            "m",
            f"blob is not null and {wrong} is not null",
            _made("corrupt", "raw_blob", here, "m.key", "blob", wrong),
        ),
        # Without its blob a batch has no span to index by time.
        unindexed("accepted_by_time", f"{sound} and not m.entered", keys.by_time_key("m.key", "m.at_ns")),
        unindexed("accepted_by_blob", "not m.referred", keys.by_blob_key("sha256", "m.place")),
        unindexed(
            "raw_blob_by_time", "not exists(seen, s -> s.hour = m.hour)", keys.blob_by_time_key("sha256", "m.hour")
        ),
        _each(
            "manifests",
            "m",
            f"m.problem is not null and read is not null and {sound}",
            _made("orphaned", "repair", "m.problem", "m.key", "m", "'the blob is good again'"),
        ),
        _each("blobs", "e", f"{alone} and {old}", _made("orphaned", "raw_blob", "e.key", "''", "e", why)),
        _each(
            "seen",
            "e",
            f"blob is null and {old}",
            _made("orphaned", "raw_blob_by_time", "e.key", "''", "e", _text(NOTHING)),
        ),
        _each(
            "conflicts",
            "e",
            f"blob is null and {old}",
            _made("missing", "raw_blob", here, "e.key", "e", "'the submitted blob of a conflict is not there'"),
        ),
        _each(
            "conflicts",
            "e",
            f"{old} and not exists(conflict_refs, r -> r.place = e.place)",
            _made(
                "unindexed",
                "quarantine_by_blob",
                keys.by_blob_key("sha256", "e.place", of="quarantine"),
                "e.key",
                "e",
                "'the conflict has no reverse reference'",
            ),
        ),
        _each(
            "conflict_refs",
            "e",
            f"{old} and not exists(conflicts, c -> c.place = e.place)",
            _made("orphaned", "quarantine_by_blob", "e.key", "''", "e", _text(NOTHING)),
        ),
    )


def of_strangers(listing: DataFrame) -> DataFrame:
    """Foreign objects, and delete markers where nothing may be deleted."""
    strange = _plain("foreign", "unknown", "'lies under a prefix of batches, and is not theirs'")
    hidden = _plain("missing", "deleted", "'a delete marker hides it: its key could be taken again'")
    return keys.foreign(listing).selectExpr(*strange).unionByName(keys.markers(listing).selectExpr(*hidden))


def verified(prints: DataFrame) -> DataFrame:
    """What reading the blobs said: sha256, problem, place."""
    said = (F.first("problem").alias("problem"), F.first("place").alias("place"))
    return prints.groupBy("sha256").agg(*said)


def of_rollups(rolled: DataFrame, covers: DataFrame, others: DataFrame, objects: DataFrame) -> DataFrame:
    """Chunks and manifests of rollups that cannot be read, and chunks of rollups and of the index that are missing."""
    unknown = ("cast(null as bigint) as size_bytes", "cast(null as bigint) as modified_ns")
    bad = [
        frame.filter(f"problem is not null and problem != '{GONE}'").selectExpr("key", "problem", *unknown)
        for frame in (rolled, covers, others)
    ]
    corrupt = reduce(DataFrame.unionByName, bad).selectExpr(*_plain("corrupt", "rollup", "problem"))
    chunks = covers.filter("what in ('rollup', 'index')").selectExpr("name as chunk", "what", "key", "size_bytes")
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
    return state.selectExpr("key", "problem", *unknown).selectExpr(*_plain("corrupt", "rollup", "problem"))


def of_uncovered(batches: DataFrame) -> DataFrame:
    """Accepted batches that rollups have passed by: a cold run finds them."""
    told = "'settled, and in no generation of rollups: lakebed pipeline rollup --cold'"
    key = f"concat('accepted-by-time/v1/', {keys.hour_of('at_ns')}, '/', manifest_id, '.json') as key"
    unknown = ("cast(null as bigint) as size_bytes", "cast(null as bigint) as modified_ns")
    return batches.selectExpr(key, *unknown).selectExpr(*_plain("unindexed", "rollup", told))


def work(found: DataFrame) -> DataFrame:
    """What is to be done about the findings: a manifest is mended once, however much is wrong with it."""
    do = (
        "case when startswith(referrer, 'accepted/v1/') then 'mend' "
        "when kind = 'quarantine_by_blob' and finding = 'unindexed' then 'mend_quarantine' "
        f"when reason = {_text(CANDIDATE)} then 'judge' end as do"
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


def _old(entry: str, before_ns: int) -> str:
    """Whether it was there well before the listing began; a time that is not told is taken for old."""
    return f"(coalesce({entry}.modified_ns, 0) <= {before_ns})"


def _made(finding: str, kind: str, key: str, referrer: str, entry: str, reason: str, *, size: str = "") -> str:
    """A finding as SQL; key, referrer, reason and size are SQL too, `entry` is what it is about."""
    return (
        f"named_struct('finding', '{finding}', 'kind', '{kind}', 'key', {key}, 'referrer', {referrer}, 'size_bytes', "
        f"cast({size or f'{entry}.size_bytes'} as bigint), 'modified_ns', {entry}.modified_ns, 'reason', {reason})"
    )


def _each(entries: str, name: str, when: str, made: str) -> str:
    return f"transform(filter({entries}, {name} -> {when}), {name} -> {made})"


def _plain(finding: str, kind: str, reason: str) -> list[str]:
    said = [f"'{finding}' as finding", f"'{kind}' as kind", "key", "'' as referrer", "size_bytes", "modified_ns"]
    return [*said, f"{reason} as reason"]


def _those(kind: str) -> str:
    return f"collect_list(if(kind = '{kind}', entry, null))"


def _text(words: str) -> str:
    return f"'{words}'"


def _nulls(types: dict[str, str]) -> list[str]:
    return [f"cast(null as {kind}) as {name}" for name, kind in types.items()]


def _exploded(rows: DataFrame, *made: str) -> DataFrame:
    return rows.selectExpr(f"explode(concat({', '.join(made)})) as f").selectExpr("f.*")
