"""SeaweedFS behind lifecycle's seams: policies, live state and events from its filer, deletes guarded there too.

An object without versions is deleted in one conditional step (its chunks and its time must be those that were judged).
A version is immutable, so removing it by its id through S3 needs no other condition; S3 itself refuses locked ones.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

from lakebed.clock import Clock
from lakebed.errors import Denied, NotFound, Stale
from lakebed.lifecycle import seaweed_layout as layout
from lakebed.lifecycle import seaweed_wire as wire
from lakebed.lifecycle.model import Entry, Position, Verb
from lakebed.lifecycle.seams import Event, Family, LostLog, Policy
from lakebed.lifecycle.seaweed_client import FilerClient
from lakebed.lifecycle.seaweed_layout import BUCKETS, UPLOADS, VERSIONS
from lakebed.lifecycle.seaweed_wire import FilerEntry
from lakebed.store.versions import VersionRemover

LOGS = "/topics/.system/log"
BIRTH_SLACK_NS = 15 * 60 * 1_000_000_000  # a store's first log file follows its first event by minutes
MUTATION_DELETE, MUTATION_PATCH = 1, 2
EXISTS, UNMODIFIED_SINCE, CHUNKS_EQUAL = 2, 5, 9


class SeaweedLake:
    """Event source, lister, deleter and policies in one: they share what is known of versioning."""

    def __init__(self, filer: FilerClient, remover: VersionRemover, clock: Clock) -> None:
        self._filer, self._remover, self._clock = filer, remover, clock
        self._versioned: dict[str, bool] = {}

    async def close(self) -> None:
        await self._filer.close()

    # Policies.

    async def all(self) -> Sequence[Policy]:
        found = [entry async for entry in self._filer.entries(BUCKETS) if entry.is_directory]
        for entry in found:
            self._versioned[entry.name] = bool(entry.extended.get(layout.VERSIONING))
        policies = [layout.policy_of_bucket(entry) for entry in found if not entry.name.startswith(".")]
        return [policy for policy in policies if policy is not None]

    async def get(self, bucket: str) -> Policy | None:
        try:
            return layout.policy_of_bucket(await self._bucket(bucket))
        except NotFound:
            return None

    async def put(self, bucket: str, text: bytes) -> None:
        await self._bucket(bucket)
        mutation = wire.encode([(1, MUTATION_PATCH), (2, BUCKETS), (3, bucket)])
        mutation += wire.mapping(5, {layout.POLICY: text}) if text else wire.encode([(6, layout.POLICY)])
        await self._filer.transact(f"{BUCKETS}/{bucket}", [wire.encode([(1, EXISTS)])], [mutation])

    async def _bucket(self, bucket: str) -> FilerEntry:
        entry = await self._filer.lookup(BUCKETS, bucket)
        self._versioned[bucket] = bool(entry.extended.get(layout.VERSIONING))
        return entry

    # Live state.

    async def look(self, bucket: str, key: str, upload_id: str = "") -> Family:
        if upload_id:
            found = await self._maybe(f"{BUCKETS}/{bucket}/{UPLOADS}", upload_id)
            entries = () if found is None else (layout.upload_of(bucket, found),)
            return Family(bucket, key, entries, upload_id, token=f"{UPLOADS}/{upload_id}")
        if bucket not in self._versioned:
            await self._bucket(bucket)
        directory, name = layout.path_of(bucket, key)
        bare = await self._maybe(directory, name)
        bare = None if bare is not None and bare.is_directory else bare
        now_ns = self._clock.now_ns()
        if not self._versioned[bucket]:
            entries = () if bare is None else (layout.object_of(bucket, key, bare, now_ns),)
            return Family(bucket, key, entries, token=key)
        pointer = await self._maybe(directory, name + VERSIONS)
        files = [file async for file in self._filer.entries(f"{directory}/{name}{VERSIONS}")] if pointer else []
        return Family(bucket, key, layout.versions_of(bucket, key, bare, pointer, files, now_ns), token=key)

    async def walk(self, bucket: str, after: str = "") -> AsyncGenerator[Family, None]:
        await self._bucket(bucket)
        async for family in self._walk(bucket, "", after.split("/") if after else []):
            if family.entries:
                yield family

    async def _walk(self, bucket: str, folder: str, after: list[str]) -> AsyncGenerator[Family, None]:
        """Depth first in the order of names; `after` is where to go on, part by part."""
        directory = f"{BUCKETS}/{bucket}/{folder}".rstrip("/")
        if len(after) > 1:
            async for family in self._walk(bucket, f"{folder}{after[0]}/", after[1:]):
                yield family
        async for entry in self._filer.entries(directory, after=after[0] if after else ""):
            path = folder + entry.name
            if folder == UPLOADS + "/":
                if entry.is_directory:
                    upload = layout.upload_of(bucket, entry)
                    yield Family(bucket, upload.key, (upload,), entry.name, token=path)
            elif not entry.is_directory:
                yield await self._listed(bucket, path, entry)
            elif entry.name.endswith(VERSIONS):
                family = await self.look(bucket, path.removesuffix(VERSIONS))
                told = any(one.version_id == layout.NULL for one in family.entries)  # with the bare file, above
                yield Family(bucket, family.key, () if told else family.entries, token=path)
            else:
                async for family in self._walk(bucket, path + "/", []):
                    yield family

    async def _listed(self, bucket: str, key: str, entry: FilerEntry) -> Family:
        if self._versioned[bucket]:
            return await self.look(bucket, key)
        return Family(bucket, key, (layout.object_of(bucket, key, entry, self._clock.now_ns()),), token=key)

    async def _maybe(self, directory: str, name: str) -> FilerEntry | None:
        try:
            return await self._filer.lookup(directory, name)
        except NotFound:
            return None

    # Deletes.

    async def delete(self, entry: Entry, verb: Verb) -> None:
        if verb is Verb.ABORT_MPU:
            folder = f"{BUCKETS}/{entry.bucket}/{UPLOADS}"
            await self._filer.lookup(folder, entry.upload_id)
            await self._filer.delete(folder, entry.upload_id, recursive=True)
        elif not entry.version_id:
            await self._delete_bare(entry)
        elif verb is Verb.CURRENT:
            await self._mark(entry)
        else:
            await self._remover.remove(entry.bucket, entry.key, entry.version_id)

    async def _delete_bare(self, entry: Entry) -> None:
        directory, name = layout.path_of(entry.bucket, entry.key)
        if entry.locked:
            raise Denied(f"{entry.key} is under object lock")
        clauses = [wire.encode([(1, EXISTS)]), wire.encode([(1, UNMODIFIED_SINCE), (3, entry.mtime_ns // 10**9)])]
        if entry.chunks:
            clauses.append(wire.encode([(1, CHUNKS_EQUAL), *((9, fid) for fid in entry.chunks)]))
        mutation = wire.encode([(1, MUTATION_DELETE), (2, directory), (3, name), (7, True)])
        try:
            await self._filer.transact(f"{directory}/{name}", clauses, [mutation])
        except Stale:
            if await self._maybe(directory, name) is None:
                raise NotFound(f"{entry.key} is gone") from None
            raise

    async def _mark(self, entry: Entry) -> None:
        """A delete marker over the current version, looked at once more: S3 has no "if still current"."""
        live = await self.look(entry.bucket, entry.key)
        if not live.entries or live.entries[0].identity != entry.identity:
            raise Stale(f"{entry.key} has a newer version")
        await self._remover.mark(entry.bucket, entry.key)

    # Events.

    async def read(self, after: Position, until_ns: int) -> AsyncGenerator[Event, None]:
        await self._check_log(after)
        whole = after.offset > 0
        last_ns, offset = -1, 0
        async for found in self._filer.subscribe(BUCKETS + "/", after.ts_ns if whole else after.ts_ns - 1, until_ns):
            offset = offset + 1 if found.ts_ns == last_ns else 0
            last_ns = found.ts_ns
            event = layout.event_of(found, offset)
            if event is not None and event.position > after:
                yield event

    async def _check_log(self, after: Position) -> None:
        """Raises LostLog when log files that a cursor still needs are gone.

        The log of a whole store begins with the store itself; one that begins later was pruned up to there.
        """
        birth_ns = (await self._filer.lookup("/", BUCKETS.strip("/"))).crtime_s * 1_000_000_000
        begins_ns = await self._log_begins()
        pruned = begins_ns is not None and begins_ns > birth_ns + BIRTH_SLACK_NS
        if pruned and begins_ns is not None and max(after.ts_ns, birth_ns) < begins_ns - BIRTH_SLACK_NS:
            raise LostLog(f"the filer's log begins at {begins_ns}, the cursor stands at {after.ts_ns}")

    async def _log_begins(self) -> int | None:
        async for day in self._filer.entries(LOGS):
            async for file in self._filer.entries(f"{LOGS}/{day.name}"):
                return file.crtime_s * 1_000_000_000
        return None
