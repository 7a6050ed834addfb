"""A store with lifecycle's seams in memory: the fake for unit tests and simulation.

Keeps versions where switched on, writes every change to its own event log, and guards deletes by identity in one step.
Where versioning is suspended, or was switched on late, the null version takes part as on S3.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from datetime import UTC, datetime

import msgspec

from lakebed.core.clock import Clock
from lakebed.core.errors import Denied, NotFound, Stale
from lakebed.lifecycle.cluster import LogReach
from lakebed.lifecycle.model import ObjectEntry, ObjectIdentity, Position, Verb, extended_hash
from lakebed.lifecycle.seams import UPLOADS, ChangeEvent, Facts, Family, LostLog, Policy, Removal

MINUTE_NS = 60_000_000_000

NULL = "null"


class StoredVersion(msgspec.Struct, frozen=True):
    """One version, marker or upload."""

    mtime_ns: int
    size: int = 0
    fid: str = ""
    version_id: str = ""
    tags: tuple[tuple[str, str], ...] = ()
    marker: bool = False
    locked: bool = False
    superseded_ns: int | None = None

    @property
    def identity(self) -> ObjectIdentity:
        extended = {f"X-Amz-Tagging-{key}": value.encode() for key, value in self.tags}
        return ObjectIdentity(self.mtime_ns, self.size, self.fid, extended_hash(extended))

    @property
    def facts(self) -> Facts:
        seen = self.identity
        return Facts(seen.mtime_ns, seen.size, (seen.head_fid,), seen.extended_hash)


class MemoryLake:
    """Buckets, their objects (newest version first), uploads, policies and one log of events."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.objects: dict[str, dict[str, list[StoredVersion]]] = {}
        self.uploads: dict[str, dict[str, tuple[str, StoredVersion]]] = {}
        self.policies: dict[str, bytes] = {}
        self.versioned: set[str] = set()
        self.suspended: set[str] = set()
        self.log: list[ChangeEvent] = []
        self._watchers: list[asyncio.Queue[str]] = []
        self.log_made_ns = 1
        self.log_begins_ns = 0  # what is before it was removed from the log's beginning
        self.log_files = True
        self.servers: dict[str, int] = {"f1": 1}
        self.incarnations: dict[str, int] = {}
        self.removed: list[tuple[int, ObjectEntry, Verb]] = []
        self.parts = 1  # into which scans of a bucket may be divided
        self._count = 0

    # What clients of the store do.

    def write(self, bucket: str, key: str, *, size: int = 1, tags: Mapping[str, str] | None = None) -> None:
        self._add(bucket, key, StoredVersion(self._now(), size, self._name("f"), tags=_tags(tags)))

    def tag(self, bucket: str, key: str, tags: Mapping[str, str]) -> None:
        old = self.objects[bucket][key][0]
        new = msgspec.structs.replace(old, tags=_tags(tags))
        self.objects[bucket][key][0] = new
        self._note(bucket, key, old, new)

    def hold(self, bucket: str, key: str, locked: bool = True) -> None:
        self.objects[bucket][key][0] = msgspec.structs.replace(self.objects[bucket][key][0], locked=locked)

    def remove(self, bucket: str, key: str) -> None:
        """A plain DELETE: a marker where versions are kept."""
        if self._keeps(bucket):
            self._add(bucket, key, StoredVersion(self._now(), marker=True))
        else:
            self._drop(bucket, key, self.objects[bucket][key][0])

    def begin_upload(self, bucket: str, key: str) -> str:
        name, made = self._name("u"), StoredVersion(self._now())
        self.uploads.setdefault(bucket, {})[name] = (key, made)
        self._append(ChangeEvent(self._place(), bucket, key, upload_id=name, new=made.facts))
        return name

    def complete_upload(self, bucket: str, name: str) -> None:
        key, _ = self.uploads[bucket].pop(name)
        self.write(bucket, key)

    def remove_bucket(self, bucket: str) -> None:
        """With all that it holds; one made again under its name is another bucket."""
        self.objects.pop(bucket, None)
        self.uploads.pop(bucket, None)
        self.policies.pop(bucket, None)
        self.incarnations[bucket] = self.incarnations.get(bucket, 0) + 1

    def crash_server(self, lost_s: float) -> None:
        """A server that writes the log dies and comes back without its last events."""
        since_ns = self._now() - round(lost_s * 1e9)
        self.log = [event for event in self.log if event.position.ts_ns < since_ns]
        self.servers["f1"] += 1

    def lose_log(self, how: str) -> None:
        """The files are gone, or the folder, or it was made again."""
        self.log = []
        self.log_files = self.log_files and how != "files"
        self.log_made_ns = {"gone": 0, "remade": self._now()}.get(how, self.log_made_ns)

    def lose_minute(self, at_ns: int) -> None:
        """The file that has this instant is gone."""
        self.log = [event for event in self.log if event.position.ts_ns // MINUTE_NS != at_ns // MINUTE_NS]

    # The seams.

    async def read(self, after: Position, until_ns: int) -> AsyncGenerator[ChangeEvent, None]:
        if after.ts_ns < self.log_begins_ns:
            raise LostLog(f"the log begins at {self.log_begins_ns}, behind the cursor {after.ts_ns}")
        for event in list(self.log):
            if after < event.position and event.position.ts_ns <= until_ns:
                yield event

    async def reach(self) -> LogReach:
        first_ns = max(self.log_begins_ns, self.log_made_ns) if self.log_files and self.log_made_ns else None
        return LogReach(self.log_made_ns, first_ns, tuple(sorted(self.servers.items())))

    async def files(self, day: str) -> dict[str, int]:
        """A file a minute, once it is over."""
        minutes = {event.position.ts_ns // MINUTE_NS for event in self.log if event.position.ts_ns > 0}
        begun = [datetime.fromtimestamp(60 * one, UTC) for one in sorted(minutes) if one < self._now() // MINUTE_NS]
        return {f"{at:%H-%M}": int(at.timestamp()) for at in begun if f"{at:%Y-%m-%d}" == day}

    async def look(self, bucket: str, key: str, upload_id: str = "") -> Family:
        if upload_id:
            found = self.uploads.get(bucket, {}).get(upload_id)
            entries = () if found is None else (_upload(bucket, found[0], upload_id, found[1]),)
            return Family(bucket, key, entries, upload_id, token=f"u/{upload_id}")
        return Family(bucket, key, self._entries(bucket, key), token=f"k/{key}")

    async def scan(
        self, bucket: str, after: str = "", *, prefix: str = "", until: str = "", newest_ns: int | None = None
    ) -> AsyncGenerator[Family, None]:
        for token in self._tokens(bucket, prefix):
            if token <= after or (until and token > until):
                continue
            kind, _, name = token.partition("/")
            if kind == "k":
                family = await self.look(bucket, name)
            else:
                found = self.uploads.get(bucket, {}).get(name)
                family = await self.look(bucket, found[0] if found else "", name)
            young = newest_ns is not None and any(entry.mtime_ns > newest_ns for entry in family.entries)
            if young and kind == "k" and not self._keeps(bucket):
                yield Family(bucket, name, (), token=token, skipped=1)
            elif family.entries:
                yield family

    async def split(self, bucket: str, prefix: str = "") -> Sequence[str]:
        tokens = self._tokens(bucket, prefix)
        return tokens[:: max(1, len(tokens) // self.parts)][1 : self.parts] if self.parts > 1 else ()

    def _tokens(self, bucket: str, prefix: str) -> list[str]:
        keys = [] if prefix == UPLOADS else [key for key in self.objects.get(bucket, {}) if key.startswith(prefix)]
        names = self.uploads.get(bucket, {}) if prefix in ("", UPLOADS) else {}
        return sorted([f"k/{key}" for key in keys] + [f"u/{name}" for name in names])

    async def delete(self, entry: ObjectEntry, verb: Verb) -> Removal:
        if entry.upload_id:
            if entry.upload_id not in self.uploads.get(entry.bucket, {}):
                raise NotFound("no such upload")
            del self.uploads[entry.bucket][entry.upload_id]
            self.removed.append((self._now(), entry, verb))
            return Removal.WHOLE
        live = [one for one in self._entries(entry.bucket, entry.key) if one.version_id == entry.version_id]
        self._delete_object(entry, verb)
        self.removed.append((self._now(), live[0], verb))
        return Removal.WHOLE

    async def all(self) -> Sequence[Policy]:
        return [self._policy(bucket, text) for bucket, text in sorted(self.policies.items())]

    async def get(self, bucket: str) -> Policy | None:
        text = self.policies.get(bucket)
        return None if text is None else self._policy(bucket, text)

    async def changes(self) -> AsyncGenerator[str, None]:
        queue: asyncio.Queue[str] = asyncio.Queue()
        self._watchers.append(queue)
        try:
            while True:
                yield await queue.get()
        finally:
            self._watchers.remove(queue)

    async def put(self, bucket: str, text: bytes) -> None:
        if text:
            self.policies[bucket] = text
        else:
            self.policies.pop(bucket, None)
        self._append(ChangeEvent(self._place(), bucket, policy=True))
        for watcher in self._watchers:
            watcher.put_nowait(bucket)

    # Inside.

    def _policy(self, bucket: str, text: bytes) -> Policy:
        return Policy(bucket, text, self._keeps(bucket), str(self.incarnations.get(bucket, 0)))

    def _delete_object(self, entry: ObjectEntry, verb: Verb) -> None:
        versions = self.objects.get(entry.bucket, {}).get(entry.key, [])
        found = next((one for one in versions if self._shown_id(entry.bucket, one) == entry.version_id), None)
        if found is None:
            raise NotFound("no such version")
        if found.identity != entry.identity or entry.latest is not (versions[0] is found):
            raise Stale("the object has another identity, or another version is the current one")
        if not entry.latest and found.superseded_ns != entry.noncurrent_since_ns:
            raise Stale("the version was the current one meanwhile")
        if verb is Verb.DELETE_MARKER and len(versions) > 1:
            raise Stale("the marker is not alone")
        marks = verb is Verb.CURRENT and self._keeps(entry.bucket)
        if found.locked and not (marks and self._is_kept_by_marker(entry.bucket, found)):
            raise Denied("object lock")
        if marks:
            self._add(entry.bucket, entry.key, StoredVersion(self._now(), marker=True))
        else:
            self._drop(entry.bucket, entry.key, found)

    def _entries(self, bucket: str, key: str) -> tuple[ObjectEntry, ...]:
        versions = self.objects.get(bucket, {}).get(key, [])
        return tuple(
            ObjectEntry(
                bucket=bucket,
                key=key,
                identity=one.identity,
                version_id=self._shown_id(bucket, one),
                tags=one.tags,
                latest=place == 0,
                marker=one.marker,
                alone=len(versions) == 1,
                noncurrent_since_ns=one.superseded_ns if place else None,
                newer_noncurrent=max(0, place - 1),
                locked=one.locked,
            )
            for place, one in enumerate(versions)
        )

    def _add(self, bucket: str, key: str, made: StoredVersion) -> None:
        versions = self.objects.setdefault(bucket, {}).setdefault(key, [])
        if self._keeps(bucket):
            suspended = bucket in self.suspended
            made = msgspec.structs.replace(made, version_id=NULL if suspended else self._name("v"))
            null = next((one for one in versions if self._shown_id(bucket, one) == NULL), None) if suspended else None
            if null is not None:
                versions.remove(null)
            if versions:
                since_ns = versions[0].superseded_ns or made.mtime_ns
                versions[0] = msgspec.structs.replace(versions[0], superseded_ns=since_ns)
            versions.insert(0, made)
            self._note(bucket, key, null, made)
        else:
            old = versions[0] if versions else None
            versions[:] = [made]
            self._note(bucket, key, old, made)

    def _keeps(self, bucket: str) -> bool:
        return bucket in self.versioned or bucket in self.suspended

    def _is_kept_by_marker(self, bucket: str, one: StoredVersion) -> bool:
        """Where versions are suspended, a marker takes the place of the null version."""
        return bucket not in self.suspended or self._shown_id(bucket, one) != NULL

    def _shown_id(self, bucket: str, one: StoredVersion) -> str:
        """What was written before versions were kept is the null version since."""
        return one.version_id or (NULL if self._keeps(bucket) else "")

    def _drop(self, bucket: str, key: str, gone: StoredVersion) -> None:
        versions = self.objects[bucket][key]
        was_latest = versions[0] is gone
        versions.remove(gone)
        if versions and was_latest:
            versions[0] = msgspec.structs.replace(versions[0], superseded_ns=None)
        if not versions:
            del self.objects[bucket][key]
        self._note(bucket, key, gone, None)

    def _note(self, bucket: str, key: str, old: StoredVersion | None, new: StoredVersion | None) -> None:
        version = (new or old or StoredVersion(0)).version_id
        before, after = old.facts if old else None, new.facts if new else None
        self._append(ChangeEvent(self._place(), bucket, key, version, old=before, new=after))

    def _append(self, event: ChangeEvent) -> None:
        self.log.append(event)

    def _place(self) -> Position:
        last = self.log[-1].position if self.log else Position(0)
        now_ns = max(self._clock.now_ns(), last.ts_ns)
        return Position(now_ns, last.offset + 1 if now_ns == last.ts_ns else 0)

    def _now(self) -> int:
        return self._clock.now_ns()

    def _name(self, kind: str) -> str:
        self._count += 1
        return f"{kind}{self._count:06d}"


def _upload(bucket: str, key: str, upload_id: str, made: StoredVersion) -> ObjectEntry:
    return ObjectEntry(bucket=bucket, key=key, identity=made.identity, upload_id=upload_id)


def _tags(tags: Mapping[str, str] | None) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((tags or {}).items()))
