"""Reads a table's state from its log: the newest checkpoint, then the entries after it.

One listing shows which entries there are, so an entry that is missing before a later one is seen: the log is Corrupt
then, never read as an older version. Entries that another writer has cleaned up behind a checkpoint are no gap.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterable
from typing import Any

import msgspec

from lakebed.core.errors import Corrupt, LakebedError, NotFound
from lakebed.core.logs import logger
from lakebed.delta import checkpoint
from lakebed.delta.checkpoint import Checkpoint
from lakebed.delta.log import LOG_FOLDER, apply, apply_all, change_of, decode, file_of, log_key, note_of, remembered
from lakebed.delta.model import DataFile, Snapshot, VersionChange, identity_of, key_of
from lakebed.store.model import ObjectInfo
from lakebed.store.protocol import Store

log = logger("tables")

TRIES = 3  # while another writer cleans up, what was listed may be gone when it is read
CHUNK = 256  # entries decoded at once: a log without checkpoints may be long
NOTE_BACK = 64  # entries of other writers that are looked through for it
_ENTRY = re.compile(r"(\d{20})\.json")


class LogListing(msgspec.Struct, frozen=True):
    """What is in a log's folder: entries by version, and complete checkpoints in order."""

    entries: dict[int, ObjectInfo] = {}
    checkpoints: tuple[Checkpoint, ...] = ()

    @property
    def newest(self) -> int:
        """The last version that is there, -1 without one."""
        ends = [max(self.entries, default=-1), *(each.version for each in self.checkpoints[-1:])]
        return max(ends)

    def base(self, version: int) -> Checkpoint | None:
        """The newest checkpoint up to this version."""
        return next((each for each in reversed(self.checkpoints) if each.version <= version), None)

    def missing(self, after: int, until: int) -> int | None:
        """The first version without an entry, after one and up to another."""
        return next((version for version in range(after + 1, until + 1) if version not in self.entries), None)


async def listing(store: Store, root: str, *, after: int = -1) -> LogListing:
    """The log's folder, from this version's checkpoint on."""
    names: dict[str, ObjectInfo] = {}
    folder = f"{root}/{LOG_FOLDER}/"
    async for info in store.list(folder, after=f"{folder}{after:020d}" if after >= 0 else ""):
        names[info.key.removeprefix(folder)] = info
    entries = {int(match[1]): info for name, info in names.items() if (match := _ENTRY.fullmatch(name))}
    return LogListing(entries, tuple(checkpoint.found(names)))


async def snapshot(store: Store, root: str, *, version: int | None = None, known: Snapshot | None = None) -> Snapshot:
    """The table at `version`, or as it is now. `known` is any earlier snapshot to go on from.

    Raises NotFound for a version that does not exist (yet, or any more), Corrupt for a log with a gap; a table without
    a log is at version -1.
    """
    problem: LakebedError | None = None
    for _ in range(TRIES):
        try:
            return await _snapshot(store, root, version, known)
        except (_Moved, Corrupt) as error:  # cleaned up meanwhile, or behind a checkpoint that `known` is older than
            problem = error.why if isinstance(error, _Moved) else error
            known = None
    assert problem is not None
    raise problem


async def _snapshot(store: Store, root: str, version: int | None, known: Snapshot | None) -> Snapshot:
    if known is not None and known.version >= 0 and (version is None or known.version <= version):
        if known.version == version:
            return known
        there = await listing(store, root, after=known.version)
        until = there.newest if version is None else version
        # Its own version is always there, unless the table was deleted: then another one may have taken its place.
        if there.newest >= known.version and there.missing(known.version, until) is None:
            return await _replayed(store, root, known, there, max(until, known.version))
    hint = await checkpoint.last(store, root)
    there = await listing(store, root, after=hint if version is None or hint <= version else -1)
    if hint >= 0 and there.base(hint) is None:
        there = await listing(store, root)  # the note names a checkpoint that is gone, or a later one
    until = there.newest if version is None else version
    if until > there.newest:
        raise NotFound(f"{root} has no version {until}; its last is {there.newest}")
    problem: LakebedError | None = None
    while (chosen := there.base(until)) is not None:
        try:
            state = await at_checkpoint(store, root, chosen)
            state = msgspec.structs.replace(state, note=await _note_at(store, root, chosen.version))
            return await _replayed(store, root, state, there, until)
        except (Corrupt, NotFound) as error:
            problem = error
            log.warning("a checkpoint cannot be used; an older one is tried", table=root, error=error.message)
        whole = await listing(store, root)
        there = LogListing(whole.entries, tuple(one for one in whole.checkpoints if one.version < chosen.version))
    if problem is not None and there.missing(-1, until) is not None:
        raise problem
    return await _replayed(store, root, Snapshot(), there, until)


