"""What SeaweedFS's entries and changes are to lifecycle: pure functions over how its filer lays S3 out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterable, Iterator, Sequence
from datetime import UTC, datetime
from heapq import heappop, heappush

import msgspec

from lakebed.filer import s3
from lakebed.filer.model import FilerEntry, FilerEvent
from lakebed.lifecycle.model import ObjectEntry, ObjectIdentity, Position, extended_hash
from lakebed.lifecycle.seams import ChangeEvent, Facts, Policy

ORDER_NS = 5_000_000_000  # how far changes may be out of order in the log; 50 ms were seen on a busy server


class ObjectAddress(msgspec.Struct, frozen=True):
    """What a path of the filer is to S3."""

    bucket: str
    key: str = ""
    version_id: str = ""
    upload_id: str = ""


# Live state.


def identity_of(entry: FilerEntry) -> ObjectIdentity:
    return ObjectIdentity(entry.attributes.mtime_ns, entry.size, entry.head_fid, extended_hash(entry.extended))


def policy_of(bucket: FilerEntry) -> Policy | None:
    text = s3.lifecycle_of(bucket)
    made = str(bucket.attributes.crtime_ns)
    return Policy(bucket.name, text, bool(s3.versioning_of(bucket)), made) if text else None


def upload_of(bucket: str, found: FilerEntry) -> ObjectEntry:
    """Raises Corrupt for an upload that does not name its key."""
    return ObjectEntry(bucket=bucket, key=s3.upload_key(found), identity=identity_of(found), upload_id=found.name)


def object_of(bucket: str, key: str, found: FilerEntry, now_ns: int) -> ObjectEntry:
    """The only thing there is of a key where versions were never kept."""
    return ObjectEntry(
        bucket=bucket,
        key=key,
        identity=identity_of(found),
        tags=s3.tags_of(found),
        locked=s3.is_locked(found, now_ns),
        chunks=tuple(chunk.fid for chunk in found.chunks),
    )


def versions_of(
    bucket: str, key: str, bare: FilerEntry | None, pointer: FilerEntry | None, files: Sequence[FilerEntry], now_ns: int
) -> tuple[ObjectEntry, ...]:
    """Every version of a key: the current one, then the others, newest first. Raises Corrupt.

    The folder of versions points at the current one; where it points at none, the file at the key is, or the newest.
    """
    found = [(_made_ns(file), file, s3.version_id(file)) for file in files if s3.is_version_file(file)]
    if bare is not None:
        found.append((bare.attributes.mtime_ns, bare, s3.NULL))
    pointed = s3.latest_file(pointer)
    current = next((one for one in found if pointed and one[1] is not bare and one[1].name == pointed), None)
    if current is None and bare is not None:
        current = found[-1]
    found.sort(key=lambda one: (one is not current, -one[0]))
    return tuple(
        msgspec.structs.replace(
            object_of(bucket, key, file, now_ns),
            version_id=version_id,
            latest=place == 0,
            marker=s3.is_marker(file),
            alone=len(found) == 1,
            noncurrent_since_ns=_since_ns(file, found[place - 1][0]) if place else None,
            since_noted=not place or s3.noncurrent_since_ns(file) is not None,
            newer_noncurrent=max(0, place - 1),
        )
        for place, (_, file, version_id) in enumerate(found)
    )


def _made_ns(file: FilerEntry) -> int:
    version_id = s3.version_id(file)
    return file.attributes.mtime_ns if version_id == s3.NULL else s3.version_time_ns(version_id)


def _since_ns(file: FilerEntry, successor_ns: int) -> int:
    noted = s3.noncurrent_since_ns(file)
    return successor_ns if noted is None else noted


# Changes.


def place_of(directory: str, entry: FilerEntry) -> ObjectAddress | None:
    """None for what is no object, no version and no upload: folders, parts, pointers, the store's own files."""
    bucket, folder = s3.bucket_of(directory)
    if not bucket or bucket.startswith("."):
        return None
    if folder == s3.UPLOADS:
        key = entry.text(s3.UPLOAD_KEY)
        return ObjectAddress(bucket, key, upload_id=entry.name) if entry.is_directory and key else None
    if s3.is_folder_object(entry) and not s3.is_versions_folder(entry):
        return ObjectAddress(bucket, f"{folder}/{entry.name}/" if folder else f"{entry.name}/")
    if entry.is_directory or folder.startswith(f"{s3.UPLOADS}/"):
        return None
    if folder.endswith(s3.VERSIONS) and s3.is_version_file(entry):
        return ObjectAddress(bucket, folder.removesuffix(s3.VERSIONS), s3.version_id(entry))
    key = f"{folder}/{entry.name}" if folder else entry.name
    return ObjectAddress(bucket, key, entry.text(s3.VERSION_ID))


async def in_order(changes: AsyncIterable[FilerEvent]) -> AsyncGenerator[tuple[int, ChangeEvent], None]:
    """What the changes mean, each with its time, in the order of their times.

    The log itself is not in that order: a change gets its time before its place, so with many writers one may come
    behind later ones, and a cursor that has passed these would pass it too. So changes are held until the log is
    ORDER_NS further. Those of one instant keep their order.
    """
    held: list[tuple[int, int, ChangeEvent]] = []
    number, newest_ns = 0, 0
    async for change in changes:
        for event in events_of(change):
            heappush(held, (change.ts_ns, number, event))
            number += 1
            if change.ts_ns > newest_ns:
                newest_ns = change.ts_ns
        while held and held[0][0] <= newest_ns - ORDER_NS:
            ts_ns, _, event = heappop(held)
            yield ts_ns, event
    while held:
        ts_ns, _, event = heappop(held)
        yield ts_ns, event


def events_of(change: FilerEvent) -> Iterator[ChangeEvent]:
    """What one change of the filer means, not placed yet: nothing, one event, or two for a move."""
    nowhere = Position()
    if change.unreadable:
        bucket, _ = s3.bucket_of(f"{change.directory}/")
        yield ChangeEvent(nowhere, bucket, unreadable=change.unreadable)
        return
    old, new = change.old, change.new
    target = change.new_parent or change.directory
    if old is not None and new is not None and (change.directory, old.name) != (target, new.name):
        yield from _event(change.directory, old, None)
        yield from _event(target, None, new)
    else:
        yield from _event(change.directory, old, new)


def _event(directory: str, old: FilerEntry | None, new: FilerEntry | None) -> Iterator[ChangeEvent]:
    shown = new or old
    if shown is None:
        return
    if directory == s3.BUCKETS:
        yield ChangeEvent(Position(), shown.name, policy=True)
        return
    place = place_of(directory, shown)
    if place is not None:
        both = old is not None and new is not None  # only then it is asked whether attributes changed
        before = facts_of(old, attributes=both) if old is not None else None
        after = facts_of(new, attributes=both) if new is not None else None
        yield ChangeEvent(Position(), place.bucket, place.key, place.version_id, place.upload_id, before, after)


def facts_of(entry: FilerEntry, *, attributes: bool = True) -> Facts:
    fids = tuple([chunk.fid for chunk in entry.chunks])
    return Facts(entry.attributes.mtime_ns, entry.size, fids, extended_hash(entry.extended) if attributes else "")


def log_file_ns(day: str, name: str) -> int | None:
    """The minute a log file begins at, by its name; None for what is no file of the log."""
    try:
        at = datetime.strptime(f"{day} {name[:5]}", "%Y-%m-%d %H-%M").replace(tzinfo=UTC)
    except ValueError:
        return None
    return int(at.timestamp()) * 1_000_000_000
