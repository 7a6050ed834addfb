"""How SeaweedFS lays S3 out in its filer, as pure functions: paths to keys, entries to what rules see, events too.

Buckets are directories under `/buckets`; versions of `key` are files in the sibling directory `key.versions`; the null
version is the bare file; open uploads are directories under `.uploads`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from lakebed.lifecycle.hashing import extended_hash
from lakebed.lifecycle.model import Entry, Identity, Position
from lakebed.lifecycle.seams import Event, Facts, Policy
from lakebed.lifecycle.seaweed_wire import FilerEntry, FilerEvent

BUCKETS = "/buckets"
VERSIONS, UPLOADS = ".versions", ".uploads"
POLICY = "s3-bucket-lifecycle-configuration-xml"
VERSIONING = "Seaweed-X-Amz-Versioning"
LATEST = "Seaweed-X-Amz-Latest-Version-Id"
VERSION_ID = "Seaweed-X-Amz-Version-Id"
MARKER = "Seaweed-X-Amz-Delete-Marker"
NONCURRENT_SINCE = "Seaweed-X-Amz-Noncurrent-Since-Ns"
RETAIN_UNTIL = "Seaweed-X-Amz-Retention-Until-Date"
LEGAL_HOLD = "Seaweed-X-Amz-Legal-Hold"
TAG = "X-Amz-Tagging-"
NULL = "null"
INVERTED_ABOVE = 0x4000_0000_0000_0000  # newer version ids count down from the largest 64-bit number
LARGEST = 0x7FFF_FFFF_FFFF_FFFF


class Place(msgspec.Struct, frozen=True):
    """What a path of the filer is to S3."""

    bucket: str
    key: str = ""
    version: bool = False
    upload_id: str = ""


def path_of(bucket: str, key: str) -> tuple[str, str]:
    """Directory and name of a key's bare file."""
    directory, _, name = f"{BUCKETS}/{bucket}/{key}".rpartition("/")
    return directory, name


def place_of(directory: str, entry: FilerEntry) -> Place | None:
    """None for what is no object, no version and no upload: folders, parts, pointers, the store's own files."""
    bucket, _, rest = directory.removeprefix(BUCKETS + "/").partition("/")
    if not directory.startswith(BUCKETS + "/") or bucket.startswith("."):
        return None
    if rest == UPLOADS:
        key = entry.extended.get("key", b"").decode(errors="replace")
        return Place(bucket, key, upload_id=entry.name) if entry.is_directory and key else None
    if entry.is_directory or rest.startswith(UPLOADS + "/"):
        return None
    if rest.endswith(VERSIONS):
        return Place(bucket, rest.removesuffix(VERSIONS), version=True)
    return Place(bucket, f"{rest}/{entry.name}" if rest else entry.name)


def identity_of(entry: FilerEntry) -> Identity:
    head = entry.fids[0] if entry.fids else entry.md5.hex()
    return Identity(entry.mtime_ns, entry.size, head, extended_hash(entry.extended))


def facts_of(entry: FilerEntry) -> Facts:
    fids = entry.fids or (entry.md5.hex(),)
    return Facts(entry.mtime_ns, entry.size, fids, extended_hash(entry.extended))


def event_of(event: FilerEvent, offset: int) -> Event | None:
    """What lifecycle makes of a filer event; None when it concerns nobody."""
    position = Position(event.ts_ns, offset)
    if event.unreadable:
        bucket = event.directory.removeprefix(BUCKETS).strip("/").partition("/")[0]
        return Event(position, bucket, unreadable=event.unreadable)
    directory, old = event.directory, event.old
    if event.new is not None and event.new_directory:
        if old is not None and (event.directory, old.name) != (event.new_directory, event.new.name):
            old = None  # a rename: at its new place it is new
        directory = event.new_directory
    shown = event.new or old
    if shown is None:
        return None
    if directory == BUCKETS:
        return Event(position, shown.name, policy=True)
    place = place_of(directory, shown)
    if place is None:
        return None
    return Event(
        position,
        place.bucket,
        place.key,
        version_of(shown) if place.version else "",
        place.upload_id,
        facts_of(old) if old is not None else None,
        facts_of(event.new) if event.new is not None else None,
    )


def policy_of_bucket(entry: FilerEntry) -> Policy | None:
    text = entry.extended.get(POLICY, b"")
    return Policy(entry.name, text, bool(entry.extended.get(VERSIONING))) if text else None


def object_of(bucket: str, key: str, found: FilerEntry, now_ns: int) -> Entry:
    """The only thing there is of a key where no versions are kept."""
    return Entry(
        bucket=bucket,
        key=key,
        identity=identity_of(found),
        tags=tags_of(found),
        locked=is_locked(found, now_ns),
        chunks=found.fids,
    )


def upload_of(bucket: str, found: FilerEntry) -> Entry:
    key = found.extended.get("key", b"").decode(errors="replace")
    return Entry(bucket=bucket, key=key, identity=identity_of(found), upload_id=found.name)


def versions_of(
    bucket: str, key: str, bare: FilerEntry | None, pointer: FilerEntry | None, files: Sequence[FilerEntry], now_ns: int
) -> tuple[Entry, ...]:
    """Every version of a key, newest first. The pointer on the directory says which is current; without it, the bare
    file is, or else the newest.
    """
    found = [(version_ns(version_of(file)), version_of(file), file) for file in files if not file.is_directory]
    if bare is not None:
        found.append((bare.mtime_ns, NULL, bare))
    latest = (pointer.extended.get(LATEST, b"") if pointer is not None else b"").decode(errors="replace")
    if not latest and bare is not None:
        latest = NULL
    found.sort(key=lambda one: (one[1] != latest, -one[0]))
    entries: list[Entry] = []
    for place, (_, version_id, file) in enumerate(found):
        current = place == 0
        since = _int(file.extended.get(NONCURRENT_SINCE, b""))
        entries.append(
            Entry(
                bucket=bucket,
                key=key,
                identity=identity_of(file),
                version_id=version_id,
                tags=tags_of(file),
                latest=current,
                marker=file.extended.get(MARKER) == b"true",
                alone=len(found) == 1,
                noncurrent_since_ns=None if current else (since if since is not None else found[place - 1][0]),
                newer_noncurrent=max(0, place - 1),
                locked=is_locked(file, now_ns),
                chunks=file.fids,
            )
        )
    return tuple(entries)


def version_of(file: FilerEntry) -> str:
    given = file.extended.get(VERSION_ID, b"").decode(errors="replace")
    return given or file.name.removeprefix("v_")


def version_ns(version_id: str) -> int:
    """When a version was made, by its id; both ways of counting are told apart."""
    try:
        stamp = int(version_id[:16], 16)
    except ValueError:
        return 0
    return LARGEST - stamp if stamp > INVERTED_ABOVE else stamp


def tags_of(entry: FilerEntry) -> tuple[tuple[str, str], ...]:
    return tuple(
        sorted(
            (name.removeprefix(TAG), value.decode(errors="replace"))
            for name, value in entry.extended.items()
            if name.startswith(TAG)
        )
    )


def is_locked(entry: FilerEntry, now_ns: int) -> bool:
    """Legal hold or retention. What cannot be read counts as locked."""
    if entry.extended.get(LEGAL_HOLD, b"").upper() == b"ON":
        return True
    until = entry.extended.get(RETAIN_UNTIL)
    if not until:
        return False
    seconds = _int(until)
    return seconds is None or seconds * 1_000_000_000 > now_ns


def _int(value: bytes) -> int | None:
    try:
        return int(value)
    except ValueError:
        return None
