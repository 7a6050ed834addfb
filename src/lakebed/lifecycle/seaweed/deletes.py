"""Deletes on SeaweedFS, each one conditional transaction of its filer: done while what was read still holds, or not.

Where bytes are removed, the condition is the whole entry that holds them: content, tags, lock. Where only a delete
marker is put, it is the pointer to the current version. A condition on one entry cannot state that a noncurrent version
was not made current again in between; the pointer is read just before.

Bytes on TTL volumes, which SeaweedFS drops as a whole, are left to them: only the entry is removed, in the same
transaction. That the entry has a TTL is part of the condition. That its path is still routed to TTL volumes is read
beforehand, since a condition covers one entry. Routes that cannot be read count as none: the bytes are deleted.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict

import msgspec

from lakebed.core.clock import Clock
from lakebed.core.errors import Corrupt, Denied, NotFound, Stale
from lakebed.core.logs import logger
from lakebed.core.runtime import Runtime
from lakebed.filer import s3
from lakebed.filer.client import PAGE, FilerClient
from lakebed.filer.model import Attributes, Clause, ConditionKind, FilerEntry, Mutation, MutationKind, Transaction
from lakebed.lifecycle.model import ObjectEntry, Verb
from lakebed.lifecycle.seams import Removal
from lakebed.lifecycle.seaweed.entries import identity_of

log = logger("lifecycle")

CONF_FOLDER, CONF_NAME = "/etc/seaweedfs", "filer.conf"
ROUTES_FRESH_S = 5.0  # longest age of the cached routes; bytes already on a TTL volume stay on it
_TIME = re.compile(r"0*[1-9][0-9]{0,8}[mhdwMy]?")  # a number alone is minutes
ATTEMPTS = 3  # a condition may fail for what does not matter to us: then it is read again and retried
SEEN_MAX = 4096  # entries remembered between being judged and being deleted
_POINTER = (
    s3.LATEST_ID,
    s3.LATEST_FILE,
    s3.LATEST_MTIME,
    s3.LATEST_SIZE,
    s3.LATEST_ETAG,
    s3.LATEST_OWNER,
    s3.LATEST_MARKER,
    s3.NULL_IS_LATEST,
)


class _Location(msgspec.Struct, frozen=True):
    """One route. The filer writes the one spelling and reads both."""

    location_prefix: str = ""
    locationPrefix: str = ""
    ttl: str = ""

    @property
    def prefix(self) -> str:
        return self.locationPrefix or self.location_prefix


class _Conf(msgspec.Struct, frozen=True):
    locations: tuple[_Location, ...] = ()


def read_routes(text: bytes) -> tuple[tuple[str, str], ...]:
    """Prefixes and the time each gives, shortest first: of those that match, the last with a TTL wins.

    Raises Corrupt.
    """
    try:
        found = msgspec.json.decode(text, type=_Conf) if text.strip() else _Conf()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Corrupt(f"{CONF_FOLDER}/{CONF_NAME} cannot be understood: {error}") from error
    return tuple(sorted(((one.prefix, one.ttl) for one in found.locations if one.ttl), key=lambda one: len(one[0])))


def is_routed(routes: tuple[tuple[str, str], ...], path: str) -> bool:
    """Whether what is written at the path goes to a volume that lives for a time only."""
    times = [time for prefix, time in routes if path.startswith(prefix)]
    return bool(times) and _TIME.fullmatch(times[-1]) is not None


class TtlRoutes:
    def __init__(self, filer: FilerClient, clock: Clock) -> None:
        self._filer, self._clock = filer, clock
        self._read_s = float("-inf")
        self._routes: tuple[tuple[str, str], ...] = ()

    async def removal(self, path: str, live: FilerEntry) -> Removal:
        """How the entry is to be removed. Only one with a time of its own costs a look at the routes.

        Raises Unavailable when no filer answers.
        """
        if live.attributes.ttl_s <= 0 or not live.chunks or s3.BACK_STAMPED in live.extended:
            return Removal.WHOLE
        return Removal.METADATA_ONLY if is_routed(await self._known(), path) else Removal.WHOLE

    async def _known(self) -> tuple[tuple[str, str], ...]:
        now_s = self._clock.monotonic_s()
        if now_s - self._read_s >= ROUTES_FRESH_S:
            self._routes, self._read_s = await self._read(), now_s
        return self._routes

    async def _read(self) -> tuple[tuple[str, str], ...]:
        try:
            found = await self._filer.lookup(CONF_FOLDER, CONF_NAME)
            if found.chunks:
                raise Corrupt(f"{CONF_FOLDER}/{CONF_NAME} is not stored inline in its entry")
            return read_routes(found.content)
        except NotFound:
            return ()
        except Corrupt as error:
            log.warning("TTL routes not readable", error=error.message)
            return ()


class SeaweedDeleter:
    def __init__(self, filer: FilerClient, runtime: Runtime) -> None:
        self._filer, self._clock, self._ids = filer, runtime.clock, runtime.ids
        self._routes = TtlRoutes(filer, runtime.clock)
        self._seen: OrderedDict[str, FilerEntry] = OrderedDict()

    def remember(self, bucket: str, key: str, entry: FilerEntry) -> None:
        """An object as it was judged: its delete need not read it again, the condition checks that it is the same."""
        self._seen[s3.object_path(bucket, key)] = entry
        while len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)

    async def delete(self, entry: ObjectEntry, verb: Verb, versioning: str) -> Removal:
        attempt = 1
        while True:
            try:
                return await self._dispatch(entry, verb, versioning)
            except Stale as error:
                # A difference found here is final; a refusal of the filer is read again and retried.
                if error.current is not None or attempt == ATTEMPTS:
                    raise
                attempt += 1

    async def _dispatch(self, entry: ObjectEntry, verb: Verb, versioning: str) -> Removal:
        if verb is Verb.CURRENT and not entry.key.endswith("/"):
            return await (self._mark(entry, versioning) if versioning else self._remove(entry))
        if verb is Verb.VERSION and not entry.key.endswith("/"):
            return await self._remove_version(entry)
        if verb is Verb.ABORT_MPU:
            return await self._abort(entry, versioning)
        if entry.key.endswith("/"):
            await self._remove_folder(entry)
        else:
            await self._remove_marker(entry)
        return Removal.WHOLE

    async def _abort(self, entry: ObjectEntry, versioning: str) -> Removal:
        """Removes an upload. A completed object uses the chunks of its parts, so an upload that has one loses its
        metadata only. The condition is the object that completing would write, under its lock: an upload that is
        completed in between is read again.
        """
        path = f"{s3.uploads_path(entry.bucket)}/{entry.upload_id}"
        key, folder = s3.object_path(entry.bucket, entry.key), s3.versions_path(entry.bucket, entry.key)
        upload, bare, pointer = await asyncio.gather(
            self._filer.lookup(*s3.split(path)), self._maybe(key), self._maybe(folder)
        )
        self._same(entry, upload)
        versions = await self._files(folder) if pointer is not None else []
        found = [bare, *versions] if bare is not None else versions
        completed = any(one.text(s3.UPLOAD_ID) == entry.upload_id for one in found)
        removal = Removal.COMPLETED if completed else Removal.WHOLE
        at, written = (folder, pointer) if versioning == "Enabled" else (key, bare)
        clause = _equal(written) if written is not None else Clause(ConditionKind.NOT_EXISTS)
        await self._transact(key, clause, _delete(path, removal, recursive=True), at=at)
        return removal

    async def _files(self, folder: str) -> list[FilerEntry]:
        found = page = await self._filer.page(folder, limit=PAGE)
        while len(page) == PAGE:
            page = await self._filer.page(folder, after=page[-1].name, limit=PAGE)
            found = found + page
        return found

    async def _remove_folder(self, entry: ObjectEntry) -> None:
        """A folder that is an object goes only while it is empty: the filer removes no more than that."""
        path = s3.object_path(entry.bucket, entry.key.rstrip("/"))
        live, held = await asyncio.gather(self._filer.lookup(*s3.split(path)), self._filer.page(path, limit=1))
        self._same(entry, live)
        self._unlocked(entry, live)
        if held:
            raise NotFound(f"{entry.key} holds other objects: it is no object of its own now")
        await self._transact(path, _equal(live), _delete(path))

    async def _remove(self, entry: ObjectEntry) -> Removal:
        path = s3.object_path(entry.bucket, entry.key)
        live = self._seen.pop(path, None)
        if live is None or identity_of(live) != entry.identity:
            live = self._same(entry, await self._filer.lookup(*s3.split(path)))
        self._unlocked(entry, live)
        removal = await self._routes.removal(path, live)
        await self._transact(path, _equal(live), _delete(path, removal))
        return removal

    async def _remove_version(self, entry: ObjectEntry) -> Removal:
        path, folder = _file_path(entry), s3.versions_path(entry.bucket, entry.key)
        live, pointer = await asyncio.gather(self._filer.lookup(*s3.split(path)), self._maybe(folder))
        self._same(entry, live)
        self._unlocked(entry, live)
        if s3.latest_file(pointer) == (live.name if path.startswith(f"{folder}/") else ""):
            raise Stale(f"{entry.key} version {entry.version_id} became the current one", current=live)
        removal = await self._routes.removal(path, live)
        await self._transact(s3.object_path(entry.bucket, entry.key), _equal(live), _delete(path, removal), at=path)
        return removal

    async def _remove_marker(self, entry: ObjectEntry) -> None:
        """The last thing left of a key: with the marker goes the folder of its versions."""
        key, folder = s3.object_path(entry.bucket, entry.key), s3.versions_path(entry.bucket, entry.key)
        pointer, bare, files = await asyncio.gather(
            self._filer.lookup(*s3.split(folder)), self._maybe(key), self._filer.page(folder, limit=2)
        )
        if bare is not None and not bare.is_directory:
            raise Stale(f"{entry.key} has an object beside its marker", current=bare)
        if len(files) != 1:
            raise (
                Stale(f"{entry.key} has other versions beside its marker", current=pointer)
                if files
                else NotFound(f"{entry.key} has no versions")
            )
        live = self._same(entry, files[0])
        self._unlocked(entry, live)
        clear = Mutation(MutationKind.PATCH_EXTENDED, *s3.split(folder), delete_extended=_POINTER)
        gone = _delete(f"{folder}/{live.name}")
        await self._transact(key, _equal(pointer), clear, gone, _delete(folder), at=folder)

    async def _mark(self, entry: ObjectEntry, versioning: str) -> Removal:
        """A delete marker becomes the current version; where versioning is suspended, in the null version's place."""
        path, folder = s3.object_path(entry.bucket, entry.key), s3.versions_path(entry.bucket, entry.key)
        bare, pointer = await asyncio.gather(self._maybe(path), self._maybe(folder))
        bare = None if bare is not None and bare.is_directory else bare
        pointed = s3.latest_file(pointer)
        live = await self._filer.lookup(folder, pointed) if pointed else bare
        if live is None:
            raise NotFound(f"{entry.key} has no current version")
        self._same(entry, live)
        now_ns, suspended = self._clock.now_ns(), versioning == "Suspended"
        if suspended and bare is not None:  # its bytes go; a marker above a locked version removes nothing
            self._unlocked(entry, bare)
        version_id = s3.NULL if suspended else s3.new_version_id(now_ns, self._ids.token(), like=s3.version_id(live))
        marker = _marker(version_id, now_ns)
        changes = [
            Mutation(MutationKind.PUT, folder, marker.name, marker),
            Mutation(
                MutationKind.PATCH_EXTENDED,
                *s3.split(folder),
                set_extended=_points_at(marker),
                delete_extended=(s3.LATEST_ETAG, s3.LATEST_OWNER, s3.NULL_IS_LATEST),
            ),
        ]
        if pointed:
            since = {s3.NONCURRENT_SINCE: str(now_ns).encode()}
            changes.append(Mutation(MutationKind.PATCH_EXTENDED, folder, pointed, set_extended=since))
        if suspended and bare is not None:
            removal = await self._routes.removal(path, bare)
            await self._transact(path, _equal(bare), _delete(path, removal), *changes)
            return removal
        if pointer is not None:
            await self._transact(path, _equal(pointer), *changes, at=folder)
        else:
            await self._transact(path, Clause(ConditionKind.NOT_EXISTS), *changes, at=folder)
        return Removal.WHOLE

    def _same(self, entry: ObjectEntry, live: FilerEntry) -> FilerEntry:
        if identity_of(live) != entry.identity:
            raise Stale(f"{entry.key} changed after it was evaluated", current=live)
        return live

    def _unlocked(self, entry: ObjectEntry, live: FilerEntry) -> None:
        if s3.is_locked(live, self._clock.now_ns()):
            raise Denied(f"{entry.key} is under object lock")

    async def _maybe(self, path: str) -> FilerEntry | None:
        try:
            return await self._filer.lookup(*s3.split(path))
        except NotFound:
            return None

    async def _transact(self, path: str, clause: Clause, *changes: Mutation, at: str = "") -> None:
        await self._filer.transact(Transaction(path, (clause,), changes, condition_path=at))


