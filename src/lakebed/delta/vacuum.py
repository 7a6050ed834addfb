"""Sweeps a table's folder: files that no version within the kept time refers to.

These are what upserts, replaces and retention took out, and what jobs left that never committed. A file is swept only
when it is older than the kept time itself, so a job that commits within that time loses nothing. Versions older than
that can no longer be read.
"""

from __future__ import annotations

from urllib.parse import unquote

from lakebed.clock import Clock, now_ms
from lakebed.delta import history
from lakebed.delta.log import decode, log_key
from lakebed.errors import Invalid
from lakebed.store.protocol import Store

KEEP_S_MIN = 3600.0  # longer than any job between its first file and its commit
KEEP_S = 7 * 86_400.0  # longer than a message to silver lives, so that pinned versions stay readable


async def sweepable(store: Store, root: str, *, clock: Clock, keep_s: float = KEEP_S) -> list[str]:
    """The keys that may go. Changes nothing. Raises Invalid for a kept time that would endanger writers."""
    if keep_s < KEEP_S_MIN:
        raise Invalid(f"{keep_s:.0f} s is less than writers need", hint=f"keep at least {KEEP_S_MIN:.0f} s")
    before_ms = now_ms(clock) - int(keep_s * 1000)
    found = [info async for info in store.list(f"{root}/") if info.key.endswith(".parquet")]
    needed = await _needed(store, root, before_ms)
    return [
        info.key
        for info in found
        if info.modified_ms < before_ms and unquote(info.key.removeprefix(f"{root}/")) not in needed
    ]


async def sweep(store: Store, root: str, *, clock: Clock, keep_s: float = KEEP_S) -> int:
    """Deletes them; gives how many. Idempotent."""
    keys = await sweepable(store, root, clock=clock, keep_s=keep_s)
    for key in keys:
        await store.delete(key)
    return len(keys)


async def _needed(store: Store, root: str, before_ms: int) -> set[str]:
    """Every file of the version that stood at that moment, and of all versions since."""
    versions = [
        (int(name.removesuffix(".json")), info.modified_ms)
        async for info in store.list(f"{root}/_delta_log/")
        if (name := info.key.rsplit("/", 1)[-1]).removesuffix(".json").isdigit()
    ]
    old = [version for version, modified_ms in versions if modified_ms < before_ms]
    base = max(old, default=-1)
    needed = set()
    if base >= 0:
        needed = {unquote(file.path) for file in (await history.snapshot(store, root, version=base)).files}
    for version, _ in versions:
        if version > base:
            key = log_key(root, version)
            for action in decode((await store.get(key)).data, key):
                if add := action.get("add"):
                    needed.add(unquote(add["path"]))
    return needed
