"""Reads a table's state from its log: the newest kept snapshot, then the versions after it.

Snapshots kept in `_lakebed/` are derived and only save time: without them the log is replayed from its first entry.
"""

from __future__ import annotations

import msgspec

from lakebed.core.errors import AlreadyExists, Corrupt, LakebedError, NotFound
from lakebed.core.logs import logger
from lakebed.delta.log import apply, change_of, decode, file_of, log_key
from lakebed.delta.model import DataFile, Snapshot, VersionChange, name_of
from lakebed.store.protocol import Store

log = logger("tables")

KEEP_EVERY = 16  # versions between two kept snapshots: what a cold read replays at most


async def snapshot(store: Store, root: str, *, version: int | None = None, known: Snapshot | None = None) -> Snapshot:
    """The table at `version`, or as it is now. `known` is any earlier snapshot to go on from.

    Raises NotFound for a version that does not exist (yet); a table without a log is at version -1.
    """
    usable = known is not None and (version is None or known.version <= version)
    state = known if usable and known is not None else await _kept(store, root, version)
    while version is None or state.version < version:
        key = log_key(root, state.version + 1)
        try:
            stored = await store.get(key)
        except NotFound:
            if version is not None:
                raise NotFound(f"{root} has no version {version}; its last is {state.version}") from None
            if state.version == -1 and await _log_begins_later(store, root):
                raise Corrupt(f"the first entries of {root}/_delta_log are missing", key=root) from None
            return state
        state = apply(state, state.version + 1, decode(stored.data, key), key)
    return state


async def change(store: Store, root: str, version: int) -> VersionChange:
    """What this version did. Raises NotFound."""
    key = log_key(root, version)
    return change_of(version, decode((await store.get(key)).data, key))


async def brought(store: Store, root: str, after: int, until: int) -> list[DataFile]:
    """The files that these versions brought, less those whose rows they took away again. Raises NotFound.

    A file that was only joined with others (no change of data) still counts: it is read where it was.
    """
    found: dict[str, DataFile] = {}
    for version in range(after + 1, until + 1):
        key = log_key(root, version)
        for action in decode((await store.get(key)).data, key):
            add, remove = action.get("add"), action.get("remove")
            if add and add.get("dataChange", True):
                found[name_of(add["path"])] = file_of(add)
            if remove and remove.get("dataChange", True):
                found.pop(name_of(remove["path"]), None)
    return list(found.values())


async def committed(store: Store, root: str, before: Snapshot, data: bytes) -> Snapshot:
    """The table after the log entry `data`, which was just created on `before`. Raises nothing of the store's.

    The commit is final, so nothing after it may report it as failed: the caller would commit again.
    """
    key = log_key(root, before.version + 1)
    state = apply(before, before.version + 1, decode(data, key), key)
    await keep(store, root, state)
    return state


async def keep(store: Store, root: str, state: Snapshot) -> None:
    """Keeps every sixteenth snapshot. Idempotent; two writers of one version write the same bytes."""
    if state.version > 0 and state.version % KEEP_EVERY == 0:
        try:
            await store.create(_kept_key(root, state.version), msgspec.json.encode(state, order="deterministic"))
        except AlreadyExists:
            return  # written by an older Lakebed, with other bytes; it only saves time
        except LakebedError as error:
            log.warning("a snapshot was not kept; readers replay the log", table=root, error=error.message)


async def _kept(store: Store, root: str, version: int | None) -> Snapshot:
    newest = ""
    async for info in store.list(f"{root}/_lakebed/"):
        if version is None or int(info.key.rsplit("/", 1)[-1].removesuffix(".json")) <= version:
            newest = info.key
    if not newest:
        return Snapshot()
    try:
        return msgspec.json.decode((await store.get(newest)).data, type=Snapshot)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return Snapshot()  # derived: replay the log instead


async def _log_begins_later(store: Store, root: str) -> bool:
    """Whether there are versions, but not the first. One that was created since it was looked for is there now."""
    first = log_key(root, 0)
    async for info in store.list(f"{root}/_delta_log/"):
        if info.key >= first:
            return info.key != first
    return False


def _kept_key(root: str, version: int) -> str:
    return f"{root}/_lakebed/{version:020d}.json"
