"""Sweeps a table's folder: files that no version within the kept time refers to.

These are what upserts, replaces and retention took out, and what jobs left that never committed. A file is swept only
when it is older than the kept time itself, so a job that commits within that time loses nothing. Versions older than
that can no longer be read.

Only data files of this table are swept: Parquet files at its root or in folders of partitions (`column=value`). The
log with its checkpoints, folders that begin with `_` or `.`, other folders and tables inside this folder stay. A table
without a log, or whose log does not say which files its oldest kept version has, is not swept.
"""

from __future__ import annotations

from collections.abc import Iterable

from lakebed.clock import Clock, now_ms
from lakebed.delta import history
from lakebed.delta.log import LOG_FOLDER, decode, log_key
from lakebed.delta.model import key_of
from lakebed.errors import Corrupt, Invalid, NotFound
from lakebed.store.model import ObjectInfo
from lakebed.store.protocol import Store

KEEP_S_MIN = 3600.0  # longer than any job between its first file and its commit
KEEP_S = 7 * 86_400.0  # longer than a message to silver lives, so that pinned versions stay readable
REFUSED = (Invalid, Corrupt, NotFound)  # this table's log does not say what may go; other tables are swept
HIDDEN = ("_", ".")  # how names begin that Delta keeps apart from data


def checked(keep_s: float) -> float:
    """The kept time, or Invalid for one that would endanger writers."""
    if keep_s < KEEP_S_MIN:
        raise Invalid(f"{keep_s:.0f} s is less than writers need", hint=f"keep at least {KEEP_S_MIN:.0f} s")
    return keep_s


async def sweepable(store: Store, root: str, *, clock: Clock, keep_s: float = KEEP_S) -> list[ObjectInfo]:
    """The files that may go. Changes nothing.

    Raises Invalid for a kept time that would endanger writers and for a log that refers to files outside the table,
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
    """Deletes what `sweepable` found. Files have fresh names, so nothing else lies under these keys."""
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
    """Every file of the version that stood at that moment, and of all versions since; None without a log."""
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
            f"the log of {root} begins at version {versions[0][0]}: the files of earlier versions are not known",
            key=root,
        )
    for version, _ in versions:
        if version > base:
            key = log_key(root, version)
            for action in decode((await store.get(key)).data, key):
                if add := action.get("add"):
                    needed.add(key_of(root, add["path"]))
    return needed
