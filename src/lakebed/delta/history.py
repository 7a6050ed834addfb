"""Reads a table's state from its log: the newest kept snapshot, then the versions after it.

Snapshots kept in `_lakebed/` are derived and only save time: without them the log is replayed from its first entry.
"""

from __future__ import annotations

import msgspec

from lakebed.delta.log import apply, change_of, decode, log_key
from lakebed.delta.model import Change, Snapshot
from lakebed.errors import AlreadyExists, Corrupt, NotFound
from lakebed.store.protocol import Store

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
                raise Corrupt(f"the first entries of {root}/_delta_log are gone", key=root) from None
            return state
        state = apply(state, state.version + 1, decode(stored.data, key), key)
    return state


async def change(store: Store, root: str, version: int) -> Change:
    """What this version did. Raises NotFound."""
    key = log_key(root, version)
    return change_of(version, decode((await store.get(key)).data, key))


async def keep(store: Store, root: str, state: Snapshot) -> None:
    """Keeps every sixteenth snapshot. Idempotent; two writers of one version write the same bytes."""
    if state.version > 0 and state.version % KEEP_EVERY == 0:
        try:
            await store.create(_kept_key(root, state.version), msgspec.json.encode(state, order="deterministic"))
        except AlreadyExists:
            return  # an older Lakebed's way of writing it; it is only there to save time


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
    async for _ in store.list(f"{root}/_delta_log/"):
        return True
    return False


def _kept_key(root: str, version: int) -> str:
    return f"{root}/_lakebed/{version:020d}.json"