def _equal(live: FilerEntry) -> Clause:
    return Clause(ConditionKind.ENTRY_EQUAL, expected=live.raw)


def _delete(path: str, removal: Removal = Removal.WHOLE, *, recursive: bool = False) -> Mutation:
    return Mutation(MutationKind.DELETE, *s3.split(path), delete_data=removal is Removal.WHOLE, recursive=recursive)


def _file_path(entry: ObjectEntry) -> str:
    if entry.version_id in ("", s3.NULL) and not entry.marker:
        return s3.object_path(entry.bucket, entry.key)
    return f"{s3.versions_path(entry.bucket, entry.key)}/{s3.VERSION_FILE}{entry.version_id}"


def _marker(version_id: str, now_ns: int) -> FilerEntry:
    second_ns = now_ns // 1_000_000_000 * 1_000_000_000
    return FilerEntry(
        f"{s3.VERSION_FILE}{version_id}",
        attributes=Attributes(mtime_ns=second_ns, crtime_ns=second_ns, mode=s3.MARKER_MODE),
        extended={s3.VERSION_ID: version_id.encode(), s3.DELETE_MARKER: b"true"},
    )


def _points_at(marker: FilerEntry) -> dict[str, bytes]:
    return {
        s3.LATEST_ID: marker.extended[s3.VERSION_ID],
        s3.LATEST_FILE: marker.name.encode(),
        s3.LATEST_MTIME: str(marker.attributes.mtime_ns // 1_000_000_000).encode(),
        s3.LATEST_SIZE: b"0",
        s3.LATEST_MARKER: b"true",
    }