async def at_checkpoint(store: Store, root: str, chosen: Checkpoint) -> Snapshot:
    """The table as this checkpoint has it. Raises Corrupt, or NotFound when it is gone."""
    inside = await checkpoint.content(store, root, chosen)
    state = apply(Snapshot(), chosen.version, inside.actions, f"{root}/{LOG_FOLDER}/{chosen.names[0]}")
    if not state.schema_json:
        raise Corrupt(f"{chosen.names[0]!r} of {root} has no schema", key=root)
    return msgspec.structs.replace(
        state,
        files=(*state.files, *inside.files),
        applied=remembered(state.applied | inside.applied, chosen.version),
        checkpoint=chosen.version,
    )


async def _note_at(store: Store, root: str, version: int) -> str:
    """The table's note at this version, which is in no checkpoint: its entry has it, or one of those before."""
    gate = asyncio.Semaphore(checkpoint.PARALLEL)

    async def said(number: int) -> str | None:
        key = log_key(root, number)
        try:
            async with gate:
                actions = decode((await store.get(key)).data, key)
        except NotFound:
            return None
        notes = [note_of(action["commitInfo"]) for action in actions if action.get("commitInfo")]
        return next((note for note in notes if note is not None), None)

    if (note := await said(version)) is not None:
        return note
    before = range(version - 1, max(-1, version - NOTE_BACK), -1)
    return next((note for note in await asyncio.gather(*map(said, before)) if note is not None), "")


async def _replayed(store: Store, root: str, state: Snapshot, there: LogListing, until: int) -> Snapshot:
    missing = there.missing(state.version, until)
    if missing is not None:
        raise _gap(root, there, state.version, missing, until)
    base = there.base(until)
    mark = max(state.checkpoint, base.version if base is not None else -1)
    wanted = range(state.version + 1, until + 1)
    for begin in range(0, len(wanted), CHUNK):
        some = wanted[begin : begin + CHUNK]
        try:
            read = await checkpoint.objects(store, root, [f"{number:020d}.json" for number in some])
        except NotFound as error:
            raise _Moved(Corrupt(f"an entry of {root}/{LOG_FOLDER} is gone: {error.message}", key=root)) from error
        entries = [(int(name[:20]), decode(data, f"{root}/{LOG_FOLDER}/{name}")) for name, data in read.items()]
        state = apply_all(state, entries, f"{root}/{LOG_FOLDER}/{some[-1]:020d}.json")
    tail = sum(there.entries[number].size for number in wanted if number > mark)
    tail += state.tail_bytes if mark == state.checkpoint else 0
    return msgspec.structs.replace(state, checkpoint=mark, tail_bytes=tail)


def _gap(root: str, there: LogListing, after: int, missing: int, until: int) -> LakebedError:
    """Entries that were cleaned up leave a log that begins later; everything else that is missing is a loss."""
    begin = min((number for number in there.entries if number > after), default=None)
    first = min((each.version for each in there.checkpoints), default=None)
    if begin is not None and begin > missing and first is not None and first > until and after == -1:
        return NotFound(
            f"version {until} of {root} was cleaned up; the first that can be read is {first}",
            hint="delta.logRetentionDuration sets how long the log is kept",
        )
    if after == -1 and missing == 0:
        return Corrupt(f"the first entries of {root}/{LOG_FOLDER} are missing", key=root)
    return Corrupt(
        f"the entry of version {missing} is missing in {root}/{LOG_FOLDER}, and later ones are there", key=root
    )


class _Moved(Exception):
    """What was listed is gone; `why` is raised when it stays so."""

    def __init__(self, why: LakebedError) -> None:
        super().__init__(why.message)
        self.why = why


