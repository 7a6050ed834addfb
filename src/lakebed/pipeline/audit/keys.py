"""The keys of `lakebed.batches.paths` as Spark SQL: what a listing alone shows. Pure transforms of frames.

A test compares these with the keys that the batches part writes. An object under a prefix of batches that does not have
its layout is foreign. Functions that build a key take and return SQL.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from lakebed.batches import paths

PLACE = "agent=(?:[0-9a-f]{2})+/boot=(?:[0-9a-f]{2})+/[0-9]{20}-[0-9]{20}"
SHA = "[0-9a-f]{64}"
FAN = f"sha256/[0-9a-f]{{2}}/[0-9a-f]{{2}}/{SHA}"
HOUR = "date=[0-9]{4}-[0-9]{2}-[0-9]{2}/hour=[0-9]{2}"

# kind: prefix, the rest, and where each field is behind the prefix: (offset, length); no length: up to `.json`.
# Everything but a place has a fixed width, so a key that fits is split by position.
LAYOUT: dict[str, tuple[str, str, dict[str, tuple[int, int]]]] = {
    "accepted": (paths.ACCEPTED, rf"{PLACE}\.json", {"place": (0, 0)}),
    "accepted_by_time": (
        paths.ACCEPTED_BY_TIME,
        rf"{HOUR}/[0-9]{{20}}-[0-9a-f]{{32}}\.json",
        {"hour": (0, 23), "at": (24, 20), "name": (45, 32)},
    ),
    "accepted_index": (
        paths.ACCEPTED_INDEX,
        rf"shard=[0-3]/{HOUR}/[0-9]{{20}}-[0-9]{{20}}-[0-9a-f]{{32}}\.json\.zst",
        {},
    ),
    "accepted_by_blob": (paths.ACCEPTED_BY_BLOB, rf"{FAN}/{PLACE}\.json", {"sha256": (13, 64), "place": (78, 0)}),
    "raw_pack": (paths.PACKS, rf"{FAN}\.lmpack", {}),  # before raw_blob, whose prefix is shorter
    "raw_blob": (paths.RAW_BLOBS, rf"{FAN}\.lmbatch", {"sha256": (13, 64)}),
    "raw_blob_by_time": (
        paths.RAW_BLOBS_BY_TIME,
        rf"{HOUR}/sha256={SHA}\.json",
        {"hour": (0, 23), "sha256": (31, 64)},
    ),
    "quarantine": (
        paths.QUARANTINE,
        rf"{PLACE}/{SHA}\.json",
        {"place": (0, -65), "sha256": (-64, 64)},
    ),
    "quarantine_by_blob": (paths.QUARANTINE_BY_BLOB, rf"{FAN}/{PLACE}\.json", {"sha256": (13, 64), "place": (78, 0)}),
    "repair": (paths.REPAIRS, rf"{PLACE}\.json", {"place": (0, 0)}),
}
OF_IDENTITIES = ("accepted", "accepted_by_blob", "accepted_by_time", "repair")
OF_BLOBS = ("raw_blob", "raw_blob_by_time", "quarantine", "quarantine_by_blob")
# Some stores list folders as empty objects: they are left out.
VISIBLE = "is_latest and not is_delete_marker and not (endswith(key, '/') and coalesce(size_bytes, 0) = 0)"


def expanded(listing: DataFrame, rows: DataFrame) -> DataFrame:
    """The listing with the single objects that the rows of the index stand for: an audit sees one layout."""
    named = rows.filter("problem is null").selectExpr("explode(array(key, by_blob, seen)) as key", "modified_ns")
    once = named.groupBy("key").agg(F.min("modified_ns").alias("modified_ns"))
    return listing.unionByName(
        once.selectExpr(
            "key",
            "cast(null as bigint) as size_bytes",
            "modified_ns",
            "cast(null as string) as etag",
            "cast(null as string) as version_id",
            "true as is_latest",
            "false as is_delete_marker",
        )
    )


def unpacked(listing: DataFrame, packed: DataFrame) -> DataFrame:
    """The listing with the blob that each frame of a pack stands for: an audit sees one layout."""
    frames = packed.filter("problem is null").selectExpr(
        "key",
        "length as size_bytes",
        "modified_ns",
        "cast(null as string) as etag",
        "cast(null as string) as version_id",
        "true as is_latest",
        "false as is_delete_marker",
    )
    return listing.unionByName(frames.join(listing.filter(VISIBLE).select("key"), "key", how="left_anti"))


def located(blobs: DataFrame, packed: DataFrame | None) -> DataFrame:
    """These blobs (key, sha256) with the object, the offset and the length under which a task reads them."""
    if packed is None:
        return blobs.selectExpr("key", "sha256", "0L as `offset`", "0L as length")
    places = packed.filter("problem is null").select("sha256", "pack", "offset", "length")
    return blobs.join(places.dropDuplicates(["sha256"]), "sha256", how="left").selectExpr(
        "coalesce(pack, key) as key", "sha256", "coalesce(`offset`, 0L) as `offset`", "coalesce(length, 0L) as length"
    )


def visible(listing: DataFrame) -> DataFrame:
    """The objects that a reader of the bucket sees now."""
    return listing.filter(VISIBLE)


def objects(listing: DataFrame, kinds: Sequence[str]) -> DataFrame:
    """The objects of these kinds and the fields of their keys: kind, key, size_bytes, modified_ns, place, digest,
    at_ns, hour, sha256; null where a kind does not have it."""
    cut = [f"{_cut(kinds, field)} as {field}" for field in ("place", "name", "at", "hour", "sha256")]
    found = _under(listing, kinds).filter(_fits(kinds)).selectExpr("kind", "key", "size_bytes", "modified_ns", *cut)
    named = found.selectExpr(
        "kind",
        "key",
        "size_bytes",
        "modified_ns",
        "place",
        f"coalesce(name, {digest(accepted_key('place'))}) as digest",
        "try_cast(at as bigint) as at_ns",
        "hour",
        "sha256",
    )
    return named.filter(f"kind != 'accepted_by_time' or {_at_home('at_ns')}")


def foreign(listing: DataFrame) -> DataFrame:
    """Objects under the prefixes of batches that do not have their layout."""
    every = tuple(LAYOUT)
    hour, at = _cut(("accepted_by_time",), "hour"), f"try_cast({_cut(('accepted_by_time',), 'at')} as bigint)"
    astray = f"kind = 'accepted_by_time' and not coalesce({_at_home(at, hour)}, false)"
    return _under(listing, every).filter(f"not ({_fits(every)}) or ({astray})")


def markers(listing: DataFrame) -> DataFrame:
    """Delete markers that hide an accepted manifest or a raw blob: their keys could be taken again."""
    hidden = f"startswith(key, '{paths.ACCEPTED}') or startswith(key, '{paths.RAW_BLOBS}')"
    return listing.filter(f"is_latest and is_delete_marker and ({hidden})")


def accepted_key(place: str) -> str:
    return f"concat('{paths.ACCEPTED}', {place}, '.json')"


def digest(key: str) -> str:
    """The part of a manifest id that stands for its accepted key."""
    return f"substring(sha2({key}, 256), 1, 32)"


def hour_of(at_ns: str) -> str:
    """The hour folder of a moment in nanoseconds."""
    return f"date_format(timestamp_seconds({at_ns} div 1000000000), \"'date='yyyy-MM-dd'/hour='HH\")"


def blob_key(sha256: str) -> str:
    return f"concat('{paths.RAW_BLOBS}', {_fan(sha256)}, '.lmbatch')"


def by_time_key(accepted: str, at_ns: str) -> str:
    name = f"lpad(cast({at_ns} as string), 20, '0'), '-', {digest(accepted)}, '.json'"
    return f"concat('{paths.ACCEPTED_BY_TIME}', {hour_of(at_ns)}, '/', {name})"


def by_blob_key(sha256: str, place: str, *, prefix: str = paths.ACCEPTED_BY_BLOB) -> str:
    return f"concat('{prefix}', {_fan(sha256)}, '/', {place}, '.json')"


def blob_by_time_key(sha256: str, hour: str) -> str:
    return f"concat('{paths.RAW_BLOBS_BY_TIME}', {hour}, '/sha256=', {sha256}, '.json')"


def _at_home(at_ns: str, hour: str = "hour") -> str:
    """Whether an entry by time is in its own hour: in another hour no reader would find it."""
    return f"{hour} = {hour_of(at_ns)}"


def _fan(sha256: str) -> str:
    return f"concat('sha256/', substring({sha256}, 1, 2), '/', substring({sha256}, 3, 2), '/', {sha256})"


def _under(listing: DataFrame, kinds: Sequence[str]) -> DataFrame:
    """The objects under these kinds' prefixes, with the kind of the prefix."""
    under = " or ".join(f"startswith(key, '{LAYOUT[kind][0]}')" for kind in kinds)
    cases = " ".join(f"when startswith(key, '{LAYOUT[kind][0]}') then '{kind}'" for kind in kinds)
    return listing.filter(f"{VISIBLE} and ({under})").selectExpr("*", f"case {cases} end as kind")


def _fits(kinds: Sequence[str]) -> str:
    cases = " ".join(f"when '{kind}' then key rlike r'^{LAYOUT[kind][0]}{LAYOUT[kind][1]}$'" for kind in kinds)
    return f"case kind {cases} else false end"


def _cut(kinds: Sequence[str], field: str) -> str:
    cases = []
    for kind in kinds:
        prefix, _, fields = LAYOUT[kind]
        if field in fields:
            offset, length = fields[field]
            start = f"{len(prefix) + offset + 1}" if offset >= 0 else f"length(key) - {len('.json') - offset - 1}"
            width = f"{length}" if length > 0 else f"length(key) - {len(prefix) + offset - length + len('.json')}"
            cases.append(f"when '{kind}' then substring(key, {start}, {width})")
    return f"case kind {' '.join(cases)} end" if cases else "cast(null as string)"
