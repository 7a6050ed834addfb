"""Vacuum of a table: deletes files that no version within the retention time refers to.

These are files that upserts, replaces and retention removed, and files of jobs that never committed. A file is deleted
only when it is older than the retention time itself, so a job that commits within that time loses nothing. Older
versions can no longer be read.

Only data files of this table are deleted: Parquet files at its root or in folders of partitions (`column=value`). The
log with its checkpoints, folders that start with `_` or `.`, other folders and tables inside this folder stay. A table
without a log, or whose log does not name the files of its oldest kept version, is not vacuumed.
"""

from __future__ import annotations

from collections.abc import Iterable

from lakebed.core.clock import Clock, now_ms
from lakebed.core.errors import Corrupt, Invalid, NotFound
from lakebed.delta import history
from lakebed.delta.log import LOG_FOLDER, decode, log_key
from lakebed.delta.model import key_of
from lakebed.store.model import ObjectInfo
from lakebed.store.protocol import Store

KEEP_S_MIN = 3600.0  # longer than any job between its first file and its commit
KEEP_S = 7 * 86_400.0  # longer than the lifetime of a message to silver, so that pinned versions stay readable
# The log does not show which files may be deleted: this table is skipped, others are vacuumed.
REFUSED = (Invalid, Corrupt, NotFound)
HIDDEN = ("_", ".")  # Delta ignores names that start with these


def checked(keep_s: float) -> float:
    """The retention time. Raises Invalid for one that would endanger writers."""
    if keep_s < KEEP_S_MIN:
        raise Invalid(f"{keep_s:.0f} s is less than writers need", hint=f"keep at least {KEEP_S_MIN:.0f} s")
    return keep_s


async def sweepable(store: Store, root: str, *, clock: Clock, keep_s: float = KEEP_S) -> list[ObjectInfo]:
    """The files that may be deleted. Changes nothing.

    Raises Invalid for a retention time that would endanger writers or a log that refers to files outside the table,
    Corrupt or NotFound for a log that cannot be read from the oldest kept version on.
    """
    before_ms = now_ms(clock) - int(checked(keep_s) * 1000)
    old: list[ObjectInfo] = []
    inner: set[str] = set()  # folders of tables inside this one
    async for info in store.list(f"{root}/"):
        folder, log, _ = info.key.removeprefix(f"{root}/").rpartition(f"/{LOG_FOLDER}/")
        if log:
            inner.add(f"{root}/{folder}/")
        elif info.modified_ms < before_ms and is_data(info.key.removeprefix(f"{root}/")):
            old.append(info)
    needed = await _needed(store, root, before_ms)
    if needed is None:
        return []
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
    """Whether a key below the root has the form of a data file's: Parquet, in folders of partitions at most."""
    *folders, last = name.split("/")
    return last.endswith(".parquet") and not last.startswith(HIDDEN) and all("=" in folder for folder in folders)


async def _needed(store: Store, root: str, before_ms: int) -> set[str] | None:
    """Every file of the version that was current at that moment, and of all versions since; None without a log."""
    versions = sorted(
        [
            (int(name.removesuffix(".json")), info.modified_ms)
            async for info in store.list(f"{root}/{LOG_FOLDER}/")
            if (name := info.key.rsplit("/", 1)[-1]).removesuffix(".json").isdigit()
        ]
    )
    if not versions:
        return None
    base = max((version for version, modified_ms in versions if modified_ms < before_ms), default=-1)
    needed: set[str] = set()
    if base >= 0:
        needed = {key_of(root, file.path) for file in (await history.snapshot(store, root, version=base)).files}
    elif versions[0][0] > 0:
        raise Corrupt(
            f"the log of {root} starts at version {versions[0][0]}: the files of earlier versions are not known",
            key=root,
        )
    for version, _ in versions:
        if version > base:
            key = log_key(root, version)
            for action in decode((await store.get(key)).data, key):
                if add := action.get("add"):
                    needed.add(key_of(root, add["path"]))
    return needed