async def change(store: Store, root: str, version: int) -> VersionChange:
    """What this version did. Raises NotFound."""
    key = log_key(root, version)
    return change_of(version, decode((await store.get(key)).data, key))


async def brought(
    store: Store, root: str, after: int, until: int, *, joined: bool = False, versions: Collection[int] | None = None
) -> list[DataFile]:
    """The files that these versions brought, less those whose rows they took away again. Raises NotFound.

    A file that was only joined with others (no change of data) is read where it was. With `joined` it is read where
    its rows are now, beside rows of older versions: for a reader that knows its rows, after files were joined and
    changed again, or were joined so long ago that the old ones are gone. With `versions`, the files that these brought
    and what others did to them is not asked.
    """
    found: dict[str, DataFile] = {}
    for version in range(after + 1, until + 1) if versions is None else sorted(versions):
        key = log_key(root, version)
        for action in decode((await store.get(key)).data, key):
            add, remove = action.get("add"), action.get("remove")
            if add and (joined or add.get("dataChange", True)):
                found[identity_of(add["path"], add.get("deletionVector"))] = file_of(add)
            if remove and (joined or remove.get("dataChange", True)):
                found.pop(identity_of(remove["path"], remove.get("deletionVector")), None)
    return list(found.values())


def named(root: str, actions: Iterable[dict[str, Any]]) -> set[str]:
    """The keys of the data and change files that a log entry names."""
    found = (action.get(kind) for action in actions for kind in ("add", "remove", "cdc"))
    return {key_of(root, each["path"]) for each in found if each}


async def readable(store: Store, root: str, after: int, until: int, *, joined: bool = True) -> bool:
    """Whether the rows between these versions can still be read at `until`: its files may be swept, once others took
    their place, and log entries are cleaned up. A whole version is meant with `after` -1.
    """
    try:
        current = await snapshot(store, root)
        if joined and until == current.version:  # all its files are there; the log is cleaned up from its start
            if after >= 0:
                await change(store, root, after + 1)
            return True
        if after < 0:
            files = list((await snapshot(store, root, version=until)).files)
        else:
            files = await brought(store, root, after, until, joined=joined)
    except NotFound:
        return False
    kept = {file.path for file in current.files}
    gate = asyncio.Semaphore(checkpoint.PARALLEL)

    async def is_there(file: DataFile) -> bool:
        async with gate:
            try:
                await store.head(key_of(root, file.path))
            except NotFound:
                return False
        return True

    return all(await asyncio.gather(*(is_there(file) for file in files if file.path not in kept)))


async def committed(store: Store, root: str, before: Snapshot, data: bytes) -> Snapshot:
    """The table after the log entry `data`, which was just created on `before`. Raises nothing of the store's.

    The commit is final, so nothing after it may report it as failed: the caller would commit again.
    """
    key = log_key(root, before.version + 1)
    state = apply(before, before.version + 1, decode(data, key), key)
    state = msgspec.structs.replace(state, tail_bytes=before.tail_bytes + len(data))
    if not checkpoint.turn(state):
        return state
    try:
        return await checkpointed(store, root, state)
    except Exception as error:  # of the store, of delta-rs, of its files: whatever it is, the commit stands
        log.warning("a checkpoint was not written; readers replay the log", table=root, error=str(error)[:300])
        return state


async def checkpointed(store: Store, root: str, state: Snapshot) -> Snapshot:
    """Writes the checkpoint of this version, unless a later one than `state` knows of makes it needless."""
    hint = await checkpoint.last(store, root)
    there = await listing(store, root, after=hint)
    base = there.base(state.version)
    if base is None and hint >= 0:
        there = await listing(store, root)
        base = there.base(state.version)
    begin = base.version if base is not None else -1
    wanted = range(begin + 1, state.version + 1)
    known = msgspec.structs.replace(
        state,
        checkpoint=begin,
        tail_bytes=sum(there.entries[number].size for number in wanted if number in there.entries),
    )
    if not checkpoint.due(known):
        return known
    missing = there.missing(begin, state.version)
    if missing is not None:
        raise _gap(root, there, begin, missing, state.version)
    names = [*(base.names if base is not None else ()), *(f"{number:020d}.json" for number in wanted)]
    await checkpoint.write(store, root, state.version, names)
    return msgspec.structs.replace(state, checkpoint=state.version, tail_bytes=0)
