"""SeaweedFS behind lifecycle's seams: policies, live state and events from its filer, deletes guarded there too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec

from lakebed.core.errors import Corrupt, NotFound, Unavailable
from lakebed.core.runtime import Runtime
from lakebed.filer import s3
from lakebed.filer.client import FilerClient
from lakebed.filer.model import Clause, ConditionKind, FilerEntry, Mutation, MutationKind, Transaction
from lakebed.lifecycle.model import ObjectEntry, Position, Verb
from lakebed.lifecycle.seams import ChangeEvent, Family, LostLog, Policy, Removal
from lakebed.lifecycle.seaweed import entries as layout
from lakebed.lifecycle.seaweed.deletes import SeaweedDeleter

LOG_PARENT, LOG = "/topics/.system", "log"
VERSIONING_FRESH_S = 1.0  # how old a bucket's state of versioning may be; S3 itself promises far less
STREAMS_MAX = 3  # subscriptions of one pass, with as many filers, before it is given up


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

    async def put(self, bucket: str, text: bytes) -> None:
        """One change of the bucket's own entry. Raises NotFound when there is no such bucket."""
        await self._bucket(bucket)
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
        return self._note(await self._filer.lookup(s3.BUCKETS, bucket))

    def _note(self, bucket: FilerEntry) -> FilerEntry:
        self._known[bucket.name] = (self._clock.monotonic_s(), s3.versioning_of(bucket))
        return bucket

    async def _versioning(self, bucket: str) -> str:
        at_s, known = self._known.get(bucket, (float("-inf"), ""))
        if self._clock.monotonic_s() - at_s > VERSIONING_FRESH_S:
            return s3.versioning_of(await self._bucket(bucket))
        return known

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

    async def scan(self, bucket: str, after: str = "") -> AsyncGenerator[Family, None]:
        await self._bucket(bucket)
        async with aclosing(self._scan(bucket, "", after.split("/") if after else [])) as families:
            async for family in families:
                if family.entries or family.unreadable:
                    yield family

    async def _scan(self, bucket: str, folder: str, after: list[str]) -> AsyncGenerator[Family, None]:
        """Depth first in the order of names; `after` is where to go on, part by part."""
        directory = f"{s3.bucket_path(bucket)}/{folder}".rstrip("/")
        if len(after) > 1:
            async for family in self._scan(bucket, f"{folder}{after[0]}/", after[1:]):
                yield family
            parent = await self._maybe(f"{directory}/{after[0]}")
            if parent is not None and s3.is_folder_object(parent):
                yield await self.look(bucket, f"{folder}{after[0]}/")
        async for entry in self._filer.entries(directory, after=after[0] if after else ""):
            path = folder + entry.name
            if folder == f"{s3.UPLOADS}/":
                if entry.is_directory and entry.text(s3.UPLOAD_KEY):
                    upload = layout.upload_of(bucket, entry)
                    yield Family(bucket, upload.key, (upload,), entry.name, token=path)
            elif not entry.is_directory or s3.is_versions_folder(entry):
                yield await self._family(bucket, path, entry)
            else:
                async for family in self._scan(bucket, f"{path}/", []):
                    yield family
                if s3.is_folder_object(entry):  # behind what it holds, which goes first
                    yield await self.look(bucket, f"{path}/")

    async def _family(self, bucket: str, path: str, entry: FilerEntry) -> Family:
        """What is listed at a path. An entry that cannot be read is returned too, with the reason."""
        try:
            if s3.is_versions_folder(entry):
                return await self._listed_versions(bucket, path)
            return await self._listed(bucket, path, entry)
        except Corrupt as error:
            key = path.removesuffix(s3.VERSIONS) if s3.is_versions_folder(entry) else path
            return Family(bucket, key, (), token=path, unreadable=error.message)

    async def _listed(self, bucket: str, key: str, entry: FilerEntry) -> Family:
        if await self._versioning(bucket):
            return await self.look(bucket, key)
        self._deleter.remember(bucket, key, entry)
        return Family(bucket, key, (layout.object_of(bucket, key, entry, self._clock.now_ns()),), token=key)

    async def _listed_versions(self, bucket: str, path: str) -> Family:
        key = path.removesuffix(s3.VERSIONS)
        if await self._file(bucket, key) is not None:  # returned already, with the file at the key
            return Family(bucket, key, (), token=path)
        return Family(bucket, key, await self._versions(bucket, key), token=path)

    async def _versions(self, bucket: str, key: str) -> tuple[ObjectEntry, ...]:
        folder = s3.versions_path(bucket, key)
        bare, pointer = await asyncio.gather(self._file(bucket, key), self._maybe(folder))
        files = [file async for file in self._filer.entries(folder)] if pointer is not None else []
        return layout.versions_of(bucket, key, bare, pointer, files, self._clock.now_ns())

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
        await self._check_log(after)
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
        """Changes of one instant are numbered as they come, so an instant is always read from its beginning."""
        at_ns, offset = -1, 0
        since_ns = max(0, after.ts_ns - 1)
        changes = self._filer.subscribe([f"{s3.BUCKETS}/"], since_ns=since_ns, until_ns=until_ns)
        async with aclosing(changes):
            async for change in changes:
                for event in layout.events_of(change):
                    offset = offset + 1 if change.ts_ns == at_ns else 0
                    at_ns = change.ts_ns
                    position = Position(at_ns, offset)
                    if position > after:
                        yield msgspec.structs.replace(event, position=position)

    async def begins_ns(self) -> int:
        folder = await self._maybe(f"{LOG_PARENT}/{LOG}")
        if folder is None:  # nothing was ever written to disk: all of it is in memory
            return 0
        return s3.log_begins_ns(folder.attributes.crtime_ns, await self._first_file_ns())

    async def _check_log(self, after: Position) -> None:
        """Raises LostLog when the files of the log that the cursor still needs are gone."""
        begins_ns = await self.begins_ns()
        if after.ts_ns < begins_ns:
            raise LostLog(f"the filer's log begins at {begins_ns}, the cursor is at {after.ts_ns}")

    async def _first_file_ns(self) -> int | None:
        async for day in self._filer.entries(f"{LOG_PARENT}/{LOG}"):
            for file in await self._filer.page(f"{LOG_PARENT}/{LOG}/{day.name}", limit=1):
                return layout.log_file_ns(day.name, file.name)
        return None


def _is_bucket(entry: FilerEntry) -> bool:
    return entry.is_directory and not entry.name.startswith(".")
