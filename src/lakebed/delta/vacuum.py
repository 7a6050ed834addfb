"""Vacuum of a table: deletes files that no version within the retention time refers to.

These are files that upserts, replaces and retention removed, and files of jobs that never committed. A file is deleted
only when it is older than the retention time itself, so a job that commits within that time loses nothing. Older
versions can no longer be read.

Only data files of this table are deleted: Parquet files at its root or in folders of partitions (`column=value`), and
change files in `_change_data/`. The log with its checkpoints, other folders that start with `_` or `.`, other folders
and tables inside this folder stay. A table without a log, whose log does not name the files of its oldest kept version,
or that Lakebed may not write, is not vacuumed. The log itself has a clean-up of its own (`cleanup`).
"""

from __future__ import annotations

from collections.abc import Iterable

from lakebed.core.clock import Clock, now_ms
from lakebed.core.errors import Corrupt, Invalid, NotFound
from lakebed.delta import checkpoint, history
from lakebed.delta.history import LogListing
from lakebed.delta.log import LOG_FOLDER, decode
from lakebed.delta.model import Snapshot, key_of
from lakebed.delta.protocol import check_writable, seconds
from lakebed.store.model import ObjectInfo
from lakebed.store.protocol import Store

KEEP_S_MIN = 3600.0  # longer than any job between its first file and its commit
KEEP_S = 7 * 86_400.0  # longer than the lifetime of a message to silver, so that pinned versions stay readable
# The log does not show which files may be deleted: this table is skipped, others are vacuumed.
REFUSED = (Invalid, Corrupt, NotFound)
HIDDEN = ("_", ".")  # Delta ignores names that start with these
CHANGES = "_change_data"
RETENTION = "delta.deletedFileRetentionDuration"


def checked(keep_s: float) -> float:
    """The retention time. Raises Invalid for one that would endanger writers."""
    if keep_s < KEEP_S_MIN:
        raise Invalid(f"{keep_s:.0f} s is less than writers need", hint=f"keep at least {KEEP_S_MIN:.0f} s")
    return keep_s


def kept_s(state: Snapshot, keep_s: float) -> float:
    """How long this table keeps files that left it: as long as it says itself, if that is longer."""
    return max(keep_s, seconds(state.properties, RETENTION, keep_s))


async def sweepable(store: Store, root: str, *, clock: Clock, keep_s: float = KEEP_S) -> list[ObjectInfo]:
    """The files that may be deleted. Changes nothing.

    A table that keeps its files longer (delta.deletedFileRetentionDuration) is obeyed.
    Raises Invalid for a retention time that would endanger writers, a log that refers to files outside the table, or a
    table that Lakebed may not write; Corrupt or NotFound for a log that cannot be read.
    """
    keep_s = checked(keep_s)
    there = await history.listing(store, root)
    if there.newest < 0:
        return []
    state = await history.snapshot(store, root)
    check_writable(state, root)
    keep_s = kept_s(state, keep_s)
    if keep_s == float("inf"):
        return []  # an interval that we do not understand
    before_ms = now_ms(clock) - int(keep_s * 1000)
    old: list[ObjectInfo] = []
    inner: set[str] = set()  # folders of tables inside this one
    async for info in store.list(f"{root}/"):
        folder, log, _ = info.key.removeprefix(f"{root}/").rpartition(f"/{LOG_FOLDER}/")
        if log:
            inner.add(f"{root}/{folder}/")
        elif info.modified_ms < before_ms and is_data(info.key.removeprefix(f"{root}/")):
            old.append(info)
    needed = await _needed(store, root, there, before_ms)
    return [info for info in old if info.key not in needed and not any(map(info.key.startswith, inner))]


async def sweep(store: Store, root: str, *, clock: Clock, keep_s: float = KEEP_S) -> int:
    """Deletes them; gives how many. Idempotent. Raises what `sweepable` raises."""
    return await delete(store, await sweepable(store, root, clock=clock, keep_s=keep_s))


async def delete(store: Store, found: Iterable[ObjectInfo]) -> int:
    """Deletes what `sweepable` found. File names are never reused, so nothing else has these keys."""
    gone = 0
    for info in found:
        await store.delete(info.key)
        gone += 1
    return gone


def is_data(name: str) -> bool:
    """Whether a key below the root has the form of a data file's: Parquet, in folders of partitions at most.

    Change files have a folder of their own around these.
    """
    *folders, last = name.removeprefix(f"{CHANGES}/").split("/")
    return last.endswith(".parquet") and not last.startswith(HIDDEN) and all("=" in folder for folder in folders)


async def _needed(store: Store, root: str, there: LogListing, before_ms: int) -> set[str]:
    """Every file of the version that was current at that moment, and of all versions since.

    Where another writer cleaned the log up behind that version, the oldest one that can be read stands for it, with the
    files that its checkpoint remembers as removed since.
    """
    base = max((version for version, info in there.entries.items() if info.modified_ms < before_ms), default=-1)
    needed, begin = set[str](), -1
    if base >= 0 or there.missing(-1, there.newest) is not None:
        state, removed = await _oldest(store, root, there, base, before_ms)
        needed, begin = {key_of(root, file.path) for file in state.files} | removed, state.version
    for version in range(begin + 1, there.newest + 1):
        key = there.entries[version].key
        for action in decode((await store.get(key)).data, key):
            if named := action.get("add") or action.get("cdc"):
                needed.add(key_of(root, named["path"]))
    return needed


async def _oldest(store: Store, root: str, there: LogListing, wanted: int, before_ms: int) -> tuple[Snapshot, set[str]]:
    """The table at the wanted version, or at the first one after it that can still be read."""
    first = there.base(wanted) if wanted >= 0 else None
    if (wanted >= 0 and there.missing(-1, wanted) is None) or (
        first is not None and there.missing(first.version, wanted) is None
    ):
        return await history.snapshot(store, root, version=wanted), set()
    later = [each for each in there.checkpoints if each.version > wanted]
    if not later:
        raise Corrupt(f"the log of {root} begins later: the files of version {wanted} are not known", key=root)
    state = await history.at_checkpoint(store, root, later[0])
    if (gap := there.missing(state.version, there.newest)) is not None:
        raise Corrupt(f"the entry of version {gap} is missing in the log of {root}", key=root)
    inside = await checkpoint.content(store, root, later[0], removes=True)
    removes = [action["remove"] for action in inside.actions if action.get("remove")]
    return state, {
        key_of(root, remove["path"]) for remove in removes if remove.get("deletionTimestamp", before_ms) >= before_ms
    }
