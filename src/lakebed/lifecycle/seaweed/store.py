"""SeaweedFS behind lifecycle's seams: policies, live state and events from its filer, deletes guarded there too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing

import msgspec

from lakebed.core.errors import Corrupt, NotFound, Unavailable
from lakebed.core.runtime import Runtime
from lakebed.filer import s3
from lakebed.filer.client import PAGE, FilerClient
from lakebed.filer.model import (
    Clause,
    ConditionKind,
    FilerEntry,
    Mutation,
    MutationKind,
    SkippedEntries,
    Transaction,
)
from lakebed.lifecycle.cluster import SECOND_NS, LogReach
from lakebed.lifecycle.model import ObjectEntry, Position, Verb
from lakebed.lifecycle.paths import checked_bucket
from lakebed.lifecycle.seams import ChangeEvent, Family, Policy, Removal
from lakebed.lifecycle.seaweed import entries as layout
from lakebed.lifecycle.seaweed.deletes import SeaweedDeleter
from lakebed.lifecycle.seaweed.ttl import BucketTtl

LOG_PARENT, LOG = "/topics/.system", "log"
OWN_CURSORS = "/etc/s3/lifecycle/daily-cursors"  # of SeaweedFS's own worker, one file for each of its shards
VERSIONING_FRESH_S = 1.0  # how old a bucket's state of versioning may be; S3 itself promises far less
PARTS_MAX = 16  # into which the scan of a prefix is divided
SPLIT_DEPTH = 16  # folders, or characters, that all names share
BORDERS_MAX = 128
FIRST_FILES = 16
AHEAD = 32  # entries of a page whose folders of versions are read at the same time
LAST = "\U0010ffff"  # behind every name with the same beginning
STREAMS_MAX = 3  # subscriptions of one pass, with as many filers, before it is given up


class _VersionsFolder(msgspec.Struct, frozen=True):
    """What a folder named like one of versions holds, and whether there is a file at its key."""

    files: Sequence[FilerEntry]
    has_bare: bool


class SeaweedLake:
    """Event source, lister, deleter and policies in one: they share the connection and what is known of versioning."""

    def __init__(self, filer: FilerClient, runtime: Runtime) -> None:
        self._filer, self._clock = filer, runtime.clock
        self._deleter = SeaweedDeleter(filer, runtime)
        self._known: dict[str, tuple[float, str]] = {}

    async def close(self) -> None:
        await self._filer.close()

    # Policies.

    async def all(self) -> Sequence[Policy]:
        found = [self._note(entry) async for entry in self._filer.entries(s3.BUCKETS) if _is_bucket(entry)]
        return [policy for bucket in found if (policy := layout.policy_of(bucket)) is not None]

    async def get(self, bucket: str) -> Policy | None:
        try:
            return layout.policy_of(await self._bucket(bucket))
        except NotFound:
            return None

    async def changes(self) -> AsyncGenerator[str, None]:
        events = self._filer.subscribe([], since_ns=self._clock.now_ns(), directories=[s3.BUCKETS])
        async with aclosing(events):
            async for event in events:
                if not event.heartbeat:
                    yield event.path.rpartition("/")[2]

    async def put(self, bucket: str, text: bytes) -> None:
        """One change of the bucket's own entry. Raises Invalid for what is no bucket's name, NotFound when there is no
        such bucket."""
        await self._bucket(checked_bucket(bucket))
        change = Mutation(
            MutationKind.PATCH_EXTENDED,
            s3.BUCKETS,
            bucket,
            set_extended={s3.LIFECYCLE: text} if text else {},
            delete_extended=() if text else (s3.LIFECYCLE, s3.LIFECYCLE_MINIMUM),
        )
        path = s3.bucket_path(bucket)
        await self._filer.transact(Transaction(path, (Clause(ConditionKind.EXISTS),), (change,)))

    async def _bucket(self, bucket: str) -> FilerEntry:
        try:
            return self._note(await self._filer.lookup(s3.BUCKETS, bucket))
        except NotFound:
            hint = f"check the name, or lakebed bucket create {bucket}"
            raise NotFound(f"bucket {bucket} does not exist", hint=hint) from None

    def _note(self, bucket: FilerEntry) -> FilerEntry:
        self._known[bucket.name] = (self._clock.monotonic_s(), s3.versioning_of(bucket))
        return bucket

    async def _versioning(self, bucket: str) -> str:
        at_s, known = self._known.get(bucket, (float("-inf"), ""))
        if self._clock.monotonic_s() - at_s > VERSIONING_FRESH_S:
            return s3.versioning_of(await self._bucket(bucket))
        return known

    def ttl(self, bucket: str) -> BucketTtl:
        return BucketTtl(self._filer, bucket)

    async def own_worker_ns(self) -> int:
        """When SeaweedFS's own lifecycle worker last ran on this cluster, by the cursors it keeps; 0 for never."""
        cursors = [entry async for entry in self._filer.entries(OWN_CURSORS)]
        return max((entry.attributes.mtime_ns for entry in cursors), default=0)

    # Live state.

    async def look(self, bucket: str, key: str, upload_id: str = "") -> Family:
        if upload_id:
            found = await self._maybe(f"{s3.uploads_path(bucket)}/{upload_id}")
            entries = () if found is None else (layout.upload_of(bucket, found),)
            return Family(bucket, key, entries, upload_id, token=f"{s3.UPLOADS}/{upload_id}")
        if key.endswith("/"):
            return await self._folder(bucket, key)
        try:
            versioning = await self._versioning(bucket)
        except NotFound:
            return Family(bucket, key, (), token=key)
        if versioning:
            return Family(bucket, key, await self._versions(bucket, key), token=key)
        bare = await self._file(bucket, key)
        if bare is None:
            return Family(bucket, key, (), token=key)
        self._deleter.remember(bucket, key, bare)
        return Family(bucket, key, (layout.object_of(bucket, key, bare, self._clock.now_ns()),), token=key)

    async def _folder(self, bucket: str, key: str) -> Family:
        """An object whose key ends in a slash is a folder of the filer. While it holds others it is kept."""
        path = s3.object_path(bucket, key.rstrip("/"))
        found = await self._maybe(path)
        if found is None or not s3.is_folder_object(found) or await self._filer.page(path, limit=1):
            return Family(bucket, key, (), token=key.rstrip("/"))
        return Family(bucket, key, (layout.object_of(bucket, key, found, self._clock.now_ns()),), token=key.rstrip("/"))

    async def scan(
        self, bucket: str, after: str = "", *, prefix: str = "", until: str = "", newest_ns: int | None = None
    ) -> AsyncGenerator[Family, None]:
        if s3.versioning_of(await self._bucket(bucket)):
            newest_ns = None  # a young file may have old versions beside it
        last = until.split("/")
        async with aclosing(self._under(bucket, prefix, after, newest_ns)) as families:
            async for family in families:
                if until and family.token.split("/")[: len(last)] > last:
                    return
                if family.entries or family.unreadable or family.skipped:
                    yield family

    async def _under(self, bucket: str, prefix: str, after: str, newest_ns: int | None) -> AsyncGenerator[Family, None]:
        """What begins with the prefix: its folder is listed, by the beginning of names, and nothing beside it."""
        folder, name = prefix.rpartition("/")[0], prefix.rpartition("/")[2]
        folder = f"{folder}/" if folder else ""
        behind = after.removeprefix(folder).split("/") if after.startswith(folder) and after != folder else []
        walk = self._scan(bucket, folder, behind if after else [], name, newest_ns=newest_ns)
        async with aclosing(walk) as families:
            async for family in families:
                yield family
        if folder and not name:
            yield await self.look(bucket, folder)  # the folder may be an object itself

    async def _scan(
        self, bucket: str, folder: str, after: list[str], name: str = "", *, newest_ns: int | None
    ) -> AsyncGenerator[Family, None]:
        """Depth first in the order of names; `after` is where to go on, part by part."""
        directory = f"{s3.bucket_path(bucket)}/{folder}".rstrip("/")
        if len(after) > 1:
            async for family in self._scan(bucket, f"{folder}{after[0]}/", after[1:], newest_ns=newest_ns):
                yield family
            parent = await self._maybe(f"{directory}/{after[0]}")
            if parent is not None and s3.is_versions_folder(parent):
                yield await self._listed_versions(bucket, folder + after[0], parent)
            elif parent is not None and s3.is_folder_object(parent):
                yield await self.look(bucket, f"{folder}{after[0]}/")
        pages = self._filer.pages(directory, prefix=name, after=after[0] if after else "", newest_ns=newest_ns)
        async with aclosing(pages):
            async for page in pages:
                for begin in range(0, len(page), AHEAD):
                    some = page[begin : begin + AHEAD]
                    versions = await self._read_versions(bucket, folder, some)
                    for entry in some:
                        async for family in self._found(bucket, folder, entry, versions, newest_ns):
                            yield family

    async def _found(
        self,
        bucket: str,
        folder: str,
        entry: FilerEntry | SkippedEntries,
        versions: Mapping[str, _VersionsFolder],
        newest_ns: int | None,
    ) -> AsyncGenerator[Family, None]:
        path = folder + entry.name
        if isinstance(entry, SkippedEntries):
            yield Family(bucket, path, (), token=path, skipped=entry.count)
        elif folder == f"{s3.UPLOADS}/":
            if entry.is_directory and entry.text(s3.UPLOAD_KEY):
                upload = layout.upload_of(bucket, entry)
                yield Family(bucket, upload.key, (upload,), entry.name, token=path)
        elif not entry.is_directory:
            if not (folder.endswith(f"{s3.VERSIONS}/") and s3.is_version_file(entry)):
                yield await self._family(bucket, path, entry)
        else:
            async for family in self._folder_content(bucket, path, entry, versions.get(entry.name), newest_ns):
                yield family

    async def _folder_content(
        self, bucket: str, path: str, entry: FilerEntry, versions: _VersionsFolder | None, newest_ns: int | None
    ) -> AsyncGenerator[Family, None]:
        """What a folder holds; one that is named like a folder of versions may also hold keys. What the folder itself
        is comes behind what it holds, which goes first.
        """
        if versions is None or any(not s3.is_version_file(file) for file in versions.files):
            async for family in self._scan(bucket, f"{path}/", [], newest_ns=newest_ns):
                yield family
        if versions is not None:
            yield await self._listed_versions(bucket, path, entry, versions)
        elif s3.is_folder_object(entry):
            yield await self.look(bucket, f"{path}/")

    async def _read_versions(
        self, bucket: str, folder: str, entries: Iterable[FilerEntry | SkippedEntries]
    ) -> dict[str, _VersionsFolder]:
        """The folders of versions among the entries, by name, with what they hold: read side by side."""
        names = [one.name for one in entries if isinstance(one, FilerEntry) and s3.is_versions_folder(one)]

        async def read(name: str) -> _VersionsFolder:
            path = f"{s3.bucket_path(bucket)}/{folder}{name}"
            key = f"{folder}{name}".removesuffix(s3.VERSIONS)
            files, bare = await asyncio.gather(self._files(path), self._file(bucket, key))
            return _VersionsFolder(files, bare is not None)

        return dict(zip(names, await asyncio.gather(*map(read, names)), strict=True)) if names else {}

    async def split(self, bucket: str, prefix: str = "") -> Sequence[str]:
        """Borders among the names of one folder: the first below the prefix that has more than one name."""
        folder, name = prefix.rpartition("/")[0], prefix.rpartition("/")[2]
        folder = f"{folder}/" if folder else ""
        for _ in range(SPLIT_DEPTH):
            directory = f"{s3.bucket_path(bucket)}/{folder}".rstrip("/")
            found = [
                one for one in await self._filer.page(directory, prefix=name, limit=PAGE) if one.name != s3.UPLOADS
            ]
            if len(found) == 1 and found[0].is_directory and not s3.is_versions_folder(found[0]):
                folder, name = f"{folder}{found[0].name}/", ""
                continue
            if len(found) < PAGE - 1:
                return _spread([folder + one.name for one in found if one.is_directory])
            return _spread([folder + border for border in await self._borders(directory, name)])
        return ()

    async def _borders(self, directory: str, name: str) -> list[str]:
        """Beginnings of names in a large folder, found by leaping from one to the next: one request for each."""
        for _ in range(SPLIT_DEPTH):
            found: list[str] = []
            after = name
            while len(found) < BORDERS_MAX:
                page = await self._filer.page(directory, prefix=name, after=after, limit=1)
                if not page:
                    break
                found.append(page[0].name[: len(name) + 1])
                after = found[-1] + LAST
            if len(found) != 1:
                return found
            name = found[0]
        return []

    async def _family(self, bucket: str, path: str, entry: FilerEntry) -> Family:
        """What is listed at a path. An entry that cannot be read is returned too, with the reason."""
        try:
            return await self._listed(bucket, path, entry)
        except Corrupt as error:
            return Family(bucket, path, (), token=path, unreadable=error.message)

    async def _listed(self, bucket: str, key: str, entry: FilerEntry) -> Family:
        if await self._versioning(bucket):
            return await self.look(bucket, key)
        self._deleter.remember(bucket, key, entry)
        return Family(bucket, key, (layout.object_of(bucket, key, entry, self._clock.now_ns()),), token=key)

    async def _listed_versions(
        self, bucket: str, path: str, pointer: FilerEntry, read: _VersionsFolder | None = None
    ) -> Family:
        """The versions in a folder of them; none where a file at the key has brought them, or versions were never
        kept: a key may be named like such a folder.
        """
        folder, _, name = path.rpartition("/")
        key = path.removesuffix(s3.VERSIONS)
        if read is None:
            read = (await self._read_versions(bucket, f"{folder}/" if folder else "", [pointer]))[name]
        if not await self._versioning(bucket) or read.has_bare:
            return Family(bucket, key, (), token=path)
        try:
            found = layout.versions_of(bucket, key, None, pointer, read.files, self._clock.now_ns())
        except Corrupt as error:
            return Family(bucket, key, (), token=path, unreadable=error.message)
        return Family(bucket, key, found, token=path)

    async def _versions(self, bucket: str, key: str) -> tuple[ObjectEntry, ...]:
        folder = s3.versions_path(bucket, key)
        bare, pointer = await asyncio.gather(self._file(bucket, key), self._maybe(folder))
        files = await self._files(folder) if pointer is not None else []
        return layout.versions_of(bucket, key, bare, pointer, files, self._clock.now_ns())

    async def _files(self, folder: str) -> list[FilerEntry]:
        return [file async for file in self._filer.entries(folder)]

    async def _file(self, bucket: str, key: str) -> FilerEntry | None:
        found = await self._maybe(s3.object_path(bucket, key))
        return None if found is None or found.is_directory else found

    async def _maybe(self, path: str) -> FilerEntry | None:
        try:
            return await self._filer.lookup(*s3.split(path))
        except NotFound:
            return None

    # Deletes.

    async def delete(self, entry: ObjectEntry, verb: Verb) -> Removal:
        return await self._deleter.delete(entry, verb, await self._versioning(entry.bucket))

    # Events.

    async def read(self, after: Position, until_ns: int) -> AsyncGenerator[ChangeEvent, None]:
        last = after
        for stream in range(1, STREAMS_MAX + 1):
            try:
                async with aclosing(self._read(last, until_ns)) as events:
                    async for event in events:
                        last = event.position
                        yield event
                return
            except Unavailable:
                if stream == STREAMS_MAX:
                    raise

    async def _read(self, after: Position, until_ns: int) -> AsyncGenerator[ChangeEvent, None]:
        """Changes of one instant are numbered as they come, so an instant is always read from its beginning. To have
        them in order, the log is read further than asked for.
        """
        at_ns, offset = -1, 0
        since_ns, further_ns = max(0, after.ts_ns - 1), min(until_ns + layout.ORDER_NS, self._clock.now_ns())
        changes = self._filer.subscribe([f"{s3.BUCKETS}/"], since_ns=since_ns, until_ns=max(until_ns, further_ns))
        async with aclosing(changes), aclosing(layout.in_order(changes)) as events:
            async for ts_ns, event in events:
                if ts_ns > until_ns:
                    return
                offset = offset + 1 if ts_ns == at_ns else 0
                at_ns = ts_ns
                position = Position(at_ns, offset)
                if position > after:
                    yield msgspec.structs.replace(event, position=position)

    async def reach(self) -> LogReach:
        folder, servers = await asyncio.gather(self._maybe(f"{LOG_PARENT}/{LOG}"), self._filer.started())
        if folder is None:  # nothing was ever written to disk, or all of it is gone
            return LogReach(servers=servers)
        return LogReach(folder.attributes.crtime_ns, await self._first_file_ns(), servers)

    async def files(self, day: str) -> dict[str, int]:
        found = [file.name async for file in self._filer.entries(f"{LOG_PARENT}/{LOG}/{day}")]
        times = {name: layout.log_file_ns(day, name) for name in found}
        return {name: at_ns // SECOND_NS for name, at_ns in times.items() if at_ns is not None}

    async def _first_file_ns(self) -> int | None:
        """Where the first file of the log begins. Files that are none of the log's are passed by."""
        async for day in self._filer.entries(f"{LOG_PARENT}/{LOG}"):
            async for file in self._filer.entries(f"{LOG_PARENT}/{LOG}/{day.name}", limit=FIRST_FILES):
                if (at_ns := layout.log_file_ns(day.name, file.name)) is not None:
                    return at_ns
        return None


def _spread(names: Sequence[str]) -> list[str]:
    """At most PARTS_MAX - 1 of the names, evenly: the borders between parts."""
    every = max(1, -(-len(names) // PARTS_MAX))
    return list(names[every - 1 : -1 : every])


def _is_bucket(entry: FilerEntry) -> bool:
    return entry.is_directory and not entry.name.startswith(".")
